"""Mirrored runs: killed machines, torn mirrors, two machines, a mirror that cannot be reached; in
folders and in object storage. The laws of owners and stores are in tests/spec/test_mirror.py."""

import contextlib
import errno
import json
import re
import shutil
import signal
import threading
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from nanochat import mirror, mirror_owner
from nanochat.checkpoint import list_checkpoints, load_checkpoint
from nanochat.common import begin_launch, hash_file
from nanochat.config import Settings
from nanochat.integrations import mirror_bucket
from nanochat.integrations.object_storage import Patience
from nanochat.mirror import open_job
from nanochat.mirror_fetch import Fetch
from nanochat.mirror_marks import START, read_marks
from nanochat.mirror_owner import OWNER_NAME, claim_mirror, encode
from nanochat.mirror_store import Folder, as_file, open_store
from nanochat.run_state import read_mirror_state
from scripts import base_train, status, validate
from tests import training
from tests.crashes import die
from tests.finished import command
from tests.object_store import ACCESS_KEY, Fault
from tests.spec.test_mirror import LAWS

STEPS = {"num_iterations": 8, "save_every": 2}


def hurry():
    """A mirror whose owner counts as gone after a second."""
    mirror_owner.RENEW_S = 0.1
    mirror_owner.SILENCE_S = 1.0
    mirror_owner.POLL_S = 0.05
    mirror.RETRY_S = 0.05
    mirror.HURRY_S = 0.05


@pytest.fixture(scope="module", autouse=True)
def quick():
    names = ("RENEW_S", "SILENCE_S", "POLL_S")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(mirror_owner, name, getattr(mirror_owner, name)))
        for name in ("RETRY_S", "HURRY_S"):
            stack.enter_context(mock.patch.object(mirror, name, getattr(mirror, name)))
        hurry()
        yield


@pytest.fixture
def place(tmp_path):
    return tmp_path / "mirror"


@pytest.fixture
def machine(tmp_path):
    """A context in which code runs on an empty machine; the same one for the same name."""

    def enter(name):
        return training.workplace(tmp_path / name, **{**training.SMALL, **STEPS})

    return enter


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(what the last checkpoint of the undisturbed run holds, its digests)."""
    with training.workplace(tmp_path_factory.mktemp("whole"), **{**training.SMALL, **STEPS}):
        training.succeed()
        return training.state_of(training.final()), training.digests()


def result():
    return training.state_of(training.final()), training.digests()


def marks(place):
    """The checkpoints of the marks in a folder, oldest first."""
    return [
        path.name.split("-", 1)[1].rpartition("-")[0]
        for path in sorted((place / "marks").iterdir())
    ]


def newest_mark(place):
    return json.loads(sorted((place / "marks").iterdir())[-1].read_text())


def piece_of_model(place):
    """The piece with the weights of the newest checkpoint."""
    files = newest_mark(place)["files"]
    [[[name, _]]] = [files[name] for name in files if name.endswith("pytorch_model.bin")]
    return place / "pieces" / name


def stop_after(step, place, **changed):
    """A run that is mirrored, and killed after a step."""
    hook = partial(kill_once_mirrored, step)
    run = training.start(hook=hook, mirror_to=place, sync_save=True, **changed)
    run.wait_for_death()
    return run.text()


def stopped_at_step_5():
    """Stop the run after step 5 with a signal."""
    hurry()
    training.after_step(5, partial(training.send, signal.SIGTERM))


def kill_once_mirrored(step):
    """Kill the process after a step, once all saves before it are mirrored."""
    hurry()

    def act():
        training.wait_for(lambda: read_mirror_state(training.run_dir())["step"] == step - 1)
        die()

    training.after_step(step, act)


# ---- the same command on an empty machine --------------------------------------------------------


def test_a_killed_run_goes_on_with_the_same_bits_on_an_empty_machine(machine, place, whole):
    with machine("a"):
        stop_after(5, place)
    with machine("b"):
        shutil.rmtree(training.run_dir().parents[1] / "tokenizer")
        outcome = training.succeed(mirror_to=place)
        assert result() == whole
        assert "it has step 4, and nothing is here" in outcome.out
        assert [event["step"] for event in training.events("started")] == [0, 4]


def flip(path):
    """Change a byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def corrupt_pieces(place):
    return [path.name for path in (place / "pieces").iterdir() if hash_file(path) != path.name]


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"x"), flip])
def test_a_torn_newest_checkpoint_is_skipped_for_the_one_before(machine, place, whole, damage):
    with machine("a"):
        stop_after(5, place)
    piece = piece_of_model(place)
    damage(piece)
    with machine("b"):
        outcome = training.succeed(mirror_to=place)
        assert result() == whole
        assert (
            "checkpoint-4 is skipped" in outcome.err and f"{piece.name} is corrupt" in outcome.err
        )
        assert [event["step"] for event in training.events("started")] == [0, 2]
    assert corrupt_pieces(place) == [], "the step that was taken again is whole"


