"""
In which steps a run used a document, also in the ancestors of a fork.

    document --find.History (lanes) or sample_passes (of samples)--> passes: rows, step by step
    a fork:    steps from its first one on: its own;   before: its parent's, and so on
               files of an ancestor that the fork does not read are searched, too

For a benchmark, `find_items` tells which of its items the run has learned, and from which rows.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from nanochat import seen
from nanochat.common import hash_json
from nanochat.find import DocumentPlace, History, Pass, Use, find_document, sample_passes
from nanochat.ngrams import Index
from nanochat.order import StreamConfig
from nanochat.pins import pins_of
from nanochat.run_stream import Opened, first_words, open_stream_of, recorded_losses
from nanochat.sources import Place, Source
from nanochat.stream import Cursor, open_stream

log = logging.getLogger(__name__)


class Traced(NamedTuple):
    """A document and its way through the run; one of validation has no passes."""

    opened: Opened  # the run whose file it is in: the run itself, or an ancestor
    split: str  # train or validation
    document: DocumentPlace
    passes: list[Pass]

    @property
    def is_left_out(self) -> bool:
        """Whether --without-documents of `opened` lists it, so that this run masks its targets."""
        return seen.is_masked(self.source, self.document)

    @property
    def steps(self) -> list[int]:
        """The steps that trained on some of its tokens, ascending. A run that leaves it out trains
        on none of them, but its ancestors may have done so."""
        end = self.opened.first_step if self.is_left_out else math.inf
        uses = [use for one_pass in self.passes for use in one_pass.uses]
        return sorted({use.step for use in uses if use.step < end})

    @property
    def source(self) -> Source:
        """The source that the document is in."""
        data = self.opened.data
        sources = data.train if self.split == seen.TRAIN else data.val
        return sources[self.document.bucket]


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


class Part(NamedTuple):
    """Files in which documents are looked for: {bucket: source} of a split of a run, but for those
    with a `known` name, which another part has."""

    opened: Opened
    split: str
    sources: Mapping[str, Source]
    known: set[str]


class Ancestry:
    """Follows training documents through a run and its ancestors, up to where it left them."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.spans, self.gaps = lineage(opened)
        self._tracers = [tracer(span.opened) for span in self.spans]

    def parts(self) -> dict[str, Part]:
        """{name of a part: where documents are looked for}: the training files of the run, those
        that only its ancestors read, and the validation files of the run."""
        parts = {}
        for span in self.spans:
            of_run = span.opened
            is_own = of_run is self.opened
            name = seen.TRAIN if is_own else f"{of_run.run.name} before step {span.end}"
            parts[name] = Part(of_run, seen.TRAIN, of_run.data.train, span.known)
        parts["validation"] = Part(self.opened, "validation", self.opened.data.val, set())
        return parts

    def trace(self, part: Part, document: DocumentPlace) -> Traced:
        """A document of a part, and what the run and its ancestors used of it."""
        passes = self._passes(part.opened, document) if part.split == seen.TRAIN else []
        return Traced(part.opened, part.split, document, passes)

    def _passes(self, reader: Opened, document: DocumentPlace) -> list[Pass]:
        """What the runs used of a training document of one of them, epoch by epoch. What became of
        its other tokens is said of the run itself. An ancestor that masked the document learned
        nothing from it, and does not count."""
        file, _, _ = document.name.rpartition(":")
        [version] = [span.files[file] for span in self.spans if span.opened is reader]
        earlier: dict[int, list[Use]] = {}
        for span, passes_of in zip(self.spans[:0:-1], self._tracers[:0:-1]):
            if span.files.get(file) != version:
                continue
            for place in learned_documents(span.opened, [document.name]):
                for one_pass in passes_of(place):
                    uses = [use for use in one_pass.uses if use.step < span.end]
                    earlier.setdefault(one_pass.epoch, []).extend(uses)
        passes = []
        if reader is self.opened:
            for one_pass in self._tracers[0](document):
                before = earlier.pop(one_pass.epoch, [])
                passes.append(replace(one_pass, uses=before + one_pass.uses))
        for epoch, uses in earlier.items():  # the run does not use its bucket
            if uses:
                passes.append(Pass(epoch, uses[0].lane, uses, length=0))
        return passes

    def check(self, documents: Sequence[Traced]) -> None:
        """ValueError if rows that are packed again are not those that the runs trained on."""
        passes = [one_pass for traced in documents for one_pass in traced.passes]
        check_packing(self.spans, [use.step for one_pass in passes for use in one_pass.uses])

    def losses(self, step: int) -> list[float | None] | None:
        """The losses of a step's rows, None if they were not recorded, or are corrupt."""
        owner = next(span.opened for span in self.spans if span.opened.first_step <= step)
        return recorded_losses(owner.run, step)

    @property
    def first_step(self) -> int:
        """The first step that is searched: 0, unless an ancestor is not here."""
        return self.spans[-1].opened.first_step

    def fate(self, one_pass: Pass) -> str:
        """What became of a document's tokens that are in no row of the steps that are searched."""
        return fate(self.opened, one_pass, searched_from=self.first_step)

    def gap_sentence(self) -> str:
        """A sentence about the training that is not searched, if `gaps` has some."""
        return f"Not searched, so the model may have learned it there: {'; '.join(self.gaps)}."

    def who(self) -> str:
        """The runs, in words."""
        return " or ".join(["the run", *(span.opened.run.name for span in self.spans[1:])])


