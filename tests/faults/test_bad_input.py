"""Rejected input: for any bad command line or file, the command prints one sentence that names the
flag or the file and the remedy, exits with a code other than 0, and changes nothing.

The tables below have one row per case: the command line, the files to add to the base directory of
a finished run (tests/finished.py), and words of the sentence."""

import errno
import importlib
import json
import os
import resource
import shlex
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanochat import checkpoint
from nanochat.common import hash_file
from nanochat.tokenizer import RustBPETokenizer
from nanochat.tokens import open_tokens, read_manifest
from scripts import tok_shards, verify
from tests import crashes, training
from tests.finished import command
from tests.token_files import E, truncate, write_megatron, write_pair
from tests.toy import tree
from tests.training import (
    as_flags,
    checkpoints,
    fingerprint,
    run_dir,
    state_of,
    succeed,
    texts,
    write_shard,
)

# ---- files ---------------------------------------------------------------------------------------

MODULES = {"dataset": "nanochat.dataset"}  # all other commands are in scripts/
FOLDER, GONE = object(), None
TEXTS = texts(40, seed=1)


def write(path: Path, content: Any) -> None:
    """Write text, bytes, a parquet file (from a list of documents) or a folder, delete it, or call
    a function on it."""
    if content is GONE:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif content is FOLDER:
        path.mkdir(parents=True)
    elif callable(content):
        path.parent.mkdir(parents=True, exist_ok=True)
        content(path)
    elif isinstance(content, list):
        write_shard(path, content)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def edited(**changes: Any) -> Callable[[Path], Any]:
    """A JSON file of the run with some values changed."""
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def blank(statistics: bool) -> Callable[[Path], Any]:
    return lambda path: write_shard(path, [""] * 99, write_statistics=statistics)


def not_utf8(path: Path) -> None:
    write_shard(path, TEXTS).rename(path.with_name(os.fsdecode(b"\xff.parquet")))


def last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def tokenizer(path: Path) -> None:
    RustBPETokenizer.train_from_iterator(texts(100, seed=7), training.VOCAB_SIZE).save(path)


def pair(entries: list[list[int]], *prefixes: int, **kwargs: Any) -> Callable[[Path], Any]:
    return lambda path: write_pair(path, entries, prefixes or None, **kwargs)


def megatron(ids: list[int], dtype: str, more: bytes = b"") -> Callable[[Path], Any]:
    def make(path: Path) -> None:
        write_megatron(path, [[ids]], dtype)
        with open(path.with_suffix(".idx"), "ab") as idx:
            idx.write(more)

    return make


UNFINISHED = {"runs/run/checkpoints/final": GONE, "runs/run/checkpoints/checkpoint-6": GONE}
CUT = partial(truncate, size=11)
ONE = "base_train --data-path=one --val-path=data"
PAIRS = "base_train --data-path=shards --data-format=shards"
CONFIG, STATE = "runs/run/config.json", "runs/run/.run_state.json"
MIX = "curriculum: [{duration_tokens: 4096, mix: {%s: 1}}]"

# ---- the tables ----------------------------------------------------------------------------------

