"""
Draw runs as one HTML page that needs no network: curves, mix, time line, accounts, samples, settings.

    python -m scripts.page d12                          # writes page.html
    python -m scripts.page d12 d24 --out=both.html      # two runs in one page; without a name: all
    python -m scripts.page d12 --watch                  # written anew while the run goes on

    logs, cursors, --report.read_facts--> Facts --curves, launches--> JSON --plotly--> curves
    settings                                '----- tables, words ---> HTML, escaped

What is drawn is what the log has: a number in the lines of steps gets a curve, a number in an event
a curve of points, any other event a mark on the time line. So a value that somebody adds to the log
needs nothing here. The page is scripts/page.html with its parts filled in; plotly is embedded, and a
policy in the page forbids the browser to load anything. Where all steps of a long run would make it
too large, of each block of steps the one with the highest loss is drawn, so that spikes stay.
"""

import argparse
import json
import re
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from nanochat.cli import Parser, run_main
from nanochat.common import duration, read_json, show, write_bytes
from nanochat.integrations.trackers import flat_numbers
from nanochat.run_dir import CONFIG_NAME, PLAN_NAME, find_run, list_runs, run_path
from scripts import status
from scripts.report import ENDS, Facts, differing, in_words, read_facts, split_settings, told_ledger

ROOM = 1_000_000  # bytes of JSON, so that the page stays below 6 MB
WATCH_EVERY_S = 10
AXES = ("steps", "tokens", "FLOPs", "hours")
LOSS, BPB, BUCKETS = "Loss, nats a token", "Bits per byte on validation", "Loss by bucket, smoothed"
WAIT = "Data wait, ms a step"
# how a number is drawn: title of the chart, factor; any other under its own name
CHARTS = {"loss": (LOSS, 1), "smooth_loss": (LOSS, 1), "lr": ("Learning rate, times its peak", 1),
          "grad_norm": ("Gradient norm", 1), "tokens_per_s": ("Tokens/s", 1),
          "mfu": ("Model FLOPs utilization, %", 100), "wait_s": (WAIT, 1000),
          "peak_memory_bytes": ("Peak memory, GB", 1e-9)}
# numbers that the axes show, and events that are marks although they may have numbers
NOT_DRAWN = ("step", "time", "tokens", "step_s", "total_training_flops", "total_training_time")
MARKS = ("saved", "save_failed", "dropped", "skipped", "started", "samples", "wandb", *ENDS)
TONES = {status.GREEN: "good", status.YELLOW: "wait", status.RED: "bad"}  # of a state's colour


@dataclass(frozen=True)
class Run:
    """A run as the page tells of it."""

    index: int  # its colour
    facts: Facts
    state: dict[str, Any]  # as scripts.status sees it

    @property
    def name(self) -> str:
        return self.facts.run_dir.name

    @property
    def alive(self) -> bool:
        return self.state["liveness"] == "alive"


# ---- curves -------------------------------------------------------------------------------------

def step_axes(facts: Facts) -> dict[str, list[float]]:
    """Of each logged step its number, and the tokens, FLOPs and hours of training by its end."""
    steps, flops = facts.steps, facts.config.get("derived", {}).get("flops_per_token") or 0
    spent_s = accumulate(step["step_s"] for step in steps)
    return {"steps": [step["step"] for step in steps],
            "tokens": [step["tokens"] for step in steps],
            "FLOPs": [step.get("total_training_flops") or flops * step["tokens"] for step in steps],
            "hours": [step.get("total_training_time", s) / 3600 for step, s in zip(steps, spent_s)]}


def place(axes: Mapping[str, list[float]], done: int) -> dict[str, float]:
    """Where on each axis `done` steps are done."""
    i = bisect_left(axes["steps"], done) - 1
    return {name: axes[name][i] if i >= 0 else 0 for name in AXES} | {"steps": done}


