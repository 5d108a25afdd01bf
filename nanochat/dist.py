"""
The processes of one launch: their device and group, and how they exchange values and errors.

    on_rank0(f)          rank 0: f() --value or error--> all       for work on the run directory
    on_all_ranks(f)      all: f() --who failed?--> all             for work that may fail on any rank
    check_all_equal(d)   all: d == rank 0's d?                     for settings that all ranks must share
    gather_all(x)        all: x --list--> all
    gather_results(f)    all: f() --list, or one error--> all      for work that may fail without ending the run
    broadcast(t)         rank 0: a tensor --> all                  for tensors that only rank 0 can read

Every error reaches all ranks, so that no rank waits for one that has given up. Rank 0 prints the
error, with rank and host unless it happened on rank 0 alone or on all ranks:

    rank 0   the file exists         "rank 1 on host b: x.bin: no such file"      exit 1
    rank 1   the file is missing     prints nothing                               exit 1

Any exception but ValueError and OSError is a bug: in `on_all_ranks`, the first rank that has it
raises it, with its traceback. All of these functions are collective; in a single process they are plain calls.
The watchdog handles errors that one rank hits between collectives.
"""

import contextlib
import ctypes
import logging
import os
import platform
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from nanochat.common import (
    Stop,
    check_stop,
    counted,
    differences,
    each,
    get_dist_info,
    join_reasons,
    stop_reason,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

PROCESSOR = ("cpu", "cpu_capability", "cpu_settings")
VERSIONS = ("torch", "gpu", "cuda", "cudnn", "nccl", "driver", "attention", *PROCESSOR)
PER_MACHINE = ("driver", *PROCESSOR)  # versions that may differ between ranks
RANKS_EVERY = 100  # steps between two "ranks" events in the log
LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # environment variables
SLOW_S = 10.0  # after this long, a process that waits for others says so
JOIN_S = 600.0  # how long the processes of a launch may take to find each other


# ---- device and group ----------------------------------------------------------------------------


def autodetect_device_type() -> str:
    """'cuda' if it is available, else 'mps', else 'cpu'.

    ValueError if the machine has GPUs that PyTorch does not see: a run that was meant for them
    would take weeks on the CPU.
    """
    if torch.cuda.is_available():
        return "cuda"
    gpus_are_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    unseen = "" if gpus_are_hidden else unseen_gpus()
    if unseen:
        raise ValueError(f"{unseen}; --device-type=cpu trains without them")
    return "mps" if torch.backends.mps.is_available() else "cpu"


def unseen_gpus() -> str:
    """A sentence about the GPUs that nvidia-smi lists but PyTorch does not see; empty if none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    listed = [line for line in done.stdout.split("\n") if line]
    if not listed:
        return ""
    name, _, driver = listed[0].partition(", ")
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return (
        f"nvidia-smi lists {counted(len(listed), 'GPU')} ({name}, driver {driver}), but this PyTorch "
        f"sees none: {torch.__version__}, {build}; install a build that matches the driver"
    )


def compute_init(
    device_type: str = "cuda", *, deterministic: bool = False, timeout_s: float = 1800.0
) -> tuple[bool, int, int, int, torch.device]:
    """Join the process group if torchrun started us, and select the device.

    The group uses NCCL on CUDA, and gloo elsewhere.
    """
    # the device
    on_cuda = device_type == "cuda"
    if on_cuda:
        prepare_cuda(deterministic)
    available = ["cpu"]
    if torch.cuda.is_available():
        available.append("cuda")
    if torch.backends.mps.is_available():
        available.append("mps")
    if device_type not in available:
        unseen = unseen_gpus() if on_cuda else ""
        if unseen:
            raise ValueError(f"--device-type cuda: {unseen}; or use --device-type cpu")
        raise ValueError(
            f"--device-type: got {device_type!r}, expected one that this PyTorch offers: "
            f"{', '.join(available)}"
        )
    distributed, rank, local_rank, world_size = get_dist_info()
    device = torch.device(device_type)
    if on_cuda:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("highest")  # no TF32: float32 means float32

    # the group
    if distributed and not dist.is_initialized():
        # torch.optim imports it later. Imported inside a group, it would keep the group beyond
        # `compute_cleanup`, and a thread of Gloo that ends while Python does aborts the process.
        from torch import _dynamo as _dynamo

        timeout = timedelta(seconds=timeout_s)
        store = open_group_store(rank, world_size, timeout)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if on_cuda else None,
        )
    return distributed, rank, local_rank, world_size, device


class Patience:
    """How long this process waits for the others of its launch.

    After SLOW_S, a line says for which ranks, and again when others are missing; after JOIN_S, an
    error ends the wait.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        began = time.monotonic()
        self._tell_at = began + SLOW_S
        self._told: Sequence[int] = ()
        self._end = began + JOIN_S

    def check(self, missing: Sequence[int]) -> None:
        """Called many times a second while this process waits.

        `missing`: the ranks that have not come; none if another rank says which. Stop if a stop is
        requested.
        """
        check_stop()
        now = time.monotonic()
        if now > self._end:
            raise ValueError(
                f"{self._who(missing)} did not come within {JOIN_S:,.0f} s ({_environment()}); start all "
                f"processes of this launch, or unset RANK for a single one"
            )
        if missing and missing != self._told and now > self._tell_at:
            self._tell_at = now + SLOW_S
            self._told = missing
            log.warning(
                "waiting for %s (%s); unset RANK to start a single process",
                self._who(missing),
                _environment(),
            )

    def _who(self, missing: Sequence[int]) -> str:
        """The missing ranks in words."""
        if not missing:
            return f"some of {self._world_size} ranks"
        listed = ", ".join(str(rank) for rank in missing[:8])
        more = len(missing) - 8
        if more > 0:
            listed += f" and {more} more"
        noun = "rank" if len(missing) == 1 else "ranks"
        return f"{noun} {listed} of {self._world_size}"


def _environment() -> str:
    """The variables from which a process knows the others of its launch."""
    return " ".join(f"{name}={os.environ.get(name, '')}" for name in LAUNCH)


def open_group_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Collective. The store of the group of processes that run now, once all of them are there.

    torchrun hosts it, otherwise rank 0. ValueError if the processes do not find each other; Stop if
    a stop is requested.
    """
    host = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    is_port = re.fullmatch(r"\d{1,5}", port, re.ASCII) is not None and int(port) < 2**16
    if not host or not is_port:
        raise ValueError(
            f"{_environment()}: not the environment of one of several processes; start them with "
            f"torchrun, or unset RANK for a single one"
        )
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def connect(is_host: bool) -> dist.Store:
        """Host the store, or wait until its host is there."""
        return dist.TCPStore(
            host,
            int(port),
            world_size,
            is_master=is_host,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )

    patience = Patience(world_size)
    try:
        # in a thread: Python calls no handler of a signal while PyTorch waits
        is_host = rank == 0 and not by_torchrun
        store = next(each(connect, [is_host], poll=lambda: patience.check([0])))
        name = find_each_other(store, rank, world_size, patience)
    except dist.DistError as e:
        check_stop()  # if all ranks are asked to stop, the host may be the first to go
        reason = str(e).partition("\n")[0]
        raise ValueError(
            f"the processes of this launch cannot meet: {reason} ({_environment()}); start all of "
            f"them again, with another MASTER_PORT if this one is in use"
        ) from e
    return dist.PrefixStore(name, store)


def find_each_other(store: dist.Store, rank: int, world_size: int, patience: Patience) -> str:
    """A name for the group of processes that run now, on all of them. Collective.

    torchrun keeps one store for all its attempts (--max-restarts), so a new attempt would find the
    addresses of dead processes in it, and wait for them. Its count of restarts is no name: every
    node has its own. So each process leaves a random id; rank 0 lists the newest ids, until every
    process has found itself in the list and has said so. Then it tells all of them: from here on,
    they wait for each other in calls that no signal ends.
    """
    ours = uuid.uuid4().hex
    store.set(f"process/{rank}", ours)
    try:
        return _agree_on_name(store, rank, world_size, ours, patience)
    except BaseException:
        # The others must not count a process that leaves. Its key stays, because whoever is about to
        # read a key that is gone waits for it.
        with contextlib.suppress(dist.DistError):
            store.compare_set(f"process/{rank}", ours, "")
        raise


def _id_of(store: dist.Store, rank: int) -> str:
    """The id that a rank has left in the store; "" if it has not come, or has left."""
    key = f"process/{rank}"
    return store.get(key).decode() if store.check([key]) else ""


def _agree_on_name(
    store: dist.Store, rank: int, world_size: int, ours: str, patience: Patience
) -> str:
    """`find_each_other` of a process whose random id is in the store."""
    others = range(1, world_size)
    listed = ""
    while True:
        if rank == 0:
            # list the newest ids
            ids = [_id_of(store, r) for r in others]
            newest = ",".join([ours, *filter(None, ids)])
            if newest != listed:
                listed = newest
                store.set("processes", listed)
            # until every process has found its own
            missing = [
                r
                for r, theirs in zip(others, ids)
                if not theirs or not store.check([f"{ours}/{theirs}"])
            ]
            if not missing:
                store.set(f"{ours}/complete", "")
                return ours
        else:
            missing = [0]
            if store.check(["processes"]):
                name, *ids = store.get("processes").decode().split(",")
                if ours in ids:
                    missing = []
                    store.set(f"{name}/{ours}", "")
                    if store.check([f"{name}/complete"]):
                        return name
        patience.check(missing)
        time.sleep(0.02 + world_size / 2000)  # many processes ask rank 0 less often


def elastic_problem() -> str:
    """Why this launch cannot survive a change of its number of nodes; '' if it can.

    Also '' if torchrun's --nnodes fixes the number. If nodes share one store, a new round of them
    finds the addresses of the old one.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    own_stores = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    if not by_torchrun or own_stores:
        return ""
    with contextlib.suppress(OSError):  # no /proc
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        command = words.replace(b"\0", b" ").decode(errors="replace")
        nodes = re.search(r"--nnodes[= ](\d+):(\d+)", command)
        if nodes is None:
            nodes = re.fullmatch(r"(\d+):(\d+)", os.environ.get("PET_NNODES", ""))
        if nodes and nodes[1] != nodes[2]:
            return (
                f"--nnodes={nodes[1]}:{nodes[2]}: this launch will fail when the number of nodes changes; set "
                f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun on every node (docs/clusters.md)"
            )
    return ""


def prepare_cuda(deterministic: bool) -> None:
    """Set the options that CUDA and the compiler read when they start.

    Memory segments can grow, which wastes less memory between tensors, if NVML works: PyTorch asks
    it about each segment. If `deterministic`, repeated work gives the same bits: cuBLAS uses fixed
    buffers, backward passes add in a fixed order, and Inductor chooses no kernel by timing it.
    """
    if nvml_works():
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.backends.cuda.enable_cudnn_sdp(False)  # see attention.py
    # collectives that NCCL's flight recorder keeps
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
        # Inductor decides by a benchmark whether to pad matrices, and its deterministic mode
        # forbids benchmarks: a dimension that is not a multiple of 8 would break compilation.
        os.environ["TORCHINDUCTOR_SHAPE_PADDING"] = "0"
        torch.use_deterministic_algorithms(True)
        # otherwise PyTorch fills every new tensor before we do
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def nvml_works(library: str = "libnvidia-ml.so.1") -> bool:
    """Whether this process can use NVML, the driver's library for management.

    Some containers lack it, such as those whose NVIDIA_DRIVER_CAPABILITIES is `compute` alone;
    there, PyTorch crashes when it creates a segment that grows.
    """
    try:
        nvml = ctypes.CDLL(library)
        return nvml.nvmlInit_v2() == 0
    except (OSError, AttributeError):
        return False


def versions(device: torch.device) -> dict[str, Any]:
    """The versions that, with code, data and settings, determine the bits of a step.

    Plain values; off CUDA, those of the GPU are None. The processor matters on every device: it
    draws the initial weights.
    """
    known: dict[str, Any] = dict.fromkeys(VERSIONS)
    known |= {"torch": str(torch.__version__), **processor()}
    if device.type != "cuda":
        return known
    from torch.nn.attention import current_flash_attention_impl

    known["gpu"] = torch.cuda.get_device_name(device)
    known["cuda"] = torch.version.cuda
    known["cudnn"] = torch.backends.cudnn.version()
    if dist.is_nccl_available():
        known["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    known["driver"] = driver_version()
    known["attention"] = current_flash_attention_impl() or "wheel"
    if torch.backends.cuda.cudnn_sdp_enabled():
        known["attention"] += ", cudnn for full windows"
    return known


# variables with which MKL and oneDNN choose instructions; PyTorch's own, ATEN_CPU_CAPABILITY, is in
# `cpu_capability`
CPU_VARIABLES = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
)


def processor() -> dict[str, str | None]:
    """What decides how this machine's CPU rounds.

    Its name (MKL chooses code by vendor), the instruction set that PyTorch uses, such as AVX2, and
    the settings of MKL and oneDNN, None if none is set.
    """
    settings = [f"{name}={os.environ[name]}" for name in CPU_VARIABLES if os.environ.get(name)]
    return {
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_settings": " ".join(settings) or None,
    }


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, such as AMD EPYC 7B13; its architecture if the system tells no name."""
    with contextlib.suppress(OSError):
        name = re.search(r"^model name\s*: (.+)$", path.read_text(), re.MULTILINE)
        if name is not None:
            return name[1].strip()
    return platform.processor() or platform.machine()


def other_processors() -> list[str]:
    """Collective. A sentence for each rank whose processor may round differently from rank 0's."""
    everyone = gather_all((socket.gethostname(), processor()))
    _, first = everyone[0]
    sentences = []
    for rank, (host, theirs) in enumerate(everyone):
        differing = []
        for name, value in first.items():
            if theirs[name] != value:
                differing.append(f"{name} is {theirs[name]}, on rank 0 it is {value}")
        if differing:
            sentences.append(f"rank {rank} on host {host}: {'; '.join(differing)}")
    return sentences


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of NVIDIA's kernel driver, such as 580.95.05; None if it is not listed."""
    try:
        version = re.search(r"\b\d{3,}(\.\d+)+", path.read_text())
    except OSError:
        return None
    return version and version[0]


def peak_memory(device: torch.device) -> int | None:
    """Peak memory of tensors so far, in bytes; None off CUDA."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reserved_memory(device: torch.device) -> int | None:
    """The most memory that PyTorch has reserved so far, in bytes; None off CUDA.

    It includes the gaps between tensors.
    """
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def compute_cleanup() -> None:
    """Leave the process group, if there is one, unless an exception is being raised.

    Leaving NCCL's group could then wait for a rank that never comes. A process also leaves the
    group when it exits.
    """
    if dist.is_initialized() and sys.exc_info()[0] is None:
        dist.destroy_process_group()


def get_compute_dtype(device: torch.device, name: str = "auto") -> torch.dtype:
    """The dtype of activations and embeddings.

    `name` is a --dtype value: bfloat16, float32, or auto, which is bfloat16 on GPUs that support it
    (compute capability 8.0 and up) and float32 elsewhere.
    """
    if name == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if has_bf16 else torch.float32
    if name not in ("bfloat16", "float32"):
        raise ValueError(f"--dtype: got {name!r}, expected auto, bfloat16 or float32")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype for sums over many values: float64, or float32 on MPS, which has nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64


# FLOP/s in bfloat16 without sparsity, from the vendors' data sheets (figures "with sparsity" are
# halved). The list of chips follows nanochat (github.com/karpathy/nanochat, nanochat/common.py).
# The first name that is part of the device's own name counts, so variants come before their family.
# An H800 has the tensor cores of an H100: only its links and its float64 are slower.
PEAK_FLOPS = (
    ("gb200", 2.5e15),
    ("b200", 2.25e15),
    ("b100", 1.8e15),
    ("h200 nvl", 836e12),
    ("h200", 989e12),
    ("h100 nvl", 835e12),
    ("h100 pcie", 756e12),
    ("h100", 989e12),
    ("h800 pcie", 756e12),
    ("h800", 989e12),
    ("a100", 312e12),
    ("a800", 312e12),
    ("a40", 149.7e12),
    ("a30", 165e12),
    ("l40s", 362e12),
    ("l40", 181e12),
    ("l4", 121e12),
    ("mi355", 2.5e15),
    ("mi325", 1.3074e15),
    ("mi300x", 1.3074e15),
    ("mi250x", 383e12),
    ("5090", 209.5e12),
    ("4090", 165.2e12),
    ("3090", 71e12),
)


def get_peak_flops(device_name: str) -> float:
    """Peak dense bf16 FLOP/s of a GPU by its name.

    Infinity if it is unknown, so that MFU shows 0 and not a wrong number.
    """
    name = device_name.lower()
    return next((flops for part, flops in PEAK_FLOPS if part in name), float("inf"))


# ---- values and errors of all ranks --------------------------------------------------------------


def on_rank0(function: Callable[[], T]) -> T:
    """Call `function()` on rank 0 alone, and return its value on all ranks. Collective.

    If it raises, rank 0 raises its error, and the others exit with code 1 and no output; after a
    Stop, all ranks raise Stop.
    """
    _, rank, _, world_size = get_dist_info()
    box: list[Any] = [on_all_ranks(function if rank == 0 else lambda: None)]
    if world_size > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


class Failure(NamedTuple):
    """Why a rank failed."""

    kind: type[Exception]  # Stop, ValueError (also for an OSError), or RuntimeError for a bug
    host: str
    text: str


def _failure(error: Exception) -> Failure:
    kind: type[Exception] = RuntimeError
    if isinstance(error, Stop):
        kind = Stop
    elif isinstance(error, (ValueError, OSError)):
        kind = ValueError
    return Failure(kind, socket.gethostname(), str(error))


def _stop_together(failures: Iterable[Failure], error: Exception | None) -> None:
    """Collective. Raise Stop on all ranks if the failure of any rank is one. `error`: this
    rank's."""
    if all(failure.kind is not Stop for failure in failures):
        return
    reason = error.reason if isinstance(error, Stop) else stop_reason()
    raise Stop(join_reasons(gather_all(reason))) from error


def on_all_ranks(function: Callable[[], T]) -> T:
    """Call `function()` on every rank; if it fails on any, all ranks exit. Collective.

    It may fail say on a bad flag or a missing file. Then rank 0 raises its own error if all ranks
    failed or only rank 0 did, otherwise a ValueError that names rank and host; the others exit with
    code 1. If an error is neither ValueError nor OSError, the first rank with such an error raises
    it instead. If a rank was asked to stop, all ranks raise Stop.
    """
    _, rank, _, world_size = get_dist_info()
    if world_size == 1:
        return function()
    error: Exception | None = None
    failure: Failure | None = None
    try:
        value = function()
    except Exception as e:
        error = e
        failure = _failure(e)

    failures = {r: f for r, f in enumerate(gather_all(failure)) if f is not None}
    if not failures:
        return value
    _stop_together(failures.values(), error)

    # one rank raises an error, the others exit
    bugs = [r for r, f in failures.items() if f.kind is RuntimeError]
    speaker = bugs[0] if bugs else 0
    if rank != speaker:
        raise SystemExit(1)
    says_it_all = bool(bugs) or len(failures) in (1, world_size)
    if error is not None and says_it_all:
        raise error
    first, (_, host, text) = next(iter(failures.items()))
    more = f" ({len(failures)} of {world_size} ranks failed)" if len(failures) > 1 else ""
    raise ValueError(f"rank {first} on host {host}: {text}{more}") from error


def check_all_equal(settings: Mapping[str, Any]) -> None:
    """Exit as `on_all_ranks` does unless all ranks have the same settings. Collective.

    settings: {name: plain value}.
    """
    theirs = on_rank0(lambda: dict(settings))

    def compare() -> None:
        """ValueError names each setting of this rank that differs from rank 0's."""
        differing = [
            f"{name} is {mine!r}, on rank 0 it is {rank0!r}"
            for name, mine, rank0 in sorted(differences(settings, theirs))
        ]
        if differing:
            raise ValueError(
                f"started differently: {'; '.join(differing)}; start all processes with the same flags "
                f"and environment, the same files under the same paths, and the same tokenizer"
            )

    on_all_ranks(compare)


def gather_all(value: T) -> list[T]:
    """Collective. All ranks' values in rank order, on every rank."""
    world_size = get_dist_info()[3]
    if world_size == 1:
        return [value]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, value)
    return everyone


