"""
What to use in place of flags of other programs.

    $ python -m scripts.base_train --batch-size=8
    error: --batch-size: use --device-batch-size for the rows per forward pass of one process, or ...
"""

SECTION = (
    "each setting has its own flag, such as --data-path=DIR or --num-iterations=1000; for gpt-simple's file, "
    "python -m scripts.help --translate FILE prints the command line"
)
OLD_FLAGS = {
    "--resume-from-step": "use --resume=PATH to resume from that checkpoint, or --resume=auto (the default) to resume "
    "from the newest",
    "--batch-size": "use --device-batch-size for the rows per forward pass of one process, or --total-batch-size for "
    "the tokens per step of all processes",
    **dict.fromkeys(
        ("--learning-rate", "--lr"),
        "each kind of parameter has its own: --matrix-lr, "
        "--embedding-lr, --unembedding-lr and --scalar-lr",
    ),
    # gpt-simple's
    **dict.fromkeys(("--data", "--training", "--optimizer", "--model"), SECTION),
    "--allow-budget-mismatch": "set allow_budget_mismatch: true in the curriculum's file",
    "--training.resume": "use --resume=auto (the default), --resume=scratch with --force, or --resume=PATH",
    "--training.max-steps": "use --num-iterations",
    "--training.output-dir": "use --model-tag to name the run; its folder is in NANOCHAT_BASE_DIR/runs",
    "--training.wandb-run-name": "use --run",
    **{
        f"--training.{name}": f"use --{name}"
        for name in ("keep-last-k", "max-runtime-seconds", "walltime-reserve-seconds", "seed")
    },
    "--data.path": "use --data-path",
    "--data.tokenizer": "use --tokenizer",
    "--data.format": "use --data-format=shards (for gpt-simple's pretokenized) or --data-format=text (for its jsonl)",
}
