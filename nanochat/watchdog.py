"""
A rank that hangs or dies takes the others down within a stated time, with a sentence that names it.

Without this, the others wait in a collective: for ever, or until the library gives up with words
that name no rank. Here each rank's main thread says where it is, and a daemon thread of each rank
watches:

    main thread    beat(17) .. beat(17, "reduction") .. beat(18) ............................  stuck
    its watchdog   publishes {count, step, where, idle seconds} in the launch's store, every second or two

    rank 0  count 36  at step 18 (reduction)     the least count is behind: rank 3. It is idle for longer
    rank 1  count 36  at step 18 (reduction)     than its limit, so it hangs; the others wait for it. One
    rank 3  count 35  at step 18                 that publishes nothing any more is dead, or its machine is.

- The stated time: the limit, then up to 30 s of listening whether the others still tell anything, then up
  to 20 s to agree and leave. The limit is `timeout_s`; `first_timeout_s` until the second step
  (compilation); what `patience` says inside of it.
- All ranks make the same beats in the same order. Only counts are compared, never clocks of two machines.
  Long work that one rank does alone calls `beat()` without a step: it moves no count, and shows that the
  rank works.
- The first verdict counts. It is in the store, rank 0 marks the run as failed with it, and all leave by
  os._exit(1), since the main thread may be anywhere. A rank that hangs prints its threads' stacks first.
- A process of this machine that is gone without a word is noticed at the next look. A rank that fails with
  an exception leaves its sentence as the verdict, and says it itself; the others leave without a word.

The store is a client of its own to the one where the ranks met, because the main thread may hold the
lock of theirs. Every use of it happens in a thread of its own with a time limit: a store whose host is
stopped does not answer, and then that is the verdict. """

import contextlib
import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from nanochat.lifecycle import is_alive_here

log = logging.getLogger(__name__)

T = TypeVar("T")
VERDICT = "verdict"
ASK_S = 10.0  # how long the store may take to answer
LATE_S = 30.0  # how much later than rank 0 another rank may come to the end of a run
PAUSED_S = 10.0  # a watching thread that comes so much too late was stopped


