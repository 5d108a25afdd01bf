"""
Object storage (S3, Google Cloud Storage, Azure): a bucket is read like a folder. `common.data_path` loads this module
when it meets the first path such as s3://bucket/folder; a program that reads local files never loads it.

    data_path("s3://b/set")    a RemotePath: exists, is_file, is_dir, rglob, stat and open of pathlib,
                               answered from one listing of the folder
    path.local_copy()          a copy on this machine, for files that are mapped or read whole: indices, manifests
    RemoteReader(path)         the ids of a .bin, by ranges
        lanes read each file in order: parts of 256 KiB, of which the last 1,024 are kept
            file  |----|----|####|----|
        the samples of a shuffle lie all over the file: exactly their bytes are fetched
            file  .#....##..........#.#.#.

**Pinned.** A listing, made once per launch, gives size and ETag of every object. Each range is requested with If-Match,
and the size, ETag, range and length of the answer are compared with the request. So bytes of two versions of an object
never mix, even where a proxy drops If-Match: a changed object is an error that names it.

**Waiting.** Every request goes through `request`. obstore repeats a request by itself where that may help: for 300 s,
but for only 9 s as long as the bucket has never answered, because then the endpoint is probably wrong. It does so in a
daemon thread, while the caller checks ten times a second whether the program should stop. An answer that does not fit
the request is requested again a few times. So a stalled bucket delays neither a signal nor the end of Python.

**Secrets.** An error text of obstore may hold an access key or a signed URL. None of it is passed on: every sentence is
ours and contains at most the HTTP status and the S3 code. A path that may hold credentials is refused and never shown.

**Forks.** A forked process, such as a worker of torch.utils.data.DataLoader, gets clients and a copy of obstore of its
own. obstore's threads do not survive a fork, and its sockets would be shared with the parent, so a child that used
them would wait forever or crash its parent.

obstore reads s3://, gs:// and az://. It was chosen because it sends If-Match with a range and reports ETag, size and
range of the answer. multi-storage-client reads msc://PROFILE/KEY, as its profiles say.
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

REQUEST_BYTES = 4 << 20  # the largest range of one request
PART_BYTES, KEPT_PARTS = 1 << 18, 1024  # of files that lanes read in order: 256 MB
TRIES = 5  # for an answer that does not fit the request
WAY_OUT = "bring the old object back, or start a new run (--model-tag)"
# The first of these variables that is set names the endpoint of S3. Without any, it is AWS.
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ENDPOINT = re.compile(r"https?://((?:[\w.-]+|\[[\w:.]+\])(?::\d{1,5})?)(/[\w.~/-]*)?")
KEYS_HINT = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY", "msc": "MSC_CONFIG"}
# No path can name an object with such a key: a part of it is empty, . or .., or could be a secret.
UNUSABLE_KEY = re.compile(r"(^|/)\.{0,2}(/|$)|:[^@]*@|\?")


@dataclass(frozen=True)
class Patience:
    """How many seconds to wait."""

    connect_s: float = 5.0
    silence_s: float = 15.0  # for the next byte of an answer
    upload_s: float = 300.0  # for a part to be sent and acknowledged
    first_answer_s: float = 9.0  # of failures, while the bucket has never answered
    give_up_s: float = 300.0  # of failures
    log_every_s: float = 15.0


PATIENCE = Patience()


@dataclass(frozen=True)
class Stat:
    """An object as a listing or a look at it describes it."""

    path: str
    size: int
    etag: str  # "" if the service has none


class Changed(ValueError):
    """The object is not the pinned version."""


class Garbled(OSError):
    """An answer that does not fit the request. obstore does not repeat the request, but that may help."""


# ---- names ----------------------------------------------------------------------------------------------------------

def url(path: str) -> str:
    """A path, or several with commas between them, with the double slashes that a pathlib.Path loses."""
    return re.sub(r"(^|,)(s3|gs|az|msc):(/+|$)", r"\1\2://", path)


def split(path: str) -> tuple[str, str, str]:
    """(scheme, bucket, key) of a path. ValueError if it has no bucket, or may hold a secret, which is not shown."""
    refuse_secrets(path)
    match = re.fullmatch(r"(s3|gs|az|msc)://([^/]+)/*(.*)", url(path), re.DOTALL)
    if match is None:
        raise ValueError(f"{url(path)}: expected s3://BUCKET/KEY, gs://BUCKET/KEY, az://BUCKET/KEY or "
                         f"msc://PROFILE/KEY")
    return match[1], match[2], match[3]


# ---- clients --------------------------------------------------------------------------------------------------------

class Bucket:
    """The client of one bucket. Credentials come from the environment. ValueError if the environment describes no
    endpoint, or a package is missing."""

    def __init__(self, scheme: str, bucket: str, silence_s: float, give_up_s: float):
        self.scheme, self.bucket, self.name = scheme, bucket, f"{scheme}://{bucket}"
        self.host, self.where = f"the store of {self.name}", KEYS_HINT[scheme]  # for messages
        self.endpoint = ""  # of S3; "" for AWS itself
        self.obs: Any = None  # offers obstore's functions
        self.store: Any = None
        if scheme == "msc":
            self.obs = Msc(bucket)
            return
        try:
            self.obs = load_obstore()
        except (ImportError, OSError) as e:
            why = (f"its copy for a forked process does not load ({e}); set TMPDIR to a folder that may hold "
                   f"libraries, or start processes with spawn" if _parents else "pip install -e '.[s3]'")
            raise ValueError(f"{self.name}: object storage needs obstore; {why}") from None
        if scheme == "gs":
            self.host = f"https://storage.googleapis.com/{bucket}"
        if scheme == "s3":
            self._find_endpoint()
        options = {"allow_http": self.endpoint.startswith("http://"), "timeout": timedelta(hours=1),
                   "connect_timeout": timedelta(seconds=PATIENCE.connect_s),
                   "read_timeout": timedelta(seconds=silence_s)}
        backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}
        retry = {"max_retries": 10_000, "retry_timeout": timedelta(seconds=give_up_s), "backoff": backoff}
        endpoint = {"endpoint": self.endpoint} if self.endpoint else {}
        try:
            self.store = self.obs.store.from_url(self.name, client_options=options, retry_config=retry, **endpoint)
        except BaseException:  # a panic in Rust is not an Exception
            raise ValueError(f"{self.name}: the environment does not say how to reach it; check "
                             f"{KEYS_HINT[scheme]}") from None

    def _find_endpoint(self) -> None:
        """Read the endpoint of S3 from the environment."""
        name = next((name for name in ENDPOINTS if os.environ.get(name)), "")
        self.endpoint, self.where = os.environ.get(name, ""), name or "AWS_ENDPOINT_URL (not set)"
        if self.endpoint and not ENDPOINT.fullmatch(self.endpoint):
            raise ValueError(f"{self.name}: {name} is not the URL of an endpoint; expected http://HOST:PORT or "
                             f"https://HOST, without credentials or a query")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        self.host = self.endpoint or f"https://s3.{region}.amazonaws.com/{self.bucket}"

    def stat(self, meta: Any) -> Stat:
        """obstore's description of an object as a `Stat`."""
        return Stat(f"{self.name}/{meta['path']}", meta["size"], meta["e_tag"] or "")

    def head(self, key: str) -> Stat | None:
        """Look at an object; None if it does not exist."""
        try:
            return self.stat(self.obs.head(self.store, key))
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> list[Stat]:
        """All objects below a prefix that a path can name. A warning counts the others."""
        try:
            stats = {meta["path"]: self.stat(meta) for metas in self.obs.list(self.store, prefix or None)
                     for meta in metas}
            keys = list(stats)
        except Exception as e:
            if type(e).__name__ != "InvalidPathError" or self.scheme != "s3":
                raise
            stats, keys = {}, self._all_keys(prefix)
        usable = [key for key in keys if not UNUSABLE_KEY.search(key.rstrip("/"))]
        if len(usable) < len(keys):
            log.warning("%s/%s: %d objects are left out, for no path can name them (a part of the key is empty, . or "
                        ".., or could be a secret)", self.name, prefix, len(keys) - len(usable))
        return [stat for key in usable if (stat := stats.get(key) or self.head(key))]

    def _all_keys(self, prefix: str) -> "list[str]":  # type: ignore[valid-type]
        """All keys below a prefix, from pyarrow: obstore refuses the whole listing if one key is unusable."""
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
        """Bytes begin .. end - 1 of the pinned version of an object."""
        options = {"range": (begin, end), **({"if_match": pinned.etag} if pinned.etag else {})}
        answer = self.obs.get(self.store, key, options=options)
        data, now, first = memoryview(answer.bytes()), self.stat(answer.meta), answer.range[0]
        if (now.size, now.etag) != (pinned.size, pinned.etag):
            raise Changed(f"{pinned.path}: it changed since this run began ({pinned.size:,} bytes with ETag "
                          f"{pinned.etag} then, {now.size:,} with {now.etag} now); {WAY_OUT}")
        if (first, len(data)) != (begin, end - begin):
            raise Garbled(f"{pinned.path}: the store sent {len(data):,} bytes from {first:,} for {end - begin:,} "
                          f"from {begin:,}; something between here and the store changes requests")
        return data

    def explain(self, e: BaseException, path: str) -> Exception:
        """The error of a failed request in our own words."""
        if isinstance(e, (Changed, Garbled)):
            return e
        text, name = str(e), type(e).__name__  # obstore's types cannot be named here: it may be missing
        status = int((re.search(r"status code: (\d{3})", text) or [0, 0])[1])
        code = (re.search(r"<Code>(\w{1,40})</Code>", text) or ["", ""])[1]
        answered, keys = f"HTTP {status} {code}".rstrip(), KEYS_HINT[self.scheme]
        away = status in (408, 429) or status >= 500 or (status == 0 and "redirect" not in text)
        causes: list[tuple[object, type[Exception], str]] = [  # the first whose test is true
            (re.search(r"169\.254\.169\.254|metadata\.google\.internal", text), PermissionError,
             f"no credentials; set {keys}; for a public bucket of S3 AWS_SKIP_SIGNATURE=true"),
            (code == "NoSuchBucket", FileNotFoundError,
             f"there is no bucket {self.bucket}; check the path and {self.where}"),
            (isinstance(e, FileNotFoundError), FileNotFoundError, "no such object"),
            (name == "PreconditionError", Changed, f"it changed since this run began (another ETag); {WAY_OUT}"),
            (isinstance(e, ValueError) or name == "InvalidPathError", ValueError,
             "no key may have an empty, . or .. part, here or below; rename such objects"),
            (not status and re.search(r"Requested .*, got |non-partial|Content-Range|CONTENT_RANGE", text), Garbled,
             f"{self.host} sent another range than was asked for, {TRIES} times; something between here and the "
             f"store changes requests"),
            (code == "RequestTimeout", Garbled,
             f"{self.host} did not get the whole request in time, {TRIES} times ({answered}); start again when the "
             f"machine or the connection is less busy: a run resumes from its last checkpoint"),
            (away and not isinstance(e, PermissionError), OSError,
             f"no whole answer from {self.host} ({answered if status else 'no connection, or it broke off'}); check "
             f"the network and {self.where}, then start again: a run resumes from its last checkpoint"),
            (True, PermissionError, f"the store refuses it ({answered}); check {keys} and their permissions, "
                                    f"{self.where} and AWS_DEFAULT_REGION")]
        return next(kind(f"{path}: {sentence}") for fits, kind, sentence in causes if fits)


