"""The two kinds of passes that records are made from, whatever runs the target, and the draft that it writes with, as
far as that is known before anything is loaded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property

from decode.common.errors import InputError
from decode.drafters.saved_draft import DraftDescription, describe_draft
from decode.models.describe import ModelDescription
from distill.config import ResponseDraftConfig
from distill.records.record_manifest import RecordedRuntime
from distill.records.recorded_drafts import RecordedDraft
from distill.responses import Sampler
from distill.target_passes import Passes
from distill.time_spent import Stopwatch


class Runtime(AbstractContextManager):
    """A target that writes responses and reads texts; `with` ends whatever processes it has."""

    note: RecordedRuntime
    """What records are bound to."""
    draft: DraftDescription | None = None
    """What the responses are written with."""
    longest = 0
    """Tokens of the longest text of the run, once its plan is known."""
    writes_first = False
    """Whether all responses have to be written before any text is read, and calls made again are then answered from
    what is kept."""
    gives_p = False
    """Whether p comes along with the responses, and no text is read for it."""

    @cached_property
    def stopwatch(self) -> Stopwatch:
        """Of the run."""
        return Stopwatch()

    @abstractmethod
    def sampler(self) -> Sampler:
        """What writes responses for prompts."""

    @abstractmethod
    def passes(self, layers: Sequence[int]) -> Passes:
        """What gives the states of finished texts, at `layers` and the final ones."""

    def weights(self) -> str | None:
        """Fingerprint of the weights in memory; None where they are in another process."""
        return None

    def prepare(self, longest: int) -> None:
        """The plan is known, and nothing was started yet: `longest` tokens has its longest text, at most. Raises
        ConfigError and InputError where what runs the target cannot take them."""
        self.longest = longest

    def memory(self, longest: int) -> list[str]:
        """What its passes over texts of up to `longest` tokens take in this process, as lines of a plan."""
        return []

    def close(self) -> None:
        """End what runs."""

    def __exit__(self, *_: object) -> None:
        self.close()


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
            f"{found.max_positions}. Use fewer sampling.max_new_tokens, shorter prompts, or another "
            "sampling.draft.path"
        )
