"""
The plan of a run, for people: kept in RUN/plan.json, told in a table, and held against what the run is allowed.

    phase   from step         tokens   web      code     math
    1               0      5,000,000   60.0 %   30.0 %   10.0 %
    2           2,441      5,000,000   30.0 %   30.0 %   40.0 %

    bucket      there       asked     trained      usable   passes   cropped   repeated   padded
    code    4,120,388   3,000,000   3,000,000   4,083,712     0.75     1.1 %      0.0 %    0.0 %

A plan is made once: it is kept under the fingerprint of all that it depends on, and a restart reads it.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat.checkpoint import load_checkpoint
from nanochat.common import print0, read_json
from nanochat.order import StreamConfig
from nanochat.plan import BucketPlan, Plan, make_plan, plan_key
from nanochat.rehearsal import with_lengths
from nanochat.run_data import open_data, open_source, stream_config
from nanochat.run_dir import PLAN_NAME
from nanochat.start_run import Start, find_run_data, samples_taken
from nanochat.tokenizer import RustBPETokenizer

log = logging.getLogger(__name__)

START_BUDGET = 300_000_000  # tokens that a run packs for accounts alone before it starts
DRY_WAYS = ("shorten the run or mix less of it, allow more passes (max_epochs), or go on without it where it is dry "
            "(--allow-bucket-exhaustion)")


def rehearse(run_dir: Path, start: Start, settings: Mapping[str, Any], tokenizer: RustBPETokenizer, num_steps: int
             ) -> Plan | None:
    """The plan of a run that is about to start, told to people if it is a new one; None for text without a curriculum,
    which nothing limits. ValueError for a run that would halt, unless its --plan is to warn."""
    if settings["curriculum"] is None and settings["data_format"] == "text":
        return None
    plan = make_run_plan(run_dir, start, settings, tokenizer, num_steps, keep=True, budget=START_BUDGET,
                         num_workers=os.cpu_count() or 1)
    print0("\n".join(describe(plan)))
    why = problem(plan)
    if why and settings["plan"] == "error":
        raise ValueError(why)
    for line in [*warnings(plan), *([why] if why else [])]:
        log.warning("%s", line)
    return plan


def make_run_plan(run_dir: Path, start: Start, settings: Mapping[str, Any], tokenizer: RustBPETokenizer, num_steps: int,
                  *, keep: bool = False, **more: Any) -> Plan:
    """The plan of the run that a command stands for; with `keep` the one in RUN/plan.json if it still holds. Writes
    nothing. `more` goes to `make_plan`. FileNotFoundError or ValueError for files that are gone, changed or broken."""
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
        "tokenizer": tokenizer.fingerprint, "drop_dry": settings["allow_bucket_exhaustion"],
        "begun": [settings["init_from"] if settings["init_data"] == "continue" else None, sorted(start.skips.items())]}
    kept = _kept(run_dir, plan_key(config, sources, **given)) if keep else None
    if kept is not None:
        return kept
    cursors = None if start.position is None else load_checkpoint(start.position, verify=False).cursors
    given["num_steps"] += sum(n for step, n in start.skips.items() if step >= start.step)  # their rows are taken too
    return make_plan(config, {b: with_lengths(s) for b, s in sources.items()}, cursors=cursors, start_step=start.step,
                     **given, **more)


def _kept(run_dir: Path, key: str) -> Plan | None:
    """The plan in RUN/plan.json, if it has that key. One that cannot be read costs nothing but time."""
    try:
        kept = read_json(run_dir / PLAN_NAME)
        return Plan.from_json(kept) if kept["key"] == key else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def problem(plan: Plan) -> str:
    """What keeps the run from its last step, in a sentence; empty where nothing does. An estimate never says so."""
    if not plan.halt or plan.estimate:
        return ""
    about = f"the run halts before step {plan.steps:,} of {plan.num_steps:,}: {plan.halt}"
    if plan.allowed:
        return f"{about}; shorten the run, or allow more passes (max_epochs)"
    return f"{about}; {DRY_WAYS}, or train until there with --plan warn"


def warnings(plan: Plan) -> list[str]:
    """What a person should know before starting, a sentence each."""
    found = []
    for name in plan.short:
        bucket = plan.buckets[name]
        about = "probably " if plan.estimate else ""
        others = "".join(f"; about {tokens:,} with {lanes} lanes" for lanes, tokens in bucket.other_lanes.items())
        found.append(f"bucket {name!r} {about}runs dry at step {bucket.dry_step:,}: {bucket.asked:,} tokens are asked "
                     f"of it, {usable(bucket)} are usable with {plan.V} lanes{others}")
    if plan.estimate and plan.halt:
        found.append(f"the run would halt there; {DRY_WAYS}")
    return found


def usable(bucket: BucketPlan) -> str:
    """Tokens to be had before the first lane is dry, as people write them."""
    if bucket.usable is None:
        return "any number"
    return f"{bucket.usable:,}" if bucket.usable_exact else f">= {bucket.usable:,}"


def describe(plan: Plan) -> list[str]:
    """The plan as lines of text."""
    total, T = plan.rows_per_step * plan.T, plan.T
    lines = [f"plan: {plan.num_steps:,} steps of {total:,} tokens from {plan.V} lanes"
             + (", estimated from a sample of the text" if plan.estimate else "")]
    if plan.samples is not None:
        lines += [f"Megatron's order: {plan.samples['taken']:,} samples of {T:,} tokens, {plan.samples['there']:,} are "
                  f"there over {plan.samples['epochs']} epochs of the prefixes"]
    names = list(plan.buckets)
    if len(plan.phases) > 1 or len(names) > 1:
        rows = [[str(i), f"{phase['first_step']:,}", f"{phase['tokens']:,}",
                 *(f"{phase['asked'][name] / max(1, phase['tokens']):.1%}" for name in names)]
                for i, phase in enumerate(plan.phases, 1)]
        lines += _table(["phase", "from step", "tokens", *names], rows)
    about = "" if plan.exact_accounts and not plan.estimate else "~"
    rows = []
    for name, bucket in plan.buckets.items():
        account = bucket.account
        taken, slots = max(1, account["read"] + account["bos"] + account["repeated"]), max(1, account["rows"] * (T + 1))
        rows.append([name, f"{bucket.documents:,}", f"{about if plan.estimate else ''}{bucket.tokens:,}",
                     f"{bucket.asked:,}", f"{bucket.trained:,}", usable(bucket),
                     f"{about}{bucket.passes:.2f}" + (f" of {bucket.max_epochs}" if bucket.max_epochs else ""),
                     *(f"{about}{share:.2%}" for share in (account["cropped"] / taken, account["repeated"] / taken,
                                                           account["padded"] / slots)),
                     "-" if bucket.dry_step is None else f"{bucket.dry_step:,}"])
    return lines + _table(["bucket", "documents", "tokens there", "asked", "trained", "usable", "passes", "cropped",
                           "repeated", "padded", "dry at step"], rows)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Columns side by side, the first flush left."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    return ["  " + "   ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (head, *rows)]
