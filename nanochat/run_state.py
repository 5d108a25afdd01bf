"""
Where a run stands: RUN/.run_state.json, which rank 0 rewrites, and the processes that it names.

    starting -> running -> stopping -> stopped, halted, completed or failed

A run with an active status but no lock is dead (nanochat/run_owner.py). The state is written
without an fsync, which may take as long as a step. A failed write never stops training.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat.common import parse_json
from nanochat.run_dir import finite, is_step, iter_log, newest_progress, open_regular

STATE_NAME = ".run_state.json"
MIRROR_NAME = ".mirror.json"
FORMAT_VERSION = 1
ACTIVE = ("starting", "running", "stopping")
EXIT_CODES = {"completed": 0, "stopped": 10, "halted": 3, "failed": 1}  # by final status
EXIT_ALIVE = 20
HEARTBEAT_LIMIT_S = 60.0  # without locks, an owner with an older heartbeat counts as dead


# ---- processes -----------------------------------------------------------------------------------

PROCESS = {"host": str, "pid": int, "start": str | None}  # the shape of `identify`


def process_start(pid: int) -> str | None:
    """When a process on this machine started, in clock ticks since boot; None if it does not exist
    (or only its zombie does), and on a system without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # after the name, which may contain anything
    return None if fields[0] in "ZX" else fields[19]


def identify() -> dict[str, Any]:
    """This process's host, pid and start, from which `is_alive_here` recognizes it. Plain
    values."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "start": process_start(os.getpid())}


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launcher_pid() -> int:
    """The process that started this launch: torchrun, which may start its processes several times,
    or this one."""
    return os.getppid() if under_torchrun() else os.getpid()


def identify_launcher() -> str:
    """Names this launch, also after torchrun has restarted its processes."""
    pid = launcher_pid()
    return f"{socket.gethostname()}/{pid}/{process_start(pid)}"


def is_alive_here(process: Mapping[str, Any]) -> bool:
    """Whether a process that `identify` described is visible and alive here. False on another host,
    in another process namespace, and for a record that may be forged: a pid that is not positive, a
    missing or wrong start."""
    alive_since = process_start(process["pid"]) if process["pid"] > 0 else None
    return (
        process["host"] == socket.gethostname()
        and alive_since is not None
        and alive_since == process["start"]
    )


# ---- the state -----------------------------------------------------------------------------------

NUMBER = int | float | None
NEWS = {  # the values that a training run reports, and their shapes
    "status": str,
    "reason": str,
    "step": NUMBER,
    "num_iterations": NUMBER,
    "loss": NUMBER,
    "val_bpb": NUMBER,
    "tokens": NUMBER,
    "tokens_per_s": NUMBER,
    "eta_s": NUMBER,
    "checkpoint": str | None,
    "phase": int | str | None,
    # object: may be missing (older versions)
    "skipped": int | None | object,
    "val_step": int | None | object,
}
STATE = {
    **NEWS,
    "format_version": int,
    "world_size": int,
    "ranks": [PROCESS],
    "started": float,
    "heartbeat": float,
    "launch": str | object,  # names the launch, as in its line of the log; older versions lack it
}
LARGEST, LATEST = 1e18, 1e11  # limits of a number, and of a time in unix seconds (the year 5138)


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """The state of a run, None if it has none. ValueError, which names file and field, if it is
    corrupt or not a regular file."""
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
            raise ValueError(
                f"{path}: {name}: got {str(value)[:30]}, expected a number below {limit:.0e}; {remedy}"
            )
    known = state["format_version"] == FORMAT_VERSION and state["status"] in (*ACTIVE, *EXIT_CODES)
    if not (known and state["ranks"]):
        raise ValueError(f"{path}: not a state that this version of the program writes; {remedy}")
    return state


def renew_state(run_dir: Path) -> None:
    """Bring the state of a run up to its log, if the newest launch there ran on another machine, or
    logged its end and was killed before it wrote that here. Only the owner of the run may call this."""
    try:
        known = read_state(run_dir) or {}
    except ValueError:  # it is corrupt
        known = {}
    logged = logged_state(run_dir)
    if logged is None:
        return
    has_ended_since = known.get("status") in ACTIVE and logged["status"] in EXIT_CODES
    if known.get("launch") != logged["launch"] or has_ended_since:
        replace_state(run_dir / STATE_NAME, finite(logged))


def logged_state(run_dir: Path) -> dict[str, Any] | None:
    """The state of a run as its log records it: that of the newest launch, "running" if it has not
    logged its end. None if the log has no launch."""
    newest: dict[str, dict[str, Any]] = {}
    end = None
    for record in iter_log(run_dir / "logs" / "train.jsonl", containing=b'"event"'):
        name = record.get("event")
        if name == "started":
            end = None
        elif name in EXIT_CODES:
            end = record
        newest[str(name)] = record
    if "started" not in newest:
        return None
    started = newest["started"]
    last = end or started
    val = newest.get("val", {})
    return {
        **dict.fromkeys(NEWS),
        **logged_progress(run_dir),
        "format_version": FORMAT_VERSION,
        "status": "running" if end is None else end["event"],
        "reason": last.get("reason") or "",
        "num_iterations": started.get("num_iterations"),
        "val_bpb": val.get("bpb"),
        "val_step": val.get("step"),
        "checkpoint": newest.get("saved", {}).get("checkpoint"),
        "skipped": newest.get("skipped", {}).get("skipped"),
        "world_size": started.get("world_size", 1),
        "ranks": [identify()],  # the log does not name its processes
        "started": started.get("time", 0.0),
        "heartbeat": last.get("time", 0.0),
        "launch": started.get("launch", ""),
    }


def logged_progress(run_dir: Path) -> dict[str, Any]:
    """The values of the state that the newest step in the log decides."""
    record = newest_progress(run_dir)
    if record is None:
        return {}
    if not is_step(record):  # a launch that has taken no step yet
        return {"step": record["step"]}
    return {
        "step": record["step"] + 1,
        "loss": record.get("smooth_loss"),
        "tokens": record.get("tokens"),
        "tokens_per_s": record.get("tokens_per_s"),
    }


def logged_skips(run_dir: Path) -> int:
    """The number of steps that a run itself did not apply, without those of a fork's ancestors."""
    records = iter_log(run_dir / "logs" / "train.jsonl", containing=b'"skipped"')
    return len({record["step"] for record in records if record.get("event") == "skipped"})


