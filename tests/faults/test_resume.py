"""Resumes and saves that tests/faults/test_state_machine.py does not cover: from a named checkpoint, with
skipped rows, with moved data, on a number of processes that changes bits, in the same wandb run;
after failed saves and evaluations."""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import signal
import sys
import time
import types
from functools import partial
from unittest import mock

import pytest
import torch
from torch.distributed import TCPStore

from nanochat import (
    checkpoint,
    gpt,
    run_guard,
    run_owner,
    run_saves,
    run_summary,
    start_run,
)
from nanochat.checkpoint import MODEL_NAME, load_checkpoint
from nanochat.common import Stop
from nanochat.run_dir import iter_log
from nanochat.run_facts import sentences_about
from nanochat.run_owner import OWNER_NAME
from nanochat.run_reader import RunReader
from scripts import base_train, inspect_data, status
from tests import crashes, training
from tests.crashes import die, on_rank
from tests.training import (
    all_steps,
    before,
    checkpoints,
    die_after_step,
    digests,
    events,
    final,
    finish,
    losses,
    refuse,
    start,
    state,
    state_of,
    steps,
    succeed,
    take_over,
)

STEPS = 12
SETTINGS = {**training.SMALL, "num_iterations": STEPS}
SHORT = {"num_iterations": 4, "save_every": -1}
workplace = training.in_workplace(**SETTINGS)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run, with which most tests compare."""
    with training.workplace(tmp_path_factory.mktemp("reference"), **SETTINGS):
        succeed()
        return {
            "final": state_of(final()),
            "digests": digests(),
            "losses": losses(),
            "path": training.run_dir(),
        }


def test_a_run_stops_before_its_real_walltime(reference):
    """The other tests replace the clock."""
    outcome = succeed(
        max_runtime_seconds=1.2, walltime_reserve_seconds=0.3, num_iterations=1000, save_every=-1
    )
    assert "stopped: walltime: " in outcome.out and state()["status"] == "stopped"
    assert checkpoints() == [f"checkpoint-{len(steps())}-shutdown"]
    assert digests()[:STEPS] == reference["digests"][: len(steps())]


# ---- where a resume starts -----------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "flags, left_out",
    [
        ({}, ""),
        ({"resume": "scratch", "force": True}, " without --resume=scratch --force"),
        ({"resume": "run@4"}, " without --resume=run@4"),
    ],
)
def test_after_a_stop_the_remedy_is_the_command_that_resumes_the_run(
    reference, monkeypatch, flags, left_out
):
    """Regression: "the same command resumes the run" after --resume=scratch --force, which begins
    again each time, and after --resume=RUN@STEP."""
    take_over(reference["path"], "checkpoint-4", "checkpoint-8")
    with monkeypatch.context() as patch:
        patch.setattr(run_guard.Guard, "reason", lambda guard: "SIGTERM")
        lines = succeed(**flags).out.splitlines()
    assert f"the same command{left_out} resumes the run" in lines[-1]
    notes = [line for line in lines if line.startswith("note: ") and left_out in line]
    assert not left_out or len(notes) == 1
    succeed()
    assert state_of(final()) == reference["final"]


@pytest.mark.parametrize("ends_at", [8, STEPS])
def test_a_resume_sees_the_last_save_of_a_launch_that_is_just_ending(
    reference, monkeypatch, ends_at
):
    """Checkpoints must be listed after the run is locked."""
    take_over(reference["path"], "checkpoint-4")

    def save_and_end(run, claim=run_owner.claim):
        name = "final" if ends_at == STEPS else f"checkpoint-{ends_at}"
        shutil.copytree(reference["path"] / "checkpoints" / name, run / "checkpoints" / name)
        shutil.rmtree(run / "checkpoints" / "checkpoint-4")  # like --keep-last-k=1
        return claim(run)

    monkeypatch.setattr(run_guard, "claim", save_and_end)
    outcome = succeed()
    assert (
        "nothing to do" in outcome.out
        if ends_at == STEPS
        else events("started")[-1]["step"] == ends_at
    )
    assert state_of(final()) == reference["final"]


def damage_all():
    """Change one byte of each checkpoint."""
    for name in checkpoints():
        path = training.run_dir() / "checkpoints" / name / MODEL_NAME
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def break_disk(monkeypatch):
    """Reads of checkpoints fail, although every file is good."""
    monkeypatch.setattr(
        checkpoint, "hash_file", mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    )


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_over_by_itself(reference):
    """Regression: it started at step 0 and overwrote them."""
    take_over(reference["path"], "checkpoint-4", "checkpoint-8")
    damage_all()
    before = training.fingerprint(training.run_dir())
    error = refuse()
    assert (
        "checkpoint-4/model" in error
        and "checkpoint-8/model" in error
        and "--resume=scratch --force" in error
    )
    assert training.fingerprint(training.run_dir()) == before
    succeed(resume="scratch", force=True)
    assert state_of(final()) == reference["final"]
    aside = training.fingerprint(training.run_dir("run.old-1"))
    # the lock's file stays with the launch that holds it
    assert aside.keys() >= before.keys() - {OWNER_NAME} and all(
        aside[name] == before[name] for name in before if "checkpoint" in name
    )


def test_a_run_whose_checkpoints_were_removed_never_starts_over_by_itself(reference):
    take_over(reference["path"])
    before = training.fingerprint(training.run_dir())
    error = refuse()
    assert "this run has saved final" in error and "--resume=scratch --force" in error
    assert training.fingerprint(training.run_dir()) == before


def test_a_disk_that_fails_for_one_launch_changes_nothing(reference, monkeypatch):
    """Regression: good checkpoints counted as corrupt, and the run started over."""
    take_over(reference["path"], "checkpoint-4", "checkpoint-8")
    before = training.fingerprint(training.run_dir())
    with monkeypatch.context() as patch:
        break_disk(patch)
        error = refuse()
    assert "checkpoint-8: cannot be read (Input/output error)" in error
    assert training.fingerprint(training.run_dir()) == before
    assert "at step 8" in succeed().out and state_of(final()) == reference["final"]


def test_a_run_cannot_end_before_the_steps_that_it_has_taken(reference):
    """Regression: it was called completed, with more steps than it has."""
    take_over(reference["path"], "checkpoint-4", "checkpoint-8")
    error = training.refuse(num_iterations=5)
    assert "has taken 8 steps" in error and "after 5" in error and "raise --num-iterations" in error
    succeed(num_iterations=8)
    assert training.state()["status"] == "completed"


def test_bits_per_byte_of_an_older_step_name_it(tmp_path):
    succeed(**{**SHORT, "eval_every": 4})
    output = succeed(**{**SHORT, "eval_every": -1, "num_iterations": 6}).out
    assert re.search(r"validation bits per byte [0-9.]+ -> [0-9.]+ at step 4; ", output)
    facts = sentences_about(RunReader(training.run_dir()))
    assert any(sentence.endswith(" at step 4.") for sentence in facts), facts


def test_a_save_never_replaces_a_checkpoint_that_the_disk_cannot_read(reference, monkeypatch):
    take_over(reference["path"], "checkpoint-4", "checkpoint-8")
    before = training.fingerprint(training.run_dir() / "checkpoints")
    succeed(resume=training.run_dir() / "checkpoints" / "checkpoint-4", num_iterations=STEPS)
    with monkeypatch.context() as patch:
        break_disk(patch)
        with pytest.raises(OSError, match="Input/output"):
            checkpoint.write_sealed(
                training.run_dir() / "checkpoints" / "checkpoint-8", {"step": 8}, {}
            )
    assert training.fingerprint(training.run_dir() / "checkpoints").items() >= before.items()


def test_after_each_of_five_kills_torchrun_restarts_the_run_to_the_same_bits(reference, workplace):
    """Regression: all attempts of torchrun share one store, and connected to the dead processes of
    the one before."""
    succeed(leaves=2, model_tag="alone")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's
    for attempt in range(6):
        env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
        kill = partial(on_rank, attempt % 2, partial(before, "nanochat.optim.MuonAdamW.step", 4))
        argv = training.flags(save_every=2, sync_save=True)
        group = training.launch(
            base_train.main, [argv] * 2, [env] * 2, kill if attempt < 5 else None
        )
        if attempt < 5:
            group.wait_for_death()
        else:
            assert group.wait() == [0, 0], group.text()
    assert [event["step"] for event in events("started")] == [0, 2, 4, 6, 8, 10]
    assert digests() == reference["digests"] and losses() == losses("alone")
    assert state_of(final()) == state_of(final("alone"))


def round_differently():
    """A hook: new weights have other bits, as on a processor with other instructions."""
    weight = gpt.initial_weight
    gpt.initial_weight = lambda *args, **kwargs: weight(*args, **kwargs) * (1 + 1e-6)


def test_all_ranks_start_with_the_new_weights_of_rank_0():
    finish(2, model_tag="alike", **SHORT)
    group = start(2, hook=partial(on_rank, 1, round_differently), **SHORT)
    assert group.wait() == [0, 0], group.text()
    assert state_of(final()) == state_of(final("alike")) and losses() == losses("alike")


def test_on_processes_that_do_not_divide_the_leaves_the_data_is_the_same_and_losses_are_close(
    reference,
):
    start(2, hook=partial(die_after_step, 6), save_every=2).wait_for_death()
    shutil.copytree(training.run_dir(), training.run_dir("on-four"))
    on_one, on_four = finish(), finish(4, model_tag="on-four")
    assert (
        "world_size: the run started with 2, this launch has 1" in on_one
        and "do not divide" not in on_one
    )
    assert "world_size: the run started with 2, this launch has 4" in on_four
    assert on_four.count("4 processes do not divide --leaves=2") == 1
    for tag in ("run", "on-four"):
        assert digests(tag) == reference["digests"]
        assert losses(tag) == pytest.approx(reference["losses"], abs=2e-4)
        assert load_checkpoint(final(tag)).seal["K"] == 2
        assert state_of(final(tag))["cursors"] == reference["final"]["cursors"]


@pytest.mark.parametrize(
    "failing, warned, kept",
    [
        ("checkpoint-[468]", [(4, 2, 1), (6, 2, 2)], 2),
        ("final", [], 10),
        ("checkpoint-(4|6|10)", [(4, 2, 1), (6, 2, 2), (10, 8, 1)], None),
    ],
)
def test_the_third_failed_save_in_a_row_or_a_failed_last_one_ends_the_run(
    reference, failing, warned, kept
):
    """`warned`: (step, kept checkpoint, number of the failure in a row); `kept`: the checkpoint
    that an error names."""
    with crashes.full_disk(rf"write .*\.tmp-{failing}-", below=training.run_dir()):
        outcome = training.run(save_every=2)
    for step, known, number in warned:
        assert re.search(
            rf"checkpoint-{step} could not .*No space left.*training continues, checkpoint-{known} is "
            rf"kept \(error {number} of 3",
            outcome.err,
        ), outcome.err
    assert len(events("save_failed")) == len(warned) + (kept is not None) and outcome.code == (
        kept is not None
    )
    if kept is not None:
        assert state()["status"] == "failed" and f"error: {state()['reason']}\n" in outcome.err
        assert outcome.err.count("same command again") == 1  # regression: a warning said it, too
        assert re.search(
            f"No space left.*; checkpoint-{kept} is kept. .*same command again", state()["reason"]
        )
        succeed()
    assert state_of(final()) == reference["final"]


def test_a_folder_that_is_not_a_complete_run_is_renamed_and_never_deleted(reference):
    take_over(reference["path"], "checkpoint-4")
    (training.run_dir() / "config.json").unlink()
    before = training.fingerprint(training.run_dir())
    assert (
        "config.json: missing, so the settings of checkpoint-4 are unknown; restore it" in refuse()
    )
    assert training.fingerprint(training.run_dir()) == before
    shutil.rmtree(training.run_dir())
    # of another program
    for name in ("config.json", "logs/train.jsonl", "tokenizer/tokenizer.json"):
        (training.run_dir() / name).parent.mkdir(parents=True, exist_ok=True)
        (training.run_dir() / name).write_text("{}")
    before = training.fingerprint(training.run_dir())
    succeed(resume="scratch", force=True, num_iterations=1)
    assert (
        training.fingerprint(training.run_dir("run.old-1")).items() >= before.items()
        and len(digests()) == 1
    )


# ---- skipped rows --------------------------------------------------------------------------------


def inspected(*argv):
    """The JSON lines of scripts.inspect_data on a run, which must agree with the log."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert inspect_data.main([*map(str, argv)]) == 0, out.getvalue()
    return [json.loads(line) for line in out.getvalue().splitlines() if line.startswith("{")]