def test_a_checkpoint_that_is_damaged_here_does_not_reach_the_mirror(machine, place):
    with machine("a"):
        training.succeed(num_iterations=2)
        flip(training.final() / "model" / "pytorch_model.bin")
        error = training.refuse(num_iterations=2, mirror_to=place)
        assert "no checkpoint can be used" in error
        run = mirror.RunMirror(Settings(mirror_to=str(place)), training.run_dir())
        run.event("started", 2, {})
        training.wait_for(lambda: read_mirror_state(training.run_dir())["problem"])
        run.release()
        assert "corrupt" in read_mirror_state(training.run_dir())["problem"]
    assert corrupt_pieces(place) == [] and marks(place) == []


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"{}")])
def test_a_lost_piece_or_a_damaged_mark_is_skipped(machine, place, damage):
    with machine("a"):
        training.succeed(num_iterations=4, mirror_to=place)
    damaged = [piece_of_model(place), sorted((place / "marks").iterdir())[-1]]
    damage(damaged[damage is not Path.unlink])
    with machine("b"):
        training.succeed(num_iterations=4, mirror_to=place)
        assert [event["step"] for event in training.events("started")] == [0, 2]


def test_a_mirror_in_which_all_is_torn_starts_no_new_run(machine, place):
    with machine("a"):
        training.succeed(num_iterations=2, mirror_to=place)
    for piece in (place / "pieces").iterdir():
        piece.write_bytes(b"")
    with machine("b"):
        assert "nothing in it can be used" in training.refuse(num_iterations=2, mirror_to=place)
        assert not training.run_dir().exists()


def test_a_mirror_whose_marks_are_all_damaged_starts_no_new_run(machine, place):
    with machine("a"):
        training.succeed(num_iterations=2, mirror_to=place)
    for path in (place / "marks").iterdir():
        path.write_bytes(b"{}")
    with machine("b"):
        assert "none of its marks can be used" in training.refuse(num_iterations=2, mirror_to=place)


def kill_once_begun(step):
    """Kill the process after a step, once the start of its run is mirrored; it has saved nothing."""
    hurry()

    def act():
        training.wait_for(lambda: read_mirror_state(training.run_dir())["checkpoint"] == START)
        die()

    training.after_step(step, act)


def begin_only(place, **changed):
    """A run that is killed before its first save."""
    run = training.start(hook=partial(kill_once_begun, 1), mirror_to=place, **changed)
    run.wait_for_death()


def test_a_run_killed_before_its_first_save_begins_again_on_an_empty_machine(
    machine, place, whole, capsys
):
    """Regression: the next machine had no tokenizer, and was told to train another one."""
    with machine("a"):
        begin_only(place)
        text = shown_mirror(capsys)
        assert "start" in text and "behind" not in text
    with machine("b"):
        shutil.rmtree(training.run_dir().parents[1] / "tokenizer")
        assert "it has no checkpoint yet" in training.succeed(mirror_to=place).out
        assert result() == whole
        assert [event["step"] for event in training.events("started")] == [0, 0]
    assert "start" not in marks(place), "a save has replaced it"


