#!/usr/bin/env bash
# The first fifteen minutes on a GPU: the most important checks first, each with a limit in seconds (dev/gpu_first.py).
#
#   bash dev/gpu_first.sh first [SECONDS]     start over; 580 seconds unless given
#   bash dev/gpu_first.sh again [SECONDS]     on the same machine: the checks that are missing; 220 seconds
#
# Cost: the time. Hardware: one GPU with 80 GB. Duration: at most SECONDS and a few more.
# Leaves in OUT (default: gpu/first): results.jsonl, written line by line; log.txt, what was printed; logs.tgz, the logs,
# settings and profiles of all runs.
#
# NANOCHAT=DIR   also time nanochat's training, from this checkout of nanochat
# PYTHON=...     another interpreter than that of .venv, or python3 if there is no .venv
# WHEELS=DIR     wheels of packages that a machine without a network lacks; they are installed for this script only
# BASE=DIR       for data, runs and compiled code (default: in memory if 24 GB are free there, otherwise in TMPDIR)
# DEVICE=cpu     a rehearsal with tiny models
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

call=${1:-}
case $call in
    first) seconds=${2:-580} ;;
    again) seconds=${2:-220} ;;
    *)
        sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
out=${OUT:-gpu/first}

find_base() { # in memory, because each run saves gigabytes; a container may have very little of it
    local name=nanochat_gpu_first${DEVICE:+_$DEVICE} free=0
    if [[ -d /dev/shm ]]; then
        free=$(df --output=avail --block-size=1G /dev/shm | tail -n 1)
    fi
    if [[ -d /dev/shm/$name ]] || ((free >= 24)); then
        echo "/dev/shm/$name"
    else
        echo "${TMPDIR:-/tmp}/$name"
    fi
}

base=${BASE:-$(find_base)}
mkdir -p "$base" "$out"
exec > >(tee -a "$out/log.txt") 2>&1
echo "== $call, $(date), at most $seconds s, base directory $base"
nvidia-smi || true
free -g || true
df -h "$base" || true

export PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$base/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$base/triton}
if [[ -n "${WHEELS:-}" ]]; then
    if [[ ! -d $base/site ]]; then
        "$python" -m pip install --quiet --no-index --no-deps --target "$base/site" "$WHEELS"/*.whl
    fi
    export PYTHONPATH=$base/site${PYTHONPATH:+:$PYTHONPATH}
fi

flags=(--seconds="$seconds" --base-dir="$base" --out="$out" ${NANOCHAT:+--peer="$NANOCHAT"})
if [[ "${DEVICE:-cuda}" == cpu ]]; then
    flags+=(--device=cpu --tiny)
fi
code=0
"$python" -m dev.gpu_first "$call" "${flags[@]}" || code=$?

logs=()
for file in "$base"/out "$base"/output-*.txt "$base"/runs/*/logs/train.jsonl "$base"/runs/*/config.json; do
    if [[ -e $file ]]; then
        logs+=("${file#"$base"/}")
    fi
done
tar -C "$base" -czf "$out/logs.tgz" "${logs[@]}"
echo "== exit code $code. Results: $out. When you are done, delete $base"
exit "$code"
