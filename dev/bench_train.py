"""
What training pays for being exact and safe: saves, and gradients added in the order of a tree.

    python -m dev.bench_train [--part save reduce] [--depth 8] [--rounds 5] [--device-type cpu] [--world-sizes 2]

A real GPT with MuonAdamW takes steps on random tokens.

    save      the seconds that a save holds the loop, with a thread that writes (as training does) and without one; and
              the first step after the save, while the thread is writing, over a step alone
    reduce    inside one process: a step of `--leaves` micro-batches as one leaf each over one leaf of them all. Across
              processes: the messages of the optimizer exchanged in tree order over a plain reduce-scatter, from the
              first message's start to the last one's end. On a CPU the processes are gloo's and share its cores; on
              CUDA they are NCCL's and have a device each

Last line: one JSON object.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dev.measure import in_turns, new_parser, seconds, tell, tell_about, tell_ratios
from nanochat.checkpoint import MODEL_NAME, OPTIMIZER_NAME, Outcome, Saver, save_checkpoint, to_host
from nanochat.common import run_main, write_json
from nanochat.dist import get_compute_dtype
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import MuonAdamW
from nanochat.reduce import LeafAccumulator, Reduce, tree_reduce


class Job:
    """A model that trains on random tokens."""

    def __init__(self, args: argparse.Namespace, rank: int = 0) -> None:
        cuda = args.device_type == "cuda"
        self.device = torch.device("cuda", rank) if cuda else torch.device(args.device_type)
        config = GPTConfig.from_depth(args.depth, vocab_size=32768, sequence_len=args.sequence_len, **args.shape)
        with torch.device("meta"):
            self.model = GPT(config)
        self.model.to_empty(device=self.device)
        self.model.init_weights(seed=0, compute_dtype=get_compute_dtype(self.device))
        generator = torch.Generator().manual_seed(rank)
        shape = (args.batch_size, args.sequence_len + 1)
        rows = torch.randint(config.vocab_size, shape, generator=generator).to(self.device)
        self.inputs, self.targets = rows[:, :-1], rows[:, 1:]
        self.optimizer: MuonAdamW = self.model.setup_optimizer()

    def backward(self) -> None:
        self.model(self.inputs, self.targets).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def timed(self, what: Callable[[], Any]) -> float:
        """Its seconds, the device's work included."""
        def all_of_it() -> None:
            what()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        return seconds(all_of_it)


# ---- saves ----------------------------------------------------------------------------------------------------------

def bench_save(args: argparse.Namespace) -> dict[str, Any]:
    job, number = Job(args), 0
    job.step()
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench_train.", dir=args.folder) as folder:
        run_dir = Path(folder) / "run"
        for made in ("logs/cursors", "checkpoints"):
            (run_dir / made).mkdir(parents=True)

        def save(asynchronous: bool) -> float:
            nonlocal number
            number += 1
            alone = job.timed(job.step)

            def hold() -> None:
                states = {OPTIMIZER_NAME: job.optimizer.gather_state(), MODEL_NAME: to_host(job.model.state_dict())}
                saver.start(partial(
                    save_checkpoint, run_dir, f"checkpoint-{number}", step=number, states=states,
                    model_config=asdict(job.model.config), cursors=[], trainer_state={}))
                if not asynchronous:
                    outcomes.append(saver.take(wait=True))
            held = job.timed(hold)
            if asynchronous:
                ratios.append(job.timed(job.step) / alone)
                outcomes.append(saver.take(wait=True))
            if outcomes[-1] is None or outcomes[-1].path is None:
                raise ValueError(f"a save failed: {outcomes[-1]}")
            return held

        saver, outcomes = Saver(None), list[Outcome | None]()
        found = in_turns({"the loop is held, no thread": lambda: save(False),
                          "the loop is held, thread": lambda: save(True)}, args.rounds)
        saver.close()
    return {"parameters": sum(p.numel() for p in job.model.parameters()), "held_s": tell_ratios(found, "s"),
            "next_step_ratio": tell("the next step over a step alone", ratios, "x")}


