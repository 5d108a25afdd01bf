"""
What a readable text file is: parquet with a column `text`, or another kind, which is converted once
into a cached parquet.

    .parquet                         read where it lies: open_parquet, read_footer, read_batches
    .jsonl, .jsonl.gz, .jsonl.zst    {"text": ...} a line, broken lines told and passed over
    .txt                             a file is a document
                                     as_parquet: converts these two once
    read_lines, read_texts           the documents of any kind

The column, or the field of a line, may have another name (--text-field); `a.b` is the field `b` of
`a`. A cached parquet has one column, with the name that was asked for. Every command that reads
text reads it here, so all take the same files and say the same of bad ones.
"""

import argparse
import contextlib
import ctypes
import functools
import io
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from nanochat.common import atomic_open, get_base_dir, hash_json, in_store, local, place, read_json, write_json

log = logging.getLogger(__name__)

CONVERTED = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")
SUFFIXES = (".parquet", *CONVERTED)
CODECS = {".gz": "gzip", ".zst": "zstd"}
TEXT_FIELD = "text"
FIELD_HELP = "column of parquet, field of jsonl that holds the text; a.b: b inside a"
GROUP_DOCUMENTS = 1024  # documents in a row group of the parquet that we write
MAX_DOCUMENT_BYTES = 256 << 20  # a larger one is a mistake, or an attack on this machine's memory
LITTLE_TEXT = 1 << 18  # bytes of which the freed memory is not worth a call
NULLS = ("{}: {} null(s) in column `{}` of row group {}; drop those rows (python -m "
         "dev.repackage_data_reference does) or fill them")
MEND = "mend it, or leave out --strict to skip such lines"


def add_text_field(parser: argparse.ArgumentParser) -> None:
    """Give the parser of a script that reads text the flag --text-field."""
    parser.add_argument("--text-field", default=TEXT_FIELD, metavar="NAME", help=FIELD_HELP)


# ---- parquet -------------------------------------------------------------------------------------

@contextlib.contextmanager
def _told_of(path: Path | str, problem: str) -> Iterator[None]:
    """Turn what Arrow says of a damaged file into a ValueError with the name of the file. What a
    store said (it names the object) is told as it is: the file is not to blame."""
    try:
        yield
    except (pa.ArrowException, OSError) as e:
        if in_store(path) and str(e).startswith(str(path)):
            raise
        raise ValueError(f"{path}: {problem} ({e}); delete it and fetch or make it again (python -m "
                         f"nanochat.dataset --verify reads all of a folder)") from e


