"""
Rehearsals: a feed of the stream on lengths alone, so that what a run will do is known before it begins.

Placements come from lengths, so a feed that is given lengths in place of tokens packs the very same rows: a `Rehearsal`
is a `Feed` with the same position, the same refills and the same packer, that never touches a token. And a feed knows
nothing of the other buckets, of other lanes or of the curriculum: how many rows it can give before it is dry is a
property of the feed alone. So feeds are rehearsed one by one, in as many processes as there are cores.

Often that is not needed, because totals already say enough. A feed with S tokens to come, in documents of which L fill
a row of T + 1 by themselves and whose others have s tokens, gives at least so many rows:

    concat     (S - 1) / T               each row but the first shares a token: exact
    split      (S - T) / (T + 1)         it is dry with at most T tokens left, and repeats only add tokens
    crop       L, (s - T) / (2 T + 1)    a row takes one long document at most, and drops less than T + 1 of the others
    binned     S / (T + 1)               a row holds no more; the number of entries where each has a row of its own

Text has no lengths before it is tokenized. `SampledLengths` draws them from a few hundred of its documents; what comes
of that is an estimate, and is called one.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from nanochat.common import words
from nanochat.order import Order, StreamConfig
from nanochat.packing import COUNTS
from nanochat.sources import Manifest, Source, TokenSource
from nanochat.stream import Feed

PROGRESS_ROWS = 1 << 14  # between two signs of life of a task
SAMPLED_UNITS, SAMPLE_SIZE = 8, 64  # of text


# ---- lengths --------------------------------------------------------------------------------------------------------

class SampledLengths:
    """Text as a source of lengths: those of a sample of its documents, drawn again and again, group by group."""

    bos = 0

    def __init__(self, source: Source):
        """Reads and tokenizes 64 documents from each of up to 8 groups."""
        self.groups, self.fingerprint = source.groups, source.fingerprint
        spread = np.linspace(0, len(source.groups) - 1, min(SAMPLED_UNITS, len(source.groups))).astype(int)
        documents = [ids for group in spread.tolist()
                     for ids in source.read(group, np.arange(min(SAMPLE_SIZE, int(source.groups[group]))))[0]]
        self.sample = np.array([len(ids) for ids in documents], np.int64)

    def lengths(self, group: int, rows: np.ndarray) -> tuple[list[int], list[int]]:
        """As of `Source`."""
        drawn = self.sample[(words(int(self.groups[group]), "sample", group) % np.uint64(len(self.sample))).astype(int)]
        return drawn[rows].tolist(), [0] * len(rows)

    def locate(self, group: int) -> tuple[str, int]:
        """A sample has no place."""
        return "sample", group


Lengths = TokenSource | SampledLengths


@dataclass(frozen=True)
class _Vocabulary:
    """What a TokenSource asks of a tokenizer."""

    fingerprint: str
    bos: int
    size: int

    def get_bos_token_id(self) -> int:
        return self.bos

    def get_vocab_size(self) -> int:
        return self.size

    def encode_flat(self, texts: list[str], *, num_threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError("lengths are known without a token")


def with_lengths(source: Source) -> Lengths:
    """The source itself where it knows its lengths, else a sample of it."""
    return source if isinstance(source, TokenSource) else SampledLengths(source)


def _pack_up(source: Lengths, tokenizer: str) -> tuple[Manifest, _Vocabulary, bool] | SampledLengths:
    """What another process opens the source again from."""
    if isinstance(source, TokenSource):
        return source.manifest, _Vocabulary(tokenizer, source.bos, source.tokenizer.get_vocab_size()), source.as_stored
    return source


def _unpack(packed: tuple[Manifest, _Vocabulary, bool] | SampledLengths) -> Lengths:
    if isinstance(packed, SampledLengths):
        return packed
    manifest, vocabulary, as_stored = packed
    return TokenSource(manifest, vocabulary, as_stored=as_stored)


# ---- bounds from totals ---------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Totals:
    """Sums over some documents, or of each of some units or lanes: ints, or (n,) int64 arrays."""

    tokens: Any  # as the stream sees them, BOS and overlaps included
    long: Any  # documents that fill a row by themselves
    short: Any  # tokens of the others
    entries: Any  # documents that have any token
    repeated: Any  # tokens that are overlap

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @staticmethod
    def exact(config: StreamConfig) -> bool:
        """Whether `rows` is the number itself, and no lower bound."""
        return config.layout == "concat" or not config.pack

    def rows(self, config: StreamConfig) -> Any:
        """How many rows a feed can certainly make of them."""
        T = config.T
        if config.layout == "concat":
            rows = (self.tokens - 1) // T
        elif config.layout == "binned":
            rows = self.entries if not config.pack else -(-self.tokens // (T + 1))
        elif config.long_docs == "split":
            rows = (self.tokens - T) // (T + 1)
        else:
            rows = np.maximum(self.long, (self.short - T) // (2 * T + 1))
        return np.maximum(rows, 0)


def unit_totals(source: Lengths, order: Order, T: int) -> Totals:
    """Totals of each unit of a bucket, (num_units,), units of the same group side by side. Reads every length once."""
    parts: list[np.ndarray] = []
    for group, n in enumerate(order.groups.tolist()):
        lengths, prefixes = map(np.array, source.lengths(group, np.arange(n)))
        long = lengths > T
        edges = np.arange(0, n, order.unit_size)
        columns = (lengths, long, np.where(long, 0, lengths), lengths > 0, prefixes)
        parts.append(np.stack([np.add.reduceat(np.asarray(column, np.int64), edges) for column in columns]))
    return Totals(*np.concatenate(parts, axis=1))


def share_totals(totals: Totals, order: Order, epoch: int, spans: Sequence[range]) -> Totals:
    """Totals of some spans of an epoch's units (such as `order.share(lane, epoch)` of each lane), (len(spans),)."""
    first = np.cumsum(order.units_per_group) - order.units_per_group
    groups = order._epoch(epoch)[0]
    counts = order.units_per_group[groups]
    units = np.arange(order.num_units) + np.repeat(first[groups] - (np.cumsum(counts) - counts), counts)
    starts, stops = [span.start for span in spans], [max(span.start, span.stop) for span in spans]

    def sums(column: np.ndarray) -> np.ndarray:
        running = np.concatenate([[0], np.cumsum(column[units])])
        return running[stops] - running[starts]

    return Totals(*map(sums, (totals.tokens, totals.long, totals.short, totals.entries, totals.repeated)))


