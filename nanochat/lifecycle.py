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

The live state of a run: a small file that says where it stands, and the right to write into its directory.

    RUN/.run_state.json        rewritten by rank 0 about once a second while there is news, else as a heartbeat
    RUN/.owner-000007.json     which launch owns the run; the highest number counts

Status: starting -> running -> stopping -> one of stopped, halted, completed, failed. `liveness` holds that against
the world: a run that says "running" and whose process is gone is dead.

**One owner.** Two launches that write the same run would mix two histories, so a launch first claims the run:

    .owner-000007  (A, dead)       B and C both find A dead; both try to link their own, whole file to .owner-000008
    .owner-000008  (B)             one link succeeds, the other launch looks again, finds B alive, and gives up

A number is never used twice: an owner that ends marks its file as released and leaves it. So a launch that was
delayed between its look and its claim finds its number taken, or, where the file has been tidied away since, a
higher one. A lock that is deleted at the end, or renamed away when it is stale, has no such memory: the delayed
launch would rename a living owner's lock. An owner that finds a higher number (it slept for minutes; it was taken
for dead) ends itself.

**Alive** means, in the same place (boot of the machine and process namespace): the process exists and started when
the record says. From any other place: the heartbeat changes while we watch. Clocks are not compared for that, so
neither a heartbeat from the future nor a clock that is minutes off can lock a run for ever or let two in; the age of
the heartbeat only shortens the watching, which lasts from 25 to 60 s where the owner is gone, and until its next
heartbeat where not.

