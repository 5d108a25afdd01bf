"""Data of the Hub and of web servers: the rows of a downloaded copy, pinned by commit, kept on disk,
and one clear sentence for each failure. The server is on this machine (tests/hub_server.py)."""

import logging
import math
import os
import shutil
import threading
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest.mock import ANY

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import config
from nanochat.common import Stop, as_path, begin_launch, read_json, stops_if
from nanochat.config import flags_of_config
from nanochat.files import data_at, list_files
from nanochat.integrations import web, web_client
from nanochat.parquet_source import ParquetSource
from nanochat.pins import fingerprint
from nanochat.run_dir import read_config
from nanochat.sources import check, open_data, scan_files
from nanochat.splits import pin_files, split_train_val
from nanochat.tokenizer import get_tokenizer
from scripts import (
    compare_runs,
    inspect_data,
    receipt,
    repeat,
    replay,
    tok_shards,
    tok_train,
    validate,
    verify,
)
from tests import training
from tests.finished import command
from tests.hub_server import TOKEN, Fault, hub_server
from tests.toy import write_jsonl
from tests.training import die_after_step, final, refuse, run_dir, state_of, succeed

SET = "hf://datasets/own/set"
RUN = {**training.SMALL, "num_iterations": 4, "save_every": 2, "leaves": 2}
QUICK = web_client.Patience(
    connect_s=1.0, silence_s=2.0, first_answer_s=0.5, give_up_s=5.0, first_pause_s=0.01
)


@pytest.fixture(scope="module")
def served():
    """A Hub, which the environment names."""
    with hub_server() as hub:
        hub.page = 3
        yield hub


@pytest.fixture(scope="module")
def made(served, tmp_path_factory):
    """The digests and the end of a run from a downloaded copy; and the folder of a run from the
    Hub that was killed after its step 2."""
    with training.workplace(tmp_path_factory.mktemp("made")) as folder:
        succeed(**RUN, model_tag="local")
        files = {f"data/{path.name}": path.read_bytes() for path in sorted(folder.glob("data/*"))}
        commit = served.commit("own/set", files)
        killed = training.start(**RUN, data_path=SET, hook=partial(die_after_step, 2))
        killed.wait_for_death()
        end = state_of(final("local"))
        digests = training.digests("local")
        yield SimpleNamespace(
            files=files, commit=commit, digests=digests, end=end, killed=run_dir()
        )


@pytest.fixture
def hub(served, made, tmp_path, monkeypatch):
    """A Hub that has the data of `made`, and a workplace without it."""
    monkeypatch.setattr(web_client, "PATIENCE", QUICK)
    others = threading.enumerate()
    for known in (served.commits, served.branches, served.gated, served.moved, served.files):
        known.clear()
    served.commit("own/set", made.files)
    served.faults.clear()
    served.seen.clear()
    begin_launch()
    with training.workplace(tmp_path):
        shutil.rmtree(tmp_path / "data")
        yield served
    for thread in threading.enumerate():  # requests for which the test has not waited
        if thread.name in ("each", "fetch ahead") and thread not in others:
            thread.join(QUICK.give_up_s)


def train(path=SET, **changed):
    """The outcome of a run."""
    return succeed(**{**RUN, "data_path": path, **changed})


def write_copy(made, folder):
    """Write the files of the data set below a folder."""
    for name, data in made.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def names(path, **options):
    """{split: names of its files}."""
    split = split_train_val(data_at(path), **options)
    return {
        name: [file.name for files in buckets.values() for file in files]
        for name, buckets in split.items()
    }


def manifest_of(path):
    """The manifest of all files at a path."""
    begin_launch()
    data = data_at(path)
    return scan_files(data.folder, list_files(data).data)


# ---- the same run --------------------------------------------------------------------------------


def test_a_run_from_the_hub_has_the_rows_and_weights_of_a_downloaded_copy(hub, made):
    train()
    assert training.digests() == made.digests and len(made.digests) == 4
    assert state_of(final()) == made.end


def test_so_has_a_run_of_two_processes(hub, made):
    training.finish(2, **RUN, data_path=SET)
    assert training.digests() == made.digests
    end = state_of(final())
    assert (end["model"], end["optimizer"]) == (made.end["model"], made.end["optimizer"])


def newer(files):
    """Other files under the same names."""
    reversed_names = dict(zip(files, reversed(files.values())))
    return {**reversed_names, "data/shard_9.parquet": files["data/shard_0.parquet"]}


@pytest.mark.parametrize("meanwhile", ["nothing", "the cache was deleted", "the branch moved on"])
def test_a_killed_run_ends_with_the_weights_of_a_downloaded_copy(hub, made, meanwhile):
    base = run_dir().parents[1]
    shutil.copytree(made.killed, run_dir())
    if meanwhile != "the cache was deleted":
        shutil.copytree(made.killed.parents[1] / "data_cache", base / "data_cache")
    if meanwhile == "the branch moved on":
        assert hub.commit("own/set", newer(made.files)) != made.commit
    train()
    assert training.digests() == made.digests and state_of(final()) == made.end
    assert len(training.events("started")) == 2


