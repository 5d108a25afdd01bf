"""
Which items of a benchmark a run has trained on, as tables; nanochat/seen.py explains how they are found.

    task      line  document           shared  of  steps  loss before  loss after
    qa.jsonl  12    shard_0.parquet:7  9       11  57     3.1          2.2

    task      n   items  not looked for  in the data  seen  share
    qa.jsonl  13  200    3               14           9     4.5 %
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from nanochat import seen
from nanochat.common import abridged, counted, table, visible
from nanochat.run_dir import finite
from nanochat.run_stream import Opened
from nanochat.run_uses import find_items
from nanochat.seen import FoundDocument, FoundItem, TaskResult

log = logging.getLogger(__name__)

ITEMS = 20  # items that the table shows
DOCUMENTS, STEPS = 4, 4  # documents of an item that it shows, and steps of each
LEGEND = """\
shared, of: how many of the item's n-grams are in the document, and how many it has; steps: those that trained on some
of them in this document, -: none; loss before: of the row, at the first of these steps; loss after: at the last later
one; items of which a training document has the largest share come first; of an item, the training document with most of
it, trained on or not, then others that were trained on
n: words of an n-gram; in the data: items that share one with a training document; seen: items that the model learned
one of; numbers count from 0, lines from 1"""


def print_seen(opened: Opened, tasks: Sequence[seen.Task], n: int, *, as_json: bool) -> None:
    """Print which items of tasks share n-grams of `n` words with what a run has trained on, and store
    it in the run."""
    results = find_items(opened, seen.Benchmark(tasks, n=n))
    num_steps = opened.run.num_steps
    counts = [seen.count(label, result, num_steps) for label, result in results.items()]
    if as_json:
        for label, result in results.items():
            for item in result["found"]:
                print(json.dumps(finite({"task": label, **item}), allow_nan=False))
        for of_task in counts:
            gaps = results[of_task.task]["not_searched"]
            print(json.dumps({**of_task._asdict(), "not_searched": gaps}))
    else:
        print_items(results)
        print(*table(seen.HEADER, [of_task.cells for of_task in counts]), sep="\n")
        print(*seen.gap_sentences(results), LEGEND, sep="\n")
    path = seen.store(opened.run.run_dir, results)
    log.info("result: %s; scripts.report and the model card show it", path)


def print_items(results: Mapping[str, TaskResult]) -> None:
    """Print a table of the first items that were found: a line per document that has words of an
    item. First come the items of which a training document has the largest share; of equal shares,
    those that were seen."""
    found = [(label, item) for label, result in results.items() for item in result["found"]]

    def rank(of_task: tuple[str, FoundItem]) -> tuple[float, bool]:
        _, item = of_task
        return seen.share_in_training(item), bool(seen.uses_of(item))

    found.sort(key=rank, reverse=True)
    rows = []
    for label, item in found[:ITEMS]:
        for document in shown_documents(item):
            rows.append([visible(label), item["line"], *cells_of(document, item["ngrams"])])
    columns = ["task", "line", "document", "shared", "of", "steps", "loss before", "loss after"]
    if rows:
        print(*table(columns, rows), sep="\n")
    if len(found) > ITEMS:
        print(f"not listed: {counted(len(found) - ITEMS, 'item')}; --json shows all")


def shown_documents(item: FoundItem) -> list[FoundDocument]:
    """The documents that the table shows of an item, at most DOCUMENTS: the training document
    that has most of it, trained on or not, and others that were trained on, those that have most of
    it first. A validation document is shown only if there is no other."""

    def rank(document: FoundDocument) -> tuple[bool, int, bool]:
        return document["split"] == seen.TRAIN, document["shared"], bool(document["uses"])

    closest, *others = sorted(item["documents"], key=rank, reverse=True)
    trained = [document for document in others if document["uses"]]
    return [closest, *trained][:DOCUMENTS]


def cells_of(document: FoundDocument, num_ngrams: int) -> list[Any]:
    """The cells of the table of items that are about a document. `num_ngrams`: of the item."""
    name = visible(document["document"]) + " (validation)" * (document["split"] != seen.TRAIN)
    steps = sorted({use["step"] for use in document["uses"]})
    shown = abridged([str(step) for step in steps], STEPS)
    before, after = seen.losses_of(document)
    return [name, document["shared"], num_ngrams, ", ".join(shown) or "-", before, after]
