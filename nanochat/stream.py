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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nanochat.order import Order, StreamConfig
from nanochat.packing import Placement
from nanochat.sources import Source

FORMAT = 1  # of cursors
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
    documents: list[tuple[Any, int]]  # (ids or a _Deferred, how many of the document's first ids are not there)
    feed: "Feed"

    def copy(self, bos: int, tokens: np.ndarray, live: np.ndarray, doc_ids: np.ndarray | None = None) -> None:
        """Write the row's tokens (T + 1,), 0 into `live` (T + 1,) u8 where a token is no target, and into `doc_ids`
        (T + 1,) int32, if given, which of the row's documents each token belongs to."""
        at = 0
        own_bos = self.feed.packer.own_bos
        for number, ((key, start, length, off), (document, gone)) in enumerate(zip(self.placements, self.documents)):
            ids = document if isinstance(document, np.ndarray) else self.feed.tokens_of(key, document)
            end = at + length
            if start == 0 or own_bos:
                tokens[at] = bos
                first = max(start - 1 - gone, 0)  # token t of a document is ids[t - 1 - gone]
                tokens[at + 1:end] = ids[first:first + length - 1]
            else:
                tokens[at:end] = ids[start - 1 - gone:start - 1 - gone + length]
            if off:
                live[at + 1:at + 1 + off] = 0
            if doc_ids is not None:
                doc_ids[at:end] = number
            at = end


