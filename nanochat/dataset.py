"""
Text on disk: which files are data, what a readable text file is, and the data sets that we know.

    known data set --HTTP--> folder --split_train_val--> {"train": {bucket: files}, "val": {...}}
                                                                            |
                             .parquet                  open_parquet, read_footer, read_batches
                             .jsonl, .jsonl.gz         as_parquet: converted once, into a cache

Where a file lies says whether it trains or validates, and its suffix says its format:

    DIR/train/web/a.bin  DIR/val/web/c.bin     train: web [a];  val: web [c]
    DIR/web/a.bin  DIR/web/b.bin               train: web [a];  val: web [b], the last one
    PREFIX,PREFIX                              paths of pairs without their endings, in order

Hidden files are never data. Any of these paths may lie in object storage.

A known data set is a run of parquet shards with a `text` column. Its last shard is validation and is
pinned by name: it is always fetched, and it is an error where it is missing. Taking "the last file that
is here" instead would turn a failed download into a silent change of every number computed on validation.

    python -m nanochat.dataset -n 8 -w 4      # 8 training shards and the validation shard, 4 at a time
    python -m nanochat.dataset --verify       # read everything that is on disk, name what is broken
"""

import contextlib
import ctypes
import functools
import gzip
import itertools
import json
import logging
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from nanochat.common import (
    atomic_open,
    get_base_dir,
    hash_json,
    in_store,
    local,
    place,
    read_json,
    run_main,
    write_json,
)

log = logging.getLogger(__name__)

FORMATS = {  # suffixes by --data-format; the two kinds of .bin are told apart where they are opened
    "text": (".parquet", ".jsonl", ".jsonl.gz"),
    "shards": (".bin",),
    "megatron": (".bin",),
}
BUCKET = "data"  # the name of the bucket where there is only one
GROUP_DOCUMENTS = 1024  # documents in a row group of the parquet that we write
MAX_DOCUMENT_BYTES = 256 << 20  # a larger one is a mistake, or an attack on this machine's memory
LITTLE_TEXT = 1 << 18  # bytes of which the freed memory is not worth a call

HUB = "https://huggingface.co"
MARKER = "dataset.json"  # beside downloaded shards: which data set they are


# ---- which files are data -------------------------------------------------------------------------------------------

def suffixes_of(data_format: str) -> tuple[str, ...]:
    """How names of files of a --data-format end. A format that is not known here is a suffix (see
    `nanochat.sources.source_class`)."""
    return FORMATS.get(data_format, (f".{data_format}",))


def find_files(path: Path | str, data_format: str = "text") -> list[Path]:
    """All files of a format below a folder in the order of their relative paths; a single file is itself.
    Of pairs also PREFIX[,PREFIX...], each a path without .bin or .idx, in the order given."""
    path, suffixes = place(path), suffixes_of(data_format)
    if path.is_file():
        if not path.name.endswith(suffixes):
            raise ValueError(f"{path}: expected a folder or a {', '.join(suffixes)} file for --data-format "
                             f"{data_format}; rename it, or take another --data-format")
        return [path]
    if is_prefixes(path):
        return [_pair_at(prefix, data_format) for prefix in str(path).split(",")]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such data folder; download data with python -m nanochat.dataset, "
                                f"make some with python -m dev.make_sample_corpus, or point --data-path at yours")
    known = (".idx", *suffixes, *itertools.chain(*FORMATS.values()))
    there = {file for file in path.rglob("*") if file.name.endswith(known) and file.is_file()
             and not any(part.startswith(".") for part in file.relative_to(path).parts)}
    files = [file for file in there if file.name.endswith(suffixes)]
    if data_format != "text":
        for idx in sorted(file for file in there if file.suffix == ".idx"):
            file = idx.with_suffix(".bin")
            if file not in there:  # must not make the data silently less
                raise FileNotFoundError(f"{file}: not there, but {idx.name} needs it; bring it back, or delete "
                                        f"{idx.name} and rerun scripts.tok_shards")
    if not files:
        others = [name for name, some in FORMATS.items()
                  if some != suffixes and any(file.name.endswith(some) for file in there)]
        hint = f"there are files of --data-format {' or '.join(others)}" if others else "is --data-path right?"
        raise FileNotFoundError(f"{path}: no {', '.join(suffixes)} file below it; {hint}")
    return sorted(files, key=lambda file: file.relative_to(path).as_posix())


