"""
Readers: the ids of a file of tokens, wherever the file lies.

    MappedReader   memory map          read() is a view and costs nothing; the default
    PreadReader    pread, no map       for file systems on which page faults stall or a truncated file must not kill
    RemoteReader   object storage      byte ranges over HTTP (store.py)

All three are an `IdReader`: read-only elements begin .. end - 1, by one range or by many. Whoever reads asks `mapped`
once: what is not mapped is worth reading ahead, in another thread, and in stretches as long as can be.

NANOCHAT_READER=pread in the environment takes the second for all files. It is a property of a machine, not of a run,
so it is no flag: which reader gives the ids changes no row.
"""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from nanochat.common import in_store

ENVIRONMENT = "NANOCHAT_READER"
NEAR_IDS = 1 << 14  # what a read may take along unasked, to be one instead of two
Range = tuple[int, int]  # begin, end


class IdReader(Protocol):
    """The ids of one file. Every method may be called from several threads at once."""

    mapped: bool  # whether read() is free, so that nobody need do it ahead

    def read(self, begin: int, end: int) -> np.ndarray:
        """Elements begin .. end - 1 of the file, (end - begin,), read-only. ValueError or OSError naming the file
        where they cannot be had."""

    def read_many(self, ranges: Sequence[Range]) -> list[np.ndarray]:
        """`read` of each range, in their order; neighbours are read together."""

    def will_need(self, ranges: Sequence[Range]) -> None:
        """Ranges that `read` will be asked for soon; returns at once."""

    def close(self) -> None:
        """Give back what is held open; arrays that were given out stay."""


def map_file(path: Path) -> Any:
    """A file as a read-only buffer. Arrow's map stays when its file is closed; Python's would keep a descriptor for
    each file, and a process has 1,024."""
    with pa.memory_map(str(path), "r") as f:
        return f.read_buffer()


class MappedReader:
    """The ids of a memory map: views."""

    mapped = True

    def __init__(self, path: Path, dtype: np.dtype):
        data = map_file(path)
        self._ids = np.frombuffer(data, dtype, data.size // dtype.itemsize)

    def read(self, begin: int, end: int) -> np.ndarray:
        """A view of elements begin .. end - 1."""
        return self._ids[begin:end]

    def read_many(self, ranges: Sequence[Range]) -> list[np.ndarray]:
        """Views."""
        return [self._ids[begin:end] for begin, end in ranges]

    def will_need(self, ranges: Sequence[Range]) -> None:
        """Nothing to do: the kernel reads ahead."""

    def close(self) -> None:
        """Nothing to do: the map goes with its last view."""


class PreadReader:
    """The ids of a file that is read, not mapped. It stays open from the first read, so a file renamed over it changes
    nothing; one that is truncated is a ValueError."""

    mapped = False

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype = path, dtype
        self._file: int | None = None
        self._lock = threading.Lock()

    def _open(self) -> int:
        with self._lock:
            if self._file is None:
                try:
                    self._file = os.open(self.path, os.O_RDONLY)
                except OSError as e:
                    if e.errno != errno.EMFILE:
                        raise
                    raise OSError(f"{self.path}: cannot be opened, this process has as many files open as it may; raise"
                                  f" the limit (ulimit -n), or leave out {ENVIRONMENT}=pread") from e
            return self._file

    def read(self, begin: int, end: int) -> np.ndarray:
        """Elements begin .. end - 1, in memory of their own."""
        ids = np.empty(max(0, end - begin), self.dtype)
        view, at, file = ids.view(np.uint8).data, 0, self._open()
        while at < len(view):
            n = os.preadv(file, [view[at:]], begin * self.dtype.itemsize + at)
            if n == 0:
                raise ValueError(f"{self.path}: it ends before id {end:,}, which its index promises; the file was cut "
                                 f"short after it was opened: bring it back")
            at += n
        ids.flags.writeable = False
        return ids

    def read_many(self, ranges: Sequence[Range]) -> list[np.ndarray]:
        """Elements of each range; views where ranges were read together."""
        return read_near(self.read, ranges)

    def will_need(self, ranges: Sequence[Range]) -> None:
        """Nothing to do: the kernel reads ahead."""

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    __del__ = close


def read_near(read: Callable[[int, int], np.ndarray], ranges: Sequence[Range], *, near: int = NEAR_IDS
              ) -> list[np.ndarray]:
    """`IdReader.read_many` by `read`: ranges, in any order, that lie at most `near` ids apart are one read."""
    found: list[np.ndarray] = [np.empty(0)] * len(ranges)
    run: list[int] = []
    stop = 0

    def finish() -> None:
        if run:
            first = ranges[run[0]][0]
            ids = read(first, stop)
            for i in run:
                found[i] = ids[ranges[i][0] - first:ranges[i][1] - first]
            run.clear()

    for i in sorted(range(len(ranges)), key=ranges.__getitem__):
        if run and ranges[i][0] > stop + near:
            finish()
        stop = max(stop, ranges[i][1]) if run else ranges[i][1]
        run.append(i)
    finish()
    return found


def is_mapped(path: Path) -> bool:
    """Whether `open_reader` maps a file. ValueError if the environment names no reader."""
    if in_store(path):
        return False
    kind = os.environ.get(ENVIRONMENT) or "mmap"
    if kind not in ("mmap", "pread"):
        raise ValueError(f"{ENVIRONMENT}={kind}: expected mmap or pread")
    return kind == "mmap"


def open_reader(path: Path, dtype: np.dtype, *, mapped: bool | None = None) -> IdReader:
    """The reader of a file of ids that this process should use; `mapped`: which of the two for a file on disk."""
    if in_store(path):
        from nanochat.store import StoreReader

        class RemoteReader(StoreReader):
            mapped = False

            def will_need(self, ranges: Sequence[Range]) -> None: ...

            def close(self) -> None: ...

        return RemoteReader(path, dtype)  # type: ignore[arg-type]
    return (MappedReader if (is_mapped(path) if mapped is None else mapped) else PreadReader)(path, dtype)
