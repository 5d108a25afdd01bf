"""
Packers: from document lengths to rows, without a token in sight.

A packer is given documents as (key, length) and returns rows as lists of placements. It never sees a token, so the
same engine streams text, reads shards, rehearses a run from lengths alone, keeps the ledger and answers which
documents step N held.

    T = 7, so a row has 8 tokens; three documents wait, # is BOS:      a: #aaaaa    b: #b    c: #cccccccc

    bestfit    # a a a a a # b        oldest first, then the document (or pair) that ends exactly at the row's end
    crop       # c c c c c c c        a document that fills a row leaves at once; what does not fit is dropped
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

Fitting. The waiting lengths are a set of bits in one Python integer (bit n is on when a document of n tokens waits),
beside its mirror image (bit T + 1 - n). The largest document that fits r tokens is one mask and one `bit_length`;
whether two documents fill r exactly is `bits & (mirror >> (T + 1 - r))`: some n with both n and r - n on. These are a
few operations on integers of T bits, about 2 microseconds a row.

Fairness. Documents that fill a row leave at once, but once the oldest of the others has waited `max_wait` rows, rows
start with it. So nothing waits longer than `max_wait` rows plus the number of documents waiting when it came.

Rejected: nanochat's buffer, a list searched from end to end for each placement, where over-long documents may wait. It
fills up with them until the buffer is a fraction of its size.
"""

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Protocol

import numpy as np

VERSION = 1  # part of the stream's law: a packer that places anything differently gets another number
REPACKED_ROWS = 64  # that a frozen packer is packed again for, at most

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

    def __len__(self) -> int: ...

    @property
    def docs(self) -> dict[Key, tuple[int, int, int]]: ...  # that wait

    @property
    def ready(self) -> bool: ...

    @property
    def pending(self) -> int: ...

    def push(self, key: Key, length: int, start: int = 0, arrived: int | None = None) -> None: ...

    def push_many(self, keys: Sequence[Key], lengths: Sequence[int]) -> None: ...

    def next_row(self) -> list[Placement]: ...

    def waiting(self) -> list[tuple[Key, int, int, int]]: ...

    def frozen(self) -> Any: ...

    def document_length(self, length: int, start: int) -> int: ...


