"""A journal tells each step and each event once to every sink; a sink behind the door may fail."""

import logging
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanochat.run_journal import Journal, Optional, check_digest
from nanochat.steps import Sink


class Recorder(Sink):
    """Appends what it receives to a list that all sinks of a test share."""

    def __init__(self, name, calls):
        self.name = name
        self.calls = calls

    def event(self, name, step, record):
        self.calls.append((self.name, name, step, record))

    def step(self, report):
        self.calls.append((self.name, report))

    def end(self, status, reason):
        self.calls.append((self.name, status, reason))

    def close(self):
        self.calls.append((self.name, "closed"))


@pytest.fixture
def calls():
    return []


@pytest.fixture
def journal(calls):
    return Journal([Recorder("log", calls), Recorder("screen", calls)])


def test_law_every_sink_receives_every_report_once_in_the_order_of_the_sinks(journal, calls):
    journal.step("step 1")
    journal.event("val", 1, bpb=1.5)
    assert calls == [
        ("log", "step 1"),
        ("screen", "step 1"),
        ("log", "val", 1, {"bpb": 1.5}),
        ("screen", "val", 1, {"bpb": 1.5}),
    ]


def test_the_end_of_a_run_is_an_event_before_it_ends_a_sink(journal, calls):
    journal.end("halted", 9, "bucket web ran dry")
    assert [call for call in calls if call[0] == "log"] == [
        ("log", "halted", 9, {"reason": "bucket web ran dry"}),
        ("log", "halted", "bucket web ran dry"),
    ]


def test_every_sink_is_closed(journal, calls):
    journal.close()
    assert calls == [("log", "closed"), ("screen", "closed")]


def test_a_rank_without_sinks_reports_nothing():
    journal = Journal()
    journal.step("step 1")
    journal.end("completed", 9)
    journal.close()


class Broken(Sink):
    """Fails at its second step."""

    def __init__(self, run):
        self.steps = run.steps

    def step(self, report):
        self.steps.append(report)
        if len(self.steps) == 2:
            raise ConnectionError("the service is gone")


def test_a_sink_behind_the_door_that_fails_is_dropped_with_one_warning(caplog):
    run = SimpleNamespace(steps=[])
    sink = Optional("tracker", f"{__name__}:Broken", run)
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            sink.step(number)
        sink.end("completed", "")
    assert run.steps == [0, 1]
    [message] = caplog.messages
    assert "tracker" in message and "the service is gone" in message and "continuing" in message


class Hanging(Sink):
    """Hangs in one of its methods, and takes every error there for one of the network."""

    def __init__(self, run):
        self.run = run
        self.reach("__init__")

    def reach(self, method):
        self.run.calls.append(method)
        try:
            if method == self.run.hangs_in:
                threading.Event().wait()
        except Exception:
            threading.Event().wait()

    def event(self, name, step, record):
        self.reach("event")

    def step(self, report):
        self.reach("step")

    def ending(self, reason):
        self.reach("ending")

    def end(self, status, reason):
        self.reach("end")

    def close(self):
        self.reach("close")


METHODS = ["__init__", "event", "step", "ending", "end", "close"]


class SlowToOpen(Sink):
    """It may ask the user for a key first."""

    def __init__(self, run):
        time.sleep(0.3)


def test_a_sink_behind_the_door_may_take_long_to_open(monkeypatch):
    monkeypatch.setattr(Sink, "answer_s", 0.1)
    sink = Optional("tracker", f"{__name__}:SlowToOpen", SimpleNamespace())
    assert isinstance(sink.sink, SlowToOpen)


@pytest.mark.parametrize("hangs_in", METHODS[1:])
def test_a_sink_behind_the_door_that_hangs_is_dropped_with_one_warning(
    hangs_in, caplog, monkeypatch
):
    """Regression: a tracker whose last call hung kept a completed run alive, and "running"."""
    monkeypatch.setattr(Sink, "answer_s", 0.1)
    run = SimpleNamespace(calls=[], hangs_in=hangs_in)
    before = signal.getsignal(signal.SIGALRM)
    sink = Optional("tracker", f"{__name__}:Hanging", run)
    sink.event("val", 1, {})
    sink.step(1)
    sink.ending("SIGTERM")
    sink.end("stopped", "SIGTERM")
    sink.close()
    assert run.calls == METHODS[: METHODS.index(hangs_in) + 1]
    [message] = caplog.messages
    assert "tracker" in message and "hung" in message and "continuing" in message
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_sink_that_cannot_be_opened_is_dropped_with_one_warning(caplog):
    sink = Optional("tracker", f"{__name__}:Missing", SimpleNamespace())
    sink.step(1)
    [message] = caplog.messages
    assert "tracker" in message and "continuing" in message


def test_a_step_with_another_digest_than_the_run_recorded_is_refused():
    with pytest.raises(ValueError, match=r"step 3: .*ff.*recorded ee.*--init-from=d4"):
        check_digest(Path("/runs/d4"), 3, "ff", "ee")


@pytest.mark.parametrize("digest, expected", [("ff", "ff"), (None, "ee"), ("ff", None)])
def test_an_equal_or_an_unknown_digest_is_no_difference(digest, expected):
    check_digest(Path("/runs/d4"), 3, digest, expected)


CALLS = []


class Late(Sink):
    """An optional sink that writes its last file when it is closed."""

    def __init__(self, run):
        CALLS.clear()

    def close(self):
        CALLS.append("sink closed")


class State(Sink):
    def end(self, status, reason):
        CALLS.append("run given up")


def test_an_optional_sink_is_closed_once_and_before_the_run_is_given_up():
    journal = Journal([Optional("late", f"{__name__}:Late", None), State()])
    journal.end("completed", 3)
    journal.close()
    assert CALLS == ["sink closed", "run given up"]
