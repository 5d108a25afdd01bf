"""The average of a run's last checkpoints can be evaluated, and corrupt checkpoints are skipped."""

import json

import pytest
import torch

from nanochat.checkpoint import find_checkpoint, load_checkpoint
from nanochat.run_reader import RunReader
from scripts import average, base_eval, export, inspect_data, page, receipt, replay, report
from tests import training
from tests.finished import STEPS, command


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


MEAN = "the mean of 2 checkpoints of run"


def test_an_average_is_not_trained_further_and_says_how_to_begin_from_it(copied):
    average.main(["run", "--last=2"])
    over = training.succeed(model_tag="run-average-2").out
    assert "nothing to do" in over
    other = training.refuse(model_tag="run-average-2", matrix_lr=0.5)
    assert "--init-from=run-average-2" in other
    longer = {"model_tag": "run-average-2", "num_iterations": STEPS + 1}
    fork = {"fork_from": "run-average-2", "model_tag": "fork", "num_iterations": STEPS + 1}
    for words in (over, training.refuse(**longer), training.refuse(**fork)):
        assert "--init-from=run-average-2 --model-tag=NAME" in words
    training.succeed(model_tag="next", init_from="run-average-2", num_iterations=1)


def test_report_page_and_model_card_say_what_an_average_is(copied):
    """Regression: "nothing saved yet", step 0, and a card without a word of it."""
    training.succeed(num_iterations=STEPS + 2)
    average.main(["run", "--last=2"])
    run = RunReader(training.run_dir("run-average-2"))
    text = report.make_report(run)
    assert "nothing saved yet" not in text and "No step" not in text
    card = export.model_card(find_checkpoint("run-average-2"), run, 1).decode()
    html = copied / "page.html"
    assert command(page.main, "run-average-2", f"--out={html}").code == 0
    assert f"{STEPS + 2} / {STEPS + 2}" in html.read_text()
    for shown in (text, card, html.read_text()):
        assert f"Its weights are {MEAN}" in shown


def test_rows_and_documents_are_asked_of_the_run_that_was_averaged(copied):
    """Regression: `find` said that the average had seen no item, and stored it for the model card."""
    average.main(["run", "--last=2"])
    for argv in (["find", "--text=a"], ["rows", "--step=1"], ["digest", "--steps=0:1"]):
        outcome = command(inspect_data.main, argv[0], "run-average-2", *argv[1:])
        assert outcome.code == 1 and MEAN in outcome.err
    error = command(receipt.main, "run-average-2").err
    assert MEAN in error and "name the run that trained them" in error and "log" not in error
    error = command(replay.main, "run-average-2@1").err
    assert "the run has trained 0 steps" in error and "leave out @1" in error
