"""Object storage (S3, Google Cloud Storage, Azure): a bucket is read like a folder.
`common.as_path` imports this module at the first path like s3://bucket/folder; a program with only
local files never loads it.

    as_path("s3://b/set")      a RemotePath: what `nanochat.common.Remote` lists (exists, walk, stat, open, ...),
                               answered from one listing of the folder
    path.local_copy()          a local copy, for files that are memory-mapped or read whole: indices, manifests
    RemoteReader(path)         reads ranges of ids from a .bin
        lanes read each file in order, 256 KiB at a time; the last 1,024 parts stay in memory
            file  |----|----|####|----|
        shuffled samples are scattered over the file: exactly their bytes are fetched
            file  .#....##..........#.#.#.

**Pinning.** One listing per launch gives the size and ETag of every object. Each range is requested
with If-Match, and the size, ETag, range and length of the answer are checked. So bytes from two
versions of an object never mix, even if a proxy drops If-Match: a changed object is an error that
names it.

**Waiting.** Every request goes through `request`. obstore retries a failed request if that may
help: for 300 s, but for only 9 s if the bucket has never answered, because then the endpoint is
probably wrong. The request runs in a daemon thread, while the caller checks ten times a second
whether the program should stop. So a stalled bucket delays neither a signal nor Python's exit. If
an answer does not fit the request, or has the code of an error that S3 calls temporary, the request
is repeated up to four times.

**Secrets.** obstore's error messages may contain an access key or a signed URL. None of that text
is passed on: each message is ours, with at most the HTTP status and the S3 code from obstore's. A
path that may hold credentials is refused and never shown.

**Forks.** A forked process, such as a worker of torch.utils.data.DataLoader, gets its own clients
and its own copy of obstore. A fork copies obstore's sockets but not its threads, so a child that
used the parent's obstore would wait forever or crash its parent.

obstore reads s3://, gs:// and az://. It was chosen because it sends If-Match with a range and
reports an answer's ETag, size and range. multi-storage-client reads msc://PROFILE/KEY; its
configuration defines the profiles.
"""

import atexit
import contextlib
import functools
import importlib.util
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nanochat.common import each, refuse_secrets, url
from nanochat.integrations.remote_files import (
    PROXY,
    REQUEST_BYTES,
    TRIES,
    Changed,
    Garbled,
    PinnedPath,
    poll,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

PART_BYTES, KEPT_PARTS = 1 << 18, 1024  # for files that lanes read in order: 256 MB in total
ADVICE = "restore the old object, or start a new run (--model-tag)"
# The first of these variables that is set holds the endpoint of S3. If none is set, the endpoint is
# AWS.
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ENDPOINT = re.compile(r"https?://((?:[\w.-]+|\[[\w:.]+\])(?::\d{1,5})?)(/[\w.~/-]*)?")
# Errors that may not occur again, according to the documentation of S3 and of its clients. obstore
# itself repeats a request after 408, 429 and 5xx, but not after these codes with other statuses.
BUSY_CODES = frozenset(
    (
        "RequestTimeout",
        "RequestTimeTooSkewed",
        "RequestExpired",
        "RequestInTheFuture",
        "OperationAborted",
        "ConditionalRequestConflict",
        "InternalError",
        "ServiceUnavailable",
        "SlowDown",
        "Busy",
        "IncompleteBody",
        "RequestTimeoutException",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestThrottledException",
        "TooManyRequests",
        "TooManyRequestsException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "LimitExceededException",
        "TransactionInProgressException",
        "PriorRequestNotComplete",
    )
)
KEYS_HINT = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
    "msc": "MSC_CONFIG",
}


@dataclass(frozen=True)
class Patience:
    """Timeouts, and the time between two warnings, in seconds."""

    connect_s: float = 5.0
    silence_s: float = 15.0  # until the next byte of an answer
    first_answer_s: float = 9.0  # how long to retry until the bucket first answers
    give_up_s: float = 300.0  # how long to retry after that
    log_every_s: float = 15.0


PATIENCE = Patience()


