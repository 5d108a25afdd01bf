"""
Objects in a store as files: what is there, their bytes, a local copy of an index, a file to read parquet from.

    s3://bucket/train/web/a.idx  --fetch_index-->  CACHE/bucket/train/web/a.idx        mapped like any local index
    s3://bucket/train/web/a.bin  --byte ranges-->  block_cache.RemoteReader
    s3://bucket/train/a.parquet  --RemoteFile--->  pyarrow: footer and row groups as byte ranges

An object is pinned by a `Stat`: path, size and ETag. Every range is asked for with If-Match, and the answer's own ETag,
size, range and length are held against what was asked. So bytes of two versions of an object never mix, not even where
a store or a proxy ignores If-Match: an object that changed is an error that names it.

Paths are text, s3:// gs:// az:// msc://. A pathlib.Path made of one (which loses a slash) is understood as well, so
names can be put together either way; `url` gives it back whole. Nothing is imported and nothing is asked before the
first remote path is used. Retries, time-outs and log lines are patience.py's, refusals object_client.py's.
"""

import contextlib
import fcntl
import functools
import io
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from nanochat import patience
from nanochat.common import atomic_open, get_base_dir, read_json, write_json
from nanochat.object_client import Changed, Client, Found, Transient, open_client
from nanochat.patience import Question

SCHEMES = ("s3", "gs", "az", "msc")
PART_BYTES = 4 << 20  # the largest range that is asked for at once
PARTS_AHEAD = 8  # of a file that is read from end to end
TAIL_BYTES = 1 << 18  # of a RemoteFile, read together: a parquet footer, mostly
KEPT_TAILS = 128  # 32 MB
GONE = "bring the old object back, or start a new run (--model-tag)"
T = TypeVar("T")
AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Stat:
    """An object as it was when somebody looked."""

    path: str
    size: int
    etag: str  # "" where the store has none


@dataclass
class Traffic:
    """Ranges asked for by this process so far, and bytes that came."""

    requests: int = 0
    bytes: int = 0


traffic = Traffic()
_lock = threading.Lock()


# ---- paths ----------------------------------------------------------------------------------------------------------

_REMOTE = re.compile(rf"({'|'.join(SCHEMES)}):(/|$)")


def is_remote(path: AnyPath) -> bool:
    """Whether a path names an object in a store."""
    return _REMOTE.match(os.fspath(path)) is not None


def url(path: AnyPath) -> str:
    """A remote path, or several with commas between them, as text with the two slashes that a pathlib.Path loses."""
    return re.sub(rf"(^|,)({'|'.join(SCHEMES)}):(/+|$)", r"\1\2://", os.fspath(path))


