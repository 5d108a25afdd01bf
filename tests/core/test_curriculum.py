"""Curricula: exact mixes at every scale, rows without history, a golden sequence, and errors."""

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_remainders_are_carried_from_block_to_block_and_over_the_lanes():
    """A bucket with a third of a row per block comes once in three blocks, and in a third of the
    lanes."""
    mix = {"rare": 1, "web": 767}
    m = mixer((1, mix), V=64)
    over_time = [block_counts(m, 5, block).get("rare", 0) for block in range(300)]
    over_lanes = [block_counts(m, lane, 7).get("rare", 0) for lane in range(64)]
    assert set(over_time) == set(over_lanes) == {0, 1}
    assert abs(sum(over_time) - 100) < 2 and abs(sum(over_lanes) - 64 / 3) < 2
    # never long without it
    assert max(len(run) for run in "".join(map(str, over_time)).split("1")) <= 5


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


def test_the_order_of_names_and_the_notation_of_weights_do_not_matter():
    same = [
        {"web": 0.6, "code": 0.3, "math": 0.1},
        {"math": 1, "web": 6, "code": 3},
        {"code": 30.0, "math": 10, "web": 60, "wiki": 0},
    ]
    mixers = [mixer((1, mix)) for mix in same]
    assert len({tuple(m.bucket(0, k) for k in range(600)) for m in mixers}) == 1
    assert len({curriculum((5, mix)).identity() for mix in same}) == 1
    assert Phase(5, {"web": 0.75, "code": 0.25}).shares() == {"code": 1, "web": 3}


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


@pytest.mark.parametrize(
    "text, value",
    [
        ("5e9", 5 * 10**9),
        ("5.0e+9", 5 * 10**9),
        ("'5e9'", 5 * 10**9),
        ("5_000", 5000),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_any_decimal_notation_is_accepted_and_names_are_kept(tmp_path, text, value):
    c = read(
        tmp_path,
        f"curriculum:\n- duration_tokens: {text}\n  mix: {{'no': 5, 'a b': .5, x: 1e-3, y: 2_0}}\n"
        "max_epochs: {'no': 0}",
    )
    assert c.phases[0].duration_tokens == value and type(c.phases[0].duration_tokens) is int
    assert list(c.phases[0].mix.items()) == [("a b", 0.5), ("no", 5), ("x", 0.001), ("y", 20)]
    assert c.max_epochs == {"no": 0}


ONE = "curriculum:\n- duration_tokens: 100\n  mix: {web: 1}\n"
FOR = ONE + "- mix: {web: 1}\n  duration_tokens: "
MIX = ONE + "- duration_tokens: 1\n  mix: "


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "the file: expected an object, got null"),
        ("curriculum:\n  - [unclosed\n", "not valid YAML"),
        ("curriculum: !!python/object:os.system {}", "not valid YAML"),
        ("max_epochs: {}\n", "the file: curriculum: expected a list, got nothing"),
        (
            ONE + "max_epoch: {web: 1}\n",
            r"unknown key 'max_epoch'; expected allow_.*; did you mean max_epochs\?",
        ),
        (
            ONE + "allow_bucket_exhaustion: 1\n",
            "allow_bucket_exhaustion: expected true or false, got a whole number",
        ),
        ("curriculum: []\n", "no phases, expected a list"),
        ("curriculum:\n- web\n", "phase 1: expected an object, got a string"),
        (
            ONE + "- mix: {web: 1}\n",
            "phase 2: duration_tokens: expected a whole number or a number or a string, got",
        ),
        (
            ONE + "  duration_token: 4\n",
            r"phase 1 has an unknown key 'duration_token'; .*; did you mean duration_tokens\?",
        ),
        (FOR + "0\n", "phase 2: duration_tokens: got 0, expected a whole number >= 1"),
        (FOR + "0.5\n", "duration_tokens: got 0.5"),
        (FOR + "1e19\n", "duration_tokens: got"),
        (FOR + ".inf\n", "got inf"),
        (FOR + "true\n", "got true or false"),
        (
            FOR + "2020-01-01\n",
            "2020-01-01 is a date, which is not plain text or a number; put it in quotes",
        ),
        *(
            (FOR + "9" * digits, "got a whole number of more than 300 digits, expected")
            for digits in (400, 4300)
        ),
        (FOR + "'" + "9" * 5000 + "'", r"got .{57}\.\.\., expected"),
        (MIX + "{" + "w" * 900 + ": -1}", "weight of 'w{56}[.]{3}: got -1"),
        (ONE + "w" * 120 + ": 1", "unknown key 'w{56}[.]"),
        (MIX + "web\n", "phase 2: mix: expected an object, got a string"),
        (MIX + "{}\n", "at least one weight"),
        (MIX + "{web: 1, code: -0.1}\n", "weight of 'code': got -0.1, expected a number"),
        (MIX + "{web: .nan}\n", "weight of 'web': got nan"),
        (MIX + "{web: yes}\n", "weight of 'web': got True"),
        (MIX + "{no: 1}\n", "got the bucket False, expected a name; put it in quotes"),
        (MIX + "{web: 0, code: 0.0}\n", "weight above 0"),
        (ONE + "max_epochs: 3\n", "max_epochs: expected an object, got a whole number"),
        (ONE + "max_epochs: {web: 1, code: 4}\n", "no phase gives 'code' a weight; expected web"),
        (ONE + "max_epochs: {web: 1.5}\n", "max_epochs of 'web': got 1.5, expected a whole number"),
    ],
)
def test_every_error_names_the_file_and_the_value(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as e:
        read(tmp_path, text)
    message = str(e.value)
    assert (
        message.startswith(f"{tmp_path / 'mix.yaml'}: ")
        and "\n" not in message
        and len(message) < 500
    )


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


def test_the_identity_contains_everything_that_decides_the_rows_and_nothing_else():
    web, both = {"web": 1}, {"web": 1, "code": 1}
    base = curriculum((5, web), (9, both)).identity()
    assert json.loads(base)["max_epochs"] == {"code": 1, "web": 1}
    same = [
        curriculum((5, {"web": 2.5}), (9, both), max_epochs={"web": 1}),
        curriculum((5, web), (10**6, both)),
        curriculum((5, web), (9, both), allow_bucket_exhaustion=True, allow_budget_mismatch=True),
    ]
    assert {c.identity() for c in same} == {base}
    others = [
        curriculum((6, web), (9, both)),
        curriculum((5, web), (9, both), (9, both)),
        curriculum((5, web), (9, both), max_epochs={"web": 2}),
        curriculum((5, web), (9, web)),
        curriculum((5, web), (9, {"web": 2, "code": 1})),
    ]
    assert base not in {c.identity() for c in others}
