"""Worker processes: every task comes to one end, whatever happens to its process, and none outlives the caller."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from nanochat.workers import Event, Terminated, run_tasks, sigterm_raises
from tests._tok_worker import open_counting, open_failing

PATIENCE_S = 60


def ends(events):
    """{task: (kind, value)} of the events that end a task; each task has one, after all its progress."""
    found, progress = {}, {}
    for event in events:
        assert event.task not in found, "an event after the end"
        if event.kind == "progress":
            progress.setdefault(event.task, []).append(event.value)
        else:
            found[event.task] = (event.kind, event.value)
    return found, progress


def gone(pid):
    """Whether a process is not there (within patience)."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_every_task_ends_once_with_its_progress_before_it(tmp_path, num_workers):
    tasks = [3, 1, "fails", 0, 5, 2]
    found, progress = ends(run_tasks(open_counting, (tmp_path,), tasks, num_workers=num_workers))
    assert sorted(found) == list(range(6))
    assert found[2] == ("failed", "a bad task")
    for i in (0, 1, 3, 4, 5):
        assert found[i][0] == "done" and found[i][1].startswith(f"{tasks[i]} by ")
        assert progress.get(i, []) == list(range(tasks[i]))
    pids = {int(f.name) for f in tmp_path.iterdir()}
    assert len(pids) == num_workers
    assert pids == {os.getpid()} if num_workers == 1 else all(gone(pid) for pid in pids)


def test_a_process_that_dies_fails_its_task_and_is_replaced(tmp_path):
    tasks = ["dies", "exits", 1, "dies", 2, 3]
    found, _ = ends(run_tasks(open_counting, (tmp_path,), tasks, num_workers=2))
    assert [found[i][0] for i in range(6)] == ["failed", "failed", "done", "failed", "done", "done"]
    assert "signal 9" in found[0][1] and "fewer workers" in found[0][1]
    assert "exit code 5" in found[1][1]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_that_cannot_start_fail_all_tasks(tmp_path, num_workers):
    found, _ = ends(run_tasks(open_failing, (tmp_path,), [1, 2, 3], num_workers=num_workers))
    assert set(found.values()) == {("failed", "no worker today")} and len(found) == 3


def test_closing_the_iterator_ends_the_workers(tmp_path):
    with contextlib.closing(run_tasks(open_counting, (tmp_path,), ["waits", "waits"], num_workers=2)) as events:
        seen = set()
        while len(seen) < 2:
            seen.add(next(events).task)
    pids = [int(f.name) for f in tmp_path.iterdir()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_signals_do_not_reach_the_workers(tmp_path):
    with contextlib.closing(run_tasks(open_counting, (tmp_path,), ["waits", "waits"], num_workers=2)) as events:
        seen = set()
        while len(seen) < 2:
            seen.add(next(events).task)
        for f in tmp_path.iterdir():
            for signum in (signal.SIGINT, signal.SIGTERM):
                os.kill(int(f.name), signum)
        later = [next(events) for _ in range(50)]
    assert {event.kind for event in later} == {"progress"}


def test_when_the_caller_is_killed_its_workers_end(tmp_path):
    code = ("import sys, pathlib\nfrom nanochat.workers import run_tasks\nfrom tests._tok_worker import open_counting\n"
            "if __name__ == '__main__':\n"
            "  for event in run_tasks(open_counting, (pathlib.Path(sys.argv[1]),), ['waits'] * 2, num_workers=2):\n"
            "    print(event.task, flush=True)\n")
    caller = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    seen = set()
    while len(seen) < 2:
        seen.add(caller.stdout.readline())
    caller.kill()
    caller.wait()
    caller.stdout.close()
    pids = [int(f.name) for f in tmp_path.iterdir()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_no_tasks_no_workers(tmp_path):
    assert list(run_tasks(open_counting, (tmp_path,), [], num_workers=4)) == []
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="at least 1"):
        list(run_tasks(open_counting, (tmp_path,), [1], num_workers=0))


def test_a_bug_in_the_callers_process_is_not_a_failed_task(tmp_path):
    def open_broken():
        def work(task):
            yield Event(0, "progress", 1)
            raise KeyError("bug")
        return work

    with pytest.raises(KeyError, match="bug"):
        list(run_tasks(open_broken, (), [1], num_workers=1))


def test_sigterm_raises_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), sigterm_raises():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE_S)
    assert signal.getsignal(signal.SIGTERM) is before
