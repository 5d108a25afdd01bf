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
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch

from nanochat.any_step import make_available, unsaved_step
from nanochat.checkpoint import list_checkpoints
from nanochat.cli import EXIT_HALTED, Parser, lasting_output, quiet_gc, run_main, setup_logging
from nanochat.common import Stop, counted, duration, join_reasons, print0
from nanochat.config import Settings, add_flags, from_flags
from nanochat.dataloader import DataLoader, Dry
from nanochat.dist import (
    RANKS_EVERY,
    gather_all,
    on_all_ranks,
    on_rank0,
    peak_memory,
    reserved_memory,
)
from nanochat.evaluations import log_core, log_ranks, log_samples, log_validation
from nanochat.model_code import code_of
from nanochat.reduce import LeafAccumulator
from nanochat.run_dir import Fork, but_resume, find_run_at, validations
from nanochat.run_guard import Guard
from nanochat.run_journal import Journal, open_journal
from nanochat.run_order import stream_config
from nanochat.run_saves import Saves
from nanochat.run_settings import is_compiled, is_tight
from nanochat.run_state import renew_state
from nanochat.run_stop import Diverged
from nanochat.run_summary import explain_out_of_memory, print_split, print_summary
from nanochat.schedule import Schedule
from nanochat.spikes import MOST_IN_A_ROW, describe, remember
from nanochat.start_run import (
    Over,
    Run,
    Start,
    after_halt,
    begin_run,
    complete_settings,
    find_data,
    has_moved,
    inspect_run,
)
from nanochat.steps import Outcome, Progress, StepReport, StepTotals, time_left
from nanochat.tokenizer import Tokenizer
from nanochat.trainer import Training, make_model, new_row_table, take_step

