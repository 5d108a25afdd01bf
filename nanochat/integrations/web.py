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

**Secrets.** Addresses with a user or a query are refused as paths.
"""

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np

from nanochat.common import (
    Remote,
    each,
    get_base_dir,
    hash_json,
    refuse_secrets,
    url,
)
from nanochat.integrations.range_cache import RangeCache, open_cache
from nanochat.integrations.remote_files import (
    PROXY,
    REQUEST_BYTES,
    TRIES,
    Changed,
    Garbled,
    PinnedPath,
    poll,
)
from nanochat.integrations.web_client import (
    ANSWERED,
    NO_KEY,
    Answer,
    Key,
    get,
    moved,
    pause,
)
from nanochat.text import column_range, open_parquet, text_suffix

FOOTER_BYTES = 32 << 10  # fetched at once; a larger footer needs a second request
FOOTERS_BYTES = 64 << 20  # of footers that stay in memory, about
RETRY_S = 0.2  # before the next attempt to get an answer that fits the request
MAGIC = b"PAR1"  # a parquet file begins and ends with it
FOOTER_END = 8  # bytes after the footer: its length, MAGIC
ADVICE = "restore the old file, or start a new run (--model-tag)"


# ---- ranges --------------------------------------------------------------------------------------


def explain_status(path: str, answer: Answer) -> Exception:
    """Our own error for a request that a server refuses: a sentence that begins with the path."""
    answered = f"HTTP {answer.status} from {answer.host}"
    if answer.status in (404, 410):
        return FileNotFoundError(f"{path}: no such file ({answered}); check the address")
    if answer.status in (401, 403):
        return PermissionError(
            f"{path}: access denied ({answered}); data must be readable without a password: download it, or "
            f"name a public address"
        )
    return OSError(
        f"{path}: no usable answer ({answered}); check the address (a data set is named hf://datasets/OWNER/NAME)"
    )


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
    # makes the error for an answer that is not a success
    explain: Callable[[str, Answer], Exception] = explain_status

    @property
    def name(self) -> str:
        """What identifies its bytes, in the cache."""
        return self.sha256 or hash_json([self.address, self.size, self.etag])


class Part(NamedTuple):
    """What an answer says that it holds."""

    begin: int
    end: int
    size: int  # of the whole file


def read_range(file: File, begin: int, end: int) -> bytes:
    """Bytes begin .. end - 1 of a file, by several requests at once. FileNotFoundError if it no
    longer exists, Changed if it is another version, OSError if the server does not send it."""
    starts = range(begin, end, REQUEST_BYTES)
    if len(starts) == 1 and threading.current_thread().name == "each":
        return _read_piece(file, begin, end)  # whoever waits for this thread polls

    def read_piece(at: int) -> bytes:
        return _read_piece(file, at, min(at + REQUEST_BYTES, end))

    return b"".join(each(read_piece, starts, at_once=8, poll=poll))


def _read_piece(file: File, begin: int, end: int) -> bytes:
    """`read_range` by one request, which is repeated if the answer does not fit it."""
    headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    attempts = 0
    while True:
        answer = get(file.path, file.address, headers, key=file.key, most=end - begin)
        attempts += 1
        try:
            part = _part_in(file, answer)
            _check_version(file, part, answer)
            _check_part(file, part, answer, begin, end)
            return answer.body
        except Garbled:
            if attempts == TRIES:
                raise
        pause(RETRY_S)


def _part_in(file: File, answer: Answer) -> Part:
    """The part of a file that an answer holds. Garbled if it does not say it, the file's own error
    if it is not a success."""
    length = len(answer.body)
    if answer.status == 200 and length == file.size:  # all of it is what was asked for
        return Part(0, length, length)
    if answer.status == 200:
        raise OSError(
            f"{file.path}: {answer.host} does not send ranges of files; download it first"
        )
    if answer.status == 416:
        raise Changed(f"{file.path}: it is shorter than when this run began; {ADVICE}")
    if answer.status != 206:
        raise file.explain(file.path, answer)
    return parse_range(file.path, answer)


def parse_range(path: str, answer: Answer) -> Part:
    """What the Content-Range of an answer says. Garbled if there is none."""
    header = answer.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", header)
    if match is None:
        raise Garbled(f"{path}: {answer.host} did not say which range it sent; {PROXY}")
    return Part(int(match[1]), int(match[2]) + 1, int(match[3]))


def version_of(answer: Answer) -> str:
    """The ETag that an answer gives to the file. A server that redirects may name that of the file
    in X-Linked-Etag, as the Hub does."""
    etag = answer.first.get("X-Linked-Etag") or answer.headers.get("ETag", "")
    return etag.removeprefix("W/").strip('"')


def _check_version(file: File, part: Part, answer: Answer) -> None:
    """Changed if an answer is of another version of a file."""
    etag = version_of(answer)
    # where a redirect ended, the other server has an ETag of its own
    is_of_first = "X-Linked-Etag" in answer.first or answer.address == file.address
    is_comparable = is_of_first or not file.linked
    is_known = etag != "" and file.etag != ""
    is_same = etag == file.etag or not is_known or not is_comparable
    if part.size != file.size or not is_same:
        raise Changed(
            f"{file.path}: it has changed since this run began (from {file.size:,} bytes with ETag "
            f"{file.etag or 'unknown'} to {part.size:,} bytes with ETag {etag or 'unknown'}); {ADVICE}"
        )


def _check_part(file: File, part: Part, answer: Answer, begin: int, end: int) -> None:
    """Garbled unless an answer holds bytes begin .. end - 1."""
    length = len(answer.body)
    if (part.begin, part.end) != (begin, end) or length != end - begin:
        raise Garbled(
            f"{file.path}: {answer.host} sent {length:,} bytes from {part.begin:,}, but {end - begin:,} bytes "
            f"from {begin:,} were requested; {PROXY}"
        )


def read_footer(file: File) -> bytes:
    """The end of a parquet file, from its footer on; its last bytes if it is none."""
    tail = read_range(file, max(0, file.size - FOOTER_BYTES), file.size)
    if len(tail) < FOOTER_END or not tail.endswith(MAGIC):
        return tail
    length = int.from_bytes(tail[-FOOTER_END : -len(MAGIC)], "little") + FOOTER_END
    if length > file.size:
        return tail
    missing = length - len(tail)
    if missing > 0:
        begin = file.size - length
        tail = read_range(file, begin, begin + missing) + tail
    return tail[-length:]


# ---- paths ---------------------------------------------------------------------------------------


_footers: dict[str, bytes] = {}  # in memory, because each batch of a group opens its file


@functools.cache
def _cache_of(base: str, limit: int) -> RangeCache:
    """The cache below the base directory, which is looked up once: `base` is what names it."""
    return open_cache(get_base_dir() / "data_cache", limit)


def own_cache() -> RangeCache:
    """The cache of this process."""
    return _cache_of(os.environ.get("NANOCHAT_BASE_DIR", ""), Remote.cache_bytes)


os.register_at_fork(after_in_child=_cache_of.cache_clear)


class RangePath(PinnedPath):
    """A path whose files are read in ranges, which stay on disk. A subclass finds the files."""

    keeps_ranges = True
    copies = "web"

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

    def sha256(self) -> str:
        return self.pinned().sha256

    def read_of(self, file: File, begin: int, end: int) -> bytes:
        """See `PinnedPath.read_of`: the bytes stay on disk."""
        return own_cache().read(*self._entry(file, begin, end))

    def footer(self) -> bytes | None:
        """See `Remote.footer`."""
        file = self.pinned()
        name = f"{file.name}-footer"
        if name in _footers:
            return _footers[name]
        if text_suffix(file.path) != ".parquet" or file.size <= FOOTER_END:
            return None
        footer = own_cache().read(name, lambda: read_footer(file))
        if len(_footers) * len(footer) < FOOTERS_BYTES:
            _footers[name] = footer
        return footer

    def read_soon(self, group: int, field: str, distance: int) -> None:
        """See `Remote.read_soon`. The footer says where the column is, so it may be fetched, too."""
        file = self.pinned()

        def job() -> None:
            with open_parquet(self, field) as opened:
                begin, end = column_range(opened.metadata, group, field)
            own_cache().ensure(*self._entry(file, begin, end))

        own_cache().do_soon(f"{file.name}-{field}-{group}", job, distance)

    def _entry(self, file: File, begin: int, end: int) -> tuple[str, Callable[[], bytes]]:
        """The name of a range in the cache, and what fetches it."""
        return f"{file.name}-{begin}-{end}", partial(read_range, file, begin, end)

    def open_reader(self, dtype: np.dtype) -> Any:
        raise ValueError(
            f"{self}: token files are read from this machine or from object storage only; download them first"
        )

    def copy_folder(self) -> Sequence[str]:
        """The folder of its copies, below that of all copies."""
        return self.parent.parts[1:]

    def pieces(self) -> Iterator[bytes]:
        """The bytes of the file, in order."""
        file = self.pinned()
        span = 8 * REQUEST_BYTES
        for begin in range(0, file.size, span):
            yield read_range(file, begin, min(begin + span, file.size))

    @staticmethod
    def forget() -> None:
        """Drop what is known about files and servers."""
        for known in KNOWN:
            known.clear()


# ---- web servers ---------------------------------------------------------------------------------

_lock = threading.Lock()
_files: dict[str, File | None] = {}  # {path: what this launch found}
KNOWN: list[Any] = [_files, moved, _footers, ANSWERED]  # what a launch begins without


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
        """See `RangePath.find`: the server is asked once in a launch, also about a missing file."""
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
        size = parse_range(path, answer).size
    elif answer.status == 416:  # an empty file
        size = 0
    elif answer.status == 200 and length.isdecimal():
        size = int(length)
    else:
        raise explain_status(path, answer)
    linked = "X-Linked-Etag" in answer.first
    return File(path, address, size, version_of(answer), linked=linked)
