"""
Shards as a bucket of the stream: which ids of a memory map each document is.

    ids       t t t t E t t E t t t t E        a group's entries, E ends documents and is the same id as BOS
    document 1:       # t t                    the E in front of it is its BOS; most documents are views

Opening a pair looks at 16 bytes, two offsets and two sizes, never at all offsets: a thousand shards open in well under
a second, and nothing is kept for each entry. Offsets are checked where they are used. The rejected alternative, one
Python object or array element for each document, costs gigabytes at a billion documents.
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


@dataclass(frozen=True)
class _Shard:
    """An open pair, and how the end of a document is known in it."""

    index: Index
    ids: np.ndarray  # (num_tokens,)
    ends_follow: bool


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

    def _unit(self, group: int, unit: int, unit_size: int) -> tuple[_Shard, int, int]:
        """(shard, first entry, end of entries) of a unit."""
        shard = self._shard(bisect.bisect_right(self._first_group, group) - 1)
        begin = int(self._first_entry[group])
        first = begin + unit * unit_size
        return shard, first, min(first + unit_size, begin + int(self.groups[group]))

    def _bounds(self, group: int, unit: int, unit_size: int) -> tuple[_Shard, np.ndarray, np.ndarray]:
        """(shard, starts, ends) of a unit's entries in its ids: two (n,) int64. A dozen NumPy calls for any n."""
        shard, first, last = self._unit(group, unit, unit_size)
        offsets = shard.index.offsets[first:last + 1]
        starts, ends = offsets[:-1], offsets[1:]
        if np.count_nonzero(ends < starts) or offsets[0] < 0 or offsets[-1] > len(shard.ids):
            raise ValueError(f"{shard.index.path.with_suffix('.idx')}: the offsets of entries {first:,} to {last:,} "
                             f"do not ascend; python -m scripts.verify tells which, then {REDO}")
        if self.keep_eod or not len(shard.ids):
            return shard, starts, ends
        if not shard.ends_follow:
            closed = shard.ids[ends - 1] == self.eod
        elif last < len(shard.index):
            closed = shard.index.prefixes[first + 1:last + 1] == 0
        else:
            closed = np.append(shard.index.prefixes[first + 1:last] == 0, True)
        return shard, starts, np.maximum(ends - closed, starts)

    def fetch(self, group: int, unit: int, unit_size: int, keep: Callable[[], set[int]] = set) -> list[np.ndarray]:
        """A group's entries [unit * unit_size, (unit + 1) * unit_size), uint16 or uint32, as the stream sees them:
        BOS and ids, or as they are stored with `keep_eod`. Views; an entry is copied where no EOD, the same id as
        BOS, happens to stand before it. ValueError naming the file for offsets that do not ascend."""
        shard, starts, ends = self._bounds(group, unit, unit_size)
        ids = shard.ids
        if self.keep_eod:
            return [ids[a:b] for a, b in zip(starts.tolist(), ends.tolist())]
        framed = (starts > 0) & (ids[starts - 1] == self.eod) if len(ids) else starts > 0
        bos = np.array([self.eod], ids.dtype)
        return [ids[a - 1:b] if f else np.concatenate((bos, ids[a:b]))
                for a, b, f in zip(starts.tolist(), ends.tolist(), framed.tolist())]

    def lengths(self, group: int, unit: int, unit_size: int) -> np.ndarray:
        """How many tokens `fetch` gives for each entry, (n,) int64; does not read .bin where the index tells."""
        _, starts, ends = self._bounds(group, unit, unit_size)
        return ends - starts + (not self.keep_eod)

    def overlaps(self, group: int, unit: int, unit_size: int) -> list[int]:
        """How many first ids of each entry repeat the entry before it. ValueError where that is more than it has."""
        shard, first, last = self._unit(group, unit, unit_size)
        prefixes = shard.index.prefixes[first:last]
        if np.count_nonzero(prefixes > np.diff(shard.index.offsets[first:last + 1])):
            raise ValueError(f"{shard.index.path.with_suffix('.idx')}: an entry of {first:,} to {last:,} is shorter "
                             f"than its prefix; python -m scripts.verify tells which, then {REDO}")
        return prefixes.tolist()

    def encode(self, raw: list[np.ndarray]) -> list[np.ndarray]:
        """Entries are ids already."""
        return raw
