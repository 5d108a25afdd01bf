"""Show the data of any step of a run: documents, digests, token counts. Loads no model and needs
no GPU.

    python -m scripts.inspect_data rows mine --step=17 --text           # the documents in each row of step 17
    python -m scripts.inspect_data rows mine --step=17 --sort=loss      # rows with the highest losses first
    python -m scripts.inspect_data digest mine --steps=0:10             # recomputed and compared with the log
    python -m scripts.inspect_data spikes mine                          # outlier steps, and their rows with high losses
    python -m scripts.inspect_data find mine --document=shard_00000.parquet:41      # or --text="some words"
    python -m scripts.inspect_data find mine --texts=questions.jsonl    # which items it trained on (--core: CORE's)
    python -m scripts.inspect_data ledger mine                          # where every token went
    python -m scripts.inspect_data rows --config=runs/laptop.yaml --data-path=mytext --step=0      # before a run
    python -m scripts.inspect_data rows mine.json --step=17 --data-path=mytext      # a receipt (scripts.receipt)
    python -m scripts.inspect_data rows mine --step=17 --data-path=/elsewhere       # a run whose data was moved

Steps are optimizer steps, counted from 0. To show a step, the command restores the nearest saved
cursors before it and packs the steps in between again, so any step of a long run takes seconds:

    saved cursors:   0 . . . . . . 1000 . . . . . . 2000
    step 1234:                     restore 1000, pack 234 steps, show the next one

Steps that the run has not reached yet work too. With flags of scripts.base_train instead of a run,
the command shows the stream that such a run would train on.
"""

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanochat import seen
from nanochat.cli import EXIT_FAILED, Parser, run_main, setup_logging, whole
from nanochat.common import counted, show, table, visible
from nanochat.config import Settings, add_flags, flag, from_flags
from nanochat.find import (
    DocumentPlace,
    announce_search,
    documents_with,
    find_document,
)
from nanochat.order import StreamConfig
from nanochat.receipt import open_receipt
from nanochat.rows import Row
from nanochat.run_dir import find_run, finite, is_run_dir
from nanochat.run_order import stream_config
from nanochat.run_reader import RunReader, ledger_table, unbalanced
from nanochat.run_stream import (
    Opened,
    first_words,
    ids_of,
    line_after,
    open_stream_of,
    places_in,
    row_means,
    step_digests,
)
from nanochat.run_uses import Ancestry, Content, Part, Traced, content_of, find_items
from nanochat.sources import Place
from nanochat.spikes import ENOUGH, NORMAL, WINDOW
from nanochat.start_run import complete_settings, find_data, inspect_run
from nanochat.stream import AnyStream, ledger
from nanochat.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LINES = 40  # documents that the table of a step shows
PASSES = 16  # lines that `find` prints for a document that was read in more passes
ROWS = 40  # rows that it lists; of a document in more rows, lines sum them up, too
STEPS = 8  # rows that such a line names, if there are no more
ITEM_DOCUMENTS, ITEM_STEPS = 4, 4  # documents of an item that --texts shows, and steps of each
DOCUMENTS, TRACED = 20, 200  # matches that --text shows, and that it follows through the run
OUTLIER = 4  # robust deviations above the preceding steps
AROUND = 8  # steps before a spike that define the usual loss of a bucket
WORST = 3  # rows shown per spike, and documents shown per row
# if a larger share of a step's rows stands out, the weights may be the cause, and not these rows
NEARLY_ALL = 0.9
EPOCH = (
    "the number of the shuffle; with fewer documents than lanes, some lanes begin with a later one"
)
LEGEND = f"""\
lane_row: the row's number in its lane; {{loss}}at: position in the row; tokens: how many are in the row
off: how many of them have no loss: the first ones after BOS, which an earlier row holds, too, or masked ones
(--text shows them as [no loss: ...]); group: part of the file; document, document_in_group: number among those of the
file and group that the run trains on, which are fewer with --val-fraction or --min-chars; line: in your own file
epoch: {EPOCH}
start, stop: its tokens from start to before stop; of: all it has; numbers count from 0"""
EPOCH_OF_SAMPLES = "how often these tokens come up before, in the order of the samples"
FIND_LEGEND = """\
row: its number in the step; lane: the virtual reader; start, stop: its tokens from start to before stop are in the row;
loss: the row's mean; numbers count from 0"""
GROUPS_LEGEND = """\
rows: how many use it; tokens: how many of its tokens are in them; loss: their mean;
step:row: which rows, the first and the last of many; numbers count from 0; --json prints every row"""
SEEN_LEGEND = """\
shared, of: how many of the item's n-grams are in the document, and how many it has; steps: those that trained on some
of them in this document, -: none; loss before: of the row, at the first of these steps; loss after: at the last later
one; items of which a training document has the largest share come first; of an item, the training document with most of
it, trained on or not, then others that were trained on
n: words of an n-gram; in the data: items that share one with a training document; seen: items that the model learned
one of; numbers count from 0, lines from 1"""
JUDGED = ("loss", "grad_norm")  # the numbers of a step in which spikes are looked for
PLACES = ("data_path", "val_path")  # the settings that a run may also get here


