"""Commands that start vLLM's server: with a draft, as `python -m train.export` gives it, or leaving hidden states."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.engines.inside_vllm.vllm_options import leaving_states
from distill.engines.server import HOST, PORT

LAUNCHER = Path(__file__).parent / "inside_vllm/vllm_launcher.py"
SPECULATION = "--speculative-config"
ALWAYS = ("--no-enable-prefix-caching",)  # prompts come back, and what is not read anew is not drafted from
"""Options of every server."""


def serve_command(
    python: str,
    target: str,
    draft: Sequence[str] = (),
    options: Sequence[str] = (),
    speculation: Mapping[str, Any] | None = None,
) -> list[str]:
    """The command of a server. `draft` are the options of the launch command of a draft's folder, none for the target
    alone; `speculation` goes into its --speculative-config."""
    own = ["--host", HOST, "--port", PORT, *ALWAYS]
    return [python, str(LAUNCHER), "--model", target, *own, *with_speculation(draft, speculation or {}), *options]


def with_speculation(draft: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """The options of a draft with other values in --speculative-config."""
    words = list(draft)
    if SPECULATION in words:
        words[words.index(SPECULATION) + 1] = json.dumps({**speculation(words), **changes})
    return words


def speculation(draft: Sequence[str]) -> dict[str, Any]:
    """What --speculative-config says in the options of a draft."""
    return json.loads(draft[list(draft).index(SPECULATION) + 1])


def states_options(layers: Sequence[int], folder: str, *, on_cpu: bool = False) -> list[str]:
    """The options of a server that leaves the hidden states of `layers` in `folder`."""
    options = leaving_states(list(layers), folder, on_cpu=on_cpu)
    speculation, transfer = (json.dumps(options[name]) for name in ("speculative_config", "kv_transfer_config"))
    return [SPECULATION, speculation, "--kv-transfer-config", transfer]


def states_command(
    target: str, dtype: str, longest: int, max_positions: int, layers: Sequence[int], folder: str
) -> str:
    """What a person types to start such a server for texts of `longest` tokens, on GPUs; a CPU's names another
    connector (docs/how-to/record_a_target.md)."""
    length = longest + 1  # a token behind each text
    words = ["vllm", "serve", target, "--dtype", dtype, "--max-model-len", str(length)]
    words += [*ALWAYS, "--generation-config", "vllm", *states_options(layers, folder)]
    return ("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 " if length > max_positions else "") + shlex.join(words)
