"""
Compare runs of many sizes: tables, and size and data as power laws of compute.

    python -m scripts.sweep --prefix=miniseries_ --out=results
    python -m scripts.sweep d12 d16 d20 --out=results

Each completed run gets a row in results.csv: depth, parameters, tokens, FLOPs, bits per byte, CORE
(if it was evaluated, and on how many tasks and items), tokens/s (of the median step), and peak memory
on a GPU. Tokens, FLOPs and time of a fork count those of its ancestors, too; tokens/s is that of its
own steps. Other runs are skipped with a note.

    miniseries     one run per size, at one ratio of tokens to parameters: each run is a point
    scaling laws   several sizes per budget of FLOPs (--target-flops): the minimum of a parabola of bits per byte in
                   log(parameters) is the best size for that budget: one point (approach 2 in arXiv 2203.15556)

      bits |.       .                    N |            .
           | '.   .'   <- budget           |        .
           |   '-'                         |    .            log N = a log C + b,  a +- its standard error
           |____^______ N                  |_____________ C

A power law of FLOPs, for parameters or for tokens, is a straight line, fitted to the logarithms of
the points by least squares. A line fits two points exactly, so the exponent has a standard error
only with three budgets or more. Scaling laws count the parameters in the layers' matrices and the
output head. Runs of fewer than three sizes, with only one budget, or on different data get tables,
but no laws.

    OUT/results.csv   the runs
    OUT/points.csv    the best size for each budget
    OUT/fit.csv       the power laws, if any
"""

import argparse
import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.cli import Parser, run_main
from nanochat.common import Bits, check_shape, counted, few, hash_json, print0, table, write_bytes
from nanochat.pins import fingerprint
from nanochat.run_dir import CONFIG_NAME, find_run, list_runs
from nanochat.run_facts import differing_code, validation_note
from nanochat.run_reader import RunReader

COLUMNS = (
    *("run", "depth", "flops_budget", "params", "params_scaling", "tokens", "flops"),
    *(
        "val_bpb",
        "core",
        "core_tasks",
        "core_items",
        "tokens_per_s",
        "train_time_s",
        "peak_memory_bytes",
    ),
)
POINT_COLUMNS = ("flops_budget", "flops", "params_scaling", "tokens", "val_bpb", "how")
LAW_COLUMNS = ("of", "exponent", "standard_error", "factor", "points")
SAME = 0.01  # FLOPs with a smaller relative difference count as one budget
CONFIG = {
    "depth": int,
    "target_flops": float,
    "derived": {
        "params_total": int,
        "params_transformer_matrices": int,
        "params_lm_head": int,
        "flops_per_token": int,
    },
}
Row = dict[str, Any]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(description="Compare runs of many sizes.", epilog=__doc__)
    p.add_argument("runs", metavar="RUN", nargs="*", help="names or folders of runs")
    p.add_argument("--prefix", help="add all runs whose names start with this")
    p.add_argument("--out", type=Path, required=True, help="folder for the tables")
    args = p.parse_args(argv)
    if args.prefix is not None:
        args.runs += [tag for tag in list_runs() if tag.startswith(args.prefix)]
    if not args.runs:
        raise ValueError(
            f"no runs: name some, or pass a --prefix; existing runs: {', '.join(list_runs()) or 'none'}"
        )
    return args


# ---- rows ----------------------------------------------------------------------------------------


def read_row(run_dir: Path) -> Row | None:
    """The row of a run; None if the run has not completed."""
    run = RunReader(run_dir)
    if run.outcome != "completed":
        return None
    check_shape(run.config, CONFIG, run_dir / CONFIG_NAME)
    derived = run.config["derived"]
    budget = run.last_config["target_flops"]
    # the results of its last step
    val = run.validation(run.num_steps)
    evaluation = run.evaluation if run.evaluation.get("step") == run.num_steps else {}
    core = evaluation.get("core", {})
    files: dict[str, dict[str, str]] = {}
    for split, buckets in run.manifests.items():
        files[split] = {bucket: fingerprint(manifest) for bucket, manifest in buckets.items()}
    return {
        "run": run.name,
        "data": hash_json([files, run.config.get("tokenizer_fingerprint")]),
        "depth": run.config["depth"],
        "flops_budget": budget if budget > 0 else None,
        "params": derived["params_total"],
        "params_scaling": derived["params_transformer_matrices"] + derived["params_lm_head"],
        "tokens": run.num_tokens,
        "flops": float(derived["flops_per_token"] * run.num_tokens),
        "val_bpb": val["bpb"] if val and val["step"] == run.num_steps else None,
        "core": core.get("core_metric"),
        "core_tasks": len(core["results"]) if core else None,
        "core_items": core.get("items"),
        "tokens_per_s": run.median("tokens_per_s"),
        "train_time_s": 3600 * run.axes()["hours"][-1],  # like the tokens, with its ancestors'
        "peak_memory_bytes": run.peak_memory_bytes,
    }


