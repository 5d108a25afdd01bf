"""
Train a model. The same command starts a run and goes on with it.

    python -m scripts.base_train --depth=12
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train --depth=24 --run=my-wandb-name

A small one for a laptop or a test:

    python -m scripts.base_train --depth=4 --aspect-ratio=32 --head-dim=32 --max-seq-len=512 --device-batch-size=4 \\
        --total-batch-size=8192 --num-iterations=100 --eval-tokens=65536 --data-path=DIR

Everything the run writes is in one folder, <base dir>/runs/<model tag> (--model-tag, default d<depth>): configuration,
log, checkpoints, tokenizer, and which files it reads.
"""

import argparse
import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanochat.checkpoint import Code, Outcome, Saver, check_retention, list_checkpoints, prune
from nanochat.common import (
    EXIT_HALTED,
    Parser,
    begin_data,
    place,
    print0,
    quiet_gc,
    run_main,
    setup_logging,
)
from nanochat.dataloader import DataLoader, Dry, validation_loader
from nanochat.dataset import DEFAULT_DATASET
from nanochat.dist import (
    agree,
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    gather,
    gather_all,
    get_compute_dtype,
    get_peak_flops,
    on_rank0,
    same,
)
from nanochat.engine import Engine
from nanochat.flags import add_flags
from nanochat.gpt import GPT
from nanochat.job import command_settings, derive, find_tokenizer, introduce, resolve
from nanochat.lifecycle import RunState, StopWatch, deadline, identify, join_reasons
from nanochat.loss_eval import evaluate_buckets
from nanochat.optim import MuonAdamW
from nanochat.reduce import LeafAccumulator
from nanochat.run_data import RunData, check_files, open_data, stream_config
from nanochat.run_dir import is_run_dir, run_path
from nanochat.run_plan import rehearse
from nanochat.schedule import Horizon, Schedule
from nanochat.start_run import Start, begin, check_home, check_model, continued, load_states, prepare, settle_samples
from nanochat.stream import build_indices
from nanochat.tokenizer import RustBPETokenizer
from nanochat.trainer import Halt, Progress, Stop, add_up, leaf_sums, save
from nanochat.watch import Watch
from nanochat.watchdog import Watchdog, open_store

log = logging.getLogger(__name__)

LONG_S = 1800.0  # what an evaluation or a save may take
WAY_ON = "--allow-bucket-exhaustion goes on without what ran dry, --allow-curriculum-change with another curriculum"
SAMPLE_PROMPTS = ("The capital of France is", "The opposite of cold is", "Water boils when", "import os\n",
                  "If 3*x + 2 = 11, then x is")


