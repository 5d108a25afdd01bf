"""
Threads that take turns, so that every interleaving of their calls can be tried, and repeated.

    outcomes = Turns(schedule).run([first, second])

Each function runs in a thread of its own, but only one thread runs at a time. Before each call that
others could see (of the file system, a lock, or `step`), it may have to let another go on. A
`Schedule` decides:

    default     a thread goes on until it ends, or sleeps; then the next one goes on
    preemption  at call number i, thread t goes on instead; the other one waits, as a suspended process

One integer names a schedule. Numbers from 0 on hold up to three preemptions, `PLACES` for each one;
negative numbers draw at each call whether the thread stays, and if not, which one goes on. Time is
counted in calls, and passes at once while all threads sleep.
"""

import contextlib
import fcntl
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

PLACES = 1 << 12  # possible (call, thread) of a preemption
STAYS = (0.0, 0.5, 0.8, 0.9, 0.97)  # how likely a thread goes on, in a schedule that is drawn
CALL_S = 0.01  # how long a call takes
CALLS_AT_MOST = 3000  # more means that a thread waits for something that never comes
SEEN_BY_OTHERS = ("open", "mkdir", "rmdir", "rename", "replace", "link", "unlink", "stat", "lstat")


class Endless(AssertionError):
    """A thread waits forever."""


class Schedule:
    """Which thread goes on at each call; see the head of this module."""

    def __init__(self, number: int, threads: int) -> None:
        self.number = number
        self.threads = threads
        self.preemptions: dict[int, int] = {}
        self._rng = random.Random(number)
        self._stays = self._rng.choice(STAYS)
        while number > 0:
            number, digit = divmod(number, PLACES)
            call, thread = divmod(digit - 1, threads)
            self.preemptions[call] = thread

    @property
    def is_simple(self) -> bool:
        """Whether it has at most one preemption."""
        return self.number >= 0 and len(self.preemptions) <= 1

    @staticmethod
    def encode(preemptions: Sequence[tuple[int, int]], threads: int) -> int:
        """The number of a schedule with these preemptions, each (call, thread)."""
        number = 0
        for call, thread in reversed(preemptions):
            digit = call * threads + thread + 1
            assert digit < PLACES
            number = number * PLACES + digit
        return number

    def next(self, call: int, current: int, able: Sequence[int], *, gives_way: bool) -> int:
        """The thread that goes on at a call. `able`: those that neither sleep nor have ended. `gives_way`: the
        current one sleeps, or has ended."""
        if self.number < 0:
            stays = current in able and not gives_way and self._rng.random() < self._stays
            return current if stays else self._rng.choice(able)
        chosen = self.preemptions.get(call, current)
        if chosen in able and not (gives_way and chosen == current):
            return chosen
        after = [thread for thread in able if thread > current]
        return (after or list(able))[0]


