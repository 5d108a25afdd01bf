"""
Write a markdown report of a run: results, commands, settings, machine, data, samples.

    python -m scripts.report mine                     # writes RUN/report.md
    python -m scripts.report mine --stages=FILE       # includes the times of speedrun.sh's stages

The command reads the run directory (nanochat/run_reader.py) and only adds files, so it works at any
time, even for an unfinished run: a part whose file is missing becomes one sentence. scripts.page
draws the plots of a run.

speedrun.sh writes FILE: a line `name <tab> seconds <tab> exit code <tab> command` for each stage
that ended. If a stage ran several times, its times are added up.
"""

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import seen
from nanochat.cli import Parser, run_main
from nanochat.common import Bits, duration, write_bytes
from nanochat.core_eval import describe_items
from nanochat.run_dir import find_run
from nanochat.run_facts import (
    contamination_table,
    data_table,
    escape_html,
    fenced,
    markdown,
    sentences_about,
    settings_table,
)
from nanochat.run_reader import TRAIN_SAMPLE, RunReader, ledger_table, unseen_note
from nanochat.run_settings import setting_tables

STAGE = re.compile(r"(?m)^(.*)\t([0-9.]+)\t([0-9]+)\t(.*)$")  # name, seconds, exit code, command


@dataclass
class Stage:
    """All runs of a stage of speedrun.sh."""

    name: str
    seconds: float = 0.0
    runs: int = 0
    failed: int = 0
    command: str = ""  # of the last run


def read_stages(path: Path) -> list[Stage]:
    """The stages in a file, in the order of their first run. Truncated lines are skipped."""
    stages: dict[str, Stage] = {}
    for name, seconds, code, command in STAGE.findall(path.read_text("utf-8", "replace")):
        stage = stages.setdefault(name, Stage(name))
        stage.seconds += float(seconds)
        stage.runs += 1
        stage.failed += code != "0"
        stage.command = command
    return list(stages.values())


def result_part(run: RunReader) -> list[str]:
    """The most important figures. Runs with equal digests saw the same data."""
    figures = quality_figures(run) | training_figures(run)
    rows = [(name, value) for name, value in figures.items() if value is not None]
    lines = markdown(("figure", "result"), rows)
    evaluation = run.evaluation
    if not evaluation:
        sentence = (
            f"Not evaluated yet: `python -m scripts.base_eval {run.name}` adds samples and the bits per "
            f"byte of a unigram model for comparison."
        )
        lines.append(escape_html(sentence))
    elif not is_last(run, evaluation["step"]):
        lines.append(
            f"The evaluation is from step {evaluation['step']:,}; training continued after it."
        )
    if evaluation and evaluation["train_bpb"]:
        lines.append(TRAIN_SAMPLE)
    if evaluation and (note := unseen_note(evaluation)):
        lines.append(escape_html(note))
    return lines


def quality_figures(run: RunReader) -> dict[str, Any]:
    """{figure: value}: what the model learned; None if it is not known."""
    val = {step: Bits(bpb) for step, bpb in run.val_bpb.items()}
    figures: dict[str, Any] = {"validation bits per byte, at step 0": val.get(0)}
    last_step = max(val, default=0)
    if last_step:
        figures[f"validation bits per byte, {when(run, last_step)}"] = val[last_step]
        buckets = run.validations[last_step].get("buckets", {})
        for bucket, bpb in buckets.items() if len(buckets) > 1 else ():
            figures[f"validation bits per byte of {bucket}, {when(run, last_step)}"] = Bits.of(bpb)
    evaluation = run.evaluation
    if not evaluation:
        return figures

    # the evaluation, which may be of an older checkpoint
    step = evaluation["step"]
    at = "" if is_last(run, step) else f", {when(run, step)}"
    bpb = Bits.of(evaluation.get("val_bpb"))
    if bpb != val.get(step):  # of other tokens, on another device, or training had none
        tokens = evaluation.get("eval_tokens")
        amount = f" on {tokens:,} tokens" if tokens else ""
        figures[f"validation bits per byte by base_eval{amount}, {when(run, step)}"] = bpb
    unigram = Bits.of(evaluation.get("unigram_bpb"))
    figures["bits per byte of a unigram model on the same tokens"] = unigram
    for bucket, bpb in evaluation["train_bpb"].items():
        figures[f"bits per byte of the sample of the training files, {bucket}{at}"] = Bits(bpb)
    if core := evaluation.get("core"):
        figures[f"CORE metric on {describe_items(core)}{at}"] = core["core_metric"]
    return figures


def is_last(run: RunReader, step: int) -> bool:
    """Whether a step is the last of a run; if the run has no log, its only evaluation is."""
    return not run.steps or step == run.num_steps


def when(run: RunReader, step: int) -> str:
    """ "after" the last step, or the step itself."""
    return "after" if is_last(run, step) else f"at step {step:,}"


def training_figures(run: RunReader) -> dict[str, Any]:
    """{figure: value}: what the training took; None if it is not known."""
    if not run.steps:
        return {}
    waited = sum(step["wait_s"] for step in run.steps) / run.train_time_s
    mfu = run.median("mfu")
    peak = run.peak_memory_bytes
    time_s = duration(run.train_time_s)
    figures = {
        "steps": run.reached,
        f"tokens in rows{', of its own' if run.fork else ''}": run.own_tokens,
        "tokens, those of its ancestors included": run.num_tokens if run.fork else None,
        "training time": f"{time_s}, {100 * waited:.2f} % of it waiting for data",
        "tokens/s, median step": run.median("tokens_per_s"),
        "model FLOPs utilization, median step": f"{100 * mfu:.1f} %" if mfu else None,
        "peak memory of rank 0": f"{peak / 1e9:.1f} GB" if peak else None,
    }
    for step in (run.steps[0], run.steps[-1]):
        figures[f"digest of the batch of step {step['step']:,}"] = f"`{step['digest']}`"
    return figures


