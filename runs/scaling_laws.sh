#!/usr/bin/env bash
# Scaling laws: models of several depths for each budget of FLOPs, then the best size per budget and power laws.
# Cost: four budgets times six depths take 1.1e20 FLOPs: an estimated 9 hours on 8 H100s at 40 % utilization. TINY=1
# runs on 2 CPU cores without a network in under 8 minutes.
#
#   bash runs/scaling_laws.sh                    # or with a name: bash runs/scaling_laws.sh jan26
#   FLOPS="1e18 3e18" DEPTHS="8 10 12 14" bash runs/scaling_laws.sh
#   TINY=1 bash runs/scaling_laws.sh             # small models on a CPU
#   DRY_RUN=1 bash runs/scaling_laws.sh          # print the commands, run nothing
#   NPROC_PER_NODE=1 DEVICE_BATCH_SIZE=16 WANDB_RUN=mine CORE=1 bash runs/scaling_laws.sh
#
# Needs data and a tokenizer from the first stages of speedrun.sh (TINY=1 makes its own). You can run it again at any
# time: it reuses finished runs and resumes unfinished ones. All output is below NANOCHAT_BASE_DIR (default
# ~/.cache/nanochat): runs NAME_<FLOPs>_d<depth>, and NAME_results with results.csv, points.csv and fit.csv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NAME="${1:-scaling}"
if [[ -n "$TINY" ]]; then
    FLOPS="${FLOPS:-5e10 1e11 2e11}" DEPTHS="${DEPTHS:-1 2 3}"
else
    FLOPS="${FLOPS:-1e18 2.15e18 4.64e18 1e19}" DEPTHS="${DEPTHS:-10 12 14 16 18 20}"
fi

tags=()
for flops in $FLOPS; do
    for depth in $DEPTHS; do
        tags+=("${NAME}_${flops}_d$depth")
        train "${NAME}_${flops}_d$depth" --depth="$depth" --target-flops="$flops" --target-param-data-ratio=-1
    done
done
run python -m scripts.sweep "${tags[@]}" --out="$NANOCHAT_BASE_DIR/${NAME}_results"
