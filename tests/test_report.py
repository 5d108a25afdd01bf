"""The report: every figure in it is the one on disk, and whatever is missing, there is a report."""

import json
import re
import sys
from pathlib import Path

import pytest

from nanochat.common import write_json
from nanochat.run_dir import keep_cursors, pack_cursors
from nanochat.stream import LEDGER
from scripts import report
from scripts.report import make_report, markdown, quoted, read_facts, told_ledger, unbalanced
from tests import training

T, STEPS = 15, 40


def cursors(read=96):
    """Two lanes; of each 96 + 4 + 0 = 5 rows of 16 + 13 + 7."""
    feed = {"epoch": 1, "documents": 4, "read": read, "row": 5, "inserted": 4, "repeated": 0, "cropped": 13,
            "padded": 0, "pending": 7}
    return [{"lane": i, "row": 5, "buckets": {"data": feed}} for i in range(2)]


def log_lines():
    steps = [{"step": i, "digest": f"{i:016x}", "loss": 8 - i / 10, "smooth_loss": 8 - i / 20, "lr": 1.0,
              "grad_norm": 0.5, "wait_s": 0.05, "step_s": 0.5, "tokens": 160 * (i + 1), "tokens_per_s": 320.0 + i,
              "mfu": 0.0}
             for i in range(STEPS)]
    started = {"event": "started", "step": 0, "world_size": 2, "device": "cpu", "torch": "2.13.0", "code": "abc+",
               "command": "python -m scripts.base_train --depth=2", "typed": ["depth", "model_tag"]}
    return [started, {"event": "val", "step": 0, "bpb": 4.25}, *steps[:25],
            {**started, "step": 20, "world_size": 1, "code": ""}, *steps[20:],
            {"event": "val", "step": STEPS, "bpb": 2.125},
            {"event": "saved", "step": STEPS, "checkpoint": "final", "seconds": 0.1},
            {"event": "completed", "step": STEPS, "reason": ""}]


EVALUATION = {"step": STEPS, "val_bpb": 2.0625, "unigram_bpb": 3.8125,
              "train_bpb": {"data": 1.9375},
              "samples": {"prompted": ["Once ```upon```\na time"], "unprompted": ["import | os"]}}
STAGES = "\n".join(["set-up\t1\t0\tbash dev/setup.sh", "training\t100\t137\ttrain --fast", "torn li",
                    "training\t65\t0\ttrain --fast", "report\tx\t0\treport"])


@pytest.fixture
def run(tmp_path):
    """A run directory as a finished training leaves it."""
    path = tmp_path / "runs" / "tiny"
    path.mkdir(parents=True)
    write_json(path / "config.json", {"model_tag": "tiny", "depth": 2, "max_seq_len": T, "seed": 42, "lanes": 4,
                                      "derived": {"params": 12345}})
    (path / "logs").mkdir()
    lines = [json.dumps(line) for line in log_lines()]
    (path / "logs" / "train.jsonl").write_text("\n".join(lines[:10] + ['{"step": 8, "lo'] + lines[10:]) + "\n")
    keep_cursors(path, 20, pack_cursors(20, cursors(read=1)))
    keep_cursors(path, STEPS, pack_cursors(STEPS, cursors()))
    write_json(path / "data_manifest.json", {"train": {"data": {"root": "/data", "files": [
        {"name": "0.jsonl", "size": 100, "own_size": 1900, "footer": "", "groups": [10, 3]},
        *({"name": f"{i}.parquet", "size": 1000, "footer": "", "groups": [10, 3]} for i in (1, 2, 3))]}}, "val": {}})
    write_json(path / "eval.json", EVALUATION)
    (path / "checkpoints" / "final").mkdir(parents=True)
    (tmp_path / "stages.tsv").write_text(STAGES)
    return path


