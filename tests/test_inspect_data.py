"""scripts.inspect_data shows exactly what training sees in a step."""

import json
import re
import sys
from contextlib import closing

import numpy as np
import pyarrow.parquet as pq
import pytest

from nanochat.dataloader import OFF, DataLoader
from nanochat.dataset import BUCKET, scan, split_train_val
from nanochat.order import StreamConfig
from nanochat.run_dir import TrainLog, cursor_files, keep_cursors, pack_cursors, read_cursors
from nanochat.sources import ParquetSource
from nanochat.tokenizer import RustBPETokenizer
from scripts import inspect_data, sample
from tests import training
from tests.toy import digest_of_row, some_texts, write_parquet

T, R, V = 24, 6, 3
FLAGS = [f"--max-seq-len={T}", f"--total-batch-size={R * T}", f"--lanes={V}", "--buffer-size=8", "--depth=1",
         "--num-iterations=5"]
SHAPES = {
    "crop": {}, "split": {"long_docs": "split", "overlap": 5}, "concat": {"layout": "concat"}}


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
    """The flags of base_train for the stream of `config_of`."""
    changed = {name.replace("layout", "packing").replace("_", "-"): value for name, value in SHAPES[shape].items()}
    return [f"--data-path={corpus[0]}", f"--tokenizer={corpus[1]}", *FLAGS,
            *(f"--{name}={value}" for name, value in changed.items())]


def run(capsys, *argv, code=0):
    """The output of a command."""
    assert inspect_data.main(argv) == code
    return capsys.readouterr().out


def json_lines(capsys, *argv, code=0):
    return [json.loads(line) for line in run(capsys, *argv, code=code).splitlines()]


def config_of(shape):
    return StreamConfig(T, V, 42, buffer_size=8, **SHAPES[shape])


def batches(corpus, shape, steps, **kwargs):
    """The rows (inputs, targets) that a loader delivers, for each step."""
    tokenizer = RustBPETokenizer.from_directory(corpus[1])
    source = ParquetSource(scan(corpus[0], split_train_val(corpus[0])["train"][BUCKET]), tokenizer)
    delivered = []
    with DataLoader(config_of(shape), {BUCKET: source}, tokenizer=tokenizer, rows_per_step=R, device_batch_size=R,
                    **kwargs) as loader:
        for _ in range(steps):
            batch = next(loader)
            delivered.append(list(zip(batch.inputs.tolist(), batch.targets.tolist())))
    return delivered


def digest_of(rows):
    """The digest of a step; all of its rows must end with a live target."""
    parts = [digest_of_row(i, row_tokens(row), [x != OFF for x in row[1]]) for i, row in enumerate(rows)]
    return f"{sum(parts) % 2**64:016x}"


def row_tokens(row):
    """A row's T + 1 tokens; its last target must be live."""
    inputs, targets = row
    assert targets[-1] != OFF
    return [*inputs, targets[-1]]


@pytest.fixture
def run_dir(copied):
    """A run of 8 steps with cursors of steps 2, 4, 6 and 8; those of step 6 are truncated."""
    truncated = cursor_files(training.run_dir())[6]
    truncated.write_bytes(truncated.read_bytes()[:50])
    return training.run_dir()


# ---- digest ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", SHAPES)
def test_digests_are_those_of_the_delivered_batches_for_any_world_size(corpus, shape, capsys):
    alone = json_lines(capsys, "digest", "--steps=1:6", *stream_flags(corpus, shape))
    assert "ranks" not in alone[0] and len({line["digest"] for line in alone}) == 5
    if shape != "split":  # whose rows may end with a target that is off
        rows = batches(corpus, shape, 6)
        assert [(line["step"], line["digest"]) for line in alone] == [(s, digest_of(rows[s])) for s in range(1, 6)]
    for W in (1, 2, 3):
        lines = json_lines(capsys, "digest", "--steps=1:6", f"--world-size={W}", *stream_flags(corpus, shape))
        assert [line["digest"] for line in lines] == [line["digest"] for line in alone]
        for line in lines:
            assert len(line["ranks"]) == len(set(line["ranks"])) == W
            assert f"{sum(int(part, 16) for part in line['ranks']) % 2**64:016x}" == line["digest"]