DATA = [  # (command line, files, words)
    ("base_train --data-path=nowhere", {}, ("nowhere", "no such data folder", "nanochat.dataset")),
    ("base_train --data-path=empty", {"empty": FOLDER}, ("empty", ".parquet", "--data-path")),
    ("base_train --data-path=data --val-path=nowhere", {}, ("nowhere",)),
    # a download that never was
    ("base_train --val-path=data", {}, ("climbmix", "nanochat.dataset")),
    (
        "base_train --data-path=one",
        {"one/only.parquet": TEXTS},
        ("only one data file", "--val-path"),
    ),
    (
        ONE + " --strict",
        {"one/only.parquet": [*TEXTS, None, None]},
        ("only.parquet", "2 nulls", "row group 1"),
    ),
    (
        "base_train --data-path=odd",
        {"odd/a.parquet": not_utf8, "odd/z.parquet": TEXTS},
        ("its name is not UTF-8; rename it",),
    ),
    (ONE, {"one/a.parquet": blank(True)}, ("only empty documents",)),
    (
        ONE,
        {"one/a.parquet": [], "one/b.parquet": []},
        ("2 files but no document in any of them", "--data-path"),
    ),
    (
        ONE,
        {"one/a.parquet": TEXTS, "one/b.parquet": lambda path: path.symlink_to("gone")},
        ("1 link below it to something that does not exist: b.parquet (-> gone)", "git annex get"),
    ),
    (
        ONE,
        {"one/_temporary/a.parquet": TEXTS},
        ("no .parquet", "_temporary/a.parquet (a name begins with _ or .)"),
    ),
    (
        ONE,
        {"one/train-0.parquet": TEXTS, "one/val-0.parquet": TEXTS, "one/x.parquet": TEXTS},
        ("x.parquet: the names of other files beside it state a split", "rename it"),
    ),
    (
        "base_train --data-path=one",
        {"one/train/a.parquet": TEXTS, "one/test/a.parquet": TEXTS},
        ("it has train/ but no val/", "--val-path"),
    ),
    (
        "base_train --order=megatron --data-args-path=gone.txt",
        {},
        ("--data-args-path=gone.txt: no such file",),
    ),
    (ONE, {"one/a.parquet": blank(False)}, ("only empty documents",)),
    (
        "base_train --data-path=data --val-path=blank.jsonl",
        {"blank.jsonl": '{"text": ""}\n' * 9},
        ("blank.jsonl", "only empty documents"),
    ),
    (
        "base_train --data-path=data --val-path=torn.jsonl --strict",
        {"torn.jsonl": '{"text": "one"}\n{torn\n'},
        ("torn.jsonl", "line 2: not JSON", "--strict"),
    ),
    ("base_train", {"tokenizer": GONE}, ("tokenizer", "scripts.tok_train")),
    (
        "base_train --config=mix.yml",
        {"mix.yaml": "depth: 1"},
        ("--config=mix.yml", "No such file"),
    ),
    ("base_train --curriculum=gone.yaml", {}, ("gone.yaml: no such curriculum file",)),
    (
        "base_train --curriculum=mix.yaml",
        {"mix.yaml": MIX % "dat"},
        ("'dat'", "did you mean data?"),
    ),
    (
        "base_train --curriculum=mix.yaml",
        {"mix.yaml": MIX % "data" + "\nallow: 1"},
        ("mix.yaml", "unknown key"),
    ),
    (
        "base_train --curriculum=mix.yaml --num-iterations=10",
        {"mix.yaml": MIX % "data"},
        (
            "ends at 4,096, but the run trains on 5,120",
            "allow_budget_mismatch: true",
        ),
    ),
    ("validate --lanes=5", {}, ("lanes",)),
    ("validate --tokenizer=data", {}, ("tokenizer",)),
]

SHARDS = [
    (
        "base_train --data-path=data --data-format=shards",
        {},
        ("no .bin file", "check --data-path and --data-format (text, shards"),
    ),
    (
        "base_train --data-path=shards",
        {},
        ("no .parquet", "check --data-path and --data-format (text, shards"),
    ),
    ("base_train --data-path=data --packing=binned", {}, ("--packing binned", "--packing bestfit")),
    (
        f"{PAIRS} --tokenizer=other",
        {"other": tokenizer},
        ("shards/train/data", "made its shards, but this run has", "--tokenizer"),
    ),
    (
        f"{PAIRS} --tokenizer=other --plan=off",
        {"other": tokenizer},
        ("made its shards, but this run has", "--tokenizer"),
    ),
    (
        f"{PAIRS} --packing=binned",
        {},
        ("train/data/shard_", "a row of the binned layout holds only 65", "--max-length 64"),
    ),
    (PAIRS, {"shards/train/data/lost.idx": b""}, ("lost.bin", "missing, but lost.idx needs it")),
    (
        PAIRS,
        {"shards/train/data/shard_0.bin": CUT},
        ("shard_0.bin: 5.5 tokens on disk, but the offsets", "rerun scripts.tok_shards"),
    ),
    (
        PAIRS,
        {"shards/val/data/shard_3.bin": CUT},
        ("shard_3.bin: 5.5 tokens on disk, but the offsets", "rerun scripts.tok_shards"),
    ),
    (
        "base_train --data-path=pairs --data-format=megatron",
        {
            "pairs/a": megatron([1, 2, 3, E], "<u2"),
            "pairs/a.bin": partial(truncate, size=6),
            "pairs/b": megatron([1, 2, 3, E], "<u2"),
        },
        ("a.bin: 6 bytes on disk, but sequence 0 of its .idx ends at",),
    ),
    (
        PAIRS,
        {"shards/train/data/shard_0.idx": GONE},
        ("shard_0.idx: the file is missing", "restore it", "rerun scripts.tok_shards"),
    ),
    ("verify shards", {"shards/train/data/shard_0.bin": CUT}, ()),
    ("verify shards --tokenizer=other", {"other": tokenizer}, ()),
    ("verify nowhere/x.bin", {}, ("no such file or folder",)),
    (
        "verify empty",
        {"empty": FOLDER},
        ("found nothing to verify", "text files have no checksums"),
    ),
    ("verify d13", {}, ("no run 'd13'",)),
]

