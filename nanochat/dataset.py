"""
Text on disk: which files are data, what a readable text file is, and the data sets that we know how to fetch.

    known data set --HTTP--> folder --find_files, split_train_val--> {"train": {bucket: files}, "val": ...}
                                          |
                       .parquet           |                 open_parquet, read_footer, read_batches
                       .jsonl, .jsonl.gz  +- as_parquet ->  converted once into a cache, then parquet

What trains and what validates follows from where a file lies, and its format from its suffix:

    DIR/train/web/a.bin  DIR/train/code/b.bin  DIR/val/web/c.bin      train: web [a], code [b];  val: web [c]
    DIR/web/a.bin  DIR/web/b.bin                                      train: web [a];            val: web [b]
    PREFIX,PREFIX                                                     paths of pairs without their endings, in order

Hidden files are never data. Any of these paths may lie in object storage.

A known data set is a run of parquet shards with a `text` column. Its last shard is validation and is pinned by name: it
is always fetched, and it is an error where it is missing. Taking "the last file that is here" instead would turn a
failed download into a silent change of every number computed on validation.

    python -m nanochat.dataset -n 8 -w 4      # 8 training shards and the validation shard, 4 at a time
    python -m nanochat.dataset --verify       # read everything that is on disk, name what is broken
"""

import contextlib
import ctypes
import fcntl
import functools
import gzip
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import requests
from requests.adapters import HTTPAdapter
from tqdm import tqdm
from urllib3.util import Retry

from nanochat.common import (
    atomic_open,
    fsync_dir,
    get_base_dir,
    hash_json,
    read_json,
    run_main,
    setup_logging,
    write_json,
)
from nanochat.places import local, place
from nanochat.remote import is_remote

log = logging.getLogger(__name__)

FORMATS = {  # suffixes of files by --data-format; the two kinds of .bin are told apart where they are opened
    "text": (".parquet", ".jsonl", ".jsonl.gz"),
    "shards": (".bin",),
    "megatron": (".bin",),
}
BUCKET = "data"  # the name of the bucket where there is only one
GROUP_DOCUMENTS = 1024  # documents in a row group of the parquet that we write
MAX_DOCUMENT_BYTES = 256 << 20  # a larger one is a mistake, or an attack on this machine's memory
LITTLE_TEXT = 1 << 18  # bytes of which the freed memory is not worth a call

HUB = "https://huggingface.co"
MARKER = "dataset.json"  # beside downloaded shards: which data set they are, hence which one must be the last
ATTEMPTS = 6  # requests without an answer, and bodies that break off
BACKOFF_S = 1.0  # the first pause between attempts; it doubles, up to a minute
TIMEOUT_S = 60.0  # of silence


# ---- which files are data -------------------------------------------------------------------------------------------

def find_files(path: Path | str, data_format: str = "text") -> list[Path]:
    """All files of a format below a folder in the order of their relative paths; a single file is itself. Of pairs
    also PREFIX[,PREFIX...], each a path without .bin or .idx, in the order given."""
    path, suffixes = place(path), FORMATS[data_format]
    if path.is_file():
        if not path.name.endswith(suffixes):
            raise ValueError(f"{path}: expected a folder or a {', '.join(suffixes)} file for --data-format "
                             f"{data_format}; rename it, or take another --data-format ({', '.join(FORMATS)})")
        return [path]
    if is_prefixes(path):
        return [_pair_at(prefix, data_format) for prefix in str(path).split(",")]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such data folder; download data with python -m nanochat.dataset, make "
                                f"some with python -m dev.make_sample_corpus, or point --data-path at yours")
    known = (".idx", *(suffix for some in FORMATS.values() for suffix in some))
    there = {file for file in path.rglob("*") if file.name.endswith(known) and file.is_file()
             and not any(part.startswith(".") for part in file.relative_to(path).parts)}
    files = [file for file in there if file.name.endswith(suffixes)]
    if data_format != "text":
        for idx in sorted(file for file in there if file.suffix == ".idx"):
            if idx.with_suffix(".bin") not in there:  # must not make the data silently less
                raise FileNotFoundError(f"{idx.with_suffix('.bin')}: not there, but {idx.name} needs it; bring it back, "
                                        f"or delete {idx.name} too")
    if not files:
        others = [name for name, some in FORMATS.items()
                  if some != suffixes and any(file.name.endswith(some) for file in there)]
        hint = f"there are files of --data-format {' or '.join(others)}" if others else "is --data-path right?"
        raise FileNotFoundError(f"{path}: no {', '.join(suffixes)} file below it; {hint}")
    return sorted(files, key=lambda file: file.relative_to(path).as_posix())


