"""
How a run begins or goes on.

    begin      no RUN yet           a new run, from step 0 or from another run's weights
               RUN, unfinished      refuse changed settings; newest good checkpoint, or step 0
               RUN, completed       say so; nothing changes
               RUN, halted          say why; go on only where what halted it is allowed now
               RUN, being trained   refuse, naming who does
    prepare    become the owner, tidy up, write config.json, tokenizer/, data_manifest.json, plan.json

`begin` only looks, so that a command that is refused leaves no trace. Both run on rank 0 (`ranks.on_rank0`).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat.checkpoint import list_checkpoints, load_checkpoint, load_run_weights, newest_good
from nanochat.common import write_json
from nanochat.curriculum import Curriculum
from nanochat.dist import broadcast, on_rank0
from nanochat.gpt import GPTConfig
from nanochat.lifecycle import Owner, check_free, claim
from nanochat.order import StreamConfig
from nanochat.plan import Plan
from nanochat.run_data import find_data, open_data, pin_data, pinned_data, stream_config
from nanochat.run_dir import (
    PLAN_NAME,
    is_run_dir,
    iter_log,
    keep_cursors,
    open_folders,
    pack_cursors,
    read_config,
    wipe,
    write_config,
)
from nanochat.schedule import Horizon
from nanochat.settings import Changes, compare_settings, inherit_settings, refuse_changes, settle_curriculum
from nanochat.sources import Manifest, Source
from nanochat.stream import carry_on, open_stream, stream_identity
from nanochat.tokenizer import RustBPETokenizer

log = logging.getLogger(__name__)


_OTHER_ORIGIN = "put it back, or start a new run with --model-tag NAME"


@dataclass(frozen=True)
class Origin:
    """The checkpoint of another run that a new one begins with; `told` says which, in config.json."""

    path: Path
    told: dict[str, Any]


@dataclass(frozen=True)
class Start:
    """How a run goes on. `checkpoint` is None for step 0, where `origin` may be set. `completed_steps`: a completed run
    did so many, so there is nothing to do unless its horizon has moved beyond them; 0 for an unfinished one. `halted`:
    why the run may not go on, and what would let it; empty if it may. `changed`: whether its curriculum is another one
    from now on. `skips`: {step: how many steps' rows are passed over before it}, for all of the run. `looked`: whether
    the evaluation due at `step` was done before the checkpoint was saved; a stop saves at once."""

    settings: dict[str, Any]
    checkpoint: Path | None = None
    completed_steps: int = 0
    wipe: bool = False
    notices: tuple[str, ...] = ()
    halted: str = ""
    changed: bool = False
    step: int = 0
    looked: bool = False
    origin: Origin | None = None
    skips: dict[int, int] = field(default_factory=dict)
    generation: int = 0  # of the owner before, for `claim`

    @property
    def position(self) -> Path | None:
        """The checkpoint whose cursors the data goes on from, None for the beginning of the data."""
        continued = self.origin is not None and self.settings["init_data"] == "continue"
        return self.checkpoint or (self.origin.path if continued and self.origin else None)


def begin(run_dir: Path, settings: dict[str, Any], *, resume: str, force: bool) -> Start:
    """Find out where the run in a run directory stands, changing nothing.

    `resume` is auto (newest good checkpoint, or from the start), scratch (an error if there is a run, unless `force`
    allows to wipe it), or a checkpoint's path. Settings that are left to the program (-1) take the run's own values.
    Raises ValueError for settings that changed and may not, for a run in the way of scratch, and for one that another
    launch is at work on.
    """
    exists, skips = is_run_dir(run_dir), parse_skips(settings["skip_steps"])
    if settings["init_from"] is None and (settings["init_optimizer"] or settings["init_data"] != "fresh"):
        raise ValueError("--init-optimizer, --init-data: they say what else comes from another run; name it with "
                         "--init-from RUN")
    if resume == "scratch":
        if exists and not force:
            raise ValueError(f"--resume scratch: {run_dir} holds a run already; add --force to delete it, or name a "
                             f"new one with --model-tag")
        generation = check_free(run_dir)
        if exists and generation == 0:
            raise ValueError(f"--resume scratch: {run_dir} looks like a run, but no launch of this program ever "
                             f"owned it, so nothing is deleted; move it away, or name a new run with --model-tag")
        return Start(settings, wipe=exists, origin=find_origin(settings), skips=skips, generation=generation)
    generation = check_free(run_dir)  # before any look: a launch that ends while it is watched may leave a newer save
    old: dict[str, Any] = {}
    if exists:
        old = read_config(run_dir)
        _check_tokenizer(run_dir, old, settings)
    checkpoint = newest_good(run_dir) if resume == "auto" else Path(resume).expanduser()
    state: dict[str, Any] = {}
    if checkpoint is not None:
        if not checkpoint.is_dir():
            there = ", ".join(path.name for path in list_checkpoints(run_dir)) or "none"
            raise FileNotFoundError(f"--resume {resume}: no such folder, expected auto, scratch or a checkpoint's "
                                    f"path; checkpoints in {run_dir / 'checkpoints'}: {there}")
        loaded = load_checkpoint(checkpoint, verify=resume != "auto")
        loaded.check_tokenizer(settings["tokenizer_fingerprint"])
        state = loaded.trainer_state
    changes, changed = Changes((), ()), False
    if old:
        theirs = {k: v for k, v in old.items() if k not in ("derived", "origin")}
        theirs.update({name: state[name] for name in ("curriculum", "total_batch_size") if name in state})
        theirs, changed = settle_curriculum(theirs, settings)
        changes = compare_settings(theirs, settings)
        refuse_changes(changes, run_name=run_dir.name)
        settings = inherit_settings(theirs, settings)
    allowed = changed or (settings["allow_bucket_exhaustion"] and not state.get("all_dry"))
    step = state.get("step", 0)
    return Start(
        settings, checkpoint, step=step, notices=tuple(changes.notices()), changed=changed,
        looked=state.get("status", "stopped") != "stopped",
        completed_steps=step if state.get("status") == "completed" else 0,
        halted=state["halted"] if state.get("status") == "halted" and not allowed else "",
        origin=find_origin(settings, old.get("origin")) if checkpoint is None else None,
        skips=_add_skips(_kept_skips(run_dir, state), skips, step), generation=generation)


def samples_taken(start: Start, settings: Mapping[str, Any], num_steps: int) -> tuple[int, int]:
    """Of a run of `num_steps` steps in Megatron's order: (samples that it will have taken in the end, those of another
    run that it goes on with included; samples that its data were shuffled for, by that run or else the same)."""
    cursors = [] if start.position is None else load_checkpoint(start.position, verify=False).cursors
    before = cursors[0] if cursors else {}
    steps = num_steps - start.step + sum(n for step, n in start.skips.items() if step >= start.step)
    needed = before.get("samples", 0) + steps * (settings["total_batch_size"] // settings["max_seq_len"])
    return needed, before.get("stream", {}).get("num_samples", needed)


def settle_samples(start: Start, settings: dict[str, Any], horizon: Horizon) -> dict[str, Any]:
    """The resolved settings with the number of samples of a run in Megatron's order: those that its steps take when it
    starts, and its own ever after; what goes on with another run's data has that one's. ValueError for a horizon that
    takes more."""
    if settings["order"] != "megatron":
        return settings
    needed, pinned = samples_taken(start, settings, horizon.num_iterations)
    number = pinned if settings["num_samples"] == -1 else settings["num_samples"]
    if needed > number:
        last = horizon.num_iterations - -(-(needed - number) * settings["max_seq_len"] // horizon.total_batch_size)
        raise ValueError(f"--num-iterations: the run would take {needed:,} samples and has {number:,}, as many as it "
                         f"asked for when it began: another number would shuffle all of Megatron's order anew; end at "
                         f"--num-iterations {last}, or start a new run with --model-tag NAME (with --order lanes runs "
                         f"can be made longer)")
    return {**settings, "num_samples": number}


def check_home(run_dir: Path, *, at_rank0: bool) -> None:
    """ValueError where this machine has the run and rank 0's has not, which would start it anew."""
    if is_run_dir(run_dir) and not at_rank0:
        raise ValueError(f"{run_dir}: the run is here, and not where rank 0 is; share the directory between the "
                         f"machines, or give this one --node-rank=0 (--resume scratch starts anew)")


