"""
The flags of a run: what scripts.base_train takes, and scripts.validate with it.

Whether a flag may change when a run goes on stands in the table of `settings.py`, by its name.
"""

from argparse import ArgumentParser

from nanochat.attention import MODES
from nanochat.dataset import DEFAULT_DATASET, FORMATS
from nanochat.order import LAYOUTS
from nanochat.sample_data import DEFAULT_SPLIT, ORDERS


def add_flags(p: ArgumentParser) -> None:
    """Add them all, in groups."""
    for add in (_run, _model, _data, _horizon, _optimization, _looking, _long_runs):
        add(p)


def _run(p: ArgumentParser) -> None:
    g = p.add_argument_group("run")
    g.add_argument("--run", default="dummy", help="wandb run name; dummy = no wandb")
    g.add_argument("--model-tag", help="name of the run directory (default: d<depth>)")
    g.add_argument("--resume", default="auto", help="auto: newest good checkpoint, or start | scratch | a checkpoint")
    g.add_argument("--force", action="store_true", help="with --resume scratch: delete the run that is there")
    g.add_argument("--device-type", default="", help="cuda | mps | cpu (default: the best there is)")
    g.add_argument("--dtype", default="auto", help="of activations and embeddings: auto | bfloat16 | float32")
    g.add_argument("--compile", default="auto", choices=["auto", "on", "off"], help="torch.compile; auto = on CUDA")
    g.add_argument("--seed", type=int, default=42, help="of the weights and of the order of the data")


def _model(p: ArgumentParser) -> None:
    g = p.add_argument_group("model")
    g.add_argument("--depth", type=int, default=20, help="layers; the one dial: width and batch follow from it")
    g.add_argument("--aspect-ratio", type=int, default=64, help="width = depth * aspect ratio, up to a whole head")
    g.add_argument("--head-dim", type=int, default=128, help="size of an attention head")
    g.add_argument("--max-seq-len", type=int, default=2048, help="T: tokens a row trains on")
    g.add_argument("--attention-mode", default="causal", choices=list(MODES), help="the last two keep it in a document")
    g.add_argument("--window-pattern", default="SSSL", help="attention windows, tiled over layers: L full, S a quarter")


def _data(p: ArgumentParser) -> None:
    g = p.add_argument_group("data")
    g.add_argument("--data-path", help="folder, here or in a store (s3://, gs://, az://, msc://); of pairs also their "
                   f"paths without .bin, with commas between them (default: the {DEFAULT_DATASET.name} download)")
    g.add_argument("--val-path", help="validation files (default: the last file below --data-path; with --order "
                   "megatron the whole documents of the valid split)")
    g.add_argument("--data-format", default="text", choices=list(FORMATS), help="text: parquet, jsonl, jsonl.gz | "
                   "shards: what scripts.tok_shards makes | megatron: Megatron's pairs of .bin and .idx")
    g.add_argument("--order", default="lanes", choices=ORDERS, help="lanes: documents, packed | megatron: its own "
                   "samples in its own shuffled order, row i of the run is sample i. Instead of reset_attention_mask: "
                   "--attention-mode; reset_position_ids would change nothing")
    g.add_argument("--split", help=f"with --order megatron: shares of training, validation, test (default: "
                   f"{DEFAULT_SPLIT}; all for training where validation has data of its own)")
    g.add_argument("--blend-weights", metavar="A,B", help="with --order megatron: the weight of each prefix (default: "
                   "all of each prefix once; of a single one as much as it takes)")
    g.add_argument("--eod-mask-loss", action="store_true", help="with --order megatron: no loss where the input is EOD")
    g.add_argument("--index-cache", metavar="DIR", help="where shuffled indices of --order megatron are kept (default: "
                   "<base dir>/index_cache)")
    g.add_argument("--object-storage-cache", metavar="DIR", help="where indices of data in a store are copied to "
                   "(default: <base dir>/object_storage)")
    g.add_argument("--curriculum", help="YAML file: which buckets (subfolders of the data) are mixed when")
    g.add_argument("--allow-bucket-exhaustion", action="store_true", help="go on without a bucket that has run dry")
    g.add_argument("--allow-curriculum-change", action="store_true", help="take up another curriculum at a restart")
    g.add_argument("--plan", default="error", choices=["error", "warn", "off"], help="where the data end before "
                   "the run does, which is computed first: do not start | warn | do not compute it")
    g.add_argument("--strict", action="store_true", help="a broken line of jsonl is an error")
    g.add_argument("--tokenizer-dir", help="default: the tokenizer folder beside the data, or <base dir>/tokenizer, "
                   "where scripts.tok_train puts it")
    g.add_argument("--tokenizer-threads", type=int, default=4, help="threads per process that read and tokenize")
    g.add_argument("--packing", default="bestfit", choices=list(LAYOUTS), help="how documents become rows")
    g.add_argument("--no-pack", dest="pack", action="store_false", help="with --packing binned: one entry a row")
    g.add_argument("--long-docs", default="crop", choices=["crop", "split"], help="what does not fit: dropped or later")
    g.add_argument("--overlap", type=int, default=64, help="context tokens repeated before a split document's rest")
    g.add_argument("--buffer-size", type=int, default=128, help="documents that wait in a lane for a row they fit")
    g.add_argument("--lanes", type=int, default=-1, help="V; -1: the largest divisor of the rows per step up to 64")
    g.add_argument("--leaves", type=int, default=-1, help="K; -1: the next power of two >= the number of processes")


