"""
The stream: which tokens are in row k of lane l.

**The law.** Row k of lane l is a pure function of the data, the tokenizer and the `StreamConfig`.
World size, rank, batch size, number of threads and restarts have no effect on it.

    step s: R = nV rows;   lane 0's rows sn .. sn+n-1,  lane 1's rows sn .. sn+n-1,  ...
    rank r of W:           the rows of lanes floor(rV/W) .. floor((r+1)V/W) - 1

So the ranks' rows, concatenated in rank order, are the same for every W.

A lane has one **feed** per bucket. A feed holds its position in the order of the data, a packer,
the tokens of the documents that are pending in that packer, and the **ledger**: counts that show
where every token went.

    order --a unit: at most 64 documents--> source.read: ids --> packer (lengths) and documents (ids) --> next row
                                                             until enough are pending

A feed finishes each epoch before it starts the next one: it reads its share to the end, packs until
the pending documents cannot fill a row, and completes one last row with documents of the next
epoch.

The JSON of a lane's feeds is its **cursor**. The V cursors are the whole state of the stream. A
cursor lists the pending documents with their lengths, so a restored feed can pack at once while its
pool reads their tokens.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from nanochat.common import check_shape, differences
from nanochat.curriculum import Mixer
from nanochat.order import Order, StreamConfig, open_order
from nanochat.packing import Piece, Placement
from nanochat.rows import Document, Packed, Row, assemble
from nanochat.sources import Source
from nanochat.tokenizer import TokenizerSettings

FORMAT = 5  # of cursors
LEDGER = (  # the counts of a bucket
    "read",  # tokens of the documents that were read, as stored
    "bos",  # tokens put in front of documents and of their continuations
    "repeated",  # tokens read or emitted a second time, as context
    "emitted",  # tokens in rows
    "cropped",  # tokens dropped
    "pending",  # tokens read, but not yet in a row
    "padded",  # tokens in rows, from no document
    "rows",  # packed
    "documents",  # read
    "epochs",  # the number of the epoch that the lane furthest ahead reads
)
# the counts of a feed that make up the ledger; row: how many this feed has packed
FEED_SHAPE = dict.fromkeys(
    ("epoch", "documents", "read", "row", "inserted", "repeated", "cropped", "padded", "pending"),
    int,
)
CURSOR_SHAPE = {
    "format": int,
    "lane": int,
    "stream": dict,
    "row": int,  # how many the lane has produced
    "dropped": [str],
    "buckets": dict,
}

Cursor = dict[str, Any]  # of this shape


class DocumentKey(NamedTuple):
    """How cursors and packers name a document."""

    epoch: int
    group: int
    number: int  # in the group, from 0


class FeedState(NamedTuple):
    """A copy of a feed's state at the end of a step."""

    epoch: int
    place: int  # of the next unit
    num_documents: int
    read: int  # tokens of these documents
    counts: dict[str, int]  # of the packer
    waiting: dict[DocumentKey, Piece]

    def to_json(self) -> dict[str, Any]:
        """A feed's part of a cursor."""
        return {
            "epoch": self.epoch,
            "place": self.place,
            "documents": self.num_documents,
            "read": self.read,
            **self.counts,
            "waiting": [[*key, *piece] for key, piece in self.waiting.items()],
        }


class LaneState(NamedTuple):
    """A copy of a lane's state at the end of a step."""

    lane: int
    num_rows: int  # that the lane has produced
    dropped: frozenset[str]  # buckets that have run dry
    feeds: Any  # {bucket: FeedState}; another kind of stream has its own counts


class AnyStreamConfig(Protocol):
    """What decides a stream's rows: a `StreamConfig`, or its counterpart in another order."""

    @property
    def T(self) -> int: ...
    @property
    def V(self) -> int: ...
    @property
    def framed(self) -> bool: ...
    def identity(self) -> dict[str, Any]: ...


class OtherStreamConfig(AnyStreamConfig, Protocol):
    """A configuration of an order other than that of lanes."""

    def open(
        self, sources: Mapping[str, Source], lanes: Sequence[int], **arguments: Any
    ) -> "AnyStream": ...


