"""
Show what data any step of a run sees: documents, digests, counts of tokens. No model, no GPU.

    python -m scripts.inspect_data digest d12 --steps 0:100     # and compare with its log
    python -m scripts.inspect_data digest --data-path DIR --depth 12 --steps 0:5 --world-size 8
    python -m scripts.inspect_data rows d12 --step 1234 --row 7 --text
    python -m scripts.inspect_data rows d12 --step 1234 --sort loss     # rows with the highest losses first
    python -m scripts.inspect_data spikes d12                   # steps that stand out, and the rows behind them
    python -m scripts.inspect_data find d12 --document web/0007.parquet:41    # or --text "some words"
    python -m scripts.inspect_data ledger d12
    python -m scripts.inspect_data rows d12.json --step 1234 --data-path DIR    # of a receipt (scripts.receipt)

A step s is the s-th optimizer step of a run, from 0. What stands before it is packed again from the
nearest cursors that the run kept, so any step of a long run is near:

    kept cursors:   0 . . . . . . 1000 . . . . . . 2000
    step 1234:                     restore 1000, pack 234 steps, look

What the run has not come to yet is packed all the same. With flags of scripts.base_train in place of a
run, the stream is the one that it would train on: so rows can be looked at before a long run. The digest
of a step is the same for any number of ranks; with --world-size W each one's part of it is told.
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
from nanochat.common import show, table, visible
from nanochat.config import Settings, add_flags, flag, from_flags, stream_config
from nanochat.dataloader import StepLayout
from nanochat.find import Document, History, Pass, documents_with, find_document, sample_passes
from nanochat.order import StreamConfig
from nanochat.run_dir import find_run, finite, is_run_dir
from nanochat.run_reader import RunReader, ledger_table, unbalanced
from nanochat.sources import RunData, Source
from nanochat.spikes import ENOUGH, NORMAL, WINDOW
from nanochat.start_run import command, find_data, inspect_run, open_run
from nanochat.stream import Cursor, Row, Stream, ledger, open_stream
from scripts.receipt import open_receipt, read_receipt

log = logging.getLogger(__name__)

LINES = 40  # of the table of a step's documents
DOCUMENTS = 20  # that hold a text and are named, at most
STANDS_OUT = 4  # robust deviations above the steps before
AROUND = 8  # steps before a spike whose rows show what is usual in a bucket
WORST = 3  # rows of a spike, and documents of such a row, that are shown
WORDS = 60  # characters of a document's beginning


# ---- a stream that can be entered at any step ---------------------------------------------------

@dataclass(frozen=True)
class Opened:
    """The stream of a run, or that of flags: then `run` has no directory. `begin`: the cursors
    of step 0 if that is not the beginning of the data."""

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
        """The stream of all lanes after `step` steps. A ValueError, also of what is read from it later,
        names the kept cursors that it began with: they may be what is damaged."""
        saved = self.run.nearest_cursors(step)
        done, cursors = saved or (0, self.begin)
        try:
            with closing(open_stream(self.config, self.data.train, range(self.config.V), cursors=cursors,
                                     tokenizer=self.data.tokenizer.fingerprint, drop_dry=True)) as stream:
                for _ in tqdm(range(step - done), desc=f"packing from step {done}", disable=None):
                    stream.next_rows(self.rows_per_lane)
                yield stream
        except ValueError as e:
            raise ValueError(f"{e} (packed from {self.run.cursor_files[done]})" if saved else str(e)) from None


def open_named_stream(args: argparse.Namespace) -> Opened:
    """The stream that the command line names. ValueError or FileNotFoundError if there is none."""
    settings = from_flags(args)
    if args.run is not None and (receipt := Path(args.run)).suffix == ".json" and receipt.is_file():
        if args.main in (show_spikes, show_find):
            raise ValueError(f"{receipt}: a receipt has no log and no saves; name the run")
        last = args.steps[-1] if "steps" in args else (args.step or 0) - (args.main is show_ledger)
        return open_from_receipt(receipt, settings, last)
    given = [flag(name) for name in settings.differing() if name != "run"]
    if args.run is None and given:
        settings, tokenizer = command(settings, 1, "cpu")
        settings = replace(settings, model_tag=f"inspect-{os.getpid()}")  # as of a new run
        start, data = find_data(inspect_run(settings, torch.device("cpu")), tokenizer)
        run_dir, settings, config, begin = start.run_dir, start.settings, stream_config(start.settings), start.cursors
    elif given:
        raise ValueError(f"{args.run} and {', '.join(given)}: a run has its own; leave out one or the other")
    else:
        return open_stream_of(find_run(args.run))
    return Opened(RunReader(run_dir), data, config, settings.total_batch_size // config.T, begin)


def open_from_receipt(path: Path, given: Settings, last: int = 0) -> Opened:
    """The stream of a receipt, on the data and the tokenizer that flags name. ValueError for other flags, and if the
    run has no step `last`."""
    allowed = {"data_path", "tokenizer", "eod_token", "run"}  # the last is no flag here
    if refused := [flag(name) for name in given.differing() if name not in allowed]:
        raise ValueError(f"{path} and {', '.join(refused)}: a receipt has its own settings; leave that out")
    if given.data_path is None:
        raise ValueError(f"{path}: a receipt does not say where the data is; name its folder with --data-path")
    if last >= (steps := read_receipt(path)["steps"]):
        raise ValueError(f"{path}: it has no step {last:,}; the run trained steps 0 to {steps - 1:,}")
    receipt = open_receipt(path, given.data_path, given.tokenizer, eod_token=given.eod_token)
    rows_per_step = receipt.settings.total_batch_size // receipt.config.T
    return Opened(RunReader(path), receipt.data, receipt.config, rows_per_step, receipt.begin)


def open_stream_of(run_dir: Path) -> Opened:
    """The stream of a run. ValueError or FileNotFoundError if its data changed or is missing."""
    data, config, settings = open_run(run_dir)
    return Opened(RunReader(run_dir), data, config, settings.total_batch_size // config.T)


# ---- the commands -------------------------------------------------------------------------------

def step_digests(opened: Opened, steps: range, W: int) -> Iterator[tuple[int, list[int]]]:
    """(step, the part of its digest that each of W ranks would have). ValueError where the data end before."""
    lanes = [StepLayout(opened.config.V, opened.rows_per_step, 1, rank, W).lanes for rank in range(W)]
    with opened.stream_at(steps.start) as stream:
        for step in steps:
            rows = stream.next_rows(opened.rows_per_lane)
            if len(rows) < opened.rows_per_step:
                raise ValueError(f"step {step}: the data end before it does")
            digests = [row.digest(i) for i, row in enumerate(rows)]
            parts = [sum(digest for row, digest in zip(rows, digests) if row.lane in mine) for mine in lanes]
            yield step, [part % 2**64 for part in parts]


def warn_untrained(opened: Opened, last: int) -> None:
    """Warn if the run has not trained step `last` yet."""
    trained = max(opened.run.digests, default=-1)
    if is_run_dir(opened.run.run_dir) and last > trained:
        log.warning("%s has trained %s steps, from 0: what is shown of step %s would come later, and is packed now",
                    opened.run.run_dir, f"{trained + 1:,}", f"{last:,}")


def show_digests(opened: Opened, args: argparse.Namespace) -> int:
    """One JSON line per step; exit code 1 if the run's log has another digest."""
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
        print(f"error: {opened.run.run_dir}: {len(wrong)} of {len(args.steps)} digests are not those "
              f"that the run logged, first at step {wrong[0]}: code or data changed since it was "
              f"there", file=sys.stderr)
    return EXIT_FAILED if wrong else 0