open_bucket = functools.cache(Bucket)  # one client for all requests with the same patience
_loading = threading.Lock()
_parents: list[Any] = []  # in a forked process: its parent's clients and obstore, which it must not use


def _forget_parent() -> None:
    """In a forked process: replace locks, clients and obstore. The parent's stay in memory, because deleting them
    would close the parent's connections."""
    global open_bucket, _loading, _lock
    names = [name for name in sys.modules if name.partition(".")[0] == "obstore"]
    _parents.append((open_bucket, [sys.modules.pop(name) for name in names]))
    open_bucket, _loading, _lock = functools.cache(Bucket), threading.Lock(), threading.RLock()


os.register_at_fork(after_in_child=_forget_parent)


def load_obstore() -> Any:
    """The package obstore. A forked process loads a copy of its library, with threads and sockets of its own: for the
    same file, the linker would return the library that the parent loaded. ImportError or OSError if that fails."""
    with _loading, contextlib.ExitStack() as stack:
        if _parents and "obstore" not in sys.modules and (spec := importlib.util.find_spec("obstore")):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            shutil.copytree(Path(str(spec.origin)).parent, Path(folder, "obstore"))
            sys.path.insert(0, folder)
            stack.callback(sys.path.remove, folder)
        import obstore.store

        return obstore


