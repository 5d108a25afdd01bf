"""scripts.status, scripts.stop, and the scripts that use them: dev/run_until_done.sh, the SLURM
chain."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanochat import run_state
from nanochat.common import write_json
from nanochat.run_facts import event_sentences
from nanochat.run_owner import claim, exit_code
from nanochat.run_reader import RunReader
from nanochat.run_state import STATE_NAME, identify, read_state
from nanochat.run_stop import FLAG_NAME
from scripts import status, stop
from tests.forks import as_fork
from tests.private import private
from tests.training import PATIENCE_S, owner_of, wait_for

ROOT = Path(__file__).parents[2]

# A training job of 20 steps. FAIL_AT, HALT_AT: the step in which it fails or halts. STEPS: steps
# per launch. CLAIM_AFTER: a file that must exist before the launch claims its run.
TRAINER = """
import os, sys, time
from pathlib import Path
from nanochat.run_owner import RunState, claim
from nanochat.run_stop import StopWatch
from nanochat.run_state import identify, read_state
from nanochat.watchdog import Watchdog
def number(name, default):
    return float(os.environ.get(name, default))
with StopWatch() as stop:
    run_dir = Path(os.environ["NANOCHAT_BASE_DIR"]) / "runs" / sys.argv[1]
    while not Path(os.environ.get("CLAIM_AFTER", "/")).exists():
        time.sleep(0.01)
    owner = claim(run_dir)
    owner.sign()
    saved = (read_state(run_dir) or {}).get("checkpoint")
    step = int(saved.split("-")[1]) if saved else 0
    me = [identify()]
    news = dict(num_iterations=20, step=step, checkpoint=saved, status="running")
    with RunState(owner, me, stop.look_for_request, **news) as run, \\
            Watchdog(None, me, timeout_s=4, refresh=run.refresh):
        status = ""
        while not status:
            if step == number("FAIL_AT", -1):
                raise ValueError("out of luck")
            if step == number("HALT_AT", -1):
                status, reason = "halted", "bucket x ran dry"
            else:
                time.sleep(number("STEP_S", 0.01))
                step += 1
                run.update(step=step, loss=4.0 - 0.1 * step, tokens=step * 1000, tokens_per_s=1e5, eta_s=20.0 - step)
                reason = stop.after_step() or "walltime" * (step % number("STEPS", 1000) == 0)
                status = "completed" * (step == 20) or "stopped" * bool(reason)
            if status or step % number("SAVE_EVERY", 1000) == 0:
                run.update(checkpoint=f"checkpoint-{step}")
        run.end(status, reason)
