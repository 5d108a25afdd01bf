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

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict

from tqdm import tqdm

from nanochat.common import (
    as_path,
    counted,
    hash_file,
    hash_json,
    local_copy,
    parse_json,
    read_json,
    write_bytes,
    write_json,
)
from nanochat.core_eval import read_bundle
from nanochat.find import DocumentPlace, announce_search, groups_to_search
from nanochat.ngrams import BATCH_CHARS, SHORTEST, Index, Shared
from nanochat.pins import VERSION_LINE, Manifest, searched_in, version_line, versions_of
from nanochat.run_dir import finite
from nanochat.sources import Source
from nanochat.text import TEXT_FIELD, Selection, text_suffix
from nanochat.text_kinds import numbered_documents

NGRAM = 13  # words, by default
RESULT_NAME = "contamination.json"  # in the run directory
TRAIN = "train"  # the split
HEADER = ("task", "n", "items", "not looked for", "in the data", "seen", "share")


# ---- items ---------------------------------------------------------------------------------------


class Item(NamedTuple):
    """An item of a benchmark, and the line of its file (of parquet: the row), from 1."""

    line: int
    text: str


@dataclass(frozen=True)
class Task:
    """The items of a file. `hash`: of the file; for a task of CORE, of its items."""

    label: str
    hash: str
    items: list[Item]


def read_texts(named: str) -> Task:
    """The items in a file, named by FILE or FILE:FIELD: one per JSON object of a line, or per row of
    a parquet file.

    FileNotFoundError or ValueError names the file and the line.
    """
    file = named
    field = TEXT_FIELD
    if not as_path(named).is_file():
        file, _, field = named.rpartition(":")
    if not file or not field or not as_path(file).is_file():
        raise FileNotFoundError(
            f"{named}: the file does not exist; pass FILE.jsonl, with one JSON object per line, or "
            f"FILE.parquet; FILE:FIELD for a field other than `{TEXT_FIELD}`"
        )
    path = local_copy(as_path(file))
    items = []
    if text_suffix(path.name) == ".parquet":
        rows = numbered_documents(path, Selection(text_field=field))
        items = [Item(row, text) for row, text in rows]
    else:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if line.strip():
                record = parse_json(line, f"{path}, line {number}", dict)
                items.append(Item(number, _field_of(record, field, path, number)))
    if not items:
        raise ValueError(f"{path}: the file has no items; expected one JSON object per line")
    label = as_path(file).name
    if field != TEXT_FIELD:
        label += f":{field}"
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


def read_tasks(named: str) -> list[Task]:
    """The task in a texts file, see `read_texts`; or those in an eval_bundle folder."""
    return read_core(named) if Path(named).is_dir() else [read_texts(named)]


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
    without: bool  # whether --without-documents lists it, so that the model learns nothing from it


def search(
    data: Mapping[str, Mapping[str, Source]], index: Index, known: Container[str] = ()
) -> Iterator[Hit]:
    """The documents of {split: {bucket: source}} that share n-grams with items, but for those in
    files with a `known` name.

    Reads each file once, with a progress bar.
    """
    announce_search((source, known) for sources in data.values() for source in sources.values())
    groups = []
    for split, sources in data.items():
        for bucket, source in sources.items():
            for group, file, first in groups_to_search(source, known):
                groups.append((split, bucket, source, group, file, first))
    if not groups:
        return
    bar = tqdm(groups, desc="searching", unit="group", disable=None)
    for split, bucket, source, group, file, first in bar:
        for first_of_batch, texts in _batches(source.texts(group)):
            for shared in index.find(texts):
                number = first_of_batch + shared.text
                in_file = first + number
                place = DocumentPlace(bucket, f"{file}:{in_file}", in_file, group, number)
                yield Hit(split, place, shared, is_masked(source, place))


def is_masked(source: Source, document: DocumentPlace) -> bool:
    """Whether --without-documents lists a document, so that the model learns nothing from it."""
    listed = source.without.get(document.group)
    return listed is not None and bool(listed[document.number])


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
    not_searched: list[str]  # which training behind the run's weights could not be searched


