"""
Pretokenizing: text files become token files, once, so that training need not tokenize.

    RAW/web/2024/a.jsonl.gz  ->  texts  ->  ids  ->  windows  ->  OUT/train/web/2024__a.bin, .idx
    all inputs of a bucket   ---------------------------------->  OUT/train/web/manifest.json

A document of more than `max_length` ids is cut into windows. Each later one repeats the last
`overlap_size` ids before it, and EOD stands after the last. With max_length 6, overlap_size 2:

    a b c d e f g h i j k EOD  ->  a b c d e f | e f g h i j | i j k EOD      prefixes 0, 2, 2

The tokenizer gives documents with BOS in front, and BOS and EOD are one id. Shifted by one place
its output already is what we store, and windows are runs of it. So Python touches no single token.

**Which inputs are finished?** A process may be killed at any point, and several machines may work at
once. A list of finished inputs would need a lock, so there is none: an input is finished when its .idx
exists. A record beside it (OUT/train/web/.records/2024__a.json, written before the pair appears) names
the file and the arguments that it was made from. If these differ, the pair is made again.

Names and bytes of pairs and manifests depend on RAW, the tokenizer and the arguments alone, so two
processes may make the same pair. A manifest appears when all its pairs exist, and is deleted before one
is made again. An input that cannot be read to its end has no pair. The text of at most 256 documents,
or of two million characters, is in memory at a time.

**Writing a pair.** Ids go to a temporary file as they come. When the `with` block ends without an
exception, the .bin is renamed, and the .idx last: a pair without a good .idx does not exist. After an
exception nothing is left, and an older pair is unchanged or has lost its .idx.

    with ShardWriter("OUT/web", vocab_size=32768) as writer:        .web.bin.1f2e3d4c.tmp grows
        writer.add(ids, lengths, prefixes)                          ...
    writer.written                                                  web.bin, then web.idx

Several processes may write the same pair at once, since they write the same bytes. An old .idx is
deleted before the new .bin appears, so that the two never belong to different data. If it is the same
it stays, so the pair never seems to be missing.

Rejected: jsonl through the cached parquet that streaming reads. The text would be written twice.
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
from typing import Any, ClassVar

import numpy as np

from nanochat.common import atomic_open, etag_of, fsync_dir, hash_file, read_json, remove_leftovers, write_json
from nanochat.text import ALL, Selection, read_footer
from nanochat.text_kinds import no_document, read_documents
from nanochat.tokenizer import CannotEncode, Tokenizer, get_tokenizer
from nanochat.tokens import (
    DTYPES,
    HEADERS,
    MAGICS,
    MANIFEST_NAME,
    RECORD_SHAPE,
    TokenFile,
    new_manifest,
    pair_paths,
    record_groups,
    running,
)

log = logging.getLogger(__name__)

BATCH_DOCUMENTS, BATCH_CHARS = 256, 2_000_000  # tokenized at once: until one of them is reached
MAX_SEQUENCE = 2**31 - 1  # ids of a sequence in Megatron's format
MAX_PREFIX = 2**16 - 1  # the index stores prefixes as uint16
RECORDS, TOKENIZER = ".records", "tokenizer"  # folders beside the pairs, and beside the splits
Record = dict[str, Any]
RECORDED = {"made_with": dict, "source": {"name": str},
            "shard": {**RECORD_SHAPE, "skipped": {"count": int, "lines": list}}}


# ---- writing a pair -------------------------------------------------------------------------------

class TokenWriter:
    """What both formats have in common: the .bin, and how a pair appears. Memory: some 10 bytes an
    entry. ValueError for ids outside the vocabulary or beyond the type: they never wrap around."""

    format: ClassVar[str]  # one of `tokens.HEADERS`

    def __init__(self, prefix: Path | str, *, vocab_size: int, dtype: Any):
        self.bin_path, self.idx_path = pair_paths(prefix)
        self.dtype, codes = np.dtype(dtype), DTYPES[self.format]
        self.code = next((code for code, known in codes.items() if known == self.dtype), 0)
        if not self.code:
            raise ValueError(f"{self.bin_path}: ids of type {self.dtype.name}, expected one of "
                             f"{', '.join(codes.values())}")
        self.limit = min(vocab_size, int(np.iinfo(self.dtype).max) + 1)
        self.written: dict[str, Any] = {}  # what a finished pair holds, as manifest.json has it
        self.lengths = array("q")
        self._hash, self._num_bytes = blake2b(digest_size=16), 0
        self._files = contextlib.ExitStack()  # ends with what was opened last: the .idx appears last
        self._idx = self._files.enter_context(atomic_open(self.idx_path))
        self._bin = self._files.enter_context(atomic_open(self.bin_path))

    def append(self, ids: Any, lengths: Any) -> None:
        """Append ids, one stretch after another (sum of lengths,), and the lengths (n,)."""
        ids, lengths = np.asarray(ids).reshape(-1), np.asarray(lengths, np.int64)
        if lengths.sum() != len(ids) or lengths.min(initial=0) < 0:
            raise ValueError(f"{self.bin_path}: got {len(ids):,} ids, and lengths that add up to "
                             f"{lengths.sum():,}, expected as many")
        lowest, highest = (ids.min(), ids.max()) if len(ids) else (0, 0)
        whole = len(ids) == 0 or ids.dtype.kind in "iu"
        if not whole or lowest < np.iinfo(self.dtype).min or highest >= self.limit:
            raise ValueError(f"{self.bin_path}: got {ids.dtype.name} ids {lowest} .. {highest}, "
                             f"expected integers below {self.limit:,} that fit {self.dtype.name}; "
                             f"is it the tokenizer that they come from?")
        data = np.ascontiguousarray(ids, self.dtype).data
        self._bin.write(data)
        self._hash.update(data)
        self._num_bytes += data.nbytes
        self.lengths.frombytes(lengths.tobytes())

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        """Append entries: their ids, one entry after another (sum of lengths,), the lengths (n,),
        and how many first ids of each repeat the entry before (n,)."""
        raise NotImplementedError

    def index(self) -> tuple[int, list[Any]]:
        """(number of entries, the .idx, in parts)."""
        raise NotImplementedError

    def finish(self) -> dict[str, Any]:
        """Write the index. Nothing has appeared yet: a full disk shows here, while an old pair is
        untouched, and whatever is to be on disk before the pair counts can still be written."""
        entries, parts = self.index()
        digest = blake2b(digest_size=16)
        for part in parts:
            self._idx.write(part)
            digest.update(part)
        for f in (self._bin, self._idx):
            f.flush()
            os.fsync(f.fileno())
        self.written = {
            "entries": entries, "tokens": self._num_bytes // self.dtype.itemsize,
            "bin_bytes": self._num_bytes, "bin_hash": self._hash.hexdigest(),
            "idx_hash": digest.hexdigest()}
        return self.written

    def commit(self) -> None:
        """Let both files appear, the .idx last."""
        with self._files:
            written = self.written or self.finish()
            with contextlib.suppress(FileNotFoundError):  # no old .idx, or another process deleted it
                if hash_file(self.idx_path) != written["idx_hash"]:
                    self.idx_path.unlink()
                    fsync_dir(self.idx_path.parent)

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.commit()
        else:
            self._files.__exit__(kind, error, trace)


class ShardWriter(TokenWriter):
    """Writes GPTS. `dtype`: in place of uint16, or uint32 for more than 65,535 ids."""

    format = "shards"

    def __init__(self, prefix: Path | str, *, vocab_size: int, dtype: Any = None):
        default = DTYPES["shards"][2 if vocab_size <= 65535 else 4]
        super().__init__(prefix, vocab_size=vocab_size, dtype=dtype or default)
        self._prefixes = array("H")

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        prefixes = np.asarray(prefixes)
        fits = prefixes.min(initial=0) >= 0 and prefixes.max(initial=0) < 1 << 16
        if len(lengths) != len(prefixes) or not fits:
            raise ValueError(f"{self.bin_path}: got {len(prefixes):,} prefixes for "
                             f"{len(lengths):,} entries, expected one for each, of 0 .. 65,535")
        self.append(ids, lengths)
        self._prefixes.frombytes(prefixes.astype(np.uint16).tobytes())

    def index(self) -> tuple[int, list[Any]]:
        n = len(self.lengths)
        if not 0 < n < 1 << 32:
            raise ValueError(f"{self.bin_path}: {n:,} entries, expected 1 to {(1 << 32) - 1:,}; "
                             f"leave out an input without documents, cut one with too many")
        header = HEADERS["shards"].pack(MAGICS["shards"], 1, self.code, n)
        offsets = running(np.frombuffer(self.lengths, np.int64))
        return n, [header, offsets.data, self._prefixes]


class MegatronWriter(TokenWriter):
    """Writes Megatron's format. `dtype`: in place of uint16, or int32 from 65,500 ids on, which is
    Megatron's own choice.

    `add` makes each entry a document of one sequence. For documents of several, `append` their
    sequences, then `end_documents`.
    """

    format = "megatron"

    def __init__(self, prefix: Path | str, *, vocab_size: int = 1 << 63, dtype: Any = None):
        default = DTYPES["megatron"][8 if vocab_size < 65500 else 4]
        super().__init__(prefix, vocab_size=vocab_size, dtype=dtype or default)
        self._boundaries = array("q", [0])

    def end_documents(self, counts: Iterable[int]) -> None:
        """End documents, of so many sequences each, behind the last one that was ended."""
        for count in counts:
            self._boundaries.append(self._boundaries[-1] + int(count))

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        if np.count_nonzero(prefixes):
            raise ValueError(f"{self.bin_path}: entries that repeat others, but Megatron's format "
                             f"holds whole documents only")
        self.append(ids, lengths)
        self.end_documents([1] * len(lengths))

    def index(self) -> tuple[int, list[Any]]:
        """See `TokenWriter.index`; ValueError where sequences lie behind the last document."""
        n, documents = len(self.lengths), len(self._boundaries) - 1
        if self._boundaries[-1] != n:
            raise ValueError(f"{self.bin_path}: {n - self._boundaries[-1]:,} sequence(s) behind "
                             f"the last document; call end_document() before finalize()")
        lengths = np.frombuffer(self.lengths, np.int64)
        if lengths.max(initial=0) > MAX_SEQUENCE:
            raise ValueError(f"{self.bin_path}: a sequence of more than {MAX_SEQUENCE:,} ids, "
                             f"which Megatron's format cannot hold; cut it into several")
        pointers = running(lengths * self.dtype.itemsize)[:-1]
        header = HEADERS["megatron"].pack(MAGICS["megatron"], 1, self.code, n, documents + 1)
        return documents, [header, lengths.astype(np.int32).data, pointers.data, self._boundaries]


WRITERS: dict[str, type[ShardWriter] | type[MegatronWriter]] = {
    "shards": ShardWriter, "megatron": MegatronWriter}


# ---- windows ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Windows:
    """How documents are cut: at most `max_length` ids a window (0: documents stay whole), of which
    later windows repeat `overlap_size`, at most half of them: more is lowered with a warning.
    ValueError where these make no sense."""

    max_length: int = 2048
    overlap_size: int = 256

    def __post_init__(self) -> None:
        if self.max_length < 0 or self.overlap_size < 0:
            raise ValueError(f"--max-length {self.max_length}, --overlap-size {self.overlap_size}: "
                             f"expected 0 or more")
        if self.max_length == 0:  # there is nothing to overlap: the same pairs, so the same windows
            object.__setattr__(self, "overlap_size", 0)
        elif self.overlap_size > self.max_length // 2:  # then windows would repeat more than they add
            log.warning("--overlap-size %d: more than half of --max-length %d, so %d is used",
                        self.overlap_size, self.max_length, self.max_length // 2)
            object.__setattr__(self, "overlap_size", self.max_length // 2)
        if self.overlap_size > MAX_PREFIX:
            raise ValueError(f"--overlap-size {self.overlap_size:,}: expected at most {MAX_PREFIX:,}, "
                             f"which is what the index can hold")

    def cut(self, ids: np.ndarray, offsets: np.ndarray, eod: int
            ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cut documents as `encode_flat` gives them: ids (num_tokens,), and where each document
        begins, offsets (num_documents + 1,); BOS, the same id as `eod`, in front of each.

        Returns windows: ids (sum of lengths,), lengths (n,) int64, prefixes (n,) uint16.
        """
        windows = []  # (begin, end, prefix)
        for begin, end in pairwise(offsets.tolist()):
            prefix = 0
            while self.max_length and end - begin > self.max_length + 1:  # 1 for EOD
                windows.append((begin, begin + self.max_length, prefix))
                begin, prefix = begin + self.max_length - self.overlap_size, self.overlap_size
            windows.append((begin, end, prefix))
        shifted = np.append(ids[1:], ids.dtype.type(eod))
        begins, ends, prefixes = np.array(windows, np.int64).T
        cut = np.concatenate([shifted[begin:end] for begin, end, _ in windows])
        return cut, ends - begins, prefixes.astype(np.uint16)