FLAGS = [
    ("base_train " + flags, {}, words)
    for flags, words in [
        (
            "--total-batch-size=1000",
            ("--total-batch-size", "1,000", f"multiple of --max-seq-len {training.T}"),
        ),
        ("--lanes=3", ("--lanes=3", "8 rows", "divisor")),
        ("--lanes=0", ("--lanes", "at least 1")),
        ("--leaves=3", ("--leaves", "power of two")),
        ("--leaves=8", ("--leaves", "--lanes=4")),
        (
            "--attention-mode=flex",
            ("--attention-mode=flex", "need a GPU", "--attention-mode=sdpa_mask"),
        ),
        (
            "--num-iterations=-1 --target-param-data-ratio=-1",
            ("--num-iterations", "--target-flops"),
        ),
        (f"--overlap={training.T - 1} --long-docs=split", ("--overlap", f"{training.T - 2}")),
        ("--dtype=float64", ("--dtype", "bfloat16")),
        ("--device-type=gpu", ("--device-type: got 'gpu'", "that this PyTorch offers: cpu")),
        ("--model-tag=../elsewhere", ("--model-tag", "folder name")),
        ("--model-tag=-d12", ("--model-tag: got '-d12'", "does not start with . or -")),
        ("--window-pattern=SXL", ("window_pattern", "letters S")),
        ("--depth=0", ("--depth: got 0", "expected at least 1")),
        ("--resume=nowhere/checkpoint-3", ("no run 'nowhere/checkpoint-3'", "neither a tag")),
        ("d12", ("d12: not a flag; name data with --data-path",)),
        ("--init-from=nobody", ("nobody", "run")),
        ("--init-from=run@99", ("run@99", "trained 8 steps")),
        (
            "--init-from=run --depth=3",
            ("a different architecture", "no weights were loaded", "--model-tag", "n_layer"),
        ),
        ("--init-from=run --head-dim=6", ("a different architecture", "n_head")),
    ]
] + [
    (
        "base_train --init-from=run --tokenizer=other",
        {"other": tokenizer},
        ("trained with the tokenizer",),
    ),
    (
        "base_train --init-from=run@4",
        {"runs/run/checkpoints/checkpoint-4/model/pytorch_model.bin": last_byte},
        ("pytorch_model.bin", "corrupt"),
    ),
]

