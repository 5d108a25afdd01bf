"""
Blends: sample i of several data sets mixed by weights, in megatron-core's order, for any i without those before it.

Before each sample a source has a deficit, its weight times i minus the samples it gave; the greatest deficit gives
sample i (the first of equals, in float64; i = 0 counts as 1):

    i                   0     1     2     3     4     5        weights 0.5, 0.3, 0.2
    deficits          .5    -.5     0    .5     0    .5
                      .3     .3   -.4   -.1    .2   -.5
                      .2     .2    .4   -.4   -.2     0
    dataset_index       0     1     2     0     1     0
    sample of it        0     0     0     1     1     2

That is a recurrence: no formula gives the counts at i. Two things make it lazy and vectorized all the same.

**Known states.** The source that gives sample i has no deficit below 0, for all of them add up to 0. So a source never
has more than floor(w (i - 1)) + 1 samples before i. Where these bounds add up to i, the counts are the bounds: exact,
whatever came before. With 2 sources that is so at every i, with k at one in (k - 1)!, and at least once in every period
of weights that are short decimals. To go to sample 10^9, look backwards for such an i (vectorized), go on from there.

**Guess and check.** A stretch is cut into lanes that are run at once, a step of all lanes being a few NumPy calls. A
lane's first counts are guessed (weights times i, rounded); when all have run, a lane whose first counts are not the
last of the lane before it gets these and runs again, until all agree. The first lane's are right, so then all are.
Lanes forget a wrong guess within some steps: two passes are the rule.

A block of 65,536 samples is made at a time; of other blocks at most the counts at their start are kept. With many
sources of odd weights there may be no known state on the way; then all before is run through once, and not kept.

The exhaustive blend (no weights, no size) is the same with lengths as weights; a source that has given all is out.

Rejected: the recurrence as a Python loop; both indices of the whole run, as there (10 bytes a sample).
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nanochat.megatron import Blend, GPTDataset, GPTDatasetConfig, LazyIndex, Split, normalize

if TYPE_CHECKING:
    import torch

BLOCK = 1 << 16  # samples made at once
STEPS = 128  # of a lane
JUMP = 1 << 20  # samples run through at once on the way to a far block
SCAN = 1 << 12  # places looked at for a known state, at first
MAX_SOURCES = 32766  # dataset_index is int16


class Mixture:
    """Which source gives sample i of `size`, and which of its samples that is.

    `weights` (k,), adding up to 1; `limits` (k,) samples of each source, adding up to `size`, after which it is out
    (None: no end). ValueError for more sources than int16 can count.
    """

    def __init__(self, weights: Sequence[float], size: int, limits: Sequence[int] | None = None):
        if len(weights) > MAX_SOURCES:
            raise ValueError(f"blend: got {len(weights):,} sources, expected at most {MAX_SOURCES:,}")
        self.weights, self.size = np.array(weights, np.float64), size
        self.limits = None if limits is None else np.array(limits, np.int64)
        self._known = {0: np.zeros(len(weights), np.int64)}  # counts before some samples
        self._block: tuple[int, np.ndarray, np.ndarray] | None = None  # first sample, what `at` gives for it

    def at(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """For samples start .. stop - 1: (source (n,) int16, number of its sample (n,) int64)."""
        parts = [self._part(first, max(start, first), min(stop, first + BLOCK))
                 for first in range(start - start % BLOCK, stop, BLOCK)]
        if len(parts) == 1:
            return parts[0]
        empty = (np.zeros(0, np.int16), np.zeros(0, np.int64))
        sources, samples = zip(empty, *parts)
        return np.concatenate(sources), np.concatenate(samples)

    def counts(self, i: int) -> np.ndarray:
        """Samples of each source before sample i, (k,) int64."""
        start = i - i % BLOCK
        counts = self._counts_at(start)
        return counts + np.bincount(self._run(counts, start, i - start), minlength=len(counts))

    def bounds(self, i: np.ndarray) -> np.ndarray:
        """What no source exceeds before samples i (n,): (k, n) int64."""
        margin = (i + 1.0) * (len(self.weights) + 8) * 2.0**-52  # of all rounding up to here
        most = np.floor(np.multiply.outer(self.weights, i - 1.0) + margin).astype(np.int64) + 1
        return most if self.limits is None else np.minimum(most, self.limits[:, None])

    def _part(self, first: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        block = self._block
        if block is None or block[0] != first:
            counts = self._counts_at(first)
            sources = self._run(counts, first, min(BLOCK, self.size - first))
            block = self._block = first, sources, _numbers(sources, counts)
            self._known[first + len(sources)] = counts + np.bincount(sources, minlength=len(counts))
        return block[1][start - first:stop - first], block[2][start - first:stop - first]

    def _counts_at(self, target: int) -> np.ndarray:
        """Counts before `target`, a multiple of BLOCK, from the nearest known state before it."""
        if target not in self._known:
            at, counts = self._nearest(target)
            while at < target:
                stop = min(target, at - at % JUMP + JUMP)
                counts = counts + np.bincount(self._run(counts, at, stop - at), minlength=len(counts))
                self._known[at := stop] = counts
            self._known[target] = counts
        return self._known[target]

    def _nearest(self, target: int) -> tuple[int, np.ndarray]:
        """(place, counts before it) of a known state at or before `target`."""
        kept = max(at for at in list(self._known) if at <= target)
        stop, size = target + 1, SCAN
        while stop > kept + 1:
            places = np.arange(max(kept + 1, stop - size), stop)
            bounds = self.bounds(places)
            hits = np.flatnonzero(bounds.sum(axis=0) == places)
            if len(hits):
                return int(places[hits[-1]]), bounds[:, hits[-1]]
            stop, size = int(places[0]), min(2 * size, JUMP // len(self.weights) + SCAN)
        return kept, self._known[kept]

    def _run(self, counts: np.ndarray, start: int, n: int) -> np.ndarray:
        """The sources (n,) int16 of samples start .. start + n - 1, where `counts` (k,) are those before them."""
        steps = min(STEPS, max(1, n))
        times = np.arange(start, start + n, steps)
        first = self._guess(times)
        first[:1] = counts
        last, found = np.empty_like(first), np.empty((len(times), steps), np.int16)
        todo = np.arange(len(times))
        while len(todo):
            found[todo], last[todo] = self._lanes(first[todo], times[todo], steps)
            todo = np.flatnonzero((first[1:] != last[:-1]).any(axis=1)) + 1
            first[todo] = last[todo - 1]
        return found.reshape(-1)[:n]

    def _guess(self, times: np.ndarray) -> np.ndarray:
        """Counts that may be those before samples `times` (n,): weights times i, rounded so that they add up to it."""
        shares = np.multiply.outer(times.astype(np.float64), self.weights)
        counts = np.floor(shares)
        ranks = np.argsort(np.argsort(counts - shares, axis=1), axis=1)
        return (counts + (ranks < (times - counts.sum(axis=1))[:, None])).astype(np.int64)

    def _lanes(self, counts: np.ndarray, times: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """The recurrence itself, `steps` samples from each of `times` (n,) on: (sources (n, steps) int16, counts behind
        them (n, k) int64)."""
        counts = counts.astype(np.float64)
        sources, lanes = np.empty((steps, len(times)), np.int16), np.arange(len(times))
        for step in range(steps):
            deficits = np.multiply.outer(np.maximum(times + step, 1).astype(np.float64), self.weights)
            deficits -= counts
            if self.limits is not None:
                deficits[counts >= self.limits] = -np.inf
            sources[step] = chosen = deficits.argmax(axis=1)
            counts[lanes, chosen] += 1
        return sources.T, counts.astype(np.int64)


def _numbers(sources: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The number that each sample has in its source, (n,) int64."""
    numbers = np.empty(len(sources), np.int64)
    for source, count in enumerate(counts.tolist()):
        where = np.flatnonzero(sources == source)
        numbers[where] = np.arange(count, count + len(where))
    return numbers


