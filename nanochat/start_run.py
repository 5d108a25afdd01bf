"""
How a run starts or resumes: the path from the command line to the first step.

    flags
      |
    Guard ---------- lock the run (nanochat/run_guard.py)                                rank 0
      |                being trained        refuse, and name the process that trains it
      |
    command -------- add this machine's tokenizer, processes, device                     every rank
      |
    inspect_run ---- find the existing run and its newest good checkpoint, and resolve   rank 0,
      |              automatic settings: lanes, leaves, steps, batch                     broadcast
      |                no run yet           a new run, from step 0 or from another run's weights
      |                unfinished           refuse changed settings; newest good checkpoint, or step 0
      |                completed, halted    print that; change nothing
      |
    find_data ------ pin the files or compare them with the pinned ones, open them       rank 0, then
      |                                                                                  every rank
      |
    begin_run ------ make the plan, sign the run, clean up, write config.json,           rank 0
                     tokenizer/, data_manifest.json, plan.json

`inspect_run` returns a `Start`, whose settings alone count afterwards, and `find_data` a `Run`:
the same with its data. Everything before `begin_run` writes nothing into the run (text may be
prepared below the base directory), so a refused command leaves no trace in it. scripts.validate
runs everything but the guard and `begin_run`.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanochat.attention import activate_kernel, check_mode
from nanochat.checkpoint import (
    Checkpoint,
    adopt,
    find_checkpoint,
    first_good,
    list_checkpoints,
    load_checkpoint,
)
from nanochat.cli import EXIT_HALTED
from nanochat.common import (
    AnyPath,
    Remote,
    as_path,
    begin_launch,
    check_stop,
    counted,
    is_remote,
    open_door,
    print0,
    write_json,
)
from nanochat.config import Notice, Settings, resume_settings
from nanochat.core_eval import read_bundle
from nanochat.dist import (
    PER_MACHINE,
    check_all_equal,
    get_compute_dtype,
    on_all_ranks,
    on_rank0,
    other_processors,
    versions,
)
from nanochat.files import OWN_TOKENIZER, data_at, default_data_path, list_files, paths_in
from nanochat.fork import (
    Parent,
    branch_off,
    continue_cursors,
    files_of_fork,
    find_parent,
    first_checkpoint,
    note_length,
    rate_jump,
)
from nanochat.pins import DATA_MANIFEST, Manifests, bare, leave_out, read_manifests
from nanochat.plan_report import print_passes, readings_text, rehearse
from nanochat.run_dir import (
    CONFIG_NAME,
    PLAN_NAME,
    config_at,
    find_run_at,
    is_run_dir,
    keep_cursors,
    new_run_path,
    newest_events,
    open_folders,
    pack_cursors,
    read_config,
    run_path,
)
from nanochat.run_guard import Guard
from nanochat.run_order import order_of, stream_config
from nanochat.run_settings import build_model as build_model  # forks import it from here
from nanochat.run_settings import derive, device_memory, resolve
from nanochat.run_settings import estimate_memory as estimate_memory
from nanochat.schedule import Horizon, HorizonSettings
from nanochat.sources import RunData, check_files, open_data, warn_of_arrivals
from nanochat.steps import Progress
from nanochat.stream import open_stream
from nanochat.tokenizer import (
    JSON_FILE,
    Tokenizer,
    default_tokenizer,
    get_tokenizer,
    read_description,
)

EXTEND = "raise --num-iterations (if its curriculum ends there: give its last phase more tokens)"


class Over(NamedTuple):
    """Why a command does nothing: its run has ended."""

    exit_code: int
    sentence: str


@dataclass(frozen=True)
class Start:
    """How a run starts or resumes."""

    run_dir: Path
    settings: Settings  # resolved
    horizon: Horizon
    config: dict[str, Any]  # the content of the run's config.json, {} for a new run
    checkpoint: Checkpoint | None  # the run's own; None for step 0
    # of another run: the one that --init-from names, for a new run at step 0
    origin: Checkpoint | None
    # the run that --fork-from names, if this one has no checkpoint of its own yet
    parent: Parent | None
    # the rates of the parent's last step and of the first one, if they more than double
    rate_jump: tuple[float, float] | None
    # where the data continues, None for the beginning of the data
    cursors: list[dict[str, Any]] | None
    notices: Mapping[str, Notice]  # {changed setting: what to say of it}
    manifests: Manifests  # the files of a new run with --order=lanes, else {}
    # newest event of each name; "completed" only if the last launch logged it
    events: dict[str, dict[str, Any]]

    @property
    def step(self) -> int:
        """Number of steps done."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def skip(self) -> int:
        """Number of steps whose rows `find_data` skips."""
        begins = self.checkpoint is None or self.parent is not None
        return self.settings.skip_steps if begins else 0

    @property
    def steps_to_read(self) -> int:
        """Number of steps whose rows this launch and later ones read: those to skip, and those to
        take."""
        return self.skip + self.horizon.num_iterations - self.step

    @property
    def wandb_id(self) -> str | None:
        """The id of the run's wandb run, if it has one."""
        return self.logged_wandb_id or self.seal.get("wandb_id")

    @property
    def logged_wandb_id(self) -> str | None:
        return self.events.get("wandb", {}).get("id")

    def first_progress(self) -> Progress:
        """The progress at the first step of this launch."""
        progress = Progress(**self.seal.get("progress", {}))
        val = self.logged("val")  # measured after the save
        if val is not None and val.get("bpb") is not None:
            progress.record_val(val["bpb"])
        return progress

    @property
    def seal(self) -> dict[str, Any]:
        """The seal of the checkpoint; {} at step 0."""
        return {} if self.checkpoint is None else self.checkpoint.seal

    def logged(self, event: str) -> dict[str, Any] | None:
        """The newest event with this name, if it was logged at the step where this launch
        begins."""
        record = self.events.get(event)
        return record if record is not None and record["step"] == self.step else None

    def over(self) -> Over | None:
        """None for a run that can continue, such as one that was killed in its last evaluation,
        after its final checkpoint."""
        status, where = self.seal.get("status"), self.checkpoint and self.checkpoint.path
        ended = "completed" in self.events or "started" not in self.events
        if status == "completed" and self.step >= self.horizon.num_iterations and ended:
            done = f"completed after {counted(self.step, 'step')} ({where})"
            return Over(
                0,
                f"{self.run_dir}: {done}, nothing to do; to train further, {EXTEND}; to start another run, use "
                f"--model-tag=NAME, and for one with these weights --init-from={self.run_dir.name} --model-tag=NAME",
            )
        allowed = self.settings.allow_bucket_exhaustion and not self.seal.get("all_dry")
        if status == "halted" and not allowed:
            remedy = after_halt(self.run_dir.name, all_dry=self.seal.get("all_dry", False))
            return Over(
                EXIT_HALTED,
                f"{self.run_dir}: halted ({where}): {self.seal['halted']}; {remedy}",
            )
        return None


