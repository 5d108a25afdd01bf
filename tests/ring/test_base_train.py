"""Training runs: learning, logging, evaluation and errors, on one process and on several."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat import dataloader, optim, run_journal, run_settings, start_run, trainer
from nanochat.checkpoint import load_checkpoint
from nanochat.config import Settings
from nanochat.dataloader import OFF, DataLoader
from nanochat.engine import load_model
from nanochat.run_dir import RowLosses, read_config
from scripts import base_eval, base_train
from tests import training
from tests.toy import EPS, if_a_fork_changed
from tests.training import checkpoints, digests, events, final, losses, refuse, steps, succeed

ROOT = Path(__file__).parents[2]
FIELDS = {
    "step",
    "digest",
    "loss",
    "smooth_loss",
    "lr",
    "grad_norm",
    "step_s",
    "wait_s",
    "tokens",
    "tokens_per_s",
    "mfu",
    "total_training_flops",
    "total_training_time",
}


workplace = training.in_workplace(**training.SMALL)


# ---- learning ------------------------------------------------------------------------------------


def test_it_learns_a_small_corpus_and_samples_from_it(workplace):
    sentence = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. "
    for i in range(3):
        training.write_shard(workplace / "fox" / f"shard_{i}.parquet", [sentence * 3] * 40)
    outcome = succeed(
        data_path=workplace / "fox",
        num_iterations=40,
        eval_every=20,
        eval_tokens=160 * 8,
        save_every=-1,
        sample_every=100,
        max_seq_len=160,
        total_batch_size=160 * 4,
        warmdown_ratio=0.3,
        matrix_lr=1.0,
        embedding_lr=10,
        unembedding_lr=0.3,
    )
    assert losses()[0] > 5.5 and losses()[-1] < 0.5
    bpb = [event["bpb"] for event in events("val")]
    assert [event["step"] for event in events("val")] == [0, 20, 40]
    assert bpb[0] > 3 > bpb[1] > bpb[2] and bpb[2] < 0.5
    assert base_eval.main(["run", "--eval=bpb", "--unigram-tokens=2000", "--device-type=cpu"]) == 0
    evaluated = json.loads((training.run_dir() / "eval.json").read_text())
    assert evaluated["val_bpb"] == bpb[2] < 0.3 * evaluated["unigram_bpb"]
    assert 1 <= outcome.out.count("' -> ") <= dataloader.NUM_PROMPTS
    assert f"{bpb[0]:.6f} -> {bpb[2]:.6f}" in outcome.out


# ---- flags, configuration, log -------------------------------------------------------------------


def test_a_run_writes_its_log_config_and_checkpoints(workplace):
    outcome = succeed(num_iterations=4, save_every=2, eval_every=2)
    records = steps()
    assert sorted(records) == [0, 1, 2, 3]
    for record in records.values():
        assert (
            FIELDS - record.keys() == set() and len(record["digest"]) == 16
        )  # a fork may add some
    assert [record["tokens"] for record in records.values()] == [
        training.STEP * n for n in (1, 2, 3, 4)
    ]
    assert records[0]["smooth_loss"] == pytest.approx(records[0]["loss"])
    assert [event["checkpoint"] for event in events("saved")] == ["checkpoint-2", "final"]
    config = read_config(training.run_dir())
    assert config["lanes"] == 4 and config["leaves"] == 1 and config["dtype"] == "float32"
    assert config["vocab_size"] == training.VOCAB_SIZE
    assert (
        config["derived"]["num_iterations"] == 4
        and config["derived"]["total_tokens"] == 4 * training.STEP
    )
    for word in (
        "tokenizer_fingerprint",
        "params_total",
        "flops_per_token",
        "tokens_per_step",
        f"8 rows of T + 1 = {training.T + 1} tokens (inputs and targets overlap) from 4 lanes; "
        "1 process x 2 micro-batches of 4 rows; 1 leaf",
    ):
        assert word in outcome.out, word
    lines = [
        line for line in outcome.out.splitlines() if line.startswith("step 0000") and "loss" in line
    ]
    assert len(lines) == 4 and "mfu" not in lines[0], "the peak of a CPU is unknown"
    for word in ("loss", "lr", "norm", "ms", "tok/s", "left"):
        assert word in lines[0], word
    with if_a_fork_changed("the line of a step, by another value", "allow it more columns here"):
        # but for a wait for data, which a busy machine may have
        usual = [re.sub(r" \| wait [\d,]+ ms", "", line) for line in lines]
        assert max(map(len, usual)) <= 100
    start = outcome.out[: outcome.out.index("step 00000")].splitlines()
    notes = [line for line in start if line.startswith("note: ")]
    assert len(start) - len(notes) <= 20, "a start fits on a screen"
    assert any("--depth=3 or more" in note for note in notes)
    assert outcome.out.rstrip().endswith(
        "next: python -m scripts.sample run, python -m scripts.page run"
    )
    state = load_checkpoint(final()).seal
    assert state["status"] == "completed" and state["progress"]["tokens"] == 4 * training.STEP
    model, tokenizer, meta = load_model("run", "cpu")
    assert meta["step"] == 4 and tokenizer.fingerprint == config["tokenizer_fingerprint"]
    assert model(torch.tensor([[tokenizer.get_bos_token_id()]])).isfinite().all()


@pytest.mark.parametrize(
    ("depth", "world_size", "card_gb", "rows"),
    [
        (20, 1, 85, 16),
        (24, 1, 85, 16),
        (24, 8, 150, 32),
        (12, 8, 85, 32),
        (20, 1, None, 32),
        (24, 1, 12, 1),
    ],
)
def test_the_automatic_batch_is_the_largest_power_of_two_that_fits_into_memory_and_leaf(
    depth, world_size, card_gb, rows
):
    settings = replace(
        Settings(), depth=depth, world_size=world_size, device_type="cuda", vocab_size=32768
    )
    room = None if card_gb is None else int(0.92e9 * card_gb)
    resolved, _, _ = run_settings.resolve(settings, torch.bfloat16, room)
    assert resolved.device_batch_size == rows
    assert (
        run_settings.resolve(replace(settings, device_batch_size=3), torch.bfloat16, room)[
            0
        ].device_batch_size
        == 3
    )


# Memory in GB that PyTorch 2.11 reserves for two steps at the automatic batch size, by its own
# allocator on a stand-in for CUDA on an H100 (dev/LOG.md, 2026-11-26): a vocabulary of 32,768, T =
# 2048, one process, 85.5 GB.
RESERVED_GB = [
    # depth, leaves, attention mode, activation checkpointing, rows, GB
    (12, 1, "causal", False, 64, 68.35),
    (12, 1, "varlen", False, 64, 68.35),
    (12, 8, "causal", False, 32, 35.73),
    (12, 1, "causal", True, 256, 61.74),
    (20, 1, "causal", False, 16, 48.21),
    (20, 8, "causal", False, 16, 59.05),
    (20, 1, "causal", True, 128, 70.14),
    (20, 8, "causal", True, 64, 48.73),
    (24, 1, "causal", False, 16, 69.73),
    (24, 8, "causal", False, 16, 69.73),  # pending sums on the host
    (24, 1, "causal", True, 64, 76.68),
    (26, 1, "causal", False, 8, 53.26),
    (26, 8, "causal", False, 8, 74.44),
    (26, 1, "causal", True, 32, 63.39),
]


@pytest.mark.parametrize(
    ("depth", "leaves", "mode", "checkpointing", "rows", "reserved_gb"), RESERVED_GB
)
def test_the_memory_estimate_is_at_most_8_percent_above_the_reserved_memory_and_never_below(
    depth, leaves, mode, checkpointing, rows, reserved_gb
):
    settings = replace(
        Settings(),
        depth=depth,
        leaves=leaves,
        attention_mode=mode,
        num_iterations=20,
        activation_checkpointing=checkpointing,
        device_type="cuda",
        vocab_size=32768,
    )
    room = int(run_settings.FIT_ALONE * 85_520_809_984)
    resolved, _, _ = run_settings.resolve(settings, torch.bfloat16, room)
    assert resolved.device_batch_size == rows
    estimate = sum(run_settings.estimate_memory(resolved, room).values())
    assert 1.00 <= estimate / (1e9 * reserved_gb) <= 1.08


class Waits(TorchDispatchMode):
    """Counts operations that make the host wait for a GPU, because a value becomes Python's or
    decides a shape."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
        )
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    "flags", [{}, {"skip_spikes": 9.0, "max_grad_norm": 0.1}], ids=["plain", "judged"]
)
def test_a_step_waits_for_the_device_once_after_all_of_it_is_launched(flags, monkeypatch):
    calls = []
    one_step = base_train.one_step
    fetch = trainer.fetch
    update = optim.MuonAdamW.step

    def counted(*run):
        with Waits() as waits:
            one_step(*run)
        calls.append(f"{waits.count} more waits")

    monkeypatch.setattr(base_train, "one_step", counted)
    monkeypatch.setattr(trainer, "fetch", lambda values: calls.append("fetch") or fetch(values))
    monkeypatch.setattr(
        optim.MuonAdamW, "step", lambda *args, **how: calls.append("update") or update(*args, **how)
    )
    succeed(num_iterations=3, leaves=4, save_every=-1, **flags)
    assert calls == ["update", "fetch", "0 more waits"] * 3
    with Waits() as waits:
        float(torch.ones(()))
    assert waits.count == 1, "the counter works"


