"""Helpers that many modules share: the base directory, masking of secrets, how a wait ends, data
paths, files that a crash cannot leave half-written, JSON, hashes, formatting of output, and random
permutations.

Importing it is fast and has no side effects. Environment variables are read when a function is
called (`NANOCHAT_BASE_DIR`, default ~/.cache/nanochat, and torchrun's `RANK`, `LOCAL_RANK`,
`WORLD_SIZE`). Functions that need PyTorch are in nanochat/dist.py, because it takes seconds to
import and many commands and workers do without it.
"""

import contextlib
import contextvars
import fcntl
import hashlib
import importlib
import itertools
import json
import os
import re
import secrets
import sys
import threading
import time
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple, TypedDict, TypeVar

import numpy as np

A = TypeVar("A")
B = TypeVar("B")

WRITABLE_BASE = "; set NANOCHAT_BASE_DIR to a folder that you can write to"


# ---- places -------------------------------------------------------------------------------------


def get_base_dir() -> Path:
    """The folder for data, tokenizers and runs: $NANOCHAT_BASE_DIR or ~/.cache/nanochat, created if
    it does not exist. OSError if it cannot be created."""
    base = as_local_path(
        os.environ.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat", "NANOCHAT_BASE_DIR"
    ).expanduser()
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OSError(
            f"{base}: the base directory cannot be created ({reason_of(e)}){WRITABLE_BASE}"
        ) from None
    return base


# ---- secrets ------------------------------------------------------------------------------------
#
# A URL may hold credentials: in its user information, https://USER:PASSWORD@host, or in its query,
# ?sig=... Such a URL is refused on input, so that nothing stores it, and masked in messages from
# libraries.

SCHEME = "[A-Za-z][A-Za-z0-9+.-]*:/+"
URL = re.compile(rf"({SCHEME})([^/\s?]*@|[^@\s?]*:[^@\s?]*@)?([^\s?]*)(\?\S*)?")
MAY_BE_SECRET = re.compile(rf"(^|[=,]|^-\w){SCHEME}([^/]*@|[^@]*:[^@]*@|[^?]*\?)")


def public(text: str) -> str:
    """`text`, with the user information and queries of its URLs masked."""
    if "@" not in text and "?" not in text:
        return text
    return URL.sub(
        lambda url: f"{url[1]}{'***@' * bool(url[2])}{url[3]}{'?***' * bool(url[4])}", text
    )


def may_be_secret(word: str) -> bool:
    """Whether a path or command-line word is a URL with user information or a query, or has such a
    URL after a comma, an equals sign or a short flag."""
    # the first test is fast, even for a word that lists a thousand paths
    return ("@" in word or "?" in word) and MAY_BE_SECRET.search(word) is not None


def refuse_secrets(word: str) -> None:
    """ValueError, without showing the secret, if a word `may_be_secret`."""
    if may_be_secret(word):
        flag = re.match(r"--[\w-]+(?==)", word)
        where = f"{flag[0]}: " if flag else ""
        raise ValueError(
            f"{where}a URL with user information (@) or a query (?): credentials do not belong in a path, "
            "which is logged; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or HF_TOKEN"
        )


# ---- doors --------------------------------------------------------------------------------------
#
# Code that only some runs need enters through a table that names it: kinds of data files
# (`sources.SOURCES`), packers (`packing.LAYOUTS`), orders (`order.ORDERS`), tokenizers
# (`tokenizer.TOKENIZERS`), and what receives the log's values (`sinks.SINKS`). The rest of
# the program does not know what is behind a door.


def open_door(entry: str) -> Any:
    """The part that an entry "module:attribute" of such a table names, imported now.
    ModuleNotFoundError if there is no such module."""
    module, _, attribute = entry.partition(":")
    return getattr(importlib.import_module(module), attribute)


# ---- stopping -----------------------------------------------------------------------------------
#
# A launch may be asked to stop while some thread of it waits, many calls below the code that knows
# about signals: for object storage, for a decoder, for another process. So whom a wait asks comes
# with the call, as a parameter of everything below would:
#
#     with stops_if(guard.asked):                        a launch
#         each(read, files) .. check_stop()              its waits, also in threads that `each` starts
#         with stops_if(closed):                         a loader asks more in its own threads
#             Thread(target=copy_context().run, ...)
#     check_stop()                                       outside, nobody asks to stop
#
# Rejected: a parameter. From a launch to its waits it would pass through the methods of a path, a
# source, a token file and a stream, in 45 places of 12 modules.


