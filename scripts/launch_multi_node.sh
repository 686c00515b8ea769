#!/usr/bin/env bash
# Several machines: start this once on each, with the same MAIN_ADDRESS and its own NODE (0 on the machine of that address).
#   MAIN_ADDRESS=10.0.0.1 NODES=2 NODE=0 GPUS=8 bash scripts/launch_multi_node.sh [train overrides]
# Under Slurm: srun --nodes 2 --ntasks-per-node 1 bash -c 'NODE=$SLURM_NODEID bash scripts/launch_multi_node.sh'
# The run folder and the records lie on a disk that all machines see: rank 0 writes the checkpoints, all read them back.
set -euo pipefail

nodes=${NODES:-2}
node=${NODE:-0}
gpus=${GPUS:-8}
address=${MAIN_ADDRESS:?the address of the machine that starts with NODE=0}
port=${MAIN_PORT:-29500}

torchrun --nnodes "$nodes" --node_rank "$node" --nproc_per_node "$gpus" --master_addr "$address" --master_port "$port" \
    -m train target.path=Qwen/Qwen3-8B draft=lm draft.init_from=Qwen/Qwen3-0.6B objective=forward_kl \
    engine=deepspeed_zero2 records=runs/qwen3-8b/records output_dir=runs/qwen3-8b/draft lr=2e-5 resume=auto "$@"
