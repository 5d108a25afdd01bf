"""A save precedes everything that can fail at the same step, and a failed evaluation does not end a run."""

import re
from functools import partial

import pytest
import torch

from nanochat import start_run, trainer
from nanochat.checkpoint import load_checkpoint
from nanochat.integrations import core_eval
from nanochat.lifecycle import read_state
from scripts import status
from tests import training
from tests.training import before, checkpoints, die, digests, events, final, finish, start, succeed

workplace = training.in_workplace(**training.SMALL, num_iterations=4, save_every=-1, eval_every=2)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def out_of_memory_on_rank_1() -> None:
    """Make evaluations run out of memory on rank 1."""
    if training.os.environ.get("RANK") == "1":
        before("nanochat.loss_eval._measure_own", 1, out_of_memory)


def test_a_run_killed_in_its_last_evaluation_keeps_its_weights_and_repeats_the_evaluation():
    succeed(model_tag="whole")
    group = start(hook=partial(before, "nanochat.loss_eval.evaluate_buckets", 3, die))
    group.wait_for_death()
    assert checkpoints() == ["final"] and load_checkpoint(final()).step == 4
    assert [event["step"] for event in events("val")] == [0, 2]
    assert status.main(["run", "--exit-code"]) != 0
    succeed()
    assert events("val")[-1]["bpb"] == events("val", "whole")[-1]["bpb"] and events("val")[-1]["step"] == 4
    assert len(digests()) == 4 and status.main(["run", "--exit-code"]) == 0
    outcome = succeed(data_path="mistyped")
    assert "nothing to do" in outcome.out and len(events("val")) == 3
    assert "warning: ignored settings that differ from its config.json: --data-path: the run has " in outcome.out


@pytest.mark.parametrize(("function", "flags", "what"), [
    ("nanochat.loss_eval.evaluate_buckets", {}, "evaluation"),
    ("nanochat.integrations.core_eval.read_bundle", {"core_metric_every": 4}, "CORE"),
    ("nanochat.engine.Engine.generate_batch", {"sample_every": 4}, "samples")])
def test_a_failed_evaluation_is_logged_and_the_run_completes(monkeypatch, function, flags, what):
    """Every call fails once the run has started."""
    place, name = function.rsplit(".", 1)
    owner = training.pkgutil.resolve_name(place)
    monkeypatch.setattr(core_eval, "read_bundle", lambda *args: [])
    monkeypatch.setattr(trainer.Journal, "started",
                        lambda *args, **kwargs: monkeypatch.setattr(owner, name, lambda *a, **k: out_of_memory()))
    outcome = succeed(**flags)
    failed = [event for event in events("evaluation_failed") if event["what"] == what]
    assert [event["step"] for event in failed] == ([0, 2, 4] if what == "evaluation" else [4])
    assert "out of memory" in failed[-1]["reason"] and f"step 4: {what} failed: " in outcome.out
    assert checkpoints() == ["final"] and len(digests()) == 4 and len(events("completed")) == 1


def test_if_an_evaluation_fails_on_one_rank_the_other_does_not_wait():
    output = finish(2, hook=out_of_memory_on_rank_1)
    assert [event["step"] for event in events("evaluation_failed")] == [0]
    assert "rank 1" in events("evaluation_failed")[0]["reason"] and "failed: " in output
    assert [event["step"] for event in events("val")] == [2, 4] and checkpoints() == ["final"]


# ---- saves by time --------------------------------------------------------------------------------------------------

def a_save_is_due_at_every_step(rank: str = "0") -> None:
    """Make a save due by the clock of one rank at every step."""
    if training.os.environ.get("RANK", "0") == rank:
        trainer.SAVE_EVERY_S = 0.0


@pytest.mark.parametrize(("flags", "kept"), [
    ({}, ["checkpoint-4", "checkpoint-5"]), ({"save_every": 0}, []), ({"save_every": 4}, ["checkpoint-4"]),
    ({"keep_last_k": 1}, ["checkpoint-5"]),
    ({"keep_milestone_every": 2}, ["checkpoint-2", "checkpoint-4", "checkpoint-5"])])
def test_saves_by_time_are_the_default_and_keep_the_newest_two(monkeypatch, flags, kept):
    monkeypatch.setattr(trainer, "SAVE_EVERY_S", 0.0)
    succeed(**{"num_iterations": 6, "eval_every": -1, **flags})
    assert checkpoints() == [*kept, "final"]


def test_saves_by_time_keep_the_saves_of_an_earlier_launch_with_save_every(monkeypatch):
    succeed(save_every=1, num_iterations=3, eval_every=-1)
    monkeypatch.setattr(trainer, "SAVE_EVERY_S", 0.0)
    succeed(num_iterations=7, eval_every=-1)
    assert checkpoints() == [*(f"checkpoint-{step}" for step in (1, 2, 3, 5, 6)), "final"]


def test_all_ranks_save_when_a_save_is_due_on_one():
    finish(2, hook=partial(a_save_is_due_at_every_step, "1"), eval_every=-1, keep_last_k=9)
    assert checkpoints() == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "final"]


# ---- out of memory --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("function", ["nanochat.optim.MuonAdamW.step", "nanochat.gpt.GPT.init_weights"])
def test_running_out_of_gpu_memory_is_explained_and_keeps_the_last_save(monkeypatch, function):
    """In a step, or while the model is built."""
    succeed(num_iterations=2, eval_every=-1)
    place, name = function.rsplit(".", 1)
    monkeypatch.setattr(training.pkgutil.resolve_name(place), name, lambda *args, **how: out_of_memory())
    monkeypatch.setattr(start_run, "peak_memory", lambda device: 7_000_000_000, raising=False)
    error = training.refuse(eval_every=-1)
    assert re.search(r"out of GPU memory: the estimate was \d+\.\d GB, the peak 7.0 GB; final is kept.*"
                     r"--device-batch-size \(now 4\).*--activation-checkpointing", error), error
    assert read_state(training.run_dir())["reason"] == error
    monkeypatch.undo()
    succeed(eval_every=-1)
