"""A progress bar, trackers and a profile show a run without changing a bit of it."""

import gzip
import importlib.util
import io
import json
import re
import sys
from contextlib import nullcontext

import pytest

from nanochat import trainer
from nanochat.common import LAUNCH
from tests import training
from tests.training import final, losses, refuse, run_dir, state_of, succeed

SHORT = {"num_iterations": 4, "save_every": -1, "eval_every": 2, "sample_every": 4}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module", autouse=True)
def plain(tmp_path_factory):
    """The losses, final state and output of a run without bar, trackers and profile."""
    with training.workplace(tmp_path_factory.mktemp("trackers"), **training.SMALL):
        outcome = succeed(model_tag="plain", **SHORT)
        yield {"losses": losses("plain"), "state": state_of(final("plain")), "outcome": outcome}


def test_a_terminal_has_a_bar_below_the_log(plain, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(training.io, "StringIO", lambda: screen)  # what training.run redirects to
    monkeypatch.setattr(trainer, "BAR", "<{desc} {n_fmt}/{total_fmt}{postfix}>")
    text = succeed(model_tag="bar", log_every=2, **SHORT).out
    assert losses("bar") == plain["losses"]
    assert re.search(r"<bar 4/4, loss \S+, bits per byte \S+ at step \S+, \S+ tok/s, eta 0", text)
    lines = [line for line in re.split(r"[\r\n]", text) if line.startswith("step ")]
    assert [line[:10] for line in lines if " | loss" in line] == ["step 00001", "step 00003"]
    assert all("<bar" not in line for line in lines), "the bar does not share a line"
    assert text.rstrip("\r").endswith(" ") and LAUNCH.aside is nullcontext, "the bar is gone at the end"


def test_without_a_terminal_lines_are_plain(plain):
    outcome = plain["outcome"]
    assert len(re.findall(r"^step \d{5}/00004 \| loss", outcome.out, re.M)) == 4
    assert "\r" not in outcome.out + outcome.err


def test_tensorboard_has_the_values_of_the_log_and_a_profile_is_written(plain, capfd):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    succeed(model_tag="seen", log_to="tensorboard,wandb", profile_steps="1:3", **SHORT)
    assert state_of(final("seen")) == plain["state"], "trackers change nothing"
    board = EventAccumulator(str(run_dir("seen") / "tensorboard"))
    board.Reload()
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(losses("seen"), rel=1e-6)
    assert [event.step for event in board.Scalars("val/bpb")] == [0, 2, 4]
    assert not (run_dir("seen") / "wandb").exists(), "wandb needs --run"
    assert "SyncActivityProfiler" not in capfd.readouterr().err, "the profiler's library must not print"
    trace = json.loads(gzip.decompress((run_dir("seen") / "profile" / "steps-1-3.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "aten::mm" in names and len(trace["traceEvents"]) > 100
    [samples] = training.events("samples", "seen")
    assert samples["step"] == 4 and samples["texts"] and all(isinstance(text, str) for text in samples["texts"])


FAKE = """
import json, os

def init(**arguments):
    return Run(arguments)

class Run:
    def __init__(self, arguments):
        self.file = open(os.environ["FAKE"], "a")
        self.write(init=arguments)

    def write(self, **record):
        self.file.write(json.dumps(record) + chr(10))

    def log(self, metrics, step):
        self.write(metrics=metrics, step=step)

    def finish(self):
        self.write(finish=True)
        self.file.close()
"""


@pytest.mark.parametrize("fails", [False, True])
def test_trackio_gets_the_values_of_the_log(plain, tmp_path, monkeypatch, fails):
    (tmp_path / "trackio.py").write_text(FAKE + "\ndel init" * fails)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FAKE", str(tmp_path / "values"))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    tag = "untracked" if fails else "tracked"
    outcome = succeed(model_tag=tag, log_to="trackio,wandb", **SHORT)
    del sys.modules["trackio"]
    assert losses(tag) == plain["losses"] and state_of(final(tag)) == plain["state"], "the same bits"
    if fails:
        assert "trackio failed (" in outcome.err and "continuing without it" in outcome.err
        return
    first, *values, last = map(json.loads, (tmp_path / "values").read_text().splitlines())
    arguments = first["init"]
    assert (arguments["project"], arguments["name"], arguments["resume"]) == ("nanochat", "tracked", "allow")
    assert arguments["config"]["num_iterations"] == 4 and last == {"finish": True}
    logged = {value["step"]: value["metrics"]["train/loss"] for value in values if "train/loss" in value["metrics"]}
    assert logged == dict(enumerate(losses("tracked")))
    assert [value["step"] for value in values if "val/bpb" in value["metrics"]] == [0, 2, 4]
    assert all(type(number) in (int, float) for value in values for number in value["metrics"].values())


@pytest.mark.parametrize("flag, value, error", [
    ("log_to", "tensorbord", "--log-to: got 'tensorbord', expected wandb, tensorboard, trackio"),
    ("log_to", "", "--log-to: got ''"),
    ("profile_steps", "7", "--profile-steps: got '7', expected A:B"),
    ("profile_steps", "9:9", "--profile-steps: got '9:9'"),
    ("profile_steps", "-1:x", "--profile-steps: got '-1:x'"),
    ("log_to", "wandb,trackio", "--log-to=trackio: trackio is not installed; run pip install -e '.[trackio]'"),
    ("log_to", "tensorboard", "pip install -e '.[tensorboard]'")])
def test_a_tracker_or_profile_that_cannot_work_is_one_sentence(flag, value, error, monkeypatch):
    find, extras = importlib.util.find_spec, ("tensorboard", "trackio")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in extras else find(name))
    assert error in refuse(model_tag="none", **{flag: value})
    assert not run_dir("none").exists()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(plain, tmp_path):
    run_dir("full").mkdir()
    (run_dir("full") / "profile").write_text("in the way")
    outcome = succeed(model_tag="full", profile_steps="0:9", **SHORT)
    assert "profile failed (" in outcome.err and losses("full") == plain["losses"]