RESUMED = [  # an unfinished run that is not resumed
    (
        "base_train --model-tag=run --tokenizer=other",
        {**UNFINISHED, "other": tokenizer},
        ("--tokenizer", "runs/run/tokenizer", "--model-tag"),
    ),
    (
        "base_train --model-tag=run",
        {**UNFINISHED, "data/shard_1.parquet": TEXTS},
        ("data/shard_1.parquet", "changed since this run began", "--model-tag"),
    ),
    (
        "base_train --model-tag=run",
        {**UNFINISHED, "data/shard_1.parquet": GONE},
        ("data/shard_1.parquet", "does not exist", "--model-tag"),
    ),
    (
        "base_train --model-tag=run --data-path=other",
        {**UNFINISHED, "other/a.parquet": TEXTS},
        ("other/shard_", "does not exist", "name the folder of all files (it was "),
    ),
    (
        "base_train --model-tag=run --resume=runs/run/checkpoints/checkpoint-5",
        UNFINISHED,
        ("no checkpoint 'checkpoint-5'", "existing checkpoints: checkpoint-4"),
    ),
    ("base_train --model-tag=run --resume=runs/run/logs", UNFINISHED, ("no run", "runs/run/logs")),
    (
        "base_train --model-tag=run --resume=scratch --force --data-path=nowhere",
        UNFINISHED,
        ("no such data folder",),
    ),
    (
        "base_train --model-tag=run --resume=scratch --force --total-batch-size=1000",
        UNFINISHED,
        ("--total-batch-size",),
    ),
    ("base_train --model-tag=run --seed=1", UNFINISHED, ("--seed", "--model-tag")),
]

READERS = [
    *(
        (
            f"{script} --run=d12",
            {},
            ("--run: pass the run's name without a flag: write d12 instead of --run=d12",),
        )
        for script in ("sample", "base_eval", "report", "infer_bench", "status")
    ),
    ("status d2", {}, ("no run 'd2'",)),
    ("status run", {STATE: "{"}, ("run_state.json: not valid JSON",)),
    (
        "status old",
        {"runs/old/checkpoints/checkpoint-1": FOLDER},
        ("so the run's status is unknown",),
    ),
    ("status --exit-code", {"runs/old/checkpoints/checkpoint-1": FOLDER}, ("name it: python -m",)),
    ("stop run", {STATE: "{"}, ("run_state.json: not valid JSON",)),
    ("stop", {}, ("no run is active",)),
    *((f"stop {name}", {}, ("no run",)) for name in ("ru", "a/b", "..")),
    ("report d12", {}, ("no run 'd12'",)),
    ("page", {"runs": GONE}, ("no runs in the base directory",)),
    *(
        ("report run", {f"runs/run/{name}.json": text}, (f"{name}.json",))
        for name in ("data_manifest", "eval")
        for text in ("[1]", "[" * 100_000, "{")
    ),
    *(
        (f"{script} run", {CONFIG: edited(**change)}, ("config.json: " + said,))
        for script in ("report", "page")
        for change, said in (
            (
                {"derived": {"num_iterations": [1]}},
                "derived: num_iterations: expected a number or null, got a list",
            ),
            (
                {"derived": {"flops_per_token": "9"}},
                "derived: flops_per_token: expected a number or null, got a string",
            ),
            ({"derived": 3}, "derived: expected an object"),
            ({"max_seq_len": None}, "max_seq_len: expected a whole number"),
        )
    ),
    ("compare_runs run nosuch", {}, ("no run 'nosuch'",)),
    ("compare_runs run nosuch@4", {}, ("no run 'nosuch'",)),
    (
        "compare_runs run@99 run@4",
        {},
        ("run@99", "trained 8 steps"),
    ),
    (
        "compare_runs run empty",
        {"empty/config.json": partial(shutil.copy, CONFIG)},
        ("nothing to compare", "checkpoints: none"),
    ),
    (
        "average run --last=5",
        {},
        ("good checkpoints for 4 steps (8, 6, 4, 2); pass a smaller number",),
    ),
    ("average run --model-tag=run", {}, ("already exists", "name another run with --model-tag")),
    (
        "sweep old --out=out",
        {"runs/old/config.json": '{"max_seq_len": 15}'},
        ("no run has completed",),
    ),
    ("sweep --prefix=x --out=out", {}, ("no runs: name some",)),
    ("export run data --to=hf", {}, ("data: already exists",)),
    ("export run data/shard_0.parquet --to=nanochat", {}, ("already exists",)),
    ("export run --to=hf", {}, ("OUT",)),
    ("export run new --to=hf --model-tag=x", {}, ("go with --from",)),
    (
        "export data --from=nanochat --model-tag=x --tokenizer=tokenizer --data-path=data",
        {},
        ("none",),
    ),
    ("base_eval other", {}, ("no run 'other'",)),
    (
        "base_eval run --eval=bpb,mmlu",
        {},
        ("--eval: got 'mmlu', expected a comma-separated list of core",),
    ),
    (
        "base_eval run --eval=core --eval-bundle=/nowhere",
        {},
        ("/nowhere/core.yaml: the file does not exist",),
    ),
    ("base_eval run --dtype=int8", {}, ("--dtype",)),
    *(
        (
            f"{script} {flag}",
            {},
            (f"argument {flag.split('=')[0]}: got {flag.split('=')[1]}, expected at least",),
        )
        for script, flag in (
            ("base_eval", "--eval-tokens=0"),
            ("base_eval", "--device-batch-size=-2"),
            ("validate", "--world-size=0"),
            ("base_eval", "--unigram-tokens=0"),
            ("infer_bench", "--batch-sizes=0"),
            ("infer_bench", "--rounds=0"),
            ("infer_bench", "--decode-tokens=1"),
            ("infer_bench", "--prompt-tokens=0"),
        )
    ),
    *(
        (f"inspect_data {flags}", {}, ("--step",))
        for flags in (
            "digest --steps=-1:3",
            "digest --steps=3:3",
            "digest --steps=5",
            "rows --step=-1",
            "rows",
        )
    ),
    ("inspect_data digest --steps=0:1 no-such-run", {}, ("no run 'no-such-run'",)),
    ("inspect_data digest --steps=0:1", {"runs": GONE}, ("which run",)),
    ("inspect_data rows --step=0 run --row=8", {}, ("rows 0 to 7",)),
    ("inspect_data digest --steps=0:1 run --world-size=5", {}, ("--lanes=4: got 5 processes",)),
    ("inspect_data digest --steps=0:1 run --seed=3", {}, ("and --seed: a run has its own",)),
    (
        "inspect_data rows --step=0 --data-path=data --max-seq-len=64 --total-batch-size=512 --lanes=3",
        {},
        ("--lanes=3",),
    ),
    ("inspect_data ledger --data-path=data", {}, ("pass --step=N, the number of completed steps",)),
    ("inspect_data rows --step=0 --data-path=nowhere", {}, ("nowhere",)),
    (
        "inspect_data rows --step=0 --sort=loss --data-path=data",
        {},
        ("--sort=loss: it needs the log",),
    ),
    *(
        (f"inspect_data find {flags}", {}, words)
        for flags, words in (
            ("run", ("--document",)),
            ("run --text=''", ("--text: it is empty",)),
            (
                "run --document=shard_9.parquet:0",
                ("no file shard_9.parquet; its files are shard_0.parquet, shard_1",),
            ),
            (
                "run --document=shard_0.parquet:96",
                ("shard_0.parquet has documents 0 to 95; name one",),
            ),
            ("run --document=shard_0.parquet", ("expected FILE:DOC",)),
            (
                "run --text='there is no such text'",
                ("occurs in no document of the files of the run",),
            ),
            ("--text=x --data-path=data", ("find: it needs the log and the saves of a run",)),
        )
    ),
]