def drawable(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record of the log that are drawn as a curve."""
    return {name: number for name, number in flat_numbers(record)
            if name not in NOT_DRAWN and record.get("event") not in MARKS}


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """A running mean as `smooth_loss` is one; where there is no value, there is none."""
    found: list[float | None] = []
    total = weight = 0.0
    for value in values:
        if value is not None:
            total, weight = 0.9 * total + 0.1 * value, 0.9 * weight + 0.1
        found.append(None if value is None else total / weight)
    return found


def series(chart: str, name: str, y: list[Any], look: str = "line", bucket: str = "") -> dict[str, Any]:
    """A curve for page.html. `look`: raw, line, points or plan."""
    return {"chart": chart, "name": name, "y": y, "look": look, "bucket": bucket}


def step_series(facts: Facts) -> Iterator[dict[str, Any]]:
    """Curves with a value for each step."""
    for name in dict.fromkeys(name for step in facts.steps for name in drawable(step)):
        values = [step.get(name) for step in facts.steps]
        group, _, bucket = name.partition("/")
        if group == "loss" and bucket:
            yield series(BUCKETS, bucket, smooth(values), bucket=bucket)
        elif group != "tokens" and any(values):
            title, factor = CHARTS.get(name, (name, 1))
            scaled = [None if value is None else factor * value for value in values]
            told = {"smooth_loss": "smoothed"}.get(name, name)
            yield series(title, told, scaled, "raw" if name == "loss" else "line")


def mix_series(facts: Facts, chart: str) -> Iterator[dict[str, Any]]:
    """Shares of the buckets, as trained on and as planned."""
    plan, shape = facts.run_dir / PLAN_NAME, {"phases": [{"first_step": int, "asked": dict}]}
    phases = read_json(plan, shape)["phases"] if plan.is_file() else []
    begins = [phase["first_step"] for phase in phases]
    now = [phases[max(0, bisect_right(begins, step["step"]) - 1)]["asked"] for step in facts.steps if phases]
    for bucket, share in facts.mix().items():
        yield series(chart, bucket, share, bucket=bucket)
        if now:
            planned = [asked.get(bucket, 0) / max(1, sum(asked.values())) for asked in now]
            yield series(chart, f"{bucket}, planned", planned, "plan", bucket)


def point_series(facts: Facts) -> Iterator[dict[str, Any]]:
    """Curves of what is measured now and then, validation above all; `steps`: how many were done."""
    found: dict[str, dict[int, float]] = {}
    for event in facts.events:
        for name, value in drawable(event).items():
            found.setdefault(name, {})[event["step"]] = value
    several = len(facts.manifest.get("val", {})) > 1
    for name, points in found.items():
        group, _, part = name.partition("/")
        if group in ("bpb", "loss") or (group == "buckets" and several):
            group = BPB if "bpb" in found else "Loss on validation, nats a token"
        if group != "buckets":  # of the one bucket that is all there is
            one = series(group, part or name, [*points.values()], "points", part)
            yield one | {"steps": [*points]}


def launches_of(run: Run, axes: Mapping[str, list[float]]) -> Iterator[dict[str, Any]]:
    """The launches for the time line, with a mark for each save, skip and so on."""
    for number, launch in enumerate(run.facts.launches, 1):
        marks = []
        for event in launch["events"]:
            kind, step = event["event"], event["step"]
            if kind not in ("wandb", "samples") and not drawable(event):
                more = {k: v for k, v in event.items() if k not in ("event", "step", "time")}
                told = ", ".join(f"{name} {show(value)}" for name, value in more.items())
                marks.append({"at": place(axes, step), "kind": kind, "text": f"{kind} at step {step:,}: {told}"})
        end, world = launch["end"] or ("" if run.alive else "killed"), launch["world_size"]
        told = f"launch {number} on {world} process(es): {end or 'at work'} at step {launch['last']:,}"
        yield {"from": place(axes, launch["first"]), "to": place(axes, launch["last"]), "end": end,
               "label": f"{number}: {world} proc.", "text": f"{told} {launch['reason']}", "marks": marks}


def rounded(values: Sequence[Any]) -> list[Any]:
    """Six digits of each number, which no eye tells from all of them."""
    return [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]


def kept_steps(steps: Sequence[Mapping[str, Any]], stride: int) -> list[int]:
    """Indices of the steps to draw: of each block of `stride` that with the highest loss, and the last."""
    kept = set(range(len(steps))[-1:])
    for first in range(0, len(steps), stride):
        block = range(first, min(first + stride, len(steps)))
        kept.add(max(block, key=lambda i: steps[i]["loss"] or 0.0))
    return sorted(kept)


def drawn(run: Run, stride: int, several: bool) -> dict[str, Any]:
    """What page.html draws of a run, with one of each `stride` steps. Beside several runs, which have
    a colour each, every bucket has a chart of its own."""
    axes, kept = step_axes(run.facts), kept_steps(run.facts.steps, stride)
    pick = lambda values: rounded([values[i] for i in kept])
    places = [{name: pick(axes[name]) for name in AXES}]
    curves = [*step_series(run.facts), *mix_series(run.facts, f"mix-{run.index}")]
    found = [{**one, "axis": 0, "y": pick(one["y"])} for one in curves]
    for one in point_series(run.facts):
        at = [place(axes, done) for done in one.pop("steps")]
        found.append({**one, "axis": len(places), "y": rounded(one["y"])})
        places.append({name: rounded([there[name] for there in at]) for name in AXES})
    for one in found:
        if several and one["bucket"] and one["chart"].startswith(("Loss", BPB)):
            one["chart"] = f"{one['chart']}: {one['bucket']}"
    return {"name": run.name, "axes": places, "series": found, "launches": [*launches_of(run, axes)],
            "steps": pick(axes["steps"]), "digests": [run.facts.steps[i]["digest"] for i in kept]}


def clip_at(values: Sequence[float]) -> float | None:
    """Where an axis from 0 ends so that the few highest of some values do not flatten the others, such
    as the first step of each launch; None if there are no such values."""
    ordered = sorted(values)
    top = 1.5 * ordered[int(0.95 * (len(ordered) - 1))]
    return top if 0 < 2 * top < ordered[-1] else None


def charts_of(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All charts in order, for what is drawn of the runs: {id, title, section, wide, look of y}."""
    found = dict.fromkeys(one["chart"] for run in runs for one in run["series"])
    mixes = {f"mix-{i}": i for i in range(len(runs))}
    charts: list[dict[str, Any]] = []
    for name in sorted(found, key=lambda name: (name != LOSS, not name.startswith(BPB))):
        chart = {"id": name, "title": name, "section": "curves", "wide": name == LOSS,
                 "y": {"rangemode": "normal" if name.startswith(("Loss", BPB)) else "tozero"}}
        if name == "Gradient norm":
            chart["y"] = {"type": "log"}
        if name == WAIT and (top := clip_at([y for run in runs for one in run["series"] if one["chart"] == WAIT
                                             for y in one["y"] if y is not None])):
            chart |= {"title": f"{name} (clipped)", "y": {"range": [0, top]}}
        if name in mixes:
            title = f"Mix of {runs[mixes[name]]['name']}: trained, and planned (dashed)"
            chart |= {"title": title, "section": "mix", "wide": len(runs) == 1, "run": mixes[name],
                      "y": {"rangemode": "tozero", "tickformat": ".0%"}}
        charts.append(chart)
    return [*charts, {"id": "timeline", "title": "Launches", "section": "timeline", "wide": True}]


# ---- tables and words ---------------------------------------------------------------------------

def table(header: Sequence[Any], rows: Sequence[Sequence[Any]], kind: str = "") -> str:
    """A table that scrolls where it is too wide, nothing without rows."""
    lines = [f"<tr>{''.join(f'<{tag}>{escape(show(cell))}</{tag}>' for cell in row)}</tr>"
             for tag, some in (("th", [header]), ("td", rows)) for row in some]
    return f'<div class="scroll"><table class="{kind}">{"".join(lines)}</table></div>' if rows else ""


def card(title: str, content: str, kind: str = "") -> str:
    """A box with a title; `content` is HTML."""
    return f'<div class="card {kind}"><h3>{escape(title)}</h3>{content}</div>'


def headline(run: Run) -> str:
    """What to see first of a run: state, step, bits per byte, tokens/s, time."""
    state, facts = run.state, run.facts
    last = facts.steps[-1] if facts.steps else {"step": -1, "tokens": 0}
    shown, done = state["shown"] if state["status"] else facts.status, last["step"] + 1
    total = facts.horizon or done
    val: list[float | None] = [bpb for bpb in facts.val().values() if bpb is not None] or [None]
    rate = statistics.median([step["tokens_per_s"] for step in facts.steps[-100:]] or [0.0])
    time_s, what = (state["eta_s"], "left") if run.alive else (facts.spent_s, "in steps")
    figures = {"steps": f"{done:,} / {total:,}", f"bits per byte, {show(val[0])} at first": show(val[-1]),
               "tokens/s": show(rate), what: duration(time_s), "tokens": show(last["tokens"])}
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>"
                    for name, value in figures.items())
    words = " ".join([*in_words(facts), f"Last checkpoint: {state.get('checkpoint') or 'none'}."])
    return (f'<div class="card"><span class="swatch c{run.index % 8}"></span>'
            f'<b>{escape(run.name)}</b>'
            f'<span class="pill {TONES[status.COLORS.get(shown, status.RED)]}">{escape(shown)}</span>'
            f'<progress max="{total}" value="{done}"></progress>'
            f'<div class="facts">{cells}</div><p class="soft">{escape(words)}</p></div>')


