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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanochat import seen
from nanochat.cli import EXIT_FAILED, Parser, run_main, setup_logging, whole
from nanochat.common import table, visible
from nanochat.config import Settings, add_flags, flag, from_flags
from nanochat.find_report import DOCUMENTS, EPOCH, print_document, print_text
from nanochat.receipt import open_receipt
from nanochat.rows import Row
from nanochat.run_dir import find_run, is_run_dir
from nanochat.run_order import stream_config
from nanochat.run_reader import RunReader, ledger_table, unbalanced
from nanochat.run_stream import (
    Opened,
    ids_of,
    open_stream_of,
    places_in,
    row_means,
    step_digests,
)
from nanochat.seen_report import print_seen
from nanochat.spike_report import print_spikes
from nanochat.start_run import complete_settings, find_data, inspect_run
from nanochat.stream import ledger
from nanochat.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LINES = 40  # documents that the table of a step shows
LEGEND = f"""\
lane_row: the row's number in its lane; {{loss}}at: position in the row; tokens: how many are in the row
off: how many of them have no loss: the first ones after BOS, which an earlier row holds, too, or masked ones
(with --row, --text shows them as [no loss: ...]); group: part of the file; document, document_in_group: number among
those of the file and group that a run trains on, fewer with --val-fraction or --min-chars; line: in your file, from 1
epoch: {EPOCH}
start, stop: its tokens from start to before stop; of: all it has; numbers count from 0"""
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
    """Warn if no launch has trained step `last`. Where there is no run, only a step after the end counts."""
    is_after_end = opened.horizon is not None and last >= opened.horizon
    if last in opened.run.digests or not (is_after_end or is_run_dir(opened.run.run_dir)):
        return
    end = (
        ""
        if opened.horizon is None
        else f", and a run of this length ends with step {opened.horizon - 1:,}"
    )
    log.warning("step %s is computed from the data: no launch has trained it%s", f"{last:,}", end)


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


def text_lines(
    tokenizer: Tokenizer, row: Row, place: Mapping[str, Any], *, whole: bool = True
) -> list[str]:
    """The lines of a document's text in a row, for a terminal. What has no loss is in brackets;
    without `whole`, the lines do not begin with it."""
    ids = ids_of(row, place)
    live = np.ones(len(ids), np.uint8)
    if row.live is not None:
        live = row.live[place["at"] : place["at"] + place["tokens"]]
    if not whole and len(ids) > 1 and not live[:2].all():
        begin = 1 + int(np.argmax(live[1:]))  # the first token after BOS that has a loss
        ids, live = ids[begin:], live[begin:]
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
                    whole = args.row is not None
                    texts.append(text_lines(opened.data.tokenizer, row, document, whole=whole))
            if args.json:
                print(json.dumps({**head, "documents": documents}))
    if not args.json:
        print_rows(lines, texts, whole_row=args.row is not None)
        print(LEGEND.format(loss="loss: the row's mean; " if losses else ""))
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


# ---- spikes, documents and the ledger ------------------------------------------------------------


def show_spikes(opened: Opened, args: argparse.Namespace) -> int:
    """Print the steps whose loss or gradient norm is an outlier, and the rows behind them."""
    print_spikes(opened, args.top, as_json=args.json)
    return 0


def show_find(opened: Opened, args: argparse.Namespace) -> int:
    """Print where the run used a document, those with a text, or those with items of a benchmark."""
    if args.document is not None:
        print_document(opened, args.document, as_json=args.json)
    elif args.text is not None:
        print_text(opened, args.text, as_json=args.json)
    else:
        tasks = [seen.read_texts(file) for file in args.texts or []]
        if args.core:
            tasks = seen.read_core(args.eval_bundle)
        print_seen(opened, tasks, args.ngram, as_json=args.json)
    return 0


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
        "--json, else the first line of each that has a loss",
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
