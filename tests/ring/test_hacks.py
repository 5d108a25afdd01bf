"""Typical changes of a fork, each made by editing one file of a copy of this repository, which then
trains.

A fork that has made such a change itself keeps these tests: they look for as little of the text as
they can. If one still fails because of the fork's own change, its error says so."""

import ast
import math
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from nanochat.run_dir import iter_log
from tests import training

ROOT = Path(__file__).parents[2]
SMALL = {
    **training.SMALL,
    "max_seq_len": 32,
    "total_batch_size": 32 * 8,
    "overlap": 8,
    "eval_tokens": 32 * 16,
    "num_iterations": 4,
    "save_every": -1,
    "warmup_steps": 0,
    "plan": "warn",
}


@pytest.fixture
def fork(tmp_path):
    """A copy of the code, with compiled files, and a way to train with it."""
    root = tmp_path / "fork"
    for folder in ("nanochat", "scripts"):
        shutil.copytree(ROOT / folder, root / folder)
    with training.workplace(tmp_path, **SMALL):
        yield Fork(root, tmp_path)


def train(root, argv):
    """Run the training job of the code in `root`, in a process that has imported this repository's
    and drops it."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("nanochat", "scripts")]:
        del sys.modules[name]
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True  # a test may edit a source twice within a second
    from scripts import base_train

    assert base_train.__file__ == str(root / "scripts" / "base_train.py")
    return base_train.main(argv)


def fork_changed(name, what):
    """Why a hack cannot be made."""
    return (
        f"{name}: this fork changed the lines that this test edits, {what}. Nothing is broken: the test shows "
        f"that such a change takes one file. Change its edit to the new lines, or delete the test."
    )


class Fork:
    def __init__(self, root, base):
        self.root, self.base = root, base
        self.before = {path: path.read_bytes() for path in root.rglob("*.py")}

    def edit(self, name, old, new):
        """Replace a text that a file has once."""
        path = self.root / name
        text = path.read_text()
        assert text.count(old) == 1, fork_changed(name, repr(old))
        path.write_text(text.replace(old, new))

    def replace_class(self, name, cls, new):
        """Replace a class, whatever its body is."""
        path = self.root / name
        lines = path.read_text().splitlines(keepends=True)
        tree = ast.parse("".join(lines))
        found = [node for node in tree.body if getattr(node, "name", "") == cls]
        assert len(found) == 1, fork_changed(name, f"class {cls}")
        lines[found[0].lineno - 1 : found[0].end_lineno] = [new]
        path.write_text("".join(lines))

    def append(self, name, text):
        with open(self.root / name, "a") as f:
            f.write(text)

    def run(self, *, tag="hack", ok=True, **changed):
        """Train, and return the output."""
        edited = {
            path for path in self.root.rglob("*.py") if self.before.get(path) != path.read_bytes()
        }
        assert len(edited) <= 1, "a hack takes one file"
        group = self.start(tag=tag, **changed)
        assert (group.wait() == [0]) == ok, group.text()
        return group.text()

    def start(self, world_size=1, *, tag, env=None, **changed):
        """Start training, with `env` added to the environment."""
        argvs = [training.flags(model_tag=tag, **changed)] * world_size
        return training.launch(partial(train, self.root), argvs, [env or {}] * world_size)


def test_another_packing_layout(fork):
    """Rows take documents one after another and cut the last one; none is pending."""
    fork.append(
        "nanochat/packing.py",
        '''

class Simple(Packer):
    """Each row takes documents in order and drops what does not fit of the last one."""

    def __init__(self, T):
        super().__init__(T)
        self.queue = {}

    def __contains__(self, key):
        return key in self.queue

    def waiting(self):
        return dict(self.queue)

    def push(self, key, length, used=0, arrival=None):
        self.queue[key] = Piece(length, 0, 0)
        self.tokens += length

    def next_row(self):
        room, placements = self.capacity, []
        while room:
            key = next(iter(self.queue))
            length = self.queue.pop(key).length
            placed = min(length, room)
            placements.append((key, 0, placed, 0))
            self.cropped += length - placed
            self.tokens -= length
            room -= placed
        self.num_rows += 1
        return placements


LAYOUTS["simple"] = Simple
''',
    )
    fork.run(packing="simple")
    whole = training.digests("hack")
    fork.run(packing="simple", num_iterations=2, tag="resumed")
    fork.run(packing="simple", tag="resumed")
    assert training.digests("resumed") == whole and len(set(whole)) == 4
    fork.run(packing="concat", tag="concat")
    assert training.digests("concat") != whole


def test_a_new_kind_of_data_file(fork):
    """The example of docs/reference.md, a reader of .csv files."""
    own = reader_of_csv(fork)
    # regression: "expected --text-field to be one of None"
    (own["data_path"] / "an_empty_one.csv").touch()
    fork.run(**own)
    assert len(training.digests("hack")) == 4
    refused = fork.run(**own | {"data_format": "ods"}, tag="none", ok=False)
    assert "got 'ods', expected text, shards, megatron, or a NAME" in refused
    # regression: it was taken, and nothing was held out
    refused = fork.run(**own, val_fraction=0.05, tag="none", ok=False)
    assert "--val-fraction=0.05: applies to text only, but --data-format is csv" in refused


def test_a_pin_that_lacks_something_is_explained(fork):
    """Regression: KeyError: 'footer'."""
    own = reader_of_csv(fork)
    fork.edit("nanochat/source_csv.py", '"footer": hash_file(path), ', "")
    refused = fork.run(**own, ok=False)
    assert "nanochat.source_csv" in refused and "scan_file: footer: expected a string" in refused
    assert "Traceback" not in refused


def reader_of_csv(fork):
    """Write the reader of docs/reference.md, and .csv files. Returns the flags with which it reads
    them."""
    page = (ROOT / "docs" / "reference.md").read_text()
    _, _, rest = page.partition("cat >nanochat/source_csv.py <<'END'\n")
    (fork.root / "nanochat" / "source_csv.py").write_text(rest.partition("END\n")[0])
    folder = fork.base / "lines"
    folder.mkdir()
    for name in ("a", "b"):
        lines = [f"{name}: document {i} of a few words\n" for i in range(300)]
        (folder / f"{name}.csv").write_text("body\n" + "".join(lines))
    return {"data_format": "csv", "data_path": folder, "text_field": "body"}


COPIES = '''

from dataclasses import asdict, dataclass

import numpy as np

from nanochat.common import words
from nanochat.rows import Row
from nanochat.stream import LaneState


@dataclass(frozen=True)
class Copies:
    """Rows of random tokens whose second half repeats the first one."""

    T: int
    V: int
    seed: int
    framed = True

    def identity(self):
        return asdict(self)

    def open(self, sources, lanes, cursors=None, **unused):
        return CopyStream(self, list(lanes), cursors[0]["row"] if cursors else 0)


class CopyStream:
    mixer = None
    buckets = ("copies",)

    def __init__(self, config, lanes, row):
        self.config, self.lanes, self.row = config, lanes, row

    def next_rows(self, num_rows):
        numbers = range(self.row, self.row + num_rows)
        self.row += num_rows
        return [self.make(lane, row) for lane in self.lanes for row in numbers]

    def make(self, lane, row):
        half = words(self.config.T // 2 + 1, self.config.seed, lane, row) % 256
        return Row(lane, row, "copies", np.resize(half, self.config.T + 1), None, [])

    def dry_bucket(self, lane):
        return None

    def state(self):
        return [LaneState(lane, self.row, frozenset(), {}) for lane in self.lanes]

    def cursors(self, state=None):
        stream = self.config.identity()
        return [
            {"lane": lane, "row": row, "stream": stream, "buckets": {}}
            for lane, row, *_ in state or self.state()
        ]

    def close(self):
        pass


class CopyOrder(LaneOrder):
    has_plan = False

    def stream_config(self, settings):
        return Copies(settings.max_seq_len, settings.lanes, settings.order_seed)


ORDERS["copies"] = "nanochat.run_order:CopyOrder"
'''


def test_another_order_of_the_data(fork):
    """Rows that no document fills; the run resumes, and the ranks share the rows."""
    fork.append("nanochat/run_order.py", COPIES)
    fork.run(order="copies")
    whole = training.digests("hack")
    fork.run(order="copies", num_iterations=2, tag="resumed")
    fork.run(order="copies", tag="resumed")
    assert training.digests("resumed") == whole and len(set(whole)) == 4
    group = fork.start(2, tag="two", order="copies")
    assert group.wait() == [0, 0] and training.digests("two") == whole, group.text()


WITH_WAVE = """\
    def lr(self, step):
        return self.lr_without_wave(step) * (1 + self.wave * math.sin(step))