def find_origin(settings: dict[str, Any], known: dict[str, Any] | None = None) -> Origin | None:
    """What --init-from names, None without it. `known`: what it was when the run began; ValueError if it changed."""
    if settings["init_from"] is None:
        return None
    checkpoint, told = load_run_weights(settings["init_from"])
    if known is not None and known["checksum"] != told["checksum"]:  # that run has gone on since
        before = checkpoint.path.with_name(known["checkpoint"])
        try:
            checkpoint, told = load_run_weights(before)
        except (OSError, ValueError) as e:
            raise ValueError(f"--init-from {settings['init_from']}: this run began with step {known['step']} of "
                             f"{known['run']}, which cannot be had any more ({e}); {_OTHER_ORIGIN}") from e
        if known["checksum"] != told["checksum"]:
            raise ValueError(f"--init-from {settings['init_from']}: this run began with step {known['step']} of "
                             f"{known['run']}, but {before} is another checkpoint now (step {told['step']}); "
                             f"{_OTHER_ORIGIN}")
    checkpoint.check_tokenizer(settings["tokenizer_fingerprint"])
    return Origin(checkpoint.path, told)


def parse_skips(texts: Sequence[str]) -> dict[int, int]:
    """{step: how many steps' rows are passed over} of some "A:B". ValueError for anything else."""
    found: dict[int, int] = {}
    for text in texts:
        first, colon, last = text.partition(":")
        if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
            raise ValueError(f"--skip-steps: got {text!r}, expected A:B, the first step whose rows are passed over "
                             f"and the first behind them")
        if int(first) in found:
            raise ValueError(f"--skip-steps {text}: two that begin at step {first}; give one")
        found[int(first)] = int(last) - int(first)
    return found


