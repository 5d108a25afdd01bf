"""A run stops at the next check: after a signal, before its walltime ends, or when it is asked."""

import contextlib
import os
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import run_stop
from nanochat.common import join_reasons
from nanochat.run_stop import (
    FLAG_NAME,
    SIGNALS,
    StopWatch,
    deadline,
    request_stop,
)

# ---- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_reported_once_and_the_first_one_is_the_reason(number, capfd):
    with StopWatch() as stop:
        assert stop.after_step() == stop.asked() == ""
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert [stop.asked(), stop.after_step(), stop.after_step()] == [number.name] * 3
    err = capfd.readouterr().err
    assert (
        err.startswith(f"\n{number.name}: stopping after the current step")
        and err.count("stopping") == 1
    )


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_second_ctrl_c_is_only_offered_where_one_arrives(torchrun, monkeypatch, capfd):
    """Regression: torchrun starts its processes in sessions of their own and passes on one Ctrl-C."""
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with StopWatch():
        os.kill(os.getpid(), signal.SIGINT)
    err = capfd.readouterr().err
    assert "stopping after the current step" in err and ("press Ctrl-C again" in err) != torchrun


# ---- walltime and the flag file ------------------------------------------------------------------

SLURM_END = "SLURM_JOB_END_TIME"
MAX_RUNTIME = "NANOCHAT_MAX_RUNTIME"


@settings(deadline=None)
@given(st.lists(st.floats(0.5, 50), min_size=1, max_size=60), st.floats(0, 100), st.floats(0, 40))
def test_the_save_fits_if_no_step_is_longer_than_the_steps_before_it(steps, reserve_s, save_s):
    steps = sorted(steps, reverse=True)
    stop = StopWatch(500.0, reserve_s=reserve_s)
    stop.note_save(save_s)
    now, checks = 0.0, 0
    stop.after_step(now)
    while not stop.after_step(now) and now < 1000:
        now += steps[min(checks, len(steps) - 1)]
        checks += 1
    assert stop.after_step().startswith("walltime")
    if checks > 1:  # the first step is longer than anything before it
        assert now + max(save_s, reserve_s) <= 500.0 + 1e-6


@pytest.mark.parametrize(
    "seconds, env, name",
    [
        (60, {}, "--max-runtime-seconds"),
        (-1, {MAX_RUNTIME: "60"}, MAX_RUNTIME),
        (-1, {SLURM_END: "4060"}, SLURM_END),
    ],
)
def test_a_walltime_that_only_fits_the_reserve_is_refused(monkeypatch, seconds, env, name):
    """Regression: each launch of a requeued job trained one step, forever."""
    monkeypatch.setattr(run_stop.time, "time", lambda: 4000.0)
    with pytest.raises(
        ValueError, match=rf"{name}: 1 min 00 s are left, but --walltime-reserve-seconds=60 of them"
    ):
        deadline(seconds, env, time.monotonic(), reserve_s=60.0)
    assert deadline(seconds, env, time.monotonic(), reserve_s=59.0)


@contextlib.contextmanager
def elsewhere(monkeypatch):
    """Code in the block runs on another machine."""
    with monkeypatch.context() as patch:
        patch.setattr(run_stop, "boot_id", lambda: "another boot")
        patch.setattr(run_stop, "uptime_s", lambda: 1e9)
        yield


def asks(stop, run):
    """Whether a launch stops because of what is in its run directory, and whether it has left the
    flag there."""
    stop.look_for_request(run)
    return stop.asked(), (run / FLAG_NAME).exists()


ASKED = ("asked by scripts.stop", True)


@pytest.mark.parametrize("shift_s", [-7200, 7200])
@pytest.mark.parametrize("remote", [False, True])
def test_a_request_is_honoured_whatever_the_clocks_say(tmp_path, monkeypatch, shift_s, remote):
    """Regression: with a caller two hours behind, the run deleted the flag and trained on."""
    stop, now = StopWatch(run_dir=tmp_path), time.time()
    with elsewhere(monkeypatch) if remote else contextlib.nullcontext():
        request_stop(tmp_path)
    os.utime(tmp_path / FLAG_NAME, (now + shift_s, now + shift_s))
    assert stop.asked() == "" and asks(stop, tmp_path) == ASKED


@pytest.mark.parametrize("remote", [False, True])
def test_a_request_for_an_earlier_launch_is_deleted_and_a_new_one_counts(
    tmp_path, monkeypatch, remote
):
    with elsewhere(monkeypatch) if remote else contextlib.nullcontext():
        request_stop(tmp_path)
        with StopWatch():
            pass
        late = StopWatch(run_dir=tmp_path)
    assert asks(late, tmp_path) == ("", False)
    with elsewhere(monkeypatch) if remote else contextlib.nullcontext():
        request_stop(tmp_path)
    assert asks(late, tmp_path) == ASKED


def test_reasons_of_all_ranks_become_one_text():
    assert join_reasons(["", "", ""]) == ""
    assert join_reasons(["SIGUSR1", "SIGUSR1"]) == "SIGUSR1"
    assert join_reasons(["", "SIGTERM", "", "SIGTERM"]) == "SIGTERM (rank 1)"
    assert join_reasons(["walltime: 118 s left", "walltime: 117 s left"]) == "walltime: 118 s left"
