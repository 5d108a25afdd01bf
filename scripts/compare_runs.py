"""
Compare two runs step by step, and say where they part:

    python -m scripts.compare_runs d12 d12-again               # tags or run directories
    python -m scripts.compare_runs d12@1000 d12-again@1000     # one checkpoint each, or paths of checkpoints
    python -m scripts.compare_runs d12 d12-again --tolerance 1e-5 --json

What both have is compared, what only one has is told. Three things part in this order, for three different reasons:

    data      digests, counts of tokens, cursors of the lanes      other data, seed or code of the stream
    steps     losses, learning rates, gradient norms, validation   other settings or another order of addition
    weights   tensors at common checkpoints                        follows from the steps

    step         0    1    2    3         digests      = = = =     same data
    losses a   5.1  4.9  4.7  4.6         losses       = = # #     part at step 2
    losses b   5.1  4.9  4.8  4.5         checkpoints      = #     equal after 2 steps, another weight after 4

Step k of a log is the one that makes k steps k + 1; checkpoint k is taken after k steps, whatever its name is (`final`,
`checkpoint-k`, `checkpoint-k-shutdown`). Of a log the last line of each step counts, as for every reader.

**Equal** means equal bits. With --tolerance REL a difference of floats is noise, and counts as equal, where it is at
most REL of the larger of the two numbers, or, in a tensor, of the largest element of the two tensors: an element near
zero may differ from itself by any factor. Digests, counts and cursors must be equal in any case. Comparing sums of
tensors would need no second file, and could tell neither how far nor where two tensors differ.

Checkpoints are verified, then mapped into memory and compared by blocks, so two large ones need little memory; loading
executes nothing. The exit code is 0 if all that both have is equal, 1 if not, and 1 with a sentence for bad input.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanochat.checkpoint import Checkpoint, find_checkpoint, list_checkpoints, load_checkpoint, open_checkpoint
from nanochat.checkpoint import read_state as read_trainer_state
from nanochat.common import EXIT_FAILED, run_main, setup_logging
from nanochat.gaps import Gap, compare_values, relative
from nanochat.lifecycle import liveness, read_state
from nanochat.run_dir import CONFIG_NAME, cursor_files, find_run, is_run_dir, iter_log, read_config, read_cursors
from nanochat.settings import SETTINGS

LISTED = 20  # differences of a checkpoint that are told one by one; the others are counted
DATA = ("digest", "tokens")
WORDS = {"digest": "digests", "tokens": "counts of tokens", "loss": "losses", "lr": "learning rates",
         "grad_norm": "gradient norms", "val": "validation results"}
UNRULED = "not in the table of settings"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare two runs step by step, and say where they part.",
                                     epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", help="tag or run directory; with @STEP, or as a checkpoint's path: that checkpoint alone")
    parser.add_argument("b", help="the same")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="REL",
                        help="floats that differ by at most this, relatively, count as equal (default: none)")
    parser.add_argument("--json", action="store_true", help="one JSON object with every difference")
    return parser.parse_args(argv)


# ---- logs -----------------------------------------------------------------------------------------------------------

@dataclass
class Track:
    """One series of values of both logs. Points are {"step", "a", "b", "relative"}."""
    name: str
    common: int = 0  # steps at which both logs have it
    differ: int = 0
    first: dict[str, Any] | None = None  # that differs by more than is tolerated
    largest: dict[str, Any] | None = None  # difference, tolerated or not

    def add(self, step: int, a: Any, b: Any, tolerance: float) -> None:
        """Compare one step."""
        self.common += 1
        apart = relative(a, b)
        if apart == 0:
            return
        point = {"step": step, "a": a, "b": b, "relative": apart}
        self.differ += 1
        if self.first is None and (self.name in DATA or apart > tolerance):
            self.first = point
        if self.largest is None or apart > self.largest["relative"]:
            self.largest = point

    @property
    def word(self) -> str:
        """What this series is, for people, in the plural."""
        kind, _, bucket = self.name.partition("/")
        return WORDS[kind] + (f" of {bucket}" if bucket else "")

    def __str__(self) -> str:
        if self.differ == 0 or self.largest is None:
            return f"{self.word}: {self.common:,} equal"
        if self.first is None:
            return f"{self.word}: {self.common:,} equal within the tolerance, {size(self.largest)} at most"
        farther = self.largest["relative"] > self.first["relative"]
        return (f"{self.word} part at step {self.first['step']} {size(self.first)}"
                + (f", {size(self.largest)} at most (step {self.largest['step']})" if farther else "")
                + f"; {self.differ:,} of {self.common:,} differ")


def size(point: dict[str, Any]) -> str:
    """How far two values of a log are apart, for people."""
    if math.isfinite(point["relative"]):
        return f"by {point['relative']:.2g} relative"
    return f"({show(point['a'])} and {show(point['b'])})"


def show(value: Any) -> str:
    return "not a number" if value is None else str(value)


def read_tracks(run_dir: Path) -> dict[int, dict[str, Any]]:
    """{step: {name of a track: value}} of a run's log, from the last line of each step."""
    steps: dict[int, dict[str, Any]] = {}
    looks: dict[int, dict[str, Any]] = {}
    for record in iter_log(run_dir / "logs" / "train.jsonl"):
        step, event = record.get("step"), record.get("event")
        if type(step) is not int:
            continue
        if event == "val":
            buckets = record.get("buckets") or {}
            looks[step] = {"val": record.get("bpb"), **{f"val/{k}": v for k, v in buckets.items()}}
        elif event is None:
            steps[step] = {k: v for k, v in record.items() if k in WORDS or k.startswith("loss/")}
    return {step: {**steps.get(step, {}), **looks.get(step, {})} for step in sorted(steps.keys() | looks.keys())}


