"""Which files are used for training and which for validation: what folders and names say, and the
buckets.

    DIR/train/web/a.bin  DIR/val/web/c.bin     train: web [a];  val: web [c]. Also valid/, validation/, dev/
    DIR/train-0.parquet  DIR/val-0.parquet     as the names say. What is for testing, by name or folder, is not used
    DIR/web/a.bin  DIR/web/b.bin               train: web [a];  val: web [b], the last one
    PREFIX,PREFIX                              token files listed without their suffixes, in order

Files without documents are skipped with a warning. `pin_files` finds, divides and pins the files of
a new run.

**Names that state a split.** Data sets are often published as train-00000-of-00002.parquet,
validation-..., test-..., or as folders with such names. `stated_splits` reads these names. They
count only if some of the files beside each other are for training and others are not, so a single
file `test.parquet` or a bucket `dev/` is ordinary data.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from nanochat.common import AnyPath, Remote, counted, each, few
from nanochat.curriculum import Curriculum
from nanochat.files import (
    BUCKET,
    MAGICS,
    DataPath,
    check_format,
    data_at,
    describe_ignored,
    find_files,
    is_folder,
    known_dataset,
    list_files,
    list_parquet_files,
)
from nanochat.pins import Manifest, Manifests, contents_of
from nanochat.sources import reader_class, scan_all
from nanochat.text import ALL, PLAIN_TEXT, Selection, fetch_footers, text_suffix, warn_once

POINTERS = (b"version https://git-lfs.github.com/", b"/annex/objects/")  # how they begin
POINTER_BYTES = 1 << 10  # no pointer is larger


# ---- what names say about a file's use -----------------------------------------------------------

WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "val"),
}
VAL_FOLDERS = ("val", "valid", "validation", "dev")
NUMBERED = r"([-_.]?\d+)?(-of-\d+)?(-[0-9a-f]{16})?"
ANY_WORD = "|".join(sorted(WORDS, key=len, reverse=True))
ALONE = re.compile(rf"(?P<word>{ANY_WORD}){NUMBERED}")  # test, test-00000-of-00001
# c4-train.00001, train_sft
INSIDE = re.compile(rf".*[-_.](?P<word>{ANY_WORD}){NUMBERED}|(?P<first>{ANY_WORD})[-_.].*")


def stated_splits(names: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
    """{name: "train", "val", "test" or ""} for relative paths of data files. "": the name states
    nothing. The topmost folder or file whose name counts decides."""
    children = defaultdict[PurePosixPath, set[PurePosixPath]](set)  # of each folder
    for name in names:
        for path in (name, *name.parents[:-1]):
            children[path.parent].add(path)

    # what each file and folder says, compared with those beside it
    files = set(names)
    stated: dict[PurePosixPath, str] = {}
    for beside in children.values():
        stated |= _stated([path for path in beside if path in files])
        folders = {path: WORDS.get(path.name.lower(), "") for path in beside - files}
        said = set(folders.values())
        if "train" in said and said & {"val", "test"}:
            stated |= folders

    # from the top down, the first one that says anything decides
    splits: dict[PurePosixPath, str] = {}
    for name in names:
        from_top = [*reversed(name.parents[:-1]), name]
        words = [stated.get(path, "") for path in from_top]
        splits[name] = next(filter(None, words), "")
    return splits


def _word_in(file: PurePosixPath) -> tuple[str, bool]:
    """(the word in a file's name that may state a split, or ""; whether it can hardly be a
    topic)."""
    name = file.name.lower()
    stem = name.removesuffix(text_suffix(name) or file.suffix.lower())
    if match := ALONE.fullmatch(stem):
        return match["word"], match["word"] not in ("dev", "eval")
    if match := INSIDE.fullmatch(stem):
        return match["word"] or match["first"], False
    return "", False


def _stated(files: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
    """`stated_splits` of the files of one folder, {} if their names do not count. ValueError if
    names that count are beside names that state nothing. Names of a fork's own kind of file, such
    as validation.py among sources, are topics unless all files beside them state a split."""
    found = {file: _word_in(file) for file in files}
    has_train = any(WORDS.get(word) == "train" for word, _ in found.values())
    stated: dict[PurePosixPath, str] = {}
    for file, (word, is_clear) in found.items():
        # without a training file, words may be topics: dev, test_cases
        counts = has_train or is_clear
        stated[file] = WORDS.get(word, "") if counts else ""

    kinds = set(stated.values())
    for_training, not_for_training = kinds & {"train", ""}, kinds & {"val", "test"}
    if not for_training or not not_for_training:
        return {}
    if "" in kinds and not all(text_suffix(file.name) or file.suffix == ".bin" for file in files):
        return {}
    if for_training == {"train", ""}:
        silent = sorted(file for file in files if not stated[file])
        spoken = sorted(file for file in files if stated[file])
        raise ValueError(
            f"{few(silent)}: the names of other files beside it state a split ({few(spoken)}), so it is "
            f"unclear whether to train on it; move it to a folder of its own to train on it, or rename "
            f"it train-... or validation-..."
        )
    return stated


def val_folders(root: AnyPath) -> list[AnyPath]:
    """The folders beside root/train whose names say that they are for validation."""
    return [root / name for name in VAL_FOLDERS if is_folder(root / name)]


# ---- buckets and splits --------------------------------------------------------------------------


def group_by_bucket(
    files: Sequence[AnyPath], folder: AnyPath, *, merge: bool = False, prefixes: bool = False
) -> dict[str, list[AnyPath]]:
    """{bucket: files} of files below a folder: each subfolder is a bucket, or with `prefixes` each
    file. Files beside the subfolders form the bucket BUCKET; with `merge`, all files do."""
    buckets: dict[str, list[AnyPath]] = {}
    for file in files:
        name = file.relative_to(folder)
        if merge:
            bucket = BUCKET
        elif prefixes:
            bucket = name.with_suffix("").as_posix()
        else:
            bucket = name.parts[0] if len(name.parts) > 1 else BUCKET
        buckets.setdefault(bucket, []).append(file)
    return buckets


class Splits(NamedTuple):
    """The files of a data path, {bucket: files} each. `val` is empty if no folder or name states a
    split. `stray`: files that are neither in train/ nor in the folders beside it."""

    train: dict[str, list[AnyPath]]
    val: dict[str, list[AnyPath]]
    stray: list[AnyPath]


def find_splits(data: DataPath, data_format: str = "text", *, by_bucket: bool = False) -> Splits:
    """What folders and names state about the files of a data path. Warns about files that could be
    data but are not used. Files without documents are skipped with one warning. Without
    `by_bucket`, the training files are one bucket."""
    found = list_files(data, data_format)
    files = drop_empty(data, found.data)
    ignored = dict(found.ignored)
    if data.has_folder("train"):
        splits, tests = _by_folders(data.folder, files, data_format, by_bucket)
    else:
        splits, tests = _by_names(data, files, by_bucket)
    if splits.stray:
        used = sorted({"train", *(folder.name for folder in val_folders(data.folder)[:1])})
        ignored[f"outside {' and '.join(f'{name}/' for name in used)}"] = splits.stray
    if tests:
        ignored["for testing, by name"] = tests
    if ignored:
        warn_once(f"{data}: {describe_ignored(data.folder, ignored)}")
    return splits


def _by_folders(
    root: AnyPath, data: Sequence[AnyPath], data_format: str, by_bucket: bool
) -> tuple[Splits, list[AnyPath]]:
    """(splits, files for testing) of a folder with train/."""
    folders = [root / "train", *val_folders(root)[:1]]
    below = defaultdict[str, list[AnyPath]](list)  # the files below each folder of `root`
    for file in data:
        below[file.relative_to(root).parts[0]].append(file)
    for folder in folders:
        if not below[folder.name]:
            # raises an error of its own if there are no files at all
            find_files(folder, data_format)
            raise FileNotFoundError(f"{folder}: no document in any of its files; write them again")

    train = group_by_bucket(below.pop("train"), folders[0], merge=not by_bucket)
    val: dict[str, list[AnyPath]] = {}
    for folder in folders[1:]:
        val = group_by_bucket(below.pop(folder.name), folder)
    tests, stray = list[AnyPath](), list[AnyPath]()
    for top, files in below.items():
        is_test = WORDS.get(top) == "test"
        (tests if is_test else stray).extend(files)
    return Splits(train, val, stray), tests


def _by_names(
    data: DataPath, files: Sequence[AnyPath], by_bucket: bool
) -> tuple[Splits, list[AnyPath]]:
    """(splits, files for testing) of files whose names may state a split. Names of files that a
    --data-path lists one by one state none."""
    uses: dict[AnyPath, str] = {}
    if not data.files:
        names = {file: PurePosixPath(file.relative_to(data.folder).as_posix()) for file in files}
        try:
            stated = stated_splits(list(names.values()))
        except ValueError as e:
            raise ValueError(f"{data}: {e}") from None
        uses = {file: stated[name] for file, name in names.items()}
    by_use = defaultdict[str, list[AnyPath]](list)
    for file in files:
        by_use[uses.get(file) or "train"].append(file)
    buckets = {
        use: group_by_bucket(
            by_use[use], data.folder, merge=not by_bucket, prefixes=data.are_prefixes
        )
        for use in ("train", "val")
    }
    return Splits(buckets["train"], buckets["val"], []), by_use["test"]


def content_of(path: AnyPath) -> str:
    """What a data file holds: "documents"; "nothing"; or "pointer": it stands for data that Git LFS
    or git-annex has not fetched. "documents" for a file that cannot be read: reading it gives the
    reason."""
    try:
        if path.stat().st_size <= POINTER_BYTES:
            with path.open("rb") as file:
                if file.read(POINTER_BYTES).startswith(POINTERS):
                    return "pointer"
        is_empty = reader_class(path.name).is_empty(path)
    except (OSError, ValueError):
        is_empty = False
    return "nothing" if is_empty else "documents"


def drop_empty(data: DataPath, files: Sequence[AnyPath]) -> list[AnyPath]:
    """The files that hold documents. One warning lists the others. ValueError if no file holds any,
    or if some only stand for data that was not fetched."""
    folder = data.folder
    fetch_footers(files)
    contents = list(each(content_of, files))
    pointers = [file for file, content in zip(files, contents) if content == "pointer"]
    if pointers:
        raise ValueError(
            f"{data}: {counted(len(pointers), 'file')} of Git LFS or git-annex whose data was not "
            f"fetched: {few(pointers, folder)}; fetch it (git lfs pull, git annex get), or delete the files"
        )
    empty = [file for file, content in zip(files, contents) if content == "nothing"]
    if len(empty) == len(files):
        raise ValueError(
            f"{data}: {counted(len(files), 'file')} but no document in any of them ({few(empty, folder)}); "
            f"write them again, or choose other data with --data-path and --val-path"
        )
    if empty:
        number = counted(len(empty), "file")
        warn_once(f"{data}: skipping {number} without documents: {few(empty, folder)}")
    return [file for file, content in zip(files, contents) if content == "documents"]


def last_of(files: Sequence[AnyPath]) -> AnyPath | None:
    """The file of several that validates if nothing else is named: the last one, but none of a few
    .txt files beside other kinds of files, such as notes. None if there are too few files."""
    others = [file for file in files if text_suffix(file.name) not in PLAIN_TEXT]
    candidates = others or list(files)
    return candidates[-1] if len(candidates) > 1 else None


# ---- training and validation ---------------------------------------------------------------------


def split_train_val(
    data: DataPath,
    val_data: DataPath | None = None,
    *,
    data_format: str = "text",
    by_bucket: bool = False,
    shared: bool = False,
) -> dict[str, dict[str, list[AnyPath]]]:
    """{"train": {bucket: files}, "val": {bucket: files}} for a --data-path.

        DIR/train/BUCKET/..., DIR/val/BUCKET/...     as they are; without `by_bucket` train is one bucket
        DIR/train-0.parquet, DIR/validation.parquet  as their names say
        DIR/BUCKET/...                               with `by_bucket`: the last file of each bucket is for validation
        DIR/...                                      one bucket: the last of all files is for validation
        PREFIX,PREFIX                                with `by_bucket`, each is a bucket; otherwise one bucket

    `val_data` names the validation files; each of its subfolders is a bucket. `shared`: all files
    are in both splits, for --val-fraction. ValueError or FileNotFoundError if a split has no files.
    """
    has_train = data.has_folder("train")
    if not shared and not data.files and known_dataset(data.folder):
        list_parquet_files(data.folder)  # raises if the validation shard is missing
    if has_train and not shared and val_data is None:
        _check_val_folders(data.folder)
    train, val, _ = find_splits(data, data_format, by_bucket=by_bucket)
    if shared:
        if val_data is not None:
            raise ValueError(
                f"--val-fraction: {val_data} is named for validation; leave out this flag, or --val-path"
            )
        named = next((files[0] for files in val.values()), None)
        if named is not None:
            raise ValueError(
                f"--val-fraction: the data already has validation files ({named}); leave out this flag"
            )
        return {"train": train, "val": train}
    if val_data is not None:
        val = _val_files(val_data, data_format)
        return {"train": _held_out(data, train, val), "val": val}
    if has_train:
        return {"train": train, "val": val}
    splits = take_last_files(train, val, by_bucket=by_bucket)
    if not splits["val"]:
        raise ValueError(
            f"{data}: only one data file, expected at least two in a bucket, besides .txt files (the last one is "
            f"used for validation); add one, or name validation data with --val-path"
            f"{val_fraction_remedy(chain.from_iterable(train.values()), 0.01)}"
        )
    return splits


def take_last_files(
    train: dict[str, list[AnyPath]], val: dict[str, list[AnyPath]], *, by_bucket: bool = True
) -> dict[str, dict[str, list[AnyPath]]]:
    """Both splits, where the last file of each bucket validates if the bucket has no validation
    files of its own, and more than one file. Without `by_bucket`, only if there are none at all."""
    if val and not by_bucket:
        return {"train": train, "val": val}
    last: dict[str, AnyPath] = {}
    for bucket, files in train.items():
        if bucket not in val and (file := last_of(files)) is not None:
            last[bucket] = file
    rest = {
        bucket: [file for file in files if file != last.get(bucket)]
        for bucket, files in train.items()
    }
    chosen = {**val, **{bucket: [file] for bucket, file in last.items()}}
    for_val = {bucket: chosen[bucket] for bucket in [*train, *val] if bucket in chosen}
    return {"train": rest, "val": for_val}


def val_fraction_remedy(files: Iterable[AnyPath | str], share: float) -> str:
    """The end of a remedy: to divide the documents of text files; "" for files of another kind,
    which --val-fraction does not divide."""
    if not any(text_suffix(str(file)) for file in files):
        return ""
    return f", or use {share:.0%} of the documents of every file with --val-fraction={share}"


def _check_val_folders(root: AnyPath) -> None:
    """FileNotFoundError or ValueError unless exactly one folder beside root/train is for
    validation."""
    folders = val_folders(root)
    if not folders:
        raise FileNotFoundError(
            f"{root}: it has train/ but no val/; name validation data with --val-path, "
            f"or if it is text, divide the documents of train/ with --val-fraction=0.01"
        )
    if len(folders) > 1:
        names = " and ".join(f"{folder.name}/" for folder in folders)
        raise ValueError(
            f"{root}: it has {names}; name the one to use for validation with --val-path"
        )


def _held_out(
    data: DataPath, train: dict[str, list[AnyPath]], val: Mapping[str, Sequence[AnyPath]]
) -> dict[str, list[AnyPath]]:
    """The training files without those for validation, which a --val-path below the --data-path
    names. ValueError if none are left."""

    def identity(file: AnyPath) -> object:
        known = file.sha256() if isinstance(file, Remote) else ""  # the same in two revisions
        return known or file.resolve()

    places = {identity(file) for files in val.values() for file in files}
    rest = {
        bucket: [file for file in files if identity(file) not in places]
        for bucket, files in train.items()
    }
    rest = {bucket: files for bucket, files in rest.items() if files}
    if not rest:
        raise ValueError(
            f"--val-path: it holds all training files of {data}; name files that are only for validation"
            f"{val_fraction_remedy(chain.from_iterable(train.values()), 0.05)}"
        )
    return rest


def _val_files(data: DataPath, data_format: str) -> dict[str, list[AnyPath]]:
    """{bucket: files} of a --val-path: files whose names say that they are for training or testing,
    beside files for validation, are not used."""
    splits = find_splits(data, data_format, by_bucket=True)
    return splits.val or splits.train


def last_file_validates(data: DataPath) -> bool:
    """Whether, without --val-path, --val-fraction and names that state a split, the last file is
    used for validation, because nothing names validation data."""
    return bool(data.files) or not (data.has_folder("train") or known_dataset(data.folder))


class DataFile(NamedTuple):
    """A file for `describe_split`. `name` is relative to the data path. `documents` is None if
    unknown."""

    name: str
    num_bytes: int
    documents: int | None = None


def files_of(manifests: Mapping[str, Manifest]) -> dict[str, list[DataFile]]:
    """{bucket: files} of a split."""
    return {
        bucket: [
            DataFile(file["name"], file["size"], sum(file["groups"])) for file in manifest["files"]
        ]
        for bucket, manifest in manifests.items()
    }


def _documents(files: Sequence[DataFile], before: str, after: str = "") -> str:
    """How many documents the files have, between two texts; "" if that is not known."""
    known = [file.documents for file in files if file.documents is not None]
    if len(known) < len(files):
        return ""
    return f"{before}{counted(sum(known), 'document')}{after}"


def _summary(files: Sequence[DataFile]) -> str:
    """The names of a few files, or the number of many."""
    if len(files) > 3:
        return f"{len(files):,} files{_documents(files, ', ')}"
    return ", ".join(file.name for file in files) + _documents(files, " (", ")")


def describe_split(
    train: Mapping[str, Sequence[DataFile]],
    val: Mapping[str, Sequence[DataFile]],
    *,
    reads: str = "",
    shared: float = 0.0,
    chosen: bool = False,
) -> list[str]:
    """Lines about which files are for validation and for training, {bucket: files} each, and a
    warning if the split looks accidental.

        validation: web/0007.parquet (1,024 documents), 12.1% of all bytes
        training: 7 files, 7,168 documents; this run trains on 18,800,000 tokens

    `reads`: how much of the training files the program reads. `shared`: the --val-fraction.
    `chosen`: whether the last file was taken by default where no name states a split, which suits
    shuffled shards but is a surprise in a folder of different files.
    """
    end = f"; {reads}" if reads else ""
    for_training = [*chain.from_iterable(train.values())]
    for_val = [*chain.from_iterable(val.values())]
    if shared:
        # a small file may only train; a fork that leaves out a bucket still validates with it
        validating, training = (counted(len(files), "file") for files in (for_val, for_training))
        return [
            f"validation: {shared:.3g} of each file ({validating}){_documents(for_val, ', ')}",
            f"training: the rest of {training}{_documents(for_training, ', ')}{end}",
        ]
    lines = [
        f"validation: {_summary(for_val)}, {_share(for_training, for_val):.1%} of all bytes",
        f"training: {_summary(for_training)}{end}",
    ]
    if chosen:
        lines += _accidental_split(train, val)
    return lines


def _accidental_split(
    train: Mapping[str, Sequence[DataFile]], val: Mapping[str, Sequence[DataFile]]
) -> list[str]:
    """The warning of `describe_split`: at most one line, for last files that are unlike the others."""
    by_name = validated_by_name(train, val)
    odd: list[str] = []
    for bucket, files in val.items():
        if bucket not in by_name:
            odd += _odd(train.get(bucket, []), files, bucket)
    if not odd:
        return []
    every_file = [*chain.from_iterable(train.values()), *chain.from_iterable(val.values())]
    # --val-fraction is for data without validation files
    divide = "" if by_name else val_fraction_remedy([file.name for file in every_file], 0.05)
    return [
        f"warning: the last file is used for validation, but {', and '.join(odd)}, and a new run after more files "
        f"arrive will use another one; name validation data with --val-path or folders train/ and val/{divide}"
    ]


def validated_by_name(
    train: Mapping[str, Sequence[DataFile]], val: Mapping[str, Sequence[DataFile]]
) -> set[str]:
    """The buckets of which the name of a file or folder says that it is for validation."""
    every_file = chain.from_iterable([*train.values(), *val.values()])
    stated = stated_splits([PurePosixPath(file.name) for file in every_file])
    return {
        bucket
        for bucket, files in val.items()
        if any(stated[PurePosixPath(file.name)] == "val" for file in files)
    }


def _share(train: Sequence[DataFile], val: Sequence[DataFile]) -> float:
    """How much of the bytes of both is for validation."""
    val_bytes = sum(file.num_bytes for file in val)
    return val_bytes / max(1, val_bytes + sum(file.num_bytes for file in train))


def _odd(train: Sequence[DataFile], val: Sequence[DataFile], bucket: str) -> list[str]:
    """What is odd about the validation files of a bucket."""

    def kind(file: DataFile) -> str:
        return "".join(Path(file.name).suffixes)

    odd = []
    share = _share(train, val)
    if share > 0.1:
        odd.append(f"it has {share:.1%} of the bytes of {bucket}")
    kinds = sorted({kind(file) for file in train})
    folders = {Path(file.name).parent for file in train}
    for file in val:
        if file.documents == 1:
            odd.append(f"{file.name} is a single document")
        if kind(file) not in kinds:
            odd.append(f"{file.name} is {kind(file)}, the others are {', '.join(kinds)}")
        elif Path(file.name).parent not in folders:
            odd.append(f"no training file is in its folder ({file.name})")
    return odd


def pin_files(
    data_path: AnyPath | str,
    val_path: AnyPath | str | None = None,
    *,
    data_format: str = "text",
    mix: Curriculum | None = None,
    selection: Selection = ALL,
) -> Manifests:
    """Find and pin the files of a new run. `mix`: a curriculum, whose buckets stay separate.
    FileNotFoundError or ValueError names the file that is missing or corrupt."""
    data = data_at(data_path)
    val_data = None if val_path is None else data_at(val_path)
    files = split_train_val(
        data,
        val_data,
        data_format=data_format,
        by_bucket=mix is not None,
        shared=selection.val_fraction > 0,
    )
    if mix is not None:
        mix.check_buckets(files["train"])
        files["train"] = {bucket: files["train"][bucket] for bucket in mix.buckets}
    roots = {"train": data, "val": val_data or data}
    if data_format in MAGICS:
        for split, buckets in files.items():
            every_file = list(chain.from_iterable(buckets.values()))
            check_format(str(roots[split]), every_file, data_format)
    folders = {split: root.folder for split, root in roots.items()}
    return scan_all(folders, files, selection, is_new=True)


def pin_validation(
    val_path: AnyPath | str, data_format: str, selection: Selection
) -> dict[str, Manifest]:
    """The manifests {bucket: manifest} of data for validation alone. FileNotFoundError or ValueError
    names a file that is missing or unusable."""
    data = data_at(val_path)
    files = _val_files(data, data_format)
    if data_format in MAGICS:
        check_format(str(data), [*chain.from_iterable(files.values())], data_format)
    return scan_all({"val": data.folder}, {"val": files}, selection)["val"]


def warn_of_trained_copies(manifests: Mapping[str, Mapping[str, Manifest]]) -> None:
    """Warn of validation files that are copies of training files, by their pins."""
    trained = {}
    for manifest in manifests["train"].values():
        for entry in manifest["files"]:
            trained[contents_of(entry)] = entry["name"]
    for manifest in manifests["val"].values():
        for entry in manifest["files"]:
            copy = trained.get(contents_of(entry))
            if copy is not None:
                warn_once(
                    f"the validation file {entry['name']} has the contents of {copy}, which is trained on, so bits "
                    f"per byte will say little; name other validation data with --val-path"
                )
