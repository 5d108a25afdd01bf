"""
The CORE metric: 22 tasks that a base model was not trained for, after DCLM (Li et al., 2406.11794).

It reads nanochat's `eval_bundle` folder, and judges each item as nanochat does:

    eval_bundle/core.yaml              the tasks: label, file, kind, number of examples in a prompt
    eval_bundle/eval_meta_data.csv     the accuracy of guessing in each task, in percent
    eval_bundle/eval_data/...jsonl     the items, one per line

A prompt consists of solved items and then the item itself. The solved items are drawn by a
generator seeded with the item's number. There are three kinds of task, which differ in the tokens
that count (here: | ... |):

    multiple_choice      What is wet? |Sand|         The choice with the lowest mean loss is the answer.
                         What is wet? |Water|        Tokens count from where the prompts first differ.
    schema               He| fell, so he was hurt|   Several beginnings share an ending. The one with
                         It| fell, so he was hurt|   the lowest mean loss of the ending is the answer.
    language_modeling    The capital of France is |Paris|     Correct if each token is the most likely one.

A task's accuracy is centered, so that guessing scores 0 and a perfect result 1: (accuracy - guess)
/ (1 - guess). CORE is the mean over the tasks.

No result depends on the number of processes or on a batch size, because the task alone decides
which prompts are computed together. Items are evaluated in groups of 32 consecutive ones, each on
one rank. The prompts of a group are sorted by length and batched up to BATCH_TOKENS. Lengths are
rounded up to multiples of 64: on a CPU, a row's results then have the same bits in any batch
(measured; at other lengths they differ by about 1e-6). So equal choices tie, and the first of them
is the answer. One item per forward pass, as in nanochat, would leave a GPU idle.
"""

import csv
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from nanochat.cli import read_yaml
from nanochat.common import (
    can_be_path,
    check_shape,
    counted,
    get_base_dir,
    get_dist_info,
    parse_json,
    write_bytes,
)
from nanochat.dist import gather_results

GROUP = 32  # items whose prompts are batched together
BATCH_TOKENS = 8192  # maximum in one forward pass, unless a single item has more
TEXT = str | int | float
SHAPES = {  # the JSON of an item, by kind
    "multiple_choice": {"query": TEXT, "choices": [TEXT], "gold": int},
    "schema": {"context_options": [TEXT], "continuation": TEXT, "gold": int},
    "language_modeling": {"context": TEXT, "continuation": TEXT},
}
# of a task in core.yaml
TASK_SHAPE = {"label": str, "dataset_uri": str, "num_fewshot": [int], "icl_task_type": str}
FETCH = (
    "fetch a complete bundle with python -m nanochat.dataset --eval-bundle (delete a broken one first); "
    "scripts.base_eval reads another folder with --eval-bundle=DIR"
)


# ---- the bundle ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A question.

    The texts to choose from are `contexts[i] + delimiter + continuations[i]`, and text number
    `gold` is the answer. A language-modeling item has one text. `line`: of its file, from 1.
    """

    contexts: list[str]
    continuations: list[str]
    gold: int
    line: int = 0


@dataclass(frozen=True)
class Task:
    """A task of CORE.

    `baseline`: the accuracy of guessing, from 0 to 1. `items` are in the order of evaluation; the
    examples in prompts are drawn from them.
    """

    label: str
    kind: str
    num_fewshot: int
    delimiter: str
    baseline: float
    items: list[Item]


def read_bundle(folder: Path | str | None = None, max_per_task: int = -1) -> list[Task]:
    """The tasks of an eval_bundle folder (None: <base dir>/eval_bundle).

    Each has `max_per_task` items drawn with a fixed seed, or all items if that is below 1.
    FileNotFoundError or ValueError for missing, malformed or too few items.
    """
    folder = get_base_dir() / "eval_bundle" if folder is None else Path(folder)
    config = folder / "core.yaml"
    meta = folder / "eval_meta_data.csv"
    for path in (config, meta):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: the file does not exist, and the CORE metric needs it; {FETCH}"
            )
    try:
        content = read_yaml(config)
    except ValueError as e:
        raise ValueError(f"{config}: {e}; {FETCH}") from None
    check_shape(content, {"icl_tasks": [TASK_SHAPE]}, config)
    baselines = _read_baselines(meta)
    records = content["icl_tasks"]
    if not records:
        raise ValueError(f"{config}: icl_tasks is empty; {FETCH}")
    most = max(_num_fewshot(record) for record in records)
    if 0 < max_per_task <= most:
        raise ValueError(
            f"--max-per-task (in training --core-metric-max-per-task): got {max_per_task} items per task, "
            f"but prompts show up to {most} others; pass at least {most + 1}, or -1 for all"
        )
    tasks = []
    for record in records:
        task = _read_task(folder, record, baselines)
        # the seeds here and in `make_prompts` are nanochat's
        random.Random(1337).shuffle(task.items)
        if max_per_task > 0:
            del task.items[max_per_task:]
        if len(task.items) <= task.num_fewshot:
            path = folder / "eval_data" / record["dataset_uri"]
            raise ValueError(
                f"{path}: the task {task.label!r} has {len(task.items)} items, but each prompt shows "
                f"{task.num_fewshot} others; {FETCH}"
            )
        tasks.append(task)
    return tasks


def _num_fewshot(record: Mapping[str, Any]) -> int:
    """How many examples a task's prompts show: the first number of its list, as in nanochat."""
    numbers = record["num_fewshot"]
    return numbers[0] if numbers else 0


