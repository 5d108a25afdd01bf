"""
The first fifteen minutes on a GPU: the most important checks first, each with a limit in seconds.

    bash dev/gpu_first.sh first                  # start over: the machine, a run, its bits, its speed
    bash dev/gpu_first.sh again                  # on the same machine: the checks that are missing
    python -m dev.gpu_first --check=attention    # one check in this process, to see where it fails
    python -m dev.gpu_first --device=cpu --tiny  # a rehearsal on a CPU, in half a minute

The checks are those of `gpu_smoke` and `gpu_check`, and a few more. They need no network, and
nothing that they share is lost when time runs out:

    first   machine | training | same command | curve | ... d24, killed after 240 s | d12 | time is up, 3 are skipped
    again                                                                   the 3 that were skipped | d24 once more

Every figure goes to results.jsonl as soon as it is known, so a machine that is taken away loses one
check at most. The file has three kinds of lines, and only ever grows: a call of this script; a
figure, with its limit and the verdict; the end of a check, which is `done`, `failed`, `killed` or
`skipped`, with the reason. `first` keeps older lines, but does not count them. There is one copy in
the base directory, which `again` continues, and one in the folder for results.

Kernels run only in processes of their own, so a kernel that crashes or hangs costs one check. The
exit code is 1 if a figure misses its limit, or if a check failed or was killed.
"""

import argparse
import contextlib
import itertools
import json
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer

from dev import gpu_check, gpu_smoke, nccl_check
from dev.gpu_check import Bench
from nanochat.attention import activate_kernel, attention
from nanochat.cli import Parser, run_main, sigterm_interrupts
from nanochat.common import table
from nanochat.dist import versions
from nanochat.text_kinds import read_texts
from nanochat.tokenizer import RustBPETokenizer
from tests import training

PACKAGES = ("triton", "numpy", "pyarrow", "tiktoken", "rustbpe")
LIMITS = gpu_smoke.LIMITS | {
    "steps with other rows": "<= 0",
    "float32: loss, nats from the CPU's": "<= 1e-4",
    "bfloat16: loss, nats from the CPU's": "<= 5e-3",
    "processes that fail": "<= 0",
}
GPU = SimpleNamespace(
    runs=gpu_smoke.DEFAULTS,
    host_leaves={"leaves": 8, "num_iterations": 4},
    matrix=8192,
    copied=1 << 30,
    curve={
        "depth": 4,
        "aspect_ratio": 32,
        "head_dim": 32,
        "max_seq_len": 256,
        "device_batch_size": 8,
        "total_batch_size": 2048,
        "lanes": 8,
        "num_iterations": 16,
    },
    curve_vocab_size=2048,
)
TINY = SimpleNamespace(
    runs=gpu_check.TINY.runs,
    host_leaves={},
    matrix=64,
    copied=1 << 12,
    curve_vocab_size=320,
    warm=1,
    timed=1,
    curve={
        **gpu_check.SMALL,
        "max_seq_len": 64,
        "total_batch_size": 256,
        "lanes": 4,
        "num_iterations": 4,
    },
)

Value = float | str | None  # None: not measured
Result = tuple[str, str, Value]  # measure, case, value
Record = dict[str, Any]  # a line of results.jsonl


class NotHere(Exception):
    """The check cannot run here and now. The message says why."""


NOT_HERE = "not here: "  # how a process of its own reports that


class TooLong(BaseException):
    """The time of a check is up. It is no Exception, so that no check catches it."""


class Check(NamedTuple):
    """A check starts if `least_s` seconds are left, and is killed after `most_s`."""

    name: str
    least_s: int
    most_s: int
    run: Callable[[Bench], Iterator[Result]]
    # it runs kernels, so it needs a process of its own. Runs of training have one anyway
    apart: bool = False


# ---- checks --------------------------------------------------------------------------------------


