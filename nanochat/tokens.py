"""
Token files: the ids of many documents, written once, read where they lie.

A token file is a pair. The .bin holds nothing but ids, the .idx says where in it each *entry* is.
There are two formats of the .idx. This module reads both, and nobody above it need know which one
a pair has; `token_writer` writes them.

    web.bin     t t t t E t t E t t t t t t t t E      ids, one after another; E ends a document

    GPTS        "GPTS" | version 1 | type | entries n          16 bytes, u32 each
    web.idx     0 5 8 12 17     offsets     (n + 1) int64      where entries start, and the end
                0 0 0 1         prefixes    n uint16           leading ids that are repeated

    Megatron    "MMIDIDX\\0\\0" | u64 version 1 | u8 type | u64 sequences n | u64 boundaries d + 1
    web.idx     5 3 4 5         lengths     n int32            ids of each sequence
                0 10 16 24      pointers    n int64            the byte of .bin where each begins
                0 1 2 4         boundaries  (d + 1) int64      where documents start, in sequences
                0 0 1 0         modes       n int8             of multimodal data; most pairs have none

An entry of GPTS is a document, or one of the windows that a long document was cut into. A later
window repeats some ids of the one before it. (Above, the third document is two windows, of which
the second has a prefix of 1.) An entry of Megatron's format is a document. Its sequences may lie
anywhere in the .bin. All numbers are little-endian. GPTS is the format of gpt-simple 0.1.2, the
other one that of megatron-core: files of these programs are read here, and they read ours. Beside
the pairs of a folder there may be a manifest.json, which says what tokenizer made them.

**Opening** looks at the header, the sizes and both ends of the tables. So it takes as long for a
billion entries as for ten. What stands between is checked where it is used.

**Which entries end a document?** If the manifest tells that every later window has a prefix, an
entry ends its document when the next one has no prefix, and no id need be looked at. Otherwise the
last id of the entry decides: it is E or it is not.

**Three readers** give the elements of a file: a memory map (the default), plain reads, and object
storage. With NANOCHAT_READER=pread in the environment nothing is mapped. A file that is cut short
while a run reads it is then an error with a sentence; a memory map ends the process by SIGBUS.
"""

import functools
import os
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from nanochat.common import as_path, check_shape, etag_of, hash_bytes, is_remote, local_copy, read_json
from nanochat.text import text_tokens

MAGICS = {"shards": b"GPTS", "megatron": b"MMIDIDX\x00\x00"}  # by the names of --data-format
HEADERS = {"shards": struct.Struct("<4sIII"), "megatron": struct.Struct("<9sQBQQ")}
DTYPES = {  # of the ids, by the code in the header; Megatron's 6 and 7 are floating point: no ids
    "shards": {2: "<u2", 4: "<u4"},
    "megatron": {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}}
READER = "NANOCHAT_READER"
GROUP_ENTRIES = 1024  # entries of a group, where the manifest does not say
EDGE_BYTES = 1 << 16  # how much of each end of an .idx pins it
BLOCKS, BLOCK_BYTES = 16, 4096  # evenly spaced stretches of a .bin that pin it
REDO = "fetch it again, or delete it and rerun scripts.tok_shards"
LOOK = f"python -m scripts.verify tells all such places; then {REDO}"


def pair_paths(prefix: Path | str) -> tuple[Path, Path]:
    """(.bin, .idx) of a path without ending, which may have dots in it."""
    prefix = as_path(prefix)
    return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")


def pair_format(path: Path) -> str | None:
    """The format of a pair, given either file: "shards" or "megatron". None if its .idx is not
    there, or begins with nothing that is known."""
    try:
        with open(local_copy(path.with_suffix(".idx")), "rb") as f:
            head = f.read(16)
    except FileNotFoundError:
        return None
    return next((name for name, magic in MAGICS.items() if head.startswith(magic)), None)


# ---- readers ------------------------------------------------------------------------------------