# what a launch with --mirror-to writes about its mirror
MIRROR = {
    "mirror": str,
    "run": str,  # names the run
    "checkpoint": str | None,  # the newest one in the mirror, "start" before the first
    "step": int | None,  # its step; -1: the start
    "copied": float | None,  # when, in unix seconds
    "pending": str | None,  # the checkpoint that is being copied
    "bytes_left": int,  # of its files
    "problem": str,  # why the last copy failed
}


def read_mirror_state(run_dir: Path) -> dict[str, Any] | None:
    """The state of a run's mirror, None if it has none or the file is corrupt."""
    try:
        with open_regular(run_dir / MIRROR_NAME, os.O_RDONLY) as f:
            return parse_json(f.read(), "", MIRROR)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def heartbeat_age_s(state: Mapping[str, Any]) -> float:
    """How old the heartbeat is by our clock, in seconds; negative if it is from the future."""
    return time.time() - state["heartbeat"]


def seems_alive(state: Mapping[str, Any]) -> bool:
    """Without a lock: whether rank 0 is visible here, or its heartbeat is recent."""
    return is_alive_here(state["ranks"][0]) or abs(heartbeat_age_s(state)) <= HEARTBEAT_LIMIT_S


def replace_state(path: Path, value: object) -> None:
    """Replace a small JSON file without an fsync. A leftover or a link under the temporary name is
    deleted."""
    temporary = path.with_name(f"{path.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as f:
        f.write(json.dumps(value) + "\n")
    os.replace(temporary, path)
