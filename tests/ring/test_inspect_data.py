"""scripts.inspect_data: steps are compared with the batches of the loader and the log of a run;
find, spikes and rows --sort=loss with a table of all rows of runs that were killed and resumed on
another number of processes."""

import gzip
import json
import re
import shutil
import sys
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest

from nanochat import find_report, run_stream, run_uses, seen, spike_report
from nanochat.checkpoint import find_checkpoint
from nanochat.cli import EXIT_HALTED
from nanochat.common import read_json
from nanochat.dataloader import OFF, DataLoader
from nanochat.files import BUCKET, data_at
from nanochat.find import find_document, groups_of
from nanochat.order import StreamConfig
from nanochat.packing import BestFit
from nanochat.parquet_source import ParquetSource
from nanochat.run_dir import (
    RowLosses,
    TrainLog,
    cursor_files,
    iter_log,
    keep_cursors,
    pack_cursors,
    read_cursors,
)
from nanochat.run_reader import RunReader
from nanochat.sources import scan
from nanochat.splits import split_train_val
from nanochat.stream import Stream
from nanochat.tokenizer import RustBPETokenizer
from scripts import base_eval, export, inspect_data, receipt, report, sample
from tests import training
from tests.finished import command
from tests.toy import some_texts, write_parquet

T = 24
R = 6
V = 3
FLAGS = [
    f"--max-seq-len={T}",
    f"--total-batch-size={R * T}",
    f"--lanes={V}",
    "--buffer-size=8",
    "--depth=1",
    "--num-iterations=5",
]
SHAPES = {"crop": {}, "split": {"long_docs": "split", "overlap": 5}, "concat": {"layout": "concat"}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """(data folder, tokenizer folder): three files; the last one is for validation."""
    root = tmp_path_factory.mktemp("corpus")
    for i in range(3):
        write_parquet(root / "data" / f"s{i}.parquet", some_texts(60, seed=i), group_size=25)
    tokenizer = RustBPETokenizer.train_from_iterator(some_texts(200, seed=9), 300)
    tokenizer.save(root / "tokenizer")
    return root / "data", root / "tokenizer"


def stream_flags(corpus, shape="crop"):
    """The flags of base_train for the stream of `batches`."""
    changed = {
        name.replace("layout", "packing").replace("_", "-"): value
        for name, value in SHAPES[shape].items()
    }
    return [
        f"--data-path={corpus[0]}",
        f"--tokenizer={corpus[1]}",
        *FLAGS,
        *(f"--{name}={value}" for name, value in changed.items()),
    ]


def run(*argv, code=0):
    """The output of a command."""
    outcome = command(inspect_data.main, *argv)
    assert outcome.code == code, outcome.err
    return outcome.out


def json_lines(*argv):
    return [json.loads(line) for line in run(*argv).splitlines()]


def batches(corpus, shape, steps):
    """The rows (inputs, targets) that a loader delivers, for each step."""
    tokenizer = RustBPETokenizer.from_directory(corpus[1])
    source = ParquetSource(
        scan(corpus[0], split_train_val(data_at(corpus[0]))["train"][BUCKET]), tokenizer
    )
    config, delivered = StreamConfig(T, V, 42, buffer_size=8, **SHAPES[shape]), []
    with DataLoader(
        config, {BUCKET: source}, tokenizer=tokenizer, rows_per_step=R, device_batch_size=R
    ) as loader:
        for _ in range(steps):
            batch = next(loader)
            delivered.append(list(zip(batch.inputs.tolist(), batch.targets.tolist())))
    return delivered


@pytest.fixture
def run_dir(copied):
    """A run of 8 steps with cursors of steps 2, 4, 6 and 8; those of step 6 are truncated."""
    truncated = cursor_files(training.run_dir())[6]
    truncated.write_bytes(truncated.read_bytes()[:50])
    return training.run_dir()


# ---- digest --------------------------------------------------------------------------------------


def test_digests_of_a_run_match_its_log_for_any_world_size_and_a_wrong_one_is_an_error(run_dir):
    for W in (1, 2, 3):
        lines = json_lines("digest", "--steps=1:10", run_dir, f"--world-size={W}")
        assert [line.get("match") for line in lines] == [True] * 7 + [None] * 2
        for line in lines:
            assert len(line["ranks"]) == len({*line["ranks"]}) == W
            assert f"{sum(int(part, 16) for part in line['ranks']) % 2**64:016x}" == line["digest"]
    with closing(TrainLog(run_dir / "logs" / "train.jsonl")) as log:
        log.write(step=5, digest="0123456789abcdef")
    outcome = command(inspect_data.main, "digest", "--steps=4:7", run_dir)
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    assert [line["match"] for line in lines] == [True, False, True] and "ranks" not in lines[0]
    assert outcome.code == 1 and "first at step 5" in outcome.err


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_name_the_documents_whose_tokens_they_hold(corpus, shape):
    tokenizer = RustBPETokenizer.from_directory(corpus[1])
    bos = tokenizer.get_bos_token_id()
    files = {p.name: pq.ParquetFile(p) for p in corpus[0].iterdir()}
    rows = batches(corpus, shape, 65)
    cases = {"whole": 0, "continued": 0, "cut": 0, "later epoch": 0, "later group": 0, "off": 0}
    for step in (0, 1, 5, *range(60, 65)):
        lines = json_lines("rows", f"--step={step}", "--json", *stream_flags(corpus, shape))
        assert [(line["row"], line["lane"]) for line in lines] == [
            (i, i * V // R) for i in range(R)
        ]
        for line, (inputs, targets) in zip(lines, rows[step]):
            tokens = []
            for d in line["documents"]:
                texts = files[d["file"]].read()["text"].to_pylist()
                in_group = files[d["file"]].read_row_group(d["group"])["text"].to_pylist()
                assert texts[d["document"]] == in_group[d["document_in_group"]]
                ids = tokenizer.encode_one(texts[d["document"]]).tolist()
                part = ids[d["start"] : d["stop"]]
                continued = d["start"] > 0 and shape != "concat"
                assert d["at"] == len(tokens) and d["of"] == len(ids)
                assert d["tokens"] == len(part) + continued
                tokens += [bos] * continued + part
                off = range(d["at"] + 1, d["at"] + 1 + d["off"])
                assert all(targets[t - 1] == OFF for t in off)
                cases["whole"] += len(part) == len(ids)
                cases["continued"] += d["start"] > 0
                cases["cut"] += d["stop"] < d["of"]
                cases["later epoch"] += d["epoch"] > 0
                cases["later group"] += d["group"] > 0
                cases["off"] += d["off"]
            assert sum(d["off"] for d in line["documents"]) == targets.count(OFF)
            assert tokens[:-1] == inputs
            assert all(x in (OFF, t) for x, t in zip(targets, tokens[1:]))
    missing = {"crop": {"continued", "off"}, "split": set(), "concat": {"off"}}[shape]
    assert {name for name, n in cases.items() if not n} == missing


def test_text_is_that_of_the_rows_tokens(corpus, monkeypatch):
    tokenizer = RustBPETokenizer.from_directory(corpus[1])
    flags = ["rows", "--step=3", "--row=4", "--text", *stream_flags(corpus, "split")]
    (line,) = json_lines(*flags, "--json")
    inputs, targets = batches(corpus, "split", 4)[3][4]
    assert targets[-1] != OFF, "the case: the row's last token is known"
    tokens = [*inputs, targets[-1]]
    assert "".join(d["text"] for d in line["documents"]) == tokenizer.decode(np.array(tokens))
    table = run(*flags)
    assert table.count("    | <|bos|>") == len(line["documents"]) > 0
    assert table.split()[:4] == ["step", "row", "lane", "lane_row"] and "--row=N" not in table
    monkeypatch.setattr(inspect_data, "LINES", 5)
    many = run("rows", "--step=3", "--text", *stream_flags(corpus, "split")).splitlines()
    assert len(many) == 1 + 2 * 5 + 1 + 6 and many[-7].startswith("5 of the step's ")
    assert many[-6:] == table.splitlines()[-6:]
    legend = "; " + "; ".join(many[-6:])
    unexplained = [name for name in many[0].split() if not re.search(rf"[,;] {name}[,:]", legend)]
    assert unexplained == ["step", "row", "lane", "bucket", "file"], "explained by the name itself"


def test_the_text_shows_every_end_of_a_line_and_which_tokens_have_no_loss():
    """Regression: \\r was hidden, and `off 64` did not say which tokens these are."""
    tokenizer = SimpleNamespace(decode=lambda ids: bytes(ids).decode())
    tokens = np.frombuffer(b"#again\r\nnew\r\n#next", np.uint8)
    live = np.ones(len(tokens), np.uint8)
    live[1:6] = 0
    row = SimpleNamespace(tokens=tokens, live=live)
    lines = inspect_data.text_lines(tokenizer, row, {"at": 0, "tokens": 13})
    assert lines == ["#[no loss: again]\\u000d", "new\\u000d"]
    shown = inspect_data.text_lines(tokenizer, row, {"at": 0, "tokens": 13}, whole=False)
    assert shown == ["\\u000d", "new\\u000d"], "regression: the line of a row was its overlap"
    place = {"at": 1, "tokens": 1}  # masked
    assert inspect_data.text_lines(tokenizer, row, place, whole=False) == ["[no loss: a]"]
    row.live = None
    assert inspect_data.text_lines(tokenizer, row, {"at": 13, "tokens": 5}) == ["#next"]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_the_part_of_a_book_in_a_row_has_its_line_in_the_file(tmp_path, suffix):
    """Regression: it was always line 1."""
    with training.workplace(tmp_path / "base"):
        (tmp_path / "books").mkdir()
        text = "".join(f"{line} is this line, \u00e9\u4e2d\r\n" for line in range(1, 999))
        for name in ("a", "b"):
            data = text.encode()
            if suffix == ".txt.gz":
                data = gzip.compress(data)
            (tmp_path / "books" / f"{name}{suffix}").write_bytes(data)
        flags = [*FLAGS, f"--data-path={tmp_path / 'books'}", "--long-docs=split", "--overlap=2"]
        rows = json_lines("rows", "--step=9", "--text", "--json", *flags)
    for place in [place for row in rows for place in row["documents"]]:
        second = place["text"].split("\n")[1]
        assert int(second.split()[0]) == place["line"] + 1
    assert place["line"] > 20, "the case"


def test_a_document_does_not_control_the_terminal(corpus, tmp_path, monkeypatch):
    hostile = "\x1b]0;title\x07\x9b2J\u202e \r over"
    for i in range(2):
        write_parquet(
            tmp_path / "data" / f"{i}\x1b[31m.parquet", [f"{hostile} {i} {j}" for j in range(200)]
        )
    argv = [
        "rows",
        "--step=0",
        "--row=1",
        "--text",
        f"--data-path={tmp_path / 'data'}",
        f"--tokenizer={corpus[1]}",
        *FLAGS,
    ]
    out = run(*argv)
    assert r"\u001b]0;title\u0007\u009b2J\u202e" in out and r"0\u001b[31m.parquet" in out
    assert not set(out) & set("\x1b\x07\x9b\u202e\r")
    (line,) = json_lines(*argv, "--json")
    assert any(hostile in document["text"] for document in line["documents"])
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert sample.marked("a\x1b[2J", "a\x1b[2Jb\x9b") == "\x1b[2ma\\u001b[2J\x1b[0mb\\u009b"


def test_rows_are_packed_from_the_nearest_good_cursors_and_equal_those_of_the_same_flags(
    run_dir, monkeypatch, caplog
):
    packed, next_rows = [], Stream.next_rows
    monkeypatch.setattr(Stream, "next_rows", lambda self, n: packed.append(n) or next_rows(self, n))
    # the cursors of step 6 are truncated
    for step, save in ((2, 2), (3, 2), (5, 4), (7, 4), (8, 8), (9, 8)):
        packed.clear()
        rows = json_lines("rows", f"--step={step}", "--json", "--text", "run")
        assert packed == [2] * (step - save + 1), "two rows of each lane in a step"
        assert rows == json_lines(
            "rows", f"--step={step}", "--json", "--text", *training.flags(model_tag=None)
        )
    assert "step-00000006.json.gz" in caplog.text
    assert "step 9 is computed from the data" in caplog.text


def test_a_run_whose_data_was_moved_is_read_where_data_path_says(run_dir):
    """Regression: the error named --data-path, and a run with --data-path was refused."""
    before = run("rows", run_dir, "--step=3")
    data = run_dir.parents[1] / "data"
    moved = data.rename(data.with_name("moved"))
    assert (
        "name the folder of all files"
        in command(inspect_data.main, "rows", run_dir, "--step=3").err
    )
    assert run("rows", run_dir, "--step=3", f"--data-path={moved}") == before
    words = [str(run_dir), "--device-type=cpu", "--eval=bpb", "--eval-tokens=64"]
    argv = [*words, "--unigram-tokens=1"]
    assert "--data-path" in command(base_eval.main, *argv).err
    assert command(base_eval.main, *argv, f"--data-path={moved}").code == 0
    assert command(receipt.main, str(run_dir), f"--data-path={moved}").code == 0


def test_after_a_launch_that_named_the_moved_data_no_command_needs_to_name_it(run_dir):
    before = run("rows", run_dir, "--step=3")
    data = run_dir.parents[1] / "data"
    training.succeed(data_path=data.rename(data.with_name("moved")), num_iterations=9)
    assert run("rows", run_dir, "--step=3") == before


def test_nor_if_validation_data_of_its_own_was_moved_too(tmp_path):
    """Regression: the files for validation were looked for below the --data-path. A resume that
    leaves --val-path out has that of the run."""
    with training.workplace(tmp_path / "base", **training.SMALL, num_iterations=2) as base:
        places = {"data_path": base / "data", "val_path": base / "held"}
        training.write_shard(base / "held/a.parquet", training.texts(24, seed=5))
        training.succeed(**places)
        training.succeed(data_path=base / "data", num_iterations=3)
        moved = {
            name: path.rename(path.with_name(f"new-{path.name}")) for name, path in places.items()
        }
        training.succeed(**moved, num_iterations=4)
        run("rows", training.run_dir(), "--step=3")
        assert command(receipt.main, str(training.run_dir())).code == 0
        with mock.patch.object(training, "flags", lambda **named: training.as_flags(named)):
            training.succeed(fork_from="run", model_tag="child", num_iterations=6)
        settings = read_json(training.run_dir("child") / "config.json")
        assert {name: settings[name] for name in moved} == {k: str(v) for k, v in moved.items()}
        run("rows", training.run_dir("child"), "--step=5")


def test_a_run_takes_no_other_flags_of_training(run_dir):
    err = command(inspect_data.main, "rows", run_dir, "--step=3", "--seed=7").err
    assert "--seed: a run has its own settings" in err


@pytest.mark.parametrize(
    "argv",
    [
        ["rows", "--step=3"],
        ["spikes"],
        ["ledger", "--step=7"],
        ["find", "--text=e"],
        ["find", "--document=shard_0.parquet:0"],
        ["find", "--texts={items}"],
    ],
    ids=lambda argv: "-".join(argv)[:12],
)
def test_no_question_is_answered_with_rows_that_the_run_did_not_train_on(
    run_dir, tmp_path, monkeypatch, argv
):
    """Regression: with another packer, wrong documents were shown beside the logged losses."""
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"text": "eight or more words that no document of it has"}) + "\n")
    command_line = [argv[0], str(run_dir), *argv[1:]]
    command_line = [word.format(items=items) for word in command_line]
    if argv == ["spikes"]:
        last = training.steps()[7]
        monkeypatch.setattr(spike_report, "ENOUGH", 4)
        with open(training.log_file(), "a") as log:
            log.write(json.dumps({**last, "loss": 99.0}) + "\n")
    run(*command_line)
    monkeypatch.setattr(BestFit, "_best", lambda packer, room: 0)  # which cuts every document
    outcome = command(inspect_data.main, *command_line)
    assert outcome.code == 1 and "the run trained on" in outcome.err, outcome.out
    assert "code or the data has changed" in outcome.err and "parquet" not in outcome.out
    assert (
        "digests differ from the log"
        in command(inspect_data.main, "digest", str(run_dir), "--steps=3:8").err
    )


