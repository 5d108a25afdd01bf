"""
Packers: from document lengths to rows, without a token in sight.

A packer is given documents as (key, length) and returns rows as lists of placements. It never sees
a token, so the same engine streams text, reads token files, rehearses a run from lengths alone,
keeps the ledger and answers which documents step N held.

    T = 7, so a row has 8 tokens; three documents wait, # is BOS:      a: #aaaaa    b: #b    c: #cccccccc

    bestfit    # a a a a a # b      oldest first, then the document (or pair) that ends at the row's end
    crop       # c c c c c c c      a document that fills a row leaves in its turn; the rest is dropped
    split      # c c c c c c c      the rest comes back: BOS, the last tokens again (targets off), the rest
               # c c c ...
    concat     # a a a a a # b      one stream of tokens; the next row starts with the last token of this
               b # c c c c c c
    binned     a a a a a / b /      stored entries (/ is EOD), whole; what is left is padding

**A new packer** is a subclass of `Packer` and a line in `LAYOUTS` at the end of this file; --packing=NAME then
takes it. It implements:

    push(key, length, start, place)    a document, or a restored piece, is pending from now on
    next_row()                         the next row's placements; counts what it dropped, padded or repeated
    waiting()                          {key: Piece} of all that is pending, from which `push` restores it
    key in packer                      whether something of a document is still pending
    ready, wants(target), pending      only where they differ from "the pending tokens fill a row"
    of(config)                         only where it takes more settings than T

`tests/test_hacks.py` adds one in 30 lines. Its rows are part of a run's identity: to place anything differently
later, rename it or raise VERSION.

A **placement** is a tuple `(key, start, length, off)`: `length` tokens of the row come from
document `key`, whose token 0 is its BOS. `start` is the document's token they begin at. In
`bestfit`, a placement with `start > 0` has a BOS of its own in front (counted in `length`), and the
`off` tokens after that BOS are repeated context whose targets are off.

**Fitting.** Whole documents shorter than a row are *fillers*. Their lengths are a set of bits in one
Python integer: bit n is on when a document of n tokens waits. Beside it is its mirror image, where
bit T + 1 - n is on. The largest filler that fits r tokens is one mask and one `bit_length`. Two of
them fill r exactly where `bits & (mirror >> (T + 1 - r))` has a bit: some n with both n and r - n on.

**The token clock.** Every waiting piece has its place: how many tokens arrived before it, of any
piece at most what a row holds. A document that fills a row leaves when as many tokens have left as
came before it. All other rows start with the filler that has waited longest, and are completed by
exact fits, pairs, and the largest that fits.

    arrives     a(3)   L(20)   b(5)   c(2)  ...     T = 8; places 0, 3, 12, 17: L counts 9, what a row holds
    tokens left  0..2: rows of a, b, c ...          3 or more: L is due, the next row is L

So the rows of any stretch hold long and short documents as the data do, and nothing waits for ever.
The rest of a cut document arrives anew, behind all that waits, and starts a row in its turn. So the
pieces of one document lie as far apart as the buffer allows.

**The buffer** counts fillers only: documents that fill a row need no partner, so they do not keep a
lane from reading on until enough fillers are pending. Memory does: see `token_limit`.

**The end of an epoch.** A lane finishes an epoch before it begins the next one. What cannot fill a
row any more is named by `lead`: the next row starts with it and is completed from the next epoch.

Rejected: long documents at once (the first rows hold nothing else); every row started with the
oldest document (the first rows hold short ones); rests as fillers (two pieces of one document in
neighbouring rows); a list searched from end to end for each placement, as in nanochat, where
over-long documents fill up the buffer.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

VERSION = 3  # part of the stream's law: a packer that places anything differently gets another number
LIMIT_ROW = 2049  # tokens of a row, at least, by which the limit of a buffer is counted
COUNTS = ("row", "inserted", "repeated", "cropped", "padded", "left")

Key = Any  # whatever the caller names documents by; hashable
Placement = tuple[Key, int, int, int]


class Piece(NamedTuple):
    """A document that waits, or what is left of one."""

    length: int  # tokens; of a rest: 1 BOS + context + what no row has had
    start: int  # the document's tokens that are used up; 0: the whole document waits
    place: int  # tokens that came before it, of any piece at most what a row holds


def token_limit(buffer_size: int, capacity: int) -> int:
    """Tokens that a lane keeps pending at most, of each document at most what a row holds: as many as
    `buffer_size` rows of 2,049 tokens or more. The limit matters where few documents are shorter than
    a row. At 2 bytes a token, 64 lanes keep at most 34 MB for T up to 2,048."""
    return buffer_size * max(capacity, LIMIT_ROW)


class Packer:
    """What all packers have. Counts are of the packer's whole life, restarts included, in tokens.

    `state` and `restore` carry everything over: a restored packer places what this one would have.
    """

    framed = True  # whether documents are `[BOS] + ids`; otherwise entries are used as they are stored
    own_bos = False  # whether placements with start > 0 have a BOS of their own in front

    @classmethod
    def of(cls, config: Any) -> "Packer":
        """An empty packer of a `nanochat.order.StreamConfig`."""
        return cls(config.T)

    def __init__(self, T: int):
        self.capacity = T + 1  # tokens of a row
        self.most: int | None = None  # of a document's tokens that rows can hold; None: all
        self.tokens = 0  # in all waiting pieces
        self.row = 0  # rows packed
        self.inserted = 0  # BOS put in front of documents and rests
        self.repeated = 0  # tokens emitted a second time as context
        self.cropped = 0  # tokens dropped
        self.padded = 0  # tokens of rows that no document fills
        self.left = 0  # tokens of pieces that have left, of any piece at most what a row holds

    def __contains__(self, key: Hashable) -> bool:
        """Whether something of that document waits."""
        raise NotImplementedError

    def waiting(self) -> dict[Key, Piece]:
        """A copy of all that waits."""
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Whether the waiting pieces can fill a row."""
        return self.tokens >= self.capacity

    @property
    def pending(self) -> int:
        """Tokens of waiting documents that no row has had yet."""
        return self.tokens

    def wants(self, target: int) -> bool:
        """Whether more documents should come before the next row is packed; `target`: how many
        should wait."""
        return not self.ready

    def push(self, key: Key, length: int, start: int = 0, place: int | None = None) -> None:
        """Add a document of `length` tokens. `start` and `place` are those of a restored piece."""
        raise NotImplementedError

    def lead(self, keys: Sequence[Key]) -> None:
        """The next row starts with these pieces, which are fewer tokens than a row. A packer that
        keeps documents in their order has nothing to do."""

    def next_row(self) -> list[Placement]:
        """The next row. The caller sees to it that `ready` holds."""
        raise NotImplementedError

    def whole_length(self, piece: Piece) -> int:
        """Tokens of the whole document that a waiting piece is of."""
        return piece.length

    def state(self) -> tuple[dict[str, int], dict[Key, Piece]]:
        """The packer as it is now: (its counts, a copy of what waits)."""
        counts = {name: getattr(self, name) for name in COUNTS}
        return {**counts, "pending": self.pending}, self.waiting()

    def restore(self, counts: Mapping[str, Any], waiting: dict[Key, Piece]) -> None:
        """Make an empty packer what `state` told."""
        for name in COUNTS:
            setattr(self, name, counts[name])
        for key, piece in waiting.items():
            self.push(key, *piece)


