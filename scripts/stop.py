"""
Ask a run to stop: it finishes its step, saves, and ends. The same training command goes on with it.

    python -m scripts.stop d24             # a tag or a run directory; may be left out where one run only is at work
    python -m scripts.stop d24 --wait      # and wait until it has ended
    python -m scripts.stop d24 --force     # end its processes on this host: SIGTERM, and 30 s later SIGKILL

The request is a file in the run directory, so it reaches a run on any host that shares the file system. A launch that
is still starting finds it, too: the request counts for every launch that is older than the file. `--force` is for a
run that no longer looks: it ends the processes that the run's state names, if they are visible on this host and
started when the state says (a process id that another program has now is left alone). It exits with 1 if one may be
left.
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
from nanochat.lifecycle import is_alive_here, request_stop
from nanochat.run_dir import find_run, list_runs, run_path
from nanochat.run_reader import RunReader
from scripts.status import describe

POLL_S = 0.2
GRACE_S = 30.0  # from SIGTERM, after which a run saves, to SIGKILL
KILL_S = 10.0  # how long a process may take to vanish after SIGKILL


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Ask a run to stop.", epilog=__doc__)
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run's name or folder (default: the only one at work)")
    parser.add_argument("--wait", action="store_true", help="until the run has ended; 1 if it did not end by itself")
    parser.add_argument("--force", action="store_true", help="end the run's processes on this host")
    return parser.parse_args(argv)


def only_live_run() -> Path:
    """The one run under the base directory that is at work. ValueError if there is none, or several."""
    live = [path for path in map(run_path, list_runs()) if RunReader(path).status()["liveness"] == "alive"]
    if len(live) == 1:
        return live[0]
    names = f"several are at work, name one: {', '.join(path.name for path in live)}" if live else "none is at work"
    raise ValueError(f"which run? Of those in {get_base_dir() / 'runs'}, {names}")


def find(name: str) -> Path:
    """The run that is meant. FileNotFoundError if there is none yet, where a first launch that is starting is asked to
    stop, unless the name looks like a typing error."""
    try:
        return find_run(name)
    except FileNotFoundError as e:
        if "did you mean" not in str(e):
            with contextlib.suppress(ValueError):  # a path
                request_stop(run_path(name))
                raise FileNotFoundError(f"{e}; if its first launch is starting now, it stops after one step") from None
        raise


def force(run: dict[str, Any]) -> bool:
    """End the run's processes on this host; report which are left here and on others. Whether all of them are gone."""
    left = [rank for rank in run["ranks"] if is_alive_here(rank)]
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, KILL_S)):
        for rank in left:
            print(f"{number.name} to pid {rank['pid']}", flush=True)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended since, or is another user's
                os.kill(rank["pid"], number)
        end = time.monotonic() + patience
        while left and time.monotonic() < end:
            time.sleep(POLL_S)
            left = [rank for rank in left if is_alive_here(rank)]
    for rank in left:
        print(f"pid {rank['pid']} is still there after SIGKILL", file=sys.stderr, flush=True)
    elsewhere: dict[str, list[int]] = {}
    for rank in run["ranks"]:
        if rank["host"] != socket.gethostname() and run["liveness"] != "ended":
            elsewhere.setdefault(rank["host"], []).append(rank["pid"])
    for host, pids in elsewhere.items():
        print(f"on {host}, if they are still there: kill {' '.join(map(str, pids))}", file=sys.stderr, flush=True)
    return not left and not elsewhere


def main(argv: Sequence[str] | None = None) -> int:
    """Ask; perhaps force, perhaps wait. ValueError and FileNotFoundError where it is not clear which run is meant."""
    args = parse_args(argv)
    run_dir = only_live_run() if args.run is None else find(args.run)
    request_stop(run_dir)
    reader = RunReader(run_dir)
    run = reader.status()
    if run["status"] is None:
        raise ValueError(f"asked {run_dir.name} to stop, but nothing is known of its processes: {run['reason']}")
    if run["liveness"] == "alive":
        print(f"asked {run_dir.name} to stop: it saves after its step", flush=True)
    elif not args.force:
        print(f"nothing to stop, except a launch that is starting now: it stops after one step\n{describe(run)}")
        return 0
    if args.force and not force(run):
        return EXIT_FAILED
    while args.wait and reader.status()["liveness"] == "alive":
        time.sleep(POLL_S)
    run = reader.status()
    if args.wait or args.force:
        print(describe(run))
    left = args.force and run["liveness"] == "alive"
    if left:
        print("a process that is not visible here, such as one in another container, still owns the run",
              file=sys.stderr)
    return EXIT_FAILED if left or (args.wait and run["liveness"] == "dead") else 0


if __name__ == "__main__":
    run_main(main)
