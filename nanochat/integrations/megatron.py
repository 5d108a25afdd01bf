"""Megatron's samples: which tokens are in sample i of a data set, by the rules of megatron-core
0.16.1.

    sequences        0: a a a a   1: b b   2: c c c c c         of one split of a pair of files
    document_index   2 0 1 1 2 0                                the sequences of all epochs, shuffled
    their tokens     c c c c c a a a a b b b b c c c c c a ...  end to end: the stream
    samples          |---|---|---|---|---|---|---               T = 4: sample k is tokens kT to kT + T, so
                                                                neighbours share a token
    sample_index     (0, 0) (0, 4) (1, 3) ...                   where samples begin: (place in document_index, offset)
    shuffle_index    3 0 2 1 ...                                sample i of the data set is sample shuffle_index[i]
                                                                of the stream

`Samples` has these three indices, and `BlendedSamples` mixes several of them. The elements and
types of the indices equal megatron-core's. They are computed when the first sample is read, and
stored in a folder if they are large; a stored index is used only for the same inputs.

A run needs no more than this module. The classes with megatron-core's names and arguments, which
make tensors, are in megatron_api.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from nanochat.common import hash_bytes, hash_json, open_door
from nanochat.integrations.megatron_files import IndexedDataset
from nanochat.integrations.megatron_tables import (
    Arrays,
    blend_sources,
    cached,
    find_samples,
    plan_order,
)

COUNTED = 1 << 20  # samples at once: numpy counts in a copy that is four times as wide
NO_PAD = -1  # stands for the padding id of a tokenizer that has none; no token equals it

Part = tuple[float, float] | None  # (begin, end) in 0 .. 1; None: empty


class Split(Enum):
    """The three data sets that files are split into."""

    train = 0
    valid = 1
    test = 2


# ---- what decides samples ------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleRules:
    """What decides the samples of a data set besides its files. ValueError for impossible
    values."""

    T: int  # tokens of a sample that are trained on
    seed: int
    eod: int | None  # the id that ends a document; None: there is no such id
    pad: int = NO_PAD
    eod_mask_loss: bool = False  # no loss for the target after the end of a document
    extra: bool = True  # a sample holds T + 1 tokens, so that neighbours share one
    drop_last: bool = True  # a last partial sample is dropped
    cache: str | None = None  # a folder for large indices; does not change the samples

    def __post_init__(self) -> None:
        check_numbers(self.T, self.seed)


def check_numbers(T: int, seed: int) -> None:
    """ValueError for an impossible length or seed."""
    if T < 1:
        raise ValueError(f"sequence_length: got {T}, expected at least 1")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed (random_seed): got {seed}, expected 0 to 2**32-1")


def check_blend(prefixes: Sequence[str], weights: Sequence[float] | None) -> None:
    """ValueError unless there is a prefix, and a weight for each or none at all."""
    if not prefixes:
        raise ValueError("blend: got no prefix, expected at least one")
    if weights is None:
        return
    are_positive = all(0 < weight < math.inf for weight in weights)
    if len(weights) != len(prefixes) or not are_positive:
        raise ValueError(
            f"blend: got weights {list(weights)} for {len(prefixes)} prefixes, expected a number above 0 "
            f"for each, or no weights"
        )


def split_matrix(split: str | None) -> list[Part]:
    """The part of 0 .. 1 for each split, from shares such as "98,1,1" (missing shares are 0).
    ValueError for any other text."""
    try:
        shares = [float(text) for text in (split or "").split(",")]
    except ValueError:
        shares = []
    are_shares = all(0 <= share < math.inf for share in shares) and sum(shares) > 0
    if not are_shares or len(shares) > len(Split):
        raise ValueError(
            f'--split: got {split!r}, expected shares of train, valid and test, such as "98,1,1"'
        )
    edges = [0.0]
    for share in normalize(shares + [0.0] * (len(Split) - len(shares))):
        edges.append(edges[-1] + share)
    return [(a, b) if b > a else None for a, b in pairwise(edges)]


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, computed by NumPy as in megatron-core."""
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()


def sequences_of(part: tuple[float, float], num_sequences: int) -> range:
    """The sequences of a split, rounded to whole ones."""
    begin, end = part
    return range(round(begin * float(num_sequences)), round(end * float(num_sequences)))


# ---- samples -------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A part of a sample: `length` ids of a sequence, from `offset` on."""

    sequence: int
    offset: int
    length: int