def _read_task(folder: Path, record: Mapping[str, Any], baselines: Mapping[str, float]) -> Task:
    """The task in a record of core.yaml, with all items in the order of their file.

    FileNotFoundError or ValueError for bad values, and for missing or malformed items.
    """
    config = folder / "core.yaml"
    label = record["label"]
    kind = record["icl_task_type"]
    uri = record["dataset_uri"]
    num_fewshot = _num_fewshot(record)
    where = f"{config}: task {label!r:.80}"
    if num_fewshot < 0:
        raise ValueError(f"{where}: num_fewshot is {num_fewshot}, expected 0 or more; {FETCH}")
    path = folder / "eval_data" / uri
    inside = (folder / "eval_data").resolve()
    if not can_be_path(uri) or not path.resolve().is_relative_to(inside):
        raise ValueError(f"{where}: dataset_uri is {uri!r:.80}, outside of {inside}; {FETCH}")
    if kind not in SHAPES:
        raise ValueError(
            f"{where}: icl_task_type is {kind!r:.80}, expected {', '.join(SHAPES)}; {FETCH}"
        )
    baseline = baselines.get(label, -1)
    if not 0 <= baseline < 1:
        raise ValueError(
            f"{folder / 'eval_meta_data.csv'}: no row has a baseline from 0 to below 100 for the task "
            f"{label!r} of {config.name}; {FETCH}"
        )
    delimiter = str(record.get("continuation_delimiter", " "))
    items = _read_items(path, kind, label)
    return Task(label, kind, num_fewshot, delimiter, baseline, items)


def _read_baselines(path: Path) -> dict[str, float]:
    """{task: accuracy of guessing, from 0 to 1}. The bundle's table has percentages."""
    baselines = {}
    try:
        with path.open(encoding="utf-8", newline="") as f:
            for row in csv.DictReader(f):
                label = row["Eval Task"]
                baselines[label] = float(row["Random baseline"]) / 100
    except (KeyError, TypeError, ValueError, csv.Error) as e:
        raise ValueError(
            f"{path}: expected the columns 'Eval Task' and 'Random baseline', the latter in percent "
            f"({type(e).__name__}: {e}); {FETCH}"
        ) from e
    return baselines


