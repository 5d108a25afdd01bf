"""
Which files are data: those of a format below a folder, split for training and validation, bucket by bucket.

    text        .parquet, .jsonl, .jsonl.gz
    shards      pairs of .bin and .idx, GPTS
    megatron    pairs of .bin and .idx, Megatron's

    DIR/train/web/a.bin  DIR/train/code/b.bin  DIR/val/web/c.bin      train: web [a], code [b];  val: web [c]
    DIR/web/a.bin  DIR/web/b.bin                                      train: web [a];            val: web [b]
    PREFIX,PREFIX                                                     paths of pairs without their endings, in order

Each of these paths may be of object storage (places.py). What is hidden is not looked at. A folder that has pairs of
both formats is refused: which of them were meant nobody can tell, and to leave one kind out would make the data
silently less.
"""

import os
from pathlib import Path

from nanochat.dataset import list_parquet_files, pinned_dataset
from nanochat.indexed import pair_paths
from nanochat.pairs import open_entries, pair_format
from nanochat.places import fetch, place
from nanochat.remote import is_remote

FORMATS = {"text": (".parquet", ".jsonl", ".jsonl.gz"), "shards": (".bin",), "megatron": (".bin",)}
BUCKET = "data"  # the name of the bucket where there is only one


def find_files(path: Path | str, data_format: str = "text") -> list[Path]:
    """All files of a format below a folder in the order of their relative paths; a single file is itself. Of pairs
    also PREFIX[,PREFIX...], each a path without .bin or .idx, in the order given."""
    path = place(path)
    if path.is_file():
        return [path]
    if is_prefixes(path):
        return [_pair_at(place(prefix), data_format) for prefix in str(path).split(",")]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such data folder; download data with python -m nanochat.dataset, make "
                                f"some with python -m dev.make_sample_corpus, or point --data-path at yours")
    there = [f for f in path.rglob("*") if f.name.endswith((*FORMATS[data_format], ".idx")) and f.is_file()
             and not any(part.startswith(".") for part in f.relative_to(path).parts)]
    files = [f for f in there if f.name.endswith(FORMATS[data_format])]
    fetch(f for f in there if f.suffix == ".idx")
    if data_format != "text":
        for idx in sorted({f for f in there if f.suffix == ".idx"} - {f.with_suffix(".idx") for f in files}):
            open_entries(idx)  # raises: a lost .bin must not make the data silently less
        files = _of_format(path, files, data_format)
    if not files:
        others = {name for name in FORMATS if name != data_format and any(_is(f, name) for f in path.rglob("*"))}
        hint = f"there are files of --data-format {min(others)}" if others else "is --data-path right?"
        raise FileNotFoundError(f"{path}: no {', '.join(FORMATS[data_format])} file below it; {hint}")
    return sorted(files, key=lambda f: f.relative_to(path).as_posix())


def _is(path: Path, data_format: str) -> bool:
    return path.name.endswith(FORMATS[data_format]) and (data_format == "text" or pair_format(path) == data_format)


def _of_format(folder: Path, files: list[Path], data_format: str) -> list[Path]:
    """Pairs of a format; none where all are of another. ValueError where a folder has of both."""
    formats = {f: pair_format(f) or data_format for f in files}  # what is unknown is told when it is opened
    if len(set(formats.values())) > 1:
        one, other = (min(f for f in files if (formats[f] == data_format) == same) for same in (True, False))
        raise ValueError(f"{folder}: it mixes {data_format} ({one.name}) with {formats[other]} ({other.name}); move one"
                         f" kind elsewhere, or turn it into the other (python -m scripts.convert_shards)")
    return [f for f in files if formats[f] == data_format]


def is_prefixes(path: Path | str) -> bool:
    """Whether a --data-path names pairs by their paths without .bin and .idx, with commas between them."""
    return not place(path).exists() and ("," in str(path) or any(p.is_file() for p in pair_paths(path)))


