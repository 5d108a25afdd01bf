"""A fork continues another run, and differs from it in nothing but what its command line changes."""

import os
import re
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from nanochat import model_code, start_run
from nanochat.checkpoint import Checkpoint, load_checkpoint
from nanochat.common import show
from nanochat.run_dir import cursor_files, read_config
from nanochat.run_facts import origin_sentences, sentences_about
from nanochat.run_reader import RunReader, unbalanced
from nanochat.text import warn_once
from nanochat.tokenizer import RustBPETokenizer
from scripts import inspect_data, status, validate
from tests import training
from tests.core.test_engine import edited_package
from tests.finished import RUN, STEPS, command, copy
from tests.training import as_bytes, as_flags, die_after_step, digests, losses

AT = 4  # where forks branch off


@pytest.fixture(autouse=True)
def workplace(finished, tmp_path):
    """A base directory with the run "parent", which saved at steps 2, 4, 6 and 8."""
    with training.workplace(tmp_path, **RUN) as path:
        copy(finished, path, tag="parent")
        yield path


def fork(tag="child", step=AT, parent="parent", run=training.succeed, **changed):
    """Run a fork whose command line names nothing but what it changes."""
    words = {"fork_from": f"{parent}@{step}", "model_tag": tag, **changed}
    return bare(run, **words)


def bare(run=training.succeed, **words):
    """A command line of nothing but these flags."""
    with mock.patch.object(training, "flags", lambda **named: as_flags(named)):
        return run(**words)


def weights(tag, name="final"):
    return as_bytes(load_checkpoint(training.run_dir(tag) / "checkpoints" / name).model_state())


# ---- a fork that changes nothing -----------------------------------------------------------------


def test_a_fork_that_changes_nothing_equals_its_parent_in_every_bit():
    outcome = fork()
    assert digests("child", AT) == digests("parent")[AT:]
    assert losses("child") == losses("parent")[AT:]
    assert weights("child") == weights("parent")
    assert "continues parent at step 4; nothing changed" in outcome.out
    assert "does not go on" not in outcome.out and "from its beginning" not in outcome.out


def test_what_a_fork_keeps_is_checked_before_what_fits_together(workplace):
    """Regression: the setting --val-fraction, which no one had typed, "applies to text only"."""
    training.succeed(model_tag="split", data_path=workplace / "data", val_fraction=0.1)
    shards = {"data_format": "shards", "data_path": workplace / "shards"}
    error = fork(parent="split", run=training.refuse, **shards)
    assert "a fork keeps its parent's" in error and "--init-from=split@4" in error
    assert "but --data-format was 'text' and is 'shards'; leave" in error


@pytest.mark.parametrize(
    "step, words", [(5, "scripts.replay parent@5"), (99, "has trained 8 steps")]
)
def test_validate_says_how_to_check_a_fork_from_a_step_that_was_not_saved(step, words):
    """Regression: it said that there is no such checkpoint."""
    with pytest.raises(ValueError, match=words):
        validate.main([f"--fork-from=parent@{step}"])


def test_its_config_records_the_parent_and_that_nothing_changes():
    fork()
    theirs = load_checkpoint(training.run_dir("parent") / "checkpoints" / f"checkpoint-{AT}")
    record = read_config(training.run_dir("child"))["fork"]
    assert record["run"] == "parent" and record["step"] == AT and record["changes"] == {}
    assert record["checksum"] == theirs.seal["checksum"]
    assert record["tokens"] == theirs.seal["tokens"]


@pytest.mark.parametrize("how", ["words", "a file"])
def test_it_takes_back_what_is_off_by_default(tmp_path, how):
    """Regression: no word switched off a limit or a switch of its parent, and null or false in a
    file was not heard."""
    kept = {
        "skip_spikes": 9,
        "max_grad_norm": 1.0,
        "allow_bucket_exhaustion": True,
        "keep_last_k": 9,
    }
    fork(tag="limited", **kept)
    file = tmp_path / "off.yaml"
    file.write_text("skip-spikes: null\nmax_grad_norm: null\nallow-bucket-exhaustion: false\n")
    off = dict.fromkeys(("skip_spikes", "max_grad_norm", "allow_bucket_exhaustion"), False)
    fork(parent="limited", step=6, **(off if how == "words" else {"config": file}))
    config = read_config(training.run_dir("child"))
    changes = {"skip_spikes": [9.0, None], "max_grad_norm": [1.0, None]}
    assert config["fork"]["changes"] == changes | {"allow_bucket_exhaustion": [True, False]}
    assert config["keep_last_k"] == 9


