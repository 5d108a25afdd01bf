"""
Text files: which of their documents are read, and how parquet is read.

    .parquet                         read in place: open_parquet, read_footer, read_batches
    .jsonl, .jsonl.gz, .jsonl.zst    one {"text": ...} per line; broken lines are skipped with a warning. Also .ndjson,
                                     and .json if it has one object per line
    .txt, .txt.gz, .txt.zst          one document per file
    .arrow                           a data set that Hugging Face's `datasets` saved

A run reads only parquet: the other kinds are prepared once (nanochat/prepare.py).

--text-field names a column or field other than `text`; `a.b` is the field `b` of `a`. Every command
that reads text uses this module, so all commands accept the same files and report the same errors.

**Selection.** `Selection` decides which documents of a file are read. With --val-fraction=f each
file has training and validation data: document number i (from 0) is used for validation if floor((i
+ 1) f) exceeds floor(i f): with 0.01, every hundredth one. A .txt file is one document, cut at the
first line that begins after 1 - f of its characters. Then --min-chars=N skips documents with fewer
characters. Parquet is prepared, too, if a selection skips documents, or if it has nulls.
"""

import argparse
import contextlib
import ctypes
import functools
import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypedDict, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from nanochat.cli import Decides, setting
from nanochat.common import (
    AnyPath,
    Remote,
    as_path,
    counted,
    each,
    get_base_dir,
    get_dist_info,
    parse_json,
)

log = logging.getLogger(__name__)

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt", ".arrow")
# of JSON with one object per line, under all the names that it has
JSON_LINES = tuple(
    kind + packed for kind in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst")
)
# of files that are one document each
PLAIN_TEXT = (".txt", ".txt.gz", ".txt.zst")
TEXT_FIELD = "text"
# metadata keys in parquet that we write: total UTF-8 bytes of its texts, and its `Origin`
TEXT_BYTES, ORIGIN = b"text_bytes", b"prepared_from"
MAX_DOCUMENT_BYTES = 256 << 20  # a larger document is a mistake, or meant to exhaust memory
# more than an empty document takes in a parquet file, even with a page of its own
EMPTY_BYTES = 200
FOOTERS_AT_ONCE = 64  # requests; each waits for the network, not for this machine
LITTLE_TEXT = 1 << 18  # bytes; returning less than this to the system is not worth a call
NULLS = "{}: {} in column `{}` of row group {}; delete or fill these rows"


def text_suffix(name: str) -> str:
    """The suffix of a text file in lower case, such as .jsonl.gz. "" for another kind of file."""
    name = name.lower()
    return next(
        (suffix for suffix in (*SUFFIXES, *JSON_LINES, *PLAIN_TEXT) if name.endswith(suffix)), ""
    )


@functools.cache
def warn_once(line: str) -> None:
    """Warn, once per process, on rank 0."""
    if get_dist_info()[1] == 0:
        log.warning("%s", line)


# ---- which documents are read --------------------------------------------------------------------


@dataclass(frozen=True)
class TextSettings:
    """which documents to read from text files"""

    text_field: str = setting(
        TEXT_FIELD,
        "parquet column or jsonl field that holds the text; a.b: field b of a",
        metavar="NAME",
        decides=Decides.ROWS,
    )
    min_chars: int = setting(
        0, "skip documents with fewer characters", metavar="N", decides=Decides.ROWS
    )
    val_fraction: float = setting(
        0.0,
        "share of each file's documents to use for validation, instead of the last file",
        metavar="F",
        decides=Decides.ROWS,
    )
    strict: bool = setting(False, "stop at a broken jsonl line or a null instead of skipping it")


