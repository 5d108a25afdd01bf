"""Sweeps: tables against the logs of runs, laws and best sizes against data of a known law, and the
shell scripts."""

import csv
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from nanochat.common import read_json, write_json
from nanochat.run_dir import read_config
from nanochat.run_reader import RunReader
from scripts import base_train, sweep
from tests import training
from tests.checkpoints import of_other_code

ROOT = Path(__file__).parents[2]
SIZES = {"small": 12, "medium": 24, "large": 36}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Completed runs of three sizes, and an unfinished run."""
    with training.workplace(tmp_path_factory.mktemp("sweep")) as path:
        for tag, width in SIZES.items():
            flags = {
                **training.SMALL,
                "aspect_ratio": width,
                "num_iterations": width // 6,
                "eval_every": 9,
            }
            assert training.run(**flags, model_tag=f"s_{tag}").code == 0
        (path / "runs" / "s_unfinished").mkdir()
        (path / "runs" / "s_unfinished" / "config.json").write_text('{"max_seq_len": 15}')
        yield path


def test_a_row_has_the_logged_values_of_its_run(runs, capsys):
    assert sweep.main(["--prefix=s_", f"--out={runs / 'out'}"]) == 0
    output = capsys.readouterr().out
    assert "skipped: s_unfinished has not completed" in output
    rows = list(csv.DictReader((runs / "out" / "results.csv").read_text().splitlines()))
    assert [row["run"] for row in rows] == ["s_small", "s_medium", "s_large"]
    for row in rows:
        derived = read_config(runs / "runs" / row["run"])["derived"]
        log = training.steps(row["run"])
        last = log[max(log)]
        assert float(row["flops"]) == last["total_training_flops"] == derived["total_flops"]
        assert int(row["tokens"]) == derived["total_tokens"] and float(row["val_bpb"]) > 0
        assert float(row["train_time_s"]) == pytest.approx(last["total_training_time"])
        assert row["core"] == row["peak_memory_bytes"] == row["flops_budget"] == ""
    core = {"core_metric": 0.5, "results": {"arc": 0.5, "piqa": 0.5}, "items": 40}
    older = {"step": 1, "val_bpb": 9, "core": core, "train_bpb": {}, "samples": {}}
    write_json(runs / "runs" / "s_small" / "eval.json", older)
    row = sweep.read_row(runs / "runs" / "s_small")
    assert row["core"] is None, "it is not that of the last step"
    last_step = RunReader(runs / "runs" / "s_small").num_steps
    write_json(runs / "runs" / "s_small" / "eval.json", {**older, "step": last_step})
    row = sweep.read_row(runs / "runs" / "s_small")
    assert (row["core"], row["core_tasks"], row["core_items"]) == (0.5, 2, 40)
    laws = list(csv.DictReader((runs / "out" / "fit.csv").read_text().splitlines()))
    assert [(law["points"], law["of"]) for law in laws] == [
        ("3", "params_scaling"),
        ("3", "tokens"),
    ]
    assert output.count("one standard error)") == 2


@pytest.mark.parametrize(
    "tags, why",
    [
        (["s_small"], "the runs have 1 size, but a law needs at least 3"),
        (["s_small", "s_large"], "the runs have 2 sizes, but a law needs at least 3"),
        (
            ["s_small", "s_medium", "s_large", "other"],
            "s_small and other have different data or tokenizers",
        ),
    ],
)
def test_runs_without_a_sweep_get_a_table_but_no_laws(runs, tmp_path, tags, why, capsys):
    """Regression: laws were fitted to any two runs."""
    if "other" in tags:
        shutil.copytree(runs / "runs" / "s_large", runs / "runs" / "other")
        manifest = runs / "runs" / "other" / "data_manifest.json"
        manifest.write_text(manifest.read_text().replace('"footer": "', '"footer": "0'))
    assert sweep.main([*tags, f"--out={tmp_path}"]) == 0
    output = capsys.readouterr().out
    assert f"no laws: {why}" in output and "FLOPs^" not in output
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + len(tags)
    assert (tmp_path / "fit.csv").read_text().splitlines() == [",".join(sweep.LAW_COLUMNS)]


def test_the_budget_is_that_of_the_newest_launch(runs, tmp_path):
    """Regression: a run whose --target-flops a resume had raised counted to its first budget."""
    raised = shutil.copytree(runs / "runs" / "s_large", tmp_path / "raised")
    log = raised / "logs" / "train.jsonl"
    started, rest = log.read_text().split("\n", 1)
    started = {**json.loads(started), "changed": {"target_flops": 5e9}}
    assert started["event"] == "started"
    log.write_text(f"{json.dumps(started)}\n{rest}")
    assert sweep.read_row(raised)["flops_budget"] == 5e9


def test_different_validation_text_is_named_above_the_table(runs, tmp_path, capsys):
    """Regression: bits per byte that cannot be compared were in one table without a word."""
    other = shutil.copytree(runs / "runs" / "s_large", tmp_path / "other")
    manifest = read_json(other / "data_manifest.json", dict)
    manifest["val"]["data"]["files"][0]["footer"] += "0"
    write_json(other / "data_manifest.json", manifest)
    warning = "warning: different validation text: bits per byte cannot be compared"
    assert sweep.main(["s_small", str(other), f"--out={tmp_path}"]) == 0
    assert 0 <= (output := capsys.readouterr().out).find(warning) < output.index("val_bpb")
    assert sweep.main(["s_small", "s_large", f"--out={tmp_path}"]) == 0
    assert warning not in capsys.readouterr().out


def test_other_model_code_is_named_above_the_table(runs, tmp_path, capsys):
    other = shutil.copytree(runs / "runs" / "s_large", tmp_path / "other")
    of_other_code(other)
    for name, is_other in ((str(other), True), ("s_large", False)):
        assert sweep.main(["s_small", name, f"--out={tmp_path}"]) == 0
        output = capsys.readouterr().out.partition("val_bpb")[0]
        assert ("warning: the runs differ in code of nanochat/gpt.py" in output) == is_other


def synthetic_runs(budgets, sizes):
    """Runs with the best size 0.1 * FLOPs^0.5: parabolas in log(parameters) with a little noise."""
    rng = np.random.default_rng(0)
    return [
        {
            "run": "r",
            "flops_budget": C,
            "flops": C,
            "params_scaling": N,
            "tokens": C / (6 * N),
            "val_bpb": 1 + 0.1 * np.log(N / (0.1 * C**0.5)) ** 2 + rng.normal(0, 1e-5),
        }
        for C in budgets
        for N in sizes
    ]


def test_a_known_law_is_recovered_within_its_error():
    points = sweep.points_of(synthetic_runs([1e12, 1e13, 1e14, 1e15], np.geomspace(2e4, 1e7, 9)))
    assert {point["how"] for point in points} == {"minimum of a parabola"}
    for what in ("params_scaling", "tokens"):
        law = sweep.power_law(points, what)
        assert (
            abs(law["exponent"] - 0.5) < max(0.01, 3 * law["standard_error"])
            and law["standard_error"] < 0.01
        )
        assert f"(exponent ± {law['standard_error']:.2g}, one standard error)" in sweep.formula(law)
        [line] = csv.DictReader(sweep.to_csv(sweep.LAW_COLUMNS, [law]).splitlines())
        assert float(line["standard_error"]) == law["standard_error"], "fit.csv contains the error"
    assert sweep.power_law(points, "params_scaling")["factor"] == pytest.approx(0.1, rel=0.3)


def test_the_error_is_that_of_least_squares_and_two_budgets_have_none():
    """Regression: for two budgets, a third run gave a line through two points an error near 0."""
    points = [
        {"flops": C, "tokens": tokens}
        for C, tokens in ((1e10, 1e5), (1e11, 4e5), (1e12, 9e5), (1e13, 4e6))
    ]
    law, x = sweep.power_law(points, "tokens"), np.log([point["flops"] for point in points])
    expected = np.polyfit(x, np.log([point["tokens"] for point in points]), 1, cov=True)
    assert (law["exponent"], law["standard_error"]) == pytest.approx(
        (expected[0][0], expected[1][0, 0] ** 0.5)
    )
    law = sweep.power_law([*points[:2], {"flops": 1.001e11, "tokens": 4.001e5}], "tokens")
    assert law["points"] == 3 and law["standard_error"] is None


def test_a_best_size_at_the_edge_is_reported():
    [point] = sweep.points_of(synthetic_runs([1e12], np.geomspace(1e6, 1e7, 4)))
    assert point["params_scaling"] == 1e6 and "no minimum between the sizes" in point["how"]


@pytest.mark.parametrize("script, num_runs", [("miniseries", 3), ("scaling_laws", 9)])
@pytest.mark.parametrize("tiny", ["", "1"])
def test_the_shell_scripts_print_valid_commands(tmp_path, script, num_runs, tiny):
    lines = subprocess.run(
        ["bash", f"runs/{script}.sh", "name"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
        env={**os.environ, "DRY_RUN": "1", "TINY": tiny, "NANOCHAT_BASE_DIR": str(tmp_path)},
    ).stdout.splitlines()
    trained = [
        line.split("scripts.base_train ")[1].split() for line in lines if "base_train" in line
    ]
    assert len(trained) >= num_runs and len(trained) == len({tuple(flags) for flags in trained})
    for flags in trained:
        base_train.parse_args(flags[1:] if flags[0] == "--" else flags)
    [line] = [line for line in lines if "scripts.sweep" in line]
    assert len(sweep.parse_args(line.split("scripts.sweep ")[1].split()).runs) == len(trained)
    assert not list(tmp_path.iterdir())
