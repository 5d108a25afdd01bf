"""Bad input to the main job, text or shards: each kind is one sentence that names the file or the flag and the way out,
an exit code that is not 0, and nothing half-written; and the way out, followed to the letter, is one."""

import contextlib
import errno
import io
import os
import resource
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import checkpoint
from nanochat.common import hash_file, run_main
from nanochat.tokenizer import RustBPETokenizer
from nanochat.tokens import open_tokens, read_manifest
from scripts import status, tok_shards, verify
from tests import faults, training
from tests.token_files import truncate
from tests.training import checkpoints, fingerprint, refuse, state_of, succeed, texts, write_shard

SHORT = {"num_iterations": 6, "save_every": 2}


workplace = training.in_workplace(**training.SMALL)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A completed run of six steps with checkpoints 2, 4 and final."""
    with training.workplace(tmp_path_factory.mktemp("reference"), **training.SMALL):
        succeed(**SHORT)
        return training.run_dir()


@pytest.fixture
def half_done(workplace, reference):
    """That run as it was after step 4, in this test's workplace."""
    shutil.copytree(reference, training.run_dir())
    shutil.rmtree(training.run_dir() / "checkpoints" / "final")
    return training.run_dir()


def told(*words, **settings):
    """Training that ends with exit code 1 and one sentence, which has all these words."""
    message = refuse(**{**SHORT, **settings})
    for word in words:
        assert str(word) in message, message
    return message


def refuse_new(*words, **settings):
    """A run that does not begin, and no run is left that would be in the way."""
    told(*words, **settings)
    assert not (training.run_dir() / "config.json").exists() and checkpoints() == []
    assert not (training.run_dir() / "data_manifest.json").exists()


def refuse_old(*words, **settings):
    """A run that does not go on, and no file of it has changed."""
    before = fingerprint(training.run_dir())
    told(*words, **settings)
    assert fingerprint(training.run_dir()) == before


# ---- data -----------------------------------------------------------------------------------------------------------

def test_no_data_that_can_be_used_and_no_tokenizer(workplace):
    refuse_new(str(workplace / "nowhere"), "no such data folder", "nanochat.dataset", data_path=workplace / "nowhere")
    (workplace / "empty").mkdir()
    refuse_new(str(workplace / "empty"), ".parquet", "--data-path", data_path=workplace / "empty")
    refuse_new(str(workplace / "nowhere"), val_path=workplace / "nowhere")
    refuse_new("climbmix", "nanochat.dataset", data_path=None)  # the download that never was
    path = write_shard(workplace / "one" / "only.parquet", texts(40, seed=1))
    refuse_new("only.parquet", "--val-path", data_path=path.parent)
    write_shard(path, [*texts(40, seed=1), None, None])
    refuse_new(str(path), "2 null(s)", "row group 1", data_path=path.parent, val_path=workplace / "data")
    twice = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"])
    pq.write_table(twice, path)
    refuse_new(str(path), "2 columns named `text`", data_path=path.parent, val_path=workplace / "data")
    odd = workplace / "odd" / os.fsdecode(b"\xff.parquet")
    shutil.copytree(workplace / "data", odd.parent)
    (odd.parent / "shard_0.parquet").rename(odd)
    refuse_new(str(odd), "its name is not UTF-8; rename it", data_path=odd.parent)
    for number, statistics in enumerate((True, False)):
        blank = workplace / f"blank{number}" / "0.parquet"
        blank.parent.mkdir()
        pq.write_table(pa.table({"text": [""] * 99}), blank, write_statistics=statistics, row_group_size=50)
        refuse_new(str(blank), "empty documents only", data_path=blank.parent, val_path=workplace / "data")
    (blank.parent / "0.parquet").unlink()
    (blank.parent / "0.jsonl").write_text('{"text": ""}\n' * 9)
    refuse_new(str(blank.with_suffix(".jsonl")), "empty documents only", val_path=blank.parent)
    torn = workplace / "torn.jsonl"
    torn.write_text('{"text": "one"}\n{torn\n')
    refuse_new(str(torn), "line 2: not JSON", "--strict", val_path=torn, strict=True)
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
    ({"model_tag": "-d12"}, ("--model-tag: got '-d12'", "no hyphen in front")),
    ({"window_pattern": "SXL"}, ("window_pattern", "letters S")),
    ({"depth": 0}, ("--depth: got 0", "expected at least 1")),
    ({"resume": "nowhere/checkpoint-3"}, ("no run 'nowhere/checkpoint-3'", "neither a tag")),
], ids=lambda value: ",".join(value) if isinstance(value, dict) else "")
def test_a_flag_that_cannot_be(settings, words):
    refuse_new(*words, **settings)


