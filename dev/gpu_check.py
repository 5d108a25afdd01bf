"""
Does everything that needs a GPU work on this one, and is it as fast as it should be?

    python -m dev.gpu_check --part correct     kernels, compiled code and optimizer against float64
    python -m dev.gpu_check --part speed       tokens/s, MFU, memory of three models, of nanochat with --peer DIR
    python -m dev.gpu_check --part bits        one command twice, compiled anew, killed, on two processes
    python -m dev.gpu_check --part rest        a profile, the largest batch, the optimizer alone

Each part takes less than eight minutes of one H100, needs no network, and makes its data from the
Python that is installed. The last thing it prints is a table: what was measured, what is wanted,
and whether it is so. The exit code is 1 where one figure is not as wanted, or could not be had.

    correct, rest    in this process, on random tokens
    speed, bits      real runs of scripts.base_train, each in a process of its own, killed when
                     enough steps are in its log, so that no time goes into a last save

    --device=cpu --tiny runs the same code on a small model: it shows that this script works, and
    nothing of a GPU. Figures that only a GPU has are then "not measured here".

A run for which no time is left is "not run" and fails nothing. Start the part again to run it: compiled
code is kept, and compilation takes most of the time of a first start.
"""

import gc
import itertools
import json
import multiprocessing
import operator
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dev.make_sample_corpus import Settings as CorpusSettings
from dev.make_sample_corpus import make_sample_corpus
from dev.measure import find_tokenizer, seconds, tell_about
from nanochat.attention import attention, make_masks
from nanochat.cli import Parser, run_main
from nanochat.common import table, write_json
from nanochat.config import Settings
from nanochat.dist import compute_init, get_compute_dtype, versions
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import adamw_rates, adamw_update, muon_update
from nanochat.run_dir import read_config
from nanochat.start_run import estimate_memory
from nanochat.tokenizer import RustBPETokenizer
from scripts import base_train, compare_runs
from scripts.export import write_tokenizer
from tests import training

# In each timed step. The optimizer is not sharded on one GPU: with 4 micro-batches it would take 6 %
# of a step at d24.
MICRO_BATCHES = 16
MINUTES = 7.5  # of a part, after which no further run is started
TOLD = ""  # no figure is wanted: it is only told

# What is measured, and what is wanted.
LIMITS = {
    "tests that fail": "<= 0",
    "attention: forward, relative error": "<= 5e-3",
    "attention: gradients, relative error": "<= 1e-2",
    "attention: errors that a window off by one makes": ">= 10",
    "compiled model: loss, nats from eager": "<= 2e-3",
    "compiled model: least cosine of a gradient": ">= 0.999",
    "compiled model: graph breaks": "<= 0",
    "compiled model: graphs": "<= 2",
    "Muon: update, relative error": "<= 0.03",
    "AdamW: update, relative error": "<= 1e-4",

    "d12: MFU, %": ">= 38",
    "d20: MFU, %": ">= 43",
    "d24: MFU, %": ">= 43",
    "tokens/s": TOLD,
    "waiting for data, %": "<= 0.5",
    "peak memory, % from the estimate": "<= 7",
    "first step, s": TOLD,
    "d24: cost of determinism, %": "<= 6",
    "tokens/s over nanochat's": ">= 0.97",

    "places that differ": "<= 0",
    "places that differ without determinism": ">= 1",

    "profile: GPU busy, %": ">= 97",
    "profile: copies of pageable memory, a step": "<= 0",
    "profile: waits for the GPU, a step": "<= 1",
    "optimizer, ms a step": "<= 25",
    "largest batch over the chosen one": "= 1",
}
ON_ANY_DEVICE = "correct", "bits"  # parts whose limits count on a CPU, too; the others ask how fast a GPU is
SIGNS = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}

