"""Batches: document ids, leaves, closing, validation, threads, and nanochat's loaders."""

import re
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from dataclasses import replace

import pytest
import torch

import nanochat.dataloader as module
from nanochat.common import Stop, check_stop
from nanochat.dataloader import (
    StepLayout,
    default_leaves,
    validation_config,
    validation_loader,
    validation_prompts,
)
from nanochat.integrations import nanochat_loaders
from nanochat.order import StreamConfig
from nanochat.run_summary import padding_note
from nanochat.stream import Stream
from tests.spec.test_dataloader import CONFIG, R, alive, make_loader, take_step
from tests.toy import (
    BOS,
    ByteTokenizer,
    fixed_source,
    json_copy,
    numbered,
    some_texts,
    write_parquet,
)

# ---- batches -------------------------------------------------------------------------------------


def test_quiet_gc_freezes_existing_objects():
    code = (
        "import gc; from nanochat.cli import quiet_gc; quiet_gc(); "
        "print(gc.get_threshold()[0], gc.get_count()[0] < 100, gc.get_freeze_count() > 1000, gc.isenabled())"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["100000", "True", "True", "True"]


def test_doc_ids_are_those_of_the_rows_and_0_in_dead_rows():
    stream = Stream(
        CONFIG, {"b": fixed_source()}, range(CONFIG.V), tokenizer="bytes", num_threads=1
    )
    with (
        make_loader(device_batch_size=R) as full,
        make_loader(device_batch_size=5, with_doc_ids=True) as padded,
    ):
        for _ in range(8):  # the last batch of a step is in another slot each time
            expected = [row.doc_ids()[:-1].tolist() for row in stream.next_rows(R // CONFIG.V)]
            take_step(full)
            batches = take_step(padded)
            last = batches[-1]
            assert [ids for b in batches for ids in b.doc_ids[alive(b)].tolist()] == expected
            assert alive(last).tolist() == [True] * 4 + [False] and not last.doc_ids[4].any()
            assert last.num_docs == sum(len({*ids}) for ids in last.doc_ids.tolist())
            assert last.doc_ids.dtype == torch.int32 and padded.digest == full.digest
    stream.close()
    assert max(map(max, expected)) > 0, "the case: several documents in a row"


# ---- layout --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "W, V, K", [(1, 64, 1), (2, 64, 2), (3, 64, 4), (8, 64, 8), (5, 6, 4), (6, 6, 4), (1, 1, 1)]
)
def test_default_leaves_is_the_next_power_of_two_but_at_most_the_lanes(W, V, K):
    assert default_leaves(W, V) == K == StepLayout(V, V, 1, 0, W, K).num_leaves


@pytest.mark.parametrize(
    "W, K, B, percent, divided", [(1, 4, 3, 33, 4), (2, 1, 7, 43, 8), (3, 4, 8, 33, 6)]
)
def test_the_note_on_padding_names_the_batch_sizes_with_the_least_of_it(W, K, B, percent, divided):
    """Regression: 3 processes on 8 lanes were told to avoid it with a divisor of 5."""
    layout = StepLayout(8, 16, B, 0, W, K)
    text = padding_note(layout)
    assert text.startswith(f"{percent}% of") and f"divides {divided}," in text
    rows = int(re.search(r"divides (\d+)", text)[1])
    shares = {size: replace(layout, device_batch_size=size).dead_share for size in range(1, 17)}
    best = [size for size, share in shares.items() if share == min(shares.values())]
    assert best == [size for size in shares if rows % size == 0]


# ---- ends and errors -----------------------------------------------------------------------------


def test_the_leaves_of_a_layout_are_listed_once_however_many_micro_batches_ask_for_one():
    layout = StepLayout(8, 8, 1, num_leaves=8)
    assert layout.leaves is layout.leaves and layout.rows_of(3, 0) == range(3, 4)


def test_closing_in_the_middle_of_a_step_only_finishes_reads_in_progress(monkeypatch):
    config = StreamConfig(T=64, V=16, buffer_size=64, unit_size=2)
    before = set(threading.enumerate())
    source = fixed_source(num_groups=30, group_size=20)
    reached = threading.Event()
    resume = threading.Event()
    read = source.read

    def gated(*args):
        if len(source.reads) == 19:
            reached.set()
            resume.wait(20)
        return read(*args)

    monkeypatch.setattr(source, "read", gated)
    loader = make_loader(config, source, rows_per_step=160)
    assert reached.wait(20)
    closing = threading.Thread(target=loader.close)
    closing.start()
    while not loader.stream.pool._shutdown:
        threading.Event().wait(0.001)
    resume.set()
    closing.join(20)
    assert not closing.is_alive() and set(threading.enumerate()) <= before
    assert len(source.reads) <= 21


@pytest.mark.parametrize("num_threads", [0, 1])
def test_closing_a_loader_ends_the_waits_of_its_threads(monkeypatch, num_threads):
    source = fixed_source()
    waiting = threading.Event()
    reasons = []

    def read(*args):
        waiting.set()
        try:
            for _ in range(2000):  # object storage would be patient for minutes
                check_stop()
                time.sleep(0.01)
        except Stop as e:
            reasons.append(e.reason)
            raise

    monkeypatch.setattr(source, "read", read)
    loader = make_loader(source=source, num_threads=num_threads)
    assert waiting.wait(20)
    loader.close()
    assert {*reasons} == {"the loader is closed"}


# ---- validation ----------------------------------------------------------------------------------


def val_rows(source, T, **kwargs):
    """Counter of the live rows of one rank, and the number of batches."""
    rows = Counter()
    batches = list(
        validation_loader(
            source, tokenizer=ByteTokenizer(), T=T, device="cpu", num_threads=1, **kwargs
        )
    )
    for batch in batches:
        assert batch.inputs.shape == batch.targets.shape == (kwargs["device_batch_size"], T)
        for i in torch.nonzero(alive(batch)).flatten().tolist():
            rows[(*batch.inputs[i].tolist(), *batch.targets[i].tolist())] += 1
    return rows, len(batches)


def test_prompts_come_from_all_buckets_in_turn():
    """Regression: all six were of the first bucket."""
    sources = {
        "a": fixed_source(),
        "b": fixed_source(num_groups=1, group_size=1),
        "c": fixed_source(group_size=8),
    }
    alone = {
        name: validation_prompts({name: source}, ByteTokenizer(), 32)
        for name, source in sources.items()
    }
    a, b, c = alone.values()
    assert len(b) == 2 and a[:3] != c[:3], "the case"
    together = validation_prompts(sources, ByteTokenizer(), 32)
    assert together == [a[0], b[0], c[0], a[1], b[1], c[1]]


def test_prompts_begin_like_documents_however_few_there_are():
    """Regression: with little validation data, padding rows became empty prompts."""
    for num_groups in (1, 40):
        source = fixed_source(num_groups=num_groups, group_size=2)
        prompts = validation_prompts({"b": source}, ByteTokenizer(), 32)
        assert 0 < len(prompts) <= module.NUM_PROMPTS and (num_groups == 1) == (
            len(prompts) < module.NUM_PROMPTS
        )
        assert all(prompt[0] == BOS and len(prompt) > 1 for prompt in prompts)


@pytest.mark.parametrize("num_tokens", [1, 600, 10**9])
def test_validation_rows_are_the_same_for_every_world_and_batch_size(num_tokens):
    source = fixed_source(num_groups=80, group_size=13)
    V = validation_config(source, 32).V
    assert V == 8
    reference, _ = val_rows(source, 32, device_batch_size=1, num_tokens=num_tokens)
    for W, B in ((1, 50), (2, 1), (3, 4), (11, 4)):
        ranks = [
            val_rows(source, 32, device_batch_size=B, num_tokens=num_tokens, rank=r, world_size=W)
            for r in range(W)
        ]
        assert sum((rows for rows, _ in ranks), Counter()) == reference
        assert all(batches == 0 for _, batches in ranks[V:]), "ranks beyond the lanes have none"
    rows = sum(reference.values())
    assert rows == (8 if num_tokens == 1 else 16 if num_tokens == 600 else rows)


def test_validation_is_one_pass_at_most_and_drops_nothing():
    source = numbered([[(7 * i) % 90 for i in range(40)] for _ in range(15)])
    rows, _ = val_rows(source, 16, device_batch_size=3, num_tokens=10**9)
    live = Counter(
        t
        for row, count in rows.items()
        for t in row[16:]
        if t not in (-100, BOS)
        for _ in range(count)
    )
    total = sum(len(ids) for group in source.documents for ids in group)
    V = validation_config(source, 16).V
    assert set(live.values()) == {1} and V == 4
    assert total - V * 17 <= len(live) <= total  # each lane leaves less than a row


# ---- nanochat's loaders --------------------------------------------------------------------------


@pytest.fixture(params=["_bos_bestfit", ""])
def make(request, tmp_path, monkeypatch):
    """A way to make two of nanochat's loaders, with state and without, whose default data set and
    tokenizer are tiny. This process is the only one."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("nanochat.dist.autodetect_device_type", lambda: "cpu")
    monkeypatch.setattr(nanochat_loaders, "get_tokenizer", ByteTokenizer)
    for i, name in enumerate(("shard_00000", "shard_00001", "shard_06542")):
        texts = [f"{name} {text}" for text in some_texts(60, seed=i)]
        write_parquet(tmp_path / "data" / "climbmix" / f"{name}.parquet", texts, 16)

    def new(split="train", T=32, *, state=True, **kwargs):
        name = "tokenizing_distributed_data_loader" + "_with_state" * state + request.param
        tokenizer = [ByteTokenizer()] if request.param else []
        return getattr(module, name)(
            *tokenizer, 4, T, split, tokenizer_threads=1, buffer_size=64, **kwargs
        )

    new.layout = "bestfit" if request.param else "concat"
    return new


def some(loader, n):
    """The first n items of a loader, which is then closed."""
    try:
        return [next(loader) for _ in range(n)]
    finally:
        loader.close()


@pytest.mark.parametrize("split", ["train", "val"])
def test_nanochat_loaders_yield_batches_and_a_state_of_plain_values(make, monkeypatch, split):
    text = b""
    for (inputs, targets, state), (x, y) in zip(
        some(make(split), 8), some(make(split, state=False), 8), strict=True
    ):
        assert torch.equal(inputs, x) and torch.equal(targets, y), "the same without a state"
        text += bytes(t for t in inputs.flatten().tolist() if t < 256)
        assert (
            inputs.shape == targets.shape == (4, 32)
            and inputs.dtype == targets.dtype == torch.int64
        )
        assert torch.equal(inputs[:, 1:], targets[:, :-1]), "nothing is off"
        assert make.layout == "concat" or (inputs[:, 0] == BOS).all()
        assert (state["rank"], state["world_size"]) == (0, 1) and json_copy(state) == state
        assert state["epoch"] >= 1 and state["pq_idx"] in ((0, 1) if split == "train" else (2,))
        assert state["rg_idx"] in range(4)
    assert (b"06542" in text) == (split == "val")
    monkeypatch.setattr("nanochat.dist.autodetect_device_type", lambda: "meta")
    [(inputs, _)] = some(make(split, state=False), 1)
    assert inputs.device.type == "meta", "regression: the default was always cuda"


def test_nanochat_loaders_resume_with_the_very_next_row(make):
    straight = some(make(), 134)
    for at in (0, 3, 8, 130):
        resumed = some(make(resume_state_dict=json_copy(straight[at][2])), 3)
        for (x, y, state), (x2, y2, state2) in zip(straight[at + 1 :], resumed):
            assert (
                torch.equal(x, x2) and torch.equal(y, y2) and json_copy(state) == json_copy(state2)
            )
    assert straight[130][2]["epoch"] > 1, "the case: past the first epoch"


def test_nanochat_loaders_refuse_the_state_of_another_rank_or_loader(make, monkeypatch):
    def be_rank(rank, world_size):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
            monkeypatch.setenv(name, str(value))

    def refused(words, *args, **kwargs):
        with pytest.raises(ValueError, match=words):
            next(make(*args, **kwargs))

    be_rank(1, 2)
    state = some(make(), 2)[1][2]
    assert (state["rank"], state["world_size"]) == (1, 2)
    assert len(some(make(resume_state_dict=state), 1)) == 1
    refused("T was 32, now 16", T=16, resume_state_dict=state)
    refused("split: got 'test'", "test")
    # Regression: the state of nanochat's own loaders raised KeyError: 'rank'.
    refused(
        "it has no 'cursors', 'rank', 'world_size'.*: start without resume_state_dict",
        resume_state_dict={"pq_idx": 1, "rg_idx": None},
    )
    for rank, world_size in ((0, 2), (1, 4), (0, 1)):
        be_rank(rank, world_size)
        refused(
            rf"rank 1 of 2, but this is rank {rank} of {world_size}.*DataLoader",
            resume_state_dict=state,
        )


def test_the_prefetch_thread_uses_its_own_gpu_and_sleeps_while_it_waits(monkeypatch):
    """Otherwise each rank's thread would open a context on GPU 0. Slots are real, but their device
    is a fake."""
    calls, new_slot = [], module.Slot

    class Event:
        def __init__(self, blocking):
            calls.append(("event", blocking))

        def record(self):
            pass

        synchronize = record

    def fake_slot(B, T, bos, device, **kwargs):
        slot = new_slot(B, T, bos, torch.device("cpu"), **kwargs)
        slot.device = types.SimpleNamespace(type="cuda")
        monkeypatch.setattr(
            torch.Tensor,
            "to",
            lambda self, *args, to=torch.Tensor.to, **kwargs: to(
                self, *(a for a in args if isinstance(a, torch.dtype)), **kwargs
            ),
        )
        return slot

    monkeypatch.setattr(module, "Slot", fake_slot)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: calls.append((threading.current_thread().name, device)),
    )
    with make_loader(device="cuda:3") as loader:
        next(loader)
    assert set(calls) == {("prefetch", torch.device("cuda:3")), ("event", True)}


@pytest.mark.parametrize(
    ("state", "rank", "world_size", "warns"),
    [(True, 0, 2, True), (True, 1, 2, False), (True, 0, 1, False), (False, 0, 2, False)],
)
def test_a_nanochat_loader_with_state_says_at_once_that_it_serves_its_own_rank(
    make, monkeypatch, caplog, state, rank, world_size, warns
):
    """Regression: nanochat saves the state of rank 0 alone, and the other ranks failed when they
    resumed."""
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
        monkeypatch.setenv(name, str(value))
    loader = make(state=state)
    assert (
        "has the place of its own rank only: each of the 2 ranks must save its own" in caplog.text
    ) == warns
    loader.close()
