"""
How fast a run is rehearsed: totals of an index, and packing by lengths, on one core and on all.

    python -m dev.bench_plan [--documents 4000000] [--T 2048] [--lanes 64]

An index of synthetic shards (lengths log-normal, median 400 and mean 800 tokens, as of web text; the .bin is a hole in
the file system, nobody reads it) is taken through the parts of a plan:

    totals      every length read once: documents/s
    rehearse    lanes packed until they are dry, in one process: tokens/s, beside the bare packer on lengths that lie
                ready (the floor), and in as many processes as there are cores, their start included

Rates are per second of processor time where one process works, and by the clock where several do.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanochat import plan
from nanochat.common import run_main, write_json
from nanochat.data_files import find_files
from nanochat.order import Order, StreamConfig
from nanochat.rehearsal import Rehearsal, Task, open_rehearsals, packed_up, unit_totals
from nanochat.shard_source import ShardSource
from nanochat.shards import HEADER, MAGIC, MANIFEST_NAME, RECORD_KEYS, VERSION, new_manifest
from nanochat.sources import scan
from nanochat.workers import run_tasks

SHARDS = 8
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


def bare_packer(config: StreamConfig, source: ShardSource, order: Order) -> float:
    """Tokens/s of the packer alone, over the units of lane 0."""
    units = []
    for unit in order.share(0, 0):
        group, local = order.locate(0, unit)
        lengths = source.lengths(group, local, order.unit_size)
        units.append(lengths[order.rows(0, group, local, len(lengths))].tolist())
    packer, key, began = config.new_packer(), 0, time.process_time()
    for lengths in units:
        packer.push_many(range(key, key + len(lengths)), lengths)
        key += len(lengths)
        while packer.ready and len(packer) >= config.buffer_size:
            packer.next_row()
    return sum(map(sum, units)) / (time.process_time() - began)


def bench(config: StreamConfig, source: ShardSource, workers: int) -> None:
    """Print the rates of one layout."""
    order = Order(source.groups, bucket="data", config=config)
    floor = bare_packer(config, source, order)
    feed = Rehearsal(config, bucket="data", lane=0, source=source, order=order)
    began = time.process_time()
    feed.pack(plan.ENDLESS)
    one = feed.read / (time.process_time() - began)
    tasks = [Task("data", lane, plan.ENDLESS) for lane in range(config.V)]
    began, read = time.perf_counter(), 0
    for event in run_tasks(open_rehearsals, packed_up(config, {"data": source}, "bench"), tasks, num_workers=workers):
        read += event.value["read"] if event.kind == "done" else 0
    several = read / (time.perf_counter() - began)
    name = config.layout if config.layout != "bestfit" else config.long_docs
    print(f"  {name:6s} one process {one / 1e6:4.0f} M tokens/s, {one / floor:.2f} x bare packer's {floor / 1e6:.0f}; "
          f"{workers} processes {several / 1e6:4.0f} M by the clock, {read / 1e9:.2f} G tokens", flush=True)


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
        for settings in LAYOUTS.values():
            bench(StreamConfig(T=args.T, V=args.lanes, max_epochs=1, **settings), source, os.cpu_count() or 1)
    return 0


if __name__ == "__main__":
    run_main(main)
