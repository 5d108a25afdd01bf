"""The door for what receives the values of a run besides its own log, and the settings of these
sinks.

    --log-to=tensorboard,mine --> SINKS["tensorboard"], SINKS["mine"] --> run_journal.Journal

An entry of `SINKS` is a subclass of `steps.Sink` that is called with the run. If a sink fails, the
run continues without it. To add one, write such a class and name it in `SINKS`.
"""

import re
from dataclasses import dataclass

from nanochat.cli import setting

# {name in --log-to: "module:class"}
SINKS = {
    "wandb": "nanochat.integrations.trackers:Wandb",
    "tensorboard": "nanochat.integrations.trackers:TensorBoard",
    "trackio": "nanochat.integrations.trackers:Trackio",
}
PROFILE = "nanochat.integrations.trackers:Profile"  # of --profile-steps
NO_RUN = "dummy"


@dataclass(frozen=True, kw_only=True)
class SinkSettings:
    """where values are plotted"""

    run: str = setting(NO_RUN, f"name of the wandb run; {NO_RUN} turns wandb off")
    log_to: str = setting(
        "wandb",
        "where to plot the logged values: wandb (if --run names a run), tensorboard, trackio, or several of "
        "them separated by commas",
    )
    profile_steps: str | None = setting(
        None, "write PyTorch's profile of steps A to B - 1 into the run directory", metavar="A:B"
    )

    def __post_init__(self) -> None:
        if not set(self.log_to.split(",")) <= SINKS.keys():
            raise ValueError(
                f"--log-to: got {self.log_to!r}, expected {', '.join(SINKS)}, or several of them "
                "separated by commas"
            )
        if self.profile_steps is not None and self.profiled is None:
            raise ValueError(
                f"--profile-steps: got {self.profile_steps!r}, expected A:B, the first step and the one "
                "after the last, such as 10:13"
            )

    @property
    def profiled(self) -> tuple[int, int] | None:
        """(first, last + 1) of the steps to profile, None if `profile_steps` is empty or
        malformed."""
        match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", self.profile_steps or "", re.ASCII)
        first, end = (int(match[1]), int(match[2])) if match else (0, 0)
        return (first, end) if first < end else None

    @property
    def sinks(self) -> dict[str, str]:
        """{name: "module:class"} of what a run asks for: the sinks in `log_to`, but not wandb if
        `run` names no run; and a profile."""
        chosen = {name: SINKS[name] for name in self.log_to.split(",")}
        if self.run == NO_RUN:
            chosen.pop("wandb", None)
        if self.profiled is not None:
            chosen["profile"] = PROFILE
        return chosen
