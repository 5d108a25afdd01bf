"""
Object storage: paths, bytes and local copies of objects, so that a bucket is read like a folder.

    place("s3://b/set")  a StorePath: pathlib's exists, is_file, is_dir, rglob, stat, open,
                         answered by one listing
    path.local()         a local copy of what is mapped or read whole: indices, manifests
    StoreReader(path)    the ids of a .bin
        lanes read on from where they are: parts of 256 KiB, those used last are kept
            file  |----|----|####|----|
        samples of a shuffle lie all over it: exactly their bytes
            file  .#....##..........#.#.#.

**Pinned.** A listing, made once a launch, tells size and ETag of every object. Each range is asked
for with If-Match, and the size, ETag, range and length of the answer are held against what was
asked. So bytes of two versions of an object never mix, not even where a proxy drops If-Match: an
object that changed is an error that names it.

**Waiting.** All that is asked of a store goes through `request`. obstore asks again by itself where
that may help: for 300 s, but for 9 s only while the store has never answered, because then the
endpoint is wrong. It does so in a thread of its own, a daemon, and whoever needs the answer looks
ten times a second whether the launch should stop. An answer that does not fit what was asked is
asked for again a few times there. So a store that stalls holds up neither a signal
nor the end of Python.

**Secrets.** The error text of a store may hold an access key or a signed URL. None of it is passed
on: all sentences are ours, with the HTTP status and the S3 code at most. A path that may hold
credentials is refused and never printed.

**Forks.** A forked process, such as a worker of torch.utils.data.DataLoader, has clients and an
obstore of its own. obstore's threads do not survive a fork, and its sockets would be shared with the
parent, so a child that used them would wait forever or crash its parent.

obstore reads s3:// gs:// az://: it alone sends If-Match and tells ETag, size and range of an answer.
multi-storage-client reads what its profiles say: msc://PROFILE/KEY.
"""

import atexit
import contextlib
import functools
import importlib.util
import io
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from nanochat.common import LAUNCH, StopAsked, atomic_open, each, get_base_dir, hash_json, refuse_secrets

log = logging.getLogger(__name__)
T = TypeVar("T")

