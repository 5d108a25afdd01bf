"""
Show the progress of runs: step, loss, throughput, time left, and how each run ended.

    python -m scripts.status                      # all runs, one line each
    python -m scripts.status mine                 # one run in detail, by name or folder
    python -m scripts.status d12 d24 --sort=bpb   # several runs, the best first
    python -m scripts.status mine --watch         # refresh every two seconds until the run ends
    python -m scripts.status mine --json          # for programs
    python -m scripts.status mine --exit-code     # 0 completed, 10 stopped (rerun it), 3 halted (you decide),
                                                  # 1 failed or dead, 20 active

A run is alive while its launch holds the run's lock or, if it runs on another host, while its
heartbeat is recent. `age` is the time since the last heartbeat, or since the run ended. The
checkpoint is the newest one on disk, or the last one that the run saved or began with (not here).

Forks are listed below their parent, with the step at which they branch off and what they changed:

    run       state      ...  fork
    mine      completed
      warm    completed       @10: matrix_lr 0.02 -> 0.01
        hot   running         @20: matrix_lr 0.01 -> 0.04
    lost      completed       old@500 (not here): nothing changed
    tuned     completed       weights of step 500 of mine

The last line is of a run that is not a fork: it began with --init-from.
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
from nanochat.common import Bits, counted, duration, get_base_dir, show, table
from nanochat.run_dir import Fork, changes_text, find_run, run_dirs
from nanochat.run_reader import RunReader, tree_of

WATCH_EVERY_S = 2.0
# --sort's name for a column, and the field of the status that it sorts by
SORTS = {
    "run": "run",
    "state": "shown",
    "step": "step",
    "loss": "loss",
    "bpb": "val_bpb",
    "rate": "tokens_per_s",
    "eta": "eta_s",
    "age": "heartbeat_age_s",
}
# states of runs that may have taken steps after their last save
RESUMABLE = ("halted", "failed", "dead", "stopped")
# terminal color codes
GREEN = 32
YELLOW = 33
RED = 31
COLORS = {
    **dict.fromkeys(("completed", "running", "starting"), GREEN),
    **dict.fromkeys(("stopping", "stopped"), YELLOW),
    **dict.fromkeys(("halted", "failed", "dead", "unreadable"), RED),
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "run", metavar="RUN", nargs="*", help="names or folders of runs (default: all runs)"
    )
    parser.add_argument(
        "--sort",
        choices=SORTS,
        default="run",
        metavar="COLUMN",
        help=f"sort the table by one of {', '.join(SORTS)}",
    )
    parser.add_argument(
        "--watch", action="store_true", help="refresh every two seconds until the run ends"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, or a list for several runs"
    )
    parser.add_argument(
        "--exit-code", action="store_true", help="report the state of one run as the exit code"
    )
    return parser.parse_args(argv)


def fork_text(run: dict[str, Any], *, below_parent: bool = False) -> str | None:
    """Where a run branched off, and what it changed, or whose weights --init-from gave it; None if
    neither. `below_parent`: the line above names the parent."""
    if run["fork"] is None:
        return f"weights of {run['begun_with']}" if run["begun_with"] else None
    fork = Fork(**run["fork"])
    place = f"@{fork.step:,}" if below_parent else fork.place
    note = "" if run["parent"] else " (not here)"
    return f"{place}{note}: {changes_text(fork.changes)}"


def cells(run: dict[str, Any]) -> dict[str, Any]:
    """{column: value} of a run: a row of the table of runs, or the first lines about a single one."""
    alive = run["liveness"] == "alive"
    step, total = run.get("step"), run.get("num_iterations")
    progress = f"{show(step)}/{show(total)}"
    if step is not None and total:
        progress += f" ({100 * step / total:.1f} %)"
    saved = run.get("saved_step")  # from where a resume continues
    checkpoint = run.get("checkpoint")
    if run["shown"] in RESUMABLE and step is not None and (saved or 0) < step:
        if saved is not None:
            progress += f", saved {saved:,}"
        elif checkpoint is None:
            progress += ", nothing saved"
    if checkpoint is not None and saved is None:
        checkpoint += " (not here)"  # deleted, or elsewhere
    bpb, bpb_step = run["val_bpb"], run.get("val_step")
    if bpb is not None and bpb_step is not None:
        bpb = f"{show(Bits(bpb))} at step {bpb_step:,}"
    return {
        "run": Path(run["run"]).name,
        "state": run["shown"],
        "step": progress,
        "loss": Bits.of(run.get("loss")),
        "bits per byte": bpb,
        "tok/s": run["tokens_per_s"] if alive else None,
        "eta": duration(run["eta_s"] if alive else None),
        "last checkpoint": checkpoint,
        "age": duration(run.get("heartbeat_age_s")),
        "reason": run["reason"],
    }


def status_text(run: dict[str, Any]) -> str:
    """The status of one run, one value per line."""
    values = cells(run)
    values["fork of" if run["fork"] else "began with"] = fork_text(run)
    if run["status"] is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["started"]))
        ago = duration(time.time() - run["started"])
        values["tokens"] = tokens_text(run)
        values["phase"] = run["phase"]
        values["steps not applied"] = run.get("skipped")
        values["newest launch"] = f"{began}, {ago} ago"
        values["mirror"] = mirror_text(run)
        if run["liveness"] == "alive":
            values["processes"] = processes_of(run)
    values["folder"] = run["run"]
    shown = {name: value for name, value in values.items() if value not in (None, "", "-", 0)}
    width = max(17, 2 + max(map(len, shown)))
    return "\n".join(f"{name:{width}}{show(value)}" for name, value in shown.items())


def tokens_text(run: dict[str, Any]) -> str | None:
    """How many tokens a run has trained on; for a fork, with those of its ancestors, as in its log.
    None if it has logged no step yet."""
    tokens = run["tokens"]
    if tokens is None or run["fork"] is None:
        return tokens and show(tokens)
    own_tokens = tokens - run["fork"]["tokens"]
    return f"{show(tokens)}, those of its ancestors included ({show(own_tokens)} of its own)"


def mirror_text(run: dict[str, Any]) -> str | None:
    """What the mirror of a run holds, and how far behind it is; None without a mirror."""
    mirror = run["mirror"]
    if mirror is None:
        return None
    text = f"{mirror['mirror']}: nothing copied yet"
    if mirror["checkpoint"] is not None:
        text = f"{mirror['mirror']}: {mirror['checkpoint']}"
    is_alive = run["liveness"] == "alive"
    if mirror["behind_steps"]:
        what = "" if is_alive else " the newest checkpoint here"
        text += f", {counted(mirror['behind_steps'], 'step')} behind{what}"
    if mirror["behind_s"] is not None:
        text += f", copied {duration(mirror['behind_s'])} ago"
    if mirror["pending"] is not None:
        text += f"; copying {mirror['pending']}, {mirror['bytes_left'] / 1e6:,.1f} MB left"
    if mirror["problem"]:
        text += f"; the last try failed: {mirror['problem']}"
    if not is_alive:
        text += " (as the last launch here left it)"
    return text


def processes_of(run: dict[str, Any]) -> str:
    """How many processes an active run has, and where."""
    ranks = run["ranks"]
    hosts = Counter(rank["host"] for rank in ranks)
    where = ", ".join(f"{host} ({number})" for host, number in hosts.items())
    return f"{run['world_size']} on {where}; rank 0 has pid {ranks[0]['pid']}"


def colored(lines: list[str], runs: list[dict[str, Any]]) -> list[str]:
    """The lines of the table, with colored states if stdout is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return lines
    header, *rows = lines
    begin = header.index("state")
    result = [header]
    for line, run in zip(rows, runs):
        word = run["shown"]
        if word in COLORS:
            before = line[:begin]
            after = line[begin + len(word) :]
            line = f"{before}\033[{COLORS[word]}m{word}\033[0m{after}"
        result.append(line)
    return result


