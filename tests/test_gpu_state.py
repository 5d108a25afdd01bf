"""Each rank's own time is in the log, and what a dying launch leaves never hides why it ends."""

import types

import torch
import torch.distributed as dist

from nanochat import dist as gpu_state
from scripts import base_train
from tests import training

workplace = training.in_workplace()


def log_every_step():
    base_train.RANKS_EVERY = 1


def test_every_ranks_own_time_is_logged_at_intervals():
    group = training.start(2, hook=log_every_step, **training.SMALL, num_iterations=3, save_every=0)
    assert group.wait() == [0, 0], group.text()
    records = training.events("ranks")
    assert [record["step"] for record in records] == [0, 1, 2]
    for record, step in zip(records, training.steps().values(), strict=True):
        assert len(record["ranks"]) == 2 and all(0 < rank["own_s"] < step["step_s"] for rank in record["ranks"])


def test_clock_and_power_are_logged_if_they_can_be_read(monkeypatch):
    events = []
    journal = types.SimpleNamespace(
        event=lambda name, **record: events.append(record["ranks"][0]))
    run = types.SimpleNamespace(loader=types.SimpleNamespace(device=torch.device("cuda", 0)), journal=journal)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    gpu_state.log_ranks(run, 0.0)  # without a driver
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 650_000)
    gpu_state.log_ranks(run, 0.0)
    assert events[0].keys() == {"own_s"} and events[1]["clock_mhz"] == 1980 and events[1]["power_w"] == 650


def test_what_a_dying_launch_leaves_never_hides_why_it_ends(tmp_path, monkeypatch):
    tmp_path = tmp_path / "run"
    tmp_path.mkdir()
    gpu_state.write_collectives(tmp_path, 0)  # no group
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    gpu_state.write_collectives(tmp_path, 0)  # this PyTorch has no NCCL
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"trace", raising=False)
    gpu_state.write_collectives(tmp_path, 1)
    gpu_state.write_collectives(tmp_path / "gone", 0)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda **_: {"segments": []})
    assert "memory-rank0.pickle shows what was allocated" in gpu_state.write_memory(tmp_path, 0)
    assert "could not be written" in gpu_state.write_memory(tmp_path / "gone", 0)
    assert {path.name for path in tmp_path.iterdir()} == {"nccl-rank1.pickle", "memory-rank0.pickle"}
