"""A whole step on the meta device, which has shapes but no values: the host waits for the device
once, in `fetch`.

The step is the real one: forward and backward passes, leaves, reduction, optimizer. On the meta
device, an operator that hands a value to the host, such as `.item()`, has nothing to hand over.
`Waits` answers in its place, and notes which of our functions asked. A GPU would wait there until
it has done all of its work.
"""

import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat import gpt, optim, reduce, trainer
from nanochat.config import Settings
from nanochat.dataloader import MicroBatch, StepLayout
from nanochat.reduce import LeafAccumulator
from nanochat.run_settings import build_model
from nanochat.schedule import Schedule
from nanochat.steps import StepMessage
from scripts.base_train import forward_backward

T, B = 32, 1
META = torch.device("meta")
PACKAGE = str(Path(trainer.__file__).parent)


class Waits(TorchDispatchMode):
    """Lists, in `seen`, the innermost function of our package behind each operator that waits for
    the meta device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        on_meta = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_meta]
        # item(), bool(), int(), an index
        if on_meta and func is torch.ops.aten._local_scalar_dense.default:
            self.note()
            return 1.0
        # to(), cpu()
        if (
            on_meta
            and func is torch.ops.aten._to_copy.default
            and kwargs.get("device", META) != META
        ):
            self.note()
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        # host.copy_(ours)
        if on_meta and func is torch.ops.aten.copy_.default and not args[0].is_meta:
            self.note()
            return args[0]
        return func(*args, **kwargs)

    def note(self):
        frames = traceback.extract_stack()
        self.seen.append([frame.name for frame in frames if frame.filename.startswith(PACKAGE)][-1])


class Batches:
    """A loader whose micro-batches have shapes only."""

    def __init__(self, settings):
        self.layout = StepLayout(4, settings.total_batch_size // T, B, num_leaves=settings.leaves)
        self.micro_batches_per_step = settings.leaves * self.layout.micro_batches_per_leaf
        self.device = META
        self.buckets = ["a", "b"]
        self.digest = 2**64 - 1
        self.with_doc_ids = settings.attention_mode != "causal"

    def __next__(self):
        tokens = torch.empty(B, T, dtype=torch.int64, device=META)
        doc_ids = torch.empty(B, T, dtype=torch.int32, device=META) if self.with_doc_ids else None
        return MicroBatch(
            tokens, tokens, doc_ids, 3, torch.empty(B, dtype=torch.int64, device=META)
        )

    def dropped(self):
        return dict.fromkeys(self.buckets, 0)


def waits_of_a_step(**changed):
    """The functions that wait for the device in one step of a run with these settings."""
    flags = {
        "depth": 2,
        "aspect_ratio": 16,
        "head_dim": 16,
        "window_pattern": "SL",
        "max_seq_len": T,
        "vocab_size": 320,
        "total_batch_size": 4 * T,
        "leaves": 2,
    }
    settings = Settings(**{**flags, **changed})
    model = build_model(settings)
    model.set_compute_dtype(
        getattr(torch, settings.dtype if settings.dtype != "auto" else "float32")
    )
    loader = Batches(settings)
    leaves = LeafAccumulator(
        model.parameters(),
        settings.leaves,
        micro_batches_per_leaf=loader.layout.micro_batches_per_leaf,
    )
    run = SimpleNamespace(
        settings=settings,
        model=model,
        compiled=model,
        optimizer=model.setup_optimizer(),
        leaves=leaves,
        loader=loader,
        schedule=Schedule.of(settings, 100, peak_weight_decay=0.1),
        progress=trainer.Progress(step=20, window=[(2.0, 1.0)] * 20),
    )
    with Waits() as waits:
        rows, shortage = forward_backward(run)
        trainer.take_step(
            run, rows, dry=shortage is not None, stop=False, unsaved=False, save=False
        )
    assert shortage is None and all(p.grad is None for p in model.parameters())
    return waits.seen


class Reached(Exception): ...


def test_a_run_tells_its_optimizer_its_number_of_leaves():
    """Regression: with the number of processes instead, the bits of a GPU's products follow it."""
    settings = Settings(depth=1, vocab_size=32, max_seq_len=T, leaves=4, dtype="float32")
    horizon = SimpleNamespace(batch_lr_scale=1.0, weight_decay_scaled=0.0)
    start = SimpleNamespace(settings=settings, horizon=horizon)
    with mock.patch.object(gpt.GPT, "setup_optimizer", side_effect=Reached) as setup:
        with pytest.raises(Reached):
            trainer.make_model(start, mock.Mock(), torch.device("cpu"))
    assert setup.call_args.kwargs["num_leaves"] == 4


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"skip_spikes": 5.0, "max_grad_norm": 1.0, "leaves": 1},
        {"activation_checkpointing": True, "z_loss": 1e-4},
        {"attention_mode": "varlen", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_the_host_waits_once_in_a_step(changed):
    assert waits_of_a_step(**changed) == ["fetch"]


def planted(owner, name, wait):
    """Replace a function by one that first waits for a tensor of the device."""
    original = getattr(owner, name)

    def waits(*args, **kwargs):
        wait(torch.ones(3, device=META))
        return original(*args, **kwargs)

    waits.__code__ = waits.__code__.replace(co_filename=str(Path(PACKAGE) / "planted.py"))
    return mock.patch.object(owner, name, waits)


PLACES = {
    "the forward pass": (gpt, "apply_rotary"),
    "the leaves": (reduce, "merge"),
    "the message of a step": (trainer, "judge"),
    "the optimizer": (optim, "adamw_rates"),
}
WAYS = {
    "item": lambda tensor: tensor[0].item(),
    "cpu": lambda tensor: tensor.cpu(),
    "tolist": lambda tensor: tensor.tolist(),
    "if": lambda tensor: bool(tensor[0] > 0),
    "copy": lambda tensor: torch.empty(3).copy_(tensor),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_planted_item_is_caught(place):
    with planted(*place, WAYS["item"]):
        seen = waits_of_a_step()
    assert set(seen) == {"waits", "fetch"} and seen.count("fetch") == 1


@pytest.mark.parametrize("wait", WAYS.values(), ids=WAYS)
def test_every_way_to_wait_is_caught(wait):
    message = torch.ones(StepMessage.rows_at(0) + 3, device=META)
    with planted(trainer, "judge", wait), Waits() as waits:
        trainer.judge(message, num_buckets=0, num_targets=1)
    assert waits.seen == ["waits"]


# ---- a schedule that changed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, words",
    [
        ({}, ""),
        ({"final_lr_frac": 0.1}, "final_lr_frac was 0.1, is 0.05"),
        ({"num_iterations": 9}, ""),
        ({"warmdown_steps": 5}, "warmdown_steps was 5, is -1"),
    ],
)
def test_a_changed_schedule_is_noted(changed, words, capsys):
    now = Schedule(num_iterations=4).state()
    trainer.note_other_schedule({**now, **changed}, now)
    said = capsys.readouterr().out
    assert words in said and bool(words) == bool(said)


def test_a_setting_of_the_schedule_that_the_checkpoint_lacks_was_at_its_default(capsys):
    now = Schedule(num_iterations=4).state()
    before = {name: value for name, value in now.items() if name != "warmdown_steps"}
    trainer.note_other_schedule(before, now)
    assert not capsys.readouterr().out
    trainer.note_other_schedule(before, {**now, "warmdown_steps": 5})
    assert "warmdown_steps was -1, is 5" in capsys.readouterr().out
