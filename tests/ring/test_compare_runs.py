"""scripts.compare_runs: equal means equal bits; for other runs it prints where, in what and by how
much they differ."""

import gzip
import json
import math
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanochat.checkpoint import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    Checkpoint,
    load_checkpoint,
)
from nanochat.common import read_json, write_json
from nanochat.run_dir import around_difference, changes_text, cursor_files, setting_texts
from nanochat.run_history import Effect, Stage, find_parting, history_of
from nanochat.run_reader import RunReader
from nanochat.schedule import Schedule
from scripts import average, compare_runs, tok_shards
from tests import training
from tests.checkpoints import of_other_code, reseal
from tests.finished import RUN, STEPS, command, copy
from tests.forks import as_fork

WEIGHT = "transformer.h.0.attn.c_q.weight"


@pytest.fixture(scope="module")
def base(finished, tmp_path_factory):
    """runs/: a; again (a copy); halves (half the device batch size); seed; deep (another depth,
    half the tokens)."""
    with training.workplace(tmp_path_factory.mktemp("compare").resolve(), **RUN) as path:
        for tag in ("a", "again"):
            copy(finished, path, tag=tag)
        training.succeed(model_tag="halves", device_batch_size=2)
        training.succeed(model_tag="seed", seed=43)
        training.succeed(model_tag="deep", depth=3, total_batch_size=training.STEP // 2)
        yield path


@pytest.fixture
def changed(base, tmp_path):
    """A copy of the run `again` that a test may change."""
    return shutil.copytree(base / "runs" / "again", tmp_path / "copy")


def compare(*argv):
    """(whether the runs are equal, the summary, the rest of the output)."""
    outcome = command(compare_runs.main, *argv)
    summary, _, rest = outcome.out.partition("\n")
    assert outcome.code == (0 if summary.startswith("equal ") else 1)
    return outcome.code == 0, summary, rest


def log_of(run_dir):
    return run_dir / "logs" / "train.jsonl"


def rewrite_log(run_dir, change):
    """Apply `change` to every record of the log; None drops the record."""
    records = [change(json.loads(line)) for line in log_of(run_dir).read_text().splitlines()]
    log_of(run_dir).write_text(
        "".join(json.dumps(record) + "\n" for record in records if record is not None)
    )


def change_cursors(file):
    state = json.loads(gzip.decompress(file.read_bytes()))
    state["cursors"][2]["row"] += 1
    file.write_bytes(gzip.compress(json.dumps(state).encode()))


# ---- whole runs ----------------------------------------------------------------------------------


def test_another_instruction_set_is_named_as_the_cause(base, changed):
    """Regression: the same command, data and code gave other bits, and nothing in the output said
    why."""

    def elsewhere(record):
        if record.get("event") == "started":
            record["cpu_capability"] = "AVX1024"
        return record | ({"loss": record["loss"] + 1e-9} if "loss" in record else {})

    rewrite_log(changed, elsewhere)
    _, summary, rest = compare("a", changed)
    assert summary.startswith("same data; losses differ first at step 0")
    assert re.search(r"cpu_capability +\w+ +AVX1024\n\ncause: the processors differ", rest)


def test_a_version_that_an_older_log_lacks_is_not_a_difference(base, changed):
    def older(record):
        record = {name: value for name, value in record.items() if not name.startswith("cpu")}
        return record | ({"loss": 0.0} if "loss" in record else {})

    rewrite_log(changed, older)
    _, _, rest = compare("a", changed)
    assert "versions that differ" not in rest and "cause:" not in rest


def test_equal_runs_list_what_is_equal(base):
    equal, summary, rest = compare(base / "runs" / "a", "again")
    state = compare_runs.contents(load_checkpoint(base / "runs/a/checkpoints/final"))
    values = len(list(compare_runs.leaves(state)))
    tensors = [leaf for _, leaf in compare_runs.leaves(state) if isinstance(leaf, torch.Tensor)]
    assert len(tensors) > 2 * len(state["model"]) > 40  # momenta too
    assert equal and summary.startswith("equal bit for bit: 8 digests, 8 losses, checkpoint 2 (")
    assert summary.endswith(f"checkpoint 8 ({values:,} values)")
    for line in (
        "; completed\n",
        "steps 0 to 7 in the log; checkpoints: 2, 4, 6, 8",
        "cursors: 4 equal",
        "validation results: 3 equal",
        "gradient norms: 8 equal",
        "token counts: 8 equal",
        f"checkpoint 8: {values:,} values equal",
    ):
        assert line in rest
    assert [line.split()[0] for line in rest.splitlines() if '"again"' in line] == ["model_tag"]
    assert "bits per byte" not in rest


def test_the_evaluation_with_which_a_fork_begins_is_at_the_tokens_of_its_parent():
    """Regression: there was a dash in its row."""
    run = SimpleNamespace(fork=SimpleNamespace(step=4, tokens=100))
    log = {"bpb": {4: 2.5, 5: 2.0}, "tokens": {4: 125}}
    side = compare_runs.Side("b", run, {}, log, "")
    assert compare_runs.curve(side, "bpb") == {100: 2.5, 125: 2.0}


def a_side(evaluated, *, first=0, num=100):
    """A side whose steps have ten tokens, evaluated after some of them; a fork if `first` is not 0."""
    fork = SimpleNamespace(step=first, tokens=10 * first) if first else None
    steps = range(first, num)
    log = {
        "tokens": {step: 10 * (step + 1) for step in steps},
        "loss": dict.fromkeys(steps, 3.0),
        "bpb": dict.fromkeys(evaluated, 2.0),
    }
    return compare_runs.Side("x", SimpleNamespace(fork=fork), {}, log, "")


def test_the_table_of_a_fork_begins_where_it_does(base):
    """Regression: half of its rows were before the fork, with dashes."""
    rows = compare_runs.same_tokens(a_side(range(0, 101, 10)), a_side((80, 90, 100), first=75))
    assert [row[0] for row in rows] == [800, 900, 1000]


def test_the_table_has_the_last_evaluation_that_both_runs_have(base):
    """Regression: it was thinned away."""
    rows = compare_runs.same_tokens(a_side(range(100)), a_side((51,)))
    assert [510, 3.0, 3.0, 2.0, 2.0] in rows and len(rows) <= compare_runs.TABLE_ROWS + 1


def change_pins(run_dir, split, change):
    """Apply `change` to the pin of each file of a split."""
    manifests = read_json(run_dir / "data_manifest.json")
    for pin in manifests[split]["data"]["files"]:
        change(pin)
    write_json(run_dir / "data_manifest.json", manifests)


def test_bits_per_byte_on_different_validation_text_have_a_warning(base, changed):
    """Regression: they were side by side like comparable ones."""
    rewrite_log(changed, lambda record: record | ({"loss": 9.5} if "loss" in record else {}))
    assert "validation text" not in compare("a", changed)[2]
    change_pins(changed, "val", lambda pin: pin.update(footer="f" * 32))
    note = "different validation text: bits per byte cannot be compared\ntokens"
    assert note in compare("a", changed)[2]


def test_bits_per_byte_on_other_amounts_of_validation_text_have_a_warning(base, changed):
    config = read_json(changed / "config.json")
    write_json(changed / "config.json", {**config, "eval_tokens": 512})
    rewrite_log(changed, lambda record: record | ({"loss": 9.5} if "loss" in record else {}))
    assert "different amounts of validation text (--eval-tokens)" in compare("a", changed)[2]


def test_evaluations_on_two_amounts_of_text_are_not_mixed(base, changed):
    """Regression: bits per byte from before a resume with another --eval-tokens were in the table."""
    before = {event["step"] for event in RunReader(changed).named("val")}
    started = next(json.loads(line) for line in log_of(changed).read_text().splitlines())
    more = {"step": STEPS, "changed": {"eval_tokens": 512}}
    record_event(changed, **{**started, **more})
    record_event(changed, "val", step=STEPS, bpb=2.5)
    series = compare_runs.read_series(RunReader(changed), [])
    assert len(before) > 1 and series["bpb"] == {STEPS: 2.5}


def test_a_file_under_another_name_is_not_a_file_that_differs(base, changed):
    """Regression: eight identical books in another folder were listed."""
    change_pins(changed, "train", lambda pin: pin.update(name=f"web/{pin['name']}"))
    rest = compare("a", changed)[2]
    assert "files that differ" not in rest
    assert "the same files under other names: shard_0.parquet is web/shard_0.parquet, " in rest


def test_another_device_batch_size_has_the_same_data_and_other_losses(base):
    _, summary, rest = compare("a", "halves")
    a, b = training.steps("a"), training.steps("halves")
    of_steps = [(i, name) for i in range(STEPS) for name in ("loss", "grad_norm")]
    first, name = next((i, name) for i, name in of_steps if a[i][name] != b[i][name])
    what = {"loss": "losses", "grad_norm": "gradient norms"}[name]
    of_log = f"{what} differ first at step {first}: {a[first][name]} and {b[first][name]}, "
    of_weights = re.search(r"checkpoint (\d) differs in model\.", rest)
    # on some processors, only weights differ at first
    is_first = of_log if first < int(of_weights[1]) else of_weights[0]
    assert summary.startswith(f"same data; {is_first}") and of_log in rest
    assert "digests: 8 equal" in rest and "cursors: 4 equal" in rest


def test_the_first_line_names_the_weight_decay_that_follows_from_another_length(base):
    """Regression: the losses were the first to differ, and nothing said why."""
    steps = 2 * STEPS
    training.succeed(model_tag="long", num_iterations=steps, warmdown_steps=0)
    training.succeed(model_tag="short", warmdown_steps=0)
    _, summary, _ = compare("short", "long")
    assert summary.startswith(
        "same data; rates of the updates differ first at step 1.weight decay: "
    )
    differ(
        base / "runs/long", "loss", 0
    )  # regression: the rates were named with other weights, too
    assert compare("short", "long")[1].startswith("same data; losses differ first at step 0: ")
    differ(base / "runs/long", "digest", 3)
    assert compare("short", "long")[1].startswith("losses differ first at step 0: ")


def test_a_length_that_follows_from_another_setting_is_listed(base, changed):
    rewrite_log(changed, lambda r: r | {"num_iterations": 99} if "num_iterations" in r else r)
    rest = compare("a", changed)[2]
    assert re.search(rf"^num_iterations +{STEPS} +99$", rest, re.MULTILINE)


def test_a_setting_that_the_schedule_has_gained_is_equal_at_its_default(base, monkeypatch):
    """Regression: "only b has it" and exit code 1, above "no digest, loss or weight differs"."""
    load = Checkpoint.load

    def of_older_code(checkpoint, file):
        state = load(checkpoint, file)
        if file == SCHEDULER_NAME and "again" in checkpoint.path.parts:
            assert state.pop("warmdown_ratio") == Schedule.warmdown_ratio, "the case"
        return state

    monkeypatch.setattr(Checkpoint, "load", of_older_code)
    equal, summary, _ = compare("again", "a")
    assert equal and summary.startswith("equal bit for bit")


def test_another_seed_differs_from_step_0_on(base):
    digests = training.digests("a")[0], training.digests("seed")[0]
    _, summary, rest = compare("a", "seed")
    assert (
        summary == f"digests differ first at step 0: {digests[0]} and {digests[1]}; 8 of 8 differ"
    )
    assert "cursors differ first at step 2.lane 0.stream.seed: 42 and 43; 4 of 4 differ" in rest
    assert ["seed", "42", "43"] in [line.split() for line in rest.splitlines()]


def test_the_same_rows_from_text_and_from_its_shards(base):
    tok_shards.main(
        [
            f"--input-dir={base / 'data'}",
            f"--output-dir={base / 'whole'}",
            "--max-length=0",
            f"--tokenizer={base / 'tokenizer'}",
            "--num-workers=1",
        ]
    )
    training.succeed(model_tag="shards", data_format="shards", data_path=base / "whole")
    assert compare("a", "shards")[1].startswith("the same rows from different files: ")
    change_cursors(cursor_files(base / "runs" / "shards")[2])
    assert compare("a", "shards")[1].startswith("cursors differ first at step 2.lane ")


def test_two_experiments_get_tables_of_settings_and_of_results_at_equal_numbers_of_tokens(base):
    """Regression: dozens of tensors were printed, and no results side by side."""
    rest = compare("a", "deep")[2]
    lines = [line.split() for line in rest.splitlines()]
    assert ["depth", "2", "3"] in lines and ["total_batch_size", "512", "256"] in lines
    assert "checkpoint 2 differs in architecture.n_layer: 2 and 3; " in rest and "c_k" not in rest
    heading = next(i for i, line in enumerate(lines) if line[:1] == ["tokens"])
    rows = [
        [None if cell == "-" else float(cell.replace(",", "")) for cell in line]
        for line in lines[heading + 1 : heading + 4]
    ]
    # deep: evaluated after 0, 4 and 8 steps of 256 tokens
    assert [row[0] for row in rows] == [0, 1024, 2048]
    a, deep = (
        {event["step"]: event["bpb"] for event in training.events("val", tag)}
        for tag in ("a", "deep")
    )
    assert [row[4] for row in rows] == [float(f"{deep[s]:.4g}") for s in (0, 4, 8)]
    assert [row[3] for row in rows] == [float(f"{a[0]:.4g}"), None, float(f"{a[4]:.4g}")]
    assert "transformer.h.2.attn.c_q.weight: only b has it" in compare("a", "deep", "--tensors")[2]


def test_settings_that_differ_are_not_cut_before_they_differ():
    """Regression: both cells showed the same beginning of two curricula."""
    phases = [
        {"duration_tokens": 500_000_000, "mix": {"books": 2, "code": weight}} for weight in (1, 3)
    ]
    later = [*phases, phases[0] | {"duration_tokens": 7}]
    curricula = [{"phases": phases}, {"phases": [*phases, phases[0]]}, {"phases": later}]
    a, b, c = curricula
    assert setting_texts([a, b])[0] == "2 books + 1 code, then 2 books + 3 code"
    first, second = around_difference(setting_texts([b, c]))
    assert "then 500,000,000 of 2 books" in first and "then 7 of 2 books" in second
    changed = changes_text({"curriculum": [b, c]})
    assert changed == f"curriculum {first} -> {second}"
    one = {"phases": [{"duration_tokens": 200_000, "mix": {"books": 1, "code": 1}}]}
    limits = [{**one, "max_epochs": {"code": limit}} for limit in (1, 3)]
    assert "1 of code -> ..." in changes_text({"curriculum": limits})


def test_curricula_with_the_same_mixes_are_told_apart_in_words():
    """Regression: they were shown as JSON."""
    phases = [{"duration_tokens": 3000, "mix": {"code": 1, "web": 0.5}}]
    a = {"phases": phases, "max_epochs": {"code": 2}, "allow_budget_mismatch": False}
    b = {**a, "max_epochs": {"code": 3}, "allow_budget_mismatch": True}
    begin = "1 phase: 3,000 tokens of 1 code + 0.5 web"
    assert setting_texts([a, b, None]) == [
        f"{begin}; max_epochs 2 of code",
        f"{begin}; max_epochs 3 of code; allow_budget_mismatch",
        "null",
    ]


def test_curricula_that_differ_in_their_last_digits_are_told_apart():
    """As JSON: words round weights."""
    a, b = (
        {"phases": [{"duration_tokens": 3000, "mix": {"code": weight, "web": 1}}]}
        for weight in (0.12345678, 0.12345679)
    )
    assert setting_texts([a, b]) == [json.dumps(a), json.dumps(b)]


# ---- forks --------------------------------------------------------------------------------------


def make_fork(base, tag, parent, step, *, log_of_parent="a", **changes):
    """A fork of a run that has trained to the same end, with the same bits."""
    path = shutil.copytree(base / "runs" / log_of_parent, base / "runs" / tag)

    def own(record):
        return record if record["step"] >= step or record.get("event") == "started" else None

    def begins(record):
        return record | ({"step": step} if record.get("event") == "started" else {})

    rewrite_log(path, own)
    rewrite_log(path, begins)
    for checkpoint in (path / "checkpoints").iterdir():
        if load_checkpoint(checkpoint).step < step:
            shutil.rmtree(checkpoint)
    for saved, file in cursor_files(path).items():
        if saved < step:
            file.unlink()
    return as_fork(path, parent, step, **changes)


def record_event(path, event, **values):
    """Add an event to the log of a run."""
    with open(log_of(path), "a") as log:
        log.write(json.dumps({"event": event, **values}) + "\n")


def differ(path, name, first):
    """Change a value of the log from a step on."""

    def changed(record):
        is_later = "event" not in record and record["step"] >= first
        return record | ({name: "f" * 16 if name == "digest" else 9.5} if is_later else {})

    rewrite_log(path, changed)


@pytest.fixture
def family(base, tmp_path, monkeypatch):
    """A base directory with a copy of the run `a`."""
    shutil.copytree(base / "runs" / "a", tmp_path / "runs" / "a")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    return tmp_path


def parting(*argv):
    """The four lines about where two histories part."""
    rest = compare(*argv)[2].splitlines()
    begin = next((i for i, line in enumerate(rest) if line.startswith("common history: ")), None)
    return None if begin is None else rest[begin : begin + 4]


RATE = {"matrix_lr": [0.02, 0.01]}
ROWS = {"packing": ["bestfit", "concat"]}
CODE = {"code of nanochat/gpt.py": ["1" * 8, "2" * 8]}
MASK = {"attention_mode": ["causal", "sdpa_mask"]}
PHASE = {"duration_tokens": STEPS * training.STEP, "mix": {"data": 1.0}}
MIXTURE = {"curriculum": [None, {"phases": [PHASE]}]}


def test_a_fork_that_changes_nothing_equals_its_parent_from_its_first_step_on(family):
    make_fork(family, "b", "a", 4)
    equal, summary, _ = compare("a", "b")
    assert equal and summary.startswith("equal bit for bit: 4 digests, 4 losses, checkpoint 4 (")
    assert parting("a", "b") == [
        "common history: a, until step 4",
        "a: a itself",
        "b: b forks at step 4 (nothing changed)",
        "as expected: they do the same, and no digest, loss or weight differs",
    ]


@pytest.mark.parametrize(
    ("changes", "name", "first", "expected"),
    [
        (
            RATE,
            "loss",
            5,
            "as expected: the loss of step 5 is the first difference: matrix_lr acts on the update of step 4, so on "
            "the loss of step 5",
        ),
        (RATE, "loss", 4, "unexpected: the loss of step 4 differs, but matrix_lr acts on the upd"),
        (RATE, "digest", 4, "unexpected: the digest of step 4 differs, but matrix_lr acts on"),
        (RATE, "loss", 6, "unexpected: matrix_lr acts on the update of step 4, so on the loss of"),
        (RATE, "loss", 99, "unexpected: matrix_lr acts on the update of step 4, so on the loss of"),
        (ROWS, "digest", 4, "as expected: the digest of step 4 is the first difference: packing"),
        (ROWS, "digest", 5, "unexpected: packing acts on the rows of step 4, but they are equal"),
        (MIXTURE, "digest", 6, "as expected: the digest of step 6 is the first difference: curr"),
        (MASK, "loss", 4, "as expected: the loss of step 4 is the first difference: attention_"),
        ({"z_loss": [0.0, 1.0]}, "grad_norm", 4, "as expected: the gradient norm of step 4 is"),
        ({"max_grad_norm": [None, 1.0]}, "loss", 6, "as expected: the loss of step 6 is the first"),
        (CODE, "loss", 4, "as expected: the loss of step 4 is the first difference: code of nano"),
        (CODE, "loss", 6, "as expected: the loss of step 6 is the first difference: code of nano"),
        (CODE, "loss", 99, "as expected: nothing differs yet: code of nanochat/gpt.py acts"),
        (CODE, "digest", 4, "unexpected: the digest of step 4 differs, but code of nanochat/gpt"),
        (
            {},
            "loss",
            6,
            "unexpected: no change of a fork acts by then, but the loss of step 6 differs",
        ),
        ({"eval_every": [4, 2]}, "loss", 99, "as expected: they do the same, and no digest"),
        (RATE | ROWS, "digest", 4, "as expected: the digest of step 4 is the first difference: pa"),
    ],
)
def test_the_first_difference_is_compared_with_the_one_that_the_changes_must_make(
    family, changes, name, first, expected
):
    path = make_fork(family, "b", "a", 4, **changes)
    if changes is CODE:
        of_other_code(path)
    differ(path, name, first)
    *_, verdict = parting("a", "b")
    assert verdict.startswith(expected)
    assert parting("b", "a")[3] == verdict, "the order of the arguments matters"


def begin_launch(path, step, code, *, takes_steps=True):
    """Log that a launch of other model code began, and took the steps from there on or failed at once."""
    lines = log_of(path).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    is_later = ["event" not in record and record["step"] >= step for record in records]
    of_launch = {"event": "started", "world_size": 1, "device": "cpu", "torch": ""}
    started = {**of_launch, "step": step, "model_code": {"nanochat/gpt.py": code}}
    lines.insert(is_later.index(True) if takes_steps else len(lines), json.dumps(started))
    log_of(path).write_text("\n".join(lines) + "\n")


def test_the_code_shown_is_that_of_launches_of_which_a_step_is_left(family):
    """Regression: a launch that failed at once seemed to have taken all steps again."""
    run = training.run_dir("a")
    shutil.rmtree(run / "checkpoints")
    shown = RunReader(run).shown_code
    begin_launch(run, 0, "6" * 32, takes_steps=False)
    reader = RunReader(run)
    assert reader.shown_code == shown != {}
    assert not any(launch.other_code for launch in reader.launches), "cards and pages name them"


def test_other_code_than_that_of_the_first_launch_of_a_fork_is_told(family):
    """The record of a fork describes that launch, even if it took no step."""
    path = make_fork(family, "b", "a", 4)
    begin_launch(path, 4, "6" * 32)
    assert [launch.has_steps for launch in RunReader(path).launches] == [False, True]
    assert RunReader(path).launches[1].other_code == ["nanochat/gpt.py"]


def test_the_code_of_a_fork_is_not_that_of_its_parents_checkpoint(family):
    """Regression: until its first save, the fork seemed to have changed the code back."""
    path = make_fork(family, "b", "a", 4, **CODE)
    of_other_code(path)
    newest = max((path / "checkpoints").iterdir(), key=lambda saved: load_checkpoint(saved).step)
    reseal(newest, model_code={"nanochat/gpt.py": "1" * 32})
    assert RunReader(path).shown_code["nanochat/gpt.py"] == "0" * 8
    assert RunReader(path).model_code["nanochat/gpt.py"] == "0" * 32, "repeat compares it"


def test_a_fork_of_a_run_whose_name_was_used_again_is_compared(family):
    """Regression: its step, lower than the first of that run, was a traceback."""
    make_fork(family, "b", "a", 4)
    make_fork(family, "c", "b", 2)
    for lines in (parting("c", "b"), parting("b", "c")):
        assert lines[0].startswith("common history: ")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "as expected: they do the same, and no digest, loss or weight differs"),
        ({"matrix_lr": 0.05}, "as expected: the loss of step 5 is the first difference: matrix_lr"),
        ({"num_iterations": 16}, "as expected: the loss of step 5 is the first difference: num_"),
        ({"long_docs": "split"}, "as expected: the digest of step 4 is the first difference: long"),
        ({"skip_steps": 1}, "as expected: the digest of step 4 is the first difference: skip_ste"),
        ({"total_batch_size": 1024}, "as expected: the digest of step 4 is the first difference: "),
        ({"z_loss": 0.1}, "as expected: the gradient norm of step 4 is the first difference: z_l"),
        ({"attention_mode": "sdpa_mask"}, "as expected: the loss of step 4 is the first differe"),
    ],
    ids=str,
)
def test_a_fork_that_has_trained_parts_from_its_parent_where_it_must(base, changed, expected):
    tag = "_".join(changed) or "same"
    words = {"fork_from": "a@4", "model_tag": tag, **changed}
    with mock.patch.object(training, "flags", lambda **named: training.as_flags(named)):
        training.succeed(**words)
    assert parting("a", tag)[3].startswith(expected)


