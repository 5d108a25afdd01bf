"""
Compare two runs: are they equal bit for bit, and if not, where do they diverge?

    python -m scripts.compare_runs mine@50 mine@100         # two checkpoints, or their paths
    python -m scripts.compare_runs d12 d12-again            # names or folders of runs
    python -m scripts.compare_runs d12 d24 --tensors        # list every tensor that differs

Only parts that both runs have are compared: averaged and imported weights, for example, have no optimizer state.
Differences appear in this order, and each kind has typical causes:

    data           digests, token counts, cursors                  different data, seed or stream
    steps          losses, learning rates, gradients, validation   different settings or order of additions
    checkpoints    architecture, cursors, weights, optimizer       any of the above

    step         0    1    2    3         digests      = = = =     same data
    losses a   5.1  4.9  4.7  4.6         losses       = = # #     differ from step 2 on
    losses b   5.1  4.9  4.8  4.5         checkpoints      = #     equal after 2 steps, not after 4

Logs, cursors and checkpoints are nested dicts and lists, and one function compares them value by value. Step k of a log
is the step taken after k others; checkpoint k is saved after k steps. For two different experiments, a table shows loss
and bits per byte at the same numbers of tokens.

**Equal** means equal bits; for everything else the size of the difference is printed. The exit code is 0 if everything
that both runs have is equal, else 1, also if equal rows come from different files (text and shards).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

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
from nanochat.common import counted, show, table
from nanochat.dist import VERSIONS
from nanochat.run_dir import find_run, is_step, read_cursors
from nanochat.run_reader import RunReader, differing_settings, flat_numbers

DATA = {"digest": "digests", "tokens": "token counts", "cursors": "cursors"}
SERIES = {**DATA, "loss": "losses", "lr": "learning rates", "grad_norm": "gradient norms",
          "bpb": "validation results", "buckets": "validation results"}
SMOOTH = "smooth_loss"
WIDEST = 50  # maximum number of characters shown of a setting
CPU_CAUSE = ("cause: the processors differ, and another instruction set rounds differently. That alone changes losses "
             "and weights; docs/exactness.md tells how to pin it")
TABLE_ROWS = 8  # about as many rows as the table of two experiments has


# ---- two states ---------------------------------------------------------------------------------

class Gap(NamedTuple):
    """A leaf that differs: its place, and the difference in words."""

    where: str
    text: str


def difference(a: Any, b: Any) -> str | None:
    """How two leaves differ, None if they are equal: all bits of tensors. NaN equals NaN."""
    kinds = [f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
             for value in (a, b)]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and kinds[0] == kinds[1]:
        x, y = a.reshape(-1), b.reshape(-1)
        raw = [flat.view(torch.uint8).reshape(-1, a.element_size()) for flat in (x, y)]
        differ = (raw[0] != raw[1]).any(dim=1).nonzero().flatten()
        if not len(differ):
            return None
        apart = (x[differ].double() - y[differ].double()).abs().max().item()
        largest = max(flat.double().abs().max().item() for flat in (x, y))
        first = [int(i) for i in np.unravel_index(int(differ[0]), a.shape)]
        return (f"{len(differ):,} of {a.numel():,} elements differ, the first at {first}, by at most {apart:.3g}; the "
                f"largest element is {largest:.3g}")
    a, b = kinds
    if type(a) is type(b) and (a == b or (a != a and b != b)):
        return None
    if type(a) is float and type(b) is float and math.isfinite(a - b):
        return f"{a} and {b}, {abs(a - b) / max(abs(a), abs(b)):.2g} relative"
    return f"{a} and {b}"


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of a plain state, in its order."""
    items = dict(enumerate(state)) if isinstance(state, (list, tuple)) else state
    if not (isinstance(items, dict) and items):
        yield name, state
        return
    for key, item in items.items():
        yield from leaves(item, f"{name}.{key}" if name else str(key))


def compare_states(a: Any, b: Any) -> Iterator[Gap]:
    """The differences of two plain states, including leaves that only one of them has."""
    x, y = dict(leaves(a)), dict(leaves(b))
    for name in x | y:
        if name in x and name in y:
            text = difference(x[name], y[name])
        else:
            text = f"only {'a' if name in x else 'b'} has it"
        if text is not None:
            yield Gap(name, text)