def is_prefixes(path: Path | str) -> bool:
    """Whether a --data-path names pairs by their paths without .bin and .idx, with commas between them.
    ValueError, which says what to write, for Megatron's own list with a weight before each of them."""
    if place(path).exists():
        return False
    parts = str(path).split(",")
    if len(parts) % 2 == 0 and all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", part) for part in parts[::2]):
        raise ValueError(f"--data-path: got {path}, with weights among the prefixes; write --data-path="
                         f"{','.join(parts[1::2])} --order=megatron --blend-weights={','.join(parts[::2])}")
    return len(parts) > 1 or any(file.is_file() for file in _pair(path))


def _pair(prefix: Path | str) -> tuple[Path, Path]:
    return place(f"{place(prefix)}.bin"), place(f"{place(prefix)}.idx")


def _pair_at(prefix: str, data_format: str) -> Path:
    """The .bin of a prefix; ValueError or FileNotFoundError where it names no pair."""
    file, idx = _pair(prefix)
    if data_format == "text":
        raise ValueError(f"{prefix}: the path of a pair of token files, and --data-format is text; take "
                         f"--data-format shards or megatron, whichever they are, or name a folder of text")
    if not file.is_file() and not idx.is_file():
        raise FileNotFoundError(f"{prefix}: neither {file.name} nor {idx.name} is there; --data-path takes a "
                                f"folder, or paths without .bin and .idx with commas between them")
    return file


def data_folder(path: Path | str) -> Path:
    """What the names of files below a --data-path are relative to: itself, or the folder of a file or of
    prefixes."""
    path = place(path)
    if is_prefixes(path):
        folders = [place(prefix).parent for prefix in str(path).split(",")]
        if len({folder.parts[0] if in_store(folder) else "" for folder in folders}) > 1:
            raise ValueError(f"{path}: prefixes in several kinds of stores, or in a store and on this machine; "
                             f"the data of a run lie in one of them")
        return place(os.path.commonpath(folders))
    return path.parent if path.is_file() else path


def split_train_val(data_path: Path | str, val_path: Path | str | None = None, *, data_format: str = "text",
                    by_bucket: bool = False) -> dict[str, dict[str, list[Path]]]:
    """{"train": {bucket: files}, "val": {bucket: files}} of a data folder.

        DIR/train/BUCKET/..., DIR/val/BUCKET/...     as they lie; without `by_bucket` train is one bucket
        DIR/BUCKET/...                               with `by_bucket`: the last file of each bucket validates
        DIR/...                                      one bucket: the last of all files validates
        PREFIX,PREFIX                                with `by_bucket`: each is a bucket, else the same

    `val_path` names validation files in place of the last ones; each of its subfolders is a bucket of its
    own. ValueError or FileNotFoundError where files for one of the two are missing.
    """
    root = place(data_path)
    if pinned_dataset(root):
        list_parquet_files(root)  # insists on the validation shard of a known data set
    laid_out = (root / "train").is_dir()
    if laid_out and val_path is None:
        val_path = root / "val"
        if not val_path.is_dir():
            raise FileNotFoundError(f"{root}: it has train/ but no val/; name validation data with --val-path")
    train = find_buckets(root / "train" if laid_out else root, data_format, merge=not by_bucket)
    if val_path is not None:
        return {"train": train, "val": find_buckets(place(val_path), data_format)}
    val = {bucket: files[-1:] for bucket, files in train.items() if len(files) > 1}
    if not val:
        only = next(iter(train.values()))[0].name
        raise ValueError(f"{root}: one data file only ({only}){' in each bucket' * (len(train) > 1)}, expected "
                         f"at least two (the last one is validation); add one, or name validation data with "
                         f"--val-path")
    return {"train": {bucket: files[:-1] if bucket in val else files for bucket, files in train.items()},
            "val": val}


def find_buckets(path: Path, data_format: str = "text", *, merge: bool = False) -> dict[str, list[Path]]:
    """{bucket: files}: subfolders are buckets; files beside them, or all files with `merge`, are BUCKET. Of
    prefixes each is a bucket."""
    folder, prefixes = data_folder(path), is_prefixes(path)
    buckets: dict[str, list[Path]] = {}
    for file in find_files(path, data_format):
        name = file.relative_to(folder)
        if merge:
            bucket = BUCKET
        elif prefixes:
            bucket = name.with_suffix("").as_posix()
        else:
            bucket = name.parts[0] if len(name.parts) > 1 else BUCKET
        buckets.setdefault(bucket, []).append(file)
    return buckets


# ---- what text is ---------------------------------------------------------------------------------------------------

