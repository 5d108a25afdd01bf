"""
Kill a training run again and again, and compare it bit for bit with an undisturbed run.

    python -m dev.torture 50

    whole    |-----------------------------------------------------------------| final
    killed   |-----x                  kill 1, SIGKILL in the middle of a save
               |------x               kill 2 ...                                          each line is a launch of the
                    |--S              kill 3, SIGTERM: it saves and stops                 same command, which resumes
                       x              kill 4, during set-up                               from the newest good
                       |-----...                                        -------| final    checkpoint

The runs are equal if every logged line of a step, including repeated steps, has the digest, loss
and gradient norm of the undisturbed run; if every launch begins at the newest checkpoint that was
logged as saved, or later; and if the final weights, optimizer state, cursors and progress have the
same bits. The launch after a kill judges that kill.

Processes are forked from a server that has loaded torch (tests/training.py), so a launch takes half
a second. Cost: two CPU cores and 200 MB below $TMPDIR, which are kept if anything differs.
Duration: 1 to 2 minutes for 50 kills.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanochat.cli import Parser, run_main, whole
from nanochat.common import table
from nanochat.run_dir import CHECKPOINT_NAME, iter_log
from tests import training

# compared in every line of a step
EXACT = ("digest", "loss", "grad_norm", "smooth_loss", "tokens", "lr")
SETTINGS: dict[str, Any] = {
    "max_seq_len": 64,
    "total_batch_size": 64 * 8,
    "device_batch_size": 4,
    "buffer_size": 8,
    "overlap": 16,
    "eval_every": 50,
    "eval_tokens": 64 * 8,
    "save_every": 3,
    "keep_last_k": 2,
}
STEPS_PER_KILL = 7  # more than a launch trains on average before its kill
REACH = 10  # steps at most before a kill
SETUP_S = 0.5  # about the time from a launch to its first step


@dataclass
class Kill:
    """One kill: the plan and the outcome. The signal comes `after_s` after the start of the launch
    or, if `running`, after its first step."""

    number: int
    signal: int
    sync_save: bool
    running: bool
    after_s: float
    last_step: int | None = None  # the last step in the log after the kill
    saved: int = 0  # the newest checkpoint that was logged as saved
    resumed: int | None = None  # the first step of the next launch that got there
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def at_random(number: int, step_s: float, rng: random.Random) -> list[Kill]:
    """Kills at random moments: most during training, one in six during set-up."""
    kills = []
    for i in range(1, number + 1):
        running = rng.random() > 1 / 6
        kills.append(
            Kill(
                i,
                signal=rng.choices((signal.SIGKILL, signal.SIGTERM, signal.SIGINT), (8, 1, 1))[0],
                sync_save=rng.random() < 1 / 3,
                running=running,
                after_s=rng.uniform(0, REACH * step_s if running else SETUP_S),
            )
        )
    return kills


def print_kills(kills: Sequence[Kill]) -> None:
    """Print a table of the kills that were judged."""
    rows = [
        (
            kill.number,
            signal.Signals(kill.signal).name,
            "running" if kill.running else "set-up",
            "sync" if kill.sync_save else "async",
            kill.last_step,
            kill.resumed,
            kill.seconds,
            "; ".join(kill.wrong) or "equal",
        )
        for kill in kills
        if kill.resumed is not None or kill.wrong
    ]
    print(
        *table(["kill", "signal", "when", "saves", "step", "resumed", "seconds", "the run"], rows),
        sep="\n",
    )


# ---- the kills -----------------------------------------------------------------------------------


def launch(kill: Kill, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Start the command, kill it as planned, and record the outcome. Returns the log lines of this
    launch."""
    known = len(list(iter_log(training.log_file())))
    began = time.monotonic()
    group = training.start(sync_save=kill.sync_save or None, **settings)
    if kill.running:
        training.wait_for(
            lambda: group.processes[0].exitcode is not None or "\nstep 0" in group.text()
        )
    time.sleep(kill.after_s)
    if group.processes[0].exitcode is None:
        os.kill(group.processes[0].pid, kill.signal)
    code, text = group.wait()[0], group.text()
    kill.seconds = time.monotonic() - began
    if kill.signal == signal.SIGKILL:
        is_expected = code == -signal.SIGKILL
    else:  # during set-up, without handlers, a signal just kills
        is_expected = not kill.running or (code == 0 and "stopped: SIG" in text)
    if "completed:" in text or not is_expected:
        kill.wrong.append(f"exit code {code}: {text[-500:]}")
    lines = list(iter_log(training.log_file()))
    kill.last_step = max((r["step"] for r in lines if "event" not in r), default=None)
    saves = [CHECKPOINT_NAME.fullmatch(r["checkpoint"]) for r in lines if r.get("event") == "saved"]
    kill.saved = max((int(match["step"] or 0) for match in saves if match), default=0)
    return lines[known:]