def test_after_a_loss_spike_a_fork_skips_its_rows_once_wherever_it_is_killed(reference):
    """The usual remedy: the checkpoint before the spike, and the data after it."""
    shutil.copytree(reference["path"], training.run_dir("long"))
    settings = {
        "fork_from": "long@4",
        "model_tag": "fork",
        "skip_steps": 3,
        "num_iterations": 9,
        "save_every": 4,
        "sync_save": True,
    }
    for kill_after, saved in ((5, ["checkpoint-4"]), (8, ["checkpoint-4", "checkpoint-8"])):
        start(hook=partial(die_after_step, kill_after), **settings).wait_for_death()
        assert checkpoints("fork") == saved
    finish(2, **settings)
    assert digests("fork", 4) == reference["digests"][7:12]
    assert load_checkpoint(final("fork")).cursors[0]["row"] == 12 * 2
    folder = training.run_dir("fork")
    assert [line["match"] for line in inspected("digest", "--steps=4:9", folder)] == [True] * 5
    assert inspected("rows", "--json", "--step=4", folder)[0]["lane_row"] == 7 * 2


# ---- what may change -----------------------------------------------------------------------------


def test_settings_of_place_and_speed_may_change_and_change_no_bit(reference, workplace):
    """All of them at once."""
    training.take_over(reference["path"], "checkpoint-8")
    moved = shutil.move(workplace / "data", workplace / "moved")
    outcome = succeed(
        data_path=moved,
        tokenizer_threads=3,
        save_every=3,
        eval_every=2,
        eval_tokens=training.T * 8,
        sample_every=100,
        sync_save=True,
        keep_last_k=9,
        save_at="7*",
        max_runtime_seconds=1e5,
        walltime_reserve_seconds=1,
        collective_timeout_seconds=300,
        plan="warn",
        tokenizer=training.run_dir() / "tokenizer",
    )
    assert "changed: --eval-tokens: the run started with 1024, this launch has 512" in outcome.out
    assert (
        outcome.out.count("changed: ") == 14
        and "changed: --save-every: the run started with" in outcome.out
    )
    assert f"settings: those in {training.run_dir() / 'config.json'}\nchanged: " in outcome.out
    assert "params_total" not in outcome.out, (
        "the settings themselves are printed only when a run starts"
    )
    assert digests() == reference["digests"] and losses() == reference["losses"]
    ours, theirs = state_of(final()), reference["final"]
    assert ours["model"] == theirs["model"] and ours["optimizer"] == theirs["optimizer"]


