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

For token files, and for up to about 32 MB of local text, the halting step and all rehearsed counts are
exact. More text would take long to tokenize, so its lengths are drawn from a few hundred documents,
scaled by the sizes of its files, and the plan is called an estimate.

A bucket that cannot run dry, because it has no limit or far more tokens than requested, is not
rehearsed; its cropping is measured on a few thousand rows, of as many lanes as that needs.

Only runs with a curriculum (others have unlimited epochs), or with `binned` rows (to find entries
that are too long), make a plan. They keep it in RUN/plan.json for a resume. scripts.validate plans
every run except those in an order of samples, which refuse to start if there are too few samples.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict, get_type_hints

import numpy as np
from tqdm import tqdm

from nanochat.common import check_shape, check_stop, is_remote, read_json
from nanochat.config import Settings
from nanochat.curriculum import Mixer
from nanochat.order import StreamConfig, open_order
from nanochat.packing import Piece
from nanochat.rows import Document
from nanochat.run_dir import PLAN_NAME, Fork, cursor_files, read_cursors
from nanochat.run_order import stream_config
from nanochat.schedule import Horizon
from nanochat.sources import RunData, Source
from nanochat.stream import (
    Cursor,
    DocumentKey,
    Feed,
    LaneState,
    Stream,
    ledger,
    token_share,
)
from nanochat.text import text_tokens

# this many times the requested tokens suffice, even if half are cropped and lanes' shares differ
FAR = 4
SHARE_DOCUMENTS = 1024  # with at least this many documents, lanes' shares are similar
LITTLE_READ = 0.5  # a lane that is through its share after a smaller share of the bucket has too few documents
SAMPLE_ROWS = 4096  # at most, the rows packed from a bucket that is not rehearsed
# of data with more tokens, only a sample is measured before the first step. An index of token files may not
# show where documents end, and then all ids are read (0.1 s for 100,000 documents of 1,000 ids; 0.5 s for 1 M
# of 100). Text is tokenized (0.4 s for 6.6 M tokens)
WHOLE_TOKENS = 100_000_000
WHOLE_TEXT_TOKENS = 8_000_000
SAMPLE_DOCUMENTS = 64  # documents sampled from a group to estimate its lengths
AT_ONCE_TOKENS = 1 << 20  # tokens of documents that are read at once
ALIKE = 0.05  # groups whose means differ by at most this share are estimated together


@dataclass(frozen=True)
class BucketPlan:
    """What a run takes from a bucket, in tokens. It trains on T tokens of each row."""

    documents: int  # in one pass; the stored windows of a text count once
    tokens: int  # in one pass, without BOS and repeated tokens
    max_epochs: int  # maximum number of passes; 0 = unlimited
    asked: int  # tokens that the mix requests
    trained: int  # tokens that the run receives
    usable: int | None  # tokens in rows until the first lane is dry; None: more than requested
    dry_step: int | None  # the step at which the first lane is dry
    # as in nanochat.stream.ledger: of the run's rows if `exact`, else of a sample
    account: dict[str, int]
    exact: bool
    windows: bool = False  # whether documents bring repeated tokens with them, as stored windows do

    @property
    def passes(self) -> float:
        """Passes over the bucket by the last step.

        Tokens that leave the buffers, including cropped ones, divided by `tokens`. Only ratios of
        the account are used, so a sample will do.
        """
        account = self.account
        num_rows = account["rows"]
        if not num_rows:
            return 0.0
        T = (account["emitted"] + account["padded"]) // num_rows - 1
        # of the tokens that came with documents, a part is BOS, or the overlap of stored windows
        came = self._departed - self._put_into_rows
        added = account["bos"] + account["repeated"] - self._put_into_rows
        new = came * (1 - added / max(1, account["read"] + added))
        return new / num_rows * self.trained / T / max(1, self.tokens)

    @property
    def cropped(self) -> float:
        """Cropped share of the tokens that left the buffers (`nanochat.stream.token_share`)."""
        return token_share(self.account, "cropped")

    @property
    def repeated(self) -> float:
        """The repeated share of the tokens that left the buffers, most of them into rows.

        Repeated: the overlap of split documents, of stored windows, or of the rows of `concat`.
        """
        account = self.account
        if self._put_into_rows:
            return account["repeated"] / max(1, self._departed)
        # stored windows bring their overlap with them, so a part of it is still pending
        return account["repeated"] / max(1, account["read"] + account["bos"] + account["repeated"])

    @property
    def _departed(self) -> int:
        """Tokens that left the buffers."""
        return self.account["emitted"] + self.account["cropped"]

    @property
    def _put_into_rows(self) -> int:
        """BOS and repeated tokens that did not come with documents: the packer put them into rows.

        A whole document has one BOS, so further ones are those of the tails of split documents.
        """
        num_tails = max(0, self.account["bos"] - self.account["documents"])
        if self.windows and not num_tails:
            return 0
        return num_tails + self.account["repeated"]


