"""
Write the report of a run as markdown: what ran, on what, how long, and what came of it.

    python -m scripts.report d12                      # writes RUN/report.md and RUN/report-*.png
    python -m scripts.report d12 --stages FILE        # with the times of speedrun.sh's stages

It reads the run directory (nanochat/run_reader.py) and changes nothing else, so it can be written at any
time. A part whose file is missing says so in one line: an unfinished run has a report, too. matplotlib
draws the pictures without a display; where it is not installed, the report says so.

FILE is what speedrun.sh keeps: a line `name <tab> seconds <tab> exit code <tab> command` for each
stage that ended. The times of a stage that ran several times are added up.
"""

import argparse
import re
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.cli import Parser, run_main
from nanochat.common import atomic_open, duration, show, visible, write_bytes
from nanochat.run_dir import find_run
from nanochat.run_reader import RunReader, ledger_table

Stage = tuple[str, float, int, int, str]  # name, seconds, runs, how many of them failed, command


def read_stages(path: Path) -> list[Stage]:
    """The stages of a file in the order in which they first ran; interrupted lines are skipped."""
    stages: dict[str, Stage] = {}
    for line in re.findall(r"(?m)^(.*)\t([0-9.]+)\t([0-9]+)\t(.*)$", path.read_text("utf-8", "replace")):
        name, seconds, code, command = line
        _, total, runs, failed, _ = stages.get(name, ("", 0.0, 0, 0, ""))
        stages[name] = name, total + float(seconds), runs + 1, failed + (code != "0"), command
    return list(stages.values())


# ---- markdown -----------------------------------------------------------------------------------

def escape_html(text: str) -> str:
    """Text that no renderer of markdown takes for HTML."""
    return escape(text, quote=False)


