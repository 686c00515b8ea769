#!/usr/bin/env bash
# Which objective and learning rate suit a draft? One run for each combination, on the toy's records.
# Each job is a process with a folder of its own under runs/sweep; finished ones are skipped when this is run again.
#   bash scripts/sweep.sh [train overrides, e.g. steps=200]
set -euo pipefail

python -m train --multirun experiment=toy_draft output_dir=runs/sweep resume=auto \
    objective=forward_kl,tv lr=1e-3,3e-3 "$@"

# A launcher starts one job at a time: loop over the values in the shell instead.
for layers in 1 2; do
    accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
        -m train experiment=toy_draft draft.layers="$layers" output_dir="runs/sweep/layers-$layers" resume=auto "$@"
done

# The first four are compared in runs/sweep/sweep.md; the kept checkpoint's figures of each stand in its manifest.
for manifest in runs/sweep/layers-*/manifest.json; do
    echo "$manifest"
    python -c 'import json, sys; print(json.dumps(json.load(open(sys.argv[1])), indent=1))' "$manifest"
done
