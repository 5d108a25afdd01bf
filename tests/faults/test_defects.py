"""Regression tests of defects that belong to no other test file."""

import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from nanochat import run_journal
from nanochat.checkpoint import load_checkpoint, load_plain
from nanochat.curriculum import Curriculum
from nanochat.order import StreamConfig
from nanochat.pins import read_manifests
from nanochat.plan import BucketPlan, read_plan
from nanochat.run_dir import newest_events
from nanochat.stream import open_stream
from nanochat.tokenizer import RustBPETokenizer
from scripts import (
    average,
    base_train,
    compare_runs,
    inspect_data,
    receipt,
    replay,
    report,
    verify,
)
from tests import training
from tests.finished import STEPS, command
from tests.toy import MemorySource, json_copy

EXAMPLE_LR = {
    name: float(base_train.__doc__.split(f"--{name.replace('_', '-')}=")[1].split()[0])
    for name in ("matrix_lr", "embedding_lr", "unembedding_lr")
}


@pytest.fixture
def base(tmp_path):
    with training.workplace(tmp_path, **training.SMALL) as path:
        yield path


def first_row_calls(num_buckets, V):
    """Number of Python calls to open a mix of `num_buckets` buckets and to get the first row of
    each of V lanes."""
    documents = [[np.arange(20, dtype=np.uint32)] * 64] * (V // 16)
    sources = {f"b{i}": MemorySource(documents) for i in range(num_buckets)}
    phase = {
        "duration_tokens": 10**9,
        "mix": {bucket: 1 + i % 7 for i, bucket in enumerate(sources)},
    }
    mix = Curriculum.from_json({"phases": [phase], "max_epochs": dict.fromkeys(sources, 0)})
    counts = Counter()
    sys.setprofile(lambda frame, event, arg: counts.update([event]))
    try:
        with closing(
            open_stream(
                StreamConfig(T=32, V=V, seed=1, curriculum=mix),
                sources,
                range(V),
                tokenizer="t",
                num_threads=0,
            )
        ) as stream:
            assert len(stream.next_rows(1)) == V
    finally:
        sys.setprofile(None)
    return counts["call"] + counts["c_call"]


def test_the_work_for_first_rows_is_linear_in_buckets_and_lanes():
    """200 buckets x 1,024 lanes gave no row in 160 s, but 50 x 256 took only 1 s."""
    assert first_row_calls(40, 256) < 20 * first_row_calls(10, 64)


def test_an_unfinished_loader_ends_quietly(base):
    """In 1 of 16 cases, Python ended while the prefetch thread ran: "FATAL: exception not
    rethrown"."""
    code = f"""
import os, sys
from nanochat.dataloader import tokenizing_distributed_data_loader_bos_bestfit as loader
from nanochat.tokenizer import RustBPETokenizer
tokenizer = RustBPETokenizer.from_directory({str(base / "tokenizer")!r})
for _ in range(2):  # children and parent all end with an unfinished loader
    if (pid := os.fork()) == 0:
        batches = loader(tokenizer, 4, 64, "train", device="cpu", data_dir={str(base / "data")!r})
        next(batches)
        break
    assert os.waitpid(pid, 0)[1] == 0
"""
    quiet = "ignore:This process:DeprecationWarning"  # of Python 3.12 for os.fork
    done = subprocess.run(
        [sys.executable, "-W", quiet, "-c", code],
        capture_output=True,
        text=True,
        timeout=training.PATIENCE_S,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_verify_accepts_a_tag_and_the_example_of_base_train_learns(base, capsys):
    training.succeed(num_iterations=20, save_every=-1)
    training.succeed(num_iterations=20, save_every=-1, model_tag="quick", **EXAMPLE_LR)
    assert training.losses("quick")[-1] < training.losses()[-1] - 0.3
    capsys.readouterr()
    assert verify.main(["quick"]) == 0 and "all good" in capsys.readouterr().out


def test_code_version_is_the_commit_and_marks_changes(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "trainer.py").touch()
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(run_journal, "__file__", str(tmp_path / "trainer.py"))
    code_version = run_journal.code_version.__wrapped__  # without its cache
    clean = code_version()
    (tmp_path / "trainer.py").write_text("# changed")
    assert len(clean) == 12 and not clean.endswith("+") and code_version() == f"{clean}+"


def test_malformed_cursors_are_refused():
    """They were a TypeError or an IndexError at their first use."""
    config = StreamConfig(T=32, V=2, seed=1)
    sources = {"data": MemorySource([[np.arange(20, dtype=np.uint32)] * 64] * 4)}

    def restored(cursors):
        with closing(
            open_stream(config, sources, range(2), tokenizer="t", cursors=cursors)
        ) as stream:
            stream.next_rows(1)

    with closing(open_stream(config, sources, range(2), tokenizer="t")) as stream:
        stream.next_rows(3)
        whole = stream.cursors()
    restored(json_copy(whole))
    assert whole[0]["buckets"]["data"]["waiting"]
    for name, value in (
        ("epoch", None),
        ("waiting", True),
        ("waiting", [[0, 0]]),
        ("waiting", [[0, 9, 0, 1, 0, 0]]),
        ("waiting", [[0, 0, 64, 1, 0, 0]]),
        ("row", "1"),
    ):
        cursors = json_copy(whole)
        cursors[1]["buckets"]["data"][name] = value
        with pytest.raises(ValueError, match=r"^cursor of lane 1, bucket 'data'"):
            restored(cursors)
    for name, value in (("lane", None), ("stream", []), ("row", {}), ("buckets", [])):
        with pytest.raises(ValueError, match=r"^cursor of"):
            restored([whole[0], {**whole[1], name: value}])


PLAN = {
    **dict.fromkeys(("T", "V", "rows_per_step", "num_steps", "steps"), 1),
    **dict.fromkeys(("estimate", "allowed", "crops"), False),
    "halt": "",
}
EMPTY_PLAN = json.dumps({**PLAN, "phases": [], "buckets": {}})
ACCOUNT = ("read", "bos", "emitted", "cropped", "repeated", "padded", "rows", "documents")
BUCKET = {name: kind is bool or 1 for name, kind in BucketPlan.__annotations__.items()}
BUCKET["account"] = dict.fromkeys(ACCOUNT, 1)
PHASE = {"first_step": 0, "tokens": 1, "asked": {"web": "1"}}
TEXT_IN_PLAN = json.dumps({**PLAN, "phases": [PHASE], "buckets": {"web": BUCKET}})


@pytest.mark.parametrize(
    "read, name, text, error",
    [
        (read_plan, "plan.json", "[]", "expected an object"),
        (read_plan, "plan.json", '{"estimate": 1}', "estimate: expected true or false"),
        (read_plan, "plan.json", EMPTY_PLAN, "has a phase and a bucket, but this one has none"),
        (read_plan, "plan.json", TEXT_IN_PLAN, "asked: web: expected a whole number"),
        (
            read_manifests,
            "data_manifest.json",
            '{"train": {"web": {"root": "\\ud800", "files": [{"name": "a", "size": 1, "footer": "", '
            '"groups": [1]}]}}, "val": {}}',
            "cannot be a path",
        ),
        (
            read_manifests,
            "data_manifest.json",
            '{"train": {"web": 1}, "val": {}}',
            "web: expected an object",
        ),
        (
            read_manifests,
            "data_manifest.json",
            '{"train": {"web": {"root": "", "files": []}}, "val": {}}',
            "a bucket",
        ),
        (load_plain, "optimizer.bin", "", "refused, because it is corrupt or holds"),
    ],
)
def test_malformed_files_of_a_run_are_named(tmp_path, monkeypatch, read, name, text, error):
    # of a forged archive
    monkeypatch.setattr(torch, "load", mock.Mock(side_effect=OSError(22, "Invalid argument")))
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"^{tmp_path / name}: .*{error}"):
        read(tmp_path / name)


def test_a_log_with_values_of_wrong_types_is_named(copied):
    """The report and the comparison of two runs ended in a TypeError."""
    log = training.run_dir() / "logs" / "train.jsonl"
    whole = log.read_text()
    log.write_text(whole + '{"event": "val", "step": 2, "bpb": 1.0, "buckets": "none"}\n')
    assert compare_runs.main(["run", "run"]) == 0
    log.write_text(whole.replace('"tokens_per_s": ', '"tokens_per_s": "x", "fast": '))
    with pytest.raises(
        ValueError, match=r"train.jsonl: step 0: tokens_per_s: expected a number, got a string"
    ):
        report.main(["run"])


def test_a_line_whose_event_is_not_a_name_is_skipped_like_a_broken_one(copied):
    """Regression: a TypeError in several commands."""
    log = training.run_dir() / "logs" / "train.jsonl"
    newest = newest_events(training.run_dir(), 99)
    whole = log.read_text()
    log.write_text(whole + '{"event": {"val": 1}, "step": 2}\n{"event": null, "step": 3}\n')
    assert newest_events(training.run_dir(), 99) == newest
    assert inspect_data.main(["rows", "run", "--step=3"]) == 0


def test_half_a_surrogate_pair_in_a_file_of_a_run_is_named_or_shown(copied):
    """Regression: UnicodeEncodeErrors that named no file."""
    run = training.run_dir()
    seal = training.final() / "trainer_state.json"
    good = seal.read_text()
    seal.write_text(re.sub('"checksum": "..', r'"checksum": "\\ud800', good))
    with pytest.raises(ValueError, match=rf"^{seal}: corrupt"):
        load_checkpoint(training.final())
    seal.write_text(good)
    config = run / "config.json"
    config.write_text(config.read_text().replace('"model_tag": "run"', r'"model_tag": "\ud800"'))
    assert report.main(["run"]) == 0
    assert r"Run `\ud800`" in (run / "report.md").read_text()
    config.write_text(re.sub('"packing": "[a-z]*"', '"packing": "odd"', config.read_text()))
    with pytest.raises(ValueError, match=r"config.json.*--packing: got 'odd'"):
        inspect_data.main(["rows", "run", "--step=3"])


def test_the_only_step_of_a_log_with_a_wrong_type_is_named(copied):
    log = training.run_dir() / "logs" / "train.jsonl"
    good, mark, last = log.read_text().rpartition('"tokens_per_s": ')
    log.write_text(f'{good}{mark}"x", "fast": {last}')
    with pytest.raises(ValueError, match=r"step [1-9]: tokens_per_s: expected a number, got a str"):
        report.main(["run"])


def put_another_tokenizer():
    """Replace the tokenizer in the folder of the run by another one of the same size."""
    folder = training.run_dir() / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    documents = training.texts(200, seed=7)
    other = RustBPETokenizer.train_from_iterator(documents, training.VOCAB_SIZE)
    other.save(folder, force=True)


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (receipt.main, ["run", "--out={}/made"]),
        (inspect_data.main, ["find", "run", "--text=the"]),
        (replay.main, ["run@7"]),
        (average.main, ["run", "--last=2", "--model-tag=made"]),
    ],
)
def test_a_command_on_a_run_whose_tokenizer_was_replaced_says_to_put_it_back(copied, main, argv):
    """Regression: a receipt that no one could verify, and "start a new run"."""
    put_another_tokenizer()
    outcome = command(main, *(arg.format(copied) for arg in argv))
    assert outcome.code == 1 and "Traceback" not in outcome.err
    assert re.search(r"^error: .*runs/run/tokenizer: .*put the run's tokenizer/ back", outcome.err)
    assert not (copied / "made").exists() and not (copied / "runs" / "made").exists()


def test_a_resume_of_a_run_whose_tokenizer_was_replaced_says_to_put_it_back(copied):
    """Regression: --output-dir and --force, which are flags of another command."""
    put_another_tokenizer()
    error = training.refuse(num_iterations=STEPS + 1)
    assert "runs/run/tokenizer: " in error and "put the run's tokenizer/ back" in error
    assert "--" not in error


def test_a_tokenizer_that_a_launch_left_before_its_run_began_is_replaced(base):
    """Regression: refused, with the flags of another command."""
    put_another_tokenizer()
    training.succeed(num_iterations=1)
    of_run, of_data = [
        RustBPETokenizer.from_directory(folder / "tokenizer").fingerprint
        for folder in (training.run_dir(), base)
    ]
    assert of_run == of_data
