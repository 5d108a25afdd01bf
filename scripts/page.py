"""
Draw runs as one HTML page that works offline: curves, mix, timeline, token counts, samples, settings.

    python -m scripts.page mine                         # writes page.html
    python -m scripts.page mine other --out=both.html   # two runs on one page; without a name: all runs
    python -m scripts.page mine --watch                 # rewrite the page every ten seconds while the run is alive

    run directory --nanochat.run_reader--> curves, launches --> JSON --plotly--> charts
                                     '---> tables, sentences --> HTML, escaped

Every number in a log line of a step becomes a curve, every number in an event a curve of points, and all other
events are marks on the timeline. A value that you add to the log therefore needs no change here. The page is
scripts/page.html with its placeholders filled in. plotly is embedded, and a content policy keeps the browser from
loading anything else. If a run is too long for the page, only the step with the highest loss in each block is drawn, so
spikes stay visible.
"""

import contextlib
import json
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from nanochat.cli import Parser, run_main
from nanochat.common import counted, duration, show, write_bytes
from nanochat.config import setting_tables
from nanochat.run_dir import CONFIG_NAME, find_run, list_runs, run_path
from nanochat.run_reader import ENDS, RunReader, differing_settings, flat_numbers, ledger_table
from scripts import status
from scripts.report import summarize

ROOM = 1_000_000  # bytes of JSON; the whole page stays below 6 MB
WATCH_EVERY_S = 10
BAND_POINTS = 500  # maximum number of steps for which the band of row losses is drawn
AXES = ("steps", "tokens", "FLOPs", "hours")
LOSS, BPB, BUCKETS = "Loss, nats per token", "Validation bits per byte", "Loss by bucket, smoothed"
WAIT = "Data wait, ms per step"
# {number in a log line: (title of its chart, factor)}; any other number has a chart with its own name as the title
CHARTS = {"loss": (LOSS, 1), "smooth_loss": (LOSS, 1), "lr": ("Learning rate, relative to its peak", 1),
          "grad_norm": ("Gradient norm", 1), "tokens_per_s": ("Tokens/s", 1),
          "mfu": ("Model FLOPs utilization, %", 100), "wait_s": (WAIT, 1000),
          "peak_memory_bytes": ("Peak memory, GB", 1e-9)}
# numbers that are axes, not curves; events that become marks even if they have numbers
NOT_DRAWN = ("step", "time", "tokens", "step_s", "total_training_flops", "total_training_time")
MARKS = ("saved", "save_failed", "dropped", "skipped", "started", "samples", "wandb", *ENDS)
TONES = {status.GREEN: "good", status.YELLOW: "wait", status.RED: "bad"}  # CSS class by terminal color


class Run(RunReader):
    """A run on the page. `index` selects its color."""

    def __init__(self, run_dir: Path, index: int) -> None:
        super().__init__(run_dir)
        self.index, self.state = index, self.status()

    @property
    def alive(self) -> bool:
        return self.state["liveness"] == "alive"


# ---- curves -------------------------------------------------------------------------------------

def axis_position(axes: Mapping[str, list[float]], done: int) -> dict[str, float]:
    """The position on each axis after `done` steps."""
    i = bisect_left(axes["steps"], done) - 1
    return {name: axes[name][i] if i >= 0 else 0 for name in AXES} | {"steps": done}


