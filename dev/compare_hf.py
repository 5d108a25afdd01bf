"""Compare an export, as transformers and EleutherAI's lm-eval read it, with its run. Both are
installed in a separate environment (pip install torch transformers lm-eval accelerate).

    python -m dev.compare_hf mine --hf-python VENV/bin/python [--out FOLDER]

1. `scripts.export --to=hf` writes the export. Offline, `AutoModelForCausalLM.from_pretrained` gives
   our logits in float32, also with padding on the left and beyond sequence_len. `generate` gives
   our tokens, with and without its cache, and in a padded batch. So does the model after
   `save_pretrained` and `from_pretrained`. `AutoTokenizer` gives our ids of hard texts and of
   prose. A step of `Trainer` moves the weights as far with gradient accumulation and with gradient
   checkpointing as without.
2. `lm_eval` scores a small multiple-choice task and a likelihood task, made from text that is part
   of every Python. Our model scores the same requests: the sum of the log-probabilities of the
   continuation after BOS and context.

Exit code 1 if a difference exceeds its limit. --out keeps the export.
"""

import copy
import json
import tempfile
from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dev import peers

LOGITS, SCORES = 1e-5, 1e-4  # largest differences that are accepted
STEP = 1e-5  # the same for a step of training, relative to its length
NUM_TOKENS = 200  # to generate
NUM_ITEMS = 24  # per task
PADDING = 7
TASKS: dict[str, dict[str, Any]] = {
    "exact_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "exact_likelihood": {
        "output_type": "loglikelihood",
        "doc_to_target": " {{choices[gold]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
}


# ---- runs with transformers, without our package -------------------------------------------------


def run_transformers(work: Path) -> None:
    """Compute logits, tokens and ids with transformers: work/requests.pt -> work/results.pt."""
    requests = torch.load(work / "requests.pt")
    rows = requests["rows"]
    texts = requests["texts"]
    model, tokenizer = opened(requests["out"])
    model.save_pretrained(work / "saved")
    tokenizer.save_pretrained(work / "saved")
    reloaded, reloaded_tokenizer = opened(work / "saved")
    model.generation_config.eos_token_id = None  # generate all of NUM_TOKENS
    results = {
        "transformers": import_module("transformers").__version__,
        "ids": [tokenizer(text)["input_ids"] for text in texts],
        "reloaded ids": [reloaded_tokenizer(text)["input_ids"] for text in texts],
        "steps": (
            trained(model, rows, work, 4, 1, False),
            trained(model, rows, work, 1, 4, False),
            trained(model, rows, work, 1, 4, True),
        ),
    }
    with torch.no_grad():
        results["logits"] = model(rows).logits
        results["saved"] = reloaded(rows).logits
        results["padded"] = padded_logits(model, rows, tokenizer.pad_token_id)
        prompts = [rows[:1, :n] for n in peers.PROMPTS]
        results["generated"] = [continued(model, prompt)[0] for prompt in prompts]
        results["uncached"] = [continued(model, prompt, use_cache=False)[0] for prompt in prompts]
        results["batch"] = continued_batch(model, prompts, tokenizer.pad_token_id)
        results["beams"] = [
            continued(model, prompts[0], 30, num_beams=3, use_cache=cached)
            for cached in (True, False)
        ]
    torch.save(results, work / "results.pt")


def opened(folder: Path | str) -> tuple[Any, Any]:
    """The (model in float32, tokenizer) of an export."""
    transformers = import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    return model.eval(), tokenizer


def padded_logits(model: Any, rows: torch.Tensor, pad: int) -> torch.Tensor:
    """The logits of rows with padding on the left."""
    padding = torch.full((len(rows), PADDING), pad)
    mask = torch.cat((torch.zeros_like(padding), torch.ones_like(rows)), dim=1)
    logits = model(torch.cat((padding, rows), dim=1), attention_mask=mask).logits
    return logits[:, PADDING:]


def continued(
    model: Any, prompt: torch.Tensor, max_new_tokens: int = NUM_TOKENS, **how: Any
) -> list[list[int]]:
    """The tokens that follow a prompt."""
    # BOS is also the padding token: without a mask, generate would take the first token for padding
    tokens = model.generate(
        prompt,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        attention_mask=torch.ones_like(prompt),
        **how,
    )
    return tokens[:, prompt.size(1) :].tolist()


