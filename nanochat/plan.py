"""
The plan: what a run will take from each bucket, and the exact step at which one runs dry, before the first step.

    phases x lanes --Mixer.counts--> rows asked of each feed     totals --> rows that it can certainly give
                                              |                       |
                            asked more than certain?  rehearse the feed: rows that it can give
                                              |
             follow each lane: where its due bucket is dry it halts, or drops the bucket and asks the others more

The bucket of any row is known without history (curriculum.py) and the rows that a feed can give do not depend on
the mix (nanochat/rehearsal.py), so a run of any length is followed from one dry bucket to the next by bisection. Only
feeds that come near their end are packed at all. For shards the plan is exact, halting step and accounts included; for
text it is an estimate.

Accounts (cropped, repeated, ...) need packing even where nothing runs dry. Up to a budget of tokens every feed is
packed; above it only some lanes are and the sums are scaled, which `exact_accounts` says.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from tqdm import tqdm

from nanochat.common import hash_json
from nanochat.curriculum import Mixer
from nanochat.order import Order, StreamConfig
from nanochat.rehearsal import (
    Lengths,
    SampledLengths,
    Task,
    Totals,
    open_rehearsals,
    packed_up,
    share_totals,
    unit_totals,
)
from nanochat.stream import Cursor, Stream, ledger
from nanochat.workers import run_tasks

VERSION = 1
BUDGET = 2_000_000_000  # tokens packed for accounts alone
PARALLEL = 1_000_000_000  # tokens from which processes pay for their start
ENDLESS = 1 << 62  # rows
NO_ROW = "no bucket"  # in counts: rows for which all buckets of their phase are dropped
Feeds = dict[tuple[str, int], int]  # by (bucket, lane)


@dataclass(frozen=True)
class BucketPlan:
    """What a run takes from a bucket. Tokens without BOS and overlap where they are read, rows * T where trained."""

    documents: int  # in one pass
    tokens: int  # in one pass
    max_epochs: int  # passes allowed, 0 = no limit
    asked: int  # tokens that the mix asks for, had it all
    trained: int  # tokens that the run gets
    passes: float  # over the bucket, by the end
    usable: int | None  # tokens to be had before the first lane is dry; None = without end
    usable_exact: bool  # otherwise there are at least so many
    dry_step: int | None  # at which the first lane is dry
    dry_lanes: int  # that are dry by the end
    account: dict[str, int]  # see nanochat.stream.ledger
    other_lanes: dict[str, int] = field(default_factory=dict)  # {number of lanes: about so many usable tokens}


@dataclass(frozen=True)
class Plan:
    """What a run will do. JSON all through."""

    key: str  # of what it was made for
    estimate: bool  # lengths are those of a sample
    exact_accounts: bool
    T: int
    V: int
    rows_per_step: int
    num_steps: int  # asked
    steps: int  # that the run will take
    halt: str  # why it takes no more; empty if it does not halt
    allowed: bool  # whether dry buckets are dropped
    phases: list[dict[str, Any]]  # {"first_step", "tokens", "asked": {bucket: tokens}}
    buckets: dict[str, BucketPlan]
    samples: dict[str, Any] | None = None  # of Megatron's order, see nanochat.sample_plan; None for lanes

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Plan":
        """The inverse of `to_json`."""
        return cls(**{**value, "buckets": {name: BucketPlan(**b) for name, b in value["buckets"].items()}})

    @property
    def short(self) -> list[str]:
        """The buckets of which some lane runs dry, first the one that does so first."""
        dry = [(b.dry_step, name) for name, b in self.buckets.items() if b.dry_step is not None]
        return [name for _, name in sorted(dry)]


def plan_key(config: StreamConfig, sources: Mapping[str, Any], *, rows_per_step: int, num_steps: int, tokenizer: str,
             drop_dry: bool, begun: Any = None) -> str:
    """The fingerprint of all that a plan depends on: the same key, the same plan. `begun`: how the run began, where not
    with the first rows."""
    return hash_json({"version": VERSION, "config": config.identity(), "tokenizer": tokenizer, "steps": num_steps,
                      "rows": rows_per_step, "drop": drop_dry, "begun": begun,
                      "phases": config.curriculum and [p.duration_tokens for p in config.curriculum.phases],
                      "data": {name: source.fingerprint for name, source in sorted(sources.items())}})


# ---- a lane, from one dry bucket to the next ------------------------------------------------------------------------

class _Lanes:
    """Follows lanes through the mix, given how many rows each of their feeds can give."""

    def __init__(self, mixer: Mixer | None, bucket: str, capacity: Feeds, certain: set[tuple[str, int]],
                 drop_dry: bool):
        self.mixer, self.only = mixer, bucket
        self.capacity, self.certain, self.drop_dry = capacity, certain, drop_dry  # certain: it gives no more than that

    def counts(self, lane: int, rows: range, dropped: frozenset[str]) -> dict[str, int]:
        """Rows due of each bucket, and NO_ROW."""
        found = {} if self.only in dropped else {self.only: len(rows)}
        if self.mixer is not None:
            found = self.mixer.counts(lane, rows, dropped)
        return {**found, NO_ROW: len(rows) - sum(found.values())}

    def follow(self, lane: int, start: "_Position", stop: int) -> "_Position":
        """Go on to row `stop`, or to where the lane halts (`halted`), or to where a feed must be rehearsed before
        anyone can say (`unknown`)."""
        row, dropped, used, dry = start.row, start.dropped, dict(start.used), list(start.dry)
        while row < stop:
            due = self.counts(lane, range(row, stop), dropped)
            room = {bucket: self._room(bucket, lane, used) for bucket in due}
            short = [bucket for bucket, n in due.items() if n > room[bucket]]
            unknown = [bucket for bucket in short if bucket != NO_ROW and (bucket, lane) not in self.certain]
            if unknown:
                return _Position(row, dropped, used, dry, unknown=unknown)
            end, bucket = min(((self._first(lane, b, room[b], range(row, stop), dropped), b) for b in short),
                              default=(stop, ""))
            for b, n in self.counts(lane, range(row, end), dropped).items():
                used[b] = used.get(b, 0) + n
            row = end
            if bucket == NO_ROW:
                return _Position(row, dropped, used, dry, halted="all buckets of its phase are dry")
            if bucket:
                dry.append((row, bucket))
                if not self.drop_dry:
                    return _Position(row, dropped, used, dry, halted=f"bucket {bucket!r} is dry")
                dropped |= {bucket}
        return _Position(row, dropped, used, dry)

    def _room(self, bucket: str, lane: int, used: dict[str, int]) -> int:
        return 0 if bucket == NO_ROW else self.capacity[bucket, lane] - used.get(bucket, 0)

    def _first(self, lane: int, bucket: str, room: int, rows: range, dropped: frozenset[str]) -> int:
        """The row that is due of a bucket after `room` others were."""
        return rows[bisect_left(rows, room + 1, key=lambda row: self.counts(
            lane, range(rows.start, row + 1), dropped).get(bucket, 0))]


@dataclass
class _Position:
    """Where a lane is."""

    row: int
    dropped: frozenset[str]
    used: dict[str, int]  # rows of each bucket, from the beginning of the run
    dry: list[tuple[int, str]]  # (row, bucket): what ran dry where
    halted: str = ""
    unknown: Sequence[str] = ()


# ---- the plan -------------------------------------------------------------------------------------------------------

def make_plan(config: StreamConfig, sources: Mapping[str, Any], *, rows_per_step: int, num_steps: int, tokenizer: str,
              drop_dry: bool = False, cursors: Sequence[Cursor] | None = None, start_step: int = 0,
              budget: int | None = BUDGET, num_workers: int = 1, other_lanes: Sequence[int] = (), begun: Any = None
              ) -> Plan:
    """The plan of a run of `num_steps` steps in all.

    `sources`: ShardSource, or SampledLengths for an estimate; `cursors`: of all lanes, to plan the rest of a run that
    has done `start_step` steps; `begun`: for the key; `budget`: tokens that may be packed for accounts alone, None =
    any; `other_lanes`: numbers of lanes whose usable tokens are told besides. Raises ValueError for what the stream
    would refuse.
    """
    n = rows_per_step // config.V
    planner = _Planner(config, sources, Clock(n, cursors[0]["row"] if cursors else 0, start_step), num_steps, tokenizer,
                       drop_dry, cursors, num_workers)
    ends = planner.follow()
    halts = [(planner.clock.step(end.row), lane, end.halted) for lane, end in ends.items() if end.halted]
    steps, lane, why = min(halts, default=(num_steps, 0, ""))
    accounts, exact = planner.accounts(planner.positions(planner.clock.row(steps)), budget)
    phases = planner.phases()
    return Plan(
        key=plan_key(config, sources, rows_per_step=rows_per_step, num_steps=num_steps, tokenizer=tokenizer,
                     drop_dry=drop_dry, begun=begun),
        estimate=any(isinstance(s, SampledLengths) for s in planner.sources.values()), exact_accounts=exact,
        T=config.T, V=config.V, rows_per_step=rows_per_step, num_steps=num_steps, steps=steps,
        halt=why and f"lane {lane} has no row for step {steps}: {why}", allowed=drop_dry, phases=phases,
        buckets={bucket: planner.bucket(bucket, ends, steps, asked=sum(phase["asked"][bucket] for phase in phases),
                                        account=accounts[bucket], other_lanes=other_lanes)
                 for bucket in planner.sources})


@dataclass(frozen=True)
class Clock:
    """Which step a row of a lane belongs to, n rows to a step, from where the run is now."""

    n: int
    first_row: int
    first_step: int

    def step(self, row: int) -> int:
        """The step of a row."""
        return max(0, self.first_step + (row - self.first_row) // self.n)

    def row(self, step: int) -> int:
        """The first row of a step."""
        return self.first_row + (step - self.first_step) * self.n


class _Planner:
    """What the parts of a plan share: feeds as they stand at the start, and how many rows each can give."""

    def __init__(self, config: StreamConfig, sources: Mapping[str, Any], clock: Clock, num_steps: int, tokenizer: str,
                 drop_dry: bool, cursors: Sequence[Cursor] | None, num_workers: int):
        stream = Stream(config, sources, range(config.V), tokenizer=tokenizer, cursors=cursors, num_threads=1)
        # it knows which buckets are mixed, and checks cursors
        stream.close()
        self.config, self.clock, self.stop, self.tokenizer = config, clock, clock.row(num_steps), tokenizer
        self.drop_dry, self.num_workers = drop_dry, num_workers
        self.mixer, self.parked = stream.mixer, dict[int, dict[str, Any]]()
        self.sources: dict[str, Lengths] = {bucket: sources[bucket] for bucket in stream.feeds}
        self.orders = {b: Order(source.groups, bucket=b, config=config) for b, source in self.sources.items()}
        self.totals = {b: unit_totals(source, self.orders[b], config.T) for b, source in self.sources.items()}
        begun = {cursor["lane"]: cursor["buckets"] for cursor in cursors or ()}
        self.states = {(b, lane): begun.get(lane, {}).get(b) for b in self.sources for lane in stream.lanes}
        self.start = {lane: _Position(
            stream.rows[lane], stream.dropped[lane],
            {b: (self.states[b, lane] or {"row": 0})["row"] for b in self.sources}, []) for lane in stream.lanes}
        self.capacity: Feeds = {}
        self.certain: set[tuple[str, int]] = set()  # feeds whose capacity is no lower bound
        for bucket in self.sources:
            self._bound(bucket)

    # -- rows that feeds can give

    def _spans(self, bucket: str, epoch: int) -> list[range]:
        """The units of an epoch that each lane has yet to read."""
        spans = [self.orders[bucket].share(lane, epoch) for lane in self.start]
        for lane, span in enumerate(spans):
            state = self.states[bucket, lane]
            if state is not None and epoch <= state["epoch"]:
                spans[lane] = range(state["unit"] if epoch == state["epoch"] else span.stop, span.stop)
        return spans

    def _bound(self, bucket: str) -> None:
        """Lower bounds of a bucket's feeds, from totals."""
        limit, begun = self.config.epochs(bucket), [start.used[bucket] for start in self.start.values()]
        rows, sums, epoch = np.array(begun), None, 0
        while limit and epoch < limit and rows.min() < self.stop:
            share = share_totals(self.totals[bucket], self.orders[bucket], epoch, self._spans(bucket, epoch))
            sums = share if sums is None else sums + share
            rows, epoch = begun + sums.rows(self.config), epoch + 1
        for lane in self.start:
            self.capacity[bucket, lane] = int(rows[lane]) if limit else ENDLESS
            if limit == epoch and Totals.exact(self.config) and self.states[bucket, lane] is None:
                self.certain.add((bucket, lane))

    def _rehearse(self, tasks: Sequence[Task]) -> dict[tuple[str, int], dict[str, int]]:
        """The accounts of some feeds after their tasks, several processes at work where that is worth it."""
        rows = sum(min(task.rows, self.stop) - (task.state or {"row": 0})["row"] for task in tasks)
        workers = self.num_workers if rows * self.config.T > PARALLEL else 1
        found: dict[tuple[str, int], dict[str, int]] = {}
        packed = packed_up(self.config, self.sources, self.tokenizer)
        with tqdm(total=rows * self.config.T, unit="tok", unit_scale=True, desc="rehearse", delay=2) as bar:
            for event in run_tasks(open_rehearsals, packed, tasks, num_workers=workers):
                if event.kind == "failed":
                    raise ValueError(event.value)
                if event.kind == "done":
                    found[tasks[event.task].bucket, tasks[event.task].lane] = event.value
                else:
                    bar.update(event.value * self.config.T)
        return found

    # -- lanes

    def positions(self, stop: int) -> dict[int, "_Position"]:
        """Where each lane is at row `stop`, or where it halts or must be looked into before."""
        lanes = _Lanes(self.mixer, next(iter(self.sources)), self.capacity, self.certain, self.drop_dry)
        return {lane: lanes.follow(lane, start, stop) for lane, start in self.start.items()}

    def follow(self) -> dict[int, "_Position"]:
        """Where each lane is when it has no more to do. Rehearses feeds that come near their end."""
        while True:
            ends = self.positions(self.stop)
            unknown = [(bucket, lane) for lane, end in ends.items() for bucket in end.unknown]
            if not unknown:
                return ends
            tasks = [Task(bucket, lane, ENDLESS, state=self.states[bucket, lane]) for bucket, lane in unknown]
            self.capacity.update({feed: account["row"] for feed, account in self._rehearse(tasks).items()})
            self.certain |= set(unknown)

    def accounts(self, ends: Mapping[int, "_Position"], budget: int | None) -> tuple[dict[str, dict[str, int]], bool]:
        """(the accounts of each bucket, whether they are exact) with lanes where they are."""
        wanted = [Task(bucket, lane, end.used[bucket], flush=any(bucket == dry for _, dry in end.dry),
                       state=self.states[bucket, lane]) for lane, end in ends.items() for bucket in self.sources]
        rows = sum(task.rows - (task.state or {"row": 0})["row"] for task in wanted)
        share = 1.0 if budget is None else min(1.0, budget / max(1, rows * self.config.T))
        lanes = set(np.linspace(0, self.config.V - 1, max(1, int(self.config.V * share))).astype(int).tolist())
        part = min(1.0, share * self.config.V / len(lanes))  # of each of these lanes
        tasks = wanted if share == 1 else [replace(task, rows=int(task.rows * part), flush=False) for task in wanted
                                           if task.lane in lanes]
        done = self._rehearse(tasks)
        accounts = {}
        for bucket in self.sources:
            mine = [{"buckets": {bucket: done[feed]}} for feed in done if feed[0] == bucket]
            account = ledger(mine, self.config.T)[bucket]
            if share < 1:
                scale = sum(t.rows for t in wanted if t.bucket == bucket) / max(1, account["rows"])
                account = {name: value if name == "epochs" else round(value * scale) for name, value in account.items()}
            accounts[bucket] = account
        return accounts, share == 1

    # -- what people ask

    def phases(self) -> list[dict[str, Any]]:
        """Each phase with the tokens that its mix asks for."""
        curriculum, T, V = self.config.curriculum, self.config.T, self.config.V
        lengths = [self.stop] if curriculum is None else curriculum.phase_rows(T, V)
        edges = [0, *np.cumsum(lengths[:-1]).tolist(), self.stop]
        lanes = _Lanes(self.mixer, next(iter(self.sources)), {}, set(), False)
        found = []
        for first, end in pairwise(edges):
            rows = range(min(first, self.stop), min(end, self.stop))
            counts = [lanes.counts(lane, rows, frozenset()) for lane in range(V)]
            found.append({"first_step": self.clock.step(first), "tokens": len(rows) * V * T,
                          "asked": {b: T * sum(count.get(b, 0) for count in counts) for b in self.sources}})
        return found

    def bucket(self, bucket: str, ends: Mapping[int, "_Position"], steps: int, *, asked: int, account: dict[str, int],
               other_lanes: Sequence[int]) -> BucketPlan:
        """What there is to say of one bucket."""
        T, V, totals = self.config.T, self.config.V, self.totals[bucket]
        one_pass = int((totals.tokens - totals.repeated - totals.entries * self.config.framed).sum())
        dry = [step for end in ends.values() for row, name in end.dry
               if name == bucket and (step := self.clock.step(row)) <= steps]
        least, lane = min((self.capacity[bucket, lane], lane) for lane in self.start)
        usable = None if least == ENDLESS else least * V * T
        return BucketPlan(
            documents=int(totals.entries.sum()), tokens=one_pass, max_epochs=self.config.epochs(bucket), asked=asked,
            trained=account["rows"] * T, passes=account["read"] / max(1, one_pass), usable=usable,
            usable_exact=(bucket, lane) in self.certain, dry_step=min(dry, default=None), dry_lanes=len(dry),
            account=account, other_lanes={} if usable is None else {
                str(V2): round(usable * self._evenness(bucket, V2) / self._evenness(bucket, V)) for V2 in other_lanes})

    def _evenness(self, bucket: str, V: int) -> float:
        """The tokens of the smallest of V shares, times V."""
        config = replace(self.config, V=V)
        order = Order(self.sources[bucket].groups, bucket=bucket, config=config)
        totals = self.totals[bucket] if V == self.config.V else unit_totals(self.sources[bucket], order, config.T)
        epochs = [share_totals(totals, order, epoch, [order.share(lane, epoch) for lane in range(V)])
                  for epoch in range(min(self.config.epochs(bucket), 8))]
        return V * float(np.sum([share.tokens for share in epochs], axis=0).min())
