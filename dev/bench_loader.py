"""
How fast, how lean and how soon the loader delivers, against bare tiktoken on the same texts in the same run.

    python -m dev.bench_loader [--data-path ../shared/data] [--tokenizer-dir DIR] [--threads 2]

Parts, each in a process of its own:
    speed     tokens/s of (16, 2048) int64 inputs and targets in `split`, beside bare `encode_ordinary_batch`
    first     seconds to the first whole step: 64 lanes in one process, and one rank of 8; resumed at steps 5 and 500
    memory    anonymous memory over the bare process, along a run with 64 lanes, for the corpus and for ten of it
    decode    how often each row group is decompressed in whole passes, by one process and by eight ranks
    shards    pretokenized: tokens/s of each layout on one core, beside a bare gather of contiguous rows from a memory
              map; anonymous memory along an epoch; seconds to the first batch of 1,000 shards and of 10 M documents
Prints figures as it goes; the last line is one JSON object.
"""

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import tiktoken
import torch

from dev.bench_shards import B, T, V, bench_shards, steps
from dev.measure import anonymous_mb
from nanochat.common import quiet_gc, read_json, run_main, write_json
from nanochat.dataloader import DataLoader
from nanochat.dataset import find_files
from nanochat.order import StreamConfig, block
from nanochat.sources import ParquetSource, scan
from nanochat.stream import Cursor, Stream
from nanochat.tokenizer import RustBPETokenizer

ROWS = 64  # of a step
SHARED = Path(__file__).parents[2] / "shared" / "data"


def open_loader(args: argparse.Namespace, *, rank: int = 0, world_size: int = 1, cursors: list[Cursor] | None = None,
                start_step: int = 0, **kwargs: Any) -> tuple[DataLoader, ParquetSource]:
    """The loader under test: 64 lanes, 64 rows a step, documents split."""
    tokenizer = RustBPETokenizer.from_directory(args.tokenizer_dir)
    source = ParquetSource(scan(args.data_path), tokenizer)
    loader = DataLoader(StreamConfig(T=T, V=V, long_docs="split"), {"data": source}, tokenizer=tokenizer,
                        rows_per_step=ROWS, device_batch_size=B, rank=rank, world_size=world_size,
                        num_threads=args.threads, cursors=cursors, start_step=start_step, **kwargs)
    return loader, source


def bench_speed(args: argparse.Namespace) -> dict[str, Any]:
    """Alternate bare tiktoken and the loader over about the same amount of text."""
    tokenizer = RustBPETokenizer.from_directory(args.tokenizer_dir)
    files = find_files(args.data_path)
    texts = [t for f in files for t in pq.read_table(f, columns=["text"]).column("text").to_pylist()]
    texts = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]
    size = 10_000_000  # characters a round
    rounds: dict[str, list[float]] = {"tiktoken": [], "encode_flat": [], "loader": [], "loader, no digest": []}
    loaders = {"loader": open_loader(args)[0], "loader, no digest": open_loader(args, with_digest=False)[0]}
    for loader in loaders.values():
        steps(loader, 80)  # past the first rows, while buffers grow and more is read than delivered
    quiet_gc()  # as base_train does after its first step
    at = 0
    for _ in range(args.rounds):
        part: list[str] = []
        while sum(map(len, part)) < size:
            part += texts[at:at + 64]
            at = (at + 64) % len(texts)
        began = time.perf_counter()
        ids = tokenizer.enc.encode_ordinary_batch(part, num_threads=args.threads)
        rounds["tiktoken"].append(sum(map(len, ids)) / (time.perf_counter() - began))
        began = time.perf_counter()
        flat, _ = tokenizer.encode_flat(part, num_threads=args.threads)
        rounds["encode_flat"].append(len(flat) / (time.perf_counter() - began))
        del ids, flat
        for name, loader in loaders.items():
            number = 32
            steps(loader, 4)  # what was prefetched while the others ran
            began = time.perf_counter()
            steps(loader, number)
            rounds[name].append(number * ROWS * T / (time.perf_counter() - began))
    for loader in loaders.values():
        loader.close()
    result: dict[str, Any] = {}
    for name, rates in rounds.items():
        median = statistics.median(rates)
        result[name] = median
        print(f"  {name:20s} {median / 1e6:6.2f} M tokens/s  (n={len(rates)}, {min(rates) / 1e6:.2f} to "
              f"{max(rates) / 1e6:.2f})  {median / result['tiktoken']:.2f} x tiktoken")
    ratios = [a / b for a, b in zip(rounds["loader"], rounds["tiktoken"])]
    result["ratio"] = statistics.median(ratios)
    print(f"  ratio by round: median {result['ratio']:.2f}, {min(ratios):.2f} to {max(ratios):.2f}  (wanted: 0.85)")
    return result


def first_step_s(args: argparse.Namespace, **kwargs: Any) -> float:
    """Seconds from nothing (tokenizer and files not open) to one whole step."""
    began = time.perf_counter()
    loader, _ = open_loader(args, **kwargs)
    steps(loader, 1)
    seconds = time.perf_counter() - began
    loader.close()
    return seconds


