"""
The files that a data path names: which of them are data, and which are not read.

    DIR/web/a.parquet                        data: its suffix is one that --data-format reads
    DIR/code -> /disk/code                   a link to a folder: followed, like a folder
    DIR/b.jsonl -> ../blobs/1f3a (missing)   a dangling link: an error, because data would silently be missing
    DIR/_temporary/0/part-0.parquet          hidden: a name below DIR begins with . or, as text, with _
    DIR/README.txt  DIR/c.csv                not read: text about the data; a kind that no source reads
    PREFIX,PREFIX                            token files, listed without their suffixes

Suffixes of text may be in upper or lower case. A .json file is data if it has one object per line;
a single array or object is not read. `list_files` lists every file that is not read, except those
about the data (README, LICENSE, logs), and commands print that list. All of these paths may be in
object storage. Hidden files of other kinds, such as __init__.py, are not listed.

**Links.** The tree below DIR is what `find -L DIR` prints: every link is followed, except one to a
folder that contains the link, which would never end. A file that is reachable by two names, or
that the Hub lists twice, is read twice, with a warning. (Rejected: reading it once. Which of the
names would count? A bucket could lose its files to another bucket.)

**Known data sets.** The last shard of the data set is used for validation: it is always downloaded,
and it is an error if it is missing. Otherwise a failed download would silently change all
validation results.
"""

import codecs
import errno
import logging
import mimetypes
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import NamedTuple

from nanochat.cli import did_you_mean
from nanochat.common import (
    AnyPath,
    Remote,
    as_path,
    counted,
    each,
    few,
    get_base_dir,
    local_copy,
    make_local_copies,
    may_be_secret,
    read_json,
    reason_of,
    refuse_secrets,
    storage_of,
)
from nanochat.text import PLAIN_TEXT, SUFFIXES, text_suffix, warn_once
from nanochat.text_kinds import is_json_lines, saved_files

log = logging.getLogger(__name__)

# suffixes by --data-format
FORMATS = {"text": SUFFIXES, "shards": (".bin",), "megatron": (".bin",)}
MAGICS = {"shards": b"GPTS", "megatron": b"MMIDIDX\x00\x00"}  # an .idx begins with it
GET_DATA = (
    "download data with python -m nanochat.dataset -n 8, make a sample from files on this machine with python "
    "-m dev.make_sample_corpus, or name a folder of yours, hf://datasets/OWNER/NAME, or token files without .bin "
    "(with --data-format)"
)
LIST_BYTES = 64 << 20  # the largest text file that may list addresses
BUCKET = "data"  # the name of the bucket if there is only one
MANIFEST_NAME = "manifest.json"  # in a folder of pairs, when all of them are finished
RECORDS = ".records"  # in a folder of pairs that scripts.tok_shards makes, from the beginning
OWN_TOKENIZER = "tokenizer/tokenizer.json"  # in a data folder that has its own tokenizer

NOT_DATA = re.compile(  # whatever their kind
    r"^(readme|licen[cs]e|copying|notice|changelog|authors|citation)\b|\.(log|lock)$", re.IGNORECASE
)
DOT_JSON = (".json", ".json.gz", ".json.zst")  # a name that does not say what the file holds
NOT_READ = "not a kind of file that is read; docs/data.md makes JSON lines of source files"
ABOUT_DATA = re.compile(  # text files that are not documents, whatever is beside them
    r"(readme|licen[cs]e|copying|notice|changelog|authors|citation|merges|vocab|md5sums?|sha256sums?|cmakelists"
    r"|requirements)([-_.]\w+)?\.txt(\.gz|\.zst)?",
    re.IGNORECASE,
)
METADATA = frozenset(
    (  # JSON that this and other programs write beside data
        "state.json",
        "sample_corpus.json",
        "dataset.json",
        "dataset_info.json",
        "dataset_infos.json",
        "dataset_dict.json",
        "manifest.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "config.json",
        "generation_config.json",
    )
)
KNOWN_KINDS = mimetypes.MimeTypes()  # Python's own table: no file of this machine is read
# folders of what Spark, Delta Lake and Python note beside data
NOTES = frozenset(("_temporary", "_delta_log", "__pycache__"))
NEVER_DATA = (".md", ".rst", ".yaml", ".yml", ".toml", ".log", ".lock")  # not in that table


