"""Settings: help, every impossible value, files of flags, older runs, and the table in the docs."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanochat import receipt
from nanochat.cli import Decides, Parser
from nanochat.common import write_json
from nanochat.config import (
    FIELDS,
    OF_LAUNCH,
    Settings,
    add_flags,
    fields_of,
    flag,
    resume_settings,
    settings_table,
)
from nanochat.integrations.megatron_settings import MegatronSettings
from nanochat.old_flags import OLD_FLAGS
from nanochat.run_dir import curriculum_text
from nanochat.run_settings import without_effect
from scripts.base_train import EVERYDAY
from tests.spec.test_config import MIX, RUN, RUN_DIR, RUNS, changed, parse

ROOT = Path(__file__).parents[2]


# ---- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["70 web\n30 code\n", "7e1\tweb 30.0 code", "  70\nweb\n30\ncode"]
)
def test_megatrons_data_args_path_is_a_file_with_the_list_of_data_path(tmp_path, content):
    (tmp_path / "list").write_text(content)
    listed = parse(
        f"--data-args-path={tmp_path / 'list'}", "--order=megatron", "--data-format=megatron"
    )
    assert (listed.data_path, listed.blend_weights) == ("web,code", [70.0, 30.0])


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("", [], "list: expected paths"),
        ("a,b c", [], "none of them with a comma"),
        (b"\xff", [], "cannot be read as text"),
        (None, [], "list: no such file"),
        ("web code x", ["--data-path=web"], "--data-path is also given"),
    ],
)
def test_a_bad_data_args_path_is_one_sentence(tmp_path, content, more, message):
    if content is not None:
        (tmp_path / "list").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        parse("--order=megatron", f"--data-args-path={tmp_path / 'list'}", *more)


def test_help_shows_each_flag_with_its_default():
    text = " ".join(add_flags(Parser(prog="x")).format_help().split())
    for name, f in FIELDS.items():
        if f.metadata.get("flag", True):
            assert re.search(rf"{re.escape(flag(name))}[ ,]", text)
            if type(f.default) in (int, float) and "default" not in f.metadata["help"]:
                assert re.search(
                    rf"{re.escape(flag(name))} [^()]*.*?\(default: {re.escape(str(f.default))}\)",
                    text,
                )


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--skip-steps=-1"], "--skip-steps: got -1"),
        (["--max-grad-norm=0"], "--max-grad-norm: got 0.0"),
        (
            ["--walltime-reserve-seconds=-1"],
            "--walltime-reserve-seconds: got -1.0, expected at least 0",
        ),
        (
            ["--collective-timeout-seconds=0"],
            "--collective-timeout-seconds: got 0.0, expected a number above 0",
        ),
        (["--warmup-steps=-1"], "--warmup-steps: got -1"),
        (["--final-lr-frac=nan"], "--final-lr-frac: got nan"),
        *(
            ([f"--{name}=0"], f"--{name}: got 0, expected at least 1")
            for name in (
                "tokenizer-threads",
                "num-iterations",
                "device-batch-size",
                "keep-last-k",
                "eval-tokens",
            )
        ),
        # regression: one row was evaluated, where others mean all of the data by -1
        (["--eval-tokens=-1"], "--eval-tokens: got -1, expected at least 1"),
        (["--num-iterations=-2"], "--num-iterations: got -2, expected at least 1"),
        *(
            ([f"--{name}={value}"], f"--{name}: got {value}, expected at least -")
            for name in ("seed", "data-seed")
            for value in (-(2**48), 2**48)
        ),
        *(
            ([f"--{name}={10**15}"], f"--{name}: got {10**15}, expected at least 1 and at most")
            for name in (
                "depth",
                "aspect-ratio",
                "head-dim",
                "device-batch-size",
                "total-batch-size",
                "num-iterations",
            )
        ),
        *(
            ([f"--max-seq-len={value}"], f"--max-seq-len: got {value}, expected at least 2 and")
            for value in (1, 10**15)
        ),
        *(
            ([f"--{name}-lr=1e308"], f"--{name}-lr: got 1e+308, expected at least 0 and at most")
            for name in ("matrix", "embedding", "unembedding", "scalar")
        ),
        (["--warmdown-ratio=1.1"], "--warmdown-ratio: got 1.1, expected at least 0 and at most 1"),
        (["--skip-spikes=nan"], "--skip-spikes: got nan"),
        (["--z-loss=-1"], "--z-loss: got -1.0"),
        *(
            ([f"{name}={value}"], f"{name}: got {float(value)}, expected a finite number")
            for value in ("inf", "nan", "-inf")
            for name in (
                "--z-loss",
                "--walltime-reserve-seconds",
                "--weight-decay",
                "--max-grad-norm",
            )
        ),
        (["--text-field=body", "--data-format=shards"], "--text-field=body: applies to text only"),
        *(
            ([f"--log-to={value}"], f"--log-to: got '{value}', expected wandb, tensorboard")
            for value in ("tensorbord", "")
        ),
        *(
            ([f"--profile-steps={value}"], f"--profile-steps: got '{value}', expected A")
            for value in ("7", "9:9", "-1:x")
        ),
        *(
            ([f"--save-at={value}"], f"--save-at: got '{value}', expected steps, N* for every")
            for value in (
                "",
                "1,,2",
                "-1",
                "1.5",
                "1, 2",
                "logs",
                "0*",
                "*",
                "5*,",
                "*5",
                "2**3",
                "9" * 13,
            )
        ),
        (["--order=megatron"], "--data-format is text"),
        (
            ["--order=megatron", "--data-format=megatron", "--long-docs=split"],
            "--long-docs: has no effect with --order=megatron",
        ),
        (["--curriculum={"], "--curriculum: not valid JSON"),
        (["--curriculum={}"], "curriculum: expected a list, got nothing"),
        (["--curriculum=" + '{"a":' * 100_000], "--curriculum: not valid JSON"),
        *(
            (
                [f"--blend-weights={weights}", "--order=megatron", "--data-format=megatron"],
                "numbers above 0",
            )
            for weights in ("0,1", "1,inf", "nan,1")
        ),
    ],
)
def test_impossible_values_and_contradictions_are_refused(argv, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        parse(*argv)


def test_help_shows_the_everyday_flags_and_how_many_others_there_are():
    parser = add_flags(Parser())
    everything = parser.format_help()
    parser.show_first(EVERYDAY)
    shown = parser.format_help()
    assert set(EVERYDAY) <= FIELDS.keys() and len(EVERYDAY) <= 32
    assert flag("depth") in shown and flag("z_loss") not in shown and flag("z_loss") in everything
    number = sum(f.metadata.get("flag", True) for f in FIELDS.values()) - len(EVERYDAY)
    assert f"{number} further flags: --help-all" in shown
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["--help-all"])


def test_help_lists_the_flags_of_an_order_when_the_order_is_given(capsys):
    for words, is_listed in (["--help"], False), (["--order=megatron", "--help"], True):
        with pytest.raises(SystemExit, match="0"):
            add_flags(Parser()).parse_args(words)
        assert ("--blend-weights" in capsys.readouterr().out) == is_listed


@pytest.mark.parametrize("name", OLD_FLAGS)
def test_a_flag_of_another_program_is_an_error_that_names_ours(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(name)
    assert capsys.readouterr().err.startswith(f"error: {name}: {OLD_FLAGS[name]}")
    assert {
        "--resume-from-step",
        "--allow-budget-mismatch",  # of gpt-simple
        "--batch-size",
        "--learning-rate",
        "--training.resume",
    } <= set(OLD_FLAGS)


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(  # 9**9 items
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi")
)

# ---- a file of flags -----------------------------------------------------------------------------


def test_the_config_of_a_run_is_a_file_of_flags(tmp_path):
    (tmp_path / "mix.yaml").write_text(
        "curriculum: [{duration_tokens: 10, mix: {web: 1}}]\n"
        "allow_budget_mismatch: true\nallow_bucket_exhaustion: true\n"
    )
    once = parse(
        "--curriculum", str(tmp_path / "mix.yaml"), "--resume=scratch", "--force", "--depth=3"
    )
    assert once.mix.allow_budget_mismatch and once.allow_bucket_exhaustion
    run = replace(once, vocab_size=5, world_size=2, lanes=8)
    write_json(tmp_path / "config.json", {**run.to_json(), "derived": {}, "origin": None})
    assert parse("--config", str(tmp_path / "config.json")) == replace(
        once, lanes=8, resume="auto", force=False
    )  # these two must not start the run over


BAD_YAML = [
    ("depht: 3", "--depht: unknown flag; did you mean --depth?"),
    ("zeal: 3", "--zeal: unknown flag"),
    ("depth: x", "--depth: invalid int value: 'x'"),
    ("depth: {a: 1}", "--depth: invalid int value: "),
    ("depth: true", "--depth: got True, expected text or a number"),
    ("force: 3", "--force: got 3, expected true or"),
    ("long_docs: foo", "--long-docs: invalid choice: 'foo'"),
    ("- a", "expected a mapping from flags to values"),
    (
        "training: {max_steps: 9}",
        "--training: each setting has its own flag, such as --data-path=DIR",
    ),
    ("data: {format: jsonl}", "--data: each setting has its own flag"),
    ("config: b", "--config: unknown flag"),
    ("a: b: c", "not valid YAML (line 1: mapping values are not"),
    ("depth: !!bool x", "not valid YAML"),
    ("depth: !!float", "not valid YAML"),
    ('run: "\\UFFFFFFFF"', "not valid YAML"),
    ("a: &a [x]\nb: *a", "--a: unknown flag"),
    ("[" * 100_000, "lists and mappings nested more than 20"),
    ("a" * 2**20, "more than 524,288 bytes"),
    (
        "curriculum: {a: 2024-01-01}",
        "2024-01-01 is a date, which is not plain text or a number; put it in quotes",
    ),
    ("curriculum: {2024-01-01: 3}", "2024-01-01 is a date"),
    ("curriculum: {a: !!set {x}}", "is a set, which is not"),
    ("curriculum: [!!binary aGk=]", "is a bytes"),
    (LAUGHS, "values"),
    (f"depth: 3\n{LAUGHS}", "values"),
    ("- " + LAUGHS.replace("\n", "\n  "), "values"),
    (None, "No such file or directory; expected a file of flags"),
]
BAD_TOML = [
    ("depth" + ".a" * 3000 + " = 1", "lists and mappings nested more than 20"),
    ("depth = " + "[" * 9000, "recursion"),
    ("depth" + ".a" * 20_000 + " = 1", "more than 32,768 bytes"),
    ("depth = 2020-01-01", "is a date, which is not"),
    ("curriculum.a = 2020-01-01", "2020-01-01 is a date, which is not plain text"),
    ("depth 3", "expected YAML, or TOML in a .toml file"),
    ("depth.a.a = 1", "--depth: invalid int value"),
]


@pytest.mark.parametrize(
    "name, text, error",
    [*(("a.yaml", *row) for row in BAD_YAML), *(("a.toml", *row) for row in BAD_TOML)],
)
def test_a_bad_file_of_flags_is_one_sentence(tmp_path, capsys, name, text, error):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit, match="2"):
        parse("--config", str(tmp_path / name))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --config={tmp_path / name}: ") and error in line


@pytest.mark.parametrize(
    "words, error",
    [
        (["--depht=3"], "--depht: unknown flag; did you mean --depth?"),
        (["--depth=x"], "argument --depth: invalid int value: 'x'"),
        (
            ["--depth=1", "--long-docs=spilt"],
            "argument --long-docs: invalid choice: 'spilt'",
        ),
        (["d12"], "d12: not a flag"),
    ],
)
def test_an_error_on_the_command_line_does_not_name_the_file(tmp_path, capsys, words, error):
    path = tmp_path / "a.yaml"
    path.write_text("depth: 4\nlong_docs: split\n")
    with pytest.raises(SystemExit, match="2"):
        parse(f"--config={path}", *words)
    assert capsys.readouterr().err.startswith(f"error: {error}")
    path.write_text("depth: x\n")
    with pytest.raises(SystemExit, match="2"):
        parse(f"--config={path}", "--depth=3")
    assert capsys.readouterr().err.startswith(f"error: --config={path}: argument --depth: invalid")


# ---- a resume ------------------------------------------------------------------------------------


def test_the_table_of_settings_has_a_row_for_each_rule():
    """tests/ring/test_docs.py compares the rows with the docs, but would not miss those at the
    end."""
    rows = [line.split("`")[1] for line in settings_table().splitlines()[2:]]
    own = fields_of(MegatronSettings)
    assert rows == [flag(name) for name, f in own.items() if f.metadata["note"]]
    assert all(f.metadata["note"] for f in own.values() if f.metadata["decides"])


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        ({"depth": "4"}, "depth: expected a whole number, got a string"),
        ({"pack": 1}, "pack: expected true or false"),
        ({"seed": None}, "seed: expected a whole number, got null"),
        ({"order": "megatron", "blend_weights": 3}, "expected a list or null"),
        ({"order": "zeal"}, "--order: got 'zeal', expected lanes or megatron"),
        ({"order": ["lanes"]}, "order: expected a string, got a list"),
        ({"curriculum": []}, "expected an object or null"),
        ({"curriculum": {"phases": 3}}, "phases: expected a list"),
        ({"curriculum": {"phases": ["x"]}}, ""),
        ({"warmup_steps": 2.5}, "warmup_steps: expected a whole number, got a"),
        ({"z_loss": float("nan")}, "--z-loss: got nan"),
        ({"data_format": "shards", "min_chars": 3}, "applies to text"),
    ],
)
def test_a_config_json_with_impossible_values_is_named(damage, error):
    """Regression: a value of another type was a TypeError, the error named no file, and it had the
    remedy twice."""
    path = re.escape(str(RUN_DIR / "config.json"))
    with pytest.raises(ValueError, match=rf"^{path}: .*{re.escape(error)}") as e:
        resume_settings({**RUN.to_json(), **damage}, RUN, run_dir=RUN_DIR)
    assert str(e.value).count("; restore it, if it was damaged or edited") == 1


def test_the_config_json_of_an_imported_run_is_a_file_of_flags(tmp_path):
    """Regression: "--world-size: unknown flag"."""
    write_json(tmp_path / "config.json", RUN.to_json())  # without "derived"
    assert parse(f"--config={tmp_path / 'config.json'}").depth == RUN.depth


def test_a_single_step_to_save_at_may_be_a_number_in_a_file(tmp_path):
    (tmp_path / "flags.yaml").write_text("save-at: 100\n")
    assert parse(f"--config={tmp_path / 'flags.yaml'}").save_at == "100"


def test_a_file_of_flags_may_hold_a_curriculum_as_its_file_would(tmp_path):
    """Regression: "not valid JSON", about a list of phases in YAML."""
    phase = "- {mix: {books: 7, code: 3}}"
    (tmp_path / "mix.yaml").write_text(f"curriculum:\n{phase}\n")
    (tmp_path / "flags.yaml").write_text(f"num-iterations: 9\ncurriculum:\n{phase}\n")
    from_file = parse(f"--curriculum={tmp_path / 'mix.yaml'}", "--num-iterations=9")
    assert from_file.mix is not None
    assert parse(f"--config={tmp_path / 'flags.yaml'}") == from_file


def test_the_notation_and_last_duration_of_a_curriculum_may_change():
    longer = {**MIX, "phases": [{"duration_tokens": 99, "mix": {"web": 0.5}}]}
    then, now = (replace(RUN, curriculum=mix) for mix in (MIX, longer))
    settings, notices = resume_settings(then.to_json(), now, run_dir=RUN_DIR)
    assert settings == now
    before = MIX["phases"][-1]["duration_tokens"]
    change = f"--curriculum: its phases had {before:,} tokens (0: no end), now 99"
    assert [notice.change for notice in notices.values()] == [change]
    more = {**MIX, "phases": [*MIX["phases"], {"duration_tokens": 5, "mix": {"code": 1}}]}
    with pytest.raises(ValueError) as caught:
        resume_settings(then.to_json(), replace(RUN, curriculum=more), run_dir=RUN_DIR)
    assert "--curriculum: number of phases: the run has 1, this launch 2 (" in str(caught.value)


def test_a_curriculum_that_one_of_two_launches_lacks_is_told_in_words():
    """Regression: it was a Python dict."""
    with pytest.raises(ValueError) as caught:
        resume_settings(RUN.to_json(), replace(RUN, curriculum=MIX), run_dir=RUN_DIR)
    words = f"--curriculum: the run has None, this launch {curriculum_text(MIX)} ("
    assert words in str(caught.value) and "{" not in words


def test_the_change_of_a_curriculum_is_told_in_the_words_of_its_file():
    """Regression: two lines of JSON that is in no file of the user's."""
    then, now = (
        {"phases": [{"duration_tokens": 9, "mix": mix}], "max_epochs": {"web": limit}}
        for mix, limit in (({"web": 4, "code": 2}, 1), ({"web": 1}, 2))
    )
    with pytest.raises(ValueError) as caught:
        run = replace(RUN, curriculum=then).to_json()
        resume_settings(run, replace(RUN, curriculum=now), run_dir=RUN_DIR)
    text = str(caught.value)
    mixes = "the run has {'code': 2, 'web': 4}, this launch {'web': 1}"
    assert f"--curriculum: mix of phase 1: {mixes}" in text
    assert "--curriculum: max_epochs of web: the run has 1, this launch 2 (" in text