def test_it_may_be_described_in_a_file(tmp_path):
    """Regression: a file that named the parent inherited nothing from it."""
    file = tmp_path / "fork.yaml"
    file.write_text(f"fork-from: parent@{AT}\nmodel-tag: child\nmatrix-lr: 0.01\n")
    bare(config=file)
    changes = read_config(training.run_dir("child"))["fork"]["changes"]
    assert [*changes] == ["matrix_lr"]


def test_a_secret_in_a_file_is_not_shown(tmp_path, capsys):
    """Regression: the name of the parent was looked up, and printed, before it was checked."""
    file = tmp_path / "fork.yaml"
    file.write_text("fork-from: https://user:pw@host/x\n")
    error = bare(config=file, run=training.refuse)
    assert "--fork-from: a URL with user information" in error and "pw" not in error


def test_a_null_in_a_file_leaves_the_data_of_the_parent(tmp_path):
    """Regression: the fork recorded the default folder, and could not be resumed."""
    file = tmp_path / "null.yaml"
    file.write_text("data-path: null\ntokenizer: null\n")
    fork(config=file)
    paths = [read_config(training.run_dir(tag))["data_path"] for tag in ("parent", "child")]
    assert paths[0] == paths[1]


def test_its_record_does_not_name_the_settings_of_a_launch():
    """Regression: a walltime was listed as a change, in every report."""
    out = fork(max_runtime_seconds=1e5, walltime_reserve_seconds=1, save_every=3, plan="warn").out
    assert read_config(training.run_dir("child"))["fork"]["changes"] == {}
    assert "nothing changed" in out


def test_other_code_of_the_model_is_a_change(monkeypatch, tmp_path, capsys):
    """Regression: a fork with another activation had "nothing changed" wherever forks are listed."""
    monkeypatch.setattr(model_code, "PACKAGE", edited_package(tmp_path))
    fork()
    [(name, (before, after))] = read_config(training.run_dir("child"))["fork"]["changes"].items()
    assert "nanochat/gpt.py" in name and before != after
    capsys.readouterr()
    status.main([])
    assert name in capsys.readouterr().out
    sentences = " ".join(origin_sentences(RunReader(training.run_dir("child"))))
    assert f"{name} " in sentences and "nothing changed" not in sentences


def test_its_record_does_not_name_a_length_that_is_its_parents():
    """Regression: it did if the parent's length followed from another setting."""
    ratio = {"target_param_data_ratio": 0.2}
    training.succeed(model_tag="long", num_iterations=-1, **ratio)
    steps = read_config(training.run_dir("long"))["derived"]["num_iterations"]
    fork(parent="long", num_iterations=steps, **ratio)
    assert read_config(training.run_dir("child"))["fork"]["changes"] == {}
    assert digests("child", AT) == digests("long")[AT:]


def test_its_typed_settings_are_those_that_its_command_names():
    """Regression: those that it inherits were shown as set by hand."""
    out = fork(matrix_lr=0.01).out
    [line] = [line for line in out.splitlines() if line.startswith("set: ")]
    assert line == f"set: --model-tag=child --matrix-lr=0.01 --fork-from=parent@{AT}"
    assert training.events("started", "child")[0]["typed"] == [
        "model_tag",
        "matrix_lr",
        "fork_from",
    ]


def test_its_last_line_says_which_tokens_are_its_own():
    """Regression: it counted those of its ancestors, without saying so."""
    own = (STEPS - AT) * training.STEP
    line = fork().out.partition("completed: ")[2]
    assert line.startswith(f"{STEPS * training.STEP:,} tokens in ")
    assert f"those of its ancestors included ({own:,} tokens of its own)" in line


