"""
The report of a run: what ran, on what, how long, what came of it, and where everything lies, as markdown.

    RUN/config.json, data_manifest.json, logs/, eval.json; stages.tsv  --read_facts-->  Facts  --make_report-->  text

`read_facts` reads, `make_report` writes prose and tables about what was read; both change nothing. Every part of the
report is a function from Facts to lines, and a part whose file is missing says so in one line: a report of an
unfinished run is a report, too.

stages.tsv is what speedrun.sh keeps: a line `name <tab> seconds <tab> exit code <tab> command` for each stage that
ended. Where a stage ran several times (a killed training, a repeated command), its times are added up.
"""

import os
import platform
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanochat.common import read_json
from nanochat.run_data import MANIFEST_NAME
from nanochat.run_dir import cursor_files, read_config, read_cursors, read_log
from nanochat.stream import ledger

CURVE_ROWS = 16  # lines of the loss curve, about
LEDGER_COLUMNS = ("documents", "rows", "read", "bos", "repeated", "emitted", "cropped", "pending")
ENDS = ("completed", "stopped", "halted", "failed")  # events: how a launch ends if nobody kills it
Row = Sequence[Any]


@dataclass(frozen=True)
class Stage:
    """All runs of one stage of speedrun.sh."""

    name: str
    seconds: float
    times: int
    failed: int
    command: str  # of the last one


@dataclass(frozen=True)
class Facts:
    """All that a report is made from."""

    run_dir: Path
    config: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)  # of the log, ascending
    events: list[dict[str, Any]] = field(default_factory=list)
    manifest: dict[str, Any] | None = None
    cursors: tuple[int, list[dict[str, Any]]] | None = None  # of the newest save: (step, cursors)
    evaluation: dict[str, Any] | None = None
    stages: list[Stage] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=dict)
    written: str = ""

    def named(self, event: str) -> list[dict[str, Any]]:
        """The events of one name, in order."""
        return [e for e in self.events if e.get("event") == event]

    @property
    def status(self) -> str:
        """completed, or how the last launch ended and how far the last save is."""
        ends = [e["event"] for e in self.events if e.get("event") in ("started", *ENDS)]
        saved = self.named("saved")
        if "completed" in ends[-1:]:
            return "completed"
        if not saved:
            return "nothing saved yet"
        how = ends[-1] if ends and ends[-1] in ENDS else "unfinished"
        return f"{how}, saved at step {saved[-1]['step']:,}"


# ---- reading --------------------------------------------------------------------------------------------------------

def read_stages(path: Path) -> list[Stage]:
    """The stages of a stages.tsv in the order in which they first ran; torn lines are passed over."""
    runs: dict[str, list[tuple[float, int, str]]] = {}
    for line in path.read_text().splitlines():
        try:
            name, seconds, code, command = line.split("\t")
            run = float(seconds), int(code), command
        except ValueError:
            continue
        runs.setdefault(name, []).append(run)
    return [Stage(name, sum(s for s, _, _ in r), len(r), sum(code != 0 for _, code, _ in r), r[-1][2])
            for name, r in runs.items()]


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True,
                              check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def describe_machine() -> dict[str, str]:
    """This machine and the code on it, as words."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    commit = _git("rev-parse", "HEAD")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"system": platform.platform(), "processor": f"{_cpu_name()}, {cores} cores, {memory:.0f} GiB of memory",
            "GPUs": ", ".join(f"{g.name} ({g.total_memory / 2**30:.0f} GiB)" for g in gpus) or "none",
            "Python": sys.version.split()[0], "PyTorch": torch.__version__,
            "commit": commit + (", with changes" if commit and _git("status", "--porcelain") else "") or "not known"}


def read_facts(run_dir: Path, *, stages: Path | None = None, machine: dict[str, str] | None = None) -> Facts:
    """Everything about a run that lies on disk. FileNotFoundError if it never started, ValueError for a broken file."""
    records = read_log(run_dir / "logs" / "train.jsonl")
    kept = cursor_files(run_dir)
    present = {name: read_json(path) if (path := run_dir / name).is_file() else None
               for name in (MANIFEST_NAME, "eval.json")}
    return Facts(run_dir=run_dir, config=read_config(run_dir),
                 steps=[r for r in records if "event" not in r], events=[r for r in records if "event" in r],
                 manifest=present[MANIFEST_NAME], evaluation=present["eval.json"],
                 cursors=read_cursors(kept[max(kept)]) if kept else None,
                 stages=read_stages(stages) if stages is not None and stages.is_file() else [],
                 machine=machine or {}, written=time.strftime("%Y-%m-%d %H:%M %Z"))


# ---- markdown -------------------------------------------------------------------------------------------------------

def table(header: Row, rows: Sequence[Row]) -> list[str]:
    """A markdown table, the first column to the left, the others to the right; a bar in a cell is escaped."""
    def line(cells: Row) -> str:
        return "| " + " | ".join(show(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
    return [line(header), "|" + "|".join([" --- "] + [" ---: "] * (len(header) - 1)) + "|", *map(line, rows)]


def show(value: Any) -> str:
    """A value as people write it: 1,234; 0.1235; 2.67e+12."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    return str(value)


