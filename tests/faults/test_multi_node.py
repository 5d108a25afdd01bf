"""A launch over two machines: what each one needs, whose run directory counts, and how the launch
ends if one fails.

The two machines are two base directories. One test runs two real torchruns over the loopback; the
others start the processes as torchrun does on two machines with one process each.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from nanochat import start_run
from nanochat.run_dir import iter_log
from scripts import base_train
from tests import training
from tests.crashes import on_rank
from tests.toy import write_jsonl
from tests.training import as_flags, digests, final, run_dir, state, state_of

HOST = socket.gethostname()
STEPS = 60  # long enough for a signal from outside


@pytest.fixture(autouse=True)
def workplace(tmp_path):
    """The first machine's base directory, with data and tokenizer for both."""
    with training.workplace(tmp_path / "node0", **training.SMALL, num_iterations=STEPS) as path:
        yield path


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run on one process, which gives the same bits."""
    with training.workplace(
        tmp_path_factory.mktemp("reference"), **training.SMALL, num_iterations=STEPS
    ):
        training.succeed(leaves=2)
        return {"final": state_of(final()), "digests": digests()}


# ---- two machines --------------------------------------------------------------------------------


def other(workplace):
    """The second machine's base directory: empty."""
    return workplace.parent / "node1"


def paths(workplace):
    """Flags that make both machines read the same files."""
    return {"data_path": workplace / "data", "tokenizer": workplace / "tokenizer"}


def start(*bases, hook=None, own=None, **changed):
    """Start the job with one process per machine. `hook`: called in each; `own`: flags of the
    second machine."""
    argvs = [
        training.flags(**{**changed, **(own or {} if rank else {})}) for rank in range(len(bases))
    ]
    return training.launch(
        base_train.main,
        argvs,
        [{"NANOCHAT_BASE_DIR": str(base), "LOCAL_RANK": "0"} for base in bases],
        hook,
    )


def error_of(group):
    """The one error of a launch that must end with exit code 1 on all ranks, without a
    traceback."""
    assert group.wait() == [1] * len(group.processes), group.text()
    text = group.text()
    assert text.count("error: ") == 1 and "Traceback" not in text, text
    return next(line for line in text.splitlines() if "error: " in line).partition("error: ")[2]


def test_a_fork_needs_its_parents_settings_on_every_machine_and_its_checkpoints_on_the_first(
    workplace,
):
    short = {**paths(workplace), "leaves": 2, "num_iterations": 6, "save_every": 2}
    training.succeed(model_tag="parent", **short)
    machines = [{"NANOCHAT_BASE_DIR": str(base)} for base in (workplace, other(workplace))]

    def fork(**changed):
        words = as_flags({"fork_from": "parent@4", "model_tag": "child", **changed})
        return training.launch(base_train.main, [words, words], machines)

    hidden = shutil.ignore_patterns("checkpoints")
    shutil.copytree(run_dir("parent"), other(workplace) / "runs" / "parent", ignore=hidden)
    for changed in ({}, {"num_iterations": 8}, {}):  # begins, is extended, has ended
        group = fork(**changed)
        assert group.wait() == [0, 0], group.text()
    assert digests("child", 4)[:2] == digests("parent")[4:]
    assert len(digests("child", 4)) == 4


# ---- torchrun ------------------------------------------------------------------------------------


