"""
Pairs of .bin and .idx, whichever format their index has: which one it is, what the stream asks of it, and what pins a
pair in a run.

    a.idx begins with   "GPTS"       shards.py     entries: documents, or windows of them that may repeat a few ids
                        "MMIDIDX"    indexed.py    documents of sequences, which may lie anywhere in the .bin

Both are `Entries`: so many of them, and for a run of them where in .bin they are. All that is built on pairs (the
stream, plans, verify) asks nothing else, so a third format is a third class of this kind.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nanochat import indexed, shards
from nanochat.common import (
    etag_of,
    hash_bytes,
    local,
)
from nanochat.readers import IdReader, Range
from nanochat.shards import MANIFEST_NAME, REDO, ShardWriter, read_index, read_manifest, record_groups

MAGICS = {"shards": shards.MAGIC, "megatron": indexed.MAGIC}  # by the name of --data-format
WRITERS: dict[str, type[ShardWriter]] = {"shards": ShardWriter, "megatron": indexed.DocumentWriter}
BLOCK_ENTRIES, BLOCK_IDS = 1 << 14, 1 << 21  # that are read together by what reads all
EDGE_BYTES = 1 << 16  # how much of each end of an .idx pins it


class Entries(Protocol):
    """An open index. An entry is what the stream calls a document."""

    @property
    def path(self) -> Path: ...  # the .bin

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def num_tokens(self) -> int: ...  # in .bin

    def __len__(self) -> int: ...

    def spans(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, list[Range] | None]:
        """(starts, ends, None) of entries first .. last - 1, in ids of .bin: two (n,) int64, one entry after another.
        Or (starts, ends, stretches), counted in what these stretches of .bin hold, one after another. ValueError
        naming the file for what cannot be."""

    def repeats(self, first: int, last: int) -> np.ndarray:
        """How many first ids of each repeat the entry before it, (n,) uint16."""


def pair_format(path: Path) -> str | None:
    """The name of a pair's format, given either file; None if its index is not there or begins with nothing known."""
    try:
        with open(local(path.with_suffix(".idx")), "rb") as f:
            head = f.read(max(map(len, MAGICS.values())))
    except FileNotFoundError:
        return None
    return next((name for name, magic in MAGICS.items() if head.startswith(magic)), None)


def open_entries(path: Path) -> Entries:
    """Open a pair, given either file: header, sizes and both ends are looked at. FileNotFoundError or ValueError naming
    the file that is not there, not whole or of no known format."""
    if pair_format(path) == "megatron":
        return indexed.open_documents(path.with_suffix(".bin"))
    return read_index(path)


def read_dtype(path: Path) -> np.dtype:
    """The type of a pair's ids, from the header of its index alone. Errors as of `open_entries`."""
    idx = path.with_suffix(".idx")
    return indexed.read_header(idx)[0] if pair_format(idx) == "megatron" else shards.read_header(idx)[0]


def blocks(entries: Entries) -> Iterator[tuple[int, int]]:
    """(first, end) of runs of entries, in order, of few ids each unless a single entry has more. One that cannot be is
    a run by itself."""
    for start in range(0, len(entries), BLOCK_ENTRIES):
        stop = min(start + BLOCK_ENTRIES, len(entries))
        try:
            starts, ends, _ = entries.spans(start, stop)
        except ValueError:
            yield from ((i, i + 1) for i in range(start, stop))
            continue
        first = start
        while first < stop:
            last = start + int(np.searchsorted(ends, starts[first - start] + BLOCK_IDS, side="right"))
            yield first, (last := max(first + 1, last))
            first = last


def read_entries(entries: Entries, reader: IdReader, first: int, last: int
                 ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, starts, ends) of entries first .. last - 1: where each is in `ids`, two (n,) int64. Errors as `spans`."""
    starts, ends, stretches = entries.spans(first, last)
    if stretches is not None:
        return np.concatenate(reader.read_many(stretches)), starts, ends
    return reader.read(int(starts[0]), int(ends[-1])), starts - starts[0], ends - starts[0]


def scan_file(path: Path, name: str) -> dict[str, Any]:
    """What pins a pair in the manifest of a run: {"name", "size" of the .bin, "footer", "groups", and in a store the
    "etag" of the .bin}. `footer` hashes size, header and both ends of the .idx. ValueError or FileNotFoundError naming
    the file if the pair is not whole or not what manifest.json says."""
    index = open_entries(path)
    manifest = read_manifest(path.parent)
    record = None if manifest is None else manifest["shards"].get(path.stem)
    size = path.stat().st_size
    if record is not None:
        found = {"entries": len(index), "tokens": index.num_tokens, "bin_bytes": size}
        for key, value in found.items():
            if record[key] != value:
                raise ValueError(f"{path}: {key} {value:,}, {MANIFEST_NAME} says {record[key]:,}; {REDO}")
    groups = record_groups(record, len(index))
    if sum(groups) != len(index) or min(groups) < 1:
        raise ValueError(f"{path}: the groups in {MANIFEST_NAME} hold {sum(groups):,} entries, the file "
                         f"{len(index):,}; {REDO}")
    return {"name": name, "size": size, "footer": _footer(path.with_suffix(".idx")), "groups": groups, **etag_of(path)}


def _footer(idx: Path) -> str:
    start = (indexed if pair_format(idx) == "megatron" else shards).HEADER.size
    with open(local(idx), "rb") as f:
        size = f.seek(0, 2)
        f.seek(0)
        header, head = f.read(start), f.read(EDGE_BYTES)
        f.seek(max(start, size - EDGE_BYTES))
        return hash_bytes(size.to_bytes(8, "little"), header, head, f.read(EDGE_BYTES))
