"""
Power loss at any instant of a run's life: thousands of states of the disk, built from a record.

    python -m dev.power_loss                   # 10,000 states, 100 of them lived on to the end; planted mistakes
    python -m dev.power_loss --states=500 --resumed=5 --no-planted

    live     prepare text -> train -> stop -> resume -> extend -> fork -> mirror -> tokens -> export     (`STAGES`)
      |        every change below the base directory is recorded (tests/power.py)
    lose     after any of them, what was not synced is lost: all, a part, the names, the bytes
      |
    check    every checkpoint that was reported as saved or mirrored, or a newer one, is good; the log has the steps
      |      before it, with their digests; commands that read the run end without a bug
    live on  the same commands lead to the same weights, tokens and exported files

A planted mistake takes the syncs of one function out of the record, as if the program had none
there. Some state must then break a law; a sync for which none does is not needed.

Seals are the second line of defence, for a disk that says "synced" and is not, or flips a bit. There
all syncs are taken out, a bit is flipped in every other state, and what is left may be old or lost.
But what the program takes for good must be what it wrote; without one of its checksums, it is not.

Cost: one CPU core, and 20 MB below $TMPDIR at a time, best in memory. Duration: about an hour; with 500 states and
without planted mistakes a minute.
"""

import argparse
import contextlib
import errno
import io
import json
import os
import random
import re
import shutil
import signal
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from tqdm import tqdm

from nanochat import mirror_owner, run_dir
from nanochat.checkpoint import (
    STATE_NAME,
    first_good,
    list_checkpoints,
    load_checkpoint,
    read_seal,
)
from nanochat.cli import Parser, run_main, whole
from nanochat.common import hash_file, table
from nanochat.mirror_fetch import Fetch
from nanochat.mirror_marks import piece_of, read_mark, read_marks
from nanochat.mirror_store import open_store
from nanochat.optim import MuonAdamW
from nanochat.run_dir import RowLosses
from nanochat.run_journal import Journal
from nanochat.run_state import read_mirror_state
from nanochat.tokenizer import RustBPETokenizer
from scripts import base_train, export, page, status, tok_shards, verify
from tests import training
from tests.power import (
    Change,
    Recorder,
    State,
    recording,
    reported,
    states,
    too_late,
    whole_files,
    without,
)

SETTINGS: dict[str, Any] = {
    **training.SMALL,
    "depth": 1,
    "device_batch_size": 8,
    "buffer_size": 8,
    "warmup_steps": 2,
    "warmdown_ratio": 0,
    "save_every": 2,
    "keep_last_k": 1,
    "save_at": "4*",
    "eval_every": 4,
    "eval_tokens": training.T * 8,
}
RUNS = ("run", "child", "copied", "mirrored")
STOPS_AT = 5  # the step whose update a signal interrupts
TOKENS = ["--num-workers=1", "--max-length=64", "--overlap-size=2"]


# ---- a life --------------------------------------------------------------------------------------


def train(num_iterations: int) -> None:
    """Begin the run, or resume it."""
    data = Path(os.environ["NANOCHAT_BASE_DIR"]) / "own"
    training.succeed(num_iterations=num_iterations, data_path=data)


def train_and_stop() -> None:
    """Begin the run; a signal stops it."""
    step, calls = MuonAdamW.step, iter(range(1, STOPS_AT + 1))

    def watched(self: MuonAdamW, *args: Any, **kwargs: Any) -> Any:
        if next(calls, None) == STOPS_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args, **kwargs)

    with mock.patch.object(MuonAdamW, "step", watched):
        train(8)


def fork(tag: str = "child") -> None:
    """A fork of the run's step 4, with another rate."""
    named = {"fork_from": "run@4", "model_tag": tag, "num_iterations": 6, "matrix_lr": 0.01}
    call(base_train.main, training.as_flags(named))


def fork_without_links() -> None:
    """A fork where the file system has no hard links."""
    with mock.patch.object(os, "link", side_effect=OSError(errno.EPERM, "no links")):
        fork("copied")


def mirror() -> None:
    """A run that is copied to a second place."""
    base = Path(os.environ["NANOCHAT_BASE_DIR"])
    place = base / "mirror"
    named = {"model_tag": "mirrored", "mirror_to": place, "num_iterations": 6, "save_at": None}
    # power loss may leave the mark of an owner without a sign of life
    with mock.patch.multiple(mirror_owner, SILENCE_S=0.5, POLL_S=0.02):
        training.succeed(data_path=base / "own", **named)


