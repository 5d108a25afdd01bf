"""What the comparisons with other programs share. Such a program has its own environment, which
can import only `dev` from this repository:

    python -m dev.compare_x ...                       starts the steps and compares their results with ours
    THEIR_PYTHON -m dev.compare_x --step=STEP DIR     runs one step; both sides exchange files in DIR

Each comparison prints a line: whether both sides are the same, by how much they differ, and what
was compared.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Step = Callable[[Path], Any]


def run_step(
    python: Path | str, module: str, step: str, work: Path, *paths: Path, **env: str
) -> None:
    """Have another Python run a step of `module`. It can import `dev`, and everything below
    `paths`."""
    link = work / "ours" / "dev"
    if not link.exists():
        link.parent.mkdir()
        link.symlink_to(Path(__file__).parent)
    below = os.pathsep.join(map(str, (*paths, link.parent)))
    run([str(python), "-m", module, f"--step={step}", str(work)], work, PYTHONPATH=below, **env)


def find_program(name: Path | str) -> str:
    """The absolute path of a program that a flag names, so that it can run in another folder.
    ValueError if it does not exist."""
    found = shutil.which(name)
    if found is None:
        raise ValueError(
            f"{name}: no such program; name the python of an environment: VENV/bin/python"
        )
    return os.path.abspath(found)  # with links: Python finds its environment by the link's place


def run(command: list[str], work: Path, **env: str) -> None:
    """Run another program, which the command names as `find_program` expects, in `work` and without
    a network. ValueError with the end of its output if it fails."""
    program, *arguments = command
    done = subprocess.run(
        [find_program(program), *arguments],
        cwd=work,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise ValueError(
            f"{' '.join(command[:4])} failed with exit code {done.returncode}:\n{done.stdout[-4000:]}"
        )


def prose() -> list[str]:
    """English text that is part of every Python."""
    import pydoc_data.topics

    return [text for _, text in sorted(pydoc_data.topics.topics.items())]


def random_texts(seed: int = 0) -> list[str]:
    """Texts from a vocabulary of a few words; many are longer than a small row."""
    import numpy as np

    rng = np.random.default_rng(seed)
    words = ["alpha", " beta", " gamma", "\n", " Ä漢", " 12", "x" * 40]
    return ["".join(rng.choice(words, rng.integers(1, 200))) for _ in range(300)]


PROMPTS = (8, 300)  # lengths of the prompts, in tokens, which are beginnings of the first row


def ours(source: str, num_tokens: int) -> tuple[Any, Any, Any, Any, list[list[int]]]:
    """Results of a run's model in float32 on the CPU: (model, tokenizer, four rows of prose (4, n)
    int64, the logits of the rows, a continuation of `num_tokens` tokens for each of PROMPTS).

    The rows are longer than sequence_len and than any prompt, so even layers with long windows do
    not see all of them."""
    import torch

    from nanochat.engine import Engine, load_model

    model, tokenizer, _ = load_model(source, "cpu", compute_dtype=torch.float32)
    T = max(*PROMPTS, model.config.sequence_len) + 100
    ids = torch.tensor(tokenizer.encode("\n".join(prose())))[: 4 * (T - 1)].view(4, T - 1)
    rows = torch.cat((torch.full((4, 1), tokenizer.get_bos_token_id()), ids), dim=1)
    engine = Engine(model, tokenizer)
    engine.stop_tokens = set  # type: ignore[method-assign]  # so that no token ends the text
    prompts = [rows[0, :n].tolist() for n in PROMPTS]
    generated = [
        [column[0] for column, _ in engine.generate(prompt, max_tokens=num_tokens, temperature=0.0)]
        for prompt in prompts
    ]
    with torch.no_grad():
        return model, tokenizer, rows, model(rows), generated


class Comparison:
    """Prints and counts the results of comparing."""

    def __init__(self) -> None:
        self.num = self.failed = 0

    def same(self, name: str, equal: bool, detail: str = "") -> None:
        """Count and print one result."""
        self.num += 1
        self.failed += not equal
        print(
            f"{'same' if equal else 'DIFFERS':8} {detail + ': ' if detail else ''}{name}",
            flush=True,
        )

    def close(self, name: str, a: Any, b: Any, limit: float = 0.0) -> None:
        """Compare tensors or numbers, which may differ by at most `limit`."""
        apart = float(abs(a - b).max()) if hasattr(a, "max") else abs(a - b)
        self.same(name, apart <= limit, f"{apart:.1e} apart")

    def end(self) -> int:
        """Print the total, and return the exit code: 1 if anything differs."""
        print(f"{self.failed} of {self.num} differ")
        return int(self.failed > 0)


def start(main: Callable[[], int], steps: Mapping[str, Step]) -> None:
    """Run the comparison as a command or, with --step=STEP, one of its steps."""
    if len(sys.argv) == 3 and sys.argv[1].startswith("--step="):
        steps[sys.argv[1].removeprefix("--step=")](Path(sys.argv[2]))
        return
    from nanochat.cli import run_main

    run_main(main)
