"""
How a run ends, where it stands, and which launch owns it.

    signal: its handler notes it --.
    flag file: rank 0 looks -------+--> stop.wanted(): '' or why --> into the step's sum --> all stop
    walltime: every rank ----------'

    RUN/.shutdown_requested    written by scripts.stop; it counts by being there
    RUN/.run_state.json        where the run stands, and a heartbeat; rewritten by rank 0's watchdog
    RUN/.owner-000007.json     which launch may write here; the highest number counts

**Stopping.** Each process has one `StopWatch`, entered before anything slow. A signal never
interrupts, for a handler that raised would leave collectives half done on one rank: it is noted,
and honoured at the next look. The answer is added to a sum that all ranks make anyway, so one
rank's signal stops all of them after the same step (what torchrun makes of signals: docs/clusters.md).
A run stops for its walltime when the next look would come too late to save:

    started                                      look        next look      deadline
    |---------------------------------------------|--step, looks--|--reserve--|

A step may take as long as the slowest of the last ones, and each of what comes between steps, an
evaluation, samples, a copy for a save, as long as it ever did in this launch.

**Status.** starting -> running -> stopping -> one of stopped, halted, completed, failed. A run
that says it is running and whose process is gone is dead. The state is not forced to disk, which
may take as long as a step, and nothing that goes wrong in writing it stops training.

**One owner.** Two launches that write the same run would mix two histories, so each first claims
it:

    .owner-000007  (A, dead)     B and C both find A dead; both try to create .owner-000008
    .owner-000008  (B)           one of them does; the other looks again, finds B alive, and gives up

Records stay, so no number is used twice: a launch that was delayed between its look and its claim
finds its number taken. An owner that ends says so in its state. The owner looks at its record every
other second; where it is gone or no longer the newest (the run directory was removed; the owner
slept and was taken for dead), its watchdog ends all its ranks.

**Alive** means, in the same place (boot of the machine and process namespace): the process exists
and started when the record says. From any other place, and where the system has no /proc: the
heartbeat changes while we watch. Clocks of two machines are not compared for that, so a clock that
is hours off neither locks a run nor lets two in."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from nanochat.common import LAUNCH, StopAsked, duration, read_json
from nanochat.run_dir import finite

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
FLAG_NAME = ".shutdown_requested"
STATE_NAME = ".run_state.json"
OWNER_NAME = re.compile(r"\.owner-(\d{6,})\.json")
FORMAT_VERSION = 1
ACTIVE = ("starting", "running", "stopping")
EXIT_CODES = {"completed": 0, "stopped": 10, "halted": 3, "failed": 1}  # of runs that have ended
EXIT_ALIVE = 20

SLURM_END, MAX_RUNTIME = "SLURM_JOB_END_TIME", "NANOCHAT_MAX_RUNTIME"  # environment variables
SQUEUE_S = 10.0  # how long SLURM's controller may take to answer
LOOK_EVERY_S = 1.0  # for the flag file
SAME_CTRL_C_S = 1.0  # SIGINTs closer together than this are one
RECENT_LOOKS = 16
SAVE_MARGIN = 1.5  # of the slowest save so far
HEARTBEAT_S = 10.0
HEARTBEAT_LIMIT_S = 60.0  # older: dead, as far as another host can tell
CLOSE_S = 5.0  # how long the last state may take to be written
WATCH_S = 40.0  # how long the heartbeat of another host is watched for a change


# ---- when to stop -------------------------------------------------------------------------------

def slurm_end(env: Mapping[str, str]) -> str:
    """When this process's SLURM job ends, as unix seconds in text; empty outside of a job and
    where nobody knows. SLURM_JOB_END_TIME, where SLURM sets it (22.05 does not), else what squeue
    answers: rank 0 alone asks, since a controller should not hear from every rank at once, and a
    stop of one rank stops all."""
    told = env.get(SLURM_END, "")
    if told or not env.get("SLURM_JOB_ID") or env.get("RANK", "0") != "0":
        return told
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
    """When this process must have ended, on the monotonic clock, of which `started` is a time too.
    None without a walltime. The first that is set counts, and is logged: `max_runtime_seconds` (-1:
    not set), the end of the SLURM job (`slurm_end`), NANOCHAT_MAX_RUNTIME (seconds). ValueError for
    what is no such number, and for an end that has passed."""
    if max_runtime_seconds != -1:
        name, text = "--max-runtime-seconds", str(max_runtime_seconds)
    elif text := slurm_end(env):
        name = SLURM_END
    elif text := env.get(MAX_RUNTIME, ""):
        name = MAX_RUNTIME
    else:
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


class StopWatch:
    """Collects the reasons for this process to stop. Inside the context signals are noted, and
    whoever waits for a store gives up when one came; behind it their previous handlers are back.
    Entered in another thread than the main one, it leaves signals alone (Python's rule)."""

    def __init__(self, deadline: float | None = None, *, reserve_s: float = 0.0) -> None:
        self._deadline, self._reserve_s = deadline, reserve_s
        self._signals: list[int] = []
        self._first_int: float | None = None
        self._previous: dict[int, Any] = {}
        self._run_dir: Path | None = None  # where rank 0 looks for the flag file
        self._next_flag_look = 0.0
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
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler: no locks, no buffered output, no exception."""
        if not self._signals and os.environ.get("RANK", "0") == "0":  # one rank says so
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
        """The run is over: nobody waits for a store from now on."""
        LAUNCH.stop = lambda: True

    def clear(self, run_dir: Path) -> None:
        """For rank 0, once it owns the run: remove a flag that was left over, and look for a new
        one from now on."""
        self._run_dir = run_dir
        (run_dir / FLAG_NAME).unlink(missing_ok=True)

    def note(self, what: str, seconds: float) -> None:
        """Something other than a step took so long since the last look. It is no part of the step,
        and the time for it is kept free before the next look from now on."""
        self._noted_s += seconds
        self._slowest[what] = max(seconds, self._slowest.get(what, 0.0))

    def note_save(self, seconds: float) -> None:
        """A save took so long: half as much again is kept for the last one from now on."""
        self._reserve_s = max(self._reserve_s, SAVE_MARGIN * seconds)

    def asked(self, now: float | None = None) -> str:
        """'' or who asked this process to stop: a signal or the flag file. May be called at any
        time, wherever the process waits. `now`: monotonic seconds."""
        now = time.monotonic() if now is None else now
        if not self._reason and self._signals:
            self._reason = signal.Signals(self._signals[0]).name
        if not self._reason and self._run_dir is not None and now >= self._next_flag_look:
            self._next_flag_look = now + LOOK_EVERY_S
            self._reason = "asked by scripts.stop" if os.path.lexists(self._run_dir / FLAG_NAME) else ""
        return self._reason

    def wanted(self, now: float | None = None) -> str:
        """'' or why to stop, in words; the first reason stays. Called once a step. `now`:
        monotonic seconds."""
        now = time.monotonic() if now is None else now
        if self._last_look is not None:
            self._steps.append(now - self._last_look - self._noted_s)
        self._last_look, self._noted_s = now, 0.0
        if not self.asked(now) and self._deadline is not None:
            left_s = self._deadline - now
            if left_s < max(self._steps, default=0.0) + sum(self._slowest.values()) + self._reserve_s:
                self._reason = f"walltime: {left_s:,.0f} s left"
        return self._reason


def join_reasons(reasons: Sequence[str]) -> str:
    """All ranks' reasons to stop (rank order, '' for none) as one, the first: 'walltime: ..',
    'SIGUSR1', or 'SIGTERM (rank 1)' where not all ranks had a signal."""
    rank, told = next(((rank, reason) for rank, reason in enumerate(reasons) if reason), (0, ""))
    return f"{told} (rank {rank})" if told.startswith("SIG") and not all(reasons) else told


# ---- processes ----------------------------------------------------------------------------------

PROCESS = {"host": str, "place": str, "pid": int, "start": str | None}  # what `identify` gives


def process_start(pid: int) -> str | None:
    """When a process of this machine started, as an opaque text; None if there is none (or only
    its corpse is), and where the system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2:].split()  # behind the name, which may hold anything
    return None if fields[0] in "ZX" else fields[19]


