"""
The facts about a run, as sentences and markdown tables.

They have one source, here, because several documents contain them: the report and the page, which
stay on the machine, and the model card of an export, which is published. So `paths=False` shortens
every path of this machine to its last name.
"""

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nanochat import seen
from nanochat.common import Bits, counted, duration, few, show, visible
from nanochat.model_code import CODE_OF
from nanochat.pins import Manifests, contents_of
from nanochat.run_dir import changes_text, setting_texts
from nanochat.run_history import history_of
from nanochat.run_reader import RunReader, Table
from nanochat.run_settings import setting_tables
from nanochat.text import Selection

log = logging.getLogger(__name__)

DIFFERENT_TEXT = "different validation text: bits per byte cannot be compared"

# ---- markdown -----------------------------------------------------------------------------------


def escape_html(text: str) -> str:
    """Text with its HTML escaped, for a markdown renderer."""
    return escape(text, quote=False)


def markdown(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A markdown table and an empty line; nothing without rows.

    The first column is left-aligned, the others are right-aligned. Pipes and HTML in cells are
    escaped.
    """
    if not rows:
        return []

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def escaped(cell: object) -> str:
        return escape_html(show(cell)).replace("|", "\\|").replace("\n", " ")

    alignment = ["---", *["---:"] * (len(header) - 1)]
    lines = [line([escaped(cell) for cell in row]) for row in (header, *rows)]
    lines.insert(1, line(alignment))
    return [*lines, ""]


def fenced(text: str) -> list[str]:
    """Text in a code fence that is longer than any fence in it, and an empty line.

    Control characters are escaped.
    """
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *map(visible, text.splitlines()), fence, ""]


def without_folders(value: object) -> object:
    """A text whose paths are shortened to their last names, except those of data on the Hub; any
    other value as it is."""
    if not isinstance(value, str):
        return value

    def last_name(match: re.Match[str]) -> str:
        word = match[0]
        return word if word.startswith("hf://") else word.rstrip("/").rpartition("/")[2]

    return re.sub(r'[^\s",]+', last_name, value)


# ---- sentences ----------------------------------------------------------------------------------


def sentences_about(run: RunReader) -> list[str]:
    """A few sentences about the run: its progress and end, what it learned, its launches."""
    origins = [*origin_sentences(run), *left_out_sentences(run)]
    if run.made_of:
        return origins
    if not (run.launches and run.steps):
        return [*origins, "No step was logged."]
    return [
        *origins,
        *progress_sentences(run),
        *launch_sentences(run),
        *event_sentences(run),
    ]


def origin_sentences(run: RunReader, *, paths: bool = True) -> list[str]:
    """Where the weights of a run are from, unless they were random at its step 0: from another run,
    from several checkpoints, or of a fork, from its parent, and what it changed. Without `paths`, for
    readers elsewhere: nothing about this machine, so not whether the parent is on it."""
    sentences = []
    if run.made_of:
        sentences.append(f"Its weights are {run.made_of}; it took no step itself.")
    if run.begun_with:
        sentences.append(f"It began with the weights of {run.begun_with}.")
    fork = run.fork
    if fork is None:
        return sentences
    begin = f"{fork.place} (after {fork.tokens:,} tokens)"
    changes = fork.changes
    gone = ""
    if paths and run.parent_dir is None:
        gone = ", which is not here"
    if not paths:
        changes = {name: [*map(without_folders, values)] for name, values in changes.items()}
    return [*sentences, f"It is a fork of {begin}{gone}: {changes_text(changes)}."]


def ancestor_sentences(run: RunReader, *, paths: bool = True) -> list[str]:
    """`origin_sentences` of the ancestors of a fork, the youngest first."""
    sentences = []
    for stretch in reversed(history_of(run)[:-1]):
        for sentence in origin_sentences(stretch.run, paths=paths) if stretch.run else ():
            sentences.append(sentence.replace("It", stretch.name, 1))
    return sentences


def left_out_sentences(run: RunReader) -> list[str]:
    """From which step on the run and its ancestors left out which documents."""
    sentences = []
    before: dict[str, list[int] | None] = {}
    for stretch in history_of(run):
        try:
            listed = stretch.run.listed() if stretch.run else {}
        except ValueError as e:  # the list of an ancestor is corrupt
            log.warning("what %s left out is not known: %s", stretch.name, e)
            continue
        if listed and listed != before:
            documents = sum(len(rows) for rows in listed.values() if rows is not None)
            whole = [file for file, rows in listed.items() if rows is None]
            parts = []
            if documents:
                parts.append(counted(documents, "document"))
            if whole:
                parts.append(f"{counted(len(whole), 'whole file')} ({few(whole)})")
            sentences.append(
                f"From step {stretch.first:,} on, --without-documents left out {' and '.join(parts)}."
            )
        before = listed
    return sentences


def progress_sentences(run: RunReader) -> list[str]:
    """How far the run came, and what it learned."""
    last = run.launches[-1]
    reason = f" ({last.reason})" if last.reason else ""
    horizon = f" of {run.horizon:,}" if run.horizon else ""
    own = " of its own" if run.fork else ""
    sentences = [
        f"The run {last.end or 'is unfinished'}{reason} after {last.last:,}{horizon} steps: "
        f"{run.own_tokens:,} tokens{own} in {duration(run.train_time_s)} of training."
    ]
    val = run.val_bpb
    if len(val) > 1:
        (first_step, first), *_, (newest_step, newest) = val.items()
        moved = "fell" if newest < first else "did not fall: they went"
        since = f" at step {first_step:,}" if first_step > run.first_step else ""
        where = f" at step {newest_step:,}" if newest_step < last.last else ""
        best = min(val, key=val.__getitem__)
        lowest = f"; the lowest were {show(Bits(val[best]))} at step {best:,}"
        sentences.append(
            f"Validation bits per byte {moved} from {show(Bits(first))}{since} to {show(Bits(newest))}{where}"
            f"{lowest if val[best] < newest else ''}."
        )
    return sentences


def launch_sentences(run: RunReader) -> list[str]:
    """How many launches the run took, how the earlier ones ended, and which had other model code."""
    *earlier, _ = run.launches
    counts = Counter(launch.end for launch in earlier)
    ends = [
        f"{counts[end]} {end}" for end in ("killed", "stopped", "halted", "failed") if counts[end]
    ]
    launches = "one launch"
    if earlier:
        launches = f"{len(run.launches)} launches ({', '.join(ends) or 'none interrupted'})"
    worlds = sorted({launch.world_size for launch in run.launches})
    processes = "process" if worlds == [1] else "processes"
    sentences = [f"It took {launches}, on {' and '.join(map(str, worlds))} {processes}."]
    for launch in earlier:
        if launch.end == "halted":
            sentences.append(f"It halted at step {launch.last:,} ({launch.reason}).")
    return [*sentences, *code_sentences(run)]


def code_sentences(run: RunReader, stop: float = math.inf) -> list[str]:
    """Which launches had other model code than the one before, of those that began before step `stop`."""
    return [
        f"Launch {number} began at step {launch.first:,} with other model code: {few(launch.other_code)}."
        for number, launch in enumerate(run.launches, 1)
        if launch.other_code and launch.first < stop
    ]


def event_sentences(run: RunReader) -> list[str]:
    """The buckets that ran dry, and the steps that were not applied."""
    sentences = []
    dry = {event["bucket"]: event for event in run.named("dropped")}  # the newest of each bucket
    for bucket, event in dry.items():
        lanes = counted(event["lanes"], "lane")
        sentences.append(f"Bucket {bucket} ran dry, at step {event['step']:,} in {lanes}.")
    skipped = run.steps_not_applied
    if skipped:
        steps = counted(len(skipped), "step")
        sentences.append(f"It did not apply {steps}, most recently step {max(skipped):,}.")
    return sentences


def validation_text(manifests: Manifests) -> tuple[str, ...]:
    """What identifies the validation text of a run; () if it has pinned no validation files."""
    buckets = []
    for manifest in manifests.get("val", {}).values():
        files = [(*contents_of(pin), *pin["groups"]) for pin in manifest["files"]]
        buckets.append(json.dumps([files, Selection.of(manifest).hashed()]))
    return tuple(sorted(buckets))


def validation_note(runs: Sequence[RunReader]) -> str:
    """Why the bits per byte of several runs cannot be compared; "" if they can, or if one of them
    has pinned no validation files."""
    texts = {validation_text(run.manifests) for run in runs}
    if () in texts:
        return ""
    amounts = {run.last_config.get("eval_tokens") for run in runs}
    if len(texts) > 1 and any(run.config.get("data_format") != "text" for run in runs):
        return "different validation files: bits per byte can be compared only if their text is the same"
    if len(texts) > 1:
        return DIFFERENT_TEXT
    if len(amounts) > 1:
        return (
            "different amounts of validation text (--eval-tokens): bits per byte cannot be compared"
        )
    return ""


# ---- tables -------------------------------------------------------------------------------------


def settings_table(run: RunReader, config: Mapping[str, Any], *, paths: bool = True) -> list[str]:
    """The settings of one of the run's launches that the command line named and that differ from
    their defaults."""
    rows = []
    for name, value, default in setting_tables(config, run.typed)["set"]:
        rows.append((name, value if paths else without_folders(value), default))
    return markdown(("setting", "value", "default"), rows)


def differing_settings(runs: Sequence[RunReader]) -> Table:
    """(name, one text per run) of the settings that differ between runs, and before them of the files
    of the model's code; None if a run has no such setting. The length is the one that a run has,
    whatever it follows from."""
    configs = []
    for run in runs:
        config = {**run.last_config, "num_iterations": run.horizon}
        for name in ("derived", "fork"):  # not settings
            config.pop(name, None)
        configs.append(config)
    names: dict[str, None] = {}
    for config in configs:
        names |= dict.fromkeys(config)
    rows = differing_code([run.shown_code for run in runs])
    for name in names:
        texts = setting_texts([config.get(name) for config in configs])
        values = [text if name in config else None for text, config in zip(texts, configs)]
        if len(set(values)) > 1:
            rows.append((name, *values))
    return rows


def differing_code(codes: Sequence[Mapping[str, str]]) -> Table:
    """("code of FILE", its hash in each of some `shown_code`) of the files that differ; None where a
    file is not known."""
    files: dict[str, None] = {}
    for code in codes:
        files |= dict.fromkeys(code)
    rows: Table = []
    for file in files:
        hashes = [code.get(file) for code in codes]
        if len({*hashes} - {None}) > 1:
            rows.append((f"{CODE_OF}{file}", *hashes))
    return rows


def data_table(run: RunReader, *, paths: bool = True) -> list[str]:
    """The files of each bucket and split, and how --val-fraction divides them."""
    rows = []
    for name, root, *figures in run.files():
        rows.append((name, root if paths else without_folders(root), *figures))
    header = ("bucket (split)", "folder", "files", "bytes of the files", "documents of this split")
    lines = markdown(header, rows)
    share = run.config.get("val_fraction")
    if rows and share:
        lines += [
            f"Both splits name the same files: validation reads {share:.3g} of each, training the rest.",
            "",
        ]
    return lines


def contamination_table(results: Mapping[str, seen.TaskResult], step: int) -> list[str]:
    """A table of the items of benchmarks that a run saw before a step, and sentences about it."""
    rows = [seen.count(label, result, step).cells for label, result in results.items()]
    return [*markdown(seen.HEADER, rows), " ".join(seen.describe(results, step))]
