"""
Pretokenizing: a text file becomes a shard, once, so that training need not tokenize. `nanochat.shard_set` says which.

    RAW/web/2024/a.jsonl.gz  ->  batches of texts  ->  ids  ->  windows  ->  OUT/train/web/2024__a.bin and .idx

A document of more than `max_length` ids is cut into windows; each later one repeats the last `overlap_size` ids before
it, and EOD (the tokenizer's delimiter) stands after the last. With max_length 6, overlap_size 2:

    a b c d e f g h i j k EOD  ->  a b c d e f | e f g h i j | i j k EOD         prefixes 0, 2, 2

The tokenizer gives documents with BOS in front, and BOS and EOD are one id: shifted by one place, its output already is
what we store, and windows are runs of it that step back `overlap_size` places. So no token is touched in Python.

Invariants
- Every id of a document stands outside a prefix exactly once; an entry holds at most max_length + 1 ids.
- The bytes of a pair depend on the input's documents, the tokenizer, the windows and the format alone.
- A few megabytes of text are held at a time, however large the input (of parquet: what decoding a page takes).
- An input that cannot be read to its end has no shard. Broken lines of jsonl can be skipped and counted; what is no
  UTF-8 cannot, because then the file is probably not what it seems.

Rejected: jsonl through the cached parquet that streaming reads. The text would be written once more.
"""

import errno
import os
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nanochat.dataset import open_parquet, read_batches, read_jsonl
from nanochat.pairs import WRITERS
from nanochat.shards import record_groups

BATCH_CHARS = 2_000_000  # text tokenized at once: enough to drown what a batch costs, little enough to hold
BATCH_DOCUMENTS = 16_384
READ_DOCUMENTS = 256  # of a parquet row group at once
LISTED_LINES = 100  # broken lines that a record names
MAX_PREFIX = 2**16 - 1  # the index stores prefixes as uint16


class Tokenizer(Protocol):
    """What pretokenizing needs of a tokenizer; its BOS is our EOD."""

    @property
    def fingerprint(self) -> str: ...

    def get_bos_token_id(self) -> int: ...

    def get_vocab_size(self) -> int: ...

    def encode_flat(self, texts: list[str], *, num_threads: int = ...) -> tuple[np.ndarray, np.ndarray]: ...


