"""Every step is a checkpoint: a step that was not saved is replayed, to the last bit."""

import json
import math
from unittest import mock

import pytest

from nanochat.checkpoint import load_checkpoint
from scripts import base_train, inspect_data, replay, sample
from tests import training
from tests.finished import RUN, STEPS, command, copy
from tests.training import as_bytes


@pytest.fixture(autouse=True)
def workplace(finished, tmp_path):
    """A base directory with "run", which saved at steps 2, 4, 6 and 8, and "all", which saved at
    every step."""
    with training.workplace(tmp_path, **RUN) as path:
        copy(finished, path)
        yield path


def checkpoint(step, tag="run"):
    return training.run_dir(tag) / "checkpoints" / f"checkpoint-{step}"


def state(step, tag="run"):
    """Weights, optimizer state and cursors of a checkpoint."""
    loaded = load_checkpoint(checkpoint(step, tag))
    return as_bytes([loaded.model_state(), loaded.optimizer_state(), loaded.cursors])


@pytest.fixture
def twin():
    """The same run, saved at every step."""
    training.succeed(model_tag="twin", save_every=1)


@pytest.mark.parametrize("step", [0, 1, 5, 7])
def test_a_replayed_step_is_the_saved_one_in_every_bit(twin, step):
    outcome = command(replay.main, f"run@{step}")
    assert outcome.code == 0, outcome.err
    if step > 0:
        assert state(step) == state(step, "twin")
    assert load_checkpoint(checkpoint(step)).seal["kept"]


def test_on_two_processes_and_after_a_resume_the_bits_are_the_same(twin):
    """The run was on one process with one leaf; a run with two leaves may use both."""
    training.finish(2, model_tag="two", leaves=2, save_every=4)
    training.succeed(model_tag="all-two", leaves=2, save_every=1)
    assert command(replay.main, "two@7").code == 0
    assert state(7, "two") == state(7, "all-two")


def test_across_a_launch_with_a_longer_horizon_each_step_has_the_schedule_of_its_launch():
    training.succeed(num_iterations=STEPS + 4, save_every=-1)
    assert command(replay.main, f"run@{STEPS + 2}").code == 0
    training.succeed(num_iterations=STEPS + 4, resume=f"run@{STEPS + 2}", force=True)
    assert len(training.digests()) == STEPS + 4


def test_a_skipped_step_whose_loss_was_not_finite_is_replayed():
    """Regression: the log has null for it, which no number equals."""
    forward_backward = base_train.forward_backward

    def broken_once(parts):
        rows, shortage = forward_backward(parts)
        if parts.progress.step == 18:
            rows[:, 0] = math.nan  # the losses
        return rows, shortage

    with mock.patch.object(base_train, "forward_backward", broken_once):
        training.succeed(model_tag="spiky", skip_spikes=50, num_iterations=21, save_every=16)
        assert training.steps("spiky")[18]["loss"] is None
        outcome = command(replay.main, "spiky@20")
    assert outcome.code == 0, outcome.err
    assert load_checkpoint(checkpoint(20, "spiky")).seal["progress"]["skipped"] == 1


def test_a_replay_is_kept_by_retention():
    command(replay.main, "run@5")
    training.succeed(num_iterations=STEPS + 4, keep_last_k=1, save_every=2)
    names = training.checkpoints()
    assert "checkpoint-5" in names and "checkpoint-6" not in names


def test_kept_elsewhere_it_changes_nothing_in_the_run(tmp_path):
    before = training.fingerprint(training.run_dir())
    assert command(replay.main, "run@5", f"--out={tmp_path / 'out'}").code == 0
    assert training.fingerprint(training.run_dir()) == before
    assert load_checkpoint(tmp_path / "out/checkpoints/checkpoint-5").step == 5


