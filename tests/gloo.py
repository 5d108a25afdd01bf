"""Real gloo processes: one function on every rank, with one or several numbers of processes."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import training


def _process(
    rank: int, function: Callable[[int, int], Any], world_sizes: Sequence[int], folder: Path
) -> None:
    torch.set_num_threads(1)
    for W in world_sizes:
        if rank >= W:
            continue
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(W)} if W > 1 else {}
        with mock.patch.dict(os.environ, env):
            if W > 1:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder}/store-{W}",
                    rank=rank,
                    world_size=W,
                    timeout=timedelta(seconds=training.PATIENCE_S),
                )
            torch.save(function(rank, W), folder / f"{W}-{rank}.pt")
            if W > 1:
                dist.destroy_process_group()


def on_ranks(
    function: Callable[[int, int], Any],
    world_sizes: Sequence[int],
    folder: Path,
    *,
    start_method: str = "forkserver",
) -> dict[int, list[Any]]:
    """{W: the values of `function(rank, W)` on its ranks}. One set of processes serves all W."""
    training.server()  # imports torch once for all processes
    mp.start_processes(
        _process,
        (function, world_sizes, folder),
        nprocs=max(world_sizes),
        start_method=start_method,
    )
    return {
        W: [torch.load(folder / f"{W}-{rank}.pt", weights_only=True) for rank in range(W)]
        for W in world_sizes
    }
