"""A rank that hangs, is stopped, dies or fails takes the others down, and they name it. Real processes, real gloo."""

import json
import os
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
        said = dog._seq
        while dog._seq < said + 2:  # the others have heard of this step
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
    with Watchdog(open_store(world_size), rank=rank, world_size=world_size, timeout_s=timeout_s,
                  first_timeout_s=timeout_s, on_failure=fail) as dog:
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


def test_a_rank_that_is_stopped_is_named_by_the_others(tmp_path):
    launch = start(tmp_path, "stop")
    assert launch.wait([0, 1]) == [1, 1]
    assert launch.reason().startswith(f"{launch.who(2)}: last seen at step {BAD_STEP}, ")
    assert "its process does not answer; the other 2 wait at step 5 (reduction)" in launch.reason()


def test_a_rank_that_is_killed_is_named_though_gloo_names_nobody(tmp_path):
    launch = start(tmp_path, "die")
    assert launch.wait([0, 1]) == [1, 1]
    assert launch.processes[2].exitcode == -signal.SIGKILL
    assert launch.reason().startswith(f"{launch.who(2)} has died")


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


# ---- the judgement, without processes -------------------------------------------------------------------------------

class FakeStore:
    """The five calls of a TCPStore that are used."""

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


def record(rank: int, *, count: int, step: int, idle: float = 0.0, limit: float = 600.0, seq: int = 0,
           left: bool = False) -> dict[str, Any]:
    return {"host": f"node{rank}", "place": "elsewhere", "pid": 100 + rank, "start": "1", "seq": seq, "count": count,
            "step": step, "where": "", "left": left, "idle": idle, "limit": limit, "time": time.time()}


def judge(monkeypatch, others: dict[int, dict[str, Any]], *, alive: bool = True, world_size: int = 3) -> str:
    """What rank 0, which has waited too long at step 9, says of the others."""
    store = FakeStore()
    dog = Watchdog(store, rank=0, world_size=world_size, timeout_s=600, first_timeout_s=0)
    dog.silence_s = 0.0
    for step in range(10):
        dog.beat(step)
    monkeypatch.setattr(dog, "_idle", lambda: 700.0)
    for rank, seen in others.items():
        store.set(f"rank/{rank}", json.dumps(seen))
    read_all = dog._read_all

    def later(store: Any) -> Any:
        seen = read_all(store)
        if alive:
            for rank, other in others.items():
                store.set(f"rank/{rank}", json.dumps({**other, "seq": other["seq"] + 1}))
        return seen

    monkeypatch.setattr(dog, "_read_all", later)
    assert dog._look() == ""  # suspects
    return dog._look()


def test_the_rank_with_the_fewest_beats_is_to_blame(monkeypatch):
    told = judge(monkeypatch, {1: record(1, count=10, step=9, idle=650), 2: record(2, count=9, step=8, idle=720)})
    assert told == "rank 2 on host node2 (pid 102): last seen at step 8, 720 s ago; the other 2 wait at step 9"


def test_a_rank_that_is_behind_and_works_is_waited_for(monkeypatch):
    assert judge(monkeypatch, {1: record(1, count=10, step=9, idle=650), 2: record(2, count=9, step=8, idle=3)}) == ""
    slow = record(2, count=9, step=8, idle=5000, limit=7200)
    assert judge(monkeypatch, {1: record(1, count=10, step=9), 2: slow}) == ""


def test_a_rank_that_tells_nothing_any_more_is_to_blame_whatever_its_count(monkeypatch):
    told = judge(monkeypatch, {1: record(1, count=10, step=9, idle=650)}, world_size=2, alive=False)
    assert told.startswith("rank 1 on host node1 (pid 101): last seen at step 9, 650 s ago, and its process does not")


def test_a_rank_that_has_left_while_others_wait_is_to_blame(monkeypatch):
    told = judge(monkeypatch, {1: record(1, count=10, step=9, idle=650), 2: record(2, count=4, step=3, left=True)})
    assert told.startswith("rank 2 on host node2 (pid 102): last seen at step 3, 0 s ago, and has left; the other 2")


def test_where_all_wait_at_the_same_point_no_rank_is_blamed(monkeypatch):
    told = judge(monkeypatch, {r: record(r, count=10, step=9, idle=650) for r in (1, 2)})
    assert told.startswith("all 3 ranks have been at step 9 for 700 s: the network between them")


