"""
Which files are used for training and for validation, and how a run pins them; nanochat's data sets.

    settings --split_train_val--> {"train": {bucket: [paths]},     --scan, each-->  {"train": {bucket: manifest},
                                   "val":   {bucket: [paths]}}                       "val":   {bucket: manifest}}
                 `pin_files` does both when a run starts, for RUN/data_manifest.json
                 `check_files` compares that file with the disk when the run resumes

A file's path decides whether it is used for training or validation, and --data-format decides which suffixes are read:

    DIR/train/web/a.bin  DIR/val/web/c.bin     train: web [a];  val: web [c]. Also valid/, validation/, dev/
    DIR/train-0.parquet  DIR/val-0.parquet     as the names say. What is for testing, by name or folder, is not used
    DIR/web/a.bin  DIR/web/b.bin               train: web [a];  val: web [b], the last one
    PREFIX,PREFIX                              token files listed without their suffixes, in order

nanochat/data_files.py finds the files and reads their names. Files without documents are skipped with a warning. All of
these paths may be in object storage.

**Pinned files.** A run must always see the same files. For each file, the manifest of a bucket holds its relative name,
its size, a hash of its footer, the sizes of its groups and, for an object, its ETag. If a file has changed or vanished,
an error names it. Files that arrive later are not in the manifest, so the stream ignores them. Hashing whole files at
each start would take hours on large data sets. The footer holds offsets, sizes and statistics of every column chunk, so
a rewritten parquet file has a different footer. ETags are compared only if the root is the same, because a different
storage service gives the same bytes a different ETag.

**Known data sets.** The last shard of the data set is used for validation: it is always downloaded, and it is an error
if it is missing. Otherwise a failed download would silently change all validation results.

    python -m nanochat.dataset -n 8 -w 4      # 8 training shards and the validation shard, 4 at a time
    python -m nanochat.dataset --verify       # read everything on disk and name corrupt files
    python -m nanochat.dataset --eval-bundle  # the tasks of the CORE metric
"""

import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from nanochat.cli import run_main
from nanochat.common import (
    as_path,
    check_shape,
    counted,
    each,
    etag_of,
    get_base_dir,
    hash_bytes,
    hash_json,
    local_copy,
    make_local_copies,
    read_json,
)
from nanochat.data_files import (
    FORMATS,
    data_folder,
    drop_empty,
    exists,
    find_files,
    find_splits,
    group_by_bucket,
    is_folder,
    last_of,
    stated_splits,
    val_folders,
)
from nanochat.text import (
    ALL,
    Selection,
    as_parquet,
    is_blank,
    open_footer,
    open_parquet,
    read_batches,
    text_suffix,
    text_tokens,
)

if TYPE_CHECKING:
    from nanochat.curriculum import Curriculum

log = logging.getLogger(__name__)

Manifest = dict[str, Any]  # has the shape PINNED; the files may move to another "root"
Manifests = dict[str, dict[str, Manifest]]  # {"train": {bucket: manifest}, "val": {bucket: manifest}}
PINNED = {"root": str, "files": [{"name": str, "size": int, "footer": str, "groups": [int]}]}
DATA_MANIFEST = "data_manifest.json"  # in the run directory

HUB = "https://huggingface.co"
MARKER = "dataset.json"  # names the data set of the downloaded shards beside it


class Dataset(NamedTuple):
    """A known data set: `base_url` has shards 0 to `last_shard`, the last one for validation."""

    base_url: str
    last_shard: int


DATASETS = {
    "climbmix": Dataset(f"{HUB}/datasets/karpathy/climbmix-400b-shuffle/resolve/main", 6542),
    "fineweb-edu": Dataset(f"{HUB}/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main", 1822),
}
NAME = "climbmix"  # the default
BASE_URL, MAX_SHARD = DATASETS[NAME]  # karpathy/nanochat's names; DATA_DIR is computed on access


# ---- which files are for training, and which for validation --------------------------------------

