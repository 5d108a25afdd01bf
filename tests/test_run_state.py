"""The state of a run: what is told is read, life and death are told apart, and only one launch owns a run."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import lifecycle
from nanochat.lifecycle import (
    STATE_NAME,
    RunState,
    acquire,
    check_free,
    claim,
    exit_code,
    identify,
    liveness,
    process_start,
    read_state,
)
from nanochat.start_run import wipe

ROOT = Path(__file__).parents[1]
PATIENCE_S = 60


@pytest.fixture
def quick(monkeypatch):
    """A minute becomes a second."""
    monkeypatch.setattr(lifecycle, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(lifecycle, "HEARTBEAT_LIMIT_S", 0.6)
    monkeypatch.setattr(lifecycle, "WRITE_EVERY_S", 0.02)


def python(code: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def dead_process() -> dict:
    """What `identify` said in a process that is gone."""
    process = python("import json; from nanochat.lifecycle import identify; print(json.dumps(identify()))")
    told = json.loads(process.communicate(timeout=PATIENCE_S)[0])
    assert told["pid"] == process.pid
    return told


# ---- writing and reading --------------------------------------------------------------------------------------------

def test_what_is_told_is_read_and_a_change_of_status_at_once(tmp_path):
    assert read_state(tmp_path) is None
    with RunState(acquire(tmp_path), [identify()], num_iterations=10) as state:
        first = read_state(tmp_path)
        assert (first["status"], first["step"], first["num_iterations"]) == ("starting", None, 10)
        assert first["ranks"] == [identify()] and first["world_size"] == 1
        state.update(status="running", step=3, loss=float("nan"))
        told = read_state(tmp_path)
        assert (told["status"], told["step"], told["loss"]) == ("running", 3, None)
        assert liveness(told) == "alive" and exit_code(told) == 20
        state.update(step=4, checkpoint="checkpoint-4")
        assert read_state(tmp_path)["checkpoint"] == "checkpoint-4"
        state.close("completed")
    assert read_state(tmp_path)["status"] == "completed"
    assert exit_code(read_state(tmp_path)) == 0


def test_news_is_written_by_itself_but_not_at_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr(lifecycle, "WRITE_EVERY_S", 0.05)
    with RunState(acquire(tmp_path), [identify()], status="running") as state:
        before = read_state(tmp_path)["writes"]
        for step in range(10_000):
            state.update(step=step, loss=1.0)
        until(lambda: read_state(tmp_path)["step"] == 9_999)
        assert read_state(tmp_path)["writes"] - before < 1_000


def test_the_heart_beats_while_the_main_thread_is_busy(tmp_path, quick):
    with RunState(acquire(tmp_path), [identify()], status="running"):
        before = read_state(tmp_path)
        time.sleep(0.5)
        after = read_state(tmp_path)
    assert after["heartbeat"] > before["heartbeat"] and after["writes"] >= before["writes"] + 2
    assert {k: v for k, v in after.items() if k not in ("heartbeat", "writes")} == {
        k: v for k, v in before.items() if k not in ("heartbeat", "writes")}


@pytest.mark.parametrize("error, reason", [
    (ValueError("disk ate it"), "disk ate it"), (KeyError("x"), "KeyError: 'x'"), (SystemExit(1), "SystemExit: 1"),
    (KeyboardInterrupt(), "KeyboardInterrupt: "), (None, "ended without saying how")])
def test_a_run_that_ends_without_saying_how_has_failed(tmp_path, error, reason):
    try:
        with RunState(acquire(tmp_path), [identify()], status="running"):
            if error is not None:
                raise error
    except BaseException as e:
        assert e is error
    state = read_state(tmp_path)
    assert (state["status"], state["reason"]) == ("failed", reason)
    assert exit_code(state) == 1
    acquire(tmp_path)  # it was given up


def test_the_first_final_status_stays(tmp_path):
    with pytest.raises(ValueError, match="later"):
        with RunState(acquire(tmp_path), [identify()]) as state:
            state.close("halted", "bucket x ran dry")
            state.update(status="running", step=5)
            raise ValueError("later")
    assert (read_state(tmp_path)["status"], read_state(tmp_path)["reason"]) == ("halted", "bucket x ran dry")
    assert exit_code(read_state(tmp_path)) == 3


def test_wrong_names_are_our_bug(tmp_path):
    with RunState(acquire(tmp_path), [identify()]) as state:
        with pytest.raises(TypeError, match="no such field los; expected status, reason, step"):
            state.update(los=1)
        with pytest.raises(ValueError, match="status 'done'"):
            state.update(status="done")


def test_a_full_disk_is_told_once_and_stops_nothing(tmp_path, quick, monkeypatch, caplog):
    calls = []

    def full(path: Path, value: object) -> None:
        calls.append(path)
        raise OSError(28, "No space left on device")

    owner = acquire(tmp_path)
    replace = lifecycle._replace
    monkeypatch.setattr(lifecycle, "_replace", full)
    with RunState(owner, [identify()]) as state:
        state.update(status="running", step=1)
        until(lambda: len(calls) > 4)
        assert caplog.text.count("No space left on device") == 1
        monkeypatch.setattr(lifecycle, "_replace", replace)
        state.close("stopped", "SIGTERM")
    assert exit_code(read_state(tmp_path)) == 10


def test_readers_never_see_half_a_state(tmp_path, quick):
    seen, over = [], threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.append(read_state(tmp_path)["status"])

    with RunState(acquire(tmp_path), [identify()]) as state:
        thread = threading.Thread(target=read)
        thread.start()
        for i in range(300):
            state.update(status=("running", "stopping")[i % 2], reason="x" * 3000 * (i % 2))
        over.set()
        thread.join()
    assert len(seen) > 20 and set(seen) <= {"starting", "running", "stopping"}
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


@pytest.mark.parametrize("text, told", [
    ("{", "not valid JSON"), ("[]", "format_version 1"), ('{"format_version": 2}', "another version"),
    ('{"format_version": 1, "status": "odd"}', "another version")])
def test_a_state_that_is_not_ours_is_refused(tmp_path, text, told):
    (tmp_path / STATE_NAME).write_text(text)
    with pytest.raises(ValueError, match=told):
        read_state(tmp_path)


# ---- life and death -------------------------------------------------------------------------------------------------

def test_a_process_is_known_by_its_start():
    me = process_start(os.getpid())
    assert me is not None and me == process_start(os.getpid())
    child = subprocess.Popen(["sleep", "60"])
    assert process_start(child.pid) not in (None, me)
    child.kill()
    until(lambda: process_start(child.pid) is None)  # a corpse that nobody has fetched is dead
    assert Path(f"/proc/{child.pid}").exists() or not Path("/proc/self").exists()
    child.wait()
    assert process_start(child.pid) is None


def test_a_process_may_have_any_name(tmp_path):
    odd = tmp_path / "a) Z 1 2"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([odd, "60"])
    try:
        until(lambda: ") Z" in Path(f"/proc/{child.pid}/stat").read_text())
        assert process_start(child.pid).isdigit()
    finally:
        child.kill()
        child.wait()


def state_with(process: dict, *, status: str = "running", age: float = 0.0) -> dict:
    return {"status": status, "ranks": [process], "heartbeat": 1000.0 - age}


def test_life_in_the_same_place_is_the_process_and_nothing_else():
    me = identify()
    for age in (0, 5_000, -5_000):
        assert liveness(state_with(me, age=age), now=1000.0) == "alive"
        assert liveness(state_with({**me, "start": "1"}, age=age), now=1000.0) == "dead"  # the pid is another's now
    assert liveness(state_with(dead_process())) == "dead"
    assert liveness(state_with(me, status="halted")) == "ended"


@pytest.mark.parametrize("age, known", [(0, "alive"), (59, "alive"), (61, "dead"), (-59, "alive"), (-61, "dead")])
def test_life_elsewhere_is_a_young_heartbeat_and_the_far_future_is_no_youth(age, known):
    elsewhere = {**identify(), "place": "another boot"}
    assert liveness(state_with(elsewhere, age=age), now=1000.0) == known
    assert exit_code(state_with(elsewhere, age=age), now=1000.0) == (20 if known == "alive" else 1)


@pytest.mark.parametrize("status, code", [("completed", 0), ("stopped", 10), ("halted", 3), ("failed", 1),
                                          ("starting", 1), ("running", 1), ("stopping", 1)])
def test_exit_codes_of_runs_whose_process_is_gone(status, code):
    assert exit_code(state_with({**identify(), "start": "1"}, status=status)) == code


# ---- one owner ------------------------------------------------------------------------------------------------------

LAUNCH = """
import sys, time
from pathlib import Path
from nanochat import lifecycle
run_dir = Path(sys.argv[1])
lifecycle.HEARTBEAT_S, lifecycle.WRITE_EVERY_S = 0.1, 0.02
with lifecycle.RunState(lifecycle.acquire(run_dir), [lifecycle.identify()], status="running") as state:
    print("ready", flush=True)
    sys.stdin.readline()
    state.close("stopped")
