"""
Kill one training run again and again, and compare it with a run that nothing happened to, bit for bit.

    whole    |-----------------------------------------------------------------| final
    killed   |-----x                  kill 1, SIGKILL in the middle of a save
               |------x               kill 2 ...                                          each line is a launch of the
                    |--S              kill 3, SIGTERM: it saves and stops                 same command, which goes on
                       x              kill 4, while setting up                            where the last good
                       |-----...                                        -------| final    checkpoint is

Equal means: every line of a step that was ever logged, repeated ones too, has the digest, loss and gradient norm that
this step has in the whole run; every launch began no earlier than the newest checkpoint that had been told as saved;
the final weights, optimizer state, cursors and progress have the same bits. So each kill is judged by what the launch
after it did, and all of them by the end.

Processes are forked from a server that has loaded torch (tests/training.py), which makes a launch half a second.
Use it as `bash dev/torture.sh 50`.
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

EXACT = ("digest", "loss", "grad_norm", "smooth_loss", "tokens", "lr")  # of a step's line
SETTINGS: dict[str, Any] = {
    "max_seq_len": 64, "total_batch_size": 64 * 8, "device_batch_size": 4, "buffer_size": 8, "overlap": 16,
    "eval_every": 50, "eval_tokens": 64 * 8, "save_every": 3, "keep_last_k": 2}
STEPS_PER_KILL = 7  # more than a launch gets done on average before it is killed
REACH = 10  # steps that it may get done
SETUP_S = 0.5  # about what a launch takes to its first step


@dataclass
class Kill:
    """One kill: what is planned, and what came of it. The signal comes `after_s` from the start of the launch or,
    `running`, from its first step."""

    number: int
    signal: int = signal.SIGKILL
    sync_save: bool = False
    running: bool = True
    after_s: float = 0.0
    began: int | None = None  # the step at which the launch that was killed had begun, None if it had not
    last_step: int | None = None  # the last step in the log when it was dead
    saved: int = 0  # the newest checkpoint that had been told as saved
    resumed: int | None = None  # the step at which the next launch that got so far began
    seconds: float = 0.0
    lines: list[dict[str, Any]] = field(default_factory=list)  # that the launch wrote
    wrong: list[str] = field(default_factory=list)

    @property
    def row(self) -> tuple[Any, ...]:
        """The kill in the table, whose heading is HEAD."""
        return (self.number, signal.Signals(self.signal).name, "running" if self.running else "set-up",
                "sync" if self.sync_save else "async", self.last_step, self.resumed, self.seconds,
                "; ".join(self.wrong) or "equal")


HEAD = ("kill", "signal", "when", "saves", "step", "resumed", "seconds", "the run")


# ---- what to do -----------------------------------------------------------------------------------------------------

def at_random(number: int, step_s: float, rng: random.Random) -> list[Kill]:
    """So many kills at random moments: most while it trains, one in six while it sets up."""
    kills = []
    for i in range(1, number + 1):
        running = rng.random() > 1 / 6
        kills.append(Kill(i, signal=rng.choices((signal.SIGKILL, signal.SIGTERM, signal.SIGINT), (8, 1, 1))[0],
                          sync_save=rng.random() < 1 / 3, running=running,
                          after_s=rng.uniform(0, REACH * step_s if running else SETUP_S)))
    return kills


# ---- doing it -------------------------------------------------------------------------------------------------------

def launch(kill: Kill, settings: dict[str, Any]) -> None:
    """Start the command, kill it as planned, and note what it left."""
    log = training.run_dir() / "logs" / "train.jsonl"
    known = len(list(iter_log(log)))
    began = time.monotonic()
    group = training.start(sync_save=kill.sync_save or None, **settings)
    if kill.running:
        training.wait_for(lambda: group.processes[0].exitcode is not None or "\nstep 0" in group.text())
    time.sleep(kill.after_s)
    if group.processes[0].exitcode is None:
        os.kill(group.processes[0].pid, kill.signal)
    code = group.wait()[0]
    kill.seconds = time.monotonic() - began
    everything = list(iter_log(log))
    kill.lines = everything[known:]
    kill.began = next((r["step"] for r in kill.lines if r.get("event") == "started"), None)
    kill.last_step = max((r["step"] for r in everything if "event" not in r), default=None)
    told = [CHECKPOINT_NAME.fullmatch(r["checkpoint"]) for r in everything if r.get("event") == "saved"]
    kill.saved = max((int(match["step"] or 0) for match in told if match), default=0)
    kill.wrong += judge_end(kill, code, group.text())


def judge_end(kill: Kill, code: int, text: str) -> list[str]:
    """What is wrong with how a process ended."""
    if "completed:" in text:
        return ["the run was over before this kill"]
    if kill.signal == signal.SIGKILL or not kill.running:  # before its handlers are there a signal just kills
        return [] if code == -kill.signal or kill.signal != signal.SIGKILL else [f"exit code {code}: {text[-500:]}"]
    return [] if code == 0 and "stopped: SIG" in text else [f"exit code {code}: {text[-500:]}"]


def judge_resume(kills: Sequence[Kill], after: Kill | None, whole: dict[int, dict[str, Any]]) -> None:
    """Judge the kills that no launch has resumed from yet by the one that now has: `after`, itself killed later."""
    if after is None or after.began is None:
        return
    wrong = [f"step {r['step']} differs" for r in after.lines if "event" not in r
             and any(r[name] != whole[r["step"]][name] for name in EXACT)]
    for kill in kills:
        kill.resumed = after.began
        lost = [f"checkpoint {kill.saved} was lost"] if after.began < kill.saved else []
        kill.wrong += lost + wrong


def torture(kills: Sequence[Kill], settings: dict[str, Any], whole: dict[int, dict[str, Any]]) -> None:
    """Go through all kills, then let the run come to its end; each kill is judged when it was resumed."""
    waiting: list[Kill] = []
    for kill in tqdm(kills, unit=" kills", disable=None):
        launch(kill, settings)
        if kill.began is not None:
            judge_resume(waiting, kill, whole)
            waiting = []
        waiting.append(kill)
    known = len(list(iter_log(training.run_dir() / "logs" / "train.jsonl")))
    training.finish(**settings)
    lines = list(iter_log(training.run_dir() / "logs" / "train.jsonl"))[known:]
    end = Kill(0, lines=lines, began=next((r["step"] for r in lines if r.get("event") == "started"), None))
    judge_resume(waiting, end, whole)
    for kill in waiting if end.began is None else []:
        kill.wrong.append("never resumed")


def judge_final() -> list[str]:
    """What differs between the ends of the two runs."""
    whole, killed = (training.state_of(training.run_dir(tag) / "checkpoints" / "final") for tag in ("whole", "run"))
    differs = [f"{name} differs" for name in whole if whole[name] != killed[name]]
    if training.digests("whole") != training.digests():
        differs.append("digests differ")
    return differs + [f"{name} is left over" for name in training.checkpoints() if name.startswith(".")]


def compare(args: argparse.Namespace) -> bool:
    """Both runs and the verdict."""
    rng = random.Random(args.seed)
    steps = max(60, STEPS_PER_KILL * args.kills)
    settings = {**SETTINGS, "num_iterations": steps}
    began = time.monotonic()
    training.finish(model_tag="whole", **settings)
    whole = training.steps("whole")
    step_s = statistics.median(record["step_s"] for record in whole.values())
    print(f"the whole run: {steps} steps in {time.monotonic() - began:.1f} s, {step_s * 1000:.1f} ms a step; seed "
          f"{args.seed}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    kills = at_random(args.kills, step_s, rng)
    try:
        torture(kills, settings, whole)
    finally:  # also where the run cannot go on: which kill did it?
        print(*table(HEAD, [kill.row for kill in kills if kill.resumed is not None or kill.wrong]), sep="\n")
    final = judge_final()
    equal = sum(not kill.wrong for kill in kills) if not final else 0
    repeated = sum("event" not in r for r in iter_log(training.run_dir() / "logs" / "train.jsonl")) - steps
    print(f"final state: {'; '.join(final) or 'equal'}; {repeated} steps were done again; "
          f"{time.monotonic() - began:.0f} s")
    print(f"{equal} of {len(kills)} equal")
    return equal == len(kills)


def main(argv: Sequence[str] | None = None) -> int:
    """Torture a run in a temporary folder; 0 if it did not mind."""
    parser = Parser(description=__doc__)
    parser.add_argument("kills", type=whole(1), nargs="?", default=50)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="of the choices, not of the moments")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="torture."))
    with training.workplace(folder):
        equal = compare(args)
    if equal:
        shutil.rmtree(folder)
    else:
        print(f"both runs are kept: {folder / 'runs'}", file=sys.stderr)
    return 0 if equal else 1


if __name__ == "__main__":
    run_main(main)
