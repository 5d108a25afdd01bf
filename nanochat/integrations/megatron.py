"""Megatron's samples: which tokens are in sample i of a data set, by the rules of megatron-core
0.16.1. A run loads this module through `stream.open_stream`, with --order=megatron; your own code
may import it (docs/megatron.md).

    sequences        0: a a a a   1: b b   2: c c c c c         of one split of a pair of files
    document_index   2 0 1 1 2 0                                the sequences of all epochs, shuffled
    their tokens     c c c c c a a a a b b b b c c c c c a ...  end to end: the stream
    samples          |---|---|---|---|---|---|---               T = 4: sample k is tokens kT to kT + T, so
                                                                neighbours share a token
    sample_index     (0, 0) (0, 4) (1, 3) ...                   where samples begin: (place in document_index, offset)
    shuffle_index    3 0 2 1 ...                                sample i of the data set is sample shuffle_index[i]
                                                                of the stream

`GPTDataset` has these three indices under megatron-core's names. Their elements and types equal
megatron-core's, and so do all tensors of a sample. The indices are computed when the first sample
is read, and stored in `path_to_cache` if they are large.

Three differences avoid bugs of megatron-core: the mask of a padded sample does not leak into other
samples; a split without tokens is an error, not an endless loop; a cached index is used only for
the same inputs. `attention_mask`, T * T bytes per sample, is made only on request.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from nanochat.common import hash_bytes, hash_json
from nanochat.integrations.megatron_files import (  # noqa: F401  your own code imports all names from this module
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    ObjectStorageConfig,
    get_bin_path,
    get_idx_path,
    is_object_storage_path,
)
from nanochat.integrations.megatron_tables import Arrays, cached, find_samples, plan_order

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

NO_PAD = -1  # stands for the padding id of a tokenizer that has none; no token equals it

# methods of megatron-core's GPTDataset that have no counterpart here
NEVER_CALLED = {
    "_build_document_sample_shuffle_indices",
    "_get_num_epochs",
    "_get_num_tokens_per_epoch",
    "numel_low_level_dataset",
}

Blend = tuple[Sequence[str], Sequence[float] | None]  # prefixes, and a weight for each
Part = tuple[float, float] | None  # (begin, end) in 0 .. 1; None: empty


class Split(Enum):
    """The three data sets that files are split into."""

    train = 0
    valid = 1
    test = 2


# ---- configuration -------------------------------------------------------------------------------

# Fields that control how megatron-core loads data. They do not change any sample.
WITHOUT_EFFECT = (
    "full_validation",
    "num_dataset_builder_threads",
    "fast_cache_load",
    "defer_npy_index_mmap",
    "data_parallel_size",
    "sequence_parallel_size",
    "hybrid_context_parallel",
    "sequences_per_dataset",
    "context_parallel_size",
)


@dataclass
class BlendedMegatronDatasetConfig:
    """The settings of every kind of data set: `blend` with `split`, or `blend_per_split`, or
    neither for mock data. ValueError for bad or contradictory settings. A @dataclass may add
    fields; fields may be assigned until a data set is built."""

    random_seed: int
    sequence_length: int
    blend: Blend | None = None
    blend_per_split: Sequence[Blend | None] | None = None
    # with blend_per_split: valid is a list of data sets, not a blend
    multiple_validation_sets: bool | None = None
    full_validation: bool | None = None
    split: str | None = None  # shares of train, valid, test: "98,1,1"
    num_dataset_builder_threads: int = 1
    path_to_cache: str | None = None  # a folder for indices; None: they stay in memory
    mmap_bin_files: bool = True
    # eod, pad, eos and special_tokens_dict are used; vocab_size for mock data
    tokenizer: Any = None
    # share of extra samples that each source of a blend prepares
    mid_level_dataset_surplus: float = 0.005
    allow_ambiguous_pad_tokens: bool = False
    fast_cache_load: bool = False
    defer_npy_index_mmap: bool = False

    def __post_init__(self) -> None:
        self.check()
        idle = [
            f.name
            for f in fields(self)
            if f.name in WITHOUT_EFFECT and getattr(self, f.name) != f.default
        ]
        if idle:
            log.info("%s: accepted, but without effect", ", ".join(idle))

    def check(self) -> None:
        """ValueError for bad or contradictory settings."""
        surplus, per_split = self.mid_level_dataset_surplus, self.blend_per_split
        if self.sequence_length < 1:
            raise ValueError(f"sequence_length: got {self.sequence_length}, expected at least 1")
        if not 0 <= self.random_seed < 2**32:
            raise ValueError(f"--seed (random_seed): got {self.random_seed}, expected 0 to 2**32-1")
        if not 0 <= surplus < math.inf:
            raise ValueError(f"mid_level_dataset_surplus: got {surplus}, expected 0 or more")
        if per_split is not None and (self.blend, self.split) != (None, None):
            raise ValueError(
                "blend_per_split: cannot be combined with blend or split; pass it alone"
            )
        if per_split is not None and len(per_split) != len(Split):
            raise ValueError(
                f"blend_per_split: got {len(per_split)} blends, expected {len(Split)} (None for a split "
                f"without data)"
            )
        for prefixes, weights in filter(None, (self.blend, *(per_split or ()))):
            given = [1.0] * len(prefixes) if weights is None else list(weights)
            if not prefixes:
                raise ValueError("blend: got no prefix, expected at least one")
            if len(given) != len(prefixes) or not all(0 < weight < math.inf for weight in given):
                raise ValueError(
                    f"blend: got weights {given} for {len(prefixes)} prefixes, expected a number above 0 "
                    f"for each, or no weights"
                )
        _ = self.split_matrix  # raises for a bad split

    @property
    def mock(self) -> bool:
        """Whether the data is generated."""
        return self.blend is None and not any(self.blend_per_split or ())

    @property
    def split_matrix(self) -> list[Part]:
        """For each split, which part of every source's sequences it has."""
        if self.mock:
            return split_matrix("1,1,1")
        if self.blend_per_split is not None:
            return [None if blend is None else (0.0, 1.0) for blend in self.blend_per_split]
        return split_matrix(self.split)

    @property
    def eod(self) -> int | None:
        """The id that ends a document; None if there is no tokenizer, or it has no such id."""
        return attribute(self.tokenizer, "eod")


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """The settings of a `GPTDataset`."""

    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = False
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    # a folder for copies of .idx files from object storage
    object_storage_cache_path: str | None = None
    data_parallel_size: int = 1
    sequence_parallel_size: int = 0
    hybrid_context_parallel: bool = False
    sequences_per_dataset: dict[str, Any] | None = None
    context_parallel_size: int | None = None

    def check(self) -> None:
        """ValueError for bad or contradictory settings."""
        super().check()
        resets = self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss
        if resets and self.eod is None:
            raise ValueError(
                "tokenizer: it has no `eod`, but reset_position_ids, reset_attention_mask and "
                "eod_mask_loss need one"
            )