def open_parquet(path: Path | str) -> pq.ParquetFile:
    """Open a parquet file by its footer and check that it has rows and a string column `text`. ValueError or
    FileNotFoundError names the file if not. The caller closes it."""
    path, size = place(path), 0
    try:  # no pre_buffer: it would hold a whole row group's pages where a reader wants one batch
        size = path.stat().st_size
        file = pq.ParquetFile(path.open("rb") if in_store(path) else path, pre_buffer=False,
                              page_checksum_verification=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: the file is gone; bring it back, or start a new run "
                                f"(--model-tag)") from None
    except (pa.ArrowException, OSError) as e:
        _raise_of_store(path, e)
        raise ValueError(f"{path}: not a whole parquet file ({size:,} bytes; {e}); delete it and fetch or make "
                         f"it again") from e
    columns, problem = {f.name: f.type for f in file.schema_arrow}, ""
    if "text" not in columns:
        problem = f"no `text` column, it has {list(columns)}; rename the column that holds the documents"
    elif columns["text"] not in (pa.string(), pa.large_string()):
        problem = f"column `text` has type {columns['text']}, expected string; convert it"
    elif not file.metadata.num_rows:
        problem = "an empty parquet file (0 rows); delete it"
    if problem:
        file.close()
        raise ValueError(f"{path}: {problem}")
    return file


def read_footer(path: Path) -> tuple[bytes, list[int]]:
    """(raw footer, documents in each row group) of a parquet file of text. The footer holds offsets, sizes
    and statistics of every column chunk, so a file that was written anew does not keep it. Errors as of
    `open_parquet`, and a ValueError for nulls that the footer tells of."""
    with open_parquet(path) as file:
        metadata = file.metadata
    leaves = [metadata.schema.column(i).path for i in range(metadata.num_columns)]  # a struct has several
    counts = []
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        statistics = group.column(leaves.index("text")).statistics
        if statistics is not None and statistics.has_null_count and statistics.null_count:
            raise ValueError(_null_error(path, g, statistics.null_count))
        counts.append(group.num_rows)
    with path.open("rb") as f:
        size = f.seek(0, 2)
        f.seek(size - 8)
        f.seek(size - 8 - int.from_bytes(f.read(4), "little"))
        return f.read(), counts


def read_batches(file: pq.ParquetFile, group: int, path: Path | str, *, batch_size: int = GROUP_DOCUMENTS
                 ) -> Iterator[pa.Array]:
    """The texts of a row group, `batch_size` documents at a time, checked. ValueError names the file where
    pages are damaged, or a text is null, not UTF-8 or too large.

    At the end what was freed goes back to the system: Arrow's pool keeps what the largest group took, and
    glibc keeps the holes that units of many sizes leave (measured over 960 steps of 64 lanes: 158 MB and
    growing, instead of 130).
    """
    taken = 0
    try:
        for batch in file.iter_batches(batch_size, row_groups=[group], columns=["text"], use_threads=False):
            column = batch.column(0)
            _check_texts(column, group, path)
            taken += column.nbytes
            yield column
    except (pa.ArrowException, OSError) as e:
        _raise_of_store(path, e)
        raise ValueError(f"{path}: row group {group} cannot be read ({e}); fetch the file or make it again "
                         f"(python -m nanochat.dataset --verify reads all of a folder)") from e
    finally:
        if taken > LITTLE_TEXT:
            pa.default_memory_pool().release_unused()
            with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc here
                ctypes.CDLL(None).malloc_trim(0)


def _check_texts(column: pa.Array, group: int, path: Path | str) -> None:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as e:
        raise ValueError(f"{path}: a document of row group {group} is not UTF-8 ({e}); drop it, or write the "
                         f"data again with python -m dev.repackage_data_reference") from e
    if column.null_count:
        raise ValueError(_null_error(path, group, column.null_count))
    if column.nbytes > MAX_DOCUMENT_BYTES:
        longest = pc.max(pc.binary_length(column)).as_py()
        if longest > MAX_DOCUMENT_BYTES:
            raise ValueError(f"{path}: a document of row group {group} has {longest:,} bytes, expected at most "
                             f"{MAX_DOCUMENT_BYTES:,}; cut it into several")


def read_texts(path: Path | str) -> Iterator[str]:
    """All documents of a text file of any kind. Errors as of `as_parquet`, `open_parquet`, `read_batches`."""
    path = place(path)
    with open_parquet(as_parquet(path)) as file:
        for group in range(file.num_row_groups):
            for column in read_batches(file, group, path):
                yield from column.to_pylist()


def _null_error(path: Path | str, group: int, count: int) -> str:
    return (f"{path}: {count} null(s) in column `text` of row group {group}; drop those rows (python -m "
            f"dev.repackage_data_reference does) or fill them")


