"""MuonAdamW in bfloat16, compiled, with any number of threads, and on 1, 2, 3 and 4 processes."""

import contextlib
import ctypes
import math
import multiprocessing
import shutil
import threading
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import FailOnRecompileLimitHit

from nanochat import optim, reduce
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import MuonAdamW, muon_update
from tests import training
from tests.gloo import on_ranks
from tests.spec.test_optim import adamw_group, muon_group, randn, values
from tests.toy import EPS, assert_same_sums, if_a_fork_changed
from tests.training import as_bytes

# ---- the arithmetic ------------------------------------------------------------------------------


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


# ---- one process ---------------------------------------------------------------------------------


def test_a_step_keeps_gradients_takes_none_as_zeros_and_uses_the_given_reduction():
    params = [
        torch.nn.Parameter(randn(12, 8)),
        torch.nn.Parameter(randn(5)),
        torch.nn.Parameter(randn(5)),
    ]
    optimizer = MuonAdamW(
        [muon_group(params[:1]), adamw_group(params[1:], weight_decay=0.0)],
        reduce=lambda message, rank, world_size: lambda: 2 * message,
    )
    params[1].grad = randn(5, seed=3)
    before = values(params)
    norm = optimizer.step(grad_scale=2.0)
    assert torch.equal(params[1].grad, randn(5, seed=3)) and params[0].grad is None
    assert_same_sums(norm, 2 * 2 * randn(5, seed=3).norm(), terms=5)
    assert [torch.equal(p, before[i]) for i, p in enumerate(params)] == [True, False, True]


def openmp_threads():
    """The number of threads that OpenMP gives the calling thread. PyTorch's own number says less:
    asking for it sets OpenMP's."""
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    [*_, openmp] = sorted(
        (path for path in libraries if "gomp" in path), key=lambda p: "torch" in p
    )
    return ctypes.CDLL(openmp).omp_get_max_threads()


def test_on_a_cpu_each_parameter_is_updated_by_one_thread_with_the_same_bits_for_any_number(
    monkeypatch,
):
    """With an error in one update, the number of threads is restored, too. Regression: a thread's
    first update used OpenMP's default number, so that bits depended on which one came first."""
    calls = set()
    results = []
    before = torch.get_num_threads()

    def spy(param, *args, **kwargs):
        calls.add((threading.get_ident(), openmp_threads()))
        muon_update(param, *args, **kwargs)

    for threads in (1, 3):
        params = [
            *(torch.nn.Parameter(randn(48, 32, seed=i)) for i in range(12)),
            torch.nn.Parameter(randn(300_000)),
        ]
        optimizer = MuonAdamW([muon_group(params[:-1]), adamw_group(params[-1:])])
        for i, param in enumerate(params):
            param.grad = randn(*param.shape, seed=100 + i)
        torch.set_num_threads(threads)
        try:
            for update in (spy, spy, mock.Mock(side_effect=ArithmeticError)):
                monkeypatch.setattr(optimizer, "_muon_update", update)
                with contextlib.nullcontext() if update is spy else pytest.raises(ArithmeticError):
                    optimizer.step()
                assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        results.append(as_bytes(values(params)))
    assert results[0] == results[1] and {num for _, num in calls} == {1}
    assert len({thread for thread, _ in calls} - {threading.get_ident()}) > 1


# ---- parameters of all kinds, and gradients that add up exactly ----------------------------------

SHAPES = {
    "muon": [(24, 16)] * 5 + [(16, 24)] * 3 + [(7, 33), (40, 40)],
    # the first in bfloat16, not divisible by any W > 1; the second by W = 2, 4
    "large": [(2051, 33), (512, 160)],
    "small": [(5,), (), (3,), (1,), (37, 3)],
}
GROUPS = {
    "muon": muon_group([], momentum=0.9, weight_decay=0.1),
    "large": adamw_group([], lr=0.05, eps=1e-10, weight_decay=0.01),
    "small": adamw_group([], eps=1e-10, weight_decay=0.0),
}


