"""
Causal self-attention with a sliding window and grouped query heads, by whichever of PyTorch's own kernels fits.

A query sees itself and at most `window` tokens before it. With T = 6 and window = 2:

    key      0 1 2 3 4 5
    query 0  x
          1  x x
          2  x x x
          3    x x x
          4      x x x          a window of -1 (or of T - 1 and more) is the full lower triangle
          5        x x x

Document masks keep a query inside its own document besides. `make_masks` makes them once per batch, outside a
compiled model, and one for all layers of equal window; padding is a document of its own:

    doc_ids  0 0 1 1 1 2      query 3 (document 1) sees keys 2 and 3, query 5 only itself

A model is in one of three modes:

- `causal`: no document masks. `scaled_dot_product_attention` (the `sdpa` kernel): causal for full windows, a boolean
  band (cached) for short ones; the band costs what the full square costs: fine on a CPU and for a few decoded tokens.
  On CUDA short windows take `varlen_attn` (`flash`) instead: the FlashAttention-2 kernels that the PyTorch
  wheel carries. They take the window as a number and skip the blocks outside it, so a short window pays for what it
  sees. bfloat16 and float16 only.
- `sdpa_mask`: an explicit (B, 1, T, T) mask: B T^2 bytes for each kind of window. Runs everywhere.
- `flex`: FlexAttention with a block mask: skips blocks across documents. On a CPU it runs forward only, uncompiled:
  enough to be tested.

Why not flex for everything: it is only fast when compiled, so evaluation and generation, which run eagerly, would pay
minutes of compilation for odd shapes; `flash` is an ordinary operator that torch.compile keeps in one graph.
`torch.nn.attention.activate_flash_attention_impl("FA3")` speeds up `flash` and `sdpa` without a change here, for
those who have installed that package; nothing is ever downloaded.

On exactness: the backward pass of `flash` adds up dq with atomics, in no fixed order, unless
`torch.use_deterministic_algorithms(True)` is set; `flex` has no atomics; `sdpa` on a CPU is exact for a thread count.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MODES = ("causal", "sdpa_mask", "flex")
KERNELS = ("auto", "sdpa", "flash")
MAX_FLASH_HEAD_DIM = 256


class DocMasks(NamedTuple):
    """What keeps the documents of a batch apart."""

    same_doc: Tensor  # (B, T) bool: whether the token before it is of the same document; never for the first of a row
    by_window: dict[int, Any]  # the mask for each window: (B, 1, T, T) bool, True where seen, or a BlockMask


def make_masks(doc_ids: Tensor, windows: Iterable[int], *, mode: str) -> DocMasks:
    """The masks of a batch for some windows, on the device of doc_ids: (B, T) integers, equal inside a document and
    different in all others of its row. mode: sdpa_mask or flex."""
    T = doc_ids.size(1)
    same_doc = F.pad(doc_ids[:, 1:] == doc_ids[:, :-1], (1, 0))
    make = {"sdpa_mask": _doc_band, "flex": _block_mask}[mode]
    reach = {window: -1 if window >= T - 1 else window for window in windows}
    made = {window: make(doc_ids, window) for window in set(reach.values())}
    return DocMasks(same_doc, {window: made[reach[window]] for window in reach})


def attention(q: Tensor, k: Tensor, v: Tensor, *, window: int = -1, mask: Any = None, kernel: str = "auto") -> Tensor:
    """Softmax attention, scaled by 1/sqrt(D); returns (B, Tq, H, D) in q's dtype.

    q: (B, Tq, H, D); k, v: (B, Tk, Hkv, D) with H a multiple of Hkv (query head h reads kv head h // (H / Hkv)).
    The queries are the last Tq of the Tk positions: Tk > Tq continues from a cache.
    window: how many tokens before itself a query sees; -1 is all of them.
    mask: what `make_masks` made for this window, instead of it; needs Tq == Tk. kernel: one of KERNELS, where there
    is no mask. Raises ValueError for shapes or kernels that do not go together.
    """
    Tq, Tk = q.size(1), k.size(1)
    if Tk < Tq or q.size(2) % k.size(2):
        raise ValueError(f"attention: queries {tuple(q.shape)} do not fit keys {tuple(k.shape)}: "
                         "expected Tk >= Tq and H a multiple of Hkv")
    if mask is not None:
        if Tq != Tk:
            raise ValueError(f"attention: document masks need as many keys as queries, got {Tk} and {Tq}; "
                             "leave them out when decoding from a cache")
        return _sdpa(q, k, v, mask) if isinstance(mask, Tensor) else _flex(q, k, v, mask)
    if window >= Tk - 1:
        window = -1
    if kernel == "auto":
        kernel = _pick_kernel(q, k, window)
    if kernel == "sdpa":
        return _causal_sdpa(q, k, v, window)
    if kernel == "flash":
        return _flash(q, k, v, window)
    raise ValueError(f"attention kernel: got {kernel!r}, expected one of {', '.join(KERNELS)}")


def _pick_kernel(q: Tensor, k: Tensor, window: int) -> str:
    """What `auto` means for these tensors; see the module docstring."""
    if not q.is_cuda:
        return "sdpa"
    fits_flash = q.dtype in (torch.bfloat16, torch.float16) and q.size(3) <= MAX_FLASH_HEAD_DIM and q.size(3) % 8 == 0
    return "flash" if window >= 0 and q.size(1) == k.size(1) and fits_flash else "sdpa"


# ---- sdpa -----------------------------------------------------------------------------------------------------------

def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    Tq = q.size(1)
    if window >= 0 and k.size(1) > window + Tq:  # keys before the first query's window: nobody looks at them
        k, v = k[:, -(window + Tq):], v[:, -(window + Tq):]
    Tk = k.size(1)
    if window < 0 and Tq == Tk > 1:
        return _sdpa(q, k, v, None, is_causal=True)
    return _sdpa(q, k, v, _band(Tq, Tk, window, q.device) if Tq > 1 else None)  # one query sees all that is left


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool = False) -> Tensor:
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
                                       is_causal=is_causal, enable_gqa=q.size(2) != k.size(2))
    return y.transpose(1, 2)


def _doc_band(doc_ids: Tensor, window: int) -> Tensor:
    """(B, 1, T, T) bool, True where a query may look."""
    T = doc_ids.size(1)
    return _band(T, T, window, doc_ids.device) & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])


def _band(Tq: int, Tk: int, window: int, device: torch.device) -> Tensor:
    """(Tq, Tk) bool, True where a query may look. Cached, except while a graph is traced (a traced tensor must not
    outlive its trace)."""
    if torch.compiler.is_compiling():
        return _make_band(Tq, Tk, window, device)
    return _cached_band(Tq, Tk, window, device)


def _make_band(Tq: int, Tk: int, window: int, device: torch.device) -> Tensor:
    back = torch.arange(Tk - Tq, Tk, device=device)[:, None] - torch.arange(Tk, device=device)
    return (back >= 0) & (back <= window) if window >= 0 else back >= 0


@functools.lru_cache(maxsize=16)
def _cached_band(Tq: int, Tk: int, window: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # made while sampling, it may be needed for a backward pass later
        return _make_band(Tq, Tk, window, device)


# ---- flash ----------------------------------------------------------------------------------------------------------

def _flash(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Rows are laid end to end and told apart by their edges, which is the only layout `varlen_attn` has."""
    from torch.nn.attention.varlen import varlen_attn  # here because it pulls in all of dynamo

    B, T, H, D = q.shape
    if k.size(1) != T:
        raise ValueError("attention kernel 'flash' has no cache; use 'sdpa' to decode")
    edges = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
    y = varlen_attn(q.reshape(B * T, H, D), k.reshape(B * T, -1, D), v.reshape(B * T, -1, D), edges, edges, T, T,
                    window_size=(window, 0), enable_gqa=k.size(2) != H)
    assert isinstance(y, Tensor)
    return y.view(B, T, H, D)


# ---- flex -----------------------------------------------------------------------------------------------------------

def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    run = _compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    y = run(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=block_mask,
            enable_gqa=q.size(2) != k.size(2))
    return y.transpose(1, 2)


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    """FlexAttention outside a compiled model: uncompiled it would hold the whole (T, T) score matrix."""
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention)


def _block_mask(doc_ids: Tensor, window: int) -> Any:
    """`_doc_band` as a `BlockMask`."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (doc_ids[b, query] == doc_ids[b, key])
        return seen & (query - key <= window) if window >= 0 else seen

    B, T = doc_ids.shape
    return create_block_mask(visible, B=B, H=None, Q_LEN=T, KV_LEN=T, device=doc_ids.device)
