"""
What a readable text file is: parquet with a column `text`, or another kind, which is converted once
into a cached parquet.

    .parquet                         read where it lies: open_parquet, read_footer, read_batches
    .jsonl, .jsonl.gz, .jsonl.zst    {"text": ...} a line, broken lines told and passed over
    .txt                             a file is a document
    .arrow                           of a data set that Hugging Face's `datasets` saved
                                     as_parquet: converts these three once (nanochat/text_kinds.py)

The column, or the field of a line, may have another name (--text-field); `a.b` is the field `b` of
`a`. A cached parquet has one column, with the name that was asked for. Every command that reads
text reads it here, so all take the same files and say the same of bad ones.

`Reading` says which documents of a file are read. --val-fraction=f makes training and validation
data of each file: of its documents, counted from 0, number i validates where floor((i + 1) f) is
more than floor(i f), so with 0.01 every hundredth. A .txt, which is one document, is cut at the
first line that begins after 1 - f of its characters. --min-chars=N leaves out shorter documents,
after that. A parquet file of which not all documents are read is converted, too.
"""

import contextlib
import ctypes
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nanochat.common import as_path, is_remote

log = logging.getLogger(__name__)

CONVERTED = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt", ".arrow")
SUFFIXES = (".parquet", *CONVERTED)
TEXT_FIELD = "text"
TEXT_BYTES = b"text_bytes"  # metadata of parquet that we convert: UTF-8 bytes of all its texts
FIELD_HELP = "column of parquet, field of jsonl that holds the text; a.b: b inside a"
MIN_CHARS_HELP = "leave out documents of fewer characters"
STRICT_HELP = "a broken line of jsonl is an error"
VAL_FRACTION_HELP = "share of each file's documents that validates, in place of the last file"
MAX_DOCUMENT_BYTES = 256 << 20  # a larger one is a mistake, or an attack on this machine's memory
LITTLE_TEXT = 1 << 18  # bytes of which the freed memory is not worth a call
NULLS = "{}: {} null(s) in column `{}` of row group {}; drop those rows or fill them"


