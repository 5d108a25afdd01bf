"""Settings and fixtures of all tests. Laws have no deadline per example, because the machine may be
busy.

    pytest --hypothesis-profile=thorough     # many more examples: after a change to code that a law checks

Laws with expensive examples take a share of the profile's number, `tests.toy.examples(0.4)`."""

import gc
import getpass
import os
import signal
import tempfile
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

gc.disable()  # until all tests are collected, which creates a million objects and almost no garbage
slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=20, **slow)
settings.register_profile("thorough", max_examples=500, **slow)
settings.load_profile("quick")
# Hypothesis draws numbers that occur in the code of loaded modules, which depend on the test files
# that the process ran before. So on a busy machine, laws of the same seed would get other examples.
providers.is_local_module_file = lambda path: False
# Inductor trusts the processor's list of vector instructions, and compiles no program to try each
# one.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Inductor's disk cache ignores ATEN_CPU_CAPABILITY: it would compile code generated for AVX2 for
# AVX-512, whose vectors are twice as wide, and overwrite memory. So each capability has its own
# cache.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(
        tempfile.gettempdir(),
        f"nanochat_tests_{getpass.getuser()}",
        os.environ.get("ATEN_CPU_CAPABILITY", "native"),
    ),
)
# A process that a shell starts in the background ignores SIGINT, one started with nohup SIGHUP, and
# so would all of its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


LONG_FILES = (
    "state_machine",
    "gpu_check",
    "bitwise",
    "optim",
    "watchdog",
    "repeat",
    "object_storage",
    "gpu_first",
    "gpu_smoke",
    "remote_runs",
    "inspect_data",
    "example",
    "stream_laws",
    "multi_node",
)


def pytest_collection_finish():
    """From here on, the garbage collector ignores what exists now."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    """Start with the long files: a long file that starts last runs alone at the end."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG_FILES)


@pytest.fixture(scope="session", autouse=True)
def no_waits_for_the_disk():
    """`os.fsync` returns at once: files of tests need not survive a power cut, and laws write
    hundreds."""
    with mock.patch("os.fsync", lambda fd: None):
        yield


@pytest.fixture
def base_dir(tmp_path, monkeypatch):
    """The test's own base directory, which does not exist yet."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The base directory of a finished run, for reading only."""
    from tests import finished

    path = tmp_path_factory.mktemp("finished").resolve()
    finished.train(path)
    return path


@pytest.fixture
def copied(finished, tmp_path):
    """A base directory with a copy of that run, for this test."""
    from tests import finished as module
    from tests import training

    with training.workplace(tmp_path.resolve(), **module.RUN) as path:
        module.copy(finished, path)
        yield path


@pytest.fixture(scope="module")
def running_store():
    """An object store on this machine."""
    from tests.object_store import object_store

    with object_store() as store:
        yield store


@pytest.fixture
def calm_store(running_store, monkeypatch):
    """That store without faults, and a client with short timeouts that knows none of its
    objects."""
    from nanochat import common
    from nanochat.integrations import object_storage as store
    from tests.object_store import QUICK

    monkeypatch.setattr(store, "PATIENCE", QUICK)
    common.begin_launch()
    running_store.calm()
    yield running_store
    running_store.calm()
