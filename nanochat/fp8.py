"""
FP8: a model's matrix products in eight bits, for GPUs that compute them twice as fast.

    forward    y  = x W^T      x, W in e4m3 (precision)
    backward   dx = g W        g in e5m2 (range), W in e4m3
               dW = g^T x      g in e5m2, x in e4m3

Each tensor has one scale, which maps its largest magnitude to the largest number of its dtype
(tensorwise scaling). A scale depends only on the tensors of one micro-batch, and a maximum is the
same in any order, so a step has the same bits for every number of ranks that divides the number of
leaves. Master weights, gradient sums and the optimizer are unchanged, as are evaluation and
generation, which need no gradients.
"""

from typing import Any

import torch
from torch import Tensor

from nanochat.gpt import GPT, Linear

MULTIPLE = 16  # the kernels require every dimension to be a multiple of this
SMALLEST = 1e-12  # lower bound of a tensor's largest magnitude, so that zeros stay zeros


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(tensor in FP8, float32 scale): their product approximates x."""
    largest = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp_min(SMALLEST) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def multiply(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    """The product of FP8 tensors, a (M, K) @ b (K, N), in `dtype`. On CUDA, `fast` accumulates in
    fewer bits. A CPU has no fast kernel for FP8, and some have none at all, so there the eight-bit
    values are multiplied in float32."""
    if a.device.type == "cpu":
        return ((a.float() @ b.float()) * (a_scale * b_scale)).to(dtype)
    return torch._scaled_mm(
        a.contiguous(),
        b.t().contiguous().t(),
        scale_a=a_scale,
        scale_b=b_scale,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


class _Product(torch.autograd.Function):
    """x (M, K) @ weight (N, K)^T, in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (x8, x_scale), (weight8, weight_scale) = (
            quantize(t, torch.float8_e4m3fn) for t in (x, weight)
        )
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.weight_dtype = weight.dtype
        return multiply(x8, weight8.t(), x_scale, weight_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        grad8, grad_scale = quantize(grad, torch.float8_e5m2)
        return (
            multiply(grad8, weight8, grad_scale, weight_scale, grad.dtype),
            multiply(grad8.t(), x8, grad_scale, x_scale, ctx.weight_dtype),
        )


class Float8Linear(Linear):
    """A `Linear` that multiplies in FP8 if gradients are enabled and 16 divides the number of
    tokens."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if not torch.is_grad_enabled() or len(rows) % MULTIPLE:
            return super().forward(x)
        return _Product.apply(rows, self.weight).view(*x.shape[:-1], self.out_features)


def convert(model: GPT) -> None:
    """Switch a model's matrices to FP8, except those with a dimension that is not a multiple of
    16."""
    for module in model.modules():
        if isinstance(module, Linear) and not (
            module.in_features % MULTIPLE or module.out_features % MULTIPLE
        ):
            module.__class__ = Float8Linear