@dataclass(frozen=True)
class Reading:
    """Which documents of text files are read, and from which field. ValueError for what cannot be."""

    text_field: str = TEXT_FIELD
    min_chars: int = 0  # shorter documents are left out
    val_fraction: float = 0.0  # of the documents of a file; 0: it is not shared out
    part: str = ""  # "train" or "val", where it is
    strict: bool = field(default=False, compare=False)  # whether a broken line is an error; changes no document

    def __post_init__(self) -> None:
        if self.min_chars < 0:
            raise ValueError(f"--min-chars {self.min_chars}: expected 0 or more")
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"--val-fraction {self.val_fraction}: expected a share from 0 to below 1")

    @classmethod
    def of(cls, values: Mapping[str, Any], part: str = "") -> "Reading":
        """What flags, settings or a manifest say; `part` counts where files are shared out."""
        found = cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
        return replace(found, part=part) if part and found.val_fraction else found

    def named(self) -> dict[str, Any]:
        """What is not as usual, for manifests."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare and getattr(self, f.name) != f.default}

    def hashed(self) -> list[Any]:
        """`named` for fingerprints: nothing where all is as usual."""
        rest = self.named()
        field = rest.pop("text_field", None)
        return [*([field] if field else []), *([rest] if rest else [])]

    @property
    def selects(self) -> bool:
        """Whether some documents of a file are not read."""
        return self.min_chars > 0 or self.part != ""


ALL = Reading()


# ---- parquet -------------------------------------------------------------------------------------

@contextlib.contextmanager
def told_of(path: Path | str, problem: str) -> Iterator[None]:
    """Turn what Arrow says of a damaged file into a ValueError with the name of the file. What a
    store said (it names the object) is told as it is: the file is not to blame."""
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as e:  # the last two: of damaged sizes, names
        if is_remote(path) and str(e).startswith(str(path)):
            raise
        raise ValueError(f"{path}: {problem} ({e}); delete it and fetch or make it again (python -m "
                         f"nanochat.dataset --verify reads all of a folder)") from e


def open_parquet(path: Path | str, field: str = TEXT_FIELD) -> pq.ParquetFile:
    """Open a parquet file by its footer and check that it has rows and a string column `field`.
    ValueError or FileNotFoundError names the file if not. The caller closes it."""
    path = as_path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: the file is gone; bring it back, or start a new run (--model-tag)")
    with told_of(path, "not a whole parquet file"):
        # no pre_buffer: it would hold a whole row group's pages where a reader wants one batch
        file = pq.ParquetFile(path.open("rb") if is_remote(path) else path, pre_buffer=False,
                              page_checksum_verification=True)
    problem = misfit(file.schema_arrow, field)
    if not problem and not file.metadata.num_rows:
        problem = "an empty parquet file (0 rows); delete it"
    if problem:
        file.close()
        raise ValueError(f"{path}: {problem}")
    return file


def flat(table: pa.Table) -> pa.Table:
    """A table in which the fields of a struct `a` are columns `a.b`, `a.c`."""
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    return table


def misfit(schema: pa.Schema, field: str) -> str:
    """Why a table has no column of texts `field`; "" if it has."""
    names = flat(schema.empty_table()).schema.names
    if names.count(field) > 1:
        return f"{names.count(field)} columns named `{field}`, so it is unclear which holds the documents; rename one"
    columns = {f.name: f.type for f in flat(schema.empty_table()).schema}
    if field not in columns:
        return (f"no `{field}` column, it has {list(columns)}; name the one that holds the documents with "
                f"--text-field")
    if columns[field] not in (pa.string(), pa.large_string()):
        return f"column `{field}` has type {columns[field]}, expected string; convert it"
    return ""


def checked(column: pa.Array, path: Path | str, field: str, group: int) -> pa.Array:
    """The texts of a column, which may be those of a struct's field. ValueError for a null and for
    a text that is too large; ArrowException for one that is not UTF-8."""
    column.validate(full=True)
    if column.null_count:
        raise ValueError(NULLS.format(path, column.null_count, field, group))
    longest = pc.max(pc.binary_length(column)).as_py() or 0
    if longest > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{path}: a document of row group {group} has {longest:,} bytes, "
                         f"expected at most {MAX_DOCUMENT_BYTES:,}; cut it into several")
    return column


def read_footer(path: Path, field: str = TEXT_FIELD) -> tuple[bytes, list[int], int]:
    """(raw footer, documents in each row group, bytes of all texts before compression) of a parquet
    file of text. The footer holds offsets, sizes and statistics of every column chunk, so a rewritten
    file does not keep it. A file that we converted states the bytes of its texts itself. Errors are those
    of `open_parquet`, and a ValueError for nulls that the footer counts."""
    with open_parquet(path, field) as file:
        metadata = file.metadata
    # by its number among the leaves, of which a struct in front of it has several
    text = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(field)
    counts, text_bytes = [], 0
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        counts.append(group.num_rows)
        text_bytes += group.column(text).total_uncompressed_size
        statistics = group.column(text).statistics
        if statistics is not None and statistics.has_null_count and statistics.null_count:
            raise ValueError(NULLS.format(path, statistics.null_count, field, g))
    with path.open("rb") as f:
        f.seek(-8 - metadata.serialized_size, 2)  # behind it: its length, and PAR1
        return f.read(), counts, int((metadata.metadata or {}).get(TEXT_BYTES, text_bytes))


def text_tokens(text_bytes: int, documents: int) -> int:
    """About how many tokens texts have: one for each 4 bytes, and a BOS for each document."""
    return text_bytes // 4 + documents


def is_blank(path: Path, field: str = TEXT_FIELD) -> bool:
    """Whether all documents of a parquet file are empty. Statistics in its footer say so, or else its texts are read
    up to the first that is not empty."""
    with open_parquet(path, field) as file:
        schema = file.metadata.schema
        text = [schema.column(i).path for i in range(len(schema))].index(field)
        for g in range(file.num_row_groups):
            statistics = file.metadata.row_group(g).column(text).statistics
            if statistics is not None and statistics.has_min_max:
                blank = not statistics.max_raw
            else:
                blank = not any(pc.any(pc.not_equal(column, "")).as_py()
                                for column in read_batches(file, g, path, field=field))
            if not blank:
                return False
    return True


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
        with told_of(path, f"row group {group} cannot be read, or a document in it is not UTF-8"):
            for batch in file.iter_batches(batch_size, row_groups=[group], columns=[field], use_threads=False):
                [column] = flat(pa.Table.from_batches([batch]))[field].chunks
                column = checked(column, path, field, group)
                taken += column.nbytes
                yield column
    finally:
        if taken > LITTLE_TEXT:
            pa.default_memory_pool().release_unused()
            with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc here
                ctypes.CDLL(None).malloc_trim(0)


# ---- any kind ------------------------------------------------------------------------------------

def as_parquet(path: Path, reading: Reading = ALL) -> Path:
    """`path` itself, or the cached parquet made of a file of another kind, or of which not all
    documents are read; see `nanochat.text_kinds.converted`."""
    if not (path.name.endswith(CONVERTED) or reading.selects) or not path.exists():
        return path
    from nanochat.text_kinds import converted

    return converted(path, reading)