def place() -> str:
    """Where process ids mean the same: this boot of this machine, this process namespace. Empty
    where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def identify() -> dict[str, Any]:
    """This process, so that others can tell whether it lives: host, place, pid, start. Plain
    values."""
    return {"host": socket.gethostname(), "place": place(), "pid": os.getpid(), "start": process_start(os.getpid())}


def is_alive_here(process: Mapping[str, Any]) -> bool | None:
    """Whether a process that `identify` described lives; None if it is in another place, so that
    we cannot tell."""
    here = place()
    return process_start(process["pid"]) == process["start"] if here and process["place"] == here else None


# ---- where a run stands -------------------------------------------------------------------------

NUMBER = int | float | None
NEWS = {  # what a run tells of itself while it goes on, and the shape of each
    "status": str, "reason": str, "step": NUMBER, "num_iterations": NUMBER, "loss": NUMBER, "val_bpb": NUMBER,
    "tokens": NUMBER, "tokens_per_s": NUMBER, "eta_s": NUMBER, "checkpoint": str | None, "phase": int | str | None,
    "skipped": int | None | object}  # object: an older program did not tell it
STATE = {**NEWS, "format_version": int, "launch": str, "world_size": int, "ranks": [PROCESS],
         "started": float, "heartbeat": float}


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """The state of a run, None if it has none. ValueError, which names file and field, if it is
    broken."""
    path = run_dir / STATE_NAME
    way_out = "the next launch of the run writes it anew"
    try:
        state = read_json(path, STATE, way_out=way_out)
    except FileNotFoundError:
        return None
    known = state["format_version"] == FORMAT_VERSION and state["status"] in (*ACTIVE, *EXIT_CODES)
    if not (known and state["ranks"]):
        raise ValueError(f"{path}: not a state as this version of the program writes it; {way_out}")
    return state


def heartbeat_age_s(state: Mapping[str, Any]) -> float:
    """How old the heartbeat is by our clock, seconds; negative if it is from the future."""
    return time.time() - state["heartbeat"]


def liveness(state: Mapping[str, Any]) -> str:
    """ended (it says so), alive, or dead (it says it is active, but its process is gone; from
    another place: its heartbeat is further away than the limit, in either direction)."""
    if state["status"] in EXIT_CODES:
        return "ended"
    alive = is_alive_here(state["ranks"][0])
    if alive is None:
        alive = abs(heartbeat_age_s(state)) <= HEARTBEAT_LIMIT_S
    return "alive" if alive else "dead"


def exit_code(state: Mapping[str, Any]) -> int:
    """What scripts.status --exit-code answers: 0 completed, 10 stopped (the same command goes on
    with it), 3 halted (a person must decide), 1 failed or dead, 20 alive."""
    known = liveness(state)
    return EXIT_CODES[state["status"]] if known == "ended" else EXIT_ALIVE if known == "alive" else 1


def _replace(path: Path, value: Any) -> None:
    """Rewrite a small JSON file by a rename, without forcing it to disk. One process and thread
    does so."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(value) + "\n")
    os.replace(temporary, path)


