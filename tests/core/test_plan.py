"""Plans compared with real streams of token files, step by step, until they halt."""

import copy
import dataclasses

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from nanochat import plan as plan_module
from nanochat.curriculum import Curriculum, Phase
from nanochat.files import find_files
from nanochat.order import StreamConfig
from nanochat.plan import BucketPlan, Plan, make_plan, plan_lines, problem, warnings
from nanochat.sources import open_source, scan
from nanochat.stream import Stream, ledger
from tests.token_files import Tokenizer, write_pair
from tests.toy import examples, some_texts, write_parquet

EOD = 256
LAYOUTS = [
    {},
    {"long_docs": "split", "overlap": 3},
    {"layout": "concat"},
    {"layout": "binned"},
    {"layout": "binned", "pack": False},
]


def source(folder, lengths, *, windows=False, as_stored=False):
    """Shards, one for each list of document lengths. `windows`: in windows of 12 ids that share
    3."""
    for i, documents in enumerate(lengths):
        entries, prefixes = [], []
        for n in documents:
            for start in range(0, max(1, n - 3), 9) if windows else [0]:
                end = min(n, start + 12) if windows else n
                entries.append([*range(start, end), *[EOD] * (end == n)])
                prefixes.append(3 if start else 0)
        write_pair(folder / f"s{i}", entries, prefixes, vocab_size=1000)
    return open_source(
        scan(folder, find_files(folder, "shards")), Tokenizer(1000), as_stored=as_stored
    )


def run(config, sources, *, R, steps, drop_dry, cursors=None, start=0):
    """(completed steps, ledger, cursors) of a real stream."""
    stream = Stream(
        config,
        sources,
        range(config.V),
        tokenizer="bytes",
        cursors=cursors,
        drop_dry=drop_dry,
        num_threads=1,
    )
    done, state = start, stream.state()
    while done < steps and len(stream.next_rows(R // config.V)) == R:
        done, state = done + 1, stream.state()
    cursors = stream.cursors(state)
    stream.close()
    return done, ledger(cursors, config.T), cursors


def both(config, sources, *, R, steps, drop_dry=False, cursors=None, start=0):
    """The plan, after a comparison with the real stream."""
    plan = make_plan(
        config,
        sources,
        rows_per_step=R,
        num_steps=steps,
        drop_dry=drop_dry,
        cursors=copy.deepcopy(cursors),
        start_step=start,
    )
    done, accounts, _ = run(
        config, sources, R=R, steps=steps, drop_dry=drop_dry, cursors=cursors, start=start
    )
    assert (plan.steps, bool(plan.halt), plan.estimate) == (done, done < steps, False)
    for name, bucket in plan.buckets.items():
        account = accounts.get(name, {"rows": 0})
        # if no bucket is rehearsed
        off = 0 if any(b.exact for b in plan.buckets.values()) else 5 * config.V * config.T
        assert (
            bucket.exact == (bucket.max_epochs > 0)
            and abs(bucket.trained - account["rows"] * config.T) <= off
        )
        assert not bucket.exact or bucket.account == account, name
    return plan


def curriculum(T, V, rows, mixes, **kwargs):
    return Curriculum([Phase(n * T * V, mix) for n, mix in zip(rows, mixes)], **kwargs)


documents = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=30), min_size=1, max_size=3)


@settings(max_examples=examples(0.5))
@given(st.data())
def test_law_the_plan_matches_the_stream(tmp_path_factory, data):
    kwargs = data.draw(st.sampled_from(LAYOUTS))
    T = data.draw(st.sampled_from([13, 16]))
    V = data.draw(st.sampled_from([1, 2, 4]))
    n = data.draw(st.integers(1, 3))
    root, stored = tmp_path_factory.mktemp("plan"), kwargs.get("layout") == "binned"
    windows = data.draw(st.booleans()) or stored
    sources = {
        name: source(root / name, data.draw(documents), windows=windows, as_stored=stored)
        for name in "abc"
    }
    mixes = data.draw(
        st.lists(
            st.fixed_dictionaries(
                {"a": st.integers(1, 4), "b": st.integers(0, 4), "c": st.integers(0, 2)}
            ),
            min_size=1,
            max_size=3,
        )
    )
    mix = curriculum(
        T,
        V,
        data.draw(st.lists(st.integers(1, 40), min_size=3, max_size=3)),
        mixes,
        max_epochs={"a": data.draw(st.integers(0, 3))},
    )
    config = StreamConfig(
        T=T,
        V=V,
        buffer_size=data.draw(st.sampled_from([1, 4, 32])),
        unit_size=8,
        curriculum=mix,
        **kwargs,
    )
    plan = both(
        config,
        sources,
        R=n * V,
        steps=data.draw(st.integers(1, 30)),
        drop_dry=data.draw(st.booleans()),
    )
    event(
        f"halted: {bool(plan.halt)}, dropped: {plan.allowed and any(b.dry_step for b in plan.buckets.values())}"
    )
    assert Plan.from_json(plan.to_json()) == plan and plan_lines(plan)


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
        (group, row): (length - (not stored), prefix)
        for group, n in enumerate(data.groups.tolist())
        for row, (length, prefix) in enumerate(zip(*data.lengths(group, np.arange(n))))
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
    little = {"web": dataclasses.replace(bucket, account={**bucket.account, "cropped": 30})}
    assert (
        "8.9% are cropped (--long-docs=split would use them)"
        in warnings(dataclasses.replace(plan, buckets=little))[0]
    )
    assert "--long-docs=split" not in warnings(dataclasses.replace(plan, crops=False))[0]
    unlimited = dataclasses.replace(bucket, max_epochs=0, dry_step=None, trained=3000)
    assert (
        "the run reads its data 8.3 times"
        in warnings(dataclasses.replace(plan, buckets={"web": unlimited}))[-1]
    )
    guess = dataclasses.replace(plan, estimate=True)
    assert problem(plan) and not problem(guess) and "probably runs dry" in warnings(guess)[0]


def test_text_is_estimated_from_a_sample(tmp_path):
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


def test_an_entry_longer_than_a_row_is_named(tmp_path):
    stored = {"data": source(tmp_path / "b", [[20] * 4], as_stored=True)}
    with pytest.raises(ValueError, match=r"s0\.bin: group 0: a stored document has 21 tokens"):
        make_plan(
            StreamConfig(T=12, V=1, layout="binned", max_epochs=1),
            stored,
            rows_per_step=1,
            num_steps=5,
        )
