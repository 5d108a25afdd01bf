"""Causal self-attention with a sliding window and grouped query heads, and the cache of keys and
values for generation.

A query sees itself and at most `window` tokens before it. With T = 6 and window = 2:

    key      0 1 2 3 4 5
    query 0  x
          1  x x
          2  x x x
          3    x x x
          4      x x x          a window of -1, or of T - 1 or more, is the full lower triangle
          5        x x x

Document masks also restrict a query to its own document. `make_masks` builds them once per batch,
outside the compiled model, one for each window size. Padding is a document of its own:

    doc_ids  0 0 1 1 1 2      query 3 (document 1) sees keys 2 and 3, query 5 only itself

A model uses one of four modes:

- `causal`: no document masks. `scaled_dot_product_attention` (the `sdpa` kernel) is causal for full
  windows, and takes a boolean band for short ones. The band costs as much as the full square, which
  is fine on a CPU and for a few decoded tokens. On CUDA, short windows use `varlen_attn` (`flash`)
  instead: the FlashAttention-2 kernels of the PyTorch wheel. They take the window as a number and
  skip the blocks outside it, in bfloat16 and float16 only.
- `sdpa_mask`: an explicit (B, 1, T, T) mask, B T^2 bytes for each window. It runs everywhere.
- `varlen`: `varlen_attn` on documents laid end to end, which it separates by their edges, without
  any T x T tensor. It runs on CUDA only, in bfloat16 and float16 only.
- `flex`: FlexAttention with a block mask, which skips the blocks that no query sees. It is for
  CUDA; on a CPU only the forward pass runs, uncompiled, for tests.

Rejected: `flex` for everything. It is fast only when compiled, and compiling it for unusual shapes,
such as those of generation, takes minutes. `flash` is an ordinary operator that torch.compile keeps
in one graph.

On CUDA, `flash` and unmasked 16-bit `sdpa` use FlashAttention-2 from PyTorch's wheel.
`activate_kernel` replaces it with version 3 from a separate package. Left to itself, PyTorch would
give full windows to cuDNN on a Hopper GPU, but only without deterministic mode. So cuDNN is off
(`prepare_cuda`), the same kernel runs in both modes, and the price of determinism is not the
difference between two kernels. --attention-kernel=cudnn turns cuDNN on.

Repeatability: the backward pass of `flash` adds up dq with atomics, in no fixed order, unless
`torch.use_deterministic_algorithms(True)` is set. `flex` has no atomics. `sdpa` on a CPU gives the
same bits for the same number of threads.
"""

import functools
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:  # importing it takes a second
    from torch.nn.attention.flex_attention import BlockMask

    # `sdpa_mask`: (B, 1, T, T) bool, True where visible; `flex`: a BlockMask; `varlen`: (documents
    # + 1,) int32, the positions among the B T tokens where documents begin, then B T
    Mask: TypeAlias = Tensor | BlockMask
else:
    Mask = Any

log = logging.getLogger(__name__)

MODES = ("causal", "sdpa_mask", "varlen", "flex")
KERNELS = ("wheel", "cudnn", "fa3")
INSTALL_FA3 = 'pip install "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"'
MAX_FLASH_HEAD_DIM = 256
FLASH_DTYPES = (torch.bfloat16, torch.float16)
# older versions of varlen_attn accept grouped heads without it
NEEDS_ENABLE_GQA = torch.__version__ >= "2.12"


class DocMasks(NamedTuple):
    """The masks that separate the documents of a batch.

    same_doc: (B, T) bool, whether the previous token belongs to the same document; False for the
    first token of a row. by_window: the mask of each window size.
    """

    same_doc: Tensor
    by_window: dict[int, Mask]