@dataclass(frozen=True)
class Stat:
    """What a listing or a HEAD request reports about an object."""

    path: str
    size: int
    etag: str  # "" if the service sends none


class Failure(NamedTuple):
    """What the text of an error says, of obstore or multi-storage-client, which is not shown."""

    text: str
    kind: type[BaseException]  # obstore may not be installed, so its types are known by name only
    status: int  # of HTTP; 0: no answer
    code: str  # S3's; "" if there is none

    @classmethod
    def of(cls, e: BaseException) -> "Failure":
        text = str(e)
        status = re.search(r"status[ _]code: (\d{3})", text)
        code = re.search(r"<Code>([\w.]{1,60})</Code>", text)
        return cls(text, type(e), int(status[1]) if status else 0, code[1] if code else "")

    @property
    def answered(self) -> str:
        """The answer, for messages."""
        if self.status == 0:
            return "a redirect" if self.moved else "without a status"
        return f"HTTP {self.status} {self.code}".rstrip()

    @property
    def moved(self) -> bool:
        """Whether the bucket is at another address."""
        return self.status in (301, 307, 308) or (self.status == 0 and "redirect" in self.text)

    @property
    def unavailable(self) -> bool:
        """Whether the service did not answer, or asks for patience."""
        if self.status == 0:
            return not self.moved
        return self.status in (408, 429) or self.status >= 500


# ---- names ---------------------------------------------------------------------------------------


def split(path: str) -> tuple[str, str, str]:
    """(scheme, bucket, key) of a path. ValueError if it names no bucket or may hold a secret, which
    is not shown."""
    refuse_secrets(path)
    match = re.fullmatch(r"(s3|gs|az|msc)://([^/]+)/*(.*)", url(path), re.DOTALL)
    if match is None:
        raise ValueError(
            f"{url(path)}: expected s3://BUCKET/KEY, gs://BUCKET/KEY, az://BUCKET/KEY or "
            f"msc://PROFILE/KEY"
        )
    return match[1], match[2], match[3]


# ---- clients -------------------------------------------------------------------------------------