# ---- gradients ------------------------------------------------------------------------------------------------------

def plain_reduce(message: torch.Tensor, rank: int, world_size: int) -> Callable[[], torch.Tensor]:
    """The `Reduce` that others use: a float32 reduce-scatter, in the backend's own order of addition."""
    message = message.float()
    chunk = torch.empty(message.numel() // world_size, device=message.device)
    work = dist.reduce_scatter_single(chunk, message, async_op=True)
    return lambda: (work.wait(), chunk)[1]


def exchange(messages: list[torch.Tensor], reduce: Reduce, rank: int, world_size: int) -> None:
    """As the optimizer does it: all are in flight, then each is finished."""
    pending = [reduce(message, rank, world_size) for message in messages]
    while pending:
        pending.pop(0)()


def process(rank: int, world_size: int, args: argparse.Namespace, folder: str) -> None:
    """One of the processes; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    if args.device_type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if args.device_type == "cuda" else "gloo", init_method=f"file://{folder}/store",
                            rank=rank, world_size=world_size)
    job = Job(args, rank)
    job.backward()
    messages = [message.gradients() for message in job.optimizer._messages]

    def timed(reduce: Reduce) -> float:
        dist.barrier()
        return job.timed(lambda: exchange(messages, reduce, rank, world_size))

    found = in_turns({"reduce-scatter": lambda: timed(plain_reduce), "tree": lambda: timed(tree_reduce)},
                     args.rounds)
    if rank == 0:
        write_json(Path(folder) / "times.json", found)
    dist.destroy_process_group()


def bench_reduce(args: argparse.Namespace) -> dict[str, Any]:
    job = Job(args)

    def timed(num_leaves: int) -> float:
        accumulator = LeafAccumulator(job.model.parameters(), num_leaves)

        def step() -> None:
            for i in range(1, args.leaves + 1):
                job.backward()
                if i * num_leaves % args.leaves == 0:
                    accumulator.leaf_done()
        spent = job.timed(step)
        job.model.zero_grad(set_to_none=True)
        return spent

    found = in_turns({"one leaf": lambda: timed(1), f"{args.leaves} leaves": lambda: timed(args.leaves)}, args.rounds)
    result: dict[str, Any] = {"leaves_s": tell_ratios(found, "s a step")}
    for world_size in args.world_sizes:
        with tempfile.TemporaryDirectory(prefix="bench_train.") as folder:
            mp.start_processes(process, (world_size, args, folder), nprocs=world_size, start_method="spawn")
            times = json.loads((Path(folder) / "times.json").read_bytes())
        print(f"  across {world_size} processes:")
        result[f"across_{world_size}_s"] = tell_ratios(times, "s")
    return result


PARTS = {"save": bench_save, "reduce": bench_reduce}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    p = new_parser(__doc__)
    p.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    p.add_argument("--depth", type=int, default=8)
    p.add_argument("--batch-size", type=int, default=2)
    p.add_argument("--sequence-len", type=int, default=512)
    p.add_argument("--leaves", type=int, default=8, help="inside one process, a power of two")
    p.add_argument("--world-sizes", type=int, nargs="*", default=[2])
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--device-type", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--folder", type=Path, help="on the disk to save to (default: a temporary folder)")
    p.set_defaults(shape={})
    args = p.parse_args(argv)
    if args.device_type == "cuda" and max(args.world_sizes, default=0) > torch.cuda.device_count():
        raise ValueError(f"--world-sizes: got {args.world_sizes}, but there are {torch.cuda.device_count()} devices")
    result: dict[str, Any] = {"about": tell_about(), "depth": args.depth}
    for part in args.part:
        print(f"{part}:", flush=True)
        result[part] = PARTS[part](args)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_main(main)
