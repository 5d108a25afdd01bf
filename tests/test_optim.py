"""MuonAdamW against torch.optim.AdamW, an SVD, Muon in float64, and itself on 1, 2, 3 and 4 processes."""

import datetime
import math
import shutil
import threading
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._dynamo.exc import FailOnRecompileLimitHit

from nanochat import optim, reduce
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import POLAR_EXPRESS, MuonAdamW, muon_update, polar_express
from tests import training


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adamw_group(params, **settings):
    return {"kind": "adamw", "params": params, "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1,
            **settings}


def muon_group(params, **settings):
    return {"kind": "muon", "params": params, "lr": 0.02, "momentum": 0.95, "ns_steps": 5, "beta2": 0.9,
            "weight_decay": 0.0, **settings}


# ---- the arithmetic -------------------------------------------------------------------------------------------------

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
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1e9))
        reference.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_adamw_keeps_bfloat16_parameters_and_float32_state():
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
        variance = variance + 0.2 * ((X**2).mean(axis=1 if rows >= cols else 0, keepdims=True) - variance)
        scaled = X / np.sqrt(np.maximum(variance, 1e-10))
        scaled *= np.linalg.norm(X) / max(np.linalg.norm(scaled), 1e-10)
        decay = weight_decay * param * (param * scaled >= 0)
        param = param - lr * math.sqrt(max(1, rows / cols)) * (scaled + decay)
    return param


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-8])
@pytest.mark.parametrize("shape", [(6, 12), (40, 24), (24, 40)])
def test_muon_equals_the_formula_in_float64_also_for_tiny_gradients(shape, scale):
    """The floors of the norms affect tiny gradients, such as those of small gates."""
    grads = [randn(*shape, seed=step) * scale * torch.logspace(-1, 0, shape[0])[:, None] for step in range(4)]
    param, start = randn(*shape, seed=9), randn(*shape, seed=9).double().numpy()
    state = torch.zeros(shape), torch.zeros((shape[0], 1) if shape[0] >= shape[1] else (1, shape[1]))
    for grad in grads:
        muon_update(param, grad, *state, lr=0.1, momentum=0.9, beta2=0.8, weight_decay=0.3,
                    grad_scale=torch.ones(()), live=torch.ones(()))
    expected, unscaled, undecayed = (
        muon_in_float64(start, [g.double().numpy() / by for g in grads], lr=0.1, weight_decay=decay)
        for by, decay in ((1, 0.3), (scale, 0.3), (1, 0)))
    np.testing.assert_allclose(param.numpy(), expected, rtol=0, atol=1e-4)
    assert np.abs(undecayed - expected).max() > 0.01
    assert scale == 1 or np.abs(unscaled - expected).max() > 0.01, "the case: the floors matter"


# ---- one process ----------------------------------------------------------------------------------------------------

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
        before, state = [p.detach().clone() for p in params], optimizer.gather_state()
        assert bool(optimizer.step(grad_scale=2.0).isfinite()) == (step == 1)
        after = optimizer.gather_state()
        assert all(torch.equal(p, b) for p, b in zip(params, before)) == (step != 1)
        assert (after["step"] == state["step"]) == (step != 1)
        if step != 1:
            assert_states_equal(after, state)


def test_a_step_keeps_gradients_takes_none_as_zeros_and_uses_the_given_reduction():
    params = [torch.nn.Parameter(randn(12, 8)), torch.nn.Parameter(randn(5)), torch.nn.Parameter(randn(5))]
    optimizer = MuonAdamW([muon_group(params[:1]), adamw_group(params[1:], weight_decay=0.0)],
                          reduce=lambda message, rank, world_size: lambda: 2 * message)
    params[1].grad = randn(5, seed=3)
    before = [p.detach().clone() for p in params]
    norm = optimizer.step(grad_scale=2.0)
    assert torch.equal(params[1].grad, randn(5, seed=3)) and params[0].grad is None
    torch.testing.assert_close(norm, 2 * 2 * randn(5, seed=3).norm())
    assert [torch.equal(p, b) for p, b in zip(params, before)] == [True, False, True]


