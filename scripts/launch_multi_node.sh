#!/usr/bin/env bash
# One program on several nodes, by plain torchrun. Run the same line on every node, each with its own NODE_RANK:
#
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 scripts/launch_multi_node.sh open_instruct/dpo.py CONFIG.yaml --flag ...
#
#   NUM_NODES      how many nodes
#   NODE_RANK      this node's number, from 0
#   MASTER_ADDR    an address of node 0 that every node can reach
#   MASTER_PORT    a free port of node 0 (default: 29500)
#   GPUS_PER_NODE  processes to start on this node (default: one for each of its GPUs); nodes may differ
#
# The output folder, the model and the data must be on a file system that all nodes see.
set -euo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }
die() { printf '%s\n' "launch_multi_node: error: $*" >&2; exit 2; }

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    usage
    exit 0
fi
for name in NUM_NODES NODE_RANK MASTER_ADDR; do
    [[ -n ${!name:-} ]] || die "$name is not set; see $0 --help"
done
[[ $NUM_NODES =~ ^[1-9][0-9]*$ ]] || die "NUM_NODES is '$NUM_NODES'; it must be a number from 1 up"
[[ $NODE_RANK =~ ^[0-9]+$ ]] || die "NODE_RANK is '$NODE_RANK'; it must be a number from 0 up"
((NODE_RANK < NUM_NODES)) || die "NODE_RANK is $NODE_RANK; with NUM_NODES=$NUM_NODES it goes from 0 to $((NUM_NODES - 1))"
(($# > 0)) || die "no program given, as in: $0 open_instruct/dpo.py --flag ...; see $0 --help"
command -v torchrun >/dev/null || die "torchrun is not on PATH; activate the environment: source .venv/bin/activate"

# Time for a checkpoint after a SIGTERM before torchrun kills its processes; releases that do not know it wait 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

# What ranks read to find out how the nodes are cut.
export NUM_NODES

meet=(--master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}")
# On several nodes torchrun's store listens on every interface of node 0, and asks for no password.
((NUM_NODES > 1)) || meet=(--rdzv_backend loopback --rdzv_endpoint localhost)

exec torchrun \
    --nnodes "$NUM_NODES" \
    --node_rank "$NODE_RANK" \
    --nproc_per_node "${GPUS_PER_NODE:-gpu}" \
    "${meet[@]}" \
    "$@"
