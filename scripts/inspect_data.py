"""
Look into the stream: digests, documents and accounts of any step. No model, no GPU.

    python -m scripts.inspect_data digest --run d12 --steps 0:100          # and compare with what the run logged
    python -m scripts.inspect_data digest --data-path DIR --steps 0:5 --world-size 8
    python -m scripts.inspect_data rows --run d12 --step 1234 --row 7 --text
    python -m scripts.inspect_data ledger --run d12

A step s is the s-th optimizer step of a run, from 0. What stands before it is packed again from the nearest cursors
that the run kept, so any step of a long run is near:

    kept cursors:   0 . . . . . . 1000 . . . . . . 2000        step 1234: restore 1000, pack 234 steps, look

All commands begin with `cursors_at(step)`: what a checkpoint of that step would hold. Digests come from real loaders,
one for each rank. What a run's log tells is followed: how large each step was, which curriculum it took up when, which
rows it passed over. A run that went on with another one's data kept that one's cursors as those of its step 0.
"""

import argparse
import functools
import itertools
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanochat.blend import SampleConfig, SampleRow, SampleStream, find_prefixes
from nanochat.common import EXIT_FAILED, Parser, run_main, setup_logging
from nanochat.curriculum import Curriculum, load
from nanochat.dataloader import DataLoader, Layout
from nanochat.dataset import DEFAULT_DATASET, FORMATS, split_train_val
from nanochat.order import StreamConfig, default_lanes
from nanochat.run_data import open_run
from nanochat.run_dir import cursor_files, find_run, iter_log, read_cursors
from nanochat.sample_data import ORDERS, check_order, parse_weights, settle_split
from nanochat.sources import Source, check_format, open_source, scan
from nanochat.start_run import find_tokenizer
from nanochat.stream import LEDGER, Cursor, Row, Stream, ledger
from nanochat.stream import open_stream as open_lanes
from nanochat.tokenizer import RustBPETokenizer

log = logging.getLogger(__name__)

DEFAULTS = {"max_seq_len": 2048, "seed": 42, "total_batch_size": 524288, "lanes": -1}  # else StreamConfig's
CONFIG_FLAGS = {"max_seq_len": "T", "seed": "seed", "packing": "layout", "long_docs": "long_docs",
                "overlap": "overlap", "buffer_size": "buffer_size", "pack": "pack"}  # flag -> field of StreamConfig
SAMPLE_FLAGS = {"order": "lanes", "split": None, "blend_weights": None, "eod_mask_loss": False, "num_samples": 0}
STREAM_FLAGS = (*CONFIG_FLAGS, *SAMPLE_FLAGS, "data_path", "val_path", "data_format", "curriculum", "tokenizer",
                "total_batch_size", "rows_per_step", "lanes")


class History:
    """How a run came to its rows, from its log. Each launch begins again at some step, and what an earlier one did from
    there on counts no more where the curriculum or the rows passed over are others now.

    steps: {step: (digest, tokens of all steps so far)}, ascending; mixes: {step: the curriculum taken up there};
    skips: {step: how many steps' rows are passed over before it}.
    """

    def __init__(self, records: Iterable[dict[str, Any]]):
        self.steps: dict[int, tuple[str, int]] = {}
        self.mixes: dict[int, Curriculum] = {}
        self.skips: dict[int, int] = {}
        taken_up: dict[int, Curriculum] = {}
        ahead: dict[int, int] = {}
        for r in records:
            event, step = r.get("event"), r.get("step", -1)
            if event == "curriculum":
                taken_up = {step: Curriculum.from_json(r["curriculum"])}
                self._forget(step)
            elif event == "started":  # a launch says what it takes up just before
                self.mixes = {s: mix for s, mix in self.mixes.items() if s <= step} | taken_up
                taken_up, ahead = {}, dict(r.get("skips", ()))
            elif event == "skipped" and self.skips.get(step) != r["steps"]:
                self._forget(step)
                self.skips[step] = r["steps"]
            elif "digest" in r:
                self.steps[step] = (r["digest"], r.get("tokens", 0))
        self.steps, self.skips = dict(sorted(self.steps.items())), self.skips | ahead

    def _forget(self, step: int) -> None:
        """What was done from a step on was with other rows."""
        for found in (self.steps, self.skips):
            for later in [s for s in found if s >= step]:
                del found[later]


