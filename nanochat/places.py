"""
Where data lie: one kind of path for folders on disk and for prefixes in a store.

    place("/data/web")         a pathlib.Path as ever
    place("s3://b/set/web")    a StorePath: a pathlib.Path too, which looks into the store

        exists, is_file, is_dir, rglob, stat     answered by a listing that is made once (`begin` forgets it)
        open("rb"), read_bytes                   byte ranges (`remote.RemoteFile`)
        local(path)                              the file itself, or a local copy of the object: indices, manifests
        str, name, parent, /, relative_to ...    as for any path

So what finds, opens and pins files is written once. A path is text in settings and manifests, and becomes one of these
where it is used; whoever opens files asks nothing but `local` (for what is mapped), `open`, and
`readers.open_reader`, which reads a .bin from where it lies.

The listing is what "list once" means: a `Stat` with size and ETag of each object, for the whole launch. All reads carry
its ETag, so an object that is swapped after it was listed is an error naming it, not a second version. Looking at each
file when it is needed was rejected: a request a file, and versions that need not fit together.
"""

import io
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath
from typing import Any

from nanochat import remote
from nanochat.remote import AnyPath, RemoteFile, Stat, is_remote

SEVERAL = re.compile(r",\w+:/")
FETCHES = 16  # objects whose local copies are made at once


class _Known:
    """What is known of the store in this launch."""

    def __init__(self) -> None:
        self.cache: str | None = None
        self.below: dict[str, dict[str, Stat]] = {}  # by folder: all objects below it
        self.single: dict[str, Stat | None] = {}  # objects looked at one by one
        self.copies: dict[Stat, Path] = {}
        self.lock = threading.RLock()


_known = _Known()


def begin(cache: Path | str | None = None) -> None:
    """A launch begins: look anew, and keep local copies below `cache` (default: <base dir>/object_storage)."""
    with _known.lock:
        _known.cache = None if cache is None else str(cache)
        _known.below.clear()
        _known.single.clear()
        _known.copies.clear()


def place(path: AnyPath) -> Path:
    """A path of data, wherever it lies."""
    if isinstance(path, StorePath):
        return path
    return StorePath(path) if is_remote(path) else Path(path)


class StorePath(PosixPath):
    """A path in object storage. Whatever writes is not offered."""

    def __str__(self) -> str:
        return remote.url(super().__str__())

    def __fspath__(self) -> str:
        return str(self)

    def is_dir(self, **_: Any) -> bool:
        """Whether there are objects below it."""
        return next(self._below(), None) is not None

    def is_file(self, **_: Any) -> bool:
        """Whether it is an object."""
        return self._look() is not None

    def exists(self, **_: Any) -> bool:
        """Whether it is an object, or there are some below it."""
        return self.is_dir() or self.is_file()

    def rglob(self, pattern: str, **_: Any) -> Iterator["StorePath"]:  # type: ignore[override]
        """The objects below it whose names match."""
        found = map(StorePath, self._below())
        return (path for path in found if path.match(pattern))

    def stat(self, **_: Any) -> os.stat_result:
        """Its size, in a form that others understand. FileNotFoundError if it is not there."""
        return os.stat_result((0o100444, 0, 0, 1, 0, 0, stat_of(self).size, 0, 0, 0))

    def open(self, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        """The object, to be read as bytes, `buffering` at once if that is given."""
        if mode != "rb":
            raise ValueError(f"{self}: opened with mode {mode!r}; objects in a store are only read, as bytes")
        file = RemoteFile(str(self), stat=stat_of(self))
        return io.BufferedReader(file, buffering) if buffering > 1 else file

    def resolve(self, strict: bool = False) -> "StorePath":
        return self

    absolute = expanduser = resolve

    def mkdir(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"{self}: nothing is written there; name a folder of this machine")

    def _below(self) -> Iterator[str]:
        start = f"{str(self).rstrip('/')}/"
        if SEVERAL.search(start) or len(self.parts) == 1:  # "s3:" has the buckets below it: nobody lists them
            return iter(())
        with _known.lock:
            listed = self._listing((self, *self.parents))
            if listed is None:
                listed = _known.below[str(self)] = {s.path: s for s in remote.list_files(self)}
        return (path for path in listed if path.startswith(start))

    def _look(self) -> Stat | None:
        with _known.lock:
            listed = self._listing(self.parents)
            if listed is not None:
                return listed.get(str(self))
            if SEVERAL.search(str(self)) or _known.below.get(str(self)):
                return None  # several prefixes, or a folder
            if str(self) not in _known.single:
                _known.single[str(self)] = remote.find(self) if remote.split(self)[2] else None
            return _known.single[str(self)]

    @staticmethod
    def _listing(folders: Sequence[Path]) -> dict[str, Stat] | None:
        return next((_known.below[str(f)] for f in folders if str(f) in _known.below), None)


def here(path: AnyPath, what: str) -> Path:
    """A path of this machine. ValueError, which begins with `what`, for one in a store."""
    if is_remote(path):
        raise ValueError(f"{what} {place(path)}: expected a folder of this machine; scripts.push_shards puts what "
                         f"was made into a store, and the store's own tools fetch what is there")
    return Path(path)


def stat_of(path: Path) -> Stat:
    """An object as it was when this launch first looked. FileNotFoundError if it was not there."""
    assert isinstance(path, StorePath)
    stat = path._look()
    if stat is None:
        raise FileNotFoundError(f"{path}: no such object")
    return stat


def etag_of(path: Path) -> dict[str, str]:
    """{"etag": ...} of an object, {} for a file: what pins it beside its size and footer."""
    return {"etag": stat_of(path).etag} if isinstance(path, StorePath) else {}


def local(path: Path) -> Path:
    """A file itself, or a local copy of an object. FileNotFoundError if it is not there."""
    if not isinstance(path, StorePath):
        return path
    stat = stat_of(path)
    copy = _known.copies.get(stat)
    if copy is None or not copy.exists():
        copy = _known.copies[stat] = remote.fetch_index(str(path), _known.cache, stat=stat)
    return copy


def fetch(paths: Iterable[Path]) -> None:
    """Make local copies of those of some objects that are there, several at once."""
    there = [path for path in paths if isinstance(path, StorePath) and path.is_file()]
    if there:
        with ThreadPoolExecutor(FETCHES) as pool:
            list(pool.map(local, there))
