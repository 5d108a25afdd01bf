"""Clipped and skipped steps are the same on any number of processes, and in a run that is killed
and moved."""

import math
from unittest import mock

import pytest
import torch

from nanochat import spikes
from nanochat.gpt import GPT, GPTConfig


def test_limits_are_robust():
    window = []
    for i in range(200):
        assert spikes.limits(window, 5.0) == (math.inf, math.inf) or len(window) >= spikes.ENOUGH
        window = spikes.remember(window, 3.0 + 0.01 * (i % 7), 1.0 + 0.1 * (i % 3))
    assert len(window) == spikes.WINDOW
    before = spikes.limits(window, 5.0)
    assert before == pytest.approx((3.03 + 5 * 1.4826 * 0.02, 1.1 + 5 * 1.4826 * 0.1))
    assert spikes.limits(spikes.remember(window, 99.0, 99.0), 5.0) == pytest.approx(
        before, rel=0.01
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [8192, 16])
def test_z_loss_changes_gradients_and_not_the_loss(reduction, chunk):
    config = GPTConfig.from_depth(1, vocab_size=96, sequence_len=16, aspect_ratio=24, head_dim=12)
    tokens = torch.randint(96, (3, 17), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].masked_fill(tokens[:, 1:] < 20, -100)
    results = []
    for z_loss in (0.0, 0.1):
        model = GPT(config, z_loss=z_loss)
        model.init_weights(seed=1, compute_dtype=torch.float32)
        torch.nn.init.normal_(
            model.lm_head.weight, std=0.1, generator=torch.Generator().manual_seed(2)
        )
        with mock.patch("nanochat.gpt.LOSS_CHUNK", chunk):
            loss = model(tokens[:, :-1], targets, loss_reduction=reduction)
            loss.sum().backward()
        results.append((loss.detach(), model.lm_head.weight.grad))
    (plain, before), (with_z_loss, after) = results
    assert torch.equal(plain, with_z_loss)
    logits = model(tokens[:, :-1])
    z = (
        0.1
        * logits.logsumexp(-1).square()[targets >= 0].sum()
        / (1 if reduction != "mean" else (targets >= 0).sum())
    )
    model.zero_grad()
    z.backward()
    assert before is not None and after is not None and model.lm_head.weight.grad is not None
    torch.testing.assert_close(after - before, model.lm_head.weight.grad, rtol=1e-3, atol=1e-5)
