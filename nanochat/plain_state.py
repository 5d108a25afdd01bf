"""
Plain states: nested dicts, lists and tuples of tensors, numbers, strings and None, and nothing else.

    live state on the device --to_host--> the same in host memory --save_plain--> file --load_plain--> the same

What is plain can be read back without executing anything (torch.load with weights_only=True), so anything else is
refused when it is written, with the place where it lies, and not when it is needed.

**One copy, used again and again.** A copy that nobody will change may be written by a thread while training goes on.
Fresh memory for it costs more than copying: the system hands it out page by page, zeroed. So `to_host(value,
into=previous)` fills the tensors of the copy before, where names, shapes and types agree:

    save 1   to_host(state)            allocates   A            thread writes A ...... done
    save 2   to_host(state, into=A)    fills       A                                        thread writes A ...
    wrong    to_host(state, into=A)    fills       A while it is being written

The caller sees to it that nobody reads `previous` any more; `saving.Saver.wait` waits for that. Two copies in turn
would never wait, and cost every machine the memory of the rare save that is slower than the time between two.
"""

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch


def to_host(value: Any, *, into: Any = None) -> Any:
    """A deep copy of a plain state with every tensor in host memory, contiguous; pinned where it comes from CUDA.

    Later steps do not change it. Tensors of `into`, an earlier result that nobody reads any more, are filled where one
    of the same name, shape and dtype is there, and then are part of this result. All copies are complete at return.
    TypeError, naming the place, for a value that is not plain.
    """
    old: dict[str, torch.Tensor] = {}
    map_tensors(into, lambda t, where: old.setdefault(where, t), "state")
    streams: set[torch.cuda.Stream] = set()

    def copy(tensor: torch.Tensor, where: str) -> torch.Tensor:
        tensor = tensor.detach()
        held = old.get(where)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if tensor.is_cuda:
            streams.add(torch.cuda.current_stream(tensor.device))
        return held.copy_(tensor, non_blocking=tensor.is_cuda)

    copied = map_tensors(value, copy, "state")
    for stream in streams:
        stream.synchronize()
    return copied


def map_tensors(value: Any, function: Callable[[torch.Tensor, str], torch.Tensor], where: str) -> Any:
    """Rebuild a plain state, `function(tensor, place)` in place of its tensors; TypeError for anything not plain.
    `where` names the state in places such as "state['w'][0]"."""
    if isinstance(value, torch.Tensor):
        return function(value, where)
    if isinstance(value, dict):
        return {k: map_tensors(v, function, f"{where}[{k!r}]") for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(v, function, f"{where}[{i}]") for i, v in enumerate(value))
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    raise TypeError(f"{where}: a checkpoint holds tensors and plain values, got {type(value).__name__}")


def save_plain(state: Any, file: Any, where: str) -> None:
    """torch.save a plain state to a file that needs no more than write and flush. TypeError, beginning with `where`,
    for a value that is not plain."""
    torch.save(map_tensors(state, lambda tensor, _: tensor.detach(), where), cast(IO[bytes], file))


def load_plain(file: Path, *, mapped: bool = False) -> Any:
    """What `save_plain` wrote, on the CPU, executing nothing. `mapped`: tensors are views of the file, read when they
    are looked at. ValueError for anything but tensors and plain values."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as e:  # broken archives raise struct.error, EOFError, RuntimeError, UnpicklingError, ...
        raise ValueError(f"{file}: refused, it holds something other than tensors and plain values, or is broken; "
                         f"use another checkpoint ({type(e).__name__})") from e
