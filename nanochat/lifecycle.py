"""
Why a run stops, which launch owns it, and where it stands.

    signal: the handler records it ----------.
    flag file: rank 0's heartbeat checks it -+--> stop.check(): '' or the reason --> in the step's sum --> all stop
    walltime: every rank --------------------'

    RUN/.shutdown_requested    written by scripts.stop; names the launch that it is meant for
    RUN/.owner.json            names the launch that owns the run; that launch holds a lock on this file
    RUN/.run_state.json        where the run stands, and a heartbeat; rewritten by rank 0

**Stopping.** Each process enters one `StopWatch` before anything slow. The signal handler never raises, because
that would leave a collective unfinished on one rank: it only records the signal. Whether to stop is part of a sum
that all ranks compute anyway, so one rank's signal stops all of them after the same step (for torchrun see
docs/clusters.md). A run stops because of its walltime when the next check would come too late to save:

    started                                     check       next check     deadline
    |---------------------------------------------|--step, work--|--reserve--|

Each check allows for the slowest recent step and, for each kind of work between steps (an evaluation, samples, the copy
for a save), its slowest time in this launch.

**One owner.** Two launches that write the same run would mix two histories. So a launch takes the operating system's
lock (flock) on the owner's file, and writes its record there. The lock ends with the process; a suspended process keeps
it. A launch inspects the record first; if it is unchanged once locked, no other launch has owned the run in between:

    A  inspects: record X, no lock ..... locks, finds X: writes record A and owns the run
    B  inspects: record X, no lock ........ cannot lock: refused, and record A names the owner
    C  inspects: record X, no lock .............. (A ends) ........ locks, finds A instead of X: refused

This module never deletes the file, because another process may be about to lock it. If a user deletes or replaces it
or the whole run directory, the owner exits at its next check: within seconds, and before it writes another line or
checkpoint. On a file system without locks, a run counts as owned while its process exists on this host or its heartbeat
is recent. If locks do not reach another host, a launch there takes over the run; the first owner finds the new record
and exits.

**Status.** starting -> running -> stopping -> stopped, halted, completed or failed; a run with an active status but no
lock is dead. The state is written without an fsync, which may take as long as a step. A failed write never stops
training."""

import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nanochat.common import LAUNCH, StopAsked, duration, parse_json
from nanochat.run_dir import finite, open_regular

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FLAG_NAME = ".shutdown_requested"
STATE_NAME = ".run_state.json"
OWNER_NAME = ".owner.json"
FORMAT_VERSION = 1
ACTIVE = ("starting", "running", "stopping")
EXIT_CODES = {"completed": 0, "stopped": 10, "halted": 3, "failed": 1}  # by final status
EXIT_ALIVE = 20

SLURM_END, MAX_RUNTIME = "SLURM_JOB_END_TIME", "NANOCHAT_MAX_RUNTIME"  # environment variables
SQUEUE_S = 10.0  # how long SLURM's controller may take to answer
SAME_CTRL_C_S = 1.0  # SIGINTs closer together than this count as one
RECENT_STEPS = 16
SAVE_MARGIN = 1.5  # times the slowest save so far
HEARTBEAT_S = 10.0
HEARTBEAT_LIMIT_S = 60.0  # without locks, an owner with an older heartbeat counts as dead
CLOSE_S = 5.0  # how long writing the last state may take
LOCK_TRIES, LOCK_TRY_S = 10, 0.1  # an inspection holds a shared lock for a moment


# ---- when to stop ----------------------------------------------------------------------------------------------------

def slurm_end(env: Mapping[str, str]) -> str:
    """When this process's SLURM job ends, as unix seconds (str); empty outside a job and when the end is unknown.
    SLURM_JOB_END_TIME if SLURM sets it (22.05 does not), otherwise squeue's answer. Only rank 0 asks squeue, to
    spare the controller; when rank 0 stops, all ranks stop."""
    end = env.get(SLURM_END, "")
    if end or not env.get("SLURM_JOB_ID") or env.get("RANK", "0") != "0":
        return end
    command = ["squeue", "--noheader", "--format=%e", f"--jobs={env['SLURM_JOB_ID']}"]
    try:
        answer = subprocess.run(command, env={**env, "SLURM_TIME_FORMAT": "%s"}, capture_output=True, text=True,
                                timeout=SQUEUE_S, check=True).stdout.strip()
        return str(int(answer))  # 'N/A' and 'NONE' are jobs without an end
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        log.warning("walltime: no %s, and squeue gave no end for job %s (%s); set --max-runtime-seconds", SLURM_END,
                    env["SLURM_JOB_ID"], e)
        return ""


