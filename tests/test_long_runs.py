"""Long runs through the real command: jobs cut by walltime or by signals equal one job, rows can be passed over, and
what may change at a restart is what the table says."""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import types
from functools import partial

import pytest

from nanochat.checkpoint import list_checkpoints, load_checkpoint, verify_checkpoint
from nanochat.lifecycle import StopWatch
from nanochat.run_dir import read_log
from scripts import inspect_data, status
from tests import training
from tests.training import (
    a_step_is_a_second,
    before,
    checkpoints,
    die_after_step,
    digests,
    events,
    final,
    losses,
    send,
    state,
    state_of,
    steps,
)

STEPS = 12  # of a run, unless a test says otherwise
run, succeed, refuse, start, finish = (partial(command, num_iterations=STEPS) for command in (
    training.run, training.succeed, training.refuse, training.start, training.finish))
LOOKING = {"eval_every": 5, "eval_tokens": training.T * 4}


workplace = training.in_workplace(**training.SMALL)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run that nothing interrupts, with which most tests here compare."""
    with training.workplace(tmp_path_factory.mktemp("reference"), **training.SMALL):
        succeed(**LOOKING)
        return {"final": state_of(final()), "digests": digests(), "losses": losses(), "path": training.run_dir(),
                "vals": vals()}


def vals(tag="run"):
    return {event["step"]: event["bpb"] for event in events("val", tag)}


# ---- walltime -------------------------------------------------------------------------------------------------------

JOB = {"max_runtime_seconds": 2.5, "walltime_reserve_seconds": 0}  # two steps of a_step_is_a_second


def through_walltimes(launch):
    """Launch until the run is completed; the steps at which the launches before stopped, each with a checkpoint of its
    last step."""
    stops = []
    for _ in range(STEPS):
        told = launch()
        if state()["status"] == "completed":
            return stops
        step = state()["step"]
        assert state()["status"] == "stopped" and "walltime" in state()["reason"], told
        assert f"stopped: walltime: {2.5 - (step - (stops[-1] if stops else 0)):,.0f} s left" in told
        assert state()["checkpoint"] == f"checkpoint-{step}-shutdown" in checkpoints()
        assert status.main(["run", "--exit-code"]) == 10
        stops.append(step)
    raise AssertionError("no end")


def test_five_walltimes_leave_the_bits_of_a_run_without_one(reference, monkeypatch):
    monkeypatch.setattr(StopWatch, "wanted", StopWatch.wanted)
    a_step_is_a_second(JOB["max_runtime_seconds"])
    stops = through_walltimes(lambda: succeed(**JOB, **LOOKING).out)
    assert len(events("started")) == len(stops) + 1 >= 6
    assert any(step % 5 == 0 for step in stops), "no stop came before an evaluation that was due"
    assert digests() == reference["digests"] and losses() == reference["losses"]
    assert vals() == reference["vals"] and len(events("val")) == len(reference["vals"])
    assert state_of(final()) == reference["final"]
    assert status.main(["run", "--exit-code"]) == 0


def test_a_real_walltime(reference):
    """The clock on the wall; far more steps than there is time for."""
    outcome = succeed(max_runtime_seconds=1.6, walltime_reserve_seconds=0.3, num_iterations=10**6, save_every=-1,
                      warmup_steps=2)
    assert "s left; step" in outcome.out and state()["status"] == "stopped"
    done = max(steps())
    assert checkpoints() == [f"checkpoint-{done + 1}-shutdown"]
    shared = min(done + 1, STEPS)
    assert digests()[:shared] == reference["digests"][:shared]


# ---- signals --------------------------------------------------------------------------------------------------------

PLACES = {  # where a signal arrives, which it is, and the step after which the run stops at the latest
    "set-up": ("nanochat.gpt.GPT.init_weights", 1, signal.SIGTERM, 1),
    "the first batch": ("nanochat.dataloader.DataLoader.__next__", 1, signal.SIGINT, 1),
    "an evaluation": ("nanochat.loss_eval.evaluate_buckets", 2, signal.SIGUSR1, 6),
    "sampling": ("nanochat.engine.Engine.generate_batch", 1, signal.SIGUSR2, 6),
    "the copy of a save": ("nanochat.trainer.to_host", 1, signal.SIGTERM, 5),
    "the writing of a save": ("nanochat.checkpoint.save_plain", 2, signal.SIGINT, STEPS),  # beside the steps
}


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_is_honoured_soon_wherever_it_arrives(reference, place):
    function, call, number, latest = PLACES[place]
    finish(hook=partial(before, function, call, partial(send, number)), **LOOKING, sample_every=5)
    assert state()["status"] == "stopped" and state()["reason"] == number.name
    assert 1 <= state()["step"] <= latest
    found = list_checkpoints(training.run_dir())
    for path in found:
        verify_checkpoint(path)
    assert sorted(path.name for path in found) == checkpoints(), "something half-written lies about"
    succeed(**LOOKING, sample_every=-1)
    assert digests() == reference["digests"] and state_of(final()) == reference["final"]


# ---- rows that are passed over --------------------------------------------------------------------------------------

def told(*argv):
    """The JSON lines of scripts.inspect_data on the run, which must agree with what the log says."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert inspect_data.main([*argv, str(training.run_dir())]) == 0, out.getvalue()
    return [json.loads(line) for line in out.getvalue().splitlines() if line.startswith("{")]


