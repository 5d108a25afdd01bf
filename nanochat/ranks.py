"""
Ranks: the processes of one launch, and what they tell each other besides gradients.

    on_rank0(f)     rank 0: f() --value or error--> all        reading and writing the run directory
    agree(f)        all: f() --who failed?--> all              what may fail on some machines or on all of them
    same(d)         all: d == rank 0's d?                      what all must have been started with
    gather(x)       all: x --list--> rank 0;  gather_all: to all
    broadcast(s)    rank 0: a state of tensors --> all         what only rank 0's machine can read

Every error reaches all ranks, so that no rank waits for one that has given up. One of them says what it was: rank 0,
where people look, and it names rank and host where the trouble is not everyone's:

    rank 0   a file is there         "rank 1 on host b: x.bin: no such file"      exit 1
    rank 1   the file is missing     nothing                                      exit 1

An exception that is no bad input is a bug: the first rank that has it raises it, with its traceback. All of these
are collective, and plain calls in a single process. Errors of one rank between collectives are the watchdog's.
"""

import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nanochat.checkpoint import map_tensors
from nanochat.common import get_dist_info

T = TypeVar("T")
NAMED = 8  # so many ranks are named, the others counted


def on_rank0(function: Callable[[], T]) -> T:
    """Collective. `function()` runs on rank 0 alone; all ranks get its value. Where it raises, rank 0 raises that and
    the others leave with exit code 1 and no noise."""
    _, rank, _, world_size = get_dist_info()
    if world_size == 1:
        return function()
    box: list[Any] = [None, None]
    error: Exception | None = None
    if rank == 0:
        try:
            box[0] = function()
        except Exception as e:
            error, box[1] = e, True
    dist.broadcast_object_list(box, src=0)
    if error is not None:
        raise error
    if box[1]:
        raise SystemExit(1)
    return box[0]


def agree(function: Callable[[], T]) -> T:
    """Collective. `function()` on every rank, for what may fail on any of them, such as a bad flag or a missing file.
    Where it raises, all leave: rank 0 with its own error, or with a ValueError that names ranks and host; the others
    with exit code 1. What is neither ValueError nor OSError is raised by the first rank that has it."""
    _, rank, _, world_size = get_dist_info()
    if world_size == 1:
        return function()
    error: Exception | None = None
    try:
        value = function()
    except Exception as e:
        error = e
    told = None if error is None else (socket.gethostname(), str(error), isinstance(error, (ValueError, OSError)))
    failed = {r: t for r, t in enumerate(gather_all(told)) if t is not None}
    if not failed:
        return value
    bugs = [r for r, (_, _, expected) in failed.items() if not expected]
    if error is not None and rank == (bugs[0] if bugs else 0) and (bugs or len(failed) == world_size):
        raise error
    if rank == 0 and not bugs:
        host, text, _ = next(iter(failed.values()))
        alike = [r for r, (h, t, _) in failed.items() if (h, t) == (host, text)]
        more = f" ({len(failed) - len(alike)} more of {world_size} failed too)" if len(failed) > len(alike) else ""
        raise ValueError(f"{_named(alike)} on host {host}: {text}{more}") from error
    raise SystemExit(1)


def same(settings: Mapping[str, Any]) -> None:
    """Collective. ValueError on rank 0, exit code 1 elsewhere, unless all ranks have the same settings: plain values
    by the names their flags have."""
    everyone = gather_all((socket.gethostname(), dict(settings)))
    theirs = everyone[0][1]

    def compare() -> None:
        for rank, (host, mine) in enumerate(everyone):
            differing = [k for k in sorted(theirs.keys() | mine.keys()) if theirs.get(k) != mine.get(k)]
            if differing:
                told = "; ".join(f"{k} is {theirs.get(k)!r} on rank 0, {mine.get(k)!r} on rank {rank} on host {host}"
                                 for k in differing)
                raise ValueError(f"the processes of this launch were started differently: {told}; start all with the "
                                 f"same flags, the same files under the same paths, and the same tokenizer")

    on_rank0(compare)


def _named(ranks: list[int]) -> str:
    """'rank 1, 3'."""
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"rank {', '.join(map(str, ranks[:NAMED]))}{more}"


def gather(value: T) -> list[T]:
    """Collective. All ranks' values in rank order, on rank 0; [] on the others."""
    _, rank, _, world_size = get_dist_info()
    if world_size == 1:
        return [value]
    everyone: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(value, everyone)
    return everyone or []


def gather_all(value: T) -> list[T]:
    """Collective. All ranks' values in rank order, on every rank."""
    world_size = get_dist_info()[3]
    if world_size == 1:
        return [value]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, value)
    return everyone


def broadcast(state: Any) -> Any:
    """Collective. Rank 0's plain state (see nanochat/checkpoint.py) on every rank, its tensors on the CPU, one after
    another. What the other ranks pass does not matter. Rank 0 gets its own tensors back and copies none of them, but
    those that are not contiguous, one at a time."""
    _, rank, _, world_size = get_dist_info()
    if world_size == 1:
        return state
    frame = map_tensors(state, lambda t, _: _like(t, "meta"), "state") if rank == 0 else None
    box = [frame]
    dist.broadcast_object_list(box, src=0)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"

    def move(tensor: torch.Tensor, _: str) -> torch.Tensor:
        sent = tensor.detach().to(device).contiguous() if rank == 0 else _like(tensor, device)
        if sent.numel():
            dist.broadcast(sent.view(-1).view(torch.uint8), src=0)  # bytes: backends do not know every dtype
        return tensor if rank == 0 else sent.cpu()

    return map_tensors(state if rank == 0 else box[0], move, "state")


def _like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """An empty tensor of that shape and dtype, contiguous whatever the other's strides."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