RESULT = {
    "hash": str,
    **dict.fromkeys(("ngram", "steps", "items", "not_looked_for"), int),
    "found": [
        {"line": int, "documents": [{"split": str, "without": bool, "uses": [{"step": int}]}]}
    ],
    "not_searched": [str],
}


def uses_of(item: FoundItem) -> list[ItemUse]:
    """The rows that the model learned an item from, by step."""
    return by_step(use for document in item["documents"] for use in document["uses"])


def is_in_data(item: FoundItem) -> bool:
    """Whether a training document has words of an item."""
    return any(document["split"] == TRAIN for document in item["documents"])


def share_in_training(item: FoundItem) -> float:
    """The share of an item's n-grams that are in one training document, the one with most of it."""
    of_training = [found["shared"] for found in item["documents"] if found["split"] == TRAIN]
    return max(of_training, default=0) / item["ngrams"]


def by_step(uses: Iterable[ItemUse]) -> list[ItemUse]:
    """Rows in the order of their steps."""
    return sorted(uses, key=lambda use: (use["step"], use["row"]))


def losses_of(found: FoundDocument) -> tuple[float | None, float | None]:
    """(loss before the first step that trained on an item's words in a document, loss of the last
    later step that did).

    None if it is not known: a step computes a row's loss before it learns from the row.
    """
    uses = found["uses"]
    if not uses:
        return None, None
    before = uses[0]["loss"]
    after = uses[-1]["loss"] if uses[-1]["step"] > uses[0]["step"] else None
    return before, after


class Benchmark:
    """The items of some tasks, numbered together, and the index of their n-grams."""

    def __init__(self, tasks: Sequence[Task], *, n: int) -> None:
        self.tasks = tasks
        labels = [task.label for task in tasks]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(
                    f"{label}: two tasks have this name, which the result is stored under; rename one"
                )
        texts = [item.text for task in tasks for item in task.items]
        task_of = [number for number, task in enumerate(tasks) for _ in task.items]
        self.index = Index(texts, task_of, n=n)
        if not self.index.sizes.any():
            raise ValueError(
                f"{tasks[0].label}: no item has {min(n, SHORTEST)} words or more of its own, so none "
                f"can be looked for; pass longer items, or a smaller --ngram"
            )

    def results(
        self,
        hits: Sequence[Hit],
        uses: Mapping[tuple[str, int], list[ItemUse]],
        steps: int,
        not_searched: list[str],
    ) -> dict[str, TaskResult]:
        """{task: its result} after `steps` steps of a run, from what was found in its data.

        uses: {(training document, number of an item): rows that the model learned the item from}.
        """
        documents: dict[int, list[FoundDocument]] = {}  # by item
        for split, place, shared, without in hits:
            learned_from = uses.get((place.name, shared.item), []) if split == TRAIN else []
            found: FoundDocument = {
                "document": place.name,
                "bucket": place.bucket,
                "split": split,
                "without": without,
                "shared": shared.num_ngrams,
                "words": shared.words,
                "uses": by_step(learned_from),
            }
            documents.setdefault(shared.item, []).append(found)

        results: dict[str, TaskResult] = {}
        number = 0
        for task in self.tasks:
            found_items: list[FoundItem] = []
            sizes = self.index.sizes[number : number + len(task.items)]
            for item, num_ngrams in zip(task.items, sizes.tolist()):
                if number in documents:
                    found_items.append(
                        {"line": item.line, "ngrams": num_ngrams, "documents": documents[number]}
                    )
                number += 1
            results[task.label] = {
                "hash": task.hash,
                "ngram": self.index.n,
                "steps": steps,
                "items": len(task.items),
                "not_looked_for": int((sizes == 0).sum()),
                "found": found_items,
                "not_searched": not_searched,
            }
        return results


