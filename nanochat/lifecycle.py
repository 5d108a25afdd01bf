"""
Why a run stops, which launch owns it, and where it stands.

    signal: its handler notes it -----------.
    flag file: rank 0's heartbeat looks ----+--> stop.wanted(): '' or the reason --> in the step's sum --> all stop
    walltime: every rank -------------------'

    RUN/.shutdown_requested    written by scripts.stop; counts unless it is older than this launch
    RUN/.owner.json            names the launch that owns the run, which holds a lock on this file
    RUN/.run_state.json        where the run stands, and a heartbeat; rewritten by rank 0

**Stopping.** Each process has one `StopWatch`, entered before anything slow. A signal never
interrupts, because a handler that raises would leave a collective unfinished on one rank: it is
noted. The reason to stop is added to a sum that all ranks compute anyway, so one rank's signal stops
all of them after the same step (for torchrun see docs/clusters.md). A run stops for its walltime
when the next look would come too late to save:

    started                                      look        next look      deadline
    |---------------------------------------------|--step, looks--|--reserve--|

It allows for a step as slow as the slowest recent one, and for each kind of work between steps (an
evaluation, samples, the copy for a save) as slow as it ever was in this launch.

**One owner.** Two launches that write the same run would mix two histories. So a launch takes the
operating system's lock (flock) on the owner's file, and writes its record there. The lock ends with
the process; a stopped process keeps it. The record proves that the run is the one that was inspected:

    A  inspects: record X, no lock ..... locks, finds X: writes record A and owns the run
    B  inspects: record X, no lock ........ cannot lock: refused, and record A says who owns the run
    C  inspects: record X, no lock .............. (A ends) ........ locks, finds A instead of X: refused

The file is never deleted here, because another process may be about to lock it. When a person
deletes or replaces it, or the whole run directory, the owner ends at its next look: within seconds,
and before it writes another line or checkpoint. Where a file system has no locks, the process (on
the same host) or the age of its heartbeat decides. Where locks do not reach other hosts, a launch
there takes the run over, and the first owner finds the new record and ends.

**Status.** starting -> running -> stopping -> one of stopped, halted, completed, failed; dead if it
says that it is active but nothing holds its lock. The state is not forced to disk, which may take as
long as a step, and an error in writing it never stops training."""

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
from types import FrameType, TracebackType
from typing import Any, BinaryIO

from nanochat.common import LAUNCH, StopAsked, duration, parse_json
from nanochat.run_dir import finite, open_regular

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
FLAG_NAME = ".shutdown_requested"
STATE_NAME = ".run_state.json"
OWNER_NAME = ".owner.json"
FORMAT_VERSION = 1
ACTIVE = ("starting", "running", "stopping")
EXIT_CODES = {"completed": 0, "stopped": 10, "halted": 3, "failed": 1}  # of runs that have ended
EXIT_ALIVE = 20

SLURM_END, MAX_RUNTIME = "SLURM_JOB_END_TIME", "NANOCHAT_MAX_RUNTIME"  # environment variables
SQUEUE_S = 10.0  # how long SLURM's controller may take to answer
SAME_CTRL_C_S = 1.0  # SIGINTs closer together than this are one
RECENT_LOOKS = 16
SAVE_MARGIN = 1.5  # of the slowest save so far
HEARTBEAT_S = 10.0
HEARTBEAT_LIMIT_S = 60.0  # an older one counts as dead where the lock cannot tell
CLOSE_S = 5.0  # how long the last state may take to be written
LOCK_TRIES, LOCK_TRY_S = 10, 0.1  # an inspection holds a shared lock for a moment


# ---- when to stop -------------------------------------------------------------------------------

