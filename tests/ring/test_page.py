"""scripts.page: every point of the log is drawn, nothing is loaded, and no text becomes markup."""

import json
import re
import shutil
import subprocess
import sys
import time
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanochat import run_curves
from nanochat.common import read_json, write_json
from nanochat.run_dir import RowLosses, iter_log, keep_cursors, pack_cursors
from nanochat.run_facts import differing_settings, sentences_about
from nanochat.run_reader import RunReader
from scripts import page
from tests.finished import command
from tests.forks import as_fork
from tests.training import PATIENCE_S

EVIL = "</script><img src=x onerror=alert(1)>{{data}}<!--"
T = 15
STEPS = 40
SPIKE = 17
NOT_APPLIED = 30


def cursors(read=96):
    """Two lanes, each with 96 + 4 + 0 = 5 rows of 16 + 13 + 7."""
    feed = {
        "epoch": 1,
        "documents": 4,
        "read": read,
        "row": 5,
        "inserted": 4,
        "repeated": 0,
        "cropped": 13,
        "padded": 0,
        "pending": 7,
    }
    return [{"lane": i, "row": 5, "buckets": {"data": feed}} for i in range(2)]


def step(i, **more):
    loss = 50.0 if i == SPIKE else 8 - i / 10
    return {
        "step": i,
        "digest": f"{i:016x}",
        "loss": loss,
        "smooth_loss": 8 - i / 20,
        "lr": 1.0,
        "grad_norm": 0.5 * 1.1**i,
        "wait_s": 0.05,
        "step_s": 0.5,
        "tokens": 160 * (i + 1),
        "tokens_per_s": 320.0 + i,
        "mfu": 0.0,
        **more,
    }


def web_loss(i):
    """The loss of a bucket: that of the step that was not applied is far off."""
    return 50.0 if i == NOT_APPLIED else 3 + i / 10


def log_lines(*, digest="", num=STEPS, slowest_wait_s=0.05):
    """The log of a run that was killed at step 25, resumed from step 20 on two processes and
    stopped. It has a hostile bucket, an unknown value and a NaN."""
    mix = []
    for i in range(num):
        values = {
            f"tokens/{EVIL}": 40 if i < 20 else 120,
            "tokens/web": 120 if i < 20 else 40,
            "loss/web": web_loss(i),
            "unknown_value": float(i),
        }
        mix.append(step(i, **values))
    mix[3]["loss"] = mix[3]["smooth_loss"] = None
    mix[30]["digest"] = digest or mix[30]["digest"]
    mix[20]["wait_s"] = slowest_wait_s
    started = {"event": "started", "step": 0, "world_size": 1, "device": "cpu", "torch": "2.13.0"}
    resumed = {**started, "step": 20, "world_size": 2, "num_iterations": 50}  # and made shorter
    saved = {"event": "saved", "step": 20, "checkpoint": "checkpoint-20", "seconds": 0.1}
    val = {"event": "val", "step": 0, "bpb": 4.25, "buckets": {"web": 4.0, EVIL: 4.5}}
    return [
        started,
        val,
        *mix[:20],
        saved,
        *mix[20:25],
        resumed,
        *mix[20:],
        {**val, "step": num, "bpb": 2.125},
        {"event": "core", "step": num, "core_metric": 0.125},
        {"event": "skipped", "step": NOT_APPLIED, "loss": 50.0},
        {"event": "samples", "step": 20, "texts": ["old"]},
        {"event": "samples", "step": num, "texts": [EVIL]},
        {"event": "stopped", "step": num, "reason": EVIL},
    ]


def make_run(path, **how):
    """The files of a run with the log `log_lines(**how)`, of which one line is truncated."""
    (path / "logs").mkdir(parents=True)
    text = [json.dumps(line) for line in log_lines(**how)]
    (path / "logs" / "train.jsonl").write_text(
        "\n".join([*text[:9], '{"step": 8, "lo', *text[9:]]) + "\n"
    )
    write_json(
        path / "config.json",
        {
            "model_tag": "tiny",
            "depth": 2,
            "max_seq_len": T,
            "data_path": EVIL,
            "derived": {"flops_per_token": 1000, "num_iterations": 60},
        },
    )
    pinned = {"root": "/", "files": [{"name": "0.parquet", "size": 1, "footer": "", "groups": [1]}]}
    write_json(path / "data_manifest.json", {"train": {}, "val": {"web": pinned, EVIL: pinned}})
    phases = [
        {"first_step": 0, "asked": {"web": 3, EVIL: 1}},
        {"first_step": 20, "asked": {"web": 1, EVIL: 3}},
    ]
    write_json(path / "plan.json", {"phases": phases})
    keep_cursors(path, 20, pack_cursors(20, cursors()))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("base") / "runs"
    return [make_run(base / "<b>one & only"), make_run(base / "two", digest="f" * 16)]


