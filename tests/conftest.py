"""What all tests have in common: how many examples laws get, and that hypothesis does not mind how long one takes, on a
machine that may be busy.

    pytest --hypothesis-profile=thorough     # many more: after a change to what a law is about

Laws whose examples are dear take a share of the profile's number, `tests.toy.examples(0.4)`."""

import os
import signal
from unittest import mock

import pytest
from hypothesis import settings

settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile("quick")
# Inductor believes what the processor says of itself, and compiles no program to try each of its vector instructions.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# What a shell starts in the background ignores SIGINT, and so would every process that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_waits_for_the_disk():
    """What tests write need not survive a power cut, and laws write hundreds of files: `os.fsync` returns at once."""
    with mock.patch("os.fsync", lambda fd: None):
        yield


@pytest.fixture(scope="module")
def running_store():
    """An object store on this machine."""
    from tests.object_store import object_store

    with object_store() as store:
        yield store


@pytest.fixture
def calm_store(running_store, monkeypatch):
    """That store without faults, before a client of little patience that has seen nothing of it yet."""
    from nanochat import common, store
    from tests.object_store import QUICK

    monkeypatch.setattr(store, "PATIENCE", QUICK)
    common.begin_data()
    running_store.calm()
    yield running_store
    running_store.calm()
