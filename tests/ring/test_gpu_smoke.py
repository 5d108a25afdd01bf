"""dev.gpu_smoke on a CPU: every check runs, and a difference in bits fails."""

import tempfile

import pytest
import torch

from dev import gpu_check, gpu_smoke
from nanochat.cli import Parser
from nanochat.optim import MuonAdamW
from tests import training


def run(capsys, *flags):
    """(exit code, rows of the table) of the script on a CPU."""
    code = gpu_smoke.main(["--device=cpu", "--tiny", *flags])
    printed = capsys.readouterr().out.splitlines()
    return code, printed[printed.index("") + 2 : -1]


def test_every_check_runs_on_a_cpu(tmp_path, capsys):
    with training.workplace(tmp_path):
        code, rows = run(capsys, f"--base-dir={tmp_path}")
    assert code == 0, rows
    for name in (
        "MFU",
        "memory estimate",
        "waiting for data",
        "attention: gradients",
        "sampled tokens that differ",
    ):
        assert any(name in row for row in rows)
    compared = [row for row in rows if "places that differ" in row]
    expected = {
        "same command": "good",
        "empty cache": "not measured here",
        "killed and resumed": "good",
    }
    # a CPU compiles nothing
    for (name, verdict), row in zip(expected.items(), compared, strict=True):
        assert name in row and row.endswith(verdict)
    assert not (tmp_path / "runs").exists()


def test_only_after_a_failure_the_temporary_folder_stays(tmp_path, capsys, monkeypatch):
    def differs(bench):
        yield "places that differ", "these", 1.0

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    for checks, verdicts in (
        ([gpu_smoke.generation], ["good"]),
        ([differs, gpu_smoke.generation], ["FAILS", "good"]),
    ):
        monkeypatch.setattr(gpu_smoke, "CHECKS", checks)
        code, rows = run(capsys)
        assert [row.split()[-1] for row in rows] == verdicts
        assert code == len([*tmp_path.glob("gpu-*")]) == verdicts.count("FAILS")


def opened(path):
    """The bench of the script, in the workplace of the tests."""
    return gpu_check.open_bench(Parser(), ["--device=cpu", "--tiny", f"--base-dir={path}"])[1]


def forget_the_optimizer():
    """A hook: resume without the saved state of the optimizer."""
    MuonAdamW.load_state = lambda self, state: None


def change_a_bit():
    """A hook: change the last bit of one weight before the fourth step."""
    step, calls = MuonAdamW.step, []

    def changed(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 4:
            [weight] = next(
                group["params"]
                for group in self.param_groups
                if group["names"] == ["lm_head.weight"]
            )
            weight.detach().view(torch.int32)[3, 3] ^= 1
        return step(self, *args, **kwargs)

    MuonAdamW.step = changed


_, SAME_COMMAND, _, RESUMED = gpu_smoke.CHECKS[:4]


@pytest.mark.parametrize(
    ("check", "hook"),
    [(SAME_COMMAND, change_a_bit), (RESUMED, forget_the_optimizer)],
    ids=["a changed bit", "a resume that forgets the optimizer"],
)
def test_a_difference_is_counted(tmp_path, monkeypatch, check, hook):
    def hooked(bench, tag, *, dies=False, **options):
        last = not tag.startswith("straight") and not dies
        return train(bench, tag, dies=dies, **{**options, **({"hook": hook} if last else {})})

    train = gpu_check.train
    monkeypatch.setattr(gpu_check, "train", hooked)
    with training.workplace(tmp_path):
        [(measure, _, figure)] = check(opened(tmp_path))
    assert gpu_check.judge(figure, gpu_smoke.LIMITS[measure]) == "FAILS"


def test_a_run_that_was_not_resumed_is_not_called_resumed(tmp_path, monkeypatch):
    def never_killed(bench, tag, *, dies=False, **options):
        return [] if dies else train(bench, tag, **options)

    train = gpu_check.train
    monkeypatch.setattr(gpu_check, "train", never_killed)
    with (
        training.workplace(tmp_path),
        pytest.raises(ValueError, match=r"began at steps \[0\], expected \[0, 3\]"),
    ):
        [*RESUMED(opened(tmp_path))]
