"""The life of a run as a state machine: whatever happens to it, it ends with the bits of an
undisturbed run.

    launched, on one process or on several --+-- to its end, or stopped by a signal, the flag file or its walltime
                                             +-- killed, or cut from power, at any change that it makes to the disk
                                             +-- on a disk that is full for a while
                                             +-- while another launch is paused, or begins at the same instant
    between launches:  damaged checkpoints, leftovers of crashes, a changed log, a longer horizon, a restart

After each of them, `inspect` checks what must hold. `--hypothesis-profile=thorough` runs for hours;
dev/torture.py does the same with kills at random times."""

import functools
import os
import re
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from nanochat import checkpoint, run_dir, run_owner, run_stop
from nanochat.common import hash_bytes
from nanochat.stream import ledger
from tests import crashes, training
from tests.toy import examples

# steps of a new run, of an extension, and of the longest run
FIRST = 8
LONGER = 4
LONGEST = 24
# rates do not depend on the horizon; at least as many leaves as processes, so all bits are equal
SETTINGS = {
    **training.SMALL,
    "leaves": 4,
    "device_batch_size": 2,
    "buffer_size": 8,
    "long_docs": "split",
    "warmup_steps": 6,
    "warmdown_ratio": 0,
    "weight_decay": 0,
    "save_every": 2,
    "eval_every": LONGER,
    "eval_tokens": training.T * 8,
}
VALIDATED = ("val_bpb", "first_val_bpb", "min_val_bpb")  # fields of a run's progress
EXACT = ("digest", "loss", "grad_norm", "smooth_loss", "tokens", "lr")  # fields of a step's line

WORLD_SIZES = st.sampled_from([1, 1, 2] if settings.default.max_examples < 100 else [1, 1, 2, 4])
HOW = st.fixed_dictionaries(
    {},
    optional={  # what a launch may change
        "sync_save": st.just(True),
        "save_every": st.integers(1, 5),
        "keep_last_k": st.integers(1, 2),
        "save_at": st.just("4*"),
        "tokenizer_threads": st.just(2),
    },
)
MOMENTS = st.one_of(
    st.tuples(st.just("nanochat.optim.MuonAdamW.step"), st.integers(1, 6)),
    st.sampled_from(
        [
            ("nanochat.gpt.GPT.init_weights", 1),
            ("nanochat.dataloader.DataLoader.__next__", 1),
            ("nanochat.evaluations.evaluate_buckets", 1),
            ("nanochat.engine.Engine.generate_batch", 1),
            ("nanochat.trainer.to_host", 1),
            ("nanochat.checkpoint.save_plain", 2),
        ]
    ),
)


# ---- the undisturbed run -------------------------------------------------------------------------


def bits(path):
    """All of a good checkpoint that must depend on its step alone."""
    seal = checkpoint.verify_checkpoint(path)
    kept = [
        name for name in seal["files"] if not name.startswith(("rng/", checkpoint.SCHEDULER_NAME))
    ]
    progress = {
        name: value
        for name, value in seal["progress"].items()
        if name not in ("train_time_s", *VALIDATED)
    }
    return {**{name: seal["files"][name]["blake2b"] for name in kept}, **progress, "K": seal["K"]}


@functools.cache
def undisturbed():
    """{step: line}, {step: bits} and {step: bits per byte} of the longest run, on one process."""
    with tempfile.TemporaryDirectory() as folder, training.workplace(Path(folder), **SETTINGS):
        training.succeed(num_iterations=LONGEST, save_every=1)
        run = training.run_dir()
        optimizer = checkpoint.load_checkpoint(training.final()).optimizer_state()
        assert {group["kind"] for group in optimizer["groups"]} == {"muon", "adamw"} and optimizer[
            "step"
        ] == LONGEST
        saved = {
            checkpoint.read_seal(path)["step"]: bits(path)
            for path in checkpoint.list_checkpoints(run)
        }
        vals = {event["step"]: event["bpb"] for event in training.events("val")}
        for _, cursors in map(run_dir.read_cursors, run_dir.cursor_files(run).values()):
            for account in ledger(cursors, training.T).values():
                assert account["read"] + account["bos"] + account["repeated"] == (
                    account["emitted"] + account["cropped"] + account["pending"]
                )
        return (
            {name: {step: line[name] for step, line in training.steps().items()} for name in EXACT},
            saved,
            vals,
        )


