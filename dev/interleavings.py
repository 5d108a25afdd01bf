"""
Every interleaving of launches that want the same run: at most one owns it.

    python -m dev.interleavings                          # 2,000 drawn schedules, all with 3 preemptions at most
    python -m dev.interleavings --preemptions=1 --drawn=50
    python -m dev.interleavings stop --schedule=1234     # one schedule again

    launch   claims the run, looks, signs, then at each step checks that it owns the run, writes a
             line, refreshes its state and looks for a request to stop; then it releases the run
    laws     of all launches that have signed, at most one owns the run at any time
             a refused launch leaves nothing behind
             a launch that has signed keeps the run, unless somebody removes it, moves it or sets it aside
             a request to stop ends at most one launch
             the first launch, if it is not interrupted, does what it was asked to do
             no launch waits forever, and in the end the run can be claimed
             each version of a mirror's owner is replaced by one launch at most
             a checkpoint that was saved, or a newer one, is there and good at any time
             whoever reads a run that has a good checkpoint gets one

Without locks, two launches that check at the same time may both sign, and the first one ends at its next
check. So there a launch may lose the run, and a request may stop both, if each interrupts the other.

Launches are threads that take turns at each call of the file system (tests/turns.py), with
processes of their own as far as the product can see. Cost: one CPU core. Duration: about half an
hour; with one preemption a minute.
"""

import argparse
import contextlib
import errno
import fcntl
import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tqdm import tqdm

from nanochat import checkpoint as checkpoint_module
from nanochat import run_dir as run_dir_module
from nanochat import run_owner, run_stop
from nanochat.checkpoint import SaveSettings, Snapshot, find_checkpoint, list_checkpoints, prune
from nanochat.cli import Parser, run_main, whole
from nanochat.common import table
from nanochat.mirror_owner import Lease, claim_mirror
from nanochat.mirror_store import Folder, Versioned
from nanochat.run_owner import Owner, RunState, claim
from nanochat.run_state import identify
from tests.training import fingerprint
from tests.turns import Schedule, SteppedFile, Turns, schedules

STEPS = 2  # of a launch
Actor = Callable[["World"], Any]


def base_of(actor: Any) -> Any:
    """The function of an actor, without what it is told."""
    return actor.func if isinstance(actor, partial) else actor