def test_a_launch_that_goes_back_to_the_first_length_says_what_the_one_before_had(reference):
    """Regression: it was compared with the first launch alone, so it was silent."""
    training.take_over(reference["path"], "checkpoint-8")
    began = f"changed: --num-iterations: the run started with {STEPS}, this launch has 9 (may move"
    assert began in succeed(num_iterations=9).out
    back = f"changed: --num-iterations: the launch before had 9, this launch has {STEPS} (may move"
    assert back in succeed(num_iterations=STEPS).out
    assert "num_iterations" not in training.events("started")[-1]["changed"], "against the first"


# ---- wandb ---------------------------------------------------------------------------------------


class Wandb(types.ModuleType):
    """A stand-in: a run has the given id, or a new one."""

    def __init__(self):
        super().__init__("wandb")
        self.given = []

    def init(self, *, id, **kwargs):
        self.given.append(id)
        return types.SimpleNamespace(
            id=id or f"new-{os.getpid()}", log=json.dumps, finish=lambda: None
        )


def with_wandb(hook):
    sys.modules["wandb"] = Wandb()
    hook()


def test_the_id_of_the_wandb_run_survives_a_launch_that_saved_nothing(monkeypatch):
    start(
        hook=partial(with_wandb, partial(die_after_step, 1)), run="name", save_every=-1
    ).wait_for_death()
    [first] = [event["id"] for event in events("wandb")]
    assert first.startswith("new-") and checkpoints() == []
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    start(hook=partial(die_after_step, 1), save_every=-1).wait_for_death()
    succeed(num_iterations=3, run="name", save_every=-1)
    assert fake.given == [first], "only the log had it"
    succeed(num_iterations=4, save_every=-1)  # a launch without wandb in between
    succeed(num_iterations=6, save_every=-1, run="another name")
    assert fake.given == [first, first] and len(events("wandb")) == 1
    assert load_checkpoint(final()).seal["wandb_id"] == first
    succeed(num_iterations=2, save_every=-1, run="name", resume="scratch", force=True)
    assert fake.given == [first, first, None], "a run that started over is a new one"


