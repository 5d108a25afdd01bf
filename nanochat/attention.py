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

With `doc_ids` a query also sees only keys of its own document. Nothing else ever hides a key, so all ways agree:

- `sdpa`: `scaled_dot_product_attention`, causal for full windows, an explicit boolean band (cached) for short ones.
  Runs everywhere. The band costs what the full square costs: fine on a CPU and for a few decoded tokens.
- `flash`: `varlen_attn`, the FlashAttention-2 kernels that the PyTorch wheel carries for CUDA. They take the window as
  a number and skip the blocks outside it, so a short window pays for what it sees. bfloat16 and float16 only.
- `flex`: FlexAttention with a block mask: the one that also skips blocks across documents. A mask is made once per
  (length, window, device), or once per batch where there are documents, outside the compiled region. On a CPU it runs
  forward only, uncompiled: enough to be tested.

`auto` takes `sdpa` off CUDA; on CUDA `flash` for short windows, `sdpa` for full ones (PyTorch then picks its best fused
kernel) and `flex` where documents are masked. Why not flex for everything: it is only fast when compiled, so evaluation
and generation, which run eagerly, would pay minutes of compilation for odd shapes; `flash` is an ordinary operator that
torch.compile keeps in one graph. `torch.nn.attention.activate_flash_attention_impl("FA3")` speeds up `flash` and `sdpa`
without a change here, for those who have installed that package; nothing is ever downloaded.

On exactness: the backward pass of `flash` adds up dq with atomics, in no fixed order, unless
`torch.use_deterministic_algorithms(True)` is set; `flex` has no atomics; `sdpa` on a CPU is exact for a thread count.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MODES = ("auto", "sdpa", "flash", "flex")
MAX_FLASH_HEAD_DIM = 256


def attention(q: Tensor, k: Tensor, v: Tensor, *, window: int = -1, doc_ids: Tensor | None = None,
              mode: str = "auto", block_mask: Any = None) -> Tensor:
    """Softmax attention, scaled by 1/sqrt(D); returns (B, Tq, H, D) in q's dtype.

    q: (B, Tq, H, D); k, v: (B, Tk, Hkv, D) with H a multiple of Hkv (query head h reads kv head h // (H / Hkv)).
    The queries are the last Tq of the Tk positions: Tk > Tq continues from a cache.
    window: how many tokens before itself a query sees; -1 is all of them.
    doc_ids: (B, T) integers, equal inside a document; needs Tq == Tk.
    mode: one of MODES. block_mask: what `make_block_mask` gave for this window and these documents, for `flex`; made
    here if absent. Raises ValueError for shapes or modes that do not go together.
    """
    Tq, Tk = q.size(1), k.size(1)
    if Tk < Tq or q.size(2) % k.size(2):
        raise ValueError(f"attention: queries {tuple(q.shape)} do not fit keys {tuple(k.shape)}: "
                         "expected Tk >= Tq and H a multiple of Hkv")
    if doc_ids is not None and Tq != Tk:
        raise ValueError(f"attention: doc_ids need as many keys as queries, got {Tk} and {Tq}; "
                         "leave doc_ids out when decoding from a cache")
    if window >= Tk - 1:
        window = -1
    if mode == "auto":
        mode = _pick_mode(q, k, window, masked_docs=doc_ids is not None or block_mask is not None)
    if mode == "sdpa":
        return _sdpa(q, k, v, window, doc_ids)
    if mode == "flash":
        return _flash(q, k, v, window, doc_ids)
    if mode == "flex":
        return _flex(q, k, v, window, doc_ids, block_mask)
    raise ValueError(f"attention mode: got {mode!r}, expected one of {', '.join(MODES)}")


