#!/usr/bin/env bash
# One program on the nodes of a Slurm job. Submit from the repository's root, with the environment activated:
#
#   sbatch --nodes 4 scripts/launch_slurm.sh open_instruct/dpo.py CONFIG.yaml --flag ...
#
# Two minutes before the time limit, or when a job of higher priority takes the nodes, the run writes a checkpoint,
# the job goes back to the queue, and the next start resumes by itself.
#SBATCH --job-name=open-instruct
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

die() { printf '%s\n' "launch_slurm: error: $*" >&2; exit 2; }

[[ -n ${SLURM_JOB_ID:-} ]] || die "not inside a Slurm job; submit it: sbatch $0 open_instruct/dpo.py --flag ..."
(($# > 0)) || die "no program given, as in: sbatch $0 open_instruct/dpo.py --flag ..."
# Slurm runs a copy of this file from a folder of its own; the rest of the repository is where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-.}"
[[ -x scripts/launch_multi_node.sh ]] || die "$PWD is not the repository's root; call sbatch from there"

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export NUM_NODES=$SLURM_JOB_NUM_NODES
export MASTER_ADDR=${hosts%%$'\n'*}
# Two jobs that share the first node must not share a port.
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}

# The batch shell alone gets the warning. It passes it on to every process of the step, torchrun's and ours.
preempted=false
interrupted=false
pass_on() {
    preempted=true interrupted=true
    printf '%s\n' "launch_slurm: SIGTERM: asking the run for a checkpoint"
    scancel --signal=TERM "$SLURM_JOB_ID" || true
}
trap pass_on TERM

# The expansions are the node's own: hence the single quotes.
# shellcheck disable=SC2016
srun --ntasks-per-node=1 --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK=$SLURM_NODEID exec scripts/launch_multi_node.sh "$@"' launch "$@" &
step=$!

# A signal ends `wait` early; the step is still there and is waited for again.
while
    interrupted=false status=0
    wait "$step" || status=$?
    [[ $interrupted == true ]]
do :; done

# A run that was finishing anyway ends with 0 and stays finished.
if [[ $preempted == true && $status -ne 0 ]]; then
    printf '%s\n' "launch_slurm: back to the queue; the next start resumes from the checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
