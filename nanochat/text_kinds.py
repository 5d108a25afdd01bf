"""Reads documents from any text file (nanochat/text.py lists the kinds), and converts files to
cached parquet.

Training uses this module once per file, and then reads the cached parquet. Pretokenizing and
tokenizer training read their documents through this module.
"""

import contextlib
import functools
import gzip
import io
import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from nanochat.common import (
    as_path,
    atomic_open,
    counted,
    few,
    get_base_dir,
    get_dist_info,
    hash_json,
    is_remote,
    local_copy,
    read_json,
    write_json,
)
from nanochat.text import (
    ALL,
    JSON_LINES,
    MAX_DOCUMENT_BYTES,
    TEXT_BYTES,
    TEXT_FIELD,
    Footer,
    Selection,
    checked,
    flat,
    misfit,
    named_in_errors,
    open_parquet,
    read_batches,
    read_footer,
    text_suffix,
)

log = logging.getLogger(__name__)

CODECS = {".gz": "gzip", ".zst": "zstd"}
EMPTY_BYTES = 1 << 20  # a larger file counts as one with documents
JSON_LINE_BYTES = 16 << 20  # a .json file whose first line is longer is not JSON lines
LISTED_LINES = 100  # maximum number of broken lines per file that the report lists
GROUP_DOCUMENTS = 1024  # documents per row group of converted files


# {file: (nulls, column)}, until `warn_of_nulls` reports them
NULLS_FOUND: dict[Path, tuple[int, str]] = {}

# ---- documents -----------------------------------------------------------------------------------


def read_documents(
    path: Path, selection: Selection = ALL, skipped: dict[str, Any] | None = None
) -> Iterator[str]:
    """The selected documents of a text file of any kind. ValueError names the file and the problem.

    A broken line of jsonl (not UTF-8, not JSON, no text in it) is skipped, unless `selection` is
    strict: one bad line is no reason to lose a whole file. `skipped` receives "count", the number
    of broken lines; "lines", (number, problem) of the first ones; and "short", the number of short
    documents. If a file is divided between training and validation, only the training part counts
    its broken lines. A truncated compressed file is an error, because it has lost an unknown number
    of documents. So are a line above the size limit and a .txt file that is not UTF-8.

    A null in a column is skipped, too, unless `selection` is strict; skipped["nulls"], if any, is
    their number.
    """
    skipped = {} if skipped is None else skipped
    skipped.update(count=0, lines=[], short=0)
    suffix = text_suffix(path.name)
    if suffix == ".txt":
        return selection.of_one_document(_read_txt(path), skipped)
    if suffix in JSON_LINES:
        return selection.documents(_read_jsonl(path, selection, skipped), skipped)
    read = _read_arrow if suffix == ".arrow" else _read_parquet
    columns = read(path, selection.text_field, None if selection.strict else skipped)
    return selection.documents((text for column in columns for text in column.to_pylist()), skipped)


def _read_parquet(path: Path, field: str, skipped: dict[str, Any] | None) -> Iterator[pa.Array]:
    """The texts of a parquet file. `skipped`: see `nanochat.text.checked`."""
    with open_parquet(path, field) as file:
        for group in range(file.num_row_groups):
            yield from read_batches(file, group, path, field=field, skipped=skipped)


def _read_arrow(path: Path, field: str, skipped: dict[str, Any] | None) -> Iterator[pa.Array]:
    """The texts of a stream of Arrow record batches, as `datasets` saves it. `skipped`: see
    `nanochat.text.checked`."""
    with (
        named_in_errors(path, "truncated or not a stream of Arrow record batches"),
        path.open("rb") as file,
    ):
        batches = pa.ipc.open_stream(file)
        if problem := misfit(batches.schema, field):
            raise ValueError(f"{path}: {problem}")
        for number, batch in enumerate(batches):
            column = flat(pa.Table.from_batches([batch]))[field]
            yield from (checked(chunk, path, field, number, skipped) for chunk in column.chunks)


