"""
The order of the data: settings of the stream, and which lane reads which documents when.

    epoch e of a bucket: its groups in a seeded permutation, cut into units, dealt in V contiguous shares

        group 7        group 2        group 0
        u0 u1 u2 u3 |  u4 u5 u6   |   u7 u8 u9 u10          lane 0: u0 u1    lane 1: u2 u3 u4    ...    (V = 4)

So a group is read by one lane (or two neighbours), once, in order. In epoch e lane l takes share (l + e) mod V: where a
bucket has fewer units than lanes, some shares are empty, and turning the shares gives every lane its turn.

Permutations sort raw 64-bit words of the Philox counter generator, keyed by a hash of (seed, bucket, epoch, ...): NumPy
promises the words of a bit generator for all versions, but not what `Generator.permutation` makes of them.
"""

import hashlib
import threading
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nanochat.concat import Concat
from nanochat.packing import VERSION, BestFit, Binned, Packer

if TYPE_CHECKING:
    from nanochat.curriculum import Curriculum

LAYOUTS = ("bestfit", "concat", "binned")


@dataclass(frozen=True)
class StreamConfig:
    """Everything but data and tokenizer that decides what is in a row. Raises ValueError on values that cannot work."""

    T: int  # tokens a row trains on; a row holds T + 1
    V: int = 64  # lanes
    seed: int = 0
    layout: str = "bestfit"  # bestfit | concat | binned
    long_docs: str = "crop"  # crop | split, for bestfit
    overlap: int = 64  # tokens of context repeated in front of a continuation, for split
    buffer_size: int = 128  # documents that wait in a lane, for bestfit
    unit_size: int = 64  # documents read and tokenized at once, at most
    pack: bool = True  # False: one entry a row, for binned
    max_epochs: int = 0  # passes over a bucket, 0 = no limit; a curriculum has its own limits
    curriculum: "Curriculum | None" = None
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
            raise ValueError(f"--overlap: got {self.overlap}, expected 0 to T - 2 = {self.T - 2}, so that a "
                             f"continuation brings something new")
        if self.packer_version != VERSION:
            raise ValueError(f"this run was packed by packer version {self.packer_version}, this code has {VERSION}; "
                             f"go on with the code that began it, or start a new run (--model-tag)")

    def identity(self) -> dict[str, Any]:
        """All of it as JSON values: equal identities, equal streams of the same data."""
        curriculum = None if self.curriculum is None else self.curriculum.identity()
        plain = asdict(replace(self, curriculum=None))
        return {**plain, "curriculum": curriculum}

    def epochs(self, bucket: str) -> int:
        """Passes allowed over a bucket, 0 = no limit."""
        return self.max_epochs if self.curriculum is None else self.curriculum.epochs(bucket)

    @property
    def framed(self) -> bool:
        """Whether documents are `[BOS] + ids`; otherwise entries are used as they are stored."""
        return self.layout != "binned"

    def new_packer(self) -> Packer:
        """An empty packer of this layout."""
        if self.layout == "concat":
            return Concat(self.T)
        if self.layout == "binned":
            return Binned(self.T, pack=self.pack)
        return BestFit(self.T, split=self.long_docs == "split", overlap=self.overlap)

    def fill_target(self, lane: int, row: int) -> int:
        """Documents that should wait before row `row` of a lane is packed. It grows to `buffer_size` over the first
        rows, so that the first step waits for one unit of each lane."""
        if self.layout == "concat" or not self.pack:
            return 0
        return min(self.buffer_size, 2 * row)