class World:
    """A run directory, and the launches that want it."""

    def __init__(self, base: Path, schedule: Schedule, *, has_locks: bool = True) -> None:
        self.run_dir = base / "runs" / "run"
        self.turns = Turns(schedule, self.check)
        self.has_locks = has_locks
        self.owners: dict[int, Owner] = {}  # of launches that have signed
        self.alive: set[int] = set()  # processes
        self.clock = 0.0
        self.signed = 0
        self.lines: list[int] = []
        self.mirror = base / "mirror"
        self.replaced: list[object] = []  # versions of the mirror's owner
        self.saved = 0  # the newest step that was saved
        self._names: list[str] = []  # of checkpoints, when they were last looked at

    @property
    def pid(self) -> int:
        """Of the present launch."""
        me = self.turns.me()
        return 1000 + (99 if me is None else me)

    def check(self) -> None:
        """At most one launch owns the run, and what was saved is there."""
        owners = [pid for pid, owner in self.owners.items() if not owner.lost()]
        assert len(owners) <= 1, f"{len(owners)} launches own the run"
        if self.saved:
            names = sorted(os.listdir(self.run_dir / "checkpoints"))
            if names != self._names:
                self._names = names
                self.check_saved()

    def check_saved(self) -> None:
        """A checkpoint that was saved, or a newer one, is there and good."""
        good = checkpoint_module.first_good(list_checkpoints(self.run_dir))
        assert good is not None and good.step >= self.saved, f"step {self.saved} was saved"

    def uptime_s(self) -> float:
        """A clock that never stands still."""
        self.clock += 1.0
        return self.clock

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """The product sees processes, locks and a clock of this world."""
        began: dict[int, float] = {}

        def open_regular(path: Path, flags: int) -> Any:
            return SteppedFile(really_open(path, flags), self.turns)

        def flock(file: Any, kind: int) -> None:
            if not self.has_locks:
                raise OSError(errno.ENOLCK, "no locks")
            really_lock(file, kind)

        def is_alive(process: Any) -> bool:
            return process["pid"] in self.alive

        really_open, really_lock = run_dir_module.open_regular, fcntl.flock
        me = {**identify(), "start": "1"}
        replaced = {
            (run_owner, "open_regular"): open_regular,
            (run_stop, "open_regular"): open_regular,
            (run_owner, "identify"): lambda: {**me, "pid": self.pid},
            (run_owner, "identify_launcher"): lambda: f"launch {self.pid}",
            (run_stop, "identify_launcher"): lambda: f"launch {self.pid}",
            (run_owner, "is_alive_here"): is_alive,
            (run_owner, "seems_alive"): lambda state: is_alive(state["ranks"][0]),
            (run_stop, "uptime_s"): self.uptime_s,
            (run_stop, "began_s"): lambda _: began.setdefault(self.pid, self.uptime_s()),
            (fcntl, "flock"): flock,
            (os, "register_at_fork"): lambda **_: None,
            (os, "getpid"): lambda: self.pid,
            (Lease, "keep"): lambda self: None,  # the actors renew
        }
        with contextlib.ExitStack() as stack:
            for (module, name), value in replaced.items():
                stack.enter_context(mock.patch.object(module, name, value))
            stack.enter_context(mock.patch.object(run_stop.StopWatch, "ended", 0.0))
            yield

    def run(self, scenario: "Scenario") -> None:
        """Let the actors of a scenario act, and check the laws."""
        before = fingerprint(self.run_dir.parent)
        with self.patched():
            outcomes = self.turns.run([partial(actor, self) for actor in scenario.actors])
            schedule = self.turns.schedule
            if self.has_locks or schedule.is_simple or self.signed <= 1:
                assert outcomes.count("stopped") <= 1, "one request stopped two launches"
                is_touched = {remove, move, mirrored} & {*map(base_of, scenario.actors)}
                is_touched |= {SETS_ASIDE} & {*scenario.actors}
                assert is_touched or "lost" not in outcomes, "a launch lost its run to another"
            assert len(self.replaced) == len(set(self.replaced)), "two launches own the mirror"
            if schedule.number == 0:
                assert outcomes[0] == scenario.first, f"the first launch was {outcomes[0]}"
            if not self.signed and self.has_locks and not self.replaced:
                assert fingerprint(self.run_dir.parent) == before, "a refused launch left a trace"
            self.alive.clear()
            last = claim(self.run_dir)
            last.sign()
            last.release()


# ---- actors --------------------------------------------------------------------------------------


def launch(world: World, *, ends: str = "", saves: bool = False) -> str:
    """A launch; how it ended. `ends`: what happens to it after it has looked: "refused", "aside"
    (it sets the run aside), "killed" after its first step, or "suspended" there for an hour. `saves`:
    see `saving`."""
    world.alive.add(world.pid)
    watch = run_stop.StopWatch(run_dir=world.run_dir)
    try:
        owner = claim(world.run_dir)
    except ValueError as e:
        world.alive.discard(world.pid)
        assert "another launch own" in str(e), e
        return "refused"
    try:
        if ends == "refused":
            return ends
        if ends == "aside":
            with contextlib.suppress(FileNotFoundError):  # the folder was removed
                owner.set_aside()
        try:
            owner.sign()
        except ValueError:
            return "refused"
        world.signed += 1
        world.owners[world.pid] = owner
        return work(world, owner, watch, ends, saves)
    except FileNotFoundError:  # the folder was removed
        return "lost"
    finally:
        world.owners.pop(world.pid, None)
        world.alive.discard(world.pid)
        if ends == "killed":
            owner._file.close()
        else:
            owner.release()


