"""
The plan: what a run will take from each bucket, and at which step one runs dry, before it starts.

    phase   from step         tokens   web      code     math
    1               0      5,000,000   60.0 %   30.0 %   10.0 %
    2           2,441      5,000,000   30.0 %   30.0 %   40.0 %

    bucket   tokens there       asked     trained      usable   passes   cropped   dry at step
    code        4,120,388   4,500,000   4,083,712   4,083,712     0.99     1.1 %         4,312

Placements come from lengths alone. So a feed of the stream that is given lengths in place of tokens
packs the very same rows, and a plan is each lane followed through the mix, row by row, with such
feeds:

    lane 0, row k --Mixer--> bucket --rehearsed feed--> a row, or dry: the lane halts or drops it
    lane 1 ...               all lanes in a few processes; the first halt of any is the run's

For token files this is what will happen, halting step and accounts included. Text has no lengths
before it is tokenized: they are drawn from a few hundred documents, and what comes of that is
called an estimate. A bucket without limit, or whose totals are far beyond what is asked of it,
cannot run dry. It is not rehearsed; what is told of its cropping is that of some thousand rows.

A plan is made once: it is kept in RUN/plan.json under the fingerprint of all that it depends on,
and a restart reads it.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import numpy as np
from tqdm import tqdm

from nanochat.common import hash_json, print0, read_json
from nanochat.curriculum import Mixer
from nanochat.order import Order, StreamConfig
from nanochat.run_data import stream_config
from nanochat.run_dir import PLAN_NAME
from nanochat.sources import Manifest, Source, open_source
from nanochat.stream import Cursor, Feed, feed_json, ledger

log = logging.getLogger(__name__)

VERSION = 2
FAR = 4  # times what is asked: half may be dropped, and lanes' shares differ
SHARE_DOCUMENTS = 1024  # least documents of a lane's share for shares to be much alike
SAMPLE_ROWS = 4096  # packed of a bucket that is not rehearsed
PARALLEL = 300_000_000  # tokens from which processes pay for their start
DRY_WAYS = ("shorten the run or mix less of it, allow more passes (max_epochs), or go on without "
            "it where it is dry (--allow-bucket-exhaustion)")


@dataclass(frozen=True)
class BucketPlan:
    """What a run takes from a bucket, in tokens. What is trained on is rows * T."""

    documents: int  # in one pass
    tokens: int  # stored, in one pass
    max_epochs: int  # passes allowed, 0 = no limit
    asked: int  # that the mix asks for, had it all
    trained: int  # that the run gets
    usable: int | None  # to be had before the first lane is dry; None: more than is asked
    dry_step: int | None  # at which the first lane is dry
    account: dict[str, int]  # see nanochat.stream.ledger; `exact` or of some rows
    exact: bool

    @property
    def passes(self) -> float:
        """Over the bucket, by the end."""
        return self.trained / max(1, self.tokens)

    def share(self, name: str) -> float:
        """What part of the tokens that left the buffers was cropped or repeated."""
        account = self.account
        return account[name] / max(1, account["emitted"] + account["cropped"])


@dataclass(frozen=True)
class Plan:
    """What a run will do. JSON all through."""

    key: str  # of what it was made for
    estimate: bool  # lengths are those of a sample
    T: int
    V: int
    rows_per_step: int
    num_steps: int  # asked
    steps: int  # that the run will take
    halt: str  # why it takes no more; empty if it does not halt
    allowed: bool  # whether dry buckets are dropped
    crops: bool  # whether --long-docs=split would use more
    phases: list[dict[str, Any]]  # {"first_step", "tokens", "asked": {bucket: tokens}}
    buckets: dict[str, BucketPlan]
    samples: dict[str, Any] | None = None  # of Megatron's order; None for lanes

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Plan":
        """The inverse of `to_json`."""
        buckets = {name: BucketPlan(**bucket) for name, bucket in value["buckets"].items()}
        return cls(**{**value, "buckets": buckets})


# ---- lengths in place of tokens ------------------------------------------------------------------

class SampledLengths:
    """Text as a source of lengths: those of 64 documents from each of up to 8 groups, in turn."""

    def __init__(self, source: Source):
        self.groups, self.fingerprint = source.groups, source.fingerprint
        spread = np.linspace(0, len(self.groups) - 1, min(8, len(self.groups))).astype(int)
        self.sample = np.array([len(ids) for group in spread.tolist() for ids in source.read(
            group, np.arange(min(64, int(self.groups[group]))))[0]])

    def lengths(self, group: int, rows: np.ndarray) -> tuple[list[int], list[int]]:
        """As `Source.lengths`."""
        drawn = self.sample[(rows * 7919 + group * 104729) % len(self.sample)]
        return drawn.tolist(), [0] * len(rows)


class _Vocabulary:
    """What a source asks of a tokenizer where no token is read. It can be sent to a process."""

    def __init__(self, tokenizer: Any):
        self.fingerprint, self.bos = tokenizer.fingerprint, tokenizer.get_bos_token_id()
        self.size = tokenizer.get_vocab_size()

    def get_bos_token_id(self) -> int:
        return self.bos

    def get_vocab_size(self) -> int:
        return self.size


class Rehearsal(Feed):
    """A feed whose documents are their lengths."""

    def _fetch(self, epoch: int, unit: int) -> tuple[int, list[int], list[Any], list[int]]:
        group, rows, _ = self.order.unit(epoch, unit, self.order.share(self.lane, epoch).stop)
        lengths, repeated = self.source.lengths(group, rows)
        return group, rows.tolist(), [range(n) for n in lengths], repeated

    def _kept(self, ids: Any, repeated: int) -> Any:
        """Nothing."""

    def _fetch_again(self, group: int, lengths: Mapping[Any, int]) -> dict[Any, Any]:
        return dict.fromkeys(lengths)


# ---- lanes ---------------------------------------------------------------------------------------

def new_mixer(config: StreamConfig) -> Mixer | None:
    """What says which bucket a row comes from; None without a curriculum."""
    mix = config.curriculum
    return None if mix is None else Mixer(mix, T=config.T, V=config.V, seed=config.seed)


@dataclass
class _Lane:
    """Where a lane is when it halts, or has done what was asked."""

    lane: int
    row: int
    used: dict[str, int]  # rows of each bucket
    dry: list[tuple[int, str]]  # (row, bucket): what ran dry where
    halted: str
    feeds: dict[str, dict[str, Any]]  # of the rehearsed buckets, as in a cursor


@dataclass(frozen=True)
class _Lanes:
    """All that it takes to follow lanes, in this process or in another."""

    config: StreamConfig
    sources: dict[str, Manifest | SampledLengths]
    tokenizer: _Vocabulary
    drop_dry: bool
    cursors: Mapping[int, Cursor]  # by lane; empty at the beginning

    def open(self, bucket: str) -> Any:
        """The bucket's source."""
        source = self.sources[bucket]
        if isinstance(source, SampledLengths):
            return source
        stored = not self.config.framed
        return open_source(source, self.tokenizer, as_stored=stored)  # type: ignore[arg-type]

    def feed(self, bucket: str, lane: int, source: Any) -> Rehearsal:
        """A bucket's feed as it is at the start."""
        order = Order(source.groups, bucket=bucket, config=self.config)
        feed = Rehearsal(self.config, bucket=bucket, lane=lane, source=source, order=order,
                         pool=None)
        begun = self.cursors[lane]["buckets"].get(bucket) if self.cursors else None
        if begun is not None:
            feed.restore(begun)
        return feed

    def follow(self, lanes: Sequence[int], stop: int, rehearsed: Sequence[str]) -> list[_Lane]:
        """Go on to row `stop` of each lane, or to where it halts. Buckets that are not `rehearsed`
        have a row whenever one is due."""
        config = self.config
        sources = {bucket: self.open(bucket) for bucket in rehearsed}
        mixer = new_mixer(config)
        found = []
        for lane in lanes:
            feeds = {bucket: self.feed(bucket, lane, source) for bucket, source in sources.items()}
            cursor = self.cursors.get(lane, {"row": 0, "dropped": [], "buckets": {}})
            row, dropped = cursor["row"], frozenset(cursor["dropped"])
            used = {b: cursor["buckets"].get(b, {"row": 0})["row"] for b in self.sources}
            dry, halted = [], ""
            while row < stop and not halted:
                left = (bucket for bucket in self.sources if bucket not in dropped)
                bucket = mixer.bucket(lane, row, dropped) if mixer else next(left, None)
                if bucket is None:
                    halted = "all buckets of its phase are dry"
                elif bucket not in feeds or feeds[bucket].pack() is not None:
                    used[bucket] += 1
                    row += 1
                else:
                    dry.append((row, bucket))
                    dropped |= {bucket}
                    halted = "" if self.drop_dry else f"bucket {bucket!r} is dry"
            states = {b: {**feed_json(feed.state()), "waiting": []} for b, feed in feeds.items()}
            found.append(_Lane(lane, row, used, dry, halted, states))
        return found

    def follow_all(self, stop: int, rehearsed: Sequence[str], num_workers: int) -> list[_Lane]:
        """`follow` every lane, several processes at work where that is worth it."""
        V = self.config.V
        if num_workers == 1 or not rehearsed or stop * V * self.config.T < PARALLEL:
            return self.follow(range(V), stop, rehearsed)
        parts = [range(V)[i::4 * num_workers] for i in range(min(V, 4 * num_workers))]
        with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
            found = pool.map(partial(self.follow, stop=stop, rehearsed=rehearsed), parts)
            told = tqdm(found, desc="rehearse", total=len(parts), unit="part", delay=2)
            return [lane for part in told for lane in part]

    def account(self, bucket: str, done: Sequence[_Lane], sample_rows: int) -> dict[str, int]:
        """A bucket's account: of all lanes where it is rehearsed, else of the first rows of one."""
        feeds = [end.feeds[bucket] for end in done if bucket in end.feeds]
        if not feeds:
            feed = self.feed(bucket, 0, self.open(bucket))
            for _ in range(sample_rows):
                feed.pack()
            feeds = [feed_json(feed.state())]
        return ledger([{"buckets": {bucket: feed}} for feed in feeds], self.config.T)[bucket]

    def totals(self, bucket: str) -> tuple[int, int, float]:
        """(documents, stored tokens, about how many rows) of one pass over a bucket."""
        config, source, tokens, rows = self.config, self.open(bucket), 0, 0.0
        crop = config.layout == "bestfit" and config.long_docs == "crop"
        for group, n in enumerate(source.groups.tolist()):
            lengths, repeated = map(np.array, source.lengths(group, np.arange(n)))
            tokens += int(lengths.sum() - repeated.sum())
            used = np.minimum(lengths, config.T + 1) if crop else lengths
            rows += float(used.sum()) / (config.T + 1) if config.pack else n
        return int(source.groups.sum()), tokens, rows


