"""
Train one configuration with several seeds, and report whether a change exceeds seed noise.

    python -m scripts.repeat --seeds=5 --name=base -- --depth=4 --num-iterations=500
    python -m scripts.repeat --against=base --name=lr02 -- --depth=4 --num-iterations=500 --matrix-lr=0.02

The flags after `--` are those of scripts.base_train. Each run is called NAME-seedS. Finished runs
are reused and unfinished ones are resumed, so the command can be repeated at any time, even with
more seeds; with another length or --eval-tokens it needs another NAME.

    --vary=weights    each run has its own --seed (of the weights); all read the data in the same order
    --vary=data       each run has its own --data-seed; all start from the same weights
    --vary=both       both

The first command reports the mean of the final validation bits per byte, their standard deviation s
with its 95 % interval, and the smallest difference that n seeds can show at the 5 % level
(Student's t):

    unpaired    t(2n - 2) s sqrt(2 / n)           paired    t(n - 1) s_d / sqrt(n)

s_d is the standard deviation of the differences between runs with equal seeds. Without `--against`,
it is estimated as s sqrt(2), as if runs with equal seeds were independent. `--against` trains a
variant with BASE's seeds and reports the mean difference, its 95 % interval and its p-value. Both
are Student's t of the paired differences, so p is below 0.05 exactly if the interval does not
contain 0. This assumes that differences are normally distributed, which a few pairs cannot show.
Without that assumption, all 2^n ways to flip the signs of the differences are equally likely, so p is
at least 2 / 2^n: n pairs can be significant only from n = 6 on. With fewer, the verdict says so.

All runs must read the same files: a seed that would be trained on others, because a branch moved on
or a folder has a new file, is refused before it begins. The same holds for the code of the model. With
`--against`, the training files may differ only if the flags name other data than BASE's, the code may
differ, and the validation text may not: where the data differs, name one --val-path for both.

<base dir>/repeats/NAME.json has the results, seeds and flags. <base dir> is $NANOCHAT_BASE_DIR or
~/.cache/nanochat.
"""

import argparse
import contextlib
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanochat.cli import Parser, run_main, whole
from nanochat.common import (
    as_path,
    begin_launch,
    few,
    get_base_dir,
    print0,
    read_json,
    show,
    table,
    write_json,
)
from nanochat.config import Settings, changes_of, flag, from_flags
from nanochat.files import default_data_path
from nanochat.model_code import changed_code, code_now
from nanochat.pins import DATA_MANIFEST, Manifests, compare_files, trains_on_same
from nanochat.run_dir import around_difference, run_path, setting_texts
from nanochat.run_facts import validation_note, validation_text
from nanochat.run_order import order_of
from nanochat.run_reader import RunReader
from nanochat.schedule import HorizonSettings
from nanochat.text import TextSettings
from scripts import base_train

SEED_COUNTS = (5, 10, 20)  # numbers of seeds for which the smallest difference is reported
LEVEL = 0.05  # of significance
ENOUGH_PAIRS = (
    6  # fewer pairs cannot be significant without assuming a distribution: 2 / 2^5 > LEVEL
)
# settings that name the files of a run, and that select their documents
OF_FILES = ["data_path", "val_path", "data_format", "curriculum", "without_documents"]
OF_FILES += [f.name for f in fields(TextSettings)]
# figures that follow from the model and the batch, and change how it learns
WORKED_OUT = ("params_total", "batch_lr_scale", "weight_decay_scaled")
# settings that a resume may change, and with which the results of runs cannot be pooled
OF_LENGTH = (*(f.name for f in fields(HorizonSettings)), "curriculum")
RECORD = {"name": str, "vary": str, "seeds": [int], "flags": [str], "bits_per_byte": [float]}


# ---- statistics ----------------------------------------------------------------------------------


def quantile(cdf: Callable[[float], float], p: float) -> float:
    """The x at which a cumulative distribution function reaches p."""
    low, high = -1e4, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        if cdf(middle) < p:
            low = middle
        else:
            high = middle
    return high


