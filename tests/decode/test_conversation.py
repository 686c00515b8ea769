"""Several calls over one growing text: the same text as fresh calls, and only what is new is read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Conversation, generate
from decode.common.errors import ConfigError
from decode.drafters.lm import LMDraft
from tests.decode.checks import VOCAB
from tests.decode.heads import random_head
from tests.tiers import by_default
from tests.tiny import tiny_llama

TOLD = [0, 1, 7, 120]
"""New tokens of each prompt; the last one outgrows the first cache, of 256 slots."""


def target(dtype: torch.dtype = torch.float64) -> Any:
    return tiny_llama(VOCAB, num_layers=3, dtype=dtype, max_position_embeddings=1024).requires_grad_(False)


def drafters(model: Any) -> dict[str, Any]:
    draft = tiny_llama(VOCAB, num_layers=1, seed=3, dtype=model.dtype, max_position_embeddings=1024)
    near = tiny_llama(VOCAB, num_layers=3, dtype=model.dtype, max_position_embeddings=1024)
    near.lm_head.weight.data += 0.1 * torch.randn_like(near.lm_head.weight)
    heads = {name: random_head(name, model) for name in ("eagle3", "medusa")}
    return {"none": None, "unlike": LMDraft(draft), "near": LMDraft(near), **heads}


def grown(ids: Tensor, new: int) -> Tensor:
    more = torch.randint(0, VOCAB, (1, new), generator=torch.Generator().manual_seed(new))
    return torch.cat([ids, more], 1)


@pytest.mark.parametrize(
    ("name", "tree", "dtype"),
    by_default(
        2,
        [
            ("eagle3", "2x2x1", torch.float64),
            ("none", "chain", torch.float32),
            ("near", "chain", torch.float64),
            ("near", "2x2x1", torch.float32),
            ("unlike", "dynamic", torch.float64),
            ("medusa", "chain", torch.float32),
            ("near", "2x2x1", torch.float64),
        ],
    ),
)
def test_each_turn_reads_what_is_new_and_writes_what_a_fresh_call_writes(name: str, tree: str, dtype: Any) -> None:
    model = target(dtype)
    drafter, conversation, ids = drafters(model)[name], Conversation(), torch.arange(90)[None] % VOCAB
    settings: dict[str, Any] = {"max_new_tokens": 24, "tree": tree, "num_draft_tokens": 3, "eos_token_id": (9, 23)}
    for turn, new in enumerate(TOLD):
        ids = grown(ids, new)
        out = generate(model, drafter, ids, seed=turn, conversation=conversation, **settings)
        fresh = generate(model, drafter, ids, seed=turn, **settings)
        assert torch.equal(out.sequences, fresh.sequences)
        assert out.stats.num_prefilled == (new if turn else 89)
        assert fresh.stats.num_prefilled == ids.shape[1] - 1
        assert conversation.ids == out.sequences[0].tolist()
        if name == "near" and not turn:
            assert any(0 < one.accepted < one.drafted for one in out.stats.rounds), "nothing was accepted in part"
        ids = out.sequences


@pytest.mark.usefixtures("uncaptured")
def test_a_prompt_that_parts_from_the_text_continues_from_what_both_share() -> None:
    model, conversation, ids = target(), Conversation(), torch.arange(20)[None]
    draft = drafters(model)["near"]
    call: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": (), "seed": 3}
    generate(model, draft, ids, conversation=conversation, **call)
    for changed in (12, 0):
        other = ids.clone()
        other[0, changed] = 63
        out = generate(model, draft, other, conversation=conversation, **call)
        assert torch.equal(out.sequences, generate(model, draft, other, **call).sequences)
        assert out.stats.num_prefilled == 19 - changed
    shorter = generate(model, draft, other[:, :5], conversation=conversation, **call)
    assert torch.equal(shorter.sequences, generate(model, draft, other[:, :5], **call).sequences)
    assert shorter.stats.num_prefilled == 0


def test_a_call_that_failed_leaves_what_it_did_not_write_over() -> None:
    model, conversation, ids = target(), Conversation(), torch.arange(20)[None]
    call: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": (), "seed": 3}
    generate(model, None, ids, conversation=conversation, **call)

    def fail(event: Any) -> None:
        raise RuntimeError("stopped by the caller")

    other = torch.cat([ids[:, :15], ids[:, :9]], 1)
    with pytest.raises(RuntimeError, match="stopped by the caller"):
        generate(model, None, other, conversation=conversation, observer=fail, **call)
    out = generate(model, None, ids, conversation=conversation, **call)
    assert torch.equal(out.sequences, generate(model, None, ids, **call).sequences)
    assert out.stats.num_prefilled == 19 - 15


@pytest.mark.usefixtures("uncaptured")
def test_other_calls_meanwhile_do_not_write_into_it() -> None:
    model, ids = target(), torch.arange(20)[None]
    both = (Conversation(), Conversation())
    call: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": (), "seed": 3}
    texts = [ids, ids + 20]
    for _ in range(3):
        for at, conversation in enumerate(both):
            want = generate(model, None, texts[at], **call).sequences
            texts[at] = generate(model, None, texts[at], conversation=conversation, **call).sequences
            assert torch.equal(texts[at], want)


def test_what_a_conversation_cannot_be_used_for_is_refused() -> None:
    model, ids = target(), torch.arange(9)[None]
    call: dict[str, Any] = {"max_new_tokens": 2, "seed": 0}
    begun, draft = Conversation(), LMDraft(tiny_llama(VOCAB, num_layers=1, dtype=torch.float64))
    generate(model, None, ids, conversation=begun, **call)

    def again(event: Any) -> None:
        generate(model, None, ids, conversation=begun, **call)

    refused: list[tuple[str, tuple[Any, Any, Tensor], dict[str, Any]]] = [
        ("one text, and 2 sequences", (model, None, ids.repeat(2, 1)), {}),
        ("one text, and 3 sequences", (model, None, ids), {"num_return_sequences": 3}),
        ("strict=True", (model, None, ids), {"strict": True}),
        ("of type list", (model, None, ids), {"conversation": [1]}),
        ("another model", (target(), None, ids), {}),
        ("another drafter", (model, draft, ids), {}),
        ("in use by another call", (model, None, ids), {"observer": again}),
    ]
    for words, (target_model, drafter, prompt), settings in refused:
        asked: dict[str, Any] = {"conversation": begun} | call | settings
        with pytest.raises(ConfigError, match=words):
            generate(target_model, drafter, prompt, **asked)
    model.lm_head.weight.data = model.lm_head.weight + 1
    with pytest.raises(ConfigError, match="changed since this conversation began"):
        generate(model, None, ids, conversation=begun, **call)


def test_a_copy_begins_empty_and_disturbs_nothing() -> None:
    """Two conversations over one cache wrote over each other's keys: the first one went on in another text."""
    model, conversation = tiny_llama(dtype=torch.float64), Conversation()
    ids = torch.tensor([[5, 9, 2, 7]])
    call: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": (), "seed": 0}
    begun = generate(model, None, ids, conversation=conversation, **call).sequences
    for branch in (copy.copy(conversation), copy.deepcopy(conversation)):
        generate(model, None, torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), conversation=branch, **call)
    longer = torch.cat([begun, ids], 1)
    went_on = generate(model, None, longer, conversation=conversation, **call)
    assert torch.equal(went_on.sequences, generate(model, None, longer, **call).sequences)
