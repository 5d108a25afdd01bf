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
import gc
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanochat.checkpoint import list_checkpoints, load_checkpoint
from nanochat.common import (
    DummyWandb,
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    get_compute_dtype,
    get_peak_flops,
    print0,
    run_main,
    setup_logging,
)
from nanochat.dataloader import DataLoader, Layout, default_leaves, validation_loader
from nanochat.dataset import DEFAULT_DATASET
from nanochat.engine import Engine
from nanochat.gpt import GPT, GPTConfig
from nanochat.loss_eval import evaluate_bpb
from nanochat.packing import VERSION
from nanochat.run_data import open_data, stream_config
from nanochat.run_dir import TrainLog, run_path
from nanochat.schedule import REFERENCE_DEPTH, Horizon, Schedule, resolve_horizon
from nanochat.stream import StreamConfig, default_lanes
from nanochat.tokenizer import RustBPETokenizer, get_tokenizer
from nanochat.trainer import Progress, add_up, agree, begin, on_rank0, prepare, save, start_wandb

SAMPLE_PROMPTS = ("The capital of France is", "The opposite of cold is", "Water boils when", "import os\n",
                  "If 3*x + 2 = 11, then x is")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Pretrain a base model.", epilog=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    g = p.add_argument_group("run")
    g.add_argument("--run", default="dummy", help="wandb run name; dummy = no wandb")
    g.add_argument("--model-tag", help="name of the run directory (default: d<depth>)")
    g.add_argument("--resume", default="auto", help="auto: newest good checkpoint, or start | scratch | a checkpoint")
    g.add_argument("--force", action="store_true", help="with --resume scratch: delete the run that is there")
    g.add_argument("--device-type", default="", help="cuda | mps | cpu (default: the best there is)")
    g.add_argument("--dtype", default="auto", help="of activations and embeddings: auto | bfloat16 | float32")
    g.add_argument("--compile", default="auto", choices=["auto", "on", "off"], help="torch.compile; auto = on CUDA")
    g.add_argument("--seed", type=int, default=42, help="of the weights and of the order of the data")
    g = p.add_argument_group("model")
    g.add_argument("--depth", type=int, default=20, help="layers; the one dial: width and batch follow from it")
    g.add_argument("--aspect-ratio", type=int, default=64, help="width = depth * aspect ratio, up to a whole head")
    g.add_argument("--head-dim", type=int, default=128, help="size of an attention head")
    g.add_argument("--max-seq-len", type=int, default=2048, help="T: tokens a row trains on")
    g.add_argument("--window-pattern", default="SSSL", help="attention windows, tiled over layers: L full, S a quarter")
    g = p.add_argument_group("data")
    g.add_argument("--data-path", help=f"folder of text files (default: the {DEFAULT_DATASET.name} download)")
    g.add_argument("--val-path", help="validation files (default: the last file below --data-path)")
    g.add_argument("--data-format", default="text", choices=["text"], help="parquet, .jsonl, .jsonl.gz")
    g.add_argument("--strict", action="store_true", help="a broken line of jsonl is an error")
    g.add_argument("--tokenizer-dir", help="default: <base dir>/tokenizer, where scripts.tok_train puts it")
    g.add_argument("--tokenizer-threads", type=int, default=4, help="threads per process that read and tokenize")
    g.add_argument("--packing", default="bestfit", choices=["bestfit", "concat"], help="how documents become rows")
    g.add_argument("--long-docs", default="crop", choices=["crop", "split"], help="what does not fit: dropped or later")
    g.add_argument("--overlap", type=int, default=64, help="context tokens repeated before a split document's rest")
    g.add_argument("--buffer-size", type=int, default=128, help="documents that wait in a lane for a row they fit")
    g.add_argument("--lanes", type=int, default=-1, help="V; -1: the largest divisor of the rows per step up to 64")
    g.add_argument("--leaves", type=int, default=-1, help="K; -1: the next power of two >= the number of processes")
    g = p.add_argument_group("horizon (the first that is set counts)")
    g.add_argument("--num-iterations", type=int, default=-1, help="optimizer steps")
    g.add_argument("--target-flops", type=float, default=-1.0, help="steps to spend so many FLOPs")
    g.add_argument("--target-param-data-ratio", type=float, default=12.0, help="tokens per scaling parameter")
    g = p.add_argument_group("optimization (rates are for the reference depth and batch; they are scaled from there)")
    g.add_argument("--device-batch-size", type=int, default=32, help="B: rows in one forward pass; less if memory ends")
    g.add_argument("--total-batch-size", type=int, default=-1, help="tokens a step; -1: from the horizon")
    g.add_argument("--embedding-lr", type=float, default=0.3, help="embeddings (AdamW)")
    g.add_argument("--unembedding-lr", type=float, default=0.008, help="output head (AdamW)")
    g.add_argument("--matrix-lr", type=float, default=0.02, help="matrices (Muon)")
    g.add_argument("--scalar-lr", type=float, default=0.5, help="per-layer scalars (AdamW)")
    g.add_argument("--weight-decay", type=float, default=0.28, help="cautious weight decay of matrices")
    g.add_argument("--warmup-steps", type=int, default=40)
    g.add_argument("--warmdown-ratio", type=float, default=0.65, help="share of the run in which rates come down")
    g.add_argument("--final-lr-frac", type=float, default=0.05, help="rates at the end, of the full rates")
    g = p.add_argument_group("looking and saving (every N steps; -1: at the end only, for --sample-every: never)")
    g.add_argument("--eval-every", type=int, default=250)
    g.add_argument("--eval-tokens", type=int, default=80 * 524288, help="validation tokens an evaluation reads")
    g.add_argument("--sample-every", type=int, default=2000)
    g.add_argument("--save-every", type=int, default=-1)
    return p.parse_args(argv)