class BestFit(Packer):
    """BOS-aligned rows, always full. `split` brings the rest of a cut document back, otherwise it
    is dropped."""

    own_bos = True

    @classmethod
    def of(cls, config: Any) -> "BestFit":
        return cls(config.T, split=config.long_docs == "split", overlap=config.overlap)

    def __init__(self, T: int, *, split: bool = False, overlap: int = 64):
        super().__init__(T)
        self.split, self.overlap = split, overlap
        self.most = None if split else self.capacity
        self.near = not split  # whether a row may end with a document that is a little too long
        self.leading: list[Key] = []  # what the next row starts with, whatever its turn
        self.fillers: dict[Key, Piece] = {}  # whole documents shorter than a row, oldest first
        self.timed: dict[Key, Piece] = {}  # long ones and rests, oldest first: each in its turn
        self.by_length: dict[int, list[Key]] = {}  # the fillers of each length, oldest first
        self.bits = self.mirror = 0
        self.counted = 0  # tokens that wait, of any piece at most what a row holds
        self.context = 0  # BOS and repeated tokens of the rests that wait

    def __contains__(self, key: Hashable) -> bool:
        return key in self.fillers or key in self.timed

    def waiting(self) -> dict[Key, Piece]:
        return {**self.timed, **self.fillers}

    @property
    def pending(self) -> int:
        return self.tokens - self.context

    def wants(self, target: int) -> bool:
        """Until `target` fillers wait, or as many tokens as memory allows."""
        limit = target * self.capacity if self.split else token_limit(target, self.capacity)
        full = len(self.fillers) >= target or self.counted >= limit
        return not self.ready or not full

    def push(self, key: Key, length: int, start: int = 0, place: int | None = None) -> None:
        """A document waits from now on, or what is left of it from `start`. `place`: its place on
        the token clock, where a cursor brings it back; else behind all that has come."""
        piece = Piece(length, start, self.left + self.counted if place is None else place)
        self.tokens += length
        self.counted += min(length, self.capacity)
        if start or length >= self.capacity:
            self.timed[key] = piece
            self.context += self._context(start)
            return
        self.fillers[key] = piece
        if length not in self.by_length:
            self.by_length[length] = []
            self.bits |= 1 << length
            self.mirror |= 1 << self.capacity - length
        self.by_length[length].append(key)

    def _context(self, start: int) -> int:
        """BOS and repeated tokens in front of a rest."""
        return 1 + min(self.overlap, start - 1) if start else 0

    def whole_length(self, piece: Piece) -> int:
        return piece.start + piece.length - self._context(piece.start)

    def _pop(self, key: Key) -> Piece:
        """Take a piece out of all that waits."""
        if key in self.timed:
            piece = self.timed.pop(key)
            self.context -= self._context(piece.start)
        else:
            piece = self.fillers.pop(key)
            same = self.by_length[piece.length]
            same.remove(key)
            if not same:
                del self.by_length[piece.length]
                self.bits ^= 1 << piece.length
                self.mirror ^= 1 << self.capacity - piece.length
        counted = min(piece.length, self.capacity)
        self.tokens -= piece.length
        self.counted -= counted
        self.left += counted
        return piece

    def _place(self, key: Key, room: int, placements: list[Placement]) -> int:
        """Place a piece in the `room` that a row has left, and return what is left then. What does
        not fit is dropped or comes back."""
        length, start, _ = self._pop(key)
        placed = min(length, room)
        context = self._context(start)  # the rest of a document: BOS, repeated tokens, new ones
        off = min(context, placed) - 1 if start else 0
        placements.append((key, start - context + 1 if start else 0, placed, off))
        if start:
            self.inserted += 1
            self.repeated += off
        if placed < length:
            if self.split:
                used = start + placed - 1 - off if start else placed
                whole = start + length - context
                self.push(key, self._context(used) + whole - used, used)
            else:
                self.cropped += length - placed
        return room - placed

    def lead(self, keys: Sequence[Key]) -> None:
        self.leading = [*keys]

    def next_row(self) -> list[Placement]:
        """A full row: the pieces that lead it, or the document that is due by the clock, or the oldest
        filler; then what fills the rest best."""
        placements: list[Placement] = []
        self.row += 1
        room = self.capacity
        for first in self.leading or [self._first_key()]:
            room = self._place(first, room, placements)
        self.leading = []
        while room:
            room = self._place(self._next_key(room), room, placements)
        return placements

    def _first_key(self) -> Key:
        """The piece that a row starts with."""
        first = next(iter(self.timed), None)
        if first is None or (self.fillers and self.timed[first].place > self.left):
            first = next(iter(self.fillers))
        return first

    def _next_key(self, room: int) -> Key:
        """The piece to go on with where a row has `room` tokens left."""
        if not self.fillers:
            return next(iter(self.timed))
        length = self._best(room)
        if length == 0:  # none fits. A cut document loses least where it is short; a long one comes back
            shortest, longest = (self.bits & -self.bits).bit_length() - 1, self.bits.bit_length() - 1
            length = longest if self.split else shortest
        return self.by_length[length][0]

    def _best(self, room: int) -> int:
        """The length of an exact fit, of the larger of an exact pair, of one that is a few tokens
        too long (where that is allowed), or of the largest that fits; 0 where none does."""
        if room in self.by_length:
            return room
        pairs = self.bits & self.mirror >> self.capacity - room
        larger = pairs.bit_length() - 1
        if pairs and (2 * larger != room or len(self.by_length[larger]) > 1):
            return larger
        # A row that no document fits would end with the shortest one, cropped. One that is too long by
        # no more than that costs less, and saves the short ones for rows that need them.
        if self.near and (longer := self.bits >> room):
            over, shortest = ((bits & -bits).bit_length() - 1 for bits in (longer, self.bits))
            if over <= shortest:
                return room + over
        return max(0, (self.bits & (1 << room) - 1).bit_length() - 1)