def write(runs, out):
    """(the page, the data in it)."""
    assert command(page.main, *runs, f"--out={out}").code == 0
    text = out.read_text()
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert len(found) == 1 and len(text.encode()) < 6_000_000
    return text, json.loads(found[0])


def curves(run):
    return {(series["chart"], series["name"]): series["y"] for series in run["series"]}


def test_the_page_draws_the_values_of_the_log(runs, tmp_path):
    text, data = write(runs[:1], tmp_path / "page.html")
    [run] = data["runs"]
    records = iter_log(runs[0] / "logs" / "train.jsonl")
    logged = {record["step"]: record for record in records if "event" not in record}.values()
    found, x = curves(run), run["axes"][0]
    assert run["steps"] == x["steps"] == [*range(STEPS)] and run["digests"] == [
        s["digest"] for s in logged
    ]
    assert x["tokens"] == [s["tokens"] for s in logged] and x["FLOPs"][-1] == 1000 * 160 * STEPS
    assert x["hours"][-1] == pytest.approx(STEPS * 0.5 / 3600, rel=1e-5)
    assert (
        found[page.LOSS, "loss"] == [s["loss"] for s in logged]
        and found["unknown_value", "unknown_value"][-1] == 39
    )
    assert all(
        len(y) == STEPS for (chart, _), y in found.items() if chart not in (page.BPB, "core_metric")
    )
    assert found[page.BPB, "bpb"] == [4.25, 2.125] and found[page.BPB, EVIL] == [4.5, 4.5]
    assert found["core_metric", "core_metric"] == [0.125] and run["axes"][-1]["tokens"] == [
        160 * STEPS
    ]
    assert found["mix-0", "web"][19] == 0.75 and found["mix-0", "web"][-1] == 0.25
    first, second = run["launches"]
    assert (first["end"], first["to"]["steps"], first["label"]) == ("killed", 25, "1: 1 proc.")
    assert [mark["kind"] for mark in first["marks"]] == ["saved"] and first["marks"][0]["at"][
        "tokens"
    ] == 160 * 20
    assert (second["end"], second["from"]["steps"], second["label"]) == (
        "stopped",
        20,
        "2: 2 proc.",
    )
    assert [mark["kind"] for mark in second["marks"]] == ["skipped"]
    shown = unescape(re.sub(r"<[^>]*>", " ", text.partition("<script type")[0]))
    for text in (
        "It took 2 launches (1 killed), on 1 and 2 processes",
        "after 40 of 50 steps",
        "40 / 50",
        "It balances",
        "2.125",
        EVIL,
    ):
        assert text in shown, text


def test_the_planned_mix_goes_through_the_window_of_the_trained_one(runs, tmp_path):
    html, data = write(runs[:1], tmp_path / "page.html")
    assert "A mix is planned in rows, so the dashed lines are estimates." in html
    found = curves(data["runs"][0])
    planned = found["mix-0", "web, planned"]
    # the run follows its plan, whose phases change at step 20; the window has 20 steps
    assert planned == found["mix-0", "web"]
    assert (planned[19], planned[29], planned[39]) == (0.75, 0.5, 0.25)


def test_a_mix_without_a_plan_has_no_words_on_dashed_lines(runs, tmp_path):
    """Regression: a run in Megatron's order, which stores no plan, had them."""
    run = tmp_path / "unplanned"
    shutil.copytree(runs[0], run)
    (run / "plan.json").unlink()
    html, data = write([run], tmp_path / "page.html")
    assert not any("planned" in name for _, name in curves(data["runs"][0]))
    assert "Mix of unplanned" in html
    assert "(dashed)" not in html and "dashed lines are estimates" not in html


