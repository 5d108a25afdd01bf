"""One finished run, shared by the tests of all commands that read runs, and a way to run such a
command.

The fixtures are in tests/conftest.py: `finished` is the base directory of that run, which no test
may change; `copied` is a copy for one test, which it may change."""

import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanochat.cli import run_main
from scripts import tok_shards
from tests import training

STEPS = 8
RUN: dict[str, Any] = {  # two layers, saved and evaluated often
    **training.SMALL,
    "depth": 2,
    "aspect_ratio": 12,
    "num_iterations": STEPS,
    "save_every": 2,
    "eval_every": 4,
}


def train(path: Path) -> None:
    """Fill a base directory: data/, tokenizer/, runs/run with its checkpoints 2, 4, 6 and final,
    and shards/, the data pretokenized."""
    with training.workplace(path, **RUN):
        training.succeed()
        assert (
            tok_shards.main(
                [
                    f"--input-dir={path / 'data'}",
                    f"--output-dir={path / 'shards'}",
                    "--num-workers=1",
                    f"--tokenizer={path / 'tokenizer'}",
                    "--max-length=400",
                    "--overlap-size=40",
                ]
            )
            == 0
        )


def copy(finished: Path, path: Path, *, tag: str = "run") -> Path:
    """Copy the run and the shards into another base directory, and make the run name its data."""
    shutil.copytree(finished / "shards", path / "shards", dirs_exist_ok=True)
    run = shutil.copytree(finished / "runs" / "run", path / "runs" / tag)
    for name in ("config.json", "data_manifest.json"):
        text = (run / name).read_text().replace(str(finished), str(path))
        (run / name).write_text(text.replace('"model_tag": "run"', f'"model_tag": "{tag}"'))
    return run


def command(main: Callable[[list[str]], int | None], *argv: Any) -> training.Outcome:
    """Run a script's `main` as the command line does: exit code, output, errors."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        run_main(lambda: main([str(arg) for arg in argv]))
    return training.Outcome(int(end.value.code or 0), out.getvalue(), err.getvalue())