class Binned(BestFit):
    """Stored entries, whole: the oldest first, then what fills the row best. What is left of the
    row is padding. With `pack=False` a row is one entry, in order."""

    framed = own_bos = False

    @classmethod
    def of(cls, config: Any) -> "Binned":
        return cls(config.T, pack=config.pack)

    def __init__(self, T: int, *, pack: bool = True):
        super().__init__(T + 1)  # so that an entry of T + 1 tokens is a filler like any other
        self.near, self.most, self.pack = False, None, pack

    @property
    def ready(self) -> bool:
        return bool(self.fillers)

    def wants(self, target: int) -> bool:
        """Until `target` entries wait."""
        return len(self.fillers) < max(1, target if self.pack else 1)

    def push(self, key: Key, length: int, start: int = 0, place: int | None = None) -> None:
        """ValueError for an entry that is longer than a row."""
        T = self.capacity - 2
        if length > T + 1:
            raise ValueError(f"an entry has {length:,} tokens, a row of the binned layout {T + 1:,}; "
                             f"make the shards with --max-length {T}, or take --packing bestfit")
        super().push(key, length, start, place)

    def next_row(self) -> list[Placement]:
        placements: list[Placement] = []
        self.row += 1
        room = self._place(next(iter(self.fillers)), self.capacity - 1, placements)
        while self.pack and room and (length := self._best(room)):
            room = self._place(self.by_length[length][0], room, placements)
        self.padded += room
        return placements


