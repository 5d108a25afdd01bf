"""A short job, done when this is imported: what a process does for the first time is done before others are forked.

Memory that is touched, code that is specialized, kernels, an encoder: without it each process that tests/training.py
forks from its server would take 0.15 s more."""

import gc
import logging
import tempfile
from pathlib import Path

from tests import training

with tempfile.TemporaryDirectory() as folder, training.workplace(Path(folder), **training.SMALL):
    training.succeed(num_iterations=2, save_every=-1, eval_every=2)
training._assets.cache_clear()
logging.getLogger().handlers.clear()
gc.collect()
gc.freeze()
