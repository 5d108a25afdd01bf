"""
The CORE metric: 22 tasks that a base model was not trained for, after DCLM (Li et al., 2406.11794).

It reads nanochat's `eval_bundle` folder, and judges each item as nanochat does:

    eval_bundle/core.yaml              the tasks: label, file, kind, number of examples in a prompt
    eval_bundle/eval_meta_data.csv     the accuracy of guessing in each task, in percent
    eval_bundle/eval_data/...jsonl     the items, one per line

A prompt consists of solved items and then the item itself. The solved items are drawn by a generator seeded with the
item's number. There are three kinds of task, which differ in the tokens that count (here: | ... |):

    multiple_choice      What is wet? |Sand|         The choice with the lowest mean loss is the answer.
                         What is wet? |Water|        Tokens count from where the prompts first differ.
    schema               He| fell, so he was hurt|   Several beginnings share an ending. The one with
                         It| fell, so he was hurt|   the lowest mean loss of the ending is the answer.
    language_modeling    The capital of France is |Paris|     Correct if each token is the most likely one.

A task's accuracy is centered, so that guessing scores 0 and a perfect result 1: (accuracy - guess) / (1 - guess). CORE
is the mean over the tasks.

No result depends on the number of processes or on a batch size, because the task alone decides which prompts are
computed together. Items are evaluated in groups of 32 consecutive ones, each on one rank. The prompts of a group are
sorted by length and batched up to BATCH_TOKENS. Lengths are rounded up to multiples of 64: on a CPU, a row's results
then have the same bits in any batch (measured; at other lengths they differ by about 1e-6). So equal choices tie, and
the first of them is the answer. One item per forward pass, as in nanochat, would leave a GPU idle.
"""

import csv
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nanochat.cli import read_yaml
from nanochat.common import check_shape, get_base_dir, get_dist_info, parse_json, write_bytes
from nanochat.dist import gather_results

GROUP = 32  # items whose prompts are batched together
BATCH_TOKENS = 8192  # maximum in one forward pass, unless a single item has more
TEXT = str | int | float
SHAPES = {  # the JSON of an item, by kind
    "multiple_choice": {"query": TEXT, "choices": [TEXT], "gold": int},
    "schema": {"context_options": [TEXT], "continuation": TEXT, "gold": int},
    "language_modeling": {"context": TEXT, "continuation": TEXT},
}
FETCH = ("fetch a complete bundle with python -m nanochat.dataset --eval-bundle (delete a broken one first), or pass "
         "another folder to this command: --eval-bundle=DIR")


# ---- the bundle ----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Item:
    """A question. The texts to choose from are `contexts[i] + delimiter + continuations[i]`, and text number `gold` is
    the answer. A language-modeling item has one text."""

    contexts: list[str]
    continuations: list[str]
    gold: int


@dataclass(frozen=True)
class Task:
    """A task of CORE. `baseline`: the accuracy of guessing, from 0 to 1. `items` are in the order of evaluation; the
    examples in prompts are drawn from them."""

    label: str
    kind: str
    num_fewshot: int
    delimiter: str
    baseline: float
    items: list[Item]


def read_bundle(folder: Path | str | None = None, max_per_task: int = -1) -> list[Task]:
    """The tasks of an eval_bundle folder (None: <base dir>/eval_bundle), each with `max_per_task` items drawn with a
    fixed seed, or with all items if that is below 1. FileNotFoundError or ValueError for missing, malformed or too few
    items."""
    folder = get_base_dir() / "eval_bundle" if folder is None else Path(folder)
    config, meta = folder / "core.yaml", folder / "eval_meta_data.csv"
    for path in (config, meta):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: the file does not exist, and the CORE metric needs it; {FETCH}")
    try:
        content = read_yaml(config)
    except ValueError as e:
        raise ValueError(f"{config}: {e}; {FETCH}") from None
    task_shape = {"label": str, "dataset_uri": str, "num_fewshot": [int], "icl_task_type": str}
    check_shape(content, {"icl_tasks": [task_shape]}, config)
    baselines = _read_baselines(meta)
    if not content["icl_tasks"]:
        raise ValueError(f"{config}: icl_tasks is empty; {FETCH}")
    shots = [(task["num_fewshot"] or [0])[0] for task in content["icl_tasks"]]
    if 0 < max_per_task <= max(shots):
        raise ValueError(f"--max-per-task (in training --core-metric-max-per-task): got {max_per_task} items per task, "
                         f"but prompts show up to {max(shots)} others; pass at least {max(shots) + 1}, or -1 for all")
    tasks = []
    for task, num_fewshot in zip(content["icl_tasks"], shots):
        label, kind, where = task["label"], task["icl_task_type"], f"{config}: task {task['label']!r:.80}"
        if num_fewshot < 0:
            raise ValueError(f"{where}: num_fewshot is {num_fewshot}, expected 0 or more; {FETCH}")
        path, inside = folder / "eval_data" / task["dataset_uri"], (folder / "eval_data").resolve()
        if "\0" in task["dataset_uri"] or not path.resolve().is_relative_to(inside):
            raise ValueError(f"{where}: dataset_uri is {task['dataset_uri']!r:.80}, outside of {inside}; {FETCH}")
        if kind not in SHAPES:
            raise ValueError(f"{where}: icl_task_type is {kind!r:.80}, expected {', '.join(SHAPES)}; {FETCH}")
        if not 0 <= baselines.get(label, -1) < 1:
            raise ValueError(f"{meta}: no row has a baseline from 0 to below 100 for the task {label!r} of "
                             f"{config.name}; {FETCH}")
        items = _read_items(path, kind, label)
        random.Random(1337).shuffle(items)  # the seeds here and in `make_prompts` are nanochat's
        items = items[:max_per_task] if max_per_task > 0 else items
        if len(items) <= num_fewshot:
            raise ValueError(f"{path}: the task {label!r} has {len(items)} items, but each prompt shows {num_fewshot} "
                             f"others; {FETCH}")
        tasks.append(Task(label, kind, num_fewshot, str(task.get("continuation_delimiter", " ")),
                          baselines[label], items))
    return tasks


