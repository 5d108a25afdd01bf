"""
Retention: which checkpoints of a run go when a new one is there.

    keep_last_k=2, keep_milestone_every=400, 700 has just been written and is good

      checkpoint-  100   200   300   400   500   600   700   800(rotten)   final
                    x     x     x     M     x     L     L     ?              F
                                      milestone   the last two  newer: none of our business

The list is short because the rules are few: only a numbered checkpoint older than one that is known to be good may go;
the newest `keep_last_k` of those up to the good one stay, and so does every step that `keep_milestone_every` divides.
What this program did not write (no whole seal, or the seal of another step than the name says: a copy, a renamed one)
is never touched, nor is what is newer than the good one: it may be rotten, or a branch that a person left there.

"Known to be good" costs nothing: a checkpoint that this process wrote, fsynced and renamed, or one that it loaded with
its checksums verified. Reading each file again before a deletion was rejected: minutes of disk time a save.

Deleting is a rename to a hidden name, then the files go (nanochat/run_dir.py): a crash leaves all of a checkpoint or
nothing that counts, and the next start clears the rest away. The oldest goes first. The cursors in logs/cursors stay.
"""

import logging
from pathlib import Path

from nanochat.checkpoint import read_state
from nanochat.run_dir import CHECKPOINT_NAME, delete_checkpoint

log = logging.getLogger(__name__)


def check_retention(keep_last_k: int | None, keep_milestone_every: int | None) -> None:
    """ValueError for settings that mean nothing."""
    for flag, value in (("--keep-last-k", keep_last_k), ("--keep-milestone-every", keep_milestone_every)):
        if value is not None and value < 1:
            raise ValueError(f"{flag}: got {value}, expected at least 1, or nothing to keep all")


def expendable(steps: dict[str, int], good_step: int, *, keep_last_k: int | None, keep_milestone_every: int | None
               ) -> list[str]:
    """Which of the numbered checkpoints {name: step} may be deleted when one of step `good_step` is known to be good;
    the oldest first. `keep_last_k` None keeps all."""
    if keep_last_k is None:
        return []
    rank = sorted((step, name) for name, step in steps.items() if step <= good_step)
    return [name for step, name in rank[:-keep_last_k]
            if step < good_step and not (keep_milestone_every and step % keep_milestone_every == 0)]


def prune(run_dir: Path, *, good: Path, keep_last_k: int | None = None, keep_milestone_every: int | None = None
          ) -> list[str]:
    """Delete what `expendable` says of a run; returns the names. `good`: a checkpoint of this run that is known to be
    good, numbered or `final`. One process calls this, when it writes no checkpoint. What cannot be deleted stays, with
    a warning. Raises OSError or ValueError if `good` is not there after all: then nothing is deleted."""
    check_retention(keep_last_k, keep_milestone_every)
    if keep_last_k is None:
        return []
    good_step = read_state(good)["step"]
    doomed = expendable(own_steps(run_dir), good_step, keep_last_k=keep_last_k,
                        keep_milestone_every=keep_milestone_every)
    deleted = []
    for name in doomed:
        try:
            delete_checkpoint(run_dir / "checkpoints" / name)
            deleted.append(name)
        except OSError as e:
            log.warning("checkpoint %s could not be deleted and stays: %s", name, e)
    return deleted


def own_steps(run_dir: Path) -> dict[str, int]:
    """{name: step} of the numbered checkpoints that this program wrote under that name, whole or damaged inside."""
    found: dict[str, int] = {}
    for path in (run_dir / "checkpoints").iterdir():
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match is None or match["step"] is None or path.is_symlink():
            continue
        try:
            step = read_state(path)["step"]
        except (OSError, ValueError) as e:
            log.debug("checkpoint %s is left alone: %s", path.name, e)
            continue
        if str(step) == match["step"]:
            found[path.name] = step
    return found
