"""
The plan: what a run will take from each bucket, and the step at which a bucket runs dry.

    phase   from step         tokens   web      code     math
    1               0      5,000,000   60.0%    30.0%    10.0%
    2           2,441      5,000,000   10.0%    60.0%    30.0%

    bucket      tokens   requested     trained      usable   passes   cropped %   dry at step
    code     4,120,388   4,500,000   4,083,712   4,083,712     1.00        1.10         4,544

Lengths alone decide what a row holds. So a stream of lengths alone packs exactly the rows of the
run, and a plan follows that stream step by step:

    lengths --> Stream(feed=Rehearsal) --rows of a step--> all lanes have rows, or one halts or drops a bucket

For token files, the halting step and all rehearsed counts are exact. Text has no lengths before it
is tokenized, so lengths are drawn from a few hundred documents, and the plan is called an estimate.
A bucket that cannot run dry, because it has no limit or far more tokens than requested, is not
rehearsed; its cropping is measured on a few thousand rows.

Only runs with a curriculum (others have unlimited epochs), or with `binned` rows (to find entries
that are too long), make a plan. They keep it in RUN/plan.json for a resume. scripts.validate plans
every run except those in Megatron's order, which refuse to start with too few samples.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from tqdm import tqdm

from nanochat.common import check_shape, print0, read_json, table
from nanochat.order import StreamConfig, open_order
from nanochat.rows import Document
from nanochat.run_dir import PLAN_NAME
from nanochat.run_order import stream_config
from nanochat.sources import Source
from nanochat.stream import (
    MUCH_CROPPED,
    Cursor,
    Feed,
    Stream,
    ledger,
    reading_notes,
    refuse_cropping,
    sample_lengths,
    token_share,
)

log = logging.getLogger(__name__)

# this many times the requested tokens suffice, even if half are cropped and lanes' shares differ
FAR = 4
SHARE_DOCUMENTS = 1024  # with at least this many documents, lanes' shares are similar
SAMPLE_ROWS = 4096  # rows packed from a bucket that is not rehearsed
DRY_WAYS = (
    "shorten the run, give the bucket less weight, allow more passes (max_epochs), or continue without it "
    "once it is dry (--allow-bucket-exhaustion)"
)


@dataclass(frozen=True)
class BucketPlan:
    """What a run takes from a bucket, in tokens. It trains on T tokens of each row."""

    documents: int  # in one pass; the stored windows of a text count once
    tokens: int  # in one pass, without BOS and repeated tokens
    max_epochs: int  # maximum number of passes; 0 = unlimited
    asked: int  # tokens that the mix requests
    trained: int  # tokens that the run receives
    usable: int | None  # tokens available until the first lane is dry; None: more than requested
    dry_step: int | None  # the step at which the first lane is dry
    # as in nanochat.stream.ledger: of the run's rows if `exact`, else of a sample
    account: dict[str, int]
    exact: bool

    @property
    def passes(self) -> float:
        """Passes over the bucket by the last step.

        Tokens that leave the buffers, including cropped ones, divided by `tokens`. Only ratios of
        the account are used, so a sample will do.
        """
        account = self.account
        if not account["rows"]:
            return 0.0
        T = (account["emitted"] + account["padded"]) // account["rows"] - 1
        left = (account["emitted"] + account["cropped"]) / account["rows"] * self.trained / T
        return left * account["read"] / max(1, self._entered) / max(1, self.tokens)

    @property
    def cropped(self) -> float:
        """Cropped share of the tokens that left the buffers (`nanochat.stream.token_share`)."""
        return token_share(self.account, "cropped")

    @property
    def repeated(self) -> float:
        """The repeated share of the tokens that entered the buffers.

        Repeated: the overlap of split documents, or of stored windows.
        """
        return self.account["repeated"] / max(1, self._entered)

    @property
    def _entered(self) -> int:
        return self.account["read"] + self.account["bos"] + self.account["repeated"]


@dataclass(frozen=True)
class Plan:
    """What a run will do, in JSON values."""

    estimate: bool  # whether lengths are drawn from a sample
    T: int
    V: int
    rows_per_step: int
    num_steps: int  # requested
    steps: int  # possible
    halt: str  # the reason if the run halts before `num_steps`; otherwise empty
    allowed: bool  # whether lanes may drop dry buckets
    crops: bool  # whether --long-docs=crop is in effect
    phases: list[dict[str, Any]]  # {"first_step", "tokens", "asked": {bucket: tokens}}
    buckets: dict[str, BucketPlan]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Plan":
        """The inverse of `to_json`."""
        buckets = {name: BucketPlan(**bucket) for name, bucket in value["buckets"].items()}
        return cls(**{**value, "buckets": buckets})


def read_plan(path: Path) -> Plan:
    """The plan in a file. FileNotFoundError if it does not exist, ValueError if it is corrupt."""
    phase = {"first_step": int, "tokens": int, "asked": dict}
    value = read_json(path, get_type_hints(Plan) | {"phases": [phase], "buckets": dict})
    # the fields that a plan uses
    account = ("read", "bos", "emitted", "cropped", "repeated", "padded", "rows")
    bucket = get_type_hints(BucketPlan) | {"account": dict.fromkeys(account, int)}
    check_shape(value["buckets"], dict.fromkeys(value["buckets"], bucket), f"{path}: buckets")
    try:
        return Plan.from_json(value)
    except TypeError as e:
        raise ValueError(f"{path}: written by another version ({e})") from None


# ---- lengths in place of tokens ------------------------------------------------------------------


class Lengths:
    """A source's documents as lengths.

    For text, lengths are drawn from a sample: 64 documents from each of up to 8 groups. `plenty`:
    whether the bucket has far more tokens than requested.
    """

    def __init__(self, source: Source, config: StreamConfig):
        self.source = source
        self.plenty = False
        self.entries = int(source.groups.sum())
        self.groups = source.groups
        self.means = source.means
        self.small = source.small
        self.fingerprint, self.locate = source.fingerprint, source.locate
        # targets that are off make no difference to lengths
        self.without: dict[int, np.ndarray] = {}
        self.sample = None if source.lengths_known else sample_lengths(source)
        self.documents, self.tokens, self.rows = self._totals(config)

    def read(self, group: int, rows: np.ndarray, keep: int = 0) -> list[Any]:
        """Like `Source.read`, with ranges in place of ids."""
        if self.sample is None:
            lengths, contexts = self.source.lengths(group, rows)
        else:
            drawn = (rows * 7919 + group * 104729) % len(self.sample)
            lengths, contexts = self.sample[drawn].tolist(), [0] * len(rows)
        return [Document(range(length), context) for length, context in zip(lengths, contexts)]  # type: ignore[arg-type]

    def _totals(self, config: StreamConfig) -> tuple[int, int, float]:
        """(documents, their tokens, estimated rows) of one pass, as in `BucketPlan`."""
        crop = config.layout == "bestfit" and config.long_docs == "crop"
        documents = 0
        tokens = 0
        rows = 0.0
        if self.sample is not None:
            used = np.minimum(self.sample, config.T + 1) if crop else self.sample
            share = float(used.mean()) / (config.T + 1) if config.pack else 1.0
            mean = float(self.sample.mean()) - config.framed
            return self.entries, round(self.entries * mean), self.entries * share
        for group, n in enumerate(self.groups.tolist()):
            lengths, repeated = self.source.lengths(group, np.arange(n))
            documents += repeated.count(0)
            tokens += sum(lengths) - sum(repeated) - config.framed * n
            used = np.minimum(lengths, config.T + 1) if crop else np.array(lengths)
            rows += float(used.sum()) / (config.T + 1) if config.pack else n
        return documents, tokens, rows


class Rehearsal(Feed):
    """A feed of `Lengths`: it packs rows without tokens.

    A `plenty` bucket is not even packed, because it always has a next row.
    """

    source: Any

    def next_row(self, index: int) -> Any:
        if self.source.plenty:
            self.packer.row += 1
            return True
        self.documents.clear()
        return self.pack()

    def _kept(self, document: Any) -> Any:
        """A range needs no memory."""
        return document

    def _fetch_pending(self, group: int, waiting: Mapping[Any, Any]) -> dict[Any, Any]:
        """Read nothing: the packer knows the lengths of pending documents."""
        return {}


# ---- the plan ------------------------------------------------------------------------------------


def make_plan(
    config: StreamConfig,
    sources: Mapping[str, Source],
    *,
    rows_per_step: int,
    num_steps: int,
    drop_dry: bool = False,
    cursors: Sequence[Cursor] | None = None,
    start_step: int = 0,
) -> Plan:
    """The plan of a run of `num_steps` steps.

    With the `cursors` of all lanes, it covers the steps from `start_step` on. ValueError for
    corrupt files.
    """
    V, n = config.V, rows_per_step // config.V
    lengths = {bucket: Lengths(source, config) for bucket, source in sources.items()}
    fingerprint = next(iter(sources.values())).tokenizer.fingerprint
    stream = Stream(
        config,
        lengths,  # type: ignore[arg-type]
        range(V),
        tokenizer=fingerprint,
        cursors=cursors,
        num_threads=0,
        drop_dry=drop_dry,
        feed=Rehearsal,
    )
    buckets = stream.buckets
    first = stream.rows[0] - start_step * n  # the run's rows of each lane: `first` to `stop` - 1
    stop = first + num_steps * n
    phases = _phases(config, buckets, first, stop, n)
    asked = {b: sum(phase["asked"][b] for phase in phases) for b in buckets}
    whole_run = (stop - first) * V * config.T
    for b in buckets:
        available = config.epochs(b) * lengths[b].rows * config.T
        # with `drop_dry`, all other buckets could be dry
        needed = whole_run if drop_dry else asked[b]
        enough = lengths[b].entries >= SHARE_DOCUMENTS * V and available >= FAR * needed
        lengths[b].plenty = not config.epochs(b) or enough
    rehearsed = not all(lengths[b].plenty for b in buckets)
    steps, halt, state, dry = _follow(
        stream, n, range(start_step if rehearsed else num_steps, num_steps)
    )
    accounts, plans = ledger(stream.cursors(state), config.T), {}
    for b in buckets:
        of, account = lengths[b], accounts[b]
        trained = account["rows"] * config.T if rehearsed else asked[b]
        if of.plenty:
            account = _sample(config, b, of, min(SAMPLE_ROWS, asked[b] // config.T // V))
        usable, dry_step = dry.get(b, (None, None))
        plans[b] = BucketPlan(
            documents=of.documents,
            tokens=of.tokens,
            max_epochs=config.epochs(b),
            asked=asked[b],
            trained=trained,
            usable=usable,
            dry_step=dry_step,
            account=account,
            exact=not of.plenty,
        )
    return Plan(
        estimate=any(lengths[b].sample is not None for b in buckets),
        T=config.T,
        V=V,
        rows_per_step=rows_per_step,
        num_steps=num_steps,
        steps=steps,
        halt=halt,
        allowed=drop_dry,
        crops=config.layout == "bestfit" and config.long_docs == "crop",
        phases=phases,
        buckets=plans,
    )


def _follow(
    stream: Stream, n: int, steps: range
) -> tuple[int, str, list[Any], dict[str, tuple[int, int]]]:
    """Pack the rows of `steps`, n of each lane.

    Returns (the step before which the run halts, the reason or "", the state at that step, {bucket
    that ran dry: (its usable tokens, the step)}).
    """
    dry: dict[str, tuple[int, int]] = {}
    state = stream.state()
    V = stream.config.V
    T = stream.config.T
    for step in tqdm(steps, desc="rehearse", unit="step", delay=2):
        before, halt = dict(stream.dropped), ""
        due = stream.rows[0] + n
        stream.next_rows(n)
        for lane in stream.lanes:
            ran_dry = stream.dropped[lane] - before[lane]
            if stream.rows[lane] < due:
                last = stream.dry_bucket(lane)
                why = (
                    "all buckets of its phase are dry"
                    if last is None
                    else f"bucket {last!r} is dry"
                )
                halt = halt or f"lane {lane} has no row for step {step}: {why}"
                ran_dry |= set() if last is None else {last}
            for bucket in ran_dry:
                usable = stream.feeds[bucket][lane].packer.row * V * T
                usable_before, first = dry.get(bucket, (usable, step))
                dry[bucket] = min(usable_before, usable), first
        if halt:
            return step, halt, state, dry
        state = stream.state()
    return steps.stop, "", state, dry


def _sample(config: StreamConfig, bucket: str, lengths: Lengths, rows: int) -> dict[str, int]:
    """A bucket's account after the first `rows` rows of a lane."""
    feed = Rehearsal(
        config,
        bucket=bucket,
        lane=0,
        source=lengths,  # type: ignore[arg-type]
        order=open_order(
            lengths.groups, lengths.means, small=lengths.small, bucket=bucket, config=config
        ),
        pool=None,
    )
    for _ in range(rows):
        feed.pack()
    return ledger([{"buckets": {bucket: feed.state().to_json()}}], config.T)[bucket]


