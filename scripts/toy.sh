#!/usr/bin/env bash
# The whole pipeline on a bare machine: a target, its records, two drafts and a head, one completion, one report.
# 1,075 s on 2 cores of an Intel Xeon, install included; needs Python 3.11+ and git, no GPU, no model hub, no account.
# Every stage resumes: run it again after an interruption, and nothing that is finished is done twice.
# shellcheck disable=SC2086 # settings of several words
set -euo pipefail
source "$(dirname "$0")/common.sh"

# Set for all stages: torch alone would take every core, accelerate launch alone just one.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))}

step "install" 70 ensure_environment
# A CPU with AVX2 alone computes bfloat16 element by element: hours in place of minutes.
training=engine.precision=fp32
target=target.dtype=float32
if emulates_bfloat16; then
    echo "This CPU has no arithmetic for bfloat16: everything is computed in float32."
else
    training="" target=""
fi

step "target" 320 python -m train experiment=toy_target resume=auto $training
step "records" 160 python -m distill experiment=toy_records resume=auto $target
step "draft, distilled" 95 accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no \
    --dynamo_backend no -m train experiment=toy_draft resume=auto $training $target
step "draft, text alone" 95 accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no \
    --dynamo_backend no -m train experiment=toy_draft_text resume=auto $training $target
step "head" 95 accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no \
    --dynamo_backend no -m train experiment=toy_head resume=auto $training $target
step "one completion" 20 python -m decode target=toy draft.path=runs/toy/draft/model \
    prompt_file=scripts/toy_prompt.txt $target
step "report" 380 python -m eval experiment=toy_report resume=auto $target

show_times
printf '\nThe report: runs/toy/report/index.html (figures in results.json, a summary in summary.md)\n'
