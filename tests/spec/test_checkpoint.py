"""Checkpoints are read back bit for bit, damage and malice are refused, retention keeps its rule."""

import gzip
import json
import logging
import os
import pickle
import shutil
from collections import OrderedDict
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanochat import checkpoint as ckpt
from nanochat import run_dir as rd
from nanochat.common import hash_bytes, hash_json
from tests.toy import examples
from tests.training import as_bytes

CONFIG = {"n_layer": 2, "n_embd": 8}


def states(seed):
    """The arguments of a save: small states of every kind, different for every seed."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 8, generator=g)
    return {
        "states": {
            ckpt.MODEL_NAME: OrderedDict(
                w=weight,
                e=torch.randn(5, 3, generator=g).bfloat16(),
                odd=torch.tensor([float("nan"), float("-inf"), -0.0]),
            ),
            ckpt.OPTIMIZER_NAME: {
                "state": {
                    "w": {"exp_avg": torch.randn(4, 8, generator=g), "step": torch.tensor(seed)}
                },
                "groups": [{"lr": 0.1 + seed, "betas": (0.8, 0.95), "names": ["w"]}],
            },
            ckpt.SCHEDULER_NAME: {"format_version": 1, "num_iterations": 100},
            "rng/rank_0.pkl": {"torch": torch.get_rng_state()},
            "rng/rank_1.pkl": {"torch": g.get_state(), "words": [2**63, 1]},
        },
        "model_config": CONFIG,
        "cursors": [{"lane": i, "row": seed * 3, "ledger": {"web": {"read": i}}} for i in range(4)],
        "trainer_state": {"tokens": seed * 1000, "version": seed, "tokenizer_fingerprint": "abc"},
    }


def save(run, step, *, name=None):
    rd.open_folders(run)
    return ckpt.Snapshot(step, **states(step)).write(run, name or f"checkpoint-{step}")


def newest(run):
    checkpoint = ckpt.first_good(ckpt.list_checkpoints(run))
    return checkpoint and checkpoint.path


def files_of(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def reseal(path, **changed):
    """Change the seal and make all checksums match the files, as an attacker would."""
    state = {**json.loads((path / ckpt.STATE_NAME).read_bytes()), **changed}
    for name in state["files"] if "files" not in changed else ():
        data = (path / name).read_bytes()
        state["files"][name] = {"bytes": len(data), "blake2b": hash_bytes(data)}
    state["checksum"] = ckpt.NO_CHECKSUM
    state["checksum"] = hash_bytes((json.dumps(state, indent=2) + "\n").encode())
    (path / ckpt.STATE_NAME).write_text(json.dumps(state, indent=2) + "\n")


# ---- writing and reading -------------------------------------------------------------------------


def test_a_saved_checkpoint_and_its_kept_cursors_are_read_back_bit_for_bit(tmp_path):
    path = save(tmp_path, 7)
    loaded, wrote = ckpt.load_checkpoint(path), states(7)
    assert path == tmp_path / "checkpoints" / "checkpoint-7" and loaded.step == 7
    for name, state in wrote["states"].items():
        assert as_bytes(loaded.load(name)) == as_bytes(dict(state))
    assert loaded.cursors == wrote["cursors"] and loaded.model_config == CONFIG
    assert (
        loaded.trainer_state.items()
        >= {"step": 7, "architecture_hash": hash_json(CONFIG), **wrote["trainer_state"]}.items()
    )
    assert files_of(path) == [
        "dataloader_state/lanes.json.gz",
        "model/config.json",
        "model/pytorch_model.bin",
        "optimizer.bin",
        "rng/rank_0.pkl",
        "rng/rank_1.pkl",
        "scheduler.bin",
        "trainer_state.json",
    ]
    kept = tmp_path / "logs/cursors/step-00000007.json.gz"
    assert rd.cursor_files(tmp_path) == {7: kept} and rd.read_cursors(kept) == (7, wrote["cursors"])
    shutil.rmtree(path)
    save(tmp_path, 7)
    assert kept.read_bytes() == (path / ckpt.CURSORS_NAME).read_bytes(), "the file has a time stamp"


# ---- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with two good checkpoints. Tests copy it, or undo their changes."""
    run = tmp_path_factory.mktemp("whole")
    save(run, 10)
    save(run, 20)
    return run