class Counts(NamedTuple):
    """A line of the table of tasks."""

    task: str
    ngram: int
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
        in_data += is_in_data(item)
        seen += any(use["step"] < step for use in uses_of(item))
    num_items = result["items"]
    skipped = result["not_looked_for"]
    return Counts(label, result["ngram"], num_items, skipped, in_data, seen)


def store(run_dir: Path, results: Mapping[str, TaskResult]) -> Path:
    """Add the results of tasks to RUN/contamination.json, and return its path. Those of other tasks
    stay."""
    path = run_dir / RESULT_NAME
    merged = {**read_results(run_dir), **results}
    write_json(path, finite({"format_version": 1, "tasks": merged}))
    return path


def read_results(run_dir: Path) -> dict[str, TaskResult]:
    """{task: its result} of a run, empty if it was not checked. ValueError if the file is
    corrupt."""
    path = run_dir / RESULT_NAME
    if not path.is_file():
        return {}
    tasks = read_json(path, {"tasks": dict})["tasks"]
    return read_json(path, {"tasks": dict.fromkeys(tasks, RESULT)})["tasks"]


def describe(results: Mapping[str, TaskResult], step: int) -> list[str]:
    """Sentences that explain the table of a run's results for its first `step` steps."""
    sentences = [
        "An item is in the data if a training document shares n consecutive words with it (of a shorter "
        "item, all words), and seen if the model learned from such words."
    ]
    searched = min(result["steps"] for result in results.values())
    if searched < step:
        sentences.append(f"Only the first {counted(searched, 'step')} were searched.")
    return sentences + gap_sentences(results)


def gap_sentences(results: Mapping[str, TaskResult]) -> list[str]:
    """A sentence about the training that results do not cover; none if they cover all of it."""
    gaps: dict[str, None] = {}
    for result in results.values():
        gaps |= dict.fromkeys(result["not_searched"])
    if not gaps:
        return []
    return [f"Not searched, so items may have been seen there: {'; '.join(gaps)}."]


def write_list(path: Path, hits: Sequence[Hit], train: Mapping[str, Manifest], others: str) -> int:
    """Write the training documents that share n-grams with items as a list for
    --without-documents, and return their number. `train`: the manifests of all training files, which
    were searched. `others`: the text of another list, which the new one includes; then only files
    that were searched for both count as searched. ValueError if the file exists and lists other
    documents."""
    names = dict.fromkeys(hit.document.name for hit in hits if hit.split == TRAIN)
    of_hits = {name.rpartition(":")[0] for name in names}
    versions = versions_of(train)
    before = searched_in(others.splitlines())
    searched = before & versions.keys() if before else versions.keys()

    lines: dict[str, None] = {}  # in order, each once
    for line in others.splitlines():
        stated = VERSION_LINE.fullmatch(line)
        if stated and stated["name"] not in searched:
            line = version_line("of", stated["name"], stated["footer"])
        lines[line] = None
    for name, footer in versions.items():
        if name in searched:
            lines[version_line("searched", name, footer)] = None
        elif name in of_hits:
            lines[version_line("of", name, footer)] = None
    lines |= names

    if path.exists() and not is_same_list(path.read_text().splitlines(), [*lines]):
        raise ValueError(
            f"{path}: the file exists and is another list, which a run may need to resume; name a new "
            f"file with --list=FILE"
        )
    write_bytes(path, "".join(f"{line}\n" for line in lines).encode())
    return len(names)


def is_same_list(old: Iterable[str], new: Iterable[str]) -> bool:
    """Whether a run that uses a list of documents may use another one: they name the same documents,
    of the same versions of the files that both name."""
    documents: list[set[str]] = []
    versions: list[dict[str, str]] = []
    for lines in (old, new):
        stated = {line: VERSION_LINE.fullmatch(line) for line in lines}
        documents.append({line for line, version in stated.items() if version is None})
        versions.append({found["name"]: found["footer"] for found in stated.values() if found})
    before, now = versions
    return documents[0] == documents[1] and all(
        before[name] == now[name] for name in before.keys() & now.keys()
    )
