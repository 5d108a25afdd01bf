"""
What a launch prints before its first step, and when it runs out of memory.
"""

import contextlib
import logging
import os
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from nanochat.checkpoint import list_checkpoints
from nanochat.common import (
    Remote,
    as_path,
    counted,
    few,
    get_dist_info,
    is_remote,
    print0,
    show,
)
from nanochat.config import flag
from nanochat.dataloader import StepLayout
from nanochat.dist import peak_memory, write_memory
from nanochat.files import FORMATS, data_at, paths_in
from nanochat.fork import describe_fork
from nanochat.pins import Manifest, not_searched
from nanochat.run_dir import CONFIG_NAME, Fork, but_resume, mix_text
from nanochat.run_settings import (
    build_model,
    derive,
    describe_memory,
    device_memory,
    ends_early,
    estimate_memory,
    without_effect,
)
from nanochat.schedule import Schedule
from nanochat.splits import (
    describe_split,
    files_of,
    last_file_validates,
    warn_of_trained_copies,
)
from nanochat.start_run import Run, Start

log = logging.getLogger(__name__)

WIDTH = 100  # characters of a line
COPIES = 2  # checkpoints on disk at once: the old one is deleted when the new one is complete
LOW_PEAK = 0.9  # a run whose learning rates rise to less than this share of their peak says so


def print_split(run: Run) -> None:
    """Print the validation files and the training files."""
    settings = run.settings
    train = run.data.manifests["train"]
    val = run.data.manifests["val"]
    # both splits are in the same files
    if any("documents" in manifest for manifest in val.values()):
        files = counted(sum(map(len, files_of(train).values())), ".bin file")
        print0(f"data: {files}, each with documents for training and for validation")
        return
    for line in _hub_roots(train, val):
        print0(line)
    for note in _pinned_notes(run):
        print0(f"note: {note}")
    kind = "run" if settings.fork is None else "fork"
    reads = f"this {kind} trains on {run.horizon.own_tokens:,} tokens"
    # a fork keeps the validation files of its parent, and a curriculum may leave out a bucket
    decides = not run.config and settings.fork is None and settings.val_path is None
    reads_all = val.keys() <= train.keys() or settings.mix is None
    chosen = decides and reads_all and last_file_validates(data_at(settings.data_path or ""))
    print0(
        *describe_split(
            files_of(train),
            files_of(val),
            reads=reads,
            shared=settings.val_fraction,
            chosen=chosen,
        ),
        sep="\n",
    )
    if not run.config and settings.val_fraction == 0:
        warn_of_trained_copies(run.data.manifests)
    unseen = [bucket for bucket in train if bucket not in val]
    if unseen and val.keys() & train.keys():
        print0(
            f"not evaluated: {few(unseen)} (the validation files have none of it; --val-path names others)"
        )
    _print_left_out(train, settings.without_documents)


def _hub_roots(train: Mapping[str, Manifest], val: Mapping[str, Manifest]) -> Iterator[str]:
    """The data sets on the Hub that are read, with the commit: the branch may have moved on."""
    roots = {str(manifest["root"]) for manifest in (*train.values(), *val.values())}
    for root in sorted(roots):
        if root.startswith("hf://"):
            yield f"data: {root}{_folders_in(train, root)}"


def _print_left_out(train: Mapping[str, Manifest], listed: str | None) -> None:
    """Print how many documents --without-documents (`listed`) leaves out. A warning names the files
    that were not searched for its list."""
    left_out = [manifest.get("without", {}) for manifest in train.values()]
    rows = [rows for without in left_out for rows in without.values()]
    if rows:
        number = sum(len(of_file) for of_file in rows if of_file is not None)
        whole = rows.count(None)
        files = f" and {counted(whole, 'whole file')}" if whole else ""
        print0(f"left out: {counted(number, 'document')}{files} (--without-documents)")
    unsearched = not_searched(train, listed) if listed is not None else []
    if unsearched:
        files = counted(len(unsearched), "training file")
        log.warning(
            f"--without-documents={listed}: {files} not searched for it: {few(unsearched)}; to leave out "
            f"documents of all files, make a new list with scripts.validate --decontaminate"
        )


def _pinned_notes(run: Run) -> Iterator[str]:
    """Which commit is read where a command names a branch, which may have moved on: for a fork, and
    for a resume that names the data in another way than the run did."""
    settings = run.settings
    fork = Fork.of(settings.fork)
    is_kept = run.parent is not None and fork is not None and "data_path" not in fork.changes
    is_named_anew = run.config and run.config.get("data_path") != settings.data_path
    if not is_kept and not is_named_anew:
        return
    roots = {str(manifest["root"]) for manifest in run.data.manifests["train"].values()}
    for path in paths_in(settings.data_path or ""):
        place = as_path(path)
        state = place.resolve()
        is_branch = isinstance(state, Remote) and state.is_fixed() and state != place
        if is_branch and any(state.is_relative_to(root) for root in roots):
            yield f"{path} is read as {state}, which is pinned; a fork can read another one, named as @COMMIT"


