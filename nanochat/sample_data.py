"""
Megatron's order, the data: which pairs of files a run takes samples from, which part of them, and what they make.

    --data-path=web,code  --split=969,30,1  --blend-weights=70,30

    web    | s s s s s s s s s s s s s s s s s | v v | t        sequences: the first 96.9 % are for training,
    code   | s s s s s s s s s | v | t                          the next 3 % validate, the rest is for nobody
                  |                |
        samples (`nanochat.megatron`),   documents, through validation's own lanes, so that bits per byte
        mixed (`nanochat.blend`)         are those of the same rows for every number of processes

Each pair is a bucket of the run, in the order in which --data-path names them (a folder: in the order of names). What
decides the samples is a `SampleConfig`, above all their number: it is what a run asks for when it starts, its steps
times the rows of a step, as Megatron's --train-iters times its global batch. Epochs follow from it, and the shuffles
are over all epochs, so another number is another order.

Rejected: cutting the valid split into samples as well. Its bits per byte would then depend on the number of samples
asked for, and a document's first tokens would be predicted from another document.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from nanochat.blend import BlendedDataset, BlendedMegatronDatasetBuilder, Mixture
from nanochat.common import hash_json
from nanochat.dataset import data_folder, find_files, split_train_val
from nanochat.indexed import Index
from nanochat.megatron import GPTDataset, GPTDatasetConfig, split_matrix
from nanochat.places import place
from nanochat.readers import is_mapped
from nanochat.shard_source import ShardSource
from nanochat.shards import GROUP_ENTRIES
from nanochat.sources import Manifest, Source, Tokenizer, check_format, scan

ORDERS = ("lanes", "megatron")
DEFAULT_SPLIT, WHOLE = "969,30,1", "1,0,0"  # Megatron's own default; where validation has data of its own
ONLY_HERE = {"split": None, "blend_weights": None, "eod_mask_loss": False}  # with --order megatron
ONLY_LANES = {"packing": "bestfit", "pack": True, "long_docs": "crop", "curriculum": None,
              "allow_bucket_exhaustion": False}
Samples = GPTDataset | BlendedDataset


# ---- settings -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class SampleConfig:
    """Everything but data and tokenizer that decides what is in a sample, and V. ValueError on what cannot work."""

    T: int  # tokens a row trains on; a sample holds T + 1
    V: int = 64  # lanes: they give the rows of a step, and have no share of the data
    seed: int = 0
    num_samples: int = 1  # of the whole run
    split: str = DEFAULT_SPLIT  # shares of training, validation, test
    weights: tuple[float, ...] | None = None  # of the prefixes; None: one pass over each, or as many as one needs
    eod_mask_loss: bool = False  # no loss where the input is the end of a document
    index_cache: str | None = None  # a folder; decides nothing

    curriculum: ClassVar[None] = None
    framed: ClassVar[bool] = True  # for what reads documents as well

    def __post_init__(self) -> None:
        for name in ("T", "V", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed: got {self.seed}, expected 0 to 2**32 - 1 with --order megatron")
        if training_part(self.split)[0] is None:
            raise ValueError(f"--split: got {self.split!r}, which leaves nothing for training; its first share must be "
                             f"more than 0")

    def identity(self) -> dict[str, Any]:
        """All of it as JSON values: equal identities, equal samples of the same data."""
        found = {**asdict(self), "order": "megatron", "weights": None if self.weights is None else [*self.weights]}
        del found["index_cache"]
        return found


def training_part(split: str) -> list[tuple[float, float] | None]:
    """Parts (begin, end) of 0 .. 1 for training, validation and test; None for no part. ValueError naming the flag."""
    try:
        return split_matrix(split)
    except ValueError as e:
        raise ValueError(f"--{e}") from None


def parse_weights(text: str | None) -> list[float] | None:
    """The numbers of "30,70". ValueError for anything else, and for what is not above 0."""
    if text is None:
        return None
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--blend-weights: got {text!r}, expected a number for each prefix, as 30,70") from None
    if not all(0 < w < np.inf for w in weights):
        raise ValueError(f"--blend-weights: got {text}, expected numbers above 0; leave out a prefix that should give "
                         f"nothing")
    return weights


def check_order(settings: Mapping[str, Any]) -> None:
    """ValueError for flags of one --order beside the other, where they would do nothing."""
    order = settings["order"]
    if order == "megatron" and settings["data_format"] != "megatron":
        raise ValueError(f"--order megatron: it is an order of Megatron's files, and --data-format is "
                         f"{settings['data_format']}; take --data-format megatron, or --order lanes")
    if order == "megatron" and settings["curriculum"] is not None:
        raise ValueError("--curriculum: Megatron's order has one mix for the whole run (--blend-weights); take --order "
                         "lanes for a curriculum")
    for name, default in (ONLY_LANES if order == "megatron" else ONLY_HERE).items():
        if settings[name] != default:
            flag = "--no-pack" if name == "pack" else f"--{name.replace('_', '-')}"
            other = next(o for o in ORDERS if o != order)
            raise ValueError(f"{flag}: it does nothing with --order {order}; leave it out, or take --order {other}")


def settle_split(settings: Mapping[str, Any]) -> str | None:
    """What --split comes to: None for lanes."""
    if settings["order"] != "megatron" or settings["split"] is not None:
        return settings["split"]
    return WHOLE if has_own_val(settings["data_path"], settings["val_path"]) else DEFAULT_SPLIT


# ---- files ----------------------------------------------------------------------------------------------------------

def has_own_val(data_path: Path | str, val_path: Path | str | None) -> bool:
    """Whether validation has files of its own: those of --val-path, or of DIR/val beside DIR/train."""
    return val_path is not None or (place(data_path) / "train").is_dir()


def find_prefixes(data_path: Path | str, val_path: Path | str | None, split: str) -> dict[str, dict[str, Manifest]]:
    """{"train": {bucket: manifest}, "val": ...} of a run: each pair is a bucket, and of it "documents" says from which
    to which they belong to that part. ValueError or FileNotFoundError naming what is bad or not there."""
    parts, root = training_part(split), place(data_path)
    folder = root / "train" if (root / "train").is_dir() else root
    pairs: dict[str, Manifest] = {}
    files = find_files(folder, "megatron")
    check_format(folder, files, "megatron")
    for file in files:
        name = file.relative_to(data_folder(folder)).as_posix().removesuffix(".bin")
        if name in pairs:
            raise ValueError(f"--data-path: it names {name} twice; name it once, with the sum of its --blend-weights")
        pairs[name] = scan(root, [file])
    found = {"train": _documents(pairs, parts[0])}
    if has_own_val(data_path, val_path):
        val_files = split_train_val(data_path, val_path, data_format="megatron", by_bucket=True)["val"]
        where = root if val_path is None else place(val_path)
        check_format(where, [file for some in val_files.values() for file in some], "megatron")
        return {**found, "val": {bucket: scan(where, some) for bucket, some in val_files.items()}}
    val = {name: manifest for name, manifest in _documents(pairs, parts[1]).items()
           if manifest["documents"][0] < manifest["documents"][1]}
    if not val:
        raise ValueError(f"--split: {split} leaves no whole document for validation in {', '.join(pairs)}; give its "
                         f"second share more, or name validation data with --val-path")
    return {**found, "val": val}


def _documents(pairs: Mapping[str, Manifest], part: tuple[float, float] | None) -> dict[str, Manifest]:
    """The pairs' manifests with the documents that lie whole in a part of their sequences."""
    found = {}
    for name, manifest in pairs.items():
        index = Index(_prefix(manifest) + ".idx")
        first, last = (0, 0) if part is None else (int(round(edge * float(len(index)))) for edge in part)
        begin, end = np.searchsorted(index.document_indices, [first, last + 1]).tolist()
        found[name] = {**manifest, "documents": [begin, max(begin, end - 1)]}
    return found


