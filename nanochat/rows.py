"""
Rows: from placements to tokens.

A packer says which documents a row is made of; the tokens come from whoever holds the documents that wait. There are
two ways to hold them:

    by key     bestfit, binned    a row names documents       {a: # a a a a a, b: # b, ...}
    on a tape  concat             a row is a stretch          [# a a a a a # b | # c c c ...]   positions 0, 1, 2, ...

The tape is cut into **pieces**, arrays that stand at known positions. The short documents of a memory-mapped unit are
gathered into one piece in the order in which they are used, so that a row is one copy, usually from one piece. Long
documents, and texts, are pieces of their own: gathering them would only hold more memory.

Rejected: gathering all tokens of a batch by one array of indices. It takes three passes over 8-byte indices for each
2-byte token; slices take one pass over the tokens.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanochat.packing import Placement, Run, placements_of

if TYPE_CHECKING:
    from nanochat.feed import Feed

Document = tuple[int, int, int]  # (epoch, group, row in the group): what packers and cursors name documents by
JOINED_TOKENS = 1 << 17  # of a unit that is gathered: 2 or 4 bytes each, for each lane


class Deferred:
    """A waiting document of a restored feed: its length is known, its tokens are read when a row places it."""

    __slots__ = ("index", "length", "texts")

    def __init__(self, texts: "Future[dict[int, Any]]", index: int, length: int):
        self.texts, self.index, self.length = texts, index, length


def number_documents(doc_ids: np.ndarray, placements: Sequence[Placement]) -> None:
    """Write which of a row's documents each token belongs to, (T + 1,) int32; padding counts as one more."""
    lengths = [placement[2] for placement in placements]
    at = sum(lengths)
    doc_ids[:at] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    doc_ids[at:] = len(lengths)


@dataclass(slots=True)
class PlacedRow:
    """A packed row: placements, and for each what its tokens come from. `copy` writes the tokens."""

    lane: int
    index: int  # of this lane's rows
    bucket: str
    placements: list[Placement]
    documents: list[tuple[Any, int, int]]  # (tokens or a Deferred, how many are gone, where live ones begin)
    feed: "Feed"
    plain: bool  # every document is there, begins with its token 0 and is live

    def copy(self, bos: np.ndarray, tokens: np.ndarray, live: np.ndarray, doc_ids: np.ndarray | None = None) -> None:
        """Write the row's tokens (T + 1,), 0 into `live` (T + 1,) u8 where a token is no target, and into `doc_ids`
        (T + 1,) int32, if given, which of the row's documents each token belongs to. `bos`: the BOS id, (T + 1,)
        times."""
        if self.plain:
            pieces = [document for document, _, _ in self.documents]
            _, _, length, _ = self.placements[-1]
            if length < len(pieces[-1]):
                pieces[-1] = pieces[-1][:length]
        else:
            pieces = self._pieces(bos, live)
        framed = self.feed.config.framed
        if not framed and (at := sum(map(len, pieces))) < len(tokens):
            pieces.append(bos[at:])
            live[at:] = 0
        if len(pieces) == 1:
            tokens[...] = pieces[0]
        else:
            np.concatenate(pieces, out=tokens, casting="unsafe")
        if not framed:
            live[1:] &= tokens[:-1] != bos[0]  # what follows the end of a document is off
        if doc_ids is not None:
            number_documents(doc_ids, self.placements)

    def _pieces(self, bos: np.ndarray, live: np.ndarray) -> list[np.ndarray]:
        """What the row is put together from; writes the overlaps into `live`."""
        own_bos, framed = self.feed.packer.own_bos, self.feed.config.framed
        pieces, at = [], 0
        for (key, start, length, off), (document, gone, prefix) in zip(self.placements, self.documents):
            if type(document) is Deferred:
                document = self.feed.tokens_of(key, document)
            first = start - gone
            if start and own_bos:
                pieces.append(bos[:1])
                pieces.append(document[first:first + length - 1])
                live[at + 1:at + 1 + max(off, min(prefix - start, length - 1))] = 0
            else:
                pieces.append(document if length == len(document) else document[first:first + length])
                if prefix > start:
                    live[at + max(framed - start, 0):at + min(prefix - start, length)] = 0
            at += length
        return pieces


# ---- the tape -------------------------------------------------------------------------------------------------------

class Piece(NamedTuple):
    """An array on the tape."""

    begin: int  # position of its element 0
    stop: int  # position behind its last
    tokens: Any  # (stop - begin,), a Deferred, or None: restored, not asked for
    live: np.ndarray | None  # (stop - begin,) u8, 0 where a token is no target; None: all are
    key: Document | None = None  # of a restored document


