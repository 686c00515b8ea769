"""What the target knows: corpora, prompts, responses, records of its distribution, and objectives over those."""

from decode.common.version import __version__

__all__ = ["__version__"]
