"""The model: shapes, initial values, documents, learning, compilation, memory, parameter groups."""

import itertools
import shutil
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from nanochat import gpt, optim
from nanochat.gpt import GPT, Embedding, GPTConfig, initial_weight
from tests.models import SMALL, build, shake, tokens
from tests.toy import assert_same_sums, if_a_fork_changed
from tests.training import as_bytes


def loss_and_gradients(model, x, y, **kwargs):
    loss = model(x, y, **kwargs)
    loss.sum().backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


# ---- shape ---------------------------------------------------------------------------------------


def test_from_depth_sets_the_shape():
    config = GPTConfig.from_depth(24, vocab_size=32768, sequence_len=2048)
    assert (config.n_layer, config.n_embd, config.n_head, config.n_kv_head) == (24, 1536, 12, 12)
    rounded = GPTConfig.from_depth(5, vocab_size=300, sequence_len=64, window_pattern="L")
    assert (rounded.n_embd, rounded.n_head, rounded.n_kv_head, rounded.window_pattern) == (
        384,
        3,
        3,
        "L",
    )
    assert (
        GPTConfig.from_depth(2, vocab_size=9, sequence_len=8, aspect_ratio=5, head_dim=4).n_embd
        == 12
    )


@pytest.mark.parametrize(
    ("n_layer", "sequence_len", "pattern", "expected"),
    [
        (6, 2048, "SSSL", [512, 512, 512, 2048, 512, 2048]),
        (3, 2049, "S", [640, 640, 2049]),
        (2, 4, "LS", [4, 4]),
        (2, 100, "S", [128, 100]),
    ],
)  # a whole tile, as nanochat's
def test_windows_tile_the_pattern_and_the_last_is_long(n_layer, sequence_len, pattern, expected):
    config = GPTConfig(n_layer=n_layer, sequence_len=sequence_len, window_pattern=pattern)
    assert config.window_sizes == expected


# ---- initial weights -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("transformer.wte.weight", 0.8),
        ("lm_head.weight", 0.001),
        ("transformer.h.0.attn.c_q.weight", 1 / 16),
        ("value_embeds.2.weight", 1 / 16),
        ("transformer.h.0.mlp.c_fc.weight", 0.4 / 16),
    ],
)
def test_initial_weights_have_their_standard_deviation(name, std):
    weight = initial_weight(name, torch.Size((2048, 256)), seed=1, n_embd=256)
    assert weight.std().item() == pytest.approx(std, rel=0.01)


def test_initial_scalars_and_gates():
    model = build()
    assert model.resid_lambdas.tolist() == pytest.approx([1.15, 1.125, 1.1, 1.075, 1.05])
    assert model.x0_lambdas.tolist() == pytest.approx([0.2, 0.1625, 0.125, 0.0875, 0.05])
    assert (model.smear_lambda.item(), model.backout_lambda.item()) == pytest.approx((0, 0.2))
    gates = model.get_parameter("transformer.h.0.attn.ve_gate.weight")
    assert 0 <= gates.min() < gates.max() <= 0.02
    assert not any(p.any() for n, p in model.named_parameters() if n.endswith("c_proj.weight"))


def test_embeddings_have_the_compute_dtype_and_masters_stay_float32():
    model = build(dtype=torch.bfloat16)
    assert model.compute_dtype == torch.bfloat16 == model.cos.dtype
    assert {n for n, p in model.named_parameters() if p.dtype != torch.float32} == {
        "transformer.wte.weight",
        *(f"value_embeds.{i}.weight" for i in (0, 2, 4)),
    }
    drawn = initial_weight("transformer.wte.weight", torch.Size((128, 32)), seed=0, n_embd=32)
    assert torch.equal(model.get_parameter("transformer.wte.weight"), drawn.bfloat16()), (
        "rounded once"
    )
    x = tokens(2, 40)
    in_bf16 = shake(model)(x)
    assert in_bf16.dtype == torch.float32 and in_bf16.isfinite().all()
    model.set_compute_dtype(torch.float32)
    assert model.compute_dtype == torch.float32 == model.cos.dtype
    difference = (model(x) - in_bf16).abs()
    assert 0 < difference.mean() < 0.3 and model(x).std() > 1


# ---- documents -----------------------------------------------------------------------------------

T_DOCS = 200
# of the documents in two rows; the last one is padding
EDGES = [[0, 150, 151, 160, 200], [0, 40, 190, 200]]


def documents():
    """(inputs, targets, doc_ids), each (2, T). Padding has its own document id and no targets."""
    x, y = tokens(2, T_DOCS), tokens(2, T_DOCS, seed=1)
    lengths = [torch.tensor(edges).diff() for edges in EDGES]
    doc_ids = torch.stack([torch.repeat_interleave(torch.arange(len(n)), n) for n in lengths]).int()
    for row, edges in enumerate(EDGES):
        x[row, edges[-2] :], y[row, edges[-2] :] = 0, -100
    return x, y, doc_ids


