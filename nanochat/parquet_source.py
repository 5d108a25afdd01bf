"""
The source of text: parquet files. Other text is prepared as parquet first (nanochat/prepare.py).

A row group can only be read from its beginning, but a lane needs 64 documents now and the next 64
much later. Holding each lane's group decoded would cost megabytes per lane; decoding it for each
unit would decode a group of 1,024 documents sixteen times. So a group is decoded once, and the
units that the lane will read soon are kept compressed. A *small* bucket (at most 32 Mi tokens,
about 128 MB of text) is read in random order: each group is decoded once in the whole run, and its
documents stay in memory, each compressed individually. (Compressing several together saved no
memory, and took 20 % longer per document.) If files joined a bucket in a fork,
their own tokens alone decide whether they are small. A *large* group, such as one of books, is
decoded into a file that all lanes read (nanochat/spill.py).
"""

import functools
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import AnyPath, Remote, counted, etag_of, hash_bytes
from nanochat.pins import Manifest, Pin
from nanochat.prepare import FILE, LINE
from nanochat.rows import Document
from nanochat.sources import Place, Source
from nanochat.spill import LARGE_BYTES, Spill, Spills, decode_group
from nanochat.text import (
    is_blank,
    leaf_column,
    open_parquet,
    read_batches,
    read_footer,
    text_tokens,
)
from nanochat.text_kinds import is_empty_text
from nanochat.tokenizer import CannotEncode, Tokenizer

# Footers in memory. If each read of a group parses one, a resume takes 25 s of processor time with
# 10,000 groups of a single document in a file.
FOOTERS = 8
GROUPS_AHEAD = 3  # the group that a lane reads now, and those after it