def _kept_skips(run_dir: Path, state: dict[str, Any]) -> dict[int, int]:
    """A run's skips: those of a checkpoint, and for steps behind it those of the newest launch, which may have died
    before it saved any."""
    launches = [r for r in iter_log(run_dir / "logs" / "train.jsonl") if r.get("event") == "started"]
    of_launch = dict(launches[-1].get("skips", [])) if launches else {}
    step = state.get("step", 0)
    return {**dict(state.get("skips", [])), **{first: num for first, num in of_launch.items() if first >= step}}


def _add_skips(kept: dict[int, int], asked: dict[int, int], step: int) -> dict[int, int]:
    """A run's skips with those of the command. ValueError for steps that are done already."""
    for first, num in asked.items():
        if first < step and kept.get(first) != num:
            raise ValueError(f"--skip-steps {first}:{first + num}: the run is at step {step}; go back with --resume to "
                             f"a checkpoint of step {first} or before")
    return dict(sorted({**kept, **asked}.items()))


def _check_tokenizer(run_dir: Path, old: dict[str, Any], settings: dict[str, Any]) -> None:
    """ValueError unless both settings have the same tokenizer: people have no flag for fingerprints."""
    then, now = old["tokenizer_fingerprint"], settings["tokenizer_fingerprint"]
    if then != now:
        raise ValueError(f"--tokenizer-dir: the run {run_dir.name!r} was started with the tokenizer {then}, the "
                         f"command brings {now}; the run has its own copy, --tokenizer-dir {run_dir / 'tokenizer'}, "
                         f"or start a new run with --model-tag NAME")


