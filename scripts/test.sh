#!/usr/bin/env bash
# Everything that CI checks: install, lint, format, types, documentation, and three tiers of tests. Under an hour on 2
# cores.
set -euo pipefail
source "$(dirname "$0")/common.sh"

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

# One thread for each process: the tests' matrices are tiny, and the engines tier runs two processes at once.
export OMP_NUM_THREADS=1

step "install" 150 ensure_test_environment
step "compiler" 1 compiler
step "lint" 10 ruff check
step "format" 10 ruff format --check
step "types" 90 pyright
step "docs" 60 env NO_MKDOCS_2_WARNING=1 mkdocs build -f .mkdocs.yml --strict
step "tests: default" 180 pytest -q
step "tests: slow" 900 pytest -q -m "slow and not engines and not exhaustive and not gpu and not network"
step "vLLM" 150 environment vllm
step "speculators" 60 environment speculators
step "llama.cpp" 90 environment llamacpp
step "tests: engines" 1080 pytest -q -rs -n 0 -m "engines and not exhaustive and not gpu and not network"
show_times
