"""Horizon and schedule against manually computed numbers."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.schedule import Schedule, resolve_horizon
from tests.toy import if_a_fork_changed

FLAGS = {
    "num_iterations": -1,
    "target_flops": -1.0,
    "target_param_data_ratio": -1.0,
    "total_batch_size": -1,
    "weight_decay": 0.28,
    "sequence_len": 2048,
    "scaling_params": 100_000_000,
    "reference_scaling_params": 100_000_000,
    "flops_per_token": 1e9,
}


def horizon(**changes):
    return resolve_horizon(**{**FLAGS, **changes})


# ---- horizon -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, batch, lr, steps",
    [(1, 2**19, 1.0, 1907), (16, 2**21, 2.0, 7629), (1 / 16, 2**17, 0.5, 476)],
)
def test_a_larger_model_gets_a_larger_batch(size, batch, lr, steps):
    """1e9 / 2**19 = 1907.3. 16^0.383 = 2^1.532 is rounded to 4."""
    h = horizon(target_param_data_ratio=10, scaling_params=int(100_000_000 * size))
    assert (h.total_batch_size, h.batch_lr_scale, h.num_iterations) == (batch, lr, steps)
    assert (
        h.weight_decay_scaled == pytest.approx(0.28 * lr / size) and h.total_tokens == steps * batch
    )


def test_iterations_take_precedence_over_flops_and_flops_over_the_ratio():
    every = {"num_iterations": 7, "target_flops": 1e9 * 2**19 * 11.4, "target_param_data_ratio": 12}
    assert horizon(**every).num_iterations == 7
    assert horizon(**{**every, "num_iterations": -1}).num_iterations == 11
    assert horizon(**{**every, "num_iterations": -1, "target_flops": -1}).num_iterations == 2288


def test_an_explicit_batch_is_used():
    h = horizon(num_iterations=1, total_batch_size=2**17)
    assert (h.total_batch_size, h.batch_lr_scale, h.weight_decay_scaled) == (2**17, 0.5, 0.14)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, "--num-iterations, --target-flops, --target-param-data-ratio"),
        ({"target_flops": 1.0}, "--target-flops: .* less than one step"),
        ({"target_param_data_ratio": 0.001}, "--target-param-data-ratio: .* less than one step"),
        ({"target_flops": 1e300}, "--target-flops: .* steps, expected at most"),
        (
            {"target_param_data_ratio": 1e300},
            "--target-param-data-ratio: .* steps, expected at most",
        ),
        ({"curriculum_tokens": 10**30}, "--curriculum: .* steps, expected at most"),
        *(
            (
                {"num_iterations": 1, "total_batch_size": wrong},
                "--total-batch-size.*--max-seq-len 2,048",
            )
            for wrong in (2**17 + 1, 1024, 0, -2048)
        ),
    ],
)
def test_an_impossible_horizon_or_batch_is_refused(changes, error):
    with pytest.raises(ValueError, match=error):
        horizon(**changes)


@given(T=st.integers(1, 200_000), params=st.integers(1, 10**12))
def test_an_automatic_batch_is_a_power_of_two_rows(T, params):
    h = horizon(num_iterations=1, sequence_len=T, scaling_params=params)
    rows = h.total_batch_size // T
    assert h.total_batch_size == rows * T and rows >= 1 and rows & (rows - 1) == 0
    exact = 2**19 * (params / 100_000_000) ** 0.383
    assert rows == 1 or abs(math.log2(h.total_batch_size / exact)) <= 0.5 + 1e-9


# ---- schedule ------------------------------------------------------------------------------------

LONG = Schedule(
    num_iterations=2000,
    warmup_steps=40,
    warmdown_ratio=0.5,
    final_lr_frac=0.05,
    peak_weight_decay=0.2,
)


@pytest.mark.parametrize(
    "curve, expected",
    [
        (
            LONG.lr,
            {
                0: 1 / 40,
                19: 0.5,
                39: 1.0,
                40: 1.0,
                1000: 1.0,
                1500: 0.525,
                1900: 0.145,
                2000: 0.05,
                2500: 0.05,
            },
        ),
        (
            LONG.momentum,
            {0: 0.85, 100: 0.88, 200: 0.91, 400: 0.97, 1000: 0.97, 1500: 0.935, 2000: 0.90},
        ),
        (
            LONG.weight_decay,
            {0: 1.0, 500: 0.5 * (1 + math.sqrt(0.5)), 1000: 0.5, 2000: 0.0, 3000: 0.0},
        ),
        (Schedule(10, warmup_steps=0, warmdown_ratio=0.0).lr, dict.fromkeys(range(11), 1.0)),
    ],
)
def test_curves(curve, expected):
    with if_a_fork_changed("this curve", "change the numbers above to those of the new one"):
        assert {step: curve(step) for step in expected} == pytest.approx(expected)


@given(
    steps=st.integers(1, 60),
    warmup=st.integers(0, 200),
    ratio=st.floats(0, 1),
    frac=st.floats(0, 1),
)
def test_in_short_runs_rates_are_bounded_rise_fall_and_never_jump(steps, warmup, ratio, frac):
    s = Schedule(steps, warmup_steps=warmup, warmdown_ratio=ratio, final_lr_frac=frac)
    rates = [s.lr(i) for i in range(steps + 1)]
    assert all(0 <= r <= 1 for r in rates)
    assert all(
        0.85 <= s.momentum(i) <= 0.97 and 0 <= s.weight_decay(i) <= 1 for i in range(steps + 1)
    )
    if s.falls_for:
        assert rates[-1] <= frac + 1e-12
    assert s.highest_lr() == pytest.approx(max(rates[:steps]), abs=1e-12)
    peak = rates.index(max(rates))
    changes = [b - a for a, b in pairwise(rates)]  # with a tolerance for rounding
    assert all(c > -1e-12 for c in changes[:peak]) and all(c < 1e-12 for c in changes[peak:])
    slope = max(1 / warmup if warmup else 0, (1 - frac) / s.falls_for if s.falls_for else 0)
    steepest = math.pi / 2 * slope  # of half a cosine, which a fork may use instead of a line
    assert all(abs(change) <= steepest + 1e-12 for change in changes), "no jumps"


def test_apply_sets_groups_by_kind():
    adam = {"kind": "adamw", "lr": 9.0, "initial_lr": 0.3, "weight_decay": 0.01}
    muon = {"kind": "muon", "lr": 9.0, "initial_lr": 0.02, "momentum": 0.0, "weight_decay": 9.0}
    LONG.apply(SimpleNamespace(param_groups=[adam, muon]), 1500)
    assert adam == {
        "kind": "adamw",
        "lr": pytest.approx(0.3 * 0.525),
        "initial_lr": 0.3,
        "weight_decay": 0.01,
    }
    assert muon == pytest.approx(
        {
            "kind": "muon",
            "lr": 0.02 * 0.525,
            "initial_lr": 0.02,
            "momentum": 0.935,
            "weight_decay": 0.2 * 0.5 * (1 + math.cos(0.75 * math.pi)),
        }
    )
