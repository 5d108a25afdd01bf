"""The number of steps and the batch size, and the schedules of learning rate, momentum and weight
decay.

Both parts are pure functions:

    Horizon    model size -> number of steps, batch size, and factors for the base learning rates and the weight decay,
               which are tuned at depth 12 with batches of 2^19 tokens
    Schedule   step -> multipliers

    lr        1 |   ______             momentum .97 |     ________        weight decay 1 |--._
                |  /      `--.__                    |   /         `--._                  |    `-.
              0 |_/_____________`.05            .85 |_/_______________`.90             0 |_______`-._
                warmup    warmdown                   400 steps                             half a cosine

The scaling rules and their constants are those of nanochat's scripts/base_train.py:

  - the number of tokens is a fixed multiple of the number of parameters (matrices and output head);
  - the best batch size grows as D^0.383 with the number of tokens D (arxiv.org/abs/2505.13738);
  - the learning rate for batches of B tokens is multiplied by sqrt(B / B_ref);
  - to keep the time scale of weight decay, B / (lr * wd * D), constant, the decay is multiplied by
    sqrt(B / B_ref) * D_ref / D (arxiv.org/abs/2405.13698). D_ref / D is a ratio of parameter counts,
    because D is a multiple of the count.

If warmup and warmdown overlap (short runs), the lower curve applies. With the warmup alone until
its last step, the curve would jump there, and a run shorter than its warmup would end at a high
rate.

**Another schedule.** Add a field to `ScheduleSettings`, and use it in `Schedule.lr`. The field
becomes a flag of scripts.base_train and a setting of the run; runs that began without it use its
default.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from nanochat.cli import Decides, setting

if TYPE_CHECKING:
    import torch

REFERENCE_DEPTH = 12
MOST_STEPS = 10**9
# what a change of the horizon does
HORIZON = "may move the end of the run: schedules then stretch or shrink from here on"
REFERENCE_BATCH_TOKENS = 2**19
BATCH_EXPONENT = 0.383

MOMENTUM_START = 0.85
MOMENTUM_PEAK = 0.97
MOMENTUM_END = 0.90
MOMENTUM_WARMUP_STEPS = 400


# ---- horizon -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HorizonSettings:
    """length of the run (the first one set applies; a curriculum takes precedence over
    --target-param-data-ratio)"""

    num_iterations: int = setting(
        -1, "number of optimizer steps; -1: not set", note=HORIZON, least=1, most=MOST_STEPS
    )
    target_flops: float = setting(-1.0, "number of FLOPs to spend; -1: not set", note=HORIZON)
    target_param_data_ratio: float = setting(
        12.0, "tokens per parameter of the layers and the output head; -1: not set", note=HORIZON
    )


@dataclass(frozen=True)
class Horizon:
    """The length and batch size of a run, and the scaling that follows from them."""

    num_iterations: int
    total_batch_size: int  # tokens per step
    batch_lr_scale: float  # multiplies every base learning rate
    weight_decay_scaled: float
    # of a fork: steps and tokens of its parent, at the fork
    first_step: int = 0
    first_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens that the whole run trains on, with those of a fork's parent."""
        return self.first_tokens + self.own_tokens

    @property
    def own_steps(self) -> int:
        """Steps that the run takes itself, without those of a fork's parent."""
        return self.num_iterations - self.first_step

    @property
    def own_tokens(self) -> int:
        """Tokens that these steps train on."""
        return self.own_steps * self.total_batch_size