def test_the_planned_mix_counts_only_tokens_with_loss_as_the_trained_one_does(runs, tmp_path):
    """Regression: half of the tokens of a bucket of books may repeat context, and then the lines
    never met."""
    run = tmp_path / "books"
    shutil.copytree(runs[0], run)
    plan = read_json(run / "plan.json")
    account = {"emitted": 100, "padded": 0, "repeated": 0}
    plan["buckets"] = {"web": {"account": account}, EVIL: {"account": account | {"repeated": 50}}}
    write_json(run / "plan.json", plan)
    _, data = write([run], tmp_path / "page.html")
    planned = curves(data["runs"][0])["mix-0", "web, planned"]
    assert planned[19] == pytest.approx(3 / 3.5) and planned[39] == pytest.approx(1 / 2.5)


def lines_of_history(text):
    """The rows of the history on a page."""
    part = text.partition("<h2>History</h2>")[2].partition("<h2>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", part)
    return [unescape(re.sub("<[^>]*>", "|", row)).replace("||", "|").strip("|") for row in rows]


def test_the_history_has_halts_dry_buckets_and_steps_taken_again(tmp_path):
    path = make_run(tmp_path / "run")
    log = path / "logs" / "train.jsonl"
    lines = log.read_text().splitlines()[:-1]
    dry = [{"event": "dropped", "step": i, "bucket": "web", "lanes": i - 29} for i in (30, 31, 33)]
    halted = {"event": "halted", "step": 40, "reason": "the bucket 'code' has run dry"}
    lines += [json.dumps(event) for event in (*dry, halted)]
    log.write_text("\n".join(lines) + "\n")
    text, _ = write([path], tmp_path / "page.html")
    assert lines_of_history(text) == [
        "step|what happened",
        "0|launch 1 on 1 process",
        "25|launch 1 killed",
        "20|launch 2 on 2 processes: 5 steps taken again, up to step 24",
        "30|step not applied: loss 50",
        "30 to 33|bucket web ran dry, 3 times: first in 1 lane; last in 4 lanes",
        "40|launch 2 halted: the bucket 'code' has run dry",
    ]


def test_a_launch_with_other_model_code_says_so(runs, tmp_path):
    """Regression: the history showed no change, and the whole run was credited with the new code."""
    path = make_run(tmp_path / "run")
    log = path / "logs" / "train.jsonl"
    codes = iter([{"nanochat/gpt.py": "1" * 32}, {"nanochat/gpt.py": "2" * 32}])
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    for line in lines:
        if line.get("event") == "started":
            line["model_code"] = next(codes)
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text, data = write([path], tmp_path / "page.html")
    other = "other model code (nanochat/gpt.py)"
    told = [line for line in lines_of_history(text) if other in line]
    assert len(told) == 1 and told[0].startswith("20|launch 2 on 2 processes")
    assert [other in launch["text"] for launch in data["runs"][0]["launches"]] == [False, True]
    told = " ".join(sentences_about(RunReader(path)))
    assert "Launch 2 began at step 20 with other model code: nanochat/gpt.py." in told
    final = {"step": STEPS, "files": {}, "model_code": {"nanochat/gpt.py": "2" * 32}}
    paths = [path, shutil.copytree(runs[1], tmp_path / "other")]
    for run in paths:
        (run / "checkpoints" / "final").mkdir(parents=True)
        write_json(run / "checkpoints" / "final" / "trainer_state.json", final)
    _, *codes = differing_settings([RunReader(run) for run in paths])[0]
    assert codes == ["11111111, then 22222222", "22222222"]
    [second] = [line for line in lines if line.get("model_code") == final["model_code"]]
    lines.remove(second)
    lines.insert(1, second | {"step": 0})  # it has taken all steps
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert RunReader(path).shown_code == {"nanochat/gpt.py": "22222222"}


