"""Power loss at any instant of a run's life: whatever was not synced is lost. `dev/power_loss.py`
does the same with many more states."""

import os
import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dev import power_loss
from nanochat.common import write_bytes
from tests.power import recording, states


@pytest.fixture(scope="module")
def life():
    """One life. Each of the states after it is written anew, which takes a fraction in memory."""
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        with power_loss.lived(Path(folder) / "base") as life:
            yield life


def test_nothing_reported_is_lost_nothing_is_half_written_and_the_run_goes_on(life):
    """500 states, of which three live on to the end, to the same bits."""
    changes = life.recorder.changes
    some = states(life.recorder, random.Random(1), 500)
    broken = power_loss.try_states(life, some, changes, number=500, resumed=3)
    assert [found.text(changes) for found in broken] == []


@pytest.mark.parametrize(
    ("site", "law"),
    [
        ("write_file", "half-written under its final name"),
        ("fsync_dir in write_sealed", "reported as saved|missing"),
        ("sync_file in TrainLog.sync", "the log lacks steps"),
        ("fsync_dir in delete_checkpoint", "missing"),
        ("fsync_dir in atomic_open", "made and lost"),
    ],
)
def test_a_sync_that_is_taken_out_breaks_a_law(life, site, law):
    planted = power_loss.plant(life, random.Random(1), 200, "without", site)
    assert planted.syncs > 0 and planted.found is not None
    assert any(word in planted.found.problem for word in law.split("|"))


def test_on_a_disk_that_lies_nothing_damaged_is_taken_for_good(life):
    broken = power_loss.try_lying(life, random.Random(1), 150)
    assert [found.problem for found in broken] == []


@pytest.mark.parametrize("seal", [*power_loss.SEALS][:4])  # those of a mirror take longer
def test_a_checksum_that_is_taken_out_lets_damage_pass(life, seal):
    found = power_loss.plant_seal(life, random.Random(1), 600, seal)
    assert found is not None and (
        "taken for good" in found.problem or "nobody wrote" in found.problem
    )


# ---- the model of the disk -----------------------------------------------------------------------


def contents(folder: Path, act, number=60):
    """The contents of the file `a` in every state that power loss leaves of a folder; None: it is
    not there."""
    with recording(folder) as recorder:
        act()
    moment = [len(recorder.changes)]
    return {state.files.get("a") for state in states(recorder, random.Random(0), number, at=moment)}


def test_a_file_and_a_name_that_were_synced_are_certain(tmp_path):
    assert contents(tmp_path, lambda: write_bytes(tmp_path / "a", b"new")) == {b"new"}


def test_a_file_that_was_renamed_without_a_sync_is_old_new_or_empty(tmp_path):
    (tmp_path / "a").write_bytes(b"old")

    def replace():
        (tmp_path / "b").write_bytes(b"new")
        os.replace(tmp_path / "b", tmp_path / "a")

    assert contents(tmp_path, replace) == {b"old", b"new", b"", b"\0\0\0"}


def test_what_a_write_did_not_touch_is_certain(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 4096)

    def append():
        with open(tmp_path / "a", "ab") as file:
            file.write(b"y" * 4096)

    found = contents(tmp_path, append)
    assert all(content[:4096] == b"x" * 4096 for content in found)
    assert {content[4096:] for content in found} == {b"", b"y" * 4096, b"\0" * 4096}


def test_what_cpp_writes_counts_as_one_write(tmp_path):
    with recording(tmp_path) as recorder:
        pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a")
    assert [(change.kind, change.what) for change in recorder.changes] == [
        ("create", "a"),
        ("write", "a"),
    ]