REQUEST_BYTES = 4 << 20  # the most that is asked for at once
PART_BYTES, KEPT_PARTS = 1 << 18, 1024  # of files that lanes read on in: 256 MB
GONE = "bring the old object back, or start a new run (--model-tag)"
# The first variable that is set counts. Without any, it is the service that the path names.
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ENDPOINT = re.compile(r"https?://((?:[\w.-]+|\[[\w:.]+\])(?::\d{1,5})?)(/[\w.~/-]*)?")
TRIES = 5  # of what was answered, but not as asked
KEYS_HINT = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY", "msc": "MSC_CONFIG"}
# No path can name such an object: a part of its key is empty, . or .., or could be a secret.
ODD = re.compile(r"(^|/)\.{0,2}(/|$)|:[^@]*@|\?")


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, seconds."""

    connect_s: float = 5.0
    silence_s: float = 15.0  # for the next byte of an answer
    upload_s: float = 300.0  # for a part to be sent and acknowledged
    first_answer_s: float = 9.0  # of failures, while the store has never answered
    give_up_s: float = 300.0  # of failures
    log_every_s: float = 15.0


PATIENCE = Patience()


@dataclass(frozen=True)
class Stat:
    """An object as it was when somebody looked."""

    path: str
    size: int
    etag: str  # "" where the store has none


# ---- names --------------------------------------------------------------------------------------

def url(path: str) -> str:
    """A path, or several with commas between them, with the slashes that a pathlib.Path loses."""
    return re.sub(r"(^|,)(s3|gs|az|msc):(/+|$)", r"\1\2://", path)


def split(path: str) -> tuple[str, str, str]:
    """(scheme, bucket, key) of a path. ValueError for one without a bucket, and for one that may
    hold a secret, which is not shown."""
    refuse_secrets(path)
    match = re.fullmatch(r"(s3|gs|az|msc)://([^/]+)/*(.*)", url(path), re.DOTALL)
    if match is None:
        raise ValueError(f"{url(path)}: expected s3://BUCKET/KEY, gs://BUCKET/KEY, az://BUCKET/KEY "
                         f"or msc://PROFILE/KEY")
    return match[1], match[2], match[3]


# ---- clients ------------------------------------------------------------------------------------

class Changed(ValueError):
    """An object is not what it was, or came otherwise than it was asked for."""


class Garbled(OSError):
    """An answer that does not fit what was asked. Another try may help, which obstore does not make."""


class Bucket:
    """The client of one bucket. Credentials come from the environment. ValueError where that makes
    no sense or a package is missing."""

    def __init__(self, scheme: str, bucket: str, silence_s: float, give_up_s: float):
        self.scheme, self.bucket, self.name = scheme, bucket, f"{scheme}://{bucket}"
        self.host, self.where = f"the store of {self.name}", KEYS_HINT[scheme]
        self.endpoint = ""  # of S3, "" for AWS's own
        self.obs: Any = None  # what has obstore's functions
        self.store: Any = None
        if scheme == "msc":
            self.obs = Msc(bucket)
        else:
            self._open(silence_s, give_up_s)

    def _open(self, silence_s: float, give_up_s: float) -> None:
        try:
            obstore = load_obstore()
        except (ImportError, OSError) as e:
            why = (f"its copy for a forked process does not load ({e}); set TMPDIR to a folder that "
                   f"may hold libraries, or start processes with spawn" if _of_parents
                   else "pip install -e '.[s3]'")
            raise ValueError(f"{self.name}: object storage needs obstore; {why}") from None
        if self.scheme == "gs":
            self.host = f"https://storage.googleapis.com/{self.bucket}"
        if self.scheme == "s3":
            name = next((name for name in ENDPOINTS if os.environ.get(name)), "")
            self.endpoint, self.where = os.environ.get(name, ""), name or "AWS_ENDPOINT_URL (not set)"
            if self.endpoint and not ENDPOINT.fullmatch(self.endpoint):
                raise ValueError(f"{self.name}: {name} is not the URL of an endpoint; expected "
                                 f"http://HOST:PORT or https://HOST, without credentials or a query")
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
            self.host = self.endpoint or f"https://s3.{region}.amazonaws.com/{self.bucket}"
        options = {"allow_http": self.endpoint.startswith("http://"), "timeout": timedelta(hours=1),
                   "connect_timeout": timedelta(seconds=PATIENCE.connect_s),
                   "read_timeout": timedelta(seconds=silence_s)}
        more: Any = {"endpoint": self.endpoint} if self.endpoint else {}
        backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}
        more["retry_config"] = {"max_retries": 10_000, "retry_timeout": timedelta(seconds=give_up_s),
                                "backoff": backoff}
        try:
            self.obs, self.store = obstore, obstore.store.from_url(self.name, client_options=options, **more)
        except BaseException:  # a panic of obstore's is no Exception
            raise ValueError(f"{self.name}: the environment does not say how to reach it; check "
                             f"{KEYS_HINT[self.scheme]}") from None

    def stat(self, meta: Any) -> Stat:
        """What the store says of an object."""
        return Stat(f"{self.name}/{meta['path']}", meta["size"], meta["e_tag"] or "")

    def head(self, key: str) -> Stat | None:
        """Look at an object; None where it is not there."""
        try:
            return self.stat(self.obs.head(self.store, key))
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> list[Stat]:
        """All objects below a prefix that a path can name; of others a line in the log."""
        try:
            chunks = self.obs.list(self.store, prefix or None)
            found = {meta["path"]: self.stat(meta) for chunk in chunks for meta in chunk}
            keys = list(found)
        except Exception as e:
            if type(e).__name__ != "InvalidPathError" or self.scheme != "s3":
                raise
            found, keys = {}, self._all_keys(prefix)
        usable = [key for key in keys if not ODD.search(key.rstrip("/"))]
        if len(usable) < len(keys):
            log.warning("%s/%s: %d objects are left out, for no path can name them (a part of the "
                        "key is empty, . or .., or could be a secret)", self.name, prefix,
                        len(keys) - len(usable))
        return [stat for key in usable if (stat := found.get(key) or self.head(key))]

    def _all_keys(self, prefix: str) -> "list[str]":  # type: ignore[valid-type]
        """obstore refuses the whole listing for one odd key. pyarrow lists all, without ETags."""
        from pyarrow import fs

        scheme, _, host = self.endpoint.rpartition("://")
        s3 = fs.S3FileSystem(
            endpoint_override=host or None, scheme=scheme or "https",
            anonymous=bool(os.environ.get("AWS_SKIP_SIGNATURE")),
            connect_timeout=PATIENCE.connect_s, request_timeout=PATIENCE.silence_s)
        below = fs.FileSelector(f"{self.bucket}/{prefix}".rstrip("/"), recursive=True)
        return [info.path.removeprefix(f"{self.bucket}/") for info in s3.get_file_info(below)
                if info.type == fs.FileType.File]

    def get(self, key: str, begin: int, end: int, pinned: Stat) -> memoryview:
        """Bytes of an object that must be what it was."""
        options = {"range": (begin, end), **({"if_match": pinned.etag} if pinned.etag else {})}
        answer = self.obs.get(self.store, key, options=options)
        data, found, first = memoryview(answer.bytes()), self.stat(answer.meta), answer.range[0]
        if (found.size, found.etag) != (pinned.size, pinned.etag):
            raise Changed(f"{pinned.path}: it changed since this run began ({pinned.size:,} bytes "
                          f"with ETag {pinned.etag} then, {found.size:,} with {found.etag} now); "
                          f"{GONE}")
        if (first, len(data)) != (begin, end - begin):
            raise Garbled(f"{pinned.path}: the store sent {len(data):,} bytes from {first:,} for "
                          f"{end - begin:,} from {begin:,}; what stands between changes requests")
        return data

    def explain(self, e: BaseException, path: str) -> Exception:
        """What became of a request, without a word of the store's own."""
        if isinstance(e, (Changed, Garbled)):
            return e
        text, name = str(e), type(e).__name__  # obstore, whose they are, may be missing
        status = int((re.search(r"status code: (\d{3})", text) or [0, 0])[1])
        code = (re.search(r"<Code>(\w{1,40})</Code>", text) or ["", ""])[1]
        said, keys = f"HTTP {status} {code}".rstrip(), KEYS_HINT[self.scheme]
        away = status in (408, 429) or status >= 500 or (status == 0 and "redirect" not in text)
        answers: list[tuple[object, type[Exception], str]] = [  # the first that fits
            (re.search(r"169\.254\.169\.254|metadata\.google\.internal", text), PermissionError,
             f"no credentials; set {keys}; for a public bucket of S3 AWS_SKIP_SIGNATURE=true"),
            (code == "NoSuchBucket", FileNotFoundError,
             f"there is no bucket {self.bucket}; check the path and {self.where}"),
            (isinstance(e, FileNotFoundError), FileNotFoundError, "no such object"),
            (name == "PreconditionError", Changed,
             f"it changed since this run began (another ETag); {GONE}"),
            (isinstance(e, ValueError) or name == "InvalidPathError", ValueError,
             "no key may have an empty, . or .. part, here or below; name such objects anew"),
            (not status and re.search(r"Requested .*, got |non-partial|Content-Range|CONTENT_RANGE", text), Garbled,
             f"{self.host} sent another range than was asked for, {TRIES} times; what stands between changes requests"),
            (code == "RequestTimeout", Garbled,
             f"{self.host} did not get the whole request in time, {TRIES} times ({said}); start again when the "
             f"machine or the line is less busy: a run goes on from its last checkpoint"),
            (away and not isinstance(e, PermissionError), OSError,
             f"no whole answer from {self.host} ({said if status else 'no connection, or it broke off'}); check "
             f"the network and {self.where}, then start again: a run goes on from its last checkpoint"),
            (True, PermissionError, f"the store refuses it ({said}); check {keys} and what they may do, "
                                    f"{self.where} and AWS_DEFAULT_REGION")]
        return next(kind(f"{path}: {sentence}") for fits, kind, sentence in answers if fits)


