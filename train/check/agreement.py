"""How a draft does on texts that its target writes, computed from the folder alone: what an engine's counters should
come near to, and where they do not, the engine reads the folder otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode import generate
from decode.common.errors import InputError
from decode.common.progress import get_logger
from decode.formats.states import listed
from decode.models.head_targets import check_taps
from decode.models.hidden_states import FINAL, Taps
from decode.models.load import load_model
from train.check.config import CheckConfig
from train.check.replicas import REPLICAS
from train.check.served import served
from train.check.subject import Finding, Subject

PROMPT = 8
"""Random tokens; the target writes on from there."""
LEAST = 0.05
"""Share of first tokens that are accepted of a draft that is read as it was trained; a random one has 1 in V."""
BETTER = 1.2
MOST_STEPS = 4
log = get_logger("check")


@dataclass(frozen=True)
class Rounds:
    """What a decoder would count."""

    drafts: int
    """Rounds."""
    accepted: tuple[int, ...]
    """Tokens at each position of a round."""

    def __str__(self) -> str:
        return f"{self.drafts} rounds, accepted by position {list(self.accepted)}"

    @property
    def first(self) -> float:
        """Share of rounds whose first token is accepted."""
        return self.accepted[0] / self.drafts


@torch.no_grad()
def measure(subject: Subject, cfg: CheckConfig) -> Iterator[Finding]:
    """Greedy rounds on the target's own greedy texts; findings where next to nothing is accepted, and where hidden
    states of the layers beside the listed ones do better."""
    if subject.form != "lm":
        try:
            check_taps(subject.target.config, (FINAL,), subject.target.path)
        except InputError as error:
            log.info("agreement left out: %s", error)
            return
    if subject.form == "eagle3" and subject.folder.fields["num_hidden_layers"] > 1:
        log.info("agreement left out: EAGLE-3 heads are computed here of one layer alone")
        return
    model = load_model(cfg.target)
    texts = _texts(model, cfg)
    found = _of_model(subject, texts) if subject.form == "lm" else _of_head(subject, model, texts, 0)
    where = "texts that the target wrote from random tokens, more is accepted on real ones"
    log.info("on %d %s: %s", len(texts), where, found)
    log.info("compare an engine's counters with these: vLLM's spec_decode_num_accepted_tokens_per_pos")
    for shift in (-1, 1) if listed(subject.folder.fields) else ():
        other = _of_head(subject, model, texts, shift)
        if other is not None and found is not None and other.first > BETTER * found.first + 1 / found.drafts:
            yield Finding(
                f"with the hidden states one layer {'lower' if shift < 0 else 'higher'} than listed: {other}; as "
                f"listed: {found}",
                "the ids were written by the other convention, and engines read states that the draft does not know",
                "Write indices of hidden_states (0 the embeddings) at the top, and layers, one less, in eagle_config "
                "and target_layer_ids",
                check="agreement",
            )
    if found is not None and found.first < LEAST:
        yield Finding(
            f"next to nothing is accepted: {found}",
            "an engine that reads the folder as this check does is slower with it than without",
            "Compare with what was measured in training: another target, other states, another order in fc",
            check="agreement",
        )


def _texts(model: PreTrainedModel, cfg: CheckConfig) -> Tensor:
    generator = torch.Generator().manual_seed(cfg.seed)
    size = model.config.get_text_config().vocab_size
    prompts = torch.randint(size, (cfg.prompts, PROMPT), generator=generator).to(model.device)
    whole = torch.ones_like(prompts)  # else pad tokens would be padding
    settings = {"max_new_tokens": cfg.tokens, "temperature": 0.0, "eos_token_id": ()}
    return generate(model, None, prompts, whole, **settings).sequences


def _of_head(subject: Subject, model: PreTrainedModel, texts: Tensor, shift: int) -> Rounds | None:
    """Rounds with hidden states `shift` layers higher than listed; None where the target has none there."""
    lists = listed(subject.folder.fields)
    taps = tuple(sorted(tap + shift for tap in next(iter(lists.values())))) if lists else (FINAL,)
    if lists and not all(0 <= tap <= subject.target.num_layers for tap in taps):
        return None
    read, most = served(subject), subject.most
    steps = MOST_STEPS if most is None else min(MOST_STEPS, most)
    hooks = Taps(model, taps)
    with hooks:
        model(texts, use_cache=False)
    features = hooks.stacked().float().cpu()
    places = torch.arange(PROMPT, texts.shape[1] - steps)
    drafted = [
        REPLICAS[subject.form](read, ids, states, places, steps).argmax(-1)
        for ids, states in zip(texts.cpu(), features, strict=True)
    ]
    return _rounds(torch.stack(drafted), texts.cpu(), places)


def _of_model(subject: Subject, texts: Tensor) -> Rounds:
    """A draft model's, by transformers."""
    try:
        draft = AutoModelForCausalLM.from_pretrained(subject.folder.path, dtype=torch.float32).eval()
        likeliest = draft(texts.cpu()).logits.argmax(-1)
    except (AttributeError, TypeError) as error:  # what its JSON files say is of another kind than it should be
        raise InputError(
            f"{subject.folder.path} cannot be run as a draft model ({error}), so what it accepts is not known. Copy it "
            "again from where it was trained, or give tokens=0 to leave this out"
        ) from error
    places = torch.arange(PROMPT, texts.shape[1] - MOST_STEPS)
    return _rounds(torch.stack([likeliest[:, places + step] for step in range(MOST_STEPS)], 1), texts.cpu(), places)


def _rounds(drafted: Tensor, texts: Tensor, places: Tensor) -> Rounds:
    """drafted (B, S, N) tokens of S steps at places (N,) of texts (B, T). A draft is fed the target's tokens, which
    are its own as far as those are accepted."""
    each = [n for some, ids in zip(drafted, texts, strict=True) for n in rounds_of(accepted(some, ids, places))]
    return Rounds(len(each), tuple(sum(n > step for n in each) for step in range(drafted.shape[1])))


def accepted(drafted: Tensor, ids: Tensor, places: Tensor) -> list[int]:
    """At each place, how many of the drafted (S, N) tokens the text goes on with."""
    wanted = torch.stack([ids[places + 1 + step] for step in range(len(drafted))])
    return (drafted == wanted).long().cumprod(0).sum(0).tolist()


def rounds_of(right: Sequence[int]) -> list[int]:
    """Tokens accepted in each round of a text: the next one begins behind the target's own token."""
    place, rounds = 0, []
    while place < len(right):
        rounds.append(right[place])
        place += right[place] + 1
    return rounds
