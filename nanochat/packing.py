"""
Packers: from document lengths to rows, without a token in sight.

A packer takes documents as (key, length) and returns rows as lists of placements. It never sees a
token. So the same code streams text, reads token files, plans a run from lengths alone, counts
where every token goes, and finds the documents of any step.

    T = 7, so a row has 8 tokens; three documents are pending, # is BOS:   a: #aaaaa    b: #b    c: #cccccccc

    bestfit    # a a a a a # b      the oldest first, then the document (or pair) that fills the row exactly
      crop     # c c c c c c c      bestfit drops the tail of a cut document, or
      split    # c c c c c c c      packs it later: BOS, the last tokens before it (targets off), the tail
               # c c c ...
    concat     # a a a a a # b      one stream of tokens; the next row starts with the last token of this one
               b # c c c c c c
    binned     a a a a a / b /      stored entries (/ is EOD), whole; padding fills the row

A **placement** is `(key, start, length, repeated)`: `length` tokens of the row come from document `key`,
beginning at its token `start`. Token 0 of a document is its BOS. In `bestfit`, a placement with
`start > 0` begins with a BOS of its own, which `length` counts, and the `repeated` tokens after that
BOS are context from an earlier row, whose targets are off.

**The token clock.** Each pending piece has its arrival: the number of tokens that arrived before
it, counting at most one row per piece. A document that fills a row is due once the number of tokens
that have left reaches its arrival. If none is due, the row starts with the oldest filler. Each row is
completed by exact fits, pairs, and the largest filler that fits.

    arrives     a(3)   L(20)   b(5)   c(2)  ...     T = 8; arrivals 0, 3, 12, 17: L counts 9, a full row
    tokens gone  0..2: rows of a, b, c ...          3 or more: L is due, the next row is L

So every stretch of rows holds long and short documents in the proportions of the data, and nothing
waits forever. The tail of a cut document arrives again behind all pending pieces, and starts a row
when it is due. So the pieces of one document lie as far apart as the buffer allows.

**The buffer** counts fillers only. Long documents need no partner, so a lane continues to read
until enough fillers are pending, or until its pending tokens reach a limit (`token_limit`).

**The end of an epoch.** A lane finishes an epoch before it begins the next one. Pieces that no
longer fill a row are passed to `lead`: the next row starts with them, and documents of the next
epoch complete it.

Rejected: long documents first (the first rows hold nothing else); starting each row with the oldest
document (early rows then hold mostly short ones); tails as fillers (two pieces of one document in
neighbouring rows); nanochat's search through a list for each placement, where long documents fill
up the buffer.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

# part of the stream's law: a packer that places anything differently needs a new number
VERSION = 3
LIMIT_ROW = 2049  # `token_limit` counts a row as at least this many tokens
COUNTS = {  # {name in cursors: attribute of a packer}
    "row": "num_rows",
    "inserted": "inserted",
    "repeated": "repeated",
    "cropped": "cropped",
    "padded": "padded",
    "left": "departed",
}

Key = Any  # the caller's name for a document; hashable


class Placement(NamedTuple):
    """A part of a document in a row: `length` of the row's tokens."""

    key: Key
    start: int  # the first of the document's tokens in the row
    length: int  # tokens in the row, including the BOS in front of a continuation
    repeated: int  # tokens after that BOS that an earlier row also has: their targets are off


class Piece(NamedTuple):
    """A pending document, or the tail of one that was cut."""

    # tokens; of a tail: its lead-in (BOS and context) and the tokens not yet in any row
    length: int
    used: int  # tokens of the document already placed in rows; 0: the whole document is pending
    arrival: int  # tokens that arrived before it, counting at most one row per piece


def token_limit(buffer_size: int, capacity: int) -> int:
    """The maximum number of tokens that a lane keeps pending in `crop`.

    `buffer_size` rows, each counted as at least 2,049 tokens; a document counts as at most one row.
    The limit takes effect if few documents are shorter than a row. At 2 bytes per token, 64 lanes
    hold at most 34 MB for T up to 2,048.
    """
    return buffer_size * max(capacity, LIMIT_ROW)