# ---- what the command line names -----------------------------------------------------------------


def check_needs_no_run(args: argparse.Namespace, is_receipt: bool) -> None:
    """ValueError if a command needs a run, but the command line names a receipt or flags."""
    wants_run = args.command
    if "sort" in args and args.sort:
        wants_run = "--sort=loss"
    if wants_run in ("--sort=loss", "spikes", "find"):
        given = "a receipt" if is_receipt else "flags"
        raise ValueError(
            f"{wants_run}: it needs the log and the saves of a run; name a run instead of {given}"
        )
    if args.command == "ledger" and args.step is None:
        raise ValueError(
            "ledger: only a run has a newest save; pass --step=N, the number of completed steps"
        )


def open_named_stream(args: argparse.Namespace) -> Opened:
    """The stream that the command line names. ValueError or FileNotFoundError if it names none."""
    settings = from_flags(args)
    given = [name for name in settings.differing() if name != "run"]
    receipt = Path(args.run or "")
    is_receipt = receipt.suffix == ".json" and receipt.is_file()
    is_run = not is_receipt and (args.run is not None or not given)
    if is_run:
        if not {*given} <= {*PLACES}:
            raise ValueError(
                f"{args.run} and {', '.join(map(flag, given))}: a run has its own settings; pass a run or "
                f"flags, not both (only --data-path and --val-path, for a run whose data was moved)"
            )
        return open_stream_of(find_run(args.run), (settings.data_path, settings.val_path))
    check_needs_no_run(args, is_receipt)
    if is_receipt:
        return open_stream_of_receipt(receipt, settings, args)
    settings, tokenizer = complete_settings(settings, 1, "cpu")
    settings = replace(settings, model_tag=f"inspect-{os.getpid()}")  # the name of a new run
    run = find_data(inspect_run(settings, torch.device("cpu")), tokenizer)
    config = stream_config(run.settings)
    return Opened(
        RunReader(run.run_dir),
        run.data,
        config,
        rows_per_step=run.settings.total_batch_size // config.T,
        begin=run.cursors,
        horizon=run.horizon.num_iterations,
        may_drop=run.settings.allow_bucket_exhaustion,
    )


def open_stream_of_receipt(receipt: Path, settings: Settings, args: argparse.Namespace) -> Opened:
    """The stream of a receipt, up to the last step that the command needs."""
    if args.command == "digest":
        last = args.steps[-1]
    elif args.command == "ledger":
        last = args.step - 1
    else:
        last = args.step
    return open_receipt(receipt, settings, last)


def warn_untrained(opened: Opened, last: int) -> None:
    """Warn if the run has not trained step `last` yet, or if it never will."""
    run_dir = opened.run.run_dir
    trained = max(opened.run.digests, default=-1) + 1
    end = math.inf if opened.horizon is None else opened.horizon
    after_end = f"step {last:,} would come after it"
    if not is_run_dir(run_dir):  # flags or a receipt
        if last >= end:
            log.warning("a run with these flags ends with step %s; %s", f"{end - 1:,}", after_end)
        return
    if last < trained:
        return
    where = f"{run_dir} has trained {counted(trained, 'step')}; step {last:,} lies ahead"
    end_of_run = opened.run.launches[-1].end if opened.run.launches else ""
    if end_of_run in ("completed", "halted"):
        how = "ended" if end_of_run == "completed" else "halted"
        where = f"{run_dir} {how} with step {trained - 1:,}; {after_end}"
    elif last >= end:
        where = f"{run_dir} will end with step {end - 1:,}; {after_end}"
    log.warning("%s, and is computed from the data", where)


# ---- digests ------------------------------------------------------------------------------------


def show_digests(opened: Opened, args: argparse.Namespace) -> int:
    """Print one JSON line per step. Exit code 1 if the run logged a different digest."""
    logged = opened.run.digests
    wrong: list[int] = []
    warn_untrained(opened, args.steps[-1])
    for step, parts in step_digests(opened, args.steps, args.ranks or 1):
        digest = f"{sum(parts) % 2**64:016x}"
        line: dict[str, Any] = {"step": step, "digest": digest}
        if args.ranks:
            line["ranks"] = [f"{part:016x}" for part in parts]
        if step in logged:
            line["logged"] = logged[step]
            line["match"] = logged[step] == digest
            if logged[step] != digest:
                wrong.append(step)
        print(json.dumps(line), flush=True)
    if not wrong:
        return 0
    count = f"{len(wrong)} of {len(args.steps)} digests differ from the log"
    print(
        f"error: {opened.run.run_dir}: {count}, first at step {wrong[0]}; the code or the data has changed since "
        f"then",
        file=sys.stderr,
    )
    return EXIT_FAILED


# ---- rows ---------------------------------------------------------------------------------------


