"""Kernels of attention: which one is called, with what, and which are refused."""

import contextlib
import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from nanochat import attention as attention_module
from nanochat import start_run
from nanochat.attention import attention, make_masks
from nanochat.config import Settings
from tests.spec.test_attention import activate, assert_equals_oracle, make, oracle

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def varlen_on_a_cpu(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa=False
):
    """The kernel exists on CUDA only; this stand-in does what its documentation says."""
    assert window_size[1] == 0 and torch.equal(cu_seq_q, cu_seq_k) and cu_seq_q.dtype == torch.int32
    assert max_q == max_k >= int(cu_seq_q.diff().max()) and cu_seq_q[-1] == len(query)
    assert enable_gqa == (key.size(1) != query.size(1) and attention_module.NEEDS_ENABLE_GQA)
    parts = [
        oracle(*(t[None, a:b] for t in (query, key, value)), window_size[0])[0]
        for a, b in itertools.pairwise(cu_seq_q.tolist())
    ]
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("heads", "needs_enable_gqa"), [((4, 2), True), ((4, 2), False), ((3, 3), True)]
)
@pytest.mark.parametrize("window", [-1, 0, 4])
def test_flash_passes_equivalent_rows_edges_and_window_to_varlen_attn(
    monkeypatch, window, heads, needs_enable_gqa
):
    """It does not pass `enable_gqa` to PyTorch 2.11, which lacks it, or if queries have as many
    heads as keys."""
    fake = types.SimpleNamespace(varlen_attn=varlen_on_a_cpu)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", fake)
    monkeypatch.setattr(attention_module, "NEEDS_ENABLE_GQA", needs_enable_gqa)
    q, k, v, documents = make(0, 3, 13, *heads, 8)
    assert_equals_oracle(attention_module._flash(q, k, v, window), oracle(q, k, v, window))
    counted = int(documents.diff(dim=1).sum()) + 3
    for num_docs in (None, counted):
        mask = make_masks(documents, [window], mode="varlen", num_docs=num_docs).by_window[window]
        assert len(mask) == counted + 1
        assert_equals_oracle(
            attention(q, k, v, window=window, mask=mask), oracle(q, k, v, window, documents)
        )


@pytest.mark.parametrize(
    ("dtype", "masked", "heads"),
    [(torch.bfloat16, False, 2), (torch.bfloat16, True, 4), (torch.float32, False, 4)],
)
def test_on_cuda_sdpa_gets_heads_that_a_fast_kernel_accepts(monkeypatch, dtype, masked, heads):
    """Grouped heads for flash, which accepts neither masks nor float32; otherwise as many heads as
    queries have."""
    calls = []
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, **options: calls.append((k, v)) or q
    )
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 7, H, 8, dtype=dtype, device="cuda") for H in (4, 2, 2))
        attention_module._sdpa(q, k, v, torch.ones(7, 7, dtype=torch.bool) if masked else None)
    assert [t.size(1) for t in calls[0]] == [heads, heads]


def test_cuda_uses_flash_only_for_tensors_that_its_kernel_accepts():
    def fits(*, dtype=torch.bfloat16, T=64, D=128, window=8):
        q, k = (
            types.SimpleNamespace(is_cuda=True, dtype=dtype, size=(2, n, 4, D).__getitem__)
            for n in (T, 64)
        )
        return attention_module._flash_fits(q, k, window)

    assert fits()
    assert not any([fits(window=-1), fits(dtype=torch.float32), fits(T=1), fits(D=12), fits(D=512)])


