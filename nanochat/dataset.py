"""
Which files are data, which of them validate, and downloads of the data sets that we know: nanochat's.

    known data set --HTTP--> folder --split_train_val--> {"train": {bucket: files},
                                                          "val": {bucket: files}}

Where a file lies says whether it trains or validates, and its suffix says its format:

    DIR/train/web/a.bin  DIR/val/web/c.bin     train: web [a];  val: web [c]
    DIR/web/a.bin  DIR/web/b.bin               train: web [a];  val: web [b], the last one
    PREFIX,PREFIX                              paths of pairs without their endings, in order

Hidden files are never data. Any of these paths may lie in object storage.

A known data set is a run of parquet shards with a `text` column. Its last shard is validation and
is pinned by name: it is always fetched, and it is an error where it is missing. Taking "the last
file that is here" instead would turn a failed download into a silent change of every number
computed on validation.

    python -m nanochat.dataset -n 8 -w 4      # 8 training shards and the validation shard, 4 at a time
    python -m nanochat.dataset --verify       # read everything that is on disk, name what is broken
    python -m nanochat.dataset --eval-bundle  # the tasks of the CORE metric
"""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nanochat.cli import did_you_mean, run_main
from nanochat.common import get_base_dir, in_store, local, place, read_json
from nanochat.text import SUFFIXES, open_parquet, read_batches

log = logging.getLogger(__name__)

FORMATS = {  # suffixes by --data-format; the two kinds of .bin are told apart where they are opened
    "text": SUFFIXES,
    "shards": (".bin",),
    "megatron": (".bin",),
}
GPT_SIMPLE = {"pretokenized": "shards", "jsonl": "text"}  # its names of formats
GET_DATA = ("download some with python -m nanochat.dataset -n 8, make some of what is on this machine with python -m "
            "dev.make_sample_corpus, or point --data-path at yours")
BUCKET = "data"  # the name of the bucket where there is only one

HUB = "https://huggingface.co"
MARKER = "dataset.json"  # beside downloaded shards: which data set they are


class Dataset(NamedTuple):
    """A known data set: shards 0 to `last_shard` lie below `base_url`, and the last one validates."""

    base_url: str
    last_shard: int


DATASETS = {
    "climbmix": Dataset(f"{HUB}/datasets/karpathy/climbmix-400b-shuffle/resolve/main", 6542),
    "fineweb-edu": Dataset(f"{HUB}/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main", 1822),
}
NAME = "climbmix"  # of the one that is meant where none is named
BASE_URL, MAX_SHARD = DATASETS[NAME]  # nanochat's names; DATA_DIR is computed when it is asked for


# ---- which files are data ------------------------------------------------------------------------

def find_files(path: Path | str, data_format: str = "text") -> list[Path]:
    """All files of a format below a folder in the order of their relative paths; a single file is
    itself. Of pairs also PREFIX[,PREFIX...], see `find_prefixes`."""
    # a format that is not known here is a suffix (see `nanochat.sources.source_class`)
    path, suffixes = place(path), FORMATS.get(data_format, (f".{data_format}",))
    if data_format not in FORMATS and not (Path(__file__).parent / f"source_{data_format}.py").is_file():
        ours = GPT_SIMPLE.get(data_format)
        hint = f"; gpt-simple's {data_format} is {ours} here" if ours else did_you_mean(data_format, FORMATS)
        raise ValueError(f"--data-format: got {data_format!r}, expected {', '.join(FORMATS)}, or xyz where "
                         f"nanochat/source_xyz.py reads .xyz files{hint}")
    if path.is_file():
        if not path.name.endswith(suffixes):
            raise ValueError(f"{path}: expected a folder or a {', '.join(suffixes)} file for "
                             f"--data-format {data_format}; rename it, or take another --data-format")
        return [path]
    if data_format != "text" and (prefixes := find_prefixes(path)):
        return prefixes
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such data folder; {GET_DATA} (of a pair of token files also without "
                                f".bin, with --data-format)")
    there = [file for file in path.rglob("*") if file.is_file()
             and not any(part.startswith(".") for part in file.relative_to(path).parts)]
    there.sort(key=lambda file: file.relative_to(path).as_posix())
    files = [file for file in there if file.name.endswith(suffixes)]
    if folders := {file.parent for file in files if file.suffix == ".arrow"}:
        from nanochat.text_kinds import saved_files

        saved = {folder: saved_files(folder) for folder in folders}
        files = [file for file in files if file.suffix != ".arrow" or file.name in saved[file.parent]]
    for file in files:
        try:
            str(file).encode()
        except UnicodeEncodeError:
            raise ValueError(f"{file}: its name is not UTF-8; rename it") from None
    if data_format != "text":
        known = set(there)
        for idx in there:
            if idx.suffix == ".idx" and idx.with_suffix(".bin") not in known:  # must not make the data silently less
                raise FileNotFoundError(f"{idx.with_suffix('.bin')}: not there, but {idx.name} needs it; bring it "
                                        f"back, or delete {idx.name} and rerun scripts.tok_shards")
    if not files:
        others = [name for name, some in FORMATS.items() if any(file.name.endswith(some) for file in there)]
        hint = f"there are files of --data-format {' or '.join(others)}" if others else "is --data-path right?"
        raise FileNotFoundError(f"{path}: no {', '.join(suffixes)} file below it; {hint}")
    return files


