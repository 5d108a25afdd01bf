"""
Pretokenizing: text files are turned into token files once, so that training need not tokenize.

    RAW/web/2024/a.jsonl.gz  ->  texts  ->  ids  ->  windows  ->  OUT/train/web/2024__a.bin, .idx
    all inputs of a bucket   ---------------------------------->  OUT/train/web/manifest.json

A document of more than `max_length` ids is cut into windows. Each later window repeats the last
`overlap_size` ids of the window before it, and EOD ends the last one. With max_length 6 and
overlap_size 2:

    a b c d e f g h i j k EOD  ->  a b c d e f | e f g h i j | i j k EOD      prefixes 0, 2, 2

The tokenizer returns documents with BOS in front, and BOS and EOD are one id. Its output, shifted
by one place, is exactly what is stored, and windows are slices of that. So no Python code handles
single tokens.

**Which inputs are finished?** A process may be killed at any point, and several machines may work
at once. A list of finished inputs would need a lock, so there is no list: an input is finished when
its .idx exists. A record beside it (OUT/train/web/.records/2024__a.json, written before the pair
appears) names the input and the arguments that the pair was made from. If these have changed, the
pair is made again.

The names and bytes of pairs and manifests depend only on RAW, the tokenizer and the arguments, so
two processes may make the same pair. A manifest appears when all its pairs exist, and is deleted
before one of them is made again. All folders of records exist before the first pair, so a folder
with records and without a manifest is unfinished, and training refuses it (`files.unfinished`). An
input that cannot be read to its end has no pair. A batch in memory ends at 256 documents or two
million characters.

Rejected: converting jsonl to parquet first, as training from text does. The text would be written
once more.
"""

import contextlib
import functools
import itertools
import logging
import multiprocessing
import os
import signal
import threading
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from nanochat.common import (
    AnyPath,
    atomic_open,
    counted,
    differences,
    etag_of,
    fsync_dir,
    hash_file,
    make_folder,
    read_json,
    remove_leftovers,
    write_json,
)
from nanochat.files import MAGICS, MANIFEST_NAME, RECORDS
from nanochat.text import ALL, Selection, Skipped, read_footer, text_suffix
from nanochat.text_kinds import no_document, read_documents
from nanochat.tokenizer import CannotEncode, Tokenizer, get_tokenizer
from nanochat.tokens import (
    DTYPES,
    HEADERS,
    RECORD_SHAPE,
    TokenFile,
    new_manifest,
    pair_paths,
    record_groups,
    to_offsets,
)

log = logging.getLogger(__name__)

BATCH_DOCUMENTS, BATCH_CHARS = 256, 2_000_000  # a batch of texts ends at either limit
MAX_SEQUENCE = 2**31 - 1  # ids of a sequence in Megatron's format
MAX_PREFIX = 2**16 - 1  # the index stores prefixes as uint16
TOKENIZER = "tokenizer"  # the folder beside the splits
Record = dict[str, Any]
RECORDED = {
    "made_with": dict,
    "source": {"name": str},
    "shard": {**RECORD_SHAPE, "skipped": {"count": int, "lines": list}},
}
NOTHING: Record = {  # the shard of an input without documents for its split
    "documents": 0,
    "entries": 0,
    "tokens": 0,
    "skipped": {"count": 0, "lines": []},
    "bin_bytes": 0,
    "bin_hash": "",
    "idx_hash": "",
}


# ---- writing a pair ------------------------------------------------------------------------------


