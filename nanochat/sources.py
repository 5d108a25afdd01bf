"""
Sources: the files of a bucket behind one small interface, and the manifest that pins them.

    Source.groups              documents in each group (a parquet row group), in the order of files
    Source.fetch(group, unit)  raw documents of a unit (consecutive documents of a group): cheap to hold
    Source.encode(raw)         their tokens as the stream sees them: BOS and ids

A parquet row group can only be read from its beginning, and one page may hold all of it, but a lane wants 64 documents
now and the next 64 much later. Holding each lane's group decoded would cost megabytes a lane, decoding it for each unit
would cost sixteen times the work. So a group is decoded once, cut into units, and the units that the lane will still
want are kept compressed until they are fetched (`keep`). A small bucket, whose groups several lanes share, is kept
compressed whole.

A run must see the same files for ever. `scan` makes the manifest: for each file its relative name, size, a hash of
its footer and the rows of its groups, and of an object its ETag. `check` compares it with the disk or the store and
names the file that changed or went. Files that came later are not in the manifest and so not in the stream. Hashing
whole files at each start would take hours on large data sets; the footer holds offsets, sizes and statistics of every
column chunk, so a rewritten parquet file does not keep it. ETags count where a manifest's data still lie where they
lay: another store gives the same bytes another one.

jsonl and jsonl.gz (a `{"text": ...}` a line) are converted once to parquet in a cache and are then parquet.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from nanochat.common import hash_bytes, hash_json
from nanochat.dataset import as_parquet, data_folder, find_files, open_parquet, read_batches, read_footer
from nanochat.pairs import pair_format
from nanochat.pairs import scan_file as scan_pair
from nanochat.places import etag_of, fetch, place
from nanochat.remote import is_remote

SMALL_BYTES = 32_000_000  # files of a bucket that is kept in memory, compressed, once it is read
Manifest = dict[str, Any]  # {"root": str, "files": [{"name", "size", "footer", "groups"}]}; "root" may move


class Tokenizer(Protocol):
    """What the stream needs of a tokenizer; `nanochat.tokenizer.RustBPETokenizer` is one."""

    @property
    def fingerprint(self) -> str: ...

    def get_bos_token_id(self) -> int: ...

    def encode_flat(self, texts: list[str], *, num_threads: int = ...) -> tuple[np.ndarray, np.ndarray]: ...


class Source(Protocol):
    """One bucket's documents. `fetch` and `encode` are called from several threads at once."""

    fingerprint: str
    groups: np.ndarray  # (G,) int64, documents in each group
    mapped: bool  # whether fetching costs nothing, so that nobody need do it ahead

    def fetch(self, group: int, unit: int, unit_size: int, keep: Callable[[], set[int]] = ...) -> list[Any]: ...

    def encode(self, raw: list[Any]) -> list[np.ndarray]: ...

    def overlaps(self, group: int, unit: int, unit_size: int) -> Sequence[int]: ...

    def locate(self, group: int) -> tuple[str, int]: ...


# ---- manifests ------------------------------------------------------------------------------------------------------

def _scan_file(path: Path, name: str) -> dict[str, Any]:
    if path.suffix == ".bin":
        return scan_pair(path, name)
    footer, counts = read_footer(path)
    return {"name": name, "size": path.stat().st_size, "footer": hash_bytes(footer), "groups": counts, **etag_of(path)}


def check_format(root: Path | str, files: Sequence[Path], data_format: str) -> None:
    """Insist that pairs of .bin and .idx are of the format that was asked for. Which of a mixture were meant nobody can
    tell, and to leave one kind out would make the data silently less, so that is a ValueError too."""
    pairs = [f for f in files if f.suffix == ".bin"]
    fetch(f.with_suffix(".idx") for f in pairs)
    formats = {f: pair_format(f) or data_format for f in pairs}  # what is unknown is told when it is opened
    others = [f for f in pairs if formats[f] != data_format]
    if not others:
        return
    if len(others) < len(pairs):
        one, other = min(f for f in pairs if f not in others), min(others)
        raise ValueError(f"{root}: it mixes {data_format} ({one.name}) with {formats[other]} ({other.name}); move one"
                         f" kind elsewhere, or turn it into the other (python -m scripts.convert_shards)")
    raise ValueError(f"{others[0]}: this pair is of --data-format {formats[others[0]]}, not {data_format}")


