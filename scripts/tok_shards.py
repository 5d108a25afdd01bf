"""
Tokenize text once: every .jsonl, .jsonl.gz and .parquet file below a folder becomes a shard.

    python -m scripts.tok_shards --input-dir RAW --output-dir OUT [--tokenizer DIR_OR_NAME] [--num-workers 8]

RAW/BUCKET/... becomes OUT/train/BUCKET/NAME.bin and .idx, each bucket's last file OUT/val/BUCKET/...; RAW/train/BUCKET
and RAW/val/BUCKET are kept as they are. Beside the shards: manifest.json, and OUT/tokenizer. With --format megatron
the pairs are Megatron's: whole documents of one sequence, each with the end-of-document id behind it.

The same command goes on after a crash, Ctrl-C or a failure, and makes again what changed. Over several machines: give
each --task-index i --num-tasks n, and at the end run once with --finish (dev/slurm has templates). Exit code: 0, 1
where an input failed or is missing, 130 after Ctrl-C, 143 after SIGTERM.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from nanochat.common import Parser, get_base_dir, run_main
from nanochat.places import etag_of, here, place
from nanochat.pretokenize import Windows, pretokenize
from nanochat.shard_set import TOKENIZER, Input, Record, ShardSet, deal, describe_tokenizer, find_inputs
from nanochat.tokenizer import RustBPETokenizer, read_description
from nanochat.workers import Terminated, Work, run_tasks, sigterm_raises

OUTPUTS = {"gpts": "shards", "megatron": "megatron"}  # --format: the --data-format that reads it
SHOWN = 10  # broken lines of an input that the summary shows


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Tokenize text files into shards.")
    parser.add_argument("--input-dir", type=Path, required=True, help="folder of .jsonl, .jsonl.gz, .parquet files, "
                                                                        "here or in a store (s3://BUCKET/KEY)")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--tokenizer", default=None, help="folder of a saved tokenizer, or one of tiktoken's names "
                                                          "(gpt2, ...); default: the one scripts.tok_train made")
    parser.add_argument("--format", default="gpts", choices=list(OUTPUTS), help="of the pairs: gpts | megatron, which "
                                                                               "holds whole documents only")
    parser.add_argument("--max-length", type=int, default=None,
                        help=f"ids in a window of a long document, without its end mark; 0 keeps documents whole "
                             f"(default: {Windows.max_length}; 0 with --format megatron)")
    parser.add_argument("--overlap-size", type=int, default=Windows.overlap_size,
                        help="ids that a window repeats of the one before; at most half of --max-length")
    parser.add_argument("--val-files", type=int, default=1, help="last files of each bucket that are for validation; "
                                                                 "not used where RAW has train/ and val/")
    parser.add_argument("--num-workers", type=int, default=8, help="processes; changes no output")
    parser.add_argument("--strict", action="store_true", help="a broken jsonl line is fatal for its input")
    parser.add_argument("--force", action="store_true", help="make shards again that other arguments or another "
                                                             "tokenizer made, remove those whose input is gone")
    parser.add_argument("--task-index", type=int, default=0, help="which part of the inputs to do, from 0")
    parser.add_argument("--num-tasks", type=int, default=1, help="parts the inputs are dealt into")
    parser.add_argument("--finish", action="store_true", help="tokenize nothing: write the manifests of what all tasks "
                                                              "made, and tell what is missing")
    return parser.parse_args(argv)


def load_tokenizer(name: str) -> RustBPETokenizer:
    """A saved tokenizer if `name` is a folder, else one of tiktoken's."""
    if place(name).is_dir():
        return RustBPETokenizer.from_directory(name)
    try:
        return RustBPETokenizer.from_pretrained(name)
    except ValueError as e:
        raise ValueError(f"--tokenizer {name}: no such folder, and no name of tiktoken's ({e})") from e


def save_tokenizer(tokenizer: RustBPETokenizer, folder: Path) -> None:
    """Put the tokenizer beside its shards, so that whoever trains on them finds it. Other tasks may do the same."""
    if (read_description(folder) or {}).get("fingerprint") != tokenizer.fingerprint:
        tokenizer.save(folder, force=True)  # other shards than its own were refused, or --force given


def open_work(tokenizer_name: str, shard_set: ShardSet) -> Work:
    """What a worker does with an input: make its pair, then its record."""
    tokenizer = load_tokenizer(tokenizer_name)
    if describe_tokenizer(tokenizer) != shard_set.tokenizer:
        raise ValueError(f"--tokenizer {tokenizer_name}: it changed while shards were made; run the command again")

    def work(i: Input) -> Generator[tuple[int, int], None, Record]:
        if etag_of(i.path).get("etag", "") != i.etag:
            raise ValueError(f"{i.path}: it changed while shards were made; run the command again")
        shard = yield from pretokenize(i.path, i.pair(shard_set.output), tokenizer=tokenizer,
                                       windows=shard_set.windows, strict=shard_set.strict,
                                       data_format=shard_set.data_format)
        return shard_set.note(i, shard)

    return work


@dataclass
class Outcome:
    """What came of the inputs of a task."""

    records: list[Record] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # name of the input: why
    seconds: float = 0.0
    new_tokens: int = 0


