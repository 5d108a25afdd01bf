"""--order megatron in the commands: runs are killed, resumed on other processes, inspected; bad
flags are refused."""

import json
import re
import shutil
from functools import partial

import pytest

from nanochat import run_stream, run_uses
from nanochat.common import read_json
from nanochat.find import find_document
from nanochat.integrations.megatron_api import GPTDataset
from nanochat.start_run import open_run
from nanochat.tokenizer import RustBPETokenizer
from scripts import inspect_data, receipt, replay, validate, verify
from tests import training
from tests.finished import command as command_line
from tests.ring.test_megatron_order import as_megatron, digests_of
from tests.token_files import write_megatron
from tests.training import (
    all_steps,
    checkpoints,
    digests,
    events,
    final,
    flags,
    run_dir,
    state_of,
    steps,
    succeed,
)

T = 32
R = 8
STEPS = 10
SETTINGS = {
    "data_format": "megatron",
    "order": "megatron",
    "blend_weights": "30,70",
    "split": "90,10",
    "eod_mask_loss": True,
    "max_seq_len": T,
    "total_batch_size": T * R,
    "num_iterations": STEPS,
    "save_every": 4,
    "eval_every": 5,
    "eval_tokens": 16 * T,
    "depth": 1,
}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """The pairs a and b, and a complete run that all tests share."""
    folder = tmp_path_factory.mktemp("made")
    with training.workplace(folder):
        tokenizer = RustBPETokenizer.from_directory(folder / "tokenizer")
        for seed, name in enumerate("ab"):
            write_megatron(
                folder / name,
                [
                    [[*tokenizer.encode(text), tokenizer.get_bos_token_id()]]
                    for text in training.texts(60, seed=seed)
                ],
            )
        succeed(**command(folder))
    return folder


def command(base, **changed):
    return {**SETTINGS, "data_path": f"{base / 'a'},{base / 'b'}", **changed}


@pytest.fixture(autouse=True)
def workplace(tmp_path, origin):
    """The settings of the command, with the pairs in another folder; the complete run is
    "whole"."""
    with training.workplace(tmp_path) as base:
        shutil.copytree(origin / "runs" / "run", run_dir("whole"))
        for name in "ab":
            for ending in ("bin", "idx"):
                (base / f"{name}.{ending}").hardlink_to(origin / f"{name}.{ending}")
        yield command(base)


# ---- a run ---------------------------------------------------------------------------------------


def test_a_run_trains_on_the_samples_of_the_blend():
    path = run_dir("whole")
    data, config, _ = open_run(path)
    assert digests("whole") == [f"{digest:016x}" for digest in digests_of(config, data.train, 0, R)]
    config, manifest = read_json(path / "config.json"), read_json(path / "data_manifest.json")
    assert (config["num_samples"], config["blend_weights"], config["split"]) == (
        R * STEPS,
        [30, 70],
        "90,10",
    )
    assert {
        split: {k: m["documents"] for k, m in of.items()} for split, of in manifest.items()
    } == {"train": {"a": [0, 54], "b": [0, 54]}, "val": {"a": [54, 60], "b": [54, 60]}}
    assert all(line["loss/a"] != line["loss/b"] for line in steps("whole").values())
    assert set(events("val", "whole")[0]["buckets"]) == {"a", "b"}


def test_killed_and_resumed_on_other_processes_with_other_micro_batches_it_is_the_same_run(
    workplace,
):
    training.start(
        hook=partial(training.die_after_step, 6), leaves=2, sync_save=True, **workplace
    ).wait_for_death()
    assert checkpoints() == ["checkpoint-4"] and len(steps()) == 7
    training.finish(2, device_batch_size=2, **workplace)
    assert digests() == digests("whole")
    assert [record["step"] for record in all_steps()] == [*range(7), *range(4, 10)]
    assert state_of(final())["cursors"] == state_of(final("whole"))["cursors"]
    vals, expected = events("val"), events("val", "whole")
    assert [v["step"] for v in vals] == [0, 5, 5, 10] and expected[0]["bpb"] == vals[0]["bpb"]
    assert [v["bpb"] for v in vals[2:]] == pytest.approx([v["bpb"] for v in expected[1:]], rel=1e-4)


def test_a_new_run_continues_the_data_of_another(workplace):
    more = {"fork_from": "whole@4", "model_tag": "child"}
    error = training.refuse(**{**workplace, "num_iterations": 11}, **more)
    assert "would take 88 samples, but its order has 80" in error
    assert "set --num-iterations 10" in error
    succeed(**{**workplace, "num_iterations": 7}, **more)
    assert digests("child", 4) == digests("whole")[4:7]
    assert read_json(run_dir("child") / "config.json")["num_samples"] == R * STEPS
    more["model_tag"] = "other"
    error = training.refuse(**{**workplace, "num_iterations": 7, "seed": 1}, **more)
    assert "--seed was 42 and is 1" in error


