"""Damage files as disks, editors and attackers do, and check that every reader reads or refuses
them properly.

    python -m dev.fuzz --cases=1000 --seed=0          # a table; exit code 1 if there is a finding
    python -m dev.fuzz --only=tokenizer --cases=300

    good file --bytes flipped, cut, spliced; JSON with other types, missing keys, brackets--> damaged file --> reader

A reader may read a damaged file or refuse it with a ValueError or an OSError whose sentence names
the file. Anything else is a finding: another exception, a sentence without the file, no answer
within LIMIT_S, the death of the process (readers run in a child process), or a scripts.verify that
accepts a token file that differs from its manifest.json.

The same seed makes the same cases. A finding is printed with the number that repeats it (--only,
--case, and the same --seed).
"""

import contextlib
import gzip
import io
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet
from tqdm import tqdm

from dev.damage import damage, forge, reseal
from dev.make_eval_bundle import make_eval_bundle
from nanochat import (
    checkpoint,
    config,
    core_eval,
    curriculum,
    files,
    pins,
    plan,
    run_dir,
    run_owner,
    run_reader,
    sources,
    splits,
    text,
    text_kinds,
    tokens,
)
from nanochat.cli import Parser, run_main, whole
from nanochat.common import as_path, begin_launch, table
from nanochat.integrations import download
from nanochat.integrations import object_storage as store
from nanochat.tokenizer import RustBPETokenizer, get_tokenizer
from scripts import (
    base_train,
    compare_runs,
    convert_shards,
    export,
    inspect_data,
    page,
    report,
    status,
    stop,
    tok_shards,
    validate,
    verify,
)
from tests import training

MEMORY_BYTES = 12 << 30  # address space of the child process, at most
LIMIT_S = 20.0  # per case


# ---- good files ----------------------------------------------------------------------------------


def make_files(base: Path) -> None:
    """Write text, token files of both formats, curricula, flags, tasks, third-party tokenizers, and
    a run of four steps on the shards."""
    with training.workplace(base), contextlib.redirect_stdout(io.StringIO()):
        texts = training.texts(60, seed=1)
        data = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
        for name, packed in (
            ("a.jsonl", data),
            ("a.jsonl.gz", gzip.compress(data)),
            ("a.txt", data),
            ("a.json.gz", gzip.compress(data)),
            ("a.NDJSON", data),
            ("a.jsonl.zst", pa.compress(data, "zstd", asbytes=True)),
        ):
            (base / name).write_bytes(packed)
        table = pa.table({"text": texts})
        with pa.ipc.new_stream(base / "a.arrow", table.schema) as out:
            out.write_table(table, max_chunksize=20)
        assert (
            tok_shards.main(
                [
                    f"--input-dir={base / 'data'}",
                    f"--output-dir={base / 'shards'}",
                    "--num-workers=1",
                    f"--tokenizer={base / 'tokenizer'}",
                    "--max-length=96",
                    "--overlap-size=8",
                ]
            )
            == 0
        )
        assert (
            convert_shards.main(
                [str(base / "shards/train/data"), str(base / "pairs"), "--to=megatron"]
            )
            == 0
        )
        make_foreign(base, texts)
        (base / "mix.yaml").write_text(
            "curriculum:\n- duration_tokens: 3_000\n  mix: {web: 7, code: 0.5}\n"
            "- duration_tokens: 5e3\n  mix: {web: 1}\nmax_epochs: {code: 2}\n"
        )
        (base / "flags.yaml").write_text(
            "depth: 3\nmatrix-lr: 0.01\ndeterministic: no\nblend_weights: [1, 2.5]\n"
            "order: megatron\ndata-format: 'megatron'\nmodel_tag: null\n"
        )
        make_eval_bundle(base / "bundle", num_items=10, labels=("choices", "schema", "text"))
        shutil.make_archive(str(base / "bundle"), "zip", base / "bundle")
        (base / "hf").mkdir()
        for name, data in export.tokenizer_files(
            RustBPETokenizer.from_directory(base / "tokenizer"), 64
        ).items():
            (base / "hf" / name).write_bytes(data)
        (base / "run.yaml").write_text(
            f"curriculum:\n- duration_tokens: {4 * training.STEP}\n  mix: {{data: 1}}\n"
        )
        assert base_train.main(run_flags(base)) == 0