@pytest.mark.parametrize("name", ["rows", "ledger"])
def test_a_range_for_a_single_step_is_explained(name):
    """Regression: "invalid int value: '0:6'"."""
    err = command(inspect_data.main, name, "run", "--step=0:6").err
    assert "'0:6', expected one step" in err and "digest" in err and "--steps" in err


@pytest.mark.parametrize("step", [4, 5])
def test_cursors_with_a_wrong_length_are_named(run_dir, step):
    cursors = read_cursors(cursor_files(run_dir)[4])[1]
    for cursor in cursors:
        for feed in cursor["buckets"].values():
            for waiting in feed["waiting"]:
                waiting[3] += 1  # a length that the data does not have
    keep_cursors(run_dir, 4, pack_cursors(4, cursors))
    err = command(inspect_data.main, "rows", run_dir, f"--step={step}").err
    assert re.search(r"the checkpoint says.*\(packed from .*step-00000004\.json\.gz\)", err)


# ---- ledger --------------------------------------------------------------------------------------


def test_with_fewer_documents_than_lanes_a_later_epoch_is_not_called_a_pass(tmp_path):
    """Regression: of one book and four lanes, "epochs 3: completed by at least one lane"."""
    write_parquet(tmp_path / "book/a.parquet", ["one book " * 400])
    write_parquet(tmp_path / "book/b.parquet", ["held out " * 40])
    settings = {"data_path": tmp_path / "book", "long_docs": "split", "lanes": 4}
    with training.workplace(tmp_path, **{**training.SMALL, **settings, "num_iterations": 2}):
        training.succeed()
        run_dir = training.run_dir()
        ledger = run("ledger", run_dir)
        rows = run("rows", run_dir, "--step=0")
        found = run("find", run_dir, "--document=a.parquet:0")
    assert re.search(r"epochs +cropped %\n.* 3 ", ledger), "the case"
    for shown in (ledger, rows, found):
        assert "with fewer documents than lanes" in shown
        assert "completed by" not in shown and "over the data" not in shown


