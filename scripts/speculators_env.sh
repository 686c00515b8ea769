#!/usr/bin/env bash
# The environment of the speculators library: .venv-speculators, a thin one that shows .venv's packages too, since the
# library wants an older transformers than ours.
#   pytest -m engines tests/engines/test_speculators.py
# About a minute, and 0.1 GB on a disk.
set -euo pipefail
source "$(dirname "$0")/common.sh"

version=${SPECULATORS_VERSION:-0.9.0}
stamp=.venv-speculators/.installed
if [ "$(cat "$stamp" 2>/dev/null)" = "$version" ]; then
    echo "speculators $version is installed: .venv-speculators/bin/python"
    exit
fi
[ -x .venv/bin/python ] || die "There is no .venv, whose torch this environment uses. bash scripts/test.sh makes it."
site='import sysconfig; print(sysconfig.get_path("purelib"))'
[ -x .venv-speculators/bin/python ] || .venv/bin/python -m venv .venv-speculators
.venv/bin/python -c "$site" >"$(.venv-speculators/bin/python -c "$site")/of_draftsmith.pth"
pip=(.venv-speculators/bin/python -m pip install --quiet --quiet --no-compile)
# With what it depends on it would bring torchvision, torchaudio and, of the default index, a torch for CUDA.
"${pip[@]}" --no-deps "speculators==$version" "hs-connectors==$version"
"${pip[@]}" "transformers==5.19.0" "loguru<=0.7.3" pydantic-settings openai
.venv-speculators/bin/python -P -c "import speculators; print('speculators $version is ready: .venv-speculators/bin/python')"
echo "$version" >"$stamp"