@dataclass(frozen=True)
class Run(Start):
    """A run, as one launch of it finds it. Never changes."""

    data: RunData


# ---- the command on this machine -----------------------------------------------------------------


def complete_settings(
    settings: Settings, world_size: int, device_type: str
) -> tuple[Settings, Tokenizer]:
    """(settings, tokenizer): the settings of a command line, completed with those that follow from
    this machine. ValueError and FileNotFoundError for settings that cannot work here."""
    begin_launch(settings.data_cache)
    # on another machine than rank 0's, the run may not exist; rank 0 reports what is wrong with it
    with contextlib.suppress(OSError, ValueError):
        if (of_run := _run_that_pins(settings)) is not None:
            remember_pins(of_run)
    data_path = os.path.expanduser(as_path(settings.data_path or default_data_path()))
    tokenizer = find_tokenizer(settings, data_path)
    if settings.data_format == "text" or settings.core_metric_every > 0:
        tokenizer.encode("")  # an error now, not hours later, if the tokenizer knows only ids
    dtype = get_compute_dtype(torch.device(device_type), settings.dtype)
    check_mode(settings.attention_mode, device_type, dtype, settings.head_dim)
    if (
        dtype == torch.bfloat16
        and device_type == "cuda"
        and torch.cuda.get_device_capability() < (8, 0)
    ):
        raise ValueError(
            f"--dtype=bfloat16: needs compute capability 8.0 or higher, which "
            f"{torch.cuda.get_device_name()} does not have; remove it"
        )
    if settings.fp8 and device_type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise ValueError(
            f"--fp8: needs compute capability 8.9 or higher, which {torch.cuda.get_device_name()} does "
            "not have; remove it"
        )
    activate_kernel(settings.attention_kernel, device_type, deterministic=settings.deterministic)
    for sink in settings.sinks.values():
        open_door(sink).check()
    new_run_path(settings.tag)  # ValueError for an invalid name
    return replace(
        settings,
        data_path=data_path,
        model_tag=settings.tag,
        vocab_size=tokenizer.get_vocab_size(),
        tokenizer_fingerprint=tokenizer.fingerprint,
        world_size=world_size,
        device_type=device_type,
        cpu_threads=torch.get_num_threads() if device_type == "cpu" else None,
    ), tokenizer