Nothing that goes wrong in writing the state stops training: it is told once. The file is renamed into place but not
forced to disk (that may take a training step's time, and after a power cut the state is dead anyway).
"""

import contextlib
import errno
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger(__name__)

STATE_NAME = ".run_state.json"
FORMAT_VERSION = 1
ACTIVE = ("starting", "running", "stopping")
ENDED = ("stopped", "halted", "completed", "failed")
EXIT_CODES = {"completed": 0, "stopped": 10, "halted": 3, "failed": 1}
EXIT_ALIVE = 20
HEARTBEAT_S = 10.0
HEARTBEAT_LIMIT_S = 60.0  # older: dead, as far as another host can tell
WRITE_EVERY_S = 1.0
OWNER_NAME = re.compile(r"\.owner-(\d{6,})\.json")


# ---- processes ------------------------------------------------------------------------------------------------------

def process_start(pid: int) -> str | None:
    """When a process of this machine started, as an opaque text; None if there is none (or only its corpse is)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self/stat").exists() else _process_start_by_ps(pid)
    fields = stat[stat.rindex(")") + 2:].split()  # behind the name, which may hold anything
    return None if fields[0] in "ZX" else fields[19]


def _process_start_by_ps(pid: int) -> str | None:
    found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return found or None


def place() -> str:
    """Where process ids mean the same: this boot of this machine, this process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def identify() -> dict[str, Any]:
    """This process, so that others can tell whether it lives: host, place, pid, start. Plain values."""
    return {"host": socket.gethostname(), "place": place(), "pid": os.getpid(), "start": process_start(os.getpid())}


def is_alive_here(process: dict[str, Any]) -> bool | None:
    """Whether a process that `identify` described lives; None if it is in another place, so that we cannot tell."""
    if process.get("place") != place():
        return None
    return process_start(process["pid"]) == process["start"]


# ---- reading --------------------------------------------------------------------------------------------------------

def read_state(run_dir: Path) -> dict[str, Any] | None:
    """The state of a run, None if it has none. ValueError if the file is not one of ours."""
    path = run_dir / STATE_NAME
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise ValueError(f"{path}: not valid JSON ({e}); the next launch of the run writes it anew") from e
    if not isinstance(state, dict) or state.get("format_version") != FORMAT_VERSION or (
            state.get("status") not in ACTIVE + ENDED):
        raise ValueError(f"{path}: expected a state of format_version {FORMAT_VERSION}; it was written by another "
                         f"version of this program")
    return state


def heartbeat_age_s(state: dict[str, Any], now: float | None = None) -> float:
    """How old the heartbeat is by our clock, seconds; negative if it is from the future. `now`: unix seconds."""
    return (time.time() if now is None else now) - state["heartbeat"]


def liveness(state: dict[str, Any], now: float | None = None) -> str:
    """ended (it says so), alive, or dead (it says it is active, but its process is gone; from another place: its
    heartbeat is further away than the limit, in either direction)."""
    if state["status"] in ENDED:
        return "ended"
    here = is_alive_here(state["ranks"][0])
    if here is None:
        here = abs(heartbeat_age_s(state, now)) <= HEARTBEAT_LIMIT_S
    return "alive" if here else "dead"


def exit_code(state: dict[str, Any], now: float | None = None) -> int:
    """What scripts.status --exit-code answers: 0 completed, 10 stopped (the same command goes on with it), 3 halted
    (a person must decide), 1 failed or dead, 20 alive."""
    known = liveness(state, now)
    return EXIT_CODES[state["status"]] if known == "ended" else EXIT_ALIVE if known == "alive" else 1


# ---- owning a run ---------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Owner:
    """The right of one launch to write into a run directory."""

    run_dir: Path
    generation: int
    launch: str

    def superseded(self) -> bool:
        """Whether another launch has taken over, believing this one dead."""
        return _highest(self.run_dir) > self.generation

    def release(self) -> None:
        """Give the right up. Twice is fine, and so is being superseded."""
        path = _owner_path(self.run_dir, self.generation)
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(path.read_bytes())
            _replace(path, {**record, "released": True})


def check_free(run_dir: Path) -> int:
    """Look whether no launch that lives owns the run, changing nothing. Returns what `claim` must be told. Watches a
    launch in another place for up to a minute.

    ValueError names the launch that owns it: host, pid, since when, age of its heartbeat."""
    generation = _highest(run_dir)
    try:
        record = json.loads(_owner_path(run_dir, generation).read_bytes()) if generation else {"released": True}
    except FileNotFoundError:  # tidied away by a launch that has just taken over
        return check_free(run_dir)
    except ValueError:
        record = {}  # half written, on a file system without hard links
    if not record.get("released") and _owner_lives(run_dir, record):
        raise ValueError(f"{run_dir}: another launch is at work on this run: {_describe(run_dir, record)}; end it "
                         f"with python -m scripts.stop {run_dir.name}, or name another run with --model-tag")
    if not record.get("released"):
        log.warning("%s: taking over from a launch that is gone: %s", run_dir, _describe(run_dir, record))
    return generation


def claim(run_dir: Path, generation: int) -> Owner:
    """Become the owner, in succession to the generation that `check_free` returned. ValueError if another launch has
    become it since."""
    run_dir.mkdir(parents=True, exist_ok=True)
    owner = Owner(run_dir, generation + 1, uuid.uuid4().hex)
    record = {"launch": owner.launch, "since": time.time(), "released": False, **identify()}
    if not _link_whole(_owner_path(run_dir, owner.generation), record) or owner.superseded():
        check_free(run_dir)  # refuses, naming it
        raise ValueError(f"{run_dir}: another launch was at work on this run a moment ago; start the command again")
    for path in _owner_files(run_dir):
        if path != _owner_path(run_dir, owner.generation) and not owner.superseded():
            path.unlink(missing_ok=True)
    return owner


def acquire(run_dir: Path) -> Owner:
    """`check_free`, then `claim`."""
    return claim(run_dir, check_free(run_dir))


def _owner_path(run_dir: Path, generation: int) -> Path:
    return run_dir / f".owner-{generation:06d}.json"


def _owner_files(run_dir: Path) -> list[Path]:
    return [p for p in run_dir.iterdir() if OWNER_NAME.fullmatch(p.name)] if run_dir.is_dir() else []


def _highest(run_dir: Path) -> int:
    """The generation that counts, 0 if the run was never owned."""
    return max((int(p.name[len(".owner-"):-len(".json")]) for p in _owner_files(run_dir)), default=0)


def _link_whole(path: Path, record: dict[str, Any]) -> bool:
    """Make a file appear with all its content, or return False because it is there."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    data = json.dumps(record).encode()
    temporary.write_bytes(data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return os.stat(temporary).st_nlink == 2  # NFS: it was ours, the first answer was lost
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return _create_exclusive(path, data)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _create_exclusive(path: Path, data: bytes) -> bool:
    """The same where there are no hard links; for an instant the file is there and not whole."""
    try:
        with open(path, "xb") as f:
            f.write(data)
    except FileExistsError:
        return False
    return True


def _owner_lives(run_dir: Path, record: dict[str, Any]) -> bool:
    here = is_alive_here(record)
    if here is not None:
        return here
    first = _state_of(run_dir, record)
    if first is not None and first["status"] in ENDED:
        return False
    age = heartbeat_age_s(first) if first else 0.0
    patience = min(max(HEARTBEAT_LIMIT_S - age, 2.5 * HEARTBEAT_S), HEARTBEAT_LIMIT_S)
    log.warning("%s belongs to a launch in another place: %s; watching its heartbeat for up to %.0f s", run_dir,
                _describe(run_dir, record), patience)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        time.sleep(min(2.0, HEARTBEAT_S / 5))
        with contextlib.suppress(OSError):
            _replace(run_dir / ".look.tmp", None)  # a change in the folder: network file systems look afresh
        now = _state_of(run_dir, record)
        if (now and now["writes"]) != (first and first["writes"]):
            return now is None or now["status"] not in ENDED
    return False


def _state_of(run_dir: Path, record: dict[str, Any]) -> dict[str, Any] | None:
    """The state, if the launch of this record wrote it (any launch, if the record cannot be read)."""
    try:
        state = read_state(run_dir)
    except ValueError:
        return None
    return state if state and record.get("launch") in (None, state["launch"]) else None


def _describe(run_dir: Path, record: dict[str, Any]) -> str:
    since = record.get("since")
    state = _state_of(run_dir, record)
    return (f"host {record.get('host', 'unknown')}, pid {record.get('pid', 'unknown')}, since "
            + (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)) if since else "unknown")
            + (f", heartbeat {heartbeat_age_s(state):,.0f} s ago" if state else ", no heartbeat yet"))


