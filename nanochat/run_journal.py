"""
The journal of a run: passes each step and each event on to a list of sinks.

    Terminal     a printed line, and a progress bar below it
    Log          logs/train.jsonl: a line of JSON per step and per event
    Rows         logs/rows: the loss of every row
    Optional     a sink that a setting names, behind the door `sinks.SINKS`
    Mirror       a copy of all this in another place (nanochat/mirror.py); does nothing without --mirror-to
    RunState     .run_state.json, for scripts.status (nanochat/run_owner.py)

Only rank 0 has sinks; on other ranks, the list is empty. To receive the logged values elsewhere,
write a class with the methods of `Sink` that it needs, and add it to `sinks.SINKS`.
"""

import contextlib
import functools
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanochat.cli import leave_soon
from nanochat.common import Bits, duration, open_door, print0, show
from nanochat.dist import versions
from nanochat.run_dir import RowLosses, TrainLog
from nanochat.run_guard import Guard
from nanochat.run_owner import Owner
from nanochat.start_run import Run
from nanochat.steps import Sink, StepReport

log = logging.getLogger(__name__)

BAR = "{desc} {percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt}{postfix}"


class Journal:
    """Reports a run to its sinks, in their order.

    wandb_id: of the wandb run, which checkpoints store. versions: of code, packages and processors
    of this launch.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self.sinks = sinks
        self.wandb_id: str | None = None
        self.versions: dict[str, Any] = {}

    def event(self, name: str, step: int, **record: object) -> None:
        """Report an event after `step` steps, or in that step. `record`: JSON. Like all reports, it
        may raise on rank 0 alone; the watchdog then ends the others."""
        for sink in self.sinks:
            sink.event(name, step, record)

    def step(self, report: StepReport) -> None:
        """Report a step. ValueError if the run took it before with a different digest."""
        for sink in self.sinks:
            sink.step(report)

    def sync(self) -> None:
        """Make what was reported survive power loss."""
        for sink in self.sinks:
            sink.sync()

    def ending(self, reason: str) -> None:
        """Report that the run ends after one more save."""
        for sink in self.sinks:
            sink.ending(reason)

    def end(self, status: str, step: int, reason: str = "") -> None:
        """Report the end of the run."""
        self.event(status, step, reason=reason)
        for sink in self.sinks:
            sink.end(status, reason)

    def close(self) -> None:
        """Finish the sinks, whether or not the run has ended well."""
        for sink in self.sinks:
            sink.close()


def open_journal(run: Run, guard: Guard) -> Journal:
    """The journal of a launch, which owns the run; without sinks on ranks other than 0."""
    owner, state = guard.owner, guard.state
    if owner is None or state is None:
        return Journal()
    own_log = Log(run, owner)
    optional = [Optional(name, entry, run) for name, entry in run.settings.sinks.items()]
    # first the log, which refuses a step with another digest; last the state, whose end gives up the
    # run; before it the mirror, which copies what the others have written
    own = [own_log, Terminal(run), Rows(run, owner)]
    journal = Journal([*own, *optional, guard.mirror, state])
    journal.versions = {"code": code_version(), **versions(guard.device)}
    note_other_versions(run, journal.versions)
    # the first launch logs the id of the wandb run at once, so that a resume finds it after a crash
    journal.wandb_id = run.wandb_id
    for sink in optional:
        journal.wandb_id = sink.wandb_id or journal.wandb_id
    if journal.wandb_id != run.logged_wandb_id:
        own_log.event("wandb", run.step, {"id": journal.wandb_id})
    return journal


def note_other_versions(run: Run, now: Mapping[str, Any]) -> None:
    """Print what has changed since the previous launch: code, packages, processors."""
    previous = run.events.get("started", {})
    for name, value in now.items():
        before = previous.get(name, value)
        if "" not in (value, before) and before != value:
            print0(f"note: the previous launch ran {name} {before}, this one runs {value}")


# ---- sinks ---------------------------------------------------------------------------------------


class Terminal(Sink):
    """A printed line for each step and, if stderr is a terminal, a progress bar."""

    def __init__(self, run: Run) -> None:
        self.last = run.horizon.num_iterations
        self.val_bpb = run.first_progress().val_bpb
        self.val_step = run.events.get("val", {}).get("step")
        self.bar = tqdm(
            total=self.last,
            initial=run.step,
            desc=run.run_dir.name,
            bar_format=BAR,
            dynamic_ncols=True,
            leave=False,
            disable=None,  # unless stderr is a terminal
        )

    def event(self, name: str, step: int, record: dict[str, Any]) -> None:
        if name == "val":
            self.val_bpb = record["bpb"]
            self.val_step = step

    def step(self, report: StepReport) -> None:
        """Print the line of a step, and move the bar on."""
        print0(f"step {report.step:05d}/{self.last:05d} | {report.line}")
        self.bar.set_postfix_str(
            f"loss {show(Bits.of(report.smooth_loss))}, "
            f"bits per byte {show(Bits.of(self.val_bpb))} at step {show(self.val_step)}, "
            f"{show(report.tokens_per_s)} tok/s, "
            f"eta {duration(report.eta_s)}",
            refresh=False,
        )
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


class NoAnswer(BaseException):
    """A block has taken too long. Not an Exception, which the block might take for one of its own."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise NoAnswer in the block once it takes longer than this, and again as often.

    It interrupts the main thread, in whatever Python waits for: a lock, a socket, another thread.
    In other threads, there is no limit. Rejected: the block in a thread of its own, because
    PyTorch's profiler records the thread that starts it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_inside = True

    def ring(number: int, frame: object) -> None:
        if is_inside:
            raise NoAnswer

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)


