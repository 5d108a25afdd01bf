"""
Average the weights of a run's last checkpoints into a new run, for evaluation and export.

    python -m scripts.average d12 --last=5               # runs/d12-average-5
    python -m scripts.average d12 --steps=900,950,1000   # also steps that were not saved: they are replayed
    python -m scripts.base_eval d12-average-5

Near the end of a run, weights move around an optimum. Their mean is often better than any one of
them, especially while the learning rate is high (arXiv 1803.05407, 2306.03241). Sums are float64
and rounded once.

The new run has the settings, tokenizer and pinned data of the old one, and one checkpoint, `final`,
at the newest averaged step. It has no optimizer state, so it cannot be resumed, but a new run can
start from it (--init-from). It gets its name once it is complete."""

import argparse
import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from nanochat.any_step import make_available
from nanochat.checkpoint import (
    MODEL_NAME,
    Checkpoint,
    Snapshot,
    find_checkpoint,
    first_good,
    list_checkpoints,
    step_of,
)
from nanochat.cli import Parser, run_main, setup_logging, whole
from nanochat.common import counted, print0, write_json
from nanochat.run_dir import CONFIG_NAME, find_run, new_run_path, open_folders
from nanochat.run_owner import write_completed
from nanochat.run_reader import RunReader
from nanochat.start_run import check_own_tokenizer
from scripts.export import new_folder


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(description="Average the weights of a run's last checkpoints.", epilog=__doc__)
    p.add_argument(
        "run", metavar="RUN", nargs="?", help="a run's name or folder (default: the only run)"
    )
    p.add_argument(
        "--last",
        type=whole(2),
        default=5,
        help="number of checkpoints to average, the newest ones that training saved",
    )
    p.add_argument(
        "--steps", type=step_list, metavar="LIST", help="average these steps instead, saved or not"
    )
    p.add_argument("--model-tag", help="name of the new run (default: RUN-average-LAST)")
    return p.parse_args(argv)


def step_list(text: str) -> list[int]:
    """The type of --steps: at least two different steps, separated by commas."""
    steps = sorted({int(step) for step in text.split(",")}, reverse=True)
    if len(steps) < 2:
        raise argparse.ArgumentTypeError("expected two or more steps, such as 900,950,1000")
    return steps


def last_checkpoints(run_dir: Path, number: int) -> list[Checkpoint]:
    """The newest good checkpoints for `number` different steps, newest first. Those of scripts.replay
    do not count: looking into a run does not change its average.

    ValueError if there are fewer.
    """
    checkpoints: list[Checkpoint] = []
    paths = list_checkpoints(run_dir)
    while len(checkpoints) < number:
        checkpoint = None
        # all that are left are corrupt, and first_good has named them
        with contextlib.suppress(ValueError):
            checkpoint = first_good(paths)
        if checkpoint is None:
            steps = ", ".join(str(c.step) for c in checkpoints) or "none"
            raise ValueError(
                f"--last {number}: {run_dir} has good checkpoints for {counted(len(checkpoints), 'step')} "
                f"({steps}); pass a smaller number, name --steps, or train with --save-every"
            )
        if checkpoint.seal.get("replayed"):
            paths.remove(checkpoint.path)
            continue
        checkpoints.append(checkpoint)
        paths = [path for path in paths if step_of(path) < checkpoint.step]
    return checkpoints


def average(checkpoints: Sequence[Checkpoint]) -> dict[str, torch.Tensor]:
    """The mean of the checkpoints' weights, in the dtypes of the first.

    ValueError for different architectures.
    """
    newest = checkpoints[0]
    for checkpoint in checkpoints:
        checkpoint.check_architecture(newest.model_config)
    states = [checkpoint.model_state() for checkpoint in checkpoints]
    means = {}
    for name, tensor in states[0].items():
        stacked = torch.stack([state[name].double() for state in states])
        means[name] = stacked.mean(dim=0).to(tensor.dtype)
    return means


def fill(run_dir: Path, source: Path, tag: str, checkpoints: Sequence[Checkpoint]) -> None:
    """Write the files of the new run, `tag`, into its folder."""
    newest = checkpoints[0]
    theirs = newest.seal
    kept = ("tokens", "phase", "K", "tokenizer_fingerprint", "model_code")
    state = {name: theirs[name] for name in kept if name in theirs}
    state["progress"] = theirs["progress"] | {"val_bpb": None, "min_val_bpb": None}
    state["status"] = "completed"
    state["averaged"] = [str(checkpoint.path) for checkpoint in checkpoints]
    check_own_tokenizer(source, theirs.get("tokenizer_fingerprint", ""))
    open_folders(run_dir)
    shutil.copytree(source / "tokenizer", run_dir / "tokenizer", dirs_exist_ok=True)
    shutil.copyfile(source / "data_manifest.json", run_dir / "data_manifest.json")
    weights = {MODEL_NAME: average(checkpoints)}
    snapshot = Snapshot(newest.step, weights, newest.model_config, newest.cursors, state)
    snapshot.write(run_dir, "final")
    reason = f"the mean of {len(checkpoints)} checkpoints of {source.name}"
    write_completed(run_dir, newest.step, reason)
    trained = RunReader(source)
    config = trained.config_of(trained.launch_of(newest.step - 1))
    write_json(run_dir / CONFIG_NAME, config | {"model_tag": tag})


def main(argv: Sequence[str] | None = None) -> int:
    """Write the averaged run. ValueError and OSError for bad flags and unreadable files."""
    args = parse_args(argv)
    setup_logging()
    source = find_run(args.run)
    number = args.last if args.steps is None else len(args.steps)
    target = new_run_path(args.model_tag or f"{source.name}-average-{number}")
    with new_folder(target, "delete it, or name another run with --model-tag") as unfinished:
        if args.steps is None:
            checkpoints = last_checkpoints(source, args.last)
        else:
            names = [f"{source}@{step}" for step in args.steps]
            checkpoints = [find_checkpoint(make_available(name)) for name in names]
        fill(unfinished, source, target.name, checkpoints)
    steps = ", ".join(f"{c.step:,}" for c in checkpoints)
    print0(f"averaged: the weights of steps {steps}; {target}")
    return 0


if __name__ == "__main__":
    run_main(main)
