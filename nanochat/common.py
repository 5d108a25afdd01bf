"""
What every other module may need: where files go, which process this is, which device and compute type,
and how a file is written so that a crash can never leave half of it.

Nothing happens on import. Environment variables are read when a function is called:
`NANOCHAT_BASE_DIR` (default ~/.cache/nanochat) and torchrun's `RANK`, `LOCAL_RANK`, `WORLD_SIZE`.
PyTorch, which takes seconds to import, is imported by the few functions that need it: commands and worker processes
that only touch files and text start without it.
"""

import contextlib
import gc
import hashlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

EXIT_FAILED = 1  # what a script returns after a clear error
EXIT_HALTED = 3  # a person must decide how the run goes on


# ---- places ---------------------------------------------------------------------------------------------------------

def get_base_dir() -> Path:
    """The folder for data, tokenizers and runs: $NANOCHAT_BASE_DIR or ~/.cache/nanochat; made if absent."""
    base = Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache" / "nanochat").expanduser()
    base.mkdir(parents=True, exist_ok=True)
    return base


# ---- files ----------------------------------------------------------------------------------------------------------

def fsync_dir(path: Path) -> None:
    """Make a rename or a new name inside `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic_open(path: Path | str) -> Iterator[BinaryIO]:
    """Open a new file for writing that appears under `path` only when whole: temporary name in the same folder,
    fsync, rename, fsync of the folder. On an exception the temporary file goes and what `path` held stays."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(fd, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        if isinstance(e, OSError) and e.filename is None:
            e.filename = str(path)  # a full disk names no file
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    fsync_dir(path.parent)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with atomic_open(path) as f:
        f.write(data)


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` as indented JSON to `path` atomically."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path | str) -> Any:
    """Read JSON; a broken file is a ValueError that names it."""
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as e:
        raise ValueError(f"{path}: not valid JSON ({e}); delete it and run the command that wrote it again") from e


def hash_bytes(*parts: bytes) -> str:
    """128-bit BLAKE2b of the concatenated parts, as hex."""
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        h.update(part)
    return h.hexdigest()


def hash_json(value: Any) -> str:
    """`hash_bytes` of the canonical JSON of a value: sorted keys, no spaces."""
    return hash_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def hash_file(path: Path | str) -> str:
    """128-bit BLAKE2b of a file's bytes, as hex; reads in blocks."""
    h = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()


# ---- processes ------------------------------------------------------------------------------------------------------

def get_dist_info() -> tuple[bool, int, int, int]:
    """(is torchrun's child, rank, local rank, world size) from torchrun's environment."""
    if "RANK" not in os.environ:
        return False, 0, 0, 1
    return True, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])


def print0(*args: Any, **kwargs: Any) -> None:
    """Print on rank 0 only, at once."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(*args, **{"flush": True, **kwargs})


def autodetect_device_type() -> str:
    """'cuda' where there is one, else 'mps', else 'cpu'."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def compute_init(device_type: str, *, timeout_s: float = 1800.0) -> "tuple[bool, int, int, int, torch.device]":
    """Join the process group when torchrun started us (NCCL on CUDA, gloo elsewhere) and pick the device.

    `timeout_s`: how long a rank waits for the others in a collective. Returns (is distributed, rank, local rank, world
    size, device). Raises ValueError where the device is absent.
    """
    import torch
    import torch.distributed as dist

    if device_type not in ("cuda", "mps", "cpu"):
        raise ValueError(f"--device-type: got {device_type!r}, expected cuda, mps or cpu")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device-type cuda: this PyTorch sees no CUDA device; use --device-type cpu")
    if device_type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device-type mps: this PyTorch sees no Apple GPU; use --device-type cpu")
    distributed, rank, local_rank, world_size = get_dist_info()
    device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    if distributed and not dist.is_initialized():
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s),
                                device_id=device if device_type == "cuda" else None)
    return distributed, rank, local_rank, world_size, device


def compute_cleanup() -> None:
    """Leave the process group, if any."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def get_compute_dtype(device: "torch.device", name: str = "auto") -> "torch.dtype":
    """The type activations and embeddings have: 'auto' is bfloat16 on GPUs that have it (compute capability 8.0
    and up), float32 elsewhere. `name` is a --dtype flag: auto, bfloat16 or float32."""
    import torch

    if name == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if has_bf16 else torch.float32
    if name not in ("bfloat16", "float32"):
        raise ValueError(f"--dtype: got {name!r}, expected auto, bfloat16 or float32")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def wide_dtype(device: "torch.device") -> "torch.dtype":
    """What sums over many values are kept in: float64, float32 on MPS, which has nothing wider."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64


# Dense bf16 peaks from the vendors' data sheets, FLOP/s. More specific names first.
PEAK_FLOPS = (
    ("gb200", 2.5e15), ("b200", 2.25e15), ("b100", 1.8e15),
    ("h200 nvl", 836e12), ("h200", 989e12),
    ("h100 nvl", 835e12), ("h100 pcie", 756e12), ("h100", 989e12), ("h800", 989e12),
    ("a100", 312e12), ("a800", 312e12), ("a40", 149.7e12), ("a30", 165e12),
    ("l40s", 362e12), ("l40", 181e12), ("l4", 121e12),
    ("mi355", 2.5e15), ("mi325", 1.3074e15), ("mi300x", 1.3074e15), ("mi250x", 383e12),
    ("5090", 209.5e12), ("4090", 165.2e12), ("3090", 71e12),
)


def get_peak_flops(device_name: str) -> float:
    """Peak dense bf16 FLOP/s of a GPU by its name; infinity where unknown, so that MFU reads 0 instead of wrong."""
    lowered = device_name.lower()
    for fragment, flops in PEAK_FLOPS:
        if fragment in lowered:
            return flops
    log.warning("peak FLOP/s of %r unknown: MFU will read 0", device_name)
    return float("inf")


# ---- scripts --------------------------------------------------------------------------------------------------------

class DummyWandb:
    """Stands in for a wandb run when wandb is off."""

    id: str | None = None

    def log(self, *args: Any, **kwargs: Any) -> None: ...

    def finish(self) -> None: ...


def setup_logging() -> None:
    """Scripts call this once: warnings and up from every rank, info from rank 0, to stderr."""
    level = logging.INFO if get_dist_info()[1] == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def quiet_gc() -> None:
    """Let Python's collector rest: what is there now is not looked at again, and nothing is until 100,000 more objects
    are alive than now. For loops whose rounds leave no cycles: it took a tenth of the loader's time to find none."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


def run_main(main: Callable[[], int | None]) -> None:
    """The last line of every script: `main()`'s value is the exit code; bad input (ValueError, OSError) becomes one
    sentence on stderr and exit code 1. Any other exception is our bug and keeps its traceback."""
    try:
        code = main() or 0
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        code = EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    sys.exit(code)
