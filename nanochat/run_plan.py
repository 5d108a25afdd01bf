"""
The plan of a run, kept in RUN/plan.json and held against what the run is allowed.

A plan is made once: it is kept under the fingerprint of all that it depends on, and a restart reads it.
"""

import logging
import os
from dataclasses import replace
from pathlib import Path

from nanochat.common import print0, read_json
from nanochat.order import StreamConfig
from nanochat.plan import Plan, describe, make_plan, plan_key, problem, warnings
from nanochat.run_data import RunData, stream_config
from nanochat.run_dir import PLAN_NAME
from nanochat.start_run import Start

log = logging.getLogger(__name__)


def rehearse(start: Start, data: RunData) -> Plan:
    """The plan of a run that is about to start, told to people. ValueError for a run that would halt, unless its --plan
    is to warn."""
    plan = make_run_plan(start, data, keep=True)
    print0("\n".join(describe(plan)))
    why = problem(plan)
    if why and start.settings.plan == "error":
        raise ValueError(why)
    for line in [*warnings(plan), *([why] if why else [])]:
        log.warning("%s", line)
    return plan


def make_run_plan(start: Start, data: RunData, *, keep: bool = False, num_workers: int | None = None) -> Plan:
    """The plan of the run that a command stands for; with `keep` the one in RUN/plan.json if it still holds. Writes
    nothing."""
    settings, config = start.settings, stream_config(start.settings)
    rows, num_steps = settings.total_batch_size // config.T, start.horizon.num_iterations
    if not isinstance(config, StreamConfig):
        from nanochat.sample_plan import plan_samples

        return plan_samples(config, data.train, num_steps=num_steps, rows_per_step=rows, taken=start.samples_taken())
    mixed = config.curriculum.buckets if config.curriculum else data.train
    sources = {bucket: data.train[bucket] for bucket in mixed}
    begun = [settings.init_from if settings.init_data == "continue" else None, settings.skip_steps]
    key = plan_key(config, sources, rows_per_step=rows, num_steps=num_steps, drop_dry=settings.allow_bucket_exhaustion,
                   begun=begun)
    kept = _kept(start.run_dir, key) if keep else None
    if kept is not None:
        return kept
    plan = make_plan(config, sources, cursors=start.cursors, start_step=start.step, rows_per_step=rows,
                     num_steps=num_steps, drop_dry=settings.allow_bucket_exhaustion,
                     num_workers=num_workers or os.cpu_count() or 1)
    return replace(plan, key=key)


def _kept(run_dir: Path, key: str) -> Plan | None:
    """The plan in RUN/plan.json, if it has that key. One that cannot be read costs nothing but time."""
    try:
        kept = read_json(run_dir / PLAN_NAME)
        return Plan.from_json(kept) if kept["key"] == key else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
