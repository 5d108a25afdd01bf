"""A plan equals the real stream, step by step, until it halts."""

import copy

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from nanochat.curriculum import Curriculum, Phase
from nanochat.files import find_files
from nanochat.order import StreamConfig
from nanochat.plan import Plan, make_plan
from nanochat.plan_report import plan_lines, two_digits
from nanochat.sources import open_source, scan
from nanochat.stream import Stream, ledger
from tests.token_files import Tokenizer, write_pair
from tests.toy import examples

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


def test_an_entry_longer_than_a_row_is_named(tmp_path):
    stored = {"data": source(tmp_path / "b", [[20] * 4], as_stored=True)}
    with pytest.raises(ValueError, match=r"s0\.bin: group 0: a stored document has 21 tokens"):
        make_plan(
            StreamConfig(T=12, V=1, layout="binned", max_epochs=1),
            stored,
            rows_per_step=1,
            num_steps=5,
        )


@pytest.mark.parametrize(
    "number, text",
    [(5e-5, "less than 0.001"), (0.0714, "0.071"), (1.66, "1.7"), (9.96, "10"), (106.1, "106")],
)
def test_passes_have_two_digits_and_no_exponent(number, text):
    """Regression: "this run reads them 1.1e+02 times"."""
    assert two_digits(number) == text
