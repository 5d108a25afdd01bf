"""
Make the checkpoint of any step that a run has trained, saved or not.

    python -m scripts.replay mine@1234                                   # runs/mine/checkpoints/checkpoint-1234
    torchrun --standalone --nproc_per_node=8 -m scripts.replay mine@1234 # the same bits, sooner
    python -m scripts.replay mine@1234 --out=DIR                         # keep it elsewhere
    python -m scripts.replay mine --check=1000:2000                      # does one save follow from the other?

The run is trained again from the nearest earlier save, or from its new weights. Each replayed step
must have the digest and the loss that the log has, to the last bit; otherwise the command says so,
names what differs between the machines if it is known, and keeps nothing. Any number of processes
that divides the run's leaves (K) will do. Nothing of the run is changed, except that it has one
more checkpoint, which retention never deletes. It may be training meanwhile.

Commands that take RUN@STEP call this one for a step that was not saved.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanochat.any_step import add_data_path, check_step
from nanochat.attention import activate_kernel
from nanochat.checkpoint import (
    MODEL_CONFIG_NAME,
    MODEL_NAME,
    OPTIMIZER_NAME,
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    look_for_good,
    step_of,
)
from nanochat.cli import Parser, run_main, setup_logging
from nanochat.common import begin_launch, counted, duration, print0, write_json
from nanochat.config import Settings
from nanochat.dist import (
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    get_compute_dtype,
    on_rank0,
    versions,
)
from nanochat.pins import DATA_MANIFEST
from nanochat.run_dir import CONFIG_NAME, find_run_at, finite, newest_events
from nanochat.run_journal import Journal, code_version
from nanochat.run_reader import Launch, RunReader
from nanochat.run_settings import resolve
from nanochat.schedule import Schedule
from nanochat.start_run import (
    Run,
    Start,
    check_own_tokenizer,
    find_data,
    find_folders,
    find_origin,
)
from nanochat.steps import Outcome
from nanochat.tokenizer import get_tokenizer
from nanochat.trainer import Training, take_step
from scripts import base_train

# what decides bits and may differ between two machines, as `versions` and the log name it
CAUSES = ("device", "gpu", "cpu_capability", "cpu", "torch", "attention", "cuda", "cudnn", "code")


# ---- what to replay ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """This process among those of the replay."""

    rank: int
    world_size: int
    device: torch.device


def launch_of(run: RunReader, step: int) -> Launch:
    """The last launch that took a step. ValueError if the log does not have it."""
    launch = run.launch_of(step)
    if launch is None:
        raise ValueError(
            f"{run.log_path}: no launch has taken step {step}, so it cannot be replayed"
        )
    return launch


def nearest_save(run: RunReader, step: int) -> Checkpoint | None:
    """The newest good checkpoint at or before a step; None for the beginning of the run.
    ValueError if a fork has none."""

    def earlier() -> list[Path]:
        return [path for path in list_checkpoints(run.run_dir) if step_of(path) <= step]

    with contextlib.suppress(ValueError):  # all of them are corrupt
        found = look_for_good(earlier)
        if found is not None:
            return found
    if run.first_step > 0:
        raise ValueError(
            f"{run.run_dir}: no good checkpoint at or before step {step}, and the run is a fork; name a later "
            f"step, or fork again"
        )
    return None


def settings_of(run: RunReader, step: int, process: Process) -> Settings:
    """The settings with which a run took a step, on this machine."""
    launch = launch_of(run, step)
    changed = launch.started.get("changed") or {}
    known = {name: value for name, value in changed.items() if name in run.config}
    settings = Settings.from_json({**run.config, **known}, run.run_dir / CONFIG_NAME)
    return replace(
        settings,
        world_size=process.world_size,
        device_type=process.device.type,
        # such as a resumed launch had
        num_iterations=launch.started.get("num_iterations") or settings.num_iterations,
    )


def start_at(run: RunReader, checkpoint: Checkpoint | None, process: Process) -> Start:
    """How a launch of the run would start from a checkpoint, or from the beginning."""
    step = checkpoint.step if checkpoint else 0
    settings = settings_of(run, step, process)
    dtype = get_compute_dtype(process.device, settings.dtype)
    settings, horizon, _ = resolve(settings, dtype, None)
    origin = None
    cursors = checkpoint.cursors if checkpoint else None
    if checkpoint is None:
        if settings.init_from is not None:
            origin = find_origin(settings.init_from, run.config.get("origin"))
        kept = run.nearest_cursors(0)
        cursors = kept[1] if kept else None
    return Start(
        run_dir=run.run_dir,
        settings=settings,
        horizon=horizon,
        config=run.config,
        checkpoint=checkpoint,
        origin=origin,
        parent=None,
        rate_jump=None,
        cursors=cursors,
        notices={},
        manifests={},
        events=newest_events(run.run_dir, step),
    )


# ---- the replay ----------------------------------------------------------------------------------


@contextlib.contextmanager
def replayed(
    run: RunReader,
    checkpoint: Checkpoint | None,
    step: int,
    process: Process,
    data_path: str | None = None,
) -> Iterator[Training]:
    """Collective. The training of a run after `step` steps, replayed from a checkpoint. ValueError
    if a step differs from the log. `data_path`: where the run's data is, if it has moved."""
    start = start_at(run, checkpoint, process)
    settings = start.settings
    begin_launch(settings.data_cache)
    activate_kernel(
        settings.attention_kernel, process.device.type, deterministic=settings.deterministic
    )
    if settings.cpu_threads and process.device.type == "cpu":
        torch.set_num_threads(settings.cpu_threads)
    if settings.leaves % process.world_size:
        print0(
            f"note: {process.world_size} processes do not divide the run's {settings.leaves} leaves, so the bits of "
            f"the replay may differ"
        )
    logged = {record["step"]: record for record in run.steps}
    check_own_tokenizer(run.run_dir, settings.tokenizer_fingerprint)
    tokenizer = get_tokenizer(run.run_dir / "tokenizer")
    folders = find_folders(run.run_dir, data_path)
    of_run = find_data(start, tokenizer, process.rank, folders)
    estimate(run, start.step, step, process)
    with base_train.open_training(of_run, process) as training:
        bar = tqdm(
            range(start.step, step),
            desc=f"replaying {run.name}",
            unit="step",
            disable=None if process.rank == 0 else True,
        )
        for number in bar:
            if number not in logged:
                raise ValueError(f"{run.log_path}: it lacks step {number}, which a replay compares")
            now = settings_of(run, number, process)
            follow(training, now, of_run)
            replay_step(of_run, training, logged[number], partial(causes, run, number, process))
        yield training