def saved_files(folder: Path) -> set[str] | None:
    """The names of the .arrow files that a folder's state.json of Hugging Face's `datasets` lists:
    caches may lie beside them. None for a folder without a state.json, all of whose files are
    data."""
    state = folder / "state.json"
    if not state.is_file():
        return None
    saved = read_json(
        local_copy(state), {"_data_files": [{"filename": str}]}, remedy="save the data set again"
    )
    names = {entry["filename"] for entry in saved["_data_files"]}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / name}: missing, but state.json lists it; restore it"
            )
    return names


def _read_txt(path: Path) -> str:
    """The text of a .txt file."""
    with path.open("rb") as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ValueError(
            f"{path}: a document of more than {MAX_DOCUMENT_BYTES:,} bytes, which is the limit; split it "
            f"into several"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 ({e}); convert it with iconv, or remove it") from e


@contextlib.contextmanager
def _open_lines(path: Path) -> Iterator[Any]:
    """The bytes of a file of lines, which may be compressed, as a buffered binary file. ValueError
    names the file if it is truncated, corrupt, or compressed in a way that cannot be read."""
    suffix = path.suffix.lower()
    codec = CODECS.get(suffix)
    with contextlib.ExitStack() as files:
        file = files.enter_context(path.open("rb", buffering=1 << 20))
        problem = (
            f"truncated or not a {codec} file" if codec else "the file cannot be read to its end"
        )
        files.enter_context(named_in_errors(path, problem))
        if suffix == ".gz":  # unlike Arrow's, Python's reader accepts zeros after the last member
            file = files.enter_context(io.BufferedReader(gzip.GzipFile(fileobj=file), 1 << 20))
        elif codec:
            file = files.enter_context(
                io.BufferedReader(pa.CompressedInputStream(file, codec), 1 << 20)
            )
        yield file


def is_json_lines(path: Path) -> bool:
    """Whether a .json file, which may be compressed, has one object per line, on at least two
    lines. True also for an empty file, and for one whose beginning cannot be read: reading it gives
    the reason."""
    try:
        with _open_lines(path) as lines:
            filled = (
                line for line in iter(lambda: lines.readline(JSON_LINE_BYTES), b"") if line.strip()
            )
            first, second = next(filled, b""), next(filled, b"")
            if not first:
                return True
    except (OSError, ValueError):
        return True
    try:
        is_object = isinstance(json.loads(first.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False
    return is_object and second.lstrip().startswith(b"{")


def _read_jsonl(path: Path, selection: Selection, skipped: dict[str, Any]) -> Iterator[str]:
    """All documents of a .jsonl file, which may be compressed. `skipped` counts broken lines; with
    --strict, the first one is an error."""
    with _open_lines(path) as lines:
        for number in itertools.count(1):
            line = lines.readline(MAX_DOCUMENT_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{path}: line {number:,} has more than {MAX_DOCUMENT_BYTES:,} bytes, which is the "
                    f"limit; split its document into several"
                )
            if not line.strip():
                continue
            try:
                yield _document(line, selection.text_field)
            except (ValueError, RecursionError) as e:
                problem = (
                    f"not {'UTF-8' if isinstance(e, UnicodeError) else 'JSON with text'}: {e}"[:200]
                )
                if selection.strict:
                    raise ValueError(
                        f"{path}: line {number}: {problem}; fix the line, or drop --strict to skip "
                        f"such lines"
                    ) from None
                if selection.part != "val":  # the training part of the file counts it
                    skipped["count"] += 1
                    skipped["lines"] += (
                        [(number, problem)] if len(skipped["lines"]) < LISTED_LINES else []
                    )


def _document(line: bytes, field: str) -> str:
    """The text in a line of jsonl. ValueError or RecursionError if it has none."""
    value = json.loads(line.decode("utf-8-sig"))
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, str):
        raise ValueError(
            f"not an object with a string in its field `{field}` (set it with --text-field)"
        )
    value.encode()  # fails for half a surrogate pair, which is not a character
    return value


def is_empty_text(path: Path) -> bool:
    """Whether a text file holds no document: no bytes, no rows, only nulls in its column `text`, or
    only blank lines. Only small files are opened. ValueError or OSError if it cannot be read."""
    suffix, size = text_suffix(path.name), path.stat().st_size
    if size == 0 or size > EMPTY_BYTES:
        return size == 0
    with named_in_errors(path, "the file cannot be read"):
        if suffix == ".parquet":
            rows = pq.read_metadata(path.open("rb") if is_remote(path) else path).num_rows
            return rows == 0 or count_nulls(path, TEXT_FIELD) == rows
        if suffix == ".arrow":
            with path.open("rb") as file:
                return not any(batch.num_rows for batch in pa.ipc.open_stream(file))
        if suffix in JSON_LINES:
            with _open_lines(path) as lines:
                pieces = iter(lambda: lines.readline(EMPTY_BYTES), b"")
                return not any(piece.strip() for piece in pieces)
    return False


# ---- cached parquet ------------------------------------------------------------------------------


def read_texts(path: Path | str, selection: Selection = ALL) -> Iterator[str]:
    """The selected documents of a text file of any kind, read from the cached parquet; warns about
    broken lines."""
    parquet = as_parquet(as_path(path), selection)
    warn_of_nulls()
    return read_documents(parquet, Selection(selection.text_field))


def as_parquet(path: Path, selection: Selection = ALL) -> Path:
    """`path` itself, or its cached conversion (`converted`) if it is not parquet, if it has nulls,
    or if the selection skips some of its documents."""
    return (
        path
        if text_suffix(path.name) == "" or not path.exists()
        else open_footer(path, selection)[0]
    )


def open_footer(path: Path, selection: Selection = ALL) -> tuple[Path, Footer]:
    """(`as_parquet`, its footer) of a text file."""
    field = selection.text_field
    footer, nulls = None, 0
    if text_suffix(path.name) == ".parquet" and not selection.skips_some:
        footer = read_footer(path, field)
        if footer.nulls is None:
            nulls = count_nulls(path, field)
        else:
            nulls = footer.nulls
    if footer is not None and not nulls:
        return path, footer
    parquet = converted(path, selection)
    return parquet, read_footer(parquet, field)


def as_pinned(path: Path, entry: Mapping[str, Any], selection: Selection) -> Path:
    """`as_parquet` of a file that a manifest's entry describes. No parquet file is opened: the
    entry tells whether it was converted."""
    if (
        text_suffix(path.name) == ".parquet"
        and not selection.skips_some
        and "own_size" not in entry
    ):
        return path
    return as_parquet(path, selection)


def count_nulls(path: Path, field: str) -> int:
    """The number of nulls in the text column of a parquet file. If its footer does not say it, the
    column is read once, under a progress bar, and the number is kept in the cache."""
    if (number := read_footer(path, field).nulls) is not None:
        return number
    path = local_copy(path)
    stat = path.stat()
    key = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, field, "nulls"]
    counted_before = get_base_dir() / "converted" / hash_json(key) / "nulls.json"
    if not counted_before.exists():
        skipped: dict[str, Any] = {"nulls": 0}
        columns = tqdm(
            _read_parquet(path, field, skipped),
            desc=f"counting nulls in {path.name}",
            unit=" batches",
            delay=1,
            disable=None,
        )
        for _ in columns:
            pass
        counted_before.parent.mkdir(parents=True, exist_ok=True)
        write_json(counted_before, {"source": str(path), "nulls": skipped["nulls"]})
    return read_json(counted_before, {"nulls": int})["nulls"]


def converted(path: Path, selection: Selection) -> Path:
    """The cached parquet file with the selected documents of a file, made once per size,
    modification time and `selection`. Warns about skipped lines and documents once per process."""
    path = local_copy(path)
    stat = path.stat()
    key = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, *selection.hashed()]
    folder = get_base_dir() / "converted" / hash_json(key)
    target, report = folder / "text.parquet", folder / "report.json"
    exists = target.exists() and report.exists()
    refused = (
        selection.strict
        and exists
        and any(read_json(report).get(name) for name in ("count", "nulls"))
    )
    if not exists or refused:  # converting again raises
        folder.mkdir(parents=True, exist_ok=True)
        write_json(
            report, {"source": str(path), **convert(path, target, selection), **selection.named()}
        )
    _warn_of_skipped(path, report)
    return target