def test_a_rank_of_which_nothing_was_ever_heard_is_to_blame(monkeypatch):
    told = judge(monkeypatch, {1: record(1, count=10, step=9, idle=650)})
    assert told == "nothing was ever heard of rank 2; the others wait for it"


def test_the_first_verdict_counts(monkeypatch):
    store = FakeStore()
    dogs = [Watchdog(store, rank=rank, world_size=2) for rank in range(2)]
    assert [dog._ask(lambda s, dog=dog: dog._settle(s, f"from {dog.rank}")) for dog in dogs] == ["from 0", "from 0"]
    assert dogs[1]._look() == "from 0"


@pytest.mark.parametrize(("verdict", "speakers"), [
    ("rank 2 on host HERE (pid 7) has died; it was last seen at step 3", [0]),
    ("rank 0 on host HERE (pid 7) has died; it was last seen at step 3", [1]),
    ("rank 2 on host HERE (pid 7) failed at step 3: x.bin: torn on host b (pid 1)", []),  # it says so itself
    ("rank 2 on host b (pid 7) failed at step 3: x.bin: torn on host HERE (pid 1)", [0]),
    ("rank 0 on host b (pid 7) failed at step 3: KeyError: 'x'", []),
    ("nothing was ever heard of rank 2; the others wait for it", [0]),
])
def test_one_rank_tells_of_another(verdict, speakers):
    dogs = [Watchdog(FakeStore(), rank=rank, world_size=3) for rank in range(3)]
    assert [d.rank for d in dogs if d._speaks(verdict.replace("HERE", socket.gethostname()))] == speakers


def leave_with(error: Exception, rank: int, verdict: str = "") -> BaseException:
    """What comes out of a rank's watchdog when its main thread fails, after a verdict."""
    store = FakeStore()
    if verdict:
        store.data[watchdog.VERDICT] = verdict.encode()
    told: list[str] = []
    with pytest.raises(BaseException) as caught, Watchdog(store, rank=rank, world_size=2, timeout_s=1,
                                                          on_failure=told.append) as dog:
        dog._thread.join(0)
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
    dog = Watchdog(store, rank=0, world_size=2, timeout_s=0.02, first_timeout_s=0)
    dog.beat(0)
    dog.beat(1)
    store.broken.set()
    time.sleep(0.1)
    dog.silence_s = 0.0
    assert dog._look() == ""
    assert "the store of the launch does not answer" in dog._look()
    assert dog._store_lost


def test_limits_follow_the_phase():
    dog = Watchdog(timeout_s=10, first_timeout_s=100)
    limits = [dog._limit()]
    for step in (0, 0, 1):
        dog.beat(step)
        limits.append(dog._limit())
    with dog.patience(50):
        with dog.patience(20):
            limits.append(dog._limit())
    assert limits + [dog._limit()] == [100, 100, 100, 10, 50, 10]
    assert Watchdog(timeout_s=10, first_timeout_s=1)._limit() == 10


def test_beats_without_a_step_move_no_count():
    dog = Watchdog()
    dog.beat(3, "forward")
    dog.beat()
    with dog.patience(5):
        pass
    assert (dog._record()["count"], dog._record()["step"], dog._record()["where"]) == (1, 3, "forward")


def test_a_process_that_was_paused_is_not_blamed_for_it(monkeypatch):
    monkeypatch.setattr(watchdog, "PAUSED_S", 0.2)
    dog = Watchdog(timeout_s=0.4, first_timeout_s=0.4)
    dog.interval_s = 0.05
    looks = []

    def look() -> str:
        looks.append(dog._idle())
        if len(looks) == 2:
            dog._mark = (0, None, "", time.monotonic() - 1000)
        return ""

    monkeypatch.setattr(dog, "_look", look)
    wait = dog._over.wait
    monkeypatch.setattr(dog._over, "wait", lambda s: time.sleep(0.4) or wait(s) if len(looks) == 2 else wait(s))
    with dog:
        while len(looks) < 4:
            time.sleep(0.01)
    assert looks[2] < 1


def test_a_bad_timeout_is_refused():
    with pytest.raises(ValueError, match="--collective-timeout-seconds: got 0"):
        Watchdog(timeout_s=0)


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
    with Watchdog(timeout_s=0.3, first_timeout_s=0.3) as dog:
        dog.beat(4, "forward")
        time.sleep(1000)