def gather_results(function: Callable[[], T]) -> list[T]:
    """Call `function()` on every rank, and return all ranks' values in rank order. Collective.

    `function` must not use collectives. If it fails on any rank, all ranks raise an error, so that
    no rank waits for one that failed: Stop if a rank was asked to stop, otherwise an error
    with the rank and the reason.
    """
    if get_dist_info()[3] == 1:
        return [function()]
    value: Any = None
    error: Exception | None = None
    failure: Failure | None = None
    try:
        value = function()
    except Exception as e:
        error = e
        failure = _failure(e)._replace(text=f"{type(e).__name__}: {e}")
    outcomes: list[tuple[T, Failure | None]] = gather_all((value, failure))
    failures = {r: f for r, (_, f) in enumerate(outcomes) if f is not None}
    _stop_together(failures.values(), error)
    for kind in (RuntimeError, ValueError):
        for rank, failed in failures.items():
            if failed.kind is kind:
                raise kind(f"rank {rank}: {failed.text}") from error
    return [value for value, _ in outcomes]


def broadcast(tensor: torch.Tensor) -> None:
    """Copy rank 0's values into the same tensor on all ranks. Collective.

    The tensor is contiguous, has the same shape and dtype everywhere, and is on the device of the
    process group.
    """
    if dist.is_initialized() and tensor.numel():
        # bytes: backends do not know every dtype
        dist.broadcast(tensor.detach().view(-1).view(torch.uint8), src=0)


# ---- records of each rank's GPU, to find a slow rank, a hang, or what takes memory ---------------


def write_memory(run_dir: Path, rank: int) -> str:
    """Write a snapshot of what is allocated on this GPU.

    Returns the end of a sentence, which names the file.
    """
    path = run_dir / f"memory-rank{rank}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception as e:  # this must not hide why the run ends
        return f"; {path} could not be written ({e})"
    return f"; {path} shows what was allocated (pytorch.org/memory_viz)"


def write_collectives(run_dir: Path, rank: int) -> None:
    """Write the records of NCCL's flight recorder, if this launch has one."""
    with contextlib.suppress(Exception):  # this must not hide why the run ends
        if dist.get_backend() == "nccl":
            backend: Any = torch._C._distributed_c10d
            (run_dir / f"nccl-rank{rank}.pickle").write_bytes(backend._dump_nccl_trace())
