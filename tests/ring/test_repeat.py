"""Several seeds of one configuration: the statistics against published tables, and the command on
tiny runs."""

import math
import shutil
import subprocess
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nanochat.common import read_json
from nanochat.run_dir import list_runs
from scripts import base_train, repeat
from tests import training
from tests.checkpoints import of_other_code

workplace = training.in_workplace(**training.SMALL, num_iterations=2, save_every=-1, eval_every=2)


@pytest.fixture
def warm_processes(monkeypatch):
    """Start the runs in processes that have already imported torch."""
    real_run = subprocess.run

    def run(command, **kwargs):
        if "scripts.base_train" not in command:
            return real_run(command, **kwargs)
        group = training.launch(
            base_train.main, [command[command.index("scripts.base_train") + 1 :]], [{}]
        )
        [code] = group.wait()
        print(group.text())
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)


def test_runs_that_would_never_be_evaluated_are_refused_before_they_train(monkeypatch):
    """Regression: all of them trained, and then the first had no result."""
    started = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: started.append(command))
    flags = ["--config=runs/laptop.yaml", "--eval-every=-1"]
    with pytest.raises(ValueError, match=r"--eval-every=-1: .*; omit it, or pass --eval-every=N"):
        repeat.main(["--seeds=2", "--name=never", "--", *flags])
    assert not started


def test_quantiles_are_those_of_the_tables():
    """Student's t and chi-squared, as printed in statistics textbooks."""
    for p, degrees, t in (
        (0.975, 1, 12.706),
        (0.975, 4, 2.776),
        (0.95, 9, 1.833),
        (0.975, 38, 2.024),
    ):
        assert repeat.student_t(p, degrees) == pytest.approx(t, abs=6e-4)
    low, high = repeat.deviation_interval(1.0, 5)  # chi-squared of 4 degrees: 11.143 and 0.4844
    assert (low, high) == pytest.approx((math.sqrt(4 / 11.143), math.sqrt(4 / 0.4844)), rel=1e-3)


def test_p_is_that_of_the_tables():
    for n, t, p in ((2, 12.706, 0.05), (5, 2.776, 0.05), (10, 1.833, 0.1), (5, 0.0, 1.0)):
        assert repeat.paired_p(t * 0.01, 0.01, n) == pytest.approx(p, rel=1e-3)
    assert (repeat.paired_p(0.0, 0.0, 3), repeat.paired_p(0.1, 0.0, 3)) == (1.0, 0.0)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.floats(-1, 1))
def test_p_is_below_the_level_exactly_if_the_interval_does_not_contain_0(noise, shift):
    """Regression: with two pairs, "exceeds seed noise" was beside p = 0.5."""
    effect = repeat.effect_of([value + shift for value in noise], [0.0] * len(noise))
    low, high = effect["interval"]
    assume(abs(effect["p"] - repeat.LEVEL) > 1e-6)
    assert (effect["p"] < repeat.LEVEL) == (not low <= 0 <= high)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1, 0.1001], "exceeds seed noise if differences are normally distributed; without"),
        ([0.1, 0.1001], "2 pairs cannot be significant (p is at least 0.5), but 6 can\n"),
        ([0.1, 0.1001] * 3, "the difference exceeds seed noise\n"),
        ([0.1, -0.1], "may be noise\n"),
    ],
)
def test_the_verdict_on_a_few_pairs_names_what_it_assumes(capsys, differences, verdict):
    repeat.print_effect({"name": "b", **repeat.effect_of(differences, [0.0] * len(differences))})
    assert verdict in capsys.readouterr().out


def test_the_smallest_difference_is_the_one_at_the_edge_of_significance():
    of_five = repeat.smallest_differences(0.01, 0.005, 5)["5"]
    assert of_five["unpaired"] == pytest.approx(2.306 * 0.01 * math.sqrt(2 / 5), rel=1e-3)
    assert of_five["paired"] == pytest.approx(2.776 * 0.005 / math.sqrt(5), rel=1e-3)


def command(capsys, *words, **changed):
    """(the record, output) of the command."""
    capsys.readouterr()
    runs = {**changed, "model_tag": None}
    assert repeat.main([*words, "--", *training.flags(**runs)]) == 0
    name = next(word.partition("=")[2] for word in words if word.startswith("--name="))
    return read_json(
        training.run_dir().parents[1] / "repeats" / f"{name}.json"
    ), capsys.readouterr().out


