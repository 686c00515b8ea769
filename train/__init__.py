"""Fitting a draft to a target, or a small target to text: loop, engines, checkpoints, export."""

from decode.common.version import __version__

__all__ = ["__version__"]