def _run_that_pins(settings: Settings) -> Path | None:
    """The run whose files a command reads: its own, or before that has pinned any, the one that
    --fork-from names. None for a new run."""
    own = run_path(settings.tag)
    if settings.resume != "scratch" and (own / DATA_MANIFEST).exists():
        return own
    return find_run_at(settings.fork_from)[0] if settings.fork_from else None


def remember_pins(run_dir: Path) -> None:
    """Take the names that a run gave its remote data for the states that it pinned, for the rest of
    this launch. A resume or fork then neither reads a newer state, nor asks which one is the newest.
    Raises the errors of `read_manifests` and `config_at`."""
    named: dict[str, Any] = {}
    for split, buckets in read_manifests(run_dir / DATA_MANIFEST).items():
        for root in {manifest["root"] for manifest in buckets.values()}:
            if not is_remote(root):
                continue
            named = named or config_at(run_dir, math.inf)
            val_path = named.get("val_path") if split == "val" else None
            for path in map(as_path, paths_in(val_path or named["data_path"])):
                if isinstance(path, Remote):
                    path.remember(root)


def find_tokenizer(settings: Settings, data_path: str) -> Tokenizer:
    """The tokenizer that the settings name; by default the data's (`default_tokenizer`). It is the
    run's own copy if the data has moved, perhaps with its tokenizer, or if a mirror has brought the
    run to an empty machine. A fork begins with its parent's. ValueError or FileNotFoundError if none
    exists."""
    if settings.tokenizer is not None:
        return get_tokenizer(settings.tokenizer, eod_token=settings.eod_token)
    of_run = None
    with contextlib.suppress(OSError, ValueError):  # another check says what is wrong with its name
        of_run = _run_that_pins(settings)
    of_data = default_tokenizer(data_path)
    data_has_one = (of_data / JSON_FILE).is_file()
    if of_run is not None and (of_run / OWN_TOKENIZER).is_file():
        begins_fork = of_run != run_path(settings.tag)
        if begins_fork or not data_has_one or not data_at(data_path).home.exists():
            return get_tokenizer(of_run / "tokenizer", eod_token=settings.eod_token)
    if not data_has_one and settings.data_path:
        # a mistake in the path is named before advice that would repeat it
        list_files(data_at(data_path), settings.data_format)
        if settings.data_format != "text":
            raise FileNotFoundError(
                f"{data_path}: no tokenizer in it; set --tokenizer to the one that its token files were "
                f"made with, or to ids:SIZE:EOD_ID if that is lost"
            )
    return get_tokenizer(
        of_data if data_has_one else None,
        eod_token=settings.eod_token,
        data_path=data_path if settings.data_path else None,
    )


