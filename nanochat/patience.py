"""
Questions to a store that may be slow, busy or away: asked again until they are answered, and never waited for silently.

    reader ---ask---> [queue] ---> worker: try, back off, try ... ---answer---> reader
      |  waits: after 10 s a line in the log, then one every 30 s                 |
      +--------------------------------------------------------------------------+

Workers are threads of their own, so that several questions of one reader are under way at once, and so that whoever
waits is free to say so. A question fails at once where asking again cannot help (a missing object, refused
credentials, a changed object), and after `give_up_s` of failures otherwise. Waits between tries double and are spread
at random: many ranks that a store turned away must not come back all at once.

Workers are daemon threads, because Python would wait at its end for others, for as long as a store stays away. What is
under way then is given a moment: a thread must not come back from a request into a Python that is being torn down.
"""

import atexit
import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from nanochat.object_client import Transient

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_WORKERS = 64  # questions under way at once in a process; threads start as they are needed
LAST_MOMENT_S = 1.0  # for requests under way when Python ends


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, seconds."""

    connect_s: float = 10.0  # for a connection
    silence_s: float = 20.0  # for the next byte of an answer
    upload_s: float = 300.0  # for a part to be sent and acknowledged
    first_backoff_s: float = 0.2
    max_backoff_s: float = 20.0
    give_up_s: float = 300.0  # of failures
    log_after_s: float = 10.0
    log_every_s: float = 30.0


PATIENCE = Patience()


class _Workers:
    """Threads that take questions from a queue."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.threads = self.open = 0  # open: questions not yet answered
        self.closing = threading.Event()

    def submit(self, task: Callable[[], None]) -> None:
        """Have a worker thread call `task`, which raises nothing, as soon as one is free; there are MAX_WORKERS."""
        with self.lock:
            self.open += 1
            if self.threads < min(self.open, MAX_WORKERS):
                if not self.threads:
                    atexit.register(self.close)
                self.threads += 1
                threading.Thread(target=self._work, name=f"store-{self.threads}", daemon=True).start()
        self.tasks.put(task)

    def _work(self) -> None:
        while True:
            self.tasks.get()()
            with self.lock:
                self.open -= 1

    def close(self) -> None:
        """Python ends: no more tries, and a moment for those under way."""
        self.closing.set()
        ends = time.monotonic() + LAST_MOMENT_S
        while self.open and time.monotonic() < ends:
            time.sleep(0.01)


_workers = _Workers()
_random = random.Random()  # not the one that programs seed
_last_line = [float("-inf")]  # when the log last told of a wait


class Question(Generic[T]):
    """`ask` called by a worker until it answers. `what` names it in the log and in errors."""

    def __init__(self, what: str, ask: Callable[[], T]):
        self.what, self.tries, self.trouble = what, 0, ""
        self._ask = ask
        self._future: Future[T] = Future()
        _workers.submit(self._run)

    def _run(self) -> None:
        try:
            self._future.set_result(self._try())
        except BaseException as e:
            self._future.set_exception(e)

    def _try(self) -> T:
        failing_since = 0.0
        while True:
            if _workers.closing.is_set():
                raise OSError(f"{self.what}: the program ends")
            self.tries += 1
            began = time.monotonic()
            try:
                return self._ask()
            except Transient as e:
                self.trouble = str(e)
            failing_since = failing_since or began
            away_s = time.monotonic() - failing_since
            if away_s > PATIENCE.give_up_s:
                raise OSError(f"{self.what}: no answer in {away_s:,.0f} s ({self.tries} tries; the last: "
                              f"{self.trouble}); check the network and the store, then start again: a run goes on from "
                              f"its last checkpoint")
            ceiling = min(PATIENCE.max_backoff_s, PATIENCE.first_backoff_s * 2.0 ** min(self.tries - 1, 30))
            _workers.closing.wait(ceiling * _random.uniform(0.5, 1.0))

    @property
    def done(self) -> bool:
        return self._future.done()

    def answer(self) -> T:
        """Wait for the answer. Raises what `ask` raised, or OSError where the store stays away."""
        began = time.monotonic()
        wait_s, told = PATIENCE.log_after_s, False
        while True:
            try:
                answer = self._future.result(timeout=max(0.0, began + wait_s - time.monotonic()))
            except TimeoutError:
                if self._future.done():
                    raise  # no, it is the answer
                told |= self._tell(time.monotonic() - began)
                wait_s += PATIENCE.log_every_s
                continue
            if told:
                log.warning("%s: answered after %.0f s", self.what, time.monotonic() - began)
            return answer

    def _tell(self, waited_s: float) -> bool:
        """A line in the log, one for all that wait at the same time. Returns whether it was this one's."""
        now = time.monotonic()
        with _workers.lock:
            if now - _last_line[0] < PATIENCE.log_after_s / 2:
                return False
            _last_line[0] = now
        trouble = f"; the last: {self.trouble}" if self.trouble else ""
        log.warning("%s: waiting for the store for %.0f s (try %d%s)", self.what, waited_s, self.tries, trouble)
        return True
