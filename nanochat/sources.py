"""
Sources: the files of a bucket behind one small interface.

    Source.groups, .means       number of documents in each group, in the order of files; their estimated mean length
    Source.read(group, rows)    the documents of a group with the indices `rows`, each as [BOS] + token ids

A group is a block of documents stored together: a parquet row group, or by default 1,024 entries of a token file. To
add a kind of data file, write one class in one file: see `nanochat.dataset.reader_class`, and `TokenSource` in
nanochat/tokens.py for an example.

**Parquet.** A row group can only be read from its beginning, but a lane needs 64 documents now and the next 64 much
later. Holding each lane's group decoded would cost megabytes per lane; decoding it for each unit would decode a group
of 1,024 documents sixteen times. So a group is decoded once, and the units that the lane will read soon are kept
compressed. A *small* bucket (at most 32 Mi tokens, about 128 MB of text) is read in random order: each group is decoded
once in the whole run, and its documents stay in memory, each compressed individually. (Compressing several together
saved no memory, and took 20 % longer per document.) A *large* group, such as one of books, is decoded into a file that
all lanes read (nanochat/spill.py).
"""

import functools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from nanochat.common import as_path
from nanochat.dataset import Manifest, fingerprint, reader_class
from nanochat.spill import LARGE_BYTES, Spill, Spills, decode_group
from nanochat.text import Selection, as_pinned, leaf_column, open_parquet, read_batches, text_suffix, text_tokens
from nanochat.tokenizer import CannotEncode, Tokenizer

SMALL_TOKENS = 32 << 20  # a bucket with at most this many estimated tokens is shuffled document by document,
SMALL_DOCUMENTS = 1 << 20  # unless it has more documents than this


