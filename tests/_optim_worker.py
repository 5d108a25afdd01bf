"""What each of four gloo processes does for tests/test_optim.py: the same scenario on W = 2, 1, 4 and 3 of them in
turn (starting processes is the slow part). Results go to files: FOLDER/W-rank.pt."""

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.optim import MuonAdamW

WORLD_SIZES = (2, 1, 4, 3)  # 2 first: the others load what it saves
SAMPLES = 12  # gradients per step; every W above divides it

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "muon": [(24, 16)] * 5 + [(16, 24)] * 3 + [(7, 33), (40, 40)],
    "large": [(2051, 33), (512, 160)],  # the first in bfloat16, divisible by no W; the second by all
    "small": [(5,), (), (3,), (1,), (37, 3)],
}


def make_params() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    params = {}
    for kind, shapes in SHAPES.items():
        for i, shape in enumerate(shapes):
            dtype = torch.bfloat16 if (kind, i) == ("large", 0) else torch.float32
            values = torch.randn(shape, generator=generator).to(dtype)
            params[f"{kind}.{i}"] = torch.nn.Parameter(values)
    return params


def make_optimizer(params: dict[str, torch.nn.Parameter]) -> MuonAdamW:
    def group(prefix: str, **settings: Any) -> dict[str, Any]:
        names = [name for name in params if name.startswith(prefix)]
        return {"names": names, "params": [params[name] for name in names], **settings}

    adamw = {"kind": "adamw", "betas": (0.8, 0.95), "eps": 1e-10}
    return MuonAdamW([
        group("muon", kind="muon", lr=0.02, momentum=0.9, ns_steps=5, beta2=0.9, weight_decay=0.1),
        group("large", **adamw, lr=0.05, weight_decay=0.01),
        group("small", **adamw, lr=0.01, weight_decay=0.0),
    ])


def sample_gradient(name: str, shape: torch.Size, step: int, sample: int) -> Tensor:
    """A gradient in 64ths with |g| <= 1/8, so that sums of 12 are exact in any order, in bfloat16 too."""
    seed = 1000 * step + 50 * sample + sum(map(ord, name))
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 64


def set_gradients(params: dict[str, torch.nn.Parameter], step: int, rank: int, world_size: int) -> None:
    """This rank's share of the step's samples; at step 1 three parameters have no gradient."""
    share = SAMPLES // world_size
    for name, param in params.items():
        param.grad = torch.zeros_like(param)
        for sample in range(rank * share, (rank + 1) * share):
            param.grad += sample_gradient(name, param.shape, step, sample).to(param.dtype)
        if name in ("muon.1", "small.0", "large.1") and step == 1:
            param.grad = None


def run_steps(params: dict[str, torch.nn.Parameter], optimizer: MuonAdamW, steps: range, rank: int,
              world_size: int) -> list[Tensor]:
    norms = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / 10)
        set_gradients(params, step, rank, world_size)
        norms.append(optimizer.step(grad_scale=0.5))
    return norms


def values(params: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in params.items()}


def scenario(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Two steps, (W = 2: save), two more; load what W = 2 saved and repeat the last two; a step with one NaN."""
    params = make_params()
    optimizer = make_optimizer(params)
    owned = sum(tensor.numel() for state in optimizer.state.values() for tensor in state.values())
    norms = run_steps(params, optimizer, range(2), rank, world_size)
    middle, state = values(params), optimizer.gather_state()
    if world_size == 2 and rank == 0:
        torch.save({"params": middle, "state": state}, folder / "middle.pt")
    norms += run_steps(params, optimizer, range(2, 4), rank, world_size)
    result = {"owned": owned, "norms": norms, "params": values(params), "state": optimizer.gather_state()}

    if world_size > 1:
        dist.barrier()
    saved = torch.load(folder / "middle.pt", weights_only=True)
    params = make_params()
    optimizer = make_optimizer(params)
    for name, param in params.items():
        param.data.copy_(saved["params"][name])
    optimizer.load_state(saved["state"])
    result["reloaded"] = optimizer.gather_state()
    run_steps(params, optimizer, range(2, 4), rank, world_size)
    result["resumed"] = values(params)

    set_gradients(params, 4, rank, world_size)
    if rank == world_size - 1:
        params["small.4"].grad[36, 2] = float("nan")
    result["nan_norm"] = optimizer.step()
    result["after_nan"], result["state_after_nan"] = values(params), optimizer.gather_state()
    return result


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for world_size in WORLD_SIZES:
        if rank < world_size:
            if world_size > 1:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store-{world_size}", rank=rank,
                                        world_size=world_size, timeout=datetime.timedelta(seconds=60))
            torch.save(scenario(rank, world_size, Path(folder)), f"{folder}/{world_size}-{rank}.pt")
            if world_size > 1:
                dist.destroy_process_group()
