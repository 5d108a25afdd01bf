# Sourced by the scripts in this folder. Their heads explain NANOCHAT_BASE_DIR, NPROC_PER_NODE, WANDB_RUN,
# DEVICE_BATCH_SIZE, CORE, TINY and DRY_RUN.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -d .venv ]]; then export PATH="$PWD/.venv/bin:$PATH"; fi
export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
TINY="${TINY:-}"
NPROC_PER_NODE="${NPROC_PER_NODE:-$(if [[ -n "$TINY" ]]; then echo 1; else echo 8; fi)}"

run() { # command: print it, and run it unless DRY_RUN is set
    echo "$*"
    if [[ -z "${DRY_RUN:-}" ]]; then "$@"; fi
}

on_all_gpus() { # module, flags: run it, with torchrun if there are several processes
    local module="$1"
    shift
    if [[ "$NPROC_PER_NODE" == 1 ]]; then
        run python -m "$module" "$@"
    else
        run torchrun --standalone "--nproc_per_node=$NPROC_PER_NODE" -m "$module" -- "$@"
    fi
}

MODEL=(--eval-every=1000 --sample-every=-1 --save-every=1000)
if [[ -n "$TINY" ]]; then
    data="$NANOCHAT_BASE_DIR/data/sample" tokenizer="$NANOCHAT_BASE_DIR/tokenizer-sample"
    [[ -f "$data/sample_corpus.json" ]] || run python -m dev.make_sample_corpus --output-dir="$data"
    [[ -f "$tokenizer/tokenizer.json" ]] ||
        run python -m scripts.tok_train --data-path="$data" --output-dir="$tokenizer" --vocab-size=1024
    # learning rates are four times the defaults, which are for long runs
    MODEL=(--data-path="$data" --tokenizer="$tokenizer" --aspect-ratio=16 --head-dim=16 --max-seq-len=128
        --total-batch-size=2048 --device-batch-size=16 --warmup-steps=10 --matrix-lr=0.08 --embedding-lr=1.2
        --unembedding-lr=0.03 --long-docs=split --overlap=16 --tokenizer-threads=1 --eval-every=1000 --eval-tokens=32768
        --sample-every=-1 --save-every=50 --keep-last-k=1 --device-type=cpu)
fi

end_if_stopped() { # tag: end the script if the run was stopped before its last step
    local code=0
    if [[ -n "${DRY_RUN:-}" ]]; then return; fi
    python -m scripts.status "$1" --exit-code >/dev/null || code=$?
    if [[ $code == 10 ]]; then
        echo "$0: the run $1 was stopped before its last step; to continue, run this script again" >&2
        exit 10
    fi
}

train() { # tag, flags: start a run, or resume it from its newest checkpoint; a finished run is left as it is
    local tag="$1"
    shift
    if [[ -n "${DEVICE_BATCH_SIZE:-}" ]]; then set -- "$@" --device-batch-size="$DEVICE_BATCH_SIZE"; fi
    if [[ -n "${WANDB_RUN:-}" ]]; then set -- "$@" --run="${WANDB_RUN}_$tag"; fi
    on_all_gpus scripts.base_train "${MODEL[@]}" --model-tag="$tag" "$@"
    end_if_stopped "$tag"
    if [[ -n "${CORE:-}" && ! -f "$NANOCHAT_BASE_DIR/runs/$tag/eval.csv" ]]; then
        on_all_gpus scripts.base_eval "$tag" --eval=core
    fi
}

fork() { # tag, RUN@STEP, flags: continue RUN from STEP as a new run that differs from it in these flags alone
    local tag="$1" from="$2"
    shift 2
    if [[ -n "${WANDB_RUN:-}" ]]; then set -- "$@" --run="${WANDB_RUN}_$tag"; fi
    on_all_gpus scripts.base_train --fork-from="$from" --model-tag="$tag" "$@"
    end_if_stopped "$tag"
}