def _pair_at(prefix: Path, data_format: str) -> Path:
    """The .bin of a prefix. FileNotFoundError or ValueError where it is no pair of the format."""
    file, idx = pair_paths(prefix)
    if data_format == "text":
        raise ValueError(f"{prefix}: the path of a pair of token files, and --data-format is text; take --data-format "
                         f"{pair_format(idx) or 'megatron'}, or name a folder of text")
    if not file.is_file() and not idx.is_file():
        raise FileNotFoundError(f"{prefix}: neither {file.name} nor {idx.name} is there; --data-path takes a folder, "
                                f"or paths without .bin and .idx with commas between them")
    if (found := pair_format(idx)) not in (None, data_format):
        raise ValueError(f"{idx}: this pair is of --data-format {found}, not {data_format}")
    return file


def data_folder(path: Path | str) -> Path:
    """What the names of files below a --data-path are relative to: itself, or the folder of a file or of prefixes."""
    path = place(path)
    if is_prefixes(path):
        folders = [place(prefix).parent for prefix in str(path).split(",")]
        if len({f.parts[0] if is_remote(f) else "" for f in folders}) > 1:
            raise ValueError(f"{path}: prefixes in several kinds of stores, or in a store and on this machine; the "
                             f"data of a run lie in one of them")
        return place(os.path.commonpath(folders))
    return path.parent if path.is_file() else path


def split_train_val(data_path: Path | str, val_path: Path | str | None = None, *, data_format: str = "text",
                    by_bucket: bool = False) -> dict[str, dict[str, list[Path]]]:
    """{"train": {bucket: files}, "val": {bucket: files}} of a data folder.

        DIR/train/BUCKET/..., DIR/val/BUCKET/...     as they lie; without `by_bucket` all of train is one bucket
        DIR/BUCKET/...                               with `by_bucket`: the last file of each bucket validates
        DIR/...                                      one bucket: the last of all files validates
        PREFIX,PREFIX                                with `by_bucket`: each is a bucket, else the same

    `val_path` names validation files in place of the last ones; each of its subfolders is a bucket of its own.
    ValueError or FileNotFoundError where files for one of the two are missing.
    """
    root = place(data_path)
    if pinned_dataset(root):
        list_parquet_files(root)  # insists on the validation shard of a known data set
    laid_out = (root / "train").is_dir()
    val = None if val_path is None else _buckets(place(val_path), data_format)
    if laid_out and val is None:
        if not (root / "val").is_dir():
            raise FileNotFoundError(f"{root}: it has train/ but no val/; name validation data with --val-path")
        val = _buckets(root / "val", data_format)
    train = _buckets(root / "train" if laid_out else root, data_format, merge=not by_bucket)
    if val is None:
        val = {bucket: files[-1:] for bucket, files in train.items() if len(files) > 1}
        if not val:
            only = next(iter(train.values()))[0].name
            raise ValueError(f"{root}: one data file only ({only}){' in each bucket' * (len(train) > 1)}, expected at "
                             f"least two (the last one is validation); add one, or name validation data with "
                             f"--val-path")
        train = {bucket: files[:-1] if len(files) > 1 else files for bucket, files in train.items()}
    return {"train": train, "val": val}


def _buckets(path: Path, data_format: str, *, merge: bool = False) -> dict[str, list[Path]]:
    """{bucket: files}: subfolders are buckets; files beside them, or all files with `merge`, are BUCKET. Of prefixes
    each is a bucket."""
    folder, prefixes = data_folder(path), is_prefixes(path)
    buckets: dict[str, list[Path]] = {}
    for file in find_files(path, data_format):
        name = file.relative_to(folder)
        bucket = name.with_suffix("").as_posix() if prefixes else name.parts[0] if len(name.parts) > 1 else BUCKET
        buckets.setdefault(BUCKET if merge else bucket, []).append(file)
    return buckets
