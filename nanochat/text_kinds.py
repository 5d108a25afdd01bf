"""Reads documents from any text file (nanochat/text.py lists the kinds), one after another.

Pretokenizing and tokenizer training read their documents with this module. A run reads only
parquet, so nanochat/prepare.py uses this module once per file.
"""

import contextlib
import gzip
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from nanochat.common import (
    AnyPath,
    Remote,
    as_path,
    counted,
    local_copy,
    read_json,
)
from nanochat.text import (
    ALL,
    JSON_LINES,
    MAX_DOCUMENT_BYTES,
    PLAIN_TEXT,
    TEXT_FIELD,
    Numbered,
    Selection,
    Skipped,
    checked,
    column_problem,
    counted_nulls,
    flatten_structs,
    named_in_errors,
    open_parquet,
    read_batches,
    read_footer,
    read_metadata,
    text_suffix,
    warn_once,
)

CODECS = {".gz": "gzip", ".zst": "zstd"}
EMPTY_BYTES = 1 << 20  # a larger file counts as one with documents
JSON_LINE_BYTES = 16 << 20  # a .json file whose first line is longer is not JSON lines
LISTED_LINES = 100  # maximum number of broken lines per file that the report lists

# ---- documents -----------------------------------------------------------------------------------


def read_documents(
    path: AnyPath, selection: Selection = ALL, skipped: Skipped | None = None
) -> Iterator[str]:
    """The texts of `numbered_documents`."""
    return (document.text for document in numbered_documents(path, selection, skipped))


def numbered_documents(
    path: AnyPath, selection: Selection = ALL, skipped: Skipped | None = None
) -> Iterator[Numbered]:
    """The selected documents of a text file of any kind. ValueError names the file and the problem.

    A broken line of jsonl (not UTF-8, not JSON, no text in it) is skipped, unless `selection` is
    strict: one bad line is no reason to lose a whole file. So is a null in a column. `skipped`
    receives what was skipped, at the end of the file. If a file is divided between training and
    validation, only the training part counts its broken lines. A truncated compressed file is an
    error, because it has lost an unknown number of documents. So are a line above the size limit and
    a .txt file that is not UTF-8.
    """
    skipped = {} if skipped is None else skipped
    skipped.update({"count": 0, "lines": [], "short": 0})
    suffix = text_suffix(path.name)
    if suffix in PLAIN_TEXT:
        return selection.of_one_document(_read_txt(path), skipped)
    if suffix in JSON_LINES:
        return selection.documents(_read_jsonl(path, selection, skipped), skipped)
    read = _read_arrow if suffix == ".arrow" else _read_parquet
    columns = read(path, selection, skipped)
    texts = itertools.chain.from_iterable(column.to_pylist() for column in columns)
    rows = (Numbered(row, text) for row, text in enumerate(texts, 1) if text is not None)
    return selection.documents(rows, skipped)


def read_texts(path: AnyPath | str, selection: Selection = ALL) -> Iterator[str]:
    """The selected documents of a text file of any kind. Warns about what was skipped, at the end
    of the file, once per process."""
    path = as_path(path)
    if not (
        isinstance(path, Remote) and path.keeps_ranges and text_suffix(path.name) == ".parquet"
    ):
        path = local_copy(path)
    skipped: Skipped = {}
    yield from read_documents(path, selection, skipped)
    for line in describe_skipped(path, selection, skipped):
        warn_once(line)


def describe_skipped(path: AnyPath, selection: Selection, skipped: Skipped) -> list[str]:
    """A sentence each about the nulls, short documents and broken lines of a file that were
    skipped."""
    lines = []
    if nulls := skipped.get("nulls"):
        lines.append(
            f"skipped {counted(nulls, 'null')} in column `{selection.text_field}` of 1 file: {path}"
        )
    if short := skipped["short"]:
        documents = counted(short, "document")
        lines.append(f"{path}: skipped {documents} shorter than --min-chars {selection.min_chars}")
    if skipped["lines"]:
        number, why = skipped["lines"][0]
        broken = counted(skipped["count"], "broken line")
        lines.append(f"{path}: {broken} skipped; the first is line {number}: {why}")
    return lines


def no_document(files: Sequence[AnyPath], selection: Selection, skipped: Skipped) -> ValueError:
    """The error for files without any selected document. `skipped`: what was skipped in the first."""
    part = ""
    if selection.part:
        part = f" in the {selection.part} part with --val-fraction {selection.val_fraction}"
    others = f", nor in {counted(len(files) - 1, 'other file')}" if len(files) > 1 else ""
    lines = describe_skipped(files[0], selection, skipped)
    why = "; ".join(["", *(line.removeprefix(f"{files[0]}: ") for line in lines)])
    return ValueError(
        f"{files[0]}: no document is left{part}{others}{why}; fix the file, choose other data, or change "
        f"--val-fraction or --min-chars"
    )