def of_files(gap: Gap) -> bool:
    """Whether the gap is only in the identity of the data files, which cursors contain."""
    return ".stream.data " in gap.where


# ---- the contents of a run ----------------------------------------------------------------------

Series = dict[str, dict[int, Any]]  # {name: {step: value}}


def read_series(run: RunReader, notes: list[str]) -> Series:
    """Everything that a run recorded about its steps: digests, tokens, losses, ..., and the cursors of every save."""
    series: Series = {}
    for step, path in run.cursor_files.items():
        try:
            lanes = {f"lane {i}": cursor for i, cursor in enumerate(read_cursors(path)[1])}
            series.setdefault("cursors", {})[step] = lanes
        except (OSError, ValueError) as e:
            notes.append(f"skipped: {e}")
    for record in (*run.steps, *run.named("val")):
        values = record if is_step(record) else dict(flat_numbers(record))
        for name, value in values.items():
            if name.partition("/")[0] in SERIES or name == SMOOTH:
                series.setdefault(name, {})[record["step"]] = value
    return series


def contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as one plain state, without clocks, random states and wandb's id. Tensors are memory-mapped, not
    read. "optimizer" and "schedule" are optional."""
    more = {"optimizer": OPTIMIZER_NAME, "schedule": SCHEDULER_NAME}
    return {"architecture": checkpoint.model_config,
            "tokenizer": checkpoint.trainer_state.get("tokenizer_fingerprint"),
            "cursors": checkpoint.cursors,
            "model": checkpoint.model_state(),
            **{name: checkpoint.load(file) for name, file in more.items()
               if file in checkpoint.trainer_state["files"]}}


@dataclass(frozen=True)
class Side:
    """One side of the comparison: a run, or a single checkpoint, whose run may be gone."""

    name: str
    run: RunReader | None  # None for a single checkpoint
    saved: dict[int, Path]  # the checkpoints by step
    log: Series
    about: str  # one line to print: which steps and checkpoints exist, and how the run ended


def open_side(name: str, notes: list[str]) -> Side:
    """The run or checkpoint with this name. FileNotFoundError and ValueError from `find_run`, `RunReader` and
    `find_checkpoint`."""
    try:
        run_dir = find_run(name)
    except FileNotFoundError:
        checkpoint = find_checkpoint(name)
        path = checkpoint.path.absolute()
        return Side(name, None, {checkpoint.step: path}, {}, f"{name}: {path}")
    run = RunReader(run_dir)
    saved: dict[int, Path] = {}
    for path in list_checkpoints(run_dir):
        try:
            saved.setdefault(read_seal(path)["step"], path)
        except (OSError, ValueError) as e:
            notes.append(f"skipped: {e}")
    saved = dict(sorted(saved.items()))
    steps = f"steps {run.steps[0]['step']} to {run.steps[-1]['step']}" if run.steps else "no steps"
    end = (run.launches[-1].end if run.launches else "") or "unfinished"
    about = f"{steps} in the log; checkpoints: {', '.join(map(str, saved)) or 'none'}; {end}"
    return Side(name, run, saved, read_series(run, notes), f"{name}: {about}")


# ---- two runs -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Part:
    """A series or checkpoint that both sides have: how many values were compared, and which differ."""

    kind: str  # data, steps or checkpoint
    name: str
    compared: int
    gaps: list[Gap]

    def describe(self) -> str:
        """One line to print."""
        if not self.gaps:
            return f"{self.name}: {self.compared:,} equal"
        first, verb = self.gaps[0], "differs in" if self.kind == "checkpoint" else "differ first at"
        return f"{self.name} {verb} {first.where}: {first.text}; {len(self.gaps):,} of {self.compared:,} differ"


def compare(a: Side, b: Side, notes: list[str]) -> list[Part]:
    """Everything that both sides have, the data first. A step of a series counts once, with its first difference. Two
    single checkpoints are compared even if their steps differ. ValueError if the sides have nothing in common."""
    parts: list[Part] = []
    for name in SERIES | a.log:
        common = sorted(a.log.get(name, {}).keys() & b.log.get(name, {}).keys())
        if common and name != SMOOTH:
            x, y = ([{f"step {step}": side.log[name][step]} for step in common] for side in (a, b))
            gaps = [gap for pair in zip(x, y) for gap in sorted(compare_states(*pair), key=of_files)[:1]]
            series, _, bucket = name.partition("/")
            words = SERIES[series] + (f" of {bucket}" if bucket else "")
            parts.append(Part("data" if name in DATA else "steps", words, len(common), gaps))
    pairs = [(step, step) for step in a.saved if step in b.saved]
    if a.run is None and b.run is None:
        pairs = list(zip(a.saved, b.saved))
    for first, second in pairs:
        try:
            one = contents(load_checkpoint(a.saved[first]))
            other = contents(load_checkpoint(b.saved[second]))
        except (OSError, ValueError) as e:  # corrupt, or just deleted by an active run
            notes.append(f"skipped: {e}")
            continue
        name = f"checkpoint {first}" + (f" (against {second})" if second != first else "")
        shared = one.keys() & other.keys()
        if "optimizer" not in shared:
            notes.append(f"{name}: one side has no optimizer state; only weights and data are compared")
        one, other = ({k: v for k, v in state.items() if k in shared} for state in (one, other))
        gaps = list(compare_states(one, other))
        parts.append(Part("checkpoint", name, max(len(list(leaves(one))), len(gaps)), gaps))
    if not parts:
        nothing = "nothing to compare: the two have no logged step and no checkpoint in common"
        raise ValueError("; ".join([nothing, a.about, b.about, *notes]))
    return parts


def summarize(parts: list[Part], notes: list[str]) -> tuple[bool, str]:
    """(whether all is equal, a sentence: how much is equal, or which difference comes first)."""
    corrupt = sum(note.startswith("skipped") for note in notes)
    end = f"; {counted(corrupt, 'corrupt file')} skipped" if corrupt else ""
    if parts[0].name == "digests" and {of_files(gap) for part in parts for gap in part.gaps} == {True}:
        return False, "the same rows from different files: all is equal except the files that cursors name" + end
    for part in parts:
        if part.gaps:  # all parts before this one are equal
            same = "same data; " * (parts[0].kind == "data" and part.kind != "data")
            return False, same + part.describe() + end
    equal = [f"{p.compared:,} {p.name}" for p in parts if p.name in ("digests", "losses")]
    equal += [f"{p.name} ({p.compared:,} values)" for p in parts if p.kind == "checkpoint"]
    return True, f"equal bit for bit: {', '.join(equal)}{end}"


def explain_left_out(a: Side, b: Side) -> str:
    """A sentence for two runs with different lists of --without-documents: whether the first step whose digests differ
    has a document that only one of them leaves out. "" for other runs, and if no digests differ."""
    digests = [side.log.get("digest", {}) for side in (a, b)]
    step = next((step for step in sorted(digests[0].keys() & digests[1].keys())
                 if digests[0][step] != digests[1][step]), None)
    if a.run is None or b.run is None or step is None or a.run.listed() == b.run.listed():
        return ""
    from scripts.inspect_data import describe, open_stream_of

    lists = [a.run.listed(), b.run.listed()]
    opened = open_stream_of(a.run.run_dir)
    with opened.stream_at(step) as stream:
        for row in stream.next_rows(opened.rows_per_lane):
            for place in describe(opened, stream, row):
                sides = [listed.get(place["file"], []) for listed in lists]
                left_out = [rows is None or place["document"] in rows for rows in sides]
                if left_out[0] != left_out[1]:
                    return (f"as expected: step {step} is the first with a document that "
                            f"{a.name if left_out[0] else b.name} leaves out ({place['file']}:{place['document']})")
    return (f"unexpected: the runs first differ at step {step}, but no row of it has a document that only one of them "
            f"leaves out, so something else differs")


def versions_of(run: RunReader) -> dict[str, str]:
    """{name: value} of the versions that a run's launches logged; several values, in order, if launches differ."""
    values: dict[str, dict[str, None]] = {}
    for launch in run.launches:
        for name in ("code", *VERSIONS):
            if name in launch.started:  # older logs lack some
                values.setdefault(name, {})[show(launch.started[name])] = None
    return {name: ", then ".join(distinct) for name, distinct in values.items()}


