"""Bad input to the main job: each kind is one sentence that names the file or the flag and the way out, an exit code
that is not 0, and nothing half-written."""

import resource
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanochat import checkpoint
from nanochat.tokenizer import RustBPETokenizer
from tests import training
from tests.training import checkpoints, fingerprint, refuse, state_of, succeed, texts, write_shard

SHORT: dict[str, Any] = {"num_iterations": 6, "save_every": 2}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path) -> Iterator[Path]:
    with training.workplace(tmp_path, **training.SMALL) as path:
        yield path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A completed run of six steps with checkpoints 2, 4 and final."""
    with training.workplace(tmp_path_factory.mktemp("reference"), **training.SMALL):
        succeed(**SHORT)
        return training.run_dir()


@pytest.fixture
def half_done(workplace: Path, reference: Path) -> Path:
    """That run as it was after step 4, in this test's workplace."""
    shutil.copytree(reference, training.run_dir())
    shutil.rmtree(training.run_dir() / "checkpoints" / "final")
    return training.run_dir()


def refuse_new(*words: str, **settings: Any) -> None:
    """A run that does not begin: all words are in the sentence, and no run is left that would be in the way."""
    message = refuse(**{**SHORT, **settings})
    for word in words:
        assert word in message, message
    assert not (training.run_dir() / "config.json").exists() and checkpoints() == []
    assert not (training.run_dir() / "data_manifest.json").exists()


def refuse_old(*words: str, **settings: Any) -> None:
    """A run that does not go on: all words are in the sentence, and no file of it has changed."""
    before = fingerprint(training.run_dir())
    message = refuse(**{**SHORT, **settings})
    for word in words:
        assert word in message, message
    assert fingerprint(training.run_dir()) == before


# ---- data -----------------------------------------------------------------------------------------------------------

def test_no_data_that_can_be_used_and_no_tokenizer(workplace: Path) -> None:
    refuse_new(str(workplace / "nowhere"), "no such data folder", "nanochat.dataset", data_path=workplace / "nowhere")
    (workplace / "empty").mkdir()
    refuse_new(str(workplace / "empty"), ".parquet", "--data-path", data_path=workplace / "empty")
    refuse_new(str(workplace / "nowhere"), val_path=workplace / "nowhere")
    refuse_new("climbmix", "nanochat.dataset", data_path=None)  # the download that never was
    path = write_shard(workplace / "one" / "only.parquet", texts(40, seed=1))
    refuse_new("only.parquet", "--val-path", data_path=path.parent)
    write_shard(path, [*texts(40, seed=1), None, None])
    refuse_new(str(path), "2 null(s)", "row group 1", data_path=path.parent, val_path=workplace / "data")
    shutil.rmtree(workplace / "tokenizer")
    refuse_new(str(workplace / "tokenizer"), "scripts.tok_train")