def test_a_run_without_a_checkpoint_may_be_replaced_in_its_mirror(machine, place):
    with machine("a"):
        begin_only(place)
    with machine("b"):
        other = {"matrix_lr": 0.5, "mirror_to": place}
        refusal = training.refuse(**other)
        assert "--matrix-lr: the run has 0.02, this launch 0.5" in refusal
        assert "--resume=scratch" in refusal
        training.succeed(**other, resume="scratch", num_iterations=2)
        assert len(training.events("started")) == 1, "nothing of the other run was fetched"
    assert marks(place) == ["final"]


def test_a_run_on_two_processes_goes_on_with_the_same_bits_on_one(machine, place):
    with machine("whole"):
        training.succeed(leaves=2)
        whole = result()
    with machine("a"):
        hook = partial(kill_once_mirrored, 5)
        run = training.start(2, hook=hook, mirror_to=place, sync_save=True, leaves=2)
        run.wait_for_death()
    with machine("b"):
        training.succeed(mirror_to=place, leaves=2)
        assert [event["step"] for event in training.events("started")] == [0, 4]
        assert result() == whole


def test_a_run_that_is_asked_to_stop_is_mirrored_up_to_its_last_step(machine, place):
    stop = partial(training.after_step, 4, partial(training.send, signal.SIGTERM))
    with machine("a"):
        run = training.start(hook=stop, mirror_to=place)
        assert run.wait() == [0], run.text()
        before = training.log_file().read_bytes()
    with machine("b"):
        outcome = training.succeed(mirror_to=place)
        assert "it has step 6, and nothing is here" in outcome.out
        assert training.log_file().read_bytes().startswith(before)


def test_a_completed_run_is_complete_on_an_empty_machine(machine, place):
    with machine("a"):
        training.succeed(num_iterations=2, mirror_to=place)
        before = training.log_file().read_bytes()
    with machine("b"):
        assert "nothing to do" in training.succeed(num_iterations=2, mirror_to=place).out
        assert training.log_file().read_bytes() == before


def shown(capsys):
    """(exit code, JSON) of scripts.status for the run."""
    capsys.readouterr()
    code = status.main(["run", "--json", "--exit-code"])
    return code, json.loads(capsys.readouterr().out)


def test_a_machine_that_fetches_a_run_completed_elsewhere_shows_it_as_completed(
    machine, place, capsys
):
    """Regression: it stayed dead there, at the step at which its own launch was killed."""
    with machine("a"):
        stop_after(5, place)
        code, before = shown(capsys)
        assert (code, before["shown"], before["step"]) == (1, "dead", 6)
        assert before["mirror"]["behind_steps"] == 0, "nothing newer than step 4 is known here"
    with machine("b"):
        training.succeed(mirror_to=place)
    for name in ("a", "empty"):
        with machine(name):
            assert "nothing to do" in training.succeed(mirror_to=place).out
            code, after = shown(capsys)
            assert (code, after["shown"], after["step"]) == (0, "completed", 8)
            assert after["tokens"] == 8 * training.STEP and after["checkpoint"] == "final"


def test_after_a_fetch_a_launch_that_fails_leaves_the_end_of_the_newest_launch(
    machine, place, capsys
):
    with machine("a"):
        stop_after(3, place)
    with machine("b"):
        run = training.start(hook=stopped_at_step_5, mirror_to=place)
        assert run.wait() == [0], run.text()
        there, ended = shown(capsys)
    with machine("a"):
        data = training.run_dir().parents[1] / "data"
        data.rename(data.with_name("moved"))
        assert training.run(mirror_to=place).code == 1
        here, fetched = shown(capsys)
        assert here == there == 10
        for name in ("shown", "reason", "step", "tokens", "loss", "checkpoint", "val_bpb"):
            assert fetched[name] == ended[name], name


