"""
Mixing: the bucket of row k of lane l, for any row, without a look at those before it.

    rows of a lane, in a phase of 600:
    |--- block 0: 256 rows ---|--- block 1: 256 rows ---|- 88 of block 2 -|   next phase: block 0 ...

In a block the counts are the weights, rounded: lay the buckets end to end on a line of 256 rows, and count for each
the points 1 - u, 2 - u, ... 256 - u that fall on it (systematic sampling).

    weights 5, 3, 1:   |------------ 142.2 ------------|------ 85.3 ------|- 28.4 -|
    u = 0.9                         143                         85            28
    u = 0.6                         142                         86            28

So each count is less than one row off its share and all sum to 256. With u = frac(block / golden ratio + lane
sqrt(2)), which is spread about as evenly as points can be, remainders carry over: in any run of up to 4,096 blocks a
bucket is less than five rows off, in all. The order in a block is a permutation keyed by (seed, phase, lane, block).
All arithmetic is of integers, a weight is the decimal that the file shows, and buckets are taken by name: the same
sequence on every machine, in whatever order the file names them.

Rejected: a draw for each row (a quarter of 256 rows would be 7 off, as a rule); remainders added up from block to
block (the mix of a row would need all blocks before it); counts as differences of rounded running totals (exact for
ever, but the count of a small bucket in one block can come out negative).
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping

import numpy as np

from nanochat.curriculum import Curriculum
from nanochat.order import permutation

BLOCK = 256
_GOLDEN, _SQRT2 = 0x9E3779B97F4A7C15, 0x6A09E667F3BCC909  # frac(golden ratio), frac(sqrt(2)), times 2**64


_Edges = tuple[list[str], list[int], list[int]]  # buckets; where each ends: whole rows; above which U one more
_Block = tuple[int, int, frozenset[str], list[str | None]]  # first row, end, dropped buckets, buckets of the rows
_NO_BLOCK: _Block = (0, 0, frozenset(), [])


def _edges(shares: Mapping[str, int]) -> _Edges:
    """Bucket j ends behind floor(BLOCK * P_j + u) rows, P_j being the share of buckets up to j, and u = U / 2**64.
    That is whole_j, and one more if U > bound_j: one comparison of integers, exact."""
    names, whole, bound, total, up_to = list(shares), [], [], sum(shares.values()), 0
    for name in names:
        up_to += shares[name]
        rows, rest = divmod(BLOCK * up_to, total)
        whole.append(rows)
        bound.append(-(-((total - rest) << 64) // total) - 1)
    return names, whole, bound


class Mixer:
    """The bucket of row k of lane l. No history: any row may be asked for at any time; the block in use of each lane
    is kept, so that going on in it is an index look-up. ValueError for a phase of no rows, and for no such row."""

    def __init__(self, curriculum: Curriculum, *, T: int, V: int, seed: int):
        self.V, self.seed = V, seed
        lengths = curriculum.phase_rows(T, V)
        self._starts = [sum(lengths[:i]) for i in range(len(lengths))]  # the first row of each phase
        self._shares = [phase.shares() for phase in curriculum.phases]
        self._blocks: dict[int, _Block] = {}  # the one in use of each lane

    def phase_of(self, row: int) -> tuple[int, int]:
        """(phase, counted from 0; row within the phase). Behind the end is still the last phase."""
        phase = bisect_right(self._starts, row) - 1
        if phase < 0:
            raise ValueError(f"row: got {row}, expected 0 or more")
        return phase, row - self._starts[phase]

    def bucket(self, lane: int, row: int, dropped: frozenset[str] = frozenset()) -> str | None:
        """The bucket of a lane's row where the lane has dropped some; None where it has dropped all of the phase."""
        first, end, without, buckets = self._blocks.get(lane, _NO_BLOCK)
        if not first <= row < end or without != dropped:
            first, _, _, buckets = self._blocks[lane] = self._load(lane, row, dropped)
        return buckets[row - first]

    def counts(self, lane: int, rows: range, dropped: frozenset[str] = frozenset()) -> dict[str, int]:
        """How often `bucket` gives each bucket for rows (in steps of 1) of a lane; those that never come are left
        out, and so are rows without a bucket. Whole blocks cost one comparison for each bucket."""
        assert rows.step == 1 and 0 <= lane < self.V
        total: Counter[str] = Counter()
        row = rows.start
        while row < rows.stop:
            phase, at = self.phase_of(row)
            stop = min(rows.stop, self._end(phase) or rows.stop)
            first, last = -(-at // BLOCK), (at + stop - row) // BLOCK  # whole blocks
            if first < last and at % BLOCK == 0:
                total.update(self._whole_blocks(phase, lane, first, last, dropped))
                row += (last - first) * BLOCK
            else:
                end = min(stop, row - at % BLOCK + BLOCK)
                block = self._draw(phase, lane, at // BLOCK, dropped)
                total.update(b for b in block[at % BLOCK:at % BLOCK + end - row] if b is not None)
                row = end
        return {bucket: n for bucket, n in sorted(total.items()) if n}

    def _end(self, phase: int) -> int | None:
        """The row behind a phase; None: it goes on for ever."""
        return self._starts[phase + 1] if phase + 1 < len(self._starts) else None

    def _load(self, lane: int, row: int, dropped: frozenset[str]) -> _Block:
        if not 0 <= lane < self.V:
            raise ValueError(f"lane: got {lane}, expected 0 to {self.V - 1}")
        phase, at = self.phase_of(row)
        first = row - at % BLOCK
        end = min(first + BLOCK, self._end(phase) or first + BLOCK)
        return first, end, dropped, self._draw(phase, lane, at // BLOCK, dropped)

    def _phase_edges(self, phase: int, dropped: frozenset[str]) -> _Edges:
        return _edges({bucket: n for bucket, n in self._shares[phase].items() if bucket not in dropped})

    def _draw(self, phase: int, lane: int, block: int, dropped: frozenset[str]) -> list[str | None]:
        """The buckets of a block's rows."""
        names, whole, bound = self._phase_edges(phase, dropped)
        if not names:
            return [None] * BLOCK
        u = (block * _GOLDEN + lane * _SQRT2) % 2**64
        line: list[str | None] = []
        for name, rows, b in zip(names, whole, bound):
            line += [name] * (rows + (u > b) - len(line))
        return [line[place] for place in permutation(BLOCK, self.seed, "mix", phase, lane, block).tolist()]

    def _whole_blocks(self, phase: int, lane: int, first: int, last: int, dropped: frozenset[str]) -> dict[str, int]:
        """How often each bucket is in blocks first .. last - 1 of a phase."""
        names, whole, bound = self._phase_edges(phase, dropped)
        blocks = np.arange(first, last, dtype=np.uint64)
        u = blocks * np.uint64(_GOLDEN) + np.uint64(lane * _SQRT2 % 2**64)  # mod 2**64, as integers of 64 bits do
        ends = [0] + [w * (last - first) + int((u > np.uint64(b)).sum()) for w, b in zip(whole, bound)]
        return {name: ends[j + 1] - ends[j] for j, name in enumerate(names)}
