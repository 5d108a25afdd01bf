"""Retention: whatever is saved, deleted, broken or interrupted, in whatever order and under whatever settings, the
newest good checkpoint and every milestone are there."""

import errno
import json
import logging
import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat import checkpoint as ckpt
from nanochat.checkpoint import SealedFolder, check_retention, expendable, own_steps, prune
from nanochat.run_dir import clean_stale, put_in_place, temporary_path
from tests import faults


def save(run: Path, step: int, name: str | None = None, *, data: bytes = b"weights") -> Path:
    """A checkpoint as small as can be, written as a real one is."""
    name = name or f"checkpoint-{step}"
    clean_stale(run)
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    folder = SealedFolder(temporary_path(run, name))
    folder.put_bytes("a.bin", data)
    folder.seal({"format_version": ckpt.FORMAT_VERSION, "step": step})
    put_in_place(folder.path, run / "checkpoints" / name)
    return run / "checkpoints" / name


def rot(path: Path) -> None:
    (path / "a.bin").write_bytes(b"WEIGHTS")


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints"))


# ---- the rule -------------------------------------------------------------------------------------------------------

def rule(steps: dict[str, int], good_step: int, k: int | None, m: int | None = None) -> list[str]:
    return expendable(steps, good_step, keep_last_k=k, keep_milestone_every=m)


def test_the_rule_on_the_drawn_example() -> None:
    steps = {f"checkpoint-{step}": step for step in range(100, 900, 100)}
    assert rule(steps, 700, 2, 400) == [f"checkpoint-{step}" for step in (100, 200, 300, 500)]
    assert rule(steps, 700, 2) == [f"checkpoint-{step}" for step in (100, 200, 300, 400, 500)]
    assert rule(steps, 700, 7) == [] == rule(steps, 700, None, 400) == rule({}, 700, 1)
    assert rule({**steps, "checkpoint-700-shutdown": 700}, 700, 1, 400) == [
        f"checkpoint-{step}" for step in (100, 200, 300, 500, 600)], "of one step all stay"
    assert rule(steps, 50, 1) == [], "all are newer than what is known to be good"


@given(steps=st.sets(st.integers(0, 40)), good=st.integers(0, 40), k=st.none() | st.integers(1, 6),
       m=st.none() | st.integers(1, 9))
def test_the_rule_against_its_words(steps: set[int], good: int, k: int | None, m: int | None) -> None:
    gone = [int(name[11:]) for name in rule({f"checkpoint-{step}": step for step in steps}, good, k, m)]
    assert gone == sorted(gone)
    for step in steps:
        newer = sum(step < other <= good for other in steps)
        stays = k is None or step >= good or newer < k or (m is not None and step % m == 0)
        assert (step in gone) != stays


def test_settings_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    check_retention(None, None)
    check_retention(1, 1)
    good = save(tmp_path, 1)
    for k, m, flag in ((0, None, "--keep-last-k"), (-1, None, "--keep-last-k"), (1, 0, "--keep-milestone-every")):
        with pytest.raises(ValueError, match=f"{flag}: got .*expected at least 1"):
            prune(tmp_path, good=good, keep_last_k=k, keep_milestone_every=m)
    assert names(tmp_path) == ["checkpoint-1"]


# ---- on disk --------------------------------------------------------------------------------------------------------

