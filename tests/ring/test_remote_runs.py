"""Runs from object storage: the same digests as from files, whatever the service does, and clear
errors."""

import functools
import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nanochat.common import begin_launch, read_json
from nanochat.integrations import object_storage as room
from nanochat.run_dir import TrainLog
from nanochat.tokenizer import RustBPETokenizer
from nanochat.tokens import new_manifest
from scripts import convert_shards, inspect_data, receipt, tok_shards, tok_train, validate, verify
from tests import training
from tests.object_store import ACCESS_KEY, QUICK, SECRET_KEY, Fault, put_path
from tests.token_files import write_megatron, write_pair
from tests.toy import compressed, write_jsonl
from tests.training import checkpoints, refuse, run_dir, succeed

SMALL = {**training.SMALL, "depth": 1, "num_iterations": 4, "save_every": 2}
KINDS = {
    "shards": {"data_format": "shards", "data_path": "{}/shards"},
    "documents": {"data_format": "megatron", "data_path": "{}/pairs"},
    "samples": {
        "data_format": "megatron",
        "data_path": "{0}/pairs/a,{0}/pairs/b",
        "order": "megatron",
        "blend_weights": "30,70",
        "split": "90,10",
        "lanes": 4,
    },
    "text": {"data_path": "{}/data"},
}


def make_pairs(base):
    """Write pairs/ (Megatron's) and shards/ (GPTS, with a manifest), each with the tokenizer."""
    tokenizer = RustBPETokenizer.from_directory(base / "tokenizer")
    records = {}
    for seed, name in enumerate("abc"):
        entries = [
            [*tokenizer.encode(text), tokenizer.get_bos_token_id()]
            for text in training.texts(60, seed=seed)
        ]
        write_megatron(base / "pairs" / name, [[ids] for ids in entries])
        written = write_pair(base / "shards" / name, entries, vocab_size=training.VOCAB_SIZE)
        records[name] = {"input": {}, "documents": 60, "skipped": {}, **written}
    about = {
        "fingerprint": tokenizer.fingerprint,
        "eod": tokenizer.get_bos_token_id(),
        "vocab_size": training.VOCAB_SIZE,
    }
    (base / "shards" / "manifest.json").write_text(
        json.dumps(new_manifest(about, {"max_length": 0, "overlap_size": 0}, records))
    )
    for name in ("pairs", "shards", "data"):
        shutil.copytree(base / "tokenizer", base / name / "tokenizer")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, running_store):
    """`folder`; `objects`: {key: (ETag, bytes)} of the same files in the store; `digests`: {kind:
    those of a run}."""
    folder, store = tmp_path_factory.mktemp("prepared"), running_store
    with training.workplace(folder):
        make_pairs(folder)
        for name in ("pairs", "shards", "data"):
            put_path(store.proxy.upstream, folder / name, name)
        digests = {}
        for kind in KINDS:
            succeed(**command(kind, folder), model_tag=kind)
            digests[kind] = training.digests(kind)
            assert len(set(digests[kind])) == 4
        objects = {key: (etag, store.get(key)) for key, etag in store.etags().items()}
        yield SimpleNamespace(folder=folder, objects=objects, digests=digests)


@pytest.fixture
def bucket(prepared, calm_store, tmp_path):
    """The bucket with its data, and a workplace without any files of them."""
    store, objects = calm_store, prepared.objects
    with training.workplace(tmp_path):
        shutil.rmtree(tmp_path / "data")
        shutil.rmtree(tmp_path / "tokenizer")
        yield store
    etags = store.etags()
    for key in etags.keys() - objects.keys():
        store.delete(key)
    for key, (etag, data) in objects.items():
        if etags.get(key) != etag:
            store.put(key, data)


