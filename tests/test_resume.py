"""However a run is cut up it is the run that nothing happened to: killed anywhere, continued on other numbers of
processes or with other batch sizes per device, it has the same batches and, where the arithmetic can be the same, ends
with the same bits."""

import random
import shutil
import time
from functools import partial

import pytest

from nanochat import checkpoint
from nanochat.gpt import GPTConfig
from tests import training
from tests.training import (
    all_steps,
    checkpoints,
    die_after_step,
    die_in,
    digests,
    events,
    final,
    losses,
    refuse,
    state_of,
    steps,
    succeed,
    take_over,
)

STEPS = 16
FOUR_ROWS = {"total_batch_size": 160 * 4, "num_iterations": STEPS}  # a step: one row of each lane


workplace = training.in_workplace(**FOUR_ROWS)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run of all tests here, not interrupted, on one process."""
    with training.workplace(tmp_path_factory.mktemp("reference"), **FOUR_ROWS):
        succeed()
        return {"final": state_of(final()), "digests": digests(), "losses": losses(), "path": training.run_dir()}


def test_the_reference_model_has_all_that_could_be_forgotten(reference):
    loaded = checkpoint.load_checkpoint(reference["path"] / "checkpoints" / "final")
    optimizer = loaded.optimizer_state()
    assert {group["kind"] for group in optimizer["groups"]} == {"muon", "adamw"}
    assert optimizer["step"] == loaded.step == STEPS
    assert any("value_embeds" in name for name in loaded.model_state())
    assert any(0 < size < loaded.model_config["sequence_len"] for size in GPTConfig(**loaded.model_config).window_sizes)
    assert len(reference["digests"]) == len(set(reference["digests"])) == STEPS


# ---- killed ---------------------------------------------------------------------------------------------------------

def test_killed_at_random_moments_and_restarted_it_ends_with_the_same_bits():
    rng, thirty = random.Random(time.time_ns()), {"num_iterations": 30}
    succeed(model_tag="whole", **thirty)

    def kill(hook):
        training.start(hook=hook, **thirty).wait_for_death()
        assert "final" not in checkpoints()

    kill(partial(die_in, "nanochat.common.fsync_dir", 2))  # while setting up
    assert training.run_dir().exists() and not (training.run_dir() / "config.json").exists()
    kill(partial(die_after_step, rng.randrange(2), rng.uniform(0, 0.01)))  # before the first save
    assert len(steps()) >= 1
    kill(partial(die_in, "nanochat.checkpoint.save_plain", 2))  # half of the first checkpoint is written
    assert len(checkpoints()) == 1 and checkpoints()[0].startswith(".tmp-checkpoint-4-")
    kill(partial(die_in, "os.rename", 2))  # all of the second is, but it has no name
    assert len(checkpoints()) == 2 and checkpoints()[0].startswith(".tmp-checkpoint-8-")
    kills = 0
    while kills < 3 or len({event["step"] for event in events("started")}) < 3:  # a save may be slower than some kills
        done = max(steps())
        kill(partial(die_after_step, done + rng.randrange(1, 4), rng.uniform(0, 0.01)))
        assert max(steps()) > done
        kills += 1
    assert len(events("started")) == 3 + kills
    assert len(all_steps()) > len(steps()), "no step was done twice"
    succeed(**thirty)
    assert state_of(final()) == state_of(final("whole"))
    assert digests() == digests("whole") and len(digests()) == 30
    assert losses() == losses("whole")
    assert not [name for name in checkpoints() if name.startswith(".")]


# ---- on any number of processes -------------------------------------------------------------------------------------

def test_started_on_two_processes_it_finishes_on_one_and_on_four(reference):
    """On one process, which divides the leaves too, its bits are those of a run that was on one from the start (which
    are those of any number that divides them: tests/test_bitwise.py). On four the data are the same and the losses
    close."""
    succeed(model_tag="whole", leaves=2)
    training.start(2, hook=partial(die_after_step, 9)).wait_for_death()
    assert "final" not in checkpoints() and max(steps()) == 9
    shutil.copytree(training.run_dir(), training.run_dir("on-four"))
    on_one = succeed().out
    assert state_of(final()) == state_of(final("whole")) and losses() == losses("whole")
    on_four = training.finish(4, model_tag="on-four")
    assert "world_size: the run has 2, this launch 1" in on_one
    assert "world_size: the run has 2, this launch 4" in on_four
    assert on_four.count("4 processes do not divide 2 leaves: same data, but other bits") == 1
    assert "do not divide" not in on_one
    for tag in ("run", "on-four"):
        assert digests(tag) == reference["digests"]
        assert losses(tag) == pytest.approx(reference["losses"], abs=2e-4)
        assert checkpoint.load_checkpoint(final(tag)).trainer_state["K"] == 2
        assert state_of(final(tag))["cursors"] == reference["final"]["cursors"]


# ---- completed, from the start, from a certain checkpoint -----------------------------------------------------------

def test_a_completed_run_changes_nothing_and_a_longer_horizon_goes_on(reference):
    def assert_nothing_happens(**settings):
        before = training.fingerprint(training.run_dir())
        outcome = succeed(**settings)
        assert "completed" in outcome.out and "nothing to do" in outcome.out and "--model-tag" in outcome.out
        assert training.fingerprint(training.run_dir()) == before

    take_over(reference["path"], "final")
    assert_nothing_happens(save_every=2, device_batch_size=2)
    assert_nothing_happens(resume=final())
    outcome = succeed(num_iterations=STEPS + 3)
    assert f"--num-iterations: the run has {STEPS}, this launch {STEPS + 3}" in outcome.out
    assert digests()[:STEPS] == reference["digests"] and len(digests()) == STEPS + 3
    assert_nothing_happens()  # nor with the first horizon, which is behind it


def test_a_named_checkpoint_is_where_it_goes_on_and_good_ones_are_kept(reference, tmp_path):
    take_over(reference["path"], "checkpoint-8", "checkpoint-12")
    newer, lines = training.run_dir() / "checkpoints" / "checkpoint-12", len(all_steps())
    before = training.fingerprint(newer)
    kept_elsewhere = newer.with_name("checkpoint-8").rename(tmp_path / "checkpoint-8")
    assert "at step 8" in succeed(resume=kept_elsewhere).out
    assert [record["step"] for record in all_steps()[lines:]] == list(range(8, STEPS))
    assert training.fingerprint(newer) == before
    assert "of another run" in training.refuse(resume=newer, model_tag="other")
    training.run_dir().with_name("link").symlink_to(training.run_dir())
    assert "completed" in succeed(resume=final(), model_tag="link").out
    assert state_of(final()) == reference["final"] and losses() == reference["losses"]


def test_from_scratch_is_refused_where_a_run_is_unless_forced(reference):
    take_over(reference["path"], "checkpoint-12")
    before = training.fingerprint(training.run_dir())
    message = refuse(resume="scratch")
    assert "--resume scratch" in message and "--force" in message and "--model-tag" in message
    assert training.fingerprint(training.run_dir()) == before
    outcome = succeed(resume="scratch", force=True, num_iterations=4, save_every=-1)
    assert "resuming" not in outcome.out
    assert checkpoints() == ["final"] and sorted(steps()) == [0, 1, 2, 3]
    assert digests() == reference["digests"][:4]
    succeed(resume="scratch", num_iterations=1, model_tag="fresh")
    assert digests("fresh") == reference["digests"][:1]


def test_a_step_that_differs_when_it_is_repeated_stops_the_run(reference):
    take_over(reference["path"], "checkpoint-12")
    log = training.log_file()
    log.write_text(log.read_text().replace(reference["digests"][14], "0" * 16))
    message = refuse()
    assert "step 14" in message and reference["digests"][14] in message and "0" * 16 in message
