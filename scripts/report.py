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
from html import escape
from pathlib import Path
from typing import Any

from nanochat.cli import Parser, run_main
from nanochat.common import counted, duration, show, visible, write_bytes
from nanochat.config import setting_tables
from nanochat.run_dir import find_run
from nanochat.run_reader import RunReader, ledger_table

Stage = tuple[str, float, int, int, str]  # name, seconds, runs, failed runs, command


def read_stages(path: Path) -> list[Stage]:
    """The stages in a file, in the order of their first run. Truncated lines are skipped."""
    stages: dict[str, Stage] = {}
    for line in re.findall(
        r"(?m)^(.*)\t([0-9.]+)\t([0-9]+)\t(.*)$", path.read_text("utf-8", "replace")
    ):
        name, seconds, code, command = line
        _, total, runs, failed, _ = stages.get(name, ("", 0.0, 0, 0, ""))
        stages[name] = name, total + float(seconds), runs + 1, failed + (code != "0"), command
    return list(stages.values())


# ---- markdown -----------------------------------------------------------------------------------


def escape_html(text: str) -> str:
    """Text with its HTML escaped, for a markdown renderer."""
    return escape(text, quote=False)


def markdown(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A markdown table and an empty line; nothing without rows.

    The first column is left-aligned, the others are right-aligned. Pipes and HTML in cells are
    escaped.
    """
    cells = [
        [escape_html(show(cell)).replace("|", "\\|").replace("\n", " ") for cell in row]
        for row in (header, *rows)
    ]
    cells.insert(1, ["---"] + ["---:"] * (len(header) - 1))
    return [f"| {' | '.join(line)} |" for line in cells] + [""] if rows else []


def fenced(text: str) -> list[str]:
    """Text in a code fence that is longer than any fence in it, and an empty line.

    Control characters are escaped.
    """
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *map(visible, text.splitlines()), fence, ""]


# ---- the parts ----------------------------------------------------------------------------------


def summarize(run: RunReader) -> list[str]:
    """A few sentences about the run: its progress and end, what it learned, its launches."""
    launches, val = run.launches, [*run.val_bpb.values()]
    if not (launches and run.steps):
        return ["No step was logged."]
    last, earlier = launches[-1], launches[:-1]
    reason = f" ({last.reason})" if last.reason else ""
    horizon = f" of {run.horizon:,}" if run.horizon else ""
    sentences = [
        f"The run {last.end or 'is unfinished'}{reason} after {last.last:,}{horizon} steps: "
        f"{run.num_tokens:,} tokens in {duration(run.train_time_s)} of training."
    ]
    if len(val) > 1:
        moved = "fell" if val[-1] < val[0] else "did not fall: they went"
        sentences.append(
            f"Validation bits per byte {moved} from {show(val[0])} to {show(val[-1])}."
        )
    ends = {
        end: sum(launch.end == end for launch in earlier)
        for end in ("killed", "stopped", "halted", "failed")
    }
    interruptions = ", ".join(f"{n} {end}" for end, n in ends.items() if n) or "none interrupted"
    number = f"{len(launches)} launches ({interruptions})" if earlier else "one launch"
    worlds = sorted({launch.world_size for launch in launches})
    sentences.append(
        f"It took {number}, on {' and '.join(map(str, worlds))} process{'es' * (worlds != [1])}."
    )
    sentences += [
        f"It halted at step {launch.last:,} ({launch.reason})."
        for launch in earlier
        if launch.end == "halted"
    ]
    dry = {event["bucket"]: event for event in run.named("dropped")}  # the newest of each bucket
    sentences += [
        f"Bucket {bucket} ran dry, at step {event['step']:,} in {counted(event['lanes'], 'lane')}."
        for bucket, event in dry.items()
    ]
    if skipped := run.named("skipped"):
        sentences.append(
            f"It skipped {counted(len(skipped), 'spike')}, most recently step {skipped[-1]['step']:,}."
        )
    return sentences


def result_part(run: RunReader) -> list[str]:
    """The most important figures. Runs with equal digests saw the same data."""
    val = run.val_bpb
    evaluation = run.evaluation
    steps = run.steps
    last = max(val, default=0)
    rows: list[tuple[str, Any]] = [
        ("validation bits per byte, before training", val.get(0)),
        ("validation bits per byte, after", evaluation.get("val_bpb", val[last] if last else None)),
        ("bits per byte of a unigram model on the same tokens", evaluation.get("unigram_bpb")),
        *(
            (f"training bits per byte, `{name}`", bpb)
            for name, bpb in evaluation.get("train_bpb", {}).items()
        ),
        ("CORE metric", evaluation.get("core", {}).get("core_metric")),
    ]
    if steps:
        waited = sum(step["wait_s"] for step in steps) / run.train_time_s
        mfu, peak = run.median("mfu"), run.peak_memory_bytes
        rows += [
            ("steps", run.num_steps),
            ("tokens trained on", run.num_tokens),
            (
                "training time",
                f"{duration(run.train_time_s)}, {100 * waited:.2f} % of it waiting for data",
            ),
            ("tokens/s, median step", run.median("tokens_per_s")),
            ("model FLOPs utilization, median step", f"{100 * mfu:.1f} %" if mfu else None),
            ("peak memory of rank 0", f"{peak / 1e9:.1f} GB" if peak else None),
            *(
                (f"digest of the batch of step {step['step']:,}", f"`{step['digest']}`")
                for step in (steps[0], steps[-1])
            ),
        ]
    lines = markdown(("figure", "result"), [row for row in rows if row[1] is not None])
    if not evaluation:
        lines.append(
            escape_html(
                f"Not evaluated yet: `python -m scripts.base_eval {run.name}` adds samples and the "
                f"bits per byte of a unigram model for comparison."
            )
        )
    elif steps and evaluation["step"] != run.num_steps:
        lines.append(
            f"The evaluation is from step {evaluation['step']:,}; training continued after it."
        )
    return lines


def settings_part(run: RunReader, stages: Sequence[Stage]) -> list[str]:
    """The commands, the settings, and the values that follow from them."""
    started = [launch.started for launch in run.launches]
    commands = [command for *_, command in stages] or [
        f"{start['command']}{'' if start['world_size'] == 1 else '  # on ' + str(start['world_size']) + ' processes'}"
        for start in started
        if start.get("command")
    ]
    times = [(name, duration(seconds), runs, failed) for name, seconds, runs, failed, _ in stages]
    tables = setting_tables(run.config, run.typed)
    return [
        "Commands:",
        "",
        *fenced("\n".join(dict.fromkeys(commands)) or "unknown"),
        *markdown(("stage", "time", "runs", "failed or stopped"), times),
        *markdown(("setting", "value", "default"), tables["set"]),
        *markdown(("derived", "value"), tables["worked out"]),
        "<details><summary>settings at their defaults</summary>",
        "",
        *fenced("\n".join(" ".join(row) for row in tables["default"])),
        "</details>",
        "",
    ]


def samples_part(run: RunReader) -> list[str]:
    """The texts that the model wrote: the newest from training, and all from the evaluation."""
    lines: list[str] = []
    for i, (when, texts) in enumerate(run.samples().items()):
        if i == 0 or when.startswith("at the evaluation"):
            lines += [
                f"{when[0].upper()}{when[1:]}:",
                "",
                *(line for text in texts for line in fenced(text)),
            ]
    return lines or ["None. --sample-every=N samples every N steps."]


def make_report(run: RunReader, stages: Sequence[Stage] = ()) -> str:
    """The whole report."""
    launches = [
        (
            launch.first,
            launch.world_size,
            launch.started.get("gpu") or launch.started["device"],
            launch.started["torch"],
            launch.started.get("code") or "unknown",
        )
        for launch in run.launches
    ]
    ledger, header, rows = ledger_table(*run.ledger())
    parts = {
        "Results": result_part(run),
        "Commands and settings": settings_part(run, stages),
        "Launches": markdown(("first step", "processes", "device", "PyTorch", "commit"), launches),
        "Data": [
            *markdown(("bucket (split)", "folder", "files", "bytes", "documents"), run.files()),
            *(
                [escape_html(ledger), "", *markdown(header, rows)]
                if rows
                else ["No ledger before the first checkpoint."]
            ),
        ],
        "Samples": samples_part(run),
    }
    written = (
        f"Written {time.strftime('%Y-%m-%d %H:%M %Z')} from the run directory `{run.run_dir}`. "
        f"`python -m scripts.page {run.name}` draws its plots."
    )
    lines = [
        escape_html(f"# Run `{run.config.get('model_tag', run.name)}`: {run.outcome}"),
        "",
        *map(escape_html, summarize(run)),
        "",
        escape_html(written),
        "",
    ]
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
    stages = read_stages(args.stages) if args.stages is not None and args.stages.is_file() else []
    write_bytes(output, make_report(run, stages).encode())
    print(f"{run.name}: {run.outcome}", *result_part(run), f"report: {output}", sep="\n")
    return 0


if __name__ == "__main__":
    run_main(main)