def estimate(run: RunReader, first: int, step: int, process: Process) -> None:
    """Print how many steps are replayed, and how long the run took for them."""
    if step == first:
        return
    seconds = 0.0
    for record in run.steps:
        if first <= record["step"] < step:
            ranks = launch_of(run, record["step"]).world_size
            seconds += record["step_s"] * ranks / process.world_size
    source = f"the save of step {first:,}" if first else "the beginning"
    print0(
        f"replay: {counted(step - first, 'step')} of {run.name} from {source}; about {duration(seconds)}, if "
        f"this machine is as fast as the run's"
    )


def follow(training: Training, now: Settings, of_run: Run) -> None:
    """Use the horizon of the launch that took the next step. ValueError if that launch changed
    something else that decides bits."""
    decided = ("device_batch_size", "compile", "activation_checkpointing")
    for name in decided:
        if getattr(now, name) != getattr(training.settings, name):
            raise ValueError(
                f"step {training.progress.step}: from here on, the run had another {name.replace('_', '-')} "
                f"({getattr(now, name)}); name a step before it, or one after the next save"
            )
    if now.num_iterations != training.schedule.num_iterations:
        training.schedule = Schedule.of(
            now, now.num_iterations, peak_weight_decay=of_run.horizon.weight_decay_scaled
        )


def replay_step(
    of_run: Run, training: Training, logged: Mapping[str, Any], why: Callable[[], str]
) -> None:
    """Take one step as the run did, and compare it with its line in the log."""
    step = training.progress.step
    rows, shortage = base_train.forward_backward(training)
    totals = take_step(
        training, rows, dry=shortage is not None, stop=False, unsaved=False, save=False
    )
    if totals.digest != logged["digest"]:
        raise ValueError(
            f"step {step}: the replay has other rows than the run: digest {totals.digest}, the log has "
            f"{logged['digest']}{why()}"
        )
    # the log has null for a loss that is not finite, which a spike may have
    if totals.outcome is not Outcome.VOID and finite(totals.loss) != logged["loss"]:
        raise ValueError(
            f"step {step}: the replay has the same rows as the run, but other bits: loss {totals.loss!r}, the log "
            f"has {logged['loss']!r}{why()}"
        )
    if totals.outcome is Outcome.VOID:
        raise ValueError(f"step {step}: it could not be applied{why()}")
    silent = Journal()
    base_train.note_dropped(training, silent, totals)
    base_train.note_outcome(training, silent, totals)
    wait_s = logged.get("wait_s", 0.0)
    base_train.log_step(of_run, training, silent, totals, step_s=logged["step_s"], wait_s=wait_s)


def causes(run: RunReader, step: int, process: Process) -> str:
    """What differs between the launch that took a step and this one, as the end of a sentence."""
    started = launch_of(run, step).started
    here = {"code": code_version(), "device": process.device.type, **versions(process.device)}
    differing = [
        f"{name} was {started[name]}, is {here[name]}"
        for name in CAUSES
        if started.get(name) and here.get(name) and started[name] != here[name]
    ]
    threads = run.config.get("cpu_threads")
    if process.device.type == "cpu" and threads not in (None, torch.get_num_threads()):
        differing.append(f"threads were {threads}, are {torch.get_num_threads()}")
    if not differing:
        return "; no difference of code, versions or processors is known, so the log or a file may have been edited"
    return f"; {'; '.join(differing)}"


