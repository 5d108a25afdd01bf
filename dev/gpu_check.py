"""
Check that everything that needs a GPU works on this one, and that it is fast enough.

    python -m dev.gpu_check --part correct     kernels against float64, compiled models against eager ones
    python -m dev.gpu_check --part speed       throughput and memory of three models; nanochat's with --peer DIR
    python -m dev.gpu_check --part bits        every kind of training: killed, resumed, compared with an undisturbed run

Run `python -m dev.gpu_smoke` first. Each part takes less than eight minutes on one H100, needs no
network, and makes its data from PyTorch's sources. It ends with a table, and with exit code 1 if a
figure misses its limit or could not be measured. With --base-dir, every run of `speed` leaves
PyTorch's profile of two steps beside its log. When time is up, the remaining checks are "not run",
which is not a failure: start the part again; it reuses compiled code. `--device=cpu --tiny` runs
the same code on a small model, which tests this script, not a GPU.
"""

import gc
import importlib.util
import itertools
import math
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dev import make_sample_corpus
from dev.measure import find_tokenizer
from nanochat.attention import attention, make_masks
from nanochat.cli import Parser, run_main
from nanochat.common import table
from nanochat.config import Settings
from nanochat.dist import compute_init, get_compute_dtype, versions
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import MuonAdamW
from nanochat.run_dir import read_config
from nanochat.run_settings import device_memory, estimate_memory
from nanochat.tokenizer import RustBPETokenizer
from scripts import base_train, compare_runs
from scripts.export import write_tokenizer
from tests import training

MINUTES = 7.5  # per part; after that no further check starts
LIMITS = {  # a figure without a limit is only reported
    "attention: forward, relative error": "<= 5e-3",
    "attention: gradients, relative error": "<= 1e-2",
    "compiled model: loss, nats from eager": "<= 2e-3",
    "compiled model: error of a gradient, over eager's": "<= 2",
    "Muon: update of a matrix, relative error": "<= 0.03",
    "Muon: update of a gate, relative error": "<= 0.1",
    "AdamW: update, relative error": "<= 1e-4",
    "optimizer: parameters whose bits depend on their order": "<= 0",
    "d12 SSSL: MFU, %": ">= 38",
    "d24 SSSL: MFU, %": ">= 43",
    "d24: cost of determinism, %": "<= 6",
    "waiting for data, %": "<= 0.5",
    "memory estimate, % above reserved": ">= 0 and <= 8",
    "tokens/s over nanochat's": ">= 0.97",
    "places that differ": "<= 0",
}
SMALL_ERROR = 1e-4  # of a gradient: rounding of float32
ROUNDING = 1e-6  # a gradient that is smaller, relative to all of them, is rounding
NARROW = {"aspect_ratio": 32, "head_dim": 16}  # nanochat's models are at least 24 wide
SMALL: dict[str, Any] = {"depth": 1, **NARROW, "device_batch_size": 2}
GPU = SimpleNamespace(  # models, runs: flags of scripts.base_train
    # 16 micro-batches per step: with 4, the optimizer, unsharded on one GPU, would take 6 % of a
    # step at d24
    models={
        name: {"depth": depth, "device_batch_size": B, "total_batch_size": 16 * B * 2048}
        for name, depth, B in (("d12", 12, 32), ("d24", 24, 16))
    },
    runs={
        "depth": 12,
        "max_seq_len": 1024,
        "device_batch_size": 8,
        "total_batch_size": 32 * 1024,
        "leaves": 4,
        "num_iterations": 20,
        "save_every": 10,
    },
    shape={"depth": 4, "aspect_ratio": 192},
    vocab_size=32768,
    T=2048,
    corpus=make_sample_corpus.Settings(min_chars=8_000_000, max_chars=12_000_000),
    buffer=Settings().buffer_size,
    warm=3,
    timed=5,
    masks=("varlen", "flex"),
)
TINY = SimpleNamespace(
    models={model: {**SMALL, "total_batch_size": 4 * 64} for model in ("d12", "d24")},
    runs={**SMALL, "total_batch_size": 8 * 64, "leaves": 4, "num_iterations": 6, "save_every": 3},
    shape={"depth": 2, **NARROW},
    vocab_size=512,
    T=64,
    buffer=8,
    warm=2,
    timed=3,
    masks=("sdpa_mask",),
    corpus=make_sample_corpus.Settings(min_chars=300_000, max_chars=400_000, num_shards=2),
)

