"""
The CORE metric: how well a base model does 22 tasks that it was not trained for, after DCLM (Li et
al., 2406.11794), from the same `eval_bundle` folder as nanochat's, with the same items right.

    eval_bundle/core.yaml              the tasks: label, file, kind, number of examples in a prompt
    eval_bundle/eval_meta_data.csv     what guessing gets in each task, in percent
    eval_bundle/eval_data/...jsonl     the items, one a line

A prompt is some solved items, drawn by a generator that only the item's number seeds, and then the
item. There are three kinds, and each asks which tokens of the prompt count (here: | ... |):

    multiple_choice      What is wet? |Sand|         the mean loss of each choice; the least answers.
                         What is wet? |Water|        It counts from where the prompts first differ
    schema               |He| fell, so he was hurt   one ending behind several beginnings: the mean
                         The wall| fell, so ... |    loss of what all prompts end with
    language_modeling    The capital of France is |Paris|     right if each token is the likeliest

A task's result is centred, so that guessing gets 0 and knowing gets 1: (accuracy - guess) / (1 -
guess). CORE is the mean over the tasks.

No result depends on the number of processes or on a batch size, because what is computed together
follows from the task alone. Items go through in groups of 32 consecutive ones, a group on one rank;
the prompts of a group are sorted by length and laid side by side as far as BATCH_TOKENS allow. Lengths
are rounded up to 64: on a CPU a row's numbers then have the same bits whatever rows are beside it
(measured; at other lengths they differ by some 1e-6), so that equal choices are a tie, and the first
of them is the answer. One item a forward pass, as nanochat does it, would keep a GPU idle.
"""

import csv
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nanochat.cli import read_yaml
from nanochat.common import check_shape, get_base_dir, get_dist_info, parse_json, print0, write_bytes
from nanochat.dist import gather_all, gather_results
from nanochat.lifecycle import join_reasons

GROUP = 32  # items whose prompts are made, sorted and run together
BATCH_TOKENS = 8192  # of one forward pass, unless a single item has more
TEXT = str | int | float
SHAPES = {  # of an item of each kind
    "multiple_choice": {"query": TEXT, "choices": [TEXT], "gold": int},
    "schema": {"context_options": [TEXT], "continuation": TEXT, "gold": int},
    "language_modeling": {"context": TEXT, "continuation": TEXT},
}
TASK_SHAPE = {"label": str, "dataset_uri": str, "num_fewshot": [int], "icl_task_type": str}
WAY_OUT = ("python -m nanochat.dataset --eval-bundle fetches a whole one (delete a broken one first), "
           "--eval-bundle DIR names another")


# ---- the bundle ----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Item:
    """A question: which of the texts `contexts[i] + delimiter + continuations[i]` is right, the
    `gold`-th or which. A language-modelling item has one such text."""

    contexts: list[str]
    continuations: list[str]
    gold: int


@dataclass(frozen=True)
class Task:
    """A task of CORE. `baseline`: the accuracy of guessing, from 0 to 1. `items` are in the order
    in which they are evaluated, and the examples in the prompts are drawn from them."""

    label: str
    kind: str
    num_fewshot: int
    delimiter: str
    baseline: float
    items: list[Item]


