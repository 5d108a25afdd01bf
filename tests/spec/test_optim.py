"""MuonAdamW against torch.optim.AdamW, an SVD, and Muon in float64."""

import math

import numpy as np
import pytest
import torch

from nanochat.optim import (
    POLAR_EXPRESS,
    MuonAdamW,
    muon_update,
    muon_update_stack,
    polar_express,
)
from tests.toy import assert_same_sums
from tests.training import as_bytes


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adamw_group(params, **settings):
    return {
        "kind": "adamw",
        "params": params,
        "lr": 0.01,
        "betas": (0.8, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        **settings,
    }


def muon_group(params, **settings):
    return {
        "kind": "muon",
        "params": params,
        "lr": 0.02,
        "momentum": 0.95,
        "ns_steps": 5,
        "beta2": 0.9,
        "weight_decay": 0.0,
        **settings,
    }


def values(params):
    """{name or number: value} of parameters."""
    named = params.items() if isinstance(params, dict) else enumerate(params)
    return {name: param.detach().clone() for name, param in named}


# ---- the arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)])
def test_adamw_equals_torch(betas):
    shapes = [(31, 7), (5,), ()]
    ours, theirs = ([torch.nn.Parameter(randn(*shape)) for shape in shapes] for _ in range(2))
    optimizer = MuonAdamW([adamw_group(ours, betas=betas)])
    reference = torch.optim.AdamW(theirs, lr=0.01, betas=betas, eps=1e-8, weight_decay=0.1)
    for step in range(8):
        for group in [*optimizer.param_groups, *reference.param_groups]:
            group["lr"] = 0.01 * (step + 1)
        for a, b in zip(ours, theirs):
            a.grad = randn(*a.shape, seed=step)
            b.grad = a.grad * 3
        norm = optimizer.step(grad_scale=3.0)
        assert_same_sums(norm, torch.nn.utils.clip_grad_norm_(theirs, 1e9), terms=31 * 7)
        reference.step()
    for a, b in zip(ours, theirs):
        assert_same_sums(a, b, terms=8 * 10)  # steps, and operations in each


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96), (1, 17), (12, 1)])
def test_polar_express_equals_svd(shape):
    G = randn(*shape, seed=sum(shape)) * 37
    X = polar_express(G)
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    assert X.shape == G.shape and X.dtype == G.dtype
    inner = U.mT @ X @ Vh.mT  # diagonal if and only if X has G's singular vectors
    values = inner.diagonal()
    strong = 2e-3 * S.norm() < S  # five iterations cannot lift singular values near 0
    assert strong.sum() > 0.9 * len(S)
    assert (values[strong] - 1).abs().max() < 0.15
    assert (inner - torch.diag(values)).abs().max() < 1e-4
    assert torch.equal(polar_express(torch.zeros(shape)), torch.zeros(shape))


