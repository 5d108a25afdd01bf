"""
Text files: which documents of them are read, and how parquet is read.

    .parquet                         read in place: open_parquet, read_footer, read_batches
    .jsonl, .jsonl.gz, .jsonl.zst    one {"text": ...} per line; broken lines are skipped with a warning
    .txt                             one document per file
    .arrow                           a data set that Hugging Face's `datasets` saved
                                     as_parquet converts these three once (nanochat/text_kinds.py)

The column, or the field of a line, may have another name (--text-field); `a.b` is the field `b` of
`a`. A cached parquet file has one column, under the name that was asked for. Every command that reads
text does it through this module, so all commands accept the same files and report the same errors.

**Selection.** Everything that decides which documents of a file are read is in `Selection`. With
--val-fraction=f each file gives training and validation data: document number i (from 0) validates if
floor((i + 1) f) exceeds floor(i f), so every hundredth one with 0.01. A .txt file, which is one
document, is cut at the first line that begins after 1 - f of its characters. After that, --min-chars=N
skips shorter documents. A parquet file is converted, too, if some of its documents are not read.
"""

import argparse
import contextlib
import ctypes
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nanochat.cli import setting
from nanochat.common import as_path, is_remote

log = logging.getLogger(__name__)

CONVERTED = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt", ".arrow")
SUFFIXES = (".parquet", *CONVERTED)
TEXT_FIELD = "text"
TEXT_BYTES = b"text_bytes"  # metadata of parquet that we convert: UTF-8 bytes of all its texts
MAX_DOCUMENT_BYTES = 256 << 20  # a larger one is a mistake, or an attack on this machine's memory
LITTLE_TEXT = 1 << 18  # bytes; returning less freed memory to the system is not worth a call
NULLS = "{}: {} null(s) in column `{}` of row group {}; drop those rows or fill them"
FIXED = "decides which tokens come in which order"  # why a run keeps its value


# ---- which documents are read --------------------------------------------------------------------

@dataclass(frozen=True)
class TextSettings:
    """which documents of text files are read"""

    text_field: str = setting(TEXT_FIELD, "column of parquet, field of jsonl that holds the text; a.b: b inside a",
                              metavar="NAME", fixed=FIXED)
    min_chars: int = setting(0, "skip documents of fewer characters", metavar="N", fixed=FIXED)
    val_fraction: float = setting(0.0, "share of each file's documents that validates, instead of the last file",
                                  metavar="F", fixed=FIXED)
    strict: bool = setting(False, "a broken line of jsonl is an error")


def add_text_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Give a script's parser the flags of some fields of `TextSettings`. `Selection.of(vars(args))` reads them."""
    for f in fields(TextSettings):
        if f.name in names:
            kind: Any = {"action": "store_true"} if f.default is False else {
                "type": type(f.default), "default": f.default, "metavar": f.metadata["metavar"]}
            parser.add_argument("--" + f.name.replace("_", "-"), help=f.metadata["help"], **kind)


