"""megatron-core's classes under its names, for your own code (docs/megatron.md). A run does not need
this module.

    config = GPTDatasetConfig(random_seed=1, sequence_length=2048, blend=(["web"], None), split="98,1,1",
                              tokenizer=tokenizer)
    train, valid, test = BlendedMegatronDatasetBuilder(GPTDataset, (1000, 10, 0), lambda: True, config).build()
    train[0]["tokens"]      # (T,) int64, megatron-core's

The samples themselves are in megatron.py; this module adds megatron-core's configuration and
tensors. All tensors of a sample equal megatron-core's, with three differences that avoid its bugs:
the mask of a padded sample does not leak into other samples; a split without tokens is an error,
not an endless loop; a cached index is used only for the same inputs. `attention_mask`, T * T bytes
per sample, is made only on request.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from nanochat.integrations.megatron import (  # noqa: F401  own code imports all names from this module
    NO_PAD,
    BlendedSamples,
    Part,
    SampleRules,
    Samples,
    Split,
    check_blend,
    check_numbers,
    normalize,
    plan_blend,
    sequences_of,
    split_matrix,
)
from nanochat.integrations.megatron_files import (  # noqa: F401
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    ObjectStorageConfig,
    get_bin_path,
    get_idx_path,
    is_object_storage_path,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# methods of megatron-core's GPTDataset that have no counterpart here
NEVER_CALLED = {
    "_build_document_sample_shuffle_indices",
    "_get_num_epochs",
    "_get_num_tokens_per_epoch",
    "numel_low_level_dataset",
}

Blend = tuple[Sequence[str], Sequence[float] | None]  # prefixes, and a weight for each


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
        surplus = self.mid_level_dataset_surplus
        per_split = self.blend_per_split
        check_numbers(self.sequence_length, self.random_seed)
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
        for blend in (self.blend, *(per_split or ())):
            if blend is not None:
                check_blend(*blend)
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


def attribute(tokenizer: object, name: str) -> Any:
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


# ---- samples as tensors --------------------------------------------------------------------------


class GPTDataset(Samples):
    """Samples of sequences `indexed_indices` of an `IndexedDataset`: `dataset[i]` is a dict of
    tensors. See `Samples`.

    As in megatron-core, a subclass may replace `__getitem__`,
    `_query_document_sample_shuffle_indices`, which returns the ids of a sample, and
    `build_low_level_dataset`. TypeError for a subclass that replaces a method of megatron-core that
    this class does not call.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.cache_name = cls.__name__
        if uncalled := sorted(NEVER_CALLED & vars(cls).keys()):
            raise TypeError(
                f"{cls.__name__}.{uncalled[0]}: this GPTDataset computes its indices in its own way and "
                f"never calls it; replace _query_document_sample_shuffle_indices or __getitem__ instead"
            )

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: range,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ):
        self.index_split = index_split
        self.config = config
        config.check()  # fields may have been assigned
        rules = SampleRules(
            T=config.sequence_length,
            seed=config.random_seed,
            eod=config.eod,
            pad=pad_id(config),
            eod_mask_loss=config.eod_mask_loss,
            extra=config.add_extra_token_to_sequence,
            drop_last=index_split is not Split.valid
            or config.drop_last_partial_validation_sequence,
            cache=config.path_to_cache,
        )
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split.name, rules
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

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of sample `idx`, int64, padded at the end; and the sequences that they come from,
        int64."""
        ids, sequences = self._read(idx)
        missing = self.rules.T + self.rules.extra - len(ids)
        padded = np.pad(ids.astype(np.int64), (0, missing), constant_values=self.rules.pad)
        return padded, np.array(sequences, np.int64)

    def __getitem__(self, idx: int | None) -> "dict[str, torch.Tensor]":
        """Sample `idx` as tensors: tokens, labels, position_ids (T,) int64, loss_mask (T,) float32,
        and on request attention_mask (1, T, T) bool, True where attention is masked out. `idx`
        None: a sample without loss, to pad a batch."""
        import torch

        config = self.config
        places = np.arange(self.rules.T)
        number = 0 if idx is None else int(idx)
        if number < 0:
            number += len(self)
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
    tokenizer = config.tokenizer
    keep = config.allow_ambiguous_pad_tokens
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


# ---- blends --------------------------------------------------------------------------------------


class BlendedDataset(BlendedSamples):
    """A mix of several data sets: `size` samples in the proportions of `weights`; or, if `size` is
    None, all samples, and `weights` are the number of samples in each data set. `dataset[i]` is a
    dict of tensors and `dataset_id`. ValueError if a data set has too few samples."""

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float],
        size: int | None,
        config: GPTDatasetConfig,
    ):
        super().__init__(datasets, weights, size, config.path_to_cache)
        self.config = config
        self.index_split = datasets[0].index_split
        self._tensors = list(datasets)

    def __getitem__(self, idx: int) -> "dict[str, torch.Tensor | np.int16]":
        i = int(idx)
        if i < 0:
            i += len(self)
        dataset, sample = self.locate(i)
        return {"dataset_id": np.int16(dataset), **self._tensors[dataset][sample]}


class BlendedMegatronDatasetBuilder:
    """`BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()`: the data
    sets of train, valid and test. `sizes`: the number of samples of each, None for all. No call is
    collective. ValueError or FileNotFoundError for bad settings or files."""

    def __init__(
        self,
        cls: type[GPTDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: GPTDatasetConfig,
    ):
        are_counts = all(size is None or size >= 0 for size in sizes)
        if len(sizes) != len(Split) or not are_counts:
            names = ", ".join(split.name for split in Split)
            raise ValueError(
                f"sizes: got {list(sizes)}, expected a number of samples or None for each of {names}"
            )
        self.cls = cls
        self.sizes = list(sizes)
        self.config = config
        self.is_built_on_rank = is_built_on_rank
        self._open = functools.cache(lambda prefix: cls.build_low_level_dataset(prefix, config))

    def build(self) -> list[Any]:
        """A data set for each split; None for a split without data, and on ranks without data. With
        `multiple_validation_sets`, the entry of valid is a list of data sets."""
        return [self.build_split(split) if self.is_built_on_rank() else None for split in Split]

    def build_split(self, split: Split) -> Any:
        """The data set of one split."""
        config = self.config
        size = self.sizes[split.value]
        part = config.split_matrix[split.value]
        if part is None:
            return None
        if config.mock:
            return self._of_prefix("mock data", part, size, split)

        per_split = config.blend_per_split
        blend = config.blend if per_split is None else per_split[split.value]
        assert blend is not None
        prefixes, weights = blend
        has_weights = weights is not None and not per_split
        if len(prefixes) == 1 and not has_weights:  # one prefix is not a blend
            return self._of_prefix(prefixes[0], part, size, split)
        is_separate = per_split and config.multiple_validation_sets
        if is_separate and split is Split.valid:
            return [self._of_prefix(prefix, part, size, split) for prefix in prefixes]

        if weights is not None and size is None:
            raise ValueError(
                f"blend: got weights and no number of samples for split {split.name}, expected both or "
                f"neither"
            )
        plan = plan_blend(
            lambda prefix, number: self._of_prefix(prefix, part, number, split),
            prefixes,
            weights,
            size,
            surplus=config.mid_level_dataset_surplus,
        )
        return BlendedDataset(plan.datasets, plan.weights, plan.size, config)

    def _of_prefix(
        self, prefix: str, part: tuple[float, float], size: int | None, split: Split
    ) -> GPTDataset:
        """A split of one pair of files, rounded to whole sequences."""
        opened = self._open(prefix)
        indices = sequences_of(part, len(opened.sequence_lengths))
        return self.cls(opened, prefix, indices, size, split, self.config)


# ---- mock data -----------------------------------------------------------------------------------


class MockGPTLowLevelDataset:
    """megatron-core's 100,000 generated sequences of 1 to 4,095 tokens: 1 2 3 ... modulo the
    vocabulary, then EOD."""

    def __init__(self, tokenizer: object):
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
