"""Every interleaving of launches that want the same run. `dev/interleavings.py` tries many more."""

import pytest

from dev import interleavings
from dev.interleavings import MISTAKES, SCENARIOS, plant, try_all, try_one
from tests.turns import Schedule, Turns


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_however_launches_interleave_one_owns_the_run_and_every_law_holds(scenario):
    assert try_all(scenario, 1, 15, at_most=30) == 45


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_breaks_a_law(mistake):
    assert plant(mistake)


def test_one_integer_names_a_schedule_and_repeats_it(monkeypatch):
    number = Schedule.encode([(3, 1), (9, 0), (20, 1)], threads=2)
    assert Schedule(number, 2).preemptions == {3: 1, 9: 0, 20: 1}
    for drawn in (number, -7):
        calls = [try_one("two", Schedule(drawn, 2)) for _ in range(2)]
        assert calls[0] == calls[1]
    problem = plant("no lock is taken")
    number = int(problem.split("--schedule=")[1].split(":")[0])
    target, mistake, scenario = MISTAKES["no lock is taken"]
    monkeypatch.setattr(target, mistake)
    with pytest.raises(interleavings.Broken, match=f"--schedule={number}: "):
        try_one(scenario, Schedule(number, 2))


def test_threads_take_turns_as_the_schedule_says():
    """The second thread goes on at call 1, and runs to its end."""
    seen = []

    def actor(name):
        for step in range(3):
            turns.turn()
            seen.append((name, step))

    turns = Turns(Schedule(Schedule.encode([(1, 1)], 2), 2))
    turns.run([lambda: actor("a"), lambda: actor("b")])
    assert seen == [("a", 0), ("b", 0), ("b", 1), ("b", 2), ("a", 1), ("a", 2)]
