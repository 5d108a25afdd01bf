"""
Compare two runs: are they equal bit for bit, and if not, where do they diverge?

    python -m scripts.compare_runs mine@50 mine@100         # two checkpoints, or their paths
    python -m scripts.compare_runs d12 d12-again            # names or folders of runs
    python -m scripts.compare_runs d12 d24 --tensors        # list every tensor that differs

Only parts that both runs have are compared: averaged and imported weights, for example, have no
optimizer state. Differences appear in this order, and each kind has typical causes:

    data           digests, token counts, cursors                  different data, seed or stream
    steps          rates, losses, gradients, validation            different settings or order of additions
    checkpoints    architecture, cursors, weights, optimizer       any of the above

    step         0    1    2    3         digests      = = = =     same data
    losses a   5.1  4.9  4.7  4.6         losses       = = # #     differ from step 2 on
    losses b   5.1  4.9  4.8  4.5         checkpoints      = #     equal after 2 steps, not after 4

Logs, cursors and checkpoints are nested dicts and lists, and one function compares them value by
value. Step k of a log is the step taken after k others; checkpoint k is saved after k steps. For
two different experiments, a table shows loss and bits per byte at the same numbers of tokens.

For a fork and its parent, or any two runs with a common ancestor, the steps of their ancestors count,
too, from where the histories part. The command says whether the first difference is the one that the
changed settings must make (nanochat/run_history.py).

**Equal** means equal bits; for everything else the size of the difference is printed. The exit code
is 0 if everything that both runs have is equal, else 1, also if equal rows come from different
files (text and shards).
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanochat.any_step import make_available
from nanochat.checkpoint import (
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    read_seal,
)
from nanochat.cli import EXIT_FAILED, Parser, run_main, setup_logging
from nanochat.common import Bits, counted, few, show, table
from nanochat.dist import VERSIONS
from nanochat.model_code import changed_code, shown_code
from nanochat.pins import compare_files
from nanochat.run_dir import around_difference, changes_text, find_run, is_step, read_cursors
from nanochat.run_facts import differing_code, differing_settings, validation_note
from nanochat.run_history import (
    Effect,
    Parting,
    Rates,
    Stage,
    Stretch,
    effects_of,
    find_parting,
    history_of,
)
from nanochat.run_reader import RunReader, flat_numbers
from nanochat.schedule import Schedule

DATA = {"digest": "digests", "tokens": "token counts", "cursors": "cursors"}
SERIES = {
    **DATA,
    "rates": "rates of the updates",
    "loss": "losses",
    "lr": "schedule multipliers of the learning rates",
    "grad_norm": "gradient norms",
    "bpb": "validation results",
    "buckets": "validation results",
}
SMOOTH = "smooth_loss"
# series that show at which stage of a step two histories differ
SIGNS = {
    SERIES["digest"]: (Stage.ROWS, "digest"),
    SERIES["loss"]: (Stage.LOSS, "loss"),
    SERIES["grad_norm"]: (Stage.GRADIENT, "gradient norm"),
}
# where a change acts in a step, and the step after it
PLACES = {
    Stage.ROWS: "on the rows of step {:,}",
    Stage.LOSS: "within step {:,}",
    Stage.UPDATE: "on the update of step {:,}, so on the loss of step {:,}",
}
CPU_CAUSE = (
    "cause: the processors differ, and another instruction set rounds differently. That alone changes losses "
    "and weights; docs/exactness.md tells how to pin it"
)
TABLE_ROWS = 8  # about as many rows as the table of two experiments has


# ---- two states ---------------------------------------------------------------------------------


class Gap(NamedTuple):
    """A leaf that differs: its place, and the difference in words."""

    where: str
    text: str


def compare_tensors(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """How two tensors of the same dtype and shape differ, None if all bits are equal."""
    x, y = a.reshape(-1), b.reshape(-1)
    # one row of bytes per element, so that a NaN equals itself
    raw_x = x.view(torch.uint8).reshape(-1, a.element_size())
    raw_y = y.view(torch.uint8).reshape(-1, b.element_size())
    unequal = (raw_x != raw_y).any(dim=1)
    places = unequal.nonzero().flatten()
    if not len(places):
        return None
    distances = x[places].double() - y[places].double()
    apart = distances.abs().max().item()
    largest = max(largest_of(x), largest_of(y))
    first = [int(i) for i in np.unravel_index(int(places[0]), a.shape)]
    count = f"{len(places):,} of {a.numel():,} elements differ"
    return f"{count}, the first at {first}, by at most {apart:.3g}; the largest element is {largest:.3g}"


def largest_of(x: torch.Tensor) -> float:
    """The largest absolute value of a tensor."""
    return x.double().abs().max().item()


def kind_of(leaf: object) -> object:
    """A tensor's dtype and shape in words; any other leaf as it is."""
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}"
    return leaf