def _replace(path: Path, value: Any) -> None:
    """Rewrite a small JSON file by a rename, without forcing it to disk; None removes it at once."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(json.dumps(value) + "\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if value is None:
        path.unlink()


# ---- writing --------------------------------------------------------------------------------------------------------

FIELDS: dict[str, Any] = {  # what `update` takes, and what it is until it is told
    "status": "starting", "reason": "", "step": None, "num_iterations": None, "loss": None, "tokens": None,
    "tokens_per_s": None, "eta_s": None, "checkpoint": None, "phase": None}


class RunState:
    """Rank 0's writer of the state. A context: leaving it without a final status makes the status failed, with the
    exception as reason. `ranks`: what `identify` gave on each rank, in rank order.

    A daemon thread writes what `update` was told and the heartbeat, so that a step never waits for a disk, and a long
    compilation is not taken for death. All methods may be called from any thread."""

    def __init__(self, owner: Owner, ranks: Sequence[dict[str, Any]], **fields: Any) -> None:
        self._owner, self._path = owner, owner.run_dir / STATE_NAME
        now = time.time()
        self._state = {"format_version": FORMAT_VERSION, **FIELDS, "launch": owner.launch, "world_size": len(ranks),
                       "ranks": list(ranks), "started": now, "heartbeat": now, "writes": 0}
        self._lock = threading.Lock()  # of the file
        self._news, self._warned, self._written_at = True, False, -math.inf
        self._over = threading.Event()
        self.update(**fields)
        self._write()
        self._thread = threading.Thread(target=self._keep_up, name="run-state", daemon=True)
        self._thread.start()

    @property
    def status(self) -> str:
        return self._state["status"]

    def update(self, **fields: Any) -> None:
        """Take in news (the names in FIELDS). A new status or checkpoint is written before this returns, other news
        within about a second. After a final status nothing changes any more."""
        if unknown := fields.keys() - FIELDS:
            raise TypeError(f"RunState.update: no such field {', '.join(sorted(unknown))}; expected "
                            f"{', '.join(FIELDS)}")
        if fields.get("status", "starting") not in ACTIVE + ENDED:
            raise ValueError(f"RunState.update: status {fields['status']!r}, expected one of {ACTIVE + ENDED}")
        if self.status in ENDED:
            return
        changed = any(name in fields and fields[name] != self._state[name] for name in ("status", "checkpoint"))
        self._state.update(fields)
        self._news = True
        if changed:
            self._write()

    def close(self, status: str, reason: str = "") -> None:
        """Say how the run ended, and give up owning it. The first final status stays."""
        self.update(status=status, reason=reason)
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        self._owner.release()

    def __enter__(self) -> "RunState":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        told = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
        self.close("failed", "ended without saying how" if error is None else told)

    def _keep_up(self) -> None:
        while not self._over.wait(WRITE_EVERY_S):
            if self._news or time.monotonic() - self._written_at >= HEARTBEAT_S:
                self._end_if_superseded()
                self._write()

    def _end_if_superseded(self) -> None:
        with contextlib.suppress(OSError):
            if self._owner.superseded():
                os.write(2, f"error: {self._owner.run_dir}: another launch took this run over, believing this one "
                            f"dead; ended at once so that only one writes\n".encode())
                os._exit(1)

    def _write(self) -> None:
        if not self._lock.acquire(timeout=5):  # another thread is stuck in a write
            return
        try:
            self._news, self._written_at = False, time.monotonic()
            self._state.update(heartbeat=time.time(), writes=self._state["writes"] + 1)
            _replace(self._path, {key: _finite(value) for key, value in list(self._state.items())})
        except OSError as e:
            if not self._warned:
                log.warning("%s: cannot be written (%s); training goes on, scripts.status may take it for dead",
                            self._path, e.strerror)
            self._warned = True
        finally:
            self._lock.release()


def _finite(value: Any) -> Any:
    """NaN and infinities are not JSON."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
