"""
The documents of any text file, one by one, and how a file that is not parquet becomes parquet.

    .jsonl, .jsonl.gz, .jsonl.zst    a document a line; broken lines are told and passed over, or fatal (--strict)
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
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from nanochat.common import as_path, atomic_open, get_base_dir, hash_json, local_copy, read_json, write_json
from nanochat.text import (
    ALL,
    CONVERTED,
    FIELD_HELP,
    MAX_DOCUMENT_BYTES,
    MIN_CHARS_HELP,
    TEXT_BYTES,
    TEXT_FIELD,
    VAL_FRACTION_HELP,
    Reading,
    as_parquet,
    checked,
    flat,
    misfit,
    open_parquet,
    read_batches,
    told_of,
)

log = logging.getLogger(__name__)

CODECS = {".gz": "gzip", ".zst": "zstd"}
LISTED_LINES = 100  # broken lines of a file whose numbers are kept
GROUP_DOCUMENTS = 1024  # documents in a row group of the parquet that we write


# ---- documents -----------------------------------------------------------------------------------

def read_documents(path: Path, reading: Reading = ALL, skipped: dict[str, Any] | None = None) -> Iterator[str]:
    """The documents of a text file of any kind that are to be read. ValueError names the file and
    what is wrong.

    A broken line of jsonl (not UTF-8, not JSON, no text in it) is no reason to lose a file of
    millions, so it is passed over, unless `reading` is strict. `skipped` gets to know what was: the
    "count" of broken lines, (number, what is wrong) of the first "lines", and how many documents
    were too "short". Of two parts of a file training's tells the broken lines, validation's none. A
    torn compressed file has lost nobody knows how many documents, so it is an error, and so are a
    line that is larger than any document and a .txt file that is not UTF-8.
    """
    skipped = {} if skipped is None else skipped
    skipped.update(count=0, lines=[], short=0)
    texts: Iterable[str]
    if path.name.endswith(".txt"):
        texts = [cut(reading, _read_txt(path))]
        reading = replace(reading, part="")
    elif path.name.endswith(CONVERTED) and path.suffix != ".arrow":
        texts = _read_jsonl(path, reading, skipped)
    else:
        read = _read_arrow if path.suffix == ".arrow" else _read_parquet
        texts = (text for column in read(path, reading.text_field) for text in column.to_pylist())
    for number, text in enumerate(texts):
        if not takes(reading, number):
            continue
        if len(text) >= reading.min_chars:
            yield text
        else:
            skipped["short"] += 1


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


def _read_parquet(path: Path, field: str) -> Iterator[pa.Array]:
    """The texts of a parquet file."""
    with open_parquet(path, field) as file:
        for group in range(file.num_row_groups):
            yield from read_batches(file, group, path, field=field)


def _read_arrow(path: Path, field: str) -> Iterator[pa.Array]:
    """The texts of a stream of Arrow's record batches, the file that `datasets` saves."""
    with told_of(path, "not a whole stream of Arrow's"), path.open("rb") as file:
        batches = pa.ipc.open_stream(file)
        if problem := misfit(batches.schema, field):
            raise ValueError(f"{path}: {problem}")
        for number, batch in enumerate(batches):
            column = flat(pa.Table.from_batches([batch]))[field]
            yield from (checked(chunk, path, field, number) for chunk in column.chunks)


def saved_files(folder: Path) -> set[str]:
    """Names of the .arrow files that are data: where Hugging Face's `datasets` saved them those
    that its state.json lists, for caches may lie beside them; else all of the folder."""
    state = folder / "state.json"
    if not state.is_file():
        return {file.name for file in folder.rglob("*.arrow")}
    saved = read_json(local_copy(state), {"_data_files": [{"filename": str}]}, way_out="save the data set again")
    names = {entry["filename"] for entry in saved["_data_files"]}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: not there, but state.json lists it; bring it back")
    return names


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


