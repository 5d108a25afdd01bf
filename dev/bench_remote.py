"""
How fast, and with how many requests and bytes, ids come from object storage: in the order of lanes and in a shuffle,
by the readers alone and by the whole loader.

    python -m dev.bench_remote [--latency-ms 50] [--mb-per-s 100] [--megabytes 512] [--dtype uint16] [--threads 4]

A process of its own serves files of random ids from memory, through tests/object_store.py's proxy: each request waits
so long before its answer, all answers share a line of so many MB/s. Measured, each round with an empty cache:

    lanes     64 lanes read units of 64 documents, each lane through its share of groups, `--threads` units at once, as
              the loader's pool does; once as it is, once with each group announced (`will_need`) at its first unit
    shuffle   samples of 2,049 ids all over the files, `--batch` of them asked for while those before are collected
    loader    nanochat.dataloader's batches of 16 rows, 256 rows a step: --order lanes with `bestfit` and `concat`,
              --order megatron; after the first step, whose time is told apart

beside what a reader would need that fetches 256 MiB at each miss: by arithmetic, for data much larger than its memory.
For the shuffle, `near_runs` also tells what the same batch costs where the data are a terabyte, without fetching it.
Median and spread of `--rounds`; the last line is one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from nanochat import places
from nanochat.blend import DocumentRange, SampleConfig, find_prefixes
from nanochat.block_cache import CACHE_BYTES, GAP_BYTES, BlockCache, RemoteReader, shared_cache
from nanochat.common import run_main
from nanochat.dataloader import DataLoader
from nanochat.dataset import find_files
from nanochat.indexed import dtype_code, index_parts
from nanochat.order import StreamConfig
from nanochat.remote import PART_BYTES, near_runs, traffic
from nanochat.shard_source import ShardSource
from nanochat.sources import scan
from tests.object_store import environment

T, LANES, UNIT, GROUP = 2048, 64, 64, 1024
STEP_ROWS, VOCAB_SIZE, EOD = 256, 50_000, 0
FILE_BYTES = 64 << 20
MISS_BYTES = 256 << 20  # of the reader that ours is held against
TERABYTE = 10 ** 12


def serve(folder: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.object_store", "--keep", "--folder", str(folder),
               "--latency-ms", str(args.latency_ms), "--mb-per-s", str(args.mb_per_s)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    os.environ.update(environment(server.stdout.readline().split()[0]))
    return server


def make_files(folder: Path, args: argparse.Namespace) -> list[np.ndarray]:
    """Files of random ids, and of each the bounds of its documents, (n + 1,) int64: log-normal lengths, mean 1,000."""
    rng = np.random.default_rng(0)
    bounds = []
    for i in range(max(1, (args.megabytes << 20) // FILE_BYTES)):
        num_ids = FILE_BYTES // np.dtype(args.dtype).itemsize
        ends = np.cumsum(np.maximum(1, rng.lognormal(6.2, 1.2, num_ids // 500)).astype(np.int64))
        ends = ends[ends < num_ids]
        ids = rng.integers(1, VOCAB_SIZE, num_ids, dtype=args.dtype)
        ids[ends - 1] = EOD
        (folder / f"{i}.bin").write_bytes(ids.data)
        bounds.append(np.concatenate(([0], ends)))
        with open(folder / f"{i}.idx", "wb") as f:
            f.writelines(index_parts(dtype_code(args.dtype), np.diff(bounds[-1]).astype(np.int32),
                                     np.arange(len(bounds[-1]))))
    return bounds


def lane_units(bounds: list[np.ndarray], lane: int) -> Iterator[tuple[int, int, int, int]]:
    """(file, first id, end, end of the group) of a lane's units: groups in a permutation, cut evenly among lanes."""
    groups = [(f, g) for f, b in enumerate(bounds) for g in range(0, len(b) - 1, GROUP)]
    order = np.random.default_rng(1).permutation(len(groups)).tolist()
    for index in order[lane * len(order) // LANES:(lane + 1) * len(order) // LANES]:
        file, first = groups[index]
        ends = bounds[file]
        last = min(first + GROUP, len(ends) - 1)
        for unit in range(first, last, UNIT):
            yield file, int(ends[unit]), int(ends[min(unit + UNIT, last)]), int(ends[last])


def read_lanes(readers: list[RemoteReader], bounds: list[np.ndarray], args: argparse.Namespace, *, announce: bool
               ) -> int:
    """Read in the order of lanes, one unit ahead of each lane. Returns the number of ids."""
    units = [lane_units(bounds, lane) for lane in range(LANES)]

    def fetch(unit: tuple[int, int, int, int], before: tuple[int, int]) -> int:
        file, begin, end, group_end = unit
        if announce and before != (file, group_end):
            readers[file].will_need([(begin, group_end)])
        return len(readers[file].read(begin, end))

    total = 0
    with ThreadPoolExecutor(args.threads) as pool:
        ahead: deque[tuple[int, tuple[int, int], Future[int]]] = deque()

        def go_on(lane: int, before: tuple[int, int]) -> None:
            unit = next(units[lane], None)
            if unit is not None:
                ahead.append((lane, (unit[0], unit[3]), pool.submit(fetch, unit, before)))

        for lane in range(LANES):
            go_on(lane, (-1, -1))
        while ahead:
            lane, group, future = ahead.popleft()
            total += future.result()
            go_on(lane, group)
    return total


def read_shuffled(readers: list[RemoteReader], bounds: list[np.ndarray], args: argparse.Namespace) -> int:
    """Read samples in a random order, a batch ahead. Returns the number of ids."""
    per_file = [int(b[-1]) // T - 1 for b in bounds]
    starts = np.array([(f, i * T) for f, n in enumerate(per_file) for i in range(n)])
    starts = np.random.default_rng(2).permutation(starts)[:args.samples]
    under_way: deque[list[Callable[[], list[np.ndarray]]]] = deque()
    total = 0

    def take() -> int:
        return sum(len(ids) - 1 for collect in under_way.popleft() for ids in collect())

    for at in range(0, len(starts), args.batch):
        batch = starts[at:at + args.batch]
        under_way.append([reader.start_many([(a, a + T + 1) for a in batch[batch[:, 0] == f, 1].tolist()])
                          for f, reader in enumerate(readers)])
        if len(under_way) == 2:
            total += take()
    while under_way:
        total += take()
    return total


def measure(name: str, read: Callable[..., int], bounds: list[np.ndarray], args: argparse.Namespace
            ) -> dict[str, float]:
    """Median of some rounds: tokens/s, requests and bytes per million tokens, client's CPU."""
    rounds = []
    for _ in range(args.rounds):
        cache = BlockCache(max_bytes=args.cache_mb << 20)
        readers = [RemoteReader(f"s3://bucket/{f}.bin", args.dtype, cache=cache) for f in range(len(bounds))]
        requests, num_bytes, cpu, began = traffic.requests, traffic.bytes, time.process_time(), time.perf_counter()
        tokens = read(readers, bounds, args)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        rounds.append({"tokens_per_s": tokens / seconds, "requests_per_m": (traffic.requests - requests) / tokens * 1e6,
                       "bytes_per_m": (traffic.bytes - num_bytes) / tokens * 1e6, "cpu_s_per_m": cpu / tokens * 1e6})
    found = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    speeds = [r["tokens_per_s"] / 1e6 for r in rounds]
    size = np.dtype(args.dtype).itemsize
    print(f"  {name:22} {found['tokens_per_s'] / 1e6:6.1f} M tokens/s (n={len(rounds)}, {min(speeds):.1f} to "
          f"{max(speeds):.1f}); per million tokens {found['requests_per_m']:7.1f} requests, "
          f"{found['bytes_per_m'] / 1e6:7.2f} MB ({found['bytes_per_m'] / (size * 1e6):.2f} x), "
          f"{found['cpu_s_per_m'] * 1e3:.1f} ms CPU", flush=True)
    return found


class Ends:
    """What the loader asks of a tokenizer whose texts are ids already."""

    fingerprint, token_dtype = "none", np.dtype(np.uint16)

    def get_bos_token_id(self) -> int:
        return EOD

    def get_vocab_size(self) -> int:
        return VOCAB_SIZE


def open_loader(order: str, layout: str, args: argparse.Namespace) -> DataLoader:
    """The loader on the bucket, its cache and its copies of indices new."""
    shared_cache.cache_clear()
    tokenizer: Any = Ends()
    places.begin(tempfile.mkdtemp(dir=args.folder))
    more: dict[str, Any] = {"rows_per_step": STEP_ROWS, "device_batch_size": 16, "num_threads": args.threads}
    if order == "megatron":
        train = find_prefixes("s3://bucket", None, "99,1,0")["train"]
        samples = SampleConfig(T=T, V=LANES, num_samples=(args.steps + 9) * STEP_ROWS, split="99,1,0",
                               weights=(1.0,) * len(train))
        return DataLoader(samples, {k: DocumentRange(m, tokenizer) for k, m in train.items()}, tokenizer=tokenizer,
                          **more)
    source = ShardSource(scan("s3://bucket", find_files("s3://bucket", "megatron")), tokenizer)
    return DataLoader(StreamConfig(T=T, V=LANES, layout=layout), {"data": source}, tokenizer=tokenizer, **more)


def measure_loader(name: str, order: str, layout: str, args: argparse.Namespace) -> dict[str, float]:
    """As `measure`, of batches on the CPU."""
    rounds = []
    for _ in range(args.rounds):
        began = time.perf_counter()
        with open_loader(order, layout, args) as loader:
            for _ in range(loader.micro_batches_per_step):
                next(loader)
            first, tokens = time.perf_counter() - began, args.steps * STEP_ROWS * T
            requests, num_bytes, began = traffic.requests, traffic.bytes, time.perf_counter()
            for _ in range(args.steps * loader.micro_batches_per_step):
                next(loader)
            seconds = time.perf_counter() - began
            rounds.append({"tokens_per_s": tokens / seconds, "first_step_s": first,
                           "requests_per_m": (traffic.requests - requests) / tokens * 1e6,
                           "bytes_per_m": (traffic.bytes - num_bytes) / tokens * 1e6})
    found = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    speeds = [r["tokens_per_s"] / 1e6 for r in rounds]
    print(f"  {name:22} {found['tokens_per_s'] / 1e6:6.1f} M tokens/s (n={len(rounds)}, {min(speeds):.1f} to "
          f"{max(speeds):.1f}); per million tokens {found['requests_per_m']:7.1f} requests, "
          f"{found['bytes_per_m'] / 1e6:7.2f} MB; first step after {found['first_step_s']:.1f} s", flush=True)
    return found


def terabyte(args: argparse.Namespace) -> dict[str, float]:
    """What batches of a shuffle cost in a file of a terabyte: by `near_runs` alone."""
    size = np.dtype(args.dtype).itemsize
    starts = np.random.default_rng(3).integers(0, TERABYTE - (T + 1) * size, args.batch).tolist()
    spans = [(a, a + (T + 1) * size) for a in starts]
    runs = near_runs(spans, gap=GAP_BYTES, longest=PART_BYTES)
    num_bytes = sum(max(spans[i][1] for i in run) - spans[run[0]][0] for run in runs)
    per_m = 1e6 / (args.batch * T)
    return {"requests_per_m": len(runs) * per_m, "bytes_per_m": num_bytes * per_m}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--mb-per-s", type=float, default=100.0)
    parser.add_argument("--megabytes", type=int, default=512, help="of data")
    parser.add_argument("--dtype", default="uint16", choices=["uint16", "int32"])
    parser.add_argument("--threads", type=int, default=4, help="of the loader's pool")
    parser.add_argument("--cache-mb", type=int, default=CACHE_BYTES >> 20)
    parser.add_argument("--batch", type=int, default=1024, help="samples of the shuffle asked for at once")
    parser.add_argument("--samples", type=int, default=8192, help="of the shuffle in a round")
    parser.add_argument("--steps", type=int, default=40, help="of the loader in a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    size = np.dtype(args.dtype).itemsize
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, obstore "
          f"{version('obstore')}; {args.megabytes} MB of {args.dtype}, {args.latency_ms:g} ms a request, "
          f"{args.mb_per_s:g} MB/s: at most {args.mb_per_s / size:.0f} M tokens/s")
    result: dict[str, object] = {"arguments": vars(args)}
    with tempfile.TemporaryDirectory() as name:
        bounds = make_files(Path(name), args)
        server = serve(Path(name), args)
        try:
            for f in range(len(bounds)):  # the server takes the files into its memory
                RemoteReader(f"s3://bucket/{f}.bin", args.dtype, cache=BlockCache()).read(0, 1)
            for announce in (False, True):
                what = "lanes, announced" if announce else "lanes"
                result[what] = measure(what, partial(read_lanes, announce=announce), bounds, args)
            result["shuffle"] = measure("shuffle", read_shuffled, bounds, args)
            args.folder = name
            for order, layout in (("lanes", "bestfit"), ("lanes", "concat"), ("megatron", "")):
                what = f"loader, {layout or order}"
                result[what] = measure_loader(what, order, layout, args)
            del args.folder
        finally:
            assert server.stdin is not None
            server.stdin.close()
            server.wait()
    large = result["shuffle, 1 TB"] = terabyte(args)
    print(f"  shuffle of 1 TB, batches of {args.batch:,}: per million tokens {large['requests_per_m']:.1f} requests, "
          f"{large['bytes_per_m'] / 1e6:.2f} MB")
    misses = 1e6 / T
    result["miss"] = {"requests_per_m": misses, "bytes_per_m": misses * MISS_BYTES}
    print(f"  a reader that fetches 256 MiB at a miss, shuffle: {misses:.0f} requests and "
          f"{misses * MISS_BYTES / 1e9:,.0f} GB per million tokens; lanes: "
          f"{size * 1e6 / MISS_BYTES:.3f} requests and {size:.2f} MB, with "
          f"{LANES * MISS_BYTES >> 30} GiB of memory for {LANES} lanes (ours: {args.cache_mb} MiB)")
    print(json.dumps(result))


if __name__ == "__main__":
    run_main(main)
