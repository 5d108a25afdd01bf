"""
In which steps a run used a document, also in the ancestors of a fork.

    document --find.History (lanes) or sample_passes (Megatron's order)--> passes: rows, step by step
    a fork:    steps from its first one on: its own;   before: its parent's, and so on

and, from a benchmark: which of its items the run has learned, and in which rows (`find_items`).
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from nanochat import seen
from nanochat.common import few
from nanochat.find import DocumentPlace, History, Pass, Use, find_document, sample_passes
from nanochat.order import StreamConfig
from nanochat.run_stream import Opened, first_words, open_stream_of, recorded_losses
from nanochat.sources import Place, Source
from nanochat.stream import Cursor, open_stream

log = logging.getLogger(__name__)


class Traced(NamedTuple):
    """A document and its way through the run; one of validation has no passes."""

    split: str  # train or validation
    document: DocumentPlace
    passes: list[Pass]

    @property
    def is_used(self) -> bool:
        """Whether the run trained on some of its tokens."""
        return any(one_pass.uses for one_pass in self.passes)

    @property
    def first_step(self) -> int:
        """The first step that trained on some of its tokens."""
        return min(use.step for one_pass in self.passes for use in one_pass.uses)


def open_history(opened: Opened) -> History:
    """What fixes the rows of a run with --order=lanes."""
    run = opened.run
    first = opened.first_step

    @lru_cache(32)
    def nearest(step: int) -> tuple[int, list[Cursor] | None]:
        return run.nearest_cursors(max(step, first)) or (first, None)

    return History(
        opened.config,
        opened.data.train,
        opened.data.tokenizer.fingerprint,
        opened.rows_per_lane,
        sorted({first, *run.cursor_files}),
        nearest,
        run.num_steps,
        max(run.num_steps, run.horizon or 0),
    )


def tracer(opened: Opened) -> Callable[[DocumentPlace], Iterator[Pass]]:
    """The function that follows a training document through the run, epoch by epoch."""
    config = opened.config
    if isinstance(config, StreamConfig):
        return open_history(opened).passes
    run = opened.run
    fingerprint = opened.data.tokenizer.fingerprint
    stream: Any = open_stream(config, opened.data.train, [0], tokenizer=fingerprint)
    _, cursors = run.nearest_cursors(opened.first_step) or (0, None)
    return partial(
        sample_passes,
        stream,
        rows_per_step=opened.rows_per_step,
        first_step=opened.first_step,
        begin=cursors[0]["samples"] if cursors else 0,
        trained=run.num_steps,
    )


class Ancestry:
    """Follows training documents through a run and its ancestors, up to where it left them."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.runs = [*lineage(opened)]  # the newest first
        self._tracers = [tracer(of_run) for of_run, _ in self.runs]

    def passes(self, document: DocumentPlace) -> list[Pass]:
        """What the runs used of a document, epoch by epoch. What became of its other tokens is said
        of the run itself. An ancestor that masked the document learned nothing from it, and does
        not count."""
        earlier: dict[int, list[Use]] = {}
        for (of_run, end), passes_of in zip(self.runs[:0:-1], self._tracers[:0:-1]):
            for place in learned_documents(of_run, [document.name]):
                for one_pass in passes_of(place):
                    uses = [use for use in one_pass.uses if use.step < end]
                    earlier.setdefault(one_pass.epoch, []).extend(uses)
        passes = []
        for one_pass in self._tracers[0](document):
            before = earlier.pop(one_pass.epoch, [])
            passes.append(replace(one_pass, uses=before + one_pass.uses))
        for epoch, uses in earlier.items():  # the run does not use its bucket
            if uses:
                passes.append(Pass(epoch, uses[0].lane, uses, length=0))
        return passes

    def losses(self, step: int) -> list[float | None] | None:
        """The losses of a step's rows, None if they were not recorded, or are corrupt."""
        owner = next(of_run for of_run, _ in self.runs if of_run.first_step <= step)
        return recorded_losses(owner.run, step)

    def who(self) -> str:
        """The runs, in words."""
        names = ["the run"]
        for of_run, end in self.runs[1:]:
            names.append(f"{of_run.run.name} (steps {of_run.first_step:,} to {end - 1:,})")
        return " or ".join(names)


def uses_of(
    opened: Opened, documents: Sequence[DocumentPlace]
) -> Mapping[DocumentPlace, Sequence[Use]]:
    """The uses of training documents in the completed steps of a run."""
    if isinstance(opened.config, StreamConfig):
        return open_history(opened).uses_of(documents)
    passes_of = tracer(opened)
    return {place: [use for of in passes_of(place) for use in of.uses] for place in documents}


