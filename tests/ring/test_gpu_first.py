"""dev.gpu_first on a CPU: every check runs or says why not, none costs another, and `again`
continues."""

import json
import multiprocessing
import os
import subprocess
import tarfile
import time
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest

from dev import gpu_check, gpu_first
from dev.gpu_first import Check
from nanochat.optim import MuonAdamW
from tests import training
from tests.crashes import die
from tests.ring.test_gpu_check import write_nanochat
from tests.ring.test_gpu_smoke import change_a_bit

ROOT = Path(__file__).parents[2]
NEED_A_GPU = {"curve bfloat16", "compiled varlen", "compiled flex"}
NAMED = {check.name: check for check in gpu_first.CHECKS}


def call(base, name="first", *flags, out=None):
    """(exit code, lines of the results) of one call."""
    out = out or base / "out-first"
    code = gpu_first.main(
        [name, "--device=cpu", "--tiny", f"--base-dir={base}", f"--out={out}", *flags]
    )
    return code, [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def ends(records):
    return {record["check"]: record["ended"] for record in records if "ended" in record}


def figures(records):
    return [record for record in records if "measure" in record]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """(base directory, exit code, lines) of a call that runs everything."""
    base = tmp_path_factory.mktemp("first").resolve()
    with training.workplace(base):
        return base, *call(base, "first", f"--peer={write_nanochat(base / 'nanochat')}")


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A function that replaces the table of checks; the test runs in a workplace of its own."""
    with training.workplace(tmp_path):
        yield lambda *checks: monkeypatch.setattr(gpu_first, "CHECKS", checks)


def fine(bench):
    yield "places that differ", "these", 0


# ---- everything ----------------------------------------------------------------------------------


def test_every_check_ends_with_a_figure_or_says_that_it_needs_a_gpu(rehearsed):
    _, code, records = rehearsed
    assert code == 0, [r for r in records if r.get("why") or r.get("verdict") == "FAILS"]
    assert ends(records) == {name: "skipped" if name in NEED_A_GPU else "done" for name in NAMED}
    assert all(record["why"] for record in records if record.get("ended") == "skipped")
    assert {record["check"] for record in figures(records)} == set(NAMED) - NEED_A_GPU


def test_every_limit_is_that_of_a_figure(rehearsed):
    measures = {record["measure"] for record in figures(rehearsed[2])}
    assert set(gpu_first.LIMITS) - measures == {"bfloat16: loss, nats from the CPU's"}


def test_our_speed_is_compared_with_nanochats_run_of_the_same_shape(rehearsed):
    ours, theirs, ratio = (
        next(r["value"] for r in figures(rehearsed[2]) if (r["measure"], r["case"]) == wanted)
        for wanted in (
            ("tokens/s", "d12 L --no-deterministic"),
            ("tokens/s", "nanochat's d12 L"),
            ("tokens/s over nanochat's", "d12 L"),
        )
    )
    assert ratio == ours / theirs


def test_the_second_call_runs_only_what_is_missing_and_its_new_folder_has_all_lines(
    rehearsed, tmp_path
):
    base, _, before = rehearsed
    with training.workplace(tmp_path / "elsewhere"):
        code, records = call(base, "again", out=tmp_path)
    assert code == 0 and records[: len(before)] == before
    assert set(ends(records[len(before) :])) == NEED_A_GPU and not figures(records[len(before) :])


# ---- one check never costs another ---------------------------------------------------------------


def test_a_run_that_takes_too_long_is_killed_and_the_next_check_runs(plan, tmp_path):
    def hangs(bench):
        yield "places that differ", "before", 0
        gpu_check.train(bench, "hangs", hook=wait_forever, **bench.sizes.runs)

    plan(Check("hangs", 0, 1, hangs), Check("fine", 0, 60, fine))
    code, records = call(tmp_path)
    assert code == 1 and ends(records) == {"hangs": "killed", "fine": "done"}
    assert [record["case"] for record in figures(records)] == ["before", "these"]
    assert not multiprocessing.active_children()


def wait_forever():
    """A hook."""
    time.sleep(3600)


def test_a_check_on_the_device_that_takes_too_long_is_killed_and_the_next_check_runs(
    plan, tmp_path
):
    plan(NAMED["compiled model"]._replace(least_s=0, most_s=0.01), Check("fine", 0, 60, fine))
    code, records = call(tmp_path)
    assert code == 1 and ends(records) == {"compiled model": "killed", "fine": "done"}
    assert not multiprocessing.active_children()


def test_a_check_that_crashes_its_process_fails_and_the_next_check_runs(
    plan, tmp_path, monkeypatch
):
    launch = training.launch
    monkeypatch.setattr(
        training, "launch", lambda main, argvs, envs: launch(main, argvs, envs, die)
    )
    plan(NAMED["attention"], Check("fine", 0, 60, fine))
    code, records = call(tmp_path)
    assert code == 1 and ends(records) == {"attention": "failed", "fine": "done"}


def test_figures_are_in_the_file_when_the_call_is_interrupted(plan, tmp_path):
    def interrupted(bench):
        yield "places that differ", "before", 0
        os.kill(os.getpid(), 15)
        time.sleep(60)

    plan(Check("interrupted", 0, 60, interrupted))
    with pytest.raises(KeyboardInterrupt):
        call(tmp_path, out=tmp_path / "results")
    lines = (tmp_path / "results" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line).get("case") for line in lines] == [None, "before"]


# ---- the second call -----------------------------------------------------------------------------


def test_a_check_that_no_longer_fits_is_skipped_and_the_second_call_runs_it(plan, tmp_path):
    plan(Check("fine", 0, 60, fine), Check("long", 1000, 1000, fine))
    assert ends(call(tmp_path, "first", "--seconds=900")[1]) == {"fine": "done", "long": "skipped"}
    _, records = call(tmp_path, "again", "--seconds=2000")
    began = [record.get("call") for record in records].index("again")
    assert ends(records[began:]) == {"long": "done"}


def test_a_check_that_failed_comes_last_in_the_second_call():
    checks = [Check(name, 0, 1, fine) for name in "abcd"]
    ended = {"a": "killed", "b": "failed", "c": "done", "d": "skipped"}
    left = gpu_first.missing(checks, {name: {"ended": how} for name, how in ended.items()})
    assert [check.name for check in left] == ["d", "a", "b"]


def leave_behind(base, *tags):
    """Runs that were killed after a save."""
    bench = gpu_check.make_bench("cpu", base, tiny=True)
    for tag in tags:
        hook = partial(training.die_after_step, 4)
        gpu_check.train(bench, tag, hook=hook, dies=True, **bench.sizes.runs)


def test_runs_of_a_check_that_was_killed_do_not_count(plan, tmp_path):
    plan(NAMED["training"], NAMED["killed and resumed"])
    leave_behind(tmp_path, "straight", "killed-and-resumed")
    code, records = call(tmp_path, "again")
    assert code == 0 and ends(records)["killed and resumed"] == "done"


def test_a_run_is_not_repeated_before_it_is_complete(plan, tmp_path):
    plan(NAMED["same command"])
    leave_behind(tmp_path, "straight")
    code, records = call(tmp_path, "again")
    assert code == 0 and ends(records) == {"same command": "skipped"}


def test_the_first_call_starts_over_and_keeps_the_lines(plan, tmp_path):
    plan(Check("fine", 0, 60, fine))
    _, once = call(tmp_path)
    _, twice = call(tmp_path)
    assert twice[: len(once)] == once and len(figures(twice)) == 2
    assert len(gpu_first.Results(tmp_path, tmp_path / "out-first").read()) == len(once)


def test_speeds_of_the_first_call_are_compared_with_those_of_the_second(plan, tmp_path):
    def faster(bench):
        yield "tokens/s over nanochat's", "this", bench.rates["d24"] / 2

    plan(
        Check("d24", 0, 60, lambda bench: iter([("tokens/s", "d24", 6.0)])),
        Check("faster", 1000, 1000, faster),
    )
    call(tmp_path, "first", "--seconds=900")
    assert figures(call(tmp_path, "again", "--seconds=2000")[1])[-1]["value"] == 3.0


# ---- the checks check ----------------------------------------------------------------------------


def hooked(monkeypatch, tag, **changes):
    """Start the run `tag` with other options."""
    train = gpu_check.train

    def changed(bench, its_tag, **options):
        return train(bench, its_tag, **options | (changes if its_tag == tag else {}))

    monkeypatch.setattr(gpu_check, "train", changed)


def climb():
    """A hook: every gradient has the wrong sign."""
    step = MuonAdamW.step

    def upwards(self, *args, **kwargs):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.neg_()
        return step(self, *args, **kwargs)

    MuonAdamW.step = upwards


@pytest.mark.parametrize(
    ("checks", "tag", "changes", "measure"),
    [
        (
            ["training", "same command"],
            "same-command",
            {"hook": change_a_bit},
            "places that differ",
        ),
        (["curve float32"], "curve-float32", {"hook": climb}, "float32: loss, nats from the CPU's"),
        (["curve float32"], "curve-float32", {"data_seed": 1}, "steps with other rows"),
    ],
    ids=["a changed bit", "wrong gradients", "other rows"],
)
def test_a_fault_fails(plan, tmp_path, monkeypatch, checks, tag, changes, measure):
    hooked(monkeypatch, tag, **changes)
    plan(*(NAMED[name] for name in checks))
    code, records = call(tmp_path)
    assert code == 1
    assert "FAILS" in [
        record["verdict"] for record in figures(records) if record["measure"] == measure
    ], records


def test_the_log_says_where_a_bit_differs(plan, tmp_path, monkeypatch, capsys):
    hooked(monkeypatch, "same-command", hook=change_a_bit)
    plan(NAMED["training"], NAMED["same command"])
    call(tmp_path)
    assert "  same command: checkpoint 6 differs in" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_kernel_that_does_not_run_is_explained_and_costs_no_other_figure(
    plan, tmp_path, monkeypatch, error
):
    def refuse(*args, **kwargs):
        raise error("no such kernel here")

    monkeypatch.setattr(gpu_first, "activate_kernel", refuse)
    bench = gpu_check.make_bench("cpu", tmp_path, tiny=True)
    assert (
        gpu_first.kernels_of_attention(bench, "cudnn") == f"{error.__name__}: no such kernel here"
    )


def test_data_and_tokenizer_are_made_on_a_machine_that_has_none_of_the_packages_of_the_sample_corpus(
    tmp_path, monkeypatch
):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "")
    bench = gpu_check.make_bench("cpu", tmp_path, tiny=True)
    assert [*(bench.base / "data").glob("*.parquet")] and (
        bench.base / "tokenizer" / "tokenizer.json"
    ).exists()


# ---- the shell -----------------------------------------------------------------------------------


def shell(tmp_path, *words, code=0):
    """The outcome of dev/gpu_first.sh with an interpreter that only prints its arguments and exits
    with `code`."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho ran "$@"\necho PYTHONPATH is $PYTHONPATH\nexit {code}\n')
    python.chmod(0o755)
    env = os.environ | {
        "PYTHON": str(python),
        "BASE": str(tmp_path / "base"),
        "OUT": str(tmp_path / "out"),
        "NANOCHAT": "/theirs",
    }
    return subprocess.run(
        ["bash", str(ROOT / "dev" / "gpu_first.sh"), *words],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_the_script_passes_its_arguments_on_and_keeps_the_exit_code_the_output_and_the_logs(
    tmp_path,
):
    for log in (
        "out/errors.log",
        "runs/straight/logs/train.jsonl",
        "runs/straight/checkpoints/large",
    ):
        (tmp_path / "base" / log).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "base" / log).touch()
    done = shell(tmp_path, "again", "77", code=1)
    expected = f"ran -m dev.gpu_first again --seconds=77 --base-dir={tmp_path}/base --out={tmp_path}/out --peer=/theirs"
    assert (
        done.returncode == 1 and expected in (tmp_path / "out" / "log.txt").read_text().splitlines()
    )
    with tarfile.open(tmp_path / "out" / "logs.tgz") as logs:
        names = [name for name in logs.getnames() if not name.endswith("out")]
    assert names == ["out/errors.log", "runs/straight/logs/train.jsonl"]


@pytest.mark.parametrize("words", [(), ("second",)], ids=["none", "unknown"])
def test_the_script_explains_its_argument(tmp_path, words):
    done = shell(tmp_path, *words)
    assert (
        done.returncode == 2
        and "gpu_first.sh again [SECONDS]" in done.stdout
        and "ran" not in done.stdout.split()
    )
