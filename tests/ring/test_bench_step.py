"""dev.bench_step: its steps on a CPU, and what it does about a GPU without having one."""

import pytest
import torch

from dev import bench_step
from dev.bench_step import Size


def test_a_step_is_timed_by_two_clocks(monkeypatch):
    tiny = Size(2, 128, 16, 64, (1,), torch.float32, "eager")
    monkeypatch.setitem(bench_step.SIZES, "cpu", tiny)
    # restored afterwards: an eager bench replaces it
    monkeypatch.setattr(torch, "compile", torch.compile)
    seconds = torch.tensor(bench_step.make_step("ours", "eager", "cpu")(1))
    assert seconds.shape == (2, 2) and (seconds > 0).all()


def test_the_clock_waits_for_a_gpu(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("cuda"))
    bench_step.clock("cpu")
    assert waits == []
    bench_step.clock("cuda")
    assert waits == ["cuda"]


def test_on_a_gpu_both_projects_compile_by_default():
    defaults = {
        device: bench_step.modes(size)["default"] for device, size in bench_step.SIZES.items()
    }
    assert defaults == {"cpu": ("eager", "compiled"), "cuda": ("compiled", "compiled")}


def test_a_missing_gpu_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "gpt.py").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"--device=cuda: this PyTorch .* sees no GPU; use --device=cpu"
    ):
        bench_step.main([f"--nanochat={tmp_path}", "--device=cuda"])