class Bucket:
    """The client of one bucket, with credentials from the environment. ValueError if the
    environment does not describe an endpoint, or a package is missing."""

    def __init__(self, scheme: str, bucket: str, silence_s: float, give_up_s: float):
        self.scheme = scheme
        self.bucket = bucket
        self.name = f"{scheme}://{bucket}"
        self.host, self.setting = self.name, KEYS_HINT[scheme]  # for messages
        self.endpoint = ""  # an S3 service other than AWS, or ""
        self.obs: Any = None  # has obstore's functions, which take `store`
        self.store: Any = None
        if scheme == "msc":
            self.obs = Msc(bucket)
            return
        try:
            self.obs = load_obstore()
        except (ImportError, OSError) as e:
            advice = (
                f"its copy for a forked process does not load ({e}); set TMPDIR to a folder that "
                f"allows loading libraries, or start processes with spawn"
                if _parents
                else "pip install -e '.[s3]'"
            )
            raise ValueError(f"{self.name}: object storage needs obstore; {advice}") from None
        if scheme == "gs":
            self.host = f"https://storage.googleapis.com/{bucket}"
        if scheme == "s3":
            self._find_endpoint()
        self._open_store(silence_s, give_up_s)

    def _find_endpoint(self) -> None:
        """The address of an S3 service, from the environment."""
        variable = next((name for name in ENDPOINTS if os.environ.get(name)), "")
        self.endpoint = os.environ.get(variable, "")
        self.setting = variable or "AWS_ENDPOINT_URL (not set)"
        if self.endpoint and not ENDPOINT.fullmatch(self.endpoint):
            raise ValueError(
                f"{self.name}: {variable} is not the URL of an endpoint; expected http://HOST:PORT or "
                f"https://HOST, without credentials or a query"
            )
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        self.host = self.endpoint or f"https://s3.{region}.amazonaws.com/{self.bucket}"

    def _open_store(self, silence_s: float, give_up_s: float) -> None:
        """obstore's client of the bucket."""
        options = {
            "allow_http": self.endpoint.startswith("http://"),
            "timeout": timedelta(hours=1),
            "connect_timeout": timedelta(seconds=PATIENCE.connect_s),
            "read_timeout": timedelta(seconds=silence_s),
        }
        backoff = {
            "init_backoff": timedelta(seconds=0.1),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        }
        retry = {
            "max_retries": 10_000,
            "retry_timeout": timedelta(seconds=give_up_s),
            "backoff": backoff,
        }
        endpoint = {"endpoint": self.endpoint} if self.endpoint else {}
        try:
            self.store = self.obs.store.from_url(
                self.name, client_options=options, retry_config=retry, **endpoint
            )
        except BaseException:  # a panic in Rust is not an Exception
            raise ValueError(
                f"{self.name}: environment variables to access it are missing or wrong; check "
                f"{KEYS_HINT[self.scheme]}"
            ) from None

    def stat(self, meta: Mapping[str, Any]) -> Stat:
        """A `Stat` from obstore's description of an object."""
        return Stat(f"{self.name}/{meta['path']}", meta["size"], meta["e_tag"] or "")

    def head(self, key: str) -> Stat | None:
        """Describe an object; None if it does not exist."""
        try:
            return self.stat(self.obs.head(self.store, key))
        except FileNotFoundError:
            return None

    def list_below(self, prefix: str) -> list[Stat]:
        """All objects below a prefix. Programs mark folders by empty objects whose keys end with a
        slash, which obstore drops, as in corpus.parquet/: these are left out."""
        stats: dict[str, Stat] = {}
        for metas in self.obs.list(self.store, prefix or None):
            for meta in metas:
                stat = self.stat(meta)
                # not a marker beside an object of the same name
                if stat.size or meta["path"] not in stats:
                    stats[meta["path"]] = stat
        folders = {parent.as_posix() for key in stats for parent in PurePosixPath(key).parents}
        empty = [key for key, stat in stats.items() if not stat.size]
        alone = [key for key in empty if key not in folders and PurePosixPath(key).suffix]
        missing = {key for key, stat in zip(alone, each(self.head, alone)) if stat is None}
        return [
            stat
            for key, stat in stats.items()
            if key not in missing and (stat.size or key not in folders)
        ]

    def get(self, key: str, begin: int, end: int, pinned: Stat) -> memoryview:
        """Bytes begin .. end - 1 of the pinned version of an object."""
        options = {"range": (begin, end), **({"if_match": pinned.etag} if pinned.etag else {})}
        answer = self.obs.get(self.store, key, options=options)
        data = memoryview(answer.bytes())
        now = self.stat(answer.meta)
        first = answer.range[0]
        if (now.size, now.etag) != (pinned.size, pinned.etag):
            raise Changed(
                f"{pinned.path}: it has changed since this run began (from {pinned.size:,} bytes with ETag "
                f"{pinned.etag} to {now.size:,} bytes with ETag {now.etag}); {ADVICE}"
            )
        if (first, len(data)) != (begin, end - begin):
            raise Garbled(
                f"{pinned.path}: {self.host} sent {len(data):,} bytes from {first:,}, but "
                f"{end - begin:,} bytes from {begin:,} were requested; {PROXY}"
            )
        return data

    def explain(self, e: BaseException, path: str) -> Exception:
        """Our own error for a failed request, without obstore's text, which may hold a secret."""
        if isinstance(e, (Changed, Garbled)):
            return e
        kind, sentence = self._cause(Failure.of(e))
        return kind(f"{path}: {sentence}")

    def _cause(self, failure: Failure) -> tuple[type[Exception], str]:
        """(our own error, what it says) for a failure."""
        status, code, answered = failure.status, failure.code, failure.answered
        keys = KEYS_HINT[self.scheme]
        service, _, _ = keys.partition("_")
        if re.search(r"169\.254\.169\.254|metadata\.google\.internal", failure.text):
            public = f", or {service}_SKIP_SIGNATURE=true for a public bucket"
            return PermissionError, f"no credentials; set {keys}{public * (self.scheme != 'msc')}"
        if code == "NoSuchBucket":
            return FileNotFoundError, (
                f"bucket {self.bucket} does not exist; check the path and {self.setting}"
            )
        if issubclass(failure.kind, FileNotFoundError):
            return FileNotFoundError, "no such object"
        if failure.kind.__name__ == "PreconditionError":
            return Changed, f"it has changed since this run began (its ETag differs); {ADVICE}"
        if issubclass(failure.kind, ValueError) or failure.kind.__name__ == "InvalidPathError":
            return ValueError, (
                "the key, or one below it, has an empty part, '.' or '..'; rename the object"
            )

        # what may go better in another request, or after a restart
        other_range = r"Requested .*, got |non-partial|Content-Range|CONTENT_RANGE"
        if not status and re.search(other_range, failure.text):
            return Garbled, (
                f"{self.host} sent a different range from the one requested, {TRIES} times; {PROXY}"
            )
        if code in BUSY_CODES and status not in (0, 408, 429) and status < 500:
            return Garbled, (
                f"{self.host} could not answer just now, {TRIES} times ({answered}); restart when it, this machine "
                f"and the connection are less busy (if a time is wrong, set this machine's clock)"
            )
        is_denied = issubclass(failure.kind, PermissionError)
        if failure.unavailable and not is_denied:
            unanswered = answered if status else "no connection, or it was interrupted"
            # obstore does not repeat a listing whose answer was interrupted
            kind = Garbled if "ListResponseBody" in failure.text else OSError
            return kind, (
                f"no complete answer from {self.host} ({unanswered}); check the network and {self.setting}, then "
                f"restart"
            )

        # why the service refuses a request
        is_elsewhere = failure.moved or code == "AuthorizationHeaderMalformed"
        if is_denied or is_elsewhere or status in (401, 403) or "Token" in code:
            of_s3 = f" (AWS_SESSION_TOKEN, if they are temporary), {self.setting} and AWS_DEFAULT_REGION"
            return PermissionError, (
                f"access denied ({answered}); check {keys}{of_s3 * (self.scheme == 's3')}, and the permissions"
            )
        return OSError, (
            f"{self.host} refused the request ({answered}); check the path and {self.setting}"
        )


