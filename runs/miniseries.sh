#!/usr/bin/env bash
# A miniseries: models of several depths at one ratio of tokens to parameters, then tables and power laws.
# Cost: depths 6 to 20 at 12 tokens per parameter take 3.2e19 FLOPs, half of them for depth 20: an estimated 3 hours on
# 8 H100s at 40 % utilization. TINY=1 runs on 2 CPU cores without a network in under 8 minutes.
#
#   bash runs/miniseries.sh                      # or with a name: bash runs/miniseries.sh jan11
#   DEPTHS="6 8 10" RATIO=20 bash runs/miniseries.sh chinchilla
#   TINY=1 bash runs/miniseries.sh               # small models on a CPU
#   DRY_RUN=1 bash runs/miniseries.sh            # print the commands, run nothing
#   NPROC_PER_NODE=1 DEVICE_BATCH_SIZE=16 WANDB_RUN=mine CORE=1 bash runs/miniseries.sh
#
# Needs data and a tokenizer from the first stages of speedrun.sh (TINY=1 makes its own). You can run it again at any
# time: it reuses finished runs and resumes unfinished ones. All output is below NANOCHAT_BASE_DIR (default
# ~/.cache/nanochat): the runs NAME_d<depth>, and NAME_results with results.csv, points.csv and fit.csv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NAME="${1:-${SERIES_NAME:-miniseries}}"
if [[ -n "$TINY" ]]; then
    DEPTHS="${DEPTHS:-2 3 4}" RATIO="${RATIO:-1}"
else
    DEPTHS="${DEPTHS:-6 8 10 12 14 16 18 20}" RATIO="${RATIO:-12}"
fi

tags=()
for depth in $DEPTHS; do
    tags+=("${NAME}_d$depth")
    train "${NAME}_d$depth" --depth="$depth" --target-param-data-ratio="$RATIO"
done
run python -m scripts.sweep "${tags[@]}" --out="$NANOCHAT_BASE_DIR/${NAME}_results"