def command(kind, base, **changed):
    settings = {**SMALL, **KINDS[kind], **changed}
    return {**settings, "data_path": settings["data_path"].format(base)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_is_the_same_from_a_bucket_with_faults(prepared, bucket, kind, capsys):
    ending = "parquet" if kind == "text" else "bin"
    bucket.proxy.faults += [
        Fault(status=503, code="SlowDown", times=3),
        Fault(name=ending, cut=1000, times=1),
        Fault(name=ending, cut=0, stall=kind == "text"),
    ]
    outcome = succeed(**command(kind, "s3://bucket"))
    assert training.digests() == prepared.digests[kind]
    assert not any(fault.times for fault in bucket.proxy.faults), "a fault that no request met"
    # each row in at most two requests; lanes read parts of a file, which are here the whole file
    samples = 4 * 8 * 2
    assert len([s for s in bucket.proxy.gets(".bin") if s.fault is None]) <= (
        samples if kind == "samples" else 10
    )
    if kind != "samples":  # folders are listed; Megatron's prefixes are requested one by one
        lists = [s for s in bucket.proxy.gets("list-type") if s.fault is None]
        assert len(lists) == 1 and not [s for s in bucket.proxy.seen if s.method == "HEAD"]
    entries = [
        e for m in read_json(run_dir() / "data_manifest.json")["train"].values() for e in m["files"]
    ]
    assert entries and all(e["etag"] for e in entries)
    copies = {p.name[13:] for p in (run_dir().parents[1] / "object_storage").rglob("*.idx")}
    assert (
        copies
        == {
            "shards": {"a.idx", "b.idx", "c.idx"},
            "documents": {"a.idx", "b.idx", "c.idx"},
            "samples": {"a.idx", "b.idx"},
            "text": set(),
        }[kind]
    )
    text = (
        outcome.out
        + outcome.err
        + "".join(
            p.read_bytes().decode("latin-1") for p in run_dir().parents[1].rglob("*") if p.is_file()
        )
    )
    assert ACCESS_KEY not in text and SECRET_KEY not in text

    capsys.readouterr()
    assert inspect_data.main(["digest", "run", "--steps=2:4"]) == 0
    assert all(digest in capsys.readouterr().out for digest in prepared.digests[kind][3:])


def test_other_kinds_of_text_in_a_bucket_give_the_digests_of_a_folder(bucket, tmp_path):
    texts, folder = training.texts(40, seed=3), tmp_path / "mixed"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[:30]).encode()
    content = {
        "a.jsonl.zst": compressed(lines, ".zst"),
        **{f"b{i}.txt": t.encode() for i, t in enumerate(texts[30:])},
    }
    folder.mkdir()
    for name, data in content.items():
        (folder / name).write_bytes(data)
        bucket.put(f"mixed/{name}", data)
    tokenizer = tmp_path / "own"
    RustBPETokenizer.train_from_iterator(texts, 300).save(tokenizer)
    for tag, where in (("local", folder), ("remote", "s3://bucket/mixed")):
        succeed(
            **{
                **SMALL,
                "data_path": where,
                "val_path": f"{where}/a.jsonl.zst",
                "tokenizer": tokenizer,
                "model_tag": tag,
            }
        )
    assert training.digests("local") == training.digests("remote")


def test_a_run_moves_into_the_bucket_and_back(prepared, bucket):
    for steps, base in ((2, prepared.folder), (3, "s3://bucket"), (4, prepared.folder)):
        succeed(**command("shards", base, num_iterations=steps))
        entry = read_json(run_dir() / "data_manifest.json")["train"]["data"]["files"][0]
        assert ("etag" in entry) == (base == "s3://bucket")
    assert training.digests() == prepared.digests["shards"]


