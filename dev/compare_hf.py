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
from pathlib import Path
from typing import Any

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
    transformers = import_module("transformers")
    requests = torch.load(work / "requests.pt")
    rows, out = requests["rows"], requests["out"]
    rules = {"trust_remote_code": True, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(out, **rules).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    model.save_pretrained(work / "saved")
    tokenizer.save_pretrained(work / "saved")
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(work / "saved", **rules).eval()
    reloaded_tokenizer = transformers.AutoTokenizer.from_pretrained(
        work / "saved", trust_remote_code=True
    )
    padding = torch.full((len(rows), PADDING), tokenizer.pad_token_id)
    mask = torch.cat((torch.zeros_like(padding), torch.ones_like(rows)), dim=1)
    prompts = [rows[:1, :n] for n in peers.PROMPTS]
    model.generation_config.eos_token_id = None  # generate all of NUM_TOKENS
    # BOS is also the padding token: without a mask, generate would take the first token for padding

    def continued(
        prompt: torch.Tensor, max_new_tokens: int = NUM_TOKENS, **how: Any
    ) -> list[list[int]]:
        tokens = model.generate(
            prompt,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            attention_mask=torch.ones_like(prompt),
            **how,
        )
        return tokens[:, prompt.size(1) :].tolist()

    longest = max(peers.PROMPTS)
    batch = torch.full((len(prompts), longest), tokenizer.pad_token_id)
    for padded, prompt in zip(batch, prompts):
        padded[longest - prompt.size(1) :] = prompt
    batch_mask = torch.tensor([[0] * (longest - n) + [1] * n for n in peers.PROMPTS])
    step = trained(model, rows, work, 4, 1, False)
    accumulated = trained(model, rows, work, 1, 4, False)
    checkpointed = trained(model, rows, work, 1, 4, True)
    with torch.no_grad():
        torch.save(
            {
                "steps": (step, accumulated, checkpointed),
                "batch": model.generate(
                    batch, attention_mask=batch_mask, max_new_tokens=NUM_TOKENS, do_sample=False
                )[:, longest:].tolist(),
                "logits": model(rows).logits,
                "saved": reloaded(rows).logits,
                "padded": model(torch.cat((padding, rows), dim=1), attention_mask=mask).logits[
                    :, PADDING:
                ],
                "generated": [continued(prompt)[0] for prompt in prompts],
                "uncached": [continued(prompt, use_cache=False)[0] for prompt in prompts],
                "beams": [
                    continued(prompts[0], 30, num_beams=3, use_cache=cached)
                    for cached in (True, False)
                ],
                "ids": [tokenizer(text)["input_ids"] for text in requests["texts"]],
                "reloaded ids": [
                    reloaded_tokenizer(text)["input_ids"] for text in requests["texts"]
                ],
                "transformers": transformers.__version__,
            },
            work / "results.pt",
        )


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


def harness_scores(python: str, out: Path, work: Path) -> tuple[dict[str, Any], Any, Any]:
    """lm-eval's (results, log-probabilities of each item's choices, those of the right
    continuations)."""
    folder = work / "tasks"
    folder.mkdir()
    for name, fields in TASKS.items():  # JSON is YAML
        (folder / f"{name}.yaml").write_text(
            json.dumps(
                {
                    "task": name,
                    "dataset_path": "json",
                    "test_split": "test",
                    "doc_to_text": "{{query}}",
                    **fields,
                    "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}},
                }
            )
        )
    lines = [json.dumps(item) + "\n" for item in items(NUM_ITEMS)]
    (folder / "items.jsonl").write_text("".join(lines))
    peers.run(
        [
            python,
            "-m",
            "lm_eval",
            "run",
            "--model",
            "hf",
            "--model_args",
            f"pretrained={out},trust_remote_code=True,dtype=float32",
            "--tasks",
            ",".join(TASKS),
            "--include_path",
            str(folder),
            "--device",
            "cpu",
            "--batch_size",
            "8",
            "--output_path",
            str(work / "scores"),
            "--log_samples",
        ],
        work,
        PYTHONPATH="",
        HF_HOME=str(work / "home"),
        TOKENIZERS_PARALLELISM="false",
    )
    [results] = (work / "scores").rglob("results_*.json")
    samples = {}
    for name in TASKS:
        [file] = (work / "scores").rglob(f"samples_{name}_*.jsonl")
        answers = sorted(
            map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"]
        )
        samples[name] = [
            [float(score[0]) for score in sample["filtered_resps"]] for sample in answers
        ]
    return (
        json.loads(results.read_text())["results"],
        samples["exact_choice"],
        samples["exact_likelihood"],
    )


def compare(python: str, source: str, out: Path, work: Path) -> int:
    """Run all comparisons. Returns the exit code."""
    from nanochat.integrations.fast_encoders import hard_sample
    from nanochat.tokenizer import replace_surrogates
    from scripts import export

    export.main([source, str(out), "--to=hf"])
    model, tokenizer, rows, logits, own = peers.ours(source, NUM_TOKENS)
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
    encoded = [tokenizer.encode(text, prepend=tokenizer.get_bos_token_id()) for text in texts]
    compared = peers.Comparison()
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
            own[i] == theirs["generated"][i],
        )
        compared.same("the same without its cache", own[i] == theirs["uncached"][i])
    compared.same("the same in a padded batch", own == theirs["batch"])
    step, accumulated, checkpointed = theirs["steps"]
    compared.close(
        "a step of Trainer with four micro-batches",
        accumulated / step.norm(),
        step / step.norm(),
        STEP,
    )
    compared.close(
        "the same with gradient checkpointing", checkpointed / step.norm(), step / step.norm(), STEP
    )
    compared.same(
        "three beams, with and without its cache", theirs["beams"][0] == theirs["beams"][1]
    )
    compared.same(
        f"ids of {len(texts)} texts, {sum(map(len, encoded)):,} tokens", encoded == theirs["ids"]
    )
    compared.same("ids after save_pretrained, from_pretrained", encoded == theirs["reloaded ids"])
    results, choices, own_ends = harness_scores(python, out, work)
    questions = items(NUM_ITEMS)
    scores = torch.tensor(own_scores(model, tokenizer, questions))
    gold = torch.tensor([item["gold"] for item in questions])
    accuracy = (scores.argmax(dim=1) == gold).double().mean().item()
    compared.close(
        f"lm-eval: log-probabilities of {scores.numel()} choices",
        scores,
        torch.tensor(choices),
        SCORES,
    )
    compared.close(
        f"lm-eval: accuracy, {accuracy:.4f}", accuracy, results["exact_choice"]["acc,none"], SCORES
    )
    compared.close(
        f"lm-eval: log-likelihood of {len(gold)} texts",
        scores.gather(1, gold[:, None]),
        torch.tensor(own_ends),
        SCORES,
    )
    return compared.end()


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
