#!/usr/bin/env bash
# From an empty machine to a trained model: data, tokenizer, training, evaluation, samples, report. Two profiles:
#
#   gpu  depth 24 (1.4 B parameters) on 8.8 B tokens. Built for one box of 8 H100s (80 GB); any number of GPUs works and
#        trains on the same batches. Estimated cost at 40 % utilization (below): 3.7 hours, about $90 at $3 per
#        GPU-hour. Needs a network and 100 GB of disk (30 GB for data, the rest for checkpoints).
#   cpu  a small model on sources and docstrings of the installed packages, the same text on every machine. Needs
#        2 cores, 2 GB of memory, 2 GB of disk including packages, and no network after the install. About 6 minutes
#        plus the install.
#
#   bash speedrun.sh                      # gpu if nvidia-smi lists GPUs, else cpu
#   PROFILE=cpu bash speedrun.sh          # choose the profile: cpu or gpu
#   DRY_RUN=1 bash speedrun.sh            # print the commands, run nothing
#   WANDB_RUN=name bash speedrun.sh       # log to wandb, which is off by default
#   NGPU=4 bash speedrun.sh               # use 4 GPUs
#
# All output is below NANOCHAT_BASE_DIR (default ~/.cache/nanochat). You can run the script again at any time: it reuses
# finished stages and resumes training from the newest checkpoint. On a remote machine, start it inside screen or tmux,
# for example: screen -L -S speedrun bash speedrun.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}"
DRY_RUN="${DRY_RUN:-}"
RUN_NAME="${WANDB_RUN:-dummy}" # base_train reads "dummy" as: no wandb
CPU_ITERATIONS="${CPU_ITERATIONS:-250}"

# The data that depth 24 needs, at the default of 12 tokens per parameter:
#   parameters that count for scaling = 24 layers * 12 * 1536^2 + 32,768 * 1536 (output head) = 730 M
#   tokens = 12 * 730 M = 8.8 B; characters = 8.8 B * 4.7 per token / (1 - 0.35 cropped at row ends) = 63 B
#   shards of 250 M characters = 253; plus a fifth as a margin: 300, about 30 GB. The tokenizer reads 2 B, so 8 shards.
#   FLOPs = 8.8 B * (6 * 730 M + 0.4 G for attention) = 4.2e19; 8 H100s at 40 % of 989 TFLOP/s: 13,200 s
TOKENIZER_SHARDS=8
TRAIN_SHARDS=300

# ---- stages ---------------------------------------------------------------------------------------------------------

header() {
    if [[ -n "$DRY_RUN" ]]; then
        printf '\n# %s\n' "$1"
    else
        printf '\n==== %s (%d min %02d s since the start)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60))
    fi
}

