"""
What several benches measure with.
"""

import statistics
from pathlib import Path


def anonymous_mb() -> float:
    """RssAnon of this process, MB: what is not backed by files."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def fastest_tenth(rates: list[float]) -> float:
    """The rate that a tenth of the windows exceed: what a processor that others share gives undisturbed."""
    return statistics.quantiles(rates, n=10)[-1]
