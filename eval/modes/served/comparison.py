"""Accepted tokens in the engine and in our decoder, on the same prompts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.common.errors import InputError
from decode.common.progress import progress
from decode.drafters.base import Drafter
from eval.modes.served.counting import Pair, Texts
from eval.modes.served.engine.metrics import Counters
from eval.modes.served.engine.server import Server, complete
from eval.modes.served.kept import Reply
from eval.modes.served.results import Verdict
from eval.results.statistics import bootstrap, ratio_of_sums

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
            "token): the engine samples. Give temperature 0, and start it with --generation-config vllm"
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
    alone = Pair(target, 1)
    for what, changed in tried.items():
        pairs = zip(changed, texts, strict=True)
        if all(changed) and all(alone.write([a], len(text), 0.0, 0) == [list(text)] for a, text in pairs):
            return what
    return None


_EARLY = 4
"""Tokens at the beginning of a text, where texts of one model part by rounding in few prompts at most."""


def ask(server: Server, prompts: Texts, new_tokens: int, temperature: float, seed: int, k: int, label: str) -> Reply:
    """One is asked after another, and the counters are read in between: so it is known
    which prompt they are of. A seed is given where tokens are drawn."""
    texts, each = [], []
    with progress(len(prompts), "prompts", label) as bar:
        before = server.counters()
        for row, prompt in enumerate(prompts):
            drawn = seed + row if temperature else None
            texts += complete(server, [prompt], new_tokens, temperature, drawn, 1).texts
            new = server.counters_since(before)
            each.append(first_places(new, k))
            before += new
            bar.update(1)
    return Reply(texts=texts, counters=each)


def first_places(counters: Counters, k: int) -> Counters:
    """Of drafts of k tokens, where the engine counts more places."""
    assert not any(counters.accepted[k:]), (counters, k)
    return Counters(counters.drafts, counters.drafted, counters.accepted[:k])


def ours(
    pair: Pair, drafter: Drafter, prompts: Texts, texts: Texts, temperature: float, seed: int, k: int
) -> list[Counters]:
    """Counters of our decoder by prompt, drafting as the engine does. Greedily: along the texts that the engine wrote,
    so that what is compared are drafts even where rounding made a text part from ours. Drawn: along texts that our
    target drew for itself."""
    limit = len(texts[0])
    if temperature:
        written = pair.write(prompts, limit + k, temperature, seed)
    else:
        written = extended(pair, prompts, texts, k)
    return pair.counters_along(drafter, prompts, written, limit, k)


def extended(pair: Pair, prompts: Texts, texts: Texts, k: int) -> list[list[int]]:
    """Greedy texts with k tokens more: the last round reaches beyond what was asked for."""
    begun = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    more = pair.write(begun, k, 0.0, 0)
    return [[*text, *behind] for text, behind in zip(texts, more, strict=True)]


def check_texts(pair: Pair, prompts: Texts, texts: Texts, engine: str) -> int:
    """How many of the engine's greedy texts are the target's own; InputError where they are another model's."""
    own = pair.write(prompts, len(texts[0]), 0.0, 0)
    early = sum(list(a[:_EARLY]) == list(b[:_EARLY]) for a, b in zip(texts, own, strict=True))
    if early * 2 < len(own):
        raise InputError(
            f"of {len(own)} greedy texts of {engine}, {early} begin as the target's own do: {list(texts[0][:8])} "
            f"there, {own[0][:8]} here; {other_texts(pair.target, prompts, texts)}. Serve the same model, or give its "
            "target.path, target.revision and target.dtype"
        )
    return sum(list(a) == list(b) for a, b in zip(texts, own, strict=True))


def judge(engine: Sequence[Counters], own: Sequence[Counters], temperature: float, dtype: str, seed: int) -> Verdict:
    """Whether both draft alike. Greedily in float32 all counters are equal; else rounding or chance makes them differ,
    and intervals over prompts have to overlap at every position."""
    if temperature == 0 and list(engine) == list(own):
        return "equal"
    if temperature == 0 and dtype == "float32":
        return "parted"
    pairs = zip(intervals(engine, seed), intervals(own, seed), strict=True)
    overlap = (a is None or b is None or (a[0] <= b[1] and b[0] <= a[1]) for a, b in pairs)
    return "within intervals" if all(overlap) else "parted"


def intervals(counters: Sequence[Counters], seed: int) -> list[list[float] | None]:
    """95% intervals over prompts of acceptance by position; None where some resamples do not reach it."""
    found = []
    reached = [(one.drafts, *one.accepted) for one in counters]
    for place in range(len(counters[0].accepted)):
        columns = np.array([[each[place + 1], each[place]] for each in reached], dtype=float)
        found.append(_interval(columns, seed))
    return found


def _interval(columns: np.ndarray, seed: int) -> list[float] | None:  # (prompts, 2)
    if not columns[:, 1].any():
        return None
    if columns[:, 1].all() and np.ptp(columns[:, 0] / columns[:, 1]) == 0:  # every resample says the same
        return [float(columns[0, 0] / columns[0, 1])] * 2
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings(action="ignore"):
        ci95 = bootstrap(columns, ratio_of_sums, seed).ci95
    return None if ci95 is None or not np.isfinite(ci95).all() else list(ci95)