def make_foreign(base: Path, texts: list[str]) -> None:
    """Write a tokenizer of another program: foreign/tokenizer.json with its config."""
    import tokenizers

    unigram = tokenizers.SentencePieceUnigramTokenizer()
    unigram.train_from_iterator(
        texts, 300, show_progress=False, special_tokens=["<unk>", "</s>"], unk_token="<unk>"
    )
    (base / "foreign").mkdir()
    unigram.save(str(base / "foreign/tokenizer.json"))
    ends = {"eos_token": {"content": "</s>"}, "bos_token": None}
    (base / "foreign/tokenizer_config.json").write_text(json.dumps(ends))


def read_foreign(path: Path) -> None:
    """Open and use a tokenizer."""
    tokenizer = get_tokenizer(path)
    tokenizer.decode(tokenizer.encode("a </s> text"))
    tokenizer.token_bytes()


def run_flags(base: Path) -> list[str]:
    """The command line of the run in `base`."""
    return training.flags(
        **{
            **training.SMALL,
            "data_path": base / "shards",
            "data_format": "shards",
            "num_iterations": 4,
            "save_every": 2,
            "eval_every": 4,
            "eval_tokens": 256,
            "curriculum": base / "run.yaml",
        }
    )


# ---- readers -------------------------------------------------------------------------------------

RUN = Path("runs/run")
FINAL = RUN / "checkpoints/final"


@dataclass(frozen=True)
class Reader:
    """A reader of files: `read(base, seed)` is called after one of the `files` (patterns below
    base) is damaged."""

    read: Callable[[Path, int], Any]
    files: tuple[str, ...] = ()
    weight: float = 1.0  # its number of cases, relative to the other readers
    # called in every second case: updates checksums in `folder`
    after: Callable[[Path], Any] | None = None
    folder: Path = Path()


def text_reader(name: str) -> Reader:
    """A reader that reads all texts of a file."""
    return Reader(lambda base, _: list(text_kinds.read_texts(base / name)), (name,))


def read_pair(path: Path) -> None:
    pair = tokens.open_tokens(path, vocab_size=training.VOCAB_SIZE)
    for first in range(0, len(pair), 64):
        last = min(first + 64, len(pair))
        pair.documents(first, last, 256)
        pair.document_lengths(first, last, 256)
    pair.pin("a")


def read_checkpoint(path: Path) -> None:
    loaded = checkpoint.load_checkpoint(path)
    for state in (loaded.model_state(), loaded.optimizer_state()):
        list(compare_runs.leaves(state))


def read_flags(base: Path, _: int) -> None:
    """Parse a file of flags. ValueError with the parser's message."""
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            base_train.parse_args([f"--config={base / 'flags.yaml'}"])
    except SystemExit as e:
        assert e.code == 2 and err.getvalue().startswith("error: ")
        raise ValueError(err.getvalue()) from None


def read_tasks(folder: Path) -> None:
    for task in core_eval.read_bundle(folder):
        for index in range(len(task.items)):
            core_eval.make_prompts(task, index)


def read_archive(base: Path, _: int) -> None:
    with (
        tempfile.TemporaryDirectory(dir=base) as folder,
        mock.patch.object(download, "BUNDLE_BYTES", 1 << 22),
    ):
        download.unpack(base / "bundle.zip", Path(folder) / "bundle.zip")
        read_tasks(Path(folder) / "bundle.zip")


