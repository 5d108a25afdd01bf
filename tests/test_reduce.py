"""Sums of gradients against a tree added up by NumPy, on 1, 2, 4 and 8 ranks: simulated ones and gloo processes."""

import datetime
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanochat.reduce import LeafAccumulator, Part, add_in_tree_order, lay_out, reduce_over_nodes, tree_reduce
from tests import training
from tests.toy import examples

SHAPES = {"matrix": (48, 40), "cut": (67, 61), "tail": (13,), "scalar": (), "narrow": (67, 31), "absent": (5,)}
WORLD_SIZES = (1, 2, 4, 8)
NODES = [(1, 1), (2, 2), (4, 4), (4, 2), (8, 8), (8, 4), (8, 2)]  # (W, ranks per node)
CASES = [(4, 1), (4, 3), (8, 1), (8, 8)]  # (K leaves, micro-batches per leaf)
Params = dict[str, torch.nn.Parameter]


# ---- gradients and the oracle ---------------------------------------------------------------------------------------

def wild(shape, seed, *, spread=12):
    """Random float32 values with exponents from -spread to spread, and negative zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    return np.where(rng.random(shape) < 0.1, -0.0, values).astype(np.float32)


def gradient(name, K, leaf, micro):
    """The gradient of a micro-batch. 'narrow' is bfloat16; 'absent' is -0.0 in leaf 2 and None in other leaves."""
    if name == "absent":
        return torch.full(SHAPES[name], -0.0) if leaf == 2 else None
    values = torch.from_numpy(wild(SHAPES[name], [sum(map(ord, name)), K, leaf, micro]))
    return values.bfloat16() if name == "narrow" else values


def make_params():
    return {name: torch.nn.Parameter(torch.from_numpy(wild(shape, [1], spread=1)).to(
        torch.bfloat16 if name == "narrow" else torch.float32)) for name, shape in SHAPES.items()}


def backward(params, K, leaf, micro):
    """The backward pass of a micro-batch: autograd adds its gradients to `.grad`."""
    grads = {name: gradient(name, K, leaf, micro) for name in params}
    inputs = [param for name, param in params.items() if grads[name] is not None]
    outputs = [param.view_as(param) for param in inputs]
    torch.autograd.backward(outputs, [grad for grad in grads.values() if grad is not None])


def accumulate(params, K, micros, leaves):
    accumulator = LeafAccumulator(params.values(), len(leaves), micro_batches_per_leaf=micros)
    for leaf in leaves:
        for micro in range(micros):
            backward(params, K, leaf, micro)
        accumulator.leaf_done()
    return accumulator


def leaf_sum(name, K, micros, leaf):
    """The sum of a leaf's micro-batches in order, in float32 for every parameter."""
    grads = [gradient(name, K, leaf, micro) for micro in range(micros)]
    if grads[0] is None:
        return np.zeros(SHAPES[name], np.float32)
    total = grads[0].float().numpy()
    for grad in grads[1:]:
        assert grad is not None
        total = total + grad.float().numpy()
    return total


def tree(parts):
    """The definition of the tree, by recursive halving."""
    half = len(parts) // 2
    return parts[0] if half == 0 else tree(parts[:half]) + tree(parts[half:])


def oracle(K, micros):
    return {name: tree([leaf_sum(name, K, micros, leaf) for leaf in range(K)]) for name in SHAPES}


def bits(values):
    array = values.detach().numpy() if isinstance(values, Tensor) else values
    assert array.dtype == np.float32
    return np.ascontiguousarray(array).reshape(-1).view(np.uint32)


# ---- inside a rank --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bad", [0, 3, 6, -4])
def test_the_number_of_leaves_must_be_a_power_of_two(bad):
    with pytest.raises(ValueError, match=f"leaves of a rank: got {bad}, expected a power of two"):
        LeafAccumulator([], bad, micro_batches_per_leaf=1)


# ---- across ranks, simulated ----------------------------------------------------------------------------------------