class Reader(Protocol):
    """The elements of one file, as read-only arrays. May be used from several threads at once."""

    def read(self, begin: int, end: int) -> np.ndarray:
        """Elements begin .. end - 1. ValueError or OSError naming the file if that cannot be."""

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """`read` of each range (begin, end), in their order."""
        return [self.read(begin, end) for begin, end in ranges]


class MappedReader(Reader):
    """A memory map: what is read is a view of it."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype = path, dtype
        with pa.memory_map(str(path), "r") as f:  # keeps no descriptor, of which there are few
            data = f.read_buffer()
        self._elements = np.frombuffer(data, dtype, data.size // dtype.itemsize)

    def __reduce__(self) -> Any:
        return MappedReader, (self.path, self.dtype)  # another process maps the file itself

    def read(self, begin: int, end: int) -> np.ndarray:
        return self._elements[begin:end]


class PlainReader(Reader):
    """Reads into memory of its own. The file is opened for each read, so any number of files can be
    in use; each time its size and time must be those of the first time."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype = path, dtype
        self.version = self._version()

    def _version(self) -> tuple[int, int]:
        stat = self.path.stat()
        return stat.st_size, stat.st_mtime_ns

    def read(self, begin: int, end: int) -> np.ndarray:
        at = begin * self.dtype.itemsize
        elements = np.fromfile(self.path, self.dtype, count=end - begin, offset=at)
        if len(elements) < end - begin or self._version() != self.version:
            raise ValueError(f"{self.path}: it was cut short or changed while it is in use; bring "
                             f"the old file back, or start a new run (--model-tag)")
        elements.flags.writeable = False
        return elements


def open_reader(path: Path, dtype: np.dtype, *, mapped: bool = True) -> Reader:
    """The reader of a file, wherever it lies. `mapped`: whether it may be a memory map. ValueError
    if the environment names no reader."""
    if is_remote(path):
        from nanochat.integrations.object_storage import RemoteReader

        return RemoteReader(path, dtype)  # type: ignore[arg-type]
    kind = os.environ.get(READER) or "mmap"
    if kind not in ("mmap", "pread"):
        raise ValueError(f"{READER}={kind}: expected mmap or pread")
    return MappedReader(path, dtype) if mapped and kind == "mmap" else PlainReader(path, dtype)


# ---- an open pair -------------------------------------------------------------------------------

