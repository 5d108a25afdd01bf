"""
FP8: the products of a model's matrices in eight bits, for GPUs that multiply them twice as fast.

    forward    y  = x W^T      x, W in e4m3 (more digits)
    backward   dx = g W        g in e5m2 (more range), W in e4m3
               dW = g^T x      g in e5m2, x in e4m3

Each tensor has one scale, which maps its largest magnitude to the largest number of its type (tensorwise scaling).
A scale is computed from the tensors of one micro-batch alone, and a maximum is exact in any order, so a step has the
same bits for every W that divides the number of leaves. Masters, sums and the optimizer stay as they are, and so do
evaluation and generation, which need no gradients. Nothing loads this module unless a run has --fp8.
"""

from typing import Any

import torch
from torch import Tensor

from nanochat.gpt import GPT, Linear

MULTIPLE = 16  # of every dimension that the kernels take
SMALLEST = 1e-12  # a largest magnitude below it counts as this much: zeros stay zeros


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor in FP8, and the float32 scale that turns it back."""
    largest = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp_min(SMALLEST) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, *,
             fast: bool = False) -> Tensor:
    """a (M, K) @ b (K, N) of FP8 tensors, in `dtype`. `fast` adds in fewer bits, on CUDA."""
    return torch._scaled_mm(a.contiguous(), b.t().contiguous().t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype,
                            use_fast_accum=fast)


class _Product(torch.autograd.Function):
    """x (M, K) @ weight (N, K)^T, in x's type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (x8, x_scale), (weight8, weight_scale) = (quantize(t, torch.float8_e4m3fn) for t in (x, weight))
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.weight_dtype = weight.dtype
        return multiply(x8, weight8.t(), x_scale, weight_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        grad8, grad_scale = quantize(grad, torch.float8_e5m2)
        return (multiply(grad8, weight8, grad_scale, weight_scale, grad.dtype),
                multiply(grad8.t(), x8, grad_scale, x_scale, ctx.weight_dtype))


class Float8Linear(Linear):
    """A `Linear` that multiplies in FP8 where gradients are needed."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if not torch.is_grad_enabled() or len(rows) % MULTIPLE:
            return super().forward(x)
        return _Product.apply(rows, self.weight).view(*x.shape[:-1], self.out_features)


def convert(model: GPT) -> None:
    """Let a model's matrices multiply in FP8, all but those with a dimension that is not a multiple of 16."""
    for module in model.modules():
        if isinstance(module, Linear) and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
            module.__class__ = Float8Linear