def text_lines(tokenizer: Tokenizer, row: Row, place: Mapping[str, Any]) -> list[str]:
    """The lines of a document's text in a row, for a terminal. What has no loss is in brackets."""
    ids = ids_of(row, place)
    live = np.ones(len(ids), np.uint8)
    if row.live is not None:
        live = row.live[place["at"] : place["at"] + place["tokens"]]
    changes = np.flatnonzero(np.diff(live)) + 1
    shown = ""
    at = 0
    for part in np.split(ids, changes):
        text = tokenizer.decode(part.tolist())
        shown += text if live[at] else f"[no loss: {text}]"
        at += len(part)
    # Only these end a line here: splitlines would hide the others that the model reads, such as \r.
    return [visible(line) for line in shown.removesuffix("\n").split("\n")]


def by_loss(losses: Sequence[float | None]) -> list[int]:
    """The numbers of the rows, the highest loss first and rows without a loss last."""
    heights = [-math.inf if loss is None else loss for loss in losses]
    return sorted(range(len(losses)), key=heights.__getitem__, reverse=True)


def show_rows(opened: Opened, args: argparse.Namespace) -> int:
    """Print the documents in each row of a step."""
    if args.row is not None and args.row >= opened.rows_per_step:
        raise ValueError(
            f"--row {args.row}: step {args.step} has rows 0 to {opened.rows_per_step - 1}; name one"
        )
    losses = row_means(opened.run, args.step) if args.sort else []
    warn_untrained(opened, args.step)
    lines: list[dict[str, Any]] = []
    texts: list[list[str]] = []  # the lines of each document's text
    with opened.stream_at(args.step) as stream:
        rows = opened.take(stream, args.step)
        numbers = by_loss(losses) if losses else list(range(len(rows)))
        if args.row is not None:
            numbers = [number for number in numbers if number == args.row]
        for number in numbers:
            row = rows[number]
            head = {
                "step": args.step,
                "row": number,
                "lane": row.lane,
                "lane_row": row.index,
                "bucket": row.bucket,
            }
            if losses:
                head["loss"] = losses[number]
            documents = places_in(opened, stream, row)
            for document in documents:
                lines.append(head | document)
                if args.text:
                    ids = ids_of(row, document)
                    text = opened.data.tokenizer.decode(ids.tolist())
                    document["text"] = text
                    texts.append(text_lines(opened.data.tokenizer, row, document))
            if args.json:
                print(json.dumps({**head, "documents": documents}))
    if not args.json:
        print_rows(lines, texts, whole_row=args.row is not None)
        print(LEGEND.format(loss="loss: the row's mean; " if losses else ""))
        if opened.has_lines:
            print(
                "line: where the document, or this part of a .txt file, begins in the file, from 1"
            )
    return 0


def print_rows(lines: list[dict[str, Any]], texts: list[list[str]], *, whole_row: bool) -> None:
    """Print a table with a line for each document and, if there are `texts`, the text below it.
    Without `whole_row`, only the first documents and the first line of their texts."""
    heading, *body = table([*lines[0]], [[*line.values()] for line in lines])
    print(heading)
    num_shown = len(body) if whole_row else min(LINES, len(body))
    for i in range(num_shown):
        text = texts[i] if texts else []
        if not whole_row:
            text = text[:1]
        print(body[i], *text, sep="\n    | ")
    if not whole_row:
        print(
            f"{num_shown} of the step's {len(body):,} pieces of documents; --row=N shows all of one row, "
            f"--json (with --text) everything"
        )


# ---- spikes --------------------------------------------------------------------------------------


def center_and_unit(values: np.ndarray) -> tuple[float, float]:
    """The median of (n,) values, and their robust deviation, which is never 0."""
    median = float(np.median(values))
    deviation = NORMAL * float(np.median(np.abs(values - median)))
    return median, max(deviation, 1e-6 * abs(median), 1e-12)


def deviations(values: np.ndarray) -> np.ndarray:
    """How many robust deviations each value lies above the median of the WINDOW values before it.
    NaN counts as infinitely high, and later medians ignore it. 0 if fewer than ENOUGH earlier
    values are finite."""
    scores = np.zeros(len(values))
    for i in range(ENOUGH, len(values)):
        before = values[max(0, i - WINDOW) : i]
        window = before[np.isfinite(before)]
        if len(window) < ENOUGH:
            continue
        median, unit = center_and_unit(window)
        above = (values[i] - median) / unit
        scores[i] = above if np.isfinite(above) else math.inf
    return scores


class SpikeRows(NamedTuple):
    """The rows of a step, compared with the usual losses of their buckets."""

    judged: int  # rows with a loss
    outliers: int  # those at least OUTLIER robust deviations above their bucket's median
    worst: list[dict[str, Any]]  # the WORST rows, furthest above first