class PhasePlan(TypedDict):
    """What a phase of the curriculum takes."""

    first_step: int
    tokens: int
    asked: dict[str, int]  # {bucket: tokens that the mix requests}


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
    phases: list[PhasePlan]
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
    account = ("read", "bos", "emitted", "cropped", "repeated", "padded", "rows", "documents")
    bucket = get_type_hints(BucketPlan) | {"account": dict.fromkeys(account, int)}
    check_shape(value["buckets"], dict.fromkeys(value["buckets"], bucket), f"{path}: buckets")
    if not (value["phases"] and value["buckets"]):
        raise ValueError(f"{path}: a plan has a phase and a bucket, but this one has none")
    for planned in value["phases"]:
        check_shape(planned["asked"], dict.fromkeys(value["buckets"], int), f"{path}: asked")
    try:
        return Plan.from_json(value)
    except TypeError as e:
        raise ValueError(f"{path}: written by another version ({e})") from None


# ---- lengths in place of tokens ------------------------------------------------------------------


class Sample:
    """Lengths of documents, BOS included: those of the first documents in each of up to 8 groups
    spread over a source. They are scaled by the sizes of files, which a manifest counts as expected
    tokens: the sample tells how many tokens come for an expected one. So the totals do not depend on
    a few long documents that the sample has, or lacks. Of files on this machine that are not large,
    it has all lengths.

        file         40,000 documents of 500 expected tokens on average
        sample       64 of its documents: 28,000 expected tokens, and 24,500 tokens
        estimate     each of them is a document of its length x 500 / (28,000 / 64)

    lengths, repeated, weights    (n,) of each length: how many of its first tokens another document
                                  holds, too, and how many of the source's documents it stands for
    is_whole                      whether it has all lengths, so that its totals are exact
    """

    def __init__(self, source: Source):
        self.means = source.means  # expected tokens
        self.of_group: dict[int, np.ndarray] = {}
        num_tokens = int((source.groups * source.means).sum())
        limit = WHOLE_TOKENS if source.lengths_known else WHOLE_TEXT_TOKENS
        self.is_whole = num_tokens <= limit and not any(map(is_remote, source.paths))
        if self.is_whole:
            self._measure_all(source)
        else:
            self._draw_sample(source)

    def _measure_all(self, source: Source) -> None:
        """Find the lengths of all documents."""
        repeated = []
        for group, num_documents in enumerate(source.groups.tolist()):
            if source.lengths_known:
                lengths, contexts = source.lengths(group, np.arange(num_documents))
            else:
                documents = _documents(source, group, num_documents)
                lengths = [len(document.ids) for document in documents]
                contexts = [0] * num_documents
            self.of_group[group] = np.array(lengths, np.int64)
            repeated.append(np.array(contexts, np.int64))
        self.lengths = np.concatenate([*self.of_group.values()])
        self.repeated = np.concatenate(repeated)
        self.weights = np.ones(len(self.lengths))

    def _draw_sample(self, source: Source) -> None:
        """Read some documents, and let them stand for all."""
        lengths: list[np.ndarray] = []
        repeated: list[np.ndarray] = []
        weights: list[np.ndarray] = []

        def add(some: np.ndarray, contexts: np.ndarray, num_documents: int) -> None:
            lengths.append(some)
            repeated.append(contexts)
            weights.append(np.full(len(some), num_documents / len(some)))

        groups = np.flatnonzero(source.groups)
        chosen = np.linspace(0, len(groups) - 1, min(8, len(groups))).astype(int)
        read = [_sample_group(source, group) for group in groups[chosen].tolist()]
        for group, documents in zip(groups[chosen].tolist(), read):
            num_documents = int(source.groups[group])
            scale = 1.0
            if len(documents.lengths) < num_documents:
                scale = self.means[group] / documents.expected
            self.of_group[group] = _scaled(documents.lengths, scale)
            add(self.of_group[group], np.rint(documents.repeated * scale), num_documents)

        # the documents of all these groups also stand for those of the others
        self.ratios = np.concatenate([d.lengths / d.expected for d in read])
        contexts = np.concatenate([d.repeated / d.expected for d in read])
        others = np.delete(groups, chosen)
        alike = np.rint(np.log(self.means[others]) / ALIKE)
        for level in np.unique(alike):
            of_level = others[alike == level]
            counts = source.groups[of_level]
            mean = np.average(self.means[of_level], weights=counts)
            add(_scaled(self.ratios, mean), np.rint(contexts * mean), int(counts.sum()))
        self.lengths = np.concatenate(lengths)
        self.repeated = np.concatenate(repeated)
        self.weights = np.concatenate(weights)

    def draw(self, group: int, numbers: np.ndarray) -> list[int]:
        """A length for each of some documents of a group, the same at each call."""
        lengths = self.of_group.get(group)
        num_known = 0
        if lengths is None:
            lengths = _scaled(self.ratios, self.means[group])
        else:
            num_known = len(lengths)
        # any document of the sample stands for one that is not in it
        drawn = (numbers * 7919 + group * 104729) % len(lengths)
        return lengths[np.where(numbers < num_known, numbers, drawn)].tolist()

    def total(self, values: np.ndarray) -> float:
        """The sum of a value over all documents of the source, from (n,) values; an estimate unless
        the sample is whole."""
        return float((self.weights * values).sum())


