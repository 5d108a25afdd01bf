"""
Rows: from placements to tokens.

A packer says which documents a row is made of; the tokens come from whoever holds the documents that wait. There are
two ways to hold them:

    by key     bestfit, binned    a row names documents       {a: # a a a a a, b: # b, ...}
    on a tape  concat             a row is a stretch          [# a a a a a # b | # c c c ...]   positions 0, 1, 2, ...

The tape is cut into **pieces**, arrays that stand at known positions. The short documents of a memory-mapped unit are
gathered into one piece in the order in which they are used. Long documents, and texts, are pieces of their own:
gathering them would only hold more memory. Neighbours among the rows share a token:

    T = 4      # a a a a a # b c      row 0:  # a a a a      row 1:  a a # b c

Either way a batch is one concatenation of slices, which takes a third of the time of one for each row.

Rejected: gathering all tokens of a batch by one array of indices. It takes three passes over 8-byte indices for each
2-byte token; slices take one pass over the tokens. Gathering a stretch when its rows are copied: fewer tokens wait, but
finding the documents of each stretch takes as long as all else that is done for its rows.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanochat.concat import Run, placements_of
from nanochat.packing import Placement

if TYPE_CHECKING:
    from nanochat.feed import Feed

Document = tuple[int, int, int]  # (epoch, group, row in the group): what cursors name documents by
Key = int  # the same as one number, for packers: dicts hash it sooner, and Python's collector passes it by


def to_key(epoch: int, group: int, row: int) -> Key:
    """The number of a document. Those of a group's rows follow one another."""
    return epoch << 64 | group << 32 | row


def to_document(key: Key) -> Document:
    """What has that number."""
    return key >> 64, key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF


def named(placements: Sequence[Placement]) -> list[Placement]:
    """Placements of documents instead of keys."""
    return [(to_document(key), start, length, off) for key, start, length, off in placements]


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


class _OfFeed:
    """What rows have by their feed."""

    __slots__ = ()
    feed: "Feed"
    placed: list[Placement]  # of keys

    @property
    def lane(self) -> int:
        """Whose row it is."""
        return self.feed.lane

    @property
    def bucket(self) -> str:
        """Which bucket it comes from."""
        return self.feed.bucket

    @property
    def placements(self) -> list[Placement]:
        """Which documents the row is made of."""
        return named(self.placed)


@dataclass(slots=True)
class PlacedRow(_OfFeed):
    """A packed row: placements, and for each what its tokens come from."""

    feed: "Feed"
    index: int  # of this lane's rows
    placed: list[Placement]  # of keys
    taken: list[Any]  # of each: (tokens or a Deferred, how many are gone, where live ones begin), or if plain, tokens
    plain: bool  # every document is there, begins with its token 0 and is live

    @property
    def documents(self) -> list[tuple[Any, int, int]]:
        """For each placement (tokens or a Deferred, how many of them are gone, where live ones begin)."""
        return [(tokens, 0, 0) for tokens in self.taken] if self.plain else self.taken

    @staticmethod
    def copy(rows: "Sequence[PlacedRow]", bos: np.ndarray, tokens: np.ndarray, live: np.ndarray,
             doc_ids: np.ndarray | None) -> bool:
        """`copy_rows` of this kind."""
        pieces: list[np.ndarray] = []
        framed, masked, width = rows[0].feed.config.framed, False, len(bos)
        for i, row in enumerate(rows):
            if row.plain:
                pieces += row.taken
                if (length := row.placed[-1][2]) < len(pieces[-1]):
                    pieces[-1] = pieces[-1][:length]
            else:
                pieces += row._pieces(bos, live[i])
                masked = True
            if not framed and (at := sum(length for _, _, length, _ in row.placed)) < width:
                pieces.append(bos[at:])
                live[i, at:] = 0
        np.concatenate(pieces, out=tokens.reshape(-1, copy=False), casting="unsafe")
        if not framed:
            live[:, 1:] &= tokens[:, :-1] != bos[0]  # what follows the end of a document is off
        if doc_ids is not None:
            for row, ids in zip(rows, doc_ids):
                number_documents(ids, row.placed)
        return masked or not framed

    def _pieces(self, bos: np.ndarray, live: np.ndarray) -> list[np.ndarray]:
        """What the row is put together from; writes the overlaps into `live`."""
        own_bos, framed = self.feed.packer.own_bos, self.feed.config.framed
        pieces, at = [], 0
        for (key, start, length, off), (document, gone, prefix) in zip(self.placed, self.taken):
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
    key: Key | None = None  # of a restored document


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

    def add(self, tokens: Sequence[np.ndarray], lengths: Sequence[int], overlaps: Sequence[int]) -> None:
        """Append whole documents: an array of each, or one of all."""
        if len(tokens) == 1:
            self._append(tokens[0], live_of(lengths, overlaps))
            return
        for i, document in enumerate(tokens):
            self._append(document, live_of(lengths[i:i + 1], overlaps[i:i + 1]))

    def _append(self, tokens: np.ndarray, live: np.ndarray | None) -> None:
        begin, self.end = self.end, self.end + len(tokens)
        self.pieces.append(Piece(begin, self.end, tokens, live))

    def restore(self, key: Key, length: int, start: int, overlap: int) -> None:
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