def split_weights(data_path: str) -> tuple[str, list[float] | None]:
    """(prefixes with commas between them, their weights) of Megatron's own list, which has a weight
    before each prefix, as 70,web,30,code; (the path itself, None) of any other --data-path."""
    parts = data_path.split(",")
    weighted = len(parts) % 2 == 0 and all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", part) for part in parts[::2])
    if not weighted or place(data_path).exists():
        return data_path, None
    return ",".join(parts[1::2]), [float(part) for part in parts[::2]]


def find_prefixes(path: Path | str) -> list[Path]:
    """The .bin files of pairs that a --data-path names by their paths without .bin and .idx, with
    commas between them, in the order given; [] for any other path. FileNotFoundError for a pair
    that is not there; ValueError for weights before them, which --order=megatron alone has."""
    parts = str(path).split(",")
    if place(path).exists():
        return []
    if split_weights(str(path))[1] is not None:
        raise ValueError(f"--data-path: got {path}, with a weight before each prefix, which "
                         f"--order=lanes does not use; add --order=megatron, or write "
                         f"--data-path={','.join(parts[1::2])}")
    if len({part.partition(":")[0] if in_store(part) else "" for part in parts}) > 1:
        raise ValueError(f"{path}: prefixes in several kinds of stores, or in a store and on "
                         f"this machine; the data of a run lie in one of them")
    files = [place(f"{place(part)}.bin") for part in parts]
    for prefix, file in zip(parts, files):
        if not file.is_file() and not file.with_suffix(".idx").is_file():
            if len(parts) == 1:
                return []
            raise FileNotFoundError(f"{prefix}: neither {file.name} nor its .idx is there; --data-path takes "
                                    f"a folder, or paths without .bin and .idx with commas between them")
    return files


def data_folder(path: Path | str) -> Path:
    """What the names of files below a --data-path are relative to: itself, or the folder of a file
    or of prefixes."""
    path = place(path)
    if prefixes := find_prefixes(path):
        return place(os.path.commonpath([file.parent for file in prefixes]))
    return path.parent if path.is_file() else path


def split_train_val(data_path: Path | str, val_path: Path | str | None = None, *, data_format: str = "text",
                    by_bucket: bool = False, shared: bool = False) -> dict[str, dict[str, list[Path]]]:
    """{"train": {bucket: files}, "val": {bucket: files}} of a data folder.

        DIR/train/BUCKET/..., DIR/val/BUCKET/...     as they lie; without `by_bucket` train is one bucket
        DIR/BUCKET/...                               with `by_bucket`: the last file of each bucket validates
        DIR/...                                      one bucket: the last of all files validates
        PREFIX,PREFIX                                with `by_bucket`: each is a bucket, else the same

    `val_path` names validation files in place of the last ones; each of its subfolders is a bucket
    of its own. `shared`: with --val-fraction both are made of all files. ValueError or
    FileNotFoundError where files for one of the two are missing.
    """
    root = place(data_path)
    if shared:
        if val_path is not None or (root / "train").is_dir():
            raise ValueError(f"--val-fraction: the validation files have a place of their own "
                             f"({root / 'val' if val_path is None else val_path}); leave out one of the two")
        files = find_buckets(root, data_format, merge=not by_bucket)
        return {"train": files, "val": files}
    if known_dataset(root):
        list_parquet_files(root)  # insists on the validation shard
    laid_out = (root / "train").is_dir()
    if laid_out and val_path is None:
        val_path = root / "val"
        if not val_path.is_dir():
            raise FileNotFoundError(f"{root}: it has train/ but no val/; name validation data "
                                    f"with --val-path")
    train = find_buckets(root / "train" if laid_out else root, data_format, merge=not by_bucket)
    if val_path is not None:
        return {"train": train, "val": find_buckets(place(val_path), data_format)}
    val = {bucket: files[-1:] for bucket, files in train.items() if len(files) > 1}
    if not val:
        only = next(iter(train.values()))[0].name
        raise ValueError(f"{root}: one data file only "
                         f"({only}){' in each bucket' * (len(train) > 1)}, expected at least two "
                         f"(the last one is validation); add one, name validation data with "
                         f"--val-path, or share out its documents with --val-fraction=0.01")
    return {"train": {bucket: files[:-1] if bucket in val else files for bucket, files in train.items()},
            "val": val}