# ---- everything below a folder -------------------------------------------------------------------


class Entry(NamedTuple):
    """Something below a folder. `kind`: "file"; "hidden", a file whose name begins with a dot;
    "folder"; "records", a folder RECORDS, not its files; or "dangling", a link to something that does
    not exist. `linked`: it is a link, or below a linked folder."""

    path: AnyPath
    kind: str
    linked: bool = False


def walk(folder: AnyPath) -> Iterator[Entry]:
    """Everything below a folder, in no particular order. Links are followed, except those to a
    folder that contains them. Folders and links whose names begin with a dot are skipped: .git,
    .cache, .snapshot. OSError for a folder that cannot be read. A folder that is deleted meanwhile
    is skipped."""
    if isinstance(folder, Remote):
        yield from _walk_remote(folder)
    else:
        yield from _walk_local(folder)


def _walk_remote(folder: Remote) -> Iterator[Entry]:
    """`walk` in object storage, which has files and no folders."""
    for file in folder.walk():
        folders = file.relative_to(folder).parts[:-1]
        hidden = [part for part in folders if part.startswith(".")]
        if not hidden:
            yield Entry(file, "hidden" if file.name.startswith(".") else "file")
        elif hidden == [RECORDS]:
            yield Entry(file.parent, "records")


def _walk_local(folder: Path) -> Iterator[Entry]:
    """`walk` on a disk."""
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
                    path = place / entry.name
                    is_linked = linked or entry.is_symlink()
                    kind = _kind(entry)
                    if kind == "folder":
                        todo.append((path, above | {own}, is_linked))
                    if kind:
                        yield Entry(path, kind, is_linked)
        except FileNotFoundError:
            continue
        except OSError as e:
            raise OSError(
                f"{e.filename or place}: it cannot be read ({reason_of(e)}), so data below it would silently "
                f"be missing; make it readable, or remove it from the data"
            ) from None


def _kind(entry: os.DirEntry[str]) -> str:
    """See `Entry`. "" for what `walk` skips: a folder or link whose name begins with a dot, a socket,
    pipe or device, and a name that has just been deleted."""
    if entry.name.startswith("."):
        if entry.is_file(follow_symlinks=False):
            return "hidden"
        return "records" if entry.name == RECORDS and entry.is_dir() else ""
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


def exists(path: AnyPath) -> bool:
    """Whether a path exists. A list of prefixes may be longer than any path that the system
    accepts."""
    try:
        return path.exists()
    except OSError as e:
        if e.errno != errno.ENAMETOOLONG:
            raise
        return False


def is_folder(path: AnyPath) -> bool:
    """Whether a path is a folder; see `exists`."""
    return exists(path) and path.is_dir()


def is_file(path: AnyPath) -> bool:
    """Whether a path is a file; see `exists`."""
    return exists(path) and path.is_file()


