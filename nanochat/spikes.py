"""
Spikes: steps that are not applied, because their loss or gradient norm is far above that of the steps before.

    loss    3.1  3.0  3.1  9.7  3.0  2.9 ...
                           ^ more than SIGMA deviations above the median of the last 128 applied steps

Median and median absolute deviation stand in for mean and standard deviation, which a spike would move itself; 1.4826
times the latter is the standard deviation where values are normal. What is far *below* is no spike.

All ranks have the same totals of every step, so they have the same window and come to the same limits, which are known
before the step: the device compares, and the host waits once. The window is in the checkpoint, so a resumed run decides
as one that was never interrupted. A step that was skipped is not part of the window. So where the loss rises for good,
every step is skipped; then the run has diverged, and it ends.
"""

import math
import statistics
from collections.abc import Sequence

WINDOW = 128  # applied steps that are remembered
ENOUGH = 16  # applied steps before anything is judged
MOST_IN_A_ROW = 10  # skipped steps before the run ends
NORMAL = 1.4826  # standard deviations in a median absolute deviation

Window = list[list[float]]  # [loss, gradient norm] of applied steps, oldest first


def remember(window: Window, loss: float, grad_norm: float) -> Window:
    """The window after one more applied step."""
    return [*window, [loss, grad_norm]][-WINDOW:]


def limits(window: Window, sigma: float) -> tuple[float, float]:
    """The loss and the gradient norm above which the next step is a spike; infinite while too few steps are known."""
    if len(window) < ENOUGH:
        return math.inf, math.inf
    losses, norms = zip(*window)
    return _limit(losses, sigma), _limit(norms, sigma)


def _limit(values: Sequence[float], sigma: float) -> float:
    """`sigma` robust deviations above the median."""
    median = statistics.median(values)
    return median + sigma * NORMAL * statistics.median(abs(value - median) for value in values)
