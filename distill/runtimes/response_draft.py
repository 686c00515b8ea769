"""The draft that responses are written with, as far as it is known before anything is loaded."""

from __future__ import annotations

from decode.common.errors import InputError
from decode.drafters.saved_draft import DraftDescription, describe_draft
from decode.models.load import ModelDescription
from distill.config import ResponseDraftConfig
from distill.records.recorded_drafts import RecordedDraft


def describe(asked: ResponseDraftConfig, target: ModelDescription) -> DraftDescription | None:
    """None where none is asked for; InputError for one that does not fit the target."""
    if asked.path is None:
        return None
    return describe_draft(asked.path, target, "sampling.draft", asked.loading)


def recorded(asked: ResponseDraftConfig, found: DraftDescription | None) -> RecordedDraft | None:
    """What records say of it."""
    if found is None:
        return None
    return RecordedDraft(
        path=found.path,
        family=found.family,
        fingerprint=found.fingerprint,
        num_draft_tokens=asked.num_draft_tokens,
    )


def check_room(found: DraftDescription | None, longest: int) -> None:
    """Raise InputError where a text may be longer than what the draft reads."""
    if found is not None and longest > found.max_positions:
        raise InputError(
            f"the longest text of the run may have {longest} tokens, and the draft {found.path} reads "
            f"{found.max_positions}: it has no positions for the rest. Use fewer sampling.max_new_tokens, shorter "
            "prompts, or another sampling.draft.path"
        )