@pytest.mark.parametrize(
    "kind, key", [("samples", "pairs/b.bin"), ("text", "data/shard_1.parquet")]
)
def test_an_object_swapped_between_launches_is_named(prepared, bucket, kind, key):
    succeed(**command(kind, "s3://bucket"))
    shutil.rmtree(run_dir() / "checkpoints" / "final")
    before, data = checkpoints(), bucket.get(key)
    at = len(data) // 3
    bucket.put(key, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    error = refuse(**command(kind, "s3://bucket"))
    assert (
        error.startswith(f"s3://bucket/{key}: it has changed since this run began (etag: ")
        and "\n" not in error
    )
    assert checkpoints() == before
    bucket.put(key, data)
    succeed(**command(kind, "s3://bucket"))
    assert training.digests()[-2:] == prepared.digests[kind][-2:]


@pytest.mark.parametrize(
    "kind, name, before", [("samples", "pairs/b.bin", 2), ("text", "data/shard_1.parquet", 1)]
)
def test_an_object_swapped_under_a_run_is_named(bucket, kind, name, before, monkeypatch):
    monkeypatch.setattr(room, "PART_BYTES", 1 << 12)
    swapped = bucket.get(name)[::-1]
    bucket.proxy.faults += [
        Fault(name=name, times=before, shift=0),
        Fault(name=name, before=lambda: bucket.put(name, swapped)),
    ]
    error = refuse(**command(kind, "s3://bucket"))
    assert f"s3://bucket/{name}: it has changed since this run began" in error and "\n" not in error
    assert not any(fault.times for fault in bucket.proxy.faults)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda store, env: env.update(path="s3://bucket/none"),
            r"s3://bucket/none/pairs: no such data folder",
        ),
        (
            lambda store, env: [
                os.environ.pop(k) for k in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
            ],
            r"no credentials; set AWS_ACCESS_KEY_ID",
        ),
        (
            lambda store, env: store.delete("pairs/b.bin"),
            r"s3://bucket/pairs/b\.bin: missing, but b\.idx needs it",
        ),
    ],
)
def test_unreadable_data_is_one_error_and_starts_no_run(bucket, change, message):
    env = {"path": "s3://bucket"}
    change(bucket, env)
    error = refuse(**command("documents", env["path"], tokenizer="s3://bucket/shards/tokenizer"))
    assert re.search(message, error) and "\n" not in error
    assert not run_dir().exists() and ACCESS_KEY not in error and SECRET_KEY not in error


def test_refused_and_corrupt_parquet_have_different_errors(bucket, monkeypatch):
    monkeypatch.setattr(room, "PART_BYTES", 1 << 12)
    name = "data/shard_1.parquet"
    bucket.proxy.faults += [
        Fault(name=name, shift=0),
        Fault(name=name, status=403, code="AccessDenied", times=99),
    ]
    assert refuse(**command("text", "s3://bucket")).startswith(
        f"s3://bucket/{name}: access denied (HTTP 403"
    )
    bucket.proxy.faults.clear()
    data = bucket.get(name)
    # everything except the footer
    bucket.put(name, data[:4] + b"\xff" * (len(data) - 8192) + data[4 - 8192 :])
    assert len(bucket.get(name)) == len(data)
    assert re.match(
        f"s3://bucket/{name}: row group . cannot be read",
        refuse(**command("text", "s3://bucket", model_tag="broken")),
    )
    bucket.put(name, data[:-4] + b"XXXX")
    assert f"s3://bucket/{name}: truncated or not a parquet" in refuse(
        **command("text", "s3://bucket", model_tag="cut")
    )


def test_prefixes_may_be_in_several_buckets_of_one_service(bucket, prepared):
    bucket.make_bucket("other")
    for name in ("b.bin", "b.idx"):
        bucket.put(f"moved/{name}", (prepared.folder / "pairs" / name).read_bytes(), bucket="other")
    succeed(**command("samples", "", data_path="s3://bucket/pairs/a,s3://other/moved/b"))
    assert training.digests() == prepared.digests["samples"]
    for other in ("gs://other/b", f"{prepared.folder}/pairs/b"):
        error = refuse(
            **command("samples", "", data_path=f"s3://bucket/pairs/a,{other}", model_tag="mixed")
        )
        assert "different kinds of object storage" in error and not run_dir("mixed").exists()