# ---- flags ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("settings", "words"), [
    ({"total_batch_size": 1000}, ("--total-batch-size", "1,000", f"multiple of --max-seq-len {training.T}")),
    ({"lanes": 3}, ("--lanes 3", "8 rows", "divisor")),
    ({"lanes": 0}, ("--lanes", "at least 1")),
    ({"leaves": 3}, ("--leaves", "power of two")),
    ({"leaves": 8}, ("--leaves", "4 lanes")),
    ({"device_batch_size": 0}, ("--device-batch-size", "at least 1")),
    ({"keep_last_k": 0}, ("--keep-last-k", "at least 1")),
    ({"keep_last_k": 1, "keep_milestone_every": -1}, ("--keep-milestone-every", "at least 1")),
    *(({"attention_mode": mode}, (f"--attention-mode={mode}", "need a GPU", "--attention-mode=sdpa_mask"))
      for mode in ("flex", "varlen")),
    ({"num_iterations": None, "target_param_data_ratio": -1}, ("--num-iterations", "--target-flops")),
    ({"overlap": training.T - 1, "long_docs": "split"}, ("--overlap", f"{training.T - 2}")),
    ({"dtype": "float64"}, ("--dtype", "bfloat16")),
    ({"device_type": "gpu"}, ("--device-type", "cuda, mps or cpu")),
    ({"model_tag": "../elsewhere"}, ("--model-tag", "folder name")),
    ({"window_pattern": "SXL"}, ("window_pattern", "letters S")),
    ({"depth": 0}, ("depth", "expected >= 1")),
    ({"resume": "nowhere/checkpoint-3"}, ("--resume nowhere/checkpoint-3", "no such folder", "none")),
], ids=lambda value: ",".join(value) if isinstance(value, dict) else "")
def test_a_flag_that_cannot_be(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    refuse_new(*words, **settings)


def test_a_tokenizer_that_is_not_the_runs(workplace: Path, half_done: Path) -> None:
    other = workplace / "other"
    RustBPETokenizer.train_from_iterator(texts(100, seed=7), training.VOCAB_SIZE).save(other)
    refuse_old("--tokenizer", str(half_done / "tokenizer"), "--model-tag", tokenizer=other)
    succeed(tokenizer=half_done / "tokenizer", **SHORT)


# ---- a run that goes on ---------------------------------------------------------------------------------------------

def test_a_shard_that_changed_or_vanished(workplace: Path, half_done: Path) -> None:
    path = workplace / "data" / "shard_1.parquet"
    kept = path.read_bytes()
    write_shard(path, texts(96, seed=77))
    refuse_old(str(path), "changed since this run began", "--model-tag")
    path.unlink()
    refuse_old(str(path), "gone", "--model-tag")
    path.write_bytes(kept)
    write_shard(workplace / "data" / "shard_2b.parquet", texts(96, seed=78))  # one that came later does not matter
    succeed(**SHORT)


def test_a_checkpoint_that_is_not_there(half_done: Path) -> None:
    wrong = half_done / "checkpoints" / "checkpoint-5"
    refuse_old(str(wrong), "no such folder", "checkpoint-4, checkpoint-2", resume=wrong)
    refuse_old(str(half_done / "logs"), "trainer_state.json", resume=half_done / "logs")


def test_a_forced_start_with_bad_data_does_not_cost_the_old_run(workplace: Path, half_done: Path) -> None:
    refuse_old("no such data folder", resume="scratch", force=True, data_path=workplace / "nowhere")
    refuse_old("--total-batch-size", resume="scratch", force=True, total_batch_size=1000)


def damage(path: Path, how: str) -> None:
    """Cut a file, change a bit of it, or lose it."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] if how == "cut" else data[:len(data) // 2] + bytes([data[len(data) // 2] ^ 4])
                     + data[len(data) // 2 + 1:])
    if how == "lose":
        path.unlink()


@pytest.mark.parametrize(("how", "name", "word"), [
    ("cut", checkpoint.MODEL_NAME, "torn"), ("flip", checkpoint.OPTIMIZER_NAME, "rotten"),
    ("lose", checkpoint.STATE_NAME, "never finished")])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
        workplace: Path, reference: Path, half_done: Path, how: str, name: str, word: str) -> None:
    path = half_done / "checkpoints" / "checkpoint-4"
    damage(path / name, how)
    if how == "cut":  # and where that is damaged too, the run begins again
        damage(path.with_name("checkpoint-2") / name, how)
    refuse_old(str(path / name), word, resume=path)
    outcome = succeed(**SHORT)
    assert "checkpoint checkpoint-4 is passed over" in outcome.err and word in outcome.err
    assert str(path / name) in outcome.err and ("at step 2" in outcome.out) == (how != "cut")
    assert state_of(half_done / "checkpoints" / "final") == state_of(reference / "checkpoints" / "final")


# ---- in processes of their own --------------------------------------------------------------------------------------

def limit_files(num_bytes: int) -> None:
    """No file of this process can be larger: the system call fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def fail(*words: str, world_size: int = 2, limit: int | None = None, **settings: Any) -> None:
    """All processes end by themselves with an exit code that is not 0, and the sentence stands there once. `limit`:
    bytes that a file may have."""
    hook = None if limit is None else partial(limit_files, limit)
    group = training.start(world_size, hook=hook, **{**SHORT, **settings})
    assert group.wait() == [1] * world_size, group.text()
    text = group.text()
    assert text.count("error: ") == 1 and "Traceback" not in text, text
    for word in words:
        assert word in text, text


def test_a_disk_that_is_full_while_saving(workplace: Path, half_done: Path) -> None:
    """On one process: tests/test_faults.py."""
    before = fingerprint(half_done / "checkpoints")
    limit = (half_done / "checkpoints" / "checkpoint-4" / checkpoint.MODEL_NAME).stat().st_size // 2
    assert (half_done / "logs" / "train.jsonl").stat().st_size + 4096 < limit, "the log would fail first"
    fail("checkpoint final could not be written to", "older checkpoints are untouched", limit=limit)
    assert fingerprint(half_done / "checkpoints") == before
    succeed(**SHORT)


def test_a_disk_that_is_full_at_the_start_leaves_no_run_and_binds_nobody(workplace: Path) -> None:
    fail(world_size=1, limit=2000)
    assert not (training.run_dir() / "config.json").exists()
    for i in range(2):
        write_shard(workplace / "new" / f"{i}.parquet", texts(96, seed=50 + i))
    succeed(**SHORT, data_path=workplace / "new")


def test_an_error_ends_all_processes_and_is_told_once(workplace: Path, half_done: Path) -> None:
    before = fingerprint(half_done)
    fail("2 processes but only 1 lanes", "--lanes", lanes=1, model_tag="new")
    assert not training.run_dir("new").exists()
    fail("--seed", "--model-tag", seed=1)
    (workplace / "data" / "shard_0.parquet").unlink()
    fail("shard_0.parquet", "gone")
    assert fingerprint(half_done) == before