class Samples:
    """Samples of some sequences of a pair of files. It also acts as a blend of this one data set.

    `indices`: the sequences. `num_samples`: the minimum number of samples, from as many epochs as
    that takes; None: one epoch. ValueError if the data is empty or corrupt. Creating the object
    reads no token and computes no index.
    """

    cache_name: ClassVar[str] = "GPTDataset"  # in the names of stored indices, as in megatron-core

    def __init__(
        self,
        dataset: IndexedDataset,
        path: str | None,
        indices: range,
        num_samples: int | None,
        split: str,
        rules: SampleRules,
    ):
        self.dataset = dataset
        self.dataset_path = path
        self.indices = indices
        self.num_samples = num_samples
        self.split = split
        self.rules = rules
        self._lengths = dataset.sequence_lengths[indices.start : indices.stop]
        if self._lengths.min(initial=0) < 0:
            bad = int(self._lengths.argmin())
            raise ValueError(
                f"{path}.idx: sequence {indices[bad]:,} has {self._lengths[bad]:,} "
                f"tokens, so the file is corrupt; regenerate the pair"
            )
        self.num_tokens_per_epoch = int(self._lengths.sum(dtype=np.int64))
        if num_samples and not self.num_tokens_per_epoch:
            raise ValueError(
                f"{path}, split {split}: needs {num_samples:,} samples, but its "
                f"{len(indices):,} sequences have no tokens; give this split a larger share, or "
                f"set its number of samples to 0"
            )
        self.order = plan_order(
            rules.seed,
            indices,
            tokens=self.num_tokens_per_epoch,
            num_samples=num_samples,
            T=rules.T,
            extra=rules.extra,
            drop_last=rules.drop_last,
        )

    def identity(self) -> dict[str, Any]:
        """Everything that determines the contents of the samples, as JSON values."""
        return {
            **vars(self.order),
            "sequence_length": self.rules.T,
            "extra_token": self.rules.extra,
            "tokens_per_epoch": self.num_tokens_per_epoch,
        }

    def __len__(self) -> int:
        return self.order.num_samples

    @property
    def datasets(self) -> "Sequence[Samples]":
        """The data sets that samples come from."""
        return [self]

    def counts(self, stop: int) -> list[int]:
        """How many of samples 0 .. stop - 1 come from each of `datasets`."""
        return [stop]

    def locate(self, i: int) -> tuple[int, int]:
        """(number of the data set that sample i comes from, number of the sample there)."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i:,}: the data set has {len(self):,} samples")
        return 0, i

    # ---- indices

    @cached_property
    def _tables(self) -> Arrays:
        """The three indices."""

        def build() -> Arrays:
            """All three: one random state shuffles documents and samples, and documents decide where samples begin."""
            documents, samples = self.order.tables()
            begins = find_samples(
                self.dataset.sequence_lengths,
                documents,
                num_samples=len(self),
                T=self.rules.T,
                tokens=self.order.num_epochs * self.num_tokens_per_epoch,
                extra=self.rules.extra,
            )
            return {"document_index": documents, "sample_index": begins, "shuffle_index": samples}

        key = hash_json([self.identity(), hash_bytes(self._lengths.tobytes())])
        return cached(self.rules.cache, f"{key}-{self.cache_name}-{self.split}", build)

    @property
    def document_index(self) -> np.ndarray:
        """(epochs * sequences,) int32: sequences in the order of the stream."""
        return self._tables["document_index"]

    @property
    def sample_index(self) -> np.ndarray:
        """(samples + 1, 2): where each sample of the stream begins."""
        return self._tables["sample_index"]

    @property
    def shuffle_index(self) -> np.ndarray:
        """(samples,) uint32: the number that each sample has in the stream."""
        return self._tables["shuffle_index"]

    def pieces(self, i: int) -> list[Piece]:
        """The parts of sample i; reads no token."""
        k = int(self.shuffle_index[self.locate(i)[1]])
        (first, skip), (last, until) = self.sample_index[k : k + 2].tolist()
        sequences = self.document_index[first : last + 1]
        ends = self.dataset.sequence_lengths[sequences].tolist()
        ends[-1] = until + self.rules.extra
        begins = [skip] + [0] * (last - first)
        return [
            Piece(sequence, begin, end - begin)
            for sequence, begin, end in zip(sequences.tolist(), begins, ends)
        ]

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sample i in NumPy, for training: (ids, live, ends).

        ids: (T + 1,) of the type on disk (int64 for a partial sample), 0 for padding; inputs are
        ids[:-1], targets ids[1:]. live: (T + 1,) uint8, 0 for a masked target. ends: (T,) bool,
        which inputs end a document.
        """
        return self._with_masks(self._read(i)[0])

    def _read(self, i: int) -> tuple[np.ndarray, list[int]]:
        """The ids of sample i as they are on disk, and the sequence of each piece. ValueError for
        an id below zero, which would count as padding."""
        pieces = self.pieces(i)
        parts = [self.dataset.get(*piece) for piece in pieces]
        for (sequence, _, _), part in zip(pieces, parts):
            if part.min(initial=0) < 0:
                raise ValueError(
                    f"{self.dataset_path}.bin: sequence {sequence:,} holds the id {part.min()}, expected "
                    f"0 or more; regenerate the pair"
                )
        return np.concatenate(parts), [sequence for sequence, _, _ in pieces]

    def _with_masks(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What `row` returns, from the ids of a sample (at most T + 1,)."""
        rules = self.rules
        missing = rules.T + 1 - len(ids)
        if missing < 0:
            raise ValueError(
                f"{type(self).__name__}: a sample has {len(ids):,} ids, expected at most {rules.T + 1:,} "
                f"(sequence_length + 1)"
            )
        if missing:
            ids = np.pad(ids.astype(np.int64), (0, missing), constant_values=rules.pad)
        ends = np.zeros(rules.T, bool) if rules.eod is None else ids[:-1] == rules.eod
        live = ids != rules.pad
        ids[~live] = 0
        if rules.eod_mask_loss:
            live[1:] &= ~ends
        return ids, live.view(np.uint8), ends


# ---- blends --------------------------------------------------------------------------------------


class BlendedSamples:
    """A mix of several data sets: `size` samples in the proportions of `weights`; or, if `size` is
    None, all samples, and `weights` are the number of samples in each data set. ValueError if a
    data set has too few samples."""

    cache_name: ClassVar[str] = "BlendedDataset"  # see `Samples.cache_name`

    def __init__(
        self,
        datasets: Sequence[Samples],
        weights: Sequence[float],
        size: int | None,
        cache: str | None,
    ):
        self.datasets = list(datasets)
        self.size = size
        split = datasets[0].split
        limits: list[int] | None = None
        if size is None:
            limits = [int(weight) for weight in weights]
            total = sum(limits)
            shares = [n / total for n in limits]
            self.weights = list(weights)
        else:
            total = size
            shares = normalize(weights)
            self.weights = shares

        content = hash_json([shares, total, limits])
        name = f"{content}-{self.cache_name}-{split}"
        tables = cached(cache, name, lambda: blend_sources(shares, total, limits))
        self.dataset_index = tables["dataset_index"]  # (samples,) int16: the data set of sample i
        # (samples,) int64: its sample there
        self.dataset_sample_index = tables["dataset_sample_index"]

        for dataset, count in zip(self.datasets, self.counts(total)):
            if count > len(dataset):
                raise ValueError(
                    f"blend, split {split}: it takes {count:,} samples from "
                    f"{dataset.dataset_path}, which has {len(dataset):,}; raise mid_level_dataset_surplus"
                )

    def identity(self) -> dict[str, Any]:
        """Everything that decides the contents of every sample, as JSON values."""
        return {
            "weights": self.weights,
            "size": self.size,
            "datasets": [dataset.identity() for dataset in self.datasets],
        }

    def __len__(self) -> int:
        return len(self.dataset_index)

    def counts(self, stop: int) -> list[int]:
        counts = np.zeros(len(self.datasets), np.int64)
        for first in range(0, stop, COUNTED):
            taken = self.dataset_index[first : min(first + COUNTED, stop)]
            counts += np.bincount(taken, minlength=len(counts))
        return counts.tolist()

    def locate(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i:,}: the blend has {len(self):,} samples")
        dataset = int(self.dataset_index[i])
        sample = int(self.dataset_sample_index[i])
        return dataset, sample


AnySamples = TypeVar("AnySamples", bound=Samples)


class BlendPlan(NamedTuple, Generic[AnySamples]):
    """The arguments of `BlendedSamples`."""

    datasets: list[AnySamples]
    weights: Sequence[float]
    size: int | None


def plan_blend(
    open_part: Callable[[str, int | None], AnySamples],
    prefixes: Sequence[str],
    weights: Sequence[float] | None,
    size: int | None,
    *,
    surplus: float = 0.005,
) -> BlendPlan[AnySamples]:
    """The parts of a blend: without weights, one pass over each prefix, cut after `size` samples.
    `open_part(prefix, n)` opens a data set with at least n samples (None: one epoch). `surplus`:
    share of extra samples that each part prepares. ValueError if a part has no sample."""
    if weights is not None:
        assert size is not None
        shares = normalize(weights)
        taken = [math.ceil(size * share) for share in shares]
        parts = []
        for prefix, count in zip(prefixes, taken):
            parts.append(open_part(prefix, math.ceil(count * (1 + surplus))))
        return BlendPlan(parts, shares, sum(taken))

    parts = [open_part(prefix, None) for prefix in prefixes]
    lengths = [len(part) for part in parts]
    if 0 in lengths:
        empty = parts[lengths.index(0)]
        raise ValueError(
            f"blend: {empty.dataset_path} has no sample of {empty.rules.T} "
            f"tokens in split {empty.split}; remove it, or set weights"
        )
    total = None if size is None else min(size, sum(lengths))
    return BlendPlan(parts, lengths, total)


def __getattr__(name: str) -> Any:
    """megatron-core's names, which own code may import from here, too."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return open_door(f"nanochat.integrations.megatron_api:{name}")