def prepare(run_dir: Path, start: Start, settings: dict[str, Any], tokenizer: RustBPETokenizer,
            derived: dict[str, Any], plan: Plan | None = None) -> tuple[Owner, dict[str, dict[str, Manifest]]]:
    """Own the run and make its directory, or check that its data are as they were. config.json, written last, holds
    the resolved settings; `derived` is what follows from them, for people. Returns the right to write into it, and the
    manifests of its data."""
    manifests = find_run_data(run_dir, start, settings)
    data = open_data(manifests, tokenizer, as_stored=settings["packing"] == "binned")  # what cannot be, binds nobody
    config = stream_config(settings)
    if not isinstance(config, StreamConfig):
        from nanochat.blend import open_samples

        open_samples(config, data.train)
    if start.checkpoint is None and start.position is not None:
        _check_position(start.position, data.train, settings, tokenizer)
    owner = claim(run_dir, start.generation)
    try:
        if start.wipe:
            wipe(run_dir)
        open_folders(run_dir)
        pin_data(run_dir, manifests)
        tokenizer.save(run_dir / "tokenizer")
        if plan is not None:
            write_json(run_dir / PLAN_NAME, plan.to_json())
        if not (run_dir / "config.json").exists():
            origin = {} if start.origin is None else {"origin": start.origin.told}
            write_config(run_dir, {**settings, **origin, "derived": derived})
        if start.position is not None and start.checkpoint is None:
            keep_cursors(run_dir, 0, pack_cursors(0, load_checkpoint(start.position, verify=False).cursors))
    except BaseException:
        owner.release()
        raise
    return owner, manifests


def find_run_data(run_dir: Path, start: Start, settings: Mapping[str, Any]) -> dict[str, dict[str, Manifest]]:
    """`find_data` of the run that a command stands for."""
    old = pinned_data(run_dir) if is_run_dir(run_dir) and not start.wipe else {}
    curriculum = None if settings["curriculum"] is None else Curriculum.from_json(settings["curriculum"])
    return find_data(old, settings["data_path"], settings["val_path"], data_format=settings["data_format"],
                     curriculum=curriculum, strict=settings["strict"], shares=settings["split"])


def _check_position(origin: Path, sources: dict[str, Source], settings: dict[str, Any], tokenizer: RustBPETokenizer
                    ) -> None:
    """ValueError unless the data can go on where another run's was."""
    config = stream_config(settings)
    try:
        cursors = continued(load_checkpoint(origin, verify=False).cursors, config, sources, tokenizer)
        open_stream(config, sources, range(config.V), tokenizer=tokenizer.fingerprint, cursors=cursors).close()
    except ValueError as e:
        raise ValueError(f"--init-data continue: {e}, or begin at the start of the data with --init-data fresh") from e


def continued(cursors: list[dict[str, Any]], config: Any, sources: dict[str, Source], tokenizer: RustBPETokenizer
              ) -> list[dict[str, Any]]:
    """Another run's cursors as those of a new run that goes on with its data."""
    if not isinstance(config, StreamConfig):
        return cursors
    return carry_on(cursors, stream_identity(config, sources, tokenizer.fingerprint))


def check_model(start: Start, model_config: GPTConfig) -> None:
    """ValueError with a diff if the checkpoint that a run goes on from, or begins with, is of another architecture."""
    path = start.checkpoint or (start.origin.path if start.origin else None)
    if path is not None:
        load_checkpoint(path, verify=False).check_architecture(vars(model_config))


def load_states(start: Start) -> dict[str, Any]:
    """Collective. What a run goes on with, read by rank 0 and sent to all, so that no other machine need see the files:
    {} at the very beginning; model, cursors, optimizer where they come from somewhere; progress and wandb_id of a
    checkpoint of this run. For a start that `check_model` found right."""
    found: dict[str, Any] = {}

    def read() -> None:
        """Rank 0's part."""
        path = start.checkpoint or (start.origin.path if start.origin else None)
        if path is None:
            return
        loaded = load_checkpoint(path, verify=False)
        found["model"] = loaded.model_state()
        if start.checkpoint is not None or start.settings["init_optimizer"]:
            found["optimizer"] = loaded.optimizer_state()
        if start.position is not None:
            found["cursors"] = loaded.cursors
        if start.checkpoint is not None:
            found.update(progress=loaded.trainer_state["progress"], wandb_id=loaded.trainer_state["wandb_id"])

    on_rank0(read)
    return broadcast(found)
