"""
Checking pairs of .bin and .idx to the last byte, in blocks: what scripts.verify says of them.

    GPTS        entries    offsets ascend, prefixes are shorter than their entries, windows are no longer than said
    Megatron    sequences  each lies in .bin; documents are runs of them, one after another; none is empty
    both        ids        below the vocabulary; EOD at the end of a document and nowhere else; checksums, counts

A problem is a sentence that names file and place; of each kind a file tells some and counts the rest, and goes on: what
is wrong in one place says nothing of the others. Only an index that cannot be opened ends the check of its pair.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanochat.common import hash_file
from nanochat.indexed import Documents
from nanochat.pairs import blocks, open_entries, read_entries
from nanochat.places import local
from nanochat.readers import open_reader
from nanochat.shards import MANIFEST_NAME, Index

BLOCK_ENTRIES = 1 << 18
BLOCK_BYTES = 1 << 22
LISTED = 20  # problems of a kind that are told one by one for a file; the others are counted


@dataclass
class Problems:
    """What is wrong with one file."""

    path: Path
    lines: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, places: np.ndarray, tell: Callable[[int], str]) -> None:
        """Problems of one kind at some places (n,) int64; `tell` puts one into words."""
        seen = self.counts.get(kind, 0)
        self.counts[kind] = seen + len(places)
        self.lines += [f"{self.path}: {tell(place)}" for place in places[:max(0, LISTED - seen)].tolist()]

    def all(self) -> list[str]:
        more = [f"{self.path}: {kind}: {n - LISTED:,} more" for kind, n in self.counts.items() if n > LISTED]
        return self.lines + more


@dataclass(frozen=True)
class Expected:
    """What is known of a pair before it is read; None where nothing is."""

    record: dict[str, Any] | None = None  # in manifest.json
    max_length: int = 0  # ids of a window, 0 = no windows or not known
    vocab_size: int | None = None
    eod: int | None = None
    ends_follow: bool = False  # whether lengths and prefixes tell which entries end a document


@dataclass
class Facts:
    """What was counted in some pairs."""

    shards: int = 0
    documents: int = 0
    entries: int = 0
    tokens: int = 0
    beyond: int = 0  # tokens behind the first T + 1 of their entry
    entries_of_length: np.ndarray = field(default_factory=lambda: np.zeros(64, np.int64))  # [k]: 2**k and up
    tokens_of_length: np.ndarray = field(default_factory=lambda: np.zeros(64, np.int64))

    def __iadd__(self, other: "Facts") -> "Facts":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def count(self, lengths: np.ndarray, T: int) -> None:
        """Count entries by their lengths (n,)."""
        power = np.frexp(np.maximum(lengths, 1))[1] - 1
        self.entries += len(lengths)
        self.tokens += int(lengths.sum())
        self.beyond += int(np.maximum(lengths - (T + 1), 0).sum())
        self.entries_of_length += np.bincount(power, minlength=64)
        self.tokens_of_length += np.bincount(power, lengths, minlength=64).astype(np.int64)


# ---- one pair -------------------------------------------------------------------------------------------------------

def check_pair(path: Path, expected: Expected, T: int, bar: tqdm) -> tuple[Facts, list[str]]:
    """Count and check one pair, given by its .bin: (facts, problems)."""
    facts, problems = Facts(), Problems(path)
    try:
        index = open_entries(path)
        if isinstance(index, Documents):
            ascending = check_sequences(index, problems)
            bin_hash = check_ids(index, None, facts, problems, bar)
            check_documents(index, expected, facts, problems, T)
        else:
            assert isinstance(index, Index)
            ascending = check_entries(index, expected, facts, problems, T)
            bin_hash = check_ids(index, expected if ascending else None, facts, problems, bar)
        if expected.record is not None:
            found = {"entries": len(index), "tokens": index.num_tokens, "bin_bytes": path.stat().st_size,
                     "bin_hash": bin_hash, "idx_hash": hash_file(local(path.with_suffix(".idx"))),
                     **({"documents": facts.documents} if ascending else {})}
            compare_record(found, expected.record, problems)
    except (ValueError, OSError) as e:
        problems.lines.append(str(e))
        return Facts(), problems.all()
    facts.shards = 1
    return facts, problems.all()


def compare_record(found: dict[str, Any], record: dict[str, Any], problems: Problems) -> None:
    """Compare what was found in a pair with its record in manifest.json."""
    for key, value in found.items():
        if value != record[key]:
            problems.lines.append(f"{problems.path}: {key} is {value}, {MANIFEST_NAME} says {record[key]}")
    if record.get("groups") is not None and sum(record["groups"]) != found["entries"]:
        problems.lines.append(f"{problems.path}: the groups in {MANIFEST_NAME} hold {sum(record['groups']):,} "
                              f"entries, the file {found['entries']:,}")


def check_entries(index: Index, expected: Expected, facts: Facts, problems: Problems, T: int) -> bool:
    """Check what the index says by itself, in blocks of entries; False if offsets do not ascend."""
    ascending = True
    for first in range(0, len(index), BLOCK_ENTRIES):
        offsets = index.offsets[first:first + BLOCK_ENTRIES + 1]
        prefixes = index.prefixes[first:first + BLOCK_ENTRIES]
        lengths = np.diff(offsets)
        limit = np.where(ends_by_index(index, first, first + len(lengths)), 1, 0) + expected.max_length

        def places(wrong: np.ndarray, first: int = first) -> np.ndarray:
            return first + np.flatnonzero(wrong)

        def length(i: int) -> str:
            return f"{index.offsets[i + 1] - index.offsets[i]:,} ids"

        problems.add("offsets that run backwards", places(lengths < 0), lambda i:
                     f"entry {i:,}: it starts at id {index.offsets[i]:,} and ends at {index.offsets[i + 1]:,}")
        problems.add("empty entries", places(lengths == 0), lambda i: f"entry {i:,}: it is empty")
        problems.add("prefixes too long", places((prefixes >= lengths) & (lengths > 0)), lambda i:
                     f"entry {i:,}: a prefix of {index.prefixes[i]:,} in an entry of {length(i)}")
        if expected.max_length:
            problems.add("windows too long", places(lengths > limit), lambda i:
                         f"entry {i:,}: {length(i)}, but windows have at most {expected.max_length:,} and an "
                         f"end-of-document id")
        facts.count(lengths, T)
        ascending &= not (lengths < 0).any()
    problems.add("prefix of the first entry", np.flatnonzero(index.prefixes[:1]), lambda i:
                 f"entry 0: a prefix of {index.prefixes[0]:,}, but there is no entry before it")
    return ascending


def ends_by_index(index: Index, first: int, last: int) -> np.ndarray:
    """Whether entries [first, last) end a document as far as prefixes tell: (n,) bool."""
    followers = index.prefixes[first + 1:last + 1] == 0
    return followers if len(followers) == last - first else np.append(followers, True)


def check_ids(index: Any, expected: Expected | None, facts: Facts, problems: Problems, bar: tqdm) -> str:
    """Read .bin in blocks; gives back its checksum. Nothing but that if `expected` is None."""
    digest, at = hashlib.blake2b(digest_size=16), 0
    with index.path.open("rb") as f:
        eod = None if expected is None else last_id(f, index) if expected.eod is None else expected.eod
        while data := f.read(BLOCK_BYTES):
            digest.update(data)
            if expected is not None:
                ids = np.frombuffer(data, index.dtype)
                check_vocabulary(index, ids, at, expected.vocab_size, problems)
                facts.documents += check_ends(index, ids, at, eod, expected.ends_follow, problems)
            at += len(data) // index.dtype.itemsize
            bar.update(len(data))
    return digest.hexdigest()


def last_id(f: Any, index: Index) -> int | None:
    """The last id of a .bin, None if there is none."""
    size = index.dtype.itemsize
    f.seek(max(0, index.num_tokens - 1) * size)
    data = f.read(size)
    f.seek(0)
    return int.from_bytes(data, "little") if data else None


def entry_of(index: Index, places: np.ndarray) -> np.ndarray:
    """The entries that some ids belong to."""
    return np.searchsorted(index.offsets, places, side="right") - 1


def check_vocabulary(index: Index, ids: np.ndarray, at: int, vocab_size: int | None, problems: Problems) -> None:
    """Check the range of a block of ids, whose first is id `at` of the file."""
    if vocab_size is None or ids.max() < vocab_size:
        return
    wrong = at + np.flatnonzero(ids >= vocab_size)
    problems.add("ids outside the vocabulary", wrong, lambda place: (
        f"entry {entry_of(index, np.array(place)):,}: id {ids[place - at]:,} at {place:,}, outside the vocabulary of "
        f"{vocab_size:,}"))


def check_ends(index: Index, ids: np.ndarray, at: int, eod: int | None, ends_follow: bool, problems: Problems) -> int:
    """Check the end-of-document ids in a block of ids, whose first is id `at` of the file. Gives back how many
    documents end in it: entries that end with one and are not followed by more of the document."""
    ends = index.offsets[1:]
    first, last = np.searchsorted(ends, [at, at + len(ids)], side="right").tolist()
    by_index = ends_by_index(index, first, last)
    there = ends[first:last] > index.offsets[first:last]  # not an empty entry
    by_id = (ids[ends[first:last] - 1 - at] == eod) & there
    must = by_index & there if ends_follow else by_index & there & (np.arange(first, last) == len(index) - 1)
    problems.add("documents without an end", first + np.flatnonzero(must & ~by_id), lambda i:
                 f"entry {i:,}: the document ends here without the end-of-document id {eod}")
    if ends_follow:
        problems.add("ends inside documents", first + np.flatnonzero(by_id & ~by_index), lambda i:
                     f"entry {i:,}: it ends with the end-of-document id {eod}, but the next entry goes on with the "
                     f"document")
    places = at + np.flatnonzero(ids == eod)
    inside = places[index.offsets[entry_of(index, places) + 1] - 1 != places]
    problems.add("end-of-document ids inside entries", inside, lambda place:
                 f"entry {entry_of(index, np.array(place)):,}: the end-of-document id {eod} at {place:,}, inside the "
                 f"entry")
    return int((by_id & by_index).sum())


# ---- Megatron -------------------------------------------------------------------------------------------------------

def check_sequences(documents: Documents, problems: Problems) -> bool:
    """Check that each sequence lies in .bin and that the boundaries of documents ascend; False if not."""
    index, size = documents.index, documents.dtype.itemsize
    for first in range(0, len(index), BLOCK_ENTRIES):
        lengths = index.sequence_lengths[first:first + BLOCK_ENTRIES].astype(np.int64)
        pointers = index.sequence_pointers[first:first + BLOCK_ENTRIES]
        wrong = (lengths < 0) | (pointers < 0) | (pointers > documents.file_bytes - lengths * size)
        problems.add("sequences outside the file", first + np.flatnonzero(wrong), lambda i:
                     f"sequence {i:,}: {index.sequence_lengths[i]:,} ids at byte {index.sequence_pointers[i]:,} of "
                     f"{documents.file_bytes:,}")
        problems.add("sequences between ids", first + np.flatnonzero(pointers % size), lambda i:
                     f"sequence {i:,}: byte {index.sequence_pointers[i]:,} is no multiple of {size}")
    for first in range(0, len(documents), BLOCK_ENTRIES):
        edges = index.document_indices[first:first + BLOCK_ENTRIES + 1]
        wrong = (edges[1:] < edges[:-1]) | (edges[:-1] < 0) | (edges[1:] > len(index))
        problems.add("boundaries that run backwards", first + np.flatnonzero(wrong), lambda i:
                     f"document {i:,}: its sequences are {index.document_indices[i]:,} to "
                     f"{index.document_indices[i + 1]:,} of {len(index):,}")
    return not problems.counts


def check_documents(documents: Documents, expected: Expected, facts: Facts, problems: Problems, T: int) -> None:
    """Count documents and check their ids, some at a time; those that cannot be read were told before."""
    reader = open_reader(documents.path, documents.dtype)
    for first, last in blocks(documents):
        try:
            ids, starts, ends = read_entries(documents, reader, first, last)
        except ValueError:
            continue
        lengths = ends - starts
        facts.count(lengths, T)
        facts.documents += last - first
        problems.add("empty documents", first + np.flatnonzero(lengths == 0), lambda i: f"document {i:,}: it is empty")
        check_document_ids(documents, first, ids, (starts, ends), expected, problems)
    reader.close()


def check_document_ids(documents: Documents, first: int, ids: np.ndarray, spans: tuple[np.ndarray, np.ndarray],
                       expected: Expected, problems: Problems) -> None:
    """Check the ids of documents from number `first` on, which lie in `ids` as `spans` say."""
    starts, ends = spans

    def tell(what: str, why: str) -> Callable[[int], str]:
        def told(at: int) -> str:
            owner = int(np.searchsorted(ends, at, side="right"))
            return f"document {first + owner:,}: {what} {ids[at]:,} at {at - starts[owner]:,}, {why}"
        return told

    bound = 1 << 31 if expected.vocab_size is None else expected.vocab_size
    problems.add("ids outside the vocabulary", np.flatnonzero((ids < 0) | (ids >= bound)),
                 tell("id", f"outside the vocabulary of {bound:,}"))
    if expected.eod is None:
        return
    full = np.flatnonzero(ends > starts)
    closed = ids[ends[full] - 1] == expected.eod
    if expected.ends_follow:
        problems.add("documents without an end", first + full[~closed], lambda i:
                     f"document {i:,}: it ends without the end-of-document id {expected.eod}")
    inside = ids == expected.eod
    inside[ends[full] - 1] = False
    problems.add("end-of-document ids inside documents", np.flatnonzero(inside),
                 tell("the end-of-document id", "inside the document"))