def test_nobody_is_told_to_remove_files_from_the_hub(hub, made):
    """Regression: the advice for --val-fraction where a data set has files for validation."""
    shards = [*made.files.values()]
    names = ("train-00000-of-00001", "validation-00000-of-00001")
    hub.commit("own/set", {f"data/{name}.parquet": data for name, data in zip(names, shards)})
    with pytest.raises(ValueError, match="already has validation files") as error:
        split_train_val(data_at(SET), shared=True)
    assert "leave out this flag" in str(error.value) and "remove" not in str(error.value)


def test_a_seed_on_a_newer_commit_is_refused_and_the_first_one_is_named(hub, made):
    """Regression: `scripts.repeat` pooled seeds of two commits of a branch."""
    seed = {"model_tag": "p-seed1", "eval_every": 4, "seed": 1, "data_seed": 1}
    train(**seed)
    hub.commit("own/set", newer(made.files))
    flags = training.flags(**{**RUN, "data_path": SET, "eval_every": 4, "model_tag": None})
    with pytest.raises(ValueError, match="the next run would read other training data") as error:
        repeat.main(["--name=p", "--seeds=2", "--", *flags])
    listed = run_dir("p-seed1") / "data_manifest.json"
    assert f"read what {listed} lists" in str(error.value)
    assert f"{SET}@{made.commit}" in listed.read_text()


def fail(hub):
    """Answer nothing but errors from now on, to a launch that knows nothing yet."""
    begin_launch()
    hub.faults.append(Fault(status=503, times=999))
    hub.seen.clear()


def test_a_resume_asks_the_hub_nothing(hub, made):
    """Regression: it asked for the newest commit of the branch, which it does not read."""
    shutil.copytree(made.killed, run_dir())
    shutil.copytree(made.killed.parents[1] / "data_cache", run_dir().parents[1] / "data_cache")
    fail(hub)
    train()
    assert training.digests() == made.digests and not hub.seen


def test_the_config_of_a_run_names_the_commit_that_it_pinned(hub, made):
    """Regression: a run that was to repeat another one read a newer commit, without a word."""
    train()
    newest = hub.commit("own/set", newer(made.files))
    out = command(validate.main, f"--config={run_dir() / 'config.json'}", "--model-tag=again").out
    assert made.commit in out and newest not in out


@pytest.mark.parametrize("listed", ["with commas", "in a file", "one of them"])
def test_the_config_of_a_run_names_the_commit_of_each_path(hub, made, tmp_path, listed):
    """Regression: --val-path named the branch, so a repeat validated with other text, and trained on
    the old one."""
    shards = [f"{SET}/data/shard_{i}.parquet" for i in range(4)]
    data, val = ",".join(shards[:2]), ",".join(shards[2:])
    if listed == "in a file":
        val = str(tmp_path / "val.txt")
        (tmp_path / "val.txt").write_text("\n".join(shards[2:]) + "\n")
    if listed == "one of them":
        data, val = f"{SET}@main", f"{SET}@main/data/shard_3.parquet"
    train(data, val_path=val, num_iterations=1)
    flags = flags_of_config(read_config(run_dir()), run_dir())
    for name in ("data_path", "val_path"):
        for path in flags[name].split(","):
            assert path.startswith(f"{SET}@{made.commit}"), name
    begin_launch()
    hub.commit("own/set", newer(made.files))
    train(flags["data_path"], val_path=flags["val_path"], num_iterations=1, model_tag="again")
    pinned = [read_json(run_dir(tag) / "data_manifest.json") for tag in ("run", "again")]
    assert pinned[0] == pinned[1]


def test_the_config_of_a_run_whose_training_data_was_moved_names_the_commit_of_the_other_split(
    hub, made, tmp_path
):
    val = f"{SET}/data/shard_3.parquet"
    train(val_path=val, num_iterations=2)
    write_copy(made, tmp_path / "copy")
    train(tmp_path / "copy", val_path=val, num_iterations=3)
    flags = flags_of_config(read_config(run_dir()), run_dir())
    assert flags["data_path"] == f"{SET}@{made.commit}"
    assert flags["val_path"].startswith(f"{SET}@{made.commit}/")


def test_two_branches_of_a_data_set_are_not_taken_for_one(caplog):
    """Regression: both got the commit of the first."""
    a, b = [f"{SET}@{digit * 40}" for digit in "ab"]
    assert config._as_pinned(f"{SET}@dev/y", [f"{a}/x", f"{b}/y"]) == f"{b}/y"
    assert config._as_pinned(f"{SET}@dev", [], [f"{b}/y"]) == b
    assert config._as_pinned(f"{SET}@dev/y", [a], [b]) == f"{a}/y"
    assert not caplog.text
    assert config._as_pinned(f"{SET}@dev/y", [a, b]) == f"{SET}@dev/y"
    assert "several states" in caplog.text


