#!/usr/bin/env bash
# A batch ramp: the batch doubles twice. Each stage is a fork of the one before at its last step, and the learning rates
# grow with the square root of the batch. Only the last stage has a warmdown. The weight decay of each stage falls to 0
# at its end.
# Cost: as one run of depth 12 on 1.3e9 tokens, about 1e18 FLOPs: an estimated 6 minutes on 8 H100s at 40 % utilization.
# TINY=1 runs on 2 CPU cores without a network in under 2 minutes.
#
#   bash runs/batch_ramp.sh                      # or with a name: bash runs/batch_ramp.sh mine
#   TINY=1 bash runs/batch_ramp.sh               # a small model on a CPU
#   DRY_RUN=1 bash runs/batch_ramp.sh            # print the commands, run nothing
#
# Needs data and a tokenizer from the first stages of speedrun.sh (TINY=1 makes its own). You can run it again at any
# time: it leaves finished runs as they are and resumes unfinished ones. All runs are below NANOCHAT_BASE_DIR.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NAME="${1:-ramp}"
if [[ -n "$TINY" ]]; then depth=2 batch=2048 a=20 b=35 c=45; else depth=12 batch=131072 a=2000 b=3500 c=4750; fi

train "$NAME-1" --depth="$depth" --total-batch-size="$batch" --num-iterations="$a" --warmdown-steps=0
fork "$NAME-2" "$NAME-1@$a" --total-batch-size="$((2 * batch))" --num-iterations="$b"
fork "$NAME-3" "$NAME-2@$b" --total-batch-size="$((4 * batch))" --num-iterations="$c" --warmdown-steps="$((c - b))"
run python -m scripts.status "$NAME-1" "$NAME-2" "$NAME-3"
