"""Shared by the tests of the training job: a small corpus with its tokenizer, and ways to run the
job.

run      in this process, as the command line does: exit code, output, errors
start    in child processes, one per rank, which can be killed; a server that has imported torch once forks them, so
         a process costs a fraction of a second
"""

import contextlib
import functools
import gc
import hashlib
import io
import json
import logging
import multiprocessing
import os
import pkgutil
import pydoc_data.topics
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nanochat import checkpoint as checkpoint_module
from nanochat.cli import run_main
from nanochat.run_dir import TrainLog, iter_log
from nanochat.run_owner import Owner, claim
from nanochat.run_state import read_state
from nanochat.run_stop import StopWatch
from nanochat.tokenizer import RustBPETokenizer
from scripts import base_train, inspect_data, tok_shards
from tests.crashes import die
from tests.toy import write_parquet

VOCAB_SIZE = 320
# a child that takes longer hangs, even on a machine that is ten times slower than an idle one
PATIENCE_S = 600

# a run of two seconds: sliding windows, value embeddings, cut documents
SETTINGS: dict[str, Any] = {
    "depth": 2,
    "aspect_ratio": 12,
    "head_dim": 12,
    "window_pattern": "SL",
    "max_seq_len": 160,
    "device_type": "cpu",
    "total_batch_size": 160 * 8,
    "device_batch_size": 4,
    "lanes": 4,
    "buffer_size": 16,
    "overlap": 32,
    "tokenizer_threads": 1,
    "num_iterations": 24,
    "warmup_steps": 2,
    "eval_every": -1,
    "eval_tokens": 160 * 16,
    "sample_every": -1,
    "save_every": 4,
    "model_tag": "run",
}
T = 64
STEP = T * 8
SMALL: dict[str, Any] = {  # a third of the cost: one layer, rows of T tokens, STEP tokens per step
    "depth": 1,
    "aspect_ratio": 24,
    "max_seq_len": T,
    "total_batch_size": STEP,
    "overlap": 16,
    "eval_tokens": T * 16,
}


def skipped_on_meta(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    """Skip the initial values of modules on the meta device, which have none. A run builds five
    models only to count their parameters, and this took a tenth of a short run."""
    return lambda module: None if module.weight.is_meta else reset(module)


for kind in (torch.nn.Linear, torch.nn.Embedding):
    kind.reset_parameters = skipped_on_meta(kind.reset_parameters)  # type: ignore[method-assign]


# ---- corpus, tokenizer and settings --------------------------------------------------------------


def texts(num: int, *, seed: int) -> list[str]:
    """Pieces of English prose, 20 to 1,500 characters, the same on every call."""
    prose = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    rng = random.Random(seed)
    starts = [rng.randrange(len(prose) - 1500) for _ in range(num)]
    return [prose[at : at + rng.choice((20, 100, 200, 400, 1500))] for at in starts]


def write_shard(path: Path, documents: list[Any], **kwargs: Any) -> Path:
    return write_parquet(path, documents, group_size=32, **kwargs)


def write_buckets(folder: Path, buckets: dict[str, int], **shards: int) -> None:
    """Write text/BUCKET with two files of `num` documents for training and one for validation.
    `shards`: {folder: the largest length of an entry (0: any)}, where the same text goes as
    shards."""
    for k, (bucket, num) in enumerate(buckets.items()):
        for i, documents in enumerate((num, num, 8)):
            write_shard(
                folder / "text" / bucket / f"{i}.parquet", texts(documents, seed=10 * k + i)
            )
    for name, length in shards.items():
        assert (
            tok_shards.main(
                [
                    f"--input-dir={folder / 'text'}",
                    f"--output-dir={folder / name}",
                    "--num-workers=1",
                    f"--tokenizer={folder / 'tokenizer'}",
                    f"--max-length={length}",
                    "--overlap-size=2",
                ]
            )
            == 0
        )


@functools.cache
def _assets() -> tempfile.TemporaryDirectory[str]:
    """data/ (three shards and one for validation) and tokenizer/, written once."""
    folder = tempfile.TemporaryDirectory(prefix="training-assets-")
    for i in range(4):
        write_shard(Path(folder.name) / "data" / f"shard_{i}.parquet", texts(96, seed=i))
    RustBPETokenizer.train_from_iterator(texts(200, seed=99), VOCAB_SIZE).save(
        Path(folder.name) / "tokenizer"
    )
    return folder


@contextlib.contextmanager
def workplace(path: Path, **changed: Any) -> Iterator[Path]:
    """A base directory with data/ and tokenizer/, for the code inside the block; one CPU thread,
    and none of torchrun's variables in the environment. `changed`: settings of runs inside the
    block."""
    shutil.copytree(_assets().name, path, dirs_exist_ok=True)
    wandb = ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "XDG_CACHE_HOME")
    environment = {
        "NANOCHAT_BASE_DIR": str(path),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        **dict.fromkeys(wandb, str(path / "wandb")),
    }
    threads = torch.get_num_threads()
    without_retries = mock.patch.object(checkpoint_module, "RETRY_S", 0.0)
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.dict(SETTINGS, changed),
        without_retries,
    ):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        torch.set_num_threads(1)
        try:
            yield path
        finally:
            torch.set_num_threads(threads)