def docs_model(pattern, mode, n_layer=4):
    config = replace(SMALL, sequence_len=T_DOCS, n_layer=n_layer, window_pattern=pattern)
    return shake(build(config, attention_mode=mode))


# a short window is 128, less than the document of 150
@pytest.mark.parametrize("pattern", ["SSL", "L"])
@pytest.mark.parametrize("mode", ["sdpa_mask", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_with_masks_each_token_has_the_loss_of_its_document_alone(pattern, mode):
    model = docs_model(pattern, mode).requires_grad_(False)
    x, y, doc_ids = documents()
    together = model(x, y, masks=model.masks(doc_ids), loss_reduction="none")
    expected = torch.stack(
        [
            torch.cat(
                [
                    model(x[row : row + 1, a:b], y[row : row + 1, a:b], loss_reduction="none")[0]
                    for a, b in itertools.pairwise(edges)
                ]
            )
            for row, edges in enumerate(EDGES)
        ]
    )
    torch.testing.assert_close(together, expected, atol=2e-3, rtol=0)
    assert (
        (y == -100).sum() == 50 and not together[y == -100].any() and (expected[y >= 0] > 0).all()
    )
    without = model(x, y, loss_reduction="none")  # without masks, documents mix
    assert (without - expected)[0, :150].abs().max() < 2e-3 < 1 < (without - expected).abs().max()


def test_attention_modes():
    assert build().attention_mode == "causal" and build().masks(
        documents()[2]
    ) is None is build().masks(None)
    with pytest.raises(ValueError, match="--attention-mode varlen: the batch has no doc_ids"):
        build(attention_mode="varlen").masks(None)
    with pytest.raises(
        ValueError, match=r"--attention-mode: got 'auto', expected one of causal, .*, flex"
    ):
        GPT(SMALL, attention_mode="auto")


# ---- z-loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [8192, 16])
def test_z_loss_changes_gradients_and_not_the_loss(reduction, chunk):
    config = GPTConfig.from_depth(1, vocab_size=96, sequence_len=16, aspect_ratio=24, head_dim=12)
    tokens = torch.randint(96, (3, 17), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].masked_fill(tokens[:, 1:] < 20, -100)
    results = []
    for z_loss in (0.0, 0.1):
        model = GPT(config, z_loss=z_loss)
        model.init_weights(seed=1, compute_dtype=torch.float32)
        torch.nn.init.normal_(
            model.lm_head.weight, std=0.1, generator=torch.Generator().manual_seed(2)
        )
        with mock.patch("nanochat.gpt.LOSS_CHUNK", chunk):
            loss = model(tokens[:, :-1], targets, loss_reduction=reduction)
            loss.sum().backward()
        results.append((loss.detach(), model.lm_head.weight.grad))
    (plain, before), (with_z_loss, after) = results
    assert torch.equal(plain, with_z_loss)
    logits = model(tokens[:, :-1])
    z = (
        0.1
        * logits.logsumexp(-1).square()[targets >= 0].sum()
        / (1 if reduction != "mean" else (targets >= 0).sum())
    )
    model.zero_grad()
    z.backward()
    assert before is not None and after is not None and model.lm_head.weight.grad is not None
    torch.testing.assert_close(after - before, model.lm_head.weight.grad, rtol=1e-3, atol=1e-5)


# ---- learning ------------------------------------------------------------------------------------


def test_the_model_overfits_one_batch_and_every_parameter_has_a_gradient():
    model = build(replace(SMALL, n_layer=3), seed=3)
    x, y = tokens(2, 24, seed=1), tokens(2, 24, seed=2)
    optimizer = model.setup_optimizer(embedding_lr=0.1)
    first = model(x, y).item()
    for step in range(60):
        loss = model(x, y)
        loss.backward()
        if step == 3:  # at first, zero matrices block some gradients
            assert all(p.grad.any() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert first == pytest.approx(torch.tensor(70.0).log().item(), abs=0.05)
    assert model(x, y).item() < 0.05


@pytest.mark.parametrize("mode", ["causal", "sdpa_mask", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_compiled_forward_is_one_graph_for_all_masks(mode):
    """Also with activation checkpointing (in causal mode here)."""
    from torch._dynamo.testing import CompileCounter  # takes half a second

    counter = CompileCounter()
    model, (x, y, doc_ids) = docs_model("SSL", mode, n_layer=2), documents()
    model.activation_checkpointing = mode == "causal"
    model.requires_grad_(model.activation_checkpointing)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for ids in (doc_ids, doc_ids.flip(0), torch.zeros_like(doc_ids)):
        masks = model.masks(ids)
        torch.testing.assert_close(compiled(x, y, masks=masks), model(x, y, masks=masks))
    assert counter.frame_count == 1


def test_one_graph_serves_any_number_of_documents_in_varlen_mode():
    """With the real operator, on the meta device, because it has no CPU kernel."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    config = GPTConfig(sequence_len=16, vocab_size=64, n_layer=2, n_head=2, n_kv_head=1, n_embd=16)
    with torch.device("meta"):
        model = GPT(config, attention_mode="varlen").bfloat16()
        x, doc_ids = torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.int32)
    compiled = torch.compile(model, dynamic=False, backend=counter, fullgraph=True)
    for num_docs in (2, 3, 5, 9, 17, 32):
        compiled(x, x, masks=model.masks(doc_ids, num_docs)).backward()
    assert counter.frame_count == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_a_compiled_embedding_has_the_bits_of_the_eager_gradient():
    """Tokens occur often, so gradients are sums of many terms. One graph has both dtypes, which
    saves time."""
    dtypes = torch.float32, torch.bfloat16
    idx, results = tokens(8, 65, vocab=40), []
    factor = torch.randn(8, 65, 24, generator=torch.Generator().manual_seed(1))

    def look_up(modules):
        return [module(idx) for module in modules]

    for run, kind in (
        (look_up, torch.nn.Embedding),
        (look_up, Embedding),
        (torch.compile(look_up, fullgraph=True), Embedding),
    ):
        torch.manual_seed(0)
        modules = [kind(40, 24, dtype=dtype) for dtype in dtypes]
        rows = run(modules)
        sum((row.float() * factor).sum() for row in rows).backward()
        results.append(
            [*(row.detach() for row in rows), *(module.weight.grad for module in modules)]
        )
    expected, eager, compiled = map(as_bytes, results)
    assert expected == eager == compiled and [grad.dtype for grad in results[0][2:]] == [*dtypes]


# ---- memory --------------------------------------------------------------------------------------


def test_activation_checkpointing_does_not_change_loss_and_gradients():
    x, y = tokens(2, 48), tokens(2, 48, seed=1)
    results, calls = [], []
    for activation_checkpointing in (False, True):
        model = shake(build(activation_checkpointing=activation_checkpointing))
        model.transformer["h"][0].attn.register_forward_hook(lambda *_: calls.append(1))
        results.append(as_bytes(loss_and_gradients(model, x, y)))
    assert results[0] == results[1] and len(calls) == 1 + 2
    with torch.no_grad():
        model(x, y)
    assert len(calls) == 4, "without gradients, each layer is computed once"


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_loss_in_chunks_equals_the_whole_loss(reduction, monkeypatch):
    """Losses of tokens have the same bits; gradients of the head are sums over 120 positions in
    another order."""
    x, y = tokens(3, 40), tokens(3, 40, seed=1)
    y[1, 5:30] = -100
    results = []
    for chunk in (1000, 16):
        monkeypatch.setattr(gpt, "LOSS_CHUNK", chunk)
        results.append(loss_and_gradients(shake(build()), x, y, loss_reduction=reduction))
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(*results, strict=True):
        assert_same_sums(a, b, terms=120)


def test_the_memory_estimate_counts_the_gradients_of_a_step():
    with torch.device("meta"):
        model = GPT(GPTConfig.from_depth(12, vocab_size=32768, sequence_len=2048))
    estimate = partial(model.estimate_memory, 32, dtype=torch.bfloat16, compiled=True)
    total = sum(p.numel() for p in model.parameters())
    one = estimate()
    several = estimate(micro_batches=8)
    leaves = estimate(micro_batches=8, num_leaves=8)
    assert one["gradients"] == leaves["gradients"] == 0, (
        "gradients of one micro-batch replace its layers"
    )
    assert several["gradients"] == 4 * total and several["pending leaves"] == 0
    assert leaves["pending leaves"] == 3 * 4 * total


def kept_and_estimated(n_layer):
    """Bytes that autograd keeps of a forward pass, not counting the parameters; the estimate for
    the layers."""
    model = build(
        GPTConfig(
            sequence_len=64,
            vocab_size=64,
            n_layer=n_layer,
            n_head=2,
            n_kv_head=2,
            n_embd=128,
            window_pattern="L",
        ),
        dtype=torch.bfloat16,
    )
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens(2, 64, vocab=64), tokens(2, 64, vocab=64))
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    estimate = model.estimate_memory(2, dtype=torch.bfloat16, compiled=False)
    return sum(storage.nbytes() for storage in kept.values()), estimate["layers"] + estimate[
        "casts"
    ]


def test_the_memory_estimate_of_eager_layers_equals_the_tensors_that_autograd_keeps(monkeypatch):
    monkeypatch.setattr(gpt, "LOSS_CHUNK", 16)
    (few, few_estimated), (many, many_estimated) = kept_and_estimated(2), kept_and_estimated(4)
    with if_a_fork_changed("what a layer keeps", "change its number in `KEPT` of nanochat/gpt.py"):
        assert many - few == pytest.approx(many_estimated - few_estimated, rel=0.08)


# ---- accounting and groups -----------------------------------------------------------------------


def test_parameters_are_counted_by_kind_and_flops_by_matrix_product():
    config = GPTConfig(
        sequence_len=1024, vocab_size=1000, n_layer=4, n_head=4, n_kv_head=2, n_embd=64
    )
    model = GPT(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert model.state_dict().keys() == sizes.keys(), "the rotary tables are not saved"

    def count(beginning):
        return sum(size for name, size in sizes.items() if name.startswith(beginning))

    counts = model.num_scaling_params()
    layers = count("transformer.h.")
    embeddings = {"wte": 1024 * 64, "value_embeds": 2 * 1024 * 32, "lm_head": 1024 * 64}
    scalars = sum(sizes.values()) - layers - sum(embeddings.values())
    assert counts == {
        **embeddings,
        "transformer_matrices": layers,
        "scalars": scalars,
        "total": sum(sizes.values()),
    }
    assert layers > 30 * scalars > 0
    # as in nanochat: all Linear modules, including the smear gate
    matmuls = 1024 * 64 + layers + count("smear_gate")
    assert model.estimate_flops() == 6 * matmuls + 12 * 64 * (3 * 256 + 1024)


def test_every_parameter_is_in_one_group_with_its_settings():
    model = build()
    groups = model.param_groups(
        unembedding_lr=1.0, embedding_lr=2.0, matrix_lr=3.0, weight_decay=0.1, scalar_lr=4.0
    )
    assert all(
        p is model.get_parameter(n)
        for g in groups
        for n, p in zip(g["names"], g["params"], strict=True)
    )
    group_of = {n: g for g in groups for n in g["names"]}
    assert len(group_of) == sum(len(g["names"]) for g in groups) == len([*model.parameters()])
    scale = (32 / 768) ** -0.5
    for name, lr in {
        "lm_head.weight": scale,
        "transformer.wte.weight": 2 * scale,
        "value_embeds.0.weight": scale,
        "resid_lambdas": 0.04,
        "x0_lambdas": 4.0,
        "smear_lambda": 0.2,
        "transformer.h.0.mlp.c_fc.weight": 3.0,
    }.items():
        assert group_of[name]["lr"] == group_of[name]["initial_lr"] == pytest.approx(lr)
    for name, group in group_of.items():
        assert (group["kind"] == "muon") == name.startswith("transformer.h.")
        assert group["kind"] == "adamw" or group["weight_decay"] == 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_orthogonalized_in_the_compute_dtype(dtype, monkeypatch):
    """Regression: a run in float32 had bfloat16 updates on a GPU, because the dtype was the
    device's default."""
    model, dtypes = shake(build(dtype=dtype)), set()
    monkeypatch.setattr(optim, "polar_express", lambda G, steps: dtypes.add(G.dtype) or G)
    optimizer = model.setup_optimizer()
    model(tokens(2, 24), tokens(2, 24, seed=1)).backward()
    optimizer.step()
    assert dtypes == {dtype}


@pytest.mark.parametrize("n_layer, is_sign_alone", [(2, True), (3, False)])
def test_backout_needs_three_layers(n_layer, is_sign_alone):
    """What --depth=2 is warned about: the norm keeps the sign of (1 - backout_lambda) x alone."""
    model = shake(build(replace(SMALL, n_layer=n_layer)))
    x = tokens(2, 32)
    y = tokens(2, 32, seed=1)

    def loss(backout):
        model.backout_lambda.data.fill_(backout)
        return model(x, y).item()

    with if_a_fork_changed("the backout", "change the note about --depth in run_summary, too"):
        assert (loss(0.2) == pytest.approx(loss(0.8), rel=1e-5)) == is_sign_alone
        assert loss(0.8) != pytest.approx(loss(1.2), rel=1e-5)


def test_positions_past_the_rotary_tables_are_refused():
    model = build(replace(SMALL, sequence_len=4))
    assert model(tokens(1, 40)).shape == (1, 40, 70)
    with pytest.raises(ValueError, match="position 41 is past the rotary tables"):
        model(tokens(1, 41))


def test_weights_are_initialized_without_arguments_as_in_nanochat():
    """Regression: forks call init_weights() alone."""
    models = [GPT(GPTConfig(64, 100, 2, 2, 2, 24)) for _ in range(2)]
    models[0].init_weights()
    models[1].init_weights(seed=42, compute_dtype=torch.float32)
    states = [model.state_dict() for model in models]
    assert models[0].compute_dtype == torch.float32, "the CPU's default"
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