def test_of_more_than_three_runs_only_smoothed_curves_are_drawn(runs, tmp_path):
    paths = [make_run(tmp_path / name) for name in ("three", "four")]
    _, few = write([*runs, paths[0]], tmp_path / "page.html")
    text, many = write([*runs, *paths], tmp_path / "page.html")
    looks = [{curve["look"] for curve in data["runs"][0]["series"]} for data in (few, many)]
    assert "raw" in looks[0] and "raw" not in looks[1]
    norms = [curves(data["runs"][0])["unknown_value", "unknown_value"] for data in (few, many)]
    assert norms[0] == [*range(STEPS)]
    applied = [norm if i != NOT_APPLIED else None for i, norm in enumerate(norms[0])]
    smoothed = run_curves.smooth(applied)
    assert [norm is None for norm in norms[1]] == [norm is None for norm in smoothed]
    assert list(filter(None, norms[1])) == pytest.approx(list(filter(None, smoothed)), rel=1e-5)
    titles = [chart["title"] for chart in many["charts"]]
    assert page.LOSS + ", smoothed" in titles and "Gradient norm, smoothed" in titles
    assert page.WAIT in titles, "a single slow step stays one step"
    settings = text.partition("<h2>Settings</h2>")[2]
    assert settings.count('<details class="card">') == 4


def test_the_loss_of_a_bucket_leaves_out_steps_that_were_not_applied(runs, tmp_path):
    [run] = write([runs[0]], tmp_path / "page.html")[1]["runs"]
    by_bucket = {
        curve["name"]: curve for curve in run["series"] if curve["chart"] == run_curves.BUCKETS
    }
    for curve in by_bucket.values():
        steps = run["axes"][curve["axis"]]["steps"]
        losses = dict(zip(steps, curve["y"]))
        assert losses[NOT_APPLIED] is None
        assert losses[NOT_APPLIED + 1] < losses[NOT_APPLIED - 1] + 0.3, (
            "the spike is not in the mean"
        )
    assert by_bucket


def test_a_band_shows_the_10th_to_90th_percentile_of_row_losses(runs, tmp_path, monkeypatch):
    path = shutil.copytree(runs[0], tmp_path / "banded")
    write_json(
        path / "config.json", {**read_json(path / "config.json"), "total_batch_size": 11 * T}
    )
    kept = RowLosses(path, num_rows=11, T=T)
    for i in range(10, STEPS):  # as if the first steps had --no-row-losses
        kept.write(i, [(i + row) * T for row in range(10)] + [0], [T] * 10 + [0])
    for points, steps in ((500, range(10, STEPS)), (10, range(12, STEPS, 4))):
        monkeypatch.setattr(run_curves, "BAND_POINTS", points)
        [run] = write([path], tmp_path / "page.html")[1]["runs"]
        edge, band = run["series"][:2]
        assert (edge["look"], band["look"], {edge["chart"], band["chart"]}) == (
            "edge",
            "band",
            {page.LOSS},
        )
        assert run["axes"][band["axis"]]["steps"] == [*steps]
        assert edge["y"] == pytest.approx([i + 0.9 for i in steps], abs=1e-4)
        assert band["y"] == pytest.approx([i + 8.1 for i in steps], abs=1e-4)
    assert "band" not in {
        curve["look"] for curve in write(runs, tmp_path / "page.html")[1]["runs"][0]["series"]
    }


def test_two_runs_show_the_settings_that_differ(runs, tmp_path):
    write_json(runs[1] / "config.json", {**read_json(runs[1] / "config.json"), "depth": 7})
    text, data = write(runs, tmp_path / "page.html")
    assert [run["name"] for run in data["runs"]] == ["<b>one & only", "two"]
    differs = text[text.index("<h3>What differs</h3>") :].partition("</table>")[0]
    assert re.findall(r"<td>(.*?)</td>", differs) == ["depth", "2", "7"]
    assert [run["digests"][30] for run in data["runs"]] == [f"{30:016x}", "f" * 16]


def test_two_runs_show_the_files_of_their_model_code_that_differ(runs, tmp_path):
    paths = [shutil.copytree(run, tmp_path / run.name) for run in runs]
    for path, gpt in zip(paths, ("1" * 32, "2" * 32)):
        (path / "checkpoints" / "final").mkdir(parents=True)
        code = {"nanochat/gpt.py": gpt, "nanochat/attention.py": "3" * 32}
        seal = {"step": 40, "files": {}, "model_code": code}
        write_json(path / "checkpoints" / "final" / "trainer_state.json", seal)
    text, _ = write(paths, tmp_path / "page.html")
    differs = text[text.index("<h3>What differs</h3>") :].partition("</table>")[0]
    cells = re.findall(r"<td>(.*?)</td>", differs)
    assert cells[:3] == ["code of nanochat/gpt.py", "1" * 8, "2" * 8]
    assert "attention" not in differs


