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
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanochat.attention import MODES
from nanochat.checkpoint import list_checkpoints, load_checkpoint
from nanochat.common import (
    EXIT_HALTED,
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    get_compute_dtype,
    get_peak_flops,
    print0,
    run_main,
    setup_logging,
)
from nanochat.dataloader import DataLoader, Dry, validation_loader
from nanochat.dataset import DEFAULT_DATASET
from nanochat.engine import Engine
from nanochat.gpt import GPT
from nanochat.job import command_settings, derive, find_tokenizer, introduce, resolve
from nanochat.loss_eval import evaluate_buckets
from nanochat.order import LAYOUTS
from nanochat.ranks import agree, gather_all, on_rank0
from nanochat.run_data import open_data, stream_config
from nanochat.run_dir import clean_stale, run_path
from nanochat.run_plan import rehearse
from nanochat.schedule import Schedule
from nanochat.sources import FORMATS
from nanochat.start_run import begin, prepare
from nanochat.tokenizer import RustBPETokenizer
from nanochat.trainer import Halt, Progress, add_up, save
from nanochat.watch import Watch

WAY_ON = "--allow-bucket-exhaustion goes on without what ran dry, --allow-curriculum-change with another curriculum"
SAMPLE_PROMPTS = ("The capital of France is", "The opposite of cold is", "Water boils when", "import os\n",
                  "If 3*x + 2 = 11, then x is")


