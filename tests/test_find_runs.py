"""inspect_data find, spikes and rows --sort=loss, compared with a table of all rows of a run that was killed and
resumed with another number of processes."""

import contextlib
import io
import json
import re
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from nanochat.find import files_of
from nanochat.run_dir import RowLosses, iter_log
from scripts import inspect_data
from tests import training

STEPS, SAVE_EVERY = 24, 5
MIX = """
curriculum:
- {duration_tokens: 4000, mix: {code: 1, web: 3}}
- {duration_tokens: 4000, mix: {code: 1, web: 1}}
max_epochs: {code: 0, web: 0}
allow_budget_mismatch: true
"""
RUNS = {"text": {"long_docs": "crop"}, "shards": {"data_format": "shards", "long_docs": "split"}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """`folder` with the runs "text" and "shards": two buckets, killed on two processes, completed on one. `tables`:
    {run: `whole_table`}."""
    folder = tmp_path_factory.mktemp("finished")
    with training.workplace(folder, **training.SMALL):
        training.write_buckets(folder, {"code": 12, "web": 30}, shards=0)
        (folder / "mix.yaml").write_text(MIX)
        for name, changed in RUNS.items():
            settings = {"model_tag": name, "data_path": folder / name, "curriculum": folder / "mix.yaml", "leaves": 2,
                        "num_iterations": STEPS, "save_every": SAVE_EVERY, **changed}
            training.start(2, hook=partial(training.die_after_step, 13), **settings).wait_for_death()
            training.finish(1, **settings)
            assert len(training.all_steps(name)) > STEPS, "the case: steps were repeated"
        tables = {name: whole_table(name) for name in RUNS}
    return SimpleNamespace(folder=folder, tables=tables)


@pytest.fixture(autouse=True)
def workplace(finished, tmp_path):
    with training.workplace(tmp_path, **training.SMALL):
        shutil.copytree(finished.folder / "runs", tmp_path / "runs")
        yield


def json_lines(*argv):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert inspect_data.main([*map(str, argv), "--json"]) == 0
    return [json.loads(line) for line in out.getvalue().splitlines()]


def opened(name):
    return inspect_data.open_named_stream(inspect_data.parse_args(["find", name, "--document=x:0"]))


def whole_table(name, steps=STEPS):
    """{document: {(epoch, step, row, lane, start, stop, loss)}} of all rows of all steps."""
    table = {}
    for step in range(steps):
        rows = json_lines("rows", name, f"--step={step}", "--sort=loss")
        assert [row["loss"] for row in rows] == sorted((row["loss"] for row in rows), reverse=True)
        for row in rows:
            for place in row["documents"]:
                use = (place["epoch"], step, row["row"], row["lane"], place["start"], place["stop"], row["loss"])
                table.setdefault(f"{place['file']}:{place['document']}", set()).add(use)
    return table


@pytest.mark.parametrize("name", RUNS)
def test_exactly_the_uses_of_every_document_are_found(finished, name, caplog):
    table, run = finished.tables[name], opened(name)
    run.run.cursor_files[10].write_bytes(b"torn")
    documents = [f"{file}:{number}" for source in run.data.train.values()
                 for file, first, groups in files_of(source) for number in range(first, sum(groups))]
    assert len(documents) == 84 and {*table} <= {*documents}
    passes_of, fates = inspect_data.tracer(run), {}
    for document in documents:
        passes = list(passes_of(inspect_data.find_document({"train": run.data.train}, document)[1]))
        uses = {use[:6] for found in passes for use in found.uses}
        assert uses == {use[:6] for use in table.get(document, ())}, document
        for found in passes:
            fates.setdefault(re.sub("[0-9,]+", "N", inspect_data.fate(run, found)), []).append(document)
            if found.cropped_after:
                assert max(use.stop for use in found.uses) == found.cropped_after < found.length
    rest = {"text": "cropped from token N on", "shards": "tokens N to N never trained on: the run ended first"}[name]
    assert {*fates} - {""} == {"never trained on: the run ended first", rest}
    assert "step-00000010.json.gz: corrupt or truncated" in caplog.text
    for document in documents[::9]:
        [found] = json_lines("find", name, f"--document={document}")
        uses = [use for of_epoch in found["passes"] for use in of_epoch["uses"]]
        assert {tuple(use.values()) for use in uses} == table.get(document, set()) and found["split"] == "train"


def test_a_run_that_continues_the_data_of_another_counts_only_its_own_steps(finished):
    training.succeed(model_tag="next", data_path=finished.folder / "text", curriculum=finished.folder / "mix.yaml",
                     num_iterations=6, save_every=4, init_from="text@15", init_data="continue", plan="off")
    table, run = whole_table("next", 6), opened("next")
    passes_of, fates = inspect_data.tracer(run), set()
    for file in ("code/0.parquet", "web/1.parquet"):
        for number in range(12):
            document = inspect_data.find_document({"train": run.data.train}, f"{file}:{number}")[1]
            passes = list(passes_of(document))
            assert {use[:6] for found in passes for use in found.uses} == {
                use[:6] for use in table.get(f"{file}:{number}", ())}
            fates |= {inspect_data.fate(run, found) for found in passes}
    assert "before this run began" in fates


def test_of_many_documents_with_a_text_those_trained_on_are_shown(capsys, monkeypatch):
    """Regression: the first ones in file order were shown, trained on or not, which looked like a "no"."""
    real, late = inspect_data.tracer, "code/0.parquet:3"  # as if the run had not reached the documents before it
    monkeypatch.setattr(inspect_data, "tracer", lambda run: lambda document: (
        real(run)(document) if document.name == late else iter(())))
    monkeypatch.setattr(inspect_data, "DOCUMENTS", 2)
    shown = [(of["document"], bool(of["passes"])) for of in json_lines("find", "text", "--text=e")]
    assert len(shown) == 2 and shown[0] == (late, True) and not shown[1][1]
    monkeypatch.setattr(inspect_data, "DOCUMENTS", 1)
    assert inspect_data.main(["find", "text", "--text=e"]) == 0
    assert "trained on 1 of the first " in (out := capsys.readouterr().out) and "the search stopped there" in out


def test_a_text_lists_its_documents_first_and_validation_is_reported(capsys):
    run = opened("text")
    text = run.data.train["code"].texts(0)[3]
    assert inspect_data.main(["find", "text", f"--text={text}"]) == 0
    out = capsys.readouterr().out
    assert re.search("the run trained on [1-9][0-9]* of the [1-9][0-9]* documents? that contain it", out)
    assert "code/0.parquet:3 (code)" in out and "epoch  step" in out and out.endswith(inspect_data.FIND_LEGEND + "\n")
    assert re.search("\nepochs? 0(: | to )", out)
    begin, part = text[:9], text[40:49]  # `has_text` marks the rows that hold these words themselves
    for words in (begin, part):
        [found] = [of for of in json_lines("find", "text", f"--text={words}") if of["document"] == "code/0.parquet:3"]
        uses = [use for of_epoch in found["passes"] for use in of_epoch["uses"]]
        shown = json_lines("rows", "text", f"--step={uses[0]['step']}", f"--row={uses[0]['row']}", "--text")
        texts = [d["text"] for d in shown[0]["documents"] if (d["file"], d["document"]) == ("code/0.parquet", 3)]
        assert uses and uses[0]["has_text"] == any(words in of_row for of_row in texts)
    mask = np.arange(12) == 3
    for row, listed in ((3, True), (4, False)):
        document = inspect_data.find_document({"train": run.data.train}, f"code/0.parquet:{row}")[1]
        run.data.train["code"].without = {0: mask}
        assert inspect_data.is_left_out(run.data.train["code"], document) == listed
    assert inspect_data.main(["find", "text", "--document=web/2.parquet:0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "a validation document: the run never trains on it"
    shards = opened("shards").data.val["web"].manifest["files"][0]["name"]
    [found] = json_lines("find", "shards", f"--document={shards}:1")
    assert found["split"] == "validation" and found["passes"] == []


def test_an_unread_document_of_a_running_run_is_expected_near_its_later_step(finished):
    table, log = finished.tables["text"], training.log_file("text")
    log.write_text("".join(json.dumps(record) + "\n" for record in iter_log(log) if record["step"] < 10))
    for file in training.run_dir("text").glob("logs/cursors/*.json.gz"):
        if file.name > "step-00000010":
            file.unlink()
    run, off = opened("text"), []
    passes_of = inspect_data.tracer(run)
    for document, uses in table.items():
        for found in passes_of(inspect_data.find_document({"train": run.data.train}, document)[1]):
            of_epoch = [use[1] for use in uses if use[0] == found.epoch]
            assert found.pending == ("pending in lane" in inspect_data.fate(run, found))
            assert {use.step for use in found.uses} == {step for step in of_epoch if step < 10}
            if found.expected is not None and of_epoch:
                off.append(abs(min(found.expected, STEPS) - min(of_epoch)))
                assert min(of_epoch) >= 10
    assert len(off) > 10 and np.median(off) <= 4


def test_spikes_lists_the_steps_that_stand_out_and_their_rows(capsys):
    assert inspect_data.main(["spikes", "text"]) == 0
    out = capsys.readouterr().out
    assert "no spike in 24 steps: " in out and "of the steps before it (at least 16, at most 23)" in out
    run = training.run_dir("text")
    kept = RowLosses(run, num_rows=8, T=training.T)
    nats, live = kept.read(20)
    nats[5] *= 4
    kept.write(20, nats, live)
    with open(training.log_file("text"), "a") as log:
        for step, changed in ((20, {"loss": 9.0}), (22, {"grad_norm": None})):
            log.write(json.dumps({**training.steps("text")[step], **changed}) + "\n")
    first, second = json_lines("spikes", "text")
    assert (first["step"], first["grad_norm"], second["step"]) == (22, None, 20), "NaN ranks highest"
    assert second["loss"] == 9 and second["loss_deviations"] > 4 and second["rows"][0]["row"] == 5
    [expected] = json_lines("rows", "text", "--step=20", "--row=5")
    worst = second["rows"][0]
    assert worst["bucket"] == expected["bucket"] and worst["loss"] == pytest.approx(nats[5] / live[5])
    assert [place["document"] for place in worst["documents"]] == [
        f"{place['file']}:{place['document']}" for place in expected["documents"]]
    assert len(json_lines("spikes", "text", "--top=1")) == 1
    assert inspect_data.main(["spikes", "text"]) == 0
    out = capsys.readouterr().out
    assert "step 20: loss 9 (" in out and worst["documents"][0]["document"] in out


def test_corrupt_or_missing_losses_are_one_sentence(caplog):
    [file] = training.run_dir("text").glob("logs/rows/*.bin")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    last = f"--step={STEPS - 1}"
    with pytest.raises(ValueError, match=f"row losses for step {STEPS - 1} are corrupt"):
        inspect_data.main(["rows", "text", last, "--sort=loss"])
    [use, *_] = json_lines("rows", "text", last)[0]["documents"]
    [found] = json_lines("find", "text", f"--document={use['file']}:{use['document']}")
    assert [of_step["loss"] for of_epoch in found["passes"] for of_step in of_epoch["uses"]][-1] is None
    assert f"step {STEPS - 1} are corrupt" in caplog.text
    file.unlink()
    with pytest.raises(FileNotFoundError, match="or did so with --no-row-losses"):
        inspect_data.main(["rows", "text", "--step=3", "--sort=loss"])
    with open(training.log_file("text"), "a") as log:
        log.write(json.dumps({**training.steps("text")[20], "loss": 9.0}) + "\n")
    [spike] = json_lines("spikes", "text")
    assert spike["step"] == 20 and spike["rows"] == [] and "spikes are shown without their rows" in caplog.text
