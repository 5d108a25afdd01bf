#!/usr/bin/env bash
# A spike cut out: a fork that continues a run from a step before its spike, and skips the rows of the next steps.
# `python -m scripts.inspect_data spikes RUN` lists the spikes and their rows.
# Cost: that of the steps from STEP on. TINY=1 trains a small run first, and takes under 2 minutes on 2 CPU cores
# without a network.
#
#   bash runs/cut_spike.sh mine 1000 50          # continue `mine` from step 1,000 without the rows of the next 50 steps
#   TINY=1 bash runs/cut_spike.sh                # a small model on a CPU
#   DRY_RUN=1 bash runs/cut_spike.sh mine 1000 50
#
# You can run it again at any time: it leaves a finished run as it is and resumes an unfinished one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ -n "$TINY" ]]; then set -- "${1:-spiky}" "${2:-20}" "${3:-5}"; fi
RUN="${1:?the name of a run}" STEP="${2:?the step to continue from}" SKIP="${3:?the number of steps to skip}"

if [[ -n "$TINY" ]]; then train "$RUN" --depth=2 --num-iterations=40 --save-at="$STEP"; fi
run python -m scripts.inspect_data spikes "$RUN" --top=3
fork "$RUN-cut" "$RUN@$STEP" --skip-steps="$SKIP"
run python -m scripts.status "$RUN" "$RUN-cut"