class Msc:
    """A profile of multi-storage-client behind obstore's functions. Its answers have neither range nor ETag, so it
    looks at the object again after each."""

    def __init__(self, profile: str):
        try:
            import multistorageclient as msc
        except ImportError:
            raise ValueError(f"msc://{profile}: needs multi-storage-client; pip install multi-storage-client") from None
        self.root, self.span = f"msc://{profile}/", msc.types.Range
        try:
            self.client, _ = msc.resolve_storage_client(self.root)
        except Exception:
            raise ValueError(f"msc://{profile}: no such profile; MSC_CONFIG names the file of profiles") from None

    def _meta(self, info: Any) -> dict[str, Any]:
        return {"path": info.key.removeprefix(self.root), "size": info.content_length, "e_tag": info.etag}

    def head(self, _: Any, key: str) -> dict[str, Any]:
        return {**self._meta(self.client.info(key)), "path": key}

    def list(self, _: Any, prefix: str | None) -> Iterator[list[dict[str, Any]]]:
        yield [self._meta(info) for info in self.client.list(path=prefix or "")]

    def get(self, _: Any, key: str, options: dict[str, Any]) -> Any:
        begin, end = options["range"]
        data = self.client.read(key, byte_range=self.span(offset=begin, size=end - begin))
        return SimpleNamespace(bytes=lambda: data, range=(begin, end), meta=self.head(None, key))

    def put(self, _: Any, key: str, file: Path, **options: Any) -> None:
        self.client.upload_file(key, str(file))

    def delete(self, _: Any, key: str) -> None:
        self.client.delete(key)


