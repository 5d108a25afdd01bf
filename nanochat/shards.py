"""
Shards: token ids on disk, written once, read as views into a memory map.

    a.bin   t t t t E t t E t t t t t t t t E          token ids, entry after entry, nothing between them
    a.idx   "GPTS" | version 1 | type | entries n      16 bytes, u32 each; type 2 = uint16, 4 = uint32
            0 5 8 12 17                                (n + 1) int64: where in .bin each entry starts, and the end
            0 0 0 1                                    n uint16: how many first ids repeat the end of the entry before
    manifest.json                                      of the folder: tokenizer, arguments, counts, checksums

Above: two short documents, and one cut into windows of 4 ids with an overlap of 1. E ends documents, not windows; it
is the same id as BOS. Everything is little-endian. The format is that of gpt-simple 0.1.2 (its pretokenize module),
whose shards have no manifest.json and are read too.

**Writing.** `ShardWriter` streams ids to a temporary .bin, hashing as it goes, and renames .idx last: a pair without
a good .idx does not exist, so a crash or a full disk leaves no pair or a whole one.

**Which entries end a document?** An entry whose follower repeats something of it does not. Any other does if the
manifest tells that all later windows repeat something (or that there are none), so lengths and overlaps are known
from .idx alone. Otherwise (foreign shards, windows without overlap) the entry's last id decides. gpt-simple may
follow the end of a document with one more window that repeats its tail: only the last id tells that.

**Reading.** Opening a pair looks at 16 bytes, two offsets and two sizes, never at all offsets. What the stream makes
of a pair is in shard_source.py.

The kernel kills a process (SIGBUS) that reads a memory map beyond the end of a file truncated after it was opened.
Sizes are checked when a file is opened, but nobody can check later ones: do not write into shards in use. A new file
renamed over the old one is harmless, the map stays with the old.
"""

import contextlib
import functools
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nanochat.common import (
    atomic_open,
    fsync_dir,
    local,
    place,
    read_json,
)
from nanochat.readers import Range, map_file

MAGIC, VERSION = b"GPTS", 1
HEADER = struct.Struct("<4sIII")
DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
GROUP_ENTRIES = 1024  # entries of a group where the manifest does not say
MANIFEST_NAME, MANIFEST_FORMAT, MANIFEST_VERSION = "manifest.json", "nanochat-shards", 1
RECORD_KEYS = {"input", "documents", "entries", "tokens", "skipped", "bin_bytes", "bin_hash", "idx_hash"}
REDO = "delete it and rerun scripts.tok_shards"


def shard_dtype(vocab_size: int) -> np.dtype:
    """The type of ids on disk: uint16, or uint32 for more than 65,535 ids."""
    return DTYPES[2 if vocab_size <= 65535 else 4]


# ---- writing --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Written:
    """What a finished pair holds, as its record in manifest.json has it."""

    entries: int
    tokens: int
    bin_bytes: int
    bin_hash: str
    idx_hash: str


class PairFiles:
    """A .bin that is being written, and the .idx that makes it count, of any format: after `commit` both are there,
    whole; before it, and after `abandon`, neither is, and a pair that was there before is left alone."""

    def __init__(self, bin_path: Path):
        self.bin_path = bin_path
        self._file = contextlib.ExitStack()
        self._bin: BinaryIO = self._file.enter_context(atomic_open(bin_path))
        self._hash = blake2b(digest_size=16)

    def write(self, data: Any) -> None:
        """Append bytes to the .bin."""
        self._bin.write(data)
        self._hash.update(data)

    def commit(self, idx_path: Path, parts: Iterable[Any]) -> tuple[str, str]:
        """Write the .idx, part after part, and have both appear, it last. Returns the checksums of .bin and .idx."""
        digest, replacing = blake2b(digest_size=16), False
        try:
            with atomic_open(idx_path) as idx:
                for part in parts:
                    idx.write(part)
                    digest.update(part)
                for f in (self._bin, idx):  # a full disk shows here, while the old pair is untouched
                    f.flush()
                    os.fsync(f.fileno())
                if idx_path.exists():  # never the old .idx beside the new .bin
                    idx_path.unlink()
                    fsync_dir(idx_path.parent)
                replacing = True
                self._file.close()
        except BaseException as e:
            self.abandon(e)
            if replacing:
                self.bin_path.unlink(missing_ok=True)
            raise
        return self._hash.hexdigest(), digest.hexdigest()

    def abandon(self, error: BaseException) -> None:
        """Have the temporary file go: it is closed as if `error` had come up while it was written."""
        with contextlib.suppress(BaseException):
            self._file.__exit__(type(error), error, error.__traceback__)