def add_text_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add flags for some fields of `TextSettings` to a script's parser. `Selection.of(vars(args))`
    reads them."""
    for f in fields(TextSettings):
        if f.name in names:
            kind: Any = (
                {"action": "store_true"}
                if f.default is False
                else {
                    "type": type(f.default),
                    "default": f.default,
                    "metavar": f.metadata["metavar"],
                }
            )
            parser.add_argument("--" + f.name.replace("_", "-"), help=f.metadata["help"], **kind)


class Numbered(NamedTuple):
    """A document, and the line of its file at which it begins, from 1. In a table, a line is a
    row."""

    line: int
    text: str


class Skipped(TypedDict, total=False):
    """What was skipped in a file, as reports store it."""

    count: int  # broken lines
    lines: list[tuple[int, str]]  # the first of them: (number, problem)
    short: int  # documents with too few characters
    nulls: int  # in a column


class Selected(TypedDict, total=False):
    """The values of a `Selection` that are not defaults."""

    text_field: str
    min_chars: int
    val_fraction: float
    part: str


@dataclass(frozen=True)
class Selection(TextSettings):
    """Which documents of text files are read, and from which field. ValueError for impossible
    values."""

    part: str = ""  # "train" or "val" if each file is divided between the two (--val-fraction)

    def __post_init__(self) -> None:
        if self.min_chars < 0:
            raise ValueError(f"--min-chars: got {self.min_chars}, expected 0 or more")
        if not 0 <= self.val_fraction < 1:
            raise ValueError(
                f"--val-fraction: got {self.val_fraction}, expected 0 or more, and below 1"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Selection":
        """The selection that flags, settings or a manifest describe."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def for_split(self, split: str) -> "Selection":
        """The selection of the documents of a split, "train" or "val"."""
        return replace(self, part=split) if self.val_fraction else self

    def named(self) -> Selected:
        """The values that are not defaults, as manifests store them. `strict` is not stored,
        because it selects nothing."""
        values: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "strict" and value != f.default:
                values[f.name] = value
        return cast("Selected", values)

    def hashed(self) -> list[Any]:
        """The values of `named` for fingerprints: empty if all are defaults."""
        rest = self.named()
        field = rest.pop("text_field", "")
        return [*([field] if field else []), *([rest] if rest else [])]

    @property
    def skips_some(self) -> bool:
        """Whether the selection may skip documents."""
        return self.min_chars > 0 or self.part != ""

    def documents(self, documents: Iterable[Numbered], skipped: Skipped) -> Iterator[Numbered]:
        """The selected documents among all `documents` of a file; skipped["short"] counts those
        with too few characters."""
        for number, (line, text) in enumerate(documents):
            validates = math.floor((number + 1) * self.val_fraction) > math.floor(
                number * self.val_fraction
            )
            if self.part and validates != (self.part == "val"):
                continue
            if len(text) >= self.min_chars:
                yield Numbered(line, text)
            else:
                skipped["short"] += 1

    def of_one_document(self, text: str, skipped: Skipped) -> Iterator[Numbered]:
        """The selected part of a file that is a single document, cut at the start of a line if one
        follows."""
        at = math.ceil(len(text) * (1 - self.val_fraction))
        if next_line := text.find("\n", at) + 1:
            this_line = text.rfind("\n", 0, at) + 1
            # a single line is cut inside
            at = next_line if text[next_line:].strip() else this_line or at
        parts = {
            "train": Numbered(1, text[:at]),
            "val": Numbered(1 + text.count("\n", 0, at), text[at:]),
            "": Numbered(1, text),
        }
        return replace(self, part="").documents([parts[self.part]], skipped)


ALL = Selection()


# ---- parquet -------------------------------------------------------------------------------------


def prepared_dir() -> Path:
    """The folder of text that nanochat/prepare.py has prepared."""
    return get_base_dir() / "prepared"


@contextlib.contextmanager
def named_in_errors(path: AnyPath | str, problem: str) -> Iterator[None]:
    """Turn Arrow's error about a damaged file into a ValueError that names the file. An error that
    begins with the path is not changed: it is from object storage, and the file is not at fault."""
    try:
        yield
    # MemoryError and UnicodeDecodeError: a corrupt size, or name; the last two: Python's reader of
    # .gz
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError, EOFError, zlib.error) as e:
        if str(e).startswith(str(path)):
            raise
        if "requires too much memory" in str(e):
            raise ValueError(
                f"{path}: it was compressed with a window above 128 MiB (zstd --long), which cannot be "
                f"read; compress it again: zstd -d --long=31 -c FILE | zstd -o NEW"
            ) from e
        raise ValueError(
            f"{path}: {problem} ({e}); delete the file and download or create it again (python -m nanochat.dataset "
            f"--verify checks all files of a folder; the next launch prepares its own files again)"
        ) from e


def for_arrow(path: AnyPath) -> Path | BinaryIO:
    """A file as Arrow reads it: a local file by its name, because then no read holds Python's lock.
    Without a buffer, each read of a remote file is the whole column of a row group."""
    return path.open("rb", buffering=0) if isinstance(path, Remote) else path


def kept_metadata(path: AnyPath) -> pq.FileMetaData | None:
    """The metadata of a remote parquet file whose footer is kept on this machine. ArrowException if
    it is corrupt."""
    footer = path.footer() if isinstance(path, Remote) else None
    if footer is None:
        return None
    return pq.read_metadata(pa.BufferReader(footer[-4:] + footer))  # a file begins as it ends


def read_metadata(path: AnyPath) -> pq.FileMetaData:
    """The metadata of a parquet file. ArrowException if it is corrupt."""
    kept = kept_metadata(path)
    return pq.read_metadata(for_arrow(path)) if kept is None else kept


