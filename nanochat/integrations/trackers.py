"""
Trackers: where the values of a run are drawn elsewhere while it trains, and the profile of some steps.

    trainer.Journal --{"step": 12, "train/loss": 3.1}--> Trackers --> wandb        --run=NAME
                                                         '--------> TensorBoard  --log-to=tensorboard

The log of the run directory has everything, so a board is a comfort: where one fails, that is told
once and the run goes on without it. Nothing of this room is loaded unless a run asks for it.

A profile is PyTorch's trace of some steps of rank 0, for https://ui.perfetto.dev. It watches
and computes nothing, so a run with a profile has the same bits as one without.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nanochat.common import print0
from nanochat.config import Settings

log = logging.getLogger(__name__)


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of all numbers in a nest of mappings; names of a nest are joined by "/"."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_numbers(value, f"{prefix}{name}/")
        elif type(value) in (int, float):
            yield f"{prefix}{name}", float(value)


class TensorBoard:
    """The event files in RUN/tensorboard, for `tensorboard --logdir RUN/tensorboard`. A run that
    goes on at `step` hides what an earlier launch had drawn of that step and those after it."""

    def __init__(self, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step)

    def log(self, values: Mapping[str, Any]) -> None:
        """Draw the numbers among some values, which were true at values["step"]."""
        for name, number in flat_numbers(values):
            if name != "step":
                self._writer.add_scalar(name, number, values["step"])

    def finish(self) -> None:
        self._writer.close()


class Trackers:
    """All trackers that a run asks for, and its profile. `wandb_id`: that of the wandb run to go on with;
    afterwards that of the run which was begun. `step`: from which this launch goes on."""

    def __init__(self, settings: Settings, run_dir: Path, *, wandb_id: str | None, step: int):
        self.wandb_id = wandb_id
        self._open: dict[str, Any] = {}
        if "wandb" in settings.trackers:
            with self._guard("wandb"):
                import wandb  # takes a second

                run = wandb.init(project="nanochat", name=settings.run, config=settings.to_json(), dir=run_dir,
                                 id=wandb_id, resume="allow")
                self._open["wandb"], self.wandb_id = run, run.id
        if "tensorboard" in settings.trackers:
            with self._guard("tensorboard"):
                self._open["tensorboard"] = TensorBoard(run_dir, step)
        if settings.profiled is not None:
            self._open["profile"] = Profile(run_dir, *settings.profiled)

    @contextlib.contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        """What fails inside is told, and its board is left."""
        try:
            yield
        except Exception as e:  # whatever it is, it is not worth a run
            log.warning("%s failed (%s); going on without it", name, e)
            self._open.pop(name, None)

    def _tell(self, what: str, *args: Any) -> None:
        """Call a method of all trackers that have it."""
        for name, board in list(self._open.items()):
            with self._guard(name):
                getattr(board, what, lambda *_: None)(*args)

    def log(self, values: Mapping[str, Any]) -> None:
        """Tell all trackers some values, "step" among them."""
        self._tell("log", values)

    def at(self, step: int) -> None:
        """So many steps are done."""
        self._tell("at", step)

    def finish(self) -> None:
        """The run has ended."""
        self._tell("finish")


class Profile:
    """The profile of steps `first` to `last - 1`: RUN/profile/steps-FIRST-LAST.json.gz. A launch that
    begins inside profiles what is left of them."""

    def __init__(self, run_dir: Path, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._path = run_dir / "profile" / f"steps-{first}-{last}.json.gz"
        self._profiler: Any = None
        # above all levels of its library, which else tells the terminal of each start and end
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def at(self, step: int) -> None:
        """So many steps are done: begin or end where it is time for it."""
        if self._first <= step < self._last and self._profiler is None:
            if torch.cuda.is_available():  # for the snapshot of memory
                torch.cuda.memory._record_memory_history(max_entries=100_000)
            self._profiler = torch.profiler.profile()  # the CPU, and CUDA where it is there
            self._profiler.start()
        elif step >= self._last:
            self.finish()

    def finish(self) -> None:
        """Write what was profiled, if that has not been done."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        self._last = self._first  # it does not begin again
        profiler.stop()
        self._path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(self._path))
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self._path).replace("steps-", "memory-").replace("json.gz", "pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        print0(f"profile: {self._path}")
