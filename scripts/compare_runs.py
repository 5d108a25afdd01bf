"""
Compare two runs, and say whether they are equal to the bit or where they part:

    python -m scripts.compare_runs d12 d12-again               # tags or run directories
    python -m scripts.compare_runs d12@1000 d12-again@1000     # one checkpoint each, or paths of checkpoints
    python -m scripts.compare_runs d12 d24 --tensors           # and every tensor that differs

What both runs have is compared; what only one of them has is mentioned. Things part in this order:

    data           digests, counts of tokens, kept cursors         other data, seed or code of the stream
    steps          losses, learning rates, gradients, validation   other settings or another order of addition
    checkpoints    architecture, cursors, weights, optimizer       follows from the steps

    step         0    1    2    3         digests      = = = =     same data
    losses a   5.1  4.9  4.7  4.6         losses       = = # #     part at step 2
    losses b   5.1  4.9  4.8  4.5         checkpoints      = #     equal after 2 steps, another weight after 4

Each of these is a plain state, a nest of dicts and lists, and one function compares them all leaf by leaf. Step k of a
log makes k steps k + 1; checkpoint k is taken after k steps. Of two different experiments a table shows loss and bits
per byte at the same numbers of tokens.

**Equal** means equal bits. With --tolerance REL two floats also count as equal where they differ by at most REL of the
larger one or, in a tensor, of the largest element of both: an element near zero may differ from itself by any factor.
Digests, counts and cursors must be equal in any case. The exit code is 0 if all that both have is equal, else 1.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanochat.checkpoint import Checkpoint, find_checkpoint, list_checkpoints, load_checkpoint
from nanochat.checkpoint import read_state as read_trainer_state
from nanochat.common import EXIT_FAILED, Parser, run_main, setup_logging, table
from nanochat.lifecycle import liveness, read_state
from nanochat.run_dir import CONFIG_NAME, cursor_files, find_run, is_run_dir, iter_log, read_config, read_cursors

DATA = {"digest": "digests", "tokens": "counts of tokens"}
STEPS = {"loss": "losses", "lr": "learning rates", "grad_norm": "gradient norms", "val": "validation results"}
SMOOTH = "smooth_loss"
BLOCK_ELEMENTS = 1 << 20
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDEST = 50  # characters of a setting that are shown
TABLE_ROWS = 8  # of the table of two experiments, about


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("a", help="tag or run directory; with @STEP, or as a checkpoint's path: that checkpoint alone")
    parser.add_argument("b", help="the same")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="REL",
                        help="floats that differ by at most this, relatively, count as equal (default: none)")
    parser.add_argument("--tensors", action="store_true", help="list every difference of the checkpoints")
    return parser.parse_args(argv)


# ---- two values -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Gap:
    """A leaf that differs: where it is, how far the two are apart, and the same in words.

    `relative` is held against the tolerance. It is infinite where no tolerance helps, and 0 for 0 and -0.
    """
    where: str
    relative: float
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def compare_values(where: str, a: Any, b: Any) -> Gap | None:
    """The difference of two leaves, None where they are equal. A NaN equals itself."""
    both_tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if both_tensors and a.dtype == b.dtype and a.shape == b.shape:
        return compare_tensors(where, a, b)
    a, b = (f"{str(v.dtype).removeprefix('torch.')} {tuple(v.shape)}" if isinstance(v, torch.Tensor) else v
            for v in (a, b))
    if type(a) is type(b) and (a == b or (a != a and b != b)):
        return None
    relative = math.inf
    if type(a) is float and type(b) is float and math.isfinite(a) and math.isfinite(b):
        relative = abs(a - b) / max(abs(a), abs(b))
    return Gap(where, relative, f"{a} and {b}" + (f", {relative:.2g} relative" if math.isfinite(relative) else ""))


def compare_tensors(where: str, a: torch.Tensor, b: torch.Tensor) -> Gap | None:
    """The difference of two tensors of one type and shape on the CPU, None where all bits are equal."""
    flat = a.reshape(-1), b.reshape(-1)
    bits = [t.view(BITS[t.element_size()]) for t in flat]
    if torch.equal(*bits):
        return None
    count, first, apart, largest = 0, -1, 0.0, 0.0
    for at in range(0, a.numel(), BLOCK_ELEMENTS):
        block = slice(at, at + BLOCK_ELEMENTS)
        differ = (bits[0][block] != bits[1][block]).nonzero().flatten()
        x, y = (t[block].double() for t in flat)
        largest = max(largest, x.abs().max().item(), y.abs().max().item())
        if len(differ):
            first = at + int(differ[0]) if first < 0 else first
            count += len(differ)
            difference = (x - y)[differ].abs().max().item()
            apart = difference if math.isnan(difference) else max(apart, difference)
    index = [int(i) for i in np.unravel_index(first, a.shape)]
    relative = apart / largest if largest and math.isfinite(apart) else apart
    if not (a.is_floating_point() and math.isfinite(relative)):
        relative = math.inf
    text = (f"{count:,} of {a.numel():,} elements, the first at {index}; at most {apart:.3g} apart, {relative:.3g} of "
            f"the largest element")
    return Gap(where, relative, text)


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of a plain state, in its order."""
    items: list[tuple[Any, Any]] = []
    if isinstance(state, dict):
        items = list(state.items())
    elif isinstance(state, (list, tuple)):
        items = list(enumerate(state))
    if not items:
        yield name, state
    for key, item in items:
        yield from leaves(item, f"{name}.{key}" if name else str(key))