@pytest.mark.parametrize(
    "other", [(Stage.ROWS, "curriculum"), (Stage.LOSS, "skip_spikes")], ids=str
)
def test_of_several_changes_those_that_must_act_are_named(monkeypatch, other):
    """Regression: a curriculum that is only longer, or --skip-spikes without a spike, was named for
    what another length changes."""
    stage, name = other
    effects = [
        Effect(4, stage, [name], may_be_later=True),
        Effect(4, Stage.UPDATE, ["num_iterations"]),
    ]
    sign = compare_runs.Sign(5, Stage.LOSS, "the loss of step 5")
    monkeypatch.setattr(compare_runs, "effects_of", lambda *_: effects)
    monkeypatch.setattr(compare_runs, "first_sign", lambda _: sign)
    common = SimpleNamespace(step=4)
    verdict = compare_runs.verdict([], common, 9)
    assert "first difference: num_iterations acts on the update of step 4" in verdict
    monkeypatch.setattr(compare_runs, "first_sign", lambda _: sign._replace(step=6))
    verdict = compare_runs.verdict([], common, 9)
    assert verdict.startswith("unexpected: num_iterations acts on the update of step 4"), (
        "another change may act later, so it is not the one that is overdue"
    )


def test_all_changes_that_must_act_by_the_first_difference_are_named(monkeypatch):
    effects = [Effect(4, Stage.LOSS, ["fp8"]), Effect(4, Stage.UPDATE, ["matrix_lr"])]
    sign = compare_runs.Sign(5, Stage.LOSS, "the loss of step 5")
    monkeypatch.setattr(compare_runs, "effects_of", lambda *_: effects)
    monkeypatch.setattr(compare_runs, "first_sign", lambda _: sign)
    verdict = compare_runs.verdict([], SimpleNamespace(step=4), 9)
    assert "fp8 acts within step 4; matrix_lr acts on the update of step 4" in verdict