def uses_of(
    opened: Opened, documents: Sequence[DocumentPlace]
) -> Mapping[DocumentPlace, Sequence[Use]]:
    """The uses of training documents in the completed steps of a run."""
    if isinstance(opened.config, StreamConfig):
        return open_history(opened).uses_of(documents)
    passes_of = tracer(opened)
    return {place: [use for of in passes_of(place) for use in of.uses] for place in documents}


def fate(opened: Opened, one_pass: Pass, *, searched_from: int = 0) -> str:
    """What became of a document's tokens that are in no row; empty if every token is in a row.
    `searched_from`: the first step whose rows are known."""
    run = opened.run
    expected = one_pass.expected
    since = ""
    untrained = "never trained on"
    if searched_from > 0:
        since = f" from step {searched_from:,} on"
        untrained = f"not trained on{since}"
    lane = "" if one_pass.lane is None else f" in lane {one_pass.lane}"
    has_rest = one_pass.pending or expected is not None
    if has_rest and run.outcome == "completed":
        if not one_pass.uses:
            return f"{untrained}: the run ended first"
        stop = max(use.stop for use in one_pass.uses)
        rest = (
            "its other tokens"
            if one_pass.lane is None
            else f"tokens {stop:,} to {one_pass.length - 1:,}"
        )
        return f"{rest} {untrained}: the run ended first"
    if one_pass.pending:
        return f"pending{lane}"
    if expected is not None and math.isfinite(expected):
        return f"expected around step {expected:,.0f}{lane}"
    if expected is not None:
        end = max(run.num_steps, run.horizon or 0)
        return f"not reached{since}: the run ends with step {end - 1:,}"
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
    [content] = source.read(document.group, np.array([document.number]))
    ids = content.ids[:]
    origin = source.origin_of(document.group, document.number)
    return Content(ids, first_words(opened, ids), origin)


class Span(NamedTuple):
    """The steps of a run, or of an ancestor, that count, and the training files behind them."""

    opened: Opened
    end: int  # the number of its steps that count
    files: dict[str, str]  # {name of a training file: hash of what is pinned about it}
    known: set[str]  # names of those that a newer run reads, too


class Lineage(NamedTuple):
    """A run and its ancestors, up to where it left them."""

    spans: list[Span]  # the newest first
    gaps: list[str]  # which training cannot be searched, in words without paths


def lineage(opened: Opened) -> Lineage:
    """The run and, of a fork, its ancestors."""
    spans: list[Span] = []
    gaps: list[str] = []
    searched: set[tuple[str, str]] = set()
    end = opened.run.num_steps
    reader: Opened | None = opened
    while reader is not None:
        files = training_files(reader)
        known = {name for name, version in files.items() if (name, version) in searched}
        spans.append(Span(reader, end, files, known))
        searched |= files.items()
        fork = reader.run.fork
        if fork is not None:
            end = fork.step
        reader = _open_parent(reader, gaps)
    return Lineage(spans, gaps)


