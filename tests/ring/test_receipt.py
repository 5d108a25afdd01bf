"""Receipts: the rows of a run are recomputed from a copy of its data, without the run; other data
is refused."""

import json
import re
import shutil
import socket
from functools import partial

import pyarrow.parquet as pq
import pytest

from nanochat.common import hash_json, read_json, write_json
from nanochat.receipt import make_receipt, next_link
from nanochat.run_reader import RunReader
from nanochat.sources import pin
from nanochat.text import TEXT_FIELD
from nanochat.tokenizer import RustBPETokenizer
from scripts import export, inspect_data, receipt, verify
from tests import training
from tests.finished import command
from tests.forks import as_fork
from tests.training import die_after_step, digests, run_dir, start, succeed, texts, write_shard

STEPS, EVERY = 14, 4
# then the footer of parquet does not depend on its texts
PLAIN = {"compression": "NONE", "write_statistics": False}
RUN = {**training.SMALL, "num_iterations": STEPS, "save_every": 3, "leaves": 2}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """(base directory, receipt, copy of the data in another folder) of a run that was killed on two
    processes and resumed on one."""
    folder = tmp_path_factory.mktemp("made").resolve()
    with training.workplace(folder, **RUN), pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanochat.receipt.EVERY", EVERY)
        for i in range(3):
            write_shard(folder / "text" / "sub" / f"{i}.parquet", texts(90, seed=i), **PLAIN)
        start(2, hook=partial(die_after_step, 7), data_path=folder / "text").wait_for_death()
        succeed(data_path=folder / "text")
        assert command(receipt.main, "run", f"--out={folder / 'r.json'}").code == 0
        shutil.copytree(folder / "text", folder / "copy" / "elsewhere")
    return folder


@pytest.fixture
def work(origin, tmp_path, monkeypatch):
    """The receipt and the copy of the data, in a base directory without the run."""
    for name in ("r.json", "copy", "tokenizer"):
        (shutil.copytree if (origin / name).is_dir() else shutil.copy)(
            origin / name, tmp_path / name
        )
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    return tmp_path


def verified(work, *flags, code=0, name="r.json", data="copy/elsewhere"):
    """The output of `scripts.verify` for a receipt."""
    outcome = command(verify.main, work / name, f"--data-path={work / data}", *flags)
    assert outcome.code == code and "Traceback" not in outcome.err, outcome
    return outcome.out


def refused(work, *flags, **given):
    """The only problem that `scripts.verify` reports for a receipt."""
    [sentence] = re.findall("^  PROBLEM (.*)$", verified(work, *flags, code=1, **given), re.M)
    return sentence


def edit(path, **changed):
    """Change a receipt, with a correct checksum."""
    value = {**read_json(path), **changed}
    del value["checksum"]
    write_json(path, {**value, "checksum": hash_json(value)})


# ---- what a receipt holds ------------------------------------------------------------------------


def test_a_receipt_is_small_and_contains_no_path_or_host(origin, monkeypatch):
    text, value = (origin / "r.json").read_text(), read_json(origin / "r.json")
    assert (
        len(text) < 8000
        and str(origin) not in text
        and "/tmp" not in text
        and socket.gethostname() not in text
    )
    assert list(value["marks"]) == ["0", "4", "8", "12", "13"] and value["steps"] == STEPS
    link = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(origin))
        for step, digest in enumerate(digests()):
            link = next_link(link, digest)
            assert value["marks"].get(str(step), {"digest": digest, "chain": link}) == {
                "digest": digest,
                "chain": link,
            }
        long = RunReader(run_dir())
        long.digests = {step: f"{step:016x}" for step in range(2000)}
        monkeypatch.setattr("nanochat.receipt.EVERY", 1000)
        assert list(make_receipt(long, 2000)["marks"]) == ["0", "1000", "1999"]


