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

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from nanochat.common import atomic_open, get_base_dir, hash_bytes, hash_json, read_json, write_json
from nanochat.data_files import data_folder, find_files
from nanochat.dataset import give_back_freed
from nanochat.jsonl import read_jsonl
from nanochat.pairs import scan_file as scan_pair
from nanochat.places import etag_of, fetch, local, place
from nanochat.remote import is_remote

log = logging.getLogger(__name__)

GROUP_DOCUMENTS = 1024  # documents in a row group of what we write
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

def read_footer(path: Path) -> tuple[pq.FileMetaData, bytes]:
    """A parquet file's metadata and its raw footer. ValueError names the file when it is not readable parquet with a
    `text` column and at least one document, FileNotFoundError when it is not there."""
    size = 0
    try:
        with path.open("rb") as f:
            size = f.seek(0, 2)
            f.seek(max(0, size - 8))
            tail = f.read(8)
            f.seek(max(0, size - 8 - int.from_bytes(tail[:4], "little")))
            footer = f.read()
            metadata = pq.read_metadata(f if is_remote(path) else path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: the file is gone; bring it back, or start a new run (--model-tag)") from None
    except (pa.ArrowInvalid, OSError) as e:
        _raise_of_store(path, e)
        raise ValueError(f"{path}: not a whole parquet file ({size:,} bytes; {e}); delete it and fetch or make it again"
                         ) from e
    schema = metadata.schema.to_arrow_schema()
    if "text" not in schema.names:
        raise ValueError(f"{path}: no `text` column, it has {schema.names}; rename the column that holds the documents")
    if not (pa.types.is_string(schema.field("text").type) or pa.types.is_large_string(schema.field("text").type)):
        raise ValueError(f"{path}: column `text` has type {schema.field('text').type}, expected string")
    if metadata.num_rows == 0:
        raise ValueError(f"{path}: an empty parquet file (0 rows); delete it")
    return metadata, footer


def _raise_of_store(path: Path, e: Exception) -> None:
    """What a store said (it names the object) is told as it is: the file is not to blame."""
    if is_remote(path) and str(e).startswith(str(path)):
        raise e


def _scan_file(path: Path, name: str) -> dict[str, Any]:
    if path.suffix == ".bin":
        return scan_pair(path, name)
    metadata, footer = read_footer(path)
    leaves = [metadata.schema.column(i).path for i in range(metadata.num_columns)]  # a struct before it has several
    column = leaves.index("text")
    counts = []
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        statistics = group.column(column).statistics
        if statistics is not None and statistics.has_null_count and statistics.null_count:
            raise ValueError(_null_error(path, g, statistics.null_count))
        counts.append(group.num_rows)
    return {"name": name, "size": path.stat().st_size, "footer": hash_bytes(footer), "groups": counts, **etag_of(path)}


def _null_error(path: Path | str, group: int, count: int) -> str:
    return (f"{path}: {count} null(s) in column `text` of row group {group}; drop those rows (python -m "
            f"dev.repackage_data_reference does) or fill them")


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


# ---- jsonl ----------------------------------------------------------------------------------------------------------

def as_parquet(path: Path, *, strict: bool = False) -> Path:
    """`path` itself, or the cached parquet made of a .jsonl or .jsonl.gz file (converted once for its size and time of
    change). Broken lines are counted and reported with their numbers; with `strict` the first is a ValueError."""
    if path.name.endswith((".parquet", ".bin")) or not path.exists():
        return path
    path = local(path)
    stat = path.stat()
    key = hash_json([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    folder = get_base_dir() / "converted" / key
    folder.mkdir(parents=True, exist_ok=True)
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
    target, report = folder / f"{stem}.parquet", folder / "report.json"
    if not (target.exists() and report.exists()):
        bad = _convert(path, target, strict=strict)
        write_json(report, {"source": str(path), "skipped": bad})
        for number, why in bad[:10]:
            log.warning("%s: line %d skipped: %s", path, number, why)
        if bad:
            log.warning("%s: %d broken line(s) skipped in all; %s lists them", path, len(bad), report)
    bad = read_json(report)["skipped"]
    if bad and strict:
        raise ValueError(f"{path}: line {bad[0][0]}: {bad[0][1]}; mend it, or leave out --strict to skip such lines")
    return target


def _convert(path: Path, target: Path, *, strict: bool) -> list[tuple[int, str]]:
    bad: list[tuple[int, str]] = []
    schema = pa.schema([("text", pa.string())])
    with atomic_open(target) as out, pq.ParquetWriter(out, schema, compression="zstd") as writer:
        texts: list[str] = []
        num_documents = 0
        for text in _jsonl_texts(path, bad, strict=strict):
            num_documents += 1
            texts.append(text)
            if len(texts) == GROUP_DOCUMENTS:
                writer.write_table(pa.table({"text": texts}, schema=schema), row_group_size=GROUP_DOCUMENTS)
                texts = []
        if texts:
            writer.write_table(pa.table({"text": texts}, schema=schema), row_group_size=GROUP_DOCUMENTS)
        if not num_documents:
            why = f", line {bad[0][0]}: {bad[0][1]}" if bad else ""
            raise ValueError(f"{path}: no document in it ({len(bad)} broken line(s){why}); delete it or make it again")
    return bad


def _jsonl_texts(path: Path, bad: list[tuple[int, str]], *, strict: bool) -> Iterator[str]:
    try:
        for line in tqdm(read_jsonl(path, strict=strict), desc=f"converting {path.name}", unit=" lines", disable=None):
            if line.text is None:
                bad.append((line.number, line.problem))
            else:
                yield line.text
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e


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
        found, taken = None, 0
        try:
            with pq.ParquetFile(path.open("rb") if is_remote(path) else path, pre_buffer=False) as f:
                batches = f.iter_batches(batch_size=unit_size, row_groups=[number], columns=["text"], use_threads=False)
                for index, batch in enumerate(batches):
                    taken += batch.nbytes
                    if self.small or index == unit or index in keep:
                        data, offsets = _texts_of(batch.column(0), path, number)
                        if index == unit:
                            found = (data.to_pybytes(), offsets)
                        if self.small or index != unit:
                            kept = (data.size, self._codec.compress(data, asbytes=True), offsets)
                            with self._lock:
                                self._kept[(group, index, unit_size)] = kept
                    if not self.small and index >= max(unit, *keep, 0):
                        break
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: this run reads it and it is gone; bring it back, start again") from None
        except (pa.ArrowException, OSError) as e:
            _raise_of_store(path, e)
            raise ValueError(f"{path}: row group {number} cannot be read ({e}); fetch the file again (python -m "
                             f"nanochat.dataset --verify checks all)") from e
        if found is None:
            raise ValueError(f"{path}: row group {number} has no documents from {unit * unit_size:,} on; the file "
                             f"changed since the run began")
        with self._lock:
            self.decoded += 1
            self._locks.pop(group, None)
        give_back_freed(taken)
        return found


def _texts_of(column: pa.Array, path: Path, group: int) -> tuple[pa.Buffer, np.ndarray]:
    """The bytes of a string column, which are UTF-8, and (n + 1) offsets into them."""
    if column.null_count:
        raise ValueError(_null_error(path, group, column.null_count))
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as e:
        raise ValueError(f"{path}: a document of row group {group} is not UTF-8 ({e}); drop it, or write the data "
                         f"again with python -m dev.repackage_data_reference") from e
    wide = pa.types.is_large_string(column.type)
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int64 if wide else np.int32)
    offsets = offsets[column.offset:column.offset + len(column) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    data = column.buffers()[2] or pa.py_buffer(b"")
    return data.slice(first, last - first), offsets - first
