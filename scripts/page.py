"""Draw runs as one HTML page that works offline: curves, mix, timeline, token counts, samples,
settings.

    python -m scripts.page mine                         # writes page.html
    python -m scripts.page mine other --out=both.html   # two runs on one page; without a name: all runs
    python -m scripts.page mine --watch                 # rewrite the page every ten seconds while the run is alive

In the charts, a fork's curves start at the step where it branches off from its parent.

    run directory --nanochat.run_reader--> curves, launches --> JSON --plotly--> charts
                                     '---> tables, sentences --> HTML, escaped

Every number in a log line of a step becomes a curve, every number in an event a curve of points,
and all other events are marks on the timeline. A value that you add to the log therefore needs no
change here. The page is scripts/page.html with its placeholders filled in. plotly is embedded,
compressed (1.9 MB of base64 instead of 4.8 MB), and a content policy keeps the browser from loading
anything else. If a run is too long for the page,
only the step with the highest loss in each block is drawn, so spikes stay visible.
"""

import base64
import gzip
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
from nanochat.config import current
from nanochat.run_dir import CONFIG_NAME, find_run, list_runs, run_path
from nanochat.run_reader import (
    ENDS,
    Launch,
    RunReader,
    differing_settings,
    flat_numbers,
    ledger_table,
    tree_of,
)
from nanochat.run_settings import setting_tables
from scripts import status
from scripts.report import sentences_about

ROOM = 1_000_000  # bytes of JSON; the whole page stays below 4 MB
WATCH_EVERY_S = 10
BAND_POINTS = 500  # maximum number of steps for which the band of row losses is drawn
AXES = ("steps", "tokens", "FLOPs", "hours")
LOSS = "Loss, nats per token"
BPB = "Validation bits per byte"
BUCKETS = "Loss by bucket, smoothed"
WAIT = "Data wait, ms per step"
# {number in a log line: (title of its chart, factor)}; any other number has a chart with its own
# name as the title
CHARTS = {
    "loss": (LOSS, 1),
    "smooth_loss": (LOSS, 1),
    "lr": ("Learning rate, relative to its peak", 1),
    "grad_norm": ("Gradient norm", 1),
    "tokens_per_s": ("Tokens/s", 1),
    "mfu": ("Model FLOPs utilization, %", 100),
    "wait_s": (WAIT, 1000),
    "peak_memory_bytes": ("Peak memory, GB", 1e-9),
}
# numbers that are axes, not curves; events that become marks even if they have numbers
NOT_DRAWN = ("step", "time", "tokens", "step_s", "total_training_flops", "total_training_time")
MARKS = ("saved", "save_failed", "dropped", "skipped", "started", "samples", "wandb", *ENDS)
# CSS class by terminal color
TONES = {status.GREEN: "good", status.YELLOW: "wait", status.RED: "bad"}

Curve = dict[str, Any]  # made by `series`


class Run(RunReader):
    """A run on the page. `index` selects its color."""

    def __init__(self, run_dir: Path, index: int) -> None:
        super().__init__(run_dir)
        self.index = index
        self.state = self.status()
        self.step_axes = self.axes()

    @property
    def alive(self) -> bool:
        return self.state["liveness"] == "alive"

    def position(self, done: int) -> dict[str, float]:
        """The position on each axis after `done` steps."""
        axes = self.step_axes
        last = bisect_left(axes["steps"], done) - 1
        position = dict(self.origin)
        if last >= 0:
            for name in AXES:
                position[name] = axes[name][last]
        position["steps"] = done
        return position


# ---- curves -------------------------------------------------------------------------------------


