"""
Initial weights: a pure function of (seed, parameter name, shape).

    "transformer.h.3.attn.c_q.weight", seed 42  ->  BLAKE2b  ->  seed of a generator of its own  ->  the matrix

Every parameter is drawn on the CPU by its own generator, so its bits are the same on every device, for every world
size and whatever else is in the model. One generator for the whole model would be shorter, but then a layer more
would change the bits of everything drawn after it, and a rank could not fill only what it owns.
"""

import hashlib

import torch
from torch import Tensor


def initial_weight(name: str, shape: torch.Size, *, seed: int, n_embd: int) -> Tensor:
    """One parameter's initial value: float32 on the CPU, a pure function of the arguments.

    Matrices are uniform (no outliers) with standard deviation 1/sqrt(n_embd), less for the MLP's first; matrices that
    write to the residual stream start at zero, so that every block starts as the identity; gates start slightly open.
    """
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)  # it takes 63 bits
    weight = torch.empty(shape, dtype=torch.float32)
    bound = (3 / n_embd) ** 0.5  # of the uniform distribution with that standard deviation
    kind = name.removesuffix(".weight").split(".")[-1]
    if kind == "wte":
        return weight.normal_(0, 0.8, generator=rng)
    if kind == "lm_head":
        return weight.normal_(0, 0.001, generator=rng)
    if kind in ("c_q", "c_k", "c_v") or name.startswith("value_embeds."):
        return weight.uniform_(-bound, bound, generator=rng)
    if kind == "c_fc":
        return weight.uniform_(-0.4 * bound, 0.4 * bound, generator=rng)
    if kind in ("ve_gate", "smear_gate"):
        return weight.uniform_(0, 0.02, generator=rng)
    if kind in ("resid_lambdas", "x0_lambdas"):
        depth = torch.arange(shape[0]) / max(shape[0] - 1, 1)  # 0 at the first layer, 1 at the last
        return 1.15 - 0.10 * depth if kind == "resid_lambdas" else 0.20 - 0.15 * depth
    constants = {"c_proj": 0.0, "smear_lambda": 0.0, "backout_lambda": 0.2}
    return weight.fill_(constants[kind])
