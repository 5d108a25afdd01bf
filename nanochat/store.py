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

**Waiting.** A request has a thread of its own, a daemon. Whoever needs its answer looks ten times a
second whether the launch should stop, and raises `StopAsked` then. So a store that stalls holds up
neither a signal nor the end of Python.

    reader --Question--> [thread: ask, back off, ask again ...] --> answer

What another try cannot help fails at once. The rest is asked again for 300 s; but for 12 s only
while the store has never answered, because then the endpoint is wrong. (obstore's own retries know
neither a wrong range, nor 429, nor another package's store, and cannot say what they wait for.)

**Secrets.** The error text of a store may hold an access key or a signed URL. None of it is passed
on: all sentences are ours, with the HTTP status and the S3 code at most. A path that may hold
credentials is refused and never printed.

obstore reads s3:// gs:// az://, multi-storage-client what its profiles say: msc://PROFILE/KEY. Of
obstore, pyarrow.fs and s3fs, obstore took the least processor time; it alone sends If-Match and
tells ETag, size and range of an answer.
"""

import atexit
import contextlib
import functools
import glob
import io
import logging
import os
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np

from nanochat.common import LAUNCH, StopAsked, atomic_open, get_base_dir, hash_json

log = logging.getLogger(__name__)
T = TypeVar("T")

REQUEST_BYTES = 4 << 20  # the most that is asked for at once
PART_BYTES, KEPT_PARTS = 1 << 18, 1024  # of files that lanes read on in: 256 MB
MAX_REQUESTS = 64  # under way at once
LOOK_EVERY_S = 0.1
GONE = "bring the old object back, or start a new run (--model-tag)"
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL")
ENDPOINT = re.compile(r"https?://((?:[\w.-]+|\[[\w:.]+\])(?::\d{1,5})?)(/[\w.~/-]*)?")
CREDENTIALS = (  # any of which lets a client try
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
KEYS_HINT = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY", "msc": "MSC_CONFIG"}
TROUBLES = (  # what an error without a status shows, and our words for it
    ("Received non-partial", "it sent the whole object for a range"), ("Eof", "its answer broke off"),
    ("Requested", "it sent another range"), ("Interrupted", "its answer broke off"),
    ("dns error", "nobody knows that name"), ("Time", "no answer in time"),
    ("error sending request", "no connection"))


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, seconds."""

    connect_s: float = 5.0
    silence_s: float = 15.0  # for the next byte of an answer
    upload_s: float = 300.0  # for a part to be sent and acknowledged
    first_answer_s: float = 12.0  # of failures, while the store has never answered
    give_up_s: float = 300.0  # of failures
    first_backoff_s: float = 0.2
    max_backoff_s: float = 20.0
    log_after_s: float = 10.0
    log_every_s: float = 30.0


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
    if re.match(r"\w+:/+([^/]*@|[^@]*:[^@]*@|[^?]*\?)", url(path)):
        raise ValueError("a path of object storage with user information (@) or a query (?): "
                         "credentials do not belong into a path, which is logged; set "
                         "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    match = re.fullmatch(r"(s3|gs|az|msc)://([^/]+)/*(.*)", url(path), re.DOTALL)
    if match is None:
        raise ValueError(f"{url(path)}: expected s3://BUCKET/KEY, gs://BUCKET/KEY, az://BUCKET/KEY "
                         f"or msc://PROFILE/KEY")
    return match[1], match[2], match[3]


def is_odd(key: str) -> bool:
    """Whether no path can name this object: a part of its key is empty, . or .., or `split` would
    take it for a secret."""
    parts = key.rstrip("/").split("/")
    return bool({"", ".", ".."} & set(parts) or re.search(r":[^@]*@|\?", key))


# ---- questions ----------------------------------------------------------------------------------

class Passing(Exception):
    """What went wrong, and may not go wrong the next time."""


class Changed(ValueError):
    """An object is not what it was."""


_free = threading.Semaphore(MAX_REQUESTS)
_lock = threading.RLock()
_told_at = [float("-inf")]  # when the log last told of a wait


@atexit.register
def _end() -> None:
    """Requests under way are given a second: none may come back into a Python that is torn down."""
    end = time.monotonic() + 1.0
    for _ in range(MAX_REQUESTS):
        if not _free.acquire(timeout=max(0.0, end - time.monotonic())):
            break


class Question(Generic[T]):
    """`ask` called in a thread, with the client of a path's bucket and the key, until it answers."""

    def __init__(self, path: str, ask: "Callable[[Bucket, str], T]", *, what: str = "",
                 upload: bool = False):
        scheme, bucket, self.key = split(path)
        silence_s = PATIENCE.upload_s if upload else PATIENCE.silence_s
        self.bucket = open_bucket(scheme, bucket, silence_s)
        self.path, self.ask, self.what = path, ask, what or path
        self.tries, self.trouble = 0, ""
        self.future: Future[T] = Future()
        threading.Thread(target=self._run, name="store", daemon=True).start()

    def _run(self) -> None:
        with _free:
            try:
                self.future.set_result(self._try())
            except BaseException as e:
                self.future.set_exception(e)

    def _try(self) -> T:
        began, bucket = time.monotonic(), self.bucket
        while True:
            self.tries += 1
            try:
                answer = self.ask(bucket, self.key)
                bucket.answered = True
                return answer
            except (Passing, Changed) as e:
                error: Exception = e
            except BaseException as e:  # a panic of obstore's is no Exception
                error = bucket.explain(e, self.path)
            if not isinstance(error, Passing):
                raise error from None
            self.trouble, away_s = str(error), time.monotonic() - began
            if away_s > (PATIENCE.give_up_s if bucket.answered else PATIENCE.first_answer_s):
                raise OSError(f"{self.what}: no answer from {bucket.host} in {away_s:,.0f} s "
                              f"({self.tries} tries; the last: {self.trouble}); check the network "
                              f"and {bucket.where}, then start again: a run goes on from its last "
                              f"checkpoint") from None
            most_s = PATIENCE.max_backoff_s if bucket.answered else PATIENCE.first_answer_s / 10
            backoff_s = min(most_s, PATIENCE.first_backoff_s * 2.0 ** min(self.tries - 1, 30))
            time.sleep(backoff_s * random.SystemRandom().uniform(0.5, 1.0))  # not all ranks at once

    def answer(self) -> T:
        """Wait for the answer, or raise what became of the question."""
        began, tell_after_s = time.monotonic(), PATIENCE.log_after_s
        while not wait([self.future], timeout=LOOK_EVERY_S).done:
            # a pool's threads are joined when Python ends, before anybody could tell them to stop
            if LAUNCH.stop() or getattr(threading, "_SHUTTING_DOWN", False):
                raise StopAsked(f"{self.what}: not waited for any longer, as the program is to stop")
            now = time.monotonic()
            if now - began > tell_after_s:
                tell_after_s += PATIENCE.log_every_s
                with _lock:
                    tell = now - _told_at[0] > PATIENCE.log_after_s / 2  # one line for all that wait
                    _told_at[0] = now if tell else _told_at[0]
                if tell:
                    log.warning("%s: waiting for the store for %.0f s (try %d; the last: %s)",
                                self.what, now - began, self.tries, self.trouble or "no answer yet")
        return self.future.result()


# ---- clients ------------------------------------------------------------------------------------

class Bucket:
    """The client of one bucket. Credentials come from the environment. ValueError where that makes
    no sense or a package is missing, PermissionError where there are no credentials."""

    def __init__(self, scheme: str, bucket: str, silence_s: float):
        self.scheme, self.bucket, self.name = scheme, bucket, f"{scheme}://{bucket}"
        self.host, self.where = f"the store of {self.name}", KEYS_HINT[scheme]
        self.answered = False  # whether the store ever said anything
        self.obs: Any = None  # obstore, or what has its functions
        self.store: Any = None
        if scheme == "msc":
            self.obs = Msc(bucket)
            return
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise ValueError(f"{self.name}: object storage needs obstore; pip install "
                             f"'nanochat[s3]'") from None
        endpoint = endpoint_url() if scheme == "s3" else ""
        if endpoint:
            match = ENDPOINT.fullmatch(endpoint)
            if match is None:
                raise ValueError(f"{self.name}: AWS_ENDPOINT_URL is no URL of an endpoint; expected "
                                 f"http://HOST:PORT or https://HOST, without credentials or a query")
            self.host, self.where = match[1], "AWS_ENDPOINT_URL"
            if not any(os.environ.get(name) for name in CREDENTIALS):
                raise self._no_credentials()  # such a store knows no role of this machine
        options = {"allow_http": endpoint.startswith("http://"), "timeout": timedelta(hours=1),
                   "connect_timeout": timedelta(seconds=PATIENCE.connect_s),
                   "read_timeout": timedelta(seconds=silence_s)}
        open_store: Any = from_url  # its types want each option by name
        try:
            self.obs, self.store = obstore, open_store(
                self.name, client_options=options, retry_config={"max_retries": 0},
                **({"endpoint": endpoint} if endpoint else {}))
        except BaseException:
            raise ValueError(f"{self.name}: the environment does not say how to reach it; check "
                             f"{self.where}") from None

    def stat(self, meta: Any) -> Stat:
        """What the store says of an object."""
        return Stat(f"{self.name}/{meta['path']}", meta["size"], meta["e_tag"] or "")

    def head(self, key: str) -> Stat | None:
        """Look at an object; None where it is not there."""
        try:
            return self.stat(self.obs.head(self.store, key))
        except FileNotFoundError:
            self.list(key)  # raises for a missing bucket, which looks like a missing object
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
        odd = [key for key in keys if is_odd(key)]
        if odd:
            log.warning("%s/%s: %d objects are left out, for no path can name them (a part of the "
                        "key is empty, . or .., or could be a secret)", self.name, prefix, len(odd))
        looked = (found.get(key) or self.head(key) for key in keys if not is_odd(key))
        return [stat for stat in looked if stat is not None]

    def _all_keys(self, prefix: str) -> "list[str]":  # type: ignore[valid-type]
        """obstore refuses the whole listing for one odd key. pyarrow lists all, without ETags."""
        from pyarrow import fs

        scheme, _, host = endpoint_url().rpartition("://")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        s3 = fs.S3FileSystem(
            endpoint_override=host or None, scheme=scheme or "https", region=region,
            anonymous=bool(os.environ.get("AWS_SKIP_SIGNATURE")),
            connect_timeout=PATIENCE.connect_s, request_timeout=PATIENCE.silence_s)
        below = fs.FileSelector(f"{self.bucket}/{prefix}".rstrip("/"), recursive=True)
        return [info.path.removeprefix(f"{self.bucket}/") for info in s3.get_file_info(below)
                if info.type == fs.FileType.File]

    def get(self, key: str, begin: int, end: int, pinned: Stat) -> memoryview:
        """Bytes of an object that must be what it was."""
        if_match = {"if_match": pinned.etag} if pinned.etag else {}
        answer = self.obs.get(self.store, key, options={"range": (begin, end), **if_match})
        data, found, first = memoryview(answer.bytes()), self.stat(answer.meta), answer.range[0]
        then_and_now = ("size", pinned.size, found.size), ("ETag", pinned.etag, found.etag)
        for name, then, now in then_and_now:
            if then != now:
                raise Changed(f"{pinned.path}: it changed since this run began ({name} {then} then, "
                              f"{now} now); {GONE}")
        if (first, len(data)) != (begin, end - begin):
            raise Passing(f"it sent {len(data):,} bytes from {first:,} for {end - begin:,} from "
                          f"{begin:,}")
        return data

    def _no_credentials(self) -> PermissionError:
        public = "; for a public bucket AWS_SKIP_SIGNATURE=true" if self.scheme == "s3" else ""
        return PermissionError(f"{self.name}: no credentials; set {KEYS_HINT[self.scheme]}{public}")

    def explain(self, e: BaseException, path: str) -> Exception:
        """What became of a question, without a word of the store's own; Passing where another try
        may help."""
        text, name = str(e), type(e).__name__  # obstore, whose they are, may be missing
        status = int((re.search(r"status code: (\d{3})", text) or [0, 0])[1])
        code = (re.search(r"<Code>(\w{1,40})</Code>", text) or ["", ""])[1]
        said = f"HTTP {status} {code}".rstrip()
        self.answered |= status > 0
        if code == "NoSuchBucket":
            return FileNotFoundError(f"{path}: there is no bucket {self.bucket}; check the path and "
                                     f"{self.where}")
        if isinstance(e, FileNotFoundError):
            return FileNotFoundError(f"{path}: no such object")
        if name == "PreconditionError":
            return Changed(f"{path}: it changed since this run began (another ETag); {GONE}")
        if isinstance(e, ValueError) or name == "InvalidPathError":
            return ValueError(f"{path}: no key may have an empty, . or .. part, here or below; name "
                              f"such objects anew")
        if name in ("PermissionError", "PermissionDeniedError", "UnauthenticatedError"):
            return PermissionError(f"{path}: the store refuses it ({said}); check "
                                   f"{KEYS_HINT[self.scheme]} and what they may do with "
                                   f"{self.bucket}")
        if re.search(r"169\.254\.169\.254|metadata\.google\.internal", text) and not self.answered:
            return self._no_credentials()
        if "redirect" in text.split("\n")[0]:
            return ValueError(f"{path}: the bucket lies in another region; set AWS_DEFAULT_REGION")
        if 400 <= status < 500 and status not in (408, 429) and code != "RequestTimeout":
            return OSError(f"{path}: the store refuses it ({said}); check "
                           f"{KEYS_HINT[self.scheme]}, and {self.where}")
        trouble = next((words for shown, words in TROUBLES if shown in text), "no usable answer")
        return Passing(said if status else trouble)


@functools.cache
def open_bucket(scheme: str, bucket: str, silence_s: float) -> Bucket:
    """The client of a bucket, one for all who ask."""
    return Bucket(scheme, bucket, silence_s)


def endpoint_url() -> str:
    """The S3 endpoint that the environment names, "" for AWS's own."""
    return next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), "")


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

    def put(self, _: Any, key: str, data: bytes | Path, **options: Any) -> None:
        if isinstance(data, bytes):
            self.client.write(key, data)
        else:
            self.client.upload_file(key, str(data))

    def delete(self, _: Any, key: str) -> None:
        self.client.delete(key)


