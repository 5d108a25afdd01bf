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


def test_the_window_has_the_newest_steps_oldest_first():
    window = []
    for i in range(spikes.WINDOW + 5):
        window = spikes.remember(window, float(i), 0.0)
    assert [loss for loss, _ in window] == [*range(5, spikes.WINDOW + 5)]