def read_bundle(folder: Path | str | None = None, max_per_task: int = -1) -> list[Task]:
    """The tasks of an eval_bundle folder (None: <base dir>/eval_bundle), each with at most
    `max_per_task` of its items, drawn with a fixed seed; all of them where that is below 1.
    FileNotFoundError or ValueError, in one sentence, for what is missing, malformed or too little."""
    folder = get_base_dir() / "eval_bundle" if folder is None else Path(folder)
    config, meta = folder / "core.yaml", folder / "eval_meta_data.csv"
    for path in (config, meta):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: not there, and the CORE metric needs it; {WAY_OUT}")
    try:
        told = read_yaml(config)
    except ValueError as e:
        raise ValueError(f"{config}: {e}; {WAY_OUT}") from None
    check_shape(told, {"icl_tasks": [TASK_SHAPE]}, config)
    baselines = _read_baselines(meta)
    if not told["icl_tasks"]:
        raise ValueError(f"{config}: icl_tasks: no task in it; {WAY_OUT}")
    for task in told["icl_tasks"]:
        if any(number < 0 for number in task["num_fewshot"]):
            raise ValueError(f"{config}: the task {task['label']!r:.80} has num_fewshot {task['num_fewshot']!r:.80}, "
                             f"expected numbers of 0 or more; {WAY_OUT}")
        path, inside = folder / "eval_data" / task["dataset_uri"], (folder / "eval_data").resolve()
        if "\0" in task["dataset_uri"] or not path.resolve().is_relative_to(inside):
            raise ValueError(f"{config}: the task {task['label']!r:.80} has dataset_uri {task['dataset_uri']!r:.80}, "
                             f"which lies outside of {inside}; {WAY_OUT}")
    shots = [(task["num_fewshot"] or [0])[0] for task in told["icl_tasks"]]
    if 0 < max_per_task <= (most := max(shots, default=0)):
        raise ValueError(f"--max-per-task (in training --core-metric-max-per-task): got {max_per_task} items of each "
                         f"task, but prompts show up to {most} others; give at least {most + 1}, or -1 for all")
    tasks = []
    for task, num_fewshot in zip(told["icl_tasks"], shots):
        label, kind, path = task["label"], task["icl_task_type"], folder / "eval_data" / task["dataset_uri"]
        if kind not in SHAPES:
            raise ValueError(f"{config}: the task {label!r} has icl_task_type {kind!r}, expected {', '.join(SHAPES)}")
        if not 0 <= baselines.get(label, -1) < 1:
            raise ValueError(f"{meta}: the task {label!r} of {config.name} has no row there with a baseline "
                             f"from 0 to below 100; {WAY_OUT}")
        items = _read_items(path, kind, label)
        random.Random(1337).shuffle(items)  # the seeds here and in `make_prompts` are nanochat's
        items = items[:max_per_task] if max_per_task > 0 else items
        if len(items) <= num_fewshot:
            raise ValueError(f"{path}: {len(items)} items of the task {label!r}, and each prompt shows {num_fewshot} "
                             f"others; {WAY_OUT}")
        tasks.append(Task(label, kind, num_fewshot, str(task.get("continuation_delimiter", " ")),
                          baselines[label], items))
    return tasks


def _read_baselines(path: Path) -> dict[str, float]:
    """{task: accuracy of guessing, from 0 to 1} of the bundle's table, which has percent."""
    try:
        with path.open(encoding="utf-8", newline="") as f:
            return {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(f)}
    except (KeyError, TypeError, ValueError, csv.Error) as e:
        raise ValueError(f"{path}: expected the columns 'Eval Task' and 'Random baseline', the latter in percent "
                         f"({type(e).__name__}: {e}); {WAY_OUT}") from e


def _read_items(path: Path, kind: str, label: str) -> list[Item]:
    """The items of a file, in its order."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: the data of the task {label!r} are not there; {WAY_OUT}")
    items = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        where = f"{path}, line {number}"
        told = parse_json(line, where, SHAPES[kind])
        if kind == "language_modeling":
            items.append(Item([str(told["context"]).strip()], [str(told["continuation"])], 0))
            continue
        options = [*map(str, told["choices" if kind == "multiple_choice" else "context_options"])]
        if not 0 <= told["gold"] < len(options):
            raise ValueError(f"{where}: gold is {told['gold']}, expected the number of one of {len(options)} options, "
                             f"counted from 0")
        other = [str(told["query" if kind == "multiple_choice" else "continuation"])] * len(options)
        items.append(Item(*((other, options) if kind == "multiple_choice" else (options, other)), told["gold"]))
    return items


# ---- prompts -------------------------------------------------------------------------------------

def make_prompts(task: Task, index: int) -> list[str]:
    """The texts that answer item `index`, one for each of its options, each behind the same solved
    items. Of a language-modelling item first the text without its answer, then with it."""
    item, others = task.items[index], [i for i in range(len(task.items)) if i != index]
    shots = [task.items[i] for i in random.Random(1234 + index).sample(others, task.num_fewshot)]
    before = "".join(f"{shot.contexts[shot.gold]}{task.delimiter}{shot.continuations[shot.gold]}\n\n"
                     for shot in shots)
    prompts = [f"{before}{context}{task.delimiter}{continuation}"
               for context, continuation in zip(item.contexts, item.continuations)]
    if task.kind == "language_modeling":
        # a space at the end would be a token of its own here, and a part of the answer's there
        prompts.insert(0, f"{before}{item.contexts[0]}{task.delimiter}".strip())
    return prompts


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """How many tokens all rows begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows)))