def read_data_args(path: AnyPath | str) -> str:
    """The --data-path in a file for Megatron's --data-args-path: prefixes, or weights and prefixes,
    separated by white space. FileNotFoundError or ValueError names the file."""
    try:
        words = local_copy(as_path(path)).read_text().split()
    except FileNotFoundError:
        raise FileNotFoundError(f"--data-args-path={path}: no such file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"--data-args-path={path}: it cannot be read as text ({e})") from None
    if not words or any("," in word for word in words):
        raise ValueError(
            f"--data-args-path={path}: expected paths of token files without .bin, or weights and paths, "
            f"separated by spaces or lines, none of them with a comma"
        )
    return ",".join(words)


@dataclass(frozen=True)
class DataPath:
    """What a --data-path names, which `data_at` finds out once: everything below a folder, which
    may not exist; or only some files, which are listed one by one."""

    text: str  # as it was given
    folder: AnyPath  # names of files are relative to it
    files: tuple[AnyPath, ...] = ()  # () for a folder
    are_prefixes: bool = False  # token files that were named without their suffixes

    def __str__(self) -> str:
        return self.text

    @property
    def home(self) -> AnyPath:
        """Its folder; of listed files without a common folder, that of the first one."""
        has_common_folder = not self.files or len(self.folder.parts) > 1
        return self.folder if has_common_folder else self.files[0].parent

    def has_folder(self, name: str) -> bool:
        """Whether it is a folder with a subfolder of this name."""
        return not self.files and is_folder(self.folder / name)

    def at_commit(self) -> "DataPath":
        """The same data at the commit that its branch names now, if it is on the Hub, so that other
        processes read no other commit; else itself."""
        if not isinstance(self.folder, Remote):
            return self
        root = self.folder.resolve()
        files = tuple(root / file.relative_to(self.folder) for file in self.files)
        return replace(self, folder=root, files=files)

    @property
    def on_hub(self) -> str:
        """Its folder, which names the data set and with `at_commit` its commit, if it is on the Hub;
        else ""."""
        root = str(self.folder)
        return root if root.startswith("hf://") else ""


def data_at(path: AnyPath | str) -> DataPath:
    """What a --data-path names: a folder, a file, token files without their suffixes, separated by
    commas, or remote text files, separated by commas or listed in a text file. FileNotFoundError or
    ValueError for a list of which some files do not exist."""
    place = as_path(path)
    listed = paths_in(path)
    is_list_of_objects = len(listed) > 1 and all(map(storage_of, listed))
    if is_list_of_objects and all(map(text_suffix, listed)):
        return _listed_files(str(path), listed)
    if not is_list_of_objects and exists(place):
        is_single = not place.is_dir()
        return DataPath(
            str(place),
            place.parent if is_single else place,
            (place,) if is_single else (),
        )
    files = find_prefixes(str(path))
    if not files:
        return DataPath(str(place), place)
    return DataPath(str(path), _common_folder(files), tuple(files), are_prefixes=True)


def paths_in(path: AnyPath | str) -> list[str]:
    """The paths that a --data-path lists: in a text file, or with commas between them."""
    return _listed_in(as_path(path)) or str(path).split(",")


def fixed_paths(path: AnyPath | str) -> list[Remote] | None:
    """The states that never change, such as commits, which the paths in a --data-path stand for in
    this launch; None if one of them may change."""
    states = []
    for place in map(as_path, paths_in(path)):
        state = place.resolve() if isinstance(place, Remote) else None
        if state is None or not state.is_fixed():
            return None
        states.append(state)
    return states


def _common_folder(files: Sequence[AnyPath]) -> AnyPath:
    """The folder that contains all files."""
    folders = [file.parent for file in files]
    return as_path(os.path.commonpath(folders)) if len(folders) > 1 else folders[0]


def _listed_in(place: AnyPath) -> list[str]:
    """The addresses that a text file lists, one per line; [] if it holds anything else. ValueError
    for an address that may hold a secret, or that names no text file."""
    if isinstance(place, Remote) or place.suffix.lower() not in ("", ".txt", ".list"):
        return []
    if not is_file(place) or place.stat().st_size > LIST_BYTES:
        return []
    listed = []
    text = place.read_bytes().removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.decode(errors="replace").strip()
        if not word or word.startswith("#"):
            continue
        if not storage_of(word) or "://" not in word:
            return []
        refuse_secrets(word)
        if not text_suffix(word):
            raise ValueError(
                f"{place}: line {number}: {word} is not the address of a {', '.join(SUFFIXES)} file; list one "
                f"file per line"
            )
        listed.append(word)
    return listed


def _listed_files(text: str, listed: Sequence[str]) -> DataPath:
    """Text files that a --data-path lists. FileNotFoundError names one that does not exist,
    ValueError one that is listed twice."""
    files = [as_path(path) for path in listed]
    for file, times in Counter(files).items():
        if times > 1:
            raise ValueError(f"{file}: --data-path lists it twice; list each file once")
    for _ in each(lambda file: file.stat(), files, at_once=64):
        pass
    return DataPath(text, _common_folder(files), tuple(files))


class Listing(NamedTuple):
    """The files of a --data-path, each list in the order of relative paths. `ignored`: {reason:
    files that are not read}."""

    data: list[AnyPath]
    ignored: dict[str, list[AnyPath]]


def list_files(data: DataPath, data_format: str = "text") -> Listing:
    """The files of a format that a --data-path names. FileNotFoundError or ValueError if there are
    none, or if one cannot be data."""
    _check_format_name(data_format)
    # A format that is not in the table is a suffix (see `nanochat.sources.SOURCES`).
    suffixes = FORMATS.get(data_format, (f".{data_format}",))
    if not data.files:
        if not is_folder(data.folder):
            raise no_such_data(data.folder)
        return _list_folder(data.folder, data_format, suffixes)
    if data.are_prefixes and data_format == "text":
        raise no_such_data(as_path(data.text))
    files = list(data.files)
    if not has_suffix(files[0].name, suffixes):
        remedy = "rename it, or change --data-format"
        if not _is_data(files[0].name):
            remedy = "name other data, such as hf://datasets/OWNER/NAME, or rename it if it is of this kind"
        raise ValueError(
            f"{data}: expected a folder or a {', '.join(suffixes)} file for "
            f"--data-format {data_format}; {remedy}"
        )
    _check_names(files)
    return Listing(files, {})


def _check_format_name(data_format: str) -> None:
    """ValueError for a --data-format that nothing reads."""
    own_source = Path(__file__).parent / f"source_{data_format}.py"
    if data_format in FORMATS or own_source.is_file():
        return
    raise ValueError(
        f"--data-format: got {data_format!r}, expected {', '.join(FORMATS)}, or a "
        f"NAME with a nanochat/source_NAME.py{did_you_mean(data_format, FORMATS)}"
    )


def no_such_data(path: AnyPath) -> FileNotFoundError:
    """The error for a data path that names nothing, with what is beside it."""
    beside: list[str] = []
    if isinstance(path, Path) and is_folder(path.parent):
        others = sorted(path.parent.iterdir())
        names = [other.name for other in others if is_folder(other) or _is_data(other.name)]
        beside = [name for name in names if not name.startswith((".", "_"))]
    kind = "file" if _is_data(path.name) else "folder"
    listed = f"; beside it: {', '.join(beside[:8])}" if beside else ""
    hint = did_you_mean(path.name, beside) or f"{listed}; {GET_DATA}"
    return FileNotFoundError(f"{path}: no such data {kind}{hint}")


def _is_data(name: str) -> bool:
    """Whether a name is that of a file of any --data-format."""
    return any(has_suffix(name, suffixes) for suffixes in FORMATS.values())


def find_files(path: AnyPath | str, data_format: str = "text") -> list[AnyPath]:
    """The data of `list_files` at a path."""
    return list_files(data_at(path), data_format).data


def has_suffix(name: str, suffixes: Sequence[str]) -> bool:
    """Whether a name ends with one of the suffixes of a format. Those of text may be in upper
    case."""
    return text_suffix(name) != "" if suffixes == SUFFIXES else name.endswith(tuple(suffixes))


def _list_folder(path: AnyPath, data_format: str, suffixes: Sequence[str]) -> Listing:
    """`list_files` of a folder."""
    entries = [entry for entry in walk(path) if entry.kind != "folder"]
    entries.sort(key=lambda entry: entry.path.relative_to(path).as_posix())
    shown = [entry for entry in entries if not is_hidden(entry.path.relative_to(path), data_format)]
    _refuse_dangling(path, [entry.path for entry in shown if entry.kind == "dangling"], suffixes)
    files = [entry for entry in shown if entry.kind == "file"]
    data = [entry for entry in files if has_suffix(entry.path.name, suffixes)]
    _refuse_odd_keys(path, [entry.path for entry in data])
    ignored: dict[str, list[AnyPath]] = {}
    if data_format == "text":
        reasons = _not_documents([entry.path for entry in files])
        data = [entry for entry in data if entry.path not in reasons]
        own_tokenizer = path / OWN_TOKENIZER
        for file, reason in reasons.items():
            beside_tokenizer = own_tokenizer in reasons and file.parent == own_tokenizer.parent
            if file.name not in METADATA and not beside_tokenizer:
                ignored.setdefault(reason, []).append(file)
    else:
        text = [entry.path for entry in files if text_suffix(entry.path.name)]
        reasons = _not_documents(text)
        text = [file for file in text if file not in reasons]
        if text:
            ignored[f"text, which --data-format={data_format} does not read"] = text
    hidden = [
        entry.path
        for entry in entries
        if entry.kind in ("file", "hidden")
        and has_suffix(entry.path.name, suffixes)
        and (entry.kind == "hidden" or is_hidden(entry.path.relative_to(path), data_format))
    ]
    if hidden:
        ignored["a name begins with _ or ."] = hidden
    found = [entry.path for entry in data]
    _check_names(found)
    if ".bin" in suffixes:
        if problem := unfinished(path, shown):
            raise ValueError(problem)
        _check_pairs([entry.path for entry in files])
        _check_listed(path, [entry.path for entry in files])
    if not found:
        not_read = f" ({describe_ignored(path, ignored)})" if ignored else ""
        raise FileNotFoundError(
            f"{path}: no {', '.join(suffixes)} file below it{not_read}; check --data-path and --data-format "
            f"({', '.join(FORMATS)}): an interrupted scripts.tok_shards resumes, and scripts.convert_shards reads "
            f"nanoGPT's and llm.c's .bin files"
        )
    if isinstance(path, Remote) or any(entry.linked for entry in data):
        _warn_of_copies(path, found)
    return Listing(found, ignored)


def is_hidden(name: PurePath, data_format: str = "text") -> bool:
    """Whether a relative path is hidden: one of its names begins with _, as in Spark's _temporary. The
    names of token files may, because Megatron's own tools write a pair _text_document if their prefix
    is a folder. In a fork's own format, such as sources with __init__.py and _internal/, only what is
    in a folder of NOTES is hidden."""
    if data_format not in FORMATS:
        return not NOTES.isdisjoint(name.parts)
    parts = name.parts if data_format == "text" else name.parts[:-1]
    return any(part.startswith("_") for part in parts)


def _refuse_dangling(folder: AnyPath, links: Sequence[AnyPath], suffixes: Sequence[str]) -> None:
    """FileNotFoundError for links to files or folders that do not exist and may have held data."""
    missing = [link for link in links if not _is_other_kind(link.name.lower(), suffixes)]
    if missing:
        raise FileNotFoundError(
            f"{folder}: {counted(len(missing), 'link')} below it to something that does not exist: "
            f"{few(missing, folder)} (-> {os.readlink(missing[0])}). Data would silently be missing: mount the disk, "
            f"fetch the files (git annex get, dvc pull, or download the Hugging Face data set again), or delete the "
            f"links"
        )


def _refuse_odd_keys(folder: AnyPath, files: Sequence[AnyPath]) -> None:
    """ValueError for remote files of which no path may be given, because it might show a secret."""
    odd = [file for file in files if isinstance(file, Remote) and may_be_secret(str(file))]
    if odd:
        raise ValueError(
            f"{folder}: {counted(len(odd), 'file')} below it with ? or with : and @ in the path, as if it were a URL "
            f"with credentials, which is not read; rename them, or name a folder without them"
        )


def _is_other_kind(name: str, suffixes: Sequence[str]) -> bool:
    """Whether a name in lower case is that of a kind of file that is not read: a program, a
    picture."""
    if has_suffix(name, suffixes):
        return False
    return name.endswith(NEVER_DATA) or KNOWN_KINDS.guess_type(name)[0] is not None


def _not_documents(files: Sequence[AnyPath]) -> dict[AnyPath, str]:
    """{file: reason} for the files of a folder that are not read."""
    reasons: dict[AnyPath, str] = {}
    saved = {
        folder: saved_files(folder)
        for folder in {file.parent for file in files if file.suffix == ".arrow"}
    }
    for file in files:
        suffix = text_suffix(file.name)
        listed = saved.get(file.parent)
        if suffix == ".arrow" and listed is not None and file.name not in listed:
            reasons[file] = "not part of the saved data set"
        elif suffix in PLAIN_TEXT and ABOUT_DATA.fullmatch(file.name):
            reasons[file] = "about the data, by name"
        elif suffix in DOT_JSON and (file.name in METADATA or not is_json_lines(file)):
            reasons[file] = "JSON, but not one object per line"
        elif not suffix and not NOT_DATA.search(file.name):
            reasons[file] = NOT_READ
    return reasons


def _check_names(files: Sequence[AnyPath]) -> None:
    """ValueError for a name that JSON cannot hold."""
    for file in files:
        try:
            str(file).encode()
        except UnicodeEncodeError:
            raise ValueError(f"{file}: its name is not UTF-8; rename it") from None


def unfinished(folder: AnyPath, entries: Iterable[Entry]) -> str:
    """A sentence about token files below a folder that scripts.tok_shards has begun and not
    finished: what is missing, and the remedy. "" if there are none."""
    entries = list(entries)
    begun = {entry.path.parent for entry in entries if entry.kind == "records"}
    finished = {entry.path.parent for entry in entries if entry.path.name == MANIFEST_NAME}
    missing = sorted(begun - finished)
    if not missing:
        return ""
    return (
        f"{folder}: scripts.tok_shards has not finished it: {MANIFEST_NAME} is missing in {len(missing):,} of "
        f"{counted(len(begun), 'folder')} ({few(missing, folder)}); run the same command again (with --num-tasks, "
        f"every task and then --finish), upload the rest of a copy, or delete {RECORDS} in these folders to use the "
        f"files that are there"
    )


def _check_pairs(files: Sequence[AnyPath]) -> None:
    """FileNotFoundError for an .idx without its .bin, whose data would silently be missing."""
    known = set(files)
    for idx in files:
        if idx.suffix == ".idx" and idx.with_suffix(".bin") not in known:
            raise FileNotFoundError(
                f"{idx.with_suffix('.bin')}: missing, but {idx.name} needs it; restore it, or "
                f"delete {idx.name} and rerun scripts.tok_shards"
            )


def _check_listed(folder: AnyPath, files: Sequence[AnyPath]) -> None:
    """ValueError for pairs that a manifest.json of scripts.tok_shards lists and that are not there,
    say after half a copy: their data would silently be missing."""
    known = set(files)
    missing = [
        file
        for manifest in files
        if manifest.name == MANIFEST_NAME
        for file in _listed_pairs(manifest)
        if file not in known
    ]
    if missing:
        raise ValueError(
            f"{folder}: missing of the files that {MANIFEST_NAME} lists: {few(missing, folder)}; copy the rest, or "
            f'give the command of scripts.tok_shards again; to do without them, delete their names from "shards" in '
            f"this {MANIFEST_NAME}"
        )


def _listed_pairs(manifest: AnyPath) -> list[AnyPath]:
    """The .bin files that a manifest.json lists; none if it is of another program."""
    shape = {"format": str, "tokenizer": dict, "shards": dict}
    try:
        shards = read_json(local_copy(manifest), shape)["shards"]
    except ValueError:
        return []
    return [manifest.parent / f"{name}.bin" for name in shards]


def _warn_of_copies(folder: AnyPath, files: Sequence[AnyPath]) -> None:
    """Warn about files that are known to be the same: links, or remote files with one hash."""
    names = defaultdict[object, list[AnyPath]](list)
    for file in files:
        if isinstance(file, Remote):
            names[file.sha256() or file].append(file)
        else:
            stat = file.stat()
            names[stat.st_dev, stat.st_ino].append(file)
    copies = [some for some in names.values() if len(some) > 1]
    if copies:
        first, second = (file.relative_to(folder) for file in copies[0][:2])
        warn_once(
            f"{folder}: {counted(len(copies), 'file')} reachable by several names, so the documents are read "
            f"once for each name ({second} is {first}); name the folder, or the files, that you want, or delete links"
        )


def describe_ignored(folder: AnyPath, ignored: dict[str, list[AnyPath]]) -> str:
    """A line about files that are not read: their number, the reasons, a few
    names of each."""
    number = sum(map(len, ignored.values()))
    parts = [f"{few(files, folder)} ({reason})" for reason, files in ignored.items()]
    return (
        f"{counted(number, 'file')} {'is' if number == 1 else 'are'} not read: {'; '.join(parts)}"
    )


# ---- token files, listed one by one --------------------------------------------------------------


def split_weights(data_path: str) -> tuple[str, list[float] | None]:
    """Split Megatron's own list, which has a weight before each prefix (70,web,30,code or "70 web
    30 code"), into the prefixes, separated by commas, and their weights. Any other --data-path is
    returned as it is, with None."""
    parts = data_path.split(",") if "," in data_path else data_path.split()
    weighted = len(parts) % 2 == 0 and all(
        re.fullmatch(r"(\d+(\.\d*)?|\.\d+)(e-?\d+)?", part) for part in parts[::2]
    )
    if not parts or not weighted or exists(as_path(data_path)):
        return data_path, None
    return ",".join(parts[1::2]), [float(part) for part in parts[::2]]


def find_prefixes(data_path: str) -> list[AnyPath]:
    """The .bin files, in the order given, of a --data-path that lists pairs as comma-separated
    paths without extension; [] if a single path names no pair. FileNotFoundError for a missing
    pair; ValueError for weights, which only --order=megatron uses."""
    parts = data_path.split(",")
    prefixes, weights = split_weights(data_path)
    if weights is not None:
        raise ValueError(
            f"--data-path: got {_first_of(data_path)}, with a weight before each prefix, which "
            f"--order=lanes does not use; add --order=megatron, or write "
            f"--data-path={_first_of(prefixes)}"
        )
    if len(set(map(storage_of, parts))) > 1:
        raise ValueError(
            f"{data_path}: the prefixes are in different kinds of object storage, or in object storage "
            f"and on this machine; a run reads from only one place, so copy all files to one of them"
        )
    files = [as_path(f"{as_path(part)}.bin") for part in parts]
    for prefix, file in zip(parts, files):
        if not is_file(file) and not is_file(file.with_suffix(".idx")):
            if len(parts) == 1:
                return []
            raise FileNotFoundError(
                f"{prefix}: neither {file.name} nor its .idx exists; set --data-path to one folder (a --curriculum "
                f"selects some of its subfolders), or to remote text files, or paths without .bin and .idx, separated "
                f"by commas"
            )
    return files


def _first_of(data_path: str) -> str:
    """A list of prefixes for a sentence, which may have hundreds."""
    parts = data_path.split(",")
    return data_path if len(parts) < 9 else ",".join(parts[:8]) + ",..."


def check_format(root: AnyPath | str, files: Sequence[AnyPath], data_format: str) -> None:
    """ValueError for a pair whose format is not `data_format`. A folder that mixes formats is
    refused, too: skipping one kind would silently drop data."""
    make_local_copies(f.with_suffix(".idx") for f in files)
    for file in files:
        actual = pair_format(file)
        # an unknown format is reported when the pair is opened
        if actual and actual != data_format:
            raise ValueError(
                f"{file}: this pair needs --data-format {actual}, not {data_format}; if {root} mixes "
                f"both, move one kind elsewhere, or convert it with python -m scripts.convert_shards"
            )


def pair_format(path: AnyPath) -> str | None:
    """The format of a pair, given either file: "shards" or "megatron". None if it has no .idx, or
    one that begins with neither magic."""
    try:
        with open(local_copy(path.with_suffix(".idx")), "rb") as f:
            head = f.read(16)
    except FileNotFoundError:
        return None
    return next((name for name, magic in MAGICS.items() if head.startswith(magic)), None)


# ---- known data sets -----------------------------------------------------------------------------

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
DATASET_NAME = "climbmix"  # the default


def index_to_filename(index: int) -> str:
    """The file name of shard `index`."""
    return f"shard_{index:05d}.parquet"


def default_data_dir(name: str = DATASET_NAME) -> Path:
    """The folder of a known data set: data/NAME, or the folder of karpathy/nanochat if only that
    exists."""
    ours, theirs = get_base_dir() / "data" / name, get_base_dir() / f"base_data_{name}"
    return theirs if theirs.is_dir() and not ours.is_dir() else ours


def default_data_path() -> Path:
    """The data of a command without --data-path: the folder of the default data set or, if only
    that exists, karpathy/nanochat's older folder base_data, which has fineweb-edu and uses its last
    file for validation."""
    folder, older = default_data_dir(), get_base_dir() / "base_data"
    if folder.is_dir() or not older.is_dir():
        return folder
    log.info("%s: does not exist, so nanochat's older folder is used: %s", folder, older)
    return older


def known_dataset(data_dir: AnyPath | str) -> str | None:
    """The name of the data set in a download folder, according to the downloader's marker or the
    path. None for any other folder, whose last file is used for validation."""
    folder = as_path(data_dir)
    if not exists(folder / MARKER):
        return next(
            (name for name in DATASETS if folder.resolve() == default_data_dir(name).resolve()),
            None,
        )
    name = read_json(local_copy(folder / MARKER), {"name": str})["name"]
    if name not in DATASETS:
        raise ValueError(
            f"{folder / MARKER}: got the data set {name[:80]!r}, expected {' or '.join(DATASETS)}; "
            f"delete the file"
        )
    return name


def list_parquet_files(data_dir: AnyPath | str | None = None) -> list[str]:
    """Full paths of the parquet files below a folder (default: `default_data_path()`), in the order
    of their relative paths. The last one is for validation. FileNotFoundError if there are none, or
    if a download lacks its validation shard; ValueError if that shard is not the last file."""
    root = as_path(data_dir) if data_dir is not None else default_data_path()
    files = [file for file in find_files(root) if file.suffix == ".parquet"]
    if not files:
        raise FileNotFoundError(f"{root}: no .parquet file below it; name another folder")
    if name := known_dataset(root):
        pinned = index_to_filename(DATASETS[name].last_shard)
        if root / pinned not in files:
            raise FileNotFoundError(
                f"{root}: {name}'s validation shard {pinned} is missing ({len(files)} other "
                f"files found); run `python -m nanochat.dataset --dataset={name} -n 8 "
                f"--data-dir={root}`"
            )
        if files[-1] != root / pinned:
            raise ValueError(
                f"{root}: the last file is {files[-1].relative_to(root)}, expected {name}'s validation "
                f"shard {pinned}; move other files elsewhere"
            )
    return [str(file) for file in files]