class TokenWriter:
    """The part that both formats share: the .bin, and how a pair is put in place.

    Takes about 10 bytes of memory per entry. ValueError for ids outside the vocabulary or the range
    of the type: they never wrap around.

    Ids go to a temporary file as they arrive. When the `with` block ends without an exception, the
    .bin is renamed first and the .idx last: a pair without a good .idx counts as missing. An
    exception leaves no new file, and an older pair is unchanged or has lost its .idx.

        with ShardWriter("OUT/web", vocab_size=32768) as writer:        .web.bin.1f2e3d4c.tmp grows
            writer.add(ids, lengths, prefixes)                          ...
        writer.written                                                  web.bin, then web.idx

    Several processes may write the same pair at once, since they write the same bytes. An old .idx
    with different contents is deleted before the new .bin appears, so that a .bin and its .idx
    always match. An identical one stays, so the pair never seems to be missing.
    """

    format: ClassVar[str]  # one of `tokens.HEADERS`

    def __init__(self, prefix: Path | str, *, vocab_size: int, dtype: DTypeLike):
        self.bin_path, self.idx_path = map(Path, pair_paths(prefix))
        self.dtype = np.dtype(dtype)
        codes = DTYPES[self.format]
        self.code = next((code for code, known in codes.items() if known == self.dtype), 0)
        if not self.code:
            raise ValueError(
                f"{self.bin_path}: ids of type {self.dtype.name}, expected one of "
                f"{', '.join(codes.values())}"
            )
        self.limit = min(vocab_size, int(np.iinfo(self.dtype).max) + 1)
        # sizes and hashes of the finished pair, as in manifest.json
        self.written: dict[str, Any] = {}
        self.lengths = array("q")
        self._hash = blake2b(digest_size=16)
        self._num_bytes = 0
        self._files = contextlib.ExitStack()  # closes in reverse order: the .idx appears last
        self._idx = self._files.enter_context(atomic_open(self.idx_path))
        self._bin = self._files.enter_context(atomic_open(self.bin_path))

    def append(self, ids: ArrayLike, lengths: ArrayLike) -> None:
        """Append the ids of some entries or sequences (sum of lengths,), and their lengths (n,)."""
        ids = np.asarray(ids).reshape(-1)
        lengths = np.asarray(lengths, np.int64)
        if lengths.sum() != len(ids) or lengths.min(initial=0) < 0:
            raise ValueError(
                f"{self.bin_path}: got {len(ids):,} ids, but lengths that add up to {lengths.sum():,}; "
                f"expected the same number"
            )
        lowest, highest = (ids.min(), ids.max()) if len(ids) else (0, 0)
        are_integers = len(ids) == 0 or ids.dtype.kind in "iu"
        fit = lowest >= np.iinfo(self.dtype).min and highest < self.limit
        if not are_integers or not fit:
            raise ValueError(
                f"{self.bin_path}: got {ids.dtype.name} ids {lowest} .. {highest}, expected integers "
                f"below {self.limit:,} that fit {self.dtype.name}; check that this tokenizer made them"
            )
        data = np.ascontiguousarray(ids, self.dtype).data
        self._bin.write(data)
        self._hash.update(data)
        self._num_bytes += data.nbytes
        self.lengths.frombytes(lengths.tobytes())

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        """Append entries.

        ids: one entry after another, (sum of lengths,). lengths: (n,). prefixes: how many leading
        ids of each entry repeat the previous one, (n,).
        """
        raise NotImplementedError

    def index(self) -> tuple[int, list[Any]]:
        """(number of entries, the parts of the .idx)."""
        raise NotImplementedError

    def finish(self) -> dict[str, Any]:
        """Write the index, and return `written`.

        If the disk is full, this fails while an old pair is still unchanged. The new pair has not
        appeared yet, so the caller can still write files that must exist before it.
        """
        entries, parts = self.index()
        digest = blake2b(digest_size=16)
        for part in parts:
            self._idx.write(part)
            digest.update(part)
        for f in (self._bin, self._idx):
            f.flush()
            os.fsync(f.fileno())
        self.written = {
            "entries": entries,
            "tokens": self._num_bytes // self.dtype.itemsize,
            "bin_bytes": self._num_bytes,
            "bin_hash": self._hash.hexdigest(),
            "idx_hash": digest.hexdigest(),
        }
        return self.written

    def commit(self) -> None:
        """Rename both files into place, the .idx last."""
        with self._files:
            written = self.written or self.finish()
            # no old .idx, or another process deleted it
            with contextlib.suppress(FileNotFoundError):
                if hash_file(self.idx_path) != written["idx_hash"]:
                    self.idx_path.unlink()
            # after power loss, too, whoever deleted it
            fsync_dir(self.idx_path.parent)

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.commit()
        else:
            self._files.__exit__(kind, error, trace)