def duration(seconds: float) -> str:
    """12.3 s, 4 min 05 s, 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def quoted(text: str) -> list[str]:
    """Text in a fence that it cannot end, whatever is in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}text", *text.splitlines(), fence]


# ---- the parts ------------------------------------------------------------------------------------------------------

def result_part(facts: Facts) -> list[str]:
    """The figures to look at first."""
    val, evaluation = facts.named("val"), facts.evaluation or {}
    unigram = evaluation.get("unigram_bpb")
    rows: list[Row] = [
        ("validation bits per byte, before training", val[0]["bpb"] if len(val) > 1 and val[0]["step"] == 0 else None),
        ("validation bits per byte, after", evaluation.get("val_bpb", val[-1]["bpb"] if val else None)),
        ("a unigram model's on the same tokens", unigram)]
    rows += [(f"training bits per byte, `{name}`", bpb) for name, bpb in evaluation.get("train_bpb", {}).items()]
    if facts.steps:
        rows += [("steps", facts.steps[-1]["step"] + 1), ("tokens trained on", facts.steps[-1]["tokens"]),
                 ("time in steps", duration(sum(s["step_s"] for s in facts.steps))),
                 ("tokens/s, median step", statistics.median(s["tokens_per_s"] for s in facts.steps))]
    lines = table(("figure", "result"), rows)
    if facts.evaluation is None:
        lines += ["",
                  "No eval.json: `python -m scripts.base_eval` has not run, so there is no unigram model to compare "
                  "with and there are no samples."]
    elif facts.steps and evaluation["step"] != facts.steps[-1]["step"] + 1:
        lines += ["", f"eval.json is of step {evaluation['step']:,}; the training has gone on since."]
    return lines


def settings_part(facts: Facts) -> list[str]:
    """What ran: commands, resolved settings, and what follows from them."""
    lines = []
    if facts.stages:
        lines += ["Commands:", "", *quoted("\n".join(stage.command for stage in facts.stages)), ""]
    settings = {k: v for k, v in facts.config.items() if k != "derived"}
    words = textwrap.fill(", ".join(f"{k} {v}" for k, v in settings.items()), 110, break_on_hyphens=False)
    lines += ["Settings (`config.json`):", "", *quoted(words), ""]
    return lines + table(("derived", "value"), list(facts.config.get("derived", {}).items()))


def machine_part(facts: Facts) -> list[str]:
    """On what: this machine, and what training said of its own."""
    starts = {f"{s['world_size']} process(es) on {s['device']}, PyTorch {s['torch']}": s["step"]
              for s in reversed(facts.named("started"))}
    rows: list[Row] = [*facts.machine.items()]
    rows += [(f"trained from step {step:,} on", words) for words, step in reversed(starts.items())]
    return table(("machine", "of this report"), rows)


def time_part(facts: Facts) -> list[str]:
    """How long: stages, and what the steps spent their time on."""
    lines = []
    if facts.stages:
        lines += [*table(("stage", "time", "runs", "of them failed or stopped"),
                         [(s.name, duration(s.seconds), s.times, s.failed) for s in facts.stages]), ""]
    if not facts.steps:
        return [*lines, "No step was logged."]
    step_s, wait_s = (sum(s[k] for s in facts.steps) for k in ("step_s", "wait_s"))
    starts, mfu = len(facts.named("started")), statistics.median(s.get("mfu") or 0 for s in facts.steps)
    return [*lines, f"Training: {duration(step_s)} in {len(facts.steps):,} steps, {100 * wait_s / step_s:.2f} % of it "
            f"waiting for data; started {starts} time{'s' if starts != 1 else ''}."
            + f" Model FLOPs utilization, median step: {100 * mfu:.1f} %." * (mfu > 0)]


