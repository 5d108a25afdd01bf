"""Shards that cannot be used, and disks that fill: each is one sentence that names the file, what it is, what it should
be and the way out; nothing half-written stays; and the way out, followed to the letter, is one."""

import builtins
import contextlib
import errno
import io
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanochat.common import hash_file, run_main
from nanochat.tokenizer import RustBPETokenizer
from nanochat.tokens import open_tokens, read_manifest
from scripts import tok_shards, verify
from tests import training
from tests.training import checkpoints, digests, fingerprint, state_of, texts, write_shard

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
    """Training that ends with exit code 1 and one sentence with all these words."""
    message = training.refuse(**settings(**changed))
    for word in words:
        assert str(word) in message, message
    return message


def refuse_new(*words: Any, **changed: Any) -> str:
    """`refuse`, and no run is left that would be in the way."""
    message = refuse(*words, **changed)
    assert not (training.run_dir() / "config.json").exists() and checkpoints() == []
    assert not (training.run_dir() / "data_manifest.json").exists()
    return message


def check_set(folder: Path) -> None:
    """What anybody may see of shards at any time: pairs are whole, manifests name what is there and is right."""
    for path in [*folder.rglob("*.idx"), *folder.rglob("*.bin")]:
        open_tokens(path)
    for path in folder.rglob("manifest.json"):
        manifest = read_manifest(path.parent)
        assert manifest is not None
        for name, record in manifest["shards"].items():
            assert hash_file(path.parent / f"{name}.bin") == record["bin_hash"]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


# ---- pairs that are damaged -----------------------------------------------------------------------------------------

def patch(path: Path, at: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at:at + len(data)] = data
    path.write_bytes(raw)


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