class ShardWriter(TokenWriter):
    """Writes shards in the format GPTS.

    `dtype` replaces the default (uint16, or uint32 above 65,535 ids).
    """

    format = "shards"

    def __init__(self, prefix: Path | str, *, vocab_size: int, dtype: DTypeLike | None = None):
        default = DTYPES["shards"][2 if vocab_size <= 65535 else 4]
        super().__init__(prefix, vocab_size=vocab_size, dtype=dtype or default)
        self._prefixes = array("H")

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        """See `TokenWriter.add`; ValueError unless each entry has a prefix from 0 to MAX_PREFIX."""
        prefixes = np.asarray(prefixes)
        fits = prefixes.min(initial=0) >= 0 and prefixes.max(initial=0) <= MAX_PREFIX
        if len(lengths) != len(prefixes) or not fits:
            raise ValueError(
                f"{self.bin_path}: got {len(prefixes):,} prefixes for {len(lengths):,} entries, expected "
                f"one for each, in 0 .. {MAX_PREFIX:,}"
            )
        self.append(ids, lengths)
        self._prefixes.frombytes(prefixes.astype(np.uint16).tobytes())

    def index(self) -> tuple[int, list[Any]]:
        """See `TokenWriter.index`; ValueError for no entries, or 2^32 or more."""
        n = len(self.lengths)
        if not 0 < n < 1 << 32:
            raise ValueError(
                f"{self.bin_path}: {n:,} entries, expected 1 to {(1 << 32) - 1:,}; remove an input "
                f"without documents, or split one with too many"
            )
        header = HEADERS["shards"].pack(MAGICS["shards"], 1, self.code, n)
        offsets = to_offsets(np.frombuffer(self.lengths, np.int64))
        return n, [header, offsets.data, self._prefixes]


class MegatronWriter(TokenWriter):
    """Writes Megatron's format.

    `dtype` replaces the default, which is Megatron's: uint16, or int32 from 65,500 ids on.

    `add` makes each entry a document of one sequence. For documents of several sequences, call
    `append` with the sequences, then `end_documents`.
    """

    format = "megatron"

    def __init__(
        self, prefix: Path | str, *, vocab_size: int = 1 << 63, dtype: DTypeLike | None = None
    ):
        default = DTYPES["megatron"][8 if vocab_size < 65500 else 4]
        super().__init__(prefix, vocab_size=vocab_size, dtype=dtype or default)
        self._boundaries = array("q", [0])
        self.modes: array[int] | None = None  # of multimodal data: one number for each sequence

    def end_documents(self, counts: Iterable[int]) -> None:
        """Group the sequences since the last document into documents of `counts` sequences."""
        for count in counts:
            self._boundaries.append(self._boundaries[-1] + int(count))

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        """See `TokenWriter.add`; ValueError if an entry repeats earlier ids."""
        if np.count_nonzero(prefixes):
            raise ValueError(
                f"{self.bin_path}: some entries repeat earlier ids, but Megatron's format holds whole "
                f"documents only; write them without repeats"
            )
        self.append(ids, lengths)
        self.end_documents([1] * len(lengths))

    def index(self) -> tuple[int, list[Any]]:
        """See `TokenWriter.index`; ValueError if the last document has not ended."""
        n = len(self.lengths)
        documents = len(self._boundaries) - 1
        if self._boundaries[-1] != n:
            raise ValueError(
                f"{self.bin_path}: {counted(n - self._boundaries[-1], 'sequence')} after the last "
                f"document; end the document before closing the file"
            )
        lengths = np.frombuffer(self.lengths, np.int64)
        if lengths.max(initial=0) > MAX_SEQUENCE:
            raise ValueError(
                f"{self.bin_path}: a sequence of more than {MAX_SEQUENCE:,} ids, which Megatron's format "
                f"cannot hold; split it into several"
            )
        pointers = to_offsets(lengths * self.dtype.itemsize)[:-1]
        header = HEADERS["megatron"].pack(MAGICS["megatron"], 1, self.code, n, documents + 1)
        parts = [header, lengths.astype(np.int32).data, pointers.data, self._boundaries]
        if self.modes is not None:
            parts.append(self.modes)
        return documents, parts


Writer: TypeAlias = type[ShardWriter] | type[MegatronWriter]
WRITERS: dict[str, Writer] = {"shards": ShardWriter, "megatron": MegatronWriter}


