"""
Where a run has used a document, as tables; nanochat/run_uses.py explains how the uses are found.

    a document, by its name   --+
                                +--> its passes: each row with its tokens, and what became of the others
    all documents with a text --+

A document of more than ROWS rows, such as a book or one that was read in many passes, has at most
LINES lines, each of which sums up some rows that follow each other.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from nanochat.common import abridged, counted, table, visible
from nanochat.find import DocumentPlace, announce_search, documents_with, find_document
from nanochat.order import StreamConfig
from nanochat.run_dir import finite
from nanochat.run_stream import Opened, line_after
from nanochat.run_uses import Ancestry, Content, Part, Traced, content_of
from nanochat.sources import Place

DOCUMENTS = 20  # documents with a text that are shown
TRACED = 200  # those that are followed through the run, to find out which ones to show
ROWS = 40  # rows of a document that are listed; of more, lines sum them up
LINES = 16  # such lines
STEPS = 8  # rows that such a line names, if there are no more
EPOCH = (
    "the number of the shuffle; with fewer documents than lanes, some lanes begin with a later one"
)
EPOCH_OF_SAMPLES = "how often these tokens come up before, in the order of the samples"
LEGEND = """\
row: its number in the step; lane: the virtual reader; start, stop: its tokens from start to before stop are in the row;
loss: the row's mean; numbers count from 0"""
GROUPS_LEGEND = """\
rows: how many use it; tokens: how many of its tokens are in them; loss: their mean;
step:row: which rows, the first and the last of many; numbers count from 0; --json prints every row"""


# ---- which documents -----------------------------------------------------------------------------


def print_document(opened: Opened, name: str, *, as_json: bool) -> None:
    """Print every training row with tokens of the document FILE:DOC. ValueError if there is none."""
    ancestry = Ancestry(opened)
    parts = ancestry.parts()
    data = {split: part.sources for split, part in parts.items()}
    split, document = find_document(data, name)
    traced = ancestry.trace(parts[split], document)
    ancestry.check([traced])
    print_uses(ancestry, look_up(ancestry, [traced], ""), as_json=as_json)


def print_text(opened: Opened, text: str, *, as_json: bool) -> None:
    """Print every training row with tokens of documents that contain a text: of at most DOCUMENTS of
    them, first those that the run trained on, by their first step. ValueError if there are none."""
    if not text:
        raise ValueError("--text: it is empty; pass some words from a document")
    ancestry = Ancestry(opened)
    found = find_text(ancestry, text)
    shown = look_up(ancestry, [*found.used, *found.others][:DOCUMENTS], text)
    if not as_json:
        learned = [document for document in shown if document.traced.steps]
        num_rows = sum(len(document.rows_with_text) for document in learned)
        print_found(ancestry, found, text, num_rows)
    print_uses(ancestry, shown, as_json=as_json)


class Found(NamedTuple):
    """Documents that contain a text."""

    used: list[Traced]  # those that the run trained on, by their first step
    others: list[Traced]
    is_cut: bool  # whether the search stopped before the end of the data


def find_text(ancestry: Ancestry, text: str) -> Found:
    """The documents that contain a text. ValueError if there are none."""
    used: list[Traced] = []
    others: list[Traced] = []
    matches = matches_of([*ancestry.parts().values()], text)
    for part, document in islice(matches, TRACED):
        traced = ancestry.trace(part, document)
        if traced.steps:
            used.append(traced)
        else:
            others.append(traced)
        if len(used) == DOCUMENTS:
            break
    used.sort(key=lambda traced: traced.steps[0])
    ancestry.check(used + others)
    if not used and not others:
        unsearched = f". {ancestry.gap_sentence()}" if ancestry.gaps else ""
        raise ValueError(
            f"--text: {text!r} occurs in no document of the files of {ancestry.who()}; capitals, "
            f"spaces and line breaks count (bash writes a line break as $'one\\ntwo'), but not with "
            f"--texts=FILE.jsonl, which compares words{unsearched}"
        )
    return Found(used, others, is_cut=next(matches, None) is not None)


def matches_of(parts: Sequence[Part], text: str) -> Iterator[tuple[Part, DocumentPlace]]:
    """(part, document) of all documents that contain a text."""
    announce_search((source, part.known) for part in parts for source in part.sources.values())
    for part in parts:
        for bucket, source in part.sources.items():
            for document in documents_with(source, bucket, text, part.known):
                yield part, document


