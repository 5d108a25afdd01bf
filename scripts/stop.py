"""
Ask a run to stop: it finishes its step, saves and exits. The same training command resumes it.

    python -m scripts.stop mine            # a run's name or folder; optional if only one run is active
    python -m scripts.stop mine --wait     # wait until the run has ended
    python -m scripts.stop mine --force    # kill its processes on this host: SIGTERM, then SIGKILL after 30 s

The request is a file in the run directory, so it works from any host that shares the file system.
It names the launch that it is meant for, which may still be starting. `--force` is for a run that
no longer responds: it ends the processes that the run's state records, if they are visible on this
host and their start times match (a process id that another program reuses is left alone). It exits
with 1 if a process may be left alive.
"""

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanochat.cli import EXIT_FAILED, Parser, run_main
from nanochat.common import get_base_dir
from nanochat.run_dir import find_run, run_dirs, run_path
from nanochat.run_owner import last_owner
from nanochat.run_reader import RunReader
from nanochat.run_state import is_alive_here
from nanochat.run_stop import request_stop
from scripts.status import status_text

POLL_S = 0.2
GRACE_S = 30.0  # between SIGTERM, which lets the run save, and SIGKILL
KILL_S = 10.0  # how long a process may take to end after SIGKILL


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a run's name or folder (default: the only active run)",
    )
    parser.add_argument(
        "--wait", action="store_true", help="wait until the run has ended; exit with 1 if it died"
    )
    parser.add_argument(
        "--force", action="store_true", help="kill the run's processes on this host"
    )
    return parser.parse_args(argv)


def only_live_run() -> Path:
    """The only active run below the base directory. ValueError if none or several are active."""
    live = [path for path in run_dirs() if RunReader(path).status()["liveness"] == "alive"]
    if len(live) == 1:
        return live[0]
    problem = (
        f"several are active; name one: {', '.join(path.name for path in live)}"
        if live
        else "no run is active"
    )
    raise ValueError(f"which run? In {get_base_dir() / 'runs'}, {problem}")


def find(name: str) -> Path:
    """The run with this name. FileNotFoundError if it does not exist. Its first launch may be
    starting, so the request is left for that launch, unless the name looks misspelled."""
    try:
        return find_run(name)
    except FileNotFoundError as e:
        with contextlib.suppress(ValueError):  # the name is a path
            path = run_path(name)
            if last_owner(path)[1]:
                return path  # its first launch is preparing its data
            if "did you mean" not in str(e):
                request_stop(path)
                raise FileNotFoundError(
                    f"{e}; if its first launch is starting now, it stops as soon as it has started (the request "
                    f"is in {path})"
                ) from None
        raise


def is_active(reader: RunReader) -> bool:
    """Whether a launch owns a run, also one that is starting and has written no state yet."""
    return last_owner(reader.run_dir)[1] or reader.status()["liveness"] == "alive"


def force(run: dict[str, Any]) -> bool:
    """Kill the run's processes on this host, and print which are left here and on other hosts. True
    if none is left."""
    left = [rank for rank in run["ranks"] if is_alive_here(rank)]
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, KILL_S)):
        for rank in left:
            print(f"{number.name} to pid {rank['pid']}", flush=True)
            # it just ended, or belongs to another user
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(rank["pid"], number)
        end = time.monotonic() + patience
        while left and time.monotonic() < end:
            time.sleep(POLL_S)
            left = [rank for rank in left if is_alive_here(rank)]
    for rank in left:
        print(f"pid {rank['pid']} is still alive after SIGKILL", file=sys.stderr, flush=True)
    elsewhere: dict[str, list[int]] = {}
    for rank in run["ranks"]:
        if rank["host"] != socket.gethostname() and run["liveness"] != "ended":
            elsewhere.setdefault(rank["host"], []).append(rank["pid"])
    for host, pids in elsewhere.items():
        print(
            f"on {host}, if they are still alive, run: kill {' '.join(map(str, pids))}",
            file=sys.stderr,
            flush=True,
        )
    return not left and not elsewhere


def main(argv: Sequence[str] | None = None) -> int:
    """Request the stop; with flags, kill processes or wait. ValueError and FileNotFoundError if no
    run is found."""
    args = parse_args(argv)
    run_dir = only_live_run() if args.run is None else find(args.run)
    request_stop(run_dir)
    reader = RunReader(run_dir)
    run = reader.status()
    active = is_active(reader)
    if run["status"] is None and (args.force or not active):
        raise ValueError(
            f"asked {run_dir.name} to stop, but its processes are unknown: {run['reason']}"
        )
    if active:
        print(
            f"asked {run_dir.name} to stop: it saves after the current step, or stops as soon as it has started",
            flush=True,
        )
    elif not args.force:
        print(
            f"{run_dir.name} is not active; a launch that is starting now stops as soon as it has "
            f"started\n{status_text(run)}"
        )
        return 0
    if args.force and not force(run):
        return EXIT_FAILED
    while args.wait and is_active(reader):
        time.sleep(POLL_S)
    run = reader.status()
    if args.wait and run["status"] is None:
        print(f"{run_dir.name}: its launch has ended before the run began")
        return 0
    if args.wait or args.force:
        print(status_text(run))
    left = args.force and run["liveness"] == "alive"
    if left:
        print(
            "a process that is not visible here, such as one in another container, still owns the run",
            file=sys.stderr,
        )
    return EXIT_FAILED if left or (args.wait and run["liveness"] == "dead") else 0


if __name__ == "__main__":
    run_main(main)