def _phases(
    config: StreamConfig, buckets: Sequence[str], first: int, stop: int, n: int
) -> list[dict[str, Any]]:
    """Each phase: its first step, its tokens, and the tokens that its mix requests of each bucket.

    Requests are exact to within two rows of each lane. In this run, each lane packs its rows
    `first` to `stop` - 1, n per step.
    """
    mix = config.curriculum
    lengths = mix.phase_rows(config.T, config.V) if mix else [stop]
    shares = [phase.shares() for phase in mix.phases] if mix else [{buckets[0]: 1}]
    edges = np.clip([0, *np.cumsum(lengths[:-1]), max(stop, sum(lengths))], first, stop).tolist()
    phases = []
    for begin, end, share_of in zip(edges, edges[1:], shares):
        tokens, whole = (end - begin) * config.V * config.T, sum(share_of.values())
        phases.append(
            {
                "first_step": (begin - first) // n,
                "tokens": tokens,
                "asked": {bucket: tokens * share_of.get(bucket, 0) // whole for bucket in buckets},
            }
        )
    return phases


# ---- reports -------------------------------------------------------------------------------------


def rehearse(start: Any, data: Any) -> Plan:
    """Make and print the plan of a run that is starting.

    ValueError if an exact plan halts, unless --plan=warn.
    """
    plan = make_run_plan(start, data)
    print0("\n".join(describe(plan)))
    why = problem(plan) or refusal(plan, start)
    if why and start.settings.plan == "error":
        raise ValueError(why)
    for line in filter(None, [*warnings(plan), why]):
        log.warning("%s", line)
    return plan


def make_run_plan(start: Any, data: Any) -> Plan:
    """The plan of a `start_run.Start` with its `RunData`.

    A resume that plans the same number of steps uses RUN/plan.json. Writes nothing.
    """
    settings, num_steps = start.settings, start.horizon.num_iterations
    config, drop_dry = stream_config(settings), settings.allow_bucket_exhaustion
    if start.checkpoint is not None:
        try:
            kept = read_plan(start.run_dir / PLAN_NAME)
            if (kept.num_steps, kept.allowed) == (num_steps, drop_dry):
                return kept
        except (FileNotFoundError, ValueError):
            pass  # the plan is made again
    return make_plan(
        config,
        data.train,
        rows_per_step=settings.total_batch_size // config.T,
        num_steps=num_steps,
        drop_dry=drop_dry,
        cursors=start.cursors,
        start_step=start.step,
    )


def problem(plan: Plan) -> str:
    """A sentence that says why the run will not reach its last step.

    Empty if it will, and for an estimate.
    """
    if not plan.halt or plan.estimate:
        return ""
    why = f"the run halts before step {plan.steps:,} of {plan.num_steps:,}: {plan.halt}"
    if plan.allowed:
        return f"{why}; shorten the run, or allow more passes (max_epochs)"
    return f"{why}; {DRY_WAYS}, or train up to that step with --plan warn"


def refusal(plan: Plan, start: Any) -> str:
    """A sentence that says why a new run should not start although it could; empty if it should."""
    if start.config or start.settings.plan != "error" or not plan.crops:
        return ""
    for name, bucket in plan.buckets.items():
        data = "its data" if len(plan.buckets) == 1 else f"bucket {name!r}"
        if why := refuse_cropping(data, bucket.cropped, "about " * plan.estimate):
            return why
    return ""


def warnings(plan: Plan) -> list[str]:
    """Warnings before the start, one sentence each."""
    dry = []
    notes = []
    about = "about " * plan.estimate
    for name, bucket in plan.buckets.items():
        data, cropped = "its data" if len(plan.buckets) == 1 else f"bucket {name!r}", bucket.cropped
        notes += reading_notes(
            data,
            trained=bucket.trained,
            tokens=bucket.tokens,
            about=about,
            passes=0.0 if bucket.max_epochs else bucket.passes,
            cropped=cropped * plan.crops,
            repeated=bucket.repeated,
        )
        if bucket.dry_step is None or bucket.usable is None:
            continue
        probably = "probably " if plan.estimate else ""
        line = (
            f"bucket {name!r} {probably}runs dry at step {bucket.dry_step:,}: the mix requests {bucket.asked:,} "
            f"tokens, and {bucket.usable:,} are usable with {plan.V} lanes"
        )
        if plan.crops and 0.005 < cropped <= MUCH_CROPPED:
            line += f"; {cropped:.1%} are cropped (--long-docs=split would use them)"
        dry.append(f"{line}; fewer --lanes may use more of it")
    if halts_probably(plan):
        dry.append(f"the run would halt at the first such step; {DRY_WAYS}")
    return dry + notes


def halts_probably(plan: Plan) -> bool:
    """Whether the run would halt if the plan, an estimate, were exact."""
    return plan.estimate and bool(plan.halt)


def describe(plan: Plan) -> list[str]:
    """The plan as lines of text."""
    lines = [
        f"plan: {plan.num_steps:,} steps of {plan.rows_per_step * plan.T:,} tokens from "
        f"{plan.V} lanes" + (", estimated from a sample of the text" if plan.estimate else "")
    ]
    tables = []
    if len(plan.phases) > 1 or len(plan.buckets) > 1:
        rows: list[list[Any]] = []
        for number, phase in enumerate(plan.phases, 1):
            shares = [asked / max(1, phase["tokens"]) for asked in phase["asked"].values()]
            rows.append(
                [
                    number,
                    phase["first_step"],
                    phase["tokens"],
                    *(f"{share:.1%}" for share in shares),
                ]
            )
        tables += table(["phase", "from step", "tokens", *plan.buckets], rows)
    rows = []
    for name, bucket in plan.buckets.items():
        padded = bucket.account["padded"] / max(1, bucket.account["rows"] * (plan.T + 1))
        parts = bucket.cropped, bucket.repeated, padded
        limit = f" of {bucket.max_epochs}" if bucket.max_epochs else ""
        rows.append(
            [
                name,
                bucket.documents,
                bucket.tokens,
                bucket.asked,
                bucket.trained,
                bucket.usable,
                f"{bucket.passes:.2f}{limit}",
                *(f"{100 * part:.2f}" for part in parts),
                "exact" if bucket.exact and not plan.estimate else "about",
                bucket.dry_step,
            ]
        )
    tables += table(
        [
            "bucket",
            "documents",
            "tokens",
            "requested",
            "trained",
            "usable",
            "passes",
            "cropped %",
            "repeated %",
            "padded %",
            "figures",
            "dry at step",
        ],
        rows,
    )
    return lines + [f"  {line}" for line in tables]