"""


def launch(run_dir: Path) -> subprocess.Popen:
    process = python(LAUNCH, run_dir)
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_second_launch_is_refused_and_told_about_the_first(tmp_path):
    first = launch(tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir() if "tmp" not in p.name)
    with pytest.raises(ValueError, match=rf"another launch is at work .* pid {first.pid}, since 20\d\d-.*heartbeat "
                                         rf"-?\d+ s ago; end it with python -m scripts.stop {tmp_path.name}"):
        acquire(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir() if "tmp" not in p.name) == before
    first.communicate("end\n", timeout=PATIENCE_S)
    acquire(tmp_path)


def test_a_killed_launch_is_succeeded_at_once(tmp_path, caplog):
    first = launch(tmp_path)
    first.kill()
    first.wait()
    assert liveness(read_state(tmp_path)) == "dead"
    assert acquire(tmp_path).generation == 2
    assert f"taking over from a launch that is gone: host {identify()['host']}, pid {first.pid}" in caplog.text


def test_looking_changes_nothing(tmp_path):
    assert check_free(tmp_path / "absent") == 0
    assert not (tmp_path / "absent").exists()
    acquire(tmp_path).release()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert check_free(tmp_path) == 1
    assert {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


RACER = """
import sys, time
from pathlib import Path
from nanochat.lifecycle import acquire
print("ready", flush=True)
began = float(sys.stdin.readline())
for i, run_dir in enumerate(sorted(Path(sys.argv[1]).iterdir())):
    time.sleep(max(0, began + i / 100 - time.time()))  # one that runs alone for a while waits for the others
    try:
        print(run_dir.name, acquire(run_dir).generation, flush=True)
    except ValueError as e:
        assert "another launch" in str(e), e
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_launches_at_the_same_time_one_wins(tmp_path, stale):
    rounds = [tmp_path / f"{i:02d}" for i in range(30)]
    gone = dead_process()
    for run_dir in rounds:
        run_dir.mkdir()
        if stale:
            lifecycle._link_whole(run_dir / ".owner-000004.json", {"launch": "x", "released": False, **gone})
    racers = [python(RACER, tmp_path) for _ in range(5)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    began = time.time() + 0.05
    for racer in racers:
        racer.stdin.write(f"{began}\n")
        racer.stdin.flush()
    wins = [[] for _ in racers]
    for racer, won in zip(racers, wins):
        while (line := racer.stdout.readline()) != "done\n":
            assert line, racer.stderr.read()
            won.append(line)
    for racer in racers:
        racer.communicate("end\n", timeout=PATIENCE_S)
    winners = sorted(line for won in wins for line in won)
    assert winners == [f"{run_dir.name} {5 if stale else 1}\n" for run_dir in rounds]
    assert sum(bool(won) for won in wins) > 1, "no race happened"


ACTIONS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["look", "claim", "release", "die"])), max_size=40)


