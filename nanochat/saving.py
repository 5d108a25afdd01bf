"""
Saving while training goes on: the loop is held for a copy, a thread does the writing.

    step 100 | copy |  step 101  |  step 102  |  step 103  | ...            the loop; all collectives
                    | write, fsync, rename, prune |                         the thread of rank 0: files only
                                                  ^ poll() at the next step tells how it went

**Order.** Rank 0 calls `wait`, all ranks gather the state (collectives, main threads), rank 0 copies what will change
into the memory of the save before (`held`, which nobody reads once `wait` has returned), then hands a function without
arguments to `start`. At most one save is in flight, so a disk that is slower than the interval between two saves holds
up training instead of filling memory. The thread calls no collective and touches no device.

**Errors.** A full disk is no reason to lose a week, as long as an older good checkpoint is there: `Policy` lets the run
go on, and gives up at the third error in a row, at the first if nothing good exists, or if the save was to be the last
thing that the run does. An error that is not the disk's (a bug) ends the run at once.

    saved -> SAVED     disk error, good one there -> FAILED, FAILED, FATAL     disk error, nothing good -> FATAL

`poll` gives one `Outcome` for each save; its `code` is a small integer that can travel in the step's reduction.
Without a thread (`asynchronous=False`) the same calls write at once, under the same policy. A process for the writing
was rejected: it would need the state in shared memory, and hashing and writing let go of the interpreter anyway. Where
cores are scarce the thread steps back behind the training (Linux): on two cores with a load of 6 the first step after a
save took 1.15 steps instead of 2.14, and the write 5 times as long.
"""

import contextlib
import errno
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from nanochat.sealed import SEAL_NAME

log = logging.getLogger(__name__)

MAX_ERRORS = 3  # in a row
NICE = 10  # of the writing thread: about a tenth of the time where it wants a core that training wants


class Code(IntEnum):
    """How a save went. Numbers, so that ranks can add them up: only rank 0's is not 0."""

    NOTHING = 0  # none has ended
    SAVED = 1
    FAILED = 2  # the run goes on: an older good checkpoint is there
    FATAL = 3  # the run must end


@dataclass(frozen=True)
class Outcome:
    """What came of a save. `message` tells it to people; `error` is what to raise where `code` is FATAL."""

    code: Code
    message: str
    path: Path | None = None
    seconds: float = 0.0  # of the writing
    error: Exception | None = None


class Policy:
    """Whether a run goes on after a save. `good`: the newest checkpoint known to be good, None if there is none."""

    def __init__(self, good: Path | None) -> None:
        self.good = good
        self.errors = 0  # in a row

    def saved(self, path: Path, seconds: float) -> Outcome:
        """A checkpoint was written, fsynced and renamed."""
        self.good, self.errors = path, 0
        return Outcome(Code.SAVED, f"saved {path} in {seconds:.1f} s", path, seconds)

    def failed(self, error: Exception, seconds: float, *, last: bool) -> Outcome:
        """A checkpoint could not be written. `last`: the run has nothing else to do."""
        self.errors += 1
        kept = self.good if self.good is not None and (self.good / SEAL_NAME).is_file() else None
        if not isinstance(error, OSError):
            return Outcome(Code.FATAL, str(error), None, seconds, error)
        told = error.strerror or str(error)
        if kept is not None and self.errors < MAX_ERRORS and not last:
            return Outcome(Code.FAILED, f"{told}; the run goes on, {kept.name} is kept (error {self.errors} of "
                                        f"{MAX_ERRORS} in a row)", None, seconds, error)
        why = ("no good checkpoint is left" if kept is None else f"{kept.name} is kept" if last else
               f"{kept.name} is kept, but this was error {self.errors} in a row")
        told = f"{told}; {why}. Make room or mend the rights, then start the same command again"
        return Outcome(Code.FATAL, told, None, seconds, OSError(error.errno or errno.EIO, told))


class Saver:
    """Writes checkpoints, one at a time, in a thread or at once. For rank 0; its calls are all from one thread.

    good: a checkpoint of the run known to be good (loaded with its checksums verified), if there is one.
    prune: called with each checkpoint just written, where it was written; a ValueError or OSError of it is a warning.
    """

    def __init__(self, *, good: Path | None, prune: Callable[[Path], Any] | None = None,
                 asynchronous: bool = True) -> None:
        self._policy = Policy(good)
        self._prune = prune
        self._pool = ThreadPoolExecutor(1, "saver", _step_back) if asynchronous else None
        self._flying: Future[Outcome] | None = None
        self._told: deque[Outcome] = deque()
        self.held: dict[str, Any] = {}  # host copies of the save before: to be filled again, once `wait` has returned

    def start(self, write: Callable[[], Path], *, last: bool = False) -> None:
        """Let `write` save a checkpoint; waits for the save in flight first. `write` must use nothing that later steps
        change. `last`: the run ends after it, so that an error cannot be made good by a later save."""
        self.wait()
        if self._pool is None:
            self._told.append(self._save(write, last))
        else:
            self._flying = self._pool.submit(self._save, write, last)

    def poll(self) -> Outcome | None:
        """The outcome of the oldest save that has ended and was not told yet; never waits."""
        if self._flying is not None and self._flying.done():
            self.wait()
        return self._told.popleft() if self._told else None

    def wait(self) -> None:
        """Wait until no save is in flight. `poll` then gives what came of it."""
        if self._flying is not None:
            self._told.append(self._flying.result())
            self._flying = None

    def close(self) -> None:
        """Wait, and end the thread. Outcomes not told yet can still be had from `poll`. Twice is fine."""
        self.wait()
        if self._pool is not None:
            self._pool.shutdown()

    def _save(self, write: Callable[[], Path], last: bool) -> Outcome:
        began = time.perf_counter()
        try:
            path = write()
        except Exception as e:  # whatever it is, the loop must hear of it
            return self._policy.failed(e, time.perf_counter() - began, last=last)
        outcome = self._policy.saved(path, time.perf_counter() - began)
        if self._prune is not None:
            try:
                self._prune(path)
            except (OSError, ValueError) as e:
                log.warning("older checkpoints were not deleted: %s", e)
        return outcome


def _step_back() -> None:
    """Lower the priority of the thread that calls this. On Linux alone: elsewhere priorities are of whole processes."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # speed only
            os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
