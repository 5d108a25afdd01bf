"""
The stream: which tokens are in row k of lane l, for ever.

**The law.** Row k of lane l is a pure function of the data, the tokenizer and the `StreamConfig`.
World size, ranks, batch size, threads, prefetching and restarts come after it and cannot change it,
because nothing here knows them.

    step s: R = nV rows;   lane 0's rows sn .. sn+n-1,  lane 1's rows sn .. sn+n-1,  ...
    rank r of W:           the rows of lanes floor(rV/W) .. floor((r+1)V/W) - 1

So the ranks' rows, put one after another, are the same for any W.

A lane has, for each bucket, a **feed**: its place in the order of the data, a packer in which
documents wait, their tokens, and the accounts.

    order --a unit--> source.read: ids --> packer (lengths) and documents (ids) --> next row
                                        until enough wait

A feed finishes an epoch before it begins the next one: it reads its share to the end, packs what is
pending until no full row is left, and completes one last row from the next epoch.

The JSON of a lane's feeds is its **cursor**; V cursors are all the state there is. A waiting document is
in its cursor with its length. So a restored feed packs at once, while its pool reads the documents again.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from nanochat.common import check_shape
from nanochat.order import Order, StreamConfig
from nanochat.packing import Piece, Placement
from nanochat.sources import Source

if TYPE_CHECKING:
    from nanochat.curriculum import Mixer

FORMAT = 5  # of cursors
SAMPLE_DOCUMENTS = 64  # of a group, where the lengths of documents are estimated
MUCH_CROPPED = 0.1  # a share of cropped tokens that deserves a warning
LEDGER = ("read", "bos", "repeated", "emitted", "cropped", "pending", "padded", "rows", "documents", "epochs")
Cursor = dict[str, Any]
FEED = dict.fromkeys(("epoch", "documents", "read", "row", "inserted", "repeated", "cropped", "padded",
                      "pending"), int)  # what the ledger counts
Document = tuple[int, int, int]  # (epoch, group, row in the group): what cursors name documents by


@dataclass(slots=True)
class Row:
    """T + 1 tokens that become T inputs and T targets."""

    lane: int
    index: int  # of the lane's rows
    bucket: str
    tokens: np.ndarray  # (T + 1,) ids
    live: np.ndarray | None  # (T + 1,) u8, 0 where a token is no target; None: all are
    placed: list[Placement]  # of Documents: what the row is made of; padding is behind them

    def doc_ids(self) -> np.ndarray:
        """(T + 1,) int32: which of the row's documents each token belongs to; padding is one more."""
        lengths = [length for _, _, length, _ in self.placed]
        lengths.append(len(self.tokens) - sum(lengths))
        return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)

    def digest(self, index: int) -> int:
        """8-byte BLAKE2b (as u64) of (u64 index of the row in its step, tokens u32 (T + 1,), target mask
        u8 (T,)), all little-endian. The batch digest of a step is the sum over its rows mod 2^64."""
        h = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8)
        h.update(self.tokens.astype("<u4").data)
        h.update(b"\1" * (len(self.tokens) - 1) if self.live is None else self.live[1:].data)
        return int.from_bytes(h.digest(), "little")


class FeedState(NamedTuple):
    """One bucket of a lane at the end of a step; a copy."""

    epoch: int
    place: int  # of the next unit
    num_documents: int
    read: int  # tokens of these documents
    counts: dict[str, int]  # of the packer
    waiting: dict[Document, Piece]

    def to_json(self) -> dict[str, Any]:
        """A feed's part of a cursor."""
        return {"epoch": self.epoch, "place": self.place, "documents": self.num_documents, "read": self.read,
                **self.counts, "waiting": [[*key, *piece] for key, piece in self.waiting.items()]}


class LaneState(NamedTuple):
    """A lane at the end of a step; a copy."""

    lane: int
    row: int  # rows that it has given
    dropped: frozenset[str]  # buckets that have run dry
    feeds: Any  # {bucket: FeedState}; in Megatron's order its own counts


