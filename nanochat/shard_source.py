"""
Pairs of .bin and .idx as a bucket of the stream: which ids each document is.

    ids       t t t t E t t E t t t t E        a group's entries, E ends documents and is the same id as BOS
    document 1:       # t t                    the E in front of it is its BOS; most documents are views

Opening a pair looks at its header, both ends of its index and two sizes: a thousand pairs open in well under a second.
What stands between is looked up and checked where it is used. The index: a **block** of some units at a time, since two
dozen NumPy calls take the same time for a unit as for a block, and the lane that reads a unit reads its neighbours
next. The ids: a unit at a time, when it is read anyhow. Only the blocks used last are kept, so nothing grows with the
data. The rejected alternative, one Python object or array element for each document, costs gigabytes at a billion
documents.

That holds where ids are mapped. Where they are read (readers.py), a block is one unit: its documents and the id in
front of them are read as one stretch, by the pool, ahead of the lane, and each document has memory of its own. So it
is wherever Megatron's documents do not lie in the file in their order: their stretches are gathered.
"""

import bisect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nanochat.common import hash_json
from nanochat.pairs import Entries, open_entries, read_dtype
from nanochat.places import place
from nanochat.readers import IdReader, Range, is_mapped, open_reader
from nanochat.shards import REDO, ends_follow, read_manifest

if TYPE_CHECKING:
    from nanochat.sources import Manifest, Tokenizer

BLOCK_ENTRIES = 1024  # that are looked up together
SMALLEST_UNIT = 8  # for which that pays
KEPT_BLOCKS = 256  # 4 MB
_MISSING: Any = object()
Spans = tuple[np.ndarray, np.ndarray, list[Range] | None]  # as `Entries.spans` gives them


