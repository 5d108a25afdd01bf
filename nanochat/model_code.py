"""The code that computes a model, as hashes: weights make sense only to the code that trained them.

    the model's modules -> the files of nanochat/ that define them, and attention.py -> {file: hash}

A checkpoint stores the hashes, and loading its weights prints a note about files that have changed.
A hash is of the syntax tree without docstrings, so comments and layout do not count, and neither
does the version of Python (whose `ast.unparse` and `ast.dump` do differ between versions).
"""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nanochat.common import hash_json

if TYPE_CHECKING:  # commands that only read runs start without it
    import torch

PACKAGE = Path(__file__).parent
CODE_OF = "code of "  # begins the name of a file where it stands among settings
SHOWN = 8  # digits of a hash
FUNCTIONS = "nanochat.attention"  # part of every model, although it defines none of its modules


def code_of(model: "torch.nn.Module") -> dict[str, str]:
    """{file: hash} of the code that computes a model, as it is on disk. A launch calls this when it
    begins, because files may be edited while it trains."""
    names = {type(module).__module__ for module in model.modules()}
    names.add(FUNCTIONS)
    files = []
    for name in sorted(names):
        path = name.replace(".", "/")
        files += [f"{path}.py", f"{path}/__init__.py"]
    return code_now(files)


def code_now(files: Iterable[str]) -> dict[str, str]:
    """{file: hash} of those files of nanochat/ that exist, as they are on disk."""
    hashes = {}
    for file in files:
        package, _, path = file.partition("/")
        on_disk = PACKAGE / path
        if package == PACKAGE.name and on_disk.is_file():
            hashes[file] = hash_code(on_disk.read_bytes())
    return hashes


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The files whose code has changed, of those that are known in both: a model that was trained
    with --fp8 is loaded without it."""
    known = [file for file in before if file in now]
    return [file for file in known if before[file] != now[file]]


def code_changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, list[str]]:
    """{"code of FILE": [hash before, and now]} of the files whose code has changed, in the form of
    changed settings."""
    changes = {}
    for file in changed_code(before, now):
        hashes = [before[file], now[file]]
        changes[f"{CODE_OF}{file}"] = [of_file[:SHOWN] for of_file in hashes]
    return changes


def shown_code(codes: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """{file: the first digits of its hash}, of code that may have changed over time: all of them, in
    order."""
    hashes: dict[str, dict[str, None]] = {}
    for code in codes:
        for file, of_file in code.items():
            hashes.setdefault(file, {})[of_file[:SHOWN]] = None
    return {file: ", then ".join(of_file) for file, of_file in hashes.items()}


def hash_code(source: bytes) -> str:
    """A hash of Python code, without comments, docstrings and layout."""
    return hash_json(_plain(ast.parse(source)))


def _plain(node: object) -> object:
    """A syntax tree as lists. Empty fields are left out, because versions of Python add some."""
    if isinstance(node, list):
        return [_plain(child) for child in node if not _is_docstring(child)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if value not in (None, []):
            fields.append((name, _plain(value)))
    return [type(node).__name__, fields]


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