def print_found(ancestry: Ancestry, found: Found, text: str, num_rows: int) -> None:
    """Print how many documents with a text were found, how many of them were used, and that `num_rows`
    rows have all of it."""
    number = len(found.used) + len(found.others)
    first = "first " if found.is_cut else ""
    num_left_out = sum(traced.is_left_out for traced in found.others)
    masked = f" ({num_left_out:,} left out by --without-documents)" if num_left_out else ""
    rows = f", and on all of it in {counted(num_rows, 'row') if num_rows else 'no row'}"
    end = "; the search stopped there" if found.is_cut else ""
    if found.is_cut or number > DOCUMENTS:
        rows += " of those listed"
        end += f"; at most {DOCUMENTS} are listed"
    print(
        f"{visible(text)!r}: {ancestry.who()} trained on parts of {len(found.used)} of the {first}"
        f"{counted(number, 'document')} containing it{masked}{rows if found.used else ''}{end}"
    )


# ---- what the run did with them ------------------------------------------------------------------


class LookedUp(NamedTuple):
    """A document, and what a run did with it, as --json prints it."""

    traced: Traced
    origin: Place | None  # its place in the user's own file, if known
    about: dict[str, Any]
    passes: list[dict[str, Any]]
    rows_with_text: list[dict[str, Any]]  # the rows that have all of the text


def look_up(ancestry: Ancestry, documents: Sequence[Traced], text: str) -> list[LookedUp]:
    """What a run did with documents. `text`: the one that --text asks for, or ""."""
    losses_of = lru_cache(None)(ancestry.losses)
    found = []
    for traced in documents:
        content = content_of(traced.opened, traced.source, traced.document)
        passes = passes_of(ancestry, traced, content.ids, losses_of, text)
        uses = [use for of_epoch in passes for use in of_epoch["uses"]]
        with_text = [use for use in uses if use.get("has_text")]
        about = about_document(ancestry, traced, content, text)
        found.append(LookedUp(traced, content.origin, about, passes, with_text))
    return found


def print_uses(ancestry: Ancestry, documents: Sequence[LookedUp], *, as_json: bool) -> None:
    """Print the rows of documents, epoch by epoch, and what the columns mean."""
    if as_json:
        for document in documents:
            line = {**document.about, "passes": document.passes}
            print(json.dumps(finite(line), allow_nan=False))
        return
    legends: dict[str, None] = {}
    for document in documents:
        print_about(document.about, document.origin)
        legends[print_passes(ancestry.opened, document.passes)] = None
        reason = why_not_learned(ancestry, document.traced)
        if reason:
            print(reason)
    if ancestry.gaps:
        print(ancestry.gap_sentence())
    if any(legends):
        has_shuffles = isinstance(ancestry.opened.config, StreamConfig)
        print(f"epoch: {EPOCH if has_shuffles else EPOCH_OF_SAMPLES}")
    for legend in filter(None, legends):
        print(legend)


def passes_of(
    ancestry: Ancestry,
    traced: Traced,
    ids: np.ndarray,
    losses_of: Callable[[int], list[float | None] | None],
    text: str,
) -> list[dict[str, Any]]:
    """A document's passes, as --json prints them: in each epoch, the rows with its tokens, and what
    became of the others. `text`: the one that --text asks for, or ""."""
    passes = []
    for one_pass in traced.passes:
        uses = []
        for use in one_pass.uses:
            losses = losses_of(use.step)
            line = use._asdict()
            line["loss"] = losses[use.row] if losses else None
            if text:  # a row may hold another part of the document, or all of it without a loss
                decode = ancestry.opened.data.tokenizer.decode
                part = decode(ids[use.start : use.stop].tolist())
                without_loss = decode(ids[use.start : use.start + use.off].tolist())
                line["has_text"] = part.count(text) > without_loss.count(text)
            uses.append(line)
        of_epoch = asdict(one_pass)
        of_epoch["uses"] = uses
        of_epoch["cropped_after"] = one_pass.cropped_after
        of_epoch["fate"] = ancestry.fate(one_pass)
        passes.append(of_epoch)
    return passes


def about_document(
    ancestry: Ancestry, traced: Traced, content: Content, text: str
) -> dict[str, Any]:
    """What a document is, as --json prints it: its place, its first words and, if known, its line
    in the user's own file. `text`: the one that --text asks for, or ""."""
    about: dict[str, Any] = {
        "document": traced.document.name,
        "bucket": traced.document.bucket,
        "split": traced.split,
        "text": content.words,
        "without": traced.is_left_out,
        "not_searched": ancestry.gaps,
    }
    if content.origin is not None:
        whole = ancestry.opened.data.tokenizer.decode(content.ids.tolist())
        before = whole.split(text)[0] if text else ""
        about["line"] = content.origin.line
        about["text_line"] = line_after(content.origin, before)
    if traced.opened is not ancestry.opened:
        about["run"] = traced.opened.run.name
    return about


