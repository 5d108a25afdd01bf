"""
If a rank hangs or dies, the others end within a stated time, with an error that names it.

PyTorch's groups have timeouts, too, but their error names no rank, and they cannot wait longer for
a save than for a step. So here each rank's main thread reports where it is, and one thread beside
it compares the ranks. The launch's store carries a record of each rank, and the verdict:

    main thread    beat(17) .. beat(17, "reduction") .. beat(18) ...............  hangs
    watchdog       each second a round: publish {beats, at, late}, read the verdict; rank 0 also judges
      its round    in a thread of its own, because store and disk may hang. If the main thread and the
                   rounds hang, the watchdog ends the process

    rank 0  beats 36  step 18 (reduction)     rank 3 has the fewest beats and is late, so it is the one that
    rank 1  beats 36  step 18 (reduction)     hangs: the others wait for it. If a rank no longer publishes
    rank 3  beats 35  step 18                 anything, it is suspended, or its machine is dead.

**Who writes what.** The main thread writes its last `Beat`, a tuple that is replaced as a whole, and
the watchdog everything else, so there is no lock. On leaving, the main thread stops the watchdog
first, and then asks the store itself.

- The stated time is the limit, plus up to 30 s in which rank 0 listens, plus up to 30 s to agree
  and leave. The limit is the longest of `timeout_s`, the patience of the last beat and, until the
  second step, `first_timeout_s`.
- All ranks make the same beats in the same order. Ranks are compared by their numbers of beats, never by
  the clocks of two machines. A rank that works alone for a long time calls `beat()` without a step, which is
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
from typing import Any, NamedTuple, Protocol

from nanochat.common import Stop, counted, each
from nanochat.dist import on_rank0
from nanochat.run_state import is_alive_here

log = logging.getLogger(__name__)

VERDICT = "verdict"
ANSWER_S = 10.0  # how long the store may take to answer
LATE_S = 30.0  # how much later than rank 0 another rank may reach the end of a run
PAUSED_S = 10.0  # how late the watchdog may wake up on a busy machine, at most


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


# ---- what is known -------------------------------------------------------------------------------


class Limits(NamedTuple):
    """How long to wait, in seconds."""

    step: float  # from one beat to the next
    first_step: float

    @property
    def interval(self) -> float:
        """Between two rounds."""
        return min(1.0, self.step / 20)

    @property
    def urgent(self) -> float:
        """Between two rounds for which somebody waits."""
        return min(0.05, self.interval)

    @property
    def silence(self) -> float:
        """A rank that publishes nothing for longer does not answer."""
        return max(1.0, min(30.0, self.step / 4))

    @property
    def pause(self) -> float:
        """The longest time between two rounds that counts, besides `interval`. In more, the process was
        suspended. One pause must not use up the limit."""
        return min(PAUSED_S, self.step / 4)


class Clock:
    """Seconds in which this process was not suspended, as counted by frequent ticks."""

    def __init__(self, longest_s: float) -> None:
        self.now = 0.0
        self._longest_s = longest_s  # a longer gap between ticks counts as this
        self._ticked = time.monotonic()

    def tick(self) -> None:
        before, self._ticked = self._ticked, time.monotonic()
        self.now += min(self._ticked - before, self._longest_s)


class Beat(NamedTuple):
    """The last sign of life of the main thread."""

    number: int  # of this beat, from 1; 0 before the first
    at: str  # the point that it reached
    limit_s: float  # how long it may take to the next point
    clock: float  # the time of the sign
    first_step: int | None = None


class Record(NamedTuple):
    """What a rank publishes in each round; the defaults describe one that has not."""

    beats: int = 0  # their number
    at: str = "set-up"
    late: bool = True  # its main thread is over its limit
    left: bool = False
    time: float = 0.0  # of its host; tells two rounds apart


class Heard(NamedTuple):
    """A rank's newest record, and our clock when it was new."""

    record: Record
    since: float


class News(NamedTuple):
    """What a round has found out."""

    verdict: str  # the one that counts, or ''
    records: dict[int, Record]  # of other ranks, those that were read
    is_last: bool  # this rank has left; rank 0: and all others have left or are gone


class Peer(NamedTuple):
    """A rank of the launch."""

    name: str
    process: dict[str, Any]  # see `run_state.identify`
    is_here: bool  # its process was alive on this host when the watchdog began

    @property
    def is_gone(self) -> bool:
        return self.is_here and not is_alive_here(self.process)


