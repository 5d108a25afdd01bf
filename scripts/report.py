"""
Write the report of a run as markdown: what ran, on what, how long, and what came of it.

    python -m scripts.report d12                      # writes RUN/report.md and RUN/report-*.png
    python -m scripts.report d12 --stages FILE        # with the times of speedrun.sh's stages

It reads the run directory and changes nothing else, so it may be written at any time and as often
as you like. Every part of the report is a function from Facts to lines. A part whose file is
missing says so in one line: a report of an unfinished run is a report, too. The pictures are drawn
by matplotlib without a display, from the same Facts; where it is missing, the report says so.

FILE is what speedrun.sh keeps: a line `name <tab> seconds <tab> exit code <tab> command` for each
stage that ended. Where a stage ran several times, its times are added up.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.cli import Parser, run_main
from nanochat.common import atomic_open, check_shape, duration, read_json, show, visible, write_bytes
from nanochat.config import FIELDS
from nanochat.run_data import pinned_data
from nanochat.run_dir import CONFIG_NAME, cursor_files, find_run, iter_log, read_config, read_cursors, read_log
from nanochat.stream import LEDGER, ledger, share

# the shape of what is computed with, in the lines of the log
STEP = {"step": int, "digest": str, "tokens": int, **dict.fromkeys(("tokens_per_s", "step_s", "wait_s"), float),
        **dict.fromkeys(("loss", "smooth_loss", "lr", "grad_norm", "mfu"), float | None)}
EVALUATION = {"step": int, "train_bpb": dict, "samples": dict}
EVENTS = {"saved": {"step": int}, "val": {"step": int, "bpb": float | None},
          "started": {"step": int, "world_size": int, "device": str, "torch": str}}
# of a launch, in its first event
STARTED = ("world_size", "device", "gpu", "torch", "code", "command", "typed", "num_iterations")
ENDS = ("completed", "stopped", "halted", "failed")  # events: how a launch ends if nobody kills it


# ---- reading ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Facts:
    """All that a report is made from."""

    run_dir: Path
    config: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)  # of the log, ascending
    events: list[dict[str, Any]] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)
    cursors: tuple[int, list[dict[str, Any]]] | None = None  # of the newest save: (step, cursors)
    launches: list[dict[str, Any]] = field(default_factory=list)  # see `read_launches`
    evaluation: dict[str, Any] = field(default_factory=dict)
    stages: list[list[Any]] = field(default_factory=list)  # [name, seconds, runs, failed, command]

    def named(self, *names: str) -> list[dict[str, Any]]:
        """The events of some names, in order."""
        return [e for e in self.events if e.get("event") in names]

    @property
    def spent_s(self) -> float:
        """Seconds in steps."""
        return sum(step["step_s"] for step in self.steps)

    @property
    def horizon(self) -> int | None:
        """Steps that the last launch was to reach. Older logs have only what the first was to."""
        last = self.launches[-1]["num_iterations"] if self.launches else None
        return last if isinstance(last, int) else self.config.get("derived", {}).get("num_iterations")

    def val(self) -> dict[int, float | None]:
        """{steps done: bits per byte on validation}."""
        return {event["step"]: event["bpb"] for event in self.named("val")}

    def accounts(self) -> tuple[int, dict[str, dict[str, int]], int]:
        """(step, ledger, T) of the newest save; at step 0, and empty, before the first. ValueError for
        broken cursors."""
        (step, cursors), T = self.cursors or (0, []), self.config["max_seq_len"]
        try:
            return step, ledger(cursors, T), T
        except ValueError as e:
            raise ValueError(f"{cursor_files(self.run_dir)[step]}: {e}") from None

    def files(self) -> list[tuple[str, str, int, int, int]]:
        """(split and bucket, folder, number, bytes, documents) of the files that the run reads. Bytes
        are those of the user's own files, whatever they were converted to."""
        return [(f"{bucket} ({split})", m["root"], len(m["files"]),
                 sum(f.get("own_size", f["size"]) for f in m["files"]), sum(sum(f["groups"]) for f in m["files"]))
                for split, buckets in self.manifest.items() for bucket, m in buckets.items()]

    def mix(self) -> dict[str, list[float]]:
        """{bucket: its share of the tokens of the last steps, a fiftieth of the run or 20, by each logged step};
        nothing where there is one bucket."""
        columns = sorted({name for step in self.steps for name in step if name.startswith("tokens/")})
        counts = np.array([[step.get(name) or 0 for name in columns] for step in self.steps], float)
        if not counts.size:
            return {}
        sums, window = counts.cumsum(axis=0), max(20, len(counts) // 50)
        sums[window:] -= sums[:-window].copy()
        shares = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1)
        return {name.removeprefix("tokens/"): share for name, share in zip(columns, shares.T.tolist())}

    def samples(self) -> dict[str, list[str]]:
        """{when: what the model wrote}, the newest of the training first."""
        told = {f"after {event['step']:,} steps": event.get("texts") or [] for event in self.named("samples")[::-1]}
        return told | {f"at the evaluation, {kind}": texts
                       for kind, texts in self.evaluation.get("samples", {}).items()}

    @property
    def status(self) -> str:
        """completed, or how the last launch ended and how far the last save is."""
        how, saved = self.launches[-1]["end"] if self.launches else "", self.named("saved")
        if how == "completed":
            return how
        return f"{how or 'unfinished'}, saved at step {saved[-1]['step']:,}" if saved else "nothing saved yet"


