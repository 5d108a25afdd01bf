"""
The stream in Megatron's order: row i of the run is sample i of the (blended) data set, for ever.

    step s: R rows = samples sR .. sR + R - 1;    lane l of V gives n = R / V of them, those from sR + ln on

    W = 1     rank 0: 0 1 2 3 4 5 6 7         (V = 4, n = 2)
    W = 2     rank 0: 0 1 2 3   rank 1: 4 5 6 7

So the rows are the same for every number of processes, lanes and micro-batch. Lanes are kept as the atom of who
computes what, so that leaves, digests and bits are as everywhere; they have no share of the data and no buffer. What
they have in common is one number, how many samples the run has had, and that is what a cursor holds, beside how many
rows of each bucket its lane gave: the batch size may change at a resume, and the next sample goes on.

**Accounts.** Sample k of a prefix is tokens kT .. kT + T of its stream of epochs (`nanochat.sample_order`). The first T
are its own, `read`; the last one is the first of sample k + 1 as well and counts as `repeated`, whichever of the two
comes first in the shuffled order. So every token of the stream is read once, when its sample comes, and again in each
epoch; nothing is inserted, cropped, padded or pending. `epoch` counts whole passes' worth of samples: epochs are
shuffled together, so none has an end. Documents are not counted: samples cut them anywhere (`SampleStream.describe`).

**Documents in a row.** With --attention-mode other than causal a token attends to its own document; it ends with its
EOD (Megatron's reset_attention_mask). reset_position_ids has no counterpart: positions are rotary, so inside a document
only distances count.

A step's samples are read when its first row is copied, all of a rank in one go. So passing over steps costs next to
nothing. Where ids are not mapped, those of the next AHEAD steps are then read as well: a store takes its time.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nanochat.common import hash_json
from nanochat.order import StreamConfig
from nanochat.rows import Row
from nanochat.sample_data import SampleConfig, Samples, count_samples, open_samples, pairs_of, parts_of
from nanochat.sources import Source
from nanochat.stream import FORMAT, Cursor, Stream, check_cursors

AHEAD = 4  # steps that are read ahead where ids are not mapped


class Ahead:
    """Samples that daemon threads read before they are asked for: Python ends though a store stalls."""

    def __init__(self, samples: Samples):
        self.samples = samples
        self.reading: dict[tuple[int, int], Future[Any]] = {}

    def rows(self, first: int, stop: int, stride: int) -> Any:
        """`samples.rows(first, stop)`; those `stride` and some times `stride` further on come next."""
        wanted = [(first + i * stride, stop + i * stride) for i in range(AHEAD + 1)]
        self.reading = {span: self.reading.get(span) or self._start(span)
                        for span in wanted if span[1] <= len(self.samples)}
        return self.reading[first, stop].result()

    def _start(self, span: tuple[int, int]) -> Future[Any]:
        future: Future[Any] = Future()

        def read() -> None:
            try:
                future.set_result(self.samples.rows(*span))
            except BaseException as e:  # raised where it is asked for
                future.set_exception(e)

        threading.Thread(target=read, name="samples", daemon=True).start()
        return future


class Block:
    """Neighbouring samples, read when they are first asked for; `rows` reads them, `check` is shown them."""

    def __init__(self, rows: Callable[[int, int], Any], first: int, stop: int, check: Callable[["Block"], None]):
        self.rows, self.first, self.stop, self.check = rows, first, stop, check
        self._read: tuple[np.ndarray, np.ndarray | None] | None = None

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """(ids (n, T + 1), which targets count (n, T) bool, or None for all)."""
        if self._read is None:
            self._read = self.rows(self.first, self.stop)
            self.check(self)
        return self._read


@dataclass(slots=True)
class SampleRow:
    """A row: one sample of a block."""

    lane: int
    index: int  # of this lane's rows
    bucket: str
    block: Block
    at: int  # in the block

    @property
    def sample(self) -> int:
        """Which row of the run it is."""
        return self.block.first + self.at

    @staticmethod
    def copy(rows: "Sequence[SampleRow]", bos: np.ndarray, tokens: np.ndarray, live: np.ndarray,
             doc_ids: np.ndarray | None) -> bool:
        """`nanochat.rows.copy_rows` of this kind. `bos` is the EOD as well."""
        for i, row in enumerate(rows):
            ids, mask = row.block.read()
            tokens[i] = ids[row.at]
            if mask is not None:
                live[i, 1:] = mask[row.at]
        if doc_ids is not None:
            ends = tokens == bos[0]
            doc_ids[...] = np.cumsum(ends, axis=1) - ends
        return mask is not None


class SampleStream:
    """Some lanes of a run in Megatron's order, behind the interface of `nanochat.stream.Stream`. `sources`: a
    `ShardSource` of one pair for each bucket. Shuffles, or finds the shuffles in the index cache, at once. ValueError
    for cursors of another stream, and for data that have too few samples."""

    mixer = None

    def __init__(self, config: SampleConfig, sources: Mapping[str, Source], lanes: Sequence[int], *, tokenizer: str,
                 cursors: Sequence[Cursor] | None = None):
        self.config, self.lanes, self.buckets = config, list(lanes), list(sources)
        self.files = [source.manifest["files"][0]["name"] for source in pairs_of(sources)]
        self.samples = open_samples(config, sources)
        self.bound = min(source.bound for source in pairs_of(sources))  # of ids
        self.mapped = all(source.mapped for source in sources.values())
        self.ahead = None if self.mapped else Ahead(self.samples)
        self.identity = {**config.identity(), "tokenizer": tokenizer, "prefixes": self.buckets,
                         "samples": hash_json(self.samples.identity()),
                         **{f"data {name}": source.fingerprint for name, source in sources.items()}}
        self.taken = self.row = 0  # samples that all lanes have given; rows of each lane
        self.counts = np.zeros((len(self.lanes), len(self.buckets)), np.int64)  # rows of each lane from each bucket
        if cursors is not None:
            self._restore(cursors)
        for part in parts_of(self.samples):
            part.shuffle_index  # noqa: B018  before the first step, where nobody waits for it with a time-out

    def _restore(self, cursors: Sequence[Cursor]) -> None:
        check_cursors(cursors, self.lanes, self.identity)
        mine = {cursor["lane"]: cursor for cursor in cursors}
        found = {(cursor["samples"], cursor["row"]) for cursor in cursors}
        if len(found) > 1:
            raise ValueError(f"cursors of different steps, after {sorted(n for n, _ in found)} samples; give those of "
                             f"one checkpoint")
        self.taken, self.row = found.pop()
        for lane, counts in zip(self.lanes, self.counts):
            counts[:] = [mine[lane]["buckets"][bucket]["row"] for bucket in self.buckets]

    def next_rows(self, num_rows: int) -> list[SampleRow]:
        """The next `num_rows` rows of each lane, lane after lane; none where the run's samples are used up."""
        if self.taken + num_rows * self.config.V > self.config.num_samples:
            return []
        rows = self.samples.rows if self.ahead is None else partial(self.ahead.rows, stride=num_rows * self.config.V)
        block = Block(rows, self.taken + num_rows * self.lanes[0], self.taken + num_rows * (self.lanes[-1] + 1),
                      self._check_ids)
        which = self._buckets_of(block)
        flat = np.repeat(np.arange(len(self.lanes)), num_rows) * len(self.buckets) + which
        self.counts += np.bincount(flat, minlength=self.counts.size).reshape(self.counts.shape)
        found = [SampleRow(self.lanes[i // num_rows], self.row + i % num_rows, self.buckets[bucket], block, i)
                 for i, bucket in enumerate(which.tolist())]
        self.taken += num_rows * self.config.V
        self.row += num_rows
        return found

    def steps(self, num_rows: int) -> Iterator[tuple[list[SampleRow], list[tuple[Any, ...]]]]:
        """As of `Stream`."""
        while True:
            yield self.next_rows(num_rows), self.snapshot()

    def _buckets_of(self, block: Block) -> np.ndarray:
        """Which bucket each sample of a block is of, (n,)."""
        if len(self.buckets) == 1:
            return np.zeros(block.stop - block.first, np.int16)
        return self.samples.dataset_index[block.first:block.stop]  # type: ignore[union-attr]

    def _check_ids(self, block: Block) -> None:
        """ValueError for an id that no embedding may see."""
        ids, _ = block.read()
        if ids.view(f"u{ids.itemsize}").max() < self.bound:  # what is negative is outside too
            return
        i, at = np.argwhere((ids < 0) | (ids >= self.bound))[0].tolist()
        row = SampleRow(0, 0, self.buckets[self._buckets_of(block)[i]], block, i)
        place = next(p for p in reversed(self.describe(row)) if p["at"] <= at)
        raise ValueError(f"{place['file']}: document {place['document']:,} holds the id {ids[i, at]:,}, outside the "
                         f"vocabulary of {self.bound:,}; python -m scripts.verify tells which there are; make the pair "
                         f"again, or name its tokenizer with --tokenizer-dir")

    def dry_bucket(self, lane: int) -> None:
        """As of `Stream`: it is no bucket that is dry, the run has had its samples."""

    # ---- state

    def snapshot(self) -> list[tuple[Any, ...]]:
        """The state of all lanes, for `cursors`; cheap enough for every step."""
        counts = self.counts.tolist()
        return [(lane, self.row, frozenset(), (self.taken, counts[i])) for i, lane in enumerate(self.lanes)]

    def cursors(self, snapshot: list[tuple[Any, ...]] | None = None) -> list[Cursor]:
        """The cursors of these lanes, now or when a snapshot was taken: JSON values."""
        found = []
        epochs: list[int] = []
        for lane, row, _, (taken, counts) in self.snapshot() if snapshot is None else snapshot:
            epochs = epochs or [n * self.config.T // part.num_tokens_per_epoch for n, part in
                                zip(count_samples(self.samples, taken), parts_of(self.samples))]
            accounts = {bucket: account(n, epoch, self.config.T)
                        for bucket, n, epoch in zip(self.buckets, counts, epochs)}
            found.append({"format": FORMAT, "lane": lane, "row": row, "stream": self.identity, "dropped": [],
                          "samples": taken, "buckets": accounts})
        return found

    def close(self) -> None:
        """Nothing runs that would have to be stopped: what is read ahead ends by itself."""

    # ---- for people

    def describe(self, row: SampleRow) -> list[dict[str, Any]]:
        """The documents in a row: from token `at` on, `tokens` ids of `document` of `file`, its ids start .. stop - 1
        `of` so many. Ids as they are stored, an EOD at the end."""
        number, dataset = self.buckets.index(row.bucket), parts_of(self.samples)[self.buckets.index(row.bucket)]
        own = row.sample if len(self.buckets) == 1 else int(
            self.samples.dataset_sample_index[row.sample])  # type: ignore[union-attr]
        pieces, at, found = dataset.pieces(own, own + 1), 0, []
        edges, lengths = dataset.dataset.document_indices, dataset.dataset.sequence_lengths
        for sequence, offset, length in zip(pieces.sequences.tolist(), pieces.offsets.tolist(),
                                            pieces.lengths.tolist()):
            document = int(np.searchsorted(edges, sequence, side="right")) - 1
            first, end = edges[document:document + 2].tolist()
            start = int(lengths[first:sequence].sum(dtype=np.int64)) + offset
            found.append({"at": at, "tokens": length, "file": self.files[number], "document": document,
                          "start": start, "stop": start + length, "of": int(lengths[first:end].sum(dtype=np.int64))})
            at += length
        return found


def account(rows: int, epoch: int, T: int) -> dict[str, int]:
    """A bucket's part of a cursor, by the names that `stream.ledger` adds up."""
    return {"row": rows, "epoch": epoch, "read": rows * T, "repeated": rows, "inserted": 0, "cropped": 0, "padded": 0,
            "pending": 0, "documents": 0}


# ---- either order ---------------------------------------------------------------------------------------------------

Config = StreamConfig | SampleConfig
AnyStream = Stream | SampleStream
AnyRow = Row | SampleRow


def open_stream(config: Config, sources: Mapping[str, Source], lanes: Sequence[int], *, tokenizer: str,
                cursors: Sequence[Cursor] | None = None, **lanes_only: Any) -> AnyStream:
    """Some lanes of the stream that a configuration describes; `lanes_only`: what else `Stream` takes."""
    if isinstance(config, SampleConfig):
        return SampleStream(config, sources, lanes, tokenizer=tokenizer, cursors=cursors)
    return Stream(config, sources, lanes, tokenizer=tokenizer, cursors=cursors, **lanes_only)


def build_indices(config: Config, sources: Mapping[str, Source]) -> None:
    """Have the index cache hold what a stream in Megatron's order will look for there; nothing to do for lanes."""
    if isinstance(config, SampleConfig):
        SampleStream(config, sources, [0], tokenizer="")
