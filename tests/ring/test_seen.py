"""inspect_data find --texts and --core: which items of a benchmark a run has seen. Compared with the
words of every row of a small run."""

import functools
import json
import re
import shutil
from contextlib import closing
from unittest import mock

import pyarrow.parquet as pq
import pytest

from dev.make_eval_bundle import make_eval_bundle
from nanochat import seen, seen_report
from nanochat.checkpoint import find_checkpoint
from nanochat.find import DocumentPlace
from nanochat.ngrams import Shared, words_of
from nanochat.run_dir import TrainLog
from nanochat.run_reader import RunReader
from scripts import export, inspect_data, report, validate
from tests import training
from tests.finished import STEPS, command

N = 8


def run(*argv, code=0):
    outcome = command(inspect_data.main, *argv)
    assert outcome.code == code, outcome.err
    return outcome.out


def json_lines(*argv):
    return [json.loads(line) for line in run(*argv, "--json").splitlines()]


def write_items(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


@functools.cache
def column(base, file):
    """The texts of a file of the run."""
    return pq.read_table(base / "data" / file)["text"].to_pylist()


def ngrams_of(text, n=N):
    words = words_of(text)
    return {tuple(words[at : at + n]) for at in range(len(words) - n + 1)}


@pytest.fixture(scope="module")
def checked(finished, tmp_path_factory):
    """A copy of a run, items from its data, and what `find` prints about them."""
    from tests import finished as module

    path = tmp_path_factory.mktemp("seen").resolve()
    with training.workplace(path, **module.RUN):
        run_dir = module.copy(finished, path)
        names = {}  # of documents in rows, and some of validation
        for step in range(0, STEPS, 2):
            for row in json_lines("rows", "run", f"--step={step}"):
                names |= {(d["file"], d["document"]): None for d in row["documents"]}
        names |= {("shard_3.parquet", number): None for number in range(20)}
        items = []
        for file, number in names:
            words = column(finished, file)[number].split()
            if len(words) > 20:
                items.append(" ".join(words[:20]).upper())
                items.append(" -- ".join(words[-20:]))
        items += ["nothing of the kind occurs in any of these many texts at all", "too short"]
        file = write_items(path / "items.jsonl", items, "question")
        lines = json_lines("find", "run", f"--texts={file}:question", f"--ngram={N}")
        yield run_dir, items, lines


def test_an_item_is_seen_in_exactly_the_rows_that_hold_its_words(checked):
    _, items, lines = checked
    wanted = {line: set() for line in range(1, len(items) + 1)}
    for step in range(STEPS):
        for row in json_lines("rows", "run", f"--step={step}", "--text"):
            for document in row["documents"]:
                held = ngrams_of(document["text"].removeprefix("<|bos|>"))
                for line, item in enumerate(items, 1):
                    if held & ngrams_of(item):
                        wanted[line].add((step, row["row"]))
    found = {line: set() for line in wanted}
    for item in lines[:-1]:
        uses = [use for document in item["documents"] for use in document["uses"]]
        found[item["line"]] = {(use["step"], use["row"]) for use in uses}
    assert found == wanted
    assert sum(map(bool, wanted.values())) > 10, "the case: some are seen"


def test_documents_name_the_texts_that_share_words_with_an_item(checked, finished):
    _, items, lines = checked
    unseen = 0
    splits = set()
    for item in lines[:-1]:
        for document in item["documents"]:
            name, _, number = document["document"].rpartition(":")
            shared = ngrams_of(column(finished, name)[int(number)]) & ngrams_of(
                items[item["line"] - 1]
            )
            assert tuple(document["words"].split()) in shared
            splits.add(document["split"])
            unseen += document["split"] == "train" and not document["uses"]
    assert splits == {"train", "validation"} and unseen, "the case: some are cropped or lie ahead"


def test_the_table_counts_items_in_the_data_and_seen(checked):
    _, items, lines = checked
    *found, total = lines
    seen_items = [i for i in found if any(d["uses"] for d in i["documents"])]
    in_data = [i for i in found if any(d["split"] == "train" for d in i["documents"])]
    assert total == {
        "task": "items.jsonl:question",
        "ngram": N,
        "items": len(items),
        "not_looked_for": 1,
        "in_data": len(in_data),
        "seen": len(seen_items),
        "not_searched": [],
    }
    assert 0 < len(seen_items) < len(in_data) < len(items)


def test_the_loss_of_a_row_is_its_logged_one(checked):
    run_dir, _, lines = checked
    uses = [
        use for item in lines[:-1] for document in item["documents"] for use in document["uses"]
    ]
    rows = {row["row"]: row for row in json_lines("rows", "run", "--step=2", "--sort=loss")}
    of_step = [use for use in uses if use["step"] == 2]
    assert of_step
    for use in of_step:
        assert use["loss"] == rows[use["row"]]["loss"]
    assert (run_dir / seen.RESULT_NAME).is_file()


def a_document(name, shared, *uses, split="train"):
    uses = [{"step": step, "epoch": 0, "row": 0, "loss": loss} for step, loss in uses]
    return {"document": name, "split": split, "shared": shared, "uses": uses}


def shown_items(capsys, *items):
    """The lines of the table of items, each of which is a list of documents."""
    found = [{"line": i, "ngrams": 81, "documents": item} for i, item in enumerate(items, 1)]
    seen_report.print_items({"q": {"found": found}})
    _, *lines = capsys.readouterr().out.splitlines()
    return [" ".join(line.split()) for line in lines]


def test_a_line_of_the_table_has_the_share_steps_and_losses_of_one_document(capsys):
    """Regression: one line mixed the steps and losses of all documents with the share of one."""
    item = [
        a_document("a:3", 2, (62, 2.75), (138, 2.5)),
        a_document("a:100", 80),
        a_document("a:117", 1, (138, 3.25)),
    ]
    assert shown_items(capsys, item) == [
        "q 1 a:100 80 81 - - -",
        "q 1 a:3 2 81 62, 138 2.75 2.5",
        "q 1 a:117 1 81 138 3.25 -",
    ]


def test_the_first_line_of_an_item_is_the_document_that_has_most_of_it(capsys):
    """Regression: it was a document that was trained on, however little of the item it had."""
    item = [
        a_document("a:2", 1, (3, None)),
        a_document("a:4", 9, (5, None)),
        a_document("b:1", 9, split="validation"),
    ]
    first, second = shown_items(capsys, item)
    assert first == "q 1 a:4 9 81 5 - -" and second == "q 1 a:2 1 81 3 - -"


def test_a_training_document_of_an_item_comes_before_one_of_validation(capsys):
    """Regression: of validation text, the first line named the validation document itself."""
    of_validation = a_document("b:1", 81, split="validation")
    lines = shown_items(capsys, [of_validation, a_document("a:2", 1)])
    assert lines[0] == "q 1 a:2 1 81 - - -"
    assert shown_items(capsys, [of_validation]) == ["q 1 b:1 (validation) 81 81 - - -"]


def test_the_items_with_the_largest_share_come_first_and_of_equal_shares_those_seen(capsys):
    """Regression: one that was seen with 1 of 81 n-grams came before one with 80 in the data."""
    lines = shown_items(
        capsys,
        [a_document("b:1", 81, split="validation")],
        [a_document("a:1", 1, (3, 2.5))],
        [a_document("a:2", 80)],
        [a_document("a:3", 80, (4, 2.5))],
    )
    assert [line.split()[2] for line in lines] == ["a:3", "a:2", "a:1", "b:1"]


def test_the_table_counts_the_items_that_it_does_not_show(capsys):
    *_, end = shown_items(capsys, *[[a_document("a:0", 1, (0, 2.5))]] * 22)
    assert end == "not listed: 2 items; --json shows all"


def test_of_many_steps_the_first_and_the_last_are_shown(capsys):
    item = [a_document("a:1", 9, *((step, 3 - step / 4) for step in range(8)))]
    assert shown_items(capsys, item) == ["q 1 a:1 9 81 0, 1, ..., 7 3 1.25"]


def test_the_table_is_readable(checked, tmp_path):
    _, items, _ = checked
    file = write_items(tmp_path / "items.jsonl", items)
    out = run("find", "run", f"--texts={file}", f"--ngram={N}")
    assert out.split()[:8] == [
        "task",
        "line",
        "document",
        "shared",
        "of",
        "steps",
        "loss",
        "before",
    ]
    assert "in the data" in out and f"{len(items)}" in out
    assert set(seen.read_results(training.run_dir())) == {"items.jsonl", "items.jsonl:question"}


def test_losses_before_and_after_are_those_of_the_first_and_the_last_step():
    assert seen.losses_of(a_document("a:1", 1, (4, 3.0), (9, 2.0))) == (3.0, 2.0)
    assert seen.losses_of(a_document("a:1", 1, (4, 3.0), (4, 2.0))) == (3.0, None)
    assert seen.losses_of(a_document("a:1", 1)) == (None, None)


def test_the_rows_of_a_document_are_stored_by_step():
    """Regression: of a fork, its own rows came before those of its parent."""
    benchmark = seen.Benchmark([seen.Task("q", "", [seen.Item(1, "one two three")])], n=3)
    place = DocumentPlace("web", "a:1", 1, 0, 1)
    hit = seen.Hit(seen.TRAIN, place, Shared(0, 0, 1, "one two three"), False)
    uses = a_document("a:1", 1, (9, 2.0), (4, 3.0))["uses"]
    result = benchmark.results([hit], {("a:1", 0): uses}, 12, [])["q"]
    [document] = result["found"][0]["documents"]
    assert [use["step"] for use in document["uses"]] == [4, 9]


def test_masked_documents_are_in_the_data_but_not_seen(checked, copied):
    _, items, lines = checked
    item = next(i for i in lines[:-1] if any(d["uses"] for d in i["documents"]))
    name = next(d["document"] for d in item["documents"] if d["uses"])
    file = write_items(copied / "items.jsonl", [items[item["line"] - 1]])

    def of_document():
        [item, _] = json_lines("find", "run", f"--texts={file}", f"--ngram={N}")
        return next(d for d in item["documents"] if d["document"] == name)

    path = training.run_dir() / "data_manifest.json"
    manifest = json.loads(path.read_text())
    before = of_document()
    [bucket] = manifest["train"].values()
    file_name, _, number = name.rpartition(":")
    bucket["without"] = {file_name: [int(number)]}
    path.write_text(json.dumps(manifest))
    after = of_document()
    assert before["uses"] and not before["without"]
    assert after["without"] and not after["uses"]


def test_a_step_that_was_not_applied_taught_nothing(checked, copied):
    _, items, lines = checked
    file = write_items(copied / "items.jsonl", items, "question")
    uses = [use for item in lines[:-1] for d in item["documents"] for use in d["uses"]]
    step = uses[0]["step"]
    with closing(TrainLog(training.log_file())) as log:
        log.write(event="skipped", step=step)
    after = json_lines("find", "run", f"--texts={file}:question", f"--ngram={N}")
    left = [use for item in after[:-1] for d in item["documents"] for use in d["uses"]]
    assert left == [use for use in uses if use["step"] != step]


def test_a_fork_has_seen_what_its_parent_had_before(checked, copied):
    _, items, lines = checked
    file = write_items(copied / "items.jsonl", items, "question")
    words = {"fork_from": "run@4", "model_tag": "child"}
    with mock.patch.object(training, "flags", lambda **named: training.as_flags(named)):
        training.succeed(**words)
    flags = [f"--texts={file}:question", f"--ngram={N}"]
    assert json_lines("find", "child", *flags) == lines, "a fork that changes nothing"
    shutil.rmtree(training.run_dir("run"))
    orphan = json_lines("find", "child", *flags)
    uses = [use for item in orphan[:-1] for d in item["documents"] for use in d["uses"]]
    assert uses and min(use["step"] for use in uses) >= 4
    assert "which was not found" in orphan[-1]["not_searched"][0]


def test_validation_text_in_parquet_is_a_benchmark(finished, copied, tmp_path):
    """Regression: only jsonl was read, so nothing told whether the data had validation text, too."""
    files = finished / "data"
    [validation] = [file for file in files.iterdir() if file.name == "shard_3.parquet"]
    texts = column(finished, validation.name)
    lines = json_lines("find", "run", f"--texts={validation}", f"--ngram={N}")
    trained = set()
    for file in files.glob("*.parquet"):
        if file != validation:
            trained |= set().union(*map(ngrams_of, column(finished, file.name)))
    found = {
        item["line"] for item in lines[:-1] if any(d["split"] == "train" for d in item["documents"])
    }
    assert found == {line for line, text in enumerate(texts, 1) if ngrams_of(text) & trained}
    assert 0 < len(found) < lines[-1]["items"] == len(texts)
    outcome = command(inspect_data.main, "find", "run", f"--texts={validation}:body")
    assert outcome.code == 1 and "body" in outcome.err and outcome.err.count("\n") == 1


def test_the_tasks_of_core_are_read_from_a_bundle(checked, tmp_path):
    bundle = make_eval_bundle(tmp_path / "bundle", num_items=20)
    lines = json_lines("find", "run", "--core", f"--eval-bundle={bundle}")
    assert [line["task"] for line in lines[-7:]] == [task.label for task in seen.read_core(bundle)]
    assert all(line["items"] == 20 for line in lines[-7:])


@pytest.mark.parametrize(
    "content, named, words",
    [
        ('{"question": "x"}\n', "{}", "line 1: expected a string in the field `text`"),
        ('{"text": "x"}\n{"text": 3}\n', "{}", "line 2: expected a string"),
        ('{"text": "x"}\nhello\n', "{}", "line 2: not valid JSON"),
        ("[1]\n", "{}", "line 1: expected an object"),
        ("\n", "{}", "the file has no items"),
        ('{"text": "x"}\n', "{}", "no item has 8 words or more"),
        ('{"text": "x"}\n', "{}:question", "whose fields are text; name the field"),
        ('{"text": "x"}\n', "{}x", "the file does not exist; pass FILE.jsonl"),
    ],
)
def test_a_wrong_texts_file_gets_one_sentence(checked, tmp_path, content, named, words):
    file = tmp_path / "items.jsonl"
    file.write_text(content)
    outcome = command(inspect_data.main, "find", "run", f"--texts={named.format(file)}")
    assert outcome.code == 1 and words in outcome.err
    assert outcome.err.count("\n") == 1 and file.name in outcome.err


def test_an_unknown_run_gets_one_sentence(checked, tmp_path):
    file = write_items(tmp_path / "items.jsonl", ["x"])
    outcome = command(inspect_data.main, "find", "nosuch", f"--texts={file}")
    assert outcome.code == 1 and "nosuch" in outcome.err and outcome.err.count("\n") == 1


def test_validate_lists_the_training_documents_that_find_finds(checked, tmp_path):
    _, items, lines = checked
    file = write_items(tmp_path / "items.jsonl", items)
    wanted = {
        document["document"]
        for item in lines[:-1]
        for document in item["documents"]
        if document["split"] == "train"
    }
    flags = [*training.flags(model_tag="new"), f"--decontaminate={file}", f"--ngram={N}"]
    listed = tmp_path / "without.txt"
    outcome = command(validate.main, *flags, f"--list={listed}")
    assert outcome.code == 0, outcome.err
    assert f"{len(wanted)} training documents listed in {listed}" in outcome.out
    lines_of = listed.read_text().splitlines()
    assert {line for line in lines_of if not line.startswith("#")} == wanted
    stated = {line.split()[2].rstrip(",") for line in lines_of if line.startswith("# searched ")}
    assert stated == {f"shard_{number}.parquet" for number in range(3)}, "all training files"
    # regression: older code did not write which files were searched, so its list was "another" one
    listed.write_text("".join(f"{name}\n" for name in sorted(wanted)))
    again = command(validate.main, *flags, f"--list={listed}")
    assert again.code == 0, again.err
    assert {*listed.read_text().splitlines()} == {*lines_of}
    # a run with the list of another version needs that one to resume
    old = re.sub(r"(searched shard_0.*version )\w+", r"\1other", listed.read_text())
    listed.write_text(old)
    assert command(validate.main, *flags, f"--list={listed}").code == 1
    assert listed.read_text() == old
    assert f"items.jsonl {N} {len(items)} 1 {lines[-1]['in_data']}" in " ".join(outcome.out.split())


def test_validate_adds_to_an_existing_list_and_overwrites_none(checked, tmp_path):
    _, items, _ = checked
    file = write_items(tmp_path / "items.jsonl", items[:4])
    old = tmp_path / "old.txt"
    old.write_text("# mine\nshard_1.parquet:0\n")
    flags = [*training.flags(model_tag="new"), f"--decontaminate={file}", f"--ngram={N}"]
    new = tmp_path / "new.txt"
    outcome = command(validate.main, *flags, f"--without-documents={old}", f"--list={new}")
    assert outcome.code == 0 and new.read_text().startswith(old.read_text())
    outcome = command(validate.main, *flags, f"--list={old}")
    assert outcome.code == 1 and "name a new file with --list=FILE" in outcome.err
    assert old.read_text() == "# mine\nshard_1.parquet:0\n"


@pytest.mark.parametrize("fork", [False, True])
def test_training_files_that_were_not_searched_for_a_list_get_a_warning(
    checked, finished, tmp_path, caplog, fork
):
    """Regression: after a branch of the Hub had moved on, the old validation file was trained on
    with its items."""
    _, items, _ = checked
    file = write_items(tmp_path / "items.jsonl", items[:4])
    listed = tmp_path / "without.txt"
    flags = training.flags(model_tag="new")
    found = command(
        validate.main, *flags, f"--decontaminate={file}", f"--ngram={N}", f"--list={listed}"
    )
    assert found.code == 0
    command(validate.main, *flags, f"--without-documents={listed}")
    assert "not searched" not in caplog.text
    grown = tmp_path / "grown"
    shutil.copytree(finished / "data", grown)
    shutil.copy(grown / "shard_0.parquet", grown / "shard_4.parquet")
    more = [f"--data-path={grown}", f"--without-documents={listed}"]
    arrived = "shard_3.parquet"  # validation is in the last file
    if fork:
        more.append("--fork-from=run@4")
        arrived = "shard_4.parquet"  # a fork keeps its parent's validation
    outcome = command(validate.main, *flags, *more)
    assert outcome.code == 0, outcome.err
    assert f"{listed}: 1 training file not searched for it: {arrived};" in caplog.text


def test_a_benchmark_of_which_nothing_is_in_the_data_gets_no_advice(checked, tmp_path):
    """Regression: the advice was to pass a list of 0 documents."""
    file = write_items(tmp_path / "items.jsonl", ["zz yy xx ww vv uu tt ss"])
    flags = [*training.flags(model_tag="new"), f"--list={tmp_path / 'list.txt'}"]
    found = command(validate.main, *flags, f"--decontaminate={file}")
    assert "0 training documents listed" in found.out and "--without-documents" not in found.out
    alone = command(validate.main, *flags)
    assert alone.code == 1 and "--list: " in alone.err and "--decontaminate" in alone.err


def test_a_file_counts_as_searched_if_it_was_searched_for_both_lists(checked, tmp_path, caplog):
    _, items, _ = checked
    file = write_items(tmp_path / "items.jsonl", items[:4])
    old = tmp_path / "old.txt"
    flags = [*training.flags(model_tag="new"), f"--decontaminate={file}", f"--ngram={N}"]
    assert command(validate.main, *flags, f"--list={old}").code == 0
    kept = [line for line in old.read_text().splitlines() if "searched shard_1" not in line]
    old.write_text("\n".join(kept))
    new = tmp_path / "new.txt"
    outcome = command(validate.main, *flags, f"--without-documents={old}", f"--list={new}")
    assert outcome.code == 0 and "not searched for it: shard_1.parquet" in caplog.text
    assert seen.searched_in(new.read_text().splitlines()) == {"shard_0.parquet", "shard_2.parquet"}


def test_the_report_names_the_items_that_were_seen(checked):
    _, _, lines = checked
    total = lines[-1]
    assert command(report.main, "run").code == 0
    text = (training.run_dir() / "report.md").read_text()
    share = f"{100 * total['seen'] / total['items']:.1f} %"
    cells = [total[name] for name in ("ngram", "items", "not_looked_for", "in_data", "seen")]
    row = " | ".join(map(str, [total["task"], *cells, share]))
    assert row in text and "consecutive words" in text


def test_a_model_card_counts_what_was_seen_before_its_step(checked):
    run_dir, _, lines = checked
    checkpoint = find_checkpoint("run@4")
    card = export.model_card(checkpoint, RunReader(run_dir), 1).decode()
    steps = [
        min((use["step"] for d in item["documents"] for use in d["uses"]), default=STEPS)
        for item in lines[:-1]
    ]
    early = sum(step < 4 for step in steps)
    assert 0 < early < lines[-1]["seen"], "the case"
    assert f" {early} | " in card and str(run_dir) not in card


def test_a_run_that_was_not_searched_says_so_in_its_report(copied):
    assert command(report.main, "run").code == 0
    assert "Not searched" in (training.run_dir() / "report.md").read_text()
