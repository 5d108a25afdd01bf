"""
Train a model. The same command starts a run and resumes it.

    python -m scripts.base_train --depth=12
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train --depth=24 --run=my-wandb-name

A small run for a laptop or a test:

    python -m scripts.base_train --depth=4 --aspect-ratio=32 --head-dim=32 --max-seq-len=512 \\
        --device-batch-size=4 --total-batch-size=8192 --num-iterations=100 --eval-tokens=65536 \\
        --matrix-lr=0.16 --embedding-lr=2.4 --unembedding-lr=0.064 --data-path=DIR

The default learning rates suit batches of 2^19 tokens and are scaled by sqrt(batch / 2^19 tokens).
Here that is 1/8, too low to learn much in 100 steps, so the example passes eight times the
defaults.

A run writes everything into one folder, <base dir>/runs/<model tag>: configuration, log,
checkpoints, tokenizer and the list of its data files. --model-tag is d<depth> by default.
"""

import argparse
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from nanochat.checkpoint import Saver, list_checkpoints
from nanochat.cli import EXIT_HALTED, Parser, lasting_output, quiet_gc, run_main, setup_logging
from nanochat.common import StopAsked, duration, print0
from nanochat.config import Settings, add_flags, from_flags
from nanochat.dataloader import DataLoader, Dry
from nanochat.dist import (
    RANKS_EVERY,
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    elastic_problem,
    gather_all,
    on_all_ranks,
    peak_memory,
    write_collectives,
)
from nanochat.evaluations import log_core, log_ranks, log_samples, log_validation
from nanochat.reduce import LeafAccumulator
from nanochat.run_dir import run_path
from nanochat.run_journal import Journal, Silence
from nanochat.run_order import stream_config
from nanochat.run_owner import RunState
from nanochat.run_state import identify
from nanochat.run_stop import StopWatch, deadline, join_reasons
from nanochat.schedule import Schedule
from nanochat.sources import RunData
from nanochat.start_run import (
    Start,
    after_halt,
    claim_run,
    command,
    explain_out_of_memory,
    find_data,
    inspect_run,
    is_tight,
    print_split,
    print_summary,
)
from nanochat.steps import StepTotals
from nanochat.trainer import LONG_S, Stop, Trainer, make_model, new_row_table, take_step
from nanochat.watchdog import Watchdog, open_store

