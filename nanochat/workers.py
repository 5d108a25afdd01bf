"""
Worker processes that each own whole tasks, and that never outlive the command that started them.

    tasks, biggest first     worker 1   [=====a=====][==d==]
    a b c d e           ->   worker 2   [===b===][==c==][e]       a worker that is free takes the next task

A task is worked on by a generator: it yields its progress and returns its result. With one worker it runs in the
caller's process, with more each runs in a spawned process that sends the same over a pipe. Spawned, not forked: a fork
copies locks that other threads hold. A pool from `concurrent.futures` was rejected: it tells no progress, breaks as a
whole when the system kills one worker, and ends on Ctrl-C only when running tasks end.

Invariants
- A task fails for ValueError and OSError, with one sentence, and so does one whose process dies; the others go on.
- Ctrl-C and SIGTERM reach the caller's process alone (workers have them blocked from birth, so they print nothing); it
  kills the workers at once. So a task must be safe against being killed, and then needs no other way to end.
- When the caller's process is killed, its workers end at their next message.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from nanochat.common import quiet_gc

POLL_S = 0.2  # how long a signal may wait, when the system hands it to another thread than the one that waits
SIGNALS = (signal.SIGINT, signal.SIGTERM)
Work = Callable[[Any], Generator[Any, None, Any]]  # task -> generator of its progress, which returns its result


@dataclass(frozen=True)
class Event:
    """Something that happened to a task: `kind` is progress, done or failed; `value` what was yielded, what was
    returned, or why."""

    task: int
    kind: str
    value: Any


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` here, as Ctrl-C raises KeyboardInterrupt. Raising at once, rather than setting a
    flag, is right for work that may be killed at any point anyhow."""
    def handler(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
        yield
        return
    previous = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_tasks(open_work: Callable[..., Work], arguments: tuple[Any, ...], tasks: Sequence[Any], *, num_workers: int
              ) -> Generator[Event, None, None]:
    """Do all tasks, in the order given where one process does them. Each worker calls `open_work(*arguments)` once; for
    several workers it must be a module's function, and tasks and results must be picklable.

    Closing the iterator ends the workers.
    """
    if num_workers < 1:
        raise ValueError(f"number of workers: got {num_workers}, expected at least 1")
    if min(num_workers, len(tasks)) > 1:
        yield from _Pool(open_work, arguments, tasks).run(min(num_workers, len(tasks)))
    elif tasks:
        work = open_work(*arguments)
        for index, task in enumerate(tasks):
            yield from _events(work, index, task)


def _events(work: Work, index: int, task: Any) -> Iterator[Event]:
    try:
        with contextlib.closing(work(task)) as progress:
            while True:
                yield Event(index, "progress", next(progress))
    except StopIteration as stop:
        yield Event(index, "done", stop.value)
    except (ValueError, OSError) as e:
        yield Event(index, "failed", str(e))


# ---- several processes ----------------------------------------------------------------------------------------------

def _serve(pipe: Connection, open_work: Callable[..., Work], arguments: tuple[Any, ...]) -> None:
    """What a worker's process does: tasks come, events go, until the other end of the pipe is closed."""
    work: Work | None = None
    while True:
        try:
            index, task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if work is None:
                work = open_work(*arguments)
                quiet_gc()
            events = _events(work, index, task)
        except (ValueError, OSError) as e:
            events = iter([Event(index, "failed", str(e))])
        for event in events:
            try:
                pipe.send(event)
            except OSError:  # nobody listens any more
                os._exit(1)


class _Pool:
    def __init__(self, open_work: Callable[..., Work], arguments: tuple[Any, ...], tasks: Sequence[Any]):
        self.open_work, self.arguments = open_work, arguments
        self.waiting = deque(enumerate(tasks))
        self.workers: dict[Connection, tuple[multiprocessing.process.BaseProcess, int]] = {}  # and its task

    def run(self, num_workers: int) -> Iterator[Event]:
        """Do all tasks in so many processes; yields what they report, and kills them in the end."""
        try:
            for _ in range(num_workers):
                self._start()
            while self.workers:
                for pipe in wait(list(self.workers), timeout=POLL_S):
                    assert isinstance(pipe, Connection)
                    yield self._receive(pipe)
        finally:
            self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.open_work, self.arguments), daemon=True)
        resource_tracker.ensure_running()  # now, since starting it unblocks the signals
        with _blocked_signals():  # a process inherits what is blocked
            process.start()
        theirs.close()
        self._assign(ours, process)

    def _assign(self, pipe: Connection, process: multiprocessing.process.BaseProcess) -> None:
        index, task = self.waiting.popleft()
        self.workers[pipe] = (process, index)
        with contextlib.suppress(OSError):  # it is dead; `_receive` will find that out
            pipe.send((index, task))

    def _receive(self, pipe: Connection) -> Event:
        process, _ = self.workers[pipe]
        try:
            event: Event = pipe.recv()
        except (EOFError, OSError):
            return self._bury(pipe)
        if event.kind != "progress":
            if self.waiting:
                self._assign(pipe, process)
            else:
                del self.workers[pipe]
                pipe.close()  # so that it ends
                process.join()
        return event

    def _bury(self, pipe: Connection) -> Event:
        process, index = self.workers.pop(pipe)
        process.join()
        if self.waiting:
            self._start()
        code = process.exitcode or 0
        name = signal.strsignal(-code) if code < 0 else ""
        why = f"was killed by signal {-code} ({name})" if code < 0 else f"ended with exit code {code}"
        hint = "; where memory is short, take fewer workers" if code == -signal.SIGKILL else ""
        return Event(index, "failed", f"the process that worked on it {why}{hint}")

    def _kill(self) -> None:
        with _blocked_signals():
            for process, _ in self.workers.values():
                process.kill()
            for pipe, (process, _) in self.workers.items():
                process.join()
                pipe.close()


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
