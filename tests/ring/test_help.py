"""scripts.help: the list of commands, running one by its name, and gpt-simple's configuration."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.cli import Parser
from nanochat.config import add_flags, from_flags
from nanochat.integrations import gpt_simple
from scripts import help as help_

SCRIPTS = Path(help_.__file__).parent


def test_every_script_is_listed_once_with_its_sentence(capsys):
    assert help_.main([]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    listed = [line.split()[0] for line in lines]
    modules = [module.removeprefix("scripts.") for module in help_.commands().values()]
    assert (
        sorted(listed) == sorted(modules) and len(listed) == len(list(SCRIPTS.glob("[!_]*.py"))) + 1
    )
    assert {"base_train", "base_eval", "nanochat.dataset", "tok_shards"} <= set(listed)
    assert all(len(line) < 120 and len(line.split()) > 3 for line in lines)


def test_commands_for_rare_occasions_are_listed_after_the_others(capsys):
    assert help_.main([]) == 0
    everyday, _, rare = capsys.readouterr().out.partition("Needed only occasionally:\n")
    for name in ("convert_shards", "average", "sweep", "infer_bench"):
        assert f"  {name} " in rare and f"  {name} " not in everyday


def test_a_command_is_run_with_its_flags_and_its_exit_code(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    assert help_.main(["status"]) == 0 and "no runs" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        help_.main(["stop", "--help"])
    assert "usage: nanochat stop" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        help_.main(["help", "stop"])
    assert "usage: nanochat stop" in capsys.readouterr().out
    for name in ("tok_train", "tok-train", "base_train", "train"):  # the modules' names, too
        with pytest.raises(SystemExit, match="0"):
            help_.main(["help", name])
    for words in (["trian"], ["help", "trian"]):
        with pytest.raises(ValueError, match="trian: unknown command; did you mean train"):
            help_.main(words)
    with pytest.raises(ValueError, match="xyzzy: unknown command"):
        help_.main(["xyzzy"])


def test_if_a_package_is_missing_a_command_names_the_set_up():
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "scripts.base_train"],
        capture_output=True,
        text=True,
        cwd=SCRIPTS.parent,
    )
    assert ended.returncode == 1
    assert re.fullmatch(
        r"error: No module named '\w+' in .*; run `bash dev/setup.sh`, then "
        r"`source .venv/bin/activate`\n",
        ended.stderr,
    )


# ---- gpt-simple's configuration ------------------------------------------------------------------

GPT_SIMPLE = """
model: {n_layer: 2, n_embd: 48, n_head: 4, n_positions: 64, dropout: 0.1}
data: {path: my shards, packing: false, allow_budget_mismatch: true,
       curriculum: [{duration_tokens: 512, mix: {a: 1.0}}]}
optimizer: {warmup_steps: 2}
training: {per_device_batch_size: 4, gradient_accumulation_steps: 2, max_steps: 3, output_dir: ./outputs/mine,
           compile: false, max_eval_batches: 5, mixed_precision: bf16, keep_last_k: null,
           keep_milestone_every: 500}
"""


def translated(tmp_path, capsys, text):
    (tmp_path / "run.yaml").write_text(text)
    assert help_.main(["help", "--translate", str(tmp_path / "run.yaml")]) == 0
    command, _, notes = capsys.readouterr().out.partition("\n\n")
    return command, notes


def test_gpt_simples_configuration_becomes_a_command_that_we_understand(tmp_path, capsys):
    """Regression: a file with sections was refused without a way on."""
    command, notes = translated(tmp_path, capsys, GPT_SIMPLE)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "scripts.base_train"]
    settings = from_flags(add_flags(Parser()).parse_args(words[3:]))
    expected = {
        "depth": 2,
        "aspect_ratio": 24,
        "head_dim": 12,
        "max_seq_len": 64,
        "data_path": "my shards",
        "data_format": "shards",
        "packing": "binned",
        "pack": False,
        "num_iterations": 3,
        "warmup_steps": 2,
        "device_batch_size": 4,
        "total_batch_size": 512,
        "model_tag": "mine",
        "compile": "off",
        "eval_tokens": 1280,
        "dtype": "bfloat16",
        "tokenizer": "gpt2",
        "activation_checkpointing": True,
        "keep_last_k": None,
        "save_at": "500*",
        "final_lr_frac": 0.1,
    }
    assert {name: getattr(settings, name) for name in expected} == expected
    assert [phase.mix for phase in settings.mix.phases] == [{"a": 1.0}]
    assert settings.mix.allow_budget_mismatch
    assert "# model.dropout: not passed on; the architecture is nanochat's\n" in notes


def test_every_name_of_gpt_simple_is_translated_or_explained():
    names = {
        "model": "vocab_size n_embd n_layer n_head n_kv_head n_positions dropout use_bias qkv_bias attn_out_bias "
        "mlp_bias activation mlp_type intermediate_size norm norm_eps tie_word_embeddings rope_base "
        "rope_scaling_type rope_scaling_factor attention_mode",
        "data": "path tokenizer format max_length overlap_size packing num_workers curriculum allow_bucket_exhaustion "
        "allow_budget_mismatch",
        "optimizer": "learning_rate weight_decay beta1 beta2 eps max_grad_norm warmup_steps decay_steps min_lr_ratio",
        "training": "per_device_batch_size gradient_accumulation_steps max_steps gradient_checkpointing compile seed "
        "logging_steps eval_steps save_steps max_eval_batches output_dir resume keep_last_k "
        "keep_milestone_every max_runtime_seconds walltime_reserve_seconds mixed_precision wandb_project "
        "wandb_run_name",
    }
    assert {f"{section}.{name}" for section in names for name in names[section].split()} == {
        *gpt_simple.KNOWN
    }
    flags = add_flags(Parser())._option_string_actions
    assert [flag for flag in gpt_simple.FLAGS.values() if f"--{flag}" not in flags] == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("depth: 12", "no section model, data, optimizer, training in it"),
        (
            "model: {n_layers: 2}",
            "model.n_layers: gpt-simple 0.1.2 has no such name; did you mean model.n_layer",
        ),
        (
            "model: {n_layer: two}",
            "model.n_layer: got 'two', expected a whole number of at least 1",
        ),
        ("model: {n_embd: 50}", r"model.n_embd: got 50, expected a multiple of n_head \(12\)"),
        ("data: {format: csv}", "data.format: got 'csv', expected pretokenized or jsonl"),
        (
            "model: {}\ntraning: {}",
            "traning: expected a section with values, .* did you mean training",
        ),
        ("model: {}\ntraining: 3", "training: expected a section with values"),
        ("model: [", "not valid YAML"),
    ],
)
def test_a_file_that_is_not_gpt_simples_is_one_sentence(tmp_path, capsys, text, reason):
    with pytest.raises(ValueError, match=f"run.yaml: {reason}") as e:
        translated(tmp_path, capsys, text)
    assert "\n" not in str(e.value)


def test_the_error_about_sections_names_the_translation(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(GPT_SIMPLE)
    with pytest.raises(SystemExit, match="2"):
        help_.main(["train", f"--config={tmp_path / 'run.yaml'}"])
    assert (
        "python -m scripts.help --translate FILE prints the command line" in capsys.readouterr().err
    )
