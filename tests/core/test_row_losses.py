"""The losses of rows: their file, and the values that a run writes."""

import shutil
from functools import partial

import numpy as np
import pytest
import torch

from nanochat.run_dir import RowLosses
from nanochat.run_settings import build_model
from nanochat.start_run import open_run
from nanochat.stream import open_stream
from scripts import verify
from tests import training

STEPS = 4
workplace = training.in_workplace(**training.SMALL, num_iterations=STEPS, leaves=2, save_every=2)


def losses(tag: str) -> RowLosses:
    return RowLosses(training.run_dir(tag), num_rows=training.STEP // training.T, T=training.T)


def files(tag: str) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in (training.run_dir(tag) / "logs" / "rows").iterdir()
    }


def test_losses_of_rows_are_right_and_equal_on_one_process_and_two_and_after_a_kill():
    training.succeed(model_tag="one")
    training.finish(2, model_tag="two")
    assert training.start(model_tag="killed", hook=partial(training.die_after_step, 2)).wait() != [
        0
    ]
    training.finish(2, model_tag="killed")
    assert files("one") == files("two") == files("killed")
    data, config, settings = open_run(training.run_dir("one"))
    model = build_model(settings).to_empty(device="cpu")
    model.init_weights(seed=settings.seed, compute_dtype=torch.float32)
    stream = open_stream(config, data.train, range(config.V), tokenizer=data.tokenizer.fingerprint)
    rows = stream.next_rows(losses("one").num_rows // config.V)
    stream.close()
    nats, live = losses("one").read(0)
    for row, total, targets in zip(rows, nats, live, strict=True):
        tokens = torch.tensor(row.tokens.astype(np.int64))[None]
        expected = tokens[:, 1:].clone()
        if row.live is not None:
            expected[0, torch.tensor(row.live[1:] == 0)] = -100
        assert int((expected >= 0).sum()) == targets
        computed = float(model(tokens[:, :-1], expected, loss_reduction="none").detach().sum())
        assert computed == pytest.approx(total, rel=1e-5)
    for step, logged in training.steps("one").items():
        nats, live = losses("one").read(step)
        assert logged["loss"] == pytest.approx(
            float(nats.sum(dtype=np.float64)) / live.sum(), rel=1e-12
        )


def test_verify_checks_the_losses_of_every_logged_step(capsys):
    """Regression: verify took logs/rows for a folder of token files."""
    training.succeed()
    folder = training.run_dir() / "logs" / "rows"
    assert (
        verify.main(["run"]) == 0
        and f"{folder}: row losses of {STEPS} steps OK" in capsys.readouterr().out
    )
    [file] = folder.iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert verify.main(["run"]) == 1
    out = capsys.readouterr().out
    assert f"PROBLEM {file}: the row losses for step {STEPS - 1} are corrupt" in out
    assert f"row losses of {STEPS - 1} steps OK" in out


def test_records_are_read_by_step_and_damage_is_reported(tmp_path):
    (tmp_path / "logs" / "rows").mkdir(parents=True)
    kept = RowLosses(tmp_path, num_rows=3, T=70_000)
    for step in (0, 9_999, 10_001, 9_999):
        kept.write(step, [step, 0.5, 2.0], [70_000, 0, 1])
    assert sorted(path.name for path in kept.folder.iterdir()) == [
        "step-00000000.bin",
        "step-00010000.bin",
    ]
    for step in (0, 9_999, 10_001):
        nats, live = kept.read(step)
        assert nats.tolist() == [step, 0.5, 2.0] and live.tolist() == [70_000, 0, 1]
    # between two records, before the first, after the last, no file
    for step in (1, 10_000, 10_002, 30_000):
        with pytest.raises(FileNotFoundError, match=f"no row losses for step {step}: "):
            kept.read(step)
    file = kept.folder / "step-00010000.bin"
    data = bytearray(file.read_bytes())
    file.write_bytes(data[:-1])  # truncated by a crash
    with pytest.raises(FileNotFoundError, match="step 10001"):
        kept.read(10_001)
    kept.write(10_001, [1.0, 2.0, 3.0], [1, 2, 3])
    assert kept.read(10_001)[0].tolist() == [1.0, 2.0, 3.0]
    file.write_bytes(data[kept.size :] * 3)  # a valid record of another step
    with pytest.raises(ValueError, match="row losses for step 10000 are corrupt"):
        kept.read(10_000)


def test_a_run_without_row_losses_resumes_and_records_them_from_there():
    training.succeed(model_tag="old", num_iterations=2)
    config = training.run_dir("old") / "config.json"
    shutil.rmtree(training.run_dir("old") / "logs" / "rows")
    training.succeed(model_tag="old", config=config)
    with pytest.raises(FileNotFoundError, match=r"no row losses for step 1: .* is gone"):
        losses("old").read(1)
    assert losses("old").read(2)[1].sum() > 0
