"""
Say where runs stand: step, loss, speed, time left, and how one ended.

    python -m scripts.status                      # all runs, a line each
    python -m scripts.status d12 d24 --sort=bpb   # some of them, the best first
    python -m scripts.status d24                  # one run: a tag or a run directory
    python -m scripts.status d24 --watch          # again every two seconds, until the run ends
    python -m scripts.status d24 --json           # for programs
    python -m scripts.status d24 --exit-code      # 0 completed, 10 stopped (start it again), 3 halted (decide),
                                                  # 1 failed or dead, 20 at work

A run whose state says that it is active counts as alive while its launch holds the run's lock or, on another host,
while its heartbeat is young; `age` is the time since that heartbeat, or since the run ended. The checkpoint is the
newest one on disk.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanochat.cli import Parser, run_main
from nanochat.common import duration, get_base_dir, in_store, show, table
from nanochat.lifecycle import STATE_NAME, exit_code, heartbeat_age_s, liveness, read_state
from nanochat.run_dir import checkpoint_folders, find_run, list_runs, run_path

WATCH_EVERY_S = 2.0
# what --sort names, and the fact of a run that decides
SORTS = {"run": "run", "state": "shown", "step": "step", "loss": "loss", "bpb": "val_bpb", "rate": "tokens_per_s",
         "eta": "eta_s", "age": "heartbeat_age_s"}
GREEN, YELLOW, RED = 32, 33, 31  # of a terminal
COLORS = {"completed": GREEN, "running": GREEN, "starting": GREEN, "stopping": YELLOW, "stopped": YELLOW,
          "halted": RED, "failed": RED, "dead": RED, "unreadable": RED}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Where runs stand.", epilog=__doc__)
    parser.add_argument("run", nargs="*", help="tags or run directories (default: all runs)")
    parser.add_argument("--sort", choices=SORTS, default="run", metavar="NAME",
                        help=f"of the table, by {', '.join(SORTS)}")
    parser.add_argument("--watch", action="store_true", help="again every two seconds, until the run ends")
    parser.add_argument("--json", action="store_true", help="one JSON object (a list for all runs)")
    parser.add_argument("--exit-code", action="store_true", help="tell by the exit code how the run named stands")
    return parser.parse_args(argv)


# ---- looking --------------------------------------------------------------------------------------------------------

def newest_checkpoint(run_dir: Path) -> str | None:
    """The name of the checkpoint that was written last, None if there is none."""
    times = {}
    for name, path in checkpoint_folders(run_dir).items():
        with contextlib.suppress(OSError):  # deleted meanwhile
            times[name] = path.stat().st_mtime
    return max(times, key=lambda name: times[name], default=None)


def bad_pair(run_dir: Path) -> str:
    """What is wrong with the token files that a run reads, empty where nothing is: who reads a memory map of a file
    that was cut short meanwhile dies of SIGBUS, and cannot say so."""
    from nanochat.sources import read_manifests
    from nanochat.tokens import open_tokens

    try:
        for buckets in read_manifests(run_dir / "data_manifest.json").values():
            for manifest in buckets.values():
                for entry in manifest["files"]:
                    if entry["name"].endswith(".bin") and not in_store(manifest["root"]):
                        open_tokens(Path(manifest["root"], entry["name"]))
    except (ValueError, OSError) as e:
        return str(e)
    return ""


def look(run_dir: Path) -> dict[str, Any]:
    """All that can be told of a run: its state, what follows from it, and what lies on disk. `status` is None where
    the state is missing or cannot be read; `shown` is a word for people."""
    log = run_dir / "logs" / "train.jsonl"
    why = f"{run_dir / STATE_NAME} is missing, so no launch told how the run stands; see {log}"
    facts = {"run": str(run_dir), "status": None, "shown": "unknown", "liveness": None, "val_bpb": None, "reason": why}
    try:
        state = read_state(run_dir)
        alive = state and liveness(run_dir, state)
    except ValueError as e:
        return facts | {"shown": "unreadable", "reason": str(e)}
    if state is None:
        return facts
    facts |= state | {"liveness": alive, "shown": state["status"], "exit_code": exit_code(run_dir, state),
                      "heartbeat_age_s": heartbeat_age_s(state),
                      "checkpoint": newest_checkpoint(run_dir) or state["checkpoint"]}
    if facts["liveness"] == "dead":
        facts["shown"] = "dead"
        way_on = bad_pair(run_dir) or "the same command goes on with it"
        facts["reason"] = f"it says {state['status']}, but its process is gone; {way_on}"
    return facts


# ---- telling --------------------------------------------------------------------------------------------------------

def cells(facts: dict[str, Any]) -> dict[str, Any]:
    """What is told of a run, by name: a row of the table of many, and lines of one."""
    step, total, alive = facts.get("step"), facts.get("num_iterations"), facts["liveness"] == "alive"
    share = f" ({100 * step / total:.1f} %)" if step is not None and total else ""
    return {"run": Path(facts["run"]).name, "state": facts["shown"], "step": f"{show(step)}/{show(total)}{share}",
            "loss": facts.get("loss"), "bits per byte": facts["val_bpb"],
            "tok/s": facts["tokens_per_s"] if alive else None, "eta": duration(facts["eta_s"] if alive else None),
            "last checkpoint": facts.get("checkpoint"), "age": duration(facts.get("heartbeat_age_s")),
            "reason": facts["reason"]}


def describe(facts: dict[str, Any]) -> str:
    """One run at a glance, a fact a line."""
    told = cells(facts)
    if facts["status"] is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["started"]))
        hosts = Counter(rank["host"] for rank in facts["ranks"])
        where = ", ".join(f"{host} ({number})" for host, number in hosts.items())
        told |= {"tokens": facts["tokens"], "phase": facts["phase"], "spikes skipped": facts.get("skipped"),
                 "started": f"{began}, {duration(time.time() - facts['started'])} ago"}
        if facts["liveness"] == "alive":
            told["processes"] = f"{facts['world_size']} on {where}; rank 0 has pid {facts['ranks'][0]['pid']}"
    told["folder"] = facts["run"]
    return "\n".join(f"{name:17}{show(value)}" for name, value in told.items() if value not in (None, "", "-", 0))


def sort(found: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Runs in the order of a name in SORTS; those without a figure last."""
    fact = SORTS[by]
    return sorted(found, key=lambda facts: (facts.get(fact) is None, facts.get(fact)))


