"""
Small runs on a CPU that show what forks, replays and proofs are good for. docs/exactness.md shows
their output.

    python -m dev.demo_forks steps        # every step is a checkpoint: steps that were not saved, bit for bit
    python -m dev.demo_forks forgeries    # forged runs are found, honest runs are not
    python -m dev.demo_forks branch       # a fork differs from its parent from the predicted step on
    python -m dev.demo_forks all

Everything goes to a temporary folder, which is deleted at the end. Duration on two idle cores: five
to ten minutes each, all three 20 minutes; with --tiny a minute. `steps` needs 1 GB of disk.

A forger controls the whole run directory until the receipt is published. So each forged run is
trained on from its false stretch, as if nothing had happened, and its log, settings, cursors and seals
agree with its receipt:

    step     0 ------- 4 ------- 8 ------- 12 ------- 16
    honest   ==========================================     what the receipt claims
    forged   ====================xx####################     a false update; then a consistent run

Only the stretch from 4 to 8 is false there. A replay of it must fail, and replays of the others must
not.
"""

import contextlib
import hashlib
import io
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from dev.measure import print_setup
from nanochat.checkpoint import find_checkpoint
from nanochat.cli import Parser, run_main
from nanochat.common import begin_launch, hash_json, read_json, table, write_json
from nanochat.dataloader import DataLoader, MicroBatch
from nanochat.optim import MuonAdamW
from nanochat.run_reader import RunReader
from nanochat.schedule import Schedule
from scripts import base_train, compare_runs, inspect_data, receipt, replay, verify
from tests import training
from tests.toy import digest_of_row

MODEL: dict[str, Any] = {**training.SMALL, "device_batch_size": 2, "leaves": 4}
LENGTH = 16  # steps of a run that is forged
EVERY = 4  # steps between its saves
NO_CHANGE: dict[str, Any] = {}  # what a null fork names
FASTER = {"matrix_lr": 0.05}


@dataclass(frozen=True)
class Size:
    """How many cases each demonstration has."""

    steps: int  # of the run that saves four times
    questions: int
    forged: int
    honest: int
    parent: int  # steps of the run that is forked
    forks: int  # of each kind


FULL = Size(steps=1000, questions=50, forged=30, honest=30, parent=200, forks=10)
TINY = Size(steps=16, questions=3, forged=5, honest=3, parent=16, forks=1)


def disk_use(tag: str) -> str:
    """The bytes of a run directory, in MB."""
    total = sum(path.stat().st_size for path in training.run_dir(tag).rglob("*") if path.is_file())
    return f"{total / 1e6:,.1f} MB"