def mirrored_step(base: Path) -> int:
    """The newest step of which the mirror holds all pieces; 0 if there is none. ValueError if its
    newest mark is damaged, or lacks a piece."""
    if not (base / "mirror").is_dir():
        return 0
    store = open_store(str(base / "mirror"))
    for mark in read_marks(store).values():
        for piece in mark.pieces:
            content = b"".join(store.parts(f"pieces/{piece.blake2b}"))
            assert piece_of(content) == piece, f"a piece of mark {mark.step} is damaged"
        return max(0, mark.step)  # -1: the start of the run
    return 0


def knows_its_mirror(base: Path) -> bool:
    """Whether a launch would take the mirror for that of its run directory."""
    run = base / "runs" / "mirrored"
    if not (run_dir.is_run_dir(run) and (base / "mirror").is_dir()):
        return True
    newest = next(iter(read_marks(open_store(str(base / "mirror"))).values()), None)
    state = read_mirror_state(run)
    return newest is None or (state is not None and state["run"] == newest.run)


def make_tokens(seed: int = 1) -> None:
    """Token files of text that changes with the seed."""
    base = Path(os.environ["NANOCHAT_BASE_DIR"])
    for name in ("0.parquet", "1.parquet"):
        training.write_shard(base / "raw" / name, training.texts(40, seed=seed))
    places = [f"--input-dir={base / 'raw'}", f"--output-dir={base / 'tokens'}"]
    call(tok_shards.main, [*places, f"--tokenizer={base / 'tokenizer'}", *TOKENS])


def make_tokenizer(seed: int = 1) -> None:
    """A tokenizer of text that changes with the seed, over the one before it."""
    texts = training.texts(40, seed=seed)
    made = RustBPETokenizer.train_from_iterator(iter(texts), training.VOCAB_SIZE)
    made.save(Path(os.environ["NANOCHAT_BASE_DIR"]) / "another", force=True)


def export_run() -> None:
    """The run as nanochat's own checkpoint, unless it has been exported."""
    out = Path(os.environ["NANOCHAT_BASE_DIR"]) / "exported"
    if not out.exists():
        call(export.main, ["run", str(out), "--to=nanochat"])


def call(
    main: Callable[[list[str]], int | None], argv: list[str], codes: Sequence[int] = (0,)
) -> None:
    """Run a command in this process. AssertionError if it ends with another exit code, or by a
    bug."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            run_main(lambda: main(argv))
        except SystemExit as e:
            assert int(e.code or 0) in codes, f"{' '.join(argv)}: {out.getvalue()}"
    assert "Traceback" not in out.getvalue(), out.getvalue()


STAGES: dict[str, Callable[[], None]] = {
    "train and stop": train_and_stop,
    "resume": lambda: train(8),
    "extend": lambda: train(10),
    "fork": fork,
    "fork without links": fork_without_links,
    "mirror": mirror,
    "tokens": make_tokens,
    "tokens again": lambda: make_tokens(2),
    "tokenizer": make_tokenizer,
    "tokenizer again": lambda: make_tokenizer(2),
    "export": export_run,
}


class Life(NamedTuple):
    """What was recorded of a life, and what it led to."""

    base: Path
    recorder: Recorder
    whole: dict[int, bytes]  # see `whole_files`
    lines: dict[str, dict[str, int]]  # {stage: {run: lines of its log when the command had ended}}
    made: dict[str, set[str]]  # {stage: files that it made for good}
    pairs: set[tuple[str, str]]  # see `pairs_in`
    digests: dict[str, dict[int, str]]  # of each run's steps
    row_losses: dict[str, dict[int, Any]]  # {run: {step: (nats, live)}}, see `RowLosses`
    results: dict[str, str]  # {file: hash} of what must be the same in the end


@contextlib.contextmanager
def lived(base: Path) -> Iterator[Life]:
    """Live once in a base directory. Inside the block, states may be written there."""
    event = Journal.event

    def watched(self: Journal, name: str, step: int, **record: Any) -> None:
        event(self, name, step, **record)
        if name == "saved":
            path = Path(str(self.sinks[0].run.run_dir)) / "checkpoints" / record["checkpoint"]  # type: ignore[attr-defined]
            recorder.report(f"saved {path.parents[1].name} {read_seal(path)['step']}")
        if name == "mirrored":
            number = re.search(r"\d+", record["checkpoint"])
            recorder.report(f"mirrored {number[0] if number else step}")

    lines: dict[str, dict[str, int]] = {}
    made: dict[str, set[str]] = {}
    pairs: set[tuple[str, str]] = set()
    with training.workplace(base, **SETTINGS):
        (base / "own").mkdir()
        write_own_text(base / "own")
        with recording(base) as recorder, mock.patch.object(Journal, "event", watched):
            for name, stage in STAGES.items():
                recorder.report(f"begin {name}")
                stage()
                recorder.report(f"end {name}")
                lines[name] = {tag: len(log_of(base, tag)) for tag in RUNS}
                made[name] = {str(path.relative_to(base)) for path in kept_files(base, name)}
                pairs |= pairs_in(base)
        digests = {
            tag: {step: line["digest"] for step, line in training.steps(tag).items()}
            for tag in RUNS
        }
        losses = {
            tag: {step: row_losses(base, tag).read(step) for step in digests[tag]} for tag in RUNS
        }
        whole = whole_files(recorder.changes)
        yield Life(base, recorder, whole, lines, made, pairs, digests, losses, results(base))


def log_of(base: Path, tag: str) -> list[dict[str, Any]]:
    """The records of a run's log."""
    return list(run_dir.iter_log(base / "runs" / tag / "logs" / "train.jsonl"))


