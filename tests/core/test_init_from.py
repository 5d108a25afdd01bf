"""A run that begins with the weights of another: what it takes over, what it refuses, and how it
resumes."""

import os
import shutil
from functools import partial
from unittest import mock

import pytest

from nanochat import checkpoint as checkpoint_module
from nanochat import model_code
from nanochat.checkpoint import find_checkpoint, load_checkpoint
from nanochat.run_dir import read_config
from nanochat.run_facts import ancestor_sentences, sentences_about
from nanochat.run_reader import RunReader
from scripts import base_train
from tests import training
from tests.core.test_engine import edited_package
from tests.finished import RUN, STEPS, copy
from tests.training import as_bytes, die_after_step, digests, losses, refuse, succeed


@pytest.fixture(autouse=True)
def workplace(finished, tmp_path):
    """A base directory with the run "origin", from which the tests start new runs."""
    with training.workplace(tmp_path, **RUN) as path:
        copy(finished, path, tag="origin")
        yield path


def checkpoint(name, tag="run"):
    return training.run_dir(tag) / "checkpoints" / name


def at_its_beginning(**settings):
    """Weights, optimizer state and learning rates of a new run at step 0, captured at the start of
    its loop."""
    taken, loop = {}, base_train.loop

    def watched(run, parts, *others):
        taken.update(
            model=as_bytes(dict(parts.model.state_dict())),
            optimizer=as_bytes(parts.optimizer.gather_state()),
            lrs=[group["lr"] for group in parts.optimizer.param_groups],
        )
        return loop(run, parts, *others)

    with mock.patch.object(base_train, "loop", watched):
        succeed(num_iterations=1, save_every=-1, init_from="origin@6", embedding_lr=0.1, **settings)
    return taken


# ---- what is taken over --------------------------------------------------------------------------


def test_weights_are_those_of_the_origin_and_everything_else_is_new():
    """tests/core/test_checkpoint.py tests the other names of an origin."""
    theirs = load_checkpoint(checkpoint("checkpoint-6", "origin"))
    taken = at_its_beginning()
    assert taken["model"] == as_bytes(theirs.model_state())
    assert taken["optimizer"]["step"] == 0
    origin = read_config(training.run_dir())["origin"]
    checksum = theirs.seal["checksum"]
    expected = {"run": "origin", "checkpoint": "checkpoint-6", "step": 6, "checksum": checksum}
    assert origin.items() >= expected.items()
    assert digests() == digests("origin")[:1], "it starts at the beginning of the data"
    assert losses()[0] < losses("origin")[0] - 0.02, "and the weights have learned"
    [began, *_] = sentences_about(RunReader(training.run_dir()))
    assert "began with the weights of step 6 of origin" in began, "regression: nothing said so"
    succeed(model_tag="fork", fork_from="run@1", num_iterations=2)
    [forked] = ancestor_sentences(RunReader(training.run_dir("fork")))
    assert forked == began.replace("It", "run")


def test_weights_that_were_trained_with_other_code_have_a_note(monkeypatch, tmp_path):
    more = {"init_from": "origin@6", "num_iterations": 1}
    note = "nanochat/gpt.py changed; if the model computes"
    assert note not in succeed(model_tag="same", **more).out
    monkeypatch.setattr(model_code, "PACKAGE", edited_package(tmp_path))
    assert note in succeed(**more).out


def test_a_resume_with_other_code_is_known(monkeypatch, tmp_path):
    succeed(num_iterations=1)
    succeed(num_iterations=2)
    monkeypatch.setattr(model_code, "PACKAGE", edited_package(tmp_path))
    succeed(num_iterations=3)
    launches = RunReader(training.run_dir()).launches
    assert [launch.other_code for launch in launches] == [[], [], ["nanochat/gpt.py"]]


def test_a_save_has_the_hashes_of_the_code_with_which_its_launch_began(monkeypatch, tmp_path):
    began = checkpoint_module.read_seal(checkpoint("final", "origin"))["model_code"]
    loop = base_train.loop

    def edit_first(*parts):
        monkeypatch.setattr(model_code, "PACKAGE", edited_package(tmp_path))
        return loop(*parts)

    with mock.patch.object(base_train, "loop", edit_first):
        succeed(num_iterations=1)
    assert checkpoint_module.read_seal(checkpoint("final"))["model_code"] == began


def test_on_two_processes_the_result_is_the_same_and_only_rank_0_reads(workplace):
    more = {"init_from": "origin@6", "num_iterations": 2}
    succeed(**more)
    training.finish(2, hook=only_rank_0_reads, model_tag="two", **more)
    assert digests("two") == digests() == digests("origin")[:2]
    assert losses("two") == pytest.approx(losses(), abs=2e-4)
    assert (
        read_config(training.run_dir("two"))["origin"] == read_config(training.run_dir())["origin"]
    )


def only_rank_0_reads():
    """A hook: other ranks fail if they read weights."""
    load = checkpoint_module.load_plain

    def watched(path):
        assert os.environ["RANK"] == "0", "another rank reads weights"
        return load(path)

    checkpoint_module.load_plain = watched


@pytest.mark.parametrize(
    ("changed", "word"),
    [({"depth": 3}, "n_layer"), ({"head_dim": 6}, "n_head")],
)
def test_an_origin_that_does_not_fit_is_refused_before_its_weights_are_read(
    monkeypatch, changed, word
):
    """tests/faults/test_bad_input.py has the errors."""
    monkeypatch.setattr(checkpoint_module, "load_plain", None)
    assert word in refuse(init_from="origin@6", num_iterations=1, **changed)


# ---- resumes -------------------------------------------------------------------------------------


def test_killed_before_its_first_checkpoint_a_run_starts_from_the_same_origin_again():
    more = {"init_from": "origin", "num_iterations": 6, "save_every": 4}
    shutil.rmtree(checkpoint("final", "origin"))
    training.start(hook=partial(die_after_step, 2), **more).wait_for_death()
    before = read_config(training.run_dir())["origin"]
    assert before["step"] == 6 and not training.checkpoints()
    succeed(model_tag="origin")
    assert find_checkpoint("origin").step == STEPS, "the origin has newer checkpoints now"
    succeed(**more)
    succeed(model_tag="fresh", **{**more, "init_from": "origin@6"})
    assert load_checkpoint(checkpoint("checkpoint-4")).seal["step"] == 4
    assert digests() == digests("fresh") and losses() == losses("fresh")
    assert read_config(training.run_dir())["origin"] == before


def test_a_changed_origin_is_refused_until_the_run_has_a_checkpoint_of_its_own():
    more = {"init_from": "origin@6", "num_iterations": 6, "save_every": 4}
    training.start(hook=partial(die_after_step, 2), **more).wait_for_death()
    theirs, aside = checkpoint("checkpoint-6", "origin"), checkpoint("aside", "origin")
    theirs.rename(aside)
    succeed(model_tag="other", matrix_lr=0.03)
    shutil.copytree(checkpoint("checkpoint-6", "other"), theirs)
    before = training.fingerprint(training.run_dir())
    message = refuse(**more)
    assert (
        "--init-from=origin@6" in message
        and "began with step 6 of origin" in message
        and "--model-tag" in message
    )
    assert training.fingerprint(training.run_dir()) == before
    shutil.rmtree(theirs)
    aside.rename(theirs)
    training.start(hook=partial(die_after_step, 5), sync_save=True, **more).wait_for_death()
    shutil.rmtree(training.run_dir("origin"))  # no longer needed after the first checkpoint
    assert "at step 4" in succeed(**more).out
    assert len(digests()) == 6