@settings(deadline=None)
@given(ACTIONS)
def test_however_looks_claims_and_deaths_interleave_there_is_one_owner_at_most(actions):
    living: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "_owner_lives", lambda run_dir, record: record["launch"] in living)
        run_dir, looks, owners = Path(folder), {}, {}
        for actor, action in actions:
            if action == "look" and actor not in owners:
                try:
                    looks[actor] = check_free(run_dir)
                    assert not owners
                except ValueError:
                    looks.pop(actor, None)
                    assert owners
            elif action == "claim" and actor in looks:
                try:
                    owners[actor] = claim(run_dir, looks.pop(actor))
                    living.add(owners[actor].launch)
                except ValueError:
                    pass
            elif action in ("release", "die") and actor in owners:
                owner = owners.pop(actor)
                living.discard(owner.launch)
                assert not owner.superseded()
                if action == "release":
                    owner.release()
            assert len(owners) <= 1
        living.clear()
        acquire(run_dir)


def test_a_launch_that_was_delayed_between_look_and_claim_gets_nothing(tmp_path):
    late = check_free(tmp_path)
    acquire(tmp_path).release()
    acquire(tmp_path).release()  # by now the number that the late one would take has been tidied away
    assert not (tmp_path / ".owner-000001.json").exists()
    with pytest.raises(ValueError, match="a moment ago"):
        claim(tmp_path, late)
    assert acquire(tmp_path).generation == 3