def test_a_length_that_is_worked_out_is_shown_as_it_is(runs, tmp_path):
    """Regression: the page of a run whose curriculum decides its length had num_iterations -1."""
    paths = [shutil.copytree(run, tmp_path / run.name) for run in runs]
    config = read_json(paths[0] / "config.json")
    config["derived"]["num_iterations"] = 50
    phases = [{"duration_tokens": 4000, "mix": {"web": 1}}]
    for path, words in zip(paths, ({"num_iterations": 50}, {"curriculum": {"phases": phases}})):
        write_json(path / "config.json", {**config, "num_iterations": -1, **words})
    text, _ = write(paths, tmp_path / "page.html")
    differs = text[text.index("<h3>What differs</h3>") :].partition("</table>")[0]
    assert "num_iterations" not in differs, "both have 50 steps"
    alone, _ = write(paths[1:], tmp_path / "page.html")
    settings = alone.partition("<h2>Settings</h2>")[2].partition("<script")[0]
    assert re.findall(r"<td>num_iterations</td><td>(.*?)</td>", settings) == ["50"]
    assert "<td>1 phase: 4,000 tokens of 1 web</td>" in settings


def test_a_copy_to_the_mirror_has_a_mark_of_its_own(tmp_path):
    """Regression: it was one of "anything else"."""
    path = make_run(tmp_path / "run")
    mirrored = {"event": "mirrored", "step": 40, "checkpoint": "checkpoint-20", "bytes": 9}
    with open(path / "logs" / "train.jsonl", "a") as log:
        log.write(json.dumps(mirrored) + "\n")
    text, data = write([path], tmp_path / "page.html")
    assert "mirrored" in [mark["kind"] for mark in data["runs"][0]["launches"][-1]["marks"]]
    symbols = re.search(r"const SYMBOLS = {(.*)};", text)[1]
    assert 'mirrored: ["triangle-right"' in symbols and "▷ copied to the mirror" in text


def test_runs_with_different_validation_text_have_a_warning_at_the_chart(tmp_path):
    """Regression: their bits per byte were side by side like comparable ones; and the warning was far
    below the chart."""
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    note = "Different validation text: bits per byte cannot be compared."
    for run, has_note in ((runs[0], False), (runs[1], True)):
        config = read_json(run / "config.json")
        write_json(run / "config.json", {**config, "data_format": "text"})
        manifests = read_json(run / "data_manifest.json")
        manifests["val"]["web"]["files"][0]["size"] += has_note
        write_json(run / "data_manifest.json", manifests)
        text, _ = write(runs, tmp_path / "page.html")
        before = text.partition('<div class="plot" id="Validation bits per byte">')[0]
        assert text.count(note) == has_note and before.endswith(f"<p>{note}</p>") == has_note


@pytest.fixture
def forks(tmp_path):
    """A run and its fork at step 20, with the fork's fork at step 30 named first."""
    folders = [tmp_path / name for name in ("a-fork-of-warm", "mine", "warm")]
    deep, mine, warm = folders
    make_run(mine)
    for path, parent, first, lr in ((warm, "mine", 20, 0.01), (deep, "warm", 30, 0.04)):
        (path / "logs").mkdir(parents=True)
        steps = []
        for i in range(first, STEPS):
            more = {"total_training_time": 0.5 * (i + 1), "loss/web": web_loss(i)}
            steps.append(step(i, **more))
        started = {"event": "started", "step": first, "world_size": 1, "device": "cpu"}
        skipped = {"event": "skipped", "step": NOT_APPLIED, "loss": 50.0}
        lines = [{**started, "torch": "2.13.0"}, *steps, skipped]
        log = "".join(json.dumps(line) + "\n" for line in lines)
        (path / "logs" / "train.jsonl").write_text(log)
        derived = {"flops_per_token": 1000, "num_iterations": STEPS}
        write_json(path / "config.json", {"max_seq_len": T, "derived": derived})
        as_fork(path, parent, first, tokens=160 * first, matrix_lr=[0.02, lr])
    return folders