# ---- the kinds -----------------------------------------------------------------------------------


def _read_parquet(path: AnyPath, selection: Selection, skipped: Skipped) -> Iterator[pa.Array]:
    """The texts of a parquet file, of which some may be null. `skipped` counts nulls; but if a run
    reads the file in place, they are empty texts, as in the run."""
    field = selection.text_field
    with open_parquet(path, field) as file:
        in_place = not selection.skips_some and counted_nulls(file.metadata, field) is None
        counts = None if selection.strict or in_place else skipped
        for group in range(file.num_row_groups):
            yield from read_batches(
                file, group, path, field=field, skipped=counts, strict=selection.strict
            )


def _read_arrow(path: AnyPath, selection: Selection, skipped: Skipped) -> Iterator[pa.Array]:
    """The texts of a stream of Arrow record batches, as `datasets` saves it. `skipped` counts
    nulls; with --strict, the first one is an error."""
    field = selection.text_field
    counts = None if selection.strict else skipped
    with (
        named_in_errors(path, "truncated or not a stream of Arrow record batches"),
        path.open("rb") as file,
    ):
        batches = pa.ipc.open_stream(file)
        if problem := column_problem(batches.schema, field):
            raise ValueError(f"{path}: {problem}")
        for number, batch in enumerate(batches):
            column = flatten_structs(pa.Table.from_batches([batch]))[field]
            yield from (checked(chunk, path, field, number, counts) for chunk in column.chunks)


def saved_files(folder: AnyPath) -> set[str] | None:
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


def _read_txt(path: AnyPath) -> str:
    """The text of a .txt file, which may be compressed."""
    with _open_data(path) as file:
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
def _open_data(path: AnyPath) -> Iterator[Any]:
    """The bytes of a file, which may be compressed, as a buffered binary file. ValueError
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


def is_json_lines(path: AnyPath) -> bool:
    """Whether a .json file, which may be compressed, has one object per line, on at least two
    lines. True also for an empty file, and for one whose beginning cannot be read: reading it gives
    the reason."""
    try:
        with _open_data(path) as lines:
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


def _read_jsonl(path: AnyPath, selection: Selection, skipped: Skipped) -> Iterator[Numbered]:
    """All documents of a .jsonl file, which may be compressed. `skipped` counts broken lines; with
    --strict, the first one is an error."""
    with _open_data(path) as lines:
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
                yield Numbered(number, _document(line, selection.text_field))
            except (ValueError, RecursionError) as e:
                expected = "UTF-8" if isinstance(e, UnicodeError) else "JSON with text"
                problem = f"not {expected}: {e}"[:200]
                if selection.strict:
                    raise ValueError(
                        f"{path}: line {number}: {problem}; fix the line, or drop --strict to skip "
                        f"such lines"
                    ) from None
                if selection.part != "val":  # the training part of the file counts it
                    skipped["count"] += 1
                    if len(skipped["lines"]) < LISTED_LINES:
                        skipped["lines"].append((number, problem))


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


def is_empty_text(path: AnyPath) -> bool:
    """Whether a text file holds no document: no bytes, no rows, only nulls in its column `text`, or
    only blank lines. Only small files are opened. ValueError or OSError if it cannot be read."""
    suffix, size = text_suffix(path.name), path.stat().st_size
    if size == 0 or size > EMPTY_BYTES:
        return size == 0
    with named_in_errors(path, "the file cannot be read"):
        if suffix == ".parquet":
            rows = read_metadata(path).num_rows
            return rows == 0 or read_footer(path, TEXT_FIELD).nulls == rows
        if suffix == ".arrow":
            with path.open("rb") as file:
                return not any(batch.num_rows for batch in pa.ipc.open_stream(file))
        if suffix in JSON_LINES:
            with _open_data(path) as lines:
                pieces = iter(lambda: lines.readline(EMPTY_BYTES), b"")
                return not any(piece.strip() for piece in pieces)
    return False


def refuse_nulls(path: AnyPath, selection: Selection) -> None:
    """For --strict: read the text column of a parquet file whose footer does not count nulls.
    ValueError names the row group of the first one."""
    columns = _read_parquet(local_copy(path), replace(selection, strict=True), {})
    for _ in tqdm(
        columns, desc=f"looking for nulls in {path.name}", unit=" batches", delay=1, disable=None
    ):
        pass
