"""
Checks of a receipt: of its rows against the data, and of its weights against the run.

    check_rows        packs all rows up to a step again: their digests, and the chain over them
    find_stretches    which steps to train again, once settings, launches and digests of the run are
                      those of the receipt; scripts.replay then compares every bit of the weights
"""

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from nanochat.config import Settings, changes_of
from nanochat.receipt import (
    horizons_of,
    next_link,
    open_receipt,
    read_receipt,
    seals_of,
    training_settings,
)
from nanochat.run_dir import CONFIG_NAME, find_run
from nanochat.run_reader import RunReader
from nanochat.run_stream import step_digests

OTHER_RUN = "it is another run (scripts.compare_runs compares two runs), or was edited"


def check_rows(path: Path, given: Settings, asked: Sequence[int] | None) -> Iterator[str]:
    """Recompute the rows of the steps asked for (None: of all that the receipt marks) from the data
    that `given` names, and compare their digests with those of the receipt. Yields lines to print.
    ValueError if one differs."""
    receipt = read_receipt(path)
    marks = {int(step): mark for step, mark in receipt["marks"].items()}
    steps = asked or sorted(marks)
    highest = max(steps)
    opened = open_receipt(path, given, highest)
    where = given.data_path or receipt["data"]
    yield f"{path}: the files in {where} are those of {receipt['run']}"
    first = opened.first_step
    if min(steps) < first:
        raise ValueError(
            f"{path}: step {min(steps):,} is before the fork that it describes, which begins with step "
            f"{first:,}; verify a receipt of the run that it continues"
        )
    last = min(step for step in marks if step >= highest)
    why = "rows depend on earlier rows"
    if last > highest:
        why += (
            f", and after step {highest:,}, step {last:,} is the next with a digest in the receipt"
        )
    yield f"  recomputing steps {first:,} to {last:,}: {why}"

    link, good = "", first - 1
    digests = step_digests(opened, range(first, last + 1), 1)
    for step, [part] in tqdm(
        digests, total=last + 1 - first, unit="step", desc="recomputed", leave=False, disable=None
    ):
        digest = f"{part:016x}"
        link = next_link(link, digest)
        if step not in marks:
            continue
        mark = marks[step]
        if digest != mark["digest"]:
            raise ValueError(
                f"{path}: step {step:,} was not trained on these rows: their digest is {digest}, but the "
                f"receipt says {mark['digest']}; code, tokenizer or data differ"
            )
        if link != mark["chain"]:
            raise ValueError(
                f"{path}: one of steps {good + 1:,} to {step - 1:,} was not trained on these rows: the "
                f"chain of their digests differs; code, tokenizer or data differ"
            )
        good = step
    yield (
        f"  OK steps {', '.join(map(str, steps))}: trained on these rows, and so were all steps from "
        f"{first:,} to {good:,} (chain of digests {link})"
    )


class Stretches(NamedTuple):
    """What to train again."""

    run: RunReader
    steps: list[range]  # each from a checkpoint to the next
    share: float  # of all steps of the receipt


def find_stretches(path: Path, name: str | None, asked: str) -> Stretches:
    """The stretches of a run that `asked` names ("5%" or "1000:2000"), after a comparison of the
    run's settings, launches and digests with those of its receipt. `name`: of the run, None for the
    name in the receipt. ValueError if they differ."""
    receipt = read_receipt(path)
    run = RunReader(find_run(name or receipt["run"]))
    settings = Settings.from_json(run.config, run.run_dir / CONFIG_NAME)
    ours = json.loads(json.dumps(training_settings(settings)))
    for name in receipt["training"] | ours:
        for what, theirs, own in changes_of(name, receipt["training"].get(name), ours.get(name)):
            raise ValueError(
                f"{path}: {what} is {theirs!r} in the receipt, but {own!r} in {run.run_dir / CONFIG_NAME}; "
                f"{OTHER_RUN}"
            )
    check_launches(path, receipt, run)
    check_digests(path, receipt, run)
    stretches = choose_stretches(path, receipt, run, asked)
    share = sum(len(stretch) for stretch in stretches) / (receipt["steps"] - run.first_step)
    return Stretches(run, stretches, share)


def check_launches(path: Path, receipt: Mapping[str, Any], run: RunReader) -> None:
    """ValueError unless each launch of a run had the settings and the length that its receipt says:
    a replay uses those in the log."""
    found, known = horizons_of(run.launches), receipt["horizons"]
    # later launches may train further, but not the receipt's steps with another length
    added = found[len(known) :]
    longer = [first for first, steps in added if first < receipt["steps"] and steps != known[-1][1]]
    if found[: len(known)] != known or longer:
        raise ValueError(
            f"{path}: the launches in {run.log_path} are not those of the receipt; {OTHER_RUN}"
        )
    for launch in run.launches:
        changed = launch.started.get("changed") or {}
        for name in sorted(changed.keys() & receipt["training"].keys()):
            for what, theirs, own in changes_of(name, receipt["training"][name], changed[name]):
                raise ValueError(
                    f"{path}: {what} is {theirs!r} in the receipt, but the launch at step {launch.first:,} in "
                    f"{run.log_path} has changed it to {own!r}, which no launch may"
                )


def check_digests(path: Path, receipt: Mapping[str, Any], run: RunReader) -> None:
    """ValueError unless the log of a run has the digests of its receipt. A replay compares rows with
    the log alone, so the log must be the one that the receipt describes."""
    link = ""
    for step in range(receipt.get("first", 0), receipt["steps"]):
        digest = run.digests.get(step, "")
        link = next_link(link, digest)
        mark = receipt["marks"].get(str(step))
        if mark is not None and mark != {"digest": digest, "chain": link}:
            raise ValueError(
                f"{path}: the digests in {run.log_path} up to step {step:,} are not those of the receipt; {OTHER_RUN}"
            )


def choose_stretches(
    path: Path, receipt: Mapping[str, Any], run: RunReader, asked: str
) -> list[range]:
    """The stretches between neighbouring checkpoints of a receipt that --replay asks for: a share
    of all steps, drawn at random, or those that overlap A:B. ValueError if a checkpoint is gone or
    is not the one of the receipt."""
    seals = {int(step): checksum for step, checksum in receipt["checkpoints"].items()}
    present = seals_of(run, receipt["steps"])
    edges = sorted({run.first_step, *seals})
    stretches = [range(first, stop) for first, stop in itertools.pairwise(edges)]
    if not stretches:
        raise ValueError(
            f"{path}: it lists no checkpoint after the beginning, so nothing can be replayed"
        )
    if asked.endswith("%"):
        needed = float(asked[:-1]) / 100 * (edges[-1] - edges[0])
        random.SystemRandom().shuffle(stretches)
        lengths = list(itertools.accumulate(map(len, stretches)))
        stretches = stretches[: 1 + sum(length < needed for length in lengths)]
    else:
        first, stop = map(int, asked.split(":"))
        stretches = [s for s in stretches if s.start < stop and first < s.stop]
        if not stretches:
            raise ValueError(
                f"--replay={asked}: the receipt lists checkpoints of steps {', '.join(map(str, edges))}; name "
                f"steps between two of them"
            )
    for step in sorted({edge for s in stretches for edge in (s.start, s.stop)}):
        if step in seals and present.get(str(step)) != seals[step]:
            what = "is not the one of the receipt" if str(step) in present else "is gone"
            raise ValueError(
                f"{path}: the checkpoint of step {step} {what}; restore it, or replay other steps with "
                f"--replay=A:B"
            )
    return sorted(stretches, key=lambda stretch: stretch.start)
