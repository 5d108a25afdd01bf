"""
Token files: the ids of many documents, written once, read where they lie.

A token file is a pair. The .bin holds nothing but ids, the .idx says where in it each *entry* lies. Two formats of the
.idx are known; each is written and read here, and nothing above this module need know which one it has.

    web.bin    t t t t E t t E t t t t t t t t E         ids, little-endian, nothing between them; E ends a document

    GPTS       "GPTS" | version 1 | type | entries n     16 bytes, u32 each; type 2 = uint16, 4 = uint32
    web.idx    0 5 8 12 17                               offsets    (n + 1) int64: where each entry starts, and the end
               0 0 0 1                                   prefixes   n uint16: first ids that repeat the entry before

    Megatron   "MMIDIDX\\0\\0" | u64 version 1 | u8 type | u64 sequences n | u64 boundaries d + 1       34 bytes
    web.idx    5 3 4 5                                   lengths    n int32: ids of each sequence
               0 10 16 24                                pointers   n int64: the byte of .bin where each begins
               0 1 2 4                                   boundaries (d + 1) int64: the sequences of document k are
                                                                    b[k] .. b[k + 1] - 1
               (0 0 0 0)                                 modes      n int8, in multimodal files only

An entry of GPTS is a document, or one of the windows that a long document was cut into; a later window repeats some ids
of the one before it. Above, the third document is two windows with an overlap of 1. An entry of Megatron's format is a
document; its sequences may lie anywhere in the .bin. GPTS is the format of gpt-simple 0.1.2, the other one that of
megatron-core; files of these programs are read, and they read ours. Beside the pairs of a folder lies a manifest.json
that says which tokenizer made them; foreign files have none.

**Opening** looks at the header, the sizes and both ends of the tables, so it takes as long for a billion entries as for
ten. What stands between is checked where it is used. Keeping the lengths of all entries was rejected: it costs 8 bytes
a document and seconds at each start.

**Which entries end a document?** If every later window has a prefix (the manifest tells), an entry ends its document
when the next one has no prefix, and no id is looked at. Otherwise the last id of the entry decides: E or not.

**Three readers** give the bytes of a file: a memory map (the default), pread, and object storage. With
NANOCHAT_READER=pread in the environment nothing is mapped: a file that is cut short while it is read is then an error
with a sentence, where a memory map ends the process by SIGBUS. It is a property of a machine, so it is no flag.

**Writing** goes to temporary files that are renamed, the .idx last. A pair without a good .idx does not exist.
"""

import contextlib
import functools
import json
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from nanochat.common import atomic_open, fsync_dir, hash_bytes, read_json
from nanochat.places import StorePath, etag_of, local, place, stat_of

GPTS_HEADER, MEGATRON_HEADER = struct.Struct("<4sIII"), struct.Struct("<9sQBQQ")
MAGICS = {"shards": b"GPTS", "megatron": b"MMIDIDX\x00\x00"}  # by the names of --data-format
GPTS_DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
MEGATRON_DTYPES: dict[int, np.dtype] = {  # codes 6 and 7 are floating point: no ids
    1: np.dtype("u1"), 2: np.dtype("i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8"),
    8: np.dtype("<u2")}
MAX_SEQUENCE = 2**31 - 1  # ids of a sequence of Megatron's
READER = "NANOCHAT_READER"
GROUP_ENTRIES = 1024  # entries of a group, where the manifest does not say
RUN_ENTRIES, RUN_IDS = 1 << 14, 1 << 21  # that are read together by what reads a whole file
EDGE_BYTES = 1 << 16  # how much of each end of an .idx pins it
REDO = "delete it and rerun scripts.tok_shards"
Range = tuple[int, int]  # begin, end


def pair_paths(prefix: Path | str) -> tuple[Path, Path]:
    """(.bin, .idx) of a path without ending, which may have dots in it."""
    prefix = place(prefix)
    return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")


def pair_format(path: Path) -> str | None:
    """The format of a pair, given either file: "shards" (GPTS) or "megatron"; None if its .idx is not there, or begins
    with nothing that is known."""
    try:
        with open(local(path.with_suffix(".idx")), "rb") as f:
            head = f.read(16)
    except FileNotFoundError:
        return None
    return next((name for name, magic in MAGICS.items() if head.startswith(magic)), None)


# ---- readers --------------------------------------------------------------------------------------------------------

class Reader(Protocol):
    """The elements of one file. Every method may be called from several threads at once; arrays are read-only."""

    def read(self, begin: int, end: int) -> np.ndarray:
        """Elements begin .. end - 1. ValueError or OSError naming the file where they cannot be had."""

    def read_many(self, ranges: Sequence[Range]) -> list[np.ndarray]:
        """`read` of each range, in their order."""