def in_workplace(**changed: Any) -> Any:
    """A fixture for most modules of runs: each test has its own workplace."""

    @pytest.fixture(autouse=True, name="workplace")
    def fixture(tmp_path: Path) -> Iterator[Path]:
        with workplace(tmp_path, **changed) as path:
            yield path

    return fixture


def flags(**changed: Any) -> list[str]:
    """The command line of `SETTINGS` with some changed (None omits one, True is a bare flag)."""
    return as_flags(
        {"data_path": Path(os.environ["NANOCHAT_BASE_DIR"]) / "data", **SETTINGS, **changed}
    )


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Settings as a command line."""
    named = [
        (name.replace("_", "-"), value) for name, value in settings.items() if value is not None
    ]
    return [
        ("--" if value else "--no-") + name if isinstance(value, bool) else f"--{name}={value}"
        for name, value in named
    ]


def run_dir(tag: str = "run") -> Path:
    return Path(os.environ["NANOCHAT_BASE_DIR"]) / "runs" / tag


# ---- in this process -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command. `err` has the log's lines and the error."""

    code: int
    out: str
    err: str


def run(**changed: Any) -> Outcome:
    """Run the job in this process. An exception other than those for bad input is a bug, and is
    raised here."""
    out, err = io.StringIO(), io.StringIO()
    handler, root = logging.StreamHandler(err), logging.getLogger()
    before = set(threading.enumerate())
    gc.freeze()  # the run collects garbage once, but not the test runner's objects
    root.addHandler(handler)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run_main(lambda: base_train.main(flags(**changed)))
    except SystemExit as e:
        left = [
            thread.name
            for thread in set(threading.enumerate()) - before
            if thread.name == "prefetch"
        ]
        assert not left, "the loader was not closed"
        return Outcome(int(e.code or 0), out.getvalue(), err.getvalue())
    finally:
        root.removeHandler(handler)
        gc.unfreeze()
    raise AssertionError("run_main returned")


def succeed(**changed: Any) -> Outcome:
    """`run` that must succeed."""
    outcome = run(**changed)
    assert outcome.code == 0, outcome.err
    return outcome


def refuse(**changed: Any) -> str:
    """`run` that must end with exit code 1, one error, which is returned, and no traceback."""
    outcome = run(**changed)
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.code == 1 and len(errors) == 1 and "Traceback" not in outcome.err, outcome.err
    return outcome.err[outcome.err.index("error: ") + len("error: ") :].strip()


# ---- in processes of their own -------------------------------------------------------------------


@functools.cache
def server() -> Any:
    """The context whose processes are forked from a server that has loaded torch and this module,
    and has run a short job (tests/warm.py). All tests share one server, so start it only from
    here."""
    context = multiprocessing.get_context("forkserver")
    lazy = ["torch._dynamo", "numpy.random"]  # torch.optim and NumPy load them on first use
    context.set_forkserver_preload(["pytest", "hypothesis", "tests.training", *lazy, "tests.warm"])
    return context