# ---- who owns it --------------------------------------------------------------------------------

OWNER = {"launch": str, "since": float, **PROCESS}


@dataclass(frozen=True)
class Owner:
    """The right of one launch to write into a run directory: `launch`, its own name, in the record
    of this generation."""

    run_dir: Path
    generation: int
    launch: str

    def lost(self) -> str:
        """'' as long as this launch owns the run, else a sentence that says what has happened."""
        newest = 0
        try:
            newest = newest_owner(self.run_dir)
            if read_json(owner_path(self.run_dir, newest), {"launch": str})["launch"] == self.launch:
                return ""
        except FileNotFoundError:
            pass
        except (OSError, ValueError):
            return ""  # nobody can tell now; the next look may
        why = "its files were removed while it trains" if newest < self.generation else "another launch took it over"
        return f"{self.run_dir}: this launch does not own the run any more: {why}; ended at once"


def owner_path(run_dir: Path, generation: int) -> Path:
    return run_dir / f".owner-{generation:06d}.json"


def newest_owner(run_dir: Path) -> int:
    """The generation of the newest record of an owner; 0 if the run never had one."""
    names = os.listdir(run_dir) if run_dir.is_dir() else []
    return max((int(match[1]) for match in map(OWNER_NAME.fullmatch, names) if match), default=0)


