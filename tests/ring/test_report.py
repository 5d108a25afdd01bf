"""scripts.report: every figure is the one on disk, and a run with missing files still has a
report."""

import json
import re
import statistics
from pathlib import Path

import pytest

from nanochat.checkpoint import load_checkpoint
from nanochat.common import Bits, duration, show, write_json
from nanochat.run_dir import read_config
from nanochat.run_reader import RunReader, ledger_table
from nanochat.stream import LEDGER, ledger, token_share
from scripts import page, report
from scripts.report import fenced, make_report, markdown
from tests import training
from tests.finished import STEPS, command
from tests.training import T

EVALUATION = {
    "step": STEPS,
    "eval_tokens": 512,
    "val_bpb": 2.0625,
    "unigram_bpb": 3.8125,
    "train_bpb": {"data": 1.9375},
    "samples": {"prompted": ["Once ```upon```\na time"], "unprompted": ["import | os"]},
}
CORE = {"core_metric": 0.25, "results": {"arc": 0.5, "piqa": 0.5}, "items": 40}
STAGES = "\n".join(
    [
        "set-up\t1\t0\tbash dev/setup.sh",
        "training\t100\t137\ttrain --fast",
        "truncated li",
        "training\t65\t0\ttrain --fast",
        "report\tx\t0\treport",
    ]
)


@pytest.fixture
def run(copied):
    """The finished run, changed as if its first launch had been killed after step 5, in the middle
    of a line. It has the results of an evaluation and the stages of speedrun.sh."""
    path, lines = training.run_dir(), training.log_file().read_text().splitlines()
    begun = {**json.loads(lines[0]), "step": 4, "world_size": 2, "code": ""}
    at = {
        number: next(
            i
            for i, line in enumerate(lines)
            if '"loss"' in line and json.loads(line)["step"] == number
        )
        for number in (4, 5)
    }
    training.log_file().write_text(
        "\n".join([*lines[: at[5] + 1], '{"step": 6, "lo', json.dumps(begun), *lines[at[4] :]])
        + "\n"
    )
    write_json(path / "eval.json", EVALUATION)
    (copied / "stages.tsv").write_text(STAGES)
    return path


