"""
The plan of a run: made from its settings, kept in RUN/plan.json, told, and held against what the run is allowed.

A plan is made once: it is kept under the fingerprint of all that it depends on, and a restart reads it.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanochat.checkpoint import load_checkpoint
from nanochat.common import print0, read_json
from nanochat.order import StreamConfig
from nanochat.plan import Plan, describe, make_plan, plan_key, problem, warnings
from nanochat.run_data import open_data, open_source, stream_config
from nanochat.run_dir import PLAN_NAME
from nanochat.start_run import Start, find_run_data, samples_taken
from nanochat.tokenizer import RustBPETokenizer

log = logging.getLogger(__name__)


def rehearse(run_dir: Path, start: Start, settings: Mapping[str, Any], tokenizer: RustBPETokenizer, num_steps: int
             ) -> Plan | None:
    """The plan of a run that is about to start, told to people if it is a new one; None for text without a curriculum,
    which nothing limits. ValueError for a run that would halt, unless its --plan is to warn."""
    if settings["curriculum"] is None and settings["data_format"] == "text":
        return None
    plan = make_run_plan(run_dir, start, settings, tokenizer, num_steps, keep=True)
    print0("\n".join(describe(plan)))
    why = problem(plan)
    if why and settings["plan"] == "error":
        raise ValueError(why)
    for line in [*warnings(plan), *([why] if why else [])]:
        log.warning("%s", line)
    return plan


def make_run_plan(run_dir: Path, start: Start, settings: Mapping[str, Any], tokenizer: RustBPETokenizer, num_steps: int,
                  *, keep: bool = False, num_workers: int | None = None) -> Plan:
    """The plan of the run that a command stands for; with `keep` the one in RUN/plan.json if it still holds. Writes
    nothing. FileNotFoundError or ValueError for files that are gone, changed or broken."""
    config = stream_config(settings)
    manifests = find_run_data(run_dir, start, settings)["train"]
    if not isinstance(config, StreamConfig):
        from nanochat.sample_plan import plan_samples

        return plan_samples(config, open_data({"train": manifests, "val": {}}, tokenizer).train, num_steps=num_steps,
                            rows_per_step=settings["total_batch_size"] // config.T,
                            taken=samples_taken(start, settings, num_steps)[0])
    sources = {bucket: open_source(manifests[bucket], tokenizer, as_stored=not config.framed)
               for bucket in (config.curriculum.buckets if config.curriculum else manifests)}
    given: dict[str, Any] = {
        "rows_per_step": settings["total_batch_size"] // config.T, "num_steps": num_steps,
        "drop_dry": settings["allow_bucket_exhaustion"],
        "begun": [settings["init_from"] if settings["init_data"] == "continue" else None, sorted(start.skips.items())]}
    key = plan_key(config, sources, **given)
    kept = _kept(run_dir, key) if keep else None
    if kept is not None:
        return kept
    cursors = None if start.position is None else load_checkpoint(start.position, verify=False).cursors
    given["num_steps"] += sum(n for step, n in start.skips.items() if step >= start.step)  # their rows are taken too
    plan = make_plan(config, sources, cursors=cursors, start_step=start.step,
                     num_workers=num_workers or os.cpu_count() or 1, **given)
    return replace(plan, key=key)


def _kept(run_dir: Path, key: str) -> Plan | None:
    """The plan in RUN/plan.json, if it has that key. One that cannot be read costs nothing but time."""
    try:
        kept = read_json(run_dir / PLAN_NAME)
        return Plan.from_json(kept) if kept["key"] == key else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