def to_csv(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Rows as CSV; unknown values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Write rows as CSV, and print them as a table."""
    write_bytes(path, to_csv(columns, rows).encode())
    cells = []
    for row in rows:
        shown = row | {"val_bpb": Bits.of(row.get("val_bpb"))}
        cells.append([shown[name] for name in columns])
    print0(*table(columns, cells), "", sep="\n")


# ---- points and power laws -----------------------------------------------------------------------


def column(rows: Sequence[Row], name: str) -> np.ndarray:
    """(n,) float64: a value of all rows."""
    return np.array([row[name] for row in rows], np.float64)


def best_of_budget(rows: Sequence[Row]) -> Row:
    """The best size for one budget of FLOPs.

    The minimum of a parabola of bits per byte over log(parameters) if it lies between the sizes,
    otherwise the best run.
    """
    best = min(rows, key=lambda row: row["val_bpb"])
    if len({row["params_scaling"] for row in rows}) < 3:
        return best | {"how": "the best run"}

    # the parabola
    x = np.log(column(rows, "params_scaling"))
    a, b, c = np.polyfit(x, column(rows, "val_bpb"), 2)
    lowest = -b / (2 * a) if a > 0 else math.inf
    if not x.min() <= lowest <= x.max():
        return best | {"how": "the best run: the parabola has no minimum between the sizes"}

    # how many tokens the budget allows at its minimum
    by_size = np.argsort(x)
    log_tokens = np.log(column(rows, "tokens"))
    tokens = np.exp(np.interp(lowest, x[by_size], log_tokens[by_size]))
    return {
        "flops": float(np.mean(column(rows, "flops"))),
        "params_scaling": float(np.exp(lowest)),
        "tokens": float(tokens),
        "val_bpb": float(np.polyval((a, b, c), lowest)),
        "how": "minimum of a parabola",
    }


def points_of(rows: Sequence[Row]) -> list[Row]:
    """The points to fit: the best size for each budget, and each run without a budget."""
    points = []
    budgets: dict[float, list[Row]] = {}
    for row in rows:
        budget = row["flops_budget"]
        if budget is None:
            points.append(row | {"how": "a run"})
        elif row["val_bpb"] is not None:
            budgets.setdefault(budget, []).append(row)
    for budget, of_budget in budgets.items():
        points.append(best_of_budget(of_budget) | {"flops_budget": budget})
    return sorted(points, key=lambda point: point["flops"])


def num_budgets(points: Sequence[Row]) -> int:
    """The number of budgets; points with almost the same FLOPs (see SAME) share one."""
    flops = np.sort(np.log(column(points, "flops")))
    is_new = np.diff(flops, prepend=-np.inf) > SAME
    return int(is_new.sum())


def why_no_laws(rows: Sequence[Row], points: Sequence[Row]) -> str:
    """The reason why no law can be fitted to the runs; "" if one can."""
    sizes = len({row["params_scaling"] for row in rows})
    if sizes < 3:
        return f"the runs have {counted(sizes, 'size')}, but a law needs at least 3"
    for row in rows:
        if row["data"] != rows[0]["data"]:
            return f"{rows[0]['run']} and {row['run']} have different data or tokenizers"
    if num_budgets(points) < 2:
        return "all points have the same FLOPs, but a law needs at least 2 budgets"
    return ""


def power_law(points: Sequence[Row], what: str) -> Row:
    """Fit log y = exponent * log(FLOPs) + log(factor) by least squares.

    Also the standard error of the exponent: None for two budgets, where it would only measure how
    similar the runs of one budget are.
    """
    x = np.log(column(points, "flops"))
    y = np.log(column(points, what))
    exponent, level = np.polyfit(x, y, 1)
    error = None
    if num_budgets(points) > 2:
        _, covariance = np.polyfit(x, y, 1, cov=True)
        error = float(covariance[0, 0]) ** 0.5
    return {
        "of": what,
        "exponent": float(exponent),
        "standard_error": error,
        "factor": math.exp(level),
        "points": len(x),
    }


def formula(law: Row) -> str:
    """A law as a formula with its error."""
    spread = "only two budgets, so no standard error"
    if law["standard_error"] is not None:
        spread = f"exponent ± {law['standard_error']:.2g}, one standard error"
    return f"{law['factor']:.4g} * FLOPs^{law['exponent']:.4f} ({spread})"


# ---- the script ----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Read the runs, fit laws, write tables.

    ValueError and OSError for bad flags and unreadable files.
    """
    args = parse_args(argv)
    rows = []
    runs = []
    for run_dir in map(find_run, dict.fromkeys(args.runs)):
        row = read_row(run_dir)
        if row is not None:
            rows.append(row)
            runs.append(RunReader(run_dir))
            continue
        print0(
            f"skipped: {run_dir.name} has not completed; run its command again (without --resume)"
        )
    if not rows:
        raise ValueError("no run has completed; resume one first")
    rows.sort(key=lambda row: (row["flops_budget"] or 0, row["params_scaling"], row["run"]))

    # the laws
    points = points_of(rows)
    laws = []
    why = why_no_laws(rows, points)
    if why:
        points = [row | {"how": "a run"} for row in rows]
    else:
        laws = [power_law(points, what) for what in ("params_scaling", "tokens")]

    # what to know about the figures
    if text := validation_note(runs):
        print0(f"warning: {text}", "", sep="\n")
    if code := differing_code([run.shown_code for run in runs]):
        print0(f"warning: the runs differ in {few(name for name, *_ in code)}", "", sep="\n")

    # the tables
    args.out.mkdir(parents=True, exist_ok=True)
    tables = {
        args.out / "results.csv": (COLUMNS, rows),
        args.out / "points.csv": (POINT_COLUMNS, points),
        args.out / "fit.csv": (LAW_COLUMNS, laws),
    }
    for path, (columns, lines) in tables.items():
        write_table(path, columns, lines)
    for law in laws:
        print0(f"{law['of']} = {formula(law)}")
    if why:
        print0(f"no laws: {why}")
    print0(f"written: {', '.join(map(str, tables))}")
    return 0


if __name__ == "__main__":
    run_main(main)