def account(run: Run) -> str:
    """The ledger of a run, nothing before its first save."""
    told, header, rows = told_ledger(*run.facts.accounts())
    content = table(header, rows, "numbers") + f'<p class="soft">{escape(told)}</p>'
    return card(f"Ledger of {run.name}", content) if rows else ""


def samples(run: Run) -> str:
    """What the model wrote, the newest first."""
    parts: list[str] = []
    for when, texts in run.facts.samples().items():
        quotes = "".join(f"<blockquote>{escape(str(text))}</blockquote>" for text in texts)
        start = f"<details{' open' * (not parts)}><summary>{escape(when)}</summary>"
        parts.append(f"{start}{quotes}</details>")
    return card(run.name, "".join(parts) or "None: --sample-every says how often.")


def what_differs(runs: Sequence[Run]) -> str:
    """The settings that differ between runs."""
    rows = differing([run.facts.config for run in runs])
    told = table(("setting", *(run.name for run in runs)), rows)
    return card("What differs", told) if rows else ""


def settings(run: Run) -> str:
    """The settings of a run: those that were set, and below them the others."""
    tables = split_settings(run.facts)
    rest = "".join(f"<details><summary>{name}</summary>{table(('setting', 'value'), tables[name])}</details>"
                   for name in ("worked out", "default"))
    return card(run.name, table(("set", "value", "default"), tables["set"]) + rest)