def colored(lines: list[str], found: list[dict[str, Any]]) -> list[str]:
    """The lines of a table, their states in colours on a terminal whose user has not set NO_COLOR."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return lines
    at = lines[0].index("state")
    for i, word in enumerate((facts["shown"] for facts in found), 1):
        if word in COLORS:
            rest = lines[i][at + len(word):]
            lines[i] = f"{lines[i][:at]}\033[{COLORS[word]}m{word}\033[0m{rest}"
    return lines


def tell(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print once; what was told. FileNotFoundError where the run that is named has no state, ValueError where that
    cannot be read."""
    if len(args.run) != 1:
        paths = [find_run(name) for name in args.run] or [run_path(tag) for tag in list_runs()]
        found = sort([look(path) for path in paths], args.sort)
        lines = [f"no runs in {get_base_dir() / 'runs'}"]
        if found:
            rows = [cells(facts) for facts in found]
            lines = colored(table([*rows[0]], [[*row.values()] for row in rows]), found)
        print(json.dumps(found) if args.json else "\n".join(lines), flush=True)
        return found
    facts = look(find_run(args.run[0]))
    if facts["status"] is None:
        error = ValueError if facts["shown"] == "unreadable" else FileNotFoundError
        raise error(facts["reason"])
    print(json.dumps(facts) if args.json else describe(facts), flush=True)
    return [facts]


def main(argv: Sequence[str] | None = None) -> int:
    """Print; with --exit-code, answer by it. FileNotFoundError where there is no such run."""
    args = parse_args(argv)
    if args.exit_code and len(args.run) != 1:
        raise ValueError("--exit-code: expected one run, python -m scripts.status RUN --exit-code")
    found = tell(args)
    while args.watch and any(facts["liveness"] == "alive" for facts in found):
        time.sleep(WATCH_EVERY_S)
        if not args.json:
            print("\033[H\033[J", end="")
        found = tell(args)
    return found[0]["exit_code"] if args.exit_code else 0


if __name__ == "__main__":
    run_main(main)