def compare_rows(opened: Opened, step: int) -> SpikeRows:
    """The rows of a step, compared with those of their buckets in the AROUND + 1 steps up to it."""
    usual: dict[str, list[float]] = {}
    first = max(
        opened.first_step, step - AROUND
    )  # the steps from here on define the usual loss of each bucket
    with opened.stream_at(first) as stream:
        for at in range(first, step + 1):
            rows = opened.take(stream, at)
            losses = row_means(opened.run, at)
            for row, loss in zip(rows, losses):
                if loss is not None and math.isfinite(loss):
                    usual.setdefault(row.bucket, []).append(loss)

        found: list[dict[str, Any]] = []
        outliers = 0
        for number, (row, loss) in enumerate(zip(rows, losses)):
            if loss is None:
                continue
            median, unit = center_and_unit(np.array(usual.get(row.bucket, [0.0])))
            above = loss - median
            if not math.isfinite(above):
                above = math.inf
            outliers += above >= OUTLIER * unit
            line: dict[str, Any] = {
                "row": number,
                "lane": row.lane,
                "bucket": row.bucket,
                "loss": loss,
                "above": above,
            }
            found.append(line)
        found.sort(key=lambda line: -line["above"])

        worst = found[:WORST]
        for line in worst:
            row = rows[line["row"]]
            line["documents"] = documents_of(opened, stream, row)
    return SpikeRows(len(found), outliers, worst)


def documents_of(opened: Opened, stream: AnyStream, row: Row) -> list[dict[str, Any]]:
    """The documents of a row, each with its first words in the row."""
    documents = []
    for place in places_in(opened, stream, row):
        document = {
            "document": f"{place['file']}:{place['document']}",
            "start": place["start"],
            "stop": place["stop"],
            "text": first_words(opened, ids_of(row, place)),
        }
        documents.append(document)
    return documents


def print_judged(steps: Sequence[Mapping[str, Any]], any_spike: bool) -> None:
    """Print which steps were compared with earlier ones, and how, if there is no spike."""
    needed = f"a comparison needs {ENOUGH} earlier steps"
    if len(steps) <= ENOUGH:
        print(f"no step of {len(steps)} can be judged: {needed}")
        return
    if not any_spike:
        before = min(WINDOW, len(steps) - 1)
        print(
            f"no spike in {counted(len(steps), 'step')}: no loss or gradient norm is {OUTLIER} robust standard "
            f"deviations above the median of the steps before it (at least {ENOUGH}, at most {before})"
        )
    last = steps[ENOUGH - 1]["step"]
    print(f"not judged: steps {steps[0]['step']:,} to {last:,}; {needed}")


def show_spikes(opened: Opened, args: argparse.Namespace) -> int:
    """Print the steps whose loss or gradient norm is an outlier, and the rows behind them."""
    empty = opened.run.steps_without_targets
    steps = [step for step in opened.run.steps if step["step"] not in empty]
    scores: dict[str, np.ndarray] = {}
    for name in JUDGED:
        values = np.array([step.get(name) for step in steps], float)  # NaN for None
        scores[name] = deviations(values)
    height = np.maximum(scores["loss"], scores["grad_norm"])
    highest = np.argsort(-height, kind="stable")[: args.top].tolist()
    spikes = [i for i in highest if height[i] >= OUTLIER]
    if not args.json:
        print_judged(steps, any_spike=bool(spikes))
    recorded = True
    for i in spikes:
        step = steps[i]["step"]
        rows = SpikeRows(0, 0, [])
        if recorded:
            try:
                rows = compare_rows(opened, step)
            except FileNotFoundError as e:
                log.warning("%s; spikes are shown without their rows", e)
                recorded = False
        line = {"step": step}
        for name in JUDGED:
            line[name] = steps[i].get(name)
        for name in JUDGED:
            line[f"{name}_deviations"] = float(scores[name][i])
        if args.json:
            line |= {"judged": rows.judged, "outliers": rows.outliers, "rows": rows.worst}
            print(json.dumps(finite(line), allow_nan=False))
        else:
            print_spike(line, rows, opened.run.name)
    return 0


def print_spike(line: Mapping[str, Any], rows: SpikeRows, run: str) -> None:
    """Print a spike of a run, and a table of its rows."""
    parts = []
    for name in JUDGED:
        height = line[f"{name}_deviations"]
        where = "below" if height < 0 else "above"
        parts.append(
            f"{name} {show(line[name])} ({abs(height):.1f} deviations {where} earlier steps)"
        )
    print(f"step {line['step']:,}: {', '.join(parts)}")
    if rows.outliers:
        print(blame(rows, f"{run}@{line['step']}"))
    cells = []
    for row in rows.worst:
        documents = row["documents"]
        shown = [f"{document['document']} {document['text']}" for document in documents[:WORST]]
        if len(documents) > WORST:
            shown.append(f"{len(documents) - WORST} more")
        cells.append(
            [row["row"], row["lane"], row["bucket"], row["loss"], row["above"], "; ".join(shown)]
        )
    if cells:
        print(
            *table(["row", "lane", "bucket", "loss", "above median", "documents"], cells), sep="\n"
        )


def blame(rows: SpikeRows, place: str) -> str:
    """How many rows of a step RUN@STEP stand out, and what may follow if nearly all do."""
    line = f"rows at least {OUTLIER} robust deviations above their bucket's median: {rows.outliers} of {rows.judged}"
    if rows.judged > 1 and rows.outliers > NEARLY_ALL * rows.judged:
        line += (
            f"; either they are alike, as with one lane, or an earlier update damaged the weights: "
            f"base_eval {place} --eval=bpb shows which"
        )
    return line


