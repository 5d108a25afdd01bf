"""Curricula: exact mixes at every scale, rows without history, and a golden sequence."""

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import curriculum as curriculum_module
from nanochat.curriculum import BLOCK, Curriculum, Mixer, Phase, load
from tests.toy import examples

NAMES = ("books", "code", "math", "web")
TEXT = """\
curriculum:
  - duration_tokens: 3_000_000
    mix: {web: 7, books: 2, code: 1}
  - duration_tokens: 1_000_000
    mix: {web: 0.25, code: 0.5, math: 0.25}
allow_bucket_exhaustion: false
allow_budget_mismatch: true
max_epochs: {code: 2}
"""


weights = st.one_of(
    st.integers(0, 10**6), st.floats(0, 1e6), st.sampled_from([0, 0.1, 1 / 3, 1e-9])
)


mixes = st.dictionaries(st.sampled_from(NAMES), weights, min_size=1).filter(
    lambda mix: any(mix.values())
)
bounds = st.integers(0, 3 * BLOCK)  # of rows of a phase


def curriculum(*phases, **kwargs):
    """phases: (rows of each lane, mix), for T = 1 and V = 1."""
    return Curriculum([Phase(rows, mix) for rows, mix in phases], **kwargs)


def mixer(*phases, seed=0, V=1):
    """A Mixer whose phases last this many rows of each lane."""
    return Mixer(curriculum(*((rows * V, mix) for rows, mix in phases)), T=1, V=V, seed=seed)


def exact_shares(mix, dropped=frozenset()):
    """The meaning of a weight: its decimal, divided by the sum of those not dropped."""
    kept = {
        bucket: Fraction(str(weight))
        for bucket, weight in mix.items()
        if weight and bucket not in dropped
    }
    return {bucket: weight / sum(kept.values()) for bucket, weight in kept.items()}


def block_counts(m, lane, block):
    return Counter(m.bucket(lane, row) for row in range(block * BLOCK, (block + 1) * BLOCK))


# ---- counts --------------------------------------------------------------------------------------


@given(mixes, st.integers(1, 5), bounds, bounds, st.integers(0, 3))
@settings(max_examples=examples(1))
def test_law_counts_are_those_of_the_rows(mix, V, begin, stop, seed):
    m = mixer((1, {"a": 1}), (1, mix), V=V, seed=seed)
    rows = range(begin, stop)
    counted = Counter(m.bucket(lane, 1 + row) for lane in range(V) for row in rows)
    assert +m.counts(1, rows) == counted


def test_no_count_is_below_zero_however_far_a_phase_has_come(monkeypatch):
    """Regression: the counts of two long beginnings, each about right, were subtracted."""
    monkeypatch.setattr(curriculum_module, "COUNTED", 1)
    m = mixer((1, {"a": 1, "b": 500}), V=5)
    for end in range(2 * BLOCK, 100 * BLOCK, BLOCK):
        counts = m.counts(0, range(end - 1, end))
        assert counts.total() == 5 and min(counts.values()) >= 0


def test_counts_of_a_long_phase_are_within_a_few_rows(monkeypatch):
    m = mixer((1, {"a": 1, "b": 2, "c": 0.1}), V=4)
    rows = range(5, 3000 * BLOCK + 7)
    exact = m.counts(0, rows)
    monkeypatch.setattr(curriculum_module, "COUNTED", 10)
    quick = m.counts(0, rows)
    assert quick.total() == exact.total()
    assert all(abs(quick[bucket] - exact[bucket]) < 4 * 5 for bucket in "abc")


@given(mixes, st.integers(0, 63), st.integers(0, 2**40), st.sets(st.sampled_from(NAMES)))
@settings(max_examples=examples(1))
def test_law_a_block_is_less_than_one_row_off_each_weight_and_has_no_bucket_of_weight_zero(
    mix, lane, block, dropped
):
    shares = exact_shares(mix, dropped)
    m = mixer((1, mix), V=64)
    rows = [m.bucket(lane, block * BLOCK + k, frozenset(dropped)) for k in range(BLOCK)]
    if not shares:
        assert set(rows) == {None}
        return
    counts = Counter(rows)
    assert counts.keys() <= shares.keys() and sum(counts.values()) == BLOCK
    assert all(abs(counts[bucket] - BLOCK * share) < 1 for bucket, share in shares.items())


# ---- rows ----------------------------------------------------------------------------------------


def test_phases_change_at_the_exact_row_and_the_last_one_never_ends():
    m = Mixer(
        curriculum((10 * 64 + 63, {"a": 1}), (300 * 64, {"b": 1}), (64, {"c": 1})),
        T=16,
        V=4,
        seed=0,
    )
    assert [m.bucket(3, row) for row in (0, 9, 10, 309, 310, 311, 10**12)] == list("aabbccc")
    assert [m.phase_of(row) for row in (0, 9, 10, 309, 310)] == [
        (0, 0),
        (0, 9),
        (1, 0),
        (1, 299),
        (2, 0),
    ]
    assert m.phase_of(10**12) == (2, 10**12 - 310)