def slurm_end(env: Mapping[str, str]) -> str:
    """When this process's SLURM job ends, as unix seconds in text; empty outside of a job and when
    the end is unknown. SLURM_JOB_END_TIME, where SLURM sets it (22.05 does not), otherwise the
    answer of squeue: rank 0 alone asks, because a controller should not hear from every rank at
    once, and a stop of one rank stops all."""
    end = env.get(SLURM_END, "")
    if end or not env.get("SLURM_JOB_ID") or env.get("RANK", "0") != "0":
        return end
    command = ["squeue", "--noheader", "--format=%e", f"--jobs={env['SLURM_JOB_ID']}"]
    try:
        answer = subprocess.run(command, env={**env, "SLURM_TIME_FORMAT": "%s"}, capture_output=True, text=True,
                                timeout=SQUEUE_S, check=True).stdout.strip()
        return str(int(answer))  # 'N/A' and 'NONE' are jobs without an end
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        log.warning("walltime: %s is not set, and squeue did not tell when job %s ends (%s)", SLURM_END,
                    env["SLURM_JOB_ID"], e)
        return ""


def deadline(max_runtime_seconds: float, env: Mapping[str, str], started: float) -> float | None:
    """When this process must have ended, in seconds of the monotonic clock, as is `started`. None
    without a walltime. The first that is set counts, and is logged: `max_runtime_seconds` (-1: not
    set), the end of the SLURM job (`slurm_end`), NANOCHAT_MAX_RUNTIME (seconds). ValueError for
    anything that is not such a number, and for an end that has passed."""
    if max_runtime_seconds != -1:
        name, text = "--max-runtime-seconds", str(max_runtime_seconds)
    elif text := slurm_end(env):
        name = SLURM_END
    elif text := env.get(MAX_RUNTIME, ""):
        name = MAX_RUNTIME
    else:
        if "GPT_SIMPLE_MAX_RUNTIME" in env:
            log.warning("GPT_SIMPLE_MAX_RUNTIME is set and not used; set %s", MAX_RUNTIME)
        return None
    passed_s, began, expected = 0.0, started, "a positive number of seconds"
    if name == SLURM_END:  # a time of the wall clock; the others count from the start
        passed_s, began = time.time(), time.monotonic()
        expected = "the unix time at which this job ends (unset it where it is left over from another)"
    try:
        left_s = float(text) - passed_s
    except ValueError:
        left_s = 0.0
    if not 0 < left_s < float("inf"):
        raise ValueError(f"{name}: got {text!r}, expected {expected}")
    log.info("walltime: %s left (%s)", duration(began + left_s - time.monotonic()), name)
    return began + left_s


def launch_began() -> float:
    """When this process, or the torchrun that started it, began, unix seconds; now, where the
    system does not tell."""
    ticks = process_start(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())
    if ticks is None:
        return time.time()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


