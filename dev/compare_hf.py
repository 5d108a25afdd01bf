"""
An export in transformers, beside the run that it was made from: with transformers itself, and EleutherAI's lm-eval, in
their own environment (pip install torch transformers lm-eval accelerate).

    python -m dev.compare_hf RUN --hf-python VENV/bin/python [--out FOLDER]

1. `scripts.export --to=hf`, then there, offline: `AutoModelForCausalLM.from_pretrained` gives our logits in float32,
   for texts that are padded on the left too, and for positions beyond sequence_len; `generate` with its cache gives our
   tokens; so does the model that `save_pretrained` wrote, read again; `AutoTokenizer` gives our ids of hard texts and
   of prose.
2. `lm_eval` scores a small task of multiple choice and one of plain likelihood, made from the text that every Python
   has. Here the same requests are scored by our model: BOS + context + continuation, the sum of the log-probabilities
   of the continuation's tokens.

Exit code 1 where something differs by more than it may. --out keeps the export.
"""

import json
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dev import peers

LOGITS, SCORES = 1e-5, 1e-4  # by how much they may differ
NUM_TOKENS = 200  # generated
NUM_ITEMS = 24  # of each task
PADDING = 7
TASKS = {
    "exact_choice": """task: exact_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/items.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
target_delimiter: " "
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""",
    "exact_likelihood": """task: exact_likelihood
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/items.jsonl}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{query}}}}"
doc_to_target: " {{{{choices[gold]}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""}


# ---- there: runs with transformers, imports nothing of ours ---------------------------------------------------------

def there(work: Path) -> None:
    """Say what transformers makes of an export: work/asked.pt -> work/told.pt."""
    transformers = import_module("transformers")
    asked = torch.load(work / "asked.pt")
    rows, out = asked["rows"], asked["out"]
    rules = {"trust_remote_code": True, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(out, **rules).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    model.save_pretrained(work / "saved")
    tokenizer.save_pretrained(work / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(work / "saved", **rules).eval()
    read = transformers.AutoTokenizer.from_pretrained(work / "saved", trust_remote_code=True)
    padding = torch.full((len(rows), PADDING), tokenizer.pad_token_id)
    mask = torch.cat((torch.zeros_like(padding), torch.ones_like(rows)), dim=1)
    prompts = [rows[:1, :n] for n in peers.PROMPTS]
    model.generation_config.eos_token_id = None  # all of NUM_TOKENS
    # BOS is the padding, too: without a mask, and without an end, generate would take the first token for padding

    def continued(prompt: torch.Tensor, max_new_tokens: int = NUM_TOKENS, **how: Any) -> list[list[int]]:
        found = model.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False,
                               attention_mask=torch.ones_like(prompt), **how)
        return found[:, prompt.size(1):].tolist()

    with torch.no_grad():
        torch.save({
            "logits": model(rows).logits, "saved": again(rows).logits,
            "padded": model(torch.cat((padding, rows), dim=1), attention_mask=mask).logits[:, PADDING:],
            "generated": [continued(prompt)[0] for prompt in prompts],
            "uncached": [continued(prompt, use_cache=False)[0] for prompt in prompts],
            "beams": [continued(prompts[0], 30, num_beams=3, use_cache=cached) for cached in (True, False)],
            "ids": [tokenizer(text)["input_ids"] for text in asked["texts"]],
            "ids again": [read(text)["input_ids"] for text in asked["texts"]],
            "transformers": transformers.__version__}, work / "told.pt")


# ---- here -----------------------------------------------------------------------------------------------------------

def items(num: int) -> list[dict[str, Any]]:
    """Questions of a kind: how does this text go on? One continuation is its own, three are others'."""
    texts = [" ".join(text.split()) for text in peers.prose() if len(text) > 1500][:num]
    made = []
    for i, text in enumerate(texts):
        ends = [texts[(i + j) % num][600:600 + 20 + 9 * j].strip() for j in range(4)]
        gold = i % 4
        made.append({"query": text[300:600].strip(), "choices": ends[-gold:] + ends[:-gold], "gold": gold})
    return made


def own_scores(model: Any, tokenizer: Any, asked: list[dict[str, Any]]) -> list[list[float]]:
    """For each item the log-probability of each choice behind the query and a blank, in nats."""
    bos = tokenizer.get_bos_token_id()
    scores: list[list[float]] = []
    for item in asked:
        context = tokenizer.encode(item["query"], prepend=bos)
        scores.append([])
        for choice in item["choices"]:
            ids = torch.tensor([tokenizer.encode(f"{item['query']} {choice}", prepend=bos)])
            with torch.no_grad():
                told = torch.log_softmax(model(ids[:, :-1]), dim=-1)
            of_tokens = told.gather(2, ids[:, 1:, None])[0, :, 0]
            scores[-1].append(of_tokens[len(context) - 1:].sum().item())
    return scores


def harness_scores(python: str, out: Path, work: Path) -> tuple[dict[str, Any], Any, Any]:
    """(results, log-probabilities of each item's choices, of each item's own continuation) by lm-eval."""
    folder = work / "tasks"
    folder.mkdir()
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    lines = [json.dumps(item) + "\n" for item in items(NUM_ITEMS)]
    (folder / "items.jsonl").write_text("".join(lines))
    peers.run([python, "-m", "lm_eval", "run", "--model", "hf", "--model_args",
               f"pretrained={out},trust_remote_code=True,dtype=float32", "--tasks", ",".join(TASKS),
               "--include_path", str(folder), "--device", "cpu", "--batch_size", "8",
               "--output_path", str(work / "scores"), "--log_samples"],
              work, PYTHONPATH="", HF_HOME=str(work / "home"), TOKENIZERS_PARALLELISM="false")
    [results] = (work / "scores").rglob("results_*.json")
    samples = {}
    for name in TASKS:
        [file] = (work / "scores").rglob(f"samples_{name}_*.jsonl")
        found = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        samples[name] = [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in found]
    return json.loads(results.read_text())["results"], samples["exact_choice"], samples["exact_likelihood"]


def compare(python: str, source: str, out: Path, work: Path) -> int:
    """All of it; the exit code."""
    from nanochat.integrations.fast_encoders import hard_sample
    from nanochat.tokenizer import replace_surrogates
    from scripts import export

    export.main([source, str(out), "--to=hf"])
    model, tokenizer, rows, logits, own = peers.ours(source, NUM_TOKENS)
    texts = [*map(replace_surrogates, hard_sample()), "<|bos|>", *peers.prose()]
    torch.save({"rows": rows, "out": str(out), "texts": texts}, work / "asked.pt")
    peers.run_there(python, "dev.compare_hf", "answer", work, HF_HOME=str(work / "home"),
                    TOKENIZERS_PARALLELISM="false")
    told = torch.load(work / "told.pt")
    encoded = [tokenizer.encode(text, prepend=tokenizer.get_bos_token_id()) for text in texts]
    compared = peers.Comparison()
    compared.close(f"logits of {logits.numel():,}, the largest {logits.abs().max():.2f}, with transformers "
                   f"{told['transformers']}", logits, told["logits"], LOGITS)
    compared.close("logits of padded rows", logits, told["padded"], LOGITS)
    compared.close("logits after save_pretrained, from_pretrained", told["logits"], told["saved"])
    for i, prompt in enumerate(peers.PROMPTS):
        compared.same(f"{NUM_TOKENS} tokens generated after a prompt of {prompt}, with its cache",
                      own[i] == told["generated"][i])
        compared.same("the same without its cache", own[i] == told["uncached"][i])
    compared.same("three beams, with and without its cache", told["beams"][0] == told["beams"][1])
    compared.same(f"ids of {len(texts)} texts, {sum(map(len, encoded)):,} tokens", encoded == told["ids"])
    compared.same("ids after save_pretrained, from_pretrained", encoded == told["ids again"])
    results, choices, own_ends = harness_scores(python, out, work)
    asked = items(NUM_ITEMS)
    scores = torch.tensor(own_scores(model, tokenizer, asked))
    gold = torch.tensor([item["gold"] for item in asked])
    accuracy = (scores.argmax(dim=1) == gold).double().mean().item()
    compared.close(f"lm-eval: log-probabilities of {scores.numel()} choices", scores, torch.tensor(choices), SCORES)
    compared.close(f"lm-eval: accuracy, {accuracy:.4f}", accuracy, results["exact_choice"]["acc,none"], SCORES)
    compared.close(f"lm-eval: log-likelihood of {len(gold)} texts", scores.gather(1, gold[:, None]),
                   torch.tensor(own_ends), SCORES)
    return compared.end()


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; 1 on a difference."""
    from nanochat.cli import Parser

    parser = Parser(description=__doc__)
    parser.add_argument("--hf-python", required=True, help="Python of an environment with transformers and lm-eval")
    parser.add_argument("run", metavar="RUN", help="or RUN@STEP, with a tokenizer that transformers reads")
    parser.add_argument("--out", type=Path, help="where the export goes (default: nowhere that stays)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        return compare(args.hf_python, args.run, args.out or Path(folder) / "out", Path(folder))


if __name__ == "__main__":
    peers.start(main, {"answer": there})