def make_params(shapes_of=SHAPES):
    params = {}
    for kind, shapes in shapes_of.items():
        for i, shape in enumerate(shapes):
            start = randn(*shape, seed=len(params))
            params[f"{kind}.{i}"] = torch.nn.Parameter(
                start.bfloat16() if (kind, i) == ("large", 0) else start
            )
    return params


def make_optimizer(params, **options):
    named = {kind: [name for name in params if name.startswith(kind)] for kind in GROUPS}
    return MuonAdamW(
        [
            {**group, "names": named[kind], "params": [params[name] for name in named[kind]]}
            for kind, group in GROUPS.items()
            if named[kind]
        ],
        **options,
    )


def set_gradients(params, step, rank, world_size):
    """Set this rank's share of the step's samples; at step 1 three parameters have no gradient.
    Gradients are multiples of 1/64 with |g| <= 1/8, so sums of 12 are exact in any order, also in
    bfloat16."""
    share = 12 // world_size
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


# ---- compiled ------------------------------------------------------------------------------------

# two stacks of two matrices; the large tensor is cut between two ranks
POLAR = optim.polar_express
TO_COMPILE = {"muon": [(24, 16)] * 4, "small": [(520, 160)]}


def three_steps(rank, world_size, compiled=True):
    params = make_params(TO_COMPILE)
    optimizer = make_optimizer(params, compiled=compiled, num_leaves=2)
    optimizer.param_groups[0]["ns_steps"] = 1
    run_steps(params, optimizer, range(3), rank, world_size)
    return {"params": values(params), "state": optimizer.gather_state().get("state")}


def take_from_eager():
    """Make Inductor call eager kernels for roots, norms and means. On a CPU, eager roots come from
    MKL, which is off in the last bit for one in six, and compiled sums have another order.
    Everything else is compiled."""
    from torch._inductor import decomposition, lowering

    for kernel in (
        torch.ops.aten.sqrt.default,
        torch.ops.aten.linalg_vector_norm.default,
        torch.ops.aten.mean.default,
        torch.ops.aten.mean.dim,
    ):
        decomposition.decompositions.pop(kernel, None)
        lowering.make_fallback(kernel, warn=False)


def eager_and_compiled_on_one_and_two(folder):
    """Fork the two processes from the one, so that they reuse its compiled code."""
    torch.set_num_threads(1)
    eager = three_steps(0, 1, compiled=False)
    take_from_eager()
    with torch.compiler.config.patch(force_disable_caches=True):  # caches ignore `take_from_eager`
        one = three_steps(0, 1)
    two = on_ranks(three_steps, [2], folder, start_method="fork")[2]
    torch.save([eager, one, *two], folder / "results.pt")


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_compiled_steps_have_the_bits_of_eager_steps_on_one_process_and_two(tmp_path, monkeypatch):
    """With Inductor, and sums and roots from eager kernels, see `take_from_eager`.

    Inductor's layout of a matrix is not that of eager code. With MKL's kernels for AVX-512, the
    bits of a product depend on it; with those for any CPU, which a new process can choose, they do
    not.
    """
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    process = multiprocessing.get_context("spawn").Process(
        target=eager_and_compiled_on_one_and_two, args=(tmp_path,)
    )
    process.start()
    process.join(training.PATIENCE_S)
    assert process.exitcode == 0
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    eager, one, first, second = as_bytes(results)
    assert one == first == eager and second["params"] == eager["params"]
    start = as_bytes(values(make_params(TO_COMPILE)))
    assert not any(start[name] == eager["params"][name] for name in start), (
        "the case: every parameter changed"
    )


def rounded_by_stack(G, steps=5):
    """Stands for `polar_express` on a GPU, where the number of matrices may decide the kernel."""
    num = len(G) if G.ndim == 3 else 1
    return POLAR(G, steps) * (1 + num / 1024)


