"""
The documents of any text file, one by one, and how a file that is not parquet becomes parquet.

    .jsonl, .jsonl.gz, .jsonl.zst    a document a line; broken lines are told and passed over
    .txt                             one document
    .arrow                           a stream of record batches, as Hugging Face's `datasets` saves it
    .parquet                         of nanochat/text.py

Training never comes here but once for each file: what it reads is the parquet that
`nanochat.text.as_parquet` keeps. Tokenizing and training a tokenizer read documents from here.
"""

import argparse
import contextlib
import functools
import io
import itertools
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from nanochat.common import atomic_open, get_base_dir, hash_json, in_store, local, place, read_json, write_json
from nanochat.text import (
    ALL,
    CONVERTED,
    FIELD_HELP,
    MAX_DOCUMENT_BYTES,
    MIN_CHARS_HELP,
    TEXT_FIELD,
    VAL_FRACTION_HELP,
    Reading,
    as_parquet,
    checked,
    misfit,
    open_parquet,
    read_batches,
    told_of,
)

log = logging.getLogger(__name__)

CODECS = {".gz": "gzip", ".zst": "zstd"}
BROKEN_ARROW = "not a whole stream of Arrow's"
MEND = "mend it, or leave out --strict to skip such lines"
LISTED_LINES = 100  # broken lines of a file whose numbers are kept
GROUP_DOCUMENTS = 1024  # documents in a row group of the parquet that we write


def takes(reading: Reading, number: int) -> bool:
    """Whether the document of this number in its file, from 0, is in the part that is read."""
    share = reading.val_fraction
    validates = math.floor((number + 1) * share) > math.floor(number * share)
    return reading.part == "" or validates == (reading.part == "val")


def cut(reading: Reading, text: str) -> str:
    """The part that is read of a file that is one document."""
    if not reading.part:
        return text
    at = math.ceil(len(text) * (1 - reading.val_fraction))
    at = text.find("\n", at) + 1 or at
    return text[:at] if reading.part == "train" else text[at:]


class Line(NamedTuple):
    """A document, or a line of jsonl that should be one."""

    number: int  # of the line, from 1; of a row in a parquet or arrow file, from 0
    text: str | None  # None for a broken line, and for a document that is too short
    problem: str = ""  # what is wrong with it; "" for one that is too short


def read_lines(path: Path, reading: Reading = ALL, *, strict: bool = False) -> Iterator[Line]:
    """The documents of a text file of any kind that are to be read. ValueError names the file and
    what is wrong.

    A broken line of jsonl (not UTF-8, not JSON, no text in it) is no reason to lose a file of
    millions: it is told with its number, or with `strict` ends the reading. A torn compressed file,
    which has lost nobody knows how many documents, and a line that is larger than any document
    always do, and so does a .txt file that is too large or not UTF-8.
    """
    if path.name.endswith(".txt"):
        lines: Iterator[Line] = iter([Line(1, cut(reading, _read_txt(path)))])
        reading = replace(reading, part="")
    elif path.name.endswith(".arrow"):
        lines = _numbered(_read_arrow(path, reading.text_field))
    elif path.name.endswith(CONVERTED):
        lines = _read_jsonl(path, reading.text_field, strict)
    else:
        lines = _numbered(_read_parquet(path, reading.text_field))
    numbers = itertools.count()
    for line in lines:
        if line.text is None:
            if reading.part != "val":  # once is enough
                yield line
        elif takes(reading, next(numbers)):
            yield line if len(line.text) >= reading.min_chars else Line(line.number, None)


def good_lines(path: Path, reading: Reading, skipped: dict[str, Any], *, strict: bool = False) -> Iterator[Line]:
    """The documents of `read_lines`. Of the rest `skipped` gets to know the "count" of broken lines, and (number, what
    is wrong) of the first "lines", and how many documents were too "short"."""
    skipped.update(count=0, lines=[], short=0)
    for line in read_lines(path, reading, strict=strict):
        if line.text is not None:
            yield line
        elif not line.problem:
            skipped["short"] += 1
        else:
            skipped["count"] += 1
            if len(skipped["lines"]) < LISTED_LINES:
                skipped["lines"].append((line.number, line.problem))


def _numbered(columns: Iterator[pa.Array]) -> Iterator[Line]:
    """The rows of columns of texts."""
    texts = (text for column in columns for text in column.to_pylist())
    return itertools.starmap(Line, enumerate(texts))


def _read_parquet(path: Path, field: str) -> Iterator[pa.Array]:
    """The texts of a parquet file."""
    with open_parquet(path, field) as file:
        for group in range(file.num_row_groups):
            yield from read_batches(file, group, path, field=field)