def compare_logs(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]], tolerance: float) -> list[Track]:
    """The tracks that both logs have, in the order of the table of words."""
    tracks = {name: Track(name) for name in WORDS}
    for step in (s for s in a if s in b):
        for name in (n for n in a[step] if n in b[step]):
            tracks.setdefault(name, Track(name)).add(step, a[step][name], b[step][name], tolerance)
    return [track for track in tracks.values() if track.common]


# ---- checkpoints ----------------------------------------------------------------------------------------------------

@dataclass
class Pair:
    """Two checkpoints. `identity`: differences of architecture and tokenizer; `lanes`: of the cursors; `gaps`: of
    weights, optimizer and schedule, in the order of the state."""
    step_a: int
    step_b: int
    names: tuple[str, str]
    tensors: int = 0  # that both have
    identity: list[Gap] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)

    @property
    def at(self) -> str:
        """The step, or both where they differ."""
        return str(self.step_a) if self.step_a == self.step_b else f"{self.step_a} and {self.step_b}"


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of a plain state, in its order."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple))
                 else ())
    if not items:
        yield name, value
    for key, item in items:
        yield from leaves(item, f"{name}.{key}" if name else str(key))


def contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """{name: leaf} of model, optimizer and schedule; tensors are mapped into memory, not read."""
    return {**dict(leaves(checkpoint.model_state(mapped=True))),
            **dict(leaves(checkpoint.optimizer_state(mapped=True), "optimizer")),
            **dict(leaves(checkpoint.scheduler_state(), "schedule"))}


def compare_leaves(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Gap]:
    """The differences of two {name: leaf}; a name that one side lacks is one."""
    for name in [*a, *(n for n in b if n not in a)]:
        if name in a and name in b:
            gap = compare_values(name, a[name], b[name])
        else:
            facts = {"only": "a" if name in a else "b"}
            gap = Gap(name, math.inf, f"only {facts['only']} has it", facts)
        if gap is not None:
            yield gap


