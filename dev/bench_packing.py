"""
What packing costs: tokens dropped, tokens repeated, waits, and the packer's speed. From lengths alone.

    python -m dev.bench_packing --data-path ../shared/data
    python -m dev.bench_packing --data-path DIR --tokenizer DIR --T 2048 --epochs 3

For every T each of the lanes packs its share of each epoch, in the order of the stream, with packers, buffers and
refills as in training. In `crop` the tokens beyond the first T + 1 of a document can never be used; their share is the
floor, what is dropped above it is the excess:

    rows of a lane   [ epoch 0: not counted ][ epochs 1 .. E-1: counted until the lane has read its last unit ]

In `split` every token but BOS must be a live target exactly once: the live intervals of a document must follow each
other without gap or overlap from its first token to its last, or to where the packer still holds it.

Speed is the time (of the processor, so that other processes count little) of push and next_row, the units of lengths
lying ready and the buffer at its full size; garbage collection is off. Tokens emitted are those in rows, tokens pushed
all that the documents have, so more where much is cropped.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from nanochat.common import hash_json, run_main
from nanochat.dataset import BUCKET
from nanochat.order import Order, StreamConfig
from nanochat.packing import BestFit, Placement
from nanochat.sources import ParquetSource, fingerprint, scan
from nanochat.stream import Document
from nanochat.tokenizer import RustBPETokenizer

VOCAB_SIZE = 32768
MAX_EXCESS_POINTS = {512: 2.0, 1024: 0.8, 2048: 0.3, 4096: 0.3}
MIN_SPEED = {2048: 300e6}  # tokens emitted per second on one core
Unit = list[tuple[Document, int]]  # documents and their lengths in tokens, BOS included


# ---- lengths --------------------------------------------------------------------------------------------------------

def document_lengths(data_path: Path, tokenizer_dir: Path | None, cache_dir: Path) -> list[np.ndarray]:
    """For each group the tokens of its documents, BOS included; kept in the cache."""
    manifest = scan(data_path)
    tokenizer = None if tokenizer_dir is None else RustBPETokenizer.from_directory(tokenizer_dir)
    name = VOCAB_SIZE if tokenizer is None else tokenizer.fingerprint
    path = cache_dir / f"lengths-{hash_json([fingerprint(manifest), name])}.npz"
    if not path.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        if tokenizer is None:
            print(f"training a tokenizer of {VOCAB_SIZE:,} tokens on the data", flush=True)
            tokenizer = RustBPETokenizer.train_from_iterator(all_texts(manifest), VOCAB_SIZE)
        source = ParquetSource(manifest, tokenizer)
        groups = [np.array([len(ids) + 1 for ids in source.encode(source.fetch(g, 0, n))], np.int64)
                  for g, n in enumerate(tqdm(source.groups.tolist(), desc="tokenizing", unit=" groups", disable=None))]
        np.savez(path, *groups)
    with np.load(path) as saved:
        return [saved[f"arr_{g}"] for g in range(len(saved.files))]


def all_texts(manifest: dict[str, Any]) -> Iterator[str]:
    """Every document of the files, in their order."""
    source = ParquetSource(manifest, None)  # type: ignore[arg-type]  # it only fetches
    for group, n in enumerate(source.groups.tolist()):
        yield from (text.decode() for text in source.fetch(group, 0, n))


def lane_units(lengths: list[np.ndarray], config: StreamConfig, lane: int, epochs: int) -> list[list[Unit]]:
    """For each epoch the units that a lane reads, documents in the order of the stream."""
    order = Order(np.array([len(group) for group in lengths]), bucket=BUCKET, config=config)
    found: list[list[Unit]] = []
    for epoch in range(epochs):
        found.append([])
        for unit in order.share(lane, epoch):
            group, local = order.locate(epoch, unit)
            first = local * order.unit_size
            sizes = lengths[group][first:first + order.unit_size].tolist()
            found[-1].append([((epoch, group, first + i), sizes[i])
                              for i in order.rows(epoch, group, local, len(sizes)).tolist()])
    return found


# ---- quality --------------------------------------------------------------------------------------------------------

@dataclass
class Account:
    """What the lanes' rows come to. Shares are of the documents that were placed in counted rows."""

    consumed: int = 0  # tokens of documents placed, BOS included
    floor: int = 0  # of them, beyond the first T + 1 of their document
    dropped: int = 0
    emitted: int = 0
    repeated: int = 0  # as context
    inserted: int = 0  # BOS of continuations
    longest_wait: int = 0  # rows packed between the arrival of a piece and its placement
    least_slack: int = sys.maxsize  # rows between that and the stated bound