def _read_jsonl(path: Path, reading: Reading, skipped: dict[str, Any]) -> Iterator[str]:
    """The documents of a .jsonl file, which may be compressed; broken lines are noted in
    `skipped`, or the first is an error."""
    codec = CODECS.get(path.suffix)
    with contextlib.ExitStack() as files:
        lines: Any = files.enter_context(path.open("rb", buffering=1 << 20))
        files.enter_context(told_of(path, f"not a whole {codec} file" if codec else "it cannot be read to its end"))
        if codec:
            lines = files.enter_context(io.BufferedReader(pa.CompressedInputStream(lines, codec), 1 << 20))
        for number in itertools.count(1):
            line = lines.readline(MAX_DOCUMENT_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_DOCUMENT_BYTES:
                raise ValueError(f"{path}: line {number:,} has more than {MAX_DOCUMENT_BYTES:,} "
                                 f"bytes, the most that is read; cut its document into several")
            if not line.strip():
                continue
            try:
                text = _document(line, reading.text_field)
            except (ValueError, RecursionError) as e:
                problem = f"not {'UTF-8' if isinstance(e, UnicodeError) else 'JSON of a document'}: {e}"[:200]
                if reading.strict:
                    raise ValueError(f"{path}: line {number}: {problem}; mend it, or leave out --strict to skip "
                                     f"such lines") from None
                if reading.part == "val":  # the other part of the file tells it
                    continue
                skipped["count"] += 1
                if len(skipped["lines"]) < LISTED_LINES:
                    skipped["lines"].append((number, problem))
            else:
                yield text


def _document(line: bytes, field: str) -> str:
    """The text in a line of jsonl. ValueError or RecursionError where there is none."""
    value = json.loads(line.decode("utf-8-sig"))
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"it is no object with a string in its field `{field}` (--text-field names another)")
    value.encode()  # half a surrogate pair is no character
    return value


# ---- cached parquet ------------------------------------------------------------------------------

def read_texts(path: Path | str, reading: Reading = ALL) -> Iterator[str]:
    """The documents of a text file of any kind, by way of the cached parquet; broken lines are
    told."""
    return read_documents(as_parquet(as_path(path), reading), Reading(reading.text_field))


def converted(path: Path, reading: Reading) -> Path:
    """The cached parquet of the documents of a file that are read, made once for its size, time of
    change and `reading`. What was passed over is told once a launch."""
    path = local_copy(path)
    stat = path.stat()
    key = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, *reading.hashed()]
    folder = get_base_dir() / "converted" / hash_json(key)
    target, report = folder / "text.parquet", folder / "report.json"
    there = target.exists() and report.exists()
    if not there or (reading.strict and read_json(report).get("count")):  # again, to be told of the first broken line
        folder.mkdir(parents=True, exist_ok=True)
        write_json(report, {"source": str(path), **convert(path, target, reading), **reading.named()})
    _tell_skipped(path, report)
    return target


def convert(path: Path, target: Path, reading: Reading) -> dict[str, Any]:
    """Write the documents of a file as parquet; returns what was skipped, see `read_documents`."""
    skipped: dict[str, Any] = {}
    texts = iter(tqdm(read_documents(path, reading, skipped), desc=f"converting {path.name}", unit=" documents",
                      delay=1, disable=None))
    schema = pa.schema([(reading.text_field, pa.string())])
    num_groups = text_bytes = 0
    with atomic_open(target) as out, pq.ParquetWriter(out, schema, compression="zstd") as writer:
        while group := list(itertools.islice(texts, GROUP_DOCUMENTS)):
            writer.write_table(pa.table({reading.text_field: group}, schema=schema), row_group_size=GROUP_DOCUMENTS)
            num_groups += 1
            text_bytes += sum(len(text.encode()) for text in group)
        if not num_groups:
            raise no_document(path, reading, skipped)
        writer.add_key_value_metadata({TEXT_BYTES: str(text_bytes)})
    return skipped


def no_document(path: Path, reading: Reading, skipped: dict[str, Any]) -> ValueError:
    """The error of a file that gives no document."""
    why = "".join(f"; line {number}: {problem}" for number, problem in skipped["lines"][:1])
    part = f" of the {reading.part} part with --val-fraction {reading.val_fraction}" if reading.part else ""
    return ValueError(f"{path}: no document in it ({skipped['count']:,} broken line(s){why}){part}, and "
                      f"{skipped['short']:,} shorter than --min-chars; mend it, or leave the file out")


@functools.cache
def _tell_skipped(path: Path, report: Path) -> None:
    """Warn of a file's broken lines and short documents, once in a process."""
    told = read_json(report)
    if told.get("short"):
        log.warning("%s: %d document(s) shorter than --min-chars %d left out", path, told["short"], told["min_chars"])
    if told.get("lines"):
        number, why = told["lines"][0]
        log.warning("%s: %d broken line(s) skipped, the first is line %d: %s (%s names more)", path, told["count"],
                    number, why, report)


def add_text_flags(parser: argparse.ArgumentParser, *, splits: bool = True) -> None:
    """Give the parser of a script that reads text its flags; `Reading.of(vars(args))` is what they
    say. `splits`: whether it takes training and validation data apart."""
    parser.add_argument("--text-field", default=TEXT_FIELD, metavar="NAME", help=FIELD_HELP)
    parser.add_argument("--min-chars", type=int, default=0, metavar="N", help=MIN_CHARS_HELP)
    if splits:
        parser.add_argument("--val-fraction", type=float, default=0.0, metavar="F", help=VAL_FRACTION_HELP)