def test_the_config_of_a_run_on_local_data_needs_no_manifest(hub, made, tmp_path):
    """Regression: a new run with these flags was refused if the manifest was damaged."""
    train(write_copy(made, tmp_path / "copy"), num_iterations=1)
    of_run = read_config(run_dir())
    (run_dir() / "data_manifest.json").write_text("{")
    assert flags_of_config(of_run, run_dir())["data_path"] == of_run["data_path"]


def test_a_fork_reads_the_commit_of_its_parent_and_asks_the_hub_nothing(hub, made):
    train()
    hub.commit("own/set", newer(made.files))
    fail(hub)
    train(f"{SET}@main", fork_from="run@2", model_tag="child")
    assert training.digests("child", 2) == made.digests[2:] and not hub.seen


def test_a_fork_that_names_a_branch_says_that_it_stays_at_the_commit_of_its_parent(hub, made):
    """Regression: its line said that data_path had changed, and nothing that the data had not."""
    train()
    hub.commit("own/set", newer(made.files))
    out = train(f"{SET}@main", fork_from="run@2", model_tag="child").out
    assert (
        f"note: {SET}@main is read as {SET}@{made.commit}, which is pinned" in out
        and "as @COMMIT" in out
    )
    assert "fork: continues run at step 2; nothing changed" in out
    assert read_json(run_dir("child") / "config.json")["fork"]["changes"] == {}
    more = {**made.files, "data/shard_9.parquet": made.files["data/shard_0.parquet"]}
    newest = hub.commit("own/set", more)
    out = train(f"{SET}@{newest}", fork_from="run@2", model_tag="moved").out
    assert "pinned" not in out and "data_path" in out


def test_validate_shows_a_new_run_with_the_newest_commit_if_the_run_is_refused(hub, made):
    train(num_iterations=2)
    newest = hub.commit("own/set", newer(made.files))
    out = command(validate.main, *training.flags(**{**RUN, "data_path": SET, "seed": 7})).out
    assert "a new run with these settings:" in out and newest in out and made.commit not in out


def test_a_resume_that_names_the_data_anew_says_which_commit_it_reads(hub, made):
    train(num_iterations=2)
    hub.commit("own/set", newer(made.files))
    assert "pinned" not in train(num_iterations=3).out
    out = train(f"{SET}@main", num_iterations=4).out
    assert f"note: {SET}@main is read as {SET}@{made.commit}, which is pinned" in out


def test_a_replay_asks_the_hub_nothing(hub):
    train()
    fail(hub)
    assert not replay.main(["run@3"]) and not hub.seen


def test_files_of_a_newer_commit_join_a_fork_that_names_it(hub, made):
    train(num_iterations=2)
    more = {**made.files, "data/shard_9.parquet": made.files["data/shard_0.parquet"]}
    newest = hub.commit("own/set", more)
    train(f"{SET}@{newest}", fork_from="run@2", model_tag="child")
    manifest = read_json(run_dir("child") / "data_manifest.json")["train"]["data"]
    assert manifest["files"][-1]["name"] == "data/shard_9.parquet" and "joined" in manifest


def test_a_resume_with_prepared_parts_asks_the_hub_nothing(hub):
    train(val_fraction=0.3)
    fail(hub)
    assert "at step 2" in train(val_fraction=0.3, resume="run@2").out and not hub.seen


def test_what_val_path_names_is_held_out_also_in_another_commit(hub, made):
    """Regression: the model was trained on it if only one of the two paths named a commit."""
    file = "data/shard_0.parquet"
    hub.commit("own/set", {**made.files, "README.md": b"newer"})
    splits = split_train_val(data_at(f"{SET}@{made.commit}"), data_at(f"{SET}/{file}"))
    named = [path.name for path in splits["train"]["data"]]
    assert len(named) == 3 and "shard_0.parquet" not in named


def test_a_new_run_reads_the_newest_commit(hub, made):
    train(num_iterations=1)
    newest = hub.commit("own/set", newer(made.files))
    train(num_iterations=1, resume="scratch", force=True)
    assert newest in read_json(run_dir() / "data_manifest.json")["train"]["data"]["root"]


def test_a_run_moves_between_the_hub_and_a_copy(hub, made):
    shutil.copytree(made.killed, run_dir())
    train(write_copy(made, run_dir().parents[1] / "copy"))
    assert training.digests() == made.digests


def test_a_second_run_fetches_nothing(hub):
    train()
    hub.seen.clear()
    train(model_tag="again")
    assert not hub.asked("resolve") and not hub.asked("", "store")


