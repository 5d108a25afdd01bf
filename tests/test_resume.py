"""Resumes that tests/test_state_machine.py does not cover: from a named checkpoint, with skipped rows, with moved data,
on a number of processes that changes bits, in the same wandb run."""

import contextlib
import io
import json
import os
import re
import shutil
import sys
import types
from functools import partial

import pytest

from nanochat import lifecycle, start_run
from nanochat.checkpoint import load_checkpoint
from nanochat.run_dir import read_log
from scripts import inspect_data
from tests import faults, training
from tests.training import (
    all_steps,
    checkpoints,
    die_after_step,
    digests,
    events,
    final,
    losses,
    state,
    state_of,
    steps,
    take_over,
)

STEPS = 12  # of a run by default
run, succeed, refuse, start, finish = (partial(command, num_iterations=STEPS) for command in (
    training.run, training.succeed, training.refuse, training.start, training.finish))


workplace = training.in_workplace(**training.SMALL)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run, with which most tests compare."""
    with training.workplace(tmp_path_factory.mktemp("reference"), **training.SMALL):
        succeed()
        return {"final": state_of(final()), "digests": digests(), "losses": losses(), "path": training.run_dir()}


def test_a_run_stops_before_its_real_walltime(reference):
    """The other tests replace the clock."""
    outcome = succeed(max_runtime_seconds=1.2, walltime_reserve_seconds=0.3, num_iterations=1000, save_every=-1)
    assert "stopped: walltime: " in outcome.out and state()["status"] == "stopped"
    assert checkpoints() == [f"checkpoint-{len(steps())}-shutdown"]
    assert digests()[:STEPS] == reference["digests"][:len(steps())]


# ---- where a resume starts -------------------------------------------------------------------------------------------

def test_a_run_resumes_from_a_named_checkpoint_and_keeps_newer_ones(reference, tmp_path):
    take_over(reference["path"], "checkpoint-4", "checkpoint-8")
    newer, lines = training.run_dir() / "checkpoints" / "checkpoint-8", len(all_steps())
    before = training.fingerprint(newer)
    outside = newer.with_name("checkpoint-4").rename(tmp_path / "checkpoint-4")
    assert "at step 4" in succeed(resume=outside).out
    assert [record["step"] for record in all_steps()[lines:]] == list(range(4, STEPS))
    assert training.fingerprint(newer) == before
    assert "does not belong to" in refuse(resume=newer, model_tag="other")
    training.run_dir().with_name("link").symlink_to(training.run_dir())
    assert "completed" in succeed(resume=final(), model_tag="link").out
    assert state_of(final()) == reference["final"] and losses() == reference["losses"]


@pytest.mark.parametrize("ends_at", [8, STEPS])
def test_a_resume_sees_the_last_save_of_a_launch_that_is_just_ending(reference, monkeypatch, ends_at):
    """Checkpoints must be listed after the check that no launch owns the run."""
    take_over(reference["path"], "checkpoint-4")

    def save_and_end(run, check=lifecycle.check_free):
        name = "final" if ends_at == STEPS else f"checkpoint-{ends_at}"
        shutil.copytree(reference["path"] / "checkpoints" / name, run / "checkpoints" / name)
        shutil.rmtree(run / "checkpoints" / "checkpoint-4")  # like --keep-last-k=1
        return check(run)

    monkeypatch.setattr(start_run, "check_free", save_and_end)
    outcome = succeed()
    assert "nothing to do" in outcome.out if ends_at == STEPS else events("started")[-1]["step"] == ends_at
    assert state_of(final()) == reference["final"]


def test_on_processes_that_do_not_divide_the_leaves_the_data_is_the_same_and_losses_are_close(reference):
    start(2, hook=partial(die_after_step, 6), save_every=2).wait_for_death()
    shutil.copytree(training.run_dir(), training.run_dir("on-four"))
    on_one, on_four = finish(), finish(4, model_tag="on-four")
    assert "world_size: the run has 2, this launch 1" in on_one and "do not divide" not in on_one
    assert "world_size: the run has 2, this launch 4" in on_four
    assert on_four.count("4 processes do not divide 2 leaves: same data, but results are rounded") == 1
    for tag in ("run", "on-four"):
        assert digests(tag) == reference["digests"]
        assert losses(tag) == pytest.approx(reference["losses"], abs=2e-4)
        assert load_checkpoint(final(tag)).trainer_state["K"] == 2
        assert state_of(final(tag))["cursors"] == reference["final"]["cursors"]


@pytest.mark.parametrize("failing, kept, errors", [("(checkpoint-([468]|10)|final)", 2, 3), ("final", 10, 1)])
def test_a_full_disk_ends_the_run_at_the_third_save_or_the_last_one(reference, failing, kept, errors):
    with faults.full_disk(rf"write .*\.tmp-{failing}-", below=training.run_dir()):
        message = refuse(save_every=2)
    assert "No space left" in message and f"checkpoint-{kept} is kept" in message and "same command again" in message
    assert f"checkpoint-{kept}" in checkpoints() and len(events("save_failed")) == errors
    assert state()["status"] == "failed" and "No space left" in state()["reason"]
    succeed()
    assert state_of(final()) == reference["final"]


def test_failed_saves_end_the_run_only_if_three_fail_in_a_row(reference):
    with faults.full_disk(r"write .*\.tmp-checkpoint-(4|6|10)-", below=training.run_dir()):
        warnings = succeed(save_every=2).err
    for step, kept, number in ((4, 2, 1), (6, 2, 2), (10, 8, 1)):
        assert re.search(rf"checkpoint-{step} could not .*No space left.*training continues, checkpoint-{kept} is kept "
                         rf"\(error {number} of 3", warnings), warnings
    assert len(events("save_failed")) == 3 and state_of(final()) == reference["final"]


def test_a_folder_that_is_not_a_complete_run_is_renamed_and_never_deleted(reference):
    take_over(reference["path"], "checkpoint-4")
    (training.run_dir() / "config.json").unlink()
    before = training.fingerprint(training.run_dir())
    assert "config.json: missing, so the settings of checkpoint-4 are unknown; restore it" in refuse()
    assert training.fingerprint(training.run_dir()) == before
    shutil.rmtree(training.run_dir())
    for name in ("config.json", "logs/train.jsonl", "tokenizer/tokenizer.json"):  # of another program
        (training.run_dir() / name).parent.mkdir(parents=True, exist_ok=True)
        (training.run_dir() / name).write_text("{}")
    before = training.fingerprint(training.run_dir())
    succeed(resume="scratch", force=True, num_iterations=1)
    assert training.fingerprint(training.run_dir("run.old-1")).items() >= before.items() and len(digests()) == 1


# ---- skipped rows ---------------------------------------------------------------------------------------------------

def inspected(*argv):
    """The JSON lines of scripts.inspect_data on the run, which must agree with the log."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert inspect_data.main([*argv, str(training.run_dir())]) == 0, out.getvalue()
    return [json.loads(line) for line in out.getvalue().splitlines() if line.startswith("{")]