def own_chunk(message, rank, world_size):
    """A reduction whose sum is the rank's own message."""
    return lambda: message.view(world_size, -1)[rank].float()


def own_matrices(rank, world_size, num_leaves):
    """{name: value} of the matrices that a simulated rank owns, after two stacked steps.

    There are 1, 3, 8 and 12 matrices of a shape.
    """
    params = {}
    groups = []
    for num in (1, 3, 8, 12):
        names = [f"{num}.{i}" for i in range(num)]
        for i, name in enumerate(names):
            params[name] = torch.nn.Parameter(randn(3, num + 1, seed=i))
        groups.append(muon_group([params[name] for name in names], names=names))
    own = {}

    def keep_own(message, packed, rank):
        part = message.parts[rank]
        if part is not None:
            chunk = packed.split(message.chunk)[rank][: part.stop]
            part.param.view(-1).copy_(chunk)
            own[part.name] = part.param
        return lambda: None

    ranks = mock.patch.object(optim, "get_rank_and_world_size", lambda: (rank, world_size))
    with ranks, mock.patch.object(reduce.Message, "gather", keep_own):
        optimizer = MuonAdamW(groups, compiled=True, reduce=own_chunk, num_leaves=num_leaves)
        for step in range(2):
            for i, param in enumerate(params.values()):
                param.grad = randn(*param.shape, seed=100 * step + i)
            optimizer.step()
    return as_bytes(values(own))