# ---- pins ----------------------------------------------------------------------------------------


def test_a_run_pins_the_commit_and_the_sha256_of_each_file(hub, made):
    train(num_iterations=1)
    manifest = read_json(run_dir() / "data_manifest.json")["train"]["data"]
    assert manifest["root"] == f"{SET}@{made.commit}"
    assert {entry["sha256"] for entry in manifest["files"]} <= set(hub.blobs)


def test_the_fingerprint_is_that_of_a_copy(hub, made):
    copy = made.killed.parents[1] / "data"
    assert fingerprint(manifest_of(f"{SET}/data")) == fingerprint(manifest_of(copy))


def test_a_resume_reads_no_file_to_know_that_it_has_not_changed(hub):
    manifest = manifest_of(SET)
    shutil.rmtree(run_dir().parents[1] / "data_cache")
    hub.seen.clear()
    begin_launch()
    assert check(manifest, as_path(SET))["files"] == manifest["files"]
    assert not hub.asked("resolve")


def test_a_small_file_that_is_in_git_itself_is_known_by_its_id(hub, made):
    hub.in_git.update(made.files)
    manifest = manifest_of(SET)
    hub.in_git.clear()
    assert all("sha256" not in entry and len(entry["etag"]) == 40 for entry in manifest["files"])


def test_the_listing_has_many_pages_and_is_asked_for_once(hub):
    train(num_iterations=1)
    assert len(hub.asked("/tree/")) == 2 and len(hub.asked("/revision/")) == 1


# ---- what is fetched ---------------------------------------------------------------------------


def open_hub_source():
    """The training data of the data set, from an empty cache but for its footers, and no request
    seen."""
    manifests = pin_files(SET)
    tokenizer = get_tokenizer(run_dir().parents[1] / "tokenizer")
    return open_data(manifests, tokenizer).train["data"]


def test_an_expected_group_is_fetched_before_it_is_read(hub):
    source = open_hub_source()
    hub.seen.clear()
    source.expect([4, 2])
    training.wait_for(lambda: len(names_of_columns()) == 2)
    fetched = len(hub.seen)
    assert list(source.texts(2)) and list(source.texts(4)) and len(hub.seen) == fetched


def names_of_columns():
    """The ranges on disk that are not footers."""
    cache = run_dir().parents[1] / "data_cache"
    others = (*cache.glob("*-footer"), *cache.glob("tree-*"), *cache.glob(".*"))
    return [path for path in cache.iterdir() if path not in others and path.suffix == ""]


def test_a_feed_says_what_it_will_read(hub, monkeypatch):
    expected = []
    monkeypatch.setattr(ParquetSource, "expect", lambda self, groups: expected.extend(groups))
    train(num_iterations=1)
    assert expected


def test_nothing_is_expected_of_a_source_on_this_machine(hub, made, monkeypatch):
    monkeypatch.delattr(ParquetSource, "expect")
    train(made.killed.parents[1] / "data", num_iterations=1)


def test_a_tiny_cache_and_small_requests_change_no_row(hub, made, monkeypatch):
    monkeypatch.setattr(web, "FOOTER_BYTES", 100)
    monkeypatch.setattr(web, "REQUEST_BYTES", 1000)
    train(data_cache=1e-6)
    assert training.digests() == made.digests


def test_the_documents_of_a_step_are_found_without_the_data_path(hub, made):
    shutil.copytree(made.killed, run_dir())
    assert {row["bucket"] for row in training.read_rows("run", 1)} == {"data"}


def test_other_kinds_are_copied_whole_and_prepared(hub, tmp_path):
    write_jsonl(tmp_path / "copy" / "a.jsonl", training.texts(9, seed=3))
    hub.commit_folder("own/set", tmp_path / "copy")
    from_hub = manifest_of(SET)
    from_copy = manifest_of(tmp_path / "copy")
    assert from_hub["files"] == [{**from_copy["files"][0], "parquet": ANY}]


# ---- what a path names ---------------------------------------------------------------------------


def test_files_without_statistics_are_read_in_ranges_like_all_others(hub, made, tmp_path):
    """Regression: whether they have nulls was counted, in copies of all of them. nanochat's own
    data sets have no statistics."""
    plain = {}
    for name, data in made.files.items():
        out = pa.BufferOutputStream()
        pq.write_table(pq.read_table(pa.BufferReader(data)), out, write_statistics=False)
        plain[name] = out.getvalue().to_pybytes()
    hub.commit("own/set", plain)
    train(num_iterations=1)
    assert not [*tmp_path.rglob("web")]
    train(num_iterations=1, model_tag="strict", strict=True)
    assert [*tmp_path.rglob("web")]


