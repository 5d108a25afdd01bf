"""Clipped and skipped steps are the same on any number of processes, and in a run that is killed
and moved."""

import math
import os
from functools import partial
from unittest import mock

import pytest

from nanochat import spikes, trainer
from scripts import replay
from tests import training
from tests.faults.test_bitwise import differences
from tests.training import die_after_step

# steps of prose, of noise, of prose again
BEFORE = 13
SPIKE = 1
AFTER = 3
RUN = {
    **training.SMALL,
    "leaves": 4,
    "save_every": 3,
    "skip_spikes": 6.0,
    "max_grad_norm": 0.4,
    "matrix_lr": 0.16,
    "embedding_lr": 2.4,
    "unembedding_lr": 0.06,
    "num_iterations": None,
}


def small_window():
    """Shrink the window for the rest of a process."""
    mock.patch.multiple(spikes, ENOUGH=8, WINDOW=8).__enter__()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Flags of a run with one step of noise."""
    with training.workplace(tmp_path_factory.mktemp("spikes")) as path:
        noise = ["".join(chr(33 + (i * i * 7 + i * k) % 90) for i in range(800)) for k in range(40)]
        for bucket in ("prose", "noise"):
            for j in range(3):
                documents = noise if bucket == "noise" else training.texts(60, seed=j)
                training.write_shard(path / "text" / bucket / f"{j}.parquet", documents)
        phases = "".join(
            f"- {{duration_tokens: {steps * training.STEP}, mix: {{{bucket}: 1}}}}\n"
            for steps, bucket in ((BEFORE, "prose"), (SPIKE, "noise"), (AFTER, "prose"))
        )
        (path / "mix.yaml").write_text(f"curriculum:\n{phases}max_epochs: {{prose: 9, noise: 9}}\n")
        flags = {**RUN, "plan": "warn", "data_path": path / "text", "curriculum": path / "mix.yaml"}
        training.finish(hook=small_window, **flags, model_tag="straight")
        yield flags


def skipped(tag):
    return {record["step"] for record in training.events("skipped", tag)}


def test_the_planted_step_is_skipped_logged_and_counted(corpus):
    [event], steps = training.events("skipped", "straight"), training.steps("straight")
    assert event["step"] == BEFORE and event["digest"] == steps[BEFORE]["digest"]
    assert len(steps) == BEFORE + SPIKE + AFTER and training.state("straight")["skipped"] == 1
    assert max(step["grad_norm"] for step in steps.values()) > RUN["max_grad_norm"], (
        "something was clipped"
    )


def killed(after):
    small_window()
    die_after_step(after)


def test_killed_around_the_spike_and_moved_to_four_processes_it_ends_with_the_same_bits(corpus):
    """The last save is before the spike, so every launch repeats it."""
    for after in (BEFORE - 1, BEFORE + 1):
        training.start(
            1, hook=partial(killed, after), **corpus, model_tag="killed", sync_save=True
        ).wait_for_death()
    assert f"checkpoint-{BEFORE - 1}" in training.checkpoints("killed")
    training.finish(4, hook=small_window, **corpus, model_tag="killed")
    assert differences("straight", "killed") == set() and skipped("killed") == {BEFORE}


def only_rank_0_skips():
    small_window()
    if os.environ["RANK"] != "0":
        mock.patch.object(trainer, "limits", lambda *args: (math.inf, 1e9)).__enter__()


def test_a_rank_that_skips_a_spike_alone_is_detected(corpus):
    """By the comparison of the test above."""
    training.start(2, hook=only_rank_0_skips, **corpus, model_tag="alone").wait()
    assert differences("straight", "alone") >= {"weights", "optimizer"}


def test_a_step_in_which_no_target_has_a_loss_is_not_applied_and_the_run_goes_on(corpus, tmp_path):
    """Regression: the mean over no targets is NaN, so such a run ended with advice against
    divergence."""
    noise = "noise/0.parquet:*\nnoise/1.parquet:*\n"
    (tmp_path / "list").write_text(noise)
    flags = {**corpus, "skip_spikes": None, "without_documents": tmp_path / "list"}
    training.finish(1, **flags, model_tag="silent")
    training.finish(2, **flags, model_tag="silent_on_two")
    [event] = training.events("skipped", "silent")
    assert (event["step"], event["why"], event["loss"]) == (BEFORE, "empty", None)
    assert len(training.steps("silent")) == BEFORE + SPIKE + AFTER
    assert differences("silent", "silent_on_two") == set()
    assert replay.main(["silent", f"--check={BEFORE - 1}:{BEFORE + 2}"]) == 0


def test_ten_spikes_in_a_row_end_the_run_with_advice(corpus):
    with mock.patch.object(
        trainer, "limits", lambda window, _: (0.0 if len(window) == 4 else math.inf, math.inf)
    ):
        outcome = training.run(**corpus, model_tag="diverged")
    assert outcome.code == 1 and "step 13: 10 steps in a row were skipped as spikes" in outcome.err
    assert "--fork-from" in outcome.err and "is kept" in outcome.err
    assert "with lower learning rates" in outcome.err
    assert training.state("diverged")["status"] == "failed"
