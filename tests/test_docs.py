"""The documents are true: the file map lists what there is, the table of settings is the code's, names exist."""

import importlib
import re
from pathlib import Path

import pytest

from nanochat.config import settings_table
from scripts.base_train import parse_args

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_file_map_lists_every_module_and_no_other():
    listed = set(re.findall(r"^\| `([^`]+\.py)` \| \S", (ROOT / "dev/ARCHITECTURE.md").read_text(), re.MULTILINE))
    there = {f"{folder}/{path.name}" for folder in ("nanochat", "scripts") for path in (ROOT / folder).glob("*.py")
             if path.name != "__init__.py"}
    assert len(there) > 40 and listed == there


def test_the_table_of_settings_in_the_readme_is_the_one_in_the_code():
    assert settings_table() in README


def test_flags_that_the_readme_names_exist():
    flags = {f"--{name.replace('_', '-')}" for name in vars(parse_args([]))}
    named = set(re.findall(r"`(--[a-z-]+)`", README.split("New flags of `base_train`:")[1]))
    assert len(named) > 10
    assert named - {"--help"} <= flags


@pytest.mark.parametrize("module, names", [
    ("gpt", "GPT GPTConfig"), ("optim", "MuonAdamW"), ("engine", "Engine KVCache"), ("loss_eval", "evaluate_bpb"),
    ("tokenizer", "RustBPETokenizer get_tokenizer get_token_bytes"),
    ("dataset", "list_parquet_files parquets_iter_batched download_single_file"),
    ("common", "get_base_dir print0 compute_init compute_cleanup autodetect_device_type get_dist_info DummyWandb"),
    ("dataloader", "tokenizing_distributed_data_loader_with_state_bos_bestfit "
                   "tokenizing_distributed_data_loader_bos_bestfit tokenizing_distributed_data_loader_with_state "
                   "tokenizing_distributed_data_loader"),
])
def test_names_that_forks_import_are_where_nanochat_has_them(module, names):
    found = importlib.import_module(f"nanochat.{module}")
    assert [n for n in names.split() if not hasattr(found, n)] == []
