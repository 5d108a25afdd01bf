"""Saving in a thread: what is written is what was copied, one at a time, errors are judged, and no state is lost."""

import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat import checkpoint as ckpt
from nanochat.checkpoint import MAX_ERRORS, NICE, Code, Outcome, Policy, Saver, prune, to_host
from nanochat.dist import map_tensors
from nanochat.gpt import GPT, GPTConfig
from nanochat.run_dir import clean_stale
from tests import faults
from tests.test_checkpoint import bits, hidden, states

FULL = OSError(errno.ENOSPC, "No space left on device")


def writer(run: Path, step: int, **changed: Any) -> Callable[[], Path]:
    values = {**states(step), **changed}
    return lambda: ckpt.save_checkpoint(run, f"checkpoint-{step}", step=step, **values)


def fail(error: Exception = FULL) -> Callable[[], Path]:
    def write() -> Path:
        raise error
    return write


def last(saver: Saver) -> Outcome:
    """Wait, and take the one outcome there is."""
    saver.wait()
    outcome = saver.poll()
    assert outcome is not None and saver.poll() is None
    return outcome


class Gate:
    """A writer that waits until it is let go, and tells that it runs, and in which thread."""

    def __init__(self, write: Callable[[], Path]) -> None:
        self.write, self.running, self.go = write, threading.Event(), threading.Event()
        self.thread = ""

    def __call__(self) -> Path:
        self.thread = threading.current_thread().name
        self.running.set()
        assert self.go.wait(60)
        return self.write()


# ---- host copies ----------------------------------------------------------------------------------------------------

def pointers(value: Any) -> list[int]:
    """Where the tensors of a state lie."""
    found: list[int] = []
    map_tensors(value, lambda tensor, where: found.append(tensor.data_ptr()) or tensor, "state")
    return found


def state(fill: float) -> dict[str, Any]:
    return {"w": torch.nn.Parameter(torch.full((4, 3), fill)), "t": torch.full((2, 5), fill).T,
            "deep": [{"step": torch.tensor(fill)}, (torch.full((3,), fill, dtype=torch.bfloat16), "x", fill)]}


def test_a_second_copy_fills_the_memory_of_the_first() -> None:
    first = to_host(state(1.0))
    where = pointers(first)
    second = to_host(state(2.0), into=first)
    assert pointers(second) == where and len(set(where)) == 4
    assert bits(second) == bits(to_host(state(2.0))) and second["deep"][1][2] == 2.0
    assert second["t"].is_contiguous() and not second["w"].requires_grad


