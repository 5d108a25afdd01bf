"""If a rank hangs, stops, dies or fails, all ranks end and the error names it. Real processes, real
gloo."""

import json
import os
import re
import signal
import socket
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

from nanochat import watchdog
from nanochat.common import Stop
from nanochat.dist import gather_all
from nanochat.run_owner import RunState
from nanochat.run_state import identify, read_state
from nanochat.watchdog import Clock, Heard, Limits, Record, Watchdog, open_store, to_blame
from tests import training

BAD_STEP = 5
PATIENCE_S = 5.0  # timeout of ranks that work: a busy machine delays a beat by seconds


# ---- a launch ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))


def stall(state):
    if dict(state._state)["step"] == BAD_STEP:
        time.sleep(1000)
    return state.refresh()


def misbehave(how, dog, state):
    if how == "disk":
        state.update(step=BAD_STEP)
    if how in ("sleep", "disk"):
        time.sleep(1000)
    elif how == "stop":
        time.sleep(4 * dog.limits.interval)  # until this step is published
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "work":  # longer than the limit and the time that rank 0 listens
        for _ in range(30):
            time.sleep(PATIENCE_S / 25)
            dog.beat()


def rank_main(how, bad, run_dir, argv):
    """A training job of ten steps; its rank `bad` misbehaves in one of them."""
    watchdog.ANSWER_S = 1.0
    rank, timeout_s = int(os.environ["RANK"]), PATIENCE_S if how == "work" else 1.5
    dist.init_process_group("gloo")
    state, more = None, {}
    if rank == 0:
        state = RunState(training.owner_of(run_dir), [identify()], status="running")
        # its heartbeat hangs, too
        more = {
            "refresh": partial(stall, state) if how == "disk" else state.refresh,
            "on_failure": lambda verdict: state.end("failed", verdict),
        }
    with Watchdog(
        open_store(3),
        gather_all(identify()),
        rank=rank,
        timeout_s=timeout_s,
        first_timeout_s=timeout_s,
        **more,
    ) as dog:
        for step in range(10):
            dog.beat(step)
            time.sleep(0.05)
            if step == BAD_STEP and rank == bad:
                misbehave(how, dog, state)
            dog.beat(step, "reduction")
            dist.all_reduce(torch.ones(1))
        if how == "work":
            dog.beat(step, "a save", patience_s=100)
            time.sleep(PATIENCE_S * 1.2)
            dist.all_reduce(torch.ones(1))
            if rank == bad:  # it leaves late, and needs rank 0's store
                time.sleep(0.5)
    if state:
        state.end("completed")


def start(folder, how, bad=2):
    return training.launch(partial(rank_main, how, bad, folder / "run"), [[]] * 3, [{}] * 3)


def who(group, rank):
    return f"rank {rank} on host {socket.gethostname()} (pid {group.processes[rank].pid})"


def test_slow_work_a_slow_save_and_a_slow_exit_end_no_launch(tmp_path):
    group = start(tmp_path, "work")
    assert group.wait() == [0, 0, 0], group.text()
    assert read_state(tmp_path / "run")["status"] == "completed"
    assert not any(word in group.text() for word in ("error:", "last seen"))


def test_a_rank_that_hangs_is_named_with_its_stack_and_all_ranks_end(tmp_path):
    group = start(tmp_path, "sleep")
    assert group.wait() == [1, 1, 1]
    verdict = (
        f"{who(group, 2)} was last seen at step {BAD_STEP}; waiting at step {BAD_STEP} (reduction): 2 other "
        "ranks; no progress for "
    )
    state, outputs = read_state(tmp_path / "run"), [path.read_text() for path in group.outputs]
    assert state["status"] == "failed" and state["reason"].startswith(verdict)
    assert verdict in outputs[0] and verdict in outputs[2]
    assert "in misbehave" in outputs[2] and "in rank_main" in outputs[2]


