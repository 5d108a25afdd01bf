"""
Trackers: wandb, TensorBoard and trackio plot a run while it trains, and PyTorch's profiler records
some of its steps. The journal opens this sink if a run asks for one of them.

    run_journal.Journal --{"step": 12, "train/loss": 3.1}--> Trackers --> wandb        --run=NAME
                                                         '--------> TensorBoard  --log-to=tensorboard
                                                         '--------> trackio      --log-to=trackio
                                                         '--------> profile      --profile-steps=A:B

The run directory's own log has all values. So if a tracker fails, the run continues without it,
with one warning.

A profile is a trace of some steps of rank 0, for https://ui.perfetto.dev. It only observes, so a
run with a profile has the same bits as one without.
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
from nanochat.run_reader import flat_numbers
from nanochat.start_run import Run
from nanochat.steps import Sink, StepReport

log = logging.getLogger(__name__)


class TensorBoard:
    """Writes event files to RUN/tensorboard, for `tensorboard --logdir RUN/tensorboard`. A run that
    resumes at `step` hides the values that an earlier launch wrote for that step and later ones."""

    def __init__(self, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step)

    def log(self, values: Mapping[str, Any]) -> None:
        """Record the numbers in `values` at step values["step"]."""
        for name, number in flat_numbers(values):
            if name != "step":
                self._writer.add_scalar(name, number, values["step"])

    def finish(self) -> None:
        self._writer.close()


class Trackio:
    """Writes to the project nanochat in trackio's local SQLite database, for `trackio show`. A step
    that a resumed run repeats has two points."""

    def __init__(self, settings: Settings) -> None:
        import trackio

        self._run = trackio.init(
            project="nanochat", name=settings.model_tag, config=settings.to_json(), resume="allow"
        )

    def log(self, values: Mapping[str, Any]) -> None:
        """Record the numbers in `values` at step values["step"]."""
        self._run.log(
            {name: n for name, n in flat_numbers(values) if name != "step"}, step=values["step"]
        )

    def finish(self) -> None:
        self._run.finish()


class Trackers(Sink):
    """All trackers that a run asks for, and its profile. `wandb_id`: the id of its wandb run."""

    def __init__(self, run: Run) -> None:
        settings = run.settings
        run_dir = run.run_dir
        self.wandb_id = run.wandb_id
        self._open: dict[str, Any] = {}
        for name in settings.trackers:
            with self._guard(name):
                if name == "wandb":
                    import wandb  # takes a second to import

                    tracked = wandb.init(
                        project="nanochat",
                        name=settings.run,
                        config=settings.to_json(),
                        dir=run_dir,
                        id=self.wandb_id,
                        resume="allow",
                    )
                    self._open["wandb"] = tracked
                    self.wandb_id = tracked.id
                elif name == "tensorboard":
                    self._open[name] = TensorBoard(run_dir, run.step)
                else:
                    self._open[name] = Trackio(settings)
        if settings.profiled is not None:
            self._open["profile"] = Profile(run_dir, *settings.profiled)

    @contextlib.contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        """Drop the tracker with a warning if the block fails."""
        try:
            yield
        except Exception as e:  # a tracker must not end a run
            log.warning("%s failed (%s); continuing without it", name, e)
            self._open.pop(name, None)

    def _call(self, method: str, *args: Any) -> None:
        """Call a method of every tracker that has it."""
        for name, tracker in list(self._open.items()):
            with self._guard(name):
                getattr(tracker, method, lambda *_: None)(*args)

    def event(self, name: str, step: int, record: dict[str, Any]) -> None:
        # CORE has nanochat's names
        values = record if name == "core" else {f"{name}/{k}": v for k, v in record.items()}
        self._call("log", {"step": step, **values})
        if name == "started":
            self._call("at", step)

    def step(self, report: StepReport) -> None:
        values: dict[str, Any] = {"step": report.step}
        for name, value in report.record.items():
            if name != "digest":
                values[name if name.startswith("total_") else f"train/{name}"] = value
        self._call("log", values)
        self._call("at", report.step + 1)

    def close(self) -> None:
        self._call("finish")


class Profile:
    """Profiles steps `first` to `last - 1` into RUN/profile/steps-FIRST-LAST.json.gz. A launch that
    starts between them profiles the remaining ones."""

    def __init__(self, run_dir: Path, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._path = run_dir / "profile" / f"steps-{first}-{last}.json.gz"
        self._profiler: Any = None
        # silences the profiler's library, which would print each start and end
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def at(self, step: int) -> None:
        """Called after `step` steps: start or end the profile if it is due."""
        if self._first <= step < self._last and self._profiler is None:
            if torch.cuda.is_available():  # for the memory snapshot
                torch.cuda.memory._record_memory_history(max_entries=100_000)
            self._profiler = torch.profiler.profile()  # of the CPU, and of CUDA if available
            self._profiler.start()
        elif step >= self._last:
            self.finish()

    def finish(self) -> None:
        """Write the profile, once."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        self._last = self._first  # never start again
        profiler.stop()
        self._path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(self._path))
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(
                str(self._path).replace("steps-", "memory-").replace("json.gz", "pickle")
            )
            torch.cuda.memory._record_memory_history(enabled=None)
        print0(f"profile: {self._path}")
