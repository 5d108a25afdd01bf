"""
Which files validate and which train, in words: printed by base_train, validate and tok_train before
they start.

    validates: web/0007.parquet (1,024 documents), 12.1% of all bytes
    trains: 7 files, 7,168 documents, about 9,400,000 tokens; this run reads 18,800,000, about 2.0 passes
    warning: the validation file is 12.1% of all bytes: ... --val-fraction=0.01 ...

If nothing names the validation data, it is the last file. That suits shuffled shards, and surprises
the owner of a folder of a few different files; so a split that looks like an accident gets a warning.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.common import as_path
from nanochat.dataset import known_dataset

LARGE = 0.1  # a share of all bytes above which a validation file is unusual
MOST_NAMES = 3  # files that are named one by one
FRACTION = "--val-fraction=0.01 validates on 1% of the documents of every file instead"


class DataFile(NamedTuple):
    """A data file. `name` is relative to the data path; `documents` is None if nothing counted them."""

    name: str
    num_bytes: int
    documents: int | None = None


def files_of(manifests: Mapping[str, Mapping[str, Any]]) -> list[DataFile]:
    """The files of all buckets of a run."""
    return [DataFile(file["name"], file.get("own_size", file["size"]), sum(file["groups"]))
            for manifest in manifests.values() for file in manifest["files"]]


def last_file_validates(data_path: Path | str, val_path: Path | str | None) -> bool:
    """Whether the last file validates because nothing else was named (without --val-fraction)."""
    root = as_path(data_path)
    return val_path is None and not (root / "train").is_dir() and known_dataset(root) is None


def describe_split(train: Sequence[DataFile], val: Sequence[DataFile], *, reads: str = "", shared: float = 0.0,
                   chosen: bool = False) -> list[str]:
    """The lines above. `reads`: how much of the training files the program reads. `shared`: the
    --val-fraction of a run whose files give both. `chosen`: whether the last file validates because
    nothing else was named."""
    end = f"; {reads}" if reads else ""
    if shared:
        return [f"validates: {shared:.3g} of the documents of each of {len(train):,} file(s){_documents(val, ', ')}",
                f"trains: the others{_documents(train, ', ')}{end}"]
    val_bytes, all_bytes = sum(f.num_bytes for f in val), sum(f.num_bytes for f in (*train, *val))
    share = val_bytes / max(1, all_bytes)
    lines = [f"validates: {_sum_up(val)}, {share:.1%} of all bytes", f"trains: {_sum_up(train)}{end}"]
    odd = _oddities(train, val, share) if chosen else []
    if odd:
        lines.append(f"warning: the last file validates, and {' and '.join(odd)}: name validation data with "
                     f"--val-path, or {FRACTION}")
    return lines


def _sum_up(files: Sequence[DataFile]) -> str:
    """Names, or a number, and documents."""
    if len(files) > MOST_NAMES:
        return f"{len(files):,} files{_documents(files, ', ')}"
    return ", ".join(file.name for file in files) + _documents(files, " (", ")")


def _documents(files: Sequence[DataFile], before: str, after: str = "") -> str:
    """How many documents the files have; nothing if that is unknown."""
    known = [file.documents for file in files if file.documents is not None]
    return f"{before}{sum(known):,} documents{after}" if len(known) == len(files) else ""


def _oddities(train: Sequence[DataFile], val: Sequence[DataFile], share: float) -> list[str]:
    """What suggests that the last file was not meant to validate."""
    odd = [f"it is {share:.1%} of all bytes"] if share > LARGE else []
    kinds, folders = {"".join(Path(f.name).suffixes) for f in train}, {Path(f.name).parent for f in train}
    for file in val:
        if (kind := "".join(Path(file.name).suffixes)) not in kinds:
            odd.append(f"{file.name} is {kind}, the others are {', '.join(sorted(kinds))}")
        elif Path(file.name).parent not in folders:
            odd.append(f"no training file is in its folder ({file.name})")
    return odd