def resolve_horizon(
    *,
    num_iterations: int,
    target_flops: float,
    target_param_data_ratio: float,
    total_batch_size: int,
    weight_decay: float,
    sequence_len: int,
    scaling_params: int,
    reference_scaling_params: int,
    flops_per_token: float,
    curriculum_tokens: int = 0,
    first_step: int = 0,
    first_tokens: int = 0,
) -> Horizon:
    """Compute steps, batch size and scaling from arguments named like flags. A horizon of -1 is
    off, and a batch size of -1 is automatic. The first horizon that is set applies: iterations,
    FLOPs, curriculum, data:parameter ratio. Raises a ValueError that names the flag.

    scaling_params: parameters in the model's transformer matrices and output head.
    reference_scaling_params: those of the same model at REFERENCE_DEPTH. curriculum_tokens: where
    all phases end (0: no curriculum). first_step, first_tokens: of a fork, see `Horizon`; the
    targets include them.
    """
    size_ratio = scaling_params / reference_scaling_params
    total_batch_size = _batch_tokens(total_batch_size, sequence_len, size_ratio)
    ratio_tokens = int(target_param_data_ratio * scaling_params)
    horizons = (
        _Target("--num-iterations", num_iterations, 1, first_step),
        _Target(
            "--target-flops",
            target_flops,
            flops_per_token * total_batch_size,
            flops_per_token * first_tokens,
        ),
        _Target("--curriculum", curriculum_tokens, total_batch_size, first_tokens),
        _Target("--target-param-data-ratio", ratio_tokens, total_batch_size, first_tokens),
    )
    batch_lr_scale = math.sqrt(total_batch_size / REFERENCE_BATCH_TOKENS)
    return Horizon(
        num_iterations=first_step + _num_steps(horizons, total_batch_size, first_step),
        total_batch_size=total_batch_size,
        batch_lr_scale=batch_lr_scale,
        weight_decay_scaled=weight_decay * batch_lr_scale / size_ratio,
        first_step=first_step,
        first_tokens=first_tokens,
    )


class _Target(NamedTuple):
    """How long to train: until `done` and the steps add up to `total`."""

    flag: str
    total: float  # steps, FLOPs or tokens; 0 or less: not set
    per_step: float
    done: float  # of `total`, by a fork's parent


def _batch_tokens(total_batch_size: int, sequence_len: int, size_ratio: float) -> int:
    """Tokens per step; for -1, those that suit a model of `size_ratio` times the reference's
    size. ValueError unless they are whole rows."""
    if total_batch_size == -1:
        # rows per step: the nearest power of two on a log scale, so that the usual numbers of lanes
        # divide them
        tokens = REFERENCE_BATCH_TOKENS * size_ratio**BATCH_EXPONENT
        return sequence_len * 2 ** max(0, round(math.log2(tokens / sequence_len)))
    if total_batch_size <= 0 or total_batch_size % sequence_len:
        raise ValueError(
            f"--total-batch-size: got {total_batch_size:,} tokens, expected a multiple of --max-seq-len "
            f"{sequence_len:,} (or -1 for automatic)"
        )
    return total_batch_size