def test_a_fork_goes_on_on_an_empty_machine_without_its_parent(machine, place):
    fork = {"fork_from": "run@2", "model_tag": "child", "matrix_lr": 0.01}
    with machine("a"):
        training.succeed(num_iterations=4)
        argv = [*training.as_flags({**fork, "mirror_to": place})]
        assert base_train.main(argv) == 0
        whole = training.state_of(training.final("child"))
    for name in marks(place)[1:]:
        [path] = (place / "marks").glob(f"*-{name}-*")
        path.unlink()
    with machine("b"):
        argv.append(f"--data-path={training.run_dir().parents[1] / 'data'}")
        assert base_train.main(argv) == 0
        assert training.state_of(training.final("child")) == whole
        assert [event["step"] for event in training.events("started", "child")] == [2, 2]


# ---- what is here, and what is there -------------------------------------------------------------


def test_a_newer_mirror_wins_and_no_line_of_the_log_here_is_lost(machine, place, whole):
    with machine("a"):
        stop_after(5, place)
        before = training.log_file().read_bytes()
    with machine("b"):
        training.succeed(mirror_to=place)
    with machine("a"):
        outcome = training.succeed(mirror_to=place)
        assert "it has step 8, which is newer than step 4 here" in outcome.out
        assert result() == whole
        assert training.log_file().read_bytes().startswith(before)


def test_a_newer_run_directory_wins_and_is_copied(machine, place, whole):
    with machine("a"):
        stop_after(5, place)
        sorted((place / "marks").iterdir())[-1].unlink()  # as if its copy had not ended
        outcome = training.succeed(mirror_to=place)
        assert "nothing in it is newer than step 4 here" in outcome.out
        assert result() == whole
    assert marks(place)[-1] == "final"


def test_a_mirror_may_be_added_to_a_run_that_has_begun(machine, place, whole):
    with machine("a"):
        training.start(hook=partial(training.die_after_step, 5)).wait_for_death()
        training.succeed(mirror_to=place)
    with machine("b"):
        training.succeed(mirror_to=place)
        assert result() == whole


# ---- what the mirror keeps -----------------------------------------------------------------------


def test_the_mirror_keeps_what_retention_keeps_and_nothing_else(machine, place):
    with machine("a"):
        training.succeed(mirror_to=place, keep_last_k=1, save_at="2", sync_save=True)
        assert (
            sorted(marks(place))
            == training.checkpoints()
            == ["checkpoint-2", "checkpoint-6", "final"]
        )
    listed = set()
    for path in (place / "marks").iterdir():
        for pieces in json.loads(path.read_text())["files"].values():
            listed |= {name for name, _ in pieces}
    assert listed == {path.name for path in (place / "pieces").iterdir()}


def test_a_checkpoint_that_is_deleted_here_while_it_is_copied_is_copied_whole(machine, place):
    write = Folder.write

    def slow(self, name, content):
        wait = len(training.checkpoints()) > 0 and training.checkpoints()[0] == "checkpoint-2"
        if wait and name.startswith("pieces"):
            training.wait_for(lambda: "checkpoint-2" not in training.checkpoints())
        write(self, name, content)

    with machine("a"), mock.patch.object(Folder, "write", slow):
        training.succeed(mirror_to=place, keep_last_k=1)
        copied = [event["checkpoint"] for event in training.events("mirrored")]
        assert copied[0] == "checkpoint-2" and not training.events("mirror_failed")


class Killed(BaseException):
    """Stands for a kill."""


def killed_at(number):
    """A folder whose owner is killed before this change of it."""
    changes = iter(range(number))

    def patched(name):
        original = getattr(Folder, name)

        def change(self, *args):
            if next(changes, None) is None:
                raise Killed
            return original(self, *args)

        return mock.patch.object(Folder, name, change)

    stack = contextlib.ExitStack()
    for name in ("write", "delete"):
        stack.enter_context(patched(name))
    return stack


