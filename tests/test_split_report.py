"""Before it starts, a program prints which files validate and which train, and warns about accidental splits."""

import re

import pytest

from nanochat.dataset import DataFile, describe_split
from scripts import tok_train, validate
from tests import training
from tests.training import flags, succeed

workplace = training.in_workplace(**training.SMALL, num_iterations=2, save_every=-1)
SHARDS = [DataFile(f"web/{i}.parquet", 1000, 10) for i in range(20)]


@pytest.mark.parametrize(("train", "val", "how", "expected"), [
    (SHARDS[:-1], SHARDS[-1:], {"chosen": True, "reads": "about 2.0 passes"},
     [r"validation: web/19.parquet \(10 documents\), 5.0% of all bytes",
      "training: 19 files, 190 documents; about 2.0 passes"]),
    (SHARDS[:3], SHARDS[3:4], {"chosen": True}, ["25.0% of all bytes", "web/0.parquet", "25.0% .*--val-fraction"]),
    (SHARDS[:3], SHARDS[3:4], {"chosen": False}, ["25.0% of all bytes", "web/0.parquet"]),
    (SHARDS, [DataFile("web/z.jsonl.gz", 10)], {"chosen": True},
     ["validation: web/z.jsonl.gz, 0.0%", "20 files", r"is .jsonl.gz, the others are .parquet.*--val-fraction"]),
    (SHARDS, [DataFile("wiki/0.parquet", 10, 3)], {"chosen": True},
     ["3 documents", "20 files", r"no training file is in its folder \(wiki/0.parquet\).*--val-fraction"]),
    (SHARDS, SHARDS, {"shared": 0.01}, ["0.01 of each .*20 files.*, 200 documents", "the others, 200"]),
])
def test_the_lines_about_a_split(train, val, how, expected):
    lines = describe_split(train, val, **how)
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected):
        assert re.search(pattern, line), line


def test_base_train_and_validate_report_the_split(capsys):
    output = succeed().out
    patterns = [r"validation: shard_3.parquet \(96 documents\), 2\d.\d% of all bytes",
                r"training: shard_0.parquet, shard_1.parquet, shard_2.parquet \(288 documents\); "
                r"this run trains on 1,024 tokens",
                r"warning: .*2\d.\d% of all bytes.*--val-fraction"]
    assert all(re.search(pattern, output) for pattern in patterns), output
    assert output.index("validation:") < output.index("step 00000")
    capsys.readouterr()
    assert validate.main(flags(model_tag="other")) == 0
    output = capsys.readouterr().out
    assert all(re.search(pattern, output) for pattern in patterns), output
    output = succeed(model_tag="shared", val_fraction=0.25).out
    val, train = re.search(r"each .*4 files\), (\d+) documents\ntraining: the others, (\d+) doc", output).groups()
    assert int(val) + int(train) == 384


def test_a_run_prints_its_progress_before_the_first_step():
    output = succeed(eval_every=2).out
    at = [output.index(line) for line in ("start: reading the run directory and the data files",
                                        "start: building the model", "start: packing the first step",
                                        "start: the first evaluation", "step 00000 | validation", "step 00000/00002")]
    assert at == sorted(at)
    assert "start: packing the first step" in succeed(eval_every=2, num_iterations=4).out


def test_tok_train_reports_the_split_and_the_cap_that_truncated_documents(workplace, capsys):
    for i in range(5):
        training.write_shard(workplace / f"data/more_{i}.parquet", ["a text"] * 3)
    arguments = [f"--data-path={workplace / 'data'}", f"--output-dir={workplace / 'tokenizer2'}", "--vocab-size=300"]
    assert tok_train.main([*arguments, "--doc-cap=100"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"validation: shard_3.parquet \(96 documents\), \d\d.\d% of all bytes", output)
    assert "training: 8 files" in output
    assert re.search(r"note: --doc-cap=100 truncated \d+ of 303 documents and dropped \d\d% of all char", output)
    assert output.count(".parquet") < 8, "it must not list all files"
    assert tok_train.main([*arguments, "--doc-cap=10000", "--force"]) == 0
    assert "truncated" not in capsys.readouterr().out
