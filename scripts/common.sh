# Sourced by the scripts beside it: a virtual environment of its own, and steps that report their time.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Nothing here needs a model hub or an account; a stray look-up would only wait for a network.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline WANDB_SILENT=true TOKENIZERS_PARALLELISM=false
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# What a stage compiles serves the next: without it every process compiles torch and transformers anew, for 15 s.
unset PYTHONDONTWRITEBYTECODE

die() {
    printf '\n%s\n' "$@" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# The interpreter to build the environment from: $PYTHON, or the first one of version 3.11 or later.
find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if command -v "$name" >/dev/null && is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    die "No Python 3.11 or later found. Install one, or name it: PYTHON=/path/to/python3 bash $0"
}

make_venv() {
    local python
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python has no venv module. On Debian and Ubuntu: apt-get install python3-venv"
    "$python" -m venv .venv
}

# Modules are compiled when they are first imported, not all at once when they are installed.
pip_install() {
    .venv/bin/python -m pip install --quiet --quiet --no-compile "$@"
}

# torch first, from the index the user names (CPU builds live apart from the default index), then the rest.
# PIP_INDEX_URL is honoured by pip itself.
install_pipeline() {
    local torch="torch==${TORCH_VERSION:-2.13.0}"
    echo "$torch, from ${TORCH_INDEX_URL:-${PIP_INDEX_URL:-the default index}} (the largest: 0.2 GB for CPUs, 3 GB with CUDA)"
    pip_install "setuptools>=77" wheel packaging
    pip_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch"
    echo "draftsmith and what it needs"
    pip_install --no-build-isolation --editable ".[train,eval,gguf]"
}

# DeepSpeed's setup looks at the installed torch.
install_test_tools() {
    echo "DeepSpeed and the tools of the tests"
    DS_BUILD_OPS=0 pip_install --no-build-isolation "deepspeed>=0.18"
    pip_install --no-build-isolation --editable ".[train,eval,deepspeed,gguf,grammar,quantization,dev]"
}

# once_for STAMP INSTALL: installs unless that was done for today's pyproject.toml.
once_for() {
    cmp -s pyproject.toml ".venv/$1" && return
    "$2"
    cp pyproject.toml ".venv/$1"
}

# Makes and activates .venv, with what the pipeline needs; only activates it where it is up to date with pyproject.toml.
ensure_environment() {
    [ -x .venv/bin/python ] || make_venv
    is_new_enough .venv/bin/python || die ".venv holds an old Python. Delete it, and run this again."
    once_for .installed-from install_pipeline
    # shellcheck disable=SC1091
    source .venv/bin/activate
    avoid_trapped_amx
}

# Some virtual machines report AMX and trap its instructions: a product in bfloat16 then ends the process with "Illegal
# instruction", without a word of Python's.
avoid_trapped_amx() {
    if [ -n "${ONEDNN_MAX_CPU_ISA:-}" ] || ! grep -qw amx_bf16 /proc/cpuinfo 2>/dev/null; then return; fi
    if python -c 'import torch; x = torch.ones(64, 512, dtype=torch.bfloat16); x @ x.T' 2>/dev/null; then return; fi
    export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16
    echo "This machine reports AMX and cannot run it: ONEDNN_MAX_CPU_ISA=$ONEDNN_MAX_CPU_ISA is set for the steps below."
}

# And what lint, types and all tiers of tests need.
ensure_test_environment() {
    ensure_environment
    once_for .installed-test-tools-from install_test_tools
}

# end_if_installed NAME VERSION: ends the script that makes .venv-NAME where that was done for this version.
end_if_installed() {
    [ "$(cat ".venv-$1/.installed" 2>/dev/null)" = "$2" ] || return 0
    echo "$1 $2 is installed: .venv-$1/bin/python"
    exit
}

# has_room GB WHAT
has_room() {
    local free_gb
    free_gb=$(df -Pk . | awk 'END { print $4 / 1000000 }')
    awk -v free="$free_gb" -v wanted="$1" 'BEGIN { exit free < wanted }' ||
        die "$2 needs $1 GB on the disk, and $free_gb GB are free."
}

# thin_venv NAME: makes .venv-NAME, which shows .venv's packages too, under its own. Starts anew where an earlier attempt
# was stopped before pip was there.
thin_venv() {
    local site='import sysconfig; print(sysconfig.get_path("purelib"))'
    [ -x .venv/bin/python ] || die "There is no .venv, whose torch .venv-$1 uses. bash scripts/test.sh makes it."
    ".venv-$1/bin/python" -m pip --version >/dev/null 2>&1 || .venv/bin/python -m venv --clear ".venv-$1"
    .venv/bin/python -c "$site" >"$(".venv-$1/bin/python" -c "$site")/of_draftsmith.pth"
}

STEPS=()
SECONDS=0

# step NAME BUDGET_S COMMAND...: shows the command (unless it is a function of ours), runs it, notes its time.
step() {
    local name=$1 budget_s=$2 began_s=$SECONDS
    shift 2
    printf '\n== %s\n' "$name"
    [ "$(type -t "$1")" = function ] || printf '$ %s\n' "$*"
    "$@"
    STEPS+=("$name|$((SECONDS - began_s))|$budget_s")
}

show_times() {
    local line name seconds budget_s total_budget_s=0
    printf '\n%-28s %8s %8s\n' step seconds budget
    for line in "${STEPS[@]}"; do
        IFS='|' read -r name seconds budget_s <<<"$line"
        printf '%-28s %8d %8d\n' "$name" "$seconds" "$budget_s"
        total_budget_s=$((total_budget_s + budget_s))
    done
    printf '%-28s %8d %8d\n' total "$SECONDS" "$total_budget_s"
}

# Whether the device that stages choose is a CPU without arithmetic for bfloat16; needs the environment.
emulates_bfloat16() {
    python - <<'EOF'
import sys

import torch

from decode.common.environment import resolve_device
from decode.models.arithmetic import is_emulated

sys.exit(not is_emulated(torch.bfloat16, resolve_device("auto")))
EOF
}
