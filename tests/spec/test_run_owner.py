"""At most one launch owns a run, however launches interleave and whatever its record says."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanochat import run_owner
from nanochat.run_dir import remove_tree
from nanochat.run_owner import OWNER_NAME, RunState, claim
from nanochat.run_state import identify
from tests.training import fingerprint, owner_of

# ---- one owner -----------------------------------------------------------------------------------


def record(**changed):
    return json.dumps({"launch": "x", "since": "long ago", **identify(), **changed})


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"launch": 1}',
        record(pid=-1, start=None),
        record(since="\033[2J"),
        record(),
        "\xff\x00",
    ],
    ids=range(9),
)
def test_a_damaged_or_forged_record_neither_blocks_a_run_nor_admits_two_launches(
    tmp_path, monkeypatch, damage
):
    monkeypatch.setattr(run_owner, "LOCK_TRY_S", 0.0)
    path = tmp_path / OWNER_NAME
    path.write_text(damage, encoding="latin-1")
    owner = owner_of(tmp_path)
    assert owner.lost() == "" and json.loads(path.read_text())["pid"] == os.getpid()
    path.write_text(damage, encoding="latin-1")
    for _ in range(2):
        with pytest.raises(
            ValueError, match=f"^{tmp_path}: another launch owns this run: "
        ) as caught:
            owner_of(tmp_path)
        assert "\n" not in str(caught.value) and "\033" not in str(caught.value)
    assert "this launch no longer owns the run" in owner.lost(), "its record is gone"


ACTIONS = ["claim", "sign", "set aside", "release", "remove"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(ACTIONS)), max_size=40))
@example([(0, "claim"), (1, "claim"), (0, "release"), (1, "claim"), (1, "sign"), (1, "release")])
@example([(0, "claim"), (0, "remove"), (1, "claim"), (0, "sign"), (1, "sign"), (0, "release")])
@example([(0, "claim"), (0, "sign"), (0, "release"), (1, "claim"), (1, "set aside"), (1, "sign")])
def test_however_launches_interleave_one_owns_the_run_and_signs_what_it_looked_at(actions):
    """Even if the run is removed in between. `version`: number of the run's last signature."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_owner, "LOCK_TRIES", 1)
        patch.setattr(run_owner, "LOCK_TRY_S", 0.0)
        run_dir = Path(folder) / "runs" / "run"
        owners = {}
        looked_at = {}
        signed = set()
        version = versions = 0
        for actor, action in actions:
            current = [number for number, owner in owners.items() if not owner.lost()]
            before = fingerprint(run_dir)
            if action == "claim" and actor not in owners:
                try:
                    owners[actor] = claim(run_dir)
                    assert not current
                    looked_at[actor] = version
                except ValueError as e:
                    assert current and "another launch owns this run" in str(e)
                    assert fingerprint(run_dir) == before
            elif action == "sign" and actor in owners and actor not in signed:
                try:
                    owners[actor].sign()
                    assert actor in current and looked_at[actor] == version
                    versions += 1
                    version = versions
                    signed.add(actor)
                except ValueError as e:
                    assert actor not in current and "a moment ago" in str(e)
                    assert fingerprint(run_dir) == before
            elif action == "set aside" and version and actor in current and actor not in signed:
                owners[actor].set_aside()
                assert not owners[actor].lost()
            elif action == "release" and actor in owners:
                owners.pop(actor).release()
                if actor in current and actor not in signed:
                    assert version or not run_dir.parent.exists(), "a refused launch left a trace"
                elif actor not in current:
                    assert fingerprint(run_dir) == before
                signed.discard(actor)
            elif action == "remove" and run_dir.exists():
                shutil.rmtree(run_dir.parent)
                version = 0
            assert sum(not owner.lost() for owner in owners.values()) <= 1
        for owner in owners.values():
            owner.release()
        owner_of(run_dir).release()


def test_without_locks_a_launch_that_has_just_signed_keeps_the_run(tmp_path, monkeypatch):
    """It has not written its state yet. Regression: it counted as dead."""
    monkeypatch.setattr(run_owner, "_lock", lambda file, kind: None)
    owner = owner_of(tmp_path)
    with pytest.raises(ValueError, match="another launch owns this run"):
        claim(tmp_path)
    assert owner.lost() == ""


@pytest.mark.parametrize("removed", [OWNER_NAME, ""])
@pytest.mark.parametrize("has_successor", [False, True])
def test_an_owner_whose_file_was_removed_or_replaced_notices_and_writes_nothing(
    tmp_path, removed, has_successor
):
    run_dir = tmp_path / "run"
    with RunState(owner_of(run_dir), [identify()], status="running") as state:
        remove_tree(run_dir / removed)
        successor = owner_of(run_dir) if has_successor else None
        before = fingerprint(run_dir)
        state.update(step=5)
        assert state.refresh().startswith(f"{run_dir}: this launch no longer owns the run")
    assert fingerprint(run_dir) == before and run_dir.exists() == bool(before)
    assert successor is None or successor.lost() == ""