def read_stages(path: Path) -> list[list[Any]]:
    """The stages of a file in the order in which they first ran; torn lines are passed over."""
    stages: dict[str, list[Any]] = {}
    for line in re.findall(r"(?m)^(.*)\t([0-9.]+)\t([0-9]+)\t(.*)$", path.read_text("utf-8", "replace")):
        name, seconds, code, command = line
        _, total, runs, failed, _ = stages.get(name, ("", 0.0, 0, 0, ""))
        stages[name] = [name, total + float(seconds), runs + 1, failed + (code != "0"), command]
    return list(stages.values())


def read_launches(log: Path) -> list[dict[str, Any]]:
    """The launches of a run in order, from its log: {"first": steps that were done when it began, "last":
    when it ended, "end": completed, stopped, halted, failed, killed (it does not say), or "" for the last
    one where it does not say, "reason": of the end, "events": the others, and of the event "started"
    names of STARTED}."""
    launches: list[dict[str, Any]] = []
    for record in iter_log(log):
        step, event = record.get("step"), record.get("event")
        if type(step) is not int:
            continue
        if event == "started":
            for before in launches[-1:]:
                before["end"] = before["end"] or "killed"
            launches.append({"first": step, "last": step, "end": "", "reason": "", "events": [],
                             **{name: record.get(name) for name in STARTED}})
        elif launches:
            launch = launches[-1]
            launch["last"] = max(launch["last"], step + (event is None))
            if event in ENDS:
                launch |= {"end": event, "reason": record.get("reason") or ""}
            elif event is not None:
                launch["events"].append(record)
    return launches


def read_facts(run_dir: Path, stages: Path | None = None) -> Facts:
    """Everything about a run that lies on disk. FileNotFoundError if it never started, ValueError
    for a broken file."""
    records = read_log(run_dir / "logs" / "train.jsonl")
    for record in records:
        shape = STEP if "event" not in record else EVENTS.get(str(record["event"]))
        check_shape(record, shape, f"{run_dir / 'logs' / 'train.jsonl'}: step {record.get('step')!r:.20}")
    config = read_config(run_dir)
    derived = config.setdefault("derived", {})
    check_shape(config, {"max_seq_len": int, "derived": dict}, run_dir / CONFIG_NAME)
    check_shape(derived, dict.fromkeys(derived, float | None), f"{run_dir / CONFIG_NAME}: derived")
    kept = cursor_files(run_dir)
    evaluation = read_json(run_dir / "eval.json", EVALUATION) if (run_dir / "eval.json").is_file() else {}
    return Facts(run_dir, config,
                 steps=[r for r in records if "event" not in r],
                 events=[r for r in records if "event" in r], manifest=pinned_data(run_dir),
                 launches=read_launches(run_dir / "logs" / "train.jsonl"),
                 cursors=read_cursors(kept[max(kept)]) if kept else None, evaluation=evaluation,
                 stages=read_stages(stages) if stages is not None and stages.is_file() else [])


# ---- markdown -----------------------------------------------------------------------------------

def plain(text: str) -> str:
    """Text that no renderer of markdown takes for HTML."""
    return escape(text, quote=False)


