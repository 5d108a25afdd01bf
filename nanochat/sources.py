"""Sources: the files of a bucket behind one small interface, which also pins and compares them.

    Source.groups, .means       number of documents in each group, in the order of files; their estimated mean length
    Source.read(group, numbers) some documents of a group, by their numbers in it, each as [BOS] + token ids

A group is a block of documents stored together: a parquet row group, or by default 1,024 entries of
a token file. A kind of data file enters by the table `SOURCES`: by its suffix, it names a subclass
of `Source`. A kind `.xyz` of your own needs no entry: the class `FileSource` in
nanochat/source_xyz.py is found by its name. Of the settings of text, it receives --text-field only.

    files --scan_all--> manifests --> RUN/data_manifest.json (nanochat/pins.py), when a run starts
    manifests --check_files--> the same, or an error that names the changed file, when it resumes
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from nanochat.common import (
    AnyPath,
    Remote,
    as_path,
    check_shape,
    counted,
    each,
    etag_of,
    few,
    hash_file,
    local_copy,
    make_local_copies,
    open_door,
)
from nanochat.files import BUCKET, DataPath, data_at, list_files
from nanochat.order import Joined
from nanochat.pins import (
    PIN,
    JoinedFiles,
    Manifest,
    Manifests,
    Pin,
    counts_and_means,
    fingerprint,
    is_prepared,
    keep_groups,
    not_pinned_yet,
    place_of,
)
from nanochat.prepare import USES, Record, TextFile, prepare
from nanochat.rows import Document
from nanochat.text import (
    ALL,
    JSON_LINES,
    PLAIN_TEXT,
    SUFFIXES,
    TEXT_FIELD,
    Selection,
    text_suffix,
    warn_once,
)
from nanochat.text_kinds import no_document, refuse_nulls
from nanochat.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SOURCES = {  # the door for kinds of data files: {suffix: "module:class"}
    **dict.fromkeys((*SUFFIXES, *JSON_LINES, *PLAIN_TEXT), "nanochat.parquet_source:ParquetSource"),
    ".bin": "nanochat.token_source:TokenSource",
}
# a bucket with at most this many estimated tokens is shuffled document by document,
SMALL_TOKENS = 32 << 20
SMALL_DOCUMENTS = 1 << 20  # unless it has more documents than this


# ---- the interface -------------------------------------------------------------------------------


class Place(NamedTuple):
    """A file, relative to the data path, and a line of it, from 1."""

    file: str
    line: int


class Source:
    """One bucket's documents. `manifest` and `tokenizer` are the run's; `scan` makes manifests.
    `text_field`: the column of text.

    Each kind of file has a subclass: `scan_file` describes and hashes a file, `read` reads it.
    Several threads may call both at once, and errors name the file.
    """

    # how many groups ahead of a lane it wants to know, because it fetches them from far away
    ahead = 0
    lengths_known: ClassVar[bool] = False  # whether the subclass implements `lengths`
    # whether it can return entries as they are stored, for `binned`
    has_entries: ClassVar[bool] = False

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer):
        files = manifest["files"]
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.bos = tokenizer.get_bos_token_id()
        self.text_field = manifest.get("text_field", TEXT_FIELD)
        self.fingerprint = fingerprint(manifest)
        self.groups, self.means = counts_and_means(manifest)
        self.paths = [place_of(manifest, entry) for entry in files]
        self._first_group = np.cumsum([0, *(len(e["groups"]) for e in files)])
        self.joined = self._find_joined(manifest.get("joined", []))
        first_joined = self.joined[0].first_group if self.joined else None
        self.small = self._are_small(0, first_joined)
        self.without = self._find_without(manifest.get("without", {}))

    def _are_small(self, first_group: int, stop: int | None) -> bool:
        """Whether the documents of these groups are shuffled one by one."""
        documents = self.groups[first_group:stop]
        means = self.means[first_group:stop]
        return int(documents @ means) <= SMALL_TOKENS and int(documents.sum()) <= SMALL_DOCUMENTS

    def is_small(self, group: int) -> bool:
        """Whether the documents of a group are shuffled one by one: files that joined the bucket in a
        fork may differ in this from the others."""
        small = self.small
        for part in self.joined:
            if group >= part.first_group:
                small = part.small
        return small

    def _find_joined(self, parts: Sequence[JoinedFiles]) -> list[Joined]:
        """The files that joined the bucket in forks; see `nanochat.fork.join`."""
        firsts = [int(self._first_group[part["files"]]) for part in parts]
        joined = []
        for part, first, stop in zip(parts, firsts, [*firsts[1:], None]):
            joined.append(Joined(first, self._are_small(first, stop), part["begins"]))
        return joined

    def _find_without(
        self, numbers_by_file: Mapping[str, list[int] | None]
    ) -> dict[int, np.ndarray]:
        """{group: (documents,) bool}: the documents whose targets are masked
        (--without-documents)."""
        without = {}
        for first_group, entry in zip(self._first_group, self.manifest["files"]):
            if entry["name"] not in numbers_by_file:
                continue
            numbers = numbers_by_file[entry["name"]]
            listed = np.zeros(sum(entry["groups"]), bool)
            listed[slice(None) if numbers is None else numbers] = True  # None: all of them
            ends = np.cumsum(entry["groups"])[:-1]
            for group, mask in enumerate(np.split(listed, ends), first_group):
                if mask.any():
                    without[int(group)] = mask
        return without

    @staticmethod
    def scan_file(path: AnyPath, name: str, text_field: str) -> Pin:
        """The pin of a file. `text_field`: the column of text. ValueError or FileNotFoundError if the
        file cannot be read."""
        raise NotImplementedError

    @staticmethod
    def is_empty(path: AnyPath) -> bool:
        """Whether a file holds no document, so that it is skipped. ValueError or OSError if it
        cannot be read."""
        return False

    @staticmethod
    def check_scanned(files: Sequence[AnyPath], text_field: str) -> None:
        """ValueError if nothing in the files of a bucket, which are all scanned, can be trained
        on."""

    def read(self, group: int, numbers: np.ndarray, keep: int = 0) -> list[Document]:
        """Some documents of a group, in the order of `numbers` (n,), which count from 0 in the group.
        The documents after these, up to number `keep` (exclusive), will be read soon."""
        raise NotImplementedError

    def expect(self, groups: Sequence[int]) -> None:
        """Begin to fetch groups that a lane will read, the next one first. Called if `ahead` > 0."""

    def lengths(self, group: int, numbers: np.ndarray) -> tuple[list[int], list[int]]:
        """What `read` returns, without the ids: (length of each document, ids of context at its
        start)."""
        raise NotImplementedError

    def is_sized_by_text(self, group: int) -> bool:
        """Whether the manifest does not know how many tokens a group has, but estimates it by the
        size of its text."""
        return not self.lengths_known

    def texts(self, group: int) -> Iterator[str]:
        """The texts of all documents of a group. Stored tokens are decoded."""
        for document in self.read(group, np.arange(self.groups[group])):
            yield self.tokenizer.decode(document.ids[:].tolist())

    def file_of(self, group: int) -> tuple[int, int]:
        """(index of a group's file, index of the group within that file)."""
        file = int(np.searchsorted(self._first_group, group, side="right")) - 1
        return file, group - int(self._first_group[file])

    def locate(self, group: int) -> tuple[str, int]:
        """A group's (relative name of its file, number within that file)."""
        file, number = self.file_of(group)
        return self.manifest["files"][file]["name"], number

    def origin_of(self, group: int, number: int) -> Place | None:
        """Where a document of prepared text is in the user's own files. None for a file that was
        not prepared."""
        return None


# ---- the door ------------------------------------------------------------------------------------


def reader_class(name: str) -> type[Source]:
    """The class that scans and reads a file with this name. ValueError if there is none for its
    suffix."""
    suffix = text_suffix(name) or Path(name).suffix
    own = f"nanochat.source_{suffix[1:]}"  # of a fork
    try:
        return open_door(SOURCES.get(suffix, f"{own}:FileSource"))
    except ModuleNotFoundError as e:
        if e.name != own:
            raise
        raise ValueError(
            f"{name}: no source reads {suffix} files; write nanochat/source_{suffix[1:]}.py"
        ) from e


def open_source(manifest: Manifest, tokenizer: Tokenizer, *, as_stored: bool = False) -> Source:
    """The source of a manifest's files. `as_stored`: use the entries of token files as they are,
    for `binned`. ValueError for text, which has no stored entries."""
    kind = reader_class(manifest["files"][0]["name"])
    if not as_stored:
        return kind(manifest, tokenizer)
    if not kind.has_entries:
        raise ValueError(
            "--packing binned: this data is text, but binned packs stored tokens; convert it with "
            "python -m scripts.tok_shards --max-length N, or use --packing bestfit"
        )
    return kind(manifest, tokenizer, as_stored=True)  # type: ignore[call-arg]


@dataclass(frozen=True)
class RunData:
    """The data of a run: tokenizer, sources and manifests."""

    tokenizer: Tokenizer
    train: dict[str, Source]
    val: dict[str, Source]
    manifests: Mapping[str, Mapping[str, Manifest]]


def open_data(
    manifests: Mapping[str, Mapping[str, Manifest]],
    tokenizer: Tokenizer,
    *,
    as_stored: bool = False,
) -> RunData:
    """The sources of a run's manifests. Validation always frames documents with BOS."""
    train = {
        bucket: open_source(m, tokenizer, as_stored=as_stored)
        for bucket, m in manifests["train"].items()
    }
    val = {bucket: open_source(m, tokenizer) for bucket, m in manifests["val"].items()}
    return RunData(tokenizer, train, val, manifests)


# ---- pins ----------------------------------------------------------------------------------------


def scan(
    root: AnyPath | str, files: Sequence[AnyPath] | None = None, *, selection: Selection = ALL
) -> Manifest:
    """`scan_files` of some files (default: all) that a path names."""
    data = data_at(root)
    files = list_files(data).data if files is None else files
    return scan_files(data.folder, files, selection)


def scan_files(folder: AnyPath, files: Sequence[AnyPath], selection: Selection = ALL) -> Manifest:
    """The manifest of one bucket: some files below `folder`. Text is prepared first, if necessary.
    ValueError or FileNotFoundError for the first file that cannot be read."""
    split = selection.part or "train"
    return scan_all({split: folder}, {split: {BUCKET: files}}, selection)[split][BUCKET]


def scan_all(
    folders: Mapping[str, AnyPath],
    files: Mapping[str, Mapping[str, Sequence[AnyPath]]],
    selection: Selection = ALL,
    *,
    is_new: bool = False,
) -> Manifests:
    """The manifests of {split: {bucket: files}} below the `folders` of the splits; see `scan_files`
    and `prepared`."""
    manifests: Manifests = {}
    for split, buckets in files.items():
        part = selection.for_split(split)
        manifests[split] = {
            bucket: _begin_manifest(folders[split], paths, part)
            for bucket, paths in buckets.items()
        }
    manifests = prepared(manifests, strict=selection.strict, is_new=is_new)
    field = selection.text_field
    for of_split in manifests.values():
        for manifest in of_split.values():
            entries = manifest["files"]
            for entry in filter(is_prepared, entries):
                entry |= pin(Path(entry["parquet"]), entry["name"], field)
            places = [place_of(manifest, entry) for entry in entries]
            reader_class(entries[0]["name"]).check_scanned(places, field)
    return manifests


def _begin_manifest(folder: AnyPath, files: Sequence[AnyPath], selection: Selection) -> Manifest:
    """A manifest that lacks the pins of the files that are to be prepared; see `prepared`."""
    field = selection.text_field

    def begin(path: AnyPath) -> Pin:
        """The pin of a file, or an entry without one if the file is to be prepared first."""
        name = path.relative_to(folder).as_posix()
        kind = text_suffix(name)
        if kind and (kind != ".parquet" or selection.skips_some):
            return not_pinned_yet(name)
        entry = _scanned(path, name, field)
        nulls = entry.pop("nulls", 0)
        if nulls is None and selection.strict:  # the footer does not say it
            refuse_nulls(path, selection)
        return not_pinned_yet(name) if nulls else entry

    entries = list(each(begin, files))
    return {"root": str(folder.resolve()), "files": entries, **selection.named()}


def pin(path: AnyPath, name: str, text_field: str) -> Pin:
    """The pin of a file. `path` may be the parquet file that was prepared from it."""
    entry = _scanned(path, name, text_field)
    entry.pop("nulls", None)
    return entry


def _scanned(path: AnyPath, name: str, text_field: str) -> Pin:
    """What a reader says of a file. ValueError if a fork's own one leaves something out."""
    reader = reader_class(name)
    entry = reader.scan_file(path, name, text_field)
    returns = f"{name}: {reader.__module__}: FileSource.scan_file"
    check_shape(
        entry, PIN, returns, ending=", in the dict of name, size, footer (a hash) and groups"
    )
    return entry


def prepared(
    manifests: Mapping[str, Mapping[str, Manifest]], *, strict: bool = False, is_new: bool = False
) -> Manifests:
    """The manifests, where each entry of a file that is to be prepared names its parquet file on
    this machine. Raises the errors of `prepare`.

    ValueError for a file without a selected document. If a new run finds it (`is_new`), it is left
    out with a warning, as long as each bucket can train, and something validates.
    """
    files: list[TextFile] = []
    for split, buckets in manifests.items():
        for manifest in buckets.values():
            selection = replace(Selection.of(manifest), strict=strict)
            root = as_path(manifest["root"])
            for entry in filter(is_prepared, manifest["files"]):
                name = entry["name"]
                files.append(TextFile(root / name, name, split, selection))
    results = {(file.split, file.path): result for file, result in zip(files, prepare(files))}

    ready: Manifests = {}
    for split, buckets in manifests.items():
        ready[split] = {}
        for bucket, manifest in buckets.items():
            entries = []
            for entry in manifest["files"]:
                result = results.get((split, as_path(manifest["root"]) / entry["name"]))
                entries.append(entry if result is None else {**entry, "parquet": str(result.path)})
            ready[split][bucket] = {**manifest, "files": entries}
    records = {file: results[file.split, file.path].record for file in files}
    empty = {file: record for file, record in records.items() if not record.documents}
    if empty and not is_new:
        file = next(iter(empty))
        raise no_document([file.path], file.selection, empty[file].skipped)
    for split, buckets in ready.items():
        _leave_out_empty(buckets, {file: empty[file] for file in empty if file.split == split})
    return ready


def _leave_out_empty(buckets: dict[str, Manifest], empty: Mapping[TextFile, Record]) -> None:
    """Leave out files of a split that have no selected document, and a bucket of validation that
    has no other files. A warning counts them. ValueError if nothing is left to train on in a
    bucket, or to validate with."""
    if not empty:
        return
    split, selection = next((file.split, file.selection) for file in empty)
    for bucket, manifest in list(buckets.items()):
        root = as_path(manifest["root"])
        paths = {root / entry["name"] for entry in manifest["files"]}
        of_bucket = [file for file in empty if file.path in paths]
        names = {file.name for file in of_bucket}
        manifest["files"] = [entry for entry in manifest["files"] if entry["name"] not in names]
        if manifest["files"]:
            continue
        del buckets[bucket]
        if split == "train" or not buckets:
            files = [file.path for file in of_bucket]
            raise no_document(files, selection, empty[of_bucket[0]].skipped)
    part = f" with --val-fraction {selection.val_fraction}" * bool(selection.part)
    warn_once(
        f"{root}: {counted(len(empty), 'file')} without a document for {USES[split]}{part}, not used for it: "
        f"{few(file.name for file in empty)}"
    )


def check_files(
    manifests: Mapping[str, Mapping[str, Manifest]],
    folder: AnyPath | None = None,
    val_folder: AnyPath | None = None,
    *,
    strict: bool = False,
) -> Manifests:
    """Compare a run's manifests with the files on this machine (below other folders, if given), and
    return them with the paths in use. Validation files that were pinned below the same folder as the
    training files also follow them to `folder`; others, which a fork of a run with other data keeps,
    stay where they are. Text is prepared again if it is not prepared on this machine.
    FileNotFoundError or ValueError names the first file that is gone, has changed or, if `strict`,
    has a broken line."""
    roots = {
        split: {manifest["root"] for manifest in buckets.values()}
        for split, buckets in manifests.items()
    }
    if val_folder is None and roots.get("train") == roots.get("val"):
        val_folder = folder
    folders = {"train": folder, "val": val_folder}
    moved: Manifests = {}
    for split, buckets in manifests.items():
        moved[split] = {
            bucket: _find_again(manifest, folders[split]) for bucket, manifest in buckets.items()
        }
    present = prepared(moved, strict=strict)
    for split, buckets in manifests.items():
        for bucket, manifest in buckets.items():
            present[split][bucket]["files"] = _compare(manifest, present[split][bucket])
    return present


def check(manifest: Manifest, folder: AnyPath | None = None, *, strict: bool = False) -> Manifest:
    """`check_files` for one bucket."""
    split = manifest.get("part", "train")
    present = check_files({split: {BUCKET: manifest}}, folder, folder, strict=strict)
    return present[split][BUCKET]


def warn_of_arrivals(manifests: Manifests, data: DataPath, data_format: str, began: float) -> None:
    """Warn about files that arrived in a run's data folder after it `began` (seconds since the
    epoch). It does not read them. Files in object storage have no time of arrival."""
    if data.files:
        return
    known = set()
    for buckets in manifests.values():
        for manifest in buckets.values():
            known |= {as_path(manifest["root"]) / entry["name"] for entry in manifest["files"]}
    root = data.folder.resolve()
    arrived = []
    with contextlib.suppress(OSError, ValueError):  # the run does not read what is wrong here
        for file in list_files(data, data_format).data:
            is_known = root / file.relative_to(data.folder) in known
            if not is_known and file.stat().st_ctime > began:
                arrived.append(file)
    if arrived:
        log.warning(
            "%s: not reading %s that arrived after this run began: %s; to read them, start a new run "
            "(--model-tag)",
            data,
            counted(len(arrived), "file"),
            few(arrived, data.folder),
        )


def check_own_file(path: AnyPath, entry: Pin) -> None:
    """ValueError if the user's own file, from which a file was prepared, has changed; OSError if it
    is gone. Reads it, but prepares nothing."""
    _check_same(path, "size", entry["size"], path.stat().st_size, path.parent)
    _check_same(path, "hash", entry["footer"], hash_file(local_copy(path)), path.parent)


def _find_again(manifest: Manifest, folder: AnyPath | None) -> Manifest:
    """The manifest below another folder, if given. FileNotFoundError names a file that does not
    exist; ValueError one that is to be prepared, and has another size."""
    root = folder or as_path(manifest["root"])
    if isinstance(root, Remote):
        root = root.as_pinned(manifest["root"])
    new_root = str(root.resolve())

    def check_file(entry: Pin) -> None:
        """FileNotFoundError or ValueError, as above, for one file."""
        path = root / entry["name"]
        if not path.exists():
            raise FileNotFoundError(
                f"{path}: this run reads it, but it does not exist; restore it, or name the folder of all files (it "
                f"was {manifest['root']}) with --data-path (for validation: --val-path), or start a new run with "
                f"other data (--model-tag)"
            )
        if is_prepared(entry):  # do not prepare it only to find that it has changed
            _check_same(path, "size", entry["size"], path.stat().st_size, manifest["root"])

    root.is_dir()  # in object storage: one listing instead of a request per file
    for _ in each(check_file, manifest["files"]):
        pass
    return {**manifest, "root": new_root}


def _check_same(path: AnyPath, what: str, then: object, now: object, root: AnyPath | str) -> None:
    """ValueError if a pin of a file has changed. `root`: the folder in which the run read it."""
    if then != now:
        raise ValueError(
            f"{path}: it has changed since this run began ({what}: {then} then, {now} now), or this run read another "
            f"file of this name, in {root}; name that place with --data-path, restore the old file, or start a new "
            f"run (--model-tag)"
        )


def _compare(old_manifest: Manifest, manifest: Manifest) -> list[Pin]:
    """The entries of a manifest's files in their present state. ValueError names the first file
    that differs from the old manifest."""
    is_same_place = manifest["root"] == old_manifest["root"]
    field = manifest.get("text_field", TEXT_FIELD)

    def compare(old: Pin) -> Pin:
        """The present pin of a file, which is not opened if its store says that it is the same."""
        path = as_path(manifest["root"]) / old["name"]
        place = place_of(manifest, old)
        version = etag_of(place)
        is_same_object = is_same_place and version != {} and version.get("etag") == old.get("etag")
        is_same_bytes = "sha256" in version and version["sha256"] == old.get("sha256")
        if (is_same_object or is_same_bytes) and place.suffix == ".parquet":
            return old  # the object has not changed, so neither has its footer
        new = keep_groups(pin(place, old["name"], field), old)
        compared = ["size", "footer", "groups", "tokens"]
        if is_same_place:
            compared.append("etag")
        if "blocks" in old and "blocks" in new:  # object storage has none
            compared.append("blocks")
        for key in compared:
            what = "hash" if key == "footer" else key
            _check_same(path, what, old.get(key), new.get(key), old_manifest["root"])
        if "parquet" in old:
            new["parquet"] = old["parquet"]
        return new

    make_local_copies(
        place_of(manifest, entry).with_suffix(".idx")
        for entry in manifest["files"]
        if entry["name"].endswith(".bin")
    )
    return list(each(compare, manifest["files"]))
