"""Data that changed behind a run's back is found before the run trains on it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from nanochat import tokens
from scripts import tok_shards, verify
from tests import training
from tests.training import digests, finish, refuse, run_dir, steps, succeed

workplace = training.in_workplace(**training.SMALL, num_iterations=4, save_every=-1)


@pytest.fixture
def shards(workplace):
    assert tok_shards.main([f"--input-dir={workplace / 'data'}", f"--output-dir={workplace / 'shards'}",
                            f"--tokenizer={workplace / 'tokenizer'}", "--num-workers=1"]) == 0
    return workplace / "shards"


def change(path: Path, every: int, first: int = 0) -> None:
    """Change one id in so many, from one on, and leave size and time as they are."""
    stat, ids = path.stat(), np.fromfile(path, np.uint16)
    ids[first::every] ^= 1
    ids.tofile(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def change_all(folder: Path, every: int) -> None:
    for path in folder.rglob("*.bin"):
        change(path, every)


def look_at_no_blocks() -> None:
    tokens.BLOCKS = 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_token_files_that_changed_after_a_clean_stop_are_not_trained_on(shards, monkeypatch, world_size):
    """The sampled blocks are looked at first: leave them out, and the digest of the next step finds it."""
    flags = {"data_path": shards, "data_format": "shards", "model_tag": f"run{world_size}"}
    monkeypatch.setattr(tokens, "BLOCKS", 0, raising=False)
    succeed(**flags)
    change_all(shards, 20)
    error = refuse(**flags, num_iterations=8) if world_size == 1 else None
    if error is None:
        group = training.start(world_size, hook=look_at_no_blocks, **flags, num_iterations=8)
        assert group.wait() == [1, 1]
        error = group.text()
    assert "step 4" in error and "digest" in error and "changed" in error
    assert sorted(steps(flags["model_tag"])) == [0, 1, 2, 3], "it trained on"


def test_an_unchanged_run_goes_on_with_any_number_of_processes(shards):
    flags = {"data_path": shards, "data_format": "shards"}
    succeed(**flags)
    finish(2, **flags, num_iterations=6)
    succeed(**flags, num_iterations=8)
    assert len(digests()) == 8


def test_sampled_blocks_find_at_the_start_what_changed_anywhere_in_a_token_file(shards):
    """Whatever of it the next steps read. A run that pinned no blocks is not compared by them."""
    succeed(data_path=shards, data_format="shards")
    path = sorted((shards / "train").rglob("*.bin"))[0]
    for first in (0, path.stat().st_size // 2 - 1):  # the first id of all, and the last
        change(path, 10**9, first)
        error = refuse(data_path=shards, data_format="shards", num_iterations=6)
        assert path.name in error and "changed since this run began (blocks" in error
        change(path, 10**9, first)
    manifest = run_dir() / "data_manifest.json"
    pinned = json.loads(manifest.read_text())
    for file in [file for buckets in pinned.values() for bucket in buckets.values() for file in bucket["files"]]:
        assert file.pop("blocks")
    manifest.write_text(json.dumps(pinned))
    succeed(data_path=shards, data_format="shards", num_iterations=6)


def test_verify_of_a_run_reads_the_token_files_that_it_trains_on(shards, capsys, monkeypatch):
    monkeypatch.setattr(tokens, "BLOCKS", 2)
    succeed(data_path=shards, data_format="shards")
    assert verify.main([str(run_dir())]) == 0
    path = sorted((shards / "train").rglob("*.bin"))[0]
    change(path, 10**9, 5000)  # in none of the sampled blocks
    capsys.readouterr()
    assert verify.main(["run"]) == 1
    told = capsys.readouterr().out
    assert f"PROBLEM {path}: bin_hash is" in told and "1 problem(s)" in told


def test_verify_of_a_run_names_data_that_changed_or_is_gone(workplace, capsys):
    succeed()
    path = workplace / "data/shard_1.parquet"
    training.write_shard(path, ["another text"] * 96)
    (workplace / "data/shard_2.parquet").unlink()
    assert verify.main(["run"]) == 1
    told = capsys.readouterr().out
    assert f"PROBLEM {path}: changed since this run began" in told and "shard_2.parquet: this run reads it" in told
