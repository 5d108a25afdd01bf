"""
How soon Megatron's samples are there, and what they cost in memory: against the shuffles that their order prescribes,
and against megatron-core, in the same run.

    python -m dev.bench_megatron [--documents 100000 1000000 10000000] [--epochs 1.5] [--repeat 3]

megatron-core is measured where it is installed: run this with the Python of dev/compare_megatron.sh's environment.

For each number of documents an index is made (lengths log-normal, median 400 and mean 800 tokens, as of web text; the
.bin is a hole), in memory where there is /dev/shm. Each measurement is a process of its own, the sides in turn:

    floor    NumPy's RandomState.shuffle of arrays as long as document_index and shuffle_index, made beforehand
    ours     from opening the pair to the tokens of sample 0, without a cache; with one (the second time); rows after it
    theirs   the same, without ours' `rows`; they write their cache on the way, it has no switch

Seconds are of processor time: every side is one thread, and other load on the machine counts less. Memory is what the
process has of its own (RssAnon) more than before; pages of mapped files are not counted.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nanochat.blend import BlendedMegatronDatasetBuilder, Mixture
from nanochat.common import run_main
from nanochat.indexed import HEADER, MAGIC, VERSION
from nanochat.megatron import GPTDataset, GPTDatasetConfig, normalize

ROWS = 64  # read at once


def make_index(prefix: Path, documents: int) -> int:
    """A pair whose .idx is real and whose .bin is a hole. Returns its tokens."""
    lengths = np.maximum(2, np.random.default_rng(0).lognormal(np.log(400), 1.18, documents)).astype(np.int32)
    with open(f"{prefix}.idx", "wb") as f:
        f.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        f.write(lengths.tobytes())
        ends = np.cumsum(lengths, dtype=np.int64) * 2
        f.write(np.concatenate([[0], ends[:-1]]).astype("<i8").tobytes())
        f.write(np.arange(documents + 1, dtype="<i8").tobytes())
    with open(f"{prefix}.bin", "wb") as f:
        f.truncate(int(ends[-1]))
    return int(ends[-1]) // 2


def own_bytes() -> int:
    """Memory of this process alone."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What both configurations are given."""
    return {"random_seed": 1234, "sequence_length": args.T, "split": "1,0,0", "blend": ([args.prefix], None),
            "path_to_cache": args.cache or None,
            "tokenizer": SimpleNamespace(eod=0, unique_identifiers={}, vocab_size=9)}


def measure_ours(args: argparse.Namespace) -> dict[str, float]:
    """Seconds to the first sample, bytes kept, rates."""
    before, began = own_bytes(), time.process_time()
    dataset: Any = BlendedMegatronDatasetBuilder(GPTDataset, [args.samples, 0, 0], lambda: True,
                                                 GPTDatasetConfig(**settings(args))).build()[0]
    dataset.rows(0, 1)
    found: dict[str, float] = {"seconds": time.process_time() - began, "bytes": own_bytes() - before,
                               "documents": len(dataset.document_index), "samples": len(dataset)}
    n = min(4096, len(dataset) - 1) // ROWS * ROWS
    for name, what in (("lookups_per_s", dataset.pieces), ("rows_per_s", dataset.rows)):
        began = time.process_time()
        for i in range(0, n, ROWS):
            what(i, i + ROWS)
        found[name] = n / (time.process_time() - began)
    return found


def measure_theirs(args: argparse.Namespace) -> dict[str, float]:
    """Seconds to the first sample, bytes kept."""
    from megatron.core.datasets import gpt_dataset as g
    from megatron.core.datasets import helpers  # noqa: F401  a compiled module: not on the clock
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder as Builder

    before, began = own_bytes(), time.process_time()
    config = g.GPTDatasetConfig(reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
                                create_attention_mask=False, **settings(args))
    dataset = Builder(g.GPTDataset, [args.samples, 0, 0], lambda: True, config).build()[0]
    dataset[0]
    return {"seconds": time.process_time() - began, "bytes": own_bytes() - before}