# ---- requests -------------------------------------------------------------------------------------------------------

ANSWERED: set[tuple[str, str]] = set()  # (scheme, bucket) of every bucket that has answered
_last_warning = [-math.inf]  # when the last warning about a wait was logged


def request(path: str, ask: Callable[[Bucket, str], T], *, what: str = "", upload: bool = False) -> T:
    """The answer of `ask(client, key)` for a path. `ask` runs in a thread of its own while the caller waits here.
    StopAsked if the program is to stop meanwhile; `what` names the request in messages."""
    scheme, name, key = split(path)
    known, began, what = (scheme, name), time.monotonic(), what or path

    def insist(_: None) -> T:
        """Ask until the answer fits the request, at most TRIES times."""
        bucket = open_bucket(scheme, name, PATIENCE.upload_s if upload else PATIENCE.silence_s,
                             PATIENCE.give_up_s if known in ANSWERED else PATIENCE.first_answer_s)
        for attempt in range(TRIES):
            try:
                answer = ask(bucket, key)
                break
            except BaseException as e:  # a panic in Rust is not an Exception
                error = bucket.explain(e, path)
            if not isinstance(error, Garbled) or attempt == TRIES - 1:
                raise error from None
            time.sleep(0.1 * 2**attempt)
        ANSWERED.add(known)
        return answer

    def check_stop() -> None:
        # Python joins the threads of a pool when it ends, before anything could ask them to stop
        if LAUNCH.stop() or getattr(threading, "_SHUTTING_DOWN", False):
            raise StopAsked(f"{what}: not waited for any longer, as the program is to stop")
        now = time.monotonic()
        if now - max(began, _last_warning[0]) > PATIENCE.log_every_s:
            _last_warning[0] = now  # one line for all requests that wait
            log.warning("%s: waiting for the store for %.0f s", what, now - began)

    return next(each(insist, [None], poll=check_stop))


