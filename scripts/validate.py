"""
Check a run before it starts: takes the flags of scripts.base_train, and starts nothing.

    python -m scripts.validate --config=runs/laptop.yaml --data-path=mytext --num-iterations=100

Checks configuration, files, tokenizer, an existing run of the same name, and disk space. Then it
prints the plan: how much each phase takes from each bucket, how much the bucket has, how much of
that is usable before the first lane runs dry; the number of passes; the cropped, repeated and
padded tokens; and the exact step at which a bucket runs dry. The plan is exact for token files,
and for text of up to about 32 MB; for more it is an estimate from a sample, with which training
starts even if it shows a halt.

With --decontaminate, it also searches the run's files for the items of a benchmark, and lists the
training documents that share n-grams of words with some, for --without-documents.

Exit code: 1 if a check fails or the plan shows that the run does not reach its last step, else 0.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nanochat import seen
from nanochat.any_step import check_step, unsaved_step
from nanochat.checkpoint import list_checkpoints
from nanochat.cli import EXIT_FAILED, Parser, run_main, setup_logging, whole
from nanochat.common import as_path, begin_launch, counted, local_copy, open_door, table
from nanochat.config import Settings, add_flags, from_flags
from nanochat.dist import autodetect_device_type
from nanochat.plan import Plan, make_run_plan
from nanochat.plan_report import notes_of, plan_lines, problem, readings_text, refusal
from nanochat.run_dir import find_run_at, is_run_dir, run_path
from nanochat.run_guard import MIRROR
from nanochat.run_order import order_of
from nanochat.run_owner import check_free
from nanochat.run_settings import build_model, describe_memory, device_memory, estimate_memory
from nanochat.run_stop import deadline
from nanochat.run_summary import disk_room, print_split, settings_notes
from nanochat.start_run import Run, Start, complete_settings, find_data, inspect_run
from nanochat.text import TEXT_FIELD

LEGEND = """\
trained: tokens in rows, with the repeated ones; usable: until the first lane runs dry, "-" if that is not in sight (a
larger --num-iterations may show it)
repeated %: overlap of split documents, which has no loss; "-": the run takes no row of the bucket
figures: "about" if they are estimated from a sample: of much text, or of the rows of a bucket that cannot run dry"""


def parser() -> Parser:
    """base_train's flags and two more."""
    p = add_flags(
        Parser(prog="python -m scripts.validate", usage="%(prog)s [flags]", description=__doc__)
    )
    g = p.add_argument_group("validate")
    g.add_argument(
        "--world-size",
        type=whole(1),
        default=int(os.environ.get("WORLD_SIZE", 1)),
        help="number of processes of the run",
    )
    g.add_argument(
        "--plot", type=Path, metavar="PNG", help="plot shares, phases and passes (needs matplotlib)"
    )
    g.add_argument(
        "--decontaminate",
        metavar="FILE[:FIELD]",
        help="find the training documents that share n-grams of words with the items of a benchmark: a "
        f"jsonl or parquet file (default FIELD: {TEXT_FIELD}), or a folder of CORE's tasks",
    )
    g.add_argument(
        "--ngram",
        type=whole(1),
        default=seen.NGRAM,
        metavar="N",
        help="with --decontaminate: words of an n-gram",
    )
    g.add_argument(
        "--list",
        type=Path,
        default=Path("without.txt"),
        metavar="FILE",
        help="with --decontaminate: where to list these documents, for --without-documents",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Check the run and print the results. ValueError or OSError for a problem that prevents a
    start."""
    args = parser().parse_args(argv)
    setup_logging()
    default = "" if args.model_tag else " (the default name)"
    if args.fork_from is not None and not args.model_tag:
        args.model_tag = f"fork-{os.getpid()}"  # nothing starts, so any free name will do
        default = " (to train it, name it with --model-tag)"
    settings = from_flags(args)
    check_flags(args, settings)
    check_launch(settings)
    ok("flags")
    device = torch.device(settings.device_type or autodetect_device_type())
    settings, tokenizer = complete_settings(settings, args.world_size, device.type)
    ok(f"tokenizer {tokenizer.fingerprint}, {tokenizer.get_vocab_size():,} tokens")
    start, refused = inspect(settings, device, args.named)
    report_configuration(start, args, device)
    if not refused:
        ok(f"run directory {start.run_dir}{default}: {beginning(start)}")
    if start.seal.get("status") == "halted" and (over := start.over()) is not None:
        print(f"note: {over.sentence}")
    has_room = check_disk(start)
    run = find_data(start, tokenizer)
    ok("files")
    print_split(run)
    if args.decontaminate:
        decontaminate(run, args.decontaminate, args.ngram, args.list)
    is_good = True
    order = order_of(run.settings)
    if not order.has_plan:
        readings = order.reads(run.settings, run.data.train, run.cursors, run.steps_to_read)
        ok(readings_text(readings))
    elif run.settings.plan == "off":
        ok("no plan (--plan=off)")
    else:
        plan = make_run_plan(run, run.data)
        if args.plot:
            draw(plan, args.plot)
            ok(f"plot {args.plot}")
        is_good = report_plan(plan, run)
    if is_good and not refused:
        if has_room:
            ok("training can start")
        else:
            print("warning: training can start, but the disk will be full before it ends")
    return 0 if is_good and not refused else EXIT_FAILED


def check_flags(args: argparse.Namespace, settings: Settings) -> None:
    """ValueError for a step that was not saved, or a flag without effect."""
    unsaved = unsaved_step(args.fork_from)
    if unsaved is not None:
        check_step(find_run_at(args.fork_from)[0], unsaved)
        raise ValueError(
            f"--fork-from={args.fork_from}: this step was not saved, so where its data stands is not known; "
            f"make its checkpoint with python -m scripts.replay {args.fork_from}, or name a saved step"
        )
    idle = [name for name in ("ngram", "list") if name in args.named]
    if idle and not args.decontaminate:
        raise ValueError(
            f"--{idle[0]}: has no effect without --decontaminate; name a benchmark there"
        )
    has_plan = order_of(settings).has_plan and settings.plan != "off"
    if args.plot and not has_plan:
        why = "--plan=off" if settings.plan == "off" else f"--order={settings.order}"
        raise ValueError(f"--plot: there is no plan with {why}; leave it out")


def check_launch(settings: Settings) -> None:
    """Check what a launch needs besides its run: time, and the place of its mirror. ValueError or
    OSError if it would be refused."""
    reserve_s = settings.walltime_reserve_seconds
    deadline(settings.max_runtime_seconds, {}, time.monotonic(), reserve_s=reserve_s)
    if settings.mirror_to is not None:
        print(f"note: {open_door(MIRROR).preview(settings, run_path(settings.tag))}")


def report_configuration(start: Start, args: argparse.Namespace, device: torch.device) -> None:
    """Print the size of the run and of its model, notes about its settings, and on a GPU the memory
    that it needs."""
    settings = start.settings
    num_steps = counted(start.horizon.own_steps, "step")
    parameters = sum(p.numel() for p in build_model(settings).parameters())
    ok(
        f"configuration: {num_steps} of {settings.total_batch_size:,} tokens, {parameters:,} parameters, "
        f"{counted(args.world_size, 'process')}"
    )
    for note in settings_notes(start, args.named):
        print(f"note: {note}")
    if device.type == "cuda":
        parts = estimate_memory(settings, device_memory(device, args.world_size))
        ok(f"{describe_memory(parts)}, with --device-batch-size={settings.device_batch_size}")


def inspect(settings: Settings, device: torch.device, named: Sequence[str]) -> tuple[Start, bool]:
    """(how the run starts, whether it is refused). A run that another launch owns is shown as it
    would resume now; if its settings are refused, the start of a new run with them is shown.
    `named`: the settings that the command names."""
    is_free = True
    try:
        check_free(run_path(settings.tag))
    except ValueError as e:
        print(f"error: {e}")
        is_free = False
    try:
        start = inspect_run(settings, device, named)
    except ValueError as e:
        other = replace(settings, model_tag=f"{settings.tag}-{os.getpid()}", resume="auto")
        if settings.fork_from is None:
            begin_launch(settings.data_cache)  # a new run reads what the run has not pinned
        start = inspect_run(other, device)
        print(f"error: {e}\na new run with these settings:")
        return start, True
    if not is_free:
        print(f"without that launch: {beginning(start)}, with this plan:")
    return start, not is_free


def beginning(start: Start) -> str:
    """Where a run begins, in words."""
    if start.parent:
        return f"a new fork, from {start.parent.checkpoint.path}"
    if start.checkpoint:
        return f"resumes from {start.checkpoint.path}"
    return "restarts from step 0" if is_run_dir(start.run_dir) else "a new run"


def report_plan(plan: Plan, run: Run) -> bool:
    """Print a plan, its warnings, and why the run should not start. Returns whether it should."""
    print(*plan_lines(plan), LEGEND, sep="\n")
    for line in notes_of(plan, run, run.data):
        print(f"warning: {line}")
    why = refusal(plan, run, run.data)
    if not why and plan.halt:
        why = f"training can start, but {problem(plan)}"
    if why:
        print(f"error: {why}")
    return not why


def ok(text: str) -> None:
    """Report a check that passed."""
    print(f"ok: {text}")


def check_disk(start: Start) -> bool:
    """Print, and return, whether the run's checkpoints fit on the disk. ValueError if not even the
    first few do."""
    # with --resume=scratch, an older run is renamed and keeps its room
    scratch = start.settings.resume == "scratch"
    room = disk_room(start, [] if scratch else list_checkpoints(start.run_dir))
    if not room.begins:
        raise ValueError(
            f"disk: {room.needs}; free some space, or set NANOCHAT_BASE_DIR to another disk"
        )
    print(f"{'ok' if room.lasts else 'warning'}: disk: {room.needs}")
    return room.lasts


def decontaminate(run: Run, named: str, n: int, list_path: Path) -> None:
    """Print how many items of a benchmark are in the data, and list the training documents that
    share n-grams with them. ValueError or FileNotFoundError for a benchmark that cannot be read."""
    benchmark = seen.Benchmark(seen.read_tasks(named), n=n)
    data = {seen.TRAIN: run.data.train, "validation": run.data.val}
    hits = list(seen.search(data, benchmark.index))
    results = benchmark.results(hits, {}, 0, [])
    rows = [seen.count(label, result, 0).cells[:5] for label, result in results.items()]
    print(*table(seen.HEADER[:5], rows), sep="\n")
    own_list = run.settings.without_documents
    others = "" if own_list is None else local_copy(as_path(own_list)).read_text()
    number = seen.write_list(list_path, hits, run.data.manifests["train"], others)
    listed = f"decontaminate: {counted(number, 'training document')} listed in {list_path}"
    if number:
        listed += (
            f"; pass --without-documents={list_path}, so that the model does not learn from them"
        )
    ok(listed)


def draw(plan: Plan, path: Path) -> None:
    """Plot the plan as PNG: each bucket's share in each phase, and the passes over it, against
    tokens."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: matplotlib is not installed; pip install -e '.[plot]'") from None
    figure = Figure(figsize=(9, 6), layout="constrained")
    shares, passes = figure.subplots(2, 1, sharex=True)
    step = plan.rows_per_step * plan.T
    edges, ran = np.cumsum([0, *(phase["tokens"] for phase in plan.phases)]), plan.steps * step
    below = np.zeros(len(plan.phases))
    for i, (name, bucket) in enumerate(plan.buckets.items()):
        taken, color = np.array([phase["asked"][name] for phase in plan.phases], float), f"C{i}"
        share = taken / np.maximum(np.diff(edges), 1)
        shares.stairs(below + share, edges, baseline=below, fill=True, color=color, label=name)
        below += share
        total, x = np.cumsum([0, *taken]), np.append(edges[edges < ran], ran)
        y = np.interp(x, edges, total) / max(1, np.interp(ran, edges, total)) * bucket.passes
        passes.plot(x, y, color=color, label=name)
        if bucket.dry_step is not None:
            passes.axvline(bucket.dry_step * step, color=color, linestyle=":")
    shares.set_ylabel("share of rows")
    shares.set_ylim(0, 1)
    passes.set_ylabel("passes over the bucket")
    passes.set_xlabel("tokens trained on (dotted: a bucket runs dry)")
    for axes in (shares, passes):
        for edge in edges[1:-1]:
            axes.axvline(edge, color="black", linewidth=0.8)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
        axes.margins(x=0)
    if plan.estimate:
        figure.suptitle("estimate")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)


if __name__ == "__main__":
    run_main(main)
