"""Six doors (and object storage): without the part behind one of them, the core still trains."""

import sys
from functools import partial
from pathlib import Path

import pytest

from nanochat.packing import LAYOUTS
from tests import training

TWO_STEPS = {"num_iterations": 2, "save_every": -1, "eval_every": 2}
INTEGRATIONS = sorted(
    path.stem for path in (Path(__file__).parents[2] / "nanochat/integrations").glob("[!_]*.py")
)
# {door: the modules behind it}, without what the run of a test needs
PARTS = {
    "SOURCES, without token files": ["nanochat.token_source", "nanochat.tokens"],
    "ORDERS, without Megatron's": [
        f"nanochat.integrations.{name}" for name in INTEGRATIONS if name.startswith("megatron")
    ],
    "TOKENIZERS, without those of other programs": [
        "nanochat.integrations.third_party_tokenizers",
        "nanochat.integrations.fast_encoders",
    ],
    "SINKS, without trackers": ["nanochat.integrations.trackers"],
    "STORAGE, without object storage": ["nanochat.integrations.object_storage"],
    "STORAGE, without the Hub and the web": [
        f"nanochat.integrations.{name}" for name in ("hub", "web", "web_client", "range_cache")
    ],
    "MIRROR, without mirrors": [
        "nanochat.mirror",
        *(f"nanochat.mirror_{name}" for name in ("fetch", "marks", "owner", "store")),
    ],
    "all integrations": [f"nanochat.integrations.{name}" for name in INTEGRATIONS],
}


@pytest.fixture(scope="module", autouse=True)
def workplace(tmp_path_factory):
    with training.workplace(tmp_path_factory.mktemp("doors"), **training.SMALL) as folder:
        training.write_buckets(folder, {"web": 60}, shards=0)
        yield folder


class Missing:
    """A finder of modules that finds none of `names`, as if their files were deleted."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def remove(names):
    """Make modules unimportable."""
    for name in names:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Missing(names))


def remove_layouts():
    for name in set(LAYOUTS) - {"bestfit"}:
        del LAYOUTS[name]


def digests_without(hook, tag, **changed):
    """The digests of a run of two steps in a process that calls `hook` first."""
    run = training.start(hook=hook, model_tag=tag, **{**TWO_STEPS, **changed})
    assert run.wait() == [0], run.text()
    return training.digests(tag)


@pytest.fixture(scope="module")
def whole(workplace):
    """The digests of a run with everything."""
    return digests_without(None, "whole")


@pytest.mark.parametrize("door", PARTS)
def test_a_run_from_text_needs_no_part_behind_the_door(whole, door):
    tag = f"part{[*PARTS].index(door)}"
    assert digests_without(partial(remove, PARTS[door]), tag) == whole and len(whole) == 2


def test_a_run_needs_no_layout_but_its_own(whole):
    assert digests_without(remove_layouts, "layouts") == whole


def test_a_run_from_token_files_needs_no_reader_of_text(workplace):
    text = ["nanochat.parquet_source", "nanochat.text_kinds", "nanochat.spill"]
    shards = {"data_path": workplace / "shards", "data_format": "shards"}
    with_text = digests_without(None, "shards", **shards)
    assert digests_without(partial(remove, text), "only_shards", **shards) == with_text
    assert len(with_text) == 2


def test_a_part_that_is_removed_is_named_when_it_is_asked_for(workplace):
    run = training.start(
        hook=partial(remove, PARTS["ORDERS, without Megatron's"]),
        order="megatron",
        model_tag="none",
    )
    assert run.wait() == [1] and "nanochat.integrations.megatron_order" in run.text()


# what only the modules behind a door know about, and which core modules may name it: the tables of
# names, and the formats of token files
WORDS = {
    "megatron": {"order", "config", "files", "tokens", "tokenizer", "pretokenize"},
    "tensorboard": {"sinks"},
    "trackio": {"sinks"},
    "fastokens": {"tokenizer"},
    "obstore": set(),
    "s3://": {"common"},
    "msc:": set(),
    "urllib3": set(),
    "sentencepiece": set(),
}


@pytest.mark.parametrize("word", WORDS)
def test_the_core_does_not_name_what_is_behind_a_door(word):
    core = (Path(__file__).parents[2] / "nanochat").glob("*.py")
    naming = {path.stem for path in core if word in path.read_text().lower()}
    assert naming == WORDS[word]