def test_a_file_is_copied_once_whatever_names_its_revision(hub, made, tmp_path):
    """Regression: once for each of own/set, own/set@main and own/set@COMMIT."""
    commit = hub.commit("own/set", made.files)
    for path in (SET, f"{SET}@main", f"{SET}@{commit}"):
        begin_launch()
        for file in list_files(data_at(path)).data:
            file.local_copy()
    assert len([path for path in tmp_path.rglob("web/**/*") if path.is_file()]) == len(made.files)


def test_names_of_files_state_their_split(hub, made):
    data = list(made.files.values())
    files = ["train-0.parquet", "train-1.parquet", "validation-0.parquet", "test-0.parquet"]
    hub.commit("own/set", {f"data/{name}": content for name, content in zip(files, data)})
    assert names(SET) == {"train": files[:2], "val": files[2:3]}


def test_a_folder_of_a_branch_is_listed_alone(hub, made):
    data = next(iter(made.files.values()))
    branch = "refs/convert/parquet"
    hub.commit("own/set", {"a/1.parquet": data, "a/2.parquet": data, "b/3.parquet": data}, branch)
    assert names(f"{SET}@{branch}/a") == {"train": ["1.parquet"], "val": ["2.parquet"]}
    begin_launch()
    assert names(f"{SET}@~parquet/a")["val"] == ["2.parquet"]


def test_a_single_file_can_be_named(hub):
    path = f"{SET}/data/shard_1.parquet"
    assert [entry["name"] for entry in manifest_of(path)["files"]] == ["shard_1.parquet"]


def web_files(hub, made, kind="files"):
    """The addresses of the files, on an ordinary web server."""
    hub.files |= {os.path.basename(name): data for name, data in made.files.items()}
    return [f"{hub.url}/{kind}/{name}" for name in sorted(hub.files)]


@pytest.mark.parametrize("kind", ["files", "moved"])
def test_addresses_of_files_give_the_same_rows(hub, made, kind):
    train(",".join(web_files(hub, made, kind)))
    assert training.digests() == made.digests


@pytest.mark.parametrize("begin", ["# a comment\n", "\ufeff"])
def test_a_text_file_may_list_addresses(hub, made, tmp_path, begin):
    """Regression: a list that began with a byte order mark was itself the text to train on."""
    listed = tmp_path / "urls.txt"
    listed.write_text(begin + "\r\n".join(web_files(hub, made)))
    train(listed)
    assert training.digests() == made.digests


@pytest.mark.parametrize(
    "line, words",
    [
        ("https://host/a.csv", "line 2: https://host/a.csv is not the address of a"),
        ("https://u:hidden@host/a.parquet", "credentials do not belong"),
    ],
)
def test_a_line_that_is_no_address_of_text_is_named(hub, tmp_path, line, words):
    listed = tmp_path / "urls.txt"
    listed.write_text(f"https://host/b.parquet\n{line}\n")
    with pytest.raises(ValueError, match=words) as e:
        data_at(listed)
    assert "hidden" not in str(e.value)