# ---- rules are data, sentences are not -----------------------------------------------------------

REWORD = """
import json, sys
from pathlib import Path
from nanochat import cli

declare = cli.setting

def reworded(default, help, **rules):
    for name in ("fixed", "note"):
        if isinstance(rules.get(name), str):
            rules[name] += f" (said otherwise: {help})"
    return declare(default, help, **rules)

cli.setting = reworded
from tests.core.test_config import rules_of_settings
print(json.dumps(rules_of_settings(Path(sys.argv[1]))))
"""


def rules_of_settings(run_dir):
    """[{class: the settings in a receipt}, {setting: what a resume with another value is told}] for a run in
    `run_dir` with a checkpoint."""
    answers = {}
    for name in FIELDS:
        run = {**RUN.to_json(), name: changed(name)}
        if name == "order":
            run |= {"data_format": "megatron"}
        try:
            resume_settings(run, RUN, run_dir=run_dir)
            answers[name] = "allowed"
        except ValueError:
            answers[name] = "refused"
    receipts = {kind.__name__: [*receipt.row_settings(run)] for kind, run in RUNS.items()}
    return [receipts, answers]


def test_settings_of_a_launch_exist_and_decide_nothing():
    assert {name: FIELDS[name].metadata["decides"] for name in OF_LAUNCH} == dict.fromkeys(
        OF_LAUNCH, Decides.NOTHING
    )