def reader_class(name: str) -> Any:
    """The subclass of `nanochat.sources.Source` that pins and reads a file that is not text: `TokenSource` for .bin,
    and for another suffix the class `FileSource` in nanochat/source_SUFFIX.py. ValueError if that module does not
    exist."""
    if name.endswith(".bin"):
        from nanochat.tokens import TokenSource

        return TokenSource
    suffix = Path(name).suffix[1:]
    try:
        return importlib.import_module(f"nanochat.source_{suffix}").FileSource
    except ModuleNotFoundError as e:
        raise ValueError(f"{name}: no source reads .{suffix} files; write nanochat/source_{suffix}.py") from e


def split_train_val(data_path: Path | str, val_path: Path | str | None = None, *, data_format: str = "text",
                    by_bucket: bool = False, shared: bool = False) -> dict[str, dict[str, list[Path]]]:
    """{"train": {bucket: files}, "val": {bucket: files}} for a --data-path.

        DIR/train/BUCKET/..., DIR/val/BUCKET/...     as they are; without `by_bucket` train is one bucket
        DIR/train-0.parquet, DIR/validation.parquet  as their names say
        DIR/BUCKET/...                               with `by_bucket`: the last file of each bucket is for validation
        DIR/...                                      one bucket: the last of all files is for validation
        PREFIX,PREFIX                                with `by_bucket`, each is a bucket; otherwise one bucket

    `val_path` names the validation files; each of its subfolders is a bucket. `shared`: all files are in both splits,
    for --val-fraction. ValueError or FileNotFoundError if a split has no files.
    """
    root = as_path(data_path)
    has_train = is_folder(root / "train")
    if not shared and known_dataset(root):
        list_parquet_files(root)  # raises if the validation shard is missing
    if has_train and not shared and val_path is None:
        folders = val_folders(root)
        if not folders:
            test = " (test/ is used for neither)" if is_folder(root / "test") else ""
            raise FileNotFoundError(f"{root}: it has train/ but no val/{test}; name validation data with --val-path, "
                                    f"or divide the documents of train/ with --val-fraction=0.01")
        if len(folders) > 1:
            raise ValueError(f"{root}: it has {' and '.join(f'{folder.name}/' for folder in folders)}; name the one to "
                             f"use for validation with --val-path")
    train, val, _ = find_splits(root, data_format, by_bucket=by_bucket)
    if shared:
        named = val_path or next((files[0] for files in val.values()), None)
        if named is not None:
            raise ValueError(f"--val-fraction: the data already has validation files ({named}); remove one of the two")
        return {"train": train, "val": train}
    if val_path is not None:
        return {"train": train, "val": _val_files(as_path(val_path), data_format)}
    if not has_train:
        last = {bucket: file for bucket, files in train.items()
                if bucket not in val and (file := last_of(files)) is not None}
        if not val and not last:
            raise ValueError(f"{root}: {_too_few(train)}; add one, name validation data with --val-path, or divide its "
                             f"documents with --val-fraction=0.01")
        if by_bucket or not val:
            val = {bucket: [last[bucket]] if bucket in last else val[bucket] for bucket in [*train, *val]
                   if bucket in last or bucket in val}
            train = {bucket: [file for file in files if file != last.get(bucket)] for bucket, files in train.items()}
    return {"train": train, "val": val}


def _too_few(train: Mapping[str, Sequence[Path]]) -> str:
    """Why no file of the training data can validate."""
    files = next(iter(train.values()))
    other = next((file for file in files if text_suffix(file.name) != ".txt"), files[0])
    beside = " beside .txt files" if len(files) > 1 else ""
    each_of = " in each bucket" if len(train) > 1 else ""
    return (f"only one data file ({other.name}){beside}{each_of}, expected at least two (the last one is used for "
            f"validation)")


def _val_files(path: Path, data_format: str) -> dict[str, list[Path]]:
    """{bucket: files} of a --val-path: files whose names say that they are for training or testing, beside files for
    validation, are not used."""
    if not is_folder(path):
        return group_by_bucket(drop_empty(path, find_files(path, data_format)), path)
    splits = find_splits(path, data_format, by_bucket=True)
    return splits.val or splits.train


