#!/usr/bin/env bash
# Drafts whose optimizer state does not fit one card: DeepSpeed ZeRO, built in the process from engine=, no JSON file.
#   deepspeed_zero1 shards the optimizer state, deepspeed_zero2 the gradients too, deepspeed_zero3 the weights as well.
#   GPUS=8 ENGINE=deepspeed_zero3 bash scripts/launch_deepspeed.sh [train overrides]
set -euo pipefail

gpus=${GPUS:-8}
engine=${ENGINE:-deepspeed_zero2}

# Records: see launch_multi_gpu.sh. The target is not loaded in training, so that all memory is the draft's.
torchrun --standalone --nproc_per_node "$gpus" \
    -m train target.path=Qwen/Qwen3-32B draft=lm draft.init_from=Qwen/Qwen3-1.7B objective=forward_kl engine="$engine" \
    records=runs/qwen3-32b/records output_dir=runs/qwen3-32b/draft batch_size=2 gradient_accumulation=8 lr=2e-5 \
    resume=auto "$@"