log = logging.getLogger(__name__)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse command-line flags, by default those of this process."""
    return add_flags(Parser(description="Pretrain a base model.", epilog=__doc__)).parse_args(argv)


# ---- the loop ------------------------------------------------------------------------------------


def loop(run: Trainer) -> int:
    """Save, evaluate and step until the horizon or a stop. Returns the exit code."""
    p = run.progress
    settings = run.settings
    last = run.schedule.num_iterations
    is_final_saved = False
    try:
        print0("start: packing the first step")
        run.check_next_step()
        if any(reasons := gather_all(run.stop.requested())):  # during the set-up
            raise Stop(join_reasons(reasons))
        while True:
            # save first: an evaluation may fail or be killed
            if p.step >= last:
                run.save("final", "completed", last=True)
                is_final_saved = True
            elif p.step > run.start.step and run.save_is_due():
                run.save(f"checkpoint-{p.step}", "running")
            if run.due(settings.eval_every, "val"):
                run.between_steps("evaluation", log_validation)
            if run.due(settings.core_metric_every, "core") and p.step > 0:
                run.between_steps("CORE", log_core)
            if (
                run.due(settings.sample_every, "samples")
                and p.step > 0
                and run.loader.layout.rank == 0
            ):
                with suppress(StopAsked):  # the next step handles the stop
                    run.between_steps("samples", log_samples)
            if p.step >= last:
                break
            one_step(run)
            if p.step == run.start.step + 1:
                quiet_gc()
    except Stop as e:
        run.journal.ending(e.reason)
        halted, took_steps = e.status == "halted", p.step > run.start.step
        if not is_final_saved and (took_steps or halted):
            run.save(
                f"checkpoint-{p.step}-shutdown",
                e.status,
                last=True,
                **{e.status: e.reason},
                **e.more,
            )
        run.journal.end(e.status, e.reason)
        remedy = (
            after_halt(run.start.run_dir.name, all_dry=e.more["all_dry"])
            if halted
            else f"step {p.step:,} of {last:,} is saved; the same command resumes the run"
            if p.step > 0
            else "no step was taken; the same command starts the run again"
        )
        print0(f"{e.status}: {e.reason}; {remedy}")
        return EXIT_HALTED if halted else 0
    except ArithmeticError as e:
        run.report_save(wait=True)
        run.journal.end("failed", str(e))
        if run.loader.layout.rank != 0:
            raise SystemExit(1) from e  # rank 0 prints the error
        checkpoints = list_checkpoints(run.start.run_dir)
        kept = f"{checkpoints[0]} is kept" if checkpoints else "no checkpoint exists yet"
        raise ValueError(
            f"{e}. The step was not applied, and {kept}. Start a new run with lower learning rates "
            f"(--model-tag NAME), or one that skips this step (--init-from, --skip-steps)"
        ) from e
    run.journal.end("completed")
    peak = peak_memory(run.loader.device)
    memory = "" if peak is None else f"; peak memory {peak / 1e9:,.1f} GB"
    bpb = (
        ""
        if p.val_bpb is None
        else f"; validation bits per byte {p.first_val_bpb:.6f} -> {p.val_bpb:.6f}"
    )
    print0(
        f"completed: {p.tokens:,} tokens in {duration(p.train_time_s)} of steps{bpb}{memory}; {run.start.run_dir}"
    )
    return 0


def forward_backward(run: Trainer) -> tuple[torch.Tensor, bool, tuple[str, bool]]:
    """Run this rank's micro-batches and leave the sum of their gradients in the model.

    Returns (table, complete, dry): the (R, 3) table of the step with this rank's rows filled in,
    whether the rank had all of its rows, and, if its data ran dry, the reason and whether every
    bucket is dry.
    """
    loader, settings = run.loader, run.settings
    per_leaf = loader.layout.micro_batches_per_leaf
    table = new_row_table(loader.layout, loader.device)
    try:
        for i in range(loader.micro_batches_per_step):
            leaf, at = divmod(i, per_leaf)
            batch = next(loader)
            # one forward and backward pass: `backward` adds this micro-batch to .grad, the sum of
            # its leaf
            masks = run.model.masks(batch.doc_ids, batch.num_docs)
            losses = run.compiled(
                batch.inputs, batch.targets, loss_reduction="none", masks=masks
            ).sum(dim=1)
            (losses.sum() / settings.total_batch_size).backward()
            # the leaf's last micro-batch: add the finished leaf to the rank's tree of leaves
            if at + 1 == per_leaf:
                run.leaves.leaf_done()
            # enter each row's loss, number of targets and bucket; rows that only pad a batch have
            # no entry
            rows = loader.layout.rows_of(leaf, at)
            # (B, 3)
            values = torch.stack(
                [losses.detach(), (batch.targets >= 0).sum(dim=1), batch.buckets], dim=1
            )
            table[rows.start : rows.stop] = values[: len(rows)]
        return table, True, ("", False)
    except Dry as e:
        return table, False, (str(e), e.bucket is None)
    except StopAsked:  # a stop was requested while the loader waited for object storage
        return table, False, ("", False)


def one_step(run: Trainer) -> None:
    """Take one optimizer step. Raises Stop on all ranks if a stop was requested or a rank ran out
    of rows."""
    p, loader = run.progress, run.loader
    began, waited = time.perf_counter(), loader.wait_s
    run.dog.beat(p.step)
    rows, complete, dry = forward_backward(run)
    if (p.step + 1) % RANKS_EVERY == 0:
        log_ranks(run, began)

    # One small reduction carries everything that all ranks must agree on; then the weights are
    # updated.
    reason = run.stop.check()
    unsaved = run.report_save()
    totals, grad_norm = take_step(
        run,
        rows,
        dry=not complete,
        stop=bool(reason),
        unsaved=unsaved is not None,
        save=run.time_to_save(),
    )

    # Every rank has the same totals, so all ranks take the same branch.
    if totals.unsaved:
        raise unsaved or SystemExit(1)  # the rank whose save failed prints the error
    if totals.dry and totals.stop:  # an interrupted wait for data: this step was not applied
        raise Stop(join_reasons(gather_all(reason)))
    if totals.dry:
        why, all_dry = next(entry for entry in gather_all(dry) if entry[0])
        raise Stop(why, "halted", all_dry=all_dry)
    if not (totals.spiked or math.isfinite(totals.loss + grad_norm)):
        raise ArithmeticError(
            f"step {p.step}: the loss is {totals.loss}, the gradient norm {grad_norm}"
        )

    # From here on the step counts: it is recorded, logged and printed before a requested stop ends
    # the run.
    run.check_totals(totals, grad_norm)
    log_step(
        run, totals, grad_norm, step_s=time.perf_counter() - began, wait_s=loader.wait_s - waited
    )
    if totals.stop:
        raise Stop(join_reasons(gather_all(reason)))


def log_step(
    run: Trainer, totals: StepTotals, grad_norm: float, *, step_s: float, wait_s: float
) -> None:
    """Count a step, then log and print it. Add a value to `record` to log it, and to `line` to
    print it."""
    p = run.progress
    loader = run.loader
    tokens = run.settings.total_batch_size
    lr = run.schedule.lr(p.step)
    rate = tokens / step_s
    smooth = p.count_step(totals, tokens, step_s)
    eta_s = (run.schedule.num_iterations - p.step) * p.train_time_s / p.step
    record: dict[str, Any] = {
        "digest": totals.digest,
        "loss": totals.loss,
        "smooth_loss": smooth,
        "lr": lr,
        "grad_norm": grad_norm,
        "step_s": step_s,
        "wait_s": wait_s,
        "tokens": p.tokens,
        "tokens_per_s": rate,
        "mfu": rate * run.mfu_per_rate,
        "total_training_flops": run.flops_per_token * p.tokens,
        "total_training_time": p.train_time_s,
    }
    if len(loader.buckets) > 1:
        for number, bucket in enumerate(loader.buckets):
            loss, live = totals.of_bucket(number)
            record |= {f"loss/{bucket}": loss, f"tokens/{bucket}": live}
    line = [
        f"loss {smooth:.6f} (smoothed)",
        f"lr x{lr:.3f}",
        f"grad norm {grad_norm:.4f}",
        f"{step_s * 1000:.1f} ms",
        f"{rate:,.0f} tok/s",
        *([f"mfu {record['mfu']:.1%}"] if record["mfu"] else []),
        f"data wait {wait_s * 1000:.1f} ms",
        f"eta {duration(eta_s)}",
    ]
    run.journal.step(
        totals,
        record,
        " | ".join(line),
        loss=smooth,
        tokens_per_s=rate,
        eta_s=eta_s,
        phase=loader.phase,
    )


# ---- set-up --------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Start or resume a run. Returns the exit code (docs/reference.md). ValueError and OSError for
    bad input."""
    settings = from_flags(parse_args(argv))
    words = sys.argv[1:] if argv is None else argv
    launch = {
        "command": shlex.join(["python", "-m", "scripts.base_train", *words]),
        "typed": [*settings.differing()],
    }
    with lasting_output():
        return launch_run(settings, launch)