def make_masks(
    doc_ids: Tensor, windows: Iterable[int], *, mode: str, num_docs: int | None = None
) -> DocMasks:
    """The masks of a batch for some window sizes, on the device of doc_ids.

    doc_ids: (B, T) integers, equal inside a document and different for each document of a row.
    mode: sdpa_mask, varlen or flex. num_docs: the number of documents in all rows; without it
    `varlen` counts them, which waits for the device.
    """
    T = doc_ids.size(1)
    same_doc = F.pad(doc_ids[:, 1:] == doc_ids[:, :-1], (1, 0))
    if mode == "varlen":
        edges: Mask = _edges(~same_doc, num_docs)
        return DocMasks(same_doc, dict.fromkeys(windows, edges))

    make: Callable[[Tensor, int], Mask] = _block_mask if mode == "flex" else _doc_band
    masks: dict[int, Mask] = {}  # by how far a query really sees: all full windows share a mask
    by_window = {}
    for window in windows:
        reach = -1 if window >= T - 1 else window
        if reach not in masks:
            masks[reach] = make(doc_ids, reach)
        by_window[window] = masks[reach]
    return DocMasks(same_doc, by_window)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int = -1, mask: Mask | None = None
) -> Tensor:
    """Softmax attention, scaled by 1/sqrt(D): (B, Tq, H, D) in q's dtype.

    q: (B, Tq, H, D); k, v: (B, Tk, Hkv, D) with H a multiple of Hkv (query head h reads kv head h
    // (H / Hkv)). The queries are the last Tq of the Tk positions: Tk > Tq continues from a cache.
    window: how many earlier tokens a query sees, -1 for all. mask: the mask from `make_masks` for
    this window; requires Tq == Tk.
    """
    Tq, Tk = q.size(1), k.size(1)
    assert Tk >= Tq and q.size(2) % k.size(2) == 0, (q.shape, k.shape)
    if window >= Tk - 1:
        window = -1
    if mask is not None:
        assert Tq == Tk, "document masks are not for decoding from a cache"
        if not isinstance(mask, Tensor):
            return _flex(q, k, v, mask)
        if mask.ndim == 4:
            return _sdpa(q, k, v, mask)
        return _flash(q, k, v, window, mask)
    if _flash_fits(q, k, window):
        return _flash(q, k, v, window)
    return _causal_sdpa(q, k, v, window)


def _flash_fits(q: Tensor, k: Tensor, window: int) -> bool:
    """Whether the window lets the kernel skip blocks and the kernel accepts these tensors."""
    is_training_window = q.is_cuda and window >= 0 and q.size(1) == k.size(1)
    head_dim = q.size(3)
    head_fits = head_dim <= MAX_FLASH_HEAD_DIM and head_dim % 8 == 0
    return is_training_window and head_fits and q.dtype in FLASH_DTYPES


# ---- sdpa ----------------------------------------------------------------------------------------


def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    Tq = q.size(1)
    if window >= 0:  # drop the keys before the first query's window
        k = k[:, -(window + Tq) :]
        v = v[:, -(window + Tq) :]
    Tk = k.size(1)
    if Tq == 1:  # the query sees all remaining keys
        return _sdpa(q, k, v, None)
    if window < 0 and Tq == Tk:
        return _sdpa(q, k, v, None, is_causal=True)
    return _sdpa(q, k, v, _band(Tq, Tk, window, q.device))


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool = False
) -> Tensor:
    if q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # CUDA's flash kernel accepts neither masks nor float32, and the other fast kernel rejects
        # grouped heads
        queries_per_head = q.size(2) // k.size(2)
        k = k.repeat_interleave(queries_per_head, dim=2)
        v = v.repeat_interleave(queries_per_head, dim=2)
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=q.size(2) != k.size(2),
    )
    return y.transpose(1, 2)


def _doc_band(doc_ids: Tensor, window: int) -> Tensor:
    """(B, 1, T, T) bool, True where a query sees a key of its own document."""
    T = doc_ids.size(1)
    same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
    return _band(T, T, window, doc_ids.device) & same


def _band(Tq: int, Tk: int, window: int, device: torch.device) -> Tensor:
    """(Tq, Tk) bool, True where a query sees a key."""
    queries = torch.arange(Tk - Tq, Tk, device=device)
    distance = queries[:, None] - torch.arange(Tk, device=device)
    if window < 0:
        return distance >= 0
    return (distance >= 0) & (distance <= window)


# ---- flash ---------------------------------------------------------------------------------------


def _flash(q: Tensor, k: Tensor, v: Tensor, window: int, edges: Tensor | None = None) -> Tensor:
    """Apply `varlen_attn` to rows, or to the documents between `edges`.

    It needs sequences laid end to end.
    """
    from torch.nn.attention.varlen import varlen_attn  # lazy: it imports all of dynamo

    B, T, H, D = q.shape
    if edges is None:
        edges = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
    q = q.reshape(B * T, H, D)
    k = k.reshape(B * T, -1, D)
    v = v.reshape(B * T, -1, D)
    grouped: dict[str, Any] = {}
    if k.size(1) != H and NEEDS_ENABLE_GQA:
        grouped["enable_gqa"] = True
    y = varlen_attn(q, k, v, edges, edges, T, T, window_size=(window, 0), **grouped)
    assert isinstance(y, Tensor)
    return y.view(B, T, H, D)