def test_text_in_a_bucket_is_tokenized_like_local_text(bucket, prepared, tmp_path, capfd):
    web = tmp_path / "raw" / "web"
    web.mkdir(parents=True)
    for i, ending in enumerate(("jsonl", "jsonl.gz")):
        write_jsonl(web / f"{i}.{ending}", training.texts(40, seed=i))
    training.write_shard(web / "2.parquet", training.texts(40, seed=2))
    for path in web.iterdir():
        bucket.put(f"raw/web/{path.name}", path.read_bytes())

    def tokenize(text, name):
        out = tmp_path / name
        assert (
            tok_shards.main(
                [
                    f"--input-dir={text}",
                    f"--output-dir={out}",
                    "--num-workers=1",
                    f"--tokenizer={prepared.folder / 'tokenizer'}",
                    "--max-length=0",
                ]
            )
            == 0
        )
        return {
            f.relative_to(out).as_posix(): f.read_bytes()
            for f in out.rglob("*")
            if f.is_file() and f.parent.name != ".records"
        }

    shards = tokenize("s3://bucket/raw", "of bucket")
    assert (
        shards == tokenize(tmp_path / "raw", "of files")
        and sum(name.endswith(".bin") for name in shards) == 3
    )
    assert "3 of 3 shards finished" in capfd.readouterr().out
    bucket.proxy.seen.clear()
    assert tokenize("s3://bucket/raw", "of bucket") == shards
    assert not bucket.proxy.gets("raw/"), "finished shards were written again"
    bucket.put("raw/web/0.jsonl", bucket.get("raw/web/0.jsonl").replace(b"th", b"ht"))
    begin_launch()
    assert tokenize("s3://bucket/raw", "of bucket") != shards, "another object of the same size"


