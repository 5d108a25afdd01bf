"""
jsonl: a JSON object with a field `text` in each line, plain or gzipped.

A line that is broken (not UTF-8, not JSON, no text in it) is no reason to lose a file of millions: it is told with its
number and passed over, or ends the reading where `strict` is asked for. Blank lines are nothing. A gzip file that is
torn has lost documents nobody can count, so that is always an error.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

READ_BYTES = 1 << 20  # of the file at a time: gzip would ask for 8 KB


class Line(NamedTuple):
    """A line that is not blank."""

    number: int  # from 1
    text: str | None  # None for a broken one
    problem: str  # what is wrong with it; empty for a good one
    position: int  # bytes of the file read so far


def read_jsonl(path: Path, *, strict: bool = False) -> Iterator[Line]:
    """The lines of a .jsonl or .jsonl.gz file. ValueError for the first broken one with `strict`, and for a torn gzip
    file; it does not name the file."""
    number = 0
    zipped = path.name.endswith(".gz")
    with path.open("rb", buffering=READ_BYTES) as file, (gzip.open(file) if zipped else file) as lines:
        try:
            for number, line in enumerate(lines, 1):
                text, problem = _parse(line, number)
                if problem and strict:
                    raise ValueError(f"line {number}: {problem}; mend it, or leave out --strict to skip such lines")
                if problem or text is not None:
                    yield Line(number, text, problem, file.tell())
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            raise ValueError(f"not a whole gzip file, broken after line {number:,} ({e}); fetch it again") from e


def _parse(line: bytes, number: int) -> tuple[str | None, str]:
    """(text, ""), or (None, what is wrong with the line; "" if it is blank)."""
    try:
        decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
        if not decoded.strip():
            return None, ""
        text = json.loads(decoded)["text"]
        if not isinstance(text, str):
            return None, f"`text` is {type(text).__name__}, expected a string"
        text.encode()
    except KeyError:
        return None, "no field `text`"
    except TypeError:
        return None, "not a JSON object"
    except UnicodeDecodeError as e:
        return None, f"not UTF-8 ({e.reason} at its byte {e.start:,})"
    except UnicodeEncodeError:
        return None, "`text` has half a surrogate pair, which is no character"
    except (ValueError, RecursionError) as e:
        return None, f"not JSON: {e}"[:200]
    return text, ""
