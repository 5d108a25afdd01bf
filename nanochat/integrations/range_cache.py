"""Ranges of remote files on disk: what was fetched once is not fetched again.

    <base dir>/data_cache/
      5d41402abc4b2a76-4-918273    bytes 4 .. 918272 of a file: a hash of them (16 bytes), then the bytes
      5d41402abc4b2a76-footer      the footer of a parquet file

A range is a column of a row group as the file stores it, so it is compressed. It is named by what
identifies the file's bytes (its sha256, or URL, ETag and size), so another version's range is never
used, and data sets that share files share ranges.

**Limit.** The folder holds at most `limit` bytes, and at most half of what its disk has for it (its
own bytes and the free ones), so that checkpoints find room. Beyond, the ranges that were used longest
ago are deleted, down to nine tenths of that. The time of last use is the file's modification time. A
process counts what it adds, and measures the folder each time it has added a 64th of this room, so
W processes exceed it by W / 64 at most; and it measures when it finds the disk full.

**Several processes, and kills.** A range is written under a temporary name and renamed. It is not
fsynced, because its hash is compared whenever it is read: after a power cut, or on a bad disk, a
corrupt range is deleted with a warning and fetched again. A folder that cannot be written is one
warning; then every range is fetched.

**Fetched ahead.** `do_soon` puts a job that fetches a range into a queue, ordered by how soon the
range is needed; a few threads empty it. A range that is needed before its turn is fetched by the
thread that needs it, and a range that is being fetched is fetched once.
"""

import contextlib
import errno
import fcntl
import functools
import heapq
import itertools
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import Context, copy_context
from pathlib import Path
from typing import NamedTuple

from nanochat.common import check_stop, hash_bytes, reason_of

log = logging.getLogger(__name__)

WORKERS = 8  # threads that fetch ahead
HASH_BYTES = 16  # at the start of an entry
ABANDONED_S = 3600.0  # age of a temporary file that a killed process left
RECENT_JOBS = 1024  # names of jobs that are not queued again
Fetch = Callable[[], bytes]


class Ahead(NamedTuple):
    """An entry of the queue. The smallest one is fetched first."""

    distance: int  # how many other ranges its reader needs before it
    number: int  # of entries before it
    context: Context  # of the reader, whose stop ends the fetch
    job: Callable[[], object]


class RangeCache:
    """A folder of ranges with at most `limit` bytes. All methods may be called by several
    threads."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._lock = threading.Lock()
        self._running: dict[str, Future[bytes]] = {}  # by the name of the range
        self._queue: list[Ahead] = []  # a heap
        self._recent: dict[str, None] = {}  # names of jobs, the oldest first
        self._numbers = itertools.count()
        self._workers = 0
        self._room = 0  # bytes that the folder may hold, when it was measured
        self._added = 0  # bytes since then
        self._can_write = True

    def read(self, name: str, fetch: Fetch) -> bytes:
        """The bytes of a range: from disk, else those that `fetch` returns, which are kept. Raises
        what `fetch` raises."""
        while True:
            with self._lock:
                running = self._running.get(name)
                if running is None:
                    own = self._running[name] = Future[bytes]()
                    break
            while not wait([running], timeout=0.1).done:
                check_stop()
            if running.exception() is None:
                return running.result()
            # it may have failed only because its reader stops, so this thread tries itself

        try:
            data = self._load(name)
            if data is None:
                data = fetch()
                self._keep(name, data)
            own.set_result(data)
            return data
        except BaseException as e:
            own.set_exception(e)
            raise
        finally:
            with self._lock:
                del self._running[name]

    def ensure(self, name: str, fetch: Fetch) -> None:
        """Have a range on disk. Raises what `fetch` raises."""
        if not self._touch(name):
            self.read(name, fetch)

    def do_soon(self, name: str, job: Callable[[], object], distance: int) -> None:
        """Have a thread run a job that ensures a range, unless a job of this name was queued
        recently. Its error is not raised: whoever reads the range will meet it."""
        with self._lock:
            if name in self._recent:
                return
            self._recent[name] = None
            if len(self._recent) > RECENT_JOBS:
                del self._recent[next(iter(self._recent))]
            heapq.heappush(self._queue, Ahead(distance, next(self._numbers), copy_context(), job))
            if self._workers >= WORKERS:
                return
            self._workers += 1
        threading.Thread(target=self._work, name="fetch ahead", daemon=True).start()

    def _work(self) -> None:
        """Run the jobs of the queue until it is empty."""
        while True:
            with self._lock:
                if not self._queue:
                    self._workers -= 1
                    return
                ahead = heapq.heappop(self._queue)
            with contextlib.suppress(Exception):
                ahead.context.run(ahead.job)

    # -- on disk

    def _touch(self, name: str) -> bool:
        """Whether a range is on disk. If so, it counts as used now."""
        try:
            os.utime(self.folder / name)
            return True
        except OSError:
            return False

    def _load(self, name: str) -> bytes | None:
        """The bytes of a range; None if it is not on disk, or corrupt."""
        path = self.folder / name
        try:
            entry = path.read_bytes()
        except OSError:
            return None
        data = entry[HASH_BYTES:]
        if bytes.fromhex(hash_bytes(data)) != entry[:HASH_BYTES]:
            log.warning("%s: corrupt, so it is fetched again", path)
            path.unlink(missing_ok=True)
            return None
        self._touch(name)
        return data

    def _keep(self, name: str, data: bytes) -> None:
        """Write a range, and delete old ones if the folder is too large."""
        temporary = self.folder / f".{name}.{secrets.token_hex(4)}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(bytes.fromhex(hash_bytes(data)))
                file.write(data)
            os.replace(temporary, self.folder / name)
        except OSError as e:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._warn(e)
            if e.errno == errno.ENOSPC:
                self._trim()  # for checkpoints, too
            return
        with self._lock:
            self._added += len(data)
            is_due = self._added > self._room // 64
        if is_due:
            self._trim()

    def _warn(self, e: OSError) -> None:
        """Say once that the folder cannot be written."""
        if self._can_write:
            log.warning(
                "%s: fetched data cannot be kept there (%s), so it is fetched again when it is needed again; "
                "make room, or set NANOCHAT_BASE_DIR or a smaller --data-cache",
                self.folder,
                reason_of(e),
            )
        self._can_write = False

    def _trim(self) -> None:
        """Measure the folder, and delete the ranges used longest ago if it is too large. Another
        process that is doing so is left to it."""
        with contextlib.suppress(OSError), (self.folder / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entries = self._measure()
            total = sum(size for _, size, _ in entries)
            free = shutil.disk_usage(self.folder).free
            room = min(self.limit, (total + free) // 2)
            with self._lock:
                self._room = room
                self._added = 0
            if total <= room:
                return
            for _, size, path in sorted(entries):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                total -= size
                if total <= room * 0.9:
                    return

    def _measure(self) -> list[tuple[int, int, Path]]:
        """(time of last use in nanoseconds, bytes, path) of each range. Deletes abandoned
        temporary files."""
        entries = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                is_abandoned = time.time() - stat.st_mtime > ABANDONED_S
                if not path.name.startswith("."):
                    entries.append((stat.st_mtime_ns, stat.st_size, path))
                elif path.suffix == ".tmp" and is_abandoned:
                    path.unlink()
        return entries


open_cache = functools.cache(RangeCache)  # one of each folder and limit


def _forget_parent() -> None:
    """Open new caches in a forked process: the parent's locks may be held by threads that it does
    not have."""
    global open_cache
    open_cache = functools.cache(RangeCache)


os.register_at_fork(after_in_child=_forget_parent)
