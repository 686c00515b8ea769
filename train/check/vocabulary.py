"""The draft's tokens and the target's: sizes, the map of a reduced vocabulary, ends of text."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers import GenerationConfig

from decode.formats.vocabulary import IDS, MARKS, OFFSETS, drafted_ids
from decode.sampling.stopping import own_eos_ids
from train.check.blocks import mask_token
from train.check.subject import Finding, Subject

_REDUCED = {"medusa": "truncated_vocab_size"}
AS_OFFSETS = "Write d2t = ids - arange(len(ids)), of the ascending ids"


def sizes(subject: Subject) -> Iterator[Finding]:
    """vocab_size is the target's padded one, and what is drafted is no more than that."""
    fields, vocab = subject.folder.fields, subject.target.vocab_size
    own, drafted = fields.get("vocab_size"), _drafted(subject)
    has_mask_row = subject.form == "dspark" and own == vocab + 1 and mask_token(subject) == vocab
    if own != vocab and not has_mask_row:
        yield Finding(
            f"vocab_size={own}, and the target's is {vocab} (padding entries included)",
            "vLLM, SGLang and transformers refuse a draft model of another size, and heads would look up other rows",
            "Write the target's vocab_size; of a draft model, train one on the target's tokens",
        )
    if drafted is not None and own is not None and drafted > own:
        yield Finding(
            f"{_key(subject)}={drafted} is more than vocab_size={own}",
            "the engine makes room for tokens that the target does not have",
            "Write the number of tokens that are drafted",
        )
    has_map = any(name in subject.folder.stored for name in (OFFSETS, IDS))
    if drafted is not None and drafted < vocab and not has_map and subject.form != "lm":
        yield Finding(
            f"{_key(subject)}={drafted} of {vocab} tokens, and the folder holds neither d2t nor token_map",
            "vLLM takes draft id i for the target's token i without a word, so that little is accepted, or stops",
            "Write d2t (what to add to a draft id), of Medusa heads token_map (the ids)",
        )


def reduced_head(subject: Subject) -> Iterator[Finding]:
    """A reduced vocabulary has rows of its own."""
    drafted, vocab = _drafted(subject), subject.target.vocab_size
    if drafted is None or drafted >= vocab or subject.form == "lm":
        return
    if not any("lm_head" in name for name in subject.folder.stored):
        yield Finding(
            f"{_key(subject)}={drafted} of {vocab} tokens, and the folder holds no lm_head.weight",
            "SGLang leaves it random; vLLM takes the target's, whose rows stand for other tokens",
            "Write the target's rows of the drafted tokens",
        )


def tokens(subject: Subject) -> Iterator[Finding]:
    """Draft ids stand for ascending tokens of the target, and the mask t2d marks the same ones."""
    ids, vocab = drafted_ids(subject.folder), subject.target.vocab_size
    if ids is None:
        return
    ascending = bool((ids.diff() > 0).all() and (ids >= 0).all() and (ids < vocab).all())
    if not ascending and OFFSETS in subject.folder.stored and _is_absolute(subject.folder.tensor(OFFSETS), vocab):
        yield Finding(
            f"d2t holds the target's ids themselves ({subject.folder.tensor(OFFSETS)[:3].tolist()}, ...), not what to "
            "add to a draft id",
            "vLLM stops with an IndexError, or drafts other tokens",
            AS_OFFSETS,
        )
    elif not ascending:
        yield Finding(
            f"draft ids stand for {ids[:3].tolist()} ... {ids[-1:].tolist()}: not ascending tokens of 0 to {vocab - 1}",
            "drafted tokens stand for other ones, or lie outside the target's scores",
            AS_OFFSETS
            if OFFSETS in subject.folder.stored
            else "Write the ascending ids of the drafted tokens as token_map",
        )
    yield from _mask_of_tokens(subject, ids)
    yield from _ends_of_text(subject, ids)


def _is_absolute(values: Tensor, vocab: int) -> bool:
    return bool((values >= 0).all() and (values < vocab).all() and (values.long().diff() > 0).all())


def _mask_of_tokens(subject: Subject, ids: Tensor) -> Iterator[Finding]:
    if MARKS not in subject.folder.stored:
        return
    marked = subject.folder.tensor(MARKS).nonzero().flatten()
    if marked.tolist() != sorted(ids.tolist()):
        yield Finding(
            f"t2d marks {len(marked)} tokens, and d2t stands for {len(ids)}, not all of them the same",
            "the speculators library trains and measures on one set of tokens, engines draft the other",
            "Write t2d as the mask of the tokens d2t + arange",
        )


def _ends_of_text(subject: Subject, ids: Tensor) -> Iterator[Finding]:
    known = set(ids.tolist())
    missing = sorted(ends_of_text(subject) - known)
    if missing:
        yield Finding(
            f"the draft's {len(known)} tokens lack the target's end of text {missing}",
            "the draft never says that a text ends, and drafts past it",
            "Train with a draft vocabulary that holds it (draft.head.vocab=N here always does)",
        )


def ends_of_text(subject: Subject) -> set[int]:
    """Tokens that end a text by the target's generation_config.json, config.json and tokenizer, chat turns included
    where those say so."""
    vocab = subject.target.vocab_size
    found = set(own_eos_ids(subject.ends.head.model.generation_config, vocab))
    text = GenerationConfig(eos_token_id=subject.target.config.get_text_config().eos_token_id)
    found |= set(own_eos_ids(text, vocab))
    tokenizer = subject.target.tokenizer
    end = None if tokenizer is None else tokenizer.eos_token_id
    return found | ({end} if isinstance(end, int) and 0 <= end < vocab else set())


def _key(subject: Subject) -> str:
    return _REDUCED.get(subject.form, "draft_vocab_size")


def _drafted(subject: Subject) -> int | None:
    return subject.folder.fields.get(_key(subject))