def test_the_time_left_is_by_the_steps_of_this_launch(monkeypatch):
    """Regression: slow steps of earlier launches and of a fork's parent counted."""
    succeed(num_iterations=2)
    first = start_run.Start.first_progress
    monkeypatch.setattr(
        start_run.Start, "first_progress", lambda start: replace(first(start), train_time_s=1e6)
    )
    out = succeed(num_iterations=5).out
    left = re.findall(r"tok/s .*\| (.+) left", out)
    assert len(left) == 3 and all(time.endswith(" s") for time in left), out


def test_a_resume_reports_another_version_of_code_or_hardware(monkeypatch):
    compared = []
    monkeypatch.setattr(start_run, "check_all_equal", compared.append)
    monkeypatch.setattr(run_journal, "code_version", lambda: "abc")
    succeed(num_iterations=1, save_every=-1)
    assert (
        events("started")[0].items()
        >= {"code": "abc", "torch": torch.__version__, "gpu": None, "cudnn": None}.items()
    )
    assert "previous launch ran" not in succeed(num_iterations=2, save_every=-1).out
    monkeypatch.setattr(run_journal, "code_version", lambda: "def+")
    for module in (run_journal, start_run):
        monkeypatch.setattr(module, "versions", lambda device: {"torch": "2.99", "gpu": "H100"})
    out = succeed(num_iterations=3, save_every=-1).out
    for words in (
        "code abc, this one runs def+",
        f"torch {torch.__version__}, this one runs 2.99",
        "gpu None, this one runs H100",
    ):
        assert f"the previous launch ran {words}" in out
    assert compared[-1].items() >= {"gpu": "H100", "torch": "2.99", "depth": 1}.items(), (
        "ranks must be alike"
    )