def _read_baselines(path: Path) -> dict[str, float]:
    """{task: accuracy of guessing, from 0 to 1}. The bundle's table has percentages."""
    try:
        with path.open(encoding="utf-8", newline="") as f:
            return {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(f)}
    except (KeyError, TypeError, ValueError, csv.Error) as e:
        raise ValueError(f"{path}: expected the columns 'Eval Task' and 'Random baseline', the latter in percent "
                         f"({type(e).__name__}: {e}); {FETCH}") from e


def _read_items(path: Path, kind: str, label: str) -> list[Item]:
    """The items of a file, in its order."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: the data of the task {label!r} does not exist; {FETCH}")
    items = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        where = f"{path}, line {number}"
        entry = parse_json(line, where, SHAPES[kind], remedy=FETCH)
        if kind == "language_modeling":
            items.append(Item([str(entry["context"]).strip()], [str(entry["continuation"])], 0))
            continue
        options = [*map(str, entry["choices" if kind == "multiple_choice" else "context_options"])]
        if not 0 <= entry["gold"] < len(options):
            raise ValueError(f"{where}: gold is {entry['gold']}, expected 0 to {len(options) - 1}, the number of an "
                             f"option; {FETCH}")
        shared = [str(entry["query" if kind == "multiple_choice" else "continuation"])] * len(options)
        items.append(Item(*((shared, options) if kind == "multiple_choice" else (options, shared)), entry["gold"]))
    return items


# ---- prompts -------------------------------------------------------------------------------------

def make_prompts(task: Task, index: int) -> list[str]:
    """The prompts of item `index`, one for each option, all with the same solved items in front. A language-modeling
    item has two: the text without its answer, then the text with it."""
    item, others = task.items[index], [i for i in range(len(task.items)) if i != index]
    shots = [task.items[i] for i in random.Random(1234 + index).sample(others, task.num_fewshot)]
    before = "".join(f"{shot.contexts[shot.gold]}{task.delimiter}{shot.continuations[shot.gold]}\n\n"
                     for shot in shots)
    prompts = [f"{before}{context}{task.delimiter}{continuation}"
               for context, continuation in zip(item.contexts, item.continuations)]
    if task.kind == "language_modeling":
        # a space at the end would be a separate token here, but a part of the answer's token in the other prompt
        prompts.insert(0, f"{before}{item.contexts[0]}{task.delimiter}".strip())
    return prompts


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """The number of leading tokens that all rows share."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows)))