def _scaled(lengths: np.ndarray, scale: float) -> np.ndarray:
    """(n,) int64: lengths times `scale`, at least 1."""
    return np.maximum(1, np.rint(lengths * scale)).astype(np.int64)


def _documents(source: Source, group: int, num_documents: int) -> Iterator[Document]:
    """The first documents of a group. Not all of them at once: books would fill the memory."""
    at_once = max(1, AT_ONCE_TOKENS // int(source.means[group]))
    for first in range(0, num_documents, at_once):
        yield from source.read(group, np.arange(first, min(first + at_once, num_documents)))


class Sampled(NamedTuple):
    """The first documents of a group."""

    lengths: np.ndarray  # (n,) tokens, with BOS
    repeated: np.ndarray  # (n,) how many of the first ones another document holds, too
    expected: float  # the mean number of tokens that a manifest expects of documents of their sizes


def _sample_group(source: Source, group: int) -> Sampled:
    """Measure up to SAMPLE_DOCUMENTS documents."""
    is_text = source.is_sized_by_text(group)
    lengths: list[int] = []
    repeated: list[int] = []
    expected: list[int] = []
    for document in _documents(source, group, min(SAMPLE_DOCUMENTS, int(source.groups[group]))):
        lengths.append(len(document.ids))
        repeated.append(document.context)
        if is_text:
            text = source.tokenizer.decode(document.ids[1:].tolist())
            expected.append(text_tokens(len(text.encode()), 1))
        else:  # the manifest knows tokens
            expected.append(len(document.ids))
    return Sampled(np.array(lengths), np.array(repeated), float(np.mean(expected)))


class Lengths:
    """A source's documents as lengths.

    For much text, lengths are drawn from a sample, and for token files, too, if `sample` is given.
    `plenty`: whether the bucket has far more tokens than requested.
    """

    def __init__(self, source: Source, config: StreamConfig, sample: Sample | None = None):
        self.source = source
        self.plenty = False
        self.entries = int(source.groups.sum())
        self.groups = source.groups
        self.means = source.means
        self.small = source.small
        self.joined = source.joined
        self.fingerprint = source.fingerprint
        self.locate = source.locate
        # targets that are off make no difference to lengths
        self.without: dict[int, np.ndarray] = {}
        self.sample = sample
        if sample is None and not source.lengths_known:
            self.sample = Sample(source)
        self.is_estimate = self.sample is not None and not self.sample.is_whole
        self.windows = False  # whether some documents repeat tokens of others
        self.documents, self.tokens, self.num_rows = self._totals(config)

    def read(self, group: int, numbers: np.ndarray, keep: int = 0) -> list[Document]:
        """Like `Source.read`, with ranges in place of ids."""
        if self.sample is None:
            lengths, contexts = self.source.lengths(group, numbers)
        else:
            lengths = self.sample.draw(group, numbers)
            contexts = [0] * len(numbers)
        documents = []
        for length, context in zip(lengths, contexts):
            documents.append(Document(range(length), context))  # type: ignore[arg-type]
        return documents

    def _totals(self, config: StreamConfig) -> tuple[int, int, float]:
        """(documents, their tokens, estimated rows) of one pass, as in `BucketPlan`."""

        def rows_of(lengths: np.ndarray) -> np.ndarray:
            """(n,): the rows that documents of these lengths fill."""
            if not config.pack:
                return np.ones(len(lengths))
            used = np.minimum(lengths, config.T + 1) if crops(config) else lengths
            return used / (config.T + 1)

        num_bos = 1 if config.framed else 0
        if (sample := self.sample) is not None:
            tokens = sample.total(sample.lengths - num_bos)
            return self.entries, round(tokens), sample.total(rows_of(sample.lengths))

        documents = 0
        tokens = 0
        num_rows = 0.0
        for group, n in enumerate(self.groups.tolist()):
            lengths, repeated = self.source.lengths(group, np.arange(n))
            documents += repeated.count(0)
            self.windows |= any(repeated)
            tokens += sum(lengths) - sum(repeated) - num_bos * n
            num_rows += float(rows_of(np.array(lengths)).sum())
        return documents, tokens, num_rows


class Rehearsal(Feed):
    """A feed of `Lengths`: it packs rows without tokens.

    A `plenty` bucket is not even packed, because it always has a next row.
    """

    source: Lengths  # type: ignore[assignment]

    def next_row(self, index: int) -> Any:
        """Not None, unless the bucket is dry."""
        if self.source.plenty:
            self.packer.num_rows += 1
            return True
        self.documents.clear()
        return self.pack()

    def _kept(self, document: Document) -> Document:
        """A range needs no memory."""
        return document

    def _fetch_pending(
        self, group: int, waiting: dict[DocumentKey, Piece]
    ) -> dict[DocumentKey, Document]:
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
    first_step: int = 0,
    begin: Sequence[Cursor] = (),
    lengths: Mapping[str, Lengths] | None = None,
) -> Plan:
    """The plan of a run of `num_steps` steps. `lengths`: those of the sources, if they are known.

    With the `cursors` of all lanes, it covers the steps from `start_step` on. A fork takes the
    steps from `first_step` on, and continues the cursors `begin`; what its parent took is not
    counted. ValueError for corrupt files.
    """
    n = rows_per_step // config.V
    if lengths is None:
        lengths = lengths_of(config, sources)
    stream = _open_rehearsal(config, sources, lengths, cursors, drop_dry)
    lengths = {bucket: lengths[bucket] for bucket in stream.buckets}
    buckets = [*lengths]

    # what the mix requests; the run takes rows `first` to `stop` - 1 of each lane
    first = stream.num_rows[0] - (start_step - first_step) * n
    stop = first + (num_steps - first_step) * n
    phases = _phases(config, buckets, first, stop, n)
    for phase in phases:
        phase["first_step"] += first_step
    asked = {bucket: sum(phase["asked"][bucket] for phase in phases) for bucket in buckets}

    # pack the rows of all steps, unless no bucket can run dry
    whole_run = (stop - first) * config.V * config.T
    for bucket, of_bucket in lengths.items():
        # with `drop_dry`, all other buckets could be dry
        needed = whole_run if drop_dry else asked[bucket]
        passes = _passes_done(stream, bucket) if begin else 0.0
        of_bucket.plenty = has_plenty(config, bucket, of_bucket, needed, passes)
    all_plenty = all(of_bucket.plenty for of_bucket in lengths.values())
    steps = range(num_steps if all_plenty else start_step, num_steps)
    rehearsed = _rehearse_steps(stream, n, steps, _rows_of_parent(begin))
    accounts: dict[str, dict[str, int]] = {}
    if not all_plenty:
        accounts = _accounts_since(begin, stream.cursors(rehearsed.state), config.T)

    plans = {}
    for bucket, of_bucket in lengths.items():
        account = accounts.get(bucket)
        plans[bucket] = _bucket_plan(
            config, bucket, of_bucket, asked[bucket], account, rehearsed, begin
        )
    return Plan(
        estimate=any(of_bucket.is_estimate for of_bucket in lengths.values()),
        T=config.T,
        V=config.V,
        rows_per_step=rows_per_step,
        num_steps=num_steps,
        steps=rehearsed.steps,
        halt=rehearsed.halt,
        allowed=drop_dry,
        crops=crops(config),
        phases=phases,
        buckets=plans,
    )


