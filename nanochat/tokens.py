"""
Token files: the ids of many documents, written once and memory-mapped by training.

A token file is a pair. The .bin holds only ids, and the .idx says where each *entry* begins. The
.idx has one of two formats. This module reads both, so that no other module needs to know which one
a pair has; nanochat/pretokenize.py writes them. A run imports this module when it meets the first
.bin file.

    web.bin     t t t t E t t E t t t t t t t t E      ids, one after another; E ends a document

    GPTS        "GPTS" | version 1 | type | entries n          16 bytes, u32 each
    web.idx     0 5 8 12 17     offsets     (n + 1) int64      where entries start, and the end
                0 0 0 1         prefixes    n uint16           how many ids at the start are repeated

    Megatron    "MMIDIDX\\0\\0" | u64 version 1 | u8 type | u64 sequences n | u64 boundaries d + 1
    web.idx     5 3 4 5         lengths     n int32            ids of each sequence
                0 10 16 24      pointers    n int64            the byte of .bin where each begins
                0 1 2 4         boundaries  (d + 1) int64      where documents start, in sequences
                0 0 1 0         modes       n int8             of multimodal data; most pairs have none

An entry of GPTS is a document, or one of the windows that a long document was cut into. A later
window repeats some ids of the one before it. (Above, the third document is two windows; the second
has a prefix of 1.) An entry of Megatron's format is a document, and its sequences may be anywhere
in the .bin. All numbers are little-endian. The formats come from gpt-simple 0.1.2 and
megatron-core: this module reads files of both programs, and both read ours. A manifest.json in a
folder of pairs names the tokenizer that made them.

**Opening** checks the header, the sizes, and the first and last offset (or boundary and sequence),
so it takes as long for a billion entries as for ten. The rest is checked when it is used. If the
last sequence does not end where the .bin ends, all sequences are checked: one beyond the end is an
error.

**Which entries end a document?** If the manifest shows that every later window has a prefix, no ids
are read: an entry ends its document when the next one has no prefix. Otherwise an entry ends its
document if its last id is E.

**Two readers** return the elements of a file: a memory map for local files, and
integrations/object_storage.py for remote ones. If a mapped file is truncated during a run, SIGBUS
ends the process.
"""

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from nanochat.common import (
    AnyPath,
    Remote,
    as_path,
    check_shape,
    hash_bytes,
    local_copy,
    read_json,
)
from nanochat.files import MAGICS, MANIFEST_NAME, RECORDS
from nanochat.pins import Pin
from nanochat.text import text_tokens, warn_once

HEADERS = {"shards": struct.Struct("<4sIII"), "megatron": struct.Struct("<9sQBQQ")}
# of the ids, by the code in the header; Megatron's 6 and 7 are floating point, so they cannot be
# ids
DTYPES = {
    "shards": {2: "<u2", 4: "<u4"},
    "megatron": {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"},
}
GROUP_ENTRIES = 1024  # entries per group, unless the manifest lists the groups
EDGE_BYTES = 1 << 16  # bytes hashed at each end of an .idx
BLOCKS, BLOCK_BYTES = 16, 4096  # evenly spaced blocks of a .bin, hashed
REDO = "fetch it again, or delete it and rerun scripts.tok_shards"
CHECKED_ROWS = 1 << 20  # rows of an index that are checked at once
VERIFY = f"list such places with python -m scripts.verify PATH; then {REDO}"


def pair_paths(prefix: AnyPath | str) -> tuple[AnyPath, AnyPath]:
    """(.bin, .idx) of a path without extension. The path may contain dots."""
    prefix = as_path(prefix)
    return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")


# ---- readers ------------------------------------------------------------------------------------


class Reader(Protocol):
    """The elements of one file, as read-only arrays. May be used from several threads at once."""

    def read(self, begin: int, end: int) -> np.ndarray:
        """Elements begin .. end - 1. ValueError or OSError names a file that cannot be read."""

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """`read` of each range (begin, end), in order."""
        return [self.read(begin, end) for begin, end in ranges]


class MappedReader(Reader):
    """A memory map. Arrays are views of it."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path = path
        self.dtype = dtype
        with pa.memory_map(str(path), "r") as f:  # unlike mmap, it keeps no file descriptor open
            data = f.read_buffer()
        self._elements = np.frombuffer(data, dtype, data.size // dtype.itemsize)

    def __reduce__(self) -> Any:
        return MappedReader, (self.path, self.dtype)  # another process maps the file itself

    def read(self, begin: int, end: int) -> np.ndarray:
        return self._elements[begin:end]


# ---- an open pair -------------------------------------------------------------------------------


class Table(NamedTuple):
    """Where a table of an .idx is."""

    dtype: np.dtype
    at: int  # its first byte
    rows: int


class Flat(NamedTuple):
    """The ids of consecutive entries, one entry after another."""

    ids: np.ndarray
    edges: np.ndarray  # (n + 1,) int64: entry k of them is ids[edges[k]:edges[k + 1]]


def _size(path: AnyPath) -> int:
    """The bytes of one file of a pair."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: the file is missing; if its .bin is nanoGPT's or llm.c's, run scripts.convert_shards; else "
            f"restore it, or delete the pair and rerun scripts.tok_shards, or start a new run (--model-tag)"
        ) from None


