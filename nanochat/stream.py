"""
The stream: which tokens are in row k of lane l, for ever.

The law. Row k of lane l is a pure function of the data, the tokenizer and the `StreamConfig`. World size, ranks, batch
size, threads, prefetching and restarts come after it and cannot change it, because nothing here knows them.

    step s: R = nV rows;   lane 0's rows sn .. sn+n-1,  lane 1's rows sn .. sn+n-1,  ...
    rank r of W:           the rows of lanes floor(rV/W) .. floor((r+1)V/W) - 1

so the ranks' rows, put one after another, are the same for any W.

A lane has, for each bucket, a **feed**: its position in the order (order.py), a packer with the documents that wait
(packing.py), and the accounts. Its JSON is the **cursor**; V cursors are all the state there is. A waiting document is
in the cursor with its length, so a resumed lane packs at once and reads again only the documents that rows place.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanochat.mixing import Mixer
from nanochat.order import Order, StreamConfig
from nanochat.packing import Placement
from nanochat.sources import Source

log = logging.getLogger(__name__)

FORMAT = 2  # of cursors
LEDGER = ("read", "bos", "repeated", "emitted", "cropped", "pending", "padded", "rows", "documents", "epochs")
Cursor = dict[str, Any]
Document = tuple[int, int, int]  # (epoch, group, row in the group): what packers and cursors name documents by


class _Deferred:
    """A waiting document of a restored feed: its length is known, its tokens are read when a row places it."""

    __slots__ = ("index", "length", "texts")

    def __init__(self, texts: "Future[dict[int, Any]]", index: int, length: int):
        self.texts, self.index, self.length = texts, index, length


@dataclass(slots=True)
class Row:
    """A packed row: placements, and for each what its tokens come from. `copy` writes the tokens."""

    lane: int
    index: int  # of this lane's rows
    bucket: str
    placements: list[Placement]
    documents: list[tuple[Any, int, int]]  # (tokens or a _Deferred, how many are gone, where live ones begin)
    feed: "Feed"

    def copy(self, bos: np.ndarray, tokens: np.ndarray, live: np.ndarray, doc_ids: np.ndarray | None = None) -> None:
        """Write the row's tokens (T + 1,), 0 into `live` (T + 1,) u8 where a token is no target, and into `doc_ids`
        (T + 1,) int32, if given, which of the row's documents each token belongs to (padding counts as one). `bos`:
        the BOS id, (T + 1,) times."""
        own_bos, framed = self.feed.packer.own_bos, self.feed.config.framed
        pieces, at = [], 0
        for (key, start, length, off), (document, gone, prefix) in zip(self.placements, self.documents):
            if type(document) is _Deferred:
                document = self.feed.tokens_of(key, document)
            if start and own_bos:
                pieces.append(bos[:1])
                pieces.append(document[start - gone:start - gone + length - 1])
                live[at + 1:at + 1 + max(off, min(prefix - start, length - 1))] = 0
            else:
                first = start - gone
                pieces.append(document if length == len(document) else document[first:first + length])
                if prefix > start:
                    live[at + max(framed - start, 0):at + min(prefix - start, length)] = 0
            at += length
        if at < len(tokens):
            pieces.append(bos[at:])
            live[at:] = 0
        np.concatenate(pieces, out=tokens, casting="unsafe")
        if not framed:
            live[1:][tokens[:-1] == bos[0]] = 0  # what follows the end of a document
        if doc_ids is not None:
            lengths = [placement[2] for placement in self.placements]
            numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
            doc_ids[:at], doc_ids[at:] = numbers, len(lengths)


class Feed:
    """One bucket in one lane: position in the order, packer, accounts."""

    def __init__(self, config: StreamConfig, *, bucket: str, lane: int, source: Source, order: Order,
                 pool: ThreadPoolExecutor):
        self.config, self.bucket, self.lane, self.source, self.order = config, bucket, lane, source, order
        self.pool, self.max_epochs = pool, config.epochs(bucket)
        self.packer = config.new_packer()
        self.documents: dict[Document, Any] = {}  # that wait: tokens, a _Deferred, or an int: restored, so long
        self.gone: dict[Document, int] = {}  # of waiting documents whose first tokens are used and gone: how many
        self.prefix: dict[Document, int] = {}  # of waiting documents that begin with overlap: where it ends
        self.unasked: set[tuple[int, int]] = set()  # (group, unit) of restored documents not fetched yet
        self.epoch, self.unit = 0, order.share(lane, 0).start
        self.num_documents = self.read = 0  # documents and their tokens, BOS and repeated ones not counted
        self.ahead: Future[tuple[list[Document], list[np.ndarray], list[int]]] | None = None
        self.full = False  # whether the buffer has grown to its size
        self._snapshot: tuple[Any, ...] | None = None
        self._settle()

    # -- reading

    def _settle(self) -> None:
        """Go on to the next epoch in which this lane has units, if this one's are used up."""
        while not self.exhausted and self.unit >= self.order.share(self.lane, self.epoch).stop:
            self.epoch += 1
            self.unit = self.order.share(self.lane, self.epoch).start

    @property
    def exhausted(self) -> bool:
        """Whether the last allowed epoch is read."""
        return 0 < self.max_epochs <= self.epoch

    def _read_unit(self, epoch: int, unit: int) -> tuple[list[Document], list[np.ndarray], list[int]]:
        """(keys, tokens, how many are repeated) of a unit's documents, in the order in which they are used."""
        group, local = self.order.locate(epoch, unit)
        size = self.order.unit_size
        tokens = self.source.encode(self.source.fetch(group, local, size, lambda: self.wants(group)))
        overlaps = self.source.overlaps(group, local, size)
        order = self.order.rows(epoch, group, local, len(tokens)).tolist()
        first = local * size
        if not self.config.framed:
            order = [i for i in order if len(tokens[i])]  # an entry of nothing
        keys = [(epoch, group, first + i) for i in order]
        return keys, [tokens[i] for i in order], [overlaps[i] for i in order] if any(overlaps) else []

    def read_ahead(self) -> None:
        """Have the pool read the next unit, unless it does."""
        if self.ahead is None and not self.exhausted and not self.source.mapped:
            self.ahead = self.pool.submit(self._read_unit, self.epoch, self.unit)

    def wants(self, group: int) -> set[int]:
        """The units of a group that this feed has yet to fetch in this epoch, or for its restored documents."""
        wanted = {unit for g, unit in list(self.unasked) if g == group}
        if not self.exhausted:
            span, share = self.order.span(self.epoch, group), self.order.share(self.lane, self.epoch)
            next_unit = self.unit + (1 if self.ahead is not None and self.ahead.done() else 0)
            wanted.update(range(max(span.start, next_unit) - span.start, min(span.stop, share.stop) - span.start))
        return wanted

    def _read(self) -> None:
        """Take in the next unit."""
        self.read_ahead()
        keys, tokens, overlaps = self._read_unit(self.epoch, self.unit) if self.ahead is None else self.ahead.result()
        lengths = list(map(len, tokens))
        self.documents.update(zip(keys, tokens))
        try:
            self.packer.push_many(keys, lengths)
        except ValueError as e:
            name, group = self.source.locate(keys[0][1])
            raise ValueError(f"{name}: group {group}: {e}") from None
        inserted, repeated = len(keys) * self.config.framed, sum(overlaps)
        if repeated:
            self.prefix.update((key, n + self.config.framed) for key, n in zip(keys, overlaps) if n)
        self.packer.inserted += inserted
        self.packer.repeated += repeated
        self.read += sum(lengths) - inserted - repeated
        self.num_documents += len(keys)
        self.ahead = self._snapshot = None
        self.unit += 1
        self._settle()

    def refill(self) -> None:
        """Read units until enough documents wait for the next row, or no more come."""
        packer, target = self.packer, self.config.buffer_size
        if not self.full:
            target = self.config.fill_target(self.lane, packer.row)
            self.full = target == self.config.buffer_size
        while (len(packer.docs) < target or not packer.ready) and not self.exhausted:
            self._read()
        if len(packer.docs) < target + self.order.unit_size // 2:
            self.read_ahead()

    # -- rows

    def next_row(self, index: int) -> Row | None:
        """The next row, or None when the bucket is dry: nothing more comes and what waits cannot fill a row."""
        self.refill()
        if not self.packer.ready:
            return None
        self._snapshot = None
        placements = self.packer.next_row()
        documents = [self._take(placement[0]) for placement in placements]
        return Row(self.lane, index, self.bucket, placements, documents, self)

    def _take(self, key: Document) -> tuple[Any, int, int]:
        """A placed document's tokens, or what will give them, how many first ones are gone, where live ones begin."""
        document = self.documents[key]
        if type(document) is int:
            document = self._restored(key)
        prefix = self.prefix.get(key, 0) if self.prefix else 0
        if key not in self.packer.docs:
            del self.documents[key]
            if prefix:
                del self.prefix[key]
            return document, self.gone.pop(key, 0) if self.gone else 0, prefix
        gone = self.gone.get(key, 0)
        useless = self.packer.docs[key][1] - self.config.overlap - gone  # before the context of the rest
        if type(document) is np.ndarray and document.base is None and 2 * useless > len(document):
            self.documents[key], self.gone[key] = document[useless:].copy(), gone + useless
        return document, gone, prefix

    def _restored(self, key: Document) -> Any:
        """What gives the tokens of a restored document. The pool fetches the texts of all others in its unit too."""
        size = self.order.unit_size
        group, unit = key[1], key[2] // size
        if self.source.mapped:
            document = self.tokens_of(key, self.documents[key])
            self.documents[key] = document
            return document
        keys = [k for k, d in self.documents.items() if type(d) is int and (k[1], k[2] // size) == (group, unit)]
        rows = [k[2] - unit * size for k in keys]

        def fetch() -> dict[int, Any]:
            texts = self.source.fetch(group, unit, size, lambda: self.wants(group))
            self.unasked.discard((group, unit))
            return {row: texts[row] for row in rows}

        future = self.pool.submit(fetch)
        for k, row in zip(keys, rows):
            self.documents[k] = _Deferred(future, row, self.documents[k])
        return self.documents[key]

    def tokens_of(self, key: Document, document: "_Deferred | int") -> np.ndarray:
        """Tokens of a restored document; ValueError if they are not as many as when it was saved."""
        if isinstance(document, int):
            raw, length = self.source.fetch(key[1], key[2], 1), document
        else:
            raw, length = [document.texts.result()[document.index]], document.length
        tokens = self.source.encode(raw)[0]
        if len(tokens) != length:
            name, local = self.source.locate(key[1])
            raise ValueError(f"{name}: document {key[2]} of row group {local} has {len(tokens):,} tokens, the "
                             f"checkpoint says {length:,}; the data or the tokenizer changed since the run began")
        if key in self.documents:
            self.documents[key] = tokens
        return tokens

    # -- state

    def snapshot(self) -> tuple[Any, ...]:
        """All that `feed_json` needs, taken in microseconds."""
        if self._snapshot is None:
            self._snapshot = self.epoch, self.unit, self.num_documents, self.read, self.packer.frozen()
        return self._snapshot

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `feed_json` made."""
        p = self.packer
        self.epoch, self.unit = state["epoch"], state["unit"]
        self.num_documents, self.read = state["documents"], state["read"]
        for name in COUNTS:
            setattr(p, name, state[name])
        for epoch, group, row, length, start, arrived in state["waiting"]:
            key = (epoch, group, row)
            p.push(key, length, start, arrived)
            self.documents[key] = p.document_length(length, start)
            self.unasked.add((group, row // self.order.unit_size))
            if overlap := sum(self.source.overlaps(group, row, 1)):
                self.prefix[key] = overlap + self.config.framed
        self._settle()


COUNTS = ("row", "inserted", "repeated", "cropped", "padded")  # of a packer


def feed_json(snapshot: tuple[Any, ...]) -> dict[str, Any]:
    """A feed's part of a cursor."""
    *numbers, packer = snapshot
    return {**dict(zip(("epoch", "unit", "documents", "read"), numbers)),
            **{name: getattr(packer, name) for name in COUNTS}, "pending": packer.pending,
            "waiting": [[*key, length, start, arrived] for key, length, start, arrived in packer.waiting()]}


def ledger(cursors: Sequence[Cursor], T: int) -> dict[str, dict[str, int]]:
    """The accounts of some lanes' cursors, in tokens: {bucket: {read, bos, repeated, emitted, cropped, pending, padded,
    rows, documents, epochs}}. In each, read + bos + repeated = emitted + cropped + pending; padding stands apart."""
    total: dict[str, dict[str, int]] = {}
    for cursor in cursors:
        for bucket, feed in cursor["buckets"].items():
            account = total.setdefault(bucket, dict.fromkeys(LEDGER, 0))
            account["bos"] += feed["inserted"]
            account["emitted"] += feed["row"] * (T + 1) - feed["padded"]
            account["rows"] += feed["row"]
            account["epochs"] = max(account["epochs"], feed["epoch"])
            for name in ("read", "repeated", "cropped", "pending", "padded", "documents"):
                account[name] += feed[name]
    return total


class Stream:
    """Some lanes of the stream: those of a rank, or all of them.

    With several sources a curriculum says which bucket a row comes from. `drop_dry`: a lane whose due bucket is dry
    drops it and goes on with the others; otherwise the lane ends there. `new_curriculum`: cursors may be of another
    curriculum; what they consumed stays consumed, and buckets that are new begin at their beginning.
    Raises ValueError when cursors are of another stream: the error says what differs.
    """

    def __init__(self, config: StreamConfig, sources: Mapping[str, Source], lanes: Sequence[int], *, tokenizer: str,
                 cursors: Sequence[Cursor] | None = None, num_threads: int = 4, drop_dry: bool = False,
                 new_curriculum: bool = False):
        self.config, self.lanes, self.drop_dry = config, list(lanes), drop_dry
        self.identity = {**config.identity(), "tokenizer": tokenizer,
                         **{f"data {name}": source.fingerprint for name, source in sources.items()}}
        self.mixer: Mixer | None = None
        if config.curriculum is not None:
            config.curriculum.check_buckets(sources)
            sources = {bucket: sources[bucket] for bucket in config.curriculum.buckets}
            self.mixer = Mixer(config.curriculum, T=config.T, V=config.V, seed=config.seed)
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self.rows = dict.fromkeys(self.lanes, 0)
        self.dropped: dict[int, frozenset[str]] = dict.fromkeys(self.lanes, frozenset())  # dry buckets of each lane
        self.parked: dict[int, dict[str, Any]] = {lane: {} for lane in self.lanes}  # feeds of buckets no longer mixed
        self.feeds: dict[str, dict[int, Feed]] = {}
        for bucket, source in sources.items():
            order = Order(source.groups, bucket=bucket, config=config)
            self.feeds[bucket] = {lane: Feed(config, bucket=bucket, lane=lane, source=source, order=order,
                                             pool=self.pool) for lane in self.lanes}
        self.mapped = all(source.mapped for source in sources.values())
        for cursor in cursors or ():
            self._restore(cursor, new_curriculum)
        found = [cursor["lane"] for cursor in cursors or ()]
        if cursors is not None and (missing := set(self.lanes) - set(found)):
            raise ValueError(f"there is no cursor of lanes {sorted(missing)}; give those of all ranks of a checkpoint")
        if len(found) > len(set(found)):
            raise ValueError(f"there are two cursors of a lane; give those of one checkpoint, got lanes {found}")

    def _restore(self, cursor: Cursor, new_curriculum: bool) -> None:
        lane = cursor["lane"]
        if cursor["format"] != FORMAT:
            raise ValueError(f"cursor of lane {lane}: format {cursor['format']}, expected {FORMAT}")
        theirs = cursor["stream"]
        differ = {k for k in {*theirs, *self.identity} if theirs.get(k) != self.identity.get(k)}
        if new_curriculum:
            differ -= {"curriculum", *(k for k in differ if k not in theirs or k not in self.identity)}
        if differ:
            told = [f"{k}: {theirs.get(k)} there, {self.identity.get(k)} here" for k in sorted(differ)]
            raise ValueError(f"cursor of lane {lane} is of another stream ({'; '.join(told)}); start a new run "
                             f"(--model-tag)")
        if lane not in self.rows:
            return
        self.rows[lane] = cursor["row"]
        if theirs["curriculum"] == self.identity["curriculum"]:
            self.dropped[lane] = frozenset(cursor["dropped"])
        for bucket, feed in cursor["buckets"].items():
            if bucket in self.feeds:
                self.feeds[bucket][lane].restore(feed)
            else:
                self.parked[lane][bucket] = feed

    def _bucket(self, lane: int, row: int) -> str | None:
        """The bucket that a lane's row comes from; None when all of them are dry."""
        dropped = self.dropped[lane]
        if self.mixer is not None:
            return self.mixer.bucket(lane, row, dropped)
        return next((bucket for bucket in self.feeds if bucket not in dropped), None)

    def next_rows(self, num_rows: int) -> list[Row]:
        """The next `num_rows` rows of each lane, lane after lane; fewer where a lane is dry."""
        if not self.mapped:
            self._read_ahead(num_rows)
        rows = [self._next_row(lane) for lane in self.lanes for _ in range(num_rows)]
        return [row for row in rows if row is not None]

    def _read_ahead(self, num_rows: int) -> None:
        """Have the pool read for all lanes whose next rows wait for it."""
        for lane in self.lanes:
            for bucket in {self._bucket(lane, self.rows[lane] + i) for i in range(num_rows)} - {None}:
                feed = self.feeds[bucket][lane]  # type: ignore[index]
                if not feed.packer.ready:
                    feed.read_ahead()

    def position(self, bucket: str, cursor: Cursor) -> int:
        """The group that a lane reads next."""
        feed, order = cursor["buckets"][bucket], self.feeds[bucket][cursor["lane"]].order
        return order.locate(feed["epoch"], feed["unit"])[0]

    def _next_row(self, lane: int) -> Row | None:
        index = self.rows[lane]
        while (bucket := self._bucket(lane, index)) is not None:
            row = self.feeds[bucket][lane].next_row(index)
            if row is not None:
                self.rows[lane] = index + 1
                return row
            if not self.drop_dry:
                return None
            self.dropped[lane] |= {bucket}
        return None

    def dry_bucket(self, lane: int) -> str | None:
        """The bucket for which a lane that has no next row waits; None where all of them are dry."""
        return self._bucket(lane, self.rows[lane])

    def snapshot(self) -> list[tuple[Any, ...]]:
        """The state of all lanes, for `cursors`; cheap enough for every step."""
        return [(lane, self.rows[lane], self.dropped[lane],
                 {bucket: feeds[lane].snapshot() for bucket, feeds in self.feeds.items()}) for lane in self.lanes]

    def cursors(self, snapshot: list[tuple[Any, ...]] | None = None) -> list[Cursor]:
        """The cursors of these lanes, now or when a snapshot was taken: JSON values."""
        return [{"format": FORMAT, "lane": lane, "row": row, "stream": self.identity, "dropped": sorted(dropped),
                 "buckets": {**self.parked[lane], **{bucket: feed_json(feed) for bucket, feed in feeds.items()}}}
                for lane, row, dropped, feeds in (self.snapshot() if snapshot is None else snapshot)]

    def close(self) -> None:
        """Stop reading; waits for what is being read."""
        self.pool.shutdown(cancel_futures=True)


def row_digest(index: int, tokens: np.ndarray, live: np.ndarray) -> int:
    """8-byte BLAKE2b (as u64) of (u64 index of the row in its step, tokens u32 (T + 1,), target mask u8 (T,)), all
    little-endian. The batch digest of a step is the sum over its rows mod 2^64."""
    h = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8)
    h.update(tokens.astype("<u4", copy=False).tobytes())
    h.update(live.astype("u1", copy=False).tobytes())
    return int.from_bytes(h.digest(), "little")
