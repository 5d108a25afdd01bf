"""
Curricula: which buckets are mixed when, in phases, and the bucket of each row that follows.

    curriculum:
      - duration_tokens: 3_000_000
        mix: {web: 7, books: 2, code: 1}
      - duration_tokens: 1_000_000
        mix: {web: 0.25, code: 0.5, math: 0.25}
    max_epochs: {code: 2}             # passes over a bucket; 1 where it is not named, 0 = no limit
    allow_bucket_exhaustion: false    # true: a lane whose bucket has run dry goes on with the others
    allow_budget_mismatch: false      # true: training may be longer or shorter than the phases together

A weight is a share of rows; weights need not sum to 1. A phase lasts floor(duration_tokens / (T V))
rows of each of the V lanes; the last phase goes on for as long as anyone asks.

`Mixer` tells the bucket of row k of lane l, for any row, without a look at those before it:

    rows of a lane, in a phase of 600:
    |--- block 0: 256 rows ---|--- block 1: 256 rows ---|- 88 of block 2 -|   next phase: block 0 ...

In a block the counts are the weights, rounded: lay the buckets end to end on a line of 256 rows,
and count for each the points 1 - u, 2 - u, ... 256 - u that fall on it (systematic sampling).

    weights 5, 3, 1:   |------------ 142.2 ------------|------ 85.3 ------|- 28.4 -|
    u = 0.9                         143                         85            28
    u = 0.6                         142                         86            28

So each count is less than one row off its share and all sum to 256. With u = frac(block / golden ratio +
lane sqrt(2)), which is spread about as evenly as points can be, remainders carry over: in any run of up to
4,096 blocks a bucket is less than five rows off, in all. The order in a block is a permutation keyed by
(seed, phase, lane, block). All arithmetic is of integers, a weight is the decimal that the file shows, and
buckets are taken by name: the same sequence on every machine, in whatever order the file names them.

Rejected: a draw for each row (a quarter of 256 rows would be 7 off, as a rule); remainders added up
from block to block (the mix of a row would need all blocks before it).
"""

import functools
import json
import math
import re
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from nanochat.cli import did_you_mean, read_yaml
from nanochat.common import check_shape, permutation

VERSION = 1  # of the sequence that a Mixer makes of a curriculum
BLOCK = 256  # rows
GOLDEN, SQRT2 = 0x9E3779B97F4A7C15, 0x6A09E667F3BCC909  # frac(golden ratio), frac(sqrt(2)), times 2**64
PHASE = {"duration_tokens": int | float | str, "mix": dict}  # of a file; what may be left out:
OPTIONAL = {"max_epochs": dict, "allow_bucket_exhaustion": bool, "allow_budget_mismatch": bool}
NUMBER = re.compile(r"[-+]?\d{1,30}(\.\d{0,30})?([eE][-+]?\d{1,3})?", re.ASCII)


def _show(value: Any) -> str:
    """A value for a message, cut where it is long."""
    huge = isinstance(value, int) and value.bit_length() > 1000
    text = "a whole number of more than 300 digits" if huge else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _hint(word: object, known: Collection[str]) -> str:
    """What there is, and what the word was probably meant to be."""
    names = sorted(known)
    return f"; there is {', '.join(names) or 'nothing'}" + did_you_mean(_show(word).strip("'"), names)


def _number(value: Any, what: str, *, whole: bool = False, least: int = 0) -> int | float:
    """A number from `least` to 2**63. YAML leaves 5e9 a text, so texts that are numbers are taken too."""
    found = float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if type(found) not in ((int,) if whole else (int, float)) or not least <= found < 2**63:
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{what}: got {_show(value)}, expected {kind} of {least} or more")
    return found


