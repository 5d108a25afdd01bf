"""
How far two values lie apart: numbers, tensors, leaves of two states.

Tensors are equal when their bits are, so 0 and -0 differ there, and a NaN equals itself. What differs is a `Gap`, which
says how many elements differ, where the first one is, and by how much: absolutely, relative to the largest element, and
in units in the last place. Tensors are compared by blocks, so two that are mapped from files need little memory.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

BLOCK_ELEMENTS = 1 << 20
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def relative(a: Any, b: Any) -> float:
    """|a - b| / max(|a|, |b|); 0 where equal, infinity where not and one is no finite number."""
    if a == b or (a != a and b != b):
        return 0.0
    if not all(type(v) in (int, float) and math.isfinite(v) for v in (a, b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


@dataclass(frozen=True)
class Gap:
    """A value or a tensor that differs. `relative` is what a tolerance is held against, infinity where none helps; of a
    tensor the largest difference over the largest element. `facts` and `text` say the rest."""
    name: str
    relative: float
    text: str
    facts: dict[str, Any]

    def beyond(self, tolerance: float) -> bool:
        """Whether this is more than noise. Where nothing is tolerated, differing bits of equal numbers are (0, -0)."""
        return tolerance == 0 or self.relative > tolerance

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def compare_values(name: str, a: Any, b: Any) -> Gap | None:
    """The difference of two leaves of a state, tensors or plain values; None where they are equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape:
        return compare_tensors(name, a, b)
    a, b = (describe(v) if isinstance(v, torch.Tensor) else v for v in (a, b))
    if type(a) is type(b) and (a == b or (a != a and b != b)):
        return None
    both_float = type(a) is float and type(b) is float
    return Gap(name, relative(a, b) if both_float else math.inf, f"{a!r} and {b!r}", {"a": a, "b": b})


def describe(tensor: torch.Tensor) -> str:
    """Type and shape, for people."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def compare_tensors(name: str, a: torch.Tensor, b: torch.Tensor) -> Gap | None:
    """The difference of two CPU tensors of one dtype and shape, None if all bits are equal. Works on blocks."""
    flat = a.reshape(-1), b.reshape(-1)
    bits = [t.view(BITS[t.element_size()]) for t in flat]
    if torch.equal(*bits):
        return None
    found = Spread()
    for at in range(0, a.numel(), BLOCK_ELEMENTS):
        found.add(at, *(t[at:at + BLOCK_ELEMENTS] for t in (*flat, *bits)))
    first = tuple(int(i) for i in torch.unravel_index(torch.tensor(found.first), a.shape))
    return found.gap(name, a, first)


@dataclass
class Spread:
    """How far two tensors lie apart, gathered block by block."""
    count: int = 0
    first: int = -1  # flat index of the first element that differs
    odd: int = 0  # elements that differ where one at least is not finite
    max_abs: float = 0.0
    max_relative: float = 0.0
    max_ulps: int = 0
    largest: float = 0.0  # finite element of either, absolute

    def add(self, at: int, a: torch.Tensor, b: torch.Tensor, bits_a: torch.Tensor, bits_b: torch.Tensor) -> None:
        """Take in a block that begins at flat index `at`: values and their bits, (n,) each."""
        for t in (a, b):
            size = t.double().abs()
            self.largest = max(self.largest, size[size.isfinite()].max().item() if size.isfinite().any() else 0.0)
        where = (bits_a != bits_b).nonzero().flatten()
        if not len(where):
            return
        self.first = at + int(where[0]) if self.first < 0 else self.first
        self.count += len(where)
        x, y = a[where].double(), b[where].double()
        finite = x.isfinite() & y.isfinite()
        self.odd += int((~finite).sum())
        if finite.any():
            x, y, where = x[finite], y[finite], where[finite]
            apart, scale = (x - y).abs(), torch.maximum(x.abs(), y.abs())
            self.max_abs = max(self.max_abs, apart.max().item())
            self.max_relative = max(self.max_relative, (apart / scale.clamp(min=5e-324)).max().item())
            self.max_ulps = max(self.max_ulps, int(ulps(bits_a[where], bits_b[where]).max()))

    def gap(self, name: str, like: torch.Tensor, first: tuple[int, ...]) -> Gap:
        """What was gathered of tensors like this one, the first difference at index `first`."""
        floating = like.is_floating_point()
        share = self.max_abs / self.largest if self.largest else 0.0
        odd = f", {self.odd:,} of them not finite" if self.odd else ""
        units = f", {self.max_ulps:,} units in the last place" if floating else ""
        text = (f"{self.count:,} of {like.numel():,} elements{odd}, the first at {list(first)}; at most "
                f"{self.max_abs:.3g} absolute ({share:.3g} of the largest), {self.max_relative:.3g} relative{units}")
        facts = {"tensor": describe(like), "count": self.count, "elements": like.numel(), "first": list(first),
                 "not_finite": self.odd, "max_abs": self.max_abs, "max_relative": self.max_relative,
                 "max_ulps": self.max_ulps if floating else None}
        return Gap(name, share if floating and not self.odd else math.inf, text, facts)


def ulps(bits_a: torch.Tensor, bits_b: torch.Tensor) -> torch.Tensor:
    """How many floats lie between, (n,) int64, from their bits (n,): sign and magnitude, whose order is that of the
    numbers. Capped at the largest int64."""
    top = torch.iinfo(bits_a.dtype).max
    a, b = (bits_a & top).long(), (bits_b & top).long()
    across = a + b  # wraps for enormous doubles of different signs
    across[across < 0] = torch.iinfo(torch.int64).max
    return torch.where((bits_a < 0) == (bits_b < 0), (a - b).abs(), across)