def validated(progress, vals):
    """Whether a checkpoint records the validations up to its step. A repeated step may already have
    the validation that first came right after the save."""
    step = progress["step"]
    before = [[bpb for at, bpb in vals.items() if at <= last] for last in (step - 1, step)]
    return [progress[name] for name in VALIDATED] in [
        [known[-1], known[0], min(known)] for known in before if known
    ]


# ---- what must hold ------------------------------------------------------------------------------


def inspect(run, damaged):
    """{name: step} of the good checkpoints of a run. Only checkpoints in `damaged` may be
    corrupt."""
    lines, saved, vals = undisturbed()
    records = list(run_dir.iter_log(run / "logs" / "train.jsonl"))
    for record in records:
        if run_dir.is_step(record):
            assert {name: record[name] for name in EXACT} == {
                name: lines[name][record["step"]] for name in EXACT
            }
        elif record["event"] == "val":
            assert record["bpb"] == vals[record["step"]]
    steps = sorted({record["step"] for record in records if run_dir.is_step(record)})
    assert steps == list(range(len(steps))), "a step is missing in the log"
    good, failed = {}, [record for record in records if record.get("event") == "evaluation_failed"]
    for name, path in run_dir.checkpoint_folders(run).items():
        try:
            step = checkpoint.load_checkpoint(path).step
        except (OSError, ValueError):
            assert name in damaged
            continue
        assert bits(path) == saved[step], name
        assert failed or validated(checkpoint.read_seal(path)["progress"], vals)
        good[name] = step
    for step, path in run_dir.cursor_files(run).items():
        assert hash_bytes(path.read_bytes()) == saved[step][checkpoint.CURSORS_NAME]
    newest = checkpoint.first_good(checkpoint.list_checkpoints(run))
    assert (newest.step if newest else 0) == max(good.values(), default=0) <= len(steps)
    return good


def check_kept(before, after, how):
    """A launch deletes only checkpoints that its settings allow it to delete."""
    lost = {*before.values()} - {*after.values()}
    newer = {step for step in after.values() if step > max(lost, default=0)}
    assert not lost or len(newer) >= how["keep_last_k"]
    assert not how.get("save_at") or not [step for step in lost if step % 4 == 0]


def files(run):
    """All files of a run except its owner's record and its state."""
    return {
        name: value for name, value in training.fingerprint(run).items() if not name.startswith(".")
    }


# ---- hooks inside a launch -----------------------------------------------------------------------


def pause(heartbeat):
    """Wait for SIGCONT. Without a heartbeat, only a log line or a save can notice that another
    launch took the run."""
    if not heartbeat:
        run_owner.RunState.refresh = lambda self: ""
    training.send(signal.SIGSTOP)


def asked_to_stop(moment, what):
    """Ask the run to stop at a moment, and write down how many steps it had done when it
    noticed."""
    enter, watches = run_stop.StopWatch.__enter__, []

    def entered(self):
        watches.append(self)
        return enter(self)

    def ask():
        run = training.run_dir()
        if what == "flag":
            run_stop.request_stop(run)
            # the heartbeat saw it; `stop_reason` would not know, because a save has its own thread
            training.wait_for(watches[-1].asked)
        else:
            training.send(signal.Signals[what])
        (run.parent / "steps_at_request").write_text(str(len(training.steps())))

    run_stop.StopWatch.__enter__ = entered
    training.before(*moment, ask)


