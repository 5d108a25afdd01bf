"""
Damage files as disks, editors and attackers do: the cases of dev/fuzz.py.

    damage        any file: bytes flipped, cut, added, moved, or replaced by extreme numbers
                  JSON, also in lines or packed: values removed, duplicated, or of another type or size
                  YAML: special syntax among plain values
    reseal, forge update checksums to damaged files, so that readers get past them
"""

import contextlib
import copy
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanochat import checkpoint
from nanochat.common import hash_bytes


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, add or move some bytes, or replace them by extreme numbers."""
    at, size = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, 64, 1000))
    how = rng.choice(("flip", "cut", "grow", "splice", "number", "drop"))
    if how == "flip":
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 3, 50))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if how == "cut":
        return data[:at]
    if how == "grow":
        return data + rng.choice(
            (b"\0", b"\xff" * size, data[:size], b"}" * size, rng.randbytes(size))
        )
    if how == "splice":
        return data[:at] + data[rng.randrange(len(data)) :][:size] + data[at:]
    if how == "number":
        number = rng.choice((0, 1, -1, 2**31, -(2**31), 2**63 - 1, 2**40)) % 2**64
        width = rng.choice((1, 2, 4, 8))
        return (
            data[:at] + (number % 2 ** (8 * width)).to_bytes(width, "little") + data[at + width :]
        )
    return data[:at] + data[at + size :]


DEEP = "@deep@"
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    10**30,
    2**63,
    1e308,
    float("nan"),
    "",
    "x" * 3000,
    "../../etc/passwd",
    "\ud800",
    "\0",
    [],
    {},
    [[]],
    {"a": 1},
    [None],
    DEEP,
)


def damage_json(rng: random.Random, text: str) -> str:
    """JSON with one or two values removed, duplicated, or replaced by another type or size."""
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 2))):
        places = list(containers(value))
        if not places:
            break
        holder = rng.choice(places)
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        how = rng.choice(("set", "set", "set", "lose", "more"))
        if how == "lose":
            del holder[key]
        elif how == "set":
            # a copy, because the next damage may change it
            holder[key] = copy.deepcopy(rng.choice(ODD))
        elif isinstance(holder, dict):
            holder[f"{key}2"] = holder[key]
        else:
            holder.append(holder[key])
    deep = rng.choice(
        ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "9" * 5000)
    )
    return json.dumps(value, indent=2).replace(f'"{DEEP}"', deep)


YAML = (
    "&a ",
    "*a",
    "!!float ",
    "!!bool ",
    "!!python/name:os.system ",
    "!x ",
    "? ",
    "- ",
    "<<: ",
    "\n---\n",
    "[" * 3000,
    "{a: " * 3000,
    "- " * 3000,
    "1:30 ",
    "2024-01-01 ",
    "0x ",
    ".inf ",
    "9" * 5000,
    '"\\UFFFFFFFF" ',
    '"\\ud800" ',
    "&a [*a, *a]\n",
    "%TAG ! !\n",
    "\t",
    "'",
    "|\n",
    ": ",
    "\ufeff",
    "-1",
    "'../../../etc/passwd'",
    "/etc/passwd",
)


def damage_yaml(rng: random.Random, text: str) -> str:
    """YAML with one to three values or lines replaced or preceded by special syntax."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        key, colon, value = lines[at].partition(": ")
        odd = rng.choice(YAML)
        lines[at] = rng.choice(
            (f"{key}{colon}{odd}", f"{key}{colon}{odd}{value}", f"{odd}{lines[at]}", odd)
        )
        text = "\n".join(lines)
    return text


def containers(value: Any) -> Iterator[Any]:
    """All non-empty lists and objects in a value, the outer ones first."""
    if isinstance(value, (list, dict)) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


def damage(rng: random.Random, path: Path, data: bytes) -> bytes:
    """The bytes of a file, damaged in a way that suits its format."""
    zipped = path.name.endswith(".gz")
    plain = gzip.decompress(data) if zipped else data
    if rng.random() < 0.6 and ".json" in path.name and path.suffix != ".zst":
        text = plain.decode()
        lines = text.splitlines()
        # one object per line
        if ".jsonl" in path.name or (len(lines) > 1 and lines[1].startswith("{")):
            at = rng.randrange(len(lines))
            lines[at] = damage_json(rng, lines[at]).replace("\n", "")
            text = "\n".join(lines) + "\n"
        else:
            text = damage_json(rng, text)
        return gzip.compress(text.encode(), 1) if zipped else text.encode()
    if rng.random() < 0.7 and path.suffix == ".yaml":
        return damage_yaml(rng, plain.decode()).encode("utf-8", "surrogatepass")
    if zipped and rng.random() < 0.5:
        return gzip.compress(damage_bytes(rng, plain), 1)
    return damage_bytes(rng, data)


def reseal(path: Path) -> None:
    """Update the checksums of a checkpoint to its damaged files, if its seal can be read."""
    seal_path = path / checkpoint.STATE_NAME
    with contextlib.suppress(
        ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError
    ):
        seal = json.loads(seal_path.read_bytes())
        for name, record in seal["files"].items():
            data = (path / name).read_bytes()
            record.update(bytes=len(data), blake2b=hash_bytes(data))
        seal["checksum"] = checkpoint.NO_CHECKSUM
        seal["checksum"] = hash_bytes(checkpoint.json_bytes(seal))
        seal_path.write_bytes(checkpoint.json_bytes(seal))


def forge(folder: Path) -> None:
    """Update the hash of the ranks in tokenizer.json to the damaged file."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        about = json.loads((folder / "tokenizer.json").read_bytes())
        about["rank_file_hash"] = hash_bytes((folder / "ranks.tiktoken").read_bytes())
        (folder / "tokenizer.json").write_text(json.dumps(about))
