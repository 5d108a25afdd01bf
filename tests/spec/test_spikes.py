"""The limits for spikes follow the recent steps and resist outliers."""

import math

import pytest

from nanochat import spikes


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


def test_too_few_steps_have_no_limits():
    window = [[3.0, 1.0]] * (spikes.ENOUGH - 1)
    assert spikes.limits(window, 5.0) == (math.inf, math.inf)
    assert spikes.limits([*window, [3.0, 1.0]], 5.0) == (3.0, 1.0)


def test_a_spike_is_described_by_the_value_that_is_above_its_limit():
    """Regression: "loss 4.919418, gradient norm 0.9458, above the --skip-spikes limit"."""
    window = [[3.0, 1.0]] * spikes.ENOUGH
    assert spikes.describe(4.9, 0.9458, window, 5.0) == (
        "loss 4.900000 is above its limit 3.000000, gradient norm 0.9458 is within its limit 1.0000"
    )
    assert "loss 2.900000 is within" in spikes.describe(2.9, math.nan, window, 5.0)
    assert "gradient norm nan is above" in spikes.describe(2.9, math.nan, window, 5.0)


def test_the_window_has_the_newest_steps_oldest_first():
    window = []
    for i in range(spikes.WINDOW + 5):
        window = spikes.remember(window, float(i), 0.0)
    assert [loss for loss, _ in window] == [*range(5, spikes.WINDOW + 5)]
