"""
Why a run stops.

    signal: the handler records it ----------+--> stop.asked() ---------> ends a wait for data (common.check_stop)
    flag file: rank 0's heartbeat checks it -'          |
    walltime: every rank -----------------------> stop.after_step() ----> in the step's sum --> all ranks stop

    RUN/.shutdown_requested    written by scripts.stop; names the launch that it is meant for

Each process enters one `StopWatch` before anything slow. The signal handler never raises, because
that would leave a collective unfinished on one rank: it only records the signal. Whether to stop is
part of a sum that all ranks compute anyway, so one rank's signal stops all of them after the same
step (for torchrun see docs/clusters.md). A run stops because of its walltime when the next check
would come too late to save:

    started                                     check       next check     deadline
    |---------------------------------------------|--step, work--|--reserve--|

Each check allows for the slowest recent step and, for each kind of work between steps (an
evaluation, samples, the copy for a save), its slowest time in this launch.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.common import duration, parse_json, write_bytes
from nanochat.run_dir import open_regular
from nanochat.run_owner import last_owner
from nanochat.run_state import identify_launcher, launcher_pid, process_start, under_torchrun

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FLAG_NAME = ".shutdown_requested"
SLURM_END, MAX_RUNTIME = "SLURM_JOB_END_TIME", "NANOCHAT_MAX_RUNTIME"  # environment variables
SQUEUE_S = 10.0  # how long SLURM's controller may take to answer
SAME_CTRL_C_S = 1.0  # SIGINTs closer together than this count as one
RECENT_STEPS = 16
SAVE_MARGIN = 1.5  # times the slowest save so far


# ---- walltime ------------------------------------------------------------------------------------


def slurm_end(env: Mapping[str, str]) -> str:
    """When this process's SLURM job ends, as unix seconds (str); empty outside a job and when the
    end is unknown. SLURM_JOB_END_TIME if SLURM sets it (22.05 does not), otherwise squeue's answer.
    Only rank 0 asks squeue, to spare the controller; when rank 0 stops, all ranks stop."""
    end = env.get(SLURM_END, "")
    if end or not env.get("SLURM_JOB_ID") or env.get("RANK", "0") != "0":
        return end
    command = ["squeue", "--noheader", "--format=%e", f"--jobs={env['SLURM_JOB_ID']}"]
    try:
        answer = subprocess.run(
            command,
            env={**env, "SLURM_TIME_FORMAT": "%s"},
            capture_output=True,
            text=True,
            timeout=SQUEUE_S,
            check=True,
        ).stdout.strip()
        return str(int(answer))  # 'N/A' and 'NONE' are jobs without an end
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        log.warning(
            "walltime: no %s, and squeue gave no end for job %s (%s); set --max-runtime-seconds",
            SLURM_END,
            env["SLURM_JOB_ID"],
            e,
        )
        return ""


def deadline(
    max_runtime_seconds: float, env: Mapping[str, str], started: float, *, reserve_s: float = 0.0
) -> float | None:
    """The time by which this process must end, on the monotonic clock (like `started`); None
    without a walltime. The first limit that is set counts, and is logged: `max_runtime_seconds`
    (-1: not set), the end of the SLURM job (`slurm_end`), NANOCHAT_MAX_RUNTIME (seconds).
    ValueError for a limit that is not a positive, finite number of seconds, an end that has passed,
    and a limit that leaves nothing beside `reserve_s`, the time kept for the last save: such a
    launch would train one step, and so would every launch that a cluster requeues after it."""
    if max_runtime_seconds != -1:
        name, text = "--max-runtime-seconds", str(max_runtime_seconds)
    elif text := slurm_end(env):
        name = SLURM_END
    elif text := env.get(MAX_RUNTIME, ""):
        name = MAX_RUNTIME
    else:
        if "GPT_SIMPLE_MAX_RUNTIME" in env:
            log.warning("GPT_SIMPLE_MAX_RUNTIME is ignored; set %s", MAX_RUNTIME)
        return None
    is_unix_time = name == SLURM_END  # the other limits count from the start
    try:
        left_s = float(text) - (time.time() if is_unix_time else 0.0)
    except ValueError:
        left_s = 0.0
    if not 0 < left_s < float("inf"):
        raise ValueError(
            f"{name}: got {text!r}, expected "
            + (
                "the unix time at which this job ends (unset it if it is left over from another job)"
                if is_unix_time
                else "a positive number of seconds"
            )
        )
    if left_s <= reserve_s:
        raise ValueError(
            f"{name}: {duration(left_s)} are left, but --walltime-reserve-seconds={reserve_s:g} of them "
            f"are kept for the last save, so this launch could not train; allow more time, or lower "
            f"--walltime-reserve-seconds"
        )
    end = left_s + (time.monotonic() if is_unix_time else started)
    log.info("walltime: %s left (%s)", duration(end - time.monotonic()), name)
    return end


# ---- signals and requests ------------------------------------------------------------------------


def boot_id() -> str:
    """Names the current boot of this machine; '' if the system does not."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def uptime_s() -> float:
    """Seconds since this machine booted, a clock that nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0


def began_s(pid: int) -> float:
    """The uptime at which a process began; now if the system does not say."""
    ticks = process_start(pid)
    return uptime_s() if ticks is None else int(ticks) / os.sysconf("SC_CLK_TCK")


class StopWatch:
    """Collects the reasons for this process to stop. Inside the context, signals are
    recorded; on exit the previous handlers are restored. Signals are left alone if this is not the
    main thread: Python lets no other thread set handlers. SIGHUP is left alone if it is ignored, as
    under nohup.

    deadline: what the function `deadline` returns. It may be set inside the context, because SLURM
    takes seconds to answer.

    run_dir: a request to stop that is there now may be a leftover, see `_is_leftover`."""

    ended = 0.0  # the uptime at which this process left its last StopWatch

    def __init__(
        self, deadline: float | None = None, *, reserve_s: float = 0.0, run_dir: Path | None = None
    ) -> None:
        self.deadline = deadline
        self._reserve_s = reserve_s
        self._signals: list[int] = []
        self._previous: dict[int, Any] = {}
        self._previous_wakeup = -1
        self._began_s = max(began_s(launcher_pid()), StopWatch.ended)
        self._first_request = read_request(run_dir) if run_dir else None
        self._request: Request | None = None  # that this launch honours
        self._last_check: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._between_s = 0.0  # work between steps since the last check
        self._slowest: dict[str, float] = {}
        self._reason = ""

    def __enter__(self) -> "StopWatch":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._on_signal)
                # only SIGINT interrupts a system call
                signal.siginterrupt(number, number == signal.SIGINT)
            self._watch_ctrl_c()
        return self

    def __exit__(self, *error: object) -> None:
        StopWatch.ended = uptime_s()
        if self._previous:
            # ends the thread of _watch_ctrl_c
            os.close(signal.set_wakeup_fd(self._previous_wakeup))
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: object) -> None:
        """The handler: no locks, no buffered output, no exception."""
        if not self._signals and os.environ.get("RANK", "0") == "0":  # one rank reports it
            line = f"{signal.Signals(number).name}: stopping after the current step, if any, and saving"
            # torchrun, whose processes no terminal reaches, passes on the first Ctrl-C alone
            if number == signal.SIGINT and not under_torchrun():
                line += "; to exit without saving, press Ctrl-C again after one second"
            write_stderr(f"\n{line}\n")
        self._signals.append(number)

    def _watch_ctrl_c(self) -> None:
        """Let a thread end the process on a second Ctrl-C. The handler cannot: Python calls it only
        when the main thread returns from PyTorch, which may take a whole step. The system writes
        the number of each signal to a pipe at once."""
        arrivals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        self._previous_wakeup = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

        def watch() -> None:
            """Exit at a second SIGINT at least SAME_CTRL_C_S after the first: one Ctrl-C may arrive twice."""
            first_s = None
            with os.fdopen(arrivals, "rb", buffering=0) as pipe:
                while number := pipe.read(1):
                    if number[0] != signal.SIGINT:
                        continue
                    now_s = time.monotonic()
                    if first_s is None:
                        first_s = now_s
                    elif now_s - first_s >= SAME_CTRL_C_S:
                        write_stderr("second SIGINT: exiting immediately without saving\n")
                        os._exit(130)

        threading.Thread(target=watch, name="ctrl-c", daemon=True).start()

    def look_for_request(self, run_dir: Path, *, has_stopped: bool = False) -> None:
        """Check for a request to stop, and delete one that an earlier launch left behind. The
        owner's heartbeat calls this, so that no step waits for a disk. `has_stopped`: this launch
        ends because of the request. Then its file is marked as honoured, so that it does not stop
        the next launch, too. It stays, because shell scripts look for it."""
        with contextlib.suppress(OSError):
            request = None if self._request and not has_stopped else read_request(run_dir)
            if request is None:
                return
            if has_stopped:
                write_request(run_dir, request._replace(honoured=True))
            elif self._is_leftover(request):
                os.unlink(run_dir / FLAG_NAME)
            else:
                self._request = request

    def _is_leftover(self, request: "Request") -> bool:
        """Whether a request to stop was meant for an earlier launch. No clock that can be set
        decides: machines differ by hours, and a clock may be set back while a run trains."""
        if request.honoured:
            return True
        if request.boot and request.boot == boot_id():  # made on this machine since it booted
            return request.uptime_s < self._began_s
        return request == self._first_request and request.launcher != identify_launcher()

    def note_work(self, what: str, seconds: float) -> None:
        """Record how long some work between steps took. It is not counted as part of the step, and
        from now on each check allows for that much time."""
        self._between_s += seconds
        self._slowest[what] = max(seconds, self._slowest.get(what, 0.0))

    def note_save(self, seconds: float) -> None:
        """Record how long a save took: 1.5 times that is now reserved for the final save."""
        self._reserve_s = max(self._reserve_s, SAVE_MARGIN * seconds)

    def asked(self) -> str:
        """The reason to stop that is already known, such as a signal or the flag, or ''. Safe to
        call at any time."""
        if not self._reason and self._signals:
            self._reason = signal.Signals(self._signals[0]).name
        if not self._reason and self._request:
            self._reason = "asked by scripts.stop"
        return self._reason

    def after_step(self, now: float | None = None) -> str:
        """The reason to stop, or ''; the first reason stays. Called once per step. `now`: monotonic
        seconds."""
        now = time.monotonic() if now is None else now
        # the time of the step, without the work that `note_work` recorded
        if self._last_check is not None:
            self._steps.append(now - self._last_check - self._between_s)
        self._last_check = now
        self._between_s = 0.0
        if not self.asked() and self.deadline is not None:
            # enough for another step, one task of each kind, and the last save?
            left_s = self.deadline - now
            if (
                left_s
                < max(self._steps, default=0.0) + sum(self._slowest.values()) + self._reserve_s
            ):
                self._reason = f"walltime: {abs(left_s):,.0f} s {'left' if left_s >= 0 else 'over'}"
        return self._reason


class Diverged(Exception):
    """Ends the run as failed: a loss or gradient norm is NaN or infinite, or every step is a spike.
    All ranks raise this together; the step was not applied."""


class Request(NamedTuple):
    """A request to stop, the content of the flag file. Equal requests are the same one."""

    launcher: str = ""  # of the launch that owned the run, or had owned it last; '' if none had
    boot: str = ""  # `boot_id` where scripts.stop ran
    uptime_s: float = 0.0  # and `uptime_s` there
    honoured: bool = False  # a launch has stopped because of it
    inode: int = 0  # of the file
    mtime_ns: int = 0


def request_stop(run_dir: Path) -> None:
    """Ask a run to stop, whether a launch already owns it or is about to claim it. ValueError if
    the flag is not a regular file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    owner: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        owner = parse_json(last_owner(run_dir)[0], "", dict)
    write_request(run_dir, Request(str(owner.get("launcher", "")), boot_id(), uptime_s()))