class Optional(Sink):
    """A sink behind the door. If it fails or hangs, the run continues without it, with one warning:
    the log has all values. `wandb_id`: of the wandb run, None for other sinks."""

    def __init__(self, name: str, entry: str, run: Run) -> None:
        self.name = name
        self.wandb_id: str | None = None
        self.sink: Sink = Sink()
        with self._guard(has_limit=False):  # it may ask the user, and wandb has a limit of its own
            self.sink = open_door(entry)(run)
            self.wandb_id = getattr(self.sink, "wandb_id", None)

    @contextlib.contextmanager
    def _guard(self, *, has_limit: bool = True) -> Iterator[None]:
        """Drop the sink with a warning if the block fails or hangs."""
        answer_s = self.sink.answer_s
        try:
            with limited(answer_s) if has_limit else contextlib.nullcontext():
                yield
        except NoAnswer:
            log.warning("%s has hung for %.0f s; continuing without it", self.name, answer_s)
            self.sink = Sink()
            leave_soon()  # its threads and atexit functions may hang, too
        except Exception as e:  # it must not end a run
            log.warning("%s failed (%s); continuing without it", self.name, e)
            self.sink = Sink()

    def event(self, name: str, step: int, record: dict[str, Any]) -> None:
        with self._guard():
            self.sink.event(name, step, record)

    def step(self, report: StepReport) -> None:
        with self._guard():
            self.sink.step(report)

    def ending(self, reason: str) -> None:
        with self._guard():
            self.sink.ending(reason)

    def end(self, status: str, reason: str) -> None:
        """Finish now, while this launch owns the run's folder."""
        with self._guard():
            self.sink.end(status, reason)
        self.close()

    def close(self) -> None:
        with self._guard():
            self.sink.close()
        self.sink = Sink()


class Log(Sink):
    """logs/train.jsonl. A line is refused once another launch owns the run."""

    def __init__(self, run: Run, owner: Owner) -> None:
        self.run = run
        self.owner = owner
        path = run.run_dir / "logs" / "train.jsonl"
        self.log = TrainLog(path, first_step=run.step, lost=owner.lost)

    def event(self, name: str, step: int, record: dict[str, Any]) -> None:
        self.log.write(event=name, step=step, time=time.time(), **record)

    def step(self, report: StepReport) -> None:
        """ValueError if the run took this step before with a different digest."""
        expected = self.log.digest_of(report.step)
        check_digest(self.run.run_dir, report.step, report.totals.digest, expected)
        self.log.write(step=report.step, **report.record)

    def sync(self) -> None:
        self.log.sync()

    def end(self, status: str, reason: str) -> None:
        self._flush()

    def close(self) -> None:
        self._flush()
        self.log.close()

    def _flush(self) -> None:
        """Write the lines that wait for a full disk."""
        if not self.owner.lost():
            self.log.flush()


class Rows(Sink):
    """logs/rows: the loss of every row."""

    def __init__(self, run: Run, owner: Owner) -> None:
        T = run.settings.max_seq_len
        self.owner = owner
        self.rows = RowLosses(run.run_dir, num_rows=run.settings.total_batch_size // T, T=T)

    def step(self, report: StepReport) -> None:
        """See `Sink.step`; a step that is repeated after a crash overwrites its record."""
        self.rows.write(report.step, report.totals.nats, report.totals.live)

    def sync(self) -> None:
        self.rows.sync()

    def end(self, status: str, reason: str) -> None:
        """Write the records that wait for a full disk."""
        if not self.owner.lost():
            self.rows.flush()

    def close(self) -> None:
        self.end("", "")


def check_digest(run_dir: Path, step: int, digest: str | None, expected: str | None) -> None:
    """ValueError if the batch of a step has a different digest from the one the run recorded. None:
    unknown."""
    if None not in (digest, expected) and digest != expected:
        raise ValueError(
            f"step {step}: its batch has digest {digest}, but this run recorded {expected} for it: data "
            f"or code has changed. Restore it, or start a new run (--model-tag NAME "
            f"--init-from={run_dir.name})"
        )


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
