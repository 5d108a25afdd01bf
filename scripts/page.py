"""Draw runs as one HTML page that works offline: curves, mix, timeline, token counts, samples,
settings.

    python -m scripts.page mine                         # writes page.html
    python -m scripts.page mine other --out=both.html   # two runs on one page; without a name: all runs
    python -m scripts.page mine --watch                 # rewrite the page every ten seconds while the run is alive

In the charts, a fork's curves start at the step where it branches off from its parent.

    run directory --nanochat.run_reader--> launches --nanochat.run_curves--> JSON --plotly--> charts
                                     '---> tables, sentences --> HTML, escaped

Events that are not drawn as curves are marks on the timeline. The page is scripts/page.html with its
placeholders filled in. plotly is embedded, compressed (1.9 MB of base64 instead of 4.8 MB), and a
content policy keeps the browser from loading anything else.
"""

import base64
import gzip
import json
import re
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from nanochat.cli import Parser, run_main
from nanochat.common import Bits, counted, duration, few, show, write_bytes
from nanochat.run_curves import (
    BPB,
    LOSS,
    WAIT,
    Curve,
    band_series,
    drawable,
    kept_steps,
    mix_series,
    point_series,
    step_series,
)
from nanochat.run_dir import CONFIG_NAME, find_run, run_dirs
from nanochat.run_facts import differing_settings, sentences_about, validation_note
from nanochat.run_reader import (
    Launch,
    LogRecord,
    RunReader,
    Table,
    ledger_table,
    tree_of,
)
from nanochat.run_settings import setting_tables
from scripts import status

ROOM = 1_000_000  # bytes of JSON; the whole page stays below 4 MB
WATCH_EVERY_S = 10
AXES = ("steps", "tokens", "FLOPs", "hours")
MIX_NOTE = "Shares of the tokens with loss."
PLAN_NOTE = " A mix is planned in rows, so the dashed lines are estimates."
FEW = 3  # of more runs, only smoothed curves are drawn, and settings and history are folded
# CSS class by terminal color
TONES = {status.GREEN: "good", status.YELLOW: "wait", status.RED: "bad"}


class Run(RunReader):
    """A run on the page, one of `num_runs`.

    `index` selects its color; `depth` is its depth in the tree of forks.
    """

    def __init__(self, run_dir: Path, index: int, *, depth: int = 0, num_runs: int = 1) -> None:
        super().__init__(run_dir)
        self.index = index
        self.depth = depth
        self.is_one_of_several = num_runs > 1
        self.is_one_of_many = num_runs > FEW
        self.state = self.status()
        self.step_axes = self.axes()

    @property
    def alive(self) -> bool:
        return self.state["liveness"] == "alive"

    def end_of(self, launch: Launch) -> str:
        """How a launch ended; "" if it runs."""
        return launch.end or ("" if self.alive else "killed")

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


# ---- charts -------------------------------------------------------------------------------------


def is_mark(event: LogRecord) -> bool:
    """Whether an event is a mark on the timeline, not a point of a curve."""
    return event["event"] not in ("wandb", "samples", "ranks") and not drawable(event)


def event_text(event: LogRecord) -> tuple[str, str]:
    """(what happened, details) of an event."""
    kind = event["event"]
    if kind == "dropped":
        return f"bucket {event['bucket']} ran dry", f"in {counted(event['lanes'], 'lane')}"
    values = []
    for name, value in event.items():
        if name not in ("event", "step", "time", "digest", "skipped"):
            values.append(f"{name} {show(value)}")
    what = "step not applied" if kind == "skipped" else kind.replace("_", " ")
    return what, ", ".join(values)


def marks_of(run: Run, launch: Launch) -> Iterator[dict[str, Any]]:
    """A mark for each save, skipped step and other event of a launch."""
    for event in filter(is_mark, launch.events):
        what, details = event_text(event)
        text = f"step {event['step']:,}: {what}: {details}"
        yield {"at": run.position(event["step"]), "kind": event["event"], "text": text}


def launch_text(number: int, launch: Launch) -> str:
    """A launch in words: on how many processes, and whether with other model code than the one before."""
    text = f"launch {number} on {counted(launch.world_size, 'process')}"
    return f"{text} with other model code ({few(launch.other_code)})" if launch.other_code else text