def rows(text):
    """{first cell: other cells} of all table rows of a report."""
    cells = [
        [c.strip() for c in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return {row[0]: row[1:] for row in cells}


def test_results_on_other_amounts_of_validation_text_are_not_compared(copied):
    """Regression: page and report said that bits per byte fell from one to the other."""
    before = RunReader(training.run_dir()).val_bpb
    outcome = training.succeed(num_iterations=STEPS + 2, eval_tokens=T)
    after = RunReader(training.run_dir()).val_bpb
    assert len(before) > 1 and [*after] == [STEPS + 2]
    assert f"validation bits per byte {after[STEPS + 2]:.6f};" in outcome.out


def test_the_report_is_printed_and_written_with_the_stages(run):
    output = run.parent / "other.md"
    outcome = command(
        report.main, run, f"--stages={run.parents[1] / 'stages.tsv'}", f"--output={output}"
    )
    assert outcome.code == 0 and f"report: {output}" in outcome.out and "2.062" in outcome.out
    text = output.read_text()
    assert "# Run `run`: completed" in text
    assert f"run directory `{run}`" in text
    assert f"`python -m scripts.page {run.name}` draws its plots" in text
    assert "train --fast" in text
    found = rows(text)
    assert found["set-up"] == ["1.0 s", "1", "0"]
    assert found["training"] == ["2 min 45 s", "2", "1"]


def test_every_figure_is_the_one_on_disk(run):
    found = rows(make_report(RunReader(run)))
    steps = list(training.steps().values())
    val = [event["bpb"] for event in training.events("val")]
    config, first = read_config(run), training.events("started")[0]
    [pinned] = json.loads((run / "data_manifest.json").read_text())["train"].values()
    seconds, waited = (sum(step[name] for step in steps) for name in ("step_s", "wait_s"))
    account = ledger(load_checkpoint(training.final()).cursors, T)["data"]
    for name, expected in {
        "validation bits per byte, at step 0": [show(Bits(val[0]))],
        "validation bits per byte, after": [show(Bits(val[-1]))],
        "validation bits per byte by base_eval on 512 tokens, after": ["2.062"],
        "bits per byte of a unigram model on the same tokens": ["3.812"],
        "bits per byte of the sample of the training files, data": ["1.938"],
        "steps": ["8"],
        "tokens in rows": ["4,096"],
        "training time": [
            f"{duration(seconds)}, {100 * waited / seconds:.2f} % of it waiting for data"
        ],
        "tokens/s, median step": [show(statistics.median(step["tokens_per_s"] for step in steps))],
        "params_total": [show(config["derived"]["params_total"])],
        "depth": ["2", "20"],
        "1": ["0", "6", "8", "killed", "1", "cpu", first["torch"], first["code"] or "unknown"],
        "2": ["4", "8", "8", "completed", "2", "cpu", first["torch"], "unknown"],
        "data (train)": [
            pinned["root"],
            "3",
            show(sum(file["size"] for file in pinned["files"])),
            "288",
        ],
        "data": [
            *(show(account[name]) for name in LEDGER),
            f"{100 * token_share(account, 'cropped'):.2f}",
        ],
        "digest of the batch of step 0": [f"`{steps[0]['digest']}`"],
        "digest of the batch of step 7": [f"`{steps[7]['digest']}`"],
    }.items():
        assert found[name] == expected, name


def test_the_legend_of_the_ledger_has_every_column(run):
    """Regression: `read` and `documents` were not explained."""
    text, columns, _ = ledger_table(*RunReader(run).ledger())
    assert [name for name in columns[1:] if f"'{name}':" not in text] == []
    assert max(map(len, text.splitlines())) <= 120


def test_a_setting_at_its_default_is_only_in_the_list_of_those(run):
    text = make_report(RunReader(run))
    assert "\nseed 42\n" in text.partition("<summary>settings at their defaults")[2]
    assert "seed" not in rows(text)


def test_sentences_and_samples_say_how_the_run_went(run):
    text = make_report(RunReader(run))
    seconds = sum(step["step_s"] for step in training.steps().values())
    val = [event["bpb"] for event in training.events("val")]
    assert text.splitlines()[2:5] == [
        f"The run completed after 8 of 8 steps: 4,096 tokens in {duration(seconds)} of training.",
        f"Validation bits per byte fell from {show(Bits(val[0]))} to {show(Bits(val[-1]))}.",
        "It took 2 launches (1 killed), on 1 and 2 processes.",
    ]
    assert "overfitting only if" in text
    assert "It balances" in text and "after 8 steps, in tokens" in text
    assert "````text\nOnce ```upon```\na time\n````" in text and "```text\nimport | os\n```" in text


def test_a_rise_after_the_lowest_bits_per_byte_is_said(copied):
    """Regression: of a run that had overfitted, page and report said only that they fell."""
    run = training.run_dir()
    log = run / "logs" / "train.jsonl"
    with log.open("a") as file:
        file.write(json.dumps({"event": "val", "step": 5, "bpb": 1.25}) + "\n")
    assert "; the lowest were 1.250 at step 5." in make_report(RunReader(run))
    outcome = training.succeed(num_iterations=STEPS + 2)
    assert "(lowest: 1.250000 at step 5)" in outcome.out


def test_a_bucket_without_validation_data_is_named(run):
    buckets = {"val_buckets": {"data": 2.0}, "train_bpb": {"data": 1.9, "math": 1.5}}
    write_json(run / "eval.json", {**EVALUATION, **buckets})
    assert "Validation has nothing of math." in make_report(RunReader(run))
    write_json(run / "eval.json", EVALUATION)
    assert "Validation has nothing" not in make_report(RunReader(run))


def test_an_evaluation_of_an_older_checkpoint_does_not_replace_the_final_figures(run):
    """Regression: the row "after" had the value of the older checkpoint."""
    write_json(run / "eval.json", {**EVALUATION, "step": 6, "core": CORE})
    text = make_report(RunReader(run))
    found = rows(text)
    assert found["validation bits per byte, after"] == [
        show(Bits(training.events("val")[-1]["bpb"]))
    ]
    for figure, value in (
        ("validation bits per byte by base_eval on 512 tokens", "2.062"),
        (
            "bits per byte of the sample of the training files, data",
            "1.938",
        ),
        ("CORE metric on 2 tasks, 40 items", "0.25"),
    ):
        assert found[f"{figure}, at step 6"] == [value] and figure not in found
    assert "At the evaluation after 6 steps, prompted:" in text


def test_a_score_of_older_code_has_no_number_of_items(run):
    """Regressions: a traceback; and an error also of scripts.sweep and scripts.export, which do not
    need the number."""
    older = {name: value for name, value in CORE.items() if name != "items"}
    write_json(run / "eval.json", {**EVALUATION, "core": older})
    assert command(report.main, "run").code == 0
    assert "CORE metric on 2 tasks" in (run / "report.md").read_text()
    write_json(run / "eval.json", {**EVALUATION, "core": {"core_metric": 0.5}})
    outcome = command(report.main, "run")
    assert outcome.code == 1 and "core.results: expected" in outcome.err and "rerun" in outcome.err


def test_a_run_that_was_lengthened_has_the_figures_of_its_new_length(copied):
    """Regression: those that follow from the settings were those of the first launch."""
    before = RunReader(training.run_dir()).last_config["derived"]
    training.succeed(num_iterations=STEPS + 2)
    run = RunReader(training.run_dir())
    added = 2 * before["tokens_per_step"]
    expected = {
        "num_iterations": STEPS + 2,
        "total_tokens": before["total_tokens"] + added,
        "total_flops": before["total_flops"] + added * before["flops_per_token"],
    }
    assert run.last_config["derived"] == {**before, **expected}
    assert f"| total_tokens | {show(expected['total_tokens'])} |" in make_report(run)


def test_the_last_validation_of_each_bucket_is_a_figure(run):
    """Regression: only the page had them, beside "look at the gap to validation"."""
    lines = training.log_file().read_text().splitlines()
    events = [json.loads(line) if '"val"' in line else None for line in lines]
    changed = [
        json.dumps({**event, "buckets": {"web": 1.5, "code": 2.5}}) if event else line
        for event, line in zip(events, lines)
    ]
    training.log_file().write_text("\n".join(changed) + "\n")
    found = rows(make_report(RunReader(run)))
    assert found["validation bits per byte of web, after"] == ["1.500"]
    assert found["validation bits per byte of code, after"] == ["2.500"]


def test_the_command_of_every_launch_is_listed_also_of_equal_ones(run):
    """Regression: equal commands were one line, so it was unknown which launch had which."""
    command_line = training.events("started")[0]["command"]
    text = make_report(RunReader(run))
    assert f"{command_line}  # launch 1\n{command_line}  # launch 2\n" in text


FILES = ["eval.json", "data_manifest.json", "logs/train.jsonl", "logs/cursors"]


@pytest.mark.parametrize("missing", [*FILES, "everything"])
def test_a_run_with_missing_files_has_a_report(run, missing):
    full, started = make_report(RunReader(run)), training.events("started")[0]
    gone = FILES if missing == "everything" else [missing]
    for name in gone:
        (run / name).rename(run.parent / Path(name).name)
    text = make_report(RunReader(run))
    assert started["command"] in full
    assert text != full and [x for x in text.splitlines() if x.startswith("## ")] == [
        x for x in full.splitlines() if x.startswith("## ")
    ]
    assert ("Not evaluated yet: " in text) == ("eval.json" in gone)
    assert ("nothing saved yet" in text) == ("logs/train.jsonl" in gone)
    write_json(run / "eval.json", {**EVALUATION, "step": 4})
    assert ("The evaluation is from step 4" in make_report(RunReader(run))) == (
        "logs/train.jsonl" not in gone
    )


def test_the_outcome_of_a_run_is_that_of_its_last_launch(copied):
    assert RunReader(training.run_dir()).outcome == "completed"
    started, log = training.events("started")[0], training.log_file()
    for event, outcome in (
        (started, "unfinished, saved at step 8"),
        ({"event": "stopped", "step": 8, "reason": "SIGTERM"}, "stopped, saved at step 8"),
    ):
        log.write_text(f"{log.read_text()}{json.dumps(event)}\n")
        assert RunReader(training.run_dir()).outcome == outcome


def test_tables_and_fences_stay_intact_whatever_they_contain():
    lines = markdown(("a", "b"), [("x|y", "two\nlines")])
    assert lines == ["| a | b |", "| --- | ---: |", "| x\\|y | two lines |", ""]
    assert fenced("a\n````") == ["`````text", "a", "````", "`````", ""]
    assert markdown(("a",), [("<script>&\x1b[2J",)])[2] == r"| &lt;script&gt;&amp;\u001b[2J |"
    assert fenced("<b>\x1b[2J\rx") == ["```text", r"<b>\u001b[2J", "x", "```", ""]


def test_no_name_in_a_report_is_html(run):
    """Regression: the name of a folder or a reason could become markup."""
    hostile = "<img src=x>"
    write_json(
        run / "config.json", {**json.loads((run / "config.json").read_text()), "model_tag": hostile}
    )
    log = run / "logs" / "train.jsonl"
    log.write_text(
        log.read_text()
        .replace('"reason": ""', f'"reason": "{hostile}"')
        .replace('"cpu"', f'"{hostile}"')
    )
    (run / "eval.json").unlink()
    moved = run.rename(run.with_name(hostile))
    text = make_report(RunReader(moved))
    assert text.count("&lt;img src=x&gt;") >= 5 and hostile not in re.sub("(?s)```.*?```", "", text)


def test_a_halt_and_dry_buckets_stay_in_the_report_and_on_the_page_after_the_run_continued(run):
    """Regression: "2 launches, none interrupted"."""
    lines = training.log_file().read_text().splitlines()
    begun = next(
        i for i, line in enumerate(lines) if '"started"' in line and '"world_size": 2' in line
    )
    lines[begun:begun] = [
        json.dumps({"event": "halted", "step": 4, "time": 1.0, "reason": "lane 1 has no rows left"})
    ]
    lines += [
        json.dumps(
            {"event": "dropped", "step": step, "time": 1.0, "bucket": "tiny", "lanes": lanes}
        )
        for step, lanes in ((5, 1), (7, 4))
    ]
    training.log_file().write_text("\n".join(lines) + "\n")
    text = make_report(RunReader(run))
    assert (
        "2 launches (1 halted)" in text and "It halted at step 6 (lane 1 has no rows left)." in text
    )
    assert "Bucket tiny ran dry, at step 7 in 4 lanes." in text
    assert command(page.main, run, f"--out={run / 'page.html'}").code == 0
    html = (run / "page.html").read_text()
    assert (
        "It halted at step 6 (lane 1 has no rows left)." in html and "Bucket tiny ran dry" in html
    )
