"""
What it costs to add gradients in tree order (nanochat/reduce.py): against a plain reduce-scatter, and inside a process.

    python -m dev.bench_reduce [--depth 4] [--world-sizes 2 4] [--leaves 8] [--rounds 7] [--device-type cpu]

inside one process: a step of `--leaves` micro-batches through a real GPT. As PyTorch adds them up (one leaf of many
micro-batches, m = 1), and as many leaves of one micro-batch each (m = leaves); in turns. And what leaf_done costs for
m = 1.
across processes: the messages of that GPT's MuonAdamW. As a reduce-scatter and as a tree, in turns: from the first
message's start to the last one's end, and as a share of a step of one micro-batch. On a CPU the processes are gloo's
and share its cores; on CUDA, NCCL's and a device each. Memory is what an exchange adds: the parts that arrive.

Last line: one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nanochat.common import run_main, write_json
from nanochat.dist import get_compute_dtype
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import MuonAdamW
from nanochat.reduce import LeafAccumulator, Reduce, tree_reduce


def plain_reduce(message: torch.Tensor, rank: int, world_size: int) -> Callable[[], torch.Tensor]:
    """The `Reduce` that others use: a float32 reduce-scatter, in the backend's own order of addition."""
    message = message.float()
    chunk = torch.empty(message.numel() // world_size, device=message.device)
    work = dist.reduce_scatter_single(chunk, message, async_op=True)
    return lambda: (work.wait(), chunk)[1]


WAYS: dict[str, Reduce] = {"plain": plain_reduce, "tree": tree_reduce}


class Job:
    """A model on random tokens."""

    def __init__(self, args: argparse.Namespace, rank: int = 0) -> None:
        self.device = torch.device(args.device_type, rank) if args.device_type == "cuda" else torch.device("cpu")
        config = GPTConfig.from_depth(args.depth, vocab_size=args.vocab_size, sequence_len=args.sequence_len)
        with torch.device("meta"):
            self.model = GPT(config)
        self.model.to_empty(device=self.device)
        self.model.init_weights(seed=0, compute_dtype=get_compute_dtype(self.device))
        generator = torch.Generator().manual_seed(rank)
        rows = torch.randint(config.vocab_size, (args.batch_size, args.sequence_len + 1), generator=generator)
        self.inputs, self.targets = rows[:, :-1].to(self.device), rows[:, 1:].to(self.device)

    def backward(self) -> None:
        self.model(self.inputs, self.targets).backward()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def timed(self, what: Callable[[], Any]) -> float:
        """Its seconds, the device's work included."""
        self.wait()
        began = time.perf_counter()
        what()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def tell(name: str, values: Sequence[float], unit: str) -> float:
    """Print the median and spread of some figures; gives back the median."""
    median = statistics.median(values)
    print(f"  {name:44s} {median:10.4g} {unit}  (n={len(values)}, {min(values):.4g} to {max(values):.4g})", flush=True)
    return median


# ---- inside one process ---------------------------------------------------------------------------------------------

def accumulate(job: Job, accumulator: LeafAccumulator, micro_batches: int) -> float:
    """Gradients of a step; the bytes that waited beside `.grad` at most."""
    most = 0.0
    for i in range(1, micro_batches + 1):
        job.backward()
        if i * accumulator.num_leaves % micro_batches == 0:
            accumulator.leaf_done()
            most = max(most, sum(t.nbytes for sums in accumulator._waiting for t in sums if t is not None))
    job.clear()
    return most


def bench_inside(args: argparse.Namespace) -> dict[str, float]:
    job, m = Job(args), args.leaves
    params = list(job.model.parameters())
    grad_bytes = sum(p.numel() * p.element_size() for p in params)
    print(f"inside one process: {sum(p.numel() for p in params):,} parameters, {m} micro-batches a step")
    one, many = LeafAccumulator(params, 1), LeafAccumulator(params, m)
    times: dict[str, list[float]] = {"one": [], "many": []}
    for _ in range(args.rounds + 1):
        times["one"].append(job.timed(lambda: accumulate(job, one, m)))
        times["many"].append(job.timed(lambda: accumulate(job, many, m)))
    ratios = [b / a for a, b in zip(times["one"][1:], times["many"][1:])]
    result = {"one_leaf_s": tell("one leaf, a step", times["one"][1:], "s"),
              "many_leaves_s": tell(f"{m} leaves, a step", times["many"][1:], "s"),
              "leaves_ratio": tell(f"{m} leaves / one leaf", ratios, "x"),
              "waiting_copies": tell("copies of the gradients that wait", [accumulate(job, many, m) / grad_bytes], "")}
    job.backward()
    result["one_leaf_done_us"] = tell("leaf_done, one leaf", [job.timed(one.leaf_done) * 1e6 for _ in range(99)], "us")
    return result


# ---- across processes -----------------------------------------------------------------------------------------------

def exchange(messages: list[torch.Tensor], reduce: Reduce, rank: int, world_size: int) -> None:
    """As MuonAdamW.step does it: all are in flight, then each is finished."""
    pending = [reduce(message, rank, world_size) for message in messages]
    while pending:
        pending.pop(0)()


def process(rank: int, world_size: int, args: argparse.Namespace, folder: str) -> None:
    """One of the W; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    if args.device_type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if args.device_type == "cuda" else "gloo", init_method=f"file://{folder}/store",
                            rank=rank, world_size=world_size)
    job = Job(args, rank)
    optimizer: MuonAdamW = job.model.setup_optimizer()
    times: dict[str, list[float]] = {"plain": [], "tree": [], "backward": [], "optimizer": []}
    for _ in range(args.rounds + 1):
        times["backward"].append(job.timed(job.backward))
        messages = [message.gradients() for message in optimizer._messages]
        for way, reduce in WAYS.items():
            dist.barrier()
            times[way].append(job.timed(partial(exchange, messages, reduce, rank, world_size)))
        times["optimizer"].append(job.timed(optimizer.step))
        job.clear()
    if rank == 0:
        write_json(Path(folder) / "times.json", {**{key: value[1:] for key, value in times.items()},
                                                 "bytes": 4 * sum(map(len, messages))})
    dist.destroy_process_group()


def bench_across(args: argparse.Namespace, world_size: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench_reduce.") as folder:
        mp.start_processes(process, (world_size, args, folder), nprocs=world_size, start_method="spawn")
        found = json.loads((Path(folder) / "times.json").read_bytes())
    print(f"across {world_size} processes: {found['bytes']:,} bytes of messages")
    steps = list(zip(found["plain"], found["tree"], found["backward"], found["optimizer"]))
    return {"plain_s": tell("reduce-scatter", found["plain"], "s"), "tree_s": tell("tree", found["tree"], "s"),
            "ratio": tell("tree / reduce-scatter", [tree / plain for plain, tree, _, _ in steps], "x"),
            "share": tell("tree / step of one micro-batch", [t / (b + o - p + t) for p, t, b, o in steps], ""),
            "arriving_bytes": found["bytes"], "plain_arriving_bytes": found["bytes"] // world_size}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--sequence-len", type=int, default=512)
    parser.add_argument("--leaves", type=int, default=8, help="m inside one process, a power of two")
    parser.add_argument("--world-sizes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7, help="after one that is not counted")
    parser.add_argument("--device-type", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args(argv)
    if args.device_type == "cuda" and max(args.world_sizes, default=0) > torch.cuda.device_count():
        raise ValueError(f"--world-sizes: got {args.world_sizes}, but there are {torch.cuda.device_count()} devices")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = parse_args(argv)
    device = torch.cuda.get_device_name() if args.device_type == "cuda" else platform.processor() or "CPU"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {device}, {os.cpu_count()} cores, "
          f"{torch.get_num_threads()} torch thread(s), load {os.getloadavg()[0]:.1f}")
    result: dict[str, Any] = {"inside": bench_inside(args)}
    for world_size in args.world_sizes:
        result[f"across_{world_size}"] = bench_across(args, world_size)
    print(json.dumps({**vars(args), **result}))
    return 0


if __name__ == "__main__":
    run_main(main)
