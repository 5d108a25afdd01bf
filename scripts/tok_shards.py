"""
Tokenize text once, into token shards that training reads.

    python -m scripts.tok_shards --input-dir=mytext --output-dir=shards

Every text file below the input folder RAW (all kinds that docs/data.md lists) becomes a pair: a file
of ids and its index, below the output folder OUT. RAW/BUCKET/... becomes OUT/train/BUCKET/NAME.bin
and .idx, and each bucket's last file becomes OUT/val/BUCKET/...; RAW/train/... and RAW/val/... keep
their split. Each folder of pairs gets a manifest.json. The tokenizer is the one that runs on RAW
use: --tokenizer, else RAW/tokenizer, else <base dir>/tokenizer. OUT/tokenizer is a copy of it.
--format=megatron writes Megatron's pairs: each whole document as a single sequence, followed by the
end-of-document id.

The same command resumes after a crash, Ctrl-C or a failure, and converts changed files again. On
several machines, run it with --task-index i --num-tasks n on each one, then once with --finish
(dev/slurm has templates). Exit code: 0; 1 if an input failed or is missing; 130 after Ctrl-C or
SIGTERM.

Data on the Hub is read at one commit, which the manifests name. If the branch has moved on, the
same command is refused: name the commit, or another folder.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from nanochat.cli import Parser, run_main, sigterm_interrupts, whole
from nanochat.common import AnyPath, as_local_path, as_path
from nanochat.files import DataPath, data_at, no_such_data
from nanochat.pretokenize import TOKENIZER, Input, Pretokenizer, Windows, describe_tokenizer
from nanochat.splits import find_splits, split_train_val, take_last_files
from nanochat.text import SUFFIXES, Selection, add_text_flags, text_suffix
from nanochat.text_kinds import describe_skipped, read_documents
from nanochat.tokenizer import (
    add_tokenizer_flags,
    default_tokenizer,
    get_tokenizer,
    read_description,
)

OUTPUTS = {"gpts": "shards", "megatron": "megatron"}  # --format: the --data-format that reads it
TRIED = 3  # number of inputs of which one must be readable before any is converted
SHOWN = 10  # maximum number of missing inputs listed


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--input-dir",
        type=Path,
        required=True,
        metavar="RAW",
        help=f"folder of {', '.join(SUFFIXES)} files, local, in object storage (s3://BUCKET/KEY) or on the Hub "
        "(hf://datasets/OWNER/NAME)",
    )
    add_text_flags(parser, "text_field", "min_chars", "val_fraction", "strict")
    parser.add_argument(
        "--output-dir", type=Path, required=True, metavar="OUT", help="local folder for the shards"
    )
    add_tokenizer_flags(parser)
    parser.add_argument(
        "--format",
        default="gpts",
        choices=list(OUTPUTS),
        help="format of the pairs: gpts | megatron, which holds whole documents only",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=Windows.max_length,
        help="cut longer documents into windows of at most this many ids, not counting the end-of-document id "
        "(for --packing binned); 0 keeps documents whole",
    )
    parser.add_argument(
        "--overlap-size",
        type=int,
        default=Windows.overlap_size,
        help="number of ids that a window repeats from the one before it, at most half of --max-length",
    )
    parser.add_argument(
        "--num-workers",
        type=whole(1),
        default=8,
        help="processes to use; does not change the output",
    )
    parser.add_argument(
        "--task-index",
        type=int,
        default=0,
        help="which part of the inputs to convert, counted from 0",
    )
    parser.add_argument(
        "--num-tasks", type=int, default=1, help="number of parts that the inputs are dealt into"
    )
    parser.add_argument(
        "--finish",
        action="store_true",
        help="tokenize nothing: write manifests for the shards of all tasks, and list missing shards",
    )
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> Windows:
    """The windows that the flags describe. ValueError for flags that contradict each other."""
    if not 0 <= args.task_index < args.num_tasks:
        raise ValueError(
            f"--task-index {args.task_index} --num-tasks {args.num_tasks}: expected an index of at "
            f"least 0 and below the number of tasks"
        )
    if (
        as_local_path(args.output_dir, "--output-dir").resolve()
        == as_path(args.input_dir).resolve()
    ):
        raise ValueError(
            f"--output-dir {args.output_dir}: it is also the --input-dir; name another folder"
        )
    if args.format == "megatron" and args.max_length:
        raise ValueError(
            f"--max-length {args.max_length} --format megatron: Megatron needs whole documents, "
            f"because it would train twice on the ids that windows repeat; remove --max-length"
        )
    return Windows(args.max_length, args.overlap_size)


def find_inputs(data: DataPath, *, shared: bool = False) -> list[Input]:
    """All inputs, ordered by split, bucket and name. RAW/train/BUCKET and RAW/val/BUCKET keep their
    splits. Otherwise the last of several files in RAW/BUCKET is for validation, or with `shared`
    (--val-fraction) both splits read every file. FileNotFoundError if there is no input, ValueError
    for ambiguous ones."""
    if not data.files and not data.folder.exists():
        raise no_such_data(data.folder)
    splits: dict[str, dict[str, list[AnyPath]]] = {"train": {}, "val": {}}
    if shared:
        splits = split_train_val(data, by_bucket=True, shared=True)
    else:
        found = find_splits(data, by_bucket=True)
        if found.stray:
            raise ValueError(
                f"--input-dir {data}: {found.stray[0].relative_to(data.folder)} is in neither train/ nor val/; "
                f"move it into one of them"
            )
        splits = {"train": found.train, "val": found.val}
        if not data.has_folder("train"):
            splits = take_last_files(found.train, found.val)
            for bucket in splits["train"]:
                if bucket not in splits["val"]:
                    print(
                        f"{bucket}: it has no file to spare for validation; all of it is used for training"
                    )
    inputs: dict[tuple[str, str, str], Input] = {}
    for split, bucket, files in ((s, b, files) for s in splits for b, files in splits[s].items()):
        for path in files:
            name = path.relative_to(data.folder).as_posix()
            inside = name.removeprefix(f"{split}/").removeprefix(f"{bucket}/")
            stem = inside[: -len(text_suffix(inside))].replace("/", "__")
            new = Input(path, name, split, bucket, stem, path.stat().st_size)
            other = inputs.setdefault((split, bucket, stem), new)
            if other is not new:
                raise ValueError(
                    f"{other.name} and {name} would both become {new.prefix(Path())}.bin; rename one of "
                    f"them"
                )
    return [inputs[key] for key in sorted(inputs)]


def deal(inputs: Sequence[Input], num_tasks: int) -> list[list[Input]]:
    """Deal inputs to tasks: the largest first, each to the task with the fewest bytes so far."""
    tasks: list[list[Input]] = [[] for _ in range(num_tasks)]
    loads = [0] * num_tasks
    for i in sorted(inputs, key=lambda i: (-i.size, i.name)):
        task = loads.index(min(loads))
        tasks[task].append(i)
        loads[task] += i.size
    return tasks


def check_readable(inputs: Sequence[Input], selection: Selection) -> None:
    """The error of the first input if none of the first few can be read: their column of text has
    another name, say. A single bad input fails later, alone."""
    errors: list[Exception] = []
    for i in inputs[:TRIED]:
        try:
            next(read_documents(i.path, selection.for_split(i.split)), None)
            return
        except (OSError, ValueError) as e:
            errors.append(e)
    if errors:
        raise errors[0]


def make_pairs(job: Pretokenizer, mine: Sequence[Input], num_workers: int) -> bool:
    """Make the unfinished pairs of a task, under a progress bar, and print totals, skipped lines
    and failures. Returns whether no input failed."""
    finished = {i: job.finished(i) for i in mine}
    shards = [record["shard"] for record in finished.values() if record]
    todo = [i for i, record in finished.items() if record is None]
    failed: list[str] = []
    began, new_tokens = time.monotonic(), 0
    with (
        contextlib.closing(job.make_all(todo, num_workers=num_workers)) as results,
        tqdm(total=sum(i.size for i in todo), unit="B", unit_scale=True, disable=None) as bar,
    ):
        for i, result in results:
            if isinstance(result, str):
                failed.append(f"failed: {i.name}: {result}")
            else:
                shards.append(result["shard"])
                new_tokens += result["shard"]["tokens"]
            bar.update(i.size)
    shards.sort(key=lambda shard: shard["input"]["name"])
    totals = {
        key: sum(shard[key] for shard in shards) for key in ("documents", "entries", "tokens")
    }
    counts = ", ".join(f"{total:,} {key}" for key, total in totals.items())
    new = "" if new_tokens == totals["tokens"] else f"{new_tokens:,} tokens "
    rate = f"; {new}made in {time.monotonic() - began:.1f} s" if new_tokens else ""
    print(f"{len(shards):,} of {len(mine):,} shards finished: {counts}{rate}")
    for shard in shards:
        name = shard["input"]["name"]
        for line in describe_skipped(Path(name), job.selection, {"short": 0, **shard["skipped"]}):
            print(line)
        if not shard["entries"]:
            print(f"{name}: no document for one of the parts of --val-fraction")
    if shards and totals["tokens"] == totals["documents"]:  # every token is an end-of-document id
        failed.append(
            f"failed: all {totals['documents']:,} documents are empty; check --text-field"
        )
    for line in sorted(failed):
        print(line, file=sys.stderr)
    return not failed


def finish(job: Pretokenizer) -> bool:
    """Write manifests and list missing shards. Returns whether no shard is missing."""
    missing = job.finish()
    for i in missing[:SHOWN]:
        print(f"missing: {i.prefix(Path())}.bin, made from {i.name}", file=sys.stderr)
    if missing:
        buckets = sorted({f"{i.split}/{i.bucket}" for i in missing})
        print(
            f"{len(missing):,} of {len(job.inputs):,} shards missing, so no manifest in {', '.join(buckets)}; run "
            f"the same command again (for each task, if there are several)",
            file=sys.stderr,
        )
    else:
        print(f"{job.output}: complete, {len(job.inputs):,} shards")
    return not missing


def main(argv: Sequence[str] | None = None) -> int:
    """Make the pairs of a task, and return the exit code."""
    args = parse_args(argv)
    windows = check_args(args)
    selection = Selection.of(vars(args))
    data = data_at(args.input_dir).at_commit()
    inputs = find_inputs(data, shared=selection.val_fraction > 0)
    if data.on_hub:
        print(f"data: {data.on_hub}")
    tokenizer = get_tokenizer(args.tokenizer, eod_token=args.eod_token, data_path=args.input_dir)
    tokenizer.encode("")  # raises if the tokenizer has only ids and no text
    place = args.tokenizer or default_tokenizer(args.input_dir)
    print(
        f"tokenizer: {place}, {tokenizer.get_vocab_size():,} tokens, fingerprint {tokenizer.fingerprint}"
    )
    job = Pretokenizer(
        args.output_dir,
        inputs,
        windows,
        describe_tokenizer(tokenizer),
        OUTPUTS[args.format],
        selection,
        data.on_hub,
    )
    job.refuse_others()
    if args.finish:
        return 0 if finish(job) else 1
    mine = deal(inputs, args.num_tasks)[args.task_index]
    check_readable(mine, selection)
    with sigterm_interrupts():
        try:
            job.prepare()
            folder = args.output_dir / TOKENIZER  # training finds it beside the pairs
            if (read_description(folder) or {}).get("fingerprint") != tokenizer.fingerprint:
                # refuse_others has refused any other tokenizer's pairs
                tokenizer.save(folder, force=True)
            good = make_pairs(job, mine, args.num_workers)
            if args.num_tasks == 1:
                good = finish(job) and good
            return 0 if good else 1
        except KeyboardInterrupt:
            job.clean_up(fresh_s=0)  # leftovers of the workers, which have exited
            raise KeyboardInterrupt(
                f"{args.output_dir} is not finished; the same command resumes"
            ) from None


if __name__ == "__main__":
    run_main(main)
