"""Examples to read: the text of a prompt or conversation as the target will see it, learned tokens marked."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from distill.config import DistillConfig
from distill.prompts.chat import encode_prompt
from distill.prompts.drawn_prompts import DrawnPrompt, corpus_text, turns

OPEN, CLOSE = "\u27e6", "\u27e7"  # white square brackets: no corpus of code or chat has them
RESPONSE = f"{OPEN}... the target's response ...{CLOSE}"


def write_lines(lines: Sequence[str]) -> None:
    """Lines on standard output: what the user asked to see, as opposed to the log."""
    sys.stdout.write("".join(line + "\n" for line in lines))
    sys.stdout.flush()


def examples(
    prompts: Sequence[DrawnPrompt], tokenizer: PreTrainedTokenizerBase, config: DistillConfig
) -> Iterator[str]:
    """The first `config.show` prompts as text; what stands between the double brackets is learned."""
    for prompt in prompts[: config.show]:
        ids, mask, tail = _sequence(prompt, tokenizer, config)
        yield caption(prompt.document, prompt.split)
        yield marked(tokenizer, ids, mask) + tail


def caption(document: str, split: str) -> str:
    """What stands above an example."""
    return f"--- {document} ({split}), learned tokens between {OPEN} and {CLOSE}"


def marked(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], mask: Sequence[bool]) -> str:
    """The decoded ids with each run of learned tokens in double brackets, special tokens shown."""
    pieces: list[str] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            text = str(tokenizer.decode(list(ids[start:end])))
            pieces.append(f"{OPEN}{text}{CLOSE}" if mask[start] else text)
            start = end
    return "".join(pieces)


def _sequence(
    prompt: DrawnPrompt, tokenizer: PreTrainedTokenizerBase, config: DistillConfig
) -> tuple[list[int], list[bool], str]:
    if config.responses == "corpus":
        return *corpus_text(prompt, tokenizer, config), ""
    if prompt.ids is not None:
        first = 1 if config.data.learn_prompt else len(prompt.ids)
        return prompt.ids, [place >= first for place in range(len(prompt.ids))], RESPONSE
    messages = prompt.messages or []
    ids = encode_prompt(tokenizer, messages[: turns(messages)[-1]], prompt.document)
    return ids, [False] * len(ids), RESPONSE