def _raise_of_store(path: Path | str, e: Exception) -> None:
    """What a store said (it names the object) is told as it is: the file is not to blame."""
    if in_store(path) and str(e).startswith(str(path)):
        raise e


# ---- jsonl ----------------------------------------------------------------------------------------------------------

class Line(NamedTuple):
    """A line of jsonl that is not blank."""

    number: int  # from 1
    text: str | None  # None for a broken one
    problem: str  # what is wrong with it; empty for a good one
    position: int  # bytes of the file read so far


MEND = "mend it, or leave out --strict to skip such lines"


def read_jsonl(path: Path, *, strict: bool = False) -> Iterator[Line]:
    """The lines of a .jsonl or .jsonl.gz file: a JSON object with a field `text` in each.

    A broken line (not UTF-8, not JSON, no text in it) is no reason to lose a file of millions: it is told
    with its number, or with `strict` ends the reading in a ValueError, which does not name the file. So do
    always a torn gzip file, which has lost nobody knows how many documents, and a line that is larger than
    any document.
    """
    number = 0
    zipped = path.name.endswith(".gz")
    with path.open("rb", buffering=1 << 20) as file, (gzip.open(file) if zipped else file) as lines:
        try:
            while line := lines.readline(MAX_DOCUMENT_BYTES + 1):
                number += 1
                if len(line) > MAX_DOCUMENT_BYTES:
                    raise ValueError(f"line {number:,} has more than {MAX_DOCUMENT_BYTES:,} bytes, the most "
                                     f"that is read; cut its document into several")
                if not line.strip():
                    continue
                try:
                    yield Line(number, _text_of(line), "", file.tell())
                except (ValueError, RecursionError) as e:
                    kind = "UTF-8" if isinstance(e, UnicodeError) else "JSON of a document"
                    problem = f"not {kind}: {e}"[:200]
                    if strict:
                        raise ValueError(f"line {number}: {problem}; {MEND}") from None
                    yield Line(number, None, problem, file.tell())
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            raise ValueError(f"not a whole gzip file, broken after line {number:,} ({e}); fetch it again") from e


def _text_of(line: bytes) -> str:
    value = json.loads(line.decode("utf-8-sig"))
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise ValueError("it is no object with a string in its field `text`")
    value["text"].encode()  # half a surrogate pair is no character
    return value["text"]