def test_the_last_bits_per_byte_of_buckets_are_compared_at_equal_numbers_of_tokens():
    """Regression: two mixes had a table of their overall value only."""

    def side(code, *, steps=(0, 4)):
        tokens = dict.fromkeys(range(steps[-1])) | {step: 10 * (step + 1) for step in range(8)}
        buckets = {"buckets/web": dict(zip(steps, [3.0, 2.0])), "buckets/code": {4: code}}
        return SimpleNamespace(run=None, log={"tokens": tokens, "bpb": {4: 1.0}, **buckets})

    rows = compare_runs.same_buckets(side(1.5), side(1.25, steps=(0, 6)))
    assert rows == [["web", 0, 3.0, 3.0], ["code", 40, 1.5, 1.25]]
    one = side(1.5)
    del one.log["buckets/web"]
    assert compare_runs.same_buckets(one, side(1.25)) == []


def test_another_horizon_acts_at_the_first_step_with_other_rates(family):
    """The run of 8 steps has a warmup of 2 steps and a warmdown of the last 5."""
    path = make_fork(family, "b", "a", 2, num_iterations=[8, 16], weight_decay=[0.28, 0.0])
    config = read_json(path / "config.json")
    derived = config["derived"] | {"num_iterations": 16, "weight_decay_scaled": 0.0}
    write_json(path / "config.json", config | {"derived": derived})
    parent = family / "runs/a/config.json"
    config = read_json(parent)
    derived = config["derived"] | {"weight_decay_scaled": 0.0}
    write_json(parent, config | {"derived": derived})

    def longer(record):
        return record | ({"num_iterations": 16} if "world_size" in record else {})

    rewrite_log(path, longer)
    warmdown_starts = 3
    first_update = warmdown_starts + 1
    differ(path, "loss", first_update + 1)
    verdict = parting("a", "b")[3]
    assert verdict.startswith(f"as expected: the loss of step {first_update + 1} is the first")