class PackingSettings(Protocol):
    """The settings that packers use, those of `nanochat.order.StreamConfig`."""

    @property
    def T(self) -> int: ...
    @property
    def long_docs(self) -> str: ...
    @property
    def overlap(self) -> int: ...
    @property
    def pack(self) -> bool: ...


class Packer:
    """The base of all packers.

    Counts are in tokens and cover the packer's whole life, including before a resume. `state` and
    `restore` carry everything over: a restored packer places documents exactly as the original
    would.

    A new packer is a subclass and a line in `LAYOUTS` at the end of this file. --packing=NAME
    selects it. It must implement:

        push(key, length, used, arrival)   add a document, or a piece that `waiting` returned
        next_row()                         return the placements of the next row
        waiting()                          return {key: Piece} of all pending documents
        key in packer                      whether any part of a document is still pending

    `push` and `next_row` keep `tokens`, the number of pending tokens, and the counts in `COUNTS` up
    to date, but for the BOS and the repeated tokens of new documents: `Feed._push` adds these, so
    that a restored piece does not count twice. A key is at most once in a row. The packer may
    override:

        ready, wants(target), pending      if the number `tokens` alone does not decide them
        of(config)                         if it needs more settings than T
        lead(keys)                         if it changes the order of documents: the next row starts with these
        whole_length(piece)                if a piece is shorter than its document
        framed, own_bos, max_tokens        if documents have no BOS, tails get one, or rows hold only part of a document

    `framed`, `own_bos`, `max_tokens` and `whole_length` are also used in other threads, while this
    one pushes and packs: they may depend on nothing but the settings and their argument.

    `tests/ring/test_hacks.py` adds a packer in 30 lines. A layout's rows are part of a run's identity:
    to change any placement of an existing layout, rename it or raise VERSION.
    """

    # whether documents are `[BOS] + ids`; otherwise entries are used as they are stored
    framed = True
    own_bos = False  # whether placements with start > 0 begin with a BOS of their own

    @classmethod
    def of(cls, config: PackingSettings) -> "Packer":
        """An empty packer with these settings."""
        return cls(config.T)

    def __init__(self, T: int):
        self.capacity = T + 1  # tokens of a row
        # the part of a document that rows can hold, in tokens; None: all of it
        self.max_tokens: int | None = None
        self.tokens = 0  # in all pending pieces
        self.num_rows = 0  # packed
        self.inserted = 0  # BOS tokens put in front of documents and tails
        self.repeated = 0  # tokens emitted a second time as context
        self.cropped = 0  # tokens dropped
        self.padded = 0  # positions in rows that no document fills
        self.departed = 0  # tokens of pieces that have left, counting at most one row per piece

    def __contains__(self, key: Hashable) -> bool:
        """Whether any part of a document is pending."""
        raise NotImplementedError

    def waiting(self) -> dict[Key, Piece]:
        """A copy of everything that is pending."""
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Whether the pending pieces can fill a row."""
        return self.tokens >= self.capacity

    @property
    def pending(self) -> int:
        """Tokens of pending documents that are not yet in any row."""
        return self.tokens

    def wants(self, target: int) -> bool:
        """Whether to push more documents before packing the next row. It must be True while the
        packer is not `ready`.

        `target`: documents that should be pending.
        """
        return not self.ready

    def push(self, key: Key, length: int, used: int = 0, arrival: int | None = None) -> None:
        """Add a document of `length` tokens.

        A restored piece also has `used` and `arrival`, as in `Piece`.
        """
        raise NotImplementedError

    def lead(self, keys: Sequence[Key]) -> None:
        """Start the next row with these pieces, which together are shorter than a row.

        A packer that keeps documents in order does that anyway.
        """

    def next_row(self) -> list[Placement]:
        """The placements of the next row. Call it only if `ready`."""
        raise NotImplementedError

    def whole_length(self, piece: Piece) -> int:
        """Tokens of the whole document that a pending piece belongs to."""
        return piece.length

    def state(self) -> tuple[dict[str, int], dict[Key, Piece]]:
        """The packer's present state: (its counts, a copy of its pending pieces)."""
        counts = {name: getattr(self, attribute) for name, attribute in COUNTS.items()}
        return {**counts, "pending": self.pending}, self.waiting()

    def restore(self, counts: Mapping[str, Any], waiting: dict[Key, Piece]) -> None:
        """Give an empty packer the state that `state` returned."""
        for name, attribute in COUNTS.items():
            setattr(self, attribute, counts[name])
        for key, piece in waiting.items():
            self.push(key, *piece)


