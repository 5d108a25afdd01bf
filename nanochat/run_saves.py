"""
When a run saves its training, and what became of each save.

    due: every --save-every steps, or after half an hour on the clock of any rank; at the steps of --save-at
      |
    Training.collect     all ranks: a copy of the state in rank 0's memory
      |
    write                rank 0, in a thread: the checkpoint, then retention; training continues
      |
    report               rank 0, in a later step: a line and an event, or the error that ends the run
"""

import contextlib
import logging
import time
from pathlib import Path

from nanochat.checkpoint import Saver, Snapshot, prune
from nanochat.common import print0
from nanochat.dist import on_rank0
from nanochat.run_guard import LONG_S, Guard
from nanochat.run_journal import Journal
from nanochat.start_run import Run
from nanochat.trainer import Training

log = logging.getLogger(__name__)

SAVE_EVERY_S = 1800.0  # with --save-every=-1: the most training time that a crash can lose


class Saves:
    """The saves of a launch; one at a time. The same on all ranks, but only rank 0 writes."""

    def __init__(self, run: Run, training: Training, guard: Guard, journal: Journal) -> None:
        self.run = run
        self.training = training
        self.guard = guard
        self.journal = journal
        self.due_by_clock = False  # on some rank, so on all: the last step's totals say so
        self._saved_at = time.monotonic()  # the last save, or the launch, on this rank's clock
        good = run.checkpoint.path if run.checkpoint else None
        self._saver = Saver(good)
        self._known = {good.name: True} if good else {}  # {name: whether it is good}, for retention

    def close(self) -> None:
        """Wait for the save in progress, and report it."""
        self._saver.close()
        with contextlib.suppress(ValueError, OSError):  # the log may be what failed
            self.settle()

    def clock_says(self) -> bool:
        """Whether a save is due according to this rank's clock, with --save-every=-1."""
        by_clock = self.run.settings.save_every < 0
        return by_clock and time.monotonic() - self._saved_at >= SAVE_EVERY_S

    def is_due(self) -> bool:
        """Whether to save before the next step; the same on all ranks."""
        step = self.training.progress.step
        every = self.run.settings.save_every
        is_kept = self.run.settings.is_kept(step)
        if step == self.run.step:
            was_loaded = self.run.checkpoint is not None
            return is_kept and not was_loaded
        return self.due_by_clock or is_kept or (every > 0 and step % every == 0)

    def save(self, name: str, status: str, *, last: bool = False, **more: object) -> None:
        """Collective. Save the training as the checkpoint `name`, in the background. With `last`,
        wait for the write; rank 0 raises OSError if it fails. `more`: further fields of the seal."""
        by_time = self.due_by_clock and not last
        self._saved_at = time.monotonic()
        self.due_by_clock = False
        self.guard.beat(self.training.progress.step, "save", LONG_S)
        # the previous one first, so that memory holds at most one copy of the state
        on_rank0(self.finish)
        began = time.perf_counter()
        if self.run.settings.is_kept(self.training.progress.step):
            more["kept"] = True
        snapshot = self.training.collect(
            status=status, by_time=by_time, wandb_id=self.journal.wandb_id, **more
        )
        if snapshot is not None:
            self._saver.start(lambda: self._write(snapshot, name), last=last)
        if last or self.run.settings.sync_save:
            on_rank0(self.finish)
        self.guard.note_work("copy", time.perf_counter() - began)

    def _write(self, snapshot: Snapshot, name: str) -> Path:
        """In the saver's thread, without any collective: write a snapshot, then delete older
        checkpoints that need not be kept. ValueError if another launch owns the run by now."""
        if lost := self.guard.lost():
            raise ValueError(lost)
        self.journal.sync()  # no checkpoint without the lines of the steps before it
        path = snapshot.write(self.run.run_dir, name)
        self._known[path.name] = True
        prune(self.run.run_dir, snapshot.step, self._known, self.run.settings)
        return path

    def report(self, *, wait: bool = False) -> Exception | None:
        """Print and log the outcome of the save in progress if it has ended; with
        `wait`, wait for its end first. Returns the error that must end the run, if any, unprinted."""
        step = self.training.progress.step
        for name, record in self.guard.mirror.news():
            self.journal.event(name, step, **record)
        outcome = self._saver.take(wait=wait)
        if outcome is None:
            return None
        self.guard.note_save(outcome.seconds)
        if outcome.path is not None:
            print0(outcome.message)
            name = outcome.path.name
            self.journal.event("saved", step, checkpoint=name, seconds=outcome.seconds)
        else:
            if outcome.fatal is None:
                log.warning("%s", outcome.message)
            self.journal.event("save_failed", step, reason=outcome.message)
        return outcome.fatal

    def settle(self) -> None:
        """Wait for the save in progress of a run that another error ends."""
        error = self.report(wait=True)
        if error is not None:
            log.warning("%s", error)

    def finish(self) -> None:
        """Wait for the save in progress. Raises the error that must end the run, if any."""
        error = self.report(wait=True)
        if error is not None:
            raise error