def test_siblings_and_grandchildren_are_compared_from_where_their_histories_part(family):
    make_fork(family, "early", "a", 2, **RATE)
    differ(family / "runs" / "early", "loss", 3)
    late = make_fork(family, "late", "a", 6)
    make_fork(family, "deep", "early", 4, log_of_parent="early", **ROWS)
    differ(family / "runs" / "deep", "digest", 4)
    of_rate = "as expected: the loss of step 3 is the first difference: matrix_lr acts on the update of step 2, so on "
    assert parting("early", "late") == [
        "common history: a, until step 2",
        "a: early forks at step 2 (matrix_lr 0.02 -> 0.01)",
        "b: late forks at step 6 (nothing changed)",
        of_rate + "the loss of step 3",
    ]
    assert parting("a", "deep") == [
        "common history: a, until step 2",
        "a: a itself",
        "b: early forks at step 2 (matrix_lr 0.02 -> 0.01), then deep forks at step 4 (packing "
        '"bestfit" -> "concat")',
        of_rate + "the loss of step 3",
    ]
    assert parting("deep", "early")[3].startswith("as expected: the digest of step 4 is the first")
    assert (
        "digests: 5 equal" not in compare("a", late)[2]
        and "digests: 2 equal" in compare("a", late)[2]
    )


