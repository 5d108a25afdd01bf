"""
Megatron's samples: which tokens are in sample i of a data set, by the rules of megatron-core, without its waiting.

    pair of files -> sequences of a split -> document_index -> stream -> samples -> shuffle_index -> data set
    IndexedDataset   range                   `nanochat.sample_order`                                 GPTDataset

`GPTDataset.document_index`, `sample_index` and `shuffle_index` equal megatron-core 0.16.1's, element by element and in
type, and so does every tensor of a sample (core/datasets/gpt_dataset.py). Nothing is computed before it is asked for,
and `sample_index` never as a whole; `rows` reads many samples at once, each as pieces of sequences.

We differ where it fails: a mask cached from a padded sample is not given to all samples; a split without tokens is an
error instead of an endless loop; indices never depend on what another run left under the same path; `attention_mask`,
T * T bytes a sample, is only there when asked for.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanochat import index_cache
from nanochat.common import hash_json
from nanochat.indexed import IndexedDataset
from nanochat.sample_order import LazyIndex, Stream, plan_order

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

NO_PAD = -1  # the id of padding where the tokenizer has none: no token has it
WORTH_STORING = 1 << 19  # entries of document_index and shuffle_index; fewer are shuffled faster than files are opened

Blend = tuple[Sequence[str], Sequence[float] | None]  # prefixes, weights


class Split(Enum):
    """The three data sets that are made of the same files."""

    train = 0
    valid = 1
    test = 2


# ---- configuration --------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class GPTDatasetConfig:
    """What decides which tokens are in which sample, beside data and sizes. ValueError for what cannot be.

    Either `blend` with `split`, or `blend_per_split`, or neither: then data are made up (`MockGPTDataset`).
    """

    random_seed: int
    sequence_length: int
    blend: Blend | None = None
    blend_per_split: Sequence[Blend | None] | None = None
    split: str | None = None  # shares of train, valid, test: "98,1,1"
    tokenizer: Any = None  # has .eod; .pad, .eos and .special_tokens_dict are looked at; .vocab_size for made-up data
    path_to_cache: str | None = None  # the index cache; None: indices stay in memory
    mmap_bin_files: bool = True
    mid_level_dataset_surplus: float = 0.005  # share of samples that each source of a blend has to spare
    allow_ambiguous_pad_tokens: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = False
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise ValueError(f"sequence_length: got {self.sequence_length}, expected at least 1")
        if not 0 <= self.random_seed < 2**32:
            raise ValueError(f"random_seed: got {self.random_seed}, expected 0 to 2**32 - 1")
        if not 0 <= self.mid_level_dataset_surplus < math.inf:
            raise ValueError(f"mid_level_dataset_surplus: got {self.mid_level_dataset_surplus}, expected 0 or more")
        if (self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss) and self.eod is None:
            raise ValueError("tokenizer: got none with an `eod`, which reset_position_ids, reset_attention_mask and "
                             "eod_mask_loss need")
        self._check_blends()

    def _check_blends(self) -> None:
        if self.blend_per_split is not None and (self.blend is not None or self.split is not None):
            raise ValueError("blend_per_split: got it with blend or split, expected it alone")
        if self.blend_per_split is not None and len(self.blend_per_split) != len(Split):
            raise ValueError(f"blend_per_split: got {len(self.blend_per_split)} blends, expected {len(Split)} (None "
                             f"for a split without data)")
        if self.blend is not None and self.split is None:
            raise ValueError('split: got none, expected shares of train, valid, test, as "98,1,1"')
        for blend in (self.blend, *(self.blend_per_split or ())):
            if blend is not None:
                check_blend(*blend)
        self.split_matrix  # noqa: B018  a bad split is an error here, not at the first use

    @property
    def mock(self) -> bool:
        """Whether data are made up."""
        return self.blend is None and not any(self.blend_per_split or ())

    @property
    def split_matrix(self) -> list[tuple[float, float] | None]:
        """Which part of each source's sequences each split is, (begin, end) of 0 .. 1; None for no part."""
        return split_matrix("1,1,1" if self.mock else self.split) if self.blend_per_split is None or self.mock else []

    @property
    def eod(self) -> int | None:
        """The id that ends a document; None without a tokenizer that has one."""
        return getattr(self.tokenizer, "eod", None)


