"""
The plan of a run in words, printed before it starts: what it reads, and what should stop it.

    rehearse        with a curriculum, or `binned` rows: the plan, exact or estimated
    print_passes    without: the size of the data, and the passes over them
    readings_text   in an order of its own: the same, from what the order says

An exact plan that halts refuses the run, and so does one whose rows would train on almost none of
the data; --plan=warn only warns.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanochat.common import counted, few, print0, table
from nanochat.order import StreamConfig
from nanochat.plan import (
    Lengths,
    Plan,
    Sample,
    Starting,
    crops,
    make_run_plan,
    repeating_lanes,
    sample_rows,
    share_sizes,
)
from nanochat.run_order import Reading, stream_config
from nanochat.sources import RunData, Source
from nanochat.stream import token_share

log = logging.getLogger(__name__)

MUCH_CROPPED = 0.1  # a larger share of cropped tokens causes a warning
MOST_LOST = 0.9  # a larger share on which no row trains is refused, unless --plan says otherwise


def rehearse(start: Starting, data: RunData) -> Plan:
    """Make and print the plan of a run that is starting.

    ValueError if an exact plan halts, unless --plan=warn.
    """
    plan = make_run_plan(start, data)
    print0("\n".join(plan_lines(plan)))
    if why := refusal(plan, start, data):
        raise ValueError(why)
    for line in filter(None, [*notes_of(plan, start, data), problem(plan)]):
        log.warning("%s", line)
    return plan


def _one_pass(
    config: StreamConfig, bucket: str, source: Source, sample: Sample, trained: int
) -> tuple[float, float]:
    """(tokens, with BOS, that a pass over a bucket puts into rows; the share of its tokens that no row
    holds). What is cropped is measured in rows, as in a plan: many documents are cropped to fill rows
    that are longer than they are."""
    T = config.T
    lengths = sample.lengths
    emitted = sample.total(lengths)
    cropped = 0.0
    if crops(config):
        account = sample_rows(config, bucket, Lengths(source, config, sample), trained)
        cropped = token_share(account, "cropped")
        emitted *= 1 - cropped
    elif config.layout == "bestfit":
        # each continuation is BOS, overlap and up to T - overlap new tokens
        beyond = np.maximum(lengths - T - 1, 0)
        added = (config.overlap + 1) * np.ceil(beyond / (T - config.overlap))
        emitted += sample.total(added)
    return emitted, cropped


def _lost(sample: Sample, T: int, cropped: float) -> float:
    """The share of the new tokens of a pass on which no row trains, if rows hold all tokens but the
    share `cropped`. A stored window begins with what it repeats of the one before, so rows hold
    that, without a loss."""
    again = sample.total(np.minimum(sample.repeated, T + 1))
    kept = sample.total(sample.lengths) * (1 - cropped) - again
    return 1 - max(0.0, kept) / max(1.0, sample.total(sample.lengths - sample.repeated))


def print_passes(start: Starting, data: RunData) -> None:
    """For a run without a curriculum: print the size of its data in tokens, exact for files that are
    not large, otherwise estimated from a few hundred documents, and its passes over them. Its data
    cannot run dry, so only `binned` rows need a plan. ValueError with --plan=error if the rows of a
    new run would train on almost none of its tokens."""
    settings = start.settings
    [(bucket, source)] = data.train.items()
    T = settings.max_seq_len
    config = stream_config(settings)
    assert isinstance(config, StreamConfig), "no other order has a plan"
    trained = start.horizon.total_tokens
    sample = Sample(source)
    about = "" if sample.is_whole else "about "
    emitted, cropped = _one_pass(config, bucket, source, sample, trained)
    # the last token of a row of concat is the next one's first
    per_row = T if settings.packing == "concat" else T + 1
    passes = trained / T * per_row / emitted
    why = refuse_waste("its data", passes=passes, lost=_lost(sample, T, cropped), about=about)
    if why and settings.plan == "error" and _is_new(start):
        raise ValueError(why)
    tokens = round(sample.total(sample.lengths - 1 - sample.repeated))  # without BOS
    print0(f"data: {about}{tokens:,} tokens; this run reads them {two_digits(passes)} times")
    for line in reading_notes(
        "its data",
        trained=trained,
        tokens=tokens,
        passes=passes,
        cropped=cropped,
        about=about,
    ):
        log.warning("%s", line)
    if repeating := _repeats("its data", start, bucket, source, passes):
        log.warning("%s", repeating)


def two_digits(number: float) -> str:
    """A number with two significant digits, without an exponent: 0.071, 1.7, 106."""
    if number < 0.001:
        return "less than 0.001"
    return f"{number:.2g}" if number < 10 else f"{number:,.0f}"


def readings_text(readings: Mapping[str, Reading]) -> str:
    """What a run reads in an order without a plan, as a sentence: the passes over each bucket, the most
    first. "" if nothing is known."""
    if not readings:
        return ""
    tokens = sum(reading.tokens for reading in readings.values())
    most_first = sorted(readings, key=lambda name: -readings[name].passes)
    often = few(f"{name} {two_digits(readings[name].passes)} times" for name in most_first)
    return f"data: {tokens:,} tokens; this run reads {often}"


# ---- what should stop a run, or be said first ----------------------------------------------------


def repeats(plan: Plan, start: Starting, data: RunData) -> list[str]:
    """A sentence for each bucket with too few documents for the lanes of a new run. Not for one that
    runs dry: `warnings` speaks of it."""
    sentences = []
    for name, bucket in plan.buckets.items():
        if bucket.dry_step is None:
            of = _data_of(plan, name)
            sentences.append(_repeats(of, start, name, data.train[name], bucket.passes))
    return [*filter(None, sentences)]


def _repeats(data: str, start: Starting, bucket: str, source: Source, passes: float) -> str:
    """Says that some lanes read again what others read, and what to do. A lane that is through its
    share of the documents, or has none, goes on with the share of another lane."""
    config = stream_config(start.settings)
    if not _is_new(start) or not isinstance(config, StreamConfig):
        return ""
    sizes = share_sizes(config, bucket, source)
    number = repeating_lanes(sizes, passes)
    if not number:
        return ""
    return (
        f"{data} has {counted(int(source.groups.sum()), 'document')} for {counted(config.V, 'lane')}: "
        f"{number} of them read again what others read, so the run sees some text several times before it has "
        f"seen the rest; use fewer --lanes, or more documents"
    )


def _ways(plan: Plan) -> str:
    """What to do about a bucket that runs dry."""
    ways = ["shorten the run", "add data"]
    if plan.V > 1:
        ways.append("try fewer --lanes")
    if plan.crops:
        ways.append("use --long-docs=split")
    ways.append(
        "give the bucket less weight or more passes (max_epochs in the curriculum; of a run that has begun, in that "
        "of a fork)"
    )
    if len(plan.buckets) > 1 and not plan.allowed:
        ways.append("continue with the others once it is dry (--allow-bucket-exhaustion)")
    return f"{', '.join(ways[:-1])}, or {ways[-1]}"


def problem(plan: Plan) -> str:
    """A sentence that says why the run will not reach its last step, or by an estimate probably not.
    Empty if it will."""
    if not plan.halt:
        return ""
    by = "by this estimate, " if plan.estimate else ""
    return f"{by}the run halts before step {plan.steps:,} of {plan.num_steps:,}: {plan.halt}; {_ways(plan)}"


def refusal(plan: Plan, start: Starting, data: RunData) -> str:
    """A sentence that says why a run does not start with --plan=error: its rows would train on almost
    none of the data, or it would halt by an exact plan. Empty if it does."""
    if start.settings.plan != "error":
        return ""
    about = "about " if plan.estimate else ""
    judged = plan.buckets if plan.crops and _is_new(start) else {}
    for name, bucket in judged.items():
        lost = bucket.cropped
        if bucket.windows:
            lost = _lost(Sample(data.train[name]), plan.T, lost)
        of = _data_of(plan, name)
        if why := refuse_waste(of, passes=bucket.passes, lost=lost, about=about):
            return why
    if plan.halt and not plan.estimate:
        return f"{problem(plan)}; or train up to that step with --plan=warn"
    return ""


def _is_new(start: Starting) -> bool:
    """Whether a run can still choose how it packs: it is neither resumed nor a fork."""
    return not start.config and start.settings.fork is None


def refuse_waste(data: str, *, passes: float, lost: float, about: str) -> str:
    """A sentence that says why a run should not start, because it would train again and again on
    little more than the beginnings of its documents (say on the title pages of books). Empty if it
    should, and for runs of less than one pass, as tests are. `lost`: see `_lost`."""
    if passes <= 1 or lost <= MOST_LOST:
        return ""
    return (
        f"--long-docs=crop: no row would train on {about}{lost:.0%} of the tokens of {data}, because rows hold the "
        f"beginnings of documents only, and what a stored window repeats of the one before has no loss; use "
        f"--long-docs=split, or train on the beginnings with --plan=warn"
    )


def _data_of(plan: Plan, bucket: str) -> str:
    """How sentences name the data of a bucket."""
    return "its data" if len(plan.buckets) == 1 else f"bucket {bucket!r}"


def notes_of(plan: Plan, start: Starting, data: RunData) -> list[str]:
    """All warnings before the start, one sentence each."""
    return [*warnings(plan), *repeats(plan, start, data)]


def warnings(plan: Plan) -> list[str]:
    """Warnings that a plan alone gives."""
    dry = []
    notes = []
    for name, bucket in plan.buckets.items():
        notes += reading_notes(
            _data_of(plan, name),
            trained=bucket.trained,
            tokens=bucket.tokens,
            about="about " if plan.estimate else "",
            passes=0.0 if bucket.max_epochs else bucket.passes,
            cropped=bucket.cropped if plan.crops else 0.0,
        )
        if bucket.dry_step is None or bucket.usable is None:
            continue
        probably = "probably " if plan.estimate else ""
        dry.append(
            f"bucket {name!r} {probably}runs dry at step {bucket.dry_step:,}: the mix requests {bucket.asked:,} "
            f"tokens, and {bucket.usable:,} are usable with {counted(plan.V, 'lane')}"
        )
    return dry + notes


def reading_notes(
    data: str,
    *,
    trained: int,
    tokens: int,
    passes: float,
    cropped: float,
    about: str = "about ",
) -> list[str]:
    """Warnings for a run that trains on `trained` tokens of `data`, which has `tokens`.

    One sentence if many tokens are cropped, and one if the run reads the data clearly more than
    once. `cropped`: 0 unless long documents are cropped.
    """
    notes = []
    if cropped > MUCH_CROPPED:
        notes.append(
            f"{about}{cropped:.0%} of the tokens of {data} are cropped, where documents do not fit into what is left "
            f"of a row; --long-docs=split crops none, a longer --max-seq-len crops fewer"
        )
    if passes > 1.05:  # last, and so just above the verdict
        notes.append(
            f"the run reads {data} {about}{passes:.1f} times: it trains on {trained:,} tokens (with overlaps), and "
            f"{data} has {about}{tokens:,} (with what is cropped)"
        )
    return notes


# ---- tables --------------------------------------------------------------------------------------


def plan_lines(plan: Plan) -> list[str]:
    """The plan as lines of text."""
    tokens_per_step = plan.rows_per_step * plan.T
    first_step = plan.phases[0]["first_step"]
    steps = counted(plan.num_steps - first_step, "step")
    title = f"plan: {steps} of {tokens_per_step:,} tokens from {counted(plan.V, 'lane')}"
    if first_step:
        title += f", from step {first_step:,} on"
    if plan.estimate:
        title += ", estimated from a sample of the text"
    tables = _buckets_table(plan)
    if len(plan.phases) > 1 or len(plan.buckets) > 1:
        tables = _phases_table(plan) + tables
    return [title, *(f"  {line}" for line in tables)]


def _phases_table(plan: Plan) -> list[str]:
    """When each phase begins, and what it mixes."""
    rows = []
    for number, phase in enumerate(plan.phases, 1):
        tokens = phase["tokens"]
        if tokens == 0 and phase["first_step"] < plan.num_steps:
            continue  # it ended before a fork began
        shares = [f"{asked / max(1, tokens):.1%}" for asked in phase["asked"].values()]
        rows.append([number, phase["first_step"], tokens, *shares])
    return table(["phase", "from step", "tokens", *plan.buckets], rows)


def _buckets_table(plan: Plan) -> list[str]:
    """What the run takes from each bucket."""
    lines: list[dict[str, Any]] = []
    for name, bucket in plan.buckets.items():
        num_emitted = bucket.account["rows"] * (plan.T + 1)
        padded = bucket.account["padded"] / max(1, num_emitted)
        is_exact = bucket.exact and not plan.estimate
        limit = f" of {bucket.max_epochs}" if bucket.max_epochs else ""
        shares = (bucket.cropped, bucket.repeated, padded)
        # a bucket of which the run takes no row has no shares
        percents = [f"{100 * share:.2f}" if bucket.trained else None for share in shares]
        line = {
            "bucket": name,
            "documents": bucket.documents,
            "tokens": bucket.tokens,
            "requested": bucket.asked,
            "trained": bucket.trained,
            "usable": bucket.usable,
            "passes": f"{bucket.passes:.3g}{limit}",
            "cropped %": percents[0],
            "repeated %": percents[1],
            "padded %": percents[2],
            "figures": "exact" if is_exact else "about",
            "dry at step": bucket.dry_step,
        }
        lines.append(line)
    return table([*lines[0]], [[*line.values()] for line in lines])