def pack_lane(config: StreamConfig, lane: int, units: list[list[Unit]], account: Account) -> None:
    """Pack a lane's epochs and add up; asserts that nothing is lost, doubled or late by more than the bound."""
    packer = config.new_packer()
    assert isinstance(packer, BestFit)
    sizes: dict[Document, int] = {}
    came: dict[Document, tuple[int, int]] = {}  # row and documents waiting at arrival of the piece
    live: dict[Document, int] = {}  # first token that was no live target yet
    for epoch, unit in ((epoch, unit) for epoch, in_epoch in enumerate(units) for unit in in_epoch):
        while len(packer) >= config.fill_target(lane, packer.row) and packer.ready:
            before = packer.cropped, packer.repeated, packer.inserted
            placements = packer.next_row()
            watch(packer, placements, came, account)
            check_live(packer, placements, sizes, live)
            if epoch:
                after = packer.cropped, packer.repeated, packer.inserted
                count(config, placements, sizes, [b - a for a, b in zip(before, after)], account)
        for key, size in unit:
            sizes[key] = size
            came[key] = packer.row, len(packer)
            packer.push(key, size)
    assert packer.cropped == 0 or not packer.split
    for key, next_live in live.items():  # what was begun is done, dropped, or waits with just what is left
        start = packer.docs[key][1] if key in packer.docs else sizes[key]
        assert next_live == start or not packer.split, f"{key}: live up to {next_live}, waits from {start}"


def watch(packer: BestFit, placements: list[Placement], came: dict[Document, tuple[int, int]], account: Account
          ) -> None:
    """Note how long the pieces of a row waited, and when their rests came back."""
    for key, *_ in placements:
        row, _waiting = came.pop(key)
        wait = packer.row - 1 - row
        account.longest_wait = max(account.longest_wait, wait)
        if key in packer.docs:
            came[key] = packer.row, len(packer) - 1


def check_live(packer: BestFit, placements: list[Placement], sizes: dict[Document, int], live: dict[Document, int]
               ) -> None:
    """Assert that the row is full and its live targets are the next ones of their documents."""
    assert sum(length for _, _, length, _ in placements) == packer.capacity
    for key, start, length, off in placements:
        first, stop = (1, length) if start == 0 else (start + off, start + length - 1)
        if first == stop and start:
            continue  # nothing but context
        assert live.get(key, 1) == first <= stop <= sizes[key], f"{key}: live targets [{first}, {stop})"
        live[key] = stop


def count(config: StreamConfig, placements: list[Placement], sizes: dict[Document, int], change: list[int],
          account: Account) -> None:
    """Add a row to the account."""
    new = [sizes[key] for key, start, _, _ in placements if start == 0]
    account.consumed += sum(new)
    account.floor += sum(max(0, size - config.T - 1) for size in new)
    account.emitted += config.T + 1
    for name, amount in zip(("dropped", "repeated", "inserted"), change):
        setattr(account, name, getattr(account, name) + amount)


# ---- speed ----------------------------------------------------------------------------------------------------------

def time_packer(config: StreamConfig, lanes: list[list[Unit]]) -> tuple[float, int, int]:
    """(seconds, tokens emitted, tokens pushed) of packing all lanes, one after another."""
    emitted = pushed = 0
    seconds = 0.0
    for units in lanes:
        packer, target = config.new_packer(), config.buffer_size
        began = time.process_time()
        for unit in units:
            while len(packer) >= target and packer.ready:
                packer.next_row()
            for key, length in unit:
                packer.push(key, length)
        seconds += time.process_time() - began
        emitted += packer.row * (config.T + 1)
        pushed += sum(length for unit in units for _, length in unit)
    return seconds, emitted, pushed


def speeds(config: StreamConfig, lanes: list[list[Unit]], repeats: int) -> dict[str, Any]:
    """Tokens per second of some runs: median and spread."""
    time_packer(config, lanes[:4])
    gc.disable()
    runs = [time_packer(config, lanes) for _ in range(repeats)]
    gc.enable()
    rates = sorted(emitted / seconds for seconds, emitted, _ in runs)
    _, emitted, pushed = runs[0]
    return {"emitted_tokens_per_s": statistics.median(rates), "slowest": rates[0], "fastest": rates[-1],
            "pushed_tokens_per_s": statistics.median(rates) * pushed / emitted,
            "us_per_row": 1e6 * (config.T + 1) / statistics.median(rates)}


# ---- report ---------------------------------------------------------------------------------------------------------