def test_a_resume_with_another_instruction_set_prints_a_note(monkeypatch):
    succeed(num_iterations=1, save_every=-1)
    capability = events("started")[0]["cpu_capability"]
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX1024")
    out = succeed(num_iterations=2, save_every=-1).out
    assert (
        f"note: the previous launch ran cpu_capability {capability}, this one runs AVX1024" in out
    )


def close_outputs():
    """stdout and stderr become pipes that nobody reads any more."""
    for name in ("stdout", "stderr"):
        read, write = os.pipe()
        os.close(read)
        setattr(sys, name, os.fdopen(write, "w"))


def test_a_run_whose_outputs_are_closed_trains_to_its_end(workplace):
    """Regression: `| head` ended it, unsaved."""
    assert training.start(num_iterations=3, hook=close_outputs).wait() == [0]
    assert sorted(steps()) == [0, 1, 2] and final().is_dir()


def test_importing_does_nothing_and_optional_modules_are_imported_on_demand(workplace):
    """In a separate process: modules for files and text do not import torch. Importing creates no
    files and reads no environment variables. A run from text imports no trackers, token files, FP8,
    object storage or tokenizer trainer."""
    program = f"""
import os, runpy, sys
from pathlib import Path
import pyarrow, numpy, requests, tiktoken, tqdm
sys.modules['rustbpe'] = None
home = Path({str(workplace)!r})
def listing():
    return sorted(map(str, home.rglob('*')))
before, read, kept = listing(), [], os.environ
class Watched(type(os.environ)):
    def __getitem__(self, key):
        read.append(key)
        return kept[key]
watched = Watched(kept._data, kept.encodekey, kept.decodekey, kept.encodevalue, kept.decodevalue)
os.environ = watched
import nanochat.tokenizer, nanochat.pretokenize, nanochat.sources, nanochat.dataset, scripts.tok_shards
assert 'torch' not in sys.modules
for name in [name for name in sys.modules if name.startswith(('nanochat', 'scripts'))]:
    del sys.modules[name]  # a run from text imports only some of them
os.environ = kept
import torch
os.environ = watched
import nanochat.common, scripts.base_train
os.environ = kept
assert nanochat.common.autodetect_device_type is nanochat.dist.autodetect_device_type, 'a lazy attribute'
assert not [key for key in read if key.startswith(('NANOCHAT', 'RANK', 'WORLD', 'LOCAL', 'HF_', 'WANDB'))], read
assert listing() == before and not torch.distributed.is_initialized()
assert 'torch._inductor.config' not in sys.modules, 'it reads what nanochat.dist.prepare_cuda sets later'
sys.argv[1:] = {training.flags(num_iterations=1, save_every=-1)!r}
try:
    runpy.run_module("scripts.base_train", run_name="__main__")  # as python -m and torchrun do
except SystemExit as end:
    code = end.code
assert code == 0 and listing() != before
unneeded = {{'wandb', 'nanochat.tokens', 'nanochat.token_source', 'nanochat.dataset', 'nanochat.run_reader'}}
assert not unneeded & set(sys.modules), 'of a text run'
loaded = {{name for name in sys.modules if name.startswith('nanochat.integrations.')}}
assert loaded <= {{'nanochat.integrations.fast_encoders'}}, loaded  # only if fastokens is installed
import nanochat.integrations.object_storage, scripts.tok_train
assert not {{'obstore', 'multistorageclient'}} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=training.PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


# ---- on one process and on several ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "threads", "noted"), [(99.0, 2, True), (99.0, 1, False), (0.0, 2, False)]
)
def test_threads_on_a_busy_machine_are_noted(load, threads, noted):
    with mock.patch("os.getloadavg", lambda: (load, load, load)):
        torch.set_num_threads(threads)
        assert ("OMP_NUM_THREADS=1" in succeed(num_iterations=1).out) == noted


def test_the_loss_is_the_mean_over_the_live_targets_of_all_ranks(workplace):
    """Rows of `split` have targets that are off, and three ranks share four lanes unevenly, with
    dead rows. Neither changes loss or gradient. Weights at step 0 are equal, so bits per byte are,
    too."""
    settings = {
        "long_docs": "split",
        "overlap": 48,
        "num_iterations": 4,
        "eval_every": 4,
        "save_every": -1,
    }
    succeed(**settings)
    rows = RowLosses(training.run_dir(), num_rows=8, T=training.T)
    # on two ranks
    halves = np.array([rows.read(step)[1].reshape(2, 4).sum(axis=1) for step in range(4)])
    assert abs(halves[:, 0] - halves[:, 1]).max() > 40, "the case: a mean of means would differ"
    assert "padding" not in training.finish(2, model_tag="two", device_batch_size=2, **settings)
    assert "padding" in training.finish(3, model_tag="three", **settings)
    for tag in ("two", "three"):
        assert digests(tag) == digests()
        assert losses(tag) == pytest.approx(losses(), abs=2e-4)
        norms = [[record["grad_norm"] for record in steps(t).values()] for t in ("run", tag)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)
        assert events("val", tag)[0]["bpb"] == pytest.approx(events("val")[0]["bpb"], rel=16 * EPS)
    succeed(model_tag="B7", **{**settings, "device_batch_size": 7, "num_iterations": 1})
    assert events("val", "B7")[0]["bpb"] == pytest.approx(events("val")[0]["bpb"], rel=16 * EPS)
    assert losses("B7")[0] == pytest.approx(losses()[0], rel=16 * EPS)


def test_loss_and_gradient_are_those_of_all_rows_at_once(workplace):
    """The oracle: one forward and backward over the whole batch, its mean over live targets."""
    succeed(
        long_docs="split",
        max_seq_len=160,
        total_batch_size=160 * 8,
        overlap=120,
        num_iterations=8,
        save_every=7,
        device_batch_size=3,
        buffer_size=2,
    )
    data, config, _ = start_run.open_run(training.run_dir())
    saved = load_checkpoint(training.run_dir() / "checkpoints" / "checkpoint-7")
    model, _, _ = load_model(saved.path, "cpu")
    with DataLoader(
        config,
        data.train,
        tokenizer=data.tokenizer,
        rows_per_step=8,
        device_batch_size=8,
        num_threads=1,
        cursors=saved.cursors,
    ) as loader:
        batch = next(loader)
    live = int((batch.targets != OFF).sum())
    assert live < 0.9 * batch.targets.numel(), "the case: many targets are off"
    loss = model(batch.inputs, batch.targets, loss_reduction="sum") / live
    loss.backward()
    norm = (
        torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None])
        .sum()
        .sqrt()
    )
    assert steps()[7]["loss"] == pytest.approx(loss.item(), rel=64 * EPS)
    assert steps()[7]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


# ---- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_step_with_an_infinite_loss_or_nan_gradient_changes_nothing_and_ends_the_run(
    workplace, bad, monkeypatch
):
    state = []
    forward_backward = base_train.forward_backward

    def spoiled(run):
        rows, *rest = forward_backward(run)
        if run.progress.step == 5:
            state.extend(
                [
                    run.model,
                    run.optimizer,
                    {k: v.clone() for k, v in run.model.state_dict().items()},
                ]
            )
            if bad == "loss":
                rows[0, 0] = math.inf
            else:
                run.model.lm_head.weight.grad[0, 0] = math.nan
        return rows, *rest

    with monkeypatch.context() as patch:
        patch.setattr(base_train, "forward_backward", spoiled)
        message = refuse(num_iterations=8, save_every=2)
    assert message.startswith("step 5: the loss is") and "The step was not applied" in message
    assert (
        str(training.run_dir() / "checkpoints" / "checkpoint-4") in message
        and "--model-tag" in message
    )
    assert checkpoints() == ["checkpoint-2", "checkpoint-4"] and sorted(steps()) == [0, 1, 2, 3, 4]
    assert [event["step"] for event in events("failed")] == [5]
    model, optimizer, before = state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.gather_state()["step"] == 5
    succeed(num_iterations=8, save_every=2)
    succeed(num_iterations=8, save_every=2, model_tag="whole")
    assert training.state_of(final()) == training.state_of(final("whole"))


def test_an_absurd_learning_rate_stops_on_all_ranks_with_one_sentence(workplace):
    group = training.start(2, num_iterations=8, matrix_lr=1e6, weight_decay=1e30, save_every=0)
    assert group.wait() == [1, 1]
    text = group.text()
    assert (
        text.count("error: ") == 1
        and "the loss is nan" in text
        and "no checkpoint exists yet" in text
    )
    assert "Traceback" not in text and checkpoints() == []


@pytest.mark.parametrize(
    ("world_size", "per_node", "command"),
    [
        (1, 1, "python -m scripts.base_train --depth=2"),
        (2, 2, "torchrun --standalone --nproc_per_node=2 -m scripts.base_train --depth=2"),
        (16, 8, "torchrun --nnodes=2 --nproc_per_node=8 -m scripts.base_train --depth=2"),
    ],
)
def test_the_logged_command_starts_as_many_processes(monkeypatch, world_size, per_node, command):
    """Regression: the report showed "python -m" for a launch of two processes."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
    assert base_train.command_line(["--depth=2"], world_size) == command
