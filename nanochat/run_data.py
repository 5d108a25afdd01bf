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

from nanochat.common import as_path, begin_launch
from nanochat.config import Settings
from nanochat.dataset import split_train_val
from nanochat.order import StreamConfig
from nanochat.run_dir import read_config
from nanochat.sources import Manifest, Source, check, check_format, open_source, read_manifests, scan
from nanochat.text import Reading
from nanochat.tokenizer import Tokenizer, get_tokenizer

MANIFEST_NAME = "data_manifest.json"


@dataclass(frozen=True)
class RunData:
    """What a run's stream is made of."""

    tokenizer: Tokenizer
    train: dict[str, Source]
    val: dict[str, Source]
    manifests: Mapping[str, Mapping[str, Manifest]]


def find_manifests(pinned: Mapping[str, Mapping[str, Manifest]], settings: Settings) -> dict[str, dict[str, Manifest]]:
    """What a run reads: {"train": {bucket: manifest}, "val": ...}. Where it has pinned its files
    before, those below the paths in the settings are compared with them; {} for a new run.
    FileNotFoundError or ValueError names the file that is bad, changed or gone."""
    data_path, val_path = settings.data_path or "", settings.val_path
    roots = {"train": as_path(data_path), "val": as_path(data_path if val_path is None else val_path)}
    if pinned:
        return check_files(pinned, roots, strict=settings.strict)
    if settings.order == "megatron":
        from nanochat.integrations.megatron_order import find_pairs

        return find_pairs(data_path, val_path, settings.split or "")
    mix = settings.mix
    files = split_train_val(data_path, val_path, data_format=settings.data_format, by_bucket=mix is not None,
                            shared=settings.val_fraction > 0)
    if mix is not None:
        mix.check_buckets(files["train"])
        files["train"] = {bucket: files["train"][bucket] for bucket in mix.buckets}
    for split, buckets in files.items():
        check_format(roots[split], [file for some in buckets.values() for file in some], settings.data_format)
    values = settings.to_json()
    return {split: {bucket: scan(roots[split], found, reading=Reading.of(values, split))
                    for bucket, found in buckets.items()} for split, buckets in files.items()}


def pinned_data(run_dir: Path) -> dict[str, dict[str, Manifest]]:
    """What a run has pinned, {} if it has nothing."""
    return read_manifests(run_dir / MANIFEST_NAME)


def check_files(manifests: Mapping[str, Mapping[str, Manifest]], roots: Mapping[str, Path] | None = None,
                **how: bool) -> dict[str, dict[str, Manifest]]:
    """A run's manifests, compared with the files of this machine (below other roots, if given).
    FileNotFoundError or ValueError names the first that is missing or another. `how`: see
    `sources.check`."""
    return {split: {bucket: check(manifest, roots[split] if roots else None, **how)
                    for bucket, manifest in buckets.items()} for split, buckets in manifests.items()}


def open_data(manifests: Mapping[str, Mapping[str, Manifest]], tokenizer: Tokenizer, *,
              as_stored: bool = False) -> RunData:
    """The sources of a run's manifests."""
    train = {bucket: open_source(m, tokenizer, as_stored=as_stored) for bucket, m in manifests["train"].items()}
    val = {bucket: open_source(m, tokenizer) for bucket, m in manifests["val"].items()}
    return RunData(tokenizer, train, val, manifests)


def stream_config(settings: Settings) -> Any:
    """The stream of a run's resolved settings."""
    if settings.order == "megatron":
        from nanochat.integrations.megatron_order import SampleConfig

        return SampleConfig.of(settings)
    return StreamConfig(T=settings.max_seq_len, V=settings.lanes, seed=settings.seed, layout=settings.packing,
                        long_docs=settings.long_docs, overlap=settings.overlap, buffer_size=settings.buffer_size,
                        pack=settings.pack, packer_version=settings.packer_version, curriculum=settings.mix)


def open_run(run_dir: Path) -> tuple[RunData, Any, Settings]:
    """(data, stream settings, resolved settings) of a run, from its directory alone; the pinned
    files are compared with the disk first. FileNotFoundError if it never pinned them."""
    settings, manifests = Settings.from_json(read_config(run_dir)), pinned_data(run_dir)
    begin_launch(settings.object_storage_cache)
    if not manifests:
        raise FileNotFoundError(f"{run_dir / MANIFEST_NAME}: missing, so this run never read any "
                                f"data; start it first")
    check_files(manifests)
    tokenizer, config = get_tokenizer(run_dir / "tokenizer"), stream_config(settings)
    return open_data(manifests, tokenizer, as_stored=not config.framed), config, settings