def deadline(max_runtime_seconds: float, env: Mapping[str, str], started: float, *,
             reserve_s: float = 0.0) -> float | None:
    """The time by which this process must end, on the monotonic clock (like `started`); None without a walltime.
    The first limit that is set counts, and is logged: `max_runtime_seconds` (-1: not set), the end of the SLURM job
    (`slurm_end`), NANOCHAT_MAX_RUNTIME (seconds). ValueError for a limit that is not a positive, finite number of
    seconds, an end that has passed, and a limit that leaves nothing beside `reserve_s`, the time kept for the last
    save: such a launch would train one step, and so would every launch that a cluster requeues after it."""
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
        raise ValueError(f"{name}: got {text!r}, expected " + (
            "the unix time at which this job ends (unset it if it is left over from another job)" if is_unix_time else
            "a positive number of seconds"))
    if left_s <= reserve_s:
        raise ValueError(f"{name}: {duration(left_s)} are left, but --walltime-reserve-seconds={reserve_s:g} of them "
                         f"are kept for the last save, so this launch could not train; allow more time, or lower "
                         f"--walltime-reserve-seconds")
    end = left_s + (time.monotonic() if is_unix_time else started)
    log.info("walltime: %s left (%s)", duration(end - time.monotonic()), name)
    return end