def lengths_of(config: StreamConfig, sources: Mapping[str, Source]) -> dict[str, Lengths]:
    """The documents of each bucket as lengths, which are the same for any number of lanes."""
    return {bucket: Lengths(source, config) for bucket, source in sources.items()}


def _open_rehearsal(
    config: StreamConfig,
    sources: Mapping[str, Source],
    lengths: Mapping[str, Lengths],
    cursors: Sequence[Cursor] | None,
    drop_dry: bool,
) -> Stream:
    """A stream of lengths in all lanes."""
    fingerprint = next(iter(sources.values())).tokenizer.fingerprint
    return Stream(
        config,
        lengths,  # type: ignore[arg-type]
        range(config.V),
        tokenizer=fingerprint,
        cursors=cursors,
        num_threads=0,
        drop_dry=drop_dry,
        feed=Rehearsal,
    )


def crops(config: StreamConfig) -> bool:
    """Whether the end of a document that is longer than a row is dropped."""
    return config.layout == "bestfit" and config.long_docs == "crop"


def _passes_done(stream: Stream, bucket: str) -> float:
    """The passes over a bucket that the lane furthest ahead has done."""
    done = []
    for feed in stream.feeds[bucket].values():
        share = max(1, len(feed.share))
        done.append(feed.epoch + (feed.place - feed.share.start) / share)
    return max(done)