def test_a_text_that_begins_with_an_address_is_a_text(hub, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("https://host/a.parquet\nis where the data was.\n")
    assert data_at(text).files == (text,)


def test_a_file_of_a_web_server_that_has_changed_is_named(hub, made):
    addresses = web_files(hub, made)
    train(",".join(addresses), num_iterations=2)
    shutil.rmtree(run_dir().parents[1] / "data_cache")
    hub.files["shard_1.parquet"] = hub.files["shard_2.parquet"]
    error = refuse(**{**RUN, "data_path": ",".join(addresses)})
    assert "shard_1.parquet: it has changed since this run began" in error


# ---- other commands ------------------------------------------------------------------------------


def test_validate_reads_the_hub(hub, capsys):
    flags = training.flags(**RUN, data_path=SET)
    assert validate.main(flags) == 0
    out = capsys.readouterr().out
    assert "shard_3.parquet" in out


def test_tok_train_and_tok_shards_read_the_hub(hub, tmp_path):
    tokenizer = tmp_path / "own"
    assert not tok_train.main(
        [f"--data-path={SET}", f"--output-dir={tokenizer}", "--vocab-size=300"]
    )
    flags = [f"--input-dir={SET}", f"--output-dir={tmp_path / 'out'}", f"--tokenizer={tokenizer}"]
    assert tok_shards.main([*flags, "--num-workers=1", "--max-length=0"]) == 0
    assert len(list(tmp_path.glob("out/**/*.bin"))) == 4


def shards_of(tmp_path, *more, path=SET):
    """The exit code of tok_shards, which writes into tmp_path/out."""
    begin_launch()
    tokenizer = run_dir().parents[1] / "tokenizer"
    flags = [f"--input-dir={path}", f"--output-dir={tmp_path / 'out'}", f"--tokenizer={tokenizer}"]
    return tok_shards.main([*flags, "--num-workers=1", "--max-length=0", *more])


def test_token_files_are_of_one_commit(hub, made, tmp_path, capsys):
    """Regression: after the branch had moved, the same command replaced finished token files."""
    assert shards_of(tmp_path, "--num-tasks=2") == 0
    newest = hub.commit("own/set", newer(made.files))
    with pytest.raises(
        ValueError,
        match=f"@{newest}; name --input-dir={SET}@{made.commit}, or for this data, another",
    ):
        shards_of(tmp_path)
    assert shards_of(tmp_path, path=f"{SET}@{made.commit}") == 0
    assert f"data: {SET}@{made.commit}" in capsys.readouterr().out
    manifest = read_json(tmp_path / "out/train/data/manifest.json")
    assert manifest["input_dir"] == f"{SET}@{made.commit}"


def test_what_tok_train_has_read_is_not_fetched_again(hub, tmp_path):
    """Regression: it copied whole files, of which a run then fetched the text once more."""
    assert not tok_train.main(
        [f"--data-path={SET}", f"--output-dir={tmp_path}", "--vocab-size=300"]
    )
    assert not (tmp_path / "base/web").exists()
    hub.seen.clear()
    train(num_iterations=1)
    assert not hub.asked("", "store")


def test_a_search_says_what_it_may_fetch(hub, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("nanochat"), "propagate", True)
    train(num_iterations=1)
    with caplog.at_level(logging.INFO):
        inspect_data.main(["find", "run", "--text=a"])
    assert "searching reads the text of 4 remote files, at most" in caplog.text


def test_a_launch_names_the_folders_that_it_reads_together(hub, made):
    """The folders of a data set may be samples of one another."""
    first, second = (made.files[f"data/shard_{number}.parquet"] for number in (0, 1))
    hub.commit("own/set", {**made.files, "sample/a.parquet": first, "sample/b.parquet": second})
    outcome = train(num_iterations=1)
    assert "from 2 folders together: data (" in outcome.out and "sample (1 file)" in outcome.out
    assert "2 files reachable by several names" in outcome.err
    assert "name the folder, or the files, that you want" in outcome.err


def write_receipt(killed):
    """A receipt of the killed run, written without reading a file."""
    shutil.copytree(killed, run_dir())
    path = run_dir().parents[1] / "receipt.json"
    assert not receipt.main([str(run_dir()), f"--out={path}"])
    return path


def test_a_receipt_of_a_run_from_the_hub_hashes_nothing_and_holds_for_a_copy(hub, made, capsys):
    hub.seen.clear()
    path = write_receipt(made.killed)
    assert "sha256:" in path.read_text()
    copy = write_copy(made, run_dir().parents[1] / "copy")
    assert verify.main([str(path), f"--data-path={copy}", "--steps=1"]) == 0
    (copy / "data/shard_0.parquet").write_bytes(made.files["data/shard_1.parquet"])
    assert verify.main([str(path), f"--data-path={copy}", "--steps=1"]) == 1
    output = capsys.readouterr().out
    assert not hub.asked("resolve"), output
    # regression: the advice was to restore a file of a data set that belongs to others
    assert f"leave --data-path out: the receipt names {SET}@{made.commit}" in output


def test_a_receipt_names_the_data_set_and_its_commit(hub, made):
    """Regression: whoever got a receipt had to guess which data it was of."""
    path = write_receipt(made.killed)
    assert f'"data": "hf://datasets/own/set@{made.commit}' in path.read_text()
    assert verify.main([str(path), "--steps=1"]) == 0


def test_a_receipt_is_checked_while_the_files_are_away_with_a_sentence_that_names_the_server(
    hub, capsys, monkeypatch
):
    """Regression: "PROBLEM [Errno None] None", which looked like a forged receipt."""
    train(val_fraction=0.3, num_iterations=1)  # so that the files are copied
    path = run_dir().parents[1] / "receipt.json"
    assert not receipt.main(["run", f"--out={path}"])
    for name in ("web", "prepared"):
        shutil.rmtree(run_dir().parents[1] / name)
    monkeypatch.setattr(web_client, "moved", {})
    monkeypatch.setattr(hub, "store_url", "http://127.0.0.1:9")
    begin_launch()
    assert verify.main([str(path), "--steps=0"]) == 1
    output = capsys.readouterr().out
    assert "nothing from 127.0.0.1:9" in output and "check the network" in output
    assert "Errno" not in output


def test_runs_on_two_commits_are_compared_with_the_files_that_differ(hub, made, capsys):
    """Regression: only the names of the runs were said to differ."""
    train(num_iterations=1)
    files = {**made.files, "data/shard_1.parquet": made.files["data/shard_0.parquet"]}
    newest = hub.commit("own/set", files)
    train(num_iterations=1, model_tag="later")
    assert compare_runs.main(["run", "later"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"data of a: {SET}@{made.commit}" in lines and f"data of b: {SET}@{newest}" in lines
    assert "files that differ: data/shard_1.parquet" in lines


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault(name="resolve", status=429, headers={"Retry-After": "0"}, times=3),
        Fault(name="signature", status=503, times=3),
        Fault(name="signature", cut=10, times=3),
        Fault(name="tree", status=500, times=2),
    ],
    ids=["busy", "down", "truncated", "listing"],
)
def test_a_temporary_failure_changes_nothing(hub, fault):
    wanted = manifest_of(SET)
    shutil.rmtree(run_dir().parents[1] / "data_cache")
    hub.faults.append(fault)
    assert manifest_of(SET) == wanted and fault.times == 0


@pytest.mark.parametrize("header", [{"Retry-After": "3"}, {"RateLimit": '"api";r=0;t=3'}])
def test_a_busy_server_is_asked_again_when_it_says(hub, monkeypatch, caplog, header):
    pauses = []
    monkeypatch.setattr(web_client, "pause", pauses.append)
    monkeypatch.setattr(web_client, "_last_warning", [-math.inf])
    hub.faults.append(Fault(name="revision", status=429, headers=header))
    manifest_of(SET)
    assert pauses == [3] and "(HTTP 429); next attempt in 3.0 s" in caplog.text


def test_a_stop_ends_a_wait(hub):
    hub.faults.append(Fault(status=429, headers={"Retry-After": "4"}, times=9))
    with stops_if(lambda: "SIGTERM"), pytest.raises(Stop, match="SIGTERM"):
        manifest_of(SET)


@pytest.mark.parametrize(
    "path, words",
    [
        ("hf://datasets/own/none", "no such data set, or a private one that HF_TOKEN"),
        ("hf://datasets/own/gated", "the data set's owner asks readers to accept terms first"),
        ("hf://datasets/own/old", "has moved; name it hf://datasets/own/set"),
        ("hf://datasets/own/pictures", "no .parquet"),
        (f"{SET}@nobranch", "the data set has no revision nobranch"),
        (f"{SET}@{'0' * 40}", "the data set has no revision 000"),
        (f"{SET}/nofolder", "nofolder: no such data folder"),
        (f"{SET}/data/*.parquet", "*.parquet: no such data file"),
        (f"{SET}/data/README.md", "README.md: expected a folder or a .parquet"),
        (f"{SET}/data/part.parquet", "part.parquet: no such data file"),
        (f"{SET}/data,{SET}/more", "set --data-path to one folder (a --curriculum selects"),
        ("own/set", "or name a folder of yours, hf://datasets/OWNER/NAME, or token files"),
        ("{}/datasets/own/set/tree/main", "folder of yours, hf://datasets/OWNER/NAME"),
        ("{}/whole/set", "name other data, such as hf://datasets/OWNER/NAME"),  # a page
        ("hf://datasets/own", "expected hf://datasets/OWNER/NAME"),
        ("hf://models/own/set", "expected hf://datasets/OWNER/NAME"),
        ("{}/files/none.parquet,{}/files/more.parquet", "none.parquet: no such file"),
        ("{}/files/a.parquet,{}/files/a.parquet", "a.parquet: --data-path lists it twice"),
        ("{}/whole/a.parquet,{}/whole/b.parquet", "does not send ranges of files"),
    ],
)
def test_bad_input_is_one_sentence(hub, made, path, words):
    hub.moved["own/old"] = "own/set"
    hub.commit("own/pictures", {"a.png": b"PNG"})
    hub.commit("own/set", {**made.files, "data/README.md": b"A card."})
    hub.commit("own/gated", made.files)
    hub.gated.add("own/gated")
    hub.files |= dict.fromkeys(["a.parquet", "b.parquet"], made.files["data/shard_0.parquet"])
    hub.files["set"] = b"<html>"
    error = refuse(**{**RUN, "data_path": path.replace("{}", hub.url)})
    assert words in error and "\n" not in error and "truncated" not in error


@pytest.mark.parametrize("path", [f"{SET}/dta", "{}/dta"])
def test_a_wrong_path_is_named_before_a_missing_tokenizer(hub, path):
    """Regression: the advice was to train a tokenizer on the wrong path."""
    base = run_dir().parents[1]
    shutil.rmtree(base / "tokenizer")
    (base / "data").mkdir()
    assert "dta: no such data folder" in refuse(**RUN, data_path=path.format(base))


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"fork_from": "run@2", "model_tag": "child"}])
def test_a_file_of_another_commit_is_not_called_changed(hub, made, more, turns):
    """Regressions: the advice was only to restore the old file; a fork called it missing if it was now
    the validation file of before."""
    train(num_iterations=2)
    names = [*made.files]
    turned = dict(zip(names, [made.files[name] for name in names[turns:] + names[:turns]]))
    newest = hub.commit("own/set", turned)
    error = refuse(**RUN, data_path=f"{SET}@{newest}", **more)
    assert error.startswith(f"{SET}@{newest}/data/shard_")
    assert "read another file of" in error or "missing or validation data" in error
    assert f"in {SET}@{made.commit}; " in error