class MappedReader:
    """A memory map: what is read is a view. Arrow's map keeps no descriptor open, of which a process has 1,024."""

    def __init__(self, path: Path, dtype: np.dtype):
        with pa.memory_map(str(path), "r") as f:
            data = f.read_buffer()
        self._items = np.frombuffer(data, dtype, data.size // dtype.itemsize)

    def read(self, begin: int, end: int) -> np.ndarray:
        return self._items[begin:end]

    def read_many(self, ranges: Sequence[Range]) -> list[np.ndarray]:
        return [self._items[begin:end] for begin, end in ranges]


class PreadReader:
    """Reads into memory of its own. The file is opened for each read, so that any number of files can be in use. Each
    time it is held against the size and time that it had at first."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype = path, dtype
        self._state = self._state_of(path.stat())

    @staticmethod
    def _state_of(stat: os.stat_result) -> tuple[int, int]:
        return stat.st_size, stat.st_mtime_ns

    def read(self, begin: int, end: int) -> np.ndarray:
        items = np.empty(max(0, end - begin), self.dtype)
        view, at = items.view(np.uint8).data, 0
        with open(self.path, "rb", buffering=0) as f:
            if self._state_of(os.fstat(f.fileno())) != self._state:
                raise ValueError(f"{self.path}: it was cut short or changed after it was opened; bring the old file "
                                 f"back, or start a new run (--model-tag)")
            while at < len(view):
                n = os.preadv(f.fileno(), [view[at:]], begin * self.dtype.itemsize + at)
                if n == 0:
                    raise ValueError(f"{self.path}: it ends before element {end:,}, which its index promises; it was "
                                     f"cut short: bring the whole file back")
                at += n
        items.flags.writeable = False
        return items

    def read_many(self, ranges: Sequence[Range]) -> list[np.ndarray]:
        return [self.read(begin, end) for begin, end in ranges]


def is_mapped(path: Path) -> bool:
    """Whether `open_reader` maps a file. ValueError if the environment names no reader."""
    kind = os.environ.get(READER) or "mmap"
    if kind not in ("mmap", "pread"):
        raise ValueError(f"{READER}={kind}: expected mmap or pread")
    return kind == "mmap" and not isinstance(path, StorePath)


def open_reader(path: Path, dtype: np.dtype, *, mapped: bool = True) -> Reader:
    """The reader of a file, wherever it lies. `mapped`: whether it may be a memory map."""
    if isinstance(path, StorePath):
        from nanochat.block_cache import RemoteReader

        return RemoteReader(path, dtype, stat=stat_of(path))
    return MappedReader(path, dtype) if mapped and is_mapped(path) else PreadReader(path, dtype)


# ---- headers --------------------------------------------------------------------------------------------------------

class Table(NamedTuple):
    """An array inside an .idx."""

    dtype: np.dtype
    at: int  # byte of the file
    rows: int


@dataclass(frozen=True)
class Header:
    """What the first bytes of an .idx say."""

    format: str  # "shards" or "megatron"
    num_bytes: int  # of the header itself
    dtype: np.dtype  # of the ids
    num_entries: int
    tables: dict[str, Table]


def _tables(at: int, *columns: tuple[str, str, int]) -> tuple[dict[str, Table], int]:
    """Tables (name, dtype, count) that stand one after another from byte `at` on, and the byte where they end."""
    tables = {}
    for name, dtype, count in columns:
        tables[name] = Table(np.dtype(dtype), at, count)
        at += count * np.dtype(dtype).itemsize
    return tables, at


def read_header(idx: Path) -> Header:
    """The header of an .idx of either format, held against the size of the file. ValueError or FileNotFoundError naming
    the file that is not there, not whole, or nothing that is known."""
    with _missing_told(idx), open(local(idx), "rb") as f:
        head, size = f.read(MEGATRON_HEADER.size), os.fstat(f.fileno()).st_size
    megatron = head.startswith(MAGICS["megatron"][:len(head)]) and not head.startswith(b"GPTS")
    layout = MEGATRON_HEADER if megatron else GPTS_HEADER
    if len(head) < layout.size:
        raise ValueError(f"{idx}: {len(head)} bytes, expected a header of {layout.size}; it was cut short: {REDO}")
    magic, version, code, *counts = layout.unpack_from(head)
    if magic not in MAGICS.values():
        raise ValueError(f"{idx}: it begins with {magic!r}, expected {MAGICS['shards']!r} or {MAGICS['megatron']!r}; "
                         f"it is no index of token ids: take it away, or {REDO}")
    dtypes = MEGATRON_DTYPES if megatron else GPTS_DTYPES
    if version != 1:
        raise ValueError(f"{idx}: format version {version}, expected 1; {REDO}")
    if code not in dtypes:
        names = ", ".join(f"{known} ({dtype.name})" for known, dtype in dtypes.items())
        raise ValueError(f"{idx}: type code {code}, expected one of {names}; {REDO}")
    n = counts[0]
    if megatron:
        boundaries = counts[1]
        if boundaries < 1:
            raise ValueError(f"{idx}: no document boundary, expected at least one; make it again")
        tables, end = _tables(layout.size, ("lengths", "<i4", n), ("pointers", "<i8", n),
                              ("boundaries", "<i8", boundaries), ("modes", "i1", n))
        if size == end - n:
            del tables["modes"]
            end = size
        what = f"{n:,} sequences and {boundaries:,} document boundaries"
    else:
        tables, end = _tables(layout.size, ("offsets", "<i8", n + 1), ("prefixes", "<u2", n))
        what = f"{n:,} entries"
    if size != end:
        raise ValueError(f"{idx}: {size:,} bytes, expected {end:,} for {what}; it was cut short or is of another kind: "
                         f"fetch it again, or {REDO}")
    num_entries = counts[1] - 1 if megatron else n
    return Header("megatron" if megatron else "shards", layout.size, dtypes[code], num_entries, tables)


@contextlib.contextmanager
def _missing_told(path: Path) -> Iterator[None]:
    """Let FileNotFoundError say which half of a pair is missing."""
    try:
        yield
    except FileNotFoundError:
        other = path.with_suffix(".bin" if path.suffix == ".idx" else ".idx")
        why = (f"not there, but {other.name} needs it; bring it back, or delete {other.name} and rerun "
               f"scripts.tok_shards")
        gone = "the file is gone; bring it back, or start a new run (--model-tag)"
        raise FileNotFoundError(f"{path}: {why if other.exists() else gone}") from None


# ---- an open pair ---------------------------------------------------------------------------------------------------

class TokenFile:
    """An open pair of either format: entries of ids. All methods may be called from several threads at once, and all of
    them raise ValueError naming the file for what cannot be. `len` is the number of entries.

    `vocab_size`: ids from it on are refused when they are read. `mapped`: whether files may be memory maps.
    """

    def __init__(self, path: Path | str, *, vocab_size: int | None = None, mapped: bool = True):
        self.path = place(path).with_suffix(".bin")
        self.idx_path = self.path.with_suffix(".idx")
        self.header = read_header(self.idx_path)
        self.format, self.dtype = self.header.format, self.header.dtype
        self.vocab_size = vocab_size
        if vocab_size is not None and vocab_size - 1 > np.iinfo(self.dtype).max:
            raise ValueError(f"{self.path}: its ids are {self.dtype.name}, too small for a vocabulary of "
                             f"{vocab_size:,}; it was made with another tokenizer: name that one with --tokenizer-dir")
        with _missing_told(self.path):
            self.num_bytes = self.path.stat().st_size
        self._index = open_reader(local(self.idx_path), np.dtype(np.uint8), mapped=mapped)
        self._check_ends()
        self.num_tokens = self.num_bytes // self.dtype.itemsize
        self.reader = open_reader(self.path, self.dtype, mapped=mapped)

    def _check_ends(self) -> None:
        """ValueError where the first or last element of a table does not fit the size of the .bin."""
        if self.format == "shards":
            n = len(self)
            (first,), (last,) = self.table("offsets", 0, 1), self.table("offsets", n, n + 1)
            if first != 0:
                raise ValueError(f"{self.idx_path}: the first offset is {first:,}, expected 0; {REDO}")
            if self.num_bytes != int(last) * self.dtype.itemsize:
                raise ValueError(f"{self.path}: {self.num_bytes / self.dtype.itemsize:,.10g} tokens on disk, header "
                                 f"says {last:,}; {REDO}")
            return
        n = self.header.tables["lengths"].rows
        (first,), (last,) = self.table("boundaries", 0, 1), self.table("boundaries", len(self), len(self) + 1)
        if (first, last) != (0, n):
            raise ValueError(f"{self.idx_path}: its document boundaries go from {first:,} to {last:,}, expected 0 to "
                             f"{n:,}, the number of its sequences; make it again")
        self.sequences(0, min(n, 1))
        self.sequences(max(0, n - 1), n)

    def __len__(self) -> int:
        return self.header.num_entries

    def table(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Elements first .. last - 1 (default: all) of a table of the .idx, as they are on disk, unchecked. Tables of
        GPTS: offsets, prefixes; of Megatron: lengths, pointers, boundaries, modes."""
        dtype, at, count = self.header.tables[name]
        last = count if last is None else last
        return self._index.read(at + first * dtype.itemsize, at + last * dtype.itemsize).view(dtype)

    # -- where entries lie

    def stretches(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where entries first .. last - 1 lie: (begins, ends) of stretches of the .bin, in ids, two (s,) int64, and
        (last - first + 1,) int64: entry first + k is stretches edges[k] .. edges[k + 1] - 1."""
        if self.format == "shards":
            offsets = self.table("offsets", first, last + 1)
            if (offsets[1:] < offsets[:-1]).any() or offsets[0] < 0 or offsets[-1] > self.num_tokens:
                raise ValueError(f"{self.idx_path}: the offsets of entries {first:,} to {last:,} do not ascend; python "
                                 f"-m scripts.verify tells which, then {REDO}")
            return offsets[:-1], offsets[1:], np.arange(len(offsets))
        edges = self.table("boundaries", first, last + 1)
        num_sequences = self.header.tables["lengths"].rows
        if (edges[1:] < edges[:-1]).any() or edges[0] < 0 or edges[-1] > num_sequences:
            raise ValueError(f"{self.idx_path}: the boundaries of documents {first:,} to {last:,} run backwards or "
                             f"beyond its {num_sequences:,} sequences; python -m scripts.verify tells which, make the "
                             f"pair again")
        begins, lengths = self.sequences(int(edges[0]), int(edges[-1]))
        return begins, begins + lengths, edges - edges[0]

    def sequences(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """(begins, lengths) of sequences first .. last - 1 of a Megatron pair, in ids: two (n,) int64."""
        lengths = self.table("lengths", first, last).astype(np.int64)
        return self.check_places(np.arange(first, last), self.table("pointers", first, last), lengths), lengths

    def check_places(self, numbers: np.ndarray, pointers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The first id of each of some sequences, (n,) int64, from what the tables say of them. ValueError for one that
        does not lie in the .bin."""
        size = self.dtype.itemsize
        wrong = (pointers < 0) | (lengths < 0) | (pointers > self.num_bytes - lengths * size) | (pointers % size != 0)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(f"{self.idx_path}: sequence {numbers[at]:,} is {lengths[at]:,} ids at byte "
                             f"{pointers[at]:,}, which is no place in its .bin of {self.num_bytes:,} bytes; make the "
                             f"pair again")
        return pointers // size

    def lengths(self, first: int, last: int) -> np.ndarray:
        """Ids of entries first .. last - 1, (n,) int64. Reads no ids."""
        begins, ends, edges = self.stretches(first, last)
        return np.diff(_running(ends - begins)[edges])

    def prefixes(self, first: int, last: int) -> np.ndarray:
        """How many first ids of each of entries first .. last - 1 repeat the entry before it, (n,) uint16. Reads no
        ids."""
        if self.format == "megatron":
            return np.zeros(last - first, np.uint16)
        prefixes, lengths = self.table("prefixes", first, last), self.lengths(first, last)
        if (prefixes > lengths).any():
            at = int(np.argmax(prefixes > lengths))
            raise ValueError(f"{self.idx_path}: entry {first + at:,} is shorter than its prefix ({lengths[at]:,} ids, "
                             f"{prefixes[at]:,} repeated); python -m scripts.verify tells which others are; then "
                             f"{REDO}")
        return prefixes

    # -- ids

    def read_flat(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, edges) of entries first .. last - 1: entry first + k is ids[edges[k]:edges[k + 1]], edges are (n + 1,)
        int64. The ids are a view of the memory map where the entries lie in it one after another."""
        begins, ends, edges = self.stretches(first, last)
        if len(begins) and (begins[1:] == ends[:-1]).all():
            ids = self.reader.read(int(begins[0]), int(ends[-1]))
        else:
            found = self.reader.read_many(list(zip(begins.tolist(), ends.tolist())))
            ids = np.concatenate([np.empty(0, self.dtype), *found])
        edges = _running(ends - begins)[edges]
        self._check_vocabulary(ids, edges, first)
        return ids, edges

    def _check_vocabulary(self, ids: np.ndarray, edges: np.ndarray, first: int) -> None:
        if self.vocab_size is None or not len(ids):
            return
        unsigned = ids.view(f"u{ids.itemsize}")  # what is negative is then far outside
        if unsigned.max() >= self.vocab_size:
            at = int(np.argmax(unsigned >= self.vocab_size))
            entry = first + int(np.searchsorted(edges, at, side="right")) - 1
            raise ValueError(f"{self.path}: entry {entry:,} holds the id {ids[at]:,}, outside the vocabulary of "
                             f"{self.vocab_size:,}; python -m scripts.verify tells which there are; then {REDO}")

    def read(self, first: int, last: int) -> list[np.ndarray]:
        """Entries first .. last - 1 as they are stored, each (n,) of `dtype`: views of one array."""
        ids, edges = self.read_flat(first, last)
        at = edges.tolist()
        return [ids[a:b] for a, b in pairwise(at)]

    def ids(self, entry: int) -> np.ndarray:
        """One entry as it is stored, (n,) of `dtype`."""
        return self.read_flat(entry, entry + 1)[0]

    # -- documents, as the stream has them

    @functools.cached_property
    def record(self) -> dict[str, Any] | None:
        """What the folder's manifest.json says of this pair; None if there is none, or it does not list the pair."""
        manifest = read_manifest(self.path.parent)
        return None if manifest is None else manifest["shards"].get(self.path.stem)

    @functools.cached_property
    def ends_follow(self) -> bool:
        """Whether the index alone tells which entries end a document."""
        return self.record is not None and ends_follow(read_manifest(self.path.parent))

    def ends_document(self, first: int, last: int, eod: int) -> np.ndarray:
        """Which of entries first .. last - 1 end a document, so that their last id is `eod`: (n,) bool, False for an
        empty one. Reads ids only where the index does not tell."""
        if not self.ends_follow:
            return _end_with(*self.read_flat(first, last), eod)
        follower_prefixes = self.prefixes(first + 1, min(last + 1, len(self)))
        ends = np.ones(last - first, bool)  # the last entry of all ends its document
        ends[:len(follower_prefixes)] = follower_prefixes == 0
        return ends & (self.lengths(first, last) > 0)

    def documents(self, first: int, last: int, eod: int) -> list[np.ndarray]:
        """Entries first .. last - 1 as the stream has documents: BOS, which is the same id as EOD, in front, and no EOD
        behind. Each (n,) of `dtype`, with memory of its own."""
        ids, edges = self.read_flat(first, last)
        closed = self.ends_document(first, last, eod) if self.ends_follow else _end_with(ids, edges, eod)
        bos = np.array([eod], ids.dtype)
        return [np.concatenate((bos, ids[a:b])) for a, b in zip(edges[:-1].tolist(), (edges[1:] - closed).tolist())]

    def document_lengths(self, first: int, last: int, eod: int) -> np.ndarray:
        """The lengths of `documents`, (n,) int64."""
        return self.lengths(first, last) - self.ends_document(first, last, eod) + 1

    # -- the whole file

    def refuse_other_tokenizer(self, fingerprint: str) -> None:
        """ValueError if the folder's manifest says that another tokenizer made the ids."""
        manifest = read_manifest(self.path.parent)
        if manifest is not None and manifest["tokenizer"]["fingerprint"] != fingerprint:
            theirs = manifest["tokenizer"]["fingerprint"]
            raise ValueError(f"{self.path.parent}: its shards were made with tokenizer {theirs}, this run has "
                             f"{fingerprint}; name their tokenizer with --tokenizer-dir, or make them again with "
                             f"scripts.tok_shards")

    def pin(self, name: str) -> dict[str, Any]:
        """What pins the pair in the manifest of a run: {"name", "size" of the .bin, "footer", "groups", and in a store
        the "etag" of the .bin}. `footer` hashes size, header and both ends of the .idx. ValueError if the pair is not
        what manifest.json says."""
        record = self.record
        if record is not None:
            found = {"entries": len(self), "tokens": self.num_tokens, "bin_bytes": self.num_bytes}
            for key, value in found.items():
                if record[key] != value:
                    raise ValueError(f"{self.path}: {key} {value:,}, {MANIFEST_NAME} says {record[key]:,}; {REDO}")
        groups = record_groups(record, len(self))
        if sum(groups) != len(self) or min(groups) < 1:
            raise ValueError(f"{self.path}: the groups in {MANIFEST_NAME} hold {sum(groups):,} entries, the file "
                             f"{len(self):,}; {REDO}")
        start, size = self.header.num_bytes, max(table.at + table.rows * table.dtype.itemsize
                                                 for table in self.header.tables.values())
        edges = (0, start), (start, min(start + EDGE_BYTES, size)), (max(start, size - EDGE_BYTES), size)
        footer = hash_bytes(size.to_bytes(8, "little"), *(self._index.read(a, b).tobytes() for a, b in edges))
        return {"name": name, "size": self.num_bytes, "footer": footer, "groups": groups, **etag_of(self.path)}

    def runs(self) -> Iterator[Range]:
        """(first, end) of runs of entries, in order, that are read together by what reads the whole file: of few ids
        each, unless a single entry has more. An entry whose place cannot be is a run by itself."""
        for start in range(0, len(self), RUN_ENTRIES):
            stop = min(start + RUN_ENTRIES, len(self))
            try:
                ends = np.cumsum(self.lengths(start, stop))
            except ValueError:
                yield from ((i, i + 1) for i in range(start, stop))
                continue
            first = start
            while first < stop:
                before = int(ends[first - start - 1]) if first > start else 0
                end = start + int(np.searchsorted(ends, before + RUN_IDS, side="right"))
                yield first, (end := max(first + 1, end))
                first = end


def open_tokens(path: Path | str, *, vocab_size: int | None = None) -> TokenFile:
    """Open a pair, given by either file. FileNotFoundError or ValueError naming the file that is not there, not whole,
    of no known format, without an entry, or of a type that cannot hold the vocabulary."""
    found = TokenFile(path, vocab_size=vocab_size)
    if len(found) == 0:
        raise ValueError(f"{found.idx_path}: an empty shard (0 entries); delete it and its .bin")
    return found


def _running(lengths: np.ndarray) -> np.ndarray:
    """Where stretches of these lengths, one after another, begin, and the end: (n + 1,) int64."""
    at = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=at[1:])
    return at


def _end_with(ids: np.ndarray, edges: np.ndarray, eod: int) -> np.ndarray:
    """Which entries end with an id, (n,) bool."""
    full = edges[1:] > edges[:-1]
    found = np.zeros(len(full), bool)
    found[full] = ids[edges[1:][full] - 1] == eod
    return found


# ---- writing --------------------------------------------------------------------------------------------------------

def shard_dtype(vocab_size: int) -> np.dtype:
    """The type of ids in GPTS: uint16, or uint32 for more than 65,535 ids."""
    return GPTS_DTYPES[2 if vocab_size <= 65535 else 4]


def megatron_dtype(vocab_size: int) -> np.dtype:
    """The type of ids in Megatron's format: uint16, or int32 for 65,500 ids and more (Megatron's own choice)."""
    return MEGATRON_DTYPES[8 if vocab_size < 65500 else 4]


@dataclass(frozen=True)
class Written:
    """What a finished pair holds, as its record in manifest.json has it."""

    entries: int
    tokens: int
    bin_bytes: int
    bin_hash: str
    idx_hash: str


class TokenWriter:
    """Writes PREFIX.bin and PREFIX.idx. When a `with` block ends well both are there, whole, and `written` says what
    they hold; after an exception neither is, and a pair that was there before is left alone.

    A class for each format has `add` and `_index_parts`. Held in memory: some 10 bytes an entry.
    """

    def __init__(self, prefix: Path | str, *, dtype: np.dtype, bound: int):
        self.bin_path, self.idx_path = pair_paths(prefix)
        self.dtype, self.bound = dtype, bound
        self.num_tokens = 0
        self.written: Written | None = None
        self._lengths = array("q")
        self._hash = blake2b(digest_size=16)
        self._open_file = contextlib.ExitStack()
        self._bin = self._open_file.enter_context(atomic_open(self.bin_path))

    def append(self, ids: Any, lengths: Any) -> None:
        """Append ids (sum of lengths,) and their lengths (n,). ValueError for ids outside the vocabulary, and for
        arrays that do not fit together."""
        ids, lengths = np.asarray(ids).reshape(-1), np.asarray(lengths, np.int64)
        if lengths.sum() != len(ids) or (lengths < 0).any():
            raise ValueError(f"{self.bin_path}: got {len(ids):,} ids and {len(lengths):,} lengths that add up to "
                             f"{lengths.sum():,}, expected arrays that fit together")
        if len(ids) and (ids.dtype.kind not in "iu" or not np.iinfo(self.dtype).min <= ids.min()
                         or not ids.max() < self.bound):
            raise ValueError(f"{self.bin_path}: got {ids.dtype.name} ids {ids.min()} .. {ids.max()}, expected "
                             f"integers below {self.bound:,} that {self.dtype.name} can hold; is it the tokenizer that "
                             f"they come from?")
        data = np.ascontiguousarray(ids, self.dtype).data
        self._bin.write(data)
        self._hash.update(data)
        self.num_tokens += len(ids)
        self._lengths.frombytes(lengths.tobytes())

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        """Append entries: their ids one after another (sum of lengths,), how many each has (n,), and how many first ids
        of each repeat the entry before (n,)."""
        raise NotImplementedError

    def _index_parts(self) -> tuple[int, list[bytes | memoryview]]:
        """(number of entries, the .idx in parts)."""
        raise NotImplementedError

    def commit(self, idx_path: Path) -> Written:
        """Write the .idx, and have both files appear, it last."""
        digest, replacing = blake2b(digest_size=16), False
        try:
            entries, parts = self._index_parts()
            with atomic_open(idx_path) as idx:
                for part in parts:
                    idx.write(part)
                    digest.update(part)
                for f in (self._bin, idx):  # a full disk shows here, while an old pair is untouched
                    f.flush()
                    os.fsync(f.fileno())
                replacing = True
                if idx_path.exists():  # never the old .idx beside the new .bin
                    idx_path.unlink()
                    fsync_dir(idx_path.parent)
                self._open_file.close()
        except BaseException as e:
            self.abandon(e)
            if replacing:
                self.bin_path.unlink(missing_ok=True)
            raise
        self.written = Written(entries, self.num_tokens, self.num_tokens * self.dtype.itemsize, self._hash.hexdigest(),
                               digest.hexdigest())
        return self.written

    def abandon(self, error: BaseException) -> None:
        """Give it up because of `error`: nothing is left of it."""
        with contextlib.suppress(BaseException):
            self._open_file.__exit__(type(error), error, error.__traceback__)

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.commit(self.idx_path)
        else:
            self.abandon(error)


class ShardWriter(TokenWriter):
    """Writes GPTS. `dtype`: in place of the one that fits the vocabulary."""

    def __init__(self, prefix: Path | str, *, vocab_size: int, dtype: np.dtype | None = None):
        super().__init__(prefix, dtype=dtype or shard_dtype(vocab_size), bound=vocab_size)
        self._prefixes = array("H")

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        prefixes = np.asarray(prefixes)
        if len(lengths) != len(prefixes):
            raise ValueError(f"{self.bin_path}: got {len(lengths):,} lengths and {len(prefixes):,} prefixes, expected "
                             f"arrays that fit together")
        if len(prefixes) and not 0 <= prefixes.min() <= prefixes.max() < 1 << 16:
            raise ValueError(f"{self.bin_path}: got prefix {prefixes.min()} .. {prefixes.max()}, expected 0 .. 65,535; "
                             f"is it the tokenizer that the ids come from?")
        self.append(ids, lengths)
        self._prefixes.frombytes(prefixes.astype(np.uint16).tobytes())

    def _index_parts(self) -> tuple[int, list[bytes | memoryview]]:
        n = len(self._lengths)
        if not 0 < n < 1 << 32:
            raise ValueError(f"{self.bin_path}: {n:,} entries, expected 1 to {(1 << 32) - 1:,}; leave out an input "
                             f"without documents, cut one with too many")
        code = next(code for code, dtype in GPTS_DTYPES.items() if dtype == self.dtype)
        offsets = _running(np.frombuffer(self._lengths, np.int64))
        return n, [GPTS_HEADER.pack(MAGICS["shards"], 1, code, n), offsets.astype("<i8", copy=False).data,
                   np.frombuffer(self._prefixes, np.uint16).astype("<u2", copy=False).data]


class MegatronWriter(TokenWriter):
    """Writes Megatron's format. `dtype`: in place of the one that fits the vocabulary. Sequences are appended to the
    document that is open, until `end_documents`."""

    def __init__(self, prefix: Path | str, *, vocab_size: int | None = None, dtype: Any = None):
        dtype = np.dtype(dtype or megatron_dtype(vocab_size or 0)).newbyteorder("<")
        if dtype not in MEGATRON_DTYPES.values():
            names = ", ".join(known.name for known in MEGATRON_DTYPES.values())
            raise ValueError(f"dtype {dtype.name}: expected one of {names}")
        limit = int(np.iinfo(dtype).max) + 1
        super().__init__(prefix, dtype=dtype, bound=limit if vocab_size is None else min(vocab_size, limit))
        self._boundaries, self.modes = array("q", [0]), array("b")

    def append(self, ids: Any, lengths: Any) -> None:
        if max(lengths, default=0) > MAX_SEQUENCE:
            raise ValueError(f"{self.bin_path}: a sequence of {max(lengths):,} ids, Megatron's format holds at most "
                             f"{MAX_SEQUENCE:,}")
        super().append(ids, lengths)

    def end_documents(self, counts: Iterable[int]) -> None:
        """End documents, of so many sequences each, that were appended since the last one ended."""
        for count in counts:
            self._boundaries.append(self._boundaries[-1] + int(count))

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        if np.count_nonzero(prefixes):
            raise ValueError(f"{self.bin_path}: entries that repeat others; Megatron's format holds whole documents "
                             f"only")
        self.append(ids, lengths)
        self.end_documents([1] * len(lengths))

    def _index_parts(self) -> tuple[int, list[bytes | memoryview]]:
        n = len(self._lengths)
        if self._boundaries[-1] != n:
            raise ValueError(f"{self.bin_path}: {n - self._boundaries[-1]:,} sequence(s) behind the last document; "
                             f"call end_document() before finalize()")
        code = next(code for code, dtype in MEGATRON_DTYPES.items() if dtype == self.dtype)
        lengths = np.frombuffer(self._lengths, np.int64)
        pointers = _running(lengths * self.dtype.itemsize)[:-1]
        header = MEGATRON_HEADER.pack(MAGICS["megatron"], 1, code, n, len(self._boundaries))
        return len(self._boundaries) - 1, [header, lengths.astype("<i4").data, pointers.astype("<i8", copy=False).data,
                                           np.frombuffer(self._boundaries, np.int64).data, bytes(self.modes)]


WRITERS: dict[str, type[ShardWriter] | type[MegatronWriter]] = {"shards": ShardWriter, "megatron": MegatronWriter}


# ---- the manifest of a folder ---------------------------------------------------------------------------------------

MANIFEST_NAME, MANIFEST_FORMAT, MANIFEST_VERSION = "manifest.json", "nanochat-shards", 1
TOKENIZER_KEYS = {"fingerprint": str, "eod": int, "vocab_size": int}
ARGUMENT_KEYS = {"max_length": int, "overlap_size": int}
RECORD_KEYS = {"input": dict, "documents": int, "entries": int, "tokens": int, "skipped": dict, "bin_bytes": int,
               "bin_hash": str, "idx_hash": str}


def new_manifest(tokenizer: Mapping[str, Any], arguments: Mapping[str, Any], shards: Mapping[str, Any], *,
                 data_format: str = "shards") -> dict[str, Any]:
    """The manifest of a folder of pairs; `data_format` is in it if it is not "shards". `tokenizer` has TOKENIZER_KEYS.
    `shards`: a record for each pair by its name without ending, with RECORD_KEYS, and "groups" (entries of each) where
    they are not GROUP_ENTRIES each."""
    return {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION,
            **({} if data_format == "shards" else {"data_format": data_format}), "tokenizer": dict(tokenizer),
            "arguments": dict(arguments), "shards": {name: shards[name] for name in sorted(shards)}}


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as it is written."""
    return (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode()


def read_manifest(folder: Path | str) -> dict[str, Any] | None:
    """The manifest of a folder of pairs, None where it has none; do not change it, it may be shared. ValueError if it
    is broken or of another format."""
    path = place(folder) / MANIFEST_NAME
    try:
        copy = local(path)
        stat = copy.stat()
    except FileNotFoundError:
        return None
    return _read_manifest(path, copy, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=64)
def _read_manifest(path: Path, copy: Path, mtime_ns: int, size: int) -> dict[str, Any]:
    manifest = read_json(copy)
    kind = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else None
    if kind != (MANIFEST_FORMAT, MANIFEST_VERSION):
        raise ValueError(f"{path}: got {kind or type(manifest).__name__}, expected "
                         f"{(MANIFEST_FORMAT, MANIFEST_VERSION)}; take the file away to read these shards without "
                         f"it, or make them again with scripts.tok_shards")

    def check(name: str, value: Any, keys: Mapping[str, type]) -> None:
        """ValueError unless `value` is an object that has such fields."""
        if not isinstance(value, dict):
            raise ValueError(f"{path}: {name} is {type(value).__name__}, expected a JSON object; {REDO}")
        if missing := sorted(keys.keys() - value.keys()):
            raise ValueError(f"{path}: {name} lacks {', '.join(missing)}; {REDO}")
        for key, expected in keys.items():
            if type(value[key]) is not expected:
                raise ValueError(f"{path}: {key} of {name} is {type(value[key]).__name__}, expected "
                                 f"{expected.__name__}; {REDO}")

    check("tokenizer", manifest.get("tokenizer"), TOKENIZER_KEYS)
    check("arguments", manifest.get("arguments"), ARGUMENT_KEYS)
    check("shards", manifest.get("shards"), {})
    for name, record in manifest["shards"].items():
        check(name, record, RECORD_KEYS)
        groups = record.get("groups")
        if groups is not None and not (isinstance(groups, list) and groups and all(type(n) is int for n in groups)):
            raise ValueError(f"{path}: groups of {name} are no list of numbers; {REDO}")
    return manifest


def ends_follow(manifest: Mapping[str, Any] | None) -> bool:
    """Whether lengths and prefixes tell which entries end a document: each later window has a prefix, or there is
    none."""
    if manifest is None:
        return False
    arguments = manifest["arguments"]
    return arguments["max_length"] == 0 or arguments["overlap_size"] > 0


def record_groups(record: Mapping[str, Any] | None, entries: int) -> list[int]:
    """Entries of each group of a pair."""
    if record is not None and record.get("groups") is not None:
        return list(record["groups"])
    whole, rest = divmod(entries, GROUP_ENTRIES)
    return [GROUP_ENTRIES] * whole + [rest] * (rest > 0)