def _folders_in(manifests: Mapping[str, Manifest], root: str) -> str:
    """How many files are read from each folder below a root, if there are several: folders of a
    data set on the Hub may hold the same documents."""
    files = [
        file["name"]
        for manifest in manifests.values()
        if str(manifest["root"]) == root
        for file in manifest["files"]
    ]
    folders = Counter(PurePosixPath(name).parts[0] for name in files if "/" in name)
    if len(folders) < 2:
        return ""
    named = [f"{folder} ({counted(number, 'file')})" for folder, number in folders.items()]
    return f", from {len(folders)} folders together: {few(named)}"


def print_summary(
    start: Start,
    layout: StepLayout,
    device: torch.device,
    typed: Sequence[str],
    named: Sequence[str] = (),
) -> None:
    """Print what is about to run: its settings, how a step is divided, and what to know about it.

    `named`: the settings that the command line or its --config file names. `typed`: those that have
    other values than the defaults, and those of a run's config.json in their place.
    """
    if start.config:
        _print_changes(start)
    else:
        _print_settings(start, typed)
    processes = counted(layout.world_size, "process")
    batches = counted(len(layout.leaves) * layout.micro_batches_per_leaf, "micro-batch")
    leaves = "1 leaf" if layout.num_leaves == 1 else f"{layout.num_leaves} leaves"
    print0(
        f"step: {layout.rows_per_step} rows of T + 1 = {start.settings.max_seq_len + 1:,} tokens (inputs and "
        f"targets overlap) from {counted(layout.V, 'lane')}; {processes} x {batches} of "
        f"{layout.device_batch_size} rows; {leaves}"
    )
    room = device_memory(device, start.settings.world_size)
    if room is not None:
        needed = describe_memory(estimate_memory(start.settings, room))
        print0(f"{needed}; {room / 1e9:,.1f} GB available")
    for note in (*settings_notes(start, named), *_notes(start, layout, device)):
        print0(f"note: {note}")
    disk = disk_room(start, list_checkpoints(start.run_dir))
    if not disk.lasts:
        print0(f"warning: the disk will be full before the run ends: {disk.needs}")
    fork = Fork.of(start.settings.fork)
    if start.parent is not None and fork is not None:
        print0(f"fork: {describe_fork(fork)}")
    elif start.checkpoint is not None:
        print0(f"resuming from {start.checkpoint.path} at step {start.step:,}")


def _print_changes(start: Start) -> None:
    """For a resume: print the settings that differ from those of the run."""
    print0(f"settings: those in {start.run_dir / CONFIG_NAME}")
    for change, effect in start.notices.values():
        print0(f"changed: {change}{effect and f' ({effect})'}")


def _print_settings(start: Start, typed: Sequence[str]) -> None:
    """For a new run: print the settings that were typed and differ from the defaults, and what
    follows from them, the data and this machine."""
    settings = start.settings.differing()
    settings.pop("fork", None)  # a line of its own says it in words
    mix = mix_text(settings.pop("curriculum", None))
    named = [f"{flag(name)}={shorten(str(settings[name]))}" for name in settings if name in typed]
    derived = {**settings, **derive(start.settings, start.horizon)}
    for name in [name for name in derived if name.startswith("params_")]:
        if name != "params_total":
            del derived[name]  # config.json has them
    found = [
        f"{name} {shorten(show(value))}" for name, value in derived.items() if name not in typed
    ]
    _print_wrapped("set", " ".join(named))
    if mix:
        print0(f"curriculum: {mix}")
    _print_wrapped("worked out", ", ".join(found))