def print_run(run: dict[str, Any], as_json: bool) -> None:
    """Print the status of a single run.

    FileNotFoundError if it has no state, ValueError if its state is corrupt.
    """
    if run["status"] is None:
        error = ValueError if run["shown"] == "unreadable" else FileNotFoundError
        raise error(run["reason"])
    text = json.dumps(run) if as_json else status_text(run)
    print(text, flush=True)


def print_table(runs: Sequence[dict[str, Any]]) -> None:
    """Print a line for each run, forks below their parents."""
    depths = tree_of({run["run"]: run["parent"] for run in runs})
    by_path = {run["run"]: run for run in runs}
    shown = [by_path[path] for path in depths]
    rows = []
    for run in shown:
        depth = depths[run["run"]]
        row = cells(run)
        row["run"] = "  " * depth + row["run"]
        if any(map(fork_text, runs)):
            row["fork"] = fork_text(run, below_parent=depth > 0)
        rows.append(row)
    lines = table([*rows[0]], [[*row.values()] for row in rows])
    print(*colored(lines, shown), sep="\n", flush=True)


def note_on_ranks(runs: Sequence[dict[str, Any]]) -> str:
    """Why the bits per byte of runs cannot be compared; "" if they can. Runs without readable settings
    and files are not judged."""
    from nanochat.run_facts import validation_note  # imports PyTorch

    evaluated = []
    for run in runs:
        reader = RunReader(Path(run["run"]))
        with contextlib.suppress(OSError, ValueError):
            if run["val_bpb"] is not None and reader.last_config and reader.manifests.get("val"):
                evaluated.append(reader)
    return validation_note(evaluated)


def print_status(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print once, and return the status of each run.

    If exactly one run is named: FileNotFoundError if it has no state, ValueError if its state is
    corrupt.
    """
    paths = [find_run(name) for name in args.run] or run_dirs()
    runs = [RunReader(path).status() for path in paths]
    if len(args.run) == 1:
        print_run(runs[0], args.json)
        return runs
    field = SORTS[args.sort]
    # runs without a value come last
    runs.sort(key=lambda run: (run.get(field) is None, run.get(field)))
    if args.json:
        print(json.dumps(runs), flush=True)
    elif runs:
        print_table(runs)
        if args.sort == "bpb" and (note := note_on_ranks(runs)):
            print(f"note: {note}", flush=True)
    else:
        print(f"no runs in {get_base_dir() / 'runs'}", flush=True)
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    """Print the status, repeatedly with --watch. FileNotFoundError for an unknown run."""
    args = parse_args(argv)
    if args.exit_code and len(args.run) != 1:
        raise ValueError(
            "--exit-code: this reports on one run; name it: python -m scripts.status RUN --exit-code"
        )
    runs = print_status(args)
    while args.watch and any(run["liveness"] == "alive" for run in runs):
        time.sleep(WATCH_EVERY_S)
        if not args.json:
            print("\033[H\033[J", end="")
        runs = print_status(args)
    return runs[0]["exit_code"] if args.exit_code else 0


if __name__ == "__main__":
    run_main(main)