class StopWatch:
    """Collects the reasons for this process to stop. Inside the context signals are noted, and a
    wait for object storage ends when one arrives; after it the previous handlers are back. Entered
    in a thread other than the main one, it leaves signals alone (Python's rule)."""

    ended = 0.0  # when this process left its last StopWatch, unix seconds

    def __init__(self, deadline: float | None = None, *, reserve_s: float = 0.0) -> None:
        self._deadline, self._reserve_s = deadline, reserve_s
        self._signals: list[int] = []
        self._first_int: float | None = None
        self._previous: dict[int, Any] = {}
        self._since = max(launch_began(), StopWatch.ended)  # an older flag is a leftover
        self._flagged = False
        self._last_look: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT_LOOKS)
        self._noted_s = 0.0  # of what was noted since the last look
        self._slowest: dict[str, float] = {}
        self._reason = ""

    def __enter__(self) -> "StopWatch":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._note_signal)
                signal.siginterrupt(number, number == signal.SIGINT)  # a library's system call is not cut short
        LAUNCH.stop = self.asked
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        LAUNCH.stop = lambda: False
        StopWatch.ended = time.time()
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler: no locks, no buffered output, no exception."""
        if not self._signals and os.environ.get("RANK", "0") == "0":  # one rank reports it
            again = "; Ctrl-C again after a second: ends at once, unsaved" * (number == signal.SIGINT)
            os.write(2, f"\n{signal.Signals(number).name}: finishing the step, then saving{again}\n".encode())
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._first_int is not None and now - self._first_int >= SAME_CTRL_C_S:
                os.write(2, b"second SIGINT: ended at once, nothing saved\n")
                os._exit(130)
            self._first_int = self._first_int or now
        self._signals.append(number)

    def ignore_stores(self) -> None:
        """The run is over: no wait for object storage lasts from now on."""
        LAUNCH.stop = lambda: True

    def check_flag(self, run_dir: Path) -> None:
        """Look for the flag file, and delete one that an earlier launch left. For the heartbeat of
        the run's owner, so that a step never waits for a disk."""
        flag, now = run_dir / FLAG_NAME, time.time()
        with contextlib.suppress(OSError):
            if not self._flagged and os.lstat(flag).st_mtime >= self._since:
                self._flagged = True
                os.utime(flag, (now, now), follow_symlinks=False)  # a date in the future would stop later launches, too
            elif not self._flagged:
                os.unlink(flag)

    def note(self, what: str, seconds: float) -> None:
        """Work other than a step took so many seconds since the last look. They do not count as
        part of the step, and from now on that much time is kept free before the next look."""
        self._noted_s += seconds
        self._slowest[what] = max(seconds, self._slowest.get(what, 0.0))

    def note_save(self, seconds: float) -> None:
        """A save took so many seconds: from now on half as much again is reserved for the last one."""
        self._reserve_s = max(self._reserve_s, SAVE_MARGIN * seconds)

    def asked(self) -> str:
        """'' or who asked this process to stop: a signal or the flag file. May be called at any
        time, wherever the process waits."""
        if not self._reason and self._signals:
            self._reason = signal.Signals(self._signals[0]).name
        if not self._reason and self._flagged:
            self._reason = "asked by scripts.stop"
        return self._reason

    def wanted(self, now: float | None = None) -> str:
        """'' or the reason to stop; the first one stays. Called once a step. `now`: monotonic
        seconds."""
        now = time.monotonic() if now is None else now
        if self._last_look is not None:
            self._steps.append(now - self._last_look - self._noted_s)
        self._last_look, self._noted_s = now, 0.0
        if not self.asked() and self._deadline is not None:
            left_s = self._deadline - now
            if left_s < max(self._steps, default=0.0) + sum(self._slowest.values()) + self._reserve_s:
                self._reason = f"walltime: {left_s:,.0f} s left"
        return self._reason


def join_reasons(reasons: Sequence[str]) -> str:
    """All ranks' reasons to stop (rank order, '' for none) as one, the first: 'walltime: ..',
    'SIGUSR1', or 'SIGTERM (rank 1)' if not all ranks got a signal."""
    rank, first = next(((rank, reason) for rank, reason in enumerate(reasons) if reason), (0, ""))
    return f"{first} (rank {rank})" if first.startswith("SIG") and not all(reasons) else first


def request_stop(run_dir: Path) -> None:
    """Ask a run to stop, whether a launch owns it already or is about to. ValueError if the flag
    is not a regular file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open_regular(run_dir / FLAG_NAME, os.O_WRONLY | os.O_CREAT) as file:
        os.utime(file.fileno(), (time.time(),) * 2)  # not by the clock of a file server


# ---- processes ----------------------------------------------------------------------------------

PROCESS = {"host": str, "pid": int, "start": str | None}  # what `identify` gives


def process_start(pid: int) -> str | None:
    """When a process of this machine started, in clock ticks since the boot; None if there is none
    (or only its zombie is left), and where the system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2:].split()  # after the name, which may contain anything
    return None if fields[0] in "ZX" else fields[19]