def work(world: World, owner: Owner, watch: run_stop.StopWatch, ends: str, saves: bool) -> str:
    """The steps of a launch that owns the run."""
    who = {**identify(), "pid": world.pid}
    state = RunState(owner, [who], watch.look_for_request, status="running")
    first = 0
    if saves:
        run_dir_module.open_folders(world.run_dir)
        newest = checkpoint_module.first_good(list_checkpoints(world.run_dir))
        first = newest.step if newest else 0
    for step in range(first, first + STEPS):
        if owner.lost():
            return "lost"
        world.lines.append(world.pid)
        if saves:
            save(world, step + 1)
        state.update(step=step)
        if state.refresh():
            return "lost"
        if ends == "suspended":
            time.sleep(3600)
        if ends == "killed":
            return ends
        if watch.asked():
            state.update(status="stopped")
            state.refresh()
            return "stopped"
    state.update(status="completed")
    state.refresh()
    return "completed"


def ends(how: str) -> Actor:
    """`launch` that ends in a certain way."""
    return partial(launch, ends=how)


def mirrored(world: World, *, ends: str = "") -> str:
    """A launch that owns a mirror, renews its record and gives it back; how it ended. `ends`:
    "killed" or "suspended", after its first renewal."""
    store = WatchedFolder(world)
    try:
        lease = claim_mirror(store, "run", {})
        for _ in range(STEPS):
            lease.renew()
            if ends == "suspended":
                time.sleep(3600)
            if ends == "killed":
                return ends
        lease.renew(released=True)
    except ValueError as e:
        return "lost" if "no longer owns" in str(e) else "refused"
    return "completed"


class WatchedFolder(Folder):
    """The store of a mirror, which notes what is replaced."""

    def __init__(self, world: World) -> None:
        super().__init__(world.mirror)
        self.world = world

    def swap(self, name: str, content: bytes, before: Versioned | None) -> Versioned | None:
        written = super().swap(name, content, before)
        if written is not None:
            self.world.replaced.append(before and before.content)
        return written


def saving(world: World, *, ends: str = "") -> str:
    """A launch that goes on from the newest checkpoint and saves after each step, and keeps one
    checkpoint; how it ended. `ends`: see `launch`."""
    return launch(world, ends=ends, saves=True)


def save(world: World, step: int) -> None:
    """Save a step, and delete what retention does not keep. Without locks, two launches may save
    the same step until one of them looks again; then one save fails."""
    snapshot = Snapshot(step, {}, {}, [], {})
    try:
        snapshot.write(world.run_dir, f"checkpoint-{step}")
    except OSError:
        if world.has_locks:
            raise
        return
    world.saved = max(world.saved, step)
    prune(world.run_dir, step, {}, SaveSettings(keep_last_k=1))


def read(world: World) -> None:
    """A command that reads the newest checkpoint, as soon as there is one."""
    while not world.saved:
        time.sleep(0.05)
    assert find_checkpoint(world.run_dir).step >= 1


def stop(world: World) -> None:
    """`scripts.stop`."""
    with contextlib.suppress(FileNotFoundError):
        run_stop.request_stop(world.run_dir)


def remove(world: World) -> None:
    """A user removes the run."""
    shutil.rmtree(world.run_dir, ignore_errors=True)


def move(world: World) -> None:
    """A user moves the run away, and later back, unless there is another one."""
    away = world.run_dir.with_name("away")
    with contextlib.suppress(OSError):
        os.rename(world.run_dir, away)
        os.rename(away, world.run_dir)


def launch_with_leftover(world: World) -> str:
    """A launch after a request that was meant for an earlier one."""
    stop(world)
    return launch(world)


SETS_ASIDE = ends("aside")


class Scenario(NamedTuple):
    """Actors that want one run. `first`: what becomes of the first one if it is not interrupted."""

    actors: Sequence[Actor]
    first: str = "completed"
    has_locks: bool = True