open_bucket = functools.cache(Bucket)  # one client for all requests with the same timeouts
_loading = threading.Lock()
# in a forked process: the parent's clients and obstore, which it must not use
_parents: list[Any] = []


def _forget_parent() -> None:
    """Replace locks, clients and obstore in a forked process. The parent's objects stay in memory:
    deleting them would close its connections."""
    global open_bucket, _loading, _lock
    names = [name for name in sys.modules if name.partition(".")[0] == "obstore"]
    _parents.append((open_bucket, [sys.modules.pop(name) for name in names]))
    open_bucket = functools.cache(Bucket)
    _loading = threading.Lock()
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_parent)


def load_obstore() -> Any:
    """The package obstore. A forked process loads a copy of obstore's library, to get its own
    threads and sockets: for the same file, the linker returns the library that the parent loaded.
    ImportError or OSError."""
    with _loading, contextlib.ExitStack() as stack:
        if (
            _parents
            and "obstore" not in sys.modules
            and (spec := importlib.util.find_spec("obstore"))
        ):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            shutil.copytree(Path(str(spec.origin)).parent, Path(folder, "obstore"))
            sys.path.insert(0, folder)
            stack.callback(sys.path.remove, folder)
        import obstore.store

        return obstore


class Msc:
    """A profile of multi-storage-client behind obstore's interface. Its answers have neither range
    nor ETag, so `get` asks for the object's description after each read."""

    def __init__(self, profile: str):
        try:
            import multistorageclient as msc
        except ImportError:
            raise ValueError(
                f"msc://{profile}: the package multi-storage-client is not installed; pip install "
                f"multi-storage-client"
            ) from None
        self.root, self.span = f"msc://{profile}/", msc.types.Range
        try:
            self.client, _ = msc.resolve_storage_client(self.root)
        except Exception:
            raise ValueError(
                f"msc://{profile}: no such profile; check the file that MSC_CONFIG names"
            ) from None

    def _meta(self, info: Any) -> dict[str, Any]:
        return {
            "path": info.key.removeprefix(self.root),
            "size": info.content_length,
            "e_tag": info.etag,
        }

    def head(self, _: object, key: str) -> dict[str, Any]:
        info = self.client.info(key)
        if info.type != "file":
            raise FileNotFoundError
        return {**self._meta(info), "path": key}

    def list(self, _: object, prefix: str | None) -> Iterator[list[dict[str, Any]]]:
        yield [self._meta(info) for info in self.client.list(path=prefix or "")]

    def get(self, _: object, key: str, options: dict[str, Any]) -> Any:
        begin, end = options["range"]
        data = self.client.read(key, byte_range=self.span(offset=begin, size=end - begin))
        return SimpleNamespace(bytes=lambda: data, range=(begin, end), meta=self.head(None, key))