def test_wandb_offline_continues_the_same_run():
    for num_iterations in (2, 3):
        outcome = succeed(run="name", num_iterations=num_iterations, save_every=-1)
        assert "without it" not in outcome.err
    [wandb_id] = {
        load_checkpoint(final()).seal["wandb_id"],
        *(e["id"] for e in events("wandb")),
    }
    assert wandb_id
    assert len(list((training.run_dir() / "wandb").glob("offline-run-*/*.wandb"))) == 2
    assert len([*iter_log(training.log_file())]) > 3


# ---- a save precedes everything that can fail at the same step -----------------------------------


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_run_killed_in_its_last_evaluation_keeps_its_weights_and_repeats_the_evaluation():
    settings = {**SHORT, "eval_every": 2}
    succeed(model_tag="whole", **settings)
    start(
        hook=partial(before, "nanochat.evaluations.evaluate_buckets", 3, die), **settings
    ).wait_for_death()
    assert checkpoints() == ["final"] and load_checkpoint(final()).step == 4
    assert [event["step"] for event in events("val")] == [0, 2] and status.main(
        ["run", "--exit-code"]
    ) == 1
    succeed(**settings)
    assert [event["bpb"] for event in events("val")] == [
        event["bpb"] for event in events("val", "whole")
    ]
    assert len(digests()) == 4 and status.main(["run", "--exit-code"]) == 0
    outcome = succeed(data_path="mistyped", **settings)
    assert "nothing to do" in outcome.out and len(events("val")) == 3
    assert "warning: ignored settings: --data-path: the run started with " in outcome.out


