"""Evaluating a run gives the bits per byte of training, for any batch size and number of
processes."""

import json
import re
import shutil
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dev.make_eval_bundle import make_eval_bundle
from nanochat import sources
from nanochat.common import read_json
from nanochat.core_eval import GROUP
from nanochat.dataloader import validation_loader
from nanochat.engine import KVCache, load_model
from nanochat.pins import JoinedFiles, read_manifests
from nanochat.run_dir import find_run
from nanochat.run_reader import RunReader
from nanochat.sources import open_source
from nanochat.start_run import open_run
from nanochat.stream import open_stream
from scripts import average, base_eval, infer_bench, replay, sample
from scripts.report import make_report
from tests import training
from tests.checkpoints import of_other_code
from tests.finished import RUN, STEPS, command, copy
from tests.spec.test_plan import source as token_source
from tests.toy import EPS

T, EVAL_TOKENS = training.T, RUN["eval_tokens"]
MODES, KINDS = "core,bpb,sample", ("choices", "schema", "text")
# counting the default 4 M tokens in rows this short would take most of the time of these tests
QUICK = ("--device-type=cpu", "--unigram-tokens=2000")


@pytest.fixture(scope="module", autouse=True)
def base(finished, tmp_path_factory):
    with training.workplace(tmp_path_factory.mktemp("eval"), **RUN) as path:
        copy(finished, path)
        yield path


@pytest.fixture
def run(base):
    return training.run_dir()


def result_of(step):
    """The stored result of a step."""
    result = json.loads((training.run_dir() / "eval.json").read_text())
    assert result["step"] == step
    return result


@pytest.fixture(scope="module")
def first_result(base):
    # more than one group of items, so that two ranks share a task; only the tasks with short
    # prompts
    make_eval_bundle(base / "eval_bundle", num_items=GROUP + 8, labels=KINDS)
    assert (
        base_eval.main(
            [
                "run",
                *QUICK,
                f"--eval={MODES}",
                "--device-batch-size=8",
            ]
        )
        == 0
    )
    return json.loads((training.run_dir() / "eval.json").read_text())


def test_the_result_equals_that_of_training(run, first_result):
    val = training.events("val")[-1]
    assert val["step"] == STEPS and first_result["val_bpb"] == val["bpb"]
    assert first_result["step"] == STEPS and first_result["checkpoint"] == str(
        run / "checkpoints" / "final"
    )
    assert (
        0 < first_result["train_bpb"]["data"] < 10
        and first_result["train_bpb"]["data"] != val["bpb"]
    )


def test_the_sample_of_the_training_files_is_called_so_with_a_note_on_overfitting(capsys):
    """Regression: "train, data", beside validation, looked like a figure of the text trained on; and
    "the run may not have read it" was said of a run that had read it four times."""
    bpb = {"val_bpb": 2.0, "val_buckets": {}, "train_bpb": {"data": 1.5}, "unigram_bpb": 4.0}
    base_eval.report({"samples": {}, "checkpoint": "d12", "step": 7, **bpb})
    out = capsys.readouterr().out
    assert "sample of the training files, data  1.500000" in out
    assert "overfitting only if" in out


@pytest.mark.parametrize(
    ("validated", "missing"), [(["web"], True), (["web", "math"], False), (["other"], False)]
)
def test_a_bucket_without_validation_data_is_named_again(capsys, validated, missing):
    """Regression: only the launch said it, and the overall value looked like one of all buckets."""
    bpb = {"val_bpb": 2.0, "val_buckets": dict.fromkeys(validated, 2.0)}
    trained = {"train_bpb": {"web": 1.5, "math": 1.2}}
    base_eval.report({"samples": {}, "checkpoint": "d12", "step": 7, **bpb, **trained})
    lines = capsys.readouterr().out.splitlines()
    assert (lines[-1] == "Validation has nothing of math.") == missing


def trained_on(rows_of):
    """The number of tokens with a loss in all rows of a source."""
    batches = validation_loader(
        rows_of,
        tokenizer=rows_of.tokenizer,
        T=T,
        device_batch_size=4,
        num_tokens=10**6,
        device="cpu",
    )
    return sum(int((batch.targets >= 0).sum()) for batch in batches)


