"""What the paths of object storage, the Hub and web servers share: files that are elsewhere, each in
the state in which a launch first saw it."""

import io
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

from nanochat.common import Remote, Stop, atomic_open, check_stop, get_base_dir, hash_json

REQUEST_BYTES = 4 << 20  # the largest range of one request
TRIES = 5  # attempts to get an answer that fits the request
PROXY = "bypass the proxy that changes requests between this machine and the server"


class Changed(ValueError):
    """The file is not the pinned version any more."""


class Garbled(OSError):
    """The answer does not fit the request, or the server cannot answer it just now. A retry may
    help."""


def poll() -> None:
    """Raise Stop if the program should stop, or ends."""
    check_stop()
    # At exit Python joins the threads of pools before it calls anything that could stop them.
    if getattr(threading, "_SHUTTING_DOWN", False):
        raise Stop("the program ends")


class PinnedPath(Remote):
    """A path whose files are read in ranges. A subclass finds and reads them."""

    copies: ClassVar[str]  # the folder of local copies, below the base directory

    def pinned(self) -> Any:
        """What is known about the file, with `size` and `etag`. FileNotFoundError if it does not
        exist."""
        raise NotImplementedError

    def read(self, begin: int, end: int) -> bytes:
        """Bytes begin .. end - 1."""
        return self.read_of(self.pinned(), begin, end)

    def read_of(self, file: Any, begin: int, end: int) -> bytes:
        """`read` of a file that was `pinned`, perhaps by an earlier launch."""
        raise NotImplementedError

    def pieces(self) -> Iterable[bytes | memoryview]:
        """All bytes, in order."""
        raise NotImplementedError

    def copy_folder(self) -> Sequence[str]:
        """The folder of its copies, below that of all copies."""
        raise NotImplementedError

    def stat(self) -> os.stat_result:
        """The size, and the mode of a read-only file."""
        return os.stat_result((0o100444, 0, 0, 1, 0, 0, self.pinned().size, 0, 0, 0))

    def etag(self) -> str:
        return self.pinned().etag

    def open(self, mode: Literal["rb"], buffering: int = -1) -> BinaryIO:
        """See `Remote.open`. If ranges stay on disk and there is no buffering, each read is one
        range."""
        raw: Any = RangeFile(self)
        if buffering == 0 and self.keeps_ranges:
            return raw
        return io.BufferedReader(raw, max(buffering, io.DEFAULT_BUFFER_SIZE))

    def local_copy(self, cache: Path | str | None = None) -> Path:
        """A local copy. Its name begins with a hash of size and version, so another version's copy is
        never used, and processes that copy at the same time write the same bytes."""
        file = self.pinned()
        folder = Path(cache or get_base_dir() / self.copies, *self.copy_folder())
        copy = folder / f"{hash_json([file.size, file.etag])[:12]}-{self.name}"
        if not copy.is_file() or copy.stat().st_size != file.size:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_open(copy) as f:
                f.writelines(self.pieces())
        return copy


class RangeFile(io.RawIOBase):
    """A file as a binary file, in which each read fetches one range."""

    def __init__(self, path: PinnedPath) -> None:
        super().__init__()
        self.path = path
        self.file = path.pinned()
        self._at = 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self.file.size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        begin = self._at
        end = min(begin + len(buffer), self.file.size)
        if begin >= end:
            return 0
        buffer[: end - begin] = self.path.read_of(self.file, begin, end)
        self._at = end
        return end - begin