def test_on_a_cpu_each_parameter_is_updated_by_one_thread_with_the_same_bits_for_any_number(monkeypatch):
    """With an error in one update, the number of threads is restored, too."""
    calls, before = set(), torch.get_num_threads()

    def spy(param, *args, **kwargs):
        calls.add((threading.get_ident(), torch.get_num_threads()))
        muon_update(param, *args, **kwargs)

    def three_steps(threads):
        matrices = [torch.nn.Parameter(randn(48, 32, seed=i)) for i in range(12)]
        optimizer = MuonAdamW([muon_group(matrices), adamw_group([vector := torch.nn.Parameter(randn(300_000))])])
        monkeypatch.setattr(optimizer, "_muon_update", spy)
        torch.set_num_threads(threads)
        for step in range(3):
            for i, param in enumerate([*matrices, vector]):
                param.grad = randn(*param.shape, seed=100 * step + i)
            optimizer.step()
            assert torch.get_num_threads() == threads
        monkeypatch.setattr(optimizer, "_muon_update", mock.Mock(side_effect=ArithmeticError))
        with pytest.raises(ArithmeticError):
            optimizer.step()
        assert torch.get_num_threads() == threads
        return [*matrices, vector]

    try:
        one, three = three_steps(1), three_steps(3)
    finally:
        torch.set_num_threads(before)
    assert {threads for _, threads in calls} == {1}
    assert len({thread for thread, _ in calls} - {threading.get_ident()}) > 1
    for a, b in zip(one, three):
        assert torch.equal(a, b)


def test_bad_groups_and_states_of_another_model_are_refused():
    matrix, vector = torch.nn.Parameter(randn(3, 4)), torch.nn.Parameter(randn(3))
    for groups, message in [
            ([muon_group([vector])], r"param_0: Muon takes matrices, got shape \(3,\)"),
            ([{"kind": "sgd", "params": [matrix]}], r"group 0 \(sgd\) lacks a known kind"),
            ([{"kind": "adamw", "params": [matrix], "lr": 0.1}], "lacks betas, eps, weight_decay"),
            ([adamw_group([torch.nn.Parameter(randn(3, 4).mT)])], "param_0: the tensor is not contiguous"),
            ([muon_group([matrix], names=["a"]), adamw_group([vector], names=["a"])], "not unique")]:
        with pytest.raises(ValueError, match=message):
            MuonAdamW(groups)
    optimizer = MuonAdamW([muon_group([matrix], names=["w"]), adamw_group([vector], names=["b"])])
    state = optimizer.gather_state()
    state["state"]["w"]["momentum_buffer"] = torch.zeros(4, 3)
    state["state"]["c"] = state["state"].pop("b")
    with pytest.raises(ValueError, match=r"w.momentum_buffer: got \(4, 3\), expected \(3, 4\); b.exp_avg: got "
                                         r"nothing, expected \(3,\).*c.exp_avg_sq: got \(3,\), expected nothing"):
        optimizer.load_state(state)
    with pytest.raises(ValueError, match="format 2, expected 1"):
        optimizer.load_state({"format": 2})
    with pytest.raises(RuntimeError, match="gather_state"):
        optimizer.state_dict()


# ---- compiled -------------------------------------------------------------------------------------------------------

TO_COMPILE = {"w": (520, 160), "m0": (24, 16), "m1": (24, 16), "m2": (24, 16)}


def three_steps(rank, world_size, compiled):
    """Parameters and, on rank 0, their state after three steps: one tensor of AdamW, cut between two ranks, and three
    matrices. Gradients are multiples of 1/64, so that their sum over ranks is exact."""
    params = {name: torch.nn.Parameter(randn(*shape, seed=i)) for i, (name, shape) in enumerate(TO_COMPILE.items())}
    w, *matrices = params.values()
    optimizer = MuonAdamW([adamw_group([w], names=["w"], eps=1e-10),
                           muon_group(matrices, names=list(params)[1:], weight_decay=0.1, ns_steps=1)],
                          compiled=compiled)
    for step in range(3):
        for i, param in enumerate(params.values()):
            by_rank = torch.randint(-8, 9, (2, *param.shape), generator=torch.Generator().manual_seed(100 * step + i))
            param.grad = (by_rank[rank] if world_size == 2 else by_rank.sum(dim=0)).to(param.dtype) / 64
        optimizer.step(grad_scale=0.7)
    state = optimizer.gather_state().get("state", {})
    return {**values(params), **{f"{name}.{key}": tensor for name, of in state.items() for key, tensor in of.items()}}


