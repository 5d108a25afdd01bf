"""
Sources: the files of a bucket behind one small interface, and the manifest that pins them.

    Source.groups, .means       documents in each group, in the order of files; about how many tokens each has
    Source.read(group, rows)    those documents as token ids, [BOS] + ids each

A group is a run of documents stored together: a parquet row group, some thousand entries of a token
file. A new kind of data file is one class in one file: see `source_class`.

**Parquet.** A row group can only be read from its beginning, and one page may hold all of it, but a
lane wants 64 documents now and the next 64 much later. Holding each lane's group decoded would cost
megabytes a lane; decoding it for each unit would cost sixteen times the work. So a group is decoded
once, and the units that the lane will read soon are kept compressed until it reads them. A *small*
bucket, at most 32 Mi tokens or about 128 MB of text, is read in random order: each group is decoded
once in the whole run, and its documents stay in memory, each compressed by itself. (Compressing
several together took no less memory, and a fifth more time for each document that is read.)

**Pinned files.** A run must see the same files for ever. `scan` makes the manifest: for each file
its relative name, size, a hash of its footer and the rows of its groups, and of an object its ETag.
`check` compares it with the disk or the store and names the file that changed or went. Files that
came later are not in the manifest and so not in the stream. Hashing whole files at each start would
take hours on large data sets. The footer holds offsets, sizes and statistics of every column chunk,
so a rewritten parquet file does not keep it. ETags count where a manifest's data still lie where
they lay: another store gives the same bytes another one.
"""

import functools
import importlib
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from nanochat.common import (
    check_shape,
    each,
    etag_of,
    fetch,
    hash_bytes,
    hash_json,
    place,
    read_json,
)
from nanochat.dataset import data_folder, find_files
from nanochat.text import (
    ALL,
    SUFFIXES,
    TEXT_FIELD,
    Reading,
    as_parquet,
    is_blank,
    open_parquet,
    read_batches,
    read_footer,
    text_tokens,
)
from nanochat.tokenizer import CannotEncode, Tokenizer
from nanochat.tokens import GROUP_ENTRIES, TokenFile, open_tokens, pair_format

Manifest = dict[str, Any]  # of this shape; "root" may move
PINNED = {"root": str, "files": [{"name": str, "size": int, "footer": str, "groups": [int]}]}
SMALL_TOKENS = 32 << 20  # estimated, of a bucket whose documents are shuffled one by one
SMALL_DOCUMENTS = 1 << 20  # and as many documents


