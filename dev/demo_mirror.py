"""
A run that outlives its machines: each one begins with an empty disk, fetches what the mirror has,
trains, and is killed at a random moment. The weights at the end are those of an undisturbed run.

    python -m dev.demo_mirror                 # 20 machines, a mirror in a folder
    python -m dev.demo_mirror --bucket        # a mirror in object storage: an S3 server on loopback
    python -m dev.demo_mirror --machines=3 --steps=60

A machine is a base directory that does not exist yet; only the data (with its tokenizer) and the
mirror are shared. SIGKILL comes after a random time, wherever the process is then: before it owns
the mirror, while it fetches, in a step, in a copy. Two of the machines find that a piece of the
newest checkpoint was damaged after the kill, and take the one before. After all kills, one more
machine completes the run.

An owner counts as gone after one second here, instead of after a minute. Duration on two idle
cores: about three minutes.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from dev.measure import print_setup
from nanochat import mirror_owner
from nanochat.cli import Parser, run_main
from nanochat.common import begin_launch, table
from nanochat.mirror_marks import START
from nanochat.mirror_store import as_file, open_store
from nanochat.run_dir import is_step, iter_log
from tests import training
from tests.object_store import object_store

SHORTEST_S = 0.3
TAG = "run"


def hurry() -> None:
    """In a machine's process: an owner gives a sign of life every tenth of a second."""
    mirror_owner.RENEW_S = 0.1
    mirror_owner.SILENCE_S = 1.0
    mirror_owner.POLL_S = 0.05


@contextlib.contextmanager
def machine(folder: Path) -> Iterator[None]:
    """Code inside runs on an empty machine."""
    folder.mkdir()
    with mock.patch.dict(os.environ, {"NANOCHAT_BASE_DIR": str(folder)}):
        yield


def outcome() -> tuple[str, str]:
    """(hash of the final weights, hash of the digests of all steps)."""
    weights = training.final() / "model" / "pytorch_model.bin"
    digests = "".join(training.digests()).encode()
    return (
        hashlib.sha256(weights.read_bytes()).hexdigest()[:16],
        hashlib.sha256(digests).hexdigest()[:16],
    )


def newest_mark(place: str) -> dict[str, Any]:
    """The newest mark of a checkpoint in the mirror, {} if it has none."""
    store = open_store(place)
    names = sorted(name for name in store.names("marks") if f"-{START}-" not in name)
    return json.loads(store.read(f"marks/{names[-1]}").content) if names else {}


def tear(place: str) -> str:
    """Truncate the weights of the newest checkpoint in the mirror. Returns what was done."""
    mark = newest_mark(place)
    if not mark:
        return ""
    files = mark["files"]
    [[[name, _]]] = [files[path] for path in files if path.endswith("pytorch_model.bin")]
    store = open_store(place)
    content = store.read(f"pieces/{name}").content
    store.write(f"pieces/{name}", as_file(content[: len(content) // 2]))
    return f"{mark['checkpoint']} torn"


def live(folder: Path, flags: dict[str, Any], seconds: float | None) -> list[Any]:
    """One machine, which is killed after some seconds. Returns (first step, number of steps, how it
    ended); the first step is None if it was killed before its run was ready."""
    began = time.time()
    with machine(folder):
        process = training.start(hook=hurry, **flags)
        if seconds is not None:
            process.processes[0].join(seconds)
            process.kill()
        [code] = process.wait()
        first = None
        steps = 0
        for record in iter_log(training.log_file()):
            if record.get("event") == "started" and record["time"] >= began:
                first = record["step"]
            elif first is not None and is_step(record):
                steps += 1
    if code not in (-9, 0):
        print(process.text())
    return [first, steps, "killed" if code == -9 else f"exit code {code}"]


def demonstrate(work: Path, place: str, args: argparse.Namespace) -> bool:
    """Kill the machines one after another, then compare. Whether all is equal."""
    rng = random.Random(args.seed)
    machines = args.machines
    data = work / "base" / "data"
    shutil.copytree(work / "base" / "tokenizer", data / "tokenizer")
    common: dict[str, Any] = {"data_path": data, "model_tag": TAG, "num_iterations": args.steps}
    common |= {"save_every": args.save_every, "keep_last_k": 3}
    with machine(work / "undisturbed"):
        training.succeed(**common)
        expected = outcome()
    flags = {**common, "mirror_to": place}
    torn_at = {machines // 3, 2 * machines // 3}
    rows = []
    began = time.monotonic()
    for number in range(1, machines + 1):
        seconds = rng.uniform(SHORTEST_S, args.longest)
        before = newest_mark(place).get("step")
        torn = tear(place) if number in torn_at else ""
        row = live(work / f"machine-{number}", flags, seconds)
        rows.append([number, before, torn, *row, round(seconds, 1)])
        print(*rows[-1], sep=" | ", flush=True)
    last = work / "last"
    rows.append([machines + 1, newest_mark(place).get("step"), "", *live(last, flags, None), None])
    header = ["machine", "mirror has step", "damage", "resumed at", "steps", "end", "after s"]
    print("", *table(header, rows), "", sep="\n")
    with mock.patch.dict(os.environ, {"NANOCHAT_BASE_DIR": str(last)}):
        actual = outcome()
    lines = [["undisturbed", *expected], [f"{machines} machines killed", *actual]]
    print(*table(["run", "weights", "digests of all steps"], lines), sep="\n")
    killed = sum(row[-2] == "killed" for row in rows)
    print(f"{killed} kills in {time.monotonic() - began:.0f} s; equal: {actual == expected}")
    return actual == expected


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration. The exit code is 1 if the weights or batches differ."""
    parser = Parser(description=__doc__)
    parser.add_argument("--machines", type=int, default=20, help="how many are killed")
    parser.add_argument("--steps", type=int, default=2000, help="the length of the run")
    parser.add_argument("--save-every", type=int, default=10, help="steps between saves")
    parser.add_argument("--longest", type=float, default=6.0, help="seconds that a machine lives")
    parser.add_argument("--seed", type=int, default=0, help="decides when the kills happen")
    parser.add_argument("--bucket", action="store_true", help="the mirror is in object storage")
    args = parser.parse_args(argv)
    print_setup()
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-mirror-")))
        stack.enter_context(training.workplace(work / "base", **training.SMALL))
        place = str(work / "mirror")
        if args.bucket:
            place = stack.enter_context(object_store()).path("runs/mine")
            begin_launch()
        is_equal = demonstrate(work, place, args)
    return 0 if is_equal else 1


if __name__ == "__main__":
    run_main(main)