def block(j: int, m: int, V: int) -> range:
    """Block j of m of V lanes: floor(jV/m) .. floor((j+1)V/m) - 1."""
    return range(j * V // m, (j + 1) * V // m)


def default_lanes(rows_per_step: int) -> int:
    """The largest divisor of R that is at most 64."""
    return max(v for v in range(1, 65) if rows_per_step % v == 0)


class _Generator(threading.local):
    """Each thread's Philox. Making one asks the system for entropy first, which takes longer than a thousand words."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(0)


_generator = _Generator()


def words(n: int, *key: Any) -> np.ndarray:
    """(n,) uint64: random words that depend on the key alone, on any machine and NumPy version."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    zeros = np.zeros(4, np.uint64)
    _generator.philox.state = {"bit_generator": "Philox", "buffer": zeros, "buffer_pos": 4, "has_uint32": 0,
                               "uinteger": 0, "state": {"counter": zeros, "key": np.frombuffer(digest, "<u8")}}
    return _generator.philox.random_raw(n)


def permutation(n: int, *key: Any) -> np.ndarray:
    """(n,) int64: a permutation that depends on the key alone, on any machine and NumPy version."""
    return np.argsort(words(n, *key), kind="stable")


class Order:
    """The order of one bucket: epochs, shares, units. A small bucket gets smaller units: each lane has several."""

    def __init__(self, groups: np.ndarray, *, bucket: str, config: StreamConfig):
        documents = int(groups.sum())
        self.unit_size = 1
        while self.unit_size * 2 <= min(config.unit_size, documents // (8 * config.V)):
            self.unit_size *= 2
        self.units_per_group = -(-groups // self.unit_size)
        self.num_units = int(self.units_per_group.sum())
        self.groups = groups
        self.V, self.key = config.V, (config.seed, bucket)
        self._rows: dict[tuple[int, int], np.ndarray] = {}  # of the groups in use, see `rows`
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(groups in order, first unit of each place and the end, place of each group); the last few are kept."""
        with self._lock:
            if epoch not in self._epochs:
                if len(self._epochs) >= 4:
                    del self._epochs[min(self._epochs)]
                groups = permutation(len(self.units_per_group), *self.key, epoch)
                first = np.concatenate([[0], np.cumsum(self.units_per_group[groups])])
                self._epochs[epoch] = groups, first, np.argsort(groups, kind="stable")
            return self._epochs[epoch]

    def share(self, lane: int, epoch: int) -> range:
        """The units of an epoch that a lane reads."""
        return block((lane + epoch) % self.V, self.V, self.num_units)

    def locate(self, epoch: int, unit: int) -> tuple[int, int]:
        """(group, unit within the group) of an epoch's unit."""
        groups, first, _ = self._epoch(epoch)
        place = int(np.searchsorted(first, unit, side="right")) - 1
        return int(groups[place]), unit - int(first[place])

    def span(self, epoch: int, group: int) -> range:
        """The units of an epoch that a group is cut into."""
        _, first, place = self._epoch(epoch)
        return range(int(first[place[group]]), int(first[place[group] + 1]))

    def sequence(self, epoch: int) -> np.ndarray:
        """The groups of an epoch in order, (G,) int64."""
        return self._epoch(epoch)[0]

    def rows(self, epoch: int, group: int, unit: int, n: int) -> np.ndarray:
        """The order in which a unit's n documents are used: (n,) int64 indices into the unit. A group has one row of
        words, of which each unit sorts its part. Those of all its units are sorted at once, which takes a tenth of the
        time: making a generator and calling NumPy cost more than the sorting."""
        rows = self._rows.get((epoch, group))
        if rows is None:
            rows = self._sorted(epoch, group)
        return rows[unit * self.unit_size:unit * self.unit_size + n]

    def _sorted(self, epoch: int, group: int) -> np.ndarray:
        """`rows` of all units of a group, one after another."""
        n, size = int(self.groups[group]), self.unit_size
        drawn = words(n, *self.key, epoch, group)
        if n % size:
            drawn = np.append(drawn, np.full(size - n % size, np.iinfo(np.uint64).max))
        rows = np.argsort(drawn.reshape(-1, size), axis=1, kind="stable").reshape(-1)  # what fills the last is last
        with self._lock:
            if len(self._rows) >= 2 * self.V:
                del self._rows[next(iter(self._rows))]
            self._rows[epoch, group] = rows
        return rows
