"""dev.gpu_smoke on a CPU: every check runs, and a difference in bits fails."""

import tempfile

from dev import gpu_smoke
from tests import training


def run(capsys, *flags):
    """(exit code, rows of the table) of the script on a CPU."""
    code = gpu_smoke.main(["--device=cpu", "--tiny", *flags])
    printed = capsys.readouterr().out.splitlines()
    return code, printed[printed.index("") + 2:-1]


def test_every_check_runs_on_a_cpu(tmp_path, capsys):
    with training.workplace(tmp_path):
        code, rows = run(capsys, f"--base-dir={tmp_path}")
    assert code == 0, rows
    for name in ("MFU", "peak memory", "waiting for data", "attention: gradients", "sampled tokens that differ"):
        assert any(name in row for row in rows)
    assert [row.split()[-1] for row in rows if "places that differ" in row] == ["good", "good", "good"]
    assert not (tmp_path / "runs").exists()


def test_only_after_a_failure_the_temporary_folder_stays(tmp_path, capsys, monkeypatch):
    def differs(bench):
        yield "places that differ", "these", 1.0

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    for checks, verdicts in (([gpu_smoke.generation], ["good"]), ([differs, gpu_smoke.generation], ["FAILS", "good"])):
        monkeypatch.setattr(gpu_smoke, "CHECKS", checks)
        code, rows = run(capsys)
        assert [row.split()[-1] for row in rows] == verdicts
        assert code == len([*tmp_path.glob("gpu-*")]) == verdicts.count("FAILS")