def warn_of_nulls() -> None:
    """Warn about the nulls in all files that were converted since the last call, in one line. Each
    file is counted once per process."""
    if not NULLS_FOUND:
        return
    total = sum(number for number, _ in NULLS_FOUND.values())
    field = next(iter(NULLS_FOUND.values()))[1]
    files = sorted(NULLS_FOUND)
    NULLS_FOUND.clear()
    if get_dist_info()[1] == 0:
        log.warning(
            "skipped %s in column `%s` of %s: %s",
            counted(total, "null"),
            field,
            counted(len(files), "file"),
            few(files),
        )


def convert(path: Path, target: Path, selection: Selection) -> dict[str, Any]:
    """Write the selected documents of a file as parquet. Returns `skipped` as `read_documents`
    fills it."""
    skipped: dict[str, Any] = {}
    texts = iter(
        tqdm(
            read_documents(path, selection, skipped),
            desc=f"converting {path.name}",
            unit=" documents",
            delay=1,
            disable=None,
        )
    )
    schema = pa.schema([(selection.text_field, pa.string())])
    text_bytes = None
    with atomic_open(target) as out, pq.ParquetWriter(out, schema, compression="zstd") as writer:
        while group := list(itertools.islice(texts, GROUP_DOCUMENTS)):
            writer.write_table(
                pa.table({selection.text_field: group}, schema=schema),
                row_group_size=GROUP_DOCUMENTS,
            )
            text_bytes = (text_bytes or 0) + sum(len(text.encode()) for text in group)
        if text_bytes is None:
            raise no_document(path, selection, skipped)
        writer.add_key_value_metadata({TEXT_BYTES: str(text_bytes)})
    return skipped


