#!/usr/bin/env bash
# End to end, from text to a run that halts and is resumed: token files, a two-phase curriculum, two processes, a stop,
# one process, a bucket that runs dry, and the end.
#
#   bash dev/e2e_curriculum.sh [TEXT]       TEXT: a folder with a subfolder of text for each bucket (default: the sample
#                                           corpus, created if needed)
#
# Cost: nothing. Hardware: 2 cores. Duration: under 5 minutes. Everything is written to a temporary folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash dev/setup.sh
source .venv/bin/activate
export OMP_NUM_THREADS=1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export NANOCHAT_BASE_DIR=$work/base

expect() { # exit code, command: run the command, and fail if it exits with another code
    local expected=$1 code=0
    shift
    echo "+ $*"
    "$@" || code=$?
    if ((code != expected)); then
        echo "e2e: exit code $code, expected $expected: $*" >&2
        return 1
    fi
}

# two buckets with two files of real text each, and a third bucket of 60 documents that must run dry
source_text=${1:-$work/sample}
[[ -d $source_text ]] || python -m dev.make_sample_corpus --buckets --output-dir "$source_text"
mapfile -t buckets < <(find "$source_text" -mindepth 1 -maxdepth 1 -type d -printf '%f\n' | sort | head -2)
text=$work/text
for bucket in "${buckets[@]}"; do
    mkdir -p "$text/$bucket"
    find "$source_text/$bucket" -name '*.parquet' | sort | head -2 | xargs -I{} cp {} "$text/$bucket/"
done
python - "$text" <<'PY'
import sys
from pathlib import Path

import pyarrow.parquet as pq

text = Path(sys.argv[1])
table = pq.read_table(min(text.rglob("*.parquet")), columns=["text"])
(text / "tiny").mkdir()
pq.write_table(table.slice(0, 60), text / "tiny" / "a.parquet")
pq.write_table(table.slice(60, 20), text / "tiny" / "b.parquet")
PY
echo "buckets: ${buckets[*]} tiny"

shards=$work/shards
expect 0 python -m scripts.tok_train --data-path "$text" --vocab-size 4096 --max-chars 4000000
expect 0 python -m scripts.tok_shards --input-dir "$text" --output-dir "$shards" \
    --tokenizer "$NANOCHAT_BASE_DIR/tokenizer" --num-workers 2
expect 0 python -m scripts.verify "$shards"

cat >"$work/mix.yaml" <<YAML
curriculum:
  - duration_tokens: 24_576
    mix: {${buckets[0]}: 0.75, ${buckets[1]}: 0.25}
  - duration_tokens: 24_576
    mix: {${buckets[0]}: 0.2, ${buckets[1]}: 0.2, tiny: 0.6}
YAML
train=(-m scripts.base_train --data-format shards --data-path "$shards" --curriculum "$work/mix.yaml" --depth 2
    --aspect-ratio 32 --head-dim 32 --max-seq-len 256 --total-batch-size 2048 --device-batch-size 2 --lanes 8
    --device-type cpu --eval-every 12 --eval-tokens 16384 --sample-every -1 --save-every 4 --model-tag e2e)

# the plan finds that the run will halt: an error, or a warning if dry buckets may be dropped
plan=("${train[@]/scripts.base_train/scripts.validate}")
expect 1 python "${plan[@]}"
# its documents are far longer than a row, which --plan warn allows
expect 0 python "${plan[@]}" --allow-bucket-exhaustion --plan warn --plot "$work/plan.png"
expect 1 python "${train[@]}"
[[ -s $work/plan.png && ! -e $NANOCHAT_BASE_DIR/runs/e2e ]]
train+=(--plan warn)

# two processes, stopped after the first save; then one process, which halts; then the rest without the dry bucket
torchrun --standalone --nproc_per_node=2 "${train[@]}" &
launcher=$!
until [[ -d $NANOCHAT_BASE_DIR/runs/e2e/checkpoints/checkpoint-4 ]]; do
    kill -0 "$launcher"
    sleep 0.2
done
kill -TERM "$launcher"
wait "$launcher" || true
expect 3 python "${train[@]}"
expect 3 python "${train[@]}"
expect 0 python "${train[@]}" --allow-bucket-exhaustion
expect 0 python "${train[@]}" --allow-bucket-exhaustion
expect 0 python -m scripts.inspect_data digest e2e --steps 0:24
expect 0 python -m scripts.inspect_data ledger e2e
echo "e2e: all as expected"
