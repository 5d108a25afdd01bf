"""Megatron's pairs of files under megatron-core's names: read, written and merged. Your own code
may import this module, and it can stand in for `megatron.core.datasets.indexed_dataset`
(docs/megatron.md).

    web.bin     t t t t E t t E t t t t E        IndexedDataset(prefix)[i], sequence i
    web.idx     lengths, pointers, documents     IndexedDataset(prefix).index, the tables
                modes                            of multimodal data: one number for each sequence

nanochat/tokens.py explains the format, and reads and checks it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from nanochat.common import is_remote
from nanochat.pretokenize import MegatronWriter
from nanochat.tokens import MappedReader, Reader, TokenFile, pair_paths

if TYPE_CHECKING:
    import torch

    Ids = torch.Tensor | np.ndarray | Sequence[int]

COPIED_IDS = 1 << 22  # ids that `add_index` holds in memory at once


class DType(Enum):
    """The types of ids, by their codes in an .idx."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: DTypeLike) -> int:
        """The code of a NumPy type."""
        return cls[np.dtype(value).name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> Any:
        """The NumPy type of a code."""
        return getattr(np, cls(value).name)

    @staticmethod
    def size(key: DTypeLike | int) -> int:
        """Bytes of an id, from the NumPy type or its code."""
        return np.dtype(DType.dtype_from_code(key) if isinstance(key, int) else key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.generic]:
        """The type for a vocabulary of `cardinality` ids: as in megatron-core, uint16 below 65,500,
        else int32."""
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32


@dataclass(frozen=True)
class ObjectStorageConfig:
    """Settings for files in object storage: the folder for copies of .idx files, and the size of
    chunks, which has no effect, because exactly the bytes of a sample are fetched."""

    path_to_idx_cache: str
    bin_chunk_nbytes: int = 256 << 20


is_object_storage_path = is_remote  # megatron-core's name; also true for gs:// and az://


def get_bin_path(path_prefix: Path | str) -> str:
    """The .bin of a prefix."""
    return f"{path_prefix}.bin"


def get_idx_path(path_prefix: Path | str) -> str:
    """The .idx of a prefix."""
    return f"{path_prefix}.idx"


class Index(NamedTuple):
    """The tables of an .idx."""

    dtype: Any  # the NumPy type of the ids, such as numpy.uint16
    dtype_size: int  # bytes of an id
    sequence_lengths: np.ndarray  # (n,) int32
    sequence_pointers: np.ndarray  # (n,) int64: bytes of the .bin
    document_indices: np.ndarray  # (documents + 1,) int64: sequences
    sequence_modes: np.ndarray | None  # (n,) int8, of multimodal data

    @property
    def sequence_count(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    @property
    def document_count(self) -> int:
        """Number of boundaries of documents, one more than there are documents."""
        return len(self.document_indices)


class FileReader(Reader):
    """Reads into new arrays. The file is opened for each read, so any number of files can be in
    use. Its size and modification time must not change while the reader exists."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path = path
        self.dtype = dtype
        self.version = self._version()

    def _version(self) -> tuple[int, int]:
        stat = self.path.stat()
        return stat.st_size, stat.st_mtime_ns

    def read(self, begin: int, end: int) -> np.ndarray:
        """See `Reader.read`; ValueError if the file was truncated or changed since it was opened."""
        elements = np.fromfile(
            self.path, self.dtype, count=end - begin, offset=begin * self.dtype.itemsize
        )
        if len(elements) < end - begin or self._version() != self.version:
            raise ValueError(
                f"{self.path}: the file was truncated or changed while it was in use; restore the old "
                f"file, or start a new run (--model-tag)"
            )
        elements.flags.writeable = False
        return elements


class IndexedDataset:
    """The sequences of PATH_PREFIX.bin and .idx: `dataset[i]` is sequence i, a read-only array of
    `dtype`; `dataset[a:b]` is a list of them. With `multimodal`, they are (sequence, its mode) and
    (list, modes). `mmap`: map local files into memory instead of reading them. ValueError or
    FileNotFoundError names a bad or missing file."""

    def __init__(
        self,
        path_prefix: Path | str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: ObjectStorageConfig | None = None,
    ):
        self.path_prefix, self.multimodal = str(path_prefix), multimodal
        cache = None
        if object_storage_config is not None:
            cache = object_storage_config.path_to_idx_cache
        if not self.exists(path_prefix):
            missing = " and ".join(
                str(path) for path in pair_paths(path_prefix) if not path.is_file()
            )
            raise FileNotFoundError(f"{path_prefix}: no such pair; missing: {missing}")
        self.file = TokenFile(
            pair_paths(path_prefix)[0],
            open_local=MappedReader if mmap else FileReader,
            cache=cache,
        )
        if self.file.format != "megatron":
            raise ValueError(
                f"{self.file.idx_path}: expected a pair in Megatron's format, got --data-format "
                f"{self.file.format}; convert it with python -m scripts.convert_shards"
            )
        if multimodal and "modes" not in self.file.tables:
            raise ValueError(
                f"{self.file.idx_path}: its sequences have no modes; open it with multimodal=False"
            )
        self.dtype = self.file.dtype
        self.sequence_lengths = self.file.table("lengths")  # (n,) int32
        self.sequence_pointers = self.file.table("pointers")  # (n,) int64: bytes of the .bin
        self.document_indices = self.file.table("boundaries")  # (documents + 1,) int64: sequences
        self.sequence_modes = self.file.table("modes") if multimodal else None  # (n,) int8

    @property
    def index(self) -> Index:
        """The tables."""
        return Index(
            self.dtype.type,
            self.dtype.itemsize,
            self.sequence_lengths,
            self.sequence_pointers,
            self.document_indices,
            self.sequence_modes,
        )

    def get_document_indices(self) -> np.ndarray:
        """`document_indices`, by megatron-core's older name."""
        return self.document_indices

    @staticmethod
    def exists(path_prefix: Path | str) -> bool:
        """Whether both files exist."""
        return all(path.is_file() for path in pair_paths(path_prefix))

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, which: int | slice) -> Any:
        if not isinstance(which, slice):
            return self.get(which)
        ids = [self._read(number) for number in range(*which.indices(len(self)))]
        return ids if self.sequence_modes is None else (ids, self.sequence_modes[which])

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """`length` ids (default: all) of sequence `idx`, starting at `offset`; with `multimodal`, a
        pair with its mode. IndexError for a number outside the data set, ValueError for ids outside
        the sequence."""
        ids = self._read(idx, offset, length)
        return ids if self.sequence_modes is None else (ids, self.sequence_modes[idx])

    def _read(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        number = int(idx) + len(self) * (idx < 0)
        if not 0 <= number < len(self):
            raise IndexError(
                f"{self.path_prefix}: got sequence {idx:,}, but it has {len(self):,} of them"
            )
        one, size = slice(number, number + 1), int(self.sequence_lengths[number])
        begin = int(
            self.file.places(np.array([number]), self.sequence_pointers[one], np.array([size]))[0]
        )
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise ValueError(
                f"{self.path_prefix}: got ids {offset:,} to {stop:,} of sequence {number:,}, which has "
                f"{size:,} ids"
            )
        # samples are scattered over the file, so `read_many` fetches exactly these bytes from
        # object storage
        ids = self.file.reader.read_many([(begin + offset, begin + stop)])[0]
        self.file.check_ids(ids, [0, len(ids)], number, "sequence")
        return ids


class IndexedDatasetBuilder:
    """Writes a pair, sequence by sequence. `finalize` renames the files into place. With
    `multimodal`, each sequence has a mode (default: 0). ValueError for ids that the type cannot
    hold; ids never wrap around."""

    def __init__(self, bin_path: Path | str, dtype: DTypeLike = np.int32, multimodal: bool = False):
        self._writer = MegatronWriter(str(bin_path).removesuffix(".bin"), dtype=dtype)
        self._writer.modes = array("b") if multimodal else None
        self._open = 0  # sequences of the open document

    def add_item(self, tensor: "Ids", mode: int = 0) -> None:
        """Append a sequence (n,) of ids to the open document."""
        self._append(tensor, [len(tensor)], [mode])
        self._open += 1

    def add_document(
        self, tensor: "Ids", lengths: Sequence[int], modes: Sequence[int] | None = None
    ) -> None:
        """Append a document: its ids, and the length and mode of each of its sequences."""
        self._append(tensor, lengths, [0] * len(lengths) if modes is None else modes)
        self._open += len(lengths)
        self.end_document()

    def add_index(self, path_prefix: Path | str) -> None:
        """Append all documents of another pair. ValueError if its ids have another type, or if a
        document is open."""
        other = IndexedDataset(path_prefix, multimodal=self._writer.modes is not None)
        if other.dtype != self._writer.dtype:
            raise ValueError(
                f"{other.file.path}: its ids are {other.dtype.name}, but the pair that it is added to has "
                f"{self._writer.dtype.name}; tokenize both with the same tokenizer"
            )
        if self._open:
            raise ValueError(
                f"{other.file.path}: the document before it has not ended; call end_document() first"
            )
        modes = (
            np.zeros(len(other), np.int8) if other.sequence_modes is None else other.sequence_modes
        )
        first = 0
        ids = 0
        for number, length in enumerate(other.sequence_lengths.tolist(), 1):
            ids += length
            if ids >= COPIED_IDS or number == len(other):
                some = slice(first, number)
                sequences = [other._read(i) for i in range(first, number)]
                self._append(np.concatenate(sequences), other.sequence_lengths[some], modes[some])
                first = number
                ids = 0
        self._writer.end_documents(np.diff(other.document_indices).tolist())

    def _append(
        self, ids: "Ids", lengths: Sequence[int] | np.ndarray, modes: Sequence[int] | np.ndarray
    ) -> None:
        numbers = np.asarray(modes, np.int64)
        if len(numbers) != len(lengths) or not np.array_equal(numbers, numbers.astype(np.int8)):
            raise ValueError(
                f"{self._writer.bin_path}: got {len(numbers):,} modes for {len(lengths):,} sequences, "
                f"expected one for each, in -128 .. 127"
            )
        self._writer.append(ids, lengths)
        if self._writer.modes is not None:
            self._writer.modes.frombytes(numbers.astype(np.int8).tobytes())

    def end_document(self) -> None:
        """End the open document."""
        self._writer.end_documents([self._open])
        self._open = 0

    def finalize(self, idx_path: Path | str) -> None:
        """Write the index and rename both files into place. ValueError if a document is still open,
        or `idx_path` is not beside the .bin."""
        if Path(idx_path) != self._writer.idx_path:
            raise ValueError(f"{idx_path}: expected {self._writer.idx_path}, beside the .bin")
        self._writer.commit()