def first_step(lines: Sequence[dict[str, Any]]) -> int | None:
    """The first step of a launch with these log lines; None if it did not get there."""
    return next((record["step"] for record in lines if record.get("event") == "started"), None)


def judge_resume(
    kills: Sequence[Kill], lines: Sequence[dict[str, Any]], whole: dict[int, dict[str, Any]]
) -> None:
    """Judge `kills` by the log lines of the next launch that resumed the run."""
    began = first_step(lines)
    wrong = [
        f"step {r['step']} differs"
        for r in lines
        if "event" not in r and any(r[name] != whole[r["step"]][name] for name in EXACT)
    ]
    if began is None:
        return
    for kill in kills:
        kill.resumed = began
        kill.wrong += [f"checkpoint {kill.saved} was lost"] * (began < kill.saved) + wrong


def torture(
    kills: Sequence[Kill], settings: dict[str, Any], whole: dict[int, dict[str, Any]]
) -> None:
    """Execute all kills, then let the run complete. A kill is judged once a launch has resumed the
    run."""
    pending: list[Kill] = []
    for kill in tqdm(kills, unit=" kills", disable=None):
        lines = launch(kill, settings)
        if first_step(lines) is not None:
            judge_resume(pending, lines, whole)
            pending = []
        pending.append(kill)
    known = len(list(iter_log(training.log_file())))
    training.finish(**settings)
    judge_resume(pending, list(iter_log(training.log_file()))[known:], whole)
    for kill in pending:
        if kill.resumed is None:
            kill.wrong.append("never resumed")


def judge_final() -> list[str]:
    """The differences between the final states of the two runs."""
    whole, killed = (
        training.state_of(training.run_dir(tag) / "checkpoints" / "final")
        for tag in ("whole", "run")
    )
    differs = [f"{name} differs" for name in whole if whole[name] != killed[name]]
    if training.digests("whole") != training.digests():
        differs.append("digests differ")
    return differs + [
        f"{name} is left over" for name in training.checkpoints() if name.startswith(".")
    ]


def compare(args: argparse.Namespace) -> bool:
    """Train both runs, and print the verdict. Whether they are equal."""
    rng = random.Random(args.seed)
    steps = max(60, STEPS_PER_KILL * args.kills)
    settings = {**SETTINGS, "num_iterations": steps}
    began = time.monotonic()
    training.finish(model_tag="whole", **settings)
    whole = training.steps("whole")
    step_s = statistics.median(record["step_s"] for record in whole.values())
    print(
        f"undisturbed run: {steps} steps in {time.monotonic() - began:.1f} s, {step_s * 1000:.1f} ms per step; seed "
        f"{args.seed}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    kills = at_random(args.kills, step_s, rng)
    try:
        torture(kills, settings, whole)
    finally:  # also if the run cannot be resumed, to show after which kill
        print_kills(kills)
    final = judge_final()
    equal = sum(not kill.wrong for kill in kills) if not final else 0
    repeated = len(training.all_steps()) - steps
    print(
        f"final state: {'; '.join(final) or 'equal'}; {repeated} steps were repeated; "
        f"{time.monotonic() - began:.0f} s"
    )
    print(f"{equal} of {len(kills)} equal")
    return equal == len(kills)


def main(argv: Sequence[str] | None = None) -> int:
    """Torture a run in a temporary folder. Exit code 1 if anything differs."""
    parser = Parser(description=__doc__)
    parser.add_argument("kills", type=whole(1), nargs="?", default=50, help="number of kills")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 10**6, help="repeats the random choices"
    )
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="torture."))
    with training.workplace(folder):
        equal = compare(args)
    if equal:
        shutil.rmtree(folder)
    else:
        print(f"both runs are in {folder / 'runs'}", file=sys.stderr)
    return 0 if equal else 1


if __name__ == "__main__":
    run_main(main)