def test_a_fork_from_a_step_that_was_not_saved_equals_its_parent():
    """Also if the data was moved: the replay was not told where it is."""
    data = training.run_dir().parents[1] / "data"
    moved = data.rename(data.with_name("moved"))
    outcome = training.succeed(fork_from="run@5", model_tag="child", data_path=moved)
    assert "replay: 1 step" in outcome.out or checkpoint(5).exists()
    assert training.digests("child", 5) == training.digests()[5:]
    assert training.losses("child") == training.losses()[5:]
    assert as_bytes(load_checkpoint(training.final("child")).model_state()) == as_bytes(
        load_checkpoint(training.final()).model_state()
    )


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_replay_finds_data_with_a_relative_path(monkeypatch, workplace, is_moved):
    """Regression: "is missing here, and this run has read it in ..." from another folder."""
    monkeypatch.chdir(workplace)
    training.succeed(model_tag="relative", data_path="data")
    elsewhere = workplace / "elsewhere"
    elsewhere.mkdir()
    if is_moved:  # with the folder in which the path is relative
        (workplace / "data").rename(elsewhere / "data")
    monkeypatch.chdir(elsewhere)
    assert command(replay.main, "relative@5").code == 0
    assert command(inspect_data.main, "rows", "relative", "--step=5").code == 0
    with mock.patch.object(training, "flags", lambda **named: training.as_flags(named)):
        moved = {"data_path": "data"} if is_moved else {}
        training.succeed(fork_from="relative@3", model_tag="child", **moved)
    assert training.digests("child", 3) == training.digests("relative")[3:]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fork_from": "run@5", "seed": 7}, "--seed"),
        ({"fork_from": "run@1", "lanes": 8}, "--lanes"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_before_its_step_is_replayed(changed, words):
    """Regression: a wrong flag was found only after a replay, which may take minutes."""
    with mock.patch.object(base_train, "make_available", mock.Mock(side_effect=AssertionError)):
        error = training.refuse(model_tag="child", **changed)
    assert words in error and not training.run_dir("child").exists()


def test_a_run_may_resume_at_a_step_that_was_not_saved():
    before = training.losses()
    outcome = training.succeed(resume="run@5")
    assert "at step 5" in outcome.out
    assert training.losses() == before and len(training.all_steps()) == STEPS + 3


def test_a_sample_of_a_step_that_was_not_saved_keeps_nothing_if_asked():
    before = training.checkpoints()
    outcome = command(sample.main, "run@3", "--no-keep", "--max-tokens=2", "--prompt=a")
    assert outcome.code == 0 and "a" in outcome.out
    assert training.checkpoints() == before


# ---- what does not fit ---------------------------------------------------------------------------


def edit_log(step, **changed):
    """Change a step's line in the log."""
    path = training.log_file()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("step") == step and "digest" in line:
            line |= changed
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"digest": "0" * 16}, ("step 4", "other rows", "may have been edited")),
        ({"loss": 5.0}, ("step 4", "same rows", "other bits", "the log has 5.0")),
    ],
)
def test_a_step_that_differs_from_the_log_ends_the_replay_and_keeps_nothing(changed, words):
    edit_log(4, **changed)
    outcome = command(replay.main, "run@5")
    assert outcome.code == 1 and all(word in outcome.err for word in words), outcome.err
    assert not checkpoint(5).exists()


def test_a_known_difference_of_the_machine_is_named():
    path = training.log_file()
    path.write_text(path.read_text().replace('"cpu_capability": "', '"cpu_capability": "OTHER '))
    edit_log(4, loss=5.0)
    assert "cpu_capability was OTHER " in command(replay.main, "run@5").err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("run@99", ("trained 8 steps",)),
        ("run", ("expected RUN@STEP",)),
        ("nobody@3", ("nobody",)),
    ],
)
def test_a_step_that_cannot_be_is_refused_in_one_sentence(name, words):
    outcome = command(replay.main, name)
    assert outcome.code == 1 and all(word in outcome.err for word in words), outcome.err


def test_a_step_before_a_fork_names_its_parent():
    training.succeed(fork_from="run@6", model_tag="child")
    assert "run@3" in command(replay.main, "child@3").err


def test_data_that_has_changed_is_named(workplace):
    path = next((workplace / "data").glob("*.parquet"))
    training.write_shard(path, training.texts(50, seed=8))
    assert path.name in command(replay.main, "run@5").err
