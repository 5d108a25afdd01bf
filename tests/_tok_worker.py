"""What worker processes do for tests/test_workers.py and tests/test_tok_shards.py. They import it by name."""

import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any


def open_counting(folder: Path) -> Callable[[Any], Generator[int, None, str]]:
    """Work that counts up to its task; told to, it fails, dies, or waits. Leaves a file named after each process."""
    (folder / str(os.getpid())).touch()

    def work(task: Any) -> Generator[int, None, str]:
        if task == "fails":
            raise ValueError("a bad task")
        if task == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "exits":
            os._exit(5)
        if task == "waits":
            yield 0
            while True:
                time.sleep(0.01)
                yield 0
        yield from range(task)
        return f"{task} by {os.getpid()}"

    return work


def open_failing(folder: Path) -> None:
    raise ValueError("no worker today")


def open_slow(tokenizer_name: str, shard_set: Any) -> Callable[[Any], Generator[Any, None, Any]]:
    """The real work of scripts.tok_shards, but inputs whose name begins with `slow` never come to an end."""
    from scripts.tok_shards import open_work

    real = open_work(tokenizer_name, shard_set)
    (shard_set.output / f"worker-{os.getpid()}").touch()

    def work(i: Any) -> Generator[Any, None, Any]:
        progress = real(i)
        if i.stem.startswith("slow"):
            yield next(progress)  # the pair is being written
            (shard_set.output / f"busy-{i.stem}").touch()
            while True:
                time.sleep(0.01)
                yield 0, 0
        return (yield from progress)

    return work


if __name__ == "__main__":
    from nanochat.common import run_main
    from scripts.tok_shards import main
    from tests._tok_worker import open_slow as by_name

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their tests, ignore it
    run_main(lambda: main(sys.argv[1:], open_work=by_name))
