"""
Causal self-attention with a sliding window and grouped query heads, by whichever of PyTorch's own
kernels fits; and the cache of keys and values from which it goes on.

A query sees itself and at most `window` tokens before it. With T = 6 and window = 2:

    key      0 1 2 3 4 5
    query 0  x
          1  x x
          2  x x x
          3    x x x
          4      x x x          a window of -1 (or of T - 1 and more) is the full lower triangle
          5        x x x

Document masks keep a query inside its own document besides. `make_masks` makes them once per batch,
outside a compiled model, and one for all layers of equal window; padding is a document of its own:

    doc_ids  0 0 1 1 1 2      query 3 (document 1) sees keys 2 and 3, query 5 only itself

A model is in one of four modes:

- `causal`: no document masks. `scaled_dot_product_attention` (the `sdpa` kernel) is causal for full
  windows, and takes a boolean band for short ones. The band costs what the full square
  costs: fine on a CPU and for a few decoded tokens. On CUDA short windows take `varlen_attn`
  (`flash`) instead: the FlashAttention-2 kernels of the PyTorch wheel. They take the window as a
  number and skip the blocks outside it, in bfloat16 and float16 only.
- `sdpa_mask`: an explicit (B, 1, T, T) mask, B T^2 bytes for each window. Runs everywhere.
- `varlen`: `varlen_attn` on documents laid end to end and told apart by their edges, so that there
  is no T x T of anything. CUDA only, bfloat16 and float16 only.
- `flex`: FlexAttention with a block mask, which skips the blocks that no query sees. For CUDA; on a
  CPU it runs forward only, uncompiled: enough to be tested.

Why not `flex` for everything: it is only fast when compiled, and compiles again for odd shapes, such as
those of generation, for minutes. `flash` is an ordinary operator that torch.compile keeps in one graph.

`flash` and `sdpa` take FlashAttention-2 from PyTorch's wheel, or version 3 or 4 from a package of its own
(`activate_kernel`), which PyTorch then calls in its place.

On exactness: the backward pass of `flash` adds up dq with atomics, in no fixed order, unless
`torch.use_deterministic_algorithms(True)` is set; `flex` has no atomics; `sdpa` on a CPU is exact
for a thread count.
"""

import functools
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

MODES = ("causal", "sdpa_mask", "varlen", "flex")
PACKAGES = {  # of kernels that PyTorch's wheel lacks: how to get them
    "fa3": 'pip install "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"',
    "fa4": "pip install flash-attn-4",
}
KERNELS = ("wheel", *PACKAGES)
MAX_FLASH_HEAD_DIM = 256
SAYS_GROUPED = torch.__version__ >= "2.12"  # as versions; before, varlen_attn took fewer kv heads without a word


class DocMasks(NamedTuple):
    """What keeps the documents of a batch apart.

    same_doc: (B, T) bool, whether the token before is of the same document; never for the first of
    a row. by_window: the mask for each window: (B, 1, T, T) bool, True where seen; a BlockMask; or,
    of `varlen`, where documents begin in the B T positions, int32, with B T behind the last.
    """

    same_doc: Tensor
    by_window: dict[int, Any]


def make_masks(doc_ids: Tensor, windows: Iterable[int], *, mode: str,
               num_docs: int | None = None) -> DocMasks:
    """The masks of a batch for some windows, on the device of doc_ids: (B, T) integers, equal inside
    a document and different in all others of its row. mode: sdpa_mask, varlen or flex. num_docs: how
    many documents the rows have; without it `varlen` counts them, which waits for the device."""
    T = doc_ids.size(1)
    same_doc = F.pad(doc_ids[:, 1:] == doc_ids[:, :-1], (1, 0))
    if mode == "varlen":
        return DocMasks(same_doc, dict.fromkeys(windows, _edges(~same_doc, num_docs)))
    make = {"sdpa_mask": _doc_band, "flex": _block_mask}[mode]
    reach = {window: -1 if window >= T - 1 else window for window in windows}
    made = {window: make(doc_ids, window) for window in set(reach.values())}
    return DocMasks(same_doc, {window: made[reach[window]] for window in reach})


def attention(q: Tensor, k: Tensor, v: Tensor, *, window: int = -1, mask: Any = None) -> Tensor:
    """Softmax attention, scaled by 1/sqrt(D); returns (B, Tq, H, D) in q's dtype.

    q: (B, Tq, H, D); k, v: (B, Tk, Hkv, D) with H a multiple of Hkv (query head h reads kv head h
    // (H / Hkv)). The queries are the last Tq of the Tk positions: Tk > Tq continues from a cache.
    window: how many tokens before itself a query sees; -1 is all of them. mask: what `make_masks`
    made for this window; needs Tq == Tk.
    """
    Tq, Tk = q.size(1), k.size(1)
    assert Tk >= Tq and q.size(2) % k.size(2) == 0, (q.shape, k.shape)
    if window >= Tk - 1:
        window = -1
    if mask is not None:
        assert Tq == Tk, "document masks are not for decoding from a cache"
        if not isinstance(mask, Tensor):
            return _flex(q, k, v, mask)
        return _sdpa(q, k, v, mask) if mask.ndim == 4 else _flash(q, k, v, window, mask)
    return _flash(q, k, v, window) if _flash_fits(q, k, window) else _causal_sdpa(q, k, v, window)


