"""
The harness of the benches: what ran on what, contestants in turns, medians and spreads, ratios of the same round.

A figure of one machine on one afternoon says little; the ratio of two things that were done one after the other, round
by round, says much. So a bench hands its contestants to `in_turns` and tells ratios to the first of them.
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

from nanochat.dataset import find_files
from nanochat.text_kinds import read_texts
from nanochat.tokenizer import RustBPETokenizer

SHARED = Path(__file__).parents[2] / "shared" / "data"
PACKAGES = ("numpy", "torch", "pyarrow", "tiktoken", "fastokens", "megatron-core")


def tell_about() -> dict[str, Any]:
    """Print, and return, what is measured on what by which command."""
    found: dict[str, Any] = {"command": " ".join(["python", "-m", *sys.orig_argv[2:]])}
    found |= {"machine": f"{platform.machine()}, {os.cpu_count()} CPUs", "load": round(os.getloadavg()[0], 2),
              "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    print(*(f"{name:13s} {value}" for name, value in found.items()), sep="\n", flush=True)
    return found


def seconds(what: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long a call takes. `time.process_time` counts the processor's time of all threads, and
    `time.thread_time` of this one: those do not know what else the machine does."""
    began = clock()
    what()
    return clock() - began


def in_turns(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The figure of every contestant in every round; another one begins each round."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for i in tqdm(range(rounds), desc="rounds", disable=None):
        for name in names[i % len(names):] + names[:i % len(names)]:
            found[name].append(contestants[name]())
    return found


def tell(name: str, values: Sequence[float], unit: str) -> float:
    """Print the median and the spread of some figures; returns the median."""
    median = statistics.median(values)
    print(f"  {name:34s} {median:10.4g} {unit}  (n={len(values)}, {min(values):.4g} to {max(values):.4g})",
          flush=True)
    return median


def tell_ratios(found: Mapping[str, Sequence[float]], unit: str) -> dict[str, dict[str, float]]:
    """Print all figures, and their ratios to the first contestant's of the same round; returns the medians."""
    first = next(iter(found))
    result = {}
    for name, values in found.items():
        result[name] = {"median": tell(name, values, unit)}
        if name != first:
            ratios = [a / b for a, b in zip(values, found[first], strict=True)]
            result[name]["ratio"] = tell(f"  times {first}", ratios, "x")
    return result


def anonymous_mb() -> float:
    """Memory of this process that is not backed by files, MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status: it has no RssAnon; memory is measured on Linux")


def one_core() -> None:
    """Stay on one core, so that all contestants have the same. PyTorch counted the cores when it was
    loaded: a second thread of it would only spin here (measured: 500 ns for each token of the loader)."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def in_process(module: str, *flags: str, python: str = sys.executable) -> Any:
    """Run a part of a bench in a process of its own; what its last line says, which is JSON. The others go through."""
    command = [python, "-m", module, *flags]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if not line.startswith("{"):
                print(line, end="", flush=True)
    if child.returncode:
        raise ValueError(f"{' '.join(command)} ended with {child.returncode}")
    return json.loads(lines[-1])


def digests_of(base: Path, tag: str, *flags: str) -> list[str]:
    """The batch digest of each of four steps of a tiny run in the base directory `base`, on a CPU."""
    from nanochat.run_dir import read_log
    from scripts import base_train

    shape = ["--depth=1", "--aspect-ratio=24", "--head-dim=12", "--max-seq-len=64", "--total-batch-size=512",
             "--device-batch-size=4", "--lanes=4", "--leaves=2", "--num-iterations=4", "--eval-tokens=1024",
             "--sample-every=-1", "--device-type=cpu", "--dtype=float32", f"--model-tag={tag}"]
    with mock.patch.dict(os.environ, NANOCHAT_BASE_DIR=str(base)), contextlib.redirect_stdout(io.StringIO()):
        base_train.main([*shape, *flags])
    return [r["digest"] for r in read_log(base / "runs" / tag / "logs" / "train.jsonl") if "event" not in r]


def find_tokenizer(tokenizer_dir: Path | None, data_path: Path, work: Path, *, vocab_size: int = 32768) -> Path:
    """The folder of a tokenizer: the one given, or one trained on the data."""
    if tokenizer_dir is not None:
        return tokenizer_dir
    texts = (text for file in find_files(data_path) for text in read_texts(file))
    RustBPETokenizer.train_from_iterator(texts, vocab_size).save(work / "tokenizer")
    return work / "tokenizer"