def keep_checkpoint(run: RunReader, training: Training, folder: Path) -> Path | None:
    """Collective. Write the training as a checkpoint of a run directory. Returns its path on rank
    0."""
    snapshot = training.collect(status="running", kept=True, replayed=True)
    if snapshot is None:
        return None
    if folder != run.run_dir:
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "logs" / "cursors").mkdir(parents=True)
        config = run.config_of(run.launch_of(snapshot.step - 1))
        write_json(folder / CONFIG_NAME, config)
        shutil.copyfile(run.run_dir / DATA_MANIFEST, folder / DATA_MANIFEST)
        shutil.copytree(run.run_dir / "tokenizer", folder / "tokenizer")
    return snapshot.write(folder, f"checkpoint-{snapshot.step}")


# ---- whether one save follows from another -------------------------------------------------------


def compare(run: RunReader, first: int, last: int, process: Process, data_path: str | None) -> None:
    """Collective. ValueError unless the checkpoint of step `last` is, in every bit, what the run's
    steps make of that of step `first`."""
    begin = on_rank0(lambda: saved_at(run, first))
    end = on_rank0(lambda: saved_at(run, last))
    assert end is not None
    with replayed(run, begin, last, process, data_path) as training:
        snapshot = training.collect()

    def judge() -> None:
        assert snapshot is not None
        if snapshot.cursors != end.cursors:
            raise ValueError(f"{end.path}: its cursors do not follow from step {first}")
        # the same weights in another shape of model are another model
        shape = json.loads(json.dumps(snapshot.model_config))
        if any(shape.get(name) != value for name, value in end.model_config.items()):
            raise ValueError(
                f"{end.path / MODEL_CONFIG_NAME}: it does not follow from the run's settings"
            )
        for name in (MODEL_NAME, OPTIMIZER_NAME):
            place = first_difference(snapshot.states[name], end.load(name))
            if place is not None:
                raise ValueError(
                    f"{end.path / name}: it does not follow from step {first} by the run's steps; the first "
                    f"difference is in {place or 'its value'}"
                )

    on_rank0(judge)
    print0(f"replay: {end.path.name} follows from step {first:,} in every bit")


def saved_at(run: RunReader, step: int) -> Checkpoint | None:
    """The good checkpoint of a step; None for the beginning of a run, whose weights follow from its
    seed even if they were saved. ValueError or FileNotFoundError if there is none."""
    if step == 0 and run.fork is None:
        return None
    return find_checkpoint(f"{run.run_dir}@{step}")


def first_difference(a: Any, b: Any, place: str = "") -> str | None:
    """Where two plain states differ in a bit; None if they are equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return None if same and torch.equal(as_bytes(a), as_bytes(b)) else place
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return place
        for key in a:
            found = first_difference(a[key], b[key], f"{place}/{key}".lstrip("/"))
            if found is not None:
                return found
        return None
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return first_difference(dict(enumerate(a)), dict(enumerate(b)), place)
    return None if a == b else place


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaN equals NaN and 0 differs from -0."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


# ---- the command ---------------------------------------------------------------------------------


def what_to_replay(name: str, selector: str | None, check: str | None) -> tuple[int | None, int]:
    """(step to compare from, or None; last step) of a command line. ValueError if it is not
    complete."""
    if check is not None:
        first, colon, last = check.partition(":")
        if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
            raise ValueError(f"--check={check}: expected two steps, such as 1000:2000")
        return int(first), int(last)
    if selector is None or not selector.isdecimal():
        raise ValueError(f"{name}: expected RUN@STEP, such as mine@1234")
    return None, int(selector)


def main(argv: Sequence[str] | None = None) -> int:
    """Replay a step and keep its checkpoint. ValueError and OSError for a step that cannot be
    replayed."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN@STEP", help="a run's name or folder, and a step")
    parser.add_argument(
        "--check",
        metavar="A:B",
        help="compare every bit of the checkpoint of step B with a replay from that of step A (0: new weights)",
    )
    add_data_path(parser)
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="new folder for the checkpoint (default: the run's own)",
    )
    args = parser.parse_args(argv)
    setup_logging()
    run_dir, selector = find_run_at(args.run)
    run = RunReader(run_dir)
    first, step = what_to_replay(args.run, selector, args.check)
    check_step(run_dir, step)
    if args.out is not None and args.out.exists():
        raise ValueError(f"--out={args.out}: it exists; name a new folder")
    device_type = (run.launches[-1].started.get("device") if run.launches else "") or ""
    deterministic = bool(run.config.get("deterministic", True))
    _, rank, _, world_size, device = compute_init(
        device_type or autodetect_device_type(), deterministic=deterministic
    )
    try:
        process = Process(rank, world_size, device)
        if first is not None:
            compare(run, first, step, process, args.data_path)
            return 0
        checkpoint = on_rank0(lambda: nearest_save(run, step))
        with replayed(run, checkpoint, step, process, args.data_path) as training:
            path = keep_checkpoint(run, training, args.out or run_dir)
        print0(f"replay: every step has the digest and the loss of the log; {path}")
    finally:
        compute_cleanup()
    return 0


if __name__ == "__main__":
    run_main(main)