def test_its_first_bits_per_byte_are_its_own_and_name_their_step_in_every_place():
    """Regression: the last line began with those of its parent at step 0, and the sentence of page and
    report hid that its own first ones are from a later step than its first one."""
    line = fork(eval_every=3).out.partition("completed: ")[2]
    run = RunReader(training.run_dir("child"))
    (first, bpb), *_, (last, newest) = run.val_bpb.items()
    assert AT < first < last == STEPS
    assert f"validation bits per byte {bpb:.6f} at step {first} -> {newest:.6f};" in line
    sentence = f" from {show(bpb)} at step {first} to {show(newest)}."
    assert any(text.endswith(sentence) for text in sentences_about(run))


def test_it_begins_with_the_parents_checkpoint_and_cursors():
    fork()
    assert min(cursor_files(training.run_dir("child"))) == AT
    first = training.run_dir("child") / "checkpoints" / f"checkpoint-{AT}"
    assert load_checkpoint(first).seal["kept"], "its early steps are replayed from there"
    assert weights("child", f"checkpoint-{AT}") == weights("parent", f"checkpoint-{AT}")


def hide_parent_from_rank_1():
    """In a process: rank 1 is on a machine that does not have the parent's checkpoints."""
    load = Checkpoint.load

    def visible(self, name):
        if os.environ["RANK"] == "1" and "parent" in str(self.path):
            raise FileNotFoundError(str(self.path / name))
        return load(self, name)

    Checkpoint.load = visible


def test_a_fork_on_two_processes_from_a_parent_of_one_has_the_same_data_and_only_rank_0_reads():
    """Regression: all ranks read the parent's schedule for a note."""

    def finish(**named):
        group = training.start(2, hook=hide_parent_from_rank_1, **named)
        assert group.wait() == [0, 0], group.text()

    fork(run=finish)
    assert digests("child", AT) == digests("parent")[AT:]
    assert losses("child") == pytest.approx(losses("parent")[AT:], abs=2e-4)


def test_a_killed_fork_resumes_and_needs_its_parent_no_longer():
    def start(**named):
        training.start(hook=partial(die_after_step, AT + 1), **named).wait_for_death()

    fork(run=start)
    shutil.rmtree(training.run_dir("parent"))
    fork()
    kept = training.steps("child")
    assert sorted(kept) == list(range(AT, STEPS))
    fork(tag="again", parent="child", step=6)
    assert losses("again") == [kept[step]["loss"] for step in (6, 7)]


def test_deleting_a_fork_leaves_its_parent_whole():
    before = training.fingerprint(training.run_dir("parent"))
    fork()
    shutil.rmtree(training.run_dir("child"))
    assert training.fingerprint(training.run_dir("parent")) == before


def test_a_fork_of_a_fork_equals_the_first_run():
    fork()
    fork(tag="grandchild", parent="child", step=6)
    assert digests("grandchild", 6) == digests("parent")[6:]
    assert weights("grandchild") == weights("parent")
    assert read_config(training.run_dir("grandchild"))["fork"]["run"] == "child"


def test_a_fork_has_the_settings_of_the_launch_that_took_its_step():
    """The device batch size may change in a resume, and decides bits."""
    training.succeed(model_tag="moved", save_every=2, num_iterations=5, device_batch_size=2)
    training.succeed(model_tag="moved", save_every=2, num_iterations=STEPS, device_batch_size=1)
    fork(step=6, parent="moved")
    assert losses("child") == losses("moved")[6:]
    assert weights("child") == weights("moved")
    assert read_config(training.run_dir("child"))["fork"]["changes"] == {}


def test_a_fork_that_was_killed_before_it_had_a_checkpoint_begins_as_it_did(workplace):
    training.write_shard(workplace / "data" / "shard_9.parquet", training.texts(96, seed=9))
    changed = {"data_path": workplace / "data", "num_iterations": 20}
    with mock.patch.object(start_run, "adopt", mock.Mock(side_effect=OSError(5, "gone"))):
        fork(run=training.refuse, **changed)
    fork(**changed)
    fork(tag="other", **changed)
    assert digests("child", AT) == digests("other", AT)
    assert losses("child") == losses("other")
    first = load_checkpoint(training.run_dir("child") / "checkpoints" / f"checkpoint-{AT}")
    assert first.seal["next_digest"] is None, "files joined, so the next step is new"


