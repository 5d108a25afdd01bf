"""Files of a web server, read in ranges: https://HOST/a.parquet.

`common.as_path` imports this module at the first path that begins with http:// or https://. The
paths of a data set on the Hub (nanochat/integrations/hub.py) are read by the same code.

    parquet file at https://HOST/a.parquet
      |----|####|----|----|####|----|==|
            |                   |     a footer: fetched once, when the run starts
            |                   a column of a row group: fetched before a lane needs it
            kept on disk (range_cache), so a second epoch or a resume does not fetch it again

**Pins.** A file is known by its ETag and size; on the Hub, by its sha256. Each answer's size and
ETag are compared with them, so bytes of two versions never mix: a changed file is an error that
names it.

**Redirects** are followed here, not by urllib3: a token goes to the server that it is for, and to
no other one. The address at which a redirect ends is used for the next ranges of the same
file, which saves a round trip, until it refuses one: such addresses are signed for an hour or so.

**Waiting.** A request that fails for a temporary reason (no connection, a truncated answer, 408,
429, 5xx) is repeated after a growing pause, or after the time in the answer's Retry-After: for 600
s, but for only 9 s if the server has never answered. It runs in a daemon thread, while the caller
checks ten times a second whether the program should stop.

**Secrets.** Addresses with a user or a query are refused as paths. Those at which redirects end may
be signed, so messages name a host, never an address, and show no text of the HTTP library.

Rejected: requests, which takes 3 ms of processor time for a request with a redirect, urllib3 1 ms: it
looks for ~/.netrc and certificates each time. Only its knowledge of proxies is used.
"""

import email.utils
import functools
import io
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import numpy as np
import urllib3
from requests import utils

from nanochat.common import (
    Remote,
    Stop,
    atomic_open,
    check_stop,
    each,
    get_base_dir,
    hash_json,
    refuse_secrets,
    url,
)
from nanochat.integrations.range_cache import RangeCache, open_cache
from nanochat.text import column_range, open_parquet, text_suffix

log = logging.getLogger(__name__)

REQUEST_BYTES = 4 << 20  # the largest range of one request
FOOTER_BYTES = 32 << 10  # fetched at once; a larger footer needs a second request
FOOTERS_BYTES = 64 << 20  # of footers that stay in memory, about
CONNECTIONS = 64  # kept open to each server
TRIES = 5  # attempts to get an answer that fits the request
HOPS = 5  # redirects of one request
MOVED_S = 600.0  # how long the address at which a redirect ended is used
MAGIC = b"PAR1"  # a parquet file begins and ends with it
FOOTER_END = 8  # bytes after the footer: its length, MAGIC
ADVICE = "restore the old file, or start a new run (--model-tag)"


@dataclass(frozen=True)
class Patience:
    """Timeouts, and the time between two warnings, in seconds."""

    connect_s: float = 5.0
    silence_s: float = 15.0  # until the next byte of an answer
    first_answer_s: float = 9.0  # how long to retry until the server first answers
    give_up_s: float = 600.0  # how long to retry after that
    first_pause_s: float = 0.2  # between two attempts; each later pause is twice as long
    log_every_s: float = 15.0


PATIENCE = Patience()


class Changed(ValueError):
    """The file is not the pinned version any more."""


class Garbled(OSError):
    """The answer does not fit the request. A retry may help."""


class Key(NamedTuple):
    """A secret that only one server may see."""

    origin: str = ""  # scheme://host:port
    token: str = ""

    def __repr__(self) -> str:
        return f"Key({self.origin})"


NO_KEY = Key()


class File(NamedTuple):
    """A pinned file."""

    path: str  # for messages
    address: str  # without secrets
    size: int
    etag: str  # "" if the server sends none
    key: Key = NO_KEY
    sha256: str = ""  # of its bytes, if known
    # whether its ETag is what the first server says of the file, before it redirects
    linked: bool = False

    @property
    def name(self) -> str:
        """What identifies its bytes, in the cache."""
        return self.sha256 or hash_json([self.address, self.size, self.etag])


class Answer(NamedTuple):
    """An answer that is not a redirect."""

    status: int
    headers: Mapping[str, str]  # upper and lower case are the same
    body: bytes
    host: str  # that sent it
    address: str  # that it came from, which may be signed, so it is never shown
    first: Mapping[str, str]  # headers of the first server's answer, which may have been a redirect


