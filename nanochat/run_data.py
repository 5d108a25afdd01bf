"""
The data of a run: which files it reads, pinned when it starts, and everything needed to open its stream again.

    start    scan the files -> RUN/data_manifest.json, copy the tokenizer -> RUN/tokenizer/
    resume   compare the manifest with the disk, and the tokenizer's fingerprint with the run's
    look     `open_run` gives tokenizer, stream settings and sources from the run directory alone

One process pins or checks; the others only read what it wrote.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.common import read_json, write_json
from nanochat.order import StreamConfig
from nanochat.run_dir import read_config
from nanochat.sources import Manifest, ParquetSource, check, split_train_val
from nanochat.tokenizer import RustBPETokenizer

MANIFEST_NAME = "data_manifest.json"
BUCKET = "data"  # the name of the bucket of a run without a curriculum


@dataclass(frozen=True)
class RunData:
    """What a run's stream is made of."""

    tokenizer: RustBPETokenizer
    train: dict[str, ParquetSource]
    val: ParquetSource


def pin_data(run_dir: Path, data_path: Path | str, val_path: Path | str | None = None, *, strict: bool = False
             ) -> dict[str, Manifest]:
    """Write the run's data_manifest.json, or, where it has one, compare it with the files below the given paths.

    Raises FileNotFoundError or ValueError naming the file that is bad, changed or gone.
    """
    path = run_dir / MANIFEST_NAME
    if not path.exists():
        train, val = split_train_val(data_path, val_path, strict=strict)
        manifests = {"train": train, "val": val}
    else:
        old = read_json(path)
        roots = {"train": data_path, "val": data_path if val_path is None else val_path}
        manifests = {split: check(old[split], roots[split], strict=strict) for split in old}
        if manifests == old:
            return manifests
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(path, manifests)
    return manifests


def open_data(run_dir: Path) -> RunData:
    """The run's tokenizer and sources, from its directory alone. FileNotFoundError if it never pinned them."""
    path = run_dir / MANIFEST_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing, so this run never read any data; start it first")
    manifests = read_json(path)
    tokenizer = RustBPETokenizer.from_directory(run_dir / "tokenizer")
    return RunData(tokenizer, {BUCKET: ParquetSource(manifests["train"], tokenizer)},
                   ParquetSource(manifests["val"], tokenizer))


def stream_config(settings: Mapping[str, Any]) -> StreamConfig:
    """The stream of a run's resolved settings (config.json), by the names its flags have."""
    return StreamConfig(T=settings["max_seq_len"], V=settings["lanes"], seed=settings["seed"],
                        layout=settings["packing"], long_docs=settings["long_docs"], overlap=settings["overlap"],
                        buffer_size=settings["buffer_size"], packer_version=settings["packer_version"])


def open_run(run_dir: Path) -> tuple[RunData, StreamConfig, dict[str, Any]]:
    """(data, stream settings, resolved settings) of a run; the pinned files are compared with the disk first."""
    settings = read_config(run_dir)
    for manifest in read_json(run_dir / MANIFEST_NAME).values():
        check(manifest)
    return open_data(run_dir), stream_config(settings), settings