def live_of(lengths: Sequence[int], overlaps: Sequence[int]) -> np.ndarray | None:
    """The target mask, u8, of documents one after another that begin with BOS and so many repeated tokens; None where
    none is repeated."""
    if not any(overlaps):
        return None
    live, at = np.ones(sum(lengths), np.uint8), 0
    for length, overlap in zip(lengths, overlaps):
        live[at + 1:at + 1 + overlap] = 0
        at += length
    return live


class Tape:
    """The tokens of documents that wait in a `Concat`, by the positions that it counts."""

    def __init__(self) -> None:
        self.pieces: deque[Piece] = deque()
        self.end = 0

    def add(self, tokens: Sequence[np.ndarray], lengths: Sequence[int], overlaps: Sequence[int], *, join: bool) -> None:
        """Append whole documents. `join`: gather them, if they are few tokens, instead of holding each."""
        if join and tokens and sum(lengths) <= JOINED_TOKENS:
            self._append(np.concatenate(tokens), live_of(lengths, overlaps))
            return
        for i, document in enumerate(tokens):
            self._append(document, live_of(lengths[i:i + 1], overlaps[i:i + 1]))

    def _append(self, tokens: np.ndarray, live: np.ndarray | None) -> None:
        begin, self.end = self.end, self.end + len(tokens)
        self.pieces.append(Piece(begin, self.end, tokens, live))

    def restore(self, key: Document, length: int, start: int, overlap: int) -> None:
        """Append a document of `length` tokens, of which the first `start` are used up; its tokens come later."""
        begin, self.end = self.end - start, self.end - start + length
        self.pieces.append(Piece(begin, self.end, None, live_of((length,), (overlap,)), key))

    def take(self, first: int, stop: int) -> Sequence[Piece]:
        """The pieces that hold positions first .. stop - 1. What stands before `first` is forgotten."""
        pieces = self.pieces
        while pieces[0].stop <= first:
            pieces.popleft()
        head = pieces[0]
        if head.stop >= stop:
            return (head,)
        found = []
        for piece in pieces:
            found.append(piece)
            if piece.stop >= stop:
                break
        return found


class Keys(Sequence[Document]):
    """The documents of a unit, named when somebody asks: rows of a tape are made without their names."""

    __slots__ = ("_epoch", "_first", "_group", "_order")

    def __init__(self, epoch: int, group: int, first: int, order: list[int]):
        self._epoch, self._group, self._first, self._order = epoch, group, first, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: Any) -> Any:
        return self._epoch, self._group, self._first + self._order[i]


class Known(NamedTuple):
    """What a `TapeRow` tells of a document."""

    length: int


@dataclass(slots=True)
class TapeRow:
    """A row of `concat`: a stretch of the tape. What its placements are is found out when it is asked for."""

    feed: "Feed"
    index: int  # of this lane's rows
    first: int  # position of its first token
    pieces: Sequence[Piece]
    runs: tuple[Run, ...]

    @property
    def lane(self) -> int:
        """As of a `PlacedRow`."""
        return self.feed.lane

    @property
    def bucket(self) -> str:
        """As of a `PlacedRow`."""
        return self.feed.bucket

    @property
    def placements(self) -> list[Placement]:
        """As those of a `PlacedRow`."""
        return placements_of(self.runs, self.first, self.first + self.feed.config.T + 1)

    @property
    def documents(self) -> list[tuple[Known, int, int]]:
        """For each placement (length of the whole document, 0, 0)."""
        ends = {key: (end, before) for run in self.runs for key, end, before in zip(
            run.keys, run.ends, (run.first - run.gone, *run.ends))}
        return [(Known(ends[key][0] - ends[key][1]), 0, 0) for key, _, _, _ in self.placements]

    def copy(self, bos: np.ndarray, tokens: np.ndarray, live: np.ndarray, doc_ids: np.ndarray | None = None) -> None:
        """As `PlacedRow.copy`."""
        first, stop, pieces = self.first, self.first + len(tokens), self.pieces
        if len(pieces) == 1:
            begin, _, source, is_live, _ = pieces[0]
            if is_live is None and type(source) is not Deferred:  # most rows: all in one piece
                tokens[...] = source[first - begin:stop - begin]
                pieces = ()
        for begin, end, source, is_live, key in pieces:
            if type(source) is Deferred:
                assert key is not None
                source = self.feed.tokens_of(key, source)
            a, b = max(first, begin), min(stop, end)
            tokens[a - first:b - first] = source[a - begin:b - begin]
            if is_live is not None:
                live[a - first:b - first] = is_live[a - begin:b - begin]
        if doc_ids is not None:
            number_documents(doc_ids, self.placements)


Row = PlacedRow | TapeRow