def test_what_does_not_fit_the_first_gets_memory_of_its_own() -> None:
    first = to_host({"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(4), 1: torch.zeros(2)})
    new = {"a": torch.ones(4), "b": torch.ones(3).bfloat16(), "c": torch.ones(4), "d": torch.ones(3),
           "1": torch.ones(2)}
    second = to_host(new, into=first)
    assert bits(second) == bits(new)
    shared = set(pointers(second)) & set(pointers(first))
    assert shared == {first["c"].data_ptr()}


def test_tensors_that_share_memory_are_copied_apart() -> None:
    w = torch.ones(3)
    first = to_host({"head": w, "wte": w})
    second = to_host({"head": w, "wte": w * 2}, into=first)
    assert second["head"].tolist() == [1, 1, 1] and second["wte"].tolist() == [2, 2, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_copies_from_a_gpu_are_pinned_complete_and_used_again() -> None:
    w = torch.randn(1 << 22, device="cuda")
    first = to_host({"w": w})
    assert first["w"].is_pinned() and torch.equal(first["w"], w.cpu())
    w.mul_(2)
    second = to_host({"w": w}, into=first)
    w.zero_()
    assert second["w"].data_ptr() == first["w"].data_ptr() and second["w"].abs().max() > 0


# ---- the thread -----------------------------------------------------------------------------------------------------

def test_a_save_runs_while_the_loop_goes_on_and_is_told_once(tmp_path: Path) -> None:
    saver = Saver(good=None)
    live = states(7)
    copied = to_host(live["model_state"])
    gate = Gate(writer(tmp_path, 7, model_state=copied))
    saver.start(gate)
    assert gate.running.wait(60) and gate.thread.startswith("saver") and saver.poll() is None
    for tensor in live["model_state"].values():  # the next step
        tensor.zero_()
    gate.go.set()
    outcome = last(saver)
    assert outcome.code == Code.SAVED and outcome.path == tmp_path / "checkpoints" / "checkpoint-7"
    assert str(outcome.path) in outcome.message and outcome.error is None and outcome.seconds > 0
    assert bits(ckpt.load_checkpoint(outcome.path).model_state()) == bits(dict(states(7)["model_state"]))
    saver.close()
    saver.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_the_thread_steps_back_and_no_other_does(tmp_path: Path) -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    seen: list[int] = []
    before, saver = nice(), Saver(good=None, prune=lambda good: seen.append(nice()))
    saver.start(writer(tmp_path, 1))
    assert last(saver).code == Code.SAVED and seen == [NICE] and nice() == before < NICE
    saver.close()


@pytest.mark.parametrize("what", ["start", "wait", "close"])
def test_only_one_save_is_in_flight(tmp_path: Path, what: str) -> None:
    saver = Saver(good=None)
    gate = Gate(writer(tmp_path, 1))
    saver.start(gate)
    assert gate.running.wait(60)
    calls = {"start": lambda: saver.start(writer(tmp_path, 2)), "wait": saver.wait, "close": saver.close}
    second = threading.Thread(target=calls[what])  # only to see that it waits
    second.start()
    second.join(0.1)
    assert second.is_alive() and ckpt.list_checkpoints(tmp_path) == []
    gate.go.set()
    second.join(60)
    assert not second.is_alive() and ckpt.newest_good(tmp_path) is not None
    saver.close()
    codes = []
    while (outcome := saver.poll()) is not None:
        codes.append((outcome.code, outcome.path and outcome.path.name))
    assert codes == [(Code.SAVED, "checkpoint-1"), (Code.SAVED, "checkpoint-2")][:2 if what == "start" else 1]


def test_poll_never_waits_and_outcomes_come_in_order(tmp_path: Path) -> None:
    saver = Saver(good=None)
    assert saver.poll() is None
    for step in (1, 2, 3):
        saver.start(writer(tmp_path, step))
    saver.wait()
    assert [getattr(saver.poll(), "path", Path()).name for _ in range(3)] == [f"checkpoint-{s}" for s in (1, 2, 3)]
    assert saver.poll() is None
    saver.close()


def test_copies_are_taken_into_the_same_memory_save_after_save(tmp_path: Path) -> None:
    saver = Saver(good=None)
    seen = set()
    for step in range(1, 5):
        saver.wait()
        saver.held = to_host({"w": torch.full((1000,), float(step))}, into=saver.held)
        seen.add(saver.held["w"].data_ptr())
        saver.start(writer(tmp_path, step, model_state=saver.held))
    saver.close()
    assert len(seen) == 1
    for step in range(1, 5):
        weights = ckpt.load_checkpoint(tmp_path / f"checkpoints/checkpoint-{step}").model_state()["w"]
        assert weights.tolist() == [float(step)] * 1000


def test_without_a_thread_the_save_is_done_when_start_returns(tmp_path: Path) -> None:
    saver = Saver(good=None, asynchronous=False)
    gate = Gate(writer(tmp_path, 1))
    gate.go.set()
    saver.start(gate)
    assert gate.thread == threading.current_thread().name
    outcome = saver.poll()
    assert outcome is not None and outcome.code == Code.SAVED and saver.poll() is None
    saver.start(fail())
    outcome = saver.poll()
    assert outcome is not None and outcome.code == Code.FAILED
    saver.close()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_older_checkpoints_go_after_each_save(tmp_path: Path, asynchronous: bool,
                                              caplog: pytest.LogCaptureFixture) -> None:
    saver = Saver(good=None, asynchronous=asynchronous,
                  prune=lambda good: prune(tmp_path, good=good, keep_last_k=2, keep_milestone_every=4))
    for step in range(1, 8):
        saver.start(writer(tmp_path, step))
        saver.wait()
        there = {int(path.name[11:]) for path in ckpt.list_checkpoints(tmp_path)}
        assert there == {step - 1, step} - {0} | ({4} if step > 4 else set())
    saver.close()
    refusing = Saver(good=None, asynchronous=asynchronous, prune=lambda good: fail()() and None)
    refusing.start(writer(tmp_path, 9))
    assert last(refusing).code == Code.SAVED, "what cannot be deleted does not undo a save"
    assert "were not deleted" in caplog.text
    refusing.close()


def test_a_model_saved_while_it_trains_on_is_the_one_of_that_step(tmp_path: Path) -> None:
    """The real model and optimizer, three saves, each held back until two more steps are done."""
    def train(run: Path, asynchronous: bool) -> None:
        model = GPT(GPTConfig(sequence_len=16, vocab_size=64, n_layer=2, n_head=2, n_kv_head=2, n_embd=32))
        model.init_weights(seed=1, compute_dtype=torch.float32)
        optimizer, saver = model.setup_optimizer(), Saver(good=None, asynchronous=asynchronous)
        gate = None
        for step in range(9):
            if step % 3 == 0:
                saver.wait()
                optimizer_state = optimizer.gather_state(into=saver.held.get("optimizer"))
                weights = to_host(model.state_dict(), into=saver.held.get("model"))
                saver.held = {"optimizer": optimizer_state, "model": weights}
                gate = Gate(writer(run, step, model_state=weights, optimizer_state=optimizer_state))
                if not asynchronous:
                    gate.go.set()
                saver.start(gate)
            tokens = torch.arange(step, step + 17)[None]
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            if step % 3 == 1 and gate is not None:
                gate.go.set()
        saver.close()

    for asynchronous in (True, False):
        train(tmp_path / str(asynchronous), asynchronous)
    weights = set()
    for step in (0, 3, 6):
        late, at_once = (ckpt.load_checkpoint(tmp_path / f"{way}/checkpoints/checkpoint-{step}")
                         for way in (True, False))
        assert bits(late.model_state()) == bits(at_once.model_state())
        assert bits(late.optimizer_state()) == bits(at_once.optimizer_state())
        weights.add(str(bits(late.model_state())))
    assert len(weights) == 3


# ---- errors ---------------------------------------------------------------------------------------------------------

def test_policy_goes_on_while_something_good_is_there(tmp_path: Path) -> None:
    good = writer(tmp_path, 5)()
    policy = Policy(good)
    for _ in range(3):
        for number in (1, 2):
            outcome = policy.failed(FULL, 0.1, last=False)
            assert outcome.code == Code.FAILED and outcome.path is None
            assert f"checkpoint-5 is kept (error {number} of {MAX_ERRORS} in a row)" in outcome.message
        assert policy.saved(good, 0.1).code == Code.SAVED  # the count starts again
    codes = [policy.failed(FULL, 0.1, last=False).code for _ in range(3)]
    assert codes == [Code.FAILED, Code.FAILED, Code.FATAL]


def test_policy_gives_up_where_going_on_is_of_no_use(tmp_path: Path) -> None:
    good = writer(tmp_path, 5)()
    for policy, ends, said in ((Policy(None), False, "no good checkpoint is left"),
                               (Policy(tmp_path / "checkpoints" / "checkpoint-4"), False, "no good checkpoint is left"),
                               (Policy(good), True, "checkpoint-5 is kept")):
        outcome = policy.failed(FULL, 0.1, last=ends)
        assert outcome.code == Code.FATAL and said in outcome.message and "Make room" in outcome.message
        assert isinstance(outcome.error, OSError) and outcome.error.errno == errno.ENOSPC
        assert outcome.error.strerror == outcome.message
    bug = TypeError("state['x']: a checkpoint holds tensors")
    outcome = Policy(good).failed(bug, 0.1, last=False)
    assert outcome.code == Code.FATAL and outcome.error is bug


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_survived_until_the_third_time(tmp_path: Path, asynchronous: bool) -> None:
    run = tmp_path
    saver = Saver(good=None, asynchronous=asynchronous)
    saver.start(writer(run, 1))
    assert last(saver).code == Code.SAVED
    codes = []
    for step in range(2, 5):
        with faults.failing_at(9, errno.ENOSPC, below=run) as changes:
            saver.start(writer(run, step))
            saver.wait()
        assert len(changes.made) > 9 and hidden(run) == [], "the failed folder is gone"
        outcome = last(saver)
        codes.append(outcome.code)
        assert f"checkpoint-{step} could not be written" in outcome.message and "No space left" in outcome.message
        good = ckpt.newest_good(run)
        assert good is not None and good.name == "checkpoint-1"
    assert codes == [Code.FAILED, Code.FAILED, Code.FATAL]
    saver.close()


def test_the_loaded_checkpoint_is_something_good_and_the_last_save_must_succeed(tmp_path: Path) -> None:
    good = writer(tmp_path, 1)()
    for options, code in (({}, Code.FAILED), ({"last": True}, Code.FATAL)):
        saver = Saver(good=good)
        saver.start(fail(), **options)
        assert last(saver).code == code
        saver.close()
    saver = Saver(good=None)
    saver.start(fail())
    assert last(saver).code == Code.FATAL
    saver.start(fail(ZeroDivisionError("a bug")))
    outcome = last(saver)
    assert outcome.code == Code.FATAL and isinstance(outcome.error, ZeroDivisionError)
    saver.close()


def test_codes_are_small_numbers_that_json_and_reductions_take() -> None:
    assert [int(code) for code in Code] == [0, 1, 2, 3] and json.dumps(Code.FATAL) == "3"
    assert float(torch.tensor([Code.NOTHING, Code.FAILED, Code.NOTHING], dtype=torch.float64).sum()) == Code.FAILED


def test_killed_while_the_thread_writes_and_prunes(tmp_path: Path) -> None:
    """At a sample of all changes that a save and its deletions make: the newest good one is the old or the new."""
    def train(run: Path) -> None:
        saver = Saver(good=run / "checkpoints" / "checkpoint-2",
                      prune=lambda good: prune(run, good=good, keep_last_k=1))
        saver.start(writer(run, 3))
        saver.close()

    for step in (1, 2):
        writer(tmp_path / "whole", step)()
    counted = shutil.copytree(tmp_path / "whole", tmp_path / "count")
    with faults.watching(counted) as changes:
        train(counted)
    renamed = next(i for i, change in enumerate(changes.made) if change.startswith("rename"))
    assert len(changes.made) - renamed > 20 and [p.name for p in ckpt.list_checkpoints(counted)] == ["checkpoint-3"]
    newest = set()
    for at in [*range(0, renamed, 60), *range(renamed, len(changes.made), 4)]:
        run = shutil.copytree(tmp_path / "whole", tmp_path / str(at))
        assert faults.kill_at(at, lambda run=run: train(run), below=run)
        clean_stale(run)
        good = ckpt.newest_good(run)
        assert good is not None and hidden(run) == []
        newest.add(good.name)
    assert newest == {"checkpoint-2", "checkpoint-3"}
