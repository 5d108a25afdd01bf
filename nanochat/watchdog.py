"""
A rank that hangs or dies takes the others down within a stated time, with a sentence that names it.

Without this, the others wait in a collective: for ever, or until the library gives up with words that name no rank.
Here each rank's main thread says where it is, and a daemon thread of each rank watches:

    main thread      beat(17) .. beat(17, "reduction") .. beat(18) ..........................  stuck
    its watchdog     publishes {count, step, where, idle seconds} in the launch's key-value store, every second or two

    rank 0  count 36  at step 18 (reduction)      the least count is behind: rank 3. It is idle for longer than its
    rank 1  count 36  at step 18 (reduction)      limit, so it hangs; the others wait for it. Where nothing comes
    rank 3  count 35  at step 18                  from a rank any more, it is dead, or its machine is.

- The stated time: the limit, then up to 30 s of listening whether the others still tell anything, then up to 20 s to
  agree and leave.
- All ranks make the same beats in the same order; only their count is compared, never clocks of two machines.
- A rank is idle since its last beat. Its limit is `timeout_s`; `first_timeout_s` until its second step
  (compilation); what `patience` says inside of it. Long work that one rank does alone calls `beat()` without a step:
  it moves no count, and shows that the rank works. Others that wait longer than their own limit for a rank that
  works go on waiting.
- The first verdict counts: it goes into the store, every rank takes it from there, rank 0 marks the run as failed
  with it, and all leave by os._exit(1), since the main thread may be anywhere. A rank that hangs prints its threads'
  stacks first.
- A process of this machine that is gone without a word is noticed at the next look, without waiting for any limit.
- A rank that fails with an exception leaves its sentence as the verdict before it goes. It says it itself; the
  others, whose collectives break ("connection closed", with a traceback each), leave without a word, but rank 0 where
  the failing rank is on another host: people look at rank 0. Bad input (ValueError, OSError) of another rank than 0 is
  told with rank and host, any other exception keeps its traceback.

      rank 1  next(loader): x.bin is torn --> verdict     error: rank 1 on host b (pid 12) failed at step 5: x.bin is ..
      rank 0  all_reduce: RuntimeError    <-- verdict     state: failed, with that reason; exit 1

The store is a client of its own to the one where the ranks met (torchrun's, which outlives every rank), because the
main thread may hold the lock of theirs. Every use of it happens in a thread of its own with a time limit: a store
whose host is stopped does not answer, and then that is the verdict.
"""

import contextlib
import faulthandler
import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from nanochat.lifecycle import identify, is_alive_here

log = logging.getLogger(__name__)

T = TypeVar("T")
VERDICT = "verdict"
FAILED = " failed at "  # in the verdict of a rank that had an exception, behind who it is
ASK_S = 10.0  # how long the store may take to answer
LATE_S = 30.0  # how much later than rank 0 another rank may come to the end of a run
PAUSED_S = 10.0  # a watching thread that comes so much too late was stopped