def fetch_footers(paths: Sequence[AnyPath]) -> None:
    """Fetch the footers of remote parquet files, many at once, under a progress bar. They stay on
    this machine if their storage keeps them."""
    remote = [path for path in paths if isinstance(path, Remote) and path.suffix == ".parquet"]
    footers = each(lambda path: path.footer(), remote, at_once=FOOTERS_AT_ONCE)
    bar = tqdm(footers, "reading footers", len(remote), unit=" files", delay=1, disable=None)
    for _ in bar:
        pass


def open_parquet(
    path: AnyPath | str, field: str = TEXT_FIELD, metadata: pq.FileMetaData | None = None
) -> pq.ParquetFile:
    """Open a parquet file and check that it has rows and a string column `field`; otherwise
    ValueError or FileNotFoundError names the file. The caller closes it. `metadata`: its footer, if
    it is known; parsing it takes time for each row group."""
    path = as_path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: the file is gone; restore it, or start a new run (--model-tag); if it is below prepared/, the "
            f"next launch prepares it again"
        )
    with named_in_errors(path, "truncated or not a parquet file"):
        if metadata is None:
            metadata = kept_metadata(path)
        # pre_buffer would hold the pages of a whole row group in memory, although a reader needs
        # one batch at a time
        file = pq.ParquetFile(
            for_arrow(path),
            metadata=metadata,
            pre_buffer=False,
            page_checksum_verification=True,
        )
    problem = column_problem(file.schema_arrow, field)
    if not problem and not file.metadata.num_rows:
        problem = "the parquet file is empty (0 rows); delete it"
    if problem:
        file.close()
        raise ValueError(f"{path}: {problem}")
    return file


def flatten_structs(table: pa.Table) -> pa.Table:
    """The table with the fields of each struct `a` as columns `a.b`, `a.c`."""
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    return table


def column_problem(schema: pa.Schema, field: str) -> str:
    """The problem if a table does not have exactly one string column `field`; otherwise ""."""
    columns = flatten_structs(schema.empty_table()).schema
    count = columns.names.count(field)
    if count > 1:
        return f"{count} columns named `{field}`, so it is unclear which holds the documents; rename one"
    if not count:
        return f"no `{field}` column, only {columns.names}; name the one that holds the documents with --text-field"
    if columns.field(field).type not in (pa.string(), pa.large_string()):
        return f"column `{field}` has type {columns.field(field).type}, expected string; convert it"
    return ""


def checked(
    column: pa.Array,
    path: AnyPath | str,
    field: str,
    group: int,
    skipped: Skipped | None = None,
) -> pa.Array:
    """A column of texts, after checks. ValueError for a null or a text that is too large,
    ArrowException for a text that is not UTF-8. With `skipped`, nulls stay in the column, and
    skipped["nulls"] counts them."""
    column.validate(full=True)
    if column.null_count and skipped is not None:
        skipped["nulls"] = skipped.get("nulls", 0) + column.null_count
    elif column.null_count:
        raise ValueError(NULLS.format(path, counted(column.null_count, "null"), field, group))
    longest = pc.max(pc.binary_length(column)).as_py() or 0
    if longest > MAX_DOCUMENT_BYTES:
        raise ValueError(
            f"{path}: a document in row group {group} has {longest:,} bytes, "
            f"expected at most {MAX_DOCUMENT_BYTES:,}; split it into several"
        )
    return column


class Origin(NamedTuple):
    """The user's own file that a parquet file was prepared from: its size in bytes, and a hash of
    them."""

    size: int
    hash: str


class Footer(NamedTuple):
    """The footer of a parquet file of text: its bytes, the documents of each row group, the bytes
    of all texts before compression, the nulls among the documents (None if the statistics of a row
    group do not say it), and what it was prepared from."""

    raw: bytes
    counts: list[int]
    text_bytes: int
    nulls: int | None
    origin: Origin | None


def read_footer(path: AnyPath, field: str = TEXT_FIELD) -> Footer:
    """The footer of a parquet file of text. Files prepared by nanochat record the number of bytes,
    and what they were made from, in their metadata. Raises the errors of `open_parquet`."""
    with open_parquet(path, field) as file:
        metadata = file.metadata
    text = leaf_column(metadata, field)
    counts = list[int]()
    text_bytes = 0
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        column = group.column(text)
        counts.append(group.num_rows)
        text_bytes += column.total_uncompressed_size
    recorded = metadata.metadata or {}
    origin = None
    if recorded.keys() >= {ORIGIN, TEXT_BYTES}:  # one alone is another program's
        text_bytes = parse_json(recorded[TEXT_BYTES], f"{path}: {TEXT_BYTES.decode()}", int)
        shape = {"size": int, "hash": str}
        origin = Origin(**parse_json(recorded[ORIGIN], f"{path}: {ORIGIN.decode()}", shape))
    raw = path.footer() if isinstance(path, Remote) else None
    if raw is None:
        with path.open("rb") as f:
            f.seek(-8 - metadata.serialized_size, 2)  # its length and PAR1 follow the footer
            raw = f.read()
    return Footer(raw, counts, text_bytes, counted_nulls(metadata, field), origin)