def test_a_step_that_was_not_saved_is_replayed(workplace):
    assert not (run_dir("whole") / "checkpoints" / "checkpoint-6").exists()
    outcome = command_line(replay.main, "whole@6")
    assert outcome.code == 0, outcome.err
    more = {"fork_from": "whole@6", "model_tag": "child"}
    succeed(**workplace, **more)
    assert digests("child", 6) == digests("whole")[6:]
    assert state_of(final("child"))["cursors"] == state_of(final("whole"))["cursors"]


# ---- other lengths and flags ---------------------------------------------------------------------


def test_a_run_cannot_be_made_longer(workplace):
    training.take_over(run_dir("whole"), "final")
    error = training.refuse(**{**workplace, "num_iterations": STEPS + 5})
    assert (
        "would take 120 samples, but its order has 80" in error
        and "set --num-iterations 10, or start" in error
    )
    over = succeed(**workplace).out
    assert "nothing to do" in over and "--init-from=run --model-tag=NAME" in over
    training.forget_saves()
    owner = (run_dir() / ".owner.json").read_bytes()
    assert training.refuse(**{**workplace, "num_iterations": STEPS + 5}) == error, (
        "nor before its first checkpoint"
    )
    assert (run_dir() / ".owner.json").read_bytes() == owner


def test_a_fork_that_ended_before_its_samples_did_can_be_extended(workplace):
    """Regression: it was said to be possible only for a new run."""
    fork = {**workplace, "fork_from": "whole@4", "model_tag": "child"}
    succeed(**{**fork, "num_iterations": 7})
    over = succeed(**{**fork, "num_iterations": 7}).out
    assert "nothing to do" in over and "raise --num-iterations" in over
    succeed(**fork)
    assert digests("child", 4) == digests("whole")[4:]


def test_a_run_may_be_shorter_and_validate_on_other_files(workplace):
    flags = {
        **workplace,
        "split": None,
        "blend_weights": None,
        "val_path": workplace["data_path"].split(",")[1],
    }
    succeed(**{**flags, "num_iterations": 2, "eval_every": -1})
    assert read_json(run_dir() / "config.json")["split"] == "1,0,0"
    data = open_run(run_dir())[0]
    assert [int(s.groups.sum()) for s in (*data.train.values(), *data.val.values())] == [60, 60, 60]
    training.forget_saves()
    assert (
        "completed: 256 tokens" in succeed(**{**flags, "num_iterations": 1, "eval_every": -1}).out
    )


def test_weights_among_the_prefixes_are_those_of_blend_weights(workplace):
    """Regression: Megatron's own list, 30,PREFIX,70,PREFIX, was rejected with the flags to write
    instead."""
    first, second = workplace["data_path"].split(",")
    both = {**workplace, "data_path": f"30,{first},70.0,{second}"}
    assert "also has weights; remove one of the two" in training.refuse(**both)
    succeed(**{**both, "blend_weights": None, "num_iterations": 2, "eval_every": -1})
    config = read_json(run_dir() / "config.json")
    assert (config["data_path"], config["blend_weights"]) == (workplace["data_path"], [30, 70])
    error = training.refuse(
        **{
            **both,
            "blend_weights": None,
            "order": None,
            "model_tag": "lanes",
            "split": None,
            "eod_mask_loss": None,
        }
    )
    assert f"add --order=megatron, or write --data-path={workplace['data_path']}" in error
    succeed(**{**workplace, "model_tag": "flags", "num_iterations": 2, "eval_every": -1})
    assert digests("run") == digests("flags") and len(digests("run")) == 2


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            {"data_format": "shards"},
            "--order=megatron: needs Megatron's files, but --data-format is shards",
        ),
        (
            {"packing": "concat"},
            "--packing: has no effect with --order=megatron; .*, or use --order=lanes",
        ),
        (
            {"blend_weights": "1,2,3"},
            r"--order megatron: blend: got weights \[1.0, 2.0, 3.0\] for 2 prefixes, expected",
        ),
        (
            {"blend_weights": "0,2"},
            r"--blend-weights: got \[0\.0, 2\.0\], expected finite numbers above 0",
        ),
        (
            {"blend_weights": None, "num_iterations": 500},
            "one pass over each prefix, which gives .* takes 4,000",
        ),
        ({"split": "1,0,0"}, "--split: 1,0,0 leaves no whole document for validation in a, b"),
        ({"split": "none"}, "--split: got 'none', expected shares of"),
        ({"seed": 2**32}, r"--seed \(random_seed\): got 4294967296, expected 0 to"),
    ],
)
def test_bad_flags_are_refused_and_leave_no_trace(workplace, changed, message):
    error = training.refuse(**{**workplace, **changed})
    assert re.search(message, error) and "\n" not in error
    assert not run_dir().exists()


# ---- inspection ----------------------------------------------------------------------------------


def inspect(capsys, *argv):
    capsys.readouterr()
    assert inspect_data.main([*map(str, argv)]) == 0
    return capsys.readouterr().out