MAKERS = [
    *(
        (f"tok_shards --input-dir=data --output-dir=out --tokenizer=tokenizer {flags}", {}, words)
        for flags, words in (
            ("--max-length=-1", ("expected 0 or more",)),
            ("--overlap-size=-1", ("expected 0 or more",)),
            ("--num-workers=0", ("--num-workers",)),
            ("--task-index=-1", ("--task-index -1",)),
            ("--task-index=2 --num-tasks=2", ("--task-index 2 --num-tasks 2",)),
            ("--num-tasks=0", ("--num-tasks 0",)),
            ("--tokenizer=gpt9", ("--tokenizer gpt9: no tokenizer here",)),
            ("--input-dir=nowhere", ("nowhere: no such data folder",)),
            ("--output-dir=data", ("--output-dir",)),
            (
                "--max-length=32 --format=megatron",
                ("--max-length 32 --format megatron: Megatron needs whole documents",),
            ),
        )
    ),
    (
        "tok_shards --input-dir=data --output-dir=out",
        {"tokenizer": GONE},
        ("tok_train --data-path data --out",),
    ),
    (
        "tok_shards --input-dir=data --output-dir=shards --tokenizer=tokenizer --max-length=64",
        {},
        ("max_length 400 (now 64)",),
    ),
    (
        "tok_shards --input-dir=data --output-dir=shards --tokenizer=other --max-length=400 --overlap-size=40",
        {"other": tokenizer},
        ("(now ",),
    ),
    (
        "tok_train --data-path=nowhere --vocab-size=264",
        {},
        ("--vocab-size: got 264, expected at least 265",),
    ),
    *(
        (f"convert_shards in out --to={to}", files, words)
        for to, files, words in (
            (
                "megatron",
                {"in/a": pair([[1, 2], [3, 4, E]], 0, 1)},
                ("a.bin: entry 1 has a prefix of 1 ids that differs from",),
            ),
            ("gpts", {"in/a": pair([[1, E]]), "in/b": megatron([1, E], "<u2")}, ("mixes both",)),
            (
                "megatron",
                {"in/a": pair([[1 << 31]], vocab_size=1 << 32)},
                ("a.bin: got uint32 ids 2147483648",),
            ),
            ("gpts", {"in/a": megatron([-1], "<i4")}, ("--eod: got -1",)),
            (
                "gpts",
                {"in/a": megatron([1], "<i4", b"\3")},
                ("a.idx: it is multimodal data (its sequences have modes)",),
            ),
            ("gpts", {}, ("no such data folder",)),
        )
    ),
    *(
        (
            f"convert_shards in {out} --to=megatron",
            {"in/a": pair([[1, E]])},
            ("it must not be IN, or inside it",),
        )
        for out in ("in", "in/x", ".")
    ),
    *(
        (f"dataset {flags}", {}, words)
        for flags, words in (
            ("-n=-2", ("-n",)),
            ("-w=0", ("-w",)),
            ("--base-url=ftp://x", ("--base-url",)),
            ("--base-url=https://u:hidden@h", ("credentials do not belong",)),
            ("--base-url=https://h/x?sig=hidden", ("credentials do not belong",)),
        )
    ),
]


