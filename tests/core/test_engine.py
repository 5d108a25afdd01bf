"""A model from a checkpoint alone, and the kernels that generation uses."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from nanochat import model_code
from nanochat.checkpoint import MODEL_CONFIG_NAME, load_checkpoint
from nanochat.engine import Engine, load_model
from nanochat.gpt import GPTConfig
from nanochat.tokenizer import RustBPETokenizer
from tests import training
from tests.checkpoints import reseal
from tests.finished import STEPS
from tests.models import build, shake
from tests.spec.test_engine import CONFIG, tokenizer


@pytest.fixture(scope="module")
def model():
    """A model with random weights in every part, so that windows, gates, smear and backout all
    matter."""
    return shake(build(CONFIG)).eval().requires_grad_(False)


# ---- a model from a checkpoint alone -------------------------------------------------------------


@pytest.fixture
def run(copied):
    return training.run_dir()


def masters(run, dtype):
    """The final model with float32 masters, as in training."""
    checkpoint = load_checkpoint(run / "checkpoints" / "final")
    model = build(GPTConfig(**checkpoint.model_config), dtype=dtype)
    model.load_state_dict(checkpoint.model_state())
    model.set_compute_dtype(dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_model_rebuilds_a_model_from_its_run(run, dtype):
    """Its matrices are cast to the compute dtype once, which gives the bits of casting them each
    time."""
    x, trained = torch.arange(8)[None], masters(run, dtype)
    for path in ("run", run, run / "checkpoints" / "final"):
        model, tokenizer, meta = load_model(path, "cpu", compute_dtype=dtype)
        assert torch.equal(model(x), trained(x)) and not model.training
        assert (model.lm_head.weight.dtype, model.resid_lambdas.dtype) == (dtype, torch.float32)
        assert tokenizer.decode(tokenizer.encode("to be")) == "to be"
        assert meta["step"] == STEPS and meta["model_config"]["n_embd"] == 24


def test_load_model_refuses_mismatched_and_missing_files(run):
    final = run / "checkpoints" / "final"
    shutil.rmtree(run / "tokenizer")
    RustBPETokenizer.train_from_iterator(["quite other words are here"] * 4, 270).save(
        run / "tokenizer"
    )
    with pytest.raises(ValueError, match=r"tokenizer.*--model-tag"):
        load_model(final, "cpu")
    config = json.loads((final / MODEL_CONFIG_NAME).read_text())
    (final / MODEL_CONFIG_NAME).write_text(json.dumps({**config, "n_embd": 36}))
    reseal(final)
    with pytest.raises(ValueError, match="a different architecture"):
        load_model(final, "cpu")
    with pytest.raises(FileNotFoundError, match="existing runs: run"):
        load_model("huge", "cpu")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(FileNotFoundError, match="no checkpoint; existing checkpoints: none yet"):
        load_model("run", "cpu")


def test_a_model_that_was_trained_with_other_code_has_a_note(run, capsys, monkeypatch, tmp_path):
    """Regression: nothing was said, and the samples were nonsense."""
    load_model("run", "cpu")
    assert "changed" not in capsys.readouterr().out
    monkeypatch.setattr(model_code, "PACKAGE", edited_package(tmp_path))
    load_model("run", "cpu")
    assert "nanochat/gpt.py changed; if the model computes" in capsys.readouterr().out


def edited_package(folder):
    """A copy of the model's code, in which the MLP has another activation."""
    copy = folder / "nanochat"
    copy.mkdir()
    for name in ("attention.py", "gpt.py"):
        text = (Path(model_code.__file__).with_name(name)).read_text()
        (copy / name).write_text(text.replace("relu(", "gelu("))
    return copy


def test_generation_enables_only_two_kernels_and_restores_the_others(model, monkeypatch):
    """Flash and memory-efficient attention are enabled, cuDNN's and the plain one are not."""
    cuda = torch.backends.cuda
    enabled = []
    forward = model.forward
    # PyTorch's default, which a test of another module may have changed
    cuda.enable_cudnn_sdp(True)

    def recorded(*args, **kwargs):
        enabled.append(
            (
                cuda.flash_sdp_enabled(),
                cuda.mem_efficient_sdp_enabled(),
                cuda.cudnn_sdp_enabled(),
                cuda.math_sdp_enabled(),
            )
        )
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", recorded)
    for _ in Engine(model, tokenizer()).generate([1, 2], max_tokens=3, temperature=0):
        assert cuda.cudnn_sdp_enabled() and cuda.math_sdp_enabled()
    assert set(enabled) == {(True, True, False, False)}