def differing_versions(a: RunReader, b: RunReader) -> list[tuple[str, str, str]]:
    """(name, value of a, value of b) of the versions that both runs logged and that differ."""
    ours, theirs = versions_of(a), versions_of(b)
    return [(name, ours[name], theirs[name]) for name in ours if theirs.get(name, ours[name]) != ours[name]]


# ---- the command --------------------------------------------------------------------------------

def curve(log: Series, name: str) -> dict[int, float]:
    """{tokens trained on: value} of the smoothed loss ("loss") or of validation results ("bpb")."""
    values = log.get(name, {})
    if name == "loss":  # the loss of step s is known after s + 1 steps
        values = {step + 1: value for step, value in log.get(SMOOTH, values).items()}
    tokens = {0: 0} | {step + 1: count for step, count in log.get("tokens", {}).items()}
    return {tokens[step]: value for step, value in sorted(values.items())
            if step in tokens and value is not None}


def same_tokens(a: Series, b: Series) -> list[list[Any]]:
    """Rows (tokens, loss of a and b, bits per byte of a and b) at numbers of tokens that both have reached: those at
    which either was evaluated, and the last one. Values between two measurements are interpolated."""
    curves = [curve(log, name) for name in ("loss", "bpb") for log in (a, b)]
    if not (curves[0] and curves[1]):
        return []
    end = min(max(curves[0]), max(curves[1]))
    marks = sorted({mark for mark in curves[2] | curves[3] if mark < end} | {end})
    marks = marks[::-1][::-(-len(marks) // TABLE_ROWS)][::-1]
    values = [[float(np.interp(mark, [*points], [*points.values()]))
               if points and min(points) <= mark <= max(points) else None for mark in marks]
              for points in curves]
    return [list(row) for row in zip(marks, *values)]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print. Exit code 1 if something differs. ValueError and FileNotFoundError for bad input."""
    parser = Parser(description=__doc__)
    parser.add_argument("a", metavar="A", help="a run's name or folder, or a checkpoint: NAME@STEP or its path")
    parser.add_argument("b", metavar="B", help="the run or checkpoint to compare A with")
    parser.add_argument("--tensors", action="store_true", help="list everything that differs in checkpoints")
    args = parser.parse_args(argv)
    setup_logging()
    notes: list[str] = []
    a, b = open_side(args.a, notes), open_side(args.b, notes)
    parts = compare(a, b, notes)
    equal, summary = summarize(parts, notes)
    about = [f"a = {a.about}", f"b = {b.about}", *(f"note: {note}" for note in notes)]
    print(summary, "", *about, sep="\n")
    if a.run and b.run and (differ := differing_settings([a.run.config, b.run.config])):
        rows = [[show(value)[:WIDEST] for value in row] for row in differ]
        print("", *table(("settings that differ", "a", "b"), rows), sep="\n")
        if sentence := explain_left_out(a, b):
            print("", sentence, sep="\n")
    if not equal and a.run and b.run and (versions := differing_versions(a.run, b.run)):
        print("", *table(("versions that differ", "a", "b"), versions), sep="\n")
        same_data = not any(part.gaps for part in parts if part.kind == "data")
        if same_data and any(name.startswith("cpu") for name, _, _ in versions):
            print("", CPU_CAUSE, sep="\n")
    if not equal and (rows := same_tokens(a.log, b.log)):
        header = ("tokens", "loss a", "loss b", "bits per byte a", "bits per byte b")
        print("", *table(header, rows), sep="\n")
    print()
    for part in parts:
        print(part.describe())
        if args.tensors and part.kind == "checkpoint":
            print(*(f"  {gap.where}: {gap.text}\n" for gap in part.gaps), sep="", end="")
    return 0 if equal else EXIT_FAILED


if __name__ == "__main__":
    run_main(main)