def counted_nulls(metadata: pq.FileMetaData, field: str) -> int | None:
    """The number of nulls in a column of a file; None if its footer does not say it."""
    text = leaf_column(metadata, field)
    if metadata.schema.column(text).max_definition_level == 0:
        return 0
    nulls = 0
    for g in range(metadata.num_row_groups):
        statistics = metadata.row_group(g).column(text).statistics
        if statistics is None or not statistics.has_null_count:
            return None
        nulls += statistics.null_count
    return nulls


def leaf_column(metadata: pq.FileMetaData, field: str) -> int:
    """The index of a column among all leaf columns (a struct before it adds several)."""
    return [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(field)


def column_range(metadata: pq.FileMetaData, group: int, field: str) -> tuple[int, int]:
    """(first byte, end) of a column of a row group, as Arrow reads it."""
    column = metadata.row_group(group).column(leaf_column(metadata, field))
    begin = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < begin:
        begin = column.dictionary_page_offset
    return begin, begin + column.total_compressed_size


def text_tokens(text_bytes: int, documents: int) -> int:
    """The estimated number of tokens in texts: one per 4 bytes, plus a BOS per document."""
    return text_bytes // 4 + documents


def is_blank(path: AnyPath, field: str = TEXT_FIELD) -> bool:
    """Whether all documents of a parquet file are empty, by the sizes and statistics in its footer.
    If these do not tell, the texts are read up to the first one that is not empty."""
    with open_parquet(path, field) as file:
        text = leaf_column(file.metadata, field)
        for g in range(file.num_row_groups):
            column = file.metadata.row_group(g).column(text)
            statistics = column.statistics
            if column.total_uncompressed_size > EMPTY_BYTES * (column.num_values + 1000):
                blank = False  # without reading pages of books
            elif statistics is not None and statistics.has_min_max:
                blank = not statistics.max_raw
            else:
                blank = not any(
                    pc.any(pc.not_equal(texts, "")).as_py()
                    for texts in read_batches(file, g, path, field=field)
                )
            if not blank:
                return False
    return True


def is_uncounted(file: pq.ParquetFile, path: AnyPath | str, field: str) -> bool:
    """Whether a file with nulls does not say in its footer how many there are: nanochat's own files
    do not, and counting would read them whole. Warns, once per process."""
    if counted_nulls(file.metadata, field) is not None:
        return False
    _warn_of_nulls(path, field)
    return True


@functools.cache
def _warn_of_nulls(path: AnyPath | str, field: str) -> None:
    log.warning("%s: nulls in column `%s` are read as empty texts", path, field)


def read_batches(
    file: pq.ParquetFile,
    group: int,
    path: AnyPath | str,
    *,
    batch_size: int = 256,
    field: str = TEXT_FIELD,
    skipped: Skipped | None = None,
    strict: bool = False,
) -> Iterator[pa.Array]:
    """The texts of a row group, `batch_size` documents at a time, after checks. ValueError names
    the file if pages are corrupt, or if a text is too large, not UTF-8 or null. But nulls stay if
    `skipped` counts them (see `checked`), and are empty texts if the footer does not say how many
    there are, except if `strict`.

    At the end, freed memory is returned to the system. Otherwise Arrow's pool would keep the memory
    of the largest group, and units of many sizes would fragment glibc's heap (after 960 steps of 64
    lanes: 158 MB and growing, instead of 130).
    """
    num_bytes = 0
    try:
        with named_in_errors(
            path, f"row group {group} cannot be read, or a document in it is not UTF-8"
        ):
            for batch in file.iter_batches(
                batch_size, row_groups=[group], columns=[field], use_threads=False
            ):
                [column] = flatten_structs(pa.Table.from_batches([batch]))[field].chunks
                may_fill = skipped is None and not strict
                if column.null_count and may_fill and is_uncounted(file, path, field):
                    column = column.fill_null("")
                column = checked(column, path, field, group, skipped)
                num_bytes += column.nbytes
                yield column
    finally:
        if num_bytes > LITTLE_TEXT:
            pa.default_memory_pool().release_unused()
            with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
                ctypes.CDLL(None).malloc_trim(0)