@pytest.mark.parametrize("how", ["stop", "disk"])
def test_if_rank_0_or_its_disk_stops_all_ranks_end_and_name_it(tmp_path, how):
    group = start(tmp_path, how, bad=0)
    for process in group.processes[how == "stop" :]:
        process.join(training.PATIENCE_S)
    codes = [process.exitcode for process in group.processes[how == "stop" :]]
    group.kill()
    assert codes == [1] * len(codes)
    outputs, rank_0 = [path.read_text() for path in group.outputs], re.escape(who(group, 0))
    waited = rf"has waited at step {BAD_STEP}( \(reduction\))? for \d+ s, and the heartbeat of {rank_0} has stopped: "
    if how == "disk":
        assert re.search(f"error: {rank_0} {waited}", outputs[0]) and "in misbehave" in outputs[0]
    else:
        assert all(
            re.search(f"error: {re.escape(who(group, rank))} {waited}", outputs[rank])
            for rank in (1, 2)
        )
    assert read_state(tmp_path / "run")["status"] == ("running" if how == "stop" else "failed")


# ---- verdicts, without processes -----------------------------------------------------------------


class SilentStore(dist.HashStore):
    """A store that does not answer once it is `silent`."""

    silent = False

    def _answer(self, call, *args):
        while self.silent:
            time.sleep(1)
        return call(*args)

    def set(self, key, value):
        return self._answer(super().set, key, value)

    def get(self, key):
        return self._answer(super().get, key)

    def check(self, keys):
        return self._answer(super().check, keys)

    def compare_set(self, key, expected, value):
        return self._answer(super().compare_set, key, expected, value)


def watcher(rank=0, world_size=3, store=None, **options):
    ranks = [{"host": f"node{r}", "pid": 100 + r, "start": "1"} for r in range(world_size)]
    return Watchdog(store or dist.HashStore(), ranks, rank=rank, **options)


def record(beats=10, *, late=True, left=False):
    return Record(beats, f"step {beats - 1}", late, left)


JUDGED = {  # rank 0 has waited too long at step 9: the records of ranks 1 and 2, and its verdict
    "fewest beats": (
        record(),
        record(9),
        "rank 2 on host node2 (pid 102) was last seen at step 8; waiting at step 9: "
        "2 other ranks; no progress for 700 s",
    ),
    "behind, and works": (record(), record(9, late=False), ""),
    "silent": (
        "silent",
        record(),
        "rank 1 on host node1 (pid 101) was last seen at step 9, and its process does not "
        "answer; waiting at step 9: 2 other ranks",
    ),
    "has left": (
        record(),
        record(4, left=True),
        "rank 2 on host node2 (pid 102) was last seen at step 3, and has left; waiting at step 9: 2",
    ),
    "all at one point": (
        record(),
        record(),
        "all 3 ranks have been at step 9 for 700 s: the network between them",
    ),
    "never published": (
        record(),
        None,
        "rank 2 on host node2 (pid 102) was last seen at set-up, and its process does",
    ),
}


def late_watcher(others, rank=0):
    """A watchdog whose main thread has been at step 9 for 700 s, and what it has heard of others."""
    dog, now = watcher(rank, timeout_s=600, first_timeout_s=0), 1000.0
    for step in range(10):
        dog.beat(step)
    dog._beat = dog._beat._replace(clock=now - 700)
    dog._clock.now = now
    for number, other in enumerate(others, 1):
        if other == "silent":
            dog._heard[number] = Heard(record(), now - dog.limits.silence - 1)
        elif other is not None:
            dog._heard[number] = Heard(other, now - 5)
    return dog


@pytest.mark.parametrize("case", JUDGED)
def test_who_is_to_blame(case):
    *others, expected = JUDGED[case]
    verdict = late_watcher(others)._judge()
    assert verdict.startswith(expected) and bool(verdict) == bool(expected)


def test_only_rank_0_judges():
    assert late_watcher([record(), record(9)], rank=1)._judge() == ""


def test_a_lone_rank_is_to_blame_itself():
    verdict = to_blame(["rank 0"], [Heard(record(5), 0.0)], [False], 9.0)
    assert verdict == "rank 0 was last seen at step 4; no progress for 9 s"


def test_rank_0_listens_before_it_judges_and_the_first_verdict_counts(monkeypatch):
    """Records published before the limit blame no rank, and all ranks leave with the same
    verdict."""
    store = dist.HashStore()
    ended = []
    began = time.monotonic()
    store.set("rank/1", json.dumps(record(1)))
    dog = watcher(
        0,
        2,
        store,
        timeout_s=0.1,
        first_timeout_s=0,
        on_failure=lambda verdict: ended.append((verdict, time.monotonic() - began)),
    )
    monkeypatch.setattr(watchdog, "LATE_S", 0.1)  # rank 1 never leaves
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: dog._over.set())
    with dog:
        dog.beat(0)
        dog.beat(1)
        dog._over.wait(training.PATIENCE_S)
    [(verdict, after_s)] = ended
    assert verdict.startswith("rank 1 on host node1") and after_s >= dog.limits.silence == 1.0
    assert store.get(watchdog.VERDICT).decode() == verdict
    late = watcher(1, 2, store, timeout_s=0.1)
    assert late._ask("another", hurry=True).verdict == verdict


