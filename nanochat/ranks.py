"""
Ranks: the processes of one launch, and what they tell each other besides gradients.

    on_rank0(f)     rank 0: f() --value or error--> all        reading and writing the run directory
    agree(f)        all: f() --who failed?--> all              what may fail on some ranks or on all, such as a flag
    gather(x)       all: x --list--> rank 0;  gather_all: to all
    broadcast(s)    rank 0: a state of tensors --> all         what only rank 0's machine can read

Every error reaches all ranks, so that no rank waits for one that has given up; one of them says what it was. All of
these are collective, and plain calls in a single process.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nanochat.common import get_dist_info
from nanochat.plain_state import map_tensors

T = TypeVar("T")


def on_rank0(function: Callable[[], T]) -> T:
    """Collective. `function()` runs on rank 0 alone; all ranks get its value. Where it raises ValueError or OSError,
    rank 0 raises that and the others leave with exit code 1 and no noise."""
    _, rank, _, world_size = get_dist_info()
    if world_size == 1:
        return function()
    box: list[Any] = [None, None]
    error: Exception | None = None
    if rank == 0:
        try:
            box[0] = function()
        except (ValueError, OSError) as e:
            error, box[1] = e, str(e)
    dist.broadcast_object_list(box, src=0)
    if error is not None:
        raise error
    if box[1] is not None:
        raise SystemExit(1)
    return box[0]


def agree(function: Callable[[], T]) -> T:
    """Collective. `function()` on every rank, for what may fail on all of them alike, such as a bad flag. Where it
    raises ValueError or OSError, all leave: the first rank where it did raises that, the others have exit code 1."""
    _, rank, _, world_size = get_dist_info()
    if world_size == 1:
        return function()
    error: Exception | None = None
    try:
        value = function()
    except (ValueError, OSError) as e:
        error = e
    failed: list[bool | None] = [None] * world_size
    dist.all_gather_object(failed, error is not None)
    if error is not None and failed.index(True) == rank:
        raise error
    if any(failed):
        raise SystemExit(1)
    return value


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
    """Collective. Rank 0's plain state (see nanochat/plain_state.py) on every rank, its tensors on the CPU, one after
    another. What the other ranks pass does not matter."""
    _, rank, _, world_size = get_dist_info()
    if world_size == 1:
        return state
    frame = map_tensors(state, lambda t, _: torch.empty_like(t, device="meta"), "state") if rank == 0 else None
    box = [frame]
    dist.broadcast_object_list(box, src=0)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"

    def move(tensor: torch.Tensor, _: str) -> torch.Tensor:
        sent = tensor.to(device).contiguous() if rank == 0 else torch.empty_like(tensor, device=device)
        dist.broadcast(sent, src=0)
        return tensor if rank == 0 else sent.cpu()

    return map_tensors(state if rank == 0 else box[0], move, "state")