def to_blame(
    names: Sequence[str], heard: Sequence[Heard], silent: Sequence[bool], idle_s: float
) -> str:
    """The verdict on ranks whose main threads wait: which one is behind. '' if the ranks that are
    behind are at work. `silent`: which ranks publish nothing. `idle_s`: how long rank 0 waits."""
    records = [one.record for one in heard]
    stuck = [rank for rank, is_silent in enumerate(silent) if is_silent]
    if not stuck:
        fewest = min(record.beats for record in records)
        behind = [rank for rank, record in enumerate(records) if record.beats == fewest]
        stuck = [rank for rank in behind if records[rank].left or records[rank].late]
    if not stuck:
        return ""
    if len(stuck) == len(names) > 1:
        return (
            f"all {len(names)} ranks have been at {records[0].at} for {idle_s:,.0f} s: the network between "
            f"them, or a file system they share, has stopped"
        )
    parts = []
    for rank in stuck:
        more = ""
        if silent[rank]:
            more = ", and its process does not answer"
        elif records[rank].left:
            more = ", and has left"
        parts.append(f"{names[rank]} was last seen at {records[rank].at}{more}")
    waiting = [record for rank, record in enumerate(records) if rank not in stuck]
    if waiting:
        parts.append(f"waiting at {waiting[0].at}: {counted(len(waiting), 'other rank')}")
    return f"{'; '.join(parts)}; no progress for {idle_s:,.0f} s"


# ---- the watchdog --------------------------------------------------------------------------------