@dataclass(frozen=True)
class Rows:
    """The prompts of one item as tokens, and from where on they count: tokens[i][starts[i]:]."""

    index: int
    tokens: list[list[int]]
    starts: list[int]

    @property
    def width(self) -> int:
        """The length of the longest, rounded up."""
        return -(-max(map(len, self.tokens)) // 64) * 64


def make_rows(task: Task, index: int, tokens: list[list[int]], max_tokens: int) -> Rows:
    """The rows of item `index` from the tokens of its prompts, BOS first. Of what is longer than
    `max_tokens` the end is kept."""
    if task.kind == "schema":
        shared = common_prefix([row[::-1] for row in tokens])
        starts = [len(row) - shared for row in tokens]
    else:
        starts = [common_prefix(tokens)] * len(tokens)
    if task.kind == "language_modeling":
        tokens, starts = tokens[1:], starts[1:]
    cuts = [max(0, len(row) - max_tokens) for row in tokens]
    return Rows(index, [row[cut:] for row, cut in zip(tokens, cuts)],
                [max(1, start - cut) for start, cut in zip(starts, cuts)])  # nothing predicts the first token


# ---- evaluation ----------------------------------------------------------------------------------

@torch.no_grad()
def score(model: Any, batch: Sequence[Rows], pad: int) -> list[list[tuple[float, bool]]]:
    """For each item of a batch, and each of its rows: the mean loss in nats of the tokens that count
    (NaN where there is none), and whether each of them is the likeliest. model: ids (B, T) int64 ->
    logits (B, T, vocab_size). pad: an id for what stands behind a row's end, where no token looks."""
    width = max(rows.width for rows in batch)
    flat = [row + [pad] * (width - len(row)) for rows in batch for row in rows.tokens]
    ids = torch.tensor(flat, device=model.get_device())
    logits, found = model(ids).float(), []
    spans = [(start, len(row)) for rows in batch for row, start in zip(rows.tokens, rows.starts)]
    for i, (start, end) in enumerate(spans):
        predicted, targets = logits[i, start - 1:end - 1], ids[i, start:end]
        loss = F.cross_entropy(predicted, targets, reduction="none").mean()
        found.append(torch.stack([loss, (predicted.argmax(dim=-1) == targets).all().float()]))
    figures = iter(torch.stack(found).tolist())  # the one wait for the device
    return [[(loss, bool(likeliest)) for loss, likeliest in (next(figures) for _ in rows.tokens)] for rows in batch]


def make_batches(group: Sequence[Rows]) -> Iterator[list[Rows]]:
    """The items of a group, those of like length together."""
    batch: list[Rows] = []
    for rows in sorted(group, key=lambda rows: (rows.width, rows.index)):
        num_rows = sum(len(some.tokens) for some in (*batch, rows))
        if batch and num_rows * rows.width > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(rows)
    yield batch


def is_right(task: Task, index: int, scores: Sequence[tuple[float, bool]]) -> bool:
    """Whether the `score` of its rows gives item `index` the answer that it has."""
    if task.kind == "language_modeling":
        [(loss, likeliest)] = scores
        return likeliest and not math.isnan(loss)
    # The first of the least. NaN, of an option without a token of its own, wins only in the first place
    return task.items[index].gold == min(range(len(scores)), key=lambda i: scores[i][0])


def evaluate_task(model: Any, tokenizer: Any, task: Task) -> list[bool]:
    """Collective. Which items of a task a model has right, in the order of `task.items`."""
    _, rank, _, world_size = get_dist_info()
    bos, right = tokenizer.get_bos_token_id(), dict[int, bool]()
    groups = [range(i, min(i + GROUP, len(task.items))) for i in range(0, len(task.items), GROUP)]

    def of_this_rank() -> dict[int, bool]:
        for group in groups[rank::world_size]:
            prompts = [make_prompts(task, index) for index in group]
            tokens = iter(tokenizer.encode([text for texts in prompts for text in texts], prepend=bos))
            room = model.cos.size(0)  # as far as rotary tables reach
            rows = [make_rows(task, index, [next(tokens) for _ in texts], room)
                    for index, texts in zip(group, prompts)]
            for batch in make_batches(rows):
                for item, scores in zip(batch, score(model, batch, bos)):
                    right[item.index] = is_right(task, item.index, scores)
        return right

    everyone = {index: value for of_rank in gather_results(of_this_rank) for index, value in of_rank.items()}
    return [everyone[index] for index in range(len(task.items))]


@dataclass(frozen=True)
class Score:
    """What a model gets in a task: the share of items it has right, and that share centred."""

    label: str
    accuracy: float
    centered: float


def score_of(task: Task, right: Sequence[bool]) -> Score:
    """What a model gets in a task whose items it has `right` or not."""
    accuracy = sum(right) / len(right)
    return Score(task.label, accuracy, (accuracy - task.baseline) / (1 - task.baseline))


def evaluate_core(model: Any, tokenizer: Any, tasks: Sequence[Task]) -> Iterator[Score]:
    """Collective. One task after the other."""
    for task in tasks:
        yield score_of(task, evaluate_task(model, tokenizer, task))


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """{"core_metric": the mean of all tasks, "results": {task: accuracy}, "centered_results": {task: centred}}."""
    return {"core_metric": sum(score.centered for score in scores) / len(scores),
            "results": {score.label: score.accuracy for score in scores},
            "centered_results": {score.label: score.centered for score in scores}}


def write_csv(path: Path, result: Mapping[str, Any]) -> None:
    """Write a `summary` with the columns that nanochat gives such a file: task, accuracy, centred; CORE last."""
    rows = [("Task", "Accuracy", "Centered"),
            *((label, f"{accuracy:.6f}", f"{result['centered_results'][label]:.6f}")
              for label, accuracy in result["results"].items()),
            ("CORE", "", f"{result['core_metric']:.6f}")]
    write_bytes(path, "".join(f"{task:<35}, {accuracy:<10}, {centered:<10}\n"
                              for task, accuracy, centered in rows).encode())


def log_core(run: Any) -> None:
    """Collective. The CORE metric of a model in training, a `trainer.Trainer`: told to people, to the log and,
    under nanochat's names, to the trackers. Raises Stop on all ranks, between two tasks, where one is asked to stop."""
    from nanochat.trainer import LONG_S, Stop

    step, settings, scores = run.progress.step, run.settings, []
    run.dog.beat(step, "CORE", LONG_S)
    is_rank0 = run.loader.layout.rank == 0
    tasks = gather_results(
        lambda: read_bundle(settings.eval_bundle, settings.core_metric_max_per_task) if is_rank0 else [])[0]
    for score in evaluate_core(run.model, run.data.tokenizer, tasks):
        scores.append(score)
        run.dog.beat(step, f"CORE after {score.label}", LONG_S)
        if any(reasons := gather_all(run.stop.requested())):
            raise Stop(join_reasons(reasons))
    result = summary(scores)
    print0(f"step {step:05d} | CORE metric {result['core_metric']:.4f} ({len(scores)} tasks)")
    run.journal.event("core", **result)
