"""
Compare our samples and blends with those of megatron-core, on random corpora, in one process.

    bash dev/compare_megatron.sh [--corpora 20] [--seed 0]

Each corpus has 1 to 8 pairs of files (written by their builder or by ours; sequences of 1 to 10 T
tokens) and a random configuration (split, extra token, partial samples, handling of EOD, sizes over
several epochs or none). For each split, document_index, sample_index, shuffle_index, dataset_index
and dataset_sample_index must be equal with their dtypes, and so must all tensors of the compared
samples. If one side refuses a blend, the other must refuse it too. Then blends by weights alone, of
300,000 samples, are compared.

Finally, text is tokenized with a `tokenizer.json` as their tools/preprocess_data.py does it. That
script is in no wheel, so this one does the same: the package `tokenizers` encodes, EOD is appended,
their IndexedDatasetBuilder writes. scripts.tok_shards must write the same bytes, and a run on their
pair must have the digests of a run on the text.

Prints what was compared. Exit code 1 if anything differs. Needs an environment with both
(dev/compare_megatron.sh).
"""

import itertools
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dev import peers
from dev.measure import digests_of
from nanochat.cli import Parser, run_main
from nanochat.integrations.megatron_api import (
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    IndexedDatasetBuilder,
    MockGPTDataset,
    Split,
    normalize,
)
from nanochat.integrations.megatron_tables import blend_sources
from scripts import tok_shards

SAMPLES = 24  # compared per data set
INDICES = (
    "document_index",
    "sample_index",
    "shuffle_index",
    "dataset_index",
    "dataset_sample_index",
)
OPTIONS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")


def make_tokenizer(eod: int, vocab_size: int, **pad: int) -> SimpleNamespace:
    """The attributes of a tokenizer that a configuration needs."""
    return SimpleNamespace(
        eod=eod, vocab_size=vocab_size, unique_identifiers={"name": "compare"}, **pad
    )


def write_pair(builder: Any, prefix: Path, documents: Iterable[Any]) -> None:
    """Write a pair of files with one sequence per document, its ids (n,). `builder`: theirs or
    ours."""
    for ids in documents:
        builder.add_document(torch.from_numpy(np.array(ids, np.int64)), [len(ids)])
    builder.finalize(f"{prefix}.idx")


def random_case(
    rng: np.random.Generator, folder: Path, T: int
) -> tuple[dict[str, Any], list[int | None]]:
    """Write a corpus. Returns (settings of a configuration, sizes)."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder as Their

    k = int(rng.integers(1, 9))
    dtype, vocab = (np.uint16, 300) if rng.random() < 0.6 else (np.int32, 100_000)
    prefixes = []
    for j in range(k):
        lengths = rng.integers(1, 10 * T + 1, int(rng.integers(120, 500)))
        documents = [np.append(rng.integers(1, vocab, n - 1), 0) for n in lengths]
        prefixes.append(folder / f"{folder.name}-{j}")
        builder = Their if rng.random() < 0.5 else IndexedDatasetBuilder
        write_pair(builder(f"{prefixes[-1]}.bin", dtype=dtype), prefixes[-1], documents)
    weights = None if rng.random() < 0.4 else (rng.random(k) + 0.05).tolist()
    epochs = float(rng.choice([0.3, 1.0, 1.9, 2.3, 3.85]))
    sizes: list[int | None] = [int(epochs * k * 1500), 40 * k, 7]
    if weights is None and rng.random() < 0.5:
        sizes = [None, None, None]
    settings: dict[str, Any] = {name: bool(rng.random() < 0.5) for name in OPTIONS}
    pad = {"pad": int(rng.integers(1, vocab))} if rng.random() < 0.3 else {}
    settings |= {
        "random_seed": int(rng.integers(0, 2**31)),
        "sequence_length": T,
        "tokenizer": make_tokenizer(0, vocab, **pad),
        "drop_last_partial_validation_sequence": bool(rng.random() < 0.5),
        "add_extra_token_to_sequence": bool(rng.random() < 0.7),
        "mid_level_dataset_surplus": float(rng.choice([0.005, 0.1])),
    }
    blend = ([str(prefix) for prefix in prefixes], weights)
    if rng.random() < 0.2:
        settings["blend_per_split"] = [blend, ([str(prefixes[0])], None), None]
    else:
        settings |= {
            "blend": blend,
            "split": str(rng.choice(["98,1,1", "8,1,1", "0.7,0.2,0.1", "9,1", "1,0,0"])),
        }
    return settings, sizes


def build_theirs(
    settings: dict[str, Any], sizes: Sequence[int | None], cache: Path, mock: bool = False
) -> list[Any]:
    """megatron-core's data sets."""
    from megatron.core.datasets import gpt_dataset as g
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder as Builder,
    )
    from torch import distributed as dist

    if not dist.is_initialized():  # their cache of blends needs a rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = g.GPTDatasetConfig(path_to_cache=None if mock else str(cache), **settings)
    return Builder(
        g.MockGPTDataset if mock else g.GPTDataset, list(sizes), lambda: True, config
    ).build()