def compare_lanes(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[str]:
    """What differs in the cursors of all lanes: a line for each lane that does."""
    if len(a) != len(b):
        return [f"{len(a)} lanes and {len(b)} lanes"]
    pairs = ((dict(leaves(x)), dict(leaves(y))) for x, y in zip(a, b, strict=True) if x != y)
    return [f"lane {x['lane']}: {next(compare_leaves(x, y), 'another form')}" for x, y in pairs]


def compare_checkpoints(a: Checkpoint, b: Checkpoint) -> Pair:
    """All that two checkpoints hold, except what is noted of clocks, random numbers and wandb."""
    x, y = contents(a), contents(b)
    tensors = sum(isinstance(x[n], torch.Tensor) and isinstance(y[n], torch.Tensor) for n in x if n in y)
    identity = [{**dict(leaves(c.model_config, "architecture")),
                 "tokenizer": c.trainer_state.get("tokenizer_fingerprint")} for c in (a, b)]
    return Pair(a.step, b.step, (a.path.name, b.path.name), tensors, list(compare_leaves(*identity)),
                compare_lanes(a.cursors, b.cursors), list(compare_leaves(x, y)))


def by_step(run_dir: Path, notes: list[str]) -> dict[int, list[Path]]:
    """{step: its checkpoints}, ascending; those whose seal is not whole are noted."""
    found: dict[int, list[Path]] = {}
    for path in list_checkpoints(run_dir):
        try:
            found.setdefault(read_trainer_state(path)["step"], []).append(path)
        except (OSError, ValueError) as e:
            notes.append(f"passed over: {e}")
    return dict(sorted(found.items()))


def first_good(paths: list[Path], notes: list[str]) -> Checkpoint | None:
    """The first that verifies; the others before it are noted."""
    for path in paths:
        try:
            return load_checkpoint(path)
        except (OSError, ValueError) as e:  # damaged, or deleted meanwhile by a run at work
            notes.append(f"passed over: {e}")
    return None


def compare_common(a: dict[int, list[Path]], b: dict[int, list[Path]], notes: list[str]) -> list[Pair]:
    """A pair for each step of which both runs have a good checkpoint."""
    pairs = []
    for step in tqdm([s for s in a if s in b], desc="checkpoints", disable=None, leave=False):
        x, y = first_good(a[step], notes), first_good(b[step], notes)
        try:
            if x is not None and y is not None:
                pairs.append(compare_checkpoints(x, y))
        except (OSError, ValueError) as e:
            notes.append(f"passed over: {e}")
    return pairs


def compare_cursors(a: Path, b: Path, notes: list[str]) -> dict[int, list[str]]:
    """{step: what differs} of the cursors that two runs keep for ever, those of deleted checkpoints too."""
    files, found = (cursor_files(a), cursor_files(b)), {}
    for step in sorted(files[0].keys() & files[1].keys()):
        try:
            found[step] = compare_lanes(*(read_cursors(f[step])[1] for f in files))
        except (OSError, ValueError) as e:
            notes.append(f"passed over: {e}")
    return found


# ---- two runs -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Side:
    """What a name means: a run, or one checkpoint, whose run may be gone."""
    name: str
    run_dir: Path | None
    checkpoint: Checkpoint | None = None


def resolve(name: str) -> Side:
    """A run, or else a checkpoint. FileNotFoundError and ValueError of `find_run` and `open_checkpoint`."""
    try:
        return Side(name, find_run(name))
    except FileNotFoundError:
        checkpoint = open_checkpoint(name)
    run_dir = checkpoint.path.absolute().parent.parent
    return Side(name, run_dir if is_run_dir(run_dir) else None, checkpoint)


def resolve_both(a: str, b: str) -> tuple[Side, Side]:
    """Both of a kind: where one is a checkpoint and the other a run, the run's checkpoint of that step."""
    sides = [resolve(a), resolve(b)]
    given = [side.checkpoint for side in sides if side.checkpoint]
    if len(given) == 1:
        i = 0 if sides[0].checkpoint is None else 1
        path = find_checkpoint(f"{sides[i].run_dir}@{given[0].step}")
        sides[i] = Side(sides[i].name, sides[i].run_dir, load_checkpoint(path, verify=False))
    return sides[0], sides[1]


def compare_settings(a: Side, b: Side, notes: list[str]) -> list[dict[str, Any]]:
    """Each setting that differs in config.json: name, a, b, may_change, note."""
    sides = []
    for side in (a, b):
        if side.run_dir is None or not (side.run_dir / CONFIG_NAME).is_file():
            notes.append(f"{side.name}: without {CONFIG_NAME}, so settings are not compared")
            return []
        sides.append({k: v for k, v in read_config(side.run_dir).items() if k != "derived"})
    rules = [(n, SETTINGS.get(n)) for n in [*sides[0], *(n for n in sides[1] if n not in sides[0])]]
    return [{"name": n, "a": sides[0].get(n), "b": sides[1].get(n), "may_change": rule is not None and rule.may_change,
             "note": rule.note if rule else UNRULED} for n, rule in rules if sides[0].get(n) != sides[1].get(n)]


@dataclass
class Comparison:
    """Everything that was found; `about` says what each side is."""
    tolerance: float
    about: dict[str, str]
    settings: list[dict[str, Any]]
    tracks: list[Track] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    cursors: dict[int, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_steps: int = 0  # after the last step that both logs have

    def parted(self) -> list[tuple[Pair, Gap]]:
        """All differences of weights and the like that are more than noise."""
        return [(pair, gap) for pair in self.pairs for gap in pair.gaps if gap.beyond(self.tolerance)]

    def data_parts(self) -> str:
        """Where the data part, or nothing."""
        for track in self.tracks:
            if track.name in DATA and track.first:
                return f"data part at step {track.first['step']} ({track.word} {track.first['a']} and " \
                       f"{track.first['b']})"
        lanes = [(str(step), lines) for step, lines in self.cursors.items()] + [(p.at, p.lanes) for p in self.pairs]
        return next((f"positions in the data part at step {at} ({lines[0]})" for at, lines in lanes if lines), "")

    def identities(self) -> list[str]:
        """Another architecture, another tokenizer: said by the checkpoints or, where none is common, by settings."""
        for pair in self.pairs:
            if pair.identity:
                return [f"another {gap}" for gap in pair.identity]
        shape = SETTINGS["depth"].note
        return [] if self.pairs else [f"another {s['name']}: {s['a']!r} and {s['b']!r}" for s in self.settings
                                      if s["note"] == shape or s["name"] == "tokenizer_fingerprint"]

    @property
    def equal(self) -> bool:
        """Whether all that both have is equal, but for noise."""
        return not (self.data_parts() or self.parted() or any(pair.identity for pair in self.pairs)
                    or any(track.first for track in self.tracks))

    def noise(self) -> list[tuple[float, str]]:
        """(relative size, where) of what was tolerated."""
        gaps = [(gap.relative, f"{gap.name} at checkpoint {pair.at}") for pair in self.pairs for gap in pair.gaps]
        return gaps + [(t.largest["relative"], f"{t.word} at step {t.largest['step']}") for t in self.tracks
                       if t.largest]

    def counts(self) -> str:
        """What was compared."""
        numbers = {track.name: track.common for track in self.tracks}
        parts = [f"{numbers.get('digest', 0):,} digests, {numbers.get('loss', 0):,} losses"] if numbers else []
        tensors = sorted({pair.tensors for pair in self.pairs})
        parts.append(f"{plural(len(self.pairs), 'checkpoint')}"
                     + (f" of {' to '.join(f'{n:,}' for n in (tensors[0], tensors[-1])[:len(tensors)])} tensors"
                        if tensors else ""))
        return ", ".join(parts)

    def summary(self) -> str:
        """A sentence: equal, how far and in how much; or which of data, steps and weights part, and where."""
        if self.equal:
            noise = max(self.noise(), default=None)
            word = "equal bit for bit" if noise is None else f"equal within {self.tolerance:g}"
            most = "" if noise is None else f"; at most {noise[0]:.2g} apart ({noise[1]})"
            last = max([self.num_steps, *(pair.step_a for pair in self.pairs)])
            return f"{word} {'through' if self.tracks else 'at'} step {last}: {self.counts()}{most}{self.passed_over()}"
        looked = self.cursors or self.pairs or any(track.name in DATA for track in self.tracks)
        clauses = [*self.identities(), self.data_parts() or ("same data" if looked else "data not compared")]
        clauses += [str(t) for t in self.tracks if t.first and t.name not in DATA and "/" not in t.name]
        return "; ".join([*clauses, *self.weights_part()]) + self.passed_over()

    def passed_over(self) -> str:
        """How many files could not be compared, if any."""
        number = sum(note.startswith("passed over") for note in self.notes)
        return f"; {plural(number, 'damaged file')} passed over" if number else ""

    def weights_part(self) -> list[str]:
        """Where weights part, or that they do not."""
        parted = self.parted()
        if not parted:
            return [f"weights equal: {self.counts().split(', ')[-1]}"] if self.pairs else []
        pair, gap = parted[0]
        kind = {"optimizer": "optimizer states", "schedule": "schedules"}.get(gap.name.split(".")[0], "weights")
        return [f"{kind} part at checkpoint {pair.at} in {gap}"]

    def details(self) -> list[str]:
        """Everything else, for people."""
        lines = [f"{side} = {text}" for side, text in self.about.items()] + [f"note: {note}" for note in self.notes]
        for may, title in ((False, "settings that differ, and may not within a run"), (True, "settings that differ")):
            rows = [f"  {s['name']}: {s['a']!r} and {s['b']!r} ({s['note']})" for s in self.settings
                    if s["may_change"] == may]
            lines += [f"{title}:", *rows] if rows else []
        lines += [str(track) for track in self.tracks]
        lines += [f"cursors at step {step}: {line}" for step, found in self.cursors.items() for line in found[:1]]
        if self.cursors and not any(self.cursors.values()):
            lines.append(f"cursors: equal after {plural(len(self.cursors), 'save')}")
        return lines + [line for pair in self.pairs for line in tell(pair, self.tolerance)]


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"


def tell(pair: Pair, tolerance: float) -> list[str]:
    """Lines about two checkpoints."""
    beyond = [gap for gap in pair.gaps if gap.beyond(tolerance)]
    verdict = "equal" if not pair.gaps else "equal within the tolerance" if not beyond else \
        f"{plural(len(beyond), 'difference')}"
    data = "same position in the data" if not pair.lanes else f"cursors differ in {pair.lanes[0]}"
    lines = [f"checkpoint {pair.at} ({' and '.join(pair.names)}): {plural(pair.tensors, 'tensor')}, {verdict}; {data}"]
    lines += [f"  {gap}" for gap in [*pair.identity, *beyond[:LISTED]]]
    return lines + [f"  and {len(beyond) - LISTED:,} more (--json has all)"] * (len(beyond) > LISTED)


def about(side: Side, steps: dict[int, Any], saved: dict[int, Any]) -> str:
    """What a run has, and whether it is at work."""
    if side.checkpoint is not None:
        return f"{side.name}: {side.checkpoint.path}"
    assert side.run_dir is not None
    done = [step for step, values in steps.items() if "loss" in values]
    logged = f"steps {min(done)} to {max(done)} in the log" if done else "no step in the log"
    try:
        state = read_state(side.run_dir)
        alive = "" if state is None else f"; {state['status']} ({liveness(state)})"
    except ValueError as e:
        alive = f"; {e}"
    return f"{side.name}: {logged}; checkpoints: {', '.join(map(str, saved)) or 'none'}{alive}"


def compare(a: Side, b: Side, tolerance: float) -> Comparison:
    """Compare two runs, or two checkpoints. ValueError where nothing is common, or a config.json is broken."""
    notes: list[str] = []
    settings = compare_settings(a, b, notes)
    if a.checkpoint and b.checkpoint:
        texts = {"a": about(a, {}, {}), "b": about(b, {}, {})}
        return Comparison(tolerance, texts, settings, pairs=[compare_checkpoints(a.checkpoint, b.checkpoint)],
                          notes=notes)
    assert a.run_dir is not None and b.run_dir is not None
    logs, saved = [read_tracks(s) for s in (a.run_dir, b.run_dir)], [by_step(s, notes) for s in (a.run_dir, b.run_dir)]
    found = Comparison(tolerance, {"a": about(a, logs[0], saved[0]), "b": about(b, logs[1], saved[1])}, settings,
                       compare_logs(logs[0], logs[1], tolerance), compare_common(saved[0], saved[1], notes),
                       compare_cursors(a.run_dir, b.run_dir, notes), notes)
    found.num_steps = max((s + 1 for s in logs[0] if "loss" in logs[0][s] and "loss" in logs[1].get(s, {})), default=0)
    if not (found.tracks or found.pairs):
        raise ValueError("; ".join(["nothing to compare: no step of the logs and no checkpoint is common",
                                    *found.about.values(), *notes]))
    return found


# ---- output ---------------------------------------------------------------------------------------------------------

def plain(value: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and tell; 1 where something differs. ValueError and FileNotFoundError for bad input."""
    args = parse_args(argv)
    setup_logging()
    if not 0 <= args.tolerance < 1:
        raise ValueError(f"--tolerance: got {args.tolerance}, expected a share such as 1e-5, at least 0 and below 1")
    found = compare(*resolve_both(args.a, args.b), args.tolerance)
    if args.json:
        print(json.dumps(plain({"equal": found.equal, "summary": found.summary(), **asdict(found)}), allow_nan=False))
    else:
        print("\n".join([found.summary(), "", *found.details()]))
    return 0 if found.equal else EXIT_FAILED


if __name__ == "__main__":
    run_main(main)