class Concat(Packer):
    """One stream of tokens: nothing is dropped, and rows are not aligned with documents. Each row
    starts with the last token of the row before it."""

    def __init__(self, T: int):
        super().__init__(T)
        self.documents: dict[Key, Piece] = {}  # in order; the first one's last used token is shared

    def __contains__(self, key: Hashable) -> bool:
        return key in self.documents

    def waiting(self) -> dict[Key, Piece]:
        return self.documents.copy()

    @property
    def pending(self) -> int:
        return self.tokens - (1 if self.row else 0)

    def push(self, key: Key, length: int, start: int = 0, place: int | None = None) -> None:
        self.documents[key] = Piece(length, start, 0)
        self.tokens += length - start

    def next_row(self) -> list[Placement]:
        """A full row: documents in the order in which they came, the last one cut where it ends."""
        placements: list[Placement] = []
        room = self.capacity
        while room:
            key, (length, start, _) = next(iter(self.documents.items()))
            placed = min(length - start, room)
            placements.append((key, start, placed, 0))
            room -= placed
            if room:
                del self.documents[key]
            else:  # the row's last token is the first one of the next row
                self.documents[key] = Piece(length, start + placed - 1, 0)
        self.tokens -= self.capacity - 1
        self.repeated += 1 if self.row else 0
        self.row += 1
        return placements


LAYOUTS: dict[str, type[Packer]] = {"bestfit": BestFit, "concat": Concat, "binned": Binned}  # --packing
