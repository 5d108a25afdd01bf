"""What the benchmarks share: versions and hardware, alternating rounds, medians and spreads,
ratios within a round.

A single figure depends on the machine and its load. The ratio of two contestants that ran
alternately, round by round, is much more stable. So a benchmark passes its contestants to
`in_turns` and reports ratios to the first of them.
"""

import contextlib
import importlib.metadata
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

from nanochat.files import find_files
from nanochat.text_kinds import read_texts
from nanochat.tokenizer import RustBPETokenizer

SHARED = Path(__file__).parents[2] / "shared" / "data"
PACKAGES = ("numpy", "torch", "pyarrow", "tiktoken", "fastokens", "megatron-core")


def print_setup() -> dict[str, Any]:
    """Print and return the command, the machine and the versions of packages."""
    setup: dict[str, Any] = {"command": " ".join(["python", "-m", *sys.orig_argv[2:]])}
    setup |= {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            setup[package] = importlib.metadata.version(package)
    print(*(f"{name:13s} {value}" for name, value in setup.items()), sep="\n", flush=True)
    return setup


def seconds(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """The duration of a call. `time.process_time` counts processor time of all threads,
    `time.thread_time` that of this thread; both are independent of other programs on the
    machine."""
    began = clock()
    call()
    return clock() - began


def in_turns(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The figures of every contestant, one per round. Each round begins with a different
    contestant."""
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for i in tqdm(range(rounds), desc="rounds", disable=None):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            figures[name].append(contestants[name]())
    return figures


def print_figure(name: str, values: Sequence[float], unit: str) -> float:
    """Print the median and the spread of some figures. Returns the median."""
    median = statistics.median(values)
    print(
        f"  {name:34s} {median:10.4g} {unit}  (n={len(values)}, {min(values):.4g} to {max(values):.4g})",
        flush=True,
    )
    return median


def print_ratios(figures: Mapping[str, Sequence[float]], unit: str) -> dict[str, dict[str, float]]:
    """Print all figures, and their ratios to the first contestant's figure of the same round.
    Returns the medians."""
    first = next(iter(figures))
    result = {}
    for name, values in figures.items():
        result[name] = {"median": print_figure(name, values, unit)}
        if name != first:
            ratios = [a / b for a, b in zip(values, figures[first], strict=True)]
            result[name]["ratio"] = print_figure(f"  times {first}", ratios, "x")
    return result


def anonymous_mb() -> float:
    """Memory of this process that is not backed by files, MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status: it has no RssAnon; measure memory on Linux")


def one_core() -> None:
    """Keep this process on one core, so that all contestants use the same. PyTorch counted the
    cores when it was loaded: its second thread would only spin (measured: 500 ns per token of the
    loader)."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def in_process(module: str, *flags: str, python: str = sys.executable) -> Any:
    """Run a part of a benchmark in its own process. Returns its last line, which is JSON, and
    prints the others."""
    command = [python, "-m", module, *flags]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if not line.startswith("{"):
                print(line, end="", flush=True)
    if child.returncode:
        raise ValueError(
            f"{' '.join(command)} failed with exit code {child.returncode}; its output is above"
        )
    return json.loads(lines[-1])


def digests_of(base: Path, tag: str, *flags: str) -> list[str]:
    """The batch digests of the four steps of a tiny run on a CPU, in the base directory `base`."""
    from nanochat.run_dir import iter_log
    from scripts import base_train

    shape = [
        "--depth=1",
        "--aspect-ratio=24",
        "--head-dim=12",
        "--max-seq-len=64",
        "--total-batch-size=512",
        "--device-batch-size=4",
        "--lanes=4",
        "--leaves=2",
        "--num-iterations=4",
        "--eval-tokens=1024",
        "--sample-every=-1",
        "--device-type=cpu",
        "--dtype=float32",
        f"--model-tag={tag}",
    ]
    with (
        mock.patch.dict(os.environ, NANOCHAT_BASE_DIR=str(base)),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        base_train.main([*shape, *flags])
    return [
        r["digest"]
        for r in iter_log(base / "runs" / tag / "logs" / "train.jsonl")
        if "event" not in r
    ]


def find_tokenizer(
    tokenizer_dir: Path | None, data_path: Path, work: Path, *, vocab_size: int = 32768
) -> Path:
    """The folder of the given tokenizer, or of one that is trained on the data."""
    if tokenizer_dir is not None:
        return tokenizer_dir
    texts = (text for file in find_files(data_path) for text in read_texts(file))
    RustBPETokenizer.train_from_iterator(texts, vocab_size).save(work / "tokenizer")
    return work / "tokenizer"