quote() { # print a command as you would type it
    local word line=
    for word in "$@"; do
        if [[ "$word" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
            line+=" $word"
        else
            line+=" $(printf '%q' "$word")"
        fi
    done
    printf '%s' "${line# }"
}

RUNNING= BEGAN= COMMAND=
record() { # exit code: append the stage that ran, with its time, to the file that the report reads
    printf '%s\t%s\t%s\t%s\n' "$RUNNING" $((SECONDS - BEGAN)) "$1" "$COMMAND" >>"$STAGES"
    RUNNING=
}

stage() { # name, command: run the command, and return its exit code
    local name="$1" code=0
    shift
    header "$name"
    if [[ "$1" == wait_for_download ]]; then COMMAND="wait"; else COMMAND=$(quote "$@"); fi
    echo "$COMMAND"
    if [[ -n "$DRY_RUN" ]]; then return; fi
    RUNNING="$name" BEGAN=$SECONDS
    "$@" || code=$?
    record $code
    if [[ $code != 0 ]]; then echo "speedrun: stage '$name' failed ($code); fix it and run this script again" >&2; fi
    return $code
}

# The download runs while the tokenizer trains. Background jobs of scripts ignore Ctrl-C, so on_exit ends it.
DOWNLOAD=
on_exit() {
    local code=$?
    if [[ -n "$RUNNING" ]]; then
        echo "speedrun: stopped in stage '$RUNNING'; to continue, run this script again" >&2
        record $code
    fi
    if [[ -n "$DOWNLOAD" ]]; then kill "$DOWNLOAD" 2>/dev/null || true; fi
}
trap on_exit EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

start_download() { # command
    header "download the other shards in the background"
    printf '%s &\n' "$(quote "$@")"
    if [[ -n "$DRY_RUN" ]]; then return; fi
    echo "log: $NANOCHAT_BASE_DIR/download.log"
    "$@" >"$NANOCHAT_BASE_DIR/download.log" 2>&1 &
    DOWNLOAD=$!
}

wait_for_download() {
    local pid="$DOWNLOAD" code=0
    wait "$pid" || code=$?
    DOWNLOAD=
    if [[ $code != 0 ]]; then
        echo "the download failed; the end of $NANOCHAT_BASE_DIR/download.log:" >&2
        tail -n 20 "$NANOCHAT_BASE_DIR/download.log" >&2
    fi
    return $code
}

end_if_stopped() { # end the script if the training was stopped before its last step
    local code=0
    if [[ -n "$DRY_RUN" ]]; then return; fi
    python -m scripts.status "$TAG" --exit-code >/dev/null || code=$?
    if [[ $code == 10 ]]; then
        echo "speedrun: the training was stopped before its last step; to continue, run this script again" >&2
        exit 10
    fi
}

STEP_0=b4e972893cbcf8de # digest of the first batch of the cpu profile: the same for everyone, because the corpus is
check_first_batch() { # log: print whether the run began with the batch with which everyone's run begins
    local digest
    digest=$({ sed -n 's/^{"step": 0, "digest": "\([0-9a-f]*\)".*/\1/p' "$1" 2>/dev/null || true; } | tail -n 1)
    if [[ "$digest" == "$STEP_0" ]]; then
        echo "step 0 has the digest $STEP_0, as on every machine: the data is what README's figures are about"
    elif [[ -n "$digest" ]]; then
        echo "note: step 0 has the digest $digest, README's has $STEP_0: other packages or settings, so other figures"
    fi
}

# ---- profiles -------------------------------------------------------------------------------------------------------

gpu_profile() {
    local torchrun=(torchrun --standalone "--nproc_per_node=$NGPU")
    stage "shards for the tokenizer" python -m nanochat.dataset -n "$TOKENIZER_SHARDS"
    start_download python -m nanochat.dataset -n "$TRAIN_SHARDS"
    stage "tokenizer" python -m scripts.tok_train --vocab-size=32768 --max-chars=2000000000
    stage "tokenizer evaluation" python -m scripts.tok_eval
    stage "wait for the download" wait_for_download
    stage "training" "${torchrun[@]}" -m scripts.base_train -- --depth=24 --device-batch-size=16 \
        --save-every=2000 --device-type=cuda --model-tag="$TAG" --run="$RUN_NAME"
    end_if_stopped
    stage "evaluation" "${torchrun[@]}" -m scripts.base_eval "$TAG" --device-type=cuda
    stage "report" python -m scripts.report "$TAG" --stages="$STAGES"
}

cpu_profile() {
    local data="$NANOCHAT_BASE_DIR/data/sample" tokenizer="$NANOCHAT_BASE_DIR/tokenizer-sample"
    stage "sample corpus" python -m dev.make_sample_corpus --output-dir="$data"
    stage "tokenizer" python -m scripts.tok_train --data-path="$data" --output-dir="$tokenizer" --vocab-size=2048
    # A document fills many rows here, so --long-docs=crop would drop most of the tokens. Learning rates are eight times
    # the defaults, because they are scaled by sqrt(batch / 2^19 tokens), which is 1/11 here. Only backout_lambda's rate
    # is fixed. With half these rates, backout_lambda comes close to 1, where the residual stream changes its sign,
    # before the layers have learned anything, and the loss jumps from 6.6 to 7.0 (8.4 with a warm-up of 10 steps).
    stage "training" python -m scripts.base_train --data-path="$data" --tokenizer="$tokenizer" \
        --depth=4 --aspect-ratio=48 --head-dim=64 --max-seq-len=256 --total-batch-size=4096 --device-batch-size=16 \
        --num-iterations="$CPU_ITERATIONS" --warmup-steps=50 --eval-every=50 --eval-tokens=65536 --save-every=50 \
        --matrix-lr=0.16 --embedding-lr=2.4 --unembedding-lr=0.064 --tokenizer-threads=1 \
        --long-docs=split --overlap=32 --sample-every=-1 --device-type=cpu --model-tag="$TAG" --run="$RUN_NAME"
    end_if_stopped
    check_first_batch "$NANOCHAT_BASE_DIR/runs/$TAG/logs/train.jsonl"
    stage "evaluation" python -m scripts.base_eval "$TAG" --device-type=cpu --unigram-tokens=1000000
    stage "report" python -m scripts.report "$TAG" --stages="$STAGES"
    header "the real data"
    cat <<EOF
# This was a rehearsal with local text. To train on real data, download some shards (100 MB each):
#   python -m nanochat.dataset -n 8         # enough for a tokenizer and a small model
#   python -m scripts.tok_train && python -m scripts.base_train --depth=12
# On a machine with CUDA GPUs, this script does all of it: bash speedrun.sh
EOF
}

# ---- run ------------------------------------------------------------------------------------------------------------

gpus_here=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true)
PROFILE="${PROFILE:-$(if [[ "$gpus_here" -gt 0 ]]; then echo gpu; else echo cpu; fi)}"
NGPU="${NGPU:-$gpus_here}"
case "$PROFILE" in
gpu) TAG=speedrun ;;
cpu) TAG=speedrun-cpu ;;
*)
    echo "speedrun: PROFILE=$PROFILE, expected gpu or cpu" >&2
    exit 2
    ;;
esac
if [[ "$PROFILE" == gpu && "$NGPU" == 0 ]]; then
    if [[ -z "$DRY_RUN" ]]; then
        echo "speedrun: PROFILE=gpu, but nvidia-smi lists no GPU; use PROFILE=cpu or set NGPU" >&2
        exit 2
    fi
    NGPU=8 ASSUMED=" (assumed)"
fi
STAGES="$NANOCHAT_BASE_DIR/$TAG-stages.tsv"

echo "# profile $PROFILE$(if [[ "$PROFILE" == gpu ]]; then echo ", GPUs: $NGPU${ASSUMED:-}"; fi); output: $NANOCHAT_BASE_DIR"
if [[ -z "$DRY_RUN" ]]; then mkdir -p "$NANOCHAT_BASE_DIR"; fi
stage "set-up" bash dev/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
"${PROFILE}_profile"
header "done"
