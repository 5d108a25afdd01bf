"""
If a rank hangs or dies, the others end within a stated time, with an error that names it.

Without this, the others wait in a collective: forever, or until the library gives up with an error
that names no rank. Here each rank's main thread reports where it is, and two threads do the rest:

    main thread    beat(17) .. beat(17, "reduction") .. beat(18) ................  hangs
    heartbeat      each second: publishes {count, at, late} in the launch's store and reads the verdict;
                   on rank 0 it also judges, writes the run's state, and checks that the run is still ours
    timer          ends the process on a verdict, or if the main thread and rank 0's heartbeat both hang.
                   It uses neither disk nor store, so nothing can block it

    rank 0  count 36  step 18 (reduction)     rank 3 has the smallest count and is late, so it is the one that
    rank 1  count 36  step 18 (reduction)     hangs: the others wait for it. If a rank no longer publishes
    rank 3  count 35  step 18                 anything, it is suspended, or its machine is dead.

- The stated time is the limit, plus up to 30 s in which rank 0 listens, plus up to 30 s to agree
  and leave. The limit is the longest of `timeout_s`, the patience of the last beat and, until the
  second step, `first_timeout_s`.
- All ranks make the same beats in the same order. Ranks are compared by counts, never by the clocks
  of two machines. A rank that works alone for a long time calls `beat()` without a step, which is
  not counted.
- The first verdict in the store counts, and all ranks leave with it: by os._exit(1), unless the
  main thread itself leaves. Rank 0 prints and records it (rank 1 prints one that blames rank 0); a
  rank that hangs prints its stacks. A rank that fails with an exception leaves its error as the
  verdict.

Rejected: faulthandler.dump_traceback_later as the timer. It counts the time for which a process was
suspended, so `fg` after Ctrl-Z and a long lunch would end a healthy run.
"""

import faulthandler
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from nanochat.common import counted
from nanochat.dist import on_rank0
from nanochat.run_state import is_alive_here

log = logging.getLogger(__name__)

VERDICT = "verdict"
ANSWER_S = 10.0  # how long the store may take to answer
LATE_S = 30.0  # how much later than rank 0 another rank may reach the end of a run
PAUSED_S = 10.0  # how late the timer may wake up on a busy machine, at most
# for a rank that has not published
UNHEARD = {"count": 0, "at": "set-up", "late": True, "left": False}