@pytest.mark.parametrize(
    ("function", "flags", "what", "failures"),
    [
        ("nanochat.evaluations.evaluate_buckets", {"eval_every": 2}, "evaluation", [0, 2, 4]),
        ("nanochat.evaluations.read_bundle", {"core_metric_every": 4}, "CORE", [4]),
        ("nanochat.engine.Engine.generate_batch", {"sample_every": 4}, "samples", [4]),
    ],
)
def test_a_failed_evaluation_is_logged_and_the_run_completes(
    monkeypatch, function, flags, what, failures
):
    """Every call fails once the run has started."""
    monkeypatch.setattr(start_run, "read_bundle", lambda **how: [])
    fails = partial(monkeypatch.setattr, function, out_of_memory)
    monkeypatch.setattr(base_train, "announce", lambda *args: fails())
    outcome = succeed(**SHORT, **flags)
    failed = [event for event in events("evaluation_failed") if event["what"] == what]
    assert [event["step"] for event in failed] == failures
    assert "out of memory" in failed[-1]["reason"] and f"step 4: {what} failed: " in outcome.out
    assert checkpoints() == ["final"] and len(digests()) == 4 and len(events("completed")) == 1


def test_a_bug_in_a_step_keeps_its_traceback_and_is_logged_as_a_failure(monkeypatch):
    """Regression: a division by zero anywhere in the loop counted as a diverged loss."""
    monkeypatch.setattr(base_train, "log_step", lambda *args, **how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training.run(**SHORT)
    assert [event["reason"] for event in events("failed")] == [
        "ZeroDivisionError: division by zero"
    ]
    assert training.state()["status"] == "failed"


def test_a_stop_before_the_first_step_is_logged_as_a_stop_and_not_as_a_failure(monkeypatch):
    def stopped(*args):
        raise Stop("SIGTERM")

    monkeypatch.setattr(base_train.Training, "check_next_step", stopped)
    succeed(**SHORT)
    assert [event["reason"] for event in events("stopped")] == ["SIGTERM"]
    assert events("failed") == [] and training.state()["status"] == "stopped"


def test_the_state_of_a_resumed_run_has_its_figures_from_the_start(monkeypatch):
    """Regression: a resume that failed at its first step had no loss, tokens and skipped steps."""
    succeed(**{**SHORT, "eval_every": 2})
    before = training.state()
    last = before["val_bpb"]
    seen = []
    monkeypatch.setattr(
        base_train, "one_step", lambda *args: seen.append(training.state()) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        training.run(**{**SHORT, "eval_every": 5, "num_iterations": 8})
    assert (seen[0]["val_bpb"], seen[0]["val_step"]) == (last, 4)
    for name in ("tokens", "loss", "skipped"):
        assert seen[0][name] == before[name] is not None
    assert training.state()["status"] == "failed" and training.state()["tokens"] == before["tokens"]


def test_a_save_that_is_finished_while_a_run_fails_is_logged(monkeypatch):
    """Regression: its event was lost."""
    one_step = base_train.one_step
    write = checkpoint.Snapshot.write

    def fail_in_step_2(run, parts, *others):
        if parts.progress.step == 2:
            raise ValueError("out of luck")
        one_step(run, parts, *others)

    def slow(*args):
        time.sleep(0.5)
        return write(*args)

    monkeypatch.setattr(base_train, "one_step", fail_in_step_2)
    monkeypatch.setattr(checkpoint.Snapshot, "write", slow)
    assert "out of luck" in refuse(**{**SHORT, "save_every": 2})
    assert [event["checkpoint"] for event in events("saved")] == ["checkpoint-2"]
    assert [event["reason"] for event in events("failed")] == ["ValueError: out of luck"]


def test_if_an_evaluation_fails_on_one_rank_the_other_does_not_wait():
    hook = partial(on_rank, 1, partial(before, "nanochat.loss_eval._measure_own", 1, out_of_memory))
    output = finish(2, hook=hook, eval_every=2, **SHORT)
    [failed] = events("evaluation_failed")
    assert failed["step"] == 0 and "rank 1" in failed["reason"] and "failed: " in output
    assert [event["step"] for event in events("val")] == [2, 4] and checkpoints() == ["final"]


def a_save_is_always_due():
    run_saves.SAVE_EVERY_S = 0.0


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ({}, ["checkpoint-4", "checkpoint-5"]),
        ({"save_every": 0}, []),
        ({"save_every": 4}, ["checkpoint-4"]),
        ({"keep_last_k": 1}, ["checkpoint-5"]),
        ({"save_at": "2*"}, ["checkpoint-2", "checkpoint-3", "checkpoint-4", "checkpoint-5"]),
    ],
)
def test_saves_by_time_are_the_default_and_keep_the_newest_two(monkeypatch, flags, kept):
    monkeypatch.setattr(run_saves, "SAVE_EVERY_S", 0.0)
    succeed(**{"num_iterations": 6, "save_every": -1, **flags})
    assert checkpoints() == [*kept, "final"]


