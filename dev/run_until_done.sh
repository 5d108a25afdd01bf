#!/usr/bin/env bash
# Restart a training command until its run is completed, is halted, or fails too many times without progress.
#
#   bash dev/run_until_done.sh d12 python -m scripts.base_train --depth=12
#   bash dev/run_until_done.sh d24 torchrun --standalone --nproc_per_node=8 --shutdown-timeout=600 \
#       -m scripts.base_train -- --depth=24 --save-every=1000
#
# The first word is the run (a model tag or a run directory). The rest is a command that resumes the run when it is
# started again, as scripts.base_train does. Its exit code is ignored, because torchrun turns every error code into 1:
# scripts.status --exit-code reports the state of the run. Signals are forwarded as SIGTERM: the command saves, then the
# loop ends.
#
# Exit codes: 0 completed; 3 halted, a person must decide; 10 stopped by a signal or scripts.stop: the same command
# resumes the run; 1 failed, or stopped before a new checkpoint, MAX_FAILURES times in a row.
# Cost and hardware, GPU or CPU: those of the command. Duration: until the run ends, plus pauses after failures.
set -euo pipefail

MAX_FAILURES="${MAX_FAILURES:-3}" # in a row, without a new checkpoint
PAUSE_S="${PAUSE_S:-10}"          # after the first failure; doubles with each further one
PYTHON="${PYTHON:-python}"

if (($# < 2)); then
    echo "usage: bash dev/run_until_done.sh RUN COMMAND..." >&2
    exit 2
fi
RUN=$1
shift

child=
signalled=
forward() { # signal: send SIGTERM, which every command and torchrun understand, to the command
    signalled=$1
    [[ -z "$child" ]] || kill -TERM "$child" 2>/dev/null || true
}
for name in TERM INT HUP USR1 USR2; do
    trap "forward SIG$name" "$name"
done

await() { # pid: wait for a background command and return its exit code; a signal interrupts `wait`
    local code=0
    while true; do
        code=0
        wait "$1" || code=$?
        kill -0 "$1" 2>/dev/null || return "$code"
    done
}

say() {
    echo "run_until_done: $*" >&2
}

read_status() { # set exit_code, run_dir, state, reason, checkpoint: empty if the run has no state yet
    local json
    exit_code=0
    json=$("$PYTHON" -m scripts.status "$RUN" --json --exit-code) || exit_code=$?
    mapfile -t fields < <("$PYTHON" -c 'import json, sys
state = json.loads(sys.argv[1] or "{}")
for name in ("run", "status", "reason", "checkpoint"):
    print(" ".join(str(state.get(name) or "").split()))' "$json")
    run_dir=${fields[0]:-} state=${fields[1]:-} reason=${fields[2]:-} checkpoint=${fields[3]:-}
}

read_status 2>/dev/null || true
before=$checkpoint
failures=0
while true; do
    "$@" &
    child=$!
    [[ -z "$signalled" ]] || forward "$signalled" # it came before the child existed
    code=0
    await "$child" || code=$?
    child=
    read_status
    say "exit code $code; $RUN is ${state:-unknown}${reason:+ ($reason)}, checkpoint ${checkpoint:-none}"
    case "$exit_code" in
        0 | 3) exit "$exit_code" ;;
    esac
    if [[ -n "$signalled" ]]; then
        say "ended by $signalled"
        exit 10
    fi
    if [[ "$exit_code" == 10 && -e "$run_dir/.shutdown_requested" ]]; then
        say "ended by scripts.stop"
        exit 10
    fi
    if [[ "$checkpoint" != "$before" ]]; then
        failures=0
        before=$checkpoint
    else
        failures=$((failures + 1))
    fi
    if ((failures >= MAX_FAILURES)); then
        say "gave up: $failures times in a row without a new checkpoint"
        exit 1
    fi
    if [[ "$exit_code" != 10 ]]; then
        sleep $((failures > 0 ? PAUSE_S * 2 ** (failures - 1) : PAUSE_S)) &
        child=$!
        await "$child" || true
        child=
        [[ -z "$signalled" ]] || exit 10
    fi
done
