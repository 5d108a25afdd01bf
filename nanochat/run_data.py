"""
The data of a run: which files it reads, pinned when it starts, and everything needed to open its
stream again.

    start    scan the files -> RUN/data_manifest.json, copy the tokenizer -> RUN/tokenizer/
    resume   compare the manifest with the disk, and the tokenizer's fingerprint with the run's
    look     `open_run` gives tokenizer, stream settings and sources from the run directory alone

One process pins or checks; the others only read what it wrote.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.common import begin_data, etag_of, fetch, get_base_dir, in_store, place, write_json
from nanochat.config import Settings
from nanochat.curriculum import Curriculum
from nanochat.dataset import split_train_val
from nanochat.order import StreamConfig
from nanochat.run_dir import read_config
from nanochat.sources import Manifest, Source, check, check_format, open_source, read_manifests, scan
from nanochat.text import as_parquet
from nanochat.tokenizer import RustBPETokenizer

MANIFEST_NAME = "data_manifest.json"
EVERYWHERE = ("each machine of a launch reads the data itself: copy or mount the same files there "
              "under the same path")


@dataclass(frozen=True)
class RunData:
    """What a run's stream is made of."""

    tokenizer: RustBPETokenizer
    train: dict[str, Source]
    val: dict[str, Source]
    manifests: Mapping[str, Mapping[str, Manifest]]


def find_data(old: Mapping[str, Mapping[str, Manifest]], data_path: Path | str, val_path: Path | str | None = None, *,
              data_format: str = "text", curriculum: Curriculum | None = None, strict: bool = False,
              shares: str | None = None) -> dict[str, dict[str, Manifest]]:
    """What a run reads: {"train": {bucket: manifest}, "val": ...}. `old`: what it has pinned
    before ({} for a new one); the files below the given paths are compared with it. `shares`:
    --split of Megatron's order; None for lanes.

    Raises FileNotFoundError or ValueError naming the file that is bad, changed or gone.
    """
    roots = {"train": place(data_path), "val": place(data_path if val_path is None else val_path)}
    if old:
        return {split: {bucket: check(manifest, roots[split], strict=strict)
                        for bucket, manifest in buckets.items()} for split, buckets in old.items()}
    if shares is not None:
        from nanochat.blend import find_prefixes

        return find_prefixes(data_path, val_path, shares)
    files = split_train_val(data_path, val_path, data_format=data_format, by_bucket=curriculum is not None)
    if curriculum is not None:
        curriculum.check_buckets(files["train"])
        files["train"] = {bucket: files["train"][bucket] for bucket in curriculum.buckets}
    for split, buckets in files.items():
        check_format(roots[split], [file for some in buckets.values() for file in some], data_format)
    return {split: {bucket: scan(roots[split], found, strict=strict) for bucket, found in buckets.items()}
            for split, buckets in files.items()}


def pinned_data(run_dir: Path) -> dict[str, dict[str, Manifest]]:
    """What a run has pinned, {} if it has nothing."""
    return read_manifests(run_dir / MANIFEST_NAME)


def pin_data(run_dir: Path, manifests: Mapping[str, Mapping[str, Manifest]]) -> None:
    """Keep what a run reads in its data_manifest.json."""
    if manifests != pinned_data(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        write_json(run_dir / MANIFEST_NAME, manifests)


def check_files(manifests: Mapping[str, Mapping[str, Manifest]]) -> None:
    """Whether this machine has the files of a run's manifests, by their sizes; rank 0 has compared
    more (`find_data`). FileNotFoundError or ValueError names the first that is missing or of
    another size."""
    for manifest in (m for buckets in manifests.values() for m in buckets.values()):
        root = place(manifest["root"])
        if in_store(root):
            root.is_dir()  # list it once
            fetch((root / e["name"]).with_suffix(".idx") for e in manifest["files"] if e["name"].endswith(".bin"))
        for entry in manifest["files"]:
            path = root / entry["name"]
            if not path.exists():
                raise FileNotFoundError(f"{path}: missing; {EVERYWHERE}")
            # jsonl is converted on each machine
            if (size := as_parquet(path).stat().st_size) != entry["size"]:
                raise ValueError(f"{path}: {size:,} bytes, the run's manifest says "
                                 f"{entry['size']:,}; {EVERYWHERE}")
            if (found := etag_of(path).get("etag")) != entry.get("etag", found):
                raise ValueError(f"{path}: it changed since this launch began (ETag "
                                 f"{entry['etag']} then, {found} now)")


def open_data(manifests: Mapping[str, Mapping[str, Manifest]], tokenizer: RustBPETokenizer, *,
              as_stored: bool = False) -> RunData:
    """The sources of a run's manifests."""
    train = {bucket: open_source(m, tokenizer, as_stored=as_stored) for bucket, m in manifests["train"].items()}
    val = {bucket: open_source(m, tokenizer) for bucket, m in manifests["val"].items()}
    return RunData(tokenizer, train, val, manifests)


def stream_config(settings: Settings) -> Any:
    """The stream of a run's resolved settings."""
    if settings.order == "megatron":
        from nanochat.blend import SampleConfig

        weights = settings.blend_weights
        return SampleConfig(T=settings.max_seq_len, V=settings.lanes, seed=settings.seed,
                            num_samples=settings.num_samples, split=settings.split or "",
                            weights=None if weights is None else tuple(weights), eod_mask_loss=settings.eod_mask_loss,
                            index_cache=str(settings.index_cache or get_base_dir() / "index_cache"))
    return StreamConfig(T=settings.max_seq_len, V=settings.lanes, seed=settings.seed, layout=settings.packing,
                        long_docs=settings.long_docs, overlap=settings.overlap, buffer_size=settings.buffer_size,
                        pack=settings.pack, packer_version=settings.packer_version, curriculum=settings.mix)


def open_run(run_dir: Path) -> tuple[RunData, Any, Settings]:
    """(data, stream settings, resolved settings) of a run, from its directory alone; the pinned
    files are compared with the disk first. FileNotFoundError if it never pinned them."""
    settings, manifests = Settings.from_json(read_config(run_dir)), pinned_data(run_dir)
    begin_data(settings.object_storage_cache)
    if not manifests:
        raise FileNotFoundError(f"{run_dir / MANIFEST_NAME}: missing, so this run never read any "
                                f"data; start it first")
    for buckets in manifests.values():
        for manifest in buckets.values():
            check(manifest)
    tokenizer, config = RustBPETokenizer.from_directory(run_dir / "tokenizer"), stream_config(settings)
    return open_data(manifests, tokenizer, as_stored=not config.framed), config, settings
