"""The mirror of a run: one owner, conditional writes, and what its retention and its log keep. The
runs are in tests/ring/test_mirror.py, which also holds object storage to the laws of a store."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat import mirror_owner
from nanochat.config import Settings
from nanochat.mirror import check_place
from nanochat.mirror_fetch import append_missing
from nanochat.mirror_marks import START, START_STEP, Mark, outdated
from nanochat.mirror_owner import OWNER_NAME, claim_mirror, read_owner
from nanochat.mirror_store import as_file, open_store
from nanochat.run_state import identify

NEVER = 1e9  # seconds


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "mirror"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A silence of half a second, and a sign of life every 20 ms."""
    monkeypatch.setattr(mirror_owner, "RENEW_S", 0.02)
    monkeypatch.setattr(mirror_owner, "SILENCE_S", 0.5)
    monkeypatch.setattr(mirror_owner, "POLL_S", 0.02)


def suspend(lease):
    """Stop renewing a lease, as a suspended process does."""
    lease._over.set()


# ---- laws of a store and of its owner, also for object storage -----------------------------------


def law_a_file_is_swapped_only_if_it_is_as_it_was_read(store):
    first = store.swap("x.json", b"1", None)
    assert store.swap("x.json", b"2", None) is None
    second = store.swap("x.json", b"2", first)
    assert store.swap("x.json", b"3", first) is None
    assert store.read("x.json") == second and second.content == b"2"


def law_a_file_that_is_written_is_listed_and_read_until_it_is_deleted(store):
    content = bytes(range(256)) * 9000
    store.write("pieces/a", as_file(content))
    assert store.names("pieces") == {"a": len(content)}
    assert b"".join(store.parts("pieces/a")) == content
    for _ in range(2):
        store.delete("pieces/a")
    assert store.names("pieces") == {}
    with pytest.raises(FileNotFoundError):
        b"".join(store.parts("pieces/a"))


def law_of_launches_that_claim_at_once_exactly_one_wins(store):
    def claim(_):
        try:
            return claim_mirror(store, "run", {})
        except ValueError as e:
            return str(e)

    with ThreadPoolExecutor(4) as pool:
        results = [*pool.map(claim, range(4))]
    losers = [result for result in results if isinstance(result, str)]
    [winner] = [result for result in results if not isinstance(result, str)]
    assert len(losers) == 3 and all("another launch owns this mirror" in text for text in losers)
    winner.give_back()


def law_a_silent_owner_is_replaced_and_finds_out(store):
    old = claim_mirror(store, "run", {})
    suspend(old)
    new = claim_mirror(store, "run", {})
    with pytest.raises(ValueError, match="no longer owns the mirror"):
        old.renew()
    assert old.lost and not new.lost
    new.give_back()


LAWS = [law for name, law in sorted(globals().items()) if name.startswith("law_")]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_folder_keeps_the_law(law, store):
    law(store)


# ---- the owner -----------------------------------------------------------------------------------


def test_a_mirror_that_was_given_back_is_owned_without_waiting(store, monkeypatch):
    monkeypatch.setattr(mirror_owner, "SILENCE_S", NEVER)
    claim_mirror(store, "run", {}).give_back()
    claim_mirror(store, "run", {}).give_back()


def test_the_next_launch_in_the_same_run_directory_does_not_wait(store, monkeypatch):
    monkeypatch.setattr(mirror_owner, "SILENCE_S", NEVER)
    suspend(claim_mirror(store, "run", {}))
    claim_mirror(store, "run", identify()).give_back()


def test_an_owner_whose_record_was_removed_has_lost_the_mirror(store):
    lease = claim_mirror(store, "run", {})
    suspend(lease)
    store.delete(OWNER_NAME)
    with pytest.raises(ValueError, match="its record was removed"):
        lease.renew()


def test_a_damaged_record_is_refused_with_what_to_do(store):
    store.write(OWNER_NAME, as_file(b"{"))
    with pytest.raises(ValueError, match=r"owner\.json: not valid JSON .* delete it there"):
        claim_mirror(store, "run", {})


def test_a_lock_that_is_held_delays_a_renewal_but_loses_nothing(store):
    lease = claim_mirror(store, "run", {})
    suspend(lease)
    with store._lock():
        renewal = threading.Thread(target=lease.renew)
        renewal.start()
        renewal.join(0.1)
        assert renewal.is_alive(), "the case: it waits"
    renewal.join()
    assert not lease.lost and read_owner(store)[1]["renewals"] >= 1