def _child(
    main: Callable[[list[str]], int | None],
    argv: list[str],
    env: dict[str, str],
    hook: Callable[[], None] | None,
    output: str,
) -> None:
    # a process started in the background ignores SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    checkpoint_module.RETRY_S = 0.0  # as in `workplace`
    gc.freeze()
    if hook is not None:
        hook()
    run_main(lambda: main(argv))


@dataclass
class Group:
    """The processes of one command."""

    processes: list[Any]
    outputs: list[Path]

    def wait(self) -> list[int]:
        """Wait until all ranks have ended, and return their exit codes. A rank that hangs fails the
        test."""
        deadline = time.monotonic() + PATIENCE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        alive = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        self.kill()
        assert not alive, f"rank {alive} hangs:\n{self.text()}"
        return [process.exitcode for process in self.processes]

    def wait_or_kill(self) -> int:
        """Wait until all ranks have ended, or one has killed itself (see the hooks below); then
        kill the others, as torchrun does. The exit code of the launch: SIGKILL's after a kill,
        otherwise the common one."""

        def codes() -> list[int | None]:
            return [process.exitcode for process in self.processes]

        wait_for(lambda: None not in codes() or -signal.SIGKILL in codes())
        killed = -signal.SIGKILL in codes()
        self.kill()
        [code] = {-signal.SIGKILL} if killed else {*codes()}
        assert code is not None
        return code

    def wait_for_death(self) -> None:
        """Wait until a rank has killed itself."""
        assert self.wait_or_kill() == -signal.SIGKILL, f"no kill:\n{self.text()}"

    def kill(self) -> None:
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
            process.join()

    def text(self) -> str:
        """What all ranks printed."""
        return "".join(path.read_text() for path in self.outputs if path.exists())


def launch(
    main: Callable[[list[str]], int | None],
    argvs: list[list[str]],
    envs: list[dict[str, str]],
    hook: Callable[[], None] | None = None,
) -> Group:
    """Run a script's `main` in one process per argv, with `envs` added to their environments;
    several processes get torchrun's variables. `hook`, which must be picklable, is called first in
    each."""
    common = dict(os.environ)
    if len(argvs) > 1:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            common.update(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(s.getsockname()[1]),
                WORLD_SIZE=str(len(argvs)),
            )
    base = Path(os.environ["NANOCHAT_BASE_DIR"])
    outputs = [base / f"output-{time.monotonic_ns()}-{rank}.txt" for rank in range(len(argvs))]
    processes = []
    for rank, (argv, env, output) in enumerate(zip(argvs, envs, outputs, strict=True)):
        ranked = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if len(argvs) > 1 else {}
        processes.append(
            server().Process(
                target=_child,
                daemon=True,
                args=(main, argv, {**common, **ranked, **env}, hook, str(output)),
            )
        )
        processes[-1].start()
    return Group(processes, outputs)


def start(world_size: int = 1, *, hook: Callable[[], None] | None = None, **changed: Any) -> Group:
    """`launch` of the job."""
    return launch(base_train.main, [flags(**changed)] * world_size, [{}] * world_size, hook)


def finish(world_size: int = 1, **changed: Any) -> str:
    """`start` that must succeed. Returns its output."""
    group = start(world_size, **changed)
    assert group.wait() == [0] * world_size, group.text()
    return group.text()


def owner_of(run_dir: Path) -> Owner:
    """Own a run from now on."""
    owner = claim(run_dir)
    owner.sign()
    return owner


# ---- hooks, which act inside a process -----------------------------------------------------------


def a_step_is_a_second(total_s: float) -> None:
    """Of a walltime of `total_s` seconds, one second passes each time the run checks it, however
    long steps take."""
    original = StopWatch.after_step

    def watched(self: Any, now: float | None = None) -> str:
        self.checks = getattr(self, "checks", 0) + 1
        return original(self, (self.deadline or 0.0) - total_s + self.checks)

    StopWatch.after_step = watched  # type: ignore[method-assign]


def after_step(step: int, act: Callable[[], None]) -> None:
    """Call `act` once this step is in the log."""
    write = TrainLog.write

    def watched(self: TrainLog, **record: Any) -> None:
        write(self, **record)
        if record.get("step") == step and "event" not in record:
            act()

    TrainLog.write = watched  # type: ignore[method-assign]