class Feed:
    """One bucket in one lane: position in the order, packer, accounts."""

    def __init__(self, config: StreamConfig, *, bucket: str, lane: int, source: Source, order: Order,
                 pool: ThreadPoolExecutor):
        self.config, self.bucket, self.lane, self.source, self.order = config, bucket, lane, source, order
        self.pool = pool
        self.packer = config.new_packer()
        self.documents: dict[Document, Any] = {}  # that wait: ids (n,), a _Deferred, or an int: restored, so long
        self.gone: dict[Document, int] = {}  # of waiting documents whose first ids are used and dropped: how many
        self.unasked: set[tuple[int, int]] = set()  # (group, unit) of restored documents not fetched yet
        self.epoch, self.unit = 0, order.share(lane, 0).start
        self.num_documents = self.read = 0  # documents and their tokens, BOS not counted
        self.ahead: Future[list[tuple[Document, np.ndarray]]] | None = None
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
        return 0 < self.config.max_epochs <= self.epoch

    def _read_unit(self, epoch: int, unit: int) -> list[tuple[Document, np.ndarray]]:
        group, local = self.order.locate(epoch, unit)
        size = self.order.unit_size
        ids = self.source.encode(self.source.fetch(group, local, size, lambda: self.wants(group)))
        order = self.order.rows(epoch, group, local, len(ids)).tolist()
        return [((epoch, group, local * size + i), ids[i]) for i in order]

    def read_ahead(self) -> None:
        """Have the pool read the next unit, unless it does."""
        if self.ahead is None and not self.exhausted:
            self.ahead = self.pool.submit(self._read_unit, self.epoch, self.unit)

    def wants(self, group: int) -> set[int]:
        """The units of a group that this feed has yet to fetch in this epoch, or for its restored documents."""
        wanted = {unit for g, unit in list(self.unasked) if g == group}
        if not self.exhausted:
            span, share = self.order.span(self.epoch, group), self.order.share(self.lane, self.epoch)
            next_unit = self.unit + (1 if self.ahead is not None and self.ahead.done() else 0)
            wanted.update(range(max(span.start, next_unit) - span.start, min(span.stop, share.stop) - span.start))
        return wanted

    def refill(self) -> None:
        """Read units until enough documents wait for the next row, or no more come."""
        target = self.config.fill_target(self.lane, self.packer.row)
        while (len(self.packer) < target or not self.packer.ready) and not self.exhausted:
            self.read_ahead()
            assert self.ahead is not None
            for key, ids in self.ahead.result():
                self.documents[key] = ids
                self.packer.push(key, len(ids) + 1)
                self.read += len(ids)
                self.num_documents += 1
            self.ahead = None
            self.unit += 1
            self._settle()
        if len(self.packer) < target + self.order.unit_size // 2:
            self.read_ahead()

    # -- rows

    def next_row(self, index: int) -> Row | None:
        """The next row, or None when the bucket is dry: nothing more comes and what waits cannot fill a row."""
        self.refill()
        if not self.packer.ready:
            return None
        placements = self.packer.next_row()
        documents = [self._take(key) for key, _, _, _ in placements]
        return Row(self.lane, index, self.bucket, placements, documents, self)

    def _take(self, key: Document) -> tuple[Any, int]:
        """A placed document's ids, or what will give them, and how many of the first are not there."""
        if isinstance(self.documents[key], int):
            self._defer(key)
        if key not in self.packer.docs:
            return self.documents.pop(key), self.gone.pop(key, 0)
        document, gone = self.documents[key], self.gone.get(key, 0)
        useless = self.packer.docs[key][1] - 1 - self.config.overlap - gone  # before the context of the rest
        if isinstance(document, np.ndarray) and document.flags.owndata and 2 * useless > len(document):
            self.documents[key], self.gone[key] = document[useless:].copy(), gone + useless
        return document, gone

    def _defer(self, key: Document) -> None:
        """Have the pool fetch the texts of this restored document and of all others in its unit."""
        size = self.order.unit_size
        group, unit = key[1], key[2] // size
        keys = [k for k, d in self.documents.items() if isinstance(d, int) and (k[1], k[2] // size) == (group, unit)]
        rows = [k[2] - unit * size for k in keys]

        def fetch() -> dict[int, Any]:
            texts = self.source.fetch(group, unit, size, lambda: self.wants(group))
            self.unasked.discard((group, unit))
            return {row: texts[row] for row in rows}

        future = self.pool.submit(fetch)
        for k, row in zip(keys, rows):
            self.documents[k] = _Deferred(future, row, self.documents[k])

    def tokens_of(self, key: Document, document: _Deferred) -> np.ndarray:
        """Token ids of a restored document; ValueError if they are not as many as when it was saved."""
        ids = self.source.encode([document.texts.result()[document.index]])[0]
        if len(ids) + 1 != document.length:
            name, local = self.source.locate(key[1])
            raise ValueError(f"{name}: document {key[2]} of row group {local} has {len(ids):,} tokens, the checkpoint "
                             f"says {document.length - 1:,}; the data or the tokenizer changed since the run began")
        if key in self.documents:
            self.documents[key] = ids
        return ids

    # -- state

    def snapshot(self) -> tuple[Any, ...]:
        """All that `feed_json` needs, taken in microseconds."""
        p = self.packer
        return (self.epoch, self.unit, self.num_documents, self.read, p.row, p.inserted, p.repeated, p.cropped,
                p.pending, p.waiting())

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `feed_json` made."""
        p = self.packer
        self.epoch, self.unit = state["epoch"], state["unit"]
        self.num_documents, self.read = state["documents"], state["read"]
        p.row, p.inserted, p.repeated, p.cropped = (state[k] for k in ("row", "inserted", "repeated", "cropped"))
        for epoch, group, row, length, start, arrived in state["waiting"]:
            key = (epoch, group, row)
            p.push(key, length, start, arrived)
            self.documents[key] = p.document_length(length, start)
            self.unasked.add((group, row // self.order.unit_size))
        self._settle()


def feed_json(snapshot: tuple[Any, ...]) -> dict[str, Any]:
    """A feed's part of a cursor."""
    names = ("epoch", "unit", "documents", "read", "row", "inserted", "repeated", "cropped", "pending")
    waiting = [[*key, length, start, arrived] for key, length, start, arrived in snapshot[-1]]
    return {**dict(zip(names, snapshot)), "waiting": waiting}


def ledger(cursors: Sequence[Cursor], T: int) -> dict[str, dict[str, int]]:
    """The accounts of some lanes' cursors, in tokens: {bucket: {read, bos, repeated, emitted, cropped, pending, rows,
    documents, epochs}}. In each, read + bos + repeated = emitted + cropped + pending."""
    total: dict[str, dict[str, int]] = {}
    for cursor in cursors:
        for bucket, feed in cursor["buckets"].items():
            account = total.setdefault(bucket, dict.fromkeys(LEDGER, 0))
            account["bos"] += feed["documents"] + feed["inserted"]
            account["emitted"] += feed["row"] * (T + 1)
            account["rows"] += feed["row"]
            account["epochs"] = max(account["epochs"], feed["epoch"])
            for name in ("read", "repeated", "cropped", "pending", "documents"):
                account[name] += feed[name]
    return total


LEDGER = ("read", "bos", "repeated", "emitted", "cropped", "pending", "rows", "documents", "epochs")


class Stream:
    """Some lanes of the stream: those of a rank, or all of them.

    Raises ValueError when cursors are of another stream: the error says what differs.
    """

    def __init__(self, config: StreamConfig, sources: Mapping[str, Source], lanes: Sequence[int], *, tokenizer: str,
                 cursors: Sequence[Cursor] | None = None, num_threads: int = 4):
        self.config, self.lanes = config, list(lanes)
        self.identity = {**asdict(config), "tokenizer": tokenizer,
                         **{f"data {name}": source.fingerprint for name, source in sources.items()}}
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self.rows = dict.fromkeys(self.lanes, 0)
        self.feeds: dict[str, dict[int, Feed]] = {}
        for bucket, source in sources.items():
            order = Order(source.groups, bucket=bucket, config=config)
            self.feeds[bucket] = {lane: Feed(config, bucket=bucket, lane=lane, source=source, order=order,
                                             pool=self.pool) for lane in self.lanes}
        for cursor in cursors or ():
            self._restore(cursor)
        found = [cursor["lane"] for cursor in cursors or ()]
        if cursors is not None and (missing := set(self.lanes) - set(found)):
            raise ValueError(f"there is no cursor of lanes {sorted(missing)}; give those of all ranks of a checkpoint")
        if len(found) > len(set(found)):
            raise ValueError(f"there are two cursors of a lane; give those of one checkpoint, got lanes {found}")

    def _restore(self, cursor: Cursor) -> None:
        lane = cursor["lane"]
        if cursor["format"] != FORMAT:
            raise ValueError(f"cursor of lane {lane}: format {cursor['format']}, expected {FORMAT}")
        theirs = cursor["stream"]
        differ = [f"{k}: {theirs.get(k)} there, {self.identity.get(k)} here" for k in sorted({*theirs, *self.identity})
                  if theirs.get(k) != self.identity.get(k)]
        if differ:
            raise ValueError(f"cursor of lane {lane} is of another stream ({'; '.join(differ)}); start a new run "
                             f"(--model-tag)")
        if lane not in self.rows:
            return
        self.rows[lane] = cursor["row"]
        for bucket, feed in cursor["buckets"].items():
            self.feeds[bucket][lane].restore(feed)

    def _bucket(self, lane: int) -> str:
        """The bucket that a lane's next row comes from."""
        return next(iter(self.feeds))

    def next_rows(self, num_rows: int) -> list[Row]:
        """The next `num_rows` rows of each lane, lane after lane; fewer where a lane is dry."""
        for bucket in self.feeds:
            for feed in self.feeds[bucket].values():
                if not feed.packer.ready:
                    feed.read_ahead()
        rows = [self._next_row(lane) for lane in self.lanes for _ in range(num_rows)]
        return [row for row in rows if row is not None]

    def position(self, bucket: str, cursor: Cursor) -> int:
        """The group that a lane reads next."""
        feed, order = cursor["buckets"][bucket], self.feeds[bucket][cursor["lane"]].order
        return order.locate(feed["epoch"], feed["unit"])[0]

    def _next_row(self, lane: int) -> Row | None:
        row = self.feeds[self._bucket(lane)][lane].next_row(self.rows[lane])
        self.rows[lane] += row is not None
        return row

    def snapshot(self) -> list[tuple[int, int, dict[str, tuple[Any, ...]]]]:
        """The state of all lanes, for `cursors`; cheap enough for every step."""
        return [(lane, self.rows[lane], {bucket: feeds[lane].snapshot() for bucket, feeds in self.feeds.items()})
                for lane in self.lanes]

    def cursors(self, snapshot: list[tuple[int, int, dict[str, tuple[Any, ...]]]] | None = None) -> list[Cursor]:
        """The cursors of these lanes, now or when a snapshot was taken: JSON values."""
        return [{"format": FORMAT, "lane": lane, "row": row, "stream": self.identity,
                 "buckets": {bucket: feed_json(feed) for bucket, feed in feeds.items()}}
                for lane, row, feeds in (self.snapshot() if snapshot is None else snapshot)]

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