# ---- the plan ------------------------------------------------------------------------------------

def plan_key(config: StreamConfig, sources: Mapping[str, Any], *, rows_per_step: int,
             num_steps: int, drop_dry: bool, begun: Any = None) -> str:
    """The fingerprint of all that a plan depends on: the same key, the same plan. `begun`: how the
    run began, where not with the first rows."""
    tokenizer = next(iter(sources.values())).tokenizer.fingerprint
    return hash_json({
        "version": VERSION, "config": config.identity(), "tokenizer": tokenizer, "steps": num_steps,
        "rows": rows_per_step, "drop": drop_dry, "begun": begun,
        "phases": config.curriculum and [p.duration_tokens for p in config.curriculum.phases],
        "data": {name: source.fingerprint for name, source in sorted(sources.items())}})


def make_plan(config: StreamConfig, sources: Mapping[str, Source], *, rows_per_step: int,
              num_steps: int, drop_dry: bool = False, cursors: Sequence[Cursor] | None = None,
              start_step: int = 0, num_workers: int = 1, begun: Any = None) -> Plan:
    """The plan of a run of `num_steps` steps in all. `cursors`: of all lanes, to plan the rest of a
    run that has done `start_step` steps. `begun`: for the key. Raises ValueError for bad files."""
    V, n = config.V, rows_per_step // config.V
    buckets = config.curriculum.buckets if config.curriculum else list(sources)
    given = {b: sources[b].manifest if sources[b].lengths_known else SampledLengths(sources[b])
             for b in buckets}
    lanes = _Lanes(config, given, _Vocabulary(sources[buckets[0]].tokenizer), drop_dry,
                   {cursor["lane"]: cursor for cursor in cursors or ()})
    begin = cursors[0]["row"] if cursors else 0
    first, stop = begin - start_step * n, begin + (num_steps - start_step) * n
    phases = _phases(config, buckets, first, stop, n)
    asked = {b: sum(phase["asked"][b] for phase in phases) for b in buckets}
    most = (stop - first) * V * config.T if drop_dry else 0  # of one bucket, were all others dry
    totals = {b: lanes.totals(b) for b in buckets}
    rehearsed = []
    for b, (documents, _, rows) in totals.items():
        wanted = FAR * max(most, asked[b])
        enough = documents >= SHARE_DOCUMENTS * V and config.epochs(b) * rows * config.T >= wanted
        if config.epochs(b) and not enough:
            rehearsed.append(b)
    ends = lanes.follow_all(stop, rehearsed, num_workers)
    halts = [((end.row - first) // n, end.lane, end.halted) for end in ends if end.halted]
    steps, lane, why = min(halts, default=(num_steps, 0, ""))
    done = lanes.follow_all(first + steps * n, rehearsed, num_workers) if why else ends
    plans = {}
    for bucket in buckets:
        dry = [(row, end.used[bucket]) for end in ends for row, name in end.dry if name == bucket]
        dry_steps = [step for row, _ in dry if (step := (row - first) // n) <= steps]
        plans[bucket] = BucketPlan(
            documents=totals[bucket][0], tokens=totals[bucket][1],
            account=lanes.account(bucket, done, min(SAMPLE_ROWS, asked[bucket] // config.T // V)),
            max_epochs=config.epochs(bucket), asked=asked[bucket],
            trained=sum(end.used[bucket] for end in done) * config.T,
            usable=min(used for _, used in dry) * V * config.T if dry else None,
            dry_step=min(dry_steps, default=None), exact=bucket in rehearsed)
    key = plan_key(config, sources, rows_per_step=rows_per_step, num_steps=num_steps,
                   drop_dry=drop_dry, begun=begun)
    return Plan(key=key, estimate=any(isinstance(s, SampledLengths) for s in given.values()),
                T=config.T, V=V, rows_per_step=rows_per_step, num_steps=num_steps, steps=steps,
                halt=why and f"lane {lane} has no row for step {steps}: {why}", allowed=drop_dry,
                crops=config.layout == "bestfit" and config.long_docs == "crop", phases=phases,
                buckets=plans)


def _phases(config: StreamConfig, buckets: Sequence[str], first: int, stop: int, n: int,
            ) -> list[dict[str, Any]]:
    """Each phase: its first step, its tokens, and how many of each bucket its mix asks for."""
    V, mixer, mix = config.V, new_mixer(config), config.curriculum
    lengths = mix.phase_rows(config.T, V) if mix else [stop]
    edges = np.clip([0, *np.cumsum(lengths[:-1]), max(stop, sum(lengths))], first, stop).tolist()
    found = []
    for begin, end in pairwise(edges):
        tokens, rows = (end - begin) * V * config.T, dict.fromkeys(buckets, 0)
        for lane in range(V):
            counts = mixer.counts(lane, range(begin, end)) if mixer else {buckets[0]: end - begin}
            for bucket, count in counts.items():
                rows[bucket] += count
        found.append({"first_step": (begin - first) // n, "tokens": tokens,
                      "asked": {bucket: count * config.T for bucket, count in rows.items()}})
    return found


# ---- for people ----------------------------------------------------------------------------------

def rehearse(start: Any, data: Any) -> Plan:
    """The plan of a run that is about to start, told to people. ValueError for a run that would
    halt, unless its --plan is to warn."""
    plan = make_run_plan(start, data, keep=True)
    print0("\n".join(describe(plan)))
    why = problem(plan)
    if why and start.settings.plan == "error":
        raise ValueError(why)
    for line in filter(None, [*warnings(plan), why]):
        log.warning("%s", line)
    return plan


def make_run_plan(start: Any, data: Any, *, keep: bool = False,
                  num_workers: int | None = None) -> Plan:
    """The plan of a `start_run.Start` with its `RunData`; with `keep` the one in RUN/plan.json if
    it was made for the same. Writes nothing."""
    settings, config = start.settings, stream_config(start.settings)
    given = {"rows_per_step": settings.total_batch_size // config.T,
             "num_steps": start.horizon.num_iterations}
    if not isinstance(config, StreamConfig):
        from nanochat.blend import plan_samples
        return Plan.from_json(plan_samples(config, data.train, **given, taken=start.samples_taken()))
    origin = settings.init_from if settings.init_data == "continue" else None
    drop_dry, begun = settings.allow_bucket_exhaustion, [origin, settings.skip_steps]
    if keep:
        try:
            kept = read_json(start.run_dir / PLAN_NAME)
            if kept["key"] == plan_key(config, data.train, drop_dry=drop_dry, begun=begun, **given):
                return Plan.from_json(kept)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass  # one that cannot be read costs nothing but time
    return make_plan(config, data.train, drop_dry=drop_dry, begun=begun, cursors=start.cursors,
                     start_step=start.step, num_workers=num_workers or os.cpu_count() or 1, **given)


def problem(plan: Plan) -> str:
    """What keeps the run from its last step, in a sentence; empty where nothing does. An estimate
    never says so."""
    if not plan.halt or plan.estimate:
        return ""
    about = f"the run halts before step {plan.steps:,} of {plan.num_steps:,}: {plan.halt}"
    if plan.allowed:
        return f"{about}; shorten the run, or allow more passes (max_epochs)"
    return f"{about}; {DRY_WAYS}, or train until there with --plan warn"


def warnings(plan: Plan) -> list[str]:
    """What a person should know before starting, a sentence each."""
    found = []
    for name, bucket in plan.buckets.items():
        if bucket.dry_step is None or bucket.usable is None:
            continue
        probably = "probably " if plan.estimate else ""
        line = (f"bucket {name!r} {probably}runs dry at step {bucket.dry_step:,}: {bucket.asked:,} "
                f"tokens are asked of it, {bucket.usable:,} are usable with {plan.V} lanes")
        if plan.crops and bucket.share("cropped") > 0.005:
            line += (f"; {bucket.share('cropped'):.1%} are cropped, which --long-docs=split would "
                     "train on")
        found.append(f"{line}; fewer --lanes may use more of it")
    if plan.estimate and plan.halt:
        found.append(f"the run would halt there; {DRY_WAYS}")
    return found


def describe(plan: Plan) -> list[str]:
    """The plan as lines of text."""
    lines = [f"plan: {plan.num_steps:,} steps of {plan.rows_per_step * plan.T:,} tokens from "
             f"{plan.V} lanes" + (", estimated from a sample of the text" if plan.estimate else "")]
    if plan.samples is not None:
        lines += ["Megatron's order: {taken:,} samples of {T:,} tokens, {there:,} are there over "
                  "{epochs} epochs of the prefixes".format(T=plan.T, **plan.samples)]
    if len(plan.phases) > 1 or len(plan.buckets) > 1:
        rows = [["phase", "from step", "tokens", *plan.buckets]]
        for number, phase in enumerate(plan.phases, 1):
            shares = [phase["asked"][name] / max(1, phase["tokens"]) for name in plan.buckets]
            rows.append([str(number), f"{phase['first_step']:,}", f"{phase['tokens']:,}",
                         *(f"{share:.1%}" for share in shares)])
        lines += _table(rows)
    rows = [["bucket", "documents", "tokens there", "asked", "trained", "usable", "passes",
             "cropped", "repeated", "padded", "dry at step"]]
    for name, bucket in plan.buckets.items():
        guess, about = "~" * plan.estimate, "~" * (plan.estimate or not bucket.exact)
        padded = bucket.account["padded"] / max(1, bucket.account["rows"] * (plan.T + 1))
        limit = f" of {bucket.max_epochs}" if bucket.max_epochs else ""
        enough = "enough" if bucket.max_epochs else "any number"
        rows.append([
            name, f"{bucket.documents:,}", f"{guess}{bucket.tokens:,}", f"{bucket.asked:,}",
            f"{bucket.trained:,}", enough if bucket.usable is None else f"{guess}{bucket.usable:,}",
            f"{guess}{bucket.passes:.2f}{limit}", f"{about}{bucket.share('cropped'):.2%}",
            f"{about}{bucket.share('repeated'):.2%}", f"{about}{padded:.2%}",
            "-" if bucket.dry_step is None else f"{guess}{bucket.dry_step:,}"])
    return lines + _table(rows)


def _table(rows: list[list[str]]) -> list[str]:
    """Columns side by side, the first flush left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  " + "   ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows]
