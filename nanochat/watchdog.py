"""
A rank that hangs or dies takes the others down within a stated time, with a sentence that names it.

Without this, the others wait in a collective: for ever, or until the library gives up with words
that name no rank. Here each rank's main thread says where it is, and two daemon threads of each
rank see to the rest:

    main thread    beat(17) .. beat(17, "reduction") .. beat(18) ................  stuck
    talks          publishes {count, at, late} in the launch's store every second or two; hears the others
    watches        is the main thread idle beyond its limit? Who is to blame? It never touches the store

    rank 0  count 36  step 18 (reduction)     the least count is behind: rank 3. It is late, so it
    rank 1  count 36  step 18 (reduction)     hangs, and the others wait for it. One that publishes
    rank 3  count 35  step 18                 nothing any more is stopped, or its machine is dead.

- The stated time: the limit, then up to 30 s of listening whether the others still tell anything,
  then up to 30 s to agree and leave. The limit is `timeout_s`; `first_timeout_s` until the second
  step (compilation); what a beat says until the next one.
- All ranks make the same beats in the same order. Only counts are compared, never clocks of two
  machines. Long work that one rank does alone calls `beat()` without a step: it moves no count, and
  shows that the rank works.
- The first verdict in the store counts, and all leave with it: by os._exit(1) where the main thread
  may be anywhere. Rank 0 tells people and the run's state; where rank 0 is to blame, rank 1 tells.
- A rank that hangs prints its threads' stacks. A process of this machine that is gone without a word
  is noticed at the next look. A rank that fails with an exception leaves its sentence as the verdict.

The store is a client of its own to the one where the ranks met, because the main thread may hold the
lock of theirs. It never answers where its host is stopped: only the thread that talks hangs then,
and that is the verdict."""

import faulthandler
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from nanochat.lifecycle import is_alive_here

log = logging.getLogger(__name__)