def split(path: AnyPath) -> tuple[str, str, str]:
    """(scheme, bucket, key) of a remote path. ValueError for another path or one without a bucket."""
    if re.match(r"\w+:/+[^/]*@", url(path)):
        raise ValueError("a path of object storage with @ in its bucket: credentials do not belong into a path, which "
                         "is logged; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    match = re.fullmatch(rf"({'|'.join(SCHEMES)})://([^/]+)/*(.*)", url(path), re.DOTALL)
    if match is None:
        raise ValueError(f"{url(path)}: expected {'://BUCKET/KEY, '.join(SCHEMES)}://BUCKET/KEY")
    return match[1], match[2], match[3]


def join(path: AnyPath, *names: str) -> str:
    """Names below a remote path."""
    return "/".join([url(path).rstrip("/"), *names])


# ---- asking ---------------------------------------------------------------------------------------------------------

def _client(path: AnyPath, *, upload: bool = False) -> tuple[Client, str]:
    """(client of the bucket, key)."""
    scheme, bucket, key = split(path)
    how_long = patience.PATIENCE
    silence_s = how_long.upload_s if upload else how_long.silence_s
    return open_client(scheme, bucket, connect_s=how_long.connect_s, silence_s=silence_s), key


def _ask(path: AnyPath, question: Callable[[Client, str], T], *, upload: bool = False) -> T:
    client, key = _client(path, upload=upload)
    return Question(url(path), lambda: question(client, key)).answer()


def ask_range(stat: Stat, begin: int, end: int) -> Question[memoryview]:
    """Bytes begin .. end - 1 of an object as it was when `stat` was made, on their way. Answers with a ValueError where
    the object is another one by now, with FileNotFoundError where it is gone."""
    client, key = _client(stat.path)

    def ask() -> memoryview:
        """The request, with what the errors mean here."""
        try:
            part = client.get(key, begin, end, stat.etag)
        except Changed:
            raise ValueError(f"{stat.path}: it changed since this run began (ETag {stat.etag} then); {GONE}") from None
        except FileNotFoundError as e:
            raise FileNotFoundError(f"{e}: this run reads it; {GONE}") from None
        with _lock:
            traffic.requests += 1
            traffic.bytes += len(part.data)
        _refuse_other(stat, part.found)
        if (part.begin, len(part.data)) != (begin, end - begin):
            raise Transient(f"it sent {len(part.data):,} bytes from {part.begin:,} for {end - begin:,} from {begin:,}")
        return part.data

    return Question(f"{stat.path} bytes {begin:,} to {end:,}", ask)


def _refuse_other(stat: Stat, found: Found) -> None:
    for name, then, now in (("size", stat.size, found.size), ("ETag", stat.etag, found.etag)):
        if then != now:
            raise ValueError(f"{stat.path}: it changed since this run began ({name} {then} then, {now} now); {GONE}")


def iter_parts(stat: Stat, begin: int, end: int) -> Iterator[memoryview]:
    """Bytes begin .. end - 1 in parts, one after another, some of them asked for ahead."""
    waiting: deque[Question[memoryview]] = deque()
    for first in range(begin, end, PART_BYTES):
        waiting.append(ask_range(stat, first, min(first + PART_BYTES, end)))
        if len(waiting) == PARTS_AHEAD:
            yield waiting.popleft().answer()
    while waiting:
        yield waiting.popleft().answer()


# ---- objects --------------------------------------------------------------------------------------------------------

def find(path: AnyPath) -> Stat | None:
    """Look at an object; None where it is not there. FileNotFoundError where its bucket is not."""
    def ask(client: Client, key: str) -> Found | None:
        try:
            return client.head(key)
        except FileNotFoundError:
            if not client.worked:
                client.list(key)  # raises: a HEAD does not tell a missing bucket from a missing object
            return None
    found = _ask(path, ask)
    return None if found is None else Stat(url(path), found.size, found.etag)


def head(path: AnyPath) -> Stat:
    """Look at an object. FileNotFoundError where it, or its bucket, is not there."""
    stat = find(path)
    if stat is None:
        raise FileNotFoundError(f"{url(path)}: no such object")
    return stat


def list_files(prefix: AnyPath) -> list[Stat]:
    """All objects below a path, sorted by path; none where nothing is there. FileNotFoundError without a bucket."""
    scheme, bucket, _ = split(prefix)
    found = _ask(prefix, lambda client, key: client.list(key.rstrip("/")))
    return sorted((Stat(f"{scheme}://{bucket}/{f.key}", f.size, f.etag) for f in found), key=lambda s: s.path)


def read_bytes(path: AnyPath, begin: int = 0, end: int | None = None, *, stat: Stat | None = None) -> bytes:
    """Bytes begin .. end - 1 (default: to the end) of an object. Errors as of `ask_range`; ValueError outside it."""
    stat = stat or head(path)
    end = stat.size if end is None else end
    if not 0 <= begin <= end <= stat.size:
        raise ValueError(f"{stat.path}: bytes {begin:,} to {end:,} wanted, it has {stat.size:,}")
    return b"".join(iter_parts(stat, begin, end))


def write(path: AnyPath, data: bytes | Callable[[], BinaryIO], *, part_bytes: int = 4 * PART_BYTES) -> None:
    """Put an object there, whole or not at all. `data` is its bytes, or opens a file, anew for each try, that is sent
    in parts."""
    def ask(client: Client, key: str) -> None:
        if isinstance(data, bytes):
            client.put(key, data, part_bytes)
        else:
            with data() as f:
                client.put(key, f, part_bytes)
    _ask(path, ask, upload=True)


def delete(path: AnyPath) -> None:
    """Remove an object, if it is there."""
    _ask(path, lambda client, key: client.delete(key))


# ---- local copies ---------------------------------------------------------------------------------------------------

def fetch_index(path: AnyPath, cache: Path | str | None = None, *, stat: Stat | None = None) -> Path:
    """A local copy of an object, at CACHE/BUCKET/KEY (default CACHE: <base dir>/object_storage). It is fetched if the
    copy there is of another ETag or size. Processes of one machine that want the same wait for the first of them.

    Beside it .NAME.json says which object it is a copy of: taken away before a new copy appears, written after.
    """
    stat = stat or head(path)
    _, bucket, key = split(stat.path)
    copy = Path(cache or get_base_dir() / "object_storage") / bucket / key
    note = copy.with_name(f".{copy.name}.json")
    wanted = {"size": stat.size, "etag": stat.etag}
    copy.parent.mkdir(parents=True, exist_ok=True)
    with _alone(copy.with_name(f".{copy.name}.lock"), stat.path):
        if not (note.exists() and copy.is_file() and copy.stat().st_size == stat.size and _read_note(note) == wanted):
            note.unlink(missing_ok=True)
            with atomic_open(copy) as f:
                for part in iter_parts(stat, 0, stat.size):
                    f.write(part)
            write_json(note, wanted)
    return copy


def _read_note(note: Path) -> Any:
    with contextlib.suppress(ValueError):
        return read_json(note)
    return None


@contextlib.contextmanager
def _alone(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock file; a wait for another process is told."""
    with open(lock, "w") as f:
        began, told = time.monotonic(), patience.PATIENCE.log_after_s
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - began > told:
                    patience.log.warning("%s: waiting for %.0f s for another process that fetches it", what, told)
                    told += patience.PATIENCE.log_every_s
                time.sleep(0.05)
        yield


# ---- files ----------------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=KEPT_TAILS)
def _tail(stat: Stat, begin: int) -> bytes:
    return read_bytes(stat.path, begin, stat=stat)


class RemoteFile(io.RawIOBase):
    """An object as a file that pyarrow reads: each read is a byte range (a long one several at once), the last
    TAIL_BYTES are read together, and kept for the KEPT_TAILS files used last: each row group begins at the footer."""

    def __init__(self, path: AnyPath, *, stat: Stat | None = None):
        super().__init__()
        self.stat = stat or head(path)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self.stat.size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self.stat.size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[:len(data)] = data
        return len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        """So many bytes from where it stands, or all that are left."""
        end = self.stat.size if size is None or size < 0 else min(self._at + size, self.stat.size)
        begin, self._at = self._at, max(self._at, end)
        if begin >= end:
            return b""
        tail = max(0, self.stat.size - TAIL_BYTES)
        if begin < tail:
            return read_bytes(self.stat.path, begin, end, stat=self.stat)
        return _tail(self.stat, tail)[begin - tail:end - tail]

    def readall(self) -> bytes:
        return self.read()


def near_runs(ranges: Sequence[tuple[int, int]], *, gap: int, longest: int) -> list[list[int]]:
    """Which of some ranges (begin, end) are read together: indices in runs, ascending by begin. Neighbours at most
    `gap` apart join, unless the run would be over `longest`."""
    runs: list[list[int]] = []
    first = stop = 0
    for i in sorted(range(len(ranges)), key=ranges.__getitem__):
        begin, end = ranges[i]
        if runs and begin <= stop + gap and max(stop, end) - first <= longest:
            runs[-1].append(i)
            stop = max(stop, end)
        else:
            runs.append([i])
            first, stop = begin, end
    return runs
