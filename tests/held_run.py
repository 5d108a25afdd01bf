"""The training job, held before steps 10, 20, ... while the file $HOLD exists, unless a stop is
requested."""

import os
import time
from pathlib import Path

from nanochat.cli import run_main
from nanochat.common import LAUNCH
from scripts import base_train

take_step = base_train.one_step


def one_step(run):
    step = run.progress.step
    held = step % 10 == 0 and step > run.start.step
    while held and Path(os.environ["HOLD"]).exists() and not LAUNCH.stop():
        run.dog.beat()
        time.sleep(0.05)
    take_step(run)


if __name__ == "__main__":
    base_train.one_step = one_step
    run_main(base_train.main)
