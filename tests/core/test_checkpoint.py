"""Checkpoints: forged seals, removed folders, names, saves beside the loop, and what retention
deletes.

tests/faults/test_state_machine.py checks saves under kills, power cuts, full disks and damage."""

import errno
import json
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanochat import checkpoint as ckpt
from nanochat import run_dir as rd
from nanochat.checkpoint import Saver, SaveSettings
from nanochat.optim import MuonAdamW
from nanochat.start_run import describe_origin
from tests import crashes
from tests.checkpoints import names, newest, reseal, save, small, states
from tests.spec.test_checkpoint import check_skipped
from tests.training import as_bytes

# ---- writing and reading -------------------------------------------------------------------------


def test_bad_names_and_states_are_refused_and_leave_no_file(tmp_path):
    for name in ("checkpoint-8", "latest", "../final", "checkpoint-7-old"):
        with pytest.raises(AssertionError, match=name):
            save(tmp_path, 7, name=name)
    for changed, message in (
        ({"seal": {"x": Path}}, "JSON"),
        ({"states": {"rng/rank_0.pkl": {"numpy": Path("x")}}}, r"rng/rank_0.pkl: .*Path"),
    ):
        with pytest.raises(TypeError, match=message):
            ckpt.Snapshot(7, **{**states(7), **changed}).write(tmp_path, "final")
    assert list((tmp_path / "checkpoints").iterdir()) == []
    with pytest.raises(ValueError, match="not the name of a checkpoint"):
        rd.delete_checkpoint(tmp_path / "checkpoints" / "mine")


# ---- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with two good checkpoints. Tests copy it, or undo their changes."""
    run = tmp_path_factory.mktemp("whole")
    save(run, 10)
    save(run, 20)
    return run


SEALS = (
    {"files": []},
    {"files": {"a": 1}},
    {"files": {"a": {"blake2b": "0"}}},
    {"files": {"../secret": {"bytes": 1, "blake2b": "0"}}},
    {"files": {"/etc/passwd": {"bytes": 1, "blake2b": "0"}}},
    {"step": None},
    {"step": "20"},
    {"format_version": 2},
)


@pytest.mark.parametrize("change", SEALS, ids=range(len(SEALS)))
def test_a_strange_seal_with_a_valid_checksum_is_refused(whole, tmp_path, caplog, change):
    run = shutil.copytree(whole, tmp_path / "run")
    reseal(run / "checkpoints/checkpoint-20", **change)
    check_skipped(run, ckpt.STATE_NAME, caplog)


def test_a_file_that_the_seal_does_not_list_is_not_read(whole, tmp_path):
    path = shutil.copytree(whole / "checkpoints/checkpoint-20", tmp_path / "checkpoint-20")
    shutil.copy(path / "rng/rank_0.pkl", path / "rng/rank_2.pkl")
    with pytest.raises(ValueError, match=r"does not list rng/rank_2\.pkl"):
        ckpt.load_checkpoint(path).load("rng/rank_2.pkl")


# ---- removed folders -----------------------------------------------------------------------------


def test_a_halt_at_the_step_of_a_stop_replaces_it_and_keeps_its_checkpoint(tmp_path):
    """Regression: the checkpoint of the stop was kept, so every launch set up and halted again."""
    for status in ("stopped", "halted", "halted"):
        path = save(tmp_path, 3, name="checkpoint-3-shutdown", status=status)
    assert ckpt.read_seal(path)["status"] == "halted"
    assert ckpt.verify_checkpoint(path.with_name("checkpoint-3"))["status"] == "stopped"


def test_a_save_at_the_step_where_the_run_was_extended_keeps_the_checkpoint_that_is_there(tmp_path):
    """Regression: it was deleted, and then could not be renamed. The first `final` has become
    checkpoint-10, which is `completed`; the run goes on from an earlier checkpoint."""
    save(tmp_path, 10, name="final", status="completed")
    save(tmp_path, 20, name="final", status="completed")
    save(tmp_path, 10, status="running")
    assert names(tmp_path) == ["checkpoint-10", "final"]
    assert ckpt.verify_checkpoint(tmp_path / "checkpoints" / "checkpoint-10")["step"] == 10