SCENARIOS = {
    "two": Scenario((launch, launch)),
    "three": Scenario((launch, launch, launch)),
    "withdraws": Scenario((ends("refused"), launch), "refused"),
    "both withdraw": Scenario((ends("refused"), ends("refused")), "refused"),
    "killed": Scenario((ends("killed"), launch), "killed"),
    "suspended": Scenario((ends("suspended"), launch)),
    "aside": Scenario((SETS_ASIDE, launch)),
    "leftover": Scenario((launch_with_leftover,)),
    "stop": Scenario((launch, stop, launch)),
    "removed": Scenario((launch, remove, launch)),
    "moved": Scenario((launch, move, launch)),
    "no locks": Scenario((launch, launch), has_locks=False),
    "withdraws, no locks": Scenario((ends("refused"), launch), "refused", has_locks=False),
    "mirror": Scenario((mirrored, mirrored)),
    "mirror, killed": Scenario((partial(mirrored, ends="killed"), mirrored), "killed"),
    "mirror, suspended": Scenario((partial(mirrored, ends="suspended"), mirrored), "lost"),
    "stop, no locks": Scenario((launch, stop, launch), has_locks=False),
    "retention": Scenario((saving, saving)),
    "retention, killed": Scenario((partial(saving, ends="killed"), saving), "killed"),
    "retention, suspended": Scenario((partial(saving, ends="suspended"), saving)),
    "retention, no locks": Scenario((saving, saving), has_locks=False),
    "retention, reader": Scenario((saving, read)),
}


# ---- planted mistakes ----------------------------------------------------------------------------


def _release_and_keep(self: Owner) -> None:
    """`Owner.release` that leaves what it made."""
    self._file.close()


def _make_once(path: Path) -> list[Path]:
    """`make_folder` that tries once."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return missing


def _look_and_keep(self: run_stop.StopWatch, run_dir: Path, *, has_stopped: bool = False) -> None:
    """`StopWatch.look_for_request` that leaves a request that it has honoured."""
    really_look(self, run_dir)


def _aside_without_owner(self: Owner) -> None:
    """`Owner.set_aside` that leaves the owner's file behind."""
    run_dir_module.set_aside(self.run_dir)
    self.run_dir.mkdir(exist_ok=True)
    (self.run_dir / run_owner.OWNER_NAME).write_bytes(self._record)


def _look_once(list_paths: Callable[[], list[Path]]) -> Any:
    """`look_for_good` that does not look again."""
    return checkpoint_module.first_good(list_paths())


def _open_in_place(run_dir: Path) -> None:
    """`open_folders` that removes the unfinished saves of others under their own names."""
    for name in run_dir_module.FOLDERS:
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    for path in (run_dir / "checkpoints").iterdir():
        if run_dir_module.HIDDEN_NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):
                run_dir_module.remove_tree(path)


really_look = run_stop.StopWatch.look_for_request

# {mistake: (what is replaced, the mistake, the scenario that notices it)}
MISTAKES: dict[str, tuple[str, Any, str]] = {
    "no lock is taken": ("nanochat.run_owner._lock", lambda file, kind: True, "two"),
    "never looks again": ("nanochat.run_owner.Owner.lost", lambda self: "", "removed"),
    "leaves what it made": ("nanochat.run_owner.Owner.release", _release_and_keep, "both withdraw"),
    "makes the folder once": ("nanochat.run_owner.make_folder", _make_once, "withdraws"),
    "one that has just signed counts as dead": (
        "nanochat.run_owner._has_just_signed",
        lambda record, state: False,
        "no locks",
    ),
    "a dead one counts as alive": (
        "nanochat.run_owner.last_owner",
        lambda run_dir: (b"", True),
        "no locks",
    ),
    "leaves an honoured request": (
        "nanochat.run_stop.StopWatch.look_for_request",
        _look_and_keep,
        "stop",
    ),
    "a leftover is honoured": (
        "nanochat.run_stop.StopWatch._is_leftover",
        lambda self, request: False,
        "leftover",
    ),
    "sets aside without its lock": (
        "nanochat.run_owner.Owner.set_aside",
        _aside_without_owner,
        "aside",
    ),
    "no lock on a mirror": (
        "nanochat.mirror_store.Folder._lock",
        lambda self: contextlib.nullcontext(),
        "mirror",
    ),
    "a reader looks once": (
        "nanochat.checkpoint.look_for_good",
        _look_once,
        "retention, reader",
    ),
    "removes unfinished saves in place": (
        "nanochat.run_dir.open_folders",
        _open_in_place,
        "retention, no locks",
    ),
    "waits without an end": ("nanochat.run_owner.LOCK_TRIES", 10**9, "suspended"),
    "an owner's file that vanishes is an error": (
        "nanochat.run_owner._open_or_make",
        lambda path: (run_dir_module.open_regular(path, os.O_RDWR | os.O_CREAT), False),
        "both withdraw",
    ),
}


