"""Attention equals a softmax written out in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import attention as attention_module
from nanochat.attention import attention, make_masks
from tests.toy import assert_same_sums, examples

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def oracle(q, k, v, window=-1, doc_ids=None):
    """Softmax over each query's visible keys, one query at a time, in float64."""
    B, Tq, H, D = q.shape
    Tk, group = k.size(1), H // k.size(2)
    y = torch.zeros(B, Tq, H, D, dtype=torch.float64)
    ids = None if doc_ids is None else doc_ids.tolist()
    for b in range(B):
        for h in range(H):
            for i in range(Tq):
                at = Tk - Tq + i
                keys = [
                    j
                    for j in range(at + 1)
                    if (window < 0 or at - j <= window) and (ids is None or ids[b][j] == ids[b][at])
                ]
                scores = k[b, keys, h // group].double() @ q[b, i, h].double() / D**0.5
                y[b, i, h] = torch.softmax(scores, 0) @ v[b, keys, h // group].double()
    return y


def make(seed, B, Tq, H, Hkv, D, Tk=None, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    Tk = Tk or Tq
    shapes = (B, Tq, H, D), (B, Tk, Hkv, D), (B, Tk, Hkv, D)
    q, k, v = (torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes)
    documents = (torch.rand(B, Tq, generator=rng) < 0.2).cumsum(1).int()
    return q, k, v, documents


def mask_of(doc_ids, window, mode="sdpa_mask"):
    return None if doc_ids is None else make_masks(doc_ids, [window], mode=mode).by_window[window]


def assert_equals_oracle(y, expected):
    # a dot product of at most 8, a mean over at most all keys
    assert_same_sums(y, expected, terms=8 + y.size(1))


@given(
    st.integers(0, 10**6),
    st.integers(1, 2),
    st.integers(1, 20),
    st.sampled_from([(1, 1), (4, 2), (3, 1), (2, 2)]),
    st.sampled_from([2, 8]),
    st.integers(-1, 22),
    st.sampled_from(["masked", "plain", "decoding"]),
    st.data(),
)
@settings(max_examples=examples(0.8))
def test_sdpa_equals_the_written_out_softmax(seed, B, T, heads, D, window, case, data):
    """When decoding, the queries are the last of the keys' positions."""
    more = data.draw(st.integers(1, 20)) if case == "decoding" else 0
    q, k, v, documents = make(seed, B, T, *heads, D, Tk=T + more)
    doc_ids = documents if case == "masked" else None
    y = attention(q, k, v, window=window, mask=mask_of(doc_ids, window))
    assert_equals_oracle(y, oracle(q, k, v, window, doc_ids))


@pytest.mark.parametrize(
    "T, heads, window", [(37, (4, 2), 5), (20, (2, 2), -1), (150, (2, 1), 129), (9, (3, 1), 0)]
)
def test_flex_equals_the_written_out_softmax(T, heads, window):
    q, k, v, documents = make(T, 2, T, *heads, 8)
    assert documents.unique().numel() > 1
    for doc_ids in (documents, torch.zeros_like(documents)):
        y = attention(q, k, v, mask=mask_of(doc_ids, window, "flex"))
        assert_equals_oracle(y, oracle(q, k, v, window, doc_ids))


@pytest.mark.parametrize("mode", ["sdpa_mask", "flex"])
def test_equivalent_windows_share_a_mask(mode):
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
    same_doc, by_window = make_masks(doc_ids, [3, -1, 7, 100, 3], mode=mode)
    assert same_doc.tolist() == [[False, True, True, False, True, False, True, True]]
    assert by_window.keys() == {3, -1, 7, 100}
    assert by_window[-1] is by_window[7] is by_window[100] is not by_window[3]


@pytest.fixture
def hopper(monkeypatch):
    """A fake GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "some GPU")


def activate(kernel, device_type="cuda", deterministic=True):
    attention_module.activate_kernel(kernel, device_type, deterministic=deterministic)


@pytest.mark.parametrize(
    ("kernel", "device_type", "major", "message"),
    [
        ("fa3", "cpu", 9, "fa3: this kernel needs a GPU"),
        # PyTorch's own error
        ("fa3", "cuda", 9, "fa3: its package is missing or too old .*subdirectory=hopper"),
        ("fa3", "cuda", 8, r"fa3: this kernel does not run on some GPU \(compute capability 8.0\)"),
    ],
)
def test_an_unusable_attention_kernel_is_refused(
    hopper, monkeypatch, kernel, device_type, major, message
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))
    with pytest.raises(ValueError, match=f"--attention-kernel={message}"):
        activate(kernel, device_type)