class TokenFile:
    """An open pair: `len` entries of ids.

    All methods may be called from several threads at once. They raise ValueError, which names the
    file and the entry, for corrupt data. `vocab_size`: reading an id outside it is an error.
    `open_local`: makes the reader of a local file from its path and the type of its elements.
    `cache`: where the local copy of a remote .idx goes, see `common.local_copy`.
    """

    def __init__(
        self,
        path: AnyPath | str,
        *,
        vocab_size: int | None = None,
        open_local: Callable[[Path, np.dtype], Reader] = MappedReader,
        cache: Path | str | None = None,
    ):
        self.path = as_path(path).with_suffix(".bin")
        self.idx_path = self.path.with_suffix(".idx")
        self.vocab_size = vocab_size
        self.idx_bytes = _size(self.idx_path)
        self.num_bytes = _size(self.path)
        self._index = open_local(local_copy(self.idx_path, cache), np.dtype(np.uint8))
        self.tables: dict[str, Table] = {}
        self._read_header()
        self.reader: Reader
        if isinstance(self.path, Remote):
            self.reader = self.path.open_reader(self.dtype)
        else:
            self.reader = open_local(self.path, self.dtype)
        self.num_tokens = self.num_bytes // self.dtype.itemsize
        if vocab_size is not None and vocab_size - 1 > np.iinfo(self.dtype).max:
            raise ValueError(
                f"{self.path}: its ids are {self.dtype.name}, too small for a vocabulary of "
                f"{vocab_size:,}, so another tokenizer made them; name that one with --tokenizer"
            )
        # the table that says where entries begin, counted in tokens or in sequences
        if self.format == "shards":
            self._edges = "offsets"
            unit = "tokens"
            total = self.num_bytes / self.dtype.itemsize
        else:
            self._edges = "boundaries"
            unit = "sequences"
            total = self.tables["lengths"].rows
        [first] = self.table(self._edges, 0, 1)
        [last] = self.table(self._edges, len(self))
        if first != 0 or last != total:
            raise ValueError(
                f"{self.path}: {total:,.10g} {unit} on disk, but the {self._edges} in its .idx go from "
                f"{first:,} to {last:,}; {REDO}"
            )
        self._last_edge = int(total)
        if self.format == "megatron":
            self._check_end()

    def _check_end(self) -> None:
        """ValueError if a sequence of a Megatron pair lies beyond the end of the .bin.

        A warning if the .bin continues after the last sequence. Usually the last entry of the index
        shows that neither is the case; only otherwise, all entries are read.
        """
        rows = self.tables["lengths"].rows
        end = 0
        if rows:
            end = int(self._ends(rows - 1, rows)[0])
        if end == self.num_bytes:
            return

        # read all of the index
        for first in range(0, rows, CHECKED_ROWS):
            ends = self._ends(first, min(first + CHECKED_ROWS, rows))
            if ends.max() > self.num_bytes:
                at = int(np.argmax(ends > self.num_bytes))
                raise ValueError(
                    f"{self.path}: {self.num_bytes:,} bytes on disk, but sequence {first + at:,} of its "
                    f".idx ends at byte {ends[at]:,}, so the file is truncated, or the .idx belongs to "
                    f"another file; {REDO}"
                )
            end = max(end, int(ends.max()))
        if end < self.num_bytes:
            warn_once(
                f"{self.path}: {self.num_bytes} bytes on disk, but the sequences of its .idx end at byte {end}, so the "
                f"rest is not read; if the two files do not belong together, fetch them again"
            )

    def _ends(self, first: int, last: int) -> np.ndarray:
        """(n,) int64: the byte of the .bin after each of some of a Megatron pair's sequences.

        Unchecked.
        """
        lengths = self.table("lengths", first, last).astype(np.int64)
        return self.table("pointers", first, last) + lengths * self.dtype.itemsize

    def _read_header(self) -> None:
        """Read format, id type and tables from the header.

        ValueError if it is unknown or contradicts the file's size.
        """
        head = self._index.read(0, min(self.idx_bytes, HEADERS["megatron"].size)).tobytes()
        expected = "the header of an index of token ids, version 1"
        try:
            self.format = next(name for name, magic in MAGICS.items() if head.startswith(magic))
            header = HEADERS[self.format]
            _, version, code, n, *boundaries = header.unpack_from(head)
            self.dtype = np.dtype(DTYPES[self.format][code])

            # the tables that follow the header: name, type, rows
            if self.format == "shards":
                self._len = n
                columns = [("offsets", "<i8", n + 1), ("prefixes", "<u2", n)]
            else:
                [edges] = boundaries
                self._len = edges - 1
                columns = [
                    ("lengths", "<i4", n),
                    ("pointers", "<i8", n),
                    ("boundaries", "<i8", edges),
                ]
                bytes_with_modes = header.size + 13 * n + 8 * edges
                if n and self.idx_bytes == bytes_with_modes:
                    columns.append(("modes", "i1", n))
            at = header.size
            for name, dtype, rows in columns:
                table = Table(np.dtype(dtype), at, rows)
                self.tables[name] = table
                at += rows * table.dtype.itemsize

            expected = f"{at:,} bytes for {self._len:,} entries"
            good = version == 1 and at == self.idx_bytes and self._len >= 0
        except (StopIteration, KeyError, struct.error):
            good = False
        if not good:
            raise ValueError(
                f"{self.idx_path}: {self.idx_bytes:,} bytes that begin with {head[:16]!r}, expected "
                f"{expected}; it is truncated or another kind of file: {REDO}"
            )

    def __len__(self) -> int:
        return self._len

    def table(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows first .. last - 1 (default: all) of a table of the .idx, unchecked."""
        dtype, at, rows = self.tables[name]
        if last is None:
            last = rows
        begin = at + first * dtype.itemsize
        end = at + last * dtype.itemsize
        return self._index.read(begin, end).view(dtype)

    # -- where entries are

    def spans(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where entries first .. last - 1 are in the .bin: (begins, ends, edges).

        begins, ends (s,) int64: the spans, counted in ids. edges (last - first + 1,) int64: entry
        first + k consists of spans edges[k] .. edges[k + 1] - 1, one after another.
        """
        edges = self.table(self._edges, first, last + 1)
        is_outside = edges[0] < 0 or edges[-1] > self._last_edge
        if is_outside or (edges[1:] < edges[:-1]).any():
            raise ValueError(
                f"{self.idx_path}: the {self._edges} of entries {first:,} to {last:,} run backwards, or "
                f"beyond the end; {VERIFY}"
            )
        if self.format == "shards":
            return edges[:-1], edges[1:], np.arange(len(edges))
        numbers = np.arange(edges[0], edges[-1])
        lengths = self.table("lengths", edges[0], edges[-1]).astype(np.int64)
        begins = self.places(numbers, self.table("pointers", edges[0], edges[-1]), lengths)
        return begins, begins + lengths, edges - edges[0]

    def places(self, numbers: np.ndarray, pointers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Where some sequences of a Megatron pair begin, counted in ids, (n,) int64.

        `pointers` and `lengths` are their rows of the tables. ValueError for a sequence that is not
        inside the .bin.
        """
        size = self.dtype.itemsize
        beyond = pointers > self.num_bytes - lengths * size
        wrong = (pointers < 0) | (lengths < 0) | beyond | (pointers % size != 0)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(
                f"{self.idx_path}: sequence {numbers[at]:,} has {lengths[at]:,} ids at byte "
                f"{pointers[at]:,}, which is not a valid place in its .bin of {self.num_bytes:,} bytes; "
                f"{VERIFY}"
            )
        return pointers // size

    def lengths(self, first: int, last: int) -> np.ndarray:
        """Number of ids in each entry first .. last - 1, (n,) int64. Reads no ids."""
        begins, ends, edges = self.spans(first, last)
        return np.diff(to_offsets(ends - begins)[edges])

    def prefixes(self, first: int, last: int) -> np.ndarray:
        """How many ids at the start of each entry first .. last - 1 repeat the previous one.

        (n,) uint16. Reads no ids.
        """
        if self.format == "megatron":
            return np.zeros(last - first, np.uint16)
        prefixes = self.table("prefixes", first, last)
        lengths = self.lengths(first, last)
        if (prefixes > lengths).any():
            at = int(np.argmax(prefixes > lengths))
            raise ValueError(
                f"{self.idx_path}: entry {first + at:,} is shorter than its prefix ({lengths[at]:,} ids, "
                f"{prefixes[at]:,} repeated); {VERIFY}"
            )
        return prefixes

    # -- ids

    def read_flat(self, first: int, last: int) -> Flat:
        """The ids of entries first .. last - 1.

        From a memory map, they are a view if the entries are stored one after another.
        """
        begins, ends, edges = self.spans(first, last)
        is_one_piece = len(begins) > 0 and (begins[1:] == ends[:-1]).all()
        if is_one_piece:
            ids = self.reader.read(int(begins[0]), int(ends[-1]))
        else:
            parts = self.reader.read_many(list(zip(begins.tolist(), ends.tolist())))
            ids = np.concatenate([np.empty(0, self.dtype), *parts])
        edges = to_offsets(ends - begins)[edges]
        self.check_ids(ids, edges, first)
        return Flat(ids, edges)

    def check_ids(
        self, ids: np.ndarray, edges: Sequence[int] | np.ndarray, first: int, kind: str = "entry"
    ) -> None:
        """ValueError for an id outside the vocabulary, if that is known.

        ids[edges[k]:edges[k + 1]] belong to entry first + k. `kind`: the word for an entry in the
        error.
        """
        if self.vocab_size is None:
            return
        unsigned = ids.view(f"u{ids.itemsize}")  # an id below zero becomes a huge one
        if unsigned.max(initial=0) >= self.vocab_size:
            at = int(np.argmax(unsigned >= self.vocab_size))
            number = first + int(np.searchsorted(edges, at, side="right")) - 1
            raise ValueError(
                f"{self.path}: {kind} {number:,} holds the id {ids[at]:,}, outside the vocabulary of "
                f"{self.vocab_size:,}; name the tokenizer that made the file with --tokenizer, or {VERIFY}"
            )

    def read(self, first: int, last: int) -> list[np.ndarray]:
        """Entries first .. last - 1 as they are stored, each (n,): views of one array."""
        ids, edges = self.read_flat(first, last)
        return [ids[a:b] for a, b in pairwise(edges.tolist())]

    # -- documents, as the stream reads them

    @functools.cached_property
    def manifest(self) -> dict[str, Any] | None:
        """`read_manifest` of the folder."""
        return read_manifest(self.path.parent)

    @property
    def record(self) -> dict[str, Any] | None:
        """The pair's record in manifest.json; None if there is no manifest, or no such record."""
        if self.manifest is None:
            return None
        return self.manifest["shards"].get(self.path.stem)

    @functools.cached_property
    def ends_follow(self) -> bool:
        """Whether the index alone shows which entries end a document.

        So it is if there are no windows, or if each later window has a prefix.
        """
        if self.manifest is None or self.record is None:
            return False
        arguments = self.manifest["arguments"]
        return arguments["max_length"] == 0 or arguments["overlap_size"] > 0

    def ends_document(
        self, first: int, last: int, eod: int, flat: Flat | None = None
    ) -> np.ndarray:
        """Which of entries first .. last - 1 end a document, with the id `eod`.

        (n,) bool, False for an empty entry. Ids are read only if the index does not decide. `flat`:
        the result of `read_flat` for these entries, if the caller has it.
        """
        if self.ends_follow:
            # an entry ends its document if the next one repeats nothing; the file's last entry does
            following = self.prefixes(first + 1, min(last + 1, len(self)))
            ends = self.lengths(first, last) > 0
            ends[: len(following)] &= following == 0
            return ends
        # it does if its last id is EOD
        if flat is None:
            flat = self.read_flat(first, last)
        stops = flat.edges[1:]
        ends = stops > flat.edges[:-1]
        ends[ends] = flat.ids[stops[ends] - 1] == eod
        return ends

    def documents(self, first: int, last: int, eod: int) -> list[np.ndarray]:
        """Entries first .. last - 1 as documents of the stream, each (n,), a new array.

        BOS, which is the same id as EOD, is prepended, and EOD is dropped.
        """
        flat = self.read_flat(first, last)
        begins = flat.edges[:-1]
        stops = flat.edges[1:] - self.ends_document(first, last, eod, flat)
        bos = np.array([eod], self.dtype)
        spans = zip(begins.tolist(), stops.tolist())
        return [np.concatenate((bos, flat.ids[a:b])) for a, b in spans]

    def document_lengths(self, first: int, last: int, eod: int) -> np.ndarray:
        """The lengths of `documents`, (n,) int64."""
        return self.lengths(first, last) - self.ends_document(first, last, eod) + 1

    # -- the whole file

    def _check_record(self, record: Mapping[str, Any], groups: Sequence[int]) -> None:
        """ValueError unless the pair is the one that its record describes."""
        found = {"entries": len(self), "tokens": self.num_tokens, "bin_bytes": self.num_bytes}
        for key, value in found.items():
            if record.get(key, value) != value:
                raise ValueError(
                    f"{self.path}: {key} is {value:,}, but {MANIFEST_NAME} says {record[key]:,}; {REDO}"
                )
        if min(groups, default=1) < 1 or sum(groups) != len(self):
            raise ValueError(
                f"{self.path}: the groups in {MANIFEST_NAME} have {groups!r:.80} entries, expected "
                f"numbers that add up to {len(self):,}; {REDO}"
            )

    def pin(self, name: str) -> Pin:
        """What a run stores to pin the pair.

        "size" is that of the .bin. "footer" hashes size, header and both ends of the .idx, and
        "blocks" a few blocks of the .bin; a remote pair has the "etag" of the .bin instead.
        ValueError if the pair differs from its record in manifest.json.
        """
        record = self.record or {}
        groups = record_groups(self.record, len(self))
        self._check_record(record, groups)

        # the index: its size, header and both ends
        start = HEADERS[self.format].size
        stop = self.idx_bytes
        header = (0, start)
        beginning = (start, min(start + EDGE_BYTES, stop))
        end = (max(start, stop - EDGE_BYTES), stop)
        parts = self._index.read_many([header, beginning, end])
        footer = hash_bytes(stop.to_bytes(8, "little"), *(part.tobytes() for part in parts))

        # the estimate used for text, so that text and its token files give equal rows
        tokens = self.num_tokens
        if "text_bytes" in record:
            tokens = text_tokens(record["text_bytes"], len(self))
        pin: Pin = {
            "name": name,
            "size": self.num_bytes,
            "footer": footer,
            "groups": groups,
            "tokens": tokens,
        }

        # the ids: a few blocks, spread evenly over the .bin
        if isinstance(self.path, Remote):
            pin["etag"] = self.path.etag()
        else:
            size = BLOCK_BYTES // self.dtype.itemsize
            begins = np.linspace(0, max(0, self.num_tokens - size), BLOCKS).astype(int).tolist()
            ranges = [(begin, min(begin + size, self.num_tokens)) for begin in begins]
            blocks = self.reader.read_many(ranges)
            pin["blocks"] = hash_bytes(*(block.tobytes() for block in blocks))
        return pin


def open_tokens(path: AnyPath | str, *, vocab_size: int | None = None) -> TokenFile:
    """Open a pair, given by either file.

    FileNotFoundError or ValueError names a file that is missing, truncated, in an unknown format or
    without entries, or whose type of ids cannot hold the vocabulary.
    """
    pair = TokenFile(path, vocab_size=vocab_size)
    if len(pair) == 0:
        raise ValueError(f"{pair.idx_path}: it has no documents (0 entries); delete the pair")
    if "modes" in pair.tables:
        raise ValueError(
            f"{pair.idx_path}: it is multimodal data (its sequences have modes), which training cannot "
            f"use; read it with nanochat.integrations.megatron.IndexedDataset"
        )
    return pair


def to_offsets(lengths: np.ndarray) -> np.ndarray:
    """(n + 1,) int64: where parts of these lengths begin if stored back to back, then the end."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


# ---- the manifest of a folder -------------------------------------------------------------------

MANIFEST_FORMAT = "nanochat-shards"
MANIFEST_VERSION = 1
MANIFEST_SHAPE = {
    "format": str,
    "version": int,
    "tokenizer": {"fingerprint": str, "eod": int, "vocab_size": int},
    "arguments": {"max_length": int, "overlap_size": int},
    "shards": dict,
}
RECORD_SHAPE = {
    "input": dict,
    "documents": int,
    "entries": int,
    "tokens": int,
    "skipped": dict,
    "bin_bytes": int,
    "bin_hash": str,
    "idx_hash": str,
}


def new_manifest(
    tokenizer: Mapping[str, Any],
    arguments: Mapping[str, Any],
    shards: Mapping[str, Any],
    *,
    data_format: str = "shards",
    input_dir: str = "",
) -> dict[str, Any]:
    """The manifest of a folder of pairs.

    It names `data_format` unless that is "shards", and `input_dir`, the data set on the Hub and its
    commit that the pairs were made from, if that is known. `shards` maps each pair's name without extension
    to a record of RECORD_SHAPE, plus "groups" (entries in each) if they differ from the default of
    `record_groups`.
    """
    named = {} if data_format == "shards" else {"data_format": data_format}
    if input_dir:
        named["input_dir"] = input_dir
    return {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        **named,
        "tokenizer": tokenizer,
        "arguments": arguments,
        "shards": shards,
    }


def read_manifest(folder: AnyPath | str) -> dict[str, Any] | None:
    """The manifest of a folder of pairs, or None.

    Do not change it: it is shared. ValueError if it is corrupt or has an unknown format.
    """
    path = as_path(folder) / MANIFEST_NAME
    try:
        copy = local_copy(path)
        stat = copy.stat()
    except FileNotFoundError:
        return None
    return _read_manifest(path, copy, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=64)
def _read_manifest(path: AnyPath, copy: Path, mtime_ns: int, size: int) -> dict[str, Any]:
    manifest = read_json(copy, MANIFEST_SHAPE, remedy=REDO)
    kind = manifest["format"], manifest["version"]
    if kind != (MANIFEST_FORMAT, MANIFEST_VERSION):
        raise ValueError(
            f"{path}: got {kind}, expected {(MANIFEST_FORMAT, MANIFEST_VERSION)}; move the file and "
            f"{RECORDS} away to read these shards without it, or make them again with scripts.tok_shards"
        )
    for name, record in manifest["shards"].items():
        check_shape(record, RECORD_SHAPE, f"{path}: shards.{name}")
        check_shape(record.get("groups") or [], [int], f"{path}: the groups of {name}")
    return manifest


def record_groups(record: Mapping[str, Any] | None, entries: int) -> list[int]:
    """Number of entries in each group of a pair.

    A record may list them; otherwise each group has GROUP_ENTRIES.
    """
    if record is not None and record.get("groups"):
        return record["groups"]
    whole, rest = divmod(entries, GROUP_ENTRIES)
    groups = [GROUP_ENTRIES] * whole
    if rest:
        groups.append(rest)
    return groups