class Keys(Sequence[Key]):
    """The documents of a unit, numbered when somebody asks: rows of a tape are made without their names."""

    __slots__ = ("_first", "_order")

    def __init__(self, first: Key, order: list[int]):
        self._first, self._order = first, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: Any) -> Any:
        return self._first + self._order[i]


class Known(NamedTuple):
    """What a `TapeRow` tells of a document."""

    length: int


@dataclass(slots=True)
class TapeRow(_OfFeed):
    """A row of `concat`: a stretch of the tape. What its placements are is found out when it is asked for."""

    feed: "Feed"
    index: int  # of this lane's rows
    first: int  # position of its first token
    pieces: Sequence[Piece]  # of its stretch: rows taken at once share them
    runs: tuple[Run, ...]

    @property
    def placed(self) -> list[Placement]:  # type: ignore[override]
        """As of a `PlacedRow`."""
        return placements_of(self.runs, self.first, self.first + self.feed.config.T + 1)

    @property
    def documents(self) -> list[tuple[Known, int, int]]:
        """For each placement (length of the whole document, 0, 0)."""
        ends = {key: (end, before) for run in self.runs for key, end, before in zip(
            run.keys, run.ends, (run.first - run.gone, *run.ends))}
        return [(Known(ends[key][0] - ends[key][1]), 0, 0) for key, _, _, _ in self.placed]

    @staticmethod
    def copy(rows: "Sequence[TapeRow]", bos: np.ndarray, tokens: np.ndarray, live: np.ndarray,
             doc_ids: np.ndarray | None) -> bool:
        """`copy_rows` of this kind."""
        parts: list[np.ndarray] = []
        width, masked = len(bos), False
        for i, row in enumerate(rows):
            first = row.first
            end = first + width
            for begin, stop, found, is_live, key in row.pieces:
                if stop <= first:
                    continue
                if type(found) is Deferred:
                    assert key is not None
                    found = row.feed.tokens_of(key, found)
                a, b = first - begin if first > begin else 0, (end if end < stop else stop) - begin
                parts.append(found[a:b])
                if is_live is not None:
                    live[i, begin + a - first:begin + b - first], masked = is_live[a:b], True
                if stop >= end:
                    break
        np.concatenate(parts, out=tokens.reshape(-1, copy=False), casting="unsafe")
        if doc_ids is not None:
            for row, ids in zip(rows, doc_ids):
                number_documents(ids, row.placed)
        return masked


Row = PlacedRow | TapeRow


def copy_rows(rows: Sequence[Any], bos: np.ndarray, tokens: np.ndarray, live: np.ndarray,
              doc_ids: np.ndarray | None = None) -> bool:
    """Write the tokens of n rows of one stream into `tokens` (n, T + 1), C-contiguous, 0 into `live` (n, T + 1) u8
    where one is no target, and into `doc_ids` (n, T + 1) int32, if given, which of its row's documents each belongs to.
    `bos`: the BOS id, (T + 1,) times. Returns whether `live` was written."""
    return type(rows[0]).copy(rows, bos, tokens, live, doc_ids)
