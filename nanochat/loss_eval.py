"""
Bits per byte: how many bits the model needs for a byte of text, whatever its tokenizer.

    bpb = sum of -ln p(target) over counted targets  /  (ln 2 * sum of their bytes)

A target counts if its loss is on (not -100) and it stands for bytes of text: special tokens have
none. Where a tokenizer puts a blank of its own in front of every document, `token_bytes` of BOS is
-1, and takes that byte off the target behind it. Unlike loss per token, this compares vocabularies.
It is a ratio of two sums over the whole set, not a mean of batch means, so it does not depend on
how rows are dealt to batches and ranks. With 1 for every token it is bits per token: `in_nats`.

The sums are exact in their order, too: each row is summed by itself in float64 on the CPU, and rows
are added by `math.fsum`, whose result is the rounded true sum. So order, batch size and number of
ranks cannot change a bit of it. All ranks' row sums travel for that: one number for thousands of
tokens. Until then losses stay on the device, 4 bytes a token, so that it is waited for once a pass.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from nanochat.common import StopAsked, print0
from nanochat.dist import gather_all, gather_results
from nanochat.lifecycle import join_reasons

NO_BYTES = ("nothing to evaluate: no target stands for bytes of text; "
            "check the validation data and `steps`")


def evaluate_bpb(model: Any, batches: Iterable[Any], steps: int | None, token_bytes: Any) -> float:
    """Bits per byte of `model` over `steps` batches (None: until there are no more), all ranks'
    batches together.

    model: called as model(x, y, loss_reduction="none") -> losses in nats, (B, T) or flat; for a
    batch with `doc_ids` also with masks=model.masks(doc_ids). batches: yields (x, y, ...) or
    objects with .inputs and .targets, (B, T) int64, targets of -100 off. token_bytes: (vocab_size,)
    integers, bytes of each token's text, 0 for special tokens; one below zero is added to the bytes
    of the target behind it.

    Collective when torch.distributed is initialized; ranks may have different numbers of batches,
    or none. Raises ValueError on all ranks if no rank has a byte. The model's train or eval mode is
    left alone.
    """
    return _bits_per_byte(*_measure(model, islice(batches, steps), token_bytes))


def evaluate_buckets(model: Any, buckets: Mapping[str, Iterable[Any]], token_bytes: Any,
                     ) -> tuple[float, dict[str, float]]:
    """(bits per byte of all buckets' batches together, of each bucket); see `evaluate_bpb`."""
    measured = {name: _measure(model, batches, token_bytes) for name, batches in buckets.items()}
    all_nats = [nats for row_nats, _ in measured.values() for nats in row_nats]
    together = _bits_per_byte(all_nats, sum(num_bytes for _, num_bytes in measured.values()))
    return together, {name: _bits_per_byte(*of_bucket) for name, of_bucket in measured.items()}


def in_nats(bits: float) -> float:
    """Bits per token, which is what all of this gives for a tokenizer that does not know bytes, as
    nats per token: the loss."""
    return bits * math.log(2)


def _bits_per_byte(row_nats: Iterable[float], num_bytes: int) -> float:
    if num_bytes == 0:
        raise ValueError(NO_BYTES)
    return math.fsum(row_nats) / (math.log(2) * num_bytes)


@torch.no_grad()
def _measure(model: Any, batches: Iterable[Any], token_bytes: Any) -> tuple[list[float], int]:
    """(nats of each row, bytes of all of them), of all ranks. Collective; raises on all ranks if it
    fails on one."""
    everyone = gather_results(lambda: _measure_own(model, batches, token_bytes))
    return [nats for row_nats, _ in everyone for nats in row_nats], sum(num_bytes for _, num_bytes in everyone)


def _measure_own(model: Any, batches: Iterable[Any], token_bytes: Any) -> tuple[list[float], int]:
    """`_measure` of this rank's batches."""
    counted: list[Tensor] = []  # losses of each batch, (B, T), 0 where a target does not count
    sizes: list[Tensor] = []  # bytes of each batch
    for batch in batches:
        x, y = (batch.inputs, batch.targets) if hasattr(batch, "targets") else batch[:2]
        doc_ids = getattr(batch, "doc_ids", None)
        extra = {} if doc_ids is None else {"masks": model.masks(doc_ids, getattr(batch, "num_docs", None))}
        losses: Tensor = model(x, y, loss_reduction="none", **extra)
        token_bytes = torch.as_tensor(token_bytes, dtype=torch.int64, device=y.device)
        of_targets = torch.where(y >= 0, token_bytes[y.clamp(min=0)], 0).clamp(min=0)
        counted.append(losses.view(y.shape).masked_fill(of_targets == 0, 0))
        off = torch.where(of_targets > 0, token_bytes[x], 0).clamp(max=0)
        sizes.append(of_targets.sum() + off.sum())
    # the device is waited for here and not in the loop, where it would wait for the next batch
    row_nats = [nats for losses in counted for nats in losses.cpu().double().sum(dim=1).tolist()]
    return row_nats, sum(map(int, sizes))


# ---- between the steps of a run ------------------------------------------------------------------

def log_validation(run: Any) -> None:
    """Collective. Bits per byte of a model in training, a `trainer.Trainer`, on validation data: of each
    bucket and of all, printed and logged. Nats per token if the tokenizer does not know bytes. Raises
    Stop on all ranks if one of them is asked to stop while it waits for data."""
    from nanochat.dataloader import validation_loader
    from nanochat.trainer import LONG_S, Stop

    settings, layout, progress = run.settings, run.loader.layout, run.progress
    run.dog.beat(progress.step, "evaluation", LONG_S)
    if progress.step == run.start.step:
        print0(f"start: the first evaluation, of {settings.eval_tokens:,} tokens")
    batches = {bucket: validation_loader(
        source, tokenizer=run.data.tokenizer, T=settings.max_seq_len,
        num_tokens=settings.eval_tokens // len(run.data.val), device=run.loader.device,
        device_batch_size=settings.device_batch_size, rank=layout.rank, world_size=layout.world_size,
        num_leaves=settings.leaves, num_threads=settings.tokenizer_threads,
        with_doc_ids=settings.attention_mode != "causal") for bucket, source in run.data.val.items()}
    try:
        value, by_bucket = evaluate_buckets(run.compiled, batches, run.data.tokenizer.token_bytes())
    except StopAsked:
        raise Stop(join_reasons(gather_all(run.stop.requested()))) from None
    unit, record = "bits per byte", {"bpb": value}
    if run.data.tokenizer.knows_bytes:
        progress.note_val(value)
    else:
        unit, value = "loss", in_nats(value)
        by_bucket = {name: in_nats(bits) for name, bits in by_bucket.items()}
        record = {"bpb": None, "loss": value}  # type: ignore[dict-item]
    parts = f" ({', '.join(f'{k} {v:.6f}' for k, v in by_bucket.items())})" if len(by_bucket) > 1 else ""
    print0(f"step {progress.step:05d} | validation {unit} {value:.6f}{parts}")
    run.journal.event("val", **record, buckets=by_bucket)