def markdown(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A markdown table and an empty line, nothing without rows. The first column is aligned to the left, the
    others to the right; bars and HTML in a cell are escaped."""
    cells = [[escape_html(show(cell)).replace("|", "\\|").replace("\n", " ") for cell in row]
             for row in (header, *rows)]
    cells.insert(1, ["---"] + ["---:"] * (len(header) - 1))
    return [f"| {' | '.join(line)} |" for line in cells] + [""] if rows else []


def fenced(text: str) -> list[str]:
    """Text in a fence that it cannot end, whatever it contains, and an empty line. Control characters are escaped."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *map(visible, text.splitlines()), fence, ""]


# ---- the parts ----------------------------------------------------------------------------------

def summarize(run: RunReader) -> list[str]:
    """How the run went, in a few sentences: how far it came and how it ended, what it learned, its launches."""
    launches, val = run.launches, [*run.val_bpb.values()]
    if not (launches and run.steps):
        return ["No step was logged."]
    last, earlier = launches[-1], launches[:-1]
    reason = f" ({last.reason})" if last.reason else ""
    horizon = f" of {run.horizon:,}" if run.horizon else ""
    sentences = [f"The run {last.end or 'has not said how it ended'}{reason} after {last.last:,} steps{horizon}: "
                 f"{run.num_tokens:,} tokens in {duration(run.train_time_s)} of steps."]
    if len(val) > 1:
        moved = "fell" if val[-1] < val[0] else "did not fall: it went"
        sentences.append(f"Validation bits per byte {moved} from {show(val[0])} to {show(val[-1])}.")
    ends = {end: sum(launch.end == end for launch in earlier) for end in ("killed", "stopped", "failed")}
    interruptions = ", ".join(f"{n} {end}" for end, n in ends.items() if n) or "one after the other"
    number = f"{len(launches)} launches ({interruptions})" if earlier else "one launch"
    worlds = sorted({launch.world_size for launch in launches})
    sentences.append(f"It took {number}, on {' and '.join(map(str, worlds))} process{'es' * (worlds != [1])}.")
    if skipped := run.named("skipped"):
        sentences.append(f"{len(skipped)} step(s) were skipped as spikes, the last one step {skipped[-1]['step']:,}.")
    return sentences


def result_part(run: RunReader) -> list[str]:
    """The figures to look at first. Two runs with equal digests saw equal data."""
    val, evaluation, steps = run.val_bpb, run.evaluation, run.steps
    rows: list[tuple[str, Any]] = [
        ("validation bits per byte, before training", val.get(0) if len(val) > 1 else None),
        ("validation bits per byte, after", evaluation.get("val_bpb", next(reversed(val.values()), None))),
        ("a unigram model's on the same tokens", evaluation.get("unigram_bpb")),
        *((f"training bits per byte, `{name}`", bpb) for name, bpb in evaluation.get("train_bpb", {}).items()),
        ("CORE metric", evaluation.get("core", {}).get("core_metric"))]
    if steps:
        waited = sum(step["wait_s"] for step in steps) / run.train_time_s
        mfu, peak = run.median("mfu"), run.peak_memory_bytes
        rows += [("steps", run.num_steps), ("tokens trained on", run.num_tokens),
                 ("time in steps", f"{duration(run.train_time_s)}, {100 * waited:.2f} % of it waiting for data"),
                 ("tokens/s, median step", run.median("tokens_per_s")),
                 ("model FLOPs utilization, median step", f"{100 * mfu:.1f} %" if mfu else None),
                 ("peak memory of rank 0", f"{peak / 1e9:.1f} GB" if peak else None),
                 *((f"digest of the batch of step {step['step']:,}", f"`{step['digest']}`")
                   for step in (steps[0], steps[-1]))]
    lines = markdown(("figure", "result"), [row for row in rows if row[1] is not None])
    if not evaluation:
        lines.append(escape_html(f"`python -m scripts.base_eval {run.name}` has not run: it adds samples, and a "
                                 f"unigram model to compare with."))
    elif steps and evaluation["step"] != run.num_steps:
        lines.append(f"eval.json is of step {evaluation['step']:,}; the training continued after it.")
    return lines


def settings_part(run: RunReader, stages: Sequence[Stage]) -> list[str]:
    """What ran: commands, settings, and what follows from them."""
    started = [launch.started for launch in run.launches]
    commands = [command for *_, command in stages] or [
        f"{start['command']}{'  # a process of ' + str(start['world_size']) if start['world_size'] != 1 else ''}"
        for start in started if start.get("command")]
    times = [(name, duration(seconds), runs, failed) for name, seconds, runs, failed, _ in stages]
    tables = run.setting_tables()
    return ["Commands:", "", *fenced("\n".join(dict.fromkeys(commands)) or "not known"),
            *markdown(("stage", "time", "runs", "of them failed or stopped"), times),
            *markdown(("set", "value", "default"), tables["set"]),
            *markdown(("worked out", "value"), tables["worked out"]),
            "<details><summary>default</summary>", "",
            *fenced("\n".join(" ".join(row) for row in tables["default"])), "</details>", ""]


def launches_part(run: RunReader) -> list[str]:
    """On what: the machine and the code of each launch."""
    return markdown(("trained from step", "processes", "on", "PyTorch", "commit"), [
        (launch.first, launch.world_size, launch.started.get("gpu") or launch.started["device"],
         launch.started["torch"], launch.started.get("code") or "not known") for launch in run.launches])


def data_part(run: RunReader) -> list[str]:
    """The files that were read, and the ledger of every token of them."""
    text, header, rows = ledger_table(*run.ledger())
    return [*markdown(("files", "where", "number", "bytes", "documents"), run.files()),
            *([escape_html(text), "", *markdown(header, rows)] if rows else ["No checkpoint yet, so no accounts."])]


def samples_part(run: RunReader) -> list[str]:
    """What the model wrote: the newest samples of the training, and all of the evaluation."""
    lines: list[str] = []
    for i, (when, texts) in enumerate(run.samples().items()):
        if i == 0 or when.startswith("at the evaluation"):
            lines += [f"{when[0].upper()}{when[1:]}:", "", *(line for text in texts for line in fenced(text))]
    return lines or ["None: --sample-every says how often."]


# ---- pictures -----------------------------------------------------------------------------------

def draw_loss(run: RunReader, axes: Any) -> None:
    """Loss as logged and smoothed, and bits per byte on a scale of its own. None is a gap."""
    x = [step["step"] for step in run.steps]
    raw, smooth = (np.array([step[name] for step in run.steps], float) for name in ("loss", "smooth_loss"))
    axes.plot(x, raw, color="C0", alpha=0.3, linewidth=0.8, label="loss")
    axes.plot(x, smooth, color="C0", label="loss, smoothed")
    axes.set_ylabel("loss, nats a token")
    if val := run.val_bpb:
        right = axes.twinx()
        right.plot([*val], [*val.values()], "o-", color="C1", markersize=5, label="bits per byte", clip_on=False)
        right.set_ylabel("bits per byte on validation")
        right.legend(loc="upper right", frameon=False)
    axes.legend(loc="upper center", frameon=False)


def draw_mix(run: RunReader, axes: Any) -> None:
    """Shares of the buckets in what was trained on."""
    if mix := run.mix():
        axes.stackplot([step["step"] for step in run.steps], [*mix.values()], labels=[*mix])
        axes.set_ylabel("share of trained tokens")
        axes.set_ylim(0, 1)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def draw_throughput(run: RunReader, axes: Any) -> None:
    """Tokens/s of every step."""
    axes.plot([step["step"] for step in run.steps], [step["tokens_per_s"] for step in run.steps], linewidth=0.8)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)