def as_parquet(path: Path, *, strict: bool = False) -> Path:
    """`path` itself, or the cached parquet made of a .jsonl or .jsonl.gz file (converted once for its size
    and time of change). Broken lines are told once a launch; with `strict` the first is a ValueError."""
    if not path.name.endswith((".jsonl", ".jsonl.gz")) or not path.exists():
        return path
    path = local(path)
    stat = path.stat()
    key = hash_json([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    folder = get_base_dir() / "converted" / key
    target = folder / f"{path.name.removesuffix('.gz').removesuffix('.jsonl')}.parquet"
    report = folder / "report.json"
    if not (target.exists() and report.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(report, {"source": str(path), "skipped": _convert(path, target, strict=strict)})
    if strict and (bad := read_json(report)["skipped"]):
        raise ValueError(f"{path}: line {bad[0][0]}: {bad[0][1]}; {MEND}")
    _tell_skipped(path, report)
    return target


def _convert(path: Path, target: Path, *, strict: bool) -> list[tuple[int, str]]:
    """Write the documents of a jsonl file as parquet; returns (number, what is wrong) of its broken lines."""
    bad: list[tuple[int, str]] = []

    def good_texts() -> Iterator[str]:
        lines = read_jsonl(path, strict=strict)
        for line in tqdm(lines, desc=f"converting {path.name}", unit=" lines", disable=None):
            if line.text is None:
                bad.append((line.number, line.problem))
            else:
                yield line.text

    schema, texts, num_documents = pa.schema([("text", pa.string())]), good_texts(), 0
    with atomic_open(target) as out, pq.ParquetWriter(out, schema, compression="zstd") as writer:
        try:
            while group := list(itertools.islice(texts, GROUP_DOCUMENTS)):
                writer.write_table(pa.table({"text": group}, schema=schema), row_group_size=GROUP_DOCUMENTS)
                num_documents += len(group)
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from e
        if not num_documents:
            why = f", line {bad[0][0]}: {bad[0][1]}" if bad else ""
            raise ValueError(f"{path}: no document in it ({len(bad)} broken line(s){why}); delete it or make it "
                             f"again")
    return bad


@functools.cache
def _tell_skipped(path: Path, report: Path) -> None:
    """Warn of a file's broken lines, once in a process."""
    bad = read_json(report)["skipped"]
    for number, why in bad[:10]:
        log.warning("%s: line %d skipped: %s", path, number, why)
    if bad:
        log.warning("%s: %d broken line(s) skipped in all; %s lists them", path, len(bad), report)


# ---- known data sets ------------------------------------------------------------------------------------------------

def index_to_filename(index: int) -> str:
    """The name of shard `index`."""
    return f"shard_{index:05d}.parquet"


@dataclass(frozen=True)
class Dataset:
    """A known data set: shards 0 to last_shard lie under base_url; the last one is validation."""

    name: str
    base_url: str
    last_shard: int

    @property
    def val_filename(self) -> str:
        return index_to_filename(self.last_shard)

    @property
    def data_dir(self) -> Path:
        return get_base_dir() / "data" / self.name


DEFAULT_DATASET = Dataset("climbmix", f"{HUB}/datasets/karpathy/climbmix-400b-shuffle/resolve/main", 6542)
FINEWEB_EDU = Dataset("fineweb-edu", f"{HUB}/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main", 1822)
DATASETS = {d.name: d for d in (DEFAULT_DATASET, FINEWEB_EDU)}


def pinned_dataset(data_dir: Path | str) -> Dataset | None:
    """The known data set that a folder holds, by the marker that the downloader left there or by its place;
    None for any other folder, in which simply the last file is validation."""
    folder = place(data_dir)
    if not (folder / MARKER).exists():
        return next((d for d in DATASETS.values() if d.data_dir.resolve() == folder.resolve()), None)
    name = read_json(local(folder / MARKER), {"name": str})["name"]
    if name not in DATASETS:
        raise ValueError(f"{folder / MARKER}: unknown data set {name[:80]!r}, expected {' or '.join(DATASETS)}")
    return DATASETS[name]


def list_parquet_files(data_dir: Path | str | None = None) -> list[str]:
    """Full paths of the parquet files below a folder (default: the default data set's) in the order of their
    relative paths; the last one is validation. FileNotFoundError where there is none, or where the folder
    holds a known data set without its validation shard; ValueError where that shard would not be the last."""
    root = place(data_dir) if data_dir is not None else DEFAULT_DATASET.data_dir
    files = [file for file in find_files(root) if file.suffix == ".parquet"]
    if not files:
        raise FileNotFoundError(f"{root}: no .parquet file below it; is this the right folder?")
    pinned = pinned_dataset(root)
    if pinned and root / pinned.val_filename not in files:
        raise FileNotFoundError(f"{root}: {pinned.name}'s validation shard {pinned.val_filename} is missing, "
                                f"{len(files)} other files are there; run `python -m nanochat.dataset --dataset "
                                f"{pinned.name} -n 8 --data-dir {root}`")
    if pinned and files[-1] != root / pinned.val_filename:
        raise ValueError(f"{root}: last file is {files[-1].relative_to(root)}, expected {pinned.name}'s "
                         f"validation shard {pinned.val_filename}; move what is not {pinned.name} elsewhere")
    return [str(file) for file in files]


def parquets_iter_batched(split: str, start: int = 0, step: int = 1, *,
                          data_dir: Path | str | None = None) -> Iterator[list[str]]:
    """Yield the texts of one row group after another: of all files but the last for "train", of the last for
    "val". Rank r of W passes start=r, step=W and gets row groups r, r + W, ... of each file."""
    if split not in ("train", "val"):
        raise ValueError(f"split: got {split!r}, expected 'train' or 'val'")
    paths = list_parquet_files(data_dir)
    if len(paths) < 2:
        raise ValueError(f"{paths[0]}: the only file here, expected at least 2 (the last one is validation); "
                         f"add one")
    for path in paths[:-1] if split == "train" else paths[-1:]:
        with open_parquet(path) as file:
            for group in range(start, file.num_row_groups, step):
                yield [text for column in read_batches(file, group, path) for text in column.to_pylist()]


# ---- downloads, behind a door: nobody who trains loads an HTTP library ----------------------------------------------

def download_single_file(index: int, **kwargs: Any) -> bool:
    """Fetch one shard of a known data set unless it is here (`download.download_single_file`); True when it
    is."""
    from nanochat import download

    return download.download_single_file(index, **kwargs)


def main(argv: Sequence[str] | None = None) -> None:
    """Download or verify (`download.main`)."""
    from nanochat import download

    download.main(argv)


if __name__ == "__main__":
    run_main(main)