class ShardWriter:
    """Context manager that writes PATH.bin and PATH.idx. When the block ends well both are there, whole, and
    `written` says what they hold; after an exception neither is, and a pair that was there before is left alone.

    `dtype`: in place of the one that fits the vocabulary. Memory: 10 bytes an entry. ValueError for ids outside the
    vocabulary, arrays that do not fit together, no entry at all.
    """

    def __init__(self, path: Path | str, *, vocab_size: int, dtype: np.dtype | None = None):
        path = Path(path)
        self.bin_path, self.idx_path = path.parent / f"{path.name}.bin", path.parent / f"{path.name}.idx"
        self.vocab_size, self.dtype = vocab_size, dtype or shard_dtype(vocab_size)
        self.written: Written | None = None
        self._lengths: list[np.ndarray] = []
        self._prefixes: list[np.ndarray] = []
        self._tokens = 0

    def __enter__(self) -> "ShardWriter":
        self._files = PairFiles(self.bin_path)
        return self

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        """Append entries: their ids one after another (sum of lengths,), how many each has (n,), and how many first
        ids of each repeat the entry before (n,)."""
        lengths, prefixes = np.array(lengths, np.int64), np.array(prefixes)
        if len(lengths) != len(prefixes) or lengths.sum() != len(ids) or (lengths < 0).any():
            raise ValueError(f"{self.bin_path}: got {len(ids):,} ids, {len(lengths):,} lengths that add up to "
                             f"{lengths.sum():,} and {len(prefixes):,} prefixes, expected arrays that fit together")
        for name, values, limit in (("id", ids, self.vocab_size), ("prefix", prefixes, 1 << 16)):
            if len(values) and not (values.min() >= 0 and values.max() < limit):
                raise ValueError(f"{self.bin_path}: got {name} {values.min()} .. {values.max()}, expected 0 .. "
                                 f"{limit - 1}; is it the tokenizer that the ids come from?")
        self._files.write(np.ascontiguousarray(ids, self.dtype).data)
        self._tokens += len(ids)
        self._lengths.append(lengths)
        self._prefixes.append(prefixes.astype("<u2"))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._files.abandon(error)
            return
        try:
            parts = self._index_parts()
        except BaseException as e:
            self._files.abandon(e)
            raise
        bin_hash, idx_hash = self._files.commit(self.idx_path, parts)
        n = sum(map(len, self._lengths))
        self.written = Written(n, self._tokens, self._tokens * self.dtype.itemsize, bin_hash, idx_hash)

    def _index_parts(self) -> Iterable[Any]:
        n = sum(map(len, self._lengths))
        if not 0 < n < 1 << 32:
            raise ValueError(f"{self.bin_path}: {n:,} entries, expected 1 to {(1 << 32) - 1:,}; leave out an input "
                             f"without documents, cut one with too many")
        offsets = np.zeros(n + 1, "<i8")
        np.cumsum(np.concatenate(self._lengths), out=offsets[1:])
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        return [HEADER.pack(MAGIC, VERSION, code, n), offsets.data, np.concatenate(self._prefixes).data]


# ---- reading --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Index:
    """An open .idx: views into its memory map (`nanochat.pairs.Entries`). `path` is the .bin."""

    path: Path
    dtype: np.dtype
    offsets: np.ndarray  # (n + 1,) int64
    prefixes: np.ndarray  # (n,) uint16

    def __len__(self) -> int:
        return len(self.prefixes)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def spans(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, list[Range] | None]:
        """(starts, ends, None) of entries first .. last - 1 in the ids, two (n,) int64. ValueError naming the file for
        offsets that do not ascend."""
        offsets = self.offsets[first:last + 1]
        starts, ends = offsets[:-1], offsets[1:]
        if np.count_nonzero(ends < starts) or offsets[0] < 0 or offsets[-1] > self.num_tokens:
            raise ValueError(f"{self.path.with_suffix('.idx')}: the offsets of entries {first:,} to {last:,} do not "
                             f"ascend; python -m scripts.verify tells which, then {REDO}")
        return starts, ends, None

    def repeats(self, first: int, last: int) -> np.ndarray:
        """How many first ids of each repeat the entry before it, (n,) uint16."""
        return self.prefixes[first:last]


