"""Shards that cannot be used, and disks that fill: each is one sentence that names the file, what it is, what it should
be and the way out; nothing half-written stays; and the way out, followed to the letter, is one."""

import contextlib
import errno
import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanochat.common import hash_file, run_main
from nanochat.tokenizer import RustBPETokenizer
from nanochat.tokens import open_tokens, read_manifest
from scripts import status, tok_shards, verify
from tests import faults, training
from tests.token_files import truncate
from tests.training import checkpoints, fingerprint, state_of, texts, write_shard

SMALL: dict[str, Any] = {"max_seq_len": 64, "total_batch_size": 64 * 8, "lanes": 8, "depth": 1, "num_iterations": 4,
                         "save_every": 2, "data_format": "shards", "eval_tokens": 64 * 8}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text/ with two files for training and one for validation, and shards/ made of them."""
    folder = tmp_path_factory.mktemp("made")
    with training.workplace(folder):
        for i in range(3):
            write_shard(folder / "text" / f"s{i}.parquet", texts(40, seed=i))
        assert tokenize(folder).code == 0
    return folder


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, made: Path) -> Iterator[Path]:
    with training.workplace(tmp_path) as path:
        for name in ("text", "shards"):
            shutil.copytree(made / name, path / name)
        yield path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, made: Path) -> Path:
    """A completed run on these shards, with checkpoints 2 and final."""
    with training.workplace(tmp_path_factory.mktemp("reference")) as path:
        shutil.copytree(made / "shards", path / "shards")
        succeed()
        return training.run_dir()


def shard(workplace: Path, split: str = "train") -> Path:
    return workplace / "shards" / split / "data" / ("s0.bin" if split == "train" else "s2.bin")


# ---- the commands ---------------------------------------------------------------------------------------------------

def command(function: Callable[[], int | None]) -> training.Outcome:
    """What a script comes to, through the last line of every script."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        run_main(function)
    return training.Outcome(int(end.value.code or 0), out.getvalue(), err.getvalue())


def tokenize(workplace: Path, *flags: str, out: str = "shards") -> training.Outcome:
    return command(lambda: tok_shards.main([
        f"--input-dir={workplace / 'text'}", f"--output-dir={workplace / out}", "--num-workers=1",
        f"--tokenizer={workplace / 'tokenizer'}", "--max-length=400", "--overlap-size=40", *flags]))


def check(path: Path, *flags: str) -> training.Outcome:
    return command(lambda: verify.main([str(path), *flags]))


def settings(**changed: Any) -> dict[str, Any]:
    return {**SMALL, "data_path": Path(os.environ["NANOCHAT_BASE_DIR"]) / "shards", **changed}


def succeed(**changed: Any) -> training.Outcome:
    return training.succeed(**settings(**changed))


def refuse(*words: Any, **changed: Any) -> str:
    """Training that ends with exit code 1, one sentence with all these words, and no checkpoint."""
    message = training.refuse(**settings(**changed))
    assert all(str(word) in message for word in words), message
    return message


def refuse_new(*words: Any, **changed: Any) -> str:
    """`refuse`, and no run is left that would be in the way."""
    message = refuse(*words, **changed)
    assert not (training.run_dir() / "config.json").exists() and checkpoints() == []
    assert not (training.run_dir() / "data_manifest.json").exists()
    return message