def write_request(run_dir: Path, request: Request) -> None:
    """Write the file of a request atomically: a reader of half of it would not see whom it is meant
    for, and stop another launch. OSError or ValueError if that fails."""
    content = {
        name: getattr(request, name) for name in ("launcher", "boot", "uptime_s", "honoured")
    }
    path = run_dir / FLAG_NAME
    if os.path.lexists(path):
        open_regular(path, os.O_RDONLY).close()  # ValueError for what is not ours
    write_bytes(path, json.dumps(content).encode())


def read_request(run_dir: Path) -> Request | None:
    """The request to stop in a run directory, None if there is none. Anybody may have made the file
    in any way, so its content is only compared."""
    try:
        with open_regular(run_dir / FLAG_NAME, os.O_RDONLY) as file:
            found = os.fstat(file.fileno())
            data = file.read(4096)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    request = Request(inode=found.st_ino, mtime_ns=found.st_mtime_ns)
    try:
        content = parse_json(data, "", {"launcher": str, "boot": str, "uptime_s": float})
    except ValueError:
        return request
    return request._replace(
        launcher=content["launcher"],
        boot=content["boot"],
        uptime_s=content["uptime_s"],
        honoured=content.get("honoured", False) is True,
    )


def write_stderr(text: str) -> None:
    """Write to stderr without buffers and locks, for handlers of signals. If stderr is closed,
    nothing happens."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
