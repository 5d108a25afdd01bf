"""Batches hold the rows of the stream in leaves; prefetching and its errors are invisible."""

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import nanochat.dataloader as module
from nanochat.common import block, permutation
from nanochat.curriculum import Curriculum, Phase
from nanochat.dataloader import (
    DataLoader,
    Dry,
    StepLayout,
)
from nanochat.order import StreamConfig
from tests.toy import (
    BOS,
    ByteTokenizer,
    Ranks,
    fixed_source,
    json_copy,
    numbered,
)

CONFIG = StreamConfig(T=16, V=8, long_docs="split", overlap=5, buffer_size=5, unit_size=4)
R = 24


def make_loader(config=CONFIG, source=None, **kwargs):
    kwargs = {"rows_per_step": R, "device_batch_size": 4, "num_threads": 1, **kwargs}
    return DataLoader(config, {"b": source or fixed_source()}, tokenizer=ByteTokenizer(), **kwargs)


def take_step(loader):
    return [next(loader) for _ in range(loader.micro_batches_per_step)]


def step_rows(config=CONFIG, steps=1):
    """[(tokens, live) of all rows in order] of each step, straight from the stream."""
    with Ranks(config, {"b": fixed_source()}, n=R // config.V, W=1) as ranks:
        return [ranks.rows() for _ in range(steps)]


def drain(loader):
    """Take batches until an error."""
    while True:
        next(loader)


def alive(batch):
    return (batch.targets != -100).any(dim=1)


# ---- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["crop", "split", "concat"])
def test_batches_hold_the_rows_and_targets_are_off_exactly_where_the_rows_are(layout):
    config = (
        replace(CONFIG, layout="concat")
        if layout == "concat"
        else replace(CONFIG, long_docs=layout)
    )
    off = 0
    with make_loader(config, start_step=5) as loader:
        for rows in step_rows(config, steps=3):
            batches = take_step(loader)
            assert {(b.inputs.dtype, b.targets.dtype, b.doc_ids) for b in batches} == {
                (torch.int64, torch.int64, None)
            }
            inputs = torch.cat([b.inputs for b in batches]).numpy()
            targets = torch.cat([b.targets for b in batches]).numpy()
            for i, (tokens, live) in enumerate(rows):
                assert inputs[i].tolist() == tokens[:-1].tolist()
                assert (
                    targets[i].tolist() == np.where(live[1:], tokens[1:].astype(int), -100).tolist()
                )
                off += int((live[1:] == 0).sum())
        assert loader.step == 8
    assert (off > 0) == (layout == "split"), "the case: repeated context"


@pytest.mark.parametrize(
    "W, K, B", [(1, 4, 5), (2, 4, 5), (4, 4, 4), (3, 4, 2), (1, 1, 7), (8, 8, 2), (5, 8, 4)]
)
def test_micro_batches_never_cross_a_leaf_and_every_rank_has_the_same_number(W, K, B):
    """Tokens identify a row's place in the step. `block` alone gives the leaf of a lane's rows."""
    n, rows = R // CONFIG.V, [tokens[:-1].tolist() for tokens, _ in step_rows()[0]]
    assert len({tuple(row) for row in rows}) == len(rows)
    num_leaves = K if K % W == 0 else W
    leaf_of = {
        n * lane + i: j
        for j in range(num_leaves)
        for lane in block(j, num_leaves, 8)
        for i in range(n)
    }
    order = []
    counts = set()
    dead = 0
    for rank in range(W):
        with make_loader(device_batch_size=B, rank=rank, world_size=W, num_leaves=K) as loader:
            batches = take_step(loader)
        counts.add(len(batches))
        for batch in batches:
            assert batch.inputs.shape == (B, 16)
            live = alive(batch).tolist()
            assert live == sorted(live, reverse=True), "dead rows come last"
            assert (batch.inputs[~alive(batch)] == BOS).all()
            dead += live.count(False)
            numbers = [rows.index(batch.inputs[i].tolist()) for i in range(B) if live[i]]
            assert len({leaf_of[i] for i in numbers}) <= 1
            order += numbers
    assert order == list(range(len(rows))) and len(counts) == 1
    layout = StepLayout(8, R, B, 0, W, K)
    assert layout.dead_share == pytest.approx(dead / (dead + len(rows)))
    if (W, K, B) == (1, 4, 5):
        assert dead, "the case: leaves of 6 rows in batches of 5"


# ---- state ---------------------------------------------------------------------------------------


def wait_until_full(loader):
    """Until the thread has filled all slots."""
    while loader._filled.qsize() < loader.num_slots:
        threading.Event().wait(0.001)


def test_a_whole_step_is_ready_in_advance():
    with make_loader(rows_per_step=48, device_batch_size=1) as loader:
        assert loader.micro_batches_per_step > module.PREFETCH, "the case"
        wait_until_full(loader)
        ready = [loader._filled.get(timeout=10) for _ in range(loader.micro_batches_per_step)]
        assert ready[-1].end is not None and ready[-1].end.steps == 1


def test_the_state_excludes_prefetched_rows_that_were_not_used():
    with Ranks(CONFIG, {"b": fixed_source()}, n=3, W=1, tokenizer="bytes") as ranks:
        before = ranks.cursors()
        ranks.step()
        after = ranks.cursors()
    with make_loader() as loader:
        wait_until_full(loader)
        assert loader.cursors() == before and loader.step == 0
        for _ in range(5):
            next(loader)
            assert loader.cursors() == before and loader.step == 0, "in the middle of a step"
        next(loader)
        assert json_copy(loader.cursors()) == after and loader.step == 1


def test_a_loader_that_is_one_step_ahead_knows_the_state_before_that_step():
    """Regression: a save of the step before had the phase of the next one."""
    phases = [Phase(CONFIG.T * R, {"b": 1}), Phase(10**6, {"b": 1})]
    with make_loader(replace(CONFIG, curriculum=Curriculum(phases, {"b": 0}))) as loader:
        before = loader.cursors()
        take_step(loader)
        assert (loader.step, loader.phase(0), loader.phase()) == (1, 1, 2)
        assert loader.cursors(0) == before != loader.cursors()


# ---- ends and errors -----------------------------------------------------------------------------


def test_an_exception_in_the_source_surfaces_in_next_with_its_cause_and_close_joins(monkeypatch):
    before, source = set(threading.enumerate()), fixed_source(num_groups=20)
    third, read = int(permutation(20, 0, "b", 0)[2]), source.read

    def failing(group, *args):
        if group == third:
            raise ValueError("shard_00003: cannot be read") from OSError("the disk is on fire")
        return read(group, *args)

    monkeypatch.setattr(source, "read", failing)
    loader = make_loader(replace(CONFIG, V=1), source, rows_per_step=1, device_batch_size=1)
    assert alive(next(loader)).all(), "the case: it fails in the middle"
    for _ in range(2):  # the error stays for later calls
        with pytest.raises(ValueError, match="shard_00003: cannot be read") as caught:
            drain(loader)
        assert isinstance(caught.value.__cause__, OSError)
    loader.close()
    assert set(threading.enumerate()) <= before


def test_the_error_names_the_lane_that_has_too_few_rows():
    """Lane 1 runs dry after the first of its two rows of a step, and before lane 0."""
    config = StreamConfig(T=8, V=2, layout="concat", max_epochs=1, unit_size=1)
    source = [[7] * 16 + [1] * 16]
    with Ranks(config, {"b": numbered(source)}, n=1, W=1) as ranks:
        rows = Counter(row.lane for row in ranks.streams[0].next_rows(100))
    assert rows[1] % 2 and rows[1] < rows[0] - 1, "the case"
    with make_loader(config, numbered(source), rows_per_step=4) as loader:
        with pytest.raises(
            Dry, match=f"step {rows[1] // 2}: lane 1 has no rows left, because the bucket 'b' has"
        ):
            drain(loader)