def launcher_pid() -> int:
    """The process that started this launch: torchrun, which may start its processes several times, or this one."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


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
    """Collects the reasons for this process to stop. Inside the context, signals are recorded, and a signal ends a
    wait for object storage; on exit the previous handlers are restored. Signals are left alone if this is not the main
    thread: Python lets no other thread set handlers. SIGHUP is left alone if it is ignored, as under nohup.

    run_dir: a request to stop that is there now may be a leftover, see `_is_leftover`."""

    ended = 0.0  # the uptime at which this process left its last StopWatch

    def __init__(self, deadline: float | None = None, *, reserve_s: float = 0.0, run_dir: Path | None = None) -> None:
        self._deadline, self._reserve_s = deadline, reserve_s
        self._signals: list[int] = []
        self._previous: dict[int, Any] = {}
        self._previous_wakeup = -1
        self._began_s = max(began_s(launcher_pid()), StopWatch.ended)
        self._first_request = read_request(run_dir) if run_dir else None
        self._flagged = False
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
                signal.siginterrupt(number, number == signal.SIGINT)  # only SIGINT interrupts a system call
            self._watch_ctrl_c()
        LAUNCH.stop = self.requested
        return self

    def __exit__(self, *error: object) -> None:
        LAUNCH.stop = lambda: False
        StopWatch.ended = uptime_s()
        if self._previous:
            os.close(signal.set_wakeup_fd(self._previous_wakeup))  # ends the thread of _watch_ctrl_c
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: object) -> None:
        """The handler: no locks, no buffered output, no exception."""
        if not self._signals and os.environ.get("RANK", "0") == "0":  # one rank reports it
            line = f"{signal.Signals(number).name}: stopping after the current step, if any, and saving"
            if number == signal.SIGINT:
                line += "; to exit without saving, press Ctrl-C again after one second"
            write_stderr(f"\n{line}\n")
        self._signals.append(number)

    def _watch_ctrl_c(self) -> None:
        """Let a thread end the process on a second Ctrl-C. The handler cannot: Python calls it only when the main
        thread returns from PyTorch, which may take a whole step. The system writes the number of each signal to a pipe
        at once."""
        arrivals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        self._previous_wakeup = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

        def watch() -> None:
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

    def ignore_stores(self) -> None:
        """The run is over: from now on, every wait for object storage ends immediately."""
        LAUNCH.stop = lambda: True

    def check_flag(self, run_dir: Path) -> None:
        """Check for a request to stop, and delete one that an earlier launch left behind. The owner's heartbeat calls
        this, so that no step waits for a disk."""
        with contextlib.suppress(OSError):
            request = None if self._flagged else read_request(run_dir)
            if request is None:
                return
            if self._is_leftover(request):
                os.unlink(run_dir / FLAG_NAME)
            else:
                self._flagged = True

    def _is_leftover(self, request: "Request") -> bool:
        """Whether a request to stop was meant for an earlier launch. No clock that can be set decides: machines differ
        by hours, and a clock may be set back while a run trains."""
        if request.boot and request.boot == boot_id():  # made on this machine since it booted
            return request.uptime_s < self._began_s
        return request == self._first_request and request.launcher != identify_launcher()

    def note(self, what: str, seconds: float) -> None:
        """Record how long some work between steps took. It is not counted as part of the step, and from now on each
        check allows for that much time."""
        self._between_s += seconds
        self._slowest[what] = max(seconds, self._slowest.get(what, 0.0))

    def note_save(self, seconds: float) -> None:
        """Record how long a save took: 1.5 times that is now reserved for the final save."""
        self._reserve_s = max(self._reserve_s, SAVE_MARGIN * seconds)

    def requested(self) -> str:
        """The reason to stop that is already known, such as a signal or the flag, or ''. Safe to call at any time."""
        if not self._reason and self._signals:
            self._reason = signal.Signals(self._signals[0]).name
        if not self._reason and self._flagged:
            self._reason = "asked by scripts.stop"
        return self._reason

    def check(self, now: float | None = None) -> str:
        """The reason to stop, or ''; the first reason stays. Called once per step. `now`: monotonic seconds."""
        now = time.monotonic() if now is None else now
        if self._last_check is not None:  # the time of the step, without the work that `note` recorded
            self._steps.append(now - self._last_check - self._between_s)
        self._last_check, self._between_s = now, 0.0
        if not self.requested() and self._deadline is not None:
            left_s = self._deadline - now  # enough for another step, one task of each kind, and the last save?
            if left_s < max(self._steps, default=0.0) + sum(self._slowest.values()) + self._reserve_s:
                self._reason = f"walltime: {abs(left_s):,.0f} s {'left' if left_s >= 0 else 'over'}"
        return self._reason


def join_reasons(reasons: Sequence[str]) -> str:
    """The first of all ranks' reasons to stop (in rank order, '' for none): 'walltime: ..', 'SIGUSR1', or
    'SIGTERM (rank 1)' if not all ranks got a signal."""
    rank, first = next(((rank, reason) for rank, reason in enumerate(reasons) if reason), (0, ""))
    return f"{first} (rank {rank})" if first.startswith("SIG") and not all(reasons) else first


class Request(NamedTuple):
    """A request to stop, the content of the flag file. Equal requests are the same one."""

    launcher: str = ""  # of the launch that owned the run, or had owned it last; '' if none had
    boot: str = ""  # `boot_id` where scripts.stop ran
    uptime_s: float = 0.0  # and `uptime_s` there
    inode: int = 0  # of the file
    mtime_ns: int = 0


def request_stop(run_dir: Path) -> None:
    """Ask a run to stop, whether a launch already owns it or is about to claim it. ValueError if the flag is not a
    regular file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    owner: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        owner = parse_json(_last_owner(run_dir)[0], "", dict)
    content = {"launcher": str(owner.get("launcher", "")), "boot": boot_id(), "uptime_s": uptime_s()}
    with open_regular(run_dir / FLAG_NAME, os.O_WRONLY | os.O_CREAT) as file:
        file.truncate(0)
        file.write(json.dumps(content).encode())