def test_a_fork_that_validates_on_another_amount_of_text_has_no_results_of_its_ancestors(family):
    make_fork(family, "b", "a", 2)
    path = make_fork(family, "c", "b", 6)

    def evaluated_of_b(amount):
        config = read_json(path / "config.json")
        write_json(path / "config.json", config | {"eval_tokens": amount})
        side = compare_runs.open_side("c", [])
        history = history_of(side.run)
        apart = find_parting(history_of(RunReader(family / "runs/a")), history)
        log = compare_runs.with_ancestors(side, history, apart, []).log
        return [step for step in log["bpb"] if 2 <= step < 6]

    assert evaluated_of_b(RunReader(path).config["eval_tokens"])
    assert not evaluated_of_b(512)


def test_forks_with_other_horizons_name_each_changed_setting_of_their_first_difference_once(family):
    early = make_fork(family, "early", "a", 2, num_iterations=[8, 4], final_lr_frac=[0.05, 0.0])
    config = read_json(early / "config.json")
    derived = config["derived"] | {"num_iterations": 4}
    write_json(early / "config.json", config | {"derived": derived})

    def shorter(record):
        return record | ({"num_iterations": 4} if "world_size" in record else {})

    rewrite_log(early, shorter)
    differ(early, "loss", 3)
    make_fork(family, "late", "a", 4, num_iterations=[8, 12], z_loss=[0.0, 1.0])
    verdict = parting("early", "late")[3]
    assert verdict.endswith(
        "num_iterations and final_lr_frac act on the update of step 2, so on the loss of step 3"
    )