# ---- from a document to its steps ----------------------------------------------------------------


def why_not_learned(ancestry: Ancestry, traced: Traced) -> str:
    """Why a run does not learn from a document; empty if it does, or if the passes give the
    reason."""
    opened = traced.opened
    if traced.split != "train":
        bucket = opened.data.manifests["train"].get(traced.document.bucket)
        files = bucket["files"] if bucket else []
        own_file, _, _ = traced.document.name.rpartition(":")
        is_shared = any(file["name"] == own_file for file in files)
        what = (
            "a part of this file that is held out for validation"
            if is_shared
            else "a validation document"
        )
        return f"{what}: the run never trains on it"
    if traced.is_left_out:
        if traced.steps or ancestry.gaps:
            return (
                f"from step {opened.first_step:,} on, its targets are masked (--without-documents)"
            )
        return (
            "its targets are masked (--without-documents), so the model never learned to predict it"
        )
    if traced.passes:
        return ""
    if opened is not ancestry.opened:
        return f"{opened.run.name} had not trained on it when the run left it"
    return "the curriculum does not use its bucket"


def named_documents(ancestry: Ancestry, args: argparse.Namespace) -> list[Traced]:
    """The documents that --document or --text names. Of those that contain a text, at most
    DOCUMENTS: those that the run trained on, by their first step, then others. ValueError if there
    are none."""
    parts = ancestry.parts()
    if args.document is not None:
        data = {name: part.sources for name, part in parts.items()}
        name, document = find_document(data, args.document)
        traced = ancestry.trace(parts[name], document)
        ancestry.check([traced])
        return [traced]
    if not args.text:
        raise ValueError("--text: it is empty; pass some words from a document")
    used: list[Traced] = []
    others: list[Traced] = []
    matches = matches_of([*parts.values()], args.text)
    for part, document in islice(matches, TRACED):
        traced = ancestry.trace(part, document)
        if traced.steps:
            used.append(traced)
        else:
            others.append(traced)
        if len(used) == DOCUMENTS:
            break
    used.sort(key=lambda traced: traced.steps[0])
    found = used + others
    ancestry.check(found)
    if not found:
        unsearched = f". {ancestry.gap_sentence()}" if ancestry.gaps else ""
        raise ValueError(
            f"--text: {args.text!r} occurs in no document of the files of {ancestry.who()}; capitals, "
            f"spaces and line breaks count (bash writes a line break as $'one\\ntwo'), but not with "
            f"--texts=FILE.jsonl, which compares words{unsearched}"
        )
    is_cut = next(matches, None) is not None
    if not args.json:
        first = "first " if is_cut else ""
        num_left_out = sum(traced.is_left_out for traced in others)
        masked = f" ({num_left_out:,} left out by --without-documents)" if num_left_out else ""
        others_too = ", perhaps other parts than this text" if used else ""
        end = "; the search stopped there" if is_cut else ""
        if is_cut or len(found) > DOCUMENTS:
            end += f"; at most {DOCUMENTS} are listed"
        print(
            f"{visible(args.text)!r}: {ancestry.who()} trained on parts of {len(used)} of the {first}"
            f"{counted(len(found), 'document')} containing it{masked}{others_too}{end}"
        )
    return found[:DOCUMENTS]


def matches_of(parts: Sequence[Part], text: str) -> Iterator[tuple[Part, DocumentPlace]]:
    """(part, document) of all documents that contain a text."""
    announce_search((source, part.known) for part in parts for source in part.sources.values())
    for part in parts:
        for bucket, source in part.sources.items():
            for document in documents_with(source, bucket, text, part.known):
                yield part, document


def passes_of(
    ancestry: Ancestry,
    traced: Traced,
    ids: np.ndarray,
    losses_of: Callable[[int], list[float | None] | None],
    text: str | None,
) -> list[dict[str, Any]]:
    """A document's passes, as --json prints them: in each epoch, the rows with its tokens, and what
    became of the others. `text`: the one that --text asks for."""
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
    ancestry: Ancestry, traced: Traced, content: Content, text: str | None
) -> dict[str, Any]:
    """What a document is, as --json prints it: its place, its first words and, if known, its line
    in the user's own file. `text`: the one that --text asks for."""
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