PICTURES = {"loss": draw_loss, "mix": draw_mix, "throughput": draw_throughput}


def pictures(run: RunReader) -> dict[str, Any] | None:
    """{name: matplotlib figure} of each picture that has data; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None

    figures = {}
    for name, draw in PICTURES.items() if run.steps else ():
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.subplots()
        draw(run, axes)
        axes.set_xlabel("step")
        axes.margins(x=0)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.has_data():
            figures[name] = figure
    return figures


def make_report(run: RunReader, stages: Sequence[Stage] = (), figures: Iterable[str] | None = ()) -> str:
    """The whole report. `figures`: the names of its pictures; None without matplotlib."""
    shown = ["No pictures: matplotlib is not installed (`pip install -e '.[plot]'`)."] if figures is None else [
        f"![{name} by step](report-{name}.png)" for name in figures]
    parts = {"Result": result_part(run), "What ran": settings_part(run, stages), "On what": launches_part(run),
             "Data": data_part(run), "Samples": samples_part(run)}
    written = f"Written {time.strftime('%Y-%m-%d %H:%M %Z')} from `{run.run_dir}`, which holds the whole run."
    lines = [escape_html(f"# Run `{run.config.get('model_tag', run.name)}`: {run.outcome}"), "",
             *map(escape_html, summarize(run)), "", *shown, "", escape_html(written), ""]
    for title, part in parts.items():
        lines += [f"## {title}", "", *part, ""]
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Write the report of a run.")
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run's name or folder (default: the only run)")
    parser.add_argument("--stages", type=Path, help="a file of stage times, as speedrun.sh keeps it")
    parser.add_argument("--output", type=Path, help="default: RUN/report.md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and print where it is. FileNotFoundError for an unknown run, ValueError for a corrupt file in
    it."""
    args = parse_args(argv)
    run = RunReader(find_run(args.run).absolute())
    output = args.output or run.run_dir / "report.md"
    stages = read_stages(args.stages) if args.stages is not None and args.stages.is_file() else []
    figures = pictures(run)
    text = make_report(run, stages, figures)  # reads all parts, before anything is written
    for name, figure in (figures or {}).items():
        with atomic_open(output.absolute().parent / f"report-{name}.png") as f:
            figure.savefig(f, format="png", dpi=100)
    write_bytes(output, text.encode())
    print(f"{run.name}: {run.outcome}", *result_part(run), f"report: {output}", sep="\n")
    return 0


if __name__ == "__main__":
    run_main(main)