def launch_run(settings: Settings, launch: dict[str, Any]) -> int:
    """Start or resume the run that the settings describe; `launch`: see `train`. Returns the exit
    code."""
    setup_logging()
    reserve_s = settings.walltime_reserve_seconds
    run_dir = run_path(settings.model_tag or f"d{settings.depth}")
    end = deadline(settings.max_runtime_seconds, os.environ, time.monotonic(), reserve_s=reserve_s)
    with StopWatch(end, reserve_s=reserve_s, run_dir=run_dir) as stop:
        if problem := elastic_problem():
            log.warning("%s", problem)
        _, rank, _, world_size, device = compute_init(
            settings.device_type or autodetect_device_type(),
            deterministic=settings.deterministic,
            timeout_s=2 * settings.collective_timeout_seconds + LONG_S,
        )
        try:
            settings, tokenizer = on_all_ranks(lambda: command(settings, world_size, device.type))
            print0("start: reading the run directory and the data files")
            start = inspect_run(settings, device)
            if (over := start.over()) is not None:
                print0(over[1])
                if start.notices:
                    print0(f"warning: ignored settings: {'; '.join(start.notices)}")
                return over[0]
            start, data = find_data(start, tokenizer, rank)
            print_split(start, data)
            return train(start, data, stop, launch, rank, world_size, device)
        finally:
            compute_cleanup()


