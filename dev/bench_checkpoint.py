"""
What saving costs the training loop: the stall of a save, and how much slower steps are while one is being written.

    python -m dev.bench_checkpoint [--depth 8] [--saves 5] [--batch-size 2] [--sequence-len 512] [--device-type cpu]

A real GPT with MuonAdamW takes steps on random tokens. Three ways of saving it, in turns, in one run:
    sync     fresh copies, and the loop waits for the disk
    thread   a thread writes: what training does (trainer.save)
Stall: from the end of a step until the next can start. Of that, `gather` is the optimizer's state, `copy` the weights'.
Steps in flight begin while the thread is writing and end before or after it is done; steps alone are those before each
save. The aim: the first step after a save takes at most 1.2 times a step alone. Last line: one JSON object.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nanochat.checkpoint import Code, Saver, prune, save_checkpoint, to_host
from nanochat.common import run_main
from nanochat.dist import get_compute_dtype
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import MuonAdamW

AIM = 1.2
MODES = ("sync", "thread")


class Job:
    """A model that trains, and the time that its parts take."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.device = torch.device(args.device_type)
        config = GPTConfig.from_depth(args.depth, vocab_size=args.vocab_size, sequence_len=args.sequence_len)
        with torch.device("meta"):
            self.model = GPT(config)
        self.model.to_empty(device=self.device)
        self.model.init_weights(seed=0, compute_dtype=get_compute_dtype(self.device))
        self.optimizer: MuonAdamW = self.model.setup_optimizer()
        generator = torch.Generator().manual_seed(0)
        shape = (args.batch_size, args.sequence_len + 1)
        rows = torch.randint(config.vocab_size, shape, generator=generator).to(self.device)
        self.inputs, self.targets = rows[:, :-1], rows[:, 1:]
        self.run_dir, self.number = folder / "run", 0

    def step(self) -> float:
        """One optimizer step; its seconds."""
        began = time.perf_counter()
        self.model(self.inputs, self.targets).backward()
        float(self.optimizer.step())  # waits for the device
        self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    def save(self, saver: Saver, mode: str) -> dict[str, float]:
        """Save as the training loop does; the seconds that it is held."""
        self.number += 1
        number, began = self.number, time.perf_counter()
        saver.wait()
        optimizer_state = self.optimizer.gather_state()
        gathered = time.perf_counter()
        model_state = to_host(self.model.state_dict())
        copied = time.perf_counter()
        saver.start(lambda: save_checkpoint(
            self.run_dir, f"checkpoint-{number}", step=number, model_state=model_state,
            model_config=asdict(self.model.config), optimizer_state=optimizer_state, scheduler_state={}, rng_state={},
            cursors=[], trainer_state={}))
        return {"gather_s": gathered - began, "copy_s": copied - gathered, "stall_s": time.perf_counter() - began}


def bench_save(job: Job, saver: Saver, mode: str, alone: int) -> dict[str, Any]:
    """Steps alone, a save, and steps until it is written."""
    before = [job.step() for _ in range(alone)]
    result: dict[str, Any] = job.save(saver, mode)
    after, outcome = [job.step()], saver.poll()
    while outcome is None:
        after.append(job.step())
        outcome = saver.poll()
    if outcome.code != Code.SAVED:
        raise ValueError(outcome.message)
    return {**result, "write_s": outcome.seconds, "alone_s": before, "next_s": after[0], "flight_s": after,
            "next_ratio": after[0] / statistics.median(before),
            "flight_ratio": statistics.mean(after) / statistics.mean(before)}


def tell(name: str, values: Sequence[float], unit: str = "s") -> float:
    """Print the median and spread of some figures; gives back the median."""
    median = statistics.median(values)
    print(f"  {name:34s} {median:8.3f} {unit}  (n={len(values)}, {min(values):.3f} to {max(values):.3f})")
    return median


def bench(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All ways in turns, the first round not counted."""
    job = Job(args, folder)
    prune_all: Callable[[Path], Any] = lambda good: prune(job.run_dir, good=good, keep_last_k=1)
    savers = {mode: Saver(good=None, prune=prune_all, asynchronous=mode != "sync") for mode in MODES}
    rounds = [{mode: bench_save(job, savers[mode], mode, args.alone) for mode in MODES}
              for _ in range(args.saves + 1)][1:]
    for saver in savers.values():
        saver.close()
    num_bytes = sum(p.stat().st_size for p in next((job.run_dir / "checkpoints").iterdir()).rglob("*") if p.is_file())
    params = sum(p.numel() for p in job.model.parameters())
    print(f"model: depth {args.depth}, {params:,} parameters; checkpoint: {num_bytes:,} bytes")
    result: dict[str, Any] = {"parameters": params, "bytes": num_bytes}
    result["step_s"] = tell("a step alone", [s for r in rounds for mode in MODES for s in r[mode]["alone_s"]])
    for mode in MODES:
        print(f"{mode}:")
        values = {key: [r[mode][key] for r in rounds] for key in rounds[0][mode]}
        result[mode] = {key: tell(text, values[key], unit) for key, text, unit in (
            ("stall_s", "the loop is held", "s"), ("gather_s", "  for the optimizer's state", "s"),
            ("copy_s", "  for a copy of the weights", "s"), ("write_s", "write", "s"),
            ("next_ratio", "next step / step alone", "x"), ("flight_ratio", "steps in flight / alone", "x"))}
    good = result["thread"]["next_ratio"] <= AIM
    print(f"the first step after a save: {result['thread']['next_ratio']:.2f} steps alone (aim: {AIM}): "
          f"{'met' if good else 'MISSED'}")
    return result


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--sequence-len", type=int, default=512)
    parser.add_argument("--saves", type=int, default=5, help="of each kind, after one that is not counted")
    parser.add_argument("--alone", type=int, default=3, help="steps before each save")
    parser.add_argument("--device-type", default="cpu")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary folder)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, tidy up."""
    args = parse_args(argv)
    device = torch.cuda.get_device_name() if args.device_type == "cuda" else platform.processor() or "CPU"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {device}, {os.cpu_count()} cores, "
          f"{torch.get_num_threads()} torch thread(s), load {os.getloadavg()[0]:.1f}")
    folder = Path(tempfile.mkdtemp(prefix="bench_checkpoint.", dir=args.folder))
    try:
        result = bench(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({**{k: str(v) for k, v in vars(args).items()}, **result}))
    return 0


if __name__ == "__main__":
    run_main(main)