def measure(lengths: list[np.ndarray], config: StreamConfig, *, epochs: int, repeats: int) -> dict[str, Any]:
    """All figures of one T and policy."""
    account, flat, packer = Account(), [], config.new_packer()
    assert isinstance(packer, BestFit)
    for lane in tqdm(range(config.V), desc=f"T={config.T} {config.long_docs}", unit=" lanes", disable=None):
        units = lane_units(lengths, config, lane, epochs)
        pack_lane(config, lane, units, account)
        flat.append([unit for in_epoch in units for unit in in_epoch])
    result: dict[str, Any] = {
        "T": config.T, "long_docs": config.long_docs, "tokens_consumed": account.consumed,
        "floor_percent": 100 * account.floor / account.consumed,
        "dropped_percent": 100 * account.dropped / account.consumed,
        "repeated_percent": 100 * account.repeated / account.emitted,
        "inserted_bos_percent": 100 * account.inserted / account.emitted,
        "longest_wait_rows": account.longest_wait,
        **speeds(config, flat, repeats)}
    checks: dict[str, bool] = {}
    if config.T in MIN_SPEED:
        checks["speed"] = result["emitted_tokens_per_s"] >= MIN_SPEED[config.T]
    if config.long_docs == "split":
        checks["nothing dropped, each live once"] = account.dropped == 0
    elif config.T in MAX_EXCESS_POINTS:
        result["excess_points"] = result["dropped_percent"] - result["floor_percent"]
        checks["excess"] = result["excess_points"] <= MAX_EXCESS_POINTS[config.T]
    return {**result, "pass": checks}


def print_result(r: dict[str, Any]) -> None:
    """A few lines for people."""
    def verdict(name: str) -> str:
        return {True: "PASS", False: "FAIL", None: ""}[r["pass"].get(name)]

    print(f"\nT = {r['T']:,}, {r['long_docs']}; {r['tokens_consumed'] / 1e6:.1f} M tokens of documents counted")
    if r["long_docs"] == "crop":
        excess = r["dropped_percent"] - r["floor_percent"]
        print(f"  dropped       {r['dropped_percent']:7.3f} %    floor {r['floor_percent']:.3f} %, excess {excess:.3f} "
              f"points, at most {MAX_EXCESS_POINTS.get(r['T'], float('nan'))} wanted  {verdict('excess')}")
    else:
        print(f"  dropped       {r['dropped_percent']:7.3f} %    every token but BOS a live target exactly once  "
              f"{verdict('nothing dropped, each live once')}")
        print(f"  repeated      {r['repeated_percent']:7.3f} %    of emitted tokens are context, and "
              f"{r['inserted_bos_percent']:.3f} % BOS of continuations")
    print(f"  longest wait  {r['longest_wait_rows']:7,} rows  bound {r['bound_rows']}, least slack "
          f"{r['least_slack_rows']:,}  {verdict('wait')}")
    wanted = f", at least {MIN_SPEED[r['T']] / 1e6:.0f} wanted  {verdict('speed')}" if r["T"] in MIN_SPEED else ""
    rates = [r[name] / 1e6 for name in ("emitted_tokens_per_s", "slowest", "fastest", "pushed_tokens_per_s")]
    print("  speed         {:7.0f} M emitted tokens/s (median; {:.0f} to {:.0f}), ".format(*rates)
          + f"{r['us_per_row']:.2f} us/row, {rates[3]:.0f} M pushed tokens/s{wanted}", flush=True)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", type=Path, default=Path("../shared/data"),
                        help="folder of parquet or jsonl files; all are used")
    parser.add_argument("--tokenizer", type=Path, help="its folder (default: one trained on the data)")
    parser.add_argument("--T", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens a row trains on")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data; the first is not counted")
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=42, help="of the order; the figures differ a little between seeds")
    parser.add_argument("--repeats", type=int, default=5, help="runs of the timing")
    parser.add_argument("--cache-dir", type=Path, default=Path(tempfile.gettempdir()) / "nanochat-bench-packing",
                        help="where lengths are kept")
    args = parser.parse_args(argv)
    if args.epochs < 2 or args.repeats < 1:
        raise ValueError(f"--epochs {args.epochs}, --repeats {args.repeats}: expected at least 2 and 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object."""
    args = parse_args(argv)
    command = "python -m dev.bench_packing " + " ".join(sys.argv[1:] if argv is None else argv)
    about = {"command": command.strip(), "python": platform.python_version(), "numpy": np.__version__,
             "pyarrow": pa.__version__, "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, one used",
             "lanes": args.lanes, "seed": args.seed, "epochs": args.epochs, "n": args.repeats}
    lengths = document_lengths(args.data_path, args.tokenizer, args.cache_dir)
    everything = np.concatenate(lengths)
    about |= {"documents": len(everything), "tokens": int(everything.sum()), "mean_tokens": float(everything.mean()),
              "median_tokens": float(np.median(everything))}
    print(*(f"{name:13s} {value}" for name, value in about.items()), sep="\n", flush=True)
    results = []
    for T in args.T:
        for long_docs in ("crop", "split"):
            config = StreamConfig(T=T, V=args.lanes, seed=args.seed, long_docs=long_docs)
            results.append(measure(lengths, config, epochs=args.epochs, repeats=args.repeats))
            print_result(results[-1])
    print(json.dumps({**about, "results": results}))
    return 0


if __name__ == "__main__":
    run_main(main)
