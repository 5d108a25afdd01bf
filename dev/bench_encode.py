"""
How fast text becomes token ids: bare tiktoken, `encode_flat` with tiktoken, `encode_flat` with the fast encoder.

    python -m dev.bench_encode [--data-path ../shared/data] [--tokenizer DIR] [--threads 2] [--rounds 7]

The three encode the same documents with the same number of threads, one after the other in each round, so that load
from elsewhere falls on all of them; ratios are of the same round. Before that, ids are compared over all documents.
The last line is one JSON object; without the fast encoder (extra `fast`) its figures are null.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanochat.common import run_main
from nanochat.sources import ParquetSource, scan
from nanochat.tokenizer import Encoder, RustBPETokenizer, TiktokenEncoder

VOCAB_SIZE = 32768
MIN_SPEED, MIN_RATIO = 60.0, 4.0  # MB/s, and times bare tiktoken, wanted of the fast encoder on 2 threads


def read_texts(data_path: Path, max_bytes: int) -> list[str]:
    """Documents of every kind, about `max_bytes` of UTF-8: groups taken evenly from all files."""
    source = ParquetSource(scan(data_path), None)  # type: ignore[arg-type]  # it only fetches
    sizes = source.groups.tolist()
    texts: list[str] = []
    left = max_bytes
    for group in np.random.default_rng(0).permutation(len(sizes)).tolist():
        for text in source.fetch(group, 0, sizes[group]):
            texts.append(text.decode())
            left -= len(text)
        if left <= 0:
            break
    return texts


def contestants(tokenizer: RustBPETokenizer, texts: list[str], num_threads: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    fast, oracle = tokenizer.encoder, TiktokenEncoder(tokenizer.enc)

    def flat(encoder: Encoder) -> Callable[[], object]:
        def encode() -> object:
            tokenizer.encoder = encoder
            return tokenizer.encode_flat(texts, num_threads=num_threads)
        return encode

    found = {"tiktoken": lambda: tokenizer.enc.encode_ordinary_batch(texts, num_threads=num_threads),
             "encode_flat, tiktoken": flat(oracle)}
    return found if isinstance(fast, TiktokenEncoder) else {**found, "encode_flat, fast": flat(fast)}


def check_ids(runs: dict[str, Callable[[], object]], texts: list[str]) -> None:
    """Raise ValueError where the encoders give different ids; also warms them up."""
    results: list[Any] = [run() for name, run in runs.items() if name != "tiktoken"]
    if any(not np.array_equal(a, b) for result in results for a, b in zip(results[0], result)):
        raise ValueError(f"the encoders give different ids for {len(texts):,} documents")


def measure(runs: dict[str, Callable[[], object]], num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """MB/s of every contestant in every round; the first in a round is another one each time."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in tqdm(range(rounds), desc="rounds", disable=None):
        for name in names[i % len(names):] + names[:i % len(names)]:
            start = time.perf_counter()
            runs[name]()
            speeds[name].append(num_bytes / 1e6 / (time.perf_counter() - start))
    return speeds


def summary(values: list[float]) -> dict[str, float]:
    """Median and spread."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", type=Path, default=Path("../shared/data"), help="folder of parquet files")
    parser.add_argument("--tokenizer", type=Path, help="its folder (default: one trained on the texts)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-mb", type=float, default=40, help="how much text")
    args = parser.parse_args(argv)
    if args.threads < 1 or args.rounds < 1 or args.max_mb <= 0:
        raise ValueError(f"--threads {args.threads}, --rounds {args.rounds}, --max-mb {args.max_mb}: expected "
                         f"numbers above 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object."""
    args = parse_args(argv)
    command = "python -m dev.bench_encode " + " ".join(sys.argv[1:] if argv is None else argv)
    texts = read_texts(args.data_path, int(args.max_mb * 1e6))
    tokenizer = (RustBPETokenizer.train_from_iterator(texts, VOCAB_SIZE) if args.tokenizer is None
                 else RustBPETokenizer.from_directory(args.tokenizer))
    num_bytes = sum(len(text.encode()) for text in texts)
    about = {"command": command.strip(), "python": platform.python_version(), "numpy": np.__version__,
             "tiktoken": version("tiktoken"), "fastokens": version("fastokens"),
             "machine": f"{platform.machine()}, {os.cpu_count()} CPUs", "load_before": round(os.getloadavg()[0], 2),
             "threads": args.threads, "n": args.rounds, "documents": len(texts), "megabytes": num_bytes / 1e6,
             "vocab_size": tokenizer.get_vocab_size()}
    print(*(f"{name:13s} {value}" for name, value in about.items()), sep="\n", flush=True)
    runs = contestants(tokenizer, texts, args.threads)
    check_ids(runs, texts)
    speeds = measure(runs, num_bytes, args.rounds)
    results = {name: {"mb_per_s": summary(values),
                      "ratio": summary([a / b for a, b in zip(values, speeds["tiktoken"])])}
               for name, values in speeds.items()}
    for name, r in results.items():
        print("{:22s} {:6.1f} MB/s ({:.1f} to {:.1f})".format(name, *r["mb_per_s"].values())
              + "   {:5.2f} times bare tiktoken ({:.2f} to {:.2f})".format(*r["ratio"].values()))
    fast = results.get("encode_flat, fast")
    passed = None if fast is None else {"speed": fast["mb_per_s"]["median"] >= MIN_SPEED,
                                        "ratio": fast["ratio"]["median"] >= MIN_RATIO}
    print(f"wanted: {MIN_SPEED:.0f} MB/s and {MIN_RATIO:.0f} times on 2 threads; "
          + ("the fast encoder is not here" if passed is None else f"got {passed}"))
    print(json.dumps({**about, "load_after": round(os.getloadavg()[0], 2), "results": results, "pass": passed}))
    return 0


if __name__ == "__main__":
    run_main(main)