def no_document(path: Path, selection: Selection, skipped: dict[str, Any]) -> ValueError:
    """The error for a file without any selected document."""
    why = "".join(f"; line {number}: {problem}" for number, problem in skipped["lines"][:1])
    part = (
        f" in the {selection.part} part with --val-fraction {selection.val_fraction}"
        if selection.part
        else ""
    )
    nulls = f"{counted(skipped['nulls'], 'null')}; " if skipped.get("nulls") else ""
    return ValueError(
        f"{path}: no document is left{part} ({nulls}{counted(skipped['count'], 'broken line')}{why}; "
        f"{skipped['short']:,} shorter than --min-chars); fix the file, or remove it"
    )


@functools.cache
def _warn_of_skipped(path: Path, report: Path) -> None:
    """Warn about a file's broken lines and short documents, once per process, and take note of its
    nulls."""
    skipped = read_json(report)
    if skipped.get("short"):
        log.warning(
            "%s: skipped %s shorter than --min-chars %d",
            path,
            counted(skipped["short"], "document"),
            skipped["min_chars"],
        )
    if skipped.get("nulls"):
        NULLS_FOUND[path] = skipped["nulls"], skipped.get("text_field", TEXT_FIELD)
    if skipped.get("lines"):
        number, why = skipped["lines"][0]
        broken = counted(skipped["count"], "broken line")
        log.warning(
            "%s: %s skipped; the first is line %d: %s (more in %s)",
            path,
            broken,
            number,
            why,
            report,
        )
