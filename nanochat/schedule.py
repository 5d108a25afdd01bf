"""
How long to train, on how large batches, and how learning rate, momentum and weight decay move on
the way.

Two pure pieces, so that both can be tested against numbers worked out by hand:

    Horizon    from the size of the model: number of steps, batch size, and how far the base
               learning rates and the weight decay, tuned at the reference model (depth 12, batches
               of 2^19 tokens), must be moved
    Schedule   from a step: multipliers

    lr        1 |   ______             momentum .97 |     ________        weight decay 1 |--._
                |  /      `--.__                    |   /         `--._                  |    `-.
              0 |_/_____________`.05            .85 |_/_______________`.90             0 |_______`-._
                warmup    warmdown                   400 steps                             half a cosine

What is known about scaling (constants and rules as in nanochat's scripts/base_train.py):

  - good horizons are a fixed ratio of tokens to parameters, where matrices and the output head
    count as parameters;
  - the best batch size grows as D^0.383 with the tokens D (arxiv.org/abs/2505.13738);
  - a batch of B tokens wants its learning rate multiplied by sqrt(B / B_ref);
  - to keep the time scale of weight decay, B / (lr * wd * D), it follows as
    sqrt(B / B_ref) * D_ref / D (arxiv.org/abs/2405.13698). Both horizons have the same ratio, so
    D_ref / D is a ratio of parameters.

Where warmup and warmdown overlap (short runs), the lower of the two curves counts. If warmup won
until its last step, the curve would jump there, and a run shorter than its warmup would end at a
high rate.

**Another schedule.** A field of `ScheduleSettings` is a flag of scripts.base_train, and a setting
that a run keeps; runs that began without it have its default. `Schedule.lr` may use it. Nothing
else needs to know.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from nanochat.cli import setting

REFERENCE_DEPTH = 12
MOST_STEPS = 10**9  # of a run
REFERENCE_BATCH_TOKENS = 2**19
BATCH_EXPONENT = 0.383

MOMENTUM_START, MOMENTUM_PEAK, MOMENTUM_END = 0.85, 0.97, 0.90
MOMENTUM_WARMUP_STEPS = 400


# ---- horizon -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Horizon:
    """What a run's size comes to."""

    num_iterations: int
    total_batch_size: int  # tokens a step
    batch_lr_scale: float  # multiplies every base learning rate
    weight_decay_scaled: float

    @property
    def total_tokens(self) -> int:
        """Tokens that the whole run trains on."""
        return self.num_iterations * self.total_batch_size