def rows(text):
    """The cells of every table row of a report, by the first."""
    cells = [[c.strip() for c in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in cells}


def test_every_figure_is_the_one_on_disk(run):
    text = make_report(read_facts(run, run.parent.parent / "stages.tsv"))
    found = rows(text)
    assert "# Run `tiny`: completed" in text
    assert found["validation bits per byte, before training"] == ["4.25"]
    assert found["validation bits per byte, after"] == ["2.062"]
    assert found["a unigram model's on the same tokens"] == ["3.812"]
    assert found["training bits per byte, `data`"] == ["1.938"]
    assert found["steps"] == ["40"] and found["tokens trained on"] == ["6,400"]
    assert found["time in steps"] == ["20.0 s, 10.00 % of it waiting for data"]
    assert found["tokens/s, median step"] == ["339.5"]
    assert found["params"] == ["12,345"] and found["lanes"] == ["4"], "worked out"
    assert found["0"] == ["2", "cpu", "2.13.0", "abc+"] and found["20"] == ["1", "cpu", "2.13.0", "not known"]
    assert found["set-up"] == ["1.0 s", "1", "0"] and found["training"] == ["2 min 45 s", "2", "1"]
    assert found["data (train)"] == ["/data", "4", "4,900", "52"], "bytes of the user's own files"
    assert found["data"] == ["192", "8", "0", "160", "26", "14", "0", "10", "8", "1", "13.98"]
    assert "It balances" in text and "after 40 steps, in tokens" in text
    assert found["depth"] == ["2", "20"] and found["model_tag"] == ['"tiny"', "null"] and "train --fast" in text
    assert "\nseed 42\n" in text.partition("<summary>default")[2] and "seed" not in found
    assert text.splitlines()[2:5] == [
        "The run completed after 40 steps: 6,400 tokens in 20.0 s of steps.",
        "Validation bits per byte fell from 4.25 to 2.125.",
        "It took 2 launches (1 killed), on 1 and 2 processes."]
    assert found["digest of the batch of step 0"] == ["`0000000000000000`"]
    assert found["digest of the batch of step 39"] == ["`0000000000000027`"]
    assert "````text\nOnce ```upon```\na time\n````" in text and "```text\nimport | os\n```" in text
    assert f"from `{run}`" in text


FILES = ["eval.json", "data_manifest.json", "logs/train.jsonl", "logs/cursors"]


@pytest.mark.parametrize("missing", [*FILES, "everything"])
def test_there_is_a_report_whatever_is_missing(run, missing):
    full = make_report(read_facts(run))
    gone = FILES if missing == "everything" else [missing]
    for name in gone:
        (run / name).rename(run.parent / Path(name).name)
    text = make_report(read_facts(run))
    assert "python -m scripts.base_train --depth=2\n```" in full
    assert text != full and [x for x in text.splitlines() if x.startswith("## ")] == [
        x for x in full.splitlines() if x.startswith("## ")]
    assert ("base_eval tiny` has not run" in text) == ("eval.json" in gone)
    assert ("nothing saved yet" in text) == ("logs/train.jsonl" in gone)
    write_json(run / "eval.json", {**EVALUATION, "step": 20})
    assert ("eval.json is of step 20" in make_report(read_facts(run))) == ("logs/train.jsonl" not in gone)


def test_a_run_is_what_its_last_launch_was(copied):
    """A log as training writes it."""
    assert read_facts(training.run_dir()).status == "completed"
    log = training.log_file()
    lines = log.read_text().splitlines(keepends=True)
    with open(log, "a") as f:
        f.write(lines[0])
    assert '"started"' in lines[0] and read_facts(training.run_dir()).status == "unfinished, saved at step 8"
    with open(log, "a") as f:
        f.write('{"event": "stopped", "step": 8, "reason": "SIGTERM"}\n')
    assert read_facts(training.run_dir()).status.startswith("stopped, saved at step 8")


def test_the_pictures_beside_it_have_the_figures_of_the_log(run, monkeypatch):
    facts = read_facts(run)
    for i, step in enumerate(facts.steps):
        step |= {"tokens/a|b": i, "tokens/web": 2 * i}
    drawn = report.pictures(facts)
    assert list(drawn) == ["loss", "mix", "throughput"]
    raw, smooth = drawn["loss"].axes[0].lines
    assert raw.get_xydata().tolist() == [[step["step"], step["loss"]] for step in facts.steps]
    assert smooth.get_ydata().tolist() == [step["smooth_loss"] for step in facts.steps]
    assert drawn["loss"].axes[1].lines[0].get_xydata().tolist() == [[0, 4.25], [STEPS, 2.125]]
    assert drawn["throughput"].axes[0].lines[0].get_ydata().tolist() == [step["tokens_per_s"] for step in facts.steps]
    first = drawn["mix"].axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert first.max() == pytest.approx(1 / 3), "a third of what was trained on, in every stretch"
    report.main([f"{run}"])
    shown = re.findall(r"!\[.*\]\((.*)\)", (run / "report.md").read_text())
    assert shown == ["report-loss.png", "report-throughput.png"]
    assert all((run / name).read_bytes().startswith(b"\x89PNG") for name in shown)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report.main([f"{run}"]) == 0 and ".[plot]" in (run / "report.md").read_text()


def test_accounts_that_do_not_balance_are_said_not_to():
    right = dict.fromkeys(LEDGER, 0) | {"read": 96, "bos": 4, "repeated": 3, "emitted": 80, "cropped": 16, "pending": 7}
    assert unbalanced({"data": right}) == {}
    assert "off in code by -2." in told_ledger(1, {"data": right, "code": {**right, "read": 94}}, T)[0]


def test_tables_and_texts_stay_whole_whatever_is_in_them():
    lines = markdown(("a", "b"), [("x|y", "two\nlines")])
    assert lines == ["| a | b |", "| --- | ---: |", "| x\\|y | two lines |", ""]
    assert quoted("a\n````") == ["`````text", "a", "````", "`````", ""]
    assert markdown(("a",), [("<script>&\x1b[2J",)])[2] == r"| &lt;script&gt;&amp;\u001b[2J |"
    assert quoted("<b>\x1b[2J\rx") == ["```text", r"<b>\u001b[2J", "x", "```", ""]


def test_no_name_in_a_report_is_html(run):
    """Regression: a folder or a reason could bring markup into the page that shows the report."""
    hostile = "<img src=x>"
    write_json(run / "config.json", {**json.loads((run / "config.json").read_text()), "model_tag": hostile})
    log = run / "logs" / "train.jsonl"
    log.write_text(log.read_text().replace('"reason": ""', f'"reason": "{hostile}"').replace('"cpu"', f'"{hostile}"'))
    moved = run.rename(run.with_name(hostile))
    (moved / "eval.json").unlink()
    text = make_report(read_facts(moved))
    assert text.count("&lt;img src=x&gt;") >= 5 and hostile not in re.sub("(?s)```.*?```", "", text)


def test_the_script_writes_the_report_and_says_where(run, capsys):
    stages = run.parent.parent / "stages.tsv"
    assert report.main([f"{run}", f"--stages={stages}"]) == 0
    output = capsys.readouterr().out
    assert f"report: {run / 'report.md'}" in output and "2.062" in output
    assert "2 min 45 s" in (run / "report.md").read_text()
    assert report.main([f"{run}", f"--output={run.parent / 'other.md'}"]) == 0
    assert (run.parent / "other.md").exists()
