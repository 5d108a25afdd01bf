"""The plan is what happens: the same last step, the same accounts, for any layout, mix and number of ranks."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from nanochat.shard_source import ShardSource

from nanochat import plan as plan_module
from nanochat.curriculum import Curriculum, Phase
from nanochat.dataloader import DataLoader, Dry
from nanochat.dataset import find_files
from nanochat.order import Order, StreamConfig
from nanochat.plan import ENDLESS, Plan, make_plan, plan_key
from nanochat.rehearsal import Rehearsal, SampledLengths, Task, Totals, open_rehearsals, share_totals, unit_totals
from nanochat.shards import ShardWriter
from nanochat.sources import ParquetSource, scan
from nanochat.stream import Stream, ledger
from tests.toy import ByteTokenizer, examples, some_texts, write_parquet

EOD = 256
LAYOUTS: list[dict[str, Any]] = [
    {}, {"long_docs": "split", "overlap": 3}, {"layout": "concat"}, {"layout": "binned"},
    {"layout": "binned", "pack": False}]


def shards(folder: Path, lengths: list[list[int]], windows: bool = False) -> Path:
    """A folder of shards, one for each list of document lengths; with `windows`, of 12 ids that share 3."""
    folder.mkdir(parents=True)
    for i, documents in enumerate(lengths):
        ids, sizes, prefixes = [], [], []
        for n in documents:
            for start in range(0, max(1, n - 3), 9) if windows else [0]:
                end = min(n, start + 12) if windows else n
                last = [EOD] if end == n else []
                ids += [*range(start, end), *last]
                sizes.append(end - start + len(last))
                prefixes.append(3 if start else 0)
        with ShardWriter(folder / f"s{i}", vocab_size=1000) as writer:
            writer.add(np.array(ids), np.array(sizes), np.array(prefixes))
    return folder


def source(folder: Path, **kwargs: Any) -> ShardSource:
    return ShardSource(scan(folder, find_files(folder, "shards")), ByteTokenizer(), **kwargs)


def run(config: StreamConfig, sources: dict[str, Any], *, R: int, steps: int, W: int, drop_dry: bool,
        cursors: Any = None, start: int = 0) -> tuple[int, str, dict[str, Any], list[Any]]:
    """(steps done, why no more, accounts, cursors) of a real run of the loader."""
    loaders = [DataLoader(config, sources, tokenizer=ByteTokenizer(), rows_per_step=R, device_batch_size=2, rank=r,
                          world_size=W, drop_dry=drop_dry, cursors=cursors, start_step=start, num_threads=1,
                          new_curriculum=True) for r in range(W)]
    done, why = start, ""
    while done < steps and not why:
        for loader in loaders:
            try:
                for _ in range(loader.micro_batches_per_step):
                    next(loader)
            except Dry as e:
                why = str(e)
        done += not why
    found = [cursor for loader in loaders for cursor in loader.cursors(done)]
    for loader in loaders:
        loader.close()
    return done, why, ledger(found, config.T), found


def both(config: StreamConfig, sources: dict[str, Any], *, R: int, steps: int, W: int, drop_dry: bool = False,
         cursors: Any = None, start: int = 0) -> Plan:
    """The plan, after comparing it with what happens."""
    plan = make_plan(config, sources, rows_per_step=R, num_steps=steps, tokenizer="bytes", drop_dry=drop_dry,
                     cursors=copy.deepcopy(cursors), start_step=start)
    done, why, accounts, _ = run(config, sources, R=R, steps=steps, W=W, drop_dry=drop_dry, cursors=cursors,
                                 start=start)
    assert (plan.steps, bool(plan.halt)) == (done, bool(why))
    assert plan.exact_accounts and not plan.estimate
    for bucket, planned in plan.buckets.items():
        assert planned.account == accounts[bucket], bucket
    return plan


def curriculum(T: int, V: int, rows: list[int], mixes: list[dict[str, float]], **kwargs: Any) -> Curriculum:
    return Curriculum(tuple(Phase(n * T * V, tuple(mix.items())) for n, mix in zip(rows, mixes)), **kwargs)


# ---- the plan is what happens ---------------------------------------------------------------------------------------

documents = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=30), min_size=1, max_size=3)


@settings(max_examples=examples(0.5))
@given(st.data())
def test_the_plan_is_what_happens(tmp_path_factory, data):
    kwargs = data.draw(st.sampled_from(LAYOUTS))
    T, V, n = data.draw(st.sampled_from([13, 16])), data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 3))
    root = tmp_path_factory.mktemp("plan")
    windows = data.draw(st.booleans()) or kwargs.get("layout") == "binned"
    sources = {name: source(shards(root / name, data.draw(documents), windows), keep_eod="layout" in kwargs
                            and kwargs["layout"] == "binned") for name in "abc"}
    mixes = data.draw(st.lists(st.fixed_dictionaries({"a": st.integers(1, 4), "b": st.integers(0, 4),
                                                      "c": st.integers(0, 2)}), min_size=1, max_size=3))
    mix = curriculum(T, V, data.draw(st.lists(st.integers(1, 40), min_size=3, max_size=3)), mixes,
                     max_epochs={"a": data.draw(st.integers(0, 3))})
    config = StreamConfig(T=T, V=V, buffer_size=data.draw(st.sampled_from([1, 4, 32])), unit_size=8, curriculum=mix,
                          **kwargs)
    plan = both(config, sources, R=n * V, steps=data.draw(st.integers(1, 30)), W=data.draw(st.sampled_from([1, V])),
                drop_dry=data.draw(st.booleans()))
    event(f"halted: {bool(plan.halt)}, dropped: {plan.allowed and bool(plan.short)}")
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("kwargs", LAYOUTS, ids=str)
@pytest.mark.parametrize("W", [1, 2])
def test_training_until_a_bucket_is_dry_finds_the_step_and_the_accounts_of_the_plan(tmp_path, kwargs, W):
    rng = np.random.default_rng(5)
    stored = kwargs.get("layout") == "binned"
    sources = {name: source(shards(tmp_path / name, [rng.integers(3, 12 if stored else 60, n).tolist()] * 2),
                            keep_eod=stored) for name, n in (("big", 900), ("small", 40))}
    config = StreamConfig(T=16, V=4, buffer_size=8, **kwargs, curriculum=curriculum(
        16, 4, [40, 400], [{"big": 1}, {"big": 2, "small": 1}]))
    halted = both(config, sources, R=8, steps=220, W=W)
    assert 20 < halted.steps < 220 and halted.buckets["small"].dry_step == halted.steps
    assert halted.short == ["small"] and "small" in halted.halt
    dropped = both(config, sources, R=8, steps=220, W=W, drop_dry=True)
    assert dropped.buckets["small"].dry_step == halted.steps and dropped.buckets["small"].dry_lanes == 4
    assert (dropped.steps == 220) == (not dropped.halt)
    assert 0.8 < dropped.buckets["small"].usable / dropped.buckets["small"].trained <= 1


def test_a_run_that_has_begun_is_planned_from_its_cursors(tmp_path):
    rng = np.random.default_rng(6)
    sources = {name: source(shards(tmp_path / name, [rng.integers(3, 60, n).tolist()]))
               for name, n in (("a", 300), ("b", 90), ("c", 200))}
    two = {b: sources[b] for b in "ab"}
    old = StreamConfig(T=16, V=4, buffer_size=8, long_docs="split", overlap=0,
                       curriculum=curriculum(16, 4, [99], [{"a": 1, "b": 1}]))
    new = dataclasses.replace(old, curriculum=curriculum(16, 4, [400], [{"a": 1, "b": 1, "c": 2}],
                                                         max_epochs={"b": 2}))
    whole = both(old, two, R=8, steps=60, W=1)
    assert 9 < whole.steps < 60
    for begun in (9, whole.steps - 3):
        *_, cursors = run(old, two, R=8, steps=begun, W=2, drop_dry=False)
        rest = both(old, two, R=8, steps=60, W=1, cursors=cursors, start=begun)
        assert rest.halt == whole.halt
        assert [b.account for b in rest.buckets.values()] == [b.account for b in whole.buckets.values()]
    dropped, *_, cursors = run(old, two, R=8, steps=whole.steps + 2, W=2, drop_dry=True)
    assert any(cursor["dropped"] for cursor in cursors), "what such a lane has read is in no plan from scratch"
    changed = both(new, sources, R=8, steps=dropped + 9, W=2, cursors=cursors, start=dropped, drop_dry=True)
    assert changed.buckets["c"].account["rows"] > 0 and changed.buckets["b"].account["epochs"] == 1


def test_without_limits_nothing_is_dry_and_passes_are_counted(tmp_path):
    sources = {"data": source(shards(tmp_path / "s", [[9, 20, 31, 7, 12, 14]]))}
    plan = both(StreamConfig(T=16, V=2, long_docs="split", overlap=2), sources, R=4, steps=25, W=2)
    bucket = plan.buckets["data"]
    assert plan.halt == "" and plan.steps == 25 and bucket.usable is None and bucket.max_epochs == 0
    assert bucket.tokens == 93 and bucket.documents == 6 and bucket.passes == bucket.account["read"] / 93 > 10
    assert plan.phases == [{"first_step": 0, "tokens": 25 * 4 * 16, "asked": {"data": 25 * 4 * 16}}]


# ---- totals first ---------------------------------------------------------------------------------------------------

@settings(max_examples=examples(0.8))
@given(st.data())
def test_no_feed_gives_fewer_rows_than_its_totals_promise(tmp_path_factory, data):
    kwargs = data.draw(st.sampled_from(LAYOUTS))
    stored = kwargs.get("layout") == "binned"
    config = StreamConfig(T=data.draw(st.sampled_from([13, 16])), V=2, unit_size=4, max_epochs=2, **kwargs,
                          buffer_size=data.draw(st.sampled_from([1, 16])))
    folder = shards(tmp_path_factory.mktemp("bounds") / "s", data.draw(documents), windows=stored)
    lengths = source(folder, keep_eod=stored)
    order = Order(lengths.groups, bucket="data", config=config)
    totals = unit_totals(lengths, order, config.T)
    for lane in range(2):
        spans = [share_totals(totals, order, epoch, [order.share(lane, epoch)]) for epoch in range(2)]
        promised = int((spans[0] + spans[1]).rows(config)[0])
        feed = Rehearsal(config, bucket="data", lane=lane, source=lengths, order=order)
        feed.pack(ENDLESS)
        assert promised <= feed.packer.row
        assert promised == feed.packer.row or not Totals.exact(config)
        assert feed.num_documents == sum(int(s.entries[0]) for s in spans)


def test_where_nothing_comes_near_its_end_nothing_is_packed(tmp_path, monkeypatch):
    sources = {"data": source(shards(tmp_path / "s", [[20] * 400]))}
    config = StreamConfig(T=16, V=2, max_epochs=1)
    asked: list[Any] = []
    real = plan_module.run_tasks
    monkeypatch.setattr(plan_module, "run_tasks", lambda work, arguments, tasks, **more: asked.extend(tasks) or real(
        work, arguments, tasks, **more))
    plan = make_plan(config, sources, rows_per_step=4, num_steps=20, tokenizer="bytes")
    assert all(task.rows == 40 for task in asked) and len(asked) == 2, "for accounts, and as far as the run goes"
    assert plan.steps == 20 and plan.buckets["data"].usable >= 20 * 4 * 16 and not plan.buckets["data"].usable_exact


def test_above_the_budget_accounts_are_those_of_some_lanes(tmp_path):
    rng = np.random.default_rng(8)
    sources = {"data": source(shards(tmp_path / "s", [rng.integers(3, 60, 4000).tolist()]))}
    config = StreamConfig(T=16, V=8, max_epochs=1, buffer_size=8)
    whole, part = (make_plan(config, sources, rows_per_step=8, num_steps=200, tokenizer="bytes", budget=budget)
                   for budget in (None, 200 * 8 * 16 // 3))
    assert whole.exact_accounts and not part.exact_accounts
    a, b = whole.buckets["data"].account, part.buckets["data"].account
    assert b["rows"] == a["rows"] and a != b and abs(b["cropped"] / a["cropped"] - 1) < 0.3


def test_fewer_lanes_use_more(tmp_path):
    rng = np.random.default_rng(9)
    sources = {"data": source(shards(tmp_path / "s", [rng.integers(3, 200, 800).tolist()]))}

    def usable(V: int) -> Any:
        config = StreamConfig(T=16, V=V, long_docs="split", overlap=0, max_epochs=1)
        return make_plan(config, sources, rows_per_step=32, num_steps=10_000, tokenizer="bytes", other_lanes=[4]
                         ).buckets["data"]

    many, few = usable(32), usable(4)
    assert many.usable < few.usable <= few.tokens + few.account["repeated"] + few.account["bos"]
    assert abs(many.other_lanes["4"] / few.usable - 1) < 0.05


# ---- processes, text ------------------------------------------------------------------------------------------------

def test_processes_find_what_one_finds(tmp_path, monkeypatch):
    rng = np.random.default_rng(10)
    sources = {"data": source(shards(tmp_path / "s", [rng.integers(3, 60, 300).tolist()]))}
    config = StreamConfig(T=16, V=4, max_epochs=1)
    monkeypatch.setattr(plan_module, "PARALLEL", 0)
    one, two = (make_plan(config, sources, rows_per_step=4, num_steps=400, tokenizer="bytes", num_workers=workers)
                for workers in (1, 2))
    assert one == two and one.halt


def test_text_is_estimated_from_a_sample(tmp_path):
    texts = some_texts(400, seed=3)
    text = ParquetSource(scan(write_parquet(tmp_path / "t.parquet", texts).parent), ByteTokenizer())
    config = StreamConfig(T=16, V=4, max_epochs=1, buffer_size=8)
    sampled = SampledLengths(text)
    assert sampled.lengths(0, 0, 8).tolist() == SampledLengths(text).lengths(0, 0, 8).tolist()
    plan = make_plan(config, {"data": sampled}, rows_per_step=8, num_steps=2000, tokenizer="bytes")
    done, why, _, _ = run(config, {"data": text}, R=8, steps=2000, W=1, drop_dry=False)
    assert plan.estimate and plan.halt and why and abs(plan.steps / done - 1) < 0.25


def test_the_key_tells_plans_apart(tmp_path):
    sources = {"data": source(shards(tmp_path / "s", [[20] * 40]))}
    config = StreamConfig(T=16, V=2, max_epochs=1)
    given: dict[str, Any] = {"rows_per_step": 4, "num_steps": 20, "tokenizer": "bytes", "drop_dry": False}
    key = plan_key(config, sources, **given)
    assert key == make_plan(config, sources, **given).key
    for other in ({"rows_per_step": 8}, {"num_steps": 21}, {"tokenizer": "t"}, {"drop_dry": True}):
        assert plan_key(config, sources, **{**given, **other}) != key
    assert plan_key(dataclasses.replace(config, T=17), sources, **given) != key


def test_a_broken_index_is_named(tmp_path):
    stored = source(shards(tmp_path / "s", [[20] * 4]), keep_eod=True)
    config = StreamConfig(T=12, V=1, layout="binned", max_epochs=1)
    work = open_rehearsals(config, {"data": (stored.manifest, ByteTokenizer(), True)})
    with pytest.raises(ValueError, match=r"s0\.bin: group 0: an entry has 21 tokens"):
        list(work(Task("data", 0, 5)))
    with pytest.raises(ValueError, match="another stream"):
        stream = Stream(config, {"data": stored}, [0], tokenizer="other")
        cursors = stream.cursors()
        stream.close()
        make_plan(config, {"data": stored}, rows_per_step=1, num_steps=1, tokenizer="bytes", cursors=cursors)
