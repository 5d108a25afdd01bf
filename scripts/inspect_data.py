"""
Show the data of any step of a run: documents, digests, token counts. Loads no model and needs no GPU.

    python -m scripts.inspect_data rows mine --step=17 --text           # the documents in each row of step 17
    python -m scripts.inspect_data rows mine --step=17 --sort=loss      # rows with the highest losses first
    python -m scripts.inspect_data digest mine --steps=0:10             # recomputed and compared with the log
    python -m scripts.inspect_data spikes mine                          # outlier steps, and their rows with high losses
    python -m scripts.inspect_data find mine --document=shard_00000.parquet:41      # or --text="some words"
    python -m scripts.inspect_data ledger mine                          # where every token went
    python -m scripts.inspect_data rows --config=runs/laptop.yaml --data-path=mytext --step=0      # before a run
    python -m scripts.inspect_data rows mine.json --step=17 --data-path=mytext      # a receipt (scripts.receipt)

Steps are optimizer steps, counted from 0. To show a step, the command restores the nearest saved cursors before it and
packs the steps in between again, so any step of a long run takes seconds:

    saved cursors:   0 . . . . . . 1000 . . . . . . 2000
    step 1234:                     restore 1000, pack 234 steps, show the next one

Steps that the run has not reached yet work too. With flags of scripts.base_train instead of a run, the command shows
the stream that such a run would train on.
"""

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from nanochat.cli import EXIT_FAILED, Parser, run_main, setup_logging, whole
from nanochat.common import counted, show, table, visible
from nanochat.config import add_flags, flag, from_flags
from nanochat.dataloader import StepLayout
from nanochat.find import Document, History, Pass, documents_with, find_document, sample_passes
from nanochat.order import StreamConfig
from nanochat.run_dir import find_run, finite, is_run_dir
from nanochat.run_order import stream_config
from nanochat.run_reader import RunReader, ledger_table, unbalanced
from nanochat.sources import RunData
from nanochat.spikes import ENOUGH, NORMAL, WINDOW
from nanochat.start_run import command, find_data, inspect_run, open_run
from nanochat.stream import Cursor, Stream, ledger, open_stream
from scripts.receipt import open_receipt

log = logging.getLogger(__name__)

LINES = 40  # documents that the table of a step shows
DOCUMENTS, TRACED = 20, 200  # matches that --text shows, and that it follows through the run
OUTLIER = 4  # robust deviations above the preceding steps
AROUND = 8  # steps before a spike that define the usual loss of a bucket
WORST = 3  # rows shown per spike, and documents shown per row
LEGEND = """\
lane_row: the row's number in its lane; {loss}at: position in the row; tokens: how many are in the row
off: how many of them have no loss; group: part of the file; document, document_in_group: number in file and group
epoch: pass over the data; start, stop: its tokens from start to before stop; of: all it has; numbers count from 0"""
FIND_LEGEND = """\
epoch: pass over the data; row: its number in the step; lane: the virtual reader; start, stop: its tokens from start
to before stop are in the row; loss: the row's mean; numbers count from 0"""
WORDS = 60  # characters shown from the beginning of a document


# ---- a stream that can be entered at any step ---------------------------------------------------

@dataclass(frozen=True)
class Opened:
    """The stream of a run, of a receipt or of flags; for the last two, `run` has no directory. `begin`: the cursors of
    step 0, unless the run starts at the beginning of the data."""

    run: RunReader
    data: RunData
    config: Any
    rows_per_step: int
    begin: list[Cursor] | None = None

    @property
    def rows_per_lane(self) -> int:
        return self.rows_per_step // self.config.V

    @contextmanager
    def stream_at(self, step: int) -> Iterator[Any]:
        """The stream of all lanes after `step` steps. A ValueError, even one raised while the caller reads, names the
        saved cursors that packing began with, because they may be damaged."""
        saved = self.run.nearest_cursors(step)
        done, cursors = saved or (0, self.begin)
        try:
            with closing(open_stream(self.config, self.data.train, range(self.config.V), cursors=cursors,
                                     tokenizer=self.data.tokenizer.fingerprint, drop_dry=True)) as stream:
                for _ in tqdm(range(step - done), desc=f"packing from step {done}", unit="step", disable=None):
                    stream.next_rows(self.rows_per_lane)
                yield stream
        except ValueError as e:
            raise ValueError(f"{e} (packed from {self.run.cursor_files[done]})" if saved else str(e)) from None