class BlendedDataset:
    """Samples of several data sets: `size` of them by `weights`, or with `size` None all, `weights` being how many each
    gives. `dataset[i]` is a dict of tensors and `dataset_id`; `rows` is for training. ValueError for weights that are
    not positive, and for a data set that would have to give more samples than it has."""

    def __init__(self, datasets: Sequence[GPTDataset], weights: Sequence[float], size: int | None,
                 config: GPTDatasetConfig):
        if not datasets or len(datasets) != len(weights) or not all(0 < w < math.inf for w in weights):
            raise ValueError(f"blend: got {len(datasets)} data sets and weights {list(weights)}, expected a weight of "
                             f"more than 0 for each")
        self.datasets, self.config = list(datasets), config
        self.split = datasets[0].index_split
        self.weights: list[float] = list(weights)
        if size is None:
            limits = [int(w) for w in weights]
            if limits != self.weights:
                raise ValueError(f"blend: got weights {self.weights} and no size, expected numbers of samples")
            self._size = sum(limits)
            self._mixture = Mixture([n / self._size for n in limits], self._size, limits)
        else:
            self._size, self.weights = size, normalize(weights)
            self._mixture = Mixture(self.weights, size)
        self.size = size
        self._check_sizes()

    def _check_sizes(self) -> None:
        lengths = np.array([len(dataset) for dataset in self.datasets])
        if not self._size or (self._mixture.bounds(np.array([self._size]))[:, 0] <= lengths).all():
            return
        for dataset, length, count in zip(self.datasets, lengths, self._mixture.counts(self._size)):
            if count > length:
                raise ValueError(f"blend, split {self.split.name}: it takes {count:,} samples of "
                                 f"{dataset.dataset_path}, which has {length:,}; raise mid_level_dataset_surplus (now "
                                 f"{self.config.mid_level_dataset_surplus})")

    def identity(self) -> dict[str, Any]:
        """What decides which part of which document is in which sample, as JSON values."""
        return {"weights": self.weights, "size": self.size, "datasets": [d.identity() for d in self.datasets]}

    def __len__(self) -> int:
        return self._size

    @property
    def dataset_index(self) -> LazyIndex:
        """(samples,) int16: the data set that gives sample i. Computed where it is looked at."""
        return LazyIndex((len(self),), np.int16, lambda first, last: self._mixture.at(first, last)[0])

    @property
    def dataset_sample_index(self) -> LazyIndex:
        """(samples,) int64: which of its samples that is. Computed where it is looked at."""
        return LazyIndex((len(self),), np.int64, lambda first, last: self._mixture.at(first, last)[1])

    @property
    def dtype(self) -> np.dtype:
        """The type that holds the ids of all data sets."""
        return np.result_type(*(dataset.dtype for dataset in self.datasets))

    def __getitem__(self, idx: int) -> "dict[str, torch.Tensor | np.int16]":
        at = int(idx) + len(self) * (int(idx) < 0)
        self._check(at, at + 1)
        (source,), (sample,) = self._mixture.at(at, at + 1)
        return {"dataset_id": source, **self.datasets[source][int(sample)]}

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """As `GPTDataset.rows`."""
        self._check(start, stop)
        sources, samples = self._mixture.at(start, stop)
        ids = np.empty((stop - start, self.config.sequence_length + 1), self.dtype)
        live: np.ndarray | None = None
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            where = np.flatnonzero(sources == source)
            first = int(samples[where[0]])  # a source's samples come in their order, without gaps
            ids[where], mask = self.datasets[source].rows(first, first + len(where))
            if mask is not None:
                live = np.ones((len(ids), ids.shape[1] - 1), bool) if live is None else live
                live[where] = mask
        return ids, live

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"samples {start:,} to {stop:,}, there are {len(self):,}")


