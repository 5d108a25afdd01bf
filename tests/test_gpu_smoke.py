"""The smoke test for GPUs runs on a CPU, and fails when bits differ."""

import pytest

from dev import gpu_smoke
from tests import training


def run(path, capsys):
    """(exit code, lines of the table) of the script on a CPU."""
    with training.workplace(path):
        code = gpu_smoke.main(["--device=cpu", "--tiny", f"--base-dir={path}"])
    printed = capsys.readouterr().out.splitlines()
    return code, printed[printed.index("") + 2:]


def test_every_check_runs_on_a_cpu(tmp_path, capsys):
    code, rows = run(tmp_path, capsys)
    assert code == 0, rows
    assert [name for name in gpu_smoke.LIMITS if not any(row.startswith(name) for row in rows)] == []
    bits = [row.split()[-1] for row in rows if row.startswith("places that differ")]
    assert bits == ["good", "here", "good"], "an empty cache needs a compiler"
    assert sum(row.endswith("good") for row in rows) > 8
    assert not (tmp_path / "runs").exists()


def test_another_bit_or_a_broken_check_fails_and_the_others_still_run(tmp_path, capsys, monkeypatch):
    def differs(bench):
        yield "places that differ", "these", 1.0

    def broken(bench):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_smoke, "CHECKS", [differs, broken, gpu_smoke.generation])
    monkeypatch.setattr(gpu_smoke, "prepare", lambda bench: None)
    code, rows = run(tmp_path, capsys)
    assert code == 1 and [row.split()[-1] for row in rows] == ["FAILS", "FAILS", "good"]
    assert "no such kernel" in rows[1]
    with pytest.raises(ValueError, match="--tiny"):
        gpu_smoke.main(["--device=cpu"])
