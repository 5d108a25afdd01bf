"""Bits per byte equals its definition, independent of batches and ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.loss_eval import evaluate_bpb
from tests.gloo import on_ranks
from tests.toy import examples

TOKEN_BYTES = torch.tensor([1, 2, 3, 7, 1, 4, 0, 0])  # the last two are special


def table_model(x, y, *, loss_reduction):
    """The loss of a target is a fixed function of input and target, independent of the batch."""
    assert loss_reduction == "none"
    return torch.where(y >= 0, torch.sin(x * 12.9898 + y * 78.233).abs() * 5 + 1e-3, 0.0).float()


def make_rows(seed, num_rows, T):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(8, (num_rows, T), generator=rng)
    y = torch.randint(8, (num_rows, T), generator=rng)
    return x, y.masked_fill(torch.rand(y.shape, generator=rng) < 0.2, -100)


def written_out(x, y):
    """The definition, computed token by token."""
    nats = table_model(x, y, loss_reduction="none").flatten().tolist()
    counted = [
        (n, TOKEN_BYTES[t].item())
        for n, t in zip(nats, y.flatten().tolist(), strict=True)
        if t >= 0 and TOKEN_BYTES[t] > 0
    ]
    return math.fsum(n for n, _ in counted) / (math.log(2) * sum(size for _, size in counted))


def in_batches(x, y, B):
    return list(zip(x.split(B), y.split(B), strict=True))


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 12), st.integers(1, 40))
@settings(max_examples=examples(1))
def test_it_equals_the_definition_with_the_same_bits_for_any_batch_size(seed, num_rows, B, T):
    x, y = make_rows(seed, num_rows, T)
    y[0, 0] = 1
    bpb = evaluate_bpb(table_model, in_batches(x, y, B), None, TOKEN_BYTES)
    assert bpb == pytest.approx(written_out(x, y), rel=1e-14)
    assert bpb == evaluate_bpb(table_model, in_batches(x, y, num_rows)[::-1], None, TOKEN_BYTES)
    assert bpb == evaluate_bpb(table_model, in_batches(x.flip(0), y.flip(0), B), None, TOKEN_BYTES)


def test_the_sum_of_rows_is_rounded_once():
    # a sum in float64 from left to right would lose a 1
    nats = torch.tensor([1.0, 2.0**53, 1.0, 1.0])
    y = torch.tensor([0, 1, 2, 3])[:, None]
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [3, 2, 1, 0]):
        bpb = evaluate_bpb(lambda x, y, loss_reduction: nats[y], [(y, y[order])], None, TOKEN_BYTES)
        assert bpb == (2.0**53 + 4) / (math.log(2) * 13)  # 2^53 + 3, rounded to even


def test_exactly_steps_batches_are_drawn():
    x, y = make_rows(0, 6, 10)
    batches = iter(in_batches(x, y, 2))
    assert evaluate_bpb(table_model, batches, 2, TOKEN_BYTES) == pytest.approx(
        written_out(x[:4], y[:4]), rel=1e-14
    )
    assert len(list(batches)) == 1


@pytest.mark.parametrize("y", [torch.full((2, 3), -100), torch.full((2, 3), 7)])
def test_a_set_without_bytes_is_an_error(y):
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate_bpb(table_model, [(torch.zeros_like(y), y)], None, TOKEN_BYTES)


def evaluate_as_rank(rank, world_size):
    """Rank 0 has all batches, the other one has none."""
    batches = in_batches(*make_rows(4, 7, 30), 2)
    bpb = evaluate_bpb(table_model, batches if rank == 0 else [], None, TOKEN_BYTES)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate_bpb(table_model, [], None, TOKEN_BYTES)
    return bpb


def test_ranks_with_unequal_shares_get_the_bits_of_one_process(tmp_path):
    values = on_ranks(evaluate_as_rank, [2], tmp_path)[2]
    assert values == [evaluate_as_rank(0, 1)] * 2