def test_a_fork_of_an_extended_run_has_its_horizon():
    training.succeed(model_tag="parent", num_iterations=STEPS + 4)
    fork(step=10, tag="late")
    assert losses("late") == losses("parent")[10:]


def test_a_command_without_a_length_keeps_that_of_the_run():
    """Regression: a completed run of 40 steps was trained on to the default of 1,056."""
    for steps in (STEPS, STEPS + 2):
        outcome = training.succeed(model_tag="parent", num_iterations=steps)
        assert f"completed after {steps} steps" in outcome.out or steps > STEPS
        again = training.succeed(model_tag="parent", num_iterations=None)
        assert f"completed after {steps} steps" in again.out and "nothing to do" in again.out
    shutil.rmtree(training.run_dir("parent") / "checkpoints" / "final")
    assert f"/{STEPS + 2:05}" in training.succeed(model_tag="parent", num_iterations=None).out


def lengthen(tag, run):
    """Train a run on by four steps, and remove its last checkpoint."""
    run(num_iterations=STEPS + 4)
    shutil.rmtree(training.run_dir(tag) / "checkpoints" / "final")


def test_a_run_that_was_lengthened_resumes_with_its_own_config_json():
    """Regression: that has the first length, so the run seemed to have taken too many steps."""
    lengthen("parent", partial(training.succeed, model_tag="parent"))
    own = training.run_dir("parent") / "config.json"
    assert f"/{STEPS + 4:05}" in bare(config=own).out


def test_a_fork_keeps_the_length_that_a_later_launch_of_it_named():
    """Regression: a command without a length had the one with which the fork began."""
    fork()
    lengthen("child", fork)
    assert f"/{STEPS + 4:05}" in fork().out


def test_a_file_of_flags_names_a_length(workplace):
    file = workplace / "flags.yaml"
    file.write_text(f"num-iterations: {STEPS + 1}")
    flags = {"model_tag": "parent", "num_iterations": None, "config": file}
    assert f"/{STEPS + 1:05}" in training.succeed(**flags).out


def test_a_length_that_is_named_counts_even_if_it_is_the_default():
    """Regression: whether a command named a length was guessed from its value."""
    flags = {"model_tag": "parent", "num_iterations": None, "target_param_data_ratio": 12}
    outcome = command(validate.main, *training.flags(**flags))
    [steps] = re.findall(r"configuration: ([\d,]+) steps", outcome.out)
    assert int(steps.replace(",", "")) > 10 * STEPS


# ---- what a step computes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"matrix_lr": 0.05},
        {"weight_decay": 0.0},
        {"z_loss": 1e-3},
        {"max_grad_norm": 0.01},
        {"warmdown_steps": 2},
        {"num_iterations": STEPS + 2},
        {"leaves": 4},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_changed_step_reads_the_same_rows_and_acts_from_the_first_update_on(changed):
    fork(**changed)
    assert digests("child", AT)[:4] == digests("parent")[AT:]
    assert losses("child")[0] == losses("parent")[AT], "the loss before the first update"
    if "leaves" not in changed:
        assert weights("child") != weights("parent")
    [value] = changed.values()
    [(was, now)] = read_config(training.run_dir("child"))["fork"]["changes"].values()
    assert now == value and was != value


def test_another_attention_mode_reads_the_same_rows():
    fork(attention_mode="sdpa_mask")
    assert digests("child", AT) == digests("parent")[AT:]
    assert losses("child")[0] != losses("parent")[AT]


def test_a_decay_branch_ends_its_learning_rate_where_it_says():
    fork(num_iterations=AT + 3, warmdown_steps=3, final_lr_frac=0.0)
    rates = [step["lr"] for step in training.all_steps("child")]
    assert 1.0 == rates[0] > rates[1] > rates[2] > 0 and rates[2] < 0.4


# ---- rows ----------------------------------------------------------------------------------------


def lanes_of(tag, steps):
    """{lane: the pieces of documents in its rows of these steps, in order}."""
    lanes = {}
    for step in steps:
        for row in training.read_rows(tag, step):
            pieces = [[p["file"], p["document"], p["start"], p["stop"]] for p in row["documents"]]
            lanes.setdefault(row["lane"], []).append(pieces)
    return lanes


