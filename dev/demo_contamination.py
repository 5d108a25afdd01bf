"""Items of a benchmark are planted in a corpus, a small run trains on a part of it, and is asked
which items it has seen.

    python -m dev.demo_contamination --megabytes=20

The benchmark has the format of CORE's bundle and 400 made-up items. 200 of them are planted in the
middle of documents: as they are, or with other case, spacing and punctuation. 100 are planted with
every tenth word replaced, so that they share at most nine words in a row; they must not be found,
like the remaining 100, which are not planted. Printed are the items that were found and not found,
wrong ones, and the time. Then the same with `scripts.validate --decontaminate`, whose list a second
run leaves out. The exit code is 1 if a figure is not the expected one.
"""

import contextlib
import io
import json
import random
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from dev.measure import print_setup
from nanochat import ngrams, run_stream, seen
from nanochat.cli import Parser, run_main
from nanochat.common import table
from nanochat.ngrams import words_of
from scripts import base_train, inspect_data, validate
from tests import training
from tests.toy import write_parquet

SHOWN = 100  # items planted in each way, or not at all
DOCUMENT_CHARS = 2000
ROWS = 32  # per step
RUN: dict[str, Any] = {
    **training.SMALL,
    "max_seq_len": 256,
    "long_docs": "split",
    "total_batch_size": 256 * ROWS,
    "device_batch_size": ROWS,
    "eval_tokens": 256 * ROWS,
    "buffer_size": 16,
}
BYTES_PER_TOKEN = 1.6  # of a tokenizer of 320 tokens


# ---- the benchmark -------------------------------------------------------------------------------