def show_find(opened: Opened, args: argparse.Namespace) -> int:
    """Print every training row with tokens of a document, epoch by epoch."""
    if args.texts or args.core:
        return show_items(opened, args)
    ancestry = Ancestry(opened)
    losses_of = lru_cache(None)(ancestry.losses)
    legends: dict[str, None] = {}
    shown = named_documents(ancestry, args)
    in_a_row = 0  # documents of which a row has all of the text
    for traced in shown:
        content = content_of(traced.opened, traced.source, traced.document)
        passes = passes_of(ancestry, traced, content.ids, losses_of, args.text)
        uses = [use for of_epoch in passes for use in of_epoch["uses"]]
        in_a_row += any(use.get("has_text") for use in uses)
        about = about_document(ancestry, traced, content, args.text)
        if args.json:
            print(json.dumps(finite({**about, "passes": passes}), allow_nan=False), flush=True)
            continue
        print_about(about, content.origin)
        legends[print_passes(opened, passes, with_text=bool(args.text))] = None
        reason = why_not_learned(ancestry, traced)
        if reason:
            print(reason)
    if args.text and not args.json and len(shown) > 1:
        print(f"{visible(args.text)!r}: a row has all of it for {in_a_row} of these {len(shown)}")
    if ancestry.gaps and not args.json:
        print(ancestry.gap_sentence())
    if any(legends):
        print(f"epoch: {EPOCH if isinstance(opened.config, StreamConfig) else EPOCH_OF_SAMPLES}")
    for legend in filter(None, legends):
        print(legend)
    return 0


