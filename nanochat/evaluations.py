"""
What a run measures between its steps: bits per byte, samples, CORE, and each rank's own time.

Each function takes the `trainer.Trainer` of a run, prints one line and logs one event. To log
another value with an evaluation, add it to the event here.
"""

import contextlib
import time

import torch

from nanochat.common import StopAsked, print0
from nanochat.core_eval import evaluate_core, read_bundle, summary
from nanochat.dataloader import validation_loader, validation_prompts
from nanochat.dist import gather_all, gather_results
from nanochat.engine import Engine
from nanochat.loss_eval import evaluate_buckets, in_nats
from nanochat.run_stop import join_reasons
from nanochat.trainer import LONG_S, Stop, Trainer


def log_validation(run: Trainer) -> None:
    """Evaluate the model on validation data; print and log its bits per byte. Collective.

    The figures are those of all buckets together and of each one; nats per token if the tokenizer
    does not know bytes. Raises Stop on all ranks if a stop is requested while one of them waits for
    data.
    """
    settings = run.settings
    layout = run.loader.layout
    progress = run.progress
    run.dog.beat(progress.step, "evaluation", LONG_S)
    if progress.step == run.start.step:
        print0(f"start: the first evaluation, up to {settings.eval_tokens:,} tokens")
    batches = {}
    for bucket, source in run.data.val.items():
        batches[bucket] = validation_loader(
            source,
            tokenizer=run.data.tokenizer,
            T=settings.max_seq_len,
            num_tokens=settings.eval_tokens // len(run.data.val),
            device=run.loader.device,
            device_batch_size=settings.device_batch_size,
            rank=layout.rank,
            world_size=layout.world_size,
            num_leaves=settings.leaves,
            num_threads=settings.tokenizer_threads,
            with_doc_ids=settings.attention_mode != "causal",
        )
    try:
        value, by_bucket = evaluate_buckets(run.compiled, batches, run.data.tokenizer.token_bytes())
    except StopAsked:
        raise Stop(join_reasons(gather_all(run.stop.requested()))) from None
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
    run.journal.event("val", **record, buckets=by_bucket)


def log_samples(run: Trainer) -> None:
    """Print and log the model's greedy continuation of each validation prompt.

    Call it on rank 0 only.
    """
    tokenizer, texts = run.data.tokenizer, []
    engine = Engine(run.model, tokenizer)
    print0("samples: the most likely continuations of validation texts")
    for prompt in validation_prompts(run.data.val, tokenizer, run.settings.max_seq_len):
        run.dog.beat()
        [tokens], _ = engine.generate_batch(prompt, max_tokens=16, temperature=0.0)
        texts.append(tokenizer.decode(tokens[1:]))  # without <|bos|>
        print0(f"  {tokenizer.decode(prompt[1:])!r} -> {tokenizer.decode(tokens[len(prompt) :])!r}")
    run.journal.event("samples", texts=texts)


def log_core(run: Trainer) -> None:
    """Evaluate CORE; print it, log it and, under nanochat's names, send it to trackers. Collective.

    Raises Stop on all ranks, between two tasks, if a stop is requested.
    """
    step = run.progress.step
    settings = run.settings
    scores = []
    run.dog.beat(step, "CORE", LONG_S)
    is_rank0 = run.loader.layout.rank == 0
    tasks = gather_results(
        lambda: (
            read_bundle(settings.eval_bundle, settings.core_metric_max_per_task) if is_rank0 else []
        )
    )[0]
    for score in evaluate_core(run.model, run.data.tokenizer, tasks):
        scores.append(score)
        run.dog.beat(step, f"CORE after {score.task.label}", LONG_S)
        if any(reasons := gather_all(run.stop.requested())):
            raise Stop(join_reasons(reasons))
    result = summary(scores)
    print0(f"step {step:05d} | CORE metric {result['core_metric']:.4f} ({len(scores)} tasks)")
    run.journal.event("core", **result)


def log_ranks(run: Trainer, began: float) -> None:
    """Log how long each rank took for its own rows of a step. Collective.

    Called before the ranks wait for each other. The step began at `began` (time.perf_counter). Also
    logs the clock and power of each rank's GPU.
    """
    device, state = run.loader.device, dict[str, float]()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with contextlib.suppress(Exception):  # no nvidia-ml-py, or an old driver
            state = {
                "clock_mhz": torch.cuda.clock_rate(device),
                "power_w": torch.cuda.power_draw(device) / 1000,
            }
    run.journal.event("ranks", ranks=gather_all({"own_s": time.perf_counter() - began, **state}))