class Store(Protocol):
    """What the watchdog needs from a store of torch.distributed."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


def open_store(world_size: int) -> Store | None:
    """Collective, once the group exists. A client of this launch's store (MASTER_ADDR,
    MASTER_PORT), or None for a single process. The group's own client will not do, because the main
    thread may hold its lock."""
    if world_size == 1:
        return None
    import torch.distributed as dist

    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
    # torchrun keeps one store
    return dist.PrefixStore(f"watchdog/{on_rank0(lambda: uuid.uuid4().hex)}", store)


class Watchdog:
    """One per rank; a context around all of training.

    store: from `open_store`. ranks: the values of `run_state.identify` on each rank, in rank order.
    refresh: called by the heartbeat about once a second; may use the disk. Returns '', or why the
    launch must end. on_failure: called with the verdict on each rank, from any thread, before the
    process ends.
    """

    def __init__(
        self,
        store: Store | None,
        ranks: Sequence[dict[str, Any]],
        *,
        rank: int = 0,
        timeout_s: float = 600.0,
        first_timeout_s: float = 1800.0,
        refresh: Callable[[], str] = lambda: "",
        on_failure: Callable[[str], None] = lambda verdict: None,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.interval_s = min(1.0, timeout_s / 20)
        self.silence_s = max(1.0, min(30.0, timeout_s / 4))
        self.paused_s = min(PAUSED_S, timeout_s / 4)  # one pause must not use up the limit
        self._store = store
        self._refresh = refresh
        self._on_failure = on_failure
        self._timeout_s, self._first_timeout_s = timeout_s, first_timeout_s
        self._count = 0
        self._first_step = -1
        self._at = "set-up"
        self._patience_s = first_timeout_s
        self._clock = 0.0  # seconds in which this process was not suspended, counted by the timer
        # the clock at the last beat of the main thread, and of rank 0's heartbeat
        self._active = self._watched = 0.0
        self._last_round = time.monotonic()  # when the heartbeat last completed a round
        # on this host
        self._local = [r for r, process in enumerate(ranks) if r != rank and is_alive_here(process)]
        self._published: dict[int, tuple[dict[str, Any], float]] = {}  # record, our clock then
        self._ours, self._verdict = "", ""  # this rank's proposal, and the verdict that counts
        self._left = False
        self._over = threading.Event()
        self._wake = threading.Event()
        self._heart = threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True)
        self._timer = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    # ---- the main thread

    def beat(self, step: int | None = None, where: str = "", patience_s: float = 0.0) -> None:
        """Report that the main thread is alive and, if `step` is given, at a new point that all
        ranks reach. It may take `patience_s` to the next point, or `timeout_s` if that is
        longer."""
        if step is not None:
            self._first_step = step if self._count == 0 else self._first_step
            self._count += 1
            first_s = self._first_timeout_s if step == self._first_step else 0.0
            self._patience_s = max(patience_s, first_s)
            self._at = f"step {step} ({where})" if where else f"step {step}"
        self._active = self._clock

    def __enter__(self) -> "Watchdog":
        self._heart.start()
        self._timer.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """The end of training, good or bad. If there are several ranks, an error becomes a verdict,
        which is printed once; only a bug keeps its traceback."""
        self._over.set()
        self._timer.join()  # ends the process if it has reached a verdict
        if not isinstance(error, Exception) or len(self.ranks) == 1:
            return self._leave(LATE_S)
        # a collective broke: the rank to blame may still leave its verdict
        if isinstance(error, RuntimeError):
            self._wait(3 * self.interval_s + 1, lambda: self._verdict)
        expected = isinstance(error, (ValueError, OSError))
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        ours = (
            reason if self.rank == 0 else f"{self._name(self.rank)} failed at {self._at}: {reason}"
        )
        if self._end(ours) != ours or expected:
            raise SystemExit(1) from error

    def _idle(self) -> float:
        return self._clock - self._active

    def _limit(self) -> float:
        return max(self._timeout_s, self._patience_s)

    # ---- the heartbeat

    def _heartbeat(self) -> None:
        """Repeat rounds until this rank has left. Rank 0, whose process may host the store, stays
        until the others have left or are gone."""
        while not self._round():
            self._ours = self._ours or self._refresh() or self._judge()
            self._last_round = time.monotonic()
            self._wake.wait(
                min(0.05, self.interval_s) if self._left or self._ours else self.interval_s
            )
            self._wake.clear()

    def _round(self) -> bool:
        """Publish this rank's record, read the others', and settle the verdict. Returns whether
        this was the last."""
        self._published[self.rank] = (
            {
                "count": self._count,
                "at": self._at,
                "late": self._idle() > self._limit(),
                "left": self._left,
            },
            self._clock,
        )
        if self._store is not None:
            try:
                return self._exchange(self._store)
            except Exception as e:  # torch raises several types; the store's host is gone
                log.debug("the store of the launch: %s", e)
                self._store = None
                # a dying process closes its connections before it disappears
                time.sleep(self.interval_s)
                gone = [rank for rank in self._local if not is_alive_here(self.ranks[rank])]
                self._ours = self._ours or (self._died(gone[0]) if gone else "")
        elif len(self.ranks) == 1:
            self._watched = self._clock
        self._verdict = self._verdict or self._ours
        return self._left

    def _exchange(self, store: Store) -> bool:
        """`_round` with a store. This rank reads another's record only if that process is gone; if
        this rank is rank 0 and waits for the others to leave; or if this rank is late and it or the
        other is rank 0."""
        ours, num_present = self._published[self.rank][0], 0
        left, late = ours["left"], ours["late"]
        store.set(f"rank/{self.rank}", json.dumps({**ours, "clock": time.monotonic()}))
        for rank, process in enumerate(self.ranks):
            gone = rank in self._local and not is_alive_here(process)  # before its record is read
            listens = gone or (self.rank == 0 and left) or (late and 0 in (rank, self.rank))
            if rank == self.rank or not listens:
                continue
            key = f"rank/{rank}"
            record = json.loads(store.get(key)) if store.check([key]) else UNHEARD
            if record != self._published.get(rank, (None,))[0]:
                self._published[rank] = record, self._clock
            if gone and not record["left"]:
                self._ours = self._ours or self._died(rank)
            num_present += not (gone or record["left"])
        if self._ours:
            self._verdict = store.compare_set(VERDICT, "", self._ours).decode()
        elif store.check([VERDICT]):
            self._verdict = store.get(VERDICT).decode()
        self._watched = self._published[0][1] if late and self.rank > 0 else self._clock
        return left and (self.rank > 0 or not num_present)

    def _judge(self) -> str:
        """The verdict: which rank is to blame; '' if rank 0 waits for ranks at work. Only rank 0
        judges, and only after its main thread has been over its limit for `silence_s`, while it
        listened to the others."""
        now = self._clock
        idle = self._idle()
        world_size = len(self.ranks)
        if (
            self.rank > 0
            or idle <= self._limit() + self.silence_s
            or (self._store is None and world_size > 1)
        ):
            return ""
        published = [self._published.get(rank, (UNHEARD, 0.0)) for rank in range(world_size)]
        silent = [
            rank
            for rank, (record, new_at) in enumerate(published)
            if now - new_at > self.silence_s and not record["left"]
        ]
        smallest = min(record["count"] for record, _ in published)
        stuck = silent or [
            rank
            for rank, (record, _) in enumerate(published)
            if record["count"] == smallest and (record["left"] or record["late"])
        ]
        if not stuck:
            return ""
        if len(stuck) == world_size > 1:
            return (
                f"all {world_size} ranks have been at {self._at} for {idle:,.0f} s: the network between them, or "
                f"a file system they share, has stopped"
            )
        parts = []
        for rank in stuck:
            record = published[rank][0]
            more = (
                ", and its process does not answer"
                if silent
                else ", and has left"
                if record["left"]
                else ""
            )
            parts.append(f"{self._name(rank)} was last seen at {record['at']}{more}")
        if waiting := [
            record["at"] for rank, (record, _) in enumerate(published) if rank not in stuck
        ]:
            parts.append(f"waiting at {waiting[0]}: {counted(len(waiting), 'other rank')}")
        return f"{'; '.join(parts)}; no progress for {idle:,.0f} s"

    def _name(self, rank: int) -> str:
        return f"rank {rank} on host {self.ranks[rank]['host']} (pid {self.ranks[rank]['pid']})"

    def _died(self, rank: int) -> str:
        return f"{self._name(rank)} has died; rank {self.rank} was at {self._at} then"

    # ---- the timer

    def _watch(self) -> None:
        """Count the seconds in which this process was not suspended, and end the process on a
        verdict."""
        before = time.monotonic()
        while not self._over.wait(self.interval_s):
            now = time.monotonic()
            # a longer gap: this process was suspended
            self._clock += min(now - before, self.interval_s + self.paused_s)
            before, verdict = now, self._verdict
            if (
                not verdict
                and self._idle() > self._limit()
                and self._clock - self._watched > self.silence_s
            ):
                verdict = (
                    f"{self._name(self.rank)} has waited at {self._at} for {self._idle():,.0f} s, and the "
                    f"heartbeat of {self._name(0)} has stopped: that process, its disk or its network hangs"
                )
            if verdict:
                self._end(verdict)
                os._exit(1)

    # ---- the end

    def _end(self, ours: str) -> str:
        """End the launch with the first verdict: print it, and give the others time to read it.
        Returns it."""
        self._ours = self._ours or ours
        self._wake.set()
        self._wait(ANSWER_S, lambda: self._verdict or not self._heart.is_alive())
        verdict = self._verdict or ours
        speaks = self.rank == (1 if verdict.startswith(self._name(0)) else 0) or not self._verdict
        hangs = threading.current_thread() is self._timer and (
            self._name(self.rank) in verdict or verdict.startswith("all ")
        )
        if speaks or hangs:
            os.write(2, f"error: {verdict}\n".encode())
        if hangs:
            faulthandler.dump_traceback(file=2, all_threads=True)
        self._on_failure(verdict)
        self._leave(4 * self.interval_s)
        return verdict

    def _leave(self, within_s: float) -> None:
        """Wait until the heartbeat has published that this rank is leaving, or hangs."""
        self._left = True
        self._wake.set()
        self._wait(
            within_s,
            lambda: not self._heart.is_alive() or time.monotonic() >= self._last_round + ANSWER_S,
        )

    def _wait(self, within_s: float, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + within_s
        while not condition() and time.monotonic() < end:
            time.sleep(min(0.05, self.interval_s / 4))
