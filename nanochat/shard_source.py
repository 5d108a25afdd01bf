"""
Shards as a bucket of the stream: which ids of a memory map each document is.

    ids       t t t t E t t E t t t t E        a group's entries, E ends documents and is the same id as BOS
    document 1:       # t t                    the E in front of it is its BOS; most documents are views

Opening a pair looks at 16 bytes, two offsets and two sizes, never at all offsets: a thousand shards open in well under
a second. Offsets are looked up and checked where they are used, a **block** of some units at a time: two dozen NumPy
calls take the same time for a unit as for a block, and the lane that reads a unit reads its neighbours next. Only the
blocks used last are kept, so nothing grows with the data. The rejected alternative, one Python object or array element
for each document, costs gigabytes at a billion documents.
"""

import bisect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nanochat.common import hash_json
from nanochat.shards import REDO, Index, ends_follow, read_header, read_index, read_manifest, read_tokens

if TYPE_CHECKING:
    from nanochat.sources import Manifest, Tokenizer

BLOCK_ENTRIES = 1024  # that are looked up together
SMALLEST_UNIT = 8  # for which that pays
KEPT_BLOCKS = 256  # 4 MB


@dataclass(frozen=True)
class _Shard:
    """An open pair, and how the end of a document is known in it."""

    index: Index
    ids: np.ndarray  # (num_tokens,)
    ends_follow: bool


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive entries of a group as documents: of each, something in an array."""

    shard: _Shard
    begins: np.ndarray  # (n,) int64: where in the shard's ids the document begins, its BOS included
    ends: np.ndarray  # (n,) int64
    framed: np.ndarray | None  # (n,) bool: whether a BOS stands at `begins`; None: at all of them, or at none with EOD
    prefixes: np.ndarray  # (n,) uint16
    short: np.ndarray  # (n,) bool: whether the entry is shorter than its prefix


class ShardSource:
    """Shards as a bucket of the stream (`nanochat.sources.Source`): documents are entries, as BOS + ids, or as they
    are stored (with EOD where it is, without BOS) with `keep_eod`.

    `manifest` is a run's (`nanochat.sources.scan`). Files are opened when first used, from any thread. ValueError for
    shards of another tokenizer.
    """

    mapped = True

    def __init__(self, manifest: "Manifest", tokenizer: "Tokenizer", *, keep_eod: bool = False):
        self.manifest, self.keep_eod = manifest, keep_eod
        self.eod = tokenizer.get_bos_token_id()
        files = manifest["files"]
        self.fingerprint = hash_json([[e["size"], e["footer"], e["groups"]] for e in files])  # sources.fingerprint
        self._paths = [Path(manifest["root"]) / e["name"] for e in files]
        self.groups = np.array([n for e in files for n in e["groups"]], np.int64)
        self._first_group = [0, *np.cumsum([len(e["groups"]) for e in files]).tolist()]
        self._first_entry = np.concatenate([np.cumsum([0, *e["groups"][:-1]]) for e in files])
        self._shards: list[_Shard | None] = [None] * len(files)
        self._blocks: dict[tuple[int, int], _Block] = {}  # those used last
        self._lock = threading.Lock()
        get_vocab_size = getattr(tokenizer, "get_vocab_size", lambda: self.eod + 1)
        self._check(tokenizer.fingerprint, get_vocab_size())

    def _check(self, fingerprint: str, vocab_size: int) -> None:
        """ValueError if the shards are not this tokenizer's."""
        for folder in sorted({path.parent for path in self._paths}):
            manifest = read_manifest(folder)
            if manifest is not None and manifest["tokenizer"]["fingerprint"] != fingerprint:
                theirs = manifest["tokenizer"]["fingerprint"]
                raise ValueError(f"{folder}: its shards were made with tokenizer {theirs}, this run has {fingerprint}"
                                 f"; name their tokenizer with --tokenizer-dir, or make them again with "
                                 f"scripts.tok_shards")
        for path in self._paths:
            dtype, _ = read_header(path.with_suffix(".idx"))
            if vocab_size - 1 > np.iinfo(dtype).max:
                raise ValueError(f"{path}: its ids are {dtype.name}, too small for a vocabulary of {vocab_size:,}; "
                                 f"it was made with another tokenizer: name that one with --tokenizer-dir")

    def _place(self, group: int) -> tuple[int, int]:
        file = bisect.bisect_right(self._first_group, group) - 1
        return file, group - self._first_group[file]

    def locate(self, group: int) -> tuple[str, int]:
        """(relative file name, group in that file) of a group."""
        file, local = self._place(group)
        return self.manifest["files"][file]["name"], local

    def _shard(self, file: int) -> _Shard:
        shard = self._shards[file]
        if shard is None:
            with self._lock:
                shard = self._shards[file] = self._shards[file] or self._open(file)
        return shard

    def _open(self, file: int) -> _Shard:
        path, entry = self._paths[file], self.manifest["files"][file]
        index = read_index(path)
        if len(index) != sum(entry["groups"]) or path.stat().st_size != entry["size"]:
            raise ValueError(f"{path}: {len(index):,} entries, {sum(entry['groups']):,} when this run began; bring "
                             f"the old file back, or start a new run (--model-tag)")
        manifest = read_manifest(path.parent)
        known = manifest is not None and path.stem in manifest["shards"] and ends_follow(manifest)
        return _Shard(index, read_tokens(index), known)

    def _entries(self, group: int, unit: int, unit_size: int) -> tuple[_Shard, int, int]:
        """(shard, first entry, end of entries) of a unit."""
        shard = self._shard(bisect.bisect_right(self._first_group, group) - 1)
        begin = int(self._first_entry[group])
        first = begin + unit * unit_size
        return shard, first, min(first + unit_size, begin + int(self.groups[group]))

    def _unit(self, group: int, unit: int, unit_size: int) -> tuple[_Block, slice]:
        """(a block, where in it the unit's entries are). Units that cut a block evenly share it; the last few blocks
        are kept."""
        if unit_size < SMALLEST_UNIT or BLOCK_ENTRIES % unit_size:
            return self._block(*self._entries(group, unit, unit_size)), slice(None)
        number, at = divmod(unit * unit_size, BLOCK_ENTRIES)
        block = self._blocks.get((group, number))
        if block is None:
            block = self._block(*self._entries(group, number, BLOCK_ENTRIES))
            with self._lock:
                if len(self._blocks) >= KEPT_BLOCKS:
                    del self._blocks[next(iter(self._blocks))]
                self._blocks[group, number] = block
        return block, slice(at, at + unit_size)

    def _block(self, shard: _Shard, first: int, last: int) -> _Block:
        """Entries first .. last - 1 of a shard as documents. Two dozen NumPy calls for any number of them. ValueError
        naming the file for offsets that do not ascend."""
        starts, ends = self._bounds(shard, first, last)
        prefixes = shard.index.prefixes[first:last]
        short = prefixes > np.diff(shard.index.offsets[first:last + 1])
        if self.keep_eod:
            return _Block(shard, starts, ends, None, prefixes, short)
        framed = (starts > 0) & (shard.ids[starts - 1] == self.eod) if len(shard.ids) else starts > 0
        return _Block(shard, starts - 1, ends, None if framed.all() else framed, prefixes, short)

    def _bounds(self, shard: _Shard, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """(starts, ends) of entries in a shard's ids, EOD left out unless it is to be kept: two (n,) int64."""
        offsets = shard.index.offsets[first:last + 1]
        starts, ends = offsets[:-1], offsets[1:]
        if np.count_nonzero(ends < starts) or offsets[0] < 0 or offsets[-1] > len(shard.ids):
            raise ValueError(f"{shard.index.path.with_suffix('.idx')}: the offsets of entries {first:,} to {last:,} "
                             f"do not ascend; python -m scripts.verify tells which, then {REDO}")
        if self.keep_eod or not len(shard.ids):
            return starts, ends
        if not shard.ends_follow:
            closed = shard.ids[ends - 1] == self.eod
        elif last < len(shard.index):
            closed = shard.index.prefixes[first + 1:last + 1] == 0
        else:
            closed = np.append(shard.index.prefixes[first + 1:last] == 0, True)
        return starts, np.maximum(ends - closed, starts)

    def fetch(self, group: int, unit: int, unit_size: int, keep: Callable[[], set[int]] = set) -> list[np.ndarray]:
        """A group's entries [unit * unit_size, (unit + 1) * unit_size), uint16 or uint32, as the stream sees them:
        BOS and ids, or as they are stored with `keep_eod`. Views; an entry is copied where no EOD, the same id as
        BOS, happens to stand before it. ValueError naming the file for offsets that do not ascend."""
        block, span = self._unit(group, unit, unit_size)
        ids, begins, ends = block.shard.ids, block.begins[span].tolist(), block.ends[span].tolist()
        if block.framed is None:
            return [ids[a:b] for a, b in zip(begins, ends)]
        bos = np.array([self.eod], ids.dtype)
        return [ids[a:b] if f else np.concatenate((bos, ids[a + 1:b]))
                for a, b, f in zip(begins, ends, block.framed[span].tolist())]

    def lengths(self, group: int, unit: int, unit_size: int) -> np.ndarray:
        """How many tokens `fetch` gives for each entry, (n,) int64; does not read .bin where the index tells."""
        starts, ends = self._bounds(*self._entries(group, unit, unit_size))
        return ends - starts + (not self.keep_eod)

    def prefixes(self, group: int) -> np.ndarray:
        """`overlaps` of a whole group, (n,) uint16, from the index alone. Errors as there."""
        shard, first, last = self._entries(group, 0, int(self.groups[group]))
        prefixes = shard.index.prefixes[first:last]
        if np.count_nonzero(prefixes > np.diff(shard.index.offsets[first:last + 1])):
            raise ValueError(_long_prefix(shard, first, last))
        return prefixes

    def overlaps(self, group: int, unit: int, unit_size: int) -> list[int]:
        """How many first ids of each entry repeat the entry before it. ValueError where that is more than it has."""
        block, span = self._unit(group, unit, unit_size)
        if np.count_nonzero(block.short[span]):
            raise ValueError(_long_prefix(*self._entries(group, unit, unit_size)))
        return block.prefixes[span].tolist()

    def encode(self, raw: list[np.ndarray]) -> list[np.ndarray]:
        """Entries are ids already."""
        return raw


def _long_prefix(shard: _Shard, first: int, last: int) -> str:
    return (f"{shard.index.path.with_suffix('.idx')}: an entry of {first:,} to {last:,} is shorter than its prefix; "
            f"python -m scripts.verify tells which, then {REDO}")