def counts_and_means(manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """(number of documents in each group, their estimated mean length in tokens) of a manifest, in the order of files,
    each (G,) int64. The mean is that of the group's file."""
    files = manifest["files"]
    counts = [np.array(e["groups"], np.int64) for e in files]
    documents = [max(1, int(of_file.sum())) for of_file in counts]
    tokens = [e.get("tokens", text_tokens(e["size"], n)) for e, n in zip(files, documents)]
    means = [np.full(len(of_file), max(1, total // n)) for of_file, total, n in zip(counts, tokens, documents)]
    return np.concatenate(counts), np.concatenate(means)


class Source:
    """One bucket's documents. `manifest` and `tokenizer` are the run's; `nanochat.dataset.scan` makes manifests.

    Each kind of file has a subclass: `scan_file` describes and hashes a file, `read` reads it. Several threads may call
    both at once, and errors name the file.
    """

    lengths_known: ClassVar[bool] = False  # whether the subclass implements `lengths`

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer):
        files = manifest["files"]
        self.manifest, self.tokenizer = manifest, tokenizer
        self.bos = tokenizer.get_bos_token_id()
        self.fingerprint = fingerprint(manifest)
        self.groups, self.means = counts_and_means(manifest)
        self.small = int(self.groups @ self.means) <= SMALL_TOKENS and int(self.groups.sum()) <= SMALL_DOCUMENTS
        self.paths = [as_path(manifest["root"]) / e["name"] for e in files]
        self._first_group = np.cumsum([0, *(len(e["groups"]) for e in files)])
        self.without = self._find_without(manifest.get("without", {}))

    def _find_without(self, rows_by_file: Mapping[str, list[int] | None]) -> dict[int, np.ndarray]:
        """{group: (documents,) bool}: the documents whose targets are masked (--without-documents)."""
        without = {}
        for first_group, entry in zip(self._first_group, self.manifest["files"]):
            if entry["name"] in rows_by_file:
                rows = rows_by_file[entry["name"]]  # None: all
                listed = np.zeros(sum(entry["groups"]), bool)
                listed[slice(None) if rows is None else rows] = True
                for group, mask in enumerate(np.split(listed, np.cumsum(entry["groups"])[:-1]), first_group):
                    if mask.any():
                        without[int(group)] = mask
        return without

    @staticmethod
    def scan_file(path: Path, name: str, field: str) -> dict[str, Any]:
        """A file's entry in a manifest: {"name", "size", "footer": a hash, "groups": number of documents in each,
        "tokens": an estimate, needed unless the size gives one}. `field` holds the text (--text-field). ValueError or
        FileNotFoundError if the file cannot be read."""
        raise NotImplementedError

    def read(self, group: int, rows: np.ndarray, keep: int = 0) -> tuple[list[np.ndarray], list[int]]:
        """Documents `rows` (n,) of a group, in that order: (ids of each, number of ids at its start that repeat the
        previous document). The rows after these, up to `keep`, will be read soon."""
        raise NotImplementedError

    def lengths(self, group: int, rows: np.ndarray) -> tuple[list[int], list[int]]:
        """The lengths of what `read` returns: (length of each document, number of repeated ids at its start)."""
        raise NotImplementedError

    def texts(self, group: int) -> Iterator[str]:
        """The texts of all documents of a group. Stored tokens are decoded."""
        documents, _ = self.read(group, np.arange(self.groups[group]))
        for ids in documents:
            yield self.tokenizer.decode(ids.tolist())

    def file_of(self, group: int) -> tuple[int, int]:
        """(index of a group's file, index of the group within that file)."""
        file = int(np.searchsorted(self._first_group, group, side="right")) - 1
        return file, group - int(self._first_group[file])

    def locate(self, group: int) -> tuple[str, int]:
        """A group's (relative name of its file, number within that file)."""
        file, number = self.file_of(group)
        return self.manifest["files"][file]["name"], number


# ---- text in parquet --------------------------------------------------------------------------------

class ParquetSource(Source):
    """Text in parquet files. Other text files are converted to parquet once."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer):
        super().__init__(manifest, tokenizer)
        selection = Selection.of(manifest)
        self.field = selection.text_field
        self.paths = [as_pinned(path, entry, selection) for path, entry in zip(self.paths, manifest["files"])]
        self._kept: dict[tuple[int, int, int], bytes] = {}  # compressed units, by (group, first row, size)
        self._groups = functools.cache(self._pack_group)  # of a small bucket
        self._locks = [threading.Lock() for _ in self.groups] if self.small else []
        self._spills = Spills()
        self._text_bytes = functools.cache(self._read_text_bytes)

    def read(self, group: int, rows: np.ndarray, keep: int = 0) -> tuple[list[np.ndarray], list[int]]:
        """See `Source.read`. The next rows up to `keep` are also decoded, and kept compressed."""
        if self.small:
            with self._locks[group]:  # other threads wait here until this group is decoded
                packed = self._groups(group)
            texts = [pa.decompress(data, size, codec="lz4_raw", asbytes=True).decode()
                     for size, data in (packed[row] for row in rows.tolist())]
        elif self._is_large(group):
            texts = self._read_large(group, rows, keep)
        else:
            first = int(rows.min())
            unit = self._kept.pop((group, first, len(rows)), None) if keep else None
            column = self._decode(group, first, int(rows.max()) + 1, keep) if unit is None else _unpacked(unit)
            texts = column.take(pa.array(rows - first)).to_pylist()
        try:
            ids, edges = self.tokenizer.encode_flat(texts, num_threads=1)
        except CannotEncode as e:
            name, number = self.locate(group)
            raise ValueError(f"{name}: row group {number}, row {rows[e.number]}: {e.reason}") from None
        return [ids[a:b].copy() for a, b in pairwise(edges.tolist())], [0] * len(rows)

    def texts(self, group: int) -> Iterator[str]:
        num_documents = int(self.groups[group])
        if self._is_large(group):
            for first in range(0, num_documents, 64):
                rows = np.arange(first, min(first + 64, num_documents))
                yield from self._read_large(group, rows, num_documents)
        else:
            yield from self._decode(group, 0, num_documents, 0).to_pylist()

    def _pack_group(self, group: int) -> list[tuple[int, bytes]]:
        """(size in bytes, compressed text) of every document of a group."""
        packed = []
        for text in self.texts(group):
            data = text.encode()
            packed.append((len(data), pa.compress(data, codec="lz4_raw", asbytes=True)))
        return packed

    def _read_text_bytes(self, file: int) -> list[int]:
        """The bytes of text in each group of a file."""
        with open_parquet(self.paths[file], self.field) as f:
            metadata = f.metadata
        text = leaf_column(metadata, self.field)
        return [metadata.row_group(g).column(text).total_uncompressed_size for g in range(metadata.num_row_groups)]

    def _is_large(self, group: int) -> bool:
        """Whether a group is decoded into a file. A group that is missing is not: reading it names the problem."""
        file, number = self.file_of(group)
        sizes = self._text_bytes(file)
        return number < len(sizes) and sizes[number] > LARGE_BYTES

    def _read_large(self, group: int, rows: np.ndarray, keep: int) -> list[str]:
        """Documents `rows` of a large group. ValueError names the file."""
        file, number = self.file_of(group)
        path, expected = self.paths[file], int(self.groups[group])

        def decode() -> Spill:
            spill = decode_group(path, number, self.field, self._text_bytes(file)[number])
            if spill.num_documents < expected:
                raise self._shorter(group, spill.num_documents)
            return spill

        return self._spills.read(group, rows, keep, decode)

    def _shorter(self, group: int, num_documents: int) -> ValueError:
        """The error for a group with fewer documents than the run has pinned."""
        file, number = self.file_of(group)
        return ValueError(f"{self.paths[file]}: row group {number} ends at row {num_documents:,}, so the file has "
                          f"changed since the run began; restore it, or start a new run (--model-tag)")

    def _decode(self, group: int, first: int, stop: int, keep: int) -> pa.ChunkedArray:
        """Texts `first` to `stop` - 1 of a group. The following ones up to row `keep` are kept, in units of the same
        size. ValueError names the file."""
        file, number = self.file_of(group)
        path, size, at = self.paths[file], stop - first, 0
        texts: list[pa.Array] = []
        with open_parquet(path, self.field) as f:
            # Read whole units at a time. All units of a group have the same size, except the last one.
            for column in read_batches(f, number, path, batch_size=size * -(-64 // size), field=self.field):
                texts.append(column.slice(max(first - at, 0), max(stop - max(first, at), 0)))
                for row in range(max(at, stop), min(at + len(column), keep), size):
                    unit = column.slice(row - at, min(size, keep - row))
                    self._kept[group, row, len(unit)] = _packed(unit)
                at += len(column)
                if at >= max(stop, keep):
                    break
        if at < stop:
            raise self._shorter(group, at)
        return pa.chunked_array(texts)


def _packed(texts: pa.Array) -> bytes:
    """Compressed texts, as an Arrow stream of one batch."""
    batch, sink = pa.record_batch([texts], ["text"]), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write(batch)
    return sink.getvalue().to_pybytes()


def _unpacked(texts: bytes) -> pa.ChunkedArray:
    """The texts that `_packed` compressed."""
    return pa.ipc.open_stream(texts).read_all()["text"]


# ---- any kind ---------------------------------------------------------------------------------------

def open_source(manifest: Manifest, tokenizer: Tokenizer, *, as_stored: bool = False) -> Source:
    """The source of a manifest's files. `as_stored`: use the entries of token files as they are, for `binned`.
    ValueError for text, which has no stored entries."""
    name = manifest["files"][0]["name"]
    if as_stored and not name.endswith(".bin"):
        raise ValueError("--packing binned: this data is text, but binned packs stored tokens; convert it with "
                         "python -m scripts.tok_shards, or use --packing bestfit")
    kind = ParquetSource if text_suffix(name) else reader_class(name)
    return kind(manifest, tokenizer, **({"as_stored": True} if as_stored else {}))


@dataclass(frozen=True)
class RunData:
    """The data of a run: tokenizer, sources and manifests."""

    tokenizer: Tokenizer
    train: dict[str, Source]
    val: dict[str, Source]
    manifests: Mapping[str, Mapping[str, Manifest]]


def open_data(manifests: Mapping[str, Mapping[str, Manifest]], tokenizer: Tokenizer, *,
              as_stored: bool = False) -> RunData:
    """The sources of a run's manifests. Validation always frames documents with BOS."""
    train = {bucket: open_source(m, tokenizer, as_stored=as_stored) for bucket, m in manifests["train"].items()}
    val = {bucket: open_source(m, tokenizer) for bucket, m in manifests["val"].items()}
    return RunData(tokenizer, train, val, manifests)