def resolve_horizon(*, num_iterations: int, target_flops: float, target_param_data_ratio: float,
                    total_batch_size: int, weight_decay: float, sequence_len: int,
                    scaling_params: int, reference_scaling_params: int, flops_per_token: float,
                    curriculum_tokens: int = 0) -> Horizon:
    """Settle steps, batch size and scaling from the flags of the same names (-1 switches one off,
    or asks for auto). The first horizon that is set counts: iterations, FLOPs, the curriculum's
    phases, data:parameter ratio. Raises ValueError that names the flag.

    `scaling_params` counts transformer matrices and the output head of the model,
    `reference_scaling_params` those of the same model at REFERENCE_DEPTH; `curriculum_tokens` is
    what all phases last (0: no curriculum).
    """
    size_ratio = scaling_params / reference_scaling_params
    if total_batch_size == -1:
        # a power of two rows, so that any usual number of lanes divides it; the nearest in the log
        tokens = REFERENCE_BATCH_TOKENS * size_ratio**BATCH_EXPONENT
        total_batch_size = sequence_len * 2 ** max(0, round(math.log2(tokens / sequence_len)))
    if total_batch_size <= 0 or total_batch_size % sequence_len:
        raise ValueError(f"--total-batch-size: got {total_batch_size:,} tokens, expected a "
                         f"multiple of --max-seq-len {sequence_len:,} (or -1 for automatic)")
    step_flops = flops_per_token * total_batch_size
    horizons = (("--num-iterations", num_iterations, 1),
                ("--target-flops", target_flops, step_flops),
                ("--curriculum", curriculum_tokens, total_batch_size),
                ("--target-param-data-ratio", int(target_param_data_ratio * scaling_params), total_batch_size))
    chosen = next((horizon for horizon in horizons if horizon[1] > 0), None)
    if chosen is None:
        raise ValueError("no training horizon: set one of --num-iterations, --target-flops, "
                         "--target-param-data-ratio to a positive number")
    flag, total, of_a_step = chosen
    steps = round(total / of_a_step) if flag == "--target-flops" else int(total // of_a_step)
    if steps < 1:
        raise ValueError(f"{flag}: the horizon is less than one step of {total_batch_size:,} "
                         "tokens; lower --total-batch-size or set --num-iterations")
    if steps > MOST_STEPS:
        raise ValueError(f"{flag}: the horizon is {steps:.3g} steps, expected at most {MOST_STEPS:,}")
    batch_lr_scale = math.sqrt(total_batch_size / REFERENCE_BATCH_TOKENS)
    return Horizon(num_iterations=steps, total_batch_size=total_batch_size,
                   batch_lr_scale=batch_lr_scale,
                   weight_decay_scaled=weight_decay * batch_lr_scale / size_ratio)


# ---- schedule ------------------------------------------------------------------------------------

def _ramp(start: float, end: float, progress: float) -> float:
    """The straight line from `start` at progress 0 to `end` at 1, flat outside; exact at both ends."""
    progress = min(1.0, max(0.0, progress))
    return start * (1 - progress) + end * progress


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """schedule"""

    warmup_steps: int = setting(40, "steps over which rates rise", least=0, fixed="what a step computes")
    warmdown_ratio: float = setting(0.65, "share of the run in which rates come down", least=0, most=1,
                                    fixed="what a step computes")
    final_lr_frac: float = setting(0.05, "rates at the end, of the full rates", least=0, most=1,
                                   fixed="what a step computes")


@dataclass(frozen=True)
class Schedule(ScheduleSettings):
    """Multipliers by step, pure functions of the fields. `step` counts optimizer steps already
    done: 0 at first."""

    num_iterations: int
    peak_weight_decay: float = 0.0  # Muon's, already scaled; what `apply` multiplies

    @classmethod
    def of(cls, settings: ScheduleSettings, num_iterations: int, *,
           peak_weight_decay: float) -> "Schedule":
        """The schedule that a run's settings ask for."""
        chosen = {f.name: getattr(settings, f.name) for f in fields(ScheduleSettings)}
        return cls(num_iterations, peak_weight_decay=peak_weight_decay, **chosen)

    @property
    def warmdown_steps(self) -> int:
        """Steps over which the learning rate comes down to its final fraction."""
        return round(self.warmdown_ratio * self.num_iterations)

    def _warmdown(self, step: int) -> float:
        """0 before the warmdown, 1 at the end of the run."""
        start = self.num_iterations - self.warmdown_steps
        return (step - start) / self.warmdown_steps if self.warmdown_steps else 0.0

    def lr(self, step: int) -> float:
        """The multiplier of every learning rate: linear warmup, constant, linear warmdown."""
        rise = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return min(rise, _ramp(1.0, self.final_lr_frac, self._warmdown(step)))

    def momentum(self, step: int) -> float:
        """Muon's momentum (itself, no multiplier)."""
        rise = _ramp(MOMENTUM_START, MOMENTUM_PEAK, step / MOMENTUM_WARMUP_STEPS)
        return min(rise, _ramp(MOMENTUM_PEAK, MOMENTUM_END, self._warmdown(step)))

    def weight_decay(self, step: int) -> float:
        """The multiplier of Muon's weight decay: half a cosine from 1 to 0 at the end of the run."""
        return 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.num_iterations)))

    def apply(self, optimizer: Any, step: int) -> None:
        """Set `lr` in every group of `optimizer.param_groups` (from its `initial_lr`), and
        `momentum` and `weight_decay` in those of kind "muon"."""
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.lr(step)
            if group["kind"] == "muon":
                group["momentum"] = self.momentum(step)
                group["weight_decay"] = self.peak_weight_decay * self.weight_decay(step)

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint, for people: a run goes on with its settings."""
        return {"format_version": 1, **asdict(self)}
