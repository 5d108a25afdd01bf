"""The promise to the bit: for every W that divides K, a run has the same weights, optimizer state,
losses, gradient norms and validation results, however it is killed, stopped and moved. Mutations
that break the promise are detected."""

import contextlib
import os
import random
import signal
import socket
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from nanochat import gpt, optim, reduce, trainer
from nanochat.checkpoint import load_checkpoint
from nanochat.common import counted
from nanochat.run_dir import iter_log
from scripts import base_train, compare_runs, tok_shards
from tests import training
from tests.training import a_step_is_a_second, after_step, as_bytes, die_after_step, send, steps

K = 4
WORLD_SIZES = (1, 2, 4)
T = 16
V = 8
ROWS = 32
RUN = {  # 44 columns: embeddings have 55 grains, so that their messages are padded and packed
    "depth": 2,
    "aspect_ratio": 22,
    "head_dim": 22,
    "max_seq_len": T,
    "lanes": V,
    "leaves": K,
    "num_iterations": 30,
    "total_batch_size": T * ROWS,
    "overlap": 4,
    "plan": "warn",
    "eval_every": 10,
    "eval_tokens": T * 40,
    "save_every": 10,
}
THOROUGH = settings.get_current_profile_name() == "thorough"
if not THOROUGH:  # a difference shows in the first steps
    RUN |= {"num_iterations": 12, "eval_every": 3, "save_every": 6, "eval_tokens": T * 16}
# {micro-batches per leaf of 8 rows: B}; with 3 there is a dead row
BATCHES = {1: 8, 2: 4, 3: 3, 8: 1}
CASES = {
    f"{number}, {dtype}": {"device_batch_size": B, "dtype": dtype}
    for number, B in BATCHES.items()
    for dtype in ("float32", "bfloat16")
}
if not THOROUGH:
    CASES = {
        case: {**CASES[case], "num_iterations": num}
        for case, num in (("1, float32", 2), ("3, bfloat16", 3), ("8, float32", 2))
    }


# ---- a model that has everything -----------------------------------------------------------------


@contextlib.contextmanager
def everything():
    """Fewer key heads than query heads, and both cut and uncut tensors, in several messages."""
    from_depth = gpt.GPTConfig.from_depth

    def with_fewer(*args, **kwargs):
        return replace(from_depth(*args, **kwargs), n_kv_head=1)

    with (
        mock.patch.object(gpt.GPTConfig, "from_depth", with_fewer),
        mock.patch.object(reduce, "SMALL_ELEMENTS", 8192),
    ):
        yield


# ---- several runs in one set of processes --------------------------------------------------------

Job = tuple[str, dict[str, Any]]  # a name in MUTATIONS or "", and changes to RUN