def test_validate_reports_samples_and_writes_nothing(workplace, capsys, monkeypatch):
    monkeypatch.setattr(GPTDataset, "__getitem__", None)
    monkeypatch.setattr(
        GPTDataset, "shuffle_index", property(lambda self: pytest.fail("it shuffled"))
    )
    assert validate.main(flags(**workplace, device_batch_size=4)) == 0 and not run_dir().exists()
    out = capsys.readouterr().out
    assert re.search("ok: data: .* tokens; this run reads .* times", out)
    assert out.endswith("ok: training can start\n")


def test_validate_refuses_a_plot_of_an_order_without_a_plan(workplace):
    """Regression: nothing was drawn, and nothing was said."""
    with pytest.raises(ValueError, match=r"--plot: there is no plan with --order=megatron"):
        validate.main([*flags(**workplace), "--plot=x.png"])


def test_validate_and_a_new_run_say_how_often_the_data_is_read(workplace, capsys):
    """Regression: "80 of 80 samples", without a word about the passes."""
    alone = {"data_path": workplace["data_path"].split(",")[0], "blend_weights": None}
    for changed, bucket in (({}, "b"), (alone, "a")):
        named = {**workplace, **changed, "num_iterations": 30 * STEPS}
        validate.main(flags(**named, device_batch_size=4))
        shown = capsys.readouterr().out
        [often] = re.findall(rf"this run reads {bucket} ([\d.]+) times", shown)
        assert 2 < float(often) < 6
    launch = training.succeed(**workplace)
    assert re.search(r"data: .*; this run reads b 0.\d+ times, a 0.\d+ times", launch.out)


def test_inspect_data_finds_digests_documents_and_accounts(capsys):
    path = run_dir("whole")
    lines = [json.loads(x) for x in inspect(capsys, "digest", path, "--steps=3:10").splitlines()]
    assert [line["match"] for line in lines] == [True] * 7
    row = json.loads(inspect(capsys, "rows", path, "--step=7", "--row=5", "--json", "--text"))
    data, config, _ = open_run(path)
    sample = as_megatron(config, data.train)[7 * R + 5]
    ids = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
    assert (row["lane"], row["bucket"]) == (2, "ab"[int(sample["dataset_id"])])
    assert "".join(place["text"] for place in row["documents"]) == data.tokenizer.decode(ids)
    assert sum(place["tokens"] for place in row["documents"]) == T + 1
    ledger = inspect(capsys, "ledger", path)
    assert "It balances" in ledger
    place = row["documents"][0]
    found = inspect(capsys, "find", path, f"--document={place['file']}:{place['document']}")
    assert re.search("^epoch: how often", found, re.M) and "lanes" not in found


def test_a_receipt_is_verified_on_pairs_in_another_folder(workplace, tmp_path):
    assert command_line(receipt.main, "whole", f"--out={tmp_path / 'r.json'}").code == 0
    outcome = command_line(verify.main, tmp_path / "r.json", f"--data-path={tmp_path}")
    assert outcome.code == 0 and f"OK steps 0, {STEPS - 1}: trained on these rows" in outcome.out
    index = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").unlink()
    (tmp_path / "a.idx").write_bytes(index[:-1] + b"x")
    outcome = command_line(verify.main, tmp_path / "r.json", f"--data-path={tmp_path}")
    assert outcome.code == 1 and f"PROBLEM {tmp_path / 'a'}" in outcome.out


def test_find_names_the_steps_of_a_document_that_rows_names(capsys):
    path, table = run_dir("whole"), {}
    for step in range(STEPS):
        for line in inspect(
            capsys, "rows", path, f"--step={step}", "--sort=loss", "--json"
        ).splitlines():
            row = json.loads(line)
            for place in row["documents"]:
                use = (step, row["row"], row["lane"], place["start"], place["stop"], row["loss"])
                table.setdefault(f"{place['file']}:{place['document']}", set()).add(use)
    for document in [*table][::7]:
        found = json.loads(inspect(capsys, "find", path, f"--document={document}", "--json"))
        names = ("step", "row", "lane", "start", "stop", "loss")
        uses = {
            tuple(use[name] for name in names)
            for of_epoch in found["passes"]
            for use in of_epoch["uses"]
        }
        assert uses == table[document] and found["split"] == "train" and found["text"]
    opened = run_stream.open_stream_of(path)
    places = [find_document({"train": opened.data.train}, document)[1] for document in table]
    for place, uses in run_uses.uses_of(opened, places).items():
        assert {use[1:6] for use in uses} == {use[:-1] for use in table[place.name]}
    assert "held out for validation: the run never" in inspect(
        capsys, "find", path, "--document=a.bin:59"
    )
    log = training.log_file("whole")
    log.write_text(
        "".join(
            line
            for line in log.read_text().splitlines(keepends=True)
            if json.loads(line)["step"] < 2
        )
    )
    document = next(name for name in table if {use[0] for use in table[name]} == {2})
    assert "expected around step 2\n" in inspect(capsys, "find", path, f"--document={document}")