NOTICEABLE = 0.01  # a wait for data of this share of the step is printed
# settings whose flags --help shows first
EVERYDAY = (
    *("model_tag", "resume", "force", "device_type", "dtype", "compile", "seed"),
    *("depth", "max_seq_len", "attention_mode"),
    *("data_path", "val_path", "data_format", "tokenizer", "packing", "long_docs", "curriculum"),
    *("num_iterations", "target_param_data_ratio", "device_batch_size", "total_batch_size"),
    *("matrix_lr", "weight_decay", "warmup_steps"),
    *("eval_every", "sample_every", "save_every", "keep_last_k", "run", "max_runtime_seconds"),
    *("init_from", "fork_from"),
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse command-line flags, by default those of this process."""
    parser = add_flags(Parser(description=__doc__))
    parser.show_first(EVERYDAY)
    return parser.parse_args(argv)


# ---- a launch ------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Start or resume a run. Returns the exit code (docs/reference.md). ValueError and OSError for
    bad input."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    given = from_flags(args)
    setup_logging()
    with lasting_output(), Guard(given) as guard:
        start, tokenizer = look(given, args.named, guard)
        over = start.over()
        if over is not None:
            on_rank0(guard.mirror.finish)
            on_rank0(lambda: renew_state(guard.run_dir))
            return report_over(start, over)
        run = find_data(start, tokenizer, guard.rank)
        with build(run, guard) as (training, journal, saves):
            announce(run, training, guard, journal, given, args.named, words)
            return loop(run, training, guard, journal, saves)


def look(given: Settings, named: Sequence[str], guard: Guard) -> tuple[Start, Tokenizer]:
    """Collective. How the command's run starts or resumes, and its tokenizer. `named`: the settings
    that the command names. Writes nothing into the run but what its mirror has; text may be
    prepared."""
    on_rank0(guard.mirror.fetch)
    settings, tokenizer = on_all_ranks(
        lambda: complete_settings(given, guard.world_size, guard.device.type)
    )
    source = given.resume
    if source in ("auto", "scratch"):
        begins = source == "scratch" or not list_checkpoints(guard.run_dir)
        source = (given.fork_from or given.init_from or "") if begins else ""

    def replay_if_unsaved() -> None:
        if unsaved_step(source) is not None:
            is_moved = has_moved(find_run_at(source)[0])
            make_available(source, data_path=given.data_path if is_moved else None)

    on_rank0(replay_if_unsaved)
    print0("start: reading the run directory and the data files")
    return inspect_run(settings, guard.device, named), tokenizer


def report_over(start: Start, over: Over) -> int:
    """Say that a run has ended, and why the command does nothing. Returns the exit code."""
    print0(over.sentence)
    if start.notices:
        changes = "; ".join(notice.change for notice in start.notices.values())
        print0(f"warning: ignored settings: {changes}")
    return over.exit_code


@contextmanager
def build(run: Run, guard: Guard) -> Iterator[tuple[Training, Journal, Saves]]:
    """Collective. Begin the run on disk, then build the parts of this launch, and close them."""

    def begin() -> None:
        print_split(run)
        begin_run(run, guard)

    on_rank0(begin)
    guard.watch()
    print0("start: building the model")
    with ExitStack() as stack:
        stack.enter_context(explain_out_of_memory(run, guard.device))
        journal = open_journal(run, guard)
        stack.callback(journal.close)
        training = stack.enter_context(open_training(run, guard))
        saves = Saves(run, training, guard, journal)
        stack.callback(saves.close)
        yield training, journal, saves


class Process(Protocol):
    """This process among those of a launch: a `Guard`, or a replay."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


@contextmanager
def open_training(run: Run, process: Process) -> Iterator[Training]:
    """Collective. The training of a run at its first step."""
    settings = run.settings
    schedule = Schedule.of(
        settings,
        run.horizon.num_iterations,
        peak_weight_decay=run.horizon.weight_decay_scaled,
    )
    model, optimizer, progress = make_model(run, schedule, process.device)
    compiled = torch.compile(model, dynamic=False) if is_compiled(settings) else model
    with on_all_ranks(lambda: open_loader(run, process)) as loader:
        leaves = LeafAccumulator(
            model.parameters(),
            len(loader.layout.leaves),
            on_host=is_tight(settings, process.device),
            micro_batches_per_leaf=loader.layout.micro_batches_per_leaf,
        )
        yield Training(
            settings=settings,
            model=model,
            compiled=compiled,
            optimizer=optimizer,
            leaves=leaves,
            schedule=schedule,
            loader=loader,
            progress=progress,
            model_code=code_of(model),
        )


def open_loader(run: Run, process: Process) -> DataLoader:
    """The loader of this rank, at the run's first step."""
    settings = run.settings
    config = stream_config(settings)
    return DataLoader(
        config,
        run.data.train,
        tokenizer=run.data.tokenizer,
        rows_per_step=settings.total_batch_size // config.T,
        device_batch_size=settings.device_batch_size,
        device=process.device,
        rank=process.rank,
        world_size=process.world_size,
        num_leaves=settings.leaves,
        cursors=run.cursors,
        start_step=run.step,
        num_threads=settings.tokenizer_threads,
        with_doc_ids=settings.attention_mode != "causal",
        drop_dry=settings.allow_bucket_exhaustion,
    )


def command_line(words: Sequence[str], world_size: int) -> str:
    """The command of a launch: with torchrun, if it has several processes."""
    program = ["-m", "scripts.base_train", *words]
    if world_size == 1:
        return shlex.join(["python", *program])
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    nodes = "--standalone" if per_node == world_size else f"--nnodes={world_size // per_node}"
    return shlex.join(["torchrun", nodes, f"--nproc_per_node={per_node}", *program])


def announce(
    run: Run,
    training: Training,
    guard: Guard,
    journal: Journal,
    given: Settings,
    named: Sequence[str],
    words: Sequence[str],
) -> None:
    """Print what is about to run, and log the command and the names of the settings it changed."""
    typed = [*given.differing()]
    if given.fork is not None:  # it inherits the others
        typed = [name for name in typed if name in given.fork["named"]]
    print_summary(run, training.loader.layout, guard.device, typed, named)
    journal.event(
        "started",
        run.step,
        launch=guard.launch,
        world_size=guard.world_size,
        device=guard.device.type,
        num_iterations=run.horizon.num_iterations,
        **journal.versions,
        model_code=training.model_code,
        command=command_line(words, guard.world_size),
        typed=typed,
        changed=run.settings.since(run.config),
    )


# ---- the loop ------------------------------------------------------------------------------------


def loop(run: Run, training: Training, guard: Guard, journal: Journal, saves: Saves) -> int:
    """Save, evaluate and step until the horizon or a stop. Returns the exit code."""
    settings = run.settings
    progress = training.progress
    last = run.horizon.num_iterations
    is_final_saved = False
    try:
        print0("start: steps show the smoothed loss, rates (x1: peak), norm of the gradient, time")
        print0("start: packing the first step")
        training.check_next_step(run)
        guard.stop_if_asked()  # during the set-up
        while True:
            # save first: an evaluation may fail or be killed
            if progress.step >= last:
                saves.save("final", "completed", last=True)
                is_final_saved = True
            elif saves.is_due():
                saves.save(f"checkpoint-{progress.step}", "running")
            if due(run, progress.step, settings.eval_every, "val"):
                between_steps("evaluation", log_validation, run, training, guard, journal)
            if due(run, progress.step, settings.core_metric_every, "core") and progress.step > 0:
                between_steps("CORE", log_core, run, training, guard, journal)
            samples_due = due(run, progress.step, settings.sample_every, "samples")
            if samples_due and progress.step > 0 and guard.rank == 0:
                with suppress(Stop):  # the next step handles the stop
                    between_steps("samples", log_samples, run, training, guard, journal)
            if progress.step >= last:
                break
            one_step(run, training, guard, journal, saves)
            if progress.step == run.step + 1:
                quiet_gc()
    except Stop as e:
        journal.ending(e.reason)
        took_steps = progress.step > run.step
        halted = e.status == "halted"
        if not is_final_saved and (took_steps or halted):
            why: dict[str, object] = {e.status: e.reason}
            if halted:
                why["all_dry"] = e.all_dry
            saves.save(f"checkpoint-{progress.step}-shutdown", e.status, last=True, **why)
        journal.end(e.status, progress.step, e.reason)
        return report_stop(run, progress, e)
    except Diverged as e:
        saves.settle()
        journal.end("failed", progress.step, str(e))
        if guard.rank != 0:
            raise SystemExit(1) from e  # rank 0 prints the error
        raise ValueError(f"{e}. {after_failure(run)}") from e
    except Exception as e:
        with suppress(Exception):  # the log may be what failed
            journal.event("failed", progress.step, reason=f"{type(e).__name__}: {e}")
        raise
    journal.end("completed", progress.step)
    report_completed(run, progress, peak_memory(guard.device))
    return 0


def due(run: Run, step: int, every: int, event: str) -> bool:
    """Whether an evaluation that takes place every `every` steps is due. At the first step of a
    launch, it is not due if the previous launch has logged it as `event`."""
    is_due = every > 0 and (step >= run.horizon.num_iterations or step % every == 0)
    return is_due and (step > run.step or run.logged(event) is None)


def between_steps(
    what: str,
    evaluate: Callable[[Run, Training, Guard, Journal], None],
    run: Run,
    training: Training,
    guard: Guard,
    journal: Journal,
) -> None:
    """Run an evaluation, and note how long it took, so that a run with a walltime can reserve that
    time. If the evaluation fails, the reason is logged and the run continues: only a failed step
    ends it. If `evaluate` raises, it must do so on all ranks, or have no collective afterwards."""
    began = time.perf_counter()
    try:
        evaluate(run, training, guard, journal)
    except Stop:
        raise
    except Exception as e:
        # of any kind, also a bug or a lack of memory: nothing that was measured decides what is
        # trained, so a run of days does not end for it
        step = training.progress.step
        reason = f"{type(e).__name__}: {e}"
        print0(f"warning: step {step}: {what} failed: {reason}; the run continues")
        journal.event("evaluation_failed", step, what=what, reason=reason)
    guard.note_work(what, time.perf_counter() - began)


# ---- a step --------------------------------------------------------------------------------------


class Shortage(NamedTuple):
    """Why a rank does not have all of its rows of a step."""

    reason: str = ""  # why its data ran dry; '' if a requested stop ended its wait for data
    all_dry: bool = False  # whether every bucket is dry


def forward_backward(training: Training) -> tuple[torch.Tensor, Shortage | None]:
    """Run this rank's micro-batches and leave the sum of their gradients in the model.

    Returns (table, shortage): the (R, 3) table of the step with this rank's rows filled in, and
    None if the rank had all of its rows.
    """
    loader = training.loader
    num_targets = training.settings.total_batch_size
    per_leaf = loader.layout.micro_batches_per_leaf
    table = new_row_table(loader.layout, loader.device)
    try:
        for i in range(loader.micro_batches_per_step):
            leaf, at = divmod(i, per_leaf)
            batch = next(loader)
            # one forward and backward pass: `backward` adds this micro-batch to .grad, the sum of
            # its leaf
            masks = training.model.masks(batch.doc_ids, batch.num_docs)
            token_losses = training.compiled(
                batch.inputs, batch.targets, loss_reduction="none", masks=masks
            )
            losses = token_losses.sum(dim=1)
            (losses.sum() / num_targets).backward()
            # the leaf's last micro-batch: add the finished leaf to the rank's tree of leaves
            if at + 1 == per_leaf:
                training.leaves.leaf_done()
            # enter each row's loss, number of targets and bucket; rows that only pad a batch have
            # no entry
            rows = loader.layout.rows_of(leaf, at)
            live = (batch.targets >= 0).sum(dim=1)
            values = torch.stack([losses.detach(), live, batch.bucket_ids], dim=1)  # (B, 3)
            table[rows.start : rows.stop] = values[: len(rows)]
        return table, None
    except Dry as e:
        mix = training.settings.mix
        is_only = mix is not None and len(mix.buckets) == 1
        return table, Shortage(str(e), all_dry=e.bucket is None or is_only)
    except Stop:  # a stop was requested while the loader waited for data
        return table, Shortage()


def one_step(run: Run, training: Training, guard: Guard, journal: Journal, saves: Saves) -> None:
    """Take one optimizer step. Raises Stop on all ranks if a stop was requested or a rank ran out
    of rows."""
    progress = training.progress
    began = time.perf_counter()
    waited = training.loader.wait_s
    guard.beat(progress.step)
    table, shortage = forward_backward(training)
    if (progress.step + 1) % RANKS_EVERY == 0:
        log_ranks(training, journal, began)

    # One small reduction carries everything that all ranks must agree on; then the weights are
    # updated.
    reason = guard.reason()
    unsaved = saves.report()
    totals = take_step(
        training,
        table,
        dry=shortage is not None,
        stop=bool(reason),
        unsaved=unsaved is not None,
        save=saves.clock_says(),
        beat=guard.beat,
    )
    saves.due_by_clock = totals.save

    # Every rank has the same totals, so all ranks take the same branch.
    if totals.unsaved:
        raise unsaved or SystemExit(1)  # the rank whose save failed prints the error
    if totals.dry and totals.stop:  # an interrupted wait for data: this step was not applied
        raise Stop(join_reasons(gather_all(reason)))
    if totals.dry:
        first = next(found for found in gather_all(shortage) if found is not None and found.reason)
        raise Stop(first.reason, "halted", all_dry=first.all_dry)
    if totals.outcome is Outcome.VOID:
        raise Diverged(
            f"step {progress.step}: the loss is {totals.loss}, the gradient norm {totals.grad_norm}"
        )

    # From here on the step counts: it is recorded, logged and printed before a requested stop ends
    # the run.
    note_dropped(training, journal, totals)
    note_outcome(training, journal, totals)
    step_s = time.perf_counter() - began
    log_step(run, training, journal, totals, step_s=step_s, wait_s=training.loader.wait_s - waited)
    if totals.stop:
        raise Stop(join_reasons(gather_all(reason)))


def note_dropped(training: Training, journal: Journal, totals: StepTotals) -> None:
    """Warn if lanes have dropped a bucket that ran dry."""
    progress = training.progress
    for bucket, lanes in zip(training.loader.buckets, totals.dropped):
        if lanes > progress.dropped.get(bucket, 0):
            progress.dropped[bucket] = lanes
            print0(
                f"warning: at step {progress.step}, the bucket {bucket!r} has run dry in "
                f"{counted(lanes, 'lane')} and is skipped there"
            )
            journal.event("dropped", progress.step, bucket=bucket, lanes=lanes)


def note_outcome(training: Training, journal: Journal, totals: StepTotals) -> None:
    """Update the statistics that spikes are measured against, or warn that the step was not
    applied. Diverged after too many spikes in a row."""
    progress = training.progress
    if totals.outcome is Outcome.APPLIED:
        progress.skipped_in_a_row = 0
        if training.settings.skip_spikes is None:
            progress.window = []
        else:
            progress.window = remember(progress.window, totals.loss, totals.grad_norm)
        return
    progress.skipped += 1
    sigma = training.settings.skip_spikes
    if totals.outcome is Outcome.EMPTY or sigma is None:
        why = "no target of its rows has a loss (repeated tokens and --without-documents have none)"
    else:
        progress.skipped_in_a_row += 1
        spike = describe(totals.loss, totals.grad_norm, progress.window, sigma)
        why = f"{spike} (--skip-spikes)"
    print0(
        f"warning: step {progress.step} was not applied: {why}; {counted(progress.skipped, 'step')} not "
        f"applied so far"
    )
    journal.event(
        "skipped",
        progress.step,
        why=totals.outcome.value,
        digest=totals.digest,
        loss=totals.loss,
        grad_norm=totals.grad_norm,
        skipped=progress.skipped,
    )
    if progress.skipped_in_a_row == MOST_IN_A_ROW:
        raise Diverged(
            f"step {progress.step}: {MOST_IN_A_ROW} steps in a row were skipped as spikes, so the "
            f"run has diverged"
        )


def log_step(
    run: Run,
    training: Training,
    journal: Journal,
    totals: StepTotals,
    *,
    step_s: float,
    wait_s: float,
) -> None:
    """Count a step, then log and print it. Add a value to `record` to log it, and to `line` of
    `line_of` to print it."""
    progress = training.progress
    loader = training.loader
    step = progress.step
    tokens = run.settings.total_batch_size
    lr = training.schedule.lr(step)
    rate = tokens / step_s
    smooth = progress.count_step(totals, tokens, step_s)
    training.recent_s.append(step_s)
    eta_s = time_left(training.recent_s, run.horizon.num_iterations - progress.step)
    mfu = rate * training.mfu_per_rate
    record: dict[str, Any] = {
        "digest": totals.digest,
        "loss": totals.loss,
        "smooth_loss": smooth,
        "lr": lr,
        "grad_norm": totals.grad_norm,
        "step_s": step_s,
        "wait_s": wait_s,
        "tokens": progress.tokens,
        "tokens_per_s": rate,
        "mfu": mfu,
        "total_training_flops": training.flops_per_token * progress.tokens,
        "total_training_time": progress.train_time_s,
    }
    record |= losses_of_buckets(loader.buckets, totals) | memory_in_use(loader.device)
    report = StepReport(
        step=step,
        totals=totals,
        record=record,
        line=line_of(record, eta_s),
        smooth_loss=smooth,
        tokens=progress.tokens,
        tokens_per_s=rate,
        eta_s=eta_s,
        skipped=progress.skipped,
        phase=loader.phase(),
    )
    journal.step(report)


def line_of(record: Mapping[str, Any], eta_s: float) -> str:
    """What is printed about a step. `record`: its line in the log."""
    step_s = record["step_s"]
    wait_s = record["wait_s"]
    line = [
        f"loss {record['smooth_loss']:.5f}",
        f"lr x{record['lr']:.3f}",
        f"norm {record['grad_norm']:.4f}",
        f"{step_s * 1000:,.0f} ms",
        f"{record['tokens_per_s']:,.0f} tok/s",
    ]
    if record["mfu"]:
        line.append(f"mfu {record['mfu']:.1%}")
    if wait_s > NOTICEABLE * step_s:
        line.append(f"wait {wait_s * 1000:,.0f} ms")
    line.append(f"{duration(eta_s)} left")
    return " | ".join(line)


def losses_of_buckets(buckets: Sequence[str], totals: StepTotals) -> dict[str, Any]:
    """The loss and the number of live targets of each bucket; {} if there is only one."""
    record: dict[str, Any] = {}
    for number, bucket in enumerate(buckets if len(buckets) > 1 else ()):
        record[f"loss/{bucket}"], record[f"tokens/{bucket}"] = totals.of_bucket(number)
    return record


def memory_in_use(device: torch.device) -> dict[str, int | None]:
    """The memory of a GPU that was used and reserved so far, in bytes; {} without a GPU."""
    peak = peak_memory(device)
    if peak is None:
        return {}
    return {"peak_memory_bytes": peak, "reserved_memory_bytes": reserved_memory(device)}


# ---- the end -------------------------------------------------------------------------------------


def report_stop(run: Run, progress: Progress, stop: Stop) -> int:
    """Say why the run has ended before its horizon, and what to do. Returns the exit code."""
    again = f"the same command{but_resume(vars(run.settings))}"
    if stop.status == "halted":
        remedy = after_halt(run.run_dir.name, all_dry=stop.all_dry)
    elif progress.step > 0:
        remedy = f"step {progress.step:,} of {run.horizon.num_iterations:,} is saved; {again} resumes the run"
    else:
        remedy = f"no step was taken; {again} starts the run again"
    print0(f"{stop.status}: {stop.reason}; {remedy}")
    return EXIT_HALTED if stop.status == "halted" else 0


def after_failure(run: Run) -> str:
    """What is left after a step that was not applied, and what to do."""
    checkpoints = list_checkpoints(run.run_dir)
    kept = f"{checkpoints[0]} is kept" if checkpoints else "no checkpoint exists yet"
    return (
        f"The step was not applied, and {kept}. Fork the run from an earlier step "
        f"(--fork-from={run.run_dir.name}@STEP --model-tag=NAME), with lower learning rates, with another "
        f"--skip-spikes, or, if the rows of one step are to blame, without them (--skip-steps)"
    )


def validation_text(run: Run, progress: Progress) -> str:
    """The first and the last bits per byte of a run, with their steps if these are not its first and
    last ones, and the lowest. Only the last if the first is of another amount of text, or the same."""
    val = validations(run.run_dir, progress.step)
    fork = Fork.of(run.settings.fork)
    begin = 0 if fork is None else fork.step
    amount = run.settings.eval_tokens
    is_comparable = run.config.get("eval_tokens", amount) == amount
    text = f"{progress.val_bpb:.6f}"
    if val and max(val) < progress.step:
        text += f" at step {max(val):,}"
    if len(val) > 1 and is_comparable:
        since = f" at step {min(val):,}" if min(val) > begin else ""
        text = f"{val[min(val)]:.6f}{since} -> {text}"
        best = min(val, key=val.__getitem__)
        if val[best] < val[max(val)]:
            text += f" (lowest: {val[best]:.6f} at step {best:,})"
    return text


def report_completed(run: Run, progress: Progress, peak: int | None) -> None:
    """Print the last line of a run."""
    line = f"completed: {progress.tokens:,} tokens in {duration(progress.train_time_s)} of steps"
    fork = Fork.of(run.settings.fork)
    if fork is not None:
        own_tokens = progress.tokens - fork.tokens
        line += f", those of its ancestors included ({own_tokens:,} tokens of its own)"
    if progress.val_bpb is not None:
        line += f"; validation bits per byte {validation_text(run, progress)}"
    if peak is not None:
        line += f"; peak memory {peak / 1e9:,.1f} GB"
    print0(f"{line}; {run.run_dir}")
    name = run.run_dir.name
    print0(f"next: python -m scripts.sample {name}, python -m scripts.page {name}")


if __name__ == "__main__":
    run_main(main)
