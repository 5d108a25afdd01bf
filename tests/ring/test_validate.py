"""validate reports before the first step whether a run can reach its last one, and writes nothing;
base_train uses the same plan."""

import json
import re
import shutil
import sys

import pytest

from nanochat import plan as plan_module
from nanochat.common import read_json
from nanochat.plan import Plan, Sample
from nanochat.run_dir import PLAN_NAME, iter_log
from nanochat.sources import open_source, scan_files
from nanochat.tokenizer import get_tokenizer
from scripts import tok_shards, validate
from tests import training
from tests.finished import command
from tests.training import fingerprint, flags, run_dir

T, STEP = 16, 16 * 32
SMALL = {
    "max_seq_len": T,
    "total_batch_size": STEP,
    "lanes": 4,
    "device_batch_size": 8,
    "depth": 1,
    "num_iterations": None,
    "buffer_size": 8,
    "long_docs": "split",
    "overlap": 8,
    "data_format": "shards",
    "warmup_steps": 0,
    "save_every": -1,
}


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    """text/BUCKET with two files for training and one for validation, and shards made from them."""
    folder = tmp_path_factory.mktemp("made")
    with training.workplace(folder):
        training.write_buckets(folder, {"big": 60, "tiny": 4}, shards=0)
    return folder


@pytest.fixture(autouse=True)
def workplace(tmp_path, data_folder):
    with training.workplace(tmp_path) as path:
        for name in ("text", "shards"):
            (path / name).symlink_to(data_folder / name)
        yield path


def mix(base, steps, tiny, **more):
    path = base / "mix.yaml"
    path.write_text(
        "curriculum:\n"
        + "".join(
            f"- duration_tokens: {steps * STEP}\n  mix: {{big: 1, tiny: {weight}}}\n"
            for weight in (0, tiny)
        )
        + "".join(f"{k}: {v}\n" for k, v in more.items())
    )
    return path


def given(base, **changed):
    return {**SMALL, "data_path": base / "shards", "curriculum": base / "mix.yaml", **changed}


def checked(*more, **changed):
    """(exit code, output, errors) of validate, which writes nothing."""
    base = run_dir().parents[1]
    before = fingerprint(base / "runs")
    outcome = command(validate.main, *flags(**given(base, **changed)), *more)
    assert fingerprint(base / "runs") == before
    return outcome.code, outcome.out, outcome.err


def test_the_plan_of_a_run_that_can_reach_its_end(workplace):
    mix(workplace, 5, 0.01)
    code, out, _ = checked()
    assert code == 0 and "a new run" in out and "error" not in out
    assert "memory per GPU" not in out, "it runs on a CPU"
    assert (
        "default name" not in out
        and "runs/d1 (the default name): a new run" in checked(model_tag=None)[1]
    )
    assert "plan: 10 steps of 512 tokens from 4 lanes" in out
    table = [line.split() for line in out.splitlines() if line.startswith("  ")]
    assert table[0][:1] == ["phase"] and table[1][:4] == ["1", "0", "2,560", "100.0%"]
    assert [row[0] for row in table[3:]] == ["bucket", "big", "tiny"] and table[4][-1] == "-"


def test_the_step_at_which_a_bucket_runs_dry_is_the_one_at_which_training_halts(workplace):
    mix(workplace, 20, 1)
    code, out, _ = checked()
    error = out.split("error: ")[1]
    assert code == 1 and "runs dry at step" in out and "--allow-bucket-exhaustion" in error
    message = training.refuse(**given(workplace))
    assert error.strip() in message and not run_dir().exists(), (
        "a refused run leaves nothing behind"
    )
    assert training.run(**given(workplace, plan="warn")).code == 3
    (halted,) = (
        r for r in iter_log(run_dir() / "logs" / "train.jsonl") if r.get("event") == "halted"
    )
    assert f"the run halts before step {halted['step']} of 40: lane" in error
    assert (
        halted["reason"].split(" has")[0]
        == f"step {halted['step']}: " + error.split(": ")[1].split(" has")[0]
    )
    code, out, _ = checked(plan="warn")
    assert code == 1 and "resumes from" in out and "note: " in out and "halted (" in out
    code, out, _ = checked(allow_bucket_exhaustion=True)
    assert code == 0 and "warning: bucket 'tiny' runs dry" in out
    assert "completed" in training.succeed(**given(workplace, allow_bucket_exhaustion=True)).out


