"""Checkpoints are read back bit for bit, damage and malice are refused, retention keeps its rule."""

import gzip
import logging
import os
import pickle
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanochat import checkpoint as ckpt
from nanochat import run_dir as rd
from nanochat.common import hash_json
from tests.checkpoints import CONFIG, files_of, newest, reseal, save, small, states
from tests.toy import examples
from tests.training import as_bytes

# ---- writing and reading -------------------------------------------------------------------------


def test_a_saved_checkpoint_and_its_kept_cursors_are_read_back_bit_for_bit(tmp_path):
    path = save(tmp_path, 7)
    loaded, wrote = ckpt.load_checkpoint(path), states(7)
    assert path == tmp_path / "checkpoints" / "checkpoint-7" and loaded.step == 7
    for name, state in wrote["states"].items():
        assert as_bytes(loaded.load(name)) == as_bytes(dict(state))
    assert loaded.cursors == wrote["cursors"] and loaded.model_config == CONFIG
    assert (
        loaded.seal.items()
        >= {"step": 7, "architecture_hash": hash_json(CONFIG), **wrote["seal"]}.items()
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


# ---- the steps of --save-at ----------------------------------------------------------------------


@given(
    strides=st.lists(st.integers(1, 12), max_size=4),
    singles=st.lists(st.integers(0, 50), max_size=3),
    is_log=st.booleans(),
    every=st.integers(-1, 12),
    end=st.integers(0, 40),
)
def test_a_list_of_steps_multiples_and_log_keeps_just_these_steps_and_counts_them(
    strides, singles, is_log, every, end
):
    words = [*map(str, singles), *(f"{n}*" for n in strides), *["log"] * is_log]
    saves = ckpt.SaveSettings(save_every=every, save_at=",".join(words) or None)
    kept = {step for step in singles if step < end}
    kept.update(step for n in strides for step in range(n, end, n))
    if is_log:
        kept.update(step for step in (0, 1, 2, 4, 8, 16, 32) if step < end)
    assert {step for step in range(end) if saves.is_kept(step)} == kept
    regular = range(every, end, every) if every > 0 else []
    assert saves.number_of_saves(end) == len(kept.union(regular))


def test_the_saves_of_a_billion_steps_are_counted_without_a_list_of_them():
    saves = ckpt.SaveSettings(save_at="1*,7*,0")
    assert saves.number_of_saves(10**9) == 10**9 and saves.is_kept(10**9)


# ---- retention -----------------------------------------------------------------------------------


@settings(
    max_examples=examples(0.5),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=st.sets(st.integers(0, 9)),
    good=st.integers(0, 9),
    k=st.none() | st.integers(1, 4),
    m=st.none() | st.integers(1, 4),
    sealed=st.sets(st.integers(0, 9)),
    corrupt=st.sets(st.integers(0, 9)),
)
def test_retention_keeps_what_its_rule_names_and_counts_only_good_checkpoints(
    tmp_path, steps, good, k, m, sealed, corrupt
):
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    for step in steps:
        path = small(tmp_path, step)
        reseal(path, kept=step in sealed)
        if step in corrupt:
            (path / "a.bin").write_bytes(b"corrupt")
    save_at = None if m is None else f"{m}*"
    gone = ckpt.prune(tmp_path, good, {}, ckpt.SaveSettings(keep_last_k=k, save_at=save_at))
    assert gone == sorted(gone)
    every = range(m or 10, 10, m or 10)
    kept = sealed.union(every)
    for step in steps:
        newer = sum(step < other <= good for other in steps - corrupt - kept)
        stays = k is None or step >= good or newer < k or step in kept
        assert (f"checkpoint-{step}" in gone) != stays