def test_seeds_of_weights_and_data_vary_separately_and_a_rerun_is_equal(warm_processes, capfd):
    weights, out = command(capfd, "--name=w", "--seeds=2", "--vary=weights", "--rerun")
    assert weights["rerun_difference"] == 0.0 and "a rerun of seed 1 differs by 0" in out
    assert (
        training.digests("w-seed1")
        == training.digests("w-seed2")
        == training.digests("w-rerun-seed1")
    )
    assert len(set(weights["bits_per_byte"])) == 2 and weights["stdev"] > 0
    command(capfd, "--name=d", "--seeds=2", "--vary=data")
    assert training.digests("d-seed1") != training.digests("d-seed2")
    assert training.losses("d-seed1") != training.losses("w-seed1")


# ---- the data of the runs ------------------------------------------------------------------------


def refused(*words, **changed):
    """The error of the command, which starts no run."""
    before = list_runs()
    with pytest.raises(ValueError, match="so their results cannot be compared") as error:
        repeat.main([*words, "--", *training.flags(**{**changed, "model_tag": None})])
    assert list_runs() == before
    return str(error.value)


@pytest.fixture
def fixed_val(workplace):
    """A path of validation files outside of the training data."""
    (workplace / "val").mkdir()
    return shutil.move(workplace / "data" / "shard_3.parquet", workplace / "val")


def add_file(workplace, name):
    training.write_shard(workplace / "data" / name, training.texts(96, seed=7))


@pytest.mark.parametrize("words", [["--seeds=2", "--rerun"], ["--seeds=3"]])
def test_a_seed_that_would_read_a_new_training_file_is_refused_before_it_begins(
    warm_processes, capfd, workplace, fixed_val, words
):
    """Regression: seeds on other data were pooled, and their spread was called seed noise."""
    command(capfd, "--name=p", "--seeds=2", val_path=fixed_val)
    add_file(workplace, "shard_1b.parquet")
    error = refused("--name=p", *words, val_path=fixed_val)
    assert (
        "the next run would read other training data than p-seed1 (only one of them has shard_1b"
        in error
    )
    assert "p-seed1/data_manifest.json" in error and "under another --name" in error


def test_a_variant_that_would_read_a_new_training_file_is_refused_before_it_begins(
    warm_processes, capfd, workplace, fixed_val
):
    """Regression: the difference was said to be that of the changed flag."""
    command(capfd, "--name=base", "--seeds=2", val_path=fixed_val)
    add_file(workplace, "shard_1b.parquet")
    error = refused("--name=v", "--against=base", val_path=fixed_val, matrix_lr=0.1)
    assert "other training data than base-seed1 (only one of them has shard_1b.parquet)" in error
    assert "and with --against the base, under another --name" in error


def test_finished_seeds_are_not_extended_nor_evaluated_on_another_amount(warm_processes, capfd):
    """Regression: two seeds of 2 steps went on to step 4, and a third one trained 4 steps; the rerun
    of seed 1 "must differ by 0" and did not. And two amounts of validation text "cannot be compared",
    and then were."""
    record, _ = command(capfd, "--name=b", "--seeds=2")
    longer = {"num_iterations": 4}
    fewer = {"eval_tokens": 2 * training.T}
    for words, changed in (
        (["--name=b", "--seeds=3", "--rerun"], longer),
        (["--name=b", "--seeds=2"], fewer),
        (["--name=v", "--against=b"], fewer),
    ):
        message = refused(*words, **changed)
        [name] = changed
        assert name.replace("_", "-") in message and "another --name" in message, message
        assert "b-seed1" in message
    assert list_runs() == ["b-seed1", "b-seed2"], "nothing was trained"
    again, _ = command(capfd, "--name=b", "--seeds=2")
    assert again == record
    # regression: the error named config.json, which has the length of the first launch
    seed1 = training.run_dir("b-seed1")
    with mock.patch.object(training, "flags", lambda **named: training.as_flags(named)):
        training.succeed(config=seed1 / "config.json", num_iterations=3)
    assert "b-seed1 was trained with 3, so" in refused("--name=b", "--seeds=2")


