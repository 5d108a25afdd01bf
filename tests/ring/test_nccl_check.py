"""dev.nccl_check with gloo: it passes, and it reports a wrong order of addition."""

import os
import re
from unittest import mock

import pytest
import torch

from dev import nccl_check
from nanochat import reduce
from tests import training

workplace = training.in_workplace()


def add_in_rank_order(parts):
    """Add in another order than the tree."""
    return parts.flip(0).cumsum(0)[-1]


def break_the_tree():
    reduce.add_in_tree_order = add_in_rank_order


@pytest.mark.parametrize(
    ("world_size", "hook", "failing"),
    [
        (1, None, []),
        (2, None, []),
        # nodes of two add pairs: any order is right
        (4, break_the_tree, ["tree", "tree", "tree", "steps"]),
    ],
    ids=["alone", "right", "another order"],
)
def test_a_wrong_order_of_addition_fails_and_the_right_one_passes(world_size, hook, failing):
    group = training.launch(
        nccl_check.main, [["--device=cpu"]] * world_size, [{}] * world_size, hook
    )
    codes = group.wait()
    assert codes == [int(bool(failing))] + [0] * (world_size - 1), group.text()
    verdicts = re.findall(r"^(\w[\w ]*?)  .*(good|FAILS)$", group.text(), re.MULTILINE)
    assert [check for check, verdict in verdicts if verdict == "FAILS"] == failing
    assert {check for check, _ in verdicts} >= {"collectives", "tree", "gather", "steps"}


def test_three_processes_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"started as 3 processes, expected 1, 2.*torchrun"):
        nccl_check.main(["--device=cpu"])


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "backends"), [(1, "0", ["gloo"]), (2, "1", []), (0, "1", [])]
)
def test_processes_share_a_gpu_through_gloo_only_if_there_are_too_few(
    monkeypatch, num_gpus, local_rank, backends
):
    joined = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **_: joined.append(backend)
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert nccl_check.share_gpus() == bool(backends)
    assert (os.environ["LOCAL_RANK"], joined) == (local_rank, backends)


class Reached(Exception): ...


def test_its_steps_stack_matrices_by_leaves_and_not_by_processes(monkeypatch):
    """Otherwise the steps would fail on GPUs, whose batched products round by the number of
    matrices."""
    setup = mock.Mock(side_effect=Reached)
    monkeypatch.setattr(nccl_check.GPT, "setup_optimizer", setup)
    with pytest.raises(Reached):
        nccl_check.train(4, 0, 1, torch.device("cpu"), tiny=True)
    assert setup.call_args.kwargs == {"num_leaves": 4}


def lose_a_broadcast():
    nccl_check.broadcast = lambda tensor: None


def test_a_collective_that_delivers_nothing_fails():
    group = training.launch(nccl_check.main, [["--device=cpu"]] * 2, [{}] * 2, lose_a_broadcast)
    assert group.wait() == [1, 0]
    assert re.search(r"^collectives .* 1 +FAILS$", group.text(), re.MULTILINE), group.text()