@dataclass(frozen=True)
class Selection(TextSettings):
    """Which documents of text files are read, and from which field. ValueError for impossible values."""

    part: str = ""  # "train" or "val" if each file is divided between the two (--val-fraction)

    def __post_init__(self) -> None:
        if self.min_chars < 0:
            raise ValueError(f"--min-chars {self.min_chars}: expected 0 or more")
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"--val-fraction {self.val_fraction}: expected a share from 0 to below 1")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Selection":
        """The selection that flags, settings or a manifest describe."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def for_split(self, split: str) -> "Selection":
        """The selection of the documents that train or validate."""
        return replace(self, part=split) if self.val_fraction else self

    def named(self) -> dict[str, Any]:
        """The values that are not defaults, as manifests store them; `strict` selects no document."""
        return {f.name: getattr(self, f.name) for f in fields(self)
                if f.name != "strict" and getattr(self, f.name) != f.default}

    def hashed(self) -> list[Any]:
        """`named` for fingerprints: empty if all values are defaults."""
        rest = self.named()
        field = rest.pop("text_field", None)
        return [*([field] if field else []), *([rest] if rest else [])]

    @property
    def skips_some(self) -> bool:
        """Whether some documents of a file may not be read."""
        return self.min_chars > 0 or self.part != ""

    def documents(self, texts: Iterable[str], skipped: dict[str, Any]) -> Iterator[str]:
        """The selected documents among all `texts` of a file; skipped["short"] counts those with too few characters."""
        for number, text in enumerate(texts):
            validates = math.floor((number + 1) * self.val_fraction) > math.floor(number * self.val_fraction)
            if self.part and validates != (self.part == "val"):
                continue
            if len(text) >= self.min_chars:
                yield text
            else:
                skipped["short"] += 1

    def of_one_document(self, text: str, skipped: dict[str, Any]) -> Iterator[str]:
        """The selected part of a file that is a single document."""
        at = math.ceil(len(text) * (1 - self.val_fraction))
        at = text.find("\n", at) + 1 or at
        parts = {"train": text[:at], "val": text[at:], "": text}
        return replace(self, part="").documents([parts[self.part]], skipped)


ALL = Selection()


# ---- parquet -------------------------------------------------------------------------------------

@contextlib.contextmanager
def named_in_errors(path: Path | str, problem: str) -> Iterator[None]:
    """Turn Arrow's error about a damaged file into a ValueError that names the file. Errors of object storage pass
    unchanged: they name the object, and the file is not to blame."""
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as e:  # the last two: damaged sizes, names
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
    with named_in_errors(path, "not a whole parquet file"):
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
    """Why a table has no column of texts `field`; "" if it has one."""
    columns = flat(schema.empty_table()).schema
    count = columns.names.count(field)
    if count > 1:
        return f"{count} columns named `{field}`, so it is unclear which holds the documents; rename one"
    if not count:
        return f"no `{field}` column, it has {columns.names}; name the one that holds the documents with --text-field"
    if columns.field(field).type not in (pa.string(), pa.large_string()):
        return f"column `{field}` has type {columns.field(field).type}, expected string; convert it"
    return ""


def checked(column: pa.Array, path: Path | str, field: str, group: int) -> pa.Array:
    """A column of texts, after its checks. ValueError for a null or a text that is too large; ArrowException for
    one that is not UTF-8."""
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
    file has another one. A file that we converted states the bytes of its texts itself. Raises what
    `open_parquet` raises, and ValueError for nulls that the footer counts."""
    with open_parquet(path, field) as file:
        metadata = file.metadata
    # the number of the column among all leaves: a struct in front of it has several
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
        f.seek(-8 - metadata.serialized_size, 2)  # after the footer come its length and PAR1
        return f.read(), counts, int((metadata.metadata or {}).get(TEXT_BYTES, text_bytes))


def text_tokens(text_bytes: int, documents: int) -> int:
    """An estimate of how many tokens texts have: one per 4 bytes, and a BOS per document."""
    return text_bytes // 4 + documents


def is_blank(path: Path, field: str = TEXT_FIELD) -> bool:
    """Whether all documents of a parquet file are empty. This follows from the statistics in its footer; without
    them, the texts are read up to the first one that is not empty."""
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
    file if pages are damaged, or a text is null, not UTF-8 or too large.

    At the end, freed memory is returned to the system. Otherwise Arrow's pool would keep as much as
    the largest group took, and glibc would keep the holes that units of many sizes leave (measured
    over 960 steps of 64 lanes: 158 MB and growing, instead of 130).
    """
    taken = 0
    try:
        with named_in_errors(path, f"row group {group} cannot be read, or a document in it is not UTF-8"):
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

def as_parquet(path: Path, selection: Selection = ALL) -> Path:
    """`path` itself, or the cached parquet file made from it: because it is of another kind, or because some of its
    documents are not selected. See `nanochat.text_kinds.converted`."""
    if not (path.name.endswith(CONVERTED) or selection.skips_some) or not path.exists():
        return path
    from nanochat.text_kinds import converted

    return converted(path, selection)
