"""
List all commands, and run any of them by its name.

    python -m scripts.help                      # every command, a line each
    python -m scripts.help tok-shards           # what one of them takes
    nanochat train --depth=12                   # after `pip install -e .`: as python -m scripts.base_train --depth=12
    nanochat completion bash > ~/.local/share/bash-completion/completions/nanochat      # or zsh, tcsh

A command is a module of scripts/: its name with dashes, and the first sentence of its docstring is its line here.
So a script that a fork adds is a command, too. Several processes are started by torchrun, with the module's name.
"""

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from nanochat.cli import Parser, did_you_mean, run_main
from nanochat.common import table

SHORT = {"scripts.base_train": "train", "scripts.base_eval": "eval", "nanochat.dataset": "dataset"}
SHELLS = ("bash", "zsh", "tcsh")


def commands() -> dict[str, str]:
    """The module of each command by its name, in the order of names."""
    modules = [f"scripts.{path.stem}" for path in Path(__file__).parent.glob("[!_]*.py")]
    modules.append("nanochat.dataset")
    return dict(sorted((SHORT.get(module, module.partition(".")[2].replace("_", "-")), module)
                       for module in modules))


def about(module: str) -> str:
    """The first sentence of a module's docstring. It is read, not imported, which takes seconds."""
    path = Path(__file__).parents[1] / (module.replace(".", "/") + ".py")
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).partition(". ")[0].rstrip(".:")


class _Made(Exception):
    """Carries a command's parser out of it."""


def parser_of(module: str) -> Parser:
    """The parser of a command. It makes it when it starts, and is stopped where it would parse."""
    def stop(parser: Parser, *_: object) -> None:
        raise _Made(parser)

    parse, Parser.parse_args = Parser.parse_args, stop  # type: ignore[method-assign, assignment]
    try:
        importlib.import_module(module).main([])
    except _Made as e:
        return e.args[0]
    finally:
        Parser.parse_args = parse  # type: ignore[method-assign]
    raise AssertionError(f"{module} parses no command line")


def completion(asks: Parser, shell: str) -> str:
    """What a shell reads to complete our commands, `completion` with its parser `asks` among them, and their flags.
    ValueError without shtab."""
    try:
        import shtab
    except ImportError:
        raise ValueError("completion: the package shtab is not installed; pip install -e '.[cli]'") from None
    top = Parser(prog="nanochat")
    names = top.add_subparsers()
    for name, module in commands().items():
        parents = [] if module == __spec__.name else [parser_of(module)]
        names.add_parser(name, help=about(module), parents=parents, add_help=False, conflict_handler="resolve")
    names.add_parser("completion", help=asks.description, parents=[asks], add_help=False, conflict_handler="resolve")
    return shtab.complete(top, shell)


def main(argv: Sequence[str] | None = None) -> int:
    """List the commands, or run one. ValueError for a name that is none."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["help"]
    known = commands()
    if name in ("help", "--help", "-h") and rest and not rest[0].startswith("-"):
        name, rest = rest[0], ["--help"]
    elif name in ("help", "--help", "-h"):
        print("\n".join(table(["command", "what it does"], [[name, about(known[name])] for name in known])))
        short = ", ".join(f"{name}: python -m {module}" for module, name in SHORT.items())
        print("\nnanochat COMMAND --help says more. Without `pip install -e .` a command is\n"
              f"python -m scripts.COMMAND, with _ for - ({short})")
        return 0
    if name == "completion":
        parser = Parser(prog="nanochat completion", description="Print what a shell reads to complete commands.")
        parser.add_argument("shell", choices=SHELLS)
        print(completion(parser, parser.parse_args(rest).shell))
        return 0
    if name not in known:
        raise ValueError(f"nanochat {name}: there is no such command{did_you_mean(name, known)} "
                         f"(all commands: python -m scripts.help)")
    sys.argv = [f"nanochat {name}", *rest]
    return importlib.import_module(known[name]).main(rest)


def command_line() -> None:
    """The program `nanochat`."""
    run_main(main)


if __name__ == "__main__":
    words = sys.argv[1:]
    run_main(lambda: main(words if words[:1] == ["completion"] else ["help", *words]))