def test_a_new_run_skips_rows_once_wherever_it_is_killed(reference):
    settings = {"num_iterations": 9, "save_every": 4, "sync_save": True, "skip_steps": 3}
    for kill_after, saved in ((2, []), (6, ["checkpoint-4"])):
        start(hook=partial(die_after_step, kill_after), **settings).wait_for_death()
        assert checkpoints() == saved
    finish(2, **settings)
    assert digests() == reference["digests"][3:12]
    assert load_checkpoint(final()).cursors[0]["row"] == 12 * 2
    assert "--skip-steps: the run has 3, this launch 0" in refuse(num_iterations=14)
    assert [line["match"] for line in inspected("digest", "--steps=0:9")] == [True] * 9


def test_after_a_loss_spike_a_new_run_continues_behind_its_rows(reference):
    """The usual remedy: the weights of the checkpoint before the spike, and the data after it."""
    shutil.copytree(reference["path"], training.run_dir("long"))
    more = {"init_from": "long@4", "init_data": "continue", "init_optimizer": True, "save_every": -1}
    succeed(skip_steps=4, num_iterations=4, **more)
    assert digests() == reference["digests"][8:12]
    assert [line["match"] for line in inspected("digest", "--steps=0:4")] == [True] * 4
    assert inspected("rows", "--json", "--step=0")[0]["lane_row"] == 8 * 2


