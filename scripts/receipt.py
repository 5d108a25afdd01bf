"""
Write a receipt of a run: a small file with which others can recompute its rows from the same data.

    python -m scripts.receipt mine --out=mine.json
    python -m scripts.verify mine.json --data-path=mytext --steps=0,7        # on another machine, without the run
    python -m scripts.inspect_data rows mine.json --step=7 --data-path=mytext
    python -m scripts.verify mine.json --replay=5%                           # with the run: do its weights follow?

nanochat/receipt.py says what it holds.
"""

from collections.abc import Sequence
from pathlib import Path

from nanochat.any_step import add_data_path
from nanochat.cli import Parser, run_main, setup_logging
from nanochat.common import counted, write_json
from nanochat.receipt import NAME, make_receipt
from nanochat.run_dir import find_run
from nanochat.run_reader import RunReader


def main(argv: Sequence[str] | None = None) -> int:
    """Write the receipt and print its path. ValueError or FileNotFoundError if the run's log or
    data is incomplete."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="a run's name or folder (default: the only run)"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help=f"file to write (default: RUN/{NAME})"
    )
    add_data_path(parser)
    args = parser.parse_args(argv)
    setup_logging()
    run = RunReader(find_run(args.run))
    receipt, out = make_receipt(run, data_path=args.data_path), args.out or run.run_dir / NAME
    write_json(out, receipt)
    number = sum(len(bucket["files"]) for bucket in receipt["files"].values())
    print(
        f"{out}: {counted(receipt['steps'], 'step')}, {counted(number, 'file')}, {out.stat().st_size:,} bytes"
    )
    return 0


if __name__ == "__main__":
    run_main(main)
