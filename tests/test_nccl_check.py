"""dev.nccl_check with gloo: it passes, and it reports a wrong order of addition."""

import re

import pytest

from dev import nccl_check
from nanochat import reduce
from tests import training

workplace = training.in_workplace()


def add_in_rank_order(parts):
    """Add in another order than the tree."""
    return parts.flip(0).cumsum(0)[-1]


def break_the_tree():
    reduce.add_in_tree_order = add_in_rank_order


@pytest.mark.parametrize(("world_size", "hook", "failing"), [
    (2, None, []),
    (4, break_the_tree, ["tree", "tree", "tree", "steps"]),  # nodes of two add pairs: any order is right
], ids=["right", "another order"])
def test_a_wrong_order_of_addition_fails_and_the_right_one_passes(world_size, hook, failing):
    group = training.launch(nccl_check.main, [["--device=cpu"]] * world_size, [{}] * world_size, hook)
    codes = group.wait()
    assert codes == [int(bool(failing))] + [0] * (world_size - 1), group.text()
    verdicts = re.findall(r"^(\w[\w ]*?)  .*(good|FAILS)$", group.text(), re.MULTILINE)
    assert [check for check, verdict in verdicts if verdict == "FAILS"] == failing
    assert {check for check, _ in verdicts} >= {"tree", "gather", "steps"}


def test_one_process_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"started as 1 process.*torchrun"):
        nccl_check.main(["--device=cpu"])