REDO = "delete it and rerun scripts.tok_shards"
DAMAGE: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...]]] = {  # which file, what happens, what is said
    "truncated .bin": (".bin", lambda p: cut(p, 11), (".5 tokens on disk, but the offsets", REDO)),
    "truncated .idx": (".idx", lambda p: cut(p, 8), ("bytes, expected", "entries", REDO)),
    "magic": (".idx", lambda p: patch(p, 0, b"MMID"), ("that begin with b'MMID", REDO)),
    "version": (".idx", lambda p: patch(p, 4, b"\7"), ("format version 7", "expected version 1", REDO)),
    "no .idx": (".idx", Path.unlink, ("not there, but s0.bin needs it", "delete s0.bin and rerun scripts.tok_shards")),
    "no .bin": (".bin", Path.unlink, ("not there, but s0.idx needs it", "delete s0.idx and rerun scripts.tok_shards")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_pair_is_refused_found_and_made_again(workplace: Path, made: Path, name: str) -> None:
    ending, damage, words = DAMAGE[name]
    path = shard(workplace).with_suffix(ending)
    damage(path)
    message = refuse_new(path, *words)
    verified = check(workplace / "shards")
    assert verified.code == 1 and f"PROBLEM {path}: " in verified.out and "1 problem(s)" in verified.out
    assert words[0] in verified.out, "verify says what training says"
    to_delete = path.with_name(message.split("delete ")[1].split()[0]) if name.startswith("no ") else path
    to_delete.unlink()
    assert tokenize(workplace).code == 0
    assert tree(workplace / "shards") == tree(made / "shards")


@pytest.mark.parametrize("name", ["truncated .bin", "no .idx"])
def test_a_damaged_pair_for_validation_is_refused_before_training(workplace: Path, name: str) -> None:
    ending, damage, words = DAMAGE[name]
    path = shard(workplace, "val").with_suffix(ending)
    damage(path)
    refuse_new(path, words[0].replace("s0.", "s2."))


def test_an_empty_shard_is_named_and_may_be_deleted(workplace: Path) -> None:
    empty = workplace / "shards" / "train" / "data" / "empty.idx"
    empty.write_bytes(struct.pack("<4sIII", b"GPTS", 1, 2, 0) + bytes(8))
    empty.with_suffix(".bin").write_bytes(b"")
    refuse_new(empty, "no document in it (0 entries)", "delete the pair")
    assert f"PROBLEM {empty}: no document in it" in check(workplace / "shards").out
    empty.unlink()
    empty.with_suffix(".bin").unlink()
    succeed(num_iterations=1, save_every=-1)


def test_a_lost_bin_makes_no_run_on_less_data(workplace: Path) -> None:
    """Data are the .bin files that are found; an .idx alone tells that one is lost."""
    lost = workplace / "shards" / "train" / "data" / "s9.idx"
    shutil.copy(shard(workplace).with_suffix(".idx"), lost)
    refuse_new(lost.with_suffix(".bin"), "not there, but s9.idx needs it")
    lost.rename(lost.with_name(".s9.idx"))  # what is hidden is no data
    succeed(num_iterations=1, save_every=-1)


# ---- damage that opening a pair does not see ------------------------------------------------------------------------

def swap_offsets(idx: Path) -> None:
    """Two neighbouring offsets change places, so that an entry ends before it begins; the ends of the index stay."""
    pair = open_tokens(idx)
    k = len(pair) // 2
    a, b = pair.table("offsets", k, k + 2).tolist()
    assert a < b
    patch(idx, 16 + 8 * k, struct.pack("<qq", b, a))


def long_prefix(idx: Path) -> None:
    n = len(open_tokens(idx))
    patch(idx, 16 + 8 * (n + 1), np.full(n, 60_000, "<u2").tobytes())


@pytest.mark.parametrize(("damage", "said"), [
    (swap_offsets, "run backwards"),
    (long_prefix, "is shorter than its prefix"),
], ids=["offsets run backwards", "prefixes longer than entries"])
def test_what_the_index_says_is_checked_where_it_is_used(
        workplace: Path, made: Path, damage: Callable[[Path], None], said: str) -> None:
    idx = shard(workplace).with_suffix(".idx")
    damage(idx)
    words = (idx, said, "scripts.verify tells", "delete it and rerun scripts.tok_shards")
    refuse_new(*words)
    refuse(*words, plan="off")
    assert checkpoints() == []
    found = check(workplace / "shards")
    assert found.code == 1 and f"PROBLEM {idx}: " in found.out and said in found.out
    assert f"{idx.with_suffix('.bin')}: idx_hash is" in found.out
    idx.unlink()
    assert tokenize(workplace).code == 0 and tree(workplace / "shards") == tree(made / "shards")
    refuse(idx.with_suffix(".bin"), "changed since this run began", "--model-tag")  # it has pinned the damaged one
    succeed(num_iterations=1, save_every=-1, model_tag="another")
    succeed(num_iterations=1, save_every=-1, resume="scratch", force=True)


def spoil_ids(path: Path, value: int) -> int:
    """Some ids of a shard become one that the tokenizer does not have; returns how many."""
    ids = np.fromfile(path, "<u2")
    ids[7::50] = value
    ids.tofile(path)
    return len(ids[7::50])


def test_verify_finds_ids_outside_the_vocabulary(workplace: Path) -> None:
    path, value = shard(workplace), 65535
    num = spoil_ids(path, value)
    found = check(workplace / "shards")
    assert found.code == 1 and f"has ids outside the vocabulary of {training.VOCAB_SIZE:,}" in found.out
    assert found.out.count(f"PROBLEM {path}: entry") + found.out.count(" more problems") > min(num, verify.LISTED)
    (path.parent / "manifest.json").unlink()
    assert "no known bound" in check(path).out
    assert "outside the vocabulary" in check(path, "--tokenizer", str(workplace / "tokenizer")).out


@pytest.mark.parametrize(("split", "value"), [("train", training.VOCAB_SIZE), ("val", 65535)])
def test_training_names_the_shard_whose_ids_are_outside_the_vocabulary(workplace: Path, value: int, split: str
                                                                       ) -> None:
    path = shard(workplace, split)
    spoil_ids(path, value)
    refuse(f"{split}/data/{path.name}: entry ", f"holds the id {value:,}", f"vocabulary of {training.VOCAB_SIZE:,}",
           "verify", **({"eval_every": 1} if split == "val" else {}))
    assert checkpoints() == []


# ---- another tokenizer, another layout ------------------------------------------------------------------------------

def other_tokenizer(folder: Path) -> Path:
    RustBPETokenizer.train_from_iterator(texts(100, seed=7), training.VOCAB_SIZE).save(folder)
    return folder


def test_shards_of_another_tokenizer_are_refused_and_theirs_lies_beside_them(workplace: Path) -> None:
    other = other_tokenizer(workplace / "other")
    refuse(workplace / "shards" / "train" / "data", "were made with tokenizer", "--tokenizer-dir", tokenizer_dir=other)
    assert checkpoints() == []
    found = check(workplace / "shards", "--tokenizer", str(other))
    assert found.code == 1 and "made with tokenizer" in found.out
    shutil.rmtree(workplace / "tokenizer")  # the default one is not needed
    succeed(num_iterations=1, save_every=-1, model_tag="another")
    succeed(num_iterations=1, save_every=-1, model_tag="named", tokenizer_dir=workplace / "shards" / "tokenizer")


def test_shards_without_a_manifest_of_too_large_a_vocabulary_are_refused(workplace: Path, monkeypatch: Any) -> None:
    for path in (workplace / "shards").rglob("manifest.json"):
        path.unlink()
    monkeypatch.setattr(RustBPETokenizer, "get_vocab_size", lambda self: 70_000)
    refuse("its ids are uint16, too small for a vocabulary of 70,000", "--tokenizer-dir")


@pytest.mark.parametrize("plan", ["error", "off"])
def test_a_start_with_the_wrong_tokenizer_is_not_in_the_way(workplace: Path, plan: str) -> None:
    refuse_new("were made with tokenizer", tokenizer_dir=other_tokenizer(workplace / "other"), plan=plan)
    succeed(num_iterations=1, save_every=-1)


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


@pytest.mark.parametrize("name", ["truncated .bin", "no .idx"])
def test_a_run_whose_shard_is_damaged_goes_on_when_it_is_back(workplace: Path, half_done: Path, reference: Path,
                                                              name: str) -> None:
    ending, damage, _ = DAMAGE[name]
    before = fingerprint(half_done)
    path = shard(workplace).with_suffix(ending)
    kept = path.read_bytes()
    damage(path)
    refuse("s0.")
    assert fingerprint(half_done) == before
    path.write_bytes(kept)
    succeed()
    assert state_of(half_done / "checkpoints" / "final") == state_of(reference / "checkpoints" / "final")


def test_a_run_whose_shard_is_another_one_is_refused(workplace: Path, half_done: Path) -> None:
    before = fingerprint(half_done)
    for ending in (".bin", ".idx"):
        shutil.copy(shard(workplace, "val").with_suffix(ending), shard(workplace).with_suffix(ending))
    (shard(workplace).parent / "manifest.json").unlink()
    refuse(shard(workplace), "changed since this run began", "--model-tag")
    assert fingerprint(half_done) == before


# ---- folders that cannot be written ---------------------------------------------------------------------------------

@pytest.fixture(params=["permissions", "a failing call"])
def read_only(request: pytest.FixtureRequest, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which nothing can be made."""
    folder = workplace / "read-only"
    folder.mkdir()
    if request.param == "permissions":
        folder.chmod(0o555)
        if os.access(folder, os.W_OK):
            pytest.skip("permissions do not bind this user (root)")
        yield folder
        folder.chmod(0o755)
        return
    mkdir = os.mkdir

    def refusing(path: Any, *args: Any, **kwargs: Any) -> None:
        if folder in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", refusing)
    yield folder


def test_a_run_into_a_folder_that_cannot_be_written(workplace: Path, read_only: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    data = workplace / "shards"
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(read_only))
    message = training.refuse(**{**SMALL, "data_path": data})
    assert str(read_only / "runs") in message and "Permission denied" in message
    assert list(read_only.iterdir()) == []


# ---- a disk that fills ----------------------------------------------------------------------------------------------

class Disk:
    """Room for so many bytes in all new files; the write that goes beyond it fails, and so does every one after it.
    `written` tells how many bytes were asked for. (A log that is appended to is no new file.)"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: float = math.inf):
        self.room, self.written, self.failed = room, 0, False
        for owner, name in ((os, "fdopen"), (builtins, "open")):
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, opens: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = opens(path, mode, *args, **kwargs)
            return File(file, self) if mode in ("wb", "xb") else file

        return opened

    def take(self, num_bytes: int) -> None:
        self.written += num_bytes
        if self.written > self.room:
            self.failed = True
            raise OSError(errno.ENOSPC, "No space left on device")


class File:
    """A file on such a disk."""

    def __init__(self, file: Any, disk: Disk):
        self.file, self.disk = file, disk

    def write(self, data: Any) -> int:
        self.disk.take(memoryview(data).nbytes)
        return self.file.write(data)

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class Failing:
    """A function of `os` that fails, as on a full disk, when it is called for the so-manieth time, and after that
    unless `once`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, call: float = math.inf, *, once: bool = False):
        self.original, self.call, self.calls, self.once = getattr(os, name), call, 0, once
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.call or (self.calls > self.call and not self.once):
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.original(*args, **kwargs)


def fails_in_shards(workplace: Path, out: Path, expected: dict[str, bytes]) -> int:
    """After tok_shards into a full disk: it said so, nothing is torn, and it goes on. How many pairs there were."""
    pairs = len(list(out.rglob("*.idx")))
    check_set(out)
    assert tokenize(workplace, out=out.name).code == 0
    assert tree(out) == expected
    return pairs


def told(outcome: training.Outcome) -> None:
    """One or more sentences that say so, each about a file; no traceback."""
    assert outcome.code == 1 and "Traceback" not in outcome.err, outcome.err
    sentences = [line for line in outcome.err.splitlines() if line.startswith(("error: ", "failed: "))]
    assert sentences and all("No space left on device" in line for line in sentences), outcome.err


def test_a_disk_that_fills_while_shards_are_written(workplace: Path, made: Path) -> None:
    """At any byte of any file: tokenizer, pairs, records, manifests."""
    expected = tree(made / "shards")
    with pytest.MonkeyPatch.context() as patched:
        needed = Disk(patched)
        assert tokenize(workplace, out="all").code == 0
    assert tree(workplace / "all") == expected
    seen = set()
    for room in [0, *range(1, needed.written - 1, needed.written // 6), needed.written - 1]:
        with pytest.MonkeyPatch.context() as patched:
            disk = Disk(patched, room)
            told(tokenize(workplace, out=f"full-{room}"))
        assert disk.failed
        assert not list((workplace / f"full-{room}").rglob("*.tmp"))
        seen.add(fails_in_shards(workplace, workplace / f"full-{room}", expected))
    assert seen >= {0, 1, 2, 3}, "the disk was full before, between and behind the pairs"


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_fills_when_shards_are_forced_to_it_or_named(workplace: Path, made: Path, function: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        counted = Failing(patched, function)
        assert tokenize(workplace, out="all").code == 0
    assert counted.calls > 10
    seen = set()
    for call in range(1, counted.calls + 1, 1 + counted.calls // 6):
        out = workplace / f"full-{call}"
        with pytest.MonkeyPatch.context() as patched:
            Failing(patched, function, call)
            told(tokenize(workplace, out=out.name))
        seen.add(fails_in_shards(workplace, out, tree(made / "shards")))
    assert seen >= {0, 1, 2}


@pytest.mark.parametrize("how", ["write", "fsync", "rename"])
def test_a_disk_that_fills_while_a_run_on_shards_saves(half_done: Path, reference: Path, how: str) -> None:
    """At the first, some middle and the last of its writes; each time what was there stays, and at last it goes on."""
    make = Disk if how == "write" else lambda patched, *at: Failing(patched, how, *at, once=True)
    shutil.copytree(half_done, half_done.with_name("counted"))
    with pytest.MonkeyPatch.context() as patched:
        counted = make(patched)
        succeed(model_tag="counted", plan="off")
    last = {"write": lambda: counted.written * 0.99, "rename": lambda: counted.calls,
            "fsync": lambda: counted.calls - 2}[how]()  # the last ones come after the rename and at the end of the log
    before = fingerprint(half_done / "checkpoints")
    for share in (0, 0.3, 0.6, 1):
        at = max(1, int(last * share))
        with pytest.MonkeyPatch.context() as patched:
            make(patched, at)
            message = refuse("No space left on device", plan="off")
        assert "checkpoint final could not be written" in message and "older checkpoints are untouched" in message
        assert fingerprint(half_done / "checkpoints") == before
    succeed()
    assert state_of(half_done / "checkpoints" / "final") == state_of(reference / "checkpoints" / "final")
    assert len(digests()) == 4


def test_a_full_disk_is_told_with_the_name_of_the_file(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, 0)
    message = refuse("No space left on device")
    assert str(training.run_dir()) in message


def test_a_disk_that_stays_full_does_not_hide_what_could_not_be_saved(half_done: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    Failing(monkeypatch, "fsync", 1)
    message = refuse("No space left on device", plan="off")
    assert "checkpoint final could not be written" in message
