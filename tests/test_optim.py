"""optim.py against torch.optim.AdamW, an SVD, and itself on 1, 2, 3 and 4 processes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from nanochat.optim import (
    POLAR_EXPRESS,
    MuonAdamW,
    Part,
    cautious_decay,
    lay_out,
    muon_update,
    polar_express,
    reduce_variance,
)
from tests import _optim_worker as worker
from tests import training


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adamw_group(params: list[torch.nn.Parameter], **settings: Any) -> dict[str, Any]:
    return {"kind": "adamw", "params": params, "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1,
            **settings}


def muon_group(params: list[torch.nn.Parameter], **settings: Any) -> dict[str, Any]:
    return {"kind": "muon", "params": params, "lr": 0.02, "momentum": 0.95, "ns_steps": 5, "beta2": 0.9,
            "weight_decay": 0.0, **settings}


# ---- the arithmetic -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)])
def test_adamw_equals_torch(betas: tuple[float, float]) -> None:
    shapes = [(31, 7), (5,), ()]
    ours = [torch.nn.Parameter(randn(*shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(randn(*shape)) for shape in shapes]
    optimizer = MuonAdamW([adamw_group(ours, betas=betas)])
    reference = torch.optim.AdamW(theirs, lr=0.01, betas=betas, eps=1e-8, weight_decay=0.1)
    for step in range(8):
        for group in [*optimizer.param_groups, *reference.param_groups]:
            group["lr"] = 0.01 * (step + 1)
        for a, b in zip(ours, theirs):
            a.grad = randn(*a.shape, seed=step)
            b.grad = a.grad * 3
        optimizer.step(grad_scale=3.0)
        reference.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_adamw_keeps_bfloat16_parameters_and_float32_state() -> None:
    param = torch.nn.Parameter(randn(9, 5).bfloat16())
    reference = torch.nn.Parameter(param.detach().float())
    optimizer, exact = MuonAdamW([adamw_group([param])]), MuonAdamW([adamw_group([reference])])
    param.grad = randn(9, 5, seed=1).bfloat16()
    reference.grad = param.grad.float()
    optimizer.step()
    exact.step()
    assert param.dtype == torch.bfloat16 and torch.equal(param, reference.bfloat16())
    assert all(tensor.dtype == torch.float32 for tensor in optimizer.state[param].values())


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96), (1, 17), (12, 1)])
def test_polar_express_equals_svd(shape: tuple[int, int]) -> None:
    G = randn(*shape, seed=sum(shape)) * 37
    X = polar_express(G)
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    assert X.shape == G.shape and X.dtype == G.dtype
    inner = U.mT @ X @ Vh.mT  # diagonal exactly if X has G's singular vectors
    gained = inner.diagonal()
    strong = 2e-3 * S.norm() < S  # five iterations cannot lift what is nearly zero
    assert strong.sum() > 0.9 * len(S)
    assert (gained[strong] - 1).abs().max() < 0.15
    assert (inner - torch.diag(gained)).abs().max() < 1e-4
    cosine = (X * (U @ Vh)).sum() / (X.norm() * (U @ Vh).norm())
    assert cosine > 0.98


def test_polar_express_ignores_scale_and_keeps_zero() -> None:
    G = randn(8, 20)
    torch.testing.assert_close(polar_express(G * 1e3), polar_express(G), rtol=1e-4, atol=1e-5)
    assert torch.equal(polar_express(torch.zeros(8, 20)), torch.zeros(8, 20))
    torch.testing.assert_close(polar_express(G.bfloat16()).float(), polar_express(G), rtol=0, atol=0.05)
    exact = torch.linalg.svd(G, full_matrices=False)
    longer = (polar_express(G, steps=8) - exact.U @ exact.Vh).norm()
    assert longer < (polar_express(G, steps=3) - exact.U @ exact.Vh).norm()


@pytest.mark.parametrize("shape", [(20, 8), (8, 20)])
def test_variance_reduction_keeps_the_norm_and_evens_out_neurons(shape: tuple[int, int]) -> None:
    scales = torch.logspace(-1, 1, 20)
    update = randn(*shape) * (scales[:, None] if shape[0] == 20 else scales[None, :])
    buffer = torch.zeros((20, 1) if shape[0] == 20 else (1, 20))
    for _ in range(3):
        reduced = reduce_variance(update, buffer, weight=0.5)
    neurons = reduced.norm(dim=1 if shape[0] == 20 else 0)
    torch.testing.assert_close(reduced.norm(), update.norm())
    torch.testing.assert_close(neurons, neurons.mean().expand(20), rtol=1e-3, atol=0)
    torch.testing.assert_close(buffer.flatten(), 0.875 * update.square().mean(dim=1 if shape[0] == 20 else 0))


def test_cautious_decay_only_shrinks_where_the_update_agrees() -> None:
    param, update = torch.tensor([[2.0, -2.0, 2.0, -2.0]]), torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    assert cautious_decay(param, update).tolist() == [[2.0, -2.0, 0.0, 0.0]]
    results = []
    for weight_decay in (0.0, 0.5):
        p = randn(16, 16)
        muon_update(p, randn(16, 16, seed=1), torch.zeros(16, 16), torch.zeros(16, 1), lr=0.1, momentum=0.9, beta2=0.9,
                    weight_decay=weight_decay)
        results.append(p)
    without, with_ = results
    agree = randn(16, 16) * (randn(16, 16) - without) >= 0
    assert 0 < agree.sum() < agree.numel()
    assert torch.equal(with_[~agree], without[~agree])
    torch.testing.assert_close(with_[agree], without[agree] - 0.1 * 0.5 * randn(16, 16)[agree])


def test_muon_step_has_the_norm_of_an_orthogonal_matrix_times_lr() -> None:
    for shape in ((32, 8), (8, 32), (16, 16)):
        param = torch.nn.Parameter(torch.zeros(shape))
        optimizer = MuonAdamW([muon_group([param], lr=0.1)])
        param.grad = randn(*shape)
        optimizer.step()
        expected = 0.1 * math.sqrt(max(1, shape[0] / shape[1])) * math.sqrt(min(shape))
        assert param.norm().item() == pytest.approx(expected, rel=1e-4)


def muon_in_float64(grad: np.ndarray, lr: float) -> np.ndarray:
    """The first step of Muon from a zero parameter without decay (momentum 0.9, beta2 0.9), written out in numpy."""
    rows, cols = grad.shape
    momentum = 0.1 * grad
    X = grad + 0.9 * (momentum - grad)
    norms = np.linalg.norm(X, axis=1, keepdims=True)
    X = X * (np.linalg.norm(X) / math.sqrt(rows)) / np.maximum(norms, 1e-6)
    X = X / (1.01 * np.linalg.norm(X) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    X = X * math.sqrt(min(rows, cols)) / max(np.linalg.norm(X), 1e-6)
    mean_square = 0.1 * (X**2).mean(axis=1 if rows >= cols else 0, keepdims=True)
    scaled = X / np.sqrt(np.maximum(mean_square, 1e-10))
    scaled *= np.linalg.norm(X) / max(np.linalg.norm(scaled), 1e-10)
    return -lr * math.sqrt(max(1, rows / cols)) * scaled


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-8])
@pytest.mark.parametrize("shape", [(6, 12), (40, 24), (24, 40)])
def test_the_floors_of_muons_norms(shape: tuple[int, int], scale: float) -> None:
    """Tiny gradients, as those of small gates, feel the floors: a tenth of them, or one that is added, would show."""
    grad = randn(*shape, seed=3) * scale * torch.logspace(-1, 0, shape[0])[:, None]
    param = torch.zeros(shape)
    state = torch.zeros(shape), torch.zeros((shape[0], 1) if shape[0] >= shape[1] else (1, shape[1]))
    muon_update(param, grad, *state, lr=0.1, momentum=0.9, beta2=0.9, weight_decay=0.0)
    wanted = muon_in_float64(grad.double().numpy(), 0.1)
    np.testing.assert_allclose(param.numpy(), wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    if scale < 1:  # the floors matter here
        unscaled = muon_in_float64((grad / scale).double().numpy(), 0.1)
        assert np.abs(unscaled - wanted).max() > 0.01 * np.abs(wanted).max()


def test_a_quadratic_converges() -> None:
    """min ||A X B - C||^2 + ||y - z||^2 with Muon on X, AdamW on y, learning rates decaying to 0."""
    A, B, target, z = randn(24, 12, seed=1), randn(10, 20, seed=2), randn(12, 10, seed=3), randn(7, seed=4)
    X, y = torch.nn.Parameter(torch.zeros(12, 10)), torch.nn.Parameter(torch.zeros(7))
    optimizer = MuonAdamW([muon_group([X], lr=0.2, momentum=0.9), adamw_group([y], lr=0.2, weight_decay=0.0)])
    losses = []
    for step in range(150):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / 150)
        loss = (A @ (X - target) @ B).square().mean() + (y - z).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 1e-3 * losses[0]


# ---- one process ----------------------------------------------------------------------------------------------------

def test_norm_is_torchs() -> None:
    params = [torch.nn.Parameter(randn(12, 8)), torch.nn.Parameter(randn(5))]
    optimizer = MuonAdamW([muon_group(params[:1]), adamw_group(params[1:])])
    for param in params:
        param.grad = randn(*param.shape, seed=7)
    norm = optimizer.step(grad_scale=4.0)
    reference = 4 * torch.nn.utils.clip_grad_norm_(params, 1e9)
    assert norm.dtype == torch.float32 and norm.ndim == 0
    torch.testing.assert_close(norm, reference)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_non_finite_gradient_changes_nothing(bad: float) -> None:
    """Also at the first step, and for finite gradients whose scaled norm overflows."""
    params = [torch.nn.Parameter(randn(12, 8)), torch.nn.Parameter(randn(5))]
    optimizer = MuonAdamW([muon_group(params[:1], weight_decay=0.1), adamw_group(params[1:])])
    for step in range(3):
        for param in params:
            param.grad = randn(*param.shape, seed=step)
        if step in (0, 2):
            params[1].grad[3] = bad
        before, state = [p.detach().clone() for p in params], optimizer.gather_state()
        assert bool(optimizer.step(grad_scale=2.0).isfinite()) == (step == 1)
        after = optimizer.gather_state()
        assert all(torch.equal(p, b) for p, b in zip(params, before)) == (step != 1)
        assert (after["step"] == state["step"]) == (step != 1)
        if step != 1:
            assert_states_equal(after, state)


def test_gradients_are_left_alone_and_none_is_zeros() -> None:
    params = [torch.nn.Parameter(randn(12, 8)), torch.nn.Parameter(randn(5)), torch.nn.Parameter(randn(5))]
    optimizer = MuonAdamW([muon_group(params[:1]), adamw_group(params[1:], weight_decay=0.0)])
    params[1].grad = randn(5, seed=3)
    before = [p.detach().clone() for p in params]
    norm = optimizer.step(grad_scale=2.0)
    assert torch.equal(params[1].grad, randn(5, seed=3)) and params[0].grad is None
    torch.testing.assert_close(norm, 2 * randn(5, seed=3).norm())
    assert [torch.equal(p, b) for p, b in zip(params, before)] == [True, False, True]


def test_the_reduction_is_what_was_handed_in() -> None:
    param = torch.nn.Parameter(randn(5))
    optimizer = MuonAdamW([adamw_group([param])], reduce=lambda message, rank, world_size: lambda: 2 * message)
    param.grad = randn(5, seed=1)
    torch.testing.assert_close(optimizer.step(), 2 * randn(5, seed=1).norm())


def test_bad_groups_are_refused() -> None:
    matrix, vector = torch.nn.Parameter(randn(3, 4)), torch.nn.Parameter(randn(3))
    with pytest.raises(ValueError, match=r"param_0: Muon takes matrices, got shape \(3,\)"):
        MuonAdamW([muon_group([vector])])
    with pytest.raises(ValueError, match="kind is 'sgd'"):
        MuonAdamW([{"kind": "sgd", "params": [matrix]}])
    with pytest.raises(ValueError, match="lacks betas, eps, weight_decay"):
        MuonAdamW([{"kind": "adamw", "params": [matrix], "lr": 0.1}])
    with pytest.raises(ValueError, match="not unique"):
        MuonAdamW([muon_group([matrix], names=["a"]), adamw_group([vector], names=["a"])])


def test_state_of_another_model_is_refused_with_a_list() -> None:
    params = [torch.nn.Parameter(randn(3, 4)), torch.nn.Parameter(randn(3))]
    optimizer = MuonAdamW([muon_group(params[:1], names=["w"]), adamw_group(params[1:], names=["b"])])
    state = optimizer.gather_state()
    state["state"]["w"]["momentum_buffer"] = torch.zeros(4, 3)
    state["state"]["c"] = state["state"].pop("b")
    with pytest.raises(ValueError) as error:
        optimizer.load_state(state)
    for part in ("w.momentum_buffer: got (4, 3), expected (3, 4)", "b.exp_avg: got nothing, expected (3,)",
                 "c.exp_avg_sq: got (3,), expected nothing"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="format 2, expected 1"):
        optimizer.load_state({"format": 2})
    with pytest.raises(RuntimeError, match="gather_state"):
        optimizer.state_dict()


# ---- who owns what --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16])
def test_every_element_has_one_owner_and_matrices_are_whole(world_size: int) -> None:
    params = [Part(name, param, {"kind": name.split(".")[0].replace("large", "adamw").replace("small", "adamw")}, 0,
                   param.numel()) for name, param in worker.make_params().items() if param.numel()]
    cut = {part.name for part in params if part.grain < part.stop}
    assert 0 < len(cut) < len(params)
    owners = {part.name: torch.zeros(part.stop, dtype=torch.int) for part in params}
    load = [0] * world_size
    for message in lay_out(params, world_size):
        assert len(message.parts) == world_size and len({p.param.dtype for p in message.parts if p}) == 1
        for rank, part in enumerate(message.parts):
            if part is not None:
                owners[part.name][part.start:part.stop] += 1
                load[rank] += part.stop - part.start
                assert part.stop - part.start <= message.chunk and part.start % part.grain == 0
                assert part.name in cut or (part.start, part.stop) == (0, part.param.numel())
                assert part.stop % part.grain == 0 or part.stop == part.param.numel()
    assert all((owner == 1).all() for owner in owners.values())
    largest = max(part.stop for part in params if part.name not in cut)
    assert max(load) <= sum(load) / world_size + 2 * largest + sum(part.grain for part in params if part.name in cut)


# ---- many processes -------------------------------------------------------------------------------------------------

def assert_states_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["step"] == b["step"] and a["state"].keys() == b["state"].keys()
    for name, tensors in a["state"].items():
        assert all(torch.equal(tensor, b["state"][name][key]) for key, tensor in tensors.items()), name


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, Any]]:
    """Results of tests/_optim_worker.py by (W, rank)."""
    folder: Path = tmp_path_factory.mktemp("optim")
    training.server()  # imports torch once for all four processes
    mp.start_processes(worker.work, (str(folder),), nprocs=max(worker.WORLD_SIZES), start_method="forkserver")
    return {(W, rank): torch.load(folder / f"{W}-{rank}.pt", weights_only=True)
            for W in worker.WORLD_SIZES for rank in range(W)}


def test_parameters_do_not_depend_on_world_size(results: dict) -> None:
    """The gradients' sums are exact here, so even the bits agree: nothing else may depend on W."""
    start = worker.make_params()
    for result in results.values():
        for name, value in results[1, 0]["params"].items():
            assert torch.equal(result["params"][name], value), name
            assert not torch.equal(value, start[name]), name


