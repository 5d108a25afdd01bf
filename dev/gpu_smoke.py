"""
The first check on a new GPU: does training work, and does a second run have the same bits?

    python -m dev.gpu_smoke

Takes about three minutes on one H100, needs no network, and makes its data from PyTorch's sources.
`python -m dev.gpu_check` measures more, part by part.

    training     20 steps of scripts.base_train at depth 12 with default settings: speed and memory
    bits         the same command again; with an empty Inductor cache; killed after a save and resumed. Digests, losses,
                 weights and optimizer state must be equal
    attention    each kernel against float64, in gpu_check's shapes
    generation   the same seed must sample the same tokens twice

Ends with a table. The exit code is 1 if a figure misses its limit or could not be measured.
--device=cpu --tiny runs the same code on a small model in seconds. That tests this script, not a
GPU: figures that need one are "not measured here".
"""

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace

from dev import gpu_check
from dev.gpu_check import Bench, Check, Figure
from nanochat.cli import Parser, run_main
from nanochat.engine import Engine
from scripts.infer_bench import ENDLESS

LIMITS = gpu_check.LIMITS | {"waiting for data, %": "<= 2", "sampled tokens that differ": "<= 0"}
# flags of scripts.base_train; the others have their defaults
DEFAULTS = {"depth": 12, "num_iterations": 20, "save_every": 10}
NUM_TOKENS = 64


def first_run(bench: Bench) -> Iterator[Figure]:
    """Train once, and report the speed of the second half."""
    steps = gpu_check.train(bench, "straight", **bench.sizes.runs)
    timed = steps[len(steps) // 2 + 1 :]  # after compilation and the save in the middle
    yield from gpu_check.figures_of(bench, "d12", "straight", timed)


def generation(bench: Bench) -> Iterator[Figure]:
    """Sample tokens twice with the same seed."""
    engine = Engine(bench.model().eval(), ENDLESS)
    columns = [list(engine.generate([1, 2, 3], 4, max_tokens=NUM_TOKENS, seed=7)) for _ in range(2)]
    if len(columns[0]) != NUM_TOKENS:
        raise ValueError(f"got {len(columns[0])} columns of tokens, expected {NUM_TOKENS}")
    yield (
        "sampled tokens that differ",
        f"4 rows of {NUM_TOKENS}",
        sum(a != b for a, b in zip(*columns, strict=True)),
    )


SECOND_RUNS = [gpu_check.same_command, gpu_check.empty_cache, gpu_check.killed_and_resumed]
CHECKS: list[Check] = [
    first_run,
    *(partial(gpu_check.bits, second=second) for second in SECOND_RUNS),
    gpu_check.attention_errors,
    generation,
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks and print a table. Exit code 1 if a figure misses its limit or could not be
    measured."""
    args, bench = gpu_check.open_bench(Parser(description=__doc__), argv)
    if not args.tiny:
        bench.sizes = SimpleNamespace(**vars(bench.sizes) | {"runs": DEFAULTS})
    return gpu_check.report(args, bench, gpu_check.run_checks(bench, "smoke", CHECKS, LIMITS))


if __name__ == "__main__":
    run_main(main)