def open_parquet(path: Path | str, field: str = TEXT_FIELD) -> pq.ParquetFile:
    """Open a parquet file by its footer and check that it has rows and a string column `field`.
    ValueError or FileNotFoundError names the file if not. The caller closes it."""
    path = place(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: the file is gone; bring it back, or start a new run (--model-tag)")
    with _told_of(path, "not a whole parquet file"):
        # no pre_buffer: it would hold a whole row group's pages where a reader wants one batch
        file = pq.ParquetFile(path.open("rb") if in_store(path) else path, pre_buffer=False,
                              page_checksum_verification=True)
    table = file.schema_arrow.empty_table()
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()  # the fields of a struct `a` become columns `a.b`, `a.c`
    columns, problem = {f.name: f.type for f in table.schema}, ""
    if field not in columns:
        problem = (f"no `{field}` column, it has {list(columns)}; name the one that holds the documents with "
                   f"--text-field")
    elif columns[field] not in (pa.string(), pa.large_string()):
        problem = f"column `{field}` has type {columns[field]}, expected string; convert it"
    elif not file.metadata.num_rows:
        problem = "an empty parquet file (0 rows); delete it"
    if problem:
        file.close()
        raise ValueError(f"{path}: {problem}")
    return file


def read_footer(path: Path, field: str = TEXT_FIELD) -> tuple[bytes, list[int]]:
    """(raw footer, documents in each row group) of a parquet file of text. The footer holds
    offsets, sizes and statistics of every column chunk, so a file that was written anew does not
    keep it. Errors as of `open_parquet`, and a ValueError for nulls that the footer tells of."""
    with open_parquet(path, field) as file:
        metadata = file.metadata
    # by its number among the leaves, of which a struct in front of it has several
    text = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(field)
    counts = []
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        counts.append(group.num_rows)
        statistics = group.column(text).statistics
        if statistics is not None and statistics.has_null_count and statistics.null_count:
            raise ValueError(NULLS.format(path, statistics.null_count, field, g))
    with path.open("rb") as f:
        size = f.seek(0, 2)
        f.seek(size - 8)
        f.seek(size - 8 - int.from_bytes(f.read(4), "little"))
        return f.read(), counts


def read_batches(file: pq.ParquetFile, group: int, path: Path | str, *, batch_size: int = 256,
                 field: str = TEXT_FIELD) -> Iterator[pa.Array]:
    """The texts of a row group, `batch_size` documents at a time, checked. ValueError names the
    file where pages are damaged, or a text is null, not UTF-8 or too large.

    At the end what was freed goes back to the system: Arrow's pool keeps what the largest group
    took, and glibc keeps the holes that units of many sizes leave (measured over 960 steps of 64
    lanes: 158 MB and growing, instead of 130).
    """
    taken = 0
    try:
        with _told_of(path, f"row group {group} cannot be read, or a document in it is not UTF-8"):
            for batch in file.iter_batches(batch_size, row_groups=[group], columns=[field], use_threads=False):
                column = batch.column(0)
                while isinstance(column, pa.StructArray):  # of which only this field was read
                    [column] = column.flatten()
                column.validate(full=True)
                if column.null_count:
                    raise ValueError(NULLS.format(path, column.null_count, field, group))
                longest = pc.max(pc.binary_length(column)).as_py() or 0
                if longest > MAX_DOCUMENT_BYTES:
                    raise ValueError(f"{path}: a document of row group {group} has {longest:,} bytes, "
                                     f"expected at most {MAX_DOCUMENT_BYTES:,}; cut it into several")
                taken += column.nbytes
                yield column
    finally:
        if taken > LITTLE_TEXT:
            pa.default_memory_pool().release_unused()
            with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc here
                ctypes.CDLL(None).malloc_trim(0)


# ---- the other kinds, and any kind ---------------------------------------------------------------

class Line(NamedTuple):
    """A document, or a line of jsonl that should be one."""

    number: int  # of the line, from 1; of a parquet file's rows, from 0
    text: str | None  # None for a broken line
    problem: str = ""  # what is wrong with it


def read_lines(path: Path, field: str = TEXT_FIELD, *, strict: bool = False) -> Iterator[Line]:
    """The documents of a text file of any kind. ValueError names the file and what is wrong.

    A broken line of jsonl (not UTF-8, not JSON, no text in it) is no reason to lose a file of
    millions: it is told with its number, or with `strict` ends the reading. A torn compressed file,
    which has lost nobody knows how many documents, and a line that is larger than any document
    always do, and so does a .txt file that is too large or not UTF-8.
    """
    if path.name.endswith(".txt"):
        yield Line(1, _read_txt(path))
        return
    if path.name.endswith(CONVERTED):
        yield from _read_jsonl(path, field, strict)
        return
    with open_parquet(path, field) as file:
        columns = (read_batches(file, group, path, field=field) for group in range(file.num_row_groups))
        texts = (text for column in itertools.chain.from_iterable(columns) for text in column.to_pylist())
        yield from itertools.starmap(Line, enumerate(texts))


def read_texts(path: Path | str, field: str = TEXT_FIELD) -> Iterator[str]:
    """The texts of a text file of any kind, without broken lines, which are told (`as_parquet`)."""
    lines = read_lines(as_parquet(place(path), field), field)
    yield from (line.text for line in lines if line.text is not None)


def _read_txt(path: Path) -> str:
    """The document that a .txt file is."""
    with path.open("rb") as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{path}: a document of more than {MAX_DOCUMENT_BYTES:,} bytes, the most that is "
                         f"read; cut it into several")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 ({e}); convert it (iconv does), or take it away") from e