def make_bundle(folder: Path, vocabulary: Sequence[str], rng: random.Random) -> Path:
    """A bundle with 400 items in three tasks, one of each kind, in CORE's format."""

    def some(least: int, most: int) -> str:
        return " ".join(rng.choices(vocabulary, k=rng.randint(least, most)))

    def choice() -> dict[str, Any]:
        choices = [some(1, 6) for _ in range(4)]
        return {"query": f"Question: {some(8, 50)}?", "choices": choices, "gold": rng.randrange(4)}

    def schema() -> dict[str, Any]:
        beginning = some(5, 10)
        options = [f"{beginning} {some(2, 2)}" for _ in range(2)]
        return {"context_options": options, "continuation": some(6, 12), "gold": rng.randrange(2)}

    def text() -> dict[str, Any]:
        return {"context": some(20, 80), "continuation": some(1, 2)}

    makers = {"multiple_choice": choice, "schema": schema, "language_modeling": text}
    sizes = {"multiple_choice": 200, "schema": 100, "language_modeling": 100}
    (folder / "eval_data").mkdir(parents=True)
    tasks = []
    for kind, make in makers.items():
        lines = [json.dumps(make()) for _ in range(sizes[kind])]
        (folder / "eval_data" / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
        task = {"label": kind, "dataset_uri": f"{kind}.jsonl", "num_fewshot": [0]}
        tasks.append({**task, "icl_task_type": kind, "continuation_delimiter": "\nAnswer: "})
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": tasks}))
    baselines = [f"{kind},made up,0\n" for kind in makers]
    header = "Eval Task,Task Category,Random baseline\n"
    (folder / "eval_meta_data.csv").write_text(header + "".join(baselines))
    return folder


def exactly(text: str, rng: random.Random) -> str:
    return text


def otherwise_written(text: str, rng: random.Random) -> str:
    """The words of a text in capitals or small letters, with other spaces and punctuation."""
    gaps = (" ", "  ", "\n", ", ", ": ", " -- ", "... ", ") (")
    written = rng.choice((str.upper, str.lower, str.title))
    return "".join(written(word) + rng.choice(gaps) for word in re.findall(r"\w+", text))


def nearly(text: str, rng: random.Random) -> str:
    """A text with every tenth word replaced."""
    words = text.split()
    for at in range(rng.randrange(min(8, len(words))), len(words), 10):
        words[at] = "otherword"
    return " ".join(words)


WAYS = {  # how items are planted: (function, whether they must be found)
    "exactly": (exactly, True),
    "other case, spaces, punctuation": (otherwise_written, True),
    "every tenth word replaced": (nearly, False),
    "not at all": (None, False),
}


# ---- the demonstration ---------------------------------------------------------------------------


def write_corpus(
    folder: Path, items: Sequence[tuple[str, seen.Item]], num_bytes: int, rng: random.Random
) -> tuple[dict[str, list[tuple[str, int]]], dict[tuple[str, int], str]]:
    """Plant items in documents, and write these as four files. Returns ({way: items}, {item:
    document that has it}), where an item is (task, line)."""
    documents = training.texts(max(400, num_bytes // DOCUMENT_CHARS), seed=1)
    documents = [text * (1 + DOCUMENT_CHARS // 2 // len(text)) for text in documents]
    num_files = 4
    size = len(documents) // num_files
    training_part = (num_files - 1) * size
    places = iter(rng.sample(range(training_part), 3 * SHOWN))
    shuffled = rng.sample(items, len(items))
    ways: dict[str, list[tuple[str, int]]] = {}
    document_of = {}
    for number, (way, (change, _)) in enumerate(WAYS.items()):
        of_way = shuffled[SHOWN * number : SHOWN * (number + 1)]
        ways[way] = [(task, item.line) for task, item in of_way]
        for task, item in of_way:
            if change is None:
                continue
            place = next(places)
            text = documents[place]
            middle = len(text) // 2
            planted = change(item.text, rng)
            documents[place] = f"{text[:middle]} {planted} {text[middle:]}"
            file, row = divmod(place, size)
            document_of[task, item.line] = f"{file}.parquet:{row}"
    for file in range(num_files):
        part = documents[size * file : size * (file + 1)]
        write_parquet(folder / f"{file}.parquet", part, group_size=256)
    return ways, document_of


def train(tag: str, num_bytes: int, **more: Any) -> None:
    """Train a run on a part of the data."""
    steps = int(num_bytes / BYTES_PER_TOKEN / 3 / RUN["total_batch_size"])
    given = {**RUN, "model_tag": tag, "num_iterations": steps, "save_every": max(1, steps // 4)}
    with contextlib.redirect_stdout(io.StringIO()):
        base_train.main(training.flags(**{**given, **more}))
    print(f"trained {tag}: {steps} steps of {RUN['total_batch_size']:,} tokens", flush=True)


ItemName = tuple[str, int]  # (task, line)


def seen_plainly(run_dir: Path, items: Sequence[tuple[str, seen.Item]]) -> set[ItemName]:
    """The items that share n-grams with rows of a run, found in plain Python in each of its rows."""
    wanted: dict[tuple[str, ...], set[ItemName]] = {}
    lengths = set()
    for task, item in items:
        words = words_of(item.text)
        length = min(seen.NGRAM, len(words))
        if length < ngrams.SHORTEST:
            continue
        lengths.add(length)
        for at in range(len(words) - length + 1):
            wanted.setdefault(tuple(words[at : at + length]), set()).add((task, item.line))

    opened = run_stream.open_stream_of(run_dir)
    found: set[ItemName] = set()
    with opened.stream_at(0) as stream:
        for step in range(opened.run.num_steps):
            for row in opened.take(stream, step):
                words = words_of(opened.data.tokenizer.decode(row.tokens.tolist()))
                for length in lengths:
                    for at in range(len(words) - length + 1):
                        found |= wanted.get(tuple(words[at : at + length]), set())
    return found


def report(
    run_dir: Path,
    items: Sequence[tuple[str, seen.Item]],
    ways: dict[str, list[ItemName]],
    document_of: dict[ItemName, str],
) -> bool:
    """Print what was found of the items that were planted in each way. Returns whether all figures
    are as expected."""
    found: dict[ItemName, seen.FoundItem] = {}
    for task, result in seen.read_results(run_dir).items():
        for item in result["found"]:
            found[task, item["line"]] = item
    are_seen = {name for name, item in found.items() if seen.uses_of(item)}
    rows = []
    is_good = True
    for way, names in ways.items():
        num_found = len(found.keys() & set(names))
        num_missed = len(names) - num_found
        is_good &= num_missed == (0 if WAYS[way][1] else len(names))
        rows.append((way, len(names), num_found, num_missed, len(are_seen & set(names))))
    wrong = 0
    for name, item in found.items():
        documents = {document["document"] for document in item["documents"]}
        wrong += len(documents - {document_of.get(name)})
    plainly = seen_plainly(run_dir, items)
    header = ("planted", "items", "found", "not found", "seen by the run")
    print(*table(header, rows), f"wrong documents: {wrong}", sep="\n")
    print(
        f"items in rows, counted in plain Python: {len(plainly)}; the same: {plainly == are_seen}"
    )
    return is_good and wrong == 0 and plainly == are_seen


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; 1 if a result is not the expected one."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--megabytes", type=float, default=20.0, help="about the size of the corpus"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print_setup()
    rng = random.Random(args.seed)
    with (
        tempfile.TemporaryDirectory(prefix="demo-") as folder,
        training.workplace(Path(folder), **RUN) as base,
    ):
        vocabulary = sorted(
            {word for text in training.texts(400, seed=2) for word in words_of(text)}
        )
        bundle = make_bundle(base / "bundle", vocabulary, rng)
        items = [(task.label, item) for task in seen.read_core(bundle) for item in task.items]
        text = base / "text"
        ways, document_of = write_corpus(text, items, int(args.megabytes * 1e6), rng)
        tables = [pq.read_table(file) for file in sorted(text.iterdir())]
        actual = sum(content.nbytes for content in tables)
        print(f"{sum(map(len, tables)):,} documents, {actual / 1e6:.1f} MB of text")
        num_bytes = int(args.megabytes * 1e6)
        train("first", num_bytes, data_path=text)

        began = time.monotonic()
        inspect_data.main(["find", "first", "--core", f"--eval-bundle={bundle}"])
        seconds = time.monotonic() - began
        run_dir = base / "runs" / "first"
        is_good = report(run_dir, items, ways, document_of)
        print(f"find: {seconds:.1f} s", flush=True)

        listed = base / "without.txt"
        began = time.monotonic()
        flags = training.flags(**{**RUN, "model_tag": "second", "data_path": text})
        validate.main([*flags, f"--decontaminate={bundle}", f"--list={listed}"])
        seconds = time.monotonic() - began
        must_be_found = [item for way, (_, found) in WAYS.items() if found for item in ways[way]]
        planted = {document_of[item] for item in must_be_found}
        lines = listed.read_text().splitlines()
        names = {line for line in lines if not line.startswith("#")}
        print(
            f"validate: {seconds:.1f} s, {len(names & planted)} of {len(planted)} planted documents"
        )
        is_good &= names == planted

        train("second", num_bytes, data_path=text, without_documents=listed)
        inspect_data.main(["find", "second", "--core", f"--eval-bundle={bundle}"])
        results = seen.read_results(base / "runs" / "second")
        num_seen = sum(seen.count(label, result, 10**9).seen for label, result in results.items())
        print(f"items that the second run has seen: {num_seen}")
    return 0 if is_good and num_seen == 0 else 1


if __name__ == "__main__":
    run_main(main)