@pytest.mark.parametrize("lengths", [[[40] * 600], [[40] * 50] * 20, [[900]] * 9])
@pytest.mark.parametrize("in_large_order", [False, True])
def test_a_sample_of_the_training_files_has_the_size_of_the_validation_data(
    tmp_path, monkeypatch, lengths, in_large_order
):
    """Regression: it was the first rows of all files, so mostly beginnings of documents, beside all of
    a small validation set: a gap of 0.32 bits without overfitting."""
    monkeypatch.setattr(sources, "SMALL_TOKENS", 0 if in_large_order else 10**9)
    whole = token_source(tmp_path, lengths)
    sample = base_eval.sample_of(whole, 2000)
    num_tokens = base_eval.tokens_of(sample)
    longest = max(map(max, lengths)) + 1
    assert 2000 <= num_tokens < 2000 + max(longest, 0.5 * 2000)
    assert trained_on(sample) == pytest.approx(num_tokens, rel=0.1)
    assert base_eval.tokens_of(base_eval.sample_of(whole, 10**9)) == base_eval.tokens_of(whole)


def test_a_sample_of_text_has_whole_documents_too(run):
    data, _, _ = open_run(run)
    whole = data.train["data"]
    sample = base_eval.sample_of(whole, base_eval.tokens_of(whole) // 3)
    share = sample.groups.sum() / whole.groups.sum()
    assert 0.2 < share < 0.5 and trained_on(sample) == pytest.approx(
        share * trained_on(whole), rel=0.3
    )


@pytest.mark.parametrize("in_large_order", [False, True])
def test_a_sample_of_files_that_joined_in_a_fork_is_like_any_other(
    tmp_path, monkeypatch, in_large_order
):
    """Regression: "zero-size array", where the sample had no document of one part."""
    monkeypatch.setattr(sources, "SMALL_TOKENS", 0 if in_large_order else 10**9)
    whole = token_source(tmp_path, [[40] * 50] * 20)
    joined: JoinedFiles = {"files": 1, "begins": [[0, 0]]}
    whole = open_source({**whole.manifest, "joined": [joined]}, whole.tokenizer)
    sample = base_eval.sample_of(whole, 400)
    assert trained_on(sample) == pytest.approx(base_eval.tokens_of(sample), rel=0.1)


def test_a_sample_without_a_loss_is_left_out(run, first_result):
    """Regression: "nothing to evaluate", and no result at all, where all its documents were among
    those of --without-documents."""
    pinned = run / "data_manifest.json"
    before = pinned.read_text()
    manifests = json.loads(before)
    files = manifests["train"]["data"]["files"]
    manifests["train"]["data"]["without"] = {entry["name"]: None for entry in files}
    pinned.write_text(json.dumps(manifests))
    try:
        path = run / "without.json"
        assert base_eval.main(["run", *QUICK, "--eval=bpb", f"--json={path}"]) == 0
    finally:
        pinned.write_text(before)
    result = json.loads(path.read_text())
    assert result["val_bpb"] == first_result["val_bpb"] and result["train_bpb"] == {}


def test_a_sample_of_many_groups_reads_few(tmp_path):
    """Regression: it read a document of each, and a group is a request in object storage."""
    whole = token_source(tmp_path, [[20] * 30] * 200)
    sample = base_eval.sample_of(whole, 2000)
    assert np.count_nonzero(sample.groups) <= base_eval.SAMPLE_GROUPS
    assert 2000 <= base_eval.tokens_of(sample) < 3000


def test_other_text_is_evaluated_without_the_data_of_the_run(run, first_result, tmp_path):
    """Regression: no command computed the bits per byte of a finished model on a text of one's own."""
    stored = (run / "eval.json").read_bytes()
    pinned = read_manifests(run / "data_manifest.json")["val"]["data"]
    kept_aside = tmp_path / "kept"
    for file in pinned["files"]:
        (kept_aside / file["name"]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(pinned["root"], file["name"]), kept_aside / file["name"])
    argv = ["run", *QUICK, "--eval=bpb,sample"]
    with hidden(Path(pinned["root"])):
        out = tmp_path / "same.json"
        assert command(base_eval.main, *argv, f"--val-path={kept_aside}", f"--json={out}").code == 0
        result = json.loads(out.read_text())
        assert result["val_bpb"] == json.loads(stored)["val_bpb"]
        assert result["samples"]["prompted"] and not result["train_bpb"]

        (tmp_path / "note.jsonl").write_text(json.dumps({"body": "of mice and men " * 100}) + "\n")
        mine = [*argv, f"--val-path={tmp_path / 'note.jsonl'}", "--text-field=body"]
        shown = command(base_eval.main, *mine).out
    assert re.search(r"note\.jsonl +\d+\.\d{6}$", shown, re.M) and "unigram" not in shown
    assert (run / "eval.json").read_bytes() == stored


def test_a_text_that_the_run_has_trained_on_is_named(run, tmp_path, caplog):
    """Regression: it was evaluated without a word."""
    pinned = read_json(run / "data_manifest.json")["train"]["data"]
    name = pinned["files"][0]["name"]
    copied = shutil.copy(Path(pinned["root"], name), tmp_path / "mine.parquet")
    argv = ["run", *QUICK, "--eval=bpb", f"--val-path={copied}", f"--json={tmp_path / 'out.json'}"]
    assert command(base_eval.main, *argv).code == 0
    assert f"mine.parquet has the contents of {name}, which is trained on" in caplog.text


def test_a_text_of_ones_own_is_evaluated_although_the_runs_manifest_is_damaged(run, tmp_path):
    manifest = run / "data_manifest.json"
    whole = manifest.read_bytes()
    (tmp_path / "note.jsonl").write_text(json.dumps({"text": "of mice and men " * 100}) + "\n")
    argv = ["run", *QUICK, "--eval=bpb", f"--val-path={tmp_path / 'note.jsonl'}"]
    manifest.write_text("{")
    try:
        assert "note.jsonl" in command(base_eval.main, *argv).out
    finally:
        manifest.write_bytes(whole)


def test_what_is_not_evaluated_again_stays_in_the_result(run, first_result):
    """Regression: --eval=sample deleted bits per byte and CORE from the report."""
    argv = ["run", *QUICK, "--eval-tokens=64"]
    assert command(base_eval.main, *argv, "--eval=sample").code == 0
    again = json.loads((run / "eval.json").read_text())
    assert {**again, "seconds": 0} == {**first_result, "seconds": 0}
    core = (run / "eval.csv").read_bytes()
    assert command(base_eval.main, *argv, "--eval=bpb").code == 0
    fewer = json.loads((run / "eval.json").read_text())
    assert fewer["val_bpb"] != first_result["val_bpb"] and fewer["core"] == first_result["core"]
    assert (run / "eval.csv").read_bytes() == core
    renamed = {**fewer, "checkpoint": "checkpoint-8"}  # as after the run was extended
    (run / "eval.json").write_text(json.dumps(renamed))
    assert command(base_eval.main, *argv, "--eval=bpb").code == 0
    assert json.loads((run / "eval.json").read_text())["core"] == first_result["core"]
    other = {**fewer, "dtype": "torch.bfloat16"}
    (run / "eval.json").write_text(json.dumps(other))
    assert command(base_eval.main, *argv, "--eval=bpb").code == 0
    assert "core" not in json.loads((run / "eval.json").read_text()), "it was of other arithmetic"
    (run / "eval.json").write_text(json.dumps(first_result))


def test_the_number_of_tokens_is_that_of_the_launch_that_took_the_step(copied, tmp_path):
    """Regression: after a resume with another --eval-tokens, it was that of the first launch, also for
    averages, and for steps that are replayed and not kept."""
    training.succeed(num_iterations=STEPS + 3, save_every=1, eval_tokens=2 * T)
    bpb = {event["step"]: event["bpb"] for event in training.events("val")}
    for name, step, tokens in ((f"run@{STEPS}", STEPS, EVAL_TOKENS), ("run", STEPS + 3, 2 * T)):
        assert command(base_eval.main, name, *QUICK, "--eval=bpb").code == 0
        result = result_of(step)
        assert (result["val_bpb"], result["eval_tokens"]) == (bpb[step], tokens)
    assert command(average.main, "run", "--last=2").code == 0
    assert command(replay.main, f"run@{STEPS + 1}", f"--out={tmp_path / 'aside'}").code == 0
    for run_dir in (training.run_dir("run-average-2"), tmp_path / "aside"):
        assert open_run(run_dir)[2].eval_tokens == 2 * T


def test_an_older_step_has_a_result_of_its_own(copied):
    """Regression: base_eval RUN@STEP replaced the results of the final step, and a newer step those of
    an older one."""

    def evaluate(step, *argv):
        few = (f"run@{step}", "--device-type=cpu", "--eval-tokens=64", "--unigram-tokens=1")
        return command(base_eval.main, *few, *argv).out

    folder = training.run_dir()
    evaluate(4, "--eval=sample")
    first = result_of(4)
    (folder / "eval.csv").write_text("of step 4")
    assert str(folder / "eval-4.json") in evaluate(STEPS, "--eval=bpb")
    assert json.loads((folder / "eval-4.json").read_text()) == first
    assert [path.name for path in folder.glob("*.csv")] == ["eval-4.csv"]
    final = result_of(STEPS)
    assert str(folder / "eval-6.json") in evaluate(6, "--eval=bpb")
    assert result_of(STEPS) == final

    run = RunReader(folder)
    assert [evaluation["step"] for evaluation in run.evaluations] == [STEPS, 6, 4]
    older = json.loads((folder / "eval-6.json").read_text())
    expected = {"step": 6, "bpb": older["val_bpb"], "loss": None, "eval_tokens": 64}
    assert run.validation(6) == expected, "the model card of step 6 has it"
    report = make_report(run)
    assert "At the evaluation after 4 steps, prompted:" in report, "the newest that wrote some"
    assert f"by base_eval on 64 tokens, after | {final['val_bpb']:.3f} |" in report
    trained = training.events("val")[-1]["bpb"]
    assert f"| validation bits per byte, after | {trained:.3f} |" in report


@contextmanager
def hidden(folder):
    """The folder has another name."""
    away = folder.with_name("away")
    folder.rename(away)
    try:
        yield
    finally:
        away.rename(folder)


def test_a_replay_that_is_not_kept_is_named_by_its_step(base, run, tmp_path, capsys):
    """Regression: the result named a temporary folder, which was deleted."""
    replayed = shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "eval.json"
    argv = ["run@5", "--no-keep", "--device-type=cpu", "--eval=bpb", f"--json={path}"]
    with mock.patch.object(sample, "make_available", lambda name, **_: str(replayed)):
        assert base_eval.main([*argv, "--unigram-tokens=1", "--eval-tokens=64"]) == 0
    assert json.loads(path.read_text())["checkpoint"] == "run@5"
    assert "run@5, step " in capsys.readouterr().out


@pytest.mark.parametrize("given", [(), ("--eval-tokens=512",)])
def test_it_says_first_how_much_it_evaluates(run, tmp_path, capsys, given):
    """Regression: an imported run, which has the default --eval-tokens, was silent for minutes."""
    argv = ["run", "--device-type=cpu", "--eval=bpb", f"--json={tmp_path / 'eval.json'}", *given]
    assert base_eval.main([*argv, "--unigram-tokens=1", "--device-batch-size=1"]) == 0
    amount = 512 if given else EVAL_TOKENS
    assert capsys.readouterr().out.splitlines()[0] == (
        f"evaluating about {2 * amount:,} tokens: up to {amount:,} of validation and of the training files "
        f"(--eval-tokens)"
    )


@pytest.mark.parametrize("B, processes", [(5, 1), (1, 2)])
def test_results_do_not_depend_on_batch_size_or_processes(base, run, first_result, B, processes):
    """Nor on how the checkpoint is named."""
    path = base / f"other-{B}.json"
    argv = [
        "run" if processes > 1 else str(run / "checkpoints" / "final"),
        "--device-type=cpu",
        "--unigram-tokens=2000",
        f"--eval={MODES}",
        f"--device-batch-size={B}",
        f"--json={path}",
    ]
    group = training.launch(base_eval.main, [argv] * processes, [{}] * processes)
    assert group.wait() == [0] * processes, group.text()
    other = json.loads(path.read_text())
    assert other["world_size"] == processes
    assert other["val_bpb"] == pytest.approx(first_result["val_bpb"], rel=64 * EPS)
    assert other["train_bpb"]["data"] == pytest.approx(
        first_result["train_bpb"]["data"], rel=64 * EPS
    )
    assert len(other["core"]["results"]) == 3 and other["core"]["items"] == 3 * (GROUP + 8)
    for exact in ("unigram_bpb", "samples", "core", "checkpoint", "step", "dtype"):
        assert other[exact] == first_result[exact]
    assert path.with_suffix(".csv").read_bytes() == (run / "eval.csv").read_bytes()


def test_the_unigram_model_counts_the_first_training_rows(run, first_result):
    data, config, _ = open_run(run)
    steps, sizes = -(-2000 // (config.V * T)), data.tokenizer.token_bytes().numpy()
    with closing(
        open_stream(config, data.train, range(config.V), tokenizer=data.tokenizer.fingerprint)
    ) as stream:
        counted = np.concatenate([row.tokens[1:] for row in stream.next_rows(steps)])
    assert len(counted) == steps * config.V * T
    counts = np.bincount(counted, minlength=len(sizes)) + 1
    nats = -np.log(counts / counts.sum())
    batches = base_eval.validation_loader(
        data.val["data"],
        tokenizer=data.tokenizer,
        T=T,
        device_batch_size=3,
        num_tokens=EVAL_TOKENS,
        device="cpu",
    )
    targets = np.concatenate([batch.targets[batch.targets >= 0].numpy() for batch in batches])
    bits = nats[targets][sizes[targets] > 0].sum() / np.log(2) / sizes[targets].sum()
    assert first_result["unigram_bpb"] == pytest.approx(bits, rel=1e-6)


def test_default_prompts_come_from_the_runs_validation_documents(base, first_result, capsys):
    """Regression: the prompts were the same six English sentences for every model, even a model of
    code."""
    samples = first_result["samples"]
    held_out = training.texts(96, seed=3)
    assert len(samples["unprompted"]) == 4 and len(samples["prompted"]) == 6
    begins = [
        next(n for n in range(len(text), -1, -1) if any(d.startswith(text[:n]) for d in held_out))
        for text in samples["prompted"]
    ]
    assert min(begins) > 5, "every sample begins like a document"
    assert sample.main(["run", "--device-type=cpu", "--max-tokens=4"]) == 0
    texts = [text.strip("\n") for text in capsys.readouterr().out.split("-" * 80)[1:]]
    assert len(texts) == 6 and all(any(d.startswith(text[:5]) for d in held_out) for text in texts)


def test_sample_continues_each_given_prompt(base, capsys, monkeypatch):
    defaults = sample.parse_args([])
    assert (defaults.temperature, defaults.top_k) == (0.8, 50)
    assert (
        sample.main(
            ["--device-type=cpu", "-p", "Water", "-p", "Air", "--num-samples=2", "--max-tokens=4"]
        )
        == 0
    )
    texts = [text.strip("\n")[:3] for text in capsys.readouterr().out.split("-" * 80)[1:]]
    assert texts == ["Wat", "Wat", "Air", "Air"]
    monkeypatch.setattr(
        sample, "open_run", lambda *_: (_ for _ in ()).throw(FileNotFoundError("no data"))
    )
    assert sample.main(["run", "--device-type=cpu", "--max-tokens=4"]) == 0
    assert capsys.readouterr().out.count("-" * 80) == 1


def test_a_result_that_cannot_be_stored_is_printed_first(base, capsys, monkeypatch):
    """Regression: for another user's run, there was only an error."""
    monkeypatch.setattr(
        base_eval, "write_json", mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    )
    argv = ["run", "--device-type=cpu", "--eval=bpb", "--unigram-tokens=1"]
    with pytest.raises(
        OSError, match=r"eval.json: the result above could not be stored .*--json=FILE"
    ):
        base_eval.main([*argv, f"--eval-tokens={EVAL_TOKENS}"])
    assert "bits per byte" in capsys.readouterr().out


def test_a_result_of_other_model_code_is_not_the_runs(copied, capsys, tmp_path):
    """Regression: the report showed it as the run's."""
    run, other = training.run_dir(), tmp_path / "other.json"
    of_other_code(run)
    argv = ["run", "--device-type=cpu", "--eval=bpb", "--unigram-tokens=1", "--eval-tokens=64"]
    assert base_eval.main(argv) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out and "not stored" in out and "--json" in out
    assert not [*run.glob("eval*")] and RunReader(run).evaluation == {}
    assert base_eval.main([*argv, f"--json={other}"]) == 0
    assert json.loads(other.read_text())["changed_code"] == ["nanochat/gpt.py"]
    assert "not stored" not in capsys.readouterr().out


def test_the_default_run_is_the_only_one(base, run):
    assert find_run(None) == run
    second = shutil.copytree(run, base / "runs" / "second")
    with pytest.raises(ValueError, match=r"which run\? .* holds 2 runs \(run, second\); name one"):
        base_eval.main(["--device-type=cpu"])
    shutil.rmtree(second)


def test_infer_bench_measures_each_number_of_rows(base, capsys):
    flags = ["--device-type=cpu", "--decode-tokens=3", "--prompt-tokens=4", "--rounds=1"]
    assert infer_bench.main([*flags, "run", "--batch-sizes", "1", "2"]) == 0
    out = capsys.readouterr().out
    assert "a prompt of 4 tokens, then 3 per row" in out and "decode tok/s" in out
    one, two = json.loads(out.splitlines()[-1])["batches"]
    model, _, _ = load_model("run", "cpu")
    assert (one["rows"], one["cache_bytes"]) == (1, KVCache(1, 7, model=model).k.nbytes * 2)
    assert (
        two["cache_bytes"] == 2 * one["cache_bytes"]
        and two["decode_tokens_per_s"] == 2 / two["decode_step_s"]
    )
    assert len([*infer_bench.times(model, [1, 2, 3], 2, 5)]) == 5, "stop tokens are ignored"
