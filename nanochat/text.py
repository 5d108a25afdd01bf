"""
What a readable text file is: parquet with a column `text`, or jsonl, which is converted once into
a cached parquet.

    .parquet               open_parquet, read_footer: the footer, checked       read_batches: documents, checked
    .jsonl, .jsonl.gz      as_parquet: {"text": ...} a line, converted once, broken lines told and passed over
                           read_texts: the documents of either kind

Every command that reads text reads it here, so all take the same files and say the same of bad
ones.
"""

import contextlib
import ctypes
import functools
import gzip
import itertools
import json
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from nanochat.common import atomic_open, get_base_dir, hash_json, in_store, local, place, read_json, write_json

log = logging.getLogger(__name__)

GROUP_DOCUMENTS = 1024  # documents in a row group of the parquet that we write
MAX_DOCUMENT_BYTES = 256 << 20  # a larger one is a mistake, or an attack on this machine's memory
LITTLE_TEXT = 1 << 18  # bytes of which the freed memory is not worth a call


# ---- parquet -------------------------------------------------------------------------------------

def open_parquet(path: Path | str) -> pq.ParquetFile:
    """Open a parquet file by its footer and check that it has rows and a string column `text`.
    ValueError or FileNotFoundError names the file if not. The caller closes it."""
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
        raise ValueError(f"{path}: not a whole parquet file ({size:,} bytes; {e}); delete it and "
                         f"fetch or make it again") from e
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
    """(raw footer, documents in each row group) of a parquet file of text. The footer holds
    offsets, sizes and statistics of every column chunk, so a file that was written anew does not
    keep it. Errors as of `open_parquet`, and a ValueError for nulls that the footer tells of."""
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
    """The texts of a row group, `batch_size` documents at a time, checked. ValueError names the
    file where pages are damaged, or a text is null, not UTF-8 or too large.

    At the end what was freed goes back to the system: Arrow's pool keeps what the largest group
    took, and glibc keeps the holes that units of many sizes leave (measured over 960 steps of 64
    lanes: 158 MB and growing, instead of 130).
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
        raise ValueError(f"{path}: row group {group} cannot be read ({e}); fetch the file or make "
                         f"it again (python -m nanochat.dataset --verify reads all of a folder)") from e
    finally:
        if taken > LITTLE_TEXT:
            pa.default_memory_pool().release_unused()
            with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc here
                ctypes.CDLL(None).malloc_trim(0)


def _check_texts(column: pa.Array, group: int, path: Path | str) -> None:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as e:
        raise ValueError(f"{path}: a document of row group {group} is not UTF-8 ({e}); drop it, "
                         f"or write the data again with python -m dev.repackage_data_reference") from e
    if column.null_count:
        raise ValueError(_null_error(path, group, column.null_count))
    if column.nbytes > MAX_DOCUMENT_BYTES:
        longest = pc.max(pc.binary_length(column)).as_py()
        if longest > MAX_DOCUMENT_BYTES:
            raise ValueError(f"{path}: a document of row group {group} has {longest:,} bytes, "
                             f"expected at most {MAX_DOCUMENT_BYTES:,}; cut it into several")


def read_texts(path: Path | str) -> Iterator[str]:
    """All documents of a text file of any kind. Errors as of `as_parquet`, `open_parquet`,
    `read_batches`."""
    path = place(path)
    with open_parquet(as_parquet(path)) as file:
        for group in range(file.num_row_groups):
            for column in read_batches(file, group, path):
                yield from column.to_pylist()


def _null_error(path: Path | str, group: int, count: int) -> str:
    return (f"{path}: {count} null(s) in column `text` of row group {group}; drop those rows "
            f"(python -m dev.repackage_data_reference does) or fill them")


def _raise_of_store(path: Path | str, e: Exception) -> None:
    """What a store said (it names the object) is told as it is: the file is not to blame."""
    if in_store(path) and str(e).startswith(str(path)):
        raise e


# ---- jsonl ---------------------------------------------------------------------------------------

class Line(NamedTuple):
    """A line of jsonl that is not blank."""

    number: int  # from 1
    text: str | None  # None for a broken one
    problem: str  # what is wrong with it; empty for a good one
    position: int  # bytes of the file read so far


MEND = "mend it, or leave out --strict to skip such lines"


def read_jsonl(path: Path, *, strict: bool = False) -> Iterator[Line]:
    """The lines of a .jsonl or .jsonl.gz file: a JSON object with a field `text` in each.

    A broken line (not UTF-8, not JSON, no text in it) is no reason to lose a file of millions: it
    is told with its number, or with `strict` ends the reading in a ValueError, which does not name
    the file. So do always a torn gzip file, which has lost nobody knows how many documents, and a
    line that is larger than any document.
    """
    number = 0
    zipped = path.name.endswith(".gz")
    with path.open("rb", buffering=1 << 20) as file, (gzip.open(file) if zipped else file) as lines:
        try:
            while line := lines.readline(MAX_DOCUMENT_BYTES + 1):
                number += 1
                if len(line) > MAX_DOCUMENT_BYTES:
                    raise ValueError(f"line {number:,} has more than {MAX_DOCUMENT_BYTES:,} "
                                     f"bytes, the most that is read; cut its document into several")
                if not line.strip():
                    continue
                try:
                    value = json.loads(line.decode("utf-8-sig"))
                    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                        raise ValueError("it is no object with a string in its field `text`")
                    value["text"].encode()  # half a surrogate pair is no character
                    yield Line(number, value["text"], "", file.tell())
                except (ValueError, RecursionError) as e:
                    kind = "UTF-8" if isinstance(e, UnicodeError) else "JSON of a document"
                    problem = f"not {kind}: {e}"[:200]
                    if strict:
                        raise ValueError(f"line {number}: {problem}; {MEND}") from None
                    yield Line(number, None, problem, file.tell())
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            raise ValueError(f"not a whole gzip file, broken after line {number:,} ({e}); fetch "
                             f"it again") from e


def as_parquet(path: Path, *, strict: bool = False) -> Path:
    """`path` itself, or the cached parquet made of a .jsonl or .jsonl.gz file (converted once for
    its size and time of change). Broken lines are told once a launch; with `strict` the first is a
    ValueError."""
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
    """Write the documents of a jsonl file as parquet; returns (number, what is wrong) of its
    broken lines."""
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
            raise ValueError(f"{path}: no document in it ({len(bad)} broken line(s)"
                             f"{f', line {bad[0][0]}: {bad[0][1]}' if bad else ''}); delete it or make it again")
    return bad


@functools.cache
def _tell_skipped(path: Path, report: Path) -> None:
    """Warn of a file's broken lines, once in a process."""
    bad = read_json(report)["skipped"]
    for number, why in bad[:10]:
        log.warning("%s: line %d skipped: %s", path, number, why)
    if bad:
        log.warning("%s: %d broken line(s) skipped in all; %s lists them", path, len(bad), report)