@contextlib.contextmanager
def _missing_told(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        other = path.with_suffix(".bin" if path.suffix == ".idx" else ".idx")
        why = (f"not there, but {other.name} needs it; bring it back, or delete {other.name} and rerun "
               f"scripts.tok_shards")
        gone = "the file is gone; bring it back, or start a new run (--model-tag)"
        raise FileNotFoundError(f"{path}: {why if other.exists() else gone}") from None


def read_header(path: Path) -> tuple[np.dtype, int]:
    """(type of the ids, number of entries) from the first 16 bytes of an .idx; ValueError if it is none or empty."""
    with _missing_told(path), open(local(path), "rb") as f:
        data = f.read(HEADER.size)
    if len(data) < HEADER.size:
        raise ValueError(f"{path}: {len(data)} bytes, expected a header of {HEADER.size}; {REDO}")
    magic, version, code, n = HEADER.unpack(data)
    if magic != MAGIC:
        raise ValueError(f"{path}: it begins with {magic!r}, expected {MAGIC!r}; it is no shard index: take it "
                         f"away, or {REDO}")
    if version != VERSION:
        raise ValueError(f"{path}: format version {version}, expected {VERSION}; {REDO}")
    if code not in DTYPES:
        raise ValueError(f"{path}: type code {code}, expected 2 (uint16) or 4 (uint32); {REDO}")
    if n == 0:
        raise ValueError(f"{path}: an empty shard (0 entries); delete it and its .bin")
    return DTYPES[code], n


def read_index(path: Path | str) -> Index:
    """Open a pair, given by either file. Looks at header, sizes, first and last offset; cheap for any size.

    Raises FileNotFoundError or ValueError naming the file: a missing sibling, no GPTS header, a wrong size.
    """
    idx, bin = place(path).with_suffix(".idx"), place(path).with_suffix(".bin")
    dtype, n = read_header(idx)
    size, expected = idx.stat().st_size, HEADER.size + 8 * (n + 1) + 2 * n
    if size != expected:
        raise ValueError(f"{idx}: {size:,} bytes, expected {expected:,} for {n:,} entries; {REDO}")
    data = map_file(local(idx))
    offsets = np.frombuffer(data, "<i8", n + 1, HEADER.size)
    prefixes = np.frombuffer(data, "<u2", n, HEADER.size + 8 * (n + 1))
    if offsets[0] != 0:
        raise ValueError(f"{idx}: the first offset is {offsets[0]:,}, expected 0; {REDO}")
    with _missing_told(bin):
        size = bin.stat().st_size
    if size != int(offsets[-1]) * dtype.itemsize:
        raise ValueError(f"{bin}: {size / dtype.itemsize:,.10g} tokens on disk, header says {offsets[-1]:,}; {REDO}")
    return Index(bin, dtype, offsets, prefixes)


def read_tokens(index: Index) -> np.ndarray:
    """All ids of a pair, (num_tokens,) uint16 or uint32: a read-only view of its memory map."""
    return np.frombuffer(map_file(index.path), index.dtype)


# ---- the manifest of a folder ---------------------------------------------------------------------------------------

def new_manifest(tokenizer: Mapping[str, Any], arguments: Mapping[str, Any], shards: Mapping[str, Any], *,
                 data_format: str = "shards") -> dict[str, Any]:
    """The manifest of a folder of pairs; `data_format` is in it if it is not "shards". `tokenizer`: fingerprint, eod,
    vocab_size, name. `shards`: a record for each pair by its name without ending: input, documents, entries, tokens,
    skipped, bin_bytes, bin_hash, idx_hash, and groups (entries of each) where they are not GROUP_ENTRIES each."""
    return {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION,
            **({} if data_format == "shards" else {"data_format": data_format}), "tokenizer": dict(tokenizer),
            "arguments": dict(arguments), "shards": {name: shards[name] for name in sorted(shards)}}


def read_manifest(folder: Path | str) -> dict[str, Any] | None:
    """The manifest of a folder of shards, None where it has none; do not change it, it may be shared. ValueError if
    it is broken or of another format."""
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
    shards = manifest.get("shards")
    wanted: list[tuple[str, Any, set[str]]] = [
        ("tokenizer", manifest.get("tokenizer"), {"fingerprint", "eod", "vocab_size"}),
        ("arguments", manifest.get("arguments"), {"max_length", "overlap_size"}), ("shards", shards, set()),
        *((name, record, RECORD_KEYS) for name, record in (shards.items() if isinstance(shards, dict) else ()))]
    for name, value, keys in wanted:
        if not isinstance(value, dict):
            raise ValueError(f"{path}: {name} is {type(value).__name__}, expected a JSON object; delete it and rerun "
                             f"scripts.tok_shards")
        if missing := keys - set(value):
            raise ValueError(f"{path}: {name} lacks {', '.join(sorted(missing))}; delete it and rerun "
                             f"scripts.tok_shards")
    return manifest


def ends_follow(manifest: Mapping[str, Any] | None) -> bool:
    """Whether lengths and prefixes tell which entries end a document: each later window has a prefix, or there is
    none."""
    if manifest is None:
        return False
    arguments = manifest["arguments"]
    return arguments["max_length"] == 0 or arguments["overlap_size"] > 0


def record_groups(record: Mapping[str, Any] | None, entries: int) -> list[int]:
    """Entries of each group of a shard."""
    if record is not None and record.get("groups") is not None:
        return list(record["groups"])
    whole, rest = divmod(entries, GROUP_ENTRIES)
    return [GROUP_ENTRIES] * whole + [rest] * (rest > 0)
