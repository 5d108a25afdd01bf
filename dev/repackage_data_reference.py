"""Shuffle any text data set into parquet shards: one column `text`, zstd, row groups of 1,024
documents, about 250 M characters per shard, the last shard for validation.

    python -m dev.repackage_data_reference --input FILE_OR_FOLDER ... --output-dir DIR

Real data sets do not fit in memory, so the shuffle is an external merge sort. The key of a document
is a hash of (seed, file, number in the file), which is as good as a random number and needs no
state:

    inputs --> as many documents as the memory budget holds --sort by key--> run 0 on disk
               the next ones                                --sort by key--> run 1 on disk ... --merge--> shards

The order therefore depends on the inputs and the seed alone, not on the memory budget or the folder
of the inputs. Rejected: a window shuffle (a buffer that emits random documents), which leaves
documents close to their places.

Memory holds the documents of one run, and later one row group and one document of each run. The
runs take as much disk space beside the output as the uncompressed text (twice as much for more than
100 runs). The output appears when it is complete.
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
from nanochat.common import counted
from nanochat.files import data_at, find_files, index_to_filename
from nanochat.text import ALL, SUFFIXES, Selection, Skipped, add_text_flags
from nanochat.text_kinds import read_documents
from scripts.export import new_folder

ROW_GROUP_DOCUMENTS = 1024
KEY_BYTES = 16
# texts rarely repeat, so dictionaries and statistics would not pay off; checksums let --verify find
# flipped bits
PARQUET: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": False,
    "write_statistics": False,
    "write_page_checksum": True,
}
RECORD_BYTES = 200  # Python's overhead per document
RUNS_AT_ONCE = 100  # open files of a merge
# ends the error about a folder that is not empty
WAY_OUT = "choose another --output-dir or delete it"

Record = tuple[bytes, bytes]  # key, UTF-8 text


def read_records(
    inputs: Sequence[Path], selection: Selection, seed: int, counts: Counter[str]
) -> Iterator[Record]:
    """Every document of the inputs with its key. `counts` receives the numbers of "documents" and
    "chars", and of skipped "broken" lines, which cause a warning, and "short" documents."""
    # names are relative to the given folder; the position of the argument makes them unique
    files = [
        (f"{i}/{path.relative_to(data_at(root).folder).as_posix()}", path)
        for i, root in enumerate(inputs)
        for path in find_files(root)
    ]
    for name, path in tqdm(files, unit="file", disable=None):
        skipped: Skipped = {}
        for number, text in enumerate(read_documents(path, selection, skipped)):
            counts.update(documents=1, chars=len(text))
            key = hashlib.blake2b(
                f"{seed}\0{number}\0{name}".encode(), digest_size=KEY_BYTES
            ).digest()
            yield key, text.encode()
        counts.update(broken=skipped["count"], short=skipped["short"])
        for line, why in skipped["lines"][:1]:
            print(
                f"{path}: {counted(skipped['count'], 'broken line')} skipped, the first is line {line:,}: {why}",
                file=sys.stderr,
            )


def write_run(path: Path, records: Iterable[Record]) -> Path:
    """Write sorted records to a file, and return its path."""
    with path.open("wb") as file:
        for key, text in records:
            file.write(key + len(text).to_bytes(8, "little") + text)
    return path


def merged(runs: Sequence[Path]) -> Iterator[Record]:
    """The records of all runs, sorted by key. The files are unlinked as soon as they are open, so
    they disappear however reading ends."""

    def read(path: Path) -> Iterator[Record]:
        with path.open("rb") as file:
            path.unlink()
            while key := file.read(KEY_BYTES):
                yield key, file.read(int.from_bytes(file.read(8), "little"))

    return heapq.merge(*map(read, runs))


def sort_records(records: Iterable[Record], folder: Path, memory_bytes: int) -> Iterator[Record]:
    """All records, sorted by key, with at most about `memory_bytes` in memory. Reads all records
    before it returns."""
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
        runs = [
            write_run(next(names), merged(runs[i : i + RUNS_AT_ONCE]))
            for i in range(0, len(runs), RUNS_AT_ONCE)
        ]
    return merged(runs)


def write_shards(texts: Iterator[str], output: Path, counts: Counter[str], shard_chars: int) -> int:
    """Write all texts as at least two shards of full row groups, and return the number of shards.
    Because the texts are shuffled, shards with equal numbers of groups have about equal numbers of
    characters."""
    group_documents = min(ROW_GROUP_DOCUMENTS, -(-counts["documents"] // 2))
    num_groups = -(-counts["documents"] // group_documents)
    num_shards = min(max(2, round(counts["chars"] / shard_chars)), num_groups)
    schema = pa.schema([("text", pa.string())])
    for shard in range(num_shards):
        with pq.ParquetWriter(output / index_to_filename(shard), schema, **PARQUET) as writer:
            for _ in range(
                num_groups * shard // num_shards, num_groups * (shard + 1) // num_shards
            ):
                writer.write_table(
                    pa.table([list(itertools.islice(texts, group_documents))], schema)
                )
    return num_shards


def repackage(
    inputs: Sequence[Path],
    output_dir: Path,
    *,
    shard_chars: int = 250_000_000,
    seed: int = 0,
    memory_bytes: int = 1 << 30,
    selection: Selection = ALL,
) -> Counter[str]:
    """Shuffle all documents of `inputs` (files or folders) into shards in the new folder
    `output_dir`. Returns the counts of `read_records`, and of "shards". If an input cannot be read,
    raises ValueError or OSError and writes nothing."""
    counts: Counter[str] = Counter()
    with new_folder(output_dir, WAY_OUT) as output:
        records = sort_records(read_records(inputs, selection, seed, counts), output, memory_bytes)
        if counts["documents"] < 2:
            raise ValueError(
                f"{', '.join(map(str, inputs))}: {counts['documents']} documents, expected at least 2, "
                "because the last shard is for validation; add text"
            )
        bar = tqdm(
            records, total=counts["documents"], unit="document", unit_scale=True, disable=None
        )
        counts["shards"] = write_shards(
            (text.decode() for _, text in bar), output, counts, shard_chars
        )
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--input", type=Path, nargs="+", required=True, help=f"folders or {', '.join(SUFFIXES)}"
    )
    add_text_flags(parser, "text_field", "min_chars", "strict")
    parser.add_argument(
        "--output-dir", type=Path, required=True, help="a folder that does not exist yet"
    )
    parser.add_argument(
        "--shard-chars",
        type=whole(1),
        default=250_000_000,
        help="about as many characters per shard",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="a different seed gives a different order"
    )
    parser.add_argument(
        "--memory-bytes", type=whole(1), default=1 << 30, help="for sorting; the output is the same"
    )
    args = parser.parse_args(argv)
    counts = repackage(
        args.input,
        args.output_dir,
        shard_chars=args.shard_chars,
        seed=args.seed,
        memory_bytes=args.memory_bytes,
        selection=Selection.of(vars(args)),
    )
    print(
        f"{args.output_dir}: {counts['documents']:,} documents, {counts['chars']:,} characters in "
        f"{counts['shards']:,} shards, {counts['broken']:,} broken lines and "
        f"{counts['short']:,} short documents skipped"
    )


if __name__ == "__main__":
    run_main(main)