def _read_items(path: Path, kind: str, label: str) -> list[Item]:
    """The items of a file, in its order."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: the data of the task {label!r} does not exist; {FETCH}")
    items = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        where = f"{path}, line {number}"
        entry = parse_json(line, where, SHAPES[kind], remedy=FETCH)
        if kind == "language_modeling":
            context = str(entry["context"]).strip()
            items.append(Item([context], [str(entry["continuation"])], 0, number))
            continue
        is_choice = kind == "multiple_choice"
        options = [str(option) for option in entry["choices" if is_choice else "context_options"]]
        gold = entry["gold"]
        if not 0 <= gold < len(options):
            raise ValueError(
                f"{where}: gold is {gold}, expected 0 to {len(options) - 1}, the number of an "
                f"option; {FETCH}"
            )
        shared = str(entry["query" if is_choice else "continuation"])
        copies = [shared] * len(options)
        contexts = copies if is_choice else options
        continuations = options if is_choice else copies
        items.append(Item(contexts, continuations, gold, number))
    return items


# ---- prompts -------------------------------------------------------------------------------------


def make_prompts(task: Task, index: int) -> list[str]:
    """The prompts of item `index`, one for each option, all with the same solved items in front.

    A language-modeling item has two: the text without its answer, then the text with it.
    """
    item = task.items[index]
    others = [i for i in range(len(task.items)) if i != index]
    rng = random.Random(1234 + index)
    before = ""
    for i in rng.sample(others, task.num_fewshot):
        shot = task.items[i]
        context, continuation = shot.contexts[shot.gold], shot.continuations[shot.gold]
        before += f"{context}{task.delimiter}{continuation}\n\n"
    prompts = []
    if task.kind == "language_modeling":
        # a space at the end would be a separate token here, but a part of the answer's token in the
        # other prompt
        without_answer = f"{before}{item.contexts[0]}{task.delimiter}".strip()
        prompts.append(without_answer)
    for context, continuation in zip(item.contexts, item.continuations):
        prompts.append(f"{before}{context}{task.delimiter}{continuation}")
    return prompts


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """The number of leading tokens that all rows share."""
    shared = 0
    for column in zip(*rows):
        if len(set(column)) > 1:
            break
        shared += 1
    return shared


@dataclass(frozen=True)
class Rows:
    """The prompts of one item as tokens.

    The tokens of prompt i that count are tokens[i][starts[i]:].
    """

    index: int
    tokens: list[list[int]]
    starts: list[int]

    @property
    def width(self) -> int:
        """The length of the longest prompt, rounded up to a multiple of 64."""
        longest = max(map(len, self.tokens))
        return -(-longest // 64) * 64


def make_rows(task: Task, index: int, tokens: list[list[int]], max_tokens: int) -> Rows:
    """The rows of item `index` from the tokens of its prompts, BOS first.

    Longer prompts are cut to their last `max_tokens` tokens.
    """
    if task.kind == "schema":
        backwards = [row[::-1] for row in tokens]
        shared = common_prefix(backwards)
        starts = [len(row) - shared for row in tokens]
    else:
        starts = [common_prefix(tokens)] * len(tokens)
    if task.kind == "language_modeling":
        tokens, starts = tokens[1:], starts[1:]
    kept, kept_starts = [], []
    for row, start in zip(tokens, starts):
        cut = max(0, len(row) - max_tokens)
        kept.append(row[cut:])
        kept_starts.append(max(1, start - cut))  # no logits predict the first token
    return Rows(index, kept, kept_starts)


# ---- evaluation ----------------------------------------------------------------------------------


class Model(Protocol):
    """The part of `gpt.GPT` that evaluation needs."""

    cos: torch.Tensor  # the rotary tables: a row for each position

    def get_device(self) -> torch.device: ...

    def __call__(self, ids: torch.Tensor, /) -> torch.Tensor: ...


class Encoder(Protocol):
    """The part of `tokenizer.Tokenizer` that evaluation needs."""

    def get_bos_token_id(self) -> int: ...

    def encode(self, text: list[str], prepend: int) -> list[list[int]]: ...


class RowScore(NamedTuple):
    """How well a model predicts the tokens of a row that count."""

    loss: float  # mean, in nats; NaN if no token counts
    likeliest: bool  # whether each of them is the most likely one


@torch.no_grad()
def score(model: Model, batch: Sequence[Rows], pad: int) -> list[list[RowScore]]:
    """The score of each row of each item of a batch.

    model: ids (B, T) int64 -> logits (B, T, vocab_size). pad: the id that fills up rows; earlier
    tokens do not see it.
    """
    # all rows of all items, padded to the same width
    width = max(rows.width for rows in batch)
    padded: list[list[int]] = []
    spans: list[tuple[int, int]] = []  # of the tokens that count
    for rows in batch:
        for row, start in zip(rows.tokens, rows.starts):
            padding = [pad] * (width - len(row))
            padded.append(row + padding)
            spans.append((start, len(row)))
    ids = torch.tensor(padded, device=model.get_device())
    logits = model(ids).float()

    # the logits of position t predict token t + 1
    results = []
    for i, (start, end) in enumerate(spans):
        predicted = logits[i, start - 1 : end - 1]
        targets = ids[i, start:end]
        loss = F.cross_entropy(predicted, targets, reduction="none").mean()
        is_likeliest = predicted.argmax(dim=-1) == targets
        results.append(torch.stack([loss, is_likeliest.all().float()]))
    pairs = torch.stack(results).tolist()  # the only wait for the device

    # hand the results out item by item
    scores = iter([RowScore(loss, bool(likeliest)) for loss, likeliest in pairs])
    return [list(islice(scores, len(rows.tokens))) for rows in batch]


def make_batches(group: Sequence[Rows]) -> Iterator[list[Rows]]:
    """The items of a group in batches, sorted by length."""
    batch: list[Rows] = []
    for rows in sorted(group, key=lambda rows: (rows.width, rows.index)):
        num_rows = sum(len(item.tokens) for item in (*batch, rows))
        is_full = num_rows * rows.width > BATCH_TOKENS
        if batch and is_full:
            yield batch
            batch = []
        batch.append(rows)
    yield batch


def is_right(task: Task, index: int, scores: Sequence[tuple[float, bool]]) -> bool:
    """Whether the model answers item `index` correctly, from the `score` of its rows."""
    if task.kind == "language_modeling":
        [(loss, likeliest)] = scores
        return likeliest and not math.isnan(loss)
    # the first of the lowest losses; an option without tokens that count has NaN, which wins only
    # as the first option
    losses = [loss for loss, _ in scores]
    answer = min(range(len(losses)), key=losses.__getitem__)
    return task.items[index].gold == answer


def evaluate_group(
    model: Model, tokenizer: Encoder, task: Task, group: Sequence[int]
) -> dict[int, bool]:
    """{item number: whether the answer is correct} of the items of a group."""
    bos = tokenizer.get_bos_token_id()
    max_tokens = model.cos.size(0)  # the length of the rotary tables

    # tokenize all prompts of the group at once, then hand them out item by item
    prompts = [make_prompts(task, index) for index in group]
    every_prompt = [text for texts in prompts for text in texts]
    tokens = iter(tokenizer.encode(every_prompt, prepend=bos))
    rows = []
    for index, texts in zip(group, prompts):
        of_item = list(islice(tokens, len(texts)))
        rows.append(make_rows(task, index, of_item, max_tokens))

    correct = {}
    for batch in make_batches(rows):
        for item, scores in zip(batch, score(model, batch, bos)):
            correct[item.index] = is_right(task, item.index, scores)
    return correct


def evaluate_task(model: Model, tokenizer: Encoder, task: Task) -> list[bool]:
    """Whether the model answers each item of a task correctly, in the order of `task.items`.

    Collective.
    """
    _, rank, _, world_size = get_dist_info()
    num_items = len(task.items)
    groups = []
    for first in range(0, num_items, GROUP):
        end = min(first + GROUP, num_items)
        groups.append(range(first, end))

    def of_this_rank() -> dict[int, bool]:
        """{item number: whether the answer is correct} of this rank's groups."""
        correct: dict[int, bool] = {}
        for group in groups[rank::world_size]:
            correct |= evaluate_group(model, tokenizer, task, group)
        return correct

    by_index: dict[int, bool] = {}
    for of_rank in gather_results(of_this_rank):
        by_index |= of_rank
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