def print_passes(opened: Opened, passes: list[dict[str, Any]], *, with_text: bool) -> str:
    """Print the rows that used a document, and what became of its other tokens: a line per row, or,
    of more than ROWS rows or PASSES passes, a line for several. Returns the legend; "" without
    rows."""
    used = [of_epoch["uses"] for of_epoch in passes if of_epoch["uses"]]
    if opened.run.outcome == "completed":  # leave out epochs that the run may never have begun
        passes = [of_epoch for i, of_epoch in enumerate(passes) if of_epoch["uses"] or i == 0]
    if len(used) > PASSES:
        size = -(-len(used) // PASSES)
        print(f"{len(used):,} passes, up to {size} in a line:")
        groups = [[use for uses in part for use in uses] for part in in_parts(used, size)]
        print_groups(groups, with_text=with_text)
        print_endings(passes)
        return GROUPS_LEGEND

    uses = [use for of_epoch in used for use in of_epoch]
    with_it = [use for use in uses if with_text and use["has_text"]]
    shown = with_it or uses
    legend = FIND_LEGEND if shown else ""
    if len(shown) > ROWS:
        print_summed_up(shown, with_text=with_text)
        legend = GROUPS_LEGEND
    elif shown:
        columns = ["epoch", "step", "row", "lane", "start", "stop", "loss"]
        lines = [[use[name] for name in columns] for use in shown]
        print(*table(columns, lines), sep="\n")
    others = len(uses) - len(with_it)
    if with_it and others:
        print(f"not listed: {counted(others, 'row')} with other parts of the document")
    elif with_text and others:
        print("no row has all of the text: these have other parts of the document")
    for ending, same in groupby(passes, key=lambda of_epoch: of_epoch["fate"]):
        if ending:
            print(f"{epochs_text([*same])}: {ending}")
    return legend


def print_summed_up(uses: Sequence[Mapping[str, Any]], *, with_text: bool) -> None:
    """Print a table that sums up the rows of at most PASSES passes, in fewer than twice as many
    lines: each line is about rows of one pass."""
    by_epoch = [[*same] for _, same in groupby(uses, key=lambda use: use["epoch"])]
    size = -(-len(uses) // PASSES)
    groups = [group for of_epoch in by_epoch for group in in_parts(of_epoch, size)]
    print(f"{len(uses):,} rows, up to {size} in a line:")
    print_groups(groups, with_text=with_text)


def in_parts(members: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """The members in parts of `size`, of which the last one may be smaller."""
    return [members[at : at + size] for at in range(0, len(members), size)]


def print_groups(groups: Sequence[Sequence[Mapping[str, Any]]], *, with_text: bool) -> None:
    """Print a table with a line per group of rows, which sums them up."""
    columns = ["epochs", "rows", "tokens", "loss"]
    if with_text:
        columns.append("rows with all of the text")
    lines = []
    for uses in groups:
        epochs = sorted({use["epoch"] for use in uses})
        tokens = sum(use["stop"] - use["start"] for use in uses)
        losses = [use["loss"] for use in uses if use["loss"] is not None]
        loss = math.fsum(losses) / len(losses) if losses else None
        line = [ranges(epochs), len(uses), tokens, loss]
        if with_text:
            line.append(sum(use["has_text"] for use in uses))
        names = [f"{use['step']}:{use['row']}" for use in uses]
        lines.append([*line, " ".join(abridged(names, STEPS))])
    print(*table([*columns, "step:row"], lines), sep="\n")


def abridged(names: Sequence[str], most: int) -> Sequence[str]:
    """At most `most` of some names: of more, the first ones, dots and the last one."""
    if len(names) <= most:
        return names
    return [*names[: most - 2], "...", names[-1]]


def print_endings(passes: Sequence[Mapping[str, Any]]) -> None:
    """Print what became of the tokens that are in no row, once for all passes that it happened in."""
    endings: dict[str, list[Mapping[str, Any]]] = {}
    for of_epoch in passes:
        ending = of_epoch["fate"]
        if of_epoch["cropped_after"] is not None:
            ending = "cropped"
        endings.setdefault(ending, []).append(of_epoch)
    for ending, same in endings.items():
        if ending == "cropped":
            kept = [of_epoch["cropped_after"] for of_epoch in same]
            ending += f", with {min(kept):,} to {max(kept):,} of its tokens in rows"
        if ending:
            print(f"{epochs_text(same)}: {ending}")


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


def show_ledger(opened: Opened, args: argparse.Namespace) -> int:
    """Print the ledger after some steps. Exit code 1 if it does not balance, which is a bug."""
    T = opened.config.T
    step = args.step
    if step is None:
        step = max(opened.run.cursor_files, default=0)
    with opened.stream_at(step) as stream:
        accounts = ledger(stream.cursors(), T)
    note = opened.run.ledger_note(accounts) if is_run_dir(opened.run.run_dir) else ""
    text, header, rows = ledger_table(step, accounts, T, note)
    print(text, *table(header, rows), sep="\n")
    return EXIT_FAILED if unbalanced(accounts) else 0


# ---- from a benchmark to the steps that trained on it --------------------------------------------


def show_items(opened: Opened, args: argparse.Namespace) -> int:
    """Print which items of a benchmark the run has trained on, and store it in the run."""
    tasks = seen.read_core(args.eval_bundle) if args.core else [*map(seen.read_texts, args.texts)]
    results = find_items(opened, seen.Benchmark(tasks, n=args.ngram))
    num_steps = opened.run.num_steps
    counts = [seen.count(label, result, num_steps) for label, result in results.items()]
    if args.json:
        for label, result in results.items():
            for item in result["found"]:
                print(json.dumps(finite({"task": label, **item}), allow_nan=False))
        for of_task in counts:
            gaps = results[of_task.task]["not_searched"]
            print(json.dumps({**of_task._asdict(), "not_searched": gaps}))
    else:
        print_items(results)
        print(*table(seen.HEADER, [of_task.cells for of_task in counts]), sep="\n")
        print(*seen.gap_sentences(results), SEEN_LEGEND, sep="\n")
    path = seen.store(opened.run.run_dir, results)
    log.info("result: %s; scripts.report and the model card show it", path)
    return 0


def print_items(results: Mapping[str, seen.TaskResult]) -> None:
    """Print a table of the first items that were found: a line per document that has words of an
    item. First come the items of which a training document has the largest share; of equal shares,
    those that were seen."""
    found = [(label, item) for label, result in results.items() for item in result["found"]]

    def rank(of_task: tuple[str, seen.FoundItem]) -> tuple[float, bool]:
        _, item = of_task
        return seen.share_in_training(item), bool(seen.uses_of(item))

    found.sort(key=rank, reverse=True)
    rows = []
    others = {}  # {number of a row: a line below it}
    for label, item in found[:DOCUMENTS]:
        documents = shown_documents(item)
        for document in documents:
            rows.append([visible(label), item["line"], *cells_of(document, item["ngrams"])])
        # of a training document, only others of training: validation documents are not "in the data"
        split = documents[0]["split"]
        hidden = [
            document
            for document in item["documents"]
            if document["split"] == split and document not in documents
        ]
        if hidden:
            trained = sum(bool(document["uses"]) for document in hidden)
            count = counted(len(hidden), "more document")
            others[len(rows) - 1] = f"    and {count} ({trained} trained on; --json shows all)"
    columns = ["task", "line", "document", "shared", "of", "steps", "loss before", "loss after"]
    if rows:
        heading, *lines = table(columns, rows)
        print(heading)
        for number, line in enumerate(lines):
            print(line)
            if number in others:
                print(others[number])
    hidden_items = [item for _, item in found[DOCUMENTS:]]
    if hidden_items:
        in_data = sum(map(seen.is_in_data, hidden_items))
        print(
            f"not listed: {counted(in_data, 'item')} in the data, and "
            f"{counted(len(hidden_items) - in_data, 'item')} only in validation documents; --json shows all"
        )


def shown_documents(item: seen.FoundItem) -> list[seen.FoundDocument]:
    """The documents that the table shows of an item, at most ITEM_DOCUMENTS: the training document
    that has most of it, trained on or not, and others that were trained on, those that have most of
    it first. A validation document is shown only if there is no other."""

    def rank(document: seen.FoundDocument) -> tuple[bool, int, bool]:
        return document["split"] == seen.TRAIN, document["shared"], bool(document["uses"])

    closest, *others = sorted(item["documents"], key=rank, reverse=True)
    trained = [document for document in others if document["uses"]]
    return [closest, *trained][:ITEM_DOCUMENTS]


def cells_of(document: seen.FoundDocument, num_ngrams: int) -> list[Any]:
    """The cells of the table of items that are about a document. `num_ngrams`: of the item."""
    name = visible(document["document"]) + " (validation)" * (document["split"] != seen.TRAIN)
    steps = sorted({use["step"] for use in document["uses"]})
    shown = abridged([str(step) for step in steps], ITEM_STEPS)
    before, after = seen.losses_of(document)
    return [name, document["shared"], num_ngrams, ", ".join(shown) or "-", before, after]


# ---- the command line ---------------------------------------------------------------------------


def span(text: str) -> range:
    """argparse type: A:B with 0 <= A < B."""
    first, _, stop = text.partition(":")
    are_numbers = first.isdecimal() and stop.isdecimal()
    if not are_numbers or int(first) >= int(stop):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected A:B with 0 <= A < B, such as 0:10"
        )
    return range(int(first), int(stop))


def one_step(text: str) -> int:
    """argparse type: a step, counted from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected one step, such as 17; only `digest` takes several (--steps)"
        )
    return int(text)


def add_rows_flags(parser: Parser) -> None:
    """The flags of `rows`."""
    parser.add_argument("--step", type=one_step, required=True, help="the step, counted from 0")
    parser.add_argument(
        "--row", type=whole(0), help="show only this row of the step, counted from 0"
    )
    parser.add_argument(
        "--text",
        action="store_true",
        help="show the text of the documents: all of it with --row or "
        "--json, else the first line of each",
    )
    parser.add_argument(
        "--sort", choices=["loss"], help="sort rows by their mean loss, highest first"
    )


def add_digest_flags(parser: Parser) -> None:
    """The flags of `digest`."""
    parser.add_argument(
        "--steps", type=span, required=True, metavar="A:B", help="steps A to B - 1, counted from 0"
    )
    parser.add_argument(
        "--world-size",
        dest="ranks",
        type=whole(1),
        metavar="W",
        help="also print the part of each rank, for W ranks",
    )


def add_find_flags(parser: Parser) -> None:
    """The flags of `find`, which name a document."""
    named = parser.add_mutually_exclusive_group(required=True)
    named.add_argument(
        "--document",
        metavar="FILE:DOC",
        help="a file and a document of it, as in the columns that `rows` prints; DOC counts from 0",
    )
    named.add_argument(
        "--text",
        help=f"find up to {DOCUMENTS} documents that contain this text: those trained on, by "
        "their first step, then others",
    )
    named.add_argument(
        "--texts",
        action="append",
        metavar="FILE[:FIELD]",
        help="find all documents that share n-grams of words with the items of a benchmark, a jsonl or "
        f"parquet file (default FIELD: {seen.TEXT_FIELD}); may be repeated",
    )
    named.add_argument("--core", action="store_true", help="the same for the tasks of CORE")
    parser.add_argument(
        "--ngram",
        type=whole(1),
        default=seen.NGRAM,
        metavar="N",
        help="with --texts and --core: words of an n-gram",
    )
    parser.add_argument(
        "--eval-bundle",
        metavar="DIR",
        help="with --core: folder of CORE's tasks (default: <base dir>/eval_bundle)",
    )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(
        required=True, dest="command", metavar="rows|digest|spikes|find|ledger"
    )
    rows = commands.add_parser("rows", help="show the documents in each row of a step")
    add_rows_flags(rows)
    digest = commands.add_parser(
        "digest", help="print the batch digest of each step as a JSON line"
    )
    add_digest_flags(digest)
    spikes = commands.add_parser(
        "spikes", help="show steps with an unusual loss or gradient norm, and their rows"
    )
    spikes.add_argument(
        "--top",
        type=whole(1),
        default=5,
        metavar="N",
        help="show at most N steps, largest spike first",
    )
    find = commands.add_parser("find", help="show the steps and rows that used a document")
    add_find_flags(find)
    accounts = commands.add_parser(
        "ledger", help="count the tokens read, emitted, cropped and pending"
    )
    accounts.add_argument(
        "--step", type=one_step, help="after this many steps (default: at a run's newest save)"
    )
    for subparser, unit in ((rows, "row"), (spikes, "step"), (find, "document")):
        subparser.add_argument(
            "--json", action="store_true", help=f"print one JSON line per {unit}"
        )
    add_run(rows, show_rows)
    add_run(digest, show_digests)
    add_run(spikes, show_spikes, needs_log=True)
    add_run(find, show_find, needs_log=True)
    add_run(accounts, show_ledger)
    return parser.parse_args(argv)


def add_run(
    parser: Parser,
    main: Callable[[Opened, argparse.Namespace], int],
    *,
    needs_log: bool = False,
) -> None:
    """Add the run that a command inspects, or the flags that describe one. `needs_log`: the command
    reads a run's log, which neither flags nor a receipt have."""
    parser.set_defaults(main=main)
    which = " (default: the only run)"
    parser.epilog = "A run whose data was moved also takes --data-path=DIR and --val-path=DIR."
    if not needs_log:
        which = ", or a receipt (default: the only run, if no base_train flag is given)"
        parser.epilog += (
            " Instead of RUN: any flags of scripts.base_train, whose --help lists them. A receipt needs "
            "--data-path, and takes --tokenizer and --eod-token."
        )
    parser.add_argument("run", metavar="RUN", nargs="?", help=f"a run's name or folder{which}")
    add_flags(parser, without=("run",), listed=False)
    parser.usage = "%(prog)s [RUN] [flags]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 1 if a digest differs or the ledger does not balance. ValueError
    and OSError for bad input."""
    args = parse_args(argv)
    setup_logging()
    return args.main(open_named_stream(args), args)


if __name__ == "__main__":
    run_main(main)
