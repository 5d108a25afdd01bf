"""Data that changed after a run started is found before the run trains on it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from nanochat import tokens
from scripts import tok_shards, verify
from tests import training
from tests.training import finish, refuse, run_dir, steps, succeed

workplace = training.in_workplace(**training.SMALL, num_iterations=4, save_every=-1)


@pytest.fixture
def shards(workplace):
    assert tok_shards.main([f"--input-dir={workplace / 'data'}", f"--output-dir={workplace / 'shards'}",
                            f"--tokenizer={workplace / 'tokenizer'}", "--num-workers=1"]) == 0
    return workplace / "shards"


def change(path: Path, every: int, first: int = 0) -> None:
    """Change every `every`-th id from number `first` on, without changing the size and time of the file."""
    stat, ids = path.stat(), np.fromfile(path, np.uint16)
    ids[first::every] ^= 1
    ids.tofile(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def change_all(folder: Path, every: int) -> None:
    for path in folder.rglob("*.bin"):
        change(path, every)


def sample_no_blocks() -> None:
    tokens.BLOCKS = 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_token_files_that_changed_after_a_clean_stop_are_not_trained_on(shards, monkeypatch, world_size):
    """Sampled blocks are compared first. Without them, the digest of the next step shows the change."""
    flags = {"data_path": shards, "data_format": "shards", "model_tag": f"run{world_size}"}
    monkeypatch.setattr(tokens, "BLOCKS", 0, raising=False)
    succeed(**flags)
    change_all(shards, 20)
    error = refuse(**flags, num_iterations=8) if world_size == 1 else None
    if error is None:
        group = training.start(world_size, hook=sample_no_blocks, **flags, num_iterations=8)
        assert group.wait() == [1, 1]
        error = group.text()
    assert "step 4" in error and "digest" in error and "changed" in error
    assert sorted(steps(flags["model_tag"])) == [0, 1, 2, 3], "no step trained on the changed data"


def test_sampled_blocks_show_at_the_start_a_change_in_any_part_of_a_token_file(shards):
    """Unchanged data resumes on any number of processes, and so does a run that pinned no blocks."""
    succeed(data_path=shards, data_format="shards")
    path = sorted((shards / "train").rglob("*.bin"))[0]
    for first in (0, path.stat().st_size // 2 - 1):  # the first id, the last id
        change(path, 10**9, first)
        error = refuse(data_path=shards, data_format="shards", num_iterations=6)
        assert path.name in error and "changed since this run began (blocks" in error
        change(path, 10**9, first)
    finish(2, data_path=shards, data_format="shards", num_iterations=5)
    manifest = run_dir() / "data_manifest.json"
    pinned = json.loads(manifest.read_text())
    for file in [file for buckets in pinned.values() for bucket in buckets.values() for file in bucket["files"]]:
        assert file.pop("blocks")
    manifest.write_text(json.dumps(pinned))
    succeed(data_path=shards, data_format="shards", num_iterations=6)
    assert sorted(steps()) == list(range(6))


def test_verify_of_a_run_reads_its_token_files(shards, capsys, monkeypatch):
    monkeypatch.setattr(tokens, "BLOCKS", 2)
    succeed(data_path=shards, data_format="shards")
    assert verify.main([str(run_dir())]) == 0
    path = sorted((shards / "train").rglob("*.bin"))[0]
    change(path, 10**9, 5000)  # in none of the sampled blocks
    capsys.readouterr()
    assert verify.main(["run"]) == 1
    output = capsys.readouterr().out
    assert f"PROBLEM {path}: bin_hash is" in output and "1 problem\n" in output


def test_verify_of_a_run_names_changed_and_missing_data(workplace, capsys):
    succeed()
    path = workplace / "data/shard_1.parquet"
    training.write_shard(path, ["another text"] * 96)
    (workplace / "data/shard_2.parquet").unlink()
    assert verify.main(["run"]) == 1
    output = capsys.readouterr().out
    assert f"PROBLEM {path}: has changed since this run began" in output
    assert "shard_2.parquet: this run reads it" in output