@dataclass(frozen=True)
class Opened:
    """A stream that can be entered at any step."""

    config: Any
    sources: dict[str, Source]
    tokenizer: RustBPETokenizer
    base_rows: int  # of a step, where no log tells
    run_dir: Path | None = None

    @functools.cached_property
    def kept(self) -> dict[int, Path]:
        """{steps done: kept cursors}, ascending."""
        return {} if self.run_dir is None else cursor_files(self.run_dir)

    @functools.cached_property
    def history(self) -> "History":
        """What the run's log tells."""
        return History(() if self.run_dir is None else iter_log(self.run_dir / "logs" / "train.jsonl"))

    @property
    def logged(self) -> dict[int, tuple[str, int]]:
        """{step: (digest, tokens of all steps so far)} of the run's log."""
        return self.history.steps

    def rows_per_step(self, step: int) -> int:
        """Rows of that step: what the log says of it or of the last step before it, else as the run was started."""
        for s in range(min(step, next(reversed(self.logged), -1)), -1, -1):
            now, before = self.logged.get(s, ("", 0))[1], self.logged.get(s - 1, ("", 0))[1]
            rows, rest = divmod(now - before, self.config.T)
            if (s == 0 or before) and rows > 0 and rest == rows % self.config.V == 0:
                return rows
        return self.base_rows

    def config_at(self, step: int) -> Any:
        """The stream's settings in a step: its curriculum may have been changed on the way."""
        mixes = [mix for since, mix in sorted(self.history.mixes.items()) if since <= step]
        if mixes and isinstance(self.config, StreamConfig):
            return replace(self.config, curriculum=mixes[-1])
        return self.config

    def stream(self, cursors: Sequence[Cursor] | None, step: int) -> Stream | SampleStream:
        """All lanes at a step, from their cursors or from the start."""
        return open_lanes(self.config_at(step), self.sources, range(self.config.V), cursors=cursors,
                                         tokenizer=self.tokenizer.fingerprint, drop_dry=True)

    def advance(self, stream: Stream | SampleStream, steps: range) -> None:
        """Pack what these steps take, the rows that they pass over too."""
        for step in tqdm(steps, desc=f"packing from step {steps.start}", unit=" steps", disable=None):
            for _ in range(1 + self.history.skips.get(step, 0)):
                stream.next_rows(self.rows_per_step(step) // self.config.V)

    def cursors_at(self, step: int) -> list[Cursor]:
        """The cursors of all lanes when `step` steps are done. ValueError if those kept are of another stream."""
        for done in sorted((s for s in self.kept if s <= step), reverse=True):
            try:
                cursors = read_cursors(self.kept[done])[1]
                break
            except ValueError as e:  # older ones serve as well
                log.warning("passed over: %s", e)
        else:
            done, cursors = 0, None
        edges = [done, *(s for s in sorted(self.history.mixes) if done < s < step), step]
        for first, last in itertools.pairwise(edges):
            with closing(self.stream(cursors, first)) as stream:
                self.advance(stream, range(first, last))
                cursors = stream.cursors()
        assert cursors is not None
        return cursors


def open_stream(args: argparse.Namespace) -> Opened:
    """The stream that the command line names. ValueError or FileNotFoundError if it does not name one."""
    given = [f"--{name.replace('_', '-')}" for name in STREAM_FLAGS if name in args]
    if args.run is not None and given:
        raise ValueError(f"--run and {', '.join(given)}: a run has its own; leave out one or the other")
    if args.run is None:
        opened = open_flags(vars(args))
    else:
        data, config, settings = open_run(find_run(args.run))
        rows = settings.total_batch_size // config.T
        opened = Opened(config, data.train, data.tokenizer, rows, find_run(args.run))
    Layout(opened.config.V, opened.base_rows, 1)  # refuses lanes that do not divide the step
    return opened


def open_flags(flags: dict[str, Any]) -> Opened:
    """A stream as base_train would make it of the same flags."""
    flags = DEFAULTS | flags
    T = max(1, flags["max_seq_len"])
    rows, rest = divmod(flags.get("rows_per_step", 0) * T or flags["total_batch_size"], T)
    if rest or rows < 1:
        raise ValueError(f"--total-batch-size: expected a multiple of {T} (--max-seq-len), got {rows * T + rest}")
    if flags.get("order", "lanes") == "megatron":
        return open_samples_of(flags, rows)
    check_order({"data_format": "text", **SAMPLE_FLAGS, **flags})
    fields = {field: flags[name] for name, field in CONFIG_FLAGS.items() if name in flags}
    mix = load(flags["curriculum"]) if "curriculum" in flags else None
    lanes = default_lanes(rows) if flags["lanes"] == -1 else flags["lanes"]
    config = StreamConfig(V=lanes, curriculum=mix, **fields)
    tokenizer = find_tokenizer(flags.get("tokenizer"), flags.get("data_path", DEFAULT_DATASET.data_dir))
    path = flags.get("data_path", DEFAULT_DATASET.data_dir)
    data_format = flags.get("data_format", "text")
    files = split_train_val(path, flags.get("val_path"), data_format=data_format, by_bucket=mix is not None)["train"]
    check_format(path, [file for found in files.values() for file in found], data_format)
    sources = {bucket: open_source(scan(path, found), tokenizer, as_stored=not config.framed)
               for bucket, found in files.items()}
    return Opened(config, sources, tokenizer, rows)


def open_samples_of(flags: dict[str, Any], rows: int) -> Opened:
    """The same for --order megatron."""
    path, val_path = flags.get("data_path", DEFAULT_DATASET.data_dir), flags.get("val_path")
    flags = {"data_format": "text", "packing": "bestfit", "pack": True, "long_docs": "crop", "curriculum": None,
             "allow_bucket_exhaustion": False, **SAMPLE_FLAGS, **flags, "data_path": path, "val_path": val_path}
    check_order(flags)
    if flags["num_samples"] < 1:
        raise ValueError("--num-samples: needed with --order megatron, the steps of the run times the rows of a step")
    weights, split = parse_weights(flags["blend_weights"]), settle_split(flags)
    assert split is not None
    lanes = default_lanes(rows) if flags["lanes"] == -1 else flags["lanes"]
    config = SampleConfig(T=flags["max_seq_len"], V=lanes, seed=flags["seed"], num_samples=flags["num_samples"],
                          split=split, weights=None if weights is None else tuple(weights),
                          eod_mask_loss=flags["eod_mask_loss"])
    tokenizer = find_tokenizer(flags.get("tokenizer"), path)
    sources = {bucket: open_source(manifest, tokenizer)
               for bucket, manifest in find_prefixes(path, val_path, split)["train"].items()}
    return Opened(config, sources, tokenizer, rows)


def step_digests(opened: Opened, steps: range, *, W: int, B: int) -> Iterator[tuple[int, list[int]]]:
    """(step, each rank's part of its digest), from one loader for each of W ranks, in micro-batches of B rows."""
    cursors = opened.cursors_at(steps.start)
    for (rows, config), alike in itertools.groupby(steps, key=lambda s: (opened.rows_per_step(s), opened.config_at(s))):
        same = list(alike)
        with ExitStack() as stack:
            loaders = [stack.enter_context(DataLoader(
                config, opened.sources, tokenizer=opened.tokenizer, rows_per_step=rows, device_batch_size=B,
                rank=rank, world_size=W, cursors=cursors, start_step=same[0], num_threads=max(1, 4 // W),
                drop_dry=True))
                for rank in range(W)]
            for step in same:
                for loader in loaders:
                    for _ in range(loader.micro_batches_per_step):
                        next(loader)
                yield step, [loader.digest for loader in loaders]
            cursors = [cursor for loader in loaders for cursor in loader.cursors()]


def show_digests(opened: Opened, args: argparse.Namespace) -> int:
    """One JSON line a step; exit code 1 where the run's log has another digest."""
    wrong = []
    for step, parts in step_digests(opened, args.steps, W=args.world_size or 1, B=args.device_batch_size):
        line: dict[str, Any] = {"step": step, "digest": f"{sum(parts) % 2**64:016x}"}
        if args.world_size:
            line["ranks"] = [f"{part:016x}" for part in parts]
        if step in opened.logged:
            line |= {"logged": opened.logged[step][0], "match": opened.logged[step][0] == line["digest"]}
            wrong += [] if line["match"] else [step]
        print(json.dumps(line), flush=True)
    if wrong:
        print(f"error: {opened.run_dir}: {len(wrong)} of {len(args.steps)} digests are not those that the run logged, "
              f"first at step {wrong[0]}: code or data changed since it was there", file=sys.stderr)
    return EXIT_FAILED if wrong else 0


def describe(opened: Opened, stream: Stream | SampleStream, row: Row, *, with_text: bool
             ) -> list[dict[str, Any]]:
    """Where each placement of a row comes from. `start` and `stop` count the document's tokens, BOS being token 0; a
    continuation has a BOS of its own in front, which is in `tokens` but not in that range. Of Megatron's order: as
    `SampleStream.describe` says."""
    if isinstance(row, SampleRow) and isinstance(stream, SampleStream):
        places = stream.describe(row)
        ids = row.tokens.tolist()
        return [{**place, "text": opened.tokenizer.decode(ids[place["at"]:place["at"] + place["tokens"]])} if with_text
                else place for place in places]
    source, tokenizer, at, found = opened.sources[row.bucket], opened.tokenizer, 0, []
    for (epoch, group, number), start, length, off in row.placed:
        name, local = source.locate(group)
        inserted = int(start > 0 and opened.config.layout == "bestfit")
        found.append({
            "at": at, "tokens": length, "off": off, "file": name, "group": local,
            "document": int(source.groups[group - local:group].sum()) + number, "document_in_group": number,
            "epoch": epoch, "start": start, "stop": start + length - inserted})
        if with_text:
            found[-1]["text"] = tokenizer.decode(row.tokens[at:at + length].tolist())
        at += length
    return found


def show_rows(opened: Opened, args: argparse.Namespace) -> int:
    """The documents in each row of a step."""
    num_rows = opened.rows_per_step(args.step)
    if args.row is not None and args.row >= num_rows:
        raise ValueError(f"--row {args.row}: step {args.step} has rows 0 to {num_rows - 1}")
    lines: list[dict[str, Any]] = []
    with closing(opened.stream(opened.cursors_at(args.step), args.step)) as stream:
        for _ in range(opened.history.skips.get(args.step, 0)):
            stream.next_rows(num_rows // opened.config.V)
        for number, row in enumerate(stream.next_rows(num_rows // opened.config.V)):
            if args.row in (None, number):
                head = {"step": args.step, "row": number, "lane": row.lane, "lane_row": row.index, "bucket": row.bucket}
                found = describe(opened, stream, row, with_text=args.text)
                if args.json:
                    print(json.dumps({**head, "documents": found}, ensure_ascii=False))
                lines += [head | place for place in found]
    texts = [line.pop("text", "") for line in lines]
    if not args.json:
        heading, *body = table([[*lines[0]], *([*line.values()] for line in lines)])
        print(heading)
        for line, text in zip(body, texts):
            print(line, *text.splitlines(), sep="\n    | ")
    return 0


def table(cells: list[list[Any]]) -> list[str]:
    """Aligned lines: numbers to the right, text to the left."""
    right = [not isinstance(cell, str) for cell in cells[-1]]
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*texts)]
    return ["  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)).rstrip() for row in texts]


def show_ledger(opened: Opened, args: argparse.Namespace) -> int:
    """The accounts after some steps; exit code 1 where they do not balance, which would be a bug."""
    if args.step is None and not opened.kept:
        raise ValueError("--step: needed, there are no kept cursors to take the accounts from")
    step = max(opened.kept) if args.step is None else args.step
    accounts = ledger(opened.cursors_at(step), opened.config.T)
    cells: list[list[Any]] = [["bucket", "read", "+ bos", "+ repeated", "= emitted", "+ cropped", "+ pending",
                               *LEDGER[6:], "balance", "cropped %"]]
    for bucket, a in accounts.items():
        a["balance"] = a["read"] + a["bos"] + a["repeated"] - a["emitted"] - a["cropped"] - a["pending"]
        cells.append([bucket, *a.values(), f"{100 * a['cropped'] / max(1, a['emitted'] + a['cropped']):.2f}"])
    print(f"tokens after {step:,} steps; the balance must be 0", *table(cells), sep="\n")
    return EXIT_FAILED if any(a["balance"] for a in accounts.values()) else 0


def integer(text: str) -> int:
    """argparse type: an integer from 0."""
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer, 0 or more")


def span(text: str) -> range:
    """argparse type: A:B with 0 <= A < B."""
    first, _, stop = text.partition(":")
    if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected A:B with 0 <= A < B, such as 0:10")
    return range(int(first), int(stop))


def stream_flags() -> Parser:
    """The parent parser: which stream."""
    parent = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    parent.add_argument("--run", default=None, metavar="DIR_OR_TAG", help="a run directory or its tag; or, without it:")
    flags = parent.add_argument_group("a stream from flags, as base_train would make it")
    default = {flag: getattr(StreamConfig, field, None) for flag, field in CONFIG_FLAGS.items()} | DEFAULTS
    for names, kind, text in (
            (["--data-path"], Path, "folder of parquet or jsonl files (default: the downloaded data)"),
            (["--val-path"], Path, "validation data (default: the last file, which is left out)"),
            (["--tokenizer", "--tokenizer-dir"], Path, "its folder (default: the one that tok_train wrote)"),
            (["-T", "--max-seq-len"], int, "tokens of a row (default: {max_seq_len})"),
            (["--total-batch-size"], int, "tokens of a step (default: {total_batch_size})"),
            (["--rows-per-step"], int, "the same in rows (goes before --total-batch-size)"),
            (["--lanes"], int, "default: -1, the largest divisor of the rows that is at most 64"),
            (["--seed"], int, "default: {seed}"),
            (["--data-format"], str, f"{' or '.join(FORMATS)} (default: text)"),
            (["--curriculum"], Path, "YAML file: which buckets are mixed when"),
            (["--packing"], str, "bestfit, concat or binned (default: {packing})"),
            (["--long-docs"], str, "crop or split (default: {long_docs})"),
            (["--overlap"], int, "tokens of context of a continuation (default: {overlap})"),
            (["--buffer-size"], int, "documents that wait in a lane (default: {buffer_size})")):
        flags.add_argument(*names, type=kind, metavar=kind.__name__.upper(), help=text.format(**default))
    flags.add_argument("--order", choices=ORDERS, help="default: lanes; with megatron also:")
    flags.add_argument("--num-samples", type=int, metavar="N", help="of the whole run, which decides their order")
    flags.add_argument("--split", metavar="A,B,C", help="as of base_train")
    flags.add_argument("--blend-weights", metavar="A,B", help="as of base_train")
    flags.add_argument("--eod-mask-loss", action="store_true", help="as of base_train")
    flags.add_argument("--no-pack", dest="pack", action="store_false", help="with --packing binned: one entry a row")
    return parent


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="digest|rows|ledger")
    parent = stream_flags()
    digest = commands.add_parser("digest", parents=[parent], help="one JSON line a step: its batch digest")
    digest.add_argument("--steps", type=span, required=True, metavar="A:B", help="steps A to B - 1, from 0")
    digest.add_argument("--world-size", type=integer, metavar="W", help="add up W ranks' parts, and list them")
    digest.add_argument("--device-batch-size", type=int, default=16, metavar="B", help="rows of a micro-batch")
    rows = commands.add_parser("rows", parents=[parent], help="which documents are in each row of a step")
    rows.add_argument("--step", type=integer, required=True, help="from 0")
    rows.add_argument("--row", type=integer, help="only this row of the step, from 0")
    rows.add_argument("--text", action="store_true", help="decode them")
    rows.add_argument("--json", action="store_true", help="one JSON line a row instead of a table")
    accounts = commands.add_parser("ledger", parents=[parent], help="tokens read, emitted, cropped, pending")
    accounts.add_argument("--step", type=integer, help="when so many are done (default: a run's newest kept cursors)")
    for command, show in ((digest, show_digests), (rows, show_rows), (accounts, show_ledger)):
        command.set_defaults(show=show)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Look and print; 1 where a digest differs or accounts do not balance. ValueError, OSError for bad input."""
    args = parse_args(argv)
    setup_logging()
    return args.show(open_stream(args), args)


if __name__ == "__main__":
    run_main(main)