def read_columns(base: Path, seed: int) -> None:
    """Read text from tables with random columns, some with equal names."""
    rng = random.Random(seed)
    strings, problems = pa.array(["a", "", "b"]), []
    kinds = (
        strings,
        strings,
        strings,
        strings.cast(pa.large_string()),
        strings.dictionary_encode(),
        pa.nulls(3),
        *map(pa.array, ([1, 2, 3], ["a", None, "b"], [["a"], [], ["b"]], [b"a", b"\xff", b""])),
        *(pa.StructArray.from_arrays([strings] * n, names=["text"] * n) for n in (1, 2)),
    )
    names = [
        rng.choice(("text", "text", "a", "a.text", "", "\0", "t\u00e9xt"))
        for _ in range(rng.randrange(4))
    ]
    whole = pa.Table.from_arrays([rng.choice(kinds) for _ in names], names=names)
    path = base / "columns.arrow"
    with pa.ipc.new_stream(path, whole.schema) as out:
        out.write_table(whole)
    for file in (path, path.with_suffix(".parquet")):
        with contextlib.suppress(pa.ArrowException):  # pyarrow cannot write every table
            if file.suffix == ".parquet":
                pa.parquet.write_table(whole, file)
        try:
            list(
                text_kinds.read_texts(file, text.Selection(rng.choice(("text", "a", "a.text", ""))))
            )
        except (ValueError, OSError) as e:
            assert str(file) in str(e), str(e)
            problems.append(str(e))
    if problems:
        raise ValueError(problems[0])


NAMES = (
    "a.parquet",
    "b.jsonl",
    "c.NDJSON",
    "d.json",
    "e.txt",
    "train-0.parquet",
    "test-0.parquet",
    "validation.jsonl",
    "_f.parquet",
    "README.txt",
    "g.csv",
    "train_1.json.gz",
    "dev.jsonl",
)
PLACES = (
    *[""] * 6,
    "web",
    "_temporary/0",
    ".git",
    "train",
    "validation",
    "test",
    "../disk",
    "../disk/deep",
)
LINKS = (
    ("linked", "../disk"),
    ("web", "../disk"),
    ("loop", "."),
    ("disk.parquet", "../gone"),
    ("gone", "../gone"),
    ("twice.parquet", "a.parquet"),
    ("../disk/up", "../data"),
)
CONTENTS: tuple[list[str | None], ...] = (*[["one", "two"]] * 6, ["one", None, "two"], [None], [])  # type: ignore


def make_folder(folder: Path, rng: random.Random) -> None:
    """Fill a data folder as people have them: links, hidden folders, empty files, nulls, names that
    state a split."""
    (folder / "../disk").resolve().mkdir(parents=True)
    for name in rng.sample(NAMES, rng.randrange(2, 10)):
        path, texts = folder / rng.choice(PLACES) / name, rng.choice(CONTENTS)
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            column = pa.table({"text": pa.array(texts, pa.string())})
            pa.parquet.write_table(column, path, write_statistics=rng.random() < 0.5)
        else:
            lines = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
            path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    folder.mkdir(exist_ok=True)
    for link, target in rng.sample(LINKS, rng.choice((0, 0, 1, 2))):
        with contextlib.suppress(FileExistsError):
            (folder / link).symlink_to(target)


def read_folder(base: Path, seed: int) -> None:
    """Pin a random data folder. Hidden files, files for testing and nulls are never read; every
    other file is."""
    with tempfile.TemporaryDirectory(dir=base) as temporary:
        folder = Path(temporary).resolve() / "data"
        make_folder(folder, random.Random(seed))
        try:
            manifests = splits.pin_files(folder)
        except (ValueError, OSError) as e:
            assert str(folder) in str(e), str(e)
            raise
        tops = {
            PurePosixPath(entry["name"]).parts[0]
            for manifest in manifests["train"].values()
            for entry in manifest["files"]
        }
        # with train/, this folder and those for validation decide about all files in them
        decided = {"train", *splits.VAL_FOLDERS} if "train" in tops else set()
        for split, buckets in manifests.items():
            entries = [entry for manifest in buckets.values() for entry in manifest["files"]]
            names = [PurePosixPath(entry["name"]) for entry in entries]
            undecided = [name for name in names if name.parts[0] not in decided]
            states = splits.stated_splits(undecided).values()
            for entry in entries:
                texts = list(text_kinds.read_texts(folder / entry["name"]))
                assert texts and len(texts) == sum(entry["groups"]) and None not in texts, entry
                assert not files.is_hidden(Path(entry["name"])) and "/." not in entry["name"], entry
            assert "test" not in states, (split, entries)
        assert sources.check_files(manifests) == manifests