def identify() -> dict[str, Any]:
    """This process, so that others can tell whether it lives: host, pid, start. Plain values."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "start": process_start(os.getpid())}


def is_alive_here(process: Mapping[str, Any]) -> bool:
    """Whether a process that `identify` described is visible and alive here. Not so for one on
    another host or in another process namespace, and for a record that may be forged: a pid that is
    not positive, a start that is missing or not that of the process."""
    alive_since = process_start(process["pid"]) if process["pid"] > 0 else None
    return process["host"] == socket.gethostname() and alive_since is not None and alive_since == process["start"]


# ---- who owns a run -----------------------------------------------------------------------------

OWNER = {"launch": str, "since": str, **PROCESS}


class Owner:
    """The right of one launch to write into a run directory: as long as the owner's file there is
    the one that it has open and locked, with its record in it."""

    def __init__(self, run_dir: Path, file: BinaryIO, record: bytes) -> None:
        self.run_dir, self._file, self._record = run_dir, file, record

    def lost(self) -> str:
        """'' as long as this launch owns the run, otherwise a sentence that says so."""
        try:  # by opening the file: network file systems check their caches then
            with open_regular(self.run_dir / OWNER_NAME, os.O_RDONLY) as now:
                if os.path.sameopenfile(now.fileno(), self._file.fileno()) and now.read() == self._record:
                    return ""
        except (FileNotFoundError, NotADirectoryError, ValueError):  # no such file, or something else in its place
            pass
        except OSError:  # unknown; the next look may tell
            return ""
        return (f"{self.run_dir}: this launch no longer owns the run: its files were removed, or another launch took "
                f"it over; it ends at once")

    def release(self) -> None:
        """Give up the run: another launch may claim it from now on."""
        self._file.close()


def _lock(file: BinaryIO, kind: int) -> bool | None:
    """Take a lock unless another process has it: whether it was taken, None where the file system
    has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _last_owner(run_dir: Path) -> tuple[bytes, bool]:
    """The record of a run's last owner, empty if there is none, and whether it still owns the run.
    ValueError if the file is not a regular one."""
    try:
        with open_regular(run_dir / OWNER_NAME, os.O_RDONLY) as file:
            free, record = _lock(file, fcntl.LOCK_SH), file.read()
    except (FileNotFoundError, NotADirectoryError):
        return b"", False
    if free is None:
        state = read_state(run_dir)
        return record, state is not None and state["status"] in ACTIVE and _beats(state)
    return record, not free


def check_free(run_dir: Path) -> bytes:
    """Check that no launch owns the run, changing nothing. Returns the last owner's record, which
    `claim` needs. ValueError names the process that owns the run."""
    record, alive = _last_owner(run_dir)
    if not alive:
        return record
    try:
        owner = parse_json(record, "", OWNER)
        who = f"host {owner['host']!a}, pid {owner['pid']}, since {owner['since']!a}"
    except ValueError:
        who = f"{run_dir / OWNER_NAME} does not name it"
    raise ValueError(f"{run_dir}: another launch owns this run: {who}; end it with python -m scripts.stop "
                     f"{run_dir.name} (--force if it is stopped or hangs), or name another run with --model-tag")


def claim(run_dir: Path, before: bytes) -> Owner:
    """Become the owner of a run whose last owner left the record `before` (see `check_free`).
    ValueError if another launch owns the run, or has owned it since."""
    outdated = ValueError(f"{run_dir}: another launch owned this run a moment ago; start the command again")
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
            # the file that was opened may have been replaced before it was locked
            same = os.path.samestat(os.fstat(file.fileno()), os.lstat(run_dir / OWNER_NAME))
        except FileNotFoundError:
            raise outdated from None
        if locked is False or not same or file.read() != before:
            raise outdated
        who = {"launch": uuid.uuid4().hex, "since": time.strftime("%Y-%m-%d %H:%M:%S"), **identify()}
        record = json.dumps(who).encode()
        file.seek(0)
        file.write(record)
        file.truncate(len(record))
        os.register_at_fork(after_in_child=file.close)  # it would keep the lock; executed programs do not inherit it
        stack.pop_all()
    return Owner(run_dir, file, record)


def acquire(run_dir: Path) -> Owner:
    """`check_free`, then `claim`."""
    return claim(run_dir, check_free(run_dir))


# ---- where a run stands -------------------------------------------------------------------------

NUMBER = int | float | None
NEWS = {  # what a run reports while it trains, and the shape of each value
    "status": str, "reason": str, "step": NUMBER, "num_iterations": NUMBER, "loss": NUMBER, "val_bpb": NUMBER,
    "tokens": NUMBER, "tokens_per_s": NUMBER, "eta_s": NUMBER, "checkpoint": str | None, "phase": int | str | None,
    "skipped": int | None | object}  # object: older programs did not report it
STATE = {**NEWS, "format_version": int, "world_size": int, "ranks": [PROCESS],
         "started": float, "heartbeat": float}