def is_prefixes(path: Path | str) -> bool:
    """Whether a --data-path names pairs by their paths without .bin and .idx, with commas between them."""
    return not place(path).exists() and ("," in str(path) or any(file.is_file() for file in _pair(path)))


def _pair(prefix: Path | str) -> tuple[Path, Path]:
    return place(f"{place(prefix)}.bin"), place(f"{place(prefix)}.idx")


def _pair_at(prefix: str, data_format: str) -> Path:
    """The .bin of a prefix; ValueError or FileNotFoundError where it names no pair."""
    file, idx = _pair(prefix)
    if data_format == "text":
        raise ValueError(f"{prefix}: the path of a pair of token files, and --data-format is text; take --data-format "
                         f"shards or megatron, whichever they are, or name a folder of text")
    if not file.is_file() and not idx.is_file():
        raise FileNotFoundError(f"{prefix}: neither {file.name} nor {idx.name} is there; --data-path takes a folder, "
                                f"or paths without .bin and .idx with commas between them")
    return file


def data_folder(path: Path | str) -> Path:
    """What the names of files below a --data-path are relative to: itself, or the folder of a file or of prefixes."""
    path = place(path)
    if is_prefixes(path):
        folders = [place(prefix).parent for prefix in str(path).split(",")]
        if len({folder.parts[0] if is_remote(folder) else "" for folder in folders}) > 1:
            raise ValueError(f"{path}: prefixes in several kinds of stores, or in a store and on this machine; the "
                             f"data of a run lie in one of them")
        return place(os.path.commonpath(folders))
    return path.parent if path.is_file() else path


def split_train_val(data_path: Path | str, val_path: Path | str | None = None, *, data_format: str = "text",
                    by_bucket: bool = False) -> dict[str, dict[str, list[Path]]]:
    """{"train": {bucket: files}, "val": {bucket: files}} of a data folder.

        DIR/train/BUCKET/..., DIR/val/BUCKET/...     as they lie; without `by_bucket` all of train is one bucket
        DIR/BUCKET/...                               with `by_bucket`: the last file of each bucket validates
        DIR/...                                      one bucket: the last of all files validates
        PREFIX,PREFIX                                with `by_bucket`: each is a bucket, else the same

    `val_path` names validation files in place of the last ones; each of its subfolders is a bucket of its own.
    ValueError or FileNotFoundError where files for one of the two are missing.
    """
    root = place(data_path)
    if pinned_dataset(root):
        list_parquet_files(root)  # insists on the validation shard of a known data set
    laid_out = (root / "train").is_dir()
    if laid_out and val_path is None:
        val_path = root / "val"
        if not val_path.is_dir():
            raise FileNotFoundError(f"{root}: it has train/ but no val/; name validation data with --val-path")
    train = _buckets(root / "train" if laid_out else root, data_format, merge=not by_bucket)
    if val_path is not None:
        return {"train": train, "val": _buckets(place(val_path), data_format)}
    val = {bucket: files[-1:] for bucket, files in train.items() if len(files) > 1}
    if not val:
        only = next(iter(train.values()))[0].name
        raise ValueError(f"{root}: one data file only ({only}){' in each bucket' * (len(train) > 1)}, expected at "
                         f"least two (the last one is validation); add one, or name validation data with --val-path")
    return {"train": {bucket: files[:-1] if bucket in val else files for bucket, files in train.items()}, "val": val}