def run_row(line: str) -> training.Outcome:
    """Run a command line. base_train and validate get the settings and data of the finished run and
    a new tag, unless the line has others."""
    name, *argv = shlex.split(line)
    main = importlib.import_module(MODULES.get(name, f"scripts.{name}")).main
    if name in ("base_train", "validate") and "--world-size" not in line:
        defaults = {
            **training.SETTINGS,
            "model_tag": "new",
            **({} if "-path=" in line else {"data_path": "data"}),
        }
        argv = [*as_flags(defaults), *argv]
    return command(main, *argv)


ROWS = [*DATA, *SHARDS, *FLAGS, *RESUMED, *READERS, *MAKERS]


@pytest.mark.parametrize(("line", "files", "words"), ROWS, ids=[row[0] for row in ROWS])
def test_bad_input_is_one_sentence_and_changes_nothing(copied, monkeypatch, line, files, words):
    monkeypatch.chdir(copied)
    for name, content in files.items():
        write(copied / name, content)
    before = fingerprint(copied)
    outcome = run_row(line)
    output = outcome.out + outcome.err
    errors = [row for row in outcome.err.splitlines() if row.startswith("error: ")]
    assert outcome.code in (1, 2) and "Traceback" not in output and "hidden" not in output, output
    assert len(errors) == bool(words), output  # a row without words is a report on standard output
    assert all(word in output for word in words), output
    after = fingerprint(copied)
    assert {name: after.get(name) for name in before} == before
    new = {name for name in after.keys() - before.keys() if not Path(name).name.startswith(".")}
    caches = ("prepared/", "wandb/matplotlib/")
    assert not {name for name in new if not name.startswith(caches)}, (
        "the command left a file behind"
    )


# ---- remedies ------------------------------------------------------------------------------------


@pytest.fixture
def half_done(copied):
    for name in UNFINISHED:
        shutil.rmtree(copied / name)
    return run_dir()


