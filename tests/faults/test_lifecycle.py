"""Stopping, the run's state, and its owner: signals, walltimes, damaged states, dead processes, and
launches that race. The laws are in tests/spec/test_run_stop.py and test_run_owner.py."""

import contextlib
import errno
import fcntl
import itertools
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from nanochat import run_owner, run_state, run_stop
from nanochat.config import Settings
from nanochat.run_guard import Guard
from nanochat.run_owner import OWNER_NAME, RunState, claim, exit_code, liveness
from nanochat.run_state import (
    STATE_NAME,
    identify,
    is_alive_here,
    launcher_pid,
    process_start,
    read_state,
)
from nanochat.run_stop import (
    FLAG_NAME,
    SIGNALS,
    StopWatch,
    began_s,
    deadline,
    request_stop,
)
from tests.crashes import is_suspended
from tests.spec.test_run_owner import record
from tests.spec.test_run_stop import ASKED, MAX_RUNTIME, SLURM_END, asks, elsewhere
from tests.training import PATIENCE_S, owner_of, wait_for

ROOT = Path(__file__).parents[2]


# ---- signals -------------------------------------------------------------------------------------


def test_previous_handlers_return_even_after_an_error_and_other_threads_leave_them_alone():
    received = []
    before = {
        number: signal.signal(number, lambda n, frame: received.append(n)) for number in SIGNALS
    }
    try:
        with pytest.raises(RuntimeError):
            with StopWatch() as stop:
                os.kill(os.getpid(), signal.SIGUSR1)
                raise RuntimeError
        assert stop.after_step() == "SIGUSR1" and received == []
        with ThreadPoolExecutor(1) as pool, StopWatch() as stop:
            pool.submit(StopWatch().__enter__).result()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.after_step() == "SIGUSR1"
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        assert sorted(received) == sorted(SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


IN_ONE_CALL = """
import hashlib, os, sys
from nanochat import run_stop
run_stop.SAME_CTRL_C_S = float(sys.argv[1])
with run_stop.StopWatch():
    os.write(1, b".")
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))  # one call, in which Python calls no handler
    while not os.path.exists(sys.argv[3]):
        pass
"""


@contextlib.contextmanager
def interrupted(*arguments):
    """A process inside one long call that has received Ctrl-C."""
    command = [sys.executable, "-c", IN_ONE_CALL, *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            yield process
        finally:
            process.kill()


def test_a_second_ctrl_c_ends_a_process_that_is_inside_a_long_call(tmp_path):
    """Regression: it waited for the end of the step."""
    with interrupted(0, 2 * 10**9, tmp_path / "go") as process:  # a quarter of an hour
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr.read().endswith(
            b"second SIGINT: exiting immediately without saving\n"
        )


def test_one_ctrl_c_that_is_delivered_twice_ends_no_process(tmp_path):
    with interrupted(1e9, 1, tmp_path / "go") as process:
        for number in (signal.SIGINT, signal.SIGTERM):
            time.sleep(0.1)  # signals that arrive at once may become one
            process.send_signal(number)
        time.sleep(0.1)
        (tmp_path / "go").touch()
        assert process.wait(PATIENCE_S) == 0
        err = process.stderr.read()
    assert b"; to exit without saving, press Ctrl-C again after one second\n" in err
    assert err.count(b"stopping after") == 1


def test_a_closed_stderr_does_not_keep_a_signal_from_stopping_the_run(monkeypatch):
    monkeypatch.setattr(
        run_stop.os, "write", mock.Mock(side_effect=OSError(5, "Input/output error"))
    )
    with StopWatch() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.after_step() == "SIGTERM"


def test_a_closed_terminal_stops_the_run():
    """Regression: SIGHUP ended the process, and nothing was saved."""
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    try:
        with StopWatch() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.after_step() == "SIGHUP"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nohup_keeps_its_meaning():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopWatch() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.after_step() == "" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# ---- walltime and the flag file ------------------------------------------------------------------

JOB = {"SLURM_JOB_ID": "17"}


@pytest.mark.parametrize(
    "seconds, env, squeue, end, message",
    [
        (
            60,
            {SLURM_END: "5000", MAX_RUNTIME: "70"},
            None,
            160.0,
            "30.0 s left (--max-runtime-seconds)",
        ),
        (
            -1,
            {SLURM_END: "5000", MAX_RUNTIME: "70"},
            None,
            1130.0,
            "walltime: 16 min 40 s left (SLURM_JOB_END_TIME)",
        ),
        (-1, {SLURM_END: "", MAX_RUNTIME: "70"}, None, 170.0, "NANOCHAT_MAX_RUNTIME"),
        (
            -1,
            {"GPT_SIMPLE_MAX_RUNTIME": "60"},
            None,
            None,
            "GPT_SIMPLE_MAX_RUNTIME is ignored; set NANOCHAT_MAX_RUNTIME",
        ),
        (-1, {**JOB, SLURM_END: "4500"}, None, 630.0, "8 min 20 s left"),
        (-1, {**JOB, "RANK": "1"}, None, None, ""),
        (-1, JOB, "echo 5000", 1130.0, "16 min 40 s left"),
        (-1, JOB, "sleep 9", None, "timed out"),
        *(
            (-1, JOB, answer, None, "gave no end for job 17")
            for answer in ("echo N/A", "exit 1", "echo x")
        ),
        *(
            (seconds, {}, None, ValueError, "--max-runtime-seconds: got")
            for seconds in (0, -2, math.nan, math.inf)
        ),
        (-1, {MAX_RUNTIME: "1h"}, None, ValueError, "NANOCHAT_MAX_RUNTIME: got '1h'"),
        *(
            (-1, {SLURM_END: time}, None, ValueError, f"END_TIME: got '{time}', expected the unix")
            for time in ("10", "x")
        ),
    ],
)
def test_the_first_limit_that_is_set_counts(
    tmp_path, monkeypatch, caplog, seconds, env, squeue, end, message
):
    """`squeue`: how squeue answers, which is asked by rank 0 of a job whose end SLURM does not set;
    None: not asked."""
    calls = tmp_path / "calls"
    (tmp_path / "squeue").write_text(
        f'#!/bin/sh\necho "$SLURM_TIME_FORMAT $@" >>{calls}\n{squeue}\n'
    )
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(run_stop, "SQUEUE_S", 0.3 if squeue == "sleep 9" else 30)
    monkeypatch.setattr(run_stop.time, "time", lambda: 4000.0)
    monkeypatch.setattr(run_stop.time, "monotonic", lambda: 130.0)
    env = {"PATH": os.environ["PATH"], **env}
    if end is ValueError:
        with pytest.raises(ValueError, match=message):
            deadline(seconds, env, 100.0)
        return
    with caplog.at_level("INFO"):
        assert deadline(seconds, env, 100.0, reserve_s=20.0) == end
    assert message in caplog.text
    assert (calls.read_text().split() if calls.exists() else None) == (
        ["%s", "--noheader", "--format=%e", "--jobs=17"] if squeue else None
    )


@pytest.mark.parametrize(
    "reserve_s, save_s, work, checks, stops_at, left",
    [
        (100, 0, {}, [0, 10], 880, 120),  # a step of 870 s
        (100, 0, {}, [860, 875, 885], 885.5, 114),  # 885 + 15 + 100 = 1000: just fits
        (0, 200, {}, [0, 10, *range(20, 690, 10)], 692, 308),  # 1.5 of a save
        # an evaluation of 300 s between steps of 1 and of 8 s
        (100, 0, {290: 300}, [290, 591], 599, 401),
        # two may meet
        (100, 0, {200: 100, 310: 150}, [190, 200, 310, 470, *range(480, 640, 10)], 645, 355),
        # one old step of 400 s, which compiled, does not count
        (0, 0, {}, [0, 400, *range(401, 997)], 997, 3),
    ],
)
def test_a_run_stops_while_a_step_a_save_or_the_reserve_and_the_slowest_work_of_each_kind_still_fit(
    monkeypatch, reserve_s, save_s, work, checks, stops_at, left
):
    stop = StopWatch(1000.0, reserve_s=reserve_s)
    # a jump of the wall clock moves nothing
    monkeypatch.setattr(run_stop.time, "time", lambda: 1e12)
    for seconds in (1, save_s, 2):
        stop.note_save(seconds)
    for now in checks:
        assert stop.after_step(now) == ""
        if now in work:
            stop.note_work(f"work {work[now]}", work[now])
            stop.note_work(f"work {work[now]}", 1)
    assert stop.after_step(stops_at) == stop.after_step(stops_at) == f"walltime: {left} s left"


def test_a_run_past_its_walltime_says_by_how_much():
    """Regression: "-4 s left"."""
    stop = StopWatch(1000.0, reserve_s=0)
    assert stop.after_step(1004.0) == "walltime: 4 s over"


def test_a_launch_begins_with_its_torchrun(monkeypatch):
    alone, torchrun = began_s(launcher_pid()), subprocess.Popen(["sleep", "60"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(run_state.os, "getppid", lambda: torchrun.pid)
    assert alone < began_s(launcher_pid()) < run_stop.uptime_s() + 0.1
    torchrun.kill()
    torchrun.wait()


def test_a_request_from_elsewhere_also_stops_the_processes_that_torchrun_restarts(
    tmp_path, monkeypatch
):
    """It names the launch, so it counts although it was there when the restarted process began."""
    owner = owner_of(tmp_path)
    with elsewhere(monkeypatch):
        request_stop(tmp_path)
    owner.release()
    assert asks(StopWatch(run_dir=tmp_path), tmp_path) == ASKED
    monkeypatch.setattr(run_stop, "identify_launcher", lambda: "another launch")
    assert asks(StopWatch(run_dir=tmp_path), tmp_path) == ("", False)


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 5000, b'{"launcher": 1}', b"\xff"])
def test_a_flag_made_in_any_other_way_counts_unless_it_was_there_before(tmp_path, content):
    (tmp_path / FLAG_NAME).write_bytes(content)
    stop = StopWatch(run_dir=tmp_path)
    assert asks(stop, tmp_path) == ("", False)
    (tmp_path / FLAG_NAME).write_bytes(content)
    assert asks(stop, tmp_path) == ASKED


# ---- the state -----------------------------------------------------------------------------------


def on_disk(run_dir, **values):
    """Whether the state on disk has these values."""
    return read_state(run_dir).items() >= values.items()


def test_changes_are_written_once_and_the_heartbeat_without_changes(tmp_path, monkeypatch):
    assert read_state(tmp_path) is None
    writes, replace = [], run_owner.replace_state
    monkeypatch.setattr(
        run_owner, "replace_state", lambda path, value: (writes.append(path), replace(path, value))
    )
    with RunState(
        owner_of(tmp_path), [identify()], num_iterations=10, checkpoint="checkpoint-2"
    ) as state:
        assert on_disk(
            tmp_path,
            status="starting",
            step=None,
            num_iterations=10,
            checkpoint="checkpoint-2",
            val_bpb=None,
            ranks=[identify()],
            world_size=1,
        )
        for step in range(1000):
            state.update(status="running", step=step, loss=float("nan"), val_bpb=1.5)
        assert on_disk(tmp_path, status="starting") and state.refresh() == state.refresh() == ""
        assert (
            on_disk(tmp_path, status="running", step=999, loss=None, val_bpb=1.5)
            and len(writes) == 2
        )
        first = read_state(tmp_path)["heartbeat"]
        monkeypatch.setattr(run_owner, "HEARTBEAT_S", 0.0)
        state.refresh()
        assert len(writes) == 3 and read_state(tmp_path)["heartbeat"] > first
    assert {p.name for p in tmp_path.iterdir()} == {STATE_NAME, OWNER_NAME}


@pytest.mark.parametrize(
    "status, error, reason, code",
    [
        ("", ValueError("disk ate it"), "disk ate it", 1),
        ("", KeyError("x"), "KeyError: 'x'", 1),
        ("", KeyboardInterrupt(), "KeyboardInterrupt: ", 1),
        ("", None, "ended without a status", 1),
        ("halted", ValueError("later"), "bucket x ran dry", 3),
        ("completed", None, "", 0),
    ],
)
def test_the_first_final_status_stays_and_an_end_without_one_is_a_failure(
    tmp_path, status, error, reason, code
):
    with (
        contextlib.suppress(type(error)),
        RunState(owner_of(tmp_path), [identify()], status="running") as state,
    ):
        if status:
            state.end(status, reason)
            state.update(status="running", step=5)
        if error is not None:
            raise error
    assert on_disk(tmp_path, status=status or "failed", reason=reason)
    assert exit_code(tmp_path, read_state(tmp_path)) == code
    owner_of(tmp_path)  # the run is free


def test_a_disk_that_hangs_delays_the_end_by_seconds_and_a_full_one_ends_nothing(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(run_owner, "CLOSE_S", 0.3)
    monkeypatch.setattr(run_owner, "HEARTBEAT_S", 0.0)
    replace, over = run_owner.replace_state, threading.Event()
    with RunState(owner_of(tmp_path), [identify()], status="running") as state:
        monkeypatch.setattr(
            run_owner, "replace_state", raiser(OSError(28, "No space left on device"))
        )
        assert [state.refresh() for _ in range(4)] == [""] * 4
        assert caplog.text.count("No space left on device") == 1
        monkeypatch.setattr(
            run_owner, "replace_state", lambda *args: (over.wait(PATIENCE_S), replace(*args))
        )
        began = time.monotonic()
        state.end("stopped", "a hang")
        assert time.monotonic() - began < PATIENCE_S and on_disk(tmp_path, status="running")
        with pytest.raises(ValueError, match="another launch owns this run"):
            owner_of(tmp_path)  # it may still write
        over.set()
        wait_for(lambda: on_disk(tmp_path, status="stopped"))
    wait_for(lambda: not run_owner.last_owner(tmp_path)[1])


def raiser(error):
    def fail(*args):
        raise error

    return fail


def whole_state(run_dir):
    RunState(owner_of(run_dir), [identify()], status="running").end("stopped")
    return read_state(run_dir)


@pytest.mark.parametrize(
    "change, message",
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ({"format_version": 2}, "this version"),
        ({"status": "odd"}, "this version"),
        ({"ranks": []}, "this version"),
        ({"ranks": [1]}, r"ranks\[0\]: expected an object"),
        ({"heartbeat": None}, "heartbeat: expected a number"),
        ({"ranks": [{**identify(), "pid": True}]}, "pid: expected a whole number"),
        ({"step": "5"}, "step: expected"),
        ({"reason": 1}, "reason: expected a string"),
        ({"started": 1e300}, r"started: got 1e\+300"),
        ({"heartbeat": math.nan}, "heartbeat: got nan"),
        ({"heartbeat": -1e12}, "heartbeat: got -1"),
        ({"eta_s": math.inf}, "eta_s: got inf"),
        ({"step": 10**400}, "step: got 1000"),
    ],
    ids=range(15),
)
def test_a_corrupt_state_is_named_and_the_next_launch_replaces_it(tmp_path, change, message):
    """Regression: times such as 1e300 and NaN ended scripts.status with a traceback."""
    text = change if isinstance(change, str) else json.dumps({**whole_state(tmp_path), **change})
    (tmp_path / STATE_NAME).write_text(text)
    with pytest.raises(ValueError, match=rf"{STATE_NAME}: .*{message}"):
        read_state(tmp_path)
    with RunState(owner_of(tmp_path), [identify()]):
        assert on_disk(tmp_path, status="starting")


def irregular(path, kind):
    """Replace a file by a folder, a FIFO or a link to `precious`."""
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(path.with_name("precious"))


@pytest.mark.parametrize("kind", ["folder", "FIFO", "link"])
def test_a_record_that_is_not_a_regular_file_is_named_and_never_opened_or_followed(
    tmp_path, kind, caplog
):
    """Regression: the state was written through a link under its temporary name; a FIFO made a
    launch hang."""
    for name, read in ((STATE_NAME, read_state), (OWNER_NAME, claim), (FLAG_NAME, request_stop)):
        run_dir = tmp_path / name
        (run_dir / "precious").write_text(json.dumps(whole_state(run_dir)))
        irregular(run_dir / name, kind)
        with pytest.raises(ValueError, match=rf"{name}: expected a regular file"):
            read(run_dir)
    run_dir = tmp_path / "temporary"
    run_dir.mkdir()
    (run_dir / "precious").write_text("precious")
    irregular(run_dir / f"{STATE_NAME}.tmp", kind)
    RunState(owner_of(run_dir), [identify()]).end("stopped")
    assert (run_dir / "precious").read_text() == "precious"
    assert (read_state(run_dir) is None and "cannot be written" in caplog.text) == (
        kind == "folder"
    )


# ---- living and dead processes -------------------------------------------------------------------


def test_a_process_is_alive_here_unless_it_has_ended_or_its_record_is_forged(tmp_path, monkeypatch):
    odd = tmp_path / "a) Z 1 2"
    odd.symlink_to("/bin/sleep")
    child, me = subprocess.Popen([odd, "60"]), identify()
    wait_for(lambda: ") Z" in Path(f"/proc/{child.pid}/stat").read_text())
    record = {**me, "pid": child.pid, "start": process_start(child.pid)}
    assert is_alive_here(me) and is_alive_here(record) and record["start"] != me["start"]
    child.kill()
    wait_for(lambda: not is_alive_here(record))
    assert Path(f"/proc/{child.pid}").exists(), "a zombie is dead"
    child.wait()
    assert not is_alive_here(record)
    for forged in (
        {"pid": -1},
        {"pid": 0},
        {"pid": -os.getpid()},
        {"start": None},
        {"start": "1"},
        {"host": "b"},
    ):
        assert not is_alive_here({**me, **forged})
    monkeypatch.setattr(run_state, "process_start", lambda pid: None)  # a system without /proc
    assert not is_alive_here({**me, "start": None})


def state_with(process, age):
    return {"status": "running", "ranks": [process], "heartbeat": time.time() - age}


def without_locks(monkeypatch):
    monkeypatch.setattr(
        run_owner.fcntl, "flock", raiser(OSError(errno.ENOLCK, "No locks available"))
    )


def test_a_run_is_alive_while_its_lock_is_held_and_elsewhere_while_its_heartbeat_is_young(
    tmp_path, monkeypatch
):
    me, owner = identify(), owner_of(tmp_path)
    elsewhere, forged = {**me, "host": "node7"}, {**me, "pid": -1, "start": None}

    def judged(process, age):
        state = state_with(process, age)
        assert exit_code(tmp_path, state) == {"alive": 20, "dead": 1}[liveness(tmp_path, state)]
        return liveness(tmp_path, state)

    assert {
        judged(process, age) for process in (me, elsewhere, forged) for age in (0, 5e3, -5e3)
    } == {"alive"}
    assert liveness(tmp_path, {**state_with(me, 0), "status": "halted"}) == "ended"
    owner.release()
    assert {judged(process, age) for process in (me, forged) for age in (0, 5e3, -5e3)} == {"dead"}
    # the far future is not young
    by_age = [(0, "alive"), (59, "alive"), (61, "dead"), (-59, "alive"), (-61, "dead")]
    assert [(age, judged(elsewhere, age)) for age, _ in by_age] == by_age
    without_locks(monkeypatch)
    for process, living in ((me, True), (elsewhere, False), (forged, False)):
        (tmp_path / OWNER_NAME).write_text(json.dumps({"launch": "x", "since": "then", **process}))
        for age, word in by_age:
            state = {**whole_state(tmp_path / "other"), **state_with(process, age)}
            (tmp_path / STATE_NAME).write_text(json.dumps(state))
            assert judged(process, age) == ("alive" if living else word)


# ---- one owner -----------------------------------------------------------------------------------


def test_one_of_many_simultaneous_launches_wins(tmp_path):
    """Half of the runs are new; the owner of the others has ended."""
    runs = [tmp_path / f"{i:02d}" for i in range(20)]
    for run_dir in runs[::2]:
        run_dir.mkdir()
        (run_dir / OWNER_NAME).write_text(record())
    context = multiprocessing.get_context("fork")
    all_ready, wins = context.Barrier(5), context.SimpleQueue()

    def race():
        owned = {}
        for run_dir in runs:
            all_ready.wait(PATIENCE_S)
            try:
                owned[run_dir] = owner_of(run_dir)
            except ValueError as e:
                assert "another launch own" in str(e), e
        all_ready.wait(PATIENCE_S)
        assert {owner.lost() for owner in owned.values()} <= {""}
        wins.put([*owned])

    racers = [context.Process(target=race) for _ in range(all_ready.parties)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(PATIENCE_S)
        assert racer.exitcode == 0
    won = [wins.get() for _ in racers]
    assert sorted(itertools.chain(*won)) == runs
    assert sum(map(bool, won)) > 1, "no race happened"


def test_an_inspection_at_the_same_moment_does_not_refuse_a_launch(tmp_path):
    (tmp_path / OWNER_NAME).touch()
    with open(tmp_path / OWNER_NAME) as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        threading.Timer(0.15, lambda: fcntl.flock(other, fcntl.LOCK_UN)).start()
        assert claim(tmp_path).lost() == ""


def test_a_refused_launch_removes_what_it_made_although_it_could_lock_only_at_the_second_try(
    tmp_path,
):
    """Regression: the second try did not know what the first one had made."""
    run_dir = tmp_path / "runs" / "run"
    lock = run_owner._lock
    tries = []

    def second(file, kind):
        tries.append(kind)
        return len(tries) > 1 and lock(file, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_owner, "_lock", second)
        claim(run_dir).release()
    assert len(tries) == 2 and not run_dir.parent.exists()


def test_a_file_that_another_launch_made_is_not_removed(tmp_path):
    (tmp_path / OWNER_NAME).touch()
    claim(tmp_path).release()
    assert (tmp_path / OWNER_NAME).exists()


def test_a_full_disk_refuses_a_launch_without_a_trace(tmp_path):
    """Regression: half a record stayed, and with it the folder."""
    run_dir = tmp_path / "runs" / "run"
    owner = claim(run_dir)
    file = owner._file
    owner._file = mock.Mock(wraps=file, write=lambda record: file.write(record[:10]))
    with pytest.raises(OSError, match="No space left"):
        owner.sign()
    owner.release()
    assert not run_dir.parent.exists()


def test_a_launch_that_begins_while_a_run_is_set_aside_loses_the_folder(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    owner_of(run_dir).release()
    first = claim(run_dir)
    late = []
    set_aside = run_owner.set_aside

    def slow(path):
        aside = set_aside(path)
        late.append(claim(path))
        return aside

    monkeypatch.setattr(run_owner, "set_aside", slow)
    first.set_aside()
    assert not first.lost()
    with pytest.raises(ValueError, match="a moment ago"):
        late[0].sign()


def test_a_launch_that_is_just_starting_is_not_confused_with_the_one_before(tmp_path):
    before = subprocess.run([sys.executable, "-c", OWN, tmp_path], input="", text=True, cwd=ROOT)
    assert before.returncode == 0
    owner = claim(tmp_path)
    with pytest.raises(ValueError, match="another launch owns this run: one that is just starting"):
        claim(tmp_path)
    owner.sign()
    with pytest.raises(ValueError, match=f"another launch owns this run: .*pid {os.getpid()}"):
        claim(tmp_path)
    owner.release()


def test_the_lock_ends_with_the_owner_not_with_its_children(tmp_path):
    """Neither a forked child nor a program that the owner started keeps the run."""
    owner = owner_of(tmp_path)
    program = subprocess.Popen(["sleep", "1000"], close_fds=False)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, b"ready")
        time.sleep(1000)
    os.read(read, 5)
    try:
        with pytest.raises(ValueError, match="another launch owns this run"):
            owner_of(tmp_path)
        owner.release()
        owner_of(tmp_path).release()
    finally:
        program.kill()
        program.wait()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


OWN = """
import sys
from pathlib import Path
from nanochat.run_owner import claim
assert "torch" not in sys.modules, "a second to import"
owner = claim(Path(sys.argv[1]))
owner.sign()
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "before",
    [
        [],
        [
            "unshare",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            'hostname node7; exec "$@"',
            "sh",
        ],
    ],
    ids=["here", "container"],
)
def test_a_suspended_owner_keeps_its_run_and_is_named_even_in_another_namespace(tmp_path, before):
    if before and subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("this user may not create namespaces")
    first = subprocess.Popen(
        [*before, sys.executable, "-c", OWN, tmp_path],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert first.stdout.readline() == "ready\n"
        owner = json.loads((tmp_path / OWNER_NAME).read_text())
        assert (owner["host"] == "node7") == bool(before)
        if not before:
            first.send_signal(signal.SIGSTOP)
            wait_for(lambda: is_suspended(first.pid))
        with pytest.raises(
            ValueError,
            match=f"^{tmp_path}: another launch owns this run: host '{owner['host']}', pid "
            f"{owner['pid']}, since '{owner['since']}'; .*scripts.stop .*--model-tag",
        ):
            owner_of(tmp_path)
        assert liveness(tmp_path, state_with(owner, age=0)) == "alive"
    finally:
        first.kill()
        first.wait()
    wait_for(lambda: not run_owner.last_owner(tmp_path)[1])
    owner_of(tmp_path)


@pytest.mark.parametrize(
    "age, changed, free",
    [
        (0, {}, False),
        (59, {}, False),
        (61, {}, True),
        (-61, {}, True),
        (0, {"status": "stopped"}, True),
    ],
)
def test_without_locks_a_young_heartbeat_owns_a_run_and_the_first_of_two_owners_exits(
    tmp_path, monkeypatch, age, changed, free
):
    there = {**identify(), "host": "node7"}
    state = {**whole_state(tmp_path), "status": "running", "ranks": [there]}
    (tmp_path / OWNER_NAME).write_text(json.dumps({"launch": "x", "since": "then", **there}))
    (tmp_path / STATE_NAME).write_text(
        json.dumps({**state, "heartbeat": time.time() - age, **changed})
    )
    without_locks(monkeypatch)
    if not free:
        with pytest.raises(ValueError, match="another launch owns this run"):
            owner_of(tmp_path)
        return
    late = claim(tmp_path)
    first = owner_of(tmp_path)
    with pytest.raises(ValueError, match="a moment ago"):
        late.sign()
    monkeypatch.setattr(
        run_owner, "is_alive_here", lambda process: False
    )  # first, suspended elsewhere
    second = owner_of(tmp_path)
    assert "no longer owns" in first.lost() and second.lost() == ""


def test_an_error_in_checking_the_owner_ends_nothing(tmp_path, monkeypatch):
    owner = owner_of(tmp_path)
    monkeypatch.setattr(run_owner, "open_regular", raiser(OSError(errno.EIO, "Input/output error")))
    assert owner.lost() == ""


def test_a_signal_is_recorded_while_slurm_is_asked_for_the_end_of_the_job(monkeypatch):
    """Regression: handlers were set after that, which takes up to ten seconds."""

    def asked(env):
        os.kill(os.getpid(), signal.SIGTERM)
        return ""

    monkeypatch.setattr(run_stop, "slurm_end", asked)
    with Guard(Settings(device_type="cpu")) as guard:
        assert guard.reason() == "SIGTERM"