def bench_first(args: argparse.Namespace) -> dict[str, Any]:
    """Time to the first step: fresh, one of 8 ranks, resumed early and late."""
    saved = {}
    loader, _ = open_loader(args)
    for step in (5, 500):
        steps(loader, step - loader.step)
        saved[step] = json.loads(json.dumps(loader.cursors()))
    loader.close()
    first_step_s(args)  # files into the page cache
    kinds: dict[str, dict[str, Any]] = {
        "fresh, 64 lanes": {}, "fresh, one rank of 8": {"rank": 3, "world_size": 8},
        **{f"resumed at step {s}": {"cursors": c, "start_step": s} for s, c in saved.items()}}
    result = {}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind, kwargs in kinds.items():
            times[kind].append(first_step_s(args, **kwargs))
    for kind, seconds in times.items():
        result[kind] = statistics.median(seconds)
        print(f"  {kind:22s} {result[kind]:.3f} s  (n={len(seconds)}, {min(seconds):.3f} to {max(seconds):.3f})  "
              f"{result[kind] / result['fresh, 64 lanes']:.2f} x fresh")
    return result


def bench_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Anonymous memory along a run, over that of the process with everything imported and the tokenizer loaded."""
    tokenizer = RustBPETokenizer.from_directory(args.tokenizer_dir)
    tokenizer.encode_flat(["warm up"], num_threads=1)
    gc.collect()
    bare = anonymous_mb()
    loader, _ = open_loader(args)
    marks = []
    for _ in range(12):
        steps(loader, args.memory_steps // 12)
        marks.append(anonymous_mb() - bare)
    loader.close()
    print(f"  bare {bare:.0f} MB; over it, along {args.memory_steps} steps: {', '.join(f'{m:.0f}' for m in marks)} MB"
          f"  (wanted: under 150, flat)")
    return {"bare_mb": bare, "over_mb": marks}


def bench_decode(args: argparse.Namespace) -> dict[str, Any]:
    """Row groups decompressed by all ranks in whole passes over the data, over the row groups and passes."""
    tokenizer = RustBPETokenizer.from_directory(args.tokenizer_dir)
    manifest = scan(args.data_path)
    result: dict[str, Any] = {}
    for world_size, epochs in ((1, 1), (8, 1), (8, 3)):
        config = StreamConfig(T=T, V=V, long_docs="split", max_epochs=epochs)
        decoded = 0
        for rank in range(world_size):
            source = ParquetSource(manifest, tokenizer)
            if epochs > 1 and not source.small:
                return result  # large buckets: every epoch is like the first, and takes minutes
            stream = Stream(config, {"data": source}, block(rank, world_size, V), tokenizer=tokenizer.fingerprint,
                            num_threads=args.threads)
            while stream.next_rows(1):
                pass
            stream.close()
            decoded += source.decoded
        share = decoded / len(source.groups) / epochs
        result[f"W={world_size}, {epochs} epoch(s)"] = share
        print(f"  W = {world_size}, {epochs} epoch(s): {share:.2f} decodes of each of {len(source.groups)} row groups "
              f"an epoch  (wanted: under 1.3 at W = 8)")
    return result


PARTS = {"speed": bench_speed, "first": bench_first, "memory": bench_memory, "decode": bench_decode,
         "shards": bench_shards}


def multiply(data_path: Path, folder: Path, times: int) -> Path:
    """A corpus of `times` copies of one."""
    for i in range(times):
        for f in find_files(data_path):
            target = folder / f"copy{i}" / f.relative_to(data_path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(f, target)
    return folder


def run_part(args: argparse.Namespace, part: str, out: Path, **changes: Any) -> Any:
    """Run one part in a fresh process; its printed lines go through."""
    values = {**vars(args), **changes}
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in values.items() if k not in ("part", "json") and v is not None]
    subprocess.run([sys.executable, "-m", "dev.bench_loader", f"--part={part}", f"--json={out}", *flags], check=True)
    return read_json(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, or the one named."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data-path", type=Path, default=SHARED)
    p.add_argument("--tokenizer-dir", type=Path, help="default: one of 32,768 tokens is trained on the data")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--memory-steps", type=int, default=240)
    p.add_argument("--part", choices=sorted(PARTS), help="only this one")
    p.add_argument("--json", type=Path, help="with --part: where its figures go")
    args = p.parse_args(argv)
    if args.part and args.json:
        write_json(args.json, PARTS[args.part](args))
        return 0
    print(f"python {platform.python_version()}, torch {torch.__version__}, pyarrow {pyarrow.__version__}, tiktoken "
          f"{tiktoken.__version__ if hasattr(tiktoken, '__version__') else '?'}, numpy {np.__version__}; "
          f"{os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f}")
    print("command: python -m dev.bench_loader " + " ".join(sys.argv[1:]))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if args.tokenizer_dir is None:
            texts = (t for f in find_files(args.data_path) for t in pq.read_table(f)["text"].to_pylist())
            RustBPETokenizer.train_from_iterator(texts, 32768).save(work / "tokenizer")
            args.tokenizer_dir = work / "tokenizer"
        result = {}
        for part in PARTS if args.part is None else (args.part,):
            print(f"{part}: {(PARTS[part].__doc__ or '').splitlines()[0]}", flush=True)
            result[part] = run_part(args, part, work / "out.json")
        ten = multiply(args.data_path, work / "ten", 10) if args.part is None else None
        for part in ("memory", "decode") if ten else ():
            print(f"{part}, with ten times the corpus:", flush=True)
            result[f"{part} x10"] = run_part(args, part, work / "out.json", data_path=ten)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_main(main)