# ---- objects ------------------------------------------------------------------------------------

def find(path: str) -> Stat | None:
    """Look at an object; None where it is not there. FileNotFoundError without a bucket."""
    return Question(path, Bucket.head).answer()


def list_files(path: str) -> list[Stat]:
    """All objects below a path, sorted by path. FileNotFoundError without a bucket."""
    found = Question(path, lambda bucket, key: bucket.list(key.rstrip("/"))).answer()
    return sorted(found, key=lambda stat: stat.path)


def write(path: str, data: bytes | Path, *, part_bytes: int = 4 * REQUEST_BYTES) -> None:
    """Put bytes, or what a file holds, there as an object: whole, or not at all."""
    size = len(data) if isinstance(data, bytes) else data.stat().st_size
    Question(path, lambda bucket, key: bucket.obs.put(
        bucket.store, key, data, use_multipart=size > part_bytes, chunk_size=part_bytes,
        max_concurrency=4), upload=True).answer()


def delete(path: str) -> None:
    """Remove an object, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        Question(path, lambda bucket, key: bucket.obs.delete(bucket.store, key)).answer()


def ask_range(stat: Stat, begin: int, end: int) -> Question[memoryview]:
    """Bytes begin .. end - 1 of an object as it was when `stat` was made, on their way."""
    return Question(stat.path, lambda bucket, key: bucket.get(key, begin, end, stat),
                    what=f"{stat.path} bytes {begin:,} to {end:,}")


def data_of(questions: Sequence[Question[memoryview]]) -> bytes:
    """The bytes of ranges, joined. FileNotFoundError where the object is gone, ValueError where it
    is another one by now, OSError where the store stays away or refuses."""
    try:
        return b"".join(question.answer() for question in questions)
    except FileNotFoundError as e:
        raise FileNotFoundError(f"{e}: this run reads it; {GONE}") from None


def read_bytes(stat: Stat, begin: int, end: int) -> bytes:
    """Bytes begin .. end - 1 of an object, all requests under way at once."""
    starts = range(begin, end, REQUEST_BYTES)
    return data_of([ask_range(stat, at, min(at + REQUEST_BYTES, end)) for at in starts])


# of each (object, begin of a part): the part, or its request; the one used longest ago first
_parts: OrderedDict[tuple[Stat, int], Question[memoryview]] = OrderedDict()


def read_parts(stat: Stat, begin: int, end: int) -> bytes:
    """`read_bytes` for who reads on from there: by parts, of which those used last are kept."""
    asked, first = [], begin // PART_BYTES * PART_BYTES
    with _lock:
        for at in range(first, end, PART_BYTES):
            question = _parts.pop((stat, at), None)
            if question is None or (question.future.done() and question.future.exception()):
                question = ask_range(stat, at, min(at + PART_BYTES, stat.size))
            _parts[stat, at] = question
            asked.append(question)
        while len(_parts) > KEPT_PARTS:
            _parts.popitem(last=False)
    return data_of(asked)[begin - first:end - first]


class StoreReader:
    """The ids of a .bin in a store, see `nanochat.tokens.Reader`. What is read has memory of its
    own: a view would keep a part for as long as one of its documents waits for a row."""

    def __init__(self, path: "StorePath", dtype: np.dtype):
        self.pinned, self.dtype = path.pinned(), np.dtype(dtype)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Elements begin .. end - 1, (end - begin,), read-only. Errors as of `data_of`, and
        ValueError outside the file."""
        return np.frombuffer(read_parts(self.pinned, *self._bytes(begin, end)), self.dtype)

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """`read` of each range, in their order, all requests under way at once. No other byte is
        fetched, and none is kept."""
        spans = [self._bytes(begin, end) for begin, end in ranges]
        asked = [[ask_range(self.pinned, a, b)] if a < b else [] for a, b in spans]
        return [np.frombuffer(data_of(questions), self.dtype) for questions in asked]

    def _bytes(self, begin: int, end: int) -> tuple[int, int]:
        size, there = self.dtype.itemsize, self.pinned.size
        if not 0 <= begin <= end or end * size > there:
            raise ValueError(f"{self.pinned.path}: elements {begin:,} to {end:,} wanted, it has "
                             f"{there // size:,}; its index is of another file")
        return begin * size, end * size