def _read_jsonl(path: Path, field: str, strict: bool) -> Iterator[Line]:
    """The lines of a .jsonl file that are not blank; it may be compressed."""
    number, codec = 0, CODECS.get(path.suffix)
    with contextlib.ExitStack() as files:
        lines: Any = files.enter_context(path.open("rb", buffering=1 << 20))
        if codec:
            lines = files.enter_context(io.BufferedReader(pa.CompressedInputStream(lines, codec), 1 << 20))
        try:
            while line := lines.readline(MAX_DOCUMENT_BYTES + 1):
                number += 1
                if len(line) > MAX_DOCUMENT_BYTES:
                    raise ValueError(f"{path}: line {number:,} has more than {MAX_DOCUMENT_BYTES:,} "
                                     f"bytes, the most that is read; cut its document into several")
                if not line.strip():
                    continue
                try:
                    value = json.loads(line.decode("utf-8-sig"))
                    for name in field.split("."):
                        value = value.get(name) if isinstance(value, dict) else None
                    if not isinstance(value, str):
                        raise ValueError(f"it is no object with a string in its field `{field}` "
                                         f"(--text-field names another)")
                    value.encode()  # half a surrogate pair is no character
                    yield Line(number, value)
                except (ValueError, RecursionError) as e:
                    kind = "UTF-8" if isinstance(e, UnicodeError) else "JSON of a document"
                    problem = f"not {kind}: {e}"[:200]
                    if strict:
                        raise ValueError(f"{path}: line {number}: {problem}; {MEND}") from None
                    yield Line(number, None, problem)
        except OSError as e:
            if codec is None or (in_store(path) and str(e).startswith(str(path))):  # the file is not to blame
                raise
            raise ValueError(f"{path}: not a whole {codec} file, broken after line {number:,} ({e}); "
                             f"fetch it again") from e


def as_parquet(path: Path, field: str = TEXT_FIELD, *, strict: bool = False) -> Path:
    """`path` itself, or the cached parquet made of a file of another kind (converted once for its
    size, time of change and `field`). Broken lines are told once a launch; with `strict` the first
    is a ValueError."""
    if not path.name.endswith(CONVERTED) or not path.exists():
        return path
    path = local(path)
    stat = path.stat()
    key = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, *([field] if field != TEXT_FIELD else [])]
    folder = get_base_dir() / "converted" / hash_json(key)
    target, report = folder / "text.parquet", folder / "report.json"
    if not (target.exists() and report.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(report, {"source": str(path), "skipped": _convert(path, target, field, strict)})
    if strict and (bad := read_json(report)["skipped"]):
        raise ValueError(f"{path}: line {bad[0][0]}: {bad[0][1]}; {MEND}")
    _tell_skipped(path, report)
    return target


def _convert(path: Path, target: Path, field: str, strict: bool) -> list[tuple[int, str]]:
    """Write the documents of a file as parquet; returns (number, what is wrong) of its
    broken lines."""
    bad: list[tuple[int, str]] = []

    def good_texts() -> Iterator[str]:
        lines = read_lines(path, field, strict=strict)
        for line in tqdm(lines, desc=f"converting {path.name}", unit=" documents", delay=1, disable=None):
            if line.text is None:
                bad.append((line.number, line.problem))
            else:
                yield line.text

    schema, texts, num_documents = pa.schema([(field, pa.string())]), good_texts(), 0
    with atomic_open(target) as out, pq.ParquetWriter(out, schema, compression="zstd") as writer:
        while group := list(itertools.islice(texts, GROUP_DOCUMENTS)):
            writer.write_table(pa.table({field: group}, schema=schema), row_group_size=GROUP_DOCUMENTS)
            num_documents += len(group)
        if not num_documents:
            why = f"; line {bad[0][0]}: {bad[0][1]}" if bad else ""
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