def test_no_command_writes_into_object_storage(bucket, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    for main, argv in (
        (
            tok_shards.main,
            [
                f"--input-dir={prepared.folder / 'data'}",
                "--output-dir=s3://bucket/out",
                f"--tokenizer={prepared.folder / 'tokenizer'}",
            ],
        ),
        (
            tok_train.main,
            [f"--data-path={prepared.folder / 'data'}", "--output-dir=s3://bucket/out"],
        ),
        (convert_shards.main, ["s3://bucket/shards", "out", "--to=megatron"]),
        (
            convert_shards.main,
            [str(prepared.folder / "shards"), "s3://bucket/out", "--to=megatron"],
        ),
    ):
        with pytest.raises(ValueError, match=r"s3://bucket/\w+: expected a local folder"):
            main(argv)
    assert set(tmp_path.iterdir()) == before


def test_verify_and_validate_read_from_a_bucket(bucket, capsys):
    assert (
        verify.main(
            [
                "s3://bucket/shards",
                "s3://bucket/pairs",
                "--tokenizer",
                "s3://bucket/shards/tokenizer",
            ]
        )
        == 0
    )
    assert "all good" in capsys.readouterr().out
    flags = training.flags(**command("documents", "s3://bucket"))
    assert validate.main(flags) == 0
    data = bucket.get("shards/b.bin")
    bucket.put("shards/b.bin", data[:400] + b"\xff\xff" + data[402:])
    assert verify.main(["s3://bucket/shards"]) == 1
    assert "s3://bucket/shards/b.bin: entry" in capsys.readouterr().out


def test_the_list_of_documents_that_are_left_out_may_be_an_object(bucket):
    bucket.put("list.txt", b"a.bin:3\n")
    succeed(**command("shards", "s3://bucket"), without_documents="s3://bucket/list.txt")
    pinned = read_json(run_dir() / "data_manifest.json")["train"]["data"]
    assert pinned["without"] == {"a.bin": [3]}


def test_a_folder_without_a_tokenizer_is_one_sentence(bucket):
    """Regression: SentencePiece's files were looked for in a folder s3:/bucket of this machine."""
    settings = command("text", "s3://bucket", tokenizer="s3://bucket/data/web")
    bucket.put("data/web/sentence.model", b"1")
    assert "--tokenizer s3://bucket/data/web: no tokenizer here" in refuse(**settings)


def test_verify_reads_the_pins_of_a_run_that_was_uploaded(bucket, capsys):
    succeed(**command("shards", "s3://bucket"))
    bucket.put("run/data_manifest.json", (run_dir() / "data_manifest.json").read_bytes())
    assert verify.main(["s3://bucket/run"]) == 0
    assert "all good" in capsys.readouterr().out


def test_verify_reads_a_receipt_that_was_uploaded(bucket, capsys, tmp_path):
    succeed(**command("shards", "s3://bucket"))
    receipt.main([str(run_dir()), f"--out={tmp_path / 'r.json'}"])
    bucket.put("receipts/r.json", (tmp_path / "r.json").read_bytes())
    begin_launch()
    flags = ["--data-path=s3://bucket/shards", "--tokenizer=s3://bucket/shards/tokenizer"]
    assert verify.main(["s3://bucket/receipts/r.json", *flags]) == 0
    assert "trained on these rows" in capsys.readouterr().out


# ---- a service that stalls -----------------------------------------------------------------------


@pytest.mark.parametrize("world_size, number", [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_run_whose_service_stalls_stops_on_a_signal_and_saves_its_last_step(
    prepared, bucket, world_size, number
):
    bucket.proxy.faults += [
        Fault(name=".bin", times=60, shift=0),
        Fault(name=".bin", stall=True, times=-1),
    ]
    long = command("samples", "s3://bucket", num_iterations=12)
    group = training.start(world_size, **long)
    wait_for_stall(bucket, group)
    time.sleep(0.5)  # usually enough for the prefetched steps
    began = time.monotonic()
    for process in group.processes:
        os.kill(process.pid, number)
    assert group.wait() == [0] * world_size and time.monotonic() - began < training.PATIENCE_S, (
        group.text()
    )
    done = len(training.steps())
    assert 0 < done < 12 and f"checkpoint-{done}-shutdown" in checkpoints()
    bucket.calm()
    succeed(**long)
    succeed(
        **command(
            "samples", prepared.folder, num_iterations=12, save_every=-1, model_tag="straight"
        )
    )
    assert training.digests() == training.digests("straight")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_launch_whose_service_stalls_at_the_start_ends_on_a_signal(bucket, method):
    bucket.proxy.faults.append(Fault(method=method, stall=True, times=-1))
    group = training.start(**command("text" if method == "GET" else "samples", "s3://bucket"))
    wait_for_stall(bucket, group)
    began = time.monotonic()
    os.kill(group.processes[0].pid, signal.SIGTERM)
    assert group.wait() == [0] and time.monotonic() - began < training.PATIENCE_S, group.text()
    assert "stopped: SIGTERM" in group.text() and not run_dir().exists()


def test_a_completed_run_does_not_wait_for_a_service_that_stalls(bucket, monkeypatch):
    monkeypatch.setattr(room, "PART_BYTES", 1024)
    monkeypatch.setattr(room, "kept_range", functools.lru_cache(4)(room.read_range))
    bucket.proxy.latency_s = 0.02  # so that prefetching never catches up
    monkeypatch.setattr(room, "PATIENCE", replace(QUICK, give_up_s=2.0 * training.PATIENCE_S))
    stall, write = Fault(name=".bin", stall=True, times=-1), TrainLog.write

    def watched(self, **record):
        write(self, **record)
        if record.get("step") == 3:
            bucket.proxy.faults.append(stall)
            time.sleep(0.3)

    monkeypatch.setattr(TrainLog, "write", watched)
    began = time.monotonic()
    succeed(**command("documents", "s3://bucket", eval_every=-1, buffer_size=1))
    assert stall.times < -1, "no request was waiting"
    assert time.monotonic() - began < training.PATIENCE_S


def wait_for_stall(bucket, group):
    """Wait until a request stalls."""
    while not any(s.fault is not None and s.fault.stall for s in bucket.proxy.seen):
        assert all(process.exitcode is None for process in group.processes), group.text()
        time.sleep(0.05)