def compare_states(a: Any, b: Any) -> Iterator[Gap]:
    """The differences of two plain states; a leaf that only one of them has is one."""
    x, y = dict(leaves(a)), dict(leaves(b))
    for name in dict.fromkeys([*x, *y]):
        if name in x and name in y:
            gap = compare_values(name, x[name], y[name])
        else:
            gap = Gap(name, math.inf, f"only {'a' if name in x else 'b'} has it")
        if gap is not None:
            yield gap


# ---- what a run holds -----------------------------------------------------------------------------------------------

Series = dict[str, dict[int, Any]]  # {name: {step: value}}


def read_series(run_dir: Path) -> Series:
    """The series of a run's log, from the last line of each step: digests, tokens, losses, validation results, ..."""
    found: Series = {}
    for record in iter_log(run_dir / "logs" / "train.jsonl"):
        step, event = record.get("step"), record.get("event")
        values: dict[str, Any] = {}
        if event == "val":
            values = {"val": record.get("bpb")}
            values |= {f"val/{bucket}": bpb for bucket, bpb in (record.get("buckets") or {}).items()}
        elif event is None:
            wanted = (*DATA, *STEPS, SMOOTH)
            values = {k: v for k, v in record.items() if k in wanted or k.startswith("loss/")}
        if type(step) is int:
            for name, value in values.items():
                found.setdefault(name, {})[step] = value
    return found


def contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """All that a checkpoint holds but clocks, random numbers and wandb, as one plain state. Tensors are mapped into
    memory, not read."""
    return {"architecture": checkpoint.model_config,
            "tokenizer": checkpoint.trainer_state.get("tokenizer_fingerprint"),
            "cursors": checkpoint.cursors,
            "model": checkpoint.model_state(mapped=True),
            "optimizer": checkpoint.optimizer_state(mapped=True),
            "schedule": checkpoint.scheduler_state()}


@dataclass(frozen=True)
class Side:
    """What a name on the command line means: a run, or one checkpoint alone, whose run may be gone."""
    run_dir: Path | None
    saved: dict[int, Path]  # the checkpoints, by step
    log: Series
    alone: bool
    about: str  # one line for people: what is there, and whether the run is at work

    def settings(self) -> dict[str, Any] | None:
        """The settings that the run was started with, None where there is no config.json."""
        if self.run_dir is None or not (self.run_dir / CONFIG_NAME).is_file():
            return None
        return {name: value for name, value in read_config(self.run_dir).items() if name != "derived"}