def weights(tag: str) -> str:
    """A hash of the final weights of a run."""
    path = training.final(tag) / "model" / "pytorch_model.bin"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Print nothing meanwhile."""
    unread = io.StringIO()
    with contextlib.redirect_stdout(unread), contextlib.redirect_stderr(unread):
        yield


# ---- every step is a checkpoint ------------------------------------------------------------------


def ask(run: RunReader, step: int) -> str:
    """Replay a step of a run, and compare it with the checkpoint of its twin: '' if every bit is
    equal, otherwise the first part that differs."""
    process = replay.Process(0, 1, torch.device("cpu"))
    begin = replay.nearest_save(run, step)
    saved = find_checkpoint(f"twin@{step}")
    with replay.replayed(run, begin, step, process) as state:
        snapshot = state.collect()
    assert snapshot is not None
    if snapshot.cursors != saved.cursors:
        return "the cursors"
    for name in (replay.MODEL_NAME, replay.OPTIMIZER_NAME):
        place = replay.first_difference(snapshot.states[name], saved.load(name))
        if place is not None:
            return f"{name}: {place}"
    return ""


def every_step(size: Size, seed: int) -> bool:
    """Train a run that saves four times and its twin that saves at every step; steps that only the
    twin saved are replayed."""
    settings: dict[str, Any] = {"num_iterations": size.steps}
    training.finish(model_tag="run", save_every=size.steps // 4, **settings)
    training.finish(model_tag="twin", save_every=1, **settings)
    unsaved = [step for step in range(1, size.steps) if step % (size.steps // 4)]
    begin_launch()
    asked = random.Random(seed).sample(unsaved, size.questions)
    run = RunReader(training.run_dir("run"))
    seconds, differing = [], []
    for step in asked:
        began = time.perf_counter()
        with silent():
            problem = ask(run, step)
        seconds.append(time.perf_counter() - began)
        if problem:
            differing.append(f"step {step}: {problem} differs")
    saves = [len(training.checkpoints(tag)) for tag in ("run", "twin")]
    sizes = [disk_use(tag) for tag in ("run", "twin")]
    rows = list(zip(("four saves", "a save at every step"), saves, sizes))
    print(*table(("run", "checkpoints", "disk"), rows), sep="\n")
    equal = size.questions - len(differing)
    print(
        f"steps that were not saved, replayed: equal in every bit of weights, optimizer and cursors: {equal} of "
        f"{size.questions}"
    )
    seconds.sort()
    middle = seconds[len(seconds) // 2]
    print(f"time per question: median {middle:.1f} s, longest {seconds[-1]:.1f} s")
    print(*differing, sep="\n", end="\n" * bool(differing))
    return not differing


# ---- forgeries -----------------------------------------------------------------------------------

Batches = dict[int, list[MicroBatch]]  # {step: its micro-batches}
NEXT = DataLoader.__next__
STEP = MuonAdamW.step
RATE = Schedule.lr


class Forgery(NamedTuple):
    """A forged step of a run, in the stretch from `first` to `last`."""

    step: int
    first: int
    last: int
    batches: Batches  # of the honest run


def recorded(batches: Batches) -> Any:
    """Keep the micro-batches of a run."""

    def following(self: DataLoader) -> MicroBatch:
        step = self.step
        batch = NEXT(self)
        copied = replace(batch, inputs=batch.inputs.clone(), targets=batch.targets.clone())
        batches.setdefault(step, []).append(copied)
        return batch

    return mock.patch.object(DataLoader, "__next__", following)


def hidden_document(forgery: Forgery) -> Any:
    """Train on another text in the first row of the step. The loader, which writes digests and
    cursors, does not see it."""
    shown = iter(range(LENGTH))

    def following(self: DataLoader) -> MicroBatch:
        step = self.step
        batch = NEXT(self)
        if step == forgery.step and next(shown) == 0:
            inputs, targets = hidden_row(batch)
            batch.inputs[0] = inputs
            batch.targets[0] = targets
        return batch

    return mock.patch.object(DataLoader, "__next__", following)


def hidden_row(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs (T,), targets (T,)) of the hidden text: the first row's tokens in another order,
    after BOS."""
    inputs, targets = batch.inputs[0], batch.targets[0]
    tokens = torch.cat([inputs[:1], inputs[1:].flip(0), targets[-1:]])
    live = torch.where(targets >= 0, tokens[1:], targets)
    return tokens[:-1].clone(), live


def swapped_stretch(forgery: Forgery) -> Any:
    """Train on the steps of the stretch in reverse order."""
    rest: list[MicroBatch] = []

    def following(self: DataLoader) -> MicroBatch:
        step = self.step
        batch = NEXT(self)
        if forgery.first <= step < forgery.last:
            if not rest:
                rest.extend(forgery.batches[forgery.first + forgery.last - 1 - step])
            return rest.pop(0)
        return batch

    return mock.patch.object(DataLoader, "__next__", following)


