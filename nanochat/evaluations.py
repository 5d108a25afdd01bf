"""
What a run measures between its steps: bits per byte, samples, CORE, and each rank's own time.

Each function reports one event; to log another value with an evaluation, add it here.
"""

import contextlib
import time

import torch

from nanochat.common import print0
from nanochat.core_eval import evaluate_core, read_bundle, summary
from nanochat.dataloader import validation_loader, validation_prompts
from nanochat.dist import gather_all, gather_results
from nanochat.engine import Engine
from nanochat.loss_eval import evaluate_buckets, in_nats
from nanochat.run_guard import LONG_S, Guard
from nanochat.run_journal import Journal
from nanochat.start_run import Run
from nanochat.trainer import Training


def log_validation(run: Run, training: Training, guard: Guard, journal: Journal) -> None:
    """Collective. Evaluate the model on validation data, and print and log its bits per byte, for
    all buckets together and for each one; nats per token if the tokenizer does not know bytes.
    Raises Stop on all ranks if a stop is requested while one of them waits for data."""
    settings = run.settings
    layout = training.loader.layout
    progress = training.progress
    guard.beat(progress.step, "evaluation", LONG_S)
    if progress.step == run.step:
        print0(f"start: the first evaluation, up to {settings.eval_tokens:,} tokens")
    batches = {}
    for bucket, source in run.data.val.items():
        batches[bucket] = validation_loader(
            source,
            tokenizer=run.data.tokenizer,
            T=settings.max_seq_len,
            num_tokens=settings.eval_tokens // len(run.data.val),
            device=training.loader.device,
            device_batch_size=settings.device_batch_size,
            rank=layout.rank,
            world_size=layout.world_size,
            num_leaves=settings.leaves,
            num_threads=settings.tokenizer_threads,
            with_doc_ids=settings.attention_mode != "causal",
        )
    token_bytes = run.data.tokenizer.token_bytes()
    value, by_bucket = evaluate_buckets(training.compiled, batches, token_bytes)
    record: dict[str, float | None] = {"bpb": value}
    unit = "bits per byte"
    if run.data.tokenizer.knows_bytes:
        progress.record_val(value)
    else:
        unit, value = "loss", in_nats(value)
        by_bucket = {name: in_nats(bits) for name, bits in by_bucket.items()}
        record = {"bpb": None, "loss": value}
    each_bucket = ", ".join(f"{name} {bits:.6f}" for name, bits in by_bucket.items())
    parts = f" ({each_bucket})" if len(by_bucket) > 1 else ""
    print0(f"step {progress.step:05d} | validation {unit} {value:.6f}{parts}")
    journal.event("val", progress.step, **record, buckets=by_bucket)


def log_samples(run: Run, training: Training, guard: Guard, journal: Journal) -> None:
    """Print and log the model's greedy continuation of each validation prompt. Call it on rank 0
    only."""
    tokenizer, texts = run.data.tokenizer, []
    engine = Engine(training.model, tokenizer)
    print0("samples: the most likely continuations of validation texts")
    for prompt in validation_prompts(run.data.val, tokenizer, run.settings.max_seq_len):
        guard.beat()
        [tokens], _ = engine.generate_batch(prompt, max_tokens=16, temperature=0.0)
        texts.append(tokenizer.decode(tokens[1:]))  # without <|bos|>
        print0(f"  {tokenizer.decode(prompt[1:])!r} -> {tokenizer.decode(tokens[len(prompt) :])!r}")
    journal.event("samples", training.progress.step, texts=texts)


def log_core(run: Run, training: Training, guard: Guard, journal: Journal) -> None:
    """Collective. Evaluate CORE; print it, log it and, under nanochat's names, send it to the
    trackers. Raises Stop on all ranks, between two tasks, if a stop is requested."""
    step = training.progress.step
    settings = run.settings
    scores = []
    guard.beat(step, "CORE", LONG_S)
    is_rank0 = training.loader.layout.rank == 0
    tasks = gather_results(
        lambda: read_bundle(max_per_task=settings.core_metric_max_per_task) if is_rank0 else []
    )[0]
    for score in evaluate_core(training.model, run.data.tokenizer, tasks):
        scores.append(score)
        guard.beat(step, f"CORE after {score.task.label}", LONG_S)
        guard.stop_if_asked()
    result = summary(scores)
    print0(f"step {step:05d} | CORE metric {result['core_metric']:.4f} ({len(scores)} tasks)")
    journal.event("core", step, **result)


def log_ranks(training: Training, journal: Journal, began: float) -> None:
    """Collective, called before the ranks wait for each other. Log how long each rank took for its
    own rows of the step that began at `began` (time.perf_counter), and the clock and power of its
    GPU."""
    device = training.loader.device
    state = dict[str, float]()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with contextlib.suppress(Exception):  # no nvidia-ml-py, or an old driver
            state = {
                "clock_mhz": torch.cuda.clock_rate(device),
                "power_w": torch.cuda.power_draw(device) / 1000,
            }
    own = {"own_s": time.perf_counter() - began, **state}
    journal.event("ranks", training.progress.step, ranks=gather_all(own))
