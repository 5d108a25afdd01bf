"""
Flags from a file: `--config=FILE`, which every command takes.

    a.yaml:  depth: 12                    as --depth=12 --matrix-lr=0.01 --no-deterministic; a flag of the
             matrix-lr: 0.01              command line wins over the file
             deterministic: false

What the file says becomes the default of the parser's flag, after the same conversion and the same
checks that a word of the command line goes through. A run's config.json is such a file, too:
`Parser.of_run` says which of its settings are flags.
"""

import argparse
import tomllib
from pathlib import Path
from typing import Any

import yaml

from nanochat.common import Parser


def configure(parser: Parser, path: str) -> None:
    """Make what a file says of our flags their defaults. null is as if the key were not there."""
    try:
        values = _read(path)
        values = parser.of_run(values) if "derived" in values else values
    except OSError as e:
        parser.error(f"--config {path}: {e.strerror}; expected a file of flags")
    except ValueError as e:
        parser.error(f"--config {e}")
    seen: set[str] = set()
    for key, value in values.items():
        name = "--" + str(key).replace("_", "-")
        action = parser.known(name, f"--config {path}: ")
        if action.dest in seen or action.dest == "config":
            parser.error(f"--config {path}: {name}: it may be there once, and no file names another one")
        seen.add(action.dest)
        if value is not None:
            parser.set_defaults(**{action.dest: _convert(parser, path, name, action, value)})
            action.required = False


def _convert(parser: Parser, path: str, name: str, action: argparse.Action, value: Any) -> Any:
    """The value of a flag as its words on a command line would give it."""
    try:
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise argparse.ArgumentError(None, "expected true or false")
            return value is not name.startswith("--no-")
        if isinstance(value, dict) and action.metavar == "YAML":
            return value  # what else is a file of its own may stand here
        if isinstance(value, bool | dict):
            raise argparse.ArgumentError(None, "expected text or a number")
        if isinstance(value, list) and action.nargs is None:
            value = ",".join(map(str, value))
        converted = [parser._get_value(action, str(part)) for part in (value if isinstance(value, list) else [value])]
        for part in converted:
            parser._check_value(action, part)
        return converted if action.nargs in ("*", "+") else converted[0]
    except argparse.ArgumentError as e:
        parser.error(f"--config {path}: {name}: got {value!r}, {e.message}")


def _read(path: str) -> dict[str, Any]:
    """What a .yaml, .toml or .json file says: names of flags, and their values. ValueError and
    OSError for a file that cannot be read, or holds anything else."""
    data, kind = Path(path).read_bytes(), Path(path).suffix.lower()
    try:
        value = tomllib.loads(data.decode()) if kind == ".toml" else yaml.safe_load(data)  # JSON is YAML, too
    except (ValueError, yaml.YAMLError, RecursionError) as e:
        raise ValueError(f"{path}: it cannot be read ({' '.join(str(e).split())[:150]}); expected YAML, or TOML "
                         f"in a .toml") from e
    if not isinstance(value, dict):
        raise ValueError(f"{path}: got {str(value)[:50]!r}, expected a mapping of flags' names to values, "
                         f"such as depth: 12")
    return value
