"""
Megatron's token files: documents of sequences, an index that is mapped and never read as a whole.

    web.bin   t t t t t t t t t t t t            ids, of the type the index names
    web.idx   "MMIDIDX\\0\\0" | u64 version 1 | u8 type | u64 sequences n | u64 boundaries d + 1      34 bytes
              5 3 4                              n int32: ids of each sequence
              0 10 16                            n int64: where in .bin each begins, in bytes (here of 2 an id)
              0 2 3                              d + 1 int64: the sequences of document k are b[k] .. b[k + 1] - 1
              (0 0 0)                            n int8, only in multimodal files: the mode of each sequence

Above: a document of two sequences and one of one. Everything is little-endian; the types are DTYPES. The format and the
names `IndexedDataset` and `IndexedDatasetBuilder` are those of megatron-core (core/datasets/indexed_dataset.py), whose
files are read here and which reads ours.

**Reading.** Opening a file looks at its header, sizes, and both ends of each table: as quick for 10^9 sequences as for
ten. What stands between is checked where it is used. Sequences need not lie in the file in their order, nor without
gaps; where those of some documents do, `Documents.spans` says so, and they are one stretch.

**Writing.** Ids go to a temporary .bin as they come, the index is renamed last (`shards.PairFiles`): before `finalize`
there is nothing to see. 4 bytes a sequence and 8 a document are held.

Rejected: the offsets of shards.py made of lengths at opening, which would be one format less to read by; it holds 8
bytes a document and takes seconds at 10^8.
"""

