#!/usr/bin/env bash
# One card, unattended, in calls of under ten minutes: autoregressive decoding against the card's memory bandwidth, then a
# code target of 0.34B parameters trained there, a draft distilled from it, and every decoder compared on the pair.
#   bash scripts/gpu_benchmark.sh             # all stages; where time is up (exit code 124), run it again: it goes on
#   bash scripts/gpu_benchmark.sh bandwidth   # one stage, or several by name
# Nothing is fetched, no environment is made: PYTHON (python3) must hold the packages, and hydra-core is the usual one missing.
# LIMIT_S: seconds a call may take. RUNS, RESULTS: folders. TOY=1: the same at toy size, on a CPU.
set -euo pipefail
source "$(dirname "$0")/common.sh"

limit_s=${LIMIT_S:-570}
runs=${RUNS:-runs/gpu}
results=${RESULTS:-docs/results}
interpreter=${PYTHON:-python3}
stages=(bandwidth target records draft decoders profile certificate publish)

# run python ARGUMENTS...: within what is left of the call.
run() {
    local left_s=$((limit_s - SECONDS)) code=0
    printf '$ %s\n' "$*"
    ((left_s > 0)) && timeout --signal=INT --kill-after=20 "$left_s" "$interpreter" "${@:2}" || code=$?
    if ((SECONDS >= limit_s)); then
        printf '\nTime is up after %d s. Run the same command again: it goes on from what was kept.\n' "$SECONDS" >&2
        exit 124
    fi
    return "$code"
}

check_packages() {
    local missing
    missing=$("$interpreter" -c '
from importlib.util import find_spec
wanted = ("torch", "transformers", "accelerate", "hydra", "matplotlib", "numpy", "yaml", "safetensors", "tokenizers", "tqdm")
print(*[name for name in wanted if find_spec(name) is None])')
    [ -z "$missing" ] || die "$interpreter lacks: $missing. Install them, or name another one: PYTHON=... bash $0"
}

bandwidth() {
    run python scripts/bandwidth.py $runs/bandwidth "$@"
}
target() {
    run python -m train experiment=gpu_target output_dir=$runs/target resume=auto "$@"
}
records() {
    run python -m distill experiment=gpu_records target.path=$runs/target/model output_dir=$runs/records resume=auto "$@"
}
draft() {
    run python -m train experiment=gpu_draft target.path=$runs/target/model records=$runs/records output_dir=$runs/draft \
        resume=auto "$@"
}
decoders() {
    run python -m eval experiment=gpu_pair mode=decoders target.path=$runs/target/model drafts.distilled=$runs/draft/model \
        output_dir=$runs/decoders resume=auto "$@"
}
profile() {
    run python -m eval experiment=gpu_pair mode=profile target.path=$runs/target/model drafts.distilled=$runs/draft/model \
        output_dir=$runs/profile resume=auto "$@"
}
certificate() {
    run python -m eval experiment=gpu_pair mode=certificate target.path=$runs/target/model \
        drafts.distilled=$runs/draft/model output_dir=$runs/certificate resume=auto "$@"
}
publish() {
    local card name
    card=$("$interpreter" -c '
import re, torch
name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
print(re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"))')
    run python -m eval.publish "$runs/decoders/results.json" "$results/decoders_$card"
    for name in bandwidth profile certificate; do
        cp "$runs/$name/$name.json" "$results/${name}_$card.json"
        cp "$runs/$name/$name.md" "$results/${name}_$card.md"
    done
}

# At toy size each stage takes seconds, and what it measures means nothing.
toy_text=(data.max_documents=24 data.heldout_share=0.3 data.validation_share=0.3)
toy_model=(draft.layers=1 draft.width=32 draft.heads=2 draft.kv_heads=2 draft.mlp_width=64 steps=4 sequence_length=64
    batch_size=2 validation_rows=2 checkpoint_every=2 validate_every=4)
toy_bandwidth=(--shape toy --copy-bytes 1000000 --new-tokens 16 --repeats 1)
toy_target=("${toy_text[@]}" "${toy_model[@]}" draft.max_positions=512 tokenizer.train_entries=300)
toy_records=("${toy_text[@]}" prompts.count=8 prompts.validation_count=4 prompts.tokens=16 sampling.max_new_tokens=16
    batch_size=4)
toy_draft=("${toy_model[@]}")
toy_lossless=(lossless.prompts=2 lossless.tokens=24 lossless.other_prompts=1 lossless.other_tokens=1 lossless.batch_size=2
    timing.prompts=2)
toy_decoders=("${toy_text[@]}" "${toy_lossless[@]}" prompts.tokens=16 decode.max_new_tokens=12 decoders.batch_sizes=[1]
    decoders.batches_timed=[1] decoders.texts=[code] decoders.screening_batches=1 decoders.static_batches=[]
    peers.num_assistant_tokens=[3] peers.confidence_threshold=[0.0] peers.prompt_lookup_num_tokens=[3])
toy_profile=("${toy_text[@]}" "${toy_lossless[@]}" profile.prompts=1 profile.max_new_tokens=16)
toy_certificate=("${toy_text[@]}" "${toy_lossless[@]}" certificate.tokens=40 certificate.other_tokens=20)
toy_publish=()

stage() {
    local arguments=()
    if [ -n "${TOY:-}" ]; then
        local -n small=toy_$1
        arguments=("${small[@]}")
    fi
    "$1" "${arguments[@]}"
}

check_packages
for name in "${@:-${stages[@]}}"; do
    [[ " ${stages[*]} " == *" $name "* ]] || die "There is no stage $name; choose from: ${stages[*]}"
    step "$name" 570 stage "$name"
done
show_times
