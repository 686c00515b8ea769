"""One way to draft in `mode=drafters`, as its arms name it; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from decode.drafters.untrained.config import UNTRAINED
from decode.sampling.config import SamplingConfig
from eval.comparison_config import named_settings


@dataclass(frozen=True)
class Way:
    """One way to draft: an entry of drafters.arms, or of drafters.draft_arms with one of `drafts` filled in."""

    name: str
    draft: str
    """A draft's folder, or the name of a drafter without weights."""
    settings: dict[str, Any]
    """Of the drafter."""
    changes: dict[str, Any]
    """Of `decode`."""
    lengths: tuple[int, ...]
    """Draft lengths tried."""
    texts: tuple[str, ...]
    """Kinds of text it is for."""
    is_asked: bool = True
    """Whether it has to fit a target; the company of a given draft need not."""
    is_of_draft: bool = False
    """Whether it drafts with one of `drafts`, which are drafts of `target`."""

    def sampling(self, base: SamplingConfig, temperature: float) -> dict[str, SamplingConfig]:
        """Draft length, as `length_name` has it -> the settings; ConfigError for what is no setting."""
        each = {length_name(k): {**self.changes, "num_draft_tokens": k} for k in self.lengths}
        return named_settings(each, base, temperature, f"drafters.arms.{self.name}")

    @property
    def members(self) -> list[str]:
        """Of a mixture."""
        return list(self.settings["members"]) if self.draft == "mixture" else []

    @property
    def has_weights(self) -> bool:
        """Whether any part of it was trained."""
        return bool(self.folders)

    @property
    def folders(self) -> list[str]:
        """Of all its parts that were trained."""
        return [draft for draft, _ in _parts(self.draft, self.settings) if draft not in UNTRAINED]

    @property
    def datastores(self) -> list[str]:
        """Folders of all that its parts look drafts up in."""
        found = [given.get("datastore") for draft, given in _parts(self.draft, self.settings) if draft == "retrieval"]
        return [folder for folder in found if folder is not None]


def _parts(draft: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A way to draft, and all that it drafts with, at any depth: (folder or name, settings)."""
    yield draft, settings
    helper, members = settings.get("helper"), settings.get("members") or []
    each = [
        (settings.get("draft"), {}),
        (helper, settings.get("helper_settings") or {}),
        *((member, (settings.get("settings") or {}).get(member) or {}) for member in members),
    ]
    for part, given in each:
        if part is not None:
            yield from _parts(part, given)


def length_name(k: int) -> str:
    """Of a draft length among settings."""
    return f"k={k}"
