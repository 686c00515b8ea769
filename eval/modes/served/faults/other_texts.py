"""Why an engine's greedy text is not ours: drafts never change it, so target, prompts or sampling differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode import generate

SAMPLED = 0.3
"""Nats a token that surprise may lie above entropy: of the target's own samples they agree on average."""
FEW = 0.9
"""Share of tokens that are the target's likeliest, from which on a text is greedy but for ties."""


@torch.no_grad()
def other_texts(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> str | None:
    """A sentence on `texts`, what the engine wrote behind each of `prompts` at temperature 0; None where they are the
    target's own, token for token."""
    scored = [_scored(target, prompt, text) for prompt, text in zip(prompts, texts, strict=True) if text]
    likeliest = torch.cat([one for one, _, _ in scored]).float()
    wrong = sum(not bool(one.all()) for one, _, _ in scored)
    if not wrong:
        return None
    told = f"{wrong} of {len(scored)} texts are not the target's own"
    prefix = _prefix(target, prompts, texts)
    if prefix is not None:
        return f"{told}: they are what it writes {prefix}"
    share = float(likeliest.mean())
    if share >= FEW:
        return (
            f"{told}, and {share:.1%} of their tokens are: ties between tokens fall otherwise, as in another precision "
            "or another kernel; give the engine the target's --dtype"
        )
    surprise, entropy = (float(torch.cat([one[place] for one in scored]).mean()) for place in (1, 2))
    if surprise <= entropy + SAMPLED:
        return (
            f"{told}; they are as likely as its samples are (surprise {surprise:.2f}, entropy {entropy:.2f} nats a "
            "token): the engine samples. Give temperature 0, and start it with --generation-config vllm, since a "
            "target's generation_config.json sets defaults"
        )
    return (
        f"{told}, and it would not write them (surprise {surprise:.2f}, entropy {entropy:.2f} nats a token): the "
        "server has another target, another revision of it, or an adapter"
    )


def _scored(target: PreTrainedModel, prompt: Sequence[int], text: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token of a text: whether it is the likeliest, how surprising it is and what was to be expected, in
    nats."""
    ids = torch.tensor([*prompt, *text], device=target.device)
    rows = target(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float().cpu()
    logp, new = rows.log_softmax(-1), ids[len(prompt) :].cpu()
    surprise = -logp.gather(1, new[:, None])[:, 0]
    return logp.argmax(-1) == new, surprise, -(logp.exp() * logp).sum(-1)


def _prefix(target: PreTrainedModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> str | None:
    """Whether the engine read the prompts with a token more in front, or one less."""
    bos = target.config.get_text_config().bos_token_id
    tried = {"without the first token of the prompts": [list(prompt[1:]) for prompt in prompts]}
    if isinstance(bos, int):
        tried[f"with the beginning of text ({bos}) before the prompts"] = [[bos, *prompt] for prompt in prompts]
    for what, changed in tried.items():
        if all(changed) and all(_written(target, *pair) for pair in zip(changed, texts, strict=True)):
            return what
    return None


def _written(target: PreTrainedModel, prompt: Sequence[int], text: Sequence[int]) -> bool:
    ids = torch.tensor([list(prompt)])
    settings = {"max_new_tokens": len(text), "eos_token_id": (), "temperature": 0.0}
    whole = torch.ones_like(ids)  # else pad tokens would be padding
    return generate(target, None, ids, whole, **settings).sequences[0, len(prompt) :].tolist() == list(text)
