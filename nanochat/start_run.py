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
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.checkpoint import list_checkpoints, load_checkpoint, newest_good
from nanochat.common import write_json
from nanochat.curriculum import Curriculum
from nanochat.plan import Plan
from nanochat.run_data import MANIFEST_NAME, pin_data
from nanochat.run_dir import PLAN_NAME, is_run_dir, read_config, write_config
from nanochat.settings import Changes, compare_settings, inherit_settings, refuse_changes, settle_curriculum
from nanochat.sources import split_train_val
from nanochat.tokenizer import RustBPETokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """How a run goes on. `checkpoint` is None for step 0. `completed_steps`: a completed run did so many, so there is
    nothing to do unless its horizon has moved beyond them; 0 for an unfinished one. `halted`: why the run may not go
    on, and what would let it; empty if it may. `changed`: whether its curriculum is another one from now on."""

    settings: dict[str, Any]
    checkpoint: Path | None = None
    completed_steps: int = 0
    wipe: bool = False
    notices: tuple[str, ...] = ()
    halted: str = ""
    changed: bool = False


def begin(run_dir: Path, settings: dict[str, Any], *, resume: str, force: bool) -> Start:
    """Find out where the run in a run directory stands, changing nothing. For rank 0. What a crash left half renamed
    is tidied up before (`clean_stale`), so that no checkpoint found is renamed later.

    `resume` is auto (newest good checkpoint, or from the start), scratch (an error if there is a run, unless `force`
    allows to wipe it), or a checkpoint's path. Settings that are left to the program (-1) take the run's own values.
    Raises ValueError for settings that changed and may not, and for a run in the way of scratch.
    """
    exists = is_run_dir(run_dir)
    if resume == "scratch":
        if exists and not force:
            raise ValueError(f"--resume scratch: {run_dir} holds a run already; add --force to delete it, or name a "
                             f"new one with --model-tag")
        return Start(settings, wipe=exists)
    old: dict[str, Any] = {}
    if (run_dir / "config.json").exists():
        old = {k: v for k, v in read_config(run_dir).items() if k != "derived"}
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
        old["curriculum"] = state.get("curriculum", old["curriculum"])
        old, changed = settle_curriculum(old, settings)
        changes = compare_settings(old, settings)
        refuse_changes(changes, run_name=run_dir.name)
        settings = inherit_settings(old, settings)
    allowed = changed or settings["allow_bucket_exhaustion"]
    halted = state["halted"] if state.get("status") == "halted" and not allowed else ""
    return Start(settings, checkpoint, state["step"] if state.get("status") == "completed" else 0, False,
                 tuple(changes.notices()), halted, changed)


def _check_tokenizer(run_dir: Path, old: dict[str, Any], settings: dict[str, Any]) -> None:
    """ValueError unless both settings have the same tokenizer: people have no flag for fingerprints."""
    then, now = old["tokenizer_fingerprint"], settings["tokenizer_fingerprint"]
    if then != now:
        raise ValueError(f"--tokenizer-dir: the run {run_dir.name!r} was started with the tokenizer {then}, the "
                         f"command brings {now}; the run has its own copy, --tokenizer-dir {run_dir / 'tokenizer'}, "
                         f"or start a new run with --model-tag NAME")


def prepare(run_dir: Path, start: Start, settings: dict[str, Any], tokenizer: RustBPETokenizer,
            derived: dict[str, Any], plan: Plan | None = None) -> None:
    """Make the run directory, or check that its data are as they were. For rank 0. config.json, written last, holds
    the resolved settings; `derived` is what follows from them, for people."""
    if start.wipe:
        split_train_val(settings["data_path"], settings["val_path"], data_format=settings["data_format"],
                        by_bucket=settings["curriculum"] is not None)  # or keep the old
        log.warning("deleting the run in %s, as asked", run_dir)
        shutil.rmtree(run_dir)
    if not is_run_dir(run_dir):
        (run_dir / MANIFEST_NAME).unlink(missing_ok=True)  # of a start that got no further: it binds nobody
    curriculum = None if settings["curriculum"] is None else Curriculum.from_json(settings["curriculum"])
    pin_data(run_dir, settings["data_path"], settings["val_path"], data_format=settings["data_format"],
             curriculum=curriculum, strict=settings["strict"])
    tokenizer.save(run_dir / "tokenizer")
    if plan is not None:
        write_json(run_dir / PLAN_NAME, plan.to_json())
    if not (run_dir / "config.json").exists():
        write_config(run_dir, {**settings, "derived": derived})


