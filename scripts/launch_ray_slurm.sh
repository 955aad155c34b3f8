#!/usr/bin/env bash
# A Ray cluster on the nodes of a Slurm job, and one program that joins it. Submit from the repository's root, with the
# environment activated:
#
#   sbatch --nodes 3 scripts/launch_ray_slurm.sh open_instruct/grpo_olmo_core_actor.py CONFIG.yaml --flag ...
#
#   HEAD_ADDR            the first node's address, where it has several (default: what its name stands for)
#   RAY_PORT             a free port of the first node (default: one of this job's own)
#   RAY_START_TIMEOUT_S  seconds that Ray may take to start on the first node (default: 120)
#
# Every node gives all its GPUs and cores to Ray; the program runs on the first node, with --ray_address added. Nodes
# speak to each other by the addresses that reach the first node, and nobody without the token of this job is let in.
# There is no dashboard; Ray's logs stay in /tmp/ray-JOB of each node. The output folder, the model and the data must be on a file system that all nodes see.
#
# Two minutes before the time limit, or when a job of higher priority takes the nodes, the run writes a checkpoint,
# the job goes back to the queue, and the next start resumes by itself.
#SBATCH --job-name=open-instruct-ray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

say() { printf '%s\n' "launch_ray_slurm: $*"; }
die() { say "error: $*" >&2; exit 2; }

[[ -n ${SLURM_JOB_ID:-} ]] || die "not inside a Slurm job; submit it: sbatch $0 open_instruct/grpo_olmo_core_actor.py --flag ..."
(($# > 0)) || die "no program given, as in: sbatch $0 open_instruct/grpo_olmo_core_actor.py --flag ..."
# Slurm runs a copy of this file from a folder of its own; the rest of the repository is where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-.}"
[[ -x scripts/launch_ray_slurm.sh ]] || die "$PWD is not the repository's root; call sbatch from there"
command -v ray >/dev/null || die "ray is not on PATH; activate the environment before sbatch: source .venv/bin/activate"

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# A node may know itself as 127.0.1.1, which is of no use to the others.
address=${HEAD_ADDR:-$(getent ahostsv4 "${hosts[0]}" | awk '$1 !~ /^127\./ {print $1; exit}')}
[[ -n $address ]] || die "${hosts[0]} stands for no address that other nodes could reach; give one as HEAD_ADDR"
port=${RAY_PORT:-$((20000 + SLURM_JOB_ID % 20000))}

# Ray listens on all interfaces of a node: what keeps others out is the token. It travels in the environment, which
# srun passes on, and never stands on a command line.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export RAY_AUTH_TOKEN
export RAY_USAGE_STATS_ENABLED=0
# When Ray is told to end, the run has ended: there is nothing to drain, and no time for it before a time limit.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
# Learners and engines give way to nothing else on a node.
export RAY_worker_niceness=0
# Short: the sockets in it must fit into 107 characters. Ray opens its own folder to all users, so that one lies within
# a folder that is this user's alone; where another user has made it before, this fails.
folder=/tmp/ray-$SLURM_JOB_ID
srun --nodes="${#hosts[@]}" --ntasks="${#hosts[@]}" install -d -m 700 "$folder"

ray_steps=()
tear_down() {
    trap - EXIT
    # srun passes the signal on, and `ray start --block` ends the node's processes.
    ((${#ray_steps[@]} == 0)) || kill -TERM "${ray_steps[@]}" 2>/dev/null || true
    wait
}
trap tear_down EXIT

program=
preempted=false
interrupted=false
pass_on() {
    preempted=true interrupted=true
    say "SIGTERM: asking the run for a checkpoint"
    # The program alone: Ray must live until the checkpoint is written.
    [[ -z $program ]] || kill -TERM "$program" 2>/dev/null || true
}
trap pass_on TERM

say "Ray on ${#hosts[@]} nodes; the head is ${hosts[0]} at $address:$port"
srun --nodes=1 --ntasks=1 --nodelist="${hosts[0]}" \
    ray start --head --node-ip-address="$address" --port="$port" --include-dashboard=false --temp-dir="$folder/r" --block &
head=$!
ray_steps+=("$head")

# shellcheck disable=SC2016
answers() { timeout 2 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$address" "$port" 2>/dev/null; }
deadline=$((SECONDS + ${RAY_START_TIMEOUT_S:-120}))
until answers; do
    kill -0 "$head" 2>/dev/null || { say "error: Ray did not start on ${hosts[0]}; see above" >&2; exit 1; }
    ((SECONDS < deadline)) || { say "error: nothing answers at $address:$port" >&2; exit 1; }
    sleep 0.5
done

if ((${#hosts[@]} > 1)); then
    others=$(IFS=,; echo "${hosts[*]:1}")
    srun --nodes=$((${#hosts[@]} - 1)) --ntasks=$((${#hosts[@]} - 1)) --nodelist="$others" \
        ray start --address="$address:$port" --block &
    ray_steps+=("$!")
fi

status=143
if [[ $preempted == false ]]; then
    # It waits for the nodes that it needs, and says which are missing.
    python "$@" --ray_address "$address:$port" &
    program=$!
    # A signal ends `wait` early; the program is still there and is waited for again.
    while
        interrupted=false status=0
        wait "$program" || status=$?
        [[ $interrupted == true ]]
    do :; done
fi

tear_down
# A run that was finishing anyway ends with 0 and stays finished.
if [[ $preempted == true && $status -ne 0 ]]; then
    say "back to the queue; the next start resumes from the checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
