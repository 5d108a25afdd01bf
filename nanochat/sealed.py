"""
Sealed folders: files whose every byte can be checked, and whose absence of a whole seal means "never finished".

    folder/
      a.bin  sub/b.json    any files
      trainer_state.json   the seal: {..., "files": {"a.bin": {"bytes", "blake2b"}, ...}, "checksum"}; written last

`checksum` is the BLAKE2b of the seal's own bytes with zeros in the checksum's place, so the seal vouches for all files
and for itself:

    {"step": 7, "files": {...}, "checksum": "00000000"}  --BLAKE2b-->  9f3c..  --put in place-->  "checksum": "9f3c.."

Sums are taken of what goes to the file, not of what comes back from it: a disk that stores other bytes is found out.
Every file is fsynced, then the folders; the caller renames the folder to its name. A list of checksums beside the
files, as sha256sum makes it, would do for the files, but then who vouches for the list?

Nothing here executes what it reads, and a seal that a stranger wrote can do no more than be refused.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nanochat.common import fsync_dir, hash_bytes, hash_file

SEAL_NAME = "trainer_state.json"
NO_CHECKSUM = "0" * 32
SEAL_KEYS = ("files", "checksum")


# ---- writing --------------------------------------------------------------------------------------------------------

class HashedFile:
    """A write-only file that sums up what goes through it. An OSError is kept until `finish` instead of raised at once:
    torch.save's C++ writer must not be left by an exception halfway."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._hash = hashlib.blake2b(digest_size=16)
        self._bytes = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write and hash; the first error is kept for `finish`, and what comes after it is dropped."""
        num_bytes = memoryview(data).nbytes
        if self._error is not None:
            return num_bytes
        try:
            self._raw.write(data)
        except OSError as e:
            self._error = e
        self._hash.update(data)
        self._bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        """torch.save calls it; `finish` does it."""

    def finish(self) -> dict[str, Any]:
        """Force all to disk; returns the size and checksum. Raises the OSError of any write."""
        if self._error is not None:
            raise self._error
        self._raw.flush()
        os.fsync(self._raw.fileno())
        return {"bytes": self._bytes, "blake2b": self._hash.hexdigest()}


class SealedFolder:
    """A new folder being filled; remembers size and checksum of each file in it. `seal` ends it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, dict[str, Any]] = {}
        path.mkdir()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[HashedFile]:
        """Open a new file of the folder for writing; it is on disk, and listed, at the end of the block."""
        (self.path / name).parent.mkdir(exist_ok=True)
        with open(self.path / name, "xb") as raw:
            file = HashedFile(raw)
            yield file
            self.files[name] = file.finish()

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write one file."""
        with self.open(name) as f:
            f.write(data)

    def put_json(self, name: str, value: Any) -> None:
        """Write one file of indented JSON."""
        self.put_bytes(name, _json_bytes(value))

    def seal(self, head: dict[str, Any]) -> None:
        """Write the seal, `head` in it, and make the names of all files durable. TypeError for what is not JSON."""
        state = {**head, "files": self.files, "checksum": NO_CHECKSUM}
        self.put_bytes(SEAL_NAME, _json_bytes({**state, "checksum": hash_bytes(_json_bytes(state))}))
        for folder in sorted({(self.path / name).parent for name in self.files}, reverse=True):
            fsync_dir(folder)


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


# ---- reading --------------------------------------------------------------------------------------------------------

def read_seal(path: Path) -> dict[str, Any]:
    """The seal of the folder `path`, whole, its own checksum verified and its list of files well-formed.
    FileNotFoundError if there is none, ValueError if it is torn, rotten or of something else; both name the file."""
    file = path / SEAL_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing, so this checkpoint was never finished")
    raw = file.read_bytes()
    try:
        state = json.loads(raw)
        checksum = state["checksum"].encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise ValueError(f"{file}: torn or rotten (not a whole JSON object with a checksum)") from e
    blank = raw.replace(checksum, NO_CHECKSUM.encode()) if checksum else raw
    if hash_bytes(blank).encode() != checksum:
        raise ValueError(f"{file}: rotten (its bytes do not have the checksum it states)")
    if not _well_formed(state.get("files")):
        raise ValueError(f"{file}: not a seal of this program (its list of files has another form)")
    return state


def _well_formed(files: Any) -> bool:
    """Whether `files` is {relative name inside the folder: {"bytes": int, "blake2b": str}}."""
    return isinstance(files, dict) and all(
        isinstance(record, dict) and type(record.get("bytes")) is int and isinstance(record.get("blake2b"), str)
        and not Path(name).is_absolute() and ".." not in Path(name).parts for name, record in files.items())


def check_file(path: Path, name: str, record: dict[str, Any]) -> None:
    """Compare one file of a sealed folder with its record in the seal. FileNotFoundError for a missing file, ValueError
    for a torn or rotten one; the message begins with the file's path."""
    file = path / name
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing")
    size = file.stat().st_size
    if size != record["bytes"]:
        raise ValueError(f"{file}: torn ({size:,} bytes on disk, {record['bytes']:,} were written)")
    if hash_file(file) != record["blake2b"]:
        raise ValueError(f"{file}: rotten (its bytes do not have the checksum in {SEAL_NAME})")


def unsealed_files(path: Path, seal: dict[str, Any]) -> list[str]:
    """Files in the folder that its seal does not list, by their relative names: nobody vouches for them."""
    there = {str(p.relative_to(path)) for p in path.rglob("*") if not p.is_dir() or p.is_symlink()}
    return sorted(there - seal["files"].keys() - {SEAL_NAME})