def describe(opened: Opened, row: Row) -> list[dict[str, Any]]:
    """Where each document of a row comes from. `start` and `stop` count the document's tokens, BOS
    being token 0, `of` so many; a continuation has a BOS of its own in front, which is in `tokens`
    but not in that range."""
    source, at, documents = opened.data.train[row.bucket], 0, []
    for (epoch, group, number), start, length, _ in row.placed:
        name, local = source.locate(group)
        [ids], _ = source.read(group, np.array([number]))
        before = int(source.groups[group - local:group].sum())  # documents of its file before it
        inserted = int(start > 0 and opened.config.layout == "bestfit")
        off = 0 if row.live is None else int((row.live[at:at + length] == 0).sum())
        documents.append({"at": at, "tokens": length, "off": off, "file": name, "group": local,
                          "document": before + number, "document_in_group": number, "epoch": epoch,
                          "start": start, "stop": start + length - inserted, "of": len(ids)})
        at += length
    return documents


def documents_of(opened: Opened, stream: Any, row: Any) -> list[dict[str, Any]]:
    """`describe`, in either order: Megatron's stream describes its own samples."""
    return describe(opened, row) if isinstance(stream, Stream) else stream.describe(row)


def row_means(run: RunReader, step: int) -> list[float | None]:
    """The mean loss of the live targets of each row of a step; None for a row that has none. FileNotFoundError if the
    run recorded none, ValueError if they are corrupt."""
    return [float(total / targets) if targets else None for total, targets in zip(*run.row_losses.read(step))]