def open_store(world_size: int) -> Any:
    """A client of the store of this launch (MASTER_ADDR, MASTER_PORT), or None for a single
    process. Called once the process group is there."""
    if world_size == 1:
        return None
    import torch.distributed as dist

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                          wait_for_workers=False, timeout=timedelta(seconds=30))
    return dist.PrefixStore(f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


class Watchdog:
    """One for each rank; a context around all of training.

    store: of `open_store`. ranks: what `lifecycle.identify` gave on each rank, in rank order.
    on_failure: called with the verdict on each rank, from any thread, before the process is ended.
    """

    def __init__(self, store: Any, ranks: Sequence[dict[str, Any]], *, rank: int = 0, timeout_s: float = 600.0,
                 first_timeout_s: float = 1800.0, on_failure: Callable[[str], None] = lambda verdict: None) -> None:
        if not timeout_s > 0:
            raise ValueError(f"--collective-timeout-seconds: got {timeout_s}, expected a positive number of seconds")
        self.rank, self.ranks = rank, ranks
        self.interval_s = min(2.0, timeout_s / 20)
        self.silence_s = max(1.0, min(30.0, timeout_s / 4))
        self._store, self._on_failure = store, on_failure
        self._limits_s = (max(timeout_s, first_timeout_s), timeout_s)  # until the second step, and after it
        self._patience_s = 0.0
        self._count, self._steps, self._step, self._where = 0, 0, -1, "set-up"
        self._active = time.monotonic()  # when the main thread was last known to work
        self._published = 0
        self._over, self._ending = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    # ---- what the main thread says

    def beat(self, step: int | None = None, where: str = "") -> None:
        """The main thread is alive and, with a step, has come to a new point that all ranks come
        to."""
        if step is not None:
            self._steps += step != self._step
            self._count, self._step, self._where = self._count + 1, step, where
        self._active = time.monotonic()

    @contextlib.contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Inside, the limit is at least so many seconds. Entering and leaving are beats."""
        self.beat()
        before, self._patience_s = self._patience_s, max(self._patience_s, seconds)
        try:
            yield
        finally:
            self.beat()
            self._patience_s = before

    def __enter__(self) -> "Watchdog":
        self._ask(self._publish)  # so that the others know of this rank whatever comes
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """The end of training, good or bad. After a failure another rank's verdict makes this one
        silent."""
        if self._ending:  # the watching thread has told why
            raise SystemExit(1) from error
        self._over.set()
        verdict, ours = "", ""
        if isinstance(error, Exception) and len(self.ranks) > 1:
            expected = isinstance(error, (ValueError, OSError))
            told = str(error) if expected else f"{type(error).__name__}: {error}"
            ours = f"{self._name(self.rank)} failed at {point(self._record())}: {told}"
            ours = told if expected and self.rank == 0 else ours  # rank 0 speaks for all
            if isinstance(error, RuntimeError):  # a collective broke: the rank that is to blame may say so yet
                self._wait(3 * self.interval_s + 1, lambda: self._ask(self._verdict) or self._died())
            verdict = self._settle(self._died() or ours)
            self._report(verdict)
        self._thread.join(timeout=5 + self.interval_s)
        self._ask(lambda store: self._publish(store, left=True))
        if self.rank == 0 and (kind is None or verdict):  # the store may be this process's own: go last
            self._wait(LATE_S if kind is None else 3 * self.interval_s + 1, self._all_left)
        if not verdict:
            return
        if verdict != ours:
            if self._speaks(verdict):
                print(f"error: {verdict}", file=sys.stderr, flush=True)
            raise SystemExit(1) from error
        if not isinstance(error, (ValueError, OSError)):
            log.error("%s", ours)
        elif self.rank != 0:
            raise ValueError(ours) from error

    # ---- what the watching thread does

    def _watch(self) -> None:
        suspected, before = 0.0, dict[int, dict[str, Any]]()  # since when we suspect, and what was known then
        looked = time.monotonic()
        while not self._over.wait(self.interval_s):
            now = time.monotonic()
            if now - looked > self.interval_s + PAUSED_S:
                self._active = now  # this process was stopped for a while, or the whole machine
            looked = now
            self._ask(self._publish)
            verdict = self._ask(self._verdict) or self._died()
            if self._idle() <= self._limit():
                suspected = 0.0
            elif not suspected:
                before = self._ask(self._read_all) or {}
                suspected = time.monotonic()
            elif not verdict and time.monotonic() - suspected >= self.silence_s:
                suspected = 0.0
                verdict = self._judge(before, self._ask(self._read_all) or {})
            if verdict and not self._over.is_set():
                self._end(self._settle(verdict))

    def _idle(self) -> float:
        return time.monotonic() - self._active

    def _limit(self) -> float:
        return max(self._limits_s[self._steps >= 2], self._patience_s)

    def _record(self) -> dict[str, Any]:
        return {"seq": self._published, "count": self._count, "step": self._step, "where": self._where,
                "left": False, "idle": self._idle(), "limit": self._limit()}

    def _died(self) -> str:
        """The verdict on a process of this machine that is gone and had not left, '' if there is
        none."""
        for rank, process in enumerate(self.ranks):
            if rank != self.rank and is_alive_here(process) is False:
                seen = (self._ask(self._read_all) or {}).get(rank, {"left": False, "step": -1, "where": "set-up"})
                if not seen["left"]:
                    return f"{self._name(rank)} has died; it was last seen at {point(seen)}"
        return ""

    def _judge(self, before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]) -> str:
        """Our main thread is beyond its limit: who is to blame? '' if we wait for ranks that work.
        `before` and `after`: what the others have published, some time apart."""
        if len(self.ranks) == 1:
            return f"the main thread has made no progress for {self._idle():,.0f} s, at {point(self._record())}"
        here = f"{point(self._record())} for {self._idle():,.0f} s"
        if not after:
            return (f"{self._name(self.rank)} has waited at {here}, and the store of the launch does not answer: its "
                    f"host, that of {self._name(0)}, is stopped, dead or cut off")
        after[self.rank] = self._record()
        for rank in range(len(self.ranks)):  # of which nothing was ever heard
            after.setdefault(rank, {**self._record(), "seq": 0, "count": 0, "step": -1, "where": "set-up"})
        silent = [r for r in after if r != self.rank and after[r]["seq"] == before.get(r, {}).get("seq")
                  and not after[r]["left"]]
        least = min(seen["count"] for seen in after.values())
        stuck = silent or [r for r, seen in after.items() if seen["count"] == least
                           and (seen["left"] or seen["idle"] > seen["limit"])]
        if len(stuck) == len(self.ranks):
            return (f"all {len(stuck)} ranks have been at {here}: the network between them, or a file system they "
                    f"share, has stopped")
        if not stuck:
            return ""
        told = []
        for r in stuck:
            state = ", and its process does not answer" if r in silent else ", and has left" if after[r]["left"] else ""
            age = self._idle() if r in silent else after[r]["idle"]
            told.append(f"{self._name(r)}: last seen at {point(after[r])}, {age:,.0f} s ago{state}")
        waiting = [r for r in after if r not in stuck]
        others = after[self.rank if self.rank in waiting else waiting[0]]
        return f"{'; '.join(told)}; the other {len(waiting)} wait at {point(others)}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} on host {self.ranks[rank]['host']} (pid {self.ranks[rank]['pid']})"

    def _speaks(self, verdict: str) -> bool:
        """Whether this rank tells people of another's end: rank 0, or rank 1 where rank 0 is gone,
        and nobody where a rank of this host had an exception and says so itself."""
        who, failed, _ = verdict.partition(" failed at ")
        if who.startswith("rank 0 on"):
            return self.rank == 1 and not failed
        return self.rank == 0 and not (failed and f" on host {self.ranks[0]['host']} (pid " in who)

    # ---- the store; all of it may hang, so all of it goes through `_ask`

    def _ask(self, question: Callable[[Any], T]) -> T | None:
        """What the store answers, None if it does not in time, or there is none."""
        if self._store is None:
            return None
        box: list[T] = []

        def run(store: Any) -> None:
            try:
                box.append(question(store))
            except Exception as e:  # torch raises several kinds; no answer is no answer
                if type(e).__name__ == "DistNetworkError":
                    self._store = None  # each use of it would print a page

        thread = threading.Thread(target=run, args=(self._store,), name="watchdog-store", daemon=True)
        thread.start()
        thread.join(timeout=ASK_S)
        if thread.is_alive():
            self._store = None  # it may hold the client's lock for ever
        return box[0] if box else None

    def _publish(self, store: Any, *, left: bool = False) -> None:
        self._published += 1
        store.set(f"rank/{self.rank}", json.dumps({**self._record(), "left": left}))

    def _read_all(self, store: Any) -> dict[int, dict[str, Any]]:
        """What the other ranks have published last."""
        others = [rank for rank in range(len(self.ranks)) if rank != self.rank and store.check([f"rank/{rank}"])]
        return {rank: json.loads(store.get(f"rank/{rank}")) for rank in others}

    def _all_left(self) -> bool:
        seen = self._ask(self._read_all)
        return seen is None or all(s["left"] or is_alive_here(self.ranks[r]) is False for r, s in seen.items())

    def _verdict(self, store: Any) -> str:
        return store.get(VERDICT).decode() if store.check([VERDICT]) else ""

    def _settle(self, verdict: str) -> str:
        """The verdict that counts: the first."""
        return self._ask(lambda store: store.compare_set(VERDICT, "", verdict).decode()) or verdict

    # ---- the end

    def _wait(self, within_s: float, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + within_s
        while not condition() and time.monotonic() < end:
            time.sleep(min(0.05, self.interval_s / 4))

    def _report(self, verdict: str) -> None:
        reporter = threading.Thread(target=self._on_failure, args=(verdict,), daemon=True)
        reporter.start()
        reporter.join(timeout=10)

    def _end(self, verdict: str) -> None:
        """Tell, give the others time to hear it, and leave whatever the main thread does. Rank 0
        goes last: the store may be its own."""
        self._ending = True
        accused = self._name(self.rank) in verdict or verdict.startswith(("all ", "the main thread"))
        if accused or self._speaks(verdict):
            os.write(2, f"error: {verdict}; all ranks end now\n".encode())
        if accused:
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        self._report(verdict)
        self._ask(lambda store: self._publish(store, left=True))
        time.sleep(self.interval_s * (4 if self.rank == 0 else 2))
        os._exit(1)


def point(seen: dict[str, Any]) -> str:
    """'step 17 (reduction)', or what a rank did before its first step."""
    step = "" if seen["step"] < 0 else f"step {seen['step']}"
    return f"{step} ({seen['where']})" if step and seen["where"] else step or seen["where"]