# ---- from a configuration to data sets ------------------------------------------------------------------------------

class BlendedMegatronDatasetBuilder:
    """`BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()`: the data sets of train, valid
    and test. `sizes`: samples of each, None for all there are. Nothing is collective and nobody waits: ranks may build
    in any order, at any time, or not at all. ValueError or FileNotFoundError for what cannot be built."""

    def __init__(self, cls: type[GPTDataset], sizes: Sequence[int | None], is_built_on_rank: Callable[[], bool],
                 config: GPTDatasetConfig):
        if len(sizes) != len(Split) or any(size is not None and size < 0 for size in sizes):
            raise ValueError(f"sizes: got {list(sizes)}, expected a number of samples or None for each of "
                             f"{', '.join(s.name for s in Split)}")
        self.cls, self.sizes, self.is_built_on_rank, self.config = cls, list(sizes), is_built_on_rank, config

    def build(self) -> list[GPTDataset | BlendedDataset | None]:
        """A data set for each split; None for a split that has no part of the data, and on ranks without data."""
        config = self.config
        if not self.is_built_on_rank():
            return [None] * len(Split)
        if config.mock:
            return [*self._of_prefix("made-up data", config.split_matrix, self.sizes)]
        if config.blend is not None:
            return self._of_blend(config.blend, config.split_matrix, alone=config.blend[1] is None)
        found: list[GPTDataset | BlendedDataset | None] = []
        for i, blend in enumerate(config.blend_per_split or ()):
            matrix = [(0.0, 1.0) if j == i else None for j in range(len(Split))]
            found.append(None if blend is None else self._of_blend(blend, matrix, alone=True)[i])
        return found

    def _of_prefix(self, prefix: str, matrix: Sequence[tuple[float, float] | None], sizes: Sequence[int | None]
                   ) -> list[GPTDataset | None]:
        """The splits of one pair of files. Their edges are rounded to whole sequences, as there."""
        dataset = self.cls.build_low_level_dataset(prefix, self.config)
        n = float(self.cls.numel_low_level_dataset(dataset))
        return [None if part is None else
                self.cls(dataset, prefix, range(int(round(part[0] * n)), int(round(part[1] * n))), size, split,
                         self.config)
                for part, size, split in zip(matrix, sizes, Split)]

    def _of_blend(self, blend: Blend, matrix: Sequence[tuple[float, float] | None], *, alone: bool
                  ) -> list[GPTDataset | BlendedDataset | None]:
        """The splits of several pairs. `alone`: one prefix is no blend."""
        prefixes, weights = blend
        if len(prefixes) == 1 and alone:
            return [*self._of_prefix(prefixes[0], matrix, self.sizes)]
        shares = None if weights is None else normalize(weights)
        table = [self._of_prefix(prefix, matrix, self._sizes(None if shares is None else shares[j], spare=True))
                 for j, prefix in enumerate(prefixes)]
        return [None if part is None else self._of_split(i, [row[i] for row in table], shares)
                for i, part in enumerate(matrix)]

    def _sizes(self, share: float | None, *, spare: bool) -> list[int | None]:
        """Samples of a source with this share of each split, rounded up; and some more of each, `spare`."""
        surplus = 1 + (self.config.mid_level_dataset_surplus if spare else 0.0)
        return [None if size is None or share is None else int(math.ceil(math.ceil(size * share) * surplus))
                for size in self.sizes]

    def _of_split(self, i: int, parts: Sequence[GPTDataset | None], shares: Sequence[float] | None) -> BlendedDataset:
        """A split's blend: by shares and size; without shares by lengths, and then without size all there is."""
        datasets = [dataset for dataset in parts if dataset is not None]
        size, name = self.sizes[i], list(Split)[i].name
        if shares is not None:
            if size is None:
                raise ValueError(f"blend: got weights and no number of samples for split {name}, expected both or "
                                 f"neither")
            return BlendedDataset(datasets, shares, sum(self._sizes(s, spare=False)[i] or 0 for s in shares),
                                  self.config)
        lengths = [len(dataset) for dataset in datasets]
        for dataset in datasets:
            if not len(dataset):
                raise ValueError(f"blend: {dataset.dataset_path} has no sample of {self.config.sequence_length} tokens "
                                 f"in split {name}; leave it out, or give weights")
        return BlendedDataset(datasets, lengths, None if size is None else min(size, sum(lengths)), self.config)
