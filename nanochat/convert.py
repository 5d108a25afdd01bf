"""
Converting pairs from GPTS to Megatron's format and back, so that back and forth is the identity.

    GPTS        a b c d | c d e f | e f g E        windows of a document, prefixes 0, 2, 2
    Megatron    a b c d e f g E                    one sequence: Megatron trains on each sequence as on a document
    kept        lengths 4 4 4, prefixes 0 2 2      in NAME.conversion.json beside the pair

Megatron's format has no windows and no prefixes, and what windows repeat would be trained on twice: so documents are
put together again, and how they were cut is kept. GPTS has no documents of several sequences, and two types of ids:
the sequences of such a document become one entry, and their lengths and the type are kept. Whoever converts back finds
what was kept, makes the pair that was there before, and compares its checksum with the one that was kept.

An entry of GPTS gives its ids but for the first `taken`, which are the last ids of its document so far: its prefix; all
of it, where gpt-simple has a last window that repeats the end of a document and its EOD; or nothing, where a prefix is
no repetition. Those kept numbers are little-endian arrays, compressed, 4 bytes or less an entry before that.

Files are read in blocks. 10 bytes an entry are held, as by every writer of an index.
"""

import base64
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.common import hash_file
from nanochat.indexed import DTYPES, Documents, DocumentWriter, IndexedDatasetBuilder
from nanochat.pairs import Entries, blocks, read_entries
from nanochat.readers import open_reader
from nanochat.shards import DTYPES as GPTS_DTYPES
from nanochat.shards import Index, ShardWriter

Kept = dict[str, Any]
Array = np.ndarray


def pack(values: Array) -> dict[str, Any]:
    """An array of integers as JSON."""
    return {"dtype": values.dtype.str, "data": base64.b64encode(zlib.compress(values.tobytes(), 1)).decode()}


def unpack(packed: dict[str, Any]) -> Array:
    """What `pack` was given."""
    return np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), packed["dtype"])


def sums(values: Array, counts: Array) -> Array:
    """The sums of runs of so many values each, (len(counts),) int64."""
    running = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    ends = np.cumsum(counts, dtype=np.int64)
    return running[ends] - running[ends - counts]


def gather(ids: Array, starts: Array, lengths: Array) -> Array:
    """Stretches of `ids`, one after another."""
    ends = np.cumsum(lengths)
    return ids[np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)]


# ---- from GPTS ------------------------------------------------------------------------------------------------------

def to_megatron(index: Index, target: Path, *, eod: int | None, ends_follow: bool) -> Kept:
    """Make the pair `target`.bin, .idx of Megatron's from one of GPTS; returns what must be kept. `eod`: of its ids;
    None: its last one. ValueError for ids that int32 cannot hold."""
    reader = open_reader(index.path, index.dtype)
    if eod is None and index.num_tokens:
        eod = int(reader.read(index.num_tokens - 1, index.num_tokens)[0])
    wide = index.dtype.itemsize > 2
    parts: dict[str, list[Array]] = {name: [] for name in ("counts", "lengths", "prefixes", "taken")}
    rest, opened = [np.zeros(0, index.dtype)], [np.zeros(0, np.int64)] * 3  # of the document that is not at its end
    with DocumentWriter(target, vocab_size=1 << (31 if wide else 16), dtype=DTYPES[4 if wide else 8]) as writer:
        for fresh, entries, begins in _fresh(index, reader, eod, ends_follow):
            cuts = np.flatnonzero(begins)
            if len(cuts) == 0:
                rest.append(fresh)
                opened = [np.concatenate(pair) for pair in zip(opened, entries)]
                continue
            at = int((entries[0][:cuts[-1]] - entries[2][:cuts[-1]]).sum())
            numbers = [np.concatenate((old, new[:cuts[-1]])) for old, new in zip(opened, entries)]
            edges = np.concatenate([[0], cuts + len(opened[0])])
            _write(writer, np.concatenate([*rest, fresh[:at]]), numbers, np.diff(edges), parts)
            rest, opened = [fresh[at:]], [new[cuts[-1]:] for new in entries]
        _write(writer, np.concatenate(rest), opened, np.array([len(opened[0])]), parts)
    reader.close()
    counts, lengths, prefixes, taken = (np.concatenate([np.zeros(0, np.int64), *found]) for found in parts.values())
    kept: Kept = {"dtype": index.dtype.name}
    if (counts != 1).any():
        kept |= {"counts": pack(counts.astype("<i4")), "lengths": pack(lengths.astype("<i8")),
                 "prefixes": pack(prefixes.astype("<u2"))}
        kept |= {"taken": pack(taken.astype("<i8"))} if (taken != prefixes).any() else {}
    return kept