def last_file_validates(data_path: Path | str, val_path: Path | str | None) -> bool:
    """Whether, without --val-fraction and names that state a split, the last file is used for validation, because
    nothing names validation data."""
    root = as_path(data_path)
    return val_path is None and not is_folder(root / "train") and known_dataset(root) is None


class DataFile(NamedTuple):
    """A file for `describe_split`. `name` is relative to the data path. `documents` is None if unknown."""

    name: str
    num_bytes: int
    documents: int | None = None


def files_of(manifests: Mapping[str, Manifest]) -> list[DataFile]:
    """The files of all buckets of a split."""
    return [DataFile(file["name"], file.get("own_size", file["size"]), sum(file["groups"]))
            for manifest in manifests.values() for file in manifest["files"]]


def describe_split(train: Sequence[DataFile], val: Sequence[DataFile], *, reads: str = "", shared: float = 0.0,
                   chosen: bool = False) -> list[str]:
    """Lines about which files are for validation and for training, and a warning if the split looks accidental.

        validation: web/0007.parquet (1,024 documents), 12.1% of all bytes
        training: 7 files, 7,168 documents; this run trains on 18,800,000 tokens

    `reads`: how much of the training files the program reads. `shared`: the --val-fraction. `chosen`: whether
    the last file was taken by default, which suits shuffled shards but is a surprise in a folder of different files.
    """
    def documents(files: Sequence[DataFile], before: str, after: str = "") -> str:
        known = [file.documents for file in files if file.documents is not None]
        return f"{before}{counted(sum(known), 'document')}{after}" if len(known) == len(files) else ""

    def summary(files: Sequence[DataFile]) -> str:
        if len(files) > 3:
            return f"{len(files):,} files{documents(files, ', ')}"
        return ", ".join(file.name for file in files) + documents(files, " (", ")")

    end = f"; {reads}" if reads else ""
    if shared:
        files = counted(len(train), "file")
        return [f"validation: {shared:.3g} of each file ({files}){documents(val, ', ')}",
                f"training: the rest{documents(train, ', ')}{end}"]
    val_bytes, all_bytes = sum(f.num_bytes for f in val), sum(f.num_bytes for f in (*train, *val))
    share = val_bytes / max(1, all_bytes)
    lines = [f"validation: {summary(val)}, {share:.1%} of all bytes", f"training: {summary(train)}{end}"]
    odd = [f"it is {share:.1%} of all bytes"] if share > 0.1 else []
    odd += ["it is a single document"] if [file.documents for file in val] == [1] else []
    kinds, folders = {"".join(Path(f.name).suffixes) for f in train}, {Path(f.name).parent for f in train}
    for file in val:
        if (kind := "".join(Path(file.name).suffixes)) not in kinds:
            odd.append(f"{file.name} is {kind}, the others are {', '.join(sorted(kinds))}")
        elif Path(file.name).parent not in folders:
            odd.append(f"no training file is in its folder ({file.name})")
    stated = stated_splits([PurePosixPath(file.name) for file in (*train, *val)]) if odd and chosen else {}
    if odd and chosen and "val" not in stated.values():
        lines.append(f"warning: the last file is used for validation, but {', and '.join(odd)}; name validation data "
                     f"with --val-path, or use 5% of the documents of every file with --val-fraction=0.05")
    return lines


# ---- pins ----------------------------------------------------------------------------------------

def pin_files(data_path: Path | str, val_path: Path | str | None = None, *, data_format: str = "text",
              mix: "Curriculum | None" = None, selection: Selection = ALL) -> Manifests:
    """Find and pin the files of a new run. `mix`: a curriculum, whose buckets stay separate. FileNotFoundError or
    ValueError names the file that is missing or corrupt."""
    files = split_train_val(data_path, val_path, data_format=data_format, by_bucket=mix is not None,
                            shared=selection.val_fraction > 0)
    if mix is not None:
        mix.check_buckets(files["train"])
        files["train"] = {bucket: files["train"][bucket] for bucket in mix.buckets}
    roots = {"train": data_path, "val": data_path if val_path is None else val_path}
    if ".bin" in FORMATS.get(data_format, ()):
        from nanochat.tokens import check_format

        for split, buckets in files.items():
            check_format(roots[split], [file for some in buckets.values() for file in some], data_format)
    return {split: {bucket: scan(roots[split], paths, selection=selection.for_split(split))
                    for bucket, paths in buckets.items()} for split, buckets in files.items()}


