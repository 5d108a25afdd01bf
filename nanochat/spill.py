"""
Large row groups of parquet files, decoded once per process into a file instead of memory.

A row group can only be read from its beginning, and each of its pages only as a whole. A file of
books may have a single page of a gigabyte, which takes three times that much memory to decode; if
every lane decoded it for itself, a launch would need tens of gigabytes. So a large group is decoded
once, into a file without a name that disappears with the process, and lanes read their documents
from there:

    parquet: one group of 1,200 books                    file: the texts, then their sizes, then their number
    [page of 2.4 GB, compressed] --decoded by a child--> "It was..Call me..In the..." 2000000 1999999 ... 1200
                                                            lane 0 reads here ^      lane 1 ^      lane 2 ^

The child is a process of its own, because Arrow keeps the memory of a decoded page for as long as
its process lives. A file is closed when another group has been decoded, and every lane that announced
further reads of this one has made them.

Rejected: rewriting such files into smaller row groups when a run starts. That would need as much
disk as the data.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nanochat.common import (
    AnyPath,
    Remote,
    as_path,
    begin_launch,
    check_stop,
    get_base_dir,
    reason_of,
)
from nanochat.text import open_parquet, read_batches

LARGE_BYTES = 16 << 20  # of text in a row group; smaller groups are decoded in memory
APART_BYTES = 64 << 20  # larger groups are decoded by a child
BATCH_BYTES = 4 << 20  # of texts that are decoded at once
POLL_S = 0.05
CHILD = "import sys; sys.path.insert(0, sys.argv[1]); from nanochat.spill import main; main(*sys.argv[2:])"


class Spill:
    """The decoded texts of one row group. Several threads may read at once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        end = os.fstat(file.fileno()).st_size
        [self.num_documents] = self._numbers(end - 8, 1).tolist()
        sizes = self._numbers(end - 8 - 8 * self.num_documents, self.num_documents)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        # for each lane that will read on, the number at which it stops
        self.readers: set[int] = set()

    def _numbers(self, start: int, count: int) -> np.ndarray:
        return np.frombuffer(os.pread(self._file.fileno(), 8 * count, start), "<i8")

    def read(self, numbers: np.ndarray) -> list[str]:
        """The texts of documents `numbers` (n,), in that order."""
        fd = self._file.fileno()
        texts = []
        for number in numbers.tolist():
            start, end = self._starts[number : number + 2].tolist()
            texts.append(os.pread(fd, end - start, start).decode())
        return texts

    def close(self) -> None:
        self._file.close()


class Spills:
    """The row groups that the lanes of this process are reading now."""

    def __init__(self) -> None:
        self._open: dict[int, Spill] = {}
        self._lock = threading.Lock()
        self._decoding = threading.Lock()

    def read(
        self, group: int, numbers: np.ndarray, keep: int, decode: Callable[[], Spill]
    ) -> list[str]:
        """The texts of documents `numbers` of a group, which `decode` decodes if it is not open.

        keep: this lane will read the documents up to that number (exclusive), 0 if it will not.
        """
        texts = self._read_open(group, numbers, keep)
        if texts is not None:
            return texts
        with self._decoding:  # one group at a time
            # another lane may have decoded it meanwhile
            texts = self._read_open(group, numbers, keep)
            if texts is None:
                spill = decode()
                with self._lock:
                    unread = [g for g, old in self._open.items() if not old.readers]
                    for other in unread:
                        self._open.pop(other).close()
                    self._open[group] = spill
                texts = self._read_open(group, numbers, keep)
        assert texts is not None
        return texts

    def _read_open(self, group: int, numbers: np.ndarray, keep: int) -> list[str] | None:
        """`read` if the group is open, otherwise None."""
        with self._lock:
            spill = self._open.get(group)
            if spill is None:
                return None
            if int(numbers.max()) + 1 < keep:
                spill.readers.add(keep)
            else:
                spill.readers.discard(keep)
            return spill.read(numbers)


# ---- decoding ------------------------------------------------------------------------------------


def decode_group(path: AnyPath, number: int, field: str, num_bytes: int) -> Spill:
    """Decode row group `number` of a parquet file, which has about `num_bytes` of text.

    ValueError, as from `read_batches`, if it is damaged; OSError if the base directory has no room
    for it; Stop if a stop is requested meanwhile.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile(dir=get_base_dir()))
            if num_bytes > APART_BYTES:
                _in_child(path, number, field, file)
            else:
                write_texts(path, number, field, file)
        except OSError as e:
            with contextlib.suppress(OSError):  # a full disk fails again
                stack.close()
            if e.errno is None:  # our own sentence, which names what is at fault, such as a server
                raise
            raise OSError(
                e.errno,
                f"{get_base_dir()}: row group {number} of {path}, with {num_bytes:,} bytes of text, "
                f"cannot be decoded there ({reason_of(e)}); make room, or rewrite the file with "
                f"smaller row groups",
            ) from e
        spill = Spill(file)
        stack.pop_all()
    return spill


def write_texts(path: AnyPath, number: int, field: str, out: BinaryIO) -> None:
    """Write the texts of a row group, then their sizes in bytes, then their number."""
    sizes = []
    with open_parquet(path, field) as file:
        group = file.metadata.row_group(number)
        mean_bytes = group.total_byte_size // max(1, group.num_rows)
        batch_size = max(1, min(256, BATCH_BYTES // max(1, mean_bytes)))
        for column in read_batches(file, number, path, batch_size=batch_size, field=field):
            for text in column:
                sizes.append(out.write(text.as_buffer()))
    out.write(np.array([*sizes, len(sizes)], "<i8").tobytes())
    out.flush()


def _in_child(path: AnyPath, number: int, field: str, out: BinaryIO) -> None:
    """`write_texts` in a process of its own, which Ctrl-C does not reach."""
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", CHILD, root, str(path), str(number), field, str(out.fileno())]
    command.append(str(Remote.cache_bytes / 1e9))
    child = subprocess.Popen(
        command,
        pass_fds=[out.fileno()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while child.poll() is None:
            check_stop()
            time.sleep(POLL_S)
    finally:
        child.kill()  # does nothing if it has ended
        child.wait()
    assert child.stderr is not None
    said = child.stderr.read()
    kind, _, sentence = said.strip().partition(" ")
    if child.returncode == 0:
        return
    if kind == "ValueError":
        raise ValueError(sentence)
    if kind == "0":  # our own sentence, for example about a server that does not answer
        raise OSError(sentence)
    if kind.isdigit():
        raise OSError(int(kind), sentence)
    raise RuntimeError(
        f"{path}: row group {number}: its decoder ended with {child.returncode}: {said[-2000:]}"
    )


def main(path: str, number: str, field: str, fd: str, data_cache_gb: str) -> None:
    """The child: write the texts to the inherited file `fd`.

    Prints the kind of an error and its sentence.
    """
    begin_launch(float(data_cache_gb))
    try:
        with os.fdopen(int(fd), "wb") as out:
            write_texts(as_path(path), int(number), field, out)
    except ValueError as e:
        sys.exit(f"ValueError {e}")
    except OSError as e:
        sys.exit(f"{e.errno or 0} {reason_of(e)}")