@atexit.register
def _end() -> None:
    """Give requests under way a second to end: none may return into a Python that is being torn down."""
    end = time.monotonic() + 1.0
    for thread in threading.enumerate():
        if thread.name == "each":
            thread.join(max(0.0, end - time.monotonic()))


def find(path: str) -> Stat | None:
    """Look at an object; None if it does not exist. FileNotFoundError if the bucket does not exist."""
    return request(path, Bucket.head)


def list_objects(path: str) -> list[Stat]:
    """All objects below a path. FileNotFoundError if the bucket does not exist."""
    return request(path, lambda bucket, key: bucket.list(key.rstrip("/")))


def upload(path: str, file: Path, *, part_bytes: int = 4 * REQUEST_BYTES) -> None:
    """Write a file to an object: whole, or not at all."""
    request(path, lambda bucket, key: bucket.obs.put(bucket.store, key, file, chunk_size=part_bytes), upload=True)


def delete(path: str) -> None:
    """Delete an object, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        request(path, lambda bucket, key: bucket.obs.delete(bucket.store, key))


def read_range(stat: Stat, begin: int, end: int) -> memoryview:
    """Bytes begin .. end - 1 of an object. FileNotFoundError if it no longer exists, ValueError if it changed,
    OSError if the service does not answer or refuses."""
    try:
        return request(stat.path, lambda bucket, key: bucket.get(key, begin, end, stat),
                       what=f"{stat.path} bytes {begin:,} to {end:,}")
    except FileNotFoundError as e:
        raise FileNotFoundError(f"{e}: this run reads it; {WAY_OUT}") from None


def read_whole(stat: Stat) -> Iterator[memoryview]:
    """All bytes of an object in pieces, several requests at once."""
    return each(lambda at: read_range(stat, at, min(at + REQUEST_BYTES, stat.size)),
                range(0, stat.size, REQUEST_BYTES), at_once=8)


kept_range = functools.lru_cache(KEPT_PARTS)(read_range)


def read_parts(stat: Stat, begin: int, end: int) -> bytes:
    """`read_range` for a caller that reads on from there: by parts, of which the last ones used are kept."""
    first = begin // PART_BYTES * PART_BYTES
    parts = each(lambda at: kept_range(stat, at, min(at + PART_BYTES, stat.size)), range(first, end, PART_BYTES))
    return b"".join(parts)[begin - first:end - first]


class RemoteReader:
    """The ids of a .bin, see `nanochat.tokens.Reader`. Every array has memory of its own: a view would keep a whole
    part alive for as long as one of its documents is pending."""

    def __init__(self, path: "RemotePath", dtype: np.dtype):
        self.pinned, self.dtype = path.pinned(), np.dtype(dtype)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Elements begin .. end - 1, (end - begin,), read-only. Errors as of `read_range`."""
        size = self.dtype.itemsize
        return np.frombuffer(read_parts(self.pinned, begin * size, end * size), self.dtype)

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """`read` of each range, in their order, several requests at once. It fetches no other byte and keeps none."""
        def read_one(span: tuple[int, int]) -> np.ndarray:
            begin, end = span[0] * self.dtype.itemsize, span[1] * self.dtype.itemsize
            return np.frombuffer(read_range(self.pinned, begin, end) if begin < end else b"", self.dtype)

        return list(each(read_one, ranges))