def _rows_of_parent(begin: Sequence[Cursor]) -> Counter[str]:
    """{bucket: number of rows that a fork's parent took of it}; see `make_plan`."""
    rows = Counter[str]()
    for cursor in begin:
        for bucket, feed in cursor["buckets"].items():
            rows[bucket] += feed["row"]
    return rows


def _accounts_since(
    begin: Sequence[Cursor], end: Sequence[Cursor], T: int
) -> dict[str, dict[str, int]]:
    """The ledger of what was added from `begin` on. Epochs and pending tokens are those at the end."""
    before = ledger(begin, T)
    accounts = {}
    for bucket, total in ledger(end, T).items():
        earlier = before.get(bucket, {})
        account = {name: count - earlier.get(name, 0) for name, count in total.items()}
        account |= {name: total[name] for name in ("epochs", "pending")}
        accounts[bucket] = account
    return accounts


def has_plenty(
    config: StreamConfig, bucket: str, lengths: Lengths, needed: int, passes: float = 0.0
) -> bool:
    """Whether a bucket cannot run dry when a run takes `needed` tokens of it. `passes`: of its
    parent over the bucket."""
    max_epochs = config.epochs(bucket)
    if max_epochs == 0:
        return True
    available = (max_epochs - passes) * lengths.num_rows * config.T
    shares_are_similar = lengths.entries >= SHARE_DOCUMENTS * config.V
    return shares_are_similar and available >= FAR * needed


class Rehearsed(NamedTuple):
    """What happened while the rows of a run were packed."""

    steps: int  # the step before which the run halts, or its last one
    halt: str  # the reason, "" if it does not halt
    state: list[LaneState]  # of the stream at that step
    usable: dict[str, int]  # {bucket that ran dry: tokens in rows of all lanes until then}
    dry_step: dict[str, int]  # {bucket that ran dry: the step at which the first lane was dry}


