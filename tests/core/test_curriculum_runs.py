"""Training with a curriculum, through the command: phases and their counts, halts and how to
continue after them, new runs with another curriculum, budgets, layouts."""

import json
from unittest import mock

import pytest

from nanochat.checkpoint import load_checkpoint
from nanochat.run_reader import RunReader
from nanochat.stream import ledger
from scripts import receipt, replay, verify
from tests import finished, training
from tests.training import checkpoints, digests, events, fingerprint, run_dir, steps

# 32 rows of each lane in a step: 8 steps are a block of the mix, whose counts are exact
T = 16
ROWS = 64
LANES = 2
STEP = T * ROWS  # tokens
SMALL = {
    "max_seq_len": T,
    "total_batch_size": STEP,
    "lanes": LANES,
    "device_batch_size": 32,
    "depth": 1,
    "overlap": 8,
    "num_iterations": None,
    "save_every": -1,
    "buffer_size": 8,
    "eval_tokens": 640,
    "long_docs": "split",
    "data_format": "shards",
    "warmup_steps": 0,
}
BUCKETS = {"code": 25, "tiny": 3, "web": 40}  # documents in each of the two training files


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """text/BUCKET with three files each, whose last one validates, and shards of them: whole, and
    in windows."""
    folder = tmp_path_factory.mktemp("data")
    with training.workplace(folder):
        training.write_buckets(folder, BUCKETS, shards=0, windows=T // 2)
    return folder


@pytest.fixture(autouse=True)
def workplace(tmp_path, data):
    with training.workplace(tmp_path) as path:
        for name in ("text", "shards", "windows"):
            (path / name).symlink_to(data / name)
        yield path


# ---- commands ------------------------------------------------------------------------------------


def mix_file(phases, *, name="mix.yaml", **more):
    """A curriculum of phases (steps, mix); None steps: no duration."""
    path = run_dir().parents[1] / name
    value = {
        "curriculum": [
            {"mix": mix} if length is None else {"duration_tokens": length * STEP, "mix": mix}
            for length, mix in phases
        ],
        **more,
    }
    path.write_text(json.dumps(value))
    return path


def command(curriculum, *, dry=False, **changed):
    """The settings of every run in this file. `dry`: a bucket runs dry, so the plan may only
    warn."""
    plan = {"plan": "warn"} if dry else {}
    return {
        **SMALL,
        "data_path": run_dir().parents[1] / "shards",
        "curriculum": curriculum,
        **plan,
        **changed,
    }


def succeed(curriculum, **changed):
    return training.succeed(**command(curriculum, **changed))


def halt(curriculum, *words, **changed):
    """A run that ends with exit code 3, and prints the reason and how to continue."""
    outcome = training.run(**command(curriculum, dry=True, **changed))
    assert outcome.code == 3 and "Traceback" not in outcome.err, outcome.err
    last = outcome.out.splitlines()[-1]
    assert all(word in last for word in ("halted", "--fork-from=run", *words)), last
    return last


def refuse(curriculum, *words, **changed):
    """A run that is refused with these words and changes no file."""
    before = fingerprint(run_dir())
    message = training.refuse(**command(curriculum, **changed))
    assert all(word in message for word in words), message
    assert fingerprint(run_dir()) == before and run_dir().exists() == bool(before)


# ---- results -------------------------------------------------------------------------------------


def accounts(checkpoint, tag="run"):
    return ledger(load_checkpoint(run_dir(tag) / "checkpoints" / checkpoint).cursors, T)


def rows(checkpoint, tag="run"):
    """{bucket: its rows since the start of the run}."""
    return {bucket: a["rows"] for bucket, a in accounts(checkpoint, tag).items()}


# ---- phases --------------------------------------------------------------------------------------


def test_two_phases_on_shards_have_the_counts_of_their_mixes(workplace):
    # a whole block, and half of one
    mix = mix_file([(8, {"web": 3, "code": 1}), (4, {"web": 0.5, "code": 0.5})])
    outcome = succeed(mix, save_every=8, eval_every=6)
    assert checkpoints() == ["checkpoint-8", "final"] and len(digests()) == 12
    first, both = rows("checkpoint-8"), rows("final")
    assert first == {"code": LANES * 64, "web": LANES * 192}
    second = {bucket: both[bucket] - first[bucket] for bucket in both}
    assert (
        sum(second.values()) == 4 * ROWS and abs(second["web"] - second["code"]) < 4 * ROWS / 4
    ), second
    by_bucket = [(s["loss"], s["loss/code"], s["loss/web"]) for _, s in sorted(steps().items())]
    assert all(min(code, web) <= loss <= max(code, web) for loss, code, web in by_bucket), (
        "64 rows have both"
    )
    assert all(last < first for last, first in zip(by_bucket[-1], by_bucket[0])), (
        "each bucket is learned"
    )
    assert (
        sorted(events("val")[0]["buckets"]) == ["code", "tiny", "web"] and len(events("val")) == 3
    )
    val = events("val")[-1]
    assert min(val["buckets"].values()) < val["bpb"] < max(val["buckets"].values()), (
        "of all buckets together"
    )
    assert all(f"{bucket} {bpb:.6f}" in outcome.out for bucket, bpb in val["buckets"].items())


# ---- dry buckets ---------------------------------------------------------------------------------

DRY = [(2, {"web": 3, "code": 1}), (8, {"web": 1, "code": 1, "tiny": 2})]


def test_a_dry_bucket_halts_the_run_until_exhaustion_is_allowed(workplace):
    mix = mix_file(DRY)
    halt(mix, "'tiny'", "run dry", "--allow-bucket-exhaustion")
    [event] = events("halted")
    [name] = checkpoints()
    step = event["step"]
    assert 2 < step < 10 and name == f"checkpoint-{step}-shutdown" and len(digests()) == step
    assert "'tiny'" in event["reason"] and rows(name)["tiny"] > 0
    before = fingerprint(run_dir())
    for _ in range(2):
        halt(mix, "'tiny'", "--allow-bucket-exhaustion", name)
        assert fingerprint(run_dir()) == before, "a halted run changes nothing"
    outcome = succeed(mix, dry=True, allow_bucket_exhaustion=True)
    assert f"warning: at step {step}, the bucket 'tiny' has run dry in" in outcome.out
    assert {e["bucket"] for e in events("dropped")} == {"tiny"} and len(digests()) == 10
    succeed(
        mix_file(DRY, name="allowed.yaml", allow_bucket_exhaustion=True),
        dry=True,
        model_tag="allowed",
    )
    assert digests("allowed") == digests() and rows("final", "allowed") == rows("final"), (
        "a halt changes no row"
    )
    done = fingerprint(run_dir())
    assert (
        "completed" in succeed(mix, dry=True, allow_bucket_exhaustion=True).out
        and fingerprint(run_dir()) == done
    )


def test_a_run_with_only_dry_buckets_halts_even_if_exhaustion_is_allowed(workplace):
    for _ in range(2):
        before = fingerprint(run_dir())
        last = halt(
            mix_file([(1000, {"tiny": 1})]),
            "all its buckets have run dry",
            allow_bucket_exhaustion=True,
        )
        assert "--allow-bucket-exhaustion" not in last, "a remedy that cannot work"
    assert fingerprint(run_dir()) == before and checkpoints() == [
        f"checkpoint-{len(digests())}-shutdown"
    ]


@pytest.mark.parametrize("allowed", [None, True])
def test_a_fork_of_a_run_whose_buckets_are_all_dry_needs_other_data(workplace, allowed):
    """Regression: --allow-bucket-exhaustion was advised, which such a run had; and where there is no
    other bucket."""
    last = halt(mix_file([(1000, {"tiny": 1})]), allow_bucket_exhaustion=allowed)
    assert "--allow-bucket-exhaustion" not in last
    with mock.patch.object(training, "flags", lambda **named: training.as_flags(named)):
        error = training.refuse(fork_from="run", model_tag="same")
    assert "--data-path" in error and "--allow-bucket-exhaustion" not in error


def test_the_file_may_allow_more_passes(workplace):
    succeed(mix_file(DRY, max_epochs={"tiny": 0}))
    assert (
        len(digests()) == 10 and accounts("final")["tiny"]["epochs"] >= 1 and not events("dropped")
    )


def test_two_processes_halt_together_and_resume_together(workplace):
    mix = mix_file(DRY)
    settings = command(mix, dry=True)
    group = training.start(2, **settings)
    assert group.wait() == [3, 3], group.text()
    assert group.text().count("halted: ") == 1 and "Traceback" not in group.text()
    assert checkpoints() == [f"checkpoint-{len(digests())}-shutdown"]
    training.finish(2, **settings, allow_bucket_exhaustion=True)
    succeed(mix, dry=True, allow_bucket_exhaustion=True, model_tag="one")
    assert digests() == digests("one") and rows("final") == rows("final", "one")
    two, one = (
        [
            line.get(f"loss/{bucket}")
            for line in steps(tag).values()
            for bucket in ("code", "tiny", "web")
        ]
        for tag in ("run", "one")
    )
    assert two == pytest.approx(one, abs=1e-3), "losses of the buckets"
    lanes = [{e["bucket"]: e["lanes"] for e in events("dropped", tag)} for tag in ("run", "one")]
    assert lanes[0] == lanes[1] and lanes[0]["tiny"] >= 1, (
        "the count includes the lanes of both processes"
    )


# ---- another curriculum, another length ----------------------------------------------------------


def test_a_halted_run_keeps_its_curriculum_and_a_new_run_continues_with_another(workplace):
    halt(mix_file(DRY), "'tiny'")
    before = rows(checkpoints()[0])
    more = mix_file(
        [(40, {"web": 1, "tiny": 1})],
        name="more.yaml",
        max_epochs={"tiny": 0},
        allow_budget_mismatch=True,
    )
    refuse(
        more,
        "--curriculum",
        "{'tiny': 1, 'web': 1}",
        "max_epochs",
        "--model-tag",
        "--init-from=run",
    )
    halted = len(steps())
    with mock.patch.object(training, "flags", lambda **named: training.as_flags(named)):
        error = training.refuse(fork_from="run", model_tag="same")
    assert f"halted: step {halted}: lane" in error and "--allow-bucket-exhaustion" in error
    assert "earlier step" not in error, "from there on, a fork takes the same rows"
    succeed(more, num_iterations=halted + 2, model_tag="next", fork_from="run")
    after = rows("final", "next")
    assert {b for b in after if after[b] > before.get(b, 0)} == {"web", "tiny"}, (
        "the new run repeats nothing"
    )


def planned(tag):
    """The plan of a run, as JSON."""
    return json.loads((run_dir(tag) / "plan.json").read_text())


def test_a_ramp_of_forks_takes_the_rows_that_its_plans_say_and_halts_at_the_step_they_say():
    """Twice the batch at steps 2 and 3. `tiny` runs dry in the last stage."""
    mix = mix_file([(60, {"web": 9, "tiny": 1})], allow_budget_mismatch=True)
    succeed(mix, num_iterations=2, model_tag="stage-0", plan="warn")
    for stage, (last, factor) in enumerate(((3, 2), (40, 4)), start=1):
        changed = {
            "model_tag": f"stage-{stage}",
            "fork_from": f"stage-{stage - 1}",
            "num_iterations": last,
            "total_batch_size": factor * STEP,
        }
        outcome = training.run(**command(mix, dry=True, **changed))
        assert outcome.code == (0 if stage == 1 else 3), outcome.err
    rows_of_step = {stage: LANES * (ROWS // LANES) * factor for stage, factor in ((1, 2), (2, 4))}
    for stage, first in ((1, 2), (2, 3)):
        tag = f"stage-{stage}"
        plan = planned(tag)
        taken = [step for step in steps(tag) if step >= first]
        assert plan["phases"][0]["first_step"] == first
        assert plan["steps"] == max(taken) + 1, "it halts where the plan says"
        name = "final" if stage == 1 else f"checkpoint-{plan['steps']}-shutdown"
        begin, end = (rows(f"checkpoint-{first}", tag), rows(name, tag))
        ours = {bucket: end[bucket] - begin.get(bucket, 0) for bucket in end}
        assert ours == {bucket: of["account"]["rows"] for bucket, of in plan["buckets"].items()}
        assert sum(ours.values()) == len(taken) * rows_of_step[stage]
    assert planned("stage-2")["buckets"]["tiny"]["dry_step"] == max(steps("stage-2")) + 1


def test_a_plan_of_a_fork_counts_what_its_parent_has_left():
    """Regression: a bucket with many more tokens than the fork asks for counts as inexhaustible,
    unless its parent has used them."""
    mix = mix_file([(60, {"web": 1})], allow_budget_mismatch=True)
    outcome = training.run(**command(mix, dry=True, num_iterations=60, model_tag="whole"))
    assert outcome.code == 3
    last = max(steps("whole"))
    succeed(mix, num_iterations=last - 1, model_tag="most", plan="warn")
    changed = {"fork_from": "most", "model_tag": "rest", "num_iterations": last + 20}
    outcome = training.run(**command(mix, dry=True, **changed))
    assert outcome.code == 3 and max(steps("rest")) == last
    assert planned("rest")["steps"] == last + 1


def test_a_fork_names_the_length_that_follows_from_its_curriculum():
    """Regression: it silently got another length."""
    succeed(mix_file([(2, {"web": 1})]))
    forked = {"fork_from": "run", "model_tag": "child"}
    mix = mix_file([(1, {"code": 1})], name="other.yaml")
    outcome = succeed(mix, **forked)
    assert "num_iterations 2 -> 3" in outcome.out
    assert "give its last phase more tokens" in succeed(mix, **forked).out
    refuse(mix, f"count from token {2 * STEP:,}", "ends at", num_iterations=5, **forked)
    succeed(mix_file([(3, {"code": 1})], name="longer.yaml"), **forked)
    assert max(steps("child")) == 4
    # regression: compare_runs and the page showed the curriculum before it was extended
    last = RunReader(run_dir("child")).last_config
    assert last["curriculum"]["phases"][-1]["duration_tokens"] == 3 * STEP


def test_a_rerun_keeps_the_length_of_the_newest_curriculum():
    """Regression: a fork's command went back to the curriculum with which the fork began, and the
    same command said that the run's first length had been changed."""
    succeed(mix_file([(2, {"web": 1})]))
    forked = {"fork_from": "run", "model_tag": "child"}
    succeed(mix_file([(1, {"code": 1})], name="other.yaml"), **forked)
    longer = mix_file([(3, {"code": 1})], name="longer.yaml")
    out = succeed(longer, **forked).out
    words = f"changed: --curriculum: its phases had {STEP:,} tokens (0: no end), now {3 * STEP:,}"
    assert words in out
    for again in (succeed(longer, **forked), succeed(None, **forked)):
        assert "completed after 5 steps" in again.out
        assert "its phases had" not in again.out + again.err


def test_the_curriculum_of_a_config_file_counts():
    """Regression: the run's own took its place: that of another run was accepted, and an edited copy
    trained no further."""
    mix = mix_file([(2, {"web": 1}), (2, {"code": 1})])
    succeed(mix)
    succeed(mix_file([(4, {"code": 1})], name="other.yaml"), model_tag="other")
    theirs = {"config": run_dir("other") / "config.json", "model_tag": "run"}
    with mock.patch.object(training, "flags", lambda **named: training.as_flags(named)):
        assert "--curriculum" in training.refuse(**theirs)
        copy = run_dir().parents[1] / "copy.json"
        config = json.loads((run_dir() / "config.json").read_text())
        config["curriculum"]["phases"][-1]["duration_tokens"] *= 2
        copy.write_text(json.dumps(config))
        out = training.succeed(config=copy).out
        assert max(steps()) == 5 and "changed: --curriculum: its phases" in out
        again = training.succeed(config=run_dir() / "config.json", num_iterations=6)
    assert "completed after 6 steps" in again.out


def test_a_fork_may_end_within_the_phases_that_it_inherits():
    """Regression: the recipe for a loss spike was refused for every run with a curriculum."""
    mix = mix_file([(2, {"web": 1}), (6, {"code": 1})])
    succeed(mix, save_every=2)
    cut = {"fork_from": "run@2", "model_tag": "cut", "skip_steps": 1}
    assert (
        f"ends at token {5 * STEP:,}, before its curriculum does ({8 * STEP:,})"
        in succeed(mix, num_iterations=5, **cut).out
    )
    assert max(steps("cut")) == 4
    assert "raise --num-iterations" in succeed(mix, num_iterations=5, **cut).out
    succeed(mix, num_iterations=6, **cut)
    succeed(mix, num_iterations=6, fork_from="cut@5", model_tag="of-cut", matrix_lr=0.01)
    assert max(steps("of-cut")) == 5, "so may a fork of this fork"
    late = {**cut, "model_tag": "late", "num_iterations": 11}
    refuse(mix, f"ends at {8 * STEP:,}, but the run trains on {11 * STEP:,}", **late)


def test_a_fork_with_smaller_steps_may_end_within_the_phases_that_it_inherits():
    """Regression: it was refused, and one that only ended sooner was not."""
    mix = mix_file([(2, {"web": 1}), (6, {"code": 1})])
    succeed(mix, num_iterations=8, save_every=2)
    half = {"fork_from": "run@2", "model_tag": "half", "total_batch_size": STEP // 2}
    out = succeed(mix, num_iterations=8, **half).out
    assert f"ends at token {5 * STEP:,}, before its curriculum does ({8 * STEP:,})" in out
    succeed(mix, num_iterations=-1, **half)
    assert max(steps("half")) == 13, "it was extended to the end of its curriculum"


def test_a_run_with_a_longer_last_phase_is_replayed_from_its_receipt(monkeypatch):
    """Regression: "the launch at step 4 has changed it, which no launch may"."""
    monkeypatch.setattr(verify, "replay", lambda words, _: replay.main(words))
    first = (2, {"web": 1})
    succeed(mix_file([first, (2, {"code": 1})]))
    path = run_dir().parents[1] / "receipt.json"
    for _ in range(2):  # the receipt of the short run holds for the long one, too
        assert finished.command(receipt.main, "run", f"--out={path}").code == 0
        succeed(mix_file([first, (4, {"code": 3})], name="longer.yaml"), save_every=2)
        outcome = finished.command(verify.main, path, "--replay=100%")
        assert outcome.code == 0, outcome.err + outcome.out
    assert "OK steps 4 to 6" in outcome.out


def test_another_curriculum_in_the_log_of_a_run_ends_its_replay():
    succeed(mix_file([(2, {"web": 1}), (2, {"code": 1})]))
    path = run_dir().parents[1] / "receipt.json"
    assert finished.command(receipt.main, "run", f"--out={path}").code == 0
    log = training.log_file()
    config = json.loads((run_dir() / "config.json").read_text())
    other = {**config["curriculum"], "phases": config["curriculum"]["phases"][1:]}
    started, *rest = log.read_text().splitlines(keepends=True)
    event = {**json.loads(started), "changed": {"curriculum": other}}
    log.write_text(json.dumps(event) + "\n" + "".join(rest))
    error = finished.command(verify.main, path, "--replay=100%").out
    assert "--curriculum: number of phases is 2 in the receipt" in error


def test_no_validation_file_is_odd_whose_bucket_is_left_out_and_a_fork_gets_no_advice_about_it():
    """Regression: "no training file is in its folder", and --val-fraction, which a fork refuses."""
    everything = {"data_format": "text", "data_path": run_dir().parents[1] / "text"}
    both = mix_file([(4, {"web": 1, "code": 1})], max_epochs={"web": 0, "code": 0})
    out = training.succeed(**command(both, **everything)).out
    assert "is used for validation, but" not in out, "tiny has a validation file, and is left out"
    one = mix_file([(2, {"web": 1})], name="web.yaml", max_epochs={"web": 0})
    fork = command(one, model_tag="child", fork_from="run@2", **everything)
    outcome = training.succeed(**fork)
    assert "--val-fraction" not in outcome.out + outcome.err


def test_a_resume_prints_a_last_phase_that_changes_the_length():
    """Regression: it printed nothing."""
    shorter = mix_file([(2, {"web": 1}), (1, {"code": 1})])
    succeed(shorter)
    longer = mix_file([(2, {"web": 1}), (3, {"code": 1})], name="longer.yaml")
    change = f"--curriculum: its phases had {3 * STEP:,} tokens (0: no end), now {5 * STEP:,}"
    out = succeed(longer).out
    assert f"changed: {change} (may move the end of the run: schedules then stretch" in out
    assert out.count("changed: ") == 1 and len(digests()) == 5


def test_a_budget_that_is_not_the_curriculums_is_refused_unless_allowed(workplace):
    mix = mix_file([(2, {"web": 1}), (3, {"code": 1})])
    for steps_ in (3, 7):
        refuse(
            mix,
            f"ends at {5 * STEP:,}, but the run trains on {steps_ * STEP:,}",
            "allow_budget_mismatch: true",
            num_iterations=steps_,
        )
    allowed = mix_file(
        [(2, {"web": 1}), (3, {"code": 1})], name="allowed.yaml", allow_budget_mismatch=True
    )
    succeed(allowed, num_iterations=7)
    assert len(digests()) == 7 and rows("final") == {"web": 2 * ROWS, "code": 5 * ROWS}, (
        "the last phase never ends"
    )


def test_a_last_phase_without_duration_lasts_as_long_as_the_run():
    """A command that names --num-iterations had to repeat it as tokens."""
    closed = mix_file([(2, {"web": 1}), (3, {"code": 1})], name="closed.yaml")
    succeed(closed, model_tag="closed")
    mix = mix_file([(2, {"web": 1}), (None, {"code": 1})])
    refuse(mix, "last phase has no duration_tokens", "--num-iterations")
    # regression: the only remedies were the tokens that its phases had, and -1, which is refused here
    refuse(mix, "and has no end", "(fewer without the last one)", "change", num_iterations=2)
    succeed(mix, num_iterations=5)
    assert digests() == digests("closed")
    assert "raise --num-iterations" in succeed(mix).out
    succeed(mix, num_iterations=6)
    assert rows("final") == {"web": 2 * ROWS, "code": 4 * ROWS}
    out = succeed(mix, num_iterations=6, model_tag="closed").out
    assert f"had {5 * STEP:,} tokens (0: no end), now 0" in out
    forked = {"fork_from": "run", "model_tag": "child"}
    other = mix_file([(None, {"web": 1})], name="other.yaml")
    out = succeed(other, num_iterations=8, **forked).out
    assert "1 code to the end" not in out and "curriculum 1 web, then 1 code -> 1 web" in out
    assert rows("final", "child") == {"web": 4 * ROWS}


# ---- layouts and attention -----------------------------------------------------------------------


@pytest.mark.parametrize("pack", [True, False])
def test_stored_entries_with_padding(workplace, pack):
    mix = mix_file([(4, {"web": 1, "code": 1})])
    settings = {
        "data_path": workplace / "windows",
        "packing": "binned",
        "long_docs": None,
        "overlap": None,
        **({} if pack else {"no_pack": True}),
    }
    succeed(mix, **settings)
    cursors = load_checkpoint(run_dir() / "checkpoints" / "final").cursors
    for bucket, a in accounts("final").items():
        placed = a["documents"] - sum(
            len(cursor["buckets"][bucket]["waiting"]) for cursor in cursors
        )
        assert a["padded"] > 0 == a["cropped"]
        assert placed > a["rows"] if pack else placed == a["rows"], "one entry per row"
    assert training.losses()[-1] < training.losses()[0]
    refuse(mix, "--packing", "--model-tag", **{**settings, "packing": "bestfit"})
    if pack:
        refuse(mix, "--pack", "--model-tag", **settings, no_pack=True)


def test_attention_inside_documents_trains_on_the_same_rows(workplace):
    mix = mix_file([(4, {"web": 1, "code": 1})])
    succeed(mix, attention_mode="sdpa_mask", eval_every=4)
    succeed(mix, model_tag="causal", eval_every=4)
    assert digests() == digests("causal")
    assert (
        training.losses()[1:] != training.losses("causal")[1:]
        and training.losses()[-1] < training.losses()[0]
    )
    assert sorted(events("val")[-1]["buckets"]) == ["code", "tiny", "web"]
