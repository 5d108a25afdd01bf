#!/usr/bin/env bash
# Warmup, stable, decay: one run at a constant learning rate, and three decay branches. Each branch is a fork whose rate
# falls to a twentieth over a fifth of the steps before it. So three horizons cost hardly more than the longest one.
# Cost: depth 12 on 2.2e9 tokens, about 1.7e18 FLOPs: an estimated 9 minutes on 8 H100s at 40 % utilization. TINY=1 runs
# on 2 CPU cores without a network in under 2 minutes.
#
#   bash runs/wsd.sh                             # or with a name: bash runs/wsd.sh mine
#   TINY=1 bash runs/wsd.sh                      # a small model on a CPU
#   DRY_RUN=1 bash runs/wsd.sh                   # print the commands, run nothing
#
# Needs data and a tokenizer from the first stages of speedrun.sh (TINY=1 makes its own). You can run it again at any
# time: it leaves finished runs as they are and resumes unfinished ones. All runs are below NANOCHAT_BASE_DIR.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NAME="${1:-stable}"
if [[ -n "$TINY" ]]; then depth=2 steps=(20 40 60); else depth=12 steps=(1000 2000 3000); fi

saves="$(IFS=,; echo "${steps[*]}")"
train "$NAME" --depth="$depth" --num-iterations="${steps[2]}" --warmdown-steps=0 --save-at="$saves"
for step in "${steps[@]}"; do
    decay="$((step / 5))"
    fork "$NAME-decay-$step" "$NAME@$step" --num-iterations="$((step + decay))" --warmdown-steps="$decay"
done
run python -m scripts.status "$NAME" "${steps[@]/#/$NAME-decay-}"