def data_part(facts: Facts) -> list[str]:
    """What was read, and the accounts of every token of it."""
    lines = []
    if facts.manifest is not None:
        lines += [*table(("files", "where", "number", "bytes", "documents"), [
            (split if len(buckets) == 1 else f"{split}, {bucket}", m["root"], len(m["files"]),
             sum(f["size"] for f in m["files"]), sum(sum(f["groups"]) for f in m["files"]))
            for split, buckets in facts.manifest.items() for bucket, m in buckets.items()]), ""]
    if facts.cursors is None:
        return [*lines, "No checkpoint yet, so no accounts."]
    step, cursors = facts.cursors
    accounts = ledger(cursors, facts.config["max_seq_len"])
    rows = [(bucket, *(a[k] for k in LEDGER_COLUMNS), f"{100 * a['cropped'] / max(1, a['read']):.2f} %", a["epochs"])
            for bucket, a in accounts.items()]
    return [*lines, f"Ledger at step {step:,}, in tokens; `epochs` are those that a lane has finished. "
            f"{balance(accounts)}", "", *table(("bucket", *LEDGER_COLUMNS, "cropped/read", "epochs"), rows)]


def balance(accounts: Mapping[str, Mapping[str, int]]) -> str:
    """Whether read + bos + repeated = emitted + cropped + pending in every bucket, in words."""
    off = {bucket: a["read"] + a["bos"] + a["repeated"] - a["emitted"] - a["cropped"] - a["pending"]
           for bucket, a in accounts.items()}
    wrong = ", ".join(f"{bucket} by {tokens:,}" for bucket, tokens in off.items() if tokens)
    law = "read + bos + repeated = emitted + cropped + pending"
    return f"**It does not balance** ({law}): off in {wrong}." if wrong else f"It balances: {law}."


def curve_part(facts: Facts) -> list[str]:
    """Loss and validation by step."""
    val = {e["step"]: e["bpb"] for e in facts.named("val")}
    by_step = {s["step"]: s for s in facts.steps}
    if not by_step:
        return ["No step was logged."]
    last = max(by_step)
    spread = {round(i * last / (CURVE_ROWS - 1)) for i in range(CURVE_ROWS)}
    wanted = sorted(spread & by_step.keys() | set(list(val)[::-(-len(val) // CURVE_ROWS) or 1]) | {last})
    rows = [(step, *(by_step.get(step, {}).get(k) for k in ("loss", "smooth_loss", "lr", "grad_norm")), val.get(step))
            for step in wanted]
    rows += [(step, None, None, None, None, val[step]) for step in val if step > last and step not in wanted]
    return table(("step", "loss", "smooth", "lr", "gradient norm", "validation bits per byte (before the step)"), rows)


def samples_part(facts: Facts) -> list[str]:
    """What the model writes."""
    samples = (facts.evaluation or {}).get("samples", {})
    lines = []
    for kind, words in (("prompted", "Prompts, continued with the likeliest tokens:"),
                        ("unprompted", "From nothing, at temperature 1:")):
        if samples.get(kind):
            lines += [words, ""] + [line for text in samples[kind] for line in (*quoted(text), "")]
    return lines or ["None."]


def digest_part(facts: Facts) -> list[str]:
    """First and last batch digest: two runs with equal digests saw equal data."""
    if not facts.steps:
        return ["No step was logged."]
    ends = facts.steps[:1] + facts.steps[-1:]
    return [*table(("step", "digest of its batch"), [(s["step"], f"`{s['digest']}`") for s in ends]), "",
            "Runs with equal digests saw equal data; `python -m scripts.inspect_data` shows which."]


def places_part(facts: Facts) -> list[str]:
    """Where everything lies."""
    run = facts.run_dir
    rows: list[Row] = [("run directory", f"`{run}`")]
    for words, name in (("settings", "config.json"), ("pinned files", MANIFEST_NAME), ("tokenizer", "tokenizer"),
                        ("log", "logs/train.jsonl"), ("cursors of every save", "logs/cursors"),
                        ("evaluation", "eval.json")):
        if (run / name).exists():
            rows.append((words, f"`{run / name}`"))
    folder = run / "checkpoints"
    names = [p.name for p in folder.iterdir() if not p.name.startswith(".")] if folder.is_dir() else []
    names.sort(key=lambda name: (name == "final", len(name), name))
    return table(("what", "where"), [*rows, *(("checkpoint", f"`{folder / name}`") for name in names)])


PARTS = (("Result", result_part), ("What ran", settings_part), ("On what", machine_part), ("How long", time_part),
         ("Data", data_part), ("Loss curve", curve_part), ("Samples", samples_part), ("Digests", digest_part),
         ("Where everything lies", places_part))


def make_report(facts: Facts) -> str:
    """The whole report."""
    name = facts.config.get("model_tag", facts.run_dir.name)
    lines = [f"# Run `{name}`: {facts.status}", ""] + [f"Written {facts.written}.", ""] * bool(facts.written)
    for title, part in PARTS:
        lines += [f"## {title}", "", *part(facts), ""]
    return "\n".join(lines)