def student_cdf(x: float, degrees: int) -> float:
    """The probability of at most x under Student's t distribution."""
    gammas = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    norm = math.exp(gammas) / math.sqrt(degrees * math.pi)
    # substitute x = sqrt(degrees) tan(at)
    at = np.linspace(0.0, math.atan(x / math.sqrt(degrees)), 2001)
    integral = float(np.trapezoid(np.cos(at) ** (degrees - 1), at))
    return 0.5 + norm * math.sqrt(degrees) * integral


def student_t(p: float, degrees: int) -> float:
    """The quantile of Student's t distribution."""
    return quantile(lambda x: student_cdf(x, degrees), p)


def deviation_interval(s: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a standard deviation s estimated from n values."""

    def cdf(x: float) -> float:  # chi-squared distribution
        half_degrees = torch.tensor((n - 1) / 2.0, dtype=torch.float64)
        half_x = torch.tensor(max(x, 0.0) / 2, dtype=torch.float64)
        return float(torch.special.gammainc(half_degrees, half_x))

    low = s * math.sqrt((n - 1) / quantile(cdf, 0.975))
    high = s * math.sqrt((n - 1) / quantile(cdf, 0.025))
    return low, high


def paired_p(mean: float, error: float, n: int) -> float:
    """The two-sided p-value of a mean of n differences with this standard error."""
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * student_cdf(-abs(mean) / error, n - 1)


def smallest_differences(s: float, s_d: float, seeds: int) -> dict[str, dict[str, float]]:
    """The smallest differences of means that some numbers of seeds can show at the 5 % level.

    {n: {"unpaired", "paired"}} for this number of seeds and each of SEED_COUNTS.
    """
    smallest = {}
    for n in sorted({seeds, *SEED_COUNTS}):
        unpaired = student_t(0.975, 2 * n - 2) * s * math.sqrt(2 / n)
        paired = student_t(0.975, n - 1) * s_d / math.sqrt(n)
        smallest[str(n)] = {"unpaired": unpaired, "paired": paired}
    return smallest


def spread_of(values: Sequence[float]) -> dict[str, Any]:
    """The statistics of one configuration."""
    s = statistics.stdev(values)
    return {
        "mean": statistics.fmean(values),
        "stdev": s,
        "stdev_interval": [*deviation_interval(s, len(values))],
        "smallest_difference": smallest_differences(s, s * 2**0.5, len(values)),
    }


def effect_of(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """The statistics of a change; each value is paired with the base's value of the same seed."""
    differences = [a - b for a, b in zip(values, base, strict=True)]
    n = len(differences)
    s_d = statistics.stdev(differences)
    error = s_d / math.sqrt(n)
    half = student_t(1 - LEVEL / 2, n - 1) * error
    mean = statistics.fmean(differences)
    s = math.sqrt((statistics.variance(values) + statistics.variance(base)) / 2)
    return {
        "differences": differences,
        "mean_difference": mean,
        "interval": [mean - half, mean + half],
        "p": paired_p(mean, error, n),
        "smallest_difference": smallest_differences(s, s_d, n),
    }


# ---- the data of the runs ------------------------------------------------------------------------


def settings_of(flags: Sequence[str]) -> Settings:
    """The settings that the flags of base_train name, with the data path as a run records it."""
    settings = from_flags(base_train.parse_args(flags))
    data_path = os.path.expanduser(as_path(settings.data_path or default_data_path()))
    return replace(settings, data_path=data_path)


def files_now(settings: Settings) -> Manifests:
    """The files that a new run with these settings would read now."""
    begin_launch(settings.data_cache)
    return order_of(settings).pin(settings)


def named_changes(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """The settings with which one run names other data than another, from their config.json."""
    return [name for name in OF_FILES if changes_of(name, theirs.get(name), ours.get(name))]


def check_data(
    first: RunReader,
    manifests: Manifests,
    settings: Settings,
    *,
    run: str = "",
    against: bool = False,
) -> None:
    """ValueError if a run reads other files than `first` does, so that they cannot be compared.

    `run`: its name; "" for one that has not begun. `against`: whether `first` is a run of the base:
    then, training files may differ if the command names other data.
    """
    if not first.manifests or not manifests:
        return
    named = named_changes(first.last_config, settings.to_json()) if against else []
    if not named and not trains_on_same(first.manifests, manifests):
        split = "train"
    elif validation_text(first.manifests) == validation_text(manifests):
        return
    elif "data_format" in named:
        return  # token files may hold the same text; a warning says that nobody has compared it
    else:
        split = "val"

    # what differs
    theirs: Manifests = {split: first.manifests[split]}
    file = compare_files(theirs, {split: manifests[split]}).first
    if named:
        file += f"; the flags name other data: {', '.join(map(flag, named))}"
    kind = "training" if split == "train" else "validation"
    who = f"{run} has read" if run else "the next run would read"
    raise ValueError(
        f"{who} other {kind} data than {first.name} ({file}), so their results cannot be compared; read what "
        f"{first.run_dir / DATA_MANIFEST} lists, or train all seeds, and with --against the base, under another --name"
    )


def check_code(run: RunReader, code: Mapping[str, str], who: str) -> None:
    """ValueError if a run was trained by other model code than `who`, whose code is given."""
    changed = changed_code(run.model_code, code)
    if changed:
        raise ValueError(
            f"{few(changed)}: {who} other model code than {run.name} was trained with, so their results cannot be "
            f"compared; restore that code, or train all seeds under another --name"
        )


def check_settings(run: RunReader, settings: Settings, names: Sequence[str], retrain: str) -> None:
    """ValueError if a launch of a run had other values of some settings than the command has.
    `retrain`: what would be trained again with those of the command."""
    ours = settings.to_json()
    for config in (run.config, run.last_config):
        for name in names:
            if name in config and config[name] != ours[name]:
                theirs, _ = around_difference(setting_texts([config[name], ours[name]]))
                raise ValueError(
                    f"{flag(name)}: {run.name} was trained with {theirs}, so their results cannot be compared; "
                    f"give the same, or train {retrain} under another --name"
                )


# ---- the runs ------------------------------------------------------------------------------------


def check_before(
    runs: Sequence[RunReader], first: RunReader | None, settings: Settings, *, against: bool
) -> RunReader | None:
    """`check_settings` and `check_data` of the runs that have begun, and of the code and the files
    with which the others would be trained now. Returns the run that all are compared with: `first`,
    else the first that has begun, if any."""
    begun = [] if settings.resume == "scratch" else [run for run in runs if run.manifests]
    finished = [run for run in begun if is_complete(run)]
    first = first or next(iter(begun), None)
    if first is None:
        return None
    check_settings(first, settings, ["eval_tokens"], "the base" if against else "all seeds")
    for run in begun:
        check_settings(run, settings, ["eval_tokens", *OF_LENGTH], "all seeds")
        check_data(first, run.manifests, settings, run=run.name, against=against)
    if len(finished) < len(runs):
        for run in begun if against else [first, *begun]:
            check_code(run, code_now(run.model_code), "this is")
    if len(begun) < len(runs):
        check_data(first, files_now(settings), settings, against=against)
    return first


def train_all(
    name: str,
    flags: Sequence[str],
    seeds: Sequence[int],
    vary: str,
    *,
    first: RunReader | None = None,
    against: bool = False,
    jobs: int,
    nproc: int,
) -> list[float]:
    """Train with every seed.

    Returns the final validation bits per byte of each run. `first`, `against`: see `check_data`; by
    default, all read the data of the first seed. ValueError if a run fails or reads other data.
    """
    settings = settings_of(flags)
    if settings.eval_every <= 0:
        raise ValueError(
            f"--eval-every={settings.eval_every}: the runs would have no validation bits per byte to compare; "
            f"omit it, or pass --eval-every=N"
        )
    runs = [RunReader(run_path(f"{name}-seed{seed}")) for seed in seeds]
    first = check_before(runs, first, settings, against=against)

    def train(seed: int) -> float:
        tag = f"{name}-seed{seed}"
        is_trained = settings.resume != "scratch" and is_complete(RunReader(run_path(tag)))
        if jobs == 1 and seed != seeds[0] and not is_trained:  # the code may have been edited
            earlier = RunReader(runs[0].run_dir)
            check_code(earlier, code_now(earlier.model_code), "this is")
        of_weights = seed if vary in ("weights", "both") else settings.seed
        of_data = seed if vary in ("data", "both") else settings.seed
        own = [f"--seed={of_weights}", f"--data-seed={of_data}", f"--model-tag={tag}"]
        command = command_of([*flags, *own], nproc)
        shown = shlex.join(["python", *command])
        print0(f"{name}: run {seeds.index(seed) + 1} of {len(seeds)}: {shown}")
        log = get_base_dir() / "repeats" / f"{tag}.log" if jobs > 1 else None
        with open(log, "wb") if log else contextlib.nullcontext() as out:
            code = subprocess.run([sys.executable, *command], stdout=out, stderr=out).returncode
        run = RunReader(run_path(tag))
        value = final_val_bpb(run, code, log)
        of_first = first or RunReader(runs[0].run_dir)  # which has pinned its files by now
        check_data(of_first, run.manifests, settings, run=tag, against=against)
        return value

    (get_base_dir() / "repeats").mkdir(parents=True, exist_ok=True)
    if jobs == 1:  # a pool would begin the next run before the error of one ends the command
        values = [train(seed) for seed in seeds]
    else:
        with ThreadPoolExecutor(jobs) as pool:
            values = list(pool.map(train, seeds))
    pooled = runs if against or first is None else [first, *runs]
    trained = [RunReader(run.run_dir) for run in pooled]
    for run in trained:  # someone may have edited the code meanwhile
        check_code(trained[0], run.model_code, f"{run.name} has")
    return values


def command_of(flags: Sequence[str], nproc: int) -> list[str]:
    """The arguments with which Python runs base_train on `nproc` processes."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", "-m"]
    return ["-m", *(torchrun if nproc > 1 else []), "scripts.base_train", *flags]


def is_complete(run: RunReader) -> bool:
    """Whether a run has been trained to its end."""
    return bool(run.launches) and run.launches[-1].end == "completed"


def final_val_bpb(run: RunReader, code: int, log: Path | None) -> float:
    """The last validation bits per byte of a run. ValueError if it did not train to its end."""
    if code or not is_complete(run):
        see = "" if log is None else f", see {log}"
        raise ValueError(
            f"{run.name}: the run ended with exit code {code} before its last step{see}; fix the cause "
            f"and repeat this command"
        )
    if not run.val_bpb:
        raise ValueError(
            f"{run.name}: the run has no validation bits per byte; pass --eval-every=N and a new --name"
        )
    return list(run.val_bpb.values())[-1]


# ---- report --------------------------------------------------------------------------------------


def print_report(record: dict[str, Any], base: dict[str, Any] | None) -> None:
    """Print a table of the runs, then the statistics."""
    # the runs
    columns = {"seed": record["seeds"], "bits per byte": record["bits_per_byte"]}
    if base is not None:
        columns["base"] = base["bits_per_byte"][: len(record["seeds"])]
        columns["difference"] = record["against"]["differences"]
    rows = [[seed, *map(digits, values)] for seed, *values in zip(*columns.values())]
    print0(*table([*columns], rows), "", sep="\n")

    # this configuration, and the change
    low, high = record["stdev_interval"]
    print0(
        f"mean {record['mean']:.6f}, standard deviation {record['stdev']:.6f} (95 % interval {low:.6f} to "
        f"{high:.6f})"
    )
    if base is not None:
        print_effect(record["against"])

    # what more seeds could show; pairs have equal seeds
    ways = ["unpaired"] if base is None else ["unpaired", "paired"]
    results = record if base is None else record["against"]
    rows = []
    for num_seeds, smallest in results["smallest_difference"].items():
        rows.append([num_seeds, *(digits(smallest[way]) for way in ways)])
    print0("", "the smallest difference that this many seeds can show between runs:")
    print0(*table(["seeds", *ways], rows), sep="\n")
    if record.get("rerun_difference") is not None:
        print0(f"\na rerun of seed {record['seeds'][0]} differs by {record['rerun_difference']:g}")


def digits(value: float) -> str:
    return f"{value:.6f}"


def print_differences(base: RunReader, run: RunReader, name: str) -> None:
    """Print what data and model code of two runs with equal seeds have to do with their difference."""
    if note := validation_note([base, run]):
        print0(f"warning: {note}", "", sep="\n")
    if base.manifests and run.manifests and not trains_on_same(base.manifests, run.manifests):
        flags = ", ".join(map(flag, named_changes(base.last_config, run.last_config)))
        print0(f"note: the training data is not that of {name} ({flags})", "", sep="\n")
    if changed := changed_code(base.model_code, run.model_code):
        print0(f"note: other model code than {name}'s: {few(changed)}", "", sep="\n")
    differ = []
    for key in WORKED_OUT:
        before, now = [show(r.last_config["derived"].get(key)) for r in (base, run)]
        if before != now:
            differ.append(f"{key} {before} -> {now}")
    if differ:
        print0(f"note: worked out otherwise than for {name}: {', '.join(differ)}", "", sep="\n")


def print_effect(effect: dict[str, Any]) -> None:
    """Print the result of `effect_of`, and what it means."""
    n = len(effect["differences"])
    low, high = effect["interval"]
    print0(
        f"mean difference from {effect['name']}: {effect['mean_difference']:+.6f} (95 % interval {low:+.6f} to "
        f"{high:+.6f}, p = {effect['p']:.2g}, {n} pairs)"
    )
    if low <= 0 <= high:
        print0("the interval contains 0: this difference may be noise")
        return
    verdict = "the interval does not contain 0: the difference exceeds seed noise"
    if n < ENOUGH_PAIRS:
        verdict += (
            f" if differences are normally distributed; without that assumption, {n} pairs cannot be "
            f"significant (p is at least {2 / 2**n:g}), but {ENOUGH_PAIRS} can"
        )
    print0(verdict)


# ---- the script ----------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """(flags of this script, flags of scripts.base_train after `--`)."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    p = Parser(
        description="Train one configuration with several seeds.",
        epilog=__doc__,
        usage="%(prog)s [flags] -- FLAGS OF base_train",
    )
    asks_for_help = "-h" in words or "--help" in words
    if words and "--" not in words and not asks_for_help:
        p.error(
            "no flags of scripts.base_train: they follow --, as in --seeds=3 -- --depth=4 --num-iterations=100"
        )
    p.add_argument(
        "--name", default="base", help="name of this configuration; its runs are called NAME-seedS"
    )
    p.add_argument(
        "--seeds",
        type=whole(2),
        default=5,
        metavar="N",
        help="number of seeds: seeds 1 to N are used",
    )
    p.add_argument(
        "--vary", choices=("weights", "data", "both"), default="both", help="which seeds differ"
    )
    p.add_argument(
        "--against", metavar="BASE", help="compare with the configuration BASE, using its seeds"
    )
    p.add_argument(
        "--rerun",
        action="store_true",
        help="train the first seed once more, and report the difference, which must be 0",
    )
    number: dict[str, Any] = {"type": whole(1), "default": 1, "metavar": "N"}
    p.add_argument(
        "--jobs",
        **number,
        help="number of runs to train at the same time; if N > 1, their output goes to files in "
        "<base dir>/repeats",
    )
    p.add_argument("--nproc", **number, help="processes per run, started by torchrun")
    return p.parse_args(words[:at]), words[at + 1 :]


def read_base(against: str, name: str) -> dict[str, Any]:
    """The record of the configuration that --against names. FileNotFoundError if it was not
    trained; ValueError if it is --name itself."""
    path = get_base_dir() / "repeats" / f"{against}.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"--against={against}: {path} does not exist; train that configuration first, "
            f"with --name={against}"
        )
    base = read_json(path, RECORD, remedy="train that configuration again with --name")
    if against == name:
        raise ValueError(
            f"--against={against}: --name has the same value; choose a different --name"
        )
    return base