def drawable(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a log record that are drawn as curves."""
    if record.get("event") in MARKS:
        return {}
    numbers = dict(flat_numbers(record))
    for name in NOT_DRAWN:
        numbers.pop(name, None)
    return numbers


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """A running mean, computed like `smooth_loss`; None stays None."""
    means: list[float | None] = []
    total = weight = 0.0
    for value in values:
        if value is None:
            means.append(None)
            continue
        total = 0.9 * total + 0.1 * value
        weight = 0.9 * weight + 0.1
        means.append(total / weight)
    return means


def series(chart: str, name: str, y: list[Any], look: str = "line", bucket: str = "") -> Curve:
    """A curve for page.html.

    `look`: raw, line, points, plan, or edge and band, between which the area is filled.
    """
    return {"chart": chart, "name": name, "y": y, "look": look, "bucket": bucket}


def step_series(run: RunReader) -> Iterator[Curve]:
    """Curves with one value per step."""
    names: dict[str, None] = {}
    for step in run.steps:
        names |= dict.fromkeys(drawable(step))
    for name in names:
        values = [step.get(name) for step in run.steps]
        group, _, bucket = name.partition("/")
        if group == "loss" and bucket:
            yield series(BUCKETS, bucket, smooth(values), bucket=bucket)
            continue
        if group == "tokens" or not any(values):
            continue
        title, factor = CHARTS.get(name, (name, 1))
        scaled = [None if value is None else factor * value for value in values]
        label = "smoothed" if name == "smooth_loss" else name
        look = "raw" if name == "loss" else "line"
        yield series(title, label, scaled, look)


def planned_mix(run: RunReader) -> list[dict[str, float]]:
    """What the curriculum asks of each bucket, {bucket: tokens}, at each step; [] without phases."""
    phases = run.phases
    if not phases:
        return []
    begins = [phase["first_step"] for phase in phases]
    plans = []
    for step in run.steps:
        current = max(0, bisect_right(begins, step["step"]) - 1)
        plans.append(phases[current]["asked"])
    return plans


def mix_series(run: RunReader, chart: str) -> Iterator[Curve]:
    """The shares of the buckets, as trained and as planned."""
    plans = planned_mix(run)
    for bucket, share in run.mix().items():
        yield series(chart, bucket, share, bucket=bucket)
        if not plans:
            continue
        planned = []
        for asked in plans:
            total = max(1, sum(asked.values()))
            planned.append(asked.get(bucket, 0) / total)
        yield series(chart, f"{bucket}, planned", planned, "plan", bucket)


def point_series(run: RunReader) -> Iterator[Curve]:
    """Curves of the numbers in events, mainly validation results.

    `steps`: the steps done at each point.
    """
    curves: dict[str, dict[int, float]] = {}
    for event in run.events:
        for name, value in drawable(event).items():
            points = curves.setdefault(name, {})
            points[event["step"]] = value
    val_buckets = run.manifests.get("val", {})
    validation = BPB if "bpb" in curves else "Validation loss, nats per token"
    for name, points in curves.items():
        group, _, part = name.partition("/")
        if group == "buckets" and len(val_buckets) < 2:  # a single bucket repeats the total
            continue
        chart = validation if group in ("bpb", "loss", "buckets") else group
        curve = series(chart, part or name, [*points.values()], "points", part)
        curve["steps"] = [*points]
        yield curve


def row_tenths(run: RunReader, step: int) -> tuple[float, float] | None:
    """The 10th and 90th percentile of the row losses of a step, in nats per token.

    None without finite ones. FileNotFoundError if the step has none: older versions could leave
    them out.
    """
    import numpy as np

    nats, live = run.row_losses.read(step)
    trained = live > 0
    if not trained.any():
        return None
    losses = nats[trained] / live[trained]
    low, high = np.quantile(losses, [0.1, 0.9])
    if not np.isfinite([low, high]).all():
        return None
    return float(low), float(high)


def band_series(run: RunReader) -> Iterator[Curve]:
    """The 10th and 90th percentile of the row losses of at most BAND_POINTS `steps`.

    Nothing if none are recorded.
    """
    if not (run.run_dir / "logs" / "rows").is_dir():
        return
    lows: dict[int, float] = {}
    highs: dict[int, float] = {}
    stride = max(1, -(-len(run.steps) // BAND_POINTS))
    for record in run.steps[::stride]:
        step = record["step"]
        try:
            tenths = row_tenths(run, step)
        except FileNotFoundError:
            continue
        if tenths is not None:
            lows[step], highs[step] = tenths
    if lows:
        edge = series(LOSS, "10 % of rows", [*lows.values()], "edge")
        band = series(LOSS, "10 to 90 % of rows", [*highs.values()], "band")
        yield edge | {"steps": [*lows]}
        yield band | {"steps": [*highs]}


def marks_of(run: Run, launch: Launch) -> list[dict[str, Any]]:
    """A mark for each save, skipped step and other event of a launch that is not drawn as points."""
    marks = []
    for event in launch.events:
        kind = event["event"]
        if kind in ("wandb", "samples") or drawable(event):
            continue
        values = []
        for name, value in event.items():
            if name not in ("event", "step", "time"):
                values.append(f"{name} {show(value)}")
        step = event["step"]
        text = f"{kind} at step {step:,}: {', '.join(values)}"
        mark = {"at": run.position(step), "kind": kind, "text": text}
        marks.append(mark)
    return marks


def launches_of(run: Run) -> Iterator[dict[str, Any]]:
    """The launches on the timeline, with a mark for each save, skipped step and other event."""
    for number, launch in enumerate(run.launches, 1):
        end = launch.end
        if not end and not run.alive:
            end = "killed"
        world = launch.world_size
        outcome = f"{end or 'running'} at step {launch.last:,} {launch.reason}"
        yield {
            "from": run.position(launch.first),
            "to": run.position(launch.last),
            "end": end,
            "label": f"{number}: {world} proc.",
            "text": f"launch {number} on {counted(world, 'process')}: {outcome}",
            "marks": marks_of(run, launch),
        }


def rounded(values: Sequence[float | None]) -> list[float | None]:
    """The values with six digits; a chart shows no more."""
    result = list(values)
    for i, value in enumerate(values):
        if isinstance(value, float):
            result[i] = float(f"{value:.6g}")
    return result


def kept_steps(steps: Sequence[Mapping[str, Any]], stride: int) -> list[int]:
    """Indices of the steps to draw.

    The one with the highest loss of each block of `stride`, and the last one.
    """
    if not steps:
        return []
    kept = {len(steps) - 1}
    losses = [step["loss"] or 0.0 for step in steps]
    for first in range(0, len(steps), stride):
        end = min(first + stride, len(steps))
        highest = max(range(first, end), key=losses.__getitem__)
        kept.add(highest)
    return sorted(kept)


def chart_data(run: Run, stride: int, several: bool) -> dict[str, Any]:
    """The data that page.html draws for a run, thinned to one in `stride` steps.

    With `several` runs, which have one color each, every bucket gets its own chart.
    """
    axes = run.step_axes
    kept = kept_steps(run.steps, stride)

    def pick(values: Sequence[Any]) -> list[Any]:
        return rounded([values[i] for i in kept])

    # curves with a value per step share the first set of axes
    all_axes = [{name: pick(axes[name]) for name in AXES}]
    curves = [*step_series(run), *mix_series(run, f"mix-{run.index}")]
    for curve in curves:
        curve["axis"] = 0
        curve["y"] = pick(curve["y"])

    # curves of points have axes of their own, with the positions of their steps
    for curve in (*point_series(run), *band_series(run)):
        positions = [run.position(done) for done in curve.pop("steps")]
        curve["axis"] = len(all_axes)
        curve["y"] = rounded(curve["y"])
        curves.append(curve)
        own_axes = {}
        for name in AXES:
            own_axes[name] = rounded([position[name] for position in positions])
        all_axes.append(own_axes)

    curves.sort(key=is_line)  # the band is drawn below the lines
    for curve in curves:
        chart, bucket = curve["chart"], curve["bucket"]
        if several and bucket and is_of_losses(chart):
            curve["chart"] = f"{chart}: {bucket}"
    return {
        "name": run.name,
        "axes": all_axes,
        "series": curves,
        "is_fork": run.fork is not None,
        "launches": [*launches_of(run)],
        "steps": pick(axes["steps"]),
        "digests": [run.steps[i]["digest"] for i in kept],
    }


def is_line(curve: Curve) -> bool:
    return curve["look"] not in ("edge", "band")


def is_of_losses(chart: str) -> bool:
    return chart.startswith(("Loss", "Validation"))


def wait_range(curves: Sequence[Curve]) -> list[float] | None:
    """The y range of the chart of data waits, if launches' first steps would flatten the others."""
    waits: list[float] = []
    for curve in curves:
        if curve["chart"] == WAIT:
            waits += [y for y in curve["y"] if y is not None]
    if not waits:
        return None
    waits.sort()
    percentile = int(0.95 * (len(waits) - 1))
    top = 1.5 * waits[percentile]
    is_flat = 0 < 2 * top < waits[-1]
    return [0, top] if is_flat else None


def chart_rank(name: str) -> tuple[bool, bool]:
    """Where a chart is on the page: training loss first, then validation, then the others."""
    return name != LOSS, not name.startswith(BPB)


def charts_of(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All charts in order, from the `chart_data` of all runs.

    {id, title, section, wide, settings of the y axis}
    """
    curves: list[Curve] = []
    for run in runs:
        curves += run["series"]
    names = dict.fromkeys(curve["chart"] for curve in curves)
    mixes = {f"mix-{i}": i for i in range(len(runs))}
    clipped = wait_range(curves)
    charts: list[dict[str, Any]] = []
    for name in sorted(names, key=chart_rank):
        chart: dict[str, Any] = {
            "id": name,
            "title": name,
            "section": "curves",
            "wide": name == LOSS,
            "y": {"rangemode": "normal" if is_of_losses(name) else "tozero"},
        }
        if name == "Gradient norm":
            chart["y"] = {"type": "log"}
        if name == WAIT and clipped:
            chart["title"] = f"{name} (clipped)"
            chart["y"] = {"range": clipped}
        if name in mixes:
            of_run = mixes[name]
            chart["title"] = f"Mix of {runs[of_run]['name']}: trained (solid) and planned (dashed)"
            chart["section"] = "mix"
            chart["wide"] = len(runs) == 1
            chart["run"] = of_run
            chart["y"] = {"rangemode": "tozero", "tickformat": ".0%"}
        charts.append(chart)
    charts.append({"id": "timeline", "title": "Launches", "section": "timeline", "wide": True})
    return charts


def table_row(cells: Sequence[Any], tag: str) -> str:
    """A row of a table; `tag` is th in the header, else td."""
    shown = [f"<{tag}>{escape(show(cell))}</{tag}>" for cell in cells]
    return f"<tr>{''.join(shown)}</tr>"


# ---- tables and sentences -----------------------------------------------------------------------


def table(header: Sequence[Any], rows: Sequence[Sequence[Any]], kind: str = "") -> str:
    """A table that scrolls if it is too wide; "" without rows."""
    if not rows:
        return ""
    lines = [table_row(header, "th")]
    for row in rows:
        lines.append(table_row(row, "td"))
    return f'<div class="scroll"><table class="{kind}">{"".join(lines)}</table></div>'


def figures_of(run: Run) -> dict[str, str]:
    """The most important figures of a run as {name: value}."""
    done = run.num_steps
    val: list[float | None] = [*run.val_bpb.values()] or [None]
    figures = {
        "steps": f"{done:,} / {run.horizon or done:,}",
        f"bits per byte, {show(val[0])} at first": show(val[-1]),
        "tokens/s": show(run.median("tokens_per_s", last=100)),
    }
    if run.alive:
        figures["left"] = duration(run.state["eta_s"])
    else:
        figures["training time"] = duration(run.train_time_s)
    figures["tokens"] = show(run.num_tokens)
    return figures


def card(title: str, content: str, kind: str = "") -> str:
    """A box with a title around `content`, which is HTML."""
    return f'<div class="card {kind}"><h3>{escape(title)}</h3>{content}</div>'


def headline(run: Run) -> str:
    """The most important figures of a run: state, step, bits per byte, tokens/s, time."""
    state = run.state
    done = run.num_steps
    shown = state["shown"] if state["status"] else run.outcome
    color = status.COLORS.get(shown, status.RED)
    cells = []
    for name, value in figures_of(run).items():
        cells.append(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>")
    checkpoint = state.get("checkpoint") or "none"
    sentences = " ".join([*sentences_about(run), f"Last checkpoint: {checkpoint}."])
    parts = [
        f'<div class="card"><span class="swatch c{run.index % 8}"></span>',
        f"<b>{escape(run.name)}</b>",
        f'<span class="pill {TONES[color]}">{escape(shown)}</span>',
        f'<progress max="{run.horizon or done}" value="{done}"></progress>',
        f'<div class="facts">{"".join(cells)}</div>',
        f'<p class="soft">{escape(sentences)}</p>',
        "</div>",
    ]
    return "".join(parts)


def account(run: Run) -> str:
    """The ledger of a run; "" before its first save."""
    text, header, rows = ledger_table(*run.ledger())
    if not rows:
        return ""
    content = table(header, rows, "numbers")
    note = f'<p class="soft">{escape(text)}</p>'
    return card(f"Ledger of {run.name}", content + note)


def samples(run: Run) -> str:
    """The texts that the model wrote, newest first."""
    parts: list[str] = []
    for when, texts in run.samples().items():
        quotes = ""
        for text in texts:
            quotes += f"<blockquote>{escape(str(text))}</blockquote>"
        opened = "" if parts else " open"  # only the newest
        summary = f"<summary>{escape(when)}</summary>"
        parts.append(f"<details{opened}>{summary}{quotes}</details>")
    content = "".join(parts) or "None. --sample-every=N samples every N steps."
    return card(run.name, content)


def settings(run: Run) -> str:
    """The settings of a run: first those that the command set, then the others."""
    tables = setting_tables(run.config, run.typed)
    content = table(("setting", "value", "default"), tables["set"])
    for name, title in (("worked out", "derived"), ("default", "at their defaults")):
        rest = table(("setting", "value"), tables[name])
        content += f"<details><summary>{title}</summary>{rest}</details>"
    return card(run.name, content)


def json_bytes(run: Run) -> int:
    """About how many bytes of JSON a run's steps take.

    A value takes 10; each step also has four axis positions and a digest.
    """
    if not run.steps:
        return 0
    values_per_step = len(drawable(run.steps[-1]))
    return len(run.steps) * (60 + 10 * values_per_step)


# ---- the page -----------------------------------------------------------------------------------


def embed(value: Mapping[str, Any]) -> str:
    """JSON that cannot end the HTML element around it, whatever it contains."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def make_page(runs: Sequence[Run], *, refresh: bool = False) -> str:
    """The whole page.

    `refresh`: whether the browser reloads it regularly. ValueError without plotly.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError("plotly is not installed; pip install -e '.[page]'") from None
    several = len(runs) > 1
    size = sum(json_bytes(run) for run in runs)
    stride = max(1, -(-size // ROOM))
    data = [chart_data(run, stride, several) for run in runs]
    charts = charts_of(data)
    buckets: set[str] = set()
    for of_run in data:
        buckets |= {curve["bucket"] for curve in of_run["series"]}

    now = time.strftime("%Y-%m-%d %H:%M %Z")
    thinned = ""
    if stride > 1:
        thinned = f"Of every {stride} steps, the one with the highest loss is drawn."
    header = ("setting", *(run.name for run in runs))
    differ = table(header, differing_settings([current(run.config) for run in runs]))
    last_steps = [run.num_steps - 1 for run in runs if run.steps]
    parts = {
        "title": escape(f"{len(runs)} runs" if several else runs[0].name),
        "refresh": f'<meta http-equiv="refresh" content="{WATCH_EVERY_S}">' if refresh else "",
        "data": embed({"charts": charts, "buckets": sorted(buckets - {""}), "runs": data}),
        "plotly": base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),
        "written": f"{now}. {thinned}",
        "differing": card("What differs", differ) if differ else "",
        "last": str(min(last_steps, default=0)),  # all runs have it
        "digests": "",
        **dict.fromkeys(("curves", "mix", "timeline"), ""),
    }
    for run in runs:
        cells = f'<td>{escape(run.name)}</td><td><code id="digest-{run.index}"></code></td>'
        parts["digests"] += f"<tr>{cells}</tr>"
    for chart in charts:
        plot = f'<div class="plot" id="{escape(chart["id"])}"></div>'
        parts[chart["section"]] += card(chart["title"], plot, "wide" if chart["wide"] else "")
    for part in (headline, account, samples, settings):
        parts[part.__name__] = "".join(part(run) for run in runs)
    template = Path(__file__).with_name("page.html").read_text("utf-8")
    # one pass over the template, so that a {{...}} inside a part is not replaced
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def by_parent(folders: Sequence[Path]) -> list[Path]:
    """The folders of runs, with forks after their parents."""
    parents: dict[str, str | None] = {}
    for path in folders:
        parent = RunReader(path).parent_dir
        parents[str(path)] = str(parent) if parent else None
    return [Path(path) for path in tree_of(parents)]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print its path.

    FileNotFoundError for an unknown run, ValueError for a corrupt file in one.
    """
    parser = Parser(description=__doc__)
    parser.add_argument(
        "run", metavar="RUN", nargs="*", help="names or folders of runs (default: all runs)"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("page.html"),
        help="where to write the page",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="rewrite the page every ten seconds while a run is alive",
    )
    args = parser.parse_args(argv)
    out = args.out.absolute()
    folders = [find_run(name).absolute() for name in args.run]
    if not folders:
        every_run = [run_path(name) for name in list_runs()]
        folders = [path for path in every_run if (path / CONFIG_NAME).is_file()]
    if not folders:
        raise FileNotFoundError("no runs in the base directory; name a run's folder")
    while True:
        runs = [Run(path, i) for i, path in enumerate(by_parent(folders))]
        watch = args.watch and any(run.alive for run in runs)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(args.out, make_page(runs, refresh=watch).encode())
        names = ", ".join(run.name for run in runs)
        print(f"wrote {out}: {names}", flush=True)
        if not watch:
            return 0
        time.sleep(WATCH_EVERY_S)


if __name__ == "__main__":
    run_main(main)