def test_the_plan_is_kept_and_read_at_a_restart(workplace, monkeypatch):
    mix(workplace, 5, 0.01)
    training.succeed(**given(workplace, save_every=3))
    stored = read_json(run_dir() / PLAN_NAME)
    kept = Plan.from_json(stored)
    assert (
        kept.steps == 10
        and kept.buckets["tiny"].exact
        and json.loads(json.dumps(kept.to_json())) == stored
    )
    shutil.rmtree(run_dir() / "checkpoints" / "final")
    monkeypatch.setattr(plan_module, "make_plan", None)
    outcome = training.succeed(**given(workplace, save_every=3))
    assert "resuming" in outcome.out and "plan: 10 steps" in outcome.out
    monkeypatch.undo()
    (run_dir() / PLAN_NAME).write_text("{truncated")
    training.forget_saves()
    training.succeed(**given(workplace))
    assert Plan.from_json(read_json(run_dir() / PLAN_NAME)).steps == 10


@pytest.fixture
def much_text(monkeypatch):
    """All text is too much to be tokenized for a plan."""
    monkeypatch.setattr(plan_module, "WHOLE_TEXT_TOKENS", 0)


def test_little_text_is_planned_as_exactly_as_the_token_files_made_from_it(workplace):
    """Regression: a few hundred documents stood for all, and a bucket was 21 % too large."""
    mix(workplace, 40, 4)
    plans = []
    for data_format in ("text", "shards"):
        _, out, _ = checked(data_path=workplace / data_format, data_format=data_format)
        plans.append(out[out.index("plan: ") :].replace(str(workplace / data_format), "DATA"))
    assert "exact" in plans[0] and plans[0] == plans[1]


def test_much_text_is_estimated_as_the_token_files_made_from_it(workplace, much_text, monkeypatch):
    """Regression: of token files that are sized by their text, 4 bytes counted as a token."""
    monkeypatch.setattr(plan_module, "WHOLE_TOKENS", 0)
    monkeypatch.setattr(plan_module, "SAMPLE_DOCUMENTS", 8)
    samples = []
    for folder, suffix in (("text/big", "parquet"), ("shards/train/big", "bin")):
        files = [workplace / folder / f"{number}.{suffix}" for number in range(2)]
        source = open_source(scan_files(workplace / folder, files), get_tokenizer())
        samples.append(Sample(source))
    text, shards = (sample.total(sample.lengths) for sample in samples)
    assert not samples[1].is_whole and shards == text


def test_the_verdict_on_an_estimate_that_halts_names_the_step_and_the_ways_out(
    workplace, much_text
):
    """Regressions: "ok: training can start" and exit code 0 for a run that would halt; and an error
    that named no way out."""
    mix(workplace, 40, 4)
    code, out, _ = checked(data_path=workplace / "text", data_format="text")
    assert "estimated from a sample" in out and "warning: bucket 'tiny' probably runs dry" in out
    assert code == 1 and "ok: training can start" not in out
    verdict = out.splitlines()[-1]
    assert verdict.startswith(
        "error: training can start, but by this estimate, the run halts before step "
    )
    assert "max_epochs in the curriculum" in verdict and "--allow-bucket-exhaustion" in verdict


def test_text_that_suffices_by_an_estimate_is_no_error(workplace, much_text):
    code, out, _ = checked(
        data_path=workplace / "text", data_format="text", curriculum=None, num_iterations=3
    )
    assert code == 0 and "estimated from a sample" in out and "warning" not in out


