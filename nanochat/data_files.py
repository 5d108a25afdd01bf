"""
The files below a data path: which are data, what their names say about their use, and which are not read.

    DIR/web/a.parquet                        data: its suffix is one that --data-format reads
    DIR/code -> /disk/code                   a link to a folder: followed, like a folder
    DIR/b.jsonl -> ../blobs/1f3a (missing)   a dangling link: an error, because data would silently be missing
    DIR/_temporary/0/part-0.parquet          hidden: a name below DIR begins with _ or .
    DIR/README.txt  DIR/c.csv                not read: text about the data; a kind that no source reads

Suffixes of text may be in upper or lower case. A .json file is data if it has one object per line; a single array or
object is not read. `list_files` lists every file that is not read but could be data, and commands print that list.

**Links.** The tree below DIR is what `find -L DIR` prints: every link is followed, except one to a folder that contains
the link, which would never end. A file that is reachable by two names is read twice, with a warning. (Rejected: reading
it once. Which of the names would count? A bucket could lose its files to another bucket.)

**Names that state a split.** Data sets are often published as train-00000-of-00002.parquet, validation-..., test-...,
or as folders with such names. `stated_splits` reads these names. They count only if some of the files beside each other
are for training and others are not, so a single file `test.parquet` or a bucket `dev/` is ordinary data.
"""

import errno
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from nanochat.cli import did_you_mean
from nanochat.common import as_path, counted, each, few, is_remote, local_copy
from nanochat.text import SUFFIXES, text_suffix

log = logging.getLogger(__name__)

FORMATS = {"text": SUFFIXES, "shards": (".bin",), "megatron": (".bin",)}  # suffixes by --data-format
GPT_SIMPLE = {"pretokenized": "shards", "jsonl": "text"}  # gpt-simple's names of formats
GET_DATA = ("download data with python -m nanochat.dataset -n 8, make a sample from files on this machine with python "
            "-m dev.make_sample_corpus, or point --data-path at yours")
BUCKET = "data"  # the name of the bucket if there is only one

COULD_BE_DATA = re.compile(
    r"\.(jsonl?|ndjson|txt|text|csv|tsv|parquet|parq|pq|arrow|feather|orc|avro|xml|warc|tar|tgz|zip|npy|npz)"
    r"(\.(gz|zst|zstd|bz2|xz|lz4|snappy|zip))?", re.IGNORECASE)
ABOUT_DATA = re.compile(  # text files that are not documents, whatever is beside them
    r"(readme|licen[cs]e|copying|notice|changelog|authors|citation|merges|vocab|md5sums?|sha256sums?|cmakelists"
    r"|requirements)([-_.]\w+)?\.txt", re.IGNORECASE)
