"""
Curricula: which buckets are mixed when, in phases, as a YAML file says.

    curriculum:
      - duration_tokens: 5_000_000_000
        mix: {web: 0.6, code: 0.2, math: 0.1, wiki: 0.1}
      - duration_tokens: 5_000_000_000
        mix: {web: 3, code: 3, math: 2, wiki: 2}
    max_epochs: {code: 4}             # passes over a bucket; 1 where it is not named, 0 = no limit
    allow_bucket_exhaustion: false    # true: a lane whose bucket has run dry goes on with the others
    allow_budget_mismatch: false      # true: training may be longer or shorter than the phases together

A weight is a share of rows; weights need not sum to 1. A phase lasts floor(duration_tokens / (T V)) rows of each of
the V lanes; the last phase goes on for as long as anyone asks.

The file is read as YAML nodes, which know their lines, and nothing is constructed from it: every error names file,
line, what is there and what was expected, and a bucket may be called `no` or 2024.

    rows of a lane, in a phase of 600:
    |--- block 0: 256 rows ---|--- block 1: 256 rows ---|- 88 of block 2 -|   next phase: block 0 ...

In a block the counts are the weights, rounded: lay the buckets end to end on a line of 256 rows, and count for each
the points 1 - u, 2 - u, ... 256 - u that fall on it (systematic sampling).

    weights 5, 3, 1:   |------------ 142.2 ------------|------ 85.3 ------|- 28.4 -|
    u = 0.9                         143                         85            28
    u = 0.6                         142                         86            28

So each count is less than one row off its share and all sum to 256. With u = frac(block / golden ratio + lane
sqrt(2)), which is spread about as evenly as points can be, remainders carry over: in any run of up to 4,096 blocks a
bucket is less than five rows off, in all. The order in a block is a permutation keyed by (seed, phase, lane, block).
All arithmetic is of integers, a weight is the decimal that the file shows, and buckets are taken by name: the same
sequence on every machine, in whatever order the file names them.

Rejected: a draw for each row (a quarter of 256 rows would be 7 off, as a rule); remainders added up from block to
block (the mix of a row would need all blocks before it); counts as differences of rounded running totals (exact for
ever, but the count of a small bucket in one block can come out negative).
"""

import contextlib
import difflib
import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nanochat.common import permutation

VERSION = 1  # of the sequence that a Mixer makes of a curriculum
_OPTIONAL = ("max_epochs", "allow_bucket_exhaustion", "allow_budget_mismatch")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def _check_duration(value: Any) -> None:
    if type(value) is not int or not 1 <= value < 2**63:
        raise ValueError(f"duration_tokens: got {value!r}, expected a whole number of tokens, 1 to 2**63 - 1")


def _check_weight(bucket: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"weight of {bucket!r}: got {value!r}, expected a number that is 0 or more")


def _check_epochs(bucket: str, value: Any, mixed: Collection[str]) -> None:
    if bucket not in mixed:
        raise ValueError(f"max_epochs: no phase mixes {bucket!r}{_hint(bucket, mixed)}; give it a weight")
    if type(value) is not int or value < 0:
        raise ValueError(f"max_epochs of {bucket!r}: got {value!r}, expected a whole number of passes, 0 = no limit")


def _hint(word: str, known: Collection[str]) -> str:
    """What there is, and what the word was probably meant to be."""
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return (f" (did you mean {close[0]!r}?)" if close else "") + f"; there is {', '.join(sorted(known)) or 'nothing'}"