class Stop(Exception):
    """Ends the run before its horizon. `status`: "stopped" on request, "halted" if a person must
    decide how to continue. `all_dry`: it halts because every bucket is used up, not just one.

    A wait raises this in one thread. All ranks then end together: after the same step, or by
    `dist.on_all_ranks` and `dist.gather_results`."""

    def __init__(self, reason: str, status: str = "stopped", *, all_dry: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.all_dry = all_dry


_why_stop: contextvars.ContextVar[Callable[[], str]] = contextvars.ContextVar(
    "why_stop", default=lambda: ""
)


def stop_reason() -> str:
    """Why this thread should stop waiting; '' if it should not."""
    return _why_stop.get()()


def check_stop() -> None:
    """Raise Stop if there is a reason to. Every wait calls this about ten times a second."""
    if reason := stop_reason():
        raise Stop(reason)


@contextlib.contextmanager
def stops_if(reason: Callable[[], str]) -> Iterator[None]:
    """Inside the context, waits also end if `reason()` is not ''. Any thread may call it."""
    outer = _why_stop.get()
    token = _why_stop.set(lambda: outer() or reason())
    try:
        yield
    finally:
        _why_stop.reset(token)


def join_reasons(reasons: Sequence[str]) -> str:
    """The first of all ranks' reasons to stop (in rank order, '' for none): 'walltime: ..',
    'SIGUSR1', or 'SIGTERM (rank 1)' if not all ranks got a signal."""
    rank, first = next(((rank, reason) for rank, reason in enumerate(reasons) if reason), (0, ""))
    is_signal = first.startswith("SIG")
    return f"{first} (rank {rank})" if is_signal and not all(reasons) else first


# ---- paths of data ------------------------------------------------------------------------------
#
# Data is in local folders or in object storage, below a path such as s3://bucket/train.

# the door for object storage: {how a path begins: "module:function"}, which makes a `Remote`
STORAGE = {
    **dict.fromkeys(("s3", "gs", "az", "msc"), "nanochat.integrations.object_storage:open_path"),
    **dict.fromkeys(("http", "https"), "nanochat.integrations.web:open_path"),
    "hf": "nanochat.integrations.hub:open_path",
}
DATA_CACHE_GB = 10.0  # what fetched ranges may take on disk, in billions of bytes


class Remote(PurePosixPath):
    """A read-only file or folder in object storage: a file if it is an object, a folder if objects
    exist below it. Its name is taken apart like any path's. The methods below are all that code may
    ask of it, so mypy refuses the others of pathlib.Path. OSError if object storage does not answer
    or denies access. A subclass may leave out the last ones, which begin with `resolve`.
    """

    cache_bytes = int(DATA_CACHE_GB * 1e9)  # of this launch; see `begin_launch`
    keeps_ranges = False  # whether what was read of a file stays on this machine

    def __str__(self) -> str:
        return url(super().__str__())

    __fspath__ = __str__

    def is_file(self) -> bool:
        """Whether it is an object."""
        raise NotImplementedError

    def is_dir(self) -> bool:
        """Whether objects exist below it."""
        raise NotImplementedError

    def exists(self) -> bool:
        """Whether it is either."""
        return self.is_dir() or self.is_file()

    def stat(self) -> os.stat_result:
        """The size of an object. FileNotFoundError if it does not exist."""
        raise NotImplementedError

    def open(self, mode: Literal["rb"], buffering: int = -1) -> BinaryIO:
        """An object as a binary file, which requests at least `buffering` bytes at once."""
        raise NotImplementedError

    def walk(self) -> "Iterator[Remote]":
        """All objects below it."""
        raise NotImplementedError

    def etag(self) -> str:
        """What changes when an object does."""
        raise NotImplementedError

    def local_copy(self, cache: Path | str | None = None) -> Path:
        """A copy of an object on this machine, see `local_copy`. Its name ends with the object's."""
        raise NotImplementedError

    def open_reader(self, dtype: np.dtype) -> Any:
        """A `nanochat.tokens.Reader` of an object's elements."""
        raise NotImplementedError

    def resolve(self) -> "Remote":
        """The path that stays the same when a name moves, as a branch does; else itself."""
        return self

    def is_fixed(self) -> bool:
        """Whether it names a state that never changes, such as a commit."""
        return False

    def remember(self, root: str) -> None:
        """For the rest of this launch, take the state that this path's name stands for from `root`, a
        run's pinned `resolve`, instead of asking for it."""

    def as_pinned(self, root: str) -> "Remote":
        """Itself, in the state that `root`, a run's pinned `resolve`, names of the same data."""
        return self

    def sha256(self) -> str:
        """The SHA-256 of an object's bytes, if that is known without reading it, else ""."""
        return ""

    def footer(self) -> bytes | None:
        """The last bytes of a parquet file, from its footer on, if they are kept on this machine.
        None: they are to be read like all others."""
        return None

    def read_soon(self, group: int, field: str, distance: int) -> None:
        """Fetch the column `field` of a row group of a parquet file in the background, because a
        reader will want it, after `distance` others."""

    @staticmethod
    def forget() -> None:
        """Drop what is known about objects, because a launch begins."""


AnyPath = Path | Remote  # a file or folder of data


def url(path: str) -> str:
    """One path in object storage, or several separated by commas, with the double slashes that a
    path drops."""

    def restore(start: re.Match[str]) -> str:
        return f"{start[1]}{start[2]}://" if start[2] in STORAGE else start[0]

    return re.sub(r"(^|,)(\w+):(/+|$)", restore, path)


def begin_launch(data_cache_gb: float = DATA_CACHE_GB) -> None:
    """Begin a launch: discard cached metadata of objects, so that it is requested again.
    `data_cache_gb`: what fetched ranges may take on disk, in billions of bytes."""
    Remote.cache_bytes = int(data_cache_gb * 1e9)
    kinds = Remote.__subclasses__()
    for kind in kinds:  # and those below it
        kind.forget()
        kinds += kind.__subclasses__()


def storage_of(path: str | os.PathLike[str]) -> str:
    """The kind of object storage that a path is in, such as s3; "" for a path on this machine."""
    match = re.match(r"(\w+):(/|$)", os.fspath(path))
    scheme = match[1].lower() if match else ""
    return scheme if scheme in STORAGE else ""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in object storage."""
    return storage_of(path) != ""


def as_path(path: str | os.PathLike[str]) -> AnyPath:
    """A data path. ValueError for a URL of another kind than those in STORAGE, or one that may hold
    credentials; the error does not show them."""
    refuse_secrets(os.fspath(path))
    storage = storage_of(path)
    if not storage:
        return _on_this_machine(path)
    return open_door(STORAGE[storage])(os.fspath(path))


def _on_this_machine(path: str | os.PathLike[str]) -> Path:
    """A local path. ValueError for a URL, which would become a folder named like file:"""
    if re.match(r"[a-zA-Z][\w+.-]+:/", os.fspath(path)):
        raise ValueError(
            f"{os.fspath(path)}: not a kind of storage that is known; expected "
            f"{', '.join(f'{kind}://' for kind in STORAGE)}, or a path on this machine, without file://"
        )
    return Path(path)


def can_be_path(text: str) -> bool:
    """Whether a text that was read from a file can be a path: NUL and halves of surrogate pairs
    cannot."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def as_local_path(path: str | os.PathLike[str], what: str) -> Path:
    """A local path. For a path in object storage, a ValueError that begins with `what` and shows no
    secret; also for a URL of an unknown kind."""
    refuse_secrets(os.fspath(path))
    if is_remote(path):
        raise ValueError(
            f"{what} {as_path(path)}: expected a local folder; download the data first, or write "
            "to a local folder and upload it (docs/object_storage.md)"
        )
    return _on_this_machine(path)


def local_copy(path: AnyPath, cache: Path | str | None = None) -> Path:
    """The path of a file, or of a local copy of an object, which is below the folder `cache`
    (default: <base dir>/object_storage). FileNotFoundError if the object does not exist."""
    return path.local_copy(cache) if isinstance(path, Remote) else path


def make_local_copies(paths: Iterable[AnyPath]) -> None:
    """Make local copies of those `paths` that are existing objects, several at once."""
    objects = (path for path in paths if isinstance(path, Remote) and path.is_file())
    for _ in each(local_copy, objects):
        pass


class Etag(TypedDict, total=False):
    """The ETag of an object, and its SHA-256 if it is known, as records of files store them."""

    etag: str
    sha256: str


def etag_of(path: AnyPath) -> Etag:
    """The ETag of an object, {} for a file. A changed object is recognized by its ETag, size or
    footer."""
    if not isinstance(path, Remote):
        return {}
    sha256 = path.sha256()
    if sha256:
        return {"etag": path.etag(), "sha256": sha256}
    return {"etag": path.etag()}


def each(
    call: Callable[[A], B],
    items: Iterable[A],
    *,
    at_once: int = 16,
    poll: Callable[[], object] = lambda: None,
) -> Iterator[B]:
    """The results of `call` for each item, in order, computed by up to `at_once` daemon threads.
    `stops_if` applies to them as to the caller, which wakes up ten times a second to call `poll`,
    so that Python handles signals even if a file system or object storage hangs."""

    def work(item: A, future: "Future[B]") -> None:
        try:
            future.set_result(call(item))
        except BaseException as e:
            future.set_exception(e)

    rest, running = iter(items), deque[Future[B]]()
    while True:
        for item in itertools.islice(rest, at_once - len(running)):
            running.append(Future())
            run = contextvars.copy_context().run
            threading.Thread(
                target=run, args=(work, item, running[-1]), name="each", daemon=True
            ).start()
        if not running:
            return
        while not wait([running[0]], timeout=0.1).done:
            poll()
        yield running.popleft().result()


# ---- files --------------------------------------------------------------------------------------


def fsync_dir(path: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> list[Path]:
    """Make a folder, and those above it that are missing, so that their names survive a power cut.
    Returns what was missing, the innermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for tries_left in reversed(range(100)):
        try:
            path.mkdir(parents=True, exist_ok=True)
            break
        except (FileExistsError, FileNotFoundError):  # perhaps another process is removing it
            if not tries_left:
                raise
    for folder in missing:
        with contextlib.suppress(FileNotFoundError):
            fsync_dir(folder.parent)
    return missing


def reason_of(error: OSError) -> str:
    """What the system says about an error, without the number and the file; of an error of our own,
    which has no number, the whole sentence."""
    return error.strerror or str(error)


@contextlib.contextmanager
def atomic_open(path: Path | str) -> Iterator[BinaryIO]:
    """Open for writing a file that appears at `path` only when it is complete: temporary name in
    the same folder, fsync, rename, fsync of the folder. An exception removes the temporary file and
    leaves `path` unchanged. The temporary file is locked while it is written (see
    `remove_leftovers`)."""
    path = Path(path)
    # 60 characters have at most 240 bytes, and a name may have 255
    temporary = path.with_name(f".{path.name[:60]}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(fd, "wb") as f:
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield f
            f.flush()
            os.fsync(f.fileno())
            os.replace(temporary, path)  # while it is locked: a slow sync may have made it old
    except BaseException as e:
        if isinstance(e, OSError) and e.errno is not None and e.filename is None:
            e.filename = str(path)  # the error for a full disk names no file
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    fsync_dir(path.parent)


def remove_leftovers(folder: Path, *, fresh_s: float = 5.0) -> None:
    """Remove the temporary files that killed processes left in a folder. Locked files belong to
    running processes and are kept, and so are files younger than `fresh_s`, which may not be locked
    yet."""
    for path in folder.glob(".*.????????.tmp"):
        with contextlib.suppress(OSError), path.open("rb") as f:
            if time.time() - path.stat().st_mtime >= fresh_s:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a file atomically."""
    with atomic_open(path) as f:
        f.write(data)


def write_json(path: Path | str, value: object, *, sort_keys: bool = False) -> None:
    """Write a value as indented JSON atomically."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=sort_keys) + "\n").encode())


def read_json(
    path: Path | str,
    shape: object = None,
    *,
    remedy: str = "delete it and rerun the command that wrote it",
) -> Any:
    """The JSON value in a file. FileNotFoundError if the file does not exist. ValueError, which
    names the file, the field and the remedy, if it is corrupt or does not have the shape (see
    `parse_json`)."""
    return parse_json(Path(path).read_bytes(), path, shape, remedy=remedy)


def parse_json(
    data: bytes | str, name: Path | str, shape: object = None, *, remedy: str = ""
) -> Any:
    """The value of JSON that may be damaged. ValueError, which begins with `name` and ends with the
    remedy, if it is not JSON or does not have the shape:

        int, float, str, bool, dict, list    a value of this type (an int counts as a float)
        int | None                           one of several types; None stands for null
        {"step": int, "ranks": [...]}        an object with at least these fields
        [{"pid": int}]                       a list of items that all have this shape
        None                                 anything
    """
    ending = f"; {remedy}" if remedy else ""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        # includes UnicodeDecodeError and nesting that is too deep
        raise ValueError(f"{name}: not valid JSON ({e}){ending}") from None
    check_shape(value, shape, name, ending=ending)
    return value


MISSING = object()
KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
    object: "nothing",
}


def check_shape(
    value: object, shape: object, name: Path | str, *, field: str = "", ending: str = ""
) -> None:
    """ValueError, which begins with `name` and the first wrong field, if a value does not have the
    shape (see `parse_json`)."""
    if type(value) is shape:  # most fields; the log of a long run has ten million
        return
    if isinstance(shape, dict) and isinstance(value, dict):
        for key, inner in shape.items():
            below = f"{field}.{key}" if field else key
            check_shape(value.get(key, MISSING), inner, name, field=below, ending=ending)
    elif isinstance(shape, list) and isinstance(value, list):
        for i, item in enumerate(value):
            check_shape(item, shape[0], name, field=f"{field}[{i}]", ending=ending)
    elif shape is not None:
        kinds = typing.get_args(shape) or (shape if isinstance(shape, type) else type(shape),)
        if type(value) not in kinds and not (type(value) is int and float in kinds):
            expected = " or ".join(KINDS[kind] for kind in kinds)
            where = f"{name}: {field}" if field else name
            found = KINDS.get(type(value), "something else")
            raise ValueError(f"{where}: expected {expected}, got {found}{ending}")


def hash_bytes(*parts: bytes | memoryview) -> str:
    """128-bit BLAKE2b of the concatenated parts, as hex."""
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        h.update(part)
    return h.hexdigest()


class Difference(NamedTuple):
    """A name under which two dicts have different values."""

    name: str
    first: Any
    second: Any


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], missing: object = None
) -> list[Difference]:
    """The names under which two dicts have different values, in the order of both; `missing`
    stands for the value of a name that one of them lacks."""
    found = []
    for name in {**first, **second}:
        a, b = first.get(name, missing), second.get(name, missing)
        if a != b:
            found.append(Difference(name, a, b))
    return found


def hash_json(value: object) -> str:
    """`hash_bytes` of the canonical JSON of a value: sorted keys, no spaces."""
    return hash_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def hash_file(path: Path | str) -> str:
    """128-bit BLAKE2b of a file's bytes, as hex."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


# ---- processes ----------------------------------------------------------------------------------


def get_dist_info() -> tuple[bool, int, int, int]:
    """(whether torchrun started this process, rank, local rank, world size), from torchrun's
    environment. ValueError if that is not as torchrun makes it."""
    if "RANK" not in os.environ:
        return False, 0, 0, 1
    found = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    try:
        rank, local_rank, world_size = (int(value or "") for value in found.values())
        is_good = 0 <= rank < world_size
    except ValueError:
        is_good = False
    if not is_good:
        listed = ", ".join(f"{name}={value or 'unset'}" for name, value in found.items())
        raise ValueError(
            f"{listed}: not the environment of one of several processes; start them with torchrun, or "
            f"unset RANK for a single one"
        )
    return True, rank, local_rank, world_size


def _bars() -> Any:
    """The class tqdm, or None if it is not imported: then there is no bar."""
    return getattr(sys.modules.get("tqdm"), "tqdm", None)


def _own_lock_of_bars() -> None:
    """Give a forked process its own lock. tqdm's is shared with the parent, and if the child is
    killed while it prints, the parent waits for it for ever."""
    if tqdm := _bars():
        tqdm.set_lock(threading.RLock())


os.register_at_fork(after_in_child=_own_lock_of_bars)


def bars_hidden() -> contextlib.AbstractContextManager[None]:
    """A context for printing, without the progress bars that are on the terminal."""
    tqdm = _bars()
    return contextlib.nullcontext() if tqdm is None else tqdm.external_write_mode()


def print0(*args: object, **kwargs: Any) -> None:
    """Print on rank 0 only, and flush."""
    if int(os.environ.get("RANK", "0")) == 0:
        with bars_hidden():
            print(*args, **{"flush": True, **kwargs})


if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Names that forks of nanochat import from here. They need PyTorch, so dist is imported on
        first use."""
        if name not in (
            "autodetect_device_type",
            "compute_cleanup",
            "compute_init",
            "get_peak_flops",
        ):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return open_door(f"nanochat.dist:{name}")


# ---- output -------------------------------------------------------------------------------------


class Bits(float):
    """Bits per byte or a loss, which `show` writes with three decimals: 1.9996 is 2.000, not 2."""

    @classmethod
    def of(cls, value: float | None) -> "Bits | None":
        """A measured value; None stays None."""
        return None if value is None else cls(value)


def show(value: object) -> str:
    """A readable value: 1,234; 0.1235; 2.67e+12; yes; a dash for None."""
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, Bits):
        return f"{value:.3f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    return visible(str(value))


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """`text`, made safe to print on a terminal: control characters other than tabs and newlines,
    and marks that reverse the direction of writing, become escapes such as \\u001b, which JSON
    reads as the same characters."""
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A header and rows as aligned lines: columns of numbers are right-aligned, columns with text
    left-aligned."""
    columns = list(zip(*rows)) or [()] * len(header)
    aligned = []
    for name, values in zip(header, columns):
        cells = [name, *map(show, values)]
        width = max(map(len, cells))
        if any(isinstance(value, str) for value in values):
            aligned.append([cell.ljust(width) for cell in cells])
        else:
            aligned.append([cell.rjust(width) for cell in cells])
    return ["  ".join(line).rstrip() for line in zip(*aligned)]


def counted(number: int, noun: str) -> str:
    """1 row; 1,024 rows; 2 batches."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def few(paths: Iterable[PurePath | str], folder: PurePath | str | None = None) -> str:
    """The first paths, relative to a folder, and the number of the others: a.txt, b.txt, c.txt and
    7 more."""
    above = f"{folder}/" if folder else ""
    names = [str(path).removeprefix(above) for path in paths]
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest:,} more" if rest > 0 else "")


def abridged(names: Sequence[str], most: int) -> Sequence[str]:
    """At most `most` of some names: of more, the first ones, dots and the last one."""
    if len(names) <= most:
        return names
    return [*names[: most - 2], "...", names[-1]]


def duration(seconds: float | None) -> str:
    """4.2 s, 12 min 05 s, 3 h 07 min, 2 d 04 h; a dash for None."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {s:02d} s"


# ---- blocks, and random numbers -----------------------------------------------------------------


def block(j: int, m: int, V: int) -> range:
    """Block j of m in range(V): floor(jV/m) .. floor((j+1)V/m) - 1."""
    return range(j * V // m, (j + 1) * V // m)


def words(n: int, *key: object) -> np.ndarray:
    """(n,) uint64: random words that depend on the key alone. They are the raw words of NumPy's
    Philox counter generator, which are the same in all versions and on all machines;
    `Generator.permutation` makes no such promise."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.Philox(key=np.frombuffer(digest, "<u8")).random_raw(n)


def permutation(n: int, *key: object) -> np.ndarray:
    """(n,) int64: a permutation that depends on the key alone, not on the machine or NumPy's
    version."""
    return np.argsort(words(n, *key), kind="stable")