def test_a_fork_at_the_end_of_its_parent_has_nothing_to_differ_in_yet(family):
    make_fork(family, "b", "a", 8, num_iterations=[8, 16], **ROWS)
    verdict = parting("a", "b")[3]
    assert verdict == "no verdict yet: they have no step in common from 8 on"


def test_the_same_change_at_the_same_step_is_no_difference(family):
    for tag in ("b", "c"):
        make_fork(family, tag, "a", 4, **RATE)
    assert parting("b", "c")[3].startswith("as expected: they do the same")


def test_forks_of_a_deleted_run_are_still_siblings(family):
    for tag in ("b", "c"):
        make_fork(family, tag, "a", 4, **(ROWS if tag == "c" else {}))
    shutil.rmtree(family / "runs" / "a")
    differ(family / "runs" / "c", "digest", 4)
    first, *_, verdict = parting("b", "c")
    assert first == "common history: a (not here), until step 4"
    assert verdict.startswith("as expected: the digest of step 4")


def test_a_change_that_acts_after_the_last_common_step_is_not_seen_yet(family):
    make_fork(family, "b", "a", 7, **RATE)
    shutil.rmtree(family / "runs/a/checkpoints/final")
    verdict = parting("a", "b")[3]
    assert verdict.startswith("as expected: nothing differs yet: matrix_lr acts on the update of s")