def _edges(starts: Tensor, num_docs: int | None) -> Tensor:
    """(documents + 1,) int32: where each document starts among the B T tokens, then B T.

    starts: (B, T) bool. A compiled model treats this length as dynamic, so one graph serves any
    number of documents.
    """
    if num_docs is None:
        num_docs = int(starts.sum())
    flat = starts.flatten()
    edges = torch.nonzero_static(flat, size=num_docs + 1, fill_value=len(flat)).view(-1).int()
    torch._dynamo.mark_dynamic(edges, 0)
    return edges


def check_mode(mode: str, device_type: str, dtype: torch.dtype, head_dim: int) -> None:
    """ValueError if this mode's kernels do not accept the device, compute dtype or head dimension."""
    if mode not in ("varlen", "flex"):
        return
    if device_type != "cuda":
        raise ValueError(
            f"--attention-mode={mode}: its kernels need a GPU with CUDA; use "
            f"--attention-mode=sdpa_mask on {'a CPU' if device_type == 'cpu' else device_type}"
        )
    if mode == "flex":
        return
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise ValueError(
            f"--attention-mode=varlen: its kernel needs compute capability 8.0 or higher, but "
            f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}; use "
            f"--attention-mode=sdpa_mask"
        )
    if dtype not in FLASH_DTYPES:
        raise ValueError(
            f"--attention-mode=varlen: its kernel computes in 16 bits only, but --dtype is "
            f"{str(dtype).removeprefix('torch.')}; use --attention-mode=flex or sdpa_mask, or "
            f"--dtype=bfloat16"
        )
    if head_dim > MAX_FLASH_HEAD_DIM or head_dim % 8:
        raise ValueError(
            f"--head-dim={head_dim}: the kernel of --attention-mode=varlen needs a multiple of 8 that is "
            f"at most {MAX_FLASH_HEAD_DIM}; use another one, or --attention-mode=flex or sdpa_mask"
        )


def activate_kernel(kernel: str, device_type: str, *, deterministic: bool) -> None:
    """Select the implementation of `flash` and `sdpa`, one of KERNELS, for the whole process.

    `cudnn` is for full windows alone. ValueError if its package is missing, if it does not run on
    this GPU or, in deterministic mode, if repeated backward passes give different bits (as with
    windows in FlashAttention-3 before September 2025).
    """
    if device_type != "cuda":
        if kernel != "wheel":
            raise ValueError(f"--attention-kernel={kernel}: this kernel needs a GPU; omit the flag")
        return
    torch.backends.cuda.enable_cudnn_sdp(kernel == "cudnn")
    if kernel == "cudnn":
        if deterministic:
            raise ValueError(
                "--attention-kernel=cudnn: this kernel is not deterministic; add --no-deterministic, or "
                "omit the flag"
            )
        if not prefers_cudnn():
            raise ValueError(
                f"--attention-kernel=cudnn: PyTorch does not choose this kernel on "
                f"{torch.cuda.get_device_name()} with cuDNN {torch.backends.cudnn.version()}; omit the "
                f"flag"
            )
        return
    capability = torch.cuda.get_device_capability()
    if kernel == "wheel":
        if deterministic and capability[0] == 9:
            log.info(
                "note: the deterministic attention kernel of PyTorch's wheel is slow on this GPU: we estimate "
                "that --attention-kernel=fa3 in a new run saves 6 to 9 %% of a step (%s)",
                INSTALL_FA3,
            )
        return
    if capability[0] != 9:
        raise ValueError(
            f"--attention-kernel=fa3: this kernel does not run on {torch.cuda.get_device_name()} "
            f"(compute capability {capability[0]}.{capability[1]}); omit the flag"
        )
    from torch.nn.attention import activate_flash_attention_impl

    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, AttributeError) as e:
        raise ValueError(
            f"--attention-kernel=fa3: its package is missing or too old ({e}); run {INSTALL_FA3}"
        ) from e
    if deterministic and not repeats(torch.device("cuda"), torch.bfloat16):
        raise ValueError(
            f"--attention-kernel=fa3: repeated backward passes give different bits, so runs are "
            f"not reproducible; install a newer package ({INSTALL_FA3}) or add --no-deterministic"
        )