Figure = tuple[str, str, float | None]  # measure, case, value


@dataclass
class Bench:
    """The state that all checks share."""

    device: torch.device
    sizes: SimpleNamespace
    base: Path  # data, tokenizer, runs
    out: Path  # logs
    peer: Path | None = None
    added: frozenset[str] = frozenset()  # environment variables that `compute_init` added
    end: float = float("inf")  # time.monotonic() after which no further check of this part starts
    rates: dict[str, float] = field(default_factory=dict)  # {run: tokens/s}

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def randn(self, *shape: int, seed: int) -> Tensor:
        """The same values on every call, in the dtype that the device computes in."""
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return values.to(self.device, torch.bfloat16 if self.cuda else torch.float32)

    def model(self, dtype: str = "auto", **options: Any) -> GPT:
        """A small model with random weights. No tensor is zero, because zeros hide the gradients of
        earlier layers."""
        config = GPTConfig.from_depth(
            **self.sizes.shape, vocab_size=self.sizes.vocab_size, sequence_len=self.sizes.T
        )
        model = GPT(config, **options).to(self.device)
        model.init_weights(seed=0, compute_dtype=get_compute_dtype(self.device, dtype))
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                if not p.any():
                    p.copy_(0.02 * self.randn(*p.shape, seed=i))
        return model

    def documents(self, T: int) -> Tensor:
        """(2, T) int32 document ids: three documents per row, each longer than the windows."""
        return (torch.arange(T, device=self.device) // (T // 3)).int().expand(2, T).contiguous()


def exact_attention(inputs: Sequence[Tensor], window: int, doc_ids: Tensor) -> Tensor:
    """Attention of q, k, v, each (B, T, H, D), straight from the definition."""
    (q, k, v), T = inputs, inputs[0].size(1)
    back = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    same_doc = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
    visible = same_doc & (back >= 0) & (back <= (window if window >= 0 else T))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.size(3) ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def relative(actual: Tensor, exact: Tensor, least: float = 0.0) -> float:
    """The norm of the error, relative to the norm of the exact tensor, or to `least` if that is
    larger."""
    scale = exact.double().norm().clamp(min=least)
    return ((actual.double() - exact.double()).norm() / scale).item()


def attention_errors(bench: Bench) -> Iterator[Figure]:
    """Compare every kernel that `attention` may choose with float64, on whole rows and on
    documents."""
    T = 1024 if bench.cuda else 512
    *inputs, out = (bench.randn(2, T, 2, 128, seed=i).requires_grad_(i < 3) for i in range(4))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    # flex, which takes long to compile, is last
    modes = dict.fromkeys(["causal", "sdpa_mask", *bench.sizes.masks])
    for mode, window in itertools.product(modes, (128, 256, -1)):
        doc_ids = bench.documents(T) * (mode != "causal")
        mask = (
            None if mode == "causal" else make_masks(doc_ids, [window], mode=mode).by_window[window]
        )
        exact = exact_attention(wide, window, doc_ids)
        exact_gradients = torch.autograd.grad(exact, wide, out.double())
        actual = attention(*inputs, window=window, mask=mask)
        gradients = torch.autograd.grad(actual, inputs, out)
        # a window that is off by one gives an error of at least 0.05
        what = f"{mode}, window {window}"
        yield "attention: forward, relative error", what, relative(actual, exact)
        yield (
            "attention: gradients, relative error",
            what,
            max(map(relative, gradients, exact_gradients)),
        )


def compiled_model(bench: Bench, **options: Any) -> Iterator[Figure]:
    """Compare a model compiled as for training with the eager one, forward and backward.

    Their gradients differ by the rounding of bfloat16. How much of it is normal says the distance
    of the eager gradients from those of an eager float32 model on the CPU.
    """
    T = bench.sizes.T
    model = bench.model(**options)
    on_cpu = replace(bench, device=torch.device("cpu"))
    inside = {"attention_mode": "sdpa_mask"} if "attention_mode" in options else {}
    reference = on_cpu.model("float32", **inside)
    reference.load_state_dict(model.state_dict())

    def loss_and_gradients(bench: Bench, model: GPT, call: Any) -> tuple[float, dict[str, Tensor]]:
        batch = (torch.arange(2 * T + 2, device=bench.device) ** 2 % bench.sizes.vocab_size).view(
            2, T + 1
        )
        masks = model.masks(bench.documents(T), num_docs=8)
        loss = call(batch[:, :-1], batch[:, 1:], masks=masks, loss_reduction="none").mean()
        loss.backward()
        gradients = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return loss.item(), gradients

    compiled = torch.compile(
        model, dynamic=False, fullgraph=True, backend="inductor" if bench.cuda else "eager"
    )
    loss, gradients = loss_and_gradients(bench, model, compiled)
    eager_loss, eager_gradients = loss_and_gradients(bench, model, model)
    _, exact_gradients = loss_and_gradients(on_cpu, reference, reference)
    what = str(options or "default")
    yield "compiled model: loss, nats from eager", what, abs(loss - eager_loss)

    # the parameter whose compiled gradient is worst, compared with its eager gradient; some are
    # nothing but rounding (with one layer, that of backout_lambda)
    norms = [exact.double().norm() for exact in exact_gradients.values()]
    least = ROUNDING * torch.stack(norms).norm().item()
    rows = []
    for name, exact in exact_gradients.items():
        error = relative(gradients[name], exact, least)
        eager_error = relative(eager_gradients[name], exact, least)
        ratio = error / max(eager_error, SMALL_ERROR)
        rows.append((math.inf if math.isnan(ratio) else ratio, error, eager_error, name))
    ratio, error, eager_error, name = max(rows)
    yield "compiled model: error of a gradient, over eager's", f"{what}: {name}", ratio
    yield "gradient, relative error, compiled", f"{what}: {name}", error
    yield "gradient, relative error, eager", f"{what}: {name}", eager_error


def optimizer_errors(bench: Bench) -> Iterator[Figure]:
    """Compare the optimizer's first step with that of an uncompiled float32 optimizer on the
    CPU."""
    for dtype, kind, name in (("auto", "muon", "Muon"), ("float32", "adamw", "AdamW")):
        model, reference = bench.model(dtype), replace(bench, device=torch.device("cpu")).model()
        reference.load_state_dict(model.state_dict())
        before = {n: p.detach().clone() for n, p in reference.named_parameters()}
        for trained in (model, reference):
            for i, p in enumerate(trained.parameters()):
                p.grad = bench.randn(*p.shape, seed=i).to(p)
            optimizer = trained.setup_optimizer()
            optimizer.step()
        errors: dict[str, float] = {}
        for group in optimizer.param_groups:
            for n in group["names"] if group["kind"] == kind else ():
                error = relative(
                    model.get_parameter(n).detach().cpu().double() - before[n],
                    reference.get_parameter(n).detach().double() - before[n],
                )
                what = f"{name}: update"
                if kind == "muon":  # in bfloat16, a gate of 6 x 12 has errors of up to 0.05
                    what += " of a gate" if n.endswith("gate.weight") else " of a matrix"
                errors[what] = max(errors.get(what, 0.0), error)
        for what, error in errors.items():
            yield f"{what}, relative error", dtype, error
    yield from order_of_parameters(bench)


def order_of_parameters(bench: Bench) -> Iterator[Figure]:
    """Take a step with the parameters of each group in order and reversed.

    The number of processes decides a matrix's place in its stack, so the place must not matter.
    """
    results = []
    for order in (1, -1):
        model = bench.model()
        for i, p in enumerate(model.parameters()):
            p.grad = bench.randn(*p.shape, seed=i).to(p)
        groups = model.param_groups()
        for group in groups:
            for key in ("names", "params"):
                group[key] = group[key][::order]
        MuonAdamW(groups, polar_dtype=model.compute_dtype).step()
        results.append(model.state_dict())
    straight, reverse = results
    num = sum(not torch.equal(reverse[name], value) for name, value in straight.items())
    yield "optimizer: parameters whose bits depend on their order", "auto", num


def child_environment(bench: Bench) -> dict[str, str]:
    """The environment for child processes, without the variables that `compute_init` added for this
    process."""
    return {name: value for name, value in os.environ.items() if name not in bench.added}


def train(
    bench: Bench,
    tag: str,
    *,
    hook: Callable[[], None] | None = None,
    dies: bool = False,
    **flags: Any,
) -> list[dict[str, Any]]:
    """Run scripts.base_train in its own process, and return the steps in its log. The process first
    calls `hook`; `dies`: the process is expected to kill itself."""
    given = {
        "device_type": bench.device.type,
        "data_path": bench.base / "data",
        "eval_every": -1,
        "sample_every": -1,
        "save_every": -1,
        "plan": "off",
        "num_iterations": 1000,
        "max_seq_len": bench.sizes.T,
        "buffer_size": bench.sizes.buffer,
        "model_tag": tag,
    }
    with mock.patch.dict(os.environ, child_environment(bench), clear=True):
        group = training.launch(base_train.main, [training.as_flags(given | flags)], [{}], hook)
    try:
        if dies:
            group.wait_for_death()
        elif any(codes := group.wait()):
            raise ValueError(f"{tag}: failed with exit codes {codes}: {group.text()[-300:]}")
    finally:
        group.kill()
        with (bench.out / f"{tag}.log").open("a") as file:
            file.write(group.text())
    return list(training.steps(tag).values())


def figures_of(
    bench: Bench, what: str, tag: str, timed: Sequence[dict[str, Any]]
) -> Iterator[Figure]:
    """Speed, waiting and memory of some steps of a run."""
    bench.rates[what] = statistics.median(step["tokens_per_s"] for step in timed)
    yield "tokens/s", what, bench.rates[what]
    yield (
        f"{what}: MFU, %",
        what,
        100 * statistics.median(step["mfu"] for step in timed) if bench.cuda else None,
    )
    waited, spent = (sum(step[name] for step in timed) for name in ("wait_s", "step_s"))
    yield "waiting for data, %", what, 100 * waited / spent if bench.cuda else None
    yield "memory estimate, % above reserved", what, above_reserved(bench, tag, timed[-1])


def above_reserved(bench: Bench, tag: str, step: Mapping[str, Any]) -> float | None:
    """By how many percent the estimate of a run's memory exceeds the memory that it has reserved by
    a logged step."""
    if (reserved := step.get("reserved_memory_bytes")) is None:
        return None
    settings = Settings.from_json(read_config(training.run_dir(tag)))
    estimate = sum(
        estimate_memory(settings, device_memory(bench.device, settings.world_size)).values()
    )
    return 100 * (estimate / reserved - 1)


def speed(
    bench: Bench, model: str, pattern: str, deterministic: bool, kernel: str = "wheel"
) -> Iterator[Figure]:
    """Time some steps of one model, and profile two more. `kernel`: that of attention, on a GPU
    that has it."""
    has_cudnn = bench.cuda and torch.cuda.get_device_capability()[0] in (9, 10)
    kernel = "wheel" if kernel == "cudnn" and not has_cudnn else kernel
    flags, end = bench.sizes.models[model], bench.sizes.warm + bench.sizes.timed
    what = f"{model} {pattern}{'' if deterministic else ' --no-deterministic'}"
    tag = what.replace(" ", "-")
    steps = train(
        bench,
        tag,
        hook=partial(training.die_after_step, end + 2),
        dies=True,
        **flags,
        window_pattern=pattern,
        deterministic=deterministic,
        attention_kernel=kernel,
        profile_steps=f"{end}:{end + 2}",
    )
    shutil.copytree(training.run_dir(tag) / "profile", bench.out / tag, dirs_exist_ok=True)
    yield from figures_of(bench, what, tag, steps[bench.sizes.warm : end])
    default = bench.rates.get(f"{model} {pattern}")
    # the same kernel as in deterministic mode
    if not deterministic and kernel == "wheel" and default is not None:
        slower = 100 * (1 - default / bench.rates[what])
        yield f"{model}: cost of determinism, %", what, slower if bench.cuda else None


def checkout(peer: Path | None) -> Path | None:
    """The value of --peer. ValueError if it is not a checkout of nanochat."""
    if peer is not None and not (peer / "scripts" / "base_train.py").is_file():
        raise ValueError(
            f"--peer {peer}: it has no scripts/base_train.py; clone github.com/karpathy/nanochat"
        )
    return peer


def isolate(source: Path, folder: Path) -> Path:
    """Copy nanochat's packages into a folder of their own, where Python finds no other of the same
    names: its scripts/ lacks an __init__.py, so ours, installed or on PYTHONPATH, would come first.
    wandb, which nanochat always imports but does not use without --run, is replaced by an empty
    module if it is not installed."""
    shutil.rmtree(folder, ignore_errors=True)
    for package in ("nanochat", "scripts", "tasks"):
        if (source / package).is_dir():
            shutil.copytree(source / package, folder / package)
            (folder / package / "__init__.py").touch()
    if importlib.util.find_spec("wandb") is None:
        (folder / "wandb.py").touch()
    return folder


def peer(bench: Bench, model: str = "d24") -> Iterator[Figure]:
    """Time nanochat's own training on the same data with the same shapes. To be fair, both run
    without determinism, which nanochat does not have, and with full windows, because its others
    need FlashAttention 3. So on a Hopper GPU, both use cuDNN's attention, which PyTorch chooses for
    nanochat."""
    if bench.peer is None:
        return
    base = bench.base / "peer"
    flags = bench.sizes.models[model]
    num = bench.sizes.warm + bench.sizes.timed
    write_tokenizer(base / "tokenizer", RustBPETokenizer.from_directory(bench.base / "tokenizer"))
    if not (base / "base_data_climbmix").exists():
        (base / "base_data_climbmix").symlink_to(bench.base / "data")
    given = {
        **flags,
        "max_seq_len": bench.sizes.T,
        "window_pattern": "L",
        "num_iterations": num,
        "eval_every": -1,
        "core_metric_every": -1,
        "sample_every": -1,
        "save_every": -1,
        "device_type": bench.device.type,
    }
    code = isolate(bench.peer, base / "code")
    command = [sys.executable, "-m", "scripts.base_train", *training.as_flags(given)]
    ours = os.environ.get("PYTHONPATH", "")  # may hold packages that both need
    env = child_environment(bench) | {
        "NANOCHAT_BASE_DIR": str(base),
        "PYTHONPATH": f"{code}{os.pathsep}{ours}",
    }
    with (bench.out / "peer.log").open("w+") as log:
        subprocess.run(command, cwd=code, env=env, stdout=log, stderr=subprocess.STDOUT)
        log.seek(0)
        rates = [
            float(rate.replace(",", "")) for rate in re.findall(r"tok/sec: ([\d,]+)", log.read())
        ]
    if len(rates) < num:
        raise ValueError(
            f"{bench.peer}: nanochat ended after {len(rates)} of {num} steps; see peer.log"
        )
    theirs = statistics.median(rates[bench.sizes.warm :])
    own = bench.rates.get(f"{model} L --no-deterministic")
    yield "tokens/s", f"nanochat's {model} L", theirs
    yield "tokens/s over nanochat's", f"{model} L", None if own is None else own / theirs


def is_complete(tag: str) -> bool:
    """Whether a run exists and has reached its last step."""
    return bool(training.events("completed", tag))


def leaves_on_host() -> None:
    """Keep sums of leaves in the host's memory, as if the GPU's memory were full."""
    base_train.is_tight = lambda *_: True


# How the second of two compared runs differs from the first. Each function trains it, and raises
# ValueError if it did not differ that way, so that no verdict claims more than was checked. It
# returns whether this device can show it.


def same_command(bench: Bench, tag: str, flags: Mapping[str, Any]) -> bool:
    """Nothing differs."""
    train(bench, tag, **flags)
    return True


def pending_leaves_on_host(bench: Bench, tag: str, flags: Mapping[str, Any]) -> bool:
    """Sums of leaves stay on the host."""
    train(bench, tag, hook=leaves_on_host, **flags)
    return True


def empty_cache(bench: Bench, tag: str, flags: Mapping[str, Any]) -> bool:
    """Everything is compiled again. A CPU compiles nothing."""
    with tempfile.TemporaryDirectory(dir=bench.base) as folder:
        inductor, triton = Path(folder, "inductor"), Path(folder, "triton")
        with mock.patch.dict(
            os.environ, TORCHINDUCTOR_CACHE_DIR=str(inductor), TRITON_CACHE_DIR=str(triton)
        ):
            train(bench, tag, **flags)
        if bench.cuda and not any(inductor.rglob("*.py")):
            raise ValueError(f"{tag}: the run has compiled nothing into its empty cache")
    return bench.cuda


def killed_and_resumed(bench: Bench, tag: str, flags: Mapping[str, Any]) -> bool:
    """The run is killed one step after a save, and the same command resumes it."""
    killed = partial(training.die_after_step, flags["save_every"] + 1)
    train(bench, tag, hook=killed, dies=True, sync_save=True, **flags)
    train(bench, tag, **flags)
    began = [event["step"] for event in training.events("started", tag)]
    if began != [0, flags["save_every"]]:
        raise ValueError(
            f"{tag}: its launches began at steps {began}, expected [0, {flags['save_every']}]: it was not "
            f"killed and resumed"
        )
    return True


SecondRun = Callable[[Bench, str, Mapping[str, Any]], bool]


def bits(bench: Bench, second: SecondRun, **way: Any) -> Iterator[Figure]:
    """Train twice with further flags (`way`), and compare everything that both runs wrote."""
    flags = bench.sizes.runs | way
    kind = " ".join(f"{name} {value}" for name, value in way.items())
    what = ", ".join(filter(None, (name_of(second), kind)))
    straight = f"straight {kind}".strip().replace(" ", "-")
    tag = what.replace(",", "").replace(" ", "-")
    if not is_complete(straight):
        train(bench, straight, **flags)
    shutil.rmtree(training.run_dir(tag), ignore_errors=True)  # of a check that was killed
    is_shown = second(bench, tag, flags)
    notes: list[str] = []
    a, b = (compare_runs.open_side(run, notes) for run in (straight, tag))
    parts = compare_runs.compare(a, b, notes)
    if not {"digests", "losses"} < {part.name for part in parts} or parts[-1].kind != "checkpoint":
        raise ValueError(
            f"{what}: the runs have only {', '.join(part.name for part in parts)} in common, and no final "
            f"checkpoint; see their logs"
        )
    for part in parts:
        if part.gaps:
            print(f"  {what}: {part.text()}", flush=True)
    gaps = sum(len(part.gaps) for part in parts)
    yield "places that differ", what, gaps if is_shown or gaps else None
    shutil.rmtree(training.run_dir(tag))  # gigabytes


def name_of(value: Any) -> str:
    """A function or another value for a table."""
    return value.__name__.replace("_", " ") if callable(value) else str(value)


Check = Callable[[Bench], Iterator[Figure]]
PARTS = "correct", "speed", "bits"


def checks_of(bench: Bench) -> dict[str, list[Check]]:
    """The checks of each part, the most important ones first, in case time runs out."""
    ways: list[dict[str, Any]] = [
        {"activation_checkpointing": True},
        {"dtype": "float32"},
        *({"attention_mode": mode} for mode in bench.sizes.masks),
    ]
    timed = [
        ("d12", "SSSL", True, "wheel"),
        ("d24", "SSSL", True, "wheel"),
        ("d24", "SSSL", False, "wheel"),
        ("d24", "L", False, "cudnn"),
    ]
    return {
        "correct": [
            attention_errors,
            optimizer_errors,
            *(partial(compiled_model, **way) for way in [{}, *ways]),
        ],
        "speed": [
            *(
                partial(speed, model=m, pattern=p, deterministic=d, kernel=k)
                for m, p, d, k in timed
            ),
            peer,
        ],
        "bits": [
            partial(bits, second=pending_leaves_on_host),
            *(partial(bits, second=killed_and_resumed, **way) for way in ways),
        ],
    }


def judge(figure: float | None, limit: str) -> str:
    """The verdict on a figure. limit: one condition, or two that are joined by `and`."""
    if figure is None or not limit:
        return "not measured here" if figure is None else "reported"
    for condition in limit.split(" and "):
        sign, number = condition.split()
        met = figure <= float(number) if sign == "<=" else figure >= float(number)
        if not met:
            return "FAILS"
    return "good"


def run_checks(
    bench: Bench, part: str, checks: Sequence[Check], limits: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Run some checks, and return the rows of the table. After an error in one check, the others
    still run."""
    rows: list[tuple[str, ...]] = []
    print(f"{part}:", flush=True)
    for check in checks:
        function, first = getattr(check, "func", check), len(rows)
        name = " ".join(map(name_of, (function, *getattr(check, "keywords", {}).values())))
        if time.monotonic() > bench.end:
            rows.append((part, name, "time is up: start this part again", "", "", "not run"))
            continue
        try:
            for measure, what, figure in check(bench):
                limit, shown = limits.get(measure, ""), "" if figure is None else f"{figure:.4g}"
                rows.append((part, measure, what, shown, limit, judge(figure, limit)))
        except Exception as e:
            with (bench.out / "errors.log").open("a") as file:
                traceback.print_exc(file=file)
            rows.append(
                (part, name, f"{' '.join(repr(e).split())[-80:]}; see errors.log", "", "", "FAILS")
            )
        print(*("  " + " | ".join(row[1:]) for row in rows[first:]), sep="\n", flush=True)
        torch._dynamo.reset()
        if bench.cuda:
            gc.collect()
            torch.cuda.empty_cache()
    shutil.rmtree(bench.base / "runs", ignore_errors=True)
    return rows


def torch_sources() -> dict[str, Path]:
    """{name: path} of PyTorch's Python files: text that is on every machine which can run a
    check."""
    folder = Path(torch.__file__).parent
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}


def make_bench(device: str, base: Path, *, tiny: bool) -> Bench:
    """Prepare this process for a device, and the data and a tokenizer in `base`."""
    before = set(os.environ)
    chosen = compute_init(device, deterministic=True)[-1]
    added = frozenset(set(os.environ) - before)
    base = base.absolute()
    bench = Bench(chosen, TINY if tiny else GPU, base, base / "out", added=added)
    bench.out.mkdir(parents=True, exist_ok=True)
    os.environ["NANOCHAT_BASE_DIR"] = str(base)
    training.PATIENCE_S = 300
    if bench.cuda:  # runs are forked from a server that has not read the compiler's settings yet
        multiprocessing.set_forkserver_preload(["tests.training", "dev.gpu_check"])
        forkserver.ensure_running()
    if not (base / "tokenizer" / "tokenizer.json").exists():
        make_sample_corpus.make_sample_corpus(
            base / "data", bench.sizes.corpus, modules=torch_sources()
        )
        find_tokenizer(None, base / "data", base, vocab_size=bench.sizes.vocab_size)
    return bench


def open_bench(p: Parser, argv: Sequence[str] | None) -> tuple[Any, Bench]:
    """Parse the flags, and prepare the device, the data and a tokenizer."""
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu needs --tiny")
    p.add_argument("--tiny", action="store_true", help="use a small model, to test this script")
    p.add_argument(
        "--base-dir", type=Path, help="folder for data, runs and logs (default: a temporary one)"
    )
    args = p.parse_args(argv)
    if args.device == "cpu" and not args.tiny:
        raise ValueError("--device cpu: this would take hours; add --tiny")
    base = args.base_dir or Path(tempfile.mkdtemp(prefix="gpu-"))
    bench = make_bench(args.device, base.resolve(), tiny=args.tiny)
    print(
        *(f"{name:13s} {value}" for name, value in versions(bench.device).items()),
        f"logs: {bench.out}",
        sep="\n",
    )
    shutil.rmtree(bench.base / "runs", ignore_errors=True)
    return args, bench


def report(args: Any, bench: Bench, rows: Sequence[tuple[str, ...]]) -> int:
    """Print the table, and return the exit code."""
    failed = sum(row[-1] == "FAILS" for row in rows)
    print(
        "",
        *table(("part", "measure", "case", "figure", "limit", "verdict"), rows),
        f"{failed} failed",
        sep="\n",
    )
    if args.base_dir is None and not failed:  # otherwise keep the logs
        shutil.rmtree(bench.base)
    return int(failed > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and print a table. Exit code 1 if a figure misses its limit or could not be
    measured."""
    p = Parser(description=__doc__)
    p.add_argument("--part", choices=PARTS, nargs="+", default=PARTS, help="run only these parts")
    p.add_argument(
        "--peer", type=Path, metavar="DIR", help="also time base_train of this checkout of nanochat"
    )
    args, bench = open_bench(p, argv)
    bench.peer, rows = checkout(args.peer), []
    for part in args.part:
        bench.end = time.monotonic() + 60 * MINUTES
        rows += run_checks(
            bench, part, checks_of(bench)[part], LIMITS if bench.cuda or part != "speed" else {}
        )
    return report(args, bench, rows)


if __name__ == "__main__":
    run_main(main)