def test_runs_without_a_common_ancestor_have_no_common_history(family, base):
    assert parting("a", base / "runs" / "seed") is None
    assert parting("a", "a") is None


# ---- corrupt or missing parts --------------------------------------------------------------------


def test_truncated_lines_are_skipped_and_the_last_line_of_a_step_counts(base, changed):
    rewrite_log(changed, lambda r: None if "event" in r else r)
    whole = log_of(changed).read_text()
    wrong = (
        json.dumps({**json.loads(whole.splitlines()[3]), "digest": "0" * 16, "loss": 9.0}) + "\n"
    )
    log_of(changed).write_text(wrong + whole[:-40])
    _, summary, rest = compare("a", changed)
    assert summary.startswith("equal bit for bit: 7 digests, 7 losses") and "; unfinished\n" in rest
    log_of(changed).write_text(whole[:-40] + "\n" + wrong)
    assert compare("a", changed)[1].startswith("digests differ first at step 3: ")


@pytest.mark.parametrize(
    "name, change, expected",
    [
        ("tokens", 3071, "token counts differ first at step 5: 3072 and 3071; 1 of 8 differ"),
        ("loss", 6.0, "same data; losses differ first at step 5: 5.7"),
        ("loss", None, "same data; losses differ first at step 5: 5.7"),
        (
            "lr",
            0.5,
            "same data; schedule multipliers of the learning rates differ first at step 5: ",
        ),
        ("grad_norm", 0.0, "same data; gradient norms differ first at step 5: "),
        ("bpb", 1.0, "same data; validation results differ first at step 4: "),
    ],
)
def test_each_series_is_compared(base, changed, name, change, expected):
    event, step = ("val", 4) if name == "bpb" else (None, 5)
    rewrite_log(
        changed,
        lambda r: {**r, name: change} if (r.get("event"), r.get("step")) == (event, step) else r,
    )
    _, summary, rest = compare("a", changed)
    assert summary.startswith(expected) and rest.count("differ first at") == 1


def test_parts_that_only_one_run_has_are_no_difference(base, changed):
    shutil.rmtree(changed / "checkpoints" / "checkpoint-4")
    equal, summary, rest = compare("a", changed)
    assert equal and "checkpoint 4" not in summary and ", checkpoint 8 (" in summary
    assert "checkpoints: 2, 4, 6, 8;" in rest and "checkpoints: 2, 6, 8;" in rest
    shutil.rmtree(changed / "checkpoints")
    shutil.rmtree(changed / "logs" / "cursors")
    assert compare("a", changed)[1] == "equal bit for bit: 8 digests, 8 losses"


def test_corrupt_files_are_skipped_with_a_note_and_kept_cursors_are_compared(base, changed):
    file = changed / "checkpoints" / "final" / "model" / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    equal, summary, rest = compare("a", changed)
    assert equal and "checkpoint 8" not in summary and summary.endswith("; 1 corrupt file skipped")
    assert str(file) in rest and "corrupt" in rest
    assert "corrupt" in command(compare_runs.main, "a", f"{changed}@8").err
    kept = cursor_files(changed)[4]
    change_cursors(kept)
    assert compare("a", changed)[1] == (
        "cursors differ first at step 4.lane 2.row: 8 and 9; 1 of 4 differ; 1 corrupt file skipped"
    )
    kept.write_bytes(b"torn")
    (changed / "checkpoints" / "checkpoint-4" / "trainer_state.json").write_text("{")
    assert compare("a", changed)[1].endswith("; 3 corrupt files skipped")