def first_run_of(base: Mapping[str, Any], settings: Settings) -> RunReader | None:
    """The first run of a base that is still here. None, with a warning, if none is. ValueError if
    another one of its runs reads other files."""
    runs = [RunReader(run_path(f"{base['name']}-seed{seed}")) for seed in base["seeds"]]
    runs = [run for run in runs if run.manifests]
    if not runs:
        print0(
            f"warning: no run of {base['name']} is here any more, so nothing shows whether it has read the "
            f"same data"
        )
        return None
    first, *others = runs
    for run in others:
        check_data(first, run.manifests, settings, run=run.name)
    return first


def check_flags(flags: Sequence[str]) -> None:
    """ValueError for flags of base_train that the runs cannot have, also if a file of flags names a
    fork."""
    for word in flags:
        if word.partition("=")[0] in ("--model-tag", "--data-seed", "--seed"):
            raise ValueError(
                f"{word}: this script sets the flag for each run; use --name and --vary instead"
            )
    # a fork needs a name, which each run gets later
    settings = settings_of([*flags, "--model-tag=repeat"])
    if settings.fork_from is not None:
        raise ValueError(
            f"--fork-from={settings.fork_from}: a fork keeps the seeds of its parent, so there is nothing to repeat; "
            f"leave it out, or start with its weights by --init-from"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare and print. ValueError and OSError for bad input and failed runs."""
    args, flags = parse_args(argv)
    folder = get_base_dir() / "repeats"
    run_path(f"{args.name}-seed1")  # ValueError for an invalid name
    check_flags(flags)

    # with --against, the seeds are those of the base
    base = None
    seeds = list(range(1, args.seeds + 1))
    vary = args.vary
    if args.against is not None:
        base = read_base(args.against, args.name)
        seeds = base["seeds"]
        vary = base["vary"]
    first_of_base = None if base is None else first_run_of(base, settings_of(flags))

    values = train_all(
        args.name,
        flags,
        seeds,
        vary,
        first=first_of_base,
        against=first_of_base is not None,
        jobs=args.jobs,
        nproc=args.nproc,
    )
    record = {
        "name": args.name,
        "vary": vary,
        "seeds": seeds,
        "flags": flags,
        "bits_per_byte": values,
        **spread_of(values),
    }
    if base is not None:
        record["against"] = {"name": base["name"], **effect_of(values, base["bits_per_byte"])}
    if args.rerun:
        [value] = train_all(
            f"{args.name}-rerun",
            flags,
            seeds[:1],
            vary,
            first=RunReader(run_path(f"{args.name}-seed{seeds[0]}")),
            jobs=1,
            nproc=args.nproc,
        )
        record["rerun_difference"] = value - values[0]
    write_json(folder / f"{args.name}.json", record)
    if first_of_base is not None:
        run = RunReader(run_path(f"{args.name}-seed{seeds[0]}"))
        print_differences(first_of_base, run, args.against)
    print_report(record, base)
    print0("", f"written: {folder / args.name}.json", sep="\n")
    return 0


if __name__ == "__main__":
    run_main(main)