import contextlib
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.common import local, place
from nanochat.readers import IdReader, Range, map_file, open_reader
from nanochat.shards import PairFiles, ShardWriter

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {code: np.dtype(name) for code, name in enumerate(
    ("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)}
BLOCK = 1 << 20  # elements of a table that are made at once
MAX_LENGTH = 2**31 - 1  # ids of a sequence


def dtype_code(dtype: Any) -> int:
    """The code of a type of ids. ValueError for types that are none of the format's, or no integers."""
    dtype = np.dtype(dtype).newbyteorder("<")
    for code, known in DTYPES.items():
        if known == dtype and dtype.kind in "iu":
            return code
    raise ValueError(f"dtype {dtype.name}: expected one of {', '.join(_names())}")


def _names() -> list[str]:
    return [dtype.name for dtype in DTYPES.values() if dtype.kind in "iu"]


def best_dtype(vocab_size: int) -> np.dtype:
    """The type of ids below `vocab_size`: uint16, or int32 for more than 65,500 (Megatron's own choice)."""
    return DTYPES[8 if vocab_size < 65500 else 4]


def pair_paths(path_prefix: Path | str) -> tuple[Path, Path]:
    """(.bin, .idx) of a prefix, which may have dots in it."""
    prefix = place(path_prefix)
    return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")


# ---- reading --------------------------------------------------------------------------------------------------------

class Index:
    """An open .idx: its tables as views of the memory map."""

    def __init__(self, path: Path | str, *, multimodal: bool = False):
        """ValueError or FileNotFoundError naming the file if it is no whole index."""
        self.path = path = place(path)
        self.dtype, n, boundaries, size = read_header(path)
        expected = HEADER.size + 12 * n + 8 * boundaries
        if size - expected not in ((n,) if multimodal else (0, n)):
            raise ValueError(f"{path}: {size:,} bytes, expected {expected + multimodal * n:,} for {n:,} sequences and "
                             f"{boundaries:,} document boundaries{' with modes' * multimodal}; it was cut short or is "
                             f"of another kind: fetch or make it again")
        self.has_modes = n > 0 and size == expected + n  # whether read or not
        data, at = map_file(local(path)), HEADER.size
        self.sequence_lengths = np.frombuffer(data, "<i4", n, at)
        self.sequence_pointers = np.frombuffer(data, "<i8", n, at + 4 * n)
        self.document_indices = np.frombuffer(data, "<i8", boundaries, at + 12 * n)
        self.sequence_modes = np.frombuffer(data, "i1", n, expected) if multimodal else None
        first, last = self.document_indices[[0, -1]].tolist()
        if (first, last) != (0, n):
            raise ValueError(f"{path}: its document boundaries go from {first:,} to {last:,}, expected 0 to {n:,}, the "
                             f"number of its sequences; make it again")

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def stretches(self, first: int, last: int, file_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """(first ids, lengths) of sequences first .. last - 1, in ids: two (n,) int64. ValueError naming the file for
        a sequence that does not lie in its `file_bytes`."""
        return self.checked(np.s_[first:last], file_bytes)

    def checked(self, where: Any, file_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """`stretches` of the sequences that a slice or an array of numbers names."""
        lengths = self.sequence_lengths[where].astype(np.int64)
        pointers = self.sequence_pointers[where]
        size = self.dtype.itemsize
        wrong = (pointers < 0) | (lengths < 0) | (pointers > file_bytes - lengths * size) | (pointers % size != 0)
        if np.count_nonzero(wrong):
            at = int(np.argmax(wrong))
            number = where.start + at if isinstance(where, slice) else int(where[at]) % len(self)
            raise ValueError(f"{self.path}: sequence {number:,} is {lengths[at]:,} ids at byte {pointers[at]:,}, which "
                             f"is no place in its .bin of {file_bytes:,} bytes; make the pair again")
        return pointers // size, lengths

    def boundaries(self, first: int, last: int) -> np.ndarray:
        """The boundaries of documents first .. last - 1, (n + 1,) int64. ValueError where they run backwards."""
        found = self.document_indices[first:last + 1]
        if np.count_nonzero(found[1:] < found[:-1]) or found[0] < 0 or found[-1] > len(self):
            raise ValueError(f"{self.path}: the boundaries of documents {first:,} to {last:,} run backwards or beyond "
                             f"its {len(self):,} sequences; python -m scripts.verify tells which, make the pair again")
        return found


@contextlib.contextmanager
def _missing_told(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        other = path.with_name(path.name[:-4] + (".bin" if path.suffix == ".idx" else ".idx"))
        why = (f"but {other.name} is there; bring it back (Megatron's files are pairs of .bin and .idx)"
               if other.exists() else "and no other half of it; is the path right?")
        raise FileNotFoundError(f"{path}: no such file, {why}") from None


def read_header(path: Path) -> tuple[np.dtype, int, int, int]:
    """(type of the ids, sequences, document boundaries, bytes of the file) of an .idx, from its first 34 bytes.
    ValueError if it is none."""
    with _missing_told(path), open(local(path), "rb") as f:
        header, size = f.read(HEADER.size), f.seek(0, 2)
    if len(header) < HEADER.size:
        raise ValueError(f"{path}: {len(header)} bytes, expected a header of {HEADER.size}; it was cut short: fetch or "
                         f"make it again")
    magic, version, code, n, boundaries = HEADER.unpack(header)
    if magic != MAGIC:
        raise ValueError(f"{path}: it begins with {magic[:4]!r}, expected {MAGIC!r}; it is no index of Megatron's")
    if version != VERSION:
        raise ValueError(f"{path}: format version {version}, expected {VERSION}")
    if code not in DTYPES:
        raise ValueError(f"{path}: type code {code}, expected 1 to {len(DTYPES)}; it is broken or newer than this")
    if DTYPES[code].kind == "f":
        raise ValueError(f"{path}: its elements are {DTYPES[code].name}, expected ids ({', '.join(_names())})")
    if boundaries < 1:
        raise ValueError(f"{path}: no document boundary, expected at least one; make it again")
    return DTYPES[code], n, boundaries, size


class IndexedDataset:
    """The sequences of PATH_PREFIX.bin and .idx, by the names that Megatron's users know.

    `dataset[i]` is sequence i, `dataset[a:b]` a list of them: read-only arrays of `dtype`, views with `mmap`. With
    `multimodal` each comes with its mode(s), as a tuple. ValueError or FileNotFoundError naming the file if the pair
    is not whole; what is broken between the ends of the index is told when it is used.
    """

    def __init__(self, path_prefix: Path | str, multimodal: bool = False, mmap: bool = True):
        self.path_prefix, self.multimodal = str(path_prefix), multimodal
        self.bin_path, idx_path = pair_paths(path_prefix)
        self.index = Index(idx_path, multimodal=multimodal)
        with _missing_told(self.bin_path):
            self.file_bytes = self.bin_path.stat().st_size
        self.index.checked(np.array([0, -1], np.int64)[:2 * len(self)], self.file_bytes)
        self.reader: IdReader = open_reader(self.bin_path, self.dtype, mapped=mmap)

    @property
    def dtype(self) -> np.dtype:
        """The type of the ids."""
        return self.index.dtype

    @property
    def sequence_lengths(self) -> np.ndarray:
        """(n,) int32: ids of each sequence."""
        return self.index.sequence_lengths

    @property
    def sequence_pointers(self) -> np.ndarray:
        """(n,) int64: byte of .bin at which each begins."""
        return self.index.sequence_pointers

    @property
    def document_indices(self) -> np.ndarray:
        """(d + 1,) int64: boundaries of documents, in sequences."""
        return self.index.document_indices

    @property
    def sequence_modes(self) -> np.ndarray | None:
        """(n,) int8, None unless multimodal."""
        return self.index.sequence_modes

    @staticmethod
    def exists(path_prefix: Path | str) -> bool:
        """Whether both files are there."""
        return all(path.exists() for path in pair_paths(path_prefix))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, which: int | slice) -> Any:
        if not isinstance(which, slice):
            return self.get(which)
        first, last, step = which.indices(len(self))
        if step != 1:
            raise ValueError(f"{self.path_prefix}: a slice with step {step}, expected neighbours (step 1)")
        last = max(first, last)
        begins, lengths = self.index.stretches(first, last, self.file_bytes)
        found = self.reader.read_many(list(zip(begins.tolist(), (begins + lengths).tolist())))
        return (found, self.sequence_modes[first:last]) if self.sequence_modes is not None else found

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """`length` ids (default: all) of sequence `idx` from its id `offset` on. IndexError for a number outside the
        data set, ValueError for ids outside the sequence."""
        number = int(idx) + len(self) * (idx < 0)
        if not 0 <= number < len(self):
            raise IndexError(f"{self.path_prefix}: sequence {idx:,}, it has {len(self):,}")
        begins, lengths = self.index.stretches(number, number + 1, self.file_bytes)
        begin, size = int(begins[0]), int(lengths[0])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise ValueError(f"{self.path_prefix}: ids {offset:,} to {stop:,} of sequence {number:,}, which has "
                             f"{size:,}")
        ids = self.reader.read(begin + offset, begin + stop)
        return (ids, self.sequence_modes[number]) if self.sequence_modes is not None else ids


class Documents:
    """The documents of a pair, given by its .bin, as entries of the stream (`nanochat.pairs.Entries`): the sequences
    of each, one after another."""

    def __init__(self, path: Path, index: Index, file_bytes: int):
        self.path, self.index, self.file_bytes = path, index, file_bytes
        self.dtype, self.num_tokens = index.dtype, file_bytes // index.dtype.itemsize

    def __len__(self) -> int:
        return len(self.index.document_indices) - 1

    def spans(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, list[Range] | None]:
        """(starts, ends, None): documents first .. last - 1, which stand one after another in .bin, in ids: two (n,)
        int64. Where they do not, (starts, ends, stretches): counted in what reading the stretches one after another
        gives. ValueError naming the file for what cannot be."""
        edges = self.index.boundaries(first, last)
        begins, lengths = self.index.stretches(int(edges[0]), int(edges[-1]), self.file_bytes)
        ends = begins + lengths
        in_order = not np.count_nonzero(begins[1:] != ends[:-1])
        at = np.zeros(len(begins) + 1, np.int64)
        np.cumsum(lengths, out=at[1:])
        if in_order and len(begins):
            at += begins[0]
        at = at[edges - edges[0]]
        return at[:-1], at[1:], None if in_order else list(zip(begins.tolist(), ends.tolist()))

    def repeats(self, first: int, last: int) -> np.ndarray:
        """How many first ids of each repeat the one before it: none, (n,) uint16."""
        return np.zeros(last - first, np.uint16)


def open_documents(path: Path) -> Documents:
    """The documents of a pair, given by its .bin. Errors as of `IndexedDataset`."""
    index = Index(path.with_name(path.name[:-4] + ".idx"))
    with _missing_told(path):
        file_bytes = path.stat().st_size
    index.checked(np.array([0, -1], np.int64)[:2 * len(index)], file_bytes)
    if len(index.document_indices) == 1:
        raise ValueError(f"{index.path}: no document in it; delete the pair or make it again")
    return Documents(path, index, file_bytes)


# ---- writing --------------------------------------------------------------------------------------------------------

class IndexedDatasetBuilder:
    """Writes a pair, sequence by sequence, by the names that Megatron's users know. Nothing is there before
    `finalize`, which gives back the checksums of .bin and .idx; after an error, or without it, nothing ever is.

    ValueError for ids that the type cannot hold: they are never wrapped around.
    """

    def __init__(self, bin_path: Path | str, dtype: Any = np.int32, multimodal: bool = False):
        self.code = dtype_code(dtype)
        self.dtype, self.multimodal = DTYPES[self.code], multimodal
        self.bin_path = Path(bin_path)
        self.num_tokens = 0
        self._files = PairFiles(self.bin_path)
        self._lengths, self._boundaries, self._modes = array("i"), array("q", [0]), array("b")

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Append a sequence (n,) of ids to the document that is open."""
        self.add_sequences(tensor, [len(tensor)], [mode])

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append a document: its ids, and how many each of its sequences has."""
        self.add_sequences(tensor, lengths, modes)
        self.end_document()

    def add_documents(self, ids: Any, lengths: Any) -> None:
        """Append documents of one sequence each: their ids one after another, and how many each has (n,)."""
        first = len(self._lengths)
        self.add_sequences(ids, lengths)
        self.end_documents(np.arange(first + 1, len(self._lengths) + 1))

    def add_sequences(self, ids: Any, lengths: Any, modes: Sequence[int] | None = None) -> None:
        """Append sequences to the document that is open: their ids one after another, and how many each has (n,)."""
        given, counts = np.asarray(ids).reshape(-1), np.asarray(lengths, np.int64)
        if counts.sum() != len(given) or (len(counts) and not 0 <= counts.min() <= counts.max() <= MAX_LENGTH):
            raise ValueError(f"{self.bin_path}: got {len(given):,} ids and {len(counts):,} lengths that add up to "
                             f"{counts.sum():,}, expected as many, and lengths of 0 to {MAX_LENGTH:,}")
        if given.dtype != self.dtype and len(given):
            limits = np.iinfo(self.dtype)
            if given.dtype.kind not in "iu" or not limits.min <= given.min() <= given.max() <= limits.max:
                raise ValueError(f"{self.bin_path}: got {given.dtype.name} ids {given.min()} .. {given.max()}, expected"
                                 f" integers that {self.dtype.name} can hold; take a larger dtype")
        marks = [0] * len(counts) if modes is None else list(modes)
        if len(marks) != len(counts):
            raise ValueError(f"{self.bin_path}: got {len(marks):,} modes for {len(counts):,} sequences")
        self._files.write(np.ascontiguousarray(given, self.dtype).data)
        self.num_tokens += len(given)
        self._lengths.frombytes(counts.astype(np.int32).tobytes())
        if self.multimodal:
            self._modes.extend(marks)

    def add_index(self, path_prefix: Path | str) -> None:
        """Append all of another pair, whose ids have the same type. Reads it in blocks."""
        other = IndexedDataset(path_prefix, multimodal=self.multimodal)
        if other.dtype != self.dtype:
            raise ValueError(f"{path_prefix}: its ids are {other.dtype.name}, those of {self.bin_path} "
                             f"{self.dtype.name}; make them of one type")
        first = len(self._lengths)
        for at in range(0, len(other), BLOCK):
            lengths = other.sequence_lengths[at:at + BLOCK]
            for ids in other[at:at + BLOCK][0] if self.multimodal else other[at:at + BLOCK]:
                self._files.write(ids.data)
            self.num_tokens += int(lengths.sum(dtype=np.int64))
            self._lengths.frombytes(lengths.tobytes())
        if other.sequence_modes is not None:
            self._modes.frombytes(other.sequence_modes.tobytes())
        for at in range(1, len(other.document_indices), BLOCK):
            until = min(at + BLOCK, len(other.document_indices))
            self._boundaries.frombytes((first + other.index.boundaries(at - 1, until - 1)[1:]).tobytes())

    def end_document(self) -> None:
        """End the document that is open."""
        self._boundaries.append(len(self._lengths))

    def end_documents(self, ends: np.ndarray) -> None:
        """End documents, one before each of these sequences, by their numbers, which ascend."""
        self._boundaries.frombytes(ends.astype(np.int64).tobytes())

    def finalize(self, idx_path: Path | str) -> tuple[str, str]:
        """Write the index; both files appear. Returns their checksums (.bin, .idx). ValueError if the last sequences
        are in no document."""
        if self._boundaries[-1] != len(self._lengths):
            error = ValueError(f"{self.bin_path}: {len(self._lengths) - self._boundaries[-1]:,} sequence(s) behind the "
                               f"last document; call end_document() before finalize()")
            self.abandon(error)
            raise error
        return self._files.commit(Path(idx_path), self._index_parts())

    def abandon(self, error: BaseException | None = None) -> None:
        """Give it up: nothing is left."""
        self._files.abandon(error or KeyboardInterrupt())

    def _index_parts(self) -> Iterator[Any]:
        yield from index_parts(self.code, np.frombuffer(self._lengths, np.int32),
                               np.frombuffer(self._boundaries, np.int64))
        yield np.frombuffer(self._modes, np.int8).data


class DocumentWriter(ShardWriter):
    """`shards.ShardWriter` for this format: an entry is a document, whole, in one sequence. ValueError for prefixes,
    which the format cannot tell from ids of their own."""

    def __init__(self, path: Path | str, *, vocab_size: int, dtype: np.dtype | None = None):
        super().__init__(path, vocab_size=vocab_size, dtype=dtype or best_dtype(vocab_size))

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        """As of `ShardWriter`."""
        if np.count_nonzero(prefixes) or max(lengths, default=0) > MAX_LENGTH:
            raise ValueError(f"{self.bin_path}: entries that repeat others, or of more than {MAX_LENGTH:,} ids; "
                             f"Megatron's format holds whole documents of at most so many")
        super().add(ids, lengths, prefixes)

    def _index_parts(self) -> Iterable[Any]:
        lengths = np.concatenate([np.empty(0, np.int64), *self._lengths]).astype(np.int32)
        if not len(lengths):
            raise ValueError(f"{self.bin_path}: 0 documents; leave out an input without documents")
        return index_parts(dtype_code(self.dtype), lengths, np.arange(len(lengths) + 1))


def index_parts(code: int, lengths: np.ndarray, boundaries: np.ndarray) -> Iterator[Any]:
    """An .idx, part after part, of sequences that stand one after another: their lengths (n,) int32 and the boundaries
    of documents (d + 1,) int64."""
    size, at = DTYPES[code].itemsize, 0
    yield HEADER.pack(MAGIC, VERSION, code, len(lengths), len(boundaries))
    yield lengths.data
    for first in range(0, len(lengths), BLOCK):
        own = lengths[first:first + BLOCK].astype(np.int64) * size
        ends = at + np.cumsum(own)
        at = int(ends[-1])
        yield (ends - own).data
    yield boundaries.data