"""


def test_a_schedule_with_a_flag_of_its_own(fork):
    """A run that began before the flag existed is resumed with its default."""
    fork.run(num_iterations=2, tag="older")
    field = "    final_lr_frac: float = "
    method = "    def lr(self, step: int) -> float:\n"
    flag = (
        '    wave: float = setting(0.0, "amplitude of a wave in the rates", decides=Decides.STEP)'
    )
    fork.edit("nanochat/schedule.py", field, f"{flag}\n{field}")
    fork.edit("nanochat/schedule.py", method, WITH_WAVE + method.replace("lr", "lr_without_wave"))
    plain = fork.run(tag="older")
    assert "resuming" in plain and len(training.digests("older")) == 4
    fork.run(wave=0.5)
    fork.run(wave=0.0, tag="flat")
    rates = {
        tag: [r["lr"] for r in iter_log(training.log_file(tag)) if "digest" in r]
        for tag in ("hack", "flat")
    }
    assert rates["hack"][0] == rates["flat"][0] and rates["hack"][1] == pytest.approx(
        rates["flat"][1] * (1 + 0.5 * math.sin(1))
    )
    assert "--wave: the run has 0.5, this launch 0.25" in fork.run(
        wave=0.25, num_iterations=6, ok=False
    )


def test_a_metric_at_evaluation(fork):
    fork.edit(
        "nanochat/evaluations.py",
        'journal.event("val", progress.step, ',
        'journal.event("val", progress.step, perplexity_of_bytes=2**value, ',
    )
    fork.run(eval_every=2)
    events = [r for r in iter_log(training.log_file("hack")) if r.get("event") == "val"]
    assert len(events) == 3 and all(
        event["perplexity_of_bytes"] == 2 ** event["bpb"] for event in events
    )


def test_a_value_in_the_steps_line_and_log(fork):
    fork.edit(
        "scripts/base_train.py",
        '"step_s": ',
        '"hot": max(totals.loss, 1), "step_s": ',
    )
    fork.edit(
        "scripts/base_train.py",
        '    return " | ".join(line)',
        '    line.append(f"hot {record[\'hot\']:.3f}")\n    return " | ".join(line)',
    )
    printed = fork.run()
    logged = [r["hot"] for r in iter_log(training.log_file("hack")) if "digest" in r]
    assert len(logged) == 4 and all(f"hot {value:.3f}" in printed for value in logged)


def test_a_new_sink(fork):
    """It receives every step and event, and nothing else changes."""
    fork.append(
        "nanochat/sinks.py",
        '''
from nanochat.steps import Sink


class Csv(Sink):
    """RUN/steps.csv"""

    def __init__(self, run):
        self.path = run.run_dir / "steps.csv"

    def step(self, report):
        with open(self.path, "a") as f:
            f.write(f"{report.step},{report.totals.loss}\\n")

    def end(self, status, reason):
        with open(self.path, "a") as f:
            f.write(status)


SINKS["csv"] = "nanochat.sinks:Csv"
''',
    )
    fork.run(log_to="csv")
    *steps, status = (training.run_dir("hack") / "steps.csv").read_text().split("\n")
    logged = {r["step"]: r["loss"] for r in iter_log(training.log_file("hack")) if "digest" in r}
    assert steps == [f"{step},{loss}" for step, loss in logged.items()] and len(steps) == 4
    assert status == "completed"


MLP = """\
class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_gate = Linear(config.n_embd, 3 * config.n_embd)
        self.c_fc = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(3 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.silu(self.c_gate(x)) * self.c_fc(x))