def test_another_curriculum_is_named_by_its_mixes():
    """Regression: its dict, as Python prints it."""
    names = ["curriculum"]
    theirs, ours = (
        {"curriculum": {"phases": [{"duration_tokens": 9, "mix": {"web": n, "code": 1}}]}}
        for n in (1, 3)
    )
    run = SimpleNamespace(name="b-seed1", config=theirs, last_config=theirs)
    settings = SimpleNamespace(to_json=lambda: ours)
    with pytest.raises(
        ValueError, match=r"--curriculum: b-seed1 was trained with 1 web \+ 1 code, so"
    ):
        repeat.check_settings(run, settings, names, "all seeds")  # type: ignore[arg-type]


def test_a_variant_is_compared_with_what_is_left_of_its_base(
    warm_processes, capfd, workplace, fixed_val
):
    """Regression: without the base's first run, nothing was compared, nor the new seeds with each
    other."""
    command(capfd, "--name=base", "--seeds=2", val_path=fixed_val)
    shutil.rmtree(training.run_dir("base-seed1"))
    command(capfd, "--name=v", "--against=base", val_path=fixed_val, matrix_lr=0.1)
    shutil.rmtree(training.run_dir("v-seed2"))
    add_file(workplace, "shard_1b.parquet")
    changed = {"val_path": fixed_val, "matrix_lr": 0.1}
    assert "than base-seed2" in refused("--name=v", "--against=base", **changed)
    shutil.rmtree(training.run_dir("base-seed2"))
    assert "than v-seed1" in refused("--name=v", "--against=base", **changed)
    assert "warning: no run of base is here any more" in capfd.readouterr().out


def test_a_variant_may_name_other_training_data_but_no_other_validation_text(
    warm_processes, capfd, workplace
):
    command(capfd, "--name=base", "--seeds=2")
    more = shutil.copytree(workplace / "data", workplace / "more")
    training.write_shard(more / "shard_9.parquet", training.texts(96, seed=7))
    error = refused("--name=v", "--against=base", data_path=more)
    assert "other validation data than base-seed1" in error
    val = workplace / "data" / "shard_3.parquet"
    _, out = command(capfd, "--name=v", "--against=base", data_path=more, val_path=val)
    note = "note: the training data is not that of base (--data-path, --val-path)"
    assert 0 < out.index(note) < out.index("mean difference")


def test_a_fork_is_refused_before_anything_is_trained(workplace):
    """Regression: "name it with --model-tag", which is refused, too."""
    training.succeed(num_iterations=2, save_every=1, model_tag="a")
    (workplace / "fork.yaml").write_text("fork-from: a@1\n")
    for flag in ("--fork-from=a@1", f"--config={workplace / 'fork.yaml'}"):
        with pytest.raises(ValueError, match=r"--fork-from=a@1: .*--init-from"):
            repeat.main(["--seeds=2", "--", flag])


def test_what_follows_from_another_model_is_named(capsys):
    """Regression: a wider model had another weight decay, without a word."""

    def run(derived):
        fields = {"manifests": {}, "model_code": {}, "name": "r"}
        return SimpleNamespace(**fields, last_config={"derived": derived}, config={})

    base = run({"params_total": 100, "num_iterations": 1, "weight_decay_scaled": 0.5})
    wider = run({"params_total": 120, "num_iterations": 2, "weight_decay_scaled": 0.75})
    repeat.print_differences(base, wider, "base")
    note = (
        "note: worked out otherwise than for base: params_total 100 -> 120, weight_decay_scaled 0.5"
    )
    out = capsys.readouterr().out
    assert note in out and "num_iterations" not in out, "a flag may have named it"
    nearly = run({"params_total": 100, "weight_decay_scaled": 0.5 + 1e-12})
    repeat.print_differences(base, nearly, "base")
    assert "worked out" not in capsys.readouterr().out, "regression: 1.449 -> 1.449"


def test_a_variant_that_validates_with_other_documents_of_the_same_files_is_refused(
    warm_processes, capfd
):
    command(capfd, "--name=base", "--seeds=2")
    error = refused("--name=v", "--against=base", min_chars=50)
    assert "other validation data than base-seed1 (shard_3.parquet differs; " in error
    assert "the flags name other data: --min-chars)" in error
    assert "and with --against the base, under another --name" in error


def test_seeds_that_read_other_data_are_not_pooled(warm_processes, capfd):
    """Regression: they were, if they had been trained before."""
    command(capfd, "--name=p", "--seeds=3")
    manifest = training.run_dir("p-seed2") / "data_manifest.json"
    manifest.write_text(manifest.read_text().replace('"footer": "', '"footer": "0', 1))
    error = refused("--name=p", "--seeds=3")
    assert "p-seed2 has read other training data than p-seed1 (shard_0.parquet differs)" in error
    assert "p-seed2 has read" in refused("--name=v", "--against=p")