def parser() -> argparse.ArgumentParser:
    """The flags; scripts.validate takes the same."""
    p = Parser(description="Pretrain a base model.", epilog=__doc__)
    add_flags(p)
    return p


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of a command line, by default of this one."""
    return parser().parse_args(argv)


# ---- the loop's parts ------------------------------------------------------------------------------------------------

@dataclass
class Run:
    """What the parts of the loop share."""

    run_dir: Path
    start: Start
    settings: dict[str, Any]
    horizon: Horizon
    schedule: Schedule
    tokenizer: RustBPETokenizer
    data: RunData
    device: torch.device
    rank: int
    world_size: int
    model: GPT
    compiled: Any  # the model, as it is called
    optimizer: MuonAdamW
    leaves: LeafAccumulator
    loader: DataLoader
    progress: Progress
    watch: Watch
    dog: Watchdog
    stop: StopWatch
    saver: Saver
    mfu_per_rate: float
    token_bytes: torch.Tensor
    outcome: Outcome | None = None  # of the save that ended last; rank 0's

    def due(self, name: str) -> bool:
        """Whether it is time to look or save, before the next step."""
        every, step = self.settings[name], self.progress.step
        return every > 0 and (step >= self.horizon.num_iterations or step % every == 0) and (
            step > self.start.step or not self.start.looked)


def one_step(run: Run) -> None:
    """One optimizer step. Raises Halt on all ranks where one has no rows, Stop where one was asked to."""
    p, loader, total = run.progress, run.loader, run.horizon.total_batch_size
    began, waited, dry, none_left = time.perf_counter(), loader.wait_s, "", False
    run.dog.beat(p.step)
    if p.step in run.start.skips:
        run.watch.event("skipped", steps=run.start.skips[p.step])
    sums = leaf_sums(loader.layout, len(loader.buckets), run.device)
    bucket_ids = torch.arange(len(loader.buckets), device=run.device)
    try:
        for i in range(loader.micro_batches_per_step):
            leaf, at = divmod(i, loader.layout.micro_batches_per_leaf)
            batch = next(loader)
            losses = run.compiled(batch.inputs, batch.targets, loss_reduction="none",
                                  masks=run.model.masks(batch.doc_ids)).sum(dim=1)
            (losses.sum() / total).backward()
            if at + 1 == loader.layout.micro_batches_per_leaf:
                run.leaves.leaf_done()
            of_rows = torch.stack([losses.detach(), (batch.targets >= 0).sum(dim=1)]).to(sums.dtype)  # (2, B)
            sums[leaf] += (of_rows[:, :, None] * (batch.buckets[:, None] == bucket_ids)).sum(dim=1)
    except Dry as e:
        dry, none_left = str(e), e.bucket is None
    reason = run.stop.wanted()
    saved = told_save(run)
    run.dog.beat(p.step, "reduction")
    totals = add_up(sums, loader.layout, dropped=list(loader.dropped().values()), digest=loader.digest, dry=bool(dry),
                    stop=bool(reason), saved=saved)
    if totals.saved == Code.FATAL:
        raise_fatal(run)
    if totals.dry:
        texts = [(text, all_dry) for text, all_dry in gather_all((dry, none_left)) if text]
        raise Halt(*texts[0])
    run.schedule.apply(run.optimizer, p.step)
    run.dog.beat(p.step, "optimizer")
    grad_norm = float(run.optimizer.step(totals.grad_scale(total)))  # waits for the device
    run.model.zero_grad(set_to_none=True)
    if not (math.isfinite(totals.loss) and math.isfinite(grad_norm)):
        raise ArithmeticError(f"step {p.step}: the loss is {totals.loss}, the gradient norm {grad_norm}")
    run.watch.check_digest(totals.digest, tokens=total)
    run.watch.note_dropped(dict(zip(loader.buckets, totals.dropped)))
    by_bucket = dict(zip(loader.buckets, totals.bucket_losses())) if len(loader.buckets) > 1 else {}
    run.watch.step(run.schedule, tokens=total, loss=totals.loss, grad_norm=grad_norm, digest=totals.digest,
                   step_s=time.perf_counter() - began, wait_s=loader.wait_s - waited, mfu_per_rate=run.mfu_per_rate,
                   bucket_loss=by_bucket, phase=loader.phase)
    if totals.stop:
        raise Stop(join_reasons(gather_all(reason)))


def evaluate(run: Run) -> None:
    """Bits per byte on validation data, of each bucket and of all."""
    began, args, data = time.perf_counter(), run.settings, run.data
    with run.dog.patience(LONG_S):
        batches = {bucket: validation_loader(
            source, tokenizer=run.tokenizer, T=run.loader.config.T, num_tokens=args["eval_tokens"] // len(data.val),
            device=run.device, device_batch_size=args["device_batch_size"], rank=run.rank, world_size=run.world_size,
            num_leaves=args["leaves"], num_threads=args["tokenizer_threads"],
            with_doc_ids=args["attention_mode"] != "causal")
            for bucket, source in data.val.items()}
        bpb, by_bucket = evaluate_buckets(run.compiled, batches, run.token_bytes)
    run.progress.note_val(bpb)
    told = f" ({', '.join(f'{k} {v:.6f}' for k, v in by_bucket.items())})" if len(by_bucket) > 1 else ""
    print0(f"step {run.progress.step:05d} | validation bits per byte {bpb:.6f}{told}")
    run.watch.event("val", bpb=bpb, buckets=by_bucket)
    run.stop.note("eval_every", time.perf_counter() - began)


def sample(run: Run) -> None:
    """Print a greedy continuation of each prompt. Rank 0 alone."""
    began = time.perf_counter()
    engine, bos = Engine(run.model, run.tokenizer), run.tokenizer.get_bos_token_id()
    for prompt in SAMPLE_PROMPTS:
        run.dog.beat()
        tokens = engine.generate_batch(run.tokenizer.encode(prompt, prepend=bos), max_tokens=16, temperature=0.0)[0][0]
        print0(f"  > {run.tokenizer.decode(tokens[1:])!r}")
    run.stop.note("sample_every", time.perf_counter() - began)


def checkpoint_now(run: Run, name: str, status: str, *, last: bool = False, **more: Any) -> None:
    """Start a save; with `last`, wait until it is written. OSError on rank 0 if it cannot be."""
    began = time.perf_counter()
    with run.dog.patience(LONG_S):
        save(run.run_dir, name, saver=run.saver, model=run.model, optimizer=run.optimizer, schedule=run.schedule,
             loader=run.loader, progress=run.progress, status=status, last=last,
             extra={"tokenizer_fingerprint": run.tokenizer.fingerprint, "wandb_id": run.watch.wandb_id,
                    "K": run.settings["leaves"], "curriculum": run.settings["curriculum"],
                    "total_batch_size": run.horizon.total_batch_size,
                    "tokens": run.progress.tokens, "phase": run.loader.phase,
                    "skips": sorted(run.start.skips.items()), **more})
        run.stop.note("copy", time.perf_counter() - began)
        if last:
            on_rank0(lambda: finish_saves(run))


def told_save(run: Run) -> Code:
    """How a save that has ended went, told to people. Rank 0 knows; NOTHING elsewhere."""
    outcome = run.saver.poll()
    if outcome is None:
        return Code.NOTHING
    run.outcome = outcome
    run.stop.note_save(outcome.seconds)
    if outcome.path is not None:
        print0(outcome.message)
        run.watch.event("saved", checkpoint=outcome.path.name, seconds=outcome.seconds)
    else:
        log.warning("%s", outcome.message)
        run.watch.event("save_failed", reason=outcome.message)
    return outcome.code


def finish_saves(run: Run) -> None:
    """Wait for the save in flight. Raises what is fatal."""
    run.saver.wait()
    while (code := told_save(run)) != Code.NOTHING:
        if code == Code.FATAL:
            raise_fatal(run)


def raise_fatal(run: Run) -> None:
    """End the run because it cannot be saved: rank 0 says why."""
    if run.outcome is None or run.outcome.error is None:
        raise SystemExit(1)
    raise run.outcome.error


def loop(run: Run) -> int:
    """Look, save, step, until the horizon or the end of something else. Returns the exit code."""
    p = run.progress
    try:
        while True:
            if run.due("eval_every"):
                evaluate(run)
            if run.rank == 0 and run.due("sample_every") and p.step > 0:
                sample(run)
            if p.step >= run.horizon.num_iterations:
                checkpoint_now(run, "final", "completed", last=True)
                break
            if run.due("save_every") and p.step > run.start.step:
                checkpoint_now(run, f"checkpoint-{p.step}", "running")
            one_step(run)
            if p.step == run.start.step + 1:
                quiet_gc()
    except Stop as e:
        run.watch.ending("stopping", str(e))
        checkpoint_now(run, f"checkpoint-{p.step}-shutdown", "stopped", last=True, stopped=str(e))
        run.watch.end("stopped", str(e))
        print0(f"stopped: {e}; step {p.step:,} of {run.horizon.num_iterations:,} is saved, the same command goes on")
        return 0
    except Halt as e:
        why, all_dry = e.args
        run.watch.ending("stopping", why)
        checkpoint_now(run, f"checkpoint-{p.step}-shutdown", "halted", last=True, halted=why, all_dry=all_dry)
        run.watch.end("halted", why)
        print0(f"halted: {why}; {WAY_ON}")
        return EXIT_HALTED
    except ArithmeticError as e:
        run.watch.end("failed", str(e))
        if run.rank != 0:
            raise SystemExit(1) from e  # all ranks know; one says so
        run.saver.wait()
        kept = next((f"{path} is kept" for path in list_checkpoints(run.run_dir)), "nothing was saved before it")
        raise ValueError(f"{e}; stopped, weights untouched by that step, and {kept}. Lower the learning rates in a new "
                         f"run (--model-tag NAME), or pass over the rows with --skip-steps") from e
    run.watch.end("completed")
    bpb = "" if p.val_bpb is None else f"; validation bits per byte {p.first_val_bpb:.6f} -> {p.val_bpb:.6f}"
    print0(f"completed: {p.tokens:,} tokens in {p.train_time_s:,.1f} s of steps{bpb}; {run.run_dir}")
    return 0


# ---- set-up ----------------------------------------------------------------------------------------------------------

def main(argv: Sequence[str] | None = None) -> int:
    """Train, or go on, until the horizon. Raises ValueError and OSError for bad input; see README for exit codes."""
    args = parse_args(argv)
    setup_logging()
    end = deadline(args.max_runtime_seconds, os.environ, time.monotonic())
    with StopWatch(end, reserve_s=args.walltime_reserve_seconds) as stop:
        _, rank, _, world_size, device = compute_init(args.device_type or autodetect_device_type(),
                                                      timeout_s=2 * args.collective_timeout_seconds + LONG_S)
        try:
            return train(args, stop, rank, world_size, device)
        finally:
            compute_cleanup()


def train(args: argparse.Namespace, stop: StopWatch, rank: int, world_size: int, device: torch.device) -> int:
    """Find out what the command means, open everything, go through the loop."""
    begin_data(args.object_storage_cache)
    args.data_path = str(place(args.data_path or DEFAULT_DATASET.data_dir).expanduser())
    tokenizer = agree(lambda: find_tokenizer(args.tokenizer_dir, args.data_path))
    agree(lambda: check_retention(args.keep_last_k, args.keep_milestone_every))
    args.model_tag = args.model_tag or f"d{args.depth}"
    run_dir = agree(lambda: run_path(args.model_tag))
    settings = agree(lambda: command_settings(vars(args), tokenizer, world_size, device.type))
    same(settings)  # every node has its own command line and tokenizer
    if args.resume != "scratch":
        at_rank0 = on_rank0(lambda: is_run_dir(run_dir))
        agree(lambda: check_home(run_dir, at_rank0=at_rank0))
    start = on_rank0(lambda: begin(run_dir, settings, resume=args.resume, force=args.force))
    for notice in start.notices:
        print0(f"changed: {notice}")
    dtype = agree(lambda: get_compute_dtype(device, start.settings["dtype"]))
    settings, horizon, model = agree(lambda: resolve(start.settings, world_size, dtype))
    if start.completed_steps >= horizon.num_iterations:
        print0(f"{run_dir}: completed ({start.checkpoint}), nothing to do; --model-tag NAME starts another run")
        return 0
    if start.halted:
        print0(f"{run_dir}: halted ({start.checkpoint}): {start.halted}; {WAY_ON}")
        return EXIT_HALTED
    on_rank0(lambda: check_model(start, model.config))
    settings = on_rank0(lambda: settle_samples(start, settings, horizon))
    config = agree(lambda: stream_config(settings))
    schedule = agree(lambda: Schedule(horizon.num_iterations, args.warmup_steps, args.warmdown_ratio,
                                      args.final_lr_frac, horizon.weight_decay_scaled))
    derived = derive(horizon, model)
    plan = None if args.plan == "off" else on_rank0(lambda: rehearse(run_dir, start, settings, tokenizer,
                                                                     horizon.num_iterations))
    owner, manifests = on_rank0(lambda: prepare(run_dir, start, settings, tokenizer, derived, plan))
    start = replace(start, settings=settings)

    with ExitStack() as stack:
        everyone = gather(identify())
        state = stack.enter_context(RunState(
            owner, everyone, num_iterations=horizon.num_iterations, step=start.step,
            checkpoint=start.checkpoint and start.checkpoint.name)) if rank == 0 else None
        dog = stack.enter_context(Watchdog(
            open_store(world_size), rank=rank, world_size=world_size, timeout_s=args.collective_timeout_seconds,
            on_failure=lambda verdict: None if state is None else state.close("failed", verdict)))
        if rank == 0:
            stop.clear(run_dir)
        agree(lambda: check_files(manifests))
        data = agree(lambda: open_data(manifests, tokenizer, as_stored=not config.framed))

        # model, optimizer, progress: fresh, another run's, or as they were saved
        model.to_empty(device=device)
        model.init_weights(seed=args.seed, compute_dtype=dtype)
        scale = horizon.batch_lr_scale
        optimizer = model.setup_optimizer(
            unembedding_lr=args.unembedding_lr * scale, embedding_lr=args.embedding_lr * scale,
            scalar_lr=args.scalar_lr * scale, matrix_lr=args.matrix_lr * scale,
            weight_decay=horizon.weight_decay_scaled)
        saved = load_states(start)
        if "model" in saved:
            model.load_state_dict(saved["model"])
        if "optimizer" in saved:
            optimizer.load_state(saved["optimizer"])
        progress = Progress(**saved.get("progress", {}))
        if progress.step > 0:
            schedule.apply(optimizer, progress.step - 1)  # rates are saved with the state: those of the step before
        cursors = saved.get("cursors")
        wandb_id = saved.get("wandb_id")
        del saved
        compiled: Any = torch.compile(model, dynamic=False) if (
            args.compile == "on" or (args.compile == "auto" and device.type == "cuda")) else model
        peak_flops = get_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else math.inf
        watch = Watch(run_dir, progress, rank=rank, run=args.run, settings=settings, wandb_id=wandb_id, state=state)
        stack.callback(watch.close)
        if world_size > 1:  # of Megatron's order: rank 0 shuffles and keeps the indices, the others find them
            on_rank0(lambda: build_indices(config, data.train))
            dog.beat()
        if start.checkpoint is None and cursors is not None:
            cursors = continued(cursors, config, data.train, tokenizer)
        loader = stack.enter_context(DataLoader(
            config, data.train, tokenizer=tokenizer, rows_per_step=horizon.total_batch_size // config.T,
            device_batch_size=args.device_batch_size, device=device, rank=rank, world_size=world_size,
            num_leaves=settings["leaves"], cursors=cursors, start_step=progress.step,
            num_threads=args.tokenizer_threads, with_doc_ids=args.attention_mode != "causal",
            drop_dry=settings["allow_bucket_exhaustion"]))
        saver = Saver(good=start.checkpoint, asynchronous=not args.sync_save, prune=lambda path: prune(
            run_dir, good=path, keep_last_k=args.keep_last_k, keep_milestone_every=args.keep_milestone_every))
        stack.callback(saver.close)
        introduce(settings, derived, loader.layout)
        if start.position is not None:
            print0(f"resuming from {start.checkpoint} at step {progress.step:,}" if start.checkpoint else
                   f"the data goes on where {start.position} was")
        if start.changed:
            watch.event("curriculum", curriculum=settings["curriculum"])
        watch.event("started", world_size=world_size, device=device.type, torch=torch.__version__, derived=derived,
                    skips=sorted(start.skips.items()))
        return loop(Run(
            run_dir=run_dir, start=start, settings=settings, horizon=horizon, schedule=schedule, tokenizer=tokenizer,
            data=data, device=device, rank=rank, world_size=world_size, model=model, compiled=compiled,
            optimizer=optimizer, leaves=LeafAccumulator(model.parameters(), len(loader.layout.leaves)), loader=loader,
            progress=progress, watch=watch, dog=dog, stop=stop, saver=saver,
            mfu_per_rate=model.estimate_flops() / (peak_flops * world_size), token_bytes=tokenizer.token_bytes()))


if __name__ == "__main__":
    run_main(main)