def continued_batch(model: Any, prompts: Sequence[torch.Tensor], pad: int) -> list[list[int]]:
    """The tokens that follow each prompt, in one batch with padding on the left."""
    longest = max(prompt.size(1) for prompt in prompts)
    batch = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(batch)
    for i, prompt in enumerate(prompts):
        start = longest - prompt.size(1)
        batch[i, start:] = prompt
        mask[i, start:] = 1
    tokens = model.generate(batch, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False)
    return tokens[:, longest:].tolist()


def trained(
    model: Any,
    rows: torch.Tensor,
    work: Path,
    batch_size: int,
    micro_batches: int,
    checkpointing: bool,
) -> torch.Tensor:
    """How one step of Trainer on four rows moves the weights, as a vector. One row has fewer labels
    than the others."""
    transformers = import_module("transformers")
    trained_model, labels = copy.deepcopy(model), rows.clone()
    labels[0, : rows.size(1) // 2] = -100
    arguments = transformers.TrainingArguments(
        str(work / "trainer"),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=micro_batches,
        gradient_checkpointing=checkpointing,
        max_steps=1,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels)]
    transformers.Trainer(trained_model, arguments, train_dataset=data).train()
    pairs = zip(trained_model.parameters(), model.parameters(), strict=True)
    return torch.cat([(after - before).detach().flatten() for after, before in pairs])


# ---- runs here -----------------------------------------------------------------------------------


def items(num: int) -> list[dict[str, Any]]:
    """Multiple-choice items: which of four continuations belongs to a text?"""
    texts = [" ".join(text.split()) for text in peers.prose() if len(text) > 1500][:num]
    questions = []
    for i, text in enumerate(texts):
        ends = [texts[(i + j) % num][600 : 600 + 20 + 9 * j].strip() for j in range(4)]
        gold = i % 4
        questions.append(
            {"query": text[300:600].strip(), "choices": ends[-gold:] + ends[:-gold], "gold": gold}
        )
    return questions


def own_scores(model: Any, tokenizer: Any, questions: list[dict[str, Any]]) -> list[list[float]]:
    """For each item, the log-probability in nats of each choice after the query and a space."""
    bos, scores = tokenizer.get_bos_token_id(), []
    for item in questions:
        query, scores_of_item = item["query"], []
        start = len(tokenizer.encode(query, prepend=bos)) - 1
        for choice in item["choices"]:
            ids = torch.tensor([tokenizer.encode(f"{query} {choice}", prepend=bos)])
            with torch.no_grad():
                losses = model(ids[:, :-1], ids[:, 1:], loss_reduction="none")
            scores_of_item.append(-losses[0, start:].sum().item())
        scores.append(scores_of_item)
    return scores


class Scores(NamedTuple):
    """What lm-eval reports about TASKS."""

    accuracy: float
    choices: list[list[float]]  # log-probabilities of each item's choices
    ends: list[list[float]]  # those of the right continuations


def write_tasks(folder: Path) -> None:
    """Write TASKS and their items for lm-eval."""
    folder.mkdir()
    items_file = folder / "items.jsonl"
    for name, fields in TASKS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "test_split": "test",
            "doc_to_text": "{{query}}",
            **fields,
            "dataset_kwargs": {"data_files": {"test": str(items_file)}},
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    lines = [json.dumps(item) + "\n" for item in items(NUM_ITEMS)]
    items_file.write_text("".join(lines))


def harness_scores(python: str, out: Path, work: Path) -> Scores:
    """Run lm-eval on an export."""
    write_tasks(work / "tasks")
    flags = {
        "--model": "hf",
        "--model_args": f"pretrained={out},trust_remote_code=True,dtype=float32",
        "--tasks": ",".join(TASKS),
        "--include_path": str(work / "tasks"),
        "--device": "cpu",
        "--batch_size": "8",
        "--output_path": str(work / "scores"),
    }
    peers.run(
        [python, "-m", "lm_eval", "run", *chain.from_iterable(flags.items()), "--log_samples"],
        work,
        PYTHONPATH="",
        HF_HOME=str(work / "home"),
        TOKENIZERS_PARALLELISM="false",
    )
    [file] = (work / "scores").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    return Scores(
        results["exact_choice"]["acc,none"],
        logged_scores(work / "scores", "exact_choice"),
        logged_scores(work / "scores", "exact_likelihood"),
    )


def logged_scores(folder: Path, task: str) -> list[list[float]]:
    """The log-probabilities of each item of a task, from lm-eval's log of samples."""
    [file] = folder.rglob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    samples.sort(key=lambda sample: sample["doc_id"])
    return [[float(score[0]) for score in sample["filtered_resps"]] for sample in samples]


