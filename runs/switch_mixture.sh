#!/usr/bin/env bash
# A mixture switched in mid-run: a run on nine parts of one bucket and one of another, and a fork that continues it with
# equal parts. In the fork, each bucket continues where the run was reading it. The run itself trains to its end with
# the first mixture, as the baseline.
# Cost: depth 12 on 2e9 tokens, about 1.6e18 FLOPs: an estimated 8 minutes on 8 H100s at 40 % utilization. TINY=1 runs
# on 2 CPU cores without a network in under 2 minutes.
#
#   DATA=DIR BUCKETS="web code" bash runs/switch_mixture.sh   # DIR has a subfolder of text for each bucket
#   TINY=1 bash runs/switch_mixture.sh                        # a small model on a CPU
#   DRY_RUN=1 bash runs/switch_mixture.sh                     # print the commands, run nothing
#
# Needs a tokenizer from the first stages of speedrun.sh (TINY=1 makes its own, and the buckets). You can run it again
# at any time: it leaves finished runs as they are and resumes unfinished ones. All runs are below NANOCHAT_BASE_DIR.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NAME="${1:-mixture}" DATA="${DATA:-$NANOCHAT_BASE_DIR/data/buckets}"
if [[ -n "$TINY" ]]; then depth=2 last=60 at=30 BUCKETS="docs code"; else depth=12 last=2500 at=1250; fi
read -r first second <<<"${BUCKETS:-web code}"
[[ -z "$TINY" || -d "$DATA" ]] || run python -m dev.make_sample_corpus --buckets --output-dir="$DATA"

mix() { # part, part: the path of a curriculum that mixes the two buckets
    local file="$NANOCHAT_BASE_DIR/$NAME-$1-$2.yaml"
    if [[ -z "${DRY_RUN:-}" ]]; then
        echo "{max_epochs: {$first: 0, $second: 0}, curriculum: [{mix: {$first: $1, $second: $2}}]}" >"$file"
    fi
    echo "$file"
}
train "$NAME" --depth="$depth" --data-path="$DATA" --curriculum="$(mix 9 1)" --num-iterations="$last" --save-at="$at"
fork "$NAME-switched" "$NAME@$at" --curriculum="$(mix 1 1)"
run python -m scripts.status "$NAME" "$NAME-switched"