# ---- windows ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Windows:
    """How documents are cut: into windows of at most `max_length` ids (0: one window).

    EOD follows the last window. Later windows repeat `overlap_size` ids; an overlap above half a
    window is lowered to half, with a warning. ValueError for impossible values.
    """

    max_length: int = 0
    overlap_size: int = 256

    def __post_init__(self) -> None:
        if self.max_length < 0 or self.overlap_size < 0:
            raise ValueError(
                f"--max-length {self.max_length}, --overlap-size {self.overlap_size}: expected 0 or more"
            )
        half = self.max_length // 2
        # whole documents do not overlap, so every overlap_size gives the same pairs
        if self.max_length == 0:
            object.__setattr__(self, "overlap_size", 0)
        elif self.overlap_size > half:  # then windows would repeat more than they add
            log.warning(
                "--overlap-size %d: more than half of --max-length %d, so %d is used",
                self.overlap_size,
                self.max_length,
                half,
            )
            object.__setattr__(self, "overlap_size", half)
        if self.overlap_size > MAX_PREFIX:
            raise ValueError(
                f"--overlap-size {self.overlap_size:,}: expected at most {MAX_PREFIX:,}, the largest that "
                f"the index can hold"
            )

    def cut(
        self, ids: np.ndarray, offsets: np.ndarray, eod: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The windows of documents from `encode_flat`, as `TokenWriter.add` takes them.

        ids: (num_tokens,); offsets: (num_documents + 1,), where the documents begin and end. Each
        begins with BOS, the same id as `eod`.
        """
        windows = []  # (begin, end, prefix)
        for begin, end in pairwise(offsets.tolist()):
            prefix = 0
            while self.max_length and end - begin > self.max_length + 1:  # 1 for EOD
                windows.append((begin, begin + self.max_length, prefix))
                begin += self.max_length - self.overlap_size
                prefix = self.overlap_size
            windows.append((begin, end, prefix))

        # dropping the first BOS turns each later one into the EOD of the document before it
        shifted = np.append(ids[1:], ids.dtype.type(eod))
        cut_ids = np.concatenate([shifted[begin:end] for begin, end, _ in windows])
        begins, ends, prefixes = np.array(windows, np.int64).T
        return cut_ids, ends - begins, prefixes.astype(np.uint16)


def _batch(texts: Iterator[str]) -> list[str]:
    """The next batch of texts, [] at the end."""
    batch = []
    num_chars = 0
    for text in itertools.islice(texts, BATCH_DOCUMENTS):
        batch.append(text)
        num_chars += len(text)
        if num_chars >= BATCH_CHARS:
            break
    return batch


# ---- inputs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """A text file and the place of its pair: OUT/`split`/`bucket`/`stem`.bin."""

    path: AnyPath
    name: str  # relative to RAW
    split: str
    bucket: str
    stem: str
    size: int

    def prefix(self, output: Path) -> Path:
        """The pair's path without extension."""
        return output / self.split / self.bucket / self.stem

    def record(self, output: Path) -> Path:
        """The path of the record of a finished pair."""
        return output / self.split / self.bucket / RECORDS / f"{self.stem}.json"

    def stamp(self) -> Record:
        """Name, size and time of the file now: equal stamps mean equal contents."""
        stat = self.path.stat()
        stamp = {"name": self.name, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        return {**stamp, **etag_of(self.path)}


@functools.lru_cache(maxsize=1)
def _load_same(folder: Path, fingerprint: str) -> Tokenizer:
    """The tokenizer in a folder, loaded once per process; ValueError if its fingerprint differs."""
    tokenizer = get_tokenizer(folder)
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(
            f"{folder}: the tokenizer changed while shards were being made; run the same command again"
        )
    return tokenizer


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer as a manifest describes it."""
    return {
        "fingerprint": tokenizer.fingerprint,
        "eod": tokenizer.get_bos_token_id(),
        "vocab_size": tokenizer.get_vocab_size(),
    }


# ---- all inputs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pretokenizer:
    """Makes the pairs of some inputs in `output`.

    It is plain data, so that it can be sent to other processes.
    """

    output: Path
    inputs: Sequence[Input]
    windows: Windows
    # from `describe_tokenizer`; the tokenizer itself is in output/tokenizer
    tokenizer: dict[str, Any]
    data_format: str = "shards"
    selection: Selection = ALL
    on_hub: str = ""  # the folder of the inputs at a commit, if it is on the Hub

    @property
    def made_with(self) -> Record:
        """The arguments that all pairs share.

        Format and selection are listed if they differ from the defaults, and the folder of the inputs
        if it is on the Hub: a branch moves on, and pairs of two commits must not mix.
        """
        made_with = asdict(self.windows)
        made_with["tokenizer"] = self.tokenizer["fingerprint"]
        if self.data_format != "shards":
            made_with["data_format"] = self.data_format
        if self.on_hub:
            made_with["input_dir"] = self.on_hub
        return made_with | self.selection.named()

    def prepare(self) -> None:
        """Make the folders, and delete leftovers of killed processes."""
        for i in self.inputs:
            make_folder(i.record(self.output).parent)
        self.clean_up()

    def finished(self, i: Input) -> Record | None:
        """The record of an input whose pair exists and is up to date, otherwise None.

        The pair's bytes are not read. An input without documents for its split has no pair.
        """
        try:
            record = read_json(i.record(self.output), RECORDED)
            shard = record["shard"]
            is_whole = True
            if shard["entries"]:
                pair = TokenFile(pair_paths(i.prefix(self.output))[0])
                is_whole = (len(pair), pair.num_bytes) == (shard["entries"], shard["bin_bytes"])
        except (FileNotFoundError, ValueError):
            return None
        is_same = record["made_with"] == self.made_with and record["source"] == i.stamp()
        skips_some = shard["skipped"]["count"] or shard["skipped"].get("nulls")
        is_refused = self.selection.strict and skips_some
        return record if is_same and is_whole and not is_refused else None

    def make(self, i: Input) -> Record:
        """Make the pair of an input, unless it is finished, and return its record.

        ValueError for a bad input, OSError if the pair cannot be written. In both cases there is no
        pair.
        """
        prefix = i.prefix(self.output)
        bin_path, idx_path = map(Path, pair_paths(prefix))
        # before the record is read: another process may finish the pair after that
        had_index = idx_path.exists()
        record = self.finished(i)
        if record is not None:
            return record
        prefix.with_name(MANIFEST_NAME).unlink(missing_ok=True)
        if had_index:
            idx_path.unlink(missing_ok=True)
            bin_path.unlink(missing_ok=True)
        selection = self.selection.for_split(i.split)
        if selection.part and next(read_documents(i.path, selection), None) is None:
            # with --val-fraction, a small file has documents for training only
            shard = {**NOTHING, "input": {"name": i.name, "size": i.size}}
            return self._store(i, i.stamp(), shard)
        tokenizer = _load_same(self.output / TOKENIZER, self.tokenizer["fingerprint"])
        with WRITERS[self.data_format](prefix, vocab_size=tokenizer.get_vocab_size()) as writer:
            return self._write(i, tokenizer, writer)

    def _store(self, i: Input, source: Record, shard: Record) -> Record:
        """Write the record of an input, and return it."""
        record = {"made_with": self.made_with, "source": source, "shard": shard}
        write_json(i.record(self.output), record, sort_keys=True)
        return record

    def _write(self, i: Input, tokenizer: Tokenizer, writer: TokenWriter) -> Record:
        """Write the pair under temporary names, and its record."""
        source = i.stamp()
        selection = self.selection.for_split(i.split)
        skipped: Skipped = {}

        # the ids
        documents = 0
        text_bytes = 0
        texts_of_input = read_documents(i.path, selection, skipped)
        while texts := _batch(texts_of_input):
            try:
                ids, offsets = tokenizer.encode_flat(texts, num_threads=1)
            except CannotEncode as e:
                raise ValueError(
                    f"{i.path}: document {documents + e.number} (counted from 0): {e.reason}"
                ) from None
            writer.add(*self.windows.cut(ids, offsets, tokenizer.get_bos_token_id()))
            documents += len(texts)
            text_bytes += sum(len(text.encode()) for text in texts)
        if i.stamp() != source:
            raise ValueError(
                f"{i.path}: it changed while being read; run the same command again when it is complete"
            )
        if not documents:
            raise no_document([i.path], selection, skipped)
        if not selection.min_chars:
            del skipped["short"]

        # the record
        shard = {
            "input": {"name": i.name, "size": source["size"]},
            **writer.finish(),
            "documents": documents,
            "skipped": skipped,
        }
        # keep the text's groups and size: rows then equal those made from text
        if self.windows.max_length == 0:
            is_parquet = text_suffix(i.path.name) == ".parquet"
            skips_some = selection.skips_some or skipped.get("nulls")
            if is_parquet and not skips_some:  # otherwise, training reads a prepared file
                footer = read_footer(i.path, selection.text_field)
                text_bytes = footer.text_bytes
                groups = [n for n in footer.counts if n]
                if groups != record_groups(None, documents):
                    shard["groups"] = groups
            shard["text_bytes"] = text_bytes
        return self._store(i, source, shard)

    def make_all(
        self, todo: Sequence[Input], *, num_workers: int
    ) -> Generator[tuple[Input, Record | str], None, None]:
        """Yield (input, its record or the error message) as inputs finish.

        If there are two or more workers, they are processes, which end when the caller ends and may
        be killed at any time.
        """
        if min(num_workers, len(todo)) < 2:
            for i in todo:
                yield i, _record_or_error(functools.partial(self.make, i))
            return
        spawn = multiprocessing.get_context("spawn")  # a fork copies locks that other threads hold
        # pickled once per input, so without all the other inputs
        make = replace(self, inputs=()).make
        with ProcessPoolExecutor(min(num_workers, len(todo)), spawn, _begin_worker) as pool:
            try:
                with _without_interrupts():
                    futures = {pool.submit(make, i): i for i in todo}
                    # makes the pool watch its newest worker; otherwise its death could go unnoticed
                    pool.submit(int)
                for future in as_completed(futures):
                    yield futures[future], _record_or_error(future.result)
            except BaseException:  # also GeneratorExit: the caller has stopped early
                for worker in multiprocessing.active_children():
                    worker.kill()
                pool.shutdown(cancel_futures=True)
                raise

    def refuse_others(self) -> None:
        """ValueError if the output has pairs made from other inputs or in another way.

        Another way: with other arguments, or another tokenizer.
        """
        planned = {i.record(self.output) for i in self.inputs}
        for path in sorted(self.output.glob(f"*/*/{RECORDS}/*.json")):
            pair = f"{path.parents[1] / path.stem}.bin"
            old = new = self.made_with
            with contextlib.suppress(ValueError):  # the pair of a corrupt record is made again
                old = read_json(path, RECORDED)["made_with"]
            was = old.get("input_dir", "")
            if was and self.on_hub not in ("", was):
                raise ValueError(
                    f"{pair}: made from {was}, but --input-dir is now {self.on_hub}; name "
                    f"--input-dir={was}, or for this data, another --output-dir"
                )
            if path not in planned:
                raise ValueError(
                    f"{pair}: the input that it was made from is no longer in --input-dir, or now belongs "
                    f"to another pair; restore the input, or name another --output-dir, or delete this "
                    f"pair and {path}"
                )
            differ = [
                f"{key} {'default' if was is None else was} (now {'default' if now is None else now})"
                for key, was, now in differences(old, new)
            ]
            if differ:
                raise ValueError(
                    f"{pair}: made with {', '.join(differ)}; name another --output-dir, or delete "
                    f"the pair"
                )

    def finish(self) -> list[Input]:
        """Write the manifest of each bucket whose pairs are all finished, if only to say that it has
        none, and delete the folders of buckets that have no input any more.

        Returns the unfinished inputs.
        """
        buckets: dict[Path, dict[str, Record]] = {}  # {folder: {stem: its record of the pair}}
        unfinished = []
        incomplete = set()  # folders
        for i in self.inputs:
            folder = i.prefix(self.output).parent
            record = self.finished(i)
            if record is None:
                unfinished.append(i)
                incomplete.add(folder)
                continue
            shards = buckets.setdefault(folder, {})
            if record["shard"]["entries"]:
                shards[i.stem] = record["shard"]

        arguments = asdict(self.windows) | self.selection.named()
        arguments.pop("text_field", None)
        for folder, shards in buckets.items():
            if folder not in incomplete:
                manifest = new_manifest(
                    self.tokenizer,
                    arguments,
                    shards,
                    data_format=self.data_format,
                    input_dir=self.on_hub,
                )
                write_json(folder / MANIFEST_NAME, manifest, sort_keys=True)
        self.clean_up()
        for records in self.output.glob(f"*/*/{RECORDS}"):
            if records.parent not in buckets.keys() | incomplete:
                with contextlib.suppress(OSError):  # it holds something else
                    records.rmdir()
                    records.parent.rmdir()
        return unfinished

    def clean_up(self, **kwargs: float) -> None:
        """Call `remove_leftovers` for each folder that has any."""
        for folder in {path.parent for path in self.output.rglob(".*.tmp")}:
            remove_leftovers(folder, **kwargs)


def _record_or_error(make: Callable[[], Record]) -> Record | str:
    """What `make` returns, or the message of its error."""
    try:
        return make()
    except BrokenProcessPool:
        return (
            "a worker process was killed, and the pool ended the others; run the same command again, with fewer "
            "--num-workers if memory is short"
        )
    except (ValueError, OSError) as e:
        return str(e)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Delay Ctrl-C. Processes that are started meanwhile never receive it, not even while they import
    this module, which takes a second."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _begin_worker() -> None:
    """Ignore Ctrl-C, which the caller handles, and end when the caller ends, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
