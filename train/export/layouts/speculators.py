"""What the speculators library wants to know of a head, beside its shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from train.export.source import Source

SPECULATORS_VERSION = "0.9.0"


def speculators_fields(source: Source, kind: str) -> dict[str, Any]:
    """Which kind of head, of which target, and how many tokens it drafts; `vllm serve FOLDER` goes by it too."""
    path = Path(source.target.path)
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": source.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {
        "name_or_path": str(path.absolute()) if path.is_dir() else source.target.path,
        "architectures": source.target.config.architectures or [],
    }
    return {
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": verifier,
        },
    }