def evaluate_core(model: Model, tokenizer: Encoder, tasks: Sequence[Task]) -> Iterator[Score]:
    """Collective. Evaluate one task after the other."""
    for task in tasks:
        yield Score(task, evaluate_task(model, tokenizer, task))


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """CORE and the tasks' results as JSON values.

    {"core_metric": mean over tasks, "results": {task: accuracy}, "centered_results": {task:
    centered accuracy}}
    """
    total = sum(score.centered for score in scores)
    return {
        "core_metric": total / len(scores),
        "results": {score.task.label: score.accuracy for score in scores},
        "centered_results": {score.task.label: score.centered for score in scores},
    }


def describe_items(core: Mapping[str, Any]) -> str:
    """How much a score in eval.json is of: "7 tasks, 140 items". Older files have no number of items."""
    tasks = counted(len(core["results"]), "task")
    return f"{tasks}, {counted(core['items'], 'item')}" if "items" in core else tasks


def write_csv(path: Path, result: Mapping[str, Any]) -> None:
    """Write a `summary` in nanochat's format.

    The columns are task, accuracy and centered; CORE is in the last line.
    """
    rows = [("Task", "Accuracy", "Centered")]
    for label, accuracy in result["results"].items():
        centered = result["centered_results"][label]
        rows.append((label, f"{accuracy:.6f}", f"{centered:.6f}"))
    core = f"{result['core_metric']:.6f}"
    rows.append(("CORE", "", core))
    text = ""
    for task, accuracy, centered in rows:
        text += f"{task:<35}, {accuracy:<10}, {centered:<10}\n"
    write_bytes(path, text.encode())
