"""
Packers: from document lengths to rows, without a token in sight.

A packer is given documents as (key, length) and returns rows as lists of placements. It never sees a token, so the
same engine streams text, reads shards, rehearses a run from lengths alone, keeps the ledger and answers which
documents step N held.

    T = 7, so a row has 8 tokens; three documents wait, # is BOS:      a: #aaaaa    b: #b    c: #cccccccc

    bestfit    # a a a a a # b        oldest first, then the document (or pair) that ends exactly at the row's end
    crop       # c c c c c c c        a document that fills a row leaves in its turn; what does not fit is dropped
    split      # c c c c c c c        the rest comes back: BOS, the last tokens again (targets off), the rest
               # c c c ...
    concat     # a a a a a # b        one stream of tokens (concat.py); the next row starts with the last token of this
               b # c c c c c c
    binned     c c c c c c c /        stored entries (/ is EOD), whole, the longest first; what is left is padding
               a a a a a / b /

A **placement** is a tuple `(key, start, length, off)`: `length` tokens of the row come from document `key`, whose
token 0 is its BOS. `start` is the document's token they begin at. In `bestfit`, a placement with `start > 0` has a
BOS of its own in front (counted in `length`), and the `off` tokens after that BOS are repeated context whose targets
are off.

Fitting. Whole documents shorter than a row are fillers. Their lengths are a set of bits in one Python integer (bit n is
on when a document of n tokens waits), beside its mirror image (bit T + 1 - n). The largest filler that fits r tokens is
one mask and one `bit_length`; whether two fill r exactly is `bits & (mirror >> (T + 1 - r))`: some n with both n and
r - n on. These are a few operations on integers of T bits.

The token clock. Every waiting piece has its place: how many tokens arrived before it, of any piece at most what a row
holds. A document that fills a row leaves when as many tokens have left as came before it. All other rows start with the
filler that has waited longest, and are completed by exact fits, pairs, and the largest that fits.

    arrives     a(3)   L(20)   b(5)   c(2)  ...     T = 8; places 0, 3, 12, 17: L counts 9, what a row holds
    tokens left  0..2: rows of a, b, c ...          3 or more: L is due, the next row is L

So the rows of any stretch hold long and short documents as the data do, and nothing waits for ever. The rest of a cut
document arrives anew, behind all that waits, and it too leaves in its turn alone: pieces of one document lie as far
apart as the buffer allows. Rejected: long documents at once (the first rows hold nothing else), every row started with
the oldest document (the first rows hold short ones), rests as fillers (two pieces of a document in neighbouring rows).

Rejected: nanochat's buffer, a list searched from end to end for each placement, where over-long documents may wait. It
fills up with them until the buffer is a fraction of its size.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

VERSION = 2  # part of the stream's law: a packer that places anything differently gets another number

Key = Any  # whatever the caller names documents by; hashable
Placement = tuple[Key, int, int, int]


class Packer(Protocol):
    """What a feed needs of a packer. Token counts are of the whole life of the packer, restarts included."""

    own_bos: bool  # placements with start > 0 have a BOS of their own in front
    row: int  # rows packed so far
    inserted: int  # BOS put in front of continuations, tokens
    repeated: int  # tokens emitted a second time as context, tokens
    cropped: int  # tokens dropped
    padded: int  # tokens of rows that no document fills
    left: int  # tokens of pieces that have left, of any piece at most what a row holds

    @property
    def docs(self) -> Mapping[Key, tuple[int, int, int]]: ...  # that wait

    @property
    def ready(self) -> bool: ...

    @property
    def pending(self) -> int: ...

    def wants(self, target: int) -> bool: ...

    def push(self, key: Key, length: int, start: int = 0, place: int | None = None) -> None: ...

    def push_many(self, keys: Sequence[Key], lengths: Sequence[int]) -> None: ...

    def next_row(self) -> list[Placement]: ...

    def waiting(self) -> list[tuple[Key, int, int, int]]: ...

    def frozen(self) -> Any: ...

    def document_length(self, length: int, start: int) -> int: ...


class Piece(NamedTuple):
    """A document that waits, or what is left of one: 1 BOS + context + the rest."""

    length: int  # tokens
    start: int  # the document's tokens that are used up; 0: the whole document waits
    place: int  # tokens that came before it, of any piece at most what a row holds


class BestFit:
    """BOS-aligned rows, always full. `split` brings the rest of a cut document back, otherwise it is dropped."""

    own_bos = True

    def __init__(self, T: int, *, split: bool = False, overlap: int = 64):
        self.capacity = T + 1
        self.split, self.overlap = split, overlap
        # `crop` ends a row with a document that is a few tokens too long: dropping them costs less than the short
        # documents that would fill the room. Measured at T = 512: 0.2 points above what must be dropped, not 0.45.
        self.near_bits = 0 if split else (1 << min(16, T // 64) + 1) - 1
        self.fillers: dict[Key, Piece] = {}  # whole documents shorter than a row, oldest first
        self.timed: dict[Key, Piece] = {}  # the others, oldest first: each leaves in its turn
        self.by_length: dict[int, list[Key]] = {}  # the fillers of each length, oldest first
        self.bits = self.mirror = 0
        self.tokens = self.counted = 0  # of all waiting pieces; of any piece at most what a row holds
        self.row = self.inserted = self.repeated = self.cropped = self.padded = self.left = 0

    @property
    def docs(self) -> Mapping[Key, tuple[int, int, int]]:
        """All that waits."""
        return ChainMap(self.timed, self.fillers)

    def waiting(self) -> list[tuple[Key, int, int, int]]:
        """(key, length, start, place) of each waiting piece; pushed again so, they make this packer."""
        return [(key, *piece) for pieces in (self.timed, self.fillers) for key, piece in pieces.items()]

    @property
    def ready(self) -> bool:
        """Whether the waiting pieces can fill a row."""
        return self.tokens >= self.capacity

    @property
    def pending(self) -> int:
        """Tokens of waiting documents that no row has had yet (BOS and context of continuations not counted)."""
        return self.tokens - sum(1 + min(self.overlap, p.start - 1) for p in self.timed.values() if p.start)

    def push(self, key: Key, length: int, start: int = 0, place: int | None = None) -> None:
        """Add a piece of `length` tokens. `start` and `place` are given when a saved packer is filled again."""
        piece = Piece(length, start, self.left + self.counted if place is None else place)
        self.tokens += length
        self.counted += min(length, self.capacity)
        if start or length >= self.capacity:
            self.timed[key] = piece
            return
        self.fillers[key] = piece
        if length not in self.by_length:
            self.by_length[length] = []
            self.bits |= 1 << length
            self.mirror |= 1 << self.capacity - length
        self.by_length[length].append(key)

    def push_many(self, keys: Sequence[Key], lengths: Sequence[int]) -> None:
        """Add whole documents, in order."""
        for key, length in zip(keys, lengths):
            self.push(key, length)

    def _pop(self, key: Key) -> Piece:
        """Take a piece out of all that waits."""
        piece = self.timed.pop(key, None)
        if piece is None:
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
        """Place a piece in what is left of a row, and return what is left then. What does not fit is dropped or comes
        back."""
        length, start, _ = self._pop(key)
        placed = min(length, room)
        if start == 0:
            placements.append((key, 0, placed, 0))
            total, used = length, placed
        else:
            context = min(self.overlap, start - 1)
            off = min(context, placed - 1)
            placements.append((key, start - context, placed, off))
            total, used = start + length - 1 - context, start + placed - 1 - off
            self.inserted += 1
            self.repeated += off
        if placed < length:
            if self.split:
                self.push(key, 1 + min(self.overlap, used - 1) + total - used, used)
            else:
                self.cropped += length - placed
        return room - placed

    def frozen(self) -> "Frozen":
        """The packer as it is now, for later."""
        return Frozen(self)

    def document_length(self, length: int, start: int) -> int:
        """Tokens of the whole document that a piece (length, start) is of."""
        return start + length - 1 - min(self.overlap, start - 1) if start else length

    def _first(self) -> Key:
        """The piece that the next row starts with."""
        first = next(iter(self.timed), None)
        if first is None or (self.fillers and self.timed[first].place > self.left):
            return next(iter(self.fillers))
        return first

    def wants(self, target: int) -> bool:
        """Whether more documents should come before the next row is packed: until `target` fillers wait, or as many
        tokens as `target` rows hold (of any piece at most what a row holds)."""
        return not self.ready or (len(self.fillers) < target and self.counted < target * self.capacity)

    def next_row(self) -> list[Placement]:
        """The next row. The caller sees to it that `ready` holds."""
        placements: list[Placement] = []
        self.row += 1
        room = self._place(self._first(), self.capacity, placements)
        while room:
            room = self._place(self._filler(room), room, placements)
        return placements

    def _filler(self, room: int) -> Key:
        """The piece to go on with where `room` tokens are left of a row."""
        if not self.fillers:
            return next(iter(self.timed))
        length = self._best(room)
        if length == 0:  # none fits: a cut one loses little where it is short, and comes back where it is long
            length = self.bits.bit_length() - 1 if self.split else (self.bits & -self.bits).bit_length() - 1
        return self.by_length[length][0]

    def _best(self, room: int) -> int:
        """Length of an exact fit, of the larger of an exact pair, of one that is a few tokens too long (where that is
        allowed), or of the largest that fits; 0 where none does."""
        if room in self.by_length:
            return room
        pairs = self.bits & self.mirror >> self.capacity - room
        larger = pairs.bit_length() - 1
        if pairs and (2 * larger != room or len(self.by_length[larger]) > 1):
            return larger
        near = self.bits >> room & self.near_bits
        if near:
            return room + (near & -near).bit_length() - 1
        return max(0, (self.bits & (1 << room) - 1).bit_length() - 1)


class Frozen:
    """A `BestFit` as it was: counters, and what waited."""

    def __init__(self, packer: BestFit):
        self.row, self.inserted, self.repeated = packer.row, packer.inserted, packer.repeated
        self.cropped, self.padded, self.left = packer.cropped, packer.padded, packer.left
        self._docs, self.pending = packer.waiting(), packer.pending

    def thawed(self) -> "Frozen":
        """Itself."""
        return self

    def waiting(self) -> list[tuple[Key, int, int, int]]:
        """As of the packer."""
        return self._docs


class Binned(BestFit):
    """Stored entries, whole: the oldest first, then what fills the row best; the rest of the row is padding. With
    `pack=False` a row is one entry, in order."""

    own_bos = False

    def __init__(self, T: int, *, pack: bool = True):
        super().__init__(T + 1)  # an entry of T + 1 tokens is a filler like any other
        self.near_bits, self.pack = 0, pack

    @property
    def ready(self) -> bool:
        """Whether an entry waits."""
        return bool(self.fillers)

    def wants(self, target: int) -> bool:
        """Whether more entries should come before the next row is packed."""
        return len(self.fillers) < max(1, target)

    def push(self, key: Key, length: int, start: int = 0, place: int | None = None) -> None:
        """Add an entry. ValueError for one that is longer than a row."""
        T = self.capacity - 2
        if length > T + 1:
            raise ValueError(f"an entry has {length:,} tokens, a row of the binned layout {T + 1:,}; make the shards "
                             f"with --max-length {T}, or take --packing bestfit")
        super().push(key, length, start, place)

    def next_row(self) -> list[Placement]:
        """The next row; what its placements leave of T + 1 tokens is padding."""
        placements: list[Placement] = []
        self.row += 1
        room = self._place(next(iter(self.fillers)), self.capacity - 1, placements)
        while self.pack and room and (length := self._best(room)):
            room = self._place(self.by_length[length][0], room, placements)
        self.padded += room
        return placements