def test_saves_by_time_keep_the_saves_of_an_earlier_launch_with_save_every(monkeypatch):
    succeed(save_every=1, num_iterations=3)
    monkeypatch.setattr(run_saves, "SAVE_EVERY_S", 0.0)
    succeed(save_every=-1, num_iterations=7)
    assert checkpoints() == [*(f"checkpoint-{step}" for step in (1, 2, 3, 5, 6)), "final"]


def test_retention_does_not_count_corrupt_checkpoints():
    """Regression: with --keep-last-k=2, one good and one corrupt checkpoint were left."""
    succeed(save_every=1, num_iterations=4)
    for name in ("checkpoint-3", "final"):
        path = training.run_dir() / "checkpoints" / name / MODEL_NAME
        path.write_bytes(path.read_bytes()[:-1])
    output = succeed(save_every=4, num_iterations=5, keep_last_k=2)
    assert checkpoints() == ["checkpoint-2", "checkpoint-3", "checkpoint-4", "final"]
    assert "checkpoint-3 is kept, but does not count as a good checkpoint: " in output.err


def saved_at() -> list[int]:
    return [int(event["checkpoint"].split("-")[1]) for event in events("saved")[:-1]]


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ("0,3,5,100", [0, 3, 5]),
        ("log", [0, 1, 2, 4, 8]),
        ("4", [4]),
        ("4*", [4, 8]),
        ("0,log,3*", [0, 1, 2, 3, 4, 6, 8, 9]),
    ],
)
def test_the_checkpoints_of_save_at_are_kept_forever(steps, kept):
    succeed(num_iterations=10, save_every=3, keep_last_k=1, save_at=steps)
    numbered = sorted({*kept, 9})
    assert checkpoints() == [*(f"checkpoint-{step}" for step in numbered), "final"]