# How much is computed.
NARROW = {"aspect_ratio": 32, "head_dim": 16}  # nanochat has no model narrower than 24
SMALL: dict[str, Any] = {"depth": 1, **NARROW, "device_batch_size": 2}
GPU = SimpleNamespace(
    models={"d12": {"depth": 12, "device_batch_size": 32}, "d20": {"depth": 20, "device_batch_size": 16},
            "d24": {"depth": 24, "device_batch_size": 16}},  # flags of scripts.base_train
    corpus=CorpusSettings(), vocab_size=32768, T=2048,
    bits={"depth": 12, "max_seq_len": 1024, "device_batch_size": 8, "total_batch_size": 32 * 1024}, steps=40,
    buffer=Settings().buffer_size,  # of all runs: few documents are soon tokenized
    warm=3, timed=5,  # steps of other runs
    tests=("attention", "gpt", "optim", "checkpoint", "dataloader"),
    windows=(128, 256, -1), attention_T=1024, width=768, tokens=64)
TINY = SimpleNamespace(
    models={"d12": SMALL, "d24": SMALL}, corpus=CorpusSettings(min_chars=300_000, max_chars=400_000, num_shards=2),
    vocab_size=512, T=64, bits={**SMALL, "max_seq_len": 64, "total_batch_size": 8 * 64}, steps=6, warm=2, timed=3,
    buffer=8, tests=("schedule",), windows=(16, -1), attention_T=96, width=32, tokens=8)


Figure = tuple[str, str, float | None]  # the measure, of what, and how much


@dataclass
class Bench:
    """What all measures are given."""

    device: torch.device
    tiny: bool
    base: Path  # data, tokenizer, runs
    out: Path  # logs
    peer: Path | None
    end: float = 0.0  # when no further run of this part is started, by time.monotonic
    rates: dict[tuple[str, str, bool], float] = field(default_factory=dict)  # tokens/s of a run

    @property
    def sizes(self) -> SimpleNamespace:
        return TINY if self.tiny else GPU

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def look_at_the_clock(self) -> None:
        """TimeoutError where it is too late for a further run."""
        if time.monotonic() > self.end:
            raise TimeoutError("no time was left for it; start the part again, compiled code is kept")

    def randn(self, *shape: int, seed: int) -> Tensor:
        """The same on every call, in the type that the device computes in."""
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return values.to(self.device, torch.bfloat16 if self.cuda else torch.float32)


class Job:
    """d12 that trains on random tokens, in this process."""

    def __init__(self, bench: Bench, batch_size: int) -> None:
        sizes, self.device = bench.sizes, bench.device
        shape: dict[str, Any] = NARROW if bench.tiny else {}
        config = GPTConfig.from_depth(sizes.models["d12"]["depth"], vocab_size=sizes.vocab_size,
                                      sequence_len=sizes.T, **shape)
        with torch.device("meta"):
            self.model = GPT(config)
        self.model.to_empty(device=self.device)
        self.model.init_weights(seed=0, compute_dtype=get_compute_dtype(self.device))
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(config.vocab_size, (batch_size, sizes.T + 1), generator=generator).to(self.device)
        self.inputs, self.targets = rows[:, :-1], rows[:, 1:]
        self.optimizer = self.model.setup_optimizer()

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


# ---- correct -------------------------------------------------------------------------------------

def tests(bench: Bench) -> Iterator[Figure]:
    """The tests of what has code of its own for CUDA, where they can see it."""
    files = [f"tests/test_{name}.py" for name in bench.sizes.tests]
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *files]
    if find_spec("xdist") is not None:
        command += ["-n", "0" if bench.tiny else "8"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=outside(), capture_output=True, text=True,
                          timeout=300)
    (bench.out / "tests.log").write_text(done.stdout + done.stderr)
    failed = sum(int(number) for number in re.findall(r"(\d+) (?:failed|error)", done.stdout))
    yield "tests that fail", ", ".join(bench.sizes.tests), failed or float(done.returncode != 0)