# ---- the existing run ----------------------------------------------------------------------------


def check_own_tokenizer(run_dir: Path, fingerprint: str) -> None:
    """ValueError if a run's own folder holds another tokenizer than that of its settings, which has
    this `fingerprint` ("" if they are older and do not say). A folder without one passes."""
    folder = run_dir / "tokenizer"
    found = read_description(folder)
    if fingerprint and found is not None and found["fingerprint"] != fingerprint:
        raise ValueError(
            f"{folder}: holds the tokenizer {found['fingerprint']}, but this run trains with "
            f"{fingerprint}; put the run's tokenizer/ back"
        )


def inspect_run(settings: Settings, device: torch.device, named: Collection[str] = ()) -> Start:
    """Collective. Find out how a command's run starts or resumes, without changing anything.
    `named`: the settings that the command names. ValueError if a fixed setting changed, if a run
    exists and --resume=scratch lacks --force, or if another launch trains the run."""
    run_dir = run_path(settings.tag)
    # every node has its own command line, tokenizer and PyTorch
    shared = {name: value for name, value in versions(device).items() if name not in PER_MACHINE}
    check_all_equal({**settings.to_json(), **shared})
    for difference in other_processors():
        print0(
            f"note: {difference}; the data is the same, but bits depend on which rank computes what "
            f"(docs/exactness.md tells how to give all the same instructions)"
        )
    at_rank0 = on_rank0(lambda: is_run_dir(run_dir))

    def check_shared() -> None:
        if is_run_dir(run_dir) and not at_rank0 and settings.resume != "scratch":
            raise ValueError(
                f"{run_dir}: the run is on this machine, but not on rank 0's; share the directory between "
                f"the machines, give this machine --node-rank=0, or start over with --resume=scratch"
            )

    on_all_ranks(check_shared)
    return on_rank0(lambda: _inspect(run_dir, settings, device, named))


def _inspect(
    run_dir: Path, settings: Settings, device: torch.device, named: Collection[str]
) -> Start:
    """Rank 0's part of `inspect_run`."""
    exists = is_run_dir(run_dir)
    scratch = settings.resume == "scratch"
    if exists and scratch and not settings.force:
        raise ValueError(
            f"--resume=scratch: {run_dir} already holds a run; add --force to rename it, or name a new "
            f"run with --model-tag"
        )
    if settings.core_metric_every > 0:  # a missing bundle is an error now, not hours later
        read_bundle(max_per_task=settings.core_metric_max_per_task)

    # what it continues: itself, other weights, or a fork's parent
    config = dict[str, Any]()
    notices: Mapping[str, Notice] = {}
    if exists and not scratch:
        config, settings, notices = _resumed(run_dir, settings, named)
    checkpoint = None if scratch else _own_checkpoint(run_dir, settings.resume)
    origin = parent = jump = None
    if checkpoint is None:
        if settings.init_from is not None:
            origin = find_origin(settings.init_from, config.get("origin"))
        if settings.fork_from is not None:
            parent = find_parent(settings.fork_from)
            settings = branch_off(settings, parent)

    # what follows from its settings and its data
    order = order_of(settings)
    is_new = not config and parent is None
    manifests = order.pin(settings) if is_new and order.feeds_lanes else {}
    settings, horizon, model_config = resolve(
        settings,
        get_compute_dtype(device, settings.dtype),
        device_memory(device, settings.world_size),
        manifests.get("train"),
    )
    if parent is not None:
        settings = note_length(settings, parent, horizon.num_iterations)
        checkpoint = first_checkpoint(parent, settings, model_config)
        jump = rate_jump(settings, parent, checkpoint, horizon)
    _check_length(settings, horizon, checkpoint)
    loaded = checkpoint or origin
    if loaded is not None:
        loaded.check_tokenizer(settings.tokenizer_fingerprint)
        loaded.check_architecture(vars(model_config))
    start = Start(
        run_dir=run_dir,
        settings=settings,
        horizon=horizon,
        config=config,
        checkpoint=checkpoint,
        origin=origin,
        parent=parent,
        rate_jump=jump,
        cursors=None if checkpoint is None else checkpoint.cursors,
        notices=notices,
        manifests=manifests,
        events=newest_events(run_dir, checkpoint.step if checkpoint else 0) if config else {},
    )
    return replace(
        start, settings=order.settle(settings, horizon, start.cursors, start.steps_to_read)
    )


