"""
What it takes to plan a run: `scripts.validate` on a large set of token files, over packing the same rows bare.

    python -m dev.bench_plan [--documents 2000000] [--steps 400] [--rounds 3]

The token files are synthetic (lengths log-normal, median 400 and mean 800 tokens, as of web text): their indices are
real, and their .bin are holes in the file system, which nobody reads. Timed are the command, by the clock, with its
imports, and this process's bare packers on lengths that lie ready. The last line is one JSON
object.
"""

import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dev.measure import SHARED, find_tokenizer, in_turns, new_parser, seconds, tell_about, tell_ratios
from nanochat.common import run_main
from nanochat.order import StreamConfig

FILES, T, ROWS, LANES = 8, 2048, 256, 64


def make_files(folder: Path, documents: int) -> np.ndarray:
    """GPTS files of so many documents; returns all lengths."""
    rng, found = np.random.default_rng(0), []
    folder.mkdir()
    for i in range(FILES):
        n = documents // FILES
        lengths = np.clip(rng.lognormal(np.log(400), 1.18, n), 2, None).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        header = struct.pack("<4sIII", b"GPTS", 1, 2, n)
        (folder / f"s{i}.idx").write_bytes(header + offsets.astype("<i8").tobytes() + bytes(2 * n))
        with open(folder / f"s{i}.bin", "wb") as f:
            f.truncate(2 * int(offsets[-1]))
        found.append(lengths)
    return np.concatenate(found)


def pack(lengths: np.ndarray, steps: int) -> None:
    """All lanes' rows of so many steps, from lengths alone."""
    config = StreamConfig(T=T, V=LANES)
    for share in np.array_split(lengths, LANES):
        packer, documents = config.new_packer(), enumerate(share.tolist())
        for _ in range(steps * ROWS // LANES):
            while packer.wants(config.fill_target(packer.row)):
                packer.push(*next(documents))
            packer.next_row()


def main(argv: Sequence[str] | None = None) -> int:
    """Make the files, measure, print."""
    p = new_parser(__doc__)
    p.add_argument("--documents", type=int, default=2_000_000)
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args(argv)
    about = tell_about()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer_dir = find_tokenizer(None, SHARED, folder)
        lengths = make_files(folder / "data", args.documents)
        command = [sys.executable, "-m", "scripts.validate", f"--data-path={folder / 'data'}", "--data-format=shards",
                   f"--tokenizer={tokenizer_dir}", f"--max-seq-len={T}", f"--num-iterations={args.steps}",
                   f"--total-batch-size={ROWS * T}", f"--lanes={LANES}", "--depth=4", "--device-type=cpu"]
        found = in_turns({
            "bare packers": lambda: seconds(lambda: pack(lengths, args.steps)),
            "scripts.validate": lambda: seconds(lambda: subprocess.run(command, check=True, capture_output=True)),
        }, args.rounds)
        print(f"  {args.documents:,} documents, {args.steps} steps of {ROWS} rows of {T} tokens, {LANES} lanes:")
        print(json.dumps({"about": about, "seconds": tell_ratios(found, "s")}))
    return 0


if __name__ == "__main__":
    run_main(main)
