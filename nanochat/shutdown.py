"""
Why and when a run should stop.

    signal: its handler notes it --.
    flag file: rank 0 looks -------+--> stop.wanted(): '' or why --> 0 or 1 --> the step's all-rank sum --> all stop
    walltime: every rank ----------'

One `StopWatch` for each process, entered before anything slow, so that a signal which arrives during set-up,
compilation, an evaluation or a save is noted and honoured at the next look. It never interrupts: a handler that
raised would leave collectives half done on one rank. It decides for its own process only. The caller adds the answer
to a sum that all ranks make anyway, so one rank's signal stops all of them after the same step.

**Walltime.** The end is one instant of the monotonic clock, worked out once; a wall clock that jumps moves nothing.

    started                                        look     next look     deadline
    |----------------------------------------------|--step--|---reserve---|
                                                   ahead too, where more than a step comes before the next look

A run stops when the next look would come too late to save. Kept back for saving is the larger of what was asked for
and 1.5 times the slowest save so far plus one step; a step is the longest of the recent ones. What is done between
looks now and then (an evaluation, a save) is told with `note`, so that it counts as no step, and announced as
`ahead` when it is due.

**Signals.** SIGTERM, SIGINT, SIGUSR1, SIGUSR2 are all the same request. A second SIGINT, a second or more after the
first, ends the process at once with exit code 130; one that comes sooner is the same Ctrl-C on a second way (from
the terminal and from a launcher that passes it on).

**What torchrun makes of this** (2.13, tried out).
- Workers have sessions of their own, so a terminal's Ctrl-C reaches them only through torchrun.
- On SIGTERM, SIGINT, SIGHUP or SIGQUIT it sends that signal to all workers of its node, waits `--shutdown-timeout`
  seconds (30 by default) and kills those that are left. It exits with 1, however well they ended. The timeout must
  exceed a step and a save.
- Any other signal kills torchrun alone and orphans its workers, hence `--signals-to-handle
  SIGTERM,SIGINT,SIGUSR1,SIGUSR2`.
- A second signal, while it waits, makes it send SIGTERM and wait anew: a second Ctrl-C ends nothing at once there;
  scripts.stop --force does.
- Where one node of several is signalled all ranks save and end, but the torchruns of the other nodes wait up to five
  minutes for the one that was signalled before they end. Signal all of them, as srun does, or use scripts.stop.
- A worker that exits with another code than 0 makes it send SIGTERM to the others and exit with 1. So exit codes
  pass only from a plain python; with torchrun ask `scripts.status --exit-code`.
"""

import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
FLAG_NAME = ".shutdown_requested"
LOOK_EVERY_S = 1.0  # how often the flag file is looked for
SAME_CTRL_C_S = 1.0  # SIGINTs closer together than this are one
RECENT_LOOKS = 16
SAVE_MARGIN = 1.5


# ---- walltime -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Deadline:
    """When a process must have ended: `at` on the monotonic clock, `total_s` after its start."""

    at: float
    total_s: float


def deadline(max_runtime_seconds: float, env: Mapping[str, str], started: float, *,
             wall: Callable[[], float] = time.time,
             monotonic: Callable[[], float] = time.monotonic) -> Deadline | None:
    """The end of a process's walltime, None if it has none. The first that is set counts: `max_runtime_seconds`
    (-1: not set), SLURM_JOB_END_TIME (unix seconds), NANOCHAT_MAX_RUNTIME (seconds). `started`: monotonic seconds.

    ValueError for what is no such number, and for an end that has passed."""
    if max_runtime_seconds != -1:
        return _after("--max-runtime-seconds", max_runtime_seconds, started)
    if env.get("SLURM_JOB_END_TIME"):
        left = _number("SLURM_JOB_END_TIME", env["SLURM_JOB_END_TIME"]) - wall()
        if left <= 0:
            raise ValueError(f"SLURM_JOB_END_TIME: that was {-left:,.0f} s ago, expected the end of this job; unset "
                             f"it where it is left over from another, or give --max-runtime-seconds")
        at = monotonic() + left
        return Deadline(at, at - started)
    if env.get("NANOCHAT_MAX_RUNTIME"):
        return _after("NANOCHAT_MAX_RUNTIME", _number("NANOCHAT_MAX_RUNTIME", env["NANOCHAT_MAX_RUNTIME"]), started)
    return None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: got {text!r}, expected a number of seconds") from None


def _after(name: str, seconds: float, started: float) -> Deadline:
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{name}: got {seconds}, expected a positive number of seconds")
    return Deadline(started + seconds, seconds)


# ---- the flag file ------------------------------------------------------------------------------------------------