def _num_steps(targets: Sequence[_Target], total_batch_size: int, first_step: int) -> int:
    """The number of further steps that the first target that is set asks for. ValueError if none is set, or
    if it asks for no step or too many."""
    chosen = next((target for target in targets if target.total > 0), None)
    if chosen is None:
        raise ValueError(
            "no training horizon: set one of --num-iterations, --target-flops, "
            "--target-param-data-ratio to a positive number"
        )
    if chosen.flag == "--target-flops":
        steps = round((chosen.total - chosen.done) / chosen.per_step)
    else:
        steps = int((chosen.total - chosen.done) // chosen.per_step)
    if steps < 1:
        raise ValueError(
            f"{chosen.flag}: the horizon is less than one step of {total_batch_size:,} tokens after step "
            f"{first_step:,}; name more steps with --num-iterations, lower --total-batch-size, or fork an earlier step"
        )
    if steps > MOST_STEPS:
        raise ValueError(
            f"{chosen.flag}: the horizon is {steps:.3g} steps, expected at most {MOST_STEPS:,}"
        )
    return steps


# ---- schedule ------------------------------------------------------------------------------------


def _ramp(start: float, end: float, progress: float) -> float:
    """Linear from `start` at progress 0 to `end` at progress 1, constant outside; exact at both
    ends."""
    progress = min(1.0, max(0.0, progress))
    return start * (1 - progress) + end * progress


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """schedule"""

    warmup_steps: int = setting(
        40, "steps over which learning rates rise", least=0, decides=Decides.STEP
    )
    warmdown_ratio: float = setting(
        0.65,
        "share of the run over which learning rates fall",
        least=0,
        most=1,
        decides=Decides.STEP,
    )
    warmdown_steps: int = setting(
        -1,
        "steps over which learning rates fall, in place of --warmdown-ratio; -1: not set",
        least=0,
        decides=Decides.STEP,
    )
    final_lr_frac: float = setting(
        0.05,
        "learning rates at the end, as a fraction of the full rates",
        least=0,
        most=1,
        decides=Decides.STEP,
    )


@dataclass(frozen=True)
class Schedule(ScheduleSettings):
    """Multipliers by step, as pure functions of the fields. `step` is the number of optimizer steps
    already done."""

    num_iterations: int
    peak_weight_decay: float = 0.0  # Muon's, already scaled; `apply` multiplies it

    @classmethod
    def of(
        cls, settings: ScheduleSettings, num_iterations: int, *, peak_weight_decay: float
    ) -> "Schedule":
        """The schedule of a run with these settings."""
        chosen = {f.name: getattr(settings, f.name) for f in fields(ScheduleSettings)}
        return cls(num_iterations, peak_weight_decay=peak_weight_decay, **chosen)

    @property
    def falls_for(self) -> int:
        """Steps over which the learning rate falls to its final fraction."""
        if self.warmdown_steps >= 0:
            return self.warmdown_steps
        return round(self.warmdown_ratio * self.num_iterations)

    def _warmdown(self, step: int) -> float:
        """Progress of the warmdown: at most 0 before it, 1 at the end of the run."""
        start = self.num_iterations - self.falls_for
        return (step - start) / self.falls_for if self.falls_for else 0.0

    def lr(self, step: int) -> float:
        """The multiplier of every learning rate: linear warmup, constant, linear warmdown."""
        rise = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return min(rise, _ramp(1.0, self.final_lr_frac, self._warmdown(step)))

    def highest_lr(self) -> float:
        """The largest multiplier of all steps: less than 1 if rates fall before the warmup ends."""
        steps = range(self.num_iterations - 1)
        return self.lr(bisect.bisect_left(steps, True, key=lambda s: self.lr(s + 1) <= self.lr(s)))

    def momentum(self, step: int) -> float:
        """Muon's momentum itself, not a multiplier."""
        rise = _ramp(MOMENTUM_START, MOMENTUM_PEAK, step / MOMENTUM_WARMUP_STEPS)
        return min(rise, _ramp(MOMENTUM_PEAK, MOMENTUM_END, self._warmdown(step)))

    def weight_decay(self, step: int) -> float:
        """The multiplier of Muon's weight decay: half a cosine from 1 to 0 at the end of the
        run."""
        return 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.num_iterations)))

    def apply(self, optimizer: "torch.optim.Optimizer", step: int) -> None:
        """Set `lr` in every group of `optimizer.param_groups` (from its `initial_lr`), and
        `momentum` and `weight_decay` in groups of kind "muon"."""
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.lr(step)
            if group["kind"] == "muon":
                group["momentum"] = self.momentum(step)
                group["weight_decay"] = self.peak_weight_decay * self.weight_decay(step)

    def state(self) -> dict[str, Any]:
        """The schedule as plain values. A resumed run computes its own, and reports what differs
        from those saved."""
        return {"format_version": 1, **asdict(self)}

    @classmethod
    def complete(cls, state: Mapping[str, Any]) -> dict[str, Any]:
        """A saved `state`, with the settings that the code has gained since then at their defaults."""
        defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        return {**defaults, **state}
