"""
The stream: which tokens are in row k of lane l, for ever.

The law. Row k of lane l is a pure function of the data, the tokenizer and the `StreamConfig`. World size, ranks, batch
size, threads, prefetching and restarts come after it and cannot change it, because nothing here knows them.

    step s: R = nV rows;   lane 0's rows sn .. sn+n-1,  lane 1's rows sn .. sn+n-1,  ...
    rank r of W:           the rows of lanes floor(rV/W) .. floor((r+1)V/W) - 1

so the ranks' rows, put one after another, are the same for any W.

A lane has, for each bucket, a **feed** (feed.py): its position in the order, a packer with the documents that wait, and
the accounts. Their JSON is the lane's **cursor**; V cursors are all the state there is.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from nanochat.feed import COUNTS, Feed, feed_json
from nanochat.mixing import Mixer
from nanochat.order import Order, StreamConfig
from nanochat.rows import Document, Row
from nanochat.sources import Source

__all__ = ["COUNTS", "Cursor", "Document", "Feed", "Row", "Stream", "feed_json", "ledger", "row_digest"]

FORMAT = 3  # of cursors
TURN_ROWS = 16  # that a lane packs before the next one does
U32 = np.dtype("<u4")
LEDGER = ("read", "bos", "repeated", "emitted", "cropped", "pending", "padded", "rows", "documents", "epochs")
Cursor = dict[str, Any]


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


def check_cursors(cursors: Sequence[Cursor], lanes: Sequence[int], identity: Mapping[str, Any], *,
                  new_curriculum: bool = False) -> None:
    """ValueError unless they are of this stream, one of each lane and maybe of others; what differs is told.
    `new_curriculum`: their curriculum may be another one, of other buckets."""
    for cursor in cursors:
        lane, theirs = cursor["lane"], cursor["stream"]
        if cursor["format"] != FORMAT:
            raise ValueError(f"cursor of lane {lane}: format {cursor['format']}, expected {FORMAT}")
        differ = {k for k in {*theirs, *identity} if theirs.get(k) != identity.get(k)}
        if new_curriculum and "order" not in theirs:
            differ -= {"curriculum", *(k for k in differ if k not in theirs or k not in identity)}
        if differ:
            told = [f"{k}: {theirs.get(k)} there, {identity.get(k)} here" for k in sorted(differ)]
            raise ValueError(f"cursor of lane {lane} is of another stream ({'; '.join(told)}); start a new run "
                             f"(--model-tag)")
    found = [cursor["lane"] for cursor in cursors]
    if missing := set(lanes) - set(found):
        raise ValueError(f"there is no cursor of lanes {sorted(missing)}; give those of all ranks of a checkpoint")
    if len(found) > len(set(found)):
        raise ValueError(f"there are two cursors of a lane; give those of one checkpoint, got lanes {found}")


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
        self.only = next(iter(self.feeds.values())) if self.mixer is None else None  # feeds of a single bucket
        self.mapped = all(source.mapped for source in sources.values())
        if cursors is not None:
            check_cursors(cursors, self.lanes, self.identity, new_curriculum=new_curriculum)
            for cursor in cursors:
                if cursor["lane"] in self.rows:
                    self._restore(cursor)

    def _restore(self, cursor: Cursor) -> None:
        lane = cursor["lane"]
        self.rows[lane] = cursor["row"]
        if cursor["stream"]["curriculum"] == self.identity["curriculum"]:
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
        for bucket in self.feeds:
            if bucket not in dropped:
                return bucket
        return None

    def next_rows(self, num_rows: int) -> list[Row]:
        """The next `num_rows` rows of each lane, lane after lane; fewer where a lane is dry."""
        if not self.mapped:
            self._read_ahead(num_rows)
        rows: list[Row] = []
        for lane in self.lanes:
            rows += self._lane_rows(lane, num_rows)
        return rows

    def steps(self, num_rows: int) -> Iterator[tuple[list[Row], list[tuple[Any, ...]]]]:
        """For ever: (the next `num_rows` rows of each lane, lane after lane, fewer where a lane is dry; a snapshot of
        the state behind them). What goes wrong is raised in place of the step in which it does.

        Rows of a memory map hold no tokens, so a lane packs those of several steps while what it needs is in the
        processor's caches."""
        turn = 1  # the first step should not wait for others
        while True:
            if not self.mapped:
                self._read_ahead(num_rows)
            found: list[tuple[list[Row], list[tuple[Any, ...]]]] = [([], []) for _ in range(turn)]
            error: Exception | None = None
            for lane in self.lanes:
                for i, (rows, ends) in enumerate(found):
                    try:
                        rows += self._lane_rows(lane, num_rows)
                    except Exception as e:
                        error = e
                        del found[i:]
                        break
                    ends.append(self._end(lane))
            while found:
                yield found.pop(0)
            if error is not None:
                raise error
            turn = max(1, TURN_ROWS // num_rows) if self.mapped else 1

    def _read_ahead(self, num_rows: int) -> None:
        """Have the pool read for all lanes whose next rows wait for it."""
        for lane in self.lanes:
            for bucket in {self._bucket(lane, self.rows[lane] + i) for i in range(num_rows)} - {None}:
                feed = self.feeds[bucket][lane]  # type: ignore[index]
                if not feed.packer.ready:
                    feed.read_ahead()

    @property
    def buckets(self) -> list[str]:
        """Those that rows come from."""
        return list(self.feeds)

    def position(self, bucket: str, cursor: Cursor) -> int:
        """The group that a lane reads next."""
        feed, order = cursor["buckets"][bucket], self.feeds[bucket][cursor["lane"]].order
        return order.locate(feed["epoch"], feed["unit"])[0]

    def _lane_rows(self, lane: int, num: int) -> list[Row]:
        """A lane's next rows; fewer where it is dry."""
        if self.only is not None and not self.dropped[lane]:  # the same as below, for one bucket
            rows = self.only[lane].next_rows(self.rows[lane], num)
            self.rows[lane] += len(rows)
        else:
            rows = []
        while len(rows) < num:
            index = self.rows[lane]
            bucket = self._bucket(lane, index)
            if bucket is None:
                break
            more = self.feeds[bucket][lane].next_rows(index, num - len(rows) if self.mixer is None else 1)
            rows += more
            self.rows[lane] = index + len(more)
            if not more:
                if not self.drop_dry:
                    break
                self.dropped[lane] |= {bucket}
        return rows

    def dry_bucket(self, lane: int) -> str | None:
        """The bucket for which a lane that has no next row waits; None where all of them are dry."""
        return self._bucket(lane, self.rows[lane])

    def snapshot(self) -> list[tuple[Any, ...]]:
        """The state of all lanes, for `cursors`; cheap enough for every step."""
        return list(map(self._end, self.lanes))

    def _end(self, lane: int) -> tuple[Any, ...]:
        feeds = {bucket: feeds[lane].snapshot() for bucket, feeds in self.feeds.items()}
        return lane, self.rows[lane], self.dropped[lane], feeds

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
    h.update((tokens.view(U32) if tokens.dtype == np.int32 else np.ascontiguousarray(tokens, U32)).data)
    h.update(np.ascontiguousarray(live, np.uint8).data)
    return int.from_bytes(h.digest(), "little")
