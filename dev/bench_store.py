"""
The loader on object storage, over the same loader on the same files here, and what it asks of the store.

    python -m dev.bench_store [--latency-ms 50] [--megabytes 256] [--threads 4]

A process of its own serves token files from memory, through the proxy of tests/object_store.py: each request waits so
long before its answer. Each round opens loaders with nothing kept, takes
a first step, whose time is told apart, and then times `--steps` steps of 256 rows, 64 lanes. The last line is one JSON
object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dev.measure import in_turns, new_parser, seconds, tell, tell_about, tell_ratios
from nanochat import store
from nanochat.common import begin_data, run_main
from nanochat.dataloader import DataLoader
from nanochat.dataset import find_files
from nanochat.order import StreamConfig
from nanochat.sources import open_source, scan
from nanochat.token_writer import MegatronWriter
from tests.object_store import environment

T, B, ROWS, LANES = 2048, 16, 256, 64
FILE_BYTES, EOD = 64 << 20, 0


class Ends:
    """What the loader asks of a tokenizer whose texts are ids already."""

    fingerprint, token_dtype = "none", np.dtype(np.uint16)

    def get_bos_token_id(self) -> int:
        return EOD

    def get_vocab_size(self) -> int:
        return 50_000


class Traffic:
    """Counts what is asked of the store."""

    def __init__(self) -> None:
        self.requests = self.bytes = 0
        get = store.Bucket.get

        def counted(bucket: store.Bucket, key: str, begin: int, end: int, stat: Any) -> memoryview:
            self.requests += 1
            self.bytes += end - begin
            return get(bucket, key, begin, end, stat)

        store.Bucket.get = counted  # type: ignore[assignment,method-assign]


def make_files(folder: Path, megabytes: int) -> None:
    """Megatron's files of random ids; lengths of documents are log-normal, 1,000 on average."""
    rng = np.random.default_rng(0)
    for i in range(max(1, (megabytes << 20) // FILE_BYTES)):
        lengths = np.clip(rng.lognormal(6.2, 1.2, FILE_BYTES // 2000), 1, 1 << 20).astype(np.int64)
        ids = rng.integers(1, 50_000, int(lengths.sum()), dtype=np.uint16)
        ids[np.cumsum(lengths) - 1] = EOD
        with MegatronWriter(folder / str(i), vocab_size=50_000) as writer:
            writer.add(ids, lengths, np.zeros(len(lengths), np.uint16))


def measure(where: Path | str, args: argparse.Namespace, traffic: Traffic, notes: dict[str, list[float]], *,
            cache: Path, **settings: Any) -> float:
    """Tokens/s after the first step. What it asked of the store goes to `notes`."""
    begin_data(cache)
    tokenizer: Any = Ends()
    batches: DataLoader | None = None

    def take(steps: int) -> None:
        nonlocal batches
        if batches is None:
            source = open_source(scan(where, find_files(where, "megatron")), tokenizer)
            batches = DataLoader(StreamConfig(T=T, V=LANES, **settings), {"data": source}, tokenizer=tokenizer,
                                 rows_per_step=ROWS, device_batch_size=B, num_threads=args.threads)
        for _ in range(steps * batches.micro_batches_per_step):
            next(batches)

    first = seconds(lambda: take(1))
    requests, num_bytes, tokens = traffic.requests, traffic.bytes, args.steps * ROWS * T
    spent = seconds(lambda: take(args.steps))
    assert batches is not None
    batches.close()
    for name, value in (("first step, s", first), ("requests a million tokens", (traffic.requests - requests) / tokens),
                        ("bytes a byte", (traffic.bytes - num_bytes) / tokens / 2)):
        notes.setdefault(name, []).append(value * 1e6 if name.startswith("requests") else value)
    return tokens / spent


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, measure, print."""
    p = new_parser(__doc__)
    p.add_argument("--latency-ms", type=float, default=50.0)
    p.add_argument("--megabytes", type=int, default=256, help="of data")
    p.add_argument("--threads", type=int, default=4, help="of the loader")
    p.add_argument("--steps", type=int, default=40, help="of a round")
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args(argv)
    result: dict[str, Any] = {"about": tell_about()}
    with tempfile.TemporaryDirectory() as name:
        folder, traffic = Path(name), Traffic()
        (folder / "data").mkdir()
        make_files(folder / "data", args.megabytes)
        command = [sys.executable, "-m", "tests.object_store", str(args.latency_ms)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and server.stdin is not None
            os.environ.update(environment(server.stdout.readline().split()[0]))
            for path in sorted((folder / "data").iterdir()):
                store.write(f"s3://bucket/{path.name}", path)
            notes: dict[str, dict[str, list[float]]] = {"files here": {}, "bestfit": {}, "concat": {}}

            def run(kind: str, where: Path | str, **settings: Any) -> float:
                with tempfile.TemporaryDirectory(dir=folder) as cache:
                    return measure(where, args, traffic, notes[kind], cache=Path(cache), **settings)

            found = in_turns({"files here": lambda: run("files here", folder / "data"),
                              "bestfit": lambda: run("bestfit", "s3://bucket"),
                              "concat": lambda: run("concat", "s3://bucket", layout="concat")}, args.rounds)
            server.stdin.close()
    result["tokens_per_s"] = tell_ratios(found, "tokens/s")
    for kind, told in notes.items():
        result[kind] = {name: tell(f"{kind}: {name}", values, "") for name, values in told.items()}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_main(main)