def elsewhere(run_dir: Path, *, age: float) -> dict:
    """A run that a launch in another place owns: its state, whose heartbeat is so old."""
    there = {**identify(), "host": "node7", "place": "another boot"}
    record = {"launch": "theirs", "since": 0.0, "released": False, **there}
    lifecycle._link_whole(run_dir / ".owner-000003.json", record)
    state = {"format_version": 1, "status": "running", "launch": "theirs", "ranks": [there],
             "heartbeat": time.time() - age, "writes": 1}
    lifecycle._replace(run_dir / STATE_NAME, state)
    return state


@pytest.mark.parametrize("age", [0, 3600, -3600, -10**9])
def test_a_launch_elsewhere_that_beats_is_left_alone_whatever_its_clock_says(tmp_path, quick, age):
    state = elsewhere(tmp_path, age=age)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            state.update(writes=state["writes"] + 1, heartbeat=time.time() - age)
            lifecycle._replace(tmp_path / STATE_NAME, state)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ValueError, match="another launch is at work on this run: host node7"):
            acquire(tmp_path)
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("age, least_s, most_s", [(0.0, 0.6, 5), (3600, 0.25, 0.55), (-3600, 0.6, 5)])
def test_a_launch_elsewhere_that_is_silent_is_succeeded_when_it_was_watched(tmp_path, quick, monkeypatch, age, least_s,
                                                                         most_s):
    clock = [0.0]
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(lifecycle.time, "sleep", lambda s: clock.__setitem__(0, clock[0] + s))
    elsewhere(tmp_path, age=age)
    assert acquire(tmp_path).generation == 4
    assert least_s - 0.02 <= clock[0] <= most_s


def test_a_launch_elsewhere_that_has_ended_is_succeeded_at_once(tmp_path):
    state = elsewhere(tmp_path, age=0)
    lifecycle._replace(tmp_path / STATE_NAME, {**state, "status": "stopped"})
    assert acquire(tmp_path).generation == 4


def test_the_state_of_an_earlier_launch_says_nothing_about_the_owner(tmp_path, quick):
    state = elsewhere(tmp_path, age=0)
    lifecycle._replace(tmp_path / STATE_NAME, {**state, "status": "stopped", "launch": "before theirs"})
    began = time.monotonic()
    assert acquire(tmp_path).generation == 4
    assert time.monotonic() - began >= 0.5  # it was watched, not believed


def test_without_hard_links_one_wins_all_the_same(tmp_path, monkeypatch):
    def link(source: Path, target: Path) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lifecycle.os, "link", link)
    late = check_free(tmp_path)
    acquire(tmp_path)
    with pytest.raises(ValueError, match="another launch is at work"):
        claim(tmp_path, late)


def test_an_owner_that_was_taken_for_dead_ends_when_it_wakes(tmp_path):
    first = launch(tmp_path)
    first.send_signal(signal.SIGSTOP)
    theirs = {**json.loads((tmp_path / ".owner-000001.json").read_text()), "released": True}
    (tmp_path / ".owner-000002.json").write_text(json.dumps({**theirs, "launch": "ours"}))
    before = read_state(tmp_path)["writes"]
    first.send_signal(signal.SIGCONT)
    assert first.wait(PATIENCE_S) == 1
    assert "another launch took this run over" in first.stderr.read()
    assert read_state(tmp_path)["writes"] <= before + 1


def test_wiping_a_run_keeps_who_owns_it(tmp_path):
    acquire(tmp_path)
    for name in ("config.json", "logs/train.jsonl", "checkpoints/final/x", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    wipe(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".owner-000001.json", "notes.txt"], "a person's file stays"
    with pytest.raises(ValueError, match="another launch"):
        acquire(tmp_path)