def open_side(name: str, notes: list[str]) -> Side:
    """What a name means. FileNotFoundError and ValueError of `find_run` and `find_checkpoint`."""
    try:
        run_dir = find_run(name)
    except FileNotFoundError:
        path = find_checkpoint(name)
        owner = path.absolute().parent.parent
        saved = {read_trainer_state(path)["step"]: path}
        return Side(owner if is_run_dir(owner) else None, saved, {}, True, f"{name}: {path}")
    saved = {}
    for path in list_checkpoints(run_dir):
        try:
            saved.setdefault(read_trainer_state(path)["step"], path)
        except (OSError, ValueError) as e:
            notes.append(f"passed over: {e}")
    log, saved = read_series(run_dir), dict(sorted(saved.items()))
    steps = log.get("loss", {})
    logged = f"steps {min(steps)} to {max(steps)} in the log" if steps else "no step in the log"
    try:
        state = read_state(run_dir)
        status = f"; {state['status']} ({liveness(state)})" if state else ""
    except ValueError as e:
        status = f"; {e}"
    about = f"{name}: {logged}; checkpoints: {', '.join(map(str, saved)) or 'none'}{status}"
    return Side(run_dir, saved, log, False, about)


# ---- two runs -------------------------------------------------------------------------------------------------------

@dataclass
class Part:
    """One thing that both sides have: in how many places it was compared, and where it differs."""
    name: str
    compared: int
    gaps: list[Gap] = field(default_factory=list)
    kind: str = "steps"  # data, steps or checkpoint

    def parted(self, tolerance: float) -> list[Gap]:
        """The differences that are more than noise."""
        return [gap for gap in self.gaps if self.kind == "data" or tolerance == 0 or gap.relative > tolerance]

    def describe(self, tolerance: float) -> str:
        """One line for people."""
        parted = self.parted(tolerance)
        if not parted:
            return f"{self.name}: {self.compared:,} equal" + (" within the tolerance" if self.gaps else "")
        verb = "parts in" if self.kind == "checkpoint" else "part at"
        return f"{self.name} {verb} {parted[0]}; {len(parted):,} of {self.compared:,} differ"


def compare_logs(a: Series, b: Series) -> Iterator[Part]:
    """The series that both logs have at common steps, those of the data first."""
    for name in (n for n in dict.fromkeys([*DATA, *STEPS, *a]) if n in a and n in b and n != SMOOTH):
        common = [step for step in sorted(a[name]) if step in b[name]]
        gaps = [compare_values(f"step {step}", a[name][step], b[name][step]) for step in common]
        kind, _, bucket = name.partition("/")
        words = {**DATA, **STEPS}[kind] + (f" of {bucket}" if bucket else "")
        if common:
            yield Part(words, len(common), [g for g in gaps if g is not None], "data" if name in DATA else "steps")


def compare_cursors(a: Path, b: Path, notes: list[str]) -> Iterator[Part]:
    """The cursors that two runs keep of every save: of each save the first place where they differ."""
    files, part = (cursor_files(a), cursor_files(b)), Part("cursors", 0, kind="data")
    for step in sorted(files[0].keys() & files[1].keys()):
        try:
            gap = next(compare_states(*(read_cursors(f[step])[1] for f in files)), None)
        except (OSError, ValueError) as e:
            notes.append(f"passed over: {e}")
            continue
        part.compared += 1
        part.gaps += [Gap(f"step {step}", math.inf, f"lane {gap}")] if gap is not None else []
    if part.compared:
        yield part


def compare_checkpoints(a: Side, b: Side, notes: list[str]) -> Iterator[Part]:
    """All that checkpoints of the same step hold. Where one side is a checkpoint alone, the other side's of that step;
    where both are, these two."""
    steps = [(step, step) for step in a.saved if step in b.saved]
    if a.alone and b.alone:
        steps = [(next(iter(a.saved)), next(iter(b.saved)))]
    for pair in steps:
        try:
            states = [contents(load_checkpoint(side.saved[step])) for side, step in zip((a, b), pair)]
            gaps, size = list(compare_states(*states)), sum(1 for _ in leaves(states[0]))
        except (OSError, ValueError) as e:  # damaged, or deleted meanwhile by a run at work
            notes.append(f"passed over: {e}")
        else:
            yield Part("checkpoint " + " and ".join(map(str, dict.fromkeys(pair))), size, gaps, "checkpoint")


def compare(a: Side, b: Side, notes: list[str]) -> list[Part]:
    """Everything that both sides have. ValueError where that is nothing."""
    parts = list(compare_logs(a.log, b.log))
    if a.run_dir and b.run_dir and not (a.alone or b.alone):
        parts += compare_cursors(a.run_dir, b.run_dir, notes)
    parts += compare_checkpoints(a, b, notes)
    if not parts:
        raise ValueError("; ".join(["nothing to compare: no step of the logs and no checkpoint is common", a.about,
                                    b.about, *notes]))
    return parts