# ---- requests ------------------------------------------------------------------------------------

ANSWERED: set[str] = set()  # hosts that have answered
_last_warning = [-math.inf]  # time of the last warning about a wait
_moved: dict[str, tuple[str, float]] = {}  # {address: (where its redirect ended, when)}


@functools.cache
def connections_to(origin: str) -> urllib3.PoolManager:
    """The connections of this process to a server, by the proxy that the environment names, if
    any."""
    proxy = utils.select_proxy(origin, utils.get_environ_proxies(origin))
    own_authorities = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    options: dict[str, Any] = {
        "maxsize": CONNECTIONS,
        "cert_reqs": "CERT_REQUIRED",
        "ca_certs": own_authorities or utils.DEFAULT_CA_BUNDLE_PATH,
    }
    if not proxy:
        return urllib3.PoolManager(**options)
    login = ":".join(filter(None, utils.get_auth_from_url(proxy)))
    headers = urllib3.util.make_headers(proxy_basic_auth=login or None)
    return urllib3.ProxyManager(proxy, proxy_headers=headers, **options)


def _forget_parent() -> None:
    """Open new connections in a forked process: those of its parent carry the parent's answers."""
    connections_to.cache_clear()
    _cache_of.cache_clear()


os.register_at_fork(after_in_child=_forget_parent)


