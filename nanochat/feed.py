"""
A feed: one bucket in one lane. Its position in the order of the data (order.py), the packer in which documents wait
(packing.py), what their tokens are (rows.py), and the accounts. Its JSON is a part of the lane's cursor.

    order --unit--> read: keys, tokens, lengths --> packer (lengths) and holder (tokens) --> next_row: a row
                                                     fills up to `fill_target`

A waiting document is in the JSON with its length, so a restored feed packs at once and reads again only the documents
that rows place.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from nanochat.concat import Concat
from nanochat.order import Order, StreamConfig
from nanochat.rows import Deferred, Key, Keys, Piece, PlacedRow, Row, Tape, TapeRow, to_document, to_key
from nanochat.shard_source import ShardSource
from nanochat.sources import Source

COUNTS = ("row", "inserted", "repeated", "cropped", "padded", "left")  # of a packer
JOINED_TOKENS = 1 << 17  # of a unit that is gathered: 2 or 4 bytes each, for each lane
Unit = tuple[Sequence[Key], list[np.ndarray], list[int], list[int]]  # keys, tokens (of each document, or one array
# of all), lengths, and how many first tokens are repeated (nothing where none are)


class Feed:
    """One bucket in one lane: position in the order, packer, accounts."""

    def __init__(self, config: StreamConfig, *, bucket: str, lane: int, source: Source, order: Order,
                 pool: ThreadPoolExecutor):
        self.config, self.bucket, self.lane, self.source, self.order = config, bucket, lane, source, order
        self.pool, self.max_epochs = pool, config.epochs(bucket)
        self.packer = config.new_packer()
        self.tape = Tape() if config.layout == "concat" else None  # tokens of all that waits, or:
        self.documents: dict[Key, Any] = {}  # that wait: tokens, a Deferred, or an int: restored, so long
        self.gone: dict[Key, int] = {}  # of waiting documents whose first tokens are used and gone: how many
        self.prefix: dict[Key, int] = {}  # of waiting documents that begin with overlap: where it ends
        self.restored: set[Key] = set()  # waiting documents that came from a cursor
        self.unasked: set[tuple[int, int]] = set()  # (group, unit) of restored documents not fetched yet
        self.epoch, self.unit = 0, order.share(lane, 0).start
        self.num_documents = self.read = 0  # documents and their tokens, BOS and repeated ones not counted
        self.ahead: Future[Unit] | None = None
        self.target = 0  # documents that should wait before a row is packed
        self.full = config.layout == "concat" or not config.pack  # whether it has grown to its size
        self._snapshot: tuple[Any, ...] | None = None
        self._group = -1, -1, range(0)  # of the last unit: group, epoch, its units
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

    def _read_unit(self, epoch: int, unit: int) -> Unit:
        """A unit's documents, in the order in which they are used."""
        group, local = self._locate(epoch, unit)
        source, size = self.source, self.order.unit_size
        first = local * size
        order = self.order.rows(epoch, group, local, min(size, int(self.order.groups[group]) - first))
        if source.mapped and isinstance(source, ShardSource):
            most = JOINED_TOKENS if self.tape is not None else 0
            tokens, lengths, overlaps = source.in_order(group, local, size, order, most=most)
            used = order.tolist()
        else:
            found = source.encode(source.fetch(group, local, size, lambda: self.wants(group)))
            repeated, used = source.overlaps(group, local, size), order.tolist()
            tokens = [found[i] for i in used]
            lengths, overlaps = list(map(len, tokens)), [repeated[i] for i in used] if any(repeated) else []
        if not self.config.framed and 0 in lengths:  # entries of nothing
            kept = [i for i, length in enumerate(lengths) if length]
            used, tokens, lengths = [used[i] for i in kept], [tokens[i] for i in kept], [lengths[i] for i in kept]
            overlaps = [overlaps[i] for i in kept] if overlaps else []
        number = to_key(epoch, group, first)
        keys = [number + i for i in used] if self.tape is None else Keys(number, used)
        return keys, tokens, lengths, overlaps

    def _locate(self, epoch: int, unit: int) -> tuple[int, int]:
        """`Order.locate`, which takes ten times as long: most units are of the same group as the one before."""
        group, at, span = self._group
        if at != epoch or unit not in span:
            group, _ = self.order.locate(epoch, unit)
            span = self.order.span(epoch, group)
            self._group = group, epoch, span
        return group, unit - span.start

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
        unit = self._read_unit(self.epoch, self.unit) if self.ahead is None else self.ahead.result()
        keys, tokens, lengths, overlaps = unit
        try:
            self.packer.push_many(keys, lengths)
        except ValueError as e:
            name, group = self.source.locate(to_document(keys[0])[1])
            raise ValueError(f"{name}: group {group}: {e}") from None
        inserted, repeated = len(keys) * self.config.framed, sum(overlaps)
        if self.tape is None:
            self.documents.update(zip(keys, tokens))
        else:
            self.tape.add(tokens, lengths, overlaps)
        if repeated and self.tape is None:
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
        packer = self.packer
        if not self.full:
            self.target = self.config.fill_target(self.lane, packer.row)
            self.full = self.target == self.config.buffer_size
        target = self.target
        while packer.wants(target) and not self.exhausted:
            self._read()
        if not self.source.mapped and packer.wants(target + self.order.unit_size // 2):
            self.read_ahead()

    # -- rows

    def next_rows(self, index: int, num: int) -> list[Row]:
        """The next `num` rows, of which the first is the lane's row `index`. Fewer when the bucket is dry: nothing more
        comes and what waits cannot fill a row."""
        self._snapshot = None
        if self.tape is not None:
            return self._stretches(index, num)
        rows: list[Row] = []
        packer, docs, pop = self.packer, self.packer.docs, self.documents.pop
        for i in range(index, index + num):
            self.refill()
            if not packer.ready:
                break
            before = packer.inserted  # a continuation inserts a BOS
            placements = packer.next_row()
            plain = not (self.restored or self.prefix or self.gone or packer.inserted > before)
            if plain and placements[-1][0] not in docs:
                taken: list[Any] = [pop(key) for key, _, _, _ in placements]
            else:  # what is cut comes last
                taken = [self._take(key) for key, _, _, _ in placements]
                if plain:
                    taken = [tokens for tokens, _, _ in taken]
            rows.append(PlacedRow(self, i, placements, taken, plain))
        return rows

    def next_row(self, index: int) -> Row | None:
        """The next row, or None when the bucket is dry."""
        return next(iter(self.next_rows(index, 1)), None)

    def _stretches(self, index: int, num: int) -> list[Row]:
        """`next_rows` from the tape: as many at once as lie on it."""
        packer, tape, mapped = self.packer, self.tape, self.source.mapped
        assert type(packer) is Concat and tape is not None
        rows: list[Row] = []
        T = packer.T
        while len(rows) < num:
            if not mapped or packer.end - packer.position <= T:
                self.refill()
                if not packer.ready:
                    break
            more = min(num - len(rows), packer.num_ready)
            runs, first = packer.runs, packer.advance(more)
            stop = first + more * T + 1
            pieces = tape.take(first, stop)
            if self.documents:
                pieces = [piece if piece.key is None else self._known(piece, stop) for piece in pieces]
            rows += [TapeRow(self, i, at, pieces, runs) for i, at in
                     zip(range(index + len(rows), index + num), range(first, stop - 1, T))]
        return rows

    def _known(self, piece: Piece, stop: int) -> Piece:
        """A restored piece of rows that end at `stop`, with its tokens or what will give them."""
        key = piece.key
        assert key is not None
        document = self.documents[key]
        if type(document) is int:
            document = self._restored(key)
        if piece.stop < stop:  # the last token is the next row's first
            del self.documents[key]
        return piece._replace(tokens=document)

    def _take(self, key: Key) -> tuple[Any, int, int]:
        """A placed document's tokens, or what will give them, how many first ones are gone, where live ones begin."""
        document = self.documents[key]
        if type(document) is int:
            document = self._restored(key)
        prefix = self.prefix.get(key, 0) if self.prefix else 0
        if key not in self.packer.docs:
            del self.documents[key]
            self.restored.discard(key)
            if prefix:
                del self.prefix[key]
            return document, self.gone.pop(key, 0) if self.gone else 0, prefix
        gone = self.gone.get(key, 0)
        useless = self.packer.docs[key][1] - self.config.overlap - gone  # before the context of the rest
        if type(document) is np.ndarray and document.base is None and 2 * useless > len(document):
            self.documents[key], self.gone[key] = document[useless:].copy(), gone + useless
        return document, gone, prefix

    def _restored(self, key: Key) -> Any:
        """What gives the tokens of a restored document. The pool fetches the texts of all others in its unit too."""
        size = self.order.unit_size
        _, group, row = to_document(key)
        unit = row // size
        if self.source.mapped:
            document = self.tokens_of(key, self.documents[key])
            self.documents[key] = document
            return document
        coming = [(k, *to_document(k)) for k, d in self.documents.items() if type(d) is int]
        mine = [(k, row % size) for k, _, g, row in coming if (g, row // size) == (group, unit)]

        def fetch() -> dict[int, Any]:
            texts = self.source.fetch(group, unit, size, lambda: self.wants(group))
            self.unasked.discard((group, unit))
            return {row: texts[row] for _, row in mine}

        future = self.pool.submit(fetch)
        for k, row in mine:
            self.documents[k] = Deferred(future, row, self.documents[k])
        return self.documents[key]

    def tokens_of(self, key: Key, document: "Deferred | int") -> np.ndarray:
        """Tokens of a restored document; ValueError if they are not as many as when it was saved."""
        _, group, row = to_document(key)
        if isinstance(document, int):
            raw, length = self.source.fetch(group, row, 1), document
        else:
            raw, length = [document.texts.result()[document.index]], document.length
        tokens = self.source.encode(raw)[0]
        if len(tokens) != length:
            name, local = self.source.locate(group)
            raise ValueError(f"{name}: document {row} of row group {local} has {len(tokens):,} tokens, the "
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
        for epoch, group, row, length, start, place in state["waiting"]:
            key = to_key(epoch, group, row)
            p.push(key, length, start, place)
            self.documents[key] = p.document_length(length, start)
            self.unasked.add((group, row // self.order.unit_size))
            overlap = int(sum(self.source.overlaps(group, row, 1)))
            if self.tape is not None:
                self.tape.restore(key, length, start, overlap)
                continue
            self.restored.add(key)
            if overlap:
                self.prefix[key] = overlap + self.config.framed
        self._settle()


def feed_json(snapshot: tuple[Any, ...]) -> dict[str, Any]:
    """A feed's part of a cursor."""
    *numbers, frozen = snapshot
    packer = frozen.thawed()
    return {**dict(zip(("epoch", "unit", "documents", "read"), numbers)),
            **{name: getattr(frozen, name) for name in COUNTS}, "pending": packer.pending,
            "waiting": [[*to_document(key), *piece] for key, *piece in packer.waiting()]}
