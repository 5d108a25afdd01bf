"""scripts.tok_shards for tests/ring/test_tok_shards.py: converting an input named `slow...` never
ends."""

import os
import signal
import sys
import time
from typing import Any

import numpy as np

from nanochat.pretokenize import Pretokenizer


class SlowPretokenizer(Pretokenizer):
    def make(self, i: Any) -> Any:
        (self.output / f"worker-{os.getpid()}").touch()
        return super().make(i)

    def _write(self, i: Any, tokenizer: Any, writer: Any) -> Any:
        if i.stem.startswith("slow"):
            writer.add(np.array([1]), np.array([1]), np.array([0]))  # begin to write the pair
            (self.output / f"busy-{i.stem}").touch()
            while True:
                time.sleep(0.01)
        return super()._write(i, tokenizer, writer)


if __name__ == "__main__":
    from nanochat.cli import run_main
    from scripts import tok_shards
    from tests import _tok_worker

    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    tok_shards.Pretokenizer = _tok_worker.SlowPretokenizer  # type: ignore[misc]
    run_main(lambda: tok_shards.main(sys.argv[1:]))