def scan(root: Path | str, files: Sequence[Path] | None = None, *, strict: bool = False) -> Manifest:
    """The manifest of some files (default: all) below `root`; jsonl is converted first. The first bad file raises."""
    files = find_files(root) if files is None else list(files)
    folder = data_folder(root)
    names = [f.relative_to(folder).as_posix() for f in files]
    paths = [as_parquet(f, strict=strict) for f in files]
    return {"root": str(folder.resolve()), "files": _for_each(_scan_file, paths, names)}


def _for_each(look: Callable[..., dict[str, Any]], paths: Sequence[Path], *more: Sequence[Any]) -> list[dict[str, Any]]:
    """`look` at files, several at once: of a disk some, of a store, which answers late, many."""
    with ThreadPoolExecutor(32 if any(map(is_remote, paths)) else 8) as pool:
        return list(pool.map(look, paths, *more))


def fingerprint(manifest: Manifest) -> str:
    """Hash of what the files hold, wherever they lie."""
    return hash_json([[e["size"], e["footer"], e["groups"]] for e in manifest["files"]])


def check(manifest: Manifest, root: Path | str | None = None, *, strict: bool = False) -> Manifest:
    """Compare a manifest with the disk (under another root, if given). Returns it with the root in use.

    Raises FileNotFoundError or ValueError naming the first file that vanished or changed.
    """
    folder = data_folder(root or manifest["root"])
    names = [e["name"] for e in manifest["files"]]
    paths = [folder / name for name in names]
    folder.is_dir()  # of a store: list it once
    fetch(path.with_suffix(".idx") for path in paths if path.suffix == ".bin")
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: this run reads it and it is gone; bring it back, or start a new run with "
                                    f"other data (--model-tag)")
    here = str(folder.resolve())
    known = [e.get("etag") if here == manifest["root"] else None for e in manifest["files"]]

    def look(path: Path, entry: dict[str, Any], etag: str | None) -> dict[str, Any]:
        if etag and path.suffix == ".parquet" and etag_of(path) == {"etag": etag}:
            return entry  # it has not changed, so neither has its footer
        return _scan_file(path, entry["name"])

    now = _for_each(look, [as_parquet(p, strict=strict) for p in paths], manifest["files"], known)
    for old, new, path in zip(manifest["files"], now, paths, strict=True):
        keys = ("size", "etag", "footer", "groups") if here == manifest["root"] else ("size", "footer", "groups")
        for what in keys:
            if old.get(what) != new.get(what):
                raise ValueError(f"{path}: changed since this run began ({what}: {old.get(what)} then, {new.get(what)} "
                                 f"now); bring the old file back, or start a new run (--model-tag)")
    return {**manifest, "root": here, "files": now}


# ---- parquet --------------------------------------------------------------------------------------------------------