def open_store(world_size: int, *, timeout_s: float = 30.0) -> Any:
    """A client of the store of this launch (MASTER_ADDR, MASTER_PORT), or None for a single process. Called
    once the process group is there."""
    if world_size == 1:
        return None
    import torch.distributed as dist

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                          wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return dist.PrefixStore(f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


class Watchdog:
    """One for each rank; a context around all of training. `store`: of `open_store`. `on_failure`: called with the
    verdict on each rank, from another thread than the main one, before the process is ended."""

    def __init__(self, store: Any = None, *, rank: int = 0, world_size: int = 1, timeout_s: float = 600.0,
                 first_timeout_s: float = 1800.0, on_failure: Callable[[str], None] = lambda verdict: None) -> None:
        if not timeout_s > 0:
            raise ValueError(f"--collective-timeout-seconds: got {timeout_s}, expected a positive number of seconds")
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.interval_s = min(2.0, timeout_s / 20)
        self.silence_s = max(1.0, min(30.0, timeout_s / 4))
        self._store, self._on_failure = store, on_failure
        self._first_limit_s = max(timeout_s, first_timeout_s)
        self._patience_s = 0.0
        self._steps_seen = 0
        self._mark: tuple[int, int | None, str, float] = (0, None, "set-up", time.monotonic())  # count, step, ..
        self._pardon = 0.0  # idle since then at most
        self._me = identify()
        self._seq = 0
        self._ranks: dict[int, dict[str, Any]] = {}  # the last known record of each other rank
        self._suspicion: tuple[float, dict[int, dict[str, Any]]] | None = None  # since when, what was known then
        self._store_lost = False
        self._over = threading.Event()
        self._ending = False  # the watching thread is about to end the process
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    # ---- what the main thread says

    def beat(self, step: int | None = None, where: str = "") -> None:
        """The main thread is alive and, with a step, has come to a new point that all ranks come to."""
        count, at, place, _ = self._mark
        if step is None:
            self._mark = (count, at, place, time.monotonic())
            return
        self._steps_seen += step != at
        self._mark = (count + 1, step, where, time.monotonic())

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
        self._ask(self._exchange)  # so that the others know of this rank whatever comes
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._ending:
            raise SystemExit(1) from error
        self._over.set()
        failed = isinstance(error, Exception) and self.world_size > 1
        verdict, ours = self._tell_failure(error) if isinstance(error, Exception) and failed else ("", "")
        self._thread.join(timeout=5 + self.interval_s)
        if self._store is not None:
            self._ask(lambda store: self._publish(store, left=True))
        if failed:
            self._let_others_leave(3 * self.interval_s + 1)
            self._leave(error, verdict, ours)
        elif kind is None:
            self._let_others_leave(LATE_S)

    def _let_others_leave(self, within_s: float) -> None:
        """Rank 0 goes last, for the store may be its own: without it the others would hold rank 0 for dead."""
        end, pause = time.monotonic() + within_s, 0.001
        while self.rank == 0 and time.monotonic() < end:
            seen = self._ask(self._read_all)
            if seen is None or all(r["left"] or is_alive_here(r) is False for r in seen.values()):
                break
            time.sleep(pause)
            pause = min(2 * pause, self.interval_s / 4)

    def _leave(self, error: BaseException | None, verdict: str, ours: str) -> None:
        """What comes out of the context after a failure: silence where another rank is to blame, else its own error."""
        if verdict != ours:
            if self._speaks(verdict):
                print(f"error: {verdict}", file=sys.stderr, flush=True)
            raise SystemExit(1) from error
        if not isinstance(error, (ValueError, OSError)):
            log.error("%s", ours)
        elif self.rank != 0:
            raise ValueError(ours) from error

    def _speaks(self, verdict: str) -> bool:
        """Whether this rank tells people of another's end: rank 0, or rank 1 where rank 0 is gone, and nobody where a
        rank of this host had an exception and says so itself."""
        who, failed, _ = verdict.partition(FAILED)
        if verdict.startswith("rank 0 on"):
            return self.rank == 1 and not failed
        return self.rank == 0 and not (failed and f" on host {self._me['host']} (pid " in who)

    def _tell_failure(self, error: Exception) -> tuple[str, str]:
        """Settle whose failure it is: ours, unless another rank has failed or gone before. Where the error is one of a
        collective, the others get a moment to say so. Returns the verdict, and what ours would have been."""
        expected = isinstance(error, (ValueError, OSError))
        told = str(error) if expected else f"{type(error).__name__}: {error}"
        ours = f"{self._who(self.rank, self._me)}{FAILED}{_point(self._record())}: {told}"
        ours = told if expected and self.rank == 0 else ours  # it speaks for all: see ranks.agree
        end = time.monotonic() + (3 * self.interval_s + 1 if isinstance(error, RuntimeError) else 0)
        verdict = self._ask(self._exchange) or self._gone()
        while not verdict and time.monotonic() < end:
            time.sleep(self.interval_s / 4)
            verdict = self._ask(self._exchange) or self._gone()
        verdict = self._ask(lambda store: self._settle(store, verdict or ours)) or verdict or ours
        self._report(verdict)
        return verdict, ours

    # ---- what the watching thread does

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(self.interval_s):
            if time.monotonic() - looked > self.interval_s + PAUSED_S:
                self._pardon = time.monotonic()  # this process was stopped for a while, or the whole machine
            verdict = self._look()
            if verdict and not self._over.is_set():
                self._end(verdict)
            looked = time.monotonic()

    def _look(self) -> str:
        """'' or the verdict."""
        settled = self._ask(self._exchange)
        if settled:
            return settled
        verdict = self._gone() or self._suspect()
        if verdict and self._store is not None:
            return self._ask(lambda store: self._settle(store, verdict)) or verdict
        return verdict

    def _suspect(self) -> str:
        """Beyond the limit, what is known of the others twice, `silence_s` apart (publishing on), and then judge."""
        if self._idle() <= self._limit():
            self._suspicion = None
        elif self._suspicion is None:
            self._suspicion = time.monotonic(), self._ask(self._read_all) or {}
        elif time.monotonic() - self._suspicion[0] >= self.silence_s:
            before, self._suspicion = self._suspicion[1], None
            return self._judge(before, self._ask(self._read_all) or {})
        return ""

    def _idle(self) -> float:
        return time.monotonic() - max(self._mark[3], self._pardon)

    def _limit(self) -> float:
        return max(self._first_limit_s if self._steps_seen < 2 else self.timeout_s, self._patience_s)

    def _record(self) -> dict[str, Any]:
        count, step, where, _ = self._mark
        return {**self._me, "seq": self._seq, "count": count, "step": step, "where": where, "left": False,
                "idle": round(self._idle(), 3), "limit": self._limit(), "time": time.time()}

    def _gone(self) -> str:
        """The verdict on a process of this machine that is gone and had not left."""
        for rank in [r for r, seen in self._ranks.items() if not seen["left"] and is_alive_here(seen) is False]:
            self._ask(functools.partial(self._read, rank=rank))  # its last words
            seen = self._ranks[rank]
            if not seen["left"]:
                return f"{self._who(rank, seen)} has died; it was last seen at {_point(seen)}"
        return ""

    def _judge(self, before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]) -> str:
        """Our main thread is beyond its limit: who is to blame? '' if we wait for ranks that work."""
        if self.world_size == 1:
            return f"the main thread has made no progress for {self._idle():,.0f} s, at {_point(self._record())}"
        if not after:
            return (f"{self._who(self.rank, self._me)} has waited at {_point(self._record())} for "
                    f"{self._idle():,.0f} s, and the store of the launch does not answer: its host, that of "
                    f"{self._who(0, self._ranks[0]) if 0 in self._ranks else 'rank 0'}, is stopped, dead or cut off")
        after[self.rank] = self._record()
        if unheard := sorted(set(range(self.world_size)) - set(after)):
            return f"nothing was ever heard of rank {', '.join(map(str, unheard))}; the others wait for it"
        silent = [r for r, seen in after.items() if r != self.rank and r in before
                  and not seen["left"] and seen["seq"] == before[r]["seq"]]
        least = min(seen["count"] for seen in after.values())
        behind = silent or [r for r, seen in after.items() if seen["count"] == least]
        stuck = [r for r in behind if r in silent or after[r]["left"] or after[r]["idle"] > after[r]["limit"]]
        return self._blame(stuck, after, silent) if stuck else ""

    def _blame(self, stuck: list[int], seen: dict[int, dict[str, Any]], silent: list[int]) -> str:
        if len(stuck) == self.world_size:
            return (f"all {len(stuck)} ranks have been at {_point(seen[self.rank])} for {self._idle():,.0f} s: the "
                    f"network between them, or a file system they share, has stopped")
        told = "; ".join(self._accuse(r, seen[r], r in silent) for r in sorted(stuck)[:8])
        more = f"; and {len(stuck) - 8} more" if len(stuck) > 8 else ""
        waiting = [r for r in seen if r not in stuck]
        point = _point(seen[self.rank if self.rank in waiting else waiting[0]])
        return f"{told}{more}; the other {len(waiting)} wait at {point}"

    def _accuse(self, rank: int, seen: dict[str, Any], silent: bool) -> str:
        state = ", and its process does not answer" if silent else ", and has left" if seen["left"] else ""
        age = seen["idle"] + max(0.0, time.time() - seen["time"])
        return f"{self._who(rank, seen)}: last seen at {_point(seen)}, {age:,.0f} s ago{state}"

    @staticmethod
    def _who(rank: int, seen: dict[str, Any]) -> str:
        return f"rank {rank} on host {seen['host']} (pid {seen['pid']})"

    # ---- the store; all of it may hang, so all of it goes through `_ask`

    def _ask(self, question: Callable[[Any], T]) -> T | None:
        """What the store answers, None if it does not in time, or there is none."""
        if self._store is None or self._store_lost:
            return None
        box: list[T] = []

        def run() -> None:
            try:
                box.append(question(self._store))
            except Exception as e:  # torch raises several kinds; no answer is no answer
                self._store_lost |= type(e).__name__ == "DistNetworkError"  # each use of it would print a page

        thread = threading.Thread(target=run, name="watchdog-store", daemon=True)
        thread.start()
        thread.join(timeout=ASK_S)
        self._store_lost |= thread.is_alive()  # it may hold the client's lock for ever
        return box[0] if box else None

    def _publish(self, store: Any, *, left: bool = False) -> None:
        self._seq += 1
        store.set(f"rank/{self.rank}", json.dumps({**self._record(), "left": left}))

    def _exchange(self, store: Any) -> str:
        self._publish(store)
        for rank in range(self.world_size):
            if rank != self.rank and rank not in self._ranks:
                self._read(store, rank)
        return self._verdict(store)

    def _verdict(self, store: Any) -> str:
        return store.get(VERDICT).decode() if store.check([VERDICT]) else ""

    def _settle(self, store: Any, verdict: str) -> str:
        """The verdict that counts: the first."""
        return store.compare_set(VERDICT, "", verdict).decode()

    def _read(self, store: Any, rank: int) -> None:
        if store.check([f"rank/{rank}"]):
            self._ranks[rank] = json.loads(store.get(f"rank/{rank}"))

    def _read_all(self, store: Any) -> dict[int, dict[str, Any]]:
        for rank in range(self.world_size):
            if rank != self.rank:
                self._read(store, rank)
        return dict(self._ranks)

    # ---- the end

    def _report(self, verdict: str) -> None:
        reporter = threading.Thread(target=self._on_failure, args=(verdict,), daemon=True)
        reporter.start()
        reporter.join(timeout=10)

    def _end(self, verdict: str) -> None:
        """Tell, give the others time to hear it, and leave whatever the main thread does. Rank 0 goes last: the store
        may be its own."""
        self._ending = True
        accused = self._who(self.rank, self._me) in verdict or verdict.startswith(("all ", "the main thread"))
        if accused or self._speaks(verdict):
            os.write(2, f"error: {verdict}; all ranks end now\n".encode())
        if accused:
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        self._report(verdict)
        self._ask(lambda store: self._publish(store, left=True))
        time.sleep(self.interval_s * (4 if self.rank == 0 else 2))
        os._exit(1)


def _point(seen: dict[str, Any]) -> str:
    """'step 17 (reduction)', or what it did before its first step."""
    step = "" if seen["step"] is None else f"step {seen['step']}"
    return f"{step} ({seen['where']})" if step and seen["where"] else step or seen["where"]
