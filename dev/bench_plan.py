"""
How fast a run is rehearsed: totals of an index, and packing by lengths, on one core and on all.

    python -m dev.bench_plan [--documents 4000000] [--T 2048] [--lanes 64]

An index of synthetic shards (lengths log-normal, median 400 and mean 800 tokens, as of web text; the .bin is a hole in
the file system, nobody reads it) is taken through the parts of a plan:

    totals      every length read once: documents/s
    rehearse    lanes packed until they are dry, in one process: tokens/s, beside the bare packer on lengths that lie
                ready (the floor), and in as many processes as there are cores, their start included

Rates are by the clock. Those of one process are of windows of a few milliseconds, the median and the fastest tenth:
what the processor gives where other guests share it, and what it gives undisturbed.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dev.measure import fastest_tenth
from nanochat import plan
from nanochat.common import quiet_gc, run_main, write_json
from nanochat.dataset import find_files
from nanochat.order import Order, StreamConfig
from nanochat.rehearsal import Rehearsal, Task, open_rehearsals, packed_up, unit_totals
from nanochat.shard_source import ShardSource
from nanochat.shards import HEADER, MAGIC, MANIFEST_NAME, RECORD_KEYS, VERSION, new_manifest
from nanochat.sources import scan
from nanochat.workers import run_tasks

SHARDS = 8
WINDOW_ROWS, WINDOW_UNITS = 500, 20  # about as many documents
LAYOUTS: dict[str, dict[str, Any]] = {"crop": {}, "split": {"long_docs": "split"}, "concat": {"layout": "concat"}}


@dataclass(frozen=True)
class Vocabulary:
    """What a source of lengths asks of a tokenizer."""

    fingerprint: str = "bench"

    def get_bos_token_id(self) -> int:
        return 1

    def encode_flat(self, texts: list[str], *, num_threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError("lengths are known without a token")


def make_index(folder: Path, documents: int) -> None:
    """Shards whose .idx and manifest.json are real and whose .bin are holes."""
    rng, records = np.random.default_rng(0), {}
    for i in range(SHARDS):
        n = documents // SHARDS
        lengths = np.maximum(2, rng.lognormal(np.log(400), 1.18, n)).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        with open(folder / f"s{i}.idx", "wb") as f:
            f.write(HEADER.pack(MAGIC, VERSION, 2, n))
            f.write(offsets.astype("<i8").tobytes() + bytes(2 * n))
        with open(folder / f"s{i}.bin", "wb") as f:
            f.truncate(2 * int(offsets[-1]))
        records[f"s{i}"] = dict.fromkeys(RECORD_KEYS) | {"entries": n, "tokens": int(offsets[-1]),
                                                         "bin_bytes": 2 * int(offsets[-1])}
    tokenizer = {"fingerprint": Vocabulary().fingerprint, "eod": 1, "vocab_size": 2}
    write_json(folder / MANIFEST_NAME, new_manifest(tokenizer, {"max_length": 0, "overlap_size": 0}, records))


def bare_packer(config: StreamConfig, source: ShardSource, order: Order) -> list[float]:
    """Tokens/s of the packer alone, over the units of lane 0, window by window."""
    units = []
    for unit in order.share(0, 0):
        group, local = order.locate(0, unit)
        lengths = source.lengths(group, local, order.unit_size)
        units.append(lengths[order.rows(0, group, local, len(lengths))].tolist())
    packer, key, rates = config.new_packer(), 0, []
    for some in batched(units, WINDOW_UNITS):
        began = time.perf_counter()
        for lengths in some:
            packer.push_many(range(key, key + len(lengths)), lengths)
            key += len(lengths)
            while packer.ready and len(packer) >= config.buffer_size:
                packer.next_row()
        rates.append(sum(map(sum, some)) / (time.perf_counter() - began))
    return rates


def batched(items: list[Any], size: int) -> list[list[Any]]:
    """All but what is left over."""
    return [items[at:at + size] for at in range(0, len(items) - size + 1, size)]


def rehearse(feed: Rehearsal) -> list[float]:
    """Tokens/s of a feed packed until it is dry, window by window."""
    rates, rows, going = [], 0, True
    while going:
        rows += WINDOW_ROWS
        before, began = feed.read, time.perf_counter()
        going = feed.pack(rows)
        rates.append((feed.read - before) / (time.perf_counter() - began))
    return rates[:-1]


def summary(rates: list[float]) -> str:
    """Median and fastest tenth, M tokens/s."""
    return f"{statistics.median(rates) / 1e6:.0f} (fastest tenth {fastest_tenth(rates) / 1e6:.0f})"


def bench(config: StreamConfig, source: ShardSource, workers: int) -> None:
    """Print the rates of one layout."""
    order = Order(source.groups, bucket="data", config=config)
    floor = bare_packer(config, source, order)
    lanes = [Rehearsal(config, bucket="data", lane=lane, source=source, order=order) for lane in range(4)]
    one = [rate for feed in lanes for rate in rehearse(feed)]
    tasks = [Task("data", lane, plan.ENDLESS) for lane in range(config.V)]
    began, read = time.perf_counter(), 0
    for event in run_tasks(open_rehearsals, packed_up(config, {"data": source}, "bench"), tasks, num_workers=workers):
        read += event.value["read"] if event.kind == "done" else 0
    several = read / (time.perf_counter() - began)
    name = config.layout if config.layout != "bestfit" else config.long_docs
    print(f"  {name:6s} one process {summary(one)} M tokens/s, n={len(one)}; the bare packer {summary(floor)}, "
          f"n={len(floor)}; {workers} processes together {several / 1e6:.0f}, {read / 1e9:.2f} G tokens", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the index, measure, print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--documents", type=int, default=4_000_000)
    p.add_argument("--T", type=int, default=2048)
    p.add_argument("--lanes", type=int, default=64)
    args = p.parse_args(argv)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {args.documents:,} documents")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_index(folder, args.documents)
        source = ShardSource(scan(folder, find_files(folder, "shards")), Vocabulary())
        config = StreamConfig(T=args.T, V=args.lanes, max_epochs=1)
        began = time.perf_counter()
        totals = unit_totals(source, Order(source.groups, bucket="data", config=config), args.T)
        seconds = time.perf_counter() - began
        print(f"  totals: {args.documents / seconds / 1e6:.1f} M documents/s, {seconds:.2f} s; "
              f"{totals.tokens.sum() / 1e9:.2f} G tokens")
        quiet_gc()  # as the workers of a plan do
        for settings in LAYOUTS.values():
            bench(StreamConfig(T=args.T, V=args.lanes, max_epochs=1, **settings), source, os.cpu_count() or 1)
    return 0


if __name__ == "__main__":
    run_main(main)