def build_model(settings: dict[str, Any], depth: int, device: torch.device | str) -> GPT:
    """The model of a depth, its weights not set."""
    config = GPTConfig.from_depth(depth, vocab_size=settings["vocab_size"], sequence_len=settings["max_seq_len"],
                                  aspect_ratio=settings["aspect_ratio"], head_dim=settings["head_dim"],
                                  window_pattern=settings["window_pattern"])
    with torch.device("meta"):
        model = GPT(config)
    return model if device == "meta" else model.to_empty(device=device)


def resolve(settings: dict[str, Any], world_size: int, dtype: torch.dtype) -> tuple[dict[str, Any], Horizon, GPT]:
    """Settle what was left to the program. Returns (settings, horizon, the model on the meta device)."""
    model = build_model(settings, settings["depth"], "meta")
    scaling = [sum(m.num_scaling_params()[k] for k in ("transformer_matrices", "lm_head"))
               for m in (model, build_model(settings, REFERENCE_DEPTH, "meta"))]
    horizon = resolve_horizon(
        **{k: settings[k] for k in ("num_iterations", "target_flops", "target_param_data_ratio", "total_batch_size",
                                    "weight_decay")},
        sequence_len=settings["max_seq_len"], scaling_params=scaling[0], reference_scaling_params=scaling[1],
        flops_per_token=model.estimate_flops())
    rows = horizon.total_batch_size // settings["max_seq_len"]
    lanes = default_lanes(rows) if settings["lanes"] == -1 else settings["lanes"]
    if lanes < 1:
        raise ValueError(f"--lanes: got {lanes}, expected at least 1 (or -1 for automatic)")
    if settings["tokenizer_threads"] < 1:
        raise ValueError(f"--tokenizer-threads: got {settings['tokenizer_threads']}, expected at least 1")
    leaves = default_leaves(world_size, lanes) if settings["leaves"] == -1 else settings["leaves"]
    if leaves < 1 or leaves & (leaves - 1) or leaves > lanes:
        raise ValueError(f"--leaves: got {leaves}, expected a power of two, at most the {lanes} lanes")
    Layout(lanes, rows, settings["device_batch_size"], 0, world_size, leaves)  # says what does not fit
    return {**settings, "total_batch_size": horizon.total_batch_size, "lanes": lanes, "leaves": leaves,
            "dtype": str(dtype).removeprefix("torch.")}, horizon, model


