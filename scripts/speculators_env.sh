#!/usr/bin/env bash
# The environment of the speculators library: .venv-speculators, a thin one that shows .venv's packages too, since the
# library wants an older transformers than ours.
#   pytest -m engines tests/engines/test_speculators.py
# About a minute, and 0.1 GB on a disk.
set -euo pipefail
source "$(dirname "$0")/common.sh"

version=${SPECULATORS_VERSION:-0.9.0}
end_if_installed speculators "$version"
thin_venv speculators
pip=(.venv-speculators/bin/python -m pip install --quiet --quiet --no-compile)
# With what it depends on it would bring torchvision, torchaudio and, of the default index, a torch for CUDA.
"${pip[@]}" --no-deps "speculators==$version" "hs-connectors==$version"
"${pip[@]}" "transformers==5.19.0" "loguru<=0.7.3" pydantic-settings openai
.venv-speculators/bin/python -P -c "import speculators; print('speculators $version is ready: .venv-speculators/bin/python')"
echo "$version" >.venv-speculators/.installed
