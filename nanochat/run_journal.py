"""
The journal of a run: where each step and each event is reported.

    terminal     a printed line, and a progress bar below it
    log          logs/train.jsonl, a line of JSON per step and per event; logs/rows, the loss of every row
    state        .run_state.json, for scripts.status
    trackers     wandb, TensorBoard and others, behind the door `SINKS`

Only rank 0 has a `Journal`; on other ranks, `Silence` accepts the same calls.
"""

import contextlib
import functools
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from nanochat.common import LAUNCH, duration, open_door, print0, show
from nanochat.dist import peak_memory, reserved_memory, versions
from nanochat.run_dir import RowLosses, TrainLog
from nanochat.run_owner import RunState
from nanochat.start_run import Start
from nanochat.steps import Progress, StepTotals

# the door for what receives the logged values, too
SINKS = {"trackers": "nanochat.integrations.trackers:Trackers"}
BAR = "{desc} {percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt}{postfix}"


def check_digest(run_dir: Path, step: int, digest: str | None, expected: str | None) -> None:
    """ValueError if the batch of a step has a different digest from the one the run recorded. None:
    unknown."""
    if None not in (digest, expected) and digest != expected:
        raise ValueError(
            f"step {step}: its batch has digest {digest}, but this run recorded {expected} for it: data "
            f"or code has changed. Restore it, or start a new run (--model-tag NAME "
            f"--init-from={run_dir.name})"
        )


class Silence:
    """Accepts every call and does nothing. It replaces the journal and the state on ranks other
    than 0, and the trackers of a run that has none."""

    wandb_id: str | None = None

    def started(self, world_size: int, **record: Any) -> None: ...

    def event(self, name: str, **record: Any) -> None: ...

    def step(self, totals: StepTotals, record: dict[str, Any], line: str, **state: Any) -> None: ...

    def ending(self, reason: str) -> None: ...

    def end(self, status: str, reason: str = "") -> None: ...

    def close(self, status: str = "", reason: str = "") -> None: ...

    def lost(self) -> str:
        return ""

    refresh = lost  # a method of `RunState`

    def log(self, values: Mapping[str, Any]) -> None: ...

    def at(self, step: int) -> None: ...

    def finish(self) -> None: ...


class Sink(Protocol):
    """What receives the values of a run beside its log. nanochat/integrations/trackers.py documents
    the methods."""

    wandb_id: str | None

    def log(self, values: Mapping[str, Any]) -> None: ...
    def at(self, step: int) -> None: ...
    def finish(self) -> None: ...


