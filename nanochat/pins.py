"""Pins: what a run stores about the files that it reads, in RUN/data_manifest.json.

    {"train": {BUCKET: MANIFEST, ...}, "val": {BUCKET: MANIFEST, ...}}
    MANIFEST    {"root": "/disk/set", "files": [PIN, ...]}, and what selects some of the documents
    PIN         {"name": "web/a.parquet", "size": 812345, "footer": a hash, "groups": [1000, 1000, 37], ...}

A run must always see the same files. `sources.scan_all` pins them when it starts, and
`sources.check_files` compares them when it resumes: if a file has changed or vanished, an error names
it. Files that arrive later are not pinned, so the stream ignores them.

**What is hashed.** Hashing whole files at each start would take hours on large data sets. The footer
of a parquet file holds offsets, sizes and statistics of every column chunk, so a rewritten file has a
different footer. An object is also known by its ETag, which is compared only if the root is the same,
because a different storage service gives the same bytes a different ETag. On the Hub, the root names
the commit, and each file's SHA-256 is known without reading it.

**Prepared text** (nanochat/prepare.py) is pinned under the name, size and hash of the user's own
file. Its pin also holds "parquet", the file that is read instead. That is a place on one machine:
where it does not exist, it is prepared again, and compared.

**Token files** have groups and an estimate of tokens in the manifest.json beside them, if there is
one when the run begins. They decide the order of documents, but are not in the files themselves. So the
run keeps those that it began with (`keep_groups`), even if that manifest.json appears, changes or goes.

**Fingerprint.** A hash of the contents of a bucket's files, wherever they are. It is part of every
checkpoint: a run resumes only with the same data.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np

from nanochat.common import (
    AnyPath,
    as_path,
    can_be_path,
    check_shape,
    hash_json,
    local_copy,
    read_json,
)
from nanochat.text import Selected, Selection, text_tokens

DATA_MANIFEST = "data_manifest.json"  # in the run directory
KINDS = {"train": "training", "val": "validation"}  # of files, by their split


# ---- the records ---------------------------------------------------------------------------------


class Pin(TypedDict):
    """A file of a manifest."""

    name: str  # relative to the root
    size: int
    footer: str  # a hash
    groups: list[int]  # number of documents in each
    tokens: NotRequired[int]  # an estimate, if `size` gives none
    etag: NotRequired[str]  # of an object
    sha256: NotRequired[str]  # of its bytes, if the server that has it says so
    blocks: NotRequired[str]  # a hash of a few blocks of a .bin
    parquet: NotRequired[str]  # the prepared file; "" if it is not prepared yet
    # while it is scanned: their number; None: the footer does not say
    nulls: NotRequired[int | None]


class JoinedFiles(TypedDict):
    """Files that joined a bucket in a fork; see `nanochat.fork`."""

    files: int  # number of the files before them
    begins: list[list[int]]  # see `nanochat.order.Joined`


class Manifest(Selected):
    """The files of a bucket, and which documents of text are read. They may move to another root."""

    root: str
    files: list[Pin]
    without: NotRequired[dict[str, list[int] | None]]  # see `leave_out`
    joined: NotRequired[list[JoinedFiles]]
    documents: NotRequired[list[int]]  # [first, end): the only ones that are read


Manifests = dict[str, dict[str, Manifest]]  # {"train": {bucket: manifest}, "val": {...}}
PIN = {"name": str, "size": int, "footer": str, "groups": [int]}
PINNED = {"root": str, "files": [PIN]}


def not_pinned_yet(name: str) -> Pin:
    """The pin of a file that is to be prepared."""
    return {"name": name, "parquet": "", "size": 0, "footer": "", "groups": []}


def is_prepared(entry: Pin) -> bool:
    """Whether a run reads a file as prepared parquet."""
    return "parquet" in entry


def place_of(manifest: Manifest, entry: Pin) -> AnyPath:
    """The file that is read for an entry of a manifest."""
    return as_path(entry.get("parquet") or as_path(manifest["root"]) / entry["name"])


def counts_and_means(manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """(number of documents in each group, their estimated mean length in tokens) of a manifest, in
    the order of files, each (G,) int64. The mean is that of the group's file."""
    counts, means = [], []
    for entry in manifest["files"]:
        of_file = np.array(entry["groups"], np.int64)
        documents = max(1, int(of_file.sum()))
        tokens = entry.get("tokens", text_tokens(entry["size"], documents))
        counts.append(of_file)
        means.append(np.full(len(of_file), max(1, tokens // documents)))
    return np.concatenate(counts), np.concatenate(means)


def pins_of(entry: Pin) -> list[object]:
    """What a file must keep for a run to read it."""
    return [entry["size"], entry["footer"], entry["groups"], entry.get("tokens")]


def contents_of(entry: Pin) -> tuple[int, str]:
    """What identifies the content of a file under any name: its size and hash."""
    return entry["size"], entry["footer"]


def keep_groups(pin: Pin, old: Pin) -> Pin:
    """The present pin of a pair of token files with the groups and the estimate of an older pin of
    the same bytes; the pin of any other file as it is."""
    if not old["name"].endswith(".bin") or contents_of(pin) != contents_of(old):
        return pin
    kept = pin.copy()
    kept["groups"] = old["groups"]
    if "tokens" in old:
        kept["tokens"] = old["tokens"]
    return kept


def fingerprint(manifest: Manifest) -> str:
    """A hash of the contents of a manifest's files, independent of their location, and of the
    options that select their documents."""
    pins: list[object] = [pins_of(entry) for entry in manifest["files"]]
    pins += manifest.get("joined", [])
    pins += Selection.of(manifest).hashed()
    return hash_json(pins)


class FileGaps(NamedTuple):
    """How the files of two runs differ."""

    differ: list[str]  # names of files that both have, with other contents
    alone: dict[str, list[str]]  # {"training files that only a has": names}
    renamed: list[str]  # "NAME is OTHER NAME": the same content; names decide the order of files

    @property
    def first(self) -> str:
        """The first file that differs; without one, what else selects the documents."""
        if self.differ:
            return f"{self.differ[0]} differs"
        for names in self.alone.values():
            return f"only one of them has {names[0]}"
        if self.renamed:
            return f"{self.renamed[0]} there"
        return (
            "other documents of the same files, or in another order (a list, an option that selects them, or the "
            "manifest.json of token files)"
        )


def compare_files(a: Manifests, b: Manifests) -> FileGaps:
    """How the files of two runs differ, those for training first."""
    first = _contents_of_all(a)
    second = _contents_of_all(b)
    new: dict[
        tuple[str, object], list[str]
    ] = {}  # {(split, content): names} of b, otherwise than in a
    for (split, name), content in sorted(second.items() - first.items()):
        new.setdefault((split, content), []).append(name)
    differ: dict[str, None] = {}  # with --val-fraction, a file is in both splits
    renamed: dict[str, None] = {}
    alone: dict[str, list[str]] = {}

    # what a has: in b it is the same file under another name, another file, or missing
    for (split, name), content in sorted(first.items() - second.items()):
        names = new.get((split, content))
        if names:
            renamed[f"{name} is {names.pop(0)}"] = None
        elif (split, name) in second:
            differ[name] = None
        else:
            alone.setdefault(f"{KINDS[split]} files that only a has", []).append(name)

    # what only b has, perhaps under the name of a file that it renamed
    for (kind, _), names in new.items():
        for name in names:
            if (kind, name) in first:
                differ[name] = None
            else:
                alone.setdefault(f"{KINDS[kind]} files that only b has", []).append(name)
    return FileGaps([*differ], alone, [*renamed])


def _contents_of_all(manifests: Manifests) -> dict[tuple[str, str], tuple[int, str]]:
    """{(split, name): content} of the files of a run."""
    contents = {}
    for split, buckets in manifests.items():
        for manifest in buckets.values():
            for entry in manifest["files"]:
                contents[split, entry["name"]] = contents_of(entry)
    return contents


def trains_on_same(a: Manifests, b: Manifests) -> bool:
    """Whether two runs train on the same documents, in files of the same order."""
    return _training_of(a) == _training_of(b)


def _training_of(manifests: Manifests) -> dict[str, object]:
    """{bucket: what decides its documents and which of them count in the loss}."""
    buckets = manifests["train"]
    return {name: (fingerprint(m), m.get("without", {})) for name, m in buckets.items()}


# ---- on disk -------------------------------------------------------------------------------------


def read_manifests(path: Path) -> Manifests:
    """The manifests in a run's data_manifest.json; {} if the file does not exist. ValueError if it
    is corrupt."""
    if not path.exists():
        return {}
    remedy = "restore the file, or start a new run (--model-tag)"
    manifests = read_json(path, {"train": dict, "val": dict}, remedy=remedy)
    for split in ("train", "val"):
        where = f"{path}: {split}"
        check_shape(manifests[split], dict.fromkeys(manifests[split], PINNED), where)
        for manifest in manifests[split].values():
            if not manifest["files"]:
                raise ValueError(f"{where}: a bucket has no files; {remedy}")
            for named in (manifest["root"], *(entry["name"] for entry in manifest["files"])):
                if not can_be_path(named):
                    raise ValueError(f"{where}: {named!a:.80} cannot be a path; {remedy}")
            _check_without(manifest, where, remedy)
    return manifests


def _check_without(manifest: Manifest, where: str, remedy: str) -> None:
    """ValueError unless `without` lists documents of the manifest's files."""
    counts = {entry["name"]: sum(entry["groups"]) for entry in manifest["files"]}
    for name, rows in manifest.get("without", {}).items():
        if rows is None:  # all of the file's
            continue
        check_shape(rows, [int], f"{where}: without: {name}")
        if any(not 0 <= row < counts.get(name, 0) for row in rows):
            raise ValueError(f"{where}: `without` lists a document that does not exist; {remedy}")


def bare(buckets: Mapping[str, Manifest]) -> dict[str, Manifest]:
    """The manifests without the lists of documents that are left out."""
    all_of_it = {bucket: manifest.copy() for bucket, manifest in buckets.items()}
    for manifest in all_of_it.values():
        manifest.pop("without", None)
    return all_of_it


class Listed(NamedTuple):
    """A line of a list of documents that are left out."""

    file: str
    row: int | None  # None: all of the file's


def _parse_line(line: str, counts: Mapping[str, int], where: str) -> Listed:
    """A line FILE:DOC or FILE:*. `counts`: {file: its documents}. ValueError, which begins with
    `where`, if there is no such document."""
    name, _, row = line.rpartition(":")
    names_documents = row == "*" or row.isdecimal()
    if name not in counts or not names_documents:
        raise ValueError(
            f"{where}: expected FILE:DOC or FILE:*, where FILE is a training file such as {next(iter(counts))}, and "
            f"DOC counts its documents from 0; remove the line, or make the list again with scripts.validate "
            f"--decontaminate"
        )
    if row == "*":
        return Listed(name, None)
    if int(row) >= counts[name]:
        raise ValueError(
            f"{where}: the file has documents 0 to {counts[name] - 1}; name one of them"
        )
    return Listed(name, int(row))


# in a list of documents, the version of a file: "of" one that has some of them; "searched" if all of
# its documents were searched, even if none is listed
VERSION_LINE = re.compile(r"\s*# (?P<what>of|searched) (?P<name>.+), version (?P<footer>\w+)\s*")


def version_line(what: str, name: str, footer: str) -> str:
    """A `VERSION_LINE`."""
    return f"# {what} {name}, version {footer}"


def searched_in(lines: Iterable[str]) -> set[str]:
    """The names of the files that were searched for a list of documents. Lists that were not made by
    a search name none, and neither do those of older code."""
    stated = map(VERSION_LINE.fullmatch, lines)
    return {line["name"] for line in stated if line and line["what"] == "searched"}


def not_searched(buckets: Mapping[str, Manifest], list_path: AnyPath | str) -> list[str]:
    """The names of the training files that were not searched for a list of documents; none if the
    list does not say which were, or no longer exists."""
    try:
        lines = local_copy(as_path(list_path)).read_text("utf-8-sig").splitlines()
    except FileNotFoundError:
        return []
    searched = searched_in(lines)
    return [name for name in versions_of(buckets) if searched and name not in searched]


def versions_of(buckets: Mapping[str, Manifest]) -> dict[str, str]:
    """{name: footer} of the files of all buckets; of two with the same name, that of the first."""
    versions: dict[str, str] = {}
    for manifest in buckets.values():
        for entry in manifest["files"]:
            versions.setdefault(entry["name"], entry["footer"])
    return versions


def leave_out(buckets: Mapping[str, Manifest], list_path: AnyPath | str) -> dict[str, Manifest]:
    """Turn off the targets of the documents that a text file lists: the training manifests get
    "without": {file: numbers of documents}, where None means all of them. Blank lines and lines
    that begin with # are skipped, but for each `VERSION_LINE`. ValueError names a line without a
    training document, and a file that is another version than the list's."""
    counts: dict[str, int] = {}
    bucket_of: dict[str, str] = {}  # the first bucket with a file of this name
    for bucket, manifest in buckets.items():
        for entry in manifest["files"]:
            name = entry["name"]
            if name not in counts:
                counts[name] = sum(entry["groups"])
                bucket_of[name] = bucket
    versions = versions_of(buckets)

    listed: dict[str, set[int] | None] = {}
    try:
        lines = local_copy(as_path(list_path)).read_text("utf-8-sig").splitlines()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"--without-documents={list_path}: no such file; restore it, or name another list"
        ) from None
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        stated = VERSION_LINE.fullmatch(line)
        if stated and versions.get(stated["name"], stated["footer"]) != stated["footer"]:
            raise ValueError(
                f"{list_path}: line {number}: the list was made for another version of {stated['name']}, which "
                f"has other documents; make a new one with scripts.validate --decontaminate"
            )
        if not line or line.startswith("#"):
            continue
        name, row = _parse_line(line, counts, f"{list_path}: line {number}: {line}")
        if row is None:
            listed[name] = None
            continue
        rows = listed.setdefault(name, set())
        if rows is not None:
            rows.add(row)

    reduced = {bucket: manifest.copy() for bucket, manifest in buckets.items()}
    for name, rows in listed.items():
        without = reduced[bucket_of[name]].setdefault("without", {})
        without[name] = None if rows is None else sorted(rows)
    return reduced