def before(function: str, call: int, act: Callable[[], None] = die) -> None:
    """Call `act` before call number `call` of a function, named like
    "nanochat.optim.MuonAdamW.step"."""
    parent, name = function.rsplit(".", 1)
    owner = pkgutil.resolve_name(parent)
    original, calls = getattr(owner, name), iter(range(1, call + 1))

    def watched(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) == call:
            act()
        return original(*args, **kwargs)

    setattr(owner, name, watched)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def die_after_step(step: int, delay_s: float = 0.0) -> None:
    """Kill the process `delay_s` after this step is in the log, wherever it is then."""
    after_step(step, threading.Timer(delay_s, die).start if delay_s else die)


def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---- the files of a run --------------------------------------------------------------------------


def final(tag: str = "run") -> Path:
    return run_dir(tag) / "checkpoints" / "final"


def log_file(tag: str = "run") -> Path:
    return run_dir(tag) / "logs" / "train.jsonl"


def events(name: str, tag: str = "run") -> list[dict[str, Any]]:
    """The lines of an event of the log, in the order written."""
    return [record for record in iter_log(log_file(tag)) if record.get("event") == name]


def all_steps(tag: str = "run") -> list[dict[str, Any]]:
    """The lines of all steps in the order written, including repeated ones."""
    return [record for record in iter_log(log_file(tag)) if "event" not in record]


def steps(tag: str = "run") -> dict[int, dict[str, Any]]:
    """{step: its last line in the log}."""
    return {record["step"]: record for record in all_steps(tag)}


def state(tag: str = "run") -> dict[str, Any]:
    """The run's state."""
    state = read_state(run_dir(tag))
    assert state is not None
    return state


def forget_saves() -> None:
    """Make the run one that ended before its first save."""
    shutil.rmtree(run_dir() / "checkpoints")
    lines = log_file().read_text().splitlines(keepends=True)
    log_file().write_text("".join(line for line in lines if '"event": "saved"' not in line))


def take_over(whole: Path, *names: str) -> None:
    """Copy the run in the folder `whole` to `runs/run`, with only the checkpoints `names`."""
    shutil.copytree(whole, run_dir())
    for name in set(checkpoints()) - set(names):
        shutil.rmtree(run_dir() / "checkpoints" / name)


def read_rows(tag: str, step: int) -> list[dict[str, Any]]:
    """The rows of a step, as `scripts.inspect_data rows --json` prints them."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert inspect_data.main(["rows", str(run_dir(tag)), f"--step={step}", "--json"]) == 0
    return [json.loads(line) for line in out.getvalue().splitlines()]


def digests(tag: str = "run", first: int = 0) -> list[str]:
    """The batch digests of all steps, from `first` on in a fork; no step may be missing."""
    lines = steps(tag)
    assert sorted(lines) == list(range(first, first + len(lines)))
    return [lines[step]["digest"] for step in sorted(lines)]


def losses(tag: str = "run") -> list[float]:
    return [record["loss"] for _, record in sorted(steps(tag).items())]


def checkpoints(tag: str = "run") -> list[str]:
    folder = run_dir(tag) / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint that must not depend on crashes, with tensors as bytes."""
    loaded = checkpoint_module.load_checkpoint(checkpoint)
    kept = {
        k: v
        for k, v in loaded.seal.items()
        if k not in ("wandb_id", "progress", "files", "checksum")
    }
    progress = {k: v for k, v in loaded.seal["progress"].items() if k != "train_time_s"}
    return {
        "model": as_bytes(loaded.model_state()),
        "optimizer": as_bytes(loaded.optimizer_state()),
        "scheduler": loaded.load(checkpoint_module.SCHEDULER_NAME),
        "cursors": loaded.cursors,
        "trainer": kept,
        "progress": progress,
    }


def as_bytes(value: Any) -> Any:
    """A value with each tensor replaced by (dtype, shape, bytes), so that == compares bits."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {k: as_bytes(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_bytes(v) for v in value]
    return value


def fingerprint(folder: Path) -> dict[str, str]:
    """{relative path: hash and modification time} of all files below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest()
        + f" {path.stat().st_mtime_ns}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
