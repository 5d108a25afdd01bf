"""
Small files that anybody may have written: curricula, --config files and a bundle's core.yaml.

    depth: 12                 int          matrix-lr: 0.01          float        1e5, 2024-01-01, 1:30    text
    deterministic: no         bool         tokenizer: null          None         [..], {..}               list, dict

Only these plain values of YAML are read. The rest of YAML is refused, because a few hundred bytes of it
could take hours or all memory (aliases of aliases), call a constructor that fails in its own way (tags such
as !!float), or turn one value into another (1:30 into 90).
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 1 << 19  # PyYAML takes about five seconds for this much
MOST_LEVELS = 20  # of lists and mappings inside each other
TAG = "tag:yaml.org,2002:"
INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")
FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?|\.inf)$|\.nan$",
                   re.IGNORECASE)


class _Loader(yaml.SafeLoader):
    """Builds plain values. A key that appears twice is an error, and does not silently win."""

    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML reads it so
        first: [(tag, pattern) for tag, pattern in some if tag in (TAG + "bool", TAG + "null")]
        for first, some in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event, problem = self.peek_event(), ""
        if isinstance(event, yaml.AliasEvent):
            problem = f"the alias *{event.anchor:.60}"
        elif event.tag is not None:
            problem = f"the tag {event.tag.replace(TAG, '!!'):.60}"
        elif self.level >= MOST_LEVELS:
            problem = f"more than {MOST_LEVELS} lists and mappings inside each other"
        if problem:
            raise yaml.composer.ComposerError(None, None, f"{problem}: only plain values are read", event.start_mark)
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, times in keys.items():
            if times > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r:.60} appears twice",
                                                        node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(TAG + "int", INT, list("-+0123456789"))
_Loader.add_implicit_resolver(TAG + "float", FLOAT, list("-+.0123456789"))


def read_small(path: Path | str, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file. OSError where it cannot be read, ValueError where it has more than `most`."""
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most:,} bytes, the most that such a file may have")
    return data


def check_levels(value: Any, level: int = 0) -> Any:
    """The value itself. ValueError if it has more than MOST_LEVELS of lists and mappings inside each other."""
    if level > MOST_LEVELS:
        raise ValueError(f"more than {MOST_LEVELS} lists and mappings inside each other")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_levels(inner, level + 1)
    return value


def read_yaml(path: Path | str) -> Any:
    """The value in a YAML file. OSError as of `read_small`. ValueError in one short sentence, without the name
    of the file, for a file that is too large, is not YAML, or holds more than plain values."""
    data = read_small(path)
    try:
        return yaml.load(data, Loader=_Loader)
    except (yaml.YAMLError, ValueError, OverflowError) as e:  # the last two of numbers and escapes out of range
        mark = getattr(e, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(e, "problem", None) or " ".join(str(e).split())
        raise ValueError(f"not valid YAML ({line}{problem[:120]})") from None