def test_a_pinned_revision_that_vanished_is_one_sentence(hub, made):
    shutil.copytree(made.killed, run_dir())
    hub.commit("own/set", newer(made.files))
    hub.commits.pop(("own/set", made.commit))
    error = refuse(**RUN, data_path=SET)
    assert (
        f"{SET}@{made.commit}: the data set has no revision {made.commit}" in error
        and "\n" not in error
    )
    assert "with @COMMIT" in error


def test_a_server_that_does_not_answer_is_one_sentence(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    begin_launch()
    error = refuse(**RUN, data_path=SET)
    assert "nothing from 127.0.0.1:9" in error and "check the network and HF_ENDPOINT" in error


def test_a_redirect_to_a_server_that_does_not_answer_names_that_one(hub, monkeypatch):
    manifest_of(SET)
    shutil.rmtree(run_dir().parents[1] / "data_cache")
    monkeypatch.setattr(hub, "store_url", "http://127.0.0.1:9")
    with pytest.raises(OSError, match=r"shard_\d.parquet: nothing from 127.0.0.1:9"):
        manifest_of(SET)


def test_an_address_at_which_a_redirect_ended_is_forgotten_when_it_refuses(hub, made, monkeypatch):
    path = as_path(f"{SET}/data/shard_0.parquet")
    path.read(0, 4)
    monkeypatch.setattr(
        web_client,
        "moved",
        {known: ("http://127.0.0.1:9/", when) for known, (_, when) in web_client.moved.items()},
    )
    assert web_client.moved and path.read(0, 8) == made.files["data/shard_0.parquet"][:8]


# ---- the token -----------------------------------------------------------------------------------


def test_a_token_opens_a_gated_data_set_and_goes_to_no_other_server(hub, monkeypatch, caplog):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.gated.add("own/set")
    with caplog.at_level(logging.DEBUG):
        outcome = train(num_iterations=1)
    assert {request.authorization for request in hub.asked("", "store")} == {""}
    assert {request.authorization for request in hub.asked("", "hub")} == {f"Bearer {TOKEN}"}
    assert TOKEN not in outcome.out + outcome.err + caplog.text


def test_no_token_and_no_signed_address_is_shown(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.faults.append(Fault(name="signature", status=403, times=99))
    error = refuse(**RUN, data_path=SET)
    assert TOKEN not in error and "hidden" not in error and "access denied" in error


def test_a_file_is_fetched_once_for_both_parts_that_are_prepared_of_it(hub, monkeypatch):
    monkeypatch.setattr(hub, "latency_s", 0.2)  # so that both would ask before one is answered
    train(val_fraction=0.3, num_iterations=1)
    asked = Counter((request.path, request.range) for request in hub.asked("", "store"))
    # all of a file, which is larger than the part at its end that holds its footer
    whole = {
        (path, span): times
        for (path, span), times in asked.items()
        if span.startswith("bytes=0-") and int(span[8:]) >= web.FOOTER_BYTES
    }
    assert whole and set(whole.values()) == {1}


def test_a_token_that_is_refused_is_named(hub, monkeypatch):
    """Regression: the advice was to accept the owner's terms alone."""
    monkeypatch.setenv("HF_TOKEN", "mistyped")
    hub.gated.add("own/set")
    error = refuse(**RUN, data_path=SET)
    assert "set HF_TOKEN to a valid token" in error and "mistyped" not in error


@pytest.mark.parametrize("other_address", [False, True])
def test_rows_are_shown_while_the_hub_is_away(hub, capsys, monkeypatch, other_address):
    """The commit's list of files is on disk beside the ranges that the run has read. Regression: it
    was that of an address of the Hub."""
    train(num_iterations=2)
    fail(hub)
    if other_address:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    begin_launch()
    assert inspect_data.main(["rows", "run", "--step=1"]) == 0
    assert "shard_0" in capsys.readouterr().out


def test_texts_may_be_a_file_of_the_hub(hub, capsys):
    """Regression: "the file does not exist", of a validation file."""
    train(num_iterations=2)
    assert inspect_data.main(["find", "run", f"--texts={SET}/data/shard_0.parquet"]) == 0
    assert "shard_0.parquet" in capsys.readouterr().out


def test_a_server_that_refuses_connections_is_not_called_silent(hub, monkeypatch, caplog):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "(NewConnectionError)" in refuse(**RUN, data_path=SET)


@pytest.mark.parametrize("path", ["https://u:hidden@host/a.parquet", "https://h/a.parquet?hidden"])
def test_an_address_with_a_secret_is_refused_and_not_shown(hub, path):
    error = refuse(**RUN, data_path=path)
    assert "credentials do not belong" in error and "hidden" not in error
