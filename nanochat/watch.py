"""
Watching a run: a line for people, a line of JSON for programs, and wandb for those who ask for it.

One `Watch` for each rank; only rank 0's writes. What it prints and logs of a step is made in one place, so that the two
never disagree. wandb is imported when a run has a name for it, and nothing that goes wrong in it stops training.
"""

import logging
import time
from pathlib import Path
from typing import Any

from nanochat.common import DummyWandb, print0
from nanochat.lifecycle import RunState
from nanochat.run_dir import TrainLog, iter_log
from nanochat.schedule import Schedule
from nanochat.trainer import Progress

log = logging.getLogger(__name__)


class Past:
    """What the log tells of the launches before this one.

    wandb_id: of the run's wandb run, None if it had none. given_up: the steps whose newest line, at or after
    `first_step`, is of rows that the run gave up since, for another curriculum or by skipping, and has not come to
    again: their digests are no longer the run's.
    """

    def __init__(self, path: Path, *, first_step: int):
        self.wandb_id: str | None = None
        self.given_up: set[int] = set()
        self._first_step, self._done, self._skipped = first_step, set[int](), dict[int, int]()
        for record in iter_log(path):
            self.note(record)

    def note(self, record: dict[str, Any]) -> None:
        """Take in a line of the log."""
        event, step = record.get("event"), record.get("step", -1)
        if event == "wandb":
            self.wandb_id = record["id"]
        elif event == "curriculum" or (event == "skipped" and self._skipped.get(step) != record["steps"]):
            self.given_up |= {done for done in self._done if done >= step}
            self._skipped[step] = record.get("steps", 0)
        elif event is None and step >= self._first_step:
            self._done.add(step)
            self.given_up.discard(step)


