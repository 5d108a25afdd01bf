"""Settings: flags are fields, a resume keeps what decides the run, a refusal names flag and remedy."""

import re
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest

from nanochat.cli import Parser
from nanochat.config import (
    FIELDS,
    Settings,
    add_flags,
    fields_of,
    flag,
    from_flags,
    resume_settings,
)
from nanochat.integrations.megatron_settings import MegatronSettings

RUN_DIR = Path("/runs/d4")
RUN = replace(
    Settings(),
    device_batch_size=32,
    lanes=64,
    leaves=1,
    total_batch_size=32_768,
    dtype="float32",
    num_iterations=30,
)


# a run of each class of settings
RUNS = {
    Settings: RUN,
    MegatronSettings: MegatronSettings(
        order="megatron", data_format="megatron", lanes=64, num_samples=5, split="9,1,0"
    ),
}


TYPES = get_type_hints(MegatronSettings)


def parse(*argv):
    return from_flags(add_flags(Parser()).parse_args(argv))


MIX = {
    "phases": [{"duration_tokens": 10, "mix": {"web": 1}}],
    "max_epochs": {},
    "allow_bucket_exhaustion": False,
    "allow_budget_mismatch": False,
}


def changed(name, run=RUN):
    """A valid value of a setting that differs from that of `run`."""
    value, choices = getattr(run, name), fields_of(type(run))[name].metadata.get("choices", ())
    checked = {
        "curriculum": MIX,
        "blend_weights": [1.0, 2.0],
        "log_to": "tensorboard",
        "profile_steps": "1:2",
        "save_at": "log",
    }
    if name in checked:
        return checked[name]
    if choices:
        return next(choice for choice in choices if choice != value)
    if TYPES[name] in (int | None, float | None):
        return 3
    return (
        not value
        if isinstance(value, bool)
        else value + 1
        if isinstance(value, (int, float))
        else "else"
    )


# ---- flags ---------------------------------------------------------------------------------------


def test_without_flags_settings_are_defaults_and_json_restores_them():
    assert parse() == Settings() and Settings.from_json(RUN.to_json()) == RUN
    assert parse(
        "--depth=4", "--no-pack", "--packing=binned", "--matrix-lr=1", "--sync_save"
    ).differing() == {
        "depth": 4,
        "pack": False,
        "packing": "binned",
        "matrix_lr": 1.0,
        "sync_save": True,
    }
    assert parse("--deterministic") == Settings()
    assert parse("--tokenizer-dir=x") == parse("--tokenizer=x"), "old commands still work"
    assert parse("--no-deterministic").differing() == {"deterministic": False}


def test_a_flag_of_another_order_is_an_error_that_names_the_order(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse("--split=1,1")
    assert "--split: has no effect without --order=megatron" in capsys.readouterr().err


# ---- a file of flags -----------------------------------------------------------------------------


def test_a_file_of_flags_equals_these_flags_and_the_command_line_takes_precedence(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "depth: 4\nmatrix-lr: 1e-2\nno_deterministic: true\nblend_weights: [1, 2]\n"
        "data-format: megatron\norder: megatron\nrun: null\npack: null\nmodel_tag: '7'\n"
    )
    (tmp_path / "a.toml").write_text(
        'depth = 4\nmatrix_lr = 0.01\ndeterministic = false\nblend-weights = "1,2"\n'
        'data_format = "megatron"\norder = "megatron"\nmodel_tag = "7"\n'
    )
    by_flags = parse(
        "--depth=4",
        "--matrix-lr=.01",
        "--no-deterministic",
        "--blend-weights=1,2",
        "--model-tag=7",
        "--data-format=megatron",
        "--order=megatron",
    )
    for name in ("a.yaml", "a.toml"):
        assert (
            parse("--config", str(tmp_path / name))
            == parse(f"--config={tmp_path / name}")
            == by_flags
        )
        assert parse(f"--config={tmp_path / name}", "--depth=9") == replace(by_flags, depth=9)


# ---- a resume ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        # `fork` is a record that only the run has
        *((Settings, name) for name in sorted(FIELDS.keys() - {"fork"})),
        *((MegatronSettings, name) for name in sorted(fields_of(MegatronSettings).keys() - FIELDS)),
    ],
)
def test_each_setting_alone_is_allowed_or_refused_as_promised(kind, name):
    # the table in the docs, which tests/ring/test_docs.py compares, lists the fixed ones
    rule = fields_of(kind)[name].metadata
    command = RUNS[kind]
    # the run's side is not checked for contradictions, so each can differ alone
    run = {**command.to_json(), name: changed(name, command)}
    if name == "order":
        run |= {"data_format": "megatron"}
    if rule["decides"]:
        with pytest.raises(ValueError, match=re.escape(flag(name).replace("--no-", "--"))):
            resume_settings(run, command, run_dir=RUN_DIR)
    elif name == "val_path":  # automatic: the command that leaves it out has the run's
        settings, notices = resume_settings(run, command, run_dir=RUN_DIR)
        assert settings == replace(command, val_path=run["val_path"]) and not notices
    else:
        settings, notices = resume_settings(run, command, run_dir=RUN_DIR)
        assert settings == command and [n.effect for n in notices.values()] == [rule["note"]]


def test_a_refusal_lists_the_differences_and_the_remedies(tmp_path):
    run_dir = tmp_path / "d4"
    (run_dir / "checkpoints/checkpoint-5").mkdir(parents=True)
    with pytest.raises(ValueError) as caught:
        resume_settings(
            RUN.to_json(), replace(RUN, depth=6, matrix_lr=0.04, save_every=10), run_dir=run_dir
        )
    text = str(caught.value)
    assert "d4/config.json: " in text and "--model-tag" in text and "--save-every" not in text
    assert "--depth: the run has 20, this launch 6 (decides the shape of the model)" in text
    assert "--matrix-lr: the run has 0.02, this launch 0.04" in text
    for way in ("--config=", "--fork-from=d4", "--init-from=d4", "--resume=scratch --force"):
        assert way in text


def test_automatic_settings_keep_the_values_of_the_run():
    command = replace(
        RUN, lanes=-1, leaves=-1, total_batch_size=-1, dtype="auto", num_iterations=-1
    )
    assert resume_settings(RUN.to_json(), RUN, run_dir=RUN_DIR) == (RUN, {})
    settings, notices = resume_settings(RUN.to_json(), command, run_dir=RUN_DIR)
    assert settings == replace(RUN, num_iterations=-1), "-1 means off for --num-iterations"
    assert [n.change.split(":")[0] for n in notices.values()] == ["--num-iterations"]


def test_a_setting_that_the_run_lacks_has_its_default_and_an_unknown_one_is_refused():
    old = {k: v for k, v in RUN.to_json().items() if k != "overlap"}
    assert resume_settings(old, RUN, run_dir=RUN_DIR)[0] == RUN
    with pytest.raises(ValueError, match="--overlap: the run has 64, this launch 32"):
        resume_settings(old, replace(RUN, overlap=32), run_dir=RUN_DIR)
    with pytest.raises(
        ValueError, match="--zeal: the run has 1, but this code has no such setting"
    ) as error:
        resume_settings({**old, "zeal": 1, "origin": {}, "derived": {}}, RUN, run_dir=RUN_DIR)
    assert "the code that began it" in str(error.value)