def take_from_eager():
    """Make Inductor call eager kernels for roots, norms and means. On a CPU, eager roots come from MKL, which is off in
    the last bit for one in six, and compiled sums have another order. Everything else is compiled."""
    from torch._inductor import decomposition, lowering
    for kernel in (torch.ops.aten.sqrt.default, torch.ops.aten.linalg_vector_norm.default,
                   torch.ops.aten.mean.default, torch.ops.aten.mean.dim):
        decomposition.decompositions.pop(kernel, None)
        lowering.make_fallback(kernel, warn=False)


def compiled_on_one_of_two(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(three_steps(rank, 2, compiled=True), f"{folder}/two-{rank}.pt")
    dist.destroy_process_group()


def compiled_on_one_and_two(folder):
    """Fork the two processes from the one, so that they reuse its compiled code."""
    torch.set_num_threads(1)
    take_from_eager()
    with torch.compiler.config.patch(force_disable_caches=True):  # caches ignore `take_from_eager`
        torch.save(three_steps(0, 1, compiled=True), f"{folder}/one.pt")
    mp.start_processes(compiled_on_one_of_two, (folder,), nprocs=2, start_method="fork")


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_compiled_steps_have_the_bits_of_eager_steps_on_one_process_and_two(tmp_path):
    """With Inductor, and sums and roots from eager kernels, see `take_from_eager`."""
    process = training.server().Process(target=compiled_on_one_and_two, args=(str(tmp_path),))
    process.start()
    eager = three_steps(0, 1, compiled=False)
    process.join(training.PATIENCE_S)
    assert process.exitcode == 0
    one, *two = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("one", "two-0", "two-1"))
    assert len(one) == 4 + 2 * 4 and two[1].keys() == TO_COMPILE.keys()
    assert not any(torch.equal(one[name], randn(*shape, seed=i)) for i, (name, shape) in enumerate(TO_COMPILE.items()))
    for name, value in one.items():
        assert all(torch.equal(value, other[name]) for other in two if name in other), name
        assert torch.equal(value, eager[name]), name


def test_compiled_adamw_asks_inductor_for_the_rounding_of_eager_kernels(monkeypatch):
    """Regression: on CUDA, compiled AdamW contracted to FMA and divided approximately."""
    from torch._inductor import config

    calls = {}
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: calls.setdefault(function, kwargs) and function)
    MuonAdamW([adamw_group([torch.nn.Parameter(torch.ones(3))])], compiled=True)
    options = calls[optim.adamw_update]["options"]
    assert "options" not in calls[optim.muon_update]
    with config.patch(options):
        assert config.emulate_precision_casts
        assert config.eager_numerics.division_rounding and config.eager_numerics.disable_ftz


@pytest.mark.parametrize(("rank", "world_size", "expected"), [
    (0, 1, [9] * 4 + [12, 13, 13]), (2, 3, [9] * 4 + [13, 14, 14]), (5, 8, [9] * 2 + [13, 14, 14])])