"""


def test_another_mlp(fork):
    fork.replace_class("nanochat/gpt.py", "MLP", MLP)
    fork.run()
    fork.edit("nanochat/gpt.py", "F.silu(", "F.gelu(")
    fork.run(tag="other")
    losses = [
        [r["loss"] for r in iter_log(training.log_file(tag)) if "digest" in r]
        for tag in ("hack", "other")
    ]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=0.5) and losses[0] != losses[1]


WITH_DROPOUT = """x = x + F.dropout(self.mlp(norm(x)), 0.5)
        Block.calls = getattr(Block, "calls", 0) + 1  # one per step
        if os.environ.get("DIES_AT") == str(Block.calls):
            os.kill(os.getpid(), 9)
        return x

import os
"""


def test_dropout_resumes_with_the_same_random_numbers(fork):
    """Regression: a save kept the states of the global random generators, and nothing read them."""
    fork.edit("nanochat/gpt.py", "return x + self.mlp(norm(x))\n", WITH_DROPOUT)
    flags = {"num_iterations": 6, "save_every": 2, "sync_save": True, "leaves": 2}
    whole = fork.start(2, tag="whole", **flags)
    assert whole.wait() == [0, 0], whole.text()
    fork.start(2, tag="killed", env={"DIES_AT": "4"}, **flags).wait_for_death()
    resumed = fork.start(2, tag="killed", **flags)
    assert resumed.wait() == [0, 0] and "at step 2" in resumed.text(), resumed.text()
    assert training.losses("killed") == training.losses("whole")
    alone = fork.run(tag="killed", **{**flags, "num_iterations": 8})
    assert "the random states of 2 processes are not restored on 1" in alone
