"""Judging drafts and decoders: prompts, losslessness, speed, peers, the report."""

from decode.common.version import __version__

__all__ = ["__version__"]
