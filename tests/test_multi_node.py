"""A launch over two machines: what each one needs, whose run directory counts, and how the launch ends if one fails.

The two machines are two base directories. One test runs two real torchruns over the loopback; the others start the
processes as torchrun does on two machines with one process each.
"""

import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from torch.distributed.run import main as torchrun

from nanochat import start_run
from nanochat.sources import ParquetSource
from nanochat.watchdog import Watchdog
from scripts import base_train
from tests import training
from tests.training import digests, final, state, state_of

HOST = socket.gethostname()
LONG = {"num_iterations": 60, "save_every": -1}  # long enough for a signal from outside
SHORT = {"num_iterations": 12, "save_every": 4}
BAD_STEP = 6


@pytest.fixture(autouse=True)
def workplace(tmp_path):
    """The first machine's base directory, with data and tokenizer for both."""
    with training.workplace(tmp_path / "node0", **training.SMALL) as path:
        yield path


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Uninterrupted runs on one process, which give the same bits."""
    with training.workplace(tmp_path_factory.mktemp("reference"), **training.SMALL):
        training.succeed(model_tag="short", leaves=2, **SHORT)
        training.succeed(model_tag="long", leaves=2, **LONG)
        return {"short": state_of(final("short")), "long": state_of(final("long")), "digests": digests("long")}


# ---- two machines ----------------------------------------------------------------------------------------------------

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def other(workplace):
    """The second machine's base directory: empty."""
    return workplace.parent / "node1"


def paths(workplace):
    """Flags that make both machines read the same files."""
    return {"data_path": workplace / "data", "tokenizer": workplace / "tokenizer"}


def start(*bases, hook=None, own=None, **changed):
    """Start the job with one process per machine. `hook`: called in each; `own`: flags of the second machine."""
    argvs = [training.flags(**{**changed, **(own or {} if rank else {})}) for rank in range(len(bases))]
    return training.launch(base_train.main, argvs, [{"NANOCHAT_BASE_DIR": str(base), "LOCAL_RANK": "0"}
                                                    for base in bases], hook)


def error_of(group):
    """The one error of a launch that must end with exit code 1 on all ranks, without a traceback."""
    assert group.wait() == [1] * len(group.processes), group.text()
    text = group.text()
    assert text.count("error: ") == 1 and "Traceback" not in text, text
    return next(line for line in text.splitlines() if "error: " in line).partition("error: ")[2]


# ---- torchrun --------------------------------------------------------------------------------------------------------

class Forked:
    """Stands for `subprocess.Popen` in torchrun, but forks as all processes here do: importing torch takes seconds."""

    def __init__(self, args, env, output):
        argv = list(args[args.index("scripts.base_train") + 1:])
        self.process = training.server().Process(target=worker, args=(argv, env, output))
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("worker", timeout)


def worker(argv, env, output):
    os.setsid()
    training._child(base_train.main, argv, env, None, output)


def fork_what_torchrun_starts():
    """A hook for a launcher."""
    multiprocessing.current_process().daemon = False  # a daemon may have no children
    forkserver._forkserver.ensure_running = lambda: None  # the server runs: it is our parent
    output = os.readlink("/proc/self/fd/1")
    SubprocessHandler._popen = lambda self, args, env: Forked(args, env, output)


def two_torchruns(workplace, **changed):
    """Two launchers, each with one process; the run is on the first one's machine."""
    port = free_port()
    return [training.launch(torchrun, [[
        "--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", "--nproc-per-node=1",
        "-m", "scripts.base_train", "--", *training.flags(**paths(workplace), **changed)]],
        [{"NANOCHAT_BASE_DIR": str(base)}], fork_what_torchrun_starts)
        for node, base in enumerate((workplace, other(workplace)))]


def test_two_torchruns_stop_after_a_signal_to_one_and_the_run_resumes_to_the_same_bits(workplace, reference):
    """The launcher without the signal would wait minutes for the other one (see docs/clusters.md), so the test kills it
    once its worker has ended."""
    launchers = two_torchruns(workplace, **LONG)
    try:
        log = training.log_file()
        training.wait_for(lambda: log.exists() and '"step": 3,' in log.read_text())
        os.kill(launchers[1].processes[0].pid, signal.SIGTERM)
        training.wait_for(lambda: state()["status"] == "stopped")
        workers = [rank["pid"] for rank in state()["ranks"]]
        training.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        codes = launchers[1].wait()
    finally:
        for launcher in launchers:
            launcher.kill()
    assert state()["reason"] == "SIGTERM (rank 1)" and codes == [1], launchers[0].text() + launchers[1].text()
    done = len(digests())
    assert 3 < done < LONG["num_iterations"]

    second = start(workplace, other(workplace), **paths(workplace), **LONG)
    assert second.wait() == [0, 0], second.text()
    assert f"at step {done}" in second.text() and second.text().count("completed: ") == 1
    assert state_of(final()) == reference["long"] and digests() == reference["digests"]
    assert not list(other(workplace).rglob("*.json")), "the second machine wrote files"


# ---- where the run is ------------------------------------------------------------------------------------------------

def send(bad, number):
    """A hook: one rank gets a signal in a step after compilation."""
    beat = Watchdog.beat

    def watched(self, *point):
        if self.rank == bad and point == (BAD_STEP,):
            os.kill(os.getpid(), number)
        beat(self, *point)

    Watchdog.beat = watched  # type: ignore[method-assign, assignment]


def test_a_run_that_exists_only_on_the_other_machine_is_not_restarted(workplace):
    training.succeed(**paths(workplace), **{**SHORT, "num_iterations": 1})
    shutil.copytree(training.run_dir(), other(workplace) / "runs" / "run")
    shutil.rmtree(training.run_dir())
    assert error_of(start(workplace, other(workplace), **paths(workplace), **SHORT)) == (
        f"rank 1 on host {HOST}: {other(workplace)}/runs/run: the run is on this machine, but not on rank 0's; "
        "share the directory between the machines, give this machine --node-rank=0, or start over with "
        "--resume=scratch")
    assert not training.run_dir().exists()


# ---- what each machine must have -------------------------------------------------------------------------------------

def lose_data():
    """A hook: the second machine's copy of the data lacks a file. (Here the copy is below another path.)"""
    check_files = start_run.check_files

    def check_copy(manifests):
        if os.environ["RANK"] == "1":
            moved = Path(os.environ["NANOCHAT_BASE_DIR"]) / "copy"
            shutil.copytree(manifests["train"]["data"]["root"], moved)
            (moved / "shard_1.parquet").unlink()
            manifests = {"train": {"data": {**manifests["train"]["data"], "root": str(moved)}}}
        check_files(manifests)

    start_run.check_files = check_copy


@pytest.mark.parametrize(("lacks", "message"), [
    ("the tokenizer", "rank 1 on host {host}: {other}/tokenizer"),
    ("our flags", "rank 1 on host {host}: started differently: warmup_steps is 3, on rank 0 it is 2; "),
    ("the data", "rank 1 on host {host}: {other}/copy/shard_1.parquet: .* it is gone; .*; every machine of "
                 "a launch reads the data itself: copy or mount the same files under the same path on this machine"),
])
def test_a_machine_that_lacks_something_is_named(workplace, lacks, message):
    flags = paths(workplace)
    if lacks == "the tokenizer":
        flags.pop("tokenizer")
    error = error_of(start(workplace, other(workplace), own={"warmup_steps": 3} if lacks == "our flags" else None,
                           hook=lose_data if lacks == "the data" else None, **flags, **SHORT))
    assert re.search(message.format(host=HOST, other=other(workplace)), error), error
    assert not training.run_dir().exists()


# ---- errors of one rank ----------------------------------------------------------------------------------------------

def fail_in(bad, error):
    """A hook: reading fails on one rank, from the eighth unit of documents on."""
    read, calls = ParquetSource.read, iter(range(1000))

    def watched(self, *args, **kwargs):
        if os.environ["RANK"] == str(bad) and next(calls) >= 7:
            raise error
        return read(self, *args, **kwargs)

    ParquetSource.read = watched  # type: ignore[method-assign]


def test_bad_data_on_one_rank_ends_all_with_one_error(workplace):
    """tests/test_watchdog.py has the other failures of a rank."""
    error = FileNotFoundError("x.parquet: it is gone")
    group = start(workplace, workplace, hook=partial(fail_in, 1, error), collective_timeout_seconds=10,
                  **paths(workplace), **SHORT)
    verdict = error_of(group)
    who = f"rank 1 on host {HOST} (pid {group.processes[1].pid}) failed at step "
    assert verdict.startswith(who) and verdict.endswith(f": {error}")
    assert state()["status"] == "failed" and state()["reason"] == verdict


@pytest.mark.parametrize(("bad", "number", "verdict"), [
    (1, signal.SIGSTOP, ", and its process does not answer; the other 1 wait"),
    (0, signal.SIGKILL, "has died; it was last seen at "),
])
def test_a_rank_that_stops_or_dies_is_named_and_the_run_resumes_to_the_same_bits(
        workplace, reference, bad, number, verdict):
    group = start(workplace, workplace, hook=partial(send, bad, number), collective_timeout_seconds=2,
                  sync_save=True, **paths(workplace), **SHORT)
    group.processes[1 - bad].join(training.PATIENCE_S)
    code = group.processes[1 - bad].exitcode
    group.kill()
    assert code == 1 and group.processes[bad].exitcode == -signal.SIGKILL, group.text()
    output = group.outputs[1 - bad].read_text()
    assert f"rank {bad} on host {HOST} (pid {group.processes[bad].pid})" in output and verdict in output, output
    assert output.count("error: ") == 1 and "Traceback" not in output, output
    if number == signal.SIGSTOP:  # one resume is enough
        assert state()["status"] == "failed" and verdict in state()["reason"]
        second = start(workplace, workplace, **paths(workplace), **SHORT)
        assert second.wait() == [0, 0] and "at step 4" in second.text(), second.text()
        assert state_of(final()) == reference["short"] and digests() == reference["digests"][:SHORT["num_iterations"]]
