"""Spikes: steps with a loss or gradient norm far above recent ones. With --skip-spikes, they are
not applied.

    loss    3.1  3.0  3.1  9.7  3.0  2.9 ...
                           ^ more than --skip-spikes deviations above the median of 128 applied steps

The median and the median absolute deviation replace the mean and the standard deviation, which a
spike would distort. For a Gaussian, 1.4826 times the median absolute deviation is the standard
deviation. A value far *below* the median is not a spike.

All ranks have the same loss and norm of every step, so they have the same window and limits. The
limits are known before the step, so the device applies them, and the host waits for it only once.
The window is saved in checkpoints, so a resumed run decides like an uninterrupted one. Skipped
steps do not enter the window. So if the loss stays high, every step is skipped, until the run ends
because it has diverged.
"""

import math
import statistics
from collections.abc import Sequence

WINDOW = 128  # recent applied steps in the window
ENOUGH = 16  # with fewer steps in the window, no step counts as a spike
MOST_IN_A_ROW = 10  # after this many skipped steps in a row the run ends
NORMAL = 1.4826  # standard deviation / median absolute deviation of a Gaussian

Window = list[list[float]]  # [loss, gradient norm] of applied steps, oldest first


def remember(window: Window, loss: float, grad_norm: float) -> Window:
    """The window after one more applied step."""
    return [*window, [loss, grad_norm]][-WINDOW:]


def limits(window: Window, sigma: float) -> tuple[float, float]:
    """The loss and the gradient norm above which the next step is a spike; infinite if the window
    has too few steps."""
    if len(window) < ENOUGH:
        return math.inf, math.inf

    def limit(values: Sequence[float]) -> float:
        median = statistics.median(values)
        deviation = statistics.median(abs(value - median) for value in values)
        return median + sigma * NORMAL * deviation

    losses, norms = zip(*window)
    return limit(losses), limit(norms)


def describe(loss: float, grad_norm: float, window: Window, sigma: float) -> str:
    """Why a step is a spike: its loss and gradient norm, and on which side of its limit each is."""
    loss_limit, norm_limit = limits(window, sigma)
    values = [
        ("loss", loss, 6, loss_limit),
        ("gradient norm", grad_norm, 4, norm_limit),
    ]
    parts = []
    for name, value, digits, limit in values:
        side = "within" if value <= limit else "above"
        parts.append(f"{name} {value:.{digits}f} is {side} its limit {limit:.{digits}f}")
    return ", ".join(parts)
