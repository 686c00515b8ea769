#!/usr/bin/env bash
# The environment of TRL, whose distillation trainer scripts/training_peers times beside ours: .venv-trl, a thin one that
# shows .venv's packages too. Some seconds, and 10 MB on a disk.
set -euo pipefail
source "$(dirname "$0")/common.sh"

version=${TRL_VERSION:-1.16.0}
end_if_installed trl "$version"
thin_venv trl
.venv-trl/bin/python -m pip install --quiet --quiet --no-compile "trl==$version"
.venv-trl/bin/python -P -c "import trl; print('trl $version is ready: .venv-trl/bin/python')"
echo "$version" >.venv-trl/.installed