def markdown(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A markdown table and an empty line, nothing without rows. The first column stands to the
    left, the others to the right; bars and HTML in a cell are escaped."""
    cells = [[plain(show(cell)).replace("|", "\\|").replace("\n", " ") for cell in row]
             for row in (header, *rows)]
    cells.insert(1, ["---"] + ["---:"] * (len(header) - 1))
    return [f"| {' | '.join(line)} |" for line in cells] + [""] if rows else []


def quoted(text: str) -> list[str]:
    """Text in a fence that it cannot end, whatever is in it, and an empty line. Control characters are escaped."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *map(visible, text.splitlines()), fence, ""]


# ---- the parts ----------------------------------------------------------------------------------

def in_words(facts: Facts) -> list[str]:
    """How the run went, a few sentences: how far it came and how it ended, what it learned, what
    happened on the way."""
    launches, steps = facts.launches, facts.steps
    if not (launches and steps):
        return ["No step was logged."]
    last, of_all = launches[-1], facts.horizon
    ends = {"": "has not said how it ended", **{end: end for end in ENDS}}
    reason = f" ({last['reason']})" if last["reason"] else ""
    said = [f"The run {ends[last['end']]}{reason} after {last['last']:,} steps{f' of {of_all:,}' if of_all else ''}: "
            f"{steps[-1]['tokens']:,} tokens in {duration(facts.spent_s)} of steps."]
    val = [event["bpb"] for event in facts.named("val") if event["bpb"] is not None]
    if len(val) > 1:
        moved = "fell" if val[-1] < val[0] else "did not fall: it went"
        said.append(f"Validation bits per byte {moved} from {show(val[0])} to {show(val[-1])}.")
    cut = [f"{sum(launch['end'] == end for launch in launches[:-1])} {end}" for end in ("killed", "stopped", "failed")]
    told = ", ".join(text for text in cut if not text.startswith("0 ")) or "one after the other"
    worlds = sorted({launch["world_size"] for launch in launches if launch["world_size"]})
    said.append(f"It took {len(launches)} launches ({told})" if len(launches) > 1 else "It took one launch")
    said[-1] += f", on {' and '.join(map(str, worlds)) or '?'} process{'es' * (worlds != [1])}."
    if skipped := facts.named("skipped"):
        said.append(f"{len(skipped)} step(s) were skipped as spikes, the last one step {skipped[-1]['step']:,}.")
    return said


def result_part(facts: Facts) -> list[str]:
    """The figures to look at first. Two runs with equal digests saw equal data."""
    val, evaluation, steps = facts.named("val"), facts.evaluation, facts.steps
    rows: list[tuple[str, Any]] = [
        ("validation bits per byte, before training", val[0]["bpb"] if len(val) > 1 and val[0]["step"] == 0 else None),
        ("validation bits per byte, after", evaluation.get("val_bpb", val[-1]["bpb"] if val else None)),
        ("a unigram model's on the same tokens", evaluation.get("unigram_bpb")),
        *((f"training bits per byte, `{name}`", bpb) for name, bpb in evaluation.get("train_bpb", {}).items()),
        ("CORE metric", evaluation.get("core", {}).get("core_metric"))]
    if steps:
        waited = sum(step["wait_s"] for step in steps) / facts.spent_s
        mfu, rate = (statistics.median(step.get(name) or 0 for step in steps) for name in ("mfu", "tokens_per_s"))
        peak = max(step.get("peak_memory_bytes") or 0 for step in steps)
        rows += [("steps", steps[-1]["step"] + 1), ("tokens trained on", steps[-1]["tokens"]),
                 ("time in steps", f"{duration(facts.spent_s)}, {100 * waited:.2f} % of it waiting for data"),
                 ("tokens/s, median step", rate),
                 ("model FLOPs utilization, median step", f"{100 * mfu:.1f} %" if mfu else None),
                 ("peak memory of rank 0", f"{peak / 1e9:.1f} GB" if peak else None),
                 *((f"digest of the batch of step {step['step']:,}", f"`{step['digest']}`")
                   for step in (steps[0], steps[-1]))]
    lines = markdown(("figure", "result"), [row for row in rows if row[1] is not None])
    if not evaluation:
        lines.append(plain(f"`python -m scripts.base_eval {facts.run_dir.name}` has not run: it adds samples, and a "
                           f"unigram model to compare with."))
    elif steps and evaluation["step"] != steps[-1]["step"] + 1:
        lines.append(f"eval.json is of step {evaluation['step']:,}; the training went on since.")
    return lines


def split_settings(facts: Facts) -> dict[str, list[tuple[str, ...]]]:
    """The settings of a run in three tables: (name, value, default) of those that the command set;
    (name, value) of those that were worked out from these, from the data and the machine; and of the
    others."""
    typed = (facts.launches[0]["typed"] if facts.launches else None) or ()
    tables: dict[str, list[tuple[str, ...]]] = {"set": [], "worked out": [], "default": []}
    for name, value in facts.config.items():
        usual = FIELDS[name].default if name in FIELDS else None
        if name in FIELDS and value == usual:
            tables["default"].append((name, json.dumps(value)))
        elif name in typed:
            tables["set"].append((name, json.dumps(value), json.dumps(usual)))
        elif name != "derived":
            tables["worked out"].append((name, json.dumps(value)))
    derived = facts.config.get("derived", {}).items()
    tables["worked out"] += [(name, show(value)) for name, value in derived if name not in typed]
    return tables


def differing(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str | None, ...]]:
    """(name, the value that each of some runs has, as JSON) of the settings that differ between them."""
    told = [{name: json.dumps(value) for name, value in config.items() if name != "derived"} for config in configs]
    rows = [(name, *(config.get(name) for config in told)) for name in {k: 0 for config in told for k in config}]
    return [row for row in rows if len({*row[1:]}) > 1]