def compare(python: str, source: str, out: Path, work: Path) -> int:
    """Run all comparisons. Returns the exit code."""
    from nanochat.integrations.fast_encoders import hard_sample
    from nanochat.tokenizer import replace_surrogates
    from scripts import export

    export.main([source, str(out), "--to=hf"])
    model, tokenizer, rows, logits, tokens = peers.ours(source, NUM_TOKENS)
    texts = [*map(replace_surrogates, hard_sample()), "<|bos|>", *peers.prose()]
    torch.save({"rows": rows, "out": str(out), "texts": texts}, work / "requests.pt")
    peers.run_step(
        python,
        "dev.compare_hf",
        "answer",
        work,
        HF_HOME=str(work / "home"),
        TOKENIZERS_PARALLELISM="false",
    )
    theirs = torch.load(work / "results.pt")
    ids = [tokenizer.encode(text, prepend=tokenizer.get_bos_token_id()) for text in texts]
    compared = peers.Comparison()
    compare_results(compared, logits, tokens, ids, theirs)
    questions = items(NUM_ITEMS)
    scores = torch.tensor(own_scores(model, tokenizer, questions))
    gold = torch.tensor([item["gold"] for item in questions])
    compare_scores(compared, scores, gold, harness_scores(python, out, work))
    return compared.end()


def compare_results(
    compared: peers.Comparison,
    logits: torch.Tensor,
    tokens: list[list[int]],
    ids: list[list[int]],
    theirs: dict[str, Any],
) -> None:
    """Compare our results with those of `run_transformers`."""
    compared.close(
        f"{logits.numel():,} logits, the largest {logits.abs().max():.2f}, with transformers "
        f"{theirs['transformers']}",
        logits,
        theirs["logits"],
        LOGITS,
    )
    compared.close("logits of padded rows", logits, theirs["padded"], LOGITS)
    compared.close(
        "logits after save_pretrained, from_pretrained", theirs["logits"], theirs["saved"]
    )
    for i, prompt in enumerate(peers.PROMPTS):
        compared.same(
            f"{NUM_TOKENS} tokens generated after a prompt of {prompt}, with its cache",
            tokens[i] == theirs["generated"][i],
        )
        compared.same("the same without its cache", tokens[i] == theirs["uncached"][i])
    compared.same("the same in a padded batch", tokens == theirs["batch"])
    length = theirs["steps"][0].norm()
    step, accumulated, checkpointed = (step / length for step in theirs["steps"])
    compared.close("a step of Trainer with four micro-batches", accumulated, step, STEP)
    compared.close("the same with gradient checkpointing", checkpointed, step, STEP)
    cached, uncached = theirs["beams"]
    compared.same("three beams, with and without its cache", cached == uncached)
    compared.same(f"ids of {len(ids)} texts, {sum(map(len, ids)):,} tokens", ids == theirs["ids"])
    compared.same("ids after save_pretrained, from_pretrained", ids == theirs["reloaded ids"])


def compare_scores(
    compared: peers.Comparison, scores: torch.Tensor, gold: torch.Tensor, theirs: Scores
) -> None:
    """Compare our log-probabilities (items, choices) with lm-eval's. `gold`: the right choices."""
    accuracy = (scores.argmax(dim=1) == gold).double().mean().item()
    compared.close(
        f"lm-eval: log-probabilities of {scores.numel()} choices",
        scores,
        torch.tensor(theirs.choices),
        SCORES,
    )
    compared.close(f"lm-eval: accuracy, {accuracy:.4f}", accuracy, theirs.accuracy, SCORES)
    compared.close(
        f"lm-eval: log-likelihood of {len(gold)} texts",
        scores.gather(1, gold[:, None]),
        torch.tensor(theirs.ends),
        SCORES,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compare. Exit code 1 if anything differs."""
    from nanochat.cli import Parser

    parser = Parser(description=__doc__)
    parser.add_argument(
        "--hf-python",
        required=True,
        help="the Python of an environment with transformers and lm-eval",
    )
    parser.add_argument(
        "run", metavar="RUN", help="a run or RUN@STEP, with a tokenizer that transformers can read"
    )
    parser.add_argument("--out", type=Path, help="keep the export in this folder")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        out = args.out.resolve() if args.out else Path(folder, "out")
        return compare(args.hf_python, args.run, out, Path(folder))


if __name__ == "__main__":
    peers.start(main, {"answer": run_transformers})