def test_a_new_run_passes_over_rows_once_wherever_it_is_killed(reference):
    settings = {"num_iterations": 9, "save_every": 4, "sync_save": True, "skip_steps": 3}
    for kill_after, saved in ((2, []), (6, ["checkpoint-4"])):
        start(hook=partial(die_after_step, kill_after), **settings).wait_for_death()
        assert checkpoints() == saved
    finish(2, **settings)
    assert digests() == reference["digests"][3:12]
    assert load_checkpoint(final()).cursors[0]["row"] == 12 * 2
    assert "--skip-steps: the run has 3, this launch 0" in refuse(num_iterations=14)
    assert [line["match"] for line in told("digest", "--steps=0:9")] == [True] * 9


def test_behind_a_loss_spike_a_new_run_goes_on_from_the_old_one(reference):
    """What people do after a loss that went wrong: back to the checkpoint before, and past the rows that did it."""
    shutil.copytree(reference["path"], training.run_dir("long"))
    more = {"init_from": "long@4", "init_data": "continue", "init_optimizer": True, "save_every": -1}
    succeed(skip_steps=4, num_iterations=4, **more)
    assert digests() == reference["digests"][8:12]
    assert [line["match"] for line in told("digest", "--steps=0:4")] == [True] * 4
    assert told("rows", "--json", "--step=0")[0]["lane_row"] == 8 * 2


# ---- what may change ------------------------------------------------------------------------------------------------

def test_where_and_how_it_computes_may(reference, workplace):
    """All at once: nothing of it moves a row, and but for B no bit either."""
    training.take_over(reference["path"], "checkpoint-8")
    moved = shutil.move(workplace / "data", workplace / "moved")
    outcome = succeed(
        data_path=moved, tokenizer_threads=3, save_every=3, eval_every=2, eval_tokens=training.T * 8, sample_every=100,
        sync_save=True, keep_last_k=9, keep_milestone_every=7, max_runtime_seconds=1e5, walltime_reserve_seconds=1,
        collective_timeout_seconds=300, plan="warn", tokenizer=training.run_dir() / "tokenizer")
    assert "changed: --eval-tokens: the run has 256, this launch 512" in outcome.out
    assert outcome.out.count("changed: ") == 1
    assert digests() == reference["digests"] and losses() == reference["losses"]
    ours, theirs = state_of(final()), reference["final"]
    assert ours["model"] == theirs["model"] and ours["optimizer"] == theirs["optimizer"]


# ---- wandb ----------------------------------------------------------------------------------------------------------

class Wandb(types.ModuleType):
    """Just enough of it: a run has the id that was given, or one of its own."""

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
    assert fake.given == [first], "the log alone had it"
    succeed(num_iterations=4, **{**settings, "run": "dummy"})  # a launch without it in between
    assert load_checkpoint(final()).trainer_state["wandb_id"] == first
    succeed(num_iterations=6, **{**settings, "run": "another name"})
    assert fake.given == [first, first] and len(events("wandb")) == 1
    assert load_checkpoint(final()).trainer_state["wandb_id"] == first
    succeed(num_iterations=2, resume="scratch", force=True, **settings)
    assert fake.given == [first, first, None], "a run that was begun anew is another one"


def test_wandb_offline_goes_on_in_the_same_run():
    for num_iterations in (2, 3):
        outcome = succeed(run="name", num_iterations=num_iterations, save_every=-1)
        assert "continuing without it" not in outcome.err
    [wandb_id] = {load_checkpoint(final()).trainer_state["wandb_id"], *(e["id"] for e in events("wandb"))}
    assert wandb_id
    assert len(list((training.run_dir() / "wandb").glob("offline-run-*/*.wandb"))) == 2
    assert len(read_log(training.log_file())) > 3