def test_a_tokenizer_that_is_not_the_runs(workplace, half_done):
    other = workplace / "other"
    RustBPETokenizer.train_from_iterator(texts(100, seed=7), training.VOCAB_SIZE).save(other)
    refuse_old("--tokenizer", str(half_done / "tokenizer"), "--model-tag", tokenizer=other)
    succeed(tokenizer=half_done / "tokenizer", **SHORT)


# ---- a run that goes on ---------------------------------------------------------------------------------------------

def test_a_shard_that_changed_or_vanished(workplace, half_done):
    path = workplace / "data" / "shard_1.parquet"
    kept = path.read_bytes()
    write_shard(path, texts(96, seed=77))
    refuse_old(str(path), "changed since this run began", "--model-tag")
    path.unlink()
    refuse_old(str(path), "gone", "--model-tag")
    path.write_bytes(kept)
    write_shard(workplace / "data" / "shard_2b.parquet", texts(96, seed=78))  # one that came later does not matter
    succeed(**SHORT)


def test_a_checkpoint_that_is_not_there(half_done):
    wrong = half_done / "checkpoints" / "checkpoint-5"
    refuse_old(str(wrong), "trainer_state.json: missing", resume=wrong)
    refuse_old("no run", str(half_done / "logs"), resume=half_done / "logs")


def test_a_forced_start_with_bad_data_does_not_cost_the_old_run(workplace, half_done):
    refuse_old("no such data folder", resume="scratch", force=True, data_path=workplace / "nowhere")
    refuse_old("--total-batch-size", resume="scratch", force=True, total_batch_size=1000)


def damage(path, how):
    """Cut a file, change a bit of it, or lose it."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] if how == "cut" else data[:len(data) // 2] + bytes([data[len(data) // 2] ^ 4])
                     + data[len(data) // 2 + 1:])
    if how == "lose":
        path.unlink()


@pytest.mark.parametrize(("how", "name", "word"), [
    ("cut", checkpoint.MODEL_NAME, "torn"), ("flip", checkpoint.OPTIMIZER_NAME, "rotten"),
    ("lose", checkpoint.STATE_NAME, "never finished")])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(workplace, reference, half_done, how, name, word):
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

def limit_files(num_bytes):
    """No file of this process can be larger: the system call fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def fail(*words, world_size=2, limit=None, **settings):
    """All processes end by themselves with an exit code that is not 0, and the sentence stands there once. `limit`:
    bytes that a file may have."""
    hook = None if limit is None else partial(limit_files, limit)
    group = training.start(world_size, hook=hook, collective_timeout_seconds=20, **{**SHORT, **settings})
    assert group.wait() == [1] * world_size, group.text()
    text = group.text()
    assert text.count("error: ") == 1 and "Traceback" not in text, text
    for word in words:
        assert word in text, text


def test_a_disk_that_is_full_while_saving(workplace, half_done):
    """On one process: tests/test_state_machine.py."""
    before = fingerprint(half_done / "checkpoints")
    limit = (half_done / "checkpoints" / "checkpoint-4" / checkpoint.MODEL_NAME).stat().st_size // 2
    assert (half_done / "logs" / "train.jsonl").stat().st_size + 4096 < limit, "the log would fail first"
    fail("checkpoint final could not be written to", "older checkpoints are untouched", limit=limit)
    assert fingerprint(half_done / "checkpoints") == before
    succeed(**SHORT)


def test_a_disk_that_is_full_at_the_start_leaves_no_run_and_binds_nobody(workplace):
    fail(world_size=1, limit=2000)
    assert not (training.run_dir() / "config.json").exists()
    for i in range(2):
        write_shard(workplace / "new" / f"{i}.parquet", texts(96, seed=50 + i))
    succeed(**SHORT, data_path=workplace / "new")


def test_an_error_ends_all_processes_and_is_told_once(workplace, half_done):
    before = fingerprint(half_done)
    fail("2 processes but only 1 lanes", "--lanes", lanes=1, model_tag="new")
    assert not training.run_dir("new").exists()
    fail("--seed", "--model-tag", seed=1)
    (workplace / "data" / "shard_0.parquet").unlink()
    fail("shard_0.parquet", "gone")
    assert fingerprint(half_done) == before


# ---- shards ---------------------------------------------------------------------------------------------------------

SHARDS = {"data_format": "shards", "lanes": 8, "num_iterations": 4}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """text/ with two files for training and one for validation, and shards/ made of them."""
    folder = tmp_path_factory.mktemp("made")
    with training.workplace(folder):
        for i in range(3):
            write_shard(folder / "text" / f"s{i}.parquet", texts(40, seed=i))
        assert tokenize(folder).code == 0
    return folder


@pytest.fixture
def sharded(workplace, made):
    """This test's workplace, with both."""
    for name in ("text", "shards"):
        shutil.copytree(made / name, workplace / name)
    return workplace


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory, made):
    """A completed run on these shards, with checkpoints 2 and final."""
    with training.workplace(tmp_path_factory.mktemp("sharded"), **training.SMALL) as path:
        shutil.copytree(made / "shards", path / "shards")
        train_shards()
        return training.run_dir()