def read_short_pair(base: Path, seed: int) -> None:
    """Open token files whose .bin is shorter than the index says: always a ValueError."""
    rng = random.Random(seed)
    source = base / rng.choice(("pairs/shard_0", "shards/train/data/shard_0"))
    with tempfile.TemporaryDirectory(dir=base) as folder:
        for ending in (".bin", ".idx"):
            shutil.copy(f"{source}{ending}", folder)
        short = Path(folder) / "shard_0.bin"
        os.truncate(short, rng.randrange(short.stat().st_size))
        tokens.open_tokens(short)
    raise AssertionError(f"{source}: opened, although its .bin is truncated")


def read_prefixes(base: Path, seed: int) -> None:
    """Find token files by lists of prefixes: some longer than any path, some with weights or odd
    characters."""
    rng = random.Random(seed)
    good = [str(path.with_suffix("")) for path in sorted((base / "pairs").glob("*.bin"))]
    odd = ("x" * 300, "", "nul\0", "70", str(base / "nowhere"), "a b", "\n")
    words = [
        rng.choice(odd) if rng.random() < 0.02 else rng.choice(good)
        for _ in range(rng.choice((1, 3, 500)))
    ]
    weighted = rng.random() < 0.3
    (base / "list.txt").write_text(
        " ".join(f"{rng.random():.3f} {word}" if weighted else word for word in words)
    )
    listed = files.read_data_args(base / "list.txt")
    paths, weights = files.split_weights(rng.choice((listed, ",".join(words))))
    assert weights is None or len(weights) == len(paths.split(","))
    try:
        assert files.find_files(paths, "megatron"), "no file and no error"
    except ValueError as e:
        assert "embedded null" not in str(e), str(e)
        raise


def read_url(_: Path, seed: int) -> None:
    """Pass URLs with secrets to commands and functions. No output may show a secret."""
    rng = random.Random(seed)
    scheme = "".join(
        rng.choice((c, c.upper()))
        for c in rng.choice(("s3", "gs", "az", "msc", "http", "https", "ftp"))
    )
    user = rng.choice(("", "HIDDEN@", "u:HIDDEN@", "u:HID/DEN@", ":HIDDEN@"))
    query = rng.choice(("?sig=HIDDEN", "?HIDDEN")) if not user or rng.random() < 0.3 else ""
    url = f"{scheme}:{rng.choice(('/', '//', '///'))}{user}host{rng.choice(('', ':80', '/a', '/a/b.yaml'))}{query}"
    flag = rng.choice(
        (
            "",
            "-n",
            "--data-path=",
            "--tokenizer=",
            "--config=",
            "--curriculum=",
            "--depth=",
            "--dpeth=",
            "--blend-weights=1,",
            "--data-path=/a,",
            "--model-tag=",
        )
    )
    takers: tuple[Callable[[], object], ...] = (
        lambda: base_train.main([f"{flag}{url}"]),
        lambda: tok_shards.main([f"{flag}{url}"]),
        lambda: inspect_data.main(["rows", f"{flag}{url}"]),
        lambda: as_path(url),
        lambda: get_tokenizer(url),
        lambda: download.main([f"--base-url={url}"]),
        lambda: download.make_downloader(base_url=url),
        lambda: download.fetch_bundle(url, Path("nowhere")),
    )
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            rng.choice(takers)()
    except (ValueError, OSError, SystemExit) as e:
        shown = f"{output.getvalue()}{e}"
        assert not any(part in shown for part in ("HID", "DEN")), shown
        raise ValueError(shown) from None
    raise AssertionError(f"{flag}{url} was accepted")


