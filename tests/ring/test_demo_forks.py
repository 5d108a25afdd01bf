"""The demonstrations of forks, replays and proofs, made small; and a fault planted in each."""

import pytest

from dev import demo_forks
from nanochat import receipt_check
from nanochat.schedule import Schedule
from scripts import replay


@pytest.mark.parametrize("part", ["steps", "forgeries", "branch"])
def test_a_demonstration_ends_as_expected(part, capsys):
    assert demo_forks.main([part, "--tiny"]) == 0
    printed = capsys.readouterr().out
    words = {
        "steps": ["cursors: 3 of 3", "time per question"],
        "forgeries": ["5 of 5", "0 of 3"],
        "branch": ["1 of 1", "killed"],
    }
    assert all(word in printed for word in words[part]), printed


@pytest.fixture
def few(monkeypatch):
    """One case of each demonstration."""
    size = demo_forks.Size(steps=8, questions=1, forged=1, honest=0, parent=16, forks=1)
    monkeypatch.setattr(demo_forks, "TINY", size)


def only(monkeypatch, kind, story):
    """Forge runs of one kind only, with one story."""
    hack, _ = demo_forks.KINDS[kind]
    monkeypatch.setattr(demo_forks, "KINDS", {kind: (hack, (story,))})


def test_a_replay_whose_last_update_is_another_one_is_noticed(few, monkeypatch, capsys):
    rate = Schedule.lr
    monkeypatch.setattr(Schedule, "lr", lambda self, step: 1.5 * rate(self, step))
    # the run itself is trained in another process; the log shows false weights one step later
    ask = demo_forks.ask
    monkeypatch.setattr(demo_forks, "ask", lambda run, step: ask(run, step // 2 * 2 + 1))
    assert demo_forks.main(["steps", "--tiny"]) == 1
    assert "0 of 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "story"),
    [
        ("one flipped bit of one weight", demo_forks.DIGESTS),
        ("another rate for one step", demo_forks.EVERYTHING),
    ],
)
def test_a_replay_that_does_not_compare_bits_misses_a_forgery(
    few, monkeypatch, capsys, kind, story
):
    only(monkeypatch, kind, story)
    monkeypatch.setattr(replay, "first_difference", lambda *args: None)
    assert demo_forks.main(["forgeries", "--tiny"]) == 1
    assert "when their stretch is drawn: 0 of 1" in capsys.readouterr().out


def test_a_verification_that_ignores_launches_misses_a_declared_rate(few, monkeypatch, capsys):
    only(monkeypatch, "another rate for one step", demo_forks.DECLARED)
    assert demo_forks.main(["forgeries", "--tiny"]) == 0
    assert "settings 1" in capsys.readouterr().out
    monkeypatch.setattr(receipt_check, "check_launches", lambda *args: None)
    assert demo_forks.main(["forgeries", "--tiny"]) == 1


def test_an_honest_run_that_is_rejected_fails_the_demonstration(few, monkeypatch, capsys):
    size = demo_forks.Size(steps=8, questions=1, forged=0, honest=1, parent=16, forks=1)
    monkeypatch.setattr(demo_forks, "TINY", size)
    monkeypatch.setattr(replay, "first_difference", lambda *args: "a weight")
    assert demo_forks.main(["forgeries", "--tiny"]) == 1
    assert "1 of 1" in capsys.readouterr().out


def test_every_fork_that_differs_at_another_step_fails_the_demonstration(few, monkeypatch, capsys):
    monkeypatch.setattr(demo_forks, "NO_CHANGE", {"z_loss": 0.001})
    monkeypatch.setattr(demo_forks, "FASTER", {})
    monkeypatch.setattr(demo_forks, "kill_fork", lambda step: "other weights")
    first_use = demo_forks.first_use
    monkeypatch.setattr(demo_forks, "first_use", lambda *args: first_use(*args) + 1)
    assert demo_forks.main(["branch", "--tiny"]) == 1
    assert capsys.readouterr().out.count("0 of 1") == 3
