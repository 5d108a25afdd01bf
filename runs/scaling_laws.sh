#!/usr/bin/env bash
# Scaling laws: models of several depths for each budget of FLOPs, the best size of each budget, power laws, pictures.
# One box of 8 H100s: the four budgets times six depths cost 1.1e20 FLOPs, by arithmetic about 9 hours at 40 %
# utilization. With TINY=1 2 CPU cores, no network, under 8 minutes.
#
#   bash runs/scaling_laws.sh                    # or with a name: bash runs/scaling_laws.sh jan26
#   FLOPS="1e18 3e18" DEPTHS="8 10 12 14" bash runs/scaling_laws.sh
#   TINY=1 bash runs/scaling_laws.sh             # the same on a CPU, with sizes that fit it
#   DRY_RUN=1 bash runs/scaling_laws.sh          # print the commands, run nothing
#   NPROC_PER_NODE=1 DEVICE_BATCH_SIZE=16 WANDB_RUN=mine CORE=1 bash runs/scaling_laws.sh
#
# Before it: data and tokenizer, as the first stages of speedrun.sh make them. Run it again at any time: finished runs
# are reused, an unfinished one goes on. Everything is below NANOCHAT_BASE_DIR (default ~/.cache/nanochat): the runs
# NAME_<FLOPs>_d<depth>, and NAME_results with results.csv, points.csv, fit.csv and two pictures.
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