def shard(sharded, split="train"):
    return sharded / "shards" / split / "data" / ("s0.bin" if split == "train" else "s2.bin")


def command(function):
    """What a script comes to, through the last line of every script."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        run_main(function)
    return training.Outcome(int(end.value.code or 0), out.getvalue(), err.getvalue())


def tokenize(sharded, *flags, out="shards"):
    return command(lambda: tok_shards.main([
        f"--input-dir={sharded / 'text'}", f"--output-dir={sharded / out}", "--num-workers=1",
        f"--tokenizer={sharded / 'tokenizer'}", "--max-length=400", "--overlap-size=40", *flags]))


def check(path, *flags):
    return command(lambda: verify.main([str(path), *flags]))


def settings(**changed):
    return {**SHORT, **SHARDS, "data_path": Path(os.environ["NANOCHAT_BASE_DIR"]) / "shards", **changed}


def train_shards(**changed):
    return succeed(**settings(**changed))


def told_of_shards(*words, **changed):
    return told(*words, **settings(**changed))


def refuse_new_shards(*words, **changed):
    refuse_new(*words, **settings(**changed))


def tree(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


# ---- pairs that are damaged -----------------------------------------------------------------------------------------

DAMAGE = {  # to which file, what, and what is said
    "cut .bin": (".bin", lambda path: truncate(path, 11), ".5 tokens on disk, but the offsets"),
    "no .idx": (".idx", Path.unlink, "not there; bring it back"),
}


@pytest.mark.parametrize(("name", "split"), [("cut .bin", "train"), ("cut .bin", "val"), ("no .idx", "train")])
def test_a_damaged_pair_is_refused_found_and_made_again(sharded, made, name, split):
    ending, damage, said = DAMAGE[name]
    path = shard(sharded, split).with_suffix(ending)
    damage(path)
    refuse_new_shards(path, said, "rerun scripts.tok_shards")
    verified = check(sharded / "shards")
    assert verified.code == 1 and f"PROBLEM {path}: " in verified.out and said in verified.out
    path.with_suffix(".bin" if name == "no .idx" else ending).unlink()  # what the sentence says
    assert tokenize(sharded).code == 0
    assert tree(sharded / "shards") == tree(made / "shards")
    train_shards(num_iterations=1, save_every=-1, resume="scratch", force=True)


def test_a_lost_bin_makes_no_run_on_less_data(sharded):
    """Data are the .bin files that are found; an .idx alone tells that one is lost."""
    lost = sharded / "shards" / "train" / "data" / "s9.idx"
    shutil.copy(shard(sharded).with_suffix(".idx"), lost)
    refuse_new_shards(lost.with_suffix(".bin"), "not there, but s9.idx needs it")
    lost.rename(lost.with_name(".s9.idx"))  # what is hidden is no data
    train_shards(num_iterations=1, save_every=-1)


@pytest.mark.parametrize(("split", "value"), [("train", training.VOCAB_SIZE), ("val", 65535)])
def test_training_names_the_shard_whose_ids_are_outside_the_vocabulary(sharded, value, split):
    """In a step, this ends the run; in an evaluation, it is logged, and the run continues."""
    path = shard(sharded, split)
    ids = np.fromfile(path, "<u2")
    ids[7::50] = value
    ids.tofile(path)
    words = (f"{split}/data/{path.name}: entry ", f"holds the id {value:,}", "verify",
             f"vocabulary of {training.VOCAB_SIZE:,}")
    if split == "train":
        told_of_shards(*words)
        assert checkpoints() == []
    else:
        train_shards(num_iterations=1, save_every=-1, eval_every=1)
        reasons = [event["reason"] for event in training.events("evaluation_failed")]
        assert len(reasons) == 2 and all(word in reason for word in words for reason in reasons)
        assert checkpoints() == ["final"]


# ---- another tokenizer, another layout ------------------------------------------------------------------------------

def test_shards_of_another_tokenizer_are_refused_and_theirs_lies_beside_them(sharded):
    other = sharded / "other"
    RustBPETokenizer.train_from_iterator(texts(100, seed=7), training.VOCAB_SIZE).save(other)
    for plan in ("error", "off"):
        refuse_new_shards(sharded / "shards" / "train" / "data", "were made with tokenizer", "--tokenizer",
                          tokenizer=other, plan=plan)
    found = check(sharded / "shards", "--tokenizer", str(other))
    assert found.code == 1 and "made with tokenizer" in found.out
    shutil.rmtree(sharded / "tokenizer")  # the default one is not needed
    train_shards(num_iterations=1, save_every=-1)
    train_shards(num_iterations=1, save_every=-1, model_tag="named", tokenizer=sharded / "shards" / "tokenizer")


def test_a_start_with_the_wrong_layout_is_not_in_the_way(sharded):
    text = {"data_path": sharded / "text", "data_format": "text"}
    refuse_new_shards("--packing binned", "--packing bestfit", packing="binned", **text)
    train_shards(num_iterations=1, save_every=-1, **text)


def test_the_other_format_is_told(sharded):
    refuse_new_shards(sharded / "text", "no .bin file", "--data-format text", data_path=sharded / "text")
    refuse_new_shards(sharded / "shards", "no .parquet", "--data-format shards", data_format="text")


def test_entries_that_are_longer_than_a_row_name_the_flag(sharded):
    told_of_shards("train/data/s", "a row of the binned layout 65", "--max-length 64", packing="binned")
    assert tokenize(sharded, "--max-length=64", "--overlap-size=8", out="short").code == 0
    train_shards(num_iterations=1, save_every=-1, packing="binned", data_path=sharded / "short", model_tag="short")


# ---- a run whose shards changed -------------------------------------------------------------------------------------

@pytest.fixture
def half_sharded(sharded, sharded_run):
    """The reference run as it was after step 2."""
    shutil.copytree(sharded_run, training.run_dir())
    shutil.rmtree(training.run_dir() / "checkpoints" / "final")
    manifest = training.run_dir() / "data_manifest.json"
    manifest.write_text(manifest.read_text().replace(str(sharded_run.parents[1].resolve()), str(sharded.resolve())))
    return training.run_dir()


def test_a_run_whose_shard_is_damaged_or_another_one_goes_on_when_it_is_back(sharded, half_sharded, made, sharded_run):
    before, path = fingerprint(half_sharded), shard(sharded)
    truncate(path, 11)
    told_of_shards("s0.")
    for ending in (".bin", ".idx"):
        shutil.copy(shard(sharded, "val").with_suffix(ending), path.with_suffix(ending))
    (path.parent / "manifest.json").unlink()
    told_of_shards(path, "changed since this run began", "--model-tag")
    assert fingerprint(half_sharded) == before
    shutil.copytree(made / "shards", sharded / "shards", dirs_exist_ok=True)
    train_shards()
    assert state_of(half_sharded / "checkpoints" / "final") == state_of(sharded_run / "checkpoints" / "final")


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_mapped_file_that_is_cut_short_under_a_run_is_told_wherever_one_looks(sharded, ending, capsys):
    """Regression: the process ended by SIGBUS without a word."""
    path, flags = shard(sharded).with_suffix(ending), {**SHARDS, "data_path": sharded / "shards", "save_every": 100}
    cut = partial(training.after_step, 2, partial(truncate, path, 0))
    group = training.start(hook=cut, **{**flags, "num_iterations": 2000})
    assert group.wait() == [-signal.SIGBUS]
    told = group.text()
    assert "die of SIGBUS, one was cut short: scripts.status run and the next launch name it" in told
    assert "Fatal Python error: Bus error" in told and "nanochat/tokens.py" in told
    assert status.main(["run"]) == 0 and f"its process is gone; {path}: " in capsys.readouterr().out
    told_of_shards(path)


# ---- disks that cannot be written -----------------------------------------------------------------------------------

def test_a_disk_that_fills_while_shards_are_written(sharded, made):
    """From any write, fsync or rename on, of tokenizer, pairs, records or manifests: it is told of a file, what is
    there is whole, and the same command goes on to the same bytes."""
    changes = r"(write|fsync|replace) "
    with faults.watching(sharded / "all", match=changes) as counted:
        assert tokenize(sharded, out="all").code == 0
    total, seen = len(counted.made), set()
    assert tree(sharded / "all") == tree(made / "shards") and total > 30
    for at in [*range(0, total, total // 10), total - 1]:
        out = sharded / f"full-{at}"
        with faults.watching(out, at=at, onwards=True, match=changes, act=no_room):
            told = tokenize(sharded, out=out.name)
        sentences = [line for line in told.err.splitlines() if line.startswith(("error: ", "failed: "))]
        assert told.code == 1 and "Traceback" not in told.err
        assert sentences and all("No space left on device" in line for line in sentences), told.err
        assert not list(out.rglob("*.tmp"))
        pairs = [open_tokens(path) for path in out.rglob("*.idx")]
        for path in out.rglob("manifest.json"):
            for name, record in (read_manifest(path.parent) or {})["shards"].items():
                assert hash_file(path.parent / f"{name}.bin") == record["bin_hash"]
        seen.add(len(pairs))
        assert tokenize(sharded, out=out.name).code == 0 and tree(out) == tree(made / "shards")
    assert seen == {0, 1, 2, 3}, "the disk was full before, between and behind the pairs"


def no_room():
    raise OSError(errno.ENOSPC, "No space left on device")
