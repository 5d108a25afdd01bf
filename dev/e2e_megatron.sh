#!/usr/bin/env bash
# End to end from text to a run from object storage: Megatron's files, an S3 server on this machine, a blend in
# Megatron's order on two processes, a kill, one process, and the same digests as from local files.
#
#   bash dev/e2e_megatron.sh [DATA]         DATA: a folder with a subfolder of text for each bucket (default:
#                                           ../shared/data, else the sample corpus, created if needed)
#
# Cost: nothing. Hardware: 2 cores. Duration: under 5 minutes. Everything is written to a temporary folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash dev/setup.sh
source .venv/bin/activate
export OMP_NUM_THREADS=1

work=$(mktemp -d)
server=
trap '[[ -z $server ]] || exec {to_server}>&-; rm -rf "$work"' EXIT
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

# two buckets with two files of real text each
data=${1:-../shared/data}
[[ -d $data ]] || data=$work/sample
[[ -d $data ]] || python -m dev.make_sample_corpus --buckets --output-dir "$data"
mapfile -t buckets < <(find "$data" -mindepth 1 -maxdepth 1 -type d -printf '%f\n' | sort | head -2)
for bucket in "${buckets[@]}"; do
    mkdir -p "$work/text/$bucket"
    find "$data/$bucket" -name '*.parquet' | sort | head -2 | xargs -I{} cp {} "$work/text/$bucket/"
done
echo "buckets: ${buckets[*]}"

pairs=$work/pairs
expect 0 python -m scripts.tok_train --data-path "$work/text" --vocab-size 4096 --max-chars 4000000
expect 0 python -m scripts.tok_shards --format megatron --input-dir "$work/text" --output-dir "$pairs" \
    --tokenizer "$NANOCHAT_BASE_DIR/tokenizer" --num-workers 2
expect 0 python -m scripts.verify "$pairs"

# object storage: moto's server, which runs until its standard input is closed
mkfifo "$work/to_server"
python -m tests.object_store <"$work/to_server" >"$work/urls" &
server=$!
exec {to_server}>"$work/to_server"
until [[ -s $work/urls ]]; do
    kill -0 "$server"
    sleep 0.2
done
eval "$(python -c 'import sys
from tests.object_store import environment
print(*(f"export {k}={v!r}" for k, v in environment(sys.argv[1]).items()), sep="\n")' "$(cut -d " " -f 1 "$work/urls")")"

expect 0 python -m tests.object_store put "$pairs" pairs
expect 0 python -m scripts.verify s3://bucket/pairs

prefixes() { # path: the prefixes of the first training pair of each bucket below it
    local bucket found=()
    for bucket in "${buckets[@]}"; do
        found+=("$1/train/$bucket/$(basename "$(find "$pairs/train/$bucket" -name '*.bin' | sort | head -1)" .bin)")
    done
    (IFS=,; echo "${found[*]}")
}
train=(-m scripts.base_train --data-format megatron --depth 2 --aspect-ratio 32 --head-dim 32 --max-seq-len 256
    --total-batch-size 2048 --device-batch-size 2 --lanes 8 --device-type cpu --eval-every 12 --eval-tokens 16384
    --sample-every -1 --save-every 4 --num-iterations 24 --tokenizer)
blend=(--order megatron --blend-weights 30,70 --split 90,10)
local_prefixes=$(prefixes "$pairs") remote_prefixes=$(prefixes s3://bucket/pairs)

# from local files; then, without them, from object storage: on two processes, killed, and to the end on one
expect 0 python "${train[@]}" "$pairs/tokenizer" "${blend[@]}" --data-path "$local_prefixes" --model-tag files
mv "$pairs" "$work/away"
rm -r "$NANOCHAT_BASE_DIR/tokenizer"
from_bucket=("${train[@]}" s3://bucket/pairs/tokenizer "${blend[@]}" --data-path "$remote_prefixes" --model-tag bucket)
echo "+ torchrun ${from_bucket[*]} &"
torchrun --standalone --nproc_per_node=2 "${from_bucket[@]}" &
launcher=$!
until [[ -d $NANOCHAT_BASE_DIR/runs/bucket/checkpoints/checkpoint-8 ]]; do
    kill -0 "$launcher"
    sleep 0.1
done
mapfile -t workers < <(pgrep -P "$launcher")
kill -KILL "${workers[@]}"
wait "$launcher" || true
[[ ! -e $NANOCHAT_BASE_DIR/runs/bucket/checkpoints/final ]]
expect 0 python "${from_bucket[@]}"
expect 0 python -m scripts.inspect_data digest bucket --steps 0:24
expect 0 python -m scripts.inspect_data ledger bucket

python - <<'PY'
from nanochat.common import get_base_dir
from nanochat.run_dir import iter_log


def digests(tag: str) -> dict[int, str]:
    return {r["step"]: r["digest"] for r in iter_log(get_base_dir() / "runs" / tag / "logs" / "train.jsonl")
            if "digest" in r}


files, bucket = digests("files"), digests("bucket")
assert len(files) == 24 and files == bucket, (files, bucket)
print("24 digests from object storage equal those from local files")
PY

# whole documents in lanes; an object that was replaced by another of the same size is refused
lanes=("${train[@]}" s3://bucket/pairs/tokenizer --data-path s3://bucket/pairs --model-tag lanes --plan warn)
expect 0 python "${lanes[@]}" --num-iterations 4
first=${remote_prefixes%%,*}.bin
own=$work/away/${first#s3://bucket/pairs/}
tail -c +3 "$own" >"$work/changed"
head -c 2 "$own" >>"$work/changed"
expect 0 python -m tests.object_store put "$work/changed" "${first#s3://bucket/}"
expect 1 python "${lanes[@]}" --num-iterations 8 2>&1 | tee "$work/refused"
grep -q "changed since this run began (etag" "$work/refused"

if grep -rlF -e "$AWS_SECRET_ACCESS_KEY" -e "$AWS_ACCESS_KEY_ID" "$NANOCHAT_BASE_DIR"; then
    echo "e2e: credentials in the files above" >&2
    exit 1
fi
echo "e2e: all as expected"