def _prefix(manifest: Manifest) -> str:
    return str(place(manifest["root"]) / manifest["files"][0]["name"]).removesuffix(".bin")


class DocumentRange(ShardSource):
    """The documents of one pair that a manifest's "documents" names, [first, end)."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer):
        super().__init__(manifest, tokenizer)
        first, end = manifest["documents"]
        edges = [*range(first, end, GROUP_ENTRIES), end]
        self.groups = np.array([b - a for a, b in pairwise(edges)], np.int64)
        self._first_group, self._first_entry = [0, len(self.groups)], np.array(edges[:-1], np.int64)
        self.fingerprint = hash_json([self.fingerprint, first, end])


# ---- samples --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Ends:
    """What GPTDataset asks of a tokenizer."""

    eod: int


class _Training(BlendedMegatronDatasetBuilder):
    """Builds nothing but the samples of training: a run asks for no others, and a blend of the other splits, which may
    be too small for a sample, is none of its concern."""

    def samples(self) -> Samples:
        """The data set."""
        assert self.config.blend is not None
        part = self.config.split_matrix[0]
        found = self._of_blend(self.config.blend, [part, None, None], alone=self.config.blend[1] is None)[0]
        assert found is not None
        return found


def pairs_of(sources: Mapping[str, Source]) -> list[ShardSource]:
    """The buckets, of which each is a pair."""
    found = [source for source in sources.values() if isinstance(source, ShardSource)]
    assert len(found) == len(sources) and all(len(source.manifest["files"]) == 1 for source in found)
    return found


def open_samples(config: SampleConfig, sources: Mapping[str, Source]) -> Samples:
    """The data set whose sample i is row i of a run. Looks at lengths, reads no token and shuffles nothing yet.
    ValueError where it cannot be made, or has fewer samples than the run takes."""
    pairs = pairs_of(sources)
    prefixes = [_prefix(pair.manifest) for pair in pairs]
    if config.weights is not None and len(config.weights) != len(prefixes):
        raise ValueError(f"--blend-weights: got {len(config.weights)} for {len(prefixes)} prefixes "
                         f"({', '.join(sources)}), expected one for each")
    wanted = GPTDatasetConfig(
        random_seed=config.seed, sequence_length=config.T, blend=(prefixes, config.weights), split=config.split,
        tokenizer=_Ends(pairs[0].eod), path_to_cache=config.index_cache, eod_mask_loss=config.eod_mask_loss,
        mmap_bin_files=all(is_mapped(place(f"{prefix}.bin")) for prefix in prefixes))
    try:
        samples = _Training(GPTDataset, (config.num_samples, 0, 0), lambda: True, wanted).samples()
    except ValueError as e:
        raise ValueError(f"--order megatron: {e}") from e
    if len(samples) < config.num_samples:
        raise ValueError(f"--blend-weights: without them each prefix is gone over once, which makes {len(samples):,} "
                         f"samples, and the run takes {config.num_samples:,}; give weights, or shorten the run")
    return samples


def parts_of(samples: Samples) -> Sequence[GPTDataset]:
    """The data set of each prefix."""
    return samples.datasets if isinstance(samples, BlendedDataset) else [samples]


def count_samples(samples: Samples, stop: int) -> list[int]:
    """How many of samples 0 .. stop - 1 come from each prefix."""
    if isinstance(samples, GPTDataset):
        return [stop]
    return Mixture(samples.weights, len(samples)).counts(stop).tolist()