def counts_and_means(manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """Of each group of a manifest, in the order of files: its documents and about how many tokens they
    have on average, each (G,) int64. The mean is that of the group's file."""
    files = manifest["files"]
    counts = [np.array(e["groups"], np.int64) for e in files]
    documents = [max(1, int(of_file.sum())) for of_file in counts]
    tokens = [e.get("tokens", text_tokens(e["size"], n)) for e, n in zip(files, documents)]
    means = [np.full(len(of_file), max(1, total // n)) for of_file, total, n in zip(counts, tokens, documents)]
    return np.concatenate(counts), np.concatenate(means)


class Source:
    """One bucket's documents. `manifest` is a run's, see `scan`; the tokenizer is the run's.

    A kind of file is a subclass: `scan_file` pins one, `read` reads it. Both may be called from
    several threads at once, and errors name the file.
    """

    lengths_known: ClassVar[bool] = False  # whether `lengths` is there: no ids need be read for them

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer):
        files = manifest["files"]
        self.manifest, self.tokenizer = manifest, tokenizer
        self.bos = tokenizer.get_bos_token_id()
        self.fingerprint = fingerprint(manifest)
        self.groups, self.means = counts_and_means(manifest)
        self.small = int(self.groups @ self.means) <= SMALL_TOKENS and int(self.groups.sum()) <= SMALL_DOCUMENTS
        self.paths = [place(manifest["root"]) / e["name"] for e in files]
        self._first_group = np.cumsum([0, *(len(e["groups"]) for e in files)])

    @staticmethod
    def scan_file(path: Path, name: str, field: str = TEXT_FIELD) -> dict[str, Any]:
        """What pins a file in a manifest: {"name", "size", "footer": a hash, "groups": documents in
        each, "tokens": about how many in all, if the size does not show it}. `field` holds the text
        (--text-field). ValueError or FileNotFoundError for a file that cannot be read."""
        raise NotImplementedError

    def read(self, group: int, rows: np.ndarray, keep: int = 0) -> tuple[list[np.ndarray], list[int]]:
        """Documents `rows` (n,) of a group, in that order: (ids of each, how many first ids of each
        repeat the document before it). Rows behind these and before `keep` will be wanted soon."""
        raise NotImplementedError

    def lengths(self, group: int, rows: np.ndarray) -> tuple[list[int], list[int]]:
        """`read` without the ids: (length of each, how many first ids of each repeat)."""
        raise NotImplementedError

    def texts(self, group: int) -> list[str]:
        """The texts of all documents of a group; of stored tokens, what they decode to."""
        found, _ = self.read(group, np.arange(self.groups[group]))
        return [self.tokenizer.decode(ids.tolist()) for ids in found]

    def place(self, group: int) -> tuple[int, int]:
        """(file, group in that file) of a group."""
        file = int(np.searchsorted(self._first_group, group, side="right")) - 1
        return file, group - int(self._first_group[file])

    def locate(self, group: int) -> tuple[str, int]:
        """(relative file name, group in that file) of a group."""
        file, number = self.place(group)
        return self.manifest["files"][file]["name"], number


# ---- text in parquet --------------------------------------------------------------------------------

class ParquetSource(Source):
    """Text in parquet files; files of other kinds are converted to parquet once."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer):
        super().__init__(manifest, tokenizer)
        reading = Reading.of(manifest)
        self.field = reading.text_field
        self.paths = [as_parquet(path, reading) for path in self.paths]
        self._kept: dict[tuple[int, int, int], bytes] = {}  # by (group, row, size): a unit that is read soon
        self._groups = functools.cache(self._pack_group)  # of a small bucket
        self._locks = [threading.Lock() for _ in self.groups] if self.small else []

    @staticmethod
    def scan_file(path: Path, name: str, field: str = TEXT_FIELD) -> dict[str, Any]:
        footer, counts, text_bytes = read_footer(path, field)
        return {"name": name, "size": path.stat().st_size, "footer": hash_bytes(footer), "groups": counts,
                "tokens": text_tokens(text_bytes, sum(counts)), **etag_of(path)}

    def read(self, group: int, rows: np.ndarray, keep: int = 0) -> tuple[list[np.ndarray], list[int]]:
        """These documents of a group, tokenized; see `Source.read`. What else was decoded for them,
        and `keep` says is read soon, is kept compressed."""
        first = int(rows.min())
        unit = self._kept.pop((group, first, len(rows)), None) if keep else None
        if self.small:
            texts = self._texts(group, rows)
        elif unit is None:
            texts = self._decode(group, first, int(rows.max()) + 1, keep).take(pa.array(rows - first)).to_pylist()
        else:
            texts = _unpacked(unit).take(pa.array(rows - first)).to_pylist()
        try:
            ids, edges = self.tokenizer.encode_flat(texts, num_threads=1)
        except CannotEncode as e:
            name, local = self.locate(group)
            raise ValueError(f"{name}: row group {local}, row {rows[e.number]}: {e.reason}") from None
        return [ids[a:b].copy() for a, b in pairwise(edges.tolist())], [0] * len(rows)

    def texts(self, group: int) -> list[str]:
        return self._decode(group, 0, int(self.groups[group]), 0).to_pylist()

    def _texts(self, group: int, rows: np.ndarray) -> list[str]:
        """Any documents of a group of a small bucket."""
        with self._locks[group]:  # other threads that want this group wait until it is decoded
            packed = self._groups(group)
        return [pa.decompress(data, size, codec="lz4_raw", asbytes=True).decode()
                for size, data in (packed[row] for row in rows.tolist())]

    def _pack_group(self, group: int) -> list[tuple[int, bytes]]:
        """(bytes, the text compressed) of every document of a group."""
        texts = [text.encode() for text in self._decode(group, 0, int(self.groups[group]), 0).to_pylist()]
        return [(len(text), pa.compress(text, codec="lz4_raw", asbytes=True)) for text in texts]

    def _decode(self, group: int, first: int, stop: int, keep: int) -> pa.ChunkedArray:
        """Texts `first` to `stop` - 1 of a group, which is read from its beginning. Those behind
        them and before row `keep` are kept, in units of as many. ValueError names the file."""
        file, local = self.place(group)
        path, size, at = self.paths[file], stop - first, 0
        found: list[pa.Array] = []
        with open_parquet(path, self.field) as f:
            # whole units at a time: all units of a group but the last are equally large
            for column in read_batches(f, local, path, batch_size=size * -(-64 // size), field=self.field):
                found.append(column.slice(max(first - at, 0), max(stop - max(first, at), 0)))
                for row in range(max(at, stop), min(at + len(column), keep), size):
                    unit = column.slice(row - at, min(size, keep - row))
                    self._kept[group, row, len(unit)] = _packed(unit)
                at += len(column)
                if at >= max(stop, keep):
                    break
        if at < stop:
            raise ValueError(f"{path}: row group {local} ends at row {at:,}; the file changed since the run began")
        return pa.chunked_array(found)


def _packed(texts: pa.Array) -> bytes:
    """Texts, compressed (Arrow's stream of one batch)."""
    batch, sink = pa.record_batch([texts], ["text"]), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write(batch)
    return sink.getvalue().to_pybytes()


def _unpacked(texts: bytes) -> pa.ChunkedArray:
    """What `_packed` made bytes of."""
    return pa.ipc.open_stream(texts).read_all()["text"]


# ---- token files ------------------------------------------------------------------------------------

class TokenSource(Source):
    """Pairs of .bin and .idx, GPTS or Megatron's. A document is an entry, as `[BOS] + ids`, or as
    it is stored with `as_stored`. Files are opened when first used. ValueError for another
    tokenizer's."""

    lengths_known = True

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer, *, as_stored: bool = False):
        super().__init__(manifest, tokenizer)
        self.as_stored = as_stored
        groups = [np.cumsum([0, *e["groups"]])[:-1] for e in manifest["files"]]
        self._first_entry = np.concatenate(groups)
        if "documents" in manifest:  # a part of one pair: its documents first .. end - 1
            first, end = manifest["documents"]
            edges = np.array([*range(first, end, GROUP_ENTRIES), end])
            self.groups, self._first_entry = np.diff(edges), edges[:-1]
            self.means = np.full(len(self.groups), self.means[0])
            self._first_group = np.array([0, len(self.groups)])
            self.fingerprint = hash_json([self.fingerprint, first, end])
        self._pair = functools.cache(self._open)
        for number in {path.parent: number for number, path in enumerate(self.paths)}.values():
            self._pair(number).refuse_other_tokenizer(tokenizer.fingerprint)

    @staticmethod
    def scan_file(path: Path, name: str, field: str = TEXT_FIELD) -> dict[str, Any]:
        return open_tokens(path).pin(name)

    def _open(self, number: int) -> TokenFile:
        """The pair of a file of the manifest."""
        path, entry = self.paths[number], self.manifest["files"][number]
        found = open_tokens(path, vocab_size=self.tokenizer.get_vocab_size())
        if (len(found), found.num_bytes) != (sum(entry["groups"]), entry["size"]):
            raise ValueError(f"{path}: {len(found):,} entries in {found.num_bytes:,} bytes, "
                             f"{sum(entry['groups']):,} in {entry['size']:,} when this run began; bring "
                             f"the old file back, or start a new run (--model-tag)")
        return found

    def _entries(self, group: int, rows: np.ndarray) -> tuple[TokenFile, int, int, np.ndarray]:
        """(pair, first entry, end, which of these the rows are) of what lies between the first and
        the last of some rows of a group."""
        pair, first, low = self._pair(self.place(group)[0]), int(self._first_entry[group]), int(rows.min())
        return pair, first + low, first + int(rows.max()) + 1, rows - low

    def read(self, group: int, rows: np.ndarray, keep: int = 0) -> tuple[list[np.ndarray], list[int]]:
        pair, first, stop, at = self._entries(group, rows)
        found = pair.read(first, stop) if self.as_stored else pair.documents(first, stop, self.bos)
        return [found[i] for i in at.tolist()], pair.prefixes(first, stop)[at].tolist()

    def lengths(self, group: int, rows: np.ndarray) -> tuple[list[int], list[int]]:
        pair, first, stop, at = self._entries(group, rows)
        known = pair.lengths(first, stop) if self.as_stored else pair.document_lengths(first, stop, self.bos)
        return known[at].tolist(), pair.prefixes(first, stop)[at].tolist()


# ---- kinds of files ---------------------------------------------------------------------------------

def source_class(name: str) -> type[Source]:
    """The kind of a data file, by its suffix. That of a suffix `.xyz` which is not known here is
    the class `FileSource` of a module `nanochat/source_xyz.py`; --data-format=xyz then reads such
    files."""
    if name.endswith(SUFFIXES):
        return ParquetSource
    if name.endswith(".bin"):
        return TokenSource
    suffix = Path(name).suffix[1:]
    try:
        return importlib.import_module(f"nanochat.source_{suffix}").FileSource
    except ModuleNotFoundError as e:
        raise ValueError(f"{name}: no source reads .{suffix} files (nanochat/source_{suffix}.py would)") from e


def open_source(manifest: Manifest, tokenizer: Tokenizer, *, as_stored: bool = False) -> Source:
    """The source of a manifest's files. `as_stored`: entries of token files as they are, for
    `binned`."""
    kind = source_class(manifest["files"][0]["name"])
    if kind is TokenSource:
        return TokenSource(manifest, tokenizer, as_stored=as_stored)
    if as_stored:
        raise ValueError("--packing binned: packs stored entries, and this data is text; make shards of it "
                         "with python -m scripts.tok_shards, or take --packing bestfit")
    return kind(manifest, tokenizer)


# ---- manifests --------------------------------------------------------------------------------------

def check_format(root: Path | str, files: Sequence[Path], data_format: str) -> None:
    """Insist that pairs of .bin and .idx are of the format that was asked for. Which of a mixture
    were meant nobody can tell, and to leave one kind out would make the data silently less, so that
    is a ValueError too."""
    fetch(f.with_suffix(".idx") for f in files if f.suffix == ".bin")
    for file in files:
        found = pair_format(file) if file.suffix == ".bin" else None
        if found and found != data_format:  # what is unknown is told when it is opened
            raise ValueError(f"{file}: this pair is of --data-format {found}, not {data_format}; where {root} "
                             f"mixes both, move one kind elsewhere, or turn it into the other (python -m "
                             f"scripts.convert_shards)")


def scan(root: Path | str, files: Sequence[Path] | None = None, *, reading: Reading = ALL) -> Manifest:
    """The manifest of some files (default: all) below `root`, which names of `reading` what is not
    as usual. The first bad file raises."""
    folder = data_folder(root)
    files = find_files(root) if files is None else files
    found = list(each(lambda file: _pin(file, file.relative_to(folder).as_posix(), reading), files))
    if all(file.name.endswith(SUFFIXES) and is_blank(as_parquet(file, reading), reading.text_field) for file in files):
        raise ValueError(f"{files[0]}: empty documents only, as in all {len(files)} file(s) of this part of the data; "
                         f"name others with --data-path and --val-path, or another field with --text-field")
    return {"root": str(folder.resolve()), "files": found, **reading.named()}


def _pin(path: Path, name: str, reading: Reading) -> dict[str, Any]:
    """What pins one file, whatever its kind; of one that was converted also its own size, for
    people."""
    readable = as_parquet(path, reading)
    found = source_class(name).scan_file(readable, name, reading.text_field)
    return found if readable == path else {**found, "own_size": path.stat().st_size}


def read_manifests(path: Path) -> dict[str, dict[str, Manifest]]:
    """What a run has pinned in its data_manifest.json, {} where there is none. ValueError if it is
    broken."""
    if not path.exists():
        return {}
    way_out = "put it back, or start a new run (--model-tag)"
    manifests = read_json(path, {"train": dict, "val": dict}, way_out=way_out)
    for split in ("train", "val"):
        check_shape(manifests[split], dict.fromkeys(manifests[split], PINNED), f"{path}: {split}")
        if not all(manifest["files"] for manifest in manifests[split].values()):
            raise ValueError(f"{path}: {split}: a bucket without files; {way_out}")
    return manifests


def fingerprint(manifest: Manifest) -> str:
    """Hash of what the files hold, wherever they lie."""
    pins = [[e["size"], e["footer"], e["groups"], e.get("tokens")] for e in manifest["files"]]
    return hash_json(pins + Reading.of(manifest).hashed())


def check(manifest: Manifest, root: Path | str | None = None, *, strict: bool = False) -> Manifest:
    """Compare a manifest with the disk (under another root, if given). Returns it with the root in
    use.

    Raises FileNotFoundError or ValueError naming the first file that vanished or changed, and if
    `strict` the first that has a broken line.
    """
    folder = data_folder(root or manifest["root"])
    here = str(folder.resolve())
    what = ("size", "footer", "groups", "tokens", *(["etag"] if here == manifest["root"] else []))

    def look(old: dict[str, Any]) -> dict[str, Any]:
        """The entry of a file of the manifest as it is now."""
        path = folder / old["name"]
        if not path.exists():
            raise FileNotFoundError(f"{path}: this run reads it and it is gone; bring it back, or start a "
                                    f"new run with other data (--model-tag)")
        if "etag" in what and path.suffix == ".parquet" and etag_of(path) == {"etag": old.get("etag")}:
            return old  # the object has not changed, so neither has its footer
        new = _pin(path, old["name"], Reading.of({**manifest, "strict": strict}))
        sampled = {"blocks"} & old.keys() & new.keys()  # older runs pinned none, and neither do stores
        for key in (*what, *sampled):
            if old.get(key) != new.get(key):
                raise ValueError(f"{path}: changed since this run began ({key}: {old.get(key)} then, {new.get(key)} "
                                 f"now); bring the old file back, or start a new run (--model-tag)")
        return new

    folder.is_dir()  # of a store: list it once
    fetch((folder / e["name"]).with_suffix(".idx") for e in manifest["files"] if e["name"].endswith(".bin"))
    return {**manifest, "root": here, "files": list(each(look, manifest["files"]))}