open_bucket = functools.cache(Bucket)  # one client for all who ask alike
_loading = threading.Lock()
_of_parents: list[Any] = []  # in a forked process: its parent's clients and obstore, never to be used


def _forget_parent() -> None:
    """A process was forked: it gets its own locks, clients and obstore. The parent's are kept, because
    deleting them would close the parent's connections too."""
    global open_bucket, _loading, _lock
    names = [name for name in sys.modules if name.partition(".")[0] == "obstore"]
    _of_parents.append((open_bucket, [sys.modules.pop(name) for name in names]))
    open_bucket, _loading, _lock = functools.cache(Bucket), threading.Lock(), threading.RLock()


os.register_at_fork(after_in_child=_forget_parent)


def load_obstore() -> Any:
    """The package obstore. A forked process loads a copy of its library, which has threads and
    sockets of its own: for the same file, the linker returns the library that the parent loaded.
    ImportError or OSError if it cannot be loaded."""
    with _loading, contextlib.ExitStack() as stack:
        if _of_parents and "obstore" not in sys.modules and (spec := importlib.util.find_spec("obstore")):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            shutil.copytree(Path(str(spec.origin)).parent, Path(folder, "obstore"))
            sys.path.insert(0, folder)
            stack.callback(sys.path.remove, folder)
        import obstore.store

        return obstore