def check_free(run_dir: Path) -> int:
    """Look whether no launch that lives owns the run, changing nothing. Returns what `claim` must
    be told. Watches a launch in another place for a while. ValueError names the launch that owns
    it."""
    generation = newest_owner(run_dir)
    record = _read_owner(owner_path(run_dir, generation))
    if record is None or _told_by(run_dir, record).get("status") in EXIT_CODES:
        return generation
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["since"]))
    told = f"host {record['host']}, pid {record['pid']}, since {since}"
    alive = is_alive_here(record)
    if alive is None:
        log.warning("%s belongs to a launch in another place: %s; watching its heartbeat for %.0f s",
                    run_dir, told, WATCH_S)
        alive = _beats(run_dir, record)
    if alive:
        raise ValueError(f"{run_dir}: another launch is at work on this run: {told}; end it with python -m "
                         f"scripts.stop {run_dir.name}, or name another run with --model-tag")
    log.warning("%s: taking over from a launch that is gone: %s", run_dir, told)
    return generation


def claim(run_dir: Path, generation: int) -> Owner:
    """Become the owner, in succession to the generation that `check_free` returned. ValueError if
    another launch has become it since."""
    run_dir.mkdir(parents=True, exist_ok=True)
    owner = Owner(run_dir, generation + 1, uuid.uuid4().hex)
    try:
        with open(owner_path(run_dir, owner.generation), "x") as f:
            f.write(json.dumps({"launch": owner.launch, "since": time.time(), **identify()}) + "\n")
        if newest_owner(run_dir) > owner.generation:  # the place was set aside, and begun anew
            owner_path(run_dir, owner.generation).unlink()
            raise FileExistsError
    except FileExistsError:
        check_free(run_dir)  # refuses, naming it
        raise ValueError(f"{run_dir}: another launch was at work on this run a moment ago; start the command "
                         f"again") from None
    return owner


def acquire(run_dir: Path) -> Owner:
    """`check_free`, then `claim`."""
    return claim(run_dir, check_free(run_dir))


def _read_owner(path: Path) -> dict[str, Any] | None:
    """The record of an owner, None if there is none. One that is broken is told of and counts as
    none: it is no dead end. (A launch that is writing it this moment finds itself succeeded, and
    ends.)"""
    for last_try in (False, True):
        try:
            return read_json(path, OWNER, way_out="it is replaced")
        except FileNotFoundError:
            break
        except ValueError as e:
            log.warning("%s", e) if last_try else time.sleep(0.3)
    return None