def test_averaged_weights_are_compared_without_an_optimizer_state(base):
    """Regression: "nothing to compare", because the checkpoints have no optimizer state."""
    for name in ("mean", "mean-again"):
        assert average.main(["a", "--last=2", f"--model-tag={name}"]) == 0
    equal, summary, rest = compare("mean", "mean-again")
    assert (
        equal
        and summary.startswith("equal bit for bit: checkpoint 8 (")
        and "corrupt" not in summary
    )
    assert "note: checkpoint 8: one side has no optimizer state" in rest
    equal, summary, _ = compare("a@8", "mean@8")
    assert not equal and summary.startswith("checkpoint 8 differs in model.")


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_flipped_bit_is_located_in_weights_and_momenta(base, changed):
    path = changed / "checkpoints" / "final"
    good = load_checkpoint(path)
    a, model, optimizer = (good.load(name) for name in (MODEL_NAME, MODEL_NAME, OPTIMIZER_NAME))
    model[WEIGHT].view(torch.int32)[3, 5] ^= 1
    optimizer["state"][WEIGHT]["momentum_buffer"][0, 1] = math.inf
    optimizer["step"] += 1
    for name, state in ((MODEL_NAME, model), (OPTIMIZER_NAME, optimizer)):
        (path / name).unlink()  # `a` is mapped from it
        torch.save(state, path / name)
    reseal(path, tokenizer_fingerprint="f" * 32)
    _, summary, rest = compare("a", changed, "--tensors")
    apart = abs(a[WEIGHT][3, 5].double() - model[WEIGHT][3, 5].double()).item()
    largest = max(weights[WEIGHT].double().abs().max() for weights in (a, model)).item()
    gaps = sorted(
        line.strip() for line in rest.splitlines() if line.startswith("  ") and line[2].isalpha()
    )
    assert apart > 0 and gaps[0] == (
        f"model.{WEIGHT}: 1 of 576 elements differ, the first at [3, 5], by at most "
        f"{apart:.3g}; the largest element is {largest:.3g}"
    )
    assert gaps[1].startswith(
        f"optimizer.state.{WEIGHT}.momentum_buffer: 1 of 576 elements differ, the first at [0, 1], "
    )
    assert (
        gaps[2] == "optimizer.step: 8 and 9"
        and gaps[3].startswith("tokenizer: ")
        and len(gaps) == 4
    )
    assert "same data; checkpoint 8 differs in tokenizer: " in summary and "; 4 of " in summary


def test_single_checkpoints_are_named_by_step_name_or_path(base, tmp_path):
    equal, summary, rest = compare("a@4", "again@4")
    assert (
        equal and summary.startswith("equal bit for bit: checkpoint 4 (") and "digests" not in rest
    )
    assert (
        compare("a@8", "again")[1] == compare("a@final", base / "runs/again/checkpoints/final")[1]
    )
    assert compare("a", "again@4")[1] == summary
    _, summary, _ = compare("a@4", "a@8")
    assert summary.startswith("checkpoint 4 (against 8) differs in cursors.0.row: ")
    alone = shutil.copytree(base / "runs/a/checkpoints/checkpoint-4", tmp_path / "alone")
    assert compare("a@4", alone)[0]


# ---- numbers -------------------------------------------------------------------------------------

NUMBERS = st.floats(width=16) | st.sampled_from(
    [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, 1.001, -2.5]
)


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=6, max_size=6),
    st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_tensors_are_compared_like_a_loop_would(values, dtype):
    a = np.array([x for x, _, _ in values], dtype).reshape(2, 3)
    b = np.array([x if same else y for x, y, same in values], dtype).reshape(2, 3)
    text = compare_runs.difference(torch.from_numpy(a), torch.from_numpy(b))
    where = [i for i in range(6) if a.flat[i].tobytes() != b.flat[i].tobytes()]
    assert (text is None) == (not where)
    if text is not None:
        first = [int(i) for i in np.unravel_index(where[0], a.shape)]
        apart = max(
            (abs(float(a.flat[i]) - float(b.flat[i])) for i in where),
            key=lambda x: (math.isnan(x), x),
        )
        assert text.startswith(
            f"{len(where)} of 6 elements differ, the first at {first}, by at most {apart:.3g};"
        )


@pytest.mark.parametrize(
    "a, b, text",
    [
        (
            torch.zeros(2),
            torch.zeros(2, dtype=torch.bfloat16),
            "torch.float32 (2,) and torch.bfloat16 (2,)",
        ),
        (
            torch.tensor([True, False]),
            torch.tensor([True, True]),
            "1 of 2 elements differ, the first at [1], ",
        ),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "1 of 1 elements differ, "),
        (1, True, "1 and True"),
        (0.0, math.nan, "0.0"),
        (4.0, 2.0, "4.0 and 2.0, 0.5 relative"),
        (torch.empty(0, 3), torch.empty(0, 3), None),
        (math.nan, math.nan, None),
    ],
)
def test_values_of_other_types_shapes_and_kinds(a, b, text):
    difference = compare_runs.difference(a, b)
    assert difference == text or (
        difference is not None and text is not None and difference.startswith(text)
    )


# ---- the code of the model -----------------------------------------------------------------------


def test_other_model_code_is_named_in_the_summary_and_beside_the_settings(base, tmp_path):
    """Regression: the losses seemed to differ by rounding alone, and no setting."""
    run = shutil.copytree(base / "runs" / "seed", tmp_path / "other")
    of_other_code(run)
    equal, summary, rest = compare("a", str(run))
    assert not equal and summary.endswith("other model code: nanochat/gpt.py")
    table = rest[rest.index("settings that differ") :]
    assert re.search(r"\ncode of nanochat/gpt\.py +[0-9a-f]{8} +0{8}\n", table)
    # of a checkpoint, no settings are known
    _, summary, rest = compare("a@6", str(run / "checkpoints" / "final"))
    assert "other model code" in summary and "code of nanochat/gpt.py" in rest
    _, summary, rest = compare("a", "seed")
    assert "code of" not in rest and "model code" not in summary