def exact_attention(inputs: Sequence[Tensor], window: int, doc_ids: Tensor) -> Tensor:
    """Of q, k, v, each (B, T, H, D), from the definition."""
    q, k, v = inputs
    T, D = q.size(1), q.size(3)
    back = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    seen = (back >= 0) & (back <= (window if window >= 0 else T))
    seen = seen & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def relative(got: Tensor, wanted: Tensor) -> float:
    """The error of a tensor, in norms of what it should be."""
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def attention_errors(bench: Bench) -> Iterator[Figure]:
    """Each kernel that `attention` chooses, on whole rows and on documents."""
    T = bench.sizes.attention_T
    *inputs, out = (bench.randn(2, T, 2, 128, seed=i).requires_grad_(i < 3) for i in range(4))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    whole = torch.zeros(2, T, dtype=torch.int32, device=bench.device)
    # longer than the windows, which else would not count
    documents = (torch.arange(T, device=bench.device) // (T // 3)).int().expand(2, T).contiguous()
    modes = ("causal", "sdpa_mask", "varlen", "flex") if bench.cuda else ("causal", "sdpa_mask")
    for mode, window in itertools.product(modes, bench.sizes.windows):
        doc_ids = whole if mode == "causal" else documents
        mask = None if mode == "causal" else make_masks(doc_ids, [window], mode=mode).by_window[window]
        exact = exact_attention(wide, window, doc_ids)
        wanted = torch.autograd.grad(exact, wide, out.double())
        got = attention(*inputs, window=window, mask=mask)
        gradients = torch.autograd.grad(got, inputs, out)
        what, error = f"{mode}, window {window}", relative(got, exact)
        yield "attention: forward, relative error", what, error
        yield "attention: gradients, relative error", what, max(map(relative, gradients, wanted))
        if window >= 0:
            off = min(relative(got, exact_attention(wide, window + by, doc_ids)) for by in (-1, 1))
            yield "attention: errors that a window off by one makes", what, off / error


def compiled_model(bench: Bench) -> Iterator[Figure]:
    """The whole model, forward and backward, as training compiles it."""
    from torch._dynamo.utils import counters

    job = Job(bench, batch_size=2 if bench.tiny else 8)
    with torch.no_grad():
        for i, (_, p) in enumerate(sorted(job.model.named_parameters())):
            if not p.any():  # what starts at zero hides the gradients of what comes before it
                p.copy_(0.02 * bench.randn(*p.shape, seed=i))

    def once(model: Any) -> tuple[float, list[Tensor]]:
        loss = model(job.inputs, job.targets, loss_reduction="none").mean()
        loss.backward()
        gradients = [p.grad.double().flatten() for p in job.model.parameters() if p.grad is not None]
        job.model.zero_grad(set_to_none=True)
        return loss.item(), gradients

    counters.clear()
    compiled = torch.compile(job.model, dynamic=False, backend="inductor" if bench.cuda else "eager")
    (loss, gradients), (eager_loss, eager_gradients) = once(compiled), once(job.model)
    with torch.no_grad():
        compiled(job.inputs, job.targets, loss_reduction="none")  # as an evaluation does
    cosines = [(a @ b / a.norm() / b.norm()).item() for a, b in zip(gradients, eager_gradients, strict=True)]
    yield "compiled model: loss, nats from eager", "d12", abs(loss - eager_loss)
    yield "compiled model: least cosine of a gradient", "d12", min(cosines)
    yield "compiled model: graph breaks", "d12", sum(counters["graph_break"].values())
    yield "compiled model: graphs", "training and evaluation", counters["stats"]["unique_graphs"]


def muon_arguments(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What a step of Muon is given besides the matrices."""
    def scalar(value: float) -> Tensor:
        return torch.full((), value, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)

    return {"lr": scalar(0.02), "momentum": scalar(0.95), "beta2": 0.9, "weight_decay": scalar(0.1),
            "grad_scale": scalar(0.5), "live": scalar(1.0), "polar_dtype": dtype}


def matrix(bench: Bench, rows: int, cols: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parameter, gradient and both buffers of Muon, float32."""
    second = (rows, 1) if rows >= cols else (1, cols)
    drawn = (bench.randn(*shape, seed=4 * seed + i) for i, shape in enumerate([(rows, cols)] * 3 + [second]))
    param, grad, momentum, square = (tensor.float() for tensor in drawn)
    return 0.02 * param, grad, 0.1 * momentum, 1e-3 * square.square()


def optimizer_errors(bench: Bench) -> Iterator[Figure]:
    """The compiled updates of one step, against float64 on the CPU."""
    def updated(tensors: Sequence[Tensor], update: Callable[..., Any]) -> Tensor:
        before = tensors[0].double().cpu().clone()
        update(tensors)
        return tensors[0].double().cpu() - before

    muon: Any = muon_update
    adamw: Any = adamw_update
    if bench.cuda:
        muon, adamw = (torch.compile(f, fullgraph=True, dynamic=f is adamw_update) for f in (muon, adamw))
    C, cpu = bench.sizes.width, torch.device("cpu")
    polar_dtype = torch.bfloat16 if bench.cuda else torch.float32
    for rows, cols in ((C, C), (4 * C, C), (C, 4 * C)):
        mine = matrix(bench, rows, cols, seed=1)
        wanted = updated([t.double().cpu() for t in mine], lambda tensors: muon_update(
            *tensors, **muon_arguments(cpu, torch.float64)))
        got = updated(mine, lambda tensors: muon(*tensors, **muon_arguments(bench.device, polar_dtype)))
        yield "Muon: update, relative error", f"{rows} x {cols}", relative(got, wanted)
    param, grad, average, _ = (tensor.flatten() for tensor in matrix(bench, C, C, seed=2))
    mine = param, grad, average, average.square()

    def adamw_with(update: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        one = torch.ones((), device=tensors[1].device, dtype=tensors[1].dtype)
        rates = adamw_rates(lr=0.1, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1, step=3 * one, live=one)
        update(*tensors, **rates, grad_scale=0.5 * one, live=one)

    wanted = updated([t.double().cpu() for t in mine], partial(adamw_with, adamw_update))
    got = updated(mine, partial(adamw_with, adamw))
    yield "AdamW: update, relative error", f"{C * C} elements", relative(got, wanted)


# ---- runs of scripts.base_train ------------------------------------------------------------------

def outside() -> dict[str, str]:
    """The environment, without what `compute_init` has set for this process alone."""
    own = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC", "TORCHINDUCTOR_SHAPE_PADDING")
    return {name: value for name, value in os.environ.items() if name not in own}


def train(bench: Bench, tag: str, *, hook: Callable[[], None] | None = None, dies: bool = False,
          world_size: int = 1, env: dict[str, str] | None = None, **flags: Any) -> list[dict[str, Any]]:
    """Run it in processes of its own; the lines of the log, by step. `hook`: what is done in each
    process before it begins; `dies`: it ends with one of them killing itself."""
    bench.look_at_the_clock()
    given = {"device_type": bench.device.type, "data_path": bench.base / "data", "eval_every": -1, "sample_every": -1,
             "save_every": -1, "plan": "off", "num_iterations": 1000, "max_seq_len": bench.sizes.T,
             "buffer_size": bench.sizes.buffer, "model_tag": tag}
    with mock.patch.dict(os.environ, outside(), clear=True):
        group = training.launch(base_train.main, [training.as_flags(given | flags)] * world_size,
                                [env or {}] * world_size, hook)
    try:
        if dies:
            group.wait_for_death()
        elif any(codes := group.wait()):
            raise ValueError(f"{tag}: exit codes {codes}; {group.text()[-300:]}")
    finally:
        group.kill()
        with (bench.out / f"{tag}.log").open("a") as file:
            file.write(group.text())
    return list(training.steps(tag).values())


def speed(bench: Bench, model: str, pattern: str, deterministic: bool) -> Iterator[Figure]:
    """One model for some steps."""
    if bench.tiny and model != "d24":
        return
    sizes, flags = bench.sizes, bench.sizes.models[model]
    tag = f"speed-{model}-{pattern}-{'deterministic' if deterministic else 'any-order'}"
    tokens = MICRO_BATCHES * flags["device_batch_size"] * sizes.T
    steps = train(bench, tag, hook=partial(training.die_after_step, sizes.warm + sizes.timed - 1), dies=True, **flags,
                  total_batch_size=tokens, window_pattern=pattern, deterministic=deterministic)
    timed = steps[sizes.warm:]
    what = f"{model} {pattern}{'' if deterministic else ' --no-deterministic'}"
    rate = bench.rates[model, pattern, deterministic] = statistics.median(step["tokens_per_s"] for step in timed)
    yield "tokens/s", what, rate
    if deterministic:  # the default: its cost has a limit of its own
        mfu = 100 * statistics.median(step["mfu"] for step in timed)
        yield f"{model}: MFU, %", what, mfu if bench.cuda else None
    waited, spent = (sum(step[name] for step in timed) for name in ("wait_s", "step_s"))
    yield "waiting for data, %", what, 100 * waited / spent
    yield "first step, s", what, steps[0]["step_s"]
    peak = steps[-1].get("peak_memory_bytes")
    estimate = sum(estimate_memory(Settings.from_json(read_config(training.run_dir(tag)))).values())
    yield "peak memory, % from the estimate", what, None if peak is None else 100 * abs(peak / estimate - 1)
    if model == "d24" and not deterministic and (model, pattern, True) in bench.rates:
        slower = bench.rates[model, pattern, True] / rate
        yield "d24: cost of determinism, %", what, 100 * (1 - slower) if bench.cuda else None


def peer(bench: Bench, model: str) -> Iterator[Figure]:
    """nanochat's own program, on the same data with the same shapes. Like is compared with like: both without
    determinism, which it does not have, and with full windows, as it has no others without FlashAttention 3."""
    if bench.peer is None or (bench.tiny and model != "d24"):
        return
    bench.look_at_the_clock()
    base, sizes, flags = bench.base / "peer", bench.sizes, bench.sizes.models[model]
    write_tokenizer(base / "tokenizer", RustBPETokenizer.from_directory(bench.base / "tokenizer"))
    if not (base / "base_data_climbmix").exists():
        (base / "base_data_climbmix").symlink_to(bench.base / "data")
    given = {**flags, "max_seq_len": sizes.T, "total_batch_size": MICRO_BATCHES * flags["device_batch_size"] * sizes.T,
             "window_pattern": "L", "num_iterations": 1000, "eval_every": -1, "core_metric_every": -1,
             "sample_every": -1, "save_every": -1, "device_type": bench.device.type, "model_tag": "peer"}
    command = [sys.executable, "-u", "-m", "scripts.base_train", *training.as_flags(given)]
    rates: list[float] = []
    with (bench.out / f"peer-{model}.log").open("w") as log, subprocess.Popen(
            command, cwd=bench.peer, env=outside() | {"NANOCHAT_BASE_DIR": str(base)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        for line in process.stdout or ():
            log.write(line)
            if found := re.search(r"tok/sec: ([\d,]+)", line):
                rates.append(float(found[1].replace(",", "")))
            if len(rates) == sizes.warm + sizes.timed:
                break
        process.kill()
    if len(rates) < sizes.warm + sizes.timed:
        raise ValueError(f"nanochat in {bench.peer} ended after {len(rates)} steps; see peer-{model}.log")
    theirs = statistics.median(rates[sizes.warm:])
    yield "tokens/s", f"nanochat's {model} L", theirs
    ours = bench.rates.get((model, "L", False))
    yield "tokens/s over nanochat's", f"{model} L", None if ours is None else ours / theirs


# ---- bits ----------------------------------------------------------------------------------------

def through_host() -> None:
    """Let two ranks share one GPU, which NCCL refuses: what they exchange goes through the host's
    memory and gloo."""
    class Done:
        def wait(self) -> None:
            pass

    def staged(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, async_op: bool = False, **kwargs: Any) -> Done | None:
            on_host = tree_map(lambda x: x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x, args)
            collective(*on_host, **kwargs)
            with torch.no_grad():
                for there, here in zip(tree_leaves(args), tree_leaves(on_host), strict=True):
                    if isinstance(there, Tensor):
                        there.copy_(here)
            return Done() if async_op else None
        return run

    begin = dist.init_process_group
    dist.init_process_group = lambda backend, timeout, **_: begin("gloo", timeout=timeout)
    for name in ("all_to_all_single", "all_reduce", "all_gather_single", "all_gather_into_tensor", "gather",
                 "broadcast"):
        if hasattr(dist, name):  # not all versions have all
            setattr(dist, name, staged(getattr(dist, name)))


def bits(bench: Bench, what: str) -> Iterator[Figure]:
    """A run that is cut up, or moved, or compiled anew, against the one that nothing happened to."""
    num, ordered, tag = bench.sizes.steps, what != "without determinism", what.replace(" ", "-")
    measure = "places that differ" + ("" if ordered else " without determinism")
    if not ordered and not bench.cuda:
        yield measure, what, None
        return
    launches: list[dict[str, Any]] = [{}]
    match what:
        case "compiled anew":
            launches = [{"env": {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(prefix="gpu_check-")}}]
        case "killed and resumed":
            launches = [{"hook": partial(training.die_after_step, num * 3 // 4), "dies": True}, {}]
        case "two processes":  # until the save in the middle, as gloo takes its time; both on one GPU
            launches = [{"hook": partial(two_processes, num // 2), "dies": True, "world_size": 2,
                         "env": {"LOCAL_RANK": "0"} if bench.cuda else {}}]
    straight = "straight" if ordered else "straight-in-any-order"
    if not training.run_dir(straight).exists():
        launches.insert(0, {"tag": straight})
    for more in launches:
        train(bench, **{"tag": tag, **bench.sizes.bits, "leaves": 4, "num_iterations": num, "save_every": num // 2,
                        "sync_save": True, "deterministic": ordered, **more})
    notes: list[str] = []
    a, b = (compare_runs.open_side(side, notes) for side in (straight, tag))
    parts = compare_runs.compare(a, b, notes)
    (bench.out / f"{tag}-compared.txt").write_text("\n".join(part.describe() for part in parts))
    if not {"digests", "losses"} < {part.name for part in parts} or parts[-1].kind != "checkpoint":
        raise ValueError(f"too little to compare: {', '.join(part.name for part in parts)}")
    yield measure, what, sum(len(part.gaps) for part in parts)
    shutil.rmtree(training.run_dir(tag))  # gigabytes


def two_processes(step: int) -> None:
    """What each of them begins with; the run ends after this step."""
    through_host()
    training.die_after_step(step)


# ---- rest ----------------------------------------------------------------------------------------

def profiled(path: Path, warm: int) -> None:
    """Write a trace of three steps after some others, and die."""
    one_step = base_train.one_step

    def ready(profiler: Any) -> None:
        profiler.export_chrome_trace(str(path))
        training.die()

    profiler = torch.profiler.profile(schedule=torch.profiler.schedule(
        skip_first=warm, wait=0, warmup=1, active=3, repeat=1), on_trace_ready=ready)

    def watched(run: Any) -> None:
        one_step(run)
        profiler.step()

    profiler.start()
    base_train.one_step = watched


def read_trace(events: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """What the loop's thread and the GPU did in the profiled steps."""
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")]
    on_gpu = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
                    key=lambda e: e["ts"])
    if not steps or not on_gpu:
        return dict.fromkeys(("busy", "pageable", "waits"))
    busy, at = 0.0, on_gpu[0]["ts"]
    for e in on_gpu:  # several streams: what overlaps counts once
        end = e["ts"] + e["dur"]
        busy += max(0.0, end - max(at, e["ts"]))
        at = max(at, end)
    waits = [e for e in events if re.fullmatch(r"cuda(Stream|Device|Event)Synchronize|cudaMemcpy", e.get("name", ""))
             and any(e["tid"] == step["tid"] and step["ts"] <= e["ts"] <= step["ts"] + step["dur"] for step in steps)]
    return {"busy": 100 * busy / (at - on_gpu[0]["ts"]), "waits": len(waits) / len(steps),
            "pageable": sum("Pageable" in e["name"] for e in on_gpu) / len(steps)}


def profile(bench: Bench) -> Iterator[Figure]:
    """Three steps of d12 as training takes them."""
    path, flags = bench.out / "trace.json", bench.sizes.models["d12"]
    steps = train(bench, "profile", hook=partial(profiled, path, bench.sizes.warm), dies=True, **flags,
                  total_batch_size=4 * flags["device_batch_size"] * bench.sizes.T)
    bench.rates["d12", "profile", True] = statistics.median(step["tokens_per_s"] for step in steps[1:bench.sizes.warm])
    found = read_trace(json.loads(path.read_bytes())["traceEvents"])
    yield "profile: GPU busy, %", "d12", found["busy"]
    yield "profile: copies of pageable memory, a step", "d12", found["pageable"]
    yield "profile: waits for the GPU, a step", "d12", found["waits"]


def largest_batch(bench: Bench) -> Iterator[Figure]:
    """Whether the batch that is chosen for d24 runs, and twice as much does not."""
    def runs(tag: str, B: int) -> bool:
        try:
            train(bench, tag, hook=partial(training.die_after_step, 2), dies=True, **{
                **bench.sizes.models["d24"], "device_batch_size": B}, total_batch_size=64 * bench.sizes.T)
        except AssertionError:  # it ended by itself
            if "out of memory" in (bench.out / f"{tag}.log").read_text():
                return False
            raise
        return True

    fits = runs("largest", -1)
    chosen = read_config(training.run_dir("largest"))["device_batch_size"]
    more = fits and bench.cuda and runs("larger", 2 * chosen)
    yield "largest batch over the chosen one", f"d24, {chosen} rows", (1 + more) * fits if bench.cuda else None


def optimizer(bench: Bench) -> Iterator[Figure]:
    """A step of the optimizer alone."""
    job = Job(bench, batch_size=1)
    gradients = [bench.randn(*p.shape, seed=i).to(p.dtype) for i, p in enumerate(job.model.parameters())]

    def step() -> None:
        for p, gradient in zip(job.model.parameters(), gradients):
            p.grad = gradient
        job.optimizer.step()

    step()  # compiles
    took = [1000 * job.timed(step) for _ in range(bench.sizes.timed)]
    yield "optimizer, ms a step", "d12", statistics.median(took)


# ---- all of it -----------------------------------------------------------------------------------

MODELS = ("d12", "d20", "d24")
BITS = ("the same again", "compiled anew", "killed and resumed", "two processes", "without determinism")
PARTS: dict[str, list[Callable[[Bench], Iterator[Figure]]]] = {
    "correct": [tests, attention_errors, compiled_model, optimizer_errors],
    # what matters most comes first, in case that time runs out
    "speed": [*(partial(speed, model=m, pattern="SSSL", deterministic=True) for m in MODELS),
              partial(speed, model="d24", pattern="SSSL", deterministic=False),
              *itertools.chain.from_iterable(
                  (partial(speed, model=m, pattern="L", deterministic=False), partial(peer, model=m))
                  for m in ("d24", "d12"))],
    "bits": [partial(bits, what=what) for what in BITS],
    "rest": [profile, largest_batch, optimizer],
}


def judge(figure: float | None, wanted: str) -> str:
    """The verdict on a figure."""
    if figure is None:
        return "not measured here"
    if wanted == TOLD:
        return "told"
    sign, number = wanted.split()
    return "good" if SIGNS[sign](figure, float(number)) else "FAILS"


def run_part(bench: Bench, part: str) -> list[tuple[str, ...]]:
    """Rows of the table. Whatever goes wrong in one measure, the others are still taken."""
    rows: list[tuple[str, ...]] = []
    bench.end = time.monotonic() + 60 * MINUTES
    shutil.rmtree(bench.base / "runs", ignore_errors=True)
    for measure in PARTS[part]:
        began = time.monotonic()
        function, given = getattr(measure, "func", measure), getattr(measure, "keywords", {})
        name = " ".join([function.__name__.replace("_", " "), *map(str, given.values())])
        try:
            for measured, what, figure in measure(bench):
                wanted = LIMITS[measured] if bench.cuda or part in ON_ANY_DEVICE else TOLD
                shown = "" if figure is None else f"{figure:.4g}"
                rows.append((part, measured, what, shown, wanted, judge(figure, wanted)))
                print("  " + " | ".join(rows[-1][1:]), flush=True)
        except TimeoutError as e:
            rows.append((part, name, str(e), "", "", "not run"))
            print("  " + " | ".join(rows[-1][1:]), flush=True)
        except Exception as e:
            with (bench.out / "errors.log").open("a") as file:
                traceback.print_exc(file=file)
            lines = str(e).strip().splitlines() or [type(e).__name__]
            # of a run that ended wrongly, what it printed last
            line = lines[-1] if isinstance(e, AssertionError) else lines[0]
            rows.append((part, name, line[:80], "", "", "FAILS"))
            print("  " + " | ".join(rows[-1][1:]) + "; see errors.log", flush=True)
        print(f"  {name}: {time.monotonic() - began:.1f} s", flush=True)
        torch._dynamo.reset()
        if bench.cuda:
            gc.collect()
            torch.cuda.empty_cache()
    shutil.rmtree(bench.base / "runs", ignore_errors=True)
    return rows


def prepare(bench: Bench) -> None:
    """Data, a tokenizer, and a server from which the processes of runs are forked."""
    os.environ["NANOCHAT_BASE_DIR"] = str(bench.base)
    if bench.tiny:  # threads of several processes on few cores wait for each other
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    training.PATIENCE_S = 300
    if bench.cuda:  # nothing that reads the environment before a run has set it: a compiler's settings
        multiprocessing.set_forkserver_preload(["tests.training"])
    else:
        training.server()
    forkserver.ensure_running()
    if not (bench.base / "data").exists():
        make_sample_corpus(bench.base / "data", bench.sizes.corpus)
    if not (bench.base / "tokenizer").exists():
        find_tokenizer(None, bench.base / "data", bench.base, vocab_size=bench.sizes.vocab_size)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and tell in a table; 1 where something is not as it should be."""
    p = Parser(description=__doc__)
    p.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--tiny", action="store_true", help="a small model, to try this script itself")
    p.add_argument("--peer", type=Path, metavar="DIR", help="nanochat's checkout, whose base_train is timed too")
    p.add_argument("--out", type=Path, help="folder for logs (default: in the base directory)")
    p.add_argument("--base-dir", type=Path, help="default: gpu_check in /dev/shm, if there is room")
    args = p.parse_args(argv)
    if args.device == "cpu" and not args.tiny:
        raise ValueError("--device cpu: a CPU takes hours for it; give --tiny too")
    memory, needed = Path("/dev/shm"), 0 if args.tiny else 40e9  # bytes of checkpoints
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > needed
    place = memory if roomy else Path(tempfile.gettempdir())
    base = (args.base_dir or place / f"gpu_check{'-tiny' * args.tiny}").absolute()
    *_, device = compute_init(args.device, deterministic=True)
    bench = Bench(device, args.tiny, base, (args.out or base / "out").absolute(), args.peer)
    bench.out.mkdir(parents=True, exist_ok=True)
    about = tell_about() | versions(device)
    print(*(f"{name:13s} {value}" for name, value in versions(device).items()), sep="\n")
    began = time.monotonic()
    prepare(bench)
    print(f"data and tokenizer: {time.monotonic() - began:.1f} s", flush=True)
    rows, minutes = [], {}
    for part in args.part:
        began = time.monotonic()
        print(f"{part}:", flush=True)
        rows += run_part(bench, part)
        minutes[part] = round((time.monotonic() - began) / 60, 2)
    failed = sum(row[-1] == "FAILS" for row in rows)
    write_json(bench.out / "figures.json", {"about": about, "minutes": minutes, "rows": rows})
    print("", *table(("part", "measure", "of", "figure", "wanted", "verdict"), rows), "", sep="\n")
    print(f"{failed} of {len(rows)} fail; minutes: {minutes}; logs: {bench.out}")
    return int(failed > 0)


if __name__ == "__main__":
    run_main(main)