def _told_by(run_dir: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The state that an owner's launch told; {} where it is broken or another launch's."""
    try:
        state = read_state(run_dir) or {}
    except ValueError as e:
        log.warning("%s", e)
        return {}
    return state if state.get("launch") == record["launch"] else {}


def _beats(run_dir: Path, record: Mapping[str, Any]) -> bool:
    """Whether the heartbeat of a launch in another place changes while we watch."""
    first, end = _told_by(run_dir, record), time.monotonic() + WATCH_S
    while time.monotonic() < end:
        time.sleep(HEARTBEAT_S / 5)
        os.listdir(run_dir)  # network file systems look afresh
        if (now := _told_by(run_dir, record)) != first:
            return now.get("status") not in EXIT_CODES
    return False


# ---- telling ------------------------------------------------------------------------------------

class RunState:
    """Rank 0's writer of the state. A context: leaving it without a final status makes the status
    failed, with the exception as reason. `ranks`: what `identify` gave on each rank, in rank
    order.

    A daemon thread writes what `update` was told and the heartbeat, and looks whether this launch
    still owns the run, so that neither a step nor the watchdog ever waits for a disk, and a long
    compilation is not taken for death. Nothing is written where the run is lost. All methods may
    be called from any thread."""

    def __init__(self, owner: Owner, ranks: Sequence[dict[str, Any]], **news: Any) -> None:
        self.owner, self._path = owner, owner.run_dir / STATE_NAME
        empty = {name: "" if shape is str else None for name, shape in NEWS.items()}
        self._state: dict[str, Any] = {
            **empty, "format_version": FORMAT_VERSION, "status": "starting", "launch": owner.launch,
            "world_size": len(ranks), "ranks": list(ranks), "started": time.time()}
        self._lost = ""
        self._warned = False  # that the state cannot be written
        self._news, self._over = threading.Event(), threading.Event()
        self.update(**news)
        self._write()
        self._thread = threading.Thread(target=self._keep_up, name="run-state", daemon=True)
        self._thread.start()

    @property
    def status(self) -> str:
        return self._state["status"]

    def lost(self) -> str:
        """'' or why the launch must end: it did not own the run any more at the last look."""
        return self._lost

    def update(self, **news: Any) -> None:
        """Take in news (the names in NEWS). A new status or checkpoint is written at once, other news
        within about a second. After a final status nothing changes any more."""
        assert news.keys() <= NEWS.keys() and news.get("status", "starting") in (*ACTIVE, *EXIT_CODES)
        if self.status not in EXIT_CODES:
            changed = any(news.get(name, self._state[name]) != self._state[name] for name in ("status", "checkpoint"))
            self._state.update(news)
            if changed:
                self._news.set()

    def close(self, status: str, reason: str = "") -> None:
        """Say how the run ended, which also gives up owning it. The first final status stays."""
        self.update(status=status, reason=reason)
        self._over.set()
        self._news.set()
        self._thread.join(timeout=CLOSE_S)  # it writes the last state; a disk that hangs holds nobody up

    def _keep_up(self) -> None:
        """Every second: is there anything to tell, and does this launch still own the run?"""
        written, told, over = time.monotonic(), dict(self._state), False
        while not over:
            self._news.wait(LOOK_EVERY_S)
            self._news.clear()
            over = self._over.is_set()  # then this is the last round
            self._lost = self.owner.lost()
            if not self._lost and (self._state != told or time.monotonic() - written >= HEARTBEAT_S):
                written, told = time.monotonic(), dict(self._state)
                self._write()

    def _write(self) -> None:
        try:
            _replace(self._path, finite({**self._state, "heartbeat": time.time()}))
        except OSError as e:
            if not self._warned:
                log.warning("%s: cannot be written (%s); training goes on, scripts.status may take it for dead",
                            self._path, e.strerror)
            self._warned = True

    def __enter__(self) -> "RunState":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        told = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
        if isinstance(error, StopAsked):
            self.close("stopped", str(error))
        self.close("failed", "ended without saying how" if error is None else told)


def tell_completed(run_dir: Path, step: int, reason: str) -> None:
    """Leave the state of a run that no launch here trained to `step`: `reason` says where its
    checkpoint `final` comes from."""
    state = RunState(acquire(run_dir), [identify()], num_iterations=step, step=step, checkpoint="final")
    state.close("completed", reason)