def scan(root: Path | str, files: Sequence[Path] | None = None, *, selection: Selection = ALL) -> Manifest:
    """The manifest of some files (default: all) below `root`. ValueError or FileNotFoundError for the first file that
    cannot be read."""
    folder = data_folder(root)
    files = find_files(root) if files is None else files
    pins = list(each(lambda file: pin(file, file.relative_to(folder).as_posix(), selection), files))
    _warn_of_nulls(files)
    if all(text_suffix(file.name) and is_blank(as_parquet(file, selection), selection.text_field)
           for file in files):
        part = f"the {selection.part} part of the data" if selection.part else "this data"
        raise ValueError(f"{files[0]}: {part} ({counted(len(files), 'file')}) contains only empty documents; choose "
                         f"other data with --data-path and --val-path, or another --text-field")
    return {"root": str(folder.resolve()), "files": pins, **selection.named()}


def pin(path: Path, name: str, selection: Selection) -> dict[str, Any]:
    """A file's entry in a manifest. If the file is converted to parquet, the entry describes the parquet file, except
    for "own_size", which is for reports."""
    if not text_suffix(name):
        return reader_class(name).scan_file(path, name, selection.text_field)
    parquet, footer = open_footer(path, selection)
    own_size = {} if parquet == path else {"own_size": path.stat().st_size}
    return {"name": name, "size": parquet.stat().st_size, "footer": hash_bytes(footer.raw), "groups": footer.counts,
            "tokens": text_tokens(footer.text_bytes, sum(footer.counts)), **etag_of(parquet), **own_size}


def read_manifests(path: Path) -> Manifests:
    """The manifests in a run's data_manifest.json; {} if the file does not exist. ValueError if it is corrupt."""
    if not path.exists():
        return {}
    remedy = "restore the file, or start a new run (--model-tag)"
    manifests = read_json(path, {"train": dict, "val": dict}, remedy=remedy)
    for split in ("train", "val"):
        check_shape(manifests[split], dict.fromkeys(manifests[split], PINNED), f"{path}: {split}")
        for manifest in manifests[split].values():
            if not manifest["files"]:
                raise ValueError(f"{path}: {split}: a bucket has no files; {remedy}")
            counts = {entry["name"]: sum(entry["groups"]) for entry in manifest["files"]}
            listed = {name: rows for name, rows in manifest.get("without", {}).items() if rows is not None}
            check_shape(listed, {name: [int] for name in listed}, f"{path}: {split}: without")
            if any(not 0 <= row < counts.get(name, 0) for name, rows in listed.items() for row in rows):
                raise ValueError(f"{path}: {split}: `without` lists a document that does not exist; {remedy}")
    return manifests


def leave_out(buckets: Mapping[str, Manifest], list_path: Path | str) -> dict[str, Manifest]:
    """Turn off the targets of the documents that a text file lists: the training manifests get "without": {file:
    numbers of documents}, where None means all of them. Blank lines and lines that begin with # are skipped. ValueError
    names a line without a valid document."""
    counts = {(bucket, entry["name"]): sum(entry["groups"])
              for bucket, manifest in buckets.items() for entry in manifest["files"]}
    listed: dict[tuple[str, str], set[int] | None] = {}
    for number, line in enumerate(as_path(list_path).read_text().splitlines(), start=1):
        if not (line := line.strip()) or line.startswith("#"):
            continue
        name, _, row = line.rpartition(":")
        where = f"{list_path}: line {number}: {line}"
        place = next((place for place in counts if place[1] == name), None)  # in the first bucket with such a file
        if place is None or not (row == "*" or row.isdecimal()):
            raise ValueError(f"{where}: expected FILE:DOC or FILE:*, where FILE is a training file such as "
                             f"{next(iter(counts))[1]}, and DOC counts its documents from 0")
        if row == "*":
            listed[place] = None
            continue
        if int(row) >= counts[place]:
            raise ValueError(f"{where}: the file has documents 0 to {counts[place] - 1}; name one of them")
        rows = listed.setdefault(place, set())
        if rows is not None:
            rows.add(int(row))
    reduced: dict[str, Manifest] = {}
    for bucket, manifest in buckets.items():
        without = {name: None if rows is None else sorted(rows)
                   for (of_bucket, name), rows in listed.items() if of_bucket == bucket}
        reduced[bucket] = {**manifest, "without": without} if without else dict(manifest)
    return reduced


