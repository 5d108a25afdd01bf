"""
What to use in place of flags of other programs, and of older versions of this one.

    $ python -m scripts.base_train --batch-size=8
    error: --batch-size: use --device-batch-size for the rows per forward pass of one process, or ...
"""

SECTION = (
    "each setting has its own flag, such as --data-path=DIR or --num-iterations=1000; for gpt-simple's file, "
    "python -m scripts.help --translate FILE prints the command line"
)
OLD_FLAGS = {
    "--log-every": "omit it; every step is printed",
    **dict.fromkeys(
        ("--row-losses", "--no-row-losses"), "omit it; the losses of rows are always kept"
    ),
    "--object-storage-cache": "omit it; copies are in <base dir>/object_storage, and NANOCHAT_BASE_DIR moves that",
    "--eval-bundle": "omit it; the tasks of the CORE metric are in <base dir>/eval_bundle",
    "--keep-milestone-every": "use --save-at=N*, which saves every Nth step and never deletes these checkpoints",
    "--allow-budget-mismatch": "set allow_budget_mismatch: true in the curriculum's file",
    "--resume-from-step": "use --resume=PATH to resume from that checkpoint, or --resume=auto (the default) to resume "
    "from the newest",
    "--allow-curriculum-change": "a run keeps its curriculum; to continue with a different one, start a new run "
    "(--model-tag) with --fork-from=RUN@STEP",
    **dict.fromkeys(
        ("--init-optimizer", "--init-data"), "use --fork-from=RUN@STEP, which continues everything"
    ),
    "--batch-size": "use --device-batch-size for the rows per forward pass of one process, or --total-batch-size for "
    "the tokens per step of all processes",
    **dict.fromkeys(
        ("--learning-rate", "--lr"),
        "each kind of parameter has its own: --matrix-lr, "
        "--embedding-lr, --unembedding-lr and --scalar-lr",
    ),
    # gpt-simple's
    **dict.fromkeys(("--data", "--training", "--optimizer", "--model"), SECTION),
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
