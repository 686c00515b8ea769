#!/usr/bin/env bash
# The environment of llama.cpp: .venv-llamacpp, a thin one that shows .venv's packages too, with its server (the wheel of
# xllamacpp) and its converter, .venv-llamacpp/llama.cpp/convert_hf_to_gguf.py (out of llama-cpp-python's source, since
# the package gguf is without it).
#   pytest -m engines tests/engines/test_llamacpp.py
# About a minute and a half, and 0.3 GB on a disk, 0.8 GB while it is made; CPU only.
set -euo pipefail
source "$(dirname "$0")/common.sh"

server=${XLLAMACPP_VERSION:-2026.10.11549}
converter=${LLAMA_CPP_PYTHON_VERSION:-0.3.36}  # llama.cpp 0c1e57098, ten days older than the server
version="$server, $converter"
end_if_installed llamacpp "$version"
has_room 1 llama.cpp
thin_venv llamacpp
pip=(.venv-llamacpp/bin/python -m pip)
# sentencepiece: the converter imports it before it looks whether it is needed.
"${pip[@]}" install --quiet --quiet --no-compile --no-deps "xllamacpp==$server" sentencepiece
# pip asks a source for its metadata, which this backend writes; nothing is compiled.
"${pip[@]}" install --quiet --quiet --no-compile scikit-build-core
unpacked=$(mktemp -d .venv-llamacpp/unpacked.XXXX)
trap 'rm -rf "$unpacked"' EXIT
"${pip[@]}" download --quiet --quiet --no-deps --no-build-isolation --no-binary :all: --dest "$unpacked" \
    "llama-cpp-python==$converter"
tar -xzf "$unpacked"/*.tar.gz -C "$unpacked"
rm -rf .venv-llamacpp/llama.cpp
mkdir .venv-llamacpp/llama.cpp
source=$(echo "$unpacked"/*/vendor/llama.cpp)
mv "$source"/{convert_hf_to_gguf.py,conversion,gguf-py,LICENSE} .venv-llamacpp/llama.cpp/
.venv-llamacpp/bin/python .venv-llamacpp/llama.cpp/convert_hf_to_gguf.py --help >/dev/null
.venv-llamacpp/bin/python -P -c 'import xllamacpp; print("llama.cpp is ready: .venv-llamacpp/bin/python")'
echo "$version" >.venv-llamacpp/.installed
