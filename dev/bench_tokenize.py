"""
How fast text becomes shards, against bare tiktoken on the same texts in the same run.

    python -m dev.bench_tokenize [--data-path ../shared/data] [--tokenizer-dir DIR] [--workers 2] [--copies 1]

Each round measures, one after another:
    tiktoken     `encode_ordinary_batch` over all texts, which lie in memory, with as many threads as there are workers
    tok_shards   from parquet to finished shards and manifests, the workers being processes:
                 whole    from the call to the last manifest: starting processes, imports and tokenizers included
                 command  the same as a command of its own, so with the parent's imports too (fastest encoder only)
for the encoder that the tokenizer takes by itself and, where that is not tiktoken, with tiktoken forced. Megabytes are
10^6 bytes of UTF-8 text. The shards of all encoders are compared byte by byte. `--copies` measures so many corpora at
once, of which start-up is a smaller part. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from nanochat import pretokenize
from nanochat.common import run_main
from nanochat.pretokenize import Input, Pretokenizer, Record, Windows, deal, describe_tokenizer, find_inputs
from nanochat.tokenizer import RustBPETokenizer, TiktokenEncoder
from nanochat.tokens import read_manifest

SHARED = Path(__file__).parents[2] / "shared" / "data"


class TiktokenPretokenizer(Pretokenizer):
    """scripts.tok_shards' work, with tiktoken."""

    def make(self, i: Input) -> tuple[Record, int]:
        load = pretokenize._load_same
        load(self.tokenizer_name, self.tokenizer["fingerprint"]).encoder = TiktokenEncoder(
            load(self.tokenizer_name, self.tokenizer["fingerprint"]).enc)  # in this worker alone
        return super().make(i)


def make_corpus(data_path: Path, folder: Path, copies: int) -> Path:
    """Links to the parquet files: each bucket `copies` times."""
    for path in sorted(data_path.resolve().rglob("*.parquet")):
        for n in range(copies):
            link = folder / path.parent.name / f"{n}_{path.name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    return folder


def read_texts(raw: Path) -> list[str]:
    return [t for f in sorted(raw.rglob("*.parquet")) for t in pq.read_table(f, columns=["text"])["text"].to_pylist()]


def measure_pool(raw: Path, output: Path, tokenizer_dir: Path, kind: type[Pretokenizer], *, workers: int) -> float:
    """Seconds of the whole."""
    inputs, _ = find_inputs(raw)
    tokenizer = describe_tokenizer(pretokenize.load_tokenizer(str(tokenizer_dir)))
    job = kind(output, inputs, Windows(), str(tokenizer_dir), tokenizer)
    began = time.perf_counter()
    job.prepare()
    with contextlib.closing(job.make_all(deal(inputs, 1)[0], num_workers=workers)) as results:
        for _, result in results:
            if isinstance(result, str):
                raise ValueError(result)
    if missing := job.finish():
        raise ValueError(f"{len(missing)} pairs missing")
    return time.perf_counter() - began


def measure_command(raw: Path, output: Path, tokenizer_dir: Path, *, workers: int) -> float:
    """Seconds of scripts.tok_shards as a command."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "scripts.tok_shards", "--input-dir", raw, "--output-dir", output,
                    "--tokenizer", tokenizer_dir, "--num-workers", str(workers)], check=True, capture_output=True)
    return time.perf_counter() - began


def hashes(output: Path) -> dict[str, Any]:
    """What the manifests say, which includes the hashes of all pairs."""
    return {path.parent.relative_to(output).as_posix(): read_manifest(path.parent)
            for path in sorted(output.rglob("manifest.json"))}


def measure_round(raw: Path, texts: Sequence[str], tokenizer: RustBPETokenizer, args: argparse.Namespace
                  ) -> dict[str, float]:
    """One of each, MB/s."""
    megabytes = sum(len(t.encode()) for t in texts) / 1e6
    began = time.perf_counter()
    ids = tokenizer.enc.encode_ordinary_batch(list(texts), num_threads=args.workers)
    rates = {"tiktoken": megabytes / (time.perf_counter() - began)}
    del ids
    kinds: dict[str, type[Pretokenizer]] = {"tok_shards, tiktoken": TiktokenPretokenizer}
    if not isinstance(tokenizer.encoder, TiktokenEncoder):
        kinds["tok_shards, fast"] = Pretokenizer
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        for name, kind in kinds.items():
            output = Path(folder) / str(len(found))
            seconds = measure_pool(raw, output, args.tokenizer_dir, kind, workers=args.workers)
            rates[f"{name}, whole"] = megabytes / seconds
            found.append(hashes(output))
        seconds = measure_command(raw, Path(folder) / "command", args.tokenizer_dir, workers=args.workers)
        rates["tok_shards, command"] = megabytes / seconds
        found.append(hashes(Path(folder) / "command"))
    if any(one != found[0] for one in found):
        raise ValueError("the encoders made different shards")
    return rates


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure scripts.tok_shards against bare tiktoken.")
    parser.add_argument("--data-path", type=Path, default=SHARED, help="folder of parquet files")
    parser.add_argument("--tokenizer-dir", type=Path, default=None, help="default: trained here, 32,768 tokens")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work-dir", type=Path, default=None, help="folder for what is made (default: the system's)")
    args = parser.parse_args(argv)
    if not args.data_path.is_dir():
        raise FileNotFoundError(f"--data-path {args.data_path}: no such folder")
    packages = {name: version(name) for name in ("tiktoken", "pyarrow", "numpy")}
    with contextlib.suppress(ImportError):
        packages["fastokens"] = version("fastokens")
    print(f"python {platform.python_version()}, {packages}, {platform.machine()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        raw = make_corpus(args.data_path, Path(folder) / "raw", args.copies)
        texts = read_texts(raw)
        if args.tokenizer_dir is None:
            args.tokenizer_dir = Path(folder) / "tokenizer"
            RustBPETokenizer.train_from_iterator(texts, 32768).save(args.tokenizer_dir)
        tokenizer = RustBPETokenizer.from_directory(args.tokenizer_dir)
        rounds = [measure_round(raw, texts, tokenizer, args) for _ in range(args.rounds)]
    print(json.dumps(summarize(rounds, packages, args)))
    return 0


def summarize(rounds: list[dict[str, float]], packages: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """Medians and spreads; ratios to tiktoken are taken round by round."""
    result: dict[str, Any] = {"workers": args.workers, "copies": args.copies, "n": len(rounds), "versions": packages}
    for name in rounds[0]:
        values = [r[name] for r in rounds]
        median = statistics.median(values)
        result[name] = {"median": median, "min": min(values), "max": max(values)}
        line = f"  {name:32s} {median:7.2f}  (n={len(values)}, {min(values):.2f} to {max(values):.2f})"
        ratios = [r[name] / r["tiktoken"] for r in rounds]
        result[name]["ratio"] = statistics.median(ratios)
        print(f"{line} MB/s  {statistics.median(ratios):.2f} x tiktoken, {min(ratios):.2f} to {max(ratios):.2f}")
    return result


if __name__ == "__main__":
    run_main(main)
