"""When a run should stop: signals, walltime and the flag file, each noted and honoured at the next look."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.lifecycle import (
    LOOK_EVERY_S,
    SIGNALS,
    Deadline,
    StopWatch,
    deadline,
    join_reasons,
    request_stop,
    stop_requested,
)

ROOT = Path(__file__).parents[1]


def run_python(code: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


# ---- signals --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_the_first_one_is_the_reason(number):
    with StopWatch() as stop:
        assert stop.wanted() == ""
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.wanted() == number.name
        assert stop.wanted() == number.name


def test_previous_handlers_are_back_afterwards_even_after_an_error():
    heard = []
    before = {number: signal.signal(number, lambda n, frame: heard.append(n)) for number in SIGNALS}
    try:
        with pytest.raises(RuntimeError):
            with StopWatch() as stop:
                os.kill(os.getpid(), signal.SIGUSR1)
                raise RuntimeError
        assert stop.wanted() == "SIGUSR1"
        assert heard == []
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        assert sorted(heard) == sorted(SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_entered_in_another_thread_it_leaves_signals_alone():
    seen = []

    def work() -> None:
        with StopWatch() as stop:
            seen.extend([signal.getsignal(signal.SIGUSR1), stop.wanted()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL, ""]


SLEEPER = """
import sys, time
from nanochat.lifecycle import StopWatch
with StopWatch() as stop:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        if sys.argv[1:] and stop.wanted():
            sys.exit(f"stopped: {stop.wanted()}")