class AnyStream(Protocol):
    """What a loader asks of a stream, in the order of lanes (`Stream`) or in Megatron's (`SampleStream`)."""

    config: Any
    lanes: list[int]
    buckets: list[str]
    mixer: "Mixer | None"  # None where no curriculum mixes buckets

    def next_rows(self, num_rows: int) -> list[Row]:
        """The next `num_rows` rows of each lane, lane after lane; fewer where a lane is dry."""

    def dry_bucket(self, lane: int) -> str | None:
        """The bucket for which a lane that has no next row waits; None where all of them are dry."""

    def state(self) -> list[LaneState]:
        """All lanes as they are now: a copy, made at the end of each step."""

    def cursors(self, state: list[LaneState] | None = None) -> list[Cursor]:
        """The cursors of these lanes, as JSON values: now, or at an earlier `state`."""

    def close(self) -> None:
        """Stop reading, and wait for reads in progress."""


class Packed:
    """The ids of a long document of `split`, compressed: it waits for many rows, and so do
    thousands like it. Rows ask for stretches in order, and what lies before the last one is let go.
    Measured on files of code: 0.85 bytes a token instead of 2, for 40 ns of a processor."""

    CHUNK = 4096  # ids

    def __init__(self, ids: np.ndarray):
        self.dtype = ids.dtype
        self.chunks = [zlib.compress(ids[at:at + self.CHUNK].tobytes(), 1) for at in range(0, len(ids), self.CHUNK)]

    def __getitem__(self, wanted: slice) -> np.ndarray:
        first, last = wanted.start // self.CHUNK, -(-wanted.stop // self.CHUNK)
        self.chunks[:first] = [b""] * first
        ids = np.frombuffer(b"".join(map(zlib.decompress, self.chunks[first:last])), self.dtype)
        return ids[wanted.start - first * self.CHUNK:wanted.stop - first * self.CHUNK]