class Msc:
    """A profile of multi-storage-client, by obstore's functions. It tells no range and no ETag of
    an answer, so the object is looked at anew after each."""

    def __init__(self, profile: str):
        try:
            import multistorageclient as msc
        except ImportError:
            raise ValueError(f"msc://{profile}: needs multi-storage-client; pip install "
                             f"multi-storage-client") from None
        self.root, self.span = f"msc://{profile}/", msc.types.Range
        try:
            self.client, _ = msc.resolve_storage_client(self.root)
        except Exception:
            raise ValueError(f"msc://{profile}: no such profile; MSC_CONFIG names the file of "
                             f"profiles") from None

    def _meta(self, found: Any) -> dict[str, Any]:
        path = found.key.removeprefix(self.root)
        return {"path": path, "size": found.content_length, "e_tag": found.etag}

    def head(self, _: Any, key: str) -> dict[str, Any]:
        return {**self._meta(self.client.info(key)), "path": key}

    def list(self, _: Any, prefix: str | None) -> Iterator[list[dict[str, Any]]]:
        yield [self._meta(found) for found in self.client.list(path=prefix or "")]

    def get(self, _: Any, key: str, options: dict[str, Any]) -> Any:
        begin, end = options["range"]
        data = self.client.read(key, byte_range=self.span(offset=begin, size=end - begin))
        return SimpleNamespace(bytes=lambda: data, range=(begin, end), meta=self.head(None, key))

    def put(self, _: Any, key: str, file: Path, **options: Any) -> None:
        self.client.upload_file(key, str(file))

    def delete(self, _: Any, key: str) -> None:
        self.client.delete(key)


# ---- requests -----------------------------------------------------------------------------------

ANSWERED: set[tuple[str, str]] = set()  # stores that ever answered, (scheme, bucket)
TOLD = [-math.inf]  # when somebody was told of a wait


def request(path: str, ask: Callable[[Bucket, str], T], *, what: str = "",
            upload: bool = False) -> T:
    """The answer of `ask`, with the client of a path's bucket and the key. It is asked in a thread
    of its own, while whoever called waits here."""
    scheme, name, key = split(path)
    known, began, what = (scheme, name), time.monotonic(), what or path

    def insist(_: None) -> T:
        """Ask until the answer fits what was asked, a few times at most."""
        bucket = open_bucket(scheme, name, PATIENCE.upload_s if upload else PATIENCE.silence_s,
                             PATIENCE.give_up_s if known in ANSWERED else PATIENCE.first_answer_s)
        for attempt in range(TRIES):
            try:
                answer = ask(bucket, key)
                break
            except BaseException as e:  # a panic of obstore's is no Exception
                error = bucket.explain(e, path)
            if not isinstance(error, Garbled) or attempt == TRIES - 1:
                raise error from None
            time.sleep(0.1 * 2**attempt)
        ANSWERED.add(known)
        return answer

    def look() -> None:
        # a pool's threads are joined when Python ends, before anybody could tell them to stop
        if LAUNCH.stop() or getattr(threading, "_SHUTTING_DOWN", False):
            raise StopAsked(f"{what}: not waited for any longer, as the program is to stop")
        now = time.monotonic()
        if now - max(began, TOLD[0]) > PATIENCE.log_every_s:
            TOLD[0] = now  # one line for all that wait
            log.warning("%s: waiting for the store for %.0f s", what, now - began)

    return next(each(insist, [None], look=look))


