"""Compare the tokens that `crop` and nanochat's loader drop from the same documents, and measure
the loader's memory.

    python -m dev.compare_packing --work DIR --nanochat CHECKOUT [--data-path DATA]

Every bucket below `--data-path` is a kind of text. Four mixes of them are packed at T = 512, 1024,
2048 and 4096 with vocabularies of 2,048 and 32,768. Both sides pack the same shuffled documents for
several passes. Shares are relative to all tokens that were read:

    dropped    tokens that no row contains or can still contain; a pending document can still fill one row
    floor      tokens that no packer of whole rows can keep: all after the first T + 1 of a document

nanochat's loader keeps the longest documents in its buffer of 1,000 forever, so counting only
documents that left the buffer would flatter it. Memory is the anonymous memory of a process with 64
lanes, minus that of the bare process. The last line is one JSON object. The exit code is 1 if we
drop over 0.2 percentage points more than nanochat.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from dev.measure import SHARED, anonymous_mb, in_process, print_setup
from nanochat.cli import Parser, run_main, whole
from nanochat.common import table
from nanochat.dataloader import DataLoader
from nanochat.files import find_files
from nanochat.order import StreamConfig
from nanochat.packing import BestFit
from nanochat.sources import open_source, scan
from nanochat.splits import group_by_bucket
from nanochat.text_kinds import read_texts
from nanochat.tokenizer import RustBPETokenizer

VOCABULARIES, LENGTHS = (2048, 32_768), (512, 1024, 2048, 4096)
BUFFER = 128
LANES = 64
STEPS = 40
ALLOWED = 0.002  # share of all tokens, above nanochat's

# The beginning of a program that runs nanochat's loader. Files in NANOCHAT_BASE_DIR contain
# document numbers instead of text, which the program's own tokenizer turns into ids.
NANOCHAT_LOADER = """
import json, sys, types
import numpy as np
for name in ("requests", "filelock"):  # imported by its module, but not needed here
    sys.modules.setdefault(name, types.ModuleType(name))
sys.modules["filelock"].FileLock = None
from nanochat.dataloader import tokenizing_distributed_data_loader_with_state_bos_bestfit as loader
"""
COUNT_TOKENS = """
T, passes, lengths, read = int(sys.argv[1]), int(sys.argv[2]), np.load(sys.argv[3]).tolist(), 0
class Tokenizer:
    def get_bos_token_id(self):
        return None
    def encode(self, texts, prepend=None, num_threads=1):
        global read
        ids = [[0] * lengths[int(text)] for text in texts]
        read += sum(map(len, ids))
        return ids
batches = loader(Tokenizer(), 1, T, "train", device="cpu")
rows = 0
while read < passes * sum(lengths):
    next(batches)
    rows += 1
pending = sum(min(len(doc), T + 1) for doc in batches.gi_frame.f_locals["doc_buffer"])
print(json.dumps({"read": read, "emitted": rows * (T + 1), "pending": pending}))
"""


def run_nanochat(program: str, checkout: Path, base: Path, *flags: Any) -> str:
    """Run a program that starts with NANOCHAT_LOADER on the files in `base`. Returns its output.
    ValueError if it fails."""
    env = {
        **os.environ,
        "NANOCHAT_BASE_DIR": str(base.resolve()),
        "PYTHONPATH": str(checkout.resolve()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", NANOCHAT_LOADER + program, *map(str, flags)]
    done = subprocess.run(command, env=env, cwd=base, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{checkout}: its loader failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def lengths_of(work: Path, data_path: Path, vocab_size: int) -> dict[str, np.ndarray]:
    """{bucket: lengths of its documents in tokens, BOS included}, cached in `work`."""
    cache = work / f"lengths-{vocab_size}.npz"
    if not cache.exists():
        texts = {
            bucket: [text for file in files for text in read_texts(file)]
            for bucket, files in group_by_bucket(find_files(data_path), data_path).items()
        }
        everything = list(itertools.chain(*texts.values()))
        tokenizer = RustBPETokenizer.train_from_iterator(iter(everything[::4]), vocab_size)
        tokenizer.save(work / f"tokenizer-{vocab_size}", force=True)
        lengths = {
            bucket: np.diff(tokenizer.encode_flat(some)[1]) for bucket, some in texts.items()
        }
        np.savez(cache, **lengths)  # type: ignore[arg-type]
    return dict(np.load(cache))


def mixes(buckets: Sequence[str]) -> list[tuple[str, ...]]:
    """All buckets together, and all but each of the first three."""
    return [tuple(buckets), *(tuple(b for b in buckets if b != out) for out in sorted(buckets)[:3])]


def our_share(lengths: list[int], T: int, passes: int) -> float:
    """The share of tokens that one of our lanes drops."""
    packer = BestFit(T)
    number = 0
    read = 0
    while number < passes * len(lengths):
        while packer.wants(BUFFER):
            packer.push(number, lengths[number % len(lengths)])
            read += lengths[number % len(lengths)]
            number += 1
        packer.next_row()
    pending = sum(min(piece.length, T + 1) for piece in packer.waiting().values())
    return 1 - (packer.num_rows * (T + 1) + pending) / read


def nanochat_share(args: argparse.Namespace, lengths: list[int], T: int) -> float:
    """The share of tokens that nanochat's loader drops."""
    base = args.work / "there"
    folder = base / "base_data_climbmix"
    folder.mkdir(parents=True, exist_ok=True)
    numbers = pa.table({"text": list(map(str, range(len(lengths))))})
    for i in range(2):  # the last shard is for validation
        pq.write_table(numbers, folder / f"shard_{i:05d}.parquet", row_group_size=1024)
    np.save(base / "lengths.npy", lengths)
    output = run_nanochat(COUNT_TOKENS, args.nanochat, base, T, args.passes, "lengths.npy")
    counts = json.loads(output.splitlines()[-1])
    return 1 - (counts["emitted"] + counts["pending"]) / counts["read"]