def make_shards(shard_set: ShardSet, todo: Sequence[Input], tokenizer_name: str, *, num_workers: int,
                open_work: Callable[..., Work]) -> Outcome:
    """Make the pairs of `todo`, under a progress bar."""
    outcome = Outcome()
    began = time.monotonic()
    tasks = run_tasks(open_work, (tokenizer_name, shard_set), todo, num_workers=num_workers)
    total = sum(i.size for i in todo)
    with contextlib.closing(tasks), tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for event in tasks:
            if event.kind == "progress":
                num_bytes, num_tokens = event.value
                outcome.new_tokens += num_tokens
                outcome.seconds = time.monotonic() - began
                bar.set_postfix_str(f"{outcome.new_tokens / outcome.seconds / 1e6:.2f} M tokens/s", refresh=False)
                bar.update(num_bytes)
            elif event.kind == "done":
                outcome.records.append(event.value)
            else:
                outcome.failed[todo[event.task].name] = event.value
    outcome.seconds = time.monotonic() - began
    return outcome


def print_summary(outcome: Outcome, num_inputs: int) -> None:
    """What there is now, what was skipped, what failed."""
    shards = [record["shard"] for record in outcome.records]
    counts = ", ".join(f"{sum(s[key] for s in shards):,} {key}" for key in ("documents", "entries", "tokens"))
    rate = f"; {outcome.new_tokens:,} tokens made in {outcome.seconds:.1f} s" if outcome.new_tokens else ""
    print(f"{len(shards):,} of {num_inputs:,} shards finished: {counts}{rate}")
    for shard in sorted(shards, key=lambda s: s["input"]["name"]):
        skipped = shard["skipped"]
        if skipped["count"]:
            print(f"{shard['input']['name']}: {skipped['count']:,} broken line(s) skipped")
        for number, why in skipped["lines"][:SHOWN]:
            print(f"  line {number}: {why}")
    for name, why in sorted(outcome.failed.items()):
        print(f"failed: {name}: {why}", file=sys.stderr)


def finish(shard_set: ShardSet) -> int:
    """Write manifests; tell what is missing. Returns the exit code."""
    missing = shard_set.finish()
    buckets = sorted({f"{i.split}/{i.bucket}" for i in missing})
    for i in missing[:SHOWN]:
        print(f"missing: {i.split}/{i.bucket}/{i.stem}.bin, to be made of {i.name}", file=sys.stderr)
    if missing:
        print(f"{len(missing):,} of {len(shard_set.inputs):,} shards missing, so no manifest in {', '.join(buckets)}; "
              f"run the same command again (each task of several)", file=sys.stderr)
    else:
        print(f"{shard_set.output}: complete, {len(shard_set.inputs):,} shards")
    return 1 if missing else 0


def check_args(args: argparse.Namespace) -> Windows:
    if not 0 <= args.task_index < args.num_tasks:
        raise ValueError(f"--task-index {args.task_index} --num-tasks {args.num_tasks}: expected an index from 0 and "
                         f"below the number of tasks")
    if args.num_workers < 1:
        raise ValueError(f"--num-workers {args.num_workers}: expected at least 1")
    if here(args.output_dir, "--output-dir").resolve() == place(args.input_dir).resolve():
        raise ValueError(f"--output-dir {args.output_dir}: is the --input-dir; name another folder")
    if args.format == "megatron":
        if args.max_length:
            raise ValueError(f"--max-length {args.max_length} --format megatron: Megatron's documents are whole, it "
                             f"would train on what windows repeat; leave out --max-length")
        return Windows(0)
    return Windows(Windows.max_length if args.max_length is None else args.max_length, args.overlap_size)


def run(args: argparse.Namespace, open_work: Callable[..., Work]) -> int:
    windows = check_args(args)
    inputs, short = find_inputs(args.input_dir, val_files=args.val_files)
    for bucket in short:
        print(f"{bucket}: too few files to keep {args.val_files} for validation; all of it is for training")
    name = args.tokenizer or str(get_base_dir() / "tokenizer")
    tokenizer = load_tokenizer(name)
    shard_set = ShardSet(args.output_dir, inputs, windows, describe_tokenizer(tokenizer), args.strict,
                         OUTPUTS[args.format])
    shard_set.refuse_others(force=args.force)
    if args.finish:
        return finish(shard_set)
    mine = deal(inputs, args.num_tasks)[args.task_index]
    before = {i: shard_set.finished(i) for i in mine}
    todo = [i for i, record in before.items() if record is None]
    try:
        shard_set.prepare(todo)
        save_tokenizer(tokenizer, args.output_dir / TOKENIZER)
        outcome = make_shards(shard_set, todo, name, num_workers=args.num_workers, open_work=open_work)
    except KeyboardInterrupt as e:
        shard_set.remove_temporary(mine)
        finished = sum(shard_set.finished(i) is not None for i in mine)
        print(f"interrupted: {finished:,} of {len(mine):,} shards are finished and kept; the same command goes on",
              file=sys.stderr)
        return 143 if isinstance(e, Terminated) else 130
    outcome.records += [record for record in before.values() if record]
    print_summary(outcome, len(mine))
    code = finish(shard_set) if args.num_tasks == 1 else 0
    return 1 if outcome.failed else code


def main(argv: Sequence[str] | None = None, *, open_work: Callable[..., Work] = open_work) -> int:
    with sigterm_raises():
        return run(parse_args(argv), open_work)


if __name__ == "__main__":
    run_main(main)