def request_stop(run_dir: Path) -> None:
    """Ask the run in `run_dir` to stop, by a file that counts by being there; the time in it is for people."""
    with open(run_dir / FLAG_NAME, "w") as f:
        f.write(json.dumps({"time": time.time()}) + "\n")


def stop_requested(run_dir: Path) -> bool:
    """Whether the flag file is there: a run that has stopped leaves it, the next launch removes it."""
    return os.path.lexists(run_dir / FLAG_NAME)


# ---- the watch ------------------------------------------------------------------------------------------------------

class StopWatch:
    """Collects the reasons for this process to stop. Inside the context signals are noted, behind it their previous
    handlers are back. Entered in another thread than the main one, it leaves signals alone (Python's rule)."""

    def __init__(self, deadline: Deadline | None = None, *, reserve_s: float = 0.0) -> None:
        if not 0 <= reserve_s < float("inf"):
            raise ValueError(f"--walltime-reserve-seconds: got {reserve_s}, expected 0 or more")
        self._deadline, self._reserve_s = deadline, reserve_s
        self._signals: list[int] = []
        self._first_int: float | None = None
        self._previous: dict[int, Any] = {}
        self._flag: Path | None = None
        self._next_flag_look = 0.0
        self._last_look: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT_LOOKS)
        self._told_s = 0.0  # of what was noted since the last look
        self._slowest: dict[str, float] = {}
        self._reason = ""

    def __enter__(self) -> "StopWatch":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._note_signal)
                signal.siginterrupt(number, number == signal.SIGINT)  # a library's system call is not cut short
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler: no locks, no buffered output, no exception."""
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._first_int is not None and now - self._first_int >= SAME_CTRL_C_S:
                os.write(2, b"second SIGINT: ended at once, nothing saved\n")
                os._exit(130)
            self._first_int = self._first_int or now
        self._signals.append(number)

    def clear(self, run_dir: Path) -> None:
        """For rank 0, once it owns the run: remove a flag that was left over, and look for a new one from now on."""
        self._flag = run_dir / FLAG_NAME
        self._flag.unlink(missing_ok=True)

    def note(self, what: str, seconds: float) -> None:
        """Something other than a step took so long since the last look: it is no part of the step, and `wanted`
        may be told that it is ahead."""
        self._told_s += seconds
        self._slowest[what] = max(seconds, self._slowest.get(what, 0.0))

    def note_save(self, seconds: float) -> None:
        """A save took so long: the last one must have the time for it."""
        self.note("save", seconds)

    def wanted(self, now: float | None = None, *, ahead: Sequence[str] = ()) -> str:
        """'' or why to stop, in words; the first reason stays. Called once a step. `now`: monotonic seconds; `ahead`:
        what will be done before the next look besides a step, by the names given to `note`."""
        now = time.monotonic() if now is None else now
        if self._last_look is not None:
            self._steps.append(now - self._last_look - self._told_s)
        self._last_look, self._told_s = now, 0.0
        if not self._reason:
            self._reason = self._of_signals() or self._of_flag(now) or self._of_walltime(now, ahead)
        return self._reason

    def _of_signals(self) -> str:
        return signal.Signals(self._signals[0]).name if self._signals else ""

    def _of_flag(self, now: float) -> str:
        if self._flag is None or now < self._next_flag_look:
            return ""
        self._next_flag_look = now + LOOK_EVERY_S
        return "asked by scripts.stop" if os.path.lexists(self._flag) else ""

    def _of_walltime(self, now: float, ahead: Sequence[str]) -> str:
        if self._deadline is None:
            return ""
        step = max(self._steps, default=0.0)
        reserve = max(self._reserve_s, SAVE_MARGIN * self._slowest.get("save", 0.0) + step)
        if now + step + sum(self._slowest.get(what, 0.0) for what in ahead) + reserve <= self._deadline.at:
            return ""
        return f"walltime: {self._deadline.at - now:,.0f} s left of {self._deadline.total_s:,.0f}"


def join_reasons(reasons: Sequence[str]) -> str:
    """All ranks' reasons (rank order, '' for none) as one text, each reason once: 'SIGUSR1', 'SIGTERM (rank 3)'."""
    by_reason: dict[str, list[int]] = {}
    for rank, reason in enumerate(reasons):
        if reason:
            by_reason.setdefault(reason.partition(":")[0], []).append(rank)
    told = []
    for key, ranks in by_reason.items():
        text = reasons[ranks[0]]
        some = key.startswith("SIG") and len(ranks) < len(reasons)
        told.append(f"{text} (rank {', '.join(map(str, ranks))})" if some else text)
    return "; ".join(told)
