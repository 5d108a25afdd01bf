"""Whether a run's weights follow from its rows: a receipt commits to checkpoints, and stretches
between two of them are trained again."""

import json
import shutil
from unittest import mock

import pytest
import torch

from nanochat import schedule
from nanochat.checkpoint import (
    CURSORS_NAME,
    MODEL_CONFIG_NAME,
    MODEL_NAME,
    load_checkpoint,
    write_sealed,
)
from nanochat.common import hash_json
from scripts import receipt, replay, verify
from tests import training
from tests.finished import RUN, STEPS, command, copy


@pytest.fixture(autouse=True)
def workplace(finished, tmp_path):
    """A base directory with "run", which saved at steps 2, 4, 6 and 8."""
    with training.workplace(tmp_path, **RUN) as path:
        copy(finished, path)
        yield path


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Replays on one process need no process of their own here."""
    of_its_own = verify.replay

    def run(words, processes=1):
        if processes > 1:
            return of_its_own(words, processes)
        assert replay.main(words) == 0

    monkeypatch.setattr(verify, "replay", run)


def publish(tag="run"):
    """Write the receipt of a run. Returns its path."""
    out = training.run_dir().parent.parent / f"{tag}.json"
    assert command(receipt.main, tag, f"--out={out}").code == 0
    return out


def checked(path, share="100%", *more):
    return command(verify.main, path, f"--replay={share}", *more)


def rewrite(step, change, tag="run", **config):
    """Change the weights of a checkpoint, or its model's config, and seal it again, as a forger
    would."""
    path = training.run_dir(tag) / "checkpoints" / f"checkpoint-{step}"
    theirs = load_checkpoint(path)
    contents = {name: (path / name).read_bytes() for name in theirs.seal["files"]}
    weights = {name: tensor.clone() for name, tensor in theirs.model_state().items()}
    change(weights)
    contents[MODEL_NAME] = weights
    contents[MODEL_CONFIG_NAME] = json.dumps({**theirs.model_config, **config}).encode()
    head = {k: v for k, v in theirs.seal.items() if k not in ("files", "checksum")}
    assert {CURSORS_NAME, MODEL_CONFIG_NAME} <= contents.keys()
    shutil.rmtree(path)
    write_sealed(path, head, contents)


def flip_a_bit(weights):
    first = next(iter(weights.values()))
    first.view(torch.uint8).view(-1)[0] ^= 1


# ---- honest runs ---------------------------------------------------------------------------------


def test_every_stretch_of_an_honest_run_follows_bit_by_bit():
    outcome = checked(publish())
    assert outcome.code == 0, outcome.out + outcome.err
    assert "replaying 100% of the steps of run" in outcome.out
    assert all(f"OK steps {span}" in outcome.out for span in ("0 to 2", "4 to 6", "6 to 8"))


def test_a_span_replays_the_stretches_that_overlap_it():
    outcome = checked(publish(), "3:5")
    assert outcome.code == 0 and "2 to 4, 4 to 6" in outcome.out
    assert "OK steps 0 to 2" not in outcome.out


def test_a_share_is_drawn_from_all_stretches():
    outcome = checked(publish(), "20%")
    assert outcome.code == 0 and "replaying 25% of the steps" in outcome.out


def test_a_fork_is_replayed_from_its_first_checkpoint_and_on_two_processes():
    training.succeed(fork_from="run@4", model_tag="child", leaves=2, save_every=2)
    outcome = checked(publish("child"), "4:6", "--processes=2")
    assert outcome.code == 0, outcome.out + outcome.err
    assert "OK steps 4 to 6" in outcome.out


def test_data_may_have_moved(workplace):
    path = publish()
    shutil.move(workplace / "data", workplace / "moved")
    assert checked(path, "2:4", f"--data-path={workplace / 'moved'}").code == 0


# ---- forgeries -----------------------------------------------------------------------------------


def test_one_flipped_bit_of_one_weight_is_found_on_both_sides():
    rewrite(4, flip_a_bit)
    path = publish()
    assert checked(path, "2:4").code == 1
    assert checked(path, "4:6").code == 1
    assert checked(path, "6:8").code == 0, "the others still follow"


def test_the_same_weights_as_another_model_are_found():
    before = load_checkpoint(training.run_dir() / "checkpoints" / "checkpoint-4").model_config
    rewrite(4, lambda weights: None, window_pattern="L")
    assert before["window_pattern"] != "L"
    outcome = checked(publish(), "2:4")
    assert outcome.code == 1


def test_another_rate_for_one_step_is_found():
    rate = schedule.Schedule.lr

    def raised(self, step):
        return rate(self, step) * (2 if step == 3 else 1)

    with mock.patch.object(schedule.Schedule, "lr", raised):
        training.succeed(model_tag="forged", save_every=2)
    path = publish("forged")
    assert checked(path, "2:4").code == 1 and checked(path, "4:6").code == 0


def test_settings_that_were_edited_afterwards_are_named():
    path = publish()
    config = training.run_dir() / "config.json"
    config.write_text(config.read_text().replace('"z_loss": 0.0', '"z_loss": 0.001'))
    assert "--z-loss is 0.0 in the receipt" in checked(path).out


def test_a_checkpoint_that_was_replaced_after_the_receipt_is_named():
    path = publish()
    rewrite(4, flip_a_bit)
    assert "step 4 is not the one of the receipt" in checked(path, "2:4").out


def edit_log(change, tag="run"):
    """Rewrite each line of a log. `change`: takes a record and returns the new one."""
    path = training.log_file(tag)
    records = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_log_with_other_digests_than_the_receipts_is_named_before_the_replay():
    path = publish()
    edit_log(lambda record: {**record, "digest": "0" * 16} if record["step"] == 5 else record)
    outcome = checked(path, "0:2")
    assert outcome.code == 1 and "not those of the receipt" in outcome.out
    assert "it is another run" in outcome.out, "regression: it was said to be edited"
    assert "OK" not in outcome.out


def test_a_launch_that_claims_another_rate_is_named():
    path = publish()

    def change(record):
        return (
            {**record, "changed": {"matrix_lr": 0.05}}
            if record.get("event") == "started"
            else record
        )

    edit_log(change)
    outcome = checked(path, "0:2")
    assert outcome.code == 1 and "--matrix-lr is 0.02 in the receipt" in outcome.out


def test_a_launch_that_was_added_afterwards_with_another_length_is_named():
    path = publish()
    lines = training.log_file().read_text().splitlines()
    started = json.loads(next(line for line in lines if '"started"' in line))
    added = json.dumps({**started, "num_iterations": 2 * STEPS})
    training.log_file().write_text("\n".join([*lines, added, *lines[1:]]) + "\n")
    assert "launches" in checked(path, "0:2").out


def test_a_run_that_was_trained_further_still_has_its_receipt():
    path = publish()
    training.succeed(num_iterations=STEPS + 2)
    outcome = checked(path, "4:6")
    assert outcome.code == 0, outcome.out


def test_a_saved_beginning_must_be_the_seeds_new_weights():
    training.succeed(model_tag="early", save_at="0", save_every=2)
    assert checked(publish("early"), "0:2").code == 0
    rewrite(0, flip_a_bit, "early")
    rest = training.run_dir("early") / "checkpoints"
    shutil.rmtree(rest / "checkpoint-2")
    shutil.rmtree(rest / "checkpoint-4")
    # trained on from the false beginning
    training.succeed(model_tag="early", save_at="0", save_every=2, resume="early@0", force=True)
    assert checked(publish("early"), "0:2").code == 1


# ---- what is missing -----------------------------------------------------------------------------


def test_a_receipt_whose_checkpoints_are_gone_is_one_sentence():
    path = publish()
    shutil.rmtree(training.run_dir() / "checkpoints" / "checkpoint-4")
    outcome = checked(path, "2:4")
    assert outcome.code == 1 and "the checkpoint of step 4 is gone" in outcome.out
    assert checked(path, "6:8").code == 0


def test_a_receipt_without_checkpoints_is_refused():
    path = publish()
    value = json.loads(path.read_text())
    for name in ("checkpoints", "training", "horizons", "checksum"):
        del value[name]
    value["checksum"] = hash_json(value)
    path.write_text(json.dumps(value))
    assert "checkpoints: expected" in checked(path).out


@pytest.mark.parametrize("text", ["5", "x%", "9:", "-1:4"])
def test_a_wrong_share_is_refused(text):
    outcome = command(verify.main, publish(), f"--replay={text}")
    assert outcome.code == 2 and "5%" in outcome.err