def _rehearse_steps(
    stream: Stream, n: int, steps: range, rows_before: Mapping[str, int]
) -> Rehearsed:
    """Pack the rows of `steps`, n of each lane, until the run would halt. `rows_before`: the rows
    of each bucket that the run itself did not take."""
    usable: dict[str, int] = {}
    dry_step: dict[str, int] = {}
    state = stream.state()
    for step in tqdm(steps, desc="rehearse", unit="step", delay=2):
        check_stop()
        before = dict(stream.dropped)
        due = stream.num_rows[0] + n
        stream.next_rows(n)
        halt = ""
        for lane in stream.lanes:
            # the buckets that the lane has dropped, and the one that it may not drop
            ran_dry = set(stream.dropped[lane] - before[lane])
            if stream.num_rows[lane] < due:
                last = stream.dry_bucket(lane)
                why = "all buckets of its phase are dry"
                if last is not None:
                    why = f"bucket {last!r} is dry"
                    ran_dry.add(last)
                halt = halt or f"lane {lane} has no row for step {step}: {why}"
            for bucket in ran_dry - dry_step.keys():
                dry_step[bucket] = step
                feeds = stream.feeds[bucket].values()
                num_rows = sum(feed.packer.num_rows for feed in feeds)
                usable[bucket] = (num_rows - rows_before.get(bucket, 0)) * stream.config.T
        if halt:
            return Rehearsed(step, halt, state, usable, dry_step)
        state = stream.state()
    return Rehearsed(steps.stop, "", state, usable, dry_step)


def _bucket_plan(
    config: StreamConfig,
    bucket: str,
    lengths: Lengths,
    asked: int,
    account: dict[str, int] | None,
    rehearsed: Rehearsed,
    begin: Sequence[Cursor],
) -> BucketPlan:
    """What a run takes from a bucket; `account`: None if no row was rehearsed."""
    trained = asked if account is None else account["rows"] * config.T
    exact = account is not None and not lengths.plenty
    if account is None or not exact:
        account = sample_rows(config, bucket, lengths, asked, begin)
    return BucketPlan(
        documents=lengths.documents,
        tokens=lengths.tokens,
        max_epochs=config.epochs(bucket),
        asked=asked,
        trained=trained,
        usable=rehearsed.usable.get(bucket),
        dry_step=rehearsed.dry_step.get(bucket),
        account=account,
        exact=exact,
        windows=lengths.windows,
    )


