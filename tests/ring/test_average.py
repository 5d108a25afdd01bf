"""The average of a run's last checkpoints can be evaluated, and corrupt checkpoints are skipped."""

import json

import pytest
import torch

from nanochat.checkpoint import find_checkpoint, load_checkpoint
from nanochat.run_reader import RunReader
from scripts import average, base_eval, replay
from tests import training


@pytest.fixture
def run(copied):
    """Checkpoints of steps 2, 4, 6 and 8; that of step 6 is corrupt."""
    model = training.run_dir() / "checkpoints" / "checkpoint-6" / "model" / "pytorch_model.bin"
    model.write_bytes(model.read_bytes()[:-1])
    return training.run_dir()


def test_average_writes_the_mean_of_the_newest_good_checkpoints(run, caplog):
    assert average.main(["run", "--last=3"]) == 0
    assert "checkpoint-6 is skipped" in caplog.text
    averaged = find_checkpoint("run-average-3")
    states = [
        load_checkpoint(run / "checkpoints" / name).model_state()
        for name in ("checkpoint-2", "checkpoint-4", "final")
    ]
    assert (
        averaged.step == 8 and averaged.path.name == "final" and len(averaged.seal["averaged"]) == 3
    )
    for name, tensor in averaged.model_state().items():
        mean = torch.stack([state[name].double() for state in states]).mean(dim=0)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)
    state = RunReader(run.with_name("run-average-3")).status()
    assert (state["shown"], state["step"], state["reason"]) == (
        "completed",
        8,
        "the mean of 3 checkpoints of run",
    )
    assert base_eval.main(["run-average-3", "--device-type=cpu", "--unigram-tokens=1000"]) == 0
    assert json.loads((run.with_name("run-average-3") / "eval.json").read_text())["val_bpb"] > 0


def test_an_average_has_the_hashes_of_the_code_that_trained_it(run):
    average.main(["run", "--last=2"])
    averaged, final = (find_checkpoint(name).seal for name in ("run-average-2", "run"))
    assert averaged["model_code"] == final["model_code"]


def test_a_replayed_checkpoint_is_not_one_of_the_last(copied):
    """Regression: a step that somebody had looked into was averaged, too."""
    assert replay.main(["run@7"]) == 0
    assert average.main(["run", "--last=2"]) == 0
    names = [path.rpartition("/")[2] for path in find_checkpoint("run-average-2").seal["averaged"]]
    assert names == ["final", "checkpoint-6"]


def test_steps_that_were_not_saved_are_averaged_too(copied):
    assert average.main(["run", "--steps=3,4"]) == 0
    averaged = find_checkpoint("run-average-2")
    states = [find_checkpoint(f"run@{step}").model_state() for step in (3, 4)]
    assert averaged.step == 4
    for name, tensor in averaged.model_state().items():
        mean = torch.stack([state[name].double() for state in states]).mean(dim=0)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)