sys.exit(3 if status == "halted" else 0)
"""


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A base directory with the trainer, and a stand-in for numpy, so that scripts start in
    milliseconds."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "numpy.py").write_text(
        "def __getattr__(name):\n    return type(name, (), {})\n"
    )
    for name in [n for n in os.environ if n.startswith(("SLURM_", "NANOCHAT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    return tmp_path


def run_dir(base, name="d1"):
    return base / "runs" / name


def environment(base, **more):
    return {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": f"{base / 'light'}:{ROOT}",
        **{k: str(v) for k, v in more.items()},
    }


def trainer(base, name="d1", **more):
    process = subprocess.Popen(
        [sys.executable, base / "trainer.py", name],
        cwd=ROOT,
        env=environment(base, **more),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(
        lambda: (
            process.poll() is not None
            or process.pid
            in [rank["pid"] for rank in (read_state(run_dir(base, name)) or {"ranks": []})["ranks"]]
        )
    )
    return process


def fake_checkpoint(run, name, step):
    """A checkpoint of which only the seal is there."""
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    write_json(folder / "trainer_state.json", {"step": step, "files": {}})
    return folder


OWNED = []  # keeps the locks that this process holds


def fake_run(base, name, status, **fields):
    """A run of this process with a given state."""
    path = run_dir(base, name)
    path.mkdir(parents=True)
    if status in run_state.ACTIVE and all(rank["start"] != "1" for rank in fields.get("ranks", [])):
        OWNED.append(owner_of(path))
    (path / STATE_NAME).write_text(
        json.dumps(
            {
                **dict.fromkeys(run_state.NEWS),
                "reason": "",
                "format_version": 1,
                "world_size": 1,
                "ranks": [identify()],
                "started": time.time() - 3000,
                "heartbeat": time.time(),
                "status": status,
                **fields,
            }
        )
    )
    return path


# ---- status --------------------------------------------------------------------------------------


def test_one_run_at_a_glance(base, capsys):
    ranks = [{**identify(), "host": "node1"}] + [{**identify(), "host": "node2"}] * 2
    path = fake_run(
        base,
        "d1",
        "running",
        step=1234,
        num_iterations=5000,
        loss=3.21456,
        tokens=647_000_000,
        eta_s=7500.0,
        tokens_per_s=412_345.6,
        checkpoint="checkpoint-1000",
        val_bpb=1.25,
        val_step=1000,
        phase="2 of 3",
        skipped=1,
        ranks=ranks,
        world_size=3,
    )
    fake_checkpoint(path, "checkpoint-1000", 1000)
    assert status.main(["d1"]) == 0
    shown = dict(re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert re.fullmatch(r".*, 50 min 0\d s ago", shown.pop("newest launch")) and re.fullmatch(
        r"\d\.\d s", shown.pop("age")
    )
    assert shown == {
        "run": "d1",
        "state": "running",
        "step": "1,234/5,000 (24.7 %)",
        "loss": "3.215",
        "bits per byte": "1.250 at step 1,000",
        "tok/s": "412,346",
        "eta": "2 h 05 min",
        "last checkpoint": "checkpoint-1000",
        "tokens": "647,000,000",
        "phase": "2 of 3",
        "steps not applied": "1",
        "processes": f"3 on node1 (1), node2 (2); rank 0 has pid {os.getpid()}",
        "folder": str(path),
    }
    fake_run(base, "d2", "completed", heartbeat=time.time() - 600)
    status.main(["d2"])
    out = capsys.readouterr().out
    assert "age              10 min 0" in out and "processes" not in out


def test_the_table_of_all_runs_marks_dead_ones(base, capsys):
    assert status.main([]) == 0
    assert capsys.readouterr().out == f"no runs in {base / 'runs'}\n"
    fake_run(base, "alive", "running", step=3, num_iterations=10)
    fake_run(base, "gone", "running", ranks=[{**identify(), "start": "1"}])
    fake_run(base, "done", "failed", step=10, num_iterations=10, reason="the disk is full")
    (fake_run(base, "zero", "running") / STATE_NAME).write_text("{")
    (run_dir(base, "older") / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    (run_dir(base, "no-run")).mkdir(parents=True)
    assert status.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "run",
        "state",
        "step",
        "loss",
        "bits",
        "per",
        "byte",
        "tok/s",
        "eta",
        "last",
        "checkpoint",
        "age",
        "reason",
    ]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["alive", "running"],
        ["done", "failed"],
        ["gone", "dead"],
        ["older", "unknown"],
        ["zero", "unreadable"],
    ]
    assert lines[2].endswith("the disk is full")


@pytest.mark.parametrize("name", ["t0 (copy)", "t0 [old]", "t0\x1b[31m"])
def test_a_folder_with_a_name_that_no_new_run_may_have_is_listed(base, capsys, name):
    """Regression: the name was refused, so that status showed no run, and stop found none."""
    path = fake_run(base, name, "running")
    fake_run(base, "t1", "completed")
    assert status.main([]) == 0
    _, copy, other = capsys.readouterr().out.splitlines()
    assert copy.startswith(name.replace("\x1b", "\\u001b")) and other.split()[0] == "t1"
    assert status.main(["--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["run"] for run in runs] == [str(path), str(run_dir(base, "t1"))]
    assert stop.main([]) == 0
    assert (path / FLAG_NAME).exists()


def test_a_run_that_may_not_be_read_hides_no_other_run(base, capsys):
    """Regression: status and stop ended with an error about the one of another user."""
    path = fake_run(base, "mine", "running")
    as_fork(fake_run(base, "fork", "completed"), "theirs", 20)
    theirs = fake_run(base, "theirs", "completed")
    (theirs / "config.json").write_text("{}")
    for folder in (theirs, theirs / STATE_NAME):  # or it is only its files that may not
        with private(folder):
            assert status.main(["mine"]) == status.main([]) == stop.main([]) == 0
            lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith("mine ") for line in lines)
        assert any(line.lstrip().startswith("fork ") for line in lines)
    assert (path / FLAG_NAME).exists()
    assert any(line.split()[:2] == ["theirs", "unreadable"] for line in lines)


def test_runs_ranked_by_bits_per_byte_of_different_text_have_a_note(base, capsys):
    """Regression: they were ranked without a word."""
    config = {"data_format": "text", "max_seq_len": 8, "derived": {}}
    for name, size, bpb in (("a", 10, 1.5), ("b", 10, 1.25), ("c", 20, 1.0), ("new", 0, None)):
        folder = fake_run(base, name, "completed", val_bpb=bpb)
        write_json(folder / "config.json", config)
        pin = {"name": "val.parquet", "size": size, "footer": "f", "groups": [1]}
        val = {"data": {"root": "/data", "files": [pin]}}
        write_json(folder / "data_manifest.json", {"train": {}, "val": val})
    note = "note: different validation text: bits per byte cannot be compared\n"
    for runs, has_note in (("ab", False), ("abc", True)):
        status.main([*runs, "new", "--sort=bpb"])
        assert capsys.readouterr().out.endswith(note) == has_note


def test_the_table_has_the_named_runs_sorted_and_coloured_on_a_terminal(base, capsys, monkeypatch):
    for name, state, bpb, step in (
        ("a", "completed", 1.5, 30),
        ("b", "halted", 1.25, 20),
        ("c", "stopped", None, 10),
    ):
        fake_run(base, name, state, val_bpb=bpb, step=step, heartbeat=time.time() - 7230)
    (run_dir(base, "older") / "checkpoints" / "checkpoint-1").mkdir(parents=True)

    def lines(*args):
        assert status.main([*args]) == 0
        return capsys.readouterr().out.splitlines()[1:]

    def order(*args):
        return "".join(line[0] for line in lines(*args))

    assert order() == "abco" and order("c", "a") == "ac" and order("--sort=bpb") == "baco"
    assert order("--sort=step") == "cbao"
    plain = lines()
    assert all(" 2 h 00 min" in line for line in plain[:3]) and "\033" not in "".join(plain)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    coloured = lines()
    assert [re.findall(r"\033\[(\d+)m(\w+)\033\[0m", line) for line in coloured] == [
        [("32", "completed")],
        [("31", "halted")],
        [("33", "stopped")],
        [],
    ]
    assert [re.sub(r"\033\[\d+m", "", line) for line in coloured] == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert lines() == plain


def fake_fork(base, name, parent, step, **changes):
    """A completed run that is a fork."""
    path = fake_run(base, name, "completed")
    return as_fork(path, parent, step, **changes)


def test_a_fork_counts_only_its_own_steps_that_were_not_applied(base, capsys):
    """Regression: the 9 steps that its parent had skipped were shown as its own."""
    path = as_fork(fake_run(base, "kf", "completed", step=30, skipped=11), "k", 20)
    assert status.main(["kf"]) == 0
    assert "not applied" not in capsys.readouterr().out
    (path / "logs").mkdir(exist_ok=True)
    records = [{"event": "skipped", "step": step} for step in (24, 25, 25)]  # 25: after a resume
    with open(path / "logs/train.jsonl", "a") as log:
        log.writelines(json.dumps(record) + "\n" for record in records)
    assert status.main(["kf"]) == 0
    assert re.search(r"steps not applied +2\n", capsys.readouterr().out)
    told = "It did not apply 2 steps, most recently step 25."
    assert event_sentences(RunReader(path)) == [told]


def test_forks_are_below_their_parent_with_their_step_and_changes(base, capsys):
    for name in ("a", "z"):
        (fake_run(base, name, "completed") / "config.json").write_text('{"max_seq_len": 64}')
    fake_fork(base, "b", "z", 20, matrix_lr=[0.02, 0.01], max_grad_norm=[None, 1.0])
    fake_fork(base, "c", "b", 1030)
    long = {"phases": [{"mix": {"web": 9, "code": 0.5}}, {"mix": {"w" * 99: 1}}]}
    fake_fork(base, "d", "z", 10, curriculum=[None, long])
    fake_fork(base, "e", "gone", 5)

    def lines(*args):
        assert status.main([*args]) == 0
        header, *rows = capsys.readouterr().out.splitlines()
        begin = header.index("fork")
        return [(row[:5].rstrip(), row[begin:]) for row in rows]

    of_b = "@20: matrix_lr 0.02 -> 0.01, max_grad_norm null -> 1.0"
    mixes = "9 web + 0.5 code, then 1 " + "w" * 99
    of_d = f"@10: curriculum null -> {mixes[:50]}..."
    of_e = "gone@5 (not here): nothing changed"
    assert lines() == [
        ("a", "-"),
        ("e", of_e),
        ("z", "-"),
        ("  b", of_b),
        ("    c", "@1,030: nothing changed"),
        ("  d", of_d),
    ]
    assert lines("c", "b") == [("b", f"z{of_b}"), ("  c", "@1,030: nothing changed")]
    status.main(["c"])
    assert "fork of          b@1,030: nothing changed\n" in capsys.readouterr().out


def test_a_run_names_the_run_whose_weights_it_began_with(base, capsys):
    """Regression: nothing in status told it from a run that began with random weights."""
    config = {"max_seq_len": 64, "init_from": "a@20", "origin": {"run": "a", "step": 20}}
    for name, of_run in (("a", {"max_seq_len": 64}), ("b", config)):
        write_json(fake_run(base, name, "completed") / "config.json", of_run)
    status.main([])
    _, of_a, of_b = capsys.readouterr().out.splitlines()
    assert "step 20" not in of_a and of_b.endswith("weights of step 20 of a")
    status.main(["b"])
    assert re.search(r"\nbegan with +weights of step 20 of a\n", capsys.readouterr().out)


def test_a_run_that_failed_after_its_last_save_says_what_is_saved(base, capsys):
    """Regression: "30/30 (100.0 %)", and 20 of these steps were lost with a full disk."""
    for state, words in (("failed", "100.0 %), saved 10"), ("running", "100.0 %)")):
        path = fake_run(base, state, state, step=30, num_iterations=30)
        fake_checkpoint(path, "checkpoint-10", 10)
        status.main([state])
        assert re.search(rf"step +30/30 \({re.escape(words)}\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "state, step, is_lost", [("failed", 22, True), ("failed", 0, False), ("running", 22, False)]
)
def test_a_run_that_ended_before_its_first_save_says_so(base, capsys, state, step, is_lost):
    """Regression: "22/3,000", as if a resume began there."""
    fake_run(base, "a", state, step=step, num_iterations=3000)
    status.main(["a"])
    assert ("nothing saved" in capsys.readouterr().out) == is_lost
    # its checkpoints are elsewhere, as those of docs/example
    run = fake_run(base, "b", state, step=step, num_iterations=3000, checkpoint="checkpoint-20")
    status.main(["b"])
    out = capsys.readouterr().out
    assert "nothing saved" not in out and re.search(
        r"checkpoint +checkpoint-20 \(not here\)\n", out
    )
    fake_checkpoint(run, "checkpoint-20", 20)
    status.main(["b"])
    assert re.search(r"checkpoint +checkpoint-20\n", capsys.readouterr().out)


def test_the_tokens_of_a_fork_are_those_of_its_ancestors_and_its_own(base, capsys):
    fake_run(base, "a", "completed", tokens=5000)
    as_fork(fake_run(base, "b", "completed", tokens=5000), "a", 20, tokens=2000)
    for name, words in (
        ("a", "5,000\n"),
        ("b", "5,000, those of its ancestors included (3,000 of its own)\n"),
    ):
        status.main([name])
        assert f"tokens           {words}" in capsys.readouterr().out


def test_json_has_the_record_of_a_fork(base, capsys):
    (fake_run(base, "a", "completed") / "config.json").write_text('{"max_seq_len": 64}')
    fake_fork(base, "b", "a", 20, matrix_lr=[0.02, 0.01])
    status.main(["--json"])
    a, b = json.loads(capsys.readouterr().out)
    assert a["fork"] is None and b["fork"]["step"] == 20
    assert b["fork"]["changes"] == {"matrix_lr": [0.02, 0.01]}
    assert b["parent"] == str(run_dir(base, "a")) == a["run"] and a["parent"] is None


def test_runs_whose_records_name_each_other_are_all_listed(base, capsys):
    fake_fork(base, "a", "b", 1)
    fake_fork(base, "b", "a", 1)
    status.main([])
    assert [line[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["a", "b"]


def test_a_corrupt_record_of_a_fork_hides_no_run(base, capsys):
    path = fake_run(base, "a", "completed")
    (path / "config.json").write_text('{"max_seq_len": 64, "fork": {"step": "ten"}}')
    fake_fork(base, "b", "gone", 5, curriculum=[{"phases": 3}, {"phases": [{"mix": ["web"]}]}])
    assert status.main([]) == 0
    out = capsys.readouterr().out
    assert out.count("completed") == 2 and 'curriculum {"phases": 3} -> ' in out


@pytest.mark.parametrize("fetched", ["final", "checkpoint-9"])
def test_a_checkpoint_that_a_failed_launch_has_fetched_is_the_last_one(base, fetched):
    """Regression: after a launch that fetched `final` from the mirror and failed, status named the
    checkpoint of the launch before it; one replayed of an earlier step is not the last."""
    run = fake_run(base, "d2", "stopped", checkpoint="checkpoint-2")
    for name, step in ((fetched, 9), ("checkpoint-2", 2), ("checkpoint-1", 1)):
        fake_checkpoint(run, name, step)
    assert RunReader(run).status()["checkpoint"] == fetched


def test_a_checkpoint_without_a_readable_seal_is_not_the_last_one(base, capsys):
    """Regression: status named it, though a resume starts at an older one."""
    run = fake_run(base, "d1", "completed", step=6, num_iterations=6, checkpoint="final")
    fake_checkpoint(run, "checkpoint-2", 2)
    (fake_checkpoint(run, "final", 6) / "trainer_state.json").unlink()
    (fake_checkpoint(run, "checkpoint-4", 4) / "trainer_state.json").write_text("")
    (run / "checkpoints" / "checkpoint-99999999999999999999999").mkdir()
    shown = RunReader(run).status()
    assert (shown["checkpoint"], shown["saved_step"]) == ("checkpoint-2", 2)
    (run / "checkpoints" / "checkpoint-2" / "trainer_state.json").unlink()
    status.main(["d1"])
    assert re.search(r"last checkpoint +final \(not here\)\n", capsys.readouterr().out)


def test_after_a_kill_status_shows_the_newest_checkpoint_on_disk(base, capsys):
    """Regression: it showed "last checkpoint none", because the state of a killed launch did not
    name them."""
    path = fake_run(base, "d1", "running", ranks=[{**identify(), "start": "1"}])
    checkpoints = {"checkpoint-30": 30, ".tmp-checkpoint-40-7": 40, "checkpoint-4": 4}
    checkpoints["checkpoint-20-shutdown"] = 20
    for age, (name, step) in enumerate(checkpoints.items()):
        folder = fake_checkpoint(path, name, step)
        os.utime(folder, (1e9 - age, 1e9 - age))
    assert status.main(["d1", "--json", "--exit-code"]) == 1
    assert json.loads(capsys.readouterr().out)["checkpoint"] == "checkpoint-30"


def write_log(run_dir, *records):
    (run_dir / "logs").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (run_dir / "logs" / "train.jsonl").write_text(lines)


def started(launch, step):
    record = {"event": "started", "step": step, "time": 1e9, "launch": launch}
    return record | {"world_size": 1, "device": "cpu", "torch": "2.13.0"}


def logged_step(step):
    return {"step": step, "tokens": 10 * (step + 1), "smooth_loss": 2.0}


def test_after_a_kill_status_shows_the_newest_step_of_the_log(base, capsys):
    """Regression: it showed that of the last state, which is up to seconds older than the page."""
    path = fake_run(base, "d1", "running", step=33, ranks=[{**identify(), "start": "1"}])
    write_log(
        path, started("a", 0), *map(logged_step, range(40)), started("b", 30), logged_step(30)
    )
    assert status.main(["d1", "--json", "--exit-code"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["tokens"]) == (31, 310)
    assert RunReader(path).reached == 31


@pytest.mark.parametrize(
    "end, code", [("completed", 0), ("stopped", 10), ("halted", 3), ("failed", 1), (None, 1)]
)
def test_a_state_is_renewed_if_a_launch_elsewhere_was_newer(base, end, code):
    path = fake_run(base, "d1", "failed", step=33, launch="a", reason="here")
    ending = [{"event": end, "step": 51, "time": 1e9, "reason": "there"}] if end else []
    write_log(path, started("a", 0), started("b", 30), logged_step(50), *ending)
    run_state.renew_state(path)
    state = RunReader(path).status()
    assert (state["shown"], state["exit_code"], state["step"]) == (end or "dead", code, 51)
    assert state["reason"] == "there" if end else "process is gone" in state["reason"]


def test_a_state_that_knows_more_than_the_log_of_its_launch_stays(base):
    path = fake_run(base, "d1", "failed", step=33, launch="a", reason="rank 1 hangs")
    write_log(path, started("a", 0), logged_step(32))
    run_state.renew_state(path)
    assert RunReader(path).status()["reason"] == "rank 1 hangs"


def test_a_launch_that_was_killed_after_its_logged_end_has_ended(base):
    path = fake_run(base, "d1", "running", launch="a", ranks=[{**identify(), "start": "1"}])
    end = {"event": "completed", "step": 33, "time": 1e9, "reason": ""}
    write_log(path, started("a", 0), logged_step(32), end)
    assert RunReader(path).status()["shown"] == "dead"
    run_state.renew_state(path)
    assert RunReader(path).status()["shown"] == "completed"


@pytest.mark.parametrize(
    "name, start, code",
    [
        ("completed", None, 0),
        ("stopped", None, 10),
        ("halted", None, 3),
        ("failed", None, 1),
        ("running", None, 20),
        ("running", "1", 1),
        ("starting", "1", 1),
    ],
)
def test_exit_codes_and_json_agree(base, capsys, name, start, code):
    process = identify() if start is None else {**identify(), "start": start}
    path = fake_run(base, "d1", name, reason="why not", ranks=[process])
    assert status.main(["d1", "--exit-code"]) == code
    assert (f"its status is {name}" if start else "why not") in capsys.readouterr().out
    assert status.main([str(path), "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert (entry["status"], entry["exit_code"], entry["run"]) == (name, code, str(path))
    status.main(["--json"])
    assert [entry["exit_code"] for entry in json.loads(capsys.readouterr().out)] == [code]


def test_watching_ends_with_the_run(base, capsys, monkeypatch):
    path = fake_run(base, "d1", "running")
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            shutil.rmtree(path)
            fake_run(base, "d1", "completed")

    monkeypatch.setattr(status.time, "sleep", nap)
    assert status.main(["d1", "--watch", "--exit-code"]) == 0
    assert re.findall("(?m)^state +(.*)$", capsys.readouterr().out) == ["running"] * 3 + [
        "completed"
    ]


# ---- stop ----------------------------------------------------------------------------------------


def test_a_run_saves_and_stops_on_request(base, capsys):
    process = trainer(base, STEP_S=0.2)
    fake_run(base, "other", "completed")
    assert stop.main(["--wait"]) == 0  # the only active run needs no name
    assert process.wait(PATIENCE_S) == 0
    state = read_state(run_dir(base))
    assert (state["status"], state["reason"]) == ("stopped", "asked by scripts.stop")
    assert state["checkpoint"] == f"checkpoint-{state['step']}"
    assert "asked d1 to stop" in capsys.readouterr().out
    second = trainer(base)
    assert second.wait(PATIENCE_S) == 0
    assert read_state(run_dir(base))["status"] == "completed", (
        "the old flag stopped the next launch"
    )


@pytest.mark.parametrize("first", [True, False])
def test_a_launch_that_has_not_claimed_its_run_yet_is_reached(base, capsys, first):
    """Regression: scripts.stop found no run to stop, and the launch deleted the flag when it
    claimed its run."""
    if not first:
        fake_run(base, "d1", "stopped")
    process = subprocess.Popen(
        [sys.executable, base / "trainer.py", "d1"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        env=environment(base, CLAIM_AFTER=base / "claim"),
    )
    wait_for(lambda: run_state.process_start(process.pid))
    time.sleep(0.02)  # one tick of the clock of processes
    if first:
        with pytest.raises(
            FileNotFoundError, match=r"no run 'd1'.*; if its first launch is starting now, it stops"
        ):
            stop.main(["d1"])
    else:
        assert stop.main(["d1"]) == 0
        assert "d1 is not active; a launch that is starting now" in capsys.readouterr().out
    (base / "claim").touch()
    assert process.wait(PATIENCE_S) == 0
    state = read_state(run_dir(base))
    assert (state["status"], state["reason"], state["step"]) == (
        "stopped",
        "asked by scripts.stop",
        1,
    )


@pytest.mark.parametrize("first", [True, False])
def test_a_launch_that_owns_its_run_and_has_no_state_yet_is_asked_and_waited_for(
    base, capsys, monkeypatch, first
):
    """Regression: the request was accepted, but was an error, and --wait did not wait."""
    if not first:
        fake_run(base, "d1", "stopped")
    owner = claim(run_dir(base))
    waits = []

    def end(seconds):
        waits.append(seconds)
        owner.release()

    monkeypatch.setattr(stop.time, "sleep", end)
    assert stop.main(["d1", "--wait"]) == 0
    assert len(waits) == 1 and (run_dir(base) / FLAG_NAME).exists()
    assert "asked d1 to stop: " in capsys.readouterr().out


def test_stop_needs_a_name_if_several_runs_are_active_and_ignores_ended_ones(base, capsys):
    fake_run(base, "d1", "stopped")
    assert stop.main(["d1"]) == 0
    assert "is not active" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no run is active"):
        stop.main([])
    fake_run(base, "d2", "running")
    fake_run(base, "d3", "starting")
    with pytest.raises(ValueError, match="several are active; name one: d2, d3"):
        stop.main([])
    assert not any((run_dir(base, name) / FLAG_NAME).exists() for name in ("d2", "d3"))


HEEDS = "import time; print(1, flush=True); time.sleep(1000)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {HEEDS}"
SAVES = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); " + HEEDS


def process_of(code):
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process, {
        **identify(),
        "pid": process.pid,
        "start": run_state.process_start(process.pid),
    }


@pytest.mark.parametrize("rank_0_lives", [True, False])
def test_force_ends_the_processes_of_the_run_and_no_others(base, capsys, monkeypatch, rank_0_lives):
    """One rank saves before it ends, one ignores SIGTERM, the pid of one now belongs to another
    program, one is on another host. The remaining processes of a dead run are ended, too."""
    monkeypatch.setattr(stop, "GRACE_S", 1.0)
    (saves, a) = process_of(SAVES)
    (deaf, b) = process_of(DEAF)
    (bystander, c) = process_of(HEEDS)
    elsewhere = {**identify(), "host": "node9", "place": "elsewhere", "pid": 77}
    try:
        fake_run(
            base,
            "d1",
            "running",
            ranks=[a, b, {**c, "start": "1"}, elsewhere]
            if rank_0_lives
            else [{**c, "start": "1"}, a, b],
        )
        code = stop.main(["d1", "--force"])
        captured = capsys.readouterr()
        assert code == rank_0_lives  # node9 is left
        assert ("on node9, if they are still alive, run: kill 77" in captured.err) == rank_0_lives
        assert (
            saves.wait(PATIENCE_S) == 0
            and deaf.poll() == -signal.SIGKILL
            and bystander.poll() is None
        )
        assert (
            captured.out.count("SIGTERM to pid") == 2 and captured.out.count("SIGKILL to pid") == 1
        )
    finally:
        for process in (saves, deaf, bystander):
            process.kill()
            process.wait()


def test_force_names_a_process_that_does_not_end_and_ignores_forged_records(
    base, capsys, monkeypatch
):
    """Regression: a record with pid -1 and no start was accepted, so every process of the user got
    the signals."""
    sent, me = [], identify()
    forged = [
        {**me, **change}
        for change in (
            {"pid": -1, "start": None},
            {"pid": 0, "start": None},
            {"start": None},
            {"pid": -me["pid"]},
            {"pid": 10**9, "start": None},
            {"pid": 10**300},
        )
    ]
    fake_run(base, "d1", "running", ranks=[me, *forged])
    monkeypatch.setattr(stop, "GRACE_S", 0.0)
    monkeypatch.setattr(stop, "KILL_S", 0.0)
    monkeypatch.setattr(os, "kill", lambda *call: sent.append(call))
    assert stop.main(["d1", "--force"]) == 1
    assert sent == [(os.getpid(), signal.SIGTERM), (os.getpid(), signal.SIGKILL)]
    assert f"pid {os.getpid()} is still alive" in capsys.readouterr().err
    fake_run(base, "d2", "running", ranks=forged[:1])
    assert stop.main(["d2", "--force"]) == 1
    assert "such as one in another container, still owns the run" in capsys.readouterr().err
    for i, pid in enumerate((True, "1", 1.0)):
        fake_run(base, f"typed-{i}", "running", ranks=[{**me, "pid": pid}])
        with pytest.raises(
            ValueError, match=rf"typed-{i}/{STATE_NAME}: ranks\[0\]\.pid: expected a whole number"
        ):
            stop.main([f"typed-{i}", "--force"])
    assert len(sent) == 2


# ---- the loop ------------------------------------------------------------------------------------


def loop(base, **more):
    command = [
        "bash",
        ROOT / "dev/run_until_done.sh",
        "d1",
        sys.executable,
        base / "trainer.py",
        "d1",
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(base, PAUSE_S=0, **more),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ended(process):
    err = process.communicate(timeout=PATIENCE_S)[1]
    return process.returncode, err


@pytest.mark.parametrize(
    "settings, code, lines",
    [
        ({"STEPS": 8}, 0, {"d1 is stopped (walltime)": 2, "d1 is completed": 1}),
        (
            {"HALT_AT": 5},
            3,
            {"d1 is halted (bucket x ran dry), checkpoint checkpoint-5": 1, "run_until_done:": 1},
        ),
        # the first failure came after new checkpoints
        (
            {"FAIL_AT": 15, "SAVE_EVERY": 4, "MAX_FAILURES": 2},
            1,
            {"run_until_done: exit code": 3, "gave up: 2 times in a row": 1},
        ),
    ],
)
def test_the_loop_resumes_until_the_run_has_ended_or_fails_without_a_new_checkpoint(
    base, settings, code, lines
):
    ended_with, err = ended(loop(base, **settings))
    assert ended_with == code and {line: err.count(line) for line in lines} == lines, err


def script(path, *lines):
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_the_loop_passes_every_signal_on_as_sigterm_and_waits_for_the_save(tmp_path, name):
    """A stand-in for Python reports every run as stopped, and complains if it is called before the
    save."""
    script(tmp_path / "python", f'[[ -e {tmp_path}/saved ]] || echo "too early" >&2', "exit 10")
    command = f"trap 'sleep 0.1; touch {tmp_path}/saved; exit' TERM; echo ready; while true; do sleep 0.02; done"
    process = subprocess.Popen(
        ["bash", "dev/run_until_done.sh", "d1", "bash", "-c", command],
        cwd=ROOT,
        text=True,
        env={**os.environ, "PYTHON": str(tmp_path / "python")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.Signals[name])
    code, err = ended(process)
    assert code == 10 and f"ended by {name}" in err and "too early" not in err


def test_the_loop_passes_on_a_signal_from_before_the_first_launch(tmp_path):
    """The stand-in for Python sends it when the loop checks the run."""
    script(tmp_path / "python", f'kill -USR1 "$(cat {tmp_path}/pid)"', "exit 10")
    start = f"echo $$ > {tmp_path}/pid; exec bash dev/run_until_done.sh d1 sleep 60"
    result = subprocess.run(
        ["bash", "-c", start],
        cwd=ROOT,
        env={**os.environ, "PYTHON": str(tmp_path / "python")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (
        result.returncode == 10
        and "exit code 143" in result.stderr
        and "ended by SIGUSR1" in result.stderr
    )


def test_the_loop_ends_after_scripts_stop(base):
    process = loop(base, STEP_S=0.2)
    wait_for(lambda: (read_state(run_dir(base)) or {}).get("step"))
    stop.main(["d1"])
    code, err = ended(process)
    assert code == 10 and "ended by scripts.stop" in err
    state = read_state(run_dir(base))
    assert (
        exit_code(run_dir(base), state) == 10
        and state["checkpoint"] == f"checkpoint-{state['step']}"
    )


# ---- SLURM ---------------------------------------------------------------------------------------


@pytest.fixture
def cluster(base):
    """Stand-ins for srun, which runs the trainer instead of torchrun, and scontrol; both log their
    arguments."""
    (base / "bin").mkdir()
    script(
        base / "bin" / "srun",
        f'echo "$@" >>{base}/srun.txt',
        f"exec {sys.executable} {base}/trainer.py d1",
    )
    script(
        base / "bin" / "scontrol",
        '[[ "$1" == show ]] && printf "node1\\nnode2\\n"',
        f'echo "$@" >>{base}/scontrol.txt',
    )
    return base


def job(cluster, **more):
    """Start the script as SLURM does."""
    slurm = {
        "SLURM_JOB_ID": 4711,
        "SLURM_JOB_NUM_NODES": 2,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": 8,
    }
    env = environment(cluster, **slurm, **more, PATH=f"{cluster / 'bin'}:{os.environ['PATH']}")
    return subprocess.Popen(
        ["bash", ROOT / "dev/slurm/train_chain.sbatch", "d1", "--depth=4"],
        cwd=cluster,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def result_of(cluster, process):
    """Exit code, output, and whether the job was requeued."""
    out = process.communicate(timeout=PATIENCE_S)[0]
    return process.returncode, out, "requeue 4711" in (cluster / "scontrol.txt").read_text()


@pytest.mark.parametrize(
    "settings, ends",
    [
        ({}, [(0, False)]),
        ({"HALT_AT": 3}, [(3, False)]),
        ({"FAIL_AT": 15, "SAVE_EVERY": 4, "MAX_FAILURES": 2}, [(0, True), (0, True), (1, False)]),
    ],
)
def test_a_job_is_requeued_until_its_run_has_ended_or_fails_too_often(cluster, settings, ends):
    for end in ends:
        assert result_of(cluster, job(cluster, **settings))[::2] == end
        (cluster / "scontrol.txt").unlink()
    flags = (cluster / "srun.txt").read_text()
    for flag in (
        "--nnodes=2",
        "--nproc-per-node=8",
        "--rdzv-endpoint=node1:24711",
        "--shutdown-timeout=600",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
        "-m scripts.base_train -- --model-tag=d1 --depth=4",
    ):
        assert flag in flags


@pytest.mark.parametrize(
    "number, requeued", [(signal.SIGUSR1, True), (signal.SIGTERM, False), (None, False)]
)
def test_a_job_saves_on_a_signal_and_is_requeued_unless_it_was_cancelled_or_stopped(
    cluster, number, requeued
):
    process = job(cluster, STEP_S=0.2)
    wait_for(lambda: (read_state(run_dir(cluster)) or {}).get("step"))
    stop.main(["d1"]) if number is None else process.send_signal(number)
    code, out, is_requeued = result_of(cluster, process)
    assert (code, is_requeued) == (0, requeued), out
    state = read_state(run_dir(cluster))
    assert (state["status"], state["reason"]) == (
        "stopped",
        number.name if number else "asked by scripts.stop",
    )