def parser() -> argparse.ArgumentParser:
    """The flags; scripts.validate takes the same."""
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
    g.add_argument("--attention-mode", default="causal", choices=list(MODES), help="the last two keep it in a document")
    g.add_argument("--window-pattern", default="SSSL", help="attention windows, tiled over layers: L full, S a quarter")
    g = p.add_argument_group("data")
    g.add_argument("--data-path", help=f"folder of text files (default: the {DEFAULT_DATASET.name} download)")
    g.add_argument("--val-path", help="validation files (default: the last file below --data-path)")
    g.add_argument("--data-format", default="text", choices=list(FORMATS), help="text: parquet, jsonl, jsonl.gz | "
                   "shards: what scripts.tok_shards makes")
    g.add_argument("--curriculum", help="YAML file: which buckets (subfolders of the data) are mixed when")
    g.add_argument("--allow-bucket-exhaustion", action="store_true", help="go on without a bucket that has run dry")
    g.add_argument("--allow-curriculum-change", action="store_true", help="take up another curriculum at a restart")
    g.add_argument("--plan", default="error", choices=["error", "warn", "off"], help="where the data end before "
                   "the run does, which is computed first: do not start | warn | do not compute it")
    g.add_argument("--strict", action="store_true", help="a broken line of jsonl is an error")
    g.add_argument("--tokenizer-dir", help="default: <base dir>/tokenizer, where scripts.tok_train puts it")
    g.add_argument("--tokenizer-threads", type=int, default=4, help="threads per process that read and tokenize")
    g.add_argument("--packing", default="bestfit", choices=list(LAYOUTS), help="how documents become rows")
    g.add_argument("--no-pack", dest="pack", action="store_false", help="with --packing binned: one entry a row")
    g.add_argument("--long-docs", default="crop", choices=["crop", "split"], help="what does not fit: dropped or later")
    g.add_argument("--overlap", type=int, default=64, help="context tokens repeated before a split document's rest")
    g.add_argument("--buffer-size", type=int, default=128, help="documents that wait in a lane for a row they fit")
    g.add_argument("--lanes", type=int, default=-1, help="V; -1: the largest divisor of the rows per step up to 64")
    g.add_argument("--leaves", type=int, default=-1, help="K; -1: the next power of two >= the number of processes")
    g = p.add_argument_group("horizon (the first that is set counts; a curriculum stands before the ratio)")
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
    g = p.add_argument_group("looking and saving (every N steps and at the end; -1: never, or saving at the end only)")
    g.add_argument("--eval-every", type=int, default=250)
    g.add_argument("--eval-tokens", type=int, default=80 * 524288, help="validation tokens an evaluation reads")
    g.add_argument("--sample-every", type=int, default=2000)
    g.add_argument("--save-every", type=int, default=-1)
    return p


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of a command line, by default of this one."""
    return parser().parse_args(argv)


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
    args.data_path = str(Path(args.data_path or DEFAULT_DATASET.data_dir).expanduser())
    tokenizer = agree(lambda: find_tokenizer(args.tokenizer_dir, args.data_path))
    args.model_tag = args.model_tag or f"d{args.depth}"
    run_dir = agree(lambda: run_path(args.model_tag))
    settings = agree(lambda: command_settings(vars(args), tokenizer, world_size, device.type))
    on_rank0(lambda: clean_stale(run_dir))
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
    config = agree(lambda: stream_config(settings))
    schedule = agree(lambda: Schedule(horizon.num_iterations, args.warmup_steps, args.warmdown_ratio,
                                      args.final_lr_frac, horizon.weight_decay_scaled))
    derived = derive(horizon, model)
    plan = None if args.plan == "off" else on_rank0(lambda: rehearse(run_dir, start, settings, tokenizer,
                                                                     horizon.num_iterations))
    on_rank0(lambda: prepare(run_dir, start, settings, tokenizer, derived, plan))
    data = agree(lambda: open_data(run_dir, as_stored=config.layout == "binned"))

    # ---- model, optimizer, progress: fresh, or as they were saved
    model.to_empty(device=device)
    model.init_weights(seed=args.seed, compute_dtype=dtype)
    scale = horizon.batch_lr_scale
    optimizer = model.setup_optimizer(
        unembedding_lr=args.unembedding_lr * scale, embedding_lr=args.embedding_lr * scale,
        scalar_lr=args.scalar_lr * scale, matrix_lr=args.matrix_lr * scale, weight_decay=horizon.weight_decay_scaled)
    progress, cursors, wandb_id = Progress(), None, None
    if start.checkpoint is not None:
        checkpoint = load_checkpoint(start.checkpoint, verify=False)
        checkpoint.check_architecture(vars(model.config))
        model.load_state_dict(checkpoint.model_state())
        optimizer.load_state(checkpoint.optimizer_state())
        progress, cursors = Progress(**checkpoint.trainer_state["progress"]), checkpoint.cursors
        wandb_id = checkpoint.trainer_state["wandb_id"]
        print0(f"resuming from {start.checkpoint} at step {progress.step:,}")
    compiled: Any = torch.compile(model, dynamic=False) if (
        args.compile == "on" or (args.compile == "auto" and device.type == "cuda")) else model
    peak_flops = get_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else math.inf
    mfu_per_rate = model.estimate_flops() / (peak_flops * world_size)
    first_step, token_bytes = progress.step, tokenizer.token_bytes()
    bucket_ids = torch.arange(len(config.curriculum.buckets) if config.curriculum else 1, device=device)
    watch = Watch(run_dir, progress, rank=rank, run=args.run, settings=settings, wandb_id=wandb_id)
    loader = DataLoader(config, data.train, tokenizer=tokenizer, rows_per_step=horizon.total_batch_size // config.T,
                        device_batch_size=args.device_batch_size, device=device, rank=rank, world_size=world_size,
                        num_leaves=settings["leaves"], cursors=cursors, start_step=progress.step,
                        num_threads=args.tokenizer_threads, with_doc_ids=args.attention_mode != "causal",
                        drop_dry=settings["allow_bucket_exhaustion"], new_curriculum=start.changed)

    def due(every: int) -> bool:
        return every > 0 and progress.step % every == 0 and (progress.step > first_step or first_step == 0)

    def evaluate() -> None:
        batches = {bucket: validation_loader(
            source, tokenizer=tokenizer, T=config.T, num_tokens=args.eval_tokens // len(data.val), device=device,
            device_batch_size=args.device_batch_size, rank=rank, world_size=world_size,
            num_threads=args.tokenizer_threads, with_doc_ids=args.attention_mode != "causal")
            for bucket, source in data.val.items()}
        bpb, by_bucket = evaluate_buckets(compiled, batches, token_bytes)
        progress.note_val(bpb)
        told = f" ({', '.join(f'{k} {v:.6f}' for k, v in by_bucket.items())})" if len(by_bucket) > 1 else ""
        print0(f"step {progress.step:05d} | validation bits per byte {bpb:.6f}{told}")
        watch.event("val", bpb=bpb, buckets=by_bucket)

    def checkpoint_now(name: str, status: str, **more: Any) -> None:
        began = time.perf_counter()
        path = save(run_dir, name, model=model, optimizer=optimizer, schedule=schedule, loader=loader,
                    progress=progress, status=status, extra={"tokenizer_fingerprint": tokenizer.fingerprint,
                                                             "wandb_id": watch.wandb_id, "K": settings["leaves"],
                                                             "curriculum": settings["curriculum"], **more})
        print0(f"saved {path} in {time.perf_counter() - began:.1f} s")
        watch.event("saved", checkpoint=name, status=status)

    def one_step() -> None:
        began, waited, dry = time.perf_counter(), loader.wait_s, ""
        nats, live = torch.zeros((2, len(loader.buckets)), device=device)
        try:
            for _ in range(loader.micro_batches_per_step):
                batch = next(loader)
                losses = compiled(batch.inputs, batch.targets, loss_reduction="none", masks=model.masks(batch.doc_ids))
                losses = losses.sum(dim=1)
                (losses.sum() / horizon.total_batch_size).backward()
                of_bucket = batch.buckets[:, None] == bucket_ids
                nats += (losses.detach()[:, None] * of_bucket).sum(dim=0)
                live += ((batch.targets >= 0).sum(dim=1)[:, None] * of_bucket).sum(dim=0)
        except Dry as e:
            dry = str(e)
        totals = add_up(nats, live, dropped=list(loader.dropped().values()), digest=loader.digest, dry=bool(dry))
        if totals.dry:
            raise Halt(next(filter(None, gather_all(dry))))
        schedule.apply(optimizer, progress.step)
        grad_norm = float(optimizer.step(totals.grad_scale(horizon.total_batch_size)))  # waits for the device
        model.zero_grad(set_to_none=True)
        if not (math.isfinite(totals.loss) and math.isfinite(grad_norm)):
            raise ArithmeticError(f"step {progress.step}: the loss is {totals.loss}, the gradient norm {grad_norm}")
        watch.check_digest(totals.digest, tokens=horizon.total_batch_size)
        watch.note_dropped(dict(zip(loader.buckets, totals.dropped())))
        by_bucket = dict(zip(loader.buckets, totals.bucket_losses())) if len(loader.buckets) > 1 else {}
        watch.step(schedule, tokens=horizon.total_batch_size, loss=totals.loss, grad_norm=grad_norm,
                   digest=totals.digest, step_s=time.perf_counter() - began, wait_s=loader.wait_s - waited,
                   mfu_per_rate=mfu_per_rate, bucket_loss=by_bucket)

    # ---- the loop: look, save, step
    try:
        introduce(settings, derived, loader.layout)
        if start.changed:
            watch.event("curriculum", curriculum=settings["curriculum"])
        watch.event("started", world_size=world_size, device=device.type, torch=torch.__version__, derived=derived)
        while True:
            last = progress.step >= horizon.num_iterations
            if args.eval_every > 0 and (last or due(args.eval_every)):
                evaluate()
            if rank == 0 and args.sample_every > 0 and (last or (due(args.sample_every) and progress.step > 0)):
                for text in sample(model, tokenizer):
                    print0(f"  > {text!r}")
            if last:
                checkpoint_now("final", "completed")
                break
            if due(args.save_every) and progress.step > first_step:
                checkpoint_now(f"checkpoint-{progress.step}", "running")
            one_step()
            if progress.step == first_step + 1:
                gc.collect()
                gc.freeze()  # what set-up left is not looked at again
    except Halt as e:
        checkpoint_now(f"checkpoint-{progress.step}", "halted", halted=str(e))
        watch.event("halted", reason=str(e))
        print0(f"halted: {e}; {WAY_ON}")
        return EXIT_HALTED
    except ArithmeticError as e:
        watch.event("failed", reason=str(e))
        if rank != 0:
            raise SystemExit(1) from e  # all ranks know; one says so
        kept = next((f"{path} is kept" for path in list_checkpoints(run_dir)), "nothing was saved before it")
        raise ValueError(f"{e}; stopped, weights untouched by that step, and {kept}. Lower the learning rates in a new "
                         f"run (--model-tag NAME)") from e
    finally:
        loader.close()
        watch.close()
    bpb = "" if progress.val_bpb is None else (f"; validation bits per byte {progress.first_val_bpb:.6f} -> "
                                               f"{progress.val_bpb:.6f}")
    print0(f"completed: {progress.tokens:,} tokens in {progress.train_time_s:,.1f} s of steps{bpb}; {run_dir}")
    return 0


if __name__ == "__main__":
    run_main(main)
