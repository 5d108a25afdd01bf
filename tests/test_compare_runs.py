"""Comparing runs: equal ones are equal to the bit; of others it is said where they part, in what, and by how much."""

import contextlib
import gzip
import io
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanochat import checkpoint as checkpoint_module
from nanochat import gaps
from nanochat.checkpoint import load_checkpoint, save_checkpoint
from nanochat.run_dir import TrainLog, cursor_files
from scripts import compare_runs
from tests import training

STEPS = 8
TWO_LAYERS = {"depth": 2, "aspect_ratio": 12}
WEIGHT = "transformer.h.0.attn.c_q.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """runs/: a; again, the same; halves, of half the batch size on the device; seed; deep."""
    with training.workplace(tmp_path_factory.mktemp("compare"), **{**training.SMALL, **TWO_LAYERS}) as path:
        run = partial(training.succeed, num_iterations=STEPS, eval_every=4)
        run(model_tag="a")
        run(model_tag="again")
        run(model_tag="halves", device_batch_size=2)
        run(model_tag="seed", seed=43)
        run(model_tag="deep", depth=3)
        yield path


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    """A run directory with the files of `again`, to be changed."""
    return shutil.copytree(base / "runs" / "again", tmp_path / "copy")


def compare(*argv: Any) -> tuple[int, str]:
    """(exit code, what is printed)."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = compare_runs.main([str(arg) for arg in argv])
    return code, out.getvalue()


def found(*argv: Any) -> dict[str, Any]:
    """The JSON, which must be strict, with the exit code that belongs to it."""
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    code, out = compare(*argv, "--json")
    value = json.loads(out, parse_constant=refuse)
    assert code == (0 if value["equal"] else 1)
    return value


def track(value: dict[str, Any], name: str) -> dict[str, Any]:
    return next(t for t in value["tracks"] if t["name"] == name)


def reseal(run_dir: Path, name: str, change: Callable[[dict[str, Any], Any], None], *, config: Any = None,
           cursors: Any = None, **trainer: Any) -> None:
    """Write a checkpoint of a run again, with `change(model, optimizer)` applied and other parts replaced."""
    c = load_checkpoint(run_dir / "checkpoints" / name)
    model, optimizer = c.model_state(), c.optimizer_state()
    change(model, optimizer)
    kept = {k: v for k, v in c.trainer_state.items() if k not in ("step", "architecture_hash")}
    save_checkpoint(run_dir, name, step=c.step, model_state=model, model_config=config or c.model_config,
                    optimizer_state=optimizer, scheduler_state=c.scheduler_state(), rng_state={0: c.rng_state(0)},
                    cursors=cursors or c.cursors, trainer_state={**kept, **trainer})


def nothing(model: dict[str, Any], optimizer: Any) -> None: ...


def log_of(run_dir: Path) -> Path:
    return run_dir / "logs" / "train.jsonl"