def test_digests_of_a_run_match_its_log_and_a_wrong_one_is_an_error(run_dir, capsys):
    lines = json_lines(capsys, "digest", "--steps=0:10", f"{run_dir}", "--world-size=2")
    assert [line.get("match") for line in lines] == [True] * 8 + [None] * 2
    with closing(TrainLog(run_dir / "logs" / "train.jsonl")) as log:
        log.write(step=5, digest="0123456789abcdef")
    assert inspect_data.main(["digest", "--steps=4:7", f"{run_dir}"]) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["match"] for line in out.splitlines()] == [True, False, True]
    assert "first at step 5" in err


# ---- rows -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", SHAPES)
def test_rows_name_the_documents_whose_tokens_they_hold(corpus, shape, capsys):
    tokenizer = RustBPETokenizer.from_directory(corpus[1])
    bos = tokenizer.get_bos_token_id()
    files = {p.name: pq.ParquetFile(p) for p in corpus[0].iterdir()}
    rows = batches(corpus, shape, 65)
    cases = {"whole": 0, "continued": 0, "cut": 0, "later epoch": 0, "later group": 0, "off": 0}
    for step in (0, 1, 5, *range(60, 65)):
        lines = json_lines(capsys, "rows", f"--step={step}", "--json", *stream_flags(corpus, shape))
        assert [(line["row"], line["lane"]) for line in lines] == [(i, i * V // R) for i in range(R)]
        for line, (inputs, targets) in zip(lines, rows[step]):
            tokens = []
            for d in line["documents"]:
                texts = files[d["file"]].read()["text"].to_pylist()
                in_group = files[d["file"]].read_row_group(d["group"])["text"].to_pylist()
                assert texts[d["document"]] == in_group[d["document_in_group"]]
                ids = tokenizer.encode_one(texts[d["document"]]).tolist()
                part = ids[d["start"]:d["stop"]]
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


def test_text_is_that_of_the_rows_tokens(corpus, capsys, monkeypatch):
    tokenizer = RustBPETokenizer.from_directory(corpus[1])
    flags = ["rows", "--step=3", "--row=4", "--text", *stream_flags(corpus, "split")]
    (line,) = json_lines(capsys, *flags, "--json")
    tokens = row_tokens(batches(corpus, "split", 4)[3][4])
    assert "".join(d["text"] for d in line["documents"]) == tokenizer.decode(np.array(tokens))
    table = run(capsys, *flags)
    assert table.count("    | <|bos|>") == len(line["documents"]) > 0
    assert table.split()[:4] == ["step", "row", "lane", "lane_row"] and "--row=N" not in table
    monkeypatch.setattr(inspect_data, "LINES", 5)
    many = run(capsys, "rows", "--step=3", "--text", *stream_flags(corpus, "split")).splitlines()
    assert len(many) == 1 + 2 * 5 + 1 + 3 and many[-4].startswith("5 of the step's ")
    assert many[-3:] == table.splitlines()[-3:]
    legend = "; " + "; ".join(many[-3:])
    unexplained = [name for name in many[0].split() if not re.search(rf"[,;] {name}[,:]", legend)]
    assert unexplained == ["step", "row", "lane", "bucket", "file"], "explained by the name itself"


def test_a_document_does_not_control_the_terminal(corpus, tmp_path, capsys, monkeypatch):
    hostile = "\x1b]0;title\x07\x9b2J\u202e \r over"
    for i in range(2):
        write_parquet(tmp_path / "data" / f"{i}\x1b[31m.parquet", [f"{hostile} {i} {j}" for j in range(200)])
    argv = ["rows", "--step=0", "--row=1", "--text", f"--data-path={tmp_path / 'data'}", f"--tokenizer={corpus[1]}",
            *FLAGS]
    out = run(capsys, *argv)
    assert r"\u001b]0;title\u0007\u009b2J\u202e" in out and r"0\u001b[31m.parquet" in out
    assert not set(out) & set("\x1b\x07\x9b\u202e\r")
    (line,) = json_lines(capsys, *argv, "--json")
    assert any(hostile in document["text"] for document in line["documents"])
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert sample.marked("a\x1b[2J", "a\x1b[2Jb\x9b") == "\x1b[2ma\\u001b[2J\x1b[0mb\\u009b"


def test_rows_after_saved_cursors_are_those_of_the_same_flags(run_dir, capsys, caplog):
    for step in (2, 3, 5, 7, 8, 9):  # before, at and after saved cursors, and after truncated ones
        rows = json_lines(capsys, "rows", f"--step={step}", "--json", "--text", "run")
        assert rows == json_lines(capsys, "rows", f"--step={step}", "--json", "--text", *training.flags(model_tag=None))
    assert "has trained 8 steps" in caplog.text and "has trained 0 steps" not in caplog.text


# ---- seeking --------------------------------------------------------------------------------------------------------

def test_seeking_starts_at_the_nearest_good_cursors(run_dir, monkeypatch, caplog):
    of_run, of_flags = (inspect_data.open_named_stream(inspect_data.parse_args(["ledger", *words]))
                        for words in (["run"], ["--step=1", *training.flags(model_tag=None)]))
    packed, next_rows = [], inspect_data.Stream.next_rows
    monkeypatch.setattr(inspect_data.Stream, "next_rows", lambda self, n: packed.append(n) or next_rows(self, n))
    for step, steps_packed in ((1, 1), (2, 0), (3, 1), (7, 3), (8, 0)):  # the cursors of step 6 are truncated
        with of_flags.stream_at(step) as straight:
            packed.clear()
            with of_run.stream_at(step) as stream:
                assert stream.cursors() == straight.cursors()
        assert packed == [2] * steps_packed, "two rows of each lane in a step"
    assert "step-00000006.json.gz" in caplog.text


@pytest.mark.parametrize("step", [4, 5])
def test_cursors_with_a_wrong_length_are_named(run_dir, step):
    cursors = read_cursors(cursor_files(run_dir)[4])[1]
    for cursor in cursors:
        for feed in cursor["buckets"].values():
            for waiting in feed["waiting"]:
                waiting[3] += 1  # a length that the data does not have
    keep_cursors(run_dir, 4, pack_cursors(4, cursors))
    with pytest.raises(ValueError, match=r"the checkpoint says.*\(packed from .*step-00000004\.json\.gz\)"):
        inspect_data.main(["rows", str(run_dir), f"--step={step}"])


# ---- ledger ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", SHAPES)
def test_ledger_balances_and_counts_what_was_emitted(corpus, shape, capsys):
    heading, names, values = run(capsys, "ledger", "--step=9", *stream_flags(corpus, shape)).splitlines()
    assert "after 9 steps" in heading and names.split()[0] == "bucket"
    assert "'cropped %' is a share of emitted + cropped" in heading
    read, bos, repeated, emitted, cropped, pending, padded, rows, *_ = (
        int(v.replace(",", "")) for v in values.split()[1:-1])
    assert "It balances" in heading and read + bos + repeated == emitted + cropped + pending
    assert rows == 9 * R and emitted == rows * (T + 1) and pending > 0 == padded
    assert (cropped > 0) == (shape == "crop") and (repeated > 0) == (shape != "crop")
    assert float(values.split()[-1]) == round(100 * cropped / (emitted + cropped), 2)


def test_ledger_of_a_run_is_that_of_its_newest_save_and_an_unbalanced_one_is_an_error(run_dir, capsys, monkeypatch):
    newest = run(capsys, "ledger", f"{run_dir}")
    assert newest.replace("(the newest save)\n", "", 1) == run(capsys, "ledger", f"{run_dir}", "--step=8") != newest
    honest = inspect_data.ledger
    monkeypatch.setattr(inspect_data, "ledger", lambda c, T: {b: {**a, "read": a["read"] + 1} for b, a in
                                                              honest(c, T).items()})
    assert "off in data by 1." in run(capsys, "ledger", f"{run_dir}", code=1)
