"""
Write the report of a run: what ran, on what, how long, what came of it, and where everything lies.

    python -m scripts.report --run d12                      # writes RUN/report.md
    python -m scripts.report --run d12 --stages FILE        # with the times of speedrun.sh's stages

It reads the run directory and changes nothing else, so it may be written at any time and as often as you like.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from nanochat.common import Parser, run_main, write_bytes
from nanochat.report import describe_machine, make_report, read_facts, result_part
from nanochat.run_dir import find_run


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Write the report of a run.")
    parser.add_argument("--run", required=True, help="run directory or model tag")
    parser.add_argument("--stages", type=Path, help="a file of stage times, as speedrun.sh keeps it")
    parser.add_argument("--output", type=Path, help="default: RUN/report.md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Read, write, say where. Raises FileNotFoundError where there is no run, ValueError for a broken file in it."""
    args = parse_args(argv)
    run_dir = find_run(args.run).absolute()
    facts = read_facts(run_dir, stages=args.stages, machine=describe_machine())
    output = args.output or run_dir / "report.md"
    write_bytes(output, make_report(facts).encode())
    print(f"{run_dir.name}: {facts.status}")
    print("\n".join(result_part(facts)))
    print(f"report: {output}")
    return 0


if __name__ == "__main__":
    run_main(main)