def test_forks_start_where_they_branch_off_in_the_charts_of_their_parents(forks, tmp_path):
    _, data = write(forks, tmp_path / "page.html")
    mine, warm, deep = data["runs"]
    assert [run["name"] for run in data["runs"]] == ["mine", "warm", "a-fork-of-warm"]
    assert [run["is_fork"] for run in data["runs"]] == [False, True, True]
    for run, first in ((warm, 20), (deep, 30)):
        assert run["axes"][0]["steps"] == [*range(first, STEPS)]
        assert run["axes"][0]["tokens"] == mine["axes"][0]["tokens"][first:]
        position = {
            "steps": first,
            "tokens": 160 * first,
            "FLOPs": 160_000 * first,
            "hours": pytest.approx(0.5 * first / 3600),
        }
        assert run["launches"][0]["from"] == position
        assert curves(run)[page.LOSS, "loss"] == curves(mine)[page.LOSS, "loss"][first:]


def test_the_averages_of_a_fork_continue_those_of_its_parent(forks):
    """Regression: they began with one raw value, so a fork seemed to be far below its parent."""
    deep, mine, warm = forks
    whole = smoothed(mine)
    assert smoothed(warm) == [values[20:] for values in whole]
    assert smoothed(deep) == [values[30:] for values in whole]
    shutil.rmtree(mine)
    assert smoothed(deep) != [values[30:] for values in whole], "the case: they reach back to mine"


def smoothed(path):
    """The averages of the losses of a bucket, and of gradient norms, at all steps of a run."""
    run = RunReader(path)
    kept = range(len(run.steps))
    series = [*run_curves.step_series(run, kept, only_smoothed=True)]
    of_name = {curve["name"]: curve["y"] for curve in series if curve["look"] == "smooth"}
    return [of_name["web"], of_name["grad_norm"]]


def test_a_tree_of_forks_is_that_of_scripts_status(forks, tmp_path):
    text, data = write(forks, tmp_path / "page.html")
    assert [run["parent"] for run in data["runs"]] == [None, 0, 1]
    tree = text.partition("<h3>Forks</h3>")[2].partition("</div>")[0]
    items = re.findall(r'margin-left: (\d+)px">(.*?)</p>', tree)
    indents = [int(px) for px, _ in items]
    _, warm, deep = [unescape(re.sub("<[^>]*>", " ", item)) for _, item in items]
    assert indents == [0, 20, 40]
    assert re.match("└ +warm ", warm) and "@20: matrix_lr 0.02 -> 0.01; 40 steps" in warm
    assert re.match("└ +a-fork-of-warm ", deep) and "@30: matrix_lr 0.02 -> 0.04" in deep
    single, _ = write(forks[2:], tmp_path / "page.html")
    assert "<h3>Forks</h3>" not in single


def test_the_card_of_a_fork_names_its_parent_its_step_and_what_changed(forks, tmp_path):
    text, _ = write(forks, tmp_path / "page.html")
    shown = unescape(text)
    assert "It is a fork of mine@20 (after 3,200 tokens): matrix_lr 0.02 -> 0.01." in shown
    assert "It is a fork of warm@30 (after 4,800 tokens): matrix_lr 0.02 -> 0.04." in shown
    assert "<title>mine, warm, a-fork-of-warm</title>" in text
    shutil.rmtree(forks[1])
    text, data = write(forks[2:], tmp_path / "page.html")
    assert "(after 3,200 tokens), which is not here: matrix_lr" in text
    assert data["runs"][0]["launches"][0]["from"]["tokens"] == 3200


def test_the_tokens_of_a_fork_are_those_trained_in_its_time_and_one_evaluation_is_no_first_one(
    forks, tmp_path
):
    """Regression: all tokens since step 0 were said to be trained in the time of the fork alone."""
    with (forks[0] / "logs" / "train.jsonl").open("a") as log:
        log.write(json.dumps({"event": "val", "step": STEPS, "bpb": 2.5, "buckets": {}}) + "\n")
    run = page.Run(forks[0], 0)
    figures = page.figures_of(run)
    assert figures["tokens of its own"] == f"{160 * (STEPS - 30):,}"
    assert figures["bits per byte"] == "2.500"
    assert figures["tokens/s, last 100 steps"] == "354.5"
    [sentence, *_] = page.sentences_about(run)[1:]
    assert f": {160 * (STEPS - 30):,} tokens of its own in " in sentence


