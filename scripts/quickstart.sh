#!/usr/bin/env bash
# The main job on a bare machine: a small chat model, records of what it says, a head distilled from them, one streamed
# chat, and a report that says what paid for which kind of chat. Under 10 minutes on 2 cores, install included; needs
# Python 3.11+, git and a package index; no GPU, no model hub, no account.
# Every stage resumes: run it again after an interruption, and nothing that is finished is done twice.
# shellcheck disable=SC2086 # settings of several words
set -euo pipefail
hub_offline=${HF_HUB_OFFLINE:-0}
source "$(dirname "$0")/common.sh"

# Set for all stages: torch alone would take every core, accelerate launch alone just one.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))}

step "install" 50 ensure_environment
step "model" 10 env HF_HUB_OFFLINE="$hub_offline" bash scripts/example_model.sh
# A CPU with AVX2 alone computes bfloat16 element by element: hours in place of minutes.
training=engine.precision=fp32
target=target.dtype=float32
if emulates_bfloat16; then
    echo "This CPU has no arithmetic for bfloat16: everything is computed in float32."
else
    training="" target=""
fi

step "records" 130 python -m distill experiment=quickstart_records resume=auto $target
step "head" 60 accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no \
    --dynamo_backend no -m train experiment=quickstart_head resume=auto $training $target
step "one chat" 25 python -m decode target=smollm2 draft=mixture decode=greedy chat=true \
    'draft.settings.members=[ngram,runs/quickstart/head/model]' prompt_file=scripts/quickstart_prompt.txt $target
# What hours of records and training buy stands beside what these minutes bought; that head is of the package's file.
shipped=drafts.shipped=docs/results/smollm2/head
both=drafts.both=lookup+shipped
[ -f runs/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf ] || shipped="" both=""
step "report" 300 python -m eval experiment=quickstart_report resume=auto $target $shipped $both

show_times
printf '\nWhat paid for which kind of chat:\n'
grep -E '^- At T=[^ ]*, by the median' runs/quickstart/report/summary.md
echo '- The head, mtp, has read 23,000 tokens. More records raise its alpha, and with it every kind that nothing pays for.'
[ -z "$shipped" ] || echo '- The head that comes along, shipped, has read 7,700,000; both is that one and the lookup.'
printf '\nThe report: runs/quickstart/report/index.html (figures in results.json, a summary in summary.md)\n'
printf '\nNext: source .venv/bin/activate, and docs/tutorial.md, from step 5 on with what lies in runs/quickstart.\n'