def test_wherever_its_owner_is_killed_the_newest_mark_is_whole(machine, place, tmp_path):
    """Each copy replaces the mark before it, as with --keep-last-k=1."""
    with machine("a"):
        training.succeed()
        names = ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
        settings = Settings(mirror_to=str(place), keep_last_k=1)
        steps = []
        is_killed = True
        number = 0
        while is_killed:
            shutil.rmtree(place, ignore_errors=True)
            run = mirror.RunMirror(settings, training.run_dir())
            with contextlib.suppress(Killed), killed_at(number):
                for name in names:
                    run._copy(open_job(training.run_dir() / "checkpoints" / name))
                is_killed = False
            run.lease.give_back()
            found = read_marks(run.store)
            if found:
                target = tmp_path / f"killed-{number}"
                Fetch(run.store, found, target).checkpoint(-1)
                [path] = list_checkpoints(target)
                steps.append(load_checkpoint(path).step)
            number += 3
        assert steps == sorted(steps) and {*steps} == {2, 4, 6}, number


# ---- a mirror that fails -------------------------------------------------------------------------


def failing(times):
    """A folder that is full for so many writes of pieces."""
    write = Folder.write
    left = iter(range(times))

    def full(self, name, content):
        if name.startswith("pieces") and next(left, None) is not None:
            raise self._explained(OSError(errno.ENOSPC, "No space left on device"))
        write(self, name, content)

    return mock.patch.object(Folder, "write", full)


def test_a_full_mirror_is_one_warning_and_is_tried_again(machine, place, whole):
    with machine("a"), failing(5):
        outcome = training.succeed(mirror_to=place)
        assert outcome.err.count("No space left on device") == 1
        assert "free some space" in outcome.err
        assert [event["checkpoint"] for event in training.events("mirror_failed")] == [START]
        assert result() == whole
    assert marks(place)[-1] == "final"


def test_the_end_of_a_run_does_not_wait_beyond_its_reserve_and_says_what_is_left(machine, place):
    few = {"num_iterations": 2, "mirror_to": place}
    with machine("a"):
        with failing(10**9):
            outcome = training.succeed(**few, walltime_reserve_seconds=0.2)
            assert "the end of the run is not copied yet" in outcome.err
            assert read_mirror_state(training.run_dir())["problem"] != ""
        assert marks(place) == []
        training.succeed(**few)
        assert marks(place) == ["final"]