def attribute(tokenizer: Any, name: str) -> Any:
    """An attribute of a tokenizer; None if it has none. Most of Megatron's tokenizers have
    properties that raise NotImplementedError or another error, and megatron-core, too, takes any
    error for a missing token."""
    try:
        return getattr(tokenizer, name, None)
    except Exception:
        return None


def get_blend_from_list(blend: Sequence[str] | None) -> tuple[list[str], list[float] | None] | None:
    """The `blend` of a configuration from a list of prefixes, or of weights and prefixes: 70 web 30
    code. ValueError for a list that begins with a weight but does not alternate."""
    if blend is None:
        return None
    words = [str(word).strip() for word in blend]
    if len(words) == 1:  # one text that holds the whole list
        words = words[0].split() if is_weight(words[0].partition(" ")[0]) else words
    if not words or not is_weight(words[0]):
        return words, None
    if len(words) % 2 or not all(map(is_weight, words[::2])):
        raise ValueError(
            f"blend: got {' '.join(words)}, which begins with a weight; expected a weight before each "
            f"prefix, such as 70 web 30 code, or prefixes alone"
        )
    return words[1::2], [float(word) for word in words[::2]]


def is_weight(word: str) -> bool:
    """Whether a word of a blend is a number."""
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def split_matrix(split: str | None) -> list[Part]:
    """The part of 0 .. 1 for each split, from shares such as "98,1,1" (missing shares are 0).
    ValueError for any other text."""
    try:
        shares = [float(text) for text in (split or "").split(",")]
    except ValueError:
        shares = []
    if (
        not all(0 <= share < math.inf for share in shares)
        or not sum(shares) > 0
        or len(shares) > len(Split)
    ):
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


