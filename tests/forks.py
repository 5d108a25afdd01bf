"""Hand-made forks: the record that makes a run directory one, for commands that only read it."""

import json
from pathlib import Path
from typing import Any


def as_fork(
    run_dir: Path, parent: str, step: int, *, tokens: int = 0, **changes: list[Any]
) -> Path:
    """Make a run directory a fork. `changes`: [the parent's value, the fork's value] of settings."""
    path = run_dir / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {"max_seq_len": 64}
    record = {
        "run": parent,
        "checkpoint": f"checkpoint-{step}",
        "step": step,
        "tokens": tokens,
        "checksum": "0" * 32,
        "changes": changes,
    }
    values = {name: value for name, (_, value) in changes.items()}
    fork_from = f"{parent}@{step}"
    path.write_text(json.dumps({**config, **values, "fork_from": fork_from, "fork": record}))
    return run_dir