@dataclass(frozen=True)
class Rows:
    """The prompts of one item as tokens. The tokens of prompt i that count are tokens[i][starts[i]:]."""

    index: int
    tokens: list[list[int]]
    starts: list[int]

    @property
    def width(self) -> int:
        """The length of the longest prompt, rounded up to a multiple of 64."""
        return -(-max(map(len, self.tokens)) // 64) * 64


def make_rows(task: Task, index: int, tokens: list[list[int]], max_tokens: int) -> Rows:
    """The rows of item `index` from the tokens of its prompts, BOS first. Longer prompts are cut to their last
    `max_tokens` tokens."""
    if task.kind == "schema":
        shared = common_prefix([row[::-1] for row in tokens])
        starts = [len(row) - shared for row in tokens]
    else:
        starts = [common_prefix(tokens)] * len(tokens)
    if task.kind == "language_modeling":
        tokens, starts = tokens[1:], starts[1:]
    cuts = [max(0, len(row) - max_tokens) for row in tokens]
    return Rows(index, [row[cut:] for row, cut in zip(tokens, cuts)],
                [max(1, start - cut) for start, cut in zip(starts, cuts)])  # no logits predict the first token


# ---- evaluation ----------------------------------------------------------------------------------

@torch.no_grad()
def score(model: Any, batch: Sequence[Rows], pad: int) -> list[list[tuple[float, bool]]]:
    """For each item of a batch and each of its rows: the mean loss in nats of the tokens that count (NaN if none do),
    and whether each of them is the most likely one.

    model: ids (B, T) int64 -> logits (B, T, vocab_size). pad: the id that fills up rows; earlier tokens do not see it.
    """
    width = max(rows.width for rows in batch)
    flat = [row + [pad] * (width - len(row)) for rows in batch for row in rows.tokens]
    ids = torch.tensor(flat, device=model.get_device())
    logits, results = model(ids).float(), []
    spans = [(start, len(row)) for rows in batch for row, start in zip(rows.tokens, rows.starts)]
    for i, (start, end) in enumerate(spans):
        predicted, targets = logits[i, start - 1:end - 1], ids[i, start:end]
        loss = F.cross_entropy(predicted, targets, reduction="none").mean()
        results.append(torch.stack([loss, (predicted.argmax(dim=-1) == targets).all().float()]))
    pairs = iter(torch.stack(results).tolist())  # the only wait for the device
    return [[(loss, bool(likeliest)) for loss, likeliest in (next(pairs) for _ in rows.tokens)] for rows in batch]


def make_batches(group: Sequence[Rows]) -> Iterator[list[Rows]]:
    """The items of a group in batches, sorted by length."""
    batch: list[Rows] = []
    for rows in sorted(group, key=lambda rows: (rows.width, rows.index)):
        num_rows = sum(len(item.tokens) for item in (*batch, rows))
        if batch and num_rows * rows.width > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(rows)
    yield batch


def is_right(task: Task, index: int, scores: Sequence[tuple[float, bool]]) -> bool:
    """Whether the model answers item `index` correctly, from the `score` of its rows."""
    if task.kind == "language_modeling":
        [(loss, likeliest)] = scores
        return likeliest and not math.isnan(loss)
    # the first of the lowest losses; an option without tokens that count has NaN, which wins only as the first option
    return task.items[index].gold == min(range(len(scores)), key=lambda i: scores[i][0])


def evaluate_task(model: Any, tokenizer: Any, task: Task) -> list[bool]:
    """Collective. Whether the model answers each item of a task correctly, in the order of `task.items`."""
    _, rank, _, world_size = get_dist_info()
    bos, num_items = tokenizer.get_bos_token_id(), len(task.items)
    groups = [range(i, min(i + GROUP, num_items)) for i in range(0, num_items, GROUP)]

    def of_this_rank() -> dict[int, bool]:
        """Evaluate this rank's groups. Returns {item number: whether the answer is correct}."""
        correct = {}
        for group in groups[rank::world_size]:
            # tokenize all prompts of the group at once, then hand them out item by item
            prompts = [make_prompts(task, index) for index in group]
            tokens = iter(tokenizer.encode([text for texts in prompts for text in texts], prepend=bos))
            max_tokens = model.cos.size(0)  # the length of the rotary tables
            rows = [make_rows(task, index, [next(tokens) for _ in texts], max_tokens)
                    for index, texts in zip(group, prompts)]
            for batch in make_batches(rows):
                for item, scores in zip(batch, score(model, batch, bos)):
                    correct[item.index] = is_right(task, item.index, scores)
        return correct

    by_index = {index: value for by_rank in gather_results(of_this_rank) for index, value in by_rank.items()}
    return [by_index[index] for index in range(num_items)]


class Score(NamedTuple):
    """A model's result in a task. `right`: whether it answers each item correctly."""

    task: Task
    right: list[bool]

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def centered(self) -> float:
        return (self.accuracy - self.task.baseline) / (1 - self.task.baseline)


def evaluate_core(model: Any, tokenizer: Any, tasks: Sequence[Task]) -> Iterator[Score]:
    """Collective. Evaluate one task after the other."""
    for task in tasks:
        yield Score(task, evaluate_task(model, tokenizer, task))


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """{"core_metric": mean over tasks, "results": {task: accuracy}, "centered_results": {task: centered accuracy}}."""
    return {"core_metric": sum(score.centered for score in scores) / len(scores),
            "results": {score.task.label: score.accuracy for score in scores},
            "centered_results": {score.task.label: score.centered for score in scores}}


def write_csv(path: Path, result: Mapping[str, Any]) -> None:
    """Write a `summary` in nanochat's format: the columns task, accuracy, centered; CORE in the last line."""
    rows = [("Task", "Accuracy", "Centered"),
            *((label, f"{accuracy:.6f}", f"{result['centered_results'][label]:.6f}")
              for label, accuracy in result["results"].items()),
            ("CORE", "", f"{result['core_metric']:.6f}")]
    write_bytes(path, "".join(f"{task:<35}, {accuracy:<10}, {centered:<10}\n"
                              for task, accuracy, centered in rows).encode())