def test_few_graphs_serve_all_parameters_and_too_many_are_an_error(rank, world_size, expected, monkeypatch):
    """AdamW has three graphs for six groups (four on ranks whose parts begin inside a message), and each shape of
    matrix has one; a schedule adds none. `expected` lists the graphs' numbers of arguments: fewer if a size is the
    number 1."""
    monkeypatch.setattr(optim, "get_rank_and_world_size", lambda: (rank, world_size))
    monkeypatch.setattr(dist, "all_reduce", lambda table: None)
    monkeypatch.setattr(reduce.Message, "gather", lambda *args: lambda: None)
    config = GPTConfig.from_depth(5, vocab_size=3000, sequence_len=16, aspect_ratio=8, head_dim=8)
    graphs = []

    def count(graph, inputs, **_):
        graphs.append(sum(node.op == "placeholder" for node in graph.graph.nodes))
        return graph.forward

    def steps():
        torch._dynamo.reset()
        model = GPT(config)
        model.init_weights(seed=0, compute_dtype=torch.bfloat16)
        with mock.patch.object(torch, "compile", partial(torch.compile, backend=count)):
            optimizer = MuonAdamW(model.param_groups(), compiled=True, reduce=lambda message, rank, world_size: (
                lambda: message.view(world_size, -1)[rank].float()))
        for step in range(3):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            for group in optimizer.param_groups:
                group.update(lr=0.01 * step, ns_steps=1)
            optimizer.step()

    steps()
    assert sorted(graphs) == expected
    if world_size > 1:
        return
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(FailOnRecompileLimitHit):
        steps()


# ---- many processes: the same scenario with W = 2, 1, 4 and 3 -------------------------------------------------------