def plant(mistake: str, *, at_most: int = 5000, drawn: int = 5000) -> str:
    """The first broken law with a planted mistake, "" if none was."""
    target, replacement, scenario = MISTAKES[mistake]
    try:
        with mock.patch(target, replacement):
            try_all(scenario, 2, drawn, at_most=at_most)
    except Broken as e:
        return str(e)
    return ""


# ---- the tool ------------------------------------------------------------------------------------


class Broken(AssertionError):
    """A law was broken in a schedule."""


def try_one(scenario: str, schedule: Schedule) -> int:
    """Run a schedule of a scenario; its number of calls. Broken names the schedule."""
    with tempfile.TemporaryDirectory() as base:
        world = World(Path(base), schedule, has_locks=SCENARIOS[scenario].has_locks)
        try:
            world.run(SCENARIOS[scenario])
        except Exception as e:
            raise Broken(f"{scenario} --schedule={schedule.number}: {type(e).__name__}: {e}") from e
        return world.turns.calls


def try_all(
    scenario: str, preemptions: int, drawn: int, *, at_most: int | None = None, seed: int = 0
) -> int:
    """`drawn` schedules, and all those with so few preemptions, or `at_most` of them. Returns their
    number."""
    threads = len(SCENARIOS[scenario].actors)
    rng = random.Random(seed)
    others = [Schedule(-rng.randrange(1, 1 << 40), threads) for _ in range(drawn)]
    calls = number = 0
    systematic = schedules(lambda schedule: calls, threads, preemptions)
    for schedule in tqdm(itertools.islice(systematic, at_most), desc=scenario, disable=None):
        calls = try_one(scenario, schedule)
        number += 1
        if others:  # in turns, because each kind soon finds what the other one seldom does
            try_one(scenario, others.pop())
            number += 1
    for schedule in others:
        try_one(scenario, schedule)
    return number + len(others)


def main(argv: Sequence[str] | None = None) -> int:
    """Try schedules, and report. Returns 1 if a law was broken."""
    parser = Parser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--preemptions", type=whole(0), default=3, help="at most so many")
    parser.add_argument("--drawn", type=whole(0), default=2000, help="schedules drawn in addition")
    parser.add_argument("--at-most", type=whole(1), help="systematic schedules per scenario")
    parser.add_argument("--schedule", type=int, help="try only this one")
    parser.add_argument(
        "--planted", action=argparse.BooleanOptionalAction, default=True, help="plant mistakes"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides which schedules are drawn")
    args = parser.parse_args(argv)
    rows = []
    for scenario in args.scenarios or SCENARIOS:
        if args.schedule is not None:
            try_one(scenario, Schedule(args.schedule, len(SCENARIOS[scenario].actors)))
            continue
        try:
            number = try_all(
                scenario, args.preemptions, args.drawn, at_most=args.at_most, seed=args.seed
            )
            rows.append([scenario, number, "kept"])
        except Broken as e:
            rows.append([scenario, None, str(e)])
    print("\n".join(table(["scenario", "schedules", "laws"], rows)))
    planted = []
    if args.planted:
        planted = [[mistake, plant(mistake) or "NOT CAUGHT"] for mistake in tqdm(MISTAKES)]
        print("\n".join(table(["planted mistake", "first broken law"], planted)))
    is_kept = all(row[-1] == "kept" for row in rows)
    return int(not is_kept or any(row[-1] == "NOT CAUGHT" for row in planted))


if __name__ == "__main__":
    run_main(main)