def drawable(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a log record that are drawn as curves."""
    return {name: number for name, number in flat_numbers(record)
            if name not in NOT_DRAWN and record.get("event") not in MARKS}


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """A running mean, computed like `smooth_loss`; None stays None."""
    means: list[float | None] = []
    total = weight = 0.0
    for value in values:
        if value is not None:
            total, weight = 0.9 * total + 0.1 * value, 0.9 * weight + 0.1
        means.append(None if value is None else total / weight)
    return means


def series(chart: str, name: str, y: list[Any], look: str = "line", bucket: str = "") -> dict[str, Any]:
    """A curve for page.html. `look`: raw, line, points, plan, or edge and band, between which the area is filled."""
    return {"chart": chart, "name": name, "y": y, "look": look, "bucket": bucket}


def step_series(run: RunReader) -> Iterator[dict[str, Any]]:
    """Curves with one value per step."""
    for name in dict.fromkeys(name for step in run.steps for name in drawable(step)):
        values = [step.get(name) for step in run.steps]
        group, _, bucket = name.partition("/")
        if group == "loss" and bucket:
            yield series(BUCKETS, bucket, smooth(values), bucket=bucket)
        elif group != "tokens" and any(values):
            title, factor = CHARTS.get(name, (name, 1))
            scaled = [None if value is None else factor * value for value in values]
            label = "smoothed" if name == "smooth_loss" else name
            yield series(title, label, scaled, "raw" if name == "loss" else "line")


def mix_series(run: RunReader, chart: str) -> Iterator[dict[str, Any]]:
    """The shares of the buckets, as trained and as planned."""
    phases = run.phases
    begins = [phase["first_step"] for phase in phases]
    plans = [phases[max(0, bisect_right(begins, step["step"]) - 1)]["asked"] for step in run.steps if phases]
    for bucket, share in run.mix().items():
        yield series(chart, bucket, share, bucket=bucket)
        if plans:
            planned = [asked.get(bucket, 0) / max(1, sum(asked.values())) for asked in plans]
            yield series(chart, f"{bucket}, planned", planned, "plan", bucket)


def point_series(run: RunReader) -> Iterator[dict[str, Any]]:
    """Curves of the numbers in events, mainly validation results. `steps`: the steps done at each point."""
    curves: dict[str, dict[int, float]] = {}
    for event in run.events:
        for name, value in drawable(event).items():
            curves.setdefault(name, {})[event["step"]] = value
    several = len(run.manifests.get("val", {})) > 1
    for name, points in curves.items():
        group, _, part = name.partition("/")
        if group in ("bpb", "loss") or (group == "buckets" and several):
            group = BPB if "bpb" in curves else "Validation loss, nats per token"
        if group != "buckets":  # a single bucket repeats the total
            one = series(group, part or name, [*points.values()], "points", part)
            yield one | {"steps": [*points]}


def band_series(run: RunReader) -> Iterator[dict[str, Any]]:
    """The 10th and 90th percentile of the row losses of at most BAND_POINTS `steps`; nothing if none are recorded."""
    import numpy as np

    if not (run.run_dir / "logs" / "rows").is_dir():
        return
    tenths: dict[int, tuple[float, float]] = {}
    for step in run.steps[::max(1, -(-len(run.steps) // BAND_POINTS))]:
        with contextlib.suppress(FileNotFoundError):  # not recorded: --no-row-losses of older versions
            nats, live = run.row_losses.read(step["step"])
            low, high = np.quantile(nats[live > 0] / live[live > 0], [0.1, 0.9]) if live.any() else (np.nan, np.nan)
            if np.isfinite([low, high]).all():
                tenths[step["step"]] = float(low), float(high)
    for look, name, values in zip(("edge", "band"), ("10 % of rows", "10 to 90 % of rows"), zip(*tenths.values())):
        yield series(LOSS, name, [*values], look) | {"steps": [*tenths]}


def launches_of(run: Run, axes: Mapping[str, list[float]]) -> Iterator[dict[str, Any]]:
    """The launches on the timeline, with a mark for each save, skipped step and other event."""
    for number, launch in enumerate(run.launches, 1):
        marks = []
        for event in launch.events:
            kind, step = event["event"], event["step"]
            if kind not in ("wandb", "samples") and not drawable(event):
                values = [f"{k} {show(v)}" for k, v in event.items() if k not in ("event", "step", "time")]
                text = f"{kind} at step {step:,}: {', '.join(values)}"
                marks.append({"at": axis_position(axes, step), "kind": kind, "text": text})
        end, world = launch.end or ("" if run.alive else "killed"), launch.world_size
        text = (f"launch {number} on {counted(world, 'process')}: {end or 'running'} at step {launch.last:,} "
                f"{launch.reason}")
        yield {"from": axis_position(axes, launch.first), "to": axis_position(axes, launch.last), "end": end,
               "label": f"{number}: {world} proc.", "text": text, "marks": marks}


def rounded(values: Sequence[Any]) -> list[Any]:
    """The values with six digits; a chart shows no more."""
    return [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]


def kept_steps(steps: Sequence[Mapping[str, Any]], stride: int) -> list[int]:
    """Indices of the steps to draw: the one with the highest loss of each block of `stride`, and the last one."""
    kept = set(range(len(steps))[-1:])
    for first in range(0, len(steps), stride):
        block = range(first, min(first + stride, len(steps)))
        kept.add(max(block, key=lambda i: steps[i]["loss"] or 0.0))
    return sorted(kept)


def chart_data(run: Run, stride: int, several: bool) -> dict[str, Any]:
    """The data that page.html draws for a run, thinned to one in `stride` steps. With `several` runs, which have one
    color each, every bucket gets its own chart."""
    axes, kept = run.axes(), kept_steps(run.steps, stride)
    pick = lambda values: rounded([values[i] for i in kept])
    all_axes = [{name: pick(axes[name]) for name in AXES}]
    curves = [{**curve, "axis": 0, "y": pick(curve["y"])}
              for curve in (*step_series(run), *mix_series(run, f"mix-{run.index}"))]
    for curve in (*point_series(run), *band_series(run)):
        positions = [axis_position(axes, done) for done in curve.pop("steps")]
        curves.append({**curve, "axis": len(all_axes), "y": rounded(curve["y"])})
        all_axes.append({name: rounded([position[name] for position in positions]) for name in AXES})
    curves.sort(key=lambda curve: curve["look"] not in ("edge", "band"))  # the band is drawn below the lines
    for curve in curves:
        if several and curve["bucket"] and curve["chart"].startswith(("Loss", "Validation")):
            curve["chart"] = f"{curve['chart']}: {curve['bucket']}"
    return {"name": run.name, "axes": all_axes, "series": curves, "launches": [*launches_of(run, axes)],
            "steps": pick(axes["steps"]), "digests": [run.steps[i]["digest"] for i in kept]}


def charts_of(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All charts in order, from the `chart_data` of all runs: {id, title, section, wide, settings of the y axis}."""
    names = dict.fromkeys(curve["chart"] for run in runs for curve in run["series"])
    mixes = {f"mix-{i}": i for i in range(len(runs))}
    waits = sorted(y for run in runs for curve in run["series"] if curve["chart"] == WAIT
                   for y in curve["y"] if y is not None)
    top = 1.5 * waits[int(0.95 * (len(waits) - 1))] if waits else 0.0
    charts: list[dict[str, Any]] = []
    for name in sorted(names, key=lambda name: (name != LOSS, not name.startswith(BPB))):
        chart = {"id": name, "title": name, "section": "curves", "wide": name == LOSS,
                 "y": {"rangemode": "normal" if name.startswith(("Loss", "Validation")) else "tozero"}}
        if name == "Gradient norm":
            chart["y"] = {"type": "log"}
        if name == WAIT and 0 < 2 * top < waits[-1]:  # the first step of each launch would flatten the others
            chart |= {"title": f"{name} (clipped)", "y": {"range": [0, top]}}
        if name in mixes:
            title = f"Mix of {runs[mixes[name]]['name']}: trained (solid) and planned (dashed)"
            chart |= {"title": title, "section": "mix", "wide": len(runs) == 1, "run": mixes[name],
                      "y": {"rangemode": "tozero", "tickformat": ".0%"}}
        charts.append(chart)
    return [*charts, {"id": "timeline", "title": "Launches", "section": "timeline", "wide": True}]


# ---- tables and sentences -----------------------------------------------------------------------

def table(header: Sequence[Any], rows: Sequence[Sequence[Any]], kind: str = "") -> str:
    """A table that scrolls if it is too wide; "" without rows."""
    lines = [f"<tr>{''.join(f'<{tag}>{escape(show(cell))}</{tag}>' for cell in row)}</tr>"
             for tag, some in (("th", [header]), ("td", rows)) for row in some]
    return f'<div class="scroll"><table class="{kind}">{"".join(lines)}</table></div>' if rows else ""


def card(title: str, content: str, kind: str = "") -> str:
    """A box with a title around `content`, which is HTML."""
    return f'<div class="card {kind}"><h3>{escape(title)}</h3>{content}</div>'


def headline(run: Run) -> str:
    """The most important figures of a run: state, step, bits per byte, tokens/s, time."""
    state, done = run.state, run.num_steps
    shown, total = state["shown"] if state["status"] else run.outcome, run.horizon or done
    val: list[float | None] = [*run.val_bpb.values()] or [None]
    seconds, label = (state["eta_s"], "left") if run.alive else (run.train_time_s, "training time")
    figures = {"steps": f"{done:,} / {total:,}", f"bits per byte, {show(val[0])} at first": show(val[-1]),
               "tokens/s": show(run.median("tokens_per_s", last=100)), label: duration(seconds),
               "tokens": show(run.num_tokens)}
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in figures.items())
    sentences = " ".join([*summarize(run), f"Last checkpoint: {state.get('checkpoint') or 'none'}."])
    tone = TONES[status.COLORS.get(shown, status.RED)]
    return (f'<div class="card"><span class="swatch c{run.index % 8}"></span><b>{escape(run.name)}</b>'
            f'<span class="pill {tone}">{escape(shown)}</span><progress max="{total}" value="{done}"></progress>'
            f'<div class="facts">{cells}</div><p class="soft">{escape(sentences)}</p></div>')