class Feed:
    """One bucket in one lane. `pool` reads ahead; where it is None, each unit is read when it is due."""

    def __init__(self, config: StreamConfig, *, bucket: str, lane: int, source: Source, order: Order,
                 pool: Executor | None):
        self.config, self.bucket, self.lane, self.source, self.order = config, bucket, lane, source, order
        self.pool, self.max_epochs = pool, config.epochs(bucket)
        self.packer = config.new_packer()
        self.documents: dict[Document, Any] = {}  # that wait: (what `_kept` gives, repeated ids), or a Future of these
        self.epoch, self.share = 0, order.share(lane, 0)  # the places of the current epoch that are this lane's
        self.place = self.share.start  # of the next unit
        self.num_documents = self.read = 0  # documents, and their tokens without BOS and repeated ones
        self.ahead: Future[Any] | None = None

    # -- reading

    def _turn(self) -> bool:
        """Begin the next epoch in which this lane has documents. False if no epoch is left."""
        while self.max_epochs == 0 or self.epoch + 1 < self.max_epochs:
            self.epoch += 1
            self.share = self.order.share(self.lane, self.epoch)
            self.place = self.share.start
            if self.share:
                return True
        return False

    def _fetch(self, epoch: int, place: int, stop: int) -> tuple[int, list[tuple[Any, ...]]]:
        """A unit: (the place behind it, (group, row, length, what is kept, repeated ids) of each of its
        documents, in the order in which they are used)."""
        groups, rows, keep = self.order.unit(epoch, place, stop)
        documents: dict[int, tuple[Any, ...]] = {}
        for group in dict.fromkeys(groups.tolist()):
            at = np.flatnonzero(groups == group)
            ids, repeated = self.source.read(group, rows[at], keep)
            documents.update((i, (group, int(rows[i]), len(ids), self._kept(ids), n))
                         for i, ids, n in zip(at.tolist(), ids, repeated))
        return place + len(rows), [documents[i] for i in range(len(rows))]

    def read_ahead(self) -> None:
        """Have the pool read the next unit, unless it does, or enough documents wait."""
        target = self.config.fill_target(self.packer.row) + self.order.batch // 2
        if self.ahead is None and self.pool and self.place < self.share.stop and self.packer.wants(target):
            self.ahead = self.pool.submit(self._fetch, self.epoch, self.place, self.share.stop)

    def _fill(self) -> None:
        """Take in units of the current epoch until the packer wants no more. Raises RuntimeError when
        the pool was closed."""
        target = self.config.fill_target(self.packer.row)
        while self.place < self.share.stop and self.packer.wants(target):
            if self.ahead is None and self.pool:
                self.ahead = self.pool.submit(self._fetch, self.epoch, self.place, self.share.stop)
            unit = self.ahead.result() if self.ahead else self._fetch(self.epoch, self.place, self.share.stop)
            self.ahead = None
            self._take_in(*unit)

    def _take_in(self, place: int, documents: list[tuple[Any, ...]]) -> None:
        """Hand the documents of a unit to the packer."""
        framed, packer = self.config.framed, self.packer
        for group, row, length, ids, repeated in documents:
            if length == 0:  # a stored entry of nothing
                continue
            key = (self.epoch, group, row)
            try:
                packer.push(key, length)
            except ValueError as e:
                name, number = self.source.locate(group)
                raise ValueError(f"{name}: group {number}: {e}") from None
            self.documents[key] = ids, repeated
            packer.inserted += framed
            packer.repeated += repeated
            self.read += length - framed - repeated
            self.num_documents += 1
        self.place = place

    def _kept(self, ids: np.ndarray) -> Any:
        """What is kept of a document's ids while it waits. Where documents are cropped, that is
        what a row can hold; long ones that `split` cuts are kept compressed."""
        if self.packer.most is not None:
            return ids[:self.packer.most].copy() if len(ids) > self.packer.most else ids
        return Packed(ids) if self.packer.own_bos and len(ids) > Packed.CHUNK else ids

    # -- rows

    def pack(self) -> list[Placement] | None:
        """The next row as placements; None where the bucket is dry: nothing more comes, and what
        waits cannot fill a row."""
        self._fill()
        while not self.packer.ready:
            pending = list(self.packer.waiting())  # less than a row: the last one of this epoch
            if not self._turn():
                return None
            self.packer.lead(pending)
            self._fill()
        return self.packer.next_row()

    def next_row(self, index: int) -> Row | None:
        """The next row, which is the lane's row `index`; None when the bucket is dry."""
        placed = self.pack()
        if placed is None:
            return None
        pieces: list[np.ndarray] = []
        off: list[tuple[int, int]] = []  # stretches of the row that are no targets
        framed, at = self.config.framed, 0
        for key, start, length, context in placed:
            document = self.documents.pop(key)
            ids, repeated = document.result().pop(key) if isinstance(document, Future) else document
            rest = start > 0 and self.packer.own_bos  # of a document: BOS, context, what is new
            stop = start + length - rest
            if rest:
                pieces.append(np.full(1, self.source.bos, ids.dtype))
            pieces.append(ids[start:stop])
            if rest or repeated:  # a BOS in front is a target like any other
                begin = at + (framed and (rest or start == 0))
                end = at + rest + max(context, min(repeated + framed - start, length - rest))
                if begin < end:
                    off.append((begin, end))
            if (without := self.source.without.get(key[1])) is not None and without[key[2]]:
                off.append((at, at + length + 1))  # and the next document's BOS, which this document predicts
            if key in self.packer:
                self.documents[key] = ids, repeated
            at += length
        if at < self.config.T + 1:  # padding
            pieces.append(np.full(self.config.T + 1 - at, self.source.bos, pieces[0].dtype))
            off.append((at, self.config.T + 1))
        tokens = np.concatenate(pieces)
        live = None
        if off or not framed:
            live = np.ones(len(tokens), np.uint8)
            for begin, end in off:
                live[begin:end] = 0
            if not framed:  # what follows the end of a document is off
                live[1:] &= tokens[:-1] != self.source.bos
        return Row(self.lane, index, self.bucket, tokens, live, placed)

    # -- state

    def state(self) -> FeedState:
        """The feed as it is now."""
        return FeedState(self.epoch, self.place, self.num_documents, self.read, *self.packer.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `FeedState.to_json` gave. The pool reads the documents that wait, group by group."""
        what = f"cursor of lane {self.lane}, bucket {self.bucket!r}"
        check_shape(state, {**FEED, "place": int, "left": int, "waiting": [[int]]}, what)
        for waiting in state["waiting"]:
            known = len(waiting) == 6 and min(waiting) >= 0 and waiting[1] < len(self.source.groups)
            if not known or waiting[2] >= self.source.groups[waiting[1]]:
                raise ValueError(f"{what}: {waiting[:6]} is no document of these data; go on from "
                                 f"another checkpoint")
        self.epoch, self.share = state["epoch"], self.order.share(self.lane, state["epoch"])
        self.place = state["place"]
        self.num_documents, self.read = state["documents"], state["read"]
        waiting = {(epoch, group, row): Piece(*piece) for epoch, group, row, *piece in state["waiting"]}
        self.packer.restore(state, waiting)
        groups: dict[int, dict[Document, Piece]] = {}
        for key, piece in waiting.items():
            groups.setdefault(key[1], {})[key] = piece
        for group, mine in groups.items():
            if self.pool:
                coming = self.pool.submit(self._fetch_again, group, mine)
                self.documents.update(dict.fromkeys(mine, coming))
            else:
                self.documents.update(self._fetch_again(group, mine))

    def _fetch_again(self, group: int, waiting: dict[Document, Piece]) -> dict[Document, Any]:
        """Documents of a group that a cursor names; ValueError where one is not as long as it was."""
        arrays, repeated = self.source.read(group, np.array([row for _, _, row in waiting]))
        for (key, piece), ids in zip(waiting.items(), arrays):
            if len(ids) != (length := self.packer.whole_length(piece)):
                name, number = self.source.locate(group)
                raise ValueError(f"{name}: document {key[2]} of group {number} has {len(ids):,} tokens, the "
                                 f"checkpoint says {length:,}; the data or the tokenizer changed since the "
                                 f"run began")
        return {key: (self._kept(ids), n) for key, ids, n in zip(waiting, arrays, repeated)}


# ---- cursors -------------------------------------------------------------------------------------

def ledger(cursors: Sequence[Cursor], T: int) -> dict[str, dict[str, int]]:
    """The accounts of some lanes' cursors, in tokens: {bucket: {name: tokens}} with the names of
    LEDGER. In each, read + bos + repeated = emitted + cropped + pending; padding stands apart."""
    total: dict[str, dict[str, int]] = {}
    for cursor in cursors:
        check_shape(cursor, {"buckets": dict}, "cursor of a lane")
        check_shape(cursor["buckets"], dict.fromkeys(cursor["buckets"], FEED), "cursor of a lane")
        for bucket, feed in cursor["buckets"].items():
            account = total.setdefault(bucket, dict.fromkeys(LEDGER, 0))
            account["bos"] += feed["inserted"]
            account["emitted"] += feed["row"] * (T + 1) - feed["padded"]
            account["rows"] += feed["row"]
            account["epochs"] = max(account["epochs"], feed["epoch"])
            for name in ("read", "repeated", "cropped", "pending", "padded", "documents"):
                account[name] += feed[name]
    return total


def share(account: Mapping[str, int], name: str) -> float:
    """What part of the tokens that have left the buffers, emitted + cropped, was cropped (or
    repeated): what every table calls `cropped %`."""
    return account[name] / max(1, account["emitted"] + account["cropped"])


def sample_lengths(source: Source) -> np.ndarray:
    """(n,) int64: the lengths, BOS included, of the first documents of up to 8 groups, spread over a source."""
    spread = np.linspace(0, len(source.groups) - 1, min(8, len(source.groups))).astype(int)
    return np.array([len(ids) for group in spread.tolist() for ids in source.read(
        group, np.arange(min(SAMPLE_DOCUMENTS, int(source.groups[group]))))[0]])


def reading_notes(data: str, *, trained: int, tokens: int, passes: float, cropped: float, about: str = "about ",
                  ) -> list[str]:
    """Warnings, a sentence each: a run that trains on `trained` tokens reads `data`, which has `tokens`, more than
    once; much of it is cropped."""
    notes = []
    if passes > 1:
        notes.append(f"the run reads {data} {about}{passes:.1f} times: it trains on {trained:,} tokens, and {data} "
                     f"has {about}{tokens:,}")
    if cropped > MUCH_CROPPED:
        notes.append(f"{about}{cropped:.0%} of the tokens of {data} are cropped, because their documents are longer "
                     f"than a row; --long-docs=split crops none, a longer --max-seq-len fewer")
    return notes


def stream_identity(config: Any, sources: Mapping[str, Source], tokenizer: str) -> dict[str, Any]:
    """All that decides the rows, as JSON values: equal identities, equal rows."""
    return {**config.identity(), "tokenizer": tokenizer,
            **{f"data {name}": source.fingerprint for name, source in sources.items()}}


def check_cursors(cursors: Sequence[Cursor], lanes: Sequence[int], identity: Mapping[str, Any]) -> None:
    """ValueError unless they are of this stream, one of each lane and maybe of others; what differs
    is told."""
    for cursor in cursors:
        check_shape(cursor, {"format": int, "lane": int, "stream": dict, "row": int, "dropped": [str], "buckets": dict},
                    "cursor of a lane")
        lane, theirs = cursor["lane"], cursor["stream"]
        if cursor["format"] != FORMAT:
            raise ValueError(f"cursor of lane {lane}: format {cursor['format']}, expected {FORMAT}; go on "
                             f"with the code that wrote it, or start a new run (--model-tag)")
        differ = sorted(k for k in {*theirs, *identity} if theirs.get(k) != identity.get(k))
        if differ:
            diff = "; ".join(f"{k}: {theirs.get(k)} there, {identity.get(k)} here" for k in differ)
            raise ValueError(f"cursor of lane {lane} is of another stream ({diff}); start a new run "
                             f"(--model-tag)")
    numbers = sorted(cursor["lane"] for cursor in cursors)
    if len(numbers) > len(set(numbers)) or not set(lanes) <= set(numbers):
        raise ValueError(f"cursors of lanes {numbers}, expected one of each of {[*lanes]}; give those of all "
                         f"ranks of one checkpoint")


def carry_on(cursors: Sequence[Cursor], identity: Mapping[str, Any]) -> list[Cursor]:
    """Cursors of another run, as those of a new one that goes on with its data: what it consumed
    stays consumed. With another curriculum each bucket goes on where it was, rows are counted from
    0, and buckets that are new begin at their beginning."""
    continued = []
    for cursor in cursors:
        theirs = cursor["stream"]
        if theirs.get("curriculum") == identity.get("curriculum"):
            continued.append(cursor)
            continue
        new = {"curriculum", *(k for k in theirs.keys() ^ identity.keys() if k.startswith("data "))}
        stream = {k: v for k, v in theirs.items() if k not in new} | {k: identity[k] for k in new if k in identity}
        buckets = {b: feed for b, feed in cursor["buckets"].items() if f"data {b}" in identity}
        continued.append({**cursor, "stream": stream, "buckets": buckets, "row": 0, "dropped": []})
    return continued


# ---- lanes ---------------------------------------------------------------------------------------

class Stream:
    """Some lanes of the stream: those of a rank, or all of them.

    With several sources a curriculum says which bucket a row comes from. `tokenizer`: its fingerprint.
    `drop_dry`: a lane whose due bucket is dry drops it and goes on with the others; otherwise the lane
    ends there. Raises ValueError when cursors are of another stream: the error says what differs.
    """

    def __init__(self, config: StreamConfig, sources: Mapping[str, Source], lanes: Sequence[int], *,
                 tokenizer: str, cursors: Sequence[Cursor] | None = None, num_threads: int = 4,
                 drop_dry: bool = False, feed: type[Feed] = Feed):
        self.config, self.lanes, self.drop_dry = config, list(lanes), drop_dry
        self.mixer: Mixer | None = None
        if config.curriculum is not None:
            config.curriculum.check_buckets(sources)
            sources = {bucket: sources[bucket] for bucket in config.curriculum.buckets}
            self.mixer = config.curriculum.mixer(T=config.T, V=config.V, seed=config.seed)
        self.buckets = list(sources)
        self.identity = stream_identity(config, sources, tokenizer)
        self.rows = dict.fromkeys(self.lanes, 0)  # that each lane has given
        self.dropped: dict[int, frozenset[str]] = dict.fromkeys(self.lanes, frozenset())
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize") if num_threads else None
        self.feeds: dict[str, dict[int, Feed]] = {}
        for bucket, source in sources.items():
            order = Order(source.groups, source.means, small=source.small, bucket=bucket, config=config)
            self.feeds[bucket] = {lane: feed(config, bucket=bucket, lane=lane, source=source, order=order,
                                             pool=self.pool) for lane in self.lanes}
        if cursors is not None:
            check_cursors(cursors, self.lanes, self.identity)
            for cursor in cursors:
                lane = cursor["lane"]
                if lane in self.rows:
                    self.rows[lane], self.dropped[lane] = cursor["row"], frozenset(cursor["dropped"])
                    for bucket in cursor["buckets"].keys() & self.feeds.keys():
                        self.feeds[bucket][lane].restore(cursor["buckets"][bucket])

    def bucket_of(self, lane: int, row: int) -> str | None:
        """The bucket that a lane's row comes from; None when all of them are dry."""
        if self.mixer is not None:
            return self.mixer.bucket(lane, row, self.dropped[lane])
        return next((bucket for bucket in self.buckets if bucket not in self.dropped[lane]), None)

    def next_rows(self, num_rows: int) -> list[Row]:
        """The next `num_rows` rows of each lane, lane after lane; fewer where a lane is dry."""
        for lane in self.lanes:  # all that is due is read at once
            for bucket in {self.bucket_of(lane, self.rows[lane] + i) for i in range(num_rows)}:
                if bucket is not None:
                    self.feeds[bucket][lane].read_ahead()
        return [row for lane in self.lanes for row in self._lane_rows(lane, num_rows)]

    def _lane_rows(self, lane: int, num_rows: int) -> list[Row]:
        """A lane's next rows; fewer where it is dry."""
        rows: list[Row] = []
        while len(rows) < num_rows:
            bucket = self.bucket_of(lane, self.rows[lane])
            if bucket is None:
                break
            row = self.feeds[bucket][lane].next_row(self.rows[lane])
            if row is not None:
                rows.append(row)
                self.rows[lane] += 1
            elif self.drop_dry:
                self.dropped[lane] |= {bucket}
            else:
                break
        return rows

    def dry_bucket(self, lane: int) -> str | None:
        """The bucket for which a lane that has no next row waits; None where all of them are dry."""
        return self.bucket_of(lane, self.rows[lane])

    def state(self) -> list[LaneState]:
        """All lanes as they are now: a copy, made at the end of each step."""
        return [LaneState(lane, self.rows[lane], self.dropped[lane],
                          {bucket: feeds[lane].state() for bucket, feeds in self.feeds.items()})
                for lane in self.lanes]

    def cursors(self, state: list[LaneState] | None = None) -> list[Cursor]:
        """The cursors of these lanes, as JSON values: now, or at an earlier `state`."""
        return [{"format": FORMAT, "lane": at.lane, "row": at.row, "stream": self.identity,
                 "dropped": sorted(at.dropped),
                 "buckets": {bucket: feed.to_json() for bucket, feed in at.feeds.items()}}
                for at in (self.state() if state is None else state)]

    def close(self) -> None:
        """Stop reading, and wait for reads in progress."""
        if self.pool:
            self.pool.shutdown(cancel_futures=True)


def open_stream(config: Any, sources: Mapping[str, Source], lanes: Sequence[int], **given: Any) -> AnyStream:
    """Some lanes of the stream that a configuration describes, in the order of lanes or in
    Megatron's. `given`: the other arguments of `Stream`."""
    if isinstance(config, StreamConfig):
        return Stream(config, sources, lanes, **given)
    from nanochat.integrations.megatron_order import SampleStream

    return SampleStream(config, sources, lanes, **given)