# ---- packing --------------------------------------------------------------------------------------------------------

class _Nothing:
    """A source that gives documents of the right lengths and nothing in them."""

    def __init__(self, source: Lengths):
        self.source, self.bos = source, source.bos

    def read(self, group: int, rows: np.ndarray, keep: int = 0) -> tuple[list[np.ndarray], list[int]]:
        """As of `Source`."""
        lengths, repeated = self.source.lengths(group, rows)
        return [np.broadcast_to(np.uint8(0), n) for n in lengths], repeated

    def locate(self, group: int) -> tuple[str, int]:
        """As of `Source`."""
        return self.source.locate(group)


class Rehearsal(Feed):
    """One bucket in one lane, on lengths alone."""

    def __init__(self, config: StreamConfig, *, bucket: str, lane: int, source: Lengths, order: Order):
        nothing: Any = _Nothing(source)
        super().__init__(config, bucket=bucket, lane=lane, source=nothing, order=order, pool=None)

    def advance(self, rows: int) -> bool:
        """Go on until so many rows are packed, in all; False where the feed is dry before."""
        while self.packer.row < rows:
            if self.pack() is None:
                return False
        return True

    def refill(self) -> None:
        """Read what the next row wants."""
        while self.packer.wants(self.config.fill_target(self.packer.row)) and not self.exhausted:
            self._read()

    def accounts(self) -> dict[str, int]:
        """What `nanochat.stream.ledger` needs of a cursor's feed."""
        return {**{name: getattr(self.packer, name) for name in COUNTS}, "pending": self.packer.pending,
                "epoch": self.epoch, "documents": self.num_documents, "read": self.read}


@dataclass(frozen=True)
class Task:
    """One feed to rehearse: until it has packed `rows` in all, or is dry. `flush`: and then read all that it may, as a
    lane does that drops the bucket. `state`: the feed's part of a cursor to go on from."""

    bucket: str
    lane: int
    rows: int
    flush: bool = False
    state: dict[str, Any] | None = None


def packed_up(config: StreamConfig, sources: Mapping[str, Lengths], tokenizer: str) -> tuple[Any, ...]:
    """The arguments of `open_rehearsals`, fit for another process. `tokenizer`: its fingerprint."""
    return config, {bucket: _pack_up(source, tokenizer) for bucket, source in sources.items()}


def open_rehearsals(config: StreamConfig, packed: Mapping[str, Any]
                    ) -> Callable[[Task], Generator[int, None, dict[str, int]]]:
    """For `nanochat.workers.run_tasks`: the work on a Task yields rows packed meanwhile and returns the accounts."""
    sources = {bucket: _unpack(p) for bucket, p in packed.items()}
    orders = {bucket: Order(source.groups, bucket=bucket, config=config) for bucket, source in sources.items()}

    def work(task: Task) -> Generator[int, None, dict[str, int]]:
        """Rehearse one feed."""
        feed = Rehearsal(config, bucket=task.bucket, lane=task.lane, source=sources[task.bucket],
                         order=orders[task.bucket])
        if task.state is not None:
            feed.restore(task.state)
        going, before = True, feed.packer.row
        while going and feed.packer.row < task.rows:
            going = feed.advance(min(task.rows, feed.packer.row + PROGRESS_ROWS))
            yield feed.packer.row - before
            before = feed.packer.row
        if task.flush:
            feed.refill()
        return feed.accounts()

    return work