def train(
    start: Start,
    data: RunData,
    stop: StopWatch,
    launch: dict[str, Any],
    rank: int,
    world_size: int,
    device: torch.device,
) -> int:
    """Claim the run, build its parts and enter the loop. `launch` goes into the log: "command" is
    the command line, "typed" the names of the settings it changed."""
    settings = start.settings
    horizon = start.horizon
    num_steps = start.horizon.num_iterations
    schedule = Schedule.of(settings, num_steps, peak_weight_decay=horizon.weight_decay_scaled)
    owner: Any = on_all_ranks(lambda: claim_run(start, data) if rank == 0 else None)
    with ExitStack() as stack:
        identities = gather_all(identify())
        state: RunState | Silence = (
            Silence()
            if rank > 0
            else stack.enter_context(
                RunState(
                    owner,
                    identities,
                    stop.check_flag,
                    num_iterations=num_steps,
                    step=start.step,
                    checkpoint=start.checkpoint.path.name if start.checkpoint else None,
                )
            )
        )

        def failed(verdict: str) -> None:
            state.close("failed", verdict)
            write_collectives(start.run_dir, rank)

        dog = stack.enter_context(
            Watchdog(
                open_store(world_size),
                identities,
                rank=rank,
                timeout_s=settings.collective_timeout_seconds,
                refresh=state.refresh,
                on_failure=failed,
            )
        )

        print0("start: building the model")
        stack.enter_context(explain_out_of_memory(start, device))
        model, optimizer, progress = make_model(start, schedule, device)
        compiled = (
            torch.compile(model, dynamic=False)
            if settings.compile == "on" or (settings.compile == "auto" and device.type == "cuda")
            else model
        )

        journal = (
            Journal(start, progress, device, state) if isinstance(state, RunState) else Silence()
        )
        stack.callback(journal.close)
        config = stream_config(settings)
        loader = stack.enter_context(
            DataLoader(
                config,
                data.train,
                tokenizer=data.tokenizer,
                rows_per_step=settings.total_batch_size // config.T,
                device_batch_size=settings.device_batch_size,
                device=device,
                rank=rank,
                world_size=world_size,
                num_leaves=settings.leaves,
                cursors=start.cursors,
                start_step=progress.step,
                num_threads=settings.tokenizer_threads,
                with_doc_ids=settings.attention_mode != "causal",
                drop_dry=settings.allow_bucket_exhaustion,
            )
        )
        stack.callback(stop.ignore_stores)  # before the loader closes, which waits for its threads
        saver = Saver(start.checkpoint.path if start.checkpoint else None)
        stack.callback(saver.close)
        print_summary(start, loader.layout, device, launch["typed"])
        journal.started(world_size, **launch)
        leaves = LeafAccumulator(
            model.parameters(),
            len(loader.layout.leaves),
            on_host=is_tight(settings, device),
            micro_batches_per_leaf=loader.layout.micro_batches_per_leaf,
        )
        return loop(
            Trainer(
                start=start,
                data=data,
                model=model,
                compiled=compiled,
                optimizer=optimizer,
                leaves=leaves,
                schedule=schedule,
                loader=loader,
                progress=progress,
                journal=journal,
                dog=dog,
                stop=stop,
                saver=saver,
            )
        )


if __name__ == "__main__":
    run_main(main)
