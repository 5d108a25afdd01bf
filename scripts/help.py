"""
List all commands, or run one of them by its name.

    python -m scripts.help                      # every command on one line, grouped by purpose
    python -m scripts.help tok-shards           # the help of one command
    .venv/bin/nanochat train --depth=12         # python -m scripts.base_train --depth=12, from any folder
    python -m scripts.help --translate run.yaml # our command line for gpt-simple's file of settings

Every module in scripts/ is a command, including those that you add. Its name is written with
dashes, and the first sentence of its docstring is its line in the list. To train on several
processes, start the module with torchrun.
"""

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from nanochat.cli import Parser, did_you_mean, run_main

SHORT = {"scripts.base_train": "train", "scripts.base_eval": "eval", "nanochat.dataset": "dataset"}
GROUPS = {  # the commands by purpose, in the order of use
    "Get data and a tokenizer": [
        "dataset",
        "tok-train",
        "tok-eval",
        "tok-shards",
    ],
    "Train": ["validate", "train", "stop"],
    "Watch runs": ["status", "page", "report"],
    "Ask what a run saw, and check it": ["inspect-data", "compare-runs", "verify"],
    "Evaluate and sample": ["eval", "sample"],
    "Export and share": ["export", "receipt"],
    "Run experiments": ["repeat"],
    "Needed only occasionally": ["convert-shards", "average", "sweep", "infer-bench"],
    "More": [],  # help, and commands that a fork adds
}


def commands() -> dict[str, str]:
    """{name: module} of all commands, sorted by name."""
    modules = [f"scripts.{path.stem}" for path in Path(__file__).parent.glob("[!_]*.py")] + [
        "nanochat.dataset"
    ]
    return dict(
        sorted(
            (SHORT.get(module, module.partition(".")[2].replace("_", "-")), module)
            for module in modules
        )
    )


def about(module: str) -> str:
    """The first sentence of a script's docstring. The file is only parsed: importing it may take
    seconds."""
    if module == "nanochat.dataset":  # not a script: its docstring is about the module
        return "Download shards of nanochat's data sets, and check those on disk"
    path = Path(__file__).parents[1] / (module.replace(".", "/") + ".py")
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).partition(". ")[0].rstrip(".:")


def print_translation(path: str) -> None:
    """Print our command line for gpt-simple's file, and a line for each value without a flag.
    ValueError or OSError for a bad file."""
    from nanochat.integrations.gpt_simple import translate_file

    translation = translate_file(path)
    print(translation.command())
    print("", *(f"# {note}" for note in translation.notes), sep="\n")


def listing(known: dict[str, str]) -> str:
    """All commands with a sentence for each, in groups."""
    grouped = {name for names in GROUPS.values() for name in names}
    shown = {name: module.removeprefix("scripts.") for name, module in known.items()}
    width = max(map(len, shown.values())) + 2
    lines = []
    for group, names in {**GROUPS, "More": [name for name in known if name not in grouped]}.items():
        lines += [
            f"{group}:",
            *(f"  {shown[name]:{width}}{about(known[name])}" for name in names),
            "",
        ]
    renamed = ", ".join(f"{shown[name]} is {name}" for name in SHORT.values())
    lines += [
        "python -m scripts.COMMAND --help shows examples and flags. After `bash dev/setup.sh`, each command is "
        "also",
        f".venv/bin/nanochat COMMAND ({renamed}).",
        "For jobs on clusters, see docs/clusters.md.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """List the commands, or run one. ValueError for an unknown name."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["help"]
    known = commands()
    if name in ("help", "--help", "-h") and rest and not rest[0].startswith("-"):
        name, rest = rest[0], ["--help"]
    elif name in ("help", "--help", "-h"):
        parser = Parser(prog="nanochat help", description=listing(known))
        parser.add_argument(
            "--translate",
            metavar="FILE",
            help="print our command line for gpt-simple's YAML or JSON",
        )
        path = parser.parse_args(rest if name == "help" else ["--help"]).translate
        if path is None:
            print(parser.description)
        else:
            print_translation(path)
        return 0
    # modules' names work, too: tok_train is tok-train, base_train is train
    name = next((short for short, module in known.items() if module == f"scripts.{name}"), name)
    if name not in known:
        raise ValueError(
            f"{name}: unknown command{did_you_mean(name, known)} (all commands: "
            f"python -m scripts.help)"
        )
    sys.argv = [f"nanochat {name}", *rest]
    return importlib.import_module(known[name]).main(rest)


def command_line() -> None:
    """The program `nanochat`."""
    run_main(main)


if __name__ == "__main__":
    run_main(lambda: main(["help", *sys.argv[1:]]))
