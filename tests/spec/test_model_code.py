"""The hashes of a model's code change with what it computes, and with nothing else."""

import pytest
import torch

from nanochat import model_code
from nanochat.attention import attention
from nanochat.fp8 import Float8Linear
from nanochat.gpt import Linear
from nanochat.model_code import changed_code, code_of, hash_code

CODE = b'''
def act(x):
    """Squared, above 0."""
    return x.relu().square()
'''


@pytest.mark.parametrize(
    "edited",
    [
        CODE.replace(b"    return", b"    # as in Primer\n    return"),
        CODE.replace(b"Squared, above 0.", b"relu(x)^2."),
        CODE.replace(b"x.relu().square()", b"(\n        x.relu().square()\n    )"),
    ],
    ids=["comment", "docstring", "layout"],
)
def test_what_computes_nothing_does_not_count(edited):
    assert edited != CODE and hash_code(edited) == hash_code(CODE)


def test_an_operation_counts():
    assert hash_code(CODE.replace(b"relu()", b"gelu()")) != hash_code(CODE)


def test_a_hash_is_the_same_in_every_version_of_python():
    """`ast.unparse` quotes this text in another way from Python 3.12 on."""
    assert hash_code(b"""def f(x: int) -> str: return f"{x!r:>5} '{x}'" """) == (
        "0bfa447e58de36118e5b41d380266ec0"
    )


def test_the_files_are_those_that_define_the_models_modules_and_attention():
    model = torch.nn.Sequential(Linear(2, 2), torch.nn.ReLU())
    assert attention.__module__ == "nanochat.attention"
    assert [*code_of(model)] == ["nanochat/attention.py", "nanochat/gpt.py"]


def test_a_file_that_only_one_of_two_models_uses_has_not_changed():
    training = code_of(Float8Linear(2, 2))
    loaded = code_of(Linear(2, 2))
    assert training.keys() != loaded.keys()
    assert changed_code(training, loaded) == changed_code(loaded, training) == []


def test_a_model_may_be_defined_in_a_package(monkeypatch, tmp_path):
    package = tmp_path / "nanochat"
    (package / "models").mkdir(parents=True)
    (package / "models" / "__init__.py").write_bytes(CODE)
    monkeypatch.setattr(model_code, "PACKAGE", package)
    model = type("Model", (torch.nn.Module,), {"__module__": "nanochat.models"})()
    assert code_of(model) == {"nanochat/models/__init__.py": hash_code(CODE)}
