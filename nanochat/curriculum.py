"""
Curricula: which buckets each phase mixes, and which bucket each row therefore comes from.

    curriculum:
      - duration_tokens: 3_000_000
        mix: {web: 7, books: 2, code: 1}
      - duration_tokens: 1_000_000
        mix: {web: 0.25, code: 0.5, math: 0.25}
    max_epochs: {code: 2}             # maximum passes over a bucket; default 1; 0 = unlimited
    allow_bucket_exhaustion: false    # true: a lane drops a bucket that has run dry and continues with the others
    allow_budget_mismatch: false      # true: training may be longer or shorter than all phases together

A weight is a share of rows. Weights need not sum to 1. A phase lasts floor(duration_tokens / (T V))
rows of each of the V lanes. The last phase never ends. It may leave out duration_tokens: then
--num-iterations decides how long the run is.

`Mixer` computes the bucket of row k of lane l directly, without the buckets of earlier rows:

    rows of a lane, in a phase of 600:
    |--- block 0: 256 rows ---|--- block 1: 256 rows ---|- 88 of block 2 -|   next phase: block 0 ...

A block's rows per bucket are rounded shares: lay the buckets end to end on a line of 256 rows, and
count for each bucket the points 1 - u, 2 - u, ... 256 - u that fall on it (systematic sampling).

    weights 5, 3, 1:   |------------ 142.2 ------------|------ 85.3 ------|- 28.4 -|
    u = 0.9                         143                         85            28
    u = 0.6                         142                         86            28

So each count differs from its share by less than one row, and all sum to 256. With u = frac(block /
golden ratio + lane sqrt(2)), whose values are spread about as evenly as points can be, rounding
errors cancel: within 4,096 consecutive blocks, a bucket is off by less than five rows in total. A
permutation keyed by (seed, phase, lane, block) orders the rows of a block. Arithmetic is in
integers, with weights exactly as written in the file, and buckets are sorted by name. So the
sequence is the same on every machine and for every order of the buckets in the file.

Rejected: a draw for each row (a count of 64 would often be off by 7); remainders carried from block
to block (a row's bucket would depend on all blocks before it).
"""

import functools
import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.cli import Decides, did_you_mean, read_yaml, setting
from nanochat.common import Difference, check_shape, permutation

VERSION = 1  # of the sequence that a Mixer computes from a curriculum
BLOCK = 256  # rows
COUNTED = 1 << 14  # blocks of each lane that are counted one by one
GOLDEN = 0x9E3779B97F4A7C15  # frac(golden ratio), times 2**64
SQRT2 = 0x6A09E667F3BCC909  # frac(sqrt(2)), times 2**64
PHASE = {"duration_tokens": None, "mix": dict}  # any value, which Phase checks
OPTIONAL = {"max_epochs": dict, "allow_bucket_exhaustion": bool, "allow_budget_mismatch": bool}
NUMBER = re.compile(r"[-+]?\d{1,30}(\.\d{0,30})?([eE][-+]?\d{1,3})?", re.ASCII)


