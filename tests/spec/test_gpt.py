"""The model equals a forward pass written out in NumPy; its initial bits, and what it refuses."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanochat.gpt import GPT, GPTConfig
from tests.models import SMALL, build, shake, tokens
from tests.toy import assert_same_sums, if_a_fork_changed
from tests.training import as_bytes

# ---- shape ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_layer": 0}, "n_layer: got 0"),
        ({"n_embd": 770}, "n_embd / n_head: got 770 / 6"),
        ({"n_embd": 18}, "expected an even"),
        ({"n_kv_head": 4}, "expected a divisor of n_head"),
        ({"window_pattern": "SX"}, "window_pattern: got 'SX'"),
        ({"vocab_size": 3.5}, "got 3.5"),
    ],
)
def test_impossible_shapes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**wrong)


# ---- initial weights -----------------------------------------------------------------------------


def test_initial_bits_depend_only_on_seed_and_name():
    straight = build(seed=7)
    with torch.device("meta"):
        empty = GPT(SMALL)
    with pytest.raises(ValueError, match="to_empty"):
        empty.init_weights(seed=7, compute_dtype=torch.float32)
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    empty.to_empty(device="cpu").init_weights(seed=7, compute_dtype=torch.float32)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is not used"
    weights, deeper, other = (
        as_bytes(model.state_dict())
        for model in (straight, build(replace(SMALL, n_layer=7), seed=7), build(seed=8))
    )
    assert as_bytes(empty.state_dict()) == weights
    assert torch.equal(straight(tokens(1, 9)), empty(tokens(1, 9))), (
        "the rotary tables are equal, too"
    )
    drawn = [n for n, p in straight.named_parameters() if p.dim() == 2 and "c_proj" not in n]
    assert len(drawn) > 20 and not any(weights[name] == other[name] for name in drawn)
    assert len({weights[name] for name in drawn}) == len(drawn), "each name has its own values"
    name = "transformer.h.1.mlp.c_fc.weight"
    assert deeper[name] == weights[name]


# ---- the whole forward, written out --------------------------------------------------------------


def written_out(
    weights, ids, *, n_layer=5, n_head=4, n_kv_head=2, width=32, vocab=70, short=128, long=160
):
    """Logits (T, vocab) of one row in NumPy float64: one position and head at a time, with complex
    rotations."""
    w = {name: p.detach().double().numpy() for name, p in weights.items()}
    head = width // n_head
    sigmoid = lambda z: 1 / (1 + np.exp(-z))
    rms = lambda z: z / np.sqrt((z * z).mean() + np.finfo(np.float32).eps)
    turns = np.exp(
        -1j * np.arange(len(ids))[:, None] * 100_000.0 ** (-np.arange(head // 2) * 2 / head)
    )

    def positioned(z, t):
        z = (z[: head // 2] + 1j * z[head // 2 :]) * turns[t]
        return rms(np.concatenate((z.real, z.imag))) * 1.2

    def attend(x, layer):
        block = f"transformer.h.{layer}.attn."
        q, k, v = (x @ w[f"{block}c_{kind}.weight"].T for kind in "qkv")
        ys = np.zeros_like(x)
        keys = np.array(
            [[positioned(key, t) for key in np.split(k[t], n_kv_head)] for t in range(len(ids))]
        )
        for t, h in itertools.product(range(len(ids)), range(n_head)):
            g = h // (n_head // n_kv_head)
            part, mine = slice(g * head, (g + 1) * head), slice(h * head, (h + 1) * head)
            seen = slice(max(0, t - (long if layer in (3, n_layer - 1) else short)), t + 1)
            values = v[seen, part].copy()
            if (n_layer - 1 - layer) % 2 == 0:
                gates = 3 * sigmoid(x[seen, :12] @ w[block + "ve_gate.weight"][g])
                values += gates[:, None] * w[f"value_embeds.{layer}.weight"][ids[seen], part]
            scores = np.exp(keys[seen, g] @ positioned(q[t, mine], t) / np.sqrt(head))
            ys[t, mine] = scores / scores.sum() @ values
        return ys @ w[block + "c_proj.weight"].T

    embedded = np.array([rms(w["transformer.wte.weight"][i]) for i in ids])
    x = embedded.copy()
    for t in range(1, len(ids)):
        gate = w["smear_lambda"][0] * sigmoid(embedded[t, :24] @ w["smear_gate.weight"][0])
        x[t] += gate * embedded[t - 1]
    start = x
    for layer in range(n_layer):
        x = w["resid_lambdas"][layer] * x + w["x0_lambdas"][layer] * start
        x = x + attend(np.array([rms(z) for z in x]), layer)
        hidden = np.maximum(
            np.array([rms(z) for z in x]) @ w[f"transformer.h.{layer}.mlp.c_fc.weight"].T, 0
        )
        x = x + hidden**2 @ w[f"transformer.h.{layer}.mlp.c_proj.weight"].T
        if layer == n_layer // 2:
            middle = x
    x = np.array([rms(z) for z in x - w["backout_lambda"][0] * middle])
    return 15 * np.tanh(x @ w["lm_head.weight"][:vocab].T / 15)


def test_the_forward_equals_the_one_written_out_in_numpy():
    model = shake(build(), seed=4)
    ids = tokens(1, 180, seed=6)
    assert model.config.window_sizes == [128, 128, 128, 160, 160], (
        "the case: a row longer than every window"
    )
    expected = written_out(dict(model.named_parameters()), ids[0].tolist())
    ours = model(ids)[0].detach().double().numpy()
    assert expected.std() > 1
    with if_a_fork_changed("the model", "change `written_out` above to the same model"):
        # of keys and widths
        assert_same_sums(torch.tensor(ours), torch.tensor(expected), terms=5 * (180 + 128))


# ---- loss ----------------------------------------------------------------------------------------


def test_losses_exclude_targets_that_are_off():
    model = shake(build())
    x = tokens(2, 30)
    targets = tokens(2, 30, seed=1)
    targets[0, :20] = -100
    each = model(x, targets, loss_reduction="none")
    assert each.shape == (2, 30) and not each[0, :20].any() and (each[0, 20:] > 0).all()
    expected = F.cross_entropy(
        model(x).double().flatten(0, 1), targets.flatten().clamp(min=0), reduction="none"
    )
    # of the vocabulary
    assert_same_sums(each.flatten(), expected * (targets.flatten() >= 0), terms=70)
    # of the targets
    assert_same_sums(model(x, targets, loss_reduction="sum"), each.double().sum(), terms=60)
    assert_same_sums(model(x, targets), each.double().sum() / 40, terms=60)
    loss = model(x, torch.full_like(x, -100), loss_reduction="sum")
    loss.backward()
    assert loss.item() == 0 and all(
        p.grad is not None and not p.grad.any() for p in model.parameters()
    )