def difference(a: object, b: object) -> str | None:
    """How two leaves differ, None if they are equal: all bits of tensors. NaN equals NaN."""
    x, y = kind_of(a), kind_of(b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and x == y:
        return compare_tensors(a, b)
    if type(x) is not type(y):
        return f"{x} and {y}"
    both_nan = x != x and y != y
    if x == y or both_nan:
        return None
    if isinstance(x, float) and isinstance(y, float) and math.isfinite(x - y):
        largest = max(abs(x), abs(y))
        relative = abs(x - y) / largest
        return f"{x} and {y}, {relative:.2g} relative"
    return " and ".join(around_difference([f"{x}", f"{y}"]))


def leaves(state: object, name: str = "") -> Iterator[tuple[str, object]]:
    """(dotted name, leaf) of a plain state, in its order."""
    items = state
    if isinstance(state, (list, tuple)):
        items = dict(enumerate(state))
    if not isinstance(items, dict) or not items:
        yield name, state
        return
    for key, item in items.items():
        below = f"{name}.{key}" if name else str(key)
        yield from leaves(item, below)


def compare_states(a: object, b: object) -> Iterator[Gap]:
    """The differences of two plain states, including leaves that only one of them has."""
    x, y = dict(leaves(a)), dict(leaves(b))
    for name in x | y:
        if name in x and name in y:
            text = difference(x[name], y[name])
        elif name in x:
            text = "only a has it"
        else:
            text = "only b has it"
        if text is not None:
            yield Gap(name, text)


def of_files(gap: Gap) -> bool:
    """Whether the gap is only in the identity of the data files, which cursors contain."""
    return ".stream.data " in gap.where


# ---- the contents of a run ----------------------------------------------------------------------

Series = dict[str, dict[int, Any]]  # {name: {step: value}}


def read_series(run: RunReader, notes: list[str]) -> Series:
    """Everything that a run recorded about its steps.

    Digests, tokens, losses, ..., the cursors of every save, and the rates, which follow from the
    settings and lengths of its launches.
    """
    series: Series = {}
    for step, path in run.cursor_files.items():
        try:
            _, cursors = read_cursors(path)
        except (OSError, ValueError) as e:
            notes.append(f"skipped: {e}")
            continue
        lanes = {f"lane {i}": cursor for i, cursor in enumerate(cursors)}
        series.setdefault("cursors", {})[step] = lanes
    for record in (*run.steps, *run.validations.values()):
        values = record if is_step(record) else dict(flat_numbers(record))
        for name, value in values.items():
            group, _, _ = name.partition("/")
            if group in SERIES or name == SMOOTH:
                of_name = series.setdefault(name, {})
                of_name[record["step"]] = value
    if "weight_decay_scaled" in run.config["derived"]:
        rates = Rates(run)
        series["rates"] = {record["step"]: rates.at(record["step"]) for record in run.steps}
    return series


def contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as one plain state, without clocks, random states and wandb's id.

    Tensors are memory-mapped, not read. "optimizer" and "schedule" are optional.
    """
    state: dict[str, Any] = {
        "architecture": checkpoint.model_config,
        "tokenizer": checkpoint.seal.get("tokenizer_fingerprint"),
        "cursors": checkpoint.cursors,
        "model": checkpoint.model_state(),
    }
    for name, file in (("optimizer", OPTIMIZER_NAME), ("schedule", SCHEDULER_NAME)):
        if file in checkpoint.seal["files"]:
            state[name] = checkpoint.load(file)
    if "schedule" in state:
        state["schedule"] = Schedule.complete(state["schedule"])
    return state


def saved_steps(run_dir: Path, notes: list[str]) -> dict[int, Path]:
    """The readable checkpoints of a run by step."""
    saved: dict[int, Path] = {}
    for path in list_checkpoints(run_dir):
        try:
            step = read_seal(path)["step"]
        except (OSError, ValueError) as e:
            notes.append(f"skipped: {e}")
            continue
        saved.setdefault(step, path)
    return dict(sorted(saved.items()))


@dataclass(frozen=True)
class Side:
    """One side of the comparison: a run, or a single checkpoint, whose run may be gone."""

    name: str
    run: RunReader | None  # None for a single checkpoint
    saved: dict[int, Path]  # the checkpoints by step
    log: Series
    about: str  # one line to print: which steps and checkpoints exist, and how the run ended


def open_side(name: str, notes: list[str]) -> Side:
    """The run or checkpoint with this name.

    FileNotFoundError and ValueError from `find_run`, `RunReader` and `find_checkpoint`.
    """
    try:
        run_dir = find_run(name)
    except FileNotFoundError:
        checkpoint = find_checkpoint(make_available(name))
        path = checkpoint.path.absolute()
        return Side(name, None, {checkpoint.step: path}, {}, f"{name}: {path}")
    run = RunReader(run_dir)
    saved = saved_steps(run_dir, notes)
    steps = "no steps"
    if run.steps:
        steps = f"steps {run.steps[0]['step']} to {run.steps[-1]['step']}"
    checkpoints = ", ".join(map(str, saved)) or "none"
    end = run.launches[-1].end if run.launches else ""
    about = f"{name}: {steps} in the log; checkpoints: {checkpoints}; {end or 'unfinished'}"
    return Side(name, run, saved, read_series(run, notes), about)


# ---- two runs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A series or checkpoint that both sides have: how many values were compared, and which differ."""

    kind: str  # data, steps or checkpoint
    name: str
    compared: int
    gaps: list[Gap]
    first: int | None = None  # the first step that differs; of a checkpoint, in its weights

    def text(self) -> str:
        """One line to print."""
        what = f"{self.compared:,}"
        if self.kind == "checkpoint":
            what += " values"
        if not self.gaps:
            return f"{self.name}: {what} equal"
        first = self.gaps[0]
        verb = "differs in" if self.kind == "checkpoint" else "differ first at"
        count = f"{len(self.gaps):,} of {what} differ"
        return f"{self.name} {verb} {first.where}: {first.text}; {count}"


def compare_series(name: str, a: Side, b: Side) -> Part | None:
    """The comparison of one series; None if the sides have no step of it in common."""
    ours, theirs = a.log.get(name, {}), b.log.get(name, {})
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return None
    gaps: list[Gap] = []
    differing = []
    for step in common:
        where = f"step {step}"
        of_step = sorted(compare_states({where: ours[step]}, {where: theirs[step]}), key=of_files)
        gaps += of_step[:1]
        if of_step:
            differing.append(step)
    group, _, bucket = name.partition("/")
    words = SERIES[group]
    if bucket:
        words += f" of {bucket}"
    kind = "data" if name in DATA else "steps"
    return Part(kind, words, len(common), gaps, first=min(differing, default=None))


def compare_checkpoints(name: str, first: Path, second: Path, notes: list[str]) -> Part | None:
    """The comparison of two checkpoints.

    None if one of them is corrupt, or was just deleted by an active run.
    """
    try:
        checkpoint = load_checkpoint(first)
        one = contents(checkpoint)
        other = contents(load_checkpoint(second))
    except (OSError, ValueError) as e:
        notes.append(f"skipped: {e}")
        return None
    shared = one.keys() & other.keys()
    if "optimizer" not in shared:
        notes.append(f"{name}: one side has no optimizer state; only weights and data are compared")
    for state in (one, other):
        for key in state.keys() - shared:
            del state[key]
    gaps = list(compare_states(one, other))
    num_leaves = len(list(leaves(one)))
    compared = max(num_leaves, len(gaps))
    weights_differ = any(gap.where.startswith("model.") for gap in gaps)
    step = checkpoint.step if weights_differ else None
    return Part("checkpoint", name, compared, gaps, first=step)


def compare(a: Side, b: Side, notes: list[str]) -> list[Part]:
    """Everything that both sides have, the data first.

    A step of a series counts once, with its first difference. Two single checkpoints are compared
    even if their steps differ. ValueError if the sides have nothing in common.
    """
    parts: list[Part] = []
    for name in SERIES | a.log:
        part = None if name == SMOOTH else compare_series(name, a, b)
        if part is not None:
            parts.append(part)

    pairs = [(step, step) for step in a.saved if step in b.saved]
    if a.run is None and b.run is None:
        pairs = list(zip(a.saved, b.saved))
    for first, second in pairs:
        name = f"checkpoint {first}"
        if second != first:
            name += f" (against {second})"
        part = compare_checkpoints(name, a.saved[first], b.saved[second], notes)
        if part is not None:
            parts.append(part)

    if not parts:
        nothing = "nothing to compare: the two have no logged step and no checkpoint in common"
        raise ValueError("; ".join([nothing, a.about, b.about, *notes]))
    return parts


def summarize(parts: list[Part], notes: list[str]) -> tuple[bool, str]:
    """(whether all is equal, a sentence: how much is equal, or which difference comes first)."""
    corrupt = sum(note.startswith("skipped") for note in notes)
    end = f"; {counted(corrupt, 'corrupt file')} skipped" if corrupt else ""
    differing = [part for part in parts if part.gaps]

    if not differing:
        equal = []
        for part in parts:
            if part.kind == "checkpoint":
                equal.append(f"{part.name} ({part.compared:,} values)")
            elif part.name in ("digests", "losses"):
                equal.append(f"{part.compared:,} {part.name}")
        return True, f"equal bit for bit: {', '.join(equal)}{end}"

    gaps: list[Gap] = []
    for part in differing:
        gaps += part.gaps
    only_files = all(of_files(gap) for gap in gaps)
    if only_files and parts[0].name == "digests":
        same_rows = (
            "the same rows from different files: all is equal except the files that cursors name"
        )
        return False, same_rows + end

    first = min(differing, key=when_it_shows)
    of_data = [part for part in parts if part.kind == "data"]
    data_equal = bool(of_data) and not any(part.gaps for part in of_data)
    same = "same data; " if data_equal else ""
    return False, same + first.text() + end


def when_it_shows(part: Part) -> tuple[bool, float, bool]:
    """A key that sorts differences by the step at which they appear. Other rates act after the loss
    of their step, and other names of files on nothing."""
    step = math.inf if part.first is None else part.first
    of_update = part.name in (SERIES["rates"], SERIES["lr"])
    return all(map(of_files, part.gaps)), step, of_update


# ---- two histories ------------------------------------------------------------------------------


class Sign(NamedTuple):
    """The first difference of two histories."""

    step: int
    stage: Stage
    text: str


def with_ancestors(
    side: Side, history: Sequence[Stretch], parting: Parting, notes: list[str]
) -> Side:
    """A side that also has the steps and checkpoints of its ancestors from the parting on."""
    log = {name: dict(values) for name, values in side.log.items()}
    saved = dict(side.saved)
    for ancestor, child in itertools.pairwise(history):
        if ancestor.run is None or child.first <= parting.step:
            continue
        begin = max(parting.step, ancestor.first)
        stretch = range(begin, child.first)
        amounts = {run.last_config.get("eval_tokens") for run in (ancestor.run, side.run) if run}
        for name, values in read_series(ancestor.run, notes).items():
            if len(amounts) > 1 and SERIES.get(name.partition("/")[0]) == SERIES["bpb"]:
                continue  # results on other amounts of text cannot be compared
            of_name = log.setdefault(name, {})
            of_name |= {step: value for step, value in values.items() if step in stretch}
        for step, path in saved_steps(ancestor.run.run_dir, notes).items():
            if step in stretch:
                saved[step] = path
    return replace(side, log=log, saved=dict(sorted(saved.items())))


def first_sign(parts: Sequence[Part]) -> Sign | None:
    """The first difference in rows, losses, gradient norms or weights."""
    signs = []
    for part in parts:
        if part.first is not None and part.kind == "checkpoint":
            text = f"the weights after {part.first:,} steps"
            signs.append(Sign(part.first - 1, Stage.UPDATE, text))
        elif part.first is not None and part.name in SIGNS:
            stage, what = SIGNS[part.name]
            signs.append(Sign(part.first, stage, f"the {what} of step {part.first:,}"))
    return min(signs, default=None)


def effect_text(effect: Effect) -> str:
    """Where a change acts, in words."""
    verb = "act" if len(effect.names) > 1 else "acts"
    where = PLACES[effect.stage].format(effect.step, effect.step + 1)
    return f"{' and '.join(effect.names)} {verb} {where}" + " at the earliest" * effect.may_be_later


def merged(effects: Sequence[Effect]) -> Effect:
    """The first effect, with the names of all that are in the same place."""
    first = effects[0]
    names: list[str] = []
    for effect in effects:
        if effect[:2] == first[:2]:
            names += effect.names
    return first._replace(names=names)


def effects_text(effects: Sequence[Effect]) -> str:
    """Where changes act, in words, place by place."""
    texts = []
    for _, in_place in itertools.groupby(effects, key=lambda effect: effect[:2]):
        texts.append(effect_text(merged([*in_place])))
    return "; ".join(texts)


def shows_at(effect: Effect) -> tuple[float, int]:
    """(step, stage) at which a change shows at the latest if it acts at its place."""
    if effect.stage is Stage.ROWS:
        return (effect.step, Stage.ROWS)
    return (effect.step + 1, Stage.LOSS)


def verdict(parts: Sequence[Part], parting: Parting, last: int) -> str:
    """Whether two histories part where their changes must act. `last`: the last step of both."""
    sign = first_sign(parts)
    effects = effects_of(parting, last)
    if sign is None and last < parting.step:
        return f"no verdict yet: they have no step in common from {parting.step:,} on"
    if not effects:
        if sign is None:
            return "as expected: they do the same, and no digest, loss or weight differs"
        return f"unexpected: no change of a fork acts by then, but {sign.text} differs"
    change = effect_text(merged(effects))
    # a difference must have appeared where the first of the certain changes shows
    certain = [effect for effect in effects if not effect.may_be_later]
    latest = min(map(shows_at, certain), default=(math.inf, 0))
    overdue = effects_text([effect for effect in certain if shows_at(effect) == latest])
    if sign is None:
        if latest[0] > last:
            return f"as expected: nothing differs yet: {change}, and both have steps up to {last:,}"
        return f"unexpected: {overdue}, but no digest, loss or weight differs"
    at = (sign.step, sign.stage)
    if at < effects[0][:2]:
        return f"unexpected: {sign.text} differs, but {change}, which is later"
    if at > latest:
        return f"unexpected: {overdue}, but they are equal until {sign.text}"
    # all changes that must have acted by then; only without any, those that may have
    possible = [effect for effect in effects if effect[:2] <= at]
    causes = [effect for effect in possible if not effect.may_be_later] or possible
    return f"as expected: {sign.text} is the first difference: {effects_text(causes)}"


def history_text(rest: Sequence[Stretch], common: Stretch) -> str:
    """What followed the common part of two histories."""
    if not rest:
        return f"{common.name} itself"
    words = []
    for stretch in rest:
        changes = changes_text(stretch.changes)
        words.append(f"{stretch.name} forks at step {stretch.first:,} ({changes})")
    return ", then ".join(words)


def parting_lines(parts: Sequence[Part], parting: Parting, a: Side, b: Side) -> list[str]:
    """Where two histories part, and whether the changes of the forks explain it."""
    common = parting.common
    gone = " (not here)" if common.run is None else ""
    both = a.log.get("digest", {}).keys() & b.log.get("digest", {}).keys()
    last = max(both, default=parting.step - 1)
    return [
        f"common history: {common.name}{gone}, until step {parting.step:,}",
        f"a: {history_text(parting.a, common)}",
        f"b: {history_text(parting.b, common)}",
        verdict(parts, parting, last),
    ]


# ---- documents that one run leaves out ----------------------------------------------------------


def is_listed(place: Mapping[str, Any], listed: Mapping[str, Collection[int] | None]) -> bool:
    """Whether a run leaves out the document at a place.

    `listed`: {file: its left-out documents, None for all}.
    """
    file, document = place["file"], place["document"]
    rows = listed.get(file, [])
    return rows is None or document in rows


def explain_left_out(a: Side, b: Side, step: int | None) -> str:
    """A sentence for two runs with different lists of --without-documents.

    It says whether the first step whose digests differ has a document that only one of them leaves
    out. `step`: that step; "" if there is none, and for other runs.
    """
    if a.run is None or b.run is None or step is None:
        return ""
    listed_a, listed_b = a.run.listed(), b.run.listed()
    is_of_ancestor = a.run.fork is not None and step < a.run.fork.step
    if listed_a == listed_b or is_of_ancestor:
        return ""
    from nanochat.run_stream import open_stream_of, places_in

    opened = open_stream_of(a.run.run_dir)
    with opened.stream_at(step) as stream:
        for row in opened.take(stream, step):
            for place in places_in(opened, stream, row):
                a_omits, b_omits = is_listed(place, listed_a), is_listed(place, listed_b)
                if a_omits == b_omits:
                    continue
                name = a.name if a_omits else b.name
                document = f"{place['file']}:{place['document']}"
                return (
                    f"as expected: step {step} is the first with a document that "
                    f"{name} leaves out ({document})"
                )
    return (
        f"unexpected: the runs first differ at step {step}, but no row of it has a document that only one of them "
        f"leaves out, so something else differs"
    )


def versions_of(run: RunReader) -> dict[str, str]:
    """{name: value} of the versions that a run's launches logged.

    If launches differ, several values, in order.
    """
    values: dict[str, dict[str, None]] = {}
    for launch in run.launches:
        for name in ("code", *VERSIONS):
            if name in launch.started:  # older logs lack some
                distinct = values.setdefault(name, {})
                distinct[show(launch.started[name])] = None
    return {name: ", then ".join(distinct) for name, distinct in values.items()}


def differing_versions(a: RunReader, b: RunReader) -> list[tuple[str, str, str]]:
    """(name, value of a, value of b) of the versions that both runs logged and that differ."""
    ours, theirs = versions_of(a), versions_of(b)
    rows = []
    for name, value in ours.items():
        if theirs.get(name, value) != value:
            rows.append((name, value, theirs[name]))
    return rows


# ---- the command --------------------------------------------------------------------------------


def tokens_at(side: Side) -> dict[int, int]:
    """{steps done: tokens trained on}, as far as a side knows it."""
    tokens = {0: 0}
    fork = side.run.fork if side.run else None
    if fork is not None:  # its log begins with the step after these
        tokens[fork.step] = fork.tokens
    for step, count in side.log.get("tokens", {}).items():
        tokens[step + 1] = count
    return tokens


def curve(side: Side, name: str) -> dict[int, float]:
    """{tokens trained on: value} of the smoothed loss ("loss") or of validation results ("bpb")."""
    values = side.log.get(name, {})
    if name == "loss":  # the loss of step s is known after s + 1 steps
        smoothed = side.log.get(SMOOTH, values)
        values = {step + 1: value for step, value in smoothed.items()}
    tokens = tokens_at(side)
    points = {}
    for step, value in sorted(values.items()):
        if step in tokens and value is not None:
            points[tokens[step]] = value
    return points


def first_mark(side: Side) -> int:
    """The number of tokens with which a side's log begins: 0, or for a fork where it forked, unless it
    has the steps of ancestors, too."""
    first_step = min(side.log["tokens"], default=0)
    return tokens_at(side).get(first_step, min(curve(side, "loss")))


def interpolate(points: dict[int, float], at: int) -> float | None:
    """The value of a curve at a number of tokens; None outside of the curve."""
    if not points or not min(points) <= at <= max(points):
        return None
    values = [*points.values()]
    return float(np.interp(at, [*points], values))


def same_tokens(a: Side, b: Side) -> list[list[Any]]:
    """The two runs' losses at equal numbers of tokens, as rows.

    Rows (tokens, loss of a and b, bits per byte of a and b) at some numbers of tokens at which
    either was evaluated, among them the last one at which both were, and at the last one of all.
    Of a fork, they begin where it does. Losses between two steps are interpolated. Bits per byte
    are not: evaluations lie far apart, and a straight line between two is no measurement.
    """
    loss_a, loss_b = curve(a, "loss"), curve(b, "loss")
    bpb_a, bpb_b = curve(a, "bpb"), curve(b, "bpb")
    if not loss_a or not loss_b:
        return []
    begin = max(first_mark(a), first_mark(b))
    end = min(max(loss_a), max(loss_b))
    evaluated = {mark for mark in bpb_a | bpb_b if begin <= mark < end}
    newest_first = sorted(evaluated | {end}, reverse=True)
    stride = -(-len(newest_first) // TABLE_ROWS)
    marks = set(newest_first[::stride])  # always with the end
    by_both = evaluated & bpb_a.keys() & bpb_b.keys()
    if by_both:
        marks.add(max(by_both))
    rows = []
    for mark in sorted(marks):
        losses = [interpolate(points, mark) for points in (loss_a, loss_b)]
        values = [*losses, bpb_a.get(mark), bpb_b.get(mark)]
        rows.append([mark, *map(Bits.of, values)])
    return rows


def same_buckets(a: Side, b: Side) -> list[list[Any]]:
    """Rows (bucket, tokens, bits per byte of a and of b) of the last evaluation at equal numbers of
    tokens, for buckets that both runs evaluate; [] if there are no two of them."""
    rows = []
    for name in a.log:
        group, _, bucket = name.partition("/")
        if group != "buckets":
            continue
        ours, theirs = curve(a, name), curve(b, name)
        common = ours.keys() & theirs.keys()
        if common:
            mark = max(common)
            rows.append([bucket, mark, Bits.of(ours[mark]), Bits.of(theirs[mark])])
    return rows if len(rows) > 1 else []


def place_of(run: RunReader) -> str:
    """The folders in which a run reads its files."""
    roots = set()
    for buckets in run.manifests.values():
        roots |= {manifest["root"] for manifest in buckets.values()}
    return " and ".join(sorted(roots))


def data_lines(a: RunReader, b: RunReader) -> list[str]:
    """Which files differ in two runs, or only in their names, which decide their order, and where
    each run reads its data; [] if all files and names are equal. --data-path may be the same: a
    branch of a data set moves on, and a folder changes."""
    if not a.manifests or not b.manifests:
        return []
    gaps = compare_files(a.manifests, b.manifests)
    if not any(gaps):
        return []
    lines = []
    if place_of(a) != place_of(b):
        lines += [f"data of a: {place_of(a)}", f"data of b: {place_of(b)}"]
    if gaps.differ:
        lines.append(f"files that differ: {few(gaps.differ)}")
    lines += [f"{what}: {few(names)}" for what, names in gaps.alone.items()]
    if gaps.renamed:
        lines.append(f"the same files under other names: {few(gaps.renamed)}")
    return lines


def model_code(side: Side) -> dict[str, str]:
    """{file: hash} of the code that trained a side, see `shown_code`."""
    if side.run is not None:
        return side.run.shown_code
    [path] = side.saved.values()
    return shown_code([read_seal(path).get("model_code", {})])


def print_settings(a: Side, b: Side, parts: Sequence[Part]) -> None:
    """Print the files, model code and settings of two sides that differ, and what --without-documents
    explains. A single checkpoint has no files and no settings."""
    of_data: list[str] = []
    if a.run is not None and b.run is not None:
        of_data = data_lines(a.run, b.run)
        differ = differing_settings([a.run, b.run])
    else:
        differ = differing_code([model_code(a), model_code(b)])
    if of_data:
        print("", *of_data, sep="\n")
    if not differ:
        return
    rows = [
        [name, *around_difference([show(value) for value in values])] for name, *values in differ
    ]
    print("", *table(("settings that differ", "a", "b"), rows), sep="\n")
    digests = next((part for part in parts if part.name == DATA["digest"]), None)
    sentence = "" if of_data or digests is None else explain_left_out(a, b, digests.first)
    if sentence:
        print("", sentence, sep="\n")


def print_versions(a: Side, b: Side, parts: list[Part]) -> None:
    """Print the versions with which two differing runs were trained, if they differ."""
    if a.run is None or b.run is None:
        return
    versions = differing_versions(a.run, b.run)
    if not versions:
        return
    print("", *table(("versions that differ", "a", "b"), versions), sep="\n")
    same_data = not any(part.gaps for part in parts if part.kind == "data")
    other_cpu = any(name.startswith("cpu") for name, _, _ in versions)
    if same_data and other_cpu:
        print("", CPU_CAUSE, sep="\n")


def print_parts(parts: Sequence[Part], *, with_tensors: bool) -> None:
    """Print a line for each part; `with_tensors`, also everything that differs in checkpoints."""
    for part in parts:
        print(part.text())
        for gap in part.gaps if with_tensors and part.kind == "checkpoint" else ():
            print(f"  {gap.where}: {gap.text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print.

    Exit code 1 if something differs. ValueError and FileNotFoundError for bad input.
    """
    parser = Parser(description=__doc__)
    parser.add_argument(
        "a", metavar="A", help="a run's name or folder, or a checkpoint: NAME@STEP or its path"
    )
    parser.add_argument("b", metavar="B", help="the run or checkpoint to compare A with")
    parser.add_argument(
        "--tensors", action="store_true", help="list everything that differs in checkpoints"
    )
    args = parser.parse_args(argv)
    setup_logging()
    notes: list[str] = []
    a = open_side(args.a, notes)
    b = open_side(args.b, notes)
    parting = None
    if a.run is not None and b.run is not None:
        histories = history_of(a.run), history_of(b.run)
        parting = find_parting(*histories)
        if parting is not None:
            a = with_ancestors(a, histories[0], parting, notes)
            b = with_ancestors(b, histories[1], parting, notes)
    parts = compare(a, b, notes)
    equal, summary = summarize(parts, notes)
    changed = changed_code(model_code(a), model_code(b))
    if changed and not equal:
        summary += f"; other model code: {few(changed)}"
    print(summary, "", f"a = {a.about}", f"b = {b.about}", sep="\n")
    for note in notes:
        print(f"note: {note}")
    if parting is not None:
        print("", *parting_lines(parts, parting, a, b), sep="\n")
    print_settings(a, b, parts)
    if not equal:
        print_versions(a, b, parts)
        rows = same_tokens(a, b)
        header = (
            *("tokens", "smoothed loss a", "smoothed loss b"),
            *("bits per byte a", "bits per byte b"),
        )
        if rows:
            note = validation_note([side.run for side in (a, b) if side.run])
            print("", *filter(None, [note]), *table(header, rows), sep="\n")
        if of_buckets := same_buckets(a, b):
            print("", *table(("bucket", header[0], *header[3:]), of_buckets), sep="\n")
    print()
    print_parts(parts, with_tensors=args.tensors)
    return 0 if equal else EXIT_FAILED


if __name__ == "__main__":
    run_main(main)