# ---- the code of the model -----------------------------------------------------------------------


def test_seeds_that_other_model_code_trained_are_not_pooled(warm_processes, capfd):
    """Regression: two old seeds and a new one had one mean, and old results were given as those of
    the new code."""
    command(capfd, "--name=p", "--seeds=2")
    of_other_code(training.run_dir("p-seed1"))
    for seeds in (2, 3):
        error = refused("--name=p", f"--seeds={seeds}")
        assert "nanochat/gpt.py" in error and "p-seed1" in error
        assert "under another --name" in error
    _, out = command(capfd, "--name=v", "--against=p")
    assert 0 < out.index("other model code than p's: nanochat/gpt.py") < out.index("mean differ")


def test_finished_seeds_are_shown_again_whatever_code_is_on_disk_now(warm_processes, capfd):
    """Regression: with edited code, the table of finished seeds could not be printed again."""
    base, _ = command(capfd, "--name=p", "--seeds=2")
    change, _ = command(capfd, "--name=v", "--against=p", matrix_lr=0.1)
    for run in list_runs():
        of_other_code(training.run_dir(run))
    assert command(capfd, "--name=p", "--seeds=2")[0] == base
    assert command(capfd, "--name=v", "--against=p", matrix_lr=0.1)[0] == change
    for words in (["--seeds=3"], ["--seeds=2", "--rerun"]):
        assert "nanochat/gpt.py: this is other" in refused("--name=p", *words)


@pytest.mark.parametrize(
    ("edited_after", "who", "trained"), [(1, "this is", 1), (2, "p-seed2 has", 2)]
)
def test_code_that_is_edited_while_seeds_train_ends_the_command(
    warm_processes, monkeypatch, edited_after, who, trained
):
    """Regression: the next seed was trained to its end before."""
    launch = subprocess.run

    def edit_after_one(command, **kwargs):
        ended = launch(command, **kwargs)
        if f"--model-tag=p-seed{edited_after}" in command:
            of_other_code(training.run_dir("p-seed1"))
        return ended

    monkeypatch.setattr(subprocess, "run", edit_after_one)
    with pytest.raises(ValueError, match=rf"gpt\.py: {who} other model code than p-seed1"):
        repeat.main(["--name=p", "--seeds=2", "--", *training.flags(model_tag=None)])
    assert len(list_runs()) == trained


def test_after_a_run_that_failed_no_other_one_begins(monkeypatch):
    """Regression: the next seed was trained to its end before the error was printed."""
    commands = []

    def fail(command, **kwargs):
        commands.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ValueError, match="f-seed1: the run ended with exit code 1"):
        repeat.main(["--name=f", "--seeds=3", "--", *training.flags(model_tag=None)])
    assert len(commands) == 1


def test_flags_of_a_run_without_their_separator_are_explained(capfd):
    with pytest.raises(SystemExit):
        repeat.parse_args(["--seeds=3", "--depth=1"])
    assert "they follow --, as in --seeds=3 -- --depth=4" in capfd.readouterr().err


def test_a_change_is_paired_with_the_seeds_of_its_base_and_finished_runs_are_reused(capfd, request):
    base, _ = command(capfd, "--name=base", "--seeds=2", "--jobs=2")  # the real processes
    repeats = training.run_dir().parents[1] / "repeats"
    assert all("completed" in (repeats / f"base-seed{seed}.log").read_text() for seed in (1, 2))
    request.getfixturevalue("warm_processes")
    same, out = command(capfd, "--name=base", "--seeds=2")
    assert f"{base['bits_per_byte'][0]:.6f}" in out, "three digits would not show the noise"
    assert (
        same == base and "completed" in out and len(training.events("started", "base-seed1")) == 1
    )
    change, out = command(capfd, "--name=lr", "--against=base", matrix_lr=0.1)
    differences = [
        a - b for a, b in zip(change["bits_per_byte"], base["bits_per_byte"], strict=True)
    ]
    assert change["against"]["differences"] == differences
    assert ("this difference may be noise" in out) == (change["against"]["p"] > repeat.LEVEL)
    assert "mean difference from base" in out and "warning: different" not in out
