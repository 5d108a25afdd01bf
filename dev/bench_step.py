"""Compare the time of a training step with nanochat's (github.com/karpathy/nanochat) on the same
machine.

    python -m dev.bench_step --nanochat DIR
    python -m dev.bench_step --nanochat DIR --device=cuda

DIR is a checkout of nanochat. Both projects build the same model. On a CPU: 6 layers, width 384,
rows of 512 tokens, a vocabulary of 8,192, float32, two threads. On a GPU, where no figure has been
measured yet: 12 layers, width 768, rows of 2,048 tokens, a vocabulary of 32,768, bfloat16, without
determinism and with full windows, because nanochat has no deterministic mode, and its short windows
need FlashAttention 3. Each project runs in two processes of its own, one eager and one compiled,
and the four processes take turns step by step, so that they see the same machine. The model
(forward and backward pass) and the optimizer are timed separately, with two sizes of a batch, by
the wall clock and by processor time.

The table shows medians of 10 steps in milliseconds and of the ratios ours / nanochat's of each
round: above 1, ours is slower. `default` compares each project's defaults: nanochat always
compiles, and ours does not compile on a CPU. On a busy machine, trust the ratio of processor time.
The last line is one JSON object.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

THREADS = 2
WARM_UP = 3
TIMED = 10
Processes = Mapping[tuple[str, str], "subprocess.Popen[str]"]  # of (project, mode)
# the seconds of each step of (project, mode, rows): by part and clock
Steps = dict[tuple[str, str, int], list[list[list[float]]]]


class Size(NamedTuple):
    """The model and the batches on one kind of device."""

    n_layer: int
    n_embd: int
    T: int
    vocab_size: int
    rows: tuple[int, ...]  # in a batch
    dtype: torch.dtype
    our_default: str  # mode


SIZES = {
    "cpu": Size(6, 384, 512, 8192, (4, 8), torch.float32, "eager"),
    # all four processes fit into 80 GB
    "cuda": Size(12, 768, 2048, 32768, (2, 8), torch.bfloat16, "compiled"),
}


def modes(size: Size) -> dict[str, tuple[str, str]]:
    """{name: (our mode, nanochat's)} of the lines of the table."""
    both = {mode: (mode, mode) for mode in ("eager", "compiled")}
    return {**both, "default": (size.our_default, "compiled")}


# ---- in a process of its own: one project in one mode --------------------------------------------


def serve(project: str, mode: str, device: str) -> None:
    """Read numbers of rows from stdin, take a step with each, and answer with the seconds of model
    and optimizer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the projects print to stdout
    torch.set_num_threads(THREADS)
    step = make_step(project, mode, device)
    for line in sys.stdin:
        print(json.dumps(step(int(line))), file=answers)


def make_step(project: str, mode: str, device: str) -> Callable[[int], list[list[float]]]:
    """A function that takes a training step with some rows, and returns the seconds of model and
    optimizer, each by both clocks."""
    size = SIZES[device]
    if mode == "eager":  # nanochat's optimizer is compiled by decorators
        torch.compile = lambda function=None, **_: function or (lambda f: f)  # type: ignore[assignment]
    from nanochat.gpt import GPT, GPTConfig  # of the project that comes first in PYTHONPATH

    heads = size.n_embd // 128
    shape: dict[str, Any] = {
        "n_layer": size.n_layer,
        "n_head": heads,
        "n_kv_head": heads,
        "n_embd": size.n_embd,
    }
    if device == "cuda":
        shape["window_pattern"] = "L"
    with torch.device(device):
        model: Any = GPT(GPTConfig(sequence_len=size.T, vocab_size=size.vocab_size, **shape))
        batches = {
            rows: torch.randint(size.vocab_size, (2, rows, size.T)).unbind() for rows in size.rows
        }
    model.init_weights(**({"seed": 0, "compute_dtype": size.dtype} if project == "ours" else {}))
    optimizer: Any = model.setup_optimizer()
    forward: Any = torch.compile(model, dynamic=False)

    def step(rows: int) -> list[list[float]]:
        inputs, targets = batches[rows]
        start = clock(device)
        if project == "ours":  # as scripts.base_train does it
            (
                forward(inputs, targets, loss_reduction="none").sum(dim=1).sum() / targets.numel()
            ).backward()
        else:
            forward(inputs, targets).backward()
        middle = clock(device)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return [(middle - start).tolist(), (clock(device) - middle).tolist()]

    return step


def clock(device: str) -> Tensor:
    """Wall clock and this process's processor time, seconds, once the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


# ---- the bench -----------------------------------------------------------------------------------


def ask(process: "subprocess.Popen[str]", rows: int) -> list[list[float]]:
    """Have a process take a step with `rows` rows. ValueError if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    print(rows, file=process.stdin, flush=True)
    if not (answer := process.stdout.readline()):
        raise ValueError(
            f"a process of the bench ended with exit code {process.wait()}; its error is above"
        )
    return json.loads(answer)


@contextmanager
def projects(nanochat: Path, size: Size, device: str) -> Iterator[Processes]:
    """The four processes, which end with the block."""
    here = Path(__file__).parents[1]
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_step.")))
        # so that nothing else of ours can be imported beside nanochat
        (work / "dev").symlink_to(here / "dev")
        paths = {"ours": [here], "nanochat": [nanochat, work]}
        processes = {}
        for project, mode in product(paths, ("eager", "compiled")):
            serve_flag = f"--serve={project},{mode},{device}"
            process = subprocess.Popen(
                [sys.executable, "-m", "dev.bench_step", serve_flag],
                cwd=paths[project][-1],
                env={
                    **os.environ,
                    "NANOCHAT_DTYPE": str(size.dtype).removeprefix("torch."),
                    "OMP_NUM_THREADS": str(THREADS),
                    "PYTHONPATH": os.pathsep.join(map(str, paths[project])),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes[project, mode] = stack.enter_context(process)
            stack.callback(process.kill)
        yield processes


def take_turns(processes: Processes, size: Size) -> Steps:
    """Have the processes take steps of each size in turns. Each round begins with a different
    one."""
    steps: Steps = {(*key, rows): [] for key in processes for rows in size.rows}
    turns = list(steps)
    for i in range(WARM_UP + TIMED):
        first = i % len(turns)
        for project, mode, rows in turns[first:] + turns[:first]:
            seconds = ask(processes[project, mode], rows)
            steps[project, mode, rows].append(seconds)
    return steps


def print_times(steps: Steps, size: Size) -> dict[str, dict[str, float]]:
    """Print the table, and return its lines."""
    print(f"{'':30}{'ours':>8}{'nanochat':>10}{'ratio':>8}   of processor time")
    lines = {}
    for name, (our_mode, their_mode) in modes(size).items():
        for rows in size.rows:
            both = [steps["ours", our_mode, rows], steps["nanochat", their_mode, rows]]
            parts = torch.tensor(both)[:, WARM_UP:]  # seconds (project, step, part, clock)
            seconds = torch.cat([parts, parts.sum(dim=2, keepdim=True)], dim=2)
            for i, part in enumerate(("model", "optimizer", "step")):
                ours_ms, theirs_ms = (1000 * seconds[:, :, i, 0]).quantile(0.5, dim=1).tolist()
                ratio, of_cpu = (seconds[0, :, i] / seconds[1, :, i]).quantile(0.5, dim=0).tolist()
                what = f"{name}, {rows} rows, {part}"
                print(f"{what:30}{ours_ms:8.1f}{theirs_ms:10.1f}{ratio:8.3f}{of_cpu:8.3f}")
                lines[what] = {
                    "ours_ms": ours_ms,
                    "nanochat_ms": theirs_ms,
                    "ratio": ratio,
                    "cpu_ratio": of_cpu,
                }
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    from dev.measure import print_setup
    from nanochat.cli import Parser

    p = Parser(description=__doc__)
    p.add_argument("--nanochat", type=Path, required=True, help="a checkout of nanochat")
    p.add_argument(
        "--device", default="cpu", choices=[*SIZES], help="where both projects take their steps"
    )
    args = p.parse_args(argv)
    nanochat = args.nanochat.resolve()
    if not (nanochat / "nanochat" / "gpt.py").is_file():
        raise ValueError(
            f"--nanochat: {nanochat} is not a checkout of nanochat; clone it and pass its folder"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device=cuda: this PyTorch ({torch.__version__}) sees no GPU; use --device=cpu"
        )
    size = SIZES[args.device]
    about = print_setup()
    if args.device == "cuda":
        about = {**about, "gpu": torch.cuda.get_device_name()}
        print(f"GPU: {about['gpu']}")
    with projects(nanochat, size, args.device) as processes:
        steps = take_turns(processes, size)
    print(json.dumps({"about": about, **print_times(steps, size)}))
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("--serve="):
        serve(*sys.argv[1].removeprefix("--serve=").split(","))
    else:
        from nanochat.cli import run_main

        run_main(main)
