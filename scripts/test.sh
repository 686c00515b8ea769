#!/usr/bin/env bash
# Checks the project: install, lint, format, types, documentation and the default tier of tests, in under 10 minutes on
# 2 cores.
#   bash scripts/test.sh            # what everyone runs
#   bash scripts/test.sh --changed  # and what the paths changed since the last --all ask for, by the table below; CI.
#                                   # On CPUs without bfloat16, which are slow, without the engines tier
#   bash scripts/test.sh --all      # every tier, 40 minutes; before a release, it has to be green
set -euo pipefail
source "$(dirname "$0")/common.sh"

# Where a changed path matches, these tests of that tier are run: what the default tier has of them is too little to trust.
ASKED='
^(tests/)?decode/                                    slow     tests/decode
^(tests/)?distill/                                   slow     tests/distill
^(tests/)?train/                                     slow     tests/train
^(tests/)?eval/                                      slow     tests/eval
^(conf|scripts|tests/[^/]+\.py|pyproject|decode/common)  slow  tests/common tests/test_*.py
^train/[^/]+\.py|^tests/train/test_processes          engines  tests/train
^decode/formats|^train/(export|check)|^tests/engines  engines  tests/engines/test_[acl]*.py tests/engines/test_own_mtp.py tests/engines/test_s*.py
^distill/(engines|runtimes)|^tests/engines           engines  tests/engines/test_openai_servers.py tests/engines/test_records.py tests/engines/test_vllm_server.py
^eval/modes/(served|compare)|^(distill|tests)/engines  engines  tests/engines/test_s*.py tests/eval
'
LAST_ALL=.ci/all_passed # the revision at which --all passed last

# selected TIER: the tests of that tier that this run asks for, each once.
selected() {
    local regex tier paths
    case $MODE in
    --all) echo tests ;;
    --changed) while read -r regex tier paths; do
        if [ "$tier" = "$1" ] && grep -qE "$regex" <<<"$CHANGED"; then printf '%s\n' $paths; fi
    done <<<"$ASKED" | sort -u ;;
    esac
}

# DeepSpeed compiles small C++ operators when a process first asks for them.
compiler() {
    command -v "${CXX:-g++}" >/dev/null ||
        die "The engines tier needs a C++ compiler. On Debian and Ubuntu: apt-get install g++ python3-dev"
}

# environment NAME: of vllm, speculators or llamacpp. Not every platform has wheels of them, and vLLM needs room on the
# disk: where an environment cannot be had, its tests are skipped, and say so.
environment() {
    local log why
    log=$(mktemp)
    bash "scripts/$1_env.sh" 2>&1 | tee "$log" || {
        why="scripts/$1_env.sh failed: $(grep -v '^ *$' "$log" | tail -n 1)"
        export "NO_${1^^}=$why"
        printf 'The tests of %s are skipped: %s\n' "$1" "$why"
    }
    rm "$log"
}

MODE=${1:-}
case $MODE in
"" | --all) CHANGED="" ;;
--changed) CHANGED=$(git diff --name-only "$(cat $LAST_ALL)" 2>/dev/null) || {
    echo "The revision in $LAST_ALL is not in this clone, so what has changed since is not known: every tier is run."
    MODE=--all
} ;;
*) die "There is no $MODE. Use --changed, --all, or nothing." ;;
esac

# One thread for each process: the tests' matrices are tiny, and the engines tier runs two processes at once.
export OMP_NUM_THREADS=1

step "install" 150 ensure_test_environment
step "lint" 10 ruff check
step "format" 10 ruff format --check
step "types" 90 pyright
step "docs" 60 env NO_MKDOCS_2_WARNING=1 mkdocs build -f .mkdocs.yml --strict
step "tests: default" 240 pytest -q
slow=$(selected slow) engines=$(selected engines)
if [ "$MODE" = --changed ] && [ -n "$engines" ] && emulates_bfloat16; then
    engines=""
    echo "The engines tier is left out: a CPU without arithmetic for bfloat16 takes 45 minutes for it. --all runs it here, too."
fi
# shellcheck disable=SC2086 # several paths
if [ -n "$slow" ]; then
    step "tests: slow" 900 pytest -q --no-loadscope-reorder -m "slow and not engines and not exhaustive and not gpu and not network" $slow
fi
# shellcheck disable=SC2086
if [ -n "$engines" ]; then
    step "compiler" 1 compiler
    step "vLLM" 150 environment vllm
    step "speculators" 60 environment speculators
    step "llama.cpp" 90 environment llamacpp
    step "tests: engines" 1080 pytest -q -rs -n 0 -m "engines and not exhaustive and not gpu and not network" $engines
fi
show_times
if [ "$MODE" = --all ] && [ -z "$(git status --porcelain)" ]; then
    git rev-parse HEAD >$LAST_ALL
    echo "Every tier passed. Commit $LAST_ALL, which says so of this revision."
fi