# ---- the machine ---------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """`good`: {name: step} of the run's good checkpoints; `damaged`: names of the others; `over`:
    it has reported that it is completed. Draws do not depend on a launch's results, because these
    depend on the timing of its threads."""

    def __init__(self):
        super().__init__()
        undisturbed()
        self.folder = tempfile.TemporaryDirectory()
        self.workplace = training.workplace(Path(self.folder.name), **SETTINGS)
        self.workplace.__enter__()
        self.run, self.suspended = training.run_dir(), []
        self.horizon = FIRST
        self.good = {}
        self.damaged = set()
        self.over = False

    def teardown(self):
        """Whatever happened, the same command trains to the end."""
        try:
            if sys.exc_info()[0] is None:  # not after a failure
                self.launch()
                assert self.over
        finally:
            for group in self.suspended:  # they would outlive a failed test
                group.kill()
            self.workplace.__exit__(None, None, None)
            self.folder.cleanup()

    def make_unfinished(self):
        """Extend or restart a completed run."""
        if self.over and self.horizon < LONGEST:
            self.horizon, self.over = self.horizon + LONGER, False
        elif self.over:
            self.is_restarted()

    def launch_here(self, **how):
        """Launch the run in this process, as if it had begun now, so that an existing flag is a
        leftover."""
        run_stop.StopWatch.ended = run_stop.uptime_s()
        return training.run(**how)

    def launch(self, world_size=1, how=None, hook=None, codes=(0,)):
        """Launch the run, check what must hold, and return its exit code and output. Without a
        hook, one process means this one."""
        how = how or {}
        before, newest = training.fingerprint(self.run), max(self.good.values(), default=0)
        launches = len(training.events("started"))
        if world_size == 1 and hook is None:
            outcome = self.launch_here(num_iterations=self.horizon, **how)
            code, output = outcome.code, outcome.out + outcome.err
        else:
            group = training.start(world_size, hook=hook, num_iterations=self.horizon, **how)
            code, output = group.wait_or_kill(), group.text()
        assert code in codes, output
        if "nothing to do" in output:
            assert newest == self.horizon and training.fingerprint(self.run) == before
            self.over = True
        elif self.over:
            raise AssertionError(f"a completed run continued: {output}")
        for event in training.events("started")[launches:]:
            assert event["step"] == newest, "it did not resume from the newest good checkpoint"
            for name in self.damaged:
                assert f"{name} is skipped" in output or checkpoint_number(name) <= newest
        self.update(how, completed="completed: " in output)
        return code, output

    def update(self, how=None, *, completed=False):
        """Check the run directory after a launch, and update `good` and `damaged`."""
        good = inspect(self.run, self.damaged)
        check_kept(self.good, good, how or {})
        self.good = good
        self.damaged &= run_dir.checkpoint_folders(self.run).keys() - good.keys()
        if completed:
            self.check_completed()

    def check_completed(self):
        """Nothing is missing, and no temporary file is left."""
        assert self.good["final"] == len(training.steps()) == self.horizon
        evaluations = training.events("val") + training.events("evaluation_failed")
        assert {event["step"] for event in evaluations} == set(range(0, self.horizon + 1, LONGER))
        assert not [name for name in training.checkpoints() if name.startswith(".")]
        assert not [*self.run.rglob("*.tmp")]
        state = training.state()
        assert (run_owner.exit_code(self.run, state), state["checkpoint"]) == (0, "final")
        self.over = True

    # ---- launches

    @rule(world_size=WORLD_SIZES, how=HOW)
    def completes(self, world_size, how):
        self.launch(world_size, how)
        assert self.over

    @rule(world_size=WORLD_SIZES, how=HOW, at=st.integers(0, 200))
    def is_killed_at_a_change_to_the_disk(self, world_size, how, at):
        self.make_unfinished()
        self.launch(
            world_size,
            how,
            partial(crashes.dying_at, at, below=self.run),
            codes=(0, -signal.SIGKILL),
        )

    @rule(
        world_size=WORLD_SIZES,
        how=HOW,
        first=st.integers(0, 9),
        every=st.integers(12, 20),
        number=st.integers(0, 50),
    )
    def is_cut_from_power_at_many_changes(self, world_size, how, first, every, number):
        """All copies are checked, and the run resumes from one of them."""
        self.make_unfinished()
        copies = Path(self.folder.name) / "copies"
        good = self.good
        damaged = {*self.damaged}
        copies.mkdir()
        self.launch(
            world_size, how, partial(crashes.copying_at, first, every, below=self.run, into=copies)
        )
        cuts = sorted(copies.iterdir())
        for cut in cuts:
            after = inspect(cut, damaged)
            check_kept(good, after, how)
            good = after
        if cuts:
            shutil.rmtree(self.run)
            cuts[number % len(cuts)].rename(self.run)
            self.good = {}
            self.damaged = damaged
            self.over = False
            self.update()
        shutil.rmtree(copies)

    @rule(
        world_size=WORLD_SIZES,
        how=HOW,
        moment=MOMENTS,
        rank=st.integers(0, 3),
        what=st.sampled_from([*(number.name for number in run_stop.SIGNALS), "flag"]),
    )
    def is_asked_to_stop(self, world_size, how, moment, rank, what):
        self.make_unfinished()
        steps_at_request, rank = self.run.parent / "steps_at_request", rank % world_size
        steps_at_request.unlink(missing_ok=True)
        began = max(self.good.values(), default=0)
        hook = partial(asked_to_stop, moment, what)
        hook = partial(crashes.on_rank, 0 if what == "flag" else rank, hook)
        if what == "flag" and moment[0].endswith("init_weights"):
            return  # the heartbeat has not begun
        _, output = self.launch(world_size, {**how, "sample_every": 3}, hook)
        reason = "asked by scripts.stop" if what == "flag" else what
        if steps_at_request.exists() and not self.over:
            state = training.state()
            assert state["status"] == "stopped" and state["reason"].startswith(reason), output
            assert state["step"] <= max(began, int(steps_at_request.read_text())) + 2, (
                "it stopped late"
            )
            assert (
                self.good.get(state["checkpoint"], 0)
                == state["step"]
                == max(self.good.values(), default=0)
            )
            assert state["step"] == began or not moment[0].endswith("init_weights"), (
                "it took a step after its set-up"
            )
        else:
            assert self.over, output

    @rule(world_size=WORLD_SIZES, how=HOW, seconds=st.integers(1, 4))
    def reaches_its_walltime(self, world_size, how, seconds):
        self.make_unfinished()
        flags = {"max_runtime_seconds": seconds + 0.5, "walltime_reserve_seconds": 0}
        _, output = self.launch(
            world_size, {**how, **flags}, partial(training.a_step_is_a_second, seconds + 0.5)
        )
        assert self.over or (
            training.state()["status"] == "stopped" and "stopped: walltime: " in output
        )
        assert self.over or self.good[training.state()["checkpoint"]] == training.state()["step"]

    @rule(how=HOW, at=st.integers(0, 100), number=st.integers(1, 60))
    def finds_the_disk_full_for_a_while(self, how, at, number):
        self.make_unfinished()
        code, output = self.launch(
            1, how, partial(crashes.filling_at, at, number, below=self.run), codes=(0, 1)
        )
        assert (
            self.over if code == 0 else output.count("error: ") == 1 and "No space left" in output
        ), output
        assert "Traceback" not in output, output

    @rule(how=HOW, steps=st.integers(1, 6), resumes=st.booleans())
    def is_launched_twice(self, how, steps, resumes):
        """The second launch comes while the first one is paused, which then resumes or is
        killed."""
        first, pid = self.paused(how, steps)
        if pid:
            before = files(self.run)
            second = self.launch_here(num_iterations=self.horizon)
            assert second.code == 1 and re.search(
                rf"error: .*another launch owns this run: host .*, pid {pid}, since.*"
                r" scripts\.stop .*--model-tag",
                second.err,
            ), second.err
            assert files(self.run) == before
            os.kill(pid, signal.SIGCONT if resumes else signal.SIGKILL)
        assert first.wait() == [0 if resumes or not pid else -signal.SIGKILL], first.text()
        self.update(how, completed=resumes or not pid)

    @rule(world_size=WORLD_SIZES, how=HOW, steps=st.integers(1, 6), replaced=st.booleans())
    def is_moved_away_while_it_trains(self, world_size, how, steps, replaced):
        """All processes exit with one error, and do not touch a new run in its place, even without
        a heartbeat."""
        first, pid = self.paused(
            {**how, "sync_save": True}, steps, world_size, heartbeat=not replaced
        )
        if pid:
            away = self.run.rename(self.run.with_name("away"))
            if replaced:
                training.succeed(num_iterations=1)
            before = training.fingerprint(self.run) if replaced else {}
            os.kill(pid, signal.SIGCONT)
            assert first.wait() == [1] * world_size, first.text()
            assert (
                first.text().count("error: ") == 1
                and "this launch no longer owns the run" in first.text()
            )
            assert "Traceback" not in first.text()
            assert self.run.exists() == replaced and training.fingerprint(self.run) == before
            shutil.rmtree(self.run, ignore_errors=True)
            away.rename(self.run)
        else:
            assert first.wait() == [0] * world_size
        self.update(how, completed=not pid)

    def paused(self, how, steps, world_size=1, heartbeat=True):
        """(a launch whose rank 0 paused itself after so many steps, its pid); the pid is None if it
        ended before."""
        self.make_unfinished()
        hook = partial(
            training.before, "nanochat.optim.MuonAdamW.step", steps, partial(pause, heartbeat)
        )
        group = training.start(
            world_size, hook=partial(crashes.on_rank, 0, hook), num_iterations=self.horizon, **how
        )
        self.suspended.append(group)
        process = group.processes[0]
        training.wait_for(lambda: process.exitcode is not None or crashes.is_suspended(process.pid))
        return group, process.pid if process.exitcode is None else None

    @rule(how=HOW)
    def is_launched_twice_at_the_same_instant(self, how):
        self.make_unfinished()
        started = len(training.events("started"))
        groups = [training.start(1, num_iterations=self.horizon, **how) for _ in range(2)]
        codes = [group.wait()[0] for group in groups]
        outputs = [group.text() for group in groups]
        assert sorted(codes) == [0, 1] or any("nothing to do" in output for output in outputs), (
            outputs
        )
        assert sum("completed: " in output for output in outputs) == 1
        assert len(training.events("started")) == started + 1
        self.update(how, completed=True)

    # ---- between launches

    @rule(
        which=st.sampled_from([-1, -1, -2, 0]),
        number=st.integers(0, 7),
        how=st.sampled_from(["truncated", "empty", "missing", "flipped"]),
    )
    def has_a_checkpoint_damaged(self, which, number, how):
        if not self.good:
            return
        name = sorted(self.good, key=self.good.__getitem__)[max(which, -len(self.good))]
        folder = self.run / "checkpoints" / name
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        file = files[number % len(files)]
        content = file.read_bytes()
        middle = len(content) // 2
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes(
                {
                    "empty": b"",
                    "truncated": content[:middle],
                    "flipped": content[:middle]
                    + bytes([content[middle] ^ 4])
                    + content[middle + 1 :],
                }[how]
            )
        if len(self.good) == 1:
            before = training.fingerprint(self.run)
            outcome = self.launch_here(num_iterations=self.horizon)
            assert outcome.code == 1 and "--resume=scratch --force" in outcome.err, (
                "the run started over by itself"
            )
            assert training.fingerprint(self.run) == before
            file.write_bytes(content)
            return
        del self.good[name]
        self.damaged.add(name)
        assert name not in inspect(self.run, self.damaged), "the damage is not noticed"
        self.over = self.over and name != "final"

    @rule()
    def has_leftovers_of_crashes(self):
        """Half a line, half-written files, and an old flag file."""
        if not self.good or self.over:
            return
        with open(self.run / "logs" / "train.jsonl", "ab") as log:
            log.write(b'{"step": 1, "digest": "00')
        for name in (
            ".config.json.0123abcd.tmp",
            "logs/cursors/.step-00000002.json.gz.0123abcd.tmp",
            "checkpoints/.tmp-checkpoint-2-7/optimizer.bin",
            "checkpoints/.del-checkpoint-2-7/optimizer.bin",
        ):
            (self.run / name).parent.mkdir(parents=True, exist_ok=True)
            (self.run / name).write_bytes(b"half")
        (self.run / run_stop.FLAG_NAME).touch()
        os.utime(self.run / run_stop.FLAG_NAME, (0, 0))

    @rule(number=st.integers(0, LONGEST))
    def has_another_digest_in_its_log(self, number):
        """A repeated step has another digest than its line in the log, so the run ends before it
        trains."""
        repeated = range(max(self.good.values(), default=0), len(training.steps()))
        if not repeated:
            return
        step = repeated[number % len(repeated)]
        log, digest = training.log_file(), training.digests()[step]
        log.write_text(log.read_text().replace(digest, "0" * 16))
        outcome = self.launch_here(num_iterations=self.horizon)
        log.write_text(log.read_text().replace("0" * 16, digest))
        assert outcome.code == 1 and re.search(
            rf"error: step {step}: .*{digest}.*{'0' * 16}", outcome.err
        ), outcome.err
        self.update()

    @rule()
    def is_restarted(self):
        """With --force, the old run is moved aside unchanged."""
        if not run_dir.is_run_dir(self.run):
            return
        before = files(self.run)
        outcome = self.launch_here(num_iterations=self.horizon, resume="scratch")
        assert outcome.code == 1 and re.search(
            "--resume=scratch: .*--force.*--model-tag", outcome.err
        ), outcome.err
        assert files(self.run) == before
        self.horizon = FIRST
        self.good = {}
        self.damaged = set()
        self.over = False
        training.start(
            hook=partial(training.die_after_step, 3),
            num_iterations=FIRST,
            resume="scratch",
            force=True,
        ).wait_for_death()
        old = self.run.with_name("run.old-1")
        assert files(old) == before
        shutil.rmtree(old)
        self.update()


def checkpoint_number(name):
    """The step in a checkpoint's name; -1 for `final`."""
    match = run_dir.CHECKPOINT_NAME.fullmatch(name)
    return int(match["step"] or -1)


def test_whatever_happens_to_a_run_it_ends_with_the_bits_of_an_undisturbed_one():
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=examples(0.25),
            stateful_step_count=10,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )
