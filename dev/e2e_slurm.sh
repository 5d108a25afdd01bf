#!/usr/bin/env bash
# End to end on a real SLURM: this machine, as a controller and two nodes, runs the templates of dev/slurm/ unchanged.
# The results are compared bit for bit with those of one undisturbed process. Ends with a table.
#
#   bash dev/e2e_slurm.sh --install       # as root on Debian: first install slurm-wlm and munge
#   bash dev/e2e_slurm.sh                 # SLURM is installed
#
# Tokenizing: an array of tasks on both nodes reads from an S3 server on loopback; one node dies.
# Training: a chain of jobs on both nodes survives a walltime, a preemption, a node set to DOWN, a signal and scancel.
# SLURM's daemons, settings and key are in a temporary folder and deleted at the end; only the packages stay.
#
# Cost: nothing. Hardware: 2 cores, 4 GB; root, because slurmd needs it. Duration: 10 to 25 minutes. Exit code 1 if a
# line of the table says FAILED; the folder is then kept and its path printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repo=$PWD
python=$repo/.venv/bin/python

if [[ "${1:-}" == --install ]]; then
    ((EUID == 0)) || { echo "e2e_slurm: --install: got user $EUID, expected root" >&2; exit 1; }
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends slurm-wlm munge >/dev/null
fi
for program in slurmctld slurmd munged; do
    if ! command -v "$program" >/dev/null || ((EUID != 0)); then
        echo "e2e_slurm: needs root and SLURM; as root on Debian, --install installs slurm-wlm and munge" >&2
        exit 1
    fi
done
if [[ "${1:-}" != --inside ]]; then # in a mount namespace, where /etc/hosts can name the nodes
    exec unshare --mount bash "$repo/dev/e2e_slurm.sh" --inside
fi

# ---- a cluster of one machine ----------------------------------------------------------------------------------------

work=$(mktemp -d)
chmod 755 "$work" # munged runs as another user
export SLURM_CONF=$work/slurm.conf NANOCHAT_BASE_DIR=$work/base OMP_NUM_THREADS=1 PYTHON=$python
printf '127.0.0.1 localhost %s n1 n2\n' "$(hostname)" >"$work/hosts"
mount --bind "$work/hosts" /etc/hosts
verdicts=()
store=

ours() { # the processes of this cluster: daemons, jobs and their children
    grep -lzsxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ | cut -d/ -f3
}

end() {
    local failed=0 pid
    [[ -z "$store" ]] || kill "$store" 2>/dev/null || true
    for pid in $(ours); do
        kill -9 "$pid" 2>/dev/null || true
    done
    wait
    umount -l /etc/hosts
    printf '%s\n' 'WHAT|EXPECTED|GOT|VERDICT' ${verdicts+"${verdicts[@]}"} | column -t -s '|'
    [[ "$*" == finished && " ${verdicts[*]}" != *"|FAILED"* ]] || failed=1
    if ((failed)); then echo "e2e_slurm: FAILED, see $work"; else rm -rf "$work"; echo "e2e_slurm: all as expected"; fi
    trap - EXIT
    exit "$failed"
}
trap end EXIT

daemons() { # start munged with its own key, slurmctld, and two slurmd
    mkdir -p "$work"/{munge,slurmctld,n1,n2}
    chown munge "$work/munge"
    runuser -u munge -- sh -c "umask 077; head -c 128 /dev/urandom >$work/munge/key"
    runuser -u munge -- munged --key-file="$work/munge/key" --socket="$work/munge/socket" --pid-file="$work/munge/pid" \
        --log-file="$work/munge/log" --seed-file="$work/munge/seed"
    touch "$work/gpu1"
    # These settings work in a container: processes are tracked through /proc instead of cgroups; each node claims more
    # cores and memory than exist, because the templates ask for much, and one GPU, which is a plain file. A dead node
    # is noticed after 10 s. cred_expire is also how long a requeued job stays in the queue (default: 120 s).
    cat >"$work/slurm.conf" <<CONF
ClusterName=e2e
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=27817
AuthInfo=socket=$work/munge/socket,cred_expire=5
SlurmUser=root
StateSaveLocation=$work/slurmctld
SlurmctldPidFile=$work/slurmctld/pid
SlurmctldLogFile=$work/slurmctld/log
SlurmdSpoolDir=$work/%n
SlurmdPidFile=$work/%n/pid
SlurmdLogFile=$work/%n/log
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=60
ReturnToService=1
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n[1-2] NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=[27818-27819] CPUs=64 RealMemory=64000 Gres=gpu:1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
CONF
    echo "Name=gpu File=$work/gpu1" >"$work/gres.conf"
    slurmctld
    slurmd -N n1
    slurmd -N n2
}

check() { # name, expected pattern, got: add a line to the table
    local verdict=FAILED got=${3##*$'\n'}
    # shellcheck disable=SC2053
    [[ "$3" != $2 ]] || verdict=ok
    verdicts+=("$1|$2|${got:0:60}|$verdict")
    echo "e2e_slurm: $verdict: $1: $got"
}

await() { # seconds, condition: wait until it holds, and fail after that time
    local end=$((SECONDS + $1))
    until eval "$2"; do
        ((SECONDS < end)) || { echo "e2e_slurm: waited $1 s for: $2" >&2; return 1; }
        sleep 0.3
    done
}

job() { # job, field: the value that scontrol reports
    scontrol show job "$1" --oneliner | grep -oP "(?<= $2=)\S*" | sort | paste -sd,
}

pids_of_node() { # node: the processes of its jobs
    ours | sed 's,.*,/proc/&/environ,' | xargs -r grep -lzsxF "SLURMD_NODENAME=$1" | cut -d/ -f3
}

die() { # node: kill slurmd, slurmstepd and all processes of its jobs, as a power failure would
    local pid parent victims=("$(cat "$work/$1/pid")")
    for pid in $(pids_of_node "$1"); do
        parent=$(ps -o ppid= -p "$pid" | tr -d ' ')
        [[ "$(cat "/proc/$parent/comm")" != slurmstepd ]] || victims+=("$parent")
        victims+=("$pid")
    done
    kill -9 "${victims[@]}"
}

daemons
await 60 '[[ $(sinfo -h -N -t idle -p low | wc -l) == 2 ]]'

# ---- tokenizing: an array that reads from object storage -------------------------------------------------------------

# A copy of the checkout by links, so that jobs write their files into the temporary folder.
mkdir "$work/checkout"
ln -s "$repo"/{nanochat,scripts,dev,tests,pyproject.toml,.venv} "$work/checkout/"
cd "$work/checkout"
"$python" -m dev.make_sample_corpus --output-dir "$work/text"
"$python" -m scripts.tok_train --data-path "$work/text" --vocab-size 1024 --max-chars 2000000
"$python" -m scripts.tok_shards --input-dir "$work/text" --output-dir "$work/alone" --num-workers 2

mkfifo "$work/store_in"
"$python" -m tests.object_store 50 <"$work/store_in" >"$work/store_out" & # 50 ms before each answer
store=$!
exec {store_in}>"$work/store_in"
await 60 '[[ -s $work/store_out ]]'
read -r AWS_ENDPOINT_URL _ <"$work/store_out"
export AWS_ENDPOINT_URL AWS_ACCESS_KEY_ID=AKIATESTACCESSKEY AWS_SECRET_ACCESS_KEY=test/secret+key
export AWS_DEFAULT_REGION=us-east-1
"$python" -m tests.object_store put "$work/text" raw

RAW=s3://bucket/raw OUT=$work/shards TOKENIZER=$NANOCHAT_BASE_DIR/tokenizer NUM_TASKS=4 \
    bash dev/slurm/tok_shards.sbatch --cpus-per-task=32 | tee "$work/submitted"
finish=$(grep -oP '(?<=Submitted batch job )\d+' "$work/submitted")
array=$((finish - 1)) # no other jobs are submitted here
await 60 '[[ -n $(pids_of_node n1) && -n $(pids_of_node n2) ]]'
check "tok_shards.sbatch: an array of 4 tasks" "n1,n1,n2,n2" "$(squeue -h -r -j $array -t R -o %N | sort | paste -sd,)"
await 60 '[[ -d $work/shards && -n $(find "$work/shards" -path "*/train/*" -type f -print -quit) ]]' # they write
die n2
await 60 '[[ $(sinfo -h -n n2 -p low -o %t) == down* ]]'
await 60 '[[ $(job $array Restarts) == *1,1 ]]'
check "node n2 dies under two of them" "0,0,1,1" "$(job $array Restarts)"
slurmd -N n2
await 300 '[[ $(job $finish JobState) =~ COMPLETED|FAILED ]]'
check "... and they are done again" "COMPLETED,COMPLETED,COMPLETED,COMPLETED" "$(job $array JobState)"
check "the finishing job and its log" "*: complete, 9 shards" "$(tail -n 1 "tok_shards_finish-$finish.log")"
check "shards, against one process on local files" "equal" \
    "$(diff -rq --exclude=.records "$work/alone" "$work/shards" && echo equal)" # .records: times and ETags
exec {store_in}>&-
wait "$store"
store=
echo "e2e_slurm: requests to the S3 server: $(tail -n 1 "$work/store_out")"

# ---- training: a chain of jobs ---------------------------------------------------------------------------------------

fact() { # field: its value in the state of the run
    "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' \
        "$NANOCHAT_BASE_DIR/runs/chain/.run_state.json" "$1" 2>/dev/null || echo none
}

nodes_of_ranks() { # the nodes that run the processes of the run
    local pid
    for pid in $(fact ranks | grep -oP "(?<='pid': )\d+"); do
        tr '\0' '\n' <"/proc/$pid/environ" | sed -n 's/^SLURMD_NODENAME=//p'
    done | sort | paste -sd,
}

started=none
trains_again() { # wait until a new launch has trained some steps
    local from
    await 300 '[[ $(fact started) != "$started" && $(fact status) == running ]]'
    started=$(fact started) from=$(fact step)
    await 120 '(($(fact step) >= from + 5))'
}

end_of_start() { # job, n: why its n-th start ended, from its log
    grep -oP "start $2: srun exited with \d+; chain is \K[^,]*" "train_chain-$1.log" || echo nothing
}

flags=(--data-format=shards --data-path="$work/shards/train" --val-path="$work/shards/val" --depth=2 --aspect-ratio=32
    --head-dim=32 --max-seq-len=256 --long-docs=split --total-batch-size=4096 --device-batch-size=8 --device-type=cpu
    --eval-every=-1 --sample-every=-1 --save-every=20)
alone() { # name, steps: an undisturbed run on two processes without SLURM
    "$python" -m torch.distributed.run --standalone --nproc-per-node=2 -m scripts.base_train -- --model-tag="$1" \
        "${flags[@]}" --num-iterations="$2" >"$work/$1.log" 2>&1 || tail "$work/$1.log" >&2
}

# As many steps as this machine trains in about 110 s: enough for every event below, on any machine.
alone probe 20
seconds=$("$python" -c 'import json, sys; print(int(sum(json.loads(line).get("step_s", 0) for line in sys.stdin)))' \
    <"$NANOCHAT_BASE_DIR/runs/probe/logs/train.jsonl")
steps=$((110 * 20 / (seconds + 1)))
alone alone "$steps"
flags+=(--num-iterations="$steps")
chain=(sbatch --parsable --gpus-per-node=1 --cpus-per-task=1 --signal=B:USR1@10 dev/slurm/train_chain.sbatch chain
    "${flags[@]}")

job=$("${chain[@]:0:2}" --time=3 "${chain[@]:2}") # minutes; --walltime-reserve-seconds keeps 2 of them
trains_again
check "train_chain.sbatch: two nodes under one srun" "n1,n2" "$(nodes_of_ranks)"
check "the deadline in force" "*SLURM_JOB_END_TIME)" "$(grep -oh 'walltime: .*' "train_chain-$job.log")"
code=0
output=$("$python" -m scripts.status chain --exit-code) || code=$?
check "scripts.status beside it" "20: 2 on *" "$code: $(grep -oP '^processes +\K.*(?=;)' <<<"$output")"

await 180 '[[ $(job $job Restarts) == 1 ]]'
check "the walltime" "stopped (walltime: *" "$(end_of_start "$job" 1)"
scontrol update "JobId=$job" TimeLimit=60
trains_again

other=$(sbatch --parsable --partition=high --nodes=2 --exclusive --output=/dev/null --wrap "sleep 3")
await 120 '[[ $(job $other JobState) == COMPLETED ]]'
trains_again
check "a preemption: saves, SLURM requeues it" "2 stopped (SIGTERM*" "$(job "$job" Restarts) $(end_of_start "$job" 2)"

scontrol update NodeName=n2 State=DOWN Reason=e2e
await 120 '[[ $(job $job Restarts) == 3 ]]'
scontrol update NodeName=n2 State=RESUME
trains_again
check "a node set to DOWN: saves, is requeued" "3 stopped (SIGTERM*" "$(job "$job" Restarts) $(end_of_start "$job" 3)"

die n2
await 60 '[[ $(sinfo -h -n n2 -p low -o %t) == down* ]]'
slurmd -N n2
trains_again
check "a node dies: resumes from the last save" "4 n1,n2" "$(job "$job" Restarts) $(nodes_of_ranks)"

scancel --signal=USR1 --batch "$job"
await 120 '[[ $(job $job Restarts) == 5 ]]'
check "scancel --signal=USR1 --batch: saves, is requeued" "stopped (SIGUSR1*" "$(end_of_start "$job" 5)"
trains_again

scancel "$job"
await 120 '[[ $(job $job JobState) == CANCELLED ]]'
check "scancel: saves, is not requeued" "stopped (SIGTERM)" "$(fact status) ($(fact reason))"

job=$("${chain[@]}")
await 600 '[[ $(job $job JobState) =~ COMPLETED|FAILED ]]'
check "the same sbatch again" "COMPLETED completed" "$(job "$job" JobState) $(fact status)"
code=0
"$python" -m scripts.compare_runs alone chain | tee "$work/compared" || code=$?
check "compare_runs with an undisturbed run" "0: *" "$code: $(tail -n 1 "$work/compared")"
end finished
