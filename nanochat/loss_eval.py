"""Bits per byte: how many bits a model needs per byte of text, which makes models with different
tokenizers comparable.

    bpb = sum of -ln p(target) over counted targets  /  (ln 2 * sum of their bytes)

A target counts if it is not masked (-100) and its token has bytes of text, unlike special tokens.
If a tokenizer inserts a space at the start of every document, `token_bytes` of BOS is -1, which
subtracts that byte from the next target. Bits per byte is a ratio of two sums over the whole set,
not a mean of batch means, so it does not depend on how rows are dealt to batches and ranks. With 1
byte for every token, the result is bits per token (see `in_nats`).

The sums do not depend on order either: each row is summed separately in float64 on the CPU, and
`math.fsum` adds the rows and rounds the true sum once. So order, batch size and number of ranks do
not change a single bit. To that end, ranks exchange the sums of all rows, one number per row.
Losses stay on the device until the end (4 bytes per token), so the host waits for the device once
per pass.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nanochat.dist import gather_results


class Predicts(Protocol):
    """A language model, such as `nanochat.gpt.GPT`."""

    def __call__(self, x: Tensor, y: Tensor, *, loss_reduction: str) -> Tensor:
        """The losses, (B * T,) or (B, T), of targets y (B, T) after inputs x (B, T)."""


def evaluate_bpb(
    model: Predicts,
    batches: Iterable[Any],
    steps: int | None,
    token_bytes: Tensor | Sequence[int],
) -> float:
    """Bits per byte of `model` over the batches of all ranks together.

    steps: evaluate the first `steps` batches of each rank (None: all).
    """
    together, _ = evaluate_buckets(model, {"": islice(batches, steps)}, token_bytes)
    return together


@torch.no_grad()
def evaluate_buckets(
    model: Predicts,
    buckets: Mapping[str, Iterable[Any]],
    token_bytes: Tensor | Sequence[int],
) -> tuple[float, dict[str, float]]:
    """(bits per byte of all buckets' batches together, bits per byte of each bucket).

    See `evaluate_bpb`.
    """
    by_bucket: dict[str, list[Measured]] = {}  # what each rank has measured
    for name, batches in buckets.items():
        by_bucket[name] = gather_results(partial(_measure_own, model, batches, token_bytes))
    everything = list(chain.from_iterable(by_bucket.values()))
    each_bucket = {name: _bits_per_byte(by_rank) for name, by_rank in by_bucket.items()}
    return _bits_per_byte(everything), each_bucket


def in_nats(bits: float) -> float:
    """Convert bits per token to nats per token, the loss.

    With a tokenizer that does not know bytes, this module measures bits per token.
    """
    return bits * math.log(2)


class NothingToEvaluate(ValueError):
    """No row has a target with a loss."""


class Measured(NamedTuple):
    """What a rank has measured of its batches."""

    row_nats: list[float]  # the sum of each row's losses
    num_bytes: int  # of all rows


def _bits_per_byte(measured: Sequence[Measured]) -> float:
    """The ratio of the two sums over several results of `_measure_own`."""
    num_bytes = sum(part.num_bytes for part in measured)
    if num_bytes == 0:
        raise NothingToEvaluate(
            "nothing to evaluate: the validation data fills no row with text, or `steps` is 0; give it more "
            "text (--val-path, or for text files a larger --val-fraction), or use a smaller --max-seq-len"
        )
    nats = math.fsum(chain.from_iterable(part.row_nats for part in measured))
    return nats / (math.log(2) * num_bytes)


def _measure_own(
    model: Predicts, batches: Iterable[Any], token_bytes: Tensor | Sequence[int]
) -> Measured:
    """Measure this rank's batches: `MicroBatch`es, or tuples (x, y, ...) as nanochat's loaders give."""
    counted: list[Tensor] = []  # losses of each batch, (B, T), 0 where a target does not count
    sizes: list[Tensor] = []  # bytes of each batch
    for batch in batches:
        if hasattr(batch, "targets"):
            x, y = batch.inputs, batch.targets
        else:
            x, y = batch[:2]

        # the losses; documents see only themselves if the model separates them
        extra = {}
        doc_ids = getattr(batch, "doc_ids", None)
        if doc_ids is not None:
            num_docs = getattr(batch, "num_docs", None)
            extra["masks"] = model.masks(doc_ids, num_docs)  # type: ignore[attr-defined]
        losses = model(x, y, loss_reduction="none", **extra)

        # the bytes of each target; those without bytes, such as special tokens, do not count
        token_bytes = torch.as_tensor(token_bytes, dtype=torch.int64, device=y.device)
        own_bytes = token_bytes[y.clamp(min=0)]
        target_bytes = torch.where(y >= 0, own_bytes, 0).clamp(min=0)
        counts = target_bytes > 0
        counted.append(losses.view(y.shape).masked_fill(~counts, 0))

        # bytes that the previous token subtracts (negative entries)
        corrections = torch.where(counts, token_bytes[x], 0).clamp(max=0)
        sizes.append(target_bytes.sum() + corrections.sum())

    # wait for the device only here: after a wait inside the loop, it would be idle until the next
    # batch
    row_nats: list[float] = []
    for losses in counted:
        row_nats += losses.cpu().double().sum(dim=1).tolist()
    return Measured(row_nats, sum(map(int, sizes)))
