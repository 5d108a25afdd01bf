"""Where a mirror lies: a folder, or object storage.

    names       {name: bytes} of the files in one of its folders
    read        a small file, with its version
    parts       the content of a file of any size
    write       a file, complete or not at all
    swap        a small file, only if it still has the version that was read: of several writers, one succeeds
    delete      a file

A version is whatever tells two states of a file apart: the ETag of an object, the content of a file
in a folder.
"""

import fcntl
import io
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from nanochat.common import (
    as_local_path,
    atomic_open,
    is_remote,
    make_folder,
    open_door,
    reason_of,
    refuse_secrets,
    remove_leftovers,
    write_bytes,
)
from nanochat.run_dir import open_regular

# the door for object storage
BUCKET = "nanochat.integrations.mirror_bucket:Bucket"
FOLDERS = ("marks", "pieces")
PART_BYTES = 1 << 20
LOCK_S = 10.0  # how long another process may hold a folder's lock


class Versioned(NamedTuple):
    """A small file as it was read."""

    content: bytes
    version: object


class Store(Protocol):
    """A place for a mirror. All methods raise OSError if the place cannot be reached or is full,
    and PermissionError if it denies access; the message begins with the place."""

    where: str  # for messages

    def names(self, folder: str) -> dict[str, int]:
        """{name: bytes} of the files in a folder; {} if it does not exist."""

    def read(self, name: str) -> Versioned:
        """A small file. FileNotFoundError if it does not exist."""

    def parts(self, name: str) -> Iterator[bytes | memoryview]:
        """The content of a file, in order. FileNotFoundError if it does not exist."""

    def write(self, name: str, content: BinaryIO) -> None:
        """Write a file, which appears when it is complete. `content`: read from its beginning."""

    def swap(self, name: str, content: bytes, before: Versioned | None) -> Versioned | None:
        """Write a small file if it is still as it was read; `before` is None if it did not exist.
        Returns what was written, None if the file has changed."""

    def delete(self, name: str) -> None:
        """Delete a file, which need not exist."""

    def check(self, name: str) -> None:
        """ValueError if the place ignores the condition of `swap`. The file exists, and this
        launch owns it."""


def open_store(where: str, *, make: bool = True) -> Store:
    """The place that --mirror-to names; without `make`, to read what may be there. ValueError or
    OSError if it cannot hold a mirror."""
    refuse_secrets(where)
    if is_remote(where):
        return open_door(BUCKET)(where)
    return Folder(as_local_path(where, "--mirror-to"), make=make)


class Folder:
    """A mirror in a local folder, such as one on a second disk or on NFS. Only its last part is
    made: a missing parent is usually a disk that is not mounted."""

    def __init__(self, path: Path, *, make: bool = True) -> None:
        self.path = path.expanduser().absolute()
        self.where = f"--mirror-to={self.path}"
        if not self.path.parent.is_dir():
            raise ValueError(
                f"{self.where}: the folder {self.path.parent} does not exist; mount its disk, or make it"
            )
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.where}: it is a file; name a folder")
        if not make:
            return
        try:
            for folder in (self.path, *(self.path / name for name in FOLDERS)):
                make_folder(folder)
                remove_leftovers(folder)
        except OSError as e:
            raise self._explained(e) from None

    def _explained(self, e: OSError) -> OSError:
        """The error with the folder and what to do."""
        sentence = (
            f"{self.where}: cannot be written ({reason_of(e)}); allow writing there, free some space, or name "
            f"another folder"
        )
        kind = PermissionError if isinstance(e, PermissionError) else OSError
        return kind(sentence)

    def names(self, folder: str) -> dict[str, int]:
        found = {}
        with os.scandir(self.path / folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    found[entry.name] = entry.stat().st_size
        return found

    def read(self, name: str) -> Versioned:
        content = (self.path / name).read_bytes()
        return Versioned(content, content)

    def parts(self, name: str) -> Iterator[bytes | memoryview]:
        with open(self.path / name, "rb") as file:
            while part := file.read(PART_BYTES):
                yield part

    def write(self, name: str, content: BinaryIO) -> None:
        content.seek(0)
        try:
            with atomic_open(self.path / name) as file:
                shutil.copyfileobj(content, file, PART_BYTES)
        except OSError as e:
            raise self._explained(e) from None

    def swap(self, name: str, content: bytes, before: Versioned | None) -> Versioned | None:
        """See `Store.swap`: the folder's lock is held from the comparison to the end of the write."""
        path = self.path / name
        with self._lock() as _:
            now = path.read_bytes() if path.exists() else None
            if now != (before and before.content):
                return None
            try:
                write_bytes(path, content)
            except OSError as e:
                raise self._explained(e) from None
        return Versioned(content, content)

    def _lock(self) -> BinaryIO:
        """The folder's lock, held until the file is closed. It must reach all machines that share
        the folder. ValueError if the file system has no locks."""
        try:
            file = open_regular(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        except OSError as e:
            raise self._explained(e) from None
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if time.monotonic() > end:
                    file.close()
                    raise OSError(
                        f"{self.where}: another process has held its lock for {LOCK_S:.0f} s"
                    ) from None
                time.sleep(0.02)
            except OSError as e:
                file.close()
                raise ValueError(
                    f"{self.where}: this file system has no locks ({reason_of(e)}), so two machines could own "
                    f"the run; mount it with locks, or name a folder elsewhere"
                ) from None

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def check(self, name: str) -> None:
        """A lock was taken, so a file system has locks."""


def as_file(content: bytes) -> BinaryIO:
    """Bytes as the content of a file to write."""
    return io.BytesIO(content)