def read_store(_: Path, seed: int) -> None:
    """Read from object storage that answers wrongly: the result is the requested bytes or an
    error."""
    rng, whole = random.Random(seed), bytes(range(256)) * 40

    def odd(value: Any) -> Any:
        return rng.choice(
            (value, value, value, 0, value + 1 if isinstance(value, int) else "other")
        )

    def fail() -> None:
        if rng.random() < 0.3:
            raise rng.choice(
                (OSError, ValueError, PermissionError, FileNotFoundError, BaseException)
            )(
                f"status code: {rng.choice((200, 301, 403, 404, 412, 500))} <Code>x</Code> KEY:HIDDEN@host?sig=HIDDEN"
            )

    def answer(_: Any, key: str, options: dict[str, Any]) -> Any:
        fail()
        begin, end = (odd(edge) for edge in options["range"])
        meta = {"path": key, "size": odd(len(whole)), "e_tag": odd("tag")}
        return SimpleNamespace(bytes=lambda: whole[begin:end], meta=meta, range=(begin, end))

    def listing(*_: Any) -> Any:
        fail()
        return [[{"path": odd("x/a.bin"), "size": len(whole), "e_tag": rng.choice(("tag", None))}]]

    obstore = SimpleNamespace(
        list=listing,
        get=answer,
        head=lambda *_: listing()[0][0],
        store=SimpleNamespace(from_url=lambda *_, **__: None),
    )
    patience = store.Patience(first_answer_s=0.02, give_up_s=0.02)
    with (
        mock.patch.object(store, "PATIENCE", patience),
        mock.patch.object(store, "load_obstore", lambda: obstore),
    ):
        begin_launch()
        try:
            store.list_objects("s3://b/x")
            pinned = store.Stat("s3://b/x/a.bin", len(whole), "tag")
            assert store.read_range(pinned, 100, 900) == whole[100:900], "not the requested bytes"
        except (ValueError, OSError) as e:
            assert "HIDDEN" not in str(e), str(e)
            raise