def muon_in_float64(param, grads, *, lr, weight_decay):
    """Muon with momentum 0.9 and beta2 0.8, written out in NumPy."""
    rows, cols = param.shape
    velocity, variance = np.zeros_like(param), np.zeros((rows, 1) if rows >= cols else (1, cols))
    for grad in grads:
        velocity = velocity + 0.1 * (grad - velocity)
        X = grad + 0.9 * (velocity - grad)
        norms = np.linalg.norm(X, axis=1, keepdims=True)
        X = X * (np.linalg.norm(X) / math.sqrt(rows)) / np.maximum(norms, 1e-6)
        X = X / (1.01 * np.linalg.norm(X) + 1e-6)
        for a, b, c in POLAR_EXPRESS:
            A = X @ X.T
            X = a * X + (b * A + c * A @ A) @ X
        X = X * math.sqrt(min(rows, cols)) / max(np.linalg.norm(X), 1e-6)
        variance = variance + 0.2 * (
            (X**2).mean(axis=1 if rows >= cols else 0, keepdims=True) - variance
        )
        scaled = X / np.sqrt(np.maximum(variance, 1e-10))
        scaled *= np.linalg.norm(X) / max(np.linalg.norm(scaled), 1e-10)
        decay = weight_decay * param * (param * scaled >= 0)
        param = param - lr * math.sqrt(max(1, rows / cols)) * (scaled + decay)
    return param


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-8])
@pytest.mark.parametrize("shape", [(6, 12), (40, 24), (24, 40)])
def test_muon_equals_the_formula_in_float64_also_for_tiny_gradients(shape, scale):
    """The floors of the norms affect tiny gradients, such as those of small gates."""
    grads = [
        randn(*shape, seed=step) * scale * torch.logspace(-1, 0, shape[0])[:, None]
        for step in range(4)
    ]
    param, start = randn(*shape, seed=9), randn(*shape, seed=9).double().numpy()
    state = (
        torch.zeros(shape),
        torch.zeros((shape[0], 1) if shape[0] >= shape[1] else (1, shape[1])),
    )
    for grad in grads:
        muon_update(
            param,
            grad,
            *state,
            lr=0.1,
            momentum=0.9,
            beta2=0.8,
            weight_decay=0.3,
            grad_scale=torch.ones(()),
            live=torch.ones(()),
        )
    expected, unscaled, undecayed = (
        muon_in_float64(start, [g.double().numpy() / by for g in grads], lr=0.1, weight_decay=decay)
        for by, decay in ((1, 0.3), (scale, 0.3), (1, 0))
    )
    np.testing.assert_allclose(param.numpy(), expected, rtol=0, atol=1e-4)
    assert np.abs(undecayed - expected).max() > 0.01
    assert scale == 1 or np.abs(unscaled - expected).max() > 0.01, "the case: the floors matter"


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (1, 12)])
def test_a_stack_of_matrices_is_updated_like_each_of_them(shape):
    def matrices(scale):
        return [randn(*shape, seed=seed) * scale**seed for seed in range(3)]

    of_neurons = (shape[0], 1) if shape[0] >= shape[1] else (1, shape[1])
    alone = (*map(matrices, (1, 0.1, 0.5)), [torch.rand(of_neurons) for _ in range(3)])
    stacked = [[tensor.clone() for tensor in tensors] for tensors in alone]
    settings = {
        "lr": 0.1,
        "momentum": 0.9,
        "beta2": 0.8,
        "weight_decay": 0.3,
        "grad_scale": torch.tensor(0.5),
        "live": torch.ones(()),
    }
    for tensors in zip(*alone):
        muon_update(*tensors, **settings)
    muon_update_stack(*stacked, **settings)
    for ours, theirs in zip(stacked, alone):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(stacked[1][2], matrices(0.1)[2]), "gradients stay"


# ---- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_non_finite_gradient_changes_nothing(bad):
    """Also at the first step, and if only the scaled norm overflows."""
    params = [torch.nn.Parameter(randn(12, 8)), torch.nn.Parameter(randn(5))]
    optimizer = MuonAdamW([muon_group(params[:1], weight_decay=0.1), adamw_group(params[1:])])
    for step in range(3):
        for param in params:
            param.grad = randn(*param.shape, seed=step)
        if step in (0, 2):
            params[1].grad[3] = bad
        before = as_bytes([values(params), optimizer.gather_state()])
        assert bool(optimizer.step(grad_scale=2.0).isfinite()) == (step == 1)
        after = as_bytes([values(params), optimizer.gather_state()])
        assert (before == after) == (step != 1)


def test_bad_groups_and_states_of_another_model_are_refused():
    matrix, vector = torch.nn.Parameter(randn(3, 4)), torch.nn.Parameter(randn(3))
    for groups, message in [
        ([muon_group([vector])], r"param_0: Muon takes matrices, got shape \(3,\)"),
        ([{"kind": "sgd", "params": [matrix]}], r"group 0 \(sgd\) lacks a known kind"),
        ([{"kind": "adamw", "params": [matrix], "lr": 0.1}], "lacks betas, eps, weight_decay"),
        (
            [adamw_group([torch.nn.Parameter(randn(3, 4).mT)])],
            "param_0: the tensor is not contiguous",
        ),
        ([muon_group([matrix], names=["a"]), adamw_group([vector], names=["a"])], "not unique"),
    ]:
        with pytest.raises(ValueError, match=message):
            MuonAdamW(groups)
    optimizer = MuonAdamW([muon_group([matrix], names=["w"]), adamw_group([vector], names=["b"])])
    state = optimizer.gather_state()
    state["state"]["w"]["momentum_buffer"] = torch.zeros(4, 3)
    state["state"]["c"] = state["state"].pop("b")
    with pytest.raises(
        ValueError,
        match=r"w.momentum_buffer: got \(4, 3\), expected \(3, 4\); b.exp_avg: got "
        r"nothing, expected \(3,\).*c.exp_avg_sq: got \(3,\), expected nothing",
    ):
        optimizer.load_state(state)
    with pytest.raises(ValueError, match="format 2, expected 1"):
        optimizer.load_state({"format": 2})
    with pytest.raises(RuntimeError, match="gather_state"):
        optimizer.state_dict()
