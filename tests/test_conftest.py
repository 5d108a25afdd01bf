"""The settings of tests/conftest.py."""

from hypothesis.internal.conjecture import providers


def test_examples_of_a_law_do_not_depend_on_which_modules_are_loaded():
    """Regression: the test files that a process ran before decided whether a law of test_packing.py passed."""
    assert not providers.is_local_module_file(__file__)
