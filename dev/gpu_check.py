"""
Does everything that needs a GPU work on this one, and as fast as it should?

    python -m dev.gpu_check --part correct     kernels, compiled code and the optimizer against float64
    python -m dev.gpu_check --part speed       tokens/s, MFU and memory of three models
    python -m dev.gpu_check --part bits        the same command twice, killed, on two processes: the same bits
    python -m dev.gpu_check --part rest        a profile of a step, saves, the largest batch, generation, the loader

Work in progress: G2 is writing it (parts as lists of functions that yield rows, LIMITS as the table of thresholds).
"""

from collections.abc import Sequence

from dev.measure import new_parser, tell_about
from nanochat.common import run_main

PARTS = ("correct", "speed", "bits", "rest")


def main(argv: Sequence[str] | None = None) -> int:
    p = new_parser(__doc__)
    p.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    p.parse_args(argv)
    tell_about()
    return 0


if __name__ == "__main__":
    run_main(main)