def tree(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


# ---- pairs that are damaged -----------------------------------------------------------------------------------------

DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {  # to which file, what, and what is said
    "cut .bin": (".bin", lambda path: truncate(path, 11), ".5 tokens on disk, but the offsets"),
    "no .idx": (".idx", Path.unlink, ".bin needs it"),
}


@pytest.mark.parametrize(("name", "split"), [("cut .bin", "train"), ("cut .bin", "val"), ("no .idx", "train")])
def test_a_damaged_pair_is_refused_found_and_made_again(workplace: Path, made: Path, name: str, split: str) -> None:
    ending, damage, said = DAMAGE[name]
    path = shard(workplace, split).with_suffix(ending)
    damage(path)
    refuse_new(path, said, "rerun scripts.tok_shards")
    verified = check(workplace / "shards")
    assert verified.code == 1 and f"PROBLEM {path}: " in verified.out and said in verified.out
    path.with_suffix(".bin" if name == "no .idx" else ending).unlink()  # what the sentence says
    assert tokenize(workplace).code == 0
    assert tree(workplace / "shards") == tree(made / "shards")
    succeed(num_iterations=1, save_every=-1, resume="scratch", force=True)


def test_a_lost_bin_makes_no_run_on_less_data(workplace: Path) -> None:
    """Data are the .bin files that are found; an .idx alone tells that one is lost."""
    lost = workplace / "shards" / "train" / "data" / "s9.idx"
    shutil.copy(shard(workplace).with_suffix(".idx"), lost)
    refuse_new(lost.with_suffix(".bin"), "not there, but s9.idx needs it")
    lost.rename(lost.with_name(".s9.idx"))  # what is hidden is no data
    succeed(num_iterations=1, save_every=-1)


@pytest.mark.parametrize(("split", "value"), [("train", training.VOCAB_SIZE), ("val", 65535)])
def test_training_names_the_shard_whose_ids_are_outside_the_vocabulary(workplace: Path, value: int, split: str
                                                                       ) -> None:
    path = shard(workplace, split)
    ids = np.fromfile(path, "<u2")
    ids[7::50] = value
    ids.tofile(path)
    refuse(f"{split}/data/{path.name}: entry ", f"holds the id {value:,}", f"vocabulary of {training.VOCAB_SIZE:,}",
           "verify", **({"eval_every": 1} if split == "val" else {}))
    assert checkpoints() == []


# ---- another tokenizer, another layout ------------------------------------------------------------------------------

def test_shards_of_another_tokenizer_are_refused_and_theirs_lies_beside_them(workplace: Path) -> None:
    other = workplace / "other"
    RustBPETokenizer.train_from_iterator(texts(100, seed=7), training.VOCAB_SIZE).save(other)
    for plan in ("error", "off"):
        refuse_new(workplace / "shards" / "train" / "data", "were made with tokenizer", "--tokenizer",
                   tokenizer=other, plan=plan)
    found = check(workplace / "shards", "--tokenizer", str(other))
    assert found.code == 1 and "made with tokenizer" in found.out
    shutil.rmtree(workplace / "tokenizer")  # the default one is not needed
    succeed(num_iterations=1, save_every=-1)
    succeed(num_iterations=1, save_every=-1, model_tag="named", tokenizer=workplace / "shards" / "tokenizer")


def test_a_start_with_the_wrong_layout_is_not_in_the_way(workplace: Path) -> None:
    text = {"data_path": workplace / "text", "data_format": "text"}
    refuse_new("--packing binned", "--packing bestfit", packing="binned", **text)
    succeed(num_iterations=1, save_every=-1, **text)


def test_the_other_format_is_told(workplace: Path) -> None:
    refuse_new(workplace / "text", "no .bin file", "--data-format text", data_path=workplace / "text")
    refuse_new(workplace / "shards", "no .parquet", "--data-format shards", data_format="text")


def test_entries_that_are_longer_than_a_row_name_the_flag(workplace: Path) -> None:
    refuse("train/data/s", "a row of the binned layout 65", "--max-length 64", packing="binned")
    assert tokenize(workplace, "--max-length=64", "--overlap-size=8", out="short").code == 0
    succeed(num_iterations=1, save_every=-1, packing="binned", data_path=workplace / "short", model_tag="short")


# ---- a run whose shards changed -------------------------------------------------------------------------------------

@pytest.fixture
def half_done(workplace: Path, reference: Path) -> Path:
    """The reference run as it was after step 2."""
    shutil.copytree(reference, training.run_dir())
    shutil.rmtree(training.run_dir() / "checkpoints" / "final")
    manifest = training.run_dir() / "data_manifest.json"
    manifest.write_text(manifest.read_text().replace(str(reference.parents[1].resolve()), str(workplace.resolve())))
    return training.run_dir()


def test_a_run_whose_shard_is_damaged_or_another_one_goes_on_when_it_is_back(workplace: Path, half_done: Path,
                                                                             made: Path, reference: Path) -> None:
    before, path = fingerprint(half_done), shard(workplace)
    truncate(path, 11)
    refuse("s0.")
    for ending in (".bin", ".idx"):
        shutil.copy(shard(workplace, "val").with_suffix(ending), path.with_suffix(ending))
    (path.parent / "manifest.json").unlink()
    refuse(path, "changed since this run began", "--model-tag")
    assert fingerprint(half_done) == before
    shutil.copytree(made / "shards", workplace / "shards", dirs_exist_ok=True)
    succeed()
    assert state_of(half_done / "checkpoints" / "final") == state_of(reference / "checkpoints" / "final")


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_mapped_file_that_is_cut_short_under_a_run_is_told_wherever_one_looks(workplace: Path, ending: str,
                                                                                capsys: Any) -> None:
    """Regression: the process ended by SIGBUS without a word."""
    path, flags = shard(workplace).with_suffix(ending), {**SMALL, "data_path": workplace / "shards", "save_every": 100}
    cut = partial(training.after_step, 2, partial(truncate, path, 0))
    group = training.start(hook=cut, **{**flags, "num_iterations": 2000})
    assert group.wait() == [-signal.SIGBUS]
    told = group.text()
    assert "die of SIGBUS, one was cut short: scripts.status run and the next launch name it" in told
    assert "Fatal Python error: Bus error" in told and "nanochat/tokens.py" in told
    assert status.main(["run"]) == 0 and f"its process is gone; {path}: " in capsys.readouterr().out
    refuse(path)


# ---- disks that cannot be written -----------------------------------------------------------------------------------

def test_a_disk_that_fills_while_shards_are_written(workplace: Path, made: Path) -> None:
    """From any write, fsync or rename on, of tokenizer, pairs, records or manifests: it is told of a file, what is
    there is whole, and the same command goes on to the same bytes."""
    changes = r"(write|fsync|replace) "
    with faults.watching(workplace / "all", match=changes) as counted:
        assert tokenize(workplace, out="all").code == 0
    total, seen = len(counted.made), set()
    assert tree(workplace / "all") == tree(made / "shards") and total > 30
    for at in [*range(0, total, total // 10), total - 1]:
        out = workplace / f"full-{at}"
        with faults.watching(out, at=at, onwards=True, match=changes, act=no_room):
            told = tokenize(workplace, out=out.name)
        sentences = [line for line in told.err.splitlines() if line.startswith(("error: ", "failed: "))]
        assert told.code == 1 and "Traceback" not in told.err
        assert sentences and all("No space left on device" in line for line in sentences), told.err
        assert not list(out.rglob("*.tmp"))
        pairs = [open_tokens(path) for path in out.rglob("*.idx")]
        for path in out.rglob("manifest.json"):
            for name, record in (read_manifest(path.parent) or {})["shards"].items():
                assert hash_file(path.parent / f"{name}.bin") == record["bin_hash"]
        seen.add(len(pairs))
        assert tokenize(workplace, out=out.name).code == 0 and tree(out) == tree(made / "shards")
    assert seen == {0, 1, 2, 3}, "the disk was full before, between and behind the pairs"


def no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