def _show(value: object) -> str:
    """A value for a message, shortened if necessary."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _hint(word: object, known: Collection[str]) -> str:
    """The end of a message about an unknown word: the known words, and the most similar one."""
    names = sorted(known)
    similar = did_you_mean(_show(word).strip("'"), names)
    return f"; expected {', '.join(names)}{similar}"


def _number(value: object, what: str, *, whole: bool = False, minimum: int = 0) -> int | float:
    """A number from `minimum` to 2**63.

    YAML reads 5e9 as a string, so strings that are numbers are accepted.
    """
    number = float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, int | float) and not isinstance(number, bool):
        is_right_kind = isinstance(number, int) or not whole
        if is_right_kind and minimum <= number < 2**63:
            return number
    kind = "a whole number" if whole else "a number"
    raise ValueError(f"{what}: got {_show(value)}, expected {kind} >= {minimum}")


def _check_fields(
    value: object, what: str, required: dict[str, Any], optional: dict[str, Any]
) -> None:
    """ValueError unless a value is an object with fields of these shapes and no others."""
    check_shape(value, dict, what)
    assert isinstance(value, dict)
    known = required | optional
    for key in value:  # checked before missing keys, because a misspelled key is also missing
        if key not in known:
            raise ValueError(f"{what} has an unknown key {_show(key)}{_hint(key, known)}")
    shape = dict(required)
    for key in optional:
        if key in value:
            shape[key] = optional[key]
    check_shape(value, shape, what)


@dataclass(frozen=True)
class Phase:
    """A duration in tokens, and the shares of the buckets.

    ValueError for values that cannot be mixed.
    """

    duration_tokens: int | None  # None: to the end of the run, for the last phase only
    mix: dict[str, int | float]  # {bucket: weight}, sorted by name

    def __post_init__(self) -> None:
        duration = self.duration_tokens
        if duration is not None:
            duration = int(_number(duration, "duration_tokens", whole=True, minimum=1))
        for bucket in self.mix:
            if not isinstance(bucket, str):
                raise ValueError(
                    f"mix: got the bucket {_show(bucket)}, expected a name; put it in quotes"
                )
        mix = {}
        for bucket in sorted(self.mix):
            mix[bucket] = _number(self.mix[bucket], f"weight of {_show(bucket)}")
        if not any(mix.values()):
            raise ValueError(f"mix: got {_show(mix)}, expected at least one weight above 0")
        object.__setattr__(self, "duration_tokens", duration)
        object.__setattr__(self, "mix", mix)

    def proportions(self) -> dict[str, int]:
        """The weights above 0 as the smallest integers in proportion: {"code": 1, "web": 3}."""
        exact = {}
        for bucket, weight in self.mix.items():
            if weight:
                exact[bucket] = Fraction(repr(weight))
        scale = math.lcm(*(fraction.denominator for fraction in exact.values()))
        whole = {bucket: int(fraction * scale) for bucket, fraction in exact.items()}
        divisor = math.gcd(*whole.values())
        return {bucket: number // divisor for bucket, number in whole.items()}


@dataclass(frozen=True, kw_only=True)
class CurriculumSettings:
    """curriculum"""  # the title of these flags in --help

    curriculum: dict | None = setting(
        None,
        "YAML file with the mix of buckets (subfolders of the data) in each phase of the run",
        metavar="YAML",
        decides=Decides.ROWS,
        note="decides which bucket each row comes from; its notation and the last phase's duration may change",
    )
    allow_bucket_exhaustion: bool = setting(
        False,
        "when a bucket has run dry, continue with the other buckets",
        note="decides whether a lane whose bucket has run dry continues with the others or halts the run",
    )


@dataclass(frozen=True)
class Curriculum:
    """The contents of a curriculum file. ValueError if they contradict each other."""

    phases: list[Phase]
    max_epochs: dict[str, int] = field(default_factory=dict)
    allow_bucket_exhaustion: bool = CurriculumSettings.allow_bucket_exhaustion
    allow_budget_mismatch: bool = False

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError(
                "curriculum: no phases, expected a list of phases, each with duration_tokens and mix"
            )
        for number, phase in enumerate(self.phases[:-1], 1):
            if phase.duration_tokens is None:
                raise ValueError(
                    f"phase {number}: duration_tokens: missing, expected a whole number >= 1; only the last phase "
                    f"may leave it out"
                )
        limits: dict[str, int] = {}
        for bucket, limit in self.max_epochs.items():
            if bucket not in self.buckets:
                raise ValueError(
                    f"max_epochs: no phase gives {_show(bucket)} a weight{_hint(bucket, self.buckets)}"
                )
            limits[bucket] = int(_number(limit, f"max_epochs of {_show(bucket)}", whole=True))
        object.__setattr__(self, "max_epochs", limits)

    @property
    def buckets(self) -> list[str]:
        """The buckets that some phase mixes, sorted."""
        mixed: set[str] = set()
        for phase in self.phases:
            for bucket, weight in phase.mix.items():
                if weight:
                    mixed.add(bucket)
        return sorted(mixed)

    @property
    def tokens(self) -> int:
        """The duration of all phases together; 0 if the last one has none."""
        durations = [phase.duration_tokens for phase in self.phases]
        return 0 if None in durations else sum(map(int, filter(None, durations)))

    def epochs(self, bucket: str) -> int:
        """Maximum number of passes over a bucket; 0 = unlimited."""
        return self.max_epochs.get(bucket, 1)

    def check_buckets(self, available: Collection[str]) -> None:
        """ValueError if a phase names a bucket that is not available."""
        for number, phase in enumerate(self.phases, 1):
            for bucket in phase.mix:
                if bucket not in available:
                    raise ValueError(
                        f"--curriculum: phase {number} mixes {_show(bucket)}, but the data has no such bucket, "
                        f"which is a subfolder of --data-path, or a prefix in it{_hint(bucket, available)}"
                    )

    def phase_rows(self, T: int, V: int) -> list[int]:
        """Each phase's length in rows per lane, 0 for a phase without duration. ValueError if another
        one has no row."""
        lengths = []
        for number, phase in enumerate(self.phases, 1):
            if phase.duration_tokens is None:
                lengths.append(0)
                continue
            rows = phase.duration_tokens // (T * V)
            if rows == 0:
                raise ValueError(
                    f"--curriculum: phase {number} lasts {phase.duration_tokens:,} tokens, less than one "
                    f"row of each lane (T * V = {T:,} * {V:,} = {T * V:,}); lengthen it, or use fewer "
                    f"--lanes"
                )
            lengths.append(rows)
        return lengths

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(
        cls, value: Mapping[str, Any], *, what: str = "the curriculum", list_name: str = "phases"
    ) -> "Curriculum":
        """The inverse of `to_json`.

        In a curriculum file, `curriculum` is the name of the list of phases. ValueError says where
        a mistake is.
        """
        _check_fields(value, what, {list_name: list}, OPTIONAL)
        phases = []
        for number, phase in enumerate(value[list_name], 1):
            _check_fields(phase, f"phase {number}", PHASE, {})
            try:
                phases.append(Phase(phase.get("duration_tokens"), phase["mix"]))
            except ValueError as e:
                raise ValueError(f"phase {number}: {e}") from None
        others = {key: value[key] for key in OPTIONAL if key in value}
        return cls(phases, **others)

    def differences(self, other: "Curriculum") -> list[Difference]:
        """What differs in the rows of another curriculum, with the values of both files. Empty if and
        only if both have the same `identity`."""
        last = min(len(self.phases), len(other.phases))
        differing = []
        if len(self.phases) != len(other.phases):
            differing.append(Difference("number of phases", len(self.phases), len(other.phases)))
        for number, (ours, theirs) in enumerate(zip(self.phases, other.phases), 1):
            durations = ours.duration_tokens, theirs.duration_tokens
            if number < last and durations[0] != durations[1]:
                differing.append(Difference(f"duration_tokens of phase {number}", *durations))
            if ours.proportions() != theirs.proportions():
                differing.append(Difference(f"mix of phase {number}", ours.mix, theirs.mix))
        for bucket in self.buckets:
            limits = self.epochs(bucket), other.epochs(bucket)
            if bucket in other.buckets and limits[0] != limits[1]:
                differing.append(Difference(f"max_epochs of {bucket}", *limits))
        return differing

    def identity(self) -> str:
        """Canonical JSON of everything that decides a row's bucket, and when a bucket is dry.

        Equal strings mean equal rows. It excludes the notation of weights, the `allow_` fields, and
        the duration of the last phase, which never ends.
        """
        phases: list[dict[str, Any]] = []
        for phase in self.phases:
            phases.append({"duration_tokens": phase.duration_tokens, "shares": phase.proportions()})
        phases[-1]["duration_tokens"] = None
        max_epochs = {bucket: self.epochs(bucket) for bucket in self.buckets}
        value = {"version": VERSION, "phases": phases, "max_epochs": max_epochs}
        return json.dumps(value, sort_keys=True, separators=(",", ":"))


# ---- the file ------------------------------------------------------------------------------------


def load(path: Path | str | dict | list) -> Curriculum:
    """Read a curriculum file, or accept its contents, or its list of phases, from a --config file.

    FileNotFoundError and ValueError name the file, the value found and the values expected.
    """
    if isinstance(path, list):
        path = {"curriculum": path}
    if isinstance(path, dict):
        list_name = "phases" if "phases" in path else "curriculum"
        return Curriculum.from_json(path, list_name=list_name)
    path = Path(path)
    try:
        return Curriculum.from_json(read_yaml(path), what="the file", list_name="curriculum")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.absolute()}: no such curriculum file") from None
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


# ---- mixing --------------------------------------------------------------------------------------


class Mixer:
    """Computes the bucket of row k of lane l, for any row, without history.

    ValueError if a phase has no rows.
    """

    def __init__(self, curriculum: Curriculum, *, T: int, V: int, seed: int):
        self.V = V
        self.seed = seed
        self._starts: list[int] = []  # the first row of each phase
        start = 0
        for rows in curriculum.phase_rows(T, V):
            self._starts.append(start)
            start += rows
        self._proportions = [phase.proportions() for phase in curriculum.phases]
        # each lane's present block and the next
        self._block = functools.lru_cache(2 * V)(self._draw)

    def phase_of(self, row: int) -> tuple[int, int]:
        """(phase, from 0; row within the phase). Rows after the end belong to the last phase."""
        phase = bisect_right(self._starts, row) - 1
        return phase, row - self._starts[phase]

    def bucket(self, lane: int, row: int, dropped: frozenset[str] = frozenset()) -> str | None:
        """The bucket of a lane's row, given the buckets that the lane has dropped.

        None if the phase has no other.
        """
        assert row >= 0 and 0 <= lane < self.V
        phase, at = self.phase_of(row)
        block, within = divmod(at, BLOCK)
        return self._block(phase, lane, block, dropped)[within]

    def _draw(self, phase: int, lane: int, block: int, dropped: frozenset[str]) -> list[str | None]:
        """The buckets of a block's rows.

        On the line, bucket j ends after floor(BLOCK * P_j + u) rows, where P_j is the share of the
        buckets up to j.
        """
        mixed = self._proportions[phase]
        proportions = {bucket: n for bucket, n in mixed.items() if bucket not in dropped}
        total = sum(proportions.values())

        # lay the buckets end to end; u is times 2**64, so that the arithmetic is exact
        u = (block * GOLDEN + lane * SQRT2) % 2**64
        line: list[str | None] = []
        up_to = 0
        for bucket, n in proportions.items():
            up_to += n
            end = ((BLOCK * up_to << 64) + u * total) // (total << 64)
            line += [bucket] * (end - len(line))
        if not line:  # the lane has dropped all buckets of the phase
            line = [None] * BLOCK

        # order the rows
        shuffled = permutation(BLOCK, self.seed, "mix", phase, lane, block).tolist()
        return [line[at] for at in shuffled]

    def counts(self, phase: int, rows: range) -> Counter[str]:
        """{bucket: how many rows it has in all lanes together}, if each lane has these rows of a phase
        and no bucket is dry. Off by a few rows if there are more than COUNTED blocks."""
        if not rows:
            return Counter()
        blocks = range(-(-rows.start // BLOCK), rows.stop // BLOCK)  # those with all of their rows
        counts = self._count_blocks(phase, blocks)

        # the blocks at both ends: these rows may be any of them
        for block in {rows[0] // BLOCK, rows[-1] // BLOCK}:
            if block in blocks:
                continue
            first = block * BLOCK
            here = slice(max(0, rows.start - first), rows.stop - first)
            for lane in range(self.V):
                counts.update(filter(None, self._draw(phase, lane, block, frozenset())[here]))
        return counts

    def _count_blocks(self, phase: int, blocks: range) -> Counter[str]:
        """The counts of whole blocks of a phase: of all but the last COUNTED ones, by weight."""
        counted = np.array(blocks[-COUNTED:], np.uint64)
        others = len(blocks) - len(counted)

        # as in `_draw`, but all u at once, as fractions: 53 bits of them are exact
        lanes = np.arange(self.V, dtype=np.uint64)
        u = counted[:, None] * np.uint64(GOLDEN) + lanes * np.uint64(SQRT2)  # modulo 2^64
        u = (u >> np.uint64(11)) / 2**53
        counts = Counter[str]()
        total = sum(self._proportions[phase].values())
        up_to = 0
        before = 0
        for bucket, n in self._proportions[phase].items():
            up_to += n
            placed = int(np.floor(BLOCK * up_to / total + u).sum())
            placed += others * BLOCK * self.V * up_to // total
            counts[bucket] = placed - before
            before = placed
        return counts
