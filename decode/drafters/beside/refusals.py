"""Which drafters can draft the next round while the target verifies this one, and which predict what becomes of their
tokens; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping

from decode.common.typed_config import require

UNNAMED = "this drafter"
LOOKED_UP = "looks its tokens up in no time to speak of, so there is nothing to overlap"
REASONS: Mapping[str, str] = {
    "ngram": LOOKED_UP,
    "edit": LOOKED_UP,
    "retrieval": LOOKED_UP,
    "jacobi": "guesses in the target's own passes",
    "early_exit": "drafts with the target's own layers, which are busy with this round",
    "cascade": "follows the text on the host, and knows no text that is undecided",
    "mixture": "follows the text on the host, and knows no text that is undecided",
    "foreign": "follows the text on the host, and knows no text that is undecided",
    UNNAMED: "is no draft language model",
}
"""Of drafters without training, by name."""
OF_HEADS = "drafts from the target's hidden states, and the target is only about to make those of this round"
ELSEWHERE = "is no draft language model, which alone is put on a device of its own"


def presumed_family(path: str | None) -> str | None:
    """The name of a drafter without weights; of any folder `lm`, until it is read."""
    return path if path is None or path in REASONS else "lm"


def check_overlap(family: str | None, overlap: bool, where: str) -> None:
    """Raise ConfigError for a draft of this family (None where there is none) that cannot be drafted ahead."""
    require(
        not overlap or family is not None,
        f"{where}=true drafts the next round while the target verifies this one, and there is no draft. Give one "
        "(draft.path=), or leave it out",
    )
    require(
        not overlap or family == "lm",
        f"{where}=true drafts the next round while the target verifies this one, and {family} "
        f"{REASONS.get(family or '', OF_HEADS)}. Use a draft language model (draft=lm), or {where}=false",
    )


def check_device(family: str | None, device: str | None, where: str) -> None:
    """Raise ConfigError for a draft of this family that cannot be on another device than the target."""
    require(
        device is None or family is not None,
        f"{where}={device} is where a draft lies, and there is none. Give one (draft.path=), or leave {where} out",
    )
    require(device is None or family == "lm", f"{where}={device}, and {family} {ELSEWHERE}. Leave {where} out")


def check_foresees(foresees: bool, confidence: bool, where: str) -> None:
    """Raise ConfigError for a draft that does not predict what becomes of its tokens and is to stop by that."""
    require(
        not confidence or foresees,
        f"{where}=true ends a round by what the draft predicts of its own tokens, and this draft predicts nothing. Use "
        f"adaptive=true alone, a DSpark head (draft=dspark), or {where}=false",
    )
