"""
Print where runs stand: step, loss, speed, time left, and how each one ended.

    python -m scripts.status                      # all runs, a line each
    python -m scripts.status d12 d24 --sort=bpb   # some of them, the best first
    python -m scripts.status d24                  # one run: a tag or a run directory
    python -m scripts.status d24 --watch          # again every two seconds, until the run ends
    python -m scripts.status d24 --json           # for programs
    python -m scripts.status d24 --exit-code      # 0 completed, 10 stopped (start it again), 3 halted (decide),
                                                  # 1 failed or dead, 20 alive

A run whose state says that it is active counts as alive while its launch holds the run's lock or, on another host,
while its heartbeat is young; `age` is the time since that heartbeat, or since the run ended. The checkpoint is the
newest one on disk.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanochat.cli import Parser, run_main
from nanochat.common import duration, get_base_dir, show, table
from nanochat.run_dir import find_run, list_runs, run_path
from nanochat.run_reader import RunReader

WATCH_EVERY_S = 2.0
# what --sort names, and the field of a run's status that it compares
SORTS = {"run": "run", "state": "shown", "step": "step", "loss": "loss", "bpb": "val_bpb", "rate": "tokens_per_s",
         "eta": "eta_s", "age": "heartbeat_age_s"}
GREEN, YELLOW, RED = 32, 33, 31  # of a terminal
COLORS = {"completed": GREEN, "running": GREEN, "starting": GREEN, "stopping": YELLOW, "stopped": YELLOW,
          "halted": RED, "failed": RED, "dead": RED, "unreadable": RED}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Print where runs stand.", epilog=__doc__)
    parser.add_argument("run", nargs="*", help="tags or run directories (default: all runs)")
    parser.add_argument("--sort", choices=SORTS, default="run", metavar="NAME",
                        help=f"of the table, by {', '.join(SORTS)}")
    parser.add_argument("--watch", action="store_true", help="again every two seconds, until the run ends")
    parser.add_argument("--json", action="store_true", help="one JSON object (a list for all runs)")
    parser.add_argument("--exit-code", action="store_true", help="answer by the exit code how the named run stands")
    return parser.parse_args(argv)


def cells(run: dict[str, Any]) -> dict[str, Any]:
    """The status of a run by column: a row of the table of many runs, the lines of one."""
    step, total, alive = run.get("step"), run.get("num_iterations"), run["liveness"] == "alive"
    share = f" ({100 * step / total:.1f} %)" if step is not None and total else ""
    return {"run": Path(run["run"]).name, "state": run["shown"], "step": f"{show(step)}/{show(total)}{share}",
            "loss": run.get("loss"), "bits per byte": run["val_bpb"], "tok/s": run["tokens_per_s"] if alive else None,
            "eta": duration(run["eta_s"] if alive else None), "last checkpoint": run.get("checkpoint"),
            "age": duration(run.get("heartbeat_age_s")), "reason": run["reason"]}


def describe(run: dict[str, Any]) -> str:
    """One run at a glance, one value per line."""
    lines = cells(run)
    if run["status"] is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["started"]))
        lines |= {"tokens": run["tokens"], "phase": run["phase"], "spikes skipped": run.get("skipped"),
                  "started": f"{began}, {duration(time.time() - run['started'])} ago"}
        if run["liveness"] == "alive":
            hosts = Counter(rank["host"] for rank in run["ranks"])
            where = ", ".join(f"{host} ({number})" for host, number in hosts.items())
            lines["processes"] = f"{run['world_size']} on {where}; rank 0 has pid {run['ranks'][0]['pid']}"
    lines["folder"] = run["run"]
    return "\n".join(f"{name:17}{show(value)}" for name, value in lines.items() if value not in (None, "", "-", 0))


def colored(lines: list[str], runs: list[dict[str, Any]]) -> list[str]:
    """The lines of a table, with the states in colour on a terminal whose user has not set NO_COLOR."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return lines
    at = lines[0].index("state")
    for i, word in enumerate((run["shown"] for run in runs), 1):
        if word in COLORS:
            rest = lines[i][at + len(word):]
            lines[i] = f"{lines[i][:at]}\033[{COLORS[word]}m{word}\033[0m{rest}"
    return lines


def print_status(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print once; returns the status of each run. FileNotFoundError if the one run that is named has no state,
    ValueError if its state is corrupt."""
    paths = [find_run(name) for name in args.run] or [run_path(tag) for tag in list_runs()]
    runs = [RunReader(path).status() for path in paths]
    if len(args.run) == 1:
        [run] = runs
        if run["status"] is None:
            raise (ValueError if run["shown"] == "unreadable" else FileNotFoundError)(run["reason"])
        print(json.dumps(run) if args.json else describe(run), flush=True)
        return runs
    field = SORTS[args.sort]
    runs.sort(key=lambda run: (run.get(field) is None, run.get(field)))  # those without a value last
    lines = [f"no runs in {get_base_dir() / 'runs'}"]
    if runs:
        rows = [cells(run) for run in runs]
        lines = colored(table([*rows[0]], [[*row.values()] for row in rows]), runs)
    print(json.dumps(runs) if args.json else "\n".join(lines), flush=True)
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    """Print; with --exit-code, answer by the exit code. FileNotFoundError for an unknown run."""
    args = parse_args(argv)
    if args.exit_code and len(args.run) != 1:
        raise ValueError("--exit-code: expected one run, python -m scripts.status RUN --exit-code")
    runs = print_status(args)
    while args.watch and any(run["liveness"] == "alive" for run in runs):
        time.sleep(WATCH_EVERY_S)
        if not args.json:
            print("\033[H\033[J", end="")
        runs = print_status(args)
    return runs[0]["exit_code"] if args.exit_code else 0


if __name__ == "__main__":
    run_main(main)