class BestFit(Packer):
    """Rows that start with BOS and are always full.

    The tail of a cut document is packed later if `split`; otherwise it is dropped.

    **Fitting.** A whole document that is shorter than a row is a *filler*. The lengths of all
    fillers are stored as bits of a Python integer: bit n is 1 if a filler of n tokens is pending. A
    second integer is its mirror image, where bit T + 1 - n is 1. One mask and one `bit_length` find
    the largest filler that fits r tokens. Two fillers fill r exactly if `bits & (mirror >> (T + 1 -
    r))` has a bit set: an n for which both bit n and bit r - n are 1.
    """

    own_bos = True

    @classmethod
    def of(cls, config: PackingSettings) -> "BestFit":
        return cls(config.T, split=config.long_docs == "split", overlap=config.overlap)

    def __init__(self, T: int, *, split: bool = False, overlap: int = 0):
        super().__init__(T)
        self.split = split
        self.overlap = overlap
        self.max_tokens = None if split else self.capacity
        # whether a row may end with a filler that is slightly too long
        self.crops_fillers = not split
        self.leading: list[Key] = []  # the pieces that the next row must start with
        self.fillers: dict[Key, Piece] = {}  # whole documents shorter than a row, oldest first
        self.timed: dict[Key, Piece] = {}  # documents that fill a row, and tails, oldest first
        self.by_length: dict[int, list[Key]] = {}  # the fillers of each length, oldest first
        self.bits = 0  # the lengths of the fillers, see above
        self.mirror = 0
        self.capped_tokens = 0  # pending, counting at most one row per piece
        self.lead_in_tokens = 0  # of the pending tails

    def __contains__(self, key: Hashable) -> bool:
        return key in self.fillers or key in self.timed

    def waiting(self) -> dict[Key, Piece]:
        return {**self.timed, **self.fillers}

    @property
    def pending(self) -> int:
        return self.tokens - self.lead_in_tokens

    def wants(self, target: int) -> bool:
        """True until `target` fillers are pending, or the pending tokens reach a limit."""
        limit = target * self.capacity if self.split else token_limit(target, self.capacity)
        full = len(self.fillers) >= target or self.capped_tokens >= limit
        return not self.ready or not full

    def push(self, key: Key, length: int, used: int = 0, arrival: int | None = None) -> None:
        """Add a document, or the tail that begins with its token `used`, lead-in included.

        `arrival` is its time on the token clock (default: behind everything that has arrived).
        """
        if arrival is None:
            arrival = self.departed + self.capped_tokens
        piece = Piece(length, used, arrival)
        self.tokens += length
        self.capped_tokens += min(length, self.capacity)

        # long documents and tails wait for their turn on the clock
        is_tail = used > 0
        if is_tail or length >= self.capacity:
            self.timed[key] = piece
            self.lead_in_tokens += self._lead_in(used)
            return

        # fillers are found by their length
        self.fillers[key] = piece
        if length not in self.by_length:
            self.by_length[length] = []
            self.bits |= 1 << length
            self.mirror |= 1 << self.capacity - length
        self.by_length[length].append(key)

    def _lead_in(self, used: int) -> int:
        """The tokens in front of a tail, which are not new: a BOS, and context from earlier rows. 0
        for a whole document."""
        if used == 0:
            return 0
        return 1 + min(self.overlap, used - 1)

    def whole_length(self, piece: Piece) -> int:
        return piece.used + piece.length - self._lead_in(piece.used)

    def _pop(self, key: Key) -> Piece:
        """Remove a piece, and advance the token clock."""
        if key in self.timed:
            piece = self.timed.pop(key)
            self.lead_in_tokens -= self._lead_in(piece.used)
        else:
            piece = self.fillers.pop(key)
            same = self.by_length[piece.length]
            same.remove(key)
            if not same:
                del self.by_length[piece.length]
                self.bits ^= 1 << piece.length
                self.mirror ^= 1 << self.capacity - piece.length
        capped = min(piece.length, self.capacity)
        self.tokens -= piece.length
        self.capped_tokens -= capped
        self.departed += capped
        return piece

    def _place(self, key: Key, room: int, placements: list[Placement]) -> int:
        """Place a piece in the last `room` tokens of a row, and return the room that remains.

        Tokens that do not fit are dropped or come back.
        """
        piece = self._pop(key)
        placed = min(piece.length, room)
        if piece.used == 0:
            placements.append(Placement(key, 0, placed, 0))
            used = placed
        else:
            # A tail is a BOS, then context (targets off), then new tokens. Its placement starts at
            # the first token of the context. If there is little room, the row may end within the
            # context.
            context = self._lead_in(piece.used) - 1
            repeated = min(context, placed - 1)
            placements.append(Placement(key, piece.used - context, placed, repeated))
            self.inserted += 1
            self.repeated += repeated
            used = piece.used + placed - 1 - repeated

        # `used` of the document's tokens are now in rows. The others are dropped, or arrive again
        # with a new lead-in.
        if placed < piece.length and self.split:
            remaining = self.whole_length(piece) - used
            self.push(key, self._lead_in(used) + remaining, used)
        elif placed < piece.length:
            self.cropped += piece.length - placed
        return room - placed

    def lead(self, keys: Sequence[Key]) -> None:
        self.leading = [*keys]

    def next_row(self) -> list[Placement]:
        """A full row.

        It starts with the pieces that lead it, or with the long document that is due, or with the
        oldest filler. Then come the pieces that fill it best.
        """
        placements: list[Placement] = []
        self.num_rows += 1
        room = self.capacity

        # the first piece
        if not self.leading:
            self.leading = [self._due()]
        for key in self.leading:
            room = self._place(key, room, placements)
        self.leading = []

        # the rest of the row
        while room:
            if self.fillers:
                length = self._best(room) or self._cut()
                key = self.by_length[length][0]
            else:
                key = next(iter(self.timed))
            room = self._place(key, room, placements)
        return placements

    def _due(self) -> Key:
        """The piece that the token clock puts at the start of a row."""
        oldest = next(iter(self.timed), None)
        if oldest is None:
            return next(iter(self.fillers))
        is_due = self.timed[oldest].arrival <= self.departed
        if is_due or not self.fillers:
            return oldest
        return next(iter(self.fillers))

    def _cut(self) -> int:
        """The length of the filler to cut if none fits.

        The shortest one if its tail is dropped, because that loses least; the longest one if its
        tail comes back.
        """
        return _highest(self.bits) if self.split else _lowest(self.bits)

    def _best(self, room: int) -> int:
        """The length of the filler that fills `room` best; 0 if none fits."""
        # an exact fit
        if room in self.by_length:
            return room
        # the larger of two fillers that fit exactly together
        pairs = self.bits & (self.mirror >> (self.capacity - room))
        if pairs:
            larger = _highest(pairs)
            is_half = 2 * larger == room  # then there must be two of them
            if not is_half or len(self.by_length[larger]) > 1:
                return larger
        # A filler that is too long by at most the length of the shortest one. Otherwise the row
        # would often end with the shortest filler, cropped. Cropping the longer one saves the short
        # ones for rows that need them.
        longer = self.bits >> room
        if self.crops_fillers and longer:
            excess = _lowest(longer)
            if excess <= _lowest(self.bits):
                return room + excess
        # the largest that fits
        fitting = self.bits & ((1 << room) - 1)
        return _highest(fitting) if fitting else 0


