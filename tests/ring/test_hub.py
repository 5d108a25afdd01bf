"""Data of the Hub and of web servers: the same rows as from a downloaded copy, pinned by commit, kept
on disk, and one clear sentence for each failure. The server is on this machine
(tests/hub_server.py)."""

import pytest

from nanochat.common import begin_launch, read_json
from nanochat.integrations import web
from tests import training
from tests.hub_server import TOKEN, Fault, hub_server
from tests.training import refuse, run_dir, succeed

SET = "hf://datasets/own/set"
RUN = {**training.SMALL, "num_iterations": 4, "save_every": 2, "eval_every": 4}
QUICK = web.Patience(
    connect_s=1.0, silence_s=2.0, first_answer_s=0.5, give_up_s=5.0, first_pause_s=0.01
)


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.setattr(web, "PATIENCE", QUICK)
    with training.workplace(tmp_path) as path:
        yield path


@pytest.fixture
def hub(workplace):
    """A Hub that has the data of the workplace in data/."""
    with hub_server() as hub:
        hub.page = 3
        names = sorted((workplace / "data").glob("*.parquet"))
        hub.commit("own/set", {f"data/{path.name}": path.read_bytes() for path in names})
        yield hub


@pytest.fixture
def digests(workplace):
    """Those of a run from the downloaded copy."""
    succeed(**RUN, model_tag="local")
    return training.digests("local")


def train(path=SET, **changed):
    """The outcome of a run, and its digests."""
    outcome = succeed(**{**RUN, "data_path": path, **changed})
    return outcome, training.digests(changed.get("model_tag", "run"))


def test_a_run_from_the_hub_has_the_digests_of_a_downloaded_copy(hub, digests):
    assert train()[1] == digests and len(digests) == 4