def _buckets(path: Path, data_format: str, *, merge: bool = False) -> dict[str, list[Path]]:
    """{bucket: files}: subfolders are buckets; files beside them, or all files with `merge`, are BUCKET. Of prefixes
    each is a bucket."""
    folder, prefixes = data_folder(path), is_prefixes(path)
    buckets: dict[str, list[Path]] = {}
    for file in find_files(path, data_format):
        name = file.relative_to(folder)
        if prefixes:
            bucket = name.with_suffix("").as_posix()
        else:
            bucket = name.parts[0] if len(name.parts) > 1 else BUCKET
        buckets.setdefault(BUCKET if merge else bucket, []).append(file)
    return buckets


# ---- what text is ---------------------------------------------------------------------------------------------------

def open_parquet(path: Path | str) -> pq.ParquetFile:
    """Open a parquet file by its footer and check that it has rows and a string column `text`. ValueError or
    FileNotFoundError names the file if not. The caller closes it."""
    path = place(path)
    size = 0
    try:  # no pre_buffer: it would hold a whole row group's pages where a reader wants one batch
        size = path.stat().st_size
        file = pq.ParquetFile(path.open("rb") if is_remote(path) else path, pre_buffer=False,
                              page_checksum_verification=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: the file is gone; bring it back, or start a new run (--model-tag)") from None
    except (pa.ArrowException, OSError) as e:
        _raise_of_store(path, e)
        raise ValueError(f"{path}: not a whole parquet file ({size:,} bytes; {e}); delete it and fetch or make it again"
                         ) from e
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
    """(raw footer, documents in each row group) of a parquet file of text. The footer holds offsets, sizes and
    statistics of every column chunk, so a file that was written anew does not keep it. Errors as of `open_parquet`, and
    a ValueError for nulls that the footer tells of."""
    with open_parquet(path) as file:
        metadata = file.metadata
    leaves = [metadata.schema.column(i).path for i in range(metadata.num_columns)]  # a struct has several
    column = leaves.index("text")
    counts = []
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        statistics = group.column(column).statistics
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
    """The texts of a row group, `batch_size` documents at a time, checked. ValueError names the file where pages are
    damaged, or a text is null, not UTF-8 or too large.

    At the end what was freed goes back to the system: Arrow's pool keeps what the largest group took, and glibc keeps
    the holes that units of many sizes leave (measured over 960 steps of 64 lanes: 158 MB and growing, instead of 130).
    """
    taken = 0
    try:
        for batch in file.iter_batches(batch_size, row_groups=[group], columns=["text"], use_threads=False):
            column = batch.column(0)
            column.validate(full=True)
            if column.null_count:
                raise ValueError(_null_error(path, group, column.null_count))
            if column.nbytes > MAX_DOCUMENT_BYTES and pc.max(pc.binary_length(column)).as_py() > MAX_DOCUMENT_BYTES:
                raise ValueError(f"{path}: a document of row group {group} has more than {MAX_DOCUMENT_BYTES:,} bytes, "
                                 f"the most that is read; cut it into several")
            taken += column.nbytes
            yield column
    except (pa.ArrowException, OSError) as e:
        _raise_of_store(path, e)
        raise ValueError(f"{path}: row group {group} cannot be read ({e}); fetch the file or make it again (python -m "
                         f"nanochat.dataset --verify reads all of a folder)") from e
    finally:
        if taken > LITTLE_TEXT:
            pa.default_memory_pool().release_unused()
            with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc here
                ctypes.CDLL(None).malloc_trim(0)


def read_texts(path: Path | str) -> Iterator[str]:
    """All documents of a text file of any kind. Errors as of `open_parquet`, `read_batches` and `as_parquet`."""
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
    if is_remote(path) and str(e).startswith(str(path)):
        raise e


# ---- jsonl ----------------------------------------------------------------------------------------------------------

class Line(NamedTuple):
    """A line of jsonl that is not blank."""

    number: int  # from 1
    text: str | None  # None for a broken one
    problem: str  # what is wrong with it; empty for a good one
    position: int  # bytes of the file read so far


def read_jsonl(path: Path, *, strict: bool = False) -> Iterator[Line]:
    """The lines of a .jsonl or .jsonl.gz file: a JSON object with a field `text` in each.

    A broken line (not UTF-8, not JSON, no text in it) is no reason to lose a file of millions: it is told with its
    number, or with `strict` ends the reading in a ValueError, which does not name the file. So do always a torn gzip
    file, which has lost nobody knows how many documents, and a line that is larger than any document.
    """
    number = 0
    zipped = path.name.endswith(".gz")
    with path.open("rb", buffering=1 << 20) as file, (gzip.open(file) if zipped else file) as lines:
        try:
            while line := lines.readline(MAX_DOCUMENT_BYTES + 1):
                number += 1
                if len(line) > MAX_DOCUMENT_BYTES:
                    raise ValueError(f"line {number:,} has more than {MAX_DOCUMENT_BYTES:,} bytes, the most that is "
                                     f"read; cut its document into several")
                text, problem = _parse(line, number)
                if problem and strict:
                    raise ValueError(f"line {number}: {problem}; {MEND}")
                if problem or text is not None:
                    yield Line(number, text, problem, file.tell())
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            raise ValueError(f"not a whole gzip file, broken after line {number:,} ({e}); fetch it again") from e


MEND = "mend it, or leave out --strict to skip such lines"


def _parse(line: bytes, number: int) -> tuple[str | None, str]:
    """(text, ""), or (None, what is wrong with the line; "" if it is blank)."""
    try:
        decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
        if not decoded.strip():
            return None, ""
        text = json.loads(decoded)["text"]
        if not isinstance(text, str):
            return None, f"`text` is {type(text).__name__}, expected a string"
        text.encode()
    except KeyError:
        return None, "no field `text`"
    except TypeError:
        return None, "not a JSON object"
    except UnicodeDecodeError as e:
        return None, f"not UTF-8 ({e.reason} at its byte {e.start:,})"
    except UnicodeEncodeError:
        return None, "`text` has half a surrogate pair, which is no character"
    except (ValueError, RecursionError) as e:
        return None, f"not JSON: {e}"[:200]
    return text, ""


def as_parquet(path: Path, *, strict: bool = False) -> Path:
    """`path` itself, or the cached parquet made of a .jsonl or .jsonl.gz file (converted once for its size and time of
    change). Broken lines are told once a launch; with `strict` the first is a ValueError."""
    if not path.name.endswith((".jsonl", ".jsonl.gz")) or not path.exists():
        return path
    path = local(path)
    stat = path.stat()
    folder = get_base_dir() / "converted" / hash_json([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
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
    texts: list[str] = []
    num_documents = 0
    schema = pa.schema([("text", pa.string())])
    with atomic_open(target) as out, pq.ParquetWriter(out, schema, compression="zstd") as writer:

        def write() -> None:
            writer.write_table(pa.table({"text": texts}, schema=schema), row_group_size=GROUP_DOCUMENTS)
            texts.clear()

        try:
            for line in tqdm(read_jsonl(path, strict=strict), desc=f"converting {path.name}", unit=" lines", disable=None):
                if line.text is None:
                    bad.append((line.number, line.problem))
                    continue
                texts.append(line.text)
                num_documents += 1
                if len(texts) == GROUP_DOCUMENTS:
                    write()
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from e
        if texts:
            write()
        if not num_documents:
            why = f", line {bad[0][0]}: {bad[0][1]}" if bad else ""
            raise ValueError(f"{path}: no document in it ({len(bad)} broken line(s){why}); delete it or make it again")
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
    """The known data set that a folder holds, by the marker that the downloader left there or by its place; None for
    any other folder, in which simply the last file is validation."""
    marker = place(data_dir) / MARKER
    if not marker.exists():
        return next((d for d in DATASETS.values() if d.data_dir.resolve() == place(data_dir).resolve()), None)
    saved = read_json(local(marker))
    name = saved.get("name") if isinstance(saved, dict) else saved
    if not isinstance(name, str) or name not in DATASETS:
        raise ValueError(f"{marker}: unknown data set {str(name)[:80]!r}, expected one of {', '.join(DATASETS)}")
    return DATASETS[name]


def list_parquet_files(data_dir: Path | str | None = None) -> list[str]:
    """Full paths of the parquet files below a folder (default: the default data set's) in the order of their relative
    paths; the last one is validation. FileNotFoundError where there is none, or where the folder holds a known data
    set without its validation shard; ValueError where that shard would not be the last."""
    root = place(data_dir) if data_dir is not None else DEFAULT_DATASET.data_dir
    pinned = pinned_dataset(root)
    try:
        files = [file for file in find_files(root) if file.name.endswith(".parquet")]
    except FileNotFoundError:
        if pinned is None:
            raise
        files = []
    if pinned is None:
        if not files:
            raise FileNotFoundError(f"{root}: no parquet files below it; is this the right folder?")
        return [str(file) for file in files]
    again = f"run `python -m nanochat.dataset --dataset {pinned.name} -n 8 --data-dir {root}`"
    if root / pinned.val_filename not in files:
        raise FileNotFoundError(f"{root}: {pinned.name}'s validation shard {pinned.val_filename} is missing, "
                                f"{len(files)} other files are there; {again}")
    if files[-1] != root / pinned.val_filename:
        raise ValueError(f"{root}: last file is {files[-1].relative_to(root)}, expected {pinned.name}'s validation "
                         f"shard {pinned.val_filename}; move what is not {pinned.name} elsewhere")
    return [str(file) for file in files]


def parquets_iter_batched(split: str, start: int = 0, step: int = 1, *,
                          data_dir: Path | str | None = None) -> Iterator[list[str]]:
    """Yield the texts of one row group after another: of all files but the last for "train", of the last for "val".
    Rank r of W passes start=r, step=W and gets row groups r, r + W, ... of each file."""
    if split not in ("train", "val"):
        raise ValueError(f"split: got {split!r}, expected 'train' or 'val'")
    paths = list_parquet_files(data_dir)
    if len(paths) < 2:
        raise ValueError(f"{paths[0]}: the only file here, expected at least 2 (the last one is validation); add one")
    for path in paths[:-1] if split == "train" else paths[-1:]:
        with open_parquet(path) as file:
            for group in range(start, file.num_row_groups, step):
                yield [text for column in read_batches(file, group, path) for text in column.to_pylist()]


# ---- downloads ------------------------------------------------------------------------------------------------------

class DownloadError(OSError):
    """A shard could not be fetched; the message says from where, why, and what to do."""


HINTS = {401: "set HF_TOKEN", 403: "set HF_TOKEN", 404: "check --dataset, --base-url and HF_ENDPOINT"}


@dataclass(frozen=True)
class Downloader:
    """Where shards come from and go to; `make_downloader` fills it from the command line and the environment."""

    base_url: str
    data_dir: Path
    token: str = field(default="", repr=False)  # for that server alone: requests drops it when it is sent elsewhere
    stop: threading.Event = field(default_factory=threading.Event)

    def fetch(self, index: int) -> Path:
        """Bring shard `index` here unless it is. Raises DownloadError, or OSError for the disk's troubles, and then
        leaves nothing under the final name."""
        final = self.data_dir / index_to_filename(index)
        part, url = Path(f"{final}.part"), f"{self.base_url}/{final.name}"
        if final.exists():
            return final
        for attempt in range(ATTEMPTS):
            try:
                self._copy(url, part)
                break
            except requests.RequestException as e:  # the body broke off
                problem = e
            if self.stop.wait(min(60.0, BACKOFF_S * 2**attempt)):
                raise DownloadError(f"{url}: interrupted")
        else:
            raise DownloadError(f"{url}: gave up after {ATTEMPTS} attempts; the last: {problem}")
        try:
            open_parquet(part).close()
        except ValueError as e:
            part.unlink()
            raise DownloadError(f"{url}: it arrived in full and is no good: {e}") from e
        os.replace(part, final)
        fsync_dir(self.data_dir)
        return final

    def _copy(self, url: str, part: Path) -> None:
        """Copy what lies at `url`. What urllib3 cannot mend by asking again, because no answer came or a final one, is
        a DownloadError; a body that breaks off is a RequestException."""
        retry = Retry(total=ATTEMPTS - 1, backoff_factor=BACKOFF_S, backoff_max=60, allowed_methods=("GET",),
                      status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False)
        with requests.Session() as session:
            session.mount("http://", HTTPAdapter(max_retries=retry))
            session.mount("https://", HTTPAdapter(max_retries=retry))
            if self.token:
                session.auth = _Bearer(self.token)
            try:
                response = session.get(url, stream=True, timeout=TIMEOUT_S)
            except requests.RequestException as e:
                raise DownloadError(f"{url}: no answer ({e}); check the network, --base-url and HF_ENDPOINT") from e
            with response, open(part, "wb") as f:
                if response.status_code != 200:
                    hint = HINTS.get(response.status_code, "try again later")
                    raise DownloadError(f"{url}: got HTTP {response.status_code} {response.reason}; {hint}")
                for block in response.iter_content(1 << 20):
                    if self.stop.is_set():
                        raise DownloadError(f"{url}: interrupted")
                    f.write(block)
                f.flush()
                os.fsync(f.fileno())


class _Bearer(requests.auth.AuthBase):
    """Sends a token. As an auth object, because a plain header would lose against an entry in ~/.netrc."""

    def __init__(self, token: str):
        self.token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self.token}"
        return request


def make_downloader(dataset: Dataset, *, base_url: str | None = None, data_dir: Path | None = None) -> Downloader:
    """A Downloader that honours HF_ENDPOINT (stands in for the hub) and HF_TOKEN (for that endpoint only); makes the
    folder and notes there which data set it holds. ValueError where one of these is unusable or the folder holds
    another data set."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB
    url = (base_url or dataset.base_url).rstrip("/")
    url = endpoint + url.removeprefix(HUB) if url.startswith(HUB + "/") else url
    for flag, value in (("HF_ENDPOINT", endpoint), ("--base-url", url)):
        if urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).netloc:
            raise ValueError(f"{flag}: got {value!r}, expected a URL such as {HUB}")
    token = os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch(r"[!-~]*", token):  # caught here, for the HTTP library's own complaint would print it
        raise ValueError("HF_TOKEN: has characters that a header cannot carry; set it again")
    data_dir = data_dir or dataset.data_dir
    data_dir.mkdir(parents=True, exist_ok=True)
    there = pinned_dataset(data_dir) or dataset
    if there != dataset:
        raise ValueError(f"{data_dir}: holds {there.name}, got --dataset {dataset.name}; use another --data-dir")
    write_json(data_dir / MARKER, {"name": dataset.name, "validation": dataset.val_filename})
    return Downloader(url, data_dir, token if urlsplit(url)[:2] == urlsplit(endpoint)[:2] else "")


def download_single_file(index: int, *, dataset: Dataset = DEFAULT_DATASET, base_url: str | None = None,
                         data_dir: Path | None = None) -> bool:
    """Fetch one shard of a known data set unless it is here; True when it is. The reason for a False is logged."""
    try:
        make_downloader(dataset, base_url=base_url, data_dir=data_dir).fetch(index)
    except OSError as e:
        log.error("%s: %s", index_to_filename(index), e)
        return False
    return True


def download(job: Downloader, indices: Sequence[int], *, num_workers: int) -> dict[str, str]:
    """Fetch shards in parallel under one progress bar; waits while another process does so in the same folder.
    Returns {file name: reason} of those that failed."""
    failed: dict[str, str] = {}
    with (open(job.data_dir / ".lock", "w") as lock, ThreadPoolExecutor(num_workers) as pool,
          tqdm(total=len(indices), unit="shard", disable=None) as bar):
        fcntl.flock(lock, fcntl.LOCK_EX)
        futures = {pool.submit(job.fetch, i): index_to_filename(i) for i in indices}
        try:
            for future in as_completed(futures):
                try:
                    future.result()
                except (OSError, ValueError) as e:
                    failed[futures[future]] = str(e)
                bar.update()
        except BaseException:
            job.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return dict(sorted(failed.items()))


def verify(data_dir: Path, *, num_workers: int) -> dict[str, str]:
    """Read every page of every shard in a folder. Returns {file name: what is wrong, or ''}."""

    def problem_of(path: str) -> str:
        try:
            for _ in read_texts(path):
                pass
        except (ValueError, OSError) as e:
            return str(e)
        return ""

    paths = list_parquet_files(data_dir)
    with ThreadPoolExecutor(num_workers) as pool:
        found = tqdm(pool.map(problem_of, paths), total=len(paths), unit="shard", disable=None)
        return dict(zip(paths, found, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Download or verify. Raises ValueError for bad flags and OSError that lists what failed."""
    parser = argparse.ArgumentParser(description="Download the shards of a data set, or check those that are here.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("-n", "--num-files", type=int, default=-1, help="training shards, from the first on; -1 = all")
    parser.add_argument("-w", "--num-workers", type=int, default=4, help="shards at a time")
    parser.add_argument("--dataset", choices=DATASETS, default=DEFAULT_DATASET.name, help="which data set")
    parser.add_argument("--base-url", help="fetch the shards from here instead")
    parser.add_argument("--data-dir", type=Path, help="folder to use instead of $NANOCHAT_BASE_DIR/data/DATASET")
    parser.add_argument("--verify", action="store_true", help="download nothing; read all that is here")
    args = parser.parse_args(argv)
    setup_logging()
    if args.num_files < -1 or args.num_workers < 1:
        raise ValueError(f"got -n {args.num_files} -w {args.num_workers}, expected -n of at least -1 (all), -w of at "
                         f"least 1")
    dataset = DATASETS[args.dataset]
    if args.verify:
        found = verify(args.data_dir or dataset.data_dir, num_workers=args.num_workers)
        failed, total = {name: why for name, why in found.items() if why}, len(found)
        way_out = "Delete them and run this again without --verify."
    else:
        job = make_downloader(dataset, base_url=args.base_url, data_dir=args.data_dir)
        num_train = dataset.last_shard if args.num_files == -1 else min(args.num_files, dataset.last_shard)
        indices = [dataset.last_shard, *range(num_train)]  # validation first: nothing works without it
        print(f"{dataset.name}: {num_train} training shards and {dataset.val_filename} for validation "
              f"-> {job.data_dir}")
        failed, total = download(job, indices, num_workers=args.num_workers), len(indices)
        way_out = "What has arrived is kept: run the same command again to go on."
    if failed:
        lines = "".join(f"  {name}: {why}\n" for name, why in failed.items())
        raise OSError(f"{len(failed)} of {total} shards failed:\n{lines}{way_out}")
    print(f"{total} shards are whole" if args.verify else f"{job.data_dir}: {total} shards are here")


if __name__ == "__main__":
    run_main(main)