def shown_mirror(capsys):
    """What scripts.status says about the mirror of the run."""
    capsys.readouterr()
    status.main(["run"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mirror")]
    return line


def test_the_status_shows_how_far_behind_the_mirror_is(machine, place, capsys):
    with machine("a"):
        with failing(10**9):
            training.succeed(num_iterations=2, mirror_to=place, walltime_reserve_seconds=0.2)
        shown = shown_mirror(capsys)
        assert "nothing copied yet" in shown and "2 steps behind" in shown
        assert "No space left" in shown
        training.succeed(num_iterations=2, mirror_to=place)
        shown = shown_mirror(capsys)
        assert "final" in shown and "behind" not in shown


# ---- one owner -----------------------------------------------------------------------------------


def test_a_launch_on_a_second_machine_is_refused_while_the_first_one_lives(machine, place):
    owner = claim_mirror(open_store(str(place)), "run", {})
    with machine("b"):
        assert "another launch owns this mirror" in training.refuse(mirror_to=place)
        assert not training.run_dir().exists()
    owner.give_back()


def test_of_two_machines_that_start_at_once_one_trains_and_the_other_is_refused(machine, place):
    runs = []
    for name in ("a", "b"):
        with machine(name):
            runs.append(training.start(hook=hurry, mirror_to=place))
    codes = [run.wait()[0] for run in runs]
    assert sorted(codes) == [0, 1], [run.text() for run in runs]
    assert "another launch owns this mirror" in runs[codes.index(1)].text()


def take_over_after(step, place):
    """Another launch takes over the mirror after a step."""
    hurry()

    def act():
        training.wait_for(lambda: read_mirror_state(training.run_dir())["step"] == step)
        record = json.loads((place / OWNER_NAME).read_text())
        (place / OWNER_NAME).write_bytes(encode({**record, "launch": "other"}))

    training.after_step(step, act)


def test_an_owner_that_has_lost_its_mirror_ends_and_writes_nothing_more_into_it(machine, place):
    with machine("a"):
        run = training.start(
            hook=partial(take_over_after, 4, place), mirror_to=place, sync_save=True
        )
        assert run.wait() == [1] and "no longer owns the mirror" in run.text()
    assert marks(place) == ["checkpoint-2", "checkpoint-4"]
    assert json.loads((place / OWNER_NAME).read_text())["launch"] == "other"


def test_a_checkpoint_is_said_to_be_copied_once(machine, place):
    """Regression: lines of the log that followed it were "final copied, 0.0 MB"."""
    with machine("a"):
        for num_iterations, expected in ((2, ["start", "final"]), (4, ["final"])):
            out = training.succeed(num_iterations=num_iterations, mirror_to=place).out
            copied = re.findall(r"mirror: (\S+) copied, ", out)
            assert copied == expected, out


def validated(**changed):
    """The output of `scripts.validate` for a command."""
    outcome = command(validate.main, *training.flags(**changed))
    return outcome.out + outcome.err


def test_validate_says_what_the_mirror_holds_and_changes_nothing(machine, place):
    """Regression: "a new run", and that training can start, whatever the mirror held."""
    with machine("a"):
        assert "no checkpoint yet" in validated(num_iterations=2, mirror_to=place)
        assert not place.exists()
        training.succeed(num_iterations=2, mirror_to=place)
        assert "it holds this run up to final" in validated(num_iterations=2, mirror_to=place)
    before = training.fingerprint(place)
    with machine("b"):
        shown = validated(num_iterations=2, mirror_to=place)
        assert "it holds this run up to final" in shown
        assert "checkpoints only with --resume=auto" in shown, (
            "a launch that names one fetches none"
        )
        assert training.fingerprint(place) == before and not training.run_dir().exists()
        lost = place / "not mounted" / "mirror"
        assert "does not exist; mount its disk" in validated(num_iterations=2, mirror_to=lost)


def test_validate_accepts_what_would_replace_a_run_without_a_checkpoint(machine, place):
    """Regression: the settings of the run that --resume=scratch replaces were compared."""
    with machine("a"):
        begin_only(place)
    with machine("b"):
        other = {"matrix_lr": 0.5, "mirror_to": place, "num_iterations": 2}
        assert "training can start" in validated(**other, resume="scratch")
        assert "--resume=scratch" in validated(**other)


@pytest.mark.parametrize("steps", [0, 2])
def test_without_a_tokenizer_validate_says_that_a_launch_fetches_the_runs(machine, place, steps):
    """Regression: it advised to train another one, which the launch then refused."""
    same = {"mirror_to": place, "num_iterations": 2}
    with machine("a"):
        if steps:
            training.succeed(**same)
        else:
            begin_only(place, num_iterations=2)
    with machine("b"):
        shutil.rmtree(training.run_dir().parents[1] / "tokenizer")
        note, _ = validated(**same).split("ok: flags")
        assert "launch would fetch" in note and "tokenizer if none is here, so train none" in note
        training.succeed(**same)


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"model_tag": "other"}, "it holds the run run, not other"),
        ({"matrix_lr": 0.5}, "--matrix-lr: the run has 0.02, this launch 0.5"),
        ({"resume": "scratch"}, "--resume=scratch would start over"),
    ],
)
def test_the_mirror_of_another_run_is_refused_and_nothing_is_fetched(
    machine, place, changed, reason
):
    with machine("a"):
        training.succeed(num_iterations=2, mirror_to=place)
    before = training.fingerprint(place / "pieces")
    with machine("b"):
        assert reason in validated(num_iterations=2, mirror_to=place, **changed)
        assert reason in training.refuse(num_iterations=2, mirror_to=place, **changed)
        assert not (training.run_dir().parent / "run").exists()
        assert training.fingerprint(place / "pieces") == before