class ParquetSource:
    """Text in parquet files. `decoded` counts row groups decoded so far (a figure to watch: it should stay near one for
    each group and epoch)."""

    mapped = False

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer):
        self.manifest, self.tokenizer = manifest, tokenizer
        self.fingerprint = fingerprint(manifest)
        per_file = [len(e["groups"]) for e in manifest["files"]]
        self.groups = np.array([n for e in manifest["files"] for n in e["groups"]], dtype=np.int64)
        self._paths = [as_parquet(place(manifest["root"]) / e["name"]) for e in manifest["files"]]
        self._first_group = np.concatenate([[0], np.cumsum(per_file)])
        self._kept: dict[tuple[int, int, int], tuple[int, bytes, np.ndarray]] = {}  # units, compressed; see _pop
        self.small = sum(e["size"] for e in manifest["files"]) <= SMALL_BYTES
        self._codec = pa.Codec("zstd", compression_level=1)
        self._locks: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()
        self.decoded = 0

    def _place(self, group: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first_group, group, side="right")) - 1
        return file, group - int(self._first_group[file])

    def locate(self, group: int) -> tuple[str, int]:
        """(relative file name, row group in that file) of a group."""
        file, local = self._place(group)
        return self.manifest["files"][file]["name"], local

    def fetch(self, group: int, unit: int, unit_size: int, keep: Callable[[], set[int]] = set) -> list[bytes]:
        """UTF-8 texts of a group's documents [unit * unit_size, (unit + 1) * unit_size). If the group must be decoded
        for it, the units that `keep()` names are put aside, compressed, for later calls. Raises ValueError naming the
        file for nulls and broken data."""
        held = self._pop(group, unit, unit_size)
        if held is None:
            with self._lock:
                lock = self._locks.setdefault(group, threading.Lock())
            with lock:
                held = self._pop(group, unit, unit_size)  # a neighbour may have decoded the group meanwhile
                if held is None:
                    held = self._decode(group, unit, unit_size, keep())
        data, offsets = held
        view = memoryview(data)
        return [bytes(view[a:b]) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]

    def encode(self, raw: list[bytes]) -> list[np.ndarray]:
        """Token ids of each text, BOS in front: (n,) arrays of the tokenizer's dtype, each with memory of its own."""
        ids, offsets = self.tokenizer.encode_flat([text.decode() for text in raw], num_threads=1)
        return [ids[a:b].copy() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]

    def overlaps(self, group: int, unit: int, unit_size: int) -> Sequence[int]:
        """How many first ids of each document repeat another one: none, and no list of zeros is made to say so."""
        return ()

    def _pop(self, group: int, unit: int, unit_size: int) -> tuple[Any, np.ndarray] | None:
        """A unit that was put aside. Its size belongs to its name: another stream may cut the group differently."""
        key = (group, unit, unit_size)
        with self._lock:
            kept = self._kept.get(key) if self.small else self._kept.pop(key, None)
        if kept is None:
            return None
        size, compressed, offsets = kept
        return self._codec.decompress(compressed, decompressed_size=size), offsets

    def _decode(self, group: int, unit: int, unit_size: int, keep: set[int]) -> tuple[Any, np.ndarray]:
        """Read a group from its beginning, as far as needed, unit by unit."""
        file, number = self._place(group)
        path = self._paths[file]
        found = None
        with open_parquet(path) as f:
            for index, column in enumerate(read_batches(f, number, path, batch_size=unit_size)):
                if self.small or index == unit or index in keep:
                    data, offsets = _texts_of(column)
                    if index == unit:
                        found = (data.to_pybytes(), offsets)
                    if self.small or index != unit:
                        kept = (data.size, self._codec.compress(data, asbytes=True), offsets)
                        with self._lock:
                            self._kept[(group, index, unit_size)] = kept
                if not self.small and index >= max(unit, *keep, 0):
                    break
        if found is None:
            raise ValueError(f"{path}: row group {number} has no documents from {unit * unit_size:,} on; the file "
                             f"changed since the run began")
        with self._lock:
            self.decoded += 1
            self._locks.pop(group, None)
        return found


def _texts_of(column: pa.Array) -> tuple[pa.Buffer, np.ndarray]:
    """The bytes of a string column and (n + 1) offsets into them."""
    wide = pa.types.is_large_string(column.type)
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int64 if wide else np.int32)
    offsets = offsets[column.offset:column.offset + len(column) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    data = column.buffers()[2] or pa.py_buffer(b"")
    return data.slice(first, last - first), offsets - first
