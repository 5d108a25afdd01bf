#!/usr/bin/env bash
# Make docs/example again: the speedrun on a CPU and four forks of it, without checkpoints and text.
#
#   bash dev/make_example.sh
#
# Cost: nothing. Hardware: 2 cores, 2 GB of disk in /tmp. Duration: 15 minutes. Needs Linux and the right to set the
# host name of a namespace (root), because everything runs in a clone in /tmp/nanochat-example on the host `example`:
# so no file names this machine, and none has to be edited. The clone is of the last commit, and stays; .venv is this
# checkout's. You can run it again at any time: finished stages are reused. docs/example.md shows what the commands
# print: tests/ring/test_example.py compares them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CLONE=/tmp/nanochat-example
HERE="$PWD"
if [[ "$(hostname)" != example ]]; then
    if [[ ! -e "$CLONE" ]]; then
        git clone --quiet "$HERE" "$CLONE"
        # The old example makes room for the new one, and git says nothing of it: the runs name a clean commit.
        git -C "$CLONE" ls-files -z docs/example | xargs -0 git -C "$CLONE" update-index --assume-unchanged
        rm -r "$CLONE/docs/example"
        ln -s "$(realpath .venv)" "$CLONE/.venv"
    fi
    exec unshare --uts bash -c 'hostname example && exec bash "$0"' "$HERE/dev/make_example.sh"
fi

fork() { # name, RUN@STEP, what it changes
    local name="$1" from="$2"
    shift 2
    python -m scripts.base_train --fork-from="$from" --model-tag="$name" "$@"
}

cd "$CLONE"
export NANOCHAT_BASE_DIR=docs/example
PROFILE=cpu bash speedrun.sh
export PATH="$PWD/.venv/bin:$PATH"
fork watched speedrun-cpu@200 --skip-spikes=8 --save-at=220
if ! grep -qs '"event": "failed"' docs/example/runs/hot/logs/train.jsonl; then
    if fork hot watched@220 --matrix-lr=16; then
        echo "make_example: hot was to diverge, and did not" >&2
        exit 1
    fi
fi
fork cool hot@220 --matrix-lr=0.08
fork same speedrun-cpu@200
python -m scripts.receipt speedrun-cpu --out=docs/example/receipt.json
python -m scripts.page speedrun-cpu --out=docs/example/speedrun.html

rm -rf "$HERE/docs/example"
mkdir -p "$HERE/docs/example/runs"
cp docs/example/receipt.json docs/example/speedrun.html "$HERE/docs/example"
for run in docs/example/runs/*; do
    tar -c --exclude=checkpoints --exclude=.owner.json --exclude=report.md "$run" | tar -x -C "$HERE"
done
du -sh "$HERE/docs/example"