def _batch(texts: Iterator[str]) -> list[str]:
    """The next texts that are tokenized at once, [] at the end."""
    batch, num_chars = [], 0
    for text in itertools.islice(texts, BATCH_DOCUMENTS):
        batch.append(text)
        num_chars += len(text)
        if num_chars >= BATCH_CHARS:
            break
    return batch


# ---- inputs -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Input:
    """A text file and where its pair goes: OUT/`split`/`bucket`/`stem`.bin."""

    path: Path
    name: str  # relative to RAW
    split: str
    bucket: str
    stem: str
    size: int

    def prefix(self, output: Path) -> Path:
        """The pair's path without ending."""
        return output / self.split / self.bucket / self.stem

    def record(self, output: Path) -> Path:
        return output / self.split / self.bucket / RECORDS / f"{self.stem}.json"


@functools.lru_cache(maxsize=1)
def _load_same(folder: Path, fingerprint: str) -> Tokenizer:
    """The tokenizer in a folder, once in a process; ValueError if it is not the one that it was."""
    tokenizer = get_tokenizer(folder)
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(f"{folder}: the tokenizer changed meanwhile; run the same command again")
    return tokenizer


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a manifest says of the tokenizer."""
    return {"fingerprint": tokenizer.fingerprint, "eod": tokenizer.get_bos_token_id(),
            "vocab_size": tokenizer.get_vocab_size()}


def _source(i: Input) -> Record:
    """What an input is like now; equal ones hold the same."""
    stat = i.path.stat()
    return {"name": i.name, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, **etag_of(i.path)}


# ---- all of them --------------------------------------------------------------------------------

@dataclass(frozen=True)
class Pretokenizer:
    """Makes the pairs in `output` that some inputs become. It is plain data, for other processes."""

    output: Path
    inputs: Sequence[Input]
    windows: Windows
    tokenizer: dict[str, Any]  # as `describe_tokenizer` gives it; it lies in output/tokenizer
    data_format: str = "shards"
    selection: Selection = ALL

    @property
    def made_with(self) -> Record:
        """What all pairs have in common; format and selection are named if they are not the defaults."""
        named = {} if self.data_format == "shards" else {"data_format": self.data_format}
        return {**asdict(self.windows), "tokenizer": self.tokenizer["fingerprint"], **named, **self.selection.named()}

    def prepare(self) -> None:
        """Make the folders, and take away what killed processes left."""
        for i in self.inputs:
            i.record(self.output).parent.mkdir(parents=True, exist_ok=True)
        self.clean_up()

    def finished(self, i: Input) -> Record | None:
        """The record of an input whose pair is there and would come out the same again; its bytes
        are not read."""
        try:
            record = read_json(i.record(self.output), RECORDED)
            pair = TokenFile(pair_paths(i.prefix(self.output))[0])
        except (FileNotFoundError, ValueError):
            return None
        shard = record["shard"]
        same = record["made_with"] == self.made_with and record["source"] == _source(i)
        whole = (len(pair), pair.num_bytes) == (shard["entries"], shard["bin_bytes"])
        broken = self.selection.strict and shard["skipped"]["count"]
        return record if same and whole and not broken else None

    def make(self, i: Input) -> Record:
        """Make the pair of an input, unless it is finished; returns its record. ValueError where
        the input cannot be used, OSError where the pair cannot be written. Then there is none."""
        prefix = i.prefix(self.output)
        bin_path, idx_path = pair_paths(prefix)
        had_index = idx_path.exists()
        if record := self.finished(i):
            return record
        prefix.with_name(MANIFEST_NAME).unlink(missing_ok=True)
        if had_index:  # asked before the record was read: another process may just have made it
            idx_path.unlink(missing_ok=True)
            bin_path.unlink(missing_ok=True)
        tokenizer = _load_same(self.output / TOKENIZER, self.tokenizer["fingerprint"])
        with WRITERS[self.data_format](prefix, vocab_size=tokenizer.get_vocab_size()) as writer:
            return self._write(i, tokenizer, writer)

    def _write(self, i: Input, tokenizer: Tokenizer, writer: TokenWriter) -> Record:
        """Write the pair, which has not appeared yet, and the record, which is returned."""
        documents, text_bytes, source, selection = 0, 0, _source(i), self.selection.for_split(i.split)
        skipped: Record = {}
        texts_of_input = read_documents(i.path, selection, skipped)
        while texts := _batch(texts_of_input):
            try:
                ids, offsets = tokenizer.encode_flat(texts, num_threads=1)
            except CannotEncode as e:
                raise ValueError(f"{i.path}: document {documents + e.number} (counted from 0): {e.reason}") from None
            writer.add(*self.windows.cut(ids, offsets, tokenizer.get_bos_token_id()))
            documents += len(texts)
            text_bytes += sum(len(text.encode()) for text in texts)
        if _source(i) != source:
            raise ValueError(f"{i.path}: it changed while it was read; run the same command again "
                             f"when it is whole")
        if not documents:
            raise no_document(i.path, selection, skipped)
        if not selection.min_chars:
            del skipped["short"]
        shard = {"input": {"name": i.name, "size": source["size"]}, **writer.finish(),
                 "documents": documents, "skipped": skipped}
        if self.windows.max_length == 0:  # what text training estimates and counts, so that rows are the same
            if i.path.name.endswith(".parquet") and not selection.skips_some:
                _, counts, text_bytes = read_footer(i.path, selection.text_field)
                if (groups := [n for n in counts if n]) != record_groups(None, documents):
                    shard["groups"] = groups
            shard["text_bytes"] = text_bytes
        record = {"made_with": self.made_with, "source": source, "shard": shard}
        write_json(i.record(self.output), record, sort_keys=True)
        return record

    def make_all(self, todo: Sequence[Input], *, num_workers: int
                 ) -> Generator[tuple[Input, Record | str], None, None]:
        """(input, what `make` gave, or why it failed) as they come. With several workers each is a
        process. They end when the caller does, whatever ends it; they may be killed at any time."""
        if min(num_workers, len(todo)) < 2:
            for i in todo:
                yield i, _made_or_why(functools.partial(self.make, i))
            return
        spawn = multiprocessing.get_context("spawn")  # a fork copies locks that other threads hold
        make = replace(self, inputs=()).make  # a worker gets this with each of its inputs
        with ProcessPoolExecutor(min(num_workers, len(todo)), spawn, _begin_worker) as pool:
            futures = {pool.submit(make, i): i for i in todo}
            pool.submit(int)  # has the pool look at its workers: else it may not know the newest
            try:
                for future in as_completed(futures):
                    yield futures[future], _made_or_why(future.result)
            except BaseException:  # also where nobody asks for more
                for worker in multiprocessing.active_children():
                    worker.kill()
                pool.shutdown(cancel_futures=True)
                raise

    def refuse_others(self) -> None:
        """ValueError if there are pairs of other arguments, another tokenizer or other inputs."""
        planned = {i.record(self.output) for i in self.inputs}
        for path in sorted(self.output.glob(f"*/*/{RECORDS}/*.json")):
            pair = f"{path.parents[1] / path.stem}.bin"
            if path not in planned:
                raise ValueError(f"{pair}: its input is gone from --input-dir, or belongs elsewhere now; bring it "
                                 f"back, or name another --output-dir, or delete the pair and {path}")
            try:
                old, new = read_json(path, RECORDED)["made_with"], self.made_with
            except ValueError:  # its pair is made again
                continue
            differ = [f"{key} {old.get(key, 'default')} (now {new.get(key, 'default')})"
                      for key in {**old, **new} if old.get(key) != new.get(key)]
            if differ:
                raise ValueError(f"{pair}: made with {', '.join(differ)}; name another --output-dir, or "
                                 f"delete this one")

    def finish(self) -> list[Input]:
        """Write the manifest of each bucket whose pairs are all finished. Returns the inputs that
        are not."""
        buckets: dict[Path, dict[str, Record | None]] = {}
        missing = []
        for i in self.inputs:
            record = self.finished(i)
            buckets.setdefault(i.prefix(self.output).parent, {})[i.stem] = record
            missing += [i] * (record is None)
        for folder, records in buckets.items():
            shards = {stem: record["shard"] for stem, record in records.items() if record}
            if len(shards) == len(records):
                read = {name: value for name, value in self.selection.named().items() if name != "text_field"}
                manifest = new_manifest(self.tokenizer, asdict(self.windows) | read, shards,
                                        data_format=self.data_format)
                write_json(folder / MANIFEST_NAME, manifest, sort_keys=True)
        self.clean_up()
        return missing

    def clean_up(self, **kwargs: float) -> None:
        """`remove_leftovers` wherever there are any."""
        for folder in {path.parent for path in self.output.rglob(".*.tmp")}:
            remove_leftovers(folder, **kwargs)


def _made_or_why(make: Callable[[], Record]) -> Record | str:
    """What a function gives, or the sentence with which it failed."""
    try:
        return make()
    except BrokenProcessPool:
        return ("a worker process was killed, and the others with it; run the same command again, "
                "where memory is short with fewer --num-workers")
    except (ValueError, OSError) as e:
        return str(e)


def _begin_worker() -> None:
    """Leave Ctrl-C to the caller; and end with the caller, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