class Watch:
    """The log and the wandb run of a training run; on ranks other than 0 it does nothing.

    wandb_id: of the wandb run to go on with, None for that in the log, or else a new one; afterwards that of the run
    there is. The log has it from the first launch on, whatever becomes of that launch.
    """

    def __init__(self, run_dir: Path, progress: Progress, *, rank: int, run: str, settings: dict[str, Any],
                 wandb_id: str | None, state: RunState | None = None):
        self.progress, self.state = progress, state
        if state is not None:
            state.update(val_bpb=progress.val_bpb)
        path = run_dir / "logs" / "train.jsonl"
        self.log = TrainLog(path, first_step=progress.step) if rank == 0 else None
        self.past = Past(path, first_step=progress.step) if rank == 0 else None
        logged_id = self.past.wandb_id if self.past else None
        self.wandb = start_wandb(run, settings, run_dir, wandb_id or logged_id) if rank == 0 else DummyWandb()
        self.wandb_id = self.wandb.id or wandb_id or logged_id
        if self.log is not None and self.wandb_id != logged_id:
            self.log.write(event="wandb", step=progress.step, time=time.time(), id=self.wandb_id)

    def event(self, name: str, **record: Any) -> None:
        """Something that happened before the next step."""
        if self.past is not None:
            self.past.note({"event": name, "step": self.progress.step, **record})
        if self.log is not None:
            self.log.write(event=name, step=self.progress.step, time=time.time(), **record)
        self.wandb.log({"step": self.progress.step, **{f"{name}/{key}": value for key, value in record.items()}})
        if name == "saved" and self.state is not None:
            self.state.update(checkpoint=record["checkpoint"])
        if name == "val" and self.state is not None:
            self.state.update(val_bpb=record["bpb"])

    def check_digest(self, digest: str, *, tokens: int) -> None:
        """ValueError if the step that was just computed had another digest when this run was there before. (Not if it
        was there with other batch sizes: the counts of tokens differ; nor with rows that it gave up since.)"""
        step = self.progress.step
        if self.log is None or self.past is None or step in self.past.given_up:
            return
        logged = self.log.digest_of(step, tokens=self.progress.tokens + tokens)
        if logged not in (None, digest):
            raise ValueError(f"step {step}: its batch has digest {digest}, but had {logged} when this run was there "
                             f"before: data or code changed; go back to what it was")

    def note_dropped(self, dropped: dict[str, int]) -> None:
        """Tell, once, that lanes have dropped a bucket. `dropped`: how many lanes, of each bucket."""
        for bucket, lanes in dropped.items():
            if lanes > self.progress.dropped.get(bucket, 0):
                print0(f"warning: the bucket {bucket!r} has run dry in {lanes} lane(s), which go on with the others")
                self.event("dropped", bucket=bucket, lanes=lanes)
        self.progress.dropped = {bucket: lanes for bucket, lanes in dropped.items() if lanes}

    def step(self, schedule: Schedule, *, tokens: int, loss: float, grad_norm: float, digest: str, step_s: float,
             wait_s: float, mfu_per_rate: float, bucket_loss: dict[str, float | None], phase: int | None = None
             ) -> None:
        """Count the step that is done, print its line and log it. `mfu_per_rate`: share of the peak for 1 token/s;
        `bucket_loss`: of each bucket, where there are several; `phase`: of the curriculum, from 1."""
        p, step = self.progress, self.progress.step
        p.step += 1
        p.tokens += tokens
        p.train_time_s += step_s
        p.smooth_loss = 0.9 * p.smooth_loss + 0.1 * loss
        smooth = p.smooth_loss / (1 - 0.9**p.step)
        eta_s = (schedule.num_iterations - p.step) * p.train_time_s / p.step
        rate, lr = tokens / step_s, schedule.lr(step)
        print0(f"step {step:05d}/{schedule.num_iterations:05d} | loss {smooth:.6f} | lr {lr:.3f} | grad norm "
               f"{grad_norm:.4f} | {step_s * 1000:.1f} ms | {rate:,.0f} tok/s | mfu {100 * rate * mfu_per_rate:.1f}% | "
               f"data wait {wait_s * 1000:.1f} ms | eta {eta_s / 60:.1f} min")
        record = {"loss": loss, "smooth_loss": smooth, "lr": lr, "grad_norm": grad_norm, "step_s": step_s,
                  "wait_s": wait_s, "tokens": p.tokens, "tokens_per_s": rate, "mfu": rate * mfu_per_rate,
                  **{f"loss/{bucket}": value for bucket, value in bucket_loss.items()}}
        if self.log is not None:
            self.log.write(step=step, digest=digest, **record)
        self.wandb.log({"step": step, **{f"train/{key}": value for key, value in record.items()}})
        if self.state is not None:
            self.state.update(status="running", step=p.step, loss=smooth, tokens=p.tokens, tokens_per_s=rate,
                              eta_s=eta_s, phase=phase)

    def ending(self, status: str, reason: str) -> None:
        """The run is about to end: what is left is to save it."""
        if self.state is not None:
            self.state.update(status=status, reason=reason)

    def end(self, status: str, reason: str = "") -> None:
        """The run has ended so."""
        self.event(status, reason=reason)
        if self.state is not None:
            self.state.close(status, reason)

    def close(self) -> None:
        """Finish both."""
        self.wandb.finish()
        if self.log is not None:
            self.log.close()


class _Wandb:
    """A wandb run whose failures are told once and never stop training."""

    def __init__(self, run: Any):
        self.run, self.id = run, run.id

    def log(self, record: dict[str, Any]) -> None:
        """Send a record, if wandb still works."""
        self._try("log", record)

    def finish(self) -> None:
        """Upload what is left."""
        self._try("finish")

    def _try(self, method: str, *args: Any) -> None:
        if self.run is None:
            return
        try:
            getattr(self.run, method)(*args)
        except Exception as e:  # whatever it is, it is not worth a run
            log.warning("wandb stopped working (%s); going on without it", e)
            self.run = None


def start_wandb(name: str, settings: dict[str, Any], run_dir: Path, wandb_id: str | None) -> _Wandb | DummyWandb:
    """A wandb run, `wandb_id` again if given; a stand-in for the name 'dummy' or where wandb cannot start."""
    if name == "dummy":
        return DummyWandb()
    try:
        import wandb  # takes a second, and only here

        run = wandb.init(project="nanochat", name=name, config=settings, dir=run_dir, id=wandb_id, resume="allow")
    except Exception as e:
        log.warning("wandb could not start (%s); going on without it", e)
        return DummyWandb()
    return _Wandb(run)
