"""
Turn any text data set into shuffled shards that the rest of the code likes: parquet with one column `text`, zstd, row
groups of 1,024 documents, about 250 M characters a shard, the last shard for validation.

Real data sets do not fit in memory, so the shuffle is an external sort. A document's key is a hash of (seed, file,
row), which is as good as a random number but needs no state; the new order is the order of the keys.

    inputs --deal by the key's first byte--> 00 01 02 ... ff      256 files on disk
    each, in order: fits the memory budget?  yes: load, sort by key, append to the current shard
                                             no:  deal by the key's next byte, and so on

So the order depends on the inputs and the seed alone: not on the memory budget, which only decides how often a
document is dealt, nor on the folder that the inputs lie in. A window shuffle (a buffer from which random documents
leave) would need no disk, but leaves documents near where they came from.

Disk: the scratch folder, beside the output, takes the size of the uncompressed text. The output appears when whole.

    python -m dev.repackage_data_reference --input FILE_OR_FOLDER ... --output-dir DIR
"""

import contextlib
import hashlib
import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from nanochat.common import Parser, atomic_open, fsync_dir, here, run_main
from nanochat.dataset import data_folder, find_files, index_to_filename
from nanochat.text import ALL, SUFFIXES, Reading
from nanochat.text_kinds import add_text_flags, read_documents

ROW_GROUP_DOCUMENTS = 1024
KEY_BYTES = 16  # also the deepest that buckets are dealt again


# ---- writing: shared with dev.make_sample_corpus --------------------------------------------------------------------