def test_durations_are_rows_of_each_lane_rounded_down():
    phases = curriculum((1000, {"a": 1}), (129, {"b": 1}))
    assert phases.phase_rows(16, 4) == [15, 2]
    for refused in (lambda: phases.phase_rows(26, 5), lambda: Mixer(phases, T=26, V=5, seed=0)):
        with pytest.raises(
            ValueError,
            match=r"phase 2 lasts 129 tokens, less than one row .*T \* V = 26 \* 5 = 130",
        ):
            refused()


def test_the_sequence_never_changes():
    """Golden: if these change, raise VERSION in curriculum.py."""
    m = mixer(
        (600, {"web": 0.6, "code": 0.2, "math": 0.1, "wiki": 0.1}),
        (600, {"web": 3, "math": 1}),
        V=64,
        seed=42,
    )

    def letters(lane, start, n=40, dropped=frozenset()):
        # wEb, cOde, mAth, wIki
        return "".join(m.bucket(lane, row, dropped)[1] for row in range(start, start + n))

    assert letters(0, 0) == "eieoeoeeeeooeeeeaeeeeeeeiieeaoeaiaeoeeii"
    assert letters(63, 230) == "eoooeeieeoiaaeeieeooeeoieeaeeeeeiooeoiee"
    assert letters(7, 580) == "oeaeoeeaeeeeeeoaeoeieeaeeaeeaeeeeeaeeeaa"
    assert letters(7, 10**9, dropped=frozenset({"math", "code"})) == "e" * 40
    assert letters(1, 100, dropped=frozenset({"web"})) == "aoooaaooooooaoaioiioioaoooiiiiooooiiooaa"
    assert [block_counts(m, 3, block) for block in (0, 1)] == [
        {"code": 51, "math": 26, "web": 153, "wiki": 26},
        {"code": 52, "math": 25, "web": 154, "wiki": 25},
    ]


# ---- the file ------------------------------------------------------------------------------------


def read(tmp_path, text):
    (tmp_path / "mix.yaml").write_text(text)
    return load(tmp_path / "mix.yaml")


def test_a_file_is_read(tmp_path):
    c = read(tmp_path, TEXT)
    assert c.phases[0] == Phase(3 * 10**6, {"books": 2, "code": 1, "web": 7})
    assert c.phases[1] == Phase(10**6, {"code": 0.5, "math": 0.25, "web": 0.25})
    assert (c.allow_bucket_exhaustion, c.allow_budget_mismatch) == (False, True)
    assert (
        c.max_epochs == {"code": 2}
        and c.epochs("code") == 2
        and c.epochs("web") == 1
        and c.buckets == list(NAMES)
    )
    short = read(tmp_path, "curriculum: [{duration_tokens: 7, mix: {web: 1}}]")
    assert short == Curriculum([Phase(7, {"web": 1})]) and not short.allow_budget_mismatch


def test_a_bucket_that_the_data_lacks_is_named():
    c = curriculum((5, {"web": 1}), (5, {"code": 1}))
    with pytest.raises(
        ValueError, match=r"phase 2 mixes 'code', .*; expected coed, web; did you mean coed\?$"
    ):
        c.check_buckets(["web", "coed"])
    c.check_buckets({"web", "code", "more"})


# ---- stored and compared -------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 2**62), mixes), min_size=1, max_size=4),
    st.integers(0, 9),
    st.booleans(),
)
@settings(max_examples=examples(1))
def test_law_a_curriculum_survives_json(phases, limit, flag):
    plain = curriculum(*phases)
    c = curriculum(*phases, max_epochs={plain.buckets[0]: limit}, allow_bucket_exhaustion=flag)
    copy = Curriculum.from_json(json.loads(json.dumps(c.to_json())))
    assert copy == c and copy.to_json() == c.to_json() and copy.identity() == c.identity()


similar = st.lists(
    st.tuples(
        st.integers(1, 2),
        st.dictionaries(st.sampled_from(NAMES[:2]), st.sampled_from([0, 1, 2, 2.0]), min_size=1),
    ).filter(lambda phase: any(phase[1].values())),
    min_size=1,
    max_size=3,
)
limits = st.dictionaries(st.sampled_from(NAMES[:2]), st.integers(0, 2))


@given(similar, similar, limits, limits)
@settings(max_examples=examples(1))
def test_law_curricula_differ_in_words_if_and_only_if_their_rows_may(one, other, first, second):
    both = []
    for phases, max_epochs in ((one, first), (other, second)):
        mixed = curriculum(*phases).buckets
        kept = {bucket: limit for bucket, limit in max_epochs.items() if bucket in mixed}
        both.append(curriculum(*phases, max_epochs=kept))
    ours, theirs = both
    assert bool(ours.differences(theirs)) == (ours.identity() != theirs.identity())
    assert bool(theirs.differences(ours)) == bool(ours.differences(theirs))
