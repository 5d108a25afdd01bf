"""The training job, held before steps 10, 20, ... while the file $HOLD exists, unless a stop is
requested."""

import os
import time
from pathlib import Path

from nanochat.cli import run_main
from scripts import base_train

take_step = base_train.one_step


def one_step(run, training, guard, *others):
    step = training.progress.step
    held = step % 10 == 0 and step > run.step
    while held and Path(os.environ["HOLD"]).exists() and not guard.asked():
        guard.beat()
        time.sleep(0.05)
    take_step(run, training, guard, *others)


if __name__ == "__main__":
    base_train.one_step = one_step
    run_main(base_train.main)