def _fresh(index: Index, reader: Any, eod: int | None, ends_follow: bool) -> Iterator[tuple[Array, list[Array], Array]]:
    """Of each block of entries (the ids that they add to their documents, [lengths, prefixes, how many ids are taken
    from before] of each entry, whether it begins a document). The first entry begins none: nothing is open."""
    before = 0  # ids of the entry before
    for first, last in blocks(index):
        starts, ends, _ = index.spans(first, last)
        prefixes, lengths = index.repeats(first, last).astype(np.int64), ends - starts
        previous = np.concatenate([[before], lengths[:-1]])
        origin = max(0, int(starts[0]) - max(int(previous[0]), 1))
        ids, starts = reader.read(origin, int(ends[-1])), starts - origin
        closed = np.zeros(len(starts), bool)  # whether an EOD stands in front
        if len(ids):
            closed = (starts > 0) & (ids[starts - 1] == eod)
        begins = (prefixes == 0) & (closed | ends_follow)
        begins[0] &= first > 0
        tail = closed & (lengths == prefixes + 1) & (prefixes > 0)
        taken = np.where(tail, lengths, prefixes)
        taken[taken > np.minimum(previous, lengths)] = 0
        for _ in range(2):  # a tail, else a prefix, else nothing
            same = gather(ids, starts, taken) == gather(ids, starts - taken, taken)
            wrong = sums(same, taken) != taken
            taken = np.where(wrong, np.where(tail & (prefixes <= previous), prefixes, 0), taken)
            tail = np.zeros_like(tail)
        yield gather(ids, starts + taken, lengths - taken), [lengths, prefixes, taken], begins
        before = int(lengths[-1])


def _write(writer: ShardWriter, ids: Array, entries: list[Array], counts: Array, parts: dict[str, list[Array]]
           ) -> None:
    """Write whole documents of so many entries each, and note how those that are not one plain entry are cut."""
    lengths, prefixes, taken = entries
    writer.add(ids, sums(lengths - taken, counts), np.zeros(len(counts), np.uint16))
    plain = (counts == 1) & (sums(prefixes, counts) == 0)
    parts["counts"].append(np.where(plain, 1, -counts))
    for name, values in zip(("lengths", "prefixes", "taken"), entries):
        parts[name].append(values[np.repeat(~plain, counts)])


def back_to_gpts(documents: Entries, target: Path, kept: Kept) -> ShardWriter:
    """Make the pair of GPTS again from which `to_megatron` made `documents`."""
    dtype = next(d for d in GPTS_DTYPES.values() if d.name == kept["dtype"])
    counts = unpack(kept["counts"]) if "counts" in kept else None
    pieces = [unpack(kept[name if name in kept else "prefixes"]) for name in ("lengths", "prefixes", "taken")
              ] if counts is not None else []
    reader, used = open_reader(documents.path, documents.dtype), 0
    with ShardWriter(target, vocab_size=1 << 8 * dtype.itemsize, dtype=dtype) as writer:
        for first, last in blocks(documents):
            ids, starts, ends = read_entries(documents, reader, first, last)
            if counts is None:
                writer.add(ids, ends - starts, np.zeros(last - first, np.uint16))
                continue
            plain, number = counts[first:last] == 1, np.abs(counts[first:last])
            lengths = np.repeat(ends - starts, number)
            prefixes, taken = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
            cut = np.repeat(~plain, number)
            stop = used + int(cut.sum())
            lengths[cut], prefixes[cut], taken[cut] = (values[used:stop] for values in pieces)
            fresh = lengths - taken
            at = np.cumsum(fresh) - fresh  # documents stand one after another, and so do the ids that are not taken
            writer.add(gather(ids, at - taken, lengths), lengths, prefixes)
            used = stop
    reader.close()
    return writer