@dataclass(frozen=True)
class Phase:
    """For so many tokens, rows in these shares. Raises ValueError on what cannot be mixed."""

    duration_tokens: int
    mix: tuple[tuple[str, int | float], ...]  # (bucket, weight), kept sorted by name

    def __post_init__(self) -> None:
        _check_duration(self.duration_tokens)
        for bucket, weight in self.mix:
            _check_weight(bucket, weight)
        if len(dict(self.mix)) != len(self.mix):
            raise ValueError(f"mix: a bucket is there twice in {', '.join(b for b, _ in self.mix)}")
        if not any(weight for _, weight in self.mix):
            raise ValueError(f"mix: got {dict(self.mix)}, expected at least one weight above 0")
        object.__setattr__(self, "mix", tuple(sorted(self.mix)))

    def shares(self) -> dict[str, int]:
        """The weights above 0 as the smallest integers in the same proportion: {"code": 1, "web": 3}."""
        exact = {bucket: Fraction(repr(weight)) for bucket, weight in self.mix if weight}
        scale = math.lcm(*(f.denominator for f in exact.values()))
        whole = {bucket: int(f * scale) for bucket, f in exact.items()}
        divisor = math.gcd(*whole.values())
        return {bucket: n // divisor for bucket, n in whole.items()}


@dataclass(frozen=True)
class Curriculum:
    """What a curriculum file says. `places` knows where: {"phase 1": "mix.yaml:2", "bucket web": "mix.yaml:3"}; it is
    for messages and takes no part in comparisons. Raises ValueError on what contradicts itself."""

    phases: tuple[Phase, ...]
    max_epochs: dict[str, int] = field(default_factory=dict)
    allow_bucket_exhaustion: bool = False
    allow_budget_mismatch: bool = False
    places: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("curriculum: no phase in it, expected at least one {duration_tokens, mix}")
        for bucket, limit in self.max_epochs.items():
            _check_epochs(bucket, limit, self.buckets)

    @property
    def buckets(self) -> list[str]:
        """The buckets that some phase mixes, sorted."""
        return sorted({bucket for phase in self.phases for bucket, weight in phase.mix if weight})

    def epochs(self, bucket: str) -> int:
        """How many passes over a bucket are allowed, 0 = no limit."""
        return self.max_epochs.get(bucket, 1)

    def check_buckets(self, available: Collection[str]) -> None:
        """Raises ValueError where a phase names a bucket that is not available."""
        for number, phase in enumerate(self.phases, 1):
            for bucket in sorted(dict(phase.mix).keys() - set(available)):
                raise ValueError(f"{self._at(f'bucket {bucket}')}phase {number} mixes {bucket!r}, "
                                 f"but the data has no such bucket{_hint(bucket, available)}")

    def phase_rows(self, T: int, V: int) -> list[int]:
        """How many rows of each lane a phase lasts, for each phase. Raises ValueError where that is none."""
        for number, phase in enumerate(self.phases, 1):
            if phase.duration_tokens < T * V:
                raise ValueError(
                    f"{self._at(f'phase {number}')}phase {number} lasts {phase.duration_tokens:,} tokens, less than "
                    f"one row of each lane (T * V = {T:,} * {V:,} = {T * V:,}); lengthen it, or use fewer --lanes")
        return [phase.duration_tokens // (T * V) for phase in self.phases]

    def total_rows(self, T: int, V: int) -> int:
        """How many rows of each lane all phases last together."""
        return sum(self.phase_rows(T, V))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, for `from_json`."""
        return {"phases": [{"duration_tokens": p.duration_tokens, "mix": dict(p.mix)} for p in self.phases],
                "max_epochs": dict(self.max_epochs), "allow_bucket_exhaustion": self.allow_bucket_exhaustion,
                "allow_budget_mismatch": self.allow_budget_mismatch, "places": dict(self.places)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Curriculum":
        """The inverse of `to_json`. Raises ValueError for anything else."""
        try:
            phases = tuple(Phase(p["duration_tokens"], tuple(p["mix"].items())) for p in value["phases"])
            return cls(phases, **{key: value[key] for key in _OPTIONAL}, places=dict(value.get("places", {})))
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"stored curriculum: got {value!r}, expected what to_json gives") from e

    def identity(self) -> str:
        """Canonical JSON of what decides the bucket of a row, and when a bucket is dry: equal strings, equal rows.
        How the file writes a weight is not in it, nor what is allowed, nor how long the last phase is: it goes on."""
        phases = [{"duration_tokens": p.duration_tokens, "shares": p.shares()} for p in self.phases]
        phases[-1]["duration_tokens"] = None
        value = {"version": VERSION, "phases": phases, "max_epochs": {b: self.epochs(b) for b in self.buckets}}
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    def _at(self, thing: str) -> str:
        return f"{self.places[thing]}: " if thing in self.places else ""


# ---- mixing ---------------------------------------------------------------------------------------------------------

BLOCK = 256
_GOLDEN, _SQRT2 = 0x9E3779B97F4A7C15, 0x6A09E667F3BCC909  # frac(golden ratio), frac(sqrt(2)), times 2**64


_Edges = tuple[list[str], list[int], list[int]]  # buckets; where each ends: whole rows; above which U one more
_Block = tuple[int, int, frozenset[str], list[str | None]]  # first row, end, dropped buckets, buckets of the rows
_NO_BLOCK: _Block = (0, 0, frozenset(), [])


def _edges(shares: Mapping[str, int]) -> _Edges:
    """Bucket j ends behind floor(BLOCK * P_j + u) rows, P_j being the share of buckets up to j, and u = U / 2**64.
    That is whole_j, and one more if U > bound_j: one comparison of integers, exact."""
    names, whole, bound, total, up_to = list(shares), [], [], sum(shares.values()), 0
    for name in names:
        up_to += shares[name]
        rows, rest = divmod(BLOCK * up_to, total)
        whole.append(rows)
        bound.append(-(-((total - rest) << 64) // total) - 1)
    return names, whole, bound


class Mixer:
    """The bucket of row k of lane l. No history: any row may be asked for at any time; the block in use of each lane
    is kept, so that going on in it is an index look-up. ValueError for a phase of no rows, and for no such row."""

    def __init__(self, curriculum: Curriculum, *, T: int, V: int, seed: int):
        self.V, self.seed = V, seed
        lengths = curriculum.phase_rows(T, V)
        self._starts = [sum(lengths[:i]) for i in range(len(lengths))]  # the first row of each phase
        self._shares = [phase.shares() for phase in curriculum.phases]
        self._blocks: dict[int, _Block] = {}  # the one in use of each lane

    def phase_of(self, row: int) -> tuple[int, int]:
        """(phase, counted from 0; row within the phase). Behind the end is still the last phase."""
        phase = bisect_right(self._starts, row) - 1
        if phase < 0:
            raise ValueError(f"row: got {row}, expected 0 or more")
        return phase, row - self._starts[phase]

    def bucket(self, lane: int, row: int, dropped: frozenset[str] = frozenset()) -> str | None:
        """The bucket of a lane's row where the lane has dropped some; None where it has dropped all of the phase."""
        first, end, without, buckets = self._blocks.get(lane, _NO_BLOCK)
        if not first <= row < end or without != dropped:
            first, _, _, buckets = self._blocks[lane] = self._load(lane, row, dropped)
        return buckets[row - first]

    def counts(self, lane: int, rows: range, dropped: frozenset[str] = frozenset()) -> dict[str, int]:
        """How often `bucket` gives each bucket for rows (in steps of 1) of a lane; those that never come are left
        out, and so are rows without a bucket. Whole blocks cost one comparison for each bucket."""
        assert rows.step == 1 and 0 <= lane < self.V
        total: Counter[str] = Counter()
        row = rows.start
        while row < rows.stop:
            phase, at = self.phase_of(row)
            stop = min(rows.stop, self._end(phase) or rows.stop)
            first, last = -(-at // BLOCK), (at + stop - row) // BLOCK  # whole blocks
            if first < last and at % BLOCK == 0:
                total.update(self._whole_blocks(phase, lane, first, last, dropped))
                row += (last - first) * BLOCK
            else:
                end = min(stop, row - at % BLOCK + BLOCK)
                block = self._draw(phase, lane, at // BLOCK, dropped)
                total.update(b for b in block[at % BLOCK:at % BLOCK + end - row] if b is not None)
                row = end
        return {bucket: n for bucket, n in sorted(total.items()) if n}

    def _end(self, phase: int) -> int | None:
        """The row behind a phase; None: it goes on for ever."""
        return self._starts[phase + 1] if phase + 1 < len(self._starts) else None

    def _load(self, lane: int, row: int, dropped: frozenset[str]) -> _Block:
        if not 0 <= lane < self.V:
            raise ValueError(f"lane: got {lane}, expected 0 to {self.V - 1}")
        phase, at = self.phase_of(row)
        first = row - at % BLOCK
        end = min(first + BLOCK, self._end(phase) or first + BLOCK)
        return first, end, dropped, self._draw(phase, lane, at // BLOCK, dropped)

    def _phase_edges(self, phase: int, dropped: frozenset[str]) -> _Edges:
        return _edges({bucket: n for bucket, n in self._shares[phase].items() if bucket not in dropped})

    def _draw(self, phase: int, lane: int, block: int, dropped: frozenset[str]) -> list[str | None]:
        """The buckets of a block's rows."""
        names, whole, bound = self._phase_edges(phase, dropped)
        if not names:
            return [None] * BLOCK
        u = (block * _GOLDEN + lane * _SQRT2) % 2**64
        line: list[str | None] = []
        for name, rows, b in zip(names, whole, bound):
            line += [name] * (rows + (u > b) - len(line))
        return [line[place] for place in permutation(BLOCK, self.seed, "mix", phase, lane, block).tolist()]

    def _whole_blocks(self, phase: int, lane: int, first: int, last: int, dropped: frozenset[str]) -> dict[str, int]:
        """How often each bucket is in blocks first .. last - 1 of a phase."""
        names, whole, bound = self._phase_edges(phase, dropped)
        blocks = np.arange(first, last, dtype=np.uint64)
        u = blocks * np.uint64(_GOLDEN) + np.uint64(lane * _SQRT2 % 2**64)  # mod 2**64, as integers of 64 bits do
        ends = [0] + [w * (last - first) + int((u > np.uint64(b)).sum()) for w, b in zip(whole, bound)]
        return {name: ends[j + 1] - ends[j] for j, name in enumerate(names)}


# ---- the file -------------------------------------------------------------------------------------------------------

def load(path: Path | str, buckets: Collection[str] | None = None) -> Curriculum:
    """Read a curriculum file. Every error names file and line, what is there and what is expected: FileNotFoundError,
    ValueError, also for a bucket that is not one of `buckets` (where given)."""
    path = Path(path)
    root = _fields(path, _compose(path), "the file", required=("curriculum",), optional=_OPTIONAL)
    places: dict[str, str] = {}
    phases = root["curriculum"]
    if not isinstance(phases, yaml.SequenceNode) or not phases.value:
        raise _error(path, phases, f"curriculum: got {_show(phases)}, expected a list of phases, each with "
                                   "duration_tokens and mix")
    read = Curriculum(tuple(_phase(path, node, i, places) for i, node in enumerate(phases.value, 1)))
    flags = {key: _flag(path, node, key) for key, node in root.items() if key.startswith("allow_")}
    limits = _limits(path, root["max_epochs"], read.buckets) if "max_epochs" in root else {}
    curriculum = Curriculum(read.phases, limits, **flags, places=places)
    if buckets is not None:
        curriculum.check_buckets(buckets)
    return curriculum


def _phase(path: Path, node: yaml.Node, number: int, places: dict[str, str]) -> Phase:
    keys = _fields(path, node, f"phase {number}", required=("duration_tokens", "mix"))
    places[f"phase {number}"] = _place(path, node)
    with _told(path, keys["duration_tokens"]):
        duration = _number(keys["duration_tokens"], "duration_tokens")
        duration = int(duration) if float(duration).is_integer() else duration  # 5e9
        _check_duration(duration)
    mix = {}
    for key, weight in _mapping(path, keys["mix"], "mix", "{bucket: weight}").items():
        bucket = key.value
        places.setdefault(f"bucket {bucket}", _place(path, key))
        with _told(path, weight):
            mix[bucket] = _number(weight, f"weight of {bucket!r}")
            _check_weight(bucket, mix[bucket])
    with _told(path, keys["mix"]):
        return Phase(int(duration), tuple(mix.items()))


def _limits(path: Path, node: yaml.Node, mixed: Collection[str]) -> dict[str, int]:
    limits = {}
    for key, value in _mapping(path, node, "max_epochs", "{bucket: passes}").items():
        with _told(path, key):
            limit = _number(value, f"max_epochs of {key.value!r}")
            _check_epochs(key.value, limit, mixed)
            limits[key.value] = int(limit)
    return limits


def _compose(path: Path) -> yaml.Node:
    """The file as nodes that know their lines; nothing is constructed from it."""
    try:
        root = yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such curriculum file") from None
    except (yaml.YAMLError, RecursionError) as e:
        mark = getattr(e, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{line}: not YAML ({getattr(e, 'problem', None) or str(e).splitlines()[0]})") from e
    if root is None:
        raise ValueError(f"{path}:1: the file is empty, expected a curriculum")
    return root


def _fields(path: Path, node: yaml.Node, what: str, *, required: tuple[str, ...],
            optional: tuple[str, ...] = ()) -> dict[str, yaml.Node]:
    """A mapping with these keys and no others."""
    keys = required + optional
    found = _mapping(path, node, what, f"the keys {', '.join(keys)}")
    for key in found:
        if key.value not in keys:
            raise _error(path, key, f"{what} has an unknown key {key.value!r}{_hint(key.value, keys)}")
    by_name = {key.value: value for key, value in found.items()}
    for name in required:
        if name not in by_name:
            raise _error(path, node, f"{what} has no {name!r}; it has {', '.join(by_name)}")
    return by_name


def _mapping(path: Path, node: yaml.Node, what: str, expected: str) -> dict[yaml.ScalarNode, yaml.Node]:
    """A mapping that is not empty. Keys are names as they stand: a bucket may be called `no` or 2024."""
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise _error(path, node, f"{what}: got {_show(node)}, expected {expected}")
    first: dict[str, yaml.Node] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error(path, key, f"{what} has {_show(key)} for a key, expected a name")
        if key.value in first:
            raise _error(path, key, f"{what} has {key.value!r} twice, first at {_place(path, first[key.value])}")
        first[key.value] = key
    return dict(node.value)


def _number(node: yaml.Node, what: str) -> int | float:
    """A plain decimal number: 7, 5_000_000, 0.25, 5e9, .5; quoted or not."""
    text = node.value.replace("_", "") if isinstance(node, yaml.ScalarNode) else ""
    if not _NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        raise ValueError(f"{what}: got {_show(node)}, expected a number")
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _flag(path: Path, node: yaml.Node, what: str) -> bool:
    if node.tag != "tag:yaml.org,2002:bool":
        raise _error(path, node, f"{what}: got {_show(node)}, expected true or false")
    return node.value.lower() in ("true", "yes", "on")


def _show(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value) if node.value or node.style else "nothing"
    kind = "a mapping" if isinstance(node, yaml.MappingNode) else "a list"
    return kind if node.value else kind.replace("a ", "an empty ")


def _place(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _error(path: Path, node: yaml.Node, message: str) -> ValueError:
    return ValueError(f"{_place(path, node)}: {message}")


@contextlib.contextmanager
def _told(path: Path, node: yaml.Node) -> Iterator[None]:
    """Puts file and line in front of a ValueError from inside."""
    try:
        yield
    except ValueError as e:
        raise _error(path, node, str(e)) from None
