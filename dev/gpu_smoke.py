"""
The first thing to run on a GPU: does training work, and are its bits the same a second time?

    python -m dev.gpu_smoke

It takes about three minutes of one H100, needs no network, and makes its data from the Python that is
installed. `python -m dev.gpu_check` measures more, part by part.

    training     20 steps of scripts.base_train at depth 12 with its defaults: speed and memory
    bits         the same command again; with an empty Inductor cache; killed after a save and resumed.
                 Digests, losses, weights and optimizer state must be equal
    attention    each kernel against float64, in gpu_check's shapes
    generation   tokens are drawn, and the same ones twice

The last thing it prints is a table. The exit code is 1 if one figure is not as wanted, or could not be
measured. --device=cpu --tiny runs the same code on a small model in seconds: it shows that this script
works, and nothing of a GPU. Figures that only a GPU has are then "not measured here".
"""

import math
import shutil
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dev import gpu_check
from dev.gpu_check import Bench, Figure, Job, attention_errors, judge, prepare, train
from nanochat.cli import Parser, run_main
from nanochat.common import table
from nanochat.config import Settings
from nanochat.dist import compute_init, versions
from nanochat.engine import Engine
from nanochat.run_dir import read_config
from nanochat.start_run import estimate_memory
from scripts import compare_runs
from scripts.infer_bench import ENDLESS
from tests import training

LIMITS = {
    "step, s": "",
    "MFU, %": "",
    "peak memory, % of the estimate": "<= 107",
    "waiting for data, %": "<= 2",
    "places that differ": "<= 0",
    "tokens drawn otherwise": "<= 0",
} | {name: wanted for name, wanted in gpu_check.LIMITS.items() if name.startswith("attention")}


def flags(bench: Bench) -> dict[str, Any]:
    """Of all runs. On a GPU only depth and length are not the defaults."""
    tiny = {**gpu_check.TINY.bits, "num_iterations": 6, "save_every": 3}
    return tiny if bench.tiny else {"depth": 12, "num_iterations": 20, "save_every": 10}


def first_run(bench: Bench) -> Iterator[Figure]:
    """Train once, and report the speed of the second half."""
    steps = train(bench, "straight", **flags(bench))
    timed = steps[len(steps) // 2 + 1:]  # after compilation, and after the save in the middle
    yield "step, s", "d12", statistics.median(step["step_s"] for step in timed)
    yield "MFU, %", "d12", 100 * statistics.median(step["mfu"] for step in timed) if bench.cuda else None
    waited, spent = (sum(step[name] for step in timed) for name in ("wait_s", "step_s"))
    yield "waiting for data, %", "d12", 100 * waited / spent if bench.cuda else None
    estimate = sum(estimate_memory(Settings.from_json(read_config(training.run_dir("straight")))).values())
    peak = steps[-1].get("peak_memory_bytes")
    yield "peak memory, % of the estimate", "d12", None if peak is None else 100 * peak / estimate


def same_bits(bench: Bench, what: str) -> Iterator[Figure]:
    """Train again under other circumstances, and compare with the first run."""
    tag = what.replace(" ", "-")
    if what == "empty cache" and not bench.cuda:  # nothing is compiled
        yield "places that differ", what, None
        return
    with tempfile.TemporaryDirectory(prefix="gpu_smoke-") as cache:
        env = {"TORCHINDUCTOR_CACHE_DIR": cache} if what == "empty cache" else {}
        if what == "killed and resumed":
            killed_after = flags(bench)["save_every"] + 1
            train(bench, tag, hook=partial(training.die_after_step, killed_after), dies=True, sync_save=True,
                  **flags(bench))
        train(bench, tag, env=env, **flags(bench))
    notes: list[str] = []
    a, b = (compare_runs.open_side(side, notes) for side in ("straight", tag))
    parts = compare_runs.compare(a, b, notes)
    if not {"digests", "losses"} < {part.name for part in parts} or parts[-1].kind != "checkpoint":
        raise ValueError(f"too little to compare: {', '.join(part.name for part in parts)}")
    yield "places that differ", what, sum(len(part.gaps) for part in parts)
    shutil.rmtree(training.run_dir(tag))


def generation(bench: Bench) -> Iterator[Figure]:
    """Draw tokens twice with one seed."""
    engine = Engine(Job(bench, batch_size=1).model.eval(), ENDLESS)
    num = bench.sizes.tokens
    drawn = [list(engine.generate([1, 2, 3], 4, max_tokens=num, seed=7)) for _ in range(2)]
    if len(drawn[0]) != num:
        raise ValueError(f"got {len(drawn[0])} columns of tokens, expected {num}")
    yield "tokens drawn otherwise", f"4 rows of {num}", sum(a != b for a, b in zip(*drawn, strict=True))


CHECKS: list[Callable[[Bench], Iterator[Figure]]] = [
    first_run, partial(same_bits, what="the same again"), partial(same_bits, what="empty cache"),
    partial(same_bits, what="killed and resumed"), attention_errors, generation]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks and print a table; 1 if a figure is not as wanted."""
    p = Parser(description=__doc__)
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--tiny", action="store_true", help="a small model, to try this script itself")
    p.add_argument("--base-dir", type=Path, help="folder for data, runs and logs (default: a temporary one)")
    args = p.parse_args(argv)
    if args.device == "cpu" and not args.tiny:
        raise ValueError("--device cpu: it would take hours; add --tiny")
    *_, device = compute_init(args.device, deterministic=True)
    base = (args.base_dir or Path(tempfile.mkdtemp(prefix="gpu_smoke-"))).absolute()
    bench = Bench(device, args.tiny, base, base / "out", None, end=math.inf)
    bench.out.mkdir(parents=True, exist_ok=True)
    print(*(f"{name:13s} {value}" for name, value in versions(device).items()), f"logs: {bench.out}", sep="\n")
    prepare(bench)
    rows: list[tuple[str, ...]] = []
    for check in CHECKS:
        try:
            for name, of, figure in check(bench):
                shown = "" if figure is None else f"{figure:.4g}"
                rows.append((name, of, shown, LIMITS[name], judge(figure, LIMITS[name])))
                print("  " + " | ".join(rows[-1]), flush=True)
        except Exception as e:  # the other checks still run
            with (bench.out / "errors.log").open("a") as file:
                traceback.print_exc(file=file)
            function = getattr(check, "func", check)
            rows.append((function.__name__.replace("_", " "), (str(e).strip().splitlines() or [repr(e)])[-1][:80],
                         "", "", "FAILS"))
            print("  " + " | ".join(rows[-1]) + "; see errors.log", flush=True)
        if bench.cuda:
            torch.cuda.empty_cache()
    shutil.rmtree(base / "runs", ignore_errors=True)
    print("", *table(("measure", "of", "figure", "wanted", "verdict"), rows), sep="\n")
    return int(any(row[-1] == "FAILS" for row in rows))


if __name__ == "__main__":
    run_main(main)