@pytest.mark.parametrize(
    ("damage", "name", "word"),
    [
        (lambda path: truncate(path, 1000), checkpoint.MODEL_NAME, "bytes on disk"),
        (last_byte, checkpoint.OPTIMIZER_NAME, "do not match"),
        (Path.unlink, checkpoint.STATE_NAME, "never finished"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    copied, finished, half_done, damage, name, word
):
    path = half_done / "checkpoints" / "checkpoint-4"
    damage(path / name)
    before = fingerprint(half_done)
    said = training.refuse(resume=path)
    assert str(path / name) in said and word in said and fingerprint(half_done) == before
    outcome = succeed()
    assert "checkpoint-4 is skipped" in outcome.err and word in outcome.err
    assert str(path / name) in outcome.err and "at step 2" in outcome.out
    assert state_of(training.final()) == state_of(finished / "runs/run/checkpoints/final")


@pytest.mark.parametrize(("split", "value"), [("train", training.VOCAB_SIZE), ("val", 65535)])
def test_training_names_the_shard_whose_ids_are_outside_the_vocabulary(copied, split, value):
    """In a step, this ends the run; in an evaluation, it is logged, and the run continues."""
    for path in (copied / "shards" / split / "data").glob("*.bin"):
        ids = np.fromfile(path, "<u2")
        ids[7::50] = value
        ids.tofile(path)
    words = (
        f"{split}/data/shard_",
        "entry ",
        f"holds the id {value:,}",
        "verify",
        f"vocabulary of {training.VOCAB_SIZE:,}",
    )
    new = {
        "model_tag": "new",
        "data_path": copied / "shards",
        "data_format": "shards",
        "eval_every": 1,
    }
    if split == "train":
        said = training.refuse(**new)
        assert all(word in said for word in words), said
        assert checkpoints("new") == []
    else:
        succeed(**new, num_iterations=1, save_every=-1)
        reasons = [event["reason"] for event in training.events("evaluation_failed", "new")]
        assert len(reasons) == 2 and all(word in reason for word in words for reason in reasons)
        assert checkpoints("new") == ["final"]


def test_token_files_without_a_tokenizer_ask_for_theirs_and_not_for_a_new_one(copied):
    for folder in (copied, copied / "shards"):
        shutil.rmtree(folder / "tokenizer")
    said = training.refuse(data_path=copied / "shards", data_format="shards", model_tag="new")
    assert f"{copied}/shards: no tokenizer" in said and "--tokenizer" in said
    assert "tok_train" not in said


def test_shards_contain_their_tokenizer_and_can_be_restored_to_the_byte(copied):
    new = {
        "data_path": copied / "shards",
        "data_format": "shards",
        "num_iterations": 1,
        "save_every": -1,
    }
    shutil.rmtree(copied / "tokenizer")  # the default one is not needed
    succeed(**new, model_tag="beside")
    succeed(**new, model_tag="named", tokenizer=copied / "shards" / "tokenizer")
    before = tree(copied / "shards")
    lost = copied / "shards" / "train" / "data" / "shard_0.bin"
    truncate(lost, 11)
    assert f"PROBLEM {lost}: " in command(verify.main, copied / "shards").out
    lost.unlink()  # the remedy in the error
    assert pretokenize(copied, copied / "shards").code == 0 and tree(copied / "shards") == before


# ---- in processes of their own -------------------------------------------------------------------


def limit_files(num_bytes: int) -> None:
    """Make writes beyond `num_bytes` fail in this process, like on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def fail(*words, world_size=2, limit=None, **settings):
    """All processes exit with code 1, and one of them prints the sentence. `limit`: maximum bytes
    of a file."""
    hook = None if limit is None else partial(limit_files, limit)
    group = training.start(world_size, hook=hook, collective_timeout_seconds=20, **settings)
    assert group.wait() == [1] * world_size, group.text()
    text = group.text()
    assert text.count("error: ") == 1 and "Traceback" not in text, text
    assert all(word in text for word in words), text


def test_a_disk_that_is_full_while_saving(finished, half_done):
    """With two processes; tests/faults/test_state_machine.py has one."""
    before = fingerprint(half_done / "checkpoints")
    limit = (half_done / "checkpoints" / "checkpoint-4" / checkpoint.MODEL_NAME).stat().st_size // 2
    assert (half_done / "logs" / "train.jsonl").stat().st_size + 4096 < limit, (
        "otherwise the log fails first"
    )
    fail("could not be written to", "older checkpoints are untouched", limit=limit)
    assert fingerprint(half_done / "checkpoints") == before
    # does not matter
    write_shard(training.run_dir().parents[1] / "data" / "shard_2b.parquet", texts(96, seed=78))
    outcome = succeed()
    assert "at step 4" in outcome.out
    assert state_of(training.final()) == state_of(finished / "runs/run/checkpoints/final")


def test_a_disk_that_is_full_at_the_start_leaves_no_run(copied):
    fail(world_size=1, limit=2000, model_tag="new")
    assert not (run_dir("new") / "config.json").exists()
    succeed(model_tag="new", num_iterations=1, seed=7)


def test_an_error_ends_all_processes_and_is_printed_once(copied, half_done):
    before = fingerprint(half_done)
    fail("--lanes=1: got 2 processes", lanes=1, model_tag="new")
    assert not run_dir("new").exists()
    fail("--seed", "--model-tag", seed=1)
    (copied / "data" / "shard_0.parquet").unlink()
    fail("shard_0.parquet", "does not exist")
    assert fingerprint(half_done) == before


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_mapped_file_that_is_truncated_under_a_run_is_named_by_the_next_launch(copied, ending):
    """Regression: SIGBUS ended the process without a message."""
    path = (copied / "shards" / "train" / "data" / "shard_0.bin").with_suffix(ending)
    flags = {
        "data_path": copied / "shards",
        "data_format": "shards",
        "model_tag": "new",
        "save_every": 100,
    }
    group = training.start(
        hook=partial(training.after_step, 2, partial(truncate, path, 0)),
        **flags,
        num_iterations=2000,
    )
    assert group.wait() == [-signal.SIGBUS]
    output = group.text()
    assert "a file was truncated: the next launch names it" in output
    assert "Fatal Python error: Bus error" in output and "nanochat/tokens.py" in output
    assert str(path) in training.refuse(**flags)


# ---- disks that cannot be written ----------------------------------------------------------------


def pretokenize(base: Path, out: Path) -> training.Outcome:
    tokenizer = next(
        path for path in (base / "tokenizer", base / "shards" / "tokenizer") if path.exists()
    )
    return command(
        tok_shards.main,
        f"--input-dir={base / 'data'}",
        f"--output-dir={out}",
        "--num-workers=1",
        f"--tokenizer={tokenizer}",
        "--max-length=400",
        "--overlap-size=40",
    )


def test_a_disk_that_fills_while_shards_are_written(copied):
    """From any write, fsync or rename on: the error names a file, the files on disk are complete,
    and the same command continues to the same bytes."""
    changes, whole = r"(write|fsync|replace) ", tree(copied / "shards")
    with crashes.watching(copied / "all", match=changes) as counted:
        assert pretokenize(copied, copied / "all").code == 0
    total, pair_counts = len(counted.made), set()
    assert tree(copied / "all") == whole and total > 30
    for at in [*range(0, total, total // 10), total - 1]:
        out = copied / f"full-{at}"
        with crashes.failing_at(at, errno.ENOSPC, below=out, onwards=True, match=changes):
            outcome = pretokenize(copied, out)
        sentences = [
            line for line in outcome.err.splitlines() if line.startswith(("error: ", "failed: "))
        ]
        assert outcome.code == 1 and "Traceback" not in outcome.err
        assert sentences and all("No space left on device" in line for line in sentences), (
            outcome.err
        )
        assert not list(out.rglob("*.tmp"))
        pairs = [open_tokens(path) for path in out.rglob("*.idx")]
        for path in out.rglob("manifest.json"):
            for name, record in (read_manifest(path.parent) or {})["shards"].items():
                assert hash_file(path.parent / f"{name}.bin") == record["bin_hash"]
        pair_counts.add(len(pairs))
        assert pretokenize(copied, out).code == 0 and tree(out) == whole
    assert {0, 4} <= pair_counts and len(pair_counts) > 2, (
        "the disk was full before, between and after the pairs"
    )
