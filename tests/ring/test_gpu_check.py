"""dev.gpu_check on a CPU: every part runs, and a figure that misses its limit fails."""

import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch

from dev import gpu_check
from nanochat import optim
from nanochat.cli import Parser
from tests import training

NANOCHAT = """import sys
import nanochat.common, scripts.base_eval, wandb
num = int(next(flag for flag in sys.argv if flag.startswith("--num-iterations")).partition("=")[2])
for step in range(num):
    print(f"step {step:05d} | loss: 9.0 | tok/sec: {1000 * (step + 1):,} | bf16_mfu: 0.00", flush=True)
for module in (nanochat.common, scripts.base_eval, wandb):
    print("imported", module.__file__)
"""


def write_nanochat(folder):
    """A small checkout of nanochat, whose scripts/ has no __init__.py."""
    files = {
        "scripts/base_train.py": NANOCHAT,
        "scripts/base_eval.py": "",
        "nanochat/__init__.py": "",
        "nanochat/common.py": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(path, capsys, *flags):
    """(exit code, rows of the table) of the script on a CPU, with the data and tokenizer of the
    tests."""
    with training.workplace(path):
        code = gpu_check.main(["--device=cpu", "--tiny", f"--base-dir={path}", *flags])
    printed = capsys.readouterr().out.splitlines()
    return code, printed[printed.index("") + 2 : -1]


def test_every_part_runs_and_reports_each_measure(tmp_path, capsys):
    code, rows = run(tmp_path, capsys, f"--peer={write_nanochat(tmp_path / 'nanochat')}")
    assert code == 0, rows
    assert [name for name in gpu_check.LIMITS if not any(name in row for row in rows)] == []
    for way in (
        "pending leaves on host",
        "activation_checkpointing True",
        "dtype float32",
        "attention_mode sdpa_mask",
    ):
        assert any(
            row.startswith("bits") and "places that differ" in row and way in row for row in rows
        )
    assert (
        sum(row.endswith("good") for row in rows) > 20
        and sum(row.endswith("reported") for row in rows) > 4
    )
    assert any("tokens/s over nanochat's" in row and row.endswith("reported") for row in rows)
    logs = {path.name for path in (tmp_path / "out").iterdir()}
    assert logs >= {"peer.log", "straight.log", "d24-SSSL.log"}
    assert [*(tmp_path / "out" / "d24-SSSL").iterdir()] and not (tmp_path / "runs").exists()


def test_nanochat_imports_only_its_own_modules_and_wandb_is_replaced_where_it_is_missing(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with training.workplace(tmp_path):
        _, bench = gpu_check.open_bench(
            Parser(), ["--device=cpu", "--tiny", f"--base-dir={tmp_path}"]
        )
        bench.peer = write_nanochat(tmp_path / "nanochat")
        rates = [figure for measure, _, figure in gpu_check.peer(bench) if measure == "tokens/s"]
    code = tmp_path / "peer" / "code"
    imported = [
        Path(line.split()[1])
        for line in (bench.out / "peer.log").read_text().splitlines()
        if line.startswith("imported")
    ]
    assert imported == [
        code / "nanochat/common.py",
        code / "scripts/base_eval.py",
        code / "wandb.py",
    ]
    assert rates == [4000.0]


def test_children_get_no_variable_that_was_set_for_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_USER", "1")
    bench = gpu_check.Bench(
        torch.device("cpu"), gpu_check.TINY, tmp_path, tmp_path, added=frozenset({"OURS"})
    )
    monkeypatch.setenv("OURS", "1")
    assert gpu_check.child_environment(bench).keys() & {"OURS", "OF_THE_USER"} == {"OF_THE_USER"}


def test_a_parameter_whose_bits_depend_on_the_order_is_counted(tmp_path, monkeypatch):
    bench = gpu_check.Bench(torch.device("cpu"), gpu_check.TINY, tmp_path, tmp_path)
    update = optim.muon_update
    first = []

    def disturb_one(param, *args, **kwargs):
        update(param, *args, **kwargs)
        if not first:
            param[0, 0] += 1
        first.append(param)

    def differing():
        first.clear()
        [(_, _, num)] = gpu_check.order_of_parameters(bench)
        return num

    assert differing() == 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # updates in order
    monkeypatch.setattr(optim, "muon_update", disturb_one)
    assert differing() == 1


@pytest.mark.parametrize(
    ("pattern", "kernel", "priced"), [("SSSL", "wheel", True), ("L", "cudnn", False)]
)
def test_determinism_is_priced_only_between_runs_with_the_same_kernel(
    tmp_path, monkeypatch, pattern, kernel, priced
):
    steps = [{"tokens_per_s": 2.0, "mfu": 0.5, "wait_s": 0.0, "step_s": 1.0}] * 20
    given = []
    monkeypatch.setattr(
        gpu_check, "train", lambda bench, tag, **flags: given.append(flags) or steps
    )
    monkeypatch.setattr(
        gpu_check,
        "figures_of",
        lambda bench, what, tag, timed: bench.rates.update({what: 2.0}) or (),
    )
    monkeypatch.setattr(gpu_check.shutil, "copytree", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    bench = gpu_check.Bench(
        torch.device("cuda"), gpu_check.TINY, tmp_path, tmp_path, rates={f"d24 {pattern}": 1.9}
    )
    figures = [*gpu_check.speed(bench, "d24", pattern, deterministic=False, kernel=kernel)]
    assert [flags["attention_kernel"] for flags in given] == [kernel]
    assert [measure for measure, _, _ in figures] == ["d24: cost of determinism, %"] * priced


@pytest.mark.parametrize(("share", "verdict"), [(0.99, "FAILS"), (1.01, "good"), (1.09, "FAILS")])
def test_a_memory_estimate_below_the_reserved_memory_or_far_above_it_fails(
    tmp_path, monkeypatch, share, verdict
):
    reserved = 7_000_000_000
    step = {
        "tokens_per_s": 2.0,
        "mfu": 0.5,
        "wait_s": 0.0,
        "step_s": 1.0,
        "peak_memory_bytes": reserved // 2,
        "reserved_memory_bytes": reserved,
    }
    monkeypatch.setattr(gpu_check, "read_config", lambda run_dir: {})
    monkeypatch.setattr(
        gpu_check, "estimate_memory", lambda settings, room: {"all": share * reserved}
    )
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    bench = gpu_check.Bench(torch.device("cpu"), gpu_check.TINY, tmp_path, tmp_path)
    figures = {
        measure: figure
        for measure, _, figure in gpu_check.figures_of(bench, "d12", "straight", [step])
    }
    measure = "memory estimate, % above reserved"
    assert gpu_check.judge(figures[measure], gpu_check.LIMITS[measure]) == verdict


def test_a_figure_beyond_its_limit_or_a_broken_check_fails_and_the_others_still_run(
    tmp_path, capsys
):
    def bad(bench):
        yield "places that differ", "these", 3.0

    def broken(bench):
        raise RuntimeError("and more\nno such kernel")

    def fine(bench):
        yield "places that differ", "those", 0.0
        bench.end = 0.0

    checks = {"correct": [bad, broken, fine, fine]}
    with mock.patch.object(gpu_check, "checks_of", lambda bench: checks):
        code, rows = run(tmp_path, capsys, "--part=correct")
    assert code == 1 and [row.split()[-1] for row in rows] == ["FAILS", "FAILS", "good", "run"]
    assert rows[3].endswith("not run")
    assert (
        "no such kernel" in rows[1] and "and more" in (tmp_path / "out" / "errors.log").read_text()
    )
    assert gpu_check.judge(float("nan"), "<= 1") == "FAILS"
    with pytest.raises(ValueError, match="--tiny"):
        gpu_check.main(["--device=cpu"])
    with pytest.raises(ValueError, match=r"--peer .*: it has no scripts/base_train.py"):
        run(tmp_path, capsys, f"--peer={tmp_path}")