def measure_floor(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the two shuffles."""
    state, arrays = np.random.RandomState(1234), (np.arange(args.entries, dtype=np.int32),
                                                  np.arange(args.rows, dtype=np.uint32))
    began = time.process_time()
    for array in arrays:
        state.shuffle(array)
    return {"seconds": time.process_time() - began}


SIDES = {"ours": measure_ours, "theirs": measure_theirs, "floor": measure_floor}


def measure(side: str, prefix: Path, T: int, samples: int, **more: Any) -> dict[str, float]:
    """A side in a process of its own."""
    command = [sys.executable, "-m", "dev.bench_megatron", "--side", side, "--prefix", str(prefix), "--T", str(T),
               "--samples", str(samples)]
    for name, value in more.items():
        command += [f"--{name}", str(value)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    if run.returncode:
        raise ValueError(f"{' '.join(command)} failed: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def middle(found: list[dict[str, float]], name: str = "seconds") -> float:
    """The median of a figure."""
    return statistics.median(one[name] for one in found)


def bench(documents: int, args: argparse.Namespace, folder: Path, theirs: bool) -> dict[str, Any]:
    """Print and return the figures of one number of documents."""
    prefix = folder / f"web{documents}"
    samples = int(make_index(prefix, documents) * args.epochs) // args.T
    found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": [], "floor": [], "cached": []}
    for i in range(args.repeat):
        found["ours"].append(measure("ours", prefix, args.T, samples))
        n = found["ours"][-1]
        found["floor"].append(measure("floor", prefix, args.T, samples, entries=n["documents"], rows=n["samples"]))
        if theirs:
            found["theirs"].append(measure("theirs", prefix, args.T, samples, cache=folder / f"theirs{documents}-{i}"))
        found["cached"].append(measure("ours", prefix, args.T, samples, cache=folder / f"ours{documents}"))
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(found["ours"], found["floor"])]
    entries, rows = int(n["documents"]), int(n["samples"])
    floor, ours, kept = middle(found["floor"]), middle(found["ours"]), middle(found["ours"], "bytes")
    print(f"{documents:,} documents, {entries / documents:.0f} epochs, {rows:,} samples: shuffles {floor:.3f} s; ours "
          f"{ours:.3f} s = {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f}); second time, "
          f"from the cache {middle(found['cached'][1:]):.3f} s")
    print(f"  kept {kept / 1e6:.1f} MB: document_index {4 * entries / 1e6:.1f} (4 bytes a document and epoch), "
          f"shuffle_index {4 * rows / 1e6:.1f}; looked up {middle(found['ours'], 'lookups_per_s'):,.0f} samples/s, "
          f"read {middle(found['ours'], 'rows_per_s') * args.T / 1e6:,.0f} M tokens/s")
    result = {"documents": documents, "entries": entries, "samples": rows, "floor_s": floor, "ours_s": ours,
              "ratio": ratios, "cached_s": middle(found["cached"][1:]), "ours_bytes": kept}
    if theirs:
        slow, large = middle(found["theirs"]), middle(found["theirs"], "bytes")
        print(f"  megatron-core {slow:.3f} s = {slow / ours:.2f} x ours, kept {large / 1e6:.1f} MB = "
              f"{large / kept:.1f} x ours", flush=True)
        result |= {"theirs_s": slow, "theirs_bytes": large}
    return result


def bench_blend(theirs: bool) -> None:
    """Print what a sample of a blend costs."""
    for k in (2, 8, 20):
        weights, n = normalize((np.random.default_rng(k).random(k) + 0.05).tolist()), 1 << 20
        began = time.process_time()
        mixture = Mixture(weights, 10**9)
        for i in range(0, n, 4096):
            mixture.at(i, i + 4096)
        line = f"blend of {k}: {(time.process_time() - began) / n * 1e9:.0f} ns a sample in order"
        if k <= 8:
            began = time.process_time()
            Mixture(weights, 10**9).at(10**9 - 1, 10**9)
            line += f", {time.process_time() - began:.3f} s to the 10^9th"
        if theirs:
            from megatron.core.datasets import helpers
            arrays, began = (np.zeros(n, np.int16), np.zeros(n, np.int64)), time.process_time()
            helpers.build_blending_indices(*arrays, weights, k, n, False)
            line += f"; megatron-core {(time.process_time() - began) / n * 1e9:.0f} ns, all at once"
        print(line)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--documents", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    p.add_argument("--T", type=int, default=2048)
    p.add_argument("--epochs", type=float, default=1.5)
    p.add_argument("--repeat", type=int, default=3)
    for name in ("side", "prefix", "cache"):
        p.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    for name in ("samples", "entries", "rows"):
        p.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.side:
        logging.disable(logging.WARNING)
        np.random.RandomState(0)  # imports numpy.random: not on the clock
        print(json.dumps(SIDES[args.side](args)))
        return 0
    theirs = find_spec("megatron") is not None
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
          f"{platform.python_version()}, NumPy {np.__version__}, T {args.T}, median of {args.repeat}")
    if not theirs:
        print("megatron-core is not installed here and not measured (see above for where it is)")
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a page of a hole on disk may take milliseconds
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        results = [bench(n, args, Path(folder), theirs) for n in args.documents]
    bench_blend(theirs)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    run_main(main)