def machine(bench: Bench) -> Iterator[Result]:
    """What this machine is, and how fast its matrix products and its memory are without us."""
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield "version", name, metadata.version(name)
    for name, version in versions(bench.device).items():
        if version is not None:
            yield "version", name, version
    N, num_bytes = bench.sizes.matrix, bench.sizes.copied
    matrix = bench.randn(N, N, seed=0)
    yield (
        "matrix product, TFLOP/s",
        f"{N} x {N}",
        2 * N**3 / seconds_of(lambda: matrix @ matrix) / 1e12,
    )
    source = torch.ones(num_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    yield (
        "copy, TB/s",
        f"{num_bytes:,} bytes",
        2 * num_bytes / seconds_of(lambda: target.copy_(source)) / 1e12,
    )
    if not bench.cuda:
        return
    properties = torch.cuda.get_device_properties(bench.device)
    yield "memory, bytes", properties.name, properties.total_memory
    segments = torch.cuda.memory_snapshot()
    yield (
        "memory segments that grow",
        "PyTorch's allocator",
        sum(bool(s.get("is_expandable")) for s in segments),
    )
    for kernel in ("wheel", "cudnn"):
        yield "attention kernels of full windows", kernel, kernels_of_attention(bench, kernel)


def seconds_of(call: Callable[[], Any]) -> float:
    """The mean duration of a call on the device, after a few to warm up."""
    timer = Timer("call()", globals={"call": call})
    timer.timeit(3)
    return timer.timeit(10).mean


def kernels_of_attention(bench: Bench, kernel: str) -> str:
    """The kernels that take longest in a forward and a backward pass, or why there are none."""
    inputs = [bench.randn(2, 2048, 6, 128, seed=i).requires_grad_() for i in range(3)]
    try:
        activate_kernel(kernel, bench.device.type, deterministic=False)
        torch.use_deterministic_algorithms(False)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
        ) as profile:
            attention(*inputs, window=-1).sum().backward()
    except (ValueError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"
    slowest = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    return "; ".join(event.key[:60] for event in slowest[:3]) or "the profiler saw no kernel"


def first_training(bench: Bench) -> Iterator[Result]:
    """20 steps of a model of depth 12 with default settings: does it train, how fast, in how much
    memory?"""
    began = time.monotonic()
    yield from gpu_smoke.first_run(bench)
    steps = training.steps("straight")
    yield "seconds with compilation", "d12", time.monotonic() - began
    yield "first step, s", "d12", steps[0]["step_s"]
    yield "peak memory, bytes", "d12", max(steps.items())[1].get("peak_memory_bytes")
    yield "losses", "d12", listed(step["loss"] for _, step in sorted(steps.items()))
    yield (
        "saves, s",
        "d12",
        listed(event["seconds"] for event in training.events("saved", "straight")),
    )


def repeated(bench: Bench, second: gpu_check.SecondRun) -> Iterator[Result]:
    """The run of `training` once more."""
    if not gpu_check.is_complete("straight"):
        raise NotHere("the run of `training`, which it repeats, is not complete")
    yield from gpu_check.bits(bench, second)


def listed(values: Iterator[float]) -> str:
    """Several figures in one value."""
    return " ".join(f"{value:.4f}" for value in values)


def curve(bench: Bench, dtype: str) -> Iterator[Result]:
    """Train a tiny model on the GPU, and on the CPU in float32: equal rows, and losses that differ
    by rounding only."""
    if dtype == "bfloat16" and not bench.cuda:
        raise NotHere("a CPU is too slow in bfloat16")
    tokenizer = bench.base / "curve-tokenizer"
    if not (tokenizer / "tokenizer.json").exists():
        texts = read_texts(min((bench.base / "data").glob("*.parquet")))
        RustBPETokenizer.train_from_iterator(
            itertools.islice(texts, 500), bench.sizes.curve_vocab_size
        ).save(tokenizer)
    flags = {**bench.sizes.curve, "leaves": 1, "tokenizer": tokenizer}
    if not gpu_check.is_complete("curve-cpu"):
        gpu_check.train(bench, "curve-cpu", device_type="cpu", dtype="float32", **flags)
    ours = gpu_check.train(bench, f"curve-{dtype}", dtype=dtype, **flags)
    pairs = [*zip(ours, training.steps("curve-cpu").values(), strict=True)]
    gaps = [abs(a["loss"] - b["loss"]) for a, b in pairs]
    yield "steps with other rows", dtype, sum(a["digest"] != b["digest"] for a, b in pairs)
    yield f"{dtype}: loss, nats from the CPU's", f"largest of {len(gaps)} steps", max(gaps)
    yield f"{dtype}: loss, nats from the CPU's", "first step", gaps[0]
    yield "last loss", f"{dtype}, then the CPU's", listed(step["loss"] for step in pairs[-1])


def nanochat(bench: Bench) -> Iterator[Result]:
    """nanochat's own training with the same shapes."""
    if bench.peer is None:
        raise NotHere("no checkout of nanochat was given: NANOCHAT=DIR")
    yield from gpu_check.peer(bench, "d12")


def host_leaves(bench: Bench) -> Iterator[Result]:
    """Sums of leaves that are kept on the host give the same bits."""
    yield from gpu_check.bits(bench, gpu_check.pending_leaves_on_host, **bench.sizes.host_leaves)


def with_masks(bench: Bench, mode: str) -> Iterator[Result]:
    """A compiled model whose attention stays inside documents."""
    if not bench.cuda:
        raise NotHere(f"--attention-mode={mode} needs a GPU")
    yield from gpu_check.compiled_model(bench, attention_mode=mode)


def several_processes(bench: Bench) -> Iterator[Result]:
    """NCCL with one process. On a GPU also two processes that share it."""
    for num in (1, 2) if bench.cuda else (1,):
        argv, env = [f"--device={bench.device.type}"], {"LOCAL_WORLD_SIZE": str(num)}
        group = training.launch(nccl_check.main, [argv] * num, [env] * num)
        try:
            codes = group.wait()
        finally:
            group.kill()
            print(group.text(), end="")
        yield "processes that fail", f"nccl_check, {num} started", sum(code != 0 for code in codes)


SPEED = gpu_check.speed
CHECKS = [
    Check("machine", 5, 60, machine, apart=True),
    Check("training", 90, 240, first_training),
    Check("same command", 60, 150, partial(repeated, second=gpu_check.same_command)),
    Check("curve float32", 40, 120, partial(curve, dtype="float32")),
    Check("killed and resumed", 100, 240, partial(repeated, second=gpu_check.killed_and_resumed)),
    Check("attention", 30, 100, gpu_check.attention_errors, apart=True),
    Check(
        "d12 as nanochat's",
        90,
        180,
        partial(SPEED, model="d12", pattern="L", deterministic=False, kernel="cudnn"),
    ),
    Check("nanochat", 90, 180, nanochat),
    Check("d24", 90, 240, partial(SPEED, model="d24", pattern="SSSL", deterministic=True)),
    Check("d12", 90, 180, partial(SPEED, model="d12", pattern="SSSL", deterministic=True)),
    Check("optimizer", 60, 180, gpu_check.optimizer_errors, apart=True),
    Check("compiled model", 30, 90, gpu_check.compiled_model, apart=True),
    Check(
        "d24 without determinism",
        90,
        200,
        partial(SPEED, model="d24", pattern="SSSL", deterministic=False),
    ),
    Check("curve bfloat16", 20, 100, partial(curve, dtype="bfloat16")),
    Check("generation", 10, 40, gpu_smoke.generation, apart=True),
    Check("several processes", 60, 180, several_processes),
    Check("leaves on the host", 60, 180, host_leaves),
    Check("empty cache", 90, 240, partial(repeated, second=gpu_check.empty_cache)),
    Check("compiled varlen", 20, 80, partial(with_masks, mode="varlen"), apart=True),
    Check("compiled flex", 30, 90, partial(with_masks, mode="flex"), apart=True),
]


# ---- results -------------------------------------------------------------------------------------


class Results:
    """results.jsonl: one copy in the base directory, one in the folder for results."""

    def __init__(self, base: Path, out: Path) -> None:
        self.kept, self.copy = base / "results.jsonl", out / "results.jsonl"
        for path in (self.kept, self.copy):
            path.parent.mkdir(parents=True, exist_ok=True)
        if self.kept.exists() and not self.copy.exists():  # the second call may have a new folder
            shutil.copy(self.kept, self.copy)

    def add(self, **record: Any) -> None:
        """Write a line and print it."""
        line = json.dumps({"time": time.strftime("%H:%M:%S"), **record})
        for path in {self.kept, self.copy}:
            with path.open("a") as file:
                file.write(line + "\n")
        print(" ", line, flush=True)

    def read(self) -> list[Record]:
        """All lines since the last call of `first`."""
        if not self.kept.exists():
            return []
        records = [json.loads(line) for line in self.kept.read_text().splitlines()]
        firsts = [i for i, record in enumerate(records) if record.get("call") == "first"]
        return records[firsts[-1] :] if firsts else records

    def ends(self) -> dict[str, Record]:
        """{check: the line with which it ended last}"""
        return {record["check"]: record for record in self.read() if "ended" in record}

    def rates(self) -> dict[str, float]:
        """{case: tokens/s} of all runs so far."""
        return {r["case"]: r["value"] for r in self.read() if r.get("measure") == "tokens/s"}

    def rows(self) -> list[tuple[str, ...]]:
        """A table: figures, and the checks that did not end well."""
        rows: list[tuple[str, ...]] = []
        for r in self.read():
            if "measure" in r:
                value = f"{r['value']:.5g}" if isinstance(r["value"], float) else str(r["value"])
                rows.append(
                    (r["check"], r["measure"], r["case"], value[:40], r["limit"], r["verdict"])
                )
        for name, r in self.ends().items():
            if r["ended"] != "done":
                verdict = "not run" if r["ended"] == "skipped" else "FAILS"
                rows.append((name, r["why"][-70:], "", r["ended"], "", verdict))
        return rows


# ---- running -------------------------------------------------------------------------------------


def missing(checks: Sequence[Check], ends: Mapping[str, Record]) -> list[Check]:
    """The checks that are not done, in order; those that failed or were killed before come last."""
    untried, tried = list[Check](), list[Check]()
    for check in checks:
        ended = ends[check.name]["ended"] if check.name in ends else "skipped"
        if ended == "skipped":
            untried.append(check)
        elif ended != "done":
            tried.append(check)
    return untried + tried


def write_figures(check: Check, bench: Bench, results: Results) -> None:
    """Run a check in this process."""
    for measure, case, value in check.run(bench):
        limit = LIMITS.get(measure, "")
        if measure == "tokens/s over nanochat's" and not bench.cuda:
            limit = ""  # a CPU's speed says nothing
        verdict = "reported" if isinstance(value, str) else gpu_check.judge(value, limit)
        results.add(
            check=check.name, measure=measure, case=case, value=value, limit=limit, verdict=verdict
        )


def write_figures_apart(check: Check, bench: Bench, args: argparse.Namespace) -> None:
    """Run a check in a process of its own."""
    argv = [
        f"--check={check.name}",
        f"--device={bench.device.type}",
        f"--base-dir={bench.base}",
        f"--out={args.out}",
        *(["--tiny"] if args.tiny else []),
    ]
    group = training.launch(main, [argv], [{}])
    try:
        [code] = group.wait()
    finally:
        group.kill()
        print(group.text(), end="")
    if code:
        text = group.text()
        _, found, why = text.rpartition(NOT_HERE)
        raise NotHere(why.strip()) if found else ValueError(f"exit code {code}: {text[-300:]}")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLong in this block after so many seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooLong

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def attempt(
    check: Check, bench: Bench, results: Results, args: argparse.Namespace, limit_s: float
) -> None:
    """Run a check for at most `limit_s`, and record how it ended."""
    began = time.monotonic()
    ended = "done"
    why = ""
    bench.rates.update(results.rates())
    try:
        with time_limit(limit_s):
            if check.apart:
                write_figures_apart(check, bench, args)
            else:
                write_figures(check, bench, results)
    except TooLong:
        ended, why = "killed", f"it took longer than {limit_s:.0f} s"
    except NotHere as e:
        ended, why = "skipped", str(e)
    except Exception as e:
        with (bench.out / "errors.log").open("a") as log:
            traceback.print_exc(file=log)
        ended, why = "failed", " ".join(f"{type(e).__name__}: {e}".split())[-300:]
    results.add(check=check.name, ended=ended, why=why, seconds=round(time.monotonic() - began, 1))


def run_missing(bench: Bench, results: Results, args: argparse.Namespace, end: float) -> None:
    """Run the checks that are not done, until the clock (time.monotonic) shows `end`."""
    for check in missing(CHECKS, results.ends()):
        left = end - time.monotonic()
        if left < check.least_s:
            why = f"{max(left, 0):.0f} s are left and it needs {check.least_s}"
            results.add(check=check.name, ended="skipped", why=why, seconds=0)
        else:
            attempt(check, bench, results, args, min(check.most_s, left))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(description=__doc__)
    p.add_argument(
        "call",
        nargs="?",
        default="first",
        choices=["first", "again"],
        help="first: start over. again: run what is missing",
    )
    p.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="no check may run longer than this after the start",
    )
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu needs --tiny")
    p.add_argument("--tiny", action="store_true", help="use small models, to test this script")
    p.add_argument(
        "--base-dir",
        type=Path,
        help="folder for data, runs and logs (default: gpu/first; with --tiny, a temporary one)",
    )
    p.add_argument("--out", type=Path, help="folder for results.jsonl (default: --base-dir)")
    p.add_argument(
        "--peer", type=Path, metavar="DIR", help="also time base_train of this checkout of nanochat"
    )
    p.add_argument(
        "--check",
        choices=[check.name for check in CHECKS],
        help="run only this check, without a limit",
    )
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and print a table. Exit code 1 if a figure misses its limit, or a check failed
    or was killed."""
    args = parse_args(argv)
    end = time.monotonic() + args.seconds
    if args.device == "cpu" and not args.tiny:
        raise ValueError("--device cpu: this would take hours; add --tiny")
    base = args.base_dir or (
        Path(tempfile.mkdtemp(prefix="gpu-")) if args.tiny else Path("gpu/first")
    )
    args.out = args.out or base
    results = Results(base, args.out)
    bench = gpu_check.make_bench(args.device, base, tiny=args.tiny)
    bench.sizes = SimpleNamespace(**vars(bench.sizes) | vars(TINY if args.tiny else GPU))
    bench.peer = gpu_check.checkout(args.peer)
    if args.check:
        [check] = (check for check in CHECKS if check.name == args.check)
        try:
            write_figures(check, bench, results)
        except NotHere as e:
            raise ValueError(f"{NOT_HERE}{e}") from e
        return 0
    results.add(call=args.call, seconds=args.seconds, device=args.device, tiny=args.tiny)
    if args.call == "first":
        shutil.rmtree(bench.base / "runs", ignore_errors=True)
    with sigterm_interrupts():
        run_missing(bench, results, args, end)
    rows = results.rows()
    failed = sum(row[-1] == "FAILS" for row in rows)
    print(
        "",
        *table(("check", "measure", "case", "value", "limit", "verdict"), rows),
        f"{failed} failed",
        sep="\n",
    )
    if args.tiny and args.base_dir is None and not failed:  # otherwise keep the logs
        shutil.rmtree(base)
    return int(failed > 0)


if __name__ == "__main__":
    run_main(main)