def rewrite_log(run_dir: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Apply `change` to every record; None drops it."""
    records = [change(json.loads(line)) for line in log_of(run_dir).read_text().splitlines()]
    log_of(run_dir).write_text("".join(json.dumps(record) + "\n" for record in records if record is not None))


# ---- whole runs -----------------------------------------------------------------------------------------------------

def test_the_same_run_twice_is_equal_and_it_is_said_in_how_much(base: Path) -> None:
    value = found("a", "again")
    tensors = len(load_checkpoint(base / "runs/a/checkpoints/final").model_state())
    compared = value["pairs"][0]["tensors"]
    assert compared > 2 * tensors > 40  # momenta too
    assert value["summary"] == f"equal bit for bit through step 8: 8 digests, 8 losses, 2 checkpoints of {compared} " \
                               f"tensors"
    assert [(p["step_a"], p["gaps"], p["lanes"], p["identity"]) for p in value["pairs"]] == [(4, [], [], []),
                                                                                             (8, [], [], [])]
    assert [(t["name"], t["common"], t["differ"]) for t in value["tracks"][:6]] == [
        ("digest", 8, 0), ("tokens", 8, 0), ("loss", 8, 0), ("lr", 8, 0), ("grad_norm", 8, 0), ("val", 3, 0)]
    assert value["cursors"] == {"4": [], "8": []}
    assert [s["name"] for s in value["settings"]] == ["model_tag"]
    text = compare(base / "runs" / "a", "again")[1]
    assert text.splitlines()[0] == value["summary"]
    assert "completed (ended)" in text and "steps 0 to 7 in the log; checkpoints: 4, 8" in text
    assert "cursors: equal after 2 saves" in text and "same position in the data" in text


def test_another_device_batch_size_is_the_same_data_with_noise(base: Path) -> None:
    value = found("a", "halves")
    assert not value["equal"] and value["summary"].startswith("same data; losses part at step ")
    assert f"weights part at checkpoint 4 in {value['pairs'][0]['gaps'][0]['name']}: " in value["summary"]
    assert track(value, "digest")["differ"] == 0 and not any(value["cursors"].values())
    a, b = training.losses("a"), training.losses("halves")
    first = next(i for i in range(STEPS) if a[i] != b[i])
    assert track(value, "loss")["first"] == {"step": first, "a": a[first], "b": b[first],
                                             "relative": abs(a[first] - b[first]) / max(a[first], b[first])}
    assert track(value, "loss")["largest"]["relative"] == max(abs(x - y) / max(x, y) for x, y in zip(a, b))
    assert {s["name"]: s["may_change"] for s in value["settings"]} == {"model_tag": True, "device_batch_size": True}


def test_noise_below_the_tolerance_is_equal_and_above_it_is_not(base: Path) -> None:
    value = found("a", "halves")
    sizes = [gap["relative"] for pair in value["pairs"] for gap in pair["gaps"]]
    sizes += [t["largest"]["relative"] for t in value["tracks"] if t["largest"]]
    most = max(sizes)
    assert 0 < most < 1 and min(sizes) < most
    at = found("a", "halves", "--tolerance", most)
    assert at["equal"] and at["summary"].startswith(f"equal within {most:g} through step 8: 8 digests")
    assert f"at most {most:.2g} apart" in at["summary"]
    below = found("a", "halves", "--tolerance", math.nextafter(most, 0))
    assert not below["equal"] and below["summary"].startswith("same data; ")
    text = compare("a", "halves", "--tolerance", most)[1]
    assert text.splitlines()[0] == at["summary"] and "within the tolerance" in text


def test_another_seed_parts_at_step_0_and_no_tolerance_helps(base: Path) -> None:
    for tolerance in (0, 0.999):
        value = found("a", "seed", "--tolerance", tolerance)
        digests = training.digests("a")[0], training.digests("seed")[0]
        assert value["summary"].startswith(f"data part at step 0 (digests {digests[0]} and {digests[1]}); ")
        assert not value["equal"] and track(value, "digest")["differ"] == STEPS
    assert found("a", "seed")["cursors"]["4"][0] == "lane 0: stream.seed: 42 and 43"
    assert "settings that differ, and may not within a run:\n  seed: 42 and 43 (" in compare("a", "seed")[1]


def test_another_architecture_is_said_and_the_rest_is_compared(base: Path) -> None:
    value = found("a", "deep")
    assert value["summary"].startswith("another architecture.n_layer: 2 and 3; ")
    assert "same data; losses part at step 0" in value["summary"]
    gaps = {gap["name"]: gap for gap in value["pairs"][0]["gaps"]}
    assert gaps["transformer.h.2.attn.c_q.weight"]["facts"] == {"only": "b"}
    assert gaps[WEIGHT]["facts"] == {"a": "float32 (24, 24)", "b": "float32 (36, 36)"}
    assert not any(pair["lanes"] for pair in value["pairs"])
    assert {s["name"]: s["may_change"] for s in value["settings"]} == {"model_tag": True, "depth": False}


def test_a_run_that_was_killed_and_went_on_is_equal(base: Path) -> None:
    settings = {"num_iterations": STEPS, "eval_every": 4, "model_tag": "killed"}
    training.start(hook=partial(training.die_after_step, 6), **settings).wait_for_death()
    mid = found("a", "killed")
    assert mid["equal"] and track(mid, "digest")["common"] == 7 and "running (dead)" in mid["about"]["b"]
    training.succeed(**settings)
    lines = [r["step"] for r in compare_runs.iter_log(log_of(base / "runs/killed")) if "event" not in r]
    assert len(lines) > len(set(lines)), "no step was done twice"
    assert found("a", "killed")["summary"] == found("a", "again")["summary"]


def pause_after_step(step: int) -> None:
    write = TrainLog.write

    def watched(self: TrainLog, **record: Any) -> None:
        write(self, **record)
        if record.get("step") == step and "event" not in record:
            time.sleep(training.PATIENCE_S)

    TrainLog.write = watched  # type: ignore[method-assign]


def test_a_run_at_work_is_compared_as_far_as_it_is(base: Path) -> None:
    group = training.start(hook=partial(pause_after_step, 5), num_iterations=STEPS, eval_every=4, model_tag="live")
    try:
        deadline = time.monotonic() + training.PATIENCE_S
        while 5 not in training.steps("live") and time.monotonic() < deadline:
            time.sleep(0.02)
        value = found("a", "live")
    finally:
        group.kill()
    assert "(alive)" in value["about"]["b"] and "steps 0 to 5" in value["about"]["b"]
    assert value["summary"].startswith("equal bit for bit through step 6: 6 digests, 6 losses, ")


# ---- what is broken or missing --------------------------------------------------------------------------------------

def test_torn_lines_are_passed_over_and_the_last_line_of_a_step_counts(base: Path, copy: Path) -> None:
    rewrite_log(copy, lambda r: None if "event" in r else r)
    whole = log_of(copy).read_text()
    wrong = json.dumps({"step": 3, "digest": "0" * 16, "loss": 9.0}) + "\n"
    log_of(copy).write_text(wrong + whole[:-40])
    value = found("a", copy)
    assert value["equal"] and track(value, "digest")["common"] == track(value, "loss")["common"] == STEPS - 1
    assert "through step 8: 7 digests, 7 losses" in value["summary"]  # a checkpoint of step 8 is there
    log_of(copy).write_text(whole[:-40] + "\n" + wrong)
    assert found("a", copy)["summary"].startswith("data part at step 3 (digests ")


@pytest.mark.parametrize("name, change, said", [
    ("loss", 6.0, "same data; losses part at step 5 by "),
    ("loss", None, "same data; losses part at step 5 (5.7"),
    ("lr", 0.5, "same data; learning rates part at step 5 by 0.19 relative"),
    ("grad_norm", 0.0, "same data; gradient norms part at step 5 by 1 relative"),
    ("tokens", 3071, "data part at step 5 (counts of tokens 3072 and 3071)"),
])
def test_each_series_is_compared(base: Path, copy: Path, name: str, change: Any, said: str) -> None:
    rewrite_log(copy, lambda r: {**r, name: change} if r.get("step") == 5 and "event" not in r else r)
    value = found("a", copy)
    assert value["summary"].startswith(said) and "; weights equal: 2 checkpoints of " in value["summary"]
    assert [t["name"] for t in value["tracks"] if t["differ"]] == [name]
    assert found("a", copy, "--tolerance", 0.9)["equal"] == (name in ("loss", "lr") and change is not None)


def test_validation_results_are_compared(base: Path, copy: Path) -> None:
    rewrite_log(copy, lambda r: {**r, "bpb": r["bpb"] * 1.5} if r.get("event") == "val" and r["step"] == 4 else r)
    assert "same data; validation results part at step 4 by 0.33 relative" in found("a", copy)["summary"]


def test_what_only_one_run_has_is_told_and_is_no_difference(base: Path, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "checkpoint-4")
    value = found("a", copy)
    assert value["equal"] and [pair["step_a"] for pair in value["pairs"]] == [8]
    assert "checkpoints: 4, 8;" in value["about"]["a"] and "checkpoints: 8;" in value["about"]["b"]
    shutil.rmtree(copy / "checkpoints")
    shutil.rmtree(copy / "logs" / "cursors")
    assert found("a", copy)["summary"] == "equal bit for bit through step 8: 8 digests, 8 losses, 0 checkpoints"


def test_checkpoints_of_one_step_are_common_whatever_their_names(base: Path, copy: Path) -> None:
    (copy / "checkpoints" / "final").rename(copy / "checkpoints" / "checkpoint-8-shutdown")
    pair = found("a", copy)["pairs"][1]
    assert pair["names"] == ["final", "checkpoint-8-shutdown"] and pair["tensors"] > 40


def test_a_damaged_checkpoint_is_passed_over_aloud(base: Path, copy: Path) -> None:
    file = copy / "checkpoints" / "final" / "model" / "pytorch_model.bin"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    value = found("a", copy)
    assert value["equal"] and [pair["step_a"] for pair in value["pairs"]] == [4]
    assert value["summary"].endswith("; 1 damaged file passed over")
    assert any(str(file) in note and "rotten" in note for note in value["notes"])
    (copy / "checkpoints" / "checkpoint-4" / "trainer_state.json").write_text("{")
    value = found("a", copy)
    assert value["pairs"] == [] and value["summary"].endswith("; 2 damaged files passed over")
    with pytest.raises(ValueError, match="rotten"):
        compare("a", f"{copy}@8")


def test_positions_in_the_data_are_compared_where_checkpoints_are_gone(base: Path, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    file = cursor_files(copy)[4]
    state = json.loads(gzip.decompress(file.read_bytes()))
    state["cursors"][2]["row"] += 1
    file.write_bytes(gzip.compress(json.dumps(state).encode()))
    value = found("a", copy)
    assert value["summary"].startswith("positions in the data part at step 4 (lane 2: row: 8 and 9)")
    assert len(value["cursors"]["4"]) == 1 and not value["equal"]
    file.write_bytes(b"torn")
    assert found("a", copy)["summary"].endswith("1 damaged file passed over")


def test_other_numbers_of_lanes_are_told(base: Path, copy: Path) -> None:
    cursors = load_checkpoint(copy / "checkpoints" / "final").cursors
    reseal(copy, "final", nothing, cursors=cursors[:2])
    assert "(4 lanes and 2 lanes)" in found("a", f"{copy}@8")["summary"]


def test_another_tokenizer_is_said(base: Path, copy: Path) -> None:
    reseal(copy, "final", nothing, tokenizer_fingerprint="f" * 32)
    assert found("a", copy)["summary"].startswith("another tokenizer: ")
    shutil.rmtree(copy / "checkpoints")
    assert found("a", copy)["equal"]
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "tokenizer_fingerprint": "f" * 32}))
    rewrite_log(copy, lambda r: {**r, "digest": "0"} if "digest" in r else r)
    assert found("a", copy)["summary"].startswith("another tokenizer_fingerprint: ")


def test_without_a_configuration_all_but_settings_is_compared(base: Path, copy: Path) -> None:
    (copy / "config.json").unlink()
    value = found("a", copy)
    assert value["equal"] and value["settings"] == [] and "settings are not compared" in value["notes"][0]


# ---- one checkpoint -------------------------------------------------------------------------------------------------

def test_one_flipped_bit_in_one_tensor_is_found_and_located(base: Path, copy: Path) -> None:
    def flip(model: dict[str, Any], optimizer: Any) -> None:
        model[WEIGHT].view(torch.int32)[3, 5] ^= 1

    reseal(copy, "final", flip)
    value = found("a", copy)
    a, b = (load_checkpoint(run / "checkpoints" / "final").model_state()[WEIGHT].double()
            for run in (base / "runs/a", copy))
    apart, largest = abs(a[3, 5] - b[3, 5]).item(), max(a.abs().max(), b.abs().max()).item()
    assert apart > 0
    [gap] = value["pairs"][1]["gaps"]
    assert value["pairs"][0]["gaps"] == [] and gap["name"] == WEIGHT and gap["relative"] == apart / largest
    assert gap["facts"] == {
        "tensor": "float32 (24, 24)", "count": 1, "elements": 576, "first": [3, 5], "not_finite": 0, "max_abs": apart,
        "max_relative": apart / max(abs(a[3, 5]), abs(b[3, 5])).item(), "max_ulps": 1}
    assert value["summary"].startswith(f"same data; weights part at checkpoint 8 in {WEIGHT}: 1 of 576 elements, the "
                                       f"first at [3, 5]; at most ")
    assert value["summary"].endswith(", 1 units in the last place")
    assert found("a", copy, "--tolerance", 1e-6)["equal"] and not found("a", copy, "--tolerance", 1e-12)["equal"]


def test_optimizer_and_its_counts_are_compared_too(base: Path, copy: Path) -> None:
    def change(model: dict[str, Any], optimizer: Any) -> None:
        optimizer["state"][WEIGHT]["momentum_buffer"][0, 1] = math.inf
        optimizer["step"] += 1

    reseal(copy, "checkpoint-4", change)
    value = found("a", copy, "--tolerance", 0.9)
    gaps = {gap["name"]: gap for gap in value["pairs"][0]["gaps"]}
    assert gaps.keys() == {"optimizer.step", f"optimizer.state.{WEIGHT}.momentum_buffer"}
    odd = gaps[f"optimizer.state.{WEIGHT}.momentum_buffer"]
    assert odd["relative"] is None and odd["facts"]["not_finite"] == 1 and odd["facts"]["first"] == [0, 1]
    assert gaps["optimizer.step"]["facts"] == {"a": 4, "b": 5}
    assert "same data; optimizer states part at checkpoint 4 in optimizer.step: 4 and 5" in value["summary"]


def test_zeros_of_another_sign_differ_in_bits(base: Path, copy: Path) -> None:
    other = shutil.copytree(copy, copy.with_name("other"))
    for run, zero in ((copy, 0.0), (other, -0.0)):
        reseal(run, "final", lambda model, optimizer, zero=zero: model[WEIGHT][0].fill_(zero))
    value = found(copy, other)
    [gap] = value["pairs"][1]["gaps"]
    assert not value["equal"] and gap["facts"]["count"] == 24 and gap["facts"]["max_ulps"] == 0
    assert found(copy, other, "--tolerance", 1e-30)["equal"]


def test_checkpoints_alone_are_compared_by_step_name_and_path(base: Path, tmp_path: Path) -> None:
    same = found("a@4", "again@4")
    assert same["summary"] == f"equal bit for bit at step 4: 1 checkpoint of {same['pairs'][0]['tensors']} tensors"
    assert same["tracks"] == [] and [s["name"] for s in same["settings"]] == ["model_tag"]
    assert found("a@8", "again")["pairs"] == found("a@final", base / "runs/again/checkpoints/final")["pairs"]
    assert found("a", "again@4")["pairs"] == same["pairs"]
    assert found("a@4", "a@8")["summary"].startswith("positions in the data part at step 4 and 8 (lane 0: row: ")
    alone = shutil.copytree(base / "runs/a/checkpoints/checkpoint-4", tmp_path / "alone")
    value = found("a@4", alone)
    assert value["equal"] and "settings are not compared" in value["notes"][0]


def test_tensors_are_mapped_by_the_loader_of_the_project(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    load = torch.load

    def watched(file: Path, **kwargs: Any) -> Any:
        seen.append((Path(file).name, kwargs["mmap"], kwargs["weights_only"]))
        return load(file, **kwargs)

    monkeypatch.setattr(checkpoint_module.torch, "load", watched)
    compare("a@4", "again@4")
    assert seen.count(("pytorch_model.bin", True, True)) == seen.count(("optimizer.bin", True, True)) == 2
    assert len(seen) == 6


# ---- bad input ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("argv, said", [
    (["a", "nosuch"], "no run 'nosuch'"),
    (["a", "nosuch@4"], "no run 'nosuch'"),
    (["a@5", "again@5"], "no checkpoint '5'.*there are: final, checkpoint-4"),
    (["a@4", "again", "--tolerance", "-1"], "--tolerance: got -1.0"),
    (["a", "again", "--tolerance", "nan"], "--tolerance: got nan"),
])
def test_bad_input_is_one_sentence(base: Path, argv: list[str], said: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=said) as error:
        compare(*argv)
    assert "\n" not in str(error.value)


def test_runs_with_nothing_in_common_are_refused(base: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    started.mkdir()
    shutil.copy(base / "runs/a/config.json", started)
    with pytest.raises(ValueError, match=r"nothing to compare.*no step in the log; checkpoints: none"):
        compare("a", started)


# ---- numbers --------------------------------------------------------------------------------------------------------

FLOATS = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}
NUMBERS = st.floats(width=16) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, 1.001, -2.5])


def brute_force(a: np.ndarray, b: np.ndarray) -> dict[str, Any] | None:
    """The same by a loop over numbers."""
    where = [i for i in range(a.size) if a.flat[i].tobytes() != b.flat[i].tobytes()]
    if not where:
        return None
    pairs = [(float(a.flat[i]), float(b.flat[i])) for i in where]
    finite = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    return {"count": len(where), "elements": a.size, "first": [int(i) for i in np.unravel_index(where[0], a.shape)],
            "not_finite": len(pairs) - len(finite), "max_abs": max((abs(x - y) for x, y in finite), default=0.0),
            "max_relative": max((abs(x - y) / max(abs(x), abs(y)) for x, y in finite if x != y), default=0.0)}


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # of floats, those that have 16 bits
@given(st.data(), st.sampled_from(sorted(FLOATS, key=str)), st.integers(1, 3))
def test_tensors_are_compared_as_by_a_loop(data: st.DataObject, dtype: torch.dtype, block: int) -> None:
    values = data.draw(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=6, max_size=6))
    a = np.array([x for x, _, _ in values], FLOATS[dtype]).reshape(2, 3)
    b = np.array([x if same else y for x, y, same in values], FLOATS[dtype]).reshape(2, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaps, "BLOCK_ELEMENTS", block)
        gap = gaps.compare_tensors("w", torch.from_numpy(a), torch.from_numpy(b))
    expected = brute_force(a, b)
    assert (gap is None) == (expected is None)
    if gap is not None and expected is not None:
        assert {k: gap.facts[k] for k in expected} == expected
        sizes = [abs(float(x)) for x in [*a.flat, *b.flat] if math.isfinite(x)]
        share = expected["max_abs"] / max(sizes) if max(sizes, default=0) else 0.0
        assert gap.relative == (math.inf if expected["not_finite"] else share)


@given(st.floats(-1, 1, width=32) | st.sampled_from([0.0, -1e-45, 1.0]), st.integers(0, 300))
def test_units_in_the_last_place_count_the_floats_between(start: float, steps: int) -> None:
    x = y = np.float32(start)
    for _ in range(steps):
        y = np.nextafter(y, np.float32(2))
    bits = [torch.from_numpy(np.array([v])).view(torch.int32) for v in (x, y)]
    assert gaps.ulps(*bits).item() == gaps.ulps(*bits[::-1]).item() == steps


def test_units_of_other_types() -> None:
    one, more = torch.tensor([1.0]), torch.tensor([1.0 + 2 ** -7])
    bits = [t.bfloat16().view(torch.int16) for t in (one, more)]
    assert gaps.ulps(*bits).item() == 1
    ends = [torch.tensor([v], dtype=torch.float64).view(torch.int64) for v in (-1.7e308, 1.7e308)]
    assert gaps.ulps(*ends).item() == torch.iinfo(torch.int64).max


def test_tensors_of_other_types_shapes_and_kinds() -> None:
    gap = gaps.compare_values("w", torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert gap is not None and str(gap) == "w: 'float32 (2,)' and 'bfloat16 (2,)'" and gap.relative == math.inf
    flags = gaps.compare_values("w", torch.tensor([True, False]), torch.tensor([True, True]))
    assert flags is not None and flags.facts["first"] == [1] and flags.relative == math.inf
    scalar = gaps.compare_values("w", torch.tensor(1.0), torch.tensor(2.0))
    assert scalar is not None and scalar.facts["first"] == [] and scalar.relative == 0.5
    assert gaps.compare_values("w", torch.empty(0, 3), torch.empty(0, 3)) is None
    assert gaps.compare_values("w", math.nan, math.nan) is None
    assert gaps.compare_values("w", 1, True) is not None