def test_only_what_this_program_wrote_under_that_name_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(10, 60, 10):
        save(tmp_path, step)
    save(tmp_path, 5, "checkpoint-5-shutdown")
    save(tmp_path, 7, "final")
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint-1").mkdir()  # of another program
    (folder / "checkpoint-1" / "trainer_state.json").write_text(json.dumps({"global_step": 1, "log_history": []}))
    (folder / "checkpoint-2").mkdir()  # no seal at all
    (folder / "best").mkdir()
    (folder / "checkpoint-10-shutdown").symlink_to(folder / "checkpoint-10")
    (folder / "checkpoint-4").write_text("a file")
    (folder / "checkpoint-20").rename(folder / "checkpoint-6")  # renamed by hand
    rot(save(tmp_path, 60))  # newer than the newest good one
    foreign = ["best", *(f"checkpoint-{tail}" for tail in ("1", "10-shutdown", "2", "4", "6")), "final"]
    assert sorted(own_steps(tmp_path).values()) == [5, 10, 30, 40, 50, 60]
    assert prune(tmp_path, good=folder / "checkpoint-50") == [] and len(names(tmp_path)) == 13
    assert prune(tmp_path, good=folder / "checkpoint-50", keep_last_k=2, keep_milestone_every=15) == [
        "checkpoint-5-shutdown", "checkpoint-10"]
    assert names(tmp_path) == sorted([*foreign, *(f"checkpoint-{step}" for step in (30, 40, 50, 60))])
    assert prune(tmp_path, good=folder / "final", keep_last_k=1) == [], "all are newer than the final one"
    assert prune(tmp_path, good=folder / "checkpoint-50", keep_last_k=1) == ["checkpoint-30", "checkpoint-40"]
    assert not caplog.records