METADATA = frozenset((  # JSON that this and other programs write beside data
    "state.json", "sample_corpus.json", "dataset.json", "dataset_info.json", "dataset_infos.json",
    "dataset_dict.json", "manifest.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "config.json", "generation_config.json"))
NEVER_DATA = (".md", ".rst", ".yaml", ".yml", ".toml", ".py", ".sh", ".html", ".pdf", ".png", ".jpg", ".log", ".lock")


# ---- everything below a folder -------------------------------------------------------------------

class Entry(NamedTuple):
    """Something below a folder. `kind`: "file", "folder" or "dangling", a link to something that does not exist.
    `linked`: it is a link, or below a linked folder."""

    path: Path
    kind: str
    linked: bool = False


def walk(folder: Path) -> Iterator[Entry]:
    """Everything below a folder whose names do not begin with a dot, in no particular order. Links are followed, except
    those to a folder that contains them. OSError for a folder that cannot be read. A folder that is deleted meanwhile
    is skipped."""
    if is_remote(folder):
        for path in folder.rglob("*"):
            hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            if not hidden and path.is_file():
                yield Entry(path, "file")
        return
    todo = [(folder, frozenset[tuple[int, int]](), False)]
    while todo:
        place, above, linked = todo.pop()
        try:
            stat = place.stat()
            own = stat.st_dev, stat.st_ino
            if own in above:
                continue
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.name.startswith("."):  # .git, .cache, .snapshot
                        continue
                    path, is_linked = place / entry.name, linked or entry.is_symlink()
                    kind = _kind(entry)
                    if kind == "folder":
                        todo.append((path, above | {own}, is_linked))
                    if kind:
                        yield Entry(path, kind, is_linked)
        except FileNotFoundError:
            continue
        except OSError as e:
            raise OSError(f"{e.filename or place}: it cannot be read ({e.strerror}), so data below it would silently "
                          f"be missing; make it readable, or remove it from the data") from None


def _kind(entry: os.DirEntry[str]) -> str:
    """See `Entry`. "" for a socket, pipe or device, and for a name that has just been deleted."""
    try:
        if entry.is_dir():
            return "folder"
        if entry.is_file():
            return "file"
    except OSError as e:
        if e.errno != errno.ELOOP:  # a link to itself
            raise
        return "dangling"
    return "dangling" if entry.is_symlink() and not os.path.exists(entry.path) else ""


# ---- what a --data-path names --------------------------------------------------------------------

def exists(path: Path) -> bool:
    """Whether a path exists. A list of prefixes may be longer than any path that the system accepts."""
    try:
        return path.exists()
    except OSError as e:
        if e.errno != errno.ENAMETOOLONG:
            raise
        return False


def is_folder(path: Path) -> bool:
    """Whether a path is a folder; see `exists`."""
    return exists(path) and path.is_dir()


def is_file(path: Path) -> bool:
    """Whether a path is a file; see `exists`."""
    return exists(path) and path.is_file()


def read_data_args(path: Path | str) -> str:
    """The --data-path in a file for Megatron's --data-args-path: prefixes, or weights and prefixes, separated by white
    space. FileNotFoundError or ValueError names the file."""
    try:
        words = local_copy(as_path(path)).read_text().split()
    except FileNotFoundError:
        raise FileNotFoundError(f"--data-args-path={path}: no such file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"--data-args-path={path}: it cannot be read as text ({e})") from None
    if not words or any("," in word for word in words):
        raise ValueError(f"--data-args-path={path}: expected paths of token files without .bin, or weights and paths, "
                         f"separated by spaces or lines, none of them with a comma")
    return ",".join(words)


def named_files(path: Path | str) -> list[Path]:
    """The files that a --data-path names one by one: a single file, or token files without their suffixes. [] for a
    folder or a path that does not exist."""
    if exists(as_path(path)):
        return [as_path(path)] if as_path(path).is_file() else []
    from nanochat.tokens import find_prefixes

    return find_prefixes(str(path))


def data_folder(path: Path | str) -> Path:
    """The folder that file names are relative to: the --data-path, or the folder of the files that it names."""
    folders = [file.parent for file in named_files(path)]
    return as_path(os.path.commonpath(folders)) if len(folders) > 1 else folders[0] if folders else as_path(path)


class Listing(NamedTuple):
    """The files of a --data-path, each list in the order of relative paths. `ignored`: {reason: files that could be
    data but are not read}."""

    data: list[Path]
    ignored: dict[str, list[Path]]


def list_files(path: Path | str, data_format: str = "text") -> Listing:
    """The files of a format at a --data-path: all files below a folder, or the files that it names. FileNotFoundError
    or ValueError if there are none, or if one cannot be data."""
    # A format that is not in the table is a suffix (see `nanochat.dataset.reader_class`).
    path, suffixes = as_path(path), FORMATS.get(data_format, (f".{data_format}",))
    if data_format not in FORMATS and not (Path(__file__).parent / f"source_{data_format}.py").is_file():
        ours = GPT_SIMPLE.get(data_format)
        hint = f"; gpt-simple's {data_format} is called {ours} here" if ours else did_you_mean(data_format, FORMATS)
        raise ValueError(f"--data-format: got {data_format!r}, expected {', '.join(FORMATS)}, or a "
                         f"NAME with a nanochat/source_NAME.py{hint}")
    if is_folder(path):
        return _list_folder(path, data_format, suffixes)
    files = named_files(path) if exists(path) or data_format != "text" else []
    if not files:
        beside = [p.name for p in path.parent.iterdir()] if is_folder(path.parent) and not is_remote(path) else []
        hint = did_you_mean(path.name, beside) or (
            f"; {GET_DATA} (token files may be named without .bin if --data-format is set)")
        raise FileNotFoundError(f"{path}: no such data folder{hint}")
    if not has_suffix(files[0].name, suffixes):
        raise ValueError(f"{path}: expected a folder or a {', '.join(suffixes)} file for "
                         f"--data-format {data_format}; rename it, or change --data-format")
    _check_names(files)
    return Listing(files, {})


def find_files(path: Path | str, data_format: str = "text") -> list[Path]:
    """The data of `list_files`."""
    return list_files(path, data_format).data


def has_suffix(name: str, suffixes: Sequence[str]) -> bool:
    """Whether a name ends with one of the suffixes of a format. Those of text may be in upper case."""
    return text_suffix(name) != "" if suffixes == SUFFIXES else name.endswith(tuple(suffixes))


def _list_folder(path: Path, data_format: str, suffixes: Sequence[str]) -> Listing:
    """`list_files` of a folder."""
    entries = [entry for entry in walk(path) if entry.kind != "folder"]
    entries.sort(key=lambda entry: entry.path.relative_to(path).as_posix())
    shown = [entry for entry in entries if not is_hidden(entry.path.relative_to(path), data_format)]
    _refuse_dangling(path, [entry.path for entry in shown if entry.kind == "dangling"])
    files = [entry for entry in shown if entry.kind == "file"]
    data = [entry for entry in files if has_suffix(entry.path.name, suffixes)]
    ignored: dict[str, list[Path]] = {}
    if data_format == "text":
        reasons = _not_documents([entry.path for entry in files])
        data = [entry for entry in data if entry.path not in reasons]
        for file, reason in reasons.items():
            if file.name not in METADATA:
                ignored.setdefault(reason, []).append(file)
    hidden = [entry.path for entry in entries if entry.kind == "file" and has_suffix(entry.path.name, suffixes)
              and is_hidden(entry.path.relative_to(path), data_format)]
    if hidden:
        ignored["a name begins with _"] = hidden
    found = [entry.path for entry in data]
    _check_names(found)
    if ".bin" in suffixes:
        _check_pairs([entry.path for entry in files])
    if not found:
        others = [name for name, some in FORMATS.items() if any(has_suffix(file.path.name, some) for file in files)
                  and name != data_format]
        hint = f"it has files for --data-format {' or '.join(others)}" if others else "check --data-path"
        not_read = f" ({describe_ignored(path, ignored)})" if ignored else ""
        raise FileNotFoundError(f"{path}: no {', '.join(suffixes)} file below it{not_read}; {hint}")
    if any(entry.linked for entry in data):
        _warn_of_copies(path, found)
    return Listing(found, ignored)


def is_hidden(name: Path, data_format: str = "text") -> bool:
    """Whether a relative path is hidden: one of its names begins with _, as in Spark's _temporary. (Megatron's own
    tools write a pair _text_document if their prefix is a folder, so names of token files may begin with _.)"""
    parts = name.parts if data_format == "text" else name.parts[:-1]
    return any(part.startswith("_") for part in parts)


def _refuse_dangling(folder: Path, links: Sequence[Path]) -> None:
    """FileNotFoundError for links to files or folders that do not exist and may have held data."""
    missing = [link for link in links if not link.name.lower().endswith(NEVER_DATA)]
    if missing:
        raise FileNotFoundError(
            f"{folder}: {counted(len(missing), 'link')} below it to something that does not exist: "
            f"{few(missing, folder)} (-> {os.readlink(missing[0])}). Data would silently be missing: mount the disk, "
            f"fetch the files (git annex get, dvc pull, or download the Hugging Face data set again), or delete the "
            f"links")


def _not_documents(files: Sequence[Path]) -> dict[Path, str]:
    """{file: reason} for the files of a folder that could be data but are not read."""
    from nanochat.text_kinds import is_json_lines, saved_files

    reasons: dict[Path, str] = {}
    saved = {folder: saved_files(folder) for folder in {file.parent for file in files if file.suffix == ".arrow"}}
    for file in files:
        suffix = text_suffix(file.name)
        listed = saved.get(file.parent)
        if suffix == ".arrow" and listed is not None and file.name not in listed:
            reasons[file] = "not part of the saved data set"
        elif suffix == ".txt" and ABOUT_DATA.fullmatch(file.name):
            reasons[file] = "about the data, by name"
        elif f"{suffix}.".startswith(".json.") and (file.name in METADATA or not is_json_lines(file)):
            reasons[file] = "JSON, but not one object per line"
        elif not suffix and COULD_BE_DATA.search(file.name):
            reasons[file] = "not a kind of file that is read"
    return reasons


def _check_names(files: Sequence[Path]) -> None:
    """ValueError for a name that JSON cannot hold."""
    for file in files:
        try:
            str(file).encode()
        except UnicodeEncodeError:
            raise ValueError(f"{file}: its name is not UTF-8; rename it") from None


def _check_pairs(files: Sequence[Path]) -> None:
    """FileNotFoundError for an .idx without its .bin, whose data would silently be missing."""
    known = set(files)
    for idx in files:
        if idx.suffix == ".idx" and idx.with_suffix(".bin") not in known:
            raise FileNotFoundError(f"{idx.with_suffix('.bin')}: missing, but {idx.name} needs it; restore it, or "
                                    f"delete {idx.name} and rerun scripts.tok_shards")


def _warn_of_copies(folder: Path, files: Sequence[Path]) -> None:
    """Warn about files that links make reachable by several names."""
    names = defaultdict[tuple[int, int], list[Path]](list)
    for file in files:
        stat = file.stat()
        names[stat.st_dev, stat.st_ino].append(file)
    copies = [some for some in names.values() if len(some) > 1]
    if copies:
        first, second = (os.path.relpath(file, folder) for file in copies[0][:2])
        log.warning("%s: %s reachable by several names, so the documents are read once for each name (%s is %s); "
                    "delete the links that are not wanted", folder, counted(len(copies), "file"), second, first)


def describe_ignored(folder: Path | str, ignored: dict[str, list[Path]]) -> str:
    """A line about files that could be data but are not read: their number, the reasons, a few names of each."""
    number = sum(map(len, ignored.values()))
    parts = [f"{few(files, folder)} ({reason})" for reason, files in ignored.items()]
    return f"{counted(number, 'file')} that could be data {'is' if number == 1 else 'are'} not read: {'; '.join(parts)}"


# ---- what names say about a file's use -----------------------------------------------------------

WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test",
         **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "val")}
VAL_FOLDERS = ("val", "valid", "validation", "dev")
NUMBERED = r"([-_.]?\d+)?(-of-\d+)?(-[0-9a-f]{16})?"
ANY_WORD = "|".join(sorted(WORDS, key=len, reverse=True))
ALONE = re.compile(rf"(?P<word>{ANY_WORD}){NUMBERED}")  # test, test-00000-of-00001
INSIDE = re.compile(rf".*[-_.](?P<word>{ANY_WORD}){NUMBERED}|(?P<first>{ANY_WORD})[-_.].*")  # c4-train.00001, train_sft


def stated_splits(names: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
    """{name: "train", "val", "test" or ""} for relative paths of data files. "": the name states nothing. The topmost
    folder or file whose name counts decides."""
    children = defaultdict[PurePosixPath, set[PurePosixPath]](set)  # of each folder
    for name in names:
        for path in (name, *name.parents[:-1]):
            children[path.parent].add(path)
    files = set(names)
    stated: dict[PurePosixPath, str] = {}
    for beside in children.values():
        stated |= _stated([path for path in beside if path in files])
        folders = {path: WORDS.get(path.name.lower(), "") for path in beside if path not in files}
        if "train" in folders.values() and {"val", "test"} & set(folders.values()):
            stated |= folders
    return {name: next((said for path in (*reversed(name.parents[:-1]), name) if (said := stated.get(path, ""))), "")
            for name in names}


def _stated(files: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
    """`stated_splits` of the files of one folder, {} if their names do not count. ValueError if names that count are
    beside names that state nothing."""
    stems = {file: file.name.lower().removesuffix(text_suffix(file.name) or file.suffix.lower()) for file in files}
    words, clear_words = dict[PurePosixPath, str](), dict[PurePosixPath, str]()
    for file, stem in stems.items():
        if match := ALONE.fullmatch(stem):
            words[file] = match["word"]
            if match["word"] not in ("dev", "eval"):
                clear_words[file] = match["word"]
        elif match := INSIDE.fullmatch(stem):
            words[file] = match["word"] or match["first"]
    if not any(WORDS[word] == "train" for word in words.values()):  # the others may be topics: dev, test_cases
        words = clear_words
    stated = {file: WORDS.get(words.get(file, ""), "") for file in files}
    kinds = set(stated.values())
    if not {"val", "test"} & kinds or not {"train", ""} & kinds:
        return {}
    if {"train", ""} <= kinds:
        silent = [file for file in files if not stated[file]]
        spoken = [file for file in files if stated[file]]
        raise ValueError(f"{few(sorted(silent))}: the names of other files beside it state a split "
                         f"({few(sorted(spoken))}), so it is unclear whether to train on it; move it to a folder of "
                         f"its own to train on it, or rename it train-... or validation-...")
    return stated


def val_folders(root: Path) -> list[Path]:
    """The folders beside root/train whose names say that they are for validation."""
    return [root / name for name in VAL_FOLDERS if is_folder(root / name)]


# ---- buckets and splits --------------------------------------------------------------------------

def group_by_bucket(files: Sequence[Path], path: Path, *, merge: bool = False) -> dict[str, list[Path]]:
    """{bucket: files} of files below a --data-path: each subfolder is a bucket, and so is each of several prefixes.
    Files beside the subfolders form the bucket BUCKET; with `merge`, all files do."""
    folder, prefixes = data_folder(path), not exists(path)
    buckets: dict[str, list[Path]] = {}
    for file in files:
        name = file.relative_to(folder)
        if merge or (len(name.parts) == 1 and not prefixes):
            bucket = BUCKET
        else:
            bucket = name.with_suffix("").as_posix() if prefixes else name.parts[0]
        buckets.setdefault(bucket, []).append(file)
    return buckets


def find_buckets(path: Path, data_format: str = "text", *, merge: bool = False) -> dict[str, list[Path]]:
    """{bucket: files} of all data at a path; see `group_by_bucket`."""
    return group_by_bucket(find_files(path, data_format), path, merge=merge)


class Splits(NamedTuple):
    """The files of a data path, {bucket: files} each. `val` is empty if no folder or name states a split. `stray`:
    files that are neither in train/ nor in the folders beside it."""

    train: dict[str, list[Path]]
    val: dict[str, list[Path]]
    stray: list[Path]


def find_splits(root: Path, data_format: str = "text", *, by_bucket: bool = False) -> Splits:
    """What folders and names state about the files of a data path. Warns about files that could be data but are not
    used. Files without documents are skipped with one warning. Without `by_bucket`, the training files are one
    bucket."""
    found = list_files(root, data_format)
    ignored, data = dict(found.ignored), drop_empty(root, found.data)
    val, tests, stray = dict[str, list[Path]](), list[Path](), list[Path]()
    names = {file: PurePosixPath(file.relative_to(root).as_posix()) for file in data} if is_folder(root) else {}
    if is_folder(root / "train"):
        folders = [root / "train", *val_folders(root)[:1]]
        tops = {folder: [file for file in data if names[file].parts[0] == folder.name] for folder in folders}
        for folder, files in tops.items():
            if not files:
                find_files(folder, data_format)  # raises, unless
                raise FileNotFoundError(f"{folder}: no document in any of its files; write them again")
        train = group_by_bucket(tops[folders[0]], folders[0], merge=not by_bucket)
        for folder in folders[1:]:
            val = group_by_bucket(tops[folder], folder)
        used = {folder.name for folder in folders}
        for file in data:
            top = names[file].parts[0]
            if top not in used:
                (tests if WORDS.get(top) == "test" else stray).append(file)
        if stray:
            ignored[f"outside {' and '.join(f'{name}/' for name in sorted(used))}"] = stray
    else:
        try:
            stated = stated_splits(list(names.values()))
        except ValueError as e:
            raise ValueError(f"{root}: {e}") from None
        by_use: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
        for file in data:
            by_use[stated[names[file]] or "train" if names else "train"].append(file)
        train = group_by_bucket(by_use["train"], root, merge=not by_bucket)
        val = group_by_bucket(by_use["val"], root, merge=not by_bucket)
        tests = by_use["test"]
    if tests:
        ignored["for testing, by name"] = tests
    if ignored:
        log.warning("%s: %s", root, describe_ignored(root, ignored))
    return Splits(train, val, stray)


def drop_empty(root: Path, files: Sequence[Path]) -> list[Path]:
    """The files that hold documents. One warning lists the others. ValueError if no file holds any, or if some only
    stand for data that was not fetched."""
    from nanochat.text_kinds import content_of

    contents = list(each(content_of, files) if is_remote(root) else map(content_of, files))
    pointers = [file for file, content in zip(files, contents) if content == "pointer"]
    if pointers:
        raise ValueError(f"{root}: {counted(len(pointers), 'file')} of Git LFS or git-annex whose data was not "
                         f"fetched: {few(pointers, root)}; fetch it (git lfs pull, git annex get), or delete the files")
    empty = [file for file, content in zip(files, contents) if content == "nothing"]
    if len(empty) == len(files):
        raise ValueError(f"{root}: {counted(len(files), 'file')} but no document in any of them ({few(empty, root)}); "
                         f"write them again, or choose other data with --data-path and --val-path")
    if empty:
        log.warning("%s: skipping %s without documents: %s", root, counted(len(empty), "file"), few(empty, root))
    return [file for file, content in zip(files, contents) if content == "documents"]


def last_of(files: Sequence[Path]) -> Path | None:
    """The file of several that validates if nothing else is named: the last one, but none of a few .txt files beside
    other kinds of files, such as notes. None if there are too few files."""
    others = [file for file in files if text_suffix(file.name) != ".txt"]
    candidates = others or list(files)
    return candidates[-1] if len(candidates) > 1 else None