@dataclass(frozen=True)
class _Shard:
    """An open pair, and how the end of a document is known in it."""

    index: Entries
    reader: IdReader
    ends_follow: bool


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive entries of a group as documents: of each, something in an array."""

    ids: np.ndarray  # that hold them, maybe behind one more
    begins: np.ndarray  # (n,) int64: where in `ids` the document begins; its BOS included, if that is an EOD
    ends: np.ndarray  # (n,) int64
    prefixes: np.ndarray | None  # (n,) uint16; None: nothing is repeated
    views: bool  # whether `ids` is part of a map, so that holding a document costs nothing


class ShardSource:
    """Pairs as a bucket of the stream (`nanochat.sources.Source`): documents are entries, as BOS + ids, or as they
    are stored (with EOD where it is, without BOS) with `keep_eod`.

    `manifest` is a run's (`nanochat.sources.scan`). Files are opened when first used, from any thread. ValueError for
    pairs of another tokenizer.
    """

    def __init__(self, manifest: "Manifest", tokenizer: "Tokenizer", *, keep_eod: bool = False):
        self.manifest, self.keep_eod = manifest, keep_eod
        self.eod = tokenizer.get_bos_token_id()
        files = manifest["files"]
        self.fingerprint = hash_json([[e["size"], e["footer"], e["groups"]] for e in files])  # sources.fingerprint
        self._paths = [place(manifest["root"]) / e["name"] for e in files]
        self.mapped = all(map(is_mapped, self._paths))
        self.groups = np.array([n for e in files for n in e["groups"]], np.int64)
        self._first_group = [0, *np.cumsum([len(e["groups"]) for e in files]).tolist()]
        self._first_entry = np.concatenate([np.cumsum([0, *e["groups"][:-1]]) for e in files])
        self._shards: list[_Shard | None] = [None] * len(files)
        self._blocks: dict[tuple[int, int], _Block | None] = {}  # those used last; None: its entries are scattered
        self._announced: dict[int, set[int]] = {}  # units of a group that were, and are not read yet
        self._lock = threading.Lock()
        get_vocab_size = getattr(tokenizer, "get_vocab_size", None)  # who asks for lengths alone has none
        vocab_size = get_vocab_size() if get_vocab_size else None
        self.bound = vocab_size or 1 << 31  # of ids
        self._check(tokenizer.fingerprint, vocab_size or self.eod + 1)

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
            dtype = read_dtype(path)
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
        index = open_entries(path)
        if len(index) != sum(entry["groups"]) or path.stat().st_size != entry["size"]:
            raise ValueError(f"{path}: {len(index):,} entries, {sum(entry['groups']):,} when this run began; bring "
                             f"the old file back, or start a new run (--model-tag)")
        manifest = read_manifest(path.parent)
        known = manifest is not None and path.stem in manifest["shards"] and ends_follow(manifest)
        return _Shard(index, open_reader(path, index.dtype), known)

    def _entries(self, group: int, unit: int, unit_size: int) -> tuple[_Shard, int, int]:
        """(shard, first entry, end of entries) of a unit."""
        shard = self._shard(bisect.bisect_right(self._first_group, group) - 1)
        begin = int(self._first_entry[group])
        first = begin + unit * unit_size
        return shard, first, min(first + unit_size, begin + int(self.groups[group]))

    def _unit(self, group: int, unit: int, unit_size: int) -> tuple[_Block, slice]:
        """(a block, where in it the unit's entries are). Units that cut a block evenly share it; the last few blocks
        are kept."""
        if self.mapped and unit_size >= SMALLEST_UNIT and BLOCK_ENTRIES % unit_size == 0:
            number, at = divmod(unit * unit_size, BLOCK_ENTRIES)
            block = self._blocks.get((group, number), _MISSING)
            if block is _MISSING:
                block = self._shared_block(group, number)
            if block is not None:
                return block, slice(at, at + unit_size)
        return self._block(*self._entries(group, unit, unit_size)), slice(None)

    def _shared_block(self, group: int, number: int) -> _Block | None:
        """A block that is kept, None if its entries are scattered: gathered it would be too much to keep."""
        shard, first, last = self._entries(group, number, BLOCK_ENTRIES)
        spans = shard.index.spans(first, last)
        block = self._block(shard, first, last, spans) if spans[2] is None else None
        with self._lock:
            if len(self._blocks) >= KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[group, number] = block
        return block

    def _block(self, shard: _Shard, first: int, last: int, spans: Spans | None = None) -> _Block:
        """Entries first .. last - 1 of a shard as documents. Two dozen NumPy calls for any number of them. ValueError
        naming the file for entries that cannot be."""
        starts, ends, stretches = spans = spans or shard.index.spans(first, last)
        prefixes = self._repeats(shard, first, last, spans)
        repeats = prefixes if np.count_nonzero(prefixes) else None
        if stretches is None:
            origin = max(int(starts[0]) - 1, 0)  # the id in front may be the first one's BOS
            ids = shard.reader.read(origin, int(ends[-1]))
            starts, ends = starts - origin, ends - origin
        else:
            ids = np.concatenate(shard.reader.read_many(stretches))
        ids = ids.view(f"u{ids.itemsize}")  # what is negative is outside every vocabulary
        views = shard.reader.mapped and stretches is None
        if self.keep_eod:
            return _Block(ids, starts, ends, repeats, views)
        if len(ids):
            closed = self._closed(shard, first, last) if shard.ends_follow else ids[ends - 1] == self.eod
            ends = np.maximum(ends - closed, starts)
        return _Block(ids, starts - 1, ends, repeats, views)

    def _check_ids(self, group: int, first: int, block: _Block, span: slice) -> None:
        """ValueError for an id that no embedding may see, in entries of a group from `first` on."""
        ends = block.ends[span]
        ids = block.ids[max(int(block.begins[span][0]), 0):int(ends[-1])]
        if not len(ids) or ids.max() < self.bound:
            return
        at = int(np.argmax(ids >= self.bound))
        entry = first + int(np.searchsorted(ends, at + int(ends[-1]) - len(ids), side="right"))
        name, local = self.locate(group)
        found = ids.view(self._shard(self._place(group)[0]).index.dtype)[at]
        raise ValueError(f"{name}: entry {entry:,} of group {local} holds the id {found:,}, outside the vocabulary of "
                         f"{self.bound:,}; python -m scripts.verify tells which there are; then {REDO}")

    def _closed(self, shard: _Shard, first: int, last: int) -> np.ndarray:
        """Whether entries first .. last - 1 end a document, (n,) bool, as the index tells."""
        followers = shard.index.repeats(first + 1, min(last + 1, len(shard.index))) == 0
        return followers if len(followers) == last - first else np.append(followers, True)

    def fetch(self, group: int, unit: int, unit_size: int, keep: Callable[[], set[int]] = set) -> list[np.ndarray]:
        """A group's entries [unit * unit_size, (unit + 1) * unit_size), of the type they have on disk, as the stream
        sees them: BOS and ids, or as they are stored with `keep_eod`. Views where ids are mapped; an entry is copied
        where no EOD, the same id as BOS, happens to stand before it. ValueError naming the file for entries that
        cannot be, or have an id outside the vocabulary."""
        if not self.mapped:
            self._announce(group, unit, unit_size, keep)
        block, span = self._unit(group, unit, unit_size)
        self._check_ids(group, unit * unit_size, block, span)
        return self._documents(block, span, block.begins[span].tolist(), block.ends[span].tolist())

    def _documents(self, block: _Block, span: slice, begins: list[int], ends: list[int]) -> list[np.ndarray]:
        """Those of a span, in any order."""
        ids = block.ids
        if self._framed(block, span):
            found = [ids[a:b] for a, b in zip(begins, ends)]
        else:
            bos = np.array([self.eod], ids.dtype)
            found = [ids[a:b] if a >= 0 and ids[a] == self.eod else np.concatenate((bos, ids[a + 1:b]))
                     for a, b in zip(begins, ends)]
        return found if block.views else [d.copy() if d.base is not None else d for d in found]

    def _framed(self, block: _Block, span: slice) -> bool:
        """Whether its documents begin as they should: with a BOS, unless they are used as stored."""
        begins = block.begins[span]
        return self.keep_eod or (begins[0] >= 0 and not np.count_nonzero(block.ids[begins] != self.eod))

    def _announce(self, group: int, unit: int, unit_size: int, keep: Callable[[], set[int]]) -> None:
        """Tell the reader what the lane reads of a group, at its first unit."""
        announced = self._announced.pop(group, set())
        coming = {unit, *(announced or keep())}
        if len(coming) > 1:
            self._announced[group] = coming - {unit}
        if unit in announced or len(coming) == 1:
            return
        shard, first, _ = self._entries(group, min(coming), unit_size)
        _, _, last = self._entries(group, max(coming), unit_size)
        starts, ends, stretches = shard.index.spans(first, last)
        if stretches is None:
            shard.reader.will_need([(int(starts[0]), int(ends[-1]))])

    def in_order(self, group: int, unit: int, unit_size: int, order: np.ndarray, *, most: int = 0
                 ) -> tuple[list[np.ndarray], list[int], list[int]]:
        """`fetch` and `overlaps` of a mapped unit in another order, (n,) int: (documents, their lengths, their overlaps
        or nothing where there are none). Documents of up to `most` tokens in all come as one array."""
        block, span = self._unit(group, unit, unit_size)
        begins, ends = block.begins[span][order].tolist(), block.ends[span][order].tolist()
        lengths = [b - a for a, b in zip(begins, ends)]
        overlaps = [] if block.prefixes is None else block.prefixes[span][order].tolist()
        if sum(lengths) > most:
            self._check_ids(group, unit * unit_size, block, span)
            return self._documents(block, span, begins, ends), lengths, overlaps
        ids = memoryview(block.ids)  # type: ignore[arg-type]  # bytes are joined in half the time of arrays
        joined = np.frombuffer(b"".join([ids[a:b] for a, b in zip(begins, ends)]), block.ids.dtype)
        if not self._framed(block, span):  # looked at now that they are in a cache, as below
            joined = np.concatenate(self._documents(block, span, begins, ends))
        if joined.max(initial=0) >= self.bound:
            self._check_ids(group, unit * unit_size, block, span)
        return [joined], lengths, overlaps

    def lengths(self, group: int, unit: int, unit_size: int) -> np.ndarray:
        """How many tokens `fetch` gives for each entry, (n,) int64; does not read .bin where the index tells."""
        shard, first, last = self._entries(group, unit, unit_size)
        spans = shard.index.spans(first, last)
        if not shard.ends_follow and not self.keep_eod:
            block = self._block(shard, first, last, spans)
            return block.ends - block.begins
        lengths = spans[1] - spans[0]
        return lengths if self.keep_eod else np.maximum(lengths - self._closed(shard, first, last), 0) + 1

    def prefixes(self, group: int) -> np.ndarray:
        """`overlaps` of a whole group, (n,) uint16, from the index alone. Errors as there."""
        return self._repeats(*self._entries(group, 0, int(self.groups[group])))

    def _repeats(self, shard: _Shard, first: int, last: int, spans: Spans | None = None) -> np.ndarray:
        starts, ends, _ = spans or shard.index.spans(first, last)
        prefixes = shard.index.repeats(first, last)
        short = prefixes > ends - starts
        if np.count_nonzero(short):
            at = int(np.argmax(short))
            raise ValueError(f"{shard.index.path.with_suffix('.idx')}: entry {first + at:,} is shorter than its prefix "
                             f"({ends[at] - starts[at]:,} ids, {prefixes[at]:,} repeated); python -m scripts.verify "
                             f"tells which others are; then {REDO}")
        return prefixes

    def overlaps(self, group: int, unit: int, unit_size: int) -> list[int]:
        """How many first ids of each entry repeat the entry before it; reads no ids that are not mapped. ValueError
        where that is more than it has."""
        if not self.mapped:
            return self._repeats(*self._entries(group, unit, unit_size)).tolist()
        block, span = self._unit(group, unit, unit_size)
        return [0] * len(block.ends[span]) if block.prefixes is None else block.prefixes[span].tolist()

    def encode(self, raw: list[np.ndarray]) -> list[np.ndarray]:
        """Entries are ids already."""
        return raw