def settings_part(facts: Facts) -> list[str]:
    """What ran: commands, settings, and what follows from them."""
    stages = [(name, duration(seconds), *more) for name, seconds, *more, _ in facts.stages]
    commands = [stage[-1] for stage in facts.stages] or [
        f"{launch['command']}{'  # a process of ' + str(launch['world_size']) if launch['world_size'] != 1 else ''}"
        for launch in facts.launches if launch["command"]]
    tables = split_settings(facts)
    return ["Commands:", "", *quoted("\n".join(dict.fromkeys(commands)) or "not known"),
            *markdown(("stage", "time", "runs", "of them failed or stopped"), stages),
            *markdown(("set", "value", "default"), tables["set"]),
            *markdown(("worked out", "value"), tables["worked out"]),
            "<details><summary>default</summary>", "",
            *quoted("\n".join(" ".join(row) for row in tables["default"])), "</details>", ""]


def launches_part(facts: Facts) -> list[str]:
    """On what: what each launch said of its machine and of the code on it."""
    return markdown(("trained from step", "processes", "on", "PyTorch", "commit"), [
        (launch["first"], launch["world_size"], launch["gpu"] or launch["device"], launch["torch"],
         launch["code"] or "not known") for launch in facts.launches])


def unbalanced(accounts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """{bucket: by how many tokens} of the accounts that do not balance, which is a bug of ours."""
    off = {name: a["read"] + a["bos"] + a["repeated"] - a["emitted"] - a["cropped"] - a["pending"]
           for name, a in accounts.items()}
    return {name: tokens for name, tokens in off.items() if tokens}


def told_ledger(step: int, accounts: Mapping[str, Mapping[str, int]], T: int
                ) -> tuple[str, tuple[str, ...], list[tuple[Any, ...]]]:
    """The ledger after some steps for people: a paragraph, and heading and rows of a table."""
    law, wrong = "read + bos + repeated = emitted + cropped + pending", unbalanced(accounts)
    off = ", ".join(f"{name} by {tokens:,}" for name, tokens in wrong.items())
    verdict = f"IT DOES NOT BALANCE ({law}): off in {off}." if off else f"It balances: {law}."
    rows = [(bucket, *(a[name] for name in LEDGER), f"{100 * share(a, 'cropped'):.2f}")
            for bucket, a in accounts.items()]
    told = (f"Ledger after {step:,} steps, in tokens; a row has T + 1 = {T + 1:,} of them, for inputs and targets "
            f"overlap. {verdict} 'cropped %' is of emitted + cropped, 'epochs' are those that a lane has begun.")
    return told, ("bucket", *LEDGER, "cropped %"), rows


def data_part(facts: Facts) -> list[str]:
    """What was read, and the accounts of every token of it."""
    lines = markdown(("files", "where", "number", "bytes", "documents"), facts.files())
    told, header, rows = told_ledger(*facts.accounts())
    accounts = [plain(told), "", *markdown(header, rows)] if rows else ["No checkpoint yet, so no accounts."]
    return lines + accounts


def samples_part(facts: Facts) -> list[str]:
    """What the model wrote: the newest of the training, and all of the evaluation."""
    lines, newest = [], True
    for when, texts in facts.samples().items():
        if newest or when.startswith("at the evaluation"):
            lines += [f"{when[0].upper()}{when[1:]}:", "", *(line for text in texts for line in quoted(text))]
        newest = False
    return lines or ["None: --sample-every says how often."]


PARTS = {"Result": result_part, "What ran": settings_part, "On what": launches_part,
         "Data": data_part, "Samples": samples_part}


# ---- pictures -----------------------------------------------------------------------------------

def draw_loss(facts: Facts, axes: Any) -> None:
    """Loss as logged and smoothed, and bits per byte on a scale of its own. None is a gap."""
    x = [step["step"] for step in facts.steps]
    raw, smooth = (np.array([step[name] for step in facts.steps], float) for name in ("loss", "smooth_loss"))
    axes.plot(x, raw, color="C0", alpha=0.3, linewidth=0.8, label="loss")
    axes.plot(x, smooth, color="C0", label="loss, smoothed")
    axes.set_ylabel("loss, nats a token")
    if val := facts.val():
        right = axes.twinx()
        right.plot([*val], np.array([*val.values()], float), "o-", color="C1", markersize=5, label="bits per byte",
                   clip_on=False)
        right.set_ylabel("bits per byte on validation")
        right.legend(loc="upper right", frameon=False)
    axes.legend(loc="upper center", frameon=False)


def draw_mix(facts: Facts, axes: Any) -> None:
    """Shares of the buckets in what was trained on."""
    if mix := facts.mix():
        axes.stackplot([step["step"] for step in facts.steps], [*mix.values()], labels=[*mix])
        axes.set_ylabel("share of trained tokens")
        axes.set_ylim(0, 1)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def draw_throughput(facts: Facts, axes: Any) -> None:
    """Tokens/s of every step."""
    x = [step["step"] for step in facts.steps]
    axes.plot(x, [step["tokens_per_s"] for step in facts.steps], linewidth=0.8)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)