def test_a_refusal_shows_values_as_they_are():
    """Regression: "RUN/" in a path became the run's folder."""
    then = replace(RUN, without_documents="/data/MYRUN/list.txt")
    now = replace(RUN, without_documents="/data/MYRUN/other.txt")
    with pytest.raises(ValueError, match=r"the run has '/data/MYRUN/list.txt', this launch"):
        resume_settings(then.to_json(), now, run_dir=RUN_DIR)


def test_a_reworded_sentence_changes_no_rule_of_a_resume_and_no_receipt(tmp_path):
    run_dir = tmp_path / "d4"
    (run_dir / "checkpoints/checkpoint-5").mkdir(parents=True)
    words = [sys.executable, "-c", REWORD, str(run_dir)]
    printed = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    rules = rules_of_settings(run_dir)
    assert json.loads(printed) == rules
    assert {*rules[1].values()} == {"allowed", "refused"}


# ---- settings without effect ---------------------------------------------------------------------


def test_settings_of_lanes_are_named_as_idle_in_megatrons_order():
    flags = {"order": "megatron", "data_format": "megatron", "overlap": 16, "buffer_size": 4}
    assert without_effect(MegatronSettings(**flags), [*flags]) == [
        "--overlap (with --order=megatron)",
        "--buffer-size (with --order=megatron)",
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"packing": "concat", "overlap": 16}, ["--overlap (with --packing=concat)"]),
        ({"packing": "binned", "long_docs": "split"}, ["--long-docs (with --packing=binned)"]),
        ({"overlap": 16}, ["--overlap (with --long-docs=crop)"]),
        ({"overlap": 16, "long_docs": "split"}, []),
        ({"target_flops": 1e9, "num_iterations": 5}, ["--target-flops (with --num-iterations)"]),
        ({"target_flops": 1e9}, []),
        (
            {"warmdown_ratio": 0.5, "warmdown_steps": 3},
            ["--warmdown-ratio (with --warmdown-steps)"],
        ),
        ({"core_metric_max_per_task": 9}, ["--core-metric-max-per-task (without"]),
        ({"core_metric_max_per_task": 9, "core_metric_every": 5}, []),
        ({"allow_bucket_exhaustion": True}, ["--allow-bucket-exhaustion (without --curriculum)"]),
    ],
)
def test_a_named_setting_that_another_one_makes_idle_is_named(flags, expected):
    """Regression: such settings were accepted without a word."""
    found = without_effect(Settings(**flags), [*flags])
    assert len(found) == len(expected)
    assert all(idle.startswith(start) for idle, start in zip(found, expected))
    assert without_effect(Settings(**flags), []) == [], "the parent's or the default's"
