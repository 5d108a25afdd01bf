"""How a run ends, where it stands, who owns it: reasons to stop are honoured at the next look, what is told is read,
life and death are told apart, and one launch at most owns a run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import lifecycle
from nanochat.lifecycle import (
    LOOK_EVERY_S,
    SIGNALS,
    STATE_NAME,
    RunState,
    StopWatch,
    acquire,
    check_free,
    claim,
    deadline,
    exit_code,
    identify,
    join_reasons,
    liveness,
    newest_owner,
    owner_path,
    process_start,
    read_state,
)
from nanochat.run_dir import set_aside
from tests.training import PATIENCE_S, wait_for

ROOT = Path(__file__).parents[1]


@pytest.fixture
def quick(monkeypatch):
    """A minute becomes a second."""
    for name, seconds in (("HEARTBEAT_S", 0.1), ("WATCH_S", 0.6), ("LOOK_EVERY_S", 0.02)):
        monkeypatch.setattr(lifecycle, name, seconds)


def python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# ---- signals ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_told_and_the_first_one_is_the_reason(number, capfd):
    with StopWatch() as stop:
        assert stop.wanted() == stop.asked() == ""
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert [stop.asked(), stop.wanted(), stop.wanted()] == [number.name] * 3
    told = capfd.readouterr().err
    assert told.startswith(f"\n{number.name}: finishing the step, then saving") and told.count("saving") == 1


def test_previous_handlers_are_back_afterwards_even_after_an_error():
    heard = []
    before = {number: signal.signal(number, lambda n, frame: heard.append(n)) for number in SIGNALS}
    try:
        with pytest.raises(RuntimeError):
            with StopWatch() as stop:
                os.kill(os.getpid(), signal.SIGUSR1)
                raise RuntimeError
        assert stop.wanted() == "SIGUSR1" and heard == []
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        assert sorted(heard) == sorted(SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_entered_in_another_thread_it_leaves_signals_alone():
    def handler_inside():
        with StopWatch():
            return signal.getsignal(signal.SIGUSR1)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handler_inside).result() == signal.SIG_DFL


def test_a_second_sigint_ends_the_process_at_once_with_130(monkeypatch, capfd):
    now, ended = [100.0], []
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(lifecycle.os, "_exit", ended.append)
    with StopWatch():
        for number, after_s in ((signal.SIGINT, 0.0), (signal.SIGINT, 0.2),  # the same Ctrl-C, on a second way
                                (signal.SIGTERM, 1.5)):
            now[0] = 100.0 + after_s
            os.kill(os.getpid(), number)
            assert ended == []
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [130]
    told = capfd.readouterr().err
    assert "Ctrl-C again after a second: ends at once, unsaved" in told  # within it, it is the same
    assert told.count("finishing the step") == 1 and told.endswith("\nsecond SIGINT: ended at once, nothing saved\n")


# ---- walltime and the flag file ---------------------------------------------------------------------

def test_the_first_limit_that_is_set_counts_and_a_wall_clock_that_jumps_moves_nothing(monkeypatch):
    env = {"SLURM_JOB_END_TIME": "5000", "NANOCHAT_MAX_RUNTIME": "70"}
    monkeypatch.setattr(lifecycle.time, "time", lambda: 4000.0)
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: 130.0)
    assert deadline(60, env, 100.0) == 160.0
    assert deadline(-1, {"NANOCHAT_MAX_RUNTIME": "70"}, 100.0) == 170.0
    assert deadline(-1, {}, 100.0) is None
    assert deadline(-1, env, 100.0) == 1130.0
    stop = StopWatch(deadline(-1, env, 100.0), reserve_s=10)
    monkeypatch.setattr(lifecycle.time, "time", lambda: 1e12)
    assert stop.wanted(131.0) == ""
    assert stop.wanted(1125.0).startswith("walltime")


@pytest.mark.parametrize("answer, env, at, told", [
    ("echo 5000", {}, 1130.0, "walltime: 16 min 40 s left (SLURM_JOB_END_TIME)"),
    ("echo 5000", {"RANK": "1"}, None, ""), ("echo 5000", {"SLURM_JOB_END_TIME": "4500"}, 630.0, "8 min 20 s left"),
    ("echo N/A", {}, None, "did not tell when job 17 ends"), ("exit 1", {}, None, "did not tell"),
    ("sleep 9", {}, None, "timed out"), ("echo x", {}, None, "did not tell"),
    ("", {"SLURM_JOB_ID": ""}, None, "")])
def test_a_slurm_that_does_not_tell_its_jobs_their_end_is_asked_once_by_rank_0(
        tmp_path, monkeypatch, caplog, answer, env, at, told):
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\necho "$SLURM_TIME_FORMAT $@" >>{tmp_path}/asked\n{answer}\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(lifecycle, "SQUEUE_S", 0.3 if "sleep" in answer else 30)
    monkeypatch.setattr(lifecycle.time, "time", lambda: 4000.0)
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: 130.0)
    with caplog.at_level("INFO"):
        found = deadline(-1, {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "17", **env}, 100.0)
    assert found == at and told in caplog.text
    asked = (tmp_path / "asked").read_text().split() if (tmp_path / "asked").exists() else None
    assert asked == (None if env else ["%s", "--noheader", "--format=%e", "--jobs=17"])


@pytest.mark.parametrize("seconds, env, told", [
    *((seconds, {}, "--max-runtime-seconds") for seconds in (0, -2, float("nan"), float("inf"))),
    (-1, {"NANOCHAT_MAX_RUNTIME": "1h"}, "NANOCHAT_MAX_RUNTIME: got '1h'"),
    (-1, {"SLURM_JOB_END_TIME": "soon"}, "SLURM_JOB_END"),
    (-1, {"SLURM_JOB_END_TIME": "10"}, "SLURM_JOB_END_TIME: got '10', expected the unix time")])
def test_a_limit_that_is_none_is_refused_by_name(seconds, env, told):
    with pytest.raises(ValueError, match=told):
        deadline(seconds, env, 0.0)


@pytest.mark.parametrize("reserve_s, save_s, noted, looks, stops_at, left", [
    (100, 0, {}, [0, 10], 880, 120),  # a step of 870 s
    (100, 0, {}, [860, 875, 885], 885.5, 114),  # 885 + 15 + 100 = 1000: just fits
    (0, 200, {}, [0, 10, *range(20, 690, 10)], 692, 308),  # 1.5 of a save
    (100, 0, {290: 300}, [290, 591], 599, 401),  # an evaluation of 300 s between steps of 1 and of 8 s
    (100, 0, {200: 100, 310: 150}, [190, 200, 310, 470, *range(480, 640, 10)], 645, 355),  # two may meet
    (0, 0, {}, [0, 400, *range(401, 997)], 997, 3)])  # a step of 400 s, as one that compiles, is forgotten
def test_it_stops_while_a_step_a_save_or_the_reserve_and_the_slowest_of_each_look_still_fit(
        reserve_s, save_s, noted, looks, stops_at, left):
    stop = StopWatch(1000.0, reserve_s=reserve_s)
    for seconds in (1, save_s, 2):
        stop.note_save(seconds)
    for now in looks:
        assert stop.wanted(now) == ""
        if now in noted:
            stop.note(f"look {noted[now]}", noted[now])
            stop.note(f"look {noted[now]}", 1)
    assert stop.wanted(stops_at) == stop.wanted(stops_at) == f"walltime: {left} s left"


@settings(deadline=None)
@given(st.lists(st.floats(0.5, 50), min_size=1, max_size=60), st.floats(0, 100), st.floats(0, 40))
def test_whatever_the_steps_the_save_fits_if_no_step_is_longer_than_those_before(steps, reserve_s, save_s):
    steps = sorted(steps, reverse=True)
    stop = StopWatch(500.0, reserve_s=reserve_s)
    stop.note_save(save_s)
    now, looks = 0.0, 0
    stop.wanted(now)
    while not stop.wanted(now) and now < 1000:
        now += steps[min(looks, len(steps) - 1)]
        looks += 1
    assert stop.wanted().startswith("walltime")
    if looks > 1:  # the first step is longer than anything known before
        assert now + max(save_s, reserve_s) <= 500.0 + 1e-6


def test_a_stale_flag_is_removed_and_a_new_one_is_seen_within_its_second(tmp_path):
    (tmp_path / ".shutdown_requested").touch()
    stop = StopWatch()
    assert stop.wanted(0.0) == ""
    stop.clear(tmp_path)
    assert stop.wanted(10.0) == ""
    (tmp_path / ".shutdown_requested").touch()  # by hand: it counts by being there
    assert stop.asked(10.0 + 0.9 * LOOK_EVERY_S) == ""  # not looked for again so soon
    assert stop.wanted(10.0 + LOOK_EVERY_S) == "asked by scripts.stop"


def test_reasons_of_all_ranks_become_one_text():
    assert join_reasons(["", "", ""]) == ""
    assert join_reasons(["SIGUSR1", "SIGUSR1"]) == "SIGUSR1"
    assert join_reasons(["", "SIGTERM", "", "SIGTERM"]) == "SIGTERM (rank 1)"
    assert join_reasons(["walltime: 118 s left", "walltime: 117 s left"]) == "walltime: 118 s left"


# ---- the state --------------------------------------------------------------------------------------

def told(run_dir, **news):
    """Whether the state that is on disk says so."""
    state = read_state(run_dir)
    return all(state[name] == value for name, value in news.items())


def test_what_is_told_is_read(tmp_path):
    assert read_state(tmp_path) is None
    with RunState(acquire(tmp_path), [identify()], num_iterations=10, checkpoint="checkpoint-2") as state:
        first = read_state(tmp_path)
        assert first["ranks"] == [identify()] and first["world_size"] == 1
        assert told(tmp_path, status="starting", step=None, num_iterations=10, checkpoint="checkpoint-2", val_bpb=None)
        state.update(status="running", step=3, loss=float("nan"), val_bpb=1.5)
        wait_for(lambda: told(tmp_path, status="running", step=3, loss=None, val_bpb=1.5))
        assert liveness(read_state(tmp_path)) == "alive" and exit_code(read_state(tmp_path)) == 20
        state.close("completed")
    assert told(tmp_path, status="completed") and exit_code(read_state(tmp_path)) == 0


def test_news_is_written_by_itself_but_not_at_every_step_and_never_by_halves(tmp_path, quick, monkeypatch):
    writes, replace = [], lifecycle._replace
    monkeypatch.setattr(lifecycle, "_replace", lambda path, value: (writes.append(path), replace(path, value)))
    with RunState(acquire(tmp_path), [identify()], status="running") as state:
        for step in range(10_000):
            state.update(step=step, reason="x" * (step % 3000))
            if step % 500 == 0:
                assert read_state(tmp_path)["status"] == "running"
        wait_for(lambda: told(tmp_path, step=9_999))
        assert len(writes) < 1_000
        beats = read_state(tmp_path)["heartbeat"]
        wait_for(lambda: read_state(tmp_path)["heartbeat"] > beats)  # the main thread is busy
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


@pytest.mark.parametrize("said, error, reason, code", [
    ("", ValueError("disk ate it"), "disk ate it", 1), ("", KeyError("x"), "KeyError: 'x'", 1),
    ("", KeyboardInterrupt(), "KeyboardInterrupt: ", 1), ("", None, "ended without saying how", 1),
    ("halted", ValueError("later"), "bucket x ran dry", 3)])
def test_the_first_final_status_stays_and_an_end_without_one_is_a_failure(tmp_path, said, error, reason, code):
    try:
        with RunState(acquire(tmp_path), [identify()], status="running") as state:
            if said:
                state.close(said, reason)
                state.update(status="running", step=5)
            if error is not None:
                raise error
    except BaseException as e:
        assert e is error
    assert told(tmp_path, status=said or "failed", reason=reason) and exit_code(read_state(tmp_path)) == code
    acquire(tmp_path)  # it was given up


def test_a_disk_that_hangs_holds_up_nobody_and_one_that_fails_for_a_while_ends_nothing(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(lifecycle, "CLOSE_S", 0.3)
    owner, listdir, broken = acquire(tmp_path), os.listdir, [5]

    def fails_at_first(path):
        if broken:
            raise OSError(broken.pop(), "Input/output error")
        return listdir(path)

    state = RunState(owner, [identify()], status="running")
    monkeypatch.setattr(lifecycle.os, "listdir", fails_at_first)
    wait_for(lambda: not broken)
    state.update(step=3)
    wait_for(lambda: told(tmp_path, step=3))
    assert state.lost() == ""
    os.mkfifo(tmp_path / f"{STATE_NAME}.tmp")  # whoever opens it waits for a reader
    began = time.monotonic()
    state.update(status="stopping")
    state.close("failed", "a hang")
    assert time.monotonic() - began < PATIENCE_S and state.lost() == ""
    with open(tmp_path / f"{STATE_NAME}.tmp"):
        state._thread.join(PATIENCE_S)


def test_a_full_disk_is_told_once_and_stops_nothing(tmp_path, quick, monkeypatch, caplog):
    calls = []

    def full(path, value):
        calls.append(path)
        raise OSError(28, "No space left on device")

    owner, replace = acquire(tmp_path), lifecycle._replace
    monkeypatch.setattr(lifecycle, "_replace", full)
    with RunState(owner, [identify()]) as state:
        state.update(status="running", step=1)
        wait_for(lambda: len(calls) > 4)
        assert caplog.text.count("No space left on device") == 1
        monkeypatch.setattr(lifecycle, "_replace", replace)
        state.close("stopped", "SIGTERM")
    assert exit_code(read_state(tmp_path)) == 10


def whole_state(run_dir):
    with RunState(acquire(run_dir), [identify()], status="running") as state:
        state.close("stopped")
    return json.loads((run_dir / STATE_NAME).read_text())


def test_a_broken_state_is_named_and_no_dead_end(tmp_path, quick):
    whole = whole_state(tmp_path)
    for change, said in (
            ("{", "not valid JSON"), ("[" * 100_000, "not valid JSON"), ({"format_version": 2}, "not a state as"),
            ({"status": "odd"}, "not a state as"), ({"ranks": []}, "not a state as"),
            ({"ranks": [1]}, r"ranks\[0\]: expected an object"), ({"heartbeat": None}, "heartbeat: expected a number"),
            ({"step": "5"}, "step: expected"), ({"launch": 1}, "launch: expected a text")):
        text = change if isinstance(change, str) else json.dumps({**whole, **change})
        (tmp_path / STATE_NAME).write_text(text)
        with pytest.raises(ValueError, match=rf"{STATE_NAME}: .*{said}"):
            read_state(tmp_path)
    (tmp_path / ".owner-000001.json").write_text(record(start="1"))  # its launch is gone
    with RunState(acquire(tmp_path), [identify()]):
        assert told(tmp_path, status="starting")


# ---- life and death ---------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def dead_process():
    """What `identify` said in a process that is gone, and needed no PyTorch for it."""
    process = python("import json, sys; from nanochat.lifecycle import identify; print(json.dumps(identify()))\n"
                     "assert 'torch' not in sys.modules")
    said = json.loads(process.communicate(timeout=PATIENCE_S)[0])
    assert said["pid"] == process.pid and process.returncode == 0
    return said


def test_a_process_is_known_by_its_start_whatever_its_name(tmp_path):
    odd = tmp_path / "a) Z 1 2"
    odd.symlink_to("/bin/sleep")
    me = process_start(os.getpid())
    assert me is not None and me == process_start(os.getpid())
    child = subprocess.Popen([odd, "60"])
    wait_for(lambda: ") Z" in Path(f"/proc/{child.pid}/stat").read_text())
    assert process_start(child.pid) not in (None, me) and process_start(child.pid).isdigit()
    child.kill()
    wait_for(lambda: process_start(child.pid) is None)  # a corpse that nobody has fetched is dead
    assert Path(f"/proc/{child.pid}").exists()
    child.wait()
    assert process_start(child.pid) is None


def state_with(process, *, status="running", age=0.0):
    return {"status": status, "ranks": [process], "heartbeat": time.time() - age}


def test_life_in_the_same_place_is_the_process_and_elsewhere_a_young_heartbeat(dead_process, monkeypatch):
    me = identify()
    for age in (0, 5_000, -5_000):
        assert liveness(state_with(me, age=age)) == "alive"
        assert liveness(state_with({**me, "start": "1"}, age=age)) == "dead"  # the pid is another's now
    assert liveness(state_with(dead_process)) == "dead"
    assert liveness(state_with(me, status="halted")) == "ended"
    for elsewhere in ({**me, "place": "another boot"}, {**me, "place": "", "start": None}):
        for age, known, code in ((0, "alive", 20), (59, "alive", 20), (61, "dead", 1), (-59, "alive", 20),
                                 (-61, "dead", 1)):  # the far future is no youth
            assert liveness(state_with(elsewhere, age=age)) == known
            assert exit_code(state_with(elsewhere, age=age)) == code
        monkeypatch.setattr(lifecycle, "place", lambda: "")  # a system that does not tell


# ---- one owner --------------------------------------------------------------------------------------

LAUNCH = """
import sys
from pathlib import Path
from nanochat import lifecycle, watchdog
run_dir, me = Path(sys.argv[1]), [lifecycle.identify()]
lifecycle.HEARTBEAT_S, lifecycle.LOOK_EVERY_S = 0.1, 0.02
with lifecycle.RunState(lifecycle.acquire(run_dir), me, status="running") as state, watchdog.Watchdog(
        None, me, timeout_s=1, lost=state.lost, on_failure=lambda verdict: state.close("failed", verdict)):
    print("ready", flush=True)
    sys.stdin.readline()
    state.close("stopped")