@atexit.register
def _end() -> None:
    """Requests under way are given a second: none may come back into a Python that is torn down."""
    end = time.monotonic() + 1.0
    for thread in threading.enumerate():
        if thread.name == "each":
            thread.join(max(0.0, end - time.monotonic()))


def find(path: str) -> Stat | None:
    """Look at an object; None where it is not there. FileNotFoundError without a bucket."""
    return request(path, Bucket.head)


def list_files(path: str) -> list[Stat]:
    """All objects below a path. FileNotFoundError without a bucket."""
    return request(path, lambda bucket, key: bucket.list(key.rstrip("/")))


def write(path: str, file: Path, *, part_bytes: int = 4 * REQUEST_BYTES) -> None:
    """Have an object hold what a file holds: whole, or not at all."""
    request(path, lambda bucket, key: bucket.obs.put(bucket.store, key, file,
                                                     chunk_size=part_bytes), upload=True)


def delete(path: str) -> None:
    """Remove an object, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        request(path, lambda bucket, key: bucket.obs.delete(bucket.store, key))


def read_range(stat: Stat, begin: int, end: int) -> memoryview:
    """Bytes begin .. end - 1 of an object. FileNotFoundError where it is gone, ValueError where it
    is another one by now, OSError where the store stays away or refuses."""
    try:
        return request(stat.path, lambda bucket, key: bucket.get(key, begin, end, stat),
                       what=f"{stat.path} bytes {begin:,} to {end:,}")
    except FileNotFoundError as e:
        raise FileNotFoundError(f"{e}: this run reads it; {GONE}") from None


def read_pieces(stat: Stat, begin: int, end: int) -> Iterator[memoryview]:
    """`read_range` of any length, by several requests at once."""
    return each(lambda at: read_range(stat, at, min(at + REQUEST_BYTES, end)),
                range(begin, end, REQUEST_BYTES), at_once=8)


kept_range = functools.lru_cache(KEPT_PARTS)(read_range)


def read_parts(stat: Stat, begin: int, end: int) -> bytes:
    """`read_range` for who reads on from there: by parts, of which those used last are kept."""
    first = begin // PART_BYTES * PART_BYTES
    parts = each(lambda at: kept_range(stat, at, min(at + PART_BYTES, stat.size)),
                 range(first, end, PART_BYTES))
    return b"".join(parts)[begin - first:end - first]


class StoreReader:
    """The ids of a .bin in a store, see `nanochat.tokens.Reader`. What is read has memory of its
    own: a view would keep a part for as long as one of its documents waits for a row."""

    def __init__(self, path: "StorePath", dtype: np.dtype):
        self.pinned, self.dtype = path.pinned(), np.dtype(dtype)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Elements begin .. end - 1, (end - begin,), read-only. Errors as of `read_range`."""
        size = self.dtype.itemsize
        return np.frombuffer(read_parts(self.pinned, begin * size, end * size), self.dtype)

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """`read` of each range, in their order, several requests at once. No other byte is
        fetched, and none is kept."""
        def fetch(span: tuple[int, int]) -> np.ndarray:
            begin, end = span[0] * self.dtype.itemsize, span[1] * self.dtype.itemsize
            data = read_range(self.pinned, begin, end) if begin < end else b""
            return np.frombuffer(data, self.dtype)

        return list(each(fetch, ranges))