VERDICT = "verdict"
ANSWER_S = 10.0  # how long the store may take to answer
LATE_S = 30.0  # how much later than rank 0 another rank may come to the end of a run
PAUSED_S = 10.0  # a watching thread that comes so much too late was stopped
UNHEARD = {"count": 0, "at": "set-up", "late": True, "left": False}  # of a rank that never told anything


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
    lost: asked every `interval_s`: '' or why the launch must end, whatever its ranks do; waits for no disk.
    on_failure: called with the verdict on each rank, from any thread, before the process is ended.
    """

    def __init__(self, store: Any, ranks: Sequence[dict[str, Any]], *, rank: int = 0, timeout_s: float = 600.0,
                 first_timeout_s: float = 1800.0, lost: Callable[[], str] = lambda: "",
                 on_failure: Callable[[str], None] = lambda verdict: None) -> None:
        self.rank, self.ranks = rank, ranks
        self.interval_s = min(2.0, timeout_s / 20)
        self.silence_s = max(1.0, min(30.0, timeout_s / 4))
        self._store, self._lost, self._on_failure = store, lost, on_failure
        self._timeout_s, self._first_timeout_s = timeout_s, first_timeout_s
        self._count, self._first_step, self._at, self._patience_s = 0, -1, "set-up", first_timeout_s
        self._active = self._answered = time.monotonic()  # the main thread, and the store
        self._heard: dict[int, tuple[dict[str, Any], float]] = {}  # what others published, and when that was new
        self._ours, self._verdict = "", ""  # what this rank would say, and what counts
        self._left, self._over = False, threading.Event()
        self._talker = threading.Thread(target=self._talk, name="watchdog-talk", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    # ---- what the main thread says

    def beat(self, step: int | None = None, where: str = "", patience_s: float = 0.0) -> None:
        """The main thread is alive and, with a step, has come to a new point that all ranks come
        to. From there to the next one may take `patience_s`, or the limit if that is more."""
        if step is not None:
            self._first_step = step if self._count == 0 else self._first_step
            self._count += 1
            first_s = self._first_timeout_s if step == self._first_step else 0.0
            self._patience_s = max(patience_s, first_s)
            self._at = f"step {step} ({where})" if where else f"step {step}"
        self._active = time.monotonic()

    def __enter__(self) -> "Watchdog":
        if self._store is not None:
            self._talker.start()
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """The end of training, good or bad. The error of one rank of several becomes a verdict,
        which is told once; only a bug keeps its traceback."""
        self._over.set()
        self._watcher.join()  # which ends the process if it has come to a verdict
        if not isinstance(error, Exception) or len(self.ranks) == 1:
            return self._leave(LATE_S)
        if isinstance(error, RuntimeError):  # a collective broke: the rank that is to blame may say so yet
            self._wait(3 * self.interval_s + 1, lambda: self._verdict)
        expected = isinstance(error, (ValueError, OSError))
        told = str(error) if expected else f"{type(error).__name__}: {error}"
        ours = told if self.rank == 0 else f"{self._name(self.rank)} failed at {self._at}: {told}"
        if self._end(ours) != ours or expected:
            raise SystemExit(1) from error

    # ---- the thread that watches

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(self.interval_s):
            now = time.monotonic()
            if now - looked > self.interval_s + PAUSED_S:
                self._active = now  # this process was stopped for a while, or the whole machine
            looked = now
            verdict = self._verdict or self._lost()
            if not verdict and self._idle() > self._limit() + self.silence_s:
                verdict = self._judge()
            if verdict:
                self._end(verdict)
                os._exit(1)

    def _idle(self) -> float:
        return time.monotonic() - self._active

    def _limit(self) -> float:
        return max(self._timeout_s, self._patience_s)

    def _record(self) -> dict[str, Any]:
        return {"count": self._count, "at": self._at, "late": self._idle() > self._limit(), "left": self._left}

    def _judge(self) -> str:
        """Our main thread has been beyond its limit for a while, in which the others were listened
        to: who is to blame? '' if we wait for ranks that work."""
        now, idle, everyone = time.monotonic(), self._idle(), range(len(self.ranks))
        if self._store is not None and now - self._answered > ANSWER_S:
            return (f"{self._name(self.rank)} has waited at {self._at} for {idle:,.0f} s, and the store of the launch "
                    f"does not answer: its host, that of {self._name(0)}, is stopped, dead or cut off")
        heard = {rank: self._heard.get(rank, (UNHEARD, 0.0)) for rank in everyone} | {self.rank: (self._record(), now)}
        silent = [r for r, (seen, new_at) in heard.items() if now - new_at > self.silence_s and not seen["left"]]
        least = min(seen["count"] for seen, _ in heard.values())
        stuck = silent or [r for r, (seen, _) in heard.items()
                           if seen["count"] == least and (seen["left"] or seen["late"])]
        if not stuck:
            return ""
        if len(stuck) == len(everyone) > 1:
            return (f"all {len(stuck)} ranks have been at {self._at} for {idle:,.0f} s: the network between them, or "
                    f"a file system they share, has stopped")
        waiting = [rank for rank in everyone if rank not in stuck]
        told = []
        for rank in stuck:
            seen = heard[rank][0]
            more = ", and its process does not answer" if silent else ", and has left" if seen["left"] else ""
            told.append(f"{self._name(rank)} was last seen at {seen['at']}{more}")
        if waiting:
            told.append(f"the other {len(waiting)} wait at {heard[waiting[0]][0]['at']}")
        return f"{'; '.join(told)}, for {idle:,.0f} s now"

    def _name(self, rank: int) -> str:
        return f"rank {rank} on host {self.ranks[rank]['host']} (pid {self.ranks[rank]['pid']})"

    def _died(self, rank: int) -> str:
        return f"{self._name(rank)} has died; it was last seen at {self._heard.get(rank, (UNHEARD,))[0]['at']}"

    # ---- the thread that talks

    def _talk(self) -> None:
        """Rounds of publishing and hearing, until this rank has left; rank 0, whose process may
        hold the store, stays until the others have left or are gone."""
        try:
            while not self._round():
                time.sleep(min(0.05, self.interval_s))
                self._wait(self.interval_s, lambda: self._left or self._ours)
        except Exception as e:  # torch raises several kinds; its host is gone
            log.debug("the store of the launch: %s", e)
            time.sleep(self.interval_s)  # a process that dies closes its connections first
            gone = [rank for rank, process in enumerate(self.ranks) if is_alive_here(process) is False]
            self._verdict = self._verdict or (self._died(gone[0]) if gone else "")

    def _round(self) -> bool:
        """Publish, hear, and settle what counts. Whether that was the last time."""
        store, left, here = self._store, self._left, 0
        listens = left or self._idle() > self._limit()
        store.set(f"rank/{self.rank}", json.dumps({**self._record(), "clock": time.monotonic()}))
        for rank, process in enumerate(self.ranks):
            gone = is_alive_here(process) is False  # asked first: it may leave in between
            if rank == self.rank or not (listens or gone):
                continue
            key = f"rank/{rank}"
            seen = json.loads(store.get(key)) if store.check([key]) else UNHEARD
            if seen != self._heard.get(rank, (None,))[0]:
                self._heard[rank] = seen, time.monotonic()
            if gone and not seen["left"]:
                self._ours = self._ours or self._died(rank)
            here += not (gone or seen["left"])
        if self._ours:
            self._verdict = store.compare_set(VERDICT, "", self._ours).decode()
        elif store.check([VERDICT]):
            self._verdict = store.get(VERDICT).decode()
        self._answered = time.monotonic()
        return left and (self.rank > 0 or not here)

    # ---- the end

    def _end(self, ours: str) -> str:
        """End the launch with the verdict that counts, the first: tell it, and give the others
        time to hear it. Returns it."""
        self._ours = self._ours or ours
        self._wait(ANSWER_S, lambda: self._verdict or not self._talker.is_alive())
        verdict = self._verdict or ours
        speaks = self.rank == (1 if verdict.startswith(self._name(0)) else 0) or not self._verdict
        hangs = threading.current_thread() is self._watcher and (
            self._name(self.rank) in verdict or verdict.startswith("all "))
        if speaks or hangs:
            os.write(2, f"error: {verdict}\n".encode())
        if hangs:
            faulthandler.dump_traceback(file=2, all_threads=True)
        self._on_failure(verdict)
        self._leave(4 * self.interval_s)
        return verdict

    def _leave(self, within_s: float) -> None:
        """Tell the others, and go when the store has been told, or does not answer."""
        self._left = True
        self._wait(within_s, lambda: not self._talker.is_alive() or time.monotonic() - self._answered > ANSWER_S)

    def _wait(self, within_s: float, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + within_s
        while not condition() and time.monotonic() < end:
            time.sleep(min(0.05, self.interval_s / 4))