def test_bits_per_byte_of_an_older_step_name_it(tmp_path):
    """Regression: "40 / 50 steps, 2.125 bits per byte", which were those of another step."""
    made = make_run(tmp_path / "run")
    log = made / "logs" / "train.jsonl"
    log.write_text(log.read_text().replace('"step": 40, "bpb"', '"step": 30, "bpb"'))
    html, _ = write([made], tmp_path / "page.html")
    assert "bits per byte at step 30, 4.250 at first" in html


def test_hostile_texts_stay_texts(runs, tmp_path):
    text, data = write(runs, tmp_path / "page.html")
    # without plotly's own code
    ours = text.partition("<script>")[0] + text.rpartition("<script>")[2]
    assert "onerror=alert(1)>" not in ours and "<b>one" not in ours and "{{curves" not in ours
    assert EVIL in data["buckets"] and ours.count("<img") == 0 and ours.count("</script>") == 2


def test_the_page_of_a_run_of_any_length_is_smaller_than_5_mb(runs, tmp_path):
    text, data = write(runs[:1], tmp_path / "page.html")
    without_data = len(text) - len(json.dumps(data))
    assert 1_000_000 < without_data < 5_000_000 - 2 * page.ROOM


def test_a_long_log_is_thinned_and_keeps_its_spikes(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "ROOM", 100_000)
    text, data = write([make_run(tmp_path / "long", num=2_000)], tmp_path / "page.html")
    [run] = data["runs"]
    every = re.search(r"Of every (\d+) steps, the one with the highest loss", text)
    assert every and int(every[1]) >= 3 and run["steps"][-1] == 1_999
    assert 50_000 < len(json.dumps(data, separators=(",", ":"))) < 110_000
    assert SPIKE in run["steps"] and max(filter(None, curves(run)[page.LOSS, "loss"])) == 50.0