def _flash_fits(q: Tensor, k: Tensor, window: int) -> bool:
    """Whether there is something to skip, and the kernel runs on such tensors."""
    if not q.is_cuda or window < 0 or q.size(1) != k.size(1):
        return False
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    return narrow and q.size(3) <= MAX_FLASH_HEAD_DIM and q.size(3) % 8 == 0


# ---- sdpa ----------------------------------------------------------------------------------------

def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    Tq = q.size(1)
    if window >= 0:  # nobody looks at the keys before the first query's window
        k, v = k[:, -(window + Tq):], v[:, -(window + Tq):]
    Tk = k.size(1)
    if Tq == 1:  # it sees all that is left
        return _sdpa(q, k, v, None)
    if window < 0 and Tq == Tk:
        return _sdpa(q, k, v, None, is_causal=True)
    return _sdpa(q, k, v, _band(Tq, Tk, window, q.device))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *,
          is_causal: bool = False) -> Tensor:
    if q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # CUDA's flash kernel takes neither, and the other fast one takes no grouped heads
        k, v = (x.repeat_interleave(q.size(2) // x.size(2), dim=2) for x in (k, v))
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
        is_causal=is_causal, enable_gqa=q.size(2) != k.size(2))
    return y.transpose(1, 2)


def _doc_band(doc_ids: Tensor, window: int) -> Tensor:
    """(B, 1, T, T) bool, True where a query may look."""
    T = doc_ids.size(1)
    same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
    return _band(T, T, window, doc_ids.device) & same


def _band(Tq: int, Tk: int, window: int, device: torch.device) -> Tensor:
    """(Tq, Tk) bool, True where a query may look."""
    queries = torch.arange(Tk - Tq, Tk, device=device)
    back = queries[:, None] - torch.arange(Tk, device=device)
    return (back >= 0) & (back <= window) if window >= 0 else back >= 0


# ---- flash ---------------------------------------------------------------------------------------

def _flash(q: Tensor, k: Tensor, v: Tensor, window: int, edges: Tensor | None = None) -> Tensor:
    """Rows, or the documents between `edges`, laid end to end: the only layout of `varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn  # here because it pulls in all of dynamo

    B, T, H, D = q.shape
    if edges is None:
        edges = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
    q, k, v = q.reshape(B * T, H, D), k.reshape(B * T, -1, D), v.reshape(B * T, -1, D)
    grouped: dict[str, Any] = {"enable_gqa": True} if k.size(1) != H and SAYS_GROUPED else {}
    y = varlen_attn(q, k, v, edges, edges, T, T, window_size=(window, 0), **grouped)
    assert isinstance(y, Tensor)
    return y.view(B, T, H, D)


def _edges(starts: Tensor, num_docs: int | None) -> Tensor:
    """(documents + 1,) int32: where each document starts in the B T positions, and B T at the end.
    A compiled model treats this length as dynamic: one graph serves any number of documents.
    starts: (B, T) bool."""
    num_docs = int(starts.sum()) if num_docs is None else num_docs
    flat = starts.flatten()
    edges = torch.nonzero_static(flat, size=num_docs + 1, fill_value=len(flat)).view(-1).int()
    torch._dynamo.mark_dynamic(edges, 0)
    return edges


def activate_kernel(kernel: str, device_type: str, *, deterministic: bool) -> None:
    """Let PyTorch take `flash` and `sdpa` from a package: one of KERNELS, for the whole process. ValueError if the
    package is missing, does not run on this GPU or, in deterministic mode, gives other bits when a backward pass is
    repeated, as FlashAttention-3 before September 2025 does with windows."""
    if device_type != "cuda":
        if kernel != "wheel":
            raise ValueError(f"--attention-kernel={kernel}: it needs a GPU; leave it out")
        return
    capability = torch.cuda.get_device_capability()
    if kernel == "wheel":
        if deterministic and capability[0] == 9:
            log.info("note: the deterministic attention kernel of PyTorch's wheel costs 6 to 9 %% of a step on this "
                     "GPU; a new run with --attention-kernel=fa3 does without (%s)", PACKAGES["fa3"])
        return
    if capability[0] not in {"fa3": (9,), "fa4": (9, 10)}[kernel]:
        raise ValueError(f"--attention-kernel={kernel}: it does not run on {torch.cuda.get_device_name()}, of compute "
                         f"capability {capability[0]}.{capability[1]}; leave it out")
    from torch.nn.attention import activate_flash_attention_impl

    try:
        activate_flash_attention_impl(kernel.upper())
    except (ImportError, RuntimeError, AttributeError) as e:
        raise ValueError(f"--attention-kernel={kernel}: its package is not installed, or too old ({e}); "
                         f"{PACKAGES[kernel]}") from e
    if deterministic and not repeats(torch.device("cuda"), torch.bfloat16):
        raise ValueError(f"--attention-kernel={kernel}: a repeated backward pass has other bits, so runs could not be "
                         f"repeated; install a newer package ({PACKAGES[kernel]}), or add --no-deterministic")


def repeats(device: torch.device, dtype: torch.dtype, times: int = 8) -> bool:
    """Whether attention, forward and backward, has the same bits each time, with short and full windows."""
    generator = torch.Generator().manual_seed(0)
    *inputs, grad = (torch.randn(4, 1024, 4, 128, generator=generator).to(device, dtype) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in inputs]
    for window in (256, -1):
        first: list[Tensor] = []
        for _ in range(times):
            y = attention(*inputs, window=window)
            results = [y, *torch.autograd.grad(y, inputs, grad)]
            first = first or results
            if not all(map(torch.equal, first, results)):
                return False
    return True


# ---- flex ----------------------------------------------------------------------------------------

_compiled: Any = functools.cache(torch.compile)


def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    if q.is_cuda and not torch.compiler.is_compiling():  # else it holds the whole (T, T) of scores
        flex_attention = _compiled(flex_attention)
    y = flex_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=block_mask,
                       enable_gqa=q.size(2) != k.size(2))
    return y.transpose(1, 2)


def _block_mask(doc_ids: Tensor, window: int) -> Any:
    """`_doc_band` as a `BlockMask`."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (doc_ids[b, query] == doc_ids[b, key])
        return seen & (query - key <= window) if window >= 0 else seen

    B, T = doc_ids.shape
    make = _compiled(create_block_mask) if doc_ids.is_cuda else create_block_mask
    return make(visible, B=B, H=None, Q_LEN=T, KV_LEN=T, device=doc_ids.device)


# ---- the cache -----------------------------------------------------------------------------------

class KVCache:
    """What a model keeps of the tokens of one generation, for `GPT.forward(kv_cache=...)`. All rows
    are at the same position.

        k[layer], v[layer]    (B, room, kv heads, head_dim); positions [0, pos) are filled
        prev_embedding        (B, 1, n_embd): what smear needs of the token before
    """

    def __init__(self, batch_size: int, seq_len: int, *, model: Any) -> None:
        """Room for batch_size rows of seq_len tokens of a `GPT`, on its device, in its type."""
        config = model.config
        shape = (config.n_layer, batch_size, seq_len, config.n_kv_head, config.head_dim)
        options = {"dtype": model.compute_dtype, "device": model.get_device()}
        self.k = torch.zeros(shape, **options)
        self.v = torch.zeros(shape, **options)
        self.prev_embedding = torch.zeros(batch_size, 1, config.n_embd, **options)
        self.seq_len = seq_len
        self.pos = 0

    def get_pos(self) -> int:
        """How many tokens it holds."""
        return self.pos

    def reset(self) -> None:
        """Forget everything."""
        self.pos = 0
        self.prev_embedding.zero_()

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (B, T, kv heads, head_dim) behind what `layer` holds; returns views of all its
        keys and values. The position moves by `advance`, once all layers are done. Raises
        ValueError when full."""
        end = self.pos + k.size(1)
        if end > self.seq_len:
            raise ValueError(f"KVCache: {end:,} tokens, room for {self.seq_len:,}; "
                             "make it with a larger seq_len")
        self.k[layer, :, self.pos:end] = k
        self.v[layer, :, self.pos:end] = v
        return self.k[layer, :, :end], self.v[layer, :, :end]

    def advance(self, num_tokens: int) -> None:
        """So many tokens were appended to every layer."""
        self.pos += num_tokens

    def prefill(self, other: "KVCache") -> None:
        """Take over what `other` holds, into an empty cache; its one row becomes every row."""
        assert self.pos == 0 and self.seq_len >= other.pos and other.k.size(1) in (1, self.k.size(1))
        self.k[:, :, :other.pos] = other.k[:, :, :other.pos]
        self.v[:, :, :other.pos] = other.v[:, :, :other.pos]
        self.prev_embedding[:] = other.prev_embedding
        self.pos = other.pos
