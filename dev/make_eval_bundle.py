"""Make a small synthetic `eval_bundle` with every kind of task, to try the CORE metric without a
download.

    python -m dev.make_eval_bundle DIR          # then: scripts.base_eval mine --eval=core --eval-bundle=DIR

It contains the cases that are easy to get wrong: prompts with and without examples, unusual
delimiters, equal choices, choices that are prefixes of others, contexts that end with spaces, and
prompts of several hundred tokens. Some endings repeat their context, so a model that repeats its
last token gets some items right.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from nanochat.cli import Parser, run_main
from nanochat.common import write_bytes
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import RustBPETokenizer

WORDS = (
    "the",
    "water",
    "falls",
    "over",
    "old",
    "stone",
    "walls",
    "while",
    "seven",
    "green",
    "birds",
    "sing",
    "about",
    "rain",
    "and",
    "nobody",
    "listens",
    "to",
    "them",
    "because",
    "every",
    "house",
    "has",
    "closed",
    "doors",
    "and",
    "long",
    "tables",
)


def sentence(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def choice_item(rng: random.Random, i: int) -> dict[str, Any]:
    """Four choices; in some items, two of them are equal."""
    query, choices = sentence(rng, 3, 9), [sentence(rng, 1, 4) for _ in range(4)]
    if i % 3 == 0:
        choices[2] = choices[1]
    return {"query": f"Question: {query}?", "choices": choices, "gold": rng.randrange(4)}


def long_item(rng: random.Random, i: int) -> dict[str, Any]:
    """Two to four choices; in some items, one is a prefix of another and has no token of its
    own."""
    choices = [sentence(rng, 1, 3) for _ in range(2 + i % 3)]
    if i % 6 == 0:
        choices[i // 6 % 2] = f"{choices[1 - i // 6 % 2]} {rng.choice(WORDS)}"
    return {"query": sentence(rng, 20, 300), "choices": choices, "gold": 1}


def schema_item(rng: random.Random, i: int) -> dict[str, Any]:
    start = sentence(rng, 2, 6)
    options = [f"{start} {rng.choice(WORDS)} {rng.choice(WORDS)}" for _ in range(2)]
    return {
        "context_options": options if i % 4 else options[:1] * 2,
        "continuation": sentence(rng, 2, 5),
        "gold": rng.randrange(2),
    }


def text_item(rng: random.Random, i: int) -> dict[str, Any]:
    """Every second ending repeats the last word of the context, which may end with spaces."""
    word = rng.choice(WORDS)
    return {
        "context": f"{sentence(rng, 2, 12)} {word}{' ' * (i % 3)}",
        "continuation": f"{word} {word}" if i % 2 else sentence(rng, 1, 2),
    }


TASKS: list[
    tuple[str, str, int, str | None, float, Callable[[random.Random, int], dict[str, Any]]]
] = [
    # label, kind, examples in the prompt, delimiter (None: not set), accuracy of guessing in
    # percent, function
    ("choices", "multiple_choice", 0, "\nAnswer: ", 25.0, choice_item),
    ("choices_fewshot", "multiple_choice", 3, "\nAnswer: ", 25.0, choice_item),
    ("long_choices", "multiple_choice", 2, None, 33.3, long_item),
    ("schema", "schema", 0, " ", 50.0, schema_item),
    ("schema_fewshot", "schema", 4, " ", 50.0, schema_item),
    ("text", "language_modeling", 0, " ", 0.0, text_item),
    ("text_fewshot", "language_modeling", 5, None, 0.0, text_item),
]
LABELS = tuple(task[0] for task in TASKS)


def make_eval_bundle(folder: Path, *, num_items: int = 20, labels: Sequence[str] = LABELS) -> Path:
    """Write the bundle, or only its tasks with some labels, into a folder, and return it. Every
    call writes the same."""
    table, tasks = ["Eval Task,Task Category,Random baseline\n"], []
    for label, kind, shots, delimiter, baseline, item in (
        task for task in TASKS if task[0] in labels
    ):
        rng, uri = random.Random(label), f"made_up/{label}.jsonl"
        (folder / "eval_data" / "made_up").mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(item(rng, i)) + "\n" for i in range(num_items)]
        write_bytes(folder / "eval_data" / uri, "".join(lines).encode())
        tasks.append(
            {"label": label, "dataset_uri": uri, "num_fewshot": [shots], "icl_task_type": kind}
            | ({} if delimiter is None else {"continuation_delimiter": delimiter})
        )
        table.append(f"{label},made up,{baseline}\n")
    write_bytes(
        folder / "core.yaml", yaml.safe_dump({"icl_tasks": tasks}, sort_keys=False).encode()
    )
    write_bytes(folder / "eval_meta_data.csv", "".join(table).encode())
    return folder


def make_repeater(seed: int) -> tuple[GPT, RustBPETokenizer]:
    """A model with random weights that mostly repeats the last token, so it gets some items of each
    kind right, and a tokenizer. The shape of the model depends on the seed."""
    rng = random.Random(seed)
    texts = [
        f"Question: {sentence(rng, 20, 60)}?\nAnswer: {sentence(rng, 1, 3)}" for _ in range(200)
    ]
    tokenizer = RustBPETokenizer.train_from_iterator(texts, 360)
    model = GPT(
        GPTConfig(
            sequence_len=512 if seed == 0 else 128,
            vocab_size=360,
            n_layer=2 + seed,
            n_head=2,
            n_kv_head=1 + seed % 2,
            n_embd=48,
            window_pattern="SL",
        )
    )
    model.init_weights(seed=seed, compute_dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.get_parameter("transformer.wte.weight"))
        for name, parameter in model.named_parameters():
            if name.endswith("c_proj.weight"):  # initially zero, as if the layer did not exist
                parameter.normal_(0, 0.02, generator=generator)
    return model.eval(), tokenizer


def main(argv: Sequence[str] | None = None) -> None:
    """Write the bundle."""
    parser = Parser(description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to write the bundle")
    parser.add_argument("--num-items", type=int, default=20, help="items per task")
    args = parser.parse_args(argv)
    print(make_eval_bundle(args.folder, num_items=args.num_items))


if __name__ == "__main__":
    run_main(main)
