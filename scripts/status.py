"""
Where runs stand.

    python -m scripts.status                      # all runs, a line each
    python -m scripts.status d24                  # one run: a tag or a run directory
    python -m scripts.status d24 --watch          # again every two seconds, until the run ends
    python -m scripts.status d24 --json           # for programs
    python -m scripts.status d24 --exit-code      # 0 completed, 10 stopped (start it again), 3 halted (decide),
                                                  # 1 failed or dead, 20 at work

A run that says it is at work is believed while its process lives (on its own host) or its heartbeat is young
(elsewhere).
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanochat.common import Parser, get_base_dir, run_main
from nanochat.lifecycle import STATE_NAME, exit_code, heartbeat_age_s, liveness, read_state
from nanochat.run_dir import find_run, is_run_dir

WATCH_EVERY_S = 2.0
COLUMNS = ("run", "status", "step", "loss", "tok/s", "eta", "checkpoint", "heartbeat")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Where runs stand.", epilog=__doc__)
    parser.add_argument("run", nargs="?", help="tag or run directory (default: all runs)")
    parser.add_argument("--watch", action="store_true", help="again every two seconds, until the run ends")
    parser.add_argument("--json", action="store_true", help="one JSON object (a list for all runs)")
    parser.add_argument("--exit-code", action="store_true", help="tell by the exit code how the run named stands")
    return parser.parse_args(argv)


# ---- finding --------------------------------------------------------------------------------------------------------

def find(tag_or_path: str) -> Path:
    """The run directory that is meant; one whose first launch has got no further than its state counts too."""
    for path in (get_base_dir() / "runs" / tag_or_path, Path(tag_or_path).expanduser()):
        if (path / STATE_NAME).is_file():
            return path
    return find_run(tag_or_path)


def list_all() -> list[Path]:
    """All run directories under the base directory, sorted."""
    root = get_base_dir() / "runs"
    return sorted(p for p in root.iterdir() if is_run_dir(p) or (p / STATE_NAME).is_file()) if root.is_dir() else []


def state_of(run_dir: Path) -> dict[str, Any]:
    """The state of a run. FileNotFoundError if it has none."""
    state = read_state(run_dir)
    if state is None:
        raise FileNotFoundError(f"{run_dir / STATE_NAME}: missing, so this run was never started by a version that "
                                f"tells its state; its log is {run_dir / 'logs' / 'train.jsonl'}")
    return state


# ---- telling --------------------------------------------------------------------------------------------------------

def duration(seconds: float | None) -> str:
    """4 s, 12 min 05 s, 3 h 07 min, 2 d 04 h; '-' for None."""
    if seconds is None:
        return "-"
    sign, s = "-" * (seconds < 0), round(abs(seconds))
    if s < 60:
        return f"{sign}{s} s"
    if s < 3600:
        return f"{sign}{s // 60} min {s % 60:02d} s"
    if s < 86400:
        return f"{sign}{s // 3600} h {s % 3600 // 60:02d} min"
    return f"{sign}{s // 86400} d {s % 86400 // 3600:02d} h"


def number(value: float | None, digits: int = 0) -> str:
    """A number for people, '-' for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def word(state: dict[str, Any]) -> str:
    """The status, or dead."""
    return "dead" if liveness(state) == "dead" else state["status"]


def progress(state: dict[str, Any]) -> str:
    """1,234/5,000 (24.7 %)."""
    step, total = state["step"], state["num_iterations"]
    share = f" ({100 * step / total:.1f} %)" if step is not None and total else ""
    return f"{number(step)}/{number(total)}{share}"


def describe(run_dir: Path, state: dict[str, Any]) -> str:
    """One run at a glance, some lines."""
    at_work, shown = liveness(state) == "alive", word(state)
    why = f": {state['reason']}" if state["reason"] else ""
    if shown == "dead":
        why = f": it says {state['status']}, but its process is gone; the same command goes on with it"
    rate = f"   {number(state['tokens_per_s'])} tok/s   eta {duration(state['eta_s'])}" if at_work else ""
    hosts = Counter(rank["host"] for rank in state["ranks"])
    age = duration(heartbeat_age_s(state))
    phase = f"   phase {state['phase']}" if state["phase"] else ""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state["started"]))
    return "\n".join([
        f"{run_dir.name}   {shown}{why}",
        f"  step {progress(state)}   loss {number(state['loss'], 4)}   {number(state['tokens'])} tokens{rate}",
        f"  last checkpoint {state['checkpoint'] or 'none'}{phase}",
        f"  started {began}   heartbeat {age} ago",
        f"  {state['world_size']} process(es) on {', '.join(f'{host} ({n})' for host, n in hosts.items())}; rank 0 "
        f"has pid {state['ranks'][0]['pid']}",
        f"  {run_dir}"])


def row(run_dir: Path) -> list[str]:
    """A run as a row of the table; a broken state is told in it."""
    try:
        state = read_state(run_dir)
    except ValueError:
        return [run_dir.name, "unreadable", *["-"] * (len(COLUMNS) - 2)]
    if state is None:
        return [run_dir.name, "unknown", *["-"] * (len(COLUMNS) - 2)]
    alive = liveness(state) == "alive"
    return [run_dir.name, word(state), progress(state), number(state["loss"], 4),
            number(state["tokens_per_s"]) if alive else "-", duration(state["eta_s"]) if alive else "-",
            state["checkpoint"] or "-", f"{duration(heartbeat_age_s(state))} ago"]


def table(run_dirs: Sequence[Path]) -> str:
    """All runs, a line each."""
    rows = [list(COLUMNS), *(row(path) for path in run_dirs)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(r, widths)).rstrip() for r in rows)


def as_json(run_dir: Path) -> dict[str, Any]:
    """The state with what follows from it."""
    try:
        state = read_state(run_dir)
    except ValueError:
        state = None
    if state is None:
        return {"run": str(run_dir), "status": None}
    return {"run": str(run_dir), **state, "liveness": liveness(state), "exit_code": exit_code(state),
            "heartbeat_age_s": heartbeat_age_s(state)}


# ---- the command ----------------------------------------------------------------------------------------------------

def tell(args: argparse.Namespace) -> bool:
    """Print once; whether anything told of is at work."""
    if args.run is None:
        paths = list_all()
        none = f"no runs in {get_base_dir() / 'runs'}"
        print(json.dumps([as_json(p) for p in paths]) if args.json else table(paths) if paths else none, flush=True)
        return any(entry.get("liveness") == "alive" for entry in map(as_json, paths)) if args.watch else False
    run_dir = find(args.run)
    state = state_of(run_dir)
    print(json.dumps(as_json(run_dir)) if args.json else describe(run_dir, state), flush=True)
    return liveness(state) == "alive"


def main(argv: Sequence[str] | None = None) -> int:
    """Print; with --exit-code, answer by it. FileNotFoundError where there is no such run."""
    args = parse_args(argv)
    if args.exit_code and args.run is None:
        raise ValueError("--exit-code: expected a run, python -m scripts.status RUN --exit-code")
    while tell(args) and args.watch:
        time.sleep(WATCH_EVERY_S)
        if not args.json:
            print("\033[H\033[J", end="")
    return exit_code(state_of(find(args.run))) if args.exit_code else 0


if __name__ == "__main__":
    run_main(main)