def _pick_mode(q: Tensor, k: Tensor, window: int, *, masked_docs: bool) -> str:
    """What `auto` means for these tensors; see the module docstring."""
    if not q.is_cuda:
        return "sdpa"
    if masked_docs:
        return "flex"
    fits_flash = q.dtype in (torch.bfloat16, torch.float16) and q.size(3) <= MAX_FLASH_HEAD_DIM and q.size(3) % 8 == 0
    return "flash" if window >= 0 and q.size(1) == k.size(1) and fits_flash else "sdpa"


# ---- sdpa -----------------------------------------------------------------------------------------------------------

def _sdpa(q: Tensor, k: Tensor, v: Tensor, window: int, doc_ids: Tensor | None) -> Tensor:
    Tq = q.size(1)
    if window >= 0 and k.size(1) > window + Tq:  # keys before the first query's window: nobody looks at them
        k, v = k[:, -(window + Tq):], v[:, -(window + Tq):]
    Tk = k.size(1)
    mask = None
    is_causal = doc_ids is None and window < 0 and Tq == Tk > 1
    if doc_ids is not None:
        mask = _band(Tq, Tk, window, q.device) & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    elif not is_causal and Tq > 1:  # a single query sees every key that is left
        mask = _band(Tq, Tk, window, q.device)
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
                                       is_causal=is_causal, enable_gqa=q.size(2) != k.size(2))
    return y.transpose(1, 2)


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

def _flash(q: Tensor, k: Tensor, v: Tensor, window: int, doc_ids: Tensor | None) -> Tensor:
    """Rows are laid end to end and told apart by their edges, which is the only layout `varlen_attn` has."""
    from torch.nn.attention.varlen import varlen_attn  # here because it pulls in all of dynamo

    B, T, H, D = q.shape
    if doc_ids is not None or k.size(1) != T:
        raise ValueError("attention mode 'flash' knows neither doc_ids nor a cache; use 'flex' or 'sdpa'")
    edges = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
    y = varlen_attn(q.reshape(B * T, H, D), k.reshape(B * T, -1, D), v.reshape(B * T, -1, D), edges, edges, T, T,
                    window_size=(window, 0), enable_gqa=k.size(2) != H)
    assert isinstance(y, Tensor)
    return y.view(B, T, H, D)


# ---- flex -----------------------------------------------------------------------------------------------------------

def _flex(q: Tensor, k: Tensor, v: Tensor, window: int, doc_ids: Tensor | None, block_mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    if k.size(1) != q.size(1):
        raise ValueError("attention mode 'flex' has no cache; use 'sdpa' to decode")
    if block_mask is None:
        block_mask = make_block_mask(q.size(1), window, q.device, doc_ids=doc_ids)
    run = _compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    y = run(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=block_mask,
            enable_gqa=q.size(2) != k.size(2))
    return y.transpose(1, 2)


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    """FlexAttention outside a compiled model: uncompiled it would hold the whole (T, T) score matrix."""
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention)


def make_block_mask(T: int, window: int, device: torch.device, *, doc_ids: Tensor | None = None) -> Any:
    """The `BlockMask` of `flex` for rows of T tokens: cached without documents, made anew for each `doc_ids` (B, T).
    With a compiled model call this outside and hand the result in, so that no graph builds it again each step."""
    if window >= T - 1:
        window = -1
    if doc_ids is None and not torch.compiler.is_compiling():
        return _cached_block_mask(T, window, device)
    return _build_block_mask(T, window, device, doc_ids)


@functools.lru_cache(maxsize=16)
def _cached_block_mask(T: int, window: int, device: torch.device) -> Any:
    with torch.inference_mode(False):
        return _build_block_mask(T, window, device, None)


def _build_block_mask(T: int, window: int, device: torch.device, doc_ids: Tensor | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window >= 0:
            seen = seen & (query - key <= window)
        if doc_ids is not None:
            seen = seen & (doc_ids[b, query] == doc_ids[b, key])
        return seen

    B = None if doc_ids is None else doc_ids.size(0)
    return create_block_mask(visible, B=B, H=None, Q_LEN=T, KV_LEN=T, device=device)