def build_ours(
    settings: dict[str, Any], sizes: Sequence[int | None], mock: bool = False
) -> list[Any]:
    """Our data sets."""
    config = GPTDatasetConfig(**settings)
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if mock else GPTDataset, sizes, lambda: True, config
    ).build()


class Comparison:
    """Counts equal values. The first difference raises ValueError."""

    def __init__(self) -> None:
        self.equal: Counter[str] = Counter()

    def same(self, name: str, ours: Any, theirs: Any, unit: str) -> None:
        """ValueError with the first difference unless arrays and dtypes are equal."""
        a, b = np.asarray(ours), np.asarray(theirs)
        if a.dtype != b.dtype or a.shape != b.shape or not np.array_equal(a, b):
            where = np.argwhere(a != b)[:1].tolist() if a.shape == b.shape else ""
            raise ValueError(
                f"{name}: ours {a.dtype} {a.shape}, theirs {b.dtype} {b.shape}; first at {where}"
            )
        self.equal[unit] += a.size if unit in INDICES else 1

    def dataset(self, name: str, ours: Any, theirs: Any, rng: np.random.Generator) -> None:
        """Compare the indices and samples of a split, and of its sources."""
        if (ours is None) != (theirs is None):
            raise ValueError(f"{name}: ours is {ours}, theirs is {theirs}")
        if ours is None:
            return
        for index in INDICES:
            if hasattr(theirs, index):
                self.same(f"{name} {index}", getattr(ours, index), getattr(theirs, index), index)
        self.same(f"{name} length", len(ours), len(theirs), "lengths")
        for part in ours.datasets:
            self.equal["splits over several epochs"] += part.order.num_epochs > 1
            self.equal["last epochs apart"] += part.order.apart
        for j, (a, b) in enumerate(zip(ours.datasets, getattr(theirs, "datasets", ()))):
            self.dataset(f"{name} source {j}", a, b, rng)
        for i in rng.integers(0, len(ours), min(SAMPLES, len(ours))).tolist() if len(ours) else ():
            for part in getattr(theirs, "datasets", [theirs]):
                # a padded first sample would spoil the cache
                part.masks_and_position_ids_are_cached = False
            a, b = ours[i], theirs[i]
            self.same(f"{name} names of tensors", sorted(a), sorted(b), "samples")
            for key in b:
                self.same(f"{name} sample {i} {key}", a[key], b[key], "tensors")

    def corpus(self, number: int, rng: np.random.Generator, folder: Path) -> str:
        """Compare one random corpus. Returns a line that describes it."""
        T = int(rng.choice([2, 8, 31, 64]))
        settings, sizes = random_case(rng, folder, T)
        built: list[Any] = []
        for build in (
            lambda: build_theirs(settings, sizes, folder / "cache"),
            lambda: build_ours(settings, sizes),
        ):
            try:
                built.append(build())
            except (IndexError, AssertionError, ValueError) as e:
                built.append(e)
        theirs, ours = built
        k = len((settings.get("blend") or settings["blend_per_split"][0])[0])
        line = f"corpus {number}: T {T}, {k} sources, sizes {sizes}"
        if isinstance(ours, Exception) or isinstance(theirs, Exception):
            if not (
                isinstance(ours, ValueError) and isinstance(theirs, (IndexError, AssertionError))
            ):
                raise ValueError(f"{line}: ours {ours!r}, theirs {theirs!r}")
            self.equal["refused by both"] += 1
            return f"{line}: refused by both ({ours})"
        for split, a, b in zip(Split, ours, theirs):
            self.dataset(f"{line}, {split.name}", a, b, rng)
        self.equal["corpora"] += 1
        return line

    def mixtures(self, rng: np.random.Generator) -> None:
        """Compare blends by weights alone: the first 300,000 samples, and an exhaustive blend."""
        from megatron.core.datasets import helpers

        for k in (1, 2, 3, 5, 8, 13):
            weights = normalize((rng.random(k) + 0.01).tolist())
            lengths = rng.integers(1, 60_000, k).tolist()
            total = sum(lengths)
            for name, n in (("weights", 300_000), ("exhaustive", total)):
                sources, samples = np.zeros(n, np.int16), np.zeros(n, np.int64)
                if name == "weights":
                    helpers.build_blending_indices(sources, samples, weights, k, n, False)
                    blend = blend_sources(weights, n)
                else:
                    helpers.build_exhaustive_blending_indices(sources, samples, lengths, k)
                    blend = blend_sources([length / total for length in lengths], n, lengths)
                self.same(f"{name} of {k}", blend["dataset_index"], sources, "dataset_index")
                self.same(
                    f"{name} of {k}", blend["dataset_sample_index"], samples, "dataset_sample_index"
                )

    def mock(self, rng: np.random.Generator, folder: Path) -> None:
        """Compare mock data sets."""
        settings = {"random_seed": 7, "sequence_length": 512, "tokenizer": make_tokenizer(3, 1000)}
        settings |= dict.fromkeys(OPTIONS, True)
        for split, a, b in zip(
            Split,
            build_ours(settings, [300_000, 100, None], mock=True),
            build_theirs(settings, [300_000, 100, None], folder, mock=True),
        ):
            self.dataset(f"mock data, {split.name}", a, b, rng)

    def tokenized(self, folder: Path) -> None:
        """Compare a pair that their code tokenized with tok_shards, and a run on it with a run on
        the text."""
        import tokenizers
        from megatron.core.datasets.indexed_dataset import DType
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder as Their

        texts = {name: peers.random_texts(seed) for seed, name in enumerate(("train", "val"))}
        trained = tokenizers.ByteLevelBPETokenizer()
        trained.train_from_iterator(
            texts["train"], 400, special_tokens=["<|endoftext|>"], show_progress=False
        )
        folder.mkdir()
        trained.save(str(folder / "tokenizer.json"))
        library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        eod = library.token_to_id("<|endoftext|>")
        for name, of_split in texts.items():
            (folder / "raw" / name).mkdir(parents=True)
            lines = [json.dumps({"text": text}) + "\n" for text in of_split]
            (folder / "raw" / name / "a.jsonl").write_text("".join(lines))
            builder = Their(
                str(folder / f"{name}.bin"), dtype=DType.optimal_dtype(library.get_vocab_size())
            )
            write_pair(
                builder, folder / name, [[*library.encode(text).ids, eod] for text in of_split]
            )
        flag = f"--tokenizer={folder / 'tokenizer.json'}"
        tok_shards.main(
            [
                f"--input-dir={folder / 'raw'}",
                f"--output-dir={folder / 'made'}",
                flag,
                "--num-workers=1",
                "--format=megatron",
            ]
        )
        for name, suffix in itertools.product(("train", "val"), (".bin", ".idx")):
            ours, theirs = (
                np.fromfile(prefix.with_suffix(suffix), np.uint8)
                for prefix in (folder / "made" / name / "data" / "a", folder / name)
            )
            self.same(f"tokenized {name}{suffix}", ours, theirs, "bytes")
        digests = digests_of(
            folder,
            "theirs",
            f"--data-path={folder / 'train'}",
            f"--val-path={folder / 'val'}",
            "--data-format=megatron",
            flag,
        )
        streamed = digests_of(folder, "text", f"--data-path={folder / 'raw'}", flag)
        self.same("steps of a run on their pair", streamed, digests, "digests")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--corpora", type=int, default=20, help="number of random corpora")
    parser.add_argument(
        "--seed", type=int, default=0, help="a different seed makes different corpora"
    )
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    rng, comparison = np.random.default_rng(args.seed), Comparison()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.corpora):
            place = Path(folder) / f"corpus{number}"
            place.mkdir()
            print(comparison.corpus(number, rng, place), flush=True)
        comparison.mixtures(rng)
        comparison.mock(rng, Path(folder))
        comparison.tokenized(Path(folder) / "tokenized")
    print("equal: " + ", ".join(f"{n:,} {name}" for name, n in comparison.equal.items()))
    return 0


if __name__ == "__main__":
    run_main(main)