# ---- samples -------------------------------------------------------------------------------------


class GPTDataset:
    """Samples of sequences `indexed_indices` of an `IndexedDataset`: `dataset[i]` is a dict of
    tensors. It also acts as a blend of this one data set.

    `num_samples`: the minimum number of samples, from as many epochs as that takes; None: one
    epoch. ValueError if the data is empty or corrupt. Creating the object reads no token and
    computes no index.

    As in megatron-core, a subclass may replace `__getitem__`,
    `_query_document_sample_shuffle_indices`, which returns the ids of a sample, and
    `build_low_level_dataset`. TypeError for a subclass that replaces a method of megatron-core that
    this class does not call.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if uncalled := sorted(NEVER_CALLED & vars(cls).keys()):
            raise TypeError(
                f"{cls.__name__}.{uncalled[0]}: this GPTDataset computes its indices in its own way and "
                f"never calls it; replace _query_document_sample_shuffle_indices or __getitem__ instead"
            )

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: range,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ):
        self.dataset, self.dataset_path = indexed_dataset, dataset_path
        self.indices, self.index_split = indexed_indices, index_split
        self.num_samples, self.config = num_samples, config
        self._T, self._extra = config.sequence_length, config.add_extra_token_to_sequence
        config.check()  # fields may have been assigned
        self._pad_token_id = pad_id(config)
        self._lengths = indexed_dataset.sequence_lengths[
            indexed_indices.start : indexed_indices.stop
        ]
        if self._lengths.min(initial=0) < 0:
            bad = int(self._lengths.argmin())
            raise ValueError(
                f"{dataset_path}.idx: sequence {indexed_indices[bad]:,} has {self._lengths[bad]:,} "
                f"tokens, so the file is corrupt; regenerate the pair"
            )
        self.num_tokens_per_epoch = int(self._lengths.sum(dtype=np.int64))
        drop_last = index_split is not Split.valid or config.drop_last_partial_validation_sequence
        if num_samples and not self.num_tokens_per_epoch:
            raise ValueError(
                f"{dataset_path}, split {index_split.name}: needs {num_samples:,} samples, but its "
                f"{len(indexed_indices):,} sequences have no tokens; give this split a larger share, or "
                f"set its number of samples to 0"
            )
        self.order = plan_order(
            config.random_seed,
            indexed_indices,
            tokens=self.num_tokens_per_epoch,
            num_samples=num_samples,
            T=self._T,
            extra=self._extra,
            drop_last=drop_last,
        )

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Any:
        """Open the files of a prefix."""
        cache = config.object_storage_cache_path
        return IndexedDataset(
            dataset_path,
            mmap=config.mmap_bin_files,
            object_storage_config=None if cache is None else ObjectStorageConfig(cache),
        )

    def identity(self) -> dict[str, Any]:
        """Everything that determines the contents of the samples, as JSON values."""
        return {
            **vars(self.order),
            "sequence_length": self._T,
            "extra_token": self._extra,
            "tokens_per_epoch": self.num_tokens_per_epoch,
        }

    def __len__(self) -> int:
        return self.order.num_samples

    @property
    def datasets(self) -> "list[GPTDataset]":
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
            documents, samples = self.order.tables()
            begins = find_samples(
                self.dataset.sequence_lengths,
                documents,
                num_samples=len(self),
                T=self._T,
                tokens=self.order.num_epochs * self.num_tokens_per_epoch,
                extra=self._extra,
            )
            return {"document_index": documents, "sample_index": begins, "shuffle_index": samples}

        key = hash_json([self.identity(), hash_bytes(self._lengths.tobytes())])
        return cached(
            self.config.path_to_cache, f"{key}-{type(self).__name__}-{self.index_split.name}", build
        )

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

    # ---- tokens

    def pieces(self, i: int) -> list[tuple[int, int, int]]:
        """The parts of sample i, [(sequence, offset, number of ids)]; reads no token."""
        k = int(self.shuffle_index[self.locate(i)[1]])
        (first, skip), (last, until) = self.sample_index[k : k + 2].tolist()
        sequences = self.document_index[first : last + 1]
        ends = self.dataset.sequence_lengths[sequences].tolist()
        ends[-1] = until + self._extra
        begins = [skip] + [0] * (last - first)
        return [
            (sequence, begin, end - begin)
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

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of sample `idx`, int64, padded at the end; and the sequences that they come from,
        int64."""
        ids, sequences = self._read(idx)
        missing = self._T + self._extra - len(ids)
        padded = np.pad(ids.astype(np.int64), (0, missing), constant_values=self._pad_token_id)
        return padded, np.array(sequences, np.int64)

    def _with_masks(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What `row` returns, from the ids of a sample (at most T + 1,)."""
        eod, missing = self.config.eod, self._T + 1 - len(ids)
        if missing < 0:
            raise ValueError(
                f"{type(self).__name__}: a sample has {len(ids):,} ids, expected at most {self._T + 1:,} "
                f"(sequence_length + 1)"
            )
        if missing:
            ids = np.pad(ids.astype(np.int64), (0, missing), constant_values=self._pad_token_id)
        ends = np.zeros(self._T, bool) if eod is None else ids[:-1] == eod
        live = ids != self._pad_token_id
        ids[~live] = 0
        if self.config.eod_mask_loss:
            live[1:] &= ~ends
        return ids, live.view(np.uint8), ends

    def __getitem__(self, idx: int | None) -> "dict[str, torch.Tensor]":
        """Sample `idx` as tensors: tokens, labels, position_ids (T,) int64, loss_mask (T,) float32,
        and on request attention_mask (1, T, T) bool, True where attention is masked out. `idx`
        None: a sample without loss, to pad a batch."""
        import torch

        config, places = self.config, np.arange(self._T)
        number = 0 if idx is None else int(idx) + len(self) * (int(idx) < 0)
        ids, *_ = self._query_document_sample_shuffle_indices(number)
        text, live, ends = self._with_masks(np.array(ids, np.int64))
        document = np.cumsum(ends) - ends  # 0 up to and including the first end
        begins = np.append(0, np.flatnonzero(ends) + 1)[document]
        sample = {
            "tokens": text[:-1].copy(),
            "labels": text[1:].copy(),
            "loss_mask": (live[1:] * (idx is not None)).astype(np.float32),
            "position_ids": places - begins if config.reset_position_ids else places,
        }
        if config.create_attention_mask:
            barred = places > places[:, None]
            if config.reset_attention_mask:
                barred |= document != document[:, None]
            sample["attention_mask"] = barred[None]
        return {name: torch.from_numpy(array) for name, array in sample.items()}


def pad_id(config: GPTDatasetConfig) -> int:
    """The padding id: the tokenizer's `pad`, unless that is also another special token (then NO_PAD
    with a warning; `allow_ambiguous_pad_tokens` keeps it)."""
    tokenizer, keep = config.tokenizer, config.allow_ambiguous_pad_tokens
    pad = attribute(tokenizer, "pad")
    if pad is None:
        return NO_PAD
    named = attribute(tokenizer, "special_tokens_dict") or {}
    others = [token for name, token in named.items() if name != "pad_token"]
    if pad not in (others or [attribute(tokenizer, "eos"), attribute(tokenizer, "eod")]):
        return int(pad)
    log.warning(
        "the tokenizer's padding token, %s, is also another special token; %s",
        pad,
        "it is masked in the loss" if keep else "it does not count as padding",
    )
    return int(pad) if keep else NO_PAD


# ---- mock data -----------------------------------------------------------------------------------


class MockGPTLowLevelDataset:
    """megatron-core's 100,000 generated sequences of 1 to 4,095 tokens: 1 2 3 ... modulo the
    vocabulary, then EOD."""

    def __init__(self, tokenizer: Any):
        vocab_size, eod = attribute(tokenizer, "vocab_size"), attribute(tokenizer, "eod")
        if eod is None or not vocab_size:
            raise ValueError(
                "tokenizer: mock data needs a tokenizer with an `eod` and a `vocab_size`"
            )
        self.vocab_size, self.eod = int(vocab_size), int(eod)
        rng = np.random.default_rng(0)
        self.sequence_lengths = rng.integers(1, 4096, 100_000, dtype=np.int32)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens (default: all) of sequence `idx` from `offset` on, int64."""
        ids = np.arange(1, int(self.sequence_lengths[idx]) + 1) % self.vocab_size
        ids[-1] = self.eod
        return ids[offset : None if length is None else offset + length]


class MockGPTDataset(GPTDataset):
    """Samples for runs without data."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Any:
        """The generated sequences; the path is ignored."""
        return MockGPTLowLevelDataset(config.tokenizer)