def account(run: Run) -> str:
    """The ledger of a run; "" before its first save."""
    text, header, rows = ledger_table(*run.ledger())
    content = table(header, rows, "numbers") + f'<p class="soft">{escape(text)}</p>'
    return card(f"Ledger of {run.name}", content) if rows else ""


def samples(run: Run) -> str:
    """The texts that the model wrote, newest first."""
    parts: list[str] = []
    for when, texts in run.samples().items():
        quotes = "".join(f"<blockquote>{escape(str(text))}</blockquote>" for text in texts)
        start = f"<details{' open' * (not parts)}><summary>{escape(when)}</summary>"
        parts.append(f"{start}{quotes}</details>")
    return card(run.name, "".join(parts) or "None. --sample-every=N samples every N steps.")


def settings(run: Run) -> str:
    """The settings of a run: first those that the command set, then the others."""
    tables = setting_tables(run.config, run.typed)
    rest = "".join(f"<details><summary>{title}</summary>{table(('setting', 'value'), tables[name])}</details>"
                   for name, title in (("worked out", "derived"), ("default", "at their defaults")))
    return card(run.name, table(("setting", "value", "default"), tables["set"]) + rest)


# ---- the page -----------------------------------------------------------------------------------

def embed(value: Any) -> str:
    """JSON that cannot end the HTML element around it, whatever it contains."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def make_page(runs: Sequence[Run], *, refresh: bool = False) -> str:
    """The whole page. `refresh`: whether the browser reloads it regularly. ValueError without plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError("plotly is not installed; pip install -e '.[page]'") from None
    # a value takes about 10 bytes; each step also has four axis positions and a digest
    size = sum(len(run.steps) * (60 + 10 * len(drawable(run.steps[-1]))) for run in runs if run.steps)
    stride = max(1, -(-size // ROOM))
    data = [chart_data(run, stride, len(runs) > 1) for run in runs]
    buckets = sorted({curve["bucket"] for run in data for curve in run["series"]} - {""})
    charts, now = charts_of(data), time.strftime("%Y-%m-%d %H:%M %Z")
    thinned = f"Of every {stride} steps, the one with the highest loss is drawn." if stride > 1 else ""
    differ = table(("setting", *(run.name for run in runs)), differing_settings([run.config for run in runs]))
    parts = {"title": escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs"),
             "refresh": f'<meta http-equiv="refresh" content="{WATCH_EVERY_S}">' * refresh,
             "data": embed({"charts": charts, "buckets": buckets, "runs": data}),
             "plotly": get_plotlyjs(), "written": f"{now}. {thinned}",
             "differing": card("What differs", differ) if differ else "",
             "last": str(min((run.num_steps - 1 for run in runs if run.steps), default=0)),  # all runs have it
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
    # one pass over the template, so that a {{...}} inside a part is not replaced
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print its path. FileNotFoundError for an unknown run, ValueError for a corrupt file in one."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", nargs="*", help="names or folders of runs (default: all runs)")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("page.html"), help="where to write the page")
    parser.add_argument("--watch", action="store_true", help="rewrite the page every ten seconds while a run is alive")
    args = parser.parse_args(argv)
    folders = [find_run(name).absolute() for name in args.run] or [
        path for path in map(run_path, list_runs()) if (path / CONFIG_NAME).is_file()]
    if not folders:
        raise FileNotFoundError("no runs in the base directory; name a run's folder")
    while True:
        runs = [Run(path, i) for i, path in enumerate(folders)]
        watch = args.watch and any(run.alive for run in runs)
        args.out.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_bytes(args.out, make_page(runs, refresh=watch).encode())
        print(f"wrote {args.out.absolute()}: {', '.join(run.name for run in runs)}", flush=True)
        if not watch:
            return 0
        time.sleep(WATCH_EVERY_S)


if __name__ == "__main__":
    run_main(main)
