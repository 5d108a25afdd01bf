"""What may change when a run goes on: every setting is in the table, and the table is what is enforced."""

from typing import Any

import pytest

from nanochat.settings import (
    SETTINGS,
    compare_settings,
    inherit_settings,
    refuse_changes,
    settings_table,
    unknown_settings,
)

RUN: dict[str, Any] = {  # a run's settings, resolved
    "run": "dummy", "model_tag": None, "resume": "auto", "force": False, "device_type": "cpu", "device_batch_size": 4,
    "depth": 4, "aspect_ratio": 64, "head_dim": 128, "max_seq_len": 512, "window_pattern": "SSSL", "dtype": "float32",
    "num_iterations": 30, "target_flops": -1.0, "target_param_data_ratio": 12.0, "total_batch_size": 32_768,
    "lanes": 64, "leaves": 1, "seed": 0, "packing": "bestfit", "long_docs": "split", "overlap": 64, "buffer_size": 128,
    "data_path": "/a", "val_path": None, "data_format": "parquet", "cpu_threads": 4, "world_size": 1,
    "tokenizer_fingerprint": "abc", "embedding_lr": 0.3, "unembedding_lr": 0.008, "matrix_lr": 0.02, "scalar_lr": 0.5,
    "weight_decay": 0.28, "warmup_steps": 40, "warmdown_ratio": 0.65, "final_lr_frac": 0.05, "eval_every": 250,
    "eval_tokens": 1000, "sample_every": 2000, "save_every": -1,
}
MAY_CHANGE = {
    "run", "model_tag", "resume", "force", "device_type", "device_batch_size", "num_iterations", "target_flops",
    "target_param_data_ratio", "data_path", "val_path", "cpu_threads", "world_size", "eval_every", "eval_tokens",
    "sample_every", "save_every",
}


def other(value: Any) -> Any:
    return value + 1 if isinstance(value, (int, float)) else "something else"


def test_every_setting_is_in_the_table() -> None:
    assert unknown_settings(RUN) == []
    assert unknown_settings(["depth", "zeal", "bravery"]) == ["bravery", "zeal"]


def test_equal_settings_have_no_changes() -> None:
    changes = compare_settings(RUN, dict(RUN))
    assert changes.allowed == changes.refused == ()
    refuse_changes(changes, run_name="d4")


@pytest.mark.parametrize("name", sorted(RUN.keys() - {"total_batch_size"}))
def test_each_setting_alone_is_allowed_or_refused_as_promised(name: str) -> None:
    changes = compare_settings(RUN, {**RUN, name: other(RUN[name])})
    decided, empty = (changes.allowed, changes.refused) if name in MAY_CHANGE else (changes.refused, changes.allowed)
    assert [c.name for c in decided] == [name] and empty == ()


def test_refusal_is_a_diff_that_names_the_way_out() -> None:
    changes = compare_settings(RUN, {**RUN, "depth": 6, "matrix_lr": 0.04, "save_every": 10})
    with pytest.raises(ValueError) as caught:
        refuse_changes(changes, run_name="d4")
    text = str(caught.value)
    assert "'d4'" in text and "--model-tag" in text and "--save-every" not in text
    assert "--depth: the run has 4, the command says 6" in text
    assert "--matrix-lr: the run has 0.02, the command says 0.04" in text


def test_batch_size_changes_while_the_lanes_divide_it() -> None:
    changes = compare_settings(RUN, {**RUN, "total_batch_size": 65_536})
    assert [c.name for c in changes.allowed] == ["total_batch_size"] and "digests" in changes.notices()[0]
    for wrong in (16_384, 32_768 + 512, 40_000):
        changes = compare_settings(RUN, {**RUN, "total_batch_size": wrong})
        assert [c.name for c in changes.refused] == ["total_batch_size"]
        with pytest.raises(ValueError, match="64 lanes with rows of 512 tokens need a multiple of 32,768"):
            refuse_changes(changes, run_name="d4")


def test_horizon_changes_with_a_notice_and_intervals_without() -> None:
    changes = compare_settings(RUN, {**RUN, "num_iterations": 60, "save_every": 10})
    assert len(changes.allowed) == 2
    assert [n.split(":")[0] for n in changes.notices()] == ["--num-iterations"]
    assert "the run has 30, the command says 60" in changes.notices()[0]


def test_automatic_values_keep_the_runs() -> None:
    command = {**RUN, "lanes": -1, "leaves": -1, "total_batch_size": -1, "dtype": "auto"}
    assert inherit_settings(RUN, command) == RUN
    changes = compare_settings(RUN, command)
    assert changes.allowed == changes.refused == ()
    assert inherit_settings(RUN, {**RUN, "num_iterations": -1})["num_iterations"] == -1, "-1 here means off"


def test_settings_that_one_side_does_not_know() -> None:
    old = {k: v for k, v in RUN.items() if k != "overlap"}
    assert [c.name for c in compare_settings(old, RUN).refused] == ["overlap"]
    assert compare_settings(old, RUN, defaults={"overlap": 64}).refused == ()
    assert [c.name for c in compare_settings(RUN, old).refused] == ["overlap"]
    changes = compare_settings(RUN, {**RUN, "zeal": 1})
    assert [(c.name, c.note) for c in changes.refused] == [("zeal", "not in the table of settings")]


def test_markdown_has_a_row_for_each_setting() -> None:
    lines = settings_table().splitlines()
    assert len(lines) == 2 + len(SETTINGS) and all(line.count("|") == 4 for line in lines)
    for name, rule in SETTINGS.items():
        row = next(line for line in lines if line.startswith(f"| `--{name.replace('_', '-')}` "))
        assert ("| yes |" in row) == rule.may_change and rule.note in row