def prefers_cudnn() -> bool:
    """Whether PyTorch chooses cuDNN for full windows now."""
    from torch.nn.attention import SDPBackend

    q = torch.empty(1, 1, 128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    return torch._fused_sdp_choice(q, q, q, is_causal=True) == SDPBackend.CUDNN_ATTENTION.value


def repeats(device: torch.device, dtype: torch.dtype, times: int = 8) -> bool:
    """Whether repeated forward and backward passes of attention return equal bits.

    Measured with short and full windows.
    """
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(4, 1024, 4, 128, generator=generator).to(device, dtype)

    inputs = [draw().requires_grad_() for _ in range(3)]
    grad = draw()
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


def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: "BlockMask") -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    if q.is_cuda and not torch.compiler.is_compiling():  # eager code would store all (T, T) scores
        flex_attention = _compiled(flex_attention)
    y = flex_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=block_mask,
        enable_gqa=q.size(2) != k.size(2),
    )
    return y.transpose(1, 2)


def _block_mask(doc_ids: Tensor, window: int) -> "BlockMask":
    """`_doc_band` as a `BlockMask`."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (query >= key) & (doc_ids[b, query] == doc_ids[b, key])
        if window < 0:
            return same
        return same & (query - key <= window)

    B, T = doc_ids.shape
    make = _compiled(create_block_mask) if doc_ids.is_cuda else create_block_mask
    return make(visible, B=B, H=None, Q_LEN=T, KV_LEN=T, device=doc_ids.device)


# ---- the cache -----------------------------------------------------------------------------------


class Cacheable(Protocol):
    """What a cache needs of a model (`nanochat.gpt.GPT`)."""

    @property
    def config(self) -> Any: ...  # a `GPTConfig`
    @property
    def compute_dtype(self) -> torch.dtype: ...
    def get_device(self) -> torch.device: ...


class KVCache:
    """The keys and values of the tokens so far, for `GPT.forward(kv_cache=...)`.

    All rows have the same position.

    k[layer], v[layer]    (B, seq_len, kv heads, head_dim); positions [0, pos) are filled
    prev_embedding        (B, 1, n_embd): the embedding of the previous token, for smear
    """

    def __init__(self, batch_size: int, seq_len: int, *, model: Cacheable) -> None:
        """Allocate batch_size rows of seq_len tokens on the model's device, in its compute dtype."""
        config = model.config
        shape = (config.n_layer, batch_size, seq_len, config.n_kv_head, config.head_dim)
        options: dict[str, Any] = {"dtype": model.compute_dtype, "device": model.get_device()}
        self.k = torch.zeros(shape, **options)
        self.v = torch.zeros(shape, **options)
        self.prev_embedding = torch.zeros(batch_size, 1, config.n_embd, **options)
        self.seq_len = seq_len
        self.pos = 0

    def get_pos(self) -> int:
        """The number of tokens in the cache."""
        return self.pos

    def reset(self) -> None:
        """Empty the cache."""
        self.pos = 0
        self.prev_embedding.zero_()

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values to a layer, and return views of all that it has.

        k, v: (B, T, kv heads, head_dim). Call `advance` after the last layer. ValueError if they do
        not fit.
        """
        end = self.pos + k.size(1)
        if end > self.seq_len:
            raise ValueError(
                f"KVCache: {end:,} tokens do not fit into {self.seq_len:,}; create it with a larger "
                f"seq_len"
            )
        self.k[layer, :, self.pos : end] = k
        self.v[layer, :, self.pos : end] = v
        return self.k[layer, :, :end], self.v[layer, :, :end]

    def advance(self, num_tokens: int) -> None:
        """Advance the position after `num_tokens` tokens have been appended to every layer."""
        self.pos += num_tokens

    def prefill(self, other: "KVCache") -> None:
        """Copy another cache into this empty one.

        If the other has one row, every row becomes a copy of it.
        """
        assert self.pos == 0 and self.seq_len >= other.pos
        assert other.k.size(1) in (1, self.k.size(1))
        self.k[:, :, : other.pos] = other.k[:, :, : other.pos]
        self.v[:, :, : other.pos] = other.v[:, :, : other.pos]
        self.prev_embedding[:] = other.prev_embedding
        self.pos = other.pos