@pytest.mark.parametrize("data_format", ["text", "shards"])
def test_without_a_curriculum_training_keeps_no_plan_but_prints_the_same_figures(
    workplace, data_format
):
    plain = {
        "curriculum": None,
        "data_path": workplace / data_format,
        "data_format": data_format,
        "long_docs": "crop",
        "num_iterations": 40,
        "plan": "warn",
    }
    words = (
        r"(the run reads its data) (?:about )?\d+\.\d times|(of the tokens of its data are cropped)"
    )
    out = checked(**plain)[1]
    validated, tokens = re.findall(words, out), out.split("figures")[1].split()[5]
    outcome = training.succeed(**given(workplace, **plain))
    assert f"data: {tokens} tokens; " in outcome.out
    assert (
        re.findall(words, outcome.err) == validated
        and len(validated) == 2
        and not (run_dir() / PLAN_NAME).exists()
    )
    assert "reads its data" not in training.succeed(**given(workplace, **plain)).err, (
        "only when it starts"
    )
    few = {**plain, "num_iterations": 1, "long_docs": "split", "model_tag": "few"}
    assert "its data" not in training.succeed(**given(workplace, **few)).err


def test_documents_of_half_a_row_are_cropped_and_training_measures_as_much_as_validate(workplace):
    """Regression: training counted only what is longer than a row, so it announced too few passes,
    and no cropping of documents that are cut to fill rows."""
    for number in range(3):
        some = [text[:30] for text in training.texts(400, seed=number)]
        training.write_shard(workplace / f"short/{number}.parquet", some)
    plain = {"curriculum": None, "data_path": workplace / "short", "data_format": "text"}
    plain |= {"long_docs": "crop", "num_iterations": 60}
    out = checked(**plain)[1]
    header, figures = [line.split() for line in out.split("plan: ")[1].splitlines()[1:3]]
    passes = float(figures[header.index("passes")])
    cropped = float(figures[header.index("cropped")])
    assert cropped > 15
    outcome = training.succeed(**given(workplace, **plain))
    [said] = re.findall(r"this run reads them ([\d.]+) times", outcome.out)
    assert float(said) == pytest.approx(passes, rel=0.05)
    assert f"{cropped:.0f}% of the tokens of its data are cropped" in outcome.err


@pytest.mark.parametrize("has_curriculum", [False, True])
@pytest.mark.parametrize(
    ("books", "lanes", "repeating", "suffices"), [(1, 8, 7, 1), (3, 8, 5, 2), (10, 16, 6, 8)]
)
def test_fewer_documents_than_lanes_are_warned_of_although_no_bucket_can_run_dry(
    workplace, has_curriculum, books, lanes, repeating, suffices
):
    """Regression: a run read a book eight times at once, "0.93 times", without a warning."""
    for bucket in ("books", "other"):
        folder = workplace / "few" / bucket
        folder.mkdir(parents=True)
        for number in range(books if bucket == "books" else 40):
            (folder / f"{number:02d}.txt").write_text("It was the best of times. " * 400)
    few = {"data_path": workplace / "few", "data_format": "text", "val_fraction": 0.05}
    few |= {"lanes": lanes, "num_iterations": 2, "curriculum": None}
    if has_curriculum:
        few["curriculum"] = workplace / "mix.yaml"
        few["curriculum"].write_text(
            f"curriculum: [{{duration_tokens: {2 * STEP}, mix: {{books: 1, other: 1}}}}]\n"
            "max_epochs: {books: 0}\n"
        )
    else:
        few["data_path"] /= "books"
    data = "bucket 'books'" if has_curriculum else "its data"
    sentence = f"{data} has {books} document"
    [warned] = [line for line in checked(**few)[1].splitlines() if sentence in line]
    assert f"{repeating} of them read again" in warned and "--lanes" in warned
    outcome = training.succeed(**given(workplace, **few))
    assert warned.removeprefix("warning: ") in outcome.err
    few |= {"lanes": suffices, "model_tag": "enough"}
    assert sentence not in training.succeed(**given(workplace, **few)).err