def test_the_page_of_all_runs_has_one_with_a_name_that_no_new_run_may_have(
    runs, tmp_path, monkeypatch
):
    """Regression: the name was refused, so that no run had a page."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(runs[0].parent.parent))
    names = [run["name"] for run in write([], tmp_path / "page.html")[1]["runs"]]
    assert names == [run.name for run in runs]


def test_watch_rewrites_the_page_while_the_run_is_alive(runs, tmp_path, monkeypatch):
    out, naps = tmp_path / "page.html", []
    alive = {"liveness": "alive", "status": "running", "shown": "running", "eta_s": 60.0}
    looks = iter([alive, alive, {"liveness": "ended", "status": "completed", "shown": "completed"}])
    monkeypatch.setattr(RunReader, "status", lambda self: next(looks))
    monkeypatch.setattr(
        page,
        "time",
        SimpleNamespace(  # other threads use time.sleep
            strftime=time.strftime,
            sleep=lambda s: naps.append((s, 'http-equiv="refresh"' in out.read_text())),
        ),
    )
    assert page.main([str(runs[1]), f"--out={out}", "--watch"]) == 0
    assert (
        naps == [(page.WATCH_EVERY_S, True)] * 2 and 'http-equiv="refresh"' not in out.read_text()
    )


def test_a_run_without_steps_has_a_page_and_missing_plotly_is_named(tmp_path, monkeypatch):
    (tmp_path / "new").mkdir()
    write_json(
        tmp_path / "new" / "config.json", {"max_seq_len": T, "derived": {"num_iterations": 60}}
    )
    text, _ = write([tmp_path / "new"], tmp_path / "page.html")
    assert "No step was logged" in text and ">0 / 60<" in text
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert "pip install -e '.[page]'" in command(page.main, tmp_path / "new").err


PROBE = """<script>addEventListener("load", () => drawn.then(() => {
  const plots = [...document.querySelectorAll(".plot")].map(div => [div.id, div.data.map(trace => trace.y.length)]);
  const result = document.createElement("pre"); result.id = "result";
  const texts = (id, selector) =>
    [...document.getElementById(id).querySelectorAll(selector)].map(element => element.textContent);
  result.textContent = JSON.stringify({ plots, requests: performance.getEntriesByType("resource").map(e => e.name),
    images: document.images.length,
    norms: texts("Gradient norm", ".ytick text"), legend: texts("Loss, nats per token", ".legendtext"),
    order: document.getElementById("Loss, nats per token")._fullLayout.legend.traceorder,
    dotted: Object.fromEntries(
      [...document.querySelectorAll(".plot")].map(div => [div.id, div.layout.shapes.length])),
    wide: document.documentElement.scrollWidth, inner: innerWidth,
    digest: document.getElementById("digest-1").textContent });
  document.body.append(result);
}))</script>"""


def in_browser(text, folder):
    """(what PROBE finds in a page, the lines on the console) in headless Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs chromium (Debian: apt-get install chromium)")
    (folder / "page.html").write_text(text.replace("</body>", PROBE + "</body>"))
    done = subprocess.run(
        [
            browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--virtual-time-budget=1000",
            "--enable-logging=stderr",
            "--dump-dom",
            f"--user-data-dir={folder / 'profile'}",
            f"file://{folder / 'page.html'}",
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    [found] = re.findall(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    return json.loads(unescape(found)), console


def test_a_browser_shows_it_without_an_error_or_a_request(runs, tmp_path):
    """Headless Chromium logs no error and requests nothing; the curves have the points of the
    log."""
    text, _ = write(runs, tmp_path / "page.html")
    result, console = in_browser(text, tmp_path)
    assert console == []
    plots = dict(result["plots"])
    assert result["requests"] == [] and result["images"] == 0 and result["wide"] <= result["inner"]
    assert plots[page.LOSS] == [STEPS] * 4 and plots["timeline"]
    assert plots[page.BPB] == plots[f"{page.BPB}: {EVIL}"] == [2, 2]
    assert all(points for points in plots.values()) and set(plots["mix-1"]) == {STEPS}
    # in the order of the cards, also with bands, for which plotly reverses it
    assert result["legend"] == ["<b>one & only", "two"] and result["order"] == "normal"
    assert result["norms"] == ["0.5", "1", "2", "5", "10", "20"]
    assert result["digest"] == f"{STEPS - 1:016x}"


def test_only_the_launches_of_runs_with_a_curve_have_a_line_in_a_chart(runs, tmp_path):
    """Regression: the resume of a run without buckets had a line in the charts of buckets."""
    plain = make_run(tmp_path / "plain")
    path = plain / "logs" / "train.jsonl"
    path.write_text(path.read_text().replace('"loss/web"', '"other"'))
    text, _ = write([runs[0], plain], tmp_path / "page.html")
    result, _ = in_browser(text, tmp_path)
    dotted = result["dotted"]
    assert dotted["Loss by bucket: web"] == 1
    assert dotted["mix-0"] == dotted["mix-1"] == 1
    assert dotted[page.LOSS] == dotted["timeline"] == 2


def test_only_the_chart_of_waits_is_clipped(tmp_path):
    text, data = write([make_run(tmp_path / "run", slowest_wait_s=9.0)], tmp_path / "page.html")
    [chart] = [chart for chart in data["charts"] if "range" in chart.get("y", {})]
    assert chart["id"] == page.WAIT and "(clipped)" in chart["title"] and "(clipped)" in text
    assert chart["y"]["range"] == [0, pytest.approx(75)]
    assert max(curves(data["runs"][0])[page.WAIT, "wait_s"]) == 9000


def test_the_grid_has_no_empty_slot_and_points_and_raw_lines_are_visible():
    """As far as a test can tell without a browser."""
    text = Path(page.__file__).with_name("page.html").read_text()
    assert re.search(
        r"\.charts \{ display: flex; flex-wrap: wrap.*\.charts \.card \{[^}]*flex: 1 1", text, re.S
    )
    assert float(re.search(r"prefers-color-scheme: dark.*?--raw: ([\d.]+)", text, re.S)[1]) >= 0.7
    assert (
        "td { overflow-wrap: break-word;" in text
    )  # `anywhere` lets a narrow table break any word
    assert "marker: { size: 8 }" in text and 'cliponaxis: series.look !== "points"' in text


def test_runs_of_the_same_color_have_other_dashes():
    """Regression: the ninth run had the curve of the first."""
    looks = [page.swatch(SimpleNamespace(index=index, name="run")) for index in range(32)]  # type: ignore[arg-type]
    assert len(set(looks)) == 32