LARGEST, LATEST = 1e18, 1e11  # of a number, and of a time in unix seconds (the year 5138)


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """The state of a run, None if it has none. ValueError, which names file and field, if it is
    corrupt or not a regular file."""
    path = run_dir / STATE_NAME
    remedy = "delete it: the next launch of the run writes a new one"
    try:
        with open_regular(path, os.O_RDONLY) as f:
            state = parse_json(f.read(), path, STATE, way_out=remedy)
    except (FileNotFoundError, NotADirectoryError):
        return None
    for name, value in state.items():
        limit = LATEST if name in ("started", "heartbeat") else LARGEST
        if isinstance(value, (int, float)) and not abs(value) < limit:  # true of NaN, too
            raise ValueError(f"{path}: {name}: got {str(value)[:30]}, expected a number below {limit:.0e}; {remedy}")
    known = state["format_version"] == FORMAT_VERSION and state["status"] in (*ACTIVE, *EXIT_CODES)
    if not (known and state["ranks"]):
        raise ValueError(f"{path}: this version of the program does not write such a state; {remedy}")
    return state


def heartbeat_age_s(state: Mapping[str, Any]) -> float:
    """How old the heartbeat is by our clock, seconds; negative if it is from the future."""
    return time.time() - state["heartbeat"]


def _beats(state: Mapping[str, Any]) -> bool:
    """Whether rank 0 is visible here, or its heartbeat is young: for where locks cannot tell."""
    return is_alive_here(state["ranks"][0]) or abs(heartbeat_age_s(state)) <= HEARTBEAT_LIMIT_S


def liveness(run_dir: Path, state: Mapping[str, Any]) -> str:
    """ended (its state says so), alive, or dead (its state says that it is active, but nothing holds
    the run's lock, nor does it beat on another host, which locks may not reach)."""
    if state["status"] in EXIT_CODES:
        return "ended"
    elsewhere = state["ranks"][0]["host"] != socket.gethostname()
    return "alive" if _last_owner(run_dir)[1] or (elsewhere and _beats(state)) else "dead"


def exit_code(run_dir: Path, state: Mapping[str, Any]) -> int:
    """What scripts.status --exit-code answers: 0 completed, 10 stopped (the same command resumes
    it), 3 halted (a person must decide), 1 failed or dead, 20 alive."""
    return {"ended": EXIT_CODES.get(state["status"], 1), "alive": EXIT_ALIVE, "dead": 1}[liveness(run_dir, state)]


def _replace(path: Path, value: Any) -> None:
    """Rewrite a small JSON file by a rename, without forcing it to disk. Only one thread at a time
    does so. A leftover or a link under the temporary name is deleted, never written to."""
    temporary = path.with_name(f"{path.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as f:
        f.write(json.dumps(value) + "\n")
    os.replace(temporary, path)


class RunState:
    """Rank 0's writer of the state. A context: leaving it without a final status makes the status
    failed, with the exception as reason. `ranks`: the values of `identify` on each rank, in rank
    order. `stop`: learns of the flag file. Only `refresh` uses the disk, and no step waits for it:
    the heartbeat calls it (nanochat/watchdog.py)."""

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
        """Take in news (the names in NEWS); the next `refresh` writes it. After a final status
        nothing changes any more."""
        assert news.keys() <= NEWS.keys() and news.get("status", "starting") in (*ACTIVE, *EXIT_CODES)
        if self._state["status"] not in EXIT_CODES:
            self._state.update(news)

    def refresh(self) -> str:
        """Look for the flag file, write the state if there is news or a heartbeat is due, and give
        up the run after a final one. '' or why this launch must end: the run is lost, and nothing
        is written."""
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
        """Write how the run ended, and give it up. The first final status stays. A disk that does
        not answer delays this by a few seconds."""
        self.update(status=status, reason=reason)
        writer = threading.Thread(target=self.refresh, name="last-state", daemon=True)
        writer.start()
        writer.join(timeout=CLOSE_S)

    def __enter__(self) -> "RunState":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        reason = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
        if isinstance(error, StopAsked):
            self.close("stopped", str(error))
        self.close("failed", "ended without a status" if error is None else reason)


def write_completed(run_dir: Path, step: int, reason: str) -> None:
    """Write the state of a run that no launch here trained to `step`: `reason` says where its
    checkpoint `final` comes from."""
    state = RunState(acquire(run_dir), [identify()], num_iterations=step, step=step, checkpoint="final")
    state.close("completed", reason)
