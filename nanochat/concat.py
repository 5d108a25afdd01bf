"""
The packer of the `concat` layout: rows are stretches of one stream of tokens.

    position     0 1 2 3 4 5 6 7 8 9 ...          row k takes positions kT .. (k + 1)T of all that was pushed
    document     a a a a a a b b c c ...          since the packer was made

So a row is one number, whatever documents are in it: `advance` gives it, and `placements_of` tells which they are when
somebody asks. Telling for each row costs as much as all the rest of the loader does for a row of a memory map.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from nanochat.packing import Key, Placement


class Run(NamedTuple):
    """Documents that were pushed together into a `Concat`: an immutable stretch of its stream of tokens."""

    keys: Sequence[Key]
    ends: list[int]  # where each document ends in the stream, ascending
    first: int  # where the first one's first token that is left stands in the stream
    gone: int  # how many of the first one's tokens were used up when it was pushed
    arrived: int  # row


class Concat:
    """A `nanochat.packing.Packer`: nothing is dropped, rows are not aligned with documents."""

    own_bos = False

    def __init__(self, T: int):
        self.T = T
        self.runs: tuple[Run, ...] = ()  # with documents that wait; never changed, so rows and copies may keep it
        self.position = self.end = 0  # of the next row's first token, which the last row had too; of what is pushed
        self.row = self.inserted = self.repeated = self.cropped = self.padded = self.left = 0

    @property
    def tokens(self) -> int:
        """Left, the token shared with the last row included."""
        return self.end - self.position

    @property
    def num_ready(self) -> int:
        """How many rows the waiting documents fill."""
        return (self.end - self.position - 1) // self.T

    @property
    def ready(self) -> bool:
        """Whether they fill one."""
        return self.end - self.position > self.T

    def wants(self, target: int) -> bool:
        """Whether more documents should come before the next row is packed."""
        return not self.ready

    @property
    def pending(self) -> int:
        """Tokens that no row has had yet."""
        return self.end - self.position - (1 if self.row else 0)

    @property
    def docs(self) -> dict[Key, tuple[int, int, int]]:
        """{key: (length, start of what is left, arrived)} of what waits, in order; made for each call."""
        return {key: (length, start, arrived) for key, length, start, arrived in self.waiting()}

    def __len__(self) -> int:
        return sum(len(run.ends) - bisect_right(run.ends, self.position) for run in self.runs)

    def push(self, key: Key, length: int, start: int = 0, place: int | None = None) -> None:
        """Add a document of `length` tokens, of which the first `start` are used up."""
        first, self.end = self.end, self.end + length - start
        self.runs += (Run((key,), [self.end], first, start, self.row if place is None else place),)

    def push_many(self, keys: Sequence[Key], lengths: Sequence[int]) -> None:
        """Add whole documents, in order."""
        if lengths:
            first, ends = self.end, list(accumulate(lengths, initial=self.end))[1:]
            self.end = ends[-1]
            self.runs += (Run(keys, ends, first, 0, self.row),)

    def document_length(self, length: int, start: int) -> int:
        """Tokens of the whole document."""
        return length

    def advance(self, rows: int = 1) -> int:
        """Take so many rows: the first one's first position."""
        first = self.position
        self.position = position = first + rows * self.T
        runs = self.runs
        while runs and runs[0].ends[-1] <= position:
            runs = self.runs = runs[1:]
        self.repeated += rows - (self.row == 0)
        self.row += rows
        return first

    def next_row(self) -> list[Placement]:
        """The next row; its last token is where the next one starts."""
        runs, first = self.runs, self.advance()
        return placements_of(runs, first, first + self.T + 1)

    def waiting(self) -> list[tuple[Key, int, int, int]]:
        """(key, length, start, arrived) of each waiting document, in order; pushed again so, they make this packer."""
        return [(run.keys[i], run.ends[i] - begin, max(at, self.position) - begin, run.arrived)
                for run in self.runs for i, begin, at in _pieces(run, self.position)]

    def frozen(self) -> "FrozenConcat":
        """The packer as it is now, for later."""
        return FrozenConcat(self.T, self.runs, self.position, self.end, self.row, self.inserted, self.repeated)


class FrozenConcat(NamedTuple):
    """A `Concat` as it was."""

    T: int
    runs: tuple[Run, ...]
    position: int
    end: int
    row: int
    inserted: int
    repeated: int
    cropped: int = 0
    padded: int = 0
    left: int = 0

    def thawed(self) -> Concat:
        """The packer itself."""
        packer = Concat(self.T)
        packer.__dict__.update(self._asdict())
        return packer


def _pieces(run: Run, first: int) -> Iterator[tuple[int, int, int]]:
    """(number in the run, position of its token 0, position of its first token that was pushed) of each document of a
    run that ends behind position `first`."""
    for i in range(bisect_right(run.ends, first), len(run.ends)):
        if i:
            yield i, run.ends[i - 1], run.ends[i - 1]
        else:
            yield 0, run.first - run.gone, run.first


def placements_of(runs: Iterable[Run], first: int, stop: int) -> list[Placement]:
    """The placements of a row that takes positions first .. stop - 1."""
    found: list[Placement] = []
    for run in runs:
        for i, begin, at in _pieces(run, first):
            at = max(at, first)
            if at >= stop:
                return found
            found.append((run.keys[i], at - begin, min(run.ends[i], stop) - at, 0))
    return found
