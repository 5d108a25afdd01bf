"""The scripts in runs/ that fork: a batch ramp, a mixture switched in mid-run, decay branches, a spike
cut out."""

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from nanochat.run_reader import RunReader
from scripts import base_train, inspect_data, status
from tests import training

ROOT = Path(__file__).parents[2]
SCRIPTS = {"batch_ramp": [], "cut_spike": ["run", "20", "5"], "switch_mixture": [], "wsd": []}
TRAIN = "scripts.base_train"
BUCKETS = {"docs": 60, "code": 60}
SMALL = {**training.SMALL, "device_batch_size": 32, "total_batch_size": 2048, "save_every": 0}


def commands(base: Path, script: str, **environment: str) -> list[list[str]]:
    """The words of each command that a script prints. It runs beside no .venv, whose Python it
    would use."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "runs", Path(folder, "runs"))
        return _printed(Path(folder), base, script, environment)


def _printed(root: Path, base: Path, script: str, environment: dict[str, str]) -> list[list[str]]:
    done = subprocess.run(
        ["bash", f"runs/{script}.sh", *SCRIPTS[script]],
        cwd=root,
        text=True,
        capture_output=True,
        check=True,
        env={**os.environ, "NANOCHAT_BASE_DIR": str(base), **environment},
    )
    return [shlex.split(line) for line in done.stdout.splitlines()]


def module_of(words: list[str]) -> str:
    return words[words.index("-m") + 1]


def arguments(words: list[str]) -> list[str]:
    return [word for word in words[words.index("-m") + 2 :] if word != "--"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("tiny", ["", "1"])
def test_its_commands_have_valid_flags_and_a_dry_run_writes_nothing(tmp_path, script, tiny):
    parsers = {
        TRAIN: base_train.parse_args,
        "scripts.status": status.parse_args,
        "scripts.inspect_data": inspect_data.parse_args,
    }
    for words in commands(tmp_path, script, TINY=tiny, DRY_RUN="1"):
        if module_of(words) in parsers:
            # the settings of a parent are read while the flags are parsed
            flags = [word for word in arguments(words) if not word.startswith("--fork-from=")]
            parsers[module_of(words)](flags)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_fork_names_only_its_parent_itself_and_what_differs(tmp_path, script):
    printed = [arguments(words) for words in commands(tmp_path, script, TINY="1", DRY_RUN="1")]
    forks = [words for words in printed if words[0].startswith("--fork-from=")]
    assert forks and all(words[1].startswith("--model-tag=") for words in forks)
    assert all(3 <= len(words) <= 5 for words in forks)


@pytest.mark.parametrize("script", SCRIPTS)
def test_its_tree_of_runs_trains_to_the_end(tmp_path, script):
    """With another model and other text. The script itself calls a `python` that does nothing."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/true")
    with training.workplace(tmp_path, **SMALL):
        training.write_buckets(tmp_path, BUCKETS)
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        data = str(tmp_path / "text")
        printed = commands(tmp_path, script, TINY="1", DATA=data, PATH=path)
        trained = [arguments(words) for words in printed if module_of(words) == TRAIN]
        tags = []
        for words in trained:
            [tag] = [word for word in words if word.startswith("--model-tag=")]
            is_fork = words[0].startswith("--fork-from=")
            own = words if is_fork else [*training.flags(), *words[words.index(tag) :], "--depth=1"]
            with mock.patch.object(training, "flags", lambda own=own: own):
                training.succeed()
            tags.append(tag.partition("=")[2])
        runs = [RunReader(training.run_dir(tag)) for tag in tags]
        assert len(runs) >= 2 and all(run.outcome == "completed" for run in runs)
        assert [run.fork is not None for run in runs] == [False, *[True] * (len(runs) - 1)]