# ---- requests ------------------------------------------------------------------------------------

ANSWERED: set[tuple[str, str]] = set()  # (scheme, bucket) of every bucket that has answered
_last_warning = [-math.inf]  # time of the last warning about a wait


def request(
    path: str,
    call: Callable[[Bucket, str], T],
    *,
    what: str = "",
    patience: Patience | None = None,
) -> T:
    """The result of `call(client, key)` for a path. The call runs in a daemon thread, and the
    caller waits here. Stop if a stop is requested meanwhile. `what` names the request in messages;
    `patience` is PATIENCE unless given."""
    patience = patience or PATIENCE
    scheme, name, key = split(path)
    bucket_name = (scheme, name)
    start = time.monotonic()
    what = what or path

    def call_until_valid(_: None) -> T:
        """Call up to TRIES times until the answer fits the request."""
        bucket = open_bucket(
            scheme,
            name,
            patience.silence_s,
            patience.give_up_s if bucket_name in ANSWERED else patience.first_answer_s,
        )
        for attempt in range(TRIES):
            try:
                answer = call(bucket, key)
                break
            except BaseException as e:  # a panic in Rust is not an Exception
                error = bucket.explain(e, path)
            if not isinstance(error, Garbled) or attempt == TRIES - 1:
                raise error from None
            time.sleep(0.1 * 2**attempt)
        ANSWERED.add(bucket_name)
        return answer

    def poll_and_warn() -> None:
        """`poll`, and warn of a request that takes long."""
        poll()
        now = time.monotonic()
        if now - max(start, _last_warning[0]) > patience.log_every_s:
            _last_warning[0] = now  # one warning for all pending requests
            log.warning("%s: still waiting for object storage (%.0f s)", what, now - start)

    return next(each(call_until_valid, [None], poll=poll_and_warn))


@atexit.register
def _end() -> None:
    """Give pending requests a second to end, so that none returns while the interpreter shuts
    down."""
    end = time.monotonic() + 1.0
    for thread in threading.enumerate():
        if thread.name == "each":
            thread.join(max(0.0, end - time.monotonic()))


def find(path: str) -> Stat | None:
    """Describe an object; None if it does not exist. FileNotFoundError if the bucket does not
    exist."""
    return request(path, Bucket.head)


def list_objects(path: str) -> list[Stat]:
    """All objects below a path. FileNotFoundError if the bucket does not exist."""
    return request(path, lambda bucket, key: bucket.list_below(key.rstrip("/")))


def read_range(stat: Stat, begin: int, end: int) -> memoryview:
    """Bytes begin .. end - 1 of an object. FileNotFoundError if it no longer exists, ValueError if
    it has changed, OSError if object storage does not answer or denies access."""
    try:
        return request(
            stat.path,
            lambda bucket, key: bucket.get(key, begin, end, stat),
            what=f"{stat.path} bytes {begin:,} to {end:,}",
        )
    except FileNotFoundError as e:
        raise FileNotFoundError(f"{e}, but this run reads it; {ADVICE}") from None


def read_whole(stat: Stat) -> Iterator[memoryview]:
    """All bytes of an object in pieces, with several requests at once."""
    return each(
        lambda at: read_range(stat, at, min(at + REQUEST_BYTES, stat.size)),
        range(0, stat.size, REQUEST_BYTES),
        at_once=8,
    )