def test_the_ledger_of_a_run_is_that_of_its_newest_save_and_an_unbalanced_one_is_an_error(
    run_dir, monkeypatch
):
    newest, honest = run("ledger", run_dir), inspect_data.ledger
    assert newest == run("ledger", run_dir, "--step=8")
    assert "after 8 steps" in newest and "It balances" in newest
    read, bos, repeated, emitted, cropped, pending, padded, rows, *_ = (
        int(cell.replace(",", "")) for cell in newest.splitlines()[-1].split()[1:-1]
    )
    assert rows == 8 * 8 and emitted == rows * (training.T + 1) and padded == 0 < cropped
    assert read + bos + repeated == emitted + cropped + pending
    assert newest.split()[-1] == f"{100 * cropped / (emitted + cropped):.2f}"
    monkeypatch.setattr(
        inspect_data,
        "ledger",
        lambda cursors, T: {
            bucket: {**account, "read": account["read"] + 1}
            for bucket, account in honest(cursors, T).items()
        },
    )
    assert "off in data by 1." in run("ledger", run_dir, code=1)


# ---- killed runs: find, spikes, rows by loss -----------------------------------------------------

STEPS = 24
MIX = """
curriculum:
- {duration_tokens: 4000, mix: {code: 1, web: 3}}
- {duration_tokens: 4000, mix: {code: 1, web: 1}}
max_epochs: {code: 0, web: 0}
allow_budget_mismatch: true
"""
RUNS = {"text": {"long_docs": "crop"}, "shards": {"data_format": "shards", "long_docs": "split"}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`folder` with the runs "text" and "shards": two buckets, killed on two processes, completed
    on one. `tables`: {run: `whole_table`}."""
    folder = tmp_path_factory.mktemp("killed")
    with training.workplace(folder, **training.SMALL):
        training.write_buckets(folder, {"code": 12, "web": 30}, shards=0)
        (folder / "mix.yaml").write_text(MIX)
        for name, changed in RUNS.items():
            settings = {
                "model_tag": name,
                "data_path": folder / name,
                "curriculum": folder / "mix.yaml",
                "leaves": 2,
                "num_iterations": STEPS,
                "save_every": 5,
                **changed,
            }
            training.start(
                2, hook=partial(training.die_after_step, 13), **settings
            ).wait_for_death()
            training.finish(1, **settings)
            assert len(training.all_steps(name)) > STEPS, "the case: steps were repeated"
        tables = {name: whole_table(name) for name in RUNS}
    return SimpleNamespace(folder=folder, tables=tables)


@pytest.fixture
def killed(made, tmp_path):
    """Copies of these runs in a base directory, and their tables."""
    with training.workplace(tmp_path, **training.SMALL):
        shutil.copytree(made.folder / "runs", tmp_path / "runs")
        yield made


def whole_table(name, steps=STEPS, first=0):
    """{document: {(epoch, step, row, lane, start, stop, loss)}} of all rows of all steps."""
    table = {}
    for step in range(first, steps):
        rows = json_lines("rows", name, f"--step={step}", "--sort=loss", "--json")
        assert [row["loss"] for row in rows] == sorted((row["loss"] for row in rows), reverse=True)
        for row in rows:
            for place in row["documents"]:
                use = (
                    place["epoch"],
                    step,
                    row["row"],
                    row["lane"],
                    place["start"],
                    place["stop"],
                    row["loss"],
                )
                table.setdefault(f"{place['file']}:{place['document']}", set()).add(use)
    return table


def opened(name):
    """A run, and the function that returns the passes of one of its training documents."""
    run = run_stream.open_stream_of(training.run_dir(name))
    passes_of = run_uses.tracer(run)
    return run, lambda document: [*passes_of(find_document({"train": run.data.train}, document)[1])]


def without_off(use):
    """The values of a use of --json as `killed.tables` has them."""
    return tuple(value for name, value in use.items() if name != "off")


def places(passes):
    """The (epoch, step, row, lane, start, stop) of all uses."""
    return {
        (use.epoch, use.step, use.row, use.lane, use.start, use.stop)
        for found in passes
        for use in found.uses
    }


@pytest.mark.parametrize("name", RUNS)
def test_exactly_the_uses_of_every_document_are_found(killed, name, caplog):
    table = killed.tables[name]
    (run, passes_of) = opened(name)
    fates = set()
    run.run.cursor_files[10].write_bytes(b"torn")
    documents = [
        f"{file}:{number}"
        for source in run.data.train.values()
        for file, first, count in groups_of(source)
        for number in range(first, first + count)
    ]
    assert len(documents) == 84 and {*table} <= {*documents}
    for document in documents:
        passes = passes_of(document)
        assert places(passes) == {use[:6] for use in table.get(document, ())}, document
        fates |= {re.sub("[0-9,]+", "N", run_uses.fate(run, found)) for found in passes}
        for found in passes:
            if found.cropped_after:
                assert max(use.stop for use in found.uses) == found.cropped_after < found.length
    rest = {
        "text": "cropped from token N on",
        "shards": "tokens N to N never trained on: the run ended first",
    }[name]
    assert fates - {""} == {"never trained on: the run ended first", rest}
    assert "step-00000010.json.gz: corrupt or truncated" in caplog.text
    for document in documents[::9]:
        [found] = json_lines("find", name, f"--document={document}", "--json")
        uses = [use for of_epoch in found["passes"] for use in of_epoch["uses"]]
        assert {without_off(use) for use in uses} == table.get(document, set()) and found[
            "split"
        ] == "train"


@pytest.mark.parametrize("name", ["text", "shards"])
def test_the_uses_of_all_documents_are_found_at_once(killed, name):
    table = killed.tables[name]
    run, _ = opened(name)
    data = {"train": run.data.train}
    documents = [find_document(data, document)[1] for document in table]
    found = run_uses.uses_of(run, documents)
    assert {place.name: {use[:6] for use in uses} for place, uses in found.items()} == {
        document: {use[:6] for use in uses} for document, uses in table.items()
    }


def test_a_run_that_continues_the_data_of_another_counts_only_its_own_steps(killed):
    training.succeed(
        model_tag="next",
        data_path=killed.folder / "text",
        curriculum=killed.folder / "mix.yaml",
        num_iterations=21,
        save_every=4,
        fork_from="text@15",
        plan="off",
    )
    table = whole_table("next", 21, first=15)
    (run, passes_of) = opened("next")
    fates = set()
    for document in (
        f"{file}:{number}" for file in ("code/0.parquet", "web/1.parquet") for number in range(12)
    ):
        passes = passes_of(document)
        assert places(passes) == {use[:6] for use in table.get(document, ())}
        fates |= {run_uses.fate(run, found) for found in passes}
    assert "before this run began" in fates


def test_a_document_is_found_in_the_rows_that_a_run_and_its_ancestors_trained_on(
    killed, caplog, monkeypatch
):
    """Regression: the rows of a fork's parent, whose weights the fork continues, were left out."""
    table = killed.tables["text"]
    training.succeed(
        **RUNS["text"],
        **{"model_tag": "child", "data_path": killed.folder / "text", "fork_from": "text@15"},
        **{"curriculum": killed.folder / "mix.yaml", "num_iterations": STEPS, "leaves": 2},
    )
    document = next(name for name in table if {use[1] < 15 for use in table[name]} == {True})
    [found] = json_lines("find", "child", f"--document={document}", "--json")
    uses = [use for of_epoch in found["passes"] for use in of_epoch["uses"]]
    assert {without_off(use) for use in uses} == table[document]
    out = run("find", "child", "--text=e")
    assert "the run or text trained on " in out
    err = command(inspect_data.main, "rows", "child", "--step=3").err
    assert "ask the run that it continues" in err
    run("rows", "child", f"--step={STEPS}")
    assert f"step {STEPS} is computed from the data: no launch has trained it" in caplog.text
    monkeypatch.setattr(RunReader, "parent_dir", None)
    assert "which was not found" in run("find", "child", f"--document={document}")


def test_a_spike_soon_after_a_fork_is_compared_with_the_steps_of_the_fork(killed):
    """Regression: an error, because steps before the fork are in the run that it continues."""
    training.succeed(
        **RUNS["text"],
        **{"model_tag": "child", "data_path": killed.folder / "text", "fork_from": "text@15"},
        **{"curriculum": killed.folder / "mix.yaml", "num_iterations": 18, "leaves": 2},
    )
    child = run_stream.open_stream_of(training.run_dir("child"))
    assert spike_report.compare_rows(child, 17).judged == 8


@pytest.fixture
def orphan(killed, monkeypatch):
    """A fork of the run "shards", which is then removed; and the documents that it used before the
    fork."""
    training.succeed(
        **RUNS["shards"],
        **{"model_tag": "child", "data_path": killed.folder / "shards", "fork_from": "shards@15"},
        **{"curriculum": killed.folder / "mix.yaml", "num_iterations": 16, "leaves": 2},
    )
    shutil.rmtree(training.run_dir("shards"))
    table = killed.tables["shards"]
    return [name for name, uses in table.items() if min(use[1] for use in uses) < 15]


NOT_SEARCHED = "steps 0 to 14 (child continues shards@15, which was not found)"


def test_a_fork_without_its_parent_says_which_steps_are_not_searched_for_a_document(orphan):
    """Regression: of a document that the parent trained on, it said "never trained on"."""
    outs = [run("find", "child", f"--document={document}") for document in orphan]
    for out in outs:
        assert "never trained on" not in out and NOT_SEARCHED in out
    said = "".join(outs)
    assert "epoch 0: not trained on from step 15 on: the run ended first" in said
    assert re.search("tokens [0-9]+ to [0-9]+ not trained on from step 15 on: the run ended", said)
    [found] = json_lines("find", "child", f"--document={orphan[0]}", "--json")
    assert found["not_searched"] == [NOT_SEARCHED]


def test_a_fork_without_its_parent_says_which_steps_are_not_searched_for_a_text(orphan):
    out = run("find", "child", "--text=e")
    assert "the run trained on parts of" in out and NOT_SEARCHED in out
    err = command(inspect_data.main, "find", "child", "--text=no such words").err
    assert "occurs in no document" in err and err.count(NOT_SEARCHED) == 1
    assert "$'one\\ntwo'" in err and "--texts=FILE.jsonl, which compares words" in err


def test_a_fork_without_its_parent_may_have_learned_what_it_masks_itself(orphan):
    """Regression: "the model never learned to predict it" was said of the parent's steps, too."""
    path = training.run_dir("child") / "data_manifest.json"
    manifest = json.loads(path.read_text())
    file, _, number = orphan[0].rpartition(":")
    [bucket] = [of for of in manifest["train"].values() if file in [f["name"] for f in of["files"]]]
    bucket["without"] = {file: [int(number)]}
    path.write_text(json.dumps(manifest))
    out = run("find", "child", f"--document={orphan[0]}")
    assert "from step 15 on, its targets are masked" in out and NOT_SEARCHED in out


def test_a_run_has_not_trained_on_a_text_that_it_left_out(killed, monkeypatch):
    """Regression: the first line said "trained on", the last one "never learned to predict it"."""
    text, _ = opened("text")
    words = [*text.data.train["code"].texts(0)][3]
    for source in text.data.train.values():
        for group in range(len(source.groups)):
            source.without[group] = np.array([words in of for of in source.texts(group)])
    monkeypatch.setattr(inspect_data, "open_named_stream", lambda args: text)
    out = run("find", "text", f"--text={words}")
    assert re.search("trained on parts of 0 of the ([0-9]+) documents .*\\(\\1 left out by", out)
    assert "epoch  step" in out and "its targets are masked" in out


@pytest.fixture
def without_code(killed):
    """A fork of the run "text" that leaves out its bucket `code`; the documents of that bucket that
    its parent used before the fork, each with its steps; and a benchmark of these documents."""
    mix = killed.folder / "web.yaml"
    phase = "curriculum: [{duration_tokens: 1536, mix: {web: 1}}]"
    mix.write_text(f"{phase}\nmax_epochs: {{web: 0}}\n")
    training.succeed(
        model_tag="child",
        fork_from="text@15",
        data_path=killed.folder / "text",
        curriculum=mix,
        num_iterations=18,
    )
    learned = {}
    for document, uses in killed.tables["text"].items():
        steps = {use[1] for use in uses if use[1] < 15}
        if document.startswith("code/") and steps:
            learned[document] = steps
    assert len(learned) > 3, "the case"
    items = killed.folder / "items.jsonl"
    lines = []
    for document in learned:
        file, _, number = document.rpartition(":")
        texts = pq.read_table(killed.folder / "text" / file)["text"].to_pylist()
        lines.append(json.dumps({"text": texts[int(number)]}))
    items.write_text("\n".join(lines))
    return SimpleNamespace(learned=learned, items=items)


def test_a_fork_that_leaves_out_a_bucket_has_seen_what_its_parent_learned_from_it(without_code):
    """Regression: files that only an ancestor read were not searched, and the table said 0."""
    flags = ["--ngram=8", "--json", f"--texts={without_code.items}"]
    *of_fork, total = json_lines("find", "child", *flags)
    *of_parent, parents = json_lines("find", "text", *flags)
    assert total["seen"] > 3 and total["in_data"] == parents["in_data"]

    def uses(items):
        return {
            (item["line"], document["document"], use["step"], use["row"])
            for item in items
            for document in item["documents"]
            for use in document["uses"]
            if use["step"] < 15
        }

    assert uses(of_fork) == uses(of_parent)


def test_a_document_that_only_an_ancestor_read_is_found_with_its_steps(without_code):
    name, steps = next(iter(without_code.learned.items()))
    [found] = json_lines("find", "child", f"--document={name}", "--json")
    assert found["run"] == "text" and found["split"] == "train"
    assert {use["step"] for of_epoch in found["passes"] for use in of_epoch["uses"]} == steps
    text = json.loads(without_code.items.read_text().splitlines()[0])["text"]
    out = run("find", "child", f"--text={text[:60]}")
    assert f"{name} (code, a file of text): " in out
    assert "the run or text trained on parts of 1 of the 1 document" in out


def test_the_ledger_of_a_fork_says_which_rows_are_its_own(without_code):
    """Regression: it was neither the fork's own nor that of all steps, and did not say so."""
    rows = {}  # of each bucket, in the steps before the fork
    for step in range(15):
        for row in json_lines("rows", "text", f"--step={step}", "--json"):
            rows[row["bucket"]] = rows.get(row["bucket"], 0) + 1
    assert sum(rows.values()) == 15 * 8 and rows["code"]
    out = run("ledger", "child")
    total = rows["web"] + 3 * 8
    assert (
        f"{rows['web']} of its {total} rows are from before step 15, at which this run left" in out
    )
    assert "rows are from before" not in run("ledger", "text")


@pytest.mark.parametrize("damage", ["gone", "corrupt"])
def test_a_result_names_the_steps_that_it_does_not_cover(without_code, damage):
    """Regression: only a warning on stderr said so, and the report and the model card had a 0."""
    path = training.run_dir("text") / "data_manifest.json"
    manifest = json.loads(path.read_text())
    manifest["train"]["code"]["root"] = "/gone"
    path.write_text("{}" if damage == "corrupt" else json.dumps(manifest))
    out = run("find", "child", "--ngram=8", f"--texts={without_code.items}")
    sentence = "steps 0 to 14 (child continues text@15, whose files cannot be read)"
    assert sentence in out
    [result] = seen.read_results(training.run_dir("child")).values()
    assert result["not_searched"] == [sentence]
    assert command(report.main, "child").code == 0
    assert sentence in (training.run_dir("child") / "report.md").read_text()
    card = export.model_card(find_checkpoint("child"), RunReader(training.run_dir("child")), 1)
    assert sentence in card.decode()


def test_of_many_documents_with_a_text_those_trained_on_are_shown(killed, monkeypatch):
    """Regression: the first ones in file order were shown, trained on or not, which looked like a
    "no"."""
    # as if the run had not reached the documents before it
    real = run_uses.tracer
    late = "code/0.parquet:3"
    monkeypatch.setattr(
        run_uses,
        "tracer",
        lambda run: lambda document: real(run)(document) if document.name == late else iter(()),
    )
    monkeypatch.setattr(find_report, "DOCUMENTS", 2)
    shown = [
        (of["document"], bool(of["passes"]))
        for of in json_lines("find", "text", "--text=e", "--json")
    ]
    assert len(shown) == 2 and shown[0] == (late, True) and not shown[1][1]
    monkeypatch.setattr(find_report, "DOCUMENTS", 1)
    out = run("find", "text", "--text=e")
    assert "trained on parts of 1 of the first " in out
    assert "the search stopped there; at most 1 are listed" in out


def test_the_documents_with_a_text_are_listed_by_the_first_step_that_trained_on_them(killed):
    """Regression: they were in the order of files."""
    found = [*json_lines("find", "text", "--text=e", "--json")]
    first_steps = []
    for of in found:
        steps = [use["step"] for of_epoch in of["passes"] for use in of_epoch["uses"]]
        first_steps.append(min(steps, default=10**9))
    assert len(set(first_steps)) > 3 and first_steps == sorted(first_steps)
    assert [of["document"] for of in found] != sorted(of["document"] for of in found)


def test_a_text_lists_its_documents_and_marks_the_rows_that_hold_it(killed):
    text = [*opened("text")[0].data.train["code"].texts(0)][3]
    out = run("find", "text", f"--text={text}")
    parts = "the run trained on parts of [1-9][0-9]* of the [1-9][0-9]* documents? containing it"
    assert re.search(f"{parts}, and on all of it in [1-9][0-9]* rows?\n", out)
    assert (
        "code/0.parquet:3 (code)" in out
        and "epoch  step" in out
        and out.endswith(find_report.LEGEND + "\n")
    )
    assert re.search("\nepochs? 0(: | to )", out)
    for words in (text[:9], text[40:49]):
        [found] = [
            of
            for of in json_lines("find", "text", f"--text={words}", "--json")
            if of["document"] == "code/0.parquet:3"
        ]
        use = next(use for of_epoch in found["passes"] for use in of_epoch["uses"])
        [row] = json_lines(
            "rows", "text", f"--step={use['step']}", f"--row={use['row']}", "--text", "--json"
        )
        texts = [
            d["text"]
            for d in row["documents"]
            if (d["file"], d["document"]) == ("code/0.parquet", 3)
        ]
        assert use["has_text"] == any(words in of_row for of_row in texts)


def test_the_first_line_says_in_how_many_rows_all_of_a_text_is(capsys):
    """Regression: "perhaps other parts than this text", whatever the rows below it held."""
    ancestry = SimpleNamespace(who=lambda: "the run")
    found = find_report.Found(used=[None], others=[], is_cut=False)
    for number, rows in ((0, "no row"), (1, "1 row"), (2, "2 rows")):
        find_report.print_found(ancestry, found, "of mice", number)
        assert capsys.readouterr().out == (
            f"'of mice': the run trained on parts of 1 of the 1 document containing it, and on all of it in {rows}\n"
        )


def test_a_row_that_only_repeats_the_text_does_not_count_as_one_that_trained_on_it(killed):
    """Regression: overlaps of split documents were listed, and counted for benchmarks."""
    of_run, _ = opened("shards")
    data = {"train": of_run.data.train}
    decode = of_run.data.tokenizer.decode
    documents = [find_document(data, f"train/web/0.bin:{n}")[1] for n in range(9)]
    place, use = next(
        (place, use)
        for place, uses in run_uses.uses_of(of_run, documents).items()
        for use in uses
        if use.off > 8
    )
    ids = run_uses.content_of(of_run, of_run.data.train["web"], place).ids
    text = decode(ids[use.start : use.start + use.off].tolist())
    found = json_lines("find", "shards", f"--text={text}", "--json")
    [passes] = [of["passes"] for of in found if of["document"] == place.name]
    rows = {
        (of["step"], of["row"]): of["has_text"] for one_pass in passes for of in one_pass["uses"]
    }
    assert rows[use.step, use.row] is False and any(rows.values())


def a_pass(epoch, *, rows=1, cropped_after=None):
    """A pass of --json, with a use per row."""
    uses = [
        {
            **{"epoch": epoch, "step": 10 * epoch, "row": row, "lane": row, "start": 20 * row},
            **{"stop": 20 * row + 20, "loss": 4.0 - epoch / 64, "has_text": row == 0},
        }
        for row in range(rows)
    ]
    fate = f"cropped from token {cropped_after} on" if cropped_after else ""
    return {"epoch": epoch, "uses": uses, "cropped_after": cropped_after, "fate": fate}


def shown_passes(capsys, passes, *, with_text=False):
    if not with_text:
        for use in [use for of_epoch in passes for use in of_epoch["uses"]]:
            del use["has_text"]
    running = SimpleNamespace(run=SimpleNamespace(outcome=""))
    legend = find_report.print_passes(running, passes)
    return capsys.readouterr().out.splitlines(), legend


def test_64_passes_over_a_document_are_16_lines_that_name_every_row(capsys):
    passes = [a_pass(epoch) for epoch in range(64)]
    (head, columns, *lines), legend = shown_passes(capsys, passes, with_text=True)
    assert head == "64 rows, up to 4 in a line:"
    assert columns.split() == ["epochs", "rows", "tokens", "loss", "step:row"]
    assert len(lines) == find_report.LINES and legend == find_report.GROUPS_LEGEND
    assert re.sub(" +", " ", lines[1].strip()) == "4 to 7 4 80 3.914 40:0 50:0 60:0 70:0"
    named = [word for line in lines for word in line.split() if ":" in word]
    assert named == [f"{10 * epoch}:0" for epoch in range(64)]


def test_lines_of_many_passes_count_the_rows_that_they_do_not_name(capsys):
    passes = [a_pass(epoch, rows=3) for epoch in range(64)]
    (_, _, first, *others), _ = shown_passes(capsys, passes)
    assert first.endswith("0:0 0:1 0:2 10:0 10:1 10:2 ... 30:2")
    assert first.split()[:5] == ["0", "to", "3", "12", "240"] and len(others) == 15


def test_crops_in_many_passes_are_one_line(capsys):
    cropped = {3: 20, 4: 30, 9: 40}
    passes = [a_pass(epoch, cropped_after=cropped.get(epoch)) for epoch in range(20)]
    lines, _ = shown_passes(capsys, passes)
    assert [line for line in lines if "cropped" in line] == [
        "epochs 3 to 4, 9: cropped, with 20 to 40 of its tokens in rows"
    ]


def test_the_crop_of_one_pass_says_from_which_token_on(capsys):
    lines, _ = shown_passes(capsys, [a_pass(0, cropped_after=20), a_pass(1)])
    assert lines[-1] == "epoch 0: cropped from token 20 on"


def test_a_document_in_40_rows_has_a_line_per_row(capsys):
    passes = [a_pass(epoch, rows=2) for epoch in range(20)]
    (columns, *lines), legend = shown_passes(capsys, passes)
    assert columns.split() == ["epoch", "step", "row", "lane", "start", "stop", "loss"]
    assert len(lines) == 40 and legend == find_report.LEGEND


def test_the_many_rows_of_a_book_are_summed_up(capsys):
    """Regression: a book had a line per row, which were hundreds."""
    passes = [a_pass(epoch, rows=100) for epoch in range(3)]
    (head, columns, *lines), legend = shown_passes(capsys, passes)
    assert head == "300 rows, up to 19 in a line:" and legend == find_report.GROUPS_LEGEND
    assert columns.split() == ["epochs", "rows", "tokens", "loss", "step:row"]
    assert len(lines) == find_report.LINES
    assert lines[0].endswith("0:0 0:1 0:2 0:3 0:4 0:5 ... 0:18")
    assert lines[5].split()[:5] == ["0", "to", "1", "19", "380"], "across the end of an epoch"
    counts = [re.match(r" *(?:\d to )?\d +(\d+)", line) for line in lines]
    assert sum(int(count[1]) for count in counts) == 300


def test_of_a_book_the_rows_that_hold_a_text_are_listed_and_others_counted(capsys):
    (_, *lines), _ = shown_passes(capsys, [a_pass(0, rows=100)], with_text=True)
    assert len(lines) == 2 and lines[0].split()[:3] == ["0", "0", "0"]
    assert lines[1] == "not listed: 99 rows with other parts of the document"


def test_of_a_book_no_row_is_listed_if_none_has_the_text(capsys):
    """Regression: 14 lines about rows without it came before the answer."""
    passes = [a_pass(0, rows=100)]
    for use in passes[0]["uses"]:
        use["has_text"] = False
    lines, legend = shown_passes(capsys, passes, with_text=True)
    assert lines == ["no row has all of the text: 100 rows have other parts of the document"]
    assert legend == ""


def test_documents_that_a_run_does_not_learn_from_are_reported(killed, monkeypatch):
    assert run("find", "text", "--document=web/2.parquet:0").splitlines()[-1] == (
        "held out for validation: the run never trains on it"
    )
    shards, _ = opened("shards")
    name = shards.data.val["web"].manifest["files"][0]["name"]
    [found] = json_lines("find", "shards", f"--document={name}:1", "--json")
    assert found["split"] == "validation" and found["passes"] == []
    text, _ = opened("text")
    text.data.train["code"].without = {0: np.arange(12) == 3}
    monkeypatch.setattr(inspect_data, "open_named_stream", lambda args: text)
    for number, listed in ((3, True), (4, False)):
        assert (
            "its targets are masked" in run("find", "--document", f"code/0.parquet:{number}")
        ) == listed


def test_the_part_of_a_file_that_is_held_out_is_named_as_such(tmp_path):
    """Regression: the last lines of a .txt file were called a validation document with the name of
    the training one."""
    with training.workplace(tmp_path / "base", **training.SMALL, num_iterations=2):
        (tmp_path / "notes").mkdir()
        lines = [f"{i} {text}\n" for i, text in enumerate(some_texts(400, seed=4))]
        (tmp_path / "notes" / "a.txt").write_text("".join(lines))
        training.succeed(data_path=tmp_path / "notes", val_fraction=0.1, plan="warn")
        first, last = (
            run("find", training.SETTINGS["model_tag"], f"--text={lines[i][:30]}") for i in (0, -1)
        )
    assert "a.txt:0 (data, validation): " in last and "a.txt:0 (data): " in first
    number = 1 + "".join(lines[:-1]).count("\n")
    assert f" of a.txt, the text at line {number:,}\n" in last
    assert "the document begins at line 1 of a.txt\n" in first
    assert last.splitlines()[-1] == ("held out for validation: the run never trains on it")


def test_pending_and_unread_documents_of_a_running_run_are_used_later(killed):
    log = training.log_file("text")
    log.write_text(
        "".join(json.dumps(record) + "\n" for record in iter_log(log) if record["step"] < 10)
    )
    for step, file in cursor_files(training.run_dir("text")).items():
        if step > 10:
            file.unlink()
    (run, passes_of), unread = opened("text"), 0
    for document, uses in killed.tables["text"].items():
        for found in passes_of(document):
            steps = {use[1] for use in uses if use[0] == found.epoch}
            assert found.pending == ("pending in lane" in run_uses.fate(run, found))
            assert {use.step for use in found.uses} == {step for step in steps if step < 10}
            unread += found.expected is not None and bool(steps)
    assert unread > 10, "the case"


def test_a_step_after_the_last_one_that_flags_would_train_is_warned_of(corpus, caplog):
    run("rows", *stream_flags(corpus), "--step=4")
    assert not caplog.text
    run("digest", *stream_flags(corpus), "--steps=3:6")
    assert "no launch has trained it, and a run of this length ends with step 4" in caplog.text


@pytest.mark.parametrize("name, steps", [("rows", "--step={1}"), ("digest", "--steps={0}:{2}")])
def test_rows_after_a_halt_are_said_to_be_those_with_allow_bucket_exhaustion(
    tmp_path, caplog, name, steps
):
    with training.workplace(tmp_path):
        training.write_buckets(tmp_path, {"big": 60, "tiny": 4}, shards=0)
        mix = tmp_path / "mix.yaml"
        mix.write_text(
            "curriculum:\n- {duration_tokens: 512, mix: {big: 1}}\n"
            "- {duration_tokens: 4096, mix: {big: 1, tiny: 1}}\n"
        )
        settings = {**training.SMALL, "data_path": tmp_path / "text", "curriculum": mix}
        settings |= {"num_iterations": None, "plan": "off"}
        assert training.run(**settings).code == EXIT_HALTED
        halt = len(training.steps())
        trained = steps.format(halt - 2, halt - 1, halt)
        ahead = steps.format(halt - 1, halt, halt + 1)
        warned = f"bucket 'tiny' runs dry in a lane at step {halt} or before; the run halts there without"

        run(name, "run", trained)
        assert "runs dry" not in caplog.text
        run(name, "run", ahead)
        assert caplog.text.count(warned) == 1
        assert f"step {halt} is computed from the data: no launch has trained it" in caplog.text
        with mock.patch.object(Stream, "bucket_of", lambda stream, lane, row: None):  # all are dry
            err = command(inspect_data.main, name, "run", ahead).err
        assert "the data runs out before this step" in err and "samples" not in err
        caplog.clear()
        flags = training.flags(**settings)
        run(name, *flags, ahead, "--allow-bucket-exhaustion")
        assert "runs dry" not in caplog.text
        run(name, *flags, ahead)
        assert caplog.text.count(warned) == 1


def log_again(step, **changed):
    """Add a line for a step to the log of the run "text"."""
    with open(training.log_file("text"), "a") as log:
        log.write(json.dumps({**training.steps("text")[step], **changed}) + "\n")


def test_spikes_lists_the_steps_that_stand_out_and_their_rows(killed):
    out = run("spikes", "text")
    assert out.startswith("0 of 24 steps listed: ") and "the first 16 are not judged" in out
    kept = RowLosses(training.run_dir("text"), num_rows=8, T=training.T)
    nats, live = kept.read(20)
    nats[5] *= 4
    kept.write(20, nats, live)
    log_again(20, loss=9.0)
    log_again(22, grad_norm=None)
    first, second = json_lines("spikes", "text", "--json")
    assert (first["step"], first["grad_norm"], second["step"]) == (22, None, 20), (
        "NaN ranks highest"
    )
    [expected] = json_lines("rows", "text", "--step=20", "--row=5", "--json")
    worst = second["rows"][0]
    assert second["loss"] == 9 and second["loss_deviations"] > 4 and worst["row"] == 5
    assert worst["bucket"] == expected["bucket"] and worst["loss"] == pytest.approx(
        nats[5] / live[5]
    )
    assert [place["document"] for place in worst["documents"]] == [
        f"{place['file']}:{place['document']}" for place in expected["documents"]
    ]
    assert len(json_lines("spikes", "text", "--top=1", "--json")) == 1
    out = run("spikes", "text")
    assert out.startswith("2 of 24 steps listed: ")
    assert "step 20: loss 9 (" in out and worst["documents"][0]["document"] in out


@pytest.mark.parametrize("high, may_be_weights", [([5], False), (range(8), True)])
def test_a_spike_in_all_rows_may_come_from_the_weights_or_from_rows_that_are_alike(
    killed, high, may_be_weights
):
    """Regression: its three highest rows were shown as if they were the cause, and later the weights
    were named as the cause, although all rows were from one bad stretch of a book."""
    kept = RowLosses(training.run_dir("text"), num_rows=8, T=training.T)
    nats, live = kept.read(20)
    nats[[*high]] *= 4
    kept.write(20, nats, live)
    log_again(20, loss=9.0)
    out = run("spikes", "text")
    assert f"above their bucket's median: {len(high)} of 8" in out
    for words in ("they are alike", "damaged the weights", "base_eval text@20"):
        assert (words in out) == may_be_weights
    assert "the cause is" not in out
    [spike] = json_lines("spikes", "text", "--json")
    assert (spike["outliers"], spike["judged"]) == (len(high), 8)


def test_a_step_without_targets_is_no_spike(killed):
    """Regression: it has no loss, which counted as an infinite one."""
    log_again(20, loss=None, grad_norm=None)
    assert [spike["step"] for spike in json_lines("spikes", "text", "--json")] == [20]
    with open(training.log_file("text"), "a") as log:
        log.write(json.dumps({"event": "skipped", "step": 20, "why": "empty"}) + "\n")
    assert run("spikes", "text").startswith("0 of 23 steps listed")


def test_a_spike_of_one_number_says_that_the_other_is_below_earlier_steps(capsys):
    """Regression: "-0.9155 deviations above earlier steps"."""
    spike = {"step": 9, "loss": 4.855, "loss_deviations": -0.9155}
    line = {**spike, "grad_norm": 2.5, "grad_norm_deviations": 7.04}
    spike_report.print_spike(line, spike_report.SpikeRows(8, 0, []), "mine")
    assert capsys.readouterr().out == (
        "step 9: loss 4.855 (0.9 deviations below earlier steps), "
        "grad_norm 2.5 (7.0 deviations above earlier steps)\n"
    )


def test_corrupt_or_missing_losses_are_one_sentence(killed, caplog):
    [file] = training.run_dir("text").glob("logs/rows/*.bin")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    by_loss = ["rows", "text", "--step=23", "--sort=loss"]
    corrupt = "row losses for step 23 are corrupt"
    outcome = command(inspect_data.main, *by_loss)
    assert outcome.code == 1 and corrupt in outcome.err
    [use, *_] = json_lines("rows", "text", "--step=23", "--json")[0]["documents"]
    [found] = json_lines("find", "text", f"--document={use['file']}:{use['document']}", "--json")
    assert [of_step["loss"] for of_epoch in found["passes"] for of_step in of_epoch["uses"]][
        -1
    ] is None
    assert corrupt in caplog.text
    file.unlink()
    outcome = command(inspect_data.main, *by_loss)
    assert outcome.code == 1 and "has not trained that step" in outcome.err
    log_again(20, loss=9.0)
    [spike] = json_lines("spikes", "text", "--json")
    assert (
        spike["step"] == 20
        and spike["rows"] == []
        and "spikes are shown without their rows" in caplog.text
    )
