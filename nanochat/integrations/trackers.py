"""
Trackers: wandb, TensorBoard and trackio plot a run while it trains, and PyTorch's profiler records
some of its steps. Each is a sink of the journal, opened if a run asks for it (nanochat/sinks.py).

    run_journal.Journal --step, event--> Tracker --{"step": 12, "train/loss": 3.1}--> wandb, TensorBoard, trackio
                                     '-> Profile --> RUN/profile

A profile is a trace of some steps of rank 0, for https://ui.perfetto.dev. It only observes, so a
run with a profile has the same bits as one without.
"""

import importlib.util
import os
from typing import Any

import torch

from nanochat.common import print0
from nanochat.run_reader import flat_numbers
from nanochat.start_run import Run
from nanochat.steps import Sink, StepReport

PROJECT = "nanochat"  # of a run, in wandb and trackio


class Tracker(Sink):
    """Passes the values of a run on to `log`, under the names of nanochat."""

    def log(self, values: dict[str, Any]) -> None:
        """Record some values, among them "step"."""
        raise NotImplementedError

    def event(self, name: str, step: int, record: dict[str, Any]) -> None:
        values: dict[str, Any] = {"step": step}
        for key, value in record.items():
            # CORE has nanochat's names
            values[key if name == "core" else f"{name}/{key}"] = value
        self.log(values)

    def step(self, report: StepReport) -> None:
        values: dict[str, Any] = {"step": report.step}
        for name, value in report.record.items():
            if name != "digest":
                values[name if name.startswith("total_") else f"train/{name}"] = value
        self.log(values)


class Wandb(Tracker):
    """The wandb run that --run names. If wandb is missing, the run continues without it, as in
    nanochat. `wandb_id`: id of the wandb run."""

    def __init__(self, run: Run) -> None:
        import wandb  # takes a second to import

        self._run = wandb.init(
            project=PROJECT,
            name=run.settings.run,
            config=run.settings.to_json(),
            dir=run.run_dir,
            id=run.wandb_id,
            resume="allow",
        )
        self.wandb_id: str | None = self._run.id

    def log(self, values: dict[str, Any]) -> None:
        self._run.log(values)

    def close(self) -> None:
        self._run.finish()


class TensorBoard(Tracker):
    """Writes event files to RUN/tensorboard, for `tensorboard --logdir RUN/tensorboard`. A run that
    resumes at a step hides the values that an earlier launch wrote for that step and later ones."""

    @staticmethod
    def check() -> None:
        """ValueError if TensorBoard is not installed."""
        check_installed("tensorboard")

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=run.step)

    def log(self, values: dict[str, Any]) -> None:
        """Record the numbers in `values`."""
        for name, number in flat_numbers(values):
            if name != "step":
                self._writer.add_scalar(name, number, values["step"])

    def close(self) -> None:
        self._writer.close()


class Trackio(Tracker):
    """Writes to the project nanochat in trackio's local SQLite database, for `trackio show`. A step
    that a resumed run repeats has two points."""

    @staticmethod
    def check() -> None:
        """ValueError if trackio is not installed."""
        check_installed("trackio")

    def __init__(self, run: Run) -> None:
        import trackio

        settings = run.settings
        self._run = trackio.init(
            project=PROJECT, name=settings.model_tag, config=settings.to_json(), resume="allow"
        )

    def log(self, values: dict[str, Any]) -> None:
        """Record the numbers in `values`."""
        numbers = {name: n for name, n in flat_numbers(values) if name != "step"}
        self._run.log(numbers, step=values["step"])

    def close(self) -> None:
        self._run.finish()


def check_installed(package: str) -> None:
    """ValueError if the package of a tracker is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"--log-to={package}: {package} is not installed; run pip install -e '.[{package}]'"
        )


class Profile(Sink):
    """Profiles steps `first` to `last - 1` into RUN/profile/steps-FIRST-LAST.json.gz. A launch that
    starts between them profiles the remaining ones."""

    answer_s = 600.0  # a profile of many steps is large

    def __init__(self, run: Run) -> None:
        assert run.settings.profiled is not None
        self._first, self._last = run.settings.profiled
        self._path = run.run_dir / "profile" / f"steps-{self._first}-{self._last}.json.gz"
        self._profiler: Any = None
        # silences the profiler's library, which would print each start and end
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def event(self, name: str, step: int, record: dict[str, Any]) -> None:
        if name == "started":
            self._at(step)

    def step(self, report: StepReport) -> None:
        self._at(report.step + 1)

    def _at(self, step: int) -> None:
        """After `step` steps: start or end the profile if it is due."""
        if self._first <= step < self._last and self._profiler is None:
            if torch.cuda.is_available():  # for the memory snapshot
                torch.cuda.memory._record_memory_history(max_entries=100_000)
            self._profiler = torch.profiler.profile()  # of the CPU, and of CUDA if available
            self._profiler.start()
        elif step >= self._last:
            self.close()

    def close(self) -> None:
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