def settings_part(run: RunReader, stages: Sequence[Stage]) -> list[str]:
    """The stages of speedrun.sh, the settings, and the values that follow from them."""
    commands = [stage.command for stage in stages]
    times = [(stage.name, duration(stage.seconds), stage.runs, stage.failed) for stage in stages]
    tables = setting_tables(run.last_config, run.typed)
    of_stages = ["Commands of the stages:", "", *fenced("\n".join(commands))] if stages else []
    return [
        *of_stages,
        *markdown(("stage", "time", "runs", "failed or stopped"), times),
        *settings_table(run, run.last_config),
        *markdown(("derived", "value"), tables["worked out"]),
        "<details><summary>settings at their defaults</summary>",
        "",
        *fenced("\n".join(" ".join(row) for row in tables["default"])),
        "</details>",
        "",
    ]


def launches_part(run: RunReader) -> list[str]:
    """Which steps each launch took, where it ran, and its command."""
    if not run.launches:
        return ["None was logged."]
    header = (
        *("launch", "from step", "to step", "planned steps", "end"),
        *("processes", "device", "PyTorch", "commit"),
    )
    rows = []
    commands = []
    for number, launch in enumerate(run.launches, start=1):
        started = launch.started
        steps = (launch.first, launch.last, started.get("num_iterations") or "unknown")
        device = started.get("gpu") or started["device"]
        code = started.get("code") or "unknown"
        machine = (launch.world_size, device, started["torch"], code)
        rows.append((number, *steps, launch.end or "none", *machine))
        commands.append(f"{started.get('command') or 'unknown'}  # launch {number}")
    return [*markdown(header, rows), *fenced("\n".join(commands))]


def data_part(run: RunReader) -> list[str]:
    """The files, and the ledger."""
    lines = data_table(run)
    ledger, columns, rows = ledger_table(*run.ledger())
    if not rows:
        return [*lines, "No ledger before the first checkpoint."]
    return [*lines, escape_html(ledger), "", *markdown(columns, rows)]


def contamination_part(run: RunReader) -> list[str]:
    """Which items of benchmarks the run has seen, if that was searched."""
    if run.made_of:
        return [f"Not searched: the weights are {run.made_of}."]
    results = seen.read_results(run.run_dir)
    if not results:
        sentence = (
            f"Not searched: `python -m scripts.inspect_data find {run.name} --core` finds the items of CORE "
            f"that the run has seen, and `--texts=FILE` those of another benchmark."
        )
        return [escape_html(sentence)]
    return contamination_table(results, run.num_steps)


def samples_part(run: RunReader) -> list[str]:
    """The texts that the model wrote: the newest from training, and all from the evaluation."""
    lines: list[str] = []
    for i, (when, texts) in enumerate(run.samples().items()):
        is_newest = i == 0
        if is_newest or when.startswith("at the evaluation"):
            lines += [f"{when[0].upper()}{when[1:]}:", ""]
            for text in texts:
                lines += fenced(text)
    if not lines:
        sentence = (
            f"None. `python -m scripts.base_eval {run.name}` adds some; with --sample-every=N, training does "
            f"so every N steps."
        )
        lines.append(escape_html(sentence))
    return lines


def make_report(run: RunReader, stages: Sequence[Stage] = ()) -> str:
    """The whole report."""
    parts = {
        "Results": result_part(run),
        "Settings": settings_part(run, stages),
        "Launches": launches_part(run),
        "Data": data_part(run),
        "Benchmarks in the data": contamination_part(run),
        "Samples": samples_part(run),
    }
    written = (
        f"Written {time.strftime('%Y-%m-%d %H:%M %Z')} from the run directory `{run.run_dir}`. "
        f"`python -m scripts.page {run.name}` draws its plots."
    )
    tag = run.config.get("model_tag", run.name)
    lines = [escape_html(f"# Run `{tag}`: {run.outcome}"), ""]
    lines += [*map(escape_html, sentences_about(run)), ""]
    lines += [escape_html(written), ""]
    for title, part in parts.items():
        lines += [f"## {title}", "", *part, ""]
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="a run's name or folder (default: the only run)"
    )
    parser.add_argument(
        "--stages", metavar="FILE", type=Path, help="stage times that speedrun.sh wrote"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="where to write (default: RUN/report.md)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and print its path.

    FileNotFoundError for an unknown run, ValueError for a corrupt file.
    """
    args = parse_args(argv)
    run = RunReader(find_run(args.run).absolute())
    output = args.output or run.run_dir / "report.md"
    has_stages = args.stages is not None and args.stages.is_file()
    stages = read_stages(args.stages) if has_stages else []
    write_bytes(output, make_report(run, stages).encode(errors="backslashreplace"))
    print(f"{run.name}: {run.outcome}", *result_part(run), f"report: {output}", sep="\n")
    return 0


if __name__ == "__main__":
    run_main(main)