def test_windows_of_which_rows_hold_only_the_repeated_part_are_refused(workplace):
    """Regression: a run completed with hardly a target that has a loss."""
    made = ["--input-dir", workplace / "text/big", "--output-dir", workplace / "windows"]
    windows = ["--max-length=80", "--overlap-size=40"]
    assert command(tok_shards.main, *made, *windows).code == 0
    cropped = {"curriculum": None, "data_path": workplace / "windows", "long_docs": "crop"}
    cropped |= {"num_iterations": 80}
    sentence = "what a stored window repeats of the one before has no loss"
    code, out, _ = checked(**cropped)
    assert code == 1 and sentence in out
    assert sentence in training.refuse(**given(workplace, **cropped))
    assert checked(**cropped | {"long_docs": "split"})[0] == 0


def test_windows_longer_than_rows_are_not_refused_for_what_no_row_holds(workplace):
    """Regression: with a curriculum, all that windows repeat counted, although a row holds a part of
    it only, so "no row would train on 100% of the tokens"; without one, the run was not refused."""
    made = ["--input-dir", workplace / "text/big", "--output-dir", workplace / "windows"]
    windows = ["--max-length=200", "--overlap-size=100"]
    assert command(tok_shards.main, *made, *windows).code == 0
    rows = {"max_seq_len": 64, "total_batch_size": 64 * 32, "num_iterations": 40}
    cropped = {**rows, "data_path": workplace / "windows", "long_docs": "crop"}
    curriculum = workplace / "windows.yaml"
    phase = f"{{duration_tokens: {40 * 64 * 32}, mix: {{data: 1}}}}"
    curriculum.write_text(f"curriculum: [{phase}]\nmax_epochs: {{data: 0}}\n")
    for given_mix in (None, curriculum):
        code, out, err = checked(**cropped, curriculum=given_mix)
        assert code == 0 and "reads" in out + err, "several passes"


def test_what_the_settings_do_not_do_is_noted_before_and_at_the_start(workplace):
    """Regressions: settings without effect, and a warmup that the run never ends, were accepted
    without a word."""
    plain = {"curriculum": None, "num_iterations": 2, "warmup_steps": 40, "packing": "concat"}
    for out in (checked(**plain)[1], training.succeed(**given(workplace, **plain)).out):
        notes = [line for line in out.splitlines() if line.startswith("note: ")]
        [idle] = [note for note in notes if "without effect: " in note]
        assert "--long-docs (with --packing=concat), --overlap (" in idle
        [low] = [note for note in notes if "--warmup-steps=40" in note]
        assert "x0.0" in low
    quiet = checked(**plain | {"warmup_steps": 0, "packing": "bestfit"})[1]
    assert "without effect" not in quiet and "learning rates rise" not in quiet


def test_a_walltime_that_leaves_no_time_to_train_is_refused_as_in_training(workplace):
    """Regression: training could start, and was refused."""
    code, out, error = checked(curriculum=None, num_iterations=2, max_runtime_seconds=100)
    assert code == 1 and "--max-runtime-seconds" in error and "--walltime-reserve-seconds" in error
    assert "training can start" not in out


def test_a_disk_that_is_too_small_is_an_error(workplace, monkeypatch):
    mix(workplace, 5, 0.01)
    usage = shutil.disk_usage(workplace)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    code, _, err = checked()
    assert code == 1 and "disk" in err and "NANOCHAT_BASE_DIR" in err