class KeptUnits:
    """Units that lanes will read soon, compressed. A unit is taken once."""

    def __init__(self) -> None:
        # by (group, first number, number of documents)
        self.units: dict[tuple[int, int, int], bytes] = {}

    def __len__(self) -> int:
        return len(self.units)

    def put(self, group: int, first: int, texts: pa.Array) -> None:
        """Keep the texts of a unit, as a compressed Arrow stream of one batch."""
        batch = pa.record_batch([texts], ["text"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(
            sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
        ) as out:
            out.write(batch)
        self.units[group, first, len(texts)] = sink.getvalue().to_pybytes()

    def take(self, group: int, first: int, size: int) -> pa.ChunkedArray | None:
        """The texts of a unit, which is no longer kept; None if it was not."""
        data = self.units.pop((group, first, size), None)
        return None if data is None else pa.ipc.open_stream(data).read_all()["text"]


class ParquetSource(Source):
    """Text in parquet files."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer):
        super().__init__(manifest, tokenizer)
        self._kept = KeptUnits()
        self._groups = functools.cache(self._pack_group)  # of small parts of the bucket
        small = filter(self.is_small, range(len(self.groups)))
        self._locks = {group: threading.Lock() for group in small}
        self._spills = Spills()
        self._text_bytes = functools.cache(self._read_text_bytes)
        self._footer = functools.lru_cache(FOOTERS)(self._read_footer)
        self._origins = functools.lru_cache(64)(self._read_origins)
        self.ahead = GROUPS_AHEAD if any(isinstance(path, Remote) for path in self.paths) else 0

    @staticmethod
    def scan_file(path: AnyPath, name: str, text_field: str) -> Pin:
        """The pin has "nulls": their number, if there are any; None if the footer does
        not say it."""
        footer = read_footer(path, text_field)
        documents = sum(footer.counts)
        entry: Pin = {
            "name": name,
            "size": path.stat().st_size,
            "footer": hash_bytes(footer.raw),
            "groups": footer.counts,
            "tokens": text_tokens(footer.text_bytes, documents),
            **etag_of(path),
        }
        if footer.nulls != 0:
            entry["nulls"] = footer.nulls
        if footer.origin is not None:  # our own bytes may depend on the version of pyarrow
            entry["size"], entry["footer"] = footer.origin
        return entry

    @staticmethod
    def is_empty(path: AnyPath) -> bool:
        return is_empty_text(path)

    @staticmethod
    def check_scanned(files: Sequence[AnyPath], text_field: str) -> None:
        """ValueError if all documents are empty."""
        if all(is_blank(file, text_field) for file in files):
            raise ValueError(
                f"{files[0]}: this data ({counted(len(files), 'file')}) contains only empty documents; "
                f"choose other data with --data-path and --val-path, or another --text-field"
            )

    def read(self, group: int, numbers: np.ndarray, keep: int = 0) -> list[Document]:
        """The next documents up to `keep` are also decoded, and kept compressed."""
        if self.is_small(group):
            with self._locks[group]:  # other threads wait here until this group is decoded
                packed = self._groups(group)
            texts = [
                pa.decompress(data, size, codec="lz4_raw", asbytes=True).decode()
                for size, data in (packed[number] for number in numbers.tolist())
            ]
        elif self._is_large(group):
            texts = self._read_large(group, numbers, keep)
        else:
            first = int(numbers.min())
            column = self._kept.take(group, first, len(numbers)) if keep else None
            if column is None:
                column = self._decode(group, first, int(numbers.max()) + 1, keep)
            texts = column.take(pa.array(numbers - first)).to_pylist()
        try:
            ids, edges = self.tokenizer.encode_flat(texts, num_threads=1)
        except CannotEncode as e:
            name, row_group = self.locate(group)
            raise ValueError(
                f"{name}: row group {row_group}, row {numbers[e.number]}: {e.reason}"
            ) from None
        # a copy of each: a view would keep the ids of all in memory
        return [Document(ids[begin:end].copy()) for begin, end in pairwise(edges.tolist())]

    def expect(self, groups: Sequence[int]) -> None:
        for distance, group in enumerate(groups):
            file, row_group = self.file_of(group)
            path = self.paths[file]
            if isinstance(path, Remote):
                path.read_soon(row_group, self.text_field, distance)

    def texts(self, group: int) -> Iterator[str]:
        num_documents = int(self.groups[group])
        if self._is_large(group):
            for first in range(0, num_documents, 64):
                numbers = np.arange(first, min(first + 64, num_documents))
                yield from self._read_large(group, numbers, num_documents)
        else:
            yield from self._decode(group, 0, num_documents, 0).to_pylist()

    def origin_of(self, group: int, number: int) -> Place | None:
        origins = self._origins(group)
        if origins is None:
            return None
        return Place(origins[FILE][number].as_py(), origins[LINE][number].as_py())

    def _read_origins(self, group: int) -> pa.Table | None:
        """The columns of a group that say where its documents are in the user's own files. None if
        it was not prepared."""
        file, row_group = self.file_of(group)
        with open_parquet(self.paths[file], self.text_field) as f:
            if not {FILE, LINE} <= set(f.schema_arrow.names):
                return None
            return f.read_row_group(row_group, columns=[FILE, LINE])

    def _pack_group(self, group: int) -> list[tuple[int, bytes]]:
        """(size in bytes, compressed text) of every document of a group."""
        packed = []
        for text in self.texts(group):
            data = text.encode()
            packed.append((len(data), pa.compress(data, codec="lz4_raw", asbytes=True)))
        return packed

    def _read_footer(self, file: int) -> pq.FileMetaData:
        """The footer of a file."""
        with open_parquet(self.paths[file], self.text_field) as f:
            return f.metadata

    def _read_text_bytes(self, file: int) -> list[int]:
        """The bytes of text in each group of a file."""
        metadata = self._footer(file)
        text = leaf_column(metadata, self.text_field)
        return [
            metadata.row_group(g).column(text).total_uncompressed_size
            for g in range(metadata.num_row_groups)
        ]

    def _is_large(self, group: int) -> bool:
        """Whether a group is decoded into a file. A group that is missing is not: reading it names
        the problem."""
        file, row_group = self.file_of(group)
        sizes = self._text_bytes(file)
        return row_group < len(sizes) and sizes[row_group] > LARGE_BYTES

    def _read_large(self, group: int, numbers: np.ndarray, keep: int) -> list[str]:
        """The texts of documents `numbers` of a large group. ValueError names the file."""
        file, row_group = self.file_of(group)
        path = self.paths[file]
        expected = int(self.groups[group])

        def decode() -> Spill:
            num_bytes = self._text_bytes(file)[row_group]
            spill = decode_group(path, row_group, self.text_field, num_bytes)
            if spill.num_documents < expected:
                raise self._shorter(group, spill.num_documents)
            return spill

        return self._spills.read(group, numbers, keep, decode)

    def _shorter(self, group: int, num_documents: int) -> ValueError:
        """The error for a group with fewer documents than the run has pinned."""
        file, row_group = self.file_of(group)
        return ValueError(
            f"{self.paths[file]}: row group {row_group} ends at row {num_documents:,}, so the file has "
            f"changed since the run began; restore it, or start a new run (--model-tag)"
        )

    def _decode(self, group: int, first: int, stop: int, keep: int) -> pa.ChunkedArray:
        """Texts `first` to `stop` - 1 of a group. The following ones up to number `keep` are kept, in
        units of the same size. ValueError names the file."""
        file, row_group = self.file_of(group)
        path = self.paths[file]
        size = stop - first
        at = 0
        texts: list[pa.Array] = []
        with open_parquet(path, self.text_field, self._footer(file)) as f:
            # Read whole units at a time. All units of a group have the same size, except the last
            # one.
            for column in read_batches(
                f, row_group, path, batch_size=size * -(-64 // size), field=self.text_field
            ):
                texts.append(column.slice(max(first - at, 0), max(stop - max(first, at), 0)))
                for begin in range(max(at, stop), min(at + len(column), keep), size):
                    unit = column.slice(begin - at, min(size, keep - begin))
                    self._kept.put(group, begin, unit)
                at += len(column)
                if at >= max(stop, keep):
                    break
        if at < stop:
            raise self._shorter(group, at)
        return pa.chunked_array(texts)