def fingerprint(manifest: Manifest) -> str:
    """A hash of the contents of a manifest's files, independent of their location."""
    pins = [[e["size"], e["footer"], e["groups"], e.get("tokens")] for e in manifest["files"]]
    return hash_json(pins + Selection.of(manifest).hashed())


def check_files(manifests: Mapping[str, Mapping[str, Manifest]], data_path: Path | str | None = None,
                val_path: Path | str | None = None, *, strict: bool = False) -> Manifests:
    """Compare a run's manifests with the files on this machine (below other paths, if given); see `check`."""
    roots = {"train": data_path, "val": val_path or data_path}
    return {split: {bucket: check(manifest, roots[split], strict=strict) for bucket, manifest in buckets.items()}
            for split, buckets in manifests.items()}


def check(manifest: Manifest, root: Path | str | None = None, *, strict: bool = False) -> Manifest:
    """Compare a manifest with the disk (under another root, if given), and return it with the root in use.
    FileNotFoundError or ValueError names the first file that is gone, has changed or, if `strict`, has a broken
    line."""
    folder = data_folder(root or manifest["root"])
    new_root = str(folder.resolve())
    compared = ("size", "footer", "groups", "tokens", *(["etag"] if new_root == manifest["root"] else []))

    def compare(old: dict[str, Any]) -> dict[str, Any]:
        """The entry of a file in its present state."""
        path = folder / old["name"]
        if not path.exists():
            began = "" if new_root == manifest["root"] else f" (when the run began, the data was in {manifest['root']})"
            raise FileNotFoundError(f"{path}: this run reads it, but it does not exist{began}; restore it, name its "
                                    f"folder with --data-path, or start a new run with other data (--model-tag)")
        if "etag" in compared and path.suffix == ".parquet" and etag_of(path) == {"etag": old.get("etag")}:
            return old  # the object has not changed, so neither has its footer
        new = pin(path, old["name"], Selection.of({**manifest, "strict": strict}))
        sampled = {"blocks"} & old.keys() & new.keys()  # older runs and object storage have none
        for key in (*compared, *sampled):
            if old.get(key) != new.get(key):
                what = "hash" if key == "footer" else key
                raise ValueError(f"{path}: it has changed since this run began ({what}: {old.get(key)} then, "
                                 f"{new.get(key)} now); restore the old file, or start a new run (--model-tag)")
        return new

    folder.is_dir()  # in object storage: one listing instead of a request per file
    make_local_copies((folder / e["name"]).with_suffix(".idx") for e in manifest["files"] if e["name"].endswith(".bin"))
    entries = list(each(compare, manifest["files"]))
    _warn_of_nulls([folder / entry["name"] for entry in entries if "own_size" in entry])
    return {**manifest, "root": new_root, "files": entries}


def _warn_of_nulls(files: Sequence[Path]) -> None:
    """`nanochat.text_kinds.warn_of_nulls`, unless no file is text."""
    if any(text_suffix(file.name) for file in files):
        from nanochat.text_kinds import warn_of_nulls

        warn_of_nulls()


# ---- known data sets -----------------------------------------------------------------------------

def index_to_filename(index: int) -> str:
    """The file name of shard `index`."""
    return f"shard_{index:05d}.parquet"