class Watchdog:
    """One per rank; a context around all of training.

    store: from `open_store`. ranks: the values of `run_state.identify` on each rank, in rank order.
    refresh: called about once a second, may use the disk. Returns '', or why the launch must end.
    on_failure: called with the verdict on each rank, from any thread, before the process ends.
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
        self.rank = rank
        self.limits = Limits(timeout_s, first_timeout_s)
        self.peers: list[Peer] = []
        for number, process in enumerate(ranks):
            name = f"rank {number} on host {process['host']} (pid {process['pid']})"
            self.peers.append(Peer(name, process, number != rank and is_alive_here(process)))
        self._store = store
        self._refresh = refresh
        self._on_failure = on_failure
        self._clock = Clock(self.limits.interval + self.limits.pause)
        self._beat = Beat(0, Record().at, max(self.limits), clock=0.0)
        self._heard = [Heard(Record(), since=0.0) for _ in ranks]
        self._answered = 0.0  # the clock when rank 0 last showed that its watchdog is at work
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    # ---- the main thread

    def beat(self, step: int | None = None, where: str = "", patience_s: float = 0.0) -> None:
        """Report that the main thread is alive and, if `step` is given, at a new point that all
        ranks reach. It may take `patience_s` to the next point, or `timeout_s` if that is
        longer."""
        now, last = self._clock.now, self._beat
        if step is None:
            self._beat = last._replace(clock=now)
            return
        first_step = step if last.first_step is None else last.first_step
        limit_s = max(self.limits.step, patience_s)
        if step == first_step:
            limit_s = max(limit_s, self.limits.first_step)
        at = f"step {step} ({where})" if where else f"step {step}"
        self._beat = Beat(last.number + 1, at, limit_s, now, first_step)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """The end of training, good or bad. If there are several ranks, an error becomes a verdict,
        which is printed once; only a bug keeps its traceback."""
        self._over.set()
        self._thread.join()  # ends the process if it has reached a verdict
        is_failure = isinstance(error, Exception) and not isinstance(error, Stop)
        if not is_failure or len(self.peers) == 1:
            return self._leave(LATE_S)
        is_bug = not isinstance(error, (ValueError, OSError))
        ours = f"{type(error).__name__}: {error}" if is_bug else str(error)
        if self.rank > 0:
            ours = f"{self.peers[self.rank].name} failed at {self._beat.at}: {ours}"
        news = None
        if isinstance(error, RuntimeError):
            # a collective broke: the rank to blame may still leave its verdict
            news = self._rounds(3 * self.limits.interval + 1, lambda news: bool(news.verdict))
        verdict = self._end(news.verdict if news is not None and news.verdict else ours)
        if verdict != ours or not is_bug:
            raise SystemExit(1) from error

    # ---- a round

    def _ask(self, proposal: str = "", *, left: bool = False, hurry: bool = False) -> News | None:
        """A round. None if it hangs: `hurry`, or on the way out, it may take ANSWER_S; otherwise
        until the watchdog ends the process."""
        began = time.monotonic()

        def poll() -> None:
            if not hurry and not self._over.is_set():
                self._tick()
            elif time.monotonic() > began + ANSWER_S:
                raise TimeoutError

        late = self._idle() > self._beat.limit_s
        ours = Record(self._beat.number, self._beat.at, late, left, began)
        try:
            return next(each(lambda record: self._round(record, proposal), [ours], poll=poll))
        except TimeoutError:
            return None

    def _round(self, ours: Record, proposal: str) -> News:
        """Refresh the run's state, exchange records, and settle the verdict. Runs in a thread of its
        own, and may hang. `proposal`: why this rank wants the launch to end, or ''."""
        is_on_its_way_out = proposal or ours.left or self._over.is_set()
        proposal = proposal if is_on_its_way_out else self._refresh()
        if self._store is not None:
            try:
                return self._exchange(self._store, ours, proposal)
            except Exception as e:  # torch raises several types; the store's host is gone
                log.debug("the store of the launch: %s", e)
                self._store = None
                time.sleep(self.limits.interval)  # a dying process closes its connections first
        gone = [rank for rank, peer in enumerate(self.peers) if peer.is_gone]
        if gone:
            proposal = proposal or self._died(gone[0])
        return News(proposal, {}, is_last=ours.left)

    def _exchange(self, store: Store, ours: Record, proposal: str) -> News:
        """`_round` with a store. This rank reads another's record only if that process is gone; if
        this rank is rank 0 and waits for the others to leave; or if this rank is late and it or the
        other is rank 0."""
        store.set(f"rank/{self.rank}", json.dumps(ours))
        records: dict[int, Record] = {}
        num_present = 0
        for rank, peer in enumerate(self.peers):
            gone = peer.is_gone  # before its record is read
            waits_for_all = self.rank == 0 and (ours.left or ours.late)
            listens = gone or waits_for_all or (ours.late and rank == 0)
            if rank == self.rank or not listens:
                continue
            key = f"rank/{rank}"
            record = Record(*json.loads(store.get(key))) if store.check([key]) else Record()
            records[rank] = record
            if gone and not record.left:
                proposal = proposal or self._died(rank)
            num_present += not (gone or record.left)
        verdict = ""
        if proposal:
            verdict = store.compare_set(VERDICT, "", proposal).decode()
        elif store.check([VERDICT]):
            verdict = store.get(VERDICT).decode()
        has_all_left = self.rank > 0 or num_present == 0
        return News(verdict, records, is_last=ours.left and has_all_left)

    def _died(self, rank: int) -> str:
        return f"{self.peers[rank].name} has died; rank {self.rank} was at {self._beat.at} then"

    # ---- the watchdog's thread

    def _watch(self) -> None:
        """Repeat rounds until the main thread leaves. End the process on a verdict."""
        proposal = ""
        while (news := self._ask(proposal)) is not None:
            self._hear(news)
            proposal = self._judge()
            is_urgent = bool(proposal or news.verdict)
            if self._over.wait(self.limits.urgent if is_urgent else self.limits.interval):
                return
            self._tick()
            if news.verdict:
                self._end_process(news.verdict)

    def _tick(self) -> None:
        """Count time. End the process if the main thread hangs, and rank 0's watchdog, too."""
        self._clock.tick()
        waits_for_rank0_s = self._clock.now - self._answered
        if self._idle() > self._beat.limit_s and waits_for_rank0_s > self.limits.silence:
            self._end_process(
                f"{self.peers[self.rank].name} has waited at {self._beat.at} for {self._idle():,.0f} s, and "
                f"the heartbeat of {self.peers[0].name} has stopped: that process, its disk or its network hangs"
            )

    def _idle(self) -> float:
        """Seconds since the main thread's last beat."""
        return self._clock.now - self._beat.clock

    def _hear(self, news: News) -> None:
        """Remember since when each rank has published its record."""
        now = self._clock.now
        for rank, record in news.records.items():
            if record != self._heard[rank].record:
                self._heard[rank] = Heard(record, now)
        if self._store is None and len(self.peers) > 1:
            return
        listens_to_rank0 = self.rank > 0 and 0 in news.records
        self._answered = self._heard[0].since if listens_to_rank0 else now

    def _judge(self) -> str:
        """On rank 0: who is behind, once the main thread has been over its limit for `silence`
        seconds, in which this rank has listened to the others. Otherwise ''."""
        idle_s = self._idle()
        has_listened = idle_s > self._beat.limit_s + self.limits.silence
        is_connected = self._store is not None or len(self.peers) == 1
        if self.rank > 0 or not has_listened or not is_connected:
            return ""
        now = self._clock.now
        self._heard[0] = Heard(Record(self._beat.number, self._beat.at), now)
        silent = []
        for one in self._heard:
            silent.append(now - one.since > self.limits.silence and not one.record.left)
        return to_blame([peer.name for peer in self.peers], self._heard, silent, idle_s)

    # ---- the end

    def _end_process(self, verdict: str) -> None:
        self._end(verdict)
        os._exit(1)

    def _end(self, ours: str) -> str:
        """End the launch with the first verdict: print it, and give the others time to read it.
        Returns it."""
        news = self._ask(ours, hurry=True)
        verdict = ours if news is None else news.verdict
        speaker = 1 if verdict.startswith(self.peers[0].name) else 0
        names_this_rank = self.peers[self.rank].name in verdict or verdict.startswith("all ")
        hangs = threading.current_thread() is self._thread and names_this_rank
        if self.rank == speaker or news is None or hangs:
            os.write(2, f"error: {verdict}\n".encode())
        if hangs:
            faulthandler.dump_traceback(file=2, all_threads=True)
        self._on_failure(verdict)
        if news is not None:
            self._leave(4 * self.limits.interval)
        return verdict

    def _leave(self, within_s: float) -> None:
        """Publish that this rank is leaving. Rank 0, whose process may host the store, stays until
        the others have left or are gone."""
        self._rounds(within_s, lambda news: news.is_last, left=True)

    def _rounds(
        self, within_s: float, is_enough: Callable[[News], bool], *, left: bool = False
    ) -> News | None:
        """Repeat rounds for so long at most, and return the last one; None if the store hangs."""
        end = time.monotonic() + within_s
        while True:
            news = self._ask(left=left, hurry=True)
            if news is None or is_enough(news) or time.monotonic() > end:
                return news
            time.sleep(self.limits.urgent)