def skipped_step(forgery: Forgery) -> Any:
    """Leave out the update of the step."""
    calls = iter(range(LENGTH))

    def update(self: MuonAdamW, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == forgery.step:
            kwargs["limit"] = -1.0  # so that nothing is applied; the log does not see it
        return STEP(self, *args, **kwargs)

    return mock.patch.object(MuonAdamW, "step", update)


def flipped_bit(forgery: Forgery) -> Any:
    """Flip the lowest bit of one weight after the last update of the stretch."""
    calls = iter(range(LENGTH))

    def update(self: MuonAdamW, *args: Any, **kwargs: Any) -> Any:
        result = STEP(self, *args, **kwargs)
        if next(calls) == forgery.last - 1:
            weight = self.param_groups[0]["params"][0]
            weight.data.view(torch.uint8).view(-1)[0] ^= 1
        return result

    return mock.patch.object(MuonAdamW, "step", update)


def another_rate(forgery: Forgery) -> Any:
    """Double the learning rates of the step."""

    def rate(self: Schedule, step: int) -> float:
        return RATE(self, step) * (2 if step == forgery.step else 1)

    return mock.patch.object(Schedule, "lr", rate)


# what the forger's log says about the false stretch
AS_TRAINED = "all as trained"
DIGESTS = "the claimed digests"
EVERYTHING = "the claimed digests and losses"
DECLARED = "all as trained, but not in the receipt"

KINDS: dict[str, tuple[Callable[[Forgery], Any], tuple[str, ...]]] = {
    "a hidden document": (hidden_document, (AS_TRAINED, DIGESTS, EVERYTHING)),
    "a skipped step": (skipped_step, (DIGESTS, EVERYTHING)),
    "one flipped bit of one weight": (flipped_bit, (DIGESTS,)),
    "another rate for one step": (another_rate, (DIGESTS, EVERYTHING, DECLARED)),
    "a swapped stretch": (swapped_stretch, (AS_TRAINED, DIGESTS, EVERYTHING)),
}


def edit_log(tag: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Rewrite the lines of all steps of a log."""
    path = training.log_file(tag)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps(r if "event" in r else change(r)) for r in records]
    path.write_text("".join(line + "\n" for line in lines))


def trained_digests(kind: str, forgery: Forgery, claimed: Sequence[str]) -> dict[int, str]:
    """{step: digest of the rows that the false stretch was trained on}."""
    if kind == "a swapped stretch":
        stretch = range(forgery.first, forgery.last)
        return {step: claimed[stretch[-1 - i]] for i, step in enumerate(stretch)}
    batch = forgery.batches[forgery.step][0]
    sums = int(claimed[forgery.step], 16)
    for sign, (inputs, targets) in (
        (-1, (batch.inputs[0], batch.targets[0])),
        (1, hidden_row(batch)),
    ):
        tokens = [*inputs.tolist(), int(targets[-1])]
        sums += sign * digest_of_row(0, tokens, (targets >= 0).int().tolist())
    return {forgery.step: f"{sums % 2**64:016x}"}


def write_story(tag: str, kind: str, story: str, forgery: Forgery) -> None:
    """Make the log of a forged run tell its story."""
    honest = training.steps("honest")
    claimed = training.digests("honest")
    trained = trained_digests(kind, forgery, claimed) if story == AS_TRAINED else {}

    def change(record: dict[str, Any]) -> dict[str, Any]:
        step = record["step"]
        if story == EVERYTHING and forgery.first <= step < forgery.last:
            return honest[step]
        return {**record, "digest": trained.get(step, record["digest"])}

    edit_log(tag, change)


def publish(tag: str) -> Path:
    """Write the receipt of a run."""
    path = training.run_dir(tag).parent.parent / f"{tag}.json"
    receipt.main([tag, f"--out={path}"])
    return path


def replay_here(words: Sequence[str], processes: int = 1) -> None:
    """`any_step.replay` without the time that it takes to import everything."""
    if processes == 1:
        replay.main(words)
        return
    group = training.launch(replay.main, [[*words]] * processes, [{}] * processes)
    if set(group.wait()) != {0}:
        raise ValueError(group.text())


class Verdict(NamedTuple):
    """What scripts.verify says about a receipt."""

    good: bool
    text: str

    @property
    def check(self) -> str:
        """The check that found a forgery."""
        signs = {
            "of the receipt": "settings",
            "in the receipt": "settings",
            "other rows": "digest",
            "other bits": "loss",
            "does not follow": "bits",
            "do not follow": "cursors",
        }
        return next((name for sign, name in signs.items() if sign in self.text), "not found")


def prove(path: Path, tag: str, asked: str, processes: int = 1) -> Verdict:
    """Verify the weights of a run against its receipt."""
    words = [str(path), f"--run={training.run_dir(tag)}", f"--replay={asked}"]
    out = io.StringIO()
    with mock.patch.object(verify, "replay", replay_here), contextlib.redirect_stdout(out):
        code = verify.main([*words, f"--processes={processes}"])
    return Verdict(code == 0, out.getvalue())


def forge(kind: str, story: str, seed: int, rng: random.Random) -> tuple[Verdict, Verdict]:
    """Train a forged run. What a replay of its false stretch says, and a replay of another one."""
    first = EVERY * rng.randrange(LENGTH // EVERY)
    last = first + EVERY
    step = min(
        rng.randrange(first, last), LENGTH - 2
    )  # no run is declared to end after its last step
    forgery = Forgery(step, first, last, {})
    settings = {"seed": seed, "num_iterations": LENGTH, "save_every": EVERY}
    for tag in ("honest", "forged"):
        shutil.rmtree(training.run_dir(tag), ignore_errors=True)
    if story == DECLARED:
        # the first of two launches ends with its step of warmdown; the receipt admits only one
        settings["warmdown_steps"] = 1
        training.succeed(model_tag="forged", **{**settings, "num_iterations": forgery.step + 1})
        training.succeed(model_tag="forged", **settings)
        path = publish("forged")
        value = read_json(path, dict)
        del value["checksum"]
        value["horizons"] = [[0, LENGTH]]
        write_json(path, {**value, "checksum": hash_json(value)})
    else:
        with recorded(forgery.batches):
            training.succeed(model_tag="honest", **settings)
        with KINDS[kind][0](forgery):
            training.succeed(model_tag="forged", **settings)
        write_story("forged", kind, story, forgery)
        path = publish("forged")
    other = (first + EVERY) % LENGTH
    false_stretch = prove(path, "forged", f"{first}:{last}")
    true_stretch = prove(path, "forged", f"{other}:{other + EVERY}")
    return false_stretch, true_stretch


def honest_run(number: int, processes: int) -> Verdict:
    """Train an honest run of another seed and size, and replay all of it."""
    T = (64, 96)[number // 3 % 2]
    tag = f"honest-{number}"
    training.succeed(
        model_tag=tag,
        seed=100 + number,
        depth=1 + number // 6 % 2,
        max_seq_len=T,
        total_batch_size=8 * T,
        num_iterations=LENGTH,
        save_every=EVERY,
    )
    verdict = prove(publish(tag), tag, "100%", processes)
    shutil.rmtree(training.run_dir(tag))
    return verdict


def forgeries(size: Size, seed: int) -> bool:
    """Forge runs in five ways, and check that a replay of the false stretch finds each, and that
    no honest run is rejected."""
    rng = random.Random(seed)
    found: dict[str, Counter[str]] = {}
    missed, rejected = [], []
    for number in range(size.forged):
        kind = list(KINDS)[number % len(KINDS)]
        stories = KINDS[kind][1]
        story = stories[number // len(KINDS) % len(stories)]
        with silent():
            false_stretch, true_stretch = forge(kind, story, number, rng)
        if false_stretch.good:
            missed.append(f"run {number}: {kind}; its log has {story}")
        elif story != DECLARED and not true_stretch.good:
            rejected.append(f"run {number}: its honest stretch: {true_stretch.text}")
        found.setdefault(kind, Counter())[false_stretch.check] += 1
    rows = []
    for kind, checks in found.items():
        caught = ", ".join(f"{check} {number}" for check, number in sorted(checks.items()))
        rows.append((kind, checks.total(), checks.total() - checks["not found"], caught))
    print(*table(("forgery", "runs", "found", "by"), rows), sep="\n")
    for number in range(size.honest):
        processes = (1, 2, 4)[number % 3]
        with silent():
            verdict = honest_run(number, processes)
        if not verdict.good:
            rejected.append(f"honest run {number} on {processes}: {verdict.text}")
    print(
        f"forged runs found when their stretch is drawn: {size.forged - len(missed)} of {size.forged}"
    )
    print(
        f"honest runs rejected, replayed on 1, 2 and 4 processes: {len(rejected)} of {size.honest}"
    )
    for line in (*missed, *rejected):
        print(line)
    return not missed and not rejected


# ---- a branch at step S --------------------------------------------------------------------------


def fork_flags(tag: str, step: int, changed: dict[str, Any]) -> list[str]:
    """The command line of a fork, which names nothing but what it changes."""
    return training.as_flags({"fork_from": f"parent@{step}", "model_tag": tag, **changed})


def fork(tag: str, step: int, **changed: Any) -> None:
    """Train a fork of the parent, to the parent's end."""
    with silent():
        assert base_train.main(fork_flags(tag, step, changed)) == 0


def is_as_expected(tag: str) -> bool:
    """Whether `scripts.compare_runs` says that a fork parts from the parent where it must."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        compare_runs.main(["parent", tag])
    return any(line.startswith("as expected: ") for line in out.getvalue().splitlines())


def first_use(document: str, step: int) -> int:
    """The first step from `step` on that reads a document, as `scripts.inspect_data find` says."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        inspect_data.main(["find", "parent", f"--document={document}", "--json"])
    uses = [
        use["step"] for of_epoch in json.loads(out.getvalue())["passes"] for use in of_epoch["uses"]
    ]
    return min(used for used in uses if used >= step)


def first_difference(ours: Sequence[object], theirs: Sequence[object], step: int) -> int | None:
    """The first step from `step` on whose values differ."""
    pairs = zip(ours, theirs, strict=True)
    return next((step + i for i, (a, b) in enumerate(pairs) if a != b), None)


def parting(tag: str, step: int) -> tuple[int | None, int | None]:
    """The first steps with (another digest, another loss) than the parent's."""
    digests = first_difference(training.digests(tag, step), training.digests("parent")[step:], step)
    losses = first_difference(training.losses(tag), training.losses("parent")[step:], step)
    return digests, losses


def is_null(tag: str, step: int) -> bool:
    """Whether a fork equals its parent in every digest, loss and bit."""
    return parting(tag, step) == (None, None) and weights(tag) == weights("parent")


def leave_out(base: Path, tag: str, step: int, rng: random.Random) -> bool:
    """Fork without a document of a later step: the digest first differs at the first step that
    reads the document."""
    later = rng.randrange(step + 1, training.events("completed", "parent")[-1]["step"])
    places = [place for row in training.read_rows("parent", later) for place in row["documents"]]
    longest = max(places, key=lambda place: place["tokens"])
    document = f"{longest['file']}:{longest['document']}"
    (base / "list.txt").write_text(document + "\n")
    predicted = first_use(document, step)
    fork(tag, step, without_documents=base / "list.txt")
    return parting(tag, step)[0] == predicted and is_as_expected(tag)


def change_rate(tag: str, step: int) -> bool:
    """Fork with another rate: it acts on the update of the first step, so on the loss of the next
    one."""
    fork(tag, step, **FASTER)
    return parting(tag, step) == (None, step + 1) and is_as_expected(tag)


def kill_fork(step: int) -> str:
    """A fork on 2 processes that is killed and resumes on 4. Returns the hash of its weights."""
    words = fork_flags("killed", step, {**NO_CHANGE, "save_every": 2})
    hook = partial(training.die_after_step, step + 3)
    training.launch(base_train.main, [words] * 2, [{}] * 2, hook).wait_for_death()
    group = training.launch(base_train.main, [words] * 4, [{}] * 4)
    assert group.wait() == [0] * 4, group.text()
    return weights("killed")


def branch(size: Size, seed: int, base: Path) -> bool:
    """Fork a run at random steps: without a change, without a document, with another rate."""
    rng = random.Random(seed)
    training.finish(model_tag="parent", num_iterations=size.parent, save_every=size.parent // 4)
    unsaved = [step for step in range(1, size.parent - 8) if step % (size.parent // 4)]
    chosen = rng.sample(unsaved, size.forks + 1)
    good: Counter[str] = Counter()
    for number, step in enumerate(chosen[1:]):
        fork(f"null-{number}", step, **NO_CHANGE)
        good["null"] += is_null(f"null-{number}", step)
        good["document"] += leave_out(base, f"without-{number}", step, rng)
        good["rate"] += change_rate(f"rate-{number}", step)
    names = {
        "null": ("nothing", "none: every digest, loss and bit is equal"),
        "document": ("one document", "the step that reads it: another digest"),
        "rate": ("one rate", "the step after the fork: another loss"),
    }
    rows = [(*words, f"{good[name]} of {size.forks}") for name, words in names.items()]
    print(*table(("changed", "first step that differs, predicted", "as predicted"), rows), sep="\n")
    undisturbed, killed = weights("parent"), kill_fork(chosen[0])
    print(
        f"a null fork from step {chosen[0]}, which was not saved, on 2 processes, killed, resumed on 4: weights "
        f"{killed}"
    )
    print(f"its parent, on 1 process, never killed: weights {undisturbed}")
    return killed == undisturbed and all(good[name] == size.forks for name in names)


# ---- the command ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstrations; 1 if a result is not the expected one."""
    parser = Parser(description=__doc__)
    parser.add_argument("part", choices=("steps", "forgeries", "branch", "all"))
    parser.add_argument("--seed", type=int, default=0, help="decides which steps and stretches")
    parser.add_argument("--tiny", action="store_true", help="a few cases each, as in the test")
    args = parser.parse_args(argv)
    size = TINY if args.tiny else FULL
    print_setup()
    good = True
    for part in ("steps", "forgeries", "branch"):
        if args.part not in (part, "all"):
            continue
        began = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="demo-") as folder,
            training.workplace(Path(folder), **MODEL) as base,
        ):
            if part == "steps":
                result = every_step(size, args.seed)
            elif part == "forgeries":
                result = forgeries(size, args.seed)
            else:
                result = branch(size, args.seed, base)
        seconds = time.monotonic() - began
        print(
            f"{part}: {'as expected' if result else 'NOT as expected'}; {seconds:.0f} s", flush=True
        )
        good &= result
    return 0 if good else 1


if __name__ == "__main__":
    run_main(main)
