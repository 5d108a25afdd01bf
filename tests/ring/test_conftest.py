"""The settings of tests/conftest.py."""

import importlib
import sys

from hypothesis import given, settings
from hypothesis import strategies as st


def test_examples_of_a_law_do_not_depend_on_which_modules_are_loaded(tmp_path, monkeypatch):
    """Regression: the test files that a process ran before decided whether a law of test_packing.py
    passed."""
    (tmp_path / "full_of_numbers.py").write_text(
        "\n".join(f"X{i} = {1000 + i}" for i in range(100))
    )
    monkeypatch.syspath_prepend(tmp_path)

    def examples():
        drawn = []

        @settings(derandomize=True, database=None, max_examples=50)
        @given(st.integers(1, 10_000))
        def law(number):
            drawn.append(number)

        law()
        return drawn

    before = examples()
    importlib.import_module("full_of_numbers")
    assert "full_of_numbers" in sys.modules and len(set(before)) > 20
    assert examples() == before
