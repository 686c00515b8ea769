"""What an OpenAI-compatible server answers to a request for a completion, whichever of the common forms it takes, and
how the completion ended: its end token some servers give and some leave out."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from decode.common.errors import RunError
from distill.responses import Response
from distill.runtimes.probe import check_end

TokenIds = Literal["told", "of logprobs", "of the text"]
_AS_ID = "token_id:"
"""What vLLM writes before an id in place of a token's text."""


@dataclass(frozen=True)
class Position:
    """One written token."""

    token: int | None
    """Its id; None where the server gives its text alone, of which several tokens may be."""
    likeliest: list[tuple[int | None, float]]
    """(id, log p) by falling p."""


@dataclass(frozen=True)
class Answer:
    """One completion."""

    text: str
    finish_reason: str
    token_ids: list[int] | None
    """Where the server tells them."""
    positions: list[Position]
    """Of all written tokens; empty where no log-probabilities were asked for or told."""
    prompt_tokens: int | None
    written_tokens: int | None
    """As the server counts them."""

    @classmethod
    def parsed(cls, content: Any, where: str) -> Answer:
        """Raises RunError for what is no completion."""
        try:
            (choice,) = content["choices"]
            usage = content.get("usage") or {}
            return cls(
                str(choice.get("text") or ""),
                str(choice["finish_reason"]),
                choice.get("token_ids"),
                _positions(choice.get("logprobs") or {}),
                usage.get("prompt_tokens"),
                usage.get("completion_tokens"),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{where} answered a request for a completion by none ({error!r}): {str(content)[:200]}"
            ) from error

    @property
    def source(self) -> TokenIds:
        """How the ids of a text that is not empty are to be had."""
        if self.token_ids is not None:
            return "told"
        return (
            "of logprobs" if self.positions and all(one.token is not None for one in self.positions) else "of the text"
        )

    def lacks_positions(self, eos: Container[int | None]) -> bool:
        """llama.cpp tells nothing of a token that ends within a character, so that a text with such ones has holes."""
        has_end = bool(self.positions) and self.positions[-1].token in eos
        is_end_counted_alone = self.finish_reason != "length" and not has_end
        return self.written_tokens is not None and len(self.positions) < self.written_tokens - is_end_counted_alone

    def ids(self, source: TokenIds, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The ids of what was written. Raises RunError where they are no longer told in this way."""
        if source == "of the text":
            return tokenizer.encode(self.text.removesuffix("\ufffd"), add_special_tokens=False)  # half a character
        ids = self.token_ids if source == "told" else [one.token for one in self.positions]
        known = [one for one in ids or [] if isinstance(one, int)]
        if ids is None or len(known) < len(ids) or (self.text and not ids):
            raise RunError(
                f"the server does not say any more which tokens it wrote ({source} when the run started): it was "
                "started again with other settings. Start it as it was, and give resume=auto"
            )
        return known


def ended(answer: Answer, ids: list[int], source: TokenIds, eos: list[int], most: int, url: str) -> Response:
    """The response of these ids. An end that is left out is put back where it can be but one. Raises RunError for a
    text that ended by anything but an end of the target's or `most` tokens."""
    if answer.finish_reason == "length":
        count = len(ids) if answer.written_tokens is None or source != "of the text" else answer.written_tokens
        if count < most:
            raise RunError(
                f"the server at {url} cut a text at {count} tokens, and sampling.max_new_tokens={most}: its context "
                "is too short. Start it with a longer one (of each slot, with llama.cpp), and give resume=auto"
            )
        return Response(ids, "length")
    if answer.finish_reason not in ("stop", "eos_token"):
        raise RunError(f"the server at {url} ended a text for another reason than its end: {answer.finish_reason}")
    if ids and ids[-1] in eos:
        return Response(ids, "eos")
    if source == "told" and ids:
        check_end(url, ids[-1], eos)
    return Response([*ids, eos[0]], "eos") if len(eos) == 1 else Response(ids, "stop")


def _positions(told: Mapping[str, Any]) -> list[Position]:
    """Of a chat's form, which llama.cpp gives here too, or of the form of completions."""
    if told.get("content") is not None:
        return [
            Position(_id(one), _falling([(_id(other), other["logprob"]) for other in one.get("top_logprobs") or []]))
            for one in told["content"]
        ]
    tops = told.get("top_logprobs") or [None] * len(told.get("tokens") or [])
    return [
        Position(_id(token), _falling([(_id(name), value) for name, value in (top or {}).items()]))
        for token, top in zip(told.get("tokens") or [], tops, strict=True)
    ]


def _falling(pairs: list[tuple[int | None, Any]]) -> list[tuple[int | None, float]]:
    return sorted(((token, float(log_p)) for token, log_p in pairs), key=lambda pair: -pair[1])


def _id(told: Any) -> int | None:
    """Of {"id": 5}, {"token": "token_id:5"} or "token_id:5"."""
    if isinstance(told, Mapping):
        return told["id"] if isinstance(told.get("id"), int) else _id(told.get("token"))
    if isinstance(told, str) and told.startswith(_AS_ID) and told.removeprefix(_AS_ID).isdecimal():
        return int(told.removeprefix(_AS_ID))
    return None