def test_a_fork_that_raises_the_rate_at_once_says_so():
    """Regression: a fork at the end of a warmdown went from x0.05 to x1 without a word."""
    training.succeed(model_tag="fell", warmup_steps=1, num_iterations=4, warmdown_steps=3)
    longer = {"num_iterations": 9, "warmdown_steps": 2}
    out = fork(parent="fell", step=4, **longer).out
    assert (
        "note: the learning rates rise at once, from x0.367 in the parent's last step to x1" in out
    )
    assert "--warmdown-steps" in out and "--init-from=fell@4" in out
    assert "rise at once" not in fork(tag="same").out


def test_a_larger_batch_reads_the_same_rows_sooner_and_scales_the_learning_rates():
    batch = read_config(training.run_dir("parent"))["total_batch_size"]
    fork(total_batch_size=2 * batch)
    steps = training.steps("child")
    last = max(steps)
    ours, theirs = lanes_of("child", [AT, AT + 1]), lanes_of("parent", range(AT, AT + 4))
    assert ours == theirs
    assert steps[AT]["tokens"] == (AT + 2) * batch, "it counts on"
    config = read_config(training.run_dir("child"))
    assert config["derived"]["batch_lr_scale"] == pytest.approx(
        2**0.5 * read_config(training.run_dir("parent"))["derived"]["batch_lr_scale"]
    )
    assert last == STEPS - 1, "--num-iterations counts steps"


def test_skipped_steps_are_those_after_the_fork():
    fork(skip_steps=2)
    assert digests("child", AT)[:2] == digests("parent")[AT + 2 :]


def test_documents_left_out_change_targets_only_and_not_the_rows(workplace):
    row = next(iter(training.read_rows("parent", AT + 2)))
    first = row["documents"][0]
    (workplace / "list").write_text(f"{first['file']}:{first['document']}\n")
    fork(without_documents=workplace / "list")
    steps = range(AT, STEPS)
    assert lanes_of("child", steps) == lanes_of("parent", steps)
    ours, theirs = digests("child", AT), digests("parent")[AT:]
    assert ours[2] != theirs[2]
    first = next(i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1])
    assert losses("child")[:first] == losses("parent")[AT : AT + first]