class Journal:
    """On rank 0: the log of a run, its live state, the progress bar on a terminal, and its trackers
    (nanochat/integrations/trackers.py). The first launch logs the id of the wandb run at once, so
    that a resume finds it even if that launch crashes."""

    def __init__(
        self, start: Start, progress: Progress, device: torch.device, state: RunState
    ) -> None:
        self.start = start
        self.progress = progress
        self.device = device
        self.state = state
        settings = start.settings
        run_dir = start.run_dir
        step = progress.step
        path, newest = run_dir / "logs" / "train.jsonl", start.events
        self.versions = {"code": code_version(), **versions(device)}
        previous = newest.get("started", {})
        for name, value in self.versions.items():
            if value != "" and previous.get(name, value) not in ("", value):
                print0(
                    f"note: the previous launch ran {name} {previous[name]}, this one runs {value}"
                )
        # '' while this launch owns the run, else a sentence that says why it does not
        self.lost = state.owner.lost
        self.log = TrainLog(path, first_step=step, lost=self.lost)
        self.rows = RowLosses(
            run_dir,
            num_rows=settings.total_batch_size // settings.max_seq_len,
            T=settings.max_seq_len,
        )
        self.bar = tqdm(
            total=start.horizon.num_iterations,
            initial=step,
            desc=run_dir.name,
            bar_format=BAR,
            # None: disabled if stderr is not a terminal
            dynamic_ncols=True,
            leave=False,
            disable=None,
        )
        if not self.bar.disable:
            LAUNCH.aside = tqdm.external_write_mode
        logged_id = newest.get("wandb", {}).get("id")
        self.wandb_id = logged_id or start.state.get("wandb_id")
        self.val_step = newest.get("val", {}).get("step")
        self.trackers: Sink = Silence()
        if settings.trackers or settings.profiled:
            self.trackers = open_door(SINKS["trackers"])(
                settings, run_dir, wandb_id=self.wandb_id, step=step
            )
            self.wandb_id = self.trackers.wandb_id
        if self.wandb_id != logged_id:
            self.log.write(event="wandb", step=step, time=time.time(), id=self.wandb_id)

    def started(self, world_size: int, **record: Any) -> None:
        """Log the start of this launch, with a `record` of its command."""
        self.event(
            "started",
            world_size=world_size,
            device=self.device.type,
            num_iterations=self.start.horizon.num_iterations,
            **self.versions,
            **record,
        )
        self.trackers.at(self.progress.step)

    def event(self, name: str, **record: Any) -> None:
        """Log an event between two steps."""
        step = self.progress.step
        self.log.write(event=name, step=step, time=time.time(), **record)
        # trackers get the values of CORE under nanochat's names
        tracked = record if name == "core" else {f"{name}/{k}": v for k, v in record.items()}
        self.trackers.log({"step": step, **tracked})
        self.val_step = step if name == "val" else self.val_step
        saved = {"checkpoint": record["checkpoint"]} if name == "saved" else {}
        self.state.update(val_bpb=self.progress.val_bpb, val_step=self.val_step, **saved)

    def step(self, totals: StepTotals, record: dict[str, Any], line: str, **state: Any) -> None:
        """Report the step that was just counted: print `line`, write `record` to the log and the
        trackers, write the row losses in `totals` to their file, and show `state` in scripts.status
        and the bar. ValueError if the run took this step before with a different digest."""
        p, last = self.progress, self.start.horizon.num_iterations
        check_digest(
            self.start.run_dir, p.step - 1, record["digest"], self.log.digest_of(p.step - 1)
        )
        print0(f"step {p.step - 1:05d}/{last:05d} | {line}")
        if (peak := peak_memory(self.device)) is not None:
            record["peak_memory_bytes"] = peak
            record["reserved_memory_bytes"] = reserved_memory(self.device)
        self.log.write(step=p.step - 1, **record)
        self.rows.write(p.step - 1, totals.nats, totals.live)
        for_trackers = {
            k if k.startswith("total_") else f"train/{k}": v
            for k, v in record.items()
            if k != "digest"
        }
        self.trackers.log({"step": p.step - 1, **for_trackers})
        self.state.update(
            status="running", step=p.step, tokens=p.tokens, skipped=p.skipped, **state
        )
        self.bar.set_postfix_str(
            f"loss {show(state['loss'])}, bits per byte {show(p.val_bpb)} at step {show(self.val_step)}, "
            f"{show(state['tokens_per_s'])} tok/s, "
            f"eta {duration(state['eta_s'])}",
            refresh=False,
        )
        self.bar.update()
        self.trackers.at(p.step)

    def ending(self, reason: str) -> None:
        """Record that the run ends after one more save."""
        self.state.update(status="stopping", reason=reason)

    def end(self, status: str, reason: str = "") -> None:
        """Record the end of the run."""
        self.event(status, reason=reason)
        self._flush()
        self.state.close(status, reason)  # from here on, another launch may own the run

    def close(self) -> None:
        """Finish trackers, bar and log."""
        self.trackers.finish()
        LAUNCH.aside = contextlib.nullcontext
        self.bar.close()
        self._flush()
        self.log.close()

    def _flush(self) -> None:
        """Write the lines and row losses that wait for a full disk."""
        if not self.lost():
            self.log.flush()
            self.rows.flush()


@functools.cache
def code_version() -> str:
    """The commit of this code, with a "+" if files differ from it; empty outside a repository."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
        return described.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