# ---- places --------------------------------------------------------------------------------------


def test_a_missing_parent_is_not_made(tmp_path):
    with pytest.raises(ValueError, match="mount its disk"):
        open_store(str(tmp_path / "disk" / "mirror"))
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize("make", [True, False])
def test_a_file_is_refused(tmp_path, make):
    """Regression: "[Errno 20] Not a directory", from scripts.validate."""
    (tmp_path / "mirror").touch()
    with pytest.raises(ValueError, match="it is a file; name a folder"):
        open_store(str(tmp_path / "mirror"), make=make)


def test_a_place_among_the_runs_is_refused(base_dir):
    with pytest.raises(ValueError, match="expected a place outside"):
        check_place(str(base_dir / "runs" / "run"))


def test_a_secret_in_the_place_is_refused_and_not_shown():
    with pytest.raises(ValueError, match="credentials do not belong") as e:
        open_store("s3://KEY:hidden@bucket/x")
    assert "hidden" not in str(e.value)


# ---- retention -----------------------------------------------------------------------------------


def mark(step, *, name=None, kept=False, by_time=False):
    checkpoint = name or f"checkpoint-{step}"
    return Mark("id", "run", checkpoint, step, kept=kept, by_time=by_time, files={})


def left(marks, newest, **settings):
    """The checkpoints whose marks stay."""
    named = {f"{i}.json": one for i, one in enumerate(marks)}
    gone = outdated(named, f"{newest}.json", Settings(**settings))
    return [named[name].checkpoint for name in named if name not in gone]


def test_retention_keeps_the_newest_k_and_those_of_save_at():
    marks = [mark(step, kept=step == 4) for step in (2, 4, 6, 8, 10)]
    stay = ["checkpoint-4", "checkpoint-8", "checkpoint-10"]
    assert left(marks, 4, keep_last_k=2) == stay
    assert left([*marks, mark(10, name="final")], 5, keep_last_k=2) == [*stay, "final"]


def test_without_keep_last_k_only_timed_checkpoints_are_deleted():
    marks = [mark(step, by_time=step != 4) for step in (2, 4, 6, 8, 10)]
    stay = ["checkpoint-4", "checkpoint-8", "checkpoint-10"]
    assert left(marks, 4) == stay


def test_a_mark_replaces_an_earlier_one_of_the_same_checkpoint():
    assert left([mark(2), mark(4), mark(4)], 2) == ["checkpoint-2", "checkpoint-4"]


def test_the_end_of_a_run_that_was_extended_is_an_ordinary_checkpoint():
    marks = [mark(2), mark(4, name="final"), mark(6), mark(8, name="final")]
    assert len(left(marks, 3)) == 4
    assert left(marks, 3, keep_last_k=1) == ["checkpoint-6", "final"]


def test_the_start_of_a_run_is_replaced_by_its_first_checkpoint_and_by_a_newer_start():
    start = mark(START_STEP, name=START, kept=True)
    assert left([start, start], 1) == [START]
    assert left([start, mark(2)], 1) == ["checkpoint-2"]


def test_marks_of_later_steps_stay():
    assert len(left([mark(8), mark(6), mark(4), mark(2)], 3, keep_last_k=1)) == 4


# ---- the log -------------------------------------------------------------------------------------

line = st.integers(0, 3).map(lambda step: json.dumps({"step": step}).encode() + b"\n")
lines = st.lists(line, max_size=4).map(b"".join)


@given(lines, lines, lines, st.integers(0, 5))
def test_a_merged_log_has_all_lines_of_both_and_a_second_merge_adds_none(
    tmp_path_factory, shared, ours, theirs, cut
):
    path = tmp_path_factory.mktemp("log") / "train.jsonl"
    local = (shared + ours)[: len(shared + ours) - cut]  # a crash truncates the last line
    path.write_bytes(local)
    append_missing(path, shared + theirs)
    merged = path.read_bytes()
    assert merged.startswith(local)
    assert set((shared + theirs).splitlines()) <= set(merged.splitlines())
    append_missing(path, shared + theirs)
    assert path.read_bytes() == merged