# ---- paths ----------------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_known: dict[str, Stat | None] = {}  # objects as this launch first saw them; None: no such object
_listed: set[str] = set()  # folders whose objects are all in _known


def forget() -> None:
    """Forget listings, kept parts and clients: a launch begins."""
    with _lock:
        _known.clear()
        _listed.clear()
    kept_range.cache_clear()
    open_bucket.cache_clear()
    ANSWERED.clear()


def open_path(path: str) -> "RemotePath":
    """The path that a text names. ValueError for a text that may hold a secret, or names no bucket."""
    if len(RemotePath(path).parts) > 1:
        split(path)
    return RemotePath(path)


class RemotePath(PosixPath):
    """A path in object storage: a file if it is an object, a folder if objects lie below it. It is a pathlib.Path
    because 12 modules ask a data path some 45 times whether it exists, what lies below it, and how large it is: with
    this class, none of them has a second branch. It is read-only."""

    def __str__(self) -> str:
        return url(super().__str__())

    __fspath__ = __str__

    def is_dir(self, **_: Any) -> bool:
        return next(self.rglob("*"), None) is not None

    def is_file(self, **_: Any) -> bool:
        return self._stat() is not None

    def exists(self, **_: Any) -> bool:
        return self.is_dir() or self.is_file()

    def rglob(self, pattern: str, **_: Any) -> Iterator["RemotePath"]:  # type: ignore[override]
        """The objects below it whose names match."""
        name = str(self).rstrip("/")
        if "," in name or len(self.parts) == 1:  # several paths; or "s3:", whose buckets cannot be listed
            return iter(())
        with _lock:
            if not _listed.intersection(map(str, (self, *self.parents))):
                for stat in list_objects(name):
                    _known.setdefault(stat.path, stat)
                _listed.add(name)
            below = [path for path, stat in _known.items() if stat and path.startswith(f"{name}/")]
        return (path for path in map(RemotePath, below) if path.match(pattern))

    def _stat(self) -> Stat | None:
        """The object as this launch first saw it, None if it did not exist."""
        name = str(self)
        with _lock:
            if name not in _known and not _listed.intersection(map(str, self.parents)):
                no_file = "," in name or not split(name)[2] or (name in _listed and self.is_dir())
                _known[name] = None if no_file else find(name)
            return _known.get(name)

    def pinned(self) -> Stat:
        """The object as this launch first saw it. FileNotFoundError if it did not exist."""
        stat = self._stat()
        if stat is None:
            raise FileNotFoundError(f"{self}: no such object")
        return stat

    def stat(self, **_: Any) -> os.stat_result:
        """A read-only file of its size."""
        return os.stat_result((0o100444, 0, 0, 1, 0, 0, self.pinned().size, 0, 0, 0))

    def open(self, mode: str = "r", buffering: int = -1, *_: Any, **__: Any) -> Any:
        """The object as a binary file that reads at least `buffering` bytes at once."""
        assert mode == "rb", "objects are only read, as bytes"
        return io.BufferedReader(RemoteFile(self.pinned()), max(buffering, io.DEFAULT_BUFFER_SIZE))

    def resolve(self, strict: bool = False) -> "RemotePath":
        return self

    absolute = expanduser = resolve

    def local_copy(self) -> Path:
        """A local copy, in CACHE/BUCKET/FOLDER. Its name begins with a hash of size and ETag, so a copy of another
        version is never used, and processes that copy at the same time write the same file."""
        stat = self.pinned()
        folder = Path(LAUNCH.cache or get_base_dir() / "object_storage", *split(str(self.parent))[1:])
        copy = folder / f"{hash_json([stat.size, stat.etag])[:12]}-{self.name}"
        if not copy.is_file() or copy.stat().st_size != stat.size:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_open(copy) as f:
                f.writelines(read_whole(stat))
        return copy


class RemoteFile(io.RawIOBase):
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