def test_the_mirror_of_a_run_that_began_elsewhere_is_refused(machine, place):
    with machine("a"):
        training.succeed(num_iterations=2, mirror_to=place)
    with machine("b"):
        training.succeed(num_iterations=2)
        assert "began elsewhere" in training.refuse(num_iterations=2, mirror_to=place)


# ---- object storage ------------------------------------------------------------------------------


@pytest.fixture
def bucket(calm_store):
    for name in calm_store.names():
        calm_store.delete(name)
    return calm_store.path("runs/mine")


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_object_storage_keeps_the_law(law, bucket):
    law(open_store(bucket))


def test_a_large_object_is_written_in_parts(calm_store, bucket, monkeypatch):
    monkeypatch.setattr(mirror_bucket, "PART_BYTES", 5 << 20)
    content = bytes(1 << 16) * 200
    open_store(bucket).write("pieces/large", as_file(content))
    puts = [seen.path for seen in calm_store.proxy.seen if seen.method == "PUT"]
    assert len(puts) == 3 and all("partNumber=" in path for path in puts)
    assert calm_store.get("runs/mine/pieces/large") == content


def test_a_service_that_ignores_conditions_is_refused(calm_store, bucket):
    calm_store.proxy.faults.append(Fault(method="PUT", name="owner", lose="If-None-Match", times=9))
    with pytest.raises(ValueError, match="this service ignores If-None-Match"):
        claim_mirror(open_store(bucket), "run", {})


def test_an_answer_that_is_lost_loses_no_record(calm_store, bucket):
    store = open_store(bucket)
    calm_store.proxy.faults.append(Fault(method="PUT", name="owner", cut=0))
    first = store.swap(OWNER_NAME, b"{}", None)
    assert first is not None and store.swap(OWNER_NAME, b"{ }", first) is not None


def test_a_bucket_without_permission_is_refused_without_a_secret(machine, calm_store, bucket):
    fault = Fault(method="PUT", name="owner", status=403, code="AccessDenied", times=99)
    calm_store.proxy.faults.append(fault)
    with machine("b"):
        error = training.refuse(mirror_to=bucket)
    assert "access denied" in error and ACCESS_KEY not in error


def test_a_missing_bucket_is_named(machine, calm_store):
    with machine("b"):
        assert "bucket none does not exist" in training.refuse(mirror_to="s3://none/x")


def test_a_run_that_was_killed_goes_on_from_object_storage(machine, calm_store, bucket, whole):
    with machine("a"):
        stop_after(5, bucket)
    begin_launch()
    with machine("b"):
        training.succeed(mirror_to=bucket)
        assert result() == whole
    written = [seen.path for seen in calm_store.proxy.seen if seen.method == "PUT"]
    pieces = [path for path in written if "/pieces/" in path]
    assert len(pieces) == len({*pieces}) > 10, "each piece is written once"
    names = calm_store.names()
    assert [name for name in names if name.rpartition("/")[2].startswith("00000008-final")]


def test_a_bucket_that_does_not_answer_for_a_while_is_one_warning(
    machine, calm_store, bucket, whole, monkeypatch
):
    quick = Patience(first_answer_s=0.01, give_up_s=0.01)
    monkeypatch.setattr(mirror_bucket, "HASTE", quick)
    fault = Fault(method="PUT", name="pieces", status=503, code="SlowDown", times=5)
    calm_store.proxy.faults.append(fault)
    # the run waits for the first warning, which it logs after its next step
    warned = threading.Event()
    warn, step = mirror.RunMirror._note_problem, base_train.one_step
    monkeypatch.setattr(
        mirror.RunMirror, "_note_problem", lambda *args: (warn(*args), warned.set())
    )

    def one_step(run, training, *parts):
        step(run, training, *parts)
        assert training.progress.step != 4 or warned.wait(60)

    monkeypatch.setattr(base_train, "one_step", one_step)
    with machine("a"):
        outcome = training.succeed(mirror_to=bucket)
        assert outcome.err.count("could not be copied") == 1 and "restart" not in outcome.err
        assert result() == whole
        assert training.events("mirror_failed")
    assert any("final" in name for name in calm_store.names())