def test_save_at_adds_to_the_saves_of_save_every():
    succeed(num_iterations=6, save_every=2, save_at="0,3,4")
    assert saved_at() == [0, 2, 3, 4]


def test_a_save_at_step_0_holds_the_new_model_and_nothing_is_saved_again_on_a_resume():
    start(hook=partial(die_after_step, 0), save_at="0,1", sync_save=True, **SHORT).wait_for_death()
    assert checkpoints() == ["checkpoint-0"]
    succeed(save_at="0,1", **SHORT)
    assert saved_at() == [0, 1]
    succeed(model_tag="twin", **SHORT)
    assert digests() == digests("twin") and losses() == losses("twin")


def test_a_stop_at_a_step_of_save_at_leaves_a_checkpoint_that_is_kept():
    hook = partial(training.after_step, 0, partial(training.send, signal.SIGTERM))
    assert start(hook=hook, save_at="2", **SHORT).wait() == [0]
    assert checkpoints() == ["checkpoint-2-shutdown"]
    succeed(save_at="2", **{**SHORT, "save_every": 1, "keep_last_k": 1})
    assert checkpoints() == ["checkpoint-2-shutdown", "checkpoint-3", "final"]


def test_without_save_at_step_0_is_not_saved():
    succeed(**{**SHORT, "save_every": 1})
    assert saved_at() == [1, 2, 3]


def test_all_ranks_save_when_a_save_is_due_on_one():
    finish(2, hook=partial(on_rank, 1, a_save_is_always_due), keep_last_k=9, **SHORT)
    assert checkpoints() == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "final"]


@pytest.mark.parametrize(
    "function", ["nanochat.optim.MuonAdamW.step", "nanochat.gpt.GPT.init_weights"]
)
def test_running_out_of_gpu_memory_is_explained_and_keeps_the_last_save(monkeypatch, function):
    """In a step, or while the model is built."""
    succeed(**{**SHORT, "num_iterations": 2})
    with monkeypatch.context() as patch:
        patch.setattr(function, out_of_memory)
        patch.setattr(run_summary, "peak_memory", lambda device: 7_000_000_000, raising=False)
        error = refuse(**SHORT)
    assert re.search(
        r"out of GPU memory: the estimate was \d+\.\d GB, the peak 7.0 GB\. .*"
        r"--device-batch-size \(now 4\).*--activation-checkpointing",
        error,
    ), error
    assert state()["reason"] == error
    succeed(**SHORT)


@pytest.mark.parametrize("flags", [{}, {"model_tag": "new", "init_from": "run"}])
def test_weights_that_do_not_fit_an_edited_model_are_one_sentence(monkeypatch, flags):
    """Regression: the traceback of load_state_dict, with a line for each tensor."""
    settings = {**training.SMALL, "num_iterations": 1, "save_every": -1}
    training.succeed(**settings)
    make = gpt.MLP.__init__

    def make_wider(self, config):
        make(self, config)
        self.c_fc = gpt.Linear(config.n_embd, 5 * config.n_embd)

    monkeypatch.setattr(gpt.MLP, "__init__", make_wider)
    error = training.refuse(**{**settings, "num_iterations": 2, **flags})
    assert "transformer.h.0.mlp.c_fc.weight is (96, 24)" in error
    assert "--model-tag=NAME" in error and "Traceback" not in error