def test_a_disk_that_will_be_full_is_no_ok(workplace, monkeypatch):
    """Regression: 34 MB were "0.0 GB free", and below the warning was "ok: training can start"."""
    mix(workplace, 5, 0.01)
    usage = shutil.disk_usage(workplace)
    more = {"num_iterations": 10, "save_every": 1, "keep_last_k": 100}
    _, out, _ = checked(**more)
    assert "\nok: training can start" in out
    [size] = re.findall(r"a checkpoint takes about ([0-9.]+) MB", out)
    free = int(float(size) * 1e6 * 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    code, out, _ = checked(**more)
    assert code == 0 and f"warning: disk: {free / 1e6:,.1f} MB free" in out
    assert "warning: training can start, but the disk" in out and "ok: training" not in out


def test_a_run_on_a_disk_that_will_be_full_begins_with_a_warning(workplace, monkeypatch):
    """Regression: only `validate` said it. Saves that are there need no more room."""
    mix(workplace, 5, 0.01, allow_budget_mismatch="true")
    settings = given(workplace, num_iterations=4, save_every=1)
    assert "warning: the disk" not in training.succeed(**settings, model_tag="roomy").out
    [size] = re.findall(r"a checkpoint takes about ([0-9.]+) MB", checked(**settings)[1])
    usage = shutil.disk_usage(workplace)
    free = int(float(size) * 1e6 * 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    warning = f"warning: the disk will be full before the run ends: {free / 1e6:,.1f} MB free"
    assert warning in training.succeed(**settings, model_tag="tight").out
    longer = given(workplace, num_iterations=5, save_every=1, model_tag="tight")
    assert "warning: the disk" not in training.succeed(**longer).out
    again = longer | {"resume": "scratch", "force": True}
    assert "ok: training can start" not in checked(**again)[1], "the old run keeps its room"


def test_a_fork_that_starts_over_begins_without_a_warning_if_its_checkpoints_fit(
    workplace, monkeypatch
):
    """Regression: the checkpoint that it begins with, which is there by then, was counted twice."""
    mix(workplace, 5, 0.01, allow_budget_mismatch="true")
    training.succeed(**given(workplace, num_iterations=6, save_every=4, model_tag="old"))
    fork = {"fork_from": "old@4", "model_tag": "new", "num_iterations": 7, "save_every": 1}
    training.succeed(**given(workplace, **fork))
    again = given(workplace, **fork, resume="scratch", force=True)
    [parameters] = re.findall(r" ([0-9,]+) parameters", checked(**again)[1])
    size = 12 * int(parameters.replace(",", ""))
    usage = shutil.disk_usage(workplace)
    for checkpoints, is_warned in ((4.5, False), (3.5, True)):  # it keeps 4
        tight = usage._replace(free=int(size * checkpoints))
        monkeypatch.setattr(shutil, "disk_usage", lambda path, tight=tight: tight)
        assert ("warning: the disk" in training.succeed(**again).out) == is_warned


@pytest.mark.parametrize(
    ("changed", "number"),
    [
        ({"save_every": 4}, 3),
        ({"save_every": 4, "save_at": "0,3,4,99"}, 5),
        ({"save_at": "0"}, 4),
        ({"save_every": 3, "save_at": "log,2*"}, 9),
        ({"save_every": 1, "save_at": "4*", "keep_last_k": 3}, 6),
    ],
)
def test_the_disk_must_hold_all_checkpoints_that_the_run_keeps(workplace, changed, number):
    mix(workplace, 5, 0.01)
    _, out, _ = checked(**{"num_iterations": 10, "save_every": -1, **changed})
    assert f"the run keeps {number}\n" in out


def test_a_fork_keeps_checkpoints_from_its_first_step_on(workplace):
    """Regression: those of its parent's steps were counted, too."""
    mix(workplace, 5, 0.01, allow_budget_mismatch="true")
    training.succeed(**given(workplace, num_iterations=6, save_every=4, model_tag="old"))
    fork = {"fork_from": "old@4", "model_tag": "new", "num_iterations": 7, "save_every": 1}
    _, out, _ = checked(**fork)
    training.succeed(**given(workplace, **fork))
    names = sorted(path.name for path in (run_dir("new") / "checkpoints").iterdir())
    assert names == ["checkpoint-4", "checkpoint-5", "checkpoint-6", "final"]
    assert f"the run keeps {len(names)}\n" in out


def test_a_run_with_other_settings_is_refused_as_in_training(workplace):
    mix(workplace, 5, 0.01)
    training.succeed(**given(workplace))
    code, out, _ = checked(seed=7)
    assert (
        code == 1 and "config.json: the run was" in out and "--model-tag" in out and "--seed" in out
    )
    assert "plan: 10 steps" in out and "run directory" not in out, (
        "the plan of a new run is shown anyway"
    )


def test_a_run_that_another_launch_owns_is_shown_as_it_would_resume(workplace):
    mix(workplace, 5, 0.01)
    training.succeed(**given(workplace))
    owner = training.owner_of(run_dir())
    code, out, _ = checked()
    owner.release()
    assert code == 1 and "another launch owns this run" in out
    assert f"without that launch: resumes from {training.final()}" in out
    assert "a new run with these settings" not in out


def test_the_plot_is_a_picture_or_an_error_that_names_the_extra(workplace, monkeypatch):
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install -e '.[plot]'")
    mix(workplace, 20, 1)
    code, out, _ = checked("--plot", workplace / "plots" / "plan.png", allow_bucket_exhaustion=True)
    assert code == 0 and "ok: plot" in out
    assert (workplace / "plots" / "plan.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = checked("--plot", workplace / "plan.png", allow_bucket_exhaustion=True)
    assert code == 1 and "pip install -e '.[plot]'" in err and not (workplace / "plan.png").exists()


def test_with_plan_off_no_plan_is_made(workplace):
    """Regression: it was made, printed and counted."""
    mix(workplace, 20, 1)
    assert checked()[0] == 1, "the case"
    code, out, _ = checked(plan="off")
    assert code == 0 and "ok: no plan (--plan=off)\nok: training can start" in out
    code, _, err = checked("--plot", workplace / "plan.png", plan="off")
    assert code == 1 and "there is no plan with --plan=off" in err


BOOKS = {"curriculum": None, "data_format": "text", "long_docs": "crop", "num_iterations": 40}


@pytest.fixture
def books(workplace):
    """A folder with documents of a hundred rows."""
    training.write_shard(
        workplace / "books" / "0.parquet", [" ".join(training.texts(8, seed=s)) for s in range(6)]
    )
    training.write_shard(workplace / "books" / "1.parquet", training.texts(8, seed=9))
    return workplace / "books"


def test_books_that_would_train_on_their_title_pages_are_refused_with_the_flag_that_cures_it(books):
    """Regression: 98 % of the tokens cropped, 636 passes, and "ok: training can start"."""
    settings = given(books, **BOOKS, data_path=books)
    sentence = r"--long-docs=crop: no row would train on 9\d% of the tokens of its data.* use --long-docs=split, or"
    code, out, _ = checked(**settings)
    assert (
        code == 1 and re.search("error: " + sentence, out) and "ok: training can start" not in out
    )
    assert re.search(sentence, training.refuse(**settings)) and not run_dir().exists()
    assert "cropped" not in checked(**settings | {"long_docs": "split"})[1].split("figures")[1]


def test_a_run_of_less_than_a_pass_is_warned_and_starts(books):
    """Regression: a step, to see whether a job works, was refused."""
    texts = [" ".join(training.texts(8, seed=s)) for s in range(40)]
    training.write_shard(books / "0.parquet", texts)
    code, out, _ = checked(**given(books, **BOOKS, data_path=books) | {"num_iterations": 1})
    assert code == 0 and "% of the tokens of its data are cropped" in out
    assert "ok: training can start" in out


def test_with_plan_warn_books_are_cropped_and_the_run_resumes(books):
    settings = given(books, **BOOKS, data_path=books) | {"plan": "warn", "num_iterations": 2}
    assert checked(**settings)[0] == 0
    training.succeed(**settings)
    assert "completed" in training.succeed(**settings | {"plan": "error", "num_iterations": 3}).out


def test_many_passes_are_the_last_line_before_the_verdict(books):
    lines = checked(**given(books, **BOOKS, data_path=books, plan="warn"))[1].splitlines()
    assert lines[-1] == "ok: training can start" and "warning: the run reads its data " in lines[-2]


def test_a_bucket_without_validation_data_is_named(workplace):
    """Regression: half of what a model learned was evaluated, silently."""
    for name in ("big/0", "big/1", "small/0"):
        training.write_shard(workplace / f"two/{name}.parquet", training.texts(48, seed=1))
    changed = {
        "data_path": workplace / "two",
        "data_format": "text",
        "curriculum": mix(workplace, 2, 0),
    }
    path = changed["curriculum"]
    path.write_text(path.read_text().replace("tiny", "small").replace("0}", "1}"))
    without = "not evaluated: small (the validation files have none of it; --val-path names others)"
    assert without in checked(**given(workplace / "two", **changed))[1]