# ---- from Megatron --------------------------------------------------------------------------------------------------

def to_gpts(documents: Documents, target: Path) -> Kept:
    """Make the pair `target`.bin, .idx of GPTS from one of Megatron's; returns what must be kept. ValueError for ids
    that are negative or need more than 32 bits, and for modes, which GPTS has no place for."""
    index = documents.index
    if index.has_modes:
        raise ValueError(f"{index.path}: its sequences have modes (multimodal), which GPTS cannot hold")
    dtype = GPTS_DTYPES[2 if index.dtype.itemsize <= 2 else 4]
    reader, position, in_order = open_reader(documents.path, documents.dtype), 0, True
    counts, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    with ShardWriter(target, vocab_size=1 << 8 * dtype.itemsize, dtype=dtype) as writer:
        for first, last in blocks(documents):
            starts, _, stretches = documents.spans(first, last)
            ids, begins, ends = read_entries(documents, reader, first, last)
            in_order &= stretches is None and (int(starts[0]) == position or not len(ids))
            position += len(ids)
            writer.add(ids, ends - begins, np.zeros(last - first, np.uint16))
            edges = index.boundaries(first, last)
            counts.append(np.diff(edges))
            lengths.append(index.sequence_lengths[edges[0]:edges[-1]][np.repeat(counts[-1] != 1, counts[-1])])
    reader.close()
    number = np.concatenate(counts)
    kept: Kept = {"dtype": index.dtype.name,
                  "in_order": bool(in_order) and position * index.dtype.itemsize == documents.file_bytes}
    return kept | ({} if (number == 1).all() else {"counts": pack(number.astype("<i4")),
                                                   "lengths": pack(np.concatenate(lengths).astype("<i4"))})


def back_to_megatron(entries: Entries, target: Path, kept: Kept) -> tuple[str, str]:
    """Make the pair of Megatron's again from which `to_gpts` made `entries`. Returns its checksums."""
    counts = unpack(kept["counts"]) if "counts" in kept else None
    pieces = unpack(kept["lengths"]) if counts is not None else np.zeros(0, np.int32)
    reader, used, number = open_reader(entries.path, entries.dtype), 0, 0
    builder = IndexedDatasetBuilder(f"{target}.bin", dtype=kept["dtype"])
    try:
        for first, last in blocks(entries):
            ids, starts, ends = read_entries(entries, reader, first, last)
            own = np.ones(last - first, np.int64) if counts is None else counts[first:last].astype(np.int64)
            lengths = np.repeat(ends - starts, own)
            cut = np.repeat(own != 1, own)
            lengths[cut] = pieces[used:used + int(cut.sum())]
            used += int(cut.sum())
            builder.add_sequences(ids, lengths)
            builder.end_documents(number + np.cumsum(own))
            number += int(own.sum())
        return builder.finalize(f"{target}.idx")
    except BaseException as e:
        builder.abandon(e)
        raise
    finally:
        reader.close()


def checksums(path: Path) -> dict[str, Any]:
    """Size and checksums of a pair, given by its .bin, as manifest.json has them."""
    return {"bin_bytes": path.stat().st_size, "bin_hash": hash_file(path),
            "idx_hash": hash_file(path.with_suffix(".idx"))}
