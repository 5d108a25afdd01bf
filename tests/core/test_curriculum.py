"""Curricula: remainders, any notation, every error of the file, and what identifies one."""

import json
from dataclasses import replace

import pytest

from nanochat.curriculum import Phase
from tests.spec.test_curriculum import block_counts, curriculum, mixer, read

# ---- counts --------------------------------------------------------------------------------------


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


def test_the_order_of_names_and_the_notation_of_weights_do_not_matter():
    same = [
        {"web": 0.6, "code": 0.3, "math": 0.1},
        {"math": 1, "web": 6, "code": 3},
        {"code": 30.0, "math": 10, "web": 60, "wiki": 0},
    ]
    mixers = [mixer((1, mix)) for mix in same]
    assert len({tuple(m.bucket(0, k) for k in range(600)) for m in mixers}) == 1
    assert len({curriculum((5, mix)).identity() for mix in same}) == 1
    assert Phase(5, {"web": 0.75, "code": 0.25}).proportions() == {"code": 1, "web": 3}


# ---- the file ------------------------------------------------------------------------------------


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


def test_a_number_of_epochs_may_have_the_notation_of_any_number(tmp_path):
    """Regression: 1e1 passed the check, and then the run failed without a word about the file."""
    c = read(tmp_path, ONE + "max_epochs: {web: 1e1}\n")
    assert c.epochs("web") == 10 and c == replace(c, max_epochs={"web": 10})


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
            "curriculum:\n- mix: {web: 1}\n- {duration_tokens: 4, mix: {web: 1}}\n",
            "phase 1: duration_tokens: missing, expected .*; only the last phase may leave it out",
        ),
        (
            ONE + "  duration_token: 4\n",
            r"phase 1 has an unknown key 'duration_token'; .*; did you mean duration_tokens\?",
        ),
        (FOR + "0\n", "phase 2: duration_tokens: got 0, expected a whole number >= 1"),
        (FOR + "0.5\n", "duration_tokens: got 0.5"),
        (FOR + "1e19\n", "duration_tokens: got"),
        (FOR + ".inf\n", "got inf"),
        (FOR + "true\n", "got True"),
        (
            FOR + "2020-01-01\n",
            "2020-01-01 is a date, which is not plain text or a number; put it in quotes",
        ),
        *((FOR + "9" * digits, "got 99999") for digits in (400, 4300)),
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


# ---- stored and compared -------------------------------------------------------------------------


def test_the_identity_contains_everything_that_decides_the_rows_and_nothing_else():
    web, both = {"web": 1}, {"web": 1, "code": 1}
    plain = curriculum((5, web), (9, both))
    base = plain.identity()
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
    assert not any(plain.differences(c) or c.differences(plain) for c in same)
    assert all(plain.differences(c) and c.differences(plain) for c in others)
