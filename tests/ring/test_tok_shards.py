"""scripts.tok_shards writes the same bytes with any number of workers and tasks, and after it was
killed anywhere."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat import common
from nanochat.common import hash_file
from nanochat.files import MANIFEST_NAME, data_at, find_files
from nanochat.integrations.megatron_order import find_pairs
from nanochat.pretokenize import Pretokenizer
from nanochat.splits import pin_files
from nanochat.text import Selection
from nanochat.tokenizer import RustBPETokenizer
from nanochat.tokens import open_tokens, read_manifest
from scripts import tok_shards, verify
from tests import crashes
from tests.finished import command
from tests.token_files import fresh_ids
from tests.toy import some_texts, tree, write_jsonl, write_parquet
from tests.training import PATIENCE_S, wait_for

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    RustBPETokenizer.train_from_iterator(some_texts(200, seed=9), 300).save(folder)
    return folder


@pytest.fixture
def raw(tmp_path):
    """Two buckets, three formats, five files."""
    for n, ending in enumerate((".jsonl", ".jsonl.gz", ".jsonl")):
        write_jsonl(tmp_path / "raw" / "web" / f"{n}{ending}", some_texts(30 + 10 * n, seed=n))
    for n in range(2):
        write_parquet(
            tmp_path / "raw" / "code" / "deep" / f"{n}.parquet", some_texts(25, seed=10 + n)
        )
    return tmp_path / "raw"


def arguments(raw, out, tokenizer, *more):
    return [
        "--input-dir",
        str(raw),
        "--output-dir",
        str(out),
        "--tokenizer",
        str(tokenizer),
        "--max-length",
        "32",
        "--overlap-size",
        "8",
        *map(str, more),
    ]


def run(raw, out, tokenizer, *more, num_workers=1):
    return tok_shards.main(arguments(raw, out, tokenizer, f"--num-workers={num_workers}", *more))


def check_state(out):
    """At any time every visible pair is whole, and every file in a manifest matches it."""
    for idx in out.rglob("*.idx"):
        open_tokens(idx)
    for path in out.rglob("manifest.json"):
        for name, shard in read_manifest(path.parent)["shards"].items():
            assert hash_file(path.parent / f"{name}.bin") == shard["bin_hash"]
            assert hash_file(path.parent / f"{name}.idx") == shard["idx_hash"]


# ---- what comes out ------------------------------------------------------------------------------


def test_documents_manifests_and_tokenizer(raw, tmp_path, tokenizer, capsys):
    out, real = tmp_path / "out", [path.read_text() for path in sorted(ROOT.glob("nanochat/*.py"))]
    odd = [*real, "na\xefve \u4e2d\u6587 \U0001f642  \u180e\r\n\t", "", " " * 3000]
    write_jsonl(raw / "real" / "0.jsonl.gz", odd)
    write_parquet(raw / "real" / "1.parquet", odd)
    assert run(raw, out, tokenizer) == 0
    loaded = RustBPETokenizer.from_directory(out / "tokenizer")
    assert loaded.fingerprint == RustBPETokenizer.from_directory(tokenizer).fingerprint
    for shard, texts in {
        "train/web/0": some_texts(30),
        "train/web/1": some_texts(40, seed=1),
        "val/web/2": some_texts(50, seed=2),
        "train/code/deep__0": some_texts(25, seed=10),
        "val/code/deep__1": some_texts(25, seed=11),
        "train/real/0": odd,
        "val/real/1": odd,
    }.items():
        pair, manifest = open_tokens(out / f"{shard}.bin"), read_manifest((out / shard).parent)
        record = manifest["shards"][Path(shard).name]
        each_alone = [[*loaded.encode(text), loaded.get_bos_token_id()] for text in texts]
        assert fresh_ids(pair) == [t for ids in each_alone for t in ids]
        assert (record["documents"], record["entries"], record["tokens"]) == (
            len(texts),
            len(pair),
            pair.num_tokens,
        )
        assert len(pair) > len(texts) and pair.lengths(0, len(pair)).max() in (32, 33), (
            "nothing was cut"
        )
        assert manifest["tokenizer"]["fingerprint"] == loaded.fingerprint
    check_state(out)
    assert f"7 of 7 shards finished: {170 + 2 * len(odd)} documents" in capsys.readouterr().out


def test_the_tokenizer_in_the_input_folder_is_used_as_in_a_run_and_named(
    raw, tmp_path, base_dir, tokenizer, capsys
):
    """Regression: that of the base directory was used, and not named."""
    shutil.copytree(tokenizer, base_dir / "tokenizer")
    own = RustBPETokenizer.train_from_iterator(some_texts(200, seed=8), 280)
    own.save(raw / "tokenizer")
    out = tmp_path / "out"
    assert tok_shards.main([f"--input-dir={raw}", f"--output-dir={out}", "--num-workers=1"]) == 0
    assert RustBPETokenizer.from_directory(out / "tokenizer").fingerprint == own.fingerprint
    line = f"tokenizer: {raw}/tokenizer, 280 tokens, fingerprint {own.fingerprint}"
    assert line in capsys.readouterr().out


def test_names_may_be_as_long_as_the_file_system_allows(tmp_path, tokenizer):
    """Regression: names of temporary files were longer."""
    for stem in ("a" * 245, "b" * 245, "\u6f22" * 80):
        write_parquet(tmp_path / "raw" / f"{stem}.parquet", some_texts(25))
    assert run(tmp_path / "raw", tmp_path / "out", tokenizer) == 0
    check_state(tmp_path / "out")
    assert len(list((tmp_path / "out").rglob("*.bin"))) == 3


def test_a_wrong_column_is_one_sentence_before_anything_is_converted(tmp_path, tokenizer, capsys):
    """Regression: two lines for each input, then advice to run the same command again."""
    for n in range(4):
        write_parquet(tmp_path / "raw" / f"{n}.parquet", some_texts(25))
    with pytest.raises(ValueError, match=r"\.parquet: no `txt` column, only \['text'\]; name"):
        run(tmp_path / "raw", tmp_path / "out", tokenizer, "--text-field=txt")
    assert not (tmp_path / "out").exists() and not capsys.readouterr().err


def test_a_bucket_without_a_file_for_validation_is_named(tmp_path, tokenizer, capsys):
    """Regression: it had "a single file", although notes beside it are one, too."""
    write_jsonl(tmp_path / "raw" / "web" / "a.jsonl", some_texts(9))
    (tmp_path / "raw" / "web" / "notes.txt").write_text("a note")
    assert run(tmp_path / "raw", tmp_path / "out", tokenizer) == 0
    out = capsys.readouterr().out
    assert "web: it has no file to spare for validation" in out and "single file" not in out


def test_inputs_without_any_text_fail(tmp_path, tokenizer, capsys):
    for n in range(2):
        write_jsonl(tmp_path / "raw" / f"{n}.jsonl", [""] * 10)
    assert run(tmp_path / "raw", tmp_path / "out", tokenizer) == 1
    assert "failed: all 20 documents are empty; check --text-field" in capsys.readouterr().err


def test_a_file_too_small_for_val_fraction_has_no_pair_for_validation(tmp_path, tokenizer, capsys):
    """Regression: such a healthy file was an error, though a run on the text trains on it."""
    for name, count in (("a", 17), ("b", 60)):
        write_jsonl(tmp_path / "raw" / f"{name}.jsonl", some_texts(count))
    out = tmp_path / "out"
    assert run(tmp_path / "raw", out, tokenizer, "--val-fraction=0.05") == 0
    assert "a.jsonl: no document for one of the parts" in capsys.readouterr().out
    pairs = {path.relative_to(out).as_posix() for path in out.rglob("*.bin")}
    assert pairs == {"train/data/a.bin", "train/data/b.bin", "val/data/b.bin"}
    assert list(read_manifest(out / "val/data")["shards"]) == ["b"]
    check_state(out)
    assert run(tmp_path / "raw", out, tokenizer, "--val-fraction=0.05") == 0
    assert "made in" not in capsys.readouterr().out, "what is finished is kept"


def test_megatron_pairs_do_not_mix_with_shards(raw, tmp_path, tokenizer, capsys):
    out, megatron = tmp_path / "out", ("--format=megatron", "--max-length=0")
    assert run(raw, out, tokenizer, *megatron) == 0
    assert read_manifest(out / "train" / "web")["data_format"] == "megatron"
    with pytest.raises(
        ValueError, match=r"data_format megatron \(now default\); name another --output-dir"
    ):
        run(raw, out, tokenizer, "--max-length=0")
    capsys.readouterr()
    assert run(raw, out, tokenizer, *megatron) == 0
    assert "made in" not in capsys.readouterr().out, "finished pairs are kept"


def test_workers_and_tasks_on_one_folder_give_the_same_bytes(raw, tmp_path, tokenizer, capsys):
    assert run(raw, tmp_path / "one", tokenizer) == 0
    assert run(raw, tmp_path / "many", tokenizer, num_workers=3) == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "many")
    out = tmp_path / "two"
    assert run(raw, out, tokenizer, "--num-tasks", 2, "--task-index", 1) == 0
    assert not list(out.rglob("manifest.json"))
    assert run(raw, out, tokenizer, "--finish") == 1
    assert "missing: val/web/2.bin, made from web/2.jsonl" in capsys.readouterr().err
    assert run(raw, out, tokenizer, "--num-tasks", 2, "--task-index", 0) == 0
    assert run(raw, out, tokenizer, "--finish") == 0
    assert tree(out) == tree(tmp_path / "one")


# ---- failures ------------------------------------------------------------------------------------


def test_a_corrupt_input_fails_alone_and_the_next_command_completes_it(
    raw, tmp_path, tokenizer, capsys
):
    path, out = raw / "web" / "1.jsonl.gz", tmp_path / "out"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    assert run(raw, out, tokenizer) == 1
    output = capsys.readouterr()
    assert "failed: web/1.jsonl.gz" in output.err and "truncated or not a gzip file" in output.err
    assert "no manifest in train/web" in output.err and "4 of 5 shards finished" in output.out
    left = tree(out)
    assert not [name for name in left if name.startswith("train/web/1") or name.endswith(".tmp")]
    assert "train/web/manifest.json" not in left and {
        "train/code/manifest.json",
        "val/web/manifest.json",
    } < {*left}
    path.write_bytes(whole)
    assert run(raw, out, tokenizer) == run(raw, tmp_path / "good", tokenizer) == 0
    assert tree(out) == tree(tmp_path / "good")


def test_broken_lines_are_reported_or_with_strict_refused(raw, tmp_path, tokenizer, capsys):
    with open(raw / "web" / "0.jsonl", "ab") as f:
        f.write(b"{truncated\n")
    out = tmp_path / "out"
    assert run(raw, out, tokenizer) == 0
    output = capsys.readouterr().out
    assert "web/0.jsonl: 1 broken line skipped" in output and "line 31: not JSON" in output
    assert run(raw, out, tokenizer, "--strict") == 1
    assert "0.jsonl: line 31: not JSON" in capsys.readouterr().err
    assert not (out / "train/web/0.idx").exists() and not (out / "train/web/manifest.json").exists()
    assert (out / "train/code/manifest.json").exists(), (
        "the old pair and its manifest are deleted first"
    )


def test_an_overlap_above_half_of_a_window_is_clamped_with_a_warning(
    raw, tmp_path, tokenizer, caplog
):
    """As in gpt-simple. Regression: it was an error without a reason."""
    assert run(raw, tmp_path / "clamped", tokenizer, "--overlap-size", 17) == 0
    assert "--overlap-size 17: more than half of --max-length 32, so 16 is used" in caplog.text
    assert run(raw, tmp_path / "half", tokenizer, "--overlap-size", 16) == 0
    assert tree(tmp_path / "clamped") == tree(tmp_path / "half")


# ---- unfinished ----------------------------------------------------------------------------------


def refusal(out, data_format="shards"):
    """Why a new run does not read a folder, "" if it does; verify says the same."""
    problems = re.findall("PROBLEM (.*)", command(verify.main, out).out)
    try:
        pin_files(out, data_format=data_format)
    except ValueError as e:
        assert problems == [str(e)]
        return str(e)
    assert not problems
    return ""


def lose_an_input(raw, out, tokenizer, name, *more):
    """One input fails, and all others are finished."""
    whole = (raw / name).read_bytes()
    (raw / name).write_bytes(whole[:-40])
    assert run(raw, out, tokenizer, *more) == 1
    (raw / name).write_bytes(whole)


def lose_a_bucket(raw, out, tokenizer, monkeypatch):
    """Killed before the first file of the bucket web."""
    make = Pretokenizer.make

    def stop(job, i):
        if i.bucket == "web":
            raise KeyboardInterrupt
        return make(job, i)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Pretokenizer, "make", stop)
        run(raw, out, tokenizer)


WAYS = {
    "a file for training": (
        lambda *a, **_: lose_an_input(*a, "web/1.jsonl.gz"),
        "1 of 4 folders (train/web)",
    ),
    "validation": (
        lambda *a, **_: lose_an_input(*a, "code/deep/1.parquet"),
        "1 of 4 folders (val/code)",
    ),
    "a bucket": (lose_a_bucket, "4 of 4 folders (train/code, train/web, val/code and 1 more)"),
    "a task": (
        lambda *a, **_: run(*a, "--num-tasks=2", "--task-index=1"),
        "4 of 4 folders (train/code, train/web, val/code and 1 more)",
    ),
    "the end of a task": (
        lambda *a, **_: run(*a, "--num-tasks=2") or run(*a, "--finish"),
        "2 of 4 folders (train/web, val/code)",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_and_verify_refuse_what_it_has_not_finished(
    raw, tmp_path, tokenizer, way, monkeypatch
):
    """Regression: half a set was "all good", and runs trained on it."""
    out = tmp_path / "out"
    lose, words = WAYS[way]
    lose(raw, out, tokenizer, monkeypatch=monkeypatch)
    error = refusal(out)
    assert error.startswith(f"{out}: scripts.tok_shards has not finished it: manifest.json is ")
    assert f"missing in {words}; run the same command again" in error
    assert run(raw, out, tokenizer) == 0
    assert refusal(out) == ""


def test_half_a_copy_is_refused_and_made_whole_by_the_same_command(raw, tmp_path, tokenizer):
    """Regression: a run trained on what was there, without a word."""
    out = tmp_path / "out"
    assert run(raw, out, tokenizer) == 0
    lost = sorted(out.rglob("*.bin"))[0]
    for suffix in (".bin", ".idx"):
        lost.with_suffix(suffix).unlink()
    with pytest.raises(ValueError, match="missing of the files that") as error:
        pin_files(out, data_format="shards")
    assert f"{MANIFEST_NAME} lists: {lost.relative_to(out)};" in str(error.value)
    assert f"{lost}: manifest.json lists it, but it is missing" in command(verify.main, out).out
    kept = tmp_path / "kept"
    shutil.copytree(out, kept)
    manifest = kept / lost.parent.relative_to(out) / "manifest.json"
    contents = json.loads(manifest.read_text())
    del contents["shards"][lost.stem]
    manifest.write_text(json.dumps(contents))
    pin_files(kept, data_format="shards")  # the way to do without it
    (kept / "_old").mkdir()
    shutil.copy(lost.parent / "manifest.json", kept / "_old")
    (kept / "manifest.json").write_text('{"name": "set", "shards": {"web-0": {}}}')
    pin_files(kept, data_format="shards")  # a hidden folder, and another program's file
    assert run(raw, out, tokenizer) == 0
    assert lost in find_files(out, "shards")


def test_unfinished_pairs_of_megatrons_format_are_refused(raw, tmp_path, tokenizer):
    out, megatron = tmp_path / "out", ("--format=megatron", "--max-length=0")
    lose_an_input(raw, out, tokenizer, "web/1.jsonl.gz", *megatron)
    assert "1 of 4 folders (train/web)" in refusal(out, "megatron")
    with pytest.raises(ValueError, match="has not finished it"):
        find_pairs(out, None, "1")
    assert run(raw, out, tokenizer, *megatron) == 0
    assert refusal(out, "megatron") == ""


def test_unfinished_files_are_used_without_their_records_and_so_is_a_plain_copy(
    raw, tmp_path, tokenizer
):
    out = tmp_path / "out"
    lose_an_input(raw, out, tokenizer, "web/1.jsonl.gz")
    shutil.rmtree(out / "train/web/.records")
    assert refusal(out) == ""
    plain = shutil.ignore_patterns(".records", "manifest.json")
    shutil.copytree(out, tmp_path / "copy", ignore=plain)
    assert refusal(tmp_path / "copy") == ""


def test_a_bucket_whose_files_are_all_too_small_to_validate_is_finished(tmp_path, tokenizer):
    for name, count in (("small/a", 10), ("web/b", 60)):
        write_jsonl(tmp_path / "raw" / f"{name}.jsonl", some_texts(count))
    out = tmp_path / "out"
    assert run(tmp_path / "raw", out, tokenizer, "--val-fraction=0.05") == 0
    assert not list(out.glob("val/small/*.bin")) and refusal(out) == ""


def test_a_bucket_that_left_the_input_before_it_was_begun_leaves_nothing_unfinished(
    raw, tmp_path, tokenizer, monkeypatch
):
    out = tmp_path / "out"
    lose_a_bucket(raw, out, tokenizer, monkeypatch)
    shutil.rmtree(raw / "web")
    assert run(raw, out, tokenizer) == 0
    assert refusal(out) == "" and not list(out.glob("*/web"))


# ---- killed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("remake", [False, True], ids=["first run", "made again"])
def test_killed_before_any_change_to_the_disk_it_resumes_to_the_same_bytes(
    tmp_path, tokenizer, remake, monkeypatch
):
    monkeypatch.setattr(common.remove_leftovers, "__kwdefaults__", {"fresh_s": 0})
    raw = tmp_path / "raw"  # jsonl only: parquet would start threads before the fork
    if remake:  # the inputs have changed since then
        for n in range(2):
            write_jsonl(raw / "web" / f"{n}.jsonl", some_texts(6, seed=9 + n))
        assert run(raw, tmp_path / "start", tokenizer) == 0
    for n in range(2):
        write_jsonl(raw / "web" / f"{n}.jsonl", some_texts(6, seed=n))
    assert run(raw, tmp_path / "whole", tokenizer) == 0
    expected = tree(tmp_path / "whole")
    states = set()
    number = 0
    killed = True
    while killed:
        out = tmp_path / "out"
        if remake:
            shutil.copytree(tmp_path / "start", out)
        if number % 20 == 0:
            killed = crashes.kill_at(number, functools.partial(run, raw, out, tokenizer), below=out)
        else:  # the same in less time
            with crashes.crashing_at(number, below=out, kinds=crashes.KINDS) as changes:
                run(raw, out, tokenizer)
            killed = len(changes.made) > number
        check_state(out)
        states.add(frozenset(re.sub(r"\..{8}\.tmp", ".tmp", name) for name in tree(out)))
        assert run(raw, out, tokenizer) == 0
        assert tree(out) == expected, number
        shutil.rmtree(out)
        number += 1
    assert number > 50 and len(states) > 8


def start(raw, out, tokenizer, num_workers):
    """The command in its own process group."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests._tok_worker",
            *arguments(raw, out, tokenizer, f"--num-workers={num_workers}"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_slow(raw, out, tokenizer, num_workers):
    """The command in its own process group, while it converts the inputs whose name begins with
    `slow`."""
    process = start(raw, out, tokenizer, num_workers)
    wait_for(lambda: len(list(out.glob("busy-*"))) == num_workers or process.poll() is not None)
    return process


def has_ended(pid):
    """Whether a process does not exist any more, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    "num_workers, signum, target, code, words",
    [
        (1, signal.SIGTERM, "command", 130, "out is not finished; the same command resumes"),
        (2, signal.SIGINT, "all", 130, "out is not finished; the same command resumes"),
        (2, signal.SIGKILL, "command", -9, ""),
        (2, signal.SIGKILL, "worker", 1, "failed: a/slow0.jsonl: a worker process was killed"),
    ],
)
def test_signals_end_it_and_it_resumes(
    tmp_path, tokenizer, num_workers, signum, target, code, words
):
    """`target` "all": the whole process group gets the signal, as from a terminal or a
    scheduler."""
    raw, out = tmp_path / "raw", tmp_path / "out"
    for name, copies in (("a/quick", 3), ("a/slow0", 1), ("b/slow1", 1)):  # the largest comes first
        write_jsonl(raw / f"{name}.jsonl", some_texts(50, seed=copies) * copies)
    process = start_slow(raw, out, tokenizer, num_workers)
    assert process.poll() is None and list(out.rglob(".slow*.bin.*.tmp")), "it was not busy"
    workers = [int(path.name.split("-")[1]) for path in out.glob("worker-*")]
    if target == "all":
        os.killpg(process.pid, signum)
    else:
        os.kill(workers[0] if target == "worker" else process.pid, signum)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert words in errors and "Traceback" not in errors and "Error" not in errors
    assert len(workers) == num_workers
    wait_for(lambda: all(map(has_ended, workers)))
    for path in [*out.glob("busy-*"), *out.glob("worker-*")]:
        path.unlink()
    check_state(out)
    assert open_tokens(out / "train" / "a" / "quick.idx")
    assert signum == signal.SIGKILL or not list(out.rglob("*.tmp"))
    for path in out.rglob("*.tmp"):  # left by a killed command
        os.utime(path, (1, 1))
    assert run(raw, out, tokenizer) == 0 and run(raw, tmp_path / "whole", tokenizer) == 0
    assert tree(out) == tree(tmp_path / "whole")


def test_a_worker_that_starts_does_not_receive_ctrl_c(tmp_path, tokenizer):
    """Regression: it printed a traceback if it was still importing."""
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"raw/{name}.jsonl", some_texts(50, seed=1))
    process = start(tmp_path / "raw", tmp_path / "out", tokenizer, 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    # Python's tracker of resources, then a worker
    wait_for(lambda: len(children.read_text().split()) >= 2)
    worker = int(children.read_text().split()[1])
    wait_for(lambda: handles_ctrl_c(worker))
    os.kill(worker, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and "Traceback" not in errors


def handles_ctrl_c(pid):
    """Whether a process has set its handler, and so runs Python."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    ignored = int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16)
    return (caught | ignored) & 1 << signal.SIGINT - 1


def test_processes_on_one_folder_all_exit_0(tmp_path, tokenizer):
    raw, out = tmp_path / "raw", tmp_path / "out"
    for n in range(6):
        write_jsonl(raw / "web" / f"{n}.jsonl", some_texts(60, seed=n))
    assert run(raw, tmp_path / "alone", tokenizer) == 0
    command = [
        sys.executable,
        "-m",
        "scripts.tok_shards",
        *arguments(raw, out, tokenizer, "--num-workers=1"),
    ]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    errors = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, errors
    assert tree(out) == tree(tmp_path / "alone")


# ---- several machines ----------------------------------------------------------------------------


def test_the_slurm_script_submits_all_tasks_then_the_end_with_valid_flags(tmp_path):
    for name, lines in (
        (".venv/bin/python", 'printf "%s\\n" "$@"'),
        ("bin/sbatch", 'echo "$*" >> submitted; echo 17'),
    ):
        path = tmp_path / name  # fakes that print their arguments
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)

    def sbatch(*args, **more):
        settings = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "RAW": "in put",
            "OUT": "out",
            "TOKENIZER": "gpt2",
            "NUM_TASKS": "3",
            **more,
        }
        return subprocess.run(
            ["bash", str(ROOT / "dev/slurm/tok_shards.sbatch"), *args],
            cwd=tmp_path,
            env=settings,
            capture_output=True,
            text=True,
        )

    assert sbatch().returncode == 0 and sbatch(RAW="").returncode != 0
    array, end = (tmp_path / "submitted").read_text().splitlines()
    assert (
        "--array=0-2" in array
        and "--dependency=afterany:17" in end
        and end.endswith("tok_shards.sbatch --finish")
    )
    for more, known in (
        ((), {"task_index": 2, "num_tasks": 3, "num_workers": 16}),
        (("--finish",), {"finish": True}),
    ):
        result = sbatch(*more, SLURM_JOB_ID="5", SLURM_ARRAY_TASK_ID="2", SLURM_CPUS_PER_TASK="16")
        module, *flags = result.stdout.splitlines()[1:]
        args = vars(tok_shards.parse_args(flags))
        assert module == "scripts.tok_shards"
        assert args.items() >= {"input_dir": Path("in put"), "tokenizer": "gpt2", **known}.items()


def test_an_input_that_cannot_be_opened_fails_alone(raw, monkeypatch):
    """Regression: one of the first inputs that denied access ended the command with no shard."""
    inputs = tok_shards.find_inputs(data_at(raw))
    read = tok_shards.read_documents

    def denied(path, selection):
        if path == inputs[0].path:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, selection)

    monkeypatch.setattr(tok_shards, "read_documents", denied)
    tok_shards.check_readable(inputs, Selection())
    with pytest.raises(PermissionError):
        tok_shards.check_readable(inputs[:1], Selection())