def read_request(run_dir: Path) -> Request | None:
    """The request to stop in a run directory, None if there is none. Anybody may have made the file in any way, so its
    content is only compared."""
    try:
        with open_regular(run_dir / FLAG_NAME, os.O_RDONLY) as file:
            found, data = os.fstat(file.fileno()), file.read(4096)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    request = Request(inode=found.st_ino, mtime_ns=found.st_mtime_ns)
    try:
        content = parse_json(data, "", {"launcher": str, "boot": str, "uptime_s": float})
    except ValueError:
        return request
    return request._replace(launcher=content["launcher"], boot=content["boot"], uptime_s=content["uptime_s"])


def write_stderr(text: str) -> None:
    """Write to stderr without buffers and locks, for handlers of signals. If stderr is closed, nothing happens."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


# ---- processes -------------------------------------------------------------------------------------------------------

PROCESS = {"host": str, "pid": int, "start": str | None}  # the shape of `identify`


def process_start(pid: int) -> str | None:
    """When a process on this machine started, in clock ticks since boot; None if it does not exist (or only its
    zombie does), and on a system without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2:].split()  # after the name, which may contain anything
    return None if fields[0] in "ZX" else fields[19]


def identify() -> dict[str, Any]:
    """This process's host, pid and start, from which `is_alive_here` recognizes it. Plain values."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "start": process_start(os.getpid())}


def identify_launcher() -> str:
    """Names this launch, also after torchrun has restarted its processes."""
    pid = launcher_pid()
    return f"{socket.gethostname()}/{pid}/{process_start(pid)}"


def is_alive_here(process: Mapping[str, Any]) -> bool:
    """Whether a process that `identify` described is visible and alive here. False on another host, in another process
    namespace, and for a record that may be forged: a pid that is not positive, a missing or wrong start."""
    alive_since = process_start(process["pid"]) if process["pid"] > 0 else None
    return process["host"] == socket.gethostname() and alive_since is not None and alive_since == process["start"]


# ---- who owns a run --------------------------------------------------------------------------------------------------

OWNER = {"launch": str, "since": str, **PROCESS}


class Owner:
    """The right of one launch to write into a run directory. It lasts while the owner's file there is the one this
    launch opened and locked, and has its record."""

    def __init__(self, run_dir: Path, file: BinaryIO, record: bytes) -> None:
        self.run_dir, self._file, self._record = run_dir, file, record

    def lost(self) -> str:
        """'' while this launch owns the run, otherwise the error to exit with."""
        try:  # opening the file makes network file systems check their caches
            with open_regular(self.run_dir / OWNER_NAME, os.O_RDONLY) as current:
                if os.path.sameopenfile(current.fileno(), self._file.fileno()) and current.read() == self._record:
                    return ""
        except (FileNotFoundError, NotADirectoryError, ValueError):  # the file is missing or was replaced
            pass
        except OSError:  # unknown; the next check may find out
            return ""
        return (f"{self.run_dir}: this launch no longer owns the run, because its files were removed or another launch "
                f"took it over; exiting at once")

    def release(self) -> None:
        """Give up the run: from now on another launch may claim it."""
        self._file.close()


def _lock(file: BinaryIO, kind: int) -> bool | None:
    """Lock a file without waiting: True, False if another process holds it, None if the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _last_owner(run_dir: Path) -> tuple[bytes, bool]:
    """The record of a run's last owner, empty if there was none, and whether it still owns the run."""
    try:
        with open_regular(run_dir / OWNER_NAME, os.O_RDONLY) as file:
            free, record = _lock(file, fcntl.LOCK_SH), file.read()
    except (FileNotFoundError, NotADirectoryError):
        return b"", False
    if free is None:
        state = read_state(run_dir)
        return record, state is not None and state["status"] in ACTIVE and _seems_alive(state)
    return record, not free


def check_free(run_dir: Path) -> bytes:
    """Check that no launch owns the run, without changing anything. Returns the last owner's record for `claim`.
    ValueError names the process that owns the run, or an owner's file that is not a regular one."""
    record, alive = _last_owner(run_dir)
    if not alive:
        return record
    try:
        owner = parse_json(record, "", OWNER)
        who = f"host {owner['host']!a}, pid {owner['pid']}, since {owner['since']!a}"
    except ValueError:
        who = f"{run_dir / OWNER_NAME} does not name it"
    raise ValueError(f"{run_dir}: another launch owns this run: {who}; end it with python -m scripts.stop "
                     f"{run_dir.name} (--force if it is suspended or hangs), or name another run with --model-tag")


