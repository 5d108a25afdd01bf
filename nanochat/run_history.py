"""
The history of a run: which of its ancestors took each step, and where the histories of two runs part.

    step      0         10        20        30
    mine      |---------+---------+---------|
    warm                |---------+---------|      a fork of mine at step 10
    hot                           |---------|      a fork of warm at step 20

    history of hot         mine 0 to 9, warm 10 to 19, hot from 20 on
    history of warm        mine 0 to 9, warm from 10 on         parts from that of hot at step 20

What a fork changes can act at four places of its first step:

    rows  -->  loss  -->  gradient norm  -->  update  -->  loss of the next step
    digest     attention  z-loss, leaves      rates

So another mixture shows in the digest of that step, and another learning rate in the weights after
it and in the loss of the next step. A schedule acts at the first step whose rates differ, which may
come much later: a longer run has the same rates until the warmdown of the shorter one.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.cli import Decides
from nanochat.config import Settings, changes_of, known_settings
from nanochat.model_code import CODE_OF
from nanochat.run_dir import CONFIG_NAME
from nanochat.run_reader import RunReader
from nanochat.schedule import HorizonSettings, Schedule, ScheduleSettings

RATES = ("matrix_lr", "embedding_lr", "unembedding_lr", "scalar_lr")
HORIZON = {f.name for f in fields(HorizonSettings)}
SCHEDULED = {*RATES, "weight_decay", *HORIZON, *(f.name for f in fields(ScheduleSettings))}
# settings that decide rows only together with the files that they name
OF_ROWS = {"data_path", "without_documents", "skip_steps"}
# settings whose change may leave the first steps as they were: a document that is not yet due, a
# gradient that is not clipped
MAY_ACT_LATER = {
    *("curriculum", "data_path", "without_documents", "max_grad_norm", "skip_spikes"),
    *("allow_bucket_exhaustion",),
}


class Stage(enum.IntEnum):
    """The places of a step at which a difference can appear first, in order."""

    ROWS = 0
    LOSS = 1
    GRADIENT = 2
    UPDATE = 3


class Stretch(NamedTuple):
    """The steps of a history that one run has taken."""

    run_dir: Path
    run: RunReader | None  # None if it is not here
    first: int
    changes: dict[str, list[Any]]  # what the run changed there

    @property
    def name(self) -> str:
        return self.run_dir.name


class Parting(NamedTuple):
    """Where two histories part."""

    common: Stretch  # the last run that they share
    step: int  # the first step that they do not share
    a: list[Stretch]  # the rest of each
    b: list[Stretch]


class Effect(NamedTuple):
    """The first effect of a change that only one of two histories has."""

    step: int
    stage: Stage
    names: list[str]  # the changed settings
    may_be_later: bool = False


# ---- histories ----------------------------------------------------------------------------------


def history_of(run: RunReader) -> list[Stretch]:
    """The history of a run, oldest stretch first. It begins with the oldest ancestor that still
    exists, or with the first one that does not."""
    stretches: list[Stretch] = []
    reader: RunReader | None = run
    while reader is not None:
        path = reader.run_dir.resolve()
        if any(path == stretch.run_dir for stretch in stretches):
            break  # a circle, after an edit of config.json
        fork = reader.fork
        if fork is None:
            stretches.append(Stretch(path, reader, 0, {}))
            break
        stretches.append(Stretch(path, reader, fork.step, fork.changes))
        parent_dir = reader.parent_dir
        if parent_dir is None:
            stretches.append(Stretch(path.parent / fork.run, None, 0, {}))
        reader = RunReader(parent_dir) if parent_dir else None
    return stretches[::-1]


def find_parting(a: Sequence[Stretch], b: Sequence[Stretch]) -> Parting | None:
    """Where two histories part; None if they have no run in common, or are the same."""
    shared = 0
    for ours, theirs in zip(a, b):
        if ours.run_dir != theirs.run_dir:
            break
        shared += 1
    rests = [*a[shared:]], [*b[shared:]]
    branches = [rest[0].first for rest in rests if rest]
    if not shared or not branches:
        return None
    return Parting(a[shared - 1], min(branches), *rests)


# ---- the step at which a change acts ------------------------------------------------------------


def stage_of(name: str, known: dict[str, Any]) -> Stage | None:
    """Where a changed setting acts first in a step; None if it decides no bit."""
    if name in SCHEDULED:
        return Stage.UPDATE
    if name.startswith(CODE_OF):
        return Stage.LOSS
    if name in OF_ROWS or name not in known:
        return Stage.ROWS
    decides = known[name].metadata["decides"]
    if Decides.ROWS in decides:
        return Stage.ROWS
    return Stage.LOSS if decides else None


def differing_changes(parting: Parting) -> Iterator[tuple[int, str]]:
    """(step, setting) of the changes that only one of two histories has made at that step."""
    changes: dict[int, list[dict[str, list[Any]]]] = {}
    for side, rest in enumerate((parting.a, parting.b)):
        for stretch in rest:
            of_step = changes.setdefault(stretch.first, [{}, {}])
            of_step[side] = stretch.changes
    for step in sorted(changes):
        ours, theirs = changes[step]
        for name in ours | theirs:
            pairs = zip(ours.get(name, ()), theirs.get(name, ()))
            is_same = name in ours and name in theirs
            if not is_same or any(changes_of(name, first, second) for first, second in pairs):
                yield step, name


def effects_of(parting: Parting, last: int) -> list[Effect]:
    """The effects of all changes in which two histories differ, the first one first. Schedules are
    compared up to the step `last`."""
    some_run = next(s.run for s in (*parting.a, *parting.b) if s.run is not None)
    known = dict(known_settings(some_run.config))
    effects: list[Effect] = []
    scheduled: list[tuple[int, str]] = []
    for step, name in differing_changes(parting):
        stage = stage_of(name, known)
        if stage is Stage.UPDATE:
            scheduled.append((step, name))
        elif stage is not None:
            may_be_later = name in MAY_ACT_LATER or name.startswith(CODE_OF)
            effects.append(Effect(step, stage, [name], may_be_later))
    step_of_rates = first_other_rates(parting, last)
    if step_of_rates is not None:
        names = dict.fromkeys(name for step, name in scheduled if step <= step_of_rates)
        # a resume may change the horizon, too
        effects.append(Effect(step_of_rates, Stage.UPDATE, [*names] or ["num_iterations"]))
    return sorted(effects)


class Rates:
    """What the updates of a run depend on besides the gradient."""

    def __init__(self, run: RunReader) -> None:
        self.run = run
        self.settings = Settings.from_json(run.config, run.run_dir / CONFIG_NAME)
        self.schedules: dict[int, Schedule] = {}  # {horizon: schedule}

    def horizon(self, step: int) -> int:
        """The number of steps that the run was to have when it took this step."""
        planned = self.run.config["derived"]["num_iterations"]
        launch = self.run.launch_of(step)
        return int(planned if launch is None else launch.started.get("num_iterations", planned))

    def at(self, step: int) -> dict[str, float]:
        """Learning rates, momentum and weight decay of a step's update."""
        derived = self.run.config["derived"]
        horizon = self.horizon(step)
        if horizon not in self.schedules:
            self.schedules[horizon] = Schedule.of(
                self.settings, horizon, peak_weight_decay=derived["weight_decay_scaled"]
            )
        schedule = self.schedules[horizon]
        factor = derived["batch_lr_scale"] * schedule.lr(step)
        rates = {name: getattr(self.settings, name) * factor for name in RATES}
        rates["momentum"] = schedule.momentum(step)
        rates["weight decay"] = schedule.peak_weight_decay * schedule.weight_decay(step)
        return rates


def first_other_rates(parting: Parting, last: int) -> int | None:
    """The first step, up to `last`, that two histories took with different rates; None if there is
    none, or if a run that took the step is not here."""
    sides: list[list[tuple[int, Rates]]] = []
    for rest in (parting.a, parting.b):
        stretches = [parting.common, *rest]
        rates = [(s.first, Rates(s.run)) for s in stretches if s.run is not None]
        sides.append(rates)
    for step in range(parting.step, last + 1):
        ours, theirs = ([rates for first, rates in side if first <= step] for side in sides)
        if ours and theirs and ours[-1].at(step) != theirs[-1].at(step):
            return step
    return None
