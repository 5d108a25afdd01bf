"""
Turn any text data set into shuffled shards that the rest of the code likes: parquet with one column `text`, zstd, row
groups of 1,024 documents, about 250 M characters a shard, the last shard for validation.

Real data sets do not fit in memory, so the shuffle is an external merge sort. The key of a document is a hash of
(seed, file, number in the file), which is as good as a random number but needs no state:

    inputs --> as many documents as the memory budget holds --sort by key--> run 0 on disk
               the next ones                                --sort by key--> run 1 on disk ... --merge--> shards

So the order depends on the inputs and the seed alone: neither on the memory budget, which only decides how many runs
there are, nor on the folder in which the inputs lie. A window shuffle (a buffer from which random documents leave)
would need no disk, but leaves documents near where they came from.

In memory are the documents of one run, later one row group and one document of each run. The runs need the size of
the uncompressed text on the disk of the output (twice that for more than 100 runs). The output appears when whole.

    python -m dev.repackage_data_reference --input FILE_OR_FOLDER ... --output-dir DIR
"""

import hashlib
import heapq
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from nanochat.cli import Parser, run_main, whole
from nanochat.dataset import data_folder, find_files, index_to_filename
from nanochat.text import ALL, SUFFIXES, Selection, add_text_flags
from nanochat.text_kinds import read_documents
from scripts.export import new_folder

ROW_GROUP_DOCUMENTS = 1024
KEY_BYTES = 16
# texts hardly repeat, so dictionaries and minima would only cost; with checksums --verify sees a flipped bit
PARQUET: dict[str, Any] = {
    "compression": "zstd", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
RECORD_BYTES = 200  # what Python needs for a document beside its text
RUNS_AT_ONCE = 100  # open files of a merge
WAY_OUT = "give another --output-dir or delete it"  # where it is not empty

Record = tuple[bytes, bytes]  # key, UTF-8 text


def read_records(inputs: Sequence[Path], selection: Selection, seed: int, counts: Counter[str]) -> Iterator[Record]:
    """Every document of the inputs under its key. `counts` gets the numbers of "documents" and "chars", and of what was
    left out: "broken" lines, which are told, and "short" documents."""
    # a name is relative to the folder that was given; the position of the argument keeps names apart
    files = [(f"{i}/{path.relative_to(data_folder(root)).as_posix()}", path)
             for i, root in enumerate(inputs) for path in find_files(root)]
    for name, path in tqdm(files, unit="file", disable=None):
        skipped: dict[str, Any] = {}
        for number, text in enumerate(read_documents(path, selection, skipped)):
            counts.update(documents=1, chars=len(text))
            key = hashlib.blake2b(f"{seed}\0{number}\0{name}".encode(), digest_size=KEY_BYTES).digest()
            yield key, text.encode()
        counts.update(broken=skipped["count"], short=skipped["short"])
        for line, why in skipped["lines"][:1]:
            print(f"{path}: {skipped['count']:,} broken line(s) skipped, the first is line {line:,}: {why}",
                  file=sys.stderr)


def write_run(path: Path, records: Iterable[Record]) -> Path:
    """Write sorted records to a file; returns its path."""
    with path.open("wb") as file:
        for key, text in records:
            file.write(key + len(text).to_bytes(8, "little") + text)
    return path


def merged(runs: Sequence[Path]) -> Iterator[Record]:
    """The records of all runs in the order of their keys. The files lose their names at once, so that they are gone
    when this ends, whether all was read or not."""
    def read(path: Path) -> Iterator[Record]:
        with path.open("rb") as file:
            path.unlink()
            while key := file.read(KEY_BYTES):
                yield key, file.read(int.from_bytes(file.read(8), "little"))

    return heapq.merge(*map(read, runs))


def sort_records(records: Iterable[Record], folder: Path, memory_bytes: int) -> Iterator[Record]:
    """All records by their keys, of which at most about `memory_bytes` are held at once. All are read before this
    returns."""
    names = (folder / f"run_{i}" for i in itertools.count())
    runs: list[Path] = []
    batch: list[Record] = []
    held = 0
    for record in records:
        batch.append(record)
        held += len(record[1]) + RECORD_BYTES
        if held >= memory_bytes:
            runs.append(write_run(next(names), sorted(batch)))
            batch, held = [], 0
    runs.append(write_run(next(names), sorted(batch)))
    while len(runs) > RUNS_AT_ONCE:
        runs = [write_run(next(names), merged(runs[i:i + RUNS_AT_ONCE])) for i in range(0, len(runs), RUNS_AT_ONCE)]
    return merged(runs)


def write_shards(texts: Iterator[str], output: Path, counts: Counter[str], shard_chars: int) -> int:
    """Write all texts as at least two shards of full row groups; returns how many. Shuffled shards of as many groups
    have about as many characters."""
    group_documents = min(ROW_GROUP_DOCUMENTS, -(-counts["documents"] // 2))
    num_groups = -(-counts["documents"] // group_documents)
    num_shards = min(max(2, round(counts["chars"] / shard_chars)), num_groups)
    schema = pa.schema([("text", pa.string())])
    for shard in range(num_shards):
        with pq.ParquetWriter(output / index_to_filename(shard), schema, **PARQUET) as writer:
            for _ in range(num_groups * shard // num_shards, num_groups * (shard + 1) // num_shards):
                writer.write_table(pa.table([list(itertools.islice(texts, group_documents))], schema))
    return num_shards


def repackage(inputs: Sequence[Path], output_dir: Path, *, shard_chars: int = 250_000_000, seed: int = 0,
              memory_bytes: int = 1 << 30, selection: Selection = ALL) -> Counter[str]:
    """Shuffle all documents of `inputs` (files or folders) into shards in the new folder `output_dir`; returns the
    numbers of `read_records`, and of "shards".

    Raises ValueError or OSError for inputs that cannot be read; then there is no output."""
    counts: Counter[str] = Counter()
    with new_folder(output_dir, WAY_OUT) as output:
        records = sort_records(read_records(inputs, selection, seed, counts), output, memory_bytes)
        if counts["documents"] < 2:
            raise ValueError(f"{', '.join(map(str, inputs))}: {counts['documents']} documents, expected at least 2, "
                             "since the last shard is for validation; add text")
        bar = tqdm(records, total=counts["documents"], unit="document", unit_scale=True, disable=None)
        counts["shards"] = write_shards((text.decode() for _, text in bar), output, counts, shard_chars)
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description="Shuffle any text data set into parquet shards.")
    parser.add_argument("--input", type=Path, nargs="+", required=True, help=f"{', '.join(SUFFIXES)}; or folders")
    add_text_flags(parser, "text_field", "min_chars", "strict")
    parser.add_argument("--output-dir", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--shard-chars", type=whole(1), default=250_000_000, help="characters a shard, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-bytes", type=whole(1), default=1 << 30, help="most to sort at once: changes nothing")
    args = parser.parse_args(argv)
    told = repackage(args.input, args.output_dir, shard_chars=args.shard_chars, seed=args.seed,
                     memory_bytes=args.memory_bytes, selection=Selection.of(vars(args)))
    print(f"{args.output_dir}: {told['documents']:,} documents, {told['chars']:,} characters in "
          f"{told['shards']:,} shards, {told['broken']:,} broken lines skipped, {told['short']:,} documents too short")


if __name__ == "__main__":
    run_main(main)
