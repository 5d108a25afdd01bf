"""Figures, resumes, estimates and warnings of plans, compared with real streams."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

from nanochat import plan as plan_module
from nanochat.common import Stop, stops_if
from nanochat.order import StreamConfig
from nanochat.plan import BucketPlan, Plan, Sample, make_plan
from nanochat.plan_report import plan_lines, problem, refusal, warnings
from nanochat.sources import open_source, scan
from nanochat.stream import Stream
from tests.spec.test_plan import both, curriculum, run, source
from tests.token_files import Tokenizer
from tests.toy import some_texts, write_parquet


@pytest.mark.parametrize(
    ("kwargs", "windows"),
    [
        ({"layout": "binned"}, True),
        ({"layout": "binned", "pack": False}, True),
        ({}, False),
        ({"long_docs": "split", "overlap": 3}, False),
    ],
)
@pytest.mark.parametrize(("epochs", "steps"), [(1, 10**4), (0, 600)])
def test_the_figures_of_the_plan_match_counted_rows(tmp_path, kwargs, windows, epochs, steps):
    """Documents, passes and repeated tokens in the rows of a real stream, some of whose documents
    are pending. If the bucket is not rehearsed, the figures come from a sample of a lane."""
    rng = np.random.default_rng(7)
    stored = kwargs.get("layout") == "binned"
    data = source(
        tmp_path / "a", [rng.integers(3, 60, 500).tolist()] * 3, windows=windows, as_stored=stored
    )
    mix = curriculum(16, 4, [10**6], [{"a": 1}], max_epochs={"a": epochs})
    config = StreamConfig(T=16, V=4, buffer_size=64, curriculum=mix, **kwargs)
    plan = make_plan(config, {"a": data}, rows_per_step=8, num_steps=steps)
    bucket = plan.buckets["a"]
    lengths = {
        (group, number): (length - (not stored), prefix)
        for group, n in enumerate(data.groups.tolist())
        for number, (length, prefix) in enumerate(zip(*data.lengths(group, np.arange(n))))
    }
    assert bucket.documents == 1500
    assert bucket.tokens == sum(length - prefix for length, prefix in lengths.values())
    stream = Stream(config, {"a": data}, range(4), tokenizer="bytes", num_threads=1)
    placed = [
        place for _ in range(plan.steps) for row in stream.next_rows(2) for place in row.placed
    ]
    stream.close()
    begun = {key: lengths[key[1:]] for key, *_ in placed}  # the documents in rows, at least in part
    new = sum(length - prefix for length, prefix in begun.values())
    if kwargs.get("long_docs") == "split":  # the rest of a cut document is still pending
        new = sum(
            length - (start > 0) * (1 + context) - (start == 0)
            for _, start, length, context in placed
        )
        repeated = sum(context for *_, context in placed)
        arrived = sum(length for _, _, length, _ in placed)
    else:
        repeated = sum(prefix for _, prefix in begun.values())
        arrived = sum(length + (not stored) for length, _ in begun.values())
    slack = 0.02 if bucket.exact and steps > 80 else 0.25
    assert bucket.passes == pytest.approx(new / bucket.tokens, rel=slack)
    assert bucket.repeated == pytest.approx(repeated / arrived, abs=slack / 4)
    assert epochs == 0 or bucket.passes <= 1


@pytest.mark.parametrize("parent_steps", [0, 10])
def test_the_figures_of_books_are_those_of_the_rows_although_most_tokens_are_pending(
    tmp_path, parent_steps
):
    """Regression: `repeated %` counted pending tokens, and so told 1 % where a quarter of each row
    was overlap; a fork, whose pending tokens its parent has read, got 98 %, and 0 passes."""
    data = source(tmp_path / "a", [[990] * 60])
    mix = curriculum(16, 2, [10**6], [{"a": 1}], max_epochs={"a": 1})
    config = StreamConfig(T=16, V=2, buffer_size=8, long_docs="split", overlap=4, curriculum=mix)
    _, before, cursors = run(config, {"a": data}, R=4, steps=parent_steps, drop_dry=False)
    _, after, _ = run(config, {"a": data}, R=4, steps=60, drop_dry=False)
    plan = make_plan(
        config,
        {"a": data},
        rows_per_step=4,
        num_steps=60,
        cursors=cursors,
        start_step=parent_steps,
        first_step=parent_steps,
        begin=cursors,
    )
    bucket = plan.buckets["a"]
    num_rows = (60 - parent_steps) * 4
    overlap = after["a"]["repeated"] - before.get("a", {"repeated": 0})["repeated"]
    assert bucket.repeated == overlap / (num_rows * 17)
    assert bucket.repeated == pytest.approx(4 / 17, rel=0.1)
    assert bucket.passes == pytest.approx(num_rows * 12 / bucket.tokens, rel=0.1)


@pytest.mark.parametrize("parent_steps", [10, 200])
def test_a_sample_of_a_fork_begins_where_its_parent_is(tmp_path, parent_steps):
    """Regression: it began at the start of the data, where no split document has come back."""
    data = source(tmp_path / "a", [[60] * 4000])
    config = StreamConfig(T=16, V=2, buffer_size=64, long_docs="split", overlap=4)
    steps = parent_steps + 50
    _, before, cursors = run(config, {"a": data}, R=4, steps=parent_steps, drop_dry=False)
    _, after, _ = run(config, {"a": data}, R=4, steps=steps, drop_dry=False)
    plan = make_plan(
        config,
        {"a": data},
        rows_per_step=4,
        num_steps=steps,
        cursors=cursors,
        start_step=parent_steps,
        first_step=parent_steps,
        begin=cursors,
    )
    bucket = plan.buckets["a"]
    repeated = after["a"]["repeated"] - before["a"]["repeated"]
    assert not bucket.exact, "the case: it has no limit"
    assert bucket.repeated == pytest.approx(repeated / (50 * 4 * 17), rel=0.1)


def test_a_sample_of_few_rows_is_of_all_lanes(tmp_path):
    """Regression: the plan of a late fork, of which each lane had ten rows, said 0 % of 7 %."""
    rng = np.random.default_rng(1)
    few_are_long = np.where(rng.random(4000) < 0.04, 900, 12)
    data = source(tmp_path / "a", [few_are_long.tolist()])
    config = StreamConfig(T=16, V=8, buffer_size=64, long_docs="split", overlap=4)
    _, before, cursors = run(config, {"a": data}, R=16, steps=100, drop_dry=False)
    _, after, _ = run(config, {"a": data}, R=16, steps=105, drop_dry=False)
    plan = make_plan(
        config,
        {"a": data},
        rows_per_step=16,
        num_steps=105,
        cursors=cursors,
        start_step=100,
        first_step=100,
        begin=cursors,
    )
    bucket = plan.buckets["a"]
    assert not bucket.exact, "the case: it has no limit"
    repeated = after["a"]["repeated"] - before["a"]["repeated"]
    assert bucket.repeated == repeated / (5 * 16 * 17) > 0.05


def test_the_plan_of_a_run_that_halts_at_once_is_exact_and_has_no_shares(tmp_path):
    """Regression: its figures were "about", and 24 % of its 0 trained tokens repeated."""
    data = source(tmp_path / "a", [[900, 900]])
    mix = curriculum(16, 8, [100], [{"a": 1}])
    config = StreamConfig(T=16, V=8, curriculum=mix, long_docs="split", overlap=4)
    plan = both(config, {"a": data}, R=16, steps=50)
    assert plan.steps == 0, "the case"
    header, figures = (re.split(r"  +", line.strip()) for line in plan_lines(plan)[-2:])
    shown = dict(zip(header, figures, strict=True))
    assert shown["trained"] == "0" and shown["figures"] == "exact"
    assert {shown[f"{share} %"] for share in ("cropped", "repeated", "padded")} == {"-"}


def test_the_phases_that_ended_before_a_fork_are_not_in_its_table(tmp_path):
    """Regression: the plan of a late fork began with a phase of 0 tokens."""
    data = {name: source(tmp_path / name, [[12] * 4000]) for name in ("a", "b")}
    mix = curriculum(16, 2, [20, 40], [{"a": 1}, {"a": 1, "b": 1}])
    config = StreamConfig(T=16, V=2, buffer_size=64, curriculum=mix)
    _, _, cursors = run(config, data, R=4, steps=15, drop_dry=False)
    forked = {"cursors": cursors, "start_step": 15, "first_step": 15, "begin": cursors}
    for more, numbers in (({}, ["1", "2"]), (forked, ["2"])):
        plan = make_plan(config, data, rows_per_step=4, num_steps=20, **more)
        phases = [line.split() for line in plan_lines(plan)[2 : 2 + len(numbers)]]
        assert [phase[0] for phase in phases] == numbers
    assert phases[0][:3] == ["2", "15", "320"]


def test_rows_of_concat_share_one_token_each(tmp_path):
    """Regression: books of which little was placed seemed to share almost none."""
    data = source(tmp_path / "a", [[990] * 60])
    config = StreamConfig(T=16, V=4, layout="concat", max_epochs=1)
    plan = make_plan(config, {"a": data}, rows_per_step=8, num_steps=50)
    bucket = plan.buckets["a"]
    shared = 50 * 8 - 4  # the first row of each lane shares none
    assert bucket.exact and bucket.account["repeated"] == shared
    assert bucket.repeated == shared / (50 * 8 * 17)
    assert bucket.passes == pytest.approx(50 * 8 * 16 / bucket.tokens, rel=0.01)


def test_a_stop_ends_the_planning_of_rows(tmp_path):
    data = source(tmp_path / "a", [[20] * 50])
    config = StreamConfig(T=16, V=4, buffer_size=64, max_epochs=1)
    asked = iter(["", "", "SIGTERM"])
    with stops_if(lambda: next(asked)), pytest.raises(Stop, match="SIGTERM"):
        make_plan(config, {"a": data}, rows_per_step=4, num_steps=5)


def test_a_resume_is_planned_from_its_cursors(tmp_path):
    rng = np.random.default_rng(6)
    sources = {
        name: source(tmp_path / name, [rng.integers(3, 60, n).tolist()])
        for name, n in (("a", 300), ("b", 90))
    }
    config = StreamConfig(
        T=16,
        V=4,
        buffer_size=8,
        long_docs="split",
        overlap=0,
        curriculum=curriculum(16, 4, [99], [{"a": 1, "b": 1}]),
    )
    whole = both(config, sources, R=8, steps=60)
    assert 9 < whole.steps < 60
    for begun in (9, whole.steps - 3):
        *_, cursors = run(config, sources, R=8, steps=begun, drop_dry=False)
        rest = both(config, sources, R=8, steps=60, cursors=cursors, start=begun)
        assert rest.halt == whole.halt
        assert [b.account for b in rest.buckets.values()] == [
            b.account for b in whole.buckets.values()
        ]
    done, _, cursors = run(config, sources, R=8, steps=whole.steps + 2, drop_dry=True)
    assert done == whole.steps + 2 and any(cursor["dropped"] for cursor in cursors)
    both(config, sources, R=8, steps=done + 9, cursors=cursors, start=done, drop_dry=True)


@pytest.mark.parametrize("num_documents", [7, 20, 90])
def test_usable_is_what_rows_hold_when_the_first_lane_runs_dry(tmp_path, num_documents):
    """Regression: it was 8 times what the poorest lane had, and a halted run trained on more."""
    rng = np.random.default_rng(num_documents)
    sources = {
        name: source(tmp_path / name, [rng.integers(3, 60, n).tolist()])
        for name, n in (("a", 400), ("b", num_documents))
    }
    mix = curriculum(16, 8, [10**6], [{"a": 3, "b": 1}])
    config = StreamConfig(T=16, V=8, buffer_size=8, curriculum=mix, max_epochs=1)
    halted = both(config, sources, R=16, steps=60)
    bucket = halted.buckets["b"]
    assert bucket.dry_step == halted.steps < 60
    assert bucket.trained <= bucket.usable < bucket.trained + 16 * 16
    allowed = both(config, sources, R=16, steps=60, drop_dry=True).buckets["b"]
    assert allowed.dry_step == bucket.dry_step and allowed.usable <= allowed.trained


def test_a_bucket_without_limit_or_with_far_more_than_requested_is_not_rehearsed(
    tmp_path, monkeypatch
):
    rng = np.random.default_rng(8)
    sources = {"data": source(tmp_path / "s", [rng.integers(3, 60, 3000).tolist()])}
    monkeypatch.setattr(plan_module, "SHARE_DOCUMENTS", 1000)
    for max_epochs, steps, exact in ((0, 5000, False), (1, 120, False), (1, 500, True)):
        config = StreamConfig(T=16, V=2, max_epochs=max_epochs)
        bucket = make_plan(config, sources, rows_per_step=4, num_steps=steps).buckets["data"]
        assert (bucket.exact, bucket.usable) == (exact, None) and bucket.trained == steps * 4 * 16
        assert bucket.tokens == sum(sources["data"].lengths(0, np.arange(3000))[0]) - 3000
        real = run(config, sources, R=4, steps=min(steps, 500), drop_dry=False)[1]["data"]
        assert abs(bucket.cropped - real["cropped"] / (real["emitted"] + real["cropped"])) < 0.02


def test_cropped_is_a_share_of_tokens_that_left_and_warnings_name_flags_that_would_use_them():
    account = dict.fromkeys(
        ("read", "bos", "repeated", "pending", "padded", "rows", "documents", "epochs"), 0
    )
    account |= {"read": 1000, "emitted": 18 * 17, "cropped": 102, "pending": 592, "rows": 18}
    bucket = BucketPlan(
        documents=9,
        tokens=510,
        max_epochs=1,
        asked=900,
        trained=18 * 16,
        usable=600,
        dry_step=3,
        account=account,
        exact=True,
    )
    plan = Plan(
        estimate=False,
        T=16,
        V=2,
        rows_per_step=4,
        num_steps=9,
        steps=3,
        halt="lane 0",
        allowed=False,
        crops=True,
        phases=[],
        buckets={"web": bucket},
    )
    assert (bucket.passes, bucket.cropped) == (0.8, 0.25)
    _, much = warnings(plan)
    assert "25% of the tokens of its data are cropped" in much and "--long-docs=split" in much
    unlimited = dataclasses.replace(bucket, max_epochs=0, dry_step=None, trained=3000)
    assert (
        "the run reads its data 8.3 times"
        in warnings(dataclasses.replace(plan, buckets={"web": unlimited}))[-1]
    )
    guess = dataclasses.replace(plan, estimate=True)
    assert "by this estimate" in problem(guess) and "probably runs dry" in warnings(guess)[0]
    for way in ("max_epochs", "--lanes", "--long-docs=split", "fork"):
        assert way in problem(plan)
    assert "--allow-bucket-exhaustion" not in problem(plan), "there is no other bucket"
    two = {"web": bucket, "code": bucket}
    assert "--allow-bucket-exhaustion" in problem(dataclasses.replace(plan, buckets=two))
    split = dataclasses.replace(plan, V=1, crops=False)
    assert "--lanes" not in problem(split) and "--long-docs" not in problem(split)


def test_a_plan_of_one_lane_is_in_the_singular(tmp_path):
    data = source(tmp_path / "a", [[40] * 20])
    plan = make_plan(StreamConfig(T=16, V=1), {"a": data}, rows_per_step=4, num_steps=5)
    assert plan_lines(plan)[0].endswith("tokens from 1 lane")


@pytest.fixture
def much_text(monkeypatch):
    """All text is too much to be tokenized for a plan."""
    monkeypatch.setattr(plan_module, "WHOLE_TEXT_TOKENS", 0)


@pytest.mark.parametrize("fork", [None, {"run": "parent"}])
@pytest.mark.parametrize("steps", [5, 40])
def test_books_that_would_be_cropped_are_refused_but_not_in_a_fork_which_packs_as_its_parent(
    tmp_path, fork, steps
):
    """Nor in a run of less than one pass over the beginnings, which is a trial."""
    data = source(tmp_path / "a", [[900] * 60])
    config = StreamConfig(T=16, V=4, buffer_size=8)
    plan = make_plan(config, {"a": data}, rows_per_step=4, num_steps=steps)
    start = SimpleNamespace(config={}, settings=SimpleNamespace(plan="error", fork=fork))
    why = refusal(plan, start, SimpleNamespace(train={"a": data}))  # type: ignore[arg-type]
    assert ("--long-docs=split" in why) == (steps == 40 and fork is None)


def test_a_few_books_among_many_notes_are_estimated_by_the_sizes_of_their_files(
    tmp_path, much_text
):
    """Regression: documents were sampled file by file, so eight books counted like eight hundred."""
    rng = np.random.default_rng(0)
    for number in range(8):
        write_parquet(tmp_path / f"book_{number}.parquet", ["x" * int(rng.integers(9000, 12000))])
    notes = ["y" * int(rng.integers(50, 400)) for _ in range(600)]
    write_parquet(tmp_path / "notes.parquet", notes, group_size=100)
    text = open_source(scan(tmp_path), Tokenizer(1000))
    exact = sum(
        len(document.ids) - 1
        for group, n in enumerate(text.groups.tolist())
        for document in text.read(group, np.arange(n))
    )
    sample = Sample(text)
    assert sample.total(sample.lengths - 1) == pytest.approx(exact, rel=0.1)
    drawn = [sample.draw(group, np.arange(n)) for group, n in enumerate(text.groups.tolist())]
    assert sum(map(sum, drawn)) == pytest.approx(exact, rel=0.1)
    assert len(text.groups) > len(sample.of_group), "some groups are scaled"


@pytest.mark.parametrize("seed", range(5))
def test_the_tokens_of_text_do_not_depend_on_the_long_documents_of_the_sample(
    tmp_path, much_text, seed
):
    """Regression: the lengths of the sampled documents stood for all, and were 20 % off."""
    rng = np.random.default_rng(seed)
    for number in range(3):
        sizes = np.exp(rng.normal(5, 1.5, 500)).astype(int)  # a few documents hold most tokens
        texts = ["".join(map(chr, rng.integers(97, 123, size))) for size in sizes]
        write_parquet(tmp_path / f"{number}.parquet", texts, group_size=500)
    text = open_source(scan(tmp_path), Tokenizer(1000))
    exact = sum(
        len(document.ids)
        for group, n in enumerate(text.groups.tolist())
        for document in text.read(group, np.arange(n))
    )
    sample = Sample(text)
    assert sample.total(sample.lengths) == pytest.approx(exact, rel=0.02)
    assert sample.total(np.ones_like(sample.lengths)) == 1500, (
        "documents are counted, not estimated"
    )


def test_the_plan_of_little_text_is_exact(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", some_texts(400, seed=3))
    text = open_source(scan(path.parent), Tokenizer(1000))
    config = StreamConfig(T=16, V=4, max_epochs=1, buffer_size=8)
    plan = make_plan(config, {"data": text}, rows_per_step=8, num_steps=2000)
    done, accounts, _ = run(config, {"data": text}, R=8, steps=2000, drop_dry=False)
    assert not plan.estimate and plan.halt and plan.steps == done
    assert plan.buckets["data"].account == accounts["data"]


def test_much_text_is_estimated_from_a_sample(tmp_path, much_text):
    path = write_parquet(tmp_path / "t.parquet", some_texts(400, seed=3))
    text = open_source(scan(path.parent), Tokenizer(1000))
    config = StreamConfig(T=16, V=4, max_epochs=1, buffer_size=8)
    plan = make_plan(config, {"data": text}, rows_per_step=8, num_steps=2000)
    done, accounts, _ = run(config, {"data": text}, R=8, steps=2000, drop_dry=False)
    assert plan.estimate and plan.halt and done < 2000 and abs(plan.steps / done - 1) < 0.25
    assert (
        abs(plan.buckets["data"].tokens / (accounts["data"]["read"] + accounts["data"]["bos"]) - 1)
        < 0.25
    )
    assert "estimated" in plan_lines(plan)[0] and "about" in plan_lines(plan)[-1]