def test_stacked_steps_have_the_same_bits_for_every_number_of_processes_that_divides_the_leaves(
    monkeypatch,
):
    """On simulated ranks, with a `polar_express` whose result depends on the size of its stack."""
    monkeypatch.setattr(dist, "all_reduce", lambda table: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(optim, "polar_express", rounded_by_stack)
    alone = own_matrices(0, 1, num_leaves=4)
    assert len(alone) == 24
    for W in (2, 4):
        shared = {}
        for rank in range(W):
            shared |= own_matrices(rank, W, num_leaves=4)
        assert shared == alone
    assert own_matrices(0, 1, num_leaves=1) != alone, "the case: the size of a stack matters"


def test_compiled_adamw_asks_inductor_for_the_rounding_of_eager_kernels(monkeypatch):
    """Regression: on CUDA, compiled AdamW contracted to FMA and divided approximately."""
    from torch._inductor import config

    calls = {}
    monkeypatch.setattr(
        torch, "compile", lambda function, **kwargs: calls.setdefault(function, kwargs) and function
    )
    MuonAdamW([adamw_group([torch.nn.Parameter(torch.ones(3))])], compiled=True)
    options = calls[optim.adamw_update]["options"]
    assert "options" not in calls[optim.muon_update]
    assert "options" not in calls[optim.muon_update_stack]
    with config.patch(options):
        assert config.emulate_precision_casts
        assert config.eager_numerics.division_rounding and config.eager_numerics.disable_ftz


@pytest.mark.parametrize(
    ("rank", "world_size", "expected"),
    [
        (0, 1, [12, 13, 13, 5 + 4 * 3] + [5 + 4 * 5] * 3),  # stacks of 3 gates and of 5 others
        (2, 3, [9] * 4 + [13, 14, 14]),
        (5, 8, [9] * 2 + [13, 14, 14]),
    ],
)
def test_few_graphs_serve_all_parameters_and_too_many_are_an_error(
    rank, world_size, expected, monkeypatch
):
    """AdamW has three graphs for six groups (four on ranks whose parts begin inside a message), and
    each shape of matrix has one; a schedule adds none. `expected` lists the graphs' numbers of
    arguments: fewer if a size is the number 1."""
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
            optimizer = MuonAdamW(
                model.param_groups(),
                compiled=True,
                reduce=own_chunk,
            )
        for step in range(3):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            for group in optimizer.param_groups:
                group.update(lr=0.01 * step, ns_steps=1)
            optimizer.step()

    steps()
    with if_a_fork_changed("the model's parameters", "change `expected` to the graphs they need"):
        assert sorted(graphs) == expected
    if world_size > 1:
        return
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(FailOnRecompileLimitHit):
        steps()


# ---- many processes: the same scenario with W = 1, 2, 3 and 4 ------------------------------------

WORLD_SIZES = (1, 2, 3, 4)


def scenario(rank, world_size):
    """Two steps; two more with a new optimizer that loads the state; then a step with a NaN on the
    last rank."""
    params = make_params()
    optimizer = make_optimizer(params)
    owned = sum(tensor.numel() for state in optimizer.state.values() for tensor in state.values())
    norms = run_steps(params, optimizer, range(2), rank, world_size)
    middle, optimizer = optimizer.gather_state(), make_optimizer(params)
    optimizer.load_state(middle)
    norms += run_steps(params, optimizer, range(2, 4), rank, world_size)
    after = {"params": values(params), "state": optimizer.gather_state()}

    set_gradients(params, 4, rank, world_size)
    if rank == world_size - 1:
        params["small.4"].grad[36, 2] = float("nan")
    nan_norm = optimizer.step()
    after_nan = {"params": values(params), "state": optimizer.gather_state()}
    return {
        "owned": owned,
        "norms": norms,
        "middle": middle,
        "after": after,
        "nan_norm": nan_norm,
        "after_nan": after_nan,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{W: the results of `scenario` on its ranks}."""
    return on_ranks(scenario, WORLD_SIZES, tmp_path_factory.mktemp("optim"))


def test_parameters_state_and_norms_do_not_depend_on_world_size_or_reloading(results):
    """Sums of gradients are exact here, so all bits must be equal."""
    params = make_params()
    start, optimizer = as_bytes(values(params)), make_optimizer(params)
    norms = run_steps(params, optimizer, range(4), 0, 1)
    straight = as_bytes({"params": values(params), "state": optimizer.gather_state()})
    assert not any(start[name] == straight["params"][name] for name in start), (
        "the case: every parameter changed"
    )
    middle = as_bytes(results[1][0]["middle"])
    for W, of_ranks in results.items():
        for rank, result in enumerate(of_ranks):
            assert as_bytes(result["norms"]) == as_bytes(norms), (W, rank)
            assert as_bytes(result["after"]) == (
                straight if rank == 0 else straight | {"state": {}}
            ), (W, rank)
            assert as_bytes(result["middle"]) == (middle if rank == 0 else {}), (W, rank)
            assert result["nan_norm"].isnan() and as_bytes(result["after_nan"]) == as_bytes(
                result["after"]
            ), (W, rank)
    for step, norm in enumerate(norms):
        set_gradients(params, step, 0, 1)
        grads = [p.grad.float().flatten() for p in params.values() if p.grad is not None]
        assert (len(grads) < len(params)) == (step == 1)
        # ours adds up to 4,096 values in float32 at a time
        expected = 0.5 * torch.cat(grads).double().norm()
        assert norm.item() == pytest.approx(expected.item(), rel=64 * EPS)


def test_state_is_sharded_evenly_and_has_the_shapes_of_its_parameters(results):
    [alone] = results[1]
    grains = sum(2 * -(-math.prod(shape) // 4096) * 64 for shape in SHAPES["large"])
    for W, of_ranks in results.items():
        owned = [result["owned"] for result in of_ranks]
        assert (
            sum(owned) == alone["owned"]
            and max(owned) <= sum(owned) / W + 2 * (40 * 40 + 40) + grains
        )
    state = alone["after"]["state"]
    assert (state["format"], state["step"], alone["middle"]["step"]) == (1, 4, 2)
    assert state["state"]["large.0"]["exp_avg"].shape == (2051, 33)
    assert state["state"]["muon.0"]["second_momentum_buffer"].shape == (24, 1)