def default_data_dir(name: str = NAME) -> Path:
    """The folder of a known data set: data/NAME, or the folder of karpathy/nanochat if only that exists."""
    ours, theirs = get_base_dir() / "data" / name, get_base_dir() / f"base_data_{name}"
    return theirs if theirs.is_dir() and not ours.is_dir() else ours


def default_data_path() -> Path:
    """The data of a command without --data-path: the folder of the default data set or, if only that exists,
    karpathy/nanochat's older folder base_data, which has fineweb-edu and uses its last file for validation."""
    folder, older = default_data_dir(), get_base_dir() / "base_data"
    if folder.is_dir() or not older.is_dir():
        return folder
    log.info("%s: does not exist, so nanochat's older folder is used: %s", folder, older)
    return older


if not TYPE_CHECKING:
    def __getattr__(name: str) -> str:
        """DATA_DIR, nanochat's name for `default_data_dir()`."""
        if name != "DATA_DIR":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return str(default_data_dir())


def known_dataset(data_dir: Path | str) -> str | None:
    """The name of the data set in a download folder, according to the downloader's marker or the path. None for any
    other folder, whose last file is used for validation."""
    folder = as_path(data_dir)
    if not exists(folder / MARKER):
        return next((name for name in DATASETS if folder.resolve() == default_data_dir(name).resolve()), None)
    name = read_json(local_copy(folder / MARKER), {"name": str})["name"]
    if name not in DATASETS:
        raise ValueError(f"{folder / MARKER}: got the data set {name[:80]!r}, expected {' or '.join(DATASETS)}; "
                         f"delete the file")
    return name


def list_parquet_files(data_dir: Path | str | None = None) -> list[str]:
    """Full paths of the parquet files below a folder (default: `default_data_path()`), in the order of their relative
    paths. The last one is for validation. FileNotFoundError if there are none, or if a download lacks its validation
    shard; ValueError if that shard is not the last file."""
    root = as_path(data_dir) if data_dir is not None else default_data_path()
    files = [file for file in find_files(root) if file.suffix == ".parquet"]
    if not files:
        raise FileNotFoundError(f"{root}: no .parquet file below it; name another folder")
    if name := known_dataset(root):
        pinned = index_to_filename(DATASETS[name].last_shard)
        if root / pinned not in files:
            raise FileNotFoundError(f"{root}: {name}'s validation shard {pinned} is missing ({len(files)} other "
                                    f"files found); run `python -m nanochat.dataset --dataset={name} -n 8 "
                                    f"--data-dir={root}`")
        if files[-1] != root / pinned:
            raise ValueError(f"{root}: the last file is {files[-1].relative_to(root)}, expected {name}'s validation "
                             f"shard {pinned}; move other files elsewhere")
    return [str(file) for file in files]


def parquets_iter_batched(split: str, start: int = 0, step: int = 1, *,
                          data_dir: Path | str | None = None) -> Iterator[list[str]]:
    """Yield the texts of each row group: of all files except the last for "train", of the last one for "val". Rank r of
    W passes start=r, step=W and gets row groups r, r + W, ... of each file."""
    if split not in ("train", "val"):
        raise ValueError(f"split: got {split!r}, expected 'train' or 'val'")
    paths = list_parquet_files(data_dir)
    if len(paths) < 2:
        raise ValueError(f"{paths[0]}: the only file, expected at least 2 (the last one is for validation); add one")
    for path in paths[:-1] if split == "train" else paths[-1:]:
        path = str(as_parquet(Path(path)))  # without nulls
        with open_parquet(path) as file:
            for group in range(start, file.num_row_groups, step):
                yield [text for column in read_batches(file, group, path) for text in column.to_pylist()]


# ---- downloads, imported lazily, so that training does not load an HTTP library ------------------

def download_single_file(index: int) -> bool:
    """Download a shard of climbmix unless it exists. True on success; otherwise an error is logged."""
    from nanochat.integrations.download import make_downloader

    try:
        make_downloader().fetch(index)
    except OSError as e:
        log.error("%s: %s", index_to_filename(index), e)
        return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Download or verify (`download.main`)."""
    from nanochat.integrations import download

    download.main(argv)


if __name__ == "__main__":
    run_main(main)