kept_range = functools.lru_cache(KEPT_PARTS)(read_range)


def read_parts(stat: Stat, begin: int, end: int) -> bytes:
    """`read_range` for a caller that will read the bytes after these: recently used parts stay in
    memory."""
    first = begin // PART_BYTES * PART_BYTES
    parts = each(
        lambda at: kept_range(stat, at, min(at + PART_BYTES, stat.size)),
        range(first, end, PART_BYTES),
    )
    return b"".join(parts)[begin - first : end - first]


class RemoteReader:
    """The ids of a .bin; see `nanochat.tokens.Reader`. Every array has its own memory: a view would
    keep a whole part alive while one of its documents is pending."""

    def __init__(self, path: "RemotePath", dtype: np.dtype):
        self.pinned, self.dtype = path.pinned(), np.dtype(dtype)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Elements begin .. end - 1, (end - begin,), read-only. Raises what `read_range` raises."""
        return self._read(read_parts, begin, end)

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """`read` of each range, in order, with several requests at once. Fetches only these bytes
        and caches none."""
        return list(each(lambda span: self._read(read_range, *span), ranges))

    def _read(
        self, read_bytes: Callable[..., bytes | memoryview], begin: int, end: int
    ) -> np.ndarray:
        """Elements begin .. end - 1, by `read_parts` or `read_range`."""
        size = self.dtype.itemsize
        return np.frombuffer(
            read_bytes(self.pinned, begin * size, end * size) if begin < end else b"", self.dtype
        )


# ---- paths ---------------------------------------------------------------------------------------

_lock = threading.RLock()
# the first state that this launch saw; None: the object did not exist
_objects: dict[str, Stat | None] = {}
_listed: set[str] = set()  # folders whose objects are all in _objects


def open_path(path: str) -> "RemotePath":
    """The RemotePath for a string. ValueError if it may hold a secret or names no bucket."""
    if len(RemotePath(path).parts) > 1:
        split(path)
    return RemotePath(path)


class RemotePath(PinnedPath):
    """A path in object storage."""

    copies = "object_storage"

    def is_dir(self) -> bool:
        return next(self.walk(), None) is not None

    def is_file(self) -> bool:
        return self._stat() is not None

    def walk(self) -> Iterator["RemotePath"]:
        """See `Remote.walk`: each folder is listed once in a launch, all objects below it together."""
        name = str(self).rstrip("/")
        if len(self.parts) == 1:  # "s3:", whose buckets are not listed
            return iter(())
        with _lock:
            if not _listed.intersection(map(str, (self, *self.parents))):
                for stat in list_objects(name):
                    _objects.setdefault(stat.path, stat)
                _listed.add(name)
            below = [
                path for path, stat in _objects.items() if stat and path.startswith(f"{name}/")
            ]
        return map(RemotePath, below)

    def _stat(self) -> Stat | None:
        """The object's first state in this launch, None if it did not exist."""
        name = str(self)
        with _lock:
            if name not in _objects and not _listed.intersection(map(str, self.parents)):
                no_file = not split(name)[2] or (name in _listed and self.is_dir())
                _objects[name] = None if no_file else find(name)
            return _objects.get(name)

    def pinned(self) -> Stat:
        """The object's first state in this launch. FileNotFoundError if it did not exist."""
        stat = self._stat()
        if stat is None:
            raise FileNotFoundError(f"{self}: no such object")
        return stat

    def read_of(self, file: Stat, begin: int, end: int) -> bytes:
        return read_parts(file, begin, end)

    def pieces(self) -> Iterator[memoryview]:
        return read_whole(self.pinned())

    def copy_folder(self) -> Sequence[str]:
        return split(str(self.parent))[1:]

    def open_reader(self, dtype: np.dtype) -> RemoteReader:
        return RemoteReader(self, dtype)

    @staticmethod
    def forget() -> None:
        """Drop listings, cached parts and clients."""
        with _lock:
            _objects.clear()
            _listed.clear()
        kept_range.cache_clear()
        open_bucket.cache_clear()
        ANSWERED.clear()