def _resumed(
    run_dir: Path, settings: Settings, named: Collection[str]
) -> tuple[dict[str, Any], Settings, Mapping[str, Notice]]:
    """(config.json of an existing run, settings of a command that resumes it, what to say of those
    that it has changed)."""
    config = read_config(run_dir)
    newest = config_at(run_dir, math.inf)
    first = Settings.from_json(config, run_dir / CONFIG_NAME)
    check_own_tokenizer(run_dir, first.tokenizer_fingerprint)
    settings = keep_length(run_dir, settings, config, newest, named)
    settings, notices = resume_settings(config, settings, run_dir=run_dir, newest=newest)
    return config, settings, notices


def keep_length(
    run_dir: Path,
    settings: Settings,
    config: Mapping[str, Any],
    newest: Mapping[str, Any],
    named: Collection[str],
) -> Settings:
    """The settings with the length that the newest launch of the run in `run_dir` had, if the command names
    none: a rerun must not train a short run on to the default length, nor to that of its first
    launch, which its config.json (`config`) has. The last phase of a curriculum decides the length,
    too, so the run's own curriculum becomes the newest one."""
    path = run_dir / CONFIG_NAME
    first = Settings.from_json(config, path)
    last = Settings.from_json(newest, path)
    kept = dict[str, Any]()
    lengths = {f.name: f.default for f in fields(HorizonSettings)}
    is_named = any(name in named for name in lengths)
    for name, default in lengths.items():  # or an edited copy of config.json names one
        is_named = is_named or getattr(settings, name) not in (default, getattr(first, name))
    if not is_named:
        kept = {name: getattr(last, name) for name in lengths}
    if "curriculum" not in named and settings.curriculum == first.curriculum:
        kept["curriculum"] = last.curriculum
    return replace(settings, **kept)


def _check_length(settings: Settings, horizon: Horizon, checkpoint: Checkpoint | None) -> None:
    """ValueError if an unfinished run has taken more steps than it should, or if a finished one cannot
    take more."""
    if checkpoint is not None and checkpoint.step < horizon.num_iterations:
        checkpoint.check_trained()
    if checkpoint is None or checkpoint.seal.get("status") == "completed":
        return
    if checkpoint.step > horizon.num_iterations:
        raise ValueError(
            f"{settings.tag}: it has taken {checkpoint.step:,} steps, but this command ends it after "
            f"{horizon.num_iterations:,}; {EXTEND}, or end a fork of an earlier step "
            f"there (--fork-from={settings.tag}@STEP --model-tag=NAME)"
        )


def _own_checkpoint(run_dir: Path, resume: str) -> Checkpoint | None:
    """The checkpoint of the run that --resume names. ValueError if it belongs to another run."""
    if resume == "auto":
        return _newest_checkpoint(run_dir)
    checkpoint = find_checkpoint(resume)
    # None: a copy outside its run; run_dir may be a link
    own_names = (None, run_dir.name, run_dir.resolve().name)
    if describe_origin(checkpoint)["run"] not in own_names:
        raise ValueError(
            f"--resume={resume}: the checkpoint does not belong to {run_dir}; to start a new run from "
            f"it, use --init-from={resume}"
        )
    return checkpoint


