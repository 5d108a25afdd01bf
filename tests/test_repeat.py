"""Several seeds of one configuration: the statistics against published tables, and the command on tiny runs."""

import math

import pytest

from scripts import repeat
from tests import training

workplace = training.in_workplace(**training.SMALL, num_iterations=2, save_every=-1, eval_every=2)


def test_quantiles_are_those_of_the_tables():
    """Student's t and chi-squared, as printed in statistics textbooks."""
    for p, degrees, t in ((0.975, 1, 12.706), (0.975, 4, 2.776), (0.95, 9, 1.833), (0.975, 38, 2.024)):
        assert repeat.student_t(p, degrees) == pytest.approx(t, abs=6e-4)
    low, high = repeat.deviation_interval(1.0, 5)  # chi-squared of 4 degrees: 11.143 and 0.4844
    assert (low, high) == pytest.approx((math.sqrt(4 / 11.143), math.sqrt(4 / 0.4844)), rel=1e-3)


def test_signs_are_flipped_in_all_ways():
    assert repeat.sign_flip_p([0.3, 0.1, 0.2, 0.5, 0.4]) == 2 / 32
    assert repeat.sign_flip_p([1.0, -1.0]) == 1.0 and repeat.sign_flip_p([0.0, 0.0, 0.0]) == 1.0
    assert repeat.sign_flip_p([3.0, 2.0, -1.0]) == 4 / 8  # |sum| of 4 or more: +++, ++-, and their mirror images


def test_the_smallest_difference_is_the_one_at_the_edge_of_significance():
    unpaired, paired = repeat.smallest_difference(0.01, 0.005, 5)
    assert unpaired == pytest.approx(2.306 * 0.01 * math.sqrt(2 / 5), rel=1e-3)
    assert paired == pytest.approx(2.776 * 0.005 / math.sqrt(5), rel=1e-3)