# ---- the page -----------------------------------------------------------------------------------

def embed(value: Any) -> str:
    """JSON that no browser takes for the end of its element, whatever is in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def make_page(runs: Sequence[Run], *, refresh: bool = False) -> str:
    """The whole page. `refresh`: whether it loads itself anew now and then. ValueError without
    plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError("plotly is not installed; pip install -e '.[page]'") from None
    ends = [run.facts.steps[-1] for run in runs if run.facts.steps]
    # a value takes some 10 bytes, and each step has four places on axes and a digest besides
    size = sum(len(run.facts.steps) * (60 + 10 * len(drawable(end)))
               for run, end in zip([run for run in runs if run.facts.steps], ends))
    stride = max(1, -(-size // ROOM))
    found = [drawn(run, stride, len(runs) > 1) for run in runs]
    buckets = sorted({one["bucket"] for run in found for one in run["series"]} - {""})
    charts, now = charts_of(found), time.strftime("%Y-%m-%d %H:%M %Z")
    thin = f"Of every {stride} steps the one with the highest loss is drawn." if stride > 1 else ""
    parts = {"title": escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs"),
             "refresh": f'<meta http-equiv="refresh" content="{WATCH_EVERY_S}">' * refresh,
             "data": embed({"charts": charts, "buckets": buckets, "runs": found}),
             "plotly": get_plotlyjs(), "written": f"{now}. {thin}", "differing": what_differs(runs),
             "last": str(min((end["step"] for end in ends), default=0)),  # which all runs have
             "digests": "", "curves": "", "mix": "", "timeline": ""}
    for run in runs:
        cells = f'<td>{escape(run.name)}</td><td><code id="digest-{run.index}"></code></td>'
        parts["digests"] += f"<tr>{cells}</tr>"
    for chart in charts:
        plot = f'<div class="plot" id="{escape(chart["id"])}"></div>'
        parts[chart["section"]] += card(chart["title"], plot, "wide" * chart["wide"])
    for part in (headline, account, samples, settings):
        parts[part.__name__] = "".join(part(run) for run in runs)
    template = Path(__file__).with_name("page.html").read_text("utf-8")
    # in one go, so that no part is looked into
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Draw runs as one HTML page that needs no network.", epilog=__doc__)
    parser.add_argument("run", nargs="*", help="tags or run directories (default: all runs)")
    parser.add_argument("--out", type=Path, default=Path("page.html"), help="the page")
    parser.add_argument("--watch", action="store_true",
                        help="write it every ten seconds while a run is at work")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, say where. FileNotFoundError where there is no such run, ValueError for a broken
    file in one."""
    args = parse_args(argv)
    folders = [find_run(name).absolute() for name in args.run] or [
        path for path in map(run_path, list_runs()) if (path / CONFIG_NAME).is_file()]
    if not folders:
        raise FileNotFoundError("no runs yet; name a run directory")
    again = True
    while again:
        runs = [Run(i, read_facts(path), status.look(path)) for i, path in enumerate(folders)]
        again = args.watch and any(run.alive for run in runs)
        args.out.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_bytes(args.out, make_page(runs, refresh=again).encode())
        print(f"written: {args.out.absolute()}, of {', '.join(run.name for run in runs)}", flush=True)
        if again:
            time.sleep(WATCH_EVERY_S)
    return 0


if __name__ == "__main__":
    run_main(main)