def print_about(about: Mapping[str, Any], origin: Place | None) -> None:
    """Print what `about_document` returns."""
    kind = "" if about["split"] == "train" else ", validation"
    if "run" in about:
        kind = f", a file of {about['run']}"
    name = visible(about["document"])
    print(f"{name} ({about['bucket']}{kind}): {visible(about['text'])}")
    if origin is not None:
        where = f"the document begins at line {origin.line:,} of {visible(origin.file)}"
        if about["text_line"] != origin.line:
            where += f", the text at line {about['text_line']:,}"
        print(where)


def why_not_learned(ancestry: Ancestry, traced: Traced) -> str:
    """Why a run does not learn from a document; empty if it does, or if the passes give the
    reason."""
    opened = traced.opened
    if traced.split != "train":
        return "held out for validation: the run never trains on it"
    if traced.is_left_out:
        return f"from step {opened.first_step:,} on, its targets are masked (--without-documents)"
    if traced.passes:
        return ""
    if opened is not ancestry.opened:
        return f"{opened.run.name} had not trained on it when the run left it"
    return "the curriculum does not use its bucket"


def print_passes(opened: Opened, passes: list[dict[str, Any]]) -> str:
    """Print the rows that used a document, or, if --text names a text, those of them that have all of
    it, and what became of its other tokens. Returns the legend; "" without rows."""
    if opened.run.outcome == "completed":  # leave out epochs that the run may never have begun
        passes = [of_epoch for i, of_epoch in enumerate(passes) if of_epoch["uses"] or i == 0]
    uses = [use for of_epoch in passes for use in of_epoch["uses"]]
    asks_for_text = any("has_text" in use for use in uses)
    with_it = [use for use in uses if use.get("has_text")]
    others = len(uses) - len(with_it)
    shown = with_it or uses
    if asks_for_text and not with_it and others > ROWS:
        shown = []
    legend = ""
    if len(shown) > ROWS:
        print_summed_up(shown)
        legend = GROUPS_LEGEND
    elif shown:
        columns = ["epoch", "step", "row", "lane", "start", "stop", "loss"]
        lines = [[use[name] for name in columns] for use in shown]
        print(*table(columns, lines), sep="\n")
        legend = LEGEND
    if asks_for_text and not with_it:
        these = "these have" if shown else f"{counted(others, 'row')} have"
        print(f"no row has all of the text: {these} other parts of the document")
    elif with_it and others:
        print(f"not listed: {counted(others, 'row')} with other parts of the document")
    print_endings(passes)
    return legend


def print_summed_up(uses: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of at most LINES lines, each of which sums up rows that follow each other."""
    size = -(-len(uses) // LINES)
    lines = []
    for at in range(0, len(uses), size):
        part = uses[at : at + size]
        epochs = sorted({use["epoch"] for use in part})
        tokens = sum(use["stop"] - use["start"] for use in part)
        losses = [use["loss"] for use in part if use["loss"] is not None]
        loss = math.fsum(losses) / len(losses) if losses else None
        names = abridged([f"{use['step']}:{use['row']}" for use in part], STEPS)
        lines.append([ranges(epochs), len(part), tokens, loss, " ".join(names)])
    print(f"{len(uses):,} rows, up to {size} in a line:")
    print(*table(["epochs", "rows", "tokens", "loss", "step:row"], lines), sep="\n")


def print_endings(passes: Sequence[Mapping[str, Any]]) -> None:
    """Print what became of the tokens that are in no row, once for all passes that it happened in."""
    endings: dict[str, list[Mapping[str, Any]]] = {}
    for of_epoch in passes:
        is_cropped = of_epoch["cropped_after"] is not None
        ending = "cropped" if is_cropped else of_epoch["fate"]
        endings.setdefault(ending, []).append(of_epoch)
    for ending, same in endings.items():
        kept = [of_epoch["cropped_after"] for of_epoch in same]
        if ending == "cropped" and len(same) > 1:
            what = f"cropped, with {min(kept):,} to {max(kept):,} of its tokens in rows"
        else:
            what = same[0]["fate"]
        if what:
            print(f"{epochs_text(same)}: {what}")


def epochs_text(passes: Sequence[Mapping[str, Any]]) -> str:
    """The epochs of passes, such as "epochs 0 to 5, 7"."""
    noun = "epochs" if len(passes) > 1 else "epoch"
    return f"{noun} {ranges([of_epoch['epoch'] for of_epoch in passes])}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: "0 to 5, 7"."""
    runs: list[list[int]] = []  # of consecutive numbers
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = []
    for run in runs:
        first = run[0]
        last = run[-1]
        parts.append(f"{first} to {last}" if last > first else str(first))
    return ", ".join(parts)