def check_blend(prefixes: Sequence[str], weights: Sequence[float] | None) -> None:
    """ValueError unless there is a prefix, and a positive weight for each if any."""
    if not prefixes:
        raise ValueError("blend: got no prefix, expected at least one")
    if weights is None:
        return
    if len(prefixes) != len(weights):
        raise ValueError(f"blend: got {len(prefixes)} prefixes and {len(weights)} weights, expected one weight for each"
                         f" prefix, or none at all")
    for prefix, weight in zip(prefixes, weights):
        if not 0 < weight < math.inf:
            raise ValueError(f"blend: got weight {weight} for {prefix}, expected more than 0; leave out a source that "
                             f"should give nothing")


def split_matrix(split: str | None) -> list[tuple[float, float] | None]:
    """Shares as "98,1,1" (fewer than three: the rest is 0) as parts of 0 .. 1. ValueError for others."""
    try:
        shares = [float(part) for part in (split or "").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(Split) or not all(0 <= s < math.inf for s in shares) or not sum(shares):
        raise ValueError(f'split: got {split!r}, expected shares of train, valid and test, as "98,1,1"')
    normal = normalize(shares + [0.0] * (len(Split) - len(shares)))
    edges = [0.0]
    for share in normal:
        edges.append(edges[-1] + share)
    return [(a, b) if b > a else None for a, b in pairwise(edges)]


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in NumPy's order of addition, as megatron-core does."""
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()


# ---- samples --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Pieces:
    """What samples are made of: `counts[i]` pieces are sample i, a piece `lengths` ids of a sequence from an offset."""

    counts: np.ndarray  # (n,) int64
    sequences: np.ndarray  # (m,) int32
    offsets: np.ndarray  # (m,) int64
    lengths: np.ndarray  # (m,) int64


class GPTDataset:
    """Samples of sequences `indices` of an `IndexedDataset`. `dataset[i]` is a dict of tensors; `rows` is for training.

    `num_samples`: there are at least so many, over as many epochs as it takes; None: one epoch. ValueError for data
    that cannot give them.
    """

    def __init__(self, indexed_dataset: Any, dataset_path: str | None, indexed_indices: range, num_samples: int | None,
                 index_split: Split, config: GPTDatasetConfig):
        self.dataset, self.dataset_path, self.indices = indexed_dataset, dataset_path, indexed_indices
        self.num_samples, self.index_split, self.config = num_samples, index_split, config
        self._pad = pad_id(config)
        lengths = indexed_dataset.sequence_lengths[indexed_indices.start:indexed_indices.stop]
        if len(lengths) and lengths.min() < 0:
            raise ValueError(f"{dataset_path}.idx: sequence {indexed_indices.start + int(lengths.argmin()):,} has "
                             f"{lengths.min():,} tokens; make the pair again")
        self.num_tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        drop_last = index_split is not Split.valid or config.drop_last_partial_validation_sequence
        try:
            self.order = plan_order(config.random_seed, indexed_indices, tokens=self.num_tokens_per_epoch, T=self._T,
                                    num_samples=num_samples, extra=self._extra, drop_last=drop_last)
        except ValueError as e:
            raise ValueError(f"{dataset_path}, split {index_split.name}: {e}") from None

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """How many sequences splits are made of."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Any:
        """The files of a prefix."""
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files)

    @property
    def _T(self) -> int:
        return self.config.sequence_length

    @property
    def _extra(self) -> bool:
        return self.config.add_extra_token_to_sequence

    def identity(self) -> dict[str, Any]:
        """What decides which part of which document is in which sample, as JSON values."""
        return {**vars(self.order), "sequence_length": self._T, "extra_token": self._extra,
                "tokens_per_epoch": self.num_tokens_per_epoch}

    def __len__(self) -> int:
        return self.order.num_samples

    # ---- indices

    @cached_property
    def _indices(self) -> tuple[Stream, np.ndarray]:
        """(stream, shuffle_index), computed, or mapped from the cache."""
        documents, samples = self._shuffled()
        return Stream(self.dataset.sequence_lengths, documents), samples

    def _shuffled(self) -> tuple[np.ndarray, np.ndarray]:
        folder, entries = self.config.path_to_cache, self.order.num_epochs * len(self.indices) + len(self)
        if folder is None or entries < WORTH_STORING:
            return self.order.shuffled()
        name = f"{hash_json(vars(self.order))}-{type(self).__name__}-{self.index_split.name}"
        documents, samples = index_cache.cached(
            [Path(folder) / f"{name}-{which}_index.npy" for which in ("document", "shuffle")], self.order.shuffled)
        return documents, samples

    @property
    def document_index(self) -> np.ndarray:
        """(epochs * documents,) int32: sequences in the order of the stream."""
        return self._indices[0].order

    @property
    def shuffle_index(self) -> np.ndarray:
        """(samples,) uint32: which sample of the stream sample i is."""
        return self._indices[1]

    @property
    def sample_index(self) -> LazyIndex:
        """(samples + 1, 2): where each sample of the stream begins, (place in document_index, offset). Computed where
        it is looked at."""
        wide = self.order.num_epochs * len(self.indices) > np.iinfo(np.int32).max
        return LazyIndex((len(self) + 1, 2), np.int64 if wide else np.int32,
                         lambda first, last: np.stack(self._begins(np.arange(first, last)), axis=1))

    def _begins(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where samples (n,) of the stream begin: (place in document_index, offset), two (n,) int64. Without the extra
        token a sample begins behind the last token of the one before, which may be the end of a document."""
        stream, last = self._indices[0], self.order.num_epochs * self.num_tokens_per_epoch - self._extra
        places, offsets = np.zeros((2, len(samples)), np.int64)
        later = np.flatnonzero(samples > 0)  # sample 0 begins at (0, 0), whatever document 0 is
        tokens = np.minimum(samples[later] * self._T, last)
        places[later], before = stream.locate(tokens, "right" if self._extra else "left")
        offsets[later] = tokens - before
        if not self._extra:
            beyond = samples * self._T > last
            places[beyond] = len(stream.order) - 1
            offsets[beyond] = stream.lengths[stream.order[-1]]
        return places, offsets

    # ---- tokens

    def pieces(self, start: int, stop: int) -> Pieces:
        """What samples start .. stop - 1 of the data set are made of; reads no token."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"samples {start:,} to {stop:,}, there are {len(self):,}")
        samples = self.shuffle_index[start:stop].astype(np.int64)
        both = self._begins(np.concatenate((samples, samples + 1)))
        (first, last), (skip, until) = (a.reshape(2, -1) for a in both)
        counts = last - first + 1
        ends = np.cumsum(counts)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - ends + counts, counts)
        sequences = self.document_index[places]
        lengths = self.dataset.sequence_lengths[sequences].astype(np.int64)
        offsets = np.zeros(len(places), np.int64)
        offsets[ends - counts] = skip
        lengths[ends - 1] = until + self._extra
        return Pieces(counts, sequences, offsets, lengths - offsets)

    def _read(self, pieces: Pieces) -> list[np.ndarray]:
        """The ids of each piece."""
        begins, _ = self.dataset.index.checked(pieces.sequences, self.dataset.file_bytes)
        begins = begins + pieces.offsets
        return self.dataset.reader.read_many(list(zip(begins.tolist(), (begins + pieces.lengths).tolist())))

    def _fill(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Write samples into `out` (n, T + extra) and return how many tokens each has, (n,); the rest is left alone."""
        pieces = self.pieces(start, stop)
        ends = np.cumsum(pieces.counts)
        sizes = np.add.reduceat(pieces.lengths, ends - pieces.counts) if len(ends) else ends
        ids = self._read(pieces)
        if (sizes == out.shape[1]).all() and out.flags.c_contiguous:
            if ids:
                np.concatenate(ids, out=out.reshape(-1), casting="same_kind")
        else:
            for row, end, count, size in zip(out, ends.tolist(), pieces.counts.tolist(), sizes.tolist()):
                np.concatenate(ids[end - count:end], out=row[:size], casting="same_kind")
        return sizes

    @property
    def dtype(self) -> np.dtype:
        """The type of ids on disk."""
        return self.dataset.dtype

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Samples start .. stop - 1 for training: (ids (n, T + 1) of the type on disk, which targets count (n, T) bool
        or None: all). Inputs are ids[:, :-1], targets ids[:, 1:]; where there is no token, the id is 0."""
        width = self._T + self._extra
        ids = np.zeros((stop - start, self._T + 1), self.dtype)
        out = ids if self._extra else np.zeros((stop - start, width), self.dtype)
        sizes = self._fill(start, stop, out)
        if not self._extra:
            ids[:, :width] = out
        if self._extra and (sizes == width).all() and not self.config.eod_mask_loss and self._pad < 0:
            return ids, None
        absent = np.arange(self._T + 1) >= sizes[:, None]
        padding = absent | (ids == self._pad)
        live = ~padding[:, 1:]
        if self.config.eod_mask_loss:
            live &= ids[:, :-1] != self.config.eod
        ids[padding] = 0
        return ids, live

    def __getitem__(self, idx: int | None) -> "dict[str, torch.Tensor]":
        """Sample `idx` as tensors: tokens, labels, position_ids (T,) int64, loss_mask (T,) float32, and attention_mask
        (1, T, T) bool, True where attention is barred, if the configuration asks for it. None: a sample that fills a
        batch, without loss."""
        at = 0 if idx is None else int(idx) + len(self) * (int(idx) < 0)
        text = np.full((1, self._T + self._extra), self._pad, np.int64)
        self._fill(at, at + 1, text)
        tokens = text[0, :self._T].copy()
        labels = text[0, 1:].copy() if self._extra else np.append(tokens[1:], self._pad)
        sample = self._masks(tokens)
        sample["loss_mask"][labels == self._pad] = 0
        if idx is None:
            sample["loss_mask"][:] = 0
        tokens[tokens == self._pad] = labels[labels == self._pad] = 0
        return _tensors({"tokens": tokens, "labels": labels, **sample})

    def _masks(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """loss_mask, position_ids and attention_mask of tokens (T,), by where documents end in them."""
        config, places = self.config, np.arange(self._T)
        ends = tokens == (NO_PAD - 1 if config.eod is None else config.eod)
        document = np.cumsum(ends) - ends  # 0 up to the first end, that one included
        begins = np.append(0, np.flatnonzero(ends) + 1)[document]
        found = {"loss_mask": np.where(ends & config.eod_mask_loss, 0, 1).astype(np.float32),
                 "position_ids": places - begins if config.reset_position_ids else places}
        if config.create_attention_mask:
            barred = places > places[:, None]
            if config.reset_attention_mask:
                barred |= document != document[:, None]
            found["attention_mask"] = barred[None]
        return found


def pad_id(config: GPTDatasetConfig) -> int:
    """The id that stands for no token: the tokenizer's `pad`, unless it is another special token's as well (then -1,
    which no token has, with a warning; `allow_ambiguous_pad_tokens` keeps it)."""
    tokenizer = config.tokenizer
    pad = getattr(tokenizer, "pad", None)
    if pad is None:
        return NO_PAD
    named = getattr(tokenizer, "special_tokens_dict", None) or {}
    others = [token for name, token in named.items() if name != "pad_token"]
    if pad not in (others or [getattr(tokenizer, "eos", None), getattr(tokenizer, "eod", None)]):
        return int(pad)
    log.warning("the tokenizer's padding token, %s, is another special token as well; %s", pad,
                "its tokens get no loss" if config.allow_ambiguous_pad_tokens else "it is not taken for padding")
    return int(pad) if config.allow_ambiguous_pad_tokens else NO_PAD


def _tensors(arrays: dict[str, np.ndarray]) -> "dict[str, torch.Tensor]":
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


# ---- data that are made up ------------------------------------------------------------------------------------------

class MockGPTLowLevelDataset:
    """100,000 sequences of 1 to 4,095 tokens: 1 2 3 ... modulo the vocabulary, then EOD. megatron-core's."""

    dtype = np.dtype(np.int64)
    path_prefix = None

    def __init__(self, tokenizer: Any):
        if getattr(tokenizer, "eod", None) is None or not getattr(tokenizer, "vocab_size", None):
            raise ValueError("tokenizer: made-up data need one with an `eod` and a `vocab_size`")
        self.vocab_size, self.eod = int(tokenizer.vocab_size), int(tokenizer.eod)
        self.sequence_lengths = np.random.default_rng(0).integers(1, 4096, 100_000, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.get(number)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens (default: all) of sequence `idx` from `offset` on, int64."""
        ids = np.arange(1, int(self.sequence_lengths[idx]) + 1) % self.vocab_size
        ids[-1] = self.eod
        return ids[offset:None if length is None else offset + length]


class MockGPTDataset(GPTDataset):
    """Samples for runs without data."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Any:
        """Made-up sequences; the path means nothing."""
        return MockGPTLowLevelDataset(config.tokenizer)

    def _read(self, pieces: Pieces) -> list[np.ndarray]:
        return [self.dataset.get(*which) for which in
                zip(pieces.sequences.tolist(), pieces.offsets.tolist(), pieces.lengths.tolist())]