def origin_of(address: str) -> str:
    """scheme://host:port of an address."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc}"


def host_of(address: str) -> str:
    """The host and port of an address, for messages."""
    return urlsplit(address).netloc.rpartition("@")[2]


def ask(address: str, headers: Mapping[str, str], key: Key, most: int) -> Answer:
    """The answer to a GET request, after redirects. A body of more than `most` bytes is not read.
    HTTPError, or Garbled for a redirect that cannot be followed."""
    first: Mapping[str, str] | None = None
    timeout = urllib3.Timeout(connect=PATIENCE.connect_s, read=PATIENCE.silence_s)
    for _ in range(HOPS):
        origin = origin_of(address)
        signed = dict(headers)
        if key.token and origin == key.origin:
            signed["Authorization"] = f"Bearer {key.token}"
        answer = connections_to(origin).request(
            "GET",
            address,
            headers=signed,
            timeout=timeout,
            redirect=False,
            retries=False,
            preload_content=False,
        )
        body = answer.read(most + 1)
        if len(body) <= most:
            answer.release_conn()
        else:  # the rest of the body would be in the way of the next answer
            answer.close()
            body = b""
        first = answer.headers if first is None else first
        target = answer.get_redirect_location()
        if not target:
            return Answer(answer.status, answer.headers, body, host_of(address), address, first)
        target = urljoin(address, target)
        if address.startswith("https:") and not target.startswith("https:"):
            raise Garbled(f"{host_of(address)} redirects to an address that is not https")
        address = target
    raise Garbled(f"{host_of(address)} redirects more than {HOPS} times")


def retry_after(answer: Answer) -> float:
    """The seconds for which a server asks to wait; 0 if it does not."""
    value = answer.headers.get("Retry-After", "")
    if re.fullmatch(r"\d{1,6}", value):
        return float(value)
    when = email.utils.parsedate_tz(value)
    return 0.0 if when is None else max(0.0, email.utils.mktime_tz(when) - time.time())


def is_temporary(status: int) -> bool:
    """Whether a request may succeed later."""
    return status in (408, 425, 429) or status >= 500


def get(
    path: str, address: str, headers: Mapping[str, str], *, key: Key = NO_KEY, most: int
) -> Answer:
    """The answer to a GET request, which is repeated if that may help. `path` names it in messages.
    OSError if there is no answer."""
    began = time.monotonic()
    pause_s = PATIENCE.first_pause_s
    first_host = host_of(address)
    while True:
        host = first_host  # of messages; the one that a redirect names may be what fails
        asked_s = 0.0
        try:
            answer = _ask_where_it_moved(address, headers, key, most)
            host = answer.host
            ANSWERED.update((first_host, host))
            if not is_temporary(answer.status):
                return answer
            problem = f"HTTP {answer.status}"
            asked_s = retry_after(answer)
        except Garbled as e:
            problem = str(e)
        except (urllib3.exceptions.HTTPError, OSError) as e:
            problem = "no complete answer"
            if isinstance(e, urllib3.exceptions.SSLError):
                problem = "its certificate is not valid here"
        patience_s = PATIENCE.give_up_s if host in ANSWERED else PATIENCE.first_answer_s
        wait_s = max(pause_s, asked_s)
        waited_s = time.monotonic() - began
        if waited_s + wait_s > patience_s:
            raise OSError(
                f"{path}: no answer from {host} for {waited_s:.0f} s ({problem}); check the network, then "
                f"restart: a run resumes from its last checkpoint"
            )
        _warn_of_wait(path, host, problem, waited_s)
        pause(wait_s)
        pause_s *= 2


def pause(seconds: float) -> None:
    """Wait, unless a stop is requested."""
    end = time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        check_stop()
        time.sleep(min(left_s, 0.1))


def _ask_where_it_moved(address: str, headers: Mapping[str, str], key: Key, most: int) -> Answer:
    """`ask` at the address at which an earlier redirect ended, if it is recent and still answers."""
    target, when = _moved.get(address, ("", -math.inf))
    if time.monotonic() - when < MOVED_S:
        answer = ask(target, headers, key, most)
        if answer.status in (200, 206):
            return answer
        _moved.pop(address, None)
    answer = ask(address, headers, key, most)
    if answer.address != address and answer.status == 206:
        _moved[address] = (answer.address, time.monotonic())
    return answer


def _warn_of_wait(path: str, host: str, problem: str, waited_s: float) -> None:
    """Warn about a request that waits, once for all of them."""
    now = time.monotonic()
    if waited_s > 1 and now - _last_warning[0] > PATIENCE.log_every_s:
        _last_warning[0] = now
        log.warning("%s: waiting for %s (%s, %.0f s)", path, host, problem, waited_s)


def poll() -> None:
    """Raise Stop if the program should stop, or ends."""
    check_stop()
    if getattr(threading, "_SHUTTING_DOWN", False):
        raise Stop("the program ends")


# ---- ranges --------------------------------------------------------------------------------------


def version_of(answer: Answer) -> str:
    """The ETag that an answer gives to the file. A server that redirects may name that of the file
    in X-Linked-Etag, as the Hub does."""
    etag = answer.first.get("X-Linked-Etag") or answer.headers.get("ETag", "")
    return etag.removeprefix("W/").strip('"')


def explain_status(path: str, answer: Answer) -> Exception:
    """Our own error for a request that a server refuses."""
    answered = f"HTTP {answer.status} from {answer.host}"
    if answer.status in (404, 410):
        return FileNotFoundError(f"{path}: no such file ({answered}); check the address")
    if answer.status in (401, 403):
        return PermissionError(
            f"{path}: access denied ({answered}); data must be readable without a password: download it, or "
            f"name a public address"
        )
    return OSError(f"{path}: the request was refused ({answered}); check the address")


class Reader:
    """Reads pinned files of one kind of server. A subclass explains its own answers."""

    @staticmethod
    def explain(path: str, answer: Answer) -> Exception:
        """The error for an answer that is not a success."""
        return explain_status(path, answer)

    def read(self, file: File, begin: int, end: int) -> bytes:
        """Bytes begin .. end - 1 of a file, by several requests at once. FileNotFoundError if it no
        longer exists, Changed if it is another version, OSError if the server does not send it."""
        starts = range(begin, end, REQUEST_BYTES)
        if len(starts) == 1 and threading.current_thread().name == "each":
            return self._read_piece(file, begin, end)  # whoever waits for this thread polls

        def read_piece(at: int) -> bytes:
            return self._read_piece(file, at, min(at + REQUEST_BYTES, end))

        return b"".join(each(read_piece, starts, at_once=8, poll=poll))

    def _read_piece(self, file: File, begin: int, end: int) -> bytes:
        """`read` by one request, which is repeated if the answer does not fit it."""
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        for attempt in range(TRIES):
            answer = get(file.path, file.address, headers, key=file.key, most=end - begin)
            try:
                return self._check(file, begin, end, answer)
            except Garbled:
                if attempt == TRIES - 1:
                    raise
            pause(PATIENCE.first_pause_s)
        raise AssertionError

    def _check(self, file: File, begin: int, end: int, answer: Answer) -> bytes:
        """The body of an answer with a range. Raises what `read` raises, and Garbled."""
        if answer.status == 416:
            raise Changed(f"{file.path}: it is shorter than when this run began; {ADVICE}")
        if answer.status == 200:
            body, found = answer.body, (0, len(answer.body), len(answer.body))
            if (begin, end) != (0, file.size) or not body:
                raise OSError(
                    f"{file.path}: {answer.host} does not send ranges of files; download it first"
                )
        elif answer.status == 206:
            body, found = answer.body, parse_range(answer)
        else:
            raise self.explain(file.path, answer)
        etag = version_of(answer)
        is_other_etag = bool(etag and file.etag) and etag != file.etag
        # where a redirect ended, the other server has an ETag of its own
        says_it = "X-Linked-Etag" in answer.first or answer.address == file.address
        is_comparable = says_it or not file.linked
        if found[2] != file.size or (is_other_etag and is_comparable):
            raise Changed(
                f"{file.path}: it has changed since this run began (from {file.size:,} bytes with ETag "
                f"{file.etag or 'unknown'} to {found[2]:,} bytes with ETag {etag or 'unknown'}); {ADVICE}"
            )
        if found[:2] != (begin, end) or len(body) != end - begin:
            raise Garbled(
                f"{file.path}: {answer.host} sent {len(body):,} bytes from {found[0]:,}, but "
                f"{end - begin:,} bytes from {begin:,} were requested; bypass the proxy that changes "
                f"requests between this machine and the server"
            )
        return body

    def read_footer(self, file: File) -> bytes:
        """The end of a parquet file, from its footer on; its last bytes if it is none."""
        tail = self.read(file, max(0, file.size - FOOTER_BYTES), file.size)
        if len(tail) < FOOTER_END or not tail.endswith(MAGIC):
            return tail
        length = int.from_bytes(tail[-FOOTER_END : -len(MAGIC)], "little") + FOOTER_END
        if length > file.size:
            return tail
        missing = length - len(tail)
        if missing > 0:
            begin = file.size - length
            tail = self.read(file, begin, begin + missing) + tail
        return tail[-length:]


def parse_range(answer: Answer) -> tuple[int, int, int]:
    """(begin, end, size of the file) of an answer with a range. Garbled if it does not say them."""
    header = answer.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", header)
    if match is None:
        raise Garbled(f"{answer.host} did not say which range it sent")
    return int(match[1]), int(match[2]) + 1, int(match[3])


# ---- paths ---------------------------------------------------------------------------------------


_footers: dict[str, bytes] = {}  # in memory, because each batch of a group opens its file


@functools.cache
def _cache_of(base: str, limit: int) -> RangeCache:
    """The cache below the base directory, which is looked up once: `base` is what names it."""
    return open_cache(get_base_dir() / "data_cache", limit)


class RangePath(Remote):
    """A path whose files are read in ranges. A subclass finds the files."""

    reader = Reader()

    def find(self) -> File | None:
        """The file at this path, in its first state of this launch. None if there is none."""
        raise NotImplementedError

    def pinned(self) -> File:
        """The file at this path. FileNotFoundError if it does not exist."""
        file = self.find()
        if file is None:
            raise FileNotFoundError(f"{self}: no such file")
        return file

    def is_file(self) -> bool:
        return self.find() is not None

    def stat(self) -> os.stat_result:
        """The size, and the mode of a read-only file."""
        return os.stat_result((0o100444, 0, 0, 1, 0, 0, self.pinned().size, 0, 0, 0))

    def etag(self) -> str:
        return self.pinned().etag

    def sha256(self) -> str:
        return self.pinned().sha256

    def open(self, mode: Literal["rb"], buffering: int = -1) -> BinaryIO:
        """See `Remote.open`. Without buffering, each read is one range, which stays on disk."""
        raw: Any = RangeFile(self)
        if buffering == 0:
            return raw
        return io.BufferedReader(raw, max(buffering, io.DEFAULT_BUFFER_SIZE))

    def read(self, begin: int, end: int) -> bytes:
        """Bytes begin .. end - 1, which stay on disk."""
        return self._cache().read(*self._entry(self.pinned(), begin, end))

    def footer(self) -> bytes | None:
        """See `Remote.footer`."""
        file = self.pinned()
        name = f"{file.name}-footer"
        if name in _footers:
            return _footers[name]
        if text_suffix(file.path) != ".parquet" or file.size <= FOOTER_END:
            return None
        footer = self._cache().read(name, lambda: self.reader.read_footer(file))
        if len(_footers) * len(footer) < FOOTERS_BYTES:
            _footers[name] = footer
        return footer

    def read_soon(self, group: int, field: str, distance: int) -> None:
        """See `Remote.read_soon`. The footer says where the column is, so it may be fetched, too."""
        file = self.pinned()

        def job() -> None:
            with open_parquet(self, field) as opened:
                begin, end = column_range(opened.metadata, group, field)
            self._cache().ensure(*self._entry(file, begin, end))

        self._cache().do_soon(f"{file.name}-{field}-{group}", job, distance)

    def _entry(self, file: File, begin: int, end: int) -> tuple[str, Callable[[], bytes]]:
        """The name of a range in the cache, and what fetches it."""
        return f"{file.name}-{begin}-{end}", partial(self.reader.read, file, begin, end)

    def _cache(self) -> RangeCache:
        return _cache_of(os.environ.get("NANOCHAT_BASE_DIR", ""), Remote.cache_bytes)

    def open_reader(self, dtype: np.dtype) -> Any:
        raise ValueError(
            f"{self}: token files are read from this machine or from object storage only; download them first"
        )

    def local_copy(self, cache: Path | str | None = None) -> Path:
        """A local copy in CACHE/HOST/FOLDER. Its name begins with a hash of size and version."""
        file = self.pinned()
        folder = Path(cache or get_base_dir() / "web", *self.parent.parts[1:])
        copy = folder / f"{hash_json([file.size, file.etag])[:12]}-{self.name}"
        if not copy.is_file() or copy.stat().st_size != file.size:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_open(copy) as f:
                f.writelines(self._pieces(file))
        return copy

    def _pieces(self, file: File) -> Iterator[bytes]:
        """The bytes of a file, in order."""
        span = 8 * REQUEST_BYTES
        for begin in range(0, file.size, span):
            yield self.reader.read(file, begin, min(begin + span, file.size))

    @staticmethod
    def forget() -> None:
        """Drop what is known about files and servers."""
        for known in KNOWN:
            known.clear()


class RangeFile(io.RawIOBase):
    """A file as a binary file, in which each read fetches one range."""

    def __init__(self, path: RangePath) -> None:
        super().__init__()
        self.path = path
        self.size = path.pinned().size
        self._at = 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self.size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        begin = self._at
        end = min(begin + len(buffer), self.size)
        if begin >= end:
            return 0
        buffer[: end - begin] = self.path.read(begin, end)
        self._at = end
        return end - begin


# ---- web servers ---------------------------------------------------------------------------------

_lock = threading.Lock()
_files: dict[str, File | None] = {}  # {path: what this launch found}
KNOWN: list[Any] = [_files, _moved, _footers, ANSWERED]  # what a launch begins without


def open_path(path: str) -> "WebPath":
    """The WebPath of a string. ValueError if it may hold a secret."""
    refuse_secrets(path)
    return WebPath(path)


class WebPath(RangePath):
    """https://HOST/a.parquet. A web server has no folders that can be listed."""

    def is_dir(self) -> bool:
        return False

    def walk(self) -> Iterator["WebPath"]:
        return iter(())

    def find(self) -> File | None:
        path = str(self)
        with _lock:
            is_known = path in _files
        if not is_known and len(self.parts) > 2:
            found = next(each(find_file, [path], poll=poll))
            with _lock:
                _files.setdefault(path, found)
        with _lock:
            return _files.get(path)


def find_file(path: str) -> File | None:
    """Ask for the first byte of a file, because some servers refuse HEAD. None if it does not
    exist, or if something that is not data is refused: a server without lists may answer 403 for
    what does not exist."""
    refuse_secrets(path)
    parts = urlsplit(url(path))
    address = parts._replace(path=quote(parts.path)).geturl()
    answer = get(path, address, {"Range": "bytes=0-0", "Accept-Encoding": "identity"}, most=1)
    is_data = text_suffix(path) != ""
    if answer.status in (404, 410) or (answer.status in (401, 403) and not is_data):
        return None
    length = answer.headers.get("Content-Length", "")
    if answer.status == 206:
        size = parse_range(answer)[2]
    elif answer.status == 416:  # an empty file
        size = 0
    elif answer.status == 200 and length.isdecimal():
        size = int(length)
    else:
        raise explain_status(path, answer)
    linked = "X-Linked-Etag" in answer.first
    return File(path, address, size, version_of(answer), linked=linked)