def _read_arrow(path: Path, field: str) -> Iterator[pa.Array]:
    """The texts of a stream of Arrow's record batches, the file that `datasets` saves."""
    try:
        with told_of(path, BROKEN_ARROW), path.open("rb") as file:
            batches = pa.ipc.open_stream(file)
            if problem := misfit(batches.schema, field):
                raise ValueError(f"{path}: {problem}")
            for number, batch in enumerate(batches):
                table = pa.Table.from_batches([batch])
                while field not in table.column_names:
                    table = table.flatten()
                yield from (checked(column, path, field, number) for column in table[field].chunks)
    except (MemoryError, UnicodeDecodeError) as e:  # of damaged sizes and names
        raise ValueError(f"{path}: {BROKEN_ARROW} ({e}); save the data set again") from e


def saved_files(folder: Path) -> set[str] | None:
    """Names of the .arrow files of a data set that Hugging Face's `datasets` saved to a folder, which
    its state.json lists: caches may lie beside them. None where there is no state.json."""
    state = folder / "state.json"
    if not state.is_file():
        return None
    saved = read_json(local(state), {"_data_files": [{"filename": str}]}, way_out="save the data set again")
    names = {entry["filename"] for entry in saved["_data_files"]}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: not there, but state.json lists it; bring it back")
    return names


def read_texts(path: Path | str, reading: Reading = ALL) -> Iterator[str]:
    """The texts of a text file of any kind, without broken lines, which are told (`as_parquet`)."""
    lines = read_lines(as_parquet(place(path), reading), Reading(reading.text_field))
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


def convert(path: Path, target: Path, reading: Reading, strict: bool) -> dict[str, Any]:
    """Write the documents of a file as parquet; returns what was skipped, see `good_lines`."""
    skipped: dict[str, Any] = {}
    lines = tqdm(good_lines(path, reading, skipped, strict=strict), desc=f"converting {path.name}", unit=" documents",
                 delay=1, disable=None)
    field, texts, num_documents = reading.text_field, (line.text for line in lines), 0
    schema = pa.schema([(field, pa.string())])
    with atomic_open(target) as out, pq.ParquetWriter(out, schema, compression="zstd") as writer:
        while group := list(itertools.islice(texts, GROUP_DOCUMENTS)):
            writer.write_table(pa.table({field: group}, schema=schema), row_group_size=GROUP_DOCUMENTS)
            num_documents += len(group)
        if not num_documents:
            raise no_document(path, reading, skipped)
    return skipped


def no_document(path: Path, reading: Reading, skipped: dict[str, Any]) -> ValueError:
    """The error of a file that gives no document."""
    why = "".join(f"; line {number}: {problem}" for number, problem in skipped["lines"][:1])
    told = f"{path}: no document in it ({skipped['count']:,} broken line(s){why})"
    if not reading.selects:
        return ValueError(f"{told}; delete it or make it again")
    part = f" of the {reading.part} part with --val-fraction {reading.val_fraction}" if reading.part else ""
    return ValueError(f"{told}{part}, and {skipped['short']:,} shorter than --min-chars; change the flag, or leave the "
                      f"file out")


def converted(path: Path, reading: Reading, *, strict: bool) -> Path:
    """The cached parquet of the documents of a file that are read (made once for its size, time of
    change and `reading`). Broken lines and documents that are too short are told once a launch; with
    `strict` the first broken line is a ValueError."""
    path = local(path)
    stat = path.stat()
    key = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, *reading.hashed()]
    folder = get_base_dir() / "converted" / hash_json(key)
    target, report = folder / "text.parquet", folder / "report.json"
    if not (target.exists() and report.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        skipped = convert(path, target, reading, strict)
        write_json(report, {"source": str(path), "count": skipped["count"], "skipped": skipped["lines"],
                            "short": skipped["short"], **reading.named()})
    if strict and (bad := read_json(report)["skipped"]):
        raise ValueError(f"{path}: line {bad[0][0]}: {bad[0][1]}; {MEND}")
    _tell_skipped(path, report)
    return target


@functools.cache
def _tell_skipped(path: Path, report: Path) -> None:
    """Warn of a file's broken lines and short documents, once in a process."""
    told = read_json(report)
    bad = told["skipped"]
    if told.get("short"):
        log.warning("%s: %d document(s) shorter than --min-chars %d left out", path, told["short"], told["min_chars"])
    for number, why in bad[:10]:
        log.warning("%s: line %d skipped: %s", path, number, why)
    if bad:
        num_bad = told.get("count", len(bad))
        log.warning("%s: %d broken line(s) skipped in all; %s names the first %d", path, num_bad, report, len(bad))


def add_text_flags(parser: argparse.ArgumentParser, *, splits: bool = True) -> None:
    """Give the parser of a script that reads text its flags; `Reading.of(vars(args))` is what they
    say. `splits`: whether it takes training and validation data apart."""
    parser.add_argument("--text-field", default=TEXT_FIELD, metavar="NAME", help=FIELD_HELP)
    parser.add_argument("--min-chars", type=int, default=0, metavar="N", help=MIN_CHARS_HELP)
    if splits:
        parser.add_argument("--val-fraction", type=float, default=0.0, metavar="F", help=VAL_FRACTION_HELP)
