"""
The order of Megatron's samples: two shuffles, and a search that finds any sample without a table of all.

    document_index   3 0 2 1 | 1 3 0 2        documents of each epoch, shuffled over all epochs at once; where little
                                              of the last epoch is needed, that one is shuffled apart
    their tokens     33300222211133300222     end to end, a stream
    samples          |---|---|---|---|---     sample k is tokens kT .. kT + T; its last is the next one's first
    shuffle_index    4 0 3 1 2                sample i of the data set is sample shuffle_index[i] of the stream

`document_index` (int32) and `shuffle_index` (uint32) are what `numpy.random.RandomState(seed).shuffle` makes of a
range, one after the other, so they must be computed as a whole: that is nearly all the time before the first sample.
Nothing else of that size is made. Where a sample begins is looked up: tokens before every 64th document are summed up
once (1/8 byte a document and epoch); a search finds the 64 documents in question, and a running sum of their lengths
the one. Any number of samples are looked up at once.

    locate(token 13)   sums of every 64th document -> block -> lengths of its documents -> ends -> document, offset

The rules (how many epochs, when the last one is apart, how a partial sample is counted) are those of megatron-core
0.16.1 (core/datasets/gpt_dataset.py, helpers.cpp).

Rejected: a table of all samples (8 bytes each, and a loop in a compiled helper); one running sum over documents (8
bytes a document and epoch).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

STRIDE = 64  # documents to a running sum
CHUNK = 1 << 13  # documents whose lengths are summed up at once: in memory that the allocator has ready
WIDE = 1 << 18  # elements that are shuffled in a copy of 8 bytes each: a cache holds it
APART = 0.80  # the last epoch is shuffled apart when less than this share of it is needed


class LazyIndex:
    """An array that is computed where somebody looks: one number, a slice, or all of it with `np.asarray`."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, fetch: Callable[[int, int], np.ndarray]):
        self.shape, self.dtype, self._fetch = shape, np.dtype(dtype), fetch

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: int | slice) -> Any:
        if isinstance(which, slice):
            first, last, step = which.indices(len(self))
            if step != 1:
                raise ValueError(f"a slice with step {step}, expected neighbours (step 1)")
            return self._fetch(first, max(first, last))
        at = int(which) + len(self) * (which < 0)
        if not 0 <= at < len(self):
            raise IndexError(f"index {which:,}, there are {len(self):,}")
        return self._fetch(at, at + 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._fetch(0, len(self)).astype(self.dtype if dtype is None else dtype, copy=False)


@dataclass(frozen=True)
class Order:
    """All that the two shuffles depend on."""

    seed: int
    first: int  # sequences first .. last - 1
    last: int
    num_epochs: int
    apart: bool  # the last epoch is shuffled apart
    samples_before: int  # samples that end before the last epoch; they are shuffled apart as well
    num_samples: int

    @property
    def shuffle_dtype(self) -> np.dtype:
        """uint32 as long as it will do."""
        return np.dtype(np.uint32 if self.num_samples < 2**32 - 2 else np.int64)

    def shuffled(self) -> tuple[np.ndarray, np.ndarray]:
        """(document_index (epochs * documents,) int32, shuffle_index (samples,) uint32), made in place."""
        state, n = np.random.RandomState(self.seed), self.last - self.first
        documents = np.ones(self.num_epochs * n, np.int32)
        if n:  # count up in place: memory that is touched for the first time costs more than what is written into it
            documents[0] = self.first
            np.cumsum(documents[:n], dtype=np.int32, out=documents[:n])
            documents.reshape(self.num_epochs, n)[1:] = documents[:n]
        samples = np.arange(self.num_samples, dtype=self.shuffle_dtype)
        for array, edge in ((documents, len(documents) - n), (samples, self.samples_before)):
            for part in (array[:edge], array[edge:]) if self.apart else (array,):
                if len(part):
                    _shuffle(state, part)
        return documents, samples


def _shuffle(state: np.random.RandomState, part: np.ndarray) -> None:
    """`state.shuffle(part)`; little of it in two thirds of the time: NumPy moves 8 bytes as a number, and 4 by calls of
    memcpy. Which elements change places does not depend on their size."""
    if len(part) > WIDE:
        state.shuffle(part)
        return
    wide = part.astype(np.int64)
    state.shuffle(wide)
    part[:] = wide


def plan_order(seed: int, documents: range, *, tokens: int, num_samples: int | None, T: int, extra: bool,
               drop_last: bool) -> Order:
    """How many epochs of `tokens` tokens it takes for `num_samples` samples (None: one epoch), and whether the last is
    shuffled apart. ValueError if there are no tokens to take samples from."""
    needed = (num_samples or 0) * T + extra
    epochs = 1
    if num_samples:
        if not tokens:
            raise ValueError(f"{num_samples:,} samples of {len(documents):,} sequences without a token; give this split"
                             f" more of the data, or ask for no samples")
        epochs = -(-needed // tokens)
    samples_before = max(0, (epochs - 1) * tokens - extra) // T
    from_last, per_epoch = (num_samples or 0) - samples_before, (tokens - extra) // T
    apart = epochs > 1 and from_last < int(APART * per_epoch)
    total = _count_samples(epochs * tokens - extra, T, drop_last)
    return Order(seed, documents.start, documents.stop, epochs, apart, samples_before, total)


def _count_samples(tokens: int, T: int, drop_last: bool) -> int:
    """Samples of so many tokens. With a partial one at the end, as megatron-core counts: in float32."""
    if drop_last:
        return max(0, tokens // T)
    return max(0, int(np.ceil(np.float32(tokens) / np.float32(T))))


class Stream:
    """The documents of `order` end to end: which one each token is in. Holds a running sum for every 64th."""

    def __init__(self, lengths: np.ndarray, order: np.ndarray, sums: np.ndarray | None = None):
        """`lengths` (all sequences,) int32, `order` (n,) int32: which of them stand one after another."""
        self.lengths, self.order = lengths, order
        self.sums = self._sum_up() if sums is None else sums  # [b]: tokens before document 64 b

    def _sum_up(self) -> np.ndarray:
        sums = np.zeros(-(-len(self.order) // STRIDE) + 1, np.int64)
        raw = self.lengths.view("V4")  # in the file they are not aligned: to take int32 would copy them all
        for at in range(0, len(self.order), CHUNK):
            lengths = raw.take(self.order[at:at + CHUNK]).view(np.int32)
            if short := -len(lengths) % STRIDE:
                lengths = np.append(lengths, np.zeros(short, np.int32))
            here = sums[at // STRIDE + 1:]
            here[:len(lengths) // STRIDE] = lengths.reshape(-1, STRIDE).sum(axis=1, dtype=np.int64)
        return np.cumsum(sums, out=sums)

    def locate(self, tokens: np.ndarray, side: Any) -> tuple[np.ndarray, np.ndarray]:
        """For tokens (n,) int64, in any order: (place of its document in `order`, tokens before that document), two
        (n,) int64. `side` "right": the document that has the token; "left": one that has or just ended before it."""
        blocks = np.sort(np.searchsorted(self.sums[1:], tokens, side))
        blocks = blocks[np.diff(blocks, prepend=-1) > 0]  # np.unique takes 0.1 s at its first use: it imports numpy.ma
        places = (blocks[:, None] * STRIDE + np.arange(STRIDE)).reshape(-1)
        lengths = self.lengths[self.order.take(places, mode="clip")].astype(np.int64).reshape(-1, STRIDE)
        ends = (np.cumsum(lengths, axis=1) + self.sums[blocks, None]).reshape(-1)
        found = np.searchsorted(ends, tokens, side)
        return places[found], ends[found] - lengths.reshape(-1)[found]