class BestFit:
    """BOS-aligned rows, always full. `split` brings the rest of a cut document back, otherwise it is dropped.

    `docs[key] = (length of the piece, start, row it arrived at)`, in order of arrival; `start` counts the document's
    tokens that are used up (0: the whole document waits). The piece of a continuation is 1 BOS + context + the rest.
    """

    own_bos = True

    def __init__(self, T: int, *, split: bool = False, overlap: int = 64, max_wait: int = 256):
        self.capacity = T + 1
        self.split, self.overlap, self.max_wait = split, overlap, max_wait
        # `crop` ends a row with a document that is a few tokens too long: dropping them costs less than the short
        # documents that would fill the room. Measured at T = 1024: 0.4 points above what must be dropped, not 0.85.
        self.near_bits = 0 if split else (1 << min(16, T // 64) + 1) - 1
        self.docs: dict[Key, tuple[int, int, int]] = {}
        self.long: deque[Key] = deque()  # pieces of at least `capacity` tokens, oldest first
        self.by_length: dict[int, Key | list[Key]] = {}  # shorter pieces: the one of that length, or a list of several
        self.bits = self.mirror = 0
        self.tokens = 0  # in all waiting pieces, their BOS and context included
        self.row = self.inserted = self.repeated = self.cropped = self.padded = 0
        self._base: tuple[int, dict[Key, tuple[int, int, int]]] | None = None  # (row, what waited then)
        self._log: list[tuple[int, Sequence[Key], Sequence[int]]] = []  # (row, keys, lengths) pushed since

    def __len__(self) -> int:
        return len(self.docs)

    def waiting(self) -> list[tuple[Key, int, int, int]]:
        """(key, length, start, arrived) of each waiting piece, oldest first; pushed again so, they make this packer."""
        return [(key, *piece) for key, piece in self.docs.items()]

    @property
    def ready(self) -> bool:
        """Whether the waiting pieces can fill a row."""
        return self.tokens >= self.capacity

    @property
    def pending(self) -> int:
        """Tokens of waiting documents that no row has had yet (BOS and context of continuations not counted)."""
        return self.tokens - sum(1 + min(self.overlap, start - 1) for _, start, _ in self.docs.values() if start)

    def push(self, key: Key, length: int, start: int = 0, arrived: int | None = None) -> None:
        """Add a piece of `length` tokens. `start` and `arrived` are given when a saved packer is filled again."""
        self._add((key,), (length,))
        self.docs[key] = (length, start, self.row if arrived is None else arrived)
        self._base = None

    def push_many(self, keys: Sequence[Key], lengths: Sequence[int]) -> None:
        """Add whole documents, in order. Both sequences must stay as they are."""
        if self._base is not None:
            self._log.append((self.row, keys, lengths))
        self.docs.update(zip(keys, zip(lengths, repeat(0), repeat(self.row))))
        self._add(keys, lengths)

    def _add(self, keys: Sequence[Key], lengths: Sequence[int]) -> None:
        """All but `docs`."""
        by_length, capacity, new = self.by_length, self.capacity, []
        for key, length in zip(keys, lengths):
            if length >= capacity:
                self.long.append(key)
                continue
            same = by_length.setdefault(length, key)
            if same is key:
                new.append(length)
            elif type(same) is list:
                same.append(key)
            else:
                by_length[length] = [same, key]
        self.tokens += sum(lengths)
        self._turn_on(new)

    def _turn_on(self, lengths: list[int]) -> None:
        """Set the bits of lengths that are new. For many, all at once: an integer of T bits is made anew by each
        operation."""
        if len(lengths) > 8:
            on = np.zeros(self.capacity + 1, np.uint8)
            on[lengths] = 1
            self.bits |= int.from_bytes(np.packbits(on, bitorder="little"), "little")
            self.mirror |= int.from_bytes(np.packbits(on), "big") >> -len(on) % 8
            return
        for length in lengths:
            self.bits |= 1 << length
            self.mirror |= 1 << self.capacity - length

    def _several(self, length: int) -> bool:
        """Whether more than one of the shorter pieces has that length."""
        return type(self.by_length[length]) is list

    def _take(self, length: int, placements: list[Placement], room: int) -> None:
        """Place the oldest piece of that length; what is beyond `room` is dropped or comes back. A length of
        `capacity` means the oldest of the long ones."""
        if length >= self.capacity:
            key = self.long.popleft()
        elif type(key := self.by_length[length]) is list:
            same, key = key, key.pop(0)
            if len(same) == 1:
                self.by_length[length] = same[0]
        else:
            del self.by_length[length]
            self.bits ^= 1 << length
            self.mirror ^= 1 << self.capacity - length
        length, start, _ = self.docs.pop(key)
        self.tokens -= length
        if start == 0 and length <= room:
            placements.append((key, 0, length, 0))
            return
        placed = length if length < room else room
        if start == 0:
            total, used = length, placed
            placements.append((key, 0, placed, 0))
        else:
            context = min(self.overlap, start - 1)
            off = min(context, placed - 1)
            total, used = start + length - 1 - context, start + placed - 1 - off
            placements.append((key, start - context, placed, off))
            self.inserted += 1
            self.repeated += off
        if placed < length:
            if self.split:
                rest = 1 + min(self.overlap, used - 1) + total - used
                self._add((key,), (rest,))
                self.docs[key] = (rest, used, self.row)
            else:
                self.cropped += length - placed

    def empty(self) -> "BestFit":
        """A packer of the same kind in which nothing waits."""
        return BestFit(self.capacity - 1, split=self.split, overlap=self.overlap, max_wait=self.max_wait)

    def frozen(self) -> "Frozen":
        """The packer as it is now, for later."""
        if self._base is None or self.row - self._base[0] >= REPACKED_ROWS:
            self._base, self._log = (self.row, self.docs.copy()), []
        return Frozen(self, self._base, self._log)

    def document_length(self, length: int, start: int) -> int:
        """Tokens of the whole document that a piece (length, start) is of."""
        return start + length - 1 - min(self.overlap, start - 1) if start else length

    def next_row(self) -> list[Placement]:
        """The next row. The caller sees to it that `ready` holds."""
        placements: list[Placement] = []
        take, by_length, capacity = self._take, self.by_length, self.capacity
        self.row += 1
        length, _, arrived = self.docs[next(iter(self.docs))]
        if self.long and (length >= capacity or self.row - arrived <= self.max_wait):
            take(capacity, placements, capacity)
            return placements
        take(length, placements, capacity)
        room = capacity - length
        while room:
            if room in by_length:
                take(room, placements, room)
                return placements
            pairs = self.bits & self.mirror >> capacity - room
            if pairs:
                larger = pairs.bit_length() - 1
                if 2 * larger != room or self._several(larger):
                    take(larger, placements, larger)
                    take(room - larger, placements, room - larger)
                    return placements
            if self.near_bits and (near := self.bits >> room & self.near_bits):
                take(room + (near & -near).bit_length() - 1, placements, room)
                return placements
            largest = (self.bits & (1 << room) - 1).bit_length() - 1
            if largest < 0:
                take(self._to_cut(), placements, room)
                return placements
            take(largest, placements, largest)
            room -= largest
        return placements

    def _to_cut(self) -> int:
        """Length of the piece to cut when none fits: the longest where its rest comes back (short ones are worth more
        as fillers), the shortest where the rest is dropped."""
        if self.long and (self.split or not self.bits):
            return self.capacity
        return self.bits.bit_length() - 1 if self.split else (self.bits & -self.bits).bit_length() - 1


class Frozen:
    """A `BestFit` as it was: counters, and what makes the rest."""

    __slots__ = ("_base", "_empty", "_log", "_logged", "cropped", "inserted", "padded", "repeated", "row")

    def __init__(self, packer: BestFit, base: tuple[int, dict[Key, tuple[int, int, int]]],
                 log: list[tuple[int, Sequence[Key], Sequence[int]]]):
        self.row, self.inserted, self.repeated = packer.row, packer.inserted, packer.repeated
        self.cropped, self.padded = packer.cropped, packer.padded
        self._empty, self._base, self._log, self._logged = packer.empty, base, log, len(log)

    def thawed(self) -> BestFit:
        """The packer itself, but for its counters. Packs up to REPACKED_ROWS rows again."""
        packer = self._empty()
        packer.row, waiting = self._base
        for key, piece in waiting.items():
            packer.push(key, *piece)
        for row, keys, lengths in self._log[:self._logged]:
            while packer.row < row:
                packer.next_row()
            packer.push_many(keys, lengths)
        while packer.row < self.row:
            packer.next_row()
        return packer


class Binned(BestFit):
    """Stored entries, whole: the longest first, then what fills the row best; the rest of the row is padding. With
    `pack=False` a row is one entry, in order."""

    own_bos = False

    def __init__(self, T: int, *, max_wait: int = 256, pack: bool = True):
        super().__init__(T, max_wait=max_wait)
        self.pack = pack

    def empty(self) -> "Binned":
        """A packer of the same kind in which nothing waits."""
        return Binned(self.capacity - 1, max_wait=self.max_wait, pack=self.pack)

    @property
    def ready(self) -> bool:
        """Whether an entry waits."""
        return bool(self.docs)

    def push_many(self, keys: Sequence[Key], lengths: Sequence[int]) -> None:
        """Add entries, in order. ValueError for one that is longer than a row."""
        if max(lengths) > self.capacity:
            raise ValueError(f"an entry has {max(lengths):,} tokens, a row of the binned layout {self.capacity:,}; "
                             f"make the shards with --max-length {self.capacity - 1}, or take --packing bestfit")
        super().push_many(keys, lengths)

    def next_row(self) -> list[Placement]:
        """The next row; what its placements leave of T + 1 tokens is padding."""
        placements: list[Placement] = []
        room = self.capacity
        self.row += 1
        length, _, arrived = self.docs[next(iter(self.docs))]
        if self.pack and self.row - arrived <= self.max_wait:
            length = self.capacity if self.long else self.bits.bit_length() - 1
        while length:
            self._take(length, placements, room)
            room -= length
            length = self._best(room) if self.pack and room else 0
        self.padded += room
        return placements

    def _best(self, room: int) -> int:
        """Length of the entry to go on with: an exact fit, the larger of an exact pair, the largest that fits, or 0."""
        if room in self.by_length:
            return room
        pairs = self.bits & self.mirror >> self.capacity - room
        larger = pairs.bit_length() - 1
        if pairs and (2 * larger != room or self._several(larger)):
            return larger
        return max(0, (self.bits & (1 << room) - 1).bit_length() - 1)
