"""A rank that hangs, is stopped, dies or fails takes the others down, and they name it. Real processes, real gloo."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nanochat import watchdog
from nanochat.lifecycle import RunState, acquire, identify, read_state
from nanochat.watchdog import Watchdog, open_store
from tests.training import server

PATIENCE_S = 60
BAD_STEP = 5


# ---- a launch -------------------------------------------------------------------------------------------------------

def misbehave(how: str, dog: Watchdog) -> None:
    if how == "sleep":
        time.sleep(1000)
    elif how == "stop":
        said = dog._published
        while dog._published < said + 2:  # the others have heard of this step
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise ValueError("shard 7 is torn")
    elif how == "leave":
        raise SystemExit(0)
    elif how == "work":  # for longer than the others' patience
        for _ in range(30):
            time.sleep(0.1)
            dog.beat()
    elif how == "patience":
        with dog.patience(100):
            time.sleep(3)


def rank_main(rank: int, world_size: int, port: int, how: str, bad: int, folder: str, timeout_s: float) -> None:
    """A training job of ten steps, whose rank `bad` misbehaves in one of them."""
    fd = os.open(f"{folder}/output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1)
    import torch
    import torch.distributed as dist

    watchdog.ASK_S = 1.0
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    run_dir = Path(folder) / "run"
    state = RunState(acquire(run_dir), [identify()], status="running") if rank == 0 else None
    fail = (lambda verdict: state.close("failed", verdict)) if state else lambda verdict: None
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, identify())
    with Watchdog(open_store(world_size), everyone, rank=rank, timeout_s=timeout_s, first_timeout_s=timeout_s,
                  on_failure=fail) as dog:
        for step in range(10):
            dog.beat(step)
            time.sleep(0.05)
            if rank == bad and step == BAD_STEP:
                misbehave(how, dog)
            dog.beat(step, "reduction")
            dist.all_reduce(torch.ones(1))
        if rank == bad and how == "late":  # to leave: the store is rank 0's
            time.sleep(1)
    if state:
        state.close("completed")
    os._exit(0)


@dataclass
class Launch:
    processes: list[Any]
    folder: Path

    def wait(self, ranks: list[int]) -> list[int]:
        """Exit codes of these ranks, which end by themselves; then the others are killed."""
        end = time.monotonic() + PATIENCE_S
        for rank in ranks:
            self.processes[rank].join(max(0.0, end - time.monotonic()))
        codes = [self.processes[rank].exitcode for rank in ranks]
        for process in self.processes:
            process.kill()
            process.join()
        assert None not in codes, "\n".join(map(self.output, ranks))
        return codes

    def output(self, rank: int) -> str:
        return (self.folder / f"output-{rank}").read_text()

    def who(self, rank: int) -> str:
        return f"rank {rank} on host {socket.gethostname()} (pid {self.processes[rank].pid})"

    def reason(self) -> str:
        state = read_state(self.folder / "run")
        assert state is not None and state["status"] == "failed"
        return state["reason"]


def start(folder: Path, how: str, *, bad: int = 2, timeout_s: float = 1.5, world_size: int = 3) -> Launch:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = [server().Process(target=rank_main, daemon=True,
                                  args=(rank, world_size, port, how, bad, str(folder), timeout_s))
                 for rank in range(world_size)]
    for process in processes:
        process.start()
    return Launch(processes, folder)


@pytest.mark.parametrize("how", ["none", "work", "patience", "late"])
def test_a_launch_that_works_ends_well_however_long_one_rank_takes(tmp_path, how):
    launch = start(tmp_path, how)
    assert launch.wait([0, 1, 2]) == [0, 0, 0], launch.output(0)
    assert read_state(tmp_path / "run")["status"] == "completed"
    assert not any(word in launch.output(rank) for rank in range(3) for word in ("error:", "last seen"))


def test_a_rank_that_hangs_is_named_with_its_stack_and_all_end(tmp_path):
    launch = start(tmp_path, "sleep")
    assert launch.wait([0, 1, 2]) == [1, 1, 1]
    told = f"{launch.who(2)}: last seen at step {BAD_STEP}, "
    assert launch.reason().startswith(told) and "s ago; the other 2 wait at step 5 (reduction)" in launch.reason()
    assert told in launch.output(0) and told in launch.output(2)
    assert "in misbehave" in launch.output(2) and "in rank_main" in launch.output(2)


@pytest.mark.parametrize("how, told", [
    ("stop", f": last seen at step {BAD_STEP}, .* its process does not answer; the other 2 wait at step 5 .reduction."),
    ("die", " has died")])
def test_a_rank_that_is_stopped_or_killed_is_named_by_the_others(tmp_path, how, told):
    launch = start(tmp_path, how)
    assert launch.wait([0, 1]) == [1, 1] and launch.processes[2].exitcode == -signal.SIGKILL
    assert re.match(re.escape(launch.who(2)) + told, launch.reason())


def test_a_rank_that_fails_alone_lends_the_others_its_words(tmp_path):
    launch = start(tmp_path, "raise")
    assert launch.wait([0, 1, 2]) == [1, 1, 1]
    assert launch.reason() == f"{launch.who(2)} failed at step {BAD_STEP}: shard 7 is torn"
    assert launch.output(2).count(launch.reason()) == 1 and not launch.output(0) and not launch.output(1)


def test_where_the_host_of_the_store_is_stopped_the_others_still_end(tmp_path):
    launch = start(tmp_path, "stop", bad=0)
    assert launch.wait([1, 2]) == [1, 1]
    told = launch.output(1) + launch.output(2)
    assert f"the store of the launch does not answer: its host, that of {launch.who(0)}" in told
    assert read_state(tmp_path / "run")["status"] == "running"  # nobody was there to write


# ---- the judgement, without processes ---------------------------------------------------------------

class FakeStore:
    """The calls of a TCPStore that are used."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.broken = threading.Event()

    def set(self, key: str, value: str) -> None:
        if self.broken.is_set():
            time.sleep(1000)
        self.data[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.data[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.data for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        assert expected == ""
        return self.data.setdefault(key, value.encode())


def ranks(world_size: int) -> list[dict[str, Any]]:
    return [{"host": f"node{r}", "place": "elsewhere", "pid": 100 + r, "start": "1"} for r in range(world_size)]


def watcher(rank: int = 0, world_size: int = 3, store: Any = None, **options: Any) -> Watchdog:
    return Watchdog(store or FakeStore(), ranks(world_size), rank=rank, **options)


def record(*, count: int = 10, step: int = 9, idle: float = 0.0, limit: float = 600.0, seq: int = 1,
           left: bool = False) -> dict[str, Any]:
    return {"seq": seq, "count": count, "step": step, "where": "", "left": left, "idle": idle, "limit": limit}


WAITING = record(idle=650)
JUDGED = {  # what rank 0, which has waited too long at step 9, knows of ranks 1 and 2, and what it says
    "fewest beats": (WAITING, record(count=9, step=8, idle=720),
                     "rank 2 on host node2 (pid 102): last seen at step 8, 720 s ago; the other 2 wait at step 9"),
    "behind, and works": (WAITING, record(count=9, step=8, idle=3), ""),
    "behind, and has patience": (record(), record(count=9, step=8, idle=5000, limit=7200), ""),
    "silent": (record(seq=0), record(idle=650),
               "rank 1 on host node1 (pid 101): last seen at step 9, 700 s ago, and its process does not answer; the"),
    "has left": (WAITING, record(count=4, step=3, left=True),
                 "rank 2 on host node2 (pid 102): last seen at step 3, 0 s ago, and has left; the other 2 wait"),
    "all at one point": (WAITING, WAITING, "all 3 ranks have been at step 9 for 700 s: the network between them"),
    "never heard of": (WAITING, None, "rank 2 on host node2 (pid 102): last seen at set-up, 700 s ago; the other 2"),
    "no answer": (None, None, "rank 0 on host node0 (pid 100) has waited at step 9 for 700 s, and the store of the "
                              "launch does not answer: its host, that of rank 0 on host node0 (pid 100), is stopped"),
}


@pytest.mark.parametrize("case", JUDGED)
def test_who_is_to_blame(case, monkeypatch):
    *others, told = JUDGED[case]
    after = {rank: seen for rank, seen in enumerate(others, 1) if seen is not None}
    dog = watcher(timeout_s=600, first_timeout_s=0)
    for step in range(10):
        dog.beat(step)
    monkeypatch.setattr(dog, "_idle", lambda: 700.0)
    verdict = dog._judge({rank: {**seen, "seq": 0} for rank, seen in after.items()}, after)
    assert verdict.startswith(told) and bool(verdict) == bool(told)


def test_a_verdict_needs_two_looks_and_the_first_one_counts(monkeypatch):
    """Nobody is blamed by what was published before the limit, and all ranks leave with the same words."""
    store, ended = FakeStore(), []
    store.data["rank/1"] = json.dumps(record(count=1, step=0, idle=720)).encode()
    dogs = [watcher(rank, 2, store, timeout_s=0.1, first_timeout_s=0) for rank in range(2)]
    assert [dog._settle(f"from {dog.rank}") for dog in dogs] == ["from 0", "from 0"]
    assert dogs[1]._ask(dogs[1]._verdict) == "from 0"
    del store.data[watchdog.VERDICT]
    dog, looks = dogs[0], []
    dog.silence_s = 0.2
    read_all = dog._read_all
    monkeypatch.setattr(dog, "_read_all", lambda s: (looks.append(time.monotonic()), read_all(s))[1])
    monkeypatch.setattr(dog, "_end", lambda verdict: (ended.append(verdict), dog._over.set()))
    with dog:
        dog._over.wait(PATIENCE_S)
    assert ended and ended[0].startswith("rank 1 on host node1") and looks[1] - looks[0] >= 0.2
    assert store.data[watchdog.VERDICT].decode() == ended[0]


@pytest.mark.parametrize(("verdict", "speakers"), [
    ("rank 2 on host node0 (pid 7) has died; it was last seen at step 3", [0]),
    ("rank 0 on host node0 (pid 7) has died; it was last seen at step 3", [1]),
    ("rank 2 on host node0 (pid 7) failed at step 3: x.bin: torn on host b (pid 1)", []),  # it says so itself
    ("rank 2 on host b (pid 7) failed at step 3: x.bin: torn on host node0 (pid 1)", [0]),
    ("rank 0 on host b (pid 7) failed at step 3: KeyError: 'x'", []),
])
def test_one_rank_tells_of_another(verdict, speakers):
    assert [dog.rank for dog in map(watcher, range(3)) if dog._speaks(verdict)] == speakers


def leave_with(error: Exception, rank: int, verdict: str = "") -> BaseException:
    """What comes out of a rank's watchdog when its main thread fails, after a verdict."""
    store, told = FakeStore(), []
    with pytest.raises(BaseException) as caught, watcher(rank, 2, store, timeout_s=1, on_failure=told.append):
        if verdict:
            store.data[watchdog.VERDICT] = verdict.encode()
        raise error
    assert told == [verdict or store.data[watchdog.VERDICT].decode()]
    return caught.value


def test_what_a_failure_becomes():
    bad = FileNotFoundError("x.bin: gone")
    assert leave_with(bad, 0) is bad, "rank 0 speaks for all"
    named = leave_with(bad, 1)
    assert isinstance(named, ValueError) and str(named).startswith("rank 1 on host") and "set-up: x.bin" in str(named)
    bug = KeyError("bug")
    assert leave_with(bug, 1) is bug
    for error in (bad, bug, RuntimeError("connection closed")):
        silent = leave_with(error, 1, "rank 0 on host b (pid 1) failed at step 2: x.bin: gone")
        assert isinstance(silent, SystemExit) and silent.code == 1


def test_a_store_that_hangs_is_asked_once(monkeypatch):
    monkeypatch.setattr(watchdog, "ASK_S", 0.1)
    store = FakeStore()
    dog = watcher(store=store)
    store.broken.set()
    began = time.monotonic()
    for _ in range(5):
        assert dog._ask(dog._publish) is None
    assert time.monotonic() - began < 0.4


def test_limits_follow_the_phase_and_beats_without_a_step_move_no_count():
    dog = watcher(timeout_s=10, first_timeout_s=100)
    limits = [dog._limit()]
    for step in (0, 0, 1):
        dog.beat(step, "forward")
        dog.beat()
        limits.append(dog._limit())
    with dog.patience(50):
        with dog.patience(20):
            limits.append(dog._limit())
    assert limits + [dog._limit()] == [100, 100, 100, 10, 50, 10]
    assert watcher(timeout_s=10, first_timeout_s=1)._limit() == 10
    assert (dog._record()["count"], dog._record()["step"], dog._record()["where"]) == (3, 1, "forward")
    with pytest.raises(ValueError, match="--collective-timeout-seconds: got 0"):
        watcher(timeout_s=0)


def test_a_process_that_was_paused_is_not_blamed_for_it(monkeypatch):
    monkeypatch.setattr(watchdog, "PAUSED_S", 0.2)
    dog, ended, waits = watcher(world_size=1, timeout_s=0.5, first_timeout_s=0.5), [], []
    monkeypatch.setattr(dog, "_end", ended.append)
    wait = dog._over.wait

    def paused(seconds: float) -> bool:
        waits.append(seconds)
        time.sleep(1.0 if len(waits) == 2 else 0.0)  # the whole machine
        return wait(0.01)

    monkeypatch.setattr(dog._over, "wait", paused)
    with dog:
        while len(waits) < 4:
            time.sleep(0.01)
        assert dog._idle() < 0.5
    assert ended == []


def test_a_single_process_needs_no_store_and_ends_when_it_hangs(tmp_path):
    assert open_store(1) is None
    process = server().Process(target=hang_alone, args=(str(tmp_path / "out"),))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 1
    told = (tmp_path / "out").read_text()
    assert "error: the main thread has made no progress for" in told and "at step 4 (forward)" in told
    assert "in hang_alone" in told


def hang_alone(output: str) -> None:
    fd = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(fd, 2)
    with Watchdog(None, [identify()], timeout_s=0.3, first_timeout_s=0.3) as dog:
        dog.beat(4, "forward")
        time.sleep(1000)