def _open_parent(opened: Opened, gaps: list[str]) -> Opened | None:
    """The parent of a fork, if the fork continues some of its steps. Adds what cannot be searched to
    `gaps`, and warns of files that cannot be read."""
    run = opened.run
    if run.begun_with:
        gaps.append(
            f"what the first weights of {run.name} learned, which are from {run.begun_with}"
        )
    if run.fork is None or run.fork.step == 0:
        return None
    steps = f"steps 0 to {run.fork.step - 1:,} ({run.name} continues {run.fork.place}"
    if run.parent_dir is None:
        gaps.append(f"{steps}, which was not found)")
        return None
    try:
        return open_stream_of(run.parent_dir, opened.moved_to)
    except (OSError, ValueError) as e:
        gaps.append(f"{steps}, whose files cannot be read)")
        log.warning(
            "%s continues %s, whose steps are not searched: %s", run.name, run.fork.place, e
        )
        return None


def check_packing(spans: Sequence[Span], steps: Sequence[int]) -> None:
    """ValueError if what was found in some steps of a run and its ancestors, whose lanes were packed
    again, rests on other rows than they trained on. Compared is the first step after the save from
    which the first one, and the last one, of each run was packed; without one, its last step."""
    for span in spans:
        first = span.opened.first_step
        of_run = [step for step in steps if first <= step < span.end] or [span.end - 1]
        for step in {min(of_run), max(of_run)}:
            if step >= first:
                span.opened.check_from(step)


def training_files(opened: Opened) -> dict[str, str]:
    """{name: hash of what is pinned about it} of the files that a run trains on."""
    files: dict[str, str] = {}
    for manifest in opened.data.manifests["train"].values():
        for entry in manifest["files"]:
            files[entry["name"]] = hash_json(pins_of(entry))
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
    spans: Sequence[Span], benchmark: seen.Benchmark, names: Sequence[str]
) -> dict[tuple[str, int], list[seen.ItemUse]]:
    """{(document, number of an item): rows that the model learned the item from} of some training
    documents, over the run and its ancestors."""
    found: dict[tuple[str, int], list[seen.ItemUse]] = {}
    for of_run, end, *_ in spans:
        losses_of = lru_cache(64)(partial(recorded_losses, of_run.run))
        skipped = of_run.run.steps_not_applied
        decode = of_run.data.tokenizer.decode
        documents = learned_documents(of_run, names)
        for document, all_uses in uses_of(of_run, documents).items():
            uses = [use for use in all_uses if use.step < end and use.step not in skipped]
            if not uses:
                continue
            ids = content_of(of_run, of_run.data.train[document.bucket], document).ids
            for number, item in learned_items(ids, uses, decode, benchmark.index):
                use = uses[number]
                losses = losses_of(use.step)
                item_use: seen.ItemUse = {
                    "step": use.step,
                    "epoch": use.epoch,
                    "row": use.row,
                    "loss": losses[use.row] if losses else None,
                }
                found.setdefault((document.name, item), []).append(item_use)
    return found


def learned_items(
    ids: np.ndarray, uses: Sequence[Use], decode: Callable[[Sequence[int]], str], index: Index
) -> Iterator[tuple[int, int]]:
    """(number of a use, number of an item) for each use of a document (its `ids`) from which the model
    learned some of the n-grams of an item."""
    texts = []
    without_loss = []  # the beginnings that an earlier row has learned
    for use in uses:
        learned_from = use.start + use.off
        texts.append(decode(ids[use.start : use.stop].tolist()))
        without_loss.append(decode(ids[use.start : learned_from].tolist()))
    known = {}
    for shared in index.find(without_loss):
        known[shared.text, shared.item] = shared.num_ngrams
    for shared in index.find(texts):
        is_known = known.get((shared.text, shared.item), 0) == shared.num_ngrams
        if not is_known:
            yield shared.text, shared.item


def find_items(opened: Opened, benchmark: seen.Benchmark) -> dict[str, seen.TaskResult]:
    """{task: which of its items are in the data, and which the run trained on}. The data of a fork
    includes the training files of its ancestors."""
    spans, gaps = lineage(opened)
    hits: list[seen.Hit] = []
    for span in spans:
        data = {seen.TRAIN: span.opened.data.train}
        if span.opened is opened:
            data["validation"] = opened.data.val
        hits += seen.search(data, benchmark.index, span.known)
    names = dict.fromkeys(hit.document.name for hit in hits if hit.split == seen.TRAIN)
    uses = item_uses(spans, benchmark, [*names])
    check_packing(spans, [use["step"] for found in uses.values() for use in found])
    return benchmark.results(hits, uses, opened.run.num_steps, gaps)
