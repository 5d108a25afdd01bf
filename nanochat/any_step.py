"""
Every step is a checkpoint: RUN@STEP where a command reads one, saved or not.

    sample mine@1234  --make_available-->  checkpoint-1234 exists          nothing to do
                                           it does not   --scripts.replay, a process of its own-->  it does
"""

import argparse
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nanochat.checkpoint import list_checkpoints, step_of
from nanochat.common import counted
from nanochat.run_dir import (
    CONFIG_NAME,
    Fork,
    find_run_at,
    is_step,
    iter_log,
    read_config,
)


def check_step(run_dir: Path, step: int) -> None:
    """ValueError unless a run has trained `step` steps itself."""
    fork = Fork.of(read_config(run_dir).get("fork"), run_dir / CONFIG_NAME)
    if fork is not None and step < fork.step:
        raise ValueError(
            f"{run_dir.name}@{step}: the run is a fork, and begins with step {fork.step}; name the run that it "
            f"continues: {fork.run}@{step}"
        )
    log = iter_log(run_dir / "logs" / "train.jsonl")
    trained = 1 + max((record["step"] for record in log if is_step(record)), default=-1)
    if step > trained:
        raise ValueError(
            f"{run_dir.name}@{step}: the run has trained {counted(trained, 'step')}; name one of its steps, or "
            f"leave out @{step} where its newest weights will do"
        )


def unsaved_step(name: str | None) -> int | None:
    """The step that RUN@STEP names, if the run has no checkpoint of it; otherwise None."""
    if not name:
        return None
    try:
        run_dir, selector = find_run_at(name)
    except (OSError, ValueError):
        return None  # the command says what is wrong
    if selector is None or not selector.isdecimal():
        return None
    step = int(selector)
    saved = {step_of(path) for path in list_checkpoints(run_dir)}
    return None if step in saved else step


def make_available(
    name: str | None, *, kept: bool = True, data_path: str | None = None
) -> str | None:
    """The name of a checkpoint that exists: for RUN@STEP, the step is replayed by a process of its
    own if it was not saved. Without `kept`, the checkpoint is in a temporary folder, until this
    process ends. `data_path`: where the run's data is now, if it was moved. ValueError if it cannot
    be replayed."""
    step = unsaved_step(name)
    if name is None or step is None:
        return name
    check_step(find_run_at(name)[0], step)
    words = [name]
    if data_path:
        words.append(f"--data-path={data_path}")
    result = name
    if not kept:
        folder = Path(tempfile.mkdtemp(prefix="nanochat-replay-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        words.append(f"--out={folder / 'run'}")
        result = str(folder / "run")
    replay(words)
    return result


def replay(words: Sequence[str], processes: int = 1) -> None:
    """Run scripts.replay with these arguments, on one or several processes. ValueError if it
    fails; it has said why."""
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m"]
    # not one of torchrun's processes
    of_torchrun = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in of_torchrun and not key.startswith("TORCHELASTIC_")
    }
    code = str(Path(__file__).parents[1])
    others = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{code}{os.pathsep}{others}" if others else code
    done = subprocess.run([*start, "scripts.replay", *words], env=environment)
    if done.returncode != 0:
        raise ValueError(f"{words[0]}: the replay failed; its error is above")


def add_data_path(parser: argparse.ArgumentParser) -> None:
    """Add the flag of commands that read the data of a run."""
    parser.add_argument(
        "--data-path",
        metavar="DIR",
        help="where the run's data is now (default: where its newest launch read it)",
    )


def add_no_keep(parser: argparse.ArgumentParser) -> None:
    """Add the flag of commands that take RUN@STEP."""
    parser.add_argument(
        "--no-keep",
        action="store_true",
        help="of a step that was not saved: do not keep the checkpoint that is replayed",
    )