PICTURES = {"loss": draw_loss, "mix": draw_mix, "throughput": draw_throughput}


def pictures(facts: Facts) -> dict[str, Any]:
    """{name: figure of matplotlib} of what there is to draw. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    found = {}
    for name, draw in PICTURES.items() if facts.steps else ():
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.subplots()
        draw(facts, axes)
        axes.set_xlabel("step")
        axes.margins(x=0)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.has_data():
            found[name] = figure
    return found


def save_pictures(facts: Facts, folder: Path) -> list[str]:
    """Draw the pictures beside the report; the lines of the report that show them."""
    try:
        figures = pictures(facts)
    except ImportError:
        return ["No pictures: matplotlib is not installed (`pip install -e '.[plot]'`)."]
    for name, figure in figures.items():
        with atomic_open(folder / f"report-{name}.png") as f:
            figure.savefig(f, format="png", dpi=100)
    return [f"![{name} by step](report-{name}.png)" for name in figures]


def make_report(facts: Facts, shown: Sequence[str] = ()) -> str:
    """The whole report. `shown`: the lines that show its pictures."""
    lines = [plain(f"# Run `{facts.config.get('model_tag', facts.run_dir.name)}`: {facts.status}"), "",
             *map(plain, in_words(facts)), "", *shown, "",
             plain(f"Written {time.strftime('%Y-%m-%d %H:%M %Z')} from `{facts.run_dir}`, where everything lies."), ""]
    for title, part in PARTS.items():
        lines += [f"## {title}", "", *part(facts), ""]
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Write the report of a run.")
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run's name or folder (default: the only run)")
    parser.add_argument("--stages", type=Path, help="a file of stage times, as speedrun.sh keeps it")
    parser.add_argument("--output", type=Path, help="default: RUN/report.md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Read, write, say where. FileNotFoundError where there is no run, ValueError for a broken file
    in it."""
    args = parse_args(argv)
    run_dir = find_run(args.run).absolute()
    facts = read_facts(run_dir, args.stages)
    output = args.output or run_dir / "report.md"
    shown = save_pictures(facts, output.absolute().parent)
    write_bytes(output, make_report(facts, shown).encode())
    print(f"{run_dir.name}: {facts.status}", *result_part(facts), f"report: {output}", sep="\n")
    return 0


if __name__ == "__main__":
    run_main(main)