def test_a_save_never_makes_the_run_directory(tmp_path, caplog):
    """Removed folders of a run are created again with a warning, but the run directory itself is
    not."""
    run = tmp_path / "run"
    save(run, 1)
    caplog.clear()
    for folder in ("checkpoints", "logs"):
        shutil.rmtree(run / folder)
    ckpt.Snapshot(2, **states(2)).write(run, "checkpoint-2")
    assert newest(run).name == "checkpoint-2" and list(rd.cursor_files(run)) == [2]
    for folder in ("checkpoints", "logs", "logs/cursors"):
        assert caplog.text.count(f"{run / folder} was removed while the run was training") == 1
    shutil.rmtree(run)
    with pytest.raises(OSError, match="checkpoint-3 could not be written"):
        ckpt.Snapshot(3, **states(3)).write(run, "checkpoint-3")
    assert not run.exists()


# ---- from a name to a checkpoint -----------------------------------------------------------------


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    """Runs "a", with 10, 20, 20-shutdown, a corrupt 30 and a final of step 25, and "b@20", with
    step 5. Returns a's."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    for tag in ("a", "b@20"):
        rd.open_folders(rd.run_path(tag))
        (rd.run_path(tag) / "config.json").write_text("{}")
    run = rd.run_path("a")
    for step, name in (
        (10, None),
        (20, None),
        (20, "checkpoint-20-shutdown"),
        (25, "final"),
        (30, None),
    ):
        save(run, step, name=name)
    (run / "checkpoints/checkpoint-30/optimizer.bin").write_bytes(b"")
    save(rd.run_path("b@20"), 5)
    return run


def test_a_checkpoint_is_found_by_tag_path_step_and_name(two_runs, tmp_path):
    for spec, name in (
        ("a", "final"),
        ("a@10", "checkpoint-10"),
        ("a@20", "checkpoint-20-shutdown"),
        ("a@checkpoint-20", "checkpoint-20"),
        ("a@final", "final"),
        ("a@25", "final"),
        (f"{two_runs}", "final"),
        (f"{two_runs}@10", "checkpoint-10"),
        (str(two_runs / "checkpoints/checkpoint-10"), "checkpoint-10"),
    ):
        loaded = ckpt.find_checkpoint(spec)
        assert loaded.path == two_runs / "checkpoints" / name
        assert describe_origin(loaded) == {
            "run": "a",
            "checkpoint": name,
            "step": loaded.step,
            "checksum": ckpt.read_seal(loaded.path)["checksum"],
        }
    run = rd.run_path("b@20")  # an @ may be part of a name
    for of_b in (run, f"{run}@5", "b@20@5", "b@20"):
        assert ckpt.find_checkpoint(of_b).path == run / "checkpoints/checkpoint-5"
    copy = ckpt.find_checkpoint(
        shutil.copytree(two_runs / "checkpoints/checkpoint-10", tmp_path / "kept")
    )
    assert describe_origin(copy).items() >= {"run": None, "checkpoint": "kept", "step": 10}.items()


def test_a_checkpoint_that_does_not_exist_is_refused_with_a_list_of_those_that_do(two_runs):
    existing = r"existing checkpoints: checkpoint-30, final, checkpoint-20-shutdown, checkpoint-20, checkpoint-10"
    for spec in ("a@11", "a@latest", "a@", f"{two_runs}@0"):
        with pytest.raises(
            FileNotFoundError, match=rf"no checkpoint '.*', expected a step, final, .*{existing}"
        ):
            ckpt.find_checkpoint(spec)
    with pytest.raises(FileNotFoundError, match=r"no run 'c': .*existing runs: a, b@20"):
        ckpt.find_checkpoint("c@10")
    for path in ckpt.list_checkpoints(two_runs):
        (path / "optimizer.bin").write_bytes(b"")
    for damaged in ("a", "a@30", two_runs / "checkpoints" / "checkpoint-30"):
        with pytest.raises(ValueError, match=r"checkpoint-30/optimizer\.bin: corrupt"):
            ckpt.find_checkpoint(damaged)


# ---- saving while training continues -------------------------------------------------------------


def test_a_save_runs_beside_the_loop_and_close_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt, "time", SimpleNamespace(perf_counter=iter((100.0, 102.5)).__next__))

    def write():
        assert go.wait(60)
        return ckpt.Snapshot(1, **{**live, "states": {ckpt.MODEL_NAME: held}}).write(
            tmp_path, "checkpoint-1"
        )

    saver = Saver(None)
    live = states(1)
    go = threading.Event()
    weights = live["states"][ckpt.MODEL_NAME]
    held = ckpt.to_host(weights)
    rd.open_folders(tmp_path)
    saver.start(write)
    assert saver.take() is None
    with pytest.raises(AssertionError, match="one save at a time"):
        saver.start(write)
    for tensor in weights.values():  # the next step
        tensor.zero_()
    closing = threading.Thread(target=saver.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive() and ckpt.list_checkpoints(tmp_path) == []
    go.set()
    closing.join(60)
    outcome = saver.take()
    assert (
        outcome.path == tmp_path / "checkpoints/checkpoint-1"
        and outcome.fatal is None
        and saver.take() is None
    )
    assert outcome.seconds == 2.5 and outcome.message == f"saved {outcome.path} in 2.5 s"
    assert as_bytes(ckpt.load_checkpoint(outcome.path).model_state()) == as_bytes(
        dict(states(1)["states"][ckpt.MODEL_NAME])
    )


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_a_save_pins_no_host_memory(monkeypatch):
    """PyTorch rounds pinned tensors up to powers of two and never returns them: d24 kept up to 20
    GB for 12.6."""
    empty = torch.empty
    zeros = torch.zeros
    allocated = []

    def allocate(shape, *, dtype=None, pin_memory=False):
        allocated.append(pin_memory)
        return empty(shape, dtype=dtype)

    table = torch.nn.Parameter(torch.ones(8, 4))
    optimizer = MuonAdamW(
        [
            {
                "kind": "adamw",
                "params": [table],
                "lr": 0.1,
                "betas": (0.8, 0.9),
                "eps": 1e-8,
                "weight_decay": 0.0,
            }
        ]
    )
    optimizer._device = torch.device("cuda")
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    monkeypatch.setattr(torch, "empty", allocate)
    optimizer.gather_state()
    ckpt.to_host({"table": table.detach().as_subclass(OnGPU)})
    assert allocated == [False, False, False]  # two moments and the weights


FULL, BUG = OSError(errno.ENOSPC, "No space left on device"), TypeError("a bug")


@pytest.mark.parametrize(
    "known, error, is_last, ends, message",
    [
        (
            "checkpoint-5",
            FULL,
            False,
            False,
            r"training continues, checkpoint-5 is kept \(error 1 of 3",
        ),
        ("checkpoint-5", FULL, True, True, "checkpoint-5 is kept. Make room"),
        ("", FULL, False, True, "no good checkpoint is left. Make room"),
        (
            "checkpoint-4",
            FULL,
            False,
            True,
            "no good checkpoint is left. Make room",
        ),  # it was deleted
        ("checkpoint-5", BUG, False, True, "a bug"),
    ],
)
def test_a_failed_save_ends_the_run_if_training_would_be_in_vain(
    tmp_path, monkeypatch, known, error, is_last, ends, message
):
    monkeypatch.setattr(ckpt, "RETRY_S", 0.0)

    def write():
        raise error

    saver = Saver(save(tmp_path, 5).with_name(known) if known else None)
    saver.start(write, last=is_last)
    outcome = saver.take(wait=True)
    assert outcome.path is None and saver.take(wait=True) is None
    assert re.search(message, outcome.message) and (outcome.fatal is not None) == ends
    assert outcome.fatal is BUG if error is BUG else not ends or isinstance(outcome.fatal, OSError)
    saver.close()


def test_a_save_that_would_end_the_run_is_repeated_while_the_disk_is_full(tmp_path, monkeypatch):
    """Regression: a disk that was full for ten seconds during the first or last save ended the
    run."""
    monkeypatch.setattr(ckpt.time, "sleep", lambda seconds: None)
    failures = iter([FULL, FULL])

    def write():
        if (error := next(failures, None)) is not None:
            raise error
        return save(tmp_path, 5)

    saver = Saver(None)
    saver.start(write, last=True)
    outcome = saver.take(wait=True)
    assert outcome.fatal is None and outcome.path.name == "checkpoint-5"
    saver.close()


# ---- retention -----------------------------------------------------------------------------------


def test_only_what_this_program_wrote_under_that_name_is_deleted(tmp_path, caplog):
    for step in range(10, 60, 10):
        small(tmp_path, step)
    small(tmp_path, 5, "checkpoint-5-shutdown")
    small(tmp_path, 7, "final")
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint-1").mkdir()  # another program's
    (folder / "checkpoint-1" / "trainer_state.json").write_text(
        json.dumps({"global_step": 1, "log_history": []})
    )
    (folder / "checkpoint-2").mkdir()  # no seal at all
    (folder / "best").mkdir()
    (folder / "checkpoint-10-shutdown").symlink_to(folder / "checkpoint-10")
    (folder / "checkpoint-4").write_text("a file")
    (folder / "checkpoint-20").rename(folder / "checkpoint-6")  # renamed by a user
    (small(tmp_path, 60) / "a.bin").write_bytes(b"corrupt")  # newer than the newest good one
    foreign = [
        "best",
        *(f"checkpoint-{tail}" for tail in ("1", "10-shutdown", "2", "4", "6")),
        "final",
    ]
    assert ckpt.prune(tmp_path, 50, {}, SaveSettings()) == [] and len(names(tmp_path)) == 13
    assert ckpt.prune(tmp_path, 50, {}, SaveSettings(keep_last_k=2, save_at="15*")) == [
        "checkpoint-5-shutdown",
        "checkpoint-10",
    ]
    assert names(tmp_path) == sorted(
        [*foreign, *(f"checkpoint-{step}" for step in (30, 40, 50, 60))]
    )
    assert ckpt.prune(tmp_path, 7, {}, SaveSettings(keep_last_k=1)) == [], (
        "all are newer than step 7"
    )
    known = {"checkpoint-50": False}
    assert ckpt.prune(tmp_path, 50, known, SaveSettings(keep_last_k=1)) == ["checkpoint-30"], (
        "what is known is not verified again"
    )
    assert known == {"checkpoint-50": False, "checkpoint-40": True}
    assert ckpt.prune(tmp_path, 50, {}, SaveSettings(keep_last_k=1)) == ["checkpoint-40"]
    assert not caplog.records


def test_a_checkpoint_that_is_kept_forever_is_neither_deleted_nor_counted(tmp_path):
    for step in range(1, 7):
        reseal(small(tmp_path, step), kept=step % 2 == 0, by_time=step < 6)
    by_time = ckpt.prune(tmp_path, 6, {}, SaveSettings())
    assert by_time == ["checkpoint-1"], "3 and 5 are the newest two"
    assert ckpt.prune(tmp_path, 6, {}, SaveSettings(keep_last_k=1)) == ["checkpoint-3"]
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (2, 4, 5, 6)]


def test_a_checkpoint_that_cannot_be_deleted_stays_with_a_warning_and_the_others_go(
    tmp_path, caplog
):
    per_checkpoint, total = 5, 15  # changes: rename, fsync, two files and the folder
    for k in range(total + 1):
        run = tmp_path / str(k)
        for step in (1, 2, 3, 4):
            small(run, step)
        caplog.clear()
        with crashes.failing_at(k, errno.EACCES, below=run) as changes:
            deleted = ckpt.prune(run, 4, {}, SaveSettings(keep_last_k=1))
        assert (k < len(changes.made)) == (k < total)
        assert len(deleted) == 3 - (k < total) == 3 - caplog.text.count("could not be deleted")
        rd.open_folders(run)
        stays = k < total and k % per_checkpoint < 2  # neither renamed for good nor emptied
        kept = {f"checkpoint-{k // per_checkpoint + 1}"} if stays else set()
        assert {*names(run)} == {"checkpoint-4", *kept}
