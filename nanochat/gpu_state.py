"""
What the GPUs of a launch are doing: where to look for a slow rank, a hang, or memory.

    every 100 steps   event "ranks" in the log: each rank's own time in a step, clock and power
    out of memory     RUN/memory-rank0.pickle, for pytorch.org/memory_viz
    --profile-steps   RUN/profile/memory-A-B.pickle, which also shows which lines allocated what
    a hang            RUN/nccl-rank0.pickle: NCCL's flight recorder, the newest collectives of each rank
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanochat.dist import gather_all

RANKS_EVERY = 100  # steps


def log_ranks(run: Any, began: float) -> None:
    """Collective, before the ranks wait for each other: log how long each took for its own rows of a step that began
    at a time.perf_counter, and the clock and power of its GPU."""
    device, state = run.loader.device, dict[str, float]()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with contextlib.suppress(Exception):  # nvidia-ml-py is missing, or the driver does not say
            state = {"clock_mhz": torch.cuda.clock_rate(device), "power_w": torch.cuda.power_draw(device) / 1000}
    run.journal.event("ranks", ranks=gather_all({"own_s": time.perf_counter() - began, **state}))


def write_memory(run_dir: Path, rank: int) -> str:
    """Write what is allocated on this GPU; returns the end of a sentence, empty if it cannot be written."""
    path = run_dir / f"memory-rank{rank}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception as e:  # it must not hide why the run ends
        return f"; {path} could not be written ({e})"
    return f"; {path} shows what was allocated (pytorch.org/memory_viz)"


def write_collectives(run_dir: Path, rank: int) -> None:
    """Write NCCL's flight recorder, if this launch has one."""
    with contextlib.suppress(Exception):  # the process is about to end, with its own sentence
        if dist.get_backend() == "nccl":
            backend: Any = torch._C._distributed_c10d
            (run_dir / f"nccl-rank{rank}.pickle").write_bytes(backend._dump_nccl_trace())
