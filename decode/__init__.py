"""The ground floor: a provably lossless speculative decoder for unmodified transformers models.

>>> from decode import generate, load_drafter, speculative

The names are resolved on first use, so that importing `decode.common` for a bad configuration does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from decode.common.version import __version__

if TYPE_CHECKING:
    from decode.api import generate
    from decode.conversation import Conversation
    from decode.custom_generate import speculative
    from decode.drafters.adapters import load_adapters
    from decode.drafters.saved_draft import load_drafter
    from decode.rehearsal import warm_up

__all__ = ["Conversation", "__version__", "generate", "load_adapters", "load_drafter", "speculative", "warm_up"]

_HOME = {
    "Conversation": "decode.conversation",
    "generate": "decode.api",
    "speculative": "decode.custom_generate",
    "load_adapters": "decode.drafters.adapters",
    "load_drafter": "decode.drafters.saved_draft",
    "warm_up": "decode.rehearsal",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'decode' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