def show_rows(opened: Opened, args: argparse.Namespace) -> int:
    """The documents in each row of a step."""
    if args.row is not None and args.row >= opened.rows_per_step:
        raise ValueError(f"--row {args.row}: step {args.step} has rows 0 to "
                         f"{opened.rows_per_step - 1}")
    losses: list[float | None] = []
    if args.sort:
        if not is_run_dir(opened.run.run_dir):
            raise ValueError("--sort=loss: only a run that has trained has losses; name one instead of flags")
        losses = row_means(opened.run, args.step)
    warn_untrained(opened, args.step)
    lines: list[dict[str, Any]] = []
    texts: list[str] = []
    with opened.stream_at(args.step) as stream:
        rows = list(enumerate(stream.next_rows(opened.rows_per_lane)))
        if losses:  # rows without a loss last
            rows.sort(key=lambda numbered: -math.inf if (x := losses[numbered[0]]) is None else x, reverse=True)
        for number, row in rows:
            if args.row not in (None, number):
                continue
            head = {"step": args.step, "row": number, "lane": row.lane, "lane_row": row.index,
                    "bucket": row.bucket, **({"loss": losses[number]} if losses else {})}
            documents = documents_of(opened, stream, row)
            for document in documents:
                tokens = row.tokens[document["at"]:document["at"] + document["tokens"]].tolist()
                texts.append(opened.data.tokenizer.decode(tokens))
                lines.append(head | document)
                document |= {"text": texts[-1]} if args.text else {}
            if args.json:
                print(json.dumps({**head, "documents": documents}))
    if not args.json:
        heading, *body = table([*lines[0]], [[*line.values()] for line in lines])
        print(heading)
        shown, of_text = (body[:LINES], 1) if args.row is None else (body, None)  # lines of a document's text
        for line, text in zip(shown, texts):
            print(line, *(map(visible, text.splitlines()[:of_text]) if args.text else ()), sep="\n    | ")
        if args.row is None:
            print(f"{len(shown)} of the step's {len(body):,} documents; --row=N shows all of a row, --json all of it")
        print("at: the token of the row that it begins at; off: tokens not trained on; start, stop: which of the "
              "document's tokens; of: how many it has")
    return 0


# ---- steps that stand out ------------------------------------------------------------------------

def deviations(values: np.ndarray) -> np.ndarray:
    """How many robust deviations each value of a series lies above the median of the WINDOW values before it. NaN lies
    infinitely high, and is not counted among those before; 0 where fewer than ENOUGH are known."""
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
    """The rows of a step whose losses are highest above the median of their bucket in this step and those before."""
    usual: dict[str, list[float]] = {}
    worst: list[dict[str, Any]] = []
    first = max(0, step - AROUND)
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
                for place in documents_of(opened, stream, row)]
    return worst


def first_words(opened: Opened, ids: np.ndarray) -> str:
    """The beginning of a document, in one line."""
    tokenizer = opened.data.tokenizer
    ids = ids[:WORDS][ids[:WORDS] != tokenizer.get_bos_token_id()]
    return " ".join(tokenizer.decode(ids.tolist()).split())[:WORDS]


def show_spikes(opened: Opened, args: argparse.Namespace) -> int:
    """The steps whose loss or gradient norm stands out, and the rows behind them."""
    steps = named_run(opened, "spikes").steps
    names = ("loss", "grad_norm")
    values = {name: np.array([step.get(name) for step in steps], float) for name in names}  # NaN for None
    scores = {name: deviations(values[name]) for name in names}
    height = np.maximum(scores["loss"], scores["grad_norm"])
    chosen = [i for i in np.argsort(-height, kind="stable")[:args.top].tolist() if height[i] >= STANDS_OUT]
    if not chosen and not args.json:
        print(f"none of {len(steps):,} steps stands out: no loss and no gradient norm lies {STANDS_OUT} robust "
              f"deviations above the median of the {WINDOW} steps before it")
    recorded = True
    for i in chosen:
        step, rows = steps[i]["step"], []
        if recorded:
            try:
                rows = worst_rows(opened, step)
            except FileNotFoundError as e:
                log.warning("%s; so the rows behind spikes are not known", e)
                recorded = False
        figures = {name: steps[i].get(name) for name in names}
        above = {f"{name}_deviations": float(scores[name][i]) for name in names}
        if args.json:
            print(json.dumps(finite({"step": step, **figures, **above, "rows": rows}), allow_nan=False))
            continue
        print(f"step {step:,}: " + ", ".join(f"{name} {show(figures[name])} ({show(above[f'{name}_deviations'])} "
                                             f"deviations above the steps before)" for name in names))
        lines = [[row[name] for name in ("row", "lane", "bucket", "loss", "above")] +
                 ["; ".join(f"{d['document']} {d['text']}" for d in row["documents"][:WORST])
                  + (f"; {len(row['documents']) - WORST} more" if len(row["documents"]) > WORST else "")]
                 for row in rows]
        if lines:
            print(*table(["row", "lane", "bucket", "loss", "above its bucket", "documents"], lines), sep="\n")
    return 0


