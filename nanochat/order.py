"""
The order of the data: settings of the stream, and which lane reads which documents when.

    epoch e of a bucket: its groups in a seeded permutation, cut into units, dealt in V contiguous shares

        group 7        group 2        group 0
        u0 u1 u2 u3 |  u4 u5 u6   |   u7 u8 u9 u10       lane 0: u0 u1   lane 1: u2 u3 u4   ...   (V = 4)

So a group is read by one lane (or two neighbours), once, in order; in a unit the documents are
permuted. In epoch e lane l takes share (l + e) mod V. Where a bucket has fewer units than lanes,
some shares are empty, and turning the shares gives every lane its turn.

Permutations sort raw words of a counter-based generator, keyed by (seed, bucket, epoch, group):
`nanochat.common.permutation`.
"""

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from nanochat.common import block, permutation, words
from nanochat.curriculum import Curriculum
from nanochat.packing import LAYOUTS, VERSION, Packer


@dataclass(frozen=True)
class StreamConfig:
    """Everything but data and tokenizer that decides what is in a row. ValueError for values that
    cannot work."""

    T: int  # tokens a row trains on; a row holds T + 1
    V: int = 64  # lanes
    seed: int = 0
    layout: str = "bestfit"  # bestfit | concat | binned
    long_docs: str = "crop"  # crop | split, for bestfit
    overlap: int = 64  # tokens of context repeated in front of a continuation, for split
    buffer_size: int = 128  # short documents that wait in a lane, for bestfit
    unit_size: int = 64  # documents read and tokenized at once, at most
    pack: bool = True  # False: one entry a row, for binned
    max_epochs: int = 0  # passes over a bucket, 0 = no limit; a curriculum has its own limits
    curriculum: Curriculum | None = None
    packer_version: int = VERSION

    def __post_init__(self) -> None:
        for name in ("T", "V", "buffer_size", "unit_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if self.layout not in LAYOUTS:
            raise ValueError(f"--packing: got {self.layout!r}, expected one of {', '.join(LAYOUTS)}")
        if not self.pack and self.layout != "binned":
            raise ValueError(f"--no-pack: got it with --packing {self.layout}, expected --packing binned")
        if self.long_docs not in ("crop", "split"):
            raise ValueError(f"--long-docs: got {self.long_docs!r}, expected crop or split")
        if self.layout == "bestfit" and self.long_docs == "split" and not 0 <= self.overlap <= self.T - 2:
            raise ValueError(f"--overlap: got {self.overlap}, expected 0 to T - 2 = {self.T - 2}, so that "
                             f"a continuation brings something new")
        if self.packer_version != VERSION:
            raise ValueError(f"this run was packed by packer version {self.packer_version}, this code has "
                             f"{VERSION}; go on with the code that began it, or start a new run "
                             f"(--model-tag)")

    def identity(self) -> dict[str, Any]:
        """All of it as JSON values: equal identities, equal streams of the same data."""
        curriculum = None if self.curriculum is None else self.curriculum.identity()
        return {**asdict(replace(self, curriculum=None)), "curriculum": curriculum}

    def epochs(self, bucket: str) -> int:
        """Passes allowed over a bucket, 0 = no limit."""
        return self.max_epochs if self.curriculum is None else self.curriculum.epochs(bucket)

    @property
    def framed(self) -> bool:
        """Whether documents are `[BOS] + ids`; otherwise entries are used as they are stored."""
        return LAYOUTS[self.layout].framed

    def new_packer(self) -> Packer:
        """An empty packer of this layout."""
        return LAYOUTS[self.layout].of(self)

    def fill_target(self, row: int) -> int:
        """Documents that should wait before row `row` of a lane is packed. It grows to `buffer_size`
        over the first rows, so that the first step waits for one unit of each lane."""
        return min(self.buffer_size, 2 * row)


def default_lanes(rows_per_step: int) -> int:
    """The largest divisor of R that is at most 64."""
    return max(v for v in range(1, 65) if rows_per_step % v == 0)


class Order:
    """The order of one bucket: epochs, shares, units.

    A small bucket gets smaller units (a power of two), so that each lane has several.
    """

    def __init__(self, groups: np.ndarray, *, bucket: str, config: StreamConfig):
        documents = int(groups.sum())
        self.unit_size = 1
        while self.unit_size * 2 <= min(config.unit_size, documents // (8 * config.V)):
            self.unit_size *= 2
        self.groups = groups  # (G,) int64, documents in each
        self.units_per_group = -(-groups // self.unit_size)
        self.num_units = int(self.units_per_group.sum())
        self.V, self.key = config.V, (config.seed, bucket)
        self._epoch = functools.lru_cache(4)(self._new_epoch)
        self._words = functools.lru_cache(config.V)(words)  # of the group that each lane reads

    def _new_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(groups in order, the first unit of each in the epoch and the end)."""
        groups = permutation(len(self.groups), *self.key, epoch)
        return groups, np.concatenate([[0], np.cumsum(self.units_per_group[groups])])

    def share(self, lane: int, epoch: int) -> range:
        """The units of an epoch that a lane reads."""
        return block((lane + epoch) % self.V, self.V, self.num_units)

    def unit(self, epoch: int, unit: int, stop: int) -> tuple[int, np.ndarray, int]:
        """(group, (n,) int64 rows of the group in the order in which they are used, the row behind
        the last one that units up to `stop` take of this group)."""
        groups, first = self._epoch(epoch)
        place = int(np.searchsorted(first, unit, side="right")) - 1
        group, size = int(groups[place]), self.unit_size
        begin = (unit - int(first[place])) * size
        drawn = self._words(int(self.groups[group]), *self.key, epoch, group)  # a word for each document
        rows = begin + np.argsort(drawn[begin:begin + size], kind="stable")
        last = min(len(drawn), (stop - int(first[place])) * size)
        return group, rows, last
