"""
Measure how long a run waits for data of the Hub: until its first batch, and in the steps after it.

    python -m dev.bench_hub [--part start|waits] [--latency-ms=50] [--mb-per-s=20]

    start    seconds until the first batch of a new run, from an empty cache, from the one that this leaves, and from a
             copy: the listing, the footers of all files, and what 64 lanes need for 64 rows; 10, 1,000 and 6,543 files
    waits    milliseconds that the loader makes a step of one second wait, in which 256 rows of 2,048 tokens are
             trained on; from a copy, with data fetched ahead, and without

The server is tests/hub_server.py, in a process of its own, which adds the latency to each request
and sends the bytes of all connections over one line of this speed (`start`: without a limit). Files
are random words, in row groups of 16 or 64 documents. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dev.measure import in_process, print_setup
from nanochat import parquet_source
from nanochat.cli import Parser, run_main
from nanochat.common import AnyPath, begin_launch
from nanochat.dataloader import DataLoader
from nanochat.order import StreamConfig
from nanochat.sources import open_data
from nanochat.splits import pin_files
from nanochat.tokenizer import RustBPETokenizer

DATA_SET = "hf://datasets/own/set/data"
HOW = ("from a copy", "fetched ahead", "not ahead")
T = 2048
LANES = 64
FILES = (10, 1000, 6543)
DOCUMENT_BYTES = 1500
STEPS = 30  # of which the waits are measured, after the first
STEP_ROWS = 256


def make_words(num_bytes: int) -> bytes:
    """Random words, of which some are frequent."""
    rng = np.random.default_rng(0)
    letters = rng.integers(97, 123, (5000, 8), np.uint8)
    words = [bytes(row[: 2 + number % 7]) for number, row in enumerate(letters)]
    ranks = np.minimum(rng.zipf(1.3, num_bytes // 5) - 1, len(words) - 1)
    return b" ".join(words[rank] for rank in ranks)


def write_files(folder: Path, num_files: int, groups: int, group_documents: int) -> None:
    """Write parquet files, all different."""
    folder.mkdir()
    words = make_words(8 << 20)
    rng = np.random.default_rng(1)
    for number in range(num_files):
        starts = rng.integers(0, len(words) - DOCUMENT_BYTES, groups * group_documents)
        texts = [words[at : at + DOCUMENT_BYTES].decode() for at in starts]
        table = pa.table({"text": texts})
        name = folder / f"{number:05d}.parquet"
        # without statistics, like nanochat's own data sets
        pq.write_table(
            table,
            name,
            row_group_size=group_documents,
            compression="zstd",
            write_statistics=False,
        )


@contextlib.contextmanager
def server(folder: Path, latency_ms: float, mb_per_s: float) -> Iterator[None]:
    """A server in a process of its own, which the environment names."""
    command = [sys.executable, "-m", "tests.hub_server", folder, latency_ms, mb_per_s]
    with subprocess.Popen(
        list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with mock.patch.dict(os.environ, {"HF_ENDPOINT": url}):
            yield
        process.stdin.close()


def open_loader(
    tokenizer: RustBPETokenizer, rows_per_step: int, path: AnyPath | str = DATA_SET
) -> DataLoader:
    """The loader of a new run, which is pinned now."""
    begin_launch()
    manifests = pin_files(path)
    data = open_data(manifests, tokenizer)
    return DataLoader(
        StreamConfig(T=T, V=LANES),
        data.train,
        tokenizer=tokenizer,
        rows_per_step=rows_per_step,
        device_batch_size=16,
    )


def first_batch_s(tokenizer: RustBPETokenizer, path: AnyPath | str = DATA_SET) -> float:
    """Seconds from the start of a run to its first batch."""
    began = time.perf_counter()
    with contextlib.closing(open_loader(tokenizer, LANES, path)) as loader:
        next(loader)
        return time.perf_counter() - began


def bench_start(args: argparse.Namespace, tokenizer: RustBPETokenizer, base: Path) -> Any:
    result = {}
    for num_files in FILES:
        folder = base / "files"
        write_files(folder, num_files, groups=1, group_documents=16)
        with server(folder, args.latency_ms, 0):
            cold = first_batch_s(tokenizer)
            warm = first_batch_s(tokenizer)
        copy = first_batch_s(tokenizer, folder)
        print(
            f"  {num_files:,} files: {cold:.1f} s; from the cache {warm:.1f} s, from a copy {copy:.1f} s",
            flush=True,
        )
        result[num_files] = {"cold_s": cold, "warm_s": warm, "copy_s": copy}
        shutil.rmtree(folder)
        shutil.rmtree(base / "data_cache")
    return result


def step_waits_ms(tokenizer: RustBPETokenizer, path: AnyPath | str) -> list[float]:
    """Milliseconds that each step after the first waits for its batches."""
    waits = []
    with contextlib.closing(open_loader(tokenizer, STEP_ROWS, path)) as loader:
        for step in range(STEPS + 1):
            before = loader.wait_s
            began = time.perf_counter()
            for _ in range(loader.micro_batches_per_step):
                next(loader)
            waited = loader.wait_s - before
            if step > 0:
                waits.append(1000 * waited)
            # the rest of a step that takes one second beside its wait
            time.sleep(max(0.0, began + waited + 1.0 - time.perf_counter()))
    return waits


def bench_waits(args: argparse.Namespace, tokenizer: RustBPETokenizer, base: Path) -> Any:
    folder = base / "files"
    write_files(folder, 40, groups=40, group_documents=64)
    result = {}
    for name in HOW:
        path = folder if name == "from a copy" else DATA_SET
        ahead = 0 if name == "not ahead" else parquet_source.GROUPS_AHEAD
        with (
            server(folder, args.latency_ms, args.mb_per_s),
            mock.patch.object(parquet_source, "GROUPS_AHEAD", ahead),
        ):
            waits = step_waits_ms(tokenizer, path)
        shutil.rmtree(base / "data_cache", ignore_errors=True)
        longest = max(waits)
        step = waits.index(longest) + 1
        number = sum(wait > 5 for wait in waits)
        total = sum(waits)
        print(
            f"  {name}: {number} of {STEPS} steps wait more than 5 ms; longest {longest:.0f} ms (step {step}), "
            f"total {total:.0f} ms",
            flush=True,
        )
        result[name] = {"waiting_steps": number, "longest_ms": longest, "total_ms": total}
    return result


PARTS = {"start": bench_start, "waits": bench_waits}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, or the one that --part names."""
    p = Parser(description=__doc__)
    p.add_argument("--part", choices=PARTS, help="run only this part")
    p.add_argument("--latency-ms", type=float, default=50.0, help="added to each request")
    p.add_argument("--mb-per-s", type=float, default=20.0, help="speed of the line, for `waits`")
    p.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.inside:
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder)
            texts = make_words(1 << 20).decode().split(" s")
            tokenizer = RustBPETokenizer.train_from_iterator(texts, 4096)
            with mock.patch.dict(os.environ, {"NANOCHAT_BASE_DIR": folder}):
                print(json.dumps(PARTS[args.part](args, tokenizer, base)))
        return 0
    result: dict[str, Any] = {"about": print_setup()}
    for part in [args.part] if args.part else PARTS:
        print(f"{part}:", flush=True)
        flags = (f"--latency-ms={args.latency_ms}", f"--mb-per-s={args.mb_per_s}")
        result[part] = in_process("dev.bench_hub", "--inside", f"--part={part}", *flags)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_main(main)
