"""Checkpoints and run directories: what was written comes back bit for bit, and no crash, full disk or flipped byte is
ever believed or costs more than one save."""

import dataclasses
import errno
import gzip
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanochat import checkpoint as ckpt
from nanochat import run_dir as rd
from nanochat.common import hash_bytes, hash_json
from tests import faults
from tests.toy import examples

CONFIG = {"n_layer": 2, "n_embd": 8}


def states(seed: int) -> dict[str, Any]:
    """Small states of every kind a trainer saves, different for every seed."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 8, generator=g)
    return {
        "model_state": OrderedDict(w=weight, e=torch.randn(5, 3, generator=g).bfloat16(),
                                   odd=torch.tensor([float("nan"), float("-inf"), -0.0])),
        "model_config": CONFIG,
        "optimizer_state": {"state": {"w": {"exp_avg": torch.randn(4, 8, generator=g), "step": torch.tensor(seed)}},
                            "groups": [{"lr": 0.1 + seed, "betas": (0.8, 0.95), "names": ["w"]}]},
        "scheduler_state": {"format_version": 1, "num_iterations": 100},
        "rng_state": {0: {"torch": torch.get_rng_state()}, 1: {"torch": g.get_state(), "words": [2**63, 1]}},
        "cursors": [{"lane": i, "row": seed * 3, "ledger": {"web": {"read": i}}} for i in range(4)],
        "trainer_state": {"tokens": seed * 1000, "version": seed, "tokenizer_fingerprint": "abc"},
    }


def save(run: Path, step: int, *, seed: int | None = None, name: str | None = None) -> Path:
    return ckpt.save_checkpoint(run, name or f"checkpoint-{step}", step=step, **states(step if seed is None else seed))


def bits(value: Any) -> Any:
    """A value with its tensors replaced by dtype, shape and bytes, so that == compares bits."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes() \
            if value.ndim else value.reshape(1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(bits(v) for v in value)
    return value