# ---- from a document to its steps ----------------------------------------------------------------

def named_run(opened: Opened, command: str) -> RunReader:
    """The run that a command needs. ValueError if flags stand in its place."""
    if not is_run_dir(opened.run.run_dir):
        raise ValueError(f"{command}: it reports on what a run has trained on; name a run instead of flags")
    return opened.run


def tracer(opened: Opened) -> Callable[[Document], Iterator[Pass]]:
    """What tells what became of a document of the training data, epoch by epoch."""
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


def fate(opened: Opened, found: Pass) -> str:
    """What became of the tokens of a document that no row of the run has had, empty if it had all."""
    lane = "" if found.lane is None else f" in lane {found.lane}"
    if found.pending:
        return f"pending{lane}"
    if found.expected is not None and math.isfinite(found.expected):
        return f"expected around step {found.expected:,.0f}{lane}"
    if found.expected is not None:
        return f"not before the last step, {max(opened.run.num_steps, opened.run.horizon or 0) - 1:,}"
    if found.cropped_after is not None:
        return f"cropped after token {found.cropped_after:,}"
    return "" if found.uses else "before this run began" if 0 in opened.run.cursor_files else "in no row"


def is_left_out(source: Source, document: Document) -> bool:
    """Whether --without-documents turned off the targets of a document."""
    listed = source.without.get(document.group)
    return listed is not None and bool(listed[document.row])


def wanted_documents(opened: Opened, args: argparse.Namespace) -> list[tuple[str, Document]]:
    """(split, document) of those that the command line asks for. ValueError if there is none."""
    data = {"train": opened.data.train, "validation": opened.data.val}
    if args.document is not None:
        return [find_document(data, args.document)]
    if not args.text:
        raise ValueError("--text: got nothing to search for; give some words of a document")
    matches = ((split, document) for split, sources in data.items() for bucket, source in sources.items()
               for document in documents_with(source, bucket, args.text))
    documents = list(islice(matches, DOCUMENTS + 1))
    if not documents:
        raise ValueError(f"--text: {args.text!r} occurs in no document of the run's files; capitals, spaces and line "
                         f"breaks count")
    if len(documents) > DOCUMENTS:
        log.warning("more than %d documents hold the text; these are the first %d", DOCUMENTS, DOCUMENTS)
    return documents[:DOCUMENTS]


def show_find(opened: Opened, args: argparse.Namespace) -> int:
    """Every row and step that trained on tokens of a document, epoch by epoch."""
    run, documents = named_run(opened, "find"), wanted_documents(opened, args)
    if args.text and not args.json:
        print(f"{visible(args.text)!r} is in {', '.join(visible(document.name) for _, document in documents)}")
    passes_of = tracer(opened)

    @lru_cache(None)
    def losses(step: int) -> list[float | None] | None:
        try:
            return row_means(run, step)
        except FileNotFoundError:
            return None
        except ValueError as e:
            log.warning("%s", e)
            return None

    for split, document in documents:
        passes = []
        for found in passes_of(document) if split == "train" else ():
            uses = [{**use._asdict(), "loss": of_step[use.row] if (of_step := losses(use.step)) else None}
                    for use in found.uses]
            passes.append({**asdict(found), "uses": uses, "cropped_after": found.cropped_after,
                           "fate": fate(opened, found)})
        source, text = (opened.data.train if split == "train" else opened.data.val)[document.bucket], ""
        if document.group >= 0:
            text = first_words(opened, source.read(document.group, np.array([document.row]))[0][0])
        head = {"document": document.name, "bucket": document.bucket, "split": split, "text": text,
                "without": is_left_out(source, document)}
        if args.json:
            print(json.dumps(finite({**head, "passes": passes}), allow_nan=False), flush=True)
            continue
        print(f"{visible(document.name)} ({document.bucket}): {visible(text)}")
        columns = ("epoch", "step", "row", "lane", "start", "stop", "loss")
        lines = [[use[name] for name in columns] for of_epoch in passes for use in of_epoch["uses"]]
        print(*(table(columns, lines) if lines else ()), sep="\n", end="\n" * bool(lines))
        for said, same in groupby(passes, key=lambda of_epoch: of_epoch["fate"]):
            first, *more = (of_epoch["epoch"] for of_epoch in same)
            if said:
                print(f"epochs {first} to {more[-1]}: {said}" if more else f"epoch {first}: {said}")
        if split != "train":
            print("validation: the run never trains on it")
        elif is_left_out(source, document):
            print("its targets are off (--without-documents): its rows were trained on without it")
        elif not passes:
            print("the curriculum mixes nothing of its bucket")
    return 0