def sample_rows(
    config: StreamConfig,
    bucket: str,
    lengths: Lengths,
    asked: int,
    begin: Sequence[Cursor] = (),
) -> dict[str, int]:
    """A bucket's account of up to about SAMPLE_ROWS of the rows that hold `asked` tokens, after the
    cursors `begin` of a fork."""
    rows_of_lane = -(-asked // (config.T * config.V))
    # a few rows of one lane would say little: a long document in it may be a third of them
    num_lanes = min(config.V, max(1, SAMPLE_ROWS // max(1, rows_of_lane)))
    num_rows = min(rows_of_lane, -(-SAMPLE_ROWS // num_lanes))
    lanes = range(num_lanes)
    begun = {cursor["lane"]: cursor for cursor in begin if bucket in cursor["buckets"]}
    cursors = []
    for lane in lanes:
        feed = Rehearsal(
            config,
            bucket=bucket,
            lane=lane,
            source=lengths,  # type: ignore[arg-type]
            order=open_order(lengths, bucket=bucket, config=config),
            pool=None,
        )
        if lane in begun:
            feed.restore(begun[lane]["buckets"][bucket])
        for _ in range(num_rows):
            if feed.pack() is None:
                break
        cursors.append({"buckets": {bucket: feed.state().to_json()}})
    before = [begun[lane] for lane in lanes if lane in begun]
    return _accounts_since(before, cursors, config.T)[bucket]


def _phases(
    config: StreamConfig, buckets: Sequence[str], first: int, stop: int, n: int
) -> list[PhasePlan]:
    """Each phase: its first step, its tokens, and the tokens that its mix requests of each bucket,
    which in a short phase are not quite its weights. In this run, each lane packs its rows `first`
    to `stop` - 1, n per step.
    """
    mix = config.curriculum
    if mix is None:
        tokens = (stop - first) * config.V * config.T
        return [{"first_step": 0, "tokens": tokens, "asked": {buckets[0]: tokens}}]

    # the rows at which phases begin and end; the last phase never ends
    mixer = Mixer(mix, T=config.T, V=config.V, seed=config.seed)
    lengths = mix.phase_rows(config.T, config.V)
    starts = [0, *np.cumsum(lengths[:-1]).tolist()]
    ends = [*starts[1:], max(stop, sum(lengths))]
    phases: list[PhasePlan] = []
    for phase, (start, end) in enumerate(zip(starts, ends)):
        begin, end = np.clip([start, end], first, stop).tolist()
        rows = mixer.counts(phase, range(begin - start, end - start))
        asked = {bucket: rows[bucket] * config.T for bucket in buckets}
        tokens = (end - begin) * config.V * config.T
        phases.append({"first_step": (begin - first) // n, "tokens": tokens, "asked": asked})
    return phases


# ---- of a run ------------------------------------------------------------------------------------


class Starting(Protocol):
    """What a plan needs to know of a run that starts or resumes (`start_run.Start`)."""

    @property
    def run_dir(self) -> Path: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def horizon(self) -> Horizon: ...
    @property
    def config(self) -> Mapping[str, Any]: ...  # {} for a new run
    @property
    def checkpoint(self) -> object | None: ...  # None at step 0
    @property
    def cursors(self) -> Sequence[Cursor] | None: ...
    @property
    def step(self) -> int: ...


def make_run_plan(start: Starting, data: RunData) -> Plan:
    """The plan of a run that is starting.

    A resume that plans the same number of steps uses RUN/plan.json. Writes nothing.
    """
    settings = start.settings
    num_steps = start.horizon.num_iterations
    config = stream_config(settings)
    assert isinstance(config, StreamConfig), "no other order has a plan"
    drop_dry = settings.allow_bucket_exhaustion
    if start.checkpoint is not None:
        try:
            kept = read_plan(start.run_dir / PLAN_NAME)
            if (kept.num_steps, kept.allowed) == (num_steps, drop_dry):
                return kept
        except (FileNotFoundError, ValueError):
            pass  # the plan is made again
    fork = Fork.of(settings.fork)
    begin: Sequence[Cursor] = ()
    if fork is not None:
        begin = start.cursors or ()
        if start.step > fork.step:
            _, begin = read_cursors(cursor_files(start.run_dir)[fork.step])
    return make_plan(
        config,
        data.train,
        rows_per_step=settings.total_batch_size // config.T,
        num_steps=num_steps,
        drop_dry=drop_dry,
        cursors=start.cursors,
        start_step=start.step,
        first_step=fork.step if fork else 0,
        begin=begin,
    )


def share_sizes(config: StreamConfig, bucket: str, source: Source) -> np.ndarray:
    """(V,) float64: the tokens that each lane reads in its first pass over a bucket, divided by their
    mean. A document counts as in `nanochat.order`. Shares of many documents are similar: all 1, as for
    no document."""
    num_documents = source.groups.sum()
    if num_documents == 0 or num_documents >= SHARE_DOCUMENTS * config.V:
        return np.ones(config.V)
    limit = config.tokens_in_shares or int(source.means.max())
    means = np.minimum(source.means, limit)
    order = open_order(source, bucket=bucket, config=config)
    sizes = np.zeros(config.V)
    for lane in range(config.V):
        share = order.share(lane, 0)
        place = share.start
        while place < share.stop:
            unit = order.unit(0, place, share.stop)
            sizes[lane] += means[unit.groups].sum()
            place += len(unit.groups)
    return sizes / sizes.mean()


def repeating_lanes(sizes: np.ndarray, passes: float) -> int:
    """How many lanes read again what others read, although less than half of the bucket is read: the
    run has more `passes` than their first share lasts. `sizes`: see `share_sizes`."""
    return int((sizes < min(LITTLE_READ, passes)).sum())