def claim(run_dir: Path, before: bytes) -> Owner:
    """Become the owner of a run whose last owner left the record `before` (see `check_free`). ValueError if another
    launch owns the run, or has owned it since."""
    outdated = ValueError(f"{run_dir}: another launch owned this run a moment ago; run the command again")
    if not before:
        run_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(run_dir / OWNER_NAME, os.O_RDWR | os.O_CREAT))
            for _ in range(LOCK_TRIES):
                if (locked := _lock(file, fcntl.LOCK_EX)) is not False:
                    break
                time.sleep(LOCK_TRY_S)
            if not locked:
                check_free(run_dir)  # raises the error that names the owner
            # another process may have replaced the file between our open and our lock
            same = os.path.samestat(os.fstat(file.fileno()), os.lstat(run_dir / OWNER_NAME))
        except FileNotFoundError:
            raise outdated from None
        if locked is False or not same or file.read() != before:
            raise outdated
        record = json.dumps({"launch": uuid.uuid4().hex, "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                             "launcher": identify_launcher(), **identify()}).encode()
        file.seek(0)
        file.write(record)
        file.truncate(len(record))
        os.register_at_fork(after_in_child=file.close)  # a forked child would keep the lock; executed programs do not
        stack.pop_all()
    return Owner(run_dir, file, record)


def acquire(run_dir: Path) -> Owner:
    """`check_free`, then `claim`."""
    return claim(run_dir, check_free(run_dir))


# ---- where a run stands ----------------------------------------------------------------------------------------------

NUMBER = int | float | None
NEWS = {  # the values that a training run reports, and their shapes
    "status": str, "reason": str, "step": NUMBER, "num_iterations": NUMBER, "loss": NUMBER, "val_bpb": NUMBER,
    "tokens": NUMBER, "tokens_per_s": NUMBER, "eta_s": NUMBER, "checkpoint": str | None, "phase": int | str | None,
    "skipped": int | None | object, "val_step": int | None | object}  # object: may be missing (older versions)
STATE = {**NEWS, "format_version": int, "world_size": int, "ranks": [PROCESS],
         "started": float, "heartbeat": float}
LARGEST, LATEST = 1e18, 1e11  # limits of a number, and of a time in unix seconds (the year 5138)


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """The state of a run, None if it has none. ValueError, which names file and field, if it is corrupt or not a
    regular file."""
    path = run_dir / STATE_NAME
    remedy = "delete it; the next launch of the run writes a new one"
    try:
        with open_regular(path, os.O_RDONLY) as f:
            state = parse_json(f.read(), path, STATE, remedy=remedy)
    except (FileNotFoundError, NotADirectoryError):
        return None
    for name, value in state.items():
        limit = LATEST if name in ("started", "heartbeat") else LARGEST
        if isinstance(value, (int, float)) and not abs(value) < limit:  # also NaN
            raise ValueError(f"{path}: {name}: got {str(value)[:30]}, expected a number below {limit:.0e}; {remedy}")
    known = state["format_version"] == FORMAT_VERSION and state["status"] in (*ACTIVE, *EXIT_CODES)
    if not (known and state["ranks"]):
        raise ValueError(f"{path}: not a state that this version of the program writes; {remedy}")
    return state


def heartbeat_age_s(state: Mapping[str, Any]) -> float:
    """How old the heartbeat is by our clock, in seconds; negative if it is from the future."""
    return time.time() - state["heartbeat"]


def _seems_alive(state: Mapping[str, Any]) -> bool:
    """Without a lock: whether rank 0 is visible here, or its heartbeat is recent."""
    return is_alive_here(state["ranks"][0]) or abs(heartbeat_age_s(state)) <= HEARTBEAT_LIMIT_S


def liveness(run_dir: Path, state: Mapping[str, Any]) -> str:
    """ended (final status), alive, or dead (active status, but no process holds the run's lock). If it
    ran on another host, which locks may not reach, it is dead only if its heartbeat is old, too."""
    if state["status"] in EXIT_CODES:
        return "ended"
    elsewhere = state["ranks"][0]["host"] != socket.gethostname()
    return "alive" if _last_owner(run_dir)[1] or (elsewhere and _seems_alive(state)) else "dead"


def exit_code(run_dir: Path, state: Mapping[str, Any]) -> int:
    """The exit code of scripts.status --exit-code: 0 completed, 10 stopped (the command that started it
    resumes it), 3 halted (the user must decide), 1 failed or dead, 20 alive."""
    return {"ended": EXIT_CODES.get(state["status"], 1), "alive": EXIT_ALIVE, "dead": 1}[liveness(run_dir, state)]


def _replace(path: Path, value: Any) -> None:
    """Replace a small JSON file without an fsync. A leftover or a link under the temporary name is deleted."""
    temporary = path.with_name(f"{path.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as f:
        f.write(json.dumps(value) + "\n")
    os.replace(temporary, path)


class RunState:
    """Rank 0's writer of the state. Leaving the context without a final status sets "stopped" (for a StopAsked)
    or "failed", with the exception as the reason. `ranks`: the values of `identify` on each rank, in rank order.
    `stop`: the StopWatch whose flag file is checked here. Only `refresh` uses the disk, and the heartbeat
    (nanochat/watchdog.py) calls it, so that no step waits."""

    def __init__(self, owner: Owner, ranks: Sequence[dict[str, Any]], stop: StopWatch | None = None,
                 **news: Any) -> None:
        self.owner, self._stop, self._path = owner, stop, owner.run_dir / STATE_NAME
        empty = {name: "" if shape is str else None for name, shape in NEWS.items()}
        self._state: dict[str, Any] = {
            **empty, "format_version": FORMAT_VERSION, "status": "starting", "world_size": len(ranks),
            "ranks": list(ranks), "started": time.time()}
        self._written: dict[str, Any] = {}
        self._written_at = 0.0
        self._warned = self._closed = False
        self._one_writer = threading.Lock()
        self.update(**news)
        self.refresh()

    def update(self, **news: Any) -> None:
        """Change values (the names in NEWS); the next `refresh` writes them. A final status freezes the state."""
        assert news.keys() <= NEWS.keys() and news.get("status", "starting") in (*ACTIVE, *EXIT_CODES)
        if self._state["status"] not in EXIT_CODES:
            self._state.update(news)

    def refresh(self) -> str:
        """Check the flag file, write the state if it changed or a heartbeat is due, and give up the run after a final
        status. Returns '', or the error to exit with if the run is lost; in that case nothing is written."""
        with self._one_writer:
            if self._closed:
                return ""
            if self._stop is not None:
                self._stop.check_flag(self.owner.run_dir)
            lost, state = self.owner.lost(), dict(self._state)
            if not lost and (state != self._written or time.monotonic() - self._written_at >= HEARTBEAT_S):
                self._written, self._written_at = state, time.monotonic()
                try:
                    _replace(self._path, finite({**state, "heartbeat": time.time()}))
                except OSError as e:
                    if not self._warned:
                        log.warning("%s: cannot be written (%s); training continues", self._path, e.strerror)
                    self._warned = True
            if state["status"] in EXIT_CODES:
                self.owner.release()
                self._closed = True
            return lost

    def close(self, status: str, reason: str = "") -> None:
        """Write how the run ended, and give up the run. The first final status stays. A disk that does not answer
        delays this by at most CLOSE_S."""
        self.update(status=status, reason=reason)
        writer = threading.Thread(target=self.refresh, name="last-state", daemon=True)
        writer.start()
        writer.join(timeout=CLOSE_S)

    def __enter__(self) -> "RunState":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StopAsked):
            self.close("stopped", str(error))
        reason = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
        self.close("failed", "ended without a status" if error is None else reason)


def write_completed(run_dir: Path, step: int, reason: str) -> None:
    """Write a completed state for a `final` checkpoint, at `step`, that no launch here trained; `reason` names its
    origin."""
    state = RunState(acquire(run_dir), [identify()], num_iterations=step, step=step, checkpoint="final")
    state.close("completed", reason)
