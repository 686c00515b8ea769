"""How a completion ended, and its end token, which some servers give and some leave out."""

from __future__ import annotations

from decode.common.errors import RunError
from distill.responses import Response
from distill.runtimes.openai_api.answers import Answer, TokenIds


def ended(answer: Answer, ids: list[int], source: TokenIds, eos: list[int], most: int, url: str) -> Response:
    """The response of these ids. An end that is left out is put back where it can be but one. Raises RunError for a
    text that ended by anything but an end of the target's or `most` tokens."""
    if answer.finish_reason == "length":
        count = len(ids) if answer.written_tokens is None or source != "of the text" else answer.written_tokens
        if count < most:
            raise RunError(
                f"the server at {url} cut a text at {count} tokens, and sampling.max_new_tokens={most}: its context "
                "is too short for the prompt and the response. Start it with a longer one (of each slot, with "
                "llama.cpp), and give resume=auto"
            )
        return Response(ids, "length")
    if answer.finish_reason not in ("stop", "eos_token"):
        raise RunError(f"the server at {url} ended a text for another reason than its end: {answer.finish_reason}")
    if ids and ids[-1] in eos:
        return Response(ids, "eos")
    if source == "told" and ids:
        raise RunError(
            f"the server at {url} ended a text at token {ids[-1]}, and the target's ends are {eos}: its generation "
            "config is another one; start vLLM with --generation-config vllm"
        )
    return Response([*ids, eos[0]], "eos") if len(eos) == 1 else Response(ids, "stop")