class AnyStream(Protocol):
    """What a loader needs from a stream, in the order of lanes (`Stream`) or in any other.

    `Stream` documents the methods.
    """

    @property
    def config(self) -> AnyStreamConfig: ...

    lanes: list[int]
    buckets: list[str]
    mixer: Mixer | None  # None without a curriculum

    def next_rows(self, num_rows: int) -> list[Row]: ...
    def dry_bucket(self, lane: int) -> str | None: ...
    def state(self) -> list[LaneState]: ...
    def cursors(self, state: list[LaneState] | None = None) -> list[Cursor]: ...
    def close(self) -> None: ...


class Unit(NamedTuple):
    """What a lane reads at once."""

    stop: int  # the place after it
    keys: list[DocumentKey]  # of its documents, in the order of use
    lengths: list[int]
    documents: list[Document]  # as the feed keeps them


class Feed:
    """One bucket in one lane.

    `pool` prefetches the next unit; without a pool, each unit is read when it is needed.

        method                            thread                touches
        __init__, restore                 the one that opens    all of the feed
                                          the stream
        prefetch, pack, next_row, state   the loader's          all of the feed, one call at a time
        _fetch, _fetch_pending            the pool's            only what never changes after `__init__`:
          and what they call                                    config, source, order; and of the packer
                                                                max_tokens, own_bos, whole_length

    Without a loader (in validation, a plan, `find`, --skip-steps), the thread that opens the stream
    calls everything but the pool's. A rank has feeds of its own lanes; when a run starts, rank 0 also
    opens all lanes, for the first cursors and the plan. Sources, orders and the pool are shared with
    other lanes.
    """

    def __init__(
        self,
        config: StreamConfig,
        *,
        bucket: str,
        lane: int,
        source: Source,
        order: Order,
        pool: Executor | None,
    ):
        self.config = config
        self.bucket = bucket
        self.lane = lane
        self.source = source
        self.order = order
        self.pool = pool
        self.max_epochs = config.epochs(bucket)
        self.packer = config.new_packer()
        # the pending documents, with the keys of `packer.waiting()`; after a resume, a Future of those
        # of a group that the pool still reads, from which each is popped once
        self.documents: dict[DocumentKey, Document | Future[dict[DocumentKey, Document]]] = {}
        self.epoch = 0
        self.share = order.share(lane, 0)  # this lane's places in the current epoch
        self.place = self.share.start  # of the next unit
        self.num_documents = 0
        self.read = 0  # tokens of these documents, not counting BOS and repeated tokens
        # the prefetched unit, which begins at (epoch, place): these change only while it is None
        self.unit: Future[Unit] | None = None

    # -- reading

    def _next_epoch(self) -> bool:
        """Begin the next epoch, skipping those whose share for this lane is empty.

        False if no epoch is left.
        """
        while self.max_epochs == 0 or self.epoch + 1 < self.max_epochs:
            self.epoch += 1
            self.share = self.order.share(self.lane, self.epoch)
            self.place = self.share.start
            if self.share:
                return True
        return False

    def _fetch(self, epoch: int, place: int, stop: int) -> Unit:
        """Read the unit at a place."""
        groups, numbers, keep = self.order.unit(epoch, place, stop)

        # each group is read once
        positions_of: dict[int, list[int]] = {}
        for position, group in enumerate(groups.tolist()):
            positions_of.setdefault(group, []).append(position)
        documents: dict[int, Document] = {}  # by position in the unit
        for group, positions in positions_of.items():
            of_group = self._read(group, numbers[positions], keep)
            documents.update(zip(positions, of_group))

        # the unit, in the order of use
        in_order = [documents[position] for position in range(len(numbers))]
        keys = [
            DocumentKey(epoch, group, number)
            for group, number in zip(groups.tolist(), numbers.tolist())
        ]
        lengths = [len(document.ids) for document in in_order]
        kept = [self._kept(document) for document in in_order]
        return Unit(place + len(numbers), keys, lengths, kept)

    def _read(self, group: int, numbers: np.ndarray, keep: int = 0) -> list[Document]:
        """`Source.read`, with a mark on the documents that are left out of the loss."""
        documents = self.source.read(group, numbers, keep)
        silent = self.source.without.get(group)
        if silent is None:
            return documents
        marked = []
        for document, number in zip(documents, numbers):
            marked.append(document._replace(silent=bool(silent[number])))
        return marked

    def prefetch(self) -> None:
        """Have the pool read the next unit if the packer will soon want it: if it has less than it
        wants now and a margin."""
        target = self.config.fill_target(self.packer.num_rows)
        if self.packer.wants(target + self.order.margin):
            self._submit_unit()

    def _submit_unit(self) -> None:
        """Have the pool read the next unit of the epoch, unless it is already doing so."""
        has_more = self.place < self.share.stop
        if self.pool and has_more and self.unit is None:
            self._expect()
            call = copy_context().run  # a stop ends its waits, too
            self.unit = self.pool.submit(call, self._fetch, self.epoch, self.place, self.share.stop)

    def _expect(self) -> None:
        """Tell a source that fetches its data from far away what comes next, in this epoch and at
        the start of the following one."""
        ahead = self.source.ahead
        if not ahead:
            return
        groups = self.order.groups_ahead(self.epoch, self.place, self.share.stop, ahead)
        is_last = 0 < self.max_epochs <= self.epoch + 1
        if len(groups) < ahead and not is_last:
            share = self.order.share(self.lane, self.epoch + 1)
            missing = ahead - len(groups)
            groups += self.order.groups_ahead(self.epoch + 1, share.start, share.stop, missing)
        self.source.expect(groups)

    def _fill(self) -> None:
        """Push units of the current epoch until the packer wants no more.

        RuntimeError or CancelledError once the pool is closed; else what reading or pushing raises.
        """
        target = self.config.fill_target(self.packer.num_rows)
        while self.place < self.share.stop and self.packer.wants(target):
            # the next unit, read by the pool if there is one
            self._submit_unit()
            if self.unit is None:
                unit = self._fetch(self.epoch, self.place, self.share.stop)
            else:
                unit = self.unit.result()
                self.unit = None

            for key, length, document in zip(unit.keys, unit.lengths, unit.documents):
                if length > 0:  # a stored entry may be empty
                    self._push(key, length, document)
            self.place = unit.stop

    def _push(self, key: DocumentKey, length: int, document: Document) -> None:
        """Give a document of `length` tokens to the packer, and enter it in the accounts.

        ValueError, which names its file, if no row can hold it.
        """
        try:
            self.packer.push(key, length)
        except ValueError as e:
            name, group_number = self.source.locate(key.group)
            raise ValueError(f"{name}: group {group_number}: {e}") from None
        self.documents[key] = document
        num_bos = 1 if self.config.framed else 0
        self.packer.inserted += num_bos
        self.packer.repeated += document.context
        self.read += length - num_bos - document.context
        self.num_documents += 1

    def _kept(self, document: Document) -> Document:
        """A pending document as the feed stores it.

        If documents are cropped, it is cut to what a row can hold. If they are split, it is
        compressed if it is longer than a chunk.
        """
        ids = document.ids
        assert isinstance(ids, np.ndarray)  # as sources return it
        limit = self.packer.max_tokens
        if limit is not None:
            # a view would keep all of it in memory
            return document if len(ids) <= limit else document._replace(ids=ids[:limit].copy())
        if self.packer.own_bos and len(ids) > Packed.CHUNK:
            return document._replace(ids=Packed(ids))
        return document

    # -- rows

    def pack(self) -> list[Placement] | None:
        """The next row as placements.

        None if the bucket is dry: no document is left to read, and the pending ones cannot fill a
        row. RuntimeError if the packer wants no document, but cannot fill a row.
        """
        self._fill()
        while not self.packer.ready:
            if self.place < self.share.stop:
                kind = type(self.packer).__name__
                raise RuntimeError(f"{kind}.wants: got False, expected True until a row is ready")
            # The epoch is over. Its remaining documents lead the next row, which the next epoch
            # completes, or a later one if it is too short. The row follows at once, so no saved
            # state needs to say which documents lead it.
            pending = list(self.packer.waiting())
            if not self._next_epoch():
                return None
            self.packer.lead(pending)
            self._fill()
        return self.packer.next_row()

    def next_row(self, index: int) -> Row | None:
        """The next row, which is the lane's row `index`. None if the bucket is dry.

        Raises what `pack` raises, and what reading a pending document has raised in the pool.
        """
        placed = self.pack()
        if placed is None:
            return None
        documents = [self._take(key) for key, *_ in placed]
        tokens, live = assemble(
            placed,
            documents,
            T=self.config.T,
            bos=self.source.bos,
            framed=self.config.framed,
            own_bos=self.packer.own_bos,
        )
        return Row(self.lane, index, self.bucket, tokens, live, placed)

    def _take(self, key: DocumentKey) -> Document:
        """A document that the packer has placed.

        It stays pending if the packer will place it again.
        """
        document = self.documents.pop(key)
        if isinstance(document, Future):
            document = document.result().pop(key)
        if key in self.packer:
            self.documents[key] = document
        return document

    # -- state

    def state(self) -> FeedState:
        """A copy of the feed's present state."""
        counts, waiting = self.packer.state()
        return FeedState(self.epoch, self.place, self.num_documents, self.read, counts, waiting)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from the JSON of `FeedState.to_json`: once, on a new feed.

        The pool reads the pending documents, one group at a time. ValueError if the state names no
        documents of the data; if the length of one has changed, the row that needs it raises it.
        """
        what = f"cursor of lane {self.lane}, bucket {self.bucket!r}"
        check_shape(state, {**FEED_SHAPE, "place": int, "left": int, "waiting": [[int]]}, what)
        waiting: dict[DocumentKey, Piece] = {}
        for entry in state["waiting"]:
            self._check_waiting(entry, what)
            epoch, group, number, *piece = entry
            waiting[DocumentKey(epoch, group, number)] = Piece(*piece)
        self.epoch = state["epoch"]
        self.share = self.order.share(self.lane, self.epoch)
        self.place = state["place"]
        self.num_documents = state["documents"]
        self.read = state["read"]
        self.packer.restore(state, waiting)

        # read the pending documents group by group
        groups: dict[int, dict[DocumentKey, Piece]] = {}
        for key, piece in waiting.items():
            groups.setdefault(key.group, {})[key] = piece
        if self.pool and self.source.ahead:
            self.source.expect(list(groups))
        for group, pieces in groups.items():
            if self.pool:
                call = copy_context().run
                reading = self.pool.submit(call, self._fetch_pending, group, pieces)
                self.documents.update(dict.fromkeys(pieces, reading))
            else:
                self.documents.update(self._fetch_pending(group, pieces))

    def _check_waiting(self, entry: Sequence[int], what: str) -> None:
        """ValueError unless an entry of "waiting" in a cursor names a document and a piece of it."""
        is_valid = len(entry) == len(DocumentKey._fields) + len(Piece._fields) and min(entry) >= 0
        if is_valid:
            _, group, number, *_ = entry
            sizes = self.source.groups
            is_valid = group < len(sizes) and number < sizes[group]
        if not is_valid:
            raise ValueError(
                f"{what}: {entry[:6]} does not name a document of this data; resume from another "
                f"checkpoint"
            )

    def _fetch_pending(
        self, group: int, waiting: dict[DocumentKey, Piece]
    ) -> dict[DocumentKey, Document]:
        """Read the documents of a group that a cursor lists.

        ValueError if the length of one has changed.
        """
        documents = self._read(group, np.array([key.number for key in waiting]))
        kept = {}
        for (key, piece), document in zip(waiting.items(), documents):
            actual = len(document.ids)
            expected = self.packer.whole_length(piece)
            if actual != expected:
                name, group_number = self.source.locate(group)
                raise ValueError(
                    f"{name}: document {key.number} of group {group_number} has {actual:,} tokens, but the "
                    f"checkpoint says {expected:,}; the data or the tokenizer has changed since the run "
                    f"began. Restore the original, or start a new run (--model-tag)"
                )
            kept[key] = self._kept(document)
        return kept


# ---- cursors -------------------------------------------------------------------------------------


def ledger(cursors: Sequence[Cursor], T: int) -> dict[str, dict[str, int]]:
    """The summed ledger of some lanes' cursors: {bucket: {name in LEDGER: number}}.

    In each bucket, read + bos + repeated = emitted + cropped + pending tokens; padding is counted
    separately.
    """
    total: dict[str, dict[str, int]] = {}
    for cursor in cursors:
        check_shape(cursor, {"buckets": dict}, "cursor of a lane")
        check_shape(
            cursor["buckets"], dict.fromkeys(cursor["buckets"], FEED_SHAPE), "cursor of a lane"
        )
        for bucket, feed in cursor["buckets"].items():
            account = total.setdefault(bucket, dict.fromkeys(LEDGER, 0))
            account["bos"] += feed["inserted"]
            account["emitted"] += feed["row"] * (T + 1) - feed["padded"]
            account["rows"] += feed["row"]
            account["epochs"] = max(account["epochs"], feed["epoch"])
            for name in ("read", "repeated", "cropped", "pending", "padded", "documents"):
                account[name] += feed[name]
    return total


def token_share(account: Mapping[str, int], name: str) -> float:
    """The "cropped" or "repeated" tokens of an account, as a share of all that left the buffers.

    Tokens that left the buffers were emitted or cropped. Tables show the cropped share as `cropped
    %`.
    """
    departed = account["emitted"] + account["cropped"]
    return account[name] / max(1, departed)


def stream_identity(
    config: AnyStreamConfig, sources: Mapping[str, Source], tokenizer: str
) -> dict[str, Any]:
    """Everything that decides the rows, as JSON values: equal identities mean equal rows."""
    identity = config.identity()
    identity["tokenizer"] = tokenizer
    for name, source in sources.items():
        identity[f"data {name}"] = source.fingerprint
    return identity


def check_cursors(
    cursors: Sequence[Cursor], lanes: Sequence[int], identity: Mapping[str, Any]
) -> None:
    """ValueError, with a diff, unless all cursors belong to this stream, one for each lane.

    Cursors of other lanes are allowed.
    """
    for cursor in cursors:
        check_shape(cursor, CURSOR_SHAPE, "cursor of a lane")
        lane = cursor["lane"]
        theirs = cursor["stream"]
        if cursor["format"] != FORMAT:
            raise ValueError(
                f"cursor of lane {lane}: format {cursor['format']}, expected {FORMAT}; resume with the "
                f"code that wrote it, or start a new run (--model-tag)"
            )
        differing = sorted(differences(theirs, identity))
        if differing:
            diff = "; ".join(f"{name} was {was}, now {now}" for name, was, now in differing)
            raise ValueError(
                f"cursor of lane {lane} belongs to another stream ({diff}); start a new run (--model-tag)"
            )
    numbers = sorted(cursor["lane"] for cursor in cursors)
    has_twice = len(numbers) > len(set(numbers))
    if has_twice or not set(lanes) <= set(numbers):
        raise ValueError(
            f"cursors of lanes {numbers}, expected one for each of {[*lanes]}; pass the cursors of all "
            f"ranks of one checkpoint"
        )


# ---- lanes ---------------------------------------------------------------------------------------


class Stream:
    """Some lanes of the stream: those of a rank, or all of them.

    With several sources, a curriculum decides the bucket of each row. `tokenizer` is the
    tokenizer's fingerprint. If `drop_dry`, a lane drops a bucket that is dry and continues with its
    others; otherwise the lane ends. ValueError with a diff if the cursors belong to another stream.

    With a loader, `next_rows`, `dry_bucket` and `state` are called in its thread, and `cursors` in the
    main one: with a state, which is a copy, it touches nothing that `next_rows` changes.
    """

    def __init__(
        self,
        config: StreamConfig,
        sources: Mapping[str, Source],
        lanes: Sequence[int],
        *,
        tokenizer: str,
        cursors: Sequence[Cursor] | None = None,
        num_threads: int = TokenizerSettings.tokenizer_threads,
        drop_dry: bool = False,
        feed: type[Feed] = Feed,
    ):
        self.config = config
        self.lanes = list(lanes)
        self.drop_dry = drop_dry
        self.mixer: Mixer | None = None
        if config.curriculum is not None:
            config.curriculum.check_buckets(sources)
            sources = {bucket: sources[bucket] for bucket in config.curriculum.buckets}
            self.mixer = Mixer(config.curriculum, T=config.T, V=config.V, seed=config.seed)
        self.buckets = list(sources)
        self.identity = stream_identity(config, sources, tokenizer)
        self.num_rows = dict.fromkeys(self.lanes, 0)  # that each lane has produced
        self.dropped: dict[int, frozenset[str]] = dict.fromkeys(self.lanes, frozenset())
        if cursors is not None:
            check_cursors(cursors, self.lanes, self.identity)
        self.pool: Executor | None = None
        if num_threads:
            self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

        # a feed for each bucket and lane
        self.feeds: dict[str, dict[int, Feed]] = {}
        for bucket, source in sources.items():
            order = open_order(source, bucket=bucket, config=config)
            new_feed = partial(
                feed, config, bucket=bucket, source=source, order=order, pool=self.pool
            )
            self.feeds[bucket] = {lane: new_feed(lane=lane) for lane in self.lanes}

        for cursor in cursors or ():
            if cursor["lane"] in self.num_rows:
                self._restore(cursor)

    def _restore(self, cursor: Cursor) -> None:
        """Continue one of these lanes where its cursor says."""
        lane = cursor["lane"]
        self.num_rows[lane] = cursor["row"]
        self.dropped[lane] = frozenset(cursor["dropped"])
        for bucket in cursor["buckets"].keys() & self.feeds.keys():
            self.feeds[bucket][lane].restore(cursor["buckets"][bucket])

    def bucket_of(self, lane: int, row: int) -> str | None:
        """The bucket that a lane's row comes from; None if all of the lane's buckets are dry."""
        dropped = self.dropped[lane]
        if self.mixer is not None:
            return self.mixer.bucket(lane, row, dropped)
        return next((bucket for bucket in self.buckets if bucket not in dropped), None)

    def next_rows(self, num_rows: int) -> list[Row]:
        """The next `num_rows` rows of each lane, lane after lane; fewer from a lane that is dry."""
        # Start all reads first, so that the pool works on every lane at once.
        for lane in self.lanes:
            first = self.num_rows[lane]
            due = {self.bucket_of(lane, row) for row in range(first, first + num_rows)}
            for bucket in due:
                if bucket is not None:
                    self.feeds[bucket][lane].prefetch()

        # Pack the rows of each lane, until its bucket is dry and may not be dropped.
        rows: list[Row] = []
        for lane in self.lanes:
            stop = self.num_rows[lane] + num_rows
            while self.num_rows[lane] < stop:
                bucket = self.bucket_of(lane, self.num_rows[lane])
                if bucket is None:
                    break
                row = self.feeds[bucket][lane].next_row(self.num_rows[lane])
                if row is not None:
                    rows.append(row)
                    self.num_rows[lane] += 1
                elif self.drop_dry:
                    self.dropped[lane] |= {bucket}
                else:
                    break
        return rows

    def dry_bucket(self, lane: int) -> str | None:
        """The dry bucket that leaves a lane without its next row; None if all its buckets are dry."""
        return self.bucket_of(lane, self.num_rows[lane])

    def state(self) -> list[LaneState]:
        """A copy of all lanes' present state."""
        states = []
        for lane in self.lanes:
            feeds = {bucket: by_lane[lane].state() for bucket, by_lane in self.feeds.items()}
            states.append(LaneState(lane, self.num_rows[lane], self.dropped[lane], feeds))
        return states

    def cursors(self, state: list[LaneState] | None = None) -> list[Cursor]:
        """The cursors of these lanes at `state` (default: now), as JSON values."""
        cursors = []
        for at in self.state() if state is None else state:
            cursor = {
                "format": FORMAT,
                "lane": at.lane,
                "row": at.num_rows,
                "stream": self.identity,
                "dropped": sorted(at.dropped),
                "buckets": {bucket: feed.to_json() for bucket, feed in at.feeds.items()},
            }
            cursors.append(cursor)
        return cursors

    def close(self) -> None:
        """Stop reading, and wait for reads in progress."""
        if self.pool:
            self.pool.shutdown(cancel_futures=True)


def open_stream(
    config: StreamConfig | OtherStreamConfig,
    sources: Mapping[str, Source],
    lanes: Sequence[int],
    **arguments: Any,
) -> AnyStream:
    """Some lanes of the stream that `config` describes.

    A `Stream`, or for another order (`order.ORDERS`) what its configuration opens. The other
    arguments are those of `Stream`.
    """
    if isinstance(config, StreamConfig):
        return Stream(config, sources, lanes, **arguments)
    return config.open(sources, lanes, **arguments)