def launches_of(run: Run) -> Iterator[dict[str, Any]]:
    """The launches on the timeline, with a mark for each save, skipped step and other event."""
    for number, launch in enumerate(run.launches, 1):
        end = run.end_of(launch)
        outcome = f"{end or 'running'} at step {launch.last:,} {launch.reason}"
        yield {
            "from": run.position(launch.first),
            "to": run.position(launch.last),
            "end": end,
            "label": f"{number}: {launch.world_size} proc.",
            "text": f"{launch_text(number, launch)}: {outcome}",
            "marks": [*marks_of(run, launch)],
        }


def rounded(values: Sequence[float | None]) -> list[float | None]:
    """The values with six digits; a chart shows no more."""
    result = list(values)
    for i, value in enumerate(values):
        if isinstance(value, float):
            result[i] = float(f"{value:.6g}")
    return result


def chart_data(run: Run, stride: int) -> dict[str, Any]:
    """The data that page.html draws for a run, thinned to one in `stride` steps.

    With several runs, which have one color each, every bucket gets its own chart.
    """
    kept = kept_steps(run.steps, stride)

    # curves with a value per step share the first set of axes
    of_steps = {name: rounded([run.step_axes[name][i] for i in kept]) for name in AXES}
    all_axes = [of_steps]
    every_step = step_series(run, kept, only_smoothed=run.is_one_of_many)
    curves = [*every_step, *mix_series(run, kept, f"mix-{run.index}")]
    for curve in curves:
        curve["axis"] = 0
        curve["y"] = rounded(curve["y"])

    # curves of points have axes of their own, with the positions of their steps
    bands = () if run.is_one_of_many else band_series(run)
    for curve in (*point_series(run), *bands):
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
        if run.is_one_of_several and bucket and is_of_losses(chart):
            curve["chart"] = f"{chart}: {bucket}"
    return {
        "name": run.name,
        "axes": all_axes,
        "series": curves,
        "is_fork": run.fork is not None,
        "launches": [*launches_of(run)],
        "steps": of_steps["steps"],
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
        looks = {curve["look"] for curve in curves if curve["chart"] == name}
        if looks == {"smooth"}:
            chart["title"] = f"{name}, smoothed"
        if name == "Gradient norm":
            # at most three of plotly's ticks per decade: 1, 2, 5, with all their digits
            chart["y"] = {"type": "log", "nticks": 3, "tickformat": ",.3~r"}
        if name == WAIT and clipped:
            chart["title"] += " (clipped)"
            chart["y"] = {"range": clipped}
        if name in mixes:
            of_run = mixes[name]
            chart["title"] = f"Mix of {runs[of_run]['name']}"
            chart["note"] = MIX_NOTE
            if "plan" in looks:
                chart["title"] += ": trained (solid) and planned (dashed)"
                chart["note"] += PLAN_NOTE
            chart["section"] = "mix"
            chart["wide"] = len(runs) == 1
            chart["run"] = of_run
            chart["y"] = {"rangemode": "tozero", "tickformat": ".0%"}
        charts.append(chart)
    charts.append({"id": "timeline", "title": "Launches", "section": "timeline", "wide": True})
    return charts


# ---- tables and sentences -----------------------------------------------------------------------


def table_row(cells: Sequence[Any], tag: str) -> str:
    """A row of a table; `tag` is th in the header, else td."""
    shown = [f"<{tag}>{escape(show(cell))}</{tag}>" for cell in cells]
    return f"<tr>{''.join(shown)}</tr>"


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
    done = run.reached
    evaluated = [*run.val_bpb.items()]
    newest = None
    measured = "bits per byte"
    if evaluated:
        step, newest = evaluated[-1]
        measured += "" if step == done else f" at step {step:,}"
    if len(evaluated) > 1:
        step, first = evaluated[0]
        when = "at first" if step == run.first_step else f"at step {step:,}"
        measured += f", {show(Bits(first))} {when}"
    figures = {
        "steps": f"{done:,} / {run.horizon or done:,}",
        measured: show(Bits.of(newest)),
    }
    if run.made_of:
        return figures
    figures["tokens/s, last 100 steps"] = show(run.median("tokens_per_s", last=100))
    if run.alive:
        figures["left"] = duration(run.state["eta_s"])
    else:
        figures["training time"] = duration(run.train_time_s)
    figures["tokens of its own" if run.fork else "tokens"] = show(run.own_tokens)
    return figures


def card(title: str, content: str, kind: str = "") -> str:
    """A box with a title around `content`, which is HTML."""
    return f'<div class="card {kind}"><h3>{escape(title)}</h3>{content}</div>'


def folded_card(title: str, content: str, *, is_open: bool) -> str:
    """A box that a click on its title opens and closes."""
    opened = " open" if is_open else ""
    return f'<details class="card"{opened}><summary>{escape(title)}</summary>{content}</details>'


def swatch(run: Run) -> str:
    """The name of a run, behind its color."""
    line, color = divmod(run.index, 8)  # as in page.html: eight colors, then dashed lines
    return f'<span class="swatch c{color} d{line % 4}"></span><b>{escape(run.name)}</b>'


def pill(run: Run) -> str:
    """The state of a run, in the color that scripts.status gives it."""
    shown = run.state["shown"] if run.state["status"] else run.outcome
    tone = TONES[status.COLORS.get(shown, status.RED)]
    return f'<span class="pill {tone}">{escape(shown)}</span>'


def tree(runs: Sequence[Run]) -> str:
    """The tree of forks, as scripts.status shows it; "" for a single run, or without forks."""
    if len(runs) == 1 or not any(run.fork for run in runs):
        return ""
    items = ""
    for run in runs:
        branch = "└ " if run.depth else ""
        fork = status.fork_text(run.state, below_parent=run.depth > 0) or ""
        texts = [fork, counted(run.reached, "step")]
        if run.val_bpb:
            step, bpb = [*run.val_bpb.items()][-1]
            when = "" if step == run.reached else f" at step {step:,}"
            texts.append(f"{show(Bits(bpb))} bits per byte{when}")
        about = escape("; ".join(filter(None, texts)))
        content = f'{branch}{swatch(run)}{pill(run)} <span class="soft">{about}</span>'
        items += f'<p style="margin-left: {20 * run.depth}px">{content}</p>'
    return card("Forks", items)


def headline(run: Run) -> str:
    """The most important figures of a run: state, step, bits per byte, tokens/s, time."""
    done = run.reached
    cells = []
    for name, value in figures_of(run).items():
        cells.append(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>")
    checkpoint = run.state.get("checkpoint") or "none"
    sentences = " ".join([*sentences_about(run), f"Last checkpoint: {checkpoint}."])
    parts = [
        f'<div class="card">{swatch(run)}{pill(run)}',
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


def history(run: Run) -> str:
    """What happened in a run: launches and their ends, halts, dry buckets, steps not applied, steps
    taken again. "" before the first launch."""
    rows: Table = []
    if run.fork is not None:
        rows.append((run.fork.step, f"fork of {status.fork_text(run.state)}"))
    previous = None
    for number, launch in enumerate(run.launches, 1):
        begin = launch_text(number, launch)
        if previous is not None and launch.first < previous.last:
            again = counted(previous.last - launch.first, "step")
            begin += f": {again} taken again, up to step {previous.last - 1:,}"
        rows.append((launch.first, begin))
        rows += event_rows(launch)
        end = f"launch {number} {run.end_of(launch) or 'is running'}: {launch.reason}"
        rows.append((launch.last, end.removesuffix(": ")))
        previous = launch
    content = table(("step", "what happened"), rows, "history")
    return folded_card(run.name, content, is_open=not run.is_one_of_many) if rows else ""


def event_rows(launch: Launch) -> Table:
    """(step or steps, what happened) for the events of a launch, except saves and curves. Those of
    one kind share a row: hundreds of lanes may drop a bucket one after the other."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for event in launch.events:
        if event["event"] != "saved" and is_mark(event):
            what, details = event_text(event)
            kinds.setdefault(what, []).append((event["step"], details))
    rows: Table = []
    for what, of_kind in kinds.items():
        first, begin = of_kind[0]
        last, end = of_kind[-1]
        if len(of_kind) == 1:
            rows.append((first, f"{what}: {begin}"))
        else:
            text = f"{what}, {len(of_kind):,} times: first {begin}; last {end}"
            rows.append((f"{first:,} to {last:,}", text))
    return rows


def samples(run: Run) -> str:
    """The texts that the model wrote, newest first; "" if there are none."""
    parts: list[str] = []
    for when, texts in run.samples().items():
        quotes = ""
        for text in texts:
            quotes += f"<blockquote>{escape(str(text))}</blockquote>"
        opened = "" if parts else " open"  # only the newest
        summary = f"<summary>{escape(when)}</summary>"
        parts.append(f"<details{opened}>{summary}{quotes}</details>")
    return card(run.name, "".join(parts)) if parts else ""


def settings(run: Run) -> str:
    """The settings of a run: first those that the command set, then the others."""
    tables = setting_tables(run.last_config, run.typed)
    content = table(("setting", "value", "default"), tables["set"])
    for name, title in (("worked out", "derived"), ("default", "at their defaults")):
        rest = table(("setting", "value"), tables[name])
        content += f"<details><summary>{title}</summary>{rest}</details>"
    return folded_card(run.name, content, is_open=not run.is_one_of_many)


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


def plotly_source() -> str:
    """plotly.js for the page: compressed, as base64. ValueError without plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError("plotly is not installed; pip install -e '.[page]'") from None
    compressed = gzip.compress(get_plotlyjs().encode(), mtime=0)
    return base64.b64encode(compressed).decode()


def chart_cards(charts: Sequence[Mapping[str, Any]], *, note: str) -> dict[str, str]:
    """The cards of the charts, by section of the page. `note` stands above the validation losses."""
    cards = dict.fromkeys(("curves", "mix", "timeline"), "")
    for chart in charts:
        plot = f'<div class="plot" id="{escape(chart["id"])}"></div>'
        if chart["id"] == BPB and note:
            plot = f"<p>{escape(note[0].upper() + note[1:])}.</p>{plot}"
        if "note" in chart:
            plot += f'<p class="soft">{chart["note"]}</p>'
        cards[chart["section"]] += card(chart["title"], plot, "wide" if chart["wide"] else "")
    return cards


def make_page(runs: Sequence[Run], *, refresh: bool = False) -> str:
    """The whole page.

    `refresh`: whether the browser reloads it regularly. ValueError without plotly.
    """
    plotly = plotly_source()
    size = sum(json_bytes(run) for run in runs)
    stride = max(1, -(-size // ROOM))
    data = [chart_data(run, stride) for run in runs]
    index_of = {str(run.run_dir): run.index for run in runs}
    for run, of_run in zip(runs, data):
        of_run["parent"] = index_of.get(str(run.parent_dir))
    charts = charts_of(data)
    buckets: set[str] = set()
    for of_run in data:
        buckets |= {curve["bucket"] for curve in of_run["series"]}

    now = time.strftime("%Y-%m-%d %H:%M %Z")
    thinned = ""
    if stride > 1:
        thinned = f"Of every {stride} steps, the one with the highest loss is drawn."
    header = ("setting", *(run.name for run in runs))
    differ = table(header, differing_settings(runs))
    last_steps = [run.num_steps - 1 for run in runs if run.steps]
    parts = {
        "title": escape(few(run.name for run in runs)),
        "refresh": f'<meta http-equiv="refresh" content="{WATCH_EVERY_S}">' if refresh else "",
        "data": embed({"charts": charts, "buckets": sorted(buckets - {""}), "runs": data}),
        "plotly": plotly,
        "written": f"{now}. {thinned}",
        "tree": tree(runs),
        "differing": card("What differs", differ) if differ else "",
        "last": str(min(last_steps, default=0)),  # all runs have it
        "digests": "",
        **chart_cards(charts, note=validation_note(runs)),
    }
    for run in runs:
        cells = f'<td>{escape(run.name)}</td><td><code id="digest-{run.index}"></code></td>'
        parts["digests"] += f"<tr>{cells}</tr>"
    for part in (headline, account, history, samples, settings):
        parts[part.__name__] = "".join(part(run) for run in runs)
    parts["samples"] = parts["samples"] or "<p>None: --sample-every=N samples every N steps.</p>"
    template = Path(__file__).with_name("page.html").read_text("utf-8")
    # one pass over the template, so that a {{...}} inside a part is not replaced
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, forks after their parents."""
    parents: dict[str, str | None] = {}
    for path in folders:
        parent = RunReader(path).parent_dir
        parents[str(path)] = str(parent) if parent else None
    runs = []
    for index, (folder, depth) in enumerate(tree_of(parents).items()):
        runs.append(Run(Path(folder), index, depth=depth, num_runs=len(parents)))
    return runs


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
        folders = [path for path in run_dirs() if (path / CONFIG_NAME).is_file()]
    if not folders:
        raise FileNotFoundError("no runs in the base directory; name a run's folder")
    while True:
        runs = open_runs(folders)
        watch = args.watch and any(run.alive for run in runs)
        out.parent.mkdir(parents=True, exist_ok=True)
        text = make_page(runs, refresh=watch)
        write_bytes(args.out, text.encode(errors="backslashreplace"))
        names = ", ".join(run.name for run in runs)
        print(f"wrote {out}: {names}", flush=True)
        if not watch:
            return 0
        time.sleep(WATCH_EVERY_S)


if __name__ == "__main__":
    run_main(main)
