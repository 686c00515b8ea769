"""The page of a comparison."""

from __future__ import annotations

from typing import Any

from eval.modes.compare import decoder_page, drafter_page


def render_page(results: dict[str, Any]) -> str:
    """What was found, a plot, every table, the method, and the definitions."""
    return _of(results).render_page(results)


def render_summary(results: dict[str, Any], is_published: bool = False) -> str:
    """The same without the plot; published, without details."""
    return _of(results).render_summary(results, is_published)


def _of(results: dict[str, Any]) -> Any:
    return drafter_page if "which_when" in results else decoder_page
