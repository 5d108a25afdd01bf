#!/usr/bin/env bash
# A miniseries: one model of each depth at one ratio of tokens to parameters, a CSV of all, power laws and pictures.
# One box of 8 H100s: depths 6 to 20 at 12 tokens a parameter cost 3.2e19 FLOPs together, half of them depth 20; by
# arithmetic about 3 hours at 40 % utilization. With TINY=1 2 CPU cores, no network, under 8 minutes.
#
#   bash runs/miniseries.sh                      # or with a name: bash runs/miniseries.sh jan11
#   DEPTHS="6 8 10" RATIO=20 bash runs/miniseries.sh chinchilla
#   TINY=1 bash runs/miniseries.sh               # the same on a CPU, with sizes that fit it
#   DRY_RUN=1 bash runs/miniseries.sh            # print the commands, run nothing
#   NPROC_PER_NODE=1 DEVICE_BATCH_SIZE=16 WANDB_RUN=mine CORE=1 bash runs/miniseries.sh
#
# Before it: data and tokenizer, as the first stages of speedrun.sh make them. Run it again at any time: finished runs
# are reused, an unfinished one goes on. Everything is below NANOCHAT_BASE_DIR (default ~/.cache/nanochat): the runs
# NAME_d<depth>, and NAME_results with results.csv, points.csv, fit.csv and two pictures.
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