def leave_with(error, rank, verdict=""):
    """The exception and the verdict of a watchdog whose main thread fails, perhaps after another
    rank's verdict."""
    store, verdicts = dist.HashStore(), []
    with (
        pytest.raises(BaseException) as caught,
        watcher(rank, 2, store, timeout_s=1, on_failure=verdicts.append),
    ):
        if verdict:
            store.set(watchdog.VERDICT, verdict)
        raise error
    assert verdicts == [store.get(watchdog.VERDICT).decode()]
    return caught.value, verdicts[0]


def test_an_exception_becomes_the_verdict(capfd):
    bad = FileNotFoundError("x.bin: gone")
    bug = KeyError("bug")
    broken = RuntimeError("connection closed")
    for error, rank, text in (
        (bad, 0, "x.bin: gone"),
        (bug, 0, "KeyError: 'bug'"),
        (bad, 1, "x.bin: gone"),
        (bug, 1, "KeyError: 'bug'"),
        (broken, 1, "RuntimeError: connection closed"),
    ):
        raised, verdict = leave_with(error, rank)
        assert (
            verdict == ("rank 1 on host node1 (pid 101) failed at set-up: " if rank else "") + text
        )
        assert (
            raised is error
            if error is not bad
            else isinstance(raised, SystemExit) and raised.code == 1
        )
        assert capfd.readouterr().err == ("" if rank else f"error: {text}\n"), "rank 0 prints it"
        silent, _ = leave_with(
            error, rank, "rank 7 on host b (pid 1) failed at step 2: x.bin: gone"
        )
        assert isinstance(silent, SystemExit) and silent.code == 1
        capfd.readouterr()


@pytest.mark.parametrize("error", [ValueError("x.bin: gone"), None])
def test_a_rank_whose_store_does_not_answer_prints_its_own_error_and_ends_at_once(
    capfd, monkeypatch, error
):
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.2)
    store, began = SilentStore(), time.monotonic()
    with pytest.raises(SystemExit) if error else nullcontext(), watcher(1, 2, store, timeout_s=1):
        store.silent = True
        if error:
            raise error
    assert capfd.readouterr().err == (
        "error: rank 1 on host node1 (pid 101) failed at set-up: x.bin: gone\n" if error else ""
    )
    assert time.monotonic() - began < watchdog.LATE_S
    store.silent = False


def test_the_time_in_which_a_process_was_paused_does_not_count(monkeypatch):
    times = iter([0.0, 1.0, 2.0, 3602.0, 3603.0])
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: next(times))
    clock = Clock(longest_s=5.0)
    for _ in range(4):
        clock.tick()
    assert clock.now == 1 + 1 + 5 + 1


@pytest.mark.parametrize("timeout_s", [1.0, 10.0, 600.0])
def test_one_pause_never_uses_up_the_limit(timeout_s):
    """Regression: with --collective-timeout-seconds=10, a pause of 16 s ended a healthy run."""
    limits = Limits(timeout_s, timeout_s)
    assert limits.interval + limits.pause < timeout_s / 2


def test_a_stop_of_all_ranks_is_no_failure(capfd):
    store, verdicts = dist.HashStore(), []
    with pytest.raises(Stop), watcher(1, 2, store, timeout_s=1, on_failure=verdicts.append):
        raise Stop("SIGTERM")
    assert verdicts == [] and capfd.readouterr().err == ""


def test_a_single_process_needs_no_store_and_ends_when_it_hangs():
    assert open_store(1) is None
    group = training.launch(hang_alone, [[]], [{}])
    assert group.wait() == [1]
    verdict = (
        r"error: rank 0 on host .* was last seen at step 4 \(forward\); no progress for \d s\n"
    )
    assert re.search(verdict, group.text())
    assert "in hang_alone" in group.text()


def hang_alone(argv):
    with Watchdog(None, [identify()], timeout_s=0.3, first_timeout_s=0.3) as dog:
        dog.beat(4, "forward")
        time.sleep(1000)
