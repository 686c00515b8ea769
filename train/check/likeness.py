"""What a draft takes over from its target: rotary positions, context, the epsilon of norms, and a target that the
engine can draft for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from decode.formats.rope import DEFAULT_BASE, FACTOR_BY_LENGTH, older_rope_of, plain_rope, written_rope
from train.check.subject import Finding, Subject
from train.drafts.rope import rope_of
from train.export.engines.base import PLAIN

JUDGED = PLAIN | {"gemma3_text", "exaone_moe"}
"""Types of targets of which it is known what engines do with them."""
_LIKE_TARGET = "Write the target's"


def target_type(subject: Subject) -> Iterator[Finding]:
    """The engine hands out hidden states of such a target, where that is known."""
    kind = subject.target.config.get_text_config().model_type
    for engine in subject.engines:
        known = subject.loads(engine).targets
        if known is not None and kind in JUDGED and kind not in known:
            yield Finding(
                f"the target is a {kind} model, and {engine.title} drafts so for {', '.join(sorted(known))}",
                "it refuses the pair, or hands out no hidden states",
                "Serve it with another engine (format=all says which), or train draft=lm",
            )


def rope(subject: Subject) -> Iterator[Finding]:
    """The target's rotary positions, and the same where config.json says it twice."""
    fields = subject.folder.fields
    told = written_rope(fields)
    new, old = fields.get("rope_parameters"), older_rope_of(fields)
    is_one = new is not None and not any(isinstance(one, dict) for one in new.values())  # else one each kind of layer
    if new and is_one and old is not None and plain_rope(new) != old:
        yield Finding(
            f"rope_parameters say {plain_rope(new)}, and rope_theta with rope_scaling {old}",
            "engines on transformers 5 read the first, older ones the second",
            _LIKE_TARGET + " in both places",
        )
    theirs = None if subject.form == "lm" else _of_target(subject)
    if theirs is None:
        return
    if told and told["rope_type"] in FACTOR_BY_LENGTH:
        told = plain_rope({"factor": theirs.get("factor"), **told})
    if told is None:
        told = {"rope_type": "default", "rope_theta": DEFAULT_BASE}
        if told != theirs:
            yield Finding(
                f"config.json has neither rope_parameters nor rope_theta, and the target has {theirs}",
                f"engines take a base of {DEFAULT_BASE:g} without a word, and acceptance falls with the length of text",
                _LIKE_TARGET + " in both places",
            )
    elif told != theirs:
        yield Finding(
            f"rotary positions are {told}, and the target's are {theirs}",
            "the engine turns queries and keys by other angles than in training, without a word, unless the draft was "
            "trained so: acceptance falls with the length of the text",
            _LIKE_TARGET,
        )


def _of_target(subject: Subject) -> dict[str, Any] | None:
    has_rope = getattr(subject.target.config.get_text_config(), "rope_parameters", None)
    return plain_rope(rope_of(subject.target, same_head_dim=True)) if has_rope else None


def sizes(subject: Subject) -> Iterator[Finding]:
    """Width, context and epsilon."""
    fields, text = subject.folder.fields, subject.target.config.get_text_config()
    width = fields.get("hidden_size")
    if width != text.hidden_size:
        yield Finding(
            f"hidden_size={width}, and the target's is {text.hidden_size}",
            "the target's embedding and output head, which engines share with the draft, do not fit",
            "Serve the target that the draft was trained on",
        )
    known, theirs = fields.get("max_position_embeddings"), subject.target.max_positions
    if known is not None and known < theirs:
        yield Finding(
            f"max_position_embeddings={known}, and the target's is {theirs}",
            "the table of rotary positions ends there: longer texts are drafted from the last row, or the engine stops",
            _LIKE_TARGET,
        )
    eps = getattr(text, "rms_norm_eps", None)
    if subject.folder.is_trained_here and fields.get("rms_norm_eps") != eps and eps is not None:
        yield Finding(
            f"rms_norm_eps={fields.get('rms_norm_eps')}, and the draft was trained with the target's {eps}",
            "the engine norms otherwise than in training, without a word",
            _LIKE_TARGET,
        )