def row_losses(base: Path, tag: str) -> RowLosses:
    """The losses of a run's rows."""
    return RowLosses(base / "runs" / tag, num_rows=training.STEP // training.T, T=training.T)


def kept_files(base: Path, stage: str) -> Iterator[Path]:
    """The files that a stage has made and that no later one removes: cursors of saves, tokens, and
    the export."""
    yield from base.glob("runs/*/logs/cursors/*")
    for name in ("tokens", "exported"):
        if stage != "tokens":  # they are made again
            yield from (path for path in (base / name).rglob("*") if path.is_file())


def pairs_in(base: Path) -> set[tuple[str, str]]:
    """The hashes of files that must be of the same time: an .idx and its .bin, a tokenizer.json and
    its ranks. One without the other is no pair: whoever reads it says so, and the same command makes
    both again."""
    found = [(path, path.with_suffix(".bin")) for path in (base / "tokens").rglob("*.idx")]
    described = base / "another" / "tokenizer.json"
    if described.exists():
        found.append((described, described.with_name("ranks.tiktoken")))
    return {(hash_file(first), hash_file(second)) for first, second in found if second.exists()}


def write_own_text(folder: Path) -> None:
    """The text of the run, which has to be prepared."""
    for name, seed in (("a.jsonl", 1), ("b.jsonl", 2), ("c.jsonl", 3)):
        lines = [json.dumps({"text": text}) for text in training.texts(60, seed=seed)]
        (folder / name).write_text("\n".join(lines))


def results(base: Path) -> dict[str, str]:
    """{file: hash} of the weights, optimizer states and cursors of both runs, the tokens and the
    export."""
    folders = [base / "runs" / tag / "checkpoints" / "final" for tag in RUNS]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files = [
        path
        for path in files
        if path.name in ("pytorch_model.bin", "optimizer.bin", "lanes.json.gz")
    ]
    for name in ("tokens", "exported"):
        files += [
            path for path in (base / name).rglob("*") if path.suffix in (".bin", ".idx", ".pt")
        ]
    return {str(path.relative_to(base)): hash_file(path) for path in sorted(files)}


# ---- what must hold ------------------------------------------------------------------------------


class Found(NamedTuple):
    """A state that breaks a law."""

    state: State
    problem: str

    def text(self, changes: Sequence[Change]) -> str:
        """Where the power was lost, what was lost, and the law."""
        where = "at the start"
        if self.state.after:
            last = changes[self.state.after - 1]
            where = f"after change {self.state.after} ({last.kind} {last.what})"
        return f"{where}, {self.state.how} lost: {self.problem}"


def put(state: State, life: Life) -> None:
    """Make the base directory what power loss left of it."""
    shutil.rmtree(life.base)
    life.base.mkdir()
    state.write(life.base)


def check(state: State, life: Life, said: Sequence[str], *, commands: bool) -> None:
    """AssertionError, or any other exception, if a law is broken in the base directory. `said`:
    what had been reported. `commands`: also those that read the runs."""
    for name, id in state.ids.items():
        is_temporary = any(part.startswith(".") for part in Path(name).parts)
        if id in life.whole and not is_temporary:
            assert state.files[name] == life.whole[id], f"{name}: half-written under its final name"
    for tag, digests in life.digests.items():
        run = life.base / "runs" / tag
        saved = newest(said, f"saved {tag}")
        for path in run_dir.checkpoint_folders(run).values():
            load_checkpoint(path)  # none is half-written, or half-deleted
        good = first_good(list_checkpoints(run))
        step = good.step if good else 0
        assert step >= saved, f"{tag}: step {saved} was reported as saved, and step {step} is left"
        check_log(run, step, digests)
    copied = newest(said, "mirrored")
    assert mirrored_step(life.base) >= copied, f"step {copied} was reported as mirrored"
    assert knows_its_mirror(life.base), "a run does not know that its mirror is its own"
    assert pairs_in(life.base) <= life.pairs, "two files of a pair are of different times"
    for stage, lines in life.lines.items():
        if f"end {stage}" not in said:
            break
        for tag, number in lines.items():
            assert len(log_of(life.base, tag)) >= number, f"{tag}: the log lost lines of {stage}"
        lost = life.made[stage] - state.files.keys()
        assert not lost, f"{stage}: made and lost {sorted(lost)}"
    if commands:
        for tag in life.digests:
            call(status.main, [tag], codes=(0, 1, 2, 3, 4))
            call(verify.main, [tag], codes=(0, 1))


def newest(said: Sequence[str], what: str) -> int:
    """The newest step of which something was said; 0 if it never was."""
    return max((int(line.split()[-1]) for line in said if line.startswith(f"{what} ")), default=0)


def check_log(run: Path, step: int, digests: dict[int, str]) -> None:
    """The log has the steps before a good checkpoint, with their digests and losses of rows."""
    path = run / "logs" / "train.jsonl"
    lines = {
        line["step"]: line["digest"] for line in run_dir.iter_log(path) if run_dir.is_step(line)
    }
    wrong = {at for at, digest in lines.items() if digests[at] != digest}
    assert not wrong, f"{run.name}: the log has other digests for steps {sorted(wrong)}"
    first = min(digests)
    missing = set(range(first, step)) - lines.keys()
    assert not missing, f"{run.name}: the log lacks steps {sorted(missing)} before step {step}"
    rows = row_losses(run.parents[1], run.name)
    for at in range(first, step):
        _, live = rows.read(at)  # it has a checksum
        assert live.any(), f"{run.name}: the losses of the rows of step {at}"
    for cursors in run_dir.cursor_files(run).values() if (run / "logs").is_dir() else ():
        run_dir.read_cursors(cursors)


def live_on(life: Life, said: Sequence[str]) -> None:
    """The runs have pages. The command that power loss interrupted, and those after it, lead to the
    same results."""
    for tag in life.digests:
        page_file = life.base / "page.html"
        call(page.main, [tag, f"--out={page_file}"], codes=(0, 1))
        page_file.unlink(missing_ok=True)
    begun = [what for what in said if what.startswith("begin ")]
    names = list(STAGES)
    current = max(0, len(begun) - 1)
    for name in names[current:]:
        # the signal came before; the command is the same
        STAGES["resume" if name == "train and stop" else name]()
    assert results(life.base) == life.results, "other results"


# ---- a disk that lies ----------------------------------------------------------------------------


def lying_states(life: Life, rng: random.Random, number: int, part: str) -> Iterator[State]:
    """States of a disk that ignores every sync; in every other one, a bit is flipped of a file whose
    path contains `part`."""
    changes = [change for change in life.recorder.changes if change.kind != "sync"]
    for at, state in enumerate(states(life.recorder, rng, number, changes=changes)):
        names = [name for name, content in state.files.items() if part in name and content]
        yield flipped(state, names, rng) if at % 2 and names else state


def flipped(state: State, names: Sequence[str], rng: random.Random) -> State:
    """A state with one bit of one of these files flipped. Each folder is as likely as another."""
    folders: dict[str, list[str]] = {}
    for name in sorted(names):
        folders.setdefault(os.path.dirname(name), []).append(name)
    name = rng.choice(folders[rng.choice([*folders])])
    content = bytearray(state.files[name])
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    files = {**state.files, name: bytes(content)}
    return state._replace(how=f"{state.how}, and a bit of {name},", files=files)


def check_accepted(state: State, life: Life) -> None:
    """AssertionError if the program takes something in the base directory for good that is not what
    it wrote."""
    for name in accepted_files(life.base):
        whole = life.whole[state.ids[name]]
        assert state.files[name] == whole, f"{name}: taken for good, and is not what was written"
    for tag, written in life.row_losses.items():
        for path in run_dir.cursor_files(life.base / "runs" / tag).values():
            name = str(path.relative_to(life.base))
            found = if_good(run_dir.read_cursors, path)
            is_same = found in (None, run_dir.unpack_cursors(life.whole[state.ids[name]], path))
            assert is_same, f"{name}: cursors that nobody wrote"
        rows = row_losses(life.base, tag)
        for step, both in written.items():
            found = if_good(rows.read, step)
            is_same = found is None or np.array_equal(found, both)
            assert is_same, f"{tag}: losses of the rows of step {step} that nobody wrote"


def accepted_files(base: Path) -> Iterator[str]:
    """The files below the base directory that the program takes for good."""
    good: list[Path] = []
    for tag in RUNS:
        run = base / "runs" / tag
        for path in run_dir.checkpoint_folders(run).values():
            checkpoint = if_good(load_checkpoint, path)
            if checkpoint is not None:
                good += [
                    path / STATE_NAME,
                    *(path / name for name in checkpoint.seal["files"]),
                ]
    if (base / "mirror").is_dir():
        good += accepted_of_mirror(base / "mirror")
    yield from (str(path.relative_to(base)) for path in good)


def accepted_of_mirror(place: Path) -> Iterator[Path]:
    """The marks and pieces of a mirror that a fetch would take for good."""
    store = open_store(str(place))
    for name in store.names("marks"):
        mark = if_good(read_mark, store, name)
        if mark is None:
            continue
        yield place / "marks" / name
        fetch = Fetch(store, {name: mark}, place)
        for piece in mark.pieces:
            if if_good(fetch._content, [piece]) is not None:
                yield place / "pieces" / piece.blake2b


def if_good(read: Callable[..., Any], *args: object) -> Any:
    """What a reader returns; None if it says that the file is damaged or missing."""
    try:
        return read(*args)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def try_lying(life: Life, rng: random.Random, number: int, part: str = "") -> Iterator[Found]:
    """The states of a disk that lies in which something damaged is taken for good. `part`: see
    `lying_states`."""
    some = lying_states(life, rng, number, part)
    for state in tqdm(some, total=number, desc="a disk that lies", disable=None, leave=False):
        put(state, life)
        try:
            check_accepted(state, life)
        except Exception as e:
            yield Found(state, f"{type(e).__name__}: {e}")


def _without_checksum(packed: bytes) -> bytes:
    """`gzip.decompress` that does not look at the checksum at the end."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed[10:])
    except zlib.error as e:
        raise ValueError(str(e)) from None


def _anything(*_: object) -> Any:
    """A checksum that equals every other."""
    return mock.ANY


# {checksum: (the function that computes or compares it, what takes its place, files that it protects)}
SEALS: dict[str, tuple[str, Any, str]] = {
    "of each file of a checkpoint": ("nanochat.checkpoint.hash_file", _anything, "checkpoint-"),
    "of the seal itself": ("nanochat.checkpoint.hash_bytes", _anything, STATE_NAME),
    "of cursors": ("nanochat.run_dir.gzip.decompress", _without_checksum, "logs/cursors/"),
    "of losses of rows": ("nanochat.run_dir._checksum", _anything, "logs/rows/"),
    "of a mark": ("nanochat.mirror_marks.hash_json", _anything, "mirror/marks/"),
    "of a piece": ("nanochat.mirror_fetch.Piece", _anything, "mirror/pieces/"),
}


def plant_seal(life: Life, rng: random.Random, number: int, seal: str) -> Found | None:
    """Take out a checksum; the first state in which something damaged is taken for good."""
    target, mistake, part = SEALS[seal]
    with mock.patch(target, mistake):
        return next(try_lying(life, rng, number, part), None)


# ---- the tool ------------------------------------------------------------------------------------


def try_states(
    life: Life,
    some: Iterator[State],
    changes: Sequence[Change],
    *,
    number: int,
    resumed: int = 0,
) -> Iterator[Found]:
    """The states that break a law. About `resumed` of the `number` states live on."""
    every = max(1, number // resumed) if resumed else 0
    for at, state in enumerate(tqdm(some, total=number, desc="states", disable=None, leave=False)):
        put(state, life)
        said = reported(changes, state)
        try:
            check(state, life, said, commands=at % 10 == 0)
            if every and at % every == every // 2:
                live_on(life, said)
        except Exception as e:
            frame = traceback.extract_tb(e.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            yield Found(state, f"{type(e).__name__}: {e} ({place})")


class Planted(NamedTuple):
    """A planted mistake, and the first state that broke a law; None if none did."""

    mistake: str
    syncs: int
    found: Found | None


NOT_FOR_POWER_LOSS = {
    "TokenWriter.finish": "makes a full disk an error while the old files are still there",
}
MISTAKES = {"without": without, "too late": too_late}


def plant(life: Life, rng: random.Random, number: int, kind: str, site: str) -> Planted:
    """Take out or delay the syncs of a function, and try `number` states near them."""
    changes = MISTAKES[kind](life.recorder.changes, site)
    syncs = [at for at, change in enumerate(life.recorder.changes) if change.site == site]
    # most of what a sync orders is close to it
    distances = (*range(-2, 8), *range(8, 40, 4))
    near = {min(at + later, len(changes)) for at in syncs for later in distances}
    some = states(life.recorder, rng, number, changes=changes, at=sorted(near))
    found = next(try_states(life, some, changes, number=number), None)
    return Planted(f"{site}, {kind}", len(syncs), found)


def sites(recorder: Recorder) -> list[str]:
    """The functions that sync, in the order of their first sync."""
    return [*dict.fromkeys(change.site for change in recorder.changes if change.kind == "sync")]


def main(argv: Sequence[str] | None = None) -> int:
    """Live once, lose power many times, and report. Returns 1 if a law was broken, or if a sync was
    taken out and nothing broke."""
    parser = Parser(description=__doc__)
    parser.add_argument("--states", type=whole(0), default=10_000, help="states to build")
    parser.add_argument("--resumed", type=whole(0), default=100, help="how many of them live on")
    parser.add_argument("--lying", type=whole(0), default=1_000, help="states of a disk that lies")
    parser.add_argument("--per-mistake", type=whole(0), default=600, help="states for each mistake")
    parser.add_argument(
        "--planted", action=argparse.BooleanOptionalAction, default=True, help="plant mistakes"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides which states are drawn")
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder, lived(Path(folder) / "base") as life:
        changes = life.recorder.changes
        kinds = Counter(change.kind for change in changes)
        print(f"a life of {len(changes):,} changes: {dict(kinds)}")
        some = states(life.recorder, rng, args.states)
        broken = [*try_states(life, some, changes, number=args.states, resumed=args.resumed)]
        print(f"states: {args.states:,}; lived on: {args.resumed:,}; laws broken: {len(broken):,}")
        for found in broken[:20]:
            print(f"  {found.text(changes)}")
        missed = 0
        if args.planted:
            rows = []
            for site in sites(life.recorder):
                for kind in MISTAKES:
                    mistake, number, first = plant(life, rng, args.per_mistake, kind, site)
                    law = first.problem[:100] if first else NOT_FOR_POWER_LOSS.get(site, "-")
                    missed += law == "-" and kind == "without"
                    rows.append([mistake, number, law])
            print("\n".join(table(["mistake", "syncs", "first law broken"], rows)))
            print(f"syncs that nothing needs: {missed}")
        lied = [*try_lying(life, rng, args.lying)]
        print(f"states of a disk that lies: {args.lying:,}; damaged, taken for good: {len(lied):,}")
        broken += lied
        for found in lied[:20]:
            print(f"  {found.text(changes)}")
        if args.planted:
            rows = []
            for seal in SEALS:
                first = plant_seal(life, rng, args.per_mistake, seal)
                missed += first is None
                rows.append([seal, first.problem[:100] if first else "-"])
            print("\n".join(table(["checksum taken out", "first damage taken for good"], rows)))
    return int(bool(broken or missed))


if __name__ == "__main__":
    run_main(main)