def torchruns(workplace):
    """Two launchers, each with one process; the run is on the first one's machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes=2",
                f"--node-rank={node}",
                "--nproc-per-node=1",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
                "-m",
                "scripts.base_train",
                "--",
                *training.flags(**paths(workplace)),
            ],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "NANOCHAT_BASE_DIR": str(base)},
        )
        for node, base in enumerate((workplace, other(workplace)))
    ]


def test_two_torchruns_stop_after_a_signal_to_one_and_the_run_resumes_to_the_same_bits(
    workplace, reference
):
    """The launcher without the signal would wait minutes for the other one (see docs/clusters.md),
    so the test kills it once its worker has ended."""
    launchers = torchruns(workplace)
    try:
        training.wait_for(
            lambda: training.log_file().exists() and '"step": 3,' in training.log_file().read_text()
        )
        launchers[1].send_signal(signal.SIGTERM)
        assert launchers[1].wait(training.PATIENCE_S) == 1
        training.wait_for(lambda: state()["status"] == "stopped")
        workers = [rank["pid"] for rank in state()["ranks"]]
        training.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    assert state()["reason"] == "SIGTERM (rank 1)"
    done = len(digests())
    assert 3 < done < STEPS

    second = start(workplace, other(workplace), **paths(workplace))
    assert second.wait() == [0, 0], second.text()
    assert f"at step {done}" in second.text() and second.text().count("completed: ") == 1
    assert state_of(final()) == reference["final"] and digests() == reference["digests"]
    assert not list(other(workplace).rglob("*.json")), "the second machine wrote files"


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_machine(launcher):
    """As if the machine had lost its power: torchrun and its process end at once."""
    workers = children(launcher.pid)
    launcher.kill()
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    launcher.wait()


def test_an_elastic_launch_goes_through_1_2_1_nodes_to_the_same_bits(workplace, reference):
    """The command is that of docs/clusters.md."""
    hold = workplace / "hold"
    hold.touch()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{s.getsockname()[1]}"
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "HOLD": str(hold)}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=9",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        "--rdzv-id=elastic",
        "--monitor-interval=0.1",
        "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1",
        "-m",
        "tests.held_run",
        "--",
        *training.flags(leaves=2),
    ]
    launchers = []

    def wait_for_nodes(*numbers):
        training.wait_for(
            lambda: [event["world_size"] for event in training.events("started")] == [*numbers]
        )
        # it trains
        training.wait_for(lambda: "event" not in list(iter_log(training.log_file()))[-1])

    try:
        for numbers in ((1,), (1, 2), (1, 2, 1)):
            if numbers == (1, 2, 1):
                kill_machine(launchers.pop())
            else:
                launchers.append(subprocess.Popen(command, cwd=Path(__file__).parents[2], env=env))
            wait_for_nodes(*numbers)
        hold.unlink()
        assert [launcher.wait(training.PATIENCE_S) for launcher in launchers] == [0]
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                kill_machine(launcher)
    assert state_of(final()) == reference["final"] and digests() == reference["digests"]


@pytest.mark.parametrize(
    "nodes, shares, warns", [("1:2", "0", True), ("1:2", "1", False), ("2:2", "0", False)]
)
def test_an_elastic_launch_that_would_fail_is_warned_of_at_its_start(
    tmp_path, monkeypatch, nodes, shares, warns
):
    code = "from nanochat.dist import elastic_problem; print(elastic_problem())"
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", shares)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"""import os, subprocess, sys
os.environ["TORCHELASTIC_RUN_ID"] = "x"
subprocess.run([sys.executable, "-c", {code!r}])""",
            f"--nnodes={nodes}",
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert ("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in done.stdout) == warns, done


# ---- where the run is ----------------------------------------------------------------------------


def test_a_run_that_exists_only_on_the_other_machine_is_not_restarted(workplace):
    training.succeed(**paths(workplace), num_iterations=1)
    shutil.copytree(training.run_dir(), other(workplace) / "runs" / "run")
    shutil.rmtree(training.run_dir())
    error = error_of(start(workplace, other(workplace), **paths(workplace)))
    assert error.startswith(f"rank 1 on host {HOST}: {other(workplace)}/runs/run: ")
    for words in ("not on rank 0's", "share the directory", "--node-rank=0", "--resume=scratch"):
        assert words in error
    assert not training.run_dir().exists()


def test_each_machine_prepares_text_below_its_own_base_directory(workplace):
    for name in "ab":
        documents = training.texts(80, seed=ord(name))
        write_jsonl(workplace / "text" / f"{name}.jsonl", documents)
    flags = {**paths(workplace), "data_path": workplace / "text", "num_iterations": 3, "leaves": 2}
    group = start(workplace, other(workplace), **flags)
    assert group.wait() == [0, 0], group.text()
    ours, theirs = (
        sorted(path.relative_to(base) for path in base.glob("prepared/**/*.parquet"))
        for base in (workplace, other(workplace))
    )
    assert ours == theirs and len(ours) == 2
    training.succeed(**flags, model_tag="alone")
    assert digests() == digests("alone") and len(digests()) == 3


# ---- what each machine must have -----------------------------------------------------------------


def lose_data():
    """A hook: the second machine's copy of the data lacks a file. (Here the copy is below another
    path.)"""
    check_files = start_run.check_files

    def check_copy(manifests):
        if os.environ["RANK"] == "1":
            moved = Path(os.environ["NANOCHAT_BASE_DIR"]) / "copy"
            shutil.copytree(manifests["train"]["data"]["root"], moved)
            (moved / "shard_1.parquet").unlink()
            manifests = {"train": {"data": {**manifests["train"]["data"], "root": str(moved)}}}
        return check_files(manifests)

    start_run.check_files = check_copy


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ("the tokenizer", "rank 1 on host {host}: {other}/tokenizer"),
        (
            "our flags",
            "rank 1 on host {host}: started differently: warmup_steps is 3, on rank 0 it is 2; ",
        ),
        (
            "the data",
            "rank 1 on host {host}: {other}/copy/shard_1.parquet: .* does not exist.*every machine.*"
            "copy or mount the same files",
        ),
    ],
)
def test_a_machine_that_lacks_something_is_named(workplace, lacks, message):
    flags = paths(workplace)
    if lacks == "the tokenizer":
        flags.pop("tokenizer")
    error = error_of(
        start(
            workplace,
            other(workplace),
            own={"warmup_steps": 3} if lacks == "our flags" else None,
            hook=lose_data if lacks == "the data" else None,
            **flags,
        )
    )
    assert re.search(message.format(host=HOST, other=other(workplace)), error), error
    assert not training.run_dir().exists()


# ---- errors of one rank --------------------------------------------------------------------------


def fail(error):
    raise error


def test_bad_data_on_one_rank_ends_all_with_one_error(workplace):
    """tests/faults/test_watchdog.py has the other failures of a rank."""
    error = FileNotFoundError("x.parquet: it is gone")
    function = "nanochat.parquet_source.ParquetSource.read"
    hook = partial(on_rank, 1, partial(training.before, function, 8, partial(fail, error)))
    group = start(
        workplace, workplace, hook=hook, collective_timeout_seconds=10, **paths(workplace)
    )
    verdict = error_of(group)
    who = f"rank 1 on host {HOST} (pid {group.processes[1].pid}) failed at step "
    assert verdict.startswith(who) and verdict.endswith(f": {error}")
    assert state()["status"] == "failed" and state()["reason"] == verdict


@pytest.mark.parametrize(
    ("bad", "number", "verdict"),
    [
        (
            1,
            signal.SIGSTOP,
            "and its process does not answer; waiting at step 5 (optimizer): 1 other rank; no progress",
        ),
        (0, signal.SIGKILL, "has died; rank 1 was at "),
    ],
)
def test_a_rank_that_stops_or_dies_is_named_and_the_run_resumes_to_the_same_bits(
    workplace, reference, bad, number, verdict
):
    hook = partial(
        on_rank,
        bad,
        partial(
            training.before, "nanochat.optim.MuonAdamW.step", 6, partial(training.send, number)
        ),
    )
    group = start(
        workplace,
        workplace,
        hook=hook,
        collective_timeout_seconds=2,
        sync_save=True,
        **paths(workplace),
    )
    group.processes[1 - bad].join(training.PATIENCE_S)
    code = group.processes[1 - bad].exitcode
    group.kill()
    assert code == 1 and group.processes[bad].exitcode == -signal.SIGKILL, group.text()
    output = group.outputs[1 - bad].read_text()
    assert (
        f"rank {bad} on host {HOST} (pid {group.processes[bad].pid})" in output
        and verdict in output
    ), output
    assert output.count("error: ") == 1 and "Traceback" not in output, output
    if number == signal.SIGSTOP:  # one resume is enough
        assert state()["status"] == "failed" and verdict in state()["reason"]
        second = start(workplace, workplace, **paths(workplace))
        assert second.wait() == [0, 0] and "at step 4" in second.text(), second.text()
        assert state_of(final()) == reference["final"] and digests() == reference["digests"]