def _check(value: Any, what: str, required: dict[str, Any], optional: dict[str, Any]) -> None:
    """ValueError unless a value is an object with the fields of these shapes, and no other."""
    check_shape(value, dict, what)
    for key in value:  # before what is missing: a misspelled key is both
        if key not in required | optional:
            raise ValueError(f"{what} has an unknown key {_show(key)}{_hint(key, required | optional)}")
    check_shape(value, required | {key: shape for key, shape in optional.items() if key in value}, what)


@dataclass(frozen=True)
class Phase:
    """For so many tokens, rows in these shares. Raises ValueError on what cannot be mixed."""

    duration_tokens: int
    mix: dict[str, int | float]  # {bucket: weight}, sorted by name

    def __post_init__(self) -> None:
        duration = _number(self.duration_tokens, "duration_tokens", whole=True, least=1)
        for bucket in self.mix:
            if not isinstance(bucket, str):
                raise ValueError(f"mix: got {_show(bucket)} for a bucket, expected a name; put it in quotes")
        mix = {bucket: _number(self.mix[bucket], f"weight of {_show(bucket)}") for bucket in sorted(self.mix)}
        if not any(mix.values()):
            raise ValueError(f"mix: got {_show(mix)}, expected at least one weight above 0")
        object.__setattr__(self, "duration_tokens", duration)
        object.__setattr__(self, "mix", mix)

    def shares(self) -> dict[str, int]:
        """The weights above 0 as the smallest integers in the same proportion: {"code": 1, "web": 3}."""
        exact = {bucket: Fraction(repr(weight)) for bucket, weight in self.mix.items() if weight}
        scale = math.lcm(*(f.denominator for f in exact.values()))
        whole = {bucket: int(f * scale) for bucket, f in exact.items()}
        divisor = math.gcd(*whole.values())
        return {bucket: n // divisor for bucket, n in whole.items()}


@dataclass(frozen=True)
class Curriculum:
    """What a curriculum file says. Raises ValueError on what contradicts itself."""

    phases: list[Phase]
    max_epochs: dict[str, int] = field(default_factory=dict)
    allow_bucket_exhaustion: bool = False
    allow_budget_mismatch: bool = False

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("curriculum: no phase in it, expected a list of phases, each with duration_tokens and mix")
        for bucket, limit in self.max_epochs.items():
            if bucket not in self.buckets:
                raise ValueError(f"max_epochs: no phase mixes {_show(bucket)}{_hint(bucket, self.buckets)}; "
                                 f"give it a weight")
            _number(limit, f"max_epochs of {_show(bucket)}", whole=True)

    @property
    def buckets(self) -> list[str]:
        """The buckets that some phase mixes, sorted."""
        return sorted({bucket for phase in self.phases for bucket, weight in phase.mix.items() if weight})

    def epochs(self, bucket: str) -> int:
        """How many passes over a bucket are allowed, 0 = no limit."""
        return int(self.max_epochs.get(bucket, 1))

    def check_buckets(self, available: Collection[str]) -> None:
        """Raises ValueError where a phase names a bucket that is not available."""
        for number, phase in enumerate(self.phases, 1):
            for bucket in phase.mix:
                if bucket not in available:
                    raise ValueError(f"--curriculum: phase {number} mixes {_show(bucket)}, but the data has no such "
                                     f"bucket{_hint(bucket, available)}")

    def phase_rows(self, T: int, V: int) -> list[int]:
        """How many rows of each lane a phase lasts, for each phase. Raises ValueError where that is none."""
        for number, phase in enumerate(self.phases, 1):
            if phase.duration_tokens < T * V:
                raise ValueError(f"--curriculum: phase {number} lasts {phase.duration_tokens:,} tokens, less than one "
                                 f"row of each lane (T * V = {T:,} * {V:,} = {T * V:,}); lengthen it, or use fewer "
                                 f"--lanes")
        return [phase.duration_tokens // (T * V) for phase in self.phases]

    def mixer(self, *, T: int, V: int, seed: int) -> "Mixer":
        """What says which bucket each row of each lane comes from."""
        return Mixer(self, T=T, V=V, seed=seed)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, *, what: str = "the curriculum", list_name: str = "phases") -> "Curriculum":
        """What `to_json` gave; a curriculum file calls the list of phases `curriculum`. Raises
        ValueError for anything else, which says where."""
        _check(value, what, {list_name: list}, OPTIONAL)
        phases = []
        for number, phase in enumerate(value[list_name], 1):
            _check(phase, f"phase {number}", PHASE, {})
            try:
                phases.append(Phase(**phase))
            except ValueError as e:
                raise ValueError(f"phase {number}: {e}") from None
        return cls(phases, **{key: value[key] for key in OPTIONAL if key in value})

    def identity(self) -> str:
        """Canonical JSON of what decides the bucket of a row, and when a bucket is dry: equal
        strings, equal rows. How the file writes a weight is not in it, nor what is allowed, nor how
        long the last phase is: it goes on."""
        phases = [{"duration_tokens": p.duration_tokens, "shares": p.shares()} for p in self.phases]
        phases[-1]["duration_tokens"] = None
        value = {"version": VERSION, "phases": phases, "max_epochs": {b: self.epochs(b) for b in self.buckets}}
        return json.dumps(value, sort_keys=True, separators=(",", ":"))


# ---- the file ------------------------------------------------------------------------------------

def load(path: Path | str | dict) -> Curriculum:
    """Read a curriculum file, or take what stands in a file of flags instead. Every error
    (FileNotFoundError, ValueError) names the file, what is there and what is expected."""
    if isinstance(path, dict):
        return Curriculum.from_json(path, list_name="phases" if "phases" in path else "curriculum")
    path = Path(path)
    try:
        return Curriculum.from_json(read_yaml(path), what="the file", list_name="curriculum")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such curriculum file") from None
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


# ---- mixing --------------------------------------------------------------------------------------

class Mixer:
    """The bucket of row k of lane l. No history: any row may be asked for at any time. ValueError
    for a phase of no rows."""

    def __init__(self, curriculum: Curriculum, *, T: int, V: int, seed: int):
        self.V, self.seed = V, seed
        lengths = curriculum.phase_rows(T, V)
        self._starts = [sum(lengths[:i]) for i in range(len(lengths))]  # the first row of each phase
        self._shares = [phase.shares() for phase in curriculum.phases]
        self._block = functools.lru_cache(2 * V)(self._draw)  # that of each lane and the next

    def phase_of(self, row: int) -> tuple[int, int]:
        """(phase, counted from 0; row within the phase). Behind the end is still the last phase."""
        phase = bisect_right(self._starts, row) - 1
        return phase, row - self._starts[phase]

    def bucket(self, lane: int, row: int, dropped: frozenset[str] = frozenset()) -> str | None:
        """The bucket of a lane's row where the lane has dropped some; None where it has dropped all of the phase."""
        assert row >= 0 and 0 <= lane < self.V
        phase, at = self.phase_of(row)
        return self._block(phase, lane, at // BLOCK, dropped)[at % BLOCK]

    def _draw(self, phase: int, lane: int, block: int, dropped: frozenset[str]) -> list[str | None]:
        """The buckets of a block's rows. On the line bucket j ends behind floor(BLOCK * P_j + u)
        rows, P_j being the share of the buckets up to j."""
        shares = {bucket: n for bucket, n in self._shares[phase].items() if bucket not in dropped}
        total, up_to, line = sum(shares.values()), 0, list[str | None]()
        u = (block * GOLDEN + lane * SQRT2) % 2**64  # of 2**64, so that all of this is exact
        for bucket, n in shares.items():
            up_to += n
            end = ((BLOCK * up_to << 64) + u * total) // (total << 64)
            line += [bucket] * (end - len(line))
        line = line or [None] * BLOCK
        return [line[place] for place in permutation(BLOCK, self.seed, "mix", phase, lane, block).tolist()]
