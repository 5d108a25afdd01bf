"""Sums of gradients against a tree added up by NumPy, on 1, 2, 4 and 8 ranks: simulated ones and
gloo processes."""

from functools import reduce
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.reduce import (
    LeafAccumulator,
    Part,
    add_in_tree_order,
    lay_out,
    reduce_over_nodes,
    stack_size,
    tree_reduce,
)
from tests.gloo import on_ranks
from tests.toy import examples


def wild(size, seed, *, spread=12):
    """Random float32 values with exponents from -spread to spread, and negative zeros; the first is
    always one."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size) * 2.0 ** rng.integers(-spread, spread + 1, size)
    is_zero = (np.arange(size) == 0) | (rng.random(size) < 0.1)
    return np.where(is_zero, -0.0, values).astype(np.float32)


def tree(parts):
    """The definition of the tree, by recursive halving."""
    half = len(parts) // 2
    return parts[0] if half == 0 else tree(parts[:half]) + tree(parts[half:])


def bits(values):
    array = np.asarray(values)
    assert array.dtype == np.float32
    return array.reshape(-1).view(np.uint32).tolist()


# ---- inside a rank, and across simulated ranks ---------------------------------------------------


@pytest.mark.parametrize("bad", [0, 3, 6, -4])
def test_the_number_of_leaves_must_be_a_power_of_two(bad):
    with pytest.raises(ValueError, match=f"leaves of a rank: got {bad}, expected a power of two"):
        LeafAccumulator([], bad, micro_batches_per_leaf=1)


@settings(max_examples=examples(1.2))
@given(
    log_k=st.integers(0, 5),
    log_w=st.integers(0, 5),
    micros=st.integers(1, 3),
    n=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    absent=st.sampled_from([None, 0, 1]),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_every_split_of_the_tree_has_the_same_bits(
    log_k, log_w, micros, n, dtype, absent, seed, data
):
    """Also for micro-batches in bfloat16, which are added in float32, and with odd or even leaves
    without a gradient, which count as 0.0."""
    K, world_size = 1 << log_k, 1 << min(log_k, log_w)
    gradients = [
        [
            torch.from_numpy(wild(n, [seed, leaf, micro], spread=40)).to(dtype)
            for micro in range(micros)
        ]
        for leaf in range(K)
    ]
    leaves = [
        reduce(np.add, [gradient.float().numpy() for gradient in of_leaf]) for of_leaf in gradients
    ]
    leaves = [np.zeros_like(leaf) if i % 2 == absent else leaf for i, leaf in enumerate(leaves)]
    parts = []
    for of_rank in np.split(np.arange(K), world_size):
        param = torch.nn.Parameter(torch.zeros(n, dtype=dtype))
        accumulator = LeafAccumulator(
            [param], len(of_rank), micro_batches_per_leaf=micros, on_host=data.draw(st.booleans())
        )
        for leaf in of_rank:
            for gradient in gradients[leaf] if leaf % 2 != absent else ():
                param.view_as(param).backward(gradient.clone())
            accumulator.leaf_done()
        parts.append(torch.zeros(n) if param.grad is None else param.grad.float())
    assert bits(add_in_tree_order(torch.stack(parts))) == bits(tree(leaves))


@pytest.mark.parametrize("W", range(1, 12))
def test_ranks_are_added_in_pairs_and_an_odd_rank_is_carried_up(W):
    rows = [wild(37, [W, rank]) for rank in range(W)]
    expected = list(rows)
    while len(expected) > 1:
        pairs = [expected[i] + expected[i + 1] for i in range(0, len(expected) - 1, 2)]
        expected = pairs + expected[len(pairs) * 2 :]
    assert bits(add_in_tree_order(torch.from_numpy(np.stack(rows)))) == bits(expected[0])


# ---- across processes ----------------------------------------------------------------------------

NODES = {1: [1], 2: [2], 4: [4, 2], 8: [8, 4, 2]}  # {W: ranks per node}
MESSAGES = {"long": (torch.float32, 300), "narrow": (torch.bfloat16, 37)}  # dtype, chunk


def messages(rank, W):
    return {
        name: torch.from_numpy(wild(W * chunk, [W, rank, chunk])).to(dtype)
        for name, (dtype, chunk) in MESSAGES.items()
    }


def slices(rank, W):
    """{ranks per node: {message: this rank's chunk of the sum}}. Both messages are in flight at
    once."""
    received = {}
    for L in NODES[W]:
        reduce_message, sent = reduce_over_nodes(L), messages(rank, W)
        assert (reduce_message is tree_reduce) == (L == W)
        pending = {name: reduce_message(message, rank, W) for name, message in sent.items()}
        received[L] = {name: finish() for name, finish in pending.items()}
        assert all(
            torch.equal(sent[name], message) for name, message in messages(rank, W).items()
        ), "written to"
    return received


@pytest.fixture(scope="module")
def received(tmp_path_factory):
    return on_ranks(slices, list(NODES), tmp_path_factory.mktemp("reduce"))


@pytest.mark.parametrize(("W", "L"), [(W, L) for W, of_W in NODES.items() for L in of_W])
def test_each_rank_gets_its_chunk_of_the_tree_for_any_number_of_nodes(received, W, L):
    for name in MESSAGES:
        parts = [messages(rank, W)[name].float().numpy() for rank in range(W)]
        assert W < 4 or bits(tree(parts[1:] + parts[:1])) != bits(tree(parts)), (
            "the case: order matters"
        )
        assert bits(torch.cat([of_rank[L][name] for of_rank in received[W]])) == bits(tree(parts))


# ---- messages ------------------------------------------------------------------------------------


def two_parameters(dtype):
    """Two vectors of 5 elements, in one message for two ranks."""
    params = [torch.nn.Parameter(torch.zeros(5, dtype=dtype)) for _ in range(2)]
    [message] = lay_out(
        [Part(f"p{i}", param, {"kind": "adamw"}, 0, 5) for i, param in enumerate(params)], 2
    )
    return params, message


def test_gradients_have_the_dtype_of_their_parameters_unless_they_are_sums():
    params, message = two_parameters(torch.bfloat16)
    params[1].grad = torch.full((5,), 2**-9).bfloat16()
    LeafAccumulator(params, 1, micro_batches_per_leaf=1)
    assert message.gradients().dtype == torch.bfloat16 and message.gradients().sum() == 5 * 2**-9
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
    params, message = two_parameters(torch.float32)
    message.gather(message.parameters(), 0)()
    assert [param.tolist() for param in params] == [[0.0] * 5, [1.0] * 5]


# ---- stacks of matrices --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_matrices", "num_leaves", "expected"),
    # 6 of 48 / 8; 8 of 48; 7 of 14; 1 of 11; 8 does not divide 12
    [(48, 8, 6), (48, 1, 8), (14, 1, 7), (11, 1, 1), (12, 8, 1)],
)
def test_a_stack_is_the_largest_divisor_of_a_leafs_share(num_matrices, num_leaves, expected):
    assert stack_size(num_matrices, num_leaves) == expected


@settings(max_examples=examples(1))
@given(
    decks=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    log_k=st.integers(0, 4),
    W=st.integers(1, 17),
    small=st.integers(0, 5),
)
def test_the_sizes_of_stacks_depend_on_the_leaves_and_not_on_the_number_of_processes(
    decks, log_k, W, small
):
    """If W divides K, a deck has stacks of one size; else some of its messages may be alone."""
    K = 1 << log_k
    params = []
    for deck, num_matrices in enumerate(decks):
        group = {"kind": "muon"}
        for i in range(num_matrices):
            # all matrices have 24 elements, so that only their groups separate their messages
            matrix = torch.empty(4, 6) if deck % 2 else torch.empty(6, 4)
            params.append(Part(f"{deck}.{i}", matrix, group, 0, 24))
    for i in range(small):
        params.append(Part(f"small.{i}", torch.empty(24), {"kind": "adamw"}, 0, 24))
    messages = lay_out(params, W, num_leaves=K)

    sizes = {}
    while messages:
        stack = messages[: messages[0].stack]
        del messages[: len(stack)]
        assert {message.stack for message in stack} == {len(stack)}
        names = [part.name for message in stack for part in message.parts if part]
        of_decks = {name.partition(".")[0] for name in names}
        assert len(of_decks) == 1
        sizes.setdefault(of_decks.pop(), set()).add(len(stack))
        assert len(stack) == 1 or len(names) == len(stack) * W, "each rank owns a matrix of each"
    assert sizes.pop("small", {1}) == {1}
    for deck, of_deck in sizes.items():
        size = stack_size(decks[int(deck)], K)
        assert of_deck == {size} if K % W == 0 else of_deck <= {1, size}
