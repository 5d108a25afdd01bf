"""
What a launch is protected by, as one context around all of it.

    enter    signals are recorded from here on; the processes find each other; rank 0 locks the run,
             and its mirror, if it has one
    sign     the launch owns the run: its record, and RUN/.run_state.json
    watch    a rank that hangs or dies ends all of them, within a stated time
    leave    in reverse order, but for the lock: a final status has given it up already. A command
             that was refused has left no trace

    guard.reason()    why to stop: a signal, a request, the walltime (nanochat/run_stop.py)
    guard.lost()      why to end at once: another launch owns the run (nanochat/run_owner.py)
    guard.beat()      this rank is alive (nanochat/watchdog.py)
"""

import logging
import os
import time
from contextlib import ExitStack
from typing import Any

import torch

from nanochat.common import Stop, join_reasons, open_door, stops_if
from nanochat.config import Settings
from nanochat.dist import (
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    elastic_problem,
    gather_all,
    on_rank0,
    write_collectives,
)
from nanochat.run_dir import run_path
from nanochat.run_owner import Owner, RunState, claim
from nanochat.run_state import identify
from nanochat.run_stop import StopWatch, deadline
from nanochat.steps import Mirror
from nanochat.watchdog import Watchdog, open_store

log = logging.getLogger(__name__)

# the door for --mirror-to
MIRROR = "nanochat.mirror:RunMirror"
LONG_S = 1800.0  # time limit of an evaluation or a save


class Guard:
    """Enter it on every rank. Inside it, a wait for data raises Stop once a stop is requested. A wait
    for other ranks does not: they agree on stops in `stop_if_asked` and with each step's totals.

    rank, world_size, device, ranks (`run_state.identify` of each rank): set by entering. owner and,
    once the run is signed, state: on rank 0 only. mirror: does nothing without --mirror-to, and on
    other ranks.

        method, in this order           ranks       thread    waits for
        enter                           all         main      the other ranks, the disk
        set_aside (or not), sign        0           main      the disk
        watch                           all         main      the other ranks
        beat(step, ...)                 all         main      nothing
        beat(), note_*, reason          each        main      nothing
        stop_if_asked                   all         main      the other ranks
        asked                           each        any       nothing
        lost                            0; else ''  any       the disk
        leave                           all         main      the other ranks, the disk

    all: every rank calls it, in the same order. each: any rank alone.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.run_dir = run_path(settings.tag)
        self._began = time.monotonic()
        # these are known once it is entered
        self.rank: int
        self.world_size: int
        self.device: torch.device
        self.ranks: list[dict[str, Any]]
        self.owner: Owner | None = None
        self.state: RunState | None = None
        self.mirror = Mirror()
        self._stop = StopWatch(reserve_s=settings.walltime_reserve_seconds, run_dir=self.run_dir)
        self._dog: Watchdog | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Guard":
        with ExitStack() as stack:
            stack.enter_context(self._stop)
            stack.enter_context(stops_if(self.asked))
            self._stop.deadline = self._deadline()
            if problem := elastic_problem():
                log.warning("%s", problem)
            self._join(stack)
            self.ranks = gather_all(identify())

            def lock() -> None:
                self.owner = claim(self.run_dir)
                stack.callback(self.owner.release)
                if self.settings.mirror_to is not None:
                    self.mirror = open_door(MIRROR)(self.settings, self.run_dir)
                    stack.callback(self.mirror.release)

            on_rank0(lock)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _deadline(self) -> float | None:
        """When the walltime of this launch ends; None without one."""
        settings = self.settings
        return deadline(
            settings.max_runtime_seconds,
            os.environ,
            self._began,
            reserve_s=settings.walltime_reserve_seconds,
        )

    def _join(self, stack: ExitStack) -> None:
        """Find the other processes of this launch, and select the device."""
        settings = self.settings
        _, self.rank, _, self.world_size, self.device = compute_init(
            settings.device_type or autodetect_device_type(),
            deterministic=settings.deterministic,
            # longer than the watchdog takes, whose error names a rank
            timeout_s=2 * settings.collective_timeout_seconds + LONG_S,
        )
        stack.callback(compute_cleanup)

    # ---- the lock

    def set_aside(self) -> None:
        """On rank 0: rename the run's folder, and own the empty one that takes its place."""
        assert self.owner is not None, "only rank 0 owns a run"
        self.owner.set_aside()

    def sign(self, **news: object) -> None:
        """On rank 0: own the run from here on. `news`: see `RunState.update`."""
        assert self.owner is not None, "only rank 0 owns a run"
        self.owner.sign()
        state = RunState(self.owner, self.ranks, self._stop.look_for_request, **news)
        self.state = self._stack.enter_context(state)

    @property
    def launch(self) -> str:
        """Names this launch; '' on other ranks than 0."""
        return "" if self.owner is None else self.owner.launch

    def lost(self) -> str:
        """'' while this launch has locked the run, owns it if it has signed it, and owns its mirror;
        else the error to end with. After a final status, it owns none of them."""
        return self.mirror.lost() or ("" if self.owner is None else self.owner.lost())

    # ---- the heartbeat

    def watch(self) -> None:
        """Collective. From here on, the main thread of each rank must beat."""

        def failed(verdict: str) -> None:
            """In any thread, on every rank. The state comes first, because it matters most; then the
            run is given up, and PyTorch's record for diagnosis is all that is written to it."""
            is_lost = bool(self.lost())
            if self.state is not None:
                self.state.end("failed", verdict)
            if not is_lost:
                write_collectives(self.run_dir, self.rank)

        def refresh() -> str:
            """In the watchdog's thread. Not `self.lost()`, because of a final status."""
            lost = "" if self.state is None else self.state.refresh()
            return lost or self.mirror.lost()

        dog = Watchdog(
            open_store(self.world_size),
            self.ranks,
            rank=self.rank,
            timeout_s=self.settings.collective_timeout_seconds,
            refresh=refresh,
            on_failure=failed,
        )
        self._dog = self._stack.enter_context(dog)

    def beat(self, step: int | None = None, where: str = "", patience_s: float = 0.0) -> None:
        """See `Watchdog.beat`."""
        if self._dog is not None:
            self._dog.beat(step, where, patience_s)

    # ---- reasons to stop

    def reason(self) -> str:
        """Why this rank should stop after the current step, or ''. Call it once per step: it counts
        how long steps take, and compares that with the walltime."""
        return self._stop.after_step()

    def asked(self) -> str:
        """The reason that is known already, such as a signal, or ''. Call it at any time."""
        return self._stop.asked()

    def note_work(self, what: str, seconds: float) -> None:
        """Some work between steps took so long; `reason` allows for that from now on."""
        self._stop.note_work(what, seconds)

    def note_save(self, seconds: float) -> None:
        """A save took so long; the walltime keeps that for the last one, and time to mirror it."""
        self._stop.note_save(seconds + self.mirror.slowest_s)

    def stop_if_asked(self) -> None:
        """Collective. Raise `Stop` on all ranks if any of them was asked to stop."""
        reasons = gather_all(self.asked())
        if any(reasons):
            raise Stop(join_reasons(reasons))