# ---- what may change ------------------------------------------------------------------------------------------------

def test_settings_of_place_and_speed_may_change_and_change_no_bit(reference, workplace):
    """All of them at once."""
    training.take_over(reference["path"], "checkpoint-8")
    moved = shutil.move(workplace / "data", workplace / "moved")
    outcome = succeed(
        data_path=moved, tokenizer_threads=3, save_every=3, eval_every=2, eval_tokens=training.T * 8, sample_every=100,
        sync_save=True, keep_last_k=9, keep_milestone_every=7, max_runtime_seconds=1e5, walltime_reserve_seconds=1,
        collective_timeout_seconds=300, plan="warn", tokenizer=training.run_dir() / "tokenizer")
    assert "changed: --eval-tokens: the run has 1024, this launch 512" in outcome.out
    assert outcome.out.count("changed: ") == 14 and "changed: --save-every: the run has" in outcome.out
    assert f"settings: those in {training.run_dir() / 'config.json'}\nchanged: " in outcome.out
    assert "params_total" not in outcome.out, "the settings themselves are printed only when a run starts"
    assert digests() == reference["digests"] and losses() == reference["losses"]
    ours, theirs = state_of(final()), reference["final"]
    assert ours["model"] == theirs["model"] and ours["optimizer"] == theirs["optimizer"]


# ---- wandb ----------------------------------------------------------------------------------------------------------

class Wandb(types.ModuleType):
    """A stand-in: a run has the given id, or a new one."""

    def __init__(self):
        super().__init__("wandb")
        self.given = []

    def init(self, *, id, **kwargs):
        self.given.append(id)
        return types.SimpleNamespace(id=id or f"new-{os.getpid()}", log=json.dumps, finish=lambda: None)


def with_wandb(hook):
    sys.modules["wandb"] = Wandb()
    hook()


def test_the_id_of_the_wandb_run_survives_a_launch_that_saved_nothing(monkeypatch):
    start(hook=partial(with_wandb, partial(die_after_step, 1)), run="name", save_every=-1).wait_for_death()
    [first] = [event["id"] for event in events("wandb")]
    assert first.startswith("new-") and checkpoints() == []
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    settings = {"run": "name", "save_every": -1}
    start(hook=partial(die_after_step, 1), **{**settings, "run": "dummy"}).wait_for_death()
    succeed(num_iterations=3, **settings)
    assert fake.given == [first], "only the log had it"
    succeed(num_iterations=4, **{**settings, "run": "dummy"})  # a launch without wandb in between
    assert load_checkpoint(final()).trainer_state["wandb_id"] == first
    succeed(num_iterations=6, **{**settings, "run": "another name"})
    assert fake.given == [first, first] and len(events("wandb")) == 1
    assert load_checkpoint(final()).trainer_state["wandb_id"] == first
    succeed(num_iterations=2, resume="scratch", force=True, **settings)
    assert fake.given == [first, first, None], "a run that started over is a new one"


def test_wandb_offline_continues_the_same_run():
    for num_iterations in (2, 3):
        outcome = succeed(run="name", num_iterations=num_iterations, save_every=-1)
        assert "without it" not in outcome.err
    [wandb_id] = {load_checkpoint(final()).trainer_state["wandb_id"], *(e["id"] for e in events("wandb"))}
    assert wandb_id
    assert len(list((training.run_dir() / "wandb").glob("offline-run-*/*.wandb"))) == 2
    assert len(read_log(training.log_file())) > 3