# ---- windows --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Windows:
    """How documents are cut: at most `max_length` ids a window (0: documents stay whole), of which later windows repeat
    `overlap_size`. ValueError where these make no sense."""

    max_length: int = 2048
    overlap_size: int = 256

    def __post_init__(self) -> None:
        if self.max_length < 0 or self.overlap_size < 0:
            raise ValueError(f"--max-length {self.max_length}, --overlap-size {self.overlap_size}: expected 0 or more")
        if self.max_length == 0:
            object.__setattr__(self, "overlap_size", 0)  # there is nothing to overlap: the same shards, so the same
        if self.overlap_size > min(self.max_length // 2, MAX_PREFIX):
            raise ValueError(f"--overlap-size {self.overlap_size:,}: expected at most half of --max-length "
                             f"{self.max_length:,}, and at most {MAX_PREFIX:,}; take a smaller overlap")

    def cut(self, ids: np.ndarray, offsets: np.ndarray, eod: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cut documents as `encode_flat` gives them: ids (num_tokens,), offsets (num_documents + 1,), each document
        with BOS (the same id as `eod`) in front.

        Returns (ids (sum of lengths,), lengths (num_windows,) int64, prefixes (num_windows,) uint16).
        """
        shifted = np.append(ids[1:], ids.dtype.type(eod))
        spans = np.diff(offsets)  # ids of each document with its EOD
        if not self.max_length:
            return shifted, spans, np.zeros(len(spans), np.uint16)
        step = self.max_length - self.overlap_size
        num_windows = 1 + np.maximum(0, -((self.max_length + 1 - spans) // step))  # 1 + ceil(ids beyond / step)
        document = np.repeat(np.arange(len(spans)), num_windows)
        nth = np.arange(len(document)) - np.repeat(np.cumsum(num_windows) - num_windows, num_windows)
        starts = offsets[document] + nth * step
        ends = np.where(nth + 1 == num_windows[document], offsets[document + 1], starts + self.max_length)
        later = np.flatnonzero(nth)
        if len(later) and self.overlap_size:
            runs = zip([0, *starts[later].tolist()], [*(starts[later] + self.overlap_size).tolist(), len(shifted)])
            shifted = np.concatenate([shifted[a:b] for a, b in runs])
        return shifted, ends - starts, np.where(nth > 0, self.overlap_size, 0).astype(np.uint16)


# ---- reading --------------------------------------------------------------------------------------------------------

@dataclass
class Skipped:
    """Broken lines: how many, and (number from 1, why) of the first."""

    count: int = 0
    lines: list[tuple[int, str]] = field(default_factory=list)

    def add(self, number: int, why: str) -> None:
        self.count += 1
        if len(self.lines) < LISTED_LINES:
            self.lines.append((number, why))


def read_documents(path: Path, skipped: Skipped, *, strict: bool = False) -> Iterator[tuple[list[str], int]]:
    """(texts, bytes of the file read so far), in batches. Broken jsonl lines go to `skipped`, or with `strict` the
    first is fatal. ValueError names the file and the row group or line that cannot be read."""
    texts: list[str] = []
    num_chars = position = 0
    documents = _read_parquet(path) if path.name.endswith(".parquet") else _read_jsonl(path, skipped, strict=strict)
    for text, position in _naming(path, documents):
        texts.append(text)
        num_chars += len(text)
        if num_chars >= BATCH_CHARS or len(texts) >= BATCH_DOCUMENTS:
            yield texts, position
            texts, num_chars = [], 0
    if texts:
        yield texts, position


def _naming(path: Path, documents: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    try:
        yield from documents
    except (ValueError, OSError) as e:
        raise ValueError(str(e) if str(path) in str(e) else f"{path}: {e}") from e


def _read_parquet(path: Path) -> Iterator[tuple[str, int]]:
    with open_parquet(path) as file:
        size, row = path.stat().st_size, 0
        for group in range(file.num_row_groups):
            for column in read_batches(file, group, path, batch_size=READ_DOCUMENTS):
                row += len(column)
                position = size * row // file.metadata.num_rows
                for text in column.to_pylist():
                    yield text, position


def _read_jsonl(path: Path, skipped: Skipped, *, strict: bool) -> Iterator[tuple[str, int]]:
    for line in read_jsonl(path, strict=strict):
        if line.text is None:
            skipped.add(line.number, line.problem)
        else:
            yield line.text, line.position


# ---- one input ------------------------------------------------------------------------------------------------------

def pretokenize(path: Path, pair: Path, *, tokenizer: Tokenizer, windows: Windows, strict: bool = False,
                data_format: str = "shards") -> Generator[tuple[int, int], None, dict[str, Any]]:
    """Make the shard `pair`.bin, `pair`.idx of a text file, in a format of `pairs.WRITERS`. A generator: yields (bytes
    of input read, tokens written) since it last did, returns what manifest.json says of the shard.

    Raises ValueError where the input cannot be used, OSError where the shard cannot be written; then there is none.
    """
    skipped = Skipped()
    before = path.stat()
    at = documents = 0
    try:
        with WRITERS[data_format](pair, vocab_size=tokenizer.get_vocab_size()) as writer:
            for texts, position in read_documents(path, skipped, strict=strict):
                ids, lengths, prefixes = windows.cut(*tokenizer.encode_flat(texts, num_threads=1),
                                                     tokenizer.get_bos_token_id())
                writer.add(ids, lengths, prefixes)
                documents += len(texts)
                yield position - at, len(ids)
                at = position
            _check_input(path, before, documents, skipped)
    except OSError as e:
        full = ", make room" if e.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise OSError(f"{pair}.bin: cannot be written ({e.strerror or e}){full} and run the same command again; what "
                      f"is finished is kept") from e
    assert writer.written is not None
    yield before.st_size - at, 0
    record = {**asdict(writer.written), "documents": documents, "skipped": asdict(skipped)}
    groups = _row_groups(path) if windows.max_length == 0 else None
    return record if groups in (None, record_groups(None, documents)) else {**record, "groups": groups}


def _check_input(path: Path, before: os.stat_result, documents: int, skipped: Skipped) -> None:
    """What is known only when all is read, and must be before the shard appears."""
    after = path.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ValueError(f"{path}: it changed while it was read; run the same command again when it is whole")
    if not documents:
        broken = "".join(f", line {number}: {why}" for number, why in skipped.lines[:1])
        raise ValueError(f"{path}: no document in it ({skipped.count:,} broken lines{broken}); delete it or make it "
                         f"again")


def _row_groups(path: Path) -> list[int] | None:
    """Documents in each row group, without those that have none; None for jsonl."""
    if not path.name.endswith(".parquet"):
        return None
    with open_parquet(path) as file:
        counts = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
    return [n for n in counts if n]