def find_buckets(path: Path, data_format: str = "text", *, merge: bool = False) -> dict[str, list[Path]]:
    """{bucket: files}: subfolders are buckets; files beside them, or all files with `merge`, are
    BUCKET. Of prefixes each is a bucket."""
    folder, prefixes = data_folder(path), find_prefixes(path)
    buckets: dict[str, list[Path]] = {}
    for file in find_files(path, data_format):
        name = file.relative_to(folder)
        if merge:
            bucket = BUCKET
        elif prefixes:
            bucket = name.with_suffix("").as_posix()
        else:
            bucket = name.parts[0] if len(name.parts) > 1 else BUCKET
        buckets.setdefault(bucket, []).append(file)
    return buckets


# ---- known data sets -----------------------------------------------------------------------------

def index_to_filename(index: int) -> str:
    """The name of shard `index`."""
    return f"shard_{index:05d}.parquet"


def default_data_dir(name: str = NAME) -> Path:
    """Where a known data set is, or is downloaded to: data/NAME, or where nanochat's own downloads
    are."""
    ours, theirs = get_base_dir() / "data" / name, get_base_dir() / f"base_data_{name}"
    return theirs if theirs.is_dir() and not ours.is_dir() else ours


if not TYPE_CHECKING:
    def __getattr__(name: str) -> str:
        """DATA_DIR, nanochat's name for `default_data_dir()`."""
        if name != "DATA_DIR":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return str(default_data_dir())


def known_dataset(data_dir: Path | str) -> str | None:
    """The name of the data set whose downloaded shards a folder holds, by the marker that the
    downloader left there or by its place; None for any other folder, in which simply the last file
    is validation."""
    folder = place(data_dir)
    if not (folder / MARKER).exists():
        return next((name for name in DATASETS if folder.resolve() == default_data_dir(name).resolve()), None)
    name = read_json(local(folder / MARKER), {"name": str})["name"]
    if name not in DATASETS:
        raise ValueError(f"{folder / MARKER}: got the data set {name[:80]!r}, expected {' or '.join(DATASETS)}")
    return name


def list_parquet_files(data_dir: Path | str | None = None) -> list[str]:
    """Full paths of the parquet files below a folder (default: the download's) in the order of
    their relative paths; the last one is validation. FileNotFoundError where there is none, or
    where the folder holds a download without its validation shard; ValueError where that shard
    would not be the last."""
    root = place(data_dir) if data_dir is not None else default_data_dir()
    files = [file for file in find_files(root) if file.suffix == ".parquet"]
    if not files:
        raise FileNotFoundError(f"{root}: no .parquet file below it; is this the right folder?")
    if name := known_dataset(root):
        pinned = index_to_filename(DATASETS[name].last_shard)
        if root / pinned not in files:
            raise FileNotFoundError(f"{root}: {name}'s validation shard {pinned} is missing, {len(files)} other files "
                                    f"are there; run `python -m nanochat.dataset --dataset={name} -n 8 "
                                    f"--data-dir={root}`")
        if files[-1] != root / pinned:
            raise ValueError(f"{root}: the last file is {files[-1].relative_to(root)}, expected {name}'s validation "
                             f"shard {pinned}; move what is not {name} elsewhere")
    return [str(file) for file in files]


def parquets_iter_batched(split: str, start: int = 0, step: int = 1, *,
                          data_dir: Path | str | None = None) -> Iterator[list[str]]:
    """Yield the texts of one row group after another: of all files but the last for "train", of
    the last for "val". Rank r of W passes start=r, step=W and gets row groups r, r + W, ... of
    each file."""
    if split not in ("train", "val"):
        raise ValueError(f"split: got {split!r}, expected 'train' or 'val'")
    paths = list_parquet_files(data_dir)
    if len(paths) < 2:
        raise ValueError(f"{paths[0]}: the only file here, expected at least 2 (the last one is "
                         f"validation); add one")
    for path in paths[:-1] if split == "train" else paths[-1:]:
        with open_parquet(path) as file:
            for group in range(start, file.num_row_groups, step):
                yield [text for column in read_batches(file, group, path) for text in column.to_pylist()]


# ---- downloads, behind a door: nobody who trains loads an HTTP library ---------------------------

def download_single_file(index: int) -> bool:
    """Fetch one shard of climbmix unless it is here; True when it is. The reason for a False is
    logged."""
    from nanochat.download import make_downloader

    try:
        make_downloader().fetch(index)
    except OSError as e:
        log.error("%s: %s", index_to_filename(index), e)
        return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Download or verify (`download.main`)."""
    from nanochat import download

    download.main(argv)


if __name__ == "__main__":
    run_main(main)