def test_norm_is_that_of_the_summed_gradient_on_all_ranks(results: dict) -> None:
    params = worker.make_params()
    for step in range(4):
        worker.set_gradients(params, step, 0, 1)
        assert any(p.grad is None for p in params.values()) == (step == 1)
        wide = [p.detach().float().requires_grad_() for p in params.values()]
        for param, copy in zip(params.values(), wide):
            copy.grad = None if param.grad is None else param.grad.float()
        reference = 0.5 * torch.nn.utils.clip_grad_norm_(wide, 1e9)
        for (W, _), result in results.items():
            torch.testing.assert_close(result["norms"][step], reference)
            assert torch.equal(result["norms"][step], results[W, 0]["norms"][step])


def test_state_is_sharded_evenly(results: dict) -> None:
    whole = results[1, 0]["owned"]
    largest = 40 * 40 + 40
    grains = sum(2 * -(-math.prod(shape) // 4096) * 64 for shape in worker.SHAPES["large"])
    for W in worker.WORLD_SIZES:
        owned = [results[W, rank]["owned"] for rank in range(W)]
        assert sum(owned) == whole
        assert max(owned) <= whole / W + largest + grains


def test_state_is_whole_on_rank_0_and_knows_no_world_size(results: dict) -> None:
    for (_, rank), result in results.items():
        if rank:
            assert result["state"] == {}
        else:
            assert_states_equal(result["state"], results[1, 0]["state"])
            assert result["state"]["groups"] == results[1, 0]["state"]["groups"]
    state = results[1, 0]["state"]
    assert state["format"] == 1 and state["step"] == 4
    assert state["state"]["large.0"]["exp_avg"].shape == (2051, 33)
    assert state["state"]["muon.0"]["second_momentum_buffer"].shape == (24, 1)


def test_state_saved_on_two_loads_on_any_world_size(results: dict, tmp_path: Path) -> None:
    for (_, rank), result in results.items():
        if rank == 0:
            assert result["reloaded"]["step"] == 2
            assert_states_equal(result["reloaded"], results[2, 0]["reloaded"])
        for name, value in results[1, 0]["params"].items():
            assert torch.equal(result["resumed"][name], value), name


def test_nan_on_one_rank_changes_nothing_on_any(results: dict) -> None:
    for (_, rank), result in results.items():
        assert result["nan_norm"].isnan()
        assert all(torch.equal(value, result["resumed"][name]) for name, value in result["after_nan"].items())
        if rank == 0:
            assert_states_equal(result["state_after_nan"], results[1, 0]["state"])