def introduce(settings: dict[str, Any], derived: dict[str, Any], loader: DataLoader, world_size: int) -> None:
    """Print what is about to run."""
    print0(json.dumps(settings, indent=2))
    for name, value in derived.items():
        print0(f"{name:32s} {value:,}" if isinstance(value, int) else f"{name:32s} {value}")
    layout = loader.layout
    print0(f"step: {layout.rows_per_step} rows from {layout.V} lanes; {world_size} process(es) x "
           f"{loader.micro_batches_per_step} micro-batch(es) of {layout.device_batch_size} rows; {layout.K} leaves")
    if layout.K % world_size:
        print0(f"note: {world_size} processes do not divide {layout.K} leaves: same data, but other bits than with a "
               f"number that does")
    if layout.dead_share > 0.1:
        print0(f"note: {layout.dead_share:.0%} of the computed rows are dead; a number of processes and a "
               f"--device-batch-size that divide {layout.rows_per_step} rows waste none")


def sample(model: GPT, tokenizer: RustBPETokenizer) -> list[str]:
    """A greedy continuation of each prompt."""
    engine, bos = Engine(model, tokenizer), tokenizer.get_bos_token_id()
    results = [engine.generate_batch(tokenizer.encode(prompt, prepend=bos), max_tokens=16, temperature=0.0)[0][0]
               for prompt in SAMPLE_PROMPTS]
    return [tokenizer.decode(tokens[1:]) for tokens in results]


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or go on, until the horizon. Raises ValueError and OSError for bad input; see README for exit codes."""
    args = parse_args(argv)
    setup_logging()
    _, rank, _, world_size, device = compute_init(args.device_type or autodetect_device_type())
    try:
        return train(args, rank, world_size, device)
    finally:
        compute_cleanup()


def train(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> int:
    # ---- the run: new, or the one that is there
    tokenizer = agree(lambda: get_tokenizer(args.tokenizer_dir))
    args.data_path = str(Path(args.data_path or DEFAULT_DATASET.data_dir).expanduser())
    args.model_tag = args.model_tag or f"d{args.depth}"
    run_dir = agree(lambda: run_path(args.model_tag))
    settings = {**vars(args), "vocab_size": tokenizer.get_vocab_size(), "tokenizer_fingerprint": tokenizer.fingerprint,
                "world_size": world_size, "packer_version": VERSION, "device_type": device.type}
    start = on_rank0(lambda: begin(run_dir, settings, resume=args.resume, force=args.force))
    for notice in start.notices:
        print0(f"changed: {notice}")
    dtype = agree(lambda: get_compute_dtype(device, start.settings["dtype"]))
    settings, horizon, model = agree(lambda: resolve(start.settings, world_size, dtype))
    if start.completed_steps >= horizon.num_iterations:
        print0(f"{run_dir}: completed ({start.checkpoint}), nothing to do; --model-tag NAME starts another run")
        return 0
    T, rows_per_step = settings["max_seq_len"], horizon.total_batch_size // settings["max_seq_len"]
    config: StreamConfig = agree(lambda: stream_config(settings))
    schedule = agree(lambda: Schedule(horizon.num_iterations, args.warmup_steps, args.warmdown_ratio,
                                      args.final_lr_frac, horizon.weight_decay_scaled))
    flops_per_token = model.estimate_flops()
    derived = {"num_iterations": horizon.num_iterations, "total_tokens": horizon.total_tokens,
               "tokens_per_step": horizon.total_batch_size, "flops_per_token": flops_per_token,
               "total_flops": float(flops_per_token * horizon.total_tokens),
               "batch_lr_scale": horizon.batch_lr_scale, "weight_decay_scaled": horizon.weight_decay_scaled,
               **{f"params_{k}": v for k, v in model.num_scaling_params().items()}}
    on_rank0(lambda: prepare(run_dir, start, settings, tokenizer, derived))
    data = open_data(run_dir)

    # ---- model, optimizer, loader: fresh, or as they were saved
    model.to_empty(device=device)
    model.init_weights(seed=args.seed, compute_dtype=dtype)
    scale = horizon.batch_lr_scale
    optimizer = model.setup_optimizer(
        unembedding_lr=args.unembedding_lr * scale, embedding_lr=args.embedding_lr * scale,
        scalar_lr=args.scalar_lr * scale, matrix_lr=args.matrix_lr * scale, weight_decay=horizon.weight_decay_scaled)
    progress, cursors, extra = Progress(), None, {"tokenizer_fingerprint": tokenizer.fingerprint, "wandb_id": None,
                                                  "K": settings["leaves"]}
    if start.checkpoint is not None:
        checkpoint = load_checkpoint(start.checkpoint, verify=False)
        checkpoint.check_architecture(vars(model.config))
        model.load_state_dict(checkpoint.model_state())
        optimizer.load_state(checkpoint.optimizer_state())
        progress, cursors = Progress(**checkpoint.trainer_state["progress"]), checkpoint.cursors
        extra["wandb_id"] = checkpoint.trainer_state["wandb_id"]
        print0(f"resuming from {start.checkpoint} at step {progress.step:,}")
    compiled: Any = torch.compile(model, dynamic=False) if (
        args.compile == "on" or (args.compile == "auto" and device.type == "cuda")) else model
    token_bytes = tokenizer.token_bytes()
    peak_flops = get_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else math.inf
    wandb_run = start_wandb(args.run, settings, extra, run_dir) if rank == 0 else DummyWandb()
    log = TrainLog(run_dir / "logs" / "train.jsonl", first_step=progress.step) if rank == 0 else None
    first_step = progress.step
    batch_changed = any("total_batch_size" in notice.replace("-", "_") for notice in start.notices)

    def event(name: str, **record: Any) -> None:
        if log is not None:
            log.write(event=name, step=progress.step, time=time.time(), **record)
        wandb_run.log({"step": progress.step, **{f"{name}/{k}": v for k, v in record.items()}})

    def checkpoint_now(name: str, status: str) -> None:
        began = time.perf_counter()
        path = save(run_dir, name, model=model, optimizer=optimizer, schedule=schedule, loader=loader,
                    progress=progress, status=status, extra=extra)
        print0(f"saved {path} in {time.perf_counter() - began:.1f} s")
        event("saved", checkpoint=name, status=status)

    loader = DataLoader(config, data.train, tokenizer=tokenizer, rows_per_step=rows_per_step,
                        device_batch_size=args.device_batch_size, device=device, rank=rank, world_size=world_size,
                        num_leaves=settings["leaves"], cursors=cursors, start_step=progress.step,
                        num_threads=args.tokenizer_threads)
    try:
        introduce(settings, derived, loader, world_size)
        event("started", world_size=world_size, device=device.type, torch=torch.__version__, derived=derived)
        # ---- the loop: look, save, step
        while True:
            last = progress.step >= horizon.num_iterations
            due = lambda every: every > 0 and progress.step % every == 0 and (
                progress.step > first_step or first_step == 0)
            if (due(args.eval_every) or last) and args.eval_every != 0:
                batches = validation_loader(data.val, tokenizer=tokenizer, T=T, num_tokens=args.eval_tokens,
                                            device_batch_size=args.device_batch_size, device=device, rank=rank,
                                            world_size=world_size, num_threads=args.tokenizer_threads)
                progress.note_val(evaluate_bpb(compiled, batches, None, token_bytes))
                print0(f"step {progress.step:05d} | validation bits per byte {progress.val_bpb:.6f}")
                event("val", bpb=progress.val_bpb)
            if rank == 0 and args.sample_every > 0 and (last or (due(args.sample_every) and progress.step > 0)):
                for text in sample(model, tokenizer):
                    print0(f"  > {text!r}")
            if last:
                checkpoint_now("final", "completed")
                break
            if due(args.save_every) and progress.step > first_step:
                checkpoint_now(f"checkpoint-{progress.step}", "running")

            # ---- one step
            began, waited = time.perf_counter(), loader.wait_s
            loss_sum = torch.zeros((), device=device)
            live = torch.zeros((), dtype=torch.int64, device=device)
            for _ in range(loader.micro_batches_per_step):
                batch = next(loader)
                loss = compiled(batch.inputs, batch.targets, loss_reduction="sum")
                (loss / horizon.total_batch_size).backward()
                loss_sum += loss.detach()
                live += (batch.targets >= 0).sum()
            totals = add_up(loss_sum, live, loader.digest)
            schedule.apply(optimizer, progress.step)
            grad_norm = float(optimizer.step(totals.grad_scale(horizon.total_batch_size)))
            model.zero_grad(set_to_none=True)
            loss_value, digest = totals.loss, totals.digest  # waits for the device
            step_s = time.perf_counter() - began
            if not (math.isfinite(loss_value) and math.isfinite(grad_norm)):
                raise ArithmeticError(f"step {progress.step}: the loss is {loss_value}, the gradient norm {grad_norm}")
            logged = None if log is None or batch_changed else log.digest_of(progress.step)
            if logged not in (None, digest):
                raise ValueError(f"step {progress.step}: its batch has digest {digest}, but had {logged} when this run "
                                 f"was there before: data or code changed; go back to what it was")
            report_step(progress, loss_value, grad_norm, step_s, loader.wait_s - waited, digest, schedule, horizon,
                        flops_per_token / (peak_flops * world_size), log, wandb_run)
            if progress.step == first_step + 1:
                gc.collect()
                gc.freeze()  # what set-up left is not looked at again
    except ArithmeticError as e:
        event("failed", reason=str(e))
        if rank != 0:
            raise SystemExit(1) from e  # all ranks know; one says so
        kept = next((f"{path} is kept" for path in list_checkpoints(run_dir)), "nothing was saved before it")
        raise ValueError(f"{e}; stopped, weights untouched by that step, and {kept}. Lower the learning rates in a new "
                         f"run (--model-tag NAME)") from e
    finally:
        loader.close()
        wandb_run.finish()
        if log is not None:
            log.close()
    print0(f"completed: {progress.tokens:,} tokens in {progress.train_time_s:,.1f} s of steps; validation bits per "
           f"byte {progress.first_val_bpb} -> {progress.val_bpb}; {run_dir}")
    return 0


def report_step(progress: Progress, loss: float, grad_norm: float, step_s: float, wait_s: float, digest: str,
                schedule: Schedule, horizon: Horizon, mfu_per_rate: float, log: TrainLog | None, wandb_run: Any
                ) -> None:
    """Count a step that is done, print its line, and log it."""
    step, tokens = progress.step, horizon.total_batch_size
    progress.step += 1
    progress.tokens += tokens
    progress.train_time_s += step_s
    progress.smooth_loss = 0.9 * progress.smooth_loss + 0.1 * loss
    smooth = progress.smooth_loss / (1 - 0.9**progress.step)
    eta_s = (horizon.num_iterations - progress.step) * progress.train_time_s / progress.step
    rate, lr = tokens / step_s, schedule.lr(step)
    print0(f"step {step:05d}/{horizon.num_iterations:05d} | loss {smooth:.6f} | lr {lr:.3f} | grad norm "
           f"{grad_norm:.4f} | {step_s * 1000:.1f} ms | {rate:,.0f} tok/s | mfu {100 * rate * mfu_per_rate:.1f}% | "
           f"data wait {wait_s * 1000:.1f} ms | eta {eta_s / 60:.1f} min")
    record = {"loss": loss, "smooth_loss": smooth, "lr": lr, "grad_norm": grad_norm, "step_s": step_s, "wait_s": wait_s,
              "tokens": progress.tokens, "tokens_per_s": rate, "mfu": rate * mfu_per_rate}
    if log is not None:
        log.write(step=step, digest=digest, **record)
    wandb_run.log({"step": step, **{f"train/{k}": v for k, v in record.items()}})


if __name__ == "__main__":
    run_main(main)
