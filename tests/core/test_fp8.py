"""FP8 products are near those in full precision, and have the same bits for any number of
processes."""

import pytest
import torch

from nanochat import fp8
from nanochat.config import Settings
from nanochat.gpt import Linear
from nanochat.run_settings import build_model
from tests import training

workplace = training.in_workplace()
FLAGS = {
    **training.SMALL,
    "aspect_ratio": 32,
    "head_dim": 16,
    "dtype": "bfloat16",
    "num_iterations": 50,
    "save_every": 0,
}


def test_products_and_gradients_are_near_the_exact_ones_and_zeros_stay_zeros():
    rng = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=rng) for shape in ((32, 48), (64, 48), (32, 64))
    )
    layer = Linear(48, 64)
    layer.weight.data = weight
    layer.__class__ = fp8.Float8Linear
    x.requires_grad_()
    y = layer(x.view(2, 16, 48))
    y.backward(grad.view(2, 16, 64))
    exact = (x @ weight.T, grad @ weight, grad.T @ x)
    for actual, expected in zip((y.view(32, 64), x.grad, layer.weight.grad), exact, strict=True):
        assert 1e-4 < (actual - expected).norm() / expected.norm() < 0.08
    with torch.no_grad():
        assert torch.equal(layer(x), x @ weight.T), "without gradients nothing is rounded to FP8"
    assert torch.equal(layer(torch.zeros(16, 48)), torch.zeros(16, 64))
    assert layer(torch.full((16, 48), torch.nan)).isnan().all()
    values, scale = fp8.quantize(torch.tensor([1e9, -3e8]), torch.float8_e5m2)
    assert values.tolist() == [57344.0, -16384.0] and scale.item() == pytest.approx(1e9 / 57344)


def test_only_matrices_whose_dimensions_fit_are_converted():
    settings = Settings(vocab_size=320, fp8=True, depth=2, aspect_ratio=32, head_dim=16)
    kinds = {
        name: type(module)
        for name, module in build_model(settings).named_modules()
        if isinstance(module, Linear)
    }
    left = {name for name, kind in kinds.items() if kind is Linear}
    assert (
        left == {"transformer.h.1.attn.ve_gate", "smear_gate"} and "lm_head" in kinds.keys() - left
    )


def test_fifty_steps_learn_like_bfloat16():
    """The scalars stay as they are: in one layer, rounding alone decides where the backout walks, and
    all losses follow it (see test_backout_needs_three_layers)."""
    flags = {**FLAGS, "scalar_lr": 0.0}
    training.succeed(**flags, model_tag="bfloat16")
    training.succeed(**flags, fp8=True, model_tag="fp8")
    wide, narrow = training.losses("bfloat16"), training.losses("fp8")
    assert wide[0] - wide[-1] > 0.5, "50 steps learn something"
    assert wide != narrow and max(abs(a - b) for a, b in zip(wide, narrow, strict=True)) < 0.1


def test_a_run_has_the_same_bits_on_one_process_and_two_and_keeps_its_arithmetic():
    flags = {**FLAGS, "num_iterations": 6}
    training.finish(**flags, fp8=True, leaves=2, model_tag="one")
    training.finish(world_size=2, **flags, fp8=True, model_tag="two")
    assert training.losses("one") == training.losses("two")
    assert training.state_of(training.final("one")) == training.state_of(training.final("two"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(training.SETTINGS, "model_tag", "one")
        assert "--fp8" in training.refuse(**flags)