def hidden(run: Path) -> list[str]:
    return [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")]


def files_of(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def reseal(path: Path) -> None:
    """Make the checksums fit what is there, as an attacker would."""
    state = json.loads((path / ckpt.STATE_NAME).read_bytes())
    for name in state["files"]:
        data = (path / name).read_bytes()
        state["files"][name] = {"bytes": len(data), "blake2b": hash_bytes(data)}
    state["checksum"] = ckpt.NO_CHECKSUM
    state["checksum"] = hash_bytes((json.dumps(state, indent=2) + "\n").encode())
    (path / ckpt.STATE_NAME).write_text(json.dumps(state, indent=2) + "\n")


# ---- writing and reading --------------------------------------------------------------------------------------------

def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    loaded, wrote = ckpt.load_checkpoint(path), states(7)
    assert path == tmp_path / "checkpoints" / "checkpoint-7" and loaded.step == 7
    assert bits(loaded.model_state()) == bits(dict(wrote["model_state"]))
    assert loaded.model_state()["e"].dtype == torch.bfloat16
    assert bits(loaded.optimizer_state()) == bits(wrote["optimizer_state"])
    assert loaded.scheduler_state() == wrote["scheduler_state"]
    assert bits(loaded.rng_state(1)) == bits(wrote["rng_state"][1])
    assert loaded.rng_state(2) is None
    assert loaded.cursors == wrote["cursors"] and loaded.model_config == CONFIG
    assert loaded.trainer_state == {"step": 7, "architecture_hash": ckpt.architecture_hash(CONFIG),
                                    **wrote["trainer_state"]}


def test_layout_and_kept_cursors(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert files_of(path) == ["dataloader_state/lanes.json.gz", "model/config.json", "model/pytorch_model.bin",
                              "optimizer.bin", "rng/rank_0.pkl", "rng/rank_1.pkl", "scheduler.bin",
                              "trainer_state.json"]
    kept = rd.cursor_files(tmp_path)
    assert list(kept) == [7] and kept[7] == tmp_path / "logs/cursors/step-00000007.json.gz"
    assert rd.read_cursors(kept[7]) == (7, states(7)["cursors"])
    assert kept[7].read_bytes() == (path / ckpt.CURSORS_NAME).read_bytes()
    shutil.rmtree(path)
    save(tmp_path, 7)
    assert kept[7].read_bytes() == (path / ckpt.CURSORS_NAME).read_bytes(), "no time stamp inside"


def test_to_host_is_a_copy_that_later_steps_do_not_change() -> None:
    live: dict[str, Any] = {"w": torch.nn.Parameter(torch.ones(3)), "t": torch.arange(6).view(2, 3).T,
                            "groups": [{"betas": (0.8, 0.9)}]}
    held = ckpt.to_host(live)
    with torch.no_grad():
        live["w"].zero_()
        live["t"].zero_()
    assert held["w"].tolist() == [1, 1, 1] and held["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not held["w"].requires_grad and held["groups"] == [{"betas": (0.8, 0.9)}]
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\].*Path"):
        ckpt.to_host({"a": [1, Path("x")]})


def test_names_and_reserved_keys_are_checked(tmp_path: Path) -> None:
    for name in ("checkpoint-8", "latest", "../final", "checkpoint-7-old"):
        with pytest.raises(ValueError, match="expected checkpoint-7"):
            save(tmp_path, 7, name=name)
    with pytest.raises(ValueError, match="files"):
        ckpt.save_checkpoint(tmp_path, "final", step=7, **{**states(7), "trainer_state": {"files": 1}})
    assert ckpt.list_checkpoints(tmp_path) == []


def test_list_is_newest_step_first_and_final_by_its_state(tmp_path: Path) -> None:
    for step, name in ((9, None), (10, None), (10, "final"), (12, "checkpoint-12-shutdown"), (100, None)):
        save(tmp_path, step, name=name)
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert [p.name for p in ckpt.list_checkpoints(tmp_path)] == [
        "checkpoint-100", "checkpoint-12-shutdown", "final", "checkpoint-10", "checkpoint-9"]
    assert ckpt.list_checkpoints(tmp_path / "nowhere") == [] and ckpt.newest_good(tmp_path / "nowhere") is None


def test_delete_takes_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    other = tmp_path / "checkpoints" / "mine"
    other.mkdir()
    with pytest.raises(ValueError, match="not the name of a checkpoint"):
        rd.delete_checkpoint(other)
    rd.delete_checkpoint(path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["mine"]


# ---- damage ---------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two good checkpoints; tests copy it or put back what they change."""
    run = tmp_path_factory.mktemp("whole")
    save(run, 10)
    save(run, 20)
    return run


NUM_FILES = 8


def check_skipped(run: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    with pytest.raises((ValueError, FileNotFoundError), match=Path(file).name):
        ckpt.verify_checkpoint(run / "checkpoints" / "checkpoint-20")
    with pytest.raises((ValueError, FileNotFoundError), match=Path(file).name):
        ckpt.load_checkpoint(run / "checkpoints" / "checkpoint-20")
    assert ckpt.newest_good(run) == run / "checkpoints" / "checkpoint-10"
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "checkpoint-20" in warnings[0] and file in warnings[0]


@pytest.mark.parametrize("number", range(NUM_FILES))
def test_missing_or_torn_file_is_named_and_the_checkpoint_before_is_used(whole: Path, number: int, tmp_path: Path,
                                                                         caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    file = files_of(run / "checkpoints/checkpoint-20")[number]
    target = run / "checkpoints/checkpoint-20" / file
    data = target.read_bytes()
    for size in {0, 1, len(data) // 2, len(data) - 1}:
        target.write_bytes(data[:size])
        check_skipped(run, file, caplog)
    target.write_bytes(data + b"\0")
    check_skipped(run, file, caplog)
    target.unlink()
    check_skipped(run, file, caplog)
    target.write_bytes(data)
    assert ckpt.newest_good(run) == run / "checkpoints" / "checkpoint-20"


@settings(max_examples=examples(2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=st.integers(0, NUM_FILES - 1), where=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_any_changed_byte_of_any_file_is_found(whole: Path, caplog: pytest.LogCaptureFixture, number: int, where: float,
                                               byte: int) -> None:
    file = files_of(whole / "checkpoints/checkpoint-20")[number]
    target = whole / "checkpoints/checkpoint-20" / file
    data = target.read_bytes()
    i = int(where * len(data))
    target.write_bytes(data[:i] + bytes([byte]) + data[i + 1:])
    try:
        if byte == data[i]:
            ckpt.verify_checkpoint(target.parents[len(Path(file).parts) - 1])
        else:
            check_skipped(whole, file, caplog)
    finally:
        target.write_bytes(data)


def test_every_byte_of_the_trainer_state_counts(whole: Path) -> None:
    path = whole / "checkpoints/checkpoint-20"
    data = (path / ckpt.STATE_NAME).read_bytes()
    try:
        for i, byte in enumerate(data):  # a space for a newline is still the same JSON
            other = ord("\n") if byte == ord(" ") else ord(" ") if byte == ord("\n") else byte ^ 1
            (path / ckpt.STATE_NAME).write_bytes(data[:i] + bytes([other]) + data[i + 1:])
            with pytest.raises(ValueError, match=ckpt.STATE_NAME):
                ckpt.read_state(path)
    finally:
        (path / ckpt.STATE_NAME).write_bytes(data)


def test_all_bad_is_none_and_an_older_final_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    (path / "optimizer.bin").write_bytes(b"")
    assert ckpt.newest_good(tmp_path) is None
    save(tmp_path, 3, name="final")
    good = ckpt.newest_good(tmp_path)
    assert good is not None and good.name == "final"


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_malicious_pickles_are_refused_in_every_torch_file(whole: Path, how: str, tmp_path: Path) -> None:
    path, victim = tmp_path / "checkpoint-20", tmp_path / "touched"
    shutil.copytree(whole / "checkpoints/checkpoint-20", path)
    pickles = [f for f in files_of(path) if f.endswith((".bin", ".pkl"))]
    assert len(pickles) == 5
    for file in pickles:
        if how == "pickle":
            (path / file).write_bytes(pickle.dumps({"w": Evil(victim)}, protocol=2))
        else:
            torch.save({"w": Evil(victim)}, path / file)
    reseal(path)
    loaded = ckpt.load_checkpoint(path)  # the checksums fit, so only the loader can refuse
    for load in (loaded.model_state, loaded.optimizer_state, loaded.scheduler_state, lambda: loaded.rng_state(0),
                 lambda: loaded.rng_state(1)):
        with pytest.raises(ValueError, match="refused"):
            load()
    assert not victim.exists()
    if how == "pickle":
        pickle.loads((path / pickles[0]).read_bytes())
    else:
        torch.load(path / pickles[0], weights_only=False)
    assert victim.exists(), "the pickle would have done it"


@pytest.mark.parametrize("file", [ckpt.CURSORS_NAME, ckpt.MODEL_CONFIG_NAME, ckpt.STATE_NAME])
@pytest.mark.parametrize("packed", [False, True])
def test_malicious_pickles_are_refused_in_every_other_file(whole: Path, file: str, packed: bool,
                                                           tmp_path: Path) -> None:
    path, victim = tmp_path / "checkpoint-20", tmp_path / "touched"
    shutil.copytree(whole / "checkpoints/checkpoint-20", path)
    assert sum(f.endswith((".json", ".gz")) for f in files_of(path)) == 3
    evil = pickle.dumps({"step": 20, "cursors": Evil(victim)}, protocol=2)
    (path / file).write_bytes(gzip.compress(evil) if packed else evil)
    if file != ckpt.STATE_NAME:
        reseal(path)
        ckpt.verify_checkpoint(path)  # the checksums fit
    with pytest.raises(ValueError, match=Path(file).name):
        ckpt.load_checkpoint(path)
    assert not victim.exists()


SEALS: dict[str, Any] = {
    "a list": {"files": []}, "no records": {"files": {"a": 1}}, "no sizes": {"files": {"a": {"blake2b": "0"}}},
    "outside": {"files": {"../secret": {"bytes": 1, "blake2b": "0"}}},
    "absolute": {"files": {"/etc/passwd": {"bytes": 1, "blake2b": "0"}}},
    "no step": {"step": None}, "a step in words": {"step": "20"}, "another format": {"format_version": 2},
}


@pytest.mark.parametrize("change", SEALS)
def test_a_strange_seal_with_a_valid_checksum_is_refused_not_believed(whole: Path, tmp_path: Path, change: str,
                                                                      caplog: pytest.LogCaptureFixture) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    path = run / "checkpoints/checkpoint-20"
    state = {**json.loads((path / ckpt.STATE_NAME).read_text()), **SEALS[change], "checksum": ckpt.NO_CHECKSUM}
    state["checksum"] = hash_bytes((json.dumps(state, indent=2) + "\n").encode())
    (path / ckpt.STATE_NAME).write_text(json.dumps(state, indent=2) + "\n")
    check_skipped(run, ckpt.STATE_NAME, caplog)
    (path / ckpt.STATE_NAME).write_text("[" * 100_000)
    check_skipped(run, ckpt.STATE_NAME, caplog)


def test_a_file_that_is_not_sealed_is_not_read(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-20"
    shutil.copytree(whole / "checkpoints/checkpoint-20", path)
    shutil.copy(path / "rng/rank_0.pkl", path / "rng/rank_2.pkl")
    loaded = ckpt.load_checkpoint(path)
    assert loaded.rng_state(2) is None and loaded.rng_state(1) is not None
    state = json.loads((path / ckpt.STATE_NAME).read_text())
    del state["files"][ckpt.MODEL_NAME]
    (path / ckpt.STATE_NAME).write_text(json.dumps(state))
    reseal(path)
    ckpt.verify_checkpoint(path)
    with pytest.raises(ValueError, match=f"does not list {ckpt.MODEL_NAME}"):
        ckpt.load_checkpoint(path)


# ---- crashes and full disks -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("step", [20, 30], ids=["replacing", "new"])
def test_killed_at_every_write_boundary_leaves_the_old_or_the_new(whole: Path, step: int, tmp_path: Path) -> None:
    counted = Path(shutil.copytree(whole, tmp_path / "count"))
    with faults.watching(counted) as changes:
        save(counted, step, seed=99)
    writes = [i for i, change in enumerate(changes.made) if change.startswith("write")]
    others = sorted(set(range(len(changes.made))) - set(writes))
    assert len(others) > 30 and len(writes) > 100
    outcomes, aside = set(), 0
    for k in sorted(others + writes[::40]):
        run = tmp_path / str(k)
        shutil.copytree(whole, run)
        if k in writes or k % 10 == 0:
            assert faults.kill_at(k, lambda run=run: save(run, step, seed=99), below=run)
        else:  # the same, but for the time that it takes
            with faults.crashing_at(k, below=run, kinds=faults.KINDS) as changes:
                save(run, step, seed=99)
            assert len(changes.made) > k
        before = ckpt.newest_good(run)  # a reader that tidies nothing
        assert before is not None
        aside += before.name.startswith(".old")
        version = ckpt.load_checkpoint(before).trainer_state["version"]
        outcomes.add(version)
        rd.clean_stale(run)
        after = ckpt.newest_good(run)
        assert after is not None and hidden(run) == []
        assert ckpt.load_checkpoint(after).trainer_state["version"] == version
        ckpt.verify_checkpoint(run / "checkpoints/checkpoint-10")
        shutil.rmtree(run)
    assert outcomes == {20, 99} and (aside > 0) == (step == 20)


@pytest.mark.parametrize("action", ["delete", "clean up"])
def test_killed_at_every_change_of_a_deletion_leaves_all_or_nothing_that_counts(whole: Path, action: str,
                                                                                tmp_path: Path) -> None:
    """Also where a folder is still aside though its name is taken again: no part of it ever takes the name."""
    def act(run: Path) -> None:
        if action == "delete":
            rd.delete_checkpoint(run / "checkpoints/checkpoint-20")
        else:
            rd.clean_stale(run)

    left = set()
    for k in range(100):
        run = tmp_path / str(k)
        shutil.copytree(whole, run)
        if action == "clean up":
            shutil.copytree(run / "checkpoints/checkpoint-20", run / "checkpoints/.old-checkpoint-20-1")
        with faults.crashing_at(k, below=run) as changes:
            act(run)
        if len(changes.made) <= k:
            break
        if action == "clean up":
            shutil.rmtree(run / "checkpoints/checkpoint-20")  # the worst that a person can do now
        rd.clean_stale(run)
        names = [path.name for path in ckpt.list_checkpoints(run)]
        for name in names:
            ckpt.verify_checkpoint(run / "checkpoints" / name)
        assert hidden(run) == []
        left.add(len(names))
    assert 10 < k < 99 and left == {1, 2}


@pytest.mark.parametrize("step", [20, 30], ids=["replacing", "new"])
def test_an_error_at_every_write_boundary_is_reported_and_leaves_no_mess(whole: Path, step: int,
                                                                         tmp_path: Path) -> None:
    kinds = ("fsync", "rename", "replace")
    counted = Path(shutil.copytree(whole, tmp_path / "count"))
    total = faults.count(lambda: save(counted, step, seed=99), below=counted, kinds=kinds)
    reported = 0
    for k in range(total):
        run = tmp_path / str(k)
        shutil.copytree(whole, run)
        try:
            with faults.failing_at(k, errno.ENOSPC, below=run, kinds=kinds):
                save(run, step, seed=99)
            assert hidden(run)[0].startswith((".old", ".del")) and k >= total - 2
        except OSError as e:
            assert e.errno == errno.ENOSPC and "could not be written" in str(e) and "No space left" in str(e)
            assert hidden(run) == []
            reported += 1
        good = ckpt.newest_good(run)
        assert good is not None
        assert ckpt.load_checkpoint(good).trainer_state["version"] in (20, 99)
        save(run, step, seed=98)  # and the next save works
        good = ckpt.newest_good(run)
        assert good is not None and ckpt.load_checkpoint(good).trainer_state["version"] == 98 and hidden(run) == []
        shutil.rmtree(run)
    assert reported == total - 2 * (step == 20)  # but for the deletion of the replaced one: the new one is there


@pytest.mark.parametrize("at", [0, 2, 1_000_000])
def test_faults_kill_a_whole_command_where_they_say(tmp_path: Path, at: int) -> None:
    """The helper itself, with Python's own zipfile as the command."""
    archive, source = tmp_path / "out" / "a.zip", Path(__file__)
    archive.parent.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--at", str(at), "--below", str(archive.parent), "--", "zipfile", "-c",
         str(archive), str(source)], cwd=source.parents[1], capture_output=True, text=True)
    assert archive.exists() == (at > 0) and done.returncode == (0 if at > 9 else -signal.SIGKILL)
    if at > 9:
        assert int(done.stderr.split()[-4]) > 3 and "changes below" in done.stderr
        assert zipfile.ZipFile(archive).read(source.name) == source.read_bytes()


class FillingDisk:
    """`open` for a disk with room for `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, path: Path, mode: str) -> Any:
        file = open(path, mode, buffering=0)  # noqa: SIM115
        if "x" not in mode:
            return file
        disk = self

        class File:
            def __enter__(self) -> "File":
                return self

            def __exit__(self, *args: Any) -> None:
                file.close()

            def write(self, data: bytes) -> int:
                disk.room -= len(data)
                if disk.room < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return file.write(data)

            flush, fileno = file.flush, file.fileno

        return File()


def test_a_disk_that_fills_at_any_byte_is_an_error_and_keeps_the_older(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = {f: (run / f).read_bytes() for f in files_of(run)}
    needed = sum(p.stat().st_size for p in (run / "checkpoints/checkpoint-20").rglob("*") if p.is_file())
    for room in range(0, needed - 1, max(1, needed // 60)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ckpt, "open", FillingDisk(room), raising=False)
            with pytest.raises(OSError, match="No space left"):
                save(run, 30)
        assert {f: (run / f).read_bytes() for f in files_of(run)} == before and hidden(run) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckpt, "open", FillingDisk(2 * needed), raising=False)
        save(run, 30)
    good = ckpt.newest_good(run)
    assert good is not None and good.name == "checkpoint-30"


def test_a_state_that_could_not_be_loaded_again_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"rng/rank_0.pkl\['numpy'\]: .*Path"):
        ckpt.save_checkpoint(tmp_path, "final", step=1, **{**states(1), "rng_state": {0: {"numpy": Path("x")}}})
    with pytest.raises(TypeError):
        ckpt.save_checkpoint(tmp_path, "final", step=1, **{**states(1), "trainer_state": {"x": torch.zeros(1)}})
    assert list((tmp_path / "checkpoints").iterdir()) == []


# ---- models ---------------------------------------------------------------------------------------------------------

def test_another_architecture_or_tokenizer_is_refused_with_a_diff(tmp_path: Path) -> None:
    loaded = ckpt.load_checkpoint(save(tmp_path, 1))
    loaded.check_architecture(dict(reversed(CONFIG.items())))
    loaded.check_tokenizer("abc")
    with pytest.raises(ValueError, match=r"(?s)--model-tag.*n_layer: the checkpoint has 2, the model says 3") as caught:
        loaded.check_architecture({**CONFIG, "n_layer": 3})
    assert "n_embd" not in str(caught.value)
    with pytest.raises(ValueError, match=r"abc.*other"):
        loaded.check_tokenizer("other")


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run "tiny" whose final checkpoint holds a real model, with its tokenizer beside it."""
    from nanochat.gpt import GPT, GPTConfig
    from nanochat.tokenizer import RustBPETokenizer
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    run = rd.run_path("tiny")
    rd.write_config(run, {"depth": 1})
    tokenizer = RustBPETokenizer.train_from_iterator(["to be or not to be, that is the question"] * 4, 280)
    tokenizer.save(run / "tokenizer")
    config = GPTConfig(sequence_len=16, vocab_size=tokenizer.get_vocab_size(), n_layer=1, n_head=2, n_kv_head=2,
                       n_embd=16)
    model = GPT(config)
    model.init_weights(seed=3, compute_dtype=torch.float32)
    torch.save(model(torch.arange(8)[None]).detach(), tmp_path / "expected.pt")
    values = {**states(4), "model_state": ckpt.to_host(dict(model.state_dict())),
              "model_config": dataclasses.asdict(config),
              "trainer_state": {"tokenizer_fingerprint": tokenizer.fingerprint}}
    ckpt.save_checkpoint(run, "final", step=4, **values)
    return run


def test_a_model_is_rebuilt_from_the_run_alone(trained: Path, tmp_path: Path) -> None:
    expected = torch.load(tmp_path / "expected.pt")
    for path in ("tiny", trained, trained / "checkpoints" / "final"):
        model, tokenizer, meta = ckpt.load_model(path, "cpu", compute_dtype=torch.float32)
        assert torch.equal(model(torch.arange(8)[None]), expected) and not model.training
        assert tokenizer.decode(tokenizer.encode("to be")) == "to be"
        assert meta["step"] == 4 and meta["model_config"]["n_embd"] == 16


def test_load_model_refuses_what_does_not_fit(trained: Path, tmp_path: Path) -> None:
    from nanochat.tokenizer import RustBPETokenizer
    final = trained / "checkpoints" / "final"
    config = json.loads((final / ckpt.MODEL_CONFIG_NAME).read_text())
    shutil.copytree(final, tmp_path / "final")
    (final / ckpt.MODEL_CONFIG_NAME).write_text(json.dumps({**config, "n_embd": 32}))
    reseal(final)
    with pytest.raises(ValueError, match="another architecture"):
        ckpt.load_model(final, "cpu")
    shutil.rmtree(final)
    shutil.copytree(tmp_path / "final", final)
    shutil.rmtree(trained / "tokenizer")
    RustBPETokenizer.train_from_iterator(["quite other words are here"] * 4, 270).save(trained / "tokenizer")
    with pytest.raises(ValueError, match=r"tokenizer.*--model-tag"):
        ckpt.load_model(final, "cpu")
    with pytest.raises(FileNotFoundError, match="runs there: tiny"):
        ckpt.load_model("huge", "cpu")
    rd.delete_checkpoint(final)
    with pytest.raises(FileNotFoundError, match="no good checkpoint"):
        ckpt.load_model("tiny", "cpu")


# ---- from a name to a checkpoint ------------------------------------------------------------------------------------

@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs "a", with 10, 20, 20-shutdown, a rotten 30 and a final of step 25, and "b@20", with step 5. Returns a's."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    for tag in ("a", "b@20"):
        rd.write_config(rd.run_path(tag), {"depth": 1, "tag": tag})
    run = rd.run_path("a")
    for step, name in ((10, None), (20, None), (20, "checkpoint-20-shutdown"), (25, "final"), (30, None)):
        save(run, step, name=name)
    (run / "checkpoints/checkpoint-30/optimizer.bin").write_bytes(b"")
    save(rd.run_path("b@20"), 5)
    return run


def test_weights_of_a_run_are_found_by_tag_path_step_and_name(two_runs: Path) -> None:
    for spec, name in (("a", "final"), ("a@10", "checkpoint-10"), ("a@20", "checkpoint-20-shutdown"),
                       ("a@checkpoint-20", "checkpoint-20"), ("a@final", "final"), ("a@25", "final"),
                       (f"{two_runs}", "final"), (f"{two_runs}@10", "checkpoint-10"),
                       (str(two_runs / "checkpoints/checkpoint-10"), "checkpoint-10")):
        loaded, origin = ckpt.load_run_weights(spec)
        assert loaded.path == two_runs / "checkpoints" / name == ckpt.find_checkpoint(spec)
        assert origin == {"run": "a", "checkpoint": name, "step": loaded.step, "checksum": loaded.checksum,
                          "config_hash": hash_json({"depth": 1, "tag": "a"})}
        assert json.loads((loaded.path / ckpt.STATE_NAME).read_text())["checksum"] == loaded.checksum
        assert json.loads(json.dumps(origin)) == origin
        assert bits(loaded.model_state()) == bits(dict(states(loaded.step)["model_state"]))


def test_an_at_in_a_path_that_exists_is_part_of_it(two_runs: Path) -> None:
    run = rd.run_path("b@20")
    assert ckpt.load_run_weights(run)[1]["step"] == 5
    assert ckpt.load_run_weights(f"{run}@5")[1]["run"] == "b@20"
    assert ckpt.load_run_weights("b@20@5")[1]["step"] == 5
    assert ckpt.load_run_weights("b@20")[1]["step"] == 5, "a run of that very name comes before a step of the run b"


def test_weights_that_are_not_there_are_refused_with_what_there_is(two_runs: Path) -> None:
    there = r"there are: checkpoint-30, final, checkpoint-20-shutdown, checkpoint-20, checkpoint-10"
    for spec in ("a@11", "a@latest", "a@", f"{two_runs}@0"):
        with pytest.raises(FileNotFoundError, match=rf"no checkpoint '.*', expected a step, final, .*{there}"):
            ckpt.load_run_weights(spec)
    with pytest.raises(ValueError, match=rf"no good checkpoint '30' .*optimizer\.bin: torn.*{there}"):
        ckpt.load_run_weights("a@30")
    with pytest.raises(ValueError, match=r"optimizer\.bin: torn"):
        ckpt.load_run_weights(two_runs / "checkpoints" / "checkpoint-30")
    with pytest.raises(FileNotFoundError, match=r"no run 'c': .*runs there: a, b@20"):
        ckpt.load_run_weights("c@10")
    for path in ckpt.list_checkpoints(two_runs):
        (path / "optimizer.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=rf"no good checkpoint; {there}"):
        ckpt.load_run_weights("a")


def test_each_file_is_read_once_to_verify(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(ckpt, "check_file", lambda path, name, record: seen.append(name))
    for spec in ("a@10", two_runs / "checkpoints/checkpoint-10"):
        ckpt.load_run_weights(spec)
        assert len(seen) == len(set(seen)) == NUM_FILES - 1
        seen.clear()


def test_weights_outside_a_run_have_no_run(two_runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(two_runs / "checkpoints/checkpoint-10", tmp_path / "kept")
    loaded, origin = ckpt.load_run_weights(copy)
    assert origin == {"run": None, "checkpoint": "kept", "step": 10, "checksum": loaded.checksum, "config_hash": None}


def test_a_checkpoint_that_is_aside_is_found_by_its_name(two_runs: Path) -> None:
    folder = two_runs / "checkpoints"
    (folder / "checkpoint-10").rename(folder / ".old-checkpoint-10-77")
    assert ckpt.load_run_weights("a@10")[1]["step"] == ckpt.load_run_weights("a@checkpoint-10")[1]["step"] == 10


# ---- run directory --------------------------------------------------------------------------------------------------

def test_runs_are_found_by_tag_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="runs there: none"):
        rd.find_run("d4")
    rd.write_config(rd.run_path("d4"), {"depth": 4})
    rd.write_config(rd.run_path("d12"), {"depth": 12})
    assert rd.find_run("d4") == rd.find_run(tmp_path / "runs" / "d4") == tmp_path / "runs" / "d4"
    assert rd.read_config(rd.find_run("d12")) == {"depth": 12} and rd.list_runs() == ["d12", "d4"]
    with pytest.raises(FileNotFoundError, match=r"'d5'.*runs there: d12, d4"):
        rd.find_run("d5")
    for tag in ("", ".hidden", "a/b", ".."):
        with pytest.raises(ValueError, match="--model-tag"):
            rd.run_path(tag)


def test_config_is_written_once_and_a_broken_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        rd.read_config(tmp_path)
    rd.write_config(tmp_path, {"seed": 1})
    with pytest.raises(FileExistsError, match="--model-tag"):
        rd.write_config(tmp_path, {"seed": 2})
    assert rd.read_config(tmp_path) == {"seed": 1}
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        rd.read_config(tmp_path)


def test_broken_cursors_are_named(tmp_path: Path) -> None:
    file = tmp_path / "step-00000001.json.gz"
    for data in (b"", b"junk", rd.pack_cursors(1, [{}])[:-6], gzip.compress(b"[]"), gzip.compress(b"{")):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=file.name):
            rd.read_cursors(file)


def test_log_takes_the_last_line_of_a_step_and_keeps_events(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "train.jsonl"
    with rd.TrainLog(path) as train_log:
        for step in (1, 2, 3):
            train_log.write(step=step, loss=float(step), digest=f"{step:016x}")
        train_log.write(event="eval", step=2, bpb=float("nan"))
    with rd.TrainLog(path, first_step=2) as train_log:
        assert (train_log.digest_of(1), train_log.digest_of(3), train_log.digest_of(4)) == (None, f"{3:016x}", None)
        train_log.write(event="resumed", step=2)
        train_log.write(step=3, loss=-3.0, digest="f" * 16)
        assert train_log.digest_of(3) == f"{3:016x}", "the run before, which is what a repeated step is checked against"
    records = rd.read_log(path)
    assert [(r.get("event"), r["step"], r.get("loss")) for r in records] == [
        (None, 1, 1.0), (None, 2, 2.0), ("eval", 2, None), ("resumed", 2, None), (None, 3, -3.0)]
    assert records[2]["bpb"] is None
    assert rd.digests(path) == {1: f"{1:016x}", 2: f"{2:016x}", 3: "f" * 16}
    assert rd.read_log(tmp_path / "none") == [] and rd.digests(tmp_path / "none") == {}


def test_a_log_torn_at_any_byte_keeps_its_whole_lines_and_takes_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    lines = b"".join(json.dumps({"step": s, "digest": f"é{s}"}, ensure_ascii=False).encode() + b"\n" for s in (1, 2, 3))
    for size in range(len(lines) + 1):
        path.write_bytes(lines[:size])
        whole_lines = lines[:size].count(b"\n") + (lines[size:size + 1] == b"\n")
        assert list(rd.digests(path)) == [1, 2, 3][:whole_lines]
        with rd.TrainLog(path) as train_log:
            train_log.write(step=9, digest="x")
        assert list(rd.digests(path)) == [1, 2, 3][:whole_lines] + [9]
    path.write_bytes(b'{"step": 1, "digest": "a"}\n\0\0\0\n[1]\n"text"\n')
    assert rd.digests(path) == {1: "a"}


def test_a_log_on_a_full_disk_tears_one_line_only(tmp_path: Path) -> None:
    class Raw:
        def __init__(self) -> None:
            self.data, self.room = b"", 40

        def write(self, data: bytes) -> int:
            if self.room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            part = data[:min(self.room, 7)]
            self.data += part
            self.room -= len(part)
            return len(part)

    train_log = rd.TrainLog(tmp_path / "train.jsonl")
    train_log.close()
    raw = train_log._file = Raw()  # type: ignore[assignment]
    train_log.write(step=1, digest="a")
    with pytest.raises(OSError, match="No space"):
        train_log.write(step=2, digest="b")
    raw.room = 1000
    train_log.write(step=3, digest="c")
    (tmp_path / "train.jsonl").write_bytes(raw.data)
    assert rd.digests(tmp_path / "train.jsonl") == {1: "a", 3: "c"} and raw.data.count(b"\n") == 3