def _size(path: Path) -> int:
    """The bytes of one file of a pair."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        other = path.with_suffix(".bin" if path.suffix == ".idx" else ".idx").name
        raise FileNotFoundError(f"{path}: not there; bring it back, or delete {other} and rerun scripts.tok_shards, "
                                f"or start a new run (--model-tag)") from None


class TokenFile:
    """An open pair: entries of ids, `len` of them.

    All methods may be called from several threads at once, and raise ValueError naming the file and
    the entry for what cannot be. `vocab_size`: the first id that is refused when it is read.
    `mapped`: whether the files may be memory maps.
    """

    def __init__(self, path: Path | str, *, vocab_size: int | None = None, mapped: bool = True):
        self.path = as_path(path).with_suffix(".bin")
        self.idx_path = self.path.with_suffix(".idx")
        self.vocab_size = vocab_size
        self.idx_bytes, self.num_bytes = _size(self.idx_path), _size(self.path)
        self._index = open_reader(local_copy(self.idx_path), np.dtype(np.uint8), mapped=mapped)
        self.tables: dict[str, tuple[np.dtype, int, int]] = {}  # type, byte of the file, rows
        self._read_header()
        self.reader = open_reader(self.path, self.dtype, mapped=mapped)
        self.num_tokens = self.num_bytes // self.dtype.itemsize
        if vocab_size is not None and vocab_size - 1 > np.iinfo(self.dtype).max:
            raise ValueError(
                f"{self.path}: its ids are {self.dtype.name}, too small for a vocabulary of "
                f"{vocab_size:,}; it was made with another tokenizer: name that one with "
                f"--tokenizer")
        # entries begin at these places, counted in tokens or in sequences
        if self.format == "shards":
            self._edges, what, total = "offsets", "tokens", self.num_bytes / self.dtype.itemsize
        else:
            self._edges, what, total = "boundaries", "sequences", self.tables["lengths"][2]
        n = len(self)
        first, last = self.table(self._edges, 0, 1)[0], self.table(self._edges, n, n + 1)[0]
        if first != 0 or last != total:
            raise ValueError(f"{self.path}: {total:,.10g} {what} on disk, but the {self._edges} in "
                             f"its .idx go from {first:,} to {last:,}; {REDO}")
        self._last_edge = int(total)

    def _read_header(self) -> None:
        """What the first bytes of the .idx say. ValueError if they are no header that is known, or
        of another size of file."""
        head = self._index.read(0, min(self.idx_bytes, HEADERS["megatron"].size)).tobytes()
        expected = "the header of an index of token ids, version 1"
        try:
            self.format = next(name for name, magic in MAGICS.items() if head.startswith(magic))
            _, version, code, n, *more = HEADERS[self.format].unpack_from(head)
            self.dtype = np.dtype(DTYPES[self.format][code])
            at = HEADERS[self.format].size
            self._len, columns = n, [("offsets", "<i8", n + 1), ("prefixes", "<u2", n)]
            if more:
                self._len = more[0] - 1
                columns = [("lengths", "<i4", n), ("pointers", "<i8", n),
                           ("boundaries", "<i8", more[0])]
            if more and n and self.idx_bytes == at + 13 * n + 8 * more[0]:
                columns.append(("modes", "i1", n))
            for name, dtype, rows in columns:
                self.tables[name] = np.dtype(dtype), at, rows
                at += rows * np.dtype(dtype).itemsize
            expected = f"{at:,} bytes for {self._len:,} entries"
            good = version == 1 and at == self.idx_bytes and self._len >= 0
        except (StopIteration, KeyError, struct.error):
            good = False
        if not good:
            raise ValueError(f"{self.idx_path}: {self.idx_bytes:,} bytes that begin with "
                             f"{head[:16]!r}, expected {expected}; it was cut short, or it is of "
                             f"another kind: {REDO}")

    def __len__(self) -> int:
        return self._len

    def table(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows first .. last - 1 (default: all) of a table of the .idx, unchecked."""
        dtype, at, rows = self.tables[name]
        last = rows if last is None else last
        found = self._index.read(at + first * dtype.itemsize, at + last * dtype.itemsize)
        return found.view(dtype)

    # -- where entries lie

    def stretches(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where entries first .. last - 1 lie in the .bin: (begins, ends, edges).

        begins, ends (s,) int64: stretches, counted in ids. edges (last - first + 1,) int64: entry
        first + k is stretches edges[k] .. edges[k + 1] - 1, one after another.
        """
        edges = self.table(self._edges, first, last + 1)
        if edges[0] < 0 or edges[-1] > self._last_edge or (edges[1:] < edges[:-1]).any():
            raise ValueError(f"{self.idx_path}: the {self._edges} of entries {first:,} to {last:,} "
                             f"run backwards, or beyond the end; {LOOK}")
        if self.format == "shards":
            return edges[:-1], edges[1:], np.arange(len(edges))
        numbers = np.arange(edges[0], edges[-1])
        lengths = self.table("lengths", edges[0], edges[-1]).astype(np.int64)
        begins = self.places(numbers, self.table("pointers", edges[0], edges[-1]), lengths)
        return begins, begins + lengths, edges - edges[0]

    def places(self, numbers: np.ndarray, pointers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The first id of each of some sequences of a Megatron pair, (n,) int64, from what the
        tables say of them. ValueError for one that does not lie in the .bin."""
        size = self.dtype.itemsize
        beyond = pointers > self.num_bytes - lengths * size
        wrong = (pointers < 0) | (lengths < 0) | beyond | (pointers % size != 0)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(f"{self.idx_path}: sequence {numbers[at]:,} is {lengths[at]:,} ids at "
                             f"byte {pointers[at]:,}, which is no place in its .bin of "
                             f"{self.num_bytes:,} bytes; {LOOK}")
        return pointers // size

    def lengths(self, first: int, last: int) -> np.ndarray:
        """Ids of each of entries first .. last - 1, (n,) int64. Reads no ids."""
        begins, ends, edges = self.stretches(first, last)
        return np.diff(running(ends - begins)[edges])

    def prefixes(self, first: int, last: int) -> np.ndarray:
        """How many first ids of each of entries first .. last - 1 repeat the entry before it, (n,)
        uint16. Reads no ids."""
        if self.format == "megatron":
            return np.zeros(last - first, np.uint16)
        prefixes, lengths = self.table("prefixes", first, last), self.lengths(first, last)
        if (prefixes > lengths).any():
            at = int(np.argmax(prefixes > lengths))
            raise ValueError(f"{self.idx_path}: entry {first + at:,} is shorter than its prefix "
                             f"({lengths[at]:,} ids, {prefixes[at]:,} repeated); {LOOK}")
        return prefixes

    # -- ids

    def read_flat(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, edges) of entries first .. last - 1: entry first + k is ids[edges[k]:edges[k + 1]],
        edges (n + 1,) int64. Where the entries lie one after another, the ids of a memory map are a
        view of it."""
        begins, ends, edges = self.stretches(first, last)
        if len(begins) and (begins[1:] == ends[:-1]).all():
            ids = self.reader.read(int(begins[0]), int(ends[-1]))
        else:
            parts = self.reader.read_many(list(zip(begins.tolist(), ends.tolist())))
            ids = np.concatenate([np.empty(0, self.dtype), *parts])
        edges = running(ends - begins)[edges]
        self.check_ids(ids, edges, first)
        return ids, edges

    def check_ids(self, ids: np.ndarray, edges: Sequence[int] | np.ndarray, first: int, what: str = "entry") -> None:
        """ValueError for an id outside the vocabulary, where that is known. ids[edges[k]:edges[k + 1]]
        are those of entry first + k, or of `what` else."""
        unsigned = ids.view(f"u{ids.itemsize}")  # an id below zero is then far outside
        if self.vocab_size is not None and unsigned.max(initial=0) >= self.vocab_size:
            at = int(np.argmax(unsigned >= self.vocab_size))
            number = first + int(np.searchsorted(edges, at, side="right")) - 1
            raise ValueError(f"{self.path}: {what} {number:,} holds the id {ids[at]:,}, outside "
                             f"the vocabulary of {self.vocab_size:,}; {LOOK}")

    def read(self, first: int, last: int) -> list[np.ndarray]:
        """Entries first .. last - 1 as they are stored, each (n,): views of one array."""
        ids, edges = self.read_flat(first, last)
        return [ids[a:b] for a, b in pairwise(edges.tolist())]

    # -- documents, as the stream has them

    @functools.cached_property
    def manifest(self) -> dict[str, Any] | None:
        """What `read_manifest` gives of the folder."""
        return read_manifest(self.path.parent)

    @property
    def record(self) -> dict[str, Any] | None:
        """What manifest.json says of the pair; None if there is none, or it does not list it."""
        return None if self.manifest is None else self.manifest["shards"].get(self.path.stem)

    @functools.cached_property
    def ends_follow(self) -> bool:
        """Whether the index alone tells which entries end a document: each later window has a
        prefix, or there is none."""
        if self.manifest is None or self.record is None:
            return False
        arguments = self.manifest["arguments"]
        return arguments["max_length"] == 0 or arguments["overlap_size"] > 0

    def ends_document(self, first: int, last: int, eod: int,
                      found: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
        """Which of entries first .. last - 1 end a document, so that their last id is `eod`: (n,)
        bool, False for an empty one. Ids are looked at only where the index does not tell; `found`
        is what `read_flat` gave, if the caller has it."""
        if self.ends_follow:  # the last entry of all ends its document
            edges = running(self.lengths(first, last)) if found is None else found[1]
            following = self.prefixes(first + 1, min(last + 1, len(self)))
            ends = edges[1:] > edges[:-1]
            ends[:len(following)] &= following == 0
            return ends
        ids, edges = self.read_flat(first, last) if found is None else found
        ends = edges[1:] > edges[:-1]
        ends[ends] = ids[edges[1:][ends] - 1] == eod
        return ends

    def documents(self, first: int, last: int, eod: int) -> list[np.ndarray]:
        """Entries first .. last - 1 as the stream has documents: BOS, which is the same id as EOD,
        in front, and no EOD behind. Each (n,), with memory of its own."""
        ids, edges = self.read_flat(first, last)
        stops = edges[1:] - self.ends_document(first, last, eod, (ids, edges))
        bos = np.array([eod], self.dtype)
        return [np.concatenate((bos, ids[a:b])) for a, b in zip(edges.tolist(), stops.tolist())]

    def document_lengths(self, first: int, last: int, eod: int) -> np.ndarray:
        """The lengths of `documents`, (n,) int64."""
        return self.lengths(first, last) - self.ends_document(first, last, eod) + 1

    # -- the whole file

    def refuse_other_tokenizer(self, fingerprint: str) -> None:
        """ValueError if the folder's manifest says that another tokenizer made the ids."""
        theirs = self.manifest["tokenizer"]["fingerprint"] if self.manifest else fingerprint
        if theirs != fingerprint:
            raise ValueError(
                f"{self.path.parent}: its shards were made with tokenizer {theirs}, this run has "
                f"{fingerprint}; name their tokenizer with --tokenizer, or make them again "
                f"with scripts.tok_shards")

    def pin(self, name: str) -> dict[str, Any]:
        """What pins the pair in the manifest of a run: {"name", "size" of the .bin, "footer",
        "groups", "tokens", and "blocks", or in a store the "etag" of the .bin}. `footer` hashes size, header
        and both ends of the .idx, `blocks` a few stretches of the .bin. ValueError if the pair is not what
        manifest.json says."""
        record, groups = self.record or {}, record_groups(self.record, len(self))
        for key, value in (("entries", len(self)), ("tokens", self.num_tokens),
                           ("bin_bytes", self.num_bytes)):
            if record.get(key, value) != value:
                raise ValueError(f"{self.path}: {key} {value:,}, {MANIFEST_NAME} says "
                                 f"{record[key]:,}; {REDO}")
        if min(groups, default=1) < 1 or sum(groups) != len(self):
            raise ValueError(f"{self.path}: groups of {groups!r:.80} entries in {MANIFEST_NAME}, "
                             f"expected numbers that add up to {len(self):,}; {REDO}")
        start, stop = HEADERS[self.format].size, self.idx_bytes
        ranges = [(0, start), (start, min(start + EDGE_BYTES, stop)),
                  (max(start, stop - EDGE_BYTES), stop)]
        footer = hash_bytes(stop.to_bytes(8, "little"),
                            *(part.tobytes() for part in self._index.read_many(ranges)))
        text_bytes = record.get("text_bytes")  # the text's own estimate, so that its rows are the same
        tokens = self.num_tokens if text_bytes is None else text_tokens(text_bytes, len(self))
        return {"name": name, "size": self.num_bytes, "footer": footer, "groups": groups, "tokens": tokens,
                **(etag_of(self.path) if is_remote(self.path) else {"blocks": self._hash_blocks()})}

    def _hash_blocks(self) -> str:
        """A hash of BLOCKS stretches of ids, from the first to the last of the .bin."""
        size = BLOCK_BYTES // self.dtype.itemsize
        begins = np.linspace(0, max(0, self.num_tokens - size), BLOCKS).astype(int).tolist()
        parts = self.reader.read_many([(begin, min(begin + size, self.num_tokens)) for begin in begins])
        return hash_bytes(*(part.tobytes() for part in parts))


def open_tokens(path: Path | str, *, vocab_size: int | None = None) -> TokenFile:
    """Open a pair, given by either file. FileNotFoundError or ValueError naming the file that is
    not there, not whole, of no known format, without an entry, or of a type of ids that cannot hold
    the vocabulary."""
    found = TokenFile(path, vocab_size=vocab_size)
    if len(found) == 0:
        raise ValueError(f"{found.idx_path}: no document in it (0 entries); delete the pair")
    if "modes" in found.tables:
        raise ValueError(f"{found.idx_path}: its sequences have modes, as multimodal data has; it is not trained on, "
                         f"only read by nanochat.integrations.megatron.IndexedDataset")
    return found


def running(lengths: np.ndarray) -> np.ndarray:
    """Where stretches of these lengths begin, one after another, and the end: (n + 1,) int64."""
    at = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=at[1:])
    return at