# ---- paths --------------------------------------------------------------------------------------

_below: dict[str, dict[str, Stat]] = {}  # of each folder that was listed: all objects below it
_single: dict[str, Stat | None] = {}  # objects that were looked at one by one


def forget() -> None:
    """A launch begins: look anew."""
    with _lock:
        for known in (_below, _single, _parts):
            known.clear()
        open_bucket.cache_clear()


def open_path(path: str) -> "StorePath":
    """The path that a text means. ValueError for a text that may hold a secret."""
    if len(StorePath(path).parts) > 1:
        split(path)
    return StorePath(path)


class StorePath(PosixPath):
    """A path in object storage. Whatever writes is not offered."""

    def __str__(self) -> str:
        return url(super().__str__())

    __fspath__ = __str__

    def is_dir(self, **_: Any) -> bool:
        """Whether there are objects below it."""
        return next(self.rglob("*"), None) is not None

    def is_file(self, **_: Any) -> bool:
        """Whether it is an object."""
        return self._look() is not None

    def exists(self, **_: Any) -> bool:
        """Whether it is an object, or there are some below it."""
        return self.is_dir() or self.is_file()

    def rglob(self, pattern: str, **_: Any) -> Iterator["StorePath"]:  # type: ignore[override]
        """The objects below it whose names match."""
        start = f"{str(self).rstrip('/')}/"
        if "," in start or len(self.parts) == 1:  # several paths; "s3:", whose buckets nobody lists
            return iter(())
        with _lock:
            listed = self._listing((self, *self.parents))
            if listed is None:
                listed = {stat.path: stat for stat in list_files(str(self))}
                _below[str(self)] = listed
        found = (StorePath(path) for path in listed if path.startswith(start))
        return (path for path in found if path.match(pattern))

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
        """The object, to be read as bytes, `buffering` at once if that is given."""
        if mode != "rb":
            raise ValueError(f"{self}: opened with mode {mode!r}; objects in a store are only read, "
                             f"as bytes")
        file = StoreFile(self.pinned())
        return io.BufferedReader(file, buffering) if buffering > 1 else file

    def resolve(self, strict: bool = False) -> "StorePath":
        return self

    absolute = expanduser = resolve

    def mkdir(self, *_: Any, **__: Any) -> None:
        raise ValueError(f"{self}: nothing is written there; name a folder of this machine")

    def local(self) -> Path:
        """A local copy, in CACHE/BUCKET/FOLDER. Its name begins with a hash of the ETag, so it is
        never one of another version, and whoever makes one at the same time makes the same."""
        stat = self.pinned()
        cache = LAUNCH.cache or get_base_dir() / "object_storage"
        folder = Path(cache, *split(str(self.parent))[1:])
        copy = folder / f"{hash_json([stat.size, stat.etag])[:12]}-{self.name}"
        if not copy.is_file() or copy.stat().st_size != stat.size:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_open(copy) as f:
                for at in range(0, stat.size, 8 * REQUEST_BYTES):
                    f.write(read_bytes(stat, at, min(at + 8 * REQUEST_BYTES, stat.size)))
            old = set(folder.glob(f"{'[0-9a-f]' * 12}-{glob.escape(self.name)}")) - {copy}
            for path in old:
                path.unlink(missing_ok=True)
        return copy

    def _look(self) -> Stat | None:
        name = str(self)
        with _lock:
            listed = self._listing(self.parents)
            if listed is not None:
                return listed.get(name)
            if name not in _single:
                several = "," in name or _below.get(name) or not split(name)[2]
                _single[name] = None if several else find(name)
            return _single[name]

    @staticmethod
    def _listing(folders: Sequence[Path]) -> dict[str, Stat] | None:
        return next((_below[str(folder)] for folder in folders if str(folder) in _below), None)


class StoreFile(io.RawIOBase):
    """An object as a file that pyarrow reads. Its last bytes are kept: to read a group begins at
    the footer."""

    def __init__(self, pinned: Stat):
        super().__init__()
        self.pinned, self._at = pinned, 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self.pinned.size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        begin, end = self._at, min(self._at + len(buffer), self.pinned.size)
        if begin >= end:
            return 0
        read = read_parts if begin >= self.pinned.size - PART_BYTES else read_bytes
        buffer[:end - begin] = read(self.pinned, begin, end)
        self._at = end
        return end - begin
