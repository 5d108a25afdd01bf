"""
The index cache: arrays that are dear to compute, kept on disk, and believed only when their checksum is right.

    DIR/<key>-GPTDataset-train-document_index.npy          the array, as numpy.save writes it
    DIR/<key>-GPTDataset-train-document_index.npy.json     its type, shape and BLAKE2b, written before it

The key is a hash of everything that the array is computed from, so what is stored under a name never changes: whoever
writes it writes the same bytes. That makes many processes on many nodes safe without a lock and without waiting: each
looks, computes what is absent or broken, and renames its own copy into place. Two that do the same work at once lose
some seconds of one core; nobody waits for a rank that died.

An array is read through a memory map after all of it was hashed once (about a second for a gigabyte). One without its
.json, or that differs from it, is torn: a warning names it, it is computed and written again.

Rejected: rank 0 builds, the others wait at a barrier (a time-out when rank 0 takes long or the file system is slow to
show the file); locks on a network file system.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from nanochat.common import atomic_open, read_json, write_json

log = logging.getLogger(__name__)


def _sum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _record(array: np.ndarray) -> dict[str, object]:
    """What .json says of an array."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return {"version": 1, "dtype": array.dtype.str, "shape": list(array.shape),
            "blake2b": hashlib.blake2b(data, digest_size=16).hexdigest()}


def load(path: Path | str) -> np.ndarray | None:
    """The array at `path`, mapped and read-only, after its checksum was compared; None if there is none, or (with a
    warning) if it is torn or cannot be read."""
    path = Path(path)
    if not path.exists():
        return None
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if _record(array) == read_json(_sum_path(path)):
            return array
        why = "it is not what its checksum says"
    except (OSError, ValueError, EOFError) as e:
        why = str(e)
    log.warning("%s: cannot be used (%s); it is computed again", path, why)
    return None


def store(path: Path | str, array: np.ndarray) -> None:
    """Write the checksum and then the array, both atomically: where there is an array, there is a checksum. A disk
    that is full or read-only is a warning: the run has the array in memory."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(_sum_path(path), _record(array))
        with atomic_open(path) as f:
            np.save(f, array, allow_pickle=False)
    except OSError as e:
        log.warning("%s: not stored (%s); it will be computed again next time", path, e)


def cached(paths: Sequence[Path], build: Callable[[], tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """The arrays at `paths`, mapped, so that all processes of a machine share them; where one is not there or torn, all
    are built and that one is stored. In memory only where the disk would not take them."""
    found = [load(path) for path in paths]
    if any(array is None for array in found):
        built = build()
        for i, path in enumerate(paths):
            if found[i] is None:
                store(path, built[i])
                mapped = load(path)
                found[i] = built[i] if mapped is None else mapped
    return tuple(array for array in found if array is not None)
