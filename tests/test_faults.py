"""Whatever happens to a run, it ends with the bits of one that nothing happened to: killed at every write of a save,
with damaged checkpoints, full disks, launched twice. See also dev/torture.sh."""

import json
import os
import random
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from nanochat import checkpoint as ckpt
from nanochat import lifecycle, start_run
from nanochat.lifecycle import RunState
from nanochat.run_dir import cursor_files, iter_log, read_cursors
from tests import faults, training
from tests.training import (
    checkpoints,
    die_in,
    digests,
    log_file,
    losses,
    refuse,
    state,
    state_of,
    steps,
    succeed,
    wait_for,
)

STEPS = 12
SMALL = {  # a run of half a second with 6 saves
    **training.SMALL, "buffer_size": 8, "eval_tokens": 64 * 8, "num_iterations": STEPS, "save_every": 2}


workplace = training.in_workplace(**SMALL)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run of all tests here on one process, with nothing in its way."""
    with training.workplace(tmp_path_factory.mktemp("reference"), **SMALL):
        succeed()
        folders = {int(ckpt.read_seal(path)["step"]): path for path in ckpt.list_checkpoints(training.run_dir())}
        return {"final": state_of(folders[STEPS]), "digests": digests(), "losses": losses(), "path": training.run_dir(),
                "sums": {step: sums(path) for step, path in folders.items()}}


def sums(checkpoint):
    """Sizes and checksums of the states in a checkpoint, which is verified."""
    files = ckpt.verify_checkpoint(checkpoint)["files"]
    return {name: record for name, record in files.items() if not name.startswith("rng/")}


def resumed_at():
    """Where the last launch began."""
    return training.events("started")[-1]["step"]


def assert_equal(reference):
    """The run here has ended as the reference did, and nothing is left over."""
    assert state_of(training.run_dir() / "checkpoints" / "final") == reference["final"]
    assert digests() == reference["digests"] and losses() == reference["losses"]
    assert not [name for name in checkpoints() if name.startswith(".")]
    assert not [*training.run_dir().rglob("*.tmp")]
    assert lifecycle.exit_code(training.run_dir(), state()) == 0 and state()["checkpoint"] == "final"


def take_over(reference, last):
    """Make the run here the reference as it was after the save of a step."""
    training.take_over(reference["path"], *(f"checkpoint-{step}" for step in range(2, last + 1, 2)))


# ---- saving ---------------------------------------------------------------------------------------------------------

def test_a_save_beside_the_loop_and_one_that_it_waits_for_give_equal_files():
    """Steps that are taken while a checkpoint is written change nothing in it."""
    for tag, sync in (("beside", None), ("waited-for", True)):
        random.seed(1)
        torch.manual_seed(1)
        succeed(model_tag=tag, sync_save=sync)
    folders = [training.run_dir(tag) / "checkpoints" for tag in ("beside", "waited-for")]
    files = sorted(path.relative_to(folders[0]) for path in folders[0].rglob("*") if path.is_file())
    assert len(files) == 6 * 7 and sum(path.is_file() for path in folders[1].rglob("*")) == 6 * 7
    for file in files:
        one, other = ((folder / file).read_bytes() for folder in folders)
        if file.name == ckpt.STATE_NAME:  # holds the time that steps took, and its own sum with it
            seals = [json.loads(data) for data in (one, other)]
            for seal in seals:
                assert seal["progress"].pop("train_time_s") > 0 and seal.pop("checksum")
            assert seals[0] == seals[1] and len(seals[0]["files"]) == 6
        else:
            assert one == other, file


# ---- killed while saving --------------------------------------------------------------------------------------------

def test_killed_before_any_change_of_a_save_and_its_deletions(reference, tmp_path):
    """A run that keeps one checkpoint leaves, before every change of its second save, a copy of what is on disk: all
    that SIGKILL leaves. Each has the old checkpoint or the new one, whole; one of each kind goes on to the end."""
    copies, kinds = tmp_path / "copies", {}
    hook = partial(faults.copying, copies, below=training.run_dir(), since=r"^mkdir checkpoints/\.tmp-checkpoint-4",
                   until=r" checkpoints/\.tmp-checkpoint-6")
    assert training.start(hook=hook, keep_last_k=1).wait() == [0]
    newest = []
    for copy in sorted(copies.iterdir()):
        good = ckpt.first_good(ckpt.list_checkpoints(copy))
        assert good is not None and sums(good.path) == reference["sums"][good.step]
        kept = [read_cursors(path)[0] for path in cursor_files(copy).values()]
        logged = {r["step"]: r["digest"] for r in iter_log(copy / "logs" / "train.jsonl") if "event" not in r}
        assert list(logged.values()) == reference["digests"][:len(logged)] and len(logged) >= 4 and kept[0] == 2
        newest.append(good.path.name)
        hidden = [p.name.split("-")[0] for p in (copy / "checkpoints").glob(".*")]
        kinds.setdefault((good.path.name, len(ckpt.list_checkpoints(copy)), *hidden), copy)
    assert newest == sorted(newest) and set(newest) == {"checkpoint-2", "checkpoint-4"}
    assert newest.count("checkpoint-2") > 30 and newest.count("checkpoint-4") > 10
    assert kinds.keys() >= {("checkpoint-2", 1), ("checkpoint-2", 1, ".tmp"), ("checkpoint-4", 2),
                            ("checkpoint-4", 1, ".del"), ("checkpoint-4", 1)}
    for (name, *_), copy in list(kinds.items()):
        shutil.rmtree(training.run_dir())
        shutil.copytree(copy, training.run_dir())
        succeed(keep_last_k=1)
        assert resumed_at() == int(name[-1]) and checkpoints() == ["checkpoint-10", "final"]
        assert_equal(reference)


def test_half_a_small_file_is_swept_away_by_the_next_launch(reference):
    for change in (r"^replace tokenizer/", r"^replace \.run_state", r"^replace logs/cursors/"):
        hook = partial(faults.dying_at, 0, below=training.run_dir(), since=change)
        training.start(hook=hook).wait_for_death()
        left = [str(path.relative_to(training.run_dir())) for path in training.run_dir().rglob("*.tmp")]
        assert left and all(re.search(change, f"replace {path}") for path in left)
    succeed()
    assert_equal(reference)


def test_killed_in_the_first_step_after_a_resume(reference):
    take_over(reference, 6)
    lines = len(list(iter_log(log_file())))
    for function, call in (("nanochat.optim.MuonAdamW.step", 1), ("nanochat.run_dir.TrainLog.write", 2)):
        training.start(hook=partial(die_in, function, call)).wait_for_death()
    added = list(iter_log(log_file()))[lines:]
    assert [(record.get("event"), record["step"]) for record in added] == [("started", 6)] * 2
    succeed()
    assert resumed_at() == 6
    assert_equal(reference)


# ---- a disk that fills ----------------------------------------------------------------------------------------------

def test_a_save_for_which_there_is_no_room_is_told_and_the_run_goes_on(reference):
    with faults.full_disk(r"write .*\.tmp-checkpoint-(4|6|10)-", below=training.run_dir()) as changes:
        outcome = succeed()
    assert len(changes.made) >= 3 and len(training.events("save_failed")) == 3
    assert outcome.err.count("could not be written") == 3
    for step, kept, number in ((4, 2, 1), (6, 2, 2), (10, 8, 1)):
        assert re.search(rf"checkpoint-{step} could not .*No space left.*the run goes on, checkpoint-{kept} is kept "
                         rf"\(error {number} of 3 in a row\)", outcome.err)
    assert checkpoints() == ["checkpoint-2", "checkpoint-8", "final"]
    assert_equal(reference)


@pytest.mark.parametrize("failing, kept, errors", [("(checkpoint-([468]|10)|final)", 2, 3), ("final", 10, 1)])
def test_the_third_save_without_room_or_the_last_one_ends_the_run(reference, failing, kept, errors):
    with faults.full_disk(rf"write .*\.tmp-{failing}-", below=training.run_dir()):
        message = refuse()
    assert "No space left" in message and f"checkpoint-{kept} is kept" in message and "same command again" in message
    assert f"checkpoint-{kept}" in checkpoints() and len(training.events("save_failed")) == errors
    assert state()["status"] == "failed" and "No space left" in state()["reason"]
    succeed()
    assert resumed_at() == kept
    assert_equal(reference)


def test_no_room_for_a_line_of_the_log_ends_the_run_before_more_is_lost(reference):
    with faults.failing_at(9, faults.errno.ENOSPC, below=log_file(), kinds=["write"]) as changes:
        message = refuse()
    assert len(changes.made) >= 10 and "the log cannot be written" in message and "make room" in message
    before = max(steps())
    assert 0 < before < STEPS - 1
    succeed()
    assert before - 2 <= resumed_at() <= before + 1
    assert_equal(reference)


# ---- two launches ---------------------------------------------------------------------------------------------------

def pause(step, flag):
    """A hook: after some step the run waits for its end."""
    def wait():
        flag.touch()
        time.sleep(training.PATIENCE_S)

    training.after_step(step, wait)


def test_a_second_launch_is_refused_until_the_first_is_dead(reference, tmp_path):
    first = training.start(hook=partial(pause, 5, tmp_path / "flag"), sync_save=True)
    wait_for((tmp_path / "flag").exists)
    assert checkpoints() == ["checkpoint-2", "checkpoint-4"]
    before = {name: told for name, told in training.fingerprint(training.run_dir()).items() if name[0] != "."}
    second = training.start()
    assert second.wait() == [1]
    here = lifecycle.identify()
    told = second.text()
    assert f"host '{here['host']}', pid {first.processes[0].pid}, since" in told and told.count("error: ") == 1
    assert "scripts.stop" in told and "--model-tag" in told and "Traceback" not in told
    assert before == {name: told for name, told in training.fingerprint(training.run_dir()).items() if name[0] != "."}
    first.kill()
    training.finish()
    assert resumed_at() == 4
    assert_equal(reference)


@pytest.mark.parametrize("ends_at", [8, STEPS])
def test_what_a_launch_saves_while_it_is_watched_to_its_end_counts(reference, monkeypatch, ends_at):
    """What is inspected before it is known that no launch owns the run may be outdated."""
    take_over(reference, 4)

    def watch(run, look=lifecycle.check_free):
        for step in (ends_at - 2, ends_at):
            name = "final" if step == STEPS else f"checkpoint-{step}"
            shutil.copytree(reference["path"] / "checkpoints" / name, run / "checkpoints" / name)
        shutil.rmtree(run / "checkpoints" / "checkpoint-4")  # as --keep-last-k 2 does
        return look(run)

    monkeypatch.setattr(start_run, "check_free", watch)
    outcome = succeed()
    assert "nothing to do" in outcome.out if ends_at == STEPS else resumed_at() == ends_at
    assert_equal(reference)


def test_of_launches_at_the_same_instant_one_trains(reference):
    """What the two do never mixes: one begins the run, the other is refused (or comes when all is done)."""
    groups = [training.start() for _ in range(2)]
    codes = sorted(group.wait()[0] for group in groups)
    assert codes == [0, 1] or (codes == [0, 0] and any("nothing to do" in group.text() for group in groups))
    assert_equal(reference)
    assert len(training.events("started")) == 1 and len(steps()) == len(training.all_steps())


# ---- removed, and set aside ------------------------------------------------------------------------------

def stop_itself(watched):
    """A hook: rank 0 is stopped after step 5, until SIGCONT. Not watched: the heartbeat does not notice."""
    if not watched:
        RunState.refresh = lambda self: ""  # type: ignore[method-assign]
    training.after_step(5, partial(training.send, signal.SIGSTOP))


def test_a_run_directory_that_goes_while_it_trains_ends_the_run(reference, tmp_path):
    """All ranks, with one sentence. Nothing is made anew at the old place, and a launch that began there meanwhile is
    alone: not even a save that comes before the watchdog looks writes there."""
    for begun_again, world_size in ((False, 2), (True, 1)):
        first = training.start(world_size, hook=partial(stop_itself, watched=not begun_again), sync_save=True)
        pid = first.processes[0].pid
        wait_for(lambda pid=pid: ") T" in Path(f"/proc/{pid}/stat").read_text())
        training.run_dir().rename(tmp_path / f"gone-{begun_again}")
        if begun_again:
            succeed()
        os.kill(pid, signal.SIGCONT)
        assert first.wait() == [1] * world_size
        told = first.text()
        assert told.count("error: ") == 1 and "this launch no longer owns the run" in told and "Traceback" not in told
        assert training.run_dir().exists() == begun_again
    assert_equal(reference)


def test_what_is_no_whole_run_is_not_gone_on_with_and_never_deleted(reference):
    take_over(reference, 6)
    (training.run_dir() / "config.json").unlink()
    assert re.search(r"config\.json: missing, so nobody knows which settings .* belong to; put it back", refuse())
    shutil.rmtree(training.run_dir())
    for name in ("config.json", "logs/train.jsonl", "tokenizer/tokenizer.json"):  # somebody's
        (training.run_dir() / name).parent.mkdir(parents=True, exist_ok=True)
        (training.run_dir() / name).write_text("{}")
    succeed(resume="scratch", force=True, num_iterations=1)
    old = training.run_dir("run.old-1")
    assert [(old / name).read_text() for name in ("config.json", "logs/train.jsonl")] == ["{}", "{}"]