@pytest.mark.parametrize(
    "changed",
    [
        {"max_seq_len": 32},
        {"long_docs": "split"},
        {"packing": "concat"},
        {"buffer_size": 7},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_packing_continues_where_the_parent_stopped_reading_and_its_ledger_balances(
    changed,
):
    fork(**changed)
    run = RunReader(training.run_dir("child"))
    step, accounts, *_ = run.ledger()
    assert step == STEPS and not unbalanced(accounts)
    assert len(digests("child", AT)) == STEPS - AT
    theirs = RunReader(training.run_dir("parent")).nearest_cursors(AT)[1]
    ours = run.nearest_cursors(AT)[1]
    reached = [
        [[feed["epoch"], feed["place"]] for feed in cursor["buckets"].values()]
        for cursors in (ours, theirs)
        for cursor in cursors
    ]
    assert reached[: len(ours)] == reached[len(ours) :]


def test_a_fork_says_how_many_tokens_of_begun_documents_its_packing_drops():
    """Regression: the plan said that nothing is cropped, and only the ledger knew."""
    training.succeed(model_tag="long", long_docs="split", overlap=2)
    said = fork(parent="long", packing="concat").out
    cursors = RunReader(training.run_dir("child")).nearest_cursors(AT)[1]
    lost = sum(feed["cropped"] for cursor in cursors for feed in cursor["buckets"].values())
    assert lost > 0 and f"note: {lost:,} tokens are in no row of the fork" in said
    assert "in no row of the fork" not in fork("other", parent="long", overlap=3).out


def test_named_data_that_is_the_parents_is_no_change_in_words(workplace):
    """Regression: it was shown as "data_path A -> A"."""
    said = fork(data_path=workplace / "data", num_iterations=20).out
    assert (
        "data_path named again (files may have joined), num_iterations" in said
        and 'data_path "' not in said
    )


def test_a_circle_of_forks_ends():
    """Regression: the ledger of a fork of its own fork was sought for ever."""
    fork()
    fork("grandchild", parent="child")
    succeed = partial(training.succeed, resume="scratch", force=True)
    fork("child", step=6, parent="grandchild", run=succeed)
    reader = RunReader(training.run_dir("child"))
    assert reader.parent_dir == training.run_dir("grandchild")
    assert reader.ledger()[0] == STEPS and reader.ledger()[3]


# ---- files ---------------------------------------------------------------------------------------


def files_of(tag):
    """The training files of a run, in the order in which they are pinned."""
    [manifest] = RunReader(training.run_dir(tag)).manifests["train"].values()
    return [entry["name"] for entry in manifest["files"]]


def test_files_that_arrived_join_only_if_the_data_is_named(workplace):
    training.write_shard(workplace / "data" / "shard_0_new.parquet", training.texts(96, seed=9))
    fork(tag="null")
    assert digests("null", AT) == digests("parent")[AT:]
    fork(data_path=workplace / "data", num_iterations=40)
    assert files_of("child") == [*files_of("parent"), "shard_0_new.parquet"]
    files = {
        document["file"]
        for step in range(AT, 40)
        for row in training.read_rows("child", step)
        for document in row["documents"]
    }
    assert "shard_0_new.parquet" in files


def test_a_file_of_flags_names_the_data_of_a_fork(workplace):
    """Regression: its data path was ignored without a word."""
    training.write_shard(workplace / "data" / "shard_0_new.parquet", training.texts(96, seed=9))
    file = workplace / "flags.yaml"
    file.write_text(f"data-path: {workplace / 'data'}")
    fork(config=file)
    assert files_of("child") == [*files_of("parent"), "shard_0_new.parquet"]


def test_a_fork_from_another_folder_reads_where_its_parent_does(workplace, monkeypatch):
    """Regression: it looked for the parent's relative path in the present folder."""
    monkeypatch.chdir(workplace)
    training.succeed(model_tag="relative", data_path="data", num_iterations=2)
    (workplace / "elsewhere").mkdir()
    monkeypatch.chdir(workplace / "elsewhere")
    val = training.write_shard(workplace / "val/other.parquet", training.texts(9, seed=9))
    train = workplace / "data/shard_0.parquet"
    error = fork(step=1, parent="relative", run=training.refuse, val_path=train)
    assert f"{train}: missing or validation data, but relative trains on" in error
    assert "--val-path" in error
    fork(step=1, parent="relative", num_iterations=3, val_path=val)
    record = read_config(training.run_dir("child"))
    assert record["data_path"] == str(workplace / "data")
    assert record["fork"]["changes"].keys() == {"val_path", "num_iterations"}
    monkeypatch.chdir(workplace)
    training.succeed(model_tag="child", fork_from="relative@1", num_iterations=3, val_path=val)


def test_a_fork_keeps_the_list_of_token_files_that_its_parent_names(workplace):
    """Regression: it named their folder, and so all files in it."""
    shards = [
        str(path.with_suffix(""))
        for path in sorted((workplace / "shards/train/data").glob("*.bin"))
    ]
    named = {"data_format": "shards", "data_path": ",".join(shards[:2]), "val_path": shards[2]}
    training.succeed(model_tag="listed", num_iterations=2, **named)
    fork(step=1, parent="listed", num_iterations=3)
    record = read_config(training.run_dir("child"))
    assert record["data_path"] == named["data_path"]
    assert record["fork"]["changes"].keys() == {"num_iterations"}


def test_files_join_token_files_whose_manifests_are_new_and_validation_stays(workplace):
    """Regression: the parent "read another file" of each name, with the same bytes."""
    training.write_buckets(workplace, {"web": 96, "held": 96}, whole=0)
    plain = shutil.ignore_patterns(".records", "manifest.json")
    out, whole = workplace / "late", workplace / "whole/train"
    shutil.copytree(whole, out, ignore=plain)
    data = {"data_format": "shards", "data_path": out, "tokenizer": workplace / "tokenizer"}
    training.succeed(model_tag="early", num_iterations=2, val_path=out / "held", **data)
    for manifest in whole.glob("*/manifest.json"):
        shutil.copy(manifest, out / manifest.parent.name)
    shutil.copytree(workplace / "whole/val/web", out / "new")
    fork(step=1, parent="early", num_iterations=3, data_path=out)
    assert files_of("early") == ["web/0.bin", "web/1.bin"]
    assert files_of("child") == ["web/0.bin", "web/1.bin", "new/2.bin"]


@pytest.mark.parametrize("make_copy", [shutil.copy, Path.symlink_to])
def test_a_validation_file_may_be_a_copy_of_a_training_file(workplace, caplog, make_copy):
    """Regression: a fork whose data is named missed the training file, which was held out."""
    warn_once.cache_clear()
    first, *_ = sorted((workplace / "data").glob("*.parquet"))
    names = (workplace / "data" / "zz.parquet", first)
    make_copy(*(names if make_copy is Path.symlink_to else names[::-1]))
    training.succeed(model_tag="twice", num_iterations=2)
    assert f"zz.parquet has the contents of {first.name}, which is trained on" in caplog.text
    fork(
        "again", step=1, parent="twice", num_iterations=3, data_path=workplace / "data", z_loss=0.1
    )
    assert files_of("again") == files_of("twice")
    for number in range(3):
        training.write_shard(
            workplace / f"new/{number}.parquet", training.texts(96, seed=20 + number)
        )
    other = {"data_path": workplace / "new", "val_path": None}
    fork("anew", step=1, parent="twice", num_iterations=3, **other)
    assert files_of("anew") == ["0.parquet", "1.parquet", "2.parquet"]


def test_the_validation_file_in_a_grown_copy_of_the_data_is_not_said_to_be_trained_on(
    workplace, caplog
):
    """Regression: a fork was warned of copies that are taken out of its training files."""
    warn_once.cache_clear()
    shutil.copytree(workplace / "data", workplace / "grown")
    training.write_shard(workplace / "grown/zz.parquet", training.texts(96, seed=9))
    out = fork(data_path=workplace / "grown", num_iterations=40).out
    assert files_of("child") == [*files_of("parent"), "zz.parquet"]
    assert "which is trained on" not in caplog.text
    assert f"this fork trains on {(40 - AT) * training.STEP:,} tokens" in out


def test_validation_stays_the_same_when_files_join(workplace):
    training.write_shard(workplace / "data" / "shard_9.parquet", training.texts(96, seed=9))
    fork(data_path=workplace / "data")
    ours, theirs = (RunReader(training.run_dir(tag)).manifests for tag in ("child", "parent"))
    assert ours["val"] == theirs["val"]
    assert files_of("child") == [*files_of("parent"), "shard_9.parquet"]


def test_other_data_begins_anew_and_validation_may_change_with_it(workplace):
    for number in range(3):
        path = workplace / "other" / f"part_{number}.parquet"
        training.write_shard(path, training.texts(96, seed=20 + number))
    validation = workplace / "other" / "part_2.parquet"
    outcome = fork(data_path=workplace / "other", val_path=validation)
    left, new = [line for line in outcome.out.splitlines() if line.startswith("note: data: ")]
    assert "does not go on with" in left and "beginning" in new
    ours = RunReader(training.run_dir("child"))
    first = f"validation bits per byte {ours.val_bpb[AT]:.6f} -> "
    assert first in outcome.out, "of the same text as its last ones"
    feeds = [cursor["buckets"] for cursor in ours.nearest_cursors(AT)[1]]
    assert all(feed["documents"] == 0 for of_lane in feeds for feed in of_lane.values())
    assert losses("child") != losses("parent")[AT:]


def test_a_fork_that_reads_other_data_and_keeps_its_validation_is_resumed_and_read(workplace):
    """Regression: the validation files were looked for below the folder of the other data."""
    for number in range(2):
        path = workplace / "other" / f"part_{number}.parquet"
        training.write_shard(path, training.texts(96, seed=20 + number))
    fork(data_path=workplace / "other")
    shutil.rmtree(training.run_dir("child") / "checkpoints" / "final")
    assert "completed: " in fork(data_path=workplace / "other").out
    outcome = command(inspect_data.main, "rows", "child", f"--step={AT}")
    assert outcome.code == 0 and "part_" in outcome.out, outcome.err


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"depth": 3}, ("--depth", "--init-from=parent@4")),
        ({"seed": 7}, ("--seed", "--init-from=parent@4")),
        ({"lanes": 8}, ("--lanes", "--init-from=parent@4")),
        ({"step": 99}, ("parent@99", "trained 8 steps")),
        ({"step": STEPS}, ("after step 8", "--num-iterations")),
        ({"parent": "nobody"}, ("nobody",)),
        ({"data_path": "mistyped"}, ("mistyped: no such data folder",)),
        ({"init_from": "parent"}, ("--fork-from, --init-from",)),
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_fork_that_cannot_be_is_refused_without_a_trace(changed, words):
    message = fork(run=training.refuse, **changed)
    assert all(word in message for word in words), message
    assert not training.run_dir("child").exists()