def test_nothing_goes_if_the_good_one_is_not_there(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    with pytest.raises(FileNotFoundError, match=r"trainer_state\.json: missing"):
        prune(tmp_path, good=tmp_path / "checkpoints" / "checkpoint-9", keep_last_k=1)
    (tmp_path / "checkpoints" / "checkpoint-3" / "trainer_state.json").write_text("{}")
    with pytest.raises(ValueError, match="torn or rotten"):
        prune(tmp_path, good=tmp_path / "checkpoints" / "checkpoint-3", keep_last_k=1)
    assert len(names(tmp_path)) == 3


def test_what_cannot_be_deleted_stays_with_a_warning_and_the_others_go(tmp_path: Path,
                                                                       caplog: pytest.LogCaptureFixture) -> None:
    def fill(run: Path) -> Path:
        return [save(run, step) for step in (1, 2, 3, 4)][-1]

    good = fill(tmp_path / "count")
    total = faults.count(lambda: prune(tmp_path / "count", good=good, keep_last_k=1), below=tmp_path / "count")
    assert total == 3 * 5  # rename, fsync, two files and the folder of each
    for k in range(total):
        run = tmp_path / str(k)
        good = fill(run)
        caplog.clear()
        with faults.failing_at(k, errno.EACCES, below=run):
            assert len(prune(run, good=good, keep_last_k=1)) == 2
        assert [(r.levelno, "could not be deleted" in r.getMessage()) for r in caplog.records] == [
            (logging.WARNING, True)]
        clean_stale(run)
        assert set(names(run)) - {"checkpoint-4"} == ({f"checkpoint-{k // 5 + 1}"} if k % 5 == 0 else set())


# ---- any history ----------------------------------------------------------------------------------------------------

class History:
    """A run as the trainer drives it, with what must hold after each of its acts."""

    def __init__(self, run: Path) -> None:
        self.run, self.k, self.m = run, 1, None
        self.step, self.good = 0, None
        self.crashes = self.deletions = 0

    def good_ones(self) -> dict[str, int]:
        """{name: step} of all checkpoints that verify, by what lies on disk."""
        found = {}
        for path in ckpt.list_checkpoints(self.run):
            try:
                ckpt.verify_checkpoint(path)
            except (OSError, ValueError):
                continue
            match = ckpt.checkpoint_folders(self.run)
            found[next(name for name, folder in match.items() if folder == path)] = ckpt.read_state(path)["step"]
        return found

    def save(self, steps: int, suffix: str, crash: int | None) -> None:
        """Go on for some steps, save, prune; perhaps die on the way and start again."""
        before = self.good_ones()
        self.step += steps
        name = "final" if suffix == "final" else f"checkpoint-{self.step}{suffix}"
        done = []
        with faults.crashing_at(crash, below=self.run) as changes:
            self.good = save(self.run, self.step, name, data=bytes(self.step % 7))
            done = prune(self.run, good=self.good, keep_last_k=self.k, keep_milestone_every=self.m)
        crashed = crash is not None and len(changes.made) > crash
        self.check(before, replaced=name)
        if crashed:
            self.crashes += 1
            self.start()
            self.check(before, replaced=name)
        else:
            self.deletions += len(done)
            after = self.good_ones()
            assert after[name] == self.step
            numbered = sorted(step for other, step in own_steps(self.run).items() if step <= self.step)
            old = [step for step in numbered[:-self.k] if step < self.step] if self.k else []
            assert all(self.m is not None and step % self.m == 0 for step in old)

    def start(self) -> None:
        """Start the run again: tidy up, then load the newest good checkpoint."""
        clean_stale(self.run)
        self.good = ckpt.newest_good(self.run)
        self.step = ckpt.read_state(self.good)["step"] if self.good else 0
        assert not [name for name in names(self.run) if name.startswith(".")]

    def rot(self, number: int) -> None:
        """A checkpoint goes bad behind our back; the run starts again."""
        paths = [path for path in ckpt.list_checkpoints(self.run) if (path / "a.bin").is_file()]
        if paths:
            rot(paths[number % len(paths)])
        self.start()

    def check(self, before: dict[str, int], *, replaced: str) -> None:
        """No milestone, no final and not the newest good checkpoint is lost by a save, however it ended."""
        after = self.good_ones()
        for name, step in before.items():
            keeps = name == "final" or self.k is None or (self.m is not None and step % self.m == 0)
            assert not keeps or name in after, f"{name} is lost"
            assert name == replaced or after.get(name, step) == step
        if before:
            assert after and max(after.values()) >= max(
                (step for name, step in before.items() if name != replaced), default=0)
        assert (self.run / "checkpoints" / "mine" / "notes.txt").read_text() == "mine"


def begin(run: Path) -> History:
    """An empty run, with a folder of somebody else's."""
    (run / "checkpoints" / "mine").mkdir(parents=True)
    (run / "checkpoints" / "mine" / "notes.txt").write_text("mine")
    return History(run)


def test_no_history_loses_the_newest_good_checkpoint_or_a_milestone(tmp_path: Path) -> None:
    crashes = deletions = 0
    for seed in range(40):  # the number names the history that fails
        draw = random.Random(seed)
        history = begin(tmp_path / str(seed))
        for _ in range(draw.randint(5, 14)):
            act = draw.choice(["save"] * 5 + ["rot", "set"])
            if act == "save":
                suffix = draw.choice(["", "", "", "-shutdown", "final"])
                history.save(draw.randint(1, 4), suffix, draw.choice([None, draw.randint(0, 40)]))
            elif act == "rot":
                history.rot(draw.randint(0, 5))
            else:
                history.k, history.m = draw.choice([None, 1, 2, 3]), draw.choice([None, 1, 2, 5])
        crashes, deletions = crashes + history.crashes, deletions + history.deletions
    assert crashes > 20 and deletions > 60


def test_every_crash_of_a_save_with_deletions_keeps_what_must_stay(tmp_path: Path) -> None:
    """Not only the crashes that a random history meets: every one of one history."""
    whole = begin(tmp_path / "whole")
    for step in range(1, 7):
        save(whole.run, step)
    seen = set()
    for crash in range(200):
        history = History(shutil.copytree(whole.run, tmp_path / str(crash)))
        history.step = 6
        history.k, history.m = 2, 2
        history.save(1, "", crash)
        seen.add(tuple(sorted(history.good_ones().values())))
        if history.crashes == 0:
            break
    assert 20 < crash < 199
    assert seen == {(1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6, 7), (2, 3, 4, 5, 6, 7), (2, 4, 5, 6, 7), (2, 4, 6, 7)}