@settings(max_examples=examples(1.2))
@given(log_k=st.integers(0, 5), n=st.integers(1, 70), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_every_split_of_the_tree_has_the_same_bits(log_k, n, seed, data):
    K = 1 << log_k
    leaves = [wild((n,), [seed, leaf], spread=40) for leaf in range(K)]
    expected = bits(tree(leaves))
    world_size = 1 << data.draw(st.integers(0, log_k))
    m = K // world_size
    parts = []
    for rank in range(world_size):
        param = torch.nn.Parameter(torch.zeros(n))
        accumulator = LeafAccumulator([param], m, micro_batches_per_leaf=1, on_host=data.draw(st.booleans()))
        for leaf in leaves[rank * m:(rank + 1) * m]:
            param.grad = torch.from_numpy(leaf.copy())
            accumulator.leaf_done()
        parts.append(param.grad)
    assert (bits(add_in_tree_order(torch.stack(parts))) == expected).all()


@pytest.mark.parametrize("W", range(1, 12))
def test_ranks_are_added_in_pairs_and_an_odd_rank_is_carried_up(W):
    rows = [wild((37,), [W, rank]) for rank in range(W)]
    expected = list(rows)
    while len(expected) > 1:
        pairs = [expected[i] + expected[i + 1] for i in range(0, len(expected) - 1, 2)]
        expected = pairs + expected[len(pairs) * 2:]
    assert (bits(add_in_tree_order(torch.from_numpy(np.stack(rows)))) == bits(expected[0])).all()


# ---- across processes -----------------------------------------------------------------------------------------------

def exchange(params, rank, world_size, reduce):
    """This rank's slices of two messages in flight at once: one is a `.grad`, the other packs all other gradients."""
    flat = [torch.zeros(param.numel()) if param.grad is None else param.grad.reshape(-1).float()
            for name, param in params.items() if name != "matrix"]
    packed = torch.cat([*flat, torch.zeros(-sum(map(len, flat)) % world_size)])
    messages = {"direct": params["matrix"].grad.reshape(-1), "packed": packed}
    sent = {name: message.clone() for name, message in messages.items()}
    pending = {name: reduce(message, rank, world_size) for name, message in messages.items()}
    slices = {name: finish() for name, finish in pending.items()}
    assert all((bits(messages[name]) == bits(sent[name])).all() for name in sent), "a message was written to"
    return slices


def process(rank, folder):
    """Save the slices of every case, for every W that includes this rank."""
    torch.set_num_threads(1)
    for W in WORLD_SIZES:
        if rank >= W:
            continue
        if W > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store-{W}", rank=rank, world_size=W,
                                    timeout=datetime.timedelta(seconds=training.PATIENCE_S))
        for L in (L for world_size, L in NODES if world_size == W):
            reduce = reduce_over_nodes(L)
            assert (reduce is tree_reduce) == (L == W)
            results = {}
            for K, micros in CASES:
                if K % W == 0:
                    params = make_params()
                    accumulate(params, K, micros, range(rank * (K // W), (rank + 1) * (K // W)))
                    results[K, micros] = exchange(params, rank, W, reduce)
            torch.save(results, f"{folder}/{W}-{L}-{rank}.pt")
        if W > 1:
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{(W, ranks per node): the results of each rank}."""
    folder = tmp_path_factory.mktemp("reduce")
    training.server()  # imports torch once for all eight processes
    mp.start_processes(process, (str(folder),), nprocs=max(WORLD_SIZES), start_method="forkserver")
    return {(W, L): [torch.load(folder / f"{W}-{L}-{rank}.pt", weights_only=True) for rank in range(W)]
            for W, L in NODES}


@pytest.mark.parametrize("K, micros, W, L", [(K, micros, W, L) for K, micros in CASES for W, L in NODES if K % W == 0])
def test_slices_equal_the_tree_for_every_W_and_number_of_nodes(results, W, L, K, micros):
    expected = oracle(K, micros)
    leaves = [leaf_sum("matrix", K, micros, leaf) for leaf in range(K)]
    assert (bits(tree(leaves[1:] + leaves[:1])) != bits(expected["matrix"])).any(), "the case: order matters"
    for message, names in {"direct": ["matrix"], "packed": [name for name in SHAPES if name != "matrix"]}.items():
        slices = [by_case[K, micros][message] for by_case in results[W, L]]
        assert len({len(part) for part in slices}) == 1
        actual, wanted = bits(torch.cat(slices)), np.concatenate([bits(expected[name]) for name in names])
        assert (actual[:len(wanted)] == wanted).all() and len(actual) - len(wanted) < W, message


def test_a_single_node_uses_one_exchange():
    assert reduce_over_nodes(1) is tree_reduce and reduce_over_nodes(8) is tree_reduce


def test_gradients_have_the_dtype_of_their_parameters_unless_they_are_sums():
    params = [torch.nn.Parameter(torch.ones(5).bfloat16()) for _ in range(2)]
    parts = [Part(f"p{i}", param, {"kind": "adamw"}, 0, 5) for i, param in enumerate(params)]
    message, = lay_out(parts, 2)
    params[1].grad = torch.full((5,), 2**-9).bfloat16()
    assert message.gradients().dtype == torch.bfloat16 and message.gradients().sum() == 5 * 2**-9
    LeafAccumulator(params, 1, micro_batches_per_leaf=1)
    assert message.gradients().dtype == torch.bfloat16
    params[1].grad = None
    LeafAccumulator(params, 1, micro_batches_per_leaf=2)
    assert message.gradients().dtype == torch.float32


def test_gather_works_with_the_name_of_older_torch(monkeypatch):
    """`all_gather_single` is new in PyTorch 2.13."""
    def into(output, mine, *, async_op):
        output.copy_(torch.cat([mine, mine + 1]))
        return mock.Mock()

    monkeypatch.delattr(dist, "all_gather_single", raising=False)
    monkeypatch.setattr(dist, "all_gather_into_tensor", into)
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    [message] = lay_out([Part(str(i), param, {"kind": "adamw"}, 0, 4) for i, param in enumerate(params)], 2)
    message.gather(message.parameters(), 0)()
    assert [param.tolist() for param in params] == [[0.0] * 4, [1.0] * 4]