def test_another_tokenizer_is_refused(workplace):
    """Its ids mean something else."""
    other = RustBPETokenizer.train_from_iterator(training.texts(50, seed=3), 300)
    other.save(workplace / "other-tokenizer")
    message = fork(run=training.refuse, tokenizer=workplace / "other-tokenizer")
    assert "tokenizer" in message and "--init-from=parent@4" in message


def test_a_fork_begins_with_the_tokenizer_of_its_parent_whatever_the_default_one_is(workplace):
    """Regression: on another machine, with another default tokenizer, the fork was refused."""
    shutil.rmtree(workplace / "tokenizer")
    other = RustBPETokenizer.train_from_iterator(training.texts(50, seed=3), 300)
    other.save(workplace / "tokenizer")
    fork()
    assert digests("child", AT) == digests("parent")[AT:]


def test_a_resume_whose_data_was_moved_with_its_tokenizer_names_the_data(workplace):
    """Regression: it blamed the default tokenizer, which it took instead."""
    shutil.rmtree(workplace / "tokenizer")
    other = RustBPETokenizer.train_from_iterator(training.texts(50, seed=3), 300)
    other.save(workplace / "tokenizer")
    (workplace / "data").rename(workplace / "moved")
    message = training.refuse(model_tag="parent", num_iterations=STEPS + 2)
    assert "does not exist" in message and "tokenizer" not in message