WORLD_SIZES = (2, 1, 4, 3)  # W = 2 comes first, because the others load its saved state
SAMPLES = 12  # gradients per step; every W divides it
SHAPES = {
    "muon": [(24, 16)] * 5 + [(16, 24)] * 3 + [(7, 33), (40, 40)],
    "large": [(2051, 33), (512, 160)],  # the first in bfloat16, not divisible by any W > 1; the second by W = 2, 4
    "small": [(5,), (), (3,), (1,), (37, 3)],
}
GROUPS = {
    "muon": {"kind": "muon", "lr": 0.02, "momentum": 0.9, "ns_steps": 5, "beta2": 0.9, "weight_decay": 0.1},
    "large": {"kind": "adamw", "lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.01},
    "small": {"kind": "adamw", "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}}
Params = dict[str, torch.nn.Parameter]


def make():
    params = {}
    for kind, shapes in SHAPES.items():
        for i, shape in enumerate(shapes):
            values = randn(*shape, seed=len(params))
            params[f"{kind}.{i}"] = torch.nn.Parameter(values.bfloat16() if (kind, i) == ("large", 0) else values)
    named = {kind: [name for name in params if name.startswith(kind)] for kind in GROUPS}
    return params, MuonAdamW([{**group, "names": named[kind], "params": [params[name] for name in named[kind]]}
                              for kind, group in GROUPS.items()])


def set_gradients(params, step, rank, world_size):
    """Set this rank's share of the step's samples; at step 1 three parameters have no gradient. Gradients are multiples
    of 1/64 with |g| <= 1/8, so sums of 12 are exact in any order, also in bfloat16."""
    share = SAMPLES // world_size
    for name, param in params.items():
        param.grad = torch.zeros_like(param)
        for sample in range(rank * share, (rank + 1) * share):
            rng = torch.Generator().manual_seed(1000 * step + 50 * sample + sum(map(ord, name)))
            param.grad += (torch.randint(-8, 9, param.shape, generator=rng) / 64).to(param.dtype)
        if name in ("muon.1", "small.0", "large.1") and step == 1:
            param.grad = None


def run_steps(params, optimizer, steps, rank, world_size):
    norms = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / 10)
        set_gradients(params, step, rank, world_size)
        norms.append(optimizer.step(grad_scale=0.5))
    return norms


def values(params):
    return {name: param.detach().clone() for name, param in params.items()}


def scenario(rank, world_size, folder):
    """Two steps (W = 2 saves here) and two more; then load the state from W = 2 and repeat the last two steps; then a
    step with one NaN."""
    params, optimizer = make()
    owned = sum(tensor.numel() for state in optimizer.state.values() for tensor in state.values())
    norms = run_steps(params, optimizer, range(2), rank, world_size)
    middle, state = values(params), optimizer.gather_state()
    if world_size == 2 and rank == 0:
        torch.save({"params": middle, "state": state}, folder / "middle.pt")
    norms += run_steps(params, optimizer, range(2, 4), rank, world_size)
    result = {"owned": owned, "norms": norms, "params": values(params), "state": optimizer.gather_state()}

    if world_size > 1:
        dist.barrier()
    saved = torch.load(folder / "middle.pt", weights_only=True)
    params, optimizer = make()
    for name, param in params.items():
        param.data.copy_(saved["params"][name])
    optimizer.load_state(saved["state"])
    result["reloaded"] = optimizer.gather_state()
    run_steps(params, optimizer, range(2, 4), rank, world_size)
    result["resumed"] = values(params)

    set_gradients(params, 4, rank, world_size)
    if rank == world_size - 1:
        params["small.4"].grad[36, 2] = float("nan")
    result["nan_norm"] = optimizer.step()
    result["after_nan"], result["state_after_nan"] = values(params), optimizer.gather_state()
    return result


def work(rank, folder):
    torch.set_num_threads(1)
    for world_size in WORLD_SIZES:
        if rank < world_size:
            if world_size > 1:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store-{world_size}", rank=rank,
                                        world_size=world_size, timeout=datetime.timedelta(seconds=training.PATIENCE_S))
            torch.save(scenario(rank, world_size, Path(folder)), f"{folder}/{world_size}-{rank}.pt")
            if world_size > 1:
                dist.destroy_process_group()


def assert_states_equal(a, b):
    assert a["step"] == b["step"] and a["state"].keys() == b["state"].keys()
    for name, tensors in a["state"].items():
        assert all(torch.equal(tensor, b["state"][name][key]) for key, tensor in tensors.items()), name


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of `scenario` by (W, rank)."""
    folder = tmp_path_factory.mktemp("optim")
    training.server()  # imports torch once for all four processes
    mp.start_processes(work, (str(folder),), nprocs=max(WORLD_SIZES), start_method="forkserver")
    return {(W, rank): torch.load(folder / f"{W}-{rank}.pt", weights_only=True)
            for W in WORLD_SIZES for rank in range(W)}


def test_parameters_and_norms_do_not_depend_on_world_size(results):
    """Sums of gradients are exact here, so all bits must be equal."""
    start, _ = make()
    for (W, _), result in results.items():
        for name, value in results[1, 0]["params"].items():
            assert torch.equal(result["params"][name], value) and not torch.equal(value, start[name]), name
        assert all(torch.equal(norm, alone) for norm, alone in zip(result["norms"], results[1, 0]["norms"])), W
    for step in range(4):
        set_gradients(start, step, 0, 1)
        grads = [p.grad.float().flatten() for p in start.values() if p.grad is not None]
        assert (len(grads) < len(start)) == (step == 1)
        torch.testing.assert_close(results[1, 0]["norms"][step], 0.5 * torch.cat(grads).norm())


def test_state_is_sharded_evenly_and_gathered_independently_of_world_size(results):
    whole = results[1, 0]["owned"]
    grains = sum(2 * -(-math.prod(shape) // 4096) * 64 for shape in SHAPES["large"])
    for W in WORLD_SIZES:
        owned = [results[W, rank]["owned"] for rank in range(W)]
        assert sum(owned) == whole and max(owned) <= whole / W + 2 * (40 * 40 + 40) + grains
    for (_, rank), result in results.items():
        if rank:
            assert result["state"] == {}
        else:
            assert result["state"]["groups"] == results[1, 0]["state"]["groups"]
            assert_states_equal(result["state"], results[1, 0]["state"])
    state = results[1, 0]["state"]
    assert state["format"] == 1 and state["step"] == 4
    assert state["state"]["large.0"]["exp_avg"].shape == (2051, 33)
    assert state["state"]["muon.0"]["second_momentum_buffer"].shape == (24, 1)


def test_state_saved_with_two_ranks_loads_on_any_world_size_and_a_nan_on_one_rank_changes_nothing(results):
    for (_, rank), result in results.items():
        if rank == 0:
            assert result["reloaded"]["step"] == 2
            assert_states_equal(result["reloaded"], results[2, 0]["reloaded"])
            assert_states_equal(result["state_after_nan"], results[1, 0]["state"])
        assert result["nan_norm"].isnan()
        for name, value in results[1, 0]["params"].items():
            assert torch.equal(result["resumed"][name], value) and torch.equal(result["after_nan"][name], value), name