NUM_FILES = 8


def check_skipped(run, file, caplog):
    caplog.clear()
    for read in (ckpt.verify_checkpoint, ckpt.load_checkpoint):
        with pytest.raises((ValueError, FileNotFoundError), match=Path(file).name):
            read(run / "checkpoints" / "checkpoint-20")
    assert newest(run) == run / "checkpoints" / "checkpoint-10"
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "checkpoint-20" in warning and file in warning


@settings(
    max_examples=examples(2),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    number=st.integers(0, NUM_FILES - 1),
    where=st.floats(0, 1, exclude_max=True),
    byte=st.integers(1, 255),
)
def test_any_changed_byte_of_any_file_is_noticed(whole, caplog, number, where, byte):
    file = files_of(whole / "checkpoints/checkpoint-20")[number]
    target = whole / "checkpoints/checkpoint-20" / file
    data = target.read_bytes()
    i = int(where * len(data))
    target.write_bytes(data[:i] + bytes([data[i] ^ byte]) + data[i + 1 :])
    try:
        check_skipped(whole, file, caplog)
    finally:
        target.write_bytes(data)


class Evil:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_malicious_pickles_are_refused_in_every_file(whole, tmp_path):
    good = whole / "checkpoints/checkpoint-20"
    path = tmp_path / "checkpoint-20"
    victim = tmp_path / "touched"
    evil = {"step": 20, "cursors": Evil(victim)}
    pickled = pickle.dumps(evil, protocol=2)
    for file in files_of(good):
        for save_evil in (
            partial(torch.save, evil),
            lambda f: f.write_bytes(pickled),
            lambda f: f.write_bytes(gzip.compress(pickled)),
        ):
            shutil.copytree(good, path)
            save_evil(path / file)
            if file != ckpt.STATE_NAME:
                reseal(path)
                ckpt.verify_checkpoint(path)  # the checksums match, so only the loader can refuse
            with pytest.raises(ValueError, match=Path(file).name):
                ckpt.load_checkpoint(path).load(file)
            shutil.rmtree(path)
    assert not victim.exists()
    pickle.loads(pickled)
    assert victim.exists(), "the pickle is harmless"


# ---- retention -----------------------------------------------------------------------------------


def small(run, step, name=None, *, data=b"weights"):
    """The smallest possible checkpoint."""
    path = run / "checkpoints" / (name or f"checkpoint-{step}")
    path.parent.mkdir(parents=True, exist_ok=True)
    ckpt.write_sealed(path, {"format_version": ckpt.FORMAT_VERSION, "step": step}, {"a.bin": data})
    return path


def names(run):
    return sorted(os.listdir(run / "checkpoints"))


@settings(
    max_examples=examples(0.5),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=st.sets(st.integers(0, 9)),
    good=st.integers(0, 9),
    k=st.none() | st.integers(1, 4),
    m=st.none() | st.integers(1, 4),
    corrupt=st.sets(st.integers(0, 9)),
)
def test_retention_keeps_what_its_rule_names_and_counts_only_good_checkpoints(
    tmp_path, steps, good, k, m, corrupt
):
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    for step in steps:
        path = small(tmp_path, step)
        if step in corrupt:
            (path / "a.bin").write_bytes(b"corrupt")
    gone = ckpt.prune(tmp_path, good, {}, keep_last_k=k, keep_milestone_every=m)
    assert gone == sorted(gone)
    for step in steps:
        newer = sum(step < other <= good for other in steps - corrupt)
        stays = k is None or step >= good or newer < k or (m is not None and step % m == 0)
        assert (f"checkpoint-{step}" in gone) != stays
