"""
Has a model seen a benchmark? Which of its items are in the data, and which a run trained on.

    items    a file of texts, or the tasks of CORE   --ngrams.Index-->   their n-grams of words
    files    of the run, each read once              --search-->         documents that share some of them
    uses     of these documents (nanochat/find.py)                       steps and rows whose tokens share some
                                                     --store-->          RUN/contamination.json

An item of CORE is its prompt without examples, with the right answer. An item is *in the data* if a
training document shares an n-gram with it. It is *seen* if a row that the model learned from does:
a document may not have been reached yet, and the part of it with the item may have been cropped. A
model card names the items that were seen before its own step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict

from tqdm import tqdm

from nanochat.common import counted, hash_file, hash_json, parse_json, read_json, write_json
from nanochat.core_eval import read_bundle
from nanochat.find import DocumentPlace, groups_of
from nanochat.ngrams import BATCH_CHARS, SHORTEST, Index, Shared
from nanochat.sources import Source
from nanochat.text import TEXT_FIELD

NGRAM = 13  # words, by default
RESULT_NAME = "contamination.json"  # in the run directory
HEADER = ("task", "items", "not looked for", "in the data", "seen", "share")


# ---- items ---------------------------------------------------------------------------------------


class Item(NamedTuple):
    """An item of a benchmark, and the line of its file, from 1."""

    line: int
    text: str


@dataclass(frozen=True)
class Task:
    """The items of a file. `hash`: of the file; for a task of CORE, of its items."""

    label: str
    hash: str
    items: list[Item]


def read_texts(named: str) -> Task:
    """The items in a file that has one JSON object per line, named by FILE or FILE:FIELD.

    FileNotFoundError or ValueError names the file and the line.
    """
    file = named
    field = TEXT_FIELD
    if not Path(named).is_file():
        file, _, field = named.rpartition(":")
    path = Path(file)
    if not file or not field or not path.is_file():
        raise FileNotFoundError(
            f"{named}: the file does not exist; pass FILE.jsonl, with one JSON object per line, or "
            f"FILE.jsonl:FIELD for a field other than `{TEXT_FIELD}`"
        )
    items = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            record = parse_json(line, f"{path}, line {number}", dict)
            items.append(Item(number, _field_of(record, field, path, number)))
    if not items:
        raise ValueError(f"{path}: the file has no items; expected one JSON object per line")
    label = path.name if field == TEXT_FIELD else f"{path.name}:{field}"
    return Task(label, hash_file(path), items)


def _field_of(record: Mapping[str, object], field: str, path: Path, line: int) -> str:
    """The text in a field of an object; `a.b` is the field `b` of `a`."""
    value: object = record
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(value, str):
        raise ValueError(
            f"{path}, line {line}: expected a string in the field `{field}` of the object, whose "
            f"fields are {', '.join(record) or 'none'}; name the field of the text with "
            f"{path}:FIELD"
        )
    return value


def read_core(folder: Path | str | None) -> list[Task]:
    """The tasks of CORE in an eval_bundle folder. Raises the errors of `core_eval.read_bundle`."""
    tasks = []
    for task in read_bundle(folder):
        items = []
        for item in sorted(task.items, key=lambda item: item.line):
            answer = f"{item.contexts[item.gold]}{task.delimiter}{item.continuations[item.gold]}"
            items.append(Item(item.line, answer))
        tasks.append(Task(task.label, hash_json([item.text for item in items]), items))
    return tasks


# ---- the search ----------------------------------------------------------------------------------


class Hit(NamedTuple):
    """A document that shares n-grams with an item."""

    split: str
    document: DocumentPlace
    shared: Shared


def search(data: Mapping[str, Mapping[str, Source]], index: Index) -> Iterator[Hit]:
    """The documents of {split: {bucket: source}} that share n-grams with items.

    Reads each file once, with a progress bar.
    """
    groups = []
    for split, sources in data.items():
        for bucket, source in sources.items():
            for group, (file, first, _) in enumerate(groups_of(source)):
                groups.append((split, bucket, source, group, file, first))
    bar = tqdm(groups, desc="searching", unit="group", disable=None)
    for split, bucket, source, group, file, first in bar:
        for row, texts in _batches(source.texts(group)):
            for shared in index.find(texts):
                in_group = row + shared.text
                number = first + in_group
                place = DocumentPlace(bucket, f"{file}:{number}", number, group, in_group)
                yield Hit(split, place, shared)


def _batches(texts: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """(number of the first text, texts) in batches of about BATCH_CHARS."""
    batch: list[str] = []
    size = 0
    done = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield done, batch
            done += len(batch)
            batch = []
            size = 0
    yield done, batch


# ---- the result ----------------------------------------------------------------------------------


class ItemUse(TypedDict):
    """A row that shares n-grams with an item."""

    step: int
    epoch: int
    row: int
    loss: float | None  # the row's mean, before the step's update; None if it was not recorded


class FoundDocument(TypedDict):
    """A document that shares n-grams with an item."""

    document: str  # FILE:DOC
    bucket: str
    split: str
    without: bool  # whether --without-documents lists it, so that the model learns nothing from it
    shared: int  # how many of the item's n-grams are in it
    words: str  # the first of them
    uses: list[ItemUse]  # of this document, by step


class FoundItem(TypedDict):
    """An item that is in the data, in training or validation."""

    line: int
    ngrams: int  # how many of it were looked for
    documents: list[FoundDocument]


class TaskResult(TypedDict):
    """What was found of a task."""

    hash: str
    ngram: int
    steps: int  # number of steps that the run had done
    items: int
    not_looked_for: int
    found: list[FoundItem]


RESULT = {
    "hash": str,
    **dict.fromkeys(("ngram", "steps", "items", "not_looked_for"), int),
    "found": [
        {"line": int, "documents": [{"split": str, "without": bool, "uses": [{"step": int}]}]}
    ],
}


def uses_of(item: FoundItem) -> list[ItemUse]:
    """The rows that the model learned an item from, by step."""
    uses = [use for document in item["documents"] for use in document["uses"]]
    return sorted(uses, key=lambda use: (use["step"], use["row"]))


def losses_of(item: FoundItem) -> tuple[float | None, float | None]:
    """(loss before the first step that trained on an item, loss of the last later step that did).

    None if it is not known: a step computes a row's loss before it learns from the row.
    """
    uses = uses_of(item)
    if not uses:
        return None, None
    before = uses[0]["loss"]
    after = uses[-1]["loss"] if uses[-1]["step"] > uses[0]["step"] else None
    return before, after


class Benchmark:
    """The items of some tasks, numbered together, and the index of their n-grams."""

    def __init__(self, tasks: Sequence[Task], *, n: int) -> None:
        self.tasks = tasks
        self.items = [item for task in tasks for item in task.items]
        self.task_of = [number for number, task in enumerate(tasks) for _ in task.items]
        self.index = Index([item.text for item in self.items], self.task_of, n=n)
        if not self.index.sizes.any():
            raise ValueError(
                f"{tasks[0].label}: no item has {min(n, SHORTEST)} words or more of its own, so none "
                f"can be looked for; pass longer items, or a smaller --ngram"
            )

    def results(
        self, documents: Mapping[int, list[FoundDocument]], steps: int
    ) -> dict[str, TaskResult]:
        """{task: its result} after `steps` steps of a run, from {number of an item: its
        documents}."""
        results: dict[str, TaskResult] = {}
        for task in self.tasks:
            results[task.label] = {
                "hash": task.hash,
                "ngram": self.index.n,
                "steps": steps,
                "items": len(task.items),
                "not_looked_for": 0,
                "found": [],
            }
        for number, item in enumerate(self.items):
            result = results[self.tasks[self.task_of[number]].label]
            num_ngrams = int(self.index.sizes[number])
            result["not_looked_for"] += num_ngrams == 0
            if number in documents:
                found: FoundItem = {
                    "line": item.line,
                    "ngrams": num_ngrams,
                    "documents": documents[number],
                }
                result["found"].append(found)
        return results


class Counts(NamedTuple):
    """A line of the table of tasks."""

    task: str
    items: int
    not_looked_for: int
    in_data: int
    seen: int

    @property
    def cells(self) -> tuple[str | int, ...]:
        """The cells of the line, in the order of HEADER."""
        return (*self, f"{100 * self.seen / self.items:.1f} %")


def count(label: str, result: TaskResult, step: int) -> Counts:
    """How many items of a task were seen before a step."""
    in_data = 0
    seen = 0
    for item in result["found"]:
        in_data += any(document["split"] == "train" for document in item["documents"])
        seen += any(use["step"] < step for use in uses_of(item))
    return Counts(label, result["items"], result["not_looked_for"], in_data, seen)


def store(run_dir: Path, results: Mapping[str, TaskResult]) -> Path:
    """Add the results of tasks to RUN/contamination.json, and return its path. Those of other tasks
    stay."""
    path = run_dir / RESULT_NAME
    merged = {**read_results(run_dir), **results}
    write_json(path, {"format_version": 1, "tasks": merged})
    return path


def read_results(run_dir: Path) -> dict[str, TaskResult]:
    """{task: its result} of a run, empty if it was not checked. ValueError if the file is
    corrupt."""
    path = run_dir / RESULT_NAME
    if not path.is_file():
        return {}
    tasks = read_json(path, {"tasks": dict})["tasks"]
    return read_json(path, {"tasks": dict.fromkeys(tasks, RESULT)})["tasks"]


def describe(results: Mapping[str, TaskResult], step: int) -> str:
    """A sentence about how the items of a run's results were looked for, for its first `step` steps."""
    sizes = sorted({result["ngram"] for result in results.values()})
    searched = min(result["steps"] for result in results.values())
    lengths = " or ".join(str(size) for size in sizes)
    until = ""
    if searched < step:
        until = f" Only the first {counted(searched, 'step')} were checked."
    return (
        f"Items that share {lengths} consecutive words with a training document, and those of which the "
        f"model learned such words before step {step:,}.{until}"
    )