def _main(jobs, ports, argv):
    for (mutation, flags), port in zip(jobs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        torch.manual_seed(random.SystemRandom().getrandbits(32))  # results must not depend on it
        with everything(), MUTATIONS[mutation][0]() if mutation else contextlib.nullcontext():
            assert base_train.main(training.flags(**flags)) == 0
    return 0


def run_jobs(world_size, jobs):
    """Run all jobs, one after another, in one set of processes: far faster than a set for each."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in jobs]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        ports = [s.getsockname()[1] for s in sockets]
    # here, because a child lacks the profile
    merged = [(mutation, {**RUN, **changed}) for mutation, changed in jobs]
    group = training.launch(partial(_main, merged, ports), [[]] * world_size, [{}] * world_size)
    assert group.wait() == [0] * world_size, group.text()
    return group.text()


def result(tag):
    """Everything that must be equal, with tensors as bytes."""
    final = load_checkpoint(training.run_dir(tag) / "checkpoints" / "final")
    log = list(iter_log(training.run_dir(tag) / "logs" / "train.jsonl"))
    of_steps = [steps(tag)[step] for step in sorted(steps(tag))]
    return {
        "weights": as_bytes(final.model_state()),
        "optimizer": as_bytes(final.optimizer_state()),
        "digests": [record["digest"] for record in of_steps],
        "losses": [record["loss"] for record in of_steps],
        "norms": [record["grad_norm"] for record in of_steps],
        "validation": {
            record["step"]: record["bpb"] for record in log if record.get("event") == "val"
        },
    }


def differences(tag, other):
    """The keys in which the results of two runs differ."""
    a, b = result(tag), result(other)
    return {key for key in a if a[key] != b[key]}


@pytest.fixture(autouse=True)
def no_environment():
    with mock.patch.dict(os.environ):
        yield


# ---- on any number of processes ------------------------------------------------------------------


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Every case on every number of processes, and every mutation on one and on several: the runs
    "W CASE" and "W MUTATION". Returns the output by W."""
    with training.workplace(tmp_path_factory.mktemp("bitwise")):
        yield {world_size: run_jobs(world_size, [*jobs(world_size)]) for world_size in WORLD_SIZES}


def jobs(world_size):
    for case, changed in CASES.items():
        yield "", {**changed, "model_tag": f"{world_size} {case}"}
    for name, (_, on, _) in MUTATIONS.items():
        if world_size in (1, on):
            dtype = "bfloat16" if "bfloat16" in name else "float32"
            yield name, {**SHORT, "model_tag": f"{world_size} {name}", "dtype": dtype}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_every_bit_is_the_same_on_any_number_of_processes(printed, case, world_size):
    assert differences(f"1 {case}", f"{world_size} {case}") == set()


def test_the_cases_have_their_stated_shapes(printed):
    for case, changed in CASES.items():
        run = result(f"1 {case}")
        num_steps, every = changed.get("num_iterations", RUN["num_iterations"]), RUN["eval_every"]
        assert len(set(run["digests"])) == len(set(run["losses"])) == num_steps
        assert sorted(run["validation"]) == sorted({*range(0, num_steps + 1, every), num_steps})
        assert run["losses"][-1] < run["losses"][0]
        dtypes = {dtype for dtype, _, _ in run["weights"].values()}
        assert ("torch.bfloat16" in dtypes) == (changed["dtype"] == "bfloat16")
        lines = [
            line
            for line in printed[1].splitlines()
            if line.startswith(f"step: {ROWS} rows ") and f" from {V} lanes; 1 process x " in line
        ]
        part = f" x {counted(K * int(case[0]), 'micro-batch')} of {changed['device_batch_size']} rows; {K} leaves"
        assert any(part in line for line in lines)
    weights = run["weights"]
    shapes = [shape for _, shape, _ in weights.values()]
    assert any(name.startswith("value_embeds") for name in weights)
    assert (
        weights["transformer.h.0.attn.c_q.weight"][1]
        == (44, 44)
        != weights["transformer.h.0.attn.c_k.weight"][1]
    )
    matrices = [
        name for name, (_, shape, _) in weights.items() if len(shape) == 2 and ".h." in name
    ]
    assert len(matrices) % 4 and len(shapes) % 4 and len(shapes) % 2
    with everything():
        cut = [
            reduce.Part(name, torch.zeros(shape), {"kind": "adamw"}, 0, shape[0] * shape[1])
            for name, (_, shape, _) in weights.items()
            if name.endswith(("wte.weight", "lm_head.weight"))
        ]
        assert cut and all(part.grain < part.stop for part in cut)
        assert all(
            2 * message.chunk > part.stop for message, part in zip(reduce.lay_out(cut, 2), cut)
        ), "padded"


# ---- killed, stopped and moved -------------------------------------------------------------------


def chain(*hooks):
    """Enter `everything` for the rest of a process, then call other hooks."""
    everything().__enter__()
    for hook in hooks:
        hook()


@pytest.fixture
def corpus(tmp_path):
    """Flags for two kinds of data: streamed parquet, and shards under a curriculum."""
    with training.workplace(tmp_path) as path:
        for i, bucket in enumerate(("code", "web")):
            for j, documents in enumerate((80, 80, 8)):
                training.write_shard(
                    path / "text" / bucket / f"{j}.parquet",
                    training.texts(documents, seed=10 * i + j),
                )
        assert (
            tok_shards.main(
                [
                    f"--input-dir={path / 'text'}",
                    f"--output-dir={path / 'shards'}",
                    "--num-workers=1",
                    f"--tokenizer={path / 'tokenizer'}",
                    "--max-length=0",
                ]
            )
            == 0
        )
        tokens = T * ROWS * RUN["num_iterations"] // 2
        (path / "mix.yaml").write_text(
            f"curriculum:\n- {{duration_tokens: {tokens}, mix: {{code: 1, web: 3}}}}\n"
            f"- {{duration_tokens: {tokens}, mix: {{code: 2, web: 1}}}}\nmax_epochs: {{code: 9, web: 9}}\n"
        )
        yield {
            "parquet": {},
            "shards": {
                "data_path": path / "shards",
                "data_format": "shards",
                "curriculum": path / "mix.yaml",
                "num_iterations": None,
            },
        }


# parquet: test_state_machine
@pytest.mark.parametrize("kind", ["parquet", "shards"] if THOROUGH else ["shards"])
def test_killed_stopped_and_moved_it_ends_with_the_same_bits(corpus, kind):
    num = RUN["num_iterations"]
    flags = {
        **RUN,
        **corpus[kind],
        "save_every": max(2, num // 10),
        "device_batch_size": 4,
        "eval_every": num // 3,
    }
    straight = training.start(1, hook=chain, **flags, model_tag="straight")
    assert straight.wait() == [0], straight.text()

    killed, stopped = num // 4, num // 2 - 2
    training.start(
        4, hook=partial(chain, partial(die_after_step, killed)), **flags
    ).wait_for_death()
    one = training.start(
        1, hook=partial(chain, partial(after_step, stopped, partial(send, signal.SIGTERM))), **flags
    )
    assert one.wait() == [0] and f"stopped: SIGTERM; step {stopped + 2} of {num}" in one.text(), (
        one.text()
    )
    walltime_s = num // 5 + 0.5
    two = training.start(
        2,
        hook=partial(chain, partial(a_step_is_a_second, walltime_s)),
        **flags,
        max_runtime_seconds=walltime_s,
        walltime_reserve_seconds=0,
    )
    assert two.wait() == [0, 0] and "stopped: walltime" in two.text(), two.text()
    four = training.start(4, hook=chain, **flags)
    assert four.wait() == [0] * 4 and "completed" in four.text(), four.text()

    assert len(training.checkpoints()) > 3 and differences("straight", "run") == set()
    assert compare_runs.main(["straight", "run"]) == 0


# ---- mutations: each guarantee, broken on purpose ------------------------------------------------


def in_rank_order(parts):
    """((0 + 1) + 2) + 3."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def wrong_pairs(parts):
    """(0 + 2) + (1 + 3)."""
    return (parts[0] + parts[2]) + (parts[1] + parts[3]) if len(parts) == 4 else parts.sum(dim=0)


def plain_reduce(message, rank, world_size):
    """An all-reduce; each rank then keeps its own chunk."""
    message = message.float().clone()
    if world_size > 1:
        dist.all_reduce(message)
    return lambda: message.view(world_size, -1)[rank]


def in_parameters_dtype(self):
    return GRADIENTS(self).to(self.first.param.dtype)


def batched(G, steps=5):
    """Stands for polar_express in a batch, whose kernel rounds differently on some CPUs. Computing
    in float64 rounds differently on every CPU."""
    return POLAR(G.double(), steps).to(G.dtype)


def batched_update(self, part, param, grad, **scalars):
    alike = sum(p is not None and p.param.shape == part.param.shape for p in self._mine)
    with mock.patch.object(optim, "polar_express", batched if alike > 1 else POLAR):
        UPDATE(self, part, param, grad, **scalars)


def with_scalar_tail(param, grad, exp_avg, exp_avg_sq, *, rate, **kwargs):
    """An elementwise update whose vectorized and scalar forms round differently, as `pow` does on
    some CPUs: the elements after the last whole vector differ in their last bits."""
    exp_avg.add_(grad)
    exp_avg[len(exp_avg) // 8 * 8 :] *= 1 + 2**-20
    param.copy_(param.float() - exp_avg * rate)


def rounded(total):
    """An odd multiple of 2**-9 near `total`. The sum of two such numbers is never another one, so
    rounding each rank's share differs from rounding the total on every CPU."""
    return (2 * torch.floor(total.double() * 2**8) + 1) / 2**9


def sums_by_rank(rows, *args, **kwargs):
    """Each rank adds up and rounds its own losses."""
    total = torch.zeros_like(rows)
    total[0] = rows.sum(dim=0)  # the only bucket has number 0
    total[0, 0] = rounded(total[0, 0])  # total[0, 1] is the number of targets
    return ADD_UP(total, *args, **kwargs)


def norm_by_rank(self, chunks):
    """Each rank adds up and rounds its own sums of squares."""
    total = rounded(torch.stack([chunk.square().sum() for chunk in chunks]).sum())
    if self._world_size > 1:
        dist.all_reduce(total)
    return total.sqrt().float()


def from_global_generator(name, shape, *, seed, n_embd):
    return torch.randn(shape) * 0.02


@contextlib.contextmanager
def odd_cuts():
    """Large tensors are cut inside vectors: 61 grains of 231 elements."""
    with patch(reduce, "GRAINS", 61), patch(reduce, "ALIGNED", 1):
        yield


@contextlib.contextmanager
def odd_cuts_and_tails():
    with odd_cuts(), patch(optim, "adamw_update", with_scalar_tail):
        yield


GRADIENTS = reduce.Message.gradients
UPDATE = optim.MuonAdamW._update
ADD_UP = trainer.add_up
POLAR = optim.polar_express
patch = mock.patch.object
SHORT = {  # three layers, so that there are two gates of 1 x 12
    "num_iterations": 5 if THOROUGH else 2,
    "device_batch_size": 8,
    "save_every": -1,
    "eval_every": -1,
    "depth": 3,
    "aspect_ratio": 14,
}
# after a few steps, losses may differ in the last bits, or round to equal values
TRAINED = {"weights", "optimizer"}
MUTATIONS = {  # name: (context manager, number of processes, what must differ)
    "ranks in a row": (lambda: patch(reduce, "add_in_tree_order", in_rank_order), 4, TRAINED),
    "wrong pairs of ranks": (lambda: patch(reduce, "add_in_tree_order", wrong_pairs), 4, TRAINED),
    "leaves of a rank in a row": (
        lambda: patch(reduce.LeafAccumulator, "leaf_done", lambda self: None),
        2,
        TRAINED,
    ),
    "a plain all-reduce": (
        lambda: mock.patch.dict(optim.MuonAdamW.__init__.__kwdefaults__, reduce=plain_reduce),
        4,
        TRAINED,
    ),
    "bfloat16 messages": (
        lambda: patch(reduce.Message, "gradients", in_parameters_dtype),
        2,
        TRAINED,
    ),
    "a batched Newton-Schulz": (
        lambda: patch(optim.MuonAdamW, "_update", batched_update),
        4,
        {"optimizer"},
    ),
    "odd cuts and a scalar tail": (odd_cuts_and_tails, 2, {"optimizer"}),
    "losses by rank": (lambda: patch(trainer, "add_up", sums_by_rank), 2, {"losses"}),
    "norms by rank": (lambda: patch(optim.MuonAdamW, "_norm", norm_by_rank), 2, {"norms"}),
    "weights from the global generator": (
        lambda: patch(gpt, "initial_weight", from_global_generator),
        2,
        TRAINED,
    ),
    "odd cuts": (odd_cuts, 2, set()),  # breaks nothing: updates do not depend on cuts
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_guarantee_is_detected(printed, name):
    _, world_size, expected = MUTATIONS[name]
    actual = differences(f"1 {name}", f"{world_size} {name}")
    assert actual >= expected and (actual == expected or "optimizer" in expected)