def open_named_stream(args: argparse.Namespace) -> Opened:
    """The stream that the command line names. ValueError or FileNotFoundError if it names none."""
    settings = from_flags(args)
    receipt = Path(args.run or "")
    is_receipt = receipt.suffix == ".json" and receipt.is_file()
    given = [flag(name) for name in settings.differing() if name != "run"]
    if is_receipt or (given and args.run is None):
        wants_run = "--sort=loss" if "sort" in args and args.sort else args.command
        if wants_run in ("--sort=loss", "spikes", "find"):
            raise ValueError(f"{wants_run}: it needs the log and the saves of a run; name a run instead of "
                             f"{'a receipt' if is_receipt else 'flags'}")
        if args.command == "ledger" and args.step is None:
            raise ValueError("ledger: only a run has a newest save; pass --step=N, the number of completed steps")
    if is_receipt:
        last = args.steps[-1] if args.command == "digest" else args.step - (args.command == "ledger")
        return Opened(RunReader(receipt), *open_receipt(receipt, settings, last))
    if not given:
        return open_stream_of(find_run(args.run))
    if args.run is not None:
        raise ValueError(f"{args.run} and {', '.join(given)}: a run has its own settings; pass a run or flags, "
                         f"not both")
    settings, tokenizer = command(settings, 1, "cpu")
    settings = replace(settings, model_tag=f"inspect-{os.getpid()}")  # the name of a new run
    start, data = find_data(inspect_run(settings, torch.device("cpu")), tokenizer)
    config = stream_config(start.settings)
    return Opened(RunReader(start.run_dir), data, config, start.settings.total_batch_size // config.T, start.cursors)


def open_stream_of(run_dir: Path) -> Opened:
    """The stream of a run. ValueError or FileNotFoundError if its data has changed or is missing."""
    data, config, settings = open_run(run_dir)
    return Opened(RunReader(run_dir), data, config, settings.total_batch_size // config.T)


def warn_untrained(opened: Opened, last: int) -> None:
    """Warn if the run has not trained step `last` yet."""
    trained = max(opened.run.digests, default=-1) + 1
    if is_run_dir(opened.run.run_dir) and last >= trained:
        log.warning("%s has trained %s; step %s lies ahead and is computed from the data",
                    opened.run.run_dir, counted(trained, "step"), f"{last:,}")


# ---- digests ------------------------------------------------------------------------------------

def step_digests(opened: Opened, steps: range, W: int) -> Iterator[tuple[int, list[int]]]:
    """(step, [each rank's part of its digest]) for W ranks. ValueError if the data ends before the last step."""
    lanes = [StepLayout(opened.config.V, opened.rows_per_step, 1, rank, W).lanes for rank in range(W)]
    with opened.stream_at(steps.start) as stream:
        for step in steps:
            rows = stream.next_rows(opened.rows_per_lane)
            if len(rows) < opened.rows_per_step:
                raise ValueError(f"step {step}: the data runs out before this step")
            digests = [row.digest(i) for i, row in enumerate(rows)]
            parts = [sum(digest for row, digest in zip(rows, digests) if row.lane in mine) for mine in lanes]
            yield step, [part % 2**64 for part in parts]


def show_digests(opened: Opened, args: argparse.Namespace) -> int:
    """Print one JSON line per step. Exit code 1 if the run logged a different digest."""
    logged, wrong = opened.run.digests, []
    warn_untrained(opened, args.steps[-1])
    for step, parts in step_digests(opened, args.steps, args.ranks or 1):
        line: dict[str, Any] = {"step": step, "digest": f"{sum(parts) % 2**64:016x}"}
        if args.ranks:
            line["ranks"] = [f"{part:016x}" for part in parts]
        if step in logged:
            line |= {"logged": logged[step], "match": logged[step] == line["digest"]}
            wrong += [] if line["match"] else [step]
        print(json.dumps(line), flush=True)
    if wrong:
        print(f"error: {opened.run.run_dir}: {len(wrong)} of {len(args.steps)} digests differ from the log, first at "
              f"step {wrong[0]}; the code or the data has changed since then", file=sys.stderr)
    return EXIT_FAILED if wrong else 0


# ---- rows ---------------------------------------------------------------------------------------

def describe(opened: Opened, stream: Any, row: Any) -> list[dict[str, Any]]:
    """The documents of a row. Tokens `start` to `stop` - 1 of a document, which has `of` tokens and BOS as token 0, are
    in the row from position `at` on. `tokens` also counts the BOS that is put in front of a continuation."""
    if not isinstance(stream, Stream):  # Megatron's order
        return stream.describe(row)
    source, at, documents = opened.data.train[row.bucket], 0, []
    for (epoch, group, number), start, length, _ in row.placed:
        name, local = source.locate(group)
        [document] = source.read(group, np.array([number]))
        before = int(source.groups[group - local:group].sum())  # documents in the file's earlier groups
        inserted = int(start > 0 and opened.config.layout == "bestfit")
        off = 0 if row.live is None else int((row.live[at:at + length] == 0).sum())
        documents.append({"at": at, "tokens": length, "off": off, "file": name, "group": local,
                          "document": before + number, "document_in_group": number, "epoch": epoch,
                          "start": start, "stop": start + length - inserted, "of": len(document.ids)})
        at += length
    return documents


def row_means(run: RunReader, step: int) -> list[float | None]:
    """The mean loss over the live targets of each row of a step; None for a row without live targets. FileNotFoundError
    if the run recorded no row losses, ValueError if the record is corrupt."""
    return [float(total / targets) if targets else None for total, targets in zip(*run.row_losses.read(step))]


def show_rows(opened: Opened, args: argparse.Namespace) -> int:
    """Print the documents in each row of a step."""
    if args.row is not None and args.row >= opened.rows_per_step:
        raise ValueError(f"--row {args.row}: step {args.step} has rows 0 to {opened.rows_per_step - 1}; name one")
    losses = row_means(opened.run, args.step) if args.sort else []
    warn_untrained(opened, args.step)
    lines: list[dict[str, Any]] = []
    texts: list[list[str]] = []  # the lines of each document's text
    with opened.stream_at(args.step) as stream:
        rows = list(enumerate(stream.next_rows(opened.rows_per_lane)))
        if losses:  # rows without a loss come last
            rows.sort(key=lambda numbered: -math.inf if (x := losses[numbered[0]]) is None else x, reverse=True)
        for number, row in rows:
            if args.row not in (None, number):
                continue
            head = {"step": args.step, "row": number, "lane": row.lane, "lane_row": row.index,
                    "bucket": row.bucket, **({"loss": losses[number]} if losses else {})}
            documents = describe(opened, stream, row)
            lines += [head | document for document in documents]
            for document in documents if args.text else ():
                ids = row.tokens[document["at"]:document["at"] + document["tokens"]]
                document["text"] = opened.data.tokenizer.decode(ids.tolist())
                texts.append([visible(line) for line in document["text"].splitlines()])
            if args.json:
                print(json.dumps({**head, "documents": documents}))
    if args.json:
        return 0
    heading, *body = table([*lines[0]], [[*line.values()] for line in lines])
    whole_row = args.row is not None
    print(heading)
    for i, line in enumerate(body if whole_row else body[:LINES]):
        print(line, *(texts[i][:None if whole_row else 1] if args.text else ()), sep="\n    | ")
    if not whole_row:
        print(f"{min(LINES, len(body))} of the step's {len(body):,} pieces of documents; --row=N shows all of one row, "
              f"--json everything")
    print(LEGEND.format(loss="loss: the row's mean; " if losses else ""))
    return 0


def first_words(opened: Opened, ids: np.ndarray) -> str:
    """The beginning of a document, on one line."""
    tokenizer = opened.data.tokenizer
    ids = ids[:WORDS][ids[:WORDS] != tokenizer.get_bos_token_id()]
    return " ".join(tokenizer.decode(ids.tolist()).split())[:WORDS]


# ---- spikes --------------------------------------------------------------------------------------

def deviations(values: np.ndarray) -> np.ndarray:
    """How many robust deviations each value lies above the median of the WINDOW values before it. NaN counts as
    infinitely high, and later medians ignore it. 0 if fewer than ENOUGH earlier values are finite."""
    scores = np.zeros(len(values))
    for i in range(ENOUGH, len(values)):
        window = values[max(0, i - WINDOW):i]
        window = window[np.isfinite(window)]
        if len(window) >= ENOUGH:
            median = np.median(window)
            deviation = NORMAL * np.median(np.abs(window - median))
            above = (values[i] - median) / max(deviation, 1e-6 * abs(median), 1e-12)
            scores[i] = above if np.isfinite(above) else math.inf
    return scores


def worst_rows(opened: Opened, step: int) -> list[dict[str, Any]]:
    """The rows of a step whose losses are furthest above their bucket's median in the AROUND + 1 steps up to it."""
    usual: dict[str, list[float]] = {}
    worst: list[dict[str, Any]] = []
    first = max(0, step - AROUND)  # the steps from here on define the usual loss of each bucket
    with opened.stream_at(first) as stream:
        for at in range(first, step + 1):
            rows = stream.next_rows(opened.rows_per_lane)
            losses = row_means(opened.run, at)
            for row, loss in zip(rows, losses):
                if loss is not None and math.isfinite(loss):
                    usual.setdefault(row.bucket, []).append(loss)
        medians = {bucket: float(np.median(of_bucket)) for bucket, of_bucket in usual.items()}
        for number, (row, loss) in enumerate(zip(rows, losses)):
            if loss is not None:
                above = loss - medians.get(row.bucket, 0.0)
                worst.append({"row": number, "lane": row.lane, "bucket": row.bucket, "loss": loss,
                              "above": above if math.isfinite(above) else math.inf})
        worst = sorted(worst, key=lambda row: -row["above"])[:WORST]
        for line in worst:
            row = rows[line["row"]]
            line["documents"] = [
                {"document": f"{place['file']}:{place['document']}", "start": place["start"], "stop": place["stop"],
                 "text": first_words(opened, row.tokens[place["at"]:place["at"] + place["tokens"]])}
                for place in describe(opened, stream, row)]
    return worst


def show_spikes(opened: Opened, args: argparse.Namespace) -> int:
    """Print the steps whose loss or gradient norm is an outlier, and the rows behind them."""
    steps, names = opened.run.steps, ("loss", "grad_norm")
    values = {name: np.array([step.get(name) for step in steps], float) for name in names}  # NaN for None
    scores = {name: deviations(values[name]) for name in names}
    height = np.maximum(scores["loss"], scores["grad_norm"])
    chosen = [i for i in np.argsort(-height, kind="stable")[:args.top].tolist() if height[i] >= OUTLIER]
    if not chosen and not args.json:
        before = min(WINDOW, len(steps) - 1)
        print(f"no spike in {counted(len(steps), 'step')}: " + (
            f"no loss or gradient norm is {OUTLIER} robust standard deviations above the median of the steps before it "
            f"(at least {ENOUGH}, at most {before})" if before >= ENOUGH else
            f"a comparison needs at least {ENOUGH} earlier steps"))
    if steps and not args.json:
        first = steps[0]["step"]
        print(f"not judged: steps {first:,} to {steps[:ENOUGH][-1]['step']:,}, which have fewer than {ENOUGH} steps "
              f"before them")
    recorded = True
    for i in chosen:
        step, rows = steps[i]["step"], []
        try:
            rows = worst_rows(opened, step) if recorded else []
        except FileNotFoundError as e:
            log.warning("%s; spikes are shown without their rows", e)
            recorded = False
        figures = {name: steps[i].get(name) for name in names}
        above = {f"{name}_deviations": float(scores[name][i]) for name in names}
        if args.json:
            print(json.dumps(finite({"step": step, **figures, **above, "rows": rows}), allow_nan=False))
            continue
        print(f"step {step:,}: " + ", ".join(f"{name} {show(figures[name])} ({show(above[f'{name}_deviations'])} "
                                             f"deviations above earlier steps)" for name in names))
        lines = []
        for row in rows:
            shown = [f"{document['document']} {document['text']}" for document in row["documents"][:WORST]]
            more = len(row["documents"]) - len(shown)
            lines.append([*(row[name] for name in ("row", "lane", "bucket", "loss", "above")),
                          "; ".join([*shown, f"{more} more"] if more else shown)])
        if lines:
            print(*table(["row", "lane", "bucket", "loss", "above median", "documents"], lines), sep="\n")
    return 0


# ---- from a document to its steps ----------------------------------------------------------------

def tracer(opened: Opened) -> Callable[[Document], Iterator[Pass]]:
    """The function that follows a training document through the run, epoch by epoch."""
    run, config, trained = opened.run, opened.config, opened.run.num_steps
    nearest = lru_cache(32)(lambda step: run.nearest_cursors(step) or (0, None))
    if isinstance(config, StreamConfig):
        return History(config, opened.data.train, opened.data.tokenizer.fingerprint, opened.rows_per_lane,
                       sorted({0, *run.cursor_files}), nearest, trained, max(trained, run.horizon or 0)).passes
    stream: Any = open_stream(config, opened.data.train, [0], tokenizer=opened.data.tokenizer.fingerprint)
    cursors = nearest(0)[1]
    begin = cursors[0]["samples"] if cursors else 0
    return lambda document: sample_passes(stream, document, rows_per_step=opened.rows_per_step, begin=begin,
                                          trained=trained)


def fate(opened: Opened, one_pass: Pass) -> str:
    """What became of a document's tokens that are in no row; empty if every token is in a row."""
    lane = "" if one_pass.lane is None else f" in lane {one_pass.lane}"
    if opened.run.outcome == "completed" and (one_pass.pending or one_pass.expected is not None):
        if not one_pass.uses:
            return "never trained on: the run ended first"
        stop = max(use.stop for use in one_pass.uses)
        rest = "its other tokens" if one_pass.lane is None else f"tokens {stop:,} to {one_pass.length - 1:,}"
        return f"{rest} never trained on: the run ended first"
    if one_pass.pending:
        return f"pending{lane}"
    if one_pass.expected is not None and math.isfinite(one_pass.expected):
        return f"expected around step {one_pass.expected:,.0f}{lane}"
    if one_pass.expected is not None:
        return f"not reached: the run ends with step {max(opened.run.num_steps, opened.run.horizon or 0) - 1:,}"
    if one_pass.cropped_after is not None:
        return f"cropped from token {one_pass.cropped_after:,} on"
    return "" if one_pass.uses else "before this run began" if 0 in opened.run.cursor_files else "in no row"


def remark(opened: Opened, document: Any, split: str, left_out: bool, passes: Sequence[Any]) -> str:
    """Why a run does not learn from a document; empty if it does, or if the passes give the reason."""
    if split != "train":
        files = opened.data.manifests["train"].get(document.bucket, {}).get("files", ())
        shared = any(document.name.rpartition(":")[0] == file["name"] for file in files)
        what = "a part of this file that is held out for validation" if shared else "a validation document"
        return f"{what}: the run never trains on it"
    if left_out:
        return "its targets are masked (--without-documents), so the model never learned to predict it"
    return "" if passes else "the curriculum does not use its bucket"


def named_documents(opened: Opened, args: argparse.Namespace) -> list[tuple[str, Document, list[Pass]]]:
    """(split, document, its passes) for each document that --document or --text names. Of those that contain a text,
    at most DOCUMENTS, and first those that the run trained on. ValueError if there are none."""
    data, passes_of = {"train": opened.data.train, "validation": opened.data.val}, tracer(opened)

    def traced(split: str, document: Document) -> tuple[str, Document, list[Pass]]:
        return split, document, list(passes_of(document)) if split == "train" else []

    if args.document is not None:
        return [traced(*find_document(data, args.document))]
    if not args.text:
        raise ValueError("--text: it is empty; pass some words from a document")
    matches = ((split, document) for split, sources in data.items() for bucket, source in sources.items()
               for document in documents_with(source, bucket, args.text))
    used: list[Any] = []
    others: list[Any] = []
    for match in islice(matches, TRACED):
        found = traced(*match)
        (used if any(one_pass.uses for one_pass in found[2]) else others).append(found)
        if len(used) == DOCUMENTS:
            break
    if not used + others:
        raise ValueError(f"--text: {args.text!r} occurs in no document of the run's files; capitals, spaces and line "
                         f"breaks count")
    more = next(matches, None) is not None
    if not args.json:
        print(f"{visible(args.text)!r}: the run trained on {len(used)} of the {'first ' * more}"
              f"{counted(len(used + others), 'document')} containing it{'; the search stopped there' * more}")
    return (used + others)[:DOCUMENTS]


def show_find(opened: Opened, args: argparse.Namespace) -> int:
    """Print every training row with tokens of a document, epoch by epoch."""
    @lru_cache(None)
    def losses(step: int) -> list[float | None] | None:
        try:
            return row_means(opened.run, step)
        except FileNotFoundError:
            return None
        except ValueError as e:
            log.warning("%s", e)
            return None

    legend = False
    for split, document, traced in named_documents(opened, args):
        passes, ids = [], np.zeros(0, np.int64)
        source, words = (opened.data.train if split == "train" else opened.data.val)[document.bucket], ""
        listed = source.without.get(document.group)
        left_out = listed is not None and bool(listed[document.row])
        if document.group >= 0:
            ids = source.read(document.group, np.array([document.row]))[0].ids[:]
            words = first_words(opened, ids)
        for one_pass in traced:
            uses = [{**use._asdict(), "loss": of_step[use.row] if (of_step := losses(use.step)) else None}
                    for use in one_pass.uses]
            if args.text:  # a row may hold another part of the document
                for use in uses:
                    part = opened.data.tokenizer.decode(ids[use["start"]:use["stop"]].tolist())
                    use["has_text"] = args.text in part
            passes.append({**asdict(one_pass), "uses": uses, "cropped_after": one_pass.cropped_after,
                           "fate": fate(opened, one_pass)})
        head = {"document": document.name, "bucket": document.bucket, "split": split, "text": words,
                "without": left_out}
        if args.json:
            print(json.dumps(finite({**head, "passes": passes}), allow_nan=False), flush=True)
            continue
        print(f"{visible(document.name)} ({document.bucket}{', validation' * (split != 'train')}): {visible(words)}")
        columns = ("epoch", "step", "row", "lane", "start", "stop", "loss", *(["has_text"] if args.text else []))
        if lines := [[use[name] for name in columns] for of_epoch in passes for use in of_epoch["uses"]]:
            print(*table(columns, lines), sep="\n")
            legend = True
        if opened.run.outcome == "completed":  # leave out epochs that the run may never have begun
            passes = [of_epoch for i, of_epoch in enumerate(passes) if of_epoch["uses"] or i == 0]
        for ending, same in groupby(passes, key=lambda of_epoch: of_epoch["fate"]):
            first, *more = (of_epoch["epoch"] for of_epoch in same)
            if ending:
                print(f"epochs {first} to {more[-1]}: {ending}" if more else f"epoch {first}: {ending}")
        if line := remark(opened, document, split, left_out, passes):
            print(line)
    if legend:
        print(FIND_LEGEND)
    return 0


def show_ledger(opened: Opened, args: argparse.Namespace) -> int:
    """Print the ledger after some steps. Exit code 1 if it does not balance, which is a bug."""
    step = max(opened.run.cursor_files, default=0) if args.step is None else args.step
    with opened.stream_at(step) as stream:
        accounts = ledger(stream.cursors(), opened.config.T)
    text, header, rows = ledger_table(step, accounts, opened.config.T)
    print(text, *table(header, rows), sep="\n")
    return EXIT_FAILED if unbalanced(accounts) else 0


# ---- the command line ---------------------------------------------------------------------------

def span(text: str) -> range:
    """argparse type: A:B with 0 <= A < B."""
    first, _, stop = text.partition(":")
    if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected A:B with 0 <= A < B, such as 0:10")
    return range(int(first), int(stop))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="rows|digest|spikes|find|ledger")
    rows = commands.add_parser("rows", help="show the documents in each row of a step")
    rows.add_argument("--step", type=whole(0), required=True, help="the step, counted from 0")
    rows.add_argument("--row", type=whole(0), help="show only this row of the step, counted from 0")
    rows.add_argument("--text", action="store_true", help="show the text of the documents: all of it with --row or "
                      "--json, else the first line of each")
    rows.add_argument("--sort", choices=["loss"], help="sort rows by their mean loss, highest first")
    digest = commands.add_parser("digest", help="print the batch digest of each step as a JSON line")
    digest.add_argument("--steps", type=span, required=True, metavar="A:B", help="steps A to B - 1, counted from 0")
    digest.add_argument("--world-size", dest="ranks", type=whole(1), metavar="W",
                        help="also print the part of each rank, for W ranks")
    spikes = commands.add_parser("spikes", help="show steps with an unusual loss or gradient norm, and their rows")
    spikes.add_argument("--top", type=whole(1), default=5, metavar="N",
                        help="show at most N steps, largest spike first")
    find = commands.add_parser("find", help="show the steps and rows that used a document")
    named = find.add_mutually_exclusive_group(required=True)
    named.add_argument("--document", metavar="FILE:DOC", help="a file and a document of it, as in the columns "
                       "that `rows` prints; DOC counts from 0")
    named.add_argument("--text", help=f"find up to {DOCUMENTS} documents that contain this text, "
                       "those trained on first")
    accounts = commands.add_parser("ledger", help="count the tokens read, emitted, cropped and pending")
    accounts.add_argument("--step", type=whole(0), help="after this many steps (default: at a run's newest save)")
    for subparser, unit in ((rows, "row"), (spikes, "step"), (find, "document")):
        subparser.add_argument("--json", action="store_true", help=f"print one JSON line per {unit}")
    for subparser, main in ((rows, show_rows), (digest, show_digests), (spikes, show_spikes), (find, show_find),
                            (accounts, show_ledger)):
        subparser.set_defaults(main=main)
        needs_log = main in (show_spikes, show_find)
        subparser.add_argument("run", metavar="RUN", nargs="?", help="a run's name or folder" + (
            " (default: the only run)" if needs_log else
            ", or a receipt (default: the only run, if no base_train flag is given)"))
        add_flags(subparser, without=("run",), listed=False)
        subparser.usage = "%(prog)s [RUN] [flags]"
        subparser.epilog = None if needs_log else (
            "Instead of RUN: any flags of scripts.base_train, whose --help lists them. A receipt needs "
            "--data-path, and takes --tokenizer and --eod-token.")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 1 if a digest differs or the ledger does not balance. ValueError and OSError for bad
    input."""
    args = parse_args(argv)
    setup_logging()
    return args.main(open_named_stream(args), args)


if __name__ == "__main__":
    run_main(main)