def read_verify(base: Path, _: int) -> None:
    """Run scripts.verify. ValueError if it reports a problem."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = verify.main([str(base / "shards" / "train")])
    if code:
        raise ValueError(out.getvalue())


def read_stop(base: Path, _: int) -> None:
    """Run scripts.stop --force on a run without processes. A signal to any process is a finding."""
    state = run_reader.RunReader(base / RUN).status()
    if state["status"] is None:
        raise ValueError(state["reason"])
    with mock.patch.object(os, "kill") as kill, mock.patch.multiple(stop, GRACE_S=0.0, KILL_S=0.0):
        stop.force(state)
    assert not kill.called, kill.mock_calls


def script(main: Callable[[list[str]], int], *argv: str) -> Callable[[Path, int], Any]:
    """A reader that runs a script and ignores its exit code."""
    return lambda base, _: main([word.format(base) for word in argv])


RUN_FILES = (
    f"{RUN}/*.json",
    f"{RUN}/.run_state.json",
    f"{RUN}/.owner.json",
    f"{RUN}/logs/train.jsonl",
    f"{RUN}/logs/cursors/*",
    f"{RUN}/tokenizer/*",
    f"{FINAL}/trainer_state.json",
    f"{FINAL}/dataloader_state/*",
)
PAIR = ("shards/train/data/*_0.bin", "shards/train/data/*_0.idx")
READERS: dict[str, Reader] = {
    "parquet": text_reader("data/shard_0.parquet"),
    "footer": Reader(
        lambda base, _: text.read_footer(base / "data/shard_0.parquet"), ("data/shard_0.parquet",)
    ),
    **{
        kind: text_reader(f"a.{kind}")
        for kind in ("jsonl", "jsonl.gz", "jsonl.zst", "arrow", "txt", "json.gz", "NDJSON")
    },
    "shards": Reader(
        lambda base, _: read_pair(next((base / "shards/train/data").glob("*_0.bin"))),
        (*PAIR, "shards/train/data/manifest.json"),
        2,
    ),
    "megatron": Reader(
        lambda base, _: read_pair(base / "pairs/shard_0.bin"), ("pairs/shard_0.*",), 2
    ),
    "verify": Reader(read_verify, (*PAIR, "shards/train/data/manifest.json"), 2),
    "config.json": Reader(
        lambda base, _: config.Settings.from_json(run_dir.read_config(base / RUN)),
        (f"{RUN}/config.json",),
    ),
    "data_manifest.json": Reader(
        lambda base, _: pins.read_manifests(base / RUN / "data_manifest.json"),
        (f"{RUN}/data_manifest.json",),
    ),
    "run state": Reader(
        lambda base, _: status.status_text(run_reader.RunReader(base / RUN).status()),
        (f"{RUN}/.run_state.json",),
    ),
    "stop": Reader(read_stop, (f"{RUN}/.run_state.json",)),
    "owner": Reader(lambda base, _: run_owner.check_free(base / RUN), (f"{RUN}/.owner.json",), 0.3),
    "train.jsonl": Reader(
        lambda base, _: list(run_dir.iter_log(base / RUN / "logs/train.jsonl")),
        (f"{RUN}/logs/train.jsonl",),
    ),
    "cursors": Reader(
        lambda base, _: run_dir.read_cursors(base / RUN / "logs/cursors/step-00000002.json.gz"),
        (f"{RUN}/logs/cursors/step-00000002.json.gz",),
    ),
    "checkpoint": Reader(
        lambda base, _: read_checkpoint(base / FINAL),
        (f"{FINAL}/*", f"{FINAL}/*/*"),
        2,
        reseal,
        FINAL,
    ),
    "tokenizer": Reader(
        lambda base, _: RustBPETokenizer.from_directory(base / "tokenizer").encode("a text"),
        ("tokenizer/tokenizer.json", "tokenizer/ranks.tiktoken"),
        2,
        forge,
        Path("tokenizer"),
    ),
    "tokenizer.json": Reader(
        lambda base, _: read_foreign(base / "foreign"), ("foreign/*.json",), 2
    ),
    "curriculum": Reader(lambda base, _: curriculum.load(base / "mix.yaml"), ("mix.yaml",), 2),
    "plan.json": Reader(
        lambda base, _: plan.read_plan(base / RUN / "plan.json"), (f"{RUN}/plan.json",)
    ),
    "store": Reader(read_store, weight=2),
    "flags": Reader(read_flags, ("flags.yaml",), 2),
    "tasks": Reader(
        lambda base, _: read_tasks(base / "bundle"),
        ("bundle/*.yaml", "bundle/*.csv", "bundle/*/*/*"),
        2,
    ),
    "archive": Reader(read_archive, ("bundle.zip",)),
    "columns": Reader(read_columns),
    "folder": Reader(read_folder, weight=2),
    "short pair": Reader(read_short_pair),
    "prefixes": Reader(read_prefixes),
    "url": Reader(read_url, weight=2),
    "tokenizer_config": Reader(
        lambda base, _: get_tokenizer(base / "hf"), ("hf/tokenizer_config.json",)
    ),
    "page": Reader(script(page.main, "run", "--out={}/page.html"), RUN_FILES, 0.5),
    "status": Reader(script(status.main, "run"), RUN_FILES, 0.5),
    "report": Reader(script(report.main, "run"), RUN_FILES, 0.5),
    "inspect_data": Reader(script(inspect_data.main, "rows", "run", "--step=3"), RUN_FILES, 0.5),
    "compare_runs": Reader(script(compare_runs.main, "run", "run"), RUN_FILES, 0.5),
    "validate": Reader(lambda base, _: validate.main(run_flags(base)), RUN_FILES, 0.5),
}


# ---- cases ---------------------------------------------------------------------------------------


def judge(name: str, base: Path, seed: int, damaged: Path | None, altered: bool) -> tuple[str, str]:
    """("read", "refused" or "found", details) of a case. Runs in the child process."""
    begin_launch()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            READERS[name].read(base, seed)
    except SystemExit as e:
        return "found", f"exit {e.code}"
    except (ValueError, OSError) as e:
        message = str(e)
        named = (
            damaged is None
            or damaged.name in message
            or damaged.stem in message
            or str(damaged.parent) in message
        )
        # a changed manifest contradicts the data, so the error may name either
        named |= (
            damaged is not None and damaged.name == "data_manifest.json" and str(base) in message
        )
        return ("refused" if named and message else "found", f"{type(e).__name__}: {message[:300]}")
    except BaseException as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        return "found", f"{type(e).__name__}: {str(e)[:300]} at {last.filename}:{last.lineno}"
    bad = (
        name == "verify" and altered and damaged is not None and damaged.suffix in (".bin", ".idx")
    )
    return ("found", "verify passes an altered file") if bad else ("read", "")


def begin(base: Path) -> None:
    """Set up the child process."""
    os.environ.update(NANOCHAT_BASE_DIR=str(base))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


class Child:
    """The process that runs the readers. It is restarted after it dies or does not answer in
    time."""

    def __init__(self, base: Path):
        self.base = base
        self.pool: ProcessPoolExecutor | None = None

    def ask(self, *case: Any) -> tuple[str, str]:
        """The verdict of `judge` on a case."""
        if self.pool is None:
            self.pool = ProcessPoolExecutor(
                1, multiprocessing.get_context("fork"), begin, (self.base,)
            )
        try:
            return self.pool.submit(judge, *case).result(LIMIT_S)
        except TimeoutError:
            verdict = "found", f"no answer in {LIMIT_S:.0f} s"
        except BrokenProcessPool:
            verdict = "found", "the process died"
        self.close()
        return verdict

    def close(self) -> None:
        if self.pool is not None:
            for process in multiprocessing.active_children():
                process.kill()
            self.pool.shutdown()
            self.pool = None


def run_case(child: Child, name: str, number: int, seed: int) -> tuple[str, str]:
    """Damage a file, run the reader on it, and restore it."""
    reader, rng = READERS[name], random.Random(f"{seed} {name} {number}")
    paths = sorted(p for pattern in reader.files for p in child.base.glob(pattern) if p.is_file())
    if not paths:
        return child.ask(name, child.base, rng.randrange(2**32), None, False)
    path = rng.choice(paths)
    folder = child.base / (reader.folder if reader.after else path.parent)
    kept = {
        p: p.read_bytes() for p in (folder.rglob("*") if reader.after else [path]) if p.is_file()
    }
    data = damage(rng, path, kept[path])
    path.write_bytes(data)
    if reader.after is not None and number % 2:
        reader.after(folder)
    verdict, details = child.ask(name, child.base, number, path, data != kept[path])
    for p, before in kept.items():
        p.write_bytes(before)
    shutil.rmtree(child.base / "prepared", ignore_errors=True)
    return verdict, f"{path.relative_to(child.base)}: {details}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases. Exit code 1 if there is a finding."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=0, help="a different seed makes different cases"
    )
    parser.add_argument("--cases", type=whole(1), default=1000, help="for all readers together")
    parser.add_argument("--only", choices=READERS, help="run only this reader")
    parser.add_argument("--case", type=int, help="with --only: run only this case")
    args = parser.parse_args(argv)
    if args.case is not None and args.only is None:
        parser.error("--case: its number counts the cases of one reader; add --only=READER")
    names = [args.only] if args.only else list(READERS)
    share = args.cases / sum(READERS[name].weight for name in names)
    began, findings = time.monotonic(), []
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, contextlib.ExitStack() as stack:
        base = Path(folder).resolve()
        maker = multiprocessing.get_context("fork").Process(target=make_files, args=(base,))
        maker.start()
        maker.join()
        assert maker.exitcode == 0, "the good files could not be written"
        stack.enter_context(
            mock.patch.dict(os.environ, NANOCHAT_BASE_DIR=str(base), OMP_NUM_THREADS="1")
        )
        child = Child(base)
        stack.callback(child.close)
        for name in names:
            verdict, details = child.ask(name, base, 2**32, None, False)
            if verdict != "read" and READERS[name].files:
                findings.append(f"{name}: refuses the good files: {details}")
            numbers = (
                range(max(1, round(share * READERS[name].weight)))
                if args.case is None
                else [args.case]
            )
            for number in tqdm(numbers, desc=name, leave=False, disable=None):
                verdict, details = run_case(child, name, number, args.seed)
                counts[name][verdict] += 1
                if verdict == "found":
                    findings.append(f"{name} --case={number}: {details}")
    counts["all"] = sum(counts.values(), Counter())
    rows = [
        (name, sum(c.values()), c["refused"], c["read"], c["found"]) for name, c in counts.items()
    ]
    print(
        "\n".join(
            [
                *table(("reader", "cases", "refused", "read", "found"), rows),
                *findings,
                f"seed {args.seed}, {time.monotonic() - began:.0f} s",
            ]
        ),
        flush=True,
    )
    return 1 if findings else 0


if __name__ == "__main__":
    run_main(main)
