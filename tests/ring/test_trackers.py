"""A progress bar, trackers and a profile show a run without changing a bit of it."""

import gzip
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import types
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from nanochat import run_journal
from nanochat.checkpoint import load_checkpoint
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
    monkeypatch.setattr(run_journal, "BAR", "<{desc} {n_fmt}/{total_fmt}{postfix}>")
    text = succeed(model_tag="bar", **SHORT).out
    assert losses("bar") == plain["losses"]
    assert re.search(r"<bar 4/4, loss \S+, bits per byte \S+ at step \S+, \S+ tok/s, eta 0", text)
    lines = [line for line in re.split(r"[\r\n]", text) if line.startswith("step ")]
    assert [line[:10] for line in lines if " | loss" in line] == [
        f"step 0000{step}" for step in range(4)
    ]
    assert all("<bar" not in line for line in lines), "the bar does not share a line"
    assert text.rstrip("\r").endswith(" "), "the bar is gone at the end"


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
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(
        losses("seen"), rel=1e-6
    )
    assert [event.step for event in board.Scalars("val/bpb")] == [0, 2, 4]
    assert [event.value for event in board.Scalars("started/num_iterations")] == [4]
    assert not (run_dir("seen") / "wandb").exists(), "wandb needs --run"
    assert "SyncActivityProfiler" not in capfd.readouterr().err, (
        "the profiler's library must not print"
    )
    trace = json.loads(
        gzip.decompress((run_dir("seen") / "profile" / "steps-1-3.json.gz").read_bytes())
    )
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "aten::mm" in names and len(trace["traceEvents"]) > 100
    [samples] = training.events("samples", "seen")
    assert (
        samples["step"] == 4
        and samples["texts"]
        and all(isinstance(text, str) for text in samples["texts"])
    )


@pytest.mark.parametrize(
    "name, fail_at",
    [
        ("wandb", "init"),
        ("wandb", "log"),
        ("wandb", "finish"),
        ("wandb", "nothing"),
        ("trackio", "nothing"),
    ],
)
def test_a_tracker_gets_the_values_of_the_log_and_its_failure_never_stops_the_run(
    plain, monkeypatch, name, fail_at
):
    """tests/faults/test_resume.py checks that a resumed run has the same wandb run."""
    fake, calls = types.ModuleType(name), []

    def call(method, *values, **more):
        calls.append((method, *values, more))
        if method == fail_at:
            raise RuntimeError(f"no {method} today")
        return fake

    fake.__dict__.update(
        id="id", **{method: partial(call, method) for method in ("init", "log", "finish")}
    )
    fake.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, fake)
    tag = f"{name}-{fail_at}"
    outcome = succeed(model_tag=tag, run="curve", log_to=name, **SHORT)
    assert losses(tag) == plain["losses"] and state_of(final(tag)) == plain["state"], (
        "the same bits"
    )
    warnings = [line for line in outcome.err.splitlines() if "continuing without it" in line]
    assert len(warnings) == (fail_at != "nothing") and all(
        f"no {fail_at} today" in line for line in warnings
    )
    assert [method for method, *_ in calls] == {"init": ["init"], "log": ["init", "log"]}.get(
        fail_at, ["init", *["log"] * (len(calls) - 2), "finish"]
    )
    wandb_id = load_checkpoint(final(tag)).seal["wandb_id"]
    assert wandb_id == ("id" if name == "wandb" and fail_at != "init" else None)
    if fail_at == "nothing":
        settings = calls[0][1]
        steps = [(more.get("step", values.get("step")), values) for _, values, more in calls[1:-1]]
        assert (settings["project"], settings["resume"], settings.get("id")) == (
            "nanochat",
            "allow",
            None,
        )
        assert (
            settings["name"] == ("curve" if name == "wandb" else tag)
            and settings["config"]["lanes"] == 4
        )
        assert {
            step: values["train/loss"] for step, values in steps if "train/loss" in values
        } == dict(enumerate(losses(tag)))
        assert [step for step, values in steps if "val/bpb" in values] == [0, 2, 4]
        assert name == "wandb" or all(
            type(value) in (int, float) for _, values in steps for value in values.values()
        )


HANGING_WANDB = """
import atexit, threading
id = "id"
def wait():
    threading.Event().wait()
def init(**settings):
    atexit.register(wait)
    threading.Thread(target=wait).start()
    return __import__("wandb")
def log(values):
    if values["step"] == HANGS_AT:
        wait()
def finish():
    wait()
"""
TRAIN = """
from nanochat import cli, steps
from scripts import base_train
steps.Sink.answer_s = cli.LEAVE_S = 0.5
cli.run_main(base_train.main)
"""


@pytest.mark.parametrize("hangs_at", [1, None])
def test_a_tracker_that_hangs_keeps_no_run_from_its_end(plain, tmp_path, hangs_at):
    """Regression: the process stayed for ever, and its state was "running"."""
    (tmp_path / "wandb.py").write_text(f"HANGS_AT = {hangs_at}\n{HANGING_WANDB}")
    tag = f"hangs-{hangs_at}"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *training.flags(model_tag=tag, run="curve", **SHORT)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        timeout=training.PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("wandb has hung for ") == 1
    assert training.state(tag)["status"] == "completed"
    assert (
        losses(tag) == plain["losses"] and state_of(final(tag))["model"] == plain["state"]["model"]
    )


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_tracker_that_is_not_installed_is_one_sentence(name, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module == name else find(module)
    )
    message = refuse(model_tag="none", log_to=f"wandb,{name}")
    assert message.startswith(f"--log-to={name}: ") and message.endswith(
        f"pip install -e '.[{name}]'"
    )
    assert not run_dir("none").exists()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(plain, tmp_path):
    run_dir("full").mkdir()
    (run_dir("full") / "profile").write_text("in the way")
    outcome = succeed(model_tag="full", profile_steps="0:9", **SHORT)
    assert "profile failed (" in outcome.err and losses("full") == plain["losses"]