@contextlib.contextmanager
def new_folder(output_dir: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (a folder to fill, a scratch folder). On success the first becomes `output_dir`; in any case the rest goes.
    What a killed run left is removed. ValueError where `output_dir` is there and not empty."""
    here(output_dir, "--output-dir")
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ValueError(f"{output_dir}: is there already; give another --output-dir or delete it")
    output_dir = output_dir.resolve()
    work = output_dir.parent / f".{output_dir.name}.unfinished"
    shutil.rmtree(work, ignore_errors=True)
    for folder in (work / "output", work / "scratch"):
        folder.mkdir(parents=True)
    try:
        yield work / "output", work / "scratch"
        fsync_dir(work / "output")
        os.replace(work / "output", output_dir)
        fsync_dir(output_dir.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_shard(path: Path, schema: pa.Schema, groups: Iterable[pa.Table]) -> None:
    """Write each table as one row group, atomically. Texts hardly repeat, so dictionaries and minima would only cost;
    page checksums let `nanochat.dataset --verify` see a flipped bit."""
    with atomic_open(path) as f:
        with pq.ParquetWriter(f, schema, compression="zstd", use_dictionary=False, write_statistics=False,
                              write_page_checksum=True) as writer:
            for group in groups:
                writer.write_table(group, row_group_size=max(1, group.num_rows))


# ---- reading --------------------------------------------------------------------------------------------------------

def find_inputs(inputs: Sequence[Path]) -> list[tuple[str, Path]]:
    """(name, path) of every input file, sorted by name. A name is relative to the folder that was given, so that the
    result does not change when the folder moves; the position of the argument in front keeps names apart."""
    return [(f"{i}/{path.relative_to(data_folder(root)).as_posix()}", path)
            for i, root in enumerate(inputs) for path in find_files(root)]


def numbered(path: Path, report: "Report", reading: Reading) -> Iterator[tuple[int, str]]:
    """(number from 0, text) of each document of a file; holds some hundred documents at a time, whatever the row
    groups. A broken line of jsonl is reported and skipped."""
    skipped: dict[str, Any] = {}
    yield from enumerate(read_documents(path, reading, skipped))
    for number, problem in skipped["lines"][:10]:
        print(f"skipped {path}:{number}: {problem}", file=sys.stderr)
    report.skipped_lines += skipped["count"]
    report.short += skipped["short"]


# ---- shuffling ------------------------------------------------------------------------------------------------------

@dataclass
class Report:
    """What happened, for people and tests."""

    documents: int = 0
    chars: int = 0
    skipped_lines: int = 0
    short: int = 0                  # documents that --min-chars left out
    shard_chars: list[int] = field(default_factory=list)


Record = tuple[bytes, bytes]  # key, UTF-8 text


def document_key(seed: int, name: str, row: int) -> bytes:
    """The place of a document in the new order."""
    return hashlib.blake2b(f"{seed}\0{row}\0{name}".encode(), digest_size=KEY_BYTES).digest()


def deal(records: Iterable[Record], folder: Path, *, depth: int) -> list[Path]:
    """Write each record to the file of `folder` that byte `depth` of its key names; the files, in key order."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        files: dict[int, BinaryIO] = {}
        for key, text in records:
            byte = key[depth]
            if byte not in files:
                files[byte] = stack.enter_context(open(folder / f"{byte:02x}", "wb"))
            files[byte].write(key + len(text).to_bytes(8, "little") + text)
    return [folder / f"{byte:02x}" for byte in sorted(files)]


def read_bucket(path: Path) -> Iterator[Record]:
    """The records of one file that `deal` wrote."""
    with open(path, "rb") as f:
        while key := f.read(KEY_BYTES):
            yield key, f.read(int.from_bytes(f.read(8), "little"))


def in_key_order(bucket: Path, *, memory_bytes: int, depth: int = 1) -> Iterator[str]:
    """The documents of a bucket sorted by key, loading at most `memory_bytes` of it at once, or what has one key.
    Removes the bucket."""
    if bucket.stat().st_size <= memory_bytes or depth == KEY_BYTES:
        records = sorted(read_bucket(bucket))
        bucket.unlink()
        yield from (text.decode() for _, text in records)
        return
    smaller = deal(read_bucket(bucket), bucket.with_name(bucket.name + ".d"), depth=depth)
    bucket.unlink()
    for path in smaller:
        yield from in_key_order(path, memory_bytes=memory_bytes, depth=depth + 1)


def write_shards(texts: Iterator[str], output: Path, report: Report, *, shard_chars: int) -> None:
    """Write all texts as at least two shards that end at the edges of row groups. Shard i of n ends when (i + 1)/n of
    all characters are out, so that all are of nearly equal size and the validation shard is no remnant; but every shard
    gets a group."""
    group_size = min(ROW_GROUP_DOCUMENTS, -(-report.documents // 2))
    num_groups = -(-report.documents // group_size)
    num_shards = min(max(2, round(report.chars / shard_chars)), num_groups)
    schema, written = pa.schema([("text", pa.string())]), 0
    groups = iter(lambda: list(itertools.islice(texts, group_size)), [])

    def of_shard(shard: int) -> Iterator[pa.Table]:
        nonlocal written, num_groups
        before = written
        for group in groups:
            yield pa.table([group], schema)
            num_groups -= 1
            written += sum(map(len, group))
            is_full = written * num_shards >= report.chars * (shard + 1)
            if num_groups and (is_full or num_groups < num_shards - shard) and shard + 1 < num_shards:
                break
        report.shard_chars.append(written - before)

    for shard in range(num_shards):
        write_shard(output / index_to_filename(shard), schema, of_shard(shard))


def repackage(inputs: Sequence[Path], output_dir: Path, *, shard_chars: int = 250_000_000, seed: int = 0,
              memory_bytes: int = 1 << 30, reading: Reading = ALL) -> Report:
    """Shuffle all documents of `inputs` (files or folders) into shards in the new folder `output_dir`.

    Holds at most `memory_bytes` of documents for sorting, plus one row group and some write buffers. Raises ValueError
    or OSError for inputs that cannot be read; then there is no output."""
    if shard_chars < 1 or memory_bytes < 1:
        raise ValueError(f"got {shard_chars=} {memory_bytes=}, expected at least 1")
    report = Report()

    def records() -> Iterator[Record]:
        for name, path in tqdm(find_inputs(inputs), unit="file", disable=None):
            for row, text in numbered(path, report, reading):
                report.documents += 1
                report.chars += len(text)
                yield document_key(seed, name, row), text.encode()

    with new_folder(output_dir) as (output, scratch):
        buckets = deal(records(), scratch / "d", depth=0)
        if report.documents < 2:
            raise ValueError(f"{len(inputs)} inputs hold {report.documents} documents; expected at least 2, since the "
                             "last shard is for validation")
        bar = tqdm(buckets, unit="bucket", disable=None)
        texts = (text for bucket in bar for text in in_key_order(bucket, memory_bytes=memory_bytes))
        write_shards(texts, output, report, shard_chars=shard_chars)
    return report


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description="Shuffle any text data set into parquet shards.")
    parser.add_argument("--input", type=Path, nargs="+", required=True, help=f"{', '.join(SUFFIXES)}; or folders")
    add_text_flags(parser, splits=False)
    parser.add_argument("--output-dir", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--shard-chars", type=int, default=250_000_000, help="characters a shard, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-bytes", type=int, default=1 << 30, help="most to sort at once; changes no output")
    args = parser.parse_args(argv)
    report = repackage(args.input, args.output_dir, shard_chars=args.shard_chars, seed=args.seed,
                       memory_bytes=args.memory_bytes, reading=Reading.of(vars(args)))
    print(f"{args.output_dir}: {report.documents:,} documents, {report.chars:,} characters in "
          f"{len(report.shard_chars)} shards of {min(report.shard_chars):,} to {max(report.shard_chars):,} characters, "
          f"{report.skipped_lines} broken lines skipped, {report.short} documents too short")


if __name__ == "__main__":
    run_main(main)