def show_ledger(opened: Opened, args: argparse.Namespace) -> int:
    """The accounts after some steps; exit code 1 where they do not balance: that is a bug."""
    if args.step is None and not is_run_dir(opened.run.run_dir):
        raise ValueError("ledger: no run is named, whose newest save it could be of; give --step=N, the steps done")
    step = max(opened.run.cursor_files, default=0) if args.step is None else args.step
    with opened.stream_at(step) as stream:
        accounts = ledger(stream.cursors(), opened.config.T)
    text, header, rows = ledger_table(step, accounts, opened.config.T)
    print(text, *["(the newest save)"] * (args.step is None), *table(header, rows), sep="\n")
    return EXIT_FAILED if unbalanced(accounts) else 0


# ---- the command line ---------------------------------------------------------------------------

def span(text: str) -> range:
    """argparse type: A:B with 0 <= A < B."""
    first, _, stop = text.partition(":")
    if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected A:B with 0 <= A < B, as 0:10")
    return range(int(first), int(stop))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="digest|rows|spikes|find|ledger")
    digest = commands.add_parser("digest", help="one JSON line a step: its batch digest")
    digest.add_argument("--steps", type=span, required=True, metavar="A:B",
                        help="steps A to B - 1, from 0")
    digest.add_argument("--world-size", dest="ranks", type=whole(1), metavar="W",
                        help="add up W ranks' parts, and list them")
    rows = commands.add_parser("rows", help="which documents are in each row of a step")
    rows.add_argument("--step", type=whole(0), required=True, help="from 0")
    rows.add_argument("--row", type=whole(0), help="only this row of the step, from 0")
    rows.add_argument("--text", action="store_true", help="decode them, with control characters escaped; without "
                      "--row or --json their first lines")
    rows.add_argument("--json", action="store_true", help="one JSON line a row, of all rows, instead of a table")
    rows.add_argument("--sort", choices=["loss"], help="rows by the mean loss of their live targets, highest first")
    spikes = commands.add_parser("spikes", help="steps whose loss or gradient norm stands out, and the rows behind")
    spikes.add_argument("--top", type=whole(1), default=5, metavar="N", help="at most N steps, the highest first")
    spikes.add_argument("--json", action="store_true", help="one JSON line a step")
    find = commands.add_parser("find", help="every row and step that trained on tokens of a document")
    wanted = find.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--document", metavar="FILE:ROW", help="as `rows` names it; ROW counts from 0")
    wanted.add_argument("--text", help=f"search the run's own files: the first {DOCUMENTS} documents that hold it")
    find.add_argument("--json", action="store_true", help="one JSON line a document")
    accounts = commands.add_parser("ledger", help="tokens read, emitted, cropped, pending")
    accounts.add_argument("--step", type=whole(0),
                          help="when so many are done (default: a run's newest save)")
    for subparser, main in ((digest, show_digests), (rows, show_rows), (spikes, show_spikes), (find, show_find),
                             (accounts, show_ledger)):
        subparser.set_defaults(main=main)
        subparser.add_argument("run", metavar="RUN", nargs="?",
                               help="a run's name or folder, or a receipt (default: the only run, if no flag is given)")
        add_flags(subparser, without=("run",), listed=False)
        subparser.usage = "%(prog)s [RUN] [flags]"
        subparser.epilog = ("In place of RUN: all flags of scripts.base_train, whose --help lists them. With a "
                            "receipt: --data-path, --tokenizer and --eod-token.")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Look and print; 1 where a digest differs or accounts do not balance. ValueError, OSError for
    bad input."""
    args = parse_args(argv)
    setup_logging()
    return args.main(open_named_stream(args), args)


if __name__ == "__main__":
    run_main(main)