def _horizon(p: ArgumentParser) -> None:
    g = p.add_argument_group("horizon (the first that is set counts; a curriculum stands before the ratio)")
    g.add_argument("--num-iterations", type=int, default=-1, help="optimizer steps")
    g.add_argument("--target-flops", type=float, default=-1.0, help="steps to spend so many FLOPs")
    g.add_argument("--target-param-data-ratio", type=float, default=12.0, help="tokens per scaling parameter")


def _optimization(p: ArgumentParser) -> None:
    g = p.add_argument_group("optimization (rates are for the reference depth and batch; they are scaled from there)")
    g.add_argument("--device-batch-size", type=int, default=32, help="B: rows in one forward pass; less if memory ends")
    g.add_argument("--total-batch-size", type=int, default=-1, help="tokens a step; -1: from the horizon")
    g.add_argument("--embedding-lr", type=float, default=0.3, help="embeddings (AdamW)")
    g.add_argument("--unembedding-lr", type=float, default=0.008, help="output head (AdamW)")
    g.add_argument("--matrix-lr", type=float, default=0.02, help="matrices (Muon)")
    g.add_argument("--scalar-lr", type=float, default=0.5, help="per-layer scalars (AdamW)")
    g.add_argument("--weight-decay", type=float, default=0.28, help="cautious weight decay of matrices")
    g.add_argument("--warmup-steps", type=int, default=40)
    g.add_argument("--warmdown-ratio", type=float, default=0.65, help="share of the run in which rates come down")
    g.add_argument("--final-lr-frac", type=float, default=0.05, help="rates at the end, of the full rates")


def _looking(p: ArgumentParser) -> None:
    g = p.add_argument_group("looking and saving (every N steps and at the end; -1: never, or saving at the end only)")
    g.add_argument("--eval-every", type=int, default=250)
    g.add_argument("--eval-tokens", type=int, default=80 * 524288, help="validation tokens an evaluation reads")
    g.add_argument("--sample-every", type=int, default=2000)
    g.add_argument("--save-every", type=int, default=-1)
    g.add_argument("--sync-save", action="store_true", help="write checkpoints in the loop, not in a thread")
    g.add_argument("--keep-last-k", type=int, help="delete older numbered checkpoints (default: keep all)")
    g.add_argument("--keep-milestone-every", type=int, help="but never those of steps that this divides")


def _long_runs(p: ArgumentParser) -> None:
    g = p.add_argument_group("long runs")
    g.add_argument("--max-runtime-seconds", type=float, default=-1.0, help="stop in time, saved (default: "
                   "SLURM_JOB_END_TIME or NANOCHAT_MAX_RUNTIME, if set)")
    g.add_argument("--walltime-reserve-seconds", type=float, default=120.0, help="kept for the last save, at least")
    g.add_argument("--collective-timeout-seconds", type=float, default=600.0, help="a rank that hangs for "
                   "so long ends the run")
    g.add_argument("--init-from", metavar="RUN[@STEP]", help="a new run starts with the weights of another")
    g.add_argument("--init-optimizer", action="store_true", help="and with the state of its optimizer")
    g.add_argument("--init-data", default="fresh", choices=["fresh", "continue"], help="at the start of the data, or "
                   "where the other was")
    g.add_argument("--skip-steps", action="append", default=[], metavar="A:B", help="pass over the rows of steps A to "
                   "B - 1; may be given again")