"""


def launch(run_dir):
    process = python(LAUNCH, run_dir)
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_broken_record_of_an_owner_is_told_and_replaced(tmp_path, caplog):
    owner = acquire(tmp_path)
    for damage in ("", "{", "[]", "[" * 100_000, '{"launch": 1}', '{"since": 1.0}'):
        caplog.clear()
        broken = owner_path(tmp_path, owner.generation)
        broken.write_text(damage)
        owner = acquire(tmp_path)
        assert newest_owner(tmp_path) == owner.generation and owner.lost() == ""
        assert f"{broken.name}: " in caplog.text and "it is replaced" in caplog.text


RACER = """
import sys, time
from pathlib import Path
from nanochat.lifecycle import acquire
print("ready", flush=True)
began = float(sys.stdin.readline())
for i, run_dir in enumerate(sorted(Path(sys.argv[1]).iterdir())):
    time.sleep(max(0, began + i / 40 - time.time()))  # one that runs alone for a while waits for the others
    try:
        print(run_dir.name, acquire(run_dir).generation, flush=True)
    except ValueError as e:
        assert "another launch" in str(e), e
print("done", flush=True)
sys.stdin.readline()
"""


def record(**changed):
    return json.dumps({"launch": "x", "since": 0.0, **identify(), **changed})


def test_of_many_launches_at_the_same_time_one_wins(tmp_path, dead_process):
    """Of a run that nobody had, and of one whose owner is gone."""
    rounds = [tmp_path / f"{i:02d}" for i in range(60)]
    for run_dir in rounds:
        run_dir.mkdir()
    for run_dir in rounds[::2]:
        (run_dir / ".owner-000004.json").write_text(record(**dead_process))
    racers = [python(RACER, tmp_path) for _ in range(5)]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 5
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
    assert winners == [f"{run_dir.name} {5 if i % 2 == 0 else 1}\n" for i, run_dir in enumerate(rounds)]
    assert sum(bool(won) for won in wins) > 1, "no race happened"


ACTIONS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["look", "claim", "die"])), max_size=40)


@settings(deadline=None)
@given(ACTIONS)
def test_however_looks_claims_and_deaths_interleave_there_is_one_owner_at_most(actions):
    living = set()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "is_alive_here", lambda record: record["launch"] in living)
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
            elif action == "die" and actor in owners:
                owner = owners.pop(actor)
                living.discard(owner.launch)
                assert owner.lost() == ""
            assert len(owners) <= 1
        living.clear()
        acquire(run_dir)


def test_a_launch_that_was_delayed_between_look_and_claim_gets_nothing(tmp_path):
    late = check_free(tmp_path)
    for _ in range(2):
        whole_state(tmp_path)
    with pytest.raises(ValueError, match="a moment ago"):
        claim(tmp_path, late)
    assert acquire(tmp_path).generation == 3


def test_where_a_run_was_set_aside_the_number_of_a_delayed_launch_is_not_free(tmp_path):
    run_dir = tmp_path / "run"
    whole_state(run_dir)
    late = check_free(run_dir)
    first = claim(run_dir, late)
    aside = set_aside(run_dir)
    first = claim(run_dir, first.generation)
    with pytest.raises(ValueError, match="another launch"):
        claim(run_dir, late)
    assert first.lost() == "" and newest_owner(run_dir) == first.generation and newest_owner(aside) == late + 1


def elsewhere(run_dir, *, age, **changed):
    """A run that a launch in another place owns: its state, whose heartbeat is so old."""
    there = {**identify(), "host": "node7", "place": "another boot"}
    state = {**whole_state(run_dir), "status": "running", "launch": "theirs", "ranks": [there],
             "heartbeat": time.time() - age, **changed}
    (run_dir / ".owner-000003.json").write_text(record(launch="theirs", **there))
    lifecycle._replace(run_dir / STATE_NAME, state)
    return state


@pytest.mark.parametrize("age", [0, 3600, -3600, -10**9])
def test_a_launch_elsewhere_that_beats_is_left_alone_whatever_its_clock_says(tmp_path, quick, age, monkeypatch):
    monkeypatch.setattr(lifecycle, "WATCH_S", 60.0)  # a machine that does much else may beat late
    state = elsewhere(tmp_path, age=age)
    over = threading.Event()

    def beat():
        while not over.wait(0.05):
            lifecycle._replace(tmp_path / STATE_NAME, {**state, "heartbeat": time.time() - age})

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ValueError, match="another launch is at work on this run: host node7"):
            acquire(tmp_path)
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("changed, least_s", [
    ({}, 0.5), ({"heartbeat": 0.0}, 0.5), ({"status": "stopped"}, 0.0),
    ({"status": "stopped", "launch": "before theirs"}, 0.5)])  # says nothing about this owner
def test_a_launch_elsewhere_that_is_silent_is_succeeded_when_it_was_watched(tmp_path, quick, caplog, changed, least_s):
    elsewhere(tmp_path, age=0, **changed)
    began = time.monotonic()
    assert acquire(tmp_path).generation == 4
    assert time.monotonic() - began >= least_s and ("watching its heartbeat" in caplog.text) == bool(least_s)


@pytest.mark.parametrize("removed", ["record", "run directory"])
@pytest.mark.parametrize("successor", [False, True])
def test_an_owner_whose_record_is_gone_or_anothers_ends_at_its_next_look(tmp_path, removed, successor):
    def files():
        return {p: p.read_bytes() for p in run_dir.glob(".*") if not p.name.startswith(STATE_NAME)}

    run_dir = tmp_path / "run"
    first = launch(run_dir)
    first.send_signal(signal.SIGSTOP)
    wait_for(lambda: ") T" in Path(f"/proc/{first.pid}/stat").read_text())
    if removed == "record":
        (run_dir / ".owner-000001.json").unlink()
    else:
        shutil.rmtree(run_dir)
    if successor:
        run_dir.mkdir(exist_ok=True)
        (run_dir / f".owner-00000{2 if removed == 'record' else 1}.json").write_text(record(launch="theirs"))
    before, there = files(), run_dir.exists()
    first.send_signal(signal.SIGCONT)
    assert first.wait(PATIENCE_S) == 1
    said = "another launch took it over" if successor else "its files were removed while it trains"
    error = first.stderr.read()
    assert error.startswith(f"error: {run_dir}: this launch does not own the run any more: {said}")
    assert error.count("\n") == 1 and files() == before and run_dir.exists() == there


def test_a_run_that_ends_after_it_was_removed_leaves_the_place_alone(tmp_path):
    run_dir = tmp_path / "run"
    with RunState(acquire(run_dir), [identify()]) as state:
        shutil.rmtree(run_dir)
        new = acquire(run_dir)
        state.close("stopped")
    assert list(run_dir.iterdir()) == [owner_path(run_dir, new.generation)]