def _lowest(bits: int) -> int:
    """The number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1


def _highest(bits: int) -> int:
    """The number of the highest bit that is set."""
    return bits.bit_length() - 1


class Binned(BestFit):
    """Rows of whole stored entries: the oldest first, then those that fill the row best.

    Padding comes last. With `pack=False` each row is one entry, in order.
    """

    framed = own_bos = False

    @classmethod
    def of(cls, config: PackingSettings) -> "Binned":
        return cls(config.T, pack=config.pack)

    def __init__(self, T: int, *, pack: bool = True):
        super().__init__(T + 1)  # so that an entry of T + 1 tokens is a filler, too
        self.crops_fillers = False
        self.max_tokens = None
        self.pack = pack

    @property
    def ready(self) -> bool:
        return bool(self.fillers)

    def wants(self, target: int) -> bool:
        """True until `target` entries are pending."""
        return len(self.fillers) < max(1, target if self.pack else 1)

    def push(self, key: Key, length: int, used: int = 0, arrival: int | None = None) -> None:
        """ValueError for an entry that is longer than a row."""
        T = self.capacity - 2
        if length > T + 1:
            raise ValueError(
                f"a stored document has {length:,} tokens, but a row of the binned layout holds only "
                f"{T + 1:,}; make the shards with --max-length {T}, or use --packing bestfit"
            )
        super().push(key, length, used, arrival)

    def next_row(self) -> list[Placement]:
        """A row of entries, which may be shorter than T + 1 tokens; the rest is padding."""
        placements: list[Placement] = []
        self.num_rows += 1
        room = self._place(next(iter(self.fillers)), self.capacity - 1, placements)
        while self.pack and room:
            length = self._best(room)
            if length == 0:
                break
            room = self._place(self.by_length[length][0], room, placements)
        self.padded += room
        return placements


class Concat(Packer):
    """One stream of tokens.

    Nothing is dropped, and rows need not begin with a document. Each row starts with the last token
    of the previous row.
    """

    def __init__(self, T: int):
        super().__init__(T)
        self.documents: dict[Key, Piece] = {}  # in order; the next row repeats the last used token

    def __contains__(self, key: Hashable) -> bool:
        return key in self.documents

    def waiting(self) -> dict[Key, Piece]:
        return self.documents.copy()

    @property
    def pending(self) -> int:
        return self.tokens - (1 if self.num_rows else 0)

    def push(self, key: Key, length: int, used: int = 0, arrival: int | None = None) -> None:
        self.documents[key] = Piece(length, used, 0)
        self.tokens += length - used

    def next_row(self) -> list[Placement]:
        """A full row: documents in the order of their arrival, the last one cut at the row's end."""
        placements: list[Placement] = []
        room = self.capacity
        while room:
            key, (length, used, _) = next(iter(self.documents.items()))
            placed = min(length - used, room)
            placements.append(Placement(key, used, placed, 0))
            room -= placed
            if room:
                del self.documents[key]
            else:  # the row's last token is also the first one of the next row
                self.documents[key] = Piece(length, used + placed - 1, 0)
        self.tokens -= self.capacity - 1
        self.repeated += 1 if self.num_rows else 0
        self.num_rows += 1
        return placements


# --packing
LAYOUTS: dict[str, type[Packer]] = {"bestfit": BestFit, "concat": Concat, "binned": Binned}