def summarize(parts: list[Part], tolerance: float, notes: list[str]) -> tuple[bool, str]:
    """(whether all is equal but for noise, a sentence: equal in how much, or what parts and where)."""
    damaged = sum(note.startswith("passed over") for note in notes)
    end = f"; {damaged} damaged file(s) passed over" if damaged else ""
    differ = [part for part in parts if part.parted(tolerance)]
    saved = [part for part in differ if part.kind == "checkpoint"]
    parted = [part.describe(tolerance) for part in differ if part not in saved[1:]]  # later ones follow from the first
    if parted:
        same_data = not any(part.gaps for part in parts if part.kind == "data")
        return False, "same data; " * same_data + "; ".join(parted) + end
    noise = [gap.relative for part in parts for gap in part.gaps]
    how = f"equal within {tolerance:g}, at most {max(noise):.2g} apart" if noise else "equal bit for bit"
    logs = [f"{part.compared:,} {part.name}" for part in parts if part.name in ("digests", "losses")]
    values = [f"{part.name} ({part.compared:,} values)" for part in parts if part.kind == "checkpoint"]
    if len(values) > 3:
        values[1:-1] = [f"{len(values) - 2} between"]
    return True, f"{how}: {', '.join(logs + values)}{end}"


# ---- the command ----------------------------------------------------------------------------------------------------

def curves(a: Series, b: Series) -> list[list[Any]]:
    """Rows (tokens, loss of a and b, bits per byte of a and b) at numbers of tokens that both have reached: those at
    which either was evaluated, and the last. Between two measurements the line that joins them is read."""
    points: list[dict[int, float]] = []
    for name in ("loss", "val"):
        for log in (a, b):
            tokens, values = log.get("tokens", {}), log.get(name, {})
            if name == "loss":
                values = {step + 1: value for step, value in log.get(SMOOTH, values).items()}
            at = {0: 0} | {step + 1: count for step, count in tokens.items()}
            points.append({at[s]: v for s, v in sorted(values.items()) if s in at and v is not None})
    if not (points[0] and points[1]):
        return []
    end = min(max(points[0]), max(points[1]))
    marks = sorted({mark for found in points[2:] for mark in found if mark <= end} | {end}, reverse=True)
    rows = []
    for mark in reversed(marks[::-(-len(marks) // TABLE_ROWS)]):
        read = [float(np.interp(mark, list(found), list(found.values()), math.nan, math.nan)) if found else math.nan
                for found in points]
        rows.append([mark, *(None if math.isnan(value) else value for value in read)])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and tell; 1 where something differs. ValueError and FileNotFoundError for bad input."""
    args = parse_args(argv)
    setup_logging()
    if not 0 <= args.tolerance < 1:
        raise ValueError(f"--tolerance: got {args.tolerance}, expected a share such as 1e-5, at least 0 and below 1")
    notes: list[str] = []
    a, b = open_side(args.a, notes), open_side(args.b, notes)
    parts = compare(a, b, notes)
    settings = a.settings(), b.settings()
    if None in settings:
        notes.append(f"a run without {CONFIG_NAME}, so settings are not compared")
    equal, summary = summarize(parts, args.tolerance, notes)
    print(summary, "", f"a = {a.about}", f"b = {b.about}", *(f"note: {note}" for note in notes), sep="\n")
    x, y = (found or {} for found in settings)
    differ = [(name, repr(x.get(name))[:WIDEST], repr(y.get(name))[:WIDEST]) for name in dict.fromkeys([*x, *y])
              if x.get(name) != y.get(name)]
    if differ and None not in settings:
        print("", *table(("settings that differ", "a", "b"), differ), sep="\n")
    if not equal and (rows := curves(a.log, b.log)):
        print("", *table(("tokens", "loss a", "loss b", "bits per byte a", "bits per byte b"), rows), sep="\n")
    print()
    for part in parts:
        print(part.describe(args.tolerance))
        if args.tensors and part.kind == "checkpoint":
            print(*(f"  {gap}\n" for gap in part.parted(args.tolerance)), sep="", end="")
    return 0 if equal else EXIT_FAILED


if __name__ == "__main__":
    run_main(main)
