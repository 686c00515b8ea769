"""vLLM's server: the command that starts it with a draft, as `python -m train.export` gives it, and its environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.modes.served.engine.server import HOST, PORT

LAUNCHER = Path(__file__).with_name("vllm_launcher.py")
SPECULATION = "--speculative-config"
ALWAYS = ("--no-enable-prefix-caching",)  # prompts come back, and what is not read anew is not drafted from
"""Options of every server that is measured."""


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