def memory(args: argparse.Namespace, vocab_size: int, mix: Sequence[str], T: int) -> float:
    """The loader's peak memory in MB, without that of the bare process."""
    tokenizer = RustBPETokenizer.from_directory(args.work / f"tokenizer-{vocab_size}")
    files = [file for bucket in mix for file in find_files(args.data_path / bucket)]
    manifest = scan(args.data_path, files)
    before = anonymous_mb()
    peak = 0.0
    with DataLoader(
        StreamConfig(T=T, V=LANES),
        {"data": open_source(manifest, tokenizer)},
        tokenizer=tokenizer,
        rows_per_step=LANES,
        device_batch_size=16,
        num_threads=2,
    ) as loader:
        for _ in range(STEPS * LANES // 16):
            next(loader)
            peak = max(peak, anonymous_mb())
    return peak - before


def main(argv: Sequence[str] | None = None) -> int:
    """Pack everything on both sides and print a table. Exit code 1 if we drop more."""
    p = Parser(description=__doc__)
    p.add_argument("--work", type=Path, required=True, help="cache of tokenizers and lengths")
    p.add_argument("--data-path", type=Path, default=SHARED, help="a folder of buckets")
    p.add_argument("--nanochat", type=Path, required=True, help="a checkout of nanochat")
    p.add_argument("--passes", type=whole(1), default=3, help="passes over the documents")
    # vocabulary, T, buckets: measured in its own process
    p.add_argument("--memory", nargs="+", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.memory:
        vocab_size, T, *mix = args.memory
        print(json.dumps({"mb": memory(args, int(vocab_size), mix, int(T))}))
        return 0
    print_setup()
    args.work.mkdir(parents=True, exist_ok=True)
    rows, worst = [], 0.0
    cases = [
        (v, mix, T)
        for v in VOCABULARIES
        for mix in mixes(sorted(group_by_bucket(find_files(args.data_path), args.data_path)))
        for T in LENGTHS
    ]
    for vocab_size, mix, T in tqdm(cases, desc="mixes", disable=None):
        of = lengths_of(args.work, args.data_path, vocab_size)
        lengths = (
            np.random.default_rng(0)
            .permutation(np.concatenate([of[bucket] for bucket in mix]))
            .tolist()
        )
        floor = sum(max(0, n - T - 1) for n in lengths) / sum(lengths)
        ours = our_share(lengths, T, args.passes)
        theirs = nanochat_share(args, lengths, T)
        took = in_process(
            "dev.compare_packing",
            f"--work={args.work}",
            f"--nanochat={args.nanochat}",
            f"--data-path={args.data_path}",
            "--memory",
            str(vocab_size),
            str(T),
            *mix,
        )["mb"]
        percent = [f"{100 * share:.2f}" for share in (floor, ours, theirs)]
        rows.append([vocab_size, "+".join(mix), T, *percent, f"{took:.0f}"])
        worst = max(worst, ours - theirs)
    print(
        "\n".join(table(["vocabulary", "mix", "T", "floor %", "crop %", "nanochat %", "MB"], rows))
    )
    print(json.dumps({"worst_points": 100 * worst, "rows": rows}))
    return int(worst > ALLOWED)


if __name__ == "__main__":
    run_main(main)
