"""
Flags from a file: `--config=FILE`, which every command takes.

    a.yaml:  depth: 12                    as --depth=12 --matrix-lr=0.01 --no-deterministic in front of the
             matrix-lr: 0.01              command line, whose own flags win
             deterministic: false

So a value goes through the conversion and the checks that a word of the command line goes through. A
run's config.json is such a file, too: `Parser.of_run` says which of its settings are flags.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

from nanochat.common import Parser
from nanochat.yaml_file import check_levels, read_small, read_yaml

TOML_BYTES = 1 << 15  # tomllib takes two seconds for a key of so many dots


def read_words(parser: Parser, path: str) -> list[str]:
    """What a file says of the parser's flags, as words of a command line. null is as if the key were not
    there. What cannot be ends the program with a sentence."""
    try:
        values = _read(path)
        values = parser.of_run(values) if "derived" in values else values
    except OSError as e:
        parser.error(f"{e.strerror}; expected a file of flags")
    except ValueError as e:
        parser.error(str(e))
    words: list[str] = []
    for key, value in values.items():
        name = "--" + str(key).replace("_", "-")
        action = parser.known(name)
        is_switch = action.nargs == 0
        if value is None:
            continue
        if isinstance(value, bool) != is_switch:
            parser.error(f"{name}: got {value!r}, expected {'true or false' if is_switch else 'text or a number'}")
        if is_switch:
            name = name if value else f"--no-{name[2:]}"
            words += [name] if name in action.option_strings else []  # what is off by itself has no word
        elif isinstance(value, list) and action.nargs is not None:
            words += [name, *map(str, value)]
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"{name}={json.dumps(text) if isinstance(text, dict) else text}")
    return words


def _read(path: str) -> dict[str, Any]:
    """What a .yaml, .toml or .json file says: names of flags, and their values. ValueError and
    OSError for a file that cannot be read, or holds anything else."""
    toml = Path(path).suffix.lower() == ".toml"
    try:
        if toml:
            value = check_levels(tomllib.loads(read_small(path, TOML_BYTES).decode()))
        else:
            value = read_yaml(path)  # JSON is YAML, too
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{' '.join(str(e).split())[:150]}; expected YAML, or TOML in a .toml file") from e
    if not isinstance(value, dict):
        raise ValueError(f"got {str(value)[:50]!r}, expected a mapping of flags' names to values, such as depth: 12")
    return value
