"""
Check a run before it starts: with the flags of scripts.base_train, and nothing is written.

    python -m scripts.validate --data-format shards --data-path OUT --curriculum mix.yaml --depth 12 ...

Configuration, files, tokenizer, the run that is there already, disk space; then the plan: what
each phase asks of each bucket, what is there, what can be used before the first lane is dry,
passes, what is cropped, repeated and padded, and the exact step at which a bucket runs dry. Shards
know their lengths, so this is what will happen; for text it is an estimate from a sample, and
never an error.

The exit code is 0 where the run can reach its last step, 1 where it cannot.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nanochat.checkpoint import TIMED_KEPT
from nanochat.cli import EXIT_FAILED, Parser, run_main, setup_logging, whole
from nanochat.config import add_flags, from_flags
from nanochat.dist import autodetect_device_type
from nanochat.plan import Plan, describe, make_run_plan, problem, warnings
from nanochat.run_dir import is_run_dir
from nanochat.start_run import (
    Start,
    build_model,
    command,
    describe_memory,
    estimate_memory,
    find_data,
    inspect_run,
    print_split,
)

COPIES = 2  # of the newest checkpoint: the old one goes when the new one is whole
BY_TIME = TIMED_KEPT + 1  # checkpoints on disk at once with saves by time; then `final` takes the place of one


def parser() -> Parser:
    """base_train's flags and a few more."""
    p = add_flags(Parser(prog="python -m scripts.validate", epilog=__doc__,
                         description="Check a run before it starts."))
    g = p.add_argument_group("validate")
    g.add_argument("--world-size", type=whole(1), default=int(os.environ.get("WORLD_SIZE", 1)),
                   help="processes of the run")
    g.add_argument("--plot", type=Path, metavar="PNG",
                   help="draw shares, phases and passes (needs matplotlib)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Check and tell. Raises ValueError and OSError for what keeps the run from starting."""
    args = parser().parse_args(argv)
    setup_logging()
    settings = from_flags(args)
    ok("flags")
    device = torch.device(settings.device_type or autodetect_device_type())
    settings, tokenizer = command(settings, args.world_size, device.type)
    ok(f"tokenizer {tokenizer.fingerprint}, {tokenizer.get_vocab_size():,} tokens")
    refused = False
    try:
        start = inspect_run(settings, device)
    except ValueError as e:
        start = inspect_run(replace(settings, model_tag=f"{settings.model_tag}-{os.getpid()}", resume="auto"), device)
        refused = True
        print(f"error: {e}\na new run of these settings:")
    model, num_steps = build_model(start.settings), start.horizon.num_iterations
    ok(f"configuration: {num_steps:,} steps of {start.settings.total_batch_size:,} tokens, "
       f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.world_size} process(es)")
    if device.type == "cuda":
        ok(f"{describe_memory(estimate_memory(start.settings))}, with --device-batch-size="
           f"{start.settings.device_batch_size}")
    if not refused:
        beginning = "starts again from step 0" if is_run_dir(start.run_dir) else "a new run"
        ok(f"run directory {start.run_dir}: "
           + (f"goes on from {start.checkpoint.path}" if start.checkpoint else beginning))
    if start.state.get("status") == "halted" and (over := start.over()) is not None:
        print(f"note: {over[1]}")
    # weights, and two float32 of the optimizer
    check_disk(start, 3 * sum(4 * p.numel() for p in model.parameters()))
    start, data = find_data(start, tokenizer)
    ok("files")
    print_split(start, data)
    if start.settings.order == "megatron":
        from nanochat.integrations.megatron_order import samples_needed

        ok(f"Megatron's order: {samples_needed(start):,} of {start.settings.num_samples:,} samples")
        return EXIT_FAILED if refused else 0
    plan = make_run_plan(start, data)
    print("\n".join(describe(plan)))
    if args.plot:
        draw(plan, args.plot)
        ok(f"plot {args.plot}")
    for line in warnings(plan):
        print(f"warning: {line}")
    if why := problem(plan):
        print(f"error: {why}")
    return EXIT_FAILED if refused or why else 0


def ok(what: str) -> None:
    """A check that passed."""
    print(f"ok: {what}")


def check_disk(start: Start, one: int) -> None:
    """Whether checkpoints of `one` byte each fit. ValueError if not even the first few do;
    otherwise tells."""
    every, num_steps = start.settings.save_every, start.horizon.num_iterations
    folder = next(p for p in (start.run_dir, *start.run_dir.parents) if p.exists())
    free = shutil.disk_usage(folder).free
    number = 1 + (num_steps - 1) // every if every > 0 else BY_TIME if every < 0 else 1
    about = (f"{free / 1e9:,.1f} GB free in {folder}, a checkpoint takes about {one / 1e9:,.2f} "
             f"GB, the run keeps {number:,}")
    if free < COPIES * one:
        raise ValueError(f"disk: {about}; free some, or move the runs with NANOCHAT_BASE_DIR")
    print(f"{'ok' if free > (number + 1) * one else 'warning'}: disk: {about}")


def draw(plan: Plan, path: Path) -> None:
    """Draw the plan as PNG: shares of the buckets over tokens with the edges of phases, and passes
    over each bucket."""
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
        asked, color = np.array([phase["asked"][name] for phase in plan.phases], float), f"C{i}"
        share = asked / np.maximum(np.diff(edges), 1)
        shares.stairs(below + share, edges, baseline=below, fill=True, color=color, label=name)
        below += share
        taken, x = np.cumsum([0, *asked]), np.append(edges[edges < ran], ran)
        y = np.interp(x, edges, taken) / max(1, np.interp(ran, edges, taken)) * bucket.passes
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