# ---- paths --------------------------------------------------------------------------------------

_lock = threading.RLock()
_known: dict[str, Stat | None] = {}  # objects as this launch first saw them
_listed: set[str] = set()  # folders, all objects below which are known


def forget() -> None:
    """A launch begins: look anew."""
    with _lock:
        _known.clear()
        _listed.clear()
    kept_range.cache_clear()
    open_bucket.cache_clear()
    ANSWERED.clear()


def open_path(path: str) -> "StorePath":
    """The path that a text means. ValueError for a text that may hold a secret."""
    if len(StorePath(path).parts) > 1:
        split(path)
    return StorePath(path)


class StorePath(PosixPath):
    """A path in object storage: a file if it is an object, a folder if there are objects below it.
    Nothing is written by it."""

    def __str__(self) -> str:
        return url(super().__str__())

    __fspath__ = __str__

    def is_dir(self, **_: Any) -> bool:
        return next(self.rglob("*"), None) is not None

    def is_file(self, **_: Any) -> bool:
        return self._look() is not None

    def exists(self, **_: Any) -> bool:
        return self.is_dir() or self.is_file()

    def rglob(self, pattern: str, **_: Any) -> Iterator["StorePath"]:  # type: ignore[override]
        """The objects below it whose names match."""
        name = str(self).rstrip("/")
        if "," in name or len(self.parts) == 1:  # several paths; "s3:", whose buckets nobody lists
            return iter(())
        with _lock:
            if not _listed.intersection(map(str, (self, *self.parents))):
                for stat in list_files(name):
                    _known.setdefault(stat.path, stat)
                _listed.add(name)
            below = [path for path, stat in _known.items() if stat and path.startswith(f"{name}/")]
        return (path for path in map(StorePath, below) if path.match(pattern))

    def _look(self) -> Stat | None:
        name = str(self)
        with _lock:
            if name not in _known and not _listed.intersection(map(str, self.parents)):
                no_file = "," in name or not split(name)[2] or (name in _listed and self.is_dir())
                _known[name] = None if no_file else find(name)
            return _known.get(name)

    def pinned(self) -> Stat:
        """The object as it was when this launch first looked. FileNotFoundError if it was not
        there."""
        stat = self._look()
        if stat is None:
            raise FileNotFoundError(f"{self}: no such object")
        return stat

    def stat(self, **_: Any) -> os.stat_result:
        """Its size, in a form that others understand."""
        return os.stat_result((0o100444, 0, 0, 1, 0, 0, self.pinned().size, 0, 0, 0))

    def open(self, mode: str = "r", buffering: int = -1, *_: Any, **__: Any) -> Any:
        """The object, to be read as bytes, at least `buffering` at once."""
        assert mode == "rb", "objects in a store are only read, as bytes"
        return io.BufferedReader(StoreFile(self.pinned()), max(buffering, io.DEFAULT_BUFFER_SIZE))

    def resolve(self, strict: bool = False) -> "StorePath":
        return self

    absolute = expanduser = resolve

    def local(self) -> Path:
        """A local copy, in CACHE/BUCKET/FOLDER. Its name begins with a hash of the ETag, so it is
        never one of another version, and whoever makes one at the same time makes the same."""
        stat = self.pinned()
        folder = Path(LAUNCH.cache or get_base_dir() / "object_storage",
                      *split(str(self.parent))[1:])
        copy = folder / f"{hash_json([stat.size, stat.etag])[:12]}-{self.name}"
        if not copy.is_file() or copy.stat().st_size != stat.size:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_open(copy) as f:
                f.writelines(read_pieces(stat, 0, stat.size))
        return copy


class StoreFile(io.RawIOBase):
    """An object as a file that pyarrow reads."""

    def __init__(self, pinned: Stat):
        super().__init__()
        self.pinned, self._at = pinned, 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self.pinned.size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        begin, end = self._at, min(self._at + len(buffer), self.pinned.size)
        if begin >= end:
            return 0
        buffer[:end - begin] = read_parts(self.pinned, begin, end)
        self._at = end
        return end - begin
