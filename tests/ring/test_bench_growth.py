"""dev.bench_growth: sizes are measured in processes of their own, and the exponent is that of the
last two sizes."""

import pytest

from dev import bench_growth
from dev.bench_growth import Cost, Part, exponent, in_child, rows_of


def test_a_size_is_measured_in_a_process_whose_memory_does_not_count_in_the_next_one():
    part = Part(lambda size, work: {"bytes": bench_growth.cost(lambda: b"x" * (size << 20))}, [])
    assert [in_child(part, size)["bytes"].megabytes > 50 for size in (100, 1)] == [True, False]


def test_a_size_that_fails_is_named_with_its_error():
    def files(size, work):
        raise ValueError("no disk")

    with pytest.raises(ValueError, match="files of 1,000: ValueError: no disk"):
        in_child(Part(files, []), 1000)


def test_the_exponent_of_a_square_is_2():
    found = {size: {"time": Cost(size**2, 1.0)} for size in (1, 10, 100)}
    [[_, _, seconds, grows, _]] = rows_of("squares", [1, 10, 100], found)
    assert (seconds, grows) == ("1, 100, 1e+04", "2.00") and exponent([5], [1.0]) != 2


def test_each_quantity_has_a_sentence_and_ascending_sizes():
    for part in bench_growth.PARTS.values():
        assert part.measure.__doc__ and [*part.sizes] == sorted(set(part.sizes))