# ---- the manifest of a folder -------------------------------------------------------------------

MANIFEST_NAME, MANIFEST_FORMAT, MANIFEST_VERSION = "manifest.json", "nanochat-shards", 1
MANIFEST_SHAPE = {"format": str, "version": int,
                  "tokenizer": {"fingerprint": str, "eod": int, "vocab_size": int},
                  "arguments": {"max_length": int, "overlap_size": int}, "shards": dict}
RECORD_SHAPE = {"input": dict, "documents": int, "entries": int, "tokens": int, "skipped": dict,
                "bin_bytes": int, "bin_hash": str, "idx_hash": str}


def new_manifest(tokenizer: Mapping[str, Any], arguments: Mapping[str, Any],
                 shards: Mapping[str, Any], *, data_format: str = "shards") -> dict[str, Any]:
    """The manifest of a folder of pairs; `data_format` is in it if it is not "shards".

    `shards`: for each pair, by its name without ending, a record of RECORD_SHAPE, with "groups"
    (the entries of each) where they are not GROUP_ENTRIES each.
    """
    named = {} if data_format == "shards" else {"data_format": data_format}
    return {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, **named,
            "tokenizer": tokenizer, "arguments": arguments, "shards": shards}


def read_manifest(folder: Path | str) -> dict[str, Any] | None:
    """The manifest of a folder of pairs, None where it has none; do not change it, it is shared.
    ValueError if it is broken or of another format."""
    path = as_path(folder) / MANIFEST_NAME
    try:
        copy = local_copy(path)
        stat = copy.stat()
    except FileNotFoundError:
        return None
    return _read_manifest(path, copy, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=64)
def _read_manifest(path: Path, copy: Path, mtime_ns: int, size: int) -> dict[str, Any]:
    manifest = read_json(copy, MANIFEST_SHAPE, way_out=REDO)
    kind = manifest["format"], manifest["version"]
    if kind != (MANIFEST_FORMAT, MANIFEST_VERSION):
        raise ValueError(
            f"{path}: got {kind}, expected {(MANIFEST_FORMAT, MANIFEST_VERSION)}; take the file "
            f"away to read these shards without it, or make them again with scripts.tok_shards")
    for name, record in manifest["shards"].items():
        check_shape(record, RECORD_SHAPE, f"{path}: shards.{name}")
        check_shape(record.get("groups") or [], [int], f"{path}: the groups of {name}")
    return manifest


def record_groups(record: Mapping[str, Any] | None, entries: int) -> list[int]:
    """Entries of each group of a pair."""
    whole, rest = divmod(entries, GROUP_ENTRIES)
    usual = [GROUP_ENTRIES] * whole + [rest] * (rest > 0)
    return (record or {}).get("groups") or usual