class Turns:
    """Runs functions in threads that take turns."""

    def __init__(self, schedule: Schedule, check: Callable[[], None] = lambda: None) -> None:
        self.schedule = schedule
        self.check = check  # called at each turn
        self.calls = 0
        self.now = 0.0  # seconds
        self._asleep: dict[int, float] = {}  # {thread: when it wakes up}
        self.able: list[int] = []
        self.failed: BaseException | None = None
        self._gates: list[threading.Semaphore] = []
        self._numbers: dict[int, int] = {}  # {identifier: number} of the threads
        self._done = threading.Event()
        self._is_checking = False

    def me(self) -> int | None:
        """The number of the present thread; None if it is not one of these."""
        return self._numbers.get(threading.get_ident())

    def turn(self, *, gives_way: bool = False) -> None:
        """Before a call: let the thread go on that the schedule names."""
        me = self.me()
        if me is None or self._is_checking:
            return
        if self.failed is not None:
            raise SystemExit  # the others end, too
        self._hand_over(me, gives_way)
        self._gates[me].acquire()
        if self.failed is not None:
            raise SystemExit

    def _hand_over(self, me: int, gives_way: bool) -> None:
        self._is_checking = True
        try:
            self.check()
        except BaseException as e:
            self.failed = self.failed or e
        self._is_checking = False
        self.calls += 1
        if self.calls > CALLS_AT_MOST:
            self.failed = self.failed or Endless("a thread waits forever")
        self.now += CALL_S
        if all(thread in self._asleep for thread in self.able):
            self.now = max(self.now, min(self._asleep.values()))
        self._asleep = {thread: at for thread, at in self._asleep.items() if at > self.now}
        awake = [thread for thread in self.able if thread not in self._asleep]
        following = self.schedule.next(self.calls - 1, me, awake, gives_way=gives_way)
        self._gates[following].release()

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the functions return. Raises the first error of one of them, or of `check`."""
        outcomes: list[Any] = [None] * len(functions)
        self._gates = [threading.Semaphore(0) for _ in functions]
        self.able = [*range(len(functions))]

        def live(number: int) -> None:
            self._numbers[threading.get_ident()] = number
            self._gates[number].acquire()
            try:
                if self.failed is None:
                    outcomes[number] = functions[number]()
            except BaseException as e:
                if not isinstance(e, SystemExit):
                    self.failed = self.failed or e
            self.able.remove(number)
            if self.able:
                self._hand_over(number, gives_way=True)
            else:
                self._done.set()

        threads = [threading.Thread(target=live, args=(n,)) for n in range(len(functions))]
        with self._calls_take_turns():
            for thread in threads:
                thread.start()
            self._gates[0].release()
            self._done.wait()
            for thread in threads:
                thread.join()
        if self.failed is not None:
            raise self.failed
        return outcomes

    @contextlib.contextmanager
    def _calls_take_turns(self) -> Iterator[None]:
        def stepped(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.turn()
                return real(*args, **kwargs)

            return call

        sleep = time.sleep

        def slept(seconds: float) -> None:
            me = self.me()
            if me is None:
                sleep(seconds)
            else:
                self._asleep[me] = self.now + seconds
                self.turn(gives_way=True)

        monotonic = time.monotonic

        def clock() -> float:
            return monotonic() if self.me() is None else self.now

        with contextlib.ExitStack() as stack:
            for name in SEEN_BY_OTHERS:
                stack.enter_context(mock.patch.object(os, name, stepped(getattr(os, name))))
            stack.enter_context(mock.patch.object(fcntl, "flock", stepped(fcntl.flock)))
            stack.enter_context(mock.patch.object(time, "sleep", slept))
            stack.enter_context(mock.patch.object(time, "monotonic", clock))
            yield


class SteppedFile:
    """An open file whose reads and writes are calls that others could see."""

    def __init__(self, file: Any, turns: Turns) -> None:
        self._file = file
        self._turns = turns

    def read(self, *args: Any) -> Any:
        self._turns.turn()
        return self._file.read(*args)

    def write(self, data: Any) -> Any:
        self._turns.turn()
        return self._file.write(data)

    def truncate(self, *args: Any) -> Any:
        self._turns.turn()
        return self._file.truncate(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "SteppedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def schedules(run: Callable[[Schedule], int], threads: int, preemptions: int) -> Iterator[Schedule]:
    """All schedules with at most so many preemptions, those with few of them first. `run` tries
    one, and returns its number of calls."""
    todo = deque[list[tuple[int, int]]]([[]])
    while todo:
        chosen = todo.popleft()
        schedule = Schedule(Schedule.encode(chosen, threads), threads)
        yield schedule
        calls = run(schedule)
        if len(chosen) < preemptions:
            first = chosen[-1][0] + 1 if chosen else 0
            for call in range(first, min(calls, PLACES // threads - 1)):
                todo += [[*chosen, (call, thread)] for thread in range(threads)]