def _newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest good checkpoint of a run, or None if it has never saved one. ValueError if it has
    saved some and none can be used: a run never starts over by itself, because its first save would
    overwrite what can be repaired."""
    remedy = (
        "restore a checkpoint and run the same command again, or start over with --resume=scratch --force, which "
        "renames this run"
    )
    paths = list_checkpoints(run_dir)
    saved = newest_events(run_dir, math.inf).get("saved")
    if not paths and saved is not None:
        raise ValueError(
            f"{run_dir / 'checkpoints'}: no checkpoint, but this run has saved {saved['checkpoint']}; "
            f"{remedy}"
        )
    try:
        return first_good(paths)
    except ValueError as e:
        raise ValueError(f"{run_dir}: {e}; {remedy}") from e


def find_origin(init_from: str, known: dict[str, Any] | None) -> Checkpoint:
    """The checkpoint that --init-from names. If this run has begun, `known` describes the
    checkpoint that it began with; ValueError if that checkpoint no longer exists."""
    checkpoint = find_checkpoint(init_from)
    # no longer the newest
    if known is not None and known["checksum"] != checkpoint.seal["checksum"]:
        checkpoint = load_checkpoint(checkpoint.path.with_name(known["checkpoint"]))
        if known["checksum"] != checkpoint.seal["checksum"]:
            raise ValueError(
                f"--init-from={init_from}: this run began with step {known['step']} of {known['run']}, "
                f"but {checkpoint.path} is now a different checkpoint; restore the old one, or start a "
                f"new run with --model-tag=NAME"
            )
    return checkpoint


def describe_origin(checkpoint: Checkpoint) -> dict[str, Any]:
    """The origin of a new run's weights, for its config.json. "run" is None if the checkpoint is
    outside a run directory."""
    folder = checkpoint.path.absolute().parent
    inside = folder.name == "checkpoints" and is_run_dir(folder.parent)
    return {
        "run": folder.parent.name if inside else None,
        "checkpoint": checkpoint.path.name,
        "step": checkpoint.step,
        "checksum": checkpoint.seal["checksum"],
    }


# ---- data ----------------------------------------------------------------------------------------


class Folders(NamedTuple):
    """The folders of a run's files, for `check_files`. None: where they are pinned; for validation
    files that were pinned with the training files, where those are now."""

    train: AnyPath | None
    val: AnyPath | None


def find_folders(run_dir: Path, data_path: str | None, val_path: str | None = None) -> Folders:
    """The folders in which the files of a run are now: those that `data_path` and `val_path` name,
    otherwise those of its pins, which each launch writes, absolute. If none of the files is there,
    it is the folder that the newest launch has named, perhaps relative. Raises the errors of
    `data_at`, `remember_pins` and `read_manifests`."""
    remember_pins(run_dir)
    newest = config_at(run_dir, math.inf)
    manifests = read_manifests(run_dir / DATA_MANIFEST)
    folders: dict[str, AnyPath | None] = {}
    for split, given, recorded in (
        ("train", data_path, newest.get("data_path")),
        ("val", val_path, newest.get("val_path")),
    ):
        roots = {manifest["root"] for manifest in manifests.get(split, {}).values()}
        place = given
        if given is None and has_moved(run_dir, split):
            place = recorded
        folders[split] = None
        if place is not None:
            folders[split] = data_at(os.path.expanduser(place)).folder
        elif recorded is not None and len(roots) == 1:
            # validation files that a path of their own names stay, even if the training files moved
            folders[split] = as_path(*roots)
    return Folders(**folders)


def has_moved(run_dir: Path, split: str = "train") -> bool:
    """Whether none of a run's files for training or validation is where it was pinned. Object storage
    is not asked."""
    buckets = read_manifests(run_dir / DATA_MANIFEST).get(split, {}).values()
    places = [
        Path(manifest["root"], pin["name"]) for manifest in buckets for pin in manifest["files"]
    ]
    is_local = not any(is_remote(manifest["root"]) for manifest in buckets)
    return is_local and bool(places) and not any(place.exists() for place in places)


def find_data(
    start: Start, tokenizer: Tokenizer, rank: int = 0, folders: Folders | None = None
) -> Run:
    """Collective. Rank 0 pins the files of a new run, or compares the files of an existing run with
    its pins; then every rank opens them. The run's cursors are moved past the rows to skip. `folders`:
    of the files of an existing run (default: those that its settings name). FileNotFoundError or
    ValueError names a file that is missing, changed or unusable."""
    settings = start.settings

    def pinned() -> Manifests:
        """The manifests of a new run, or those of an existing run after a check of its files."""
        if start.parent is not None or start.config:
            remember_pins(start.parent.run_dir if start.parent else start.run_dir)
        if not start.config or not (manifests := read_manifests(start.run_dir / DATA_MANIFEST)):
            if start.parent is None:
                return order_of(settings).pin(settings)
            return files_of_fork(start.parent, settings)
        if settings.without_documents is not None and as_path(settings.without_documents).is_file():
            listed = leave_out(bare(manifests["train"]), settings.without_documents)
            if listed != manifests["train"]:
                raise ValueError(
                    f"--without-documents={settings.without_documents}: the file has changed since "
                    f"this run began; restore it, or start a new run with --model-tag=NAME"
                )
        if folders is not None:
            return check_files(manifests, *folders, strict=settings.strict)
        data = data_at(settings.data_path or "")
        val = None if settings.val_path is None else data_at(settings.val_path).folder
        found = check_files(manifests, data.folder, val, strict=settings.strict)
        began = (start.run_dir / CONFIG_NAME).stat().st_mtime
        warn_of_arrivals(found, data, settings.data_format, began)
        return found

    manifests = start.manifests or on_rank0(pinned)

    def opened() -> RunData:
        """Rank 0 has compared the files; the others do so on their own machine."""
        try:
            found = check_files(manifests) if rank > 0 else manifests
        except (OSError, ValueError) as e:
            raise ValueError(
                f"{e}; every machine of a launch reads the data itself: copy or mount the same files "
                "under the same path on this machine"
            ) from e
        return open_data(found, tokenizer, as_stored=settings.packing == "binned")

    data = on_all_ranks(opened)
    cursors = on_rank0(lambda: _first_cursors(start, data))
    fields = {field.name: getattr(start, field.name) for field in dataclasses.fields(start)}
    return Run(**{**fields, "cursors": cursors}, data=data)


def _first_cursors(start: Start, data: RunData) -> list[dict[str, Any]] | None:
    """Where this launch begins to read: the cursors of all lanes, or None for the beginning of the
    data. A fork continues its parent's, and for --skip-steps, the skipped rows are packed here.
    ValueError if the data or the parent does not fit the settings."""
    settings = start.settings
    config = stream_config(start.settings)
    order_of(settings).check(settings, data.train)
    cursors = start.cursors
    if start.parent is not None:
        cursors = continue_cursors(start.parent, settings, config, data)
    if start.parent is None and start.skip == 0:
        return cursors
    stream = open_stream(  # ValueError if the cursors do not fit
        config,
        data.train,
        range(config.V),
        tokenizer=data.tokenizer.fingerprint,
        cursors=cursors,
        drop_dry=settings.allow_bucket_exhaustion,
    )
    rows = settings.total_batch_size // settings.max_seq_len // config.V
    with contextlib.closing(stream):
        for _ in range(start.skip):
            check_stop()
            if len(stream.next_rows(rows)) < rows * config.V:
                raise ValueError(
                    f"--skip-steps={start.skip}: the data ends before that; skip fewer steps"
                )
        return stream.cursors()


def open_run(
    run_dir: Path,
    data_path: str | None = None,
    val_path: str | None = None,
    *,
    step: float = math.inf,
) -> tuple[RunData, Any, Settings]:
    """(data, stream settings, resolved settings) of a run, from its directory alone. The files on
    disk are compared with their pins first. `data_path`, `val_path`: see `find_folders`. `step`: the
    settings are those of the launch that took it (default: of the newest launch). FileNotFoundError if
    the run has pinned no files."""
    settings = Settings.from_json(config_at(run_dir, step), run_dir / CONFIG_NAME)
    manifests = read_manifests(run_dir / DATA_MANIFEST)
    begin_launch(settings.data_cache)
    if not manifests:
        raise FileNotFoundError(
            f"{run_dir / DATA_MANIFEST}: missing, so this run has read no data; start it first"
        )
    manifests = check_files(manifests, *find_folders(run_dir, data_path, val_path))
    check_own_tokenizer(run_dir, settings.tokenizer_fingerprint)
    tokenizer = get_tokenizer(run_dir / "tokenizer")
    try:
        config = stream_config(settings)
    except ValueError as e:
        raise ValueError(f"{run_dir / CONFIG_NAME}: {e}") from None
    return open_data(manifests, tokenizer, as_stored=not config.framed), config, settings


def after_halt(tag: str, *, all_dry: bool) -> str:
    """What the user can do after the run `tag` has halted. all_dry: all buckets are used up, not
    just one."""
    others = (
        "" if all_dry else "use --allow-bucket-exhaustion to continue with the other buckets, or "
    )
    return (
        f"{others}start a new run with {'more data' if all_dry else 'a different curriculum'} (--model-tag=NAME "
        f"--fork-from={tag})"
    )


# ---- the first files are written -----------------------------------------------------------------


def begin_run(run: Run, guard: Guard) -> None:
    """Rank 0: make and print the plan, sign the run, and write its directory. If the plan shows
    that the run would halt: ValueError before anything is written, or a warning with --plan=warn.
    config.json holds the resolved settings and, for readers, the figures derived from them."""
    run_dir = run.run_dir
    settings = run.settings
    order = order_of(settings)
    plan = None
    # planning `binned` rows finds too-long entries now, instead of at the step that needs them
    if settings.plan != "off" and (settings.mix is not None or settings.packing == "binned"):
        print0("start: planning which rows the run reads")
        plan = rehearse(run, run.data)
    elif settings.plan != "off" and run.checkpoint is None:
        if order.has_plan:
            print_passes(run, run.data)
        else:
            readings = order.reads(settings, run.data.train, run.cursors, run.steps_to_read)
            print0(readings_text(readings))
    order.shuffle(settings, run.data.train)
    if settings.resume == "scratch" and is_run_dir(run_dir):
        guard.set_aside()
    progress = run.first_progress()
    guard.sign(
        num_iterations=run.horizon.num_iterations,
        step=run.step,
        loss=progress.corrected_loss,
        tokens=progress.tokens or None,
        skipped=progress.skipped,
        checkpoint=run.checkpoint.path.name if run.checkpoint else None,
        val_bpb=progress.val_bpb,
        val_step=run.events.get("val", {}).get("step"),
    )
    open_folders(run_dir)
    write_json(run_dir / DATA_MANIFEST, run.data.manifests)
    begins = not (run_dir / CONFIG_NAME).exists()
    # a launch that ended before this point may have left another one
    run.data.tokenizer.save(run_dir / "tokenizer", force=begins)
    if plan is not None:
        write_json(run_dir / PLAN_NAME, plan.to_json())
    if begins:
        origin = {} if run.origin is None else {"origin": describe_origin(run.origin)}
        write_json(
            run_dir / CONFIG_NAME,
            {**settings.to_json(), **origin, "derived": derive(settings, run.horizon)},
        )
    if run.parent is not None:
        assert run.checkpoint is not None and run.cursors is not None
        adopt(replace(run.checkpoint, cursors=run.cursors), run_dir)
    elif run.checkpoint is None and run.cursors is not None:
        keep_cursors(run_dir, 0, pack_cursors(0, run.cursors))
