#!/usr/bin/env bash
# One machine, several GPUs: records of Qwen3-8B on chat prompts, and a 0.6B draft distilled from them.
#   GPUS=8 bash scripts/launch_multi_gpu.sh [train overrides, e.g. lr=1e-5]
# Needs the hub, or the same models and data in folders. Ask for the cost first: add plan=true to each command.
set -euo pipefail

gpus=${GPUS:-8}
run=runs/qwen3-8b

# Each rank answers its share of the prompts and writes its own shards.
torchrun --standalone --nproc_per_node "$gpus" -m distill target.path=Qwen/Qwen3-8B data=hub \
    data.path=HuggingFaceH4/ultrachat_200k data.hub_split=train_sft output_dir=$run/records resume=auto

# engine= decides what is built; the launcher only starts the processes. torchrun would do as well.
accelerate launch --multi_gpu --num_processes "$gpus" --num_machines 1 --mixed_precision no --dynamo_backend no \
    -m train target.path=Qwen/Qwen3-8B draft=lm draft.init_from=Qwen/Qwen3-0.6B objective=forward_kl engine=ddp \
    records=$run/records output_dir=$run/draft lr=2e-5 resume=auto "$@"

# The report needs one process; target.device_map=auto spreads a target that one card cannot hold.
python -m eval target.path=Qwen/Qwen3-8B drafts.distilled=$run/draft/model drafts.undistilled=Qwen/Qwen3-0.6B \
    data=hub data.path=HuggingFaceH4/ultrachat_200k data.hub_split=test_sft output_dir=$run/report resume=auto