def fate(opened: Opened, one_pass: Pass) -> str:
    """What became of a document's tokens that are in no row; empty if every token is in a row."""
    run, expected = opened.run, one_pass.expected
    lane = "" if one_pass.lane is None else f" in lane {one_pass.lane}"
    has_rest = one_pass.pending or expected is not None
    if has_rest and run.outcome == "completed":
        if not one_pass.uses:
            return "never trained on: the run ended first"
        stop = max(use.stop for use in one_pass.uses)
        rest = (
            "its other tokens"
            if one_pass.lane is None
            else f"tokens {stop:,} to {one_pass.length - 1:,}"
        )
        return f"{rest} never trained on: the run ended first"
    if one_pass.pending:
        return f"pending{lane}"
    if expected is not None and math.isfinite(expected):
        return f"expected around step {expected:,.0f}{lane}"
    if expected is not None:
        end = max(run.num_steps, run.horizon or 0)
        return f"not reached: the run ends with step {end - 1:,}"
    if one_pass.cropped_after is not None:
        return f"cropped from token {one_pass.cropped_after:,} on"
    if one_pass.uses:
        return ""
    begins_later = opened.first_step > 0 or 0 in run.cursor_files
    return "before this run began" if begins_later else "in no row"


class Content(NamedTuple):
    """What a document holds."""

    ids: np.ndarray
    words: str  # the first ones
    origin: Place | None  # where it is in the user's own files, if it was prepared


def content_of(opened: Opened, source: Source, document: DocumentPlace) -> Content:
    """What a document holds; nothing for one that is only counted."""
    if document.group < 0:
        return Content(np.zeros(0, np.int64), "", None)
    [content] = source.read(document.group, np.array([document.row]))
    ids = content.ids[:]
    origin = source.origin_of(document.group, document.row)
    return Content(ids, first_words(opened, ids), origin)


def lineage(opened: Opened) -> Iterator[tuple[Opened, int]]:
    """(a run, the number of its steps that count): the run itself; of a fork, also its ancestors up
    to where it left them."""
    end = opened.run.num_steps
    while True:
        yield opened, end
        run = opened.run
        begun_from = run.config.get("init_from")
        if begun_from:
            log.warning(
                "%s began with the weights of %s, whose data is not searched", run.name, begun_from
            )
        if run.fork is None:
            return
        if run.parent_dir is None:
            log.warning(
                "%s is a fork of %s, which no longer exists: its steps are not searched",
                run.name,
                run.fork.place,
            )
            return
        end = run.fork.step
        try:
            parent = open_stream_of(run.parent_dir, opened.moved_to)
        except (OSError, ValueError) as e:
            log.warning(
                "%s continues %s, whose steps are not searched: %s", run.name, run.fork.place, e
            )
            return
        own = training_files(opened)
        others = [name for name in training_files(parent) if name not in own]
        if others:
            log.warning(
                "%s continues %s, which read files that are searched only in %s: %s",
                run.name,
                run.fork.place,
                parent.run.name,
                few(others),
            )
        opened = parent


def training_files(opened: Opened) -> dict[str, None]:
    """The names of the files that a run trains on."""
    files: dict[str, None] = {}
    for manifest in opened.data.manifests["train"].values():
        files |= dict.fromkeys(entry["name"] for entry in manifest["files"])
    return files


def learned_documents(opened: Opened, names: Sequence[str]) -> list[DocumentPlace]:
    """Those of some training documents FILE:DOC that a run reads and whose targets are not
    masked."""
    documents = []
    for name in names:
        try:
            _, document = find_document({"train": opened.data.train}, name)
        except ValueError:  # its file joined in a later fork
            continue
        if not seen.is_masked(opened.data.train[document.bucket], document):
            documents.append(document)
    return documents


def item_uses(
    opened: Opened, benchmark: seen.Benchmark, names: Sequence[str]
) -> dict[tuple[str, int], list[seen.ItemUse]]:
    """{(document, number of an item): rows that the model learned the item from} of some training
    documents, over the run and its ancestors."""
    found: dict[tuple[str, int], list[seen.ItemUse]] = {}
    for of_run, end in lineage(opened):
        losses_of = lru_cache(64)(partial(recorded_losses, of_run.run))
        skipped = {event["step"] for event in of_run.run.named("skipped")}  # not applied
        decode = of_run.data.tokenizer.decode
        documents = learned_documents(of_run, names)
        for document, all_uses in uses_of(of_run, documents).items():
            uses = [use for use in all_uses if use.step < end and use.step not in skipped]
            if not uses:
                continue
            ids = content_of(of_run, of_run.data.train[document.bucket], document).ids
            parts = [decode(ids[use.start : use.stop].tolist()) for use in uses]
            for shared in benchmark.index.find(parts):
                use = uses[shared.text]
                losses = losses_of(use.step)
                item_use: seen.ItemUse = {
                    "step": use.step,
                    "epoch": use.epoch,
                    "row": use.row,
                    "loss": losses[use.row] if losses else None,
                }
                found.setdefault((document.name, shared.item), []).append(item_use)
    return found


def find_items(opened: Opened, benchmark: seen.Benchmark) -> dict[str, seen.TaskResult]:
    """{task: which of its items are in the data, and which the run trained on}."""
    data = {"train": opened.data.train, "validation": opened.data.val}
    hits = list(seen.search(data, benchmark.index))
    names = dict.fromkeys(hit.document.name for hit in hits if hit.split == seen.TRAIN)
    uses = item_uses(opened, benchmark, [*names])
    return benchmark.results(data, hits, uses, opened.run.num_steps)