def _print_wrapped(what: str, text: str) -> None:
    """Print a text in lines of at most WIDTH characters."""
    lines = textwrap.wrap(
        f"{what}: {text}",
        WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    print0("\n".join(lines))


def settings_notes(start: Start, named: Sequence[str]) -> Iterator[str]:
    """What may surprise somebody about the settings of a run. `named`: see `print_summary`."""
    settings = start.settings
    idle = without_effect(settings, named)
    if idle:
        yield f"without effect: {', '.join(idle)}"
    schedule = Schedule.of(settings, start.horizon.num_iterations, peak_weight_decay=0.0)
    highest = schedule.highest_lr()
    if highest < LOW_PEAK and start.step < settings.warmup_steps:
        yield (
            f"the learning rates rise to x{highest:.2f} only, because the run ends or they fall before "
            f"--warmup-steps={settings.warmup_steps} are over"
        )


def _notes(start: Start, layout: StepLayout, device: torch.device) -> Iterator[str]:
    """What may surprise somebody about this launch."""
    with contextlib.suppress(OSError):  # a system may not know its load
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if device.type == "cpu" and torch.get_num_threads() > 1 and load > cores:
            yield (
                f"the load of this machine is {load:.1f} on {counted(cores, 'core')}. Threads then wait for "
                f"each other, which can make a step ten times as long. OMP_NUM_THREADS=1 avoids that"
            )
    if but := but_resume(vars(start.settings)):
        yield f"each launch of this command begins at step {start.step:,}; the command{but} resumes the run"
    if layout.num_leaves % layout.world_size:
        yield (
            f"{layout.world_size} processes do not divide --leaves={layout.num_leaves}, which is fixed when a run "
            f"starts: same data, but results may be rounded differently than with a number that divides it"
        )
    if layout.dead_share > 0.1:
        yield padding_note(layout)
    if start.settings.depth <= 2 and start.checkpoint is None:
        yield (
            "in a model of one or two layers, the layer in the middle is the last one, so "
            "backout_lambda is worth nothing but its sign: it drifts, and when it passes 1, the logits "
            "change signs and the loss jumps; --depth=3 or more avoids that"
        )
    mix = start.settings.mix
    if (
        mix is not None
        and not mix.allow_budget_mismatch
        and ends_early(start.settings, start.horizon)
    ):
        yield (
            f"the run ends at token {start.horizon.total_tokens:,}, before its curriculum does "
            f"({start.settings.curriculum_end:,}); --num-iterations=-1 trains to its end"
        )
    if start.rate_jump is not None:
        before, after = start.rate_jump
        yield (
            f"the learning rates rise at once, from x{before:.3f} in the parent's last step to x{after:.3f}. "
            f"Phases and --warmdown-steps decide where they fall; to begin with a warmup, use "
            f"--init-from={start.settings.fork_from}"
        )
    are_token_files = FORMATS.get(start.settings.data_format) == (".bin",)
    if are_token_files and not is_remote(start.settings.data_path or ""):
        yield (
            "token files are read through memory maps. If SIGBUS kills this process, a file was truncated: "
            "the next launch names it"
        )


class DiskRoom(NamedTuple):
    """Whether the checkpoints of a run fit on its disk."""

    begins: bool  # whether the first ones do
    lasts: bool  # whether all that the run keeps do
    needs: str  # what is free and what it takes, in words


def disk_room(start: Start, here: Sequence[Path]) -> DiskRoom:
    """What the checkpoints of a run take of its disk, beside those of its own that are `here`."""
    weights = sum(p.numel() for p in build_model(start.settings).parameters())
    num_bytes = 3 * 4 * weights  # float32, and two more float32 per weight in the optimizer
    folder = next(p for p in (start.run_dir, *start.run_dir.parents) if p.exists())
    free = shutil.disk_usage(folder).free
    fork = Fork.of(start.settings.fork)
    end = start.horizon.num_iterations
    number = start.settings.number_kept(end, fork_step=fork.step if fork else None)
    more = max(1, number + 1 - len(here))
    needs = (
        f"{size_text(free)} free in {folder}, a checkpoint takes about {size_text(num_bytes)}, the run "
        f"keeps {number:,}"
    )
    return DiskRoom(
        begins=free >= min(COPIES, more) * num_bytes,
        lasts=free > more * num_bytes,
        needs=needs,
    )


def size_text(num_bytes: int) -> str:
    """1.2 GB, 34.0 MB."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def padding_note(layout: StepLayout) -> str:
    """How much of a step is padding, and the --device-batch-size with the least of it."""
    return (
        f"{layout.dead_share:.0%} of the computed rows are padding; a --device-batch-size that divides "
        f"{layout.rows_of_longest_leaf}, the most rows of a leaf or process, has the least of it"
    )


def shorten(text: str) -> str:
    """A text for a line. A list of hundreds of paths is cut."""
    return text if len(text) < 2000 else f"{text[:300]} ... ({len(text):,} characters)"


@contextlib.contextmanager
def explain_out_of_memory(start: Start, device: torch.device) -> Iterator[None]:
    """Context manager: running out of GPU memory becomes a ValueError with the estimate, the peak
    and the settings to change."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        settings = start.settings
        snapshot = write_memory(start.run_dir, get_dist_info()[1])
        room = device_memory(device, settings.world_size)
        estimate = sum(estimate_memory(settings, room).values())
        peak = peak_memory(device) or 0
        raise ValueError(
            f"out of GPU memory: the estimate was {estimate / 1e9:,.1f} GB, the peak {peak / 1e9:,.1f} GB. Lower "
            f"--device-batch-size (now {settings.device_batch_size}), or add --activation-checkpointing, and run the "
            f"command again{but_resume(vars(settings))} ({str(e).partition(chr(10))[0][:200]}){snapshot}"
        ) from e