def test_without_a_name_a_fork_is_refused():
    assert "--model-tag=NAME" in fork(run=training.refuse, model_tag=None)


def test_validate_checks_a_fork_without_a_name():
    """Regression: it asked for a name although it starts nothing."""
    outcome = command(validate.main, f"--fork-from=parent@{AT}", "--matrix-lr=0.05")
    assert outcome.code == 0, outcome.err
    assert "name it with --model-tag" in outcome.out
    own = f"{STEPS - AT} steps of {training.STEP:,} tokens"
    said = [line.partition(own)[0] for line in outcome.out.splitlines() if own in line]
    assert said == ["ok: configuration: ", "plan: "], "regression: with those of its parent"
    assert "a new fork" in outcome.out and "resumes" not in outcome.out


def test_rows_are_skipped_only_in_forks():
    assert "--fork-from" in training.refuse(skip_steps=2)


def test_a_file_of_the_parent_that_has_changed_is_named(workplace):
    name = files_of("parent")[0]
    training.write_shard(workplace / "data" / name, training.texts(50, seed=8))
    assert name in fork(run=training.refuse, data_path=workplace / "data")


def test_a_parent_that_changed_before_the_fork_had_a_checkpoint_is_refused():
    with mock.patch.object(start_run, "adopt", mock.Mock(side_effect=OSError(5, "gone"))):
        fork(run=training.refuse)
    theirs = training.run_dir("parent") / "checkpoints"
    training.succeed(model_tag="other", matrix_lr=0.03)
    shutil.rmtree(theirs / f"checkpoint-{AT}")
    shutil.copytree(
        training.run_dir("other") / "checkpoints" / f"checkpoint-{AT}", theirs / f"checkpoint-{AT}"
    )
    assert "different checkpoint" in fork(run=training.refuse)