def test_a_receipt_has_the_settings_of_the_first_launch(origin, tmp_path, monkeypatch):
    """`scripts.verify --retrain` compares them with config.json, and each launch with them."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(origin))
    before = make_receipt(RunReader(run_dir()))
    copied = shutil.copytree(run_dir(), tmp_path / "run")
    log = copied / "logs" / "train.jsonl"
    started = re.findall('.*"started".*', log.read_text())[-1]
    curriculum = {"phases": [{"duration_tokens": 10**6, "mix": {"data": 1}}]}
    changed = {**json.loads(started), "changed": {"curriculum": curriculum}}
    log.write_text(log.read_text().replace(started, json.dumps(changed)))
    after = make_receipt(RunReader(copied))
    assert {after[name] == before[name] for name in ("settings", "training")} == {True}


def test_rows_of_a_killed_and_resumed_run_are_verified_from_a_copy_of_the_data(work):
    out = verified(work)
    assert (
        "OK steps 0, 4, 8, 12, 13: trained on these rows, and so were all steps from 0 to 13" in out
    )
    between = verified(work, "--steps=5")
    assert "OK steps 5: trained on these rows, and so were all steps from 0 to 8" in between
    assert "and after step 5, step 8 is the next with a digest in the receipt" in between
    assert "is the next with a digest" not in out, "the last step has one"
    assert "OK steps 0: trained on these rows, and so were all steps from 0 to 0" in verified(
        work, "--steps=0"
    )
    shutil.move(work / "tokenizer", work / "copy/elsewhere/tokenizer")
    assert "OK steps 0, 4" in verified(work, "--steps=0,4"), "the tokenizer beside the data"
    shutil.move(work / "copy/elsewhere/tokenizer", work / "mine")
    assert "OK steps 1" in verified(work, "--steps=1", f"--tokenizer={work / 'mine'}")


def test_a_receipt_contains_the_tokenizer_so_it_is_verified_on_a_machine_without_it(work):
    """Regression: without --tokenizer, which no sentence named, the error was that there is no data
    to train one on."""
    shutil.rmtree(work / "tokenizer")
    assert "OK steps 0" in verified(work, "--steps=0")
    outcome = command(
        inspect_data.main,
        "rows",
        work / "r.json",
        "--step=1",
        f"--data-path={work / 'copy/elsewhere'}",
    )
    assert outcome.code == 0, outcome


def test_a_receipt_of_older_code_is_one_sentence(work):
    edit(work / "r.json", nanochat_receipt=1)
    assert "its format is 1, but this code reads format 2; use the code that wrote it" in refused(
        work
    )


def test_a_receipt_is_plain_json_with_the_tokenizer_and_a_line_per_file(work):
    value = read_json(work / "r.json")
    assert json.loads(value["tokenizer"]["tokenizer.json"])
    assert all(len(line.split(" ")) == 4 for line in value["files"]["data"]["files"])


def test_a_corrupt_tokenizer_in_a_receipt_is_one_sentence(work):
    edit(work / "r.json", tokenizer={"tokenizer.json": "not JSON"})
    assert f"{work / 'r.json'}: its tokenizer cannot be read" in refused(work)


def test_inspect_data_shows_the_same_rows_for_a_receipt_and_its_run(origin, work, monkeypatch):
    def rows(*argv):
        outcome = command(inspect_data.main, "rows", "--json", "--text", "--step=9", *argv)
        assert outcome.code == 0, outcome
        return outcome.out

    of_receipt = rows(work / "r.json", f"--data-path={work / 'copy/elsewhere'}")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(origin))
    assert of_receipt == rows("run") and len(of_receipt.splitlines()) == 8


# ---- what is refused -----------------------------------------------------------------------------


def test_the_file_with_one_changed_word_is_named(work):
    path = work / "copy/elsewhere/sub/1.parquet"
    documents, before = pq.read_table(path)["text"].to_pylist(), pin(path, "x.parquet", TEXT_FIELD)
    word = re.search(r"[a-z]{5}", documents[70])
    documents[70] = documents[70][: word.start()] + "zzzzz" + documents[70][word.end() :]
    write_shard(path, documents, **PLAIN)
    assert pin(path, "x.parquet", TEXT_FIELD) == before, "a run would not notice when it resumes"
    sentence = refused(work, "--steps=0")
    assert (
        sentence.startswith(f"{path}: its contents have changed (hash ")
        and "does not give the run's rows" in sentence
    )
    write_shard(path, documents[:-1], **PLAIN)
    assert re.match(rf"{path}: it has \d+ bytes, the receipt says \d+, so", refused(work))
    path.unlink()
    assert refused(work).startswith(f"{path}: missing, but the receipt lists it")


def test_a_copy_of_token_files_without_the_runs_manifests_is_refused(tmp_path):
    """They decide the order of documents."""
    with training.workplace(tmp_path, **{**RUN, "num_iterations": 2}):
        training.write_buckets(tmp_path, {"web": 30}, shards=0)
        succeed(data_path=tmp_path / "shards", data_format="shards")
        assert command(receipt.main, "run", f"--out={tmp_path / 'r.json'}").code == 0
        manifest = tmp_path / "shards/train/web/manifest.json"
        manifest.rename(tmp_path / "manifest.json")
        shutil.rmtree(manifest.parent / ".records")
        sentence = refused(tmp_path, data="shards")
        assert "or the manifest.json beside it, have changed" in sentence
        assert "different file" not in sentence, "it has the same bytes"
        (tmp_path / "manifest.json").rename(manifest)
        verified(tmp_path, data="shards")


def test_another_tokenizer_and_bad_receipts_are_one_sentence(work):
    RustBPETokenizer.train_from_iterator(texts(100, seed=7), 300).save(work / "other")
    sentence = refused(work, f"--tokenizer={work / 'other'}")
    assert (
        "but this tokenizer is" in sentence
        and "leave --tokenizer out: the receipt contains the run's" in sentence
    )
    assert refused(work, "--steps=3,14").endswith(
        "it has no step 14; the run trained steps 0 to 13"
    )
    outcome = command(verify.main, work / "r.json")
    assert outcome.code == 1 and "a receipt does not say where the data is, unless" in outcome.out
    text = (work / "r.json").read_text()
    for bad, problem in (
        (text[:500], "not valid JSON"),
        ("{}", "expected a whole number"),
        (text.replace('"steps": 14', '"steps": 12'), "it has no digest for its last step"),
        (text.replace('"V": 4', '"V": 5'), "its checksum is wrong"),
        (text.replace('"nanochat_receipt": 2', '"nanochat_receipt": 9'), "its format is 9"),
    ):
        (work / "bad.json").write_text(bad)
        assert problem in refused(work, name="bad.json"), problem
    for flags, problem in (
        (["--step=99"], "it has no step 99"),
        (["--step=1", "--lanes=2"], "--lanes: a receipt has"),
    ):
        outcome = command(
            inspect_data.main,
            "rows",
            work / "r.json",
            f"--data-path={work / 'copy/elsewhere'}",
            *flags,
        )
        assert outcome.code == 1 and problem in outcome.err and "Traceback" not in outcome.err
    assert command(verify.main, work / "r.json", "--steps=1,x").code == 2


@pytest.mark.parametrize(
    ("path", "given", "way"),
    [
        ("run", "--replay=5%", "scripts.receipt"),
        ("copy", "--data-path=copy", "scripts.receipt"),
        ("run", "--steps=0", "scripts.receipt"),
        ("r.json", "--run=run", "--data-path"),
        ("r.json", "--replay=0:4 --steps=0", "--replay=A:B"),
    ],
)
def test_verify_refuses_a_flag_that_it_would_not_use(origin, monkeypatch, path, given, way):
    """Regression: `verify RUN --replay=5%` replayed nothing, and said that all is good."""
    monkeypatch.chdir(origin)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(origin))
    *_, last = flags = given.split()
    outcome = command(verify.main, path, *flags)
    name, _, _ = last.partition("=")
    assert outcome.code == 1 and f"{name}: " in outcome.err and way in outcome.err, outcome


def test_verify_checks_a_run_and_its_receipt_in_one_command(origin, monkeypatch):
    """Regression: the run is no receipt, so the flags of the receipt were refused."""
    monkeypatch.chdir(origin)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(origin))
    outcome = command(verify.main, "run", "r.json", "--data-path=copy/elsewhere", "--steps=0")
    assert outcome.code == 0 and "row losses" in outcome.out and "r.json" in outcome.out, outcome


def test_other_digests_settings_and_files_outside_the_data_are_refused(work):
    value = read_json(work / "r.json")
    marks = {**value["marks"], "8": {**value["marks"]["8"], "digest": "0" * 16}}
    edit(work / "r.json", marks=marks)
    assert "step 8 was not trained on these rows: their digest is" in refused(work)
    edit(work / "r.json", marks={**value["marks"], "8": {**value["marks"]["8"], "chain": "0" * 32}})
    assert "one of steps 5 to 7 was not trained on these rows" in refused(work)
    edit(work / "r.json", marks=value["marks"], stream={**value["stream"], "unit_size": 7})
    assert "unit_size is 7 in the receipt and 64 here, though the files are the same" in refused(
        work
    )
    edit(work / "r.json", stream=value["stream"], settings={**value["settings"], "brand_new": 1})
    assert "this code has no setting 'brand_new'" in refused(work)
    files = {"data": {**value["files"]["data"], "files": ["a b 3 ../../x.parquet"]}}
    edit(work / "r.json", settings=value["settings"], files=files)
    assert "'../../x.parquet', which is not below the data path" in refused(work)


def test_a_log_without_a_step_has_no_receipt(origin, tmp_path, monkeypatch):
    shutil.copytree(origin / "runs" / "run", tmp_path / "run")
    log = tmp_path / "run/logs/train.jsonl"
    log.write_text("".join(line for line in log.open() if '"step": 5,' not in line))
    outcome = command(receipt.main, tmp_path / "run", f"--out={tmp_path / 'x.json'}")
    assert (
        outcome.code == 1
        and "it has no digest for step 5" in outcome.err
        and not (tmp_path / "x.json").exists()
    )


def test_a_fork_has_no_receipt_of_its_parents_steps(origin, tmp_path):
    """Regression: the log was said to lack a digest, and the advice was to restore it."""
    child = shutil.copytree(origin / "runs" / "run", tmp_path / "child")
    as_fork(child, "run", 4)
    with pytest.raises(ValueError, match=r"none of its steps, which begin with 4"):
        make_receipt(RunReader(child), 4)


# ---- other kinds of runs -------------------------------------------------------------------------


MIX = "curriculum:\n- {duration_tokens: 3072, mix: {a: 1, b: 3}}\n- {duration_tokens: 3072, mix: {a: 1}}\n"


def test_a_curriculum_documents_left_out_and_continued_data_are_verified(tmp_path):
    with training.workplace(
        tmp_path, **{**RUN, "save_every": -1, "num_iterations": 6, "leaves": 1}
    ):
        training.write_buckets(tmp_path, {"a": 30, "b": 60}, shards=0)
        (tmp_path / "mix.yaml").write_text(
            MIX + "max_epochs: {a: 0, b: 0}\nallow_budget_mismatch: true\n"
        )
        (tmp_path / "list").write_text("b/0.parquet:*\n")
        text = {"data_path": tmp_path / "text", "curriculum": tmp_path / "mix.yaml"}
        shards = {**text, "data_path": tmp_path / "shards", "data_format": "shards"}
        runs = {
            "text": text,
            "without": {**text, "without_documents": tmp_path / "list"},
            "shards": shards,
            "more": {**shards, "fork_from": "shards@6", "skip_steps": 2, "num_iterations": 10},
        }
        for tag, settings in runs.items():
            succeed(**settings, model_tag=tag)
            kind = settings["data_path"].name
            shutil.copytree(tmp_path / kind, tmp_path / "copies" / kind, dirs_exist_ok=True)
            assert command(receipt.main, tag, f"--out={tmp_path / tag}.json").code == 0
            out = verified(tmp_path, name=f"{tag}.json", data=f"copies/{kind}")
            marks = "9" if tag == "more" else "0, 5"
            assert f"OK steps {marks}: trained on these rows" in out
        firsts = [min(training.steps(tag)) for tag in runs]
        assert (
            len({training.steps(tag)[first]["digest"] for tag, first in zip(runs, firsts)}) == 3
        ), "the case: text and shards have equal rows, others not"
        [line, *_] = read_json(tmp_path / "shards.json")["files"]["b"]["files"]
        path = tmp_path / "copies/shards" / line.split(" ", 3)[3]
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
        sentence = refused(tmp_path, name="shards.json", data="copies/shards")
        assert sentence.startswith(f"{path}: its contents have changed")


def test_exports_contain_the_receipt_of_their_steps(origin, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(origin))
    assert command(export.main, "run@6", tmp_path / "hf", "--to=hf").code == 0
    assert command(export.main, "run@6", tmp_path / "nanochat", "--to=nanochat").code == 0
    receipt_of_6 = read_json(tmp_path / "hf" / "receipt.json")
    assert receipt_of_6["steps"] == 6
    assert all(first < 6 for first, _ in receipt_of_6["horizons"]), "launches of later steps"
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "another machine"))
    for name in ("hf", "nanochat"):
        [path] = (tmp_path / name).rglob("receipt.json")
        assert "all steps from 0 to 5" in verified(origin, name=path)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(origin))
    hidden = origin / "hidden"
    (origin / "text").rename(hidden)
    outcome = command(export.main, "run", tmp_path / "bare", "--to=hf")
    hidden.rename(origin / "text")
    assert (
        outcome.code == 0
        and "skipping receipt" in caplog.text
        and not (tmp_path / "bare/receipt.json").exists()
    )