"""


def test_a_second_sigint_ends_the_process_at_once_with_130():
    process = run_python(SLEEPER)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)  # the same Ctrl-C, on a second way
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.3)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert process.stderr.read().count("\n") == 1


def test_signals_in_a_storm_are_one_clean_stop():
    process = run_python(SLEEPER, "stop")
    process.stdout.readline()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1):
        process.send_signal(number)
    assert process.wait(30) == 1
    assert "stopped: SIG" in process.stderr.read()


def test_neither_module_brings_torch():
    code = "import sys, nanochat.lifecycle, nanochat.lifecycle, nanochat.watchdog; print('torch' in sys.modules)"
    assert run_python(code).communicate(timeout=60)[0] == "False\n"


# ---- walltime -------------------------------------------------------------------------------------------------------

def test_the_first_limit_that_is_set_counts():
    env = {"SLURM_JOB_END_TIME": "5000", "NANOCHAT_MAX_RUNTIME": "70"}
    clocks = {"wall": lambda: 4000.0, "monotonic": lambda: 130.0}
    assert deadline(60, env, 100.0, **clocks) == Deadline(160.0, 60)
    assert deadline(-1, env, 100.0, **clocks) == Deadline(1130.0, 1030.0)
    assert deadline(-1, {**env, "SLURM_JOB_END_TIME": ""}, 100.0, **clocks) == Deadline(170.0, 70.0)
    assert deadline(-1, {}, 100.0, **clocks) is None


@pytest.mark.parametrize("seconds, env, told", [
    (0, {}, "--max-runtime-seconds"), (-2, {}, "--max-runtime-seconds"), (float("nan"), {}, "--max-runtime-seconds"),
    (float("inf"), {}, "--max-runtime-seconds"), (-1, {"NANOCHAT_MAX_RUNTIME": "1h"}, "NANOCHAT_MAX_RUNTIME: got '1h'"),
    (-1, {"NANOCHAT_MAX_RUNTIME": "-5"}, "NANOCHAT_MAX_RUNTIME"), (-1, {"SLURM_JOB_END_TIME": "soon"}, "SLURM_JOB_END"),
    (-1, {"SLURM_JOB_END_TIME": "10"}, "SLURM_JOB_END_TIME: that was"),
])
def test_a_limit_that_is_none_is_refused_by_name(seconds, env, told):
    with pytest.raises(ValueError, match=told):
        deadline(seconds, env, 0.0)


def test_a_bad_reserve_is_refused():
    with pytest.raises(ValueError, match="--walltime-reserve-seconds: got -1"):
        StopWatch(reserve_s=-1)


def test_a_wall_clock_that_jumps_moves_nothing():
    wall = [4000.0]
    end = deadline(-1, {"SLURM_JOB_END_TIME": "5000"}, 100.0, wall=lambda: wall[0], monotonic=lambda: 100.0)
    stop = StopWatch(end, reserve_s=10)
    wall[0] = 1e12
    assert stop.wanted(101.0) == ""
    assert stop.wanted(1095.0).startswith("walltime")


def look(stop: StopWatch, times: list[float], **ahead: tuple[str, ...]) -> list[str]:
    return [stop.wanted(now, **ahead) for now in times]


def test_it_stops_while_a_step_and_the_reserve_still_fit():
    stop = StopWatch(Deadline(1000.0, 1000.0), reserve_s=100)
    assert look(stop, [0, 10, 880, 890]) == ["", "", "walltime: 120 s left of 1,000", "walltime: 120 s left of 1,000"]
    stop = StopWatch(Deadline(1000.0, 1000.0), reserve_s=100)
    assert look(stop, [860, 875, 885]) == ["", "", ""]  # 885 + 15 + 100 = 1000: just fits
    assert stop.wanted(885.5) == "walltime: 114 s left of 1,000"


def test_steps_are_forgotten_but_the_slowest_save_is_not():
    stop = StopWatch(Deadline(1000.0, 1000.0))
    assert look(stop, [0, 300, *range(301, 317)]) == [""] * 18  # the step of 300 s is out of sight
    stop.note_save(200)
    assert look(stop, [517]) == [""]
    stop.note_save(2)
    assert look(stop, [530, *range(540, 680, 10)]) == [""] * 15  # 11 + 1.5 * 200 + 11 fit behind 678
    assert stop.wanted(680) == "walltime: 320 s left of 1,000"


def test_what_is_noted_is_no_step_and_counts_where_it_is_ahead():
    stop = StopWatch(Deadline(1000.0, 1000.0), reserve_s=100)
    stop.wanted(0.0)
    stop.note("evaluation", 500.0)
    assert stop.wanted(501.0) == ""  # a step of 1 s
    assert stop.wanted(502.0, ahead=("sampling",)) == ""
    assert stop.wanted(503.0, ahead=("evaluation",)).startswith("walltime")


@settings(deadline=None)
@given(st.lists(st.floats(0.5, 50), min_size=1, max_size=60), st.floats(0, 100), st.floats(0, 40))
def test_whatever_the_steps_the_save_fits_if_no_step_is_longer_than_those_before(steps, reserve_s, save_s):
    steps = sorted(steps, reverse=True)
    stop = StopWatch(Deadline(500.0, 500.0), reserve_s=reserve_s)
    stop.note_save(save_s)
    now, looks = 0.0, 0
    stop.wanted(now)
    while not stop.wanted(now) and now < 1000:
        now += steps[min(looks, len(steps) - 1)]
        looks += 1
    assert stop.wanted().startswith("walltime")
    if looks > 1:  # the first step is longer than anything known before
        assert now + max(save_s, reserve_s) <= 500.0 + 1e-6


# ---- the flag file --------------------------------------------------------------------------------------------------

def test_a_stale_flag_is_removed_and_a_new_one_is_seen_within_its_second(tmp_path):
    request_stop(tmp_path)
    stop = StopWatch()
    assert stop.wanted(0.0) == ""
    stop.clear(tmp_path)
    assert not stop_requested(tmp_path)
    assert stop.wanted(10.0) == ""
    request_stop(tmp_path)
    assert stop_requested(tmp_path)
    assert stop.wanted(10.0 + 0.9 * LOOK_EVERY_S) == ""  # not looked for again so soon
    assert stop.wanted(10.0 + LOOK_EVERY_S) == "asked by scripts.stop"


def test_only_the_rank_that_was_given_the_folder_looks(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr("nanochat.lifecycle.os.path.lexists", lambda path: looks.append(path) or False)
    other, first = StopWatch(), StopWatch()
    first.clear(tmp_path)
    for tick in range(1000):
        other.wanted(tick * 0.01)
        first.wanted(tick * 0.01)
    assert looks == [tmp_path / ".shutdown_requested"] * 10


def test_an_empty_file_made_by_hand_is_a_request_too(tmp_path):
    stop = StopWatch()
    stop.clear(tmp_path)
    (tmp_path / ".shutdown_requested").touch()
    assert stop.wanted(time.monotonic() + 5) == "asked by scripts.stop"


def test_reasons_of_all_ranks_become_one_text():
    assert join_reasons(["", "", ""]) == ""
    assert join_reasons(["SIGUSR1", "SIGUSR1"]) == "SIGUSR1"
    assert join_reasons(["", "SIGTERM", "", "SIGTERM"]) == "SIGTERM (rank 1, 3)"
    assert join_reasons(["walltime: 118 s left of 3,600", "walltime: 117 s left of 3,600"]) == (
        "walltime: 118 s left of 3,600")
    assert join_reasons(["asked by scripts.stop", "SIGINT"]) == "asked by scripts.stop; SIGINT (rank 1)"