@pytest.fixture
def hopper(monkeypatch):
    """A fake GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "some GPU")


@pytest.fixture
def activated(hopper, monkeypatch):
    """The list of activated kernels, whose packages need not be installed."""
    kernels = []
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", kernels.append)
    monkeypatch.setattr(attention_module, "repeats", lambda *_: True)
    return kernels


def test_another_attention_kernel_must_reproduce_its_bits(activated, monkeypatch):
    activate("wheel", "cpu")
    activate("fa3")
    monkeypatch.setattr(attention_module, "repeats", lambda *_: False)
    with pytest.raises(
        ValueError, match=r"--attention-kernel=fa3: repeated backward .*newer.*--no-deterministic"
    ):
        activate("fa3")
    activate("fa3", deterministic=False)
    assert activated == ["FA3", "FA3", "FA3"]


@pytest.mark.parametrize(
    ("mode", "device_type", "capability", "changed", "message"),
    [
        (
            "varlen",
            "cuda",
            (9, 0),
            {"dtype": "float32"},
            "computes in 16 bits only, but --dtype is float32; use",
        ),
        (
            "varlen",
            "cuda",
            (7, 0),
            {},
            r"capability 8\.0 or higher, but some GPU has 7\.0; use --attention-mode=sdpa_mask",
        ),
        ("varlen", "cuda", (7, 5), {"dtype": "bfloat16"}, r"but some GPU has 7\.5"),
        (
            "causal",
            "cuda",
            (7, 5),
            {"dtype": "bfloat16"},
            "--dtype=bfloat16: needs .*some GPU does not have; remove it",
        ),
        (
            "varlen",
            "cuda",
            (9, 0),
            {"head_dim": 12},
            "--head-dim=12: .*multiple of 8 that is at most 256",
        ),
        (
            "varlen",
            "mps",
            (0, 0),
            {},
            "need a GPU with CUDA; use --attention-mode=sdpa_mask on mps",
        ),
        (
            "flex",
            "cpu",
            (0, 0),
            {},
            "need a GPU with CUDA; use --attention-mode=sdpa_mask on a CPU",
        ),
        ("flex", "cuda", (7, 0), {"dtype": "float32"}, None),
        ("sdpa_mask", "cuda", (7, 0), {"dtype": "float32"}, None),
        ("varlen", "cuda", (8, 0), {}, None),
    ],
)
def test_a_mode_whose_kernel_cannot_run_is_refused_before_the_run_exists(
    hopper, monkeypatch, mode, device_type, capability, changed, message
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(start_run, "find_tokenizer", lambda *_: RunsTokenizer())
    flags = Settings(vocab_size=320, attention_mode=mode, **changed)
    expected = (
        contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message)
    )
    with expected:
        start_run.complete_settings(flags, 1, device_type)


class RunsTokenizer:
    """Enough of a tokenizer for a command."""

    fingerprint = "none"

    def encode(self, text):
        return []

    def get_vocab_size(self):
        return 320


def test_cudnn_attention_is_on_only_where_it_is_asked_for(activated, monkeypatch):
    """Regression: without determinism, a Hopper GPU used cuDNN for full windows, whatever
    --attention-kernel said."""
    monkeypatch.setattr(attention_module, "prefers_cudnn", lambda: True)
    for kernel, is_on in (("wheel", False), ("cudnn", True), ("fa3", False)):
        torch.backends.cuda.enable_cudnn_sdp(not is_on)
        activate(kernel, deterministic=False)
        assert torch.backends.cuda.cudnn_sdp_enabled() == is_on


@pytest.mark.parametrize(
    ("deterministic", "prefers", "message"),
    [
        (True, True, "this kernel is not deterministic; add --no-deterministic"),
        (False, False, "PyTorch does not choose this kernel on some GPU with cuDNN"),
    ],
)
def test_cudnn_attention_is_refused_where_it_would_not_run(
    hopper, monkeypatch, deterministic, prefers, message
):
    monkeypatch.setattr(attention_module, "prefers_cudnn", lambda: prefers)
    with pytest.raises(ValueError, match=f"--attention-kernel=cudnn: {message}"):
        activate("cudnn", deterministic=deterministic)


def test_a_note_states_the_cost_of_the_wheels_deterministic_kernel_on_hopper(activated, caplog):
    caplog.set_level("INFO")
    activate("wheel", deterministic=False)
    assert not caplog.text
    activate("wheel")
    assert len(caplog.records) == 1 and "6 to 9 % of a step" in caplog.text and activated == []


def test_repeats_detects_changing_bits(monkeypatch):
    device, noise = torch.device("cpu"), iter(range(100))
    assert attention_module.repeats(device, torch.float32, times=2)
    monkeypatch.setattr(
        attention_module, "attention", lambda q, k, v, **_: q * k + v + 1e-3 * next(noise)
    )
    assert not attention_module.repeats(device, torch.float32, times=2)
